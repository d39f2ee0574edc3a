"""What the workstation makes of a host that looks again before it deletes, and does not find what was shown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.hostrun import HostRun
from support.stubhost import StubHost

from controller.core.errors import ExitCode, RefusedError, RemoteFailed
from controller.stages import sweep, tidy
from controller.stages.base import Context
from remote_payload.host.layout import OWNER_MARKER
from remote_payload.host.liveness import user_name
from remote_payload.host.protocol import OwnedOutput, Plan

OWNER = "20260101-000000-abcd03"
RUN = "20260102-000000-abcdef"


@pytest.fixture
def host(tmp_path: Path) -> HostRun:
    return HostRun(tmp_path)


@pytest.fixture
def ctx(host: HostRun) -> Context:
    return StubHost(host.workdir).context()


@pytest.fixture
def output(host: HostRun) -> OwnedOutput:
    folder = host.folder / "root" / "out"
    folder.mkdir(parents=True)
    (folder / "hs_0.safetensors").write_text("x")
    (folder / OWNER_MARKER).write_text(json.dumps({"wire": 1, "run_id": OWNER, "owner": user_name(os.getuid())}))
    return {
        "path": str(folder), "root": str(folder.parent), "stale": "clear", "adopt": False, "digest": None,
        "entries": 0, "bytes": 0,
    }  # fmt: skip


def write_more(output: OwnedOutput, host: HostRun) -> None:
    Path(output["path"], "hs_1.safetensors").write_text("more")


def take_it(output: OwnedOutput, host: HostRun) -> None:
    """A run began there whose records nobody can read: it counts as under way."""
    plan = host.workdir / "runs" / RUN / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.write_text("{")


def lose_the_marker(output: OwnedOutput, host: HostRun) -> None:
    Path(output["path"], OWNER_MARKER).unlink()


def make_it_a_link(output: OwnedOutput, host: HostRun) -> None:
    os.rename(output["path"], output["path"] + "-moved")
    os.symlink(output["path"] + "-moved", output["path"])


CASES = {
    "clear-changed": write_more,
    "output-in-use": take_it,
    "output-foreign": lose_the_marker,
    "output-symlink": make_it_a_link,
}


@pytest.mark.parametrize("code", CASES)
def test_what_changed_since_it_was_shown_is_a_refusal_and_nothing_is_deleted(
    host: HostRun, ctx: Context, output: OwnedOutput, code: str
) -> None:
    shown = sweep.look(ctx, output)
    CASES[code](output, host)
    with pytest.raises(RefusedError) as caught:
        sweep.run(ctx, shown, RUN)
    assert (caught.value.code, caught.value.exit_code) == (code, ExitCode.REFUSED)
    assert Path(output["path"], "hs_0.safetensors").read_text() == "x"


def test_a_deletion_that_broke_off_is_no_refusal(
    ctx: Context, output: OwnedOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where something may be gone, "refused" would say that nothing is."""
    shown = sweep.look(ctx, output)
    error = {"code": "output-not-deleted", "what": "1 entries could not be deleted, 1 were", "why": "", "fix": ""}

    def answer(*_: object, **__: object) -> dict[str, Any]:
        raise RemoteFailed(error["what"], code=error["code"])

    monkeypatch.setattr(Context, "call_json", answer)
    with pytest.raises(RemoteFailed) as caught:
        sweep.run(ctx, shown, RUN)
    assert (caught.value.code, caught.value.exit_code) == ("output-not-deleted", ExitCode.UNEXPECTED)


def test_what_a_fix_would_do_has_changed_since_it_was_shown(host: HostRun, ctx: Context) -> None:
    plan: Plan = StubHost(host.workdir).plan(RUN, "true")
    planned = tidy.look(ctx, plan)
    with pytest.raises(RefusedError) as caught:
        tidy.run(ctx, plan, {**planned, "digest": "0" * 64})
    assert (caught.value.code, caught.value.exit_code) == ("tidy-changed", ExitCode.REFUSED)
