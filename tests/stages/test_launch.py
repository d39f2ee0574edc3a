"""Launch is exactly once: whatever answer is lost, one job runs, and nobody claims otherwise."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.stubhost import StubHost

from controller.core.errors import ConnectionFailed, LaunchUnknown, RefusedError
from controller.stages import launch, stop

RUN = "20260101-000000-00000{}"


@pytest.fixture
def host(tmp_path: Path) -> StubHost:
    return StubHost(tmp_path)


def counting_job(host: StubHost, seconds: float = 0.2) -> list[str]:
    """A job that leaves one line for each time it was started."""
    return ["/bin/sh", "-c", f"echo started >> {host.workdir}/starts; sleep {seconds}"]


def starts(host: StubHost, wanted: int = 1) -> int:
    path = host.workdir / "starts"
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        count = path.read_text().count("started") if path.exists() else 0
        if count >= wanted:
            time.sleep(0.3)  # a second start, if there were one, would show
            return path.read_text().count("started")
        time.sleep(0.05)
    return 0


def test_confirms_one_start(host: StubHost) -> None:
    outcome = launch.run(host.context(), host.plan(RUN.format(1), *counting_job(host)), {})
    assert outcome.confirmation["outcome"] == "launched"
    assert starts(host) == 1


def test_lost_answers_are_asked_for_again_and_start_nothing_twice(host: StubHost) -> None:
    host.transport.lose_answers = 2
    outcome = launch.run(host.context(), host.plan(RUN.format(2), *counting_job(host)), {})
    assert outcome.confirmation["outcome"] == "exists"
    assert outcome.confirmation["run"] is not None
    assert starts(host) == 1


def test_a_launch_given_up_is_cancelled_on_the_host_and_a_late_start_obeys(host: StubHost) -> None:
    plan = host.plan(RUN.format(3), *counting_job(host))
    with pytest.raises(ConnectionFailed, match="nothing was started"):
        launch.run(host.context(), plan, {}, patience_s=0)
    with pytest.raises(RefusedError, match="cancelled"):
        launch.run(host.context(), plan, {})
    assert not (host.workdir / "starts").exists()


def test_no_answer_to_start_nor_cancel_is_unknown_not_failure(host: StubHost) -> None:
    host.transport.unreachable = 1000
    with pytest.raises(LaunchUnknown) as caught:
        launch.run(host.context(), host.plan(RUN.format(4), "true"), {}, patience_s=1.5)
    assert RUN.format(4) in caught.value.fix


def test_a_job_that_was_started_before_the_cancel_is_reported_as_running(host: StubHost) -> None:
    plan = host.plan(RUN.format(5), *counting_job(host, seconds=30))
    launch.run(host.context(), plan, {})
    outcome = launch.run(host.context(), plan, {}, patience_s=0)
    assert outcome.confirmation["outcome"] == "exists"
    stopped = stop.run(host.context(), RUN.format(5), grace_s=2)
    assert (stopped.state, stopped.end_reason) == ("finished", "stopped")


def test_a_second_run_is_told_who_holds_the_host(host: StubHost) -> None:
    launch.run(host.context(), host.plan(RUN.format(6), "/bin/sleep", "60"), {})
    with pytest.raises(RefusedError) as caught:
        launch.run(host.context(), host.plan(RUN.format(7), "/bin/true"), {})
    assert caught.value.code == "lease-busy"
    assert RUN.format(6) in str(caught.value) + str(caught.value.data)
    assert caught.value.what.startswith(f"host stub is held by run {RUN.format(6)} of user ")
    assert caught.value.why == "it came first, after preflight had looked; nothing was launched"
    assert caught.value.fix == (
        "queue behind it: the same command with `--wait`; see who holds it with `ctl ps --host stub`"
    )
    stop.run(host.context(), RUN.format(6), grace_s=2)
    assert launch.run(host.context(), host.plan(RUN.format(8), "/bin/true"), {}).confirmation["outcome"] == "launched"


def test_a_lease_folder_that_cannot_be_used_is_named_with_its_remedy(host: StubHost) -> None:
    plan = host.plan(RUN.format(6), "/bin/true")
    plan["host"] = {**plan["host"], "lease_dir": "/proc/lease"}
    with pytest.raises(RefusedError) as caught:
        launch.run(host.context(), plan, {})
    assert caught.value.code == "lease-folder"
    assert caught.value.what == "the lease folder /proc/lease cannot be used"
    assert caught.value.why.endswith("; nothing was launched")
    assert caught.value.fix.startswith("set `lease_dir` of this host in hosts.toml")


def test_what_the_host_found_wrong_is_not_looked_for_among_those_who_hold_it(host: StubHost) -> None:
    plan = host.plan(RUN.format(6), "/bin/true")
    plan["host"] = {**plan["host"], "accelerator": "cuda", "gpus": 1000}
    with pytest.raises(RefusedError) as caught:
        launch.run(host.context(), plan, {})
    assert caught.value.code == "supervisor-failed"
    assert "`ctl preflight --host stub`" in caught.value.fix


def test_an_interrupt_before_the_confirmation_starts_nothing(host: StubHost, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = host.plan(RUN.format(9), *counting_job(host))
    run = host.transport.run

    def interrupted(argv: Sequence[str], **options: Any) -> Any:
        if argv[-1] == "start":
            raise KeyboardInterrupt
        return run(argv, **options)

    monkeypatch.setattr(host.transport, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch.run(host.context(), plan, {})
    monkeypatch.undo()
    with pytest.raises(RefusedError, match="cancelled"):
        launch.run(host.context(), plan, {})
    assert not (host.workdir / "starts").exists()


def test_an_interrupt_after_the_host_holds_the_run_detaches(host: StubHost, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = host.plan(RUN.format(9), *counting_job(host))
    run = host.transport.run

    def interrupted(argv: Sequence[str], **options: Any) -> Any:
        answer = run(argv, **options)
        if argv[-1] == "start":
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(host.transport, "run", interrupted)
    ctx = host.context()
    assert launch.run(ctx, plan, {}).confirmation["outcome"] == "exists"
    assert ctx.cancel.is_set()
    assert starts(host) == 1
