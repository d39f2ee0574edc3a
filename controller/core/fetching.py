"""The plan of `ctl hosts fetch-model`: from what the hub lists and the host holds to what is downloaded. Pure."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controller.core.errors import RefusedError, UsageError
from controller.core.finding import size
from controller.core.model import Host
from remote_payload.host.layout import Layout
from remote_payload.host.protocol import Step

RESERVE = 16 << 20
"""Bytes kept free beside the model, as the job keeps them."""

MODELS = "models"
"""Below the host's workdir: where a model goes that is given no other place."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]*")
MAX_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWish:
    """What to fetch, and where to. `include` and `exclude` are patterns of file names."""

    repo: str
    revision: str
    folder: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    adopt: bool = False

    def query(self) -> dict[str, Any]:
        """Return the request to the host's verb `hub`."""
        return {
            "repo": self.repo, "revision": self.revision, "folder": self.folder, "include": list(self.include),
            "exclude": list(self.exclude),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """What is to be done; `nothing` if the folder holds the commit whole and proved."""

    steps: tuple[Step, ...]
    sections: tuple[Mapping[str, Any], ...]
    nothing: bool
    facts: Mapping[str, Any]
    """The same for programs: repo, commit, folder, files, bytes, bytes_to_fetch, left_out."""


def parse_model(text: str) -> tuple[str, str]:
    """Return (repository, revision) of `MODEL@REVISION`; the revision defaults to main. Raises UsageError."""
    repo, at, revision = text.partition("@")
    if not _NAME.fullmatch(repo) or (at and not _REVISION.fullmatch(revision)):
        raise UsageError(
            f"`{text}` is not a model of the hub", fix="write ORGANISATION/NAME@REVISION: a commit, a tag or a branch"
        )
    return repo, revision or "main"


def model_folder(host: Host, repo: str, to: str | None) -> str:
    """Return the absolute folder for a model. Raises UsageError if other things of ours live there."""
    wanted = to or f"{MODELS}/{repo}"
    if wanted.startswith("~") or ".." in wanted.split("/"):
        raise UsageError(f"`--to {wanted}` is not a plain path", fix="write it absolute, or relative to the workdir")
    folder = host.resolve(wanted)
    layout = Layout(host.workdir)
    for taken, why in (
        *(
            (path, "ctl keeps its own records there")
            for path in (layout.payloads, layout.runs, layout.data, layout.files)
        ),
        *((root, "it is an output root, whose folders may be cleared") for root in host.output_roots),
    ):
        if posixpath.commonpath((folder, taken)) in (folder, taken):
            raise UsageError(f"a model cannot lie in {folder}", why=f"{why}: {taken}", fix="choose another --to")
    return folder


def plan_download(host: Host, wish: ModelWish, found: Mapping[str, Any]) -> Download:
    """Return what brings the model into place. `found` is the answer of the host's verb `hub`.

    Raises RefusedError if the folder is another model's or somebody's, or has not the room.
    """
    state = found["folder"]
    _refuse(wish, found, state)
    common = [
        host.python, "-m", "remote_payload.extract.fetch", "--repo", wish.repo, "--commit", found["commit"],
        "--folder", wish.folder, *(f"--include={pattern}" for pattern in wish.include),
        *(f"--exclude={pattern}" for pattern in wish.exclude),
    ]  # fmt: skip
    steps: tuple[Step, ...] = (
        {"name": "fetch", "kind": "exec", "argv": [*common, *(["--adopt"] if wish.adopt else [])]},
        {"name": "verify", "kind": "verify", "argv": [*common, "--verify"]},
    )
    facts = {
        "repo": wish.repo, "commit": found["commit"], "folder": wish.folder, "files": len(found["files"]),
        "bytes": found["bytes"], "bytes_to_fetch": state["bytes_to_fetch"], "left_out": found["left_out"],
    }  # fmt: skip
    return Download(
        steps=steps, sections=_sections(wish, found, state, steps), nothing=state["complete"], facts=facts
    )


def _refuse(wish: ModelWish, found: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    if state["state"] == "other":
        raise RefusedError(
            f"{wish.folder} is of another model or revision",
            why=f"it holds {state['holds']}, not {wish.repo}@{found['commit']}",
            fix="choose another folder with --to, or name that revision",
            code="folder-other",
        )
    if state["state"] == "foreign" and not wish.adopt:
        raise RefusedError(
            f"{wish.folder} holds files that ctl did not bring",
            why=f"{len(state['unproved'])} have the name and size of a file of this model, {len(state['differing'])} "
            "its name and another size",
            fix="`--adopt` proves them: good ones stay, others are moved aside; or choose another --to",
            code="folder-foreign",
        )
    needed = state["bytes_to_fetch"] + RESERVE
    if not state["complete"] and state["free"] < needed:
        raise RefusedError(
            f"{wish.folder} has no room for the model",
            why=f"{size(needed)} are needed, {size(state['free'])} are free",
            fix="free some, or choose a folder on another disk with --to",
            code="disk-space",
        )


def _sections(
    wish: ModelWish, found: Mapping[str, Any], state: Mapping[str, Any], steps: Sequence[Step]
) -> tuple[Mapping[str, Any], ...]:
    files, left_out = found["files"], found["left_out"]
    model = [
        ["name", wish.repo],
        ["revision", f"{wish.revision}: commit {found['commit']}"],
        ["files", f"{len(files)}, {size(found['bytes'])}"],
    ]
    if left_out:
        model.append(["left out", f"{len(left_out)}: {_some(left_out)}"])
    folder = [["path", wish.folder]]
    if state["proved"]:
        folder.append(["proved", f"{state['proved']:,} files are there and stay"])
    if state["unproved"]:
        folder.append(["to prove", f"{len(state['unproved']):,} files are there: {_some(state['unproved'])}"])
    if state["differing"]:
        folder.append(["moved aside", f"{_some(state['differing'])}: of another size"])
    if state["partial_bytes"]:
        folder.append(["continued", f"{size(state['partial_bytes'])} are there of an earlier try"])
    folder += [["download", size(state["bytes_to_fetch"])], ["free", size(state["free"])]]
    return (
        {"title": "Model", "rows": model},
        {"title": "Folder", "rows": folder},
        {"title": "Steps", "rows": [[step["name"], shlex.join(step["argv"])] for step in steps]},
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(posixpath.normpath(name) for name in names[:MAX_NAMED]) + more
