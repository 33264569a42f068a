"""What people delete in MLflow and in the record: who is champion then, and what is said to do."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from mlflow.cli import gc

from m3diff.provenance.git import commit_at, git
from m3diff.records.errors import DataError
from m3diff.registry import promote as module
from m3diff.registry.decisions import BRANCH, TAG, Entry, append
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


# Version numbers begin again


@pytest.mark.fault("T9")
def test_a_new_version_is_not_taken_for_the_rolled_back_one_of_its_number(rolled_back):
    anew(rolled_back)
    assert rolled_back.grow(1.3, 1.6, 1.7) == ["first", "promoted", "promoted"]
    assert rolled_back.record()[3:] == ["first", "promoted", "promoted"], "nothing was moved elsewhere"
    assert rolled_back.rollback().to == 2
    assert rolled_back.decide(version=3).outcome == "refused"


@pytest.mark.fault("T9")
@pytest.mark.parametrize("same", ["run", "content"])
def test_the_rolled_back_model_under_another_number_is_still_rolled_back(rolled_back, same):
    """Its version is deleted and it is registered once more, or it is registered in another store."""
    client, old = rolled_back.client, rolled_back.version(2)
    if same == "run":
        client.delete_model_version("m3diff", "2")
        made = client.create_model_version("m3diff", "file:///nowhere", old.run_id, tags={"test_set.sha256": "one"})
        newest = int(made.version)
    else:
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


@pytest.mark.fault("T9")
def test_lines_of_earlier_releases_hold_for_the_registry_that_was_there_when_they_were_written(registry):
    for score in (1.0, 2.0):
        registry.add(score)
    registry.point("champion", 1)
    plain = {"model": "m3diff", "why": "bad"}
    append(Path("."), Entry(action="promote", from_=1, to=2, outcome="promoted", **plain))
    append(Path("."), Entry(action="rollback", from_=2, to=1, outcome="rolled back", **plain))
    assert registry.decide().reason.endswith("m3diff promote --again")
    time.sleep(1.1)  # such a line says when to the second
    anew(registry)
    registry.grow(1.3, 1.6)
    assert registry.record()[2:] == ["refused", "first", "promoted"]


@pytest.mark.fault("T9")
def test_a_killed_promotion_of_another_registry_moves_nothing_in_this_one(rolled_back):
    entry = Entry(action="promote", model="m3diff", from_=1, to=2, outcome="promoted", why="better", registry=7)
    append(Path("."), entry, pending=True)
    assert rolled_back.grow(0.5) == ["refused"]
    assert rolled_back.aliases()["champion"] == 1
    (not_done,) = [line for line in rolled_back.entries() if line.outcome == "not done"]
    assert "the registered model is another one now" in not_done.why


# What people delete in MLflow


def delete(registry: Registry, what: str, version: int = 1) -> None:
    """Something of a version."""
    run = registry.client.get_run(registry.version(version).run_id).info
    stored = Path(run.artifact_uri.removeprefix("file://")) / "scores.parquet"
    if what in ("run in the bin", "run gone"):
        registry.client.delete_run(run.run_id)
    if what == "run gone":
        store = registry.params.register_.tracking_uri
        done = CliRunner().invoke(gc, ["--backend-store-uri", store], env={"MLFLOW_TRACKING_URI": store})
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


@pytest.mark.fault("T14")
def test_a_record_that_is_lost_while_a_version_is_judged_decides_nothing(rolled_back, monkeypatch):
    judged = module.verdict_on
    monkeypatch.setattr(module, "verdict_on", lambda *given: (LOST["deleted"](), judged(*given))[1])
    with pytest.raises(DataError, match="decisions are missing"):
        rolled_back.grow(3.0)
    assert rolled_back.aliases()["champion"] == 1
