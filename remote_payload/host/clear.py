"""Empty an output folder, or claim it, on the host and under the lease.

Preflight showed a listing and the user confirmed it. Here the folder is listed again; if it is not what was shown,
nothing is deleted. Only entries of that listing are deleted, each looked at again first: a file that appears
meanwhile stays, and the clear fails because of it.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import time
from typing import Any, Container, Dict, List, NamedTuple, Optional

from remote_payload.host.errors import HostError
from remote_payload.host.files import write_all
from remote_payload.host.guard import Place, Refused, open_output
from remote_payload.host.layout import OWNER_MARKER, WRITING_KINDS, check_run_id
from remote_payload.host.listing import Fingerprint, Listing, Visit, read_marker, snapshot, walk
from remote_payload.host.liveness import user_name
from remote_payload.host.protocol import WIRE, EndReason, OwnedOutput, Stale
from remote_payload.host.writers import is_spent

MAX_NAMED = 5
"""How many entries an error names; the count is always given."""


class ClearError(HostError):
    """The folder was not cleared; `end_reason` is how the run ends because of it."""

    end_reason = EndReason.CLEAR_FAILED


class ClearChanged(ClearError):
    """The folder is not what was shown and confirmed."""

    end_reason = EndReason.CLEAR_CHANGED


class ClearFailed(ClearError):
    """The folder may not be cleared, or could not be."""


class Deletion(NamedTuple):
    entries: int
    bytes: int
    failures: List[str]  # "PATH: reason"
    newcomers: List[str]  # paths that are not as they were confirmed; left in place


def clear(output: OwnedOutput, run_id: str, workdir: Optional[str] = None) -> Dict[str, Any]:
    """Make `output` ready for a run as its `stale` says, and prove it by listing it again.

    With `workdir` a folder in which runs that are over left their records and no sample counts as empty: the records
    are deleted where `stale` would refuse them, or take up what they say of samples that are not there.

    Returns {"path", "stale", "deleted_entries", "deleted_bytes", "quarantined_to", "remaining", "not_ours"}: the last
    counts what no job of ours wrote, which is never deleted, and moved only with the whole folder. The owner marker
    stays. Raises ClearChanged if the folder differs from `output["digest"]` (nothing is deleted) or gains entries
    meanwhile, ClearFailed for everything else that stands against it.
    """
    path = output["path"]
    check_run_id(run_id)
    place = _open(output)
    try:
        listing, found, kept = snapshot(place)
        stale = Stale(output["stale"])
        _require_no_problem(path, listing)
        report = {
            "path": path, "stale": stale.value, "deleted_entries": 0, "deleted_bytes": 0,
            "quarantined_to": None, "remaining": listing["entries"], "not_ours": listing["not_ours"]["entries"],
        }  # fmt: skip
        keeps = stale in (Stale.FAIL, Stale.RESUME)
        spent = keeps and workdir is not None and is_spent(workdir, path, listing, run_id)
        if stale is Stale.RESUME and not spent:  # nothing is deleted: other shares may have written here since
            _require_ours(output, listing)
            return report
        _require_as_shown(output, listing)
        _require_ours(output, listing)
        if not found:
            return report
        if stale is Stale.FAIL and not spent:
            raise ClearFailed(
                "output-stale",
                "%s holds %s entries of an earlier run" % (path, format(listing["entries"], ",")),
                "the plan says stale = fail",
                "choose `--stale clear`, `--stale quarantine` or `--stale resume`",
            )
        if stale is Stale.QUARANTINE:
            report["quarantined_to"] = os.path.join(os.path.dirname(path), _quarantine(place, path, run_id))
        else:
            _note_kind(place.folder, listing, run_id)
            done = delete(place, found, {OWNER_MARKER, *kept})
            report["deleted_entries"], report["deleted_bytes"] = done.entries, done.bytes
            _require_complete(path, done)
        report["remaining"] = _require_empty(output)
        return report
    except Refused as refused:
        raise _refusal(path, refused) from refused
    except OSError as error:
        raise ClearFailed("output-io", "%s could not be cleared" % path, str(error)) from error
    finally:
        place.close()


def _note_kind(folder: int, listing: Listing, run_id: str) -> None:
    """Note in the marker of an earlier version what its manifest says, which is about to go: whose the rest is."""
    marker = listing["marker"]
    if marker is not None and not marker.get("kind") and listing["manifest"] is not None:
        _write_marker(folder, {**marker, "kind": WRITING_KINDS[0]}, run_id)


def claim(output: OwnedOutput, run_id: str, kind: Optional[str] = None) -> Dict[str, Any]:
    """Create the folder (0700, with what is missing below the root) and mark it as ours; return the marker.

    `kind` is the job's: it says which paths in the folder will be its own.

    Raises ClearFailed if it holds foreign entries and `adopt` is not set, is not to be used as an output, or cannot
    be written.
    """
    path = output["path"]
    place = _open(output, create=True)
    try:
        if read_marker(place.folder) is None and not output["adopt"] and snapshot(place).listing["foreign"]:
            raise _foreign(path)
        marker = {
            "wire": WIRE,
            "run_id": check_run_id(run_id),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "owner": user_name(os.getuid()),
            **({"kind": kind} if kind else {}),
        }
        _write_marker(place.folder, marker, run_id)
        return marker
    except Refused as refused:
        raise _refusal(path, refused) from refused
    except OSError as error:
        raise ClearFailed("output-io", "%s could not be claimed" % path, str(error)) from error
    finally:
        place.close()


def _open(output: OwnedOutput, create: bool = False) -> Place:
    path = output["path"]
    try:
        return open_output(path, output["root"], create)
    except Refused as refused:
        raise _refusal(path, refused) from refused
    except OSError as error:
        raise ClearFailed("output-io", "%s could not be opened" % path, str(error)) from error


def _require_ours(output: OwnedOutput, listing: Listing) -> None:
    if listing["foreign"] and not output["adopt"]:
        raise _foreign(output["path"])


def _require_as_shown(output: OwnedOutput, listing: Listing) -> None:
    path = output["path"]
    if listing["digest"] != output["digest"]:
        raise ClearChanged(
            "clear-changed",
            "%s is not what was shown: then %s entries of %s bytes, now %s of %s"
            % (path, *(format(each[key], ",") for each in (output, listing) for key in ("entries", "bytes"))),
            "something wrote there since preflight; nothing was deleted",
            "find out what writes there, then run again to see the new listing",
        )


def _require_no_problem(path: str, listing: Listing) -> None:
    for problem in listing["problems"]:
        raise ClearFailed("output-" + problem["code"], "%s may not be cleared" % path, problem["what"])


def delete(place: Place, confirmed: Dict[str, Fingerprint], spared: Container[str] = (OWNER_MARKER,)) -> Deletion:
    """Delete what is below an open place and as it was `confirmed`; `spared` may be there besides, and stays.

    Raises Refused if the tree is moved meanwhile, OSError.
    """
    entries, size = 0, 0
    failures: List[str] = []
    newcomers: List[str] = []
    for visit in walk(place, []):
        if visit.relpath not in confirmed:
            if visit.relpath not in spared:
                newcomers.append(visit.relpath)
        elif confirmed[visit.relpath] != visit.fingerprint:
            newcomers.append(visit.relpath)
        else:
            failure = _remove(visit)
            if failure is None:
                entries, size = entries + 1, size + visit.fingerprint.size
            else:
                failures.append("%r: %s" % (visit.relpath, failure))
    return Deletion(entries, size, failures, newcomers)


def _remove(visit: Visit) -> Optional[str]:
    """Remove one entry; return why it could not be, or None."""
    remove = os.rmdir if visit.fingerprint.type == "folder" else os.unlink
    try:
        try:
            remove(visit.name, dir_fd=visit.parent)
        except PermissionError:
            # A read-only folder of ours is to be emptied as confirmed; a foreign one stays as it is.
            holder = os.fstat(visit.parent)
            if holder.st_uid != os.geteuid() or holder.st_mode & stat.S_IWUSR:
                raise
            os.fchmod(visit.parent, stat.S_IMODE(holder.st_mode) | stat.S_IRWXU)
            remove(visit.name, dir_fd=visit.parent)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _quarantine(place: Place, path: str, run_id: str) -> str:
    """Rename the folder to a sibling, put an empty one in its place, and return the sibling's name."""
    name = "%s.quarantine-%s" % (place.name, run_id)
    try:
        os.lstat(name, dir_fd=place.parent)
    except FileNotFoundError:
        pass
    else:
        raise ClearFailed("output-quarantine", "%s cannot be put aside" % path, "%r exists already" % name)
    os.rename(place.name, name, src_dir_fd=place.parent, dst_dir_fd=place.parent)
    moved, listed = os.lstat(name, dir_fd=place.parent), os.fstat(place.folder)
    if (moved.st_dev, moved.st_ino) != (listed.st_dev, listed.st_ino):
        raise ClearChanged(
            "clear-changed",
            "%s was replaced by another folder while it was put aside" % path,
            "what was there is now %r beside it" % name,
        )
    os.mkdir(place.name, 0o700, dir_fd=place.parent)
    os.fsync(place.parent)
    return name


def _require_complete(path: str, done: Deletion) -> None:
    if done.newcomers:
        raise ClearChanged(
            "clear-changed",
            "%s entries of %s appeared or changed during the deletion and were left"
            % (format(len(done.newcomers), ","), path),
            ", ".join(repr(name) for name in done.newcomers[:MAX_NAMED]),
            "find out what writes there, then run again to see the new listing",
        )
    if done.failures:
        raise ClearFailed(
            "output-not-deleted",
            "%s entries of %s could not be deleted, %s were"
            % (format(len(done.failures), ","), path, format(done.entries, ",")),
            "; ".join(done.failures[:MAX_NAMED]),
            "look at owner and permissions: `ls -la %s`" % shlex.quote(path),
        )


def _require_empty(output: OwnedOutput) -> int:
    """Open and list the folder afresh by its path, as the job will meet it; return 0, its number of entries."""
    place = _open(output)
    try:
        listing = snapshot(place).listing
    finally:
        place.close()
    # A folder that cannot be entered is a problem, not an entry: without this it would pass for empty.
    _require_no_problem(output["path"], listing)
    if listing["entries"]:
        raise ClearChanged(
            "clear-changed",
            "%s is not empty after it was cleared" % output["path"],
            "%s entries, among them %r" % (format(listing["entries"], ","), listing["examples"][0]["path"]),
            "find out what writes there, then run again to see the new listing",
        )
    return listing["entries"]


def _write_marker(folder: int, marker: Dict[str, Any], run_id: str) -> None:
    temporary = "%s.%s" % (OWNER_MARKER, run_id)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        write_all(descriptor, json.dumps(marker).encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, OWNER_MARKER, src_dir_fd=folder, dst_dir_fd=folder)
    os.fsync(folder)


def _refusal(path: str, refused: Refused) -> ClearFailed:
    problem = refused.problem
    return ClearFailed("output-" + problem["code"], "%s may not be used as an output" % path, problem["what"])


def _foreign(path: str) -> ClearFailed:
    return ClearFailed(
        "output-foreign",
        "%s holds files that no run of ctl wrote" % path,
        "it has no %s" % OWNER_MARKER,
        "choose another folder, or `--adopt` to have them treated as stale output",
    )
