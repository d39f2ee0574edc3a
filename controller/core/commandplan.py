"""Host + command playbook + extra arguments -> plan: pure, like `planner`, which it shares the envelope with.

In argv, environment and paths these words stand for what is known only now:

    {python}     the interpreter: the playbook's `python`, else the host's
    {work}       the run's own folder, with a fresh copy of the uploads in it
    {workdir}    the host's `workdir`
    {output}     the first output; {output:N} the N-th, from 1
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence

from controller.core.command import CommandPlaybook
from controller.core.errors import ConfigError
from controller.core.model import Host
from controller.core.outputs import output_step, owned_output
from controller.core.planner import envelope
from controller.core.redaction import is_secret, refuse_secrets, split_env
from remote_payload.host.layout import Layout
from remote_payload.host.protocol import Accelerator, Job, Limits, OwnedOutput, Plan, Step, Survey, Watched

_WORD = re.compile(r"\{(python|work|workdir|output)(?::([0-9]+))?\}")

MOUNT_PARTS = 3
"""Of a mount: the path on the host, the one inside, options such as `ro`."""


def make_playbook_command_plan(
    host: Host,
    playbook: CommandPlaybook,
    extra: Sequence[str] = (),
    *,
    run_id: str,
    created: str,
    payload: str,
    ctl_version: str,
    upload: str | None = None,
    stale: str | None = None,
    adopt: bool = False,
) -> Plan:
    """Plan a command playbook's run; `extra` are arguments after its own, `upload` the hash of its uploads' tree.

    `stale` replaces every output's own word. Raises ConfigError if an output may not be owned, a secret is not the
    host's, or a word stands for nothing; UsageError if the command carries a secret in the open.
    """
    outputs = [
        owned_output(
            host, host.resolve(section.path), stale=stale or section.stale.value, adopt=adopt, reads=(),
            where=f"set `path` in [[outputs]] of {playbook.origin}",
        )
        for section in playbook.outputs
    ]  # fmt: skip
    _check_apart(playbook, outputs)
    _check_mounts(host, playbook, outputs)
    words = _Words(host, playbook, Layout(host.workdir).run(run_id).work, outputs)
    start = words.work if playbook.uploads else host.workdir
    cwd = posixpath.normpath(posixpath.join(start, words.fill(playbook.cwd or ".")))
    argv = [*(words.fill(word) for word in playbook.argv), *extra]
    options = playbook.container.options if playbook.container else ()
    refuse_secrets([*options, *argv], host.name, "name it in `secrets` of the playbook")
    env, secret_env = _environment(host, playbook, words)

    def inside(path: str) -> str:
        return posixpath.normpath(posixpath.join(cwd, words.fill(path)))

    limits: Limits = {
        "load_timeout_s": playbook.limits.load_timeout,
        "silence_timeout_s": playbook.limits.silence_timeout,
        "time_limit_s": playbook.limits.time_limit,
        "stop_grace_s": playbook.limits.stop_grace,
        "log_cap_bytes": playbook.limits.log_cap,
        "output_bytes": playbook.limits.output_bytes,
    }
    survey = _survey(playbook, outputs, inside)
    steps: list[Step] = [{"name": "recheck", "kind": "recheck"}]
    if playbook.uploads:
        steps.append({"name": "place", "kind": "place"})
    if outputs:
        steps.append(output_step(outputs))
    steps.append({"name": "command", "kind": "exec", "argv": argv})
    if survey is not None:
        verify = [words.python, "-m", "remote_payload.survey"]
        steps.append({"name": "verify", "kind": "verify", "argv": verify})
    job: Job = {
        "kind": "command",
        "name": playbook.name,
        "steps": steps,
        "cwd": cwd,
        "env": env,
        "secret_env": secret_env,
        "outputs": outputs,
        "success": {"exit_codes": list(playbook.success.exit_codes)},
        "limits": limits,
    }
    if playbook.tracebacks:
        job["tracebacks"] = True
    if upload is not None:
        job["upload"] = upload
    if playbook.progress is not None:
        job["watched"] = _watched(playbook, inside)
    if playbook.container is not None:
        section = playbook.container
        job["container"] = {
            "runtime": section.runtime,
            "image": section.image,
            "options": list(section.options),
            "mounts": [words.fill(mount) for mount in section.mounts],
        }
    if survey is not None:
        job["survey"] = survey
    plan = envelope(host, job, run_id=run_id, created=created, payload=payload, ctl_version=ctl_version)
    plan["playbook"] = playbook.name
    return _with_gpus(plan, host, playbook)


class _Words:
    """What the words in braces stand for in one run."""

    def __init__(self, host: Host, playbook: CommandPlaybook, work: str, outputs: Sequence[OwnedOutput]) -> None:
        self.python = playbook.python or host.python
        self.work = work
        self._workdir = host.workdir
        self._origin = playbook.origin
        self._outputs = outputs

    def fill(self, text: str) -> str:
        """Return the text with every word replaced; other braces stay. Raises ConfigError."""
        return _WORD.sub(self._word, text)

    def _word(self, match: re.Match[str]) -> str:
        name, number = match[1], int(match[2] or 1)
        if name == "output":
            if not 1 <= number <= len(self._outputs):
                raise ConfigError(
                    f"{self._origin}: {match[0]} stands for nothing",
                    why=f"the playbook has {len(self._outputs)} [[outputs]]",
                    fix="add the folder as an [[outputs]] table",
                )
            return self._outputs[number - 1]["path"]
        return {"python": self.python, "work": self.work, "workdir": self._workdir}[name]


def _check_apart(playbook: CommandPlaybook, outputs: Sequence[OwnedOutput]) -> None:
    for number, one in enumerate(outputs):
        for other in outputs[number + 1 :]:
            if f"{one['path']}/".startswith(f"{other['path']}/") or f"{other['path']}/".startswith(f"{one['path']}/"):
                raise ConfigError(
                    f"{playbook.origin}: the outputs {one['path']} and {other['path']} overlap",
                    why="each may be cleared as a whole",
                    fix="own the upper folder only",
                    code="output-overlaps",
                )


def _check_mounts(host: Host, playbook: CommandPlaybook, outputs: Sequence[OwnedOutput]) -> None:
    """Refuse what a container's runtime would take for several paths: it gets a mount as one word."""
    if playbook.container is None:
        return
    separators = ":," if playbook.container.runtime == "apptainer" else ":"  # it splits `--bind` at commas first
    for path in (host.workdir, *(output["path"] for output in outputs)):
        if any(separator in path for separator in separators):
            raise ConfigError(
                f"{playbook.origin}: {path} cannot be mounted into a container",
                why=f"{playbook.container.runtime} takes `:`" + (" and `,`" if "," in separators else "")
                + " in a path for the end of it",
                fix="choose a folder without it in its path",
                code="mount-path",
            )  # fmt: skip
    for mount in playbook.container.mounts:
        if mount.count(":") > MOUNT_PARTS - 1 or ("," in separators and "," in mount):
            raise ConfigError(
                f"{playbook.origin}: {mount} cannot be mounted into a container",
                why="a mount is PATH, PATH:INSIDE or PATH:INSIDE:OPTIONS, and no path in it may have a separator",
                fix="correct `mounts` in [container]; give further options in `options`",
                code="mount-path",
            )


def _environment(host: Host, playbook: CommandPlaybook, words: _Words) -> tuple[dict[str, str], list[str]]:
    """Return (plain variables, names of the secrets that the playbook asks for)."""
    for name in playbook.secrets:
        if name not in host.secrets:
            raise ConfigError(
                f"{playbook.origin}: host `{host.name}` has no secret `{name}`",
                why=f"its secrets are: {', '.join(sorted(host.secrets)) or 'none'}",
                fix=f'add `{name} = {{ env = "{name}" }}` to [hosts."{host.name}".secrets]',
                code="no-secret",
            )
    filled = {name: words.fill(value) for name, value in playbook.env.items()}
    given = {**unnamed_env(host), **filled}
    both = sorted(set(playbook.env) & set(playbook.secrets))
    if both:
        raise ConfigError(f"{playbook.origin}: `{both[0]}` stands in `env` and in `secrets`", fix="remove one")
    plain, hidden = split_env({name: value for name, value in given.items() if name not in playbook.secrets})
    unfilled = [name for name in hidden if playbook.env.get(name) != filled.get(name)]
    if unfilled:
        raise ConfigError(
            f"{playbook.origin}: `env.{unfilled[0]}` is a secret, and holds a word that stands for something else",
            why="secrets do not go through the plan, which is where such words are filled in",
            fix=f'add `{unfilled[0]}` whole to [hosts."{host.name}".secrets], and name it in `secrets`',
        )
    return plain, sorted({*hidden, *playbook.secrets})


def unnamed_env(host: Host) -> dict[str, str]:
    """Return the host's variables that a command gets without naming them: all but those with a secret's name."""
    return {name: value for name, value in host.env.items() if not is_secret(name)}


def _watched(playbook: CommandPlaybook, inside: Callable[[str], str]) -> Watched:
    section = playbook.progress
    assert section is not None
    watched: Watched = {"unit": section.unit}
    if section.file is not None:
        watched["file"] = inside(section.file)
    else:
        watched["patterns"] = list(section.pattern)
    return watched


def _survey(playbook: CommandPlaybook, outputs: Sequence[OwnedOutput], inside: Callable[[str], str]) -> Survey | None:
    """Return what the verify step looks at; None where there is nothing to look at."""
    section = playbook.summary
    given = section.paths if section else ()
    paths = [inside(path) for path in given] or [output["path"] for output in outputs]
    files = [inside(path) for path in playbook.success.files]
    expect = section.expect.model_dump(mode="json", exclude_none=True, exclude_defaults=True) if section else {}
    if expect and not paths:
        raise ConfigError(
            f"{playbook.origin}: [summary.expect] expects something of no file",
            why="there are neither [[outputs]] nor `paths` of [summary]",
            fix="name in `paths` of [summary] what the command writes",
        )
    if not paths and not files:
        return None
    sample = section.sample_files if section else 16
    return {"paths": paths, "files": files, "sample_files": sample, "expect": expect}


def _with_gpus(plan: Plan, host: Host, playbook: CommandPlaybook) -> Plan:
    """Lease what the job uses: all GPUs of the host, the first `gpus`, or the host itself where that is 0."""
    wanted = playbook.gpus
    if wanted is None or host.accelerator is not Accelerator.CUDA:
        return plan
    if wanted > host.gpus:
        raise ConfigError(
            f"{playbook.origin}: `gpus` is {wanted}", why=f"host `{host.name}` has {host.gpus}", fix="lower it"
        )
    accelerator = Accelerator.CUDA if wanted else Accelerator.CPU
    plan["host"] = {**plan["host"], "gpus": wanted, "accelerator": accelerator.value}
    if wanted < host.gpus:
        # What is not leased must not be used: the job sees the GPUs that are.
        plan["job"]["env"].setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(wanted))))
    return plan
