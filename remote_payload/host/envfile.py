"""The host's own environment file: KEY=VALUE lines that every job of the host starts with.

Values are the host's, and may be secrets: they go into the job's environment and nowhere else.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import Dict

from remote_payload.host.errors import HostError

SIZE_LIMIT = 1 << 20

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def read_env_file(path: str) -> Dict[str, str]:
    """Return the variables of a file: `NAME=value` lines, as for systemd's EnvironmentFile, `export` allowed.

    Quotes are taken off as a shell does it; nothing is expanded or executed. Raises HostError if the file cannot be
    read or a line is none (it is named by its number, never quoted).
    """
    fix = "correct it, or `env_file` of this host in hosts.toml"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(SIZE_LIMIT + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8"
        raise HostError("env-file", "the env_file %s cannot be read" % path, why, fix) from error
    if len(text) > SIZE_LIMIT:
        raise HostError("env-file", "the env_file %s is larger than 1 MiB" % path, "", fix)
    found: Dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            words = ["?"]  # a quote that is not closed
        if words[:1] == ["export"]:
            words = words[1:]
        for word in words:
            name, separator, value = word.partition("=")
            if not separator or not _NAME.fullmatch(name):
                why = "line %d is no NAME=value" % number
                raise HostError("env-file", "the env_file %s cannot be read" % path, why, fix)
            found[name] = value
    return found


def with_python_first(environ: Dict[str, str], python: str) -> Dict[str, str]:
    """Return `environ` with the folder of an absolute `python` first in PATH.

    An interpreter that is named by its path does not activate its environment: ninja and the compilers that were
    installed beside it are found only so.
    """
    if not os.path.isabs(python):
        return environ
    path = [os.path.dirname(python), *environ.get("PATH", os.defpath).split(os.pathsep)]
    return {**environ, "PATH": os.pathsep.join(dict.fromkeys(filter(None, path)))}
