"""When the schedule trains again: on changed data or parameters, and on what was never registered."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flows import dvc, retrain
from flows.retrain import look_for_changes, unregistered
from m3diff.provenance.dvc import Lock
from m3diff.settings.load import load_params
from tests import toy


def changes(status: dict[str, Any]) -> list[str]:
    """The reasons in DVC's status, where the newest version is the checkpoint of `dvc.lock`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrain, "unregistered", lambda params: ["unregistered"])
        *found, last = look_for_changes(status, None)
    assert last == "unregistered"
    return found


@pytest.mark.parametrize(
    ("status", "found"),
    [
        ({}, []),
        ({"convert": [{"changed deps": {"components/stages/convert": "modified"}}]}, []),
        ({"train": [{"changed deps": {"code/train.json": "modified", "components/models": "new"}}]}, []),
        ({"train": ["changed command"]}, []),
        ({"code": [{"changed outs": {"data/x": "deleted"}}]}, []),
        (
            {"ingest@birds": [{"changed deps": {"data/01_raw/birds": "modified", "components/x": "modified"}}]},
            ["ingest@birds: changed deps: data/01_raw/birds modified"],
        ),
        (
            {
                "train": [
                    "changed command",
                    {"changed deps": {"params.yaml": {"models.m3diff": "modified", "train.seed": "new"}}},
                    {"changed outs": {"data/05_model/checkpoint": "deleted"}},
                ]
            },
            [
                "train: changed deps: params.yaml models.m3diff, train.seed",
                "train: changed outs: data/05_model/checkpoint deleted",
            ],
        ),
    ],
)
def test_changed_data_and_parameters_are_reasons_and_changed_code_alone_is_none(status, found):
    assert changes(status) == found


@pytest.mark.slow(25)
def test_dvcs_own_words_are_understood_and_how_a_run_is_computed_is_no_reason(project):
    toy.run(project, "dvc", "repro", "-q")
    assert changes(dvc.status()) == []
    params = yaml.safe_load(Path("params.yaml").read_text())
    params["compute"]["workers"] = 7
    Path("params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    plan, base = project / "components/stages/convert/stage.py", project / "data/00_base/config.json"
    plan.write_text(plan.read_text() + "\n# a comment\n")
    assert changes(dvc.status()) == []
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


@pytest.mark.parametrize(
    ("newest", "reason"),
    [
        (None, "no version of m3diff is registered yet"),
        ("older", "m3diff version 3 is another checkpoint than the one in"),
        ("here", None),
    ],
)
def test_what_was_trained_and_not_registered_is_a_reason(mlflow_has, newest, reason):
    mlflow_has(newest and SimpleNamespace(version="3", tags={"dvc.checkpoint": newest}))
    found = list(unregistered(load_params(PARAMS)))
    assert len(found) == bool(reason)
    assert all(text.startswith(reason) for text in found)
