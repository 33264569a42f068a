"""What a file is by its first bytes, if it is not what its name says, and what mends it."""

import codecs
import json
import re

# What a file is that begins so, and what mends it
CONTENTS = {
    b"version https://git-lfs": "is a pointer of Git LFS, not the file; fetch it: `git -C {folder} lfs pull`",
    b"PK\3\4": "is an archive or a spreadsheet by its content; unpack it, or save it as CSV (UTF-8)",
    b"\xd0\xcf\x11\xe0": "is a spreadsheet by its content; save it as CSV (UTF-8)",
    b"PAR1": "is Parquet by its content; save it as text, or call it so where it is read: `mv {name} {name}.parquet`",
    b"\x1f\x8b": "is compressed by gzip; unpack it: `mv {name} {name}.gz && gunzip {name}.gz`",
}

POINTER = "is a pointer of {}, not the image; fetch it by `{}` in the folder of its repository"
ARCHIVE = "is {}, not an image; unpack it and give the image inside"
OTHER_PICTURE = "is {}, which is not read; save it as a PNG of 8 bits"
AGAIN = "; fetch it again, signed in if its source asks for that"
TEXT_MODE = "is an image whose bytes were changed by a transfer as text; fetch it again as binary"
VIDEO = "is a video, not an image; save it as images, one a frame"

# As CONTENTS, for a file that should be an image
IMAGE_CONTENTS = {
    b"version https://git-lfs": POINTER.format("Git LFS", "git lfs pull"),
    b"version https://hawser": POINTER.format("Git LFS", "git lfs pull"),
    b"oid sha256:": POINTER.format("Git LFS", "git lfs pull"),
    b"outs:\n- md5:": POINTER.format("DVC", "dvc pull"),
    b"outs:\n- hash:": POINTER.format("DVC", "dvc pull"),
    b"outs:\n- etag:": POINTER.format("DVC", "dvc pull"),
    b"/annex/objects/": POINTER.format("git-annex", "git annex get ."),
    b"PK\3\4": ARCHIVE.format("a zip archive or an Office document"),
    b"PK\5\6": "is an empty zip archive, not an image" + AGAIN,
    b"\x1f\x8b": ARCHIVE.format("compressed by gzip"),
    b"BZh": ARCHIVE.format("compressed by bzip2"),
    b"\xfd7zXZ": ARCHIVE.format("compressed by xz"),
    b"\x28\xb5\x2f\xfd": ARCHIVE.format("compressed by zstd"),
    b"7z\xbc\xaf": ARCHIVE.format("a 7z archive"),
    b"Rar!": ARCHIVE.format("a RAR archive"),
    b"%PDF-": "is a PDF document, not an image; save it as a PNG of 8 bits",
    b"\xd0\xcf\x11\xe0": "is an Office document, not an image; save it as a PNG of 8 bits",
    b"8BPS": OTHER_PICTURE.format("a Photoshop document"),
    b"v/1\1": OTHER_PICTURE.format("an OpenEXR picture"),
    b"\xff\x0a": OTHER_PICTURE.format("JPEG XL"),
    b"\0\0\0\x0cJXL ": OTHER_PICTURE.format("JPEG XL"),
    b"#?RADIANCE": OTHER_PICTURE.format("a Radiance picture"),
    b"\x93NUMPY": OTHER_PICTURE.format("an array of NumPy"),
    b"\x89HDF\r\n": OTHER_PICTURE.format("HDF5"),
    b"SIMPLE  =": OTHER_PICTURE.format("FITS"),
    b"\x89PNG\n": TEXT_MODE,
    b"\x89PNG\r\r": TEXT_MODE,
    b"\xef\xbf\xbdPNG": TEXT_MODE,
    b"\xc2\x89PNG": TEXT_MODE,
    b"\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd": TEXT_MODE,  # a JPEG
    b"\xc3\xbf\xc3\x98\xc3\xbf": TEXT_MODE,
    b"\0\5\x16\7": "is a Mac's side file of an image, not the image; fetch it again under its name without `._`",
    b"PAR1": "is a Parquet table, not an image; fetch it again, or read its images by `manifest`",
    b"\x1aE\xdf\xa3": VIDEO,
    b"\0\0\1\xba": VIDEO,
}

WEB_PAGE = re.compile(rb"(?:<!--.*?-->\s*)*<(?:!doctype html|html|head|body|title|meta|script)\b", re.I | re.S)
SERVER_ERROR = re.compile(rb"<Code>\s*([A-Za-z]+)\s*</Code>")
HEAD = 4096  # bytes that are looked at
SHOWN = 40  # characters of a text


def describe_no_image(data: bytes) -> str | None:
    """What a file is that is not an image, with the remedy; None if its content is not known either."""
    head = data[:HEAD].removeprefix(codecs.BOM_UTF8)
    for start, description in IMAGE_CONTENTS.items():
        if head.startswith(start):
            return description
    if head[257:262] == b"ustar":
        return ARCHIVE.format("a tar archive")
    if head[128:132] == b"DICM":
        return OTHER_PICTURE.format("DICOM")
    if head[4:8] == b"ftyp" or (head[:4] == b"RIFF" and head[8:12] == b"AVI "):
        return VIDEO
    if data and not data.strip(b"\0"):
        return "holds zero bytes alone (its disk or its download failed)" + AGAIN
    return _describe_text(head)


def _describe_text(head: bytes) -> str | None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        head = head[: len(head) // 2 * 2].decode("utf-16", "replace").encode()
    text = head.removeprefix(codecs.BOM_UTF8).strip()
    if not text or text.startswith(b"%!"):  # PostScript is a format that is not read
        return None
    if WEB_PAGE.match(text):
        return "is a web page, not an image" + AGAIN
    if b"<svg" in text and text.startswith(b"<"):
        return OTHER_PICTURE.format("an SVG drawing")
    if text.startswith((b"<?xml", b"<Error")):
        code = SERVER_ERROR.search(text)
        answer = f" (a server's answer: {code[1].decode()})" if code else ""
        return f"is XML{answer}, not an image" + AGAIN
    if b"\0" in head or not _is_text(head):
        return None
    words = " ".join(text.decode("utf-8", "replace").split())
    shown = words if len(words) <= SHOWN else words[:SHOWN] + "..."
    kind = "JSON" if _is_json(text, len(head) == HEAD) else "text"
    return f"is {kind}, not an image (it begins {shown!r})" + AGAIN


def _is_text(head: bytes) -> bool:
    decoded = head[:-3].decode("utf-8", "ignore") if len(head) == HEAD else head.decode("utf-8", "replace")
    odd = sum(not (char.isprintable() or char.isspace()) or char == "\ufffd" for char in decoded)
    return odd == 0


def _is_json(text: bytes, is_cut: bool) -> bool:
    if not text.startswith((b"{", b"[")):
        return False
    if is_cut:
        return True
    try:
        json.loads(text)
    except ValueError:
        return text.startswith((b'{"', b'[{"'))
    return True
