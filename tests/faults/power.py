"""A disk that forgets: the content of a folder after a power loss at any moment, given what was flushed before.

A kill cannot test this, because the kernel still writes the data of a dead process. Files are identified by their
inode, so that writes by Rust or C count too, as long as Python flushes them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

CHANGES = ("replace", "rename", "unlink", "remove", "rmdir", "mkdir", "link", "symlink")
FLUSHES = ("fsync", "fdatasync")


class Image(NamedTuple):
    """The content of the folder after the power loss. Names of folders end in `/`.

    Attributes:
        before: the call before which the power is lost.
        lost: `names`: everything that was not flushed is lost, also new names, and old names are back. `contents`: new
            names exist, as a file system may write them by itself, but a file that was not flushed is empty.
    """

    before: str
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
    """A context in which `images` collects the contents after a power loss.

    There are two images for each moment: before each call that flushes or changes names, and at the end. Everything in
    the folder `root` is on the disk at the beginning.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images = list[Image]()
        self.contents: dict[int, bytes] = {}  # by inode
        self.names: dict[int, dict[str, int]] = {}  # by the inode of a folder
        self.handles: dict[int, int] = {}  # by inode; open, so that no other file gets the inode's number
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
        for handle in self.handles.values():
            os.close(handle)

    def watched(self, name: str) -> Callable[..., Any]:
        real = self.real[name]

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.power_goes(f"{len(self.images) // 2}: {name}")
            result = real(*arguments, **keywords)
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
        if inode not in self.handles:
            self.handles[inode] = os.open(path, os.O_RDONLY)
        return inode

    def power_goes(self, before: str) -> None:
        shown = {self.hold(path): path for path in [self.root, *self.root.rglob("*")]}
        folders = {inode: path for inode, path in shown.items() if path.is_dir()}
        visible = {inode: {entry.name: entry.inode() for entry in os.scandir(path)} for inode, path in folders.items()}
        for lost, names in (("names", self.names), ("contents", visible)):
            self.images.append(Image(before, lost, dict(self.tree(self.root.stat().st_ino, names, ""))))

    def tree(self, folder: int, names: dict[int, dict[str, int]], prefix: str) -> list[tuple[str, bytes]]:
        entries = []
        for name, inode in names.get(folder, {}).items():
            if os.path.isdir(f"/proc/self/fd/{self.handles[inode]}"):
                entries += [(f"{prefix}{name}/", b""), *self.tree(inode, names, f"{prefix}{name}/")]
            else:
                entries.append((prefix + name, self.contents.get(inode, b"")))
        return entries
