"""A record that lost decisions is seen by what MLflow knows of it, and nothing is decided by what is left."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from m3diff.provenance.git import commit_at, git
from m3diff.records.errors import DataError
from m3diff.registry.decisions import BRANCH, TAG, Entry, append
from m3diff.registry.promote import make_move
from tests.registry.conftest import Registry, scores


@pytest.fixture
def rolled_back(registry: Registry) -> Registry:
    """Version 2 was champion and was rolled back: the record alone keeps the gate from taking it again."""
    for score in (1.0, 2.0):
        registry.add(scores(score))
        registry.decide()
    registry.rollback()
    return registry


def tag(registry: Registry) -> str | None:
    return registry.client.get_registered_model("m3diff").tags.get(TAG)


def here() -> str | None:
    return commit_at(BRANCH)


def move_branch(*change: str) -> None:
    git("update-ref", *change)


def fork() -> None:
    move_branch(BRANCH, f"{BRANCH}^")
    append(Path(), Entry(action="promote", model="other", from_=None, to=1, outcome="refused", why="elsewhere"))


LOST: dict[str, Callable[[], None]] = {
    "deleted": lambda: move_branch("-d", BRANCH),
    "the last commit dropped": lambda: move_branch(BRANCH, f"{BRANCH}^"),
    "all but the first dropped": lambda: move_branch(BRANCH, f"{BRANCH}~2"),
    "forked": fork,
}
CASES = pytest.mark.parametrize("lose", LOST.values(), ids=LOST)


@pytest.mark.fault("T14")
def test_the_tag_follows_each_decision(rolled_back):
    assert tag(rolled_back) == f"3 {here()}"
    rolled_back.decide()
    assert tag(rolled_back) == f"4 {here()}"


@pytest.mark.fault("T14")
@CASES
def test_nothing_is_decided_by_a_record_that_lost_decisions_and_the_remedy_brings_them_back(rolled_back, lose):
    before, aliases, known = here(), rolled_back.aliases(), tag(rolled_back)
    lose()
    left = here()
    for decide in (rolled_back.decide, lambda: rolled_back.decide(again=True), lambda: rolled_back.rollback(to=1)):
        with pytest.raises(DataError) as refused:
            decide()
        for said in ("MLflow knows 3 ", str(before), left or "is not there", "runs/history"):
            assert said in str(refused.value)
    assert (rolled_back.aliases(), here(), tag(rolled_back)) == (aliases, left, known)
    remedy = str(refused.value).rpartition("in this clone: ")[2]
    subprocess.run(remedy.split(), check=True)
    again = rolled_back.decide()
    assert (again.outcome, "rolled it back" in again.reason) == ("refused", True)


@pytest.mark.fault("T14")
@CASES
def test_it_is_fetched_from_gits_remote_where_that_has_it(rolled_back, tmp_path, lose):
    subprocess.run(["git", "clone", "-q", "--bare", ".", str(tmp_path / "origin.git")], check=True)
    subprocess.run(["git", "remote", "add", "origin", "./origin.git"], check=True)
    lose()
    if lose is fork:
        with pytest.raises(DataError, match="decisions are missing"):
            rolled_back.decide()
        return
    assert "rolled it back" in rolled_back.decide().reason
    assert len(rolled_back.entries()) == 4


@pytest.mark.fault("T14")
def test_where_no_clone_has_it_any_more_a_person_lets_the_gate_begin_anew(rolled_back, tmp_path):
    move_branch("-d", BRANCH)
    shutil.rmtree(tmp_path / ".git")
    subprocess.run(["git", "init", "-q"], check=True)
    with pytest.raises(DataError, match=f"git fetch CLONE.*delete the tag {TAG!r} of the model on MLflow's page"):
        rolled_back.decide()
    rolled_back.client.delete_registered_model_tag("m3diff", TAG)
    assert rolled_back.decide().outcome == "promoted"
    assert tag(rolled_back) == f"{len(rolled_back.entries())} {here()}"


@pytest.mark.fault("T14")
@pytest.mark.parametrize("known", [None, "", "by hand", "2", "2 3f2a", "killed"])
def test_mlflow_is_brought_up_where_it_knows_less_or_nothing(rolled_back, known):
    if known == "killed":  # between the record and the tag
        entry = Entry(action="promote", model="m3diff", from_=1, to=2, outcome="promoted", why="", previous=1)
        make_move(rolled_back.client, Path(), entry)
    elif known is None:
        rolled_back.client.delete_registered_model_tag("m3diff", TAG)
    else:
        rolled_back.client.set_registered_model_tag("m3diff", TAG, known)
    rolled_back.decide()
    assert tag(rolled_back) == f"{len(rolled_back.entries())} {here()}"


@pytest.mark.fault("T14")
def test_a_record_that_is_lost_while_a_version_is_judged_decides_nothing(rolled_back, monkeypatch):
    rolled_back.add(scores(3.0))
    from m3diff.registry import promote as module

    judged = module.verdict_on
    monkeypatch.setattr(module, "verdict_on", lambda *given: (LOST["deleted"](), judged(*given))[1])
    with pytest.raises(DataError, match="decisions are missing"):
        rolled_back.decide()
    assert rolled_back.aliases()["champion"] == 1
