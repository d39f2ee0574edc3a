"""The error that a verb reports to the workstation in words (`main` prints it as JSON), and that of a bad record."""

from __future__ import annotations

import re
from typing import Dict


class HostError(Exception):
    """Why a verb could not do its work: what happened, why (evidence), what to do, and a stable kebab-case code."""

    def __init__(self, code: str, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what if not why else "%s: %s" % (what, why))
        self.code = code
        self.what = what
        self.why = why
        self.fix = fix

    def to_dict(self) -> Dict[str, str]:
        return {"code": self.code, "what": self.what, "why": self.why, "fix": self.fix}


def described(error: Exception) -> str:
    """Return an error in a line: a HostError's own words, of any other its type and message."""
    return str(error) if isinstance(error, HostError) else "%s: %s" % (type(error).__name__, error)


class ProtocolError(ValueError):
    """A record or frame is not of the form that this wire prescribes; the message names the offending part."""


_QUERY = re.compile(r"(https?://[^\s?#'\"<>]+)\?[^\s'\"<>)]*")


def without_queries(text: str) -> str:
    """Return a text whose URLs have no query: that of a signed redirect lets anybody fetch what it leads to."""
    return _QUERY.sub(r"\1?***", text)
