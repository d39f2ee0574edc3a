"""What a model of the Hugging Face hub consists of, and how much of it a folder of this host holds.

`python -m remote_payload.extract.hub` answers the payload verb `hub`: a query as JSON on stdin, one line of JSON on
stdout. It downloads nothing. The hub is that of HF_ENDPOINT, the token that of HF_TOKEN.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import posixpath
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from remote_payload.host.errors import without_queries
from remote_payload.host.files import read_json
from remote_payload.host.hub import ANSWER

MARKER = ".ctl-model.json"
"""In a model's folder: {"schema_version", "repo", "commit", "complete", "files": {name: {"size", "mtime_ns"}}}, the
files being those that were proved. A folder without it is not ours to change."""

PARTIAL = ".ctl-partial"
"""In a model's folder: files under way, named by their digest, so that one of another revision is never continued."""

REPLACED = ".ctl-replaced"
"""In a model's folder: files that had the name of a listed one and other contents, as RUN_ID/NAME."""

SECOND_COPIES = (
    "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.gguf", "*.tflite",
    "consolidated*.safetensors", "original/*", "metal/*", "onnx/*",
)  # fmt: skip
"""The same weights in other forms; vLLM reads only `model*.safetensors` where a repository has them."""

MAX_NAMED = 20


class HubError(Exception):
    """The hub does not give the model; `record` is {"code", "what", "why", "fix"}."""

    def __init__(self, code: str, what: str, why: str, fix: str) -> None:
        why = without_queries(why)  # the client's own words name the address that it was redirected to
        super().__init__(f"{what}: {why}" if why else what)
        self.record = {"code": code, "what": what, "why": why, "fix": fix}


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """One file of a commit. `size` in bytes; `sha256` of large files, `blob` the git object id (SHA-1) of others."""

    name: str
    size: int
    sha256: str | None
    blob: str | None

    @property
    def key(self) -> str:
        """Names the content, as far as the hub says: equal keys are equal bytes."""
        return self.sha256 or self.blob or hashlib.sha256(f"{self.name}:{self.size}".encode()).hexdigest()

    def proves(self, path: str) -> bool:
        """Read a file and say whether it is this one; by its size alone where the hub gives no digest."""
        size = os.path.getsize(path)
        if size != self.size:
            return False
        if self.sha256 is None and self.blob is None:
            return True
        digest = hashlib.sha256() if self.sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        with open(path, "rb") as file:
            for piece in iter(lambda: file.read(1 << 20), b""):
                digest.update(piece)
        return digest.hexdigest() == (self.sha256 or self.blob)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of one commit that are wanted, and the names of those that are not."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]
    left_out: tuple[str, ...]


def list_model(repo: str, revision: str, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Listing:
    """Ask the hub. `include` and `exclude` are patterns of names; without either, SECOND_COPIES are left out.

    Raises HubError, also for a name that would leave the folder or is one of ours in it.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    except HFValidationError as error:
        raise HubError(
            "hub-name", f"{repo!r} is not the name of a model", str(error), "write ORGANISATION/NAME@REVISION"
        ) from error
    except HfHubHTTPError as error:
        raise refusal(error, repo, revision) from error
    files = []
    for sibling in info.siblings or ():
        name = sibling.rfilename
        parts = name.split("/")
        if any(part in ("", ".", "..") for part in parts) or parts[0] in (MARKER, PARTIAL, REPLACED):
            raise HubError(
                "hub-name", f"{repo} holds a file of an unusable name", repr(name), "do not use this model"
            )
        lfs = sibling.lfs
        files.append(
            HubFile(
                name=name, size=int(sibling.size or 0), sha256=lfs.sha256 if lfs else None,
                blob=None if lfs else sibling.blob_id,
            )
        )  # fmt: skip
    wanted = {file.name for file in files if _is_wanted(file.name, [each.name for each in files], include, exclude)}
    if not wanted:
        raise HubError(
            "hub-empty", f"no file of {repo} is wanted", f"{len(files):,} files", "correct --include, --exclude"
        )
    return Listing(
        repo=repo,
        commit=str(info.sha),
        files=tuple(file for file in files if file.name in wanted),
        left_out=tuple(file.name for file in files if file.name not in wanted),
    )


def _is_wanted(name: str, names: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> bool:
    if include or exclude:
        return (not include or _matches(name, include)) and not _matches(name, exclude)
    whole = any(fnmatch.fnmatchcase(each, "model*.safetensors") for each in names)
    return not (whole and _matches(name, SECOND_COPIES))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def refusal(error: Any, repo: str, revision: str) -> HubError:
    """Return what an HTTP error of the hub means. It answers 401 for what is private, gated or not there."""
    from huggingface_hub.errors import RevisionNotFoundError

    status = getattr(getattr(error, "response", None), "status_code", None)
    why = str(error).strip().splitlines()[0]
    if isinstance(error, RevisionNotFoundError):
        return HubError("hub-revision", f"{repo} has no revision {revision}", why, "see its list of commits and tags")
    if status in (401, 403, 404):
        if os.environ.get("HF_TOKEN"):
            fix = "check the name, that the token may read it, and that its licence was accepted on the hub's page"
            return HubError("hub-refused", f"the hub does not give {repo} to this token ({status})", why, fix)
        fix = "check the name; of a private or gated model give a token: `--token-stdin`, or HF_TOKEN as a secret"
        return HubError("hub-refused", f"the hub does not give {repo} without a token ({status})", why, fix)
    return HubError("hub-failed", f"the hub could not say what {repo} consists of", why, "try again later")


# --------------------------------------------------------------------------------------- the folder


def read_marker(folder: str) -> dict[str, Any]:
    """Return a folder's marker, {} without one. Raises ValueError if it is no JSON object."""
    return read_json(os.path.join(folder, MARKER)) or {}


def is_proved(folder: str, marker: dict[str, Any], file: HubFile) -> bool:
    """Whether a file was proved in an earlier run and has not been touched since."""
    record = marker.get("files", {}).get(file.name)
    try:
        status = os.stat(os.path.join(folder, file.name))
    except FileNotFoundError:
        return False
    return record == {"size": file.size, "mtime_ns": status.st_mtime_ns} and status.st_size == file.size


def partial_path(folder: str, file: HubFile) -> str:
    """Return where a file lies while it is under way: two files may be of the same contents, and come at once."""
    name = hashlib.sha256(file.name.encode()).hexdigest()[:8]
    return os.path.join(folder, PARTIAL, f"{file.key}-{name}")


def partial_size(folder: str, file: HubFile) -> int:
    try:
        return min(os.path.getsize(partial_path(folder, file)), file.size)
    except FileNotFoundError:
        return 0


def look_at_folder(folder: str, listing: Listing) -> dict[str, Any]:
    """Compare a folder with a listing, by names, sizes and what was proved before; nothing is read whole.

    Returns {"path", "state" ("absent", "empty", "ours", "other", "foreign"), "holds", "complete", "proved" (count),
    "unproved", "differing", "missing" (names), "bytes_to_fetch", "partial_bytes", "free"}. `differing` are files of a
    listed name and another size.
    """
    names = os.listdir(folder) if os.path.isdir(folder) else None
    marker = read_marker(folder) if names else {}
    proved, unproved, differing, missing = [], [], [], []
    for file in listing.files:
        path = os.path.join(folder, file.name)
        if not os.path.lexists(path):
            missing.append(file)
        elif is_proved(folder, marker, file):
            proved.append(file)
        elif os.path.isfile(path) and os.path.getsize(path) == file.size:
            unproved.append(file)
        else:
            differing.append(file)
    state = "absent" if names is None else "empty" if not names else "foreign"
    holds = f"{marker['repo']}@{marker['commit']}" if marker else ""
    if marker:
        state = "ours" if holds == f"{listing.repo}@{listing.commit}" else "other"
    partial = sum(partial_size(folder, file) for file in (*missing, *differing))
    return {
        "path": folder,
        "state": state,
        "holds": holds,
        "complete": bool(marker.get("complete")) and len(proved) == len(listing.files),
        "proved": len(proved),
        "unproved": [file.name for file in unproved],
        "differing": [file.name for file in differing],
        "missing": [file.name for file in missing],
        "bytes_to_fetch": sum(file.size for file in (*missing, *differing)) - partial,
        "partial_bytes": partial,
        "free": free_bytes(folder),
    }


def free_bytes(folder: str) -> int:
    """Return the free bytes of the file system that a folder lies on, or will lie on."""
    nearest = os.path.abspath(folder)
    while not os.path.isdir(nearest):
        nearest = posixpath.dirname(nearest)
    space = os.statvfs(nearest)
    return space.f_bavail * space.f_frsize


def _looked_at(folder: str, listing: Listing) -> dict[str, Any]:
    """`look_at_folder`, whose errors are the folder's and say nothing of the hub. Raises HubError."""
    try:
        return look_at_folder(folder, listing)
    except (OSError, ValueError) as error:
        fix = "correct its permissions, or choose another folder with --to"
        raise HubError("folder-unreadable", f"{folder} cannot be looked at", str(error), fix) from error


def main() -> int:
    query = json.load(sys.stdin)
    try:
        listing = list_model(query["repo"], query["revision"], query["include"], query["exclude"])
        answer: dict[str, Any] = {
            "repo": listing.repo,
            "commit": listing.commit,
            "files": [asdict(file) for file in listing.files],
            "bytes": sum(file.size for file in listing.files),
            "left_out": list(listing.left_out),
            "folder": _looked_at(query["folder"], listing),
        }
    except HubError as error:
        answer = {"error": error.record}
    except ModuleNotFoundError as error:
        fix = "install it there: `ctl hosts setup --with huggingface_hub`"
        answer = {"error": {"code": "hub-client-missing", "what": "the host's environment has no client of the hub",
                            "why": str(error), "fix": fix}}  # fmt: skip
    except Exception as error:  # noqa: BLE001 - the hub's client raises its HTTP library's errors, which vary
        why = without_queries(f"{type(error).__name__}: {error}")
        fix = "check the host's way to the hub (HTTPS_PROXY, HF_ENDPOINT in `env` of hosts.toml)"
        answer = {"error": {"code": "hub-unreachable", "what": "the hub cannot be reached from the host", "why": why,
                            "fix": fix}}  # fmt: skip
    print("\n" + ANSWER + json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
