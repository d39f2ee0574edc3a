"""`ctl --help` and completion answer at once: nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("fabric", "paramiko", "pydantic", "rich.live", "matplotlib", "tenacity", "torch", "vllm", "invoke")

PROBE = """
import json, sys
sys.argv = ["ctl", *json.loads(sys.argv[1])]
from controller.cli import main
try:
    main()
except SystemExit as stop:
    code = stop.code
print("\\n" + json.dumps({"code": code, "modules": sorted(sys.modules)}))
"""


# typer itself converts a command's arguments with pydantic, so below the top level that one cannot be avoided.
TYPERS_OWN = ("pydantic",)


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [(["--help"], ()), (["--version"], ()), (["extract", "--help"], TYPERS_OWN), (["config", "--help"], TYPERS_OWN)],
)
def test_help_imports_nothing_heavy(arguments: list[str], allowed: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(arguments)], capture_output=True, text=True, timeout=60, check=True
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["code"] == 0
    heavy = [name for name in HEAVY if name not in allowed]
    assert [name for name in heavy if name in report["modules"]] == []


def test_the_notebook_api_is_exactly_what_is_exported() -> None:
    import controller

    for name in controller.__all__:
        assert getattr(controller, name).__module__.startswith("controller.")
    assert dir(controller) == sorted(controller.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = controller.nothing


def test_every_module_can_be_imported_alone() -> None:
    root = Path(__file__).parents[1]
    names = [
        ".".join(path.relative_to(root).with_suffix("").parts)
        for folder in ("controller", "remote_payload/host")
        for path in sorted((root / folder).rglob("*.py"))
        if path.stem not in ("__init__", "__main__")
    ]
    # One process for all would hide a module that only works after another was imported; a fork keeps each alone.
    script = (
        "import importlib, os, sys\n"
        "failed = []\n"
        "for name in sys.argv[1:]:\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            importlib.import_module(name)\n"
        "        except BaseException:\n"
        "            import traceback; traceback.print_exc(); os._exit(1)\n"
        "        os._exit(0)\n"
        "    if os.waitpid(pid, 0)[1]: failed.append(name)\n"
        "print(failed)\n"
    )
    argv = [sys.executable, "-W", "error", "-c", script, *names]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True, cwd=root)
    assert done.stdout.strip() == "[]", done.stderr
