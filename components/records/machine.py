"""The CPUs and the memory that this process may use: the machine's, less what affinity, a container or `ulimit` take.

Linux limits a process by control groups: its own and every parent of it. Version 2 has one tree of them, version 1 a
tree for each controller; a machine may have both. `docker run --cpus 2` leaves `os.cpu_count()` at the machine's 64.
"""

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")

# Version 1 writes "no limit" as the largest multiple of a page below 2**63
UNLIMITED_BYTES = 2**60


@dataclass(frozen=True)
class GroupMount:
    """A mounted tree of control groups: its folder, and the group that the folder shows (a container's own, often)."""

    folder: Path
    group: PurePosixPath
    is_version_2: bool
    controllers: frozenset[str]


def usable_cpus(root: Path = ROOT) -> int:
    """Return the number of CPUs this process may use, at least 1; a quota of 1.5 CPUs counts as 2.

    Args:
        root: the folder that holds `proc` and the mounted control groups; another one in tests.
    """
    quotas = [math.ceil(quota) for folder in _own_groups(root, "cpu") if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([_scheduled_cpus(), *quotas]))


def usable_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory this process may fill: the machine's, or less where a limit is below them.

    Args:
        root: as of `usable_cpus`.
    """
    limits = [limit for folder in _own_groups(root, "memory") if (limit := _memory_limit(folder)) is not None]
    return min([_physical_memory(), *_address_space(), *limits])


def free_memory(available: int, root: Path = ROOT) -> int:
    """Return the bytes this process may still fill: of those `available` on the machine, what its limits leave.

    Pages of files that the kernel drops under pressure count as free.

    Args:
        available: bytes that the machine has left.
        root: as of `usable_cpus`.
    """
    rooms = [available, *_address_space()]
    for folder in _own_groups(root, "memory"):
        limit = _memory_limit(folder)
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            rooms.append(max(0, limit - max(0, used - _reclaimable(folder))))
    return min(rooms)


def _scheduled_cpus() -> int:
    """CPUs of this process's affinity; of the machine on systems without one (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        try:
            return len(os.sched_getaffinity(0))
        except OSError:  # a sandbox may forbid the call
            pass
    return os.cpu_count() or 1


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # the system does not tell
        return UNLIMITED_BYTES


def _address_space() -> list[int]:
    """The limit that `ulimit -v` sets, in bytes, if there is one; schedulers of clusters set it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return [] if soft == resource.RLIM_INFINITY else [soft]


def _own_groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups that limit this process by a controller: its own group, then each parent."""
    mounts = list(_mounts(root))
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        names, _, group = rest.partition(":")
        is_version_2 = number == "0" and not names
        if not is_version_2 and controller not in names.split(","):
            continue
        for mount in mounts:
            serves = mount.is_version_2 if is_version_2 else controller in mount.controllers
            if serves and mount.is_version_2 == is_version_2:
                yield from _with_parents(mount, PurePosixPath(group))


def _with_parents(mount: GroupMount, group: PurePosixPath) -> Iterator[Path]:
    # A container without a namespace of its own sees the machine's path in /proc/self/cgroup, and its own group as the
    # mount's root; a path with `..` lies outside the namespace
    is_below = group.is_relative_to(mount.group) and ".." not in group.parts
    folder = mount.folder / group.relative_to(mount.group) if is_below else mount.folder
    while folder != mount.folder:
        yield folder
        folder = folder.parent
    yield mount.folder


def _mounts(root: Path) -> Iterator[GroupMount]:
    for line in _lines(root / "proc/self/mountinfo"):
        places, separator, kind = line.partition(" - ")
        fields = places.split(" ")
        types = kind.split(" ")
        if not separator or len(fields) < 5 or len(types) < 3 or types[0] not in ("cgroup", "cgroup2"):
            continue
        yield GroupMount(
            folder=root / _unescaped(fields[4]).lstrip("/"),
            group=PurePosixPath(_unescaped(fields[3])),
            is_version_2=types[0] == "cgroup2",
            controllers=frozenset(types[2].split(",")),
        )


def _unescaped(path: str) -> str:
    """A path of mountinfo, in which a space is written \\040."""
    return path.replace("\\040", " ")


def _cpu_quota(folder: Path) -> float | None:
    """CPUs that a group may use by its quota; None without a quota, and for a file that is not as Linux writes it."""
    words = _words(folder / "cpu.max")
    if not words:
        words = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
    try:
        quota = int(words[0])
        period = int(words[1])
    except (IndexError, ValueError):  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def _memory_limit(folder: Path) -> int | None:
    limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
    return limit if limit is not None and 0 < limit < UNLIMITED_BYTES else None


def _reclaimable(folder: Path) -> int:
    """Bytes of pages of files that a group has in memory and does not use."""
    fields = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat") if " " in line)
    text = fields.get("total_inactive_file", fields.get("inactive_file", ""))  # version 1 has a total with children
    return int(text) if text.isdecimal() else 0


def _number(*files: Path) -> int | None:
    """The whole number in the first file that holds one."""
    for file in files:
        words = _words(file)
        if words and words[0].isdecimal():
            return int(words[0])
    return None


def _words(file: Path) -> list[str]:
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    """The lines of a file of the kernel; none of a file that is missing, unreadable or damaged."""
    try:
        return file.read_bytes().decode("utf-8", "surrogateescape").split("\n")  # groups have names of any bytes
    except OSError:
        return []
