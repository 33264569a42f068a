"""Results that are computed in advance."""

from concurrent.futures import Future

import pytest

from m3diff.records.progress import prefetch


class Worker:
    """An executor that finishes each task at once and records the submitted items."""

    def __init__(self) -> None:
        self.submitted: list[int] = []

    def submit(self, item: int) -> list[Future[int]]:
        self.submitted.append(item)
        futures: list[Future[int]] = []
        for factor in (1, 10):
            future: Future[int] = Future()
            future.set_result(factor * item)
            futures.append(future)
        return futures


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_items_are_submitted_in_advance_as_asked_for(count):
    worker = Worker()
    submitted_before_result = []
    for _ in prefetch(worker.submit, range(1, 6), count):
        submitted_before_result.append(len(worker.submitted))
    assert submitted_before_result == [min(5, number + count) for number in range(1, 6)]


@pytest.mark.parametrize("count", [0, 2, 9], ids=["none in advance", "two", "more than there are"])
def test_each_item_has_its_results_in_order(count):
    assert list(prefetch(Worker().submit, range(1, 5), count)) == [[1, 10], [2, 20], [3, 30], [4, 40]]
