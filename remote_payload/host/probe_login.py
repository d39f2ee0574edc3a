"""The `login` section: limits of our processes, what happens to them at logout, and what a container hides."""

from __future__ import annotations

import glob
import os
import re
import resource
import shutil
import subprocess
from typing import Any, Dict, Optional

from remote_payload.host.liveness import user_name
from remote_payload.host.sections import Note

LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked_memory": resource.RLIMIT_MEMLOCK,
    "file_size": resource.RLIMIT_FSIZE,
}

LINGER = "/var/lib/systemd/linger"
LOGIND = ("/usr/lib/systemd", "/etc/systemd", "/run/systemd")
BUS_TIMEOUT_S = 3.0

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h: the namespace that sees every process."""

_KILL = re.compile(r"^\s*KillUserProcesses\s*=\s*(\S+)", re.MULTILINE)
_TRUE = ("1", "yes", "true", "on")


def probe_login(note: Note) -> Dict[str, Any]:
    """Return {"limits", "linger", "kill_user_processes", "container", "pids_hidden", "iommu"}.

    `limits`: {name of LIMITS: {"soft", "hard"}}, null for none. `linger` and `kill_user_processes` are null where
    logind does not run the host. `container` is its kind or null. `pids_hidden`: null, or why processes of others
    cannot be seen. `iommu`: whether the kernel has an IOMMU in use.
    """
    note("/proc/self/limits")
    limits = {}
    for name, number in LIMITS.items():
        soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number))
        limits[name] = {"soft": soft, "hard": hard}
    logind = os.path.isdir("/run/systemd/seats")
    note("logind")
    return {
        "limits": limits,
        "linger": os.path.exists(os.path.join(LINGER, user_name(os.getuid()))) if logind else None,
        "kill_user_processes": kills_user_processes() if logind else None,
        "container": container(),
        "pids_hidden": pids_hidden(),
        "iommu": bool(glob.glob("/sys/class/iommu/*")),
    }


def kills_user_processes(folders: "tuple[str, ...]" = LOGIND, ask: bool = True) -> Optional[bool]:
    """Whether logind ends a user's processes at logout: asked over the bus, else read from its configuration.

    None: neither says, and the default is the distribution's.
    """
    busctl = shutil.which("busctl") if ask else None
    if busctl is not None:
        words = ["org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager"]
        try:
            done = subprocess.run(
                [busctl, "get-property", *words, "KillUserProcesses"], stdin=subprocess.DEVNULL, capture_output=True,
                timeout=BUS_TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            done = None
        if done is not None and done.stdout.split()[:1] == [b"b"]:
            return done.stdout.split()[-1] == b"true"
    said: Optional[bool] = None
    for folder in folders:  # a later file wins, and drop-ins win over the file
        for path in (
            os.path.join(folder, "logind.conf"),
            *sorted(glob.glob(os.path.join(folder, "logind.conf.d", "*.conf"))),
        ):
            try:
                with open(path, encoding="utf-8", errors="replace") as file:
                    values = _KILL.findall(file.read())
            except OSError:
                continue
            if values:
                said = values[-1].lower() in _TRUE
    return said


def container(proc: str = "/proc", root: str = "/") -> Optional[str]:
    """Return "docker", "podman", or what systemd calls the container that we are in; None outside of one."""
    if os.path.exists(os.path.join(root, ".dockerenv")):
        return "docker"
    if os.path.exists(os.path.join(root, "run/.containerenv")):
        return "podman"
    try:
        with open(os.path.join(root, "run/systemd/container"), encoding="ascii", errors="replace") as file:
            return file.read().strip() or "container"
    except OSError:
        pass  # no such file outside of a container
    try:
        with open(os.path.join(proc, "1/cgroup"), encoding="utf-8", errors="replace") as file:
            return "container" if re.search(r"/(docker|kubepods|lxc|libpod)", file.read()) else None
    except OSError:
        return None


def pids_hidden(proc: str = "/proc") -> Optional[str]:
    """Return why some processes of this machine are not in our /proc, None if all are."""
    try:
        if os.stat(os.path.join(proc, "self/ns/pid")).st_ino != INITIAL_PID_NAMESPACE:
            return "this is a PID namespace of its own (a container)"
    except OSError:
        return None
    if not os.path.exists(os.path.join(proc, "1")):
        return "/proc is mounted with hidepid"
    return None
