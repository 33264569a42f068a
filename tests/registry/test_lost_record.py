"""MLflow's tag shows that decisions are missing from the record. No decision is made until they are fetched."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from m3diff.provenance.git import commit_at, git
from m3diff.records.errors import DataError
from m3diff.registry.decisions import BRANCH, COUNT_TAG, Entry, append_decision, update_tag
from m3diff.registry.moves import make_move
from tests.errors import raises
from tests.registry.conftest import read_count_tag


def decide_on_other_model() -> None:
    entry = Entry(
        action="promote", model="other", champion_before=None, target=1, outcome="refused", reason="elsewhere"
    )
    append_decision(Path(), entry)


def fork() -> None:
    git("update-ref", BRANCH, f"{BRANCH}^")
    decide_on_other_model()


LOST: dict[str, Callable[[], object]] = {
    "deleted": lambda: git("update-ref", "-d", BRANCH),
    "the last commit dropped": lambda: git("update-ref", BRANCH, f"{BRANCH}^"),
    "all but the first dropped": lambda: git("update-ref", BRANCH, f"{BRANCH}~2"),
    "forked": fork,
}


@pytest.mark.fault("T14")
@pytest.mark.parametrize("lose", LOST.values(), ids=LOST)
def test_a_record_that_lost_decisions_decides_nothing_until_they_are_fetched(rolled_back, lose):
    last_commit = commit_at(BRANCH)
    aliases = rolled_back.aliases()
    assert read_count_tag(rolled_back) == f"3 {last_commit}"
    subprocess.run(["git", "clone", "-q", "--bare", ".", "origin.git"], check=True)
    lose()
    remaining_commit = commit_at(BRANCH)
    for decide in (rolled_back.decide, lambda: rolled_back.decide(again=True), lambda: rolled_back.rollback(to=1)):
        with raises(DataError, "registry.missing_decisions", model="m3diff", count=3, commit=last_commit) as error:
            decide()
        record_here = error.value.fields["record"]
        assert record_here.code == ("registry.record_ends" if remaining_commit else "registry.record_absent")
        assert record_here.fields.get("commit") == remaining_commit
    assert rolled_back.aliases() == aliases
    assert commit_at(BRANCH) == remaining_commit
    assert read_count_tag(rolled_back) == f"3 {last_commit}"
    subprocess.run(["git", "remote", "add", "origin", "./origin.git"], check=True)
    if lose is fork:  # the remote's branch is not a descendant of the fork
        with raises(DataError, "registry.missing_decisions"):
            rolled_back.decide()
        subprocess.run(error.value.fields["command"].split(), check=True)
    decision = rolled_back.decide()
    assert decision.outcome == "refused"
    assert "m3diff promote --again" in decision.reason
    assert read_count_tag(rolled_back) == f"4 {commit_at(BRANCH)}"


@pytest.mark.fault("T14")
def test_a_record_that_no_clone_has_starts_again_after_the_tag_is_deleted(rolled_back, tmp_path):
    shutil.rmtree(tmp_path / ".git")
    subprocess.run(["git", "init", "-q"], check=True)
    fetch = f"git fetch CLONE +{BRANCH}:{BRANCH}"
    with raises(DataError, "registry.missing_decisions", tag=COUNT_TAG, fetch_command=fetch):
        rolled_back.decide()
    rolled_back.client.delete_registered_model_tag("m3diff", COUNT_TAG)
    assert rolled_back.decide().outcome == "promoted"
    assert read_count_tag(rolled_back) == f"{len(rolled_back.entries())} {commit_at(BRANCH)}"


@pytest.mark.fault("T14")
@pytest.mark.parametrize("cause", [None, "killed"])
def test_a_tag_that_is_older_than_the_record_or_missing_is_updated(rolled_back, cause):
    if cause == "killed":  # between the record and the tag
        entry = Entry(
            action="promote", model="m3diff", champion_before=1, target=2, outcome="promoted", reason="", previous=1
        )
        make_move(rolled_back.client, Path(), entry)
    else:
        rolled_back.client.delete_registered_model_tag("m3diff", COUNT_TAG)
    rolled_back.decide()
    assert read_count_tag(rolled_back) == f"{len(rolled_back.entries())} {commit_at(BRANCH)}"


def test_the_tag_of_a_model_counts_the_decisions_about_this_model(rolled_back):
    decide_on_other_model()
    decide_on_other_model()
    rolled_back.decide()
    assert len(rolled_back.entries()) == 6
    assert read_count_tag(rolled_back) == f"4 {commit_at(BRANCH)}"


def test_a_model_without_decisions_gets_no_tag(rolled_back):
    rolled_back.client.create_registered_model("other")
    update_tag(rolled_back.client, Path(), "other")
    assert rolled_back.client.get_registered_model("other").tags == {}


def test_a_tag_that_counts_the_decisions_about_all_models_is_refused(rolled_back):
    decide_on_other_model()
    tag = f"4 {commit_at(BRANCH)}"
    rolled_back.client.set_registered_model_tag("m3diff", COUNT_TAG, tag)
    with raises(DataError, "registry.edited_tag", model="m3diff", value=tag):
        rolled_back.decide()
    assert read_count_tag(rolled_back) == tag
