"""Choose the samples that are answered together, and limit the memory that their prepared images take.

The families here resize every image to the size of their encoder, so that a batch takes a few megabytes. A family that
keeps the size of an image needs up to 144 MB for a picture of 12 million pixels, and a batch of pairs then takes many
gigabytes. Such a batch is answered in parts. An answer does not depend on the other samples of a batch, so the parts
change no answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from m3diff.models.prepared import Prepared

# Bytes of prepared images from which no further image is prepared before the others are answered
MAX_PREPARED_BYTES = 1 << 30


def group_by_shape(prepared: Sequence[Prepared], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Group the positions of samples that have the same number of images and prompts of the same length.

    The groups and the positions in each group have the order of the samples. Callers that form batches before they
    prepare images use `Processor.marks`, with which the prompts of most families have their true length, so their
    batches stay whole. If the number of visual tokens depends on the images (`Takes.fixed_marks`), a batch is split.
    """
    positions_by_shape: dict[tuple[int, int], list[int]] = {}
    for position, (images, prompt) in enumerate(zip(prepared, prompts, strict=True)):
        positions_by_shape.setdefault((len(images.marks), len(prompt)), []).append(position)
    return list(positions_by_shape.values())


def split_by_bytes(prepared: Iterable[Prepared], max_bytes: int) -> Iterator[list[Prepared]]:
    """Yield the image sets in order, in parts. A part ends with the image set with which it has `max_bytes` or more.

    A part is emptied before the next image set is taken, so that an iterator that prepares image sets holds at most one
    part: less than `max_bytes`, and one image set.
    """
    part: list[Prepared] = []
    part_bytes = 0
    for images in prepared:
        part.append(images)
        part_bytes += images.nbytes
        del images  # otherwise, it would stay in memory while the next image set is prepared
        if part_bytes >= max_bytes:
            yield part
            part.clear()
            part_bytes = 0
    if part:
        yield part
