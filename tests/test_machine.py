"""Test which CPUs and memory this process may use, with control groups that are files in a folder."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from m3diff.records import machine
from m3diff.records.machine import available_memory, free_memory, usable_cpus, usable_memory
from tests.layouts import save_picture
from tests.toy import REPOSITORY

GIB = 2**30
V2 = "31 1 0:28 {group} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw,nsdelegate"
V1 = "32 1 0:29 {group} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"


def write_machine(root: Path, groups: str, mounts: list[str], files: dict[str, str | bytes]) -> Path:
    """Write /proc/self and the files of control groups below a folder."""
    contents: dict[str, str | bytes] = {
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": "\n".join(mounts) + "\n",
    }
    contents |= {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


@pytest.fixture
def large_machine(monkeypatch):
    """Simulate a machine with 64 CPUs and 256 GiB."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(1 if process else 64)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    monkeypatch.setattr(machine, "_physical_memory", lambda: 256 * GIB)


ROOT_MOUNT = [V2.format(group="/")]
BOTH_V1 = [V1.format(group="/", name="cpu,cpuacct"), V1.format(group="/", name="memory")]
V1_GROUPS = "4:cpu,cpuacct:/job/7\n3:memory:/job/7\n"

CPUS = {
    "version 2, own group": ("0::/\n", ROOT_MOUNT, {"cpu.max": "200000 100000\n"}, 2),
    "version 2, without a quota": ("0::/\n", ROOT_MOUNT, {"cpu.max": "max 100000\n"}, 64),
    "version 2, half a CPU counts as one": ("0::/\n", ROOT_MOUNT, {"cpu.max": "50000 100000\n"}, 1),
    "version 2, one and a half count as two": ("0::/\n", ROOT_MOUNT, {"cpu.max": "150000 100000\n"}, 2),
    "version 2, a quota above the machine": ("0::/\n", ROOT_MOUNT, {"cpu.max": "9900000 100000\n"}, 64),
    "version 2, the quota is a parent's": (
        "0::/pod/box/job\n",
        ROOT_MOUNT,
        {"pod/cpu.max": "300000 100000\n", "pod/box/cpu.max": "max 100000\n", "pod/box/job/cpu.max": "800000 100000\n"},
        3,
    ),
    "version 2, the mount shows the container's group": (
        "0::/docker/abc\n",
        [V2.format(group="/docker/abc")],
        {"cpu.max": "400000 100000\n"},
        4,
    ),
    "version 2, the group is outside of the namespace": (
        "0::/../../other\n",
        ROOT_MOUNT,
        {"cpu.max": "500000 100000\n"},
        5,
    ),
    "version 2, the mount shows the group of another tree": (
        "0::/pod/box\n",
        [V2.format(group="/docker/abc")],
        {"cpu.max": "400000 100000\n"},
        4,
    ),
    "version 2, the group is gone": ("0::/gone\n", ROOT_MOUNT, {"cpu.max": "600000 100000\n"}, 6),
    "version 1, own group": (
        V1_GROUPS,
        BOTH_V1,
        {"cpu,cpuacct/job/7/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/job/7/cpu.cfs_period_us": "100000\n"},
        3,
    ),
    "version 1, the quota is a parent's": (
        V1_GROUPS,
        BOTH_V1,
        {"cpu,cpuacct/job/cpu.cfs_quota_us": "100000\n", "cpu,cpuacct/job/cpu.cfs_period_us": "50000\n"},
        2,
    ),
    "version 1, without a quota": (
        V1_GROUPS,
        BOTH_V1,
        {"cpu,cpuacct/job/7/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/job/7/cpu.cfs_period_us": "100000\n"},
        64,
    ),
    "both versions, the smaller counts": (
        V1_GROUPS + "0::/x\n",
        [*BOTH_V1, "33 1 0:30 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"],
        {
            "unified/x/cpu.max": "700000 100000\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "900000\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
        7,
    ),
    "another controller's group": (
        "4:cpuset:/small\n0::/\n",
        ROOT_MOUNT,
        {"small/cpu.max": "100000 100000\n"},
        64,
    ),
    "a group with letters beyond ASCII": ("0::/\u00fcbung\n", ROOT_MOUNT, {"\u00fcbung/cpu.max": "100000 100000\n"}, 1),
    "a group with a line separator": ("0::/a\u2028b\n", ROOT_MOUNT, {"a\u2028b/cpu.max": "100000 100000\n"}, 1),
    "a mount below a folder with a space": (
        "0::/\n",
        [r"31 1 0:28 / /sys/fs/cgroup/my\040groups rw - cgroup2 cgroup rw"],
        {"my groups/cpu.max": "300000 100000\n"},
        3,
    ),
    "no control groups": ("", [], {}, 64),
    "an empty quota": ("0::/\n", ROOT_MOUNT, {"cpu.max": ""}, 64),
    "one number of two": ("0::/\n", ROOT_MOUNT, {"cpu.max": "100000"}, 64),
    "words for numbers": ("0::/\n", ROOT_MOUNT, {"cpu.max": "two 100000"}, 64),
    "bytes that are no text": ("0::/\n", ROOT_MOUNT, {"cpu.max": b"\xff\xfe\0"}, 64),
    "a period of nothing": ("0::/\n", ROOT_MOUNT, {"cpu.max": "100000 0\n"}, 64),
    "damaged lists of groups and mounts": ("x\n:\n0::\n\n", ["31 1", "- cgroup2", "a b c d e - cgroup2"], {}, 64),
}


@pytest.mark.parametrize("case", CPUS.values(), ids=CPUS.keys())
def test_usable_cpus_are_those_of_affinity_capped_by_every_quota(case, tmp_path, large_machine):
    groups, mounts, files, expected = case
    assert usable_cpus(write_machine(tmp_path, groups, mounts, files)) == expected


def test_usable_cpus_are_the_machines_where_the_system_has_no_affinity(tmp_path, large_machine, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert usable_cpus(tmp_path) == 96
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cpus(tmp_path) == 1


def test_usable_cpus_are_the_machines_where_a_sandbox_forbids_the_call(tmp_path, large_machine, monkeypatch):
    def refuse(_process: int) -> set[int]:
        raise PermissionError

    monkeypatch.setattr(os, "sched_getaffinity", refuse, raising=False)
    assert usable_cpus(tmp_path) == 96


def test_an_unreadable_quota_is_none(tmp_path, large_machine):
    root = write_machine(tmp_path, "0::/\n", ROOT_MOUNT, {"cpu.max/a-folder": "", "memory.max/a-folder": ""})
    assert usable_cpus(root) == 64
    assert usable_memory(root) == 256 * GIB


MEMORY = {
    "version 2, own group": ("0::/\n", ROOT_MOUNT, {"memory.max": f"{2 * GIB}\n"}, 2 * GIB),
    "version 2, without a limit": ("0::/\n", ROOT_MOUNT, {"memory.max": "max\n"}, 256 * GIB),
    "version 2, the limit is a parent's": (
        "0::/pod/job\n",
        ROOT_MOUNT,
        {"pod/memory.max": f"{GIB}\n", "pod/job/memory.max": "max\n"},
        GIB,
    ),
    "version 1, own group": (V1_GROUPS, BOTH_V1, {"memory/job/7/memory.limit_in_bytes": f"{3 * GIB}\n"}, 3 * GIB),
    "version 1, without a limit": (
        V1_GROUPS,
        BOTH_V1,
        {"memory/job/7/memory.limit_in_bytes": "9223372036854771712\n"},
        256 * GIB,
    ),
    "a limit above the machine": ("0::/\n", ROOT_MOUNT, {"memory.max": f"{999 * GIB}\n"}, 256 * GIB),
    "a limit of nothing": ("0::/\n", ROOT_MOUNT, {"memory.max": "0\n"}, 256 * GIB),
    "a damaged limit": ("0::/\n", ROOT_MOUNT, {"memory.max": "lots\n"}, 256 * GIB),
}


@pytest.mark.parametrize("case", MEMORY.values(), ids=MEMORY.keys())
def test_usable_memory_is_the_machines_capped_by_every_limit(case, tmp_path, large_machine):
    groups, mounts, files, expected = case
    assert usable_memory(write_machine(tmp_path, groups, mounts, files)) == expected


def test_usable_memory_is_capped_by_ulimit(tmp_path, large_machine, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (4 * GIB, resource.RLIM_INFINITY))
    assert usable_memory(tmp_path) == 4 * GIB


FREE = {
    "version 2": (
        {"memory.max": f"{8 * GIB}", "memory.current": f"{7 * GIB}", "memory.stat": f"inactive_file {2 * GIB}\n"},
        3 * GIB,
    ),
    "without statistics": ({"memory.max": f"{8 * GIB}", "memory.current": f"{7 * GIB}"}, GIB),
    "more used than allowed": ({"memory.max": f"{8 * GIB}", "memory.current": f"{9 * GIB}"}, 0),
    "without a limit": ({"memory.max": "max", "memory.current": f"{7 * GIB}"}, 100 * GIB),
    "a damaged count": ({"memory.max": f"{8 * GIB}", "memory.current": "?"}, 100 * GIB),
}


@pytest.mark.parametrize("case", FREE.values(), ids=FREE.keys())
def test_free_memory_is_what_the_machine_and_every_limit_leave(case, tmp_path, large_machine):
    files, expected = case
    root = write_machine(tmp_path, "0::/\n", ROOT_MOUNT, files)
    assert free_memory(100 * GIB, root) == expected


MEMINFO = {
    "as Linux writes it": ("MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:    600 kB\n", 600 * 1024),
    "without an estimate": ("MemTotal:  1000 kB\n", 256 * GIB),
    "damaged": ("MemAvailable: much\n", 256 * GIB),
    "cut short": ("MemAvailable:", 256 * GIB),
}


@pytest.mark.parametrize(("text", "expected"), MEMINFO.values(), ids=MEMINFO.keys())
def test_available_memory_is_what_the_kernel_estimates(text, expected, tmp_path, large_machine):
    root = write_machine(tmp_path, "0::/\n", ROOT_MOUNT, {})
    (root / "proc/meminfo").write_text(text)
    assert available_memory(root) == expected


def test_this_machines_own_files_are_read_without_a_fault():
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)
    assert usable_memory() > GIB // 8, "less than these tests occupy"
    assert 0 <= free_memory(GIB) <= GIB
    assert available_memory() > 0


def test_only_the_module_machine_counts_cpus():
    calls = ("sched_getaffinity", "os.cpu_count", "multiprocessing.cpu_count", "ProcessPoolExecutor()")
    calls += ("ThreadPoolExecutor()",)
    files = [*(REPOSITORY / "components").rglob("*.py"), *(REPOSITORY / "flows").rglob("*.py")]
    users = set()
    for file in files:
        text = file.read_text("utf-8")
        if any(call in text for call in calls):
            users.add(file.name)
    assert users == {"machine.py"}


# Removes the functions that only exist on Linux, as on macOS
WITHOUT_LINUX = """
import os, signal, sys
for name in [name for name in dir(os) if name.startswith("sched_")]:
    delattr(os, name)
LINUX_ALONE = (
    *("posix_fadvise", "posix_fallocate", "pidfd_open", "memfd_create", "copy_file_range", "getrandom", "eventfd"),
    *("setresuid", "setresgid", "splice", "sendfile", "fdatasync", "pipe2", "getxattr", "listxattr", "setxattr"),
)
for name in LINUX_ALONE:
    if hasattr(os, name):
        delattr(os, name)
for name in ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo"):
    if hasattr(signal, name):
        delattr(signal, name)
"""


def test_ingest_runs_on_a_system_without_the_calls_of_linux(tmp_path):
    save_picture(tmp_path / "raw/a.png", 1)
    save_picture(tmp_path / "raw/b.png", 2)
    (tmp_path / "raw/pairs.csv").write_text("before,after,captions,split\na.png,b.png,the lamp is gone,train\n")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WITHOUT_LINUX)
    done = ingest_with(tmp_path, site)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "records/mine/records/00000.parquet").is_file()


def ingest_with(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "from pathlib import Path; from m3diff.stages.ingest.params import DatasetEntry;"
        "from m3diff.stages.ingest.stage import ingest;"
        "ingest('mine', DatasetEntry(reader='pairs', root=Path('raw')), Path('cache.parquet'), Path('records'))"
    )
    environment = os.environ | {"PYTHONPATH": f"{site}:{REPOSITORY}"}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
