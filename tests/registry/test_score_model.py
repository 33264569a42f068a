"""`m3diff evaluate --model`: which files it reads and writes, what it leaves alone, and where scores are kept."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m3diff.__main__ import main
from m3diff.commands import rescore as module
from m3diff.commands.rescore import score_model
from m3diff.records.errors import DataError
from m3diff.registry.model_source import Source
from m3diff.settings.load import load_params
from tests.toy import REPOSITORY

PARAMS = load_params(REPOSITORY / "profiles" / "embedded.yaml")


class Stages:
    """In the place of predict and evaluate: they note what they get and write a file each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, source: Source, registered_with: str = "another") -> None:
        self.calls: list[Any] = []
        self.kept: list[Any] = []
        monkeypatch.setattr(module, "find", lambda *given: self.calls.append(("find", *given)) or source)
        monkeypatch.setattr("m3diff.stages.predict.stage.predict", self.predict)
        monkeypatch.setattr("m3diff.stages.evaluate.stage.evaluate", self.evaluate)
        monkeypatch.setattr(module, "headline", lambda report: {"toy/total": {"CIDEr": report.cider}})
        version = SimpleNamespace(name="m3diff", version="7", tags={"test_set.sha256": registered_with})
        monkeypatch.setattr(module.tracking, "connected", lambda uri: nullcontext())
        monkeypatch.setattr(module, "find_version", lambda client, name, number: version if number == "7" else None)
        monkeypatch.setattr(module, "hash_test_set", self.hashed)
        monkeypatch.setattr(
            module, "keep", lambda client, of, on, place: self.kept.append((f"{of.name}/{of.version}", on, place))
        )

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
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "weights").write_text("weights of seven")
    return tmp_path


def test_a_version_captions_the_test_set_with_its_own_limit_and_its_scores_are_kept(here, monkeypatch):
    source = Source("m3diff/7", here / "stored", 11, None)
    stages = Stages(monkeypatch, source)
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
    assert (place / "report/report.html").is_file()
    assert stages.kept == [("m3diff/7", "this one", place)]
    (place / "older").touch()
    score_model(PARAMS, "champion", Path("base"))
    assert not (place / "older").exists(), "made anew"
    assert [file.name for file in place.parent.iterdir()] == ["m3diff-7"], "nothing half made is left"


def test_of_a_folder_nothing_is_kept_and_what_the_user_names_is_not_written_over(here, monkeypatch):
    stages = Stages(monkeypatch, Source("m3diff/sha256-1", here / "stored", 64, None))
    place, _ = score_model(PARAMS, str(here / "stored"), Path("base"), Path("mine"))
    assert place == Path("mine")
    assert stages.kept == []
    with pytest.raises(DataError, match="mine: exists; name a folder that does not"):
        score_model(PARAMS, str(here / "stored"), Path("base"), Path("mine"))


def test_adapters_are_copied_and_led_to_their_base(here, monkeypatch):
    stages, placed = Stages(monkeypatch, Source("m3diff/7", here / "stored", 64, Path("base"))), []
    monkeypatch.setattr(
        "m3diff.models.checkpoint.place_on_base", lambda folder, base: placed.append((folder.name, base))
    )
    score_model(PARAMS, "7", Path("base"))
    assert placed == [("checkpoint", Path("base"))]
    assert len(stages.calls) == 3


@pytest.mark.parametrize(("registered_with", "kept"), [("this one", 0), ("another", 1)])
def test_scores_are_kept_where_the_version_was_registered_with_another_test_set(
    here, registered_with, kept, monkeypatch
):
    stages = Stages(monkeypatch, Source("m3diff/7", here / "stored", 64, None), registered_with)
    place, _ = score_model(PARAMS, "champion", Path("base"))
    assert stages.kept == [("m3diff/7", "this one", place)] * kept


def test_kept_are_the_scores_of_each_pair_and_the_metrics(tmp_path):
    logged: list[tuple[str, str, str]] = []
    client = SimpleNamespace(log_artifact=lambda *given: logged.append(given))
    module.keep(client, SimpleNamespace(run_id="run"), "this one", tmp_path)
    assert {Path(file) for _, file, _ in logged} == {
        tmp_path / "report" / "scores.parquet",
        tmp_path / "report/metrics.json",
    }
    assert {(run, to) for run, _, to in logged} == {("run", "scored_again/this one")}


def test_a_place_without_a_model_is_refused(capsys):
    assert main(["--params", str(REPOSITORY / "profiles/embedded.yaml"), "evaluate", "--out", "mine"]) == 2
    assert "--out and --base need --model" in capsys.readouterr().err
