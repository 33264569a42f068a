"""Reasons for the scheduled flow to train again."""

import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flows import dvc, pipeline
from flows.pipeline import reasons_of_registry, reasons_to_train
from m3diff.provenance.dvc import Lock
from m3diff.registry import tracking
from m3diff.settings.load import load_params
from tests import toy
from tests.toy import REPOSITORY


def list_reasons(status: dict[str, Any]) -> list[str]:
    """Return the reasons in DVC's status, without the reason from the registry."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "reasons_of_registry", lambda params: ["unregistered"])
        reasons = reasons_to_train(status, None)
    assert reasons.pop() == "unregistered"
    return reasons


DEPS = "train: changed deps:"


CHANGED = {"params.yaml": {"models.m3diff": "x", "train.seed": "new"}}


@pytest.mark.parametrize(
    ("status", "expected_reasons"),
    [
        ({}, []),
        ({"convert": [{"changed deps": {"components/stages/convert": "modified"}}]}, []),
        ({"train": [{"changed deps": {"code/train.json": "modified", "components/models": "new"}}]}, []),
        ({"train": ["changed command"]}, []),
        ({"code": [{"changed outs": {"data/x": "deleted"}}]}, []),
        ({"train": [{"changed deps": {"data/a": "modified", "components/x": "new"}}]}, [f"{DEPS} data/a modified"]),
        ({"train": ["changed command", {"changed deps": CHANGED}]}, [f"{DEPS} params.yaml models.m3diff, train.seed"]),
        ({"train": [{"changed outs": {"data/05": "deleted"}}]}, ["train: changed outs: data/05 deleted"]),
    ],
)
def test_changed_data_and_parameters_are_reasons_and_changed_code_alone_is_none(status, expected_reasons):
    assert list_reasons(status) == expected_reasons


def test_dvcs_own_words_are_understood_and_how_a_run_is_computed_is_no_reason(trained_once, tmp_path, monkeypatch):
    project = Path(shutil.copytree(trained_once, tmp_path / "toy", symlinks=True))
    monkeypatch.chdir(project)
    assert list_reasons(dvc.status()) == []
    toy.change(project, "compute", workers=7)
    plan = project / "components/stages/convert/stage.py"
    base = project / "data/00_base/config.json"
    plan.write_text(plan.read_text() + "\n# a comment\n")
    assert list_reasons(dvc.status()) == []
    models = yaml.safe_load(Path("params.yaml").read_text())["models"]
    models["m3diff"]["rates"]["llm"] = 0.5
    toy.change(project, "models", **models)
    base.write_text("another base")
    reasons = sorted(list_reasons(dvc.status()))
    base_of_predict = "predict: changed deps: data/00_base modified"
    assert reasons == [base_of_predict, f"{DEPS} data/00_base modified", f"{DEPS} params.yaml models.m3diff"]


@pytest.mark.parametrize(
    ("trained", "newest", "reason"),
    [
        ("data/00_base", None, "no model has been trained yet"),
        (None, None, "no model has been trained yet"),
        ("data/05_model/checkpoint", None, "no version of m3diff is registered yet"),
        ("data/05_model/checkpoint", "older", "the checkpoint of m3diff version 3 is not the one in"),
        ("data/05_model/checkpoint", "here", None),
    ],
)
def test_what_was_trained_and_not_registered_is_a_reason(monkeypatch, tmp_path, trained, newest, reason):
    lock = tmp_path / "dvc.lock"
    entry = {"path": trained, "md5": "here"}
    stages = {"train": {"outs": [entry]}, "predict": {"deps": [entry | {"md5": "older"}]}}
    if trained:
        lock.write_text(yaml.safe_dump({"stages": stages if "model" in trained else {"pretrain": {"outs": [entry]}}}))
    version = newest and SimpleNamespace(version="3", tags={"dvc.checkpoint": newest})
    versions = {} if reason == "no model has been trained yet" else {("client", "m3diff", "challenger"): version}
    monkeypatch.setattr(pipeline, "DVC_LOCK", lock)
    monkeypatch.setattr(pipeline, "Lock", lambda: Lock(lock))
    monkeypatch.setattr(tracking, "connect", lambda uri: contextlib.nullcontext("client"))
    monkeypatch.setattr(pipeline, "find_aliased_version", lambda *arguments: versions[arguments])
    reasons = list(reasons_of_registry(load_params(REPOSITORY / "params.yaml")))
    assert len(reasons) == bool(reason)
    assert all(text.startswith(reason) for text in reasons)
