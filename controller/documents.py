"""What the notebook API hands out: plain dicts and lists, that also show themselves and become data frames.

As HTML in a notebook, as a table on a terminal (`rich.print`); both are escaped, because much of it is from a host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from controller.core.errors import RefusedError, UsageError
from controller.core.finding import Finding, Level

if TYPE_CHECKING:
    import pandas
    from rich.console import RenderableType


class Plan(dict[str, Any]):
    """What `extract` would do: the document of `ctl plan --json`."""

    def __rich__(self) -> RenderableType:
        from controller.ui.notebook import plan_renderable

        return plan_renderable(self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        from controller.ui.notebook import plan_bundle

        return plan_bundle(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For IPython's text form, in which a dict would otherwise be printed as one."""
        printer.text(self._repr_mimebundle_()["text/plain"])


class Findings(Sequence[Finding]):
    """What preflight found on `host`, in the order of its checks; `ok` if nothing failed."""

    def __init__(self, host: str, findings: Sequence[Finding]) -> None:
        self.host = host
        self._findings = tuple(findings)

    def __getitem__(self, place: Any) -> Any:
        return self._findings[place]

    def __len__(self) -> int:
        return len(self._findings)

    @property
    def ok(self) -> bool:
        """Whether an extraction would be launched."""
        return not self.failed

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self._findings if finding.level is Level.FAIL]

    def check(self) -> Findings:
        """Return self. Raises RefusedError with the first failure if there is one."""
        if self.failed:
            first = self.failed[0]
            raise RefusedError(first.what, why=first.why, fix=first.fix, code=first.code)
        return self

    def __repr__(self) -> str:
        return f"<Findings on {self.host}: {len(self)} checks, {len(self.failed)} failed>"

    def __rich__(self) -> RenderableType:
        from controller.ui.notebook import findings_renderable

        return findings_renderable(self.host, self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        from controller.ui.notebook import findings_bundle

        return findings_bundle(self.host, self)


class Summary(dict[str, Any]):
    """A run's summary.json, with `triage` added; its fields are described by `ctl help json`."""

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row a state, indexed by boundary: norm_mean, norm_max, nan, inf, zero_rows.

        The summary's other fields are single values: they are in `attrs`. Raises UsageError without pandas.
        """
        columns = ["norm_mean", "norm_max", "nan", "inf", "zero_rows"]
        states = [state for state in self.get("states") or () if isinstance(state, Mapping)]
        frame = _pandas().DataFrame(states, columns=["boundary", *columns]).set_index("boundary")
        frame.attrs = {name: value for name, value in self.items() if name != "states"}
        return frame

    def __rich__(self) -> RenderableType:
        from controller.ui.notebook import summary_renderable

        return summary_renderable(self)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        from controller.ui.notebook import summary_bundle

        return summary_bundle(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For IPython's text form, in which a dict would otherwise be printed as one."""
        printer.text(self._repr_mimebundle_()["text/plain"])


class Ledger(list[dict[str, Any]]):
    """The lines of a run's ledgers, each with the `rank` that wrote it (None: the driver)."""

    def to_pandas(self) -> pandas.DataFrame:
        """Return one row a sample, indexed by its number: rank, fate, tokens, bytes, file, seconds, and per state.

        `fate` is written, skipped or failed, `why` says why a sample is not there, `record_id` is what the data set
        calls it, where it does; `norm_B`, `nan_B`, `inf_B` and `zero_rows_B` are the figures of boundary B; `time`
        (UTC) is when the file was complete, where the ledger tells it. Of a sample with several lines the one that
        counts is taken. Raises UsageError without pandas.
        """
        from controller.core.ledger import latest, parse_line

        pandas = _pandas()
        parsed = (parse_line(record, record.get("rank")) for record in self)
        lines = latest(line for line in parsed if line is not None)
        rows = []
        for index in sorted(lines):
            line = lines[index]
            row = {
                "index": index, "rank": line.rank, "fate": line.fate.value, "tokens": line.tokens,
                "bytes": line.bytes, "file": line.file, "seconds": line.seconds, "time": line.t, "kept": line.kept,
                "code": line.code, "why": line.why, "record_id": line.record_id,
            }  # fmt: skip
            for state in line.states:
                for name in ("norm", "nan", "inf", "zero_rows"):
                    row[f"{name}_{state.boundary}"] = getattr(state, name)
            rows.append(row)
        first = ["index", "rank", "fate", "tokens", "bytes", "file", "seconds", "time", "kept"]
        first += ["code", "why", "record_id"]
        frame = pandas.DataFrame(rows, columns=None if rows else first).set_index("index")
        # Whole numbers stay whole where a sample that was not written leaves a hole.
        counts = [name for name in frame if name.startswith(("nan_", "inf_", "zero_rows_"))]
        for name in ("rank", *counts):
            frame[name] = frame[name].astype("Int64")
        frame["time"] = pandas.to_datetime(frame["time"].astype("float64"), unit="s", utc=True)
        return frame

    def __repr__(self) -> str:
        return f"<Ledger of {len(self)} lines>"


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise UsageError(
            "data frames need pandas, which is not installed here",
            why=str(error),
            fix="python -m pip install 'ctl-hidden-states[pandas]'",
            code="no-pandas",
        ) from error
    return pandas
