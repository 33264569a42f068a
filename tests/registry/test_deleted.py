"""What people delete in MLflow and in the record; several decide at once; a process is killed: one is champion."""

import fcntl
import gc
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner
from mlflow.cli import gc as remove_deleted
from mlflow.tracking import MlflowClient

from m3diff.provenance import git as plumbing
from m3diff.provenance.git import commit_at, git
from m3diff.records.errors import DataError
from m3diff.registry import decisions as record
from m3diff.registry import promote
from m3diff.registry.decisions import BRANCH, TAG, Entry, append, champions, decisions, faults, pending
from m3diff.registry.promote import make_move
from tests.registry.conftest import Registry, Rescoring


def anew(registry: Registry) -> None:
    """The registered model is deleted on MLflow's page; the next registration makes it again."""
    registry.client.delete_registered_model("m3diff")
    time.sleep(0.01)  # when it was made tells one from the other, in ms
    registry.client.create_registered_model("m3diff")


def remedies(text: str) -> list[int]:
    """The versions that the commands in a text make champion."""
    return [int(version) for version in re.findall(r"m3diff rollback --to (\d+)", text)]


@pytest.mark.fault("T9")
def test_a_new_version_is_not_taken_for_the_rolled_back_one_of_its_number(rolled_back):
    anew(rolled_back)
    assert rolled_back.grow(1.3, 1.6, 1.7) == ["first", "promoted", "promoted"]
    assert rolled_back.record()[3:] == ["first", "promoted", "promoted"], "nothing was moved elsewhere"
    assert rolled_back.rollback().to == 2
    assert rolled_back.decide(version=3).outcome == "refused"


@pytest.mark.fault("T9")
def test_the_rolled_back_model_under_another_number_is_still_rolled_back(rolled_back):
    anew(rolled_back)
    rolled_back.grow(1.0)
    newest = rolled_back.add(2.0, dvc__checkpoint="of 2.0")
    refused = rolled_back.decide(version=newest)
    assert (refused.outcome, "worse on the new camera" in refused.reason) == ("refused", True)
    assert rolled_back.decide(version=newest, again=True).outcome == "promoted"
    assert rolled_back.decide(version=newest).outcome == "unchanged"
    assert rolled_back.grow(3.0) == ["promoted"]
    assert rolled_back.rollback().to == newest, "it was accepted"


@pytest.mark.fault("T9")
def test_a_store_put_back_to_a_backup_gives_a_number_to_another_run(rolled_back, tmp_path):
    backup = (tmp_path / "mlflow.db").read_bytes()
    rolled_back.grow(3.0, 4.0)
    rolled_back.rollback(to=1)
    assert rolled_back.decide().outcome == "refused"
    (tmp_path / "mlflow.db").write_bytes(backup)
    assert rolled_back.grow(5.0, 6.0) == ["promoted", "promoted"]
    assert rolled_back.rollback().to == 3


def delete(registry: Registry, what: str, version: int = 1) -> None:
    """Something of a version."""
    run = registry.client.get_run(registry.version(version).run_id).info
    stored = Path(run.artifact_uri.removeprefix("file://")) / "scores.parquet"
    if what in ("run in the bin", "run gone"):
        registry.client.delete_run(run.run_id)
    if what == "run gone":
        store = registry.params.register_.tracking_uri
        done = CliRunner().invoke(remove_deleted, ["--backend-store-uri", store], env={"MLFLOW_TRACKING_URI": store})
        assert done.exit_code == 0, done.output
    if what == "experiment in the bin":
        registry.client.delete_experiment(registry.experiment)
    if what == "scores":
        stored.unlink()
    if what == "half of the scores":
        stored.write_bytes(b"PAR1")


DELETED = {"run in the bin": 0, "experiment in the bin": 0, "run gone": 1, "scores": 1, "half of the scores": 1}
"""What is deleted of the champion, and whether it is then scored again."""


@pytest.mark.fault("T10")
@pytest.mark.parametrize("what", DELETED)
def test_a_champion_whose_run_or_scores_are_deleted_is_compared_or_refused_with_a_remedy(registry, monkeypatch, what):
    registry.grow(1.0, test_set="new")
    registry.add(2.0, seed=1, test_set="new")
    delete(registry, what)
    rescoring = Rescoring(registry, monkeypatch)
    if DELETED[what]:
        rescoring.error = FileNotFoundError("no checkpoint")
        decision = registry.decide()
        assert (decision.outcome, remedies(decision.reason)) == ("refused", [2])
        rescoring.error = None
        lost = registry.add(3.0, test_set="new")
        delete(registry, what, lost)
        assert "run `m3diff register` again" in registry.decide(version=lost).reason
    decision = registry.decide(version=2)
    assert (decision.outcome, decision.scored_again) == ("promoted", bool(DELETED[what]))


# A record that lost decisions is seen by what MLflow knows of it, and nothing is decided by what is left


def tag(registry: Registry) -> str | None:
    return registry.client.get_registered_model("m3diff").tags.get(TAG)


def fork() -> None:
    git("update-ref", BRANCH, f"{BRANCH}^")
    append(Path(), Entry(action="promote", model="other", from_=None, to=1, outcome="refused", why="elsewhere"))


LOST: dict[str, Callable[[], object]] = {
    "deleted": lambda: git("update-ref", "-d", BRANCH),
    "the last commit dropped": lambda: git("update-ref", BRANCH, f"{BRANCH}^"),
    "all but the first dropped": lambda: git("update-ref", BRANCH, f"{BRANCH}~2"),
    "forked": fork,
}


@pytest.mark.fault("T14")
@pytest.mark.parametrize("lose", LOST.values(), ids=LOST)
def test_nothing_is_decided_by_a_record_that_lost_decisions_and_the_remedy_brings_them_back(rolled_back, lose):
    before, aliases = commit_at(BRANCH), rolled_back.aliases()
    assert tag(rolled_back) == f"3 {before}"
    subprocess.run(["git", "clone", "-q", "--bare", ".", "origin.git"], check=True)
    lose()
    left = commit_at(BRANCH)
    for decide in (rolled_back.decide, lambda: rolled_back.decide(again=True), lambda: rolled_back.rollback(to=1)):
        with pytest.raises(DataError) as refused:
            decide()
        for said in ("MLflow knows 3 ", str(before), left or "ends at nothing", "runs/history"):
            assert said in str(refused.value)
    assert (rolled_back.aliases(), commit_at(BRANCH), tag(rolled_back)) == (aliases, left, f"3 {before}")
    subprocess.run(["git", "remote", "add", "origin", "./origin.git"], check=True)
    if lose is fork:  # what the remote has does not follow
        with pytest.raises(DataError, match="decisions are missing"):
            rolled_back.decide()
        subprocess.run(str(refused.value).rpartition("in this clone: ")[2].split(), check=True)
    again = rolled_back.decide()
    assert (again.outcome, "rolled it back" in again.reason) == ("refused", True)
    assert tag(rolled_back) == f"4 {commit_at(BRANCH)}"


@pytest.mark.fault("T14")
def test_where_no_clone_has_it_any_more_a_person_lets_the_gate_begin_anew(rolled_back, tmp_path):
    shutil.rmtree(tmp_path / ".git")
    subprocess.run(["git", "init", "-q"], check=True)
    with pytest.raises(DataError, match=f"git fetch CLONE.*delete the tag {TAG!r} of the model on MLflow's page"):
        rolled_back.decide()
    rolled_back.client.delete_registered_model_tag("m3diff", TAG)
    assert rolled_back.decide().outcome == "promoted"
    assert tag(rolled_back) == f"{len(rolled_back.entries())} {commit_at(BRANCH)}"


@pytest.mark.fault("T14")
@pytest.mark.parametrize("known", [None, "by hand", "2 3f2a", "killed"])
def test_mlflow_is_brought_up_where_it_knows_less_or_nothing(rolled_back, known):
    if known == "killed":  # between the record and the tag
        entry = Entry(action="promote", model="m3diff", from_=1, to=2, outcome="promoted", why="", previous=1)
        make_move(rolled_back.client, Path(), entry)
    elif known is None:
        rolled_back.client.delete_registered_model_tag("m3diff", TAG)
    else:
        rolled_back.client.set_registered_model_tag("m3diff", TAG, known)
    rolled_back.decide()
    assert tag(rolled_back) == f"{len(rolled_back.entries())} {commit_at(BRANCH)}"


WRITES = ("hash-object", "commit-tree", "update-ref")


def agrees(registry: Registry) -> None:
    """One champion, which is the record's; nothing is left to do."""
    assert faults() == []
    assert pending(Path(".")) is None
    assert champions(decisions(), "m3diff")[0][-1] == registry.aliases()["champion"]


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


def test_a_champion_that_moved_meanwhile_is_judged_against_anew(waiting, monkeypatch):
    seen = meanwhile(monkeypatch, lambda times: waiting.point("champion", 2))
    decision = waiting.decide(version=3)
    assert (seen, decision.outcome, decision.champion) == ([1, 2], "refused", 2)
    assert waiting.record() == ["first", "moved elsewhere", "refused"]
    agrees(waiting)
    seen = meanwhile(monkeypatch, lambda times: waiting.point("champion", 4 - 3 * (times % 2)))
    with pytest.raises(BlockingIOError, match="moved 5 times while the version was judged.*try again"):
        waiting.decide(version=3)
    assert seen == [2, 1, 4, 1, 4]


def test_a_champion_that_moved_there_and_back_meanwhile_is_judged_against_anew(waiting, monkeypatch):
    """Another machine promotes version 2, and a person sees that it is bad and goes back to 1."""

    def act(times: int) -> None:
        if times == 1:
            with monkeypatch.context() as other:
                other.setattr(promote, "alone", lambda *_: nullcontext())
                assert waiting.decide(version=2).outcome == "promoted"
            waiting.rollback(why="bad")

    meanwhile(monkeypatch, act)
    assert "rolled it back" in waiting.decide(version=2).reason
    assert waiting.record() == ["first", "promoted", "rolled back", "refused"]
    agrees(waiting)


def held(registry: Registry, lock: str) -> bool:
    with (registry.root / ".git" / "m3diff" / f"{lock}.lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_one_promote_at_a_time_judges_while_a_rollback_may_and_nobody_moves_beside_a_move(waiting, monkeypatch):
    locks, moved, real = [], [], MlflowClient.set_registered_model_alias
    meanwhile(monkeypatch, lambda times: locks.append((held(waiting, "promote"), held(waiting, "record"))))

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
