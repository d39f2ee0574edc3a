"""Which folder may be cleared at all, and how to reach it without following a link.

`guard` judges names alone and is pure; `open_output` walks the same way on descriptors and judges what is really
there. Nothing is ever deleted through a path: only through the descriptors that this module hands out.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Dict, List, NamedTuple, Optional

from remote_payload.host.mounts import is_at_or_under, mount_id_of, mount_points_within, read_mounts

MIN_DEPTH = 2
"""/a is refused, /a/b is not: what stands directly below / belongs to the system, whatever the configuration says."""

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Problem = Dict[str, str]
"""{"code", "what"}: a reason why a folder may not be cleared."""


class Refused(Exception):
    """The folder may not be touched; `problem` says why."""

    def __init__(self, code: str, what: str) -> None:
        super().__init__(what)
        self.problem: Problem = {"code": code, "what": what}


class Place(NamedTuple):
    """A folder strictly inside its root. Both descriptors are the caller's to close; see `close`."""

    parent: int  # the folder that holds it; -1 if a folder on the way does not exist
    name: str  # its last component
    folder: int  # the folder itself; -1 if it does not exist
    device: int  # st_dev of the root, and so of everything that may be deleted
    mount_id: Optional[int]  # of the root, likewise

    def close(self) -> None:
        for descriptor in (self.parent, self.folder):
            if descriptor >= 0:
                os.close(descriptor)


def guard(path: str, root: str) -> List[Problem]:
    """Judge by names alone whether `path` may be cleared as an output below `root`; an empty list means yes.

    Repeated slashes and "." are read as the kernel reads them; ".." is refused rather than resolved, because what
    it resolves to depends on links.
    """
    problems: List[Problem] = []
    for label, text in (("path", path), ("root", root)):
        if "\0" in text or not _encodable(text):
            problems.append({"code": "bad-name", "what": "the %s %r cannot be a file name" % (label, text)})
        elif not text.startswith("/"):
            problems.append({"code": "relative", "what": "the %s %r is not absolute" % (label, text)})
        elif ".." in text.split("/"):
            problems.append({"code": "parent-component", "what": "the %s %r contains '..'" % (label, text)})
    if problems:
        return problems
    inside, outer = components(path), components(root)
    if not outer:
        problems.append({"code": "root-too-wide", "what": "the root is /, which would allow any folder"})
    if inside == outer:
        problems.append({"code": "is-root", "what": "%r is the output root itself" % path})
    elif inside[: len(outer)] != outer:
        problems.append({"code": "outside-root", "what": "%r is not inside %r" % (path, root)})
    if len(inside) < MIN_DEPTH:
        problems.append({"code": "too-shallow", "what": "%r is less than two levels deep" % path})
    return problems


def components(path: str) -> List[str]:
    """Split an absolute path as the kernel does: empty components and "." say nothing."""
    return [part for part in path.split("/") if part not in ("", ".")]


def open_output(path: str, root: str, create: bool = False) -> Place:
    """Walk from `root` to `path` without following a link below the root, and return what was reached.

    Links in the root's own path are the administrator's choice and are resolved first. With `create` missing
    folders are made on the way, 0700. Raises Refused, OSError.
    """
    for problem in guard(path, root):
        raise Refused(**problem)
    real_root = os.path.realpath(root)
    names = components(path)[len(components(root)) :]
    real_path = "/".join([real_root.rstrip("/"), *names])
    for problem in guard(real_path, real_root):
        raise Refused(**problem)
    _refuse_mounts(real_root, real_path)

    parent = _open_root(root, real_root)
    try:
        device, mount_id = os.fstat(parent).st_dev, mount_id_of(parent)
        for number, name in enumerate(names):
            child = _open_child(parent, name, "/".join([real_root.rstrip("/"), *names[: number + 1]]), create)
            last = number == len(names) - 1
            if child < 0:
                if last:
                    return Place(parent, name, -1, device, mount_id)
                os.close(parent)
                return Place(-1, names[-1], -1, device, mount_id)
            _require_mount(child, device, mount_id, path)
            if last:
                return Place(parent, name, child, device, mount_id)
            os.close(parent)
            parent = child
    except BaseException:
        os.close(parent)
        raise
    raise AssertionError("guard() lets no path without a component below the root pass")


def same_mount(descriptor: int, device: int, mount_id: Optional[int]) -> bool:
    """Whether an open folder lies on the same file system and the same mount (a bind mount is another)."""
    return os.fstat(descriptor).st_dev == device and mount_id_of(descriptor) == mount_id


def _require_mount(child: int, device: int, mount_id: Optional[int], path: str) -> None:
    """Refuse, and close `child`, if it lies on another mount than the root."""
    try:
        if not same_mount(child, device, mount_id):
            raise Refused("mount", "%r lies on another mount than its root" % path)
    except BaseException:
        os.close(child)
        raise


def _open_root(root: str, real_root: str) -> int:
    """Open the resolved root component by component, so that nothing resolves differently a second time."""
    descriptor = os.open("/", DIRECTORY_FLAGS)
    for name in components(real_root):
        try:
            child = os.open(name, DIRECTORY_FLAGS, dir_fd=descriptor)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise Refused("root-missing", "the output root %r does not exist" % root) from None
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise Refused("root-not-a-folder", "the output root %r is not a folder" % root) from None
            raise
        finally:
            os.close(descriptor)
        descriptor = child
    return descriptor


def _open_child(parent: int, name: str, path: str, create: bool) -> int:
    """Open one component below the root; -1 if it does not exist."""
    if create:
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            pass  # judged by what it is, below
        else:
            os.fsync(parent)
    try:
        return os.open(name, DIRECTORY_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        return -1
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
    # O_DIRECTORY with O_NOFOLLOW reports a link as ENOTDIR too, so look again to name it rightly.
    if stat.S_ISLNK(os.lstat(name, dir_fd=parent).st_mode):
        raise Refused("symlink", "%r is a symbolic link" % path)
    raise Refused("not-a-folder", "%r is not a folder" % path)


def _refuse_mounts(real_root: str, real_path: str) -> None:
    mounts = read_mounts()
    for point in mount_points_within(real_root, mounts):
        if point != real_root and (is_at_or_under(real_path, point) or is_at_or_under(point, real_path)):
            raise Refused("mount", "%r is a mount point" % point)


def _encodable(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True
