"""Several processes or machines decide at once."""

import fcntl
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from mlflow.tracking import MlflowClient

from m3diff.registry import promote
from m3diff.registry.decisions import (
    OvertakenError,
)
from tests.errors import raises
from tests.registry.conftest import Registry, check_one_champion, start_child, wait_for_child


def act_after_judgements(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object]) -> list[int]:
    """Call `act` after each judgement. Return a list to which each judgement adds the champion of the comparison."""
    judge_scores_of_promote = promote.judge_scores
    compared_champions = []

    def judge_scores(*arguments):
        verdict = judge_scores_of_promote(*arguments)
        champion = arguments[-1]
        compared_champions.append(int(champion.version))
        act(len(compared_champions))
        return verdict

    monkeypatch.setattr(promote, "judge_scores", judge_scores)
    return compared_champions


@pytest.mark.slow
def test_a_champion_that_moved_meanwhile_is_judged_against_anew(waiting, monkeypatch):
    compared_champions = act_after_judgements(monkeypatch, lambda times: waiting.point("champion", 2))
    decision = waiting.decide(version=3)
    assert compared_champions == [1, 2]
    assert decision.outcome == "refused"
    assert decision.champion == 2
    assert waiting.record() == ["first", "moved elsewhere", "refused"]
    check_one_champion(waiting)
    compared_champions = act_after_judgements(monkeypatch, lambda times: waiting.point("champion", 4 - 3 * (times % 2)))
    with raises(OvertakenError, "registry.champion_moved_often", attempts=5):
        waiting.decide(version=3)
    assert compared_champions == [2, 1, 4, 1, 4]


def test_a_champion_that_moved_there_and_back_meanwhile_is_judged_against_anew(waiting, monkeypatch):
    """Another machine promotes version 2, and somebody rolls it back to version 1."""

    def act(times: int) -> None:
        if times == 1:
            with monkeypatch.context() as patch:
                patch.setattr(promote, "process_lock", lambda *_: nullcontext())
                assert waiting.decide(version=2).outcome == "promoted"
            waiting.rollback(why="bad")

    act_after_judgements(monkeypatch, act)
    assert "m3diff promote --again" in waiting.decide(version=2).reason
    assert waiting.record() == ["first", "promoted", "rolled back", "refused"]
    check_one_champion(waiting)


def is_held(registry: Registry, lock: str) -> bool:
    with (registry.root / ".git" / "m3diff" / f"{lock}.lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_one_promote_judges_at_a_time_beside_rollbacks_and_moves_exclude_moves(waiting, monkeypatch):
    locks = []
    moved = []
    real = MlflowClient.set_registered_model_alias
    act_after_judgements(
        monkeypatch, lambda times: locks.append((is_held(waiting, "promote"), is_held(waiting, "record")))
    )

    def move(*args):
        locks.append(is_held(waiting, "record"))
        moved.append(args[-2:])
        real(*args)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", move)
    waiting.decide(version=2)
    assert locks == [(True, False), True, True]
    assert moved == [("previous", "1"), ("champion", "2")], "the previous champion is known at any time"
    waiting.rollback()
    assert locks[3:] == [True], "a rollback holds the lock, too"


def test_of_four_processes_at_once_the_best_version_is_champion_in_the_end(waiting):
    waiting.add(2.0, seed=1)
    children = [start_child(lambda version=version: waiting.decide(version)) for version in (5, 4, 3, 2)]
    assert [wait_for_child(child) for child in children] == [0, 0, 0, 0]
    assert waiting.aliases()["champion"] == 2
    assert set(waiting.record()[1:]) <= {"promoted", "refused"}
    assert len(waiting.record()) == 5
    check_one_champion(waiting)
