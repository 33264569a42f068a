"""Select the entries of METEOR's paraphrase table that can match the given captions.

An entry consists of two phrases with the same meaning. The program takes 15 s to read its whole table of 5 million
entries. It is therefore given only the entries of which one phrase may occur in a reference and the other phrase in a
prediction. Extra entries do not change any score.

The search does not compare text. A phrase is identified by a key that is computed from its length and its first and
last eight bytes. This lets numpy compute the keys of the whole table, and of all word sequences in the captions, in a
few passes. Different phrases may have the same key, so the selection may contain extra entries but never misses one.

Computing the keys and positions of the whole table takes 3 s, and METEOR cannot start without them. They are therefore
stored in the user's cache folder (80 MB).
"""

import gzip
import re
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from m3diff.records.files import open_atomically, user_cache
from m3diff.scoring.metrics import Item
from m3diff.scoring.metrics.java import ScorerFailed

LINES = 3  # lines per entry: its probability and two phrases, which METEOR matches in both directions
MAX_PHRASE_WORDS = 7  # maximum number of words of a phrase in the table
CHUNK = 1 << 20  # bytes of the table to index at a time, so that numpy's arrays fit into the processor's cache
USUAL_BYTES = b"abcdefghijklmnopqrstuvwxyz0123456789 .-E\n"  # nearly all bytes of the table
TO_MARKED_BYTES = bytes(byte if byte in USUAL_BYTES else 0 for byte in range(256))  # unusual bytes become zero
WORD = re.compile(rb"[a-z0-9]+")  # ASCII letters and digits, which METEOR's own tokenizer never splits
ENTITY = re.compile("&(quot|apos|lt|gt|amp);")
WINDOW = 8  # number of bytes that numpy reads as one integer
KEY_BITS = 24
HASH_FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9], np.uint64)  # odd, well mixed
INDEX_VERSION = 1  # increase this number when the arrays of an index change
MIN_STORED_ENTRIES = 1_000_000  # indexing a smaller table is so fast that its index is not stored
GZIP_TRAILER = 8  # bytes of the checksum and the size of the text
IN_REFERENCES = 1
IN_PREDICTIONS = 2


@dataclass(frozen=True)
class ParaphraseTable:
    """The text of the table and the index of its entries.

    Attributes:
        text: lines of all entries, including line feeds.
        starts: [entries + 1] positions of the entries in the text, and the end of the last entry.
        keys: [entries, 2] keys of the two phrases of each entry.
        odd_entries: numbers of the entries with unusual characters (one in 140), which are treated as if they could
            match anything.
    """

    text: bytes
    starts: np.ndarray
    keys: np.ndarray
    odd_entries: np.ndarray


def read_paraphrases(path: Path) -> ParaphraseTable:
    """Read the table from a gzip file, with its index. Most of this runs without the GIL, in parallel with other work.

    The index of a large table is read from the user's cache folder, or stored there if it is missing.

    Raises:
        ScorerFailed: the file is damaged or cannot be read.
    """
    try:
        packed = path.read_bytes()
        text = gzip.decompress(packed)
    except (OSError, EOFError, zlib.error) as error:
        raise ScorerFailed("scoring.paraphrases_unreadable", path=path, cause=str(error)) from error
    if not text.endswith(b"\n"):
        text += b"\n"
    index_file = user_cache() / f"paraphrases-{INDEX_VERSION}-{packed[-GZIP_TRAILER:].hex()}.npz"
    table = read_index(index_file, text)
    if table is None:
        table = index_table(text)
        if len(table.keys) >= MIN_STORED_ENTRIES:
            store_index(index_file, table)
    return table


def read_index(path: Path, text: bytes) -> ParaphraseTable | None:
    """Return the table with the stored index, or None if the index is missing, damaged or does not fit the text."""
    try:
        with np.load(path) as arrays:
            starts = arrays["starts"]
            keys = arrays["keys"]
            odd_entries = arrays["odd"]
            checksum = int(arrays["checksum"])
    except (OSError, EOFError, ValueError, TypeError, KeyError, RuntimeError, zipfile.BadZipFile):
        return None
    # a damaged header of an array may give other numbers without an error, and METEOR would be wrong
    if checksum != compute_checksum(starts, keys, odd_entries) or starts[-1] > len(text):
        return None
    return ParaphraseTable(text, starts.astype(np.int64), keys, odd_entries)


def store_index(path: Path, table: ParaphraseTable) -> None:
    """Store the index of a table. If the folder is not writable, the next run computes the index again."""
    starts = table.starts.astype(np.uint32)
    checksum = compute_checksum(starts, table.keys, table.odd_entries)
    with suppress(OSError), open_atomically(path) as file:
        np.savez(file, starts=starts, keys=table.keys, odd=table.odd_entries, checksum=np.uint32(checksum))


def compute_checksum(*arrays: np.ndarray) -> int:
    """Return the CRC-32 of arrays, with their types and shapes."""
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(f"{array.dtype.str} {array.shape}".encode(), checksum)
        checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
    return checksum


def index_table(text: bytes) -> ParaphraseTable:
    """Find the entries in the text of a table and compute the keys of their phrases. The text ends in a line feed."""
    all_bytes = np.frombuffer(text, np.uint8)
    starts = [np.zeros(1, np.int64)]
    keys = [np.zeros((0, 2), np.uint32)]
    odd_entries = [np.zeros(0, np.int64)]
    entries = 0
    start = 0
    size = CHUNK
    while start < len(text):
        chunk = all_bytes[start : start + size]
        newlines = np.flatnonzero(chunk == ord("\n"))
        line_ends = newlines[: len(newlines) // LINES * LINES].reshape(-1, LINES)
        if not len(line_ends):
            if start + size >= len(text):
                break  # the rest of the text is not a complete entry
            size *= 2  # the entry is longer than the chunk
            continue
        chunk = chunk[: line_ends[-1, -1] + 1]
        keys.append(compute_keys(chunk, line_ends[:, :-1] + 1, line_ends[:, 1:]))
        starts.append(line_ends[:, -1] + 1 + start)
        marked = text[start : start + len(chunk)].translate(TO_MARKED_BYTES)
        if b"\0" in marked:
            odd_bytes = np.flatnonzero(np.frombuffer(marked, np.uint8) == 0)
            odd_entries.append(np.unique(np.searchsorted(line_ends[:, -1], odd_bytes)) + entries)
        entries += len(line_ends)
        start += len(chunk)
        size = CHUNK
    return ParaphraseTable(text, np.concatenate(starts), np.concatenate(keys), np.concatenate(odd_entries))


def compute_keys(content: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the keys of substrings of a text, [...].

    Args:
        content: bytes of the text.
        starts, ends: [...] positions of the substrings.
    """
    padded = np.zeros(len(content) + 2 * WINDOW, np.uint8)
    padded[WINDOW:-WINDOW] = content
    # overlapping views: window i contains the eight bytes before byte i of the content
    windows = np.ndarray(len(content) + WINDOW, "<u8", padded, strides=(1,))
    lengths = ends - starts
    masks = np.array([(1 << 8 * length) - 1 for length in range(WINDOW + 1)], np.uint64)
    first_bytes = windows[starts + WINDOW] & masks[np.minimum(lengths, WINDOW)]
    last_bytes = np.where(lengths < WINDOW, 0, windows[ends])
    mixed = first_bytes * HASH_FACTORS[0] + last_bytes * HASH_FACTORS[1] + lengths.astype(np.uint64) * HASH_FACTORS[2]
    return (mixed >> np.uint64(64 - KEY_BITS)).astype(np.uint32)


def matching_paraphrases(table: ParaphraseTable, items: Sequence[Item]) -> bytes:
    """Return the text of all entries with one phrase that may be in a reference and one that may be in a prediction.

    Phrases are compared only by their ASCII letters and digits.
    """
    predictions: list[str] = []
    references: list[str] = []
    for prediction, references_of_item in items:
        predictions.append(prediction)
        references += references_of_item
    # for each key, whether a phrase with this key may be in a reference, in a prediction, or in both
    sides = np.zeros(1 << KEY_BITS, np.uint8)
    sides[compute_keys_of_runs(references)] |= IN_REFERENCES
    sides[compute_keys_of_runs(predictions)] |= IN_PREDICTIONS
    # for each key, the sides on which the other phrase of an entry must be
    opposite_sides = np.array([0, IN_PREDICTIONS, IN_REFERENCES, IN_REFERENCES | IN_PREDICTIONS], np.uint8)[sides]
    matching_entries = np.flatnonzero(sides[table.keys[:, 0]] & opposite_sides[table.keys[:, 1]])
    entries = np.union1d(matching_entries, table.odd_entries)
    starts = table.starts[entries].tolist()
    ends = table.starts[entries + 1].tolist()
    return b"".join([table.text[start:end] for start, end in zip(starts, ends, strict=True)])


def compute_keys_of_runs(texts: Iterable[str]) -> np.ndarray:
    """Return the keys of all sequences of up to MAX_PHRASE_WORDS words in the texts, including the empty sequence.

    The keys may contain duplicates.
    """
    lower_texts = {text.lower() for text in texts}
    lower_texts |= {ENTITY.sub(" ", text) for text in lower_texts if "&" in text}
    captions = {b" ".join(WORD.findall(text.encode())) for text in lower_texts}
    content = np.frombuffer(b"".join(caption + b"\n" for caption in captions), np.uint8)
    word_ends = np.flatnonzero((content == ord(" ")) | (content == ord("\n")))
    word_starts = np.concatenate([[0], word_ends[:-1] + 1])
    ends_caption = content[word_ends] == ord("\n")
    captions_before = np.cumsum(ends_caption) - ends_caption
    keys = [compute_keys(content, np.zeros(1, np.int64), np.zeros(1, np.int64))]
    for words in range(1, min(MAX_PHRASE_WORDS, len(word_ends)) + 1):
        runs = len(word_ends) - words + 1
        is_in_one_caption = captions_before[words - 1 :] == captions_before[:runs]
        run_starts = word_starts[:runs][is_in_one_caption]
        run_ends = word_ends[words - 1 :][is_in_one_caption]
        keys.append(compute_keys(content, run_starts, run_ends))
    return np.concatenate(keys)
