"""A champion of another test set, in earnest: its checkpoint from MLflow, captions and scores by the real stages."""

import shutil
import subprocess
from pathlib import Path

import mlflow
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from m3diff.__main__ import main as m3diff
from m3diff.images.open import load_image
from m3diff.models.checkpoint import is_adapters
from m3diff.models.generation import load_captioner
from m3diff.registry import tracking
from m3diff.registry.lineage import hash_test_set
from m3diff.settings.load import load_params
from m3diff.stages.register import stage
from tests.tiny import tiny_base
from tests.toy import REPOSITORY


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parameters of a small model on a few scenes, its mixture made."""
    monkeypatch.chdir(tmp_path)
    mdp = {"vision_feature_layers": [1, 2], "layers": 1, "heads": 2}
    profile = {
        "extends": str(REPOSITORY / "profiles" / "embedded"),
        "models": {"m3diff": {"module": mdp}},
        "synthesize": {
            "minichange": {
                "root": "data/01_raw/minichange",
                "seed": 1,
                "scenes": {"train": 8, "val": 2, "test": 12},
                "image_px": 64,
                "references": 2,
                "multi_change_share": 0.2,
                "oversample_types": [],
            }
        },
        "ingest": {"datasets": {"minichange": {"reader": "minichange", "root": "data/01_raw/minichange"}}},
        "validate": {"near_duplicate_max_diff": None, "max_quarantined_share": 0.5},
        "convert": {"questions": str(REPOSITORY / "profiles" / "questions.yaml")},
        "train": {"base": str(tiny_base(tmp_path / "base")), "epochs": 1, "global_batch": 8},
        "predict": {"max_new_tokens": 4},
        "evaluate": {"metrics": ["CIDEr", "change_accuracy"]},
        "compute": {"workers": 0, "micro_batch": 4, "val_pairs": 2, "caption_val_pairs": 0},
    }
    Path("params.yaml").write_text(yaml.safe_dump(profile))
    for command in (["synthesize", "minichange"], ["ingest"], ["validate"], ["convert"]):
        assert m3diff(command) == 0
    return tmp_path


@pytest.mark.fault("23")
@pytest.mark.slow
@pytest.mark.parametrize("keeps", ["merged", "adapters"])
def test_a_champions_checkpoint_is_fetched_captions_this_test_set_and_is_compared_pair_by_pair(small, capsys, keeps):
    subprocess.run(["git", "init", "-q"], check=True)
    Path("components").symlink_to(REPOSITORY / "components")
    Path("m3diff").symlink_to("components")
    profile = yaml.safe_load(Path("params.yaml").read_text())
    profile |= {
        "register": {"tracking_uri": "sqlite:///mlflow.db", "keeps": keeps},
        "promote": {"guards": {"unreadable": 0.0}},
    }
    Path("params.yaml").write_text(yaml.safe_dump(profile))
    for command in ("train", "predict", "evaluate"):
        assert m3diff([command]) == 0
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
        loaded = mlflow.pyfunc.load_model(model)
        pair = {side: str(next(Path("data/01_raw").rglob("*.png"))) for side in ("before", "after")}
        whole = load_captioner(paths.model / "checkpoint", 4)
        images = (load_image(pair["before"]), load_image(pair["after"]))
        assert loaded.predict(pd.DataFrame([pair])) == whole.caption([images])
        mlflow.register_model(model, "m3diff", tags={"test_set.sha256": "old", "predict.max_new_tokens": "4"})
        pq.write_table(challenger, "scores.parquet")
        client.log_artifact(runs[1], "scores.parquet")
        tags = {"test_set.sha256": hash_test_set(paths)}
        client.create_model_version("m3diff", "file:///nowhere", runs[1], tags=tags)
        for alias, version in (("champion", "1"), ("challenger", "2")):
            client.set_registered_model_alias("m3diff", alias, version)

        shutil.rmtree(paths.model)
        capsys.readouterr()
        assert m3diff(["promote"]) == 0
        said = capsys.readouterr().out
        assert "promote: champion 1 has no scores on this test set" in said
        assert "gain +1.0000, 95 % interval +1.0000 to +1.0000 over 24 pairs; the lower bound exceeds 0" in said
        place = f"scored_again/{hash_test_set(paths):.12}/scores.parquet"
        assert pq.read_table(client.download_artifacts(runs[0], place)).equals(table)
        assert m3diff(["evaluate", "--model", "previous", "--out", "old"]) == 0
        said = capsys.readouterr().out
        assert "minichange/total, times 100: CIDEr " in said
        assert said.endswith("report: old/report/report.html\n")
        assert pq.read_table("old/report/scores.parquet").equals(table)
        assert (paths.report / "report.html").is_file()
        assert not paths.model.exists(), "what the run left is as it was"
        aliases = client.get_registered_model("m3diff").aliases
        assert {alias: int(version) for alias, version in aliases.items()} == {
            "challenger": 2,
            "champion": 2,
            "previous": 1,
        }
    mlflow.set_tracking_uri("")
