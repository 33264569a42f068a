"""Progress of long work: a bar on a terminal, a line every few seconds in a log."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress(items: Iterable[T], stage: str, total: int | None = None, unit: str = "it") -> Iterator[T]:
    """Iterate over `items`, showing how far the stage is on standard error."""
    interactive = sys.stderr.isatty()
    yield from tqdm(
        items,
        desc=stage,
        total=total,
        unit=unit,
        mininterval=0.2 if interactive else 5.0,
        ascii=not interactive,
        dynamic_ncols=interactive,
        ncols=None if interactive else 90,
    )
