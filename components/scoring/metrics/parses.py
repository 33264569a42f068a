"""Cache the captions that SPICE has parsed, in one file per parser in the user's cache folder.

The file is a zip archive with the LMDB file and a list of the captions in it. Its checksums reveal damage. A run works
on a copy and then replaces the file. No lock is needed, a killed run leaves the file intact, and LMDB never works on a
network disk. If two runs overlap, the file has the parses of the run that finishes last.
"""

import hashlib
import io
import os
import platform
import sys
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from m3diff.records.files import user_cache, write_atomic

LMDB = "data.mdb"
CAPTIONS = "captions"
MAX_CAPTIONS = 500_000  # a file with more captions is discarded
TAIL_BYTES = 1 << 16  # bytes at the end of a jar that contain its directory, with a checksum of each file
MAX_KEY_BYTES = 500  # maximum length of a key in LMDB


@dataclass(frozen=True)
class ParsedCaptions:
    """Captions that have been parsed, and the content of the LMDB file with their parses."""

    captions: frozenset[str] = field(default_factory=frozenset)
    lmdb: bytes = b""


def find_cache_file(jars: Iterable[Path], java: int) -> Path | None:
    """Return the cache file for this parser, or None if the program has no LMDB library for this machine.

    Args:
        jars: jars that determine how a caption is parsed.
        java: major version of Java, which determines how parses are stored.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    key = hashlib.sha256(f"{version('pycocoevalcap')} {platform.system()} {java}".encode())
    for jar in jars:
        with jar.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            key.update(f" {jar.name} {size} ".encode() + file.read())
    return user_cache() / f"spice-{key.hexdigest():.16}.zip"


def read_parses(path: Path) -> ParsedCaptions:
    """Read the cached parses. The result is empty if the file is missing, damaged or too large.

    A file that is damaged or too large is reported on standard error.
    """
    reason = f"it contains more than {MAX_CAPTIONS:,} captions"
    try:
        with zipfile.ZipFile(path) as file:
            captions = frozenset(file.read(CAPTIONS).decode().split("\n"))
            if len(captions) <= MAX_CAPTIONS:
                return ParsedCaptions(captions, file.read(LMDB))
    except FileNotFoundError:
        return ParsedCaptions()
    except (OSError, zipfile.BadZipFile, zlib.error, KeyError, EOFError, ValueError, NotImplementedError) as error:
        reason = f"it is damaged ({error})"
    print(f"SPICE: {path} is not used, because {reason}. All captions are parsed again", file=sys.stderr, flush=True)
    return ParsedCaptions()


def store_parses(path: Path, parses: ParsedCaptions) -> None:
    """Replace the cache file with these parses. If the folder is not writable, the next run parses them again."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr(CAPTIONS, "\n".join(sorted(parses.captions)))
        file.writestr(LMDB, parses.lmdb)
    with suppress(OSError):
        write_atomic(path, packed.getvalue())


def fits_cache_key(caption: str) -> bool:
    """Return False if a caption is too long for a key of LMDB.

    A Latin-1 character takes one byte of the key. Other characters take three bytes or, outside the BMP, six.
    """
    sizes = (1 if letter < "\xff" else 3 if letter <= "\uffff" else 6 for letter in caption)
    return sum(sizes) <= MAX_KEY_BYTES


def captions_to_parse(captions: Sequence[str], parses: ParsedCaptions) -> set[str]:
    """Return the captions to add to the cache. Captions that are too long for LMDB are left out."""
    return {caption for caption in captions if caption not in parses.captions and fits_cache_key(caption)}
