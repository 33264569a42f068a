"""Equal work runs once: who waits, who works, and what happens where the first one fails."""

import threading
from pathlib import Path

import pytest

from flows import coalesce
from flows.coalesce import alone, finish
from flows.workspace import FLOWS, Workspace


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / FLOWS).mkdir(parents=True)
    monkeypatch.setattr(coalesce, "POLL_S", 0.01)
    return tmp_path


def work(checkout: Path, flow_run: str, tree: str = "same") -> Workspace:
    return Workspace(flow_run, checkout / flow_run, checkout, "c", tree, (), ())


class Second:
    """A flow run in a thread of its own: what it was told, and what it logged."""

    def __init__(self, place: Workspace) -> None:
        self.told: list[str | None] = []
        self.logged: list[str] = []
        self.thread = threading.Thread(target=self.run, args=(place,))
        self.thread.start()

    def run(self, place: Workspace) -> None:
        with alone(place, self.logged.append) as other:
            self.told.append(other)

    def waits(self) -> bool:
        self.thread.join(0.3)
        return self.thread.is_alive()


@pytest.mark.fault("22")
def test_one_waits_for_the_other_and_then_has_nothing_to_do(checkout):
    first = work(checkout, "first")
    with alone(first, print) as other:
        assert other is None
        second = Second(work(checkout, "second"))
        assert second.waits()
        assert second.told == []
        finish(first)
    second.thread.join()
    assert second.told == ["first"]
    assert second.logged == ["flow run first does the same work; this one waits for it"]


@pytest.mark.fault("22")
def test_one_that_waited_for_a_run_that_failed_does_the_work(checkout):
    with alone(work(checkout, "first"), print):
        second = Second(work(checkout, "second"))
        assert second.waits()
    second.thread.join()
    assert second.told == [None]


def test_that_an_earlier_run_ended_well_is_no_reason_to_skip_for_one_that_did_not_wait(checkout):
    first = work(checkout, "first")
    with alone(first, print):
        finish(first)
    with alone(work(checkout, "second"), print) as other:
        assert other is None
        third = Second(work(checkout, "third"))
        assert third.waits()
    third.thread.join()
    assert third.told == [None], "the second did not end well, and the first ended before the third began"


def test_other_work_goes_on_beside_it(checkout):
    with alone(work(checkout, "first"), print), alone(work(checkout, "second", "another"), print) as other:
        assert other is None


def test_an_error_of_the_work_passes_whatever_it_is(checkout):
    with pytest.raises(BlockingIOError, match="another training"), alone(work(checkout, "first"), print):
        raise BlockingIOError("another training of this run is alive")
