"""Which of the kernel's lines belong to a failure, by their time or by the process that they name.

Logs tell the time without a time zone, often without the year and sometimes without the date, so only differences
within a day are judged. A line that tells no time is taken to stand where it belongs.
"""

from __future__ import annotations

import re
from calendar import month_abbr
from collections.abc import Iterable
from datetime import date

from controller.core.logs import Level, LogLine

BEFORE_S = 900
"""Seconds before a failure that its cause may be: NCCL waits 600 s for a dead rank, vLLM 300 s for a step."""

AFTER_S = 120
"""Seconds after the first failure that the kernel may still report on it; clocks may differ by a little as well."""

DAY_S = 86_400

LEAP_YEAR = 2024
"""Any: it has every day that a log may name."""

_MONTHS = {name: number for number, name in enumerate(month_abbr) if name}
_CLOCK = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)"
_ISO = re.compile(rf"\[?\d{{4}}-(?P<month>\d\d)-(?P<day>\d\d)[T ]{_CLOCK}")
_NAMED = re.compile(rf"\[?(?:\w{{3}} )?(?P<name>{'|'.join(_MONTHS)}) +(?P<day>\d+) {_CLOCK}")
_VLLM = re.compile(rf"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?P<month>\d\d)-(?P<day>\d\d) {_CLOCK}")
_UPTIME = re.compile(r"(?:kernel: )?\[\s*\d+\.\d+\]")
_PID = re.compile(r"(?:Killed process |pid[ =])(?P<pid>\d+)")

Moment = tuple[int, int, int]
"""Month and day (0, 0 where only the time of day is told), and the second of the day."""


def moment(line: LogLine, stamp: str = "") -> Moment | None:
    """Return when a line was written, by its own words or by the stamp before it; None if neither says."""
    for text in (stamp, line.raw):
        for form in (_ISO, _NAMED):
            found = form.match(text)
            if found:
                return _moment(found)
    found = _VLLM.search(line.raw, 0, 120)  # behind the prefix of its process
    if found:
        return _moment(found)
    clock = re.fullmatch(_CLOCK, line.time)
    return (0, 0, _seconds(clock)) if clock else None


def _moment(found: re.Match[str]) -> Moment:
    words = found.groupdict()
    month, day = _MONTHS[words["name"]] if words.get("name") else int(words["month"]), int(words["day"])
    try:
        date(LEAP_YEAR, month, day)
    except ValueError:  # digits that only look like a date
        return 0, 0, _seconds(found)
    return month, day, _seconds(found)


def _seconds(found: re.Match[str]) -> int:
    return int(found["h"]) * 3600 + int(found["m"]) * 60 + int(found["s"])


def failure_moment(lines: Iterable[tuple[LogLine, str]]) -> Moment | None:
    """Return when things went wrong: at the first error that tells its time, else at the last line that does."""
    last = None
    for line, stamp in lines:
        if line.level is Level.ERROR:
            found = moment(line, stamp)
            if found is not None:
                return found
        elif line.level is not None:
            last = (line, stamp)
    return moment(*last) if last else None


def is_around(line: LogLine, stamp: str, failed: Moment | None, pids: frozenset[int]) -> bool:
    """Whether a line of the kernel may belong to a failure at `failed` of a job with these processes.

    One that tells only the seconds since boot belongs to it if it names one of the processes.
    """
    named = _PID.search(line.raw)
    if named and int(named["pid"]) in pids:
        return True
    told = moment(line, stamp)
    if told is None:
        return _UPTIME.match(line.raw) is None
    return failed is None or _is_near(told, failed)


def _is_near(told: Moment, failed: Moment) -> bool:
    if told[0] and failed[0]:
        days = _nearer_way(_day_of_year(told) - _day_of_year(failed), 366)
        difference = told[2] - failed[2] + days * DAY_S
    else:  # one tells only its time of day
        difference = _nearer_way(told[2] - failed[2], DAY_S)
    return -BEFORE_S <= difference <= AFTER_S


def _nearer_way(difference: int, whole: int) -> int:
    """Return a difference on a circle, such as the year or the day, as that of the shorter way."""
    return (difference + whole // 2) % whole - whole // 2


def _day_of_year(told: Moment) -> int:
    return date(LEAP_YEAR, told[0], told[1]).toordinal() - date(LEAP_YEAR, 1, 1).toordinal()
