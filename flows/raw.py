"""Raw data in a flow's worktree: a link for each dataset's folder, not for each of its files.

DVC links file by file, which takes a minute for 300,000 of them, in every run again. Here a state of such a folder is
linked once, from the cache, into a folder of the checkout that bears its hash (`runs/linked/<md5>`), and the worktrees
of all runs lead there. A run holds a lock on what it uses; what no run used for a week goes.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from flows import dvc
from m3diff.provenance.dvc import listing, object_file

FOLDERS = Path("runs/linked")
KEPT_DAYS = 7


@contextmanager
def in_place(checkout: Path, changed: Collection[str]) -> Iterator[None]:
    """Within, the raw data that DVC tracks are in the worktree that is the current directory, as their `.dvc` files
    say. A folder that is there already stays; what the cache has not whole comes by DVC, as far as it has it.

    Args:
        checkout: where the linked folders are kept.
        changed: stages that DVC will be asked for. Of what they read it is told the hashes, which it else would make.
    """
    cache, place = dvc.cache_folder(), checkout / FOLDERS
    place.mkdir(parents=True, exist_ok=True)
    sweep(place)
    with ExitStack() as stack:
        for path, (md5, readers) in dvc.raw_data().items():
            if path.exists():
                continue
            folder = place / md5.removesuffix(".dir")
            stack.enter_context(held(folder.with_suffix(".lock"), fcntl.LOCK_SH))
            if not linked(folder, cache, md5):
                dvc.link_data(path)
                continue
            os.utime(folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(folder)
            if readers & set(changed):
                dvc.remember(path, listing(cache, md5))
        yield


def all_there(cache: Path, hashes: Iterable[str]) -> bool:
    """Whether the cache has these files. It is asked folder by folder: there are 256."""
    known: dict[str, set[str]] = {}
    for md5 in hashes:
        folder = md5[:2]
        if folder not in known:
            place = object_file(cache, md5).parent
            known[folder] = set(os.listdir(place)) if place.is_dir() else set()
        if md5[2:] not in known[folder]:
            return False
    return True


def linked(folder: Path, cache: Path, md5: str) -> bool:
    """Whether there is a folder of links to the files of this list; it is made where the cache has them all."""
    with held(folder.with_suffix(".building"), fcntl.LOCK_EX):
        if folder.is_dir():
            return True
        files = listing(cache, md5)
        if not files or not all_there(cache, files.values()):
            return False
        half = folder.with_suffix(".half")
        shutil.rmtree(half, ignore_errors=True)  # a killed run left it
        link_all(half, cache, files)
        os.sync()  # so that no loss of power leaves a folder that lacks some
        half.rename(folder)
        return True


def link_all(folder: Path, cache: Path, files: Mapping[str, str]) -> None:
    """Hard links; symbolic ones from where the disk refuses: the cache is on another one, or a file has too many."""
    for parent in {os.path.dirname(name) for name in files}:
        (folder / parent).mkdir(parents=True, exist_ok=True)
    root, target = f"{cache}/files/md5", str(folder)
    link: Callable[[str, str], None] = os.link
    for name, md5 in files.items():
        try:
            link(f"{root}/{md5[:2]}/{md5[2:]}", f"{target}/{name}")
        except OSError:
            link = os.symlink
            link(f"{root}/{md5[:2]}/{md5[2:]}", f"{target}/{name}")


def sweep(place: Path) -> None:
    """Remove what no run used for KEPT_DAYS."""
    for folder in [path for path in place.glob("*") if path.is_dir()]:
        if time.time() - folder.stat().st_mtime < KEPT_DAYS * 86400:
            continue
        with suppress(BlockingIOError), held(folder.with_suffix(".lock"), fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(folder)


@contextmanager
def held(file: Path, how: int) -> Iterator[None]:
    """Hold a lock file; the kernel gives it back when the process ends, however it ends.

    Raises:
        BlockingIOError: another process holds it, and `how` says not to wait.
    """
    with file.open("a+") as lock:
        fcntl.flock(lock, how)
        yield
