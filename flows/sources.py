"""Where data come from: imported sources, which DVC asks, and drop folders, which people put files into.

Both are looked at in a worktree: the checkout's `.dvc` files and the person's data stay as they are.
"""

import filecmp
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from flows import dvc
from m3diff.provenance.git import git
from m3diff.settings.section import ParamsError

DROP = "M3DIFF_DROP"
SETTLED_S = 60.0  # without a change; a file that is half copied waits for the next look
MOST_NAMES = 5  # of files, in a reason


class Content(NamedTuple):
    """A folder at one moment: `fingerprint` is of names, sizes and times; `settled` where nothing changed of late."""

    fingerprint: str
    settled: bool


def dvc_files(commit: str = "HEAD") -> list[str]:
    return [path for path in git("ls-tree", "-r", "-z", "--name-only", commit).split("\0") if path.endswith(".dvc")]


def imports() -> list[str]:
    """The `.dvc` files of the last commit that name a source: those of `dvc import` and `dvc import-url`."""
    return [file for file in dvc_files() if "deps" in (yaml.safe_load(git("show", f"HEAD:{file}")) or {})]


def drop_folders() -> list[str]:
    """The folders that M3DIFF_DROP names, relative to the checkout.

    Raises:
        ParamsError: one is tracked by no `.dvc` file of the last commit.
    """
    parts = re.split(f"[,{os.pathsep}]", os.environ.get(DROP, ""))
    folders = [Path(part.strip()).as_posix() for part in parts if part.strip()]
    tracked = set(dvc_files())
    for folder in folders:
        if f"{folder}.dvc" not in tracked:
            raise ParamsError(
                f"{DROP}: {folder} is tracked by no .dvc file of the last commit; "
                f"`dvc add {folder}`, commit {folder}.dvc, and give it relative to {Path.cwd()}"
            )
    return folders


def content(folder: Path) -> Content:
    """What is in a folder, without reading its files."""
    digest, newest = hashlib.sha256(), 0
    try:
        for path in [folder, *sorted(folder.rglob("*"))]:
            found = path.lstat()
            newest = max(newest, found.st_ctime_ns)  # unlike the time of writing it cannot be set
            if not path.is_dir():
                name = path.relative_to(folder).as_posix()
                digest.update(f"{name}\0{found.st_size} {found.st_mtime_ns} {found.st_ino}\n".encode())
    except FileNotFoundError:  # it went away meanwhile
        return Content("", settled=False)
    return Content(digest.hexdigest(), abs(time.time() - newest / 1e9) > SETTLED_S)  # also where the clock was set back


def update(file: str) -> str:
    """Let DVC ask the source of an import, in this worktree; what it would be a reason for, had it changed.

    Raises:
        DvcError: the source cannot be reached.
    """
    dvc.ask("update", file)
    source = yaml.safe_load(Path(file).read_text(encoding="utf-8"))["deps"][0]
    repository = source.get("repo", {}).get("url")
    place = f"{source['path']} in {repository}" if repository else source["path"]
    return f"{file.removesuffix('.dvc')}: its source {place} changed"


def take_up(folder: str, checkout: Path) -> str:
    """Let DVC add what is in a folder of the checkout, in this worktree; what it would be a reason for.

    Raises:
        DvcError: DVC refuses.
        OSError: the disk is full, or a file cannot be read.
    """
    dvc.ask("checkout", "--allow-missing", f"{folder}.dvc")
    changes = bring(checkout / folder, Path(folder))
    dvc.ask("add", folder)
    counts = ", ".join(f"{len(names)} {how}" for how, names in changes.items() if names)
    names = [name for found in changes.values() for name in found]
    return f"{folder}: {counts} ({', '.join(names[:MOST_NAMES])}{', ...' if names[MOST_NAMES:] else ''})"


def bring(source: Path, target: Path) -> dict[str, list[str]]:
    """Make a worktree's folder equal to the checkout's, of which files are copied that differ; names by what was done.

    The worktree's files are links into DVC's cache: they are replaced, never written to.
    """
    theirs, ours = set(files(source)), set(files(target))
    found: dict[str, list[str]] = {"new": [], "changed": [], "removed": sorted(ours - theirs)}
    for name in found["removed"]:
        (target / name).unlink()
    for name in sorted(theirs):
        if name in ours and same(source / name, target / name):
            continue
        found["changed" if name in ours else "new"].append(name)
        if (target / name).is_dir():
            shutil.rmtree(target / name)
        (target / name).unlink(missing_ok=True)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return found


def files(folder: Path) -> Iterator[str]:
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def same(one: Path, other: Path) -> bool:
    return one.samefile(other) or (
        one.stat().st_size == other.stat().st_size and filecmp.cmp(one, other, shallow=False)
    )
