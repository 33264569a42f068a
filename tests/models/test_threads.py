"""The number of threads with which torch computes, in the model's thread and in those that prepare images."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from m3diff.models.threads import preparing_threads, use_threads

T = TypeVar("T")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread again, as in every test."""
    yield
    torch.set_num_threads(1)


def in_new_thread(function: Callable[[], T]) -> T:
    """Call a function in a new thread, in which torch has not computed yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_thread_keeps_its_number_of_threads_when_another_sets_its_own():
    def count_threads() -> int:
        use_threads(3)
        in_new_thread(lambda: torch.set_num_threads(2))
        return torch.get_num_threads()

    assert in_new_thread(count_threads) == 3


def test_preparing_threads_compute_alone_and_leave_the_threads_of_the_caller():
    def count_threads() -> tuple[list[int], int]:
        torch.set_num_threads(3)
        with preparing_threads(2) as pool:
            counts = list(pool.map(lambda _: torch.get_num_threads(), range(4)))
        return counts, torch.get_num_threads()

    assert in_new_thread(count_threads) == ([1, 1, 1, 1], 3)
