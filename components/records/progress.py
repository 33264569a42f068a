"""Long work over many items: its progress, as a bar on a terminal or lines in a log, and its next items made ahead;
and tables for a terminal."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
Result = TypeVar("Result")


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


def ahead(submit: Callable[[T], list[Future[Result]]], items: Iterable[T], count: int) -> Iterator[list[Result]]:
    """Yield the results of each item's futures, in order, while threads make those of the next `count` items."""
    waiting: deque[list[Future[Result]]] = deque()
    for item in items:
        waiting.append(submit(item))
        if len(waiting) > count:
            yield [future.result() for future in waiting.popleft()]
    while waiting:
        yield [future.result() for future in waiting.popleft()]


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, its cells below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
