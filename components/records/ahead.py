"""Work done in threads a few items ahead of their use."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(submit: Callable[[Item], list[Future[Result]]], items: Iterable[Item], count: int) -> Iterator[list[Result]]:
    """Yield the results of each item's futures, in order, while those of the next `count` items are made."""
    waiting: deque[list[Future[Result]]] = deque()
    for item in items:
        waiting.append(submit(item))
        if len(waiting) > count:
            yield [future.result() for future in waiting.popleft()]
    while waiting:
        yield [future.result() for future in waiting.popleft()]
