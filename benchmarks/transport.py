"""What the connection costs, beside what ssh, rsync and scp cost over the same line.

    python -m benchmarks.transport            all, a few minutes
    python -m benchmarks.transport --quick    a tenth of the bytes and repetitions

Everything runs over a real sshd on loopback, behind a relay that adds 0, 20 and 100 ms of round-trip time. Absolute
numbers are this machine's; the ratios in one run, and the goals beside them, are what counts. Medians of wall-clock
seconds.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path

import paramiko

from benchmarks.delayline import DelayLine
from controller import lookup, pipeline
from controller.commandverbs import plan_command
from controller.core.events import Event
from controller.payload import load_payload
from controller.stages import push
from controller.transport.base import Transport
from controller.transport.link import WINDOW_BYTES
from controller.transport.openssh import OpensshTransport
from controller.transport.ssh import SshTransport
from controller.transport.sshconfig import SshTarget
from controller.workspace import load_workspace
from tools.demo import DATA, MODEL
from tools.sshd import SshServer

RTTS_MS = (0, 20, 100)
COMMAND_TIMEOUT_S = 600.0
MB = 1_000_000
ROUND_TRIP_AT_MOST = 1.25
"""What passes for one round trip: two would be 2.0, and the clocks of a busy machine are off by some milliseconds."""

DETACHED = 8
"""Exit code of `ctl extract --detach` once the host has confirmed."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured."""

    repeats: int
    log_bytes: int
    memory_bytes: int


FULL = Scale(repeats=15, log_bytes=200 * MB, memory_bytes=1000 * MB)
QUICK = Scale(repeats=5, log_bytes=20 * MB, memory_bytes=100 * MB)


class Bench:
    """A host on loopback with a project of its own in `root`, seen over a delay line."""

    def __init__(self, root: Path, server: SshServer, line: DelayLine) -> None:
        self.root = root
        self.server = server
        self.line = line
        server.trust(server.known_hosts, port=line.port)
        self.config = root / "ssh_config"
        self.config.write_text(server.config_block(port=line.port))
        self.workdir = root / "host"
        (root / "hosts.toml").write_text(
            f'schema = 1\n[hosts.bench]\naddress = "{server.alias}"\nssh_config = "ssh_config"\n'
            f'transport = "paramiko"\naccelerator = "cpu"\npython = "{sys.executable}"\n'
            f'bootstrap_python = "{sys.executable}"\nworkdir = "{self.workdir}"\nlease_dir = "{root}/lease"\n'
            f'output_roots = ["output"]\nplaybook = "demo"\n'
        )
        # What `ctl extract` looks at before it launches; its job is stopped before it has loaded anything.
        for kind, name in (("models", MODEL), ("data", DATA)):
            (self.workdir / kind).mkdir(parents=True)
            generator = [sys.executable, "tools/tiny_models.py", str(self.workdir / kind), name]
            shell(generator, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (self.workdir / "output").mkdir()

    @property
    def target(self) -> SshTarget:
        return SshTarget(host=self.server.alias, ssh_config=str(self.config))

    @contextmanager
    def master(self) -> Iterator[list[str]]:
        """A plain ssh control master; yields the ssh command that uses it."""
        ssh = ["ssh", "-F", str(self.config), "-S", str(self.root / "m")]
        start = [*ssh, "-M", "-N", "-f", "-o", "ControlPersist=600", self.server.alias]
        subprocess.run(start, check=True, timeout=60, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield ssh
        finally:
            subprocess.run([*ssh, "-O", "exit", self.server.alias], check=True, timeout=60, capture_output=True)


def median_s(action: Callable[[], object], repeats: int) -> float:
    """Return the median wall-clock seconds of `repeats` calls after one that warms up."""
    seconds = []
    for number in range(repeats + 1):
        started = time.perf_counter()
        action()
        if number:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def once_s(action: Callable[[], object]) -> float:
    """Return the wall-clock seconds of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def shell(command: list[str], **options: object) -> None:
    """Run a local command that has to succeed."""
    subprocess.run(command, check=True, timeout=COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL, **options)  # type: ignore[call-overload] # keyword arguments of subprocess.run


def row(what: str, rtt_ms: int, seconds: float, against: str = "", other: float = 0.0, goal: str = "") -> None:
    beside = f"{against} {other * 1000:.0f} ms, ratio {seconds / other:.2f}" if other else ""
    print(f"{what:<34} RTT {rtt_ms:>3} ms  {seconds * 1000:>8.0f} ms   {beside:<44} {goal}".rstrip(), flush=True)


def verdict(goal: str, met: bool) -> str:
    return f"goal {goal}: {'met' if met else 'MISSED'}"


# ------------------------------------------------------------------------------------- what is measured


def warm_command(bench: Bench, rtt_ms: int, scale: Scale) -> None:
    """A command over a connection that stands."""
    with bench.master() as ssh:
        plain = median_s(lambda: shell([*ssh, bench.server.alias, "true"]), scale.repeats)
    goal_ms = 2 * rtt_ms + 10
    for name, kind in (("paramiko", SshTransport), ("openssh", OpensshTransport)):
        with kind(bench.target) as transport:
            seconds = median_s(lambda: transport.run(["true"], timeout=60), scale.repeats)
        goal = verdict(f"{goal_ms} ms (2 RTT + 10 ms)", seconds * 1000 <= goal_ms)
        row(f"warm command, {name}", rtt_ms, seconds, "ssh with ControlMaster", plain, goal)


def push_payload(bench: Bench, rtt_ms: int, scale: Scale, without_rtt: float | None) -> float:
    """The payload to an empty folder, and again when it is there, against rsync and a loop of SFTP puts.

    `without_rtt` is what an unchanged one takes over a line without delay, in seconds: that is the host's own time.
    What the delay adds to it, divided by the delay, is the number of round trips. Returns the seconds of this one.
    """
    payload = load_payload()
    source = bench.root / "payload"
    for name, data in payload.files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    record = load_workspace(cwd=bench.root).config.host("bench").record()
    with SshTransport(bench.target) as transport:
        transport.run(["true"], timeout=60)

        def ours() -> None:
            push.run(transport, record, emit=lambda _kind, /, **_fields: None, payload=payload)

        shutil.rmtree(bench.workdir / "payload", ignore_errors=True)
        first = once_s(ours)
        again = median_s(ours, scale.repeats)
        warm = median_s(lambda: transport.run(["true"], timeout=60), scale.repeats)
    with bench.master() as ssh:
        rsync = ["rsync", "-a", "-e", " ".join(ssh), f"{source}/", f"{bench.server.alias}:{bench.root}/rsynced"]
        if shutil.which("rsync"):
            rsync_first, rsync_again = once_s(lambda: shell(rsync)), median_s(lambda: shell(rsync), scale.repeats)
            row("push, first time", rtt_ms, first, "rsync", rsync_first)
            row("push, unchanged", rtt_ms, again, "rsync", rsync_again, trips(again, without_rtt, rtt_ms))
        else:
            print("rsync is not installed: apt-get install rsync")
    row("push, first time", rtt_ms, first, "a loop of SFTP puts", once_s(lambda: put_loop(bench, source)))
    row("  a warm `true` for comparison", rtt_ms, warm)
    return again


def trips(seconds: float, without_rtt: float | None, rtt_ms: int) -> str:
    """Say how many round trips an unchanged push took. A busy host's own time varies by some of them at 20 ms."""
    if without_rtt is None:
        return "the host's own time"
    count = (seconds - without_rtt) * 1000 / rtt_ms
    return verdict(f"1 RTT, {count:.2f} beside the host's own time", count < ROUND_TRIP_AT_MOST)


def put_loop(bench: Bench, source: Path) -> None:
    """What most scripts do: mkdir and put, file by file."""
    client = paramiko.SSHClient()
    client.load_host_keys(str(bench.server.known_hosts))
    client.connect(
        "127.0.0.1", bench.line.port, bench.server.user, key_filename=str(bench.server.user_key), allow_agent=False
    )
    with client, client.open_sftp() as sftp:
        target = f"{bench.root}/put-{time.monotonic_ns()}"
        sftp.mkdir(target)
        for path in sorted(source.rglob("*")):
            remote = f"{target}/{path.relative_to(source)}"
            if path.is_dir():
                sftp.mkdir(remote)
            else:
                sftp.put(str(path), remote)


def until_confirmed(bench: Bench, rtt_ms: int, scale: Scale) -> None:
    """From the start of `ctl extract` to the supervisor's word: Python itself, connect, push, preflight, launch."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "CTL_CONFIG": str(bench.root / "hosts.toml")}

    def ctl(*words: str) -> int:
        done = subprocess.run(
            [sys.executable, "-m", "controller", *words], cwd=bench.root, env=environment, check=False,
            timeout=COMMAND_TIMEOUT_S, stdin=subprocess.DEVNULL, capture_output=True,
        )  # fmt: skip
        if done.returncode not in (0, DETACHED):
            raise SystemExit(done.stderr.decode())
        return done.returncode

    seconds = []
    for _ in range(min(3, scale.repeats) + 1):
        seconds.append(once_s(lambda: ctl("extract", "--host", "bench", "--yes", "--rehearse", "never", "--detach")))
        ctl("stop", "--last", "--grace", "0")
    confirmed = statistics.median(seconds[1:])
    row("`ctl extract` to the confirmation", rtt_ms, confirmed, "ssh with a new connection", fresh_ssh(bench))


def fresh_ssh(bench: Bench) -> float:
    return median_s(lambda: shell(["ssh", "-F", str(bench.config), bench.server.alias, "true"]), 3)


def finished_run(bench: Bench, size: int) -> str:
    """Make a run whose log holds `size` bytes, and return its id once it has ended."""
    script = f"yes 'step 1234 loss 0.5678 tokens/s 91011 and so on until the line is long' | head -c {size}"
    with chdir(bench.root):
        intention = plan_command("bench", ["sh", "-c", script], name="log", cwd=None, wait=False, tracebacks=False)
    intention.plan["job"]["limits"]["log_cap_bytes"] = 2 * size + (64 << 20)
    with pipeline.launch(intention, confirm=lambda _outputs, _listings: True) as run:
        run.wait(COMMAND_TIMEOUT_S)
        if run.error() is not None:
            raise SystemExit(str(run.error()))
        shutil.rmtree(run.folder.path)
        return run.id


class Meter:
    """A sink that counts bytes and notes the resident memory of this process as they pass."""

    def __init__(self) -> None:
        self.bytes = 0
        self.rss: list[tuple[int, int]] = []

    def event(self, event: Event) -> None:
        """Events do not matter here."""

    def log(self, data: bytes) -> None:
        self.bytes += len(data)
        if not self.rss or self.bytes - self.rss[-1][0] >= 10 * MB:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.rss.append((self.bytes, pages * resource.getpagesize()))


def catch_up(bench: Bench, run_id: str) -> tuple[Meter, float]:
    """Attach to a run from nothing and copy all of it; nothing is left behind.

    Returns the meter and the seconds of the copying: the connection stands by then, as that of the rival does.
    """
    meter = Meter()
    with lookup.open_run(load_workspace(cwd=bench.root), run_id, "bench", sinks=[meter]) as run:
        run.context.transport.connect()
        seconds = once_s(run.watch)
        shutil.rmtree(run.folder.path)
    return meter, seconds


def log_catch_up(bench: Bench, rtt_ms: int, scale: Scale, run_id: str) -> None:
    """The whole log to a workstation that has none of it, against `ssh cat` into a file."""
    log = f"{bench.workdir}/runs/{run_id}/log"
    with bench.master() as ssh, open(bench.root / "cat", "wb") as copy:
        plain = once_s(lambda: shell([*ssh, bench.server.alias, f"cat {log}/*.log"], stdout=copy))
    assert (bench.root / "cat").stat().st_size == scale.log_bytes
    with SshTransport(bench.target) as transport:
        ours = once_s(lambda: stream(transport, log))
    _, seconds = catch_up(bench, run_id)
    speed = scale.log_bytes / seconds / MB
    row("the transport alone, `cat`", rtt_ms, ours, "ssh cat", plain)
    goal = verdict("50 MB/s, 0.5 of ssh", speed >= 50 and plain / seconds >= 0.5)
    said = f"{speed:.0f} MB/s, {plain / seconds:.2f} of ssh; {goal}"
    row(f"log catch-up of {scale.log_bytes // MB} MB", rtt_ms, seconds, "ssh cat", plain, said)


def stream(transport: Transport, log: str) -> None:
    process = transport.start(["sh", "-c", f"cat {log}/*.log"])
    while process.read(timeout=60):
        continue
    process.close()


def memory(bench: Bench, scale: Scale) -> None:
    """Resident memory while a long log passes: it must not grow with the log.

    What has arrived and is not on disk yet, a window at most, comes and goes; more than that would be growth.
    """
    meter, _ = catch_up(bench, finished_run(bench, scale.memory_bytes))
    fifth = scale.memory_bytes // 5
    peaks = [max(rss for at, rss in meter.rss if n * fifth < at <= (n + 1) * fifth) // MB for n in range(5)]
    flat = verdict("flat but for a window of 16 MiB", max(peaks) - min(peaks) <= WINDOW_BYTES // MB + 1)
    print(f"memory while {meter.bytes // MB} MB of log passed, peak of each fifth in MB: {peaks}; {flat}")


def conditions() -> None:
    """Print what the numbers depend on: versions, processors, and how busy others keep them."""
    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True, timeout=60).stderr.strip()
    print(f"{time.strftime('%Y-%m-%d')}; {ssh}; paramiko {paramiko.__version__}; Python {sys.version.split()[0]}")
    print(f"{os.cpu_count()} processors, load average {os.getloadavg()[0]:.1f} at the start", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a tenth of the bytes and repetitions")
    scale = QUICK if parser.parse_args().quick else FULL
    conditions()
    with tempfile.TemporaryDirectory(prefix="ctl-b-", dir="/tmp") as folder:
        root = Path(folder)
        os.environ["XDG_RUNTIME_DIR"] = folder
        server = SshServer(root / "ssh", extra=["Subsystem sftp internal-sftp"])
        with server, DelayLine(server.address, server.port) as line:
            bench = Bench(root, server, line)
            run_id = finished_run(bench, scale.log_bytes)
            for rtt_ms in RTTS_MS:
                line.set_rtt_ms(rtt_ms)
                warm_command(bench, rtt_ms, scale)
                until_confirmed(bench, rtt_ms, scale)
                log_catch_up(bench, rtt_ms, scale, run_id)
            without_rtt: float | None = None
            for rtt_ms in RTTS_MS:
                line.set_rtt_ms(rtt_ms)
                seconds = push_payload(bench, rtt_ms, scale, without_rtt)
                without_rtt = seconds if without_rtt is None else without_rtt
            line.set_rtt_ms(0)
            memory(bench, scale)
    print(f"load average {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
