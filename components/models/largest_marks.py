"""Find the marks with the largest number of tokens that a processor gives to images of any size.

The number of tokens of an image depends on the processor's class and settings. transformers offers a function for it to
vLLM. The marks themselves come from the processor's own call, on images that are as small as possible, because an image
of the largest size may take gigabytes of memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from m3diff.models.image_scales import ImageShape

CountTokens = Callable[[list[ImageShape]], list[int]]
MakeMarks = Callable[[ImageShape], tuple[str, ...]]

# Sizes to search if counting is cheap: from 1,024 to 67 million pixels, and ratios of the sides from 1 to 4
ALL_AREAS = range(10, 27)
ALL_RATIOS = tuple(eighths / 8 for eighths in range(8, 33))
# Sizes to search if each of them must be prepared: 4 million pixels, which is more than processors with tiles keep
FEW_AREAS = (22,)
FEW_RATIOS = (1, 1.5, 2, 2.5, 4)


class Run(NamedTuple):
    """A mark that has all its image tokens in one run, such as "<start>" + 256 * "<image>" + "<end>"."""

    prefix: str
    tokens: int
    suffix: str


def candidate_sizes(areas: Iterable[int], ratios: Iterable[float]) -> list[ImageShape]:
    """Return image sizes, high and wide.

    Args:
        areas: logarithms to base 2 of the number of pixels.
        ratios: ratios of the longer to the shorter side, from 1.
    """
    sizes = []
    for area in areas:
        for ratio in ratios:
            short_side = round((2**area / ratio) ** 0.5)
            long_side = round(short_side * ratio)
            sizes.append(ImageShape(long_side, short_side))
            if ratio > 1:
                sizes.append(ImageShape(short_side, long_side))
    return sizes


def largest_marks(make_marks: MakeMarks, count_tokens: CountTokens | None, image_token: str) -> tuple[str, ...]:
    """Return the marks of an image set whose images all have the largest number of tokens.

    Args:
        make_marks: (size) -> marks of the image set if all its images have this size.
        count_tokens: (sizes) -> number of tokens of one image of each size. None if the processor cannot count.
        image_token: text of the token that the model replaces by visual tokens.
    """
    if count_tokens is None:
        candidates = [make_marks(size) for size in candidate_sizes(FEW_AREAS, FEW_RATIOS)]
        return max(candidates, key=lambda marks: sum(mark.count(image_token) for mark in marks))
    sizes = sorted(candidate_sizes(ALL_AREAS, ALL_RATIOS), key=lambda size: size.height * size.width)
    smallest_sizes: dict[int, ImageShape] = {}  # number of tokens -> smallest size that has it
    for size, count in zip(sizes, count_tokens(sizes), strict=True):
        smallest_sizes.setdefault(count, size)
    most_tokens = max(smallest_sizes)
    return extended_marks(make_marks, smallest_sizes, image_token) or make_marks(smallest_sizes[most_tokens])


def extended_marks(
    make_marks: MakeMarks, smallest_sizes: Mapping[int, ImageShape], image_token: str
) -> tuple[str, ...] | None:
    """Return the marks of the largest number of tokens, made by extending those of small images.

    This holds only if each mark has one run of image tokens, which grows by one token for each counted token. Two small
    sizes show whether it does. Return None if it does not.

    Args:
        smallest_sizes: for each number of tokens, the smallest size that has it, in the order of the sizes.
    """
    counts = list(smallest_sizes)
    small_count = counts[0]
    small_size = smallest_sizes[small_count]
    if len(counts) == 1:
        return make_marks(small_size)
    larger_count = counts[1]
    larger_size = smallest_sizes[larger_count]
    extended = []
    for small_mark, larger_mark in zip(make_marks(small_size), make_marks(larger_size), strict=True):
        run = run_of(small_mark, image_token)
        larger_run = run_of(larger_mark, image_token)
        expected_run = run and run._replace(tokens=run.tokens + larger_count - small_count)
        if run is None or larger_run != expected_run:
            return None
        tokens = run.tokens + max(smallest_sizes) - small_count
        extended.append(run.prefix + image_token * tokens + run.suffix)
    return tuple(extended)


def run_of(mark: str, image_token: str) -> Run | None:
    """Return the parts of a mark, or None if its image tokens are not in one run."""
    runs = list(re.finditer(f"(?:{re.escape(image_token)})+", mark))
    if len(runs) != 1:
        return None
    start, end = runs[0].span()
    return Run(mark[:start], (end - start) // len(image_token), mark[end:])
