"""Show the progress of long tasks, compute results in advance, and align tables in plain text."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
Result = TypeVar("Result")


def progress(items: Iterable[T], stage: str, total: int | None = None, unit: str = "it") -> Iterator[T]:
    """Yield the items and show the progress on standard error, as a bar on a terminal or as lines in a log.

    Args:
        items: the items.
        stage: name of the stage, which is shown at the start of the line.
        total: number of items, if `items` has no length.
        unit: name for one item, which is shown after the count.
    """
    is_terminal = sys.stderr.isatty()
    yield from tqdm(
        items,
        desc=stage,
        total=total,
        unit=unit,
        mininterval=0.2 if is_terminal else 5.0,
        ascii=not is_terminal,
        dynamic_ncols=is_terminal,
        ncols=None if is_terminal else 90,
    )


def prefetch(submit: Callable[[T], list[Future[Result]]], items: Iterable[T], count: int) -> Iterator[list[Result]]:
    """Yield the results of each item, in order. The next `count` items are computed in the background.

    Args:
        submit: function that starts the work on an item and returns its futures.
        items: the items to work on.
        count: number of items that are submitted in advance.
    """
    pending: deque[list[Future[Result]]] = deque()
    for item in items:
        pending.append(submit(item))
        if len(pending) > count:
            yield [future.result() for future in pending.popleft()]
    while pending:
        yield [future.result() for future in pending.popleft()]


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return one line of text per row, with aligned columns.

    Args:
        rows: cells of each row. All rows must have the same number of cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
