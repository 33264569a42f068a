"""A disk that forgets: what a folder would hold had the power gone at some moment, by what was flushed until then.

A kill never tests this, since the kernel still writes what a dead process left. Files are known by their inode, so that
what Rust or C writes counts too, as long as Python flushes it.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

CHANGES = ("replace", "rename", "unlink", "remove", "rmdir", "mkdir", "link", "symlink")
FLUSHES = ("fsync", "fdatasync")


class Image(NamedTuple):
    """The content of the folder when the machine is up again; folders end in `/`.

    `lost` is `names` (of what was not flushed nothing is left, new names too are gone and old ones back) or `contents`
    (the names are there, as a file system writes them by itself, but a file that was not flushed is empty).
    """

    before: str  # which call
    lost: str
    files: dict[str, bytes]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith("/"):
                (folder / name).mkdir(exist_ok=True)
            else:
                (folder / name).write_bytes(content)
        return folder


class Disk:
    """Within, `images` gets what there would be when power goes, two for each moment: before each call that flushes or
    changes names, and the end. All of the folder `root` is on the disk in the beginning."""

    def __init__(self, root: Path) -> None:
        self.root, self.images = root, list[Image]()
        self.contents: dict[int, bytes] = {}  # by inode
        self.names: dict[int, dict[str, int]] = {}  # of a folder's inode
        self.held: dict[int, int] = {}  # open, so that no inode's number is given to another file
        self.real: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Self:
        for path in [self.root, *self.root.rglob("*")]:
            self.flushed(path)
        for name in (*CHANGES, *FLUSHES):
            self.real[name] = getattr(os, name)
            setattr(os, name, self.watched(name))
        return self

    def __exit__(self, *error: object) -> None:
        for name, real in self.real.items():
            setattr(os, name, real)
        self.power_goes("the end")
        for handle in self.held.values():
            os.close(handle)

    def watched(self, name: str) -> Callable[..., Any]:
        real = self.real[name]

        def call(*arguments: Any, **named: Any) -> Any:
            self.power_goes(f"{len(self.images) // 2}: {name}")
            result = real(*arguments, **named)
            if name in FLUSHES:
                self.flushed(Path(os.readlink(f"/proc/self/fd/{arguments[0]}")))
            return result

        return call

    def flushed(self, path: Path) -> None:
        inode = self.hold(path)
        if path.is_dir():
            self.names[inode] = {entry.name: self.hold(Path(entry.path)) for entry in os.scandir(path)}
        else:
            self.contents[inode] = path.read_bytes()

    def hold(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self.held:
            self.held[inode] = os.open(path, os.O_RDONLY)
        return inode

    def power_goes(self, before: str) -> None:
        shown = {self.hold(path): path for path in [self.root, *self.root.rglob("*")]}
        folders = {inode: path for inode, path in shown.items() if path.is_dir()}
        visible = {inode: {each.name: each.inode() for each in os.scandir(path)} for inode, path in folders.items()}
        for lost, names in (("names", self.names), ("contents", visible)):
            self.images.append(Image(before, lost, dict(self.tree(self.root.stat().st_ino, names, ""))))

    def tree(self, folder: int, names: dict[int, dict[str, int]], prefix: str) -> list[tuple[str, bytes]]:
        found = []
        for name, inode in names.get(folder, {}).items():
            if os.path.isdir(f"/proc/self/fd/{self.held[inode]}"):
                found += [(f"{prefix}{name}/", b""), *self.tree(inode, names, f"{prefix}{name}/")]
            else:
                found.append((prefix + name, self.contents.get(inode, b"")))
        return found
