"""Check samples whose number of tokens depends on the sizes of their images, without decoding the images.

The sizes are read from the headers of the files. A processor chooses its grid by the sizes alone, so blank images of
the same sizes have the same tokens. Each combination of sizes is prepared at most once.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import polars as pl
from PIL import Image

from m3diff.images.open import ImageError, ImageSize, read_image_size
from m3diff.models.contract import Processor, ScalesImages
from m3diff.models.dialogue import count_longest_branch
from m3diff.records.errors import DataError, Fault, ValueFault
from m3diff.records.sample import Turn
from m3diff.stages.train.batches import Samples

SizesOfSet = tuple[ImageSize, ...]  # the sizes of the images of an image set, in their order

READING_THREADS = 8  # headers are read from disks that may be slow

# `Processor.marks` tries some sizes. Other sizes may have slightly more tokens than the largest that it found
MARGIN_OF_MARKS = 1.25


def measure_texts(samples: Samples) -> pl.DataFrame:
    """Return `images`, `turns` and `text_bytes` of each sample: its numbers of images and turns, and its texts' size.

    A text has at most one token per byte, so a sample with few bytes need not be encoded to know that it is short.
    """
    turn = pl.element().struct
    bytes_of_turn = turn.field("question").str.len_bytes() + turn.field("answer").str.len_bytes()
    return samples.table.select(
        images=pl.col("images").list.len(),
        turns=pl.col("history").list.len() + 1,
        text_bytes=pl.col("question").str.len_bytes()
        + pl.col("answer").str.len_bytes()
        + pl.col("history").list.eval(bytes_of_turn).list.sum(),
    )


@dataclass(frozen=True)
class LongestSample:
    """The longest sample of a split.

    Attributes:
        row: its row.
        tokens: its length in tokens.
        sizes: the sizes of its images.
    """

    row: int
    tokens: int
    sizes: SizesOfSet


def read_sizes(samples: Samples) -> dict[str, ImageSize]:
    """Return the size of each image file, by its path, without the files that cannot be read.

    The stage validate has removed such files from a mixture, and training reports those that have changed since then.
    """

    def read(path: str) -> ImageSize | None:
        try:
            return read_image_size(path)
        except ImageError:
            return None

    uris = samples.table["images"].explode().struct.field("uri").drop_nulls().unique(maintain_order=True).to_list()
    with ThreadPoolExecutor(READING_THREADS) as pool:
        sizes = zip(uris, pool.map(read, uris), strict=True)
        return {uri: size for uri, size in sizes if size is not None}


def rows_by_sizes(samples: Samples, sizes: dict[str, ImageSize]) -> dict[SizesOfSet, list[int]]:
    """Return the rows of the samples by the sizes of their images. The largest area comes first."""
    rows: dict[SizesOfSet, list[int]] = {}
    uris_of_rows = samples.table["images"].list.eval(pl.element().struct.field("uri")).to_list()
    for row, uris in enumerate(uris_of_rows):
        if all(uri in sizes for uri in uris):
            rows.setdefault(tuple(sizes[uri] for uri in uris), []).append(row)
    return dict(sorted(rows.items(), key=lambda item: -sum(size.area for size in item[0])))


def prepare_marks(processor: Processor, sizes: SizesOfSet) -> tuple[str, ...]:
    """Return the marks of images of these sizes.

    Raises:
        ValueFault: an image fits none of the processor's grids.
    """
    return processor.prepare([Image.new("RGB", (size.width, size.height)) for size in sizes]).marks


def check_grids(samples: Samples, rows: dict[SizesOfSet, list[int]], processor: Processor) -> None:
    """Check that the processor has a grid for the image sets with the most unusual sizes.

    These are the ones with the widest, tallest, largest and smallest image.

    Raises:
        DataError: an image fits none of the processor's grids. The error has its path.
    """
    for sizes in unusual_sizes(rows):
        try:
            prepare_marks(processor, sizes)
        except ValueFault as error:
            images = samples.images(rows[sizes][0])
            number = max(range(len(sizes)), key=lambda number: sizes[number].aspect_ratio)
            raise DataError(error.fault.at(path=images[number].uri)) from error


def unusual_sizes(rows: Iterable[SizesOfSet]) -> Iterator[SizesOfSet]:
    """Yield the sizes of the image sets with the widest, tallest, largest and smallest image, each once."""
    sets_with_images = [sizes for sizes in rows if sizes]
    if not sets_with_images:
        return
    extremes = [
        max(sets_with_images, key=lambda sizes: max(size.width / size.height for size in sizes)),
        max(sets_with_images, key=lambda sizes: max(size.height / size.width for size in sizes)),
        max(sets_with_images, key=lambda sizes: sum(size.area for size in sizes)),
        min(sets_with_images, key=lambda sizes: min(min(size.width, size.height) for size in sizes)),
    ]
    yield from dict.fromkeys(extremes)


def find_longest_sample(
    samples: Samples, rows: dict[SizesOfSet, list[int]], processor: Processor, max_tokens: int
) -> LongestSample | None:
    """Return the longest sample in tokens, or None if no sample is longer than `max_tokens`.

    Samples with few bytes are not encoded.

    Args:
        rows: the result of `rows_by_sizes`.
    """
    table = measure_texts(samples)
    turns = table["turns"].to_list()
    text_bytes = table["text_bytes"].to_list()
    longest: LongestSample | None = None
    longest_tokens = max_tokens
    for sizes, rows_of_sizes in rows.items():
        most_turns = max(turns[row] for row in rows_of_sizes)
        most_bytes = max(text_bytes[row] for row in rows_of_sizes)
        most_tokens_without_text = count_longest_branch(
            processor, (Turn(""),) * most_turns, processor.marks(len(sizes))
        )
        if MARGIN_OF_MARKS * most_tokens_without_text + most_bytes <= longest_tokens:
            continue
        marks = prepare_marks(processor, sizes)
        tokens_without_text: dict[int, int] = {}  # by number of turns
        for row in sorted(rows_of_sizes, key=lambda row: text_bytes[row], reverse=True):
            count = turns[row]
            if count not in tokens_without_text:
                tokens_without_text[count] = count_longest_branch(processor, (Turn(""),) * count, marks)
            if tokens_without_text[count] + text_bytes[row] <= longest_tokens:
                continue
            tokens = count_longest_branch(processor, samples.turns(row), marks)
            if tokens > longest_tokens:
                longest = LongestSample(row, tokens, sizes)
                longest_tokens = tokens
    return longest


def count_tokens_in_couples(samples: Samples, rows: Sequence[int], processor: Processor) -> dict[int, int]:
    """Return how many tokens the single image of each row has in a couple.

    They are measured with a couple of two images of its size, because processors may treat single images differently.
    Rows whose images cannot be read are left out.
    """
    sizes = read_sizes(samples)
    tokens_of_text = count_longest_branch(processor, (Turn(""),), ())
    tokens_by_size: dict[ImageSize, int] = {}
    tokens = {}
    for row in rows:
        size = sizes.get(samples.images(row)[0].uri)
        if size is None:
            continue
        if size not in tokens_by_size:
            marks = prepare_marks(processor, (size, size))
            tokens_of_couple = count_longest_branch(processor, (Turn(""),), marks) - tokens_of_text
            tokens_by_size[size] = tokens_of_couple // 2
        tokens[row] = tokens_by_size[size]
    return tokens


def fault_of_long_sample(
    samples: Samples, longest: LongestSample, processor: Processor, max_tokens: int, model: str | None
) -> Fault:
    """Return the fault of a sample that is longer than `max_tokens`, with the settings that bound the resolution.

    Args:
        model: name of the model in the section `models`, for the settings' keys.
    """
    fields = {
        "key": "train.max_tokens",
        "value": longest.tokens,
        "limit": max_tokens,
        "dataset": samples.value("dataset", longest.row),
        "name": samples.value("record", longest.row),
    }
    if not isinstance(processor, ScalesImages) or not longest.sizes:
        return Fault("train.sample_too_long", **fields)
    images = [Image.new("RGB", (size.width, size.height)) for size in longest.sizes]
    marks = prepare_marks(processor, longest.sizes)
    section = f"models.{model or 'NAME'}.processor"
    settings = processor.settings_that_bound_tokens(images)
    names = []
    for name, value in settings.items():
        names.append(f"{section}.{name}" if value is None else f"{section}.{name} (now {value})")
    code = "train.images_too_long" if names else "train.images_too_long_for_any_setting"
    sizes = [f"{size.width} x {size.height}" for size in longest.sizes]
    image_tokens = processor.count_image_tokens(processor.encode_prompt((Turn(""),), marks))
    return Fault(code, **fields, sizes=sizes, image_tokens=image_tokens, names=names)
