"""Copy files by content alone: mode and owner are set as for any new file.

`shutil.copytree` and `shutil.copy` also call chmod, which exFAT, SMB and FAT refuse. What they copy out of DVC's cache
stays read-only.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

Ignore = Callable[[str, list[str]], Iterable[str]]


def copy_folder(source: Path, target: Path, ignore: Ignore | None = None) -> Path:
    """Copy a folder's files into a new folder, links as what they lead to; return the new folder.

    Args:
        ignore: the names of a folder that are left out, as `shutil.ignore_patterns` makes it.

    Raises:
        FileExistsError: `target` exists.
    """
    target.mkdir(parents=True)
    names = os.listdir(source)
    left_out = set(ignore(str(source), names)) if ignore else set()
    for name in sorted(set(names) - left_out):
        path = source / name
        if path.is_dir():
            copy_folder(path, target / name, ignore)
        else:
            shutil.copyfile(path, target / name)
    return target


def link_or_copy(source: Path, target: Path) -> None:
    """Make a symbolic link to a file, or a copy of the file where the file system has no links."""
    try:
        target.symlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
