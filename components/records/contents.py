"""Recognize the actual type of a file by its first bytes, and suggest a remedy if another type was expected."""

import codecs
import json
import re

from m3diff.records.errors import Fault

# First bytes of a file that should be text -> fault that contains the command to repair the file
CONTENTS = {
    b"version https://git-lfs": Fault("files.pointer_of_git_lfs", command="git -C {folder} lfs pull"),
    b"PK\3\4": Fault("files.archive_or_spreadsheet"),
    b"\xd0\xcf\x11\xe0": Fault("files.spreadsheet"),
    b"PAR1": Fault("files.parquet", command="mv {name} {name}.parquet"),
    b"\x1f\x8b": Fault("files.gzip", command="mv {name} {name}.gz && gunzip {name}.gz"),
}

# First bytes of a file that should be an image -> fault that names the actual type of the file
IMAGE_CONTENTS = {
    b"version https://git-lfs": Fault("images.pointer", kind="Git LFS", command="git lfs pull"),
    b"version https://hawser": Fault("images.pointer", kind="Git LFS", command="git lfs pull"),
    b"oid sha256:": Fault("images.pointer", kind="Git LFS", command="git lfs pull"),
    b"outs:\n- md5:": Fault("images.pointer", kind="DVC", command="dvc pull"),
    b"outs:\n- hash:": Fault("images.pointer", kind="DVC", command="dvc pull"),
    b"outs:\n- etag:": Fault("images.pointer", kind="DVC", command="dvc pull"),
    b"/annex/objects/": Fault("images.pointer", kind="git-annex", command="git annex get ."),
    b"PK\3\4": Fault("images.archive", kind="a zip archive or an Office document"),
    b"PK\5\6": Fault("images.empty_archive"),
    b"\x1f\x8b": Fault("images.archive", kind="compressed by gzip"),
    b"BZh": Fault("images.archive", kind="compressed by bzip2"),
    b"\xfd7zXZ": Fault("images.archive", kind="compressed by xz"),
    b"\x28\xb5\x2f\xfd": Fault("images.archive", kind="compressed by zstd"),
    b"7z\xbc\xaf": Fault("images.archive", kind="a 7z archive"),
    b"Rar!": Fault("images.archive", kind="a RAR archive"),
    b"%PDF-": Fault("images.document", kind="a PDF document"),
    b"\xd0\xcf\x11\xe0": Fault("images.document", kind="an Office document"),
    b"8BPS": Fault("images.format_not_read", kind="a Photoshop document"),
    b"v/1\1": Fault("images.format_not_read", kind="an OpenEXR picture"),
    b"\xff\x0a": Fault("images.format_not_read", kind="JPEG XL"),
    b"\0\0\0\x0cJXL ": Fault("images.format_not_read", kind="JPEG XL"),
    b"#?RADIANCE": Fault("images.format_not_read", kind="a Radiance picture"),
    b"\x93NUMPY": Fault("images.format_not_read", kind="an array of NumPy"),
    b"\x89HDF\r\n": Fault("images.format_not_read", kind="HDF5"),
    b"SIMPLE  =": Fault("images.format_not_read", kind="FITS"),
    b"\x89PNG\n": Fault("images.transferred_as_text"),
    b"\x89PNG\r\r": Fault("images.transferred_as_text"),
    b"\xef\xbf\xbdPNG": Fault("images.transferred_as_text"),
    b"\xc2\x89PNG": Fault("images.transferred_as_text"),
    b"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd": Fault("images.transferred_as_text"),  # a JPEG
    b"\xc3\xbf\xc3\x98\xc3\xbf": Fault("images.transferred_as_text"),
    b"\0\5\x16\7": Fault("images.resource_fork"),
    b"PAR1": Fault("images.parquet"),
    b"\x1aE\xdf\xa3": Fault("images.video"),
    b"\0\0\1\xba": Fault("images.video"),
}

WEB_PAGE = re.compile(rb"(?:<!--.*?-->\s*)*<(?:!doctype html|html|head|body|title|meta|script)\b", re.I | re.S)
SERVER_ERROR = re.compile(rb"<Code>\s*([A-Za-z]+)\s*</Code>")
HEAD_BYTES = 4096  # only this many bytes at the start of a file are examined
EXCERPT_CHARS = 40  # maximum length of a quotation from a file in a description


def fault_of_no_image(data: bytes) -> Fault | None:
    """Return a fault that describes a file that is not an image, or None if its type is not recognized.

    Args:
        data: the file's bytes.
    """
    head = data[:HEAD_BYTES].removeprefix(codecs.BOM_UTF8)
    for start, fault in IMAGE_CONTENTS.items():
        if head.startswith(start):
            return fault
    if head[257:262] == b"ustar":
        return Fault("images.archive", kind="a tar archive")
    if head[128:132] == b"DICM":
        return Fault("images.format_not_read", kind="DICOM")
    if head[4:8] == b"ftyp" or (head[:4] == b"RIFF" and head[8:12] == b"AVI "):
        return Fault("images.video")
    if data and not data.strip(b"\0"):
        return Fault("images.only_zero_bytes")
    return _fault_of_text(head)


def _fault_of_text(head: bytes) -> Fault | None:
    """Return a fault that describes what kind of text the file contains, or None if the file is not text."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        head = head[: len(head) // 2 * 2].decode("utf-16", "replace").encode()
    text = head.removeprefix(codecs.BOM_UTF8).strip()
    if not text or text.startswith(b"%!"):  # PostScript is an image format of Pillow that m3diff does not support
        return None
    if WEB_PAGE.match(text):
        return Fault("images.web_page")
    if b"<svg" in text and text.startswith(b"<"):
        return Fault("images.format_not_read", kind="an SVG drawing")
    if text.startswith((b"<?xml", b"<Error")):
        error_code = SERVER_ERROR.search(text)
        if error_code is None:
            return Fault("images.xml")
        return Fault("images.server_error", answer=error_code[1].decode())
    if b"\0" in head or not _is_text(head):
        return None
    words = " ".join(text.decode("utf-8", "replace").split())
    excerpt = words if len(words) <= EXCERPT_CHARS else words[:EXCERPT_CHARS] + "..."
    kind = "JSON" if _is_json(text, is_truncated=len(head) == HEAD_BYTES) else "text"
    return Fault("images.text", kind=kind, excerpt=excerpt)


def _is_text(head: bytes) -> bool:
    """Return whether the start of a file is text in UTF-8, without control characters."""
    is_truncated = len(head) == HEAD_BYTES
    # a truncated head may end with at most 3 bytes of an incomplete character
    text = head[:-3].decode("utf-8", "ignore") if is_truncated else head.decode("utf-8", "replace")
    return all(char != "\ufffd" and (char.isprintable() or char.isspace()) for char in text)


def _is_json(text: bytes, is_truncated: bool) -> bool:
    """Return whether a text is JSON. A truncated text counts as JSON if it begins with a bracket."""
    if not text.startswith((b"{", b"[")):
        return False
    if is_truncated:
        return True
    try:
        json.loads(text)
    except ValueError:
        return text.startswith((b'{"', b'[{"'))
    return True
