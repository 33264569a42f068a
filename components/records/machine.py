"""Determine the CPUs and memory that this process may use, within the limits of affinity, containers and `ulimit`.

Linux limits a process by control groups: the process's group and all parents of this group. Version 2 of control groups
has a single tree of groups, version 1 has one tree per controller (a resource such as memory), and a machine may use
both versions. `docker run --cpus 2` sets such a limit, which `os.cpu_count()` ignores: it still returns all CPUs of the
machine.
"""

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")

# Larger limits mean "no limit". Version 1 represents it by the largest multiple of the page size below 2**63
UNLIMITED_BYTES = 2**60


@dataclass(frozen=True)
class GroupMount:
    """A mounted tree of control groups.

    Attributes:
        folder: folder where the tree is mounted.
        group: the group whose files are at the top of the folder. In a container, this is often the container's group.
        is_version_2: whether this is a tree of version 2.
        controllers: names of the controllers, for a tree of version 1.
    """

    folder: Path
    group: PurePosixPath
    is_version_2: bool
    controllers: frozenset[str]


def usable_cpus(root: Path = ROOT) -> int:
    """Return the number of CPUs that this process may use, at least 1. A quota of 1.5 CPUs counts as 2.

    Args:
        root: the folder that contains `proc` and the mounted control groups. Tests use a different one.
    """
    limits = [_cpus_in_affinity()]
    for folder in _limiting_groups(root, "cpu"):
        quota = _cpu_quota(folder)
        if quota is not None:
            limits.append(math.ceil(quota))
    return max(1, min(limits))


def usable_memory(root: Path = ROOT) -> int:
    """Return the memory that this process may use, in bytes: the machine's memory, or a limit that is lower.

    Args:
        root: as in `usable_cpus`.
    """
    limits = [_physical_memory(), *_address_space_limits()]
    for folder in _limiting_groups(root, "memory"):
        limit = _memory_limit(folder)
        if limit is not None:
            limits.append(limit)
    return min(limits)


def available_memory(root: Path = ROOT) -> int:
    """Return the memory that is available for new processes, in bytes.

    The value is Linux's estimate. On other systems, it is the total memory of the machine.

    Args:
        root: as in `usable_cpus`.
    """
    for line in _read_lines(root / "proc/meminfo"):
        name, _, amount = line.partition(":")
        kilobytes = amount.split()[:1]
        if name == "MemAvailable" and kilobytes and kilobytes[0].isdecimal():
            return int(kilobytes[0]) * 1024
    return _physical_memory()


def free_memory(available: int, root: Path = ROOT) -> int:
    """Return the memory that this process may still use, in bytes, within the limits of the process.

    Cached pages of files count as free, because the kernel reclaims them when memory is short.

    Args:
        available: available memory on the machine, in bytes.
        root: as in `usable_cpus`.
    """
    limits = [available, *_address_space_limits()]
    for folder in _limiting_groups(root, "memory"):
        limit = _memory_limit(folder)
        used_bytes = _read_number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and used_bytes is not None:
            occupied_bytes = max(0, used_bytes - _reclaimable_bytes(folder))
            limits.append(max(0, limit - occupied_bytes))
    return min(limits)


def _cpus_in_affinity() -> int:
    """Return the number of CPUs in this process's affinity. On systems without affinity (macOS), return all CPUs."""
    if hasattr(os, "sched_getaffinity"):
        try:
            return len(os.sched_getaffinity(0))
        except OSError:  # a sandbox can forbid the call
            pass
    return os.cpu_count() or 1


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):  # the system does not support these names
        return UNLIMITED_BYTES


def _address_space_limits() -> list[int]:
    """Return a list with the limit of `ulimit -v` in bytes, or an empty list. Cluster schedulers set this limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return [] if soft == resource.RLIM_INFINITY else [soft]


def _limiting_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the control groups that limit this process by a controller: its group, then all parents."""
    mounts = list(_mounts(root))
    for line in _read_lines(root / "proc/self/cgroup"):
        # "<hierarchy>:<controllers>:<group>"; for version 2, the hierarchy is 0 and the controllers are empty
        hierarchy, _, controllers_and_group = line.partition(":")
        controllers, _, group = controllers_and_group.partition(":")
        is_version_2 = hierarchy == "0" and not controllers
        if not is_version_2 and controller not in controllers.split(","):
            continue
        for mount in mounts:
            has_controller = is_version_2 or controller in mount.controllers
            if has_controller and mount.is_version_2 == is_version_2:
                yield from _folders_up_to_mount(mount, PurePosixPath(group))


def _folders_up_to_mount(mount: GroupMount, group: PurePosixPath) -> Iterator[Path]:
    """Yield the folder of a group, then the folders of its parents up to the group at the top of the mount."""
    # In a container that shares the machine's namespace, /proc/self/cgroup contains the machine's path, while the
    # container's group is at the top of the mount. A path with `..` is outside the namespace. In both cases, only the
    # mount's group counts
    is_below = group.is_relative_to(mount.group) and ".." not in group.parts
    folder = mount.folder / group.relative_to(mount.group) if is_below else mount.folder
    while folder != mount.folder:
        yield folder
        folder = folder.parent
    yield mount.folder


def _mounts(root: Path) -> Iterator[GroupMount]:
    """Yield the mounted trees of control groups."""
    for line in _read_lines(root / "proc/self/mountinfo"):
        # proc(5): "... <group> <folder> <options> ... - <file system> <source> <controllers and options>"
        mount_point, separator, file_system = line.partition(" - ")
        fields = mount_point.split(" ")
        types = file_system.split(" ")
        if not separator or len(fields) < 5 or len(types) < 3 or types[0] not in ("cgroup", "cgroup2"):
            continue
        yield GroupMount(
            folder=root / _unescape_path(fields[4]).lstrip("/"),
            group=PurePosixPath(_unescape_path(fields[3])),
            is_version_2=types[0] == "cgroup2",
            controllers=frozenset(types[2].split(",")),
        )


def _unescape_path(path: str) -> str:
    """Return a path from mountinfo with \\040 replaced by a space."""
    return path.replace("\\040", " ")


def _cpu_quota(folder: Path) -> float | None:
    """Return the number of CPUs that a group's quota allows, or None if there is no quota or the file is invalid."""
    words = _read_words(folder / "cpu.max")
    if not words:  # version 1 has separate files for the quota and the period
        words = _read_words(folder / "cpu.cfs_quota_us") + _read_words(folder / "cpu.cfs_period_us")
    try:
        quota = int(words[0])
        period = int(words[1])
    except (IndexError, ValueError):  # "max", or the file is missing
        return None
    return quota / period if quota > 0 and period > 0 else None


def _memory_limit(folder: Path) -> int | None:
    """Return the memory limit of a group in bytes, or None if there is no limit."""
    limit = _read_number(folder / "memory.max", folder / "memory.limit_in_bytes")
    return limit if limit is not None and 0 < limit < UNLIMITED_BYTES else None


def _reclaimable_bytes(folder: Path) -> int:
    """Return the size of a group's inactive file pages in bytes. The kernel can reclaim these pages."""
    fields = dict(line.split(" ", 1) for line in _read_lines(folder / "memory.stat") if " " in line)
    # version 1 also has a total that includes child groups
    text = fields.get("total_inactive_file", fields.get("inactive_file", ""))
    return int(text) if text.isdecimal() else 0


def _read_number(*files: Path) -> int | None:
    """Return the integer at the start of a file, from the first file that begins with an integer, or None."""
    for file in files:
        words = _read_words(file)
        if words and words[0].isdecimal():
            return int(words[0])
    return None


def _read_words(file: Path) -> list[str]:
    return " ".join(_read_lines(file)).split()


def _read_lines(file: Path) -> list[str]:
    """Return the lines of a kernel file, or an empty list if it is missing or cannot be read."""
    try:
        # the name of a group may contain any bytes
        return file.read_bytes().decode("utf-8", "surrogateescape").split("\n")
    except OSError:
        return []
