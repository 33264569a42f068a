"""Measure how many visual tokens the images of a run have, and how often a processor scales them down."""

from collections.abc import Sequence
from dataclasses import dataclass

from m3diff.images.open import load_image
from m3diff.models.contract import ScalesImages
from m3diff.records.errors import format_count
from m3diff.records.sample import Turn
from m3diff.stages.train.batches import SampleRows, Samples, count_samples

# A side that is rounded to whole patches is not called scaled down
SCALED_DOWN = 0.97


@dataclass(frozen=True)
class ImageFigures:
    """The images of some samples of a run.

    Attributes:
        samples: number of samples with images.
        tokens: mean number of visual tokens of such a sample.
        scaled_down_share: share of these samples with an image that the processor scales down. None if the processor
            does not tell how it scales an image.
        smallest_scale: smallest factor by which the processor scales the sides of an image.
    """

    samples: int
    tokens: float
    scaled_down_share: float | None
    smallest_scale: float

    def __str__(self) -> str:
        text = f"{self.tokens:.0f} image tokens per sample on average"
        if self.scaled_down_share is None:
            text += "; whether images are scaled down is unknown"
        else:
            text += f"; the images of {self.scaled_down_share:.0%} of the samples are scaled down"
        if self.scaled_down_share:
            text += f", at most to {self.smallest_scale:.0%} of their sides"
        return f"{text} (measured on {format_count(self.samples, 'sample')})"


def measure_images(samples: Samples, sequences: Sequence[SampleRows], processor: ScalesImages) -> ImageFigures | None:
    """Return the figures of the samples in these sequences, or None if they have no images."""
    count = 0
    tokens = 0
    scaled_down = 0
    smallest_scale = 1.0
    is_scale_known = True
    for sequence in sequences:
        images = samples.images_of(sequence)
        if not images:
            continue
        prepared, scales = processor.prepare_with_scales(load_image(*image) for image in images)
        prompt = processor.encode_prompt((Turn(""),), prepared.marks)
        samples_of_sequence = count_samples(sequence)
        count += samples_of_sequence
        tokens += samples_of_sequence * processor.count_image_tokens(prompt)
        known_scales = [scale for scale in scales if scale is not None]
        is_scale_known = is_scale_known and len(known_scales) == len(scales)
        smallest_of_sequence = min(known_scales, default=1.0)
        if smallest_of_sequence < SCALED_DOWN:
            scaled_down += samples_of_sequence
        smallest_scale = min(smallest_scale, smallest_of_sequence)
    if not count:
        return None
    scaled_down_share = scaled_down / count if is_scale_known else None
    return ImageFigures(count, tokens / count, scaled_down_share, smallest_scale)
