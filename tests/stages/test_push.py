from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.local_transport import LocalTransport
from support.proxy import TcpProxy

from controller.core.errors import ConnectionLost, ExitCode, HostUnusable
from controller.core.model import Host
from controller.payload import Payload, load_payload
from controller.stages import introduce, push
from controller.stages.base import host_error, python_error
from controller.transport.base import Transport
from controller.transport.bootstrap import MAX_LINE_BYTES, command_line
from controller.transport.ssh import SshTarget, SshTransport
from remote_payload.host.framing import manifest_digest
from remote_payload.host.layout import Layout
from remote_payload.host.protocol import HostRecord
from tools.sshd import SshdUnavailable, SshServer


def host(workdir: Path, python: str = sys.executable) -> HostRecord:
    return {
        "name": "gpu1",
        "address": "127.0.0.1",
        "port": 22,
        "user": "me",
        "workdir": str(workdir),
        "python": python,
        "bootstrap_python": python,
        "accelerator": "cpu",
        "gpus": 0,
        "lease_dir": None,
    }


class Events:
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def __call__(self, event_type: str, /, **fields: object) -> None:
        self.seen.append({"type": event_type, **fields})


def do_push(transport: Transport, workdir: Path, **options: Any) -> push.PushOutcome:
    return push.run(transport, host(workdir), emit=Events(), **options)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    try:
        with SshServer(tmp_path / "sshd") as running:
            yield running
    except SshdUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def over_ssh(server: SshServer) -> Iterator[SshTransport]:
    with SshTransport(SshTarget(host=server.alias, ssh_config=str(server.ssh_config))) as transport:
        yield transport


# ------------------------------------------------------------------------------------------- payload


def test_the_payload_is_the_installed_package_without_tests_and_byte_code() -> None:
    payload = load_payload()
    assert {"remote_payload/__init__.py", "remote_payload/host/protocol.py"} <= set(payload.files)
    assert all(name.endswith(".py") and "__pycache__" not in name for name in payload.files)
    assert payload.digest == manifest_digest(dict(payload.manifest))


def test_the_hash_depends_on_names_and_contents_only(tmp_path: Path) -> None:
    def digest(name: str, text: str) -> str:
        folder = tmp_path / f"{name}-{text}"
        for junk in ("tests/test_a.py", "__pycache__/a.py", "notes.txt"):
            (folder / junk).parent.mkdir(parents=True, exist_ok=True)
            (folder / junk).write_text(name + text)
        (folder / f"{name}.py").write_text(text)
        return load_payload(folder).digest

    assert digest("a", "1") == load_payload(tmp_path / "a-1").digest
    assert len({digest("a", "1"), digest("a", "2"), digest("b", "1")}) == 3


def test_the_archive_is_reproducible_and_holds_the_files() -> None:
    payload = load_payload()
    data = payload.archive()
    assert data == load_payload().archive()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
        held = {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]
    assert held == dict(payload.files)


def test_the_receiver_fits_a_command_line() -> None:
    line = command_line(["python3", "-I", "-S", "-c", load_payload().receiver], None, "0" * 16)
    assert len(line) < MAX_LINE_BYTES / 2


# ---------------------------------------------------------------------------------------------- push


def test_the_first_push_sends_and_the_second_asks(tmp_path: Path) -> None:
    transport, events = LocalTransport(), Events()
    first = push.run(transport, host(tmp_path / "w"), emit=events)
    assert (first.skipped, first.hash) == (False, load_payload().digest)
    assert first.path == Layout(str(tmp_path / "w")).payload(first.hash)
    assert [event["status"] for event in events.seen] == ["started", "done"]
    assert events.seen[-1]["seconds"] >= 0
    second = do_push(transport, tmp_path / "w")
    assert second.skipped
    assert second.path == first.path
    assert second.bytes_sent < first.bytes_sent
    assert len(transport.started) == 2  # one remote command each


def test_the_pushed_payload_runs_isolated(tmp_path: Path) -> None:
    outcome = do_push(LocalTransport(), tmp_path / "w")
    use = "import remote_payload.host.protocol as p; print(p.__file__)"
    code = f"import sys; sys.path.insert(0, {outcome.path!r}); {use}"
    done = subprocess.run([sys.executable, "-I", "-S", "-B", "-c", code], capture_output=True, timeout=60, check=True)
    assert done.stdout.decode().strip().startswith(outcome.path)


def test_a_changed_payload_goes_beside_the_old_one(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "host").mkdir(parents=True)
    for name in ("host/receive.py", "host/protocol.py"):
        (source / name).write_bytes(load_payload().files[f"remote_payload/{name}"])
    old = do_push(LocalTransport(), tmp_path / "w", payload=load_payload(source))
    (source / "more.py").write_text("x = 1\n")
    new = do_push(LocalTransport(), tmp_path / "w", payload=load_payload(source))
    assert not new.skipped
    assert old.path != new.path
    assert Path(old.path).is_dir()


@pytest.mark.sshd
def test_a_missing_python_names_the_key_of_hosts_toml(tmp_path: Path, over_ssh: SshTransport) -> None:
    events = Events()
    with pytest.raises(HostUnusable) as failure:
        push.run(over_ssh, host(tmp_path, "/opt/none/bin/python3"), emit=events)
    assert failure.value.exit_code is ExitCode.USAGE
    assert failure.value.code == "python-missing"
    assert "/opt/none/bin/python3" in failure.value.what
    assert "bootstrap_python" in failure.value.fix
    assert "gpu1" in failure.value.fix
    assert events.seen[-1]["status"] == "failed"


@pytest.mark.sshd
def test_a_program_that_is_no_python_is_explained(tmp_path: Path, over_ssh: SshTransport) -> None:
    with pytest.raises(HostUnusable) as failure:
        push.run(over_ssh, host(tmp_path, "/bin/false"), emit=Events())
    assert failure.value.code == "python-unusable"
    assert "exit code 1" in failure.value.what


@pytest.mark.parametrize("program", ["/bin/true", "/bin/echo", "/bin/ls"])
def test_a_program_that_takes_any_arguments_is_no_python_either(program: str, tmp_path: Path) -> None:
    """Whether it is pushed to or asked what it is: neither is a defect of ctl."""
    described = Host.model_validate(
        {"name": "gpu1", "address": "gpu1", "python": "/p/python", "workdir": str(tmp_path / "w"), "output_roots":
         [str(tmp_path)], "accelerator": "cpu", "bootstrap_python": program}
    )  # fmt: skip
    for action in (
        lambda: push.run(LocalTransport(), host(tmp_path, program), emit=Events()),
        lambda: introduce.run(LocalTransport(), described),
    ):
        with pytest.raises(HostUnusable) as failure:
            action()
        assert (failure.value.code, failure.value.exit_code) == ("python-unusable", ExitCode.USAGE)
        assert f"{program} on gpu1" in failure.value.what
        assert "`bootstrap_python` of [hosts.gpu1] in hosts.toml" in failure.value.fix


def test_a_python_that_failed_or_was_killed_is_not_called_none() -> None:
    for code, stderr in ((1, b"Traceback (most recent call last):\nMemoryError"), (137, b"")):
        error = python_error("gpu1", "python3", code, stderr, failed="push-failed")
        assert (error.code, error.exit_code) == ("push-failed", ExitCode.UNEXPECTED)


def test_a_verb_that_finds_no_python_is_a_matter_of_hosts_toml() -> None:
    error = host_error("ps", 127, b"", b"sh: 1: /opt/none: not found")
    assert (error.code, error.exit_code) == ("python-missing", ExitCode.USAGE)
    assert host_error("ps", 1, b"", b"Traceback").exit_code is ExitCode.UNEXPECTED


def test_an_error_of_the_host_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w").chmod(0o777)
    with pytest.raises(HostUnusable) as failure:
        do_push(LocalTransport(), tmp_path / "w")
    assert (failure.value.code, failure.value.exit_code) == ("workdir-unsafe", ExitCode.USAGE)


@pytest.mark.parametrize("workdir", ["/proc/ctl", "/dev/null/ctl"])
def test_a_workdir_that_cannot_be_made_is_configuration(workdir: str) -> None:
    with pytest.raises(HostUnusable) as failure:
        do_push(LocalTransport(), Path(workdir))
    assert (failure.value.code, failure.value.exit_code) == ("workdir-unusable", ExitCode.USAGE)
    assert "`workdir` in hosts.toml" in failure.value.fix


def big_payload(tmp_path: Path) -> Payload:
    """Several megabytes that do not compress, so that a cut falls into the transfer."""
    source = tmp_path / "big"
    (source / "host").mkdir(parents=True)
    (source / "host" / "receive.py").write_bytes(load_payload().files["remote_payload/host/receive.py"])
    (source / "data.py").write_bytes(os.urandom(5 << 20))
    return load_payload(source)


@pytest.mark.sshd
def test_over_ssh(tmp_path: Path, over_ssh: SshTransport) -> None:
    payload = big_payload(tmp_path)
    first = do_push(over_ssh, tmp_path / "w", payload=payload)
    assert first.bytes_sent > 5 << 20
    assert do_push(over_ssh, tmp_path / "w", payload=payload).skipped


@pytest.mark.sshd
def test_a_push_that_is_cut_leaves_nothing_that_counts(tmp_path: Path, server: SshServer) -> None:
    payload = big_payload(tmp_path)
    workdir = tmp_path / "w"
    with TcpProxy(server.address, server.port) as proxy:
        server.trust(server.known_hosts, port=proxy.port)
        config = tmp_path / "config"
        config.write_text(server.config_block(port=proxy.port))
        with SshTransport(SshTarget(host=server.alias, ssh_config=str(config))) as transport:
            cut_during(proxy, transport, workdir, payload)
            assert not (workdir / "payload" / payload.digest).exists()
            # The same command again: a new connection, and a whole payload.
            assert not do_push(transport, workdir, payload=payload).skipped
            assert do_push(transport, workdir, payload=payload).skipped


def cut_during(proxy: TcpProxy, transport: SshTransport, workdir: Path, payload: Payload) -> None:
    """Push, and cut the connection when the archive is under way."""
    original: Callable[[], bytes] = payload.archive

    class Cutting(Payload):
        def archive(self) -> bytes:
            proxy.cut()
            return original()

    cutting = Cutting(files=payload.files, manifest=payload.manifest, digest=payload.digest)
    with pytest.raises(ConnectionLost):
        do_push(transport, workdir, payload=cutting)
