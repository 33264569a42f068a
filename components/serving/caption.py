"""Implement `m3diff caption IMAGE [IMAGE]`, which finds the images and questions of a user and answers them without a
server.

Most often, these are pairs of images of one scene: the image before a change, and the image after it. A table may also
have single images, questions of its own, and the turns of a dialogue before them.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from m3diff.datasets.files import Embedded, columns_in, describe, fault_of_path, is_inside, look_up, parse_images
from m3diff.datasets.folders import match_names
from m3diff.datasets.pairs import relative_to_root
from m3diff.datasets.tables import (
    IMAGE_SUFFIXES,
    SIDES,
    TABLE_SUFFIXES,
    find_image_columns,
    images_of,
    is_image,
    names_of,
    read_rows,
    read_sample,
)
from m3diff.images.enlarge import enlarge
from m3diff.images.open import MAX_PIXELS, ImageError, load_image
from m3diff.images.saliency import draw_outlines
from m3diff.models.contract import Takes
from m3diff.models.sample_batches import MAX_PREPARED_BYTES, split_by_shape
from m3diff.models.sample_limits import TrainedOn, answerable_images, fault_of_sample
from m3diff.provenance.cache import is_cached_object
from m3diff.records.errors import DataError, Fault, ValueFault, cause_of, shell_word
from m3diff.records.progress import progress
from m3diff.records.sample import MOST_IMAGES, Turn
from m3diff.serving.questions import note_about_sample
from m3diff.settings.section import ParamsError

if TYPE_CHECKING:
    from m3diff.models.contract import Prepared
    from m3diff.models.generation import Captioner

MAX_LISTED_NAMES = 5
EXPECTED_INPUT = Fault("serving.expected_input")
BATCH_INPUTS = 8
GAP_PX = 12  # width of the gap between the two images of an overlay
IMAGE_COLUMN = "image"
QUESTION_COLUMN = "question"
HISTORY_COLUMN = "history"

ImageSource = Path | Embedded  # a file, or bytes in a Parquet file


class CaptionInput(NamedTuple):
    """Images to caption, or a question about them.

    Attributes:
        name: a name that is unique among the inputs that `find_inputs` returns.
        images: no image, one image, or the image before and the image after.
        question: the question. None for the default question of the model.
        history: the turns before the question.
    """

    name: str
    images: tuple[ImageSource, ...]
    question: str | None = None
    history: tuple[Turn, ...] = ()


def find_inputs(
    path: Path,
    after: Path | None,
    image_root: Path | None = None,
    columns: Mapping[str, str] | None = None,
) -> list[CaptionInput]:
    """Return the inputs in one or two images, two folders or a table.

    Args:
        path: an image, a folder or a table.
        after: a second image or folder. None for a single image or a table.
        image_root: a second folder that may contain the table's images. The table's folder is always allowed.
        columns: a mapping from `before` and `after` to the table's columns. If None, the columns are detected from the
            column names and values.

    Raises:
        DataError: a path does not exist, one path is a folder and the other an image, the file names do not show which
            images belong together, the image columns are unclear, or a row of the table has no images or no valid
            question.
        ParamsError: columns are named without a table, or only one column is named.
    """
    for input_path in filter(None, (path, after)):
        if not input_path.exists():
            raise DataError("serving.missing_input", path=input_path, expected=EXPECTED_INPUT)
    is_table = after is None and not path.is_dir() and not is_image(path.name)
    _check_columns(columns, is_table)
    if is_table:
        roots = [path.parent]
        if image_root is not None:
            roots.append(image_root)
        return _inputs_in_table(path, roots, columns)
    if after is None and path.is_dir():
        raise DataError(_fault_of_folder(path))
    if after is None:
        return [CaptionInput(path.stem, (path,))]
    if path.is_dir() != after.is_dir():
        raise DataError("serving.folder_and_image", before=path, after=after, expected=EXPECTED_INPUT)
    if path.is_dir():
        return _pairs_in_folders(path, after)
    return [CaptionInput(path.stem, (path, after))]


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


def _pairs_in_folders(before: Path, after: Path) -> list[CaptionInput]:
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
            pairs.append(CaptionInput(name, (images_before[name], images_after[name_after])))
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


def _inputs_in_table(table: Path, roots: list[Path], columns: Mapping[str, str] | None) -> list[CaptionInput]:
    """Return the inputs in a table. Paths are relative to the table's folder and must stay inside `roots`."""
    if columns is None:
        columns = _detect_columns(table)
    inputs = []
    header = list(chain.from_iterable(columns_in(name) for name in columns.values()))
    for location, row in read_rows(table, header):
        images = []
        for field, value in _image_values(location, row, columns):
            images.append(_image_in_row(table, roots, location, field, value))
        question = row.get(QUESTION_COLUMN)
        if question is not None and not isinstance(question, str):
            raise DataError("serving.no_text", path=location, key=QUESTION_COLUMN, value=describe(question))
        # An empty cell of a CSV file is an empty text
        asks_default_question = question is None or not question.strip()
        inputs.append(
            CaptionInput(
                name="",
                images=tuple(images),
                question=None if asks_default_question else question,
                history=_read_history(location, row.get(HISTORY_COLUMN)),
            )
        )
    if not inputs:
        raise DataError("serving.no_row", path=table, expected=EXPECTED_INPUT)
    return _with_names(inputs)


def _with_names(inputs: Sequence[CaptionInput]) -> list[CaptionInput]:
    """Return the inputs with names derived from their images by `names_of`, so that no two names are equal."""
    names_of_images = iter(names_of([(item.images[0], item.images[-1]) for item in inputs if item.images]))
    named_inputs = []
    for number, item in enumerate(inputs, 1):
        name = next(names_of_images) if item.images else f"question-{number:05}"
        named_inputs.append(item._replace(name=name))
    return named_inputs


def _image_values(location: str, row: Mapping[str, Any], columns: Mapping[str, str]) -> list[tuple[str, Any]]:
    """Return the images in a row, each with its field (`before`, `after`, `image` or `images`).

    Args:
        location: file and row, for error messages.
        columns: the result of `_detect_columns`.

    Raises:
        DataError: the row lacks an image, or its list of images is not a list of at most two images.
    """
    if IMAGE_COLUMN in columns:
        image = row.get(columns[IMAGE_COLUMN])
        if image in (None, ""):
            raise DataError("serving.no_path", path=location, key=columns[IMAGE_COLUMN], value=describe(image))
        return [(IMAGE_COLUMN, image)]
    if "images" not in columns:
        return list(zip(SIDES, images_of(location, row, columns), strict=True))
    try:
        images = parse_images(look_up(row, columns["images"]), columns["images"])
    except DataError as error:
        raise DataError(error.fault.at(path=location)) from error
    if not isinstance(images, list) or len(images) > MOST_IMAGES:
        raise DataError("serving.not_a_list_of_images", path=location, key=columns["images"], value=describe(images))
    return [("images", image) for image in images]


def _read_history(location: str, value: Any) -> tuple[Turn, ...]:
    """Return the turns in the column `history` of a row.

    Args:
        location: file and row, for error messages.
        value: a list of turns, or its text in JSON. A turn is an object with `question` and `answer`, or a list of
            both. An empty text or null has no turns.

    Raises:
        DataError: the value is not a list of turns with texts.
    """
    turns = value
    if isinstance(value, str):
        try:
            turns = json.loads(value) if value.strip() else []
        except ValueError as error:
            raise DataError("serving.unusable_history", path=location, value=describe(value)) from error
    if turns is None:
        return ()
    if not isinstance(turns, list):
        raise DataError("serving.unusable_history", path=location, value=describe(turns))
    history = []
    for turn in turns:
        texts = [turn.get("question"), turn.get("answer")] if isinstance(turn, dict) else turn
        is_turn = isinstance(texts, list) and len(texts) == 2
        if not is_turn or not all(isinstance(text, str) and text.strip() for text in texts):
            raise DataError("serving.unusable_history", path=location, value=describe(turn))
        history.append(Turn(*texts))
    return tuple(history)


def _detect_columns(table: Path) -> Mapping[str, str]:
    """Detect the columns of the images from the table's column names and values.

    Returns:
        `{before: ..., after: ...}`, `{images: ...}` for a column of lists, or `{image: ...}` for single images.

    Raises:
        DataError: the file cannot be read, no column contains images, or it is unclear which columns to use.
    """
    sample = read_sample(table)
    values = sample.values()
    if not any(values.values()):
        raise DataError("serving.no_row", path=table, expected=EXPECTED_INPUT)
    columns = find_image_columns(table.parent, values)
    if not columns.answers and IMAGE_COLUMN in values:
        return {IMAGE_COLUMN: IMAGE_COLUMN}
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


def _image_in_row(table: Path, roots: Sequence[Path], location: str, field: str, value: Any) -> ImageSource:
    """Return an image of a row.

    Args:
        location: file and row, for error messages.
        field: `before`, `after`, `image` or `images`, for error messages.

    Raises:
        DataError: the value is not a path, or the path leads out of `roots`.
    """
    if isinstance(value, Embedded):
        return value
    if not isinstance(value, str):
        raise DataError("serving.no_path", path=location, key=field, value=describe(value))
    folder = table.parent
    name = relative_to_root(value, (f"{folder.absolute()}/", f"{folder.resolve()}/"))
    fault = fault_of_path(name, folder, roots, "--image-root")
    if fault:
        raise DataError("serving.unusable_path", path=location, key=field, value=describe(value), cause=fault)
    path = folder / name
    if not (is_inside(path, *roots) or is_cached_object(str(path))):
        raise DataError("serving.link_out_of_folder", path=location, key=field, value=describe(value))
    return path


# Answers


class CaptionOutput(NamedTuple):
    """The answer to an input, or the fault that prevented it.

    Attributes:
        caption: the caption, or the answer to the question.
        note: a warning that the model may have ignored the question, or None.
    """

    input: CaptionInput
    caption: str | None
    fault: Fault | None = None
    note: str | None = None

    def as_dict(self, model: str) -> dict[str, str | None]:
        """Return the result as a JSON object.

        Args:
            model: the model version that wrote the caption, such as `m3diff/12`.
        """
        entry: dict[str, str | None] = {"name": self.input.name}
        fields = SIDES if len(self.input.images) == 2 else (IMAGE_COLUMN,)
        for field, image in zip(fields, self.input.images, strict=False):
            entry[field] = _describe_image(image)
        if self.input.question is not None:
            entry["question"] = self.input.question
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


def check_inputs(inputs: Sequence[CaptionInput], takes: Takes, trained_on: TrainedOn) -> None:
    """Check that a model can answer at least one of the inputs. The others get a fault of their own.

    Args:
        takes: the samples that the model's family can process.
        trained_on: the samples that the model was trained on.

    Raises:
        DataError: the model can answer none of the inputs.
    """
    faults = [_fault_of_input(item, takes, trained_on) for item in inputs]
    if None in faults:
        return
    (fault, *_) = faults
    assert fault is not None
    (item, *_) = inputs
    if len(inputs) == 1 and len(item.images) == 1 and answerable_images(takes, trained_on) == (2,):
        (image,) = item.images
        command = f"m3diff caption {shell_word(_describe_image(image))} AFTER"
        raise DataError("serving.image_without_second", path=image, command=command)
    if len(inputs) == 1:
        raise DataError(fault)
    raise DataError("serving.no_answerable_input", inputs=len(inputs), cause=fault)


def _fault_of_input(item: CaptionInput, takes: Takes, trained_on: TrainedOn) -> Fault | None:
    """Return why a model cannot answer an input, or None if it can."""
    return fault_of_sample(takes, trained_on, len(item.images), item.question, len(item.history))


def answer_inputs(
    captioner: "Captioner",
    inputs: Sequence[CaptionInput],
    overlay: Path | None,
    max_pixels: int = MAX_PIXELS,
) -> Iterator[CaptionOutput]:
    """Yield the answer to each input, in order. An input that cannot be answered gets a fault instead.

    Args:
        overlay: where to save both images of a pair with the outlines of the saliency map: a file for one input, or a
            folder for several. If None, no overlay is drawn.
        max_pixels: maximum number of pixels per image, padded to a square.

    Raises:
        DataError: overlays were requested, but an input is not a pair, or the model does not compute saliency maps.
    """
    if overlay is not None:
        if captioner.family.maps is None:
            raise DataError("serving.no_saliency_maps")
        for item in inputs:
            if len(item.images) != 2:
                raise DataError("serving.overlay_without_pair", name=item.name, value=len(item.images))
    # A single batch needs no progress bar
    batches = [inputs[start : start + BATCH_INPUTS] for start in range(0, len(inputs), BATCH_INPUTS)]
    for batch in progress(batches, "caption", unit="batch") if len(batches) > 1 else batches:
        yield from _answer_batch(captioner, batch, overlay, len(inputs), max_pixels)


def _answer_batch(
    captioner: "Captioner", inputs: Sequence[CaptionInput], overlay: Path | None, input_count: int, max_pixels: int
) -> Iterator[CaptionOutput]:
    """Yield the answer to each input of a batch, in order. See `answer_inputs`.

    Args:
        input_count: number of all inputs.
    """
    outputs: dict[int, CaptionOutput] = {}
    samples: dict[int, LoadedSample] = {}
    sample_bytes = 0
    for position, item in enumerate(inputs):
        sample = _load_sample(captioner, item, max_pixels, overlay is not None)
        if isinstance(sample, Fault):
            outputs[position] = CaptionOutput(item, None, sample)
            continue
        samples[position] = sample
        sample_bytes += sample.nbytes
        del sample  # otherwise, its images would stay in memory while the next ones are prepared
        if sample_bytes >= MAX_PREPARED_BYTES:
            outputs |= _answer_samples(captioner, inputs, samples, overlay, input_count)
            samples.clear()
            sample_bytes = 0
    outputs |= _answer_samples(captioner, inputs, samples, overlay, input_count)
    samples.clear()
    for position in range(len(inputs)):
        yield outputs[position]


class LoadedSample(NamedTuple):
    """An input that is ready for the model.

    Attributes:
        turns: the turns of the dialogue, of which the last is to be answered.
        prepared: the images, prepared by the model's processor.
        images: the images for the overlay, in their own sizes. Empty if no overlay is drawn.
        shape: number of images and length of the prompt. Samples of one shape are answered together, without padding.
    """

    turns: tuple[Turn, ...]
    prepared: "Prepared"
    images: tuple[Image.Image, ...]
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Size of the prepared images and of the images for the overlay in bytes."""
        return self.prepared.nbytes + sum(3 * image.width * image.height for image in self.images)


def _load_sample(
    captioner: "Captioner", item: CaptionInput, max_pixels: int, has_overlay: bool
) -> LoadedSample | Fault:
    """Load the images of an input and prepare them, or return the fault that prevents an answer."""
    fault = _fault_of_input(item, captioner.family.takes, captioner.trained_on)
    if fault is not None:
        return fault
    try:
        images = tuple(_load_image(image, max_pixels) for image in item.images)
    except ImageError as error:
        return error.fault
    turns = (*item.history, captioner.ask(item.question))
    try:
        prepared = captioner.processor.prepare(images)
        prompt = captioner.encode_prompt(turns, prepared.marks)
    except ValueFault as error:
        return error.fault
    return LoadedSample(
        turns=turns,
        prepared=prepared,
        images=images if has_overlay else (),
        shape=(len(images), len(prompt)),
    )


def _answer_samples(
    captioner: "Captioner",
    inputs: Sequence[CaptionInput],
    samples: Mapping[int, LoadedSample],
    overlay: Path | None,
    input_count: int,
) -> dict[int, CaptionOutput]:
    """Return the answers to samples by the position of their input, and save the requested overlays."""
    outputs = {}
    input_positions = list(samples)
    for batch in split_by_shape(sample.shape for sample in samples.values()):
        positions = [input_positions[number] for number in batch]
        prepared = [samples[position].prepared for position in positions]
        dialogues = [samples[position].turns for position in positions]
        texts, saliency_maps = captioner.answer(prepared, dialogues, overlay is not None)
        for number, (position, text) in enumerate(zip(positions, texts, strict=True)):
            item = inputs[position]
            if overlay is not None and saliency_maps is not None:
                file = overlay if input_count == 1 else overlay / f"{item.name}.png"
                _save_overlay(samples[position].images, saliency_maps[number], file)
            note = note_about_sample(captioner.family.takes, captioner.trained_on, item.question, 1 + len(item.history))
            outputs[position] = CaptionOutput(item, text, note=note)
    return outputs


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


def ask_question(inputs: Sequence[CaptionInput], question: str | None, takes: Takes) -> list[CaptionInput]:
    """Return the inputs with the question of the option `--question`, which replaces the questions of a table.

    Args:
        question: the question. If None or empty, the inputs keep their questions.
        takes: the samples that the model's family can process.

    Raises:
        ParamsError: the model does not support questions.
    """
    if not question:
        return list(inputs)
    if not takes.questions:
        raise ParamsError("serving.question_not_read", value=question)
    return [item._replace(question=question) for item in inputs]


def check_question(captioner: "Captioner", question: str | None) -> None:
    """Check that the model can encode the question of the option `--question`.

    Raises:
        ParamsError: the question contains a text with a meaning of its own in a prompt.
    """
    if not question:
        return
    try:
        captioner.encode_prompt((Turn(question),), captioner.processor.marks(2))
    except ValueError as error:
        raise ParamsError("serving.unusable_question", value=question, cause=cause_of(error)) from error


def _save_overlay(images: tuple[Image.Image, ...], saliency_map: np.ndarray, file: Path) -> None:
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
