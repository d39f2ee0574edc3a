"""docs/preflight.md names every code that a check can give, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from controller.core.findingcodes import CODES
from remote_payload.host.probe import DEADLINES_S

REPO = Path(__file__).resolve().parents[2]
MAKERS = {"passed", "warned", "failed", "judge"}

MADE_FROM_NAMES = {
    "f'probe-{name}'": {"probe-SECTION"},
    "f\"limit-{name.replace('_', '-')}\"": {"limit-open-files", "limit-processes"},
    "f'tool-{name}'": {"tool-ninja", "tool-nvcc"},
}
"""Codes that are put together, as written in the source, and what comes of them."""


def codes_in_source() -> set[str]:
    found = set()
    for path in (REPO / "controller" / "core").glob("checks*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not node.args or _name(node.func) not in MAKERS:
                continue
            code = node.args[0]
            if isinstance(code, ast.Constant):
                found.add(str(code.value))
            elif isinstance(code, ast.JoinedStr) and "problem['code']" in ast.unparse(code):
                found |= output_problems()
            elif isinstance(code, ast.JoinedStr):
                found |= MADE_FROM_NAMES[ast.unparse(code)]
            else:
                assert ast.unparse(code) == "error.code", f"{path}: a code that this test cannot follow"
    return found


def output_problems() -> set[str]:
    """The codes of what stands against an output folder, as the host's guard and listing give them."""
    found = set()
    for name in ("guard", "listing"):
        text = (REPO / "remote_payload" / "host" / f"{name}.py").read_text()
        found |= set(re.findall(r"(?:Problem\(\s*code=|\"code\": |Refused\(\s*)\"([a-z-]+)\"", text))
    return {f"output-{code}" for code in found}


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.IfExp):  # (failed if ... else warned)(...)
        return _name(node.body)
    return node.id if isinstance(node, ast.Name) else ""


def test_every_code_is_documented_and_none_that_does_not_exist() -> None:
    text = (REPO / "docs" / "preflight.md").read_text()
    documented = re.findall(r"^\| `([A-Za-z0-9-]+)` \|", text, re.MULTILINE)
    assert len(documented) == len(set(documented))
    assert set(documented) == codes_in_source()
    assert documented == sorted(documented)


def test_every_code_may_be_allowed_and_no_other() -> None:
    parts = {f"probe-{name}" for name in DEADLINES_S}
    assert (codes_in_source() - {"probe-SECTION"}) | parts == CODES


def test_every_part_of_the_look_is_named() -> None:
    text = (REPO / "docs" / "preflight.md").read_text()
    (row,) = re.findall(r"^\| `probe-SECTION` \| (.*) \|$", text, re.MULTILINE)
    assert [name for name in DEADLINES_S if not re.search(rf"\b{name}\b", row)] == []
