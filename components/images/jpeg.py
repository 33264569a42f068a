"""Decode JPEG files and detect damage by the decoder's warnings, which Pillow ignores.

libjpeg fills damaged parts of a scan (the compressed pixels) with grey or wrong colours, and only issues a warning.
`simplejpeg`, another Python binding of libjpeg-turbo, stops at the first warning. For a valid file, `simplejpeg`
returns the same pixels as Pillow in less time.
"""

from __future__ import annotations

import re

import numpy as np

try:
    import simplejpeg
except ImportError:  # an exported model contains a copy of this file and requires only Pillow
    simplejpeg = None

SIMPLEJPEG_COLOURS = {"L": "GRAY", "RGB": "RGB", "CMYK": "CMYK"}  # Pillow's mode -> colour space for simplejpeg

# Warnings of libjpeg about lost pixels. Other warnings are harmless. They are about headers, which do not affect the
# pixels, or about the end of the file, which Pillow checks: it rejects truncated files, and accepts some files in which
# only the end marker is missing
DAMAGE = re.compile(
    r"Corrupt JPEG data: (?:bad (?:Huffman|arithmetic) code|premature end of data segment"
    r"|found marker \w+ instead of RST\d+|\d+ extraneous bytes before marker \w+)"
)
EXTRANEOUS_BYTES = re.compile(r"(\d+) extraneous bytes before marker 0xd9")
MAX_PADDING = 16  # maximum number of padding bytes between the scan and the end marker, which some encoders write

# Encoders do not write such a long run of zero bytes, except if a Huffman code of zero bits ends a block (see
# `_has_zeroed_scan`)
ZERO_RUN = bytes(32)

START_OF_IMAGE = b"\xff\xd8"
START_OF_SCAN = 0xDA
SEQUENTIAL_FRAMES = (0xC0, 0xC1)  # sequential (not progressive) frames with Huffman codes
HUFFMAN_TABLES = 0xC4
AC_TABLE = 0x10  # bit in the number of a Huffman table that marks a table for AC coefficients
END_OF_BLOCK = 0
END_OF_IMAGE = b"\xff\xd9"
COMMENT = 0xFE
APPLICATION_SEGMENTS = range(0xE0, 0xF0)


def decode_jpeg(data: bytes, mode: str) -> tuple[np.ndarray | None, str | None]:
    """Return the pixels of a JPEG file, or a description of its damage.

    Args:
        data: the file's bytes. Bytes after the end marker of the first image are ignored.
        mode: mode in which Pillow opens the file.

    Returns:
        The pixels as uint8 [height, width, channel], and a description of the damage. The pixels are None if the file
        is damaged or must be decoded by Pillow (CMYK, rare samplings, warnings that do not affect the pixels). The
        description is None if the file is valid.
    """
    if simplejpeg is None or mode not in SIMPLEJPEG_COLOURS:
        return None, None
    try:
        pixels = simplejpeg.decode_jpeg(data, SIMPLEJPEG_COLOURS[mode])
        if _has_zeroed_scan(data):
            return None, "zero bytes in its scan"
        return (None if mode == "CMYK" else pixels), None
    except ValueError as error:
        warning = str(error)
    if not DAMAGE.search(warning):
        # simplejpeg reports only the first warning, so a warning about a header would hide damage in the scan
        warning = _warning_without_metadata(data, mode)
    damage = DAMAGE.search(warning)
    if damage is not None and not _is_padding(warning, data):
        return None, damage[0]
    if _ends_in_zeros_too_soon(data, mode):
        return None, "zero bytes in place of its end"
    return None, None


def _ends_in_zeros_too_soon(data: bytes, mode: str) -> bool:
    """Return whether a file without an end marker ends in zero bytes that replace a part of its scan.

    Interrupted downloads leave such files.
    """
    _, scan = _tables_and_scan(data)
    if data.find(END_OF_IMAGE, scan) >= 0 or not data.endswith(ZERO_RUN):
        return False
    data_without_zeros = data.rstrip(b"\0") + END_OF_IMAGE
    return DAMAGE.search(_warning_without_metadata(data_without_zeros, mode)) is not None


def _warning_without_metadata(data: bytes, mode: str) -> str:
    """Return the decoder's first warning about a copy of the file without application segments and comments.

    Return an empty string if there is no warning.
    """
    tables, scan = _tables_and_scan(data)
    try:
        simplejpeg.decode_jpeg(START_OF_IMAGE + tables + data[scan:], SIMPLEJPEG_COLOURS[mode])
    except ValueError as error:
        return str(error)
    return ""


def _has_zeroed_scan(data: bytes) -> bool:
    """Return whether a part of the scan was overwritten with zero bytes, which are decoded without a warning.

    The shortest code of each Huffman table consists of zero bits. If this code means the end of a block, zero bytes are
    valid, because they encode a uniform picture. If this code means a coefficient, as in the tables that most encoders
    use for luminance, 24 zero bytes encode a block whose 63 coefficients are all -1, which does not occur in pictures.
    """
    if data.find(ZERO_RUN) < 0:
        return False
    tables, scan = _tables_and_scan(data)
    if data.find(ZERO_RUN, scan, data.find(END_OF_IMAGE, scan)) < 0:
        return False
    is_sequential = False
    shortest_codes: dict[int, int] = {}
    offset = 0
    while offset + 4 <= len(tables):
        marker = tables[offset + 1]
        segment_end = offset + 2 + int.from_bytes(tables[offset + 2 : offset + 4], "big")
        is_sequential = is_sequential or marker in SEQUENTIAL_FRAMES
        offset += 4
        while marker == HUFFMAN_TABLES and offset + 17 < segment_end:
            # A table consists of a number, 16 counts of codes by length, and the symbols of the codes, shortest code
            # first
            shortest_codes[tables[offset]] = tables[offset + 17]
            offset += 17 + sum(tables[offset + 1 : offset + 17])
        offset = segment_end
    luminance_table = AC_TABLE | (data[scan + 6] & 15)
    return is_sequential and shortest_codes.get(luminance_table, END_OF_BLOCK) != END_OF_BLOCK


def _is_padding(warning: str, data: bytes) -> bool:
    """Return whether the warning is only about padding: a few equal bytes before the end marker.

    Cameras and some encoders write such padding. Many or different bytes mean that the decoder lost its position in the
    scan.
    """
    match = EXTRANEOUS_BYTES.search(warning)
    if match is None:
        return False
    byte_count = int(match[1])
    _, scan = _tables_and_scan(data)
    end = data.find(END_OF_IMAGE, scan)
    extraneous_bytes = data[max(0, end - byte_count) : end]
    return byte_count <= MAX_PADDING and len(set(extraneous_bytes)) == 1


def _tables_and_scan(data: bytes) -> tuple[bytes, int]:
    """Return the header segments that are required for decoding, and the offset of the first scan.

    If the file does not contain a scan, the offset is the end of the file.
    """
    segments = bytearray()
    offset = len(START_OF_IMAGE)
    while 0 <= offset < len(data) - 3:
        marker = data[offset + 1]
        if data[offset] != 0xFF or marker in (0x00, 0xFF):  # padding or other bytes between two segments
            offset += 1
            continue
        if marker == START_OF_SCAN:
            return bytes(segments), offset
        length = 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
        if marker not in APPLICATION_SEGMENTS and marker != COMMENT:
            segments += data[offset : offset + length]
        offset += length
    return bytes(segments), len(data)
