"""If the process of a decision is killed at any write, there is still one champion, as recorded."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from m3diff.provenance import git as plumbing
from m3diff.registry import decisions as decision_record
from m3diff.registry.decisions import Entry, append_decision, find_pending_move, read_decisions
from m3diff.registry.moves import add_identities, carry_out
from tests.registry.conftest import Registry, check_one_champion, recreate_model, start_child, wait_for_child

WRITES = ("hash-object", "commit-tree", "update-ref")


def kill_at_write(at: int | None) -> Callable[[], int]:
    """Count the durable writes of this process, and kill it instead of the write with the number `at`, from 0."""
    done = 0

    def counted(real):
        def write(*args, **options):
            nonlocal done
            if real.__name__ == "run_git" and not {*WRITES} & {*args}:
                return real(*args, **options)
            if done == at:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return real(*args, **options)

        return write

    decision_record.run_git = plumbing.run_git = counted(plumbing.run_git)
    for name in ("set_registered_model_alias", "delete_registered_model_alias"):
        setattr(MlflowClient, name, counted(getattr(MlflowClient, name)))
    return lambda: done


def act_until_killed(registry: Registry, act: Callable[[Registry], object], at: int | None) -> int:
    """Run `act` in a child that is killed before its write `at`. If `at` is None, return the number of writes."""

    def work() -> None:
        writes = kill_at_write(at)
        act(registry)
        (registry.root / "writes").write_text(str(writes()))

    code = wait_for_child(start_child(work))
    assert code == (0 if at is None else -signal.SIGKILL)
    return int((registry.root / "writes").read_text()) if at is None else -1


DECIDE = Registry.decide


ROLLBACK = Registry.rollback


THIRD = {"challenger": 3, "champion": 3, "previous": 2}


SECOND = {"challenger": 2, "champion": 2, "previous": 1}


KILLS = {
    "first": ((1.0,), DECIDE, 6, [{"challenger": 1, "champion": 1}]),
    "promoted": ((1.0, 2.0), DECIDE, 7, [SECOND]),
    "refused": ((1.0, 2.0, 1.5), DECIDE, 3, [SECOND | {"challenger": 3}]),
    "rolled back": ((1.0, 2.0, 3.0), ROLLBACK, 7, [THIRD, SECOND | {"challenger": 3}]),
    "rolled back to the last": ((1.0, 2.0), ROLLBACK, 7, [SECOND, {"challenger": 2, "champion": 1}]),
}
"""For each case: the CIDErs of the versions, the action that is killed, the number of its durable writes (two git
objects, the refs and the aliases), and the aliases that may exist at the end. A rollback that was killed before it was
recorded leaves the aliases as they were."""


@pytest.mark.slow(20)
@pytest.mark.parametrize("name", KILLS)
def test_killed_at_any_write_the_next_promote_leaves_one_champion_as_recorded(name, registry, tmp_path, monkeypatch):
    """The process is killed before each of its writes."""
    ciders, act, writes, final_aliases = KILLS[name]
    registry.grow(*ciders[:-1])
    registry.add(ciders[-1])
    if act is ROLLBACK:
        registry.decide()
    complete_registry = registry.copy(tmp_path / "whole")
    monkeypatch.chdir(complete_registry.root)
    assert act_until_killed(complete_registry, act, None) == writes
    assert complete_registry.aliases() == final_aliases[-1]
    check_one_champion(complete_registry)
    outcomes = set()
    for killed_write in range(writes):
        killed_registry = registry.copy(tmp_path / f"killed-{killed_write}")
        monkeypatch.chdir(killed_registry.root)
        act_until_killed(killed_registry, act, killed_write)
        decision = killed_registry.decide()
        assert killed_registry.aliases() in final_aliases, f"killed before write {killed_write}"
        assert killed_registry.record().count(name.removesuffix(" to the last")) == (
            0 if killed_registry.aliases() != final_aliases[-1] else 1
        )
        check_one_champion(killed_registry)
        outcomes.add(decision.outcome)
        assert killed_registry.decide().outcome in ("unchanged", "refused"), "nothing is left to do"
        check_one_champion(killed_registry)
    assert outcomes == {"rolled back": {"unchanged", "refused"}}.get(name.removesuffix(" to the last"), {name})


@pytest.mark.parametrize(
    "overtaken",
    ["moved", pytest.param("deleted", marks=pytest.mark.slow(8)), pytest.param(None, marks=pytest.mark.slow(8))],
)
def test_a_killed_promotion_is_finished_by_a_rollback_or_recorded_as_not_done(waiting, overtaken):
    """The process is killed before it moves the aliases. Then version 2 becomes champion, or version 4 is deleted."""
    act_until_killed(waiting, lambda registry: registry.decide(version=4), 4)
    assert [entry.target for entry in read_decisions()] == [1, 4]
    assert waiting.aliases()["champion"] == 1
    if overtaken == "moved":
        waiting.point("champion", 2)
        decision = waiting.decide(version=4)
        assert decision.outcome == "refused"
        assert decision.champion == 2
        assert waiting.record() == ["first", "promoted", "not done", "moved elsewhere", "refused"]
        not_done = waiting.entries()[2]
        assert not_done.abandoned_move == 2
        assert not_done.target == 4
        assert not_done.champion_before == 1
        assert not_done.reason.endswith(" 2"), "the actual champion"
    elif overtaken == "deleted":
        waiting.client.delete_model_version("m3diff", "4")
        assert waiting.decide(version=3).outcome == "promoted"
        assert "version 4 " in waiting.entries()[2].reason
        assert waiting.record() == ["first", "promoted", "not done", "promoted"]
    else:
        waiting.rollback()
        assert waiting.record() == ["first", "promoted", "rolled back"]
        assert waiting.aliases()["champion"] == 1
        assert waiting.decide(version=4).outcome == "refused"
    check_one_champion(waiting)


def test_a_killed_promotion_is_finished_and_returned_by_the_next_one(waiting):
    act_until_killed(waiting, lambda registry: registry.decide(version=4), 4)
    promotion = waiting.decide(version=4)
    assert promotion.outcome == "promoted"
    assert promotion.challenger == 4
    assert waiting.record() == ["first", "promoted"]
    assert waiting.aliases()["champion"] == 4


def test_a_move_whose_version_or_model_is_gone_is_recorded_as_not_done(waiting):
    entry = Entry(
        action="promote", model="m3diff", champion_before=1, target=4, outcome="promoted", reason="", previous=1
    )
    move = append_decision(Path(), add_identities(waiting.client, entry), is_pending=True)
    waiting.client.delete_model_version("m3diff", "4")
    assert not carry_out(waiting.client, Path(), move)
    recreate_model(waiting)
    assert not carry_out(waiting.client, Path(), move)
    *_, version_gone, model_gone = waiting.entries()
    assert "version 4 " in version_gone.reason
    assert "version" not in model_gone.reason
    for decision in (version_gone, model_gone):
        assert decision.outcome == "not done"
        assert decision.abandoned_move == move.number
    assert find_pending_move(Path()) is None
