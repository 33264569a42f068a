"""Captions that SPICE parsed before: one file in the user's cache folder for each version of the parser.

It holds LMDB's own file and the captions in it. A run works on a copy and puts that in the file's place, so no lock is
needed, a kill leaves the file whole, and LMDB never works on a network's disk. Of two runs at once, what the one with
more captions parsed is kept.
"""

import hashlib
import io
import os
import platform
import sys
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from m3diff.records.files import write_atomic

LMDB, CAPTIONS = "data.mdb", "captions"
MOST = 500_000
"""Captions, 250 bytes each. A file with more is made anew."""
TAIL = 1 << 16  # bytes of a jar that hold its table of contents, with a checksum of each file


def kept_file(jars: Sequence[Path]) -> Path:
    """Where the captions that these jars parsed are kept. Machines of other kinds, whose LMDB differs, have another."""
    key = hashlib.sha256(f"{version('pycocoevalcap')} {platform.system()} {platform.machine()}".encode())
    for jar in jars:
        with jar.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            key.update(f"{jar.name} {size} ".encode() + file.read())
    given = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (given if given.is_absolute() else Path.home() / ".cache") / "m3diff" / f"spice-{key.hexdigest():.16}.zip"


class Parses:
    """What is known at the start, as LMDB's file in `folder`, where the program adds to it.

    Args:
        kept: the file between evaluations; None: there is none.
    """

    def __init__(self, folder: Path, kept: Path | None) -> None:
        self.folder, self.kept = folder, kept
        self.known: set[str] = set()
        known = captions_of(kept) if kept else None
        if kept is None or known is None:
            return
        if len(known) > MOST:
            print(f"SPICE: {kept} holds {len(known):,} captions and is made anew", file=sys.stderr, flush=True)
            kept.unlink(missing_ok=True)
            return
        with zipfile.ZipFile(kept) as file:
            file.extract(LMDB, folder)
        self.known = known

    def keep(self, captions: Iterable[str]) -> None:
        """Keep what the program has parsed by now. A folder that cannot be written is no fault."""
        data = self.folder / LMDB
        if not data.is_file():
            return  # the program has no cache
        self.known.update(captions)
        if self.kept is None:
            return
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
            file.write(data, LMDB)
            file.writestr(CAPTIONS, "\n".join(sorted(self.known)))
        try:
            if len(captions_of(self.kept) or ()) <= len(self.known):
                write_atomic(self.kept, packed.getvalue())
        except OSError as error:
            print(f"SPICE: parsed captions are not kept: {error}", file=sys.stderr, flush=True)
            self.kept = None

    def drop(self) -> None:
        """Forget the file, which the program cannot read."""
        if self.known and self.kept:
            self.kept.unlink(missing_ok=True)


def captions_of(kept: Path) -> set[str] | None:
    """The captions of a file that is whole; None where there is none, or it is damaged, which is said."""
    try:
        with zipfile.ZipFile(kept) as file:
            if file.testzip() is None and LMDB in file.namelist():
                return set(file.read(CAPTIONS).decode().split("\n"))
        reason = "a part of it is damaged"
    except FileNotFoundError:
        return None
    except (OSError, zipfile.BadZipFile, zlib.error, KeyError, EOFError, ValueError, NotImplementedError) as error:
        reason = str(error)
    print(f"SPICE: {kept} is not used: {reason}; captions are parsed anew", file=sys.stderr, flush=True)
    return None
