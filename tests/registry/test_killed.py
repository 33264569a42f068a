"""A decision whose process is killed at any of its writes leaves one champion, as recorded."""

import os
import signal
from collections.abc import Callable

import pytest
from mlflow.tracking import MlflowClient

from m3diff.provenance import git as plumbing
from m3diff.registry import decisions as record
from m3diff.registry.decisions import (
    read_decisions,
)
from tests.registry.conftest import Registry, agrees, ended, in_child

WRITES = ("hash-object", "commit-tree", "update-ref")


def counting(at: int | None) -> Callable[[], int]:
    """Count every durable write of this process, and kill it in place of the write `at` (0: the first)."""
    done = 0

    def counted(real):
        def write(*args, **named):
            nonlocal done
            if real.__name__ == "run_git" and not {*WRITES} & {*args}:
                return real(*args, **named)
            if done == at:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return real(*args, **named)

        return write

    record.run_git = plumbing.run_git = counted(plumbing.run_git)
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
"""The CIDErs that are there, what is killed, how many durable writes it makes (two git objects, the refs, the aliases),
and the aliases that there may be in the end: of a rollback, those before it where it was killed unrecorded."""


@pytest.mark.slow(20)
@pytest.mark.parametrize("name", KILLS)
def test_killed_at_any_write_the_next_promote_leaves_one_champion_as_recorded(name, registry, tmp_path, monkeypatch):
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
def test_a_killed_promotion_is_finished_by_a_rollback_or_recorded_as_not_done(waiting, overtaken):
    """Killed before the aliases moved; then another machine made version 2 champion, or a person deleted version 4."""
    killed_at(waiting, lambda registry: registry.decide(version=4), 4)
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
        assert not_done.reason.endswith(" 2"), "the champion that was found"
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
    agrees(waiting)
