"""What nvidia-smi and the kernel's log say of GPUs, from what real ones printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.probing import REPO, quiet

from remote_payload.host.kernel_log import parse_journal, parse_kmsg, read_kernel_log
from remote_payload.host.probe_gpus import FIELDS, MIB, parse_apps, parse_gpus, probe_gpus
from remote_payload.host.probe_health import parse_health, parse_topology, parse_xids, probe_health

SMI_CSV = (REPO / "tests" / "cases" / "nvidia-smi-8x-rtx-pro-6000.csv").read_text()
QUERIED = [field for _, field, _ in FIELDS]


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


DATA = REPO / "tests" / "data" / "nvidia-smi"


class TestHealth:
    def test_a_healthy_h200(self) -> None:
        found = parse_health((DATA / "h200-clean.xml").read_text())
        assert found["cuda"] == "13.0"
        (gpu,) = found["gpus"]
        assert gpu["uuid"] == "GPU-00000000-1111-2222-3333-000000000000"
        assert gpu["bus"] == "00000000:00:06.0"
        assert gpu["persistence"] is True
        assert (gpu["ecc"], gpu["ecc_uncorrected"], gpu["ecc_uncorrected_ever"]) == (True, 0, 0)
        assert (gpu["remap_pending"], gpu["remap_failed"], gpu["rows_remapped"]) == (False, False, 0)
        assert (gpu["retire_pending"], gpu["recovery"], gpu["throttled"], gpu["mig"]) == (None, None, [], False)
        assert (gpu["link_gen"], gpu["link_gen_max"], gpu["link_width"], gpu["link_width_max"]) == (5, 5, 16, 16)

    @pytest.mark.parametrize(
        ("old", "new", "key", "value"),
        [
            ("<remapped_row_pending>No", "<remapped_row_pending>Yes", "remap_pending", True),
            ("<remapped_row_failure>No", "<remapped_row_failure>Yes", "remap_failed", True),
            ("<gpu_recovery_action>None", "<gpu_recovery_action>GPU Reset", "recovery", "GPU Reset"),
            ("<persistence_mode>Enabled", "<persistence_mode>Disabled", "persistence", False),
            ("<current_mig>Disabled", "<current_mig>Enabled", "mig", True),
            ("<dram_uncorrectable>0", "<dram_uncorrectable>2", "ecc_uncorrected", 2),
            ("<channel_repair_pending>No", "<channel_repair_pending>Yes", "repair_pending", True),
            (
                "<clocks_event_reason_hw_thermal_slowdown>Not Active",
                "<clocks_event_reason_hw_thermal_slowdown>Active",
                "throttled",
                ["hw_thermal_slowdown"],
            ),
        ],
    )
    def test_each_fault_is_read(self, old: str, new: str, key: str, value: Any) -> None:
        text = (DATA / "h200-clean.xml").read_text()
        assert old in text
        assert parse_health(text.replace(old, new, 1))["gpus"][0][key] == value

    def test_what_a_driver_does_not_know_is_null(self) -> None:
        found = parse_health("<nvidia_smi_log><gpu id='0'><uuid>GPU-1</uuid></gpu></nvidia_smi_log>")
        (gpu,) = found["gpus"]
        assert {key for key, value in gpu.items() if value is not None} == {"uuid", "bus", "throttled"}

    def test_links_of_four_real_gpus(self) -> None:
        links = parse_topology((DATA / "h200-x4.topo.txt").read_text())
        assert links is not None
        assert links["GPU0"] == {"GPU1": "NV18", "GPU2": "NV18", "GPU3": "NV18"}
        peers = parse_topology((DATA / "h200-x4.p2p.txt").read_text())
        assert peers is not None
        assert {state for row in peers.values() for state in row.values()} == {"OK"}
        assert parse_topology((DATA / "h200.topo.txt").read_text()) == {"GPU0": {}}
        assert parse_topology("Failed to initialize NVML") is None

    def test_the_section_asks_for_all_of_it(self, fake_smi: Any) -> None:
        fake_smi(
            f'case "$*" in "-q -x") cat {DATA}/h200-clean.xml;; "topo -m") cat {DATA}/h200-x4.topo.txt;;'
            " *) echo 'not supported'; exit 3;; esac"
        )
        found = probe_health(quiet)
        assert len(found["gpus"]) == 1
        assert found["links"]["GPU3"]["GPU0"] == "NV18"
        assert found["p2p"] is None
        assert found["xids"].keys() == {"source", "error", "found"}

    def test_a_driver_that_fails_is_an_error_with_its_words(self, fake_smi: Any) -> None:
        fake_smi("echo 'Unable to determine the device handle'; exit 14")
        with pytest.raises(RuntimeError, match="exit code 14: Unable to determine"):
            probe_health(quiet)


class TestKernelLog:
    RECORDS = (
        b"5,1,1000000,-;Linux version 6.8\n",
        b"3,2,5000000,-;NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', GPU has fallen off the bus.\n SUB=pci\n",
        b"3,3,9000000,-;NVRM: Xid (PCI:0000:c1:00): 31, pid=4711, name=python, MMU Fault\n",
    )

    def test_xids_with_bus_code_and_age(self) -> None:
        lines = [parse_kmsg(record, 100.0) for record in self.RECORDS]
        found = parse_xids([line for line in lines if line])
        assert [(xid["bus"], xid["code"], xid["age_s"]) for xid in found] == [
            ("0000:41:00", 79, 95.0), ("0000:c1:00", 31, 91.0),
        ]  # fmt: skip
        assert found[0]["text"] == "pid='<unknown>', GPU has fallen off the bus."
        assert parse_kmsg(b"garbage", 1.0) is None

    def test_the_journal_says_the_same(self) -> None:
        output = "[    5.000000] host kernel: NVRM: Xid (PCI:0000:41:00): 79, gone\n-- Boot --\n"
        assert parse_xids(parse_journal(output, 65.0)) == [
            {"bus": "0000:41:00", "code": 79, "text": "gone", "age_s": 60.0}
        ]

    def test_a_log_that_may_not_be_read_says_so(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        log = read_kernel_log(quiet, str(tmp_path / "none"))
        assert (log.source, log.lines) == (None, [])
        assert log.error == f"{tmp_path / 'none'}: No such file or directory"
        journalctl = tmp_path / "journalctl"
        journalctl.write_text("#!/bin/sh\necho 'No journal files were opened due to insufficient permissions.' >&2\n")
        journalctl.chmod(0o755)
        assert "insufficient permissions" in str(read_kernel_log(quiet, str(tmp_path / "none")).error)
