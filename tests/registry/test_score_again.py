"""`m3diff evaluate --model` and a champion of another test set: what is read and written, and the real stages once."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlflow
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from m3diff.__main__ import main
from m3diff.commands import rescore as module
from m3diff.commands.rescore import score_model
from m3diff.images.open import load_image
from m3diff.models.checkpoint import is_adapters
from m3diff.models.generation import load_captioner
from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.lineage import hash_test_set
from m3diff.registry.model_source import Source
from m3diff.settings.load import load_params
from m3diff.stages.register import stage
from tests.tiny import tiny_base
from tests.toy import REPOSITORY


def test_a_version_captions_the_test_set_with_its_own_limit_and_its_scores_are_kept(registry, rescoring):
    params, run = registry.params, registry.version(1).run_id
    place, scores = score_model(params, "champion", Path("base"))
    assert place == params.compute.scratch / "evaluated" / "m3diff-1"
    assert scores == {"toy/total": {"CIDEr": 150.0}}
    assert rescoring.calls == [("models:/m3diff/1/artifacts/checkpoint", 17, params.predict.batch_pairs)]
    assert (place / "predictions/captions.txt").is_file()
    kept = {found.path for found in registry.client.list_artifacts(run, "scored_again/new")}
    assert kept == {f"scored_again/new/{name}" for name in ("scores.parquet", "metrics.json")}
    (place / "older").touch()
    rescoring.here = "old"
    score_model(params, "champion", Path("base"))
    assert registry.client.list_artifacts(run, "scored_again/old") == [], "its run has them"
    assert not (place / "older").exists(), "made anew"
    assert [file.name for file in place.parent.iterdir()] == ["m3diff-1"], "nothing half made is left"


def test_of_a_folder_nothing_is_kept_adapters_are_led_to_their_base_and_nothing_is_written_over(
    registry, rescoring, tmp_path, monkeypatch, capsys
):
    folder, placed = Path(rescoring.download("of a folder")), []
    monkeypatch.setattr(module, "find", lambda *given: Source("m3diff/sha256-1", folder, 64, Path("base")))
    monkeypatch.setattr("m3diff.models.checkpoint.place_on_base", lambda *given: placed.append(given))
    monkeypatch.setattr("m3diff.models.checkpoint.verify_loaded", lambda folder: {})
    place, _ = score_model(registry.params, str(folder), Path("base"), Path("mine"))
    assert (place, rescoring.calls[0][:2]) == (Path("mine"), ("of a folder", 64))
    ((copied, _, base),) = placed
    assert (copied.name, base) == ("checkpoint", Path("base"))
    with pytest.raises(DataError, match="mine: exists; name a folder that does not"):
        score_model(registry.params, str(folder), Path("base"), Path("mine"))
    assert main(["--params", str(REPOSITORY / "profiles/embedded.yaml"), "evaluate", "--out", "mine"]) == 2
    assert "--out and --base need --model" in capsys.readouterr().err


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Parameters of a small model on a few scenes, its mixture made."""
    monkeypatch.chdir(tmp_path)
    root, mdp = "data/01_raw/minichange", {"vision_feature_layers": [1, 2], "layers": 1, "heads": 2}
    drawn = {"scenes": {"train": 8, "val": 2, "test": 12}, "image_px": 64, "references": 2, "multi_change_share": 0.2}
    profile = {
        "extends": str(REPOSITORY / "profiles" / "embedded"),
        "models": {"m3diff": {"module": mdp}},
        "synthesize": {"minichange": {"root": root, "seed": 1, "oversample_types": [], **drawn}},
        "ingest": {"datasets": {"minichange": {"reader": "minichange", "root": root}}},
        "validate": {"near_duplicate_max_diff": None, "max_quarantined_share": 0.5},
        "convert": {"questions": str(REPOSITORY / "profiles" / "questions.yaml")},
        "train": {"base": str(tiny_base(tmp_path / "base")), "epochs": 1, "global_batch": 8},
        "predict": {"max_new_tokens": 4},
        "evaluate": {"metrics": ["CIDEr", "change_accuracy"]},
        "promote": {"guards": {"unreadable": 0.0}},
        "compute": {"workers": 0, "micro_batch": 4, "val_pairs": 2, "caption_val_pairs": 0},
    }
    Path("params.yaml").write_text(yaml.safe_dump(profile))
    for command in (["synthesize", "minichange"], ["ingest"], ["validate"], ["convert"]):
        assert main(command) == 0
    return profile


@pytest.mark.fault("23")
@pytest.mark.slow
@pytest.mark.parametrize("keeps", ["merged", "adapters"])
def test_a_champions_checkpoint_is_fetched_captions_this_test_set_and_is_compared_pair_by_pair(small, capsys, keeps):
    subprocess.run(["git", "init", "-q"], check=True)
    Path("components").symlink_to(REPOSITORY / "components")
    Path("m3diff").symlink_to("components")
    small["register"] = {"tracking_uri": "sqlite:///mlflow.db", "keeps": keeps}
    Path("params.yaml").write_text(yaml.safe_dump(small))
    for command in ("train", "predict", "evaluate"):
        assert main([command]) == 0
    params = load_params()
    paths = params.paths
    table = pq.read_table(paths.report / "scores.parquet")
    better = pa.array([value + 1 for value in table["CIDEr"].to_pylist()])
    challenger = table.set_column(table.schema.get_field_index("CIDEr"), "CIDEr", better)

    with tracking.connected(params.register_.tracking_uri) as client:
        experiment = tracking.experiment_id(client, "m3diff")
        runs = [client.create_run(experiment).info.run_id for _ in range(2)]
        model = stage.log_model(client, runs[0], params.register_, paths, 4, params.train.base)
        kept = Path(mlflow.artifacts.download_artifacts(model)) / "artifacts/checkpoint"
        assert is_adapters(kept) == (keeps == "adapters")
        assert (kept / "model.safetensors").is_file() == (keeps == "merged")
        pair = {side: str(next(Path("data/01_raw").rglob("*.png"))) for side in ("before", "after")}
        images = (load_image(pair["before"]), load_image(pair["after"]))
        whole = load_captioner(paths.model / "checkpoint", 4).caption([images])
        assert mlflow.pyfunc.load_model(model).predict(pd.DataFrame([pair])) == whole
        mlflow.register_model(model, "m3diff", tags={"test_set.sha256": "old", "predict.max_new_tokens": "4"})
        pq.write_table(challenger, "scores.parquet")
        client.log_artifact(runs[1], "scores.parquet")
        on = hash_test_set(paths)
        client.create_model_version("m3diff", "file:///nowhere", runs[1], tags={"test_set.sha256": on})
        for alias, version in (("champion", "1"), ("challenger", "2")):
            client.set_registered_model_alias("m3diff", alias, version)

        shutil.rmtree(paths.model)
        capsys.readouterr()
        assert main(["promote"]) == 0
        said = capsys.readouterr().out
        assert "promote: champion 1 has no scores on this test set" in said
        assert "gain +1.0000, 95 % interval +1.0000 to +1.0000 over 24 pairs; the lower bound exceeds 0" in said
        place = f"scored_again/{on:.12}/scores.parquet"
        assert pq.read_table(client.download_artifacts(runs[0], place)).equals(table)
        assert main(["evaluate", "--model", "previous", "--out", "old"]) == 0
        said = capsys.readouterr().out
        assert "minichange/total, times 100: CIDEr " in said
        assert said.endswith("report: old/report/report.html\n")
        assert pq.read_table("old/report/scores.parquet").equals(table)
        assert (paths.report / "report.html").is_file()
        assert not paths.model.exists(), "what the run left is as it was"
        aliases = client.get_registered_model("m3diff").aliases
        found = {alias: int(version) for alias, version in aliases.items()}
        assert found == {"challenger": 2, "champion": 2, "previous": 1}
