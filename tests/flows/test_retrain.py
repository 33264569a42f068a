"""When the schedule trains again: on changed data or parameters, and on what was never registered."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flows import dvc, retrain
from flows.retrain import changes, unregistered
from m3diff.provenance.dvc import Lock
from m3diff.settings.load import load_params
from tests import toy


def test_nothing_out_of_date_is_no_reason():
    assert list(changes({})) == []


def test_changed_code_alone_is_no_reason():
    status = {
        "convert": [{"changed deps": {"components/stages/convert": "modified"}}],
        "train": [{"changed deps": {"components/models": "modified", "components/records/files.py": "modified"}}],
    }
    assert list(changes(status)) == []
    assert list(changes({"train": ["changed command"]})) == []


def test_a_changed_parameter_and_changed_data_are_named():
    status = {
        "ingest@birds": [{"changed deps": {"data/01_raw/birds": "modified", "components/stages/ingest": "modified"}}],
        "train": [
            "changed command",
            {"changed deps": {"params.yaml": {"models.m3diff": "modified", "train.seed": "new"}}},
            {"changed outs": {"data/05_model/checkpoint": "deleted"}},
        ],
    }
    assert list(changes(status)) == [
        "ingest@birds: changed deps: data/01_raw/birds modified",
        "train: changed deps: params.yaml models.m3diff, train.seed",
        "train: changed outs: data/05_model/checkpoint deleted",
    ]


@pytest.mark.slow(25)
def test_dvcs_own_words_are_understood_and_how_a_run_is_computed_is_no_reason(project):
    toy.run(project, "dvc", "repro", "-q")
    assert list(changes(dvc.status())) == []
    params = yaml.safe_load(Path("params.yaml").read_text())
    params["compute"]["workers"] = 7
    Path("params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    plan, base = project / "components/stages/convert/stage.py", project / "data/00_base/config.json"
    plan.write_text(plan.read_text() + "\n# a comment\n")
    assert list(changes(dvc.status())) == []
    params["models"]["m3diff"]["rates"]["llm"] = 0.5
    Path("params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    base.write_text("another base")
    assert sorted(changes(dvc.status())) == [
        "train: changed deps: data/00_base modified",
        "train: changed deps: params.yaml models.m3diff",
    ]


# What was never registered


PARAMS = toy.REPOSITORY / "params.yaml"


@pytest.fixture
def mlflow_has(monkeypatch, tmp_path):
    """Say what MLflow answers for the challenger; `dvc.lock` has the checkpoint `here`."""
    monkeypatch.setattr(retrain, "LOCK", tmp_path / "dvc.lock")
    entry = {"path": "data/05_model/checkpoint", "md5": "here"}
    lock = {"stages": {"train": {"outs": [entry]}, "predict": {"deps": [entry | {"md5": "older"}]}}}
    monkeypatch.setattr(retrain, "Lock", lambda: Lock(tmp_path / "dvc.lock"))

    def answer(version: Any, trained: bool = True) -> None:
        stages = lock if trained else {"stages": {"pretrain": {"outs": [{"path": "data/00_base", "md5": "b"}]}}}
        (tmp_path / "dvc.lock").write_text(yaml.safe_dump(stages))
        asked = contextlib.nullcontext("client")
        monkeypatch.setattr(retrain.tracking, "connected", lambda uri: asked if "mlflow.db" in uri else None)
        found = {("client", "m3diff", "challenger"): version}
        monkeypatch.setattr(retrain, "find_alias", lambda *arguments: found[arguments])

    return answer


def test_a_clone_where_nothing_was_trained_yet_has_a_reason(mlflow_has, monkeypatch):
    params = load_params(PARAMS)
    assert list(unregistered(params)) == ["nothing was trained yet"]
    mlflow_has(None, trained=False)
    monkeypatch.setattr(retrain.tracking, "connected", lambda uri: pytest.fail("no need to ask MLflow"))
    assert list(unregistered(params)) == ["nothing was trained yet"]


def test_what_was_trained_and_not_registered_is_a_reason(mlflow_has):
    params = load_params(PARAMS)
    mlflow_has(None)
    assert list(unregistered(params)) == ["no version of m3diff is registered yet"]
    mlflow_has(SimpleNamespace(version="3", tags={"dvc.checkpoint": "older"}))
    (reason,) = unregistered(params)
    assert reason == f"m3diff version 3 is another checkpoint than the one in {retrain.LOCK}"


def test_what_is_registered_is_no_reason(mlflow_has):
    mlflow_has(SimpleNamespace(version="3", tags={"dvc.checkpoint": "here"}))
    assert list(unregistered(load_params(PARAMS))) == []


def test_the_reasons_are_what_changed_then_what_was_never_registered(monkeypatch):
    monkeypatch.setattr(retrain, "unregistered", lambda params: [f"unregistered by {params}"])
    status = {"train": [{"changed outs": {"data/x": "deleted"}}]}
    assert retrain.look_for_changes(status, "the parameters") == [
        "train: changed outs: data/x deleted",
        "unregistered by the parameters",
    ]
