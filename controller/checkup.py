"""`ctl preflight`: one host or several side by side, and clearing up what dead runs left there."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from controller import contact, pipeline
from controller.core.errors import CtlError, ExitCode
from controller.core.strangers import not_ours
from controller.pipeline import Intention
from controller.sidebyside import side_by_side
from controller.stages import data as data_stage
from controller.stages import tidy as tidy_stage
from controller.stages.base import Context
from controller.stages.preflight import PreflightOutcome
from controller.ui.terminal import ask_yes_no, err_console, out_console, require_yes

HOSTS_AT_ONCE = 16
"""Connections that are opened side by side; each host works for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkup:
    """What came of one host: an outcome, or the error that kept it from being looked at."""

    host: str
    outcome: PreflightOutcome | None = None
    error: CtlError | None = None

    @property
    def exit_code(self) -> ExitCode:
        if self.error is not None:
            return self.error.exit_code
        return ExitCode.REFUSED if self.outcome is None or self.outcome.failed else ExitCode.OK

    def document(self) -> dict[str, Any]:
        """Return the host's part of the JSON document."""
        if self.outcome is None:
            return {"host": self.host, "ok": False, "error": self.error.to_dict() if self.error else None}
        return {
            "host": self.host,
            "ok": not self.outcome.failed,
            "seconds": round(self.outcome.seconds, 3),
            "sections": self.outcome.section_seconds,
            "findings": [asdict(finding) for finding in self.outcome.findings],
        }


def plan_each(hosts: Sequence[str], plan: Callable[[str], Intention]) -> list[Intention | Checkup]:
    """Plan for each host, once for one that is given twice, be it by name and by address.

    What one of several cannot be planned with stands in its place as a `Checkup`.

    Raises the error of a single host, and one that all of several share: it is none of theirs.
    """
    names = list(dict.fromkeys(hosts))
    planned: list[Intention | Checkup] = []
    errors: list[CtlError] = []
    for name in names:
        try:
            intention = plan(name)
            if all(isinstance(each, Checkup) or each.host.name != intention.host.name for each in planned):
                planned.append(intention)
        except CtlError as error:
            errors.append(error)
            planned.append(Checkup(host=name, error=error))
    if len(errors) == len(names) and len({str(error) for error in errors}) == 1:
        raise errors[0]
    return planned


def preflight(planned: Sequence[Intention | Checkup], *, as_json: bool) -> ExitCode:
    """Look at all hosts at once; the exit code is that of the worst. A `Checkup` stands for a host without a plan.

    Raises what kept a single host from being looked at; of several hosts each error stands with its host.
    """
    match planned:
        case [Intention() as intention]:
            with _host(intention) as ctx:
                checkups = [Checkup(host=intention.host.name, outcome=_look(ctx, intention))]
        case _:
            terminal = _Terminal()
            checkups = side_by_side(lambda each: _checkup(each, terminal), planned, at_once=HOSTS_AT_ONCE)
    _show(checkups, as_json=as_json)
    return max((checkup.exit_code for checkup in checkups), default=ExitCode.OK)


def fix(intentions: Sequence[Intention], *, yes: bool, as_json: bool) -> ExitCode:
    """Clear up on one host after the other: show the plan, ask, do it, and look again.

    Raises RefusedError where nobody is there to confirm, or if a person declines.
    """
    documents, codes = [], []
    for intention in intentions:
        with _host(intention) as ctx:
            document, code = _fix(ctx, intention, yes=yes, as_json=as_json)
        documents.append(document)
        codes.append(code)
    if as_json:
        whole = {"ok": not any(codes), "hosts": documents} if len(documents) > 1 else documents[0]
        print(json.dumps({"schema_version": 1, **whole}, indent=1, default=str))
    return max(codes)


def _fix(ctx: Context, intention: Intention, *, yes: bool, as_json: bool) -> tuple[dict[str, Any], ExitCode]:
    from controller.ui.checkup import print_tidied, print_tidy_plan

    before = _look(ctx, intention)
    planned = tidy_stage.look(ctx, intention.plan)
    strangers = not_ours(before.report, planned["actions"])
    if not as_json or not yes:
        print_tidy_plan(err_console(), intention.host.name, planned["actions"], strangers)
    answer: dict[str, Any] = {"done": [], "failed": [], "remaining": []}
    after = before
    if planned["actions"]:
        if not yes:
            require_yes(
                "stop and delete this?",
                unattended="there is something to clear up, and nobody is there to confirm",
                why=f"{len(planned['actions'])} actions were shown",
                fix="add `--yes` to do exactly what was shown",
                declined="nothing was stopped or deleted",
            )
        answer = tidy_stage.run(ctx, intention.plan, planned)
        after = _look(ctx, intention)
    checkup = Checkup(host=intention.host.name, outcome=after)
    if not as_json:
        if planned["actions"]:
            print_tidied(out_console(), answer)
        _show([checkup], as_json=False)
    document = {
        **checkup.document(),
        "actions": planned["actions"],
        "not_ours": strangers,
        **{key: answer[key] for key in ("done", "failed", "remaining")},
    }
    left = answer["failed"] or answer["remaining"]
    return document, ExitCode.REFUSED if left else checkup.exit_code


@contextmanager
def _host(intention: Intention) -> Iterator[Context]:
    """Connect to a host that is looked at alone; what is sent to it is shown."""
    from controller.ui.pushing import PushBar

    with (
        PushBar(err_console()) as shown,
        contact.host_context(intention.host, ask=ask_yes_no, emit=shown) as ctx,
    ):
        yield ctx


def _look(ctx: Context, intention: Intention) -> PreflightOutcome:
    if intention.data is not None:
        data_stage.run(ctx, intention.data)
    return pipeline.preflight(ctx, intention)


def _checkup(intention: Intention | Checkup, terminal: _Terminal) -> Checkup:
    if isinstance(intention, Checkup):
        return intention
    try:
        with contact.host_context(intention.host, ask=terminal.ask, pause=terminal.alone) as ctx:
            return Checkup(host=intention.host.name, outcome=_look(ctx, intention))
    except CtlError as error:
        return Checkup(host=intention.host.name, error=error)


class _Terminal:
    """Keeps what several hosts ask, about keys here or by `ssh` itself, from mixing on one terminal."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # `ssh` may need a question of ours answered while it has the terminal

    def ask(self, question: str) -> bool:
        with self._lock:
            return ask_yes_no(question)

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._lock:
            yield


def _show(checkups: Sequence[Checkup], *, as_json: bool) -> None:
    if as_json:
        documents = [checkup.document() for checkup in checkups]
        whole = documents[0] if len(documents) == 1 else {"ok": all(d["ok"] for d in documents), "hosts": documents}
        print(json.dumps({"schema_version": 1, **whole}, indent=1, default=str))
        return
    from controller.ui.checkup import print_side_by_side, print_took, print_unseen
    from controller.ui.tables import print_findings

    console = out_console()
    if len(checkups) > 1:
        print_side_by_side(
            console,
            {checkup.host: checkup.outcome.findings for checkup in checkups if checkup.outcome},
            {checkup.host: checkup.error for checkup in checkups if checkup.error},
            order=[checkup.host for checkup in checkups],
        )
    for checkup in checkups:
        if checkup.outcome is None:
            assert checkup.error is not None
            print_unseen(console, checkup.host, checkup.error)
            continue
        findings = checkup.outcome.findings
        if len(checkups) > 1 and all(finding.level == "ok" for finding in findings):
            continue  # the table says it all
        print_findings(console, checkup.host, findings)
        print_took(console, checkup.outcome.seconds, checkup.outcome.section_seconds)
