"""Every error that a user can meet, and the exit code that belongs to it.

    CtlError                  unexpected (1)
      UsageError              usage or configuration (2)
        ConfigError           a file, key or value of hosts.toml or a playbook
      RefusedError            preflight, rehearsal or clear refused (3)
      ConnectionFailed        cannot connect or authenticate (4)
        HostKeyError          the host's key is unknown, changed or revoked
        AuthenticationError   the host accepted none of our keys
      ConnectionLost          the connection broke while something was under way (4)
      RemoteFailed            a command of ours failed on the host (1)
        HostUnusable          because of what hosts.toml says of it (2)
      LocalDiskError          this workstation has no room for a file (1)
        LocalUnwritable       a file or folder of it may not be written (3)
        CopyFailed            the copy of a run; the run itself is not affected (8)
      LaunchUnknown           launch could be neither confirmed nor denied (9)
      JobFailed               the job failed (100)
      JobStopped              the job was stopped (103)
      Interrupted             Ctrl-C before anything was launched (130)

Each carries what happened, why, what to do about it, and a stable code. Only `controller.app` turns them into
exit codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    REFUSED = 3
    CONNECT = 4
    DETACHED = 8
    UNKNOWN = 9
    JOB_FAILED = 100
    JOB_STOPPED = 103
    INTERRUPTED = 130


class CtlError(Exception):
    """An error that is explained to the user.

    `what` is one sentence without a full stop; `why` gives the cause or the evidence; `fix` is what to type or
    change; `code` is stable, kebab-case, and documented; `data` goes into the JSON form.
    """

    exit_code = ExitCode.UNEXPECTED
    code = "unexpected"

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        fix: str = "",
        code: str | None = None,
        data: dict[str, object] | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix
        self.code = code or type(self).code
        self.data = data or {}
        if fix:  # so that a script that does not catch it shows what to do below its frames
            self.add_note("\n".join(_printable(f"fix: {line}" if not n else f"     {line}" for n, line in
                                               enumerate(fix.splitlines()))))  # fmt: skip

    def __str__(self) -> str:
        return ": ".join(part for part in (self.what, self.why) if part)

    def _render_traceback_(self) -> list[str]:
        """For IPython: what a person reads in place of frames of ours. Control characters of a host are left out."""
        lines = [f"{type(self).__name__}: {self.what}"]
        lines += [f"  {part}" for part in self.why.splitlines()]
        lines += [
            f"  fix: {part}" if number == 0 else f"       {part}" for number, part in enumerate(self.fix.splitlines())
        ]
        lines += [f"  code: {self.code}"]
        return _printable(lines)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form: {code, what, why, fix} and `data` where there is any."""
        record: dict[str, object] = {"code": self.code, "what": self.what, "why": self.why, "fix": self.fix}
        if self.data:
            record["data"] = self.data
        return record


def _printable(lines: Iterable[str]) -> list[str]:
    return ["".join(filter(str.isprintable, line)) for line in lines]


class UsageError(CtlError):
    """The command line asks for something that cannot be."""

    exit_code = ExitCode.USAGE
    code = "usage"


class ConfigError(UsageError):
    """A configuration file is missing, malformed, or holds a key or value that is not valid."""

    code = "config"


class RefusedError(CtlError):
    """A check said no before anything was used or deleted."""

    exit_code = ExitCode.REFUSED
    code = "refused"


class ConnectionFailed(CtlError):
    """No connection could be made."""

    exit_code = ExitCode.CONNECT
    code = "connect"


class HostKeyError(ConnectionFailed):
    """The host's key is not the one we know, or we know none."""

    code = "host-key"


class AuthenticationError(ConnectionFailed):
    """The host refused every key and method offered."""

    code = "authentication"


class ConnectionLost(CtlError):
    """The connection broke, or went silent past its deadline, while a command was under way."""

    exit_code = ExitCode.CONNECT
    code = "connection-lost"


class RemoteFailed(CtlError):
    """A command of ours ended with an error on the host."""

    code = "remote-failed"


class HostUnusable(RemoteFailed):
    """The host cannot go by a value of hosts.toml: a Python that is none, or a workdir that is not for this user."""

    exit_code = ExitCode.USAGE
    code = "host-unusable"


class LocalDiskError(CtlError):
    """A file of this workstation cannot be written: no room (`local-disk-full`), or no right (`local-unwritable`)."""

    code = "local-disk-full"


class LocalUnwritable(LocalDiskError):
    """A path that a person chose cannot be written (or read) here, which no other try changes."""

    exit_code = ExitCode.REFUSED
    code = "local-unwritable"


class CopyFailed(LocalDiskError):
    """The copy of a run cannot be written here; the run itself is not affected."""

    exit_code = ExitCode.DETACHED


class LaunchUnknown(CtlError):
    """Nobody could say whether the job was launched."""

    exit_code = ExitCode.UNKNOWN
    code = "launch-unknown"


class JobFailed(CtlError):
    """The job ended without success."""

    exit_code = ExitCode.JOB_FAILED
    code = "job-failed"


class JobStopped(CtlError):
    """The job was stopped by a person."""

    exit_code = ExitCode.JOB_STOPPED
    code = "job-stopped"


class Interrupted(CtlError):
    """The user gave up before anything was launched."""

    exit_code = ExitCode.INTERRUPTED
    code = "interrupted"
