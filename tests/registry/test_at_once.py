"""Several decide at once, and processes are killed: one champion, and the record agrees with it."""

import fcntl
import gc
import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from m3diff.provenance import git as plumbing
from m3diff.records.errors import DataError
from m3diff.registry import decisions as record
from m3diff.registry import promote
from m3diff.registry.decisions import champions, decisions, faults, pending
from tests.registry.conftest import Registry

WRITES = ("hash-object", "commit-tree", "update-ref")


def agrees(registry: Registry) -> None:
    """One champion, which is the record's; nothing is left to do."""
    assert faults() == []
    assert pending(Path(".")) is None
    assert champions(decisions(), "m3diff").line[-1] == registry.aliases()["champion"]


def in_child(work: Callable[[], object]) -> int:
    """A process of its own that does this; its id. It collects no garbage: what tests of training left in this process
    (torch's process groups) waits for threads that a fork does not have."""
    child = os.fork()
    if child == 0:
        gc.disable()
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_flow_promotes_its_own_version_and_not_the_one_that_the_alias_names(waiting):
    with pytest.raises(DataError, match=r"model 'm3diff' has no version '7'; there are \[4, 3, 2, 1\]"):
        waiting.decide(version=7)
    first = waiting.decide(version=2)
    assert (first.outcome, first.challenger, first.champion) == ("promoted", 2, 1)
    second = waiting.decide(version=4)
    assert (second.outcome, second.challenger, second.champion) == ("refused", 4, 2)
    assert waiting.aliases() == {"challenger": 4, "champion": 2, "previous": 1}


# The champion moves while a version is judged


def meanwhile(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object]) -> list[int]:
    """Do something after each judgement; the champions that were compared with."""
    real, seen = promote.verdict_on, []

    def verdict_on(*arguments):
        verdict, champion = real(*arguments), arguments[-1]
        seen.append(int(champion.version))
        act(len(seen))
        return verdict

    monkeypatch.setattr(promote, "verdict_on", verdict_on)
    return seen


def there_and_back(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine promotes version 2, and a person sees that it is bad and goes back to 1."""
    with monkeypatch.context() as other:
        other.setattr(promote, "alone", lambda *_: nullcontext())
        assert registry.decide(version=2).outcome == "promoted"
    registry.rollback(why="bad")


@pytest.mark.parametrize("how", ["moved", "there and back"])
def test_a_champion_that_moved_meanwhile_is_judged_against_anew_also_where_it_is_the_same_again(
    waiting, monkeypatch, how
):
    def act(times: int) -> None:
        if times == 1 and how == "moved":
            waiting.point("champion", 2)
        elif times == 1:
            there_and_back(waiting, monkeypatch)

    seen = meanwhile(monkeypatch, act)
    decision = waiting.decide(version=3 if how == "moved" else 2)
    assert decision.outcome == "refused"
    if how == "moved":
        assert (seen, decision.champion) == ([1, 2], 2)
        assert waiting.record() == ["first", "moved elsewhere", "refused"]
    else:
        assert "rolled it back" in decision.reason
        assert waiting.record() == ["first", "promoted", "rolled back", "refused"]
    agrees(waiting)


def test_a_champion_that_moves_again_and_again_ends_in_try_again(waiting, monkeypatch):
    seen = meanwhile(monkeypatch, lambda times: waiting.point("champion", 3 + times % 2))
    with pytest.raises(BlockingIOError, match="moved 5 times while the version was judged.*try again"):
        waiting.decide(version=2)
    assert seen == [1, 4, 3, 4, 3]


def held(registry: Registry, lock: str) -> bool:
    with (registry.root / ".git" / "m3diff" / f"{lock}.lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_one_promote_at_a_time_judges_while_a_rollback_need_not_wait_and_nobody_moves_beside_a_move(
    waiting, monkeypatch
):
    locks = []
    meanwhile(monkeypatch, lambda times: locks.append((held(waiting, "promote"), held(waiting, "record"))))
    real = MlflowClient.set_registered_model_alias

    moved = []

    def move(*args):
        locks.append(held(waiting, "record"))
        moved.append(args[-2:])
        real(*args)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", move)
    waiting.decide(version=2)
    assert locks == [(True, False), True, True]
    assert moved == [("previous", "1"), ("champion", "2")], "so that there is always a way back"
    waiting.rollback()
    assert locks[3:] == [True], "of a rollback too"


def test_of_four_processes_at_once_the_best_version_is_champion_in_the_end(waiting):
    waiting.add(2.0, seed=1)
    children = [in_child(lambda version=version: waiting.decide(version)) for version in (5, 4, 3, 2)]
    assert [ended(child) for child in children] == [0, 0, 0, 0]
    assert waiting.aliases()["champion"] == 2
    assert set(waiting.record()[1:]) <= {"promoted", "refused"}
    assert len(waiting.record()) == 5
    agrees(waiting)


# Kills


def counting(at: int | None) -> Callable[[], int]:
    """Count every durable write of this process, and kill it in place of the write `at` (0: the first)."""
    done = 0

    def counted(real):
        def write(*args, **named):
            nonlocal done
            if real.__name__ == "run" and not {*WRITES} & {*args}:
                return real(*args, **named)
            if done == at:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return real(*args, **named)

        return write

    record.run = plumbing.run = counted(plumbing.run)
    for name in ("set_registered_model_alias", "delete_registered_model_alias"):
        setattr(MlflowClient, name, counted(getattr(MlflowClient, name)))
    return lambda: done


def killed_at(registry: Registry, act: Callable[[Registry], object], at: int | None) -> int:
    """Do it in a process that is killed before its write `at`; how many writes it made where it ended by itself."""

    def work() -> None:
        writes = counting(at)
        act(registry)
        (registry.root / "writes").write_text(str(writes()))

    code = ended(in_child(work))
    assert code == (0 if at is None else -signal.SIGKILL)
    return int((registry.root / "writes").read_text()) if at is None else -1


DECIDE, ROLLBACK = Registry.decide, Registry.rollback
THIRD, SECOND = {"challenger": 3, "champion": 3, "previous": 2}, {"challenger": 2, "champion": 2, "previous": 1}
KILLS = {
    "first": ((1.0,), DECIDE, 6, [{"challenger": 1, "champion": 1}]),
    "promoted": ((1.0, 2.0), DECIDE, 7, [SECOND]),
    "refused": ((1.0, 2.0, 1.5), DECIDE, 3, [SECOND | {"challenger": 3}]),
    "rolled back": ((1.0, 2.0, 3.0), ROLLBACK, 7, [THIRD, SECOND | {"challenger": 3}]),
    "rolled back to the last": ((1.0, 2.0), ROLLBACK, 7, [SECOND, {"challenger": 2, "champion": 1}]),
}
"""The CIDErs that are there, what is killed, how many durable writes it makes (two git objects, the refs, the aliases),
and the aliases that there may be in the end: of a rollback, those before it where it was killed unrecorded."""


@pytest.mark.slow(20)
@pytest.mark.parametrize("name", KILLS)
def test_killed_at_any_durable_write_the_next_promote_leaves_one_champion_that_the_record_names(
    name, registry, tmp_path, monkeypatch
):
    """Before the first write, between any two, and after the last one."""
    ciders, act, writes, ends = KILLS[name]
    registry.grow(*ciders[:-1])
    registry.add(ciders[-1])
    if act is ROLLBACK:
        registry.decide()
    whole = registry.copy(tmp_path / "whole")
    monkeypatch.chdir(whole.root)
    assert killed_at(whole, act, None) == writes
    assert whole.aliases() == ends[-1]
    agrees(whole)
    outcomes = set()
    for at in range(writes):
        broken = registry.copy(tmp_path / f"killed-{at}")
        monkeypatch.chdir(broken.root)
        killed_at(broken, act, at)
        decision = broken.decide()
        assert broken.aliases() in ends, f"killed before write {at}"
        assert broken.record().count(name.removesuffix(" to the last")) == (0 if broken.aliases() != ends[-1] else 1)
        agrees(broken)
        outcomes.add(decision.outcome)
        assert broken.decide().outcome in ("unchanged", "refused"), "nothing is left to do"
        agrees(broken)
    assert outcomes == {"rolled back": {"unchanged", "refused"}}.get(name.removesuffix(" to the last"), {name})


@pytest.mark.parametrize("overtaken", ["moved", "deleted", None])
def test_a_killed_promotion_is_finished_by_a_rollback_too_and_not_done_where_somebody_overtook_it(waiting, overtaken):
    """Killed before the aliases moved; then another machine made version 2 champion, or a person deleted version 4."""
    killed_at(waiting, lambda registry: registry.decide(version=4), 4)
    assert ([entry.to for entry in decisions()], waiting.aliases()["champion"]) == ([1, 4], 1)
    if overtaken == "moved":
        waiting.point("champion", 2)
        decision = waiting.decide(version=4)
        assert (decision.outcome, decision.champion) == ("refused", 2)
        assert waiting.record() == ["first", "promoted", "not done", "moved elsewhere", "refused"]
        not_done = waiting.entries()[2]
        assert (not_done.of, not_done.to) == (2, 4)
        assert "decision 2 was not carried out: it was to follow version 1, and the champion is 2" in not_done.why
    elif overtaken == "deleted":
        waiting.client.delete_model_version("m3diff", "4")
        assert waiting.decide(version=3).outcome == "promoted"
        assert "version 4 is gone" in waiting.entries()[2].why
        assert waiting.record() == ["first", "promoted", "not done", "promoted"]
    else:
        waiting.rollback()
        assert (waiting.record(), waiting.aliases()["champion"]) == (["first", "promoted", "rolled back"], 1)
        assert waiting.decide(version=4).outcome == "refused"
    agrees(waiting)
