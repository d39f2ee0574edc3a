"""`ctl preflight` over a real sshd: several hosts, and engine arguments."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from e2e.conftest import Project

pytestmark = pytest.mark.sshd

DEADLINE_S = 60.0


@pytest.fixture
def hosts(project: Project) -> Any:
    """A hosts.toml with the demo's host, one with another Python, and one where nobody listens."""
    demo = tomllib.loads((project.root / ".demo" / "hosts.toml").read_text())["hosts"]["demo"]
    tables = {
        "demo": demo,
        "other": {**demo, "python": "/nowhere/bin/python"},
        "gone": {**demo, "address": "127.0.0.1"},
        "roots": {**demo, "output_roots": ["/elsewhere"]},
    }
    tables["gone"].update(port=1, transport="openssh")
    path = project.root / "several.toml"
    lines = ["schema = 1"]
    for name, table in tables.items():
        lines.append(f"[hosts.{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
        for key, inner in table.items():
            if isinstance(inner, dict):
                lines.append(f"[hosts.{name}.{key}]")
                lines += [f"{variable} = {json.dumps(value)}" for variable, value in inner.items()]
    path.write_text("\n".join(lines) + "\n")
    return {"CTL_CONFIG": str(path)}


def test_hosts_are_looked_at_side_by_side(project: Project, hosts: dict[str, str]) -> None:
    words = ("preflight", "--host", "demo", "--host", "other", "--playbook", "demo", "--stale", "clear")
    looked = project.ctl(*words, "--json", **hosts)
    assert looked.returncode == 3, looked.stderr
    document = json.loads(looked.stdout)
    demo, other = document["hosts"]
    assert (demo["host"], other["host"], document["ok"]) == ("demo", "other", False)
    assert demo["ok"], [finding for finding in demo["findings"] if finding["level"] == "fail"]
    assert "python-missing" in [finding["code"] for finding in other["findings"] if finding["level"] == "fail"]
    assert demo["seconds"] > 0
    assert {"disk", "login", "toolchain", "lengths", "history"} <= demo["sections"].keys()

    shown = project.ctl(*words, **hosts)
    assert shown.returncode == 3, shown.stderr
    (heading,) = [line for line in shown.stdout.splitlines() if line.startswith("check")]
    assert heading.split() == ["check", "demo", "other"]
    (row,) = [line for line in shown.stdout.splitlines() if line.startswith("python-missing")]
    assert row.split()[1:] == ["-", "✗", "fail"]
    assert "looked at in" in shown.stdout


def test_a_host_that_cannot_be_looked_at_stands_beside_those_that_can(
    project: Project, hosts: dict[str, str]
) -> None:
    named = [word for host in ("demo", "gone", "roots", "demo") for word in ("--host", host)]
    words = ("preflight", *named, "--playbook", "demo", "--stale", "clear")
    half = project.ctl(*words, "--json", **hosts)
    assert half.returncode == 4, half.stderr
    demo, gone, roots = json.loads(half.stdout)["hosts"]
    assert demo["findings"]
    assert (gone["ok"], "findings" in gone) == (False, False)
    assert gone["error"]["what"]
    assert "output" in roots["error"]["what"]

    shown = project.ctl(*words, **hosts).stdout.splitlines()
    assert shown[0].split() == ["check", "demo", "gone", "roots"]
    assert shown[1].split() == ["looked", "at", "✓", "ok", "✗", "unreachable", "✗", "configuration"]
    for name, error in (("gone", gone["error"]), ("roots", roots["error"])):
        heading = shown.index(f"host {name}")
        assert shown[heading + 1] == f"✗ {error['what']}"


def test_an_unknown_engine_argument_is_found_before_the_load(project: Project) -> None:
    name = project.playbook("typo", ("max_num_seqs = 8", 'enforce_eagre = true\nmax_num_seqs = "eight"'))
    document = project.json("preflight", "--host", "demo", "--playbook", name, "--stale", "clear", code=3)
    unknown, value = [finding for finding in document["findings"] if finding["level"] == "fail"]
    lines = (project.root / "playbooks" / "typo.toml").read_text().splitlines()
    first = lines.index("enforce_eagre = true") + 1
    assert unknown["code"] == "engine-argument"
    assert f"typo.toml:{first}: did you mean `enforce_eager`?" in unknown["fix"]
    assert value["code"] == "engine-value"
    assert value["what"].startswith('[engine] max_num_seqs is "eight"; vLLM ')
    assert f"typo.toml:{first + 1}: " in value["fix"]
    refused = project.json("extract", "--host", "demo", "--playbook", name, "--stale", "clear", "--yes", code=3)
    assert refused["error"]["code"] == "engine-argument"
