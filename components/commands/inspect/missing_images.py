"""Find out why an image that a row names is missing, and which file was probably meant."""

import os
import posixpath
import re
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from pathlib import Path
from unicodedata import normalize
from urllib.parse import unquote

from m3diff.commands.inspect.layout import TABLE_READERS, annotation_files
from m3diff.datasets.spec import Row
from m3diff.records.errors import Fault, is_utf8, shell_word
from m3diff.stages.ingest.params import DatasetEntry

PROBABLE_ENCODING = "windows-1252"  # assumed for file names that are not UTF-8
MAX_LISTED_FILES = 200_000  # maximum number of files that are searched for a missing image

# An example of the option `columns` that adds a folder to the paths in a table
TEMPLATES = "{columns: {before: 'folder/{before}', after: 'folder/{after}'}}"
# The beginning of a path that points outside the root
LEADS_OUT = re.compile(r"/|~|\$|\\\\|[A-Za-z]:\\|[A-Za-z][A-Za-z0-9+.-]*:/|\.\.[/\\]")


def remedies_for_missing_images(entry: DatasetEntry, rows: Sequence[Row], missing: Container[str]) -> Iterator[Fault]:
    """Find the first missing image, and yield the probable reasons why it is missing, with remedies.

    Args:
        rows: all rows of the dataset. A file that one row names is never proposed as the image of another row.
        missing: paths of the missing images, including the root.
    """
    root = entry.root
    row_of_image: dict[str, Row] = {}
    for row in rows:
        for image in row.images:
            if isinstance(image, str) and image:
                row_of_image.setdefault(image, row)
    missing_names = (name for name in row_of_image if os.path.join(root, name) in missing or LEADS_OUT.match(name))
    name = next(missing_names, None)
    if name is None:
        return

    files = list(islice(_files_below(root), MAX_LISTED_FILES))
    not_utf8 = [file for file in files if not is_utf8(file)]
    if not_utf8:
        yield Fault(
            "check.file_names_not_utf8",
            files=len(not_utf8),
            example=os.fsencode(not_utf8[0]),
            command=f"convmv -f {PROBABLE_ENCODING} -t utf-8 -r --notest {shell_word(root)}",
        )
    similar_file = _most_similar_file(name, files, {posixpath.normpath(image) for image in row_of_image})
    foreign_folder = _folder_before(name, similar_file) if similar_file else None
    if foreign_folder:
        tables = annotation_files(entry)
        yield Fault(
            "check.image_below_foreign_folder",
            value=name,
            file=similar_file,
            root=root,
            folder=foreign_folder,
            tables=tables,
        )
    elif similar_file:
        is_same_text = normalize("NFC", similar_file) == normalize("NFC", name)
        code = "check.image_in_other_unicode_form" if is_same_text else "check.image_at_other_path"
        yield Fault(code, value=name, file=similar_file, root=root, options=TEMPLATES)
    elif "://" in name and not name.startswith("file:"):
        yield Fault("check.image_is_address", value=name, root=root)
    elif LEADS_OUT.match(name):
        yield Fault("check.image_outside_root", value=name, root=root)
    elif entry.reader in TABLE_READERS:
        yield Fault("check.image_of_row_is_missing", value=name, root=root, source=row_of_image[name].source)
    else:
        yield Fault("check.image_is_missing", value=name, root=root)


def _files_below(root: Path) -> Iterator[str]:
    """Yield the paths of all files below a folder, relative to the folder."""
    for folder, _, names in os.walk(root):
        for name in names:
            yield os.path.relpath(os.path.join(folder, name), root)


def _most_similar_file(image: str, files: Sequence[str], used_files: Container[str]) -> str | None:
    """Return the file that was probably meant by the path of a missing image, or None.

    This is a file with the same name that no row names. If there are several, the folders of the returned file are the
    most similar to the folders in the path.
    """
    image_parts = _plain_parts(image)
    candidates = sorted(file for file in files if _plain_parts(file)[0] == image_parts[0] and file not in used_files)
    return max(candidates, key=lambda file: len(os.path.commonprefix([_plain_parts(file), image_parts])), default=None)


def _folder_before(image: str, file: str) -> str | None:
    """Return the folder in front of a file's path in the path of an image, with its separator, or None.

    This is the folder of the dataset on the computer on which the paths were written, such as `/srv/project/`.
    """
    return image.removesuffix(file) if image.endswith(f"/{file}") else None


def _plain_parts(path: str) -> list[str]:
    """Return the file name in a path and then its folders, innermost first, for a comparison with other paths.

    The suffix is removed. Case, percent encoding, separators and Unicode form are normalised.
    """
    plain_path = normalize("NFC", unquote(path)).replace("\\", "/").lower()
    without_suffix, _ = os.path.splitext(plain_path)
    return [part.strip() for part in reversed(without_suffix.split("/"))]
