"""What people delete in MLflow: versions, runs, scores and the registered model."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from mlflow.cli import gc as remove_deleted

from tests.registry.conftest import Registry, Rescoring, recreate_model, versions_in_remedies
from tests.tiers import slow_except


@pytest.mark.fault("T9")
@pytest.mark.slow
def test_a_new_version_is_not_taken_for_the_rolled_back_one_of_its_number(rolled_back):
    recreate_model(rolled_back)
    rolled_back.add(1.3)
    rolled_back.rollback(to=1, why="accepted")
    assert rolled_back.grow(1.6, 1.7) == ["promoted", "promoted"]
    assert rolled_back.record()[3:] == ["rolled back", "promoted", "promoted"], "nothing was moved elsewhere"
    assert rolled_back.rollback().target == 2
    assert rolled_back.decide(version=3).outcome == "refused"


@pytest.mark.slow(12)
@pytest.mark.fault("T9")
def test_the_rolled_back_model_under_another_number_is_still_rolled_back(rolled_back):
    recreate_model(rolled_back)
    rolled_back.add(1.0)
    rolled_back.rollback(to=1, why="accepted")
    newest = rolled_back.add(2.0, dvc__checkpoint="of 2.0")
    refused = rolled_back.decide(version=newest)
    assert refused.outcome == "refused"
    assert "worse on the new camera" in refused.reason, "the reason of the rollback"
    assert rolled_back.decide(version=newest, again=True).outcome == "promoted"
    assert rolled_back.decide(version=newest).outcome == "unchanged"
    assert rolled_back.grow(3.0) == ["promoted"]
    assert rolled_back.rollback().target == newest, "it was accepted"


@pytest.mark.slow(15)
@pytest.mark.fault("T9")
def test_a_store_put_back_to_a_backup_gives_a_number_to_another_run(rolled_back, tmp_path):
    backup = (tmp_path / "mlflow.db").read_bytes()
    rolled_back.grow(3.0, 4.0)
    rolled_back.rollback(to=1)
    assert rolled_back.decide().outcome == "refused"
    (tmp_path / "mlflow.db").write_bytes(backup)
    assert rolled_back.grow(5.0, 6.0) == ["promoted", "promoted"]
    assert rolled_back.rollback().target == 3


def delete(registry: Registry, loss: str, version: int = 1) -> None:
    """Delete a part of a version."""
    run = registry.client.get_run(registry.version(version).run_id).info
    stored = Path(run.artifact_uri.removeprefix("file://")) / "scores.parquet"
    if loss in ("run in the bin", "run gone"):
        registry.client.delete_run(run.run_id)
    if loss == "run gone":
        store = registry.params.register_.tracking_uri
        done = CliRunner().invoke(remove_deleted, ["--backend-store-uri", store], env={"MLFLOW_TRACKING_URI": store})
        assert done.exit_code == 0, done.output
    if loss == "experiment in the bin":
        registry.client.delete_experiment(registry.experiment)
    if loss == "scores":
        stored.unlink()
    if loss == "half of the scores":
        stored.write_bytes(b"PAR1")


DELETED = {"run in the bin": 0, "experiment in the bin": 0, "run gone": 1, "scores": 1, "half of the scores": 1}
"""Parts of the champion that are deleted, and whether the champion is then scored again."""


@pytest.mark.fault("T10")
@pytest.mark.parametrize("loss", slow_except(DELETED, "run in the bin", "run gone"))
def test_a_champion_without_its_run_or_scores_is_scored_again_or_refused(registry, monkeypatch, loss):
    registry.grow(1.0, test_set="new")
    registry.add(2.0, seed=1, test_set="new")
    delete(registry, loss)
    rescoring = Rescoring(registry, monkeypatch)
    if DELETED[loss]:
        rescoring.error = FileNotFoundError("no checkpoint")
        decision = registry.decide()
        assert decision.outcome == "refused"
        assert versions_in_remedies(decision.reason) == [2]
        rescoring.error = None
        lost = registry.add(3.0, test_set="new")
        delete(registry, loss, lost)
        assert "m3diff register" in registry.decide(version=lost).reason
    decision = registry.decide(version=2)
    assert decision.outcome == "promoted"
    assert decision.scored_again == bool(DELETED[loss])
