"""Copy the contents of files, but not their mode and owner. Copies get the default mode and owner of new files.

`shutil.copytree` and `shutil.copy` also copy the mode. exFAT, SMB and FAT file systems do not allow that, and a copy of
a file in DVC's cache would be read-only.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

Ignore = Callable[[str, list[str]], Iterable[str]]


def copy_folder(source: Path, target: Path, ignore: Ignore | None = None) -> Path:
    """Copy the files of a folder to a new folder and return the new folder. Links are replaced by copies of the files.

    Args:
        source: folder to copy.
        target: folder to create.
        ignore: function that returns the names to skip in a folder, for example created by `shutil.ignore_patterns`.

    Raises:
        FileExistsError: `target` exists.
    """
    target.mkdir(parents=True)
    names = os.listdir(source)
    ignored_names = set(ignore(str(source), names)) if ignore else set()
    for name in sorted(set(names) - ignored_names):
        path = source / name
        if path.is_dir():
            copy_folder(path, target / name, ignore)
        else:
            shutil.copyfile(path, target / name)
    return target


def link_or_copy(source: Path, target: Path) -> None:
    """Create a symbolic link to a file, or a copy of the file if the file system does not support links."""
    try:
        target.symlink_to(source)
    except OSError:
        shutil.copyfile(source, target)
