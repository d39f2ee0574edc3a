"""What a real nvidia-smi printed on an H200: clean, held by a process, and held by one that it cannot see."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from remote_payload.host.probe_gpus import FIELDS, MIB, parse_apps, parse_gpus

RECORDED = Path(__file__).resolve().parents[1] / "data" / "nvidia-smi"
FIELD_NAMES = [field for _, field, _ in FIELDS]


def recorded(state: str, kind: str) -> str:
    return (RECORDED / f"h200-{state}.{kind}").read_text()


@pytest.mark.parametrize(
    ("state", "used_mib", "holders"),
    [
        ("clean", 0, []),
        ("busy", 2575, [(3620, 2566)]),
        ("dirty", 2575, []),  # the same GPU at the same time, asked in another PID namespace
    ],
)
def test_the_probe_reads_memory_and_holders(state: str, used_mib: int, holders: list[tuple[int, int]]) -> None:
    (gpu,), unparsed = parse_gpus(recorded(state, "gpus.csv"), FIELD_NAMES)
    assert unparsed == []
    assert (gpu["name"], gpu["memory_used"], gpu["memory_total"]) == ("NVIDIA H200", used_mib * MIB, 143771 * MIB)
    assert (gpu["driver"], gpu["ecc_uncorrected"], gpu["compute_cap"]) == ("580.159.04", 0, "9.0")
    apps = parse_apps(recorded(state, "apps.csv"))
    assert [(app["pid"], app["memory_used"]) for app in apps] == [(pid, used * MIB) for pid, used in holders]
    assert all(app["gpu_uuid"] == gpu["uuid"] for app in apps)


@pytest.mark.parametrize("state", ["clean", "busy", "dirty"])
def test_the_queries_agree_with_the_full_report(state: str) -> None:
    root = ElementTree.fromstring(recorded(state, "xml"))
    (gpu,), _ = parse_gpus(recorded(state, "gpus.csv"), FIELD_NAMES)
    assert root.findtext("gpu/fb_memory_usage/used") == f"{gpu['memory_used'] // MIB} MiB"
    listed = [int(info.findtext("pid") or 0) for info in root.findall("gpu/processes/process_info")]
    assert listed == [app["pid"] for app in parse_apps(recorded(state, "apps.csv"))]
