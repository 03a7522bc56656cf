"""Entries of ``/dev/shm`` and of hugetlbfs: names, owners, and leftover memory.

The owner of a segment holds an exclusive ``flock`` on its entry while it lives. So a name has one
owner at a time, and an entry without a lock is leftover memory of a killed owner. A segment of
reserved huge pages is an entry of the same name in a hugetlbfs, one of ``directories()``.

Leftover entries are unlinked, but never made shorter than their segment: a client that maps the
memory would be killed (SIGBUS). Every user may create entries in these directories, so
``open_entry`` opens all of them, and checks the owner on the file descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import hashlib
import itertools
import os
import pwd
import re
import stat
from collections.abc import Callable, Collection, Iterator
from typing import Final, NamedTuple

from kvstore.errors import (
    ClusterMismatchError,
    ConfigError,
    LeftOverMemoryError,
    NodeNameTakenError,
    StartupError,
)
from kvstore.memory import header as layout
from kvstore.runtime.host import SHM_DIRECTORY

SHM_PREFIX: Final = "kvstore."

SOCKET_PREFIX: Final = "kvstore-socket."
"""Prefix of nodes' sockets, so that a node cannot direct clients to another program's socket."""

KEY_PREFIX: Final = "kvstore-key."
"""Prefix of private files (``kvstore.memory.private_file``)."""

SHM_ENTRY_MISSING: Final = (
    "another program has removed it. systemd does so when the last session of a user ends "
    "(RemoveIPC=yes in logind.conf), unless it is a system user. Clients that start from now on "
    "use tcp, and the objects are lost when the node ends: drain it, and start it again"
)
"""The effect of a removed entry, for a log and for advice."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def directories() -> Iterator[str]:
    """Directories of segments: ``/dev/shm``, then each hugetlbfs."""
    yield SHM_DIRECTORY
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8") as mounts:
        for line in mounts:
            _, where, kind, *_ = line.split(" ")
            if kind == "hugetlbfs":
                yield where.encode().decode("unicode_escape")


def is_own(file: os.stat_result) -> bool:
    """Whether this user owns the file: a node accepts no other."""
    return file.st_uid == os.geteuid()


def is_removable(file: os.stat_result) -> bool:
    """Whether this user may remove the file. Its content is not trusted."""
    return is_own(file) or os.geteuid() == 0


def open_entry(
    path: str | os.PathLike[str],
    flags: int = os.O_RDWR,
    accepts: Callable[[os.stat_result], bool] = is_own,
) -> int:
    """Opens a regular file in a directory of several users. Follows no link, blocks on no pipe.

    Args:
        flags: with ``O_CREAT``, a new file has mode 600.
        accepts: selects the files by their owner.

    Raises:
        PermissionError: another user owns it, or this user may not open it.
        OSError: as ``os.open``; it is no regular file.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        if accepts(os.lstat(path)):
            raise
        raise _anothers(path) from error
    file = os.fstat(fd)
    if flags & os.O_EXCL or (accepts(file) and stat.S_ISREG(file.st_mode)):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "no regular file") if accepts(file) else _anothers(path)


def open_shared(path: str) -> int:
    """As ``open_entry``, for a client: memory of a node of its own user, of root, or of a group of
    this process (``--shm-group``). Root opens the memory of every user."""
    groups = (os.getegid(), *os.getgroups())

    def is_shared(file: os.stat_result) -> bool:
        return is_removable(file) or file.st_uid == 0 or file.st_gid in groups

    return open_entry(path, accepts=is_shared)


def _anothers(path: str | os.PathLike[str]) -> PermissionError:
    return PermissionError(errno.EPERM, f"it belongs to {_owner_of(path)}")


def _owner_of(path: str | os.PathLike[str]) -> str:
    user = os.lstat(path).st_uid
    with contextlib.suppress(KeyError):
        return f"the user {pwd.getpwuid(user).pw_name}"
    return f"the user {user}"


def free_node_name(base: str, owner: layout.SegmentOwner, avoid: Collection[str] = ()) -> str:
    """The first of ``base``, ``base-2``, ``base-3`` ... with leftover memory of ``owner``'s
    cluster; otherwise the first that no live process, other user or other cluster has.

    A suggestion: concurrent processes get the same name, and ``OwnedSegment.create`` decides.
    """
    places = tuple(directories())
    known = _numbers(base, places)
    names = (_numbered(base, n) for n in itertools.count(1) if n not in known)
    fresh = next(name for name in names if name not in avoid)
    free = ""
    for name in (_numbered(base, number) for number in sorted(known)):
        paths = [f"{place}/{SHM_PREFIX}{name}" for place in places]
        if name in avoid or any(_is_taken(path) for path in paths):
            continue
        found = [left for path in paths if (left := read_left(path)) is not None]
        lefts = [left for left in found if not left.owner.on_device]  # device memory is gone
        if any(layout.owner_mismatch(left.owner, owner) for left in lefts):
            continue
        if lefts:
            return name
        free = free or name
    return free or fresh


def _numbered(base: str, number: int) -> str:
    return base if number == 1 else f"{base}-{number}"


def _numbers(base: str, places: Collection[str]) -> set[int]:
    """The numbers of the entries ``base``, ``base-2`` ... that exist: few, maybe large (a master's
    own node is named after its port)."""
    pattern = re.compile(rf"{re.escape(SHM_PREFIX + base)}(?:-([2-9]|[1-9]\d{{1,5}}))?")
    numbers: set[int] = set()
    for directory in places:
        with contextlib.suppress(OSError):
            found = map(pattern.fullmatch, os.listdir(directory))
            numbers.update(int(match_[1] or 1) for match_ in found if match_)
    return numbers


def socket_name(shm_name: str) -> str:
    """The entry in ``/dev/shm`` of the socket that passes this segment's file descriptors. Short:
    the path of a socket has 107 bytes at most."""
    return SOCKET_PREFIX + hashlib.sha256(shm_name.encode()).hexdigest()[:16]


def key_path(shm_name: str) -> str:
    """Path of the private file of a segment of the host's memory, given its name or path."""
    return f"{SHM_DIRECTORY}/{KEY_PREFIX}{os.path.basename(shm_name).removeprefix(SHM_PREFIX)}"


def _beside(name: str) -> tuple[str, str]:
    """Paths of the other entries of a node of this name."""
    shm_name = SHM_PREFIX + name
    return f"{SHM_DIRECTORY}/{socket_name(shm_name)}", key_path(shm_name)


class LeftoverSegment(NamedTuple):
    """Memory that no living process owns."""

    path: str
    node: str
    """Empty: the process was killed before its segment was ready."""
    owner: layout.SegmentOwner
    size: int
    """Bytes of the file."""
    held: int
    """Bytes of memory used."""
    uuid: bytes = b""

    @property
    def name(self) -> str:
        """The node name that attaches this memory."""
        return os.path.basename(self.path).removeprefix(SHM_PREFIX)


def read_left(
    path: str, accepts: Callable[[os.stat_result], bool] = is_own
) -> LeftoverSegment | None:
    """Leftover memory at ``path``; None: none, or a live process or another user owns it."""
    try:
        fd = open_left(path, accepts)
    except NodeNameTakenError:
        return None
    if fd < 0:
        return None
    try:
        return _left_over(fd, path)
    finally:
        os.close(fd)


def left_overs() -> list[LeftoverSegment]:
    """All leftover memory on this host that this user may remove."""
    found = []
    for directory in directories():
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(directory)):
                if name.startswith(SHM_PREFIX):
                    left = read_left(f"{directory}/{name}", is_removable)
                    found += [left] if left is not None else []
    return found


def remove_left(left: LeftoverSegment) -> bool:
    """Frees leftover memory, under its lock; False: it is attached, or was removed."""
    try:
        fd = open_left(left.path, is_removable)
    except NodeNameTakenError:
        return False
    if fd < 0:
        return False
    try:
        if _left_over(fd, left.path) != left:
            return False
        os.unlink(left.path)
        for path in _beside(left.name):
            with contextlib.suppress(OSError):
                if os.lstat(path).st_uid == os.fstat(fd).st_uid:
                    os.unlink(path)
        return True
    finally:
        os.close(fd)


def _left_over(fd: int, path: str) -> LeftoverSegment:
    superblock = layout.unpack_superblock(os.pread(fd, layout.SUPERBLOCK_BYTES, 0))
    stat = os.fstat(fd)
    return LeftoverSegment(
        path,
        "" if superblock is None else superblock.node,
        layout.unpack_owner(raw_owner(fd)) or layout.SegmentOwner(),
        stat.st_size,
        stat.st_blocks * 512,
        b"" if superblock is None else superblock.uuid,
    )


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a valid name of a node or segment",
            advice="Use 1 to 128 letters, digits, '.', '_' and '-', a letter or digit first.",
            name=name,
        )


def group_id(group: str) -> int:
    """The id of a group, by name or number; -1: none. Raises ConfigError: it does not exist."""
    if not group:
        return -1
    if group.isascii() and group.isdigit():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(
            f"shm_group = {group!r}: there is no such group on this host",
            advice="getent group lists them; groupadd makes one.",
            key="shm_group",
        ) from None


def set_access(fd: int, path: str, group: int) -> None:
    """Permits the owner's user, and the members of ``group`` (-1: none), to map the entry.

    Raises:
        StartupError: this user may not give the entry to that group.
    """
    try:
        if group >= 0:
            os.fchown(fd, -1, group)
        os.fchmod(fd, 0o600 if group < 0 else 0o660)
    except OSError as error:
        raise StartupError(
            f"{path} cannot be given to group {group}: {error.strerror}",
            advice="The node's own user has to be a member of --shm-group.",
            path=path,
        ) from error


def is_of_a_node(there: os.stat_result) -> bool:
    """Whether only a user and a group may open this file, as after ``set_access``: other entries
    are not a node's."""
    return stat.S_ISREG(there.st_mode) and not there.st_mode & 0o007


def reclaim_elsewhere(shm_name: str, directory: str) -> None:
    """Removes leftover memory of this name in other directories."""
    for other in directories():
        path = f"{other}/{shm_name}"
        if other == directory or not os.path.lexists(path):
            continue
        if _is_taken(path):
            raise _name_taken(path)
        with contextlib.suppress(OSError):
            os.unlink(path)


def open_locked(path: str) -> int:
    """Opens a new, empty, locked entry. Unlinks a leftover one."""
    while True:
        try:
            fd = open_entry(path, os.O_RDWR | os.O_CREAT)
        except PermissionError as error:
            raise _name_taken(path) from error
        except OSError as error:
            raise StartupError(
                f"{path} cannot be created: {error.strerror}",
                advice=f"A node needs a writable {os.path.dirname(path)}.",
                path=path,
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # If the owner removed the entry before the lock, the inode has no name: try again.
            is_current = is_same_file(fd, path)
            if is_current and os.fstat(fd).st_size == 0:
                return fd
            if is_current:
                os.unlink(path)
        except BlockingIOError as error:
            os.close(fd)
            raise _name_taken(path) from error
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def open_left(path: str, accepts: Callable[[os.stat_result], bool] = is_own) -> int:
    """Opens and locks a leftover entry; -1: there is none."""
    try:
        fd = open_entry(path, accepts=accepts)
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise _name_taken(path) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_same_file(fd, path) and os.fstat(fd).st_size:
            return fd
    except BlockingIOError as error:
        os.close(fd)
        raise _name_taken(path) from error
    os.close(fd)
    return -1


def left_superblock(
    fd: int, path: str, node: str, size: int, *, volatile: bool
) -> layout.Superblock | None:
    """The superblock of leftover memory of that node and size; None: its process was killed before
    it wrote one. The file may be longer: writers can do that."""
    superblock = layout.read_superblock(os.pread(fd, layout.SUPERBLOCK_BYTES, 0))
    if isinstance(superblock, str):
        why = superblock
        if not why:
            return None
    elif superblock.size > os.fstat(fd).st_size:
        why = f"it has {os.fstat(fd).st_size} bytes, and its superblock says {superblock.size}"
    elif superblock.size != size:
        why = f"it has {superblock.size >> 20} MiB, and {size >> 20} MiB were asked for"
    elif superblock.node != node:
        why = f"it belongs to the node {superblock.node}"
    else:
        return superblock
    raise of_no_use(path, why, volatile=volatile)


def raw_owner(fd: int) -> bytes:
    return os.pread(fd, layout.OWNER_BYTES_MAX, layout.OWNER_OFFSET)


def of_another_cluster(path: str, left: layout.SegmentOwner, why: str) -> ClusterMismatchError:
    named = f" --cluster {left.cluster}" if left.cluster else ""
    return ClusterMismatchError(
        f"{path} was left by a node of another cluster: {why}",
        advice=f"If it is the same cluster, start the node with its former --master{named}, or "
        "take the memory over with --adopt. Otherwise choose another --name, or delete the memory: "
        f"kvstore clean {os.path.basename(path).removeprefix(SHM_PREFIX)}",
        path=path,
        cluster=left.cluster,
        places=",".join(left.locations),
    )


def of_no_use(path: str, why: str, *, volatile: bool = False) -> LeftOverMemoryError:
    return LeftOverMemoryError(
        f"{path} was left by another process and cannot be used: {why}",
        advice="Start with the same options as before, or delete its content with --discard.",
        path=path,
        volatile=int(volatile),
    )


def _name_taken(path: str) -> NodeNameTakenError:
    owner = "a running process"
    with contextlib.suppress(OSError):  # it was removed
        file = os.lstat(path)
        if not (is_own(file) and stat.S_ISREG(file.st_mode)):
            owner = _owner_of(path)
    return NodeNameTakenError(
        f"{path} belongs to {owner}",
        advice="Choose another node name, stop the node that has it, or have root remove the file.",
        path=path,
    )


def is_same_file(fd: int, path: str) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), named)


def is_locked(
    path: str | os.PathLike[str], accepts: Callable[[os.stat_result], bool] = is_removable
) -> bool:
    """Whether a live process owns this entry. Raises OSError: it is removed or another user's."""
    fd = open_entry(path, accepts=accepts)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _is_taken(path: str) -> bool:
    """Whether a segment at this path prevents a new one."""
    try:
        return is_locked(path, is_own)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def unlink_entry(path: str) -> None:
    """Raises PermissionError: it is another user's."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except PermissionError as error:
        raise _anothers(path) from error


def unlink_own(path: str) -> None:
    """As ``unlink_entry``, if possible."""
    with contextlib.suppress(OSError):
        os.unlink(path)
