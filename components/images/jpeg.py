"""JPEG files decoded with the decoder's warnings read, which Pillow drops.

libjpeg fills what a damaged scan does not tell with grey or with wrong colours and only warns. `simplejpeg`, another
binding of libjpeg-turbo, stops at the first warning; from a sound file it gives the same pixels as Pillow, sooner.
"""

from __future__ import annotations

import re

import numpy as np

try:
    import simplejpeg
except ImportError:  # a copy of this file in the folder of an exported model, which needs no more than Pillow
    simplejpeg = None

COLOURS = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}  # by the mode in which Pillow opens the file

# Warnings of libjpeg that pixels are lost. Others are about headers and change no pixel, or about the end of the file:
# Pillow itself refuses a file that is cut off, and passes some whose end mark alone is missing.
DAMAGE = re.compile(
    r"Corrupt JPEG data: (?:bad (?:Huffman|arithmetic) code|premature end of data segment"
    r"|found marker \w+ instead of RST\d+|\d+ extraneous bytes before marker \w+)"
)
EXTRANEOUS = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
MAX_PADDING = 16  # bytes that some writers leave between the scan and the end mark

ZEROED = 32  # zero bytes in a row that a luminance block cannot need, unless a zero bit ends it

START_OF_IMAGE = b"\xff\xd8"
START_OF_SCAN = 0xDA
SEQUENTIAL = (0xC0, 0xC1)  # frames coded by Huffman, not progressively
HUFFMAN_TABLES = 0xC4
AC_TABLE = 0x10
END_OF_BLOCK = 0
END_OF_IMAGE = b"\xff\xd9"
COMMENT = 0xFE
APPLICATION = range(0xE0, 0xF0)


def decode_jpeg(data: bytes, mode: str) -> tuple[np.ndarray | None, str | None]:
    """Pixels of a sound JPEG, and the damage of another.

    Args:
        data: the file's bytes; what follows the first image's end mark is not read.
        mode: in which Pillow opens it.

    Returns:
        Pixels [height, width, channel] of uint8, or None if Pillow must decode the file (CMYK, rare samplings,
        warnings that change no pixel); the warning of the decoder, or None if it found no damage.
    """
    if simplejpeg is None or mode not in COLOURS:
        return None, None
    try:
        pixels = simplejpeg.decode_jpeg(data, COLOURS[mode])
        if _has_zeroed_scan(data):
            return None, "zero bytes in its scan"
        return (None if mode == "CMYK" else pixels), None
    except ValueError as error:
        first_warning = str(error)
    if not DAMAGE.search(first_warning):
        # only the first warning is reported, so one about a header would hide damage in the scan
        first_warning = _warning_without_metadata(data, mode)
    damage = DAMAGE.search(first_warning)
    if damage is None or _is_padding(first_warning, data):
        return None, "zero bytes in place of its end" if _ends_in_zeros_too_soon(data, mode) else None
    return None, damage[0]


def _ends_in_zeros_too_soon(data: bytes, mode: str) -> bool:
    """True if a file without an end mark is zero bytes from within its scan on, as a broken download."""
    if data.find(END_OF_IMAGE, _tables_and_scan(data)[1]) >= 0 or not data.endswith(bytes(ZEROED)):
        return False
    return DAMAGE.search(_warning_without_metadata(data.rstrip(b"\0") + END_OF_IMAGE, mode)) is not None


def _warning_without_metadata(data: bytes, mode: str) -> str:
    kept, scan = _tables_and_scan(data)
    try:
        simplejpeg.decode_jpeg(START_OF_IMAGE + kept + data[scan:], COLOURS[mode])
    except ValueError as error:
        return str(error)
    return ""


def _has_zeroed_scan(data: bytes) -> bool:
    """True if the scan holds zero bytes that no encoder writes, though they decode without a warning.

    The shortest code of each Huffman table is all zero bits. If that code ends a block, an even picture is a run of
    zero bytes. If it stands for a coefficient, as in the tables that most encoders use for luminance, then 24 zero
    bytes are a block whose 63 coefficients are all -1, which no picture has.
    """
    if data.find(bytes(ZEROED)) < 0:
        return False
    tables, scan = _tables_and_scan(data)
    if data.find(bytes(ZEROED), scan, data.find(END_OF_IMAGE, scan)) < 0:
        return False
    is_sequential = False
    shortest_codes: dict[int, int] = {}
    at = 0
    while at + 4 <= len(tables):
        marker = tables[at + 1]
        end = at + 2 + int.from_bytes(tables[at + 2 : at + 4], "big")
        is_sequential = is_sequential or marker in SEQUENTIAL
        at += 4
        while marker == HUFFMAN_TABLES and at + 17 < end:
            shortest_codes[tables[at]] = tables[at + 17]
            at += 17 + sum(tables[at + 1 : at + 17])
        at = end
    table_of_luminance = AC_TABLE | (data[scan + 6] & 15)
    return is_sequential and shortest_codes.get(table_of_luminance, END_OF_BLOCK) != END_OF_BLOCK


def _is_padding(warning: str, data: bytes) -> bool:
    """True if all that the warning is about are a few equal bytes before the end mark.

    Cameras and some encoders write them. More of them, or unequal ones, are a scan that the decoder lost track of.
    """
    extraneous = EXTRANEOUS.search(warning)
    if extraneous is None:
        return False
    count = int(extraneous[1])
    end = data.find(END_OF_IMAGE, _tables_and_scan(data)[1])
    return count <= MAX_PADDING and len(set(data[max(0, end - count) : end])) == 1


def _tables_and_scan(data: bytes) -> tuple[bytes, int]:
    """Header segments that decoding needs, and where the first scan begins (the end of the file if nowhere)."""
    segments = bytearray()
    at = len(START_OF_IMAGE)
    while 0 <= at < len(data) - 3:
        marker = data[at + 1]
        if data[at] != 0xFF or marker in (0x00, 0xFF):  # padding, or bytes between two segments
            at += 1
            continue
        if marker == START_OF_SCAN:
            return bytes(segments), at
        length = 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if marker not in APPLICATION and marker != COMMENT:
            segments += data[at : at + length]
        at += length
    return bytes(segments), len(data)
