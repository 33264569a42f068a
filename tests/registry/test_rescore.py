"""A champion from another test set, and any other model, is captioned and scored on the current test set."""

import shutil
import subprocess
from pathlib import Path

import mlflow
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow.exceptions import MlflowException

from m3diff.__main__ import main
from m3diff.commands import rescore as module
from m3diff.commands.rescore import score_model
from m3diff.images.open import load_image
from m3diff.models.checkpoint import CheckpointError, has_only_adapters
from m3diff.models.generation import load_captioner
from m3diff.provenance.dvc import dvc_hash
from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.lineage import PREDICT_CODE_DIGESTS, hash_test_set
from m3diff.registry.model_source import Source
from m3diff.settings.load import load_params
from m3diff.stages.register import stage
from tests.errors import raises
from tests.faults import small
from tests.toy import REPOSITORY


@pytest.mark.fault("23", "S2")
def test_a_champion_of_another_test_set_is_scored_again_and_its_scores_kept(registry, rescoring, capsys):
    decision = registry.decide()
    assert decision.outcome == "promoted"
    assert decision.scored_again
    assert decision.champion_score == pytest.approx(1.0)
    batch = registry.params.predict.batch_pairs
    assert rescoring.calls == [("models:/m3diff/1/artifacts/checkpoint", 17, batch)]
    output = capsys.readouterr().out
    assert "champion 1 has no scores on this test set (new)" in output
    artifacts = {
        artifact.path for artifact in registry.client.list_artifacts(registry.version(1).run_id, "scored_again/new")
    }
    assert artifacts == {"scored_again/new/scores.parquet", "scored_again/new/metrics.json"}
    scratch = registry.params.compute.scratch
    assert rescoring.output_folders[0].is_relative_to(scratch), "the folder is removed"
    assert list(scratch.glob("promote/*")) == [], "the folder is removed"
    registry.add(1.1, seed=2, test_set="new")
    registry.point("champion", 1)
    second_decision = registry.decide()
    assert second_decision.champion_score == pytest.approx(1.0)
    assert not second_decision.scored_again
    assert len(rescoring.calls) == 1, "its scores on this test set are stored"


def test_its_old_score_counts_for_nothing_nor_do_scores_without_those_of_the_gate(registry, rescoring):
    rescoring.cider = 2.0
    decision = registry.decide()
    assert decision.outcome == "refused"
    assert decision.champion_score == pytest.approx(2.0)
    registry.decide()
    assert registry.record() == ["first", "refused"], "the stored scores give the same decision"
    registry.point("champion", registry.add(test_set="new", dvc__code=dvc_hash(REPOSITORY / PREDICT_CODE_DIGESTS)))
    registry.add(2.5, seed=1, test_set="new")
    assert registry.decide().scored_again
    assert len(rescoring.calls) == 2
    assert rescoring.calls[1][1] == registry.params.predict.max_new_tokens


def test_a_challenger_is_refused_if_the_champion_cannot_be_scored_again(registry, rescoring):
    for transient_error in (ConnectionError, BlockingIOError):
        rescoring.error = transient_error("may pass by itself")
        with pytest.raises(transient_error):
            registry.decide()
    assert registry.record() == ["first"]
    for error_class in (MlflowException, CheckpointError, FileNotFoundError, DataError):
        rescoring.error = error = error_class("gone")
        decision = registry.decide()
        assert decision.outcome == "refused"
        assert f": {error}" in decision.reason
        assert "m3diff rollback --to 2 --why" in decision.reason
    rescoring.present_test_set = "third"
    rescoring.error = None
    decision = registry.decide()
    assert decision.outcome == "refused"
    assert " third" in decision.reason, "the digest of the current test set"
    assert rescoring.calls == []
    assert registry.aliases() == {"challenger": 2, "champion": 1}


def test_a_version_captions_the_test_set_with_its_own_limit_and_its_scores_are_kept(registry, rescoring):
    params = registry.params
    run = registry.version(1).run_id
    folder, scores = score_model(params, "champion", Path("base"))
    assert folder == params.compute.scratch / "evaluated" / "m3diff-1"
    assert scores == {"toy/total": {"CIDEr": 150.0}}
    assert rescoring.calls == [("models:/m3diff/1/artifacts/checkpoint", 17, params.predict.batch_pairs)]
    assert (folder / "predictions/captions.txt").is_file()
    artifacts = {artifact.path for artifact in registry.client.list_artifacts(run, "scored_again/new")}
    assert artifacts == {f"scored_again/new/{name}" for name in ("scores.parquet", "metrics.json")}
    (folder / "older").touch()
    rescoring.present_test_set = "old"
    score_model(params, "champion", Path("base"))
    assert registry.client.list_artifacts(run, "scored_again/old") == [], "its run already has these scores"
    assert not (folder / "older").exists(), "the folder is created again"
    assert [file.name for file in folder.parent.iterdir()] == ["m3diff-1"], "no temporary folder is left"


def test_of_a_folder_nothing_is_kept_and_adapters_are_led_to_their_base(registry, rescoring, monkeypatch, capsys):
    folder = Path(rescoring.download("of a folder"))
    calls = []
    monkeypatch.setattr(module, "find", lambda *arguments: Source("m3diff/sha256-1", folder, 64, Path("base")))
    monkeypatch.setattr("m3diff.models.checkpoint.place_on_base", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr("m3diff.models.checkpoint.verify_files_to_load", lambda folder: {})
    out, _ = score_model(registry.params, str(folder), Path("base"), Path("mine"))
    assert out == Path("mine")
    assert rescoring.calls[0][:2] == ("of a folder", 64)
    ((checkpoint, _, base),) = calls
    assert checkpoint.name == "checkpoint"
    assert base == Path("base")
    with pytest.raises(DataError, match="mine"):
        score_model(registry.params, str(folder), Path("base"), Path("mine"))
    assert main(["--params", str(REPOSITORY / "profiles/embedded.yaml"), "evaluate", "--out", "mine"]) == 2
    assert "--model" in capsys.readouterr().err


def test_a_fault_of_a_model_names_the_folder_that_was_given(registry, rescoring, monkeypatch):
    folder = Path(rescoring.download("of a folder"))
    monkeypatch.setattr(module, "find", lambda *arguments: Source("m3diff/sha256-1", folder, 64, None))

    def refuse(cfg: object, compute: object, mixture: Path, model: Path, out: Path) -> None:
        raise CheckpointError("files.unreadable", path=model / "checkpoint/config.json", cause="not JSON")

    monkeypatch.setattr("m3diff.stages.predict.stage.predict", refuse)
    with raises(CheckpointError, "files.unreadable", path=folder / "config.json"):
        score_model(registry.params, str(folder), Path("base"), Path("mine"))


@pytest.mark.fault("23")
@pytest.mark.slow
@pytest.mark.parametrize("keeps", ["merged", "adapters"])
def test_a_champions_checkpoint_is_fetched_captions_this_test_set_and_is_compared(keeps, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    Path("components").symlink_to(REPOSITORY / "components")
    Path("m3diff").symlink_to("components")
    store = {"tracking_uri": "sqlite:///mlflow.db", "keeps": keeps}
    small.write_params(tmp_path, tests=12, register=store, promote={"guards": {"unreadable": 0.0}})
    for command in small.STAGE_COMMANDS:
        assert main(command) == 0
    params = load_params()
    paths = params.paths
    table = pq.read_table(paths.report / "scores.parquet")
    better_cider = pa.array([value + 1 for value in table["CIDEr"].to_pylist()])
    challenger = table.set_column(table.schema.get_field_index("CIDEr"), "CIDEr", better_cider)

    with tracking.connect(params.register_.tracking_uri) as client:
        experiment = tracking.experiment_id(client, "m3diff")
        runs = [client.create_run(experiment).info.run_id for _ in range(2)]
        model = stage.log_model(client, runs[0], params.register_, paths, 4, params.train.base)
        stored_checkpoint = Path(mlflow.artifacts.download_artifacts(model)) / "artifacts/checkpoint"
        assert has_only_adapters(stored_checkpoint) == (keeps == "adapters")
        assert (stored_checkpoint / "model.safetensors").is_file() == (keeps == "merged")
        pair = {side: str(next(Path("data/01_raw").rglob("*.png"))) for side in ("before", "after")}
        images = (load_image(pair["before"]), load_image(pair["after"]))
        expected_captions = load_captioner(paths.model / "checkpoint", 4).caption([images])
        assert mlflow.pyfunc.load_model(model).predict(pd.DataFrame([pair])) == expected_captions
        mlflow.register_model(model, "m3diff", tags={"test_set.sha256": "old", "predict.max_new_tokens": "4"})
        pq.write_table(challenger, "scores.parquet")
        client.log_artifact(runs[1], "scores.parquet")
        test_set = hash_test_set(paths)
        client.create_model_version("m3diff", "file:///nowhere", runs[1], tags={"test_set.sha256": test_set})
        for alias, version in (("champion", "1"), ("challenger", "2")):
            client.set_registered_model_alias("m3diff", alias, version)

        shutil.rmtree(paths.model)
        capsys.readouterr()
        assert main(["promote"]) == 0
        output = capsys.readouterr().out
        assert "promote: champion 1 has no scores on this test set" in output
        assert "gain +1.0000, 95 % interval +1.0000 to +1.0000 over 24 pairs; the lower bound exceeds 0" in output
        scores_path = f"scored_again/{test_set:.12}/scores.parquet"
        assert pq.read_table(client.download_artifacts(runs[0], scores_path)).equals(table)
        assert main(["evaluate", "--model", "previous", "--out", "old"]) == 0
        output = capsys.readouterr().out
        assert "minichange/total, times 100: CIDEr " in output
        assert output.endswith("report: old/report/report.html\n")
        assert pq.read_table("old/report/scores.parquet").equals(table)
        assert (paths.report / "report.html").is_file()
        assert not paths.model.exists(), "the outputs of the last run are not changed"
        aliases = client.get_registered_model("m3diff").aliases
        version_by_alias = {alias: int(version) for alias, version in aliases.items()}
        assert version_by_alias == {"challenger": 2, "champion": 2, "previous": 1}
