"""A job inside a container: the argv that starts it, and the end of what the runtime left running.

The container sees the run's own folders, the payload and the owned outputs under the same paths as the host, so that
paths in argv and environment mean the same inside. Values of variables, secrets among them, are inherited by name
and appear in no argv.

Docker's containers are children of its daemon: they are no members of the run, and what they hold on the GPUs cannot
be proved to be theirs. So they are removed by name, and the run's `gpus_clean` is "unknown" at best. Podman's and
Apptainer's are descendants of the supervisor and are treated like any member, except where podman runs without root:
its processes then live in a user namespace of their own.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, Dict, List, Optional, Sequence, Tuple

from remote_payload.host.children import Command, CommandFailed
from remote_payload.host.files import read_json
from remote_payload.host.layout import Layout, RunPaths

REMOVE_S = 60.0
"""For `rm --force`: the daemon sends KILL at once, and may wait for a slow overlay file system."""

ABSENT = ("no such container", "no container with name", "no container with id")
"""How the runtimes say that there is nothing to remove."""

_OURS = ("CTL_RUN_ID", "CTL_RUN_DIR", "CTL_HOST", "SPT_NOENV", "PYTHONUNBUFFERED", "VLLM_PROCESS_NAME_PREFIX")

_command = Command()


def name_of(folder: str) -> str:
    """Return what the container of the run in `folder` is called, on the whole host: its id, and whose id that is."""
    place = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:12]
    return "ctl-%s-%s" % (os.path.basename(folder), place)


def wrap(
    plan: Dict[str, Any], argv: Sequence[str], environ: Dict[str, str], paths: RunPaths, uuids: Sequence[str]
) -> Tuple[List[str], Dict[str, str]]:
    """Return (argv, environment) that run a step's `argv` in the plan's container; unchanged where there is none.

    `uuids` are the leased GPUs. The container gets the plan's variables, the secrets and ours, not the login's.
    """
    container: Optional[Dict[str, Any]] = plan["job"].get("container")
    if container is None:
        return list(argv), environ
    names = sorted({*plan["job"]["env"], *plan["job"]["secret_env"], *_OURS, "PYTHONPATH"} & set(environ))
    environ = {**environ, "PYTHONPATH": _without_login(environ["PYTHONPATH"], plan)}
    mounts = [*_own_folders(plan, paths), *container["mounts"]]
    if container["runtime"] == "apptainer":
        return _apptainer(container, plan, argv, environ, names, mounts, uuids)
    words = [
        container["runtime"], "run", "--rm", "--name", name_of(paths.folder), "--workdir", plan["job"]["cwd"],
        "--ipc", "host",
    ]  # fmt: skip
    if container["runtime"] == "docker" and os.getuid() != 0:
        # Its root is the host's: files of the run would belong to somebody else.
        words += ["--user", "%d:%d" % (os.getuid(), os.getgid())]
    words += [word for name in names for word in ("--env", name)]
    words += [word for mount in mounts for word in ("--volume", _mount(mount))]
    if uuids and container["runtime"] == "docker":
        words += ["--gpus", '"device=%s"' % ",".join(uuids)]  # the inner quotes are part of Docker's syntax
    elif uuids:
        words += [word for uuid in uuids for word in ("--device", "nvidia.com/gpu=%s" % uuid)]
    return [*words, *container["options"], container["image"], *argv], environ


def _apptainer(
    container: Dict[str, Any],
    plan: Dict[str, Any],
    argv: Sequence[str],
    environ: Dict[str, str],
    names: Sequence[str],
    mounts: Sequence[str],
    uuids: Sequence[str],
) -> Tuple[List[str], Dict[str, str]]:
    # What is called APPTAINERENV_NAME outside is called NAME inside, even with --cleanenv.
    inside = {"APPTAINERENV_%s" % name: environ[name] for name in names}
    if uuids:
        inside["APPTAINERENV_CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
    words = ["apptainer", "exec", "--cleanenv", "--pwd", plan["job"]["cwd"]]
    words += [word for mount in mounts for word in ("--bind", _mount(mount))]
    words += ["--nv"] if uuids else []
    return [*words, *container["options"], container["image"], *argv], {**environ, **inside}


def end(paths: RunPaths) -> Tuple[Optional[str], Optional[str]]:
    """Remove the run's container, whoever started it; return (what cannot be proved, what could not be removed).

    Both are None for a run without one. Idempotent.
    """
    plan = read_json(paths.plan) or {}
    container = plan.get("job", {}).get("container")
    if container is None or container["runtime"] == "apptainer":
        return None, None
    runtime, name = container["runtime"], name_of(paths.folder)
    problem = None
    try:
        _command.run([runtime, "rm", "--force", "--volumes", name], REMOVE_S)
    except CommandFailed as error:
        if not any(words in str(error).lower() for words in ABSENT):
            problem = "the container %s may still run: %s" % (name, error)
    hidden = runtime == "docker" or os.getuid() != 0
    return ("%s's containers are no processes of this run" % runtime if hidden else None), problem


def _own_folders(plan: Dict[str, Any], paths: RunPaths) -> List[str]:
    payload = Layout(plan["host"]["workdir"]).payload(plan["payload"])
    own = [paths.work, paths.events, paths.faults]
    outputs = [output["path"] for output in plan["job"]["outputs"]]
    return [*(path for path in own if os.path.isdir(path)), *outputs, "%s:%s:ro" % (payload, payload)]


def _mount(mount: str) -> str:
    """Return a mount with the same path on both sides where only one is given."""
    return mount if ":" in mount else "%s:%s" % (mount, mount)


def _without_login(path: str, plan: Dict[str, Any]) -> str:
    """Return the PYTHONPATH of payload and plan alone: the login's names folders of the host."""
    payload = Layout(plan["host"]["workdir"]).payload(plan["payload"])
    given = plan["job"]["env"].get("PYTHONPATH", "").split(os.pathsep)
    keep = [entry for entry in path.split(os.pathsep) if entry.startswith(payload) or entry in given]
    return os.pathsep.join(filter(None, keep))
