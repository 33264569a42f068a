"""What people delete in MLflow, and version numbers that begin again: who is champion then, and what is said to do."""

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from mlflow.cli import gc

from m3diff.records.errors import DataError
from m3diff.registry.decisions import Entry, append, decisions, table
from tests.registry.conftest import Registry, scores
from tests.registry.test_promote import Rescoring


@pytest.fixture
def rolled_back(registry) -> Registry:
    """Version 2 was champion and was rolled back to 1."""
    for score in (1.0, 2.0):
        registry.add(scores(score), dvc__checkpoint=f"checkpoint of {score}")
        registry.decide()
    registry.rollback(why="worse on the new camera")
    return registry


def anew(registry: Registry) -> None:
    """The registered model is deleted on MLflow's page; the next registration makes it again."""
    registry.client.delete_registered_model("m3diff")
    time.sleep(0.01)  # when it was made tells one from the other, in ms
    registry.client.create_registered_model("m3diff")


def empty_bin(registry: Registry) -> None:
    store = registry.params.register_.tracking_uri
    done = CliRunner().invoke(gc, ["--backend-store-uri", store], env={"MLFLOW_TRACKING_URI": store})
    assert done.exit_code == 0, done.output


def remedies(text: str) -> list[int]:
    """The versions that the commands in a text make champion."""
    return [int(version) for version in re.findall(r"m3diff rollback --to (\d+)", text)]


# Version numbers begin again


@pytest.mark.fault("T9")
def test_a_new_version_is_not_taken_for_the_rolled_back_one_of_its_number(rolled_back):
    anew(rolled_back)
    outcomes = []
    for score in (1.3, 1.6, 1.7):
        rolled_back.add(scores(score))
        outcomes.append(rolled_back.decide().outcome)
    assert outcomes == ["first", "promoted", "promoted"]
    assert rolled_back.record()[3:] == outcomes, "nothing was moved elsewhere"
    assert rolled_back.rollback().to == 2
    assert rolled_back.decide(version=3).outcome == "refused"
    told = table(decisions()).splitlines()
    assert [n for n, line in enumerate(told[2::2], start=1) if "version numbers begin again" in line] == [4]


@pytest.mark.fault("T9")
@pytest.mark.parametrize("same", ["run", "content"])
def test_the_rolled_back_model_under_another_number_is_still_rolled_back(rolled_back, same):
    """Its version is deleted and it is registered once more, or it is registered in another store."""
    client, old = rolled_back.client, rolled_back.client.get_model_version("m3diff", "2")
    if same == "run":
        client.delete_model_version("m3diff", "2")
        client.create_model_version("m3diff", "file:///nowhere", old.run_id, tags={"test_set.sha256": "one"})
    else:
        anew(rolled_back)
        rolled_back.add(scores(1.0))
        rolled_back.decide()
        rolled_back.add(scores(2.0), dvc__checkpoint="checkpoint of 2.0")
    newest = max(int(version.version) for version in client.search_model_versions("name = 'm3diff'"))
    refused = rolled_back.decide(version=newest)
    assert (refused.outcome, "worse on the new camera" in refused.reason) == ("refused", True)
    assert rolled_back.decide(version=newest, again=True).outcome == "promoted"
    assert rolled_back.decide(version=newest).outcome == "unchanged"
    rolled_back.add(scores(3.0))
    assert rolled_back.decide().outcome == "promoted"
    assert rolled_back.rollback().to == newest, "it was accepted"


@pytest.mark.fault("T9")
def test_a_store_put_back_to_a_backup_gives_a_number_to_another_run(rolled_back, tmp_path, monkeypatch):
    backup = rolled_back.copy(tmp_path / "backup")
    for score in (3.0, 4.0):
        rolled_back.add(scores(score))
        rolled_back.decide()
    rolled_back.rollback(to=1)
    assert rolled_back.decide().outcome == "refused"
    (tmp_path / "mlflow.db").write_bytes((backup.root / "mlflow.db").read_bytes())
    for score in (5.0, 6.0):
        rolled_back.add(scores(score))
        assert rolled_back.decide().outcome == "promoted"
    assert rolled_back.rollback().to == 3


@pytest.mark.fault("T9")
def test_lines_of_earlier_releases_hold_for_the_registry_that_was_there_when_they_were_written(registry):
    for score in (1.0, 2.0):
        registry.add(scores(score))
    registry.point("champion", 1)
    plain = {"model": "m3diff", "why": "bad"}
    append(Path("."), Entry(action="promote", from_=1, to=2, outcome="promoted", **plain))
    append(Path("."), Entry(action="rollback", from_=2, to=1, outcome="rolled back", **plain))
    assert registry.decide().reason.endswith("m3diff promote --again")
    time.sleep(1.1)  # such a line says when to the second
    anew(registry)
    for score in (1.3, 1.6):
        registry.add(scores(score))
        registry.decide()
    assert registry.record()[2:] == ["refused", "first", "promoted"]


@pytest.mark.fault("T9")
def test_a_killed_promotion_of_another_registry_moves_nothing_in_this_one(rolled_back):
    entry = Entry(action="promote", model="m3diff", from_=1, to=2, outcome="promoted", why="better", registry=7)
    append(Path("."), entry, pending=True)
    rolled_back.add(scores(0.5))
    assert rolled_back.decide().outcome == "refused"
    assert rolled_back.aliases()["champion"] == 1
    (not_done,) = [line for line in rolled_back.entries() if line.outcome == "not done"]
    assert "the registered model is another one now" in not_done.why


# What people delete


def take_alias(registry: Registry) -> None:
    registry.client.delete_registered_model_alias("m3diff", "champion")


def take_version(registry: Registry) -> None:
    registry.client.delete_model_version("m3diff", "2")


@pytest.mark.fault("T10", "S2")
@pytest.mark.parametrize(("delete", "back"), [(take_alias, 2), (take_version, 1)])
def test_without_its_alias_no_worse_model_becomes_champion_and_the_remedy_works(registry, delete, back):
    for score in (1.0, 2.0):
        registry.add(scores(score))
        registry.decide()
    delete(registry)
    registry.add(scores(0.1))
    refused = [registry.decide(), registry.decide()]
    assert {(one.outcome, one.champion_now) for one in refused} == {("refused", None)}
    assert "champion" not in registry.aliases()
    assert remedies(refused[0].reason) == [back, 3]
    assert registry.record()[2:] == ["moved elsewhere", "refused"]
    with pytest.raises(DataError, match=f"nothing to roll back.*m3diff rollback --to {back}"):
        registry.rollback()
    registry.rollback(to=back, why="the alias was gone")
    assert registry.aliases()["champion"] == back
    assert registry.decide().outcome == "refused"
    registry.add(scores(3.0))
    assert registry.decide().outcome == "promoted"
    assert registry.rollback().to == back


@pytest.mark.fault("T10")
def test_a_version_accepted_where_the_alias_was_gone_can_be_rolled_back_to_the_one_before(registry):
    for score in (1.0, 2.0, 0.1):
        registry.add(scores(score))
        if score != 0.1:
            registry.decide()
    take_alias(registry)
    accepted = remedies(registry.decide().reason)[-1]
    assert registry.rollback(to=accepted, why="accepted without a comparison").to == 3
    assert registry.aliases() == {"challenger": 3, "champion": 3, "previous": 2}
    assert registry.rollback().to == 2


@pytest.mark.fault("T10")
def test_where_no_former_champion_is_left_the_way_on_is_said(registry):
    registry.add(scores(1.0))
    registry.decide()
    registry.add(scores(2.0))
    registry.client.delete_model_version("m3diff", "1")
    refused = registry.decide()
    assert (refused.outcome, remedies(refused.reason)) == ("refused", [2])
    registry.rollback(to=2)
    assert registry.decide().outcome == "unchanged"


def in_bin(registry: Registry) -> None:
    registry.client.delete_run(registry.client.get_model_version("m3diff", "1").run_id)


def gone(registry: Registry) -> None:
    in_bin(registry)
    empty_bin(registry)


def scores_missing(registry: Registry) -> None:
    scores_of(registry, "1").unlink()


def scores_damaged(registry: Registry) -> None:
    scores_of(registry, "1").write_bytes(b"PAR1")


def scores_of(registry: Registry, version: str) -> Path:
    run = registry.client.get_run(registry.client.get_model_version("m3diff", version).run_id)
    return Path(run.info.artifact_uri.removeprefix("file://")) / "scores.parquet"


def experiment_in_bin(registry: Registry) -> None:
    registry.client.delete_experiment(registry.experiment)


@pytest.mark.fault("T10")
@pytest.mark.parametrize(
    ("delete", "scored_again"),
    [(in_bin, False), (experiment_in_bin, False), (gone, True), (scores_missing, True), (scores_damaged, True)],
)
@pytest.mark.parametrize("checkpoint", ["kept", "lost"])
def test_a_champion_whose_run_or_scores_are_deleted_is_compared_or_refused_with_a_remedy(
    registry, monkeypatch, delete: Callable[[Registry], None], scored_again, checkpoint
):
    registry.add(scores(1.0), test_set="new")
    registry.decide()
    registry.add(scores(2.0, seed=1), test_set="new")
    rescoring = Rescoring(registry, monkeypatch)
    if checkpoint == "lost":
        rescoring.error = FileNotFoundError("no checkpoint")
    delete(registry)
    decision = registry.decide()
    if scored_again and checkpoint == "lost":
        assert (decision.outcome, remedies(decision.reason)) == ("refused", [2])
        registry.rollback(to=2)
        assert registry.aliases()["champion"] == 2
    else:
        assert (decision.outcome, decision.scored_again) == ("promoted", scored_again)


@pytest.mark.fault("T10")
@pytest.mark.parametrize("delete", [gone, scores_missing])
def test_a_challenger_without_run_or_scores_is_refused_and_a_version_made_by_hand_too(registry, delete):
    registry.add(scores(1.0))
    delete(registry)
    assert "run `m3diff register` again" in registry.decide().reason
    registry.client.create_model_version("m3diff", "file:///nowhere")
    assert registry.decide(version=2).outcome == "refused"
