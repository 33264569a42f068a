"""Implement `m3diff caption BEFORE AFTER`, which finds pairs of images and captions them without a server.

A pair consists of two images of one scene: the image before a change, and the image after it.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from m3diff.datasets.files import Embedded, describe, fault_of_path, is_inside
from m3diff.datasets.folders import match_names
from m3diff.datasets.pairs import relative_to_root
from m3diff.datasets.tables import (
    IMAGE_SUFFIXES,
    SIDES,
    TABLE_SUFFIXES,
    find_image_columns,
    is_image,
    names_of,
    read_image_pairs,
    read_sample,
)
from m3diff.images.enlarge import enlarge
from m3diff.images.open import MAX_PIXELS, ImageError, load_image
from m3diff.images.saliency import draw_outlines
from m3diff.provenance.cache import is_cached_object
from m3diff.records.errors import DataError, Fault, cause_of, shell_word
from m3diff.records.progress import progress
from m3diff.records.sample import Turn
from m3diff.serving.questions import note_about
from m3diff.settings.section import ParamsError

if TYPE_CHECKING:
    from m3diff.models.generation import Captioner

MAX_LISTED_NAMES = 5
EXPECTED_INPUT = Fault("serving.expected_input")
BATCH_PAIRS = 8
GAP_PX = 12  # width of the gap between the two images of an overlay

ImageSource = Path | Embedded  # a file, or bytes in a Parquet file


class PairToCaption(NamedTuple):
    """A pair to caption. Its name is unique among the pairs that `find_pairs` returns."""

    name: str
    before: ImageSource
    after: ImageSource


def find_pairs(
    before: Path,
    after: Path | None,
    image_root: Path | None = None,
    columns: Mapping[str, str] | None = None,
) -> list[PairToCaption]:
    """Return the pairs in two images, two folders or a table.

    Args:
        before: an image, a folder or a table.
        after: an image or a folder. None if `before` is a table.
        image_root: a second folder that may contain the table's images. The table's folder is always allowed.
        columns: a mapping from `before` and `after` to the table's columns. If None, the columns are detected from the
            column names and values.

    Raises:
        DataError: a path does not exist, one path is a folder and the other an image, the file names do not show which
            images belong together, the image columns are unclear, or a row of the table is missing an image.
        ParamsError: columns are named without a table, or only one column is named.
    """
    for path in filter(None, (before, after)):
        if not path.exists():
            raise DataError("serving.missing_input", path=path, expected=EXPECTED_INPUT)
    is_table = after is None and not before.is_dir()
    if is_table and is_image(before.name):
        command = f"m3diff caption {shell_word(before)} AFTER"
        raise DataError("serving.image_without_second", path=before, command=command)
    _check_columns(columns, is_table)
    if is_table:
        roots = [before.parent]
        if image_root is not None:
            roots.append(image_root)
        return _pairs_in_table(before, roots, columns)
    if after is None:
        raise DataError(_fault_of_folder(before))
    if before.is_dir() != after.is_dir():
        raise DataError("serving.folder_and_image", before=before, after=after, expected=EXPECTED_INPUT)
    if before.is_dir():
        return _pairs_in_folders(before, after)
    return [PairToCaption(before.stem, before, after)]


def _check_columns(columns: Mapping[str, str] | None, is_table: bool) -> None:
    """Check the columns that the user named: either none, or both columns of a table.

    Raises:
        ParamsError: only one column is named, or the input is not a table.
    """
    if not columns:
        return
    if not is_table:
        raise ParamsError("serving.columns_without_table")
    for side in SIDES:
        if side not in columns:
            named_options = [f"--{name}" for name in columns]
            raise ParamsError("serving.one_column", names=named_options, expected=f"--{side} COLUMN")


def _fault_of_folder(folder: Path) -> Fault:
    """Return the fault for a folder that was given without a second folder.

    If the folder contains tables, the fault suggests the command that captions the first table.
    """
    tables = sorted(path for path in folder.iterdir() if path.suffix.lower() in TABLE_SUFFIXES)
    if not tables:
        return Fault("serving.folder_without_second", path=folder, expected=EXPECTED_INPUT)
    command = f"m3diff caption {shell_word(tables[0])}"
    return Fault("serving.table_in_folder", path=folder, expected=EXPECTED_INPUT, table=tables[0].name, command=command)


# Two folders


def _pairs_in_folders(before: Path, after: Path) -> list[PairToCaption]:
    """Return the pairs of images whose file names match.

    Raises:
        DataError: a folder contains no image, or the names do not show which images belong together.
    """
    images_before = _images_by_name(before)
    images_after = _images_by_name(after)
    for folder, images in ((before, images_before), (after, images_after)):
        if not images:
            formats = sorted(IMAGE_SUFFIXES)
            raise DataError("serving.no_image", path=folder, formats=formats, expected=EXPECTED_INPUT)
    matches = match_names(list(images_before), list(images_after))
    if matches.pairs:
        pairs = []
        for name in sorted(images_before):
            name_after = matches.pairs[name]
            pairs.append(PairToCaption(name, images_before[name], images_after[name_after]))
        return pairs
    unmatched_names = sorted([*matches.unmatched[0], *matches.unmatched[1]])
    faults = []
    if unmatched_names:
        names = _first_names(unmatched_names)
        faults.append(Fault("serving.unmatched_names", value=len(unmatched_names), names=names))
    if matches.ambiguous:
        faults.append(Fault("serving.ambiguous_names", names=_first_names(matches.ambiguous)))
    raise DataError("serving.names_do_not_match", before=before, after=after, faults=faults)


def _first_names(names: Sequence[str]) -> list[str]:
    """Return the first MAX_LISTED_NAMES names, followed by "..." if there are more."""
    first_names = list(names[:MAX_LISTED_NAMES])
    if len(names) > MAX_LISTED_NAMES:
        first_names.append("...")
    return first_names


def _images_by_name(folder: Path) -> dict[str, Path]:
    """Return a folder's image paths by file name.

    The names do not include the suffix, unless several files differ only in the suffix.
    """
    paths_by_stem: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.name[0] != "." and is_image(path.name) and path.is_file():
            paths_by_stem.setdefault(path.stem, []).append(path)
    images: dict[str, Path] = {}
    for stem, paths in paths_by_stem.items():
        if len(paths) == 1:
            images[stem] = paths[0]
        else:
            images |= {path.name: path for path in paths}
    return images


# A table


def _pairs_in_table(table: Path, roots: list[Path], columns: Mapping[str, str] | None) -> list[PairToCaption]:
    """Return the pairs in a table. Paths are relative to the table's folder and must stay inside `roots`."""
    if columns is None:
        columns = _detect_columns(table)
    image_pairs: list[tuple[ImageSource, ImageSource]] = []
    for row in read_image_pairs(table, columns):
        before = _image_in_row(table, roots, row.location, "before", row.before)
        after = _image_in_row(table, roots, row.location, "after", row.after)
        image_pairs.append((before, after))
    if not image_pairs:
        raise DataError("serving.no_row", path=table, expected=EXPECTED_INPUT)
    names = names_of(image_pairs)
    return [PairToCaption(name, before, after) for name, (before, after) in zip(names, image_pairs, strict=True)]


def _detect_columns(table: Path) -> Mapping[str, str]:
    """Detect the columns of the images before and after from the table's column names and values.

    Raises:
        DataError: the file cannot be read, no two columns contain images, or it is unclear which columns to use.
    """
    sample = read_sample(table)
    values = sample.values()
    if not any(values.values()):
        raise DataError("serving.no_row", path=table, expected=EXPECTED_INPUT)
    columns = find_image_columns(table.parent, values)
    if not columns.answers:
        if "delimiter" not in sample.options:
            raise DataError("serving.no_image_columns", path=table, columns=list(values))
        delimiter = sample.options["delimiter"]
        raise DataError("serving.no_image_columns_at_delimiter", path=table, columns=list(values), delimiter=delimiter)
    if len(columns.answers) > 1:
        options = [_column_arguments(answer) for answer in columns.answers]
        raise DataError("serving.ambiguous_image_columns", path=table, cause=columns.question, options=options)
    return columns.answers[0]


def _column_arguments(columns: Mapping[str, str]) -> str:
    """Return the command-line arguments that name these columns."""
    return " ".join(f"--{side} {shell_word(name)}" for side, name in columns.items())


def _image_in_row(table: Path, roots: Sequence[Path], location: str, side: str, value: Any) -> ImageSource:
    """Return the image for a side (`before` or `after`) of a row.

    Args:
        location: file and row, for error messages.

    Raises:
        DataError: the value is not a path, or the path leads out of `roots`.
    """
    if isinstance(value, Embedded):
        return value
    if not isinstance(value, str):
        raise DataError("serving.no_path", path=location, key=side, value=describe(value))
    folder = table.parent
    name = relative_to_root(value, (f"{folder.absolute()}/", f"{folder.resolve()}/"))
    fault = fault_of_path(name, folder, roots, "--image-root")
    if fault:
        raise DataError("serving.unusable_path", path=location, key=side, value=describe(value), cause=fault)
    path = folder / name
    if not (is_inside(path, *roots) or is_cached_object(str(path))):
        raise DataError("serving.link_out_of_folder", path=location, key=side, value=describe(value))
    return path


# Captions


class PairCaption(NamedTuple):
    """The caption of a pair, or the fault that prevented it.

    Attributes:
        note: a warning that the model may have ignored the question, or None.
    """

    pair: PairToCaption
    caption: str | None
    fault: Fault | None = None
    note: str | None = None

    def as_dict(self, model: str) -> dict[str, str | None]:
        """Return the result as a JSON object.

        Args:
            model: the model version that wrote the caption, such as `m3diff/12`.
        """
        entry: dict[str, str | None] = {"name": self.pair.name}
        for side in SIDES:
            entry[side] = _describe_image(getattr(self.pair, side))
        if self.fault:
            entry["error"] = str(self.fault)
        else:
            entry["caption"] = self.caption
        if self.note and not self.fault:
            entry["note"] = self.note
        entry["model"] = model
        entry["version"] = model.rpartition("/")[2]
        return entry


def _describe_image(image: ImageSource) -> str:
    """Return the path of an image, or the Parquet file and the name of an embedded image."""
    return str(image) if isinstance(image, Path) else f"{image.manifest}#bytes={image.name}"


def caption_pairs(
    captioner: "Captioner",
    pairs: Sequence[PairToCaption],
    question: str | None,
    overlay: Path | None,
    max_pixels: int = MAX_PIXELS,
) -> Iterator[PairCaption]:
    """Yield a caption for each pair, in order. A pair whose images cannot be read gets a fault instead.

    Args:
        question: the question to ask. If None, ask the model's default question.
        overlay: where to save both images with the outlines of the saliency map: a file for one pair, or a folder for
            several. If None, no overlay is drawn.
        max_pixels: maximum number of pixels per image, padded to a square.

    Raises:
        DataError: overlays were requested, but the model does not compute saliency maps.
        ParamsError: the model does not support this question.
    """
    check_question(captioner, question)
    note = note_about(question, captioner.trained_question) if captioner.family.reads_question else None
    batches = [pairs[start : start + BATCH_PAIRS] for start in range(0, len(pairs), BATCH_PAIRS)]
    # A single batch needs no progress bar
    batch_iterator = progress(batches, "caption", unit="batch") if len(batches) > 1 else batches
    for batch in batch_iterator:
        images, faults = _load_batch(batch, max_pixels)
        captions: dict[str, str] = {}
        if images:
            captions, saliency_maps = _caption_batch(captioner, images, question, overlay is not None)
            for name, saliency_map in saliency_maps.items():
                assert overlay is not None
                file = overlay if len(pairs) == 1 else overlay / f"{name}.png"
                _save_overlay(images[name], saliency_map, file)
        for pair in batch:
            if pair.name in faults:
                yield PairCaption(pair, None, faults[pair.name])
            else:
                yield PairCaption(pair, captions[pair.name], note=note)


def _load_batch(
    batch: Sequence[PairToCaption], max_pixels: int
) -> tuple[dict[str, tuple[Image.Image, Image.Image]], dict[str, Fault]]:
    """Load a batch of pairs.

    Returns:
        The images of the readable pairs and the faults of the other pairs, both by pair name.
    """
    images: dict[str, tuple[Image.Image, Image.Image]] = {}
    faults: dict[str, Fault] = {}
    for pair in batch:
        try:
            before = _load_image(pair.before, max_pixels)
            after = _load_image(pair.after, max_pixels)
            images[pair.name] = before, after
        except ImageError as error:
            faults[pair.name] = error.fault
    return images, faults


def _caption_batch(
    captioner: "Captioner",
    images: Mapping[str, tuple[Image.Image, Image.Image]],
    question: str | None,
    has_overlay: bool,
) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Return the captions and, if overlays are requested, the saliency maps, both by pair name.

    Raises:
        DataError: overlays were requested, but the model does not compute saliency maps.
    """
    prepared = [captioner.processor.prepare(pair) for pair in images.values()]
    dialogues = [(captioner.ask(question),)] * len(prepared)
    texts, saliency_maps = captioner.answer(prepared, dialogues, has_overlay)
    captions = dict(zip(images, texts, strict=True))
    if not has_overlay:
        return captions, {}
    if saliency_maps is None:
        raise DataError("serving.no_saliency_maps")
    return captions, dict(zip(images, saliency_maps, strict=True))


def _load_image(image: ImageSource, max_pixels: int) -> Image.Image:
    """Load an image from a file or from a Parquet file.

    Raises:
        ImageError: the image is missing or cannot be read. The error names the file that contains the image.
    """
    if isinstance(image, Path):
        if not image.exists():
            raise ImageError("serving.missing_image", path=image)
        return load_image(image, max_pixels=max_pixels)
    try:
        return load_image(io.BytesIO(image.read()), max_pixels=max_pixels)
    except ImageError as error:
        fields = {**error.fields, "path": _describe_image(image)}
        raise ImageError(error.code, **fields) from error


def check_question(captioner: "Captioner", question: str | None) -> None:
    """Check that the model can answer the question.

    Raises:
        ParamsError: the model does not support questions, or cannot encode this one.
    """
    if not question:
        return
    if not captioner.family.reads_question:
        raise ParamsError("serving.question_not_read", value=question)
    try:
        captioner.encode_prompt((Turn(question),), images=2)
    except ValueError as error:
        raise ParamsError("serving.unusable_question", value=question, cause=cause_of(error)) from error


def _save_overlay(images: tuple[Image.Image, Image.Image], saliency_map: np.ndarray, file: Path) -> None:
    """Save both images side by side with the outlines of the saliency map. Small images are enlarged."""
    saliency = saliency_map.astype(np.float32)
    before = draw_outlines(enlarge(images[0]), saliency)
    after = draw_outlines(enlarge(images[1]), saliency)
    size = (before.width + GAP_PX + after.width, max(before.height, after.height))
    sheet = Image.new("RGB", size, "white")
    sheet.paste(before, (0, 0))
    sheet.paste(after, (before.width + GAP_PX, 0))
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file)
