"""`rescore`: a model is captioned and scored on this test set, and its scores go to the run of its version."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow.exceptions import MlflowException

from m3diff.commands import rescore as module
from m3diff.commands.rescore import keep_scores, rescore, score, score_model, with_another_path
from m3diff.models.checkpoint import CheckpointError
from m3diff.records.errors import DataError, Fault
from m3diff.registry import tracking
from m3diff.registry.model_source import Source
from m3diff.registry.promote import CannotScoreAgain
from m3diff.scoring.results import EvaluateReport
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params
from tests.command_line.conftest import Recorder
from tests.errors import raises
from tests.toy import REPOSITORY

LINK = Path("/scratch/out.model/checkpoint")
FOLDER = Path("/models/mine")


def test_a_path_is_replaced_wherever_a_field_of_a_fault_has_it():
    fault = Fault("files.unreadable", path=LINK / "config.json", command=f"`rm {LINK}`", names=[str(LINK)], value=3)
    assert with_another_path(fault, LINK, FOLDER) == Fault(
        "files.unreadable", path=FOLDER / "config.json", command=f"`rm {FOLDER}`", names=[str(FOLDER)], value=3
    )


def test_a_path_is_replaced_in_a_fault_that_is_the_cause_of_another():
    fault = Fault("scoring.tokenizer_failed", cause=Fault("files.unreadable", path=LINK, cause="no JSON"))
    replaced = with_another_path(fault, LINK, FOLDER)
    assert replaced.fields["cause"] == Fault("files.unreadable", path=FOLDER, cause="no JSON")


def test_a_fault_without_the_path_stays_as_it_is():
    fault = Fault("files.unreadable", path=Path("elsewhere"), cause="no JSON")
    assert with_another_path(fault, LINK, FOLDER) == fault


# Captions and scores of a model

PARAMS = load_params(REPOSITORY / "params.yaml")
TABLE = pa.table({"id": ["a"], "CIDEr": [1.5]})
REPORT = EvaluateReport(stage="evaluate", rows_in=1, rows_out=1, protocols={})


@pytest.fixture
def params(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Params:
    """The parameters of the embedded run, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return PARAMS


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    return folder


def test_a_model_captions_with_its_own_limit_and_evaluate_scores_these_captions(params, checkpoint, monkeypatch):
    predicting = Recorder(monkeypatch, "m3diff.stages.predict.stage", predict=None)
    evaluating = Recorder(monkeypatch, "m3diff.stages.evaluate.stage", evaluate=REPORT)
    assert score(params, Source("m3diff/3", checkpoint, 17, None), Path("out")) is REPORT
    ((_, predicted),) = predicting.calls
    assert predicted["cfg"] == params.predict.model_copy(update={"max_new_tokens": 17})
    assert predicted["mixture"] == params.paths.mixture
    assert (predicted["model"] / "checkpoint").resolve() == checkpoint
    assert predicted["out"] == Path("out/predictions")
    ((_, evaluated),) = evaluating.calls
    origin = evaluated.pop("origin")
    assert origin.facts == {"Model": "m3diff/3"}
    assert evaluated == {
        "cfg": params.evaluate,
        "compute": params.compute,
        "records": params.paths.records,
        "clean": params.paths.clean,
        "predictions": Path("out/predictions"),
        "out": Path("out/report"),
    }


def test_adapters_are_copied_and_placed_on_their_base(params, checkpoint, monkeypatch):
    Recorder(monkeypatch, "m3diff.stages.predict.stage", predict=None)
    Recorder(monkeypatch, "m3diff.stages.evaluate.stage", evaluate=REPORT)
    placing = Recorder(
        monkeypatch, "m3diff.models.checkpoint", verify_files_to_load={"a": "manifest"}, place_on_base=None
    )
    score(params, Source("m3diff/3", checkpoint, 17, Path("base")), Path("out"))
    copied = Path("out.model/checkpoint")
    assert not copied.is_symlink()
    assert (copied / "manifest.json").is_file()
    assert list(placing.calls[-1][1].values()) == [copied, {"a": "manifest"}, Path("base")]


@pytest.mark.parametrize("is_absolute", [True, False], ids=["an absolute path", "a relative path"])
def test_a_fault_of_a_checkpoint_names_the_folder_that_it_came_from(is_absolute, params, checkpoint, monkeypatch):
    link = Path("out.model/checkpoint/config.json")
    error = CheckpointError("files.unreadable", path=link.absolute() if is_absolute else link, cause="no JSON")
    Recorder(monkeypatch, "m3diff.stages.predict.stage", predict=error)
    with raises(CheckpointError, "files.unreadable", path=checkpoint / "config.json"):
        score(params, Source("m3diff/3", checkpoint, 17, None), Path("out"))


# A model that a person names


class Registry:
    """A registry with one version, whose run has scores on the test set `registered`.

    stored_scores: the client, version, test set and folder of the scores that were stored in the run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, source: Source) -> None:
        self.stored_scores: list[tuple[Any, ...]] = []
        self.searches: list[tuple[Any, ...]] = []
        self.sources: list[Source] = []
        self.present_test_set = "registered"
        self.version = SimpleNamespace(name="m3diff", version="3", run_id="the run", tags={})

        @contextmanager
        def connect(tracking_uri: str) -> Iterator[str]:
            yield f"client of {tracking_uri}"

        def find(*arguments: Any) -> Source:
            self.searches.append(arguments)
            return source

        monkeypatch.setattr(module, "find", find)
        monkeypatch.setattr(module, "score", self.score)
        monkeypatch.setattr(module, "hash_test_set", lambda paths: self.present_test_set)
        monkeypatch.setattr(module, "read_test_set", lambda version: "registered")
        monkeypatch.setattr(module, "find_version", lambda client, name, number: (client, name, number))
        monkeypatch.setattr(module, "keep_scores", lambda *arguments: self.stored_scores.append(arguments))
        monkeypatch.setattr(tracking, "connect", connect)

    def score(self, params: Params, source: Source, out: Path) -> EvaluateReport:
        """Write a table of scores, instead of `module.score`."""
        self.sources.append(source)
        (out / "report").mkdir(parents=True, exist_ok=True)
        pq.write_table(TABLE, out / "report" / module.SCORES)
        return REPORT


@pytest.fixture
def registry(params, checkpoint, monkeypatch) -> Registry:
    return Registry(monkeypatch, Source("m3diff/3", checkpoint, 17, None))


def test_a_version_is_scored_in_the_scratch_folder_and_its_new_scores_are_kept(params, registry):
    registry.present_test_set = "present"
    folder, _ = score_model(params, "champion", Path("base"))
    assert folder == params.compute.scratch / "evaluated" / "m3diff-3"
    assert pq.read_table(folder / "report" / module.SCORES) == TABLE
    register = params.register_
    limit = params.predict.max_new_tokens
    assert registry.searches == [(register.tracking_uri, register.model_name, "champion", Path("base"), limit)]
    client = f"client of {register.tracking_uri}"
    assert registry.stored_scores == [(client, (client, register.model_name, "3"), "present", folder)]


def test_scores_that_the_run_of_a_version_has_are_not_kept_twice(params, registry):
    score_model(params, "champion", Path("base"))
    assert registry.stored_scores == []


def test_the_scores_of_a_folder_are_kept_in_no_run_and_replace_no_folder(params, registry, checkpoint):
    registry.present_test_set = "present"
    folder, _ = score_model(params, str(checkpoint), Path("base"), Path("out"))
    assert folder == Path("out")
    assert registry.stored_scores == []
    with raises(DataError, "rescore.out_exists", path=Path("out")):
        score_model(params, str(checkpoint), Path("base"), Path("out"))
    assert len(registry.sources) == 1


# The champion, for the gate


@pytest.fixture
def champion(params, registry, checkpoint, monkeypatch) -> Registry:
    """The registry, whose version is the champion. Its run exists, and its checkpoint is a whole model."""
    registry.run = SimpleNamespace()
    registry.has_only_adapters = False
    monkeypatch.setattr(module, "download_checkpoint", lambda version, into: checkpoint)
    monkeypatch.setattr(tracking, "find_run", lambda client, run_id: registry.run if run_id == "the run" else None)
    monkeypatch.setattr("m3diff.models.checkpoint.has_only_adapters", lambda folder: registry.has_only_adapters)
    return registry


def test_a_champion_is_scored_with_its_own_limit_and_its_scores_are_kept(params, champion, checkpoint):
    champion.version.tags[tracking.TOKEN_LIMIT_TAG] = "9"
    assert rescore("the client", params, champion.version, "registered") == TABLE
    assert champion.sources == [Source("m3diff", checkpoint, 9, None)]
    ((client, version, test_set, _),) = champion.stored_scores
    assert client == "the client"
    assert version is champion.version
    assert test_set == "registered"
    assert list((params.compute.scratch / "promote").iterdir()) == [], "the folder is removed"


def test_a_champion_of_adapters_takes_its_base_and_limit_from_the_parameters(params, champion):
    champion.has_only_adapters = True
    rescore("the client", params, champion.version, "registered")
    (source,) = champion.sources
    assert source.base == params.train.base
    assert source.max_new_tokens == params.predict.max_new_tokens


def test_the_scores_of_a_champion_without_a_run_are_compared_but_not_kept(params, champion):
    champion.run = None
    assert rescore("the client", params, champion.version, "registered") == TABLE
    assert champion.stored_scores == []


def test_a_champion_is_not_scored_on_another_test_set(params, champion):
    with raises(CannotScoreAgain, "rescore.other_test_set", value="registered", expected="another"):
        rescore("the client", params, champion.version, "another")
    assert champion.sources == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CheckpointError("files.unreadable", path=FOLDER, cause="no JSON"), "files.unreadable"),
        (FileNotFoundError("gone"), "rescore.scoring_failed"),
        (MlflowException("gone"), "rescore.scoring_failed"),
    ],
    ids=["a checkpoint", "a file", "MLflow"],
)
def test_a_champion_that_cannot_be_scored_is_an_error_for_the_gate(error, code, params, champion, monkeypatch):
    Recorder(monkeypatch, "m3diff.commands.rescore", download_checkpoint=error)
    with raises(CannotScoreAgain, code):
        rescore("the client", params, champion.version, "registered")


@pytest.mark.parametrize("error", [ConnectionError("away"), BlockingIOError("locked")], ids=["a server", "a lock"])
def test_an_error_that_may_pass_is_no_verdict_on_the_champion(error, params, champion, monkeypatch):
    Recorder(monkeypatch, "m3diff.commands.rescore", download_checkpoint=error)
    with pytest.raises(type(error)):
        rescore("the client", params, champion.version, "registered")


def test_the_files_of_scores_are_kept_in_the_run_below_their_test_set():
    logged = []
    client = SimpleNamespace(log_artifact=lambda *arguments: logged.append(arguments))
    keep_scores(client, SimpleNamespace(run_id="the run"), "0123456789abcdef", Path("evaluated"))
    folder = "scored_again/0123456789ab"
    assert logged == [
        ("the run", "evaluated/report/scores.parquet", folder),
        ("the run", "evaluated/report/metrics.json", folder),
    ]
