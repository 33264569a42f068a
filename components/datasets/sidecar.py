"""Read pairs without a table: next to the two images of a pair, a text file contains the caption.

    a/0001.png       the image before
    a/0001_1.jpg     the image after: the same name with a number
    a/0001.txt       the caption

Programs that fine-tune image models, such as musubi-tuner and fal.ai, read this layout. The three files are in one
folder, and folders may be nested.

- The name of a text is the beginning of the names of its images. Their suffixes may differ.
- The whole text is one caption. Its lines are joined by spaces, because no known program writes one caption per line.
- A folder called `train`, `val` or `test` (or `training`, `validation`, `valid`, `dev`, `testing`) names the split of
  all pairs in it. The option `split` is the split of all other pairs, or the shares by which splits are drawn.
- The options `before` and `after` are the ends of the images' names. By default, they are "" and "_1", and any number
  may replace the 1: `0001_0.png`, `0001_02.png`. For fal.ai, the options are `{before: _start, after: _end}`.

An image with a text of its own is never the second image of another: with the texts `a.txt` and `a_1.txt`, the image
`a_1.png` is an image before. A text that lacks an image, has two second images or has no word is a fault, and so are
two texts of the same images, such as `a.txt` and `a.TXT`. Images that belong to no text, and texts in folders without
images (such as a readme), are counted in a note.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any

from m3diff.datasets.drawn_split import as_shares, draw_splits
from m3diff.datasets.files import read_text
from m3diff.datasets.pairs import PERMISSION, OwnSplit
from m3diff.datasets.spec import DatasetSpec, Licence, Protocol, Row, RowsWithNotes, broken_row
from m3diff.datasets.tables import SIDES, is_image
from m3diff.records.errors import DataError
from m3diff.records.schemas import Split

TEXT_SUFFIX = ".txt"
SPLIT_OF_FOLDER: Mapping[str, Split] = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}
# Ends of the images' names that `m3diff data check` recognises, as musubi-tuner, fal.ai, RSRCC, prunaai and WebDataset
# use them
KNOWN_ENDS = (("", "_1"), ("_start", "_end"), ("_before", "_after"), ("_input", "_target"), (".before", ".after"))
MAX_SEARCHED_FOLDERS = 1_000  # number of folders in which the layout is looked for

# What a note says about files that no pair uses
IMAGES_WITHOUT_TEXT = "images that belong to no text, which are not read"
TEXTS_WITHOUT_IMAGES = "texts in folders without images, which are not read"
PAIRS_OUTSIDE_SPLITS = "pairs in no folder that names a split, which are"


@dataclass(frozen=True)
class FolderFiles:
    """The files of a folder, matched by their names.

    texts: names of the texts, by their names without suffix. Of a complete pair, each list has one text.
    images_of_text: for each text, by its name without suffix: the images before, and the images after. Of a complete
        pair, each list has one image.
    unused_images: images that belong to no text.
    has_images: whether the folder contains any image.
    """

    texts: dict[str, list[str]]
    images_of_text: dict[str, tuple[list[str], list[str]]]
    unused_images: list[str]
    has_images: bool

    @classmethod
    def match(cls, names: Sequence[str], before: str, after: str) -> "FolderFiles":
        """Match the files of a folder.

        Args:
            names: names of the files, sorted.
            before, after: ends of the names of the two images.
        """
        texts: dict[str, list[str]] = {}
        for name in names:
            if name.lower().endswith(TEXT_SUFFIX):
                texts.setdefault(PurePosixPath(name).stem, []).append(name)
        images_of_text: dict[str, tuple[list[str], list[str]]] = {text: ([], []) for text in texts}
        # If the image before has no end, the image after may have any number: some programs count from 0 or write 01
        is_any_number = not before and after[-1:].isdecimal()
        end_after = re.escape(after.rstrip("0123456789")) + r"\d+" if is_any_number else re.escape(after)
        images = [name for name in names if is_image(name)]
        unused_images = []
        for image in images:
            stem = PurePosixPath(image).stem
            text_of_before = stem.removesuffix(before) if stem.endswith(before) else None
            match = re.fullmatch(f"(.*){end_after}", stem, re.DOTALL)
            if text_of_before in images_of_text:
                images_of_text[text_of_before][0].append(image)
            elif match and match[1] in images_of_text:
                images_of_text[match[1]][1].append(image)
            else:
                unused_images.append(image)
        return cls(texts, images_of_text, unused_images, has_images=bool(images))

    def count_complete_pairs(self) -> int:
        """Return the number of texts with exactly two images that belong to no other text."""
        return sum(
            len(self.texts[text]) == len(before) == len(after) == 1
            for text, (before, after) in self.images_of_text.items()
        )


def read(root: Path, before: str = "", after: str = "_1", split: OwnSplit = "train") -> RowsWithNotes:
    """Return one row per text.

    Args:
        before, after: ends of the names of the two images.
        split: the split of the pairs that are in no folder that names a split, or the shares by which splits are drawn
            at random (see `drawn_split.py`).

    Raises:
        DataError: the two ends are equal, splits should be drawn although a folder names one, or no pairs are drawn for
            testing or training.
    """
    if before == after:
        raise DataError("datasets.equal_ends_of_names", path=root, value=before)
    shares = as_shares(split)
    default_split = None if shares else split
    notes: list[str] = []

    def read_rows() -> Iterator[Row]:
        unused_files = _FileCounts()
        rows_of_default_split: list[Row] = []
        has_split_folder = False
        for folder, names in _folders_with_texts(root):
            files = FolderFiles.match(names, before, after)
            unused_files.add(IMAGES_WITHOUT_TEXT, folder, files.unused_images)
            if not files.has_images:
                unused_files.add(TEXTS_WITHOUT_IMAGES, folder, list(chain.from_iterable(files.texts.values())))
                continue
            split_of_folder = _split_of_folder(folder)
            has_split_folder = has_split_folder or split_of_folder is not None
            if shares and split_of_folder:
                raise DataError("datasets.draw_beside_split_folders", path=root / folder, value=split_of_folder)
            for text, images in files.images_of_text.items():
                row_split = split_of_folder or default_split
                row = _make_row(root, folder, files.texts[text], images, (before, after), row_split)
                if split_of_folder is None:
                    rows_of_default_split.append(row)
                yield row
        if has_split_folder:
            sources = [row.source for row in rows_of_default_split]
            unused_files.add(f"{PAIRS_OUTSIDE_SPLITS} {default_split}", PurePosixPath(), sources)
        notes.extend(unused_files.notes())

    def draw_rows() -> Iterator[Row]:
        assert shares is not None
        yield from draw_splits(root, list(read_rows()), shares, notes)

    return RowsWithNotes(read_rows() if shares is None else draw_rows(), notes)


def _folders_with_texts(root: Path) -> Iterator[tuple[PurePosixPath, list[str]]]:
    """Yield each folder that contains a text, relative to the root, with the sorted names of its files.

    Hidden files and folders are left out: other programs write them, such as macOS `._0001.txt`.
    """
    for path, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        visible_names = sorted(name for name in names if name[0] != ".")
        if any(name.lower().endswith(TEXT_SUFFIX) for name in visible_names):
            yield PurePosixPath(Path(path).relative_to(root).as_posix()), visible_names


def _split_of_folder(folder: PurePosixPath) -> Split | None:
    """Return the split that the outermost of a folder's parts names, or None."""
    splits = (SPLIT_OF_FOLDER.get(part.lower()) for part in folder.parts)
    return next(filter(None, splits), None)


def _make_row(
    root: Path,
    folder: PurePosixPath,
    texts: Sequence[str],
    images: tuple[list[str], list[str]],
    ends: tuple[str, str],
    split: Any,
) -> Row:
    """Return the row of a text, with a fault if it is not a pair with a caption.

    Args:
        folder: folder of the text, relative to the root.
        texts: names of the texts that are equal without suffix. There should be one.
        images: names of the images before and after that belong to the text.
        ends: ends of the names of these images.
    """
    text = folder / texts[0]
    source = str(text)
    name = str(text.with_suffix(""))
    try:
        if len(texts) > 1:
            raise DataError("datasets.several_texts_of_images", key="caption", names=list(texts))
        _require_one_image_each(text.stem, images, ends)
        caption = _read_caption(root / source)
    except DataError as error:
        return broken_row(split, source, error.fault, name=name)
    image_paths = tuple(str(text.with_name(names[0])) for names in images)
    return Row(name=name, split=split, images=image_paths, references=[caption], source=source)


def _require_one_image_each(text: str, images: tuple[list[str], list[str]], ends: tuple[str, str]) -> None:
    """Check that a text has one image before and one image after.

    Raises:
        DataError: an image is missing, or there are several.
    """
    missing_names = [f"{text}{end}" for end, names in zip(ends, images, strict=True) if not names]
    if missing_names:
        raise DataError("datasets.text_without_image", key="images", names=missing_names)
    for side, names in zip(SIDES, images, strict=True):
        if len(names) > 1:
            raise DataError("datasets.several_images_of_text", key=side, names=names)


def _read_caption(path: Path) -> str:
    """Return the lines of a text, joined by spaces.

    Raises:
        DataError: the text cannot be read, or contains no word.
    """
    try:
        lines = read_text(path).splitlines()
    except DataError as error:
        if error.code != "datasets.empty_file":
            raise
        lines = []
    caption = " ".join(line.strip() for line in lines if line.strip())
    if not caption:
        raise DataError("datasets.text_without_word", key="caption")
    return caption


class _FileCounts:
    """Counts files by the reason that a note gives, and keeps the first file of each reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first_paths: dict[str, str] = {}

    def add(self, kind: str, folder: PurePosixPath, names: Sequence[str]) -> None:
        """Count files of a folder."""
        if names:
            self._counts[kind] += len(names)
            self._first_paths.setdefault(kind, str(folder / names[0]))

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each kind of files."""
        for kind, count in self._counts.items():
            yield f"{kind}: {count:,}; the first is {self._first_paths[kind]}"


def find_ends(root: Path) -> tuple[str, str] | None:
    """Return the ends of the images' names in a folder of this layout, one of KNOWN_ENDS. None if it has no pair."""
    for _, names in islice(_folders_with_texts(root), MAX_SEARCHED_FOLDERS):
        counts = {ends: FolderFiles.match(names, *ends).count_complete_pairs() for ends in KNOWN_ENDS}
        ends = max(KNOWN_ENDS, key=lambda ends: counts[ends])
        if counts[ends]:
            return ends
    return None


def recognise(root: Path) -> bool:
    """Return whether a folder has a text with two images of the same name."""
    return find_ends(root) is not None


def options_of(root: Path) -> dict[str, Any]:
    """Return the options with which to read a folder of this layout."""
    ends = find_ends(root)
    if ends is None or ends == KNOWN_ENDS[0]:
        return {}
    return dict(zip(SIDES, ends, strict=True))


SPEC = DatasetSpec(
    title="own pairs with texts",
    page=None,
    paper=None,
    licence=Licence.for_every_use("the owner's", None, PERMISSION),
    read=read,
    files=("**/*.[tT][xX][tT]",),
    recognise=recognise,
    options_of=options_of,
    protocols=(Protocol("test", published_pairs=None),),
)
