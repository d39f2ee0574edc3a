"""What an output folder holds: shown to the user at preflight, and compared again before anything is deleted.

Every step is relative to an open folder and follows no link. One descriptor is open at a time and nothing recurses,
so neither many entries nor deep nesting is a limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from typing import Any, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Set, Tuple, TypedDict

from remote_payload.host.guard import DIRECTORY_FLAGS, Place, Problem, Refused, open_output, same_mount
from remote_payload.host.layout import OUTPUT_MANIFEST, OWNER_MARKER, SAMPLE_NAME, WRITING_KINDS, WRITTEN_PATHS

MAX_EXAMPLES = 50
PARTIAL = ".partial"
"""End of the name under which a sample is written until it is whole; see `extract.formats`."""

MAX_PROBLEMS = 20
MARKER_LIMIT = 1 << 16
"""64 KiB; a larger file of the marker's name is not a marker."""

_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Fingerprint(NamedTuple):
    """What tells an entry from a changed one. Folders count by their existence alone: their size and time depend on
    the file system, and a change inside shows in the entries themselves."""

    type: str  # "file", "folder", "link" or "other"
    size: int  # bytes; 0 for folders
    mtime_ns: int  # 0 for folders


class Visit(NamedTuple):
    """One entry. `parent` is the open folder that holds it, valid until the walk goes on."""

    parent: int
    name: str
    relpath: str
    fingerprint: Fingerprint


class Strangers(TypedDict):
    """What somebody put into the output of an extraction: it is told, and never deleted."""

    entries: int
    bytes: int
    names: List[str]  # relative paths, a folder's with "/" at its end for all that is in it; the first MAX_EXAMPLES


class Samples(TypedDict):
    """Whole samples of a share, by their names; whether they are good is proved by the job that goes on with them."""

    count: int
    bytes: int


class Listing(TypedDict):
    """A folder's contents without the owner marker. A name that is not UTF-8 is surrogate-escaped.

    `entries`, `bytes`, `partial`, `whole`, `digest` and `examples` are of what may be deleted: all but `not_ours`.
    """

    exists: bool
    marker: Optional[Dict[str, Any]]
    manifest: Optional[Dict[str, Any]]  # what the job says of the samples in it
    entries: int
    bytes: int
    partial: int  # of the entries, how many are files that were never finished
    whole: Samples
    digest: Optional[str]  # None: absent, empty, or not to be listed (see problems)
    examples: List[Dict[str, Any]]  # {"path" (relative), "type", "size"}, the first by path
    others: List[str]  # of these, top-level names that no extraction writes, where nothing says what job wrote
    not_ours: Strangers
    foreign: bool  # it holds entries and no marker says that they are ours
    problems: List[Problem]


def scan(path: str, root: str, shard: Tuple[int, int] = (1, 1)) -> Listing:
    """List `path`, an output folder strictly inside `root`. What stands against clearing it is in `problems`.

    `whole` counts those of `shard`, (number from 1, of how many). Raises nothing that a user's folder can cause: an
    unreadable folder is a problem in the listing.
    """
    try:
        place = open_output(path, root)
    except Refused as refused:
        return _listing(exists=os.path.lexists(path), problems=[refused.problem])
    except OSError as error:
        return _listing(exists=os.path.lexists(path), problems=[_unreadable(path, error)])
    try:
        return snapshot(place, shard).listing
    except Refused as refused:
        return _listing(exists=True, problems=[refused.problem])
    except OSError as error:
        return _listing(exists=True, problems=[_unreadable(path, error)])
    finally:
        place.close()


class Snapshot(NamedTuple):
    listing: Listing
    found: Dict[str, Fingerprint]  # by relative path, without what is not ours
    kept: FrozenSet[str]  # relative paths of what is not ours, and of the folders that hold it


def snapshot(place: Place, shard: Tuple[int, int] = (1, 1)) -> Snapshot:
    """Return the listing of an open place, and the fingerprint of each of its entries.

    Raises Refused if the tree is moved under our feet, OSError.
    """
    if place.folder < 0:
        return Snapshot(_listing(exists=False), {}, frozenset())
    marker = read_marker(place.folder)
    problems: List[Problem] = []
    found = {
        visit.relpath: visit.fingerprint
        for visit in walk(place, problems)
        if marker is None or visit.relpath != OWNER_MARKER
    }
    manifest = _read_record(place.folder, OUTPUT_MANIFEST)
    strange, kept = _strangers(found) if _is_of_samples(marker, manifest) else (set(), set())
    not_ours = _told(strange, found)
    found = {path: found[path] for path in found if path not in kept}
    others = {path for path in found if not WRITTEN_PATHS.fullmatch(path.split("/", 1)[0])}
    # What somebody put in comes first, so that it does not hide behind fifty samples; our own records come last.
    order = sorted(found, key=lambda path: (path not in others, path.startswith("."), path))
    listing = _listing(exists=True, problems=problems)
    listing["marker"] = marker
    listing["manifest"] = manifest
    listing["not_ours"] = not_ours
    listing["entries"] = len(found)
    listing["bytes"] = sum(fingerprint.size for fingerprint in found.values())
    listing["partial"] = sum(path.endswith(PARTIAL) for path in found)
    listing["whole"] = _samples(found, shard)
    if not _is_of_samples(marker, manifest):
        listing["others"] = sorted(path for path in others if "/" not in path)[:MAX_EXAMPLES]
    listing["digest"] = _digest(sorted(found), found) if found and not problems else None
    listing["examples"] = [
        {"path": path, "type": found[path].type, "size": found[path].size} for path in order[:MAX_EXAMPLES]
    ]
    listing["foreign"] = bool(found) and marker is None
    return Snapshot(listing, found, frozenset(kept))


def _samples(found: Dict[str, Fingerprint], shard: Tuple[int, int]) -> Samples:
    number, shares = shard
    samples: Samples = {"count": 0, "bytes": 0}
    for path, fingerprint in found.items():
        named = SAMPLE_NAME.fullmatch(path.rsplit("/", 1)[-1])
        if named and fingerprint.type == "file" and int(named["index"]) % shares == number - 1:
            samples["count"] += 1
            samples["bytes"] += fingerprint.size
    return samples


def is_emptied(path: str) -> bool:
    """Whether a folder bears our marker and, at its top, nothing that a job of ours wrote. Raises OSError."""
    folder = os.open(path, DIRECTORY_FLAGS)
    try:
        marker, manifest = read_marker(folder), _read_record(folder, OUTPUT_MANIFEST)
        names = set(_names(folder)) - {OWNER_MARKER}
    finally:
        os.close(folder)
    if marker is None:
        return False
    return not names or (
        _is_of_samples(marker, manifest) and not any(WRITTEN_PATHS.fullmatch(name) for name in names)
    )


def _is_of_samples(marker: Optional[Dict[str, Any]], manifest: Optional[Dict[str, Any]]) -> bool:
    """Whether the job that marked a folder writes samples; runs of earlier versions did not note their kind."""
    if marker is None:
        return False
    return marker["kind"] in WRITING_KINDS if marker.get("kind") else manifest is not None


def _strangers(found: Dict[str, Fingerprint]) -> Tuple[Set[str], Set[str]]:
    """Return the paths that no extraction writes, and these with the folders that hold them."""
    strange = {path for path in found if not WRITTEN_PATHS.fullmatch(path)}
    kept = set(strange)
    for path in strange:
        parts = path.split("/")
        kept.update("/".join(parts[:count]) for count in range(1, len(parts)))
    return strange, kept


def _told(strange: Set[str], found: Dict[str, Fingerprint]) -> Strangers:
    roots = sorted(path for path in strange if os.path.dirname(path) not in strange)
    return {
        "entries": len(strange),
        "bytes": sum(found[path].size for path in strange),
        "names": [path + ("/" if found[path].type == "folder" else "") for path in roots[:MAX_EXAMPLES]],
    }


def walk(place: Place, problems: List[Problem]) -> Iterator[Visit]:
    """Yield every entry below `place.folder`, a folder after its contents, so that each may be removed when it comes.

    Folders that are unreadable or on another mount are not entered; they are added to `problems` (the first
    MAX_PROBLEMS). Raises Refused if a folder was moved meanwhile, OSError.
    """
    stack: List[Tuple[Tuple[int, int], List[str], str, str]] = []
    current = os.open(".", DIRECTORY_FLAGS, dir_fd=place.folder)
    try:
        names, prefix = _names(current), ""
        while names or stack:
            if not names:
                # Going up by ".." needs one descriptor at any depth; the identity proves it is the way we came.
                upper = os.open("..", DIRECTORY_FLAGS, dir_fd=current)
                os.close(current)
                current = upper
                came_from, names, prefix, name = stack.pop()
                if _identity(current) != came_from:
                    raise Refused("moved", "the folder of %r was moved while it was read" % (prefix + name))
                yield Visit(current, name, prefix + name, Fingerprint("folder", 0, 0))
                continue
            name = names.pop()
            try:
                status = os.lstat(name, dir_fd=current)
            except FileNotFoundError:
                continue  # removed since the folder was read: then it is not an entry
            if not stat.S_ISDIR(status.st_mode):
                yield Visit(current, name, prefix + name, _fingerprint(status))
                continue
            child = _enter(place, current, name, prefix + name, problems)
            if child is not None:
                stack.append((_identity(current), names, prefix, name))
                os.close(current)
                current, names, prefix = child, _names(child), prefix + name + "/"
    finally:
        os.close(current)


def read_marker(folder: int) -> Optional[Dict[str, Any]]:
    """Return the owner marker of an open folder; None if there is none, or something else of its name."""
    record = _read_record(folder, OWNER_MARKER)
    return record if record is not None and "wire" in record and "run_id" in record else None


def _read_record(folder: int, name: str) -> Optional[Dict[str, Any]]:
    try:
        descriptor = os.open(name, _FILE_FLAGS, dir_fd=folder)
    except OSError:  # absent, a link, unreadable: in every case nothing proves that the folder is ours
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        record = json.loads(os.read(descriptor, MARKER_LIMIT))
    except ValueError:
        return None
    finally:
        os.close(descriptor)
    return record if isinstance(record, dict) else None


def _enter(place: Place, parent: int, name: str, relpath: str, problems: List[Problem]) -> Optional[int]:
    problem: Problem
    try:
        child = os.open(name, DIRECTORY_FLAGS, dir_fd=parent)
    except OSError as error:
        problem = _unreadable(relpath, error)
    else:
        if same_mount(child, place.device, place.mount_id):
            return child
        os.close(child)
        problem = {"code": "mount", "what": "%r is a mount point" % relpath}
    if len(problems) < MAX_PROBLEMS:
        problems.append(problem)
    return None


def _names(folder: int) -> List[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _identity(folder: int) -> Tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino


def _fingerprint(status: os.stat_result) -> Fingerprint:
    kind = "file" if stat.S_ISREG(status.st_mode) else "link" if stat.S_ISLNK(status.st_mode) else "other"
    return Fingerprint(kind, status.st_size, status.st_mtime_ns)


def _digest(order: List[str], found: Dict[str, Fingerprint]) -> str:
    digest = hashlib.sha256()
    for path in order:
        # NUL ends the path, because a name may hold anything else, a newline included.
        digest.update(b"%s\0%s %d %d\n" % (os.fsencode(path), found[path].type.encode(), *found[path][1:]))
    return digest.hexdigest()


def _unreadable(path: str, error: OSError) -> Problem:
    return {"code": "unreadable", "what": "%r cannot be read: %s" % (path, error.strerror or error)}


def _listing(exists: bool, problems: Optional[List[Problem]] = None) -> Listing:
    return {
        "exists": exists,
        "marker": None,
        "manifest": None,
        "entries": 0,
        "bytes": 0,
        "partial": 0,
        "whole": {"count": 0, "bytes": 0},
        "digest": None,
        "examples": [],
        "others": [],
        "not_ours": {"entries": 0, "bytes": 0, "names": []},
        "foreign": False,
        "problems": problems or [],
    }
