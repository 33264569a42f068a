"""Decide which samples a model answers together: by the shape of their prompts, and by the memory of their images.

Samples of one shape have the same number of images and prompts of the same length, so no prompt is padded, and the
samples do not affect each other's answers. Callers that form batches before they prepare images use `Processor.marks`,
with which the prompts of most families have their true length, so their batches stay whole. If the number of visual
tokens depends on the images (`Takes.fixed_marks`), `Captioner.answer` splits such a batch.

The families here resize every image to the size of their encoder, so that a batch takes a few megabytes. A family that
keeps the size of an image needs up to 144 MB for a picture of 12 million pixels, and a batch of pairs then takes many
gigabytes. Such a batch is answered in parts. An answer does not depend on the other samples of a batch, so the parts
change no answer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from m3diff.models.prepared import Prepared

# Bytes of prepared images from which no further image is prepared before the others are answered
MAX_PREPARED_BYTES = 1 << 30


def split_by_shape(shapes: Iterable[Hashable], size: int | None = None) -> list[list[int]]:
    """Return batches of samples with equal shapes, as the positions of the samples.

    The batches are in the order of the first samples of their shapes. The samples of a shape stay in order.

    Args:
        shapes: for each sample, the number of images, the length of the prompt, and whatever else must be equal.
        size: maximum number of samples of a batch. None for no limit.
    """
    positions_by_shape: dict[Hashable, list[int]] = {}
    for position, shape in enumerate(shapes):
        positions_by_shape.setdefault(shape, []).append(position)
    batches = []
    for positions in positions_by_shape.values():
        batch_size = size or len(positions)
        batches += [positions[start : start + batch_size] for start in range(0, len(positions), batch_size)]
    return batches


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
