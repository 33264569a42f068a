"""Measure how much an image processor of transformers enlarges or reduces images.

The sizes that a processor chooses depend on its class and its settings. They are recorded by a copy of the processor,
whose methods that resize an image also note the sizes before and after.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple


class ImageShape(NamedTuple):
    """Height and width of an image in pixels, in the order of an array."""

    height: int
    width: int


class Resize(NamedTuple):
    """The sizes of an image before and after a resize."""

    before: ImageShape
    after: ImageShape


class _Records(threading.local):
    """The resizes of the current thread, or None if they are not recorded."""

    resizes: list[Resize] | None = None


_records = _Records()


class recorded_resizes:  # noqa: N801  # used like a function
    """Context manager that returns the list of the resizes of a measured copy in this thread."""

    def __enter__(self) -> list[Resize]:
        _records.resizes = []
        return _records.resizes

    def __exit__(self, *error: object) -> None:
        _records.resizes = None


def measured_copy(processor: Any) -> Any:
    """Return a copy of a processor whose image processor records its resizes. The original stays as it is."""
    image_processor = copy.copy(processor.image_processor)
    original_class = type(image_processor)
    methods = {}
    for name in dir(original_class):
        if "resize" in name and inspect.isfunction(getattr(original_class, name)):
            methods[name] = _recording(getattr(original_class, name))
    image_processor.__class__ = type(original_class.__name__, (original_class,), methods)
    measured = copy.copy(processor)
    measured.image_processor = image_processor
    return measured


def _recording(method: Any) -> Any:
    """Return a method that does the same and records the sizes, if it takes and returns an image."""

    @functools.wraps(method)
    def record(*args: Any, **kwargs: Any) -> Any:
        image: Any = kwargs.get("image", args[1] if len(args) > 1 else None)
        resized = method(*args, **kwargs)
        if _records.resizes is not None and hasattr(image, "shape") and hasattr(resized, "shape"):
            _records.resizes.append(Resize(ImageShape(*image.shape[-2:]), ImageShape(*resized.shape[-2:])))
        return resized

    return record


def scale_of(size: ImageShape, resizes: Sequence[Resize]) -> float | None:
    """Return the square root of an image's pixels after the resizes, divided by its pixels before.

    If a processor makes several versions of an image, such as tiles and a thumbnail, the largest counts.

    Args:
        size: size of the image.
        resizes: the resizes of all images of the image set.

    Returns:
        the scale, or None if no resize of the image was recorded.
    """
    longest_side = max(size)
    square = ImageShape(longest_side, longest_side)  # some processors pad an image to a square first
    scales = []
    for resize in resizes:
        if resize.before in (size, square):
            share = (resize.after.height * resize.after.width) / (resize.before.height * resize.before.width)
            scales.append(share**0.5)
    return max(scales, default=None)
