"""A stop says what it does before it answers, and lives with a payload that does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.hostrun import wait_until
from support.stubhost import StubHost

from controller.core.errors import ConnectionLost, RemoteFailed
from controller.stages import launch, stop

RUN = "20260101-000000-abcd01"


class Heard:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.waits = 0

    def doing(self, text: str) -> None:
        self.said.append(text)

    def waiting(self) -> None:
        self.waits += 1


@pytest.fixture
def host(tmp_path: Path) -> StubHost:
    return StubHost(tmp_path)


def deaf(host: StubHost) -> None:
    """Launch a job that does not hear TERM."""
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); open('deaf', 'w').write('1'); time.sleep(300)"
    launch.run(host.context(), host.plan(RUN, sys.executable, "-S", "-c", code), {})
    wait_until(lambda: (host.workdir / "deaf").exists(), "the job runs")


def test_a_stop_says_what_it_does_as_it_does_it(host: StubHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "IDLE_S", 0.1)
    deaf(host)
    heard = Heard()
    outcome = stop.run(host.context(), RUN, grace_s=1.5, telling=heard)
    assert heard.said == [
        "its supervisor has been asked to stop it",
        "1 process asked to end (TERM); KILL after 1.5 s",
        "1 process still there after 1.5 s: killed (KILL)",
        "looking whether GPUs, shared memory and processes are as before the run",
    ]
    assert heard.waits > 2
    assert (outcome.state, outcome.end_reason) == ("finished", "stopped")
    assert (outcome.was_over, outcome.had_ended) == (False, False)
    again = Heard()
    second = stop.run(host.context(), RUN, telling=again)
    assert second.was_over
    assert second.had_ended
    assert again.said == ["it has ended before; looking whether it left anything"]


def test_nobody_who_did_not_ask_gets_more_than_the_answer(host: StubHost) -> None:
    """A controller of an earlier version reads one document."""
    deaf(host)
    request = {"workdir": str(host.workdir), "run_id": RUN, "grace_s": 0.2, "force": False}
    assert host.context().call_json("stop", request)["end_reason"] == "stopped"


@pytest.mark.parametrize(
    ("printed", "code", "said"),
    [
        ('{"state": "finished"}', 0, []),  # of an earlier version
        ('{"doing": "a"}\n{"doing": "b"}\n{"state": "finished"}\n', 0, ["a", "b"]),
        ('{"doing": "a"}\n{"state":\n "finished"}\n', 0, ["a"]),
        ('{"doing": "a"}\n{"error": {"what": "w", "why": "", "fix": "", "code": "c"}}\n', 70, ["a"]),
        ("not JSON\n", 0, []),
    ],
)
def test_answers_of_any_form_are_read(host: StubHost, printed: str, code: int, said: list[str]) -> None:
    payload = next((host.workdir / "payload").iterdir())
    main = payload / "remote_payload" / "host" / "main.py"
    main.write_text(f"import sys\nsys.stdin.buffer.read()\nsys.stdout.write({printed!r})\nsys.exit({code})\n")
    heard = Heard()

    def ask(timeout: float = 30.0) -> dict[str, object]:
        return host.context().call_telling(
            "stop", {}, tell=heard.doing, idle=heard.waiting, idle_s=5.0, timeout=timeout
        )

    if code or "not" in printed:
        with pytest.raises(RemoteFailed) as caught:
            ask()
        assert caught.value.code == ("c" if code else "remote-failed")
    else:
        assert ask() == json.loads('{"state": "finished"}')
    assert heard.said == said


def test_a_stop_that_never_ends_is_given_up(host: StubHost) -> None:
    payload = next((host.workdir / "payload").iterdir())
    (payload / "remote_payload" / "host" / "main.py").write_text("import time\ntime.sleep(300)\n")
    heard = Heard()
    with pytest.raises(ConnectionLost, match="did not end on the host"):
        host.context().call_telling("stop", {}, tell=heard.doing, idle=heard.waiting, idle_s=0.1, timeout=2.0)
    assert heard.waits >= 3
