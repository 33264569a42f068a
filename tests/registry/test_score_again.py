"""`m3diff evaluate --model` and a champion of another test set: what is read and written, and the real stages once."""

import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
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

PARAMS = load_params(REPOSITORY / "profiles" / "embedded.yaml")


class Stages:
    """In the place of find, predict and evaluate: they note what they get and write a file each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.calls: list[Any] = []
        self.kept: list[Any] = []
        self.source, self.registered_with = Source("m3diff/7", root / "stored", 11, None), "another"
        monkeypatch.setattr(module, "find", lambda *given: self.calls.append(("find", *given)) or self.source)
        monkeypatch.setattr("m3diff.stages.predict.stage.predict", self.predict)
        monkeypatch.setattr("m3diff.stages.evaluate.stage.evaluate", self.evaluate)
        monkeypatch.setattr(module, "headline", lambda report: {"toy/total": {"CIDEr": report.cider}})
        monkeypatch.setattr(module.tracking, "connected", lambda uri: nullcontext(self))
        monkeypatch.setattr(module, "find_version", self.find_version)
        monkeypatch.setattr(module, "hash_test_set", self.hashed)

    def find_version(self, client: object, name: str, number: str) -> Any:
        assert number == "7"
        return SimpleNamespace(run_id="run", tags={"test_set.sha256": self.registered_with})

    def log_artifact(self, run: str, file: str, to: str) -> None:
        self.kept.append((run, Path(file), to))

    def hashed(self, paths: Any) -> str:
        assert (paths.predictions / "predictions.json").is_file()
        return "this one"

    def predict(self, cfg: Any, compute: Any, mixture: Path, model: Path, out: Path) -> None:
        weights = (model / "checkpoint" / "weights").read_text()
        self.calls.append(("predict", cfg.max_new_tokens, mixture, weights))
        out.mkdir(parents=True)
        (out / "predictions.json").write_text(weights)

    def evaluate(self, cfg: Any, compute: Any, records: Path, clean: Path, predictions: Path, model: Path, out: Path):
        assert (predictions / "predictions.json").is_file()
        self.calls.append(("evaluate", records, clean))
        out.mkdir(parents=True)
        (out / "report.html").write_text("the page")
        return SimpleNamespace(cider=150.0)


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "weights").write_text("weights of seven")
    return Stages(monkeypatch, tmp_path)


def test_a_version_captions_the_test_set_with_its_own_limit_and_its_scores_are_kept(stages):
    place, scores = score_model(PARAMS, "champion", Path("base"))
    assert place == PARAMS.compute.scratch / "evaluated" / "m3diff-7"
    assert scores == {"toy/total": {"CIDEr": 150.0}}
    cfg, paths = PARAMS.register_, PARAMS.paths
    assert stages.calls == [
        ("find", cfg.tracking_uri, "m3diff", "champion", Path("base"), PARAMS.predict.max_new_tokens),
        ("predict", 11, paths.mixture, "weights of seven"),
        ("evaluate", paths.records, paths.clean),
    ]
    assert (place / "predictions/predictions.json").read_text() == "weights of seven"
    to = "scored_again/this one"
    assert stages.kept == [("run", place / "report" / name, to) for name in ("scores.parquet", "metrics.json")]
    (place / "older").touch()
    stages.registered_with = "this one"
    score_model(PARAMS, "champion", Path("base"))
    assert len(stages.kept) == 2, "nothing more: its run has them"
    assert not (place / "older").exists(), "made anew"
    assert [file.name for file in place.parent.iterdir()] == ["m3diff-7"], "nothing half made is left"


def test_of_a_folder_nothing_is_kept_adapters_are_led_to_their_base_and_nothing_is_written_over(
    stages, tmp_path, monkeypatch, capsys
):
    stages.source, placed = Source("m3diff/sha256-1", tmp_path / "stored", 64, Path("base")), []
    monkeypatch.setattr("m3diff.models.checkpoint.place_on_base", lambda *given: placed.append(given))
    place, _ = score_model(PARAMS, str(tmp_path / "stored"), Path("base"), Path("mine"))
    assert (place, stages.kept) == (Path("mine"), [])
    ((folder, base),) = placed
    assert (folder.name, base) == ("checkpoint", Path("base"))
    with pytest.raises(DataError, match="mine: exists; name a folder that does not"):
        score_model(PARAMS, str(tmp_path / "stored"), Path("base"), Path("mine"))
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
