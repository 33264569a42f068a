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
    toy.change(project, "compute", workers=7)
    plan, base = project / "components/stages/convert/stage.py", project / "data/00_base/config.json"
    plan.write_text(plan.read_text() + "\n# a comment\n")
    assert changes(dvc.status()) == []
    models = yaml.safe_load(Path("params.yaml").read_text())["models"]
    models["m3diff"]["rates"]["llm"] = 0.5
    toy.change(project, "models", **models)
    base.write_text("another base")
    assert sorted(changes(dvc.status())) == [
        "train: changed deps: data/00_base modified",
        "train: changed deps: params.yaml models.m3diff",
    ]


@pytest.mark.parametrize(
    ("trained", "newest", "reason"),
    [
        ("data/00_base", None, "nothing was trained yet"),
        (None, None, "nothing was trained yet"),
        ("data/05_model/checkpoint", None, "no version of m3diff is registered yet"),
        ("data/05_model/checkpoint", "older", "m3diff version 3 is another checkpoint than the one in"),
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
    asked = {} if reason == "nothing was trained yet" else {("client", "m3diff", "challenger"): version}
    monkeypatch.setattr(retrain, "LOCK", lock)
    monkeypatch.setattr(retrain, "Lock", lambda: Lock(lock))
    monkeypatch.setattr(retrain.tracking, "connected", lambda uri: contextlib.nullcontext("client"))
    monkeypatch.setattr(retrain, "find_alias", lambda *arguments: asked[arguments])
    found = list(unregistered(load_params(toy.REPOSITORY / "params.yaml")))
    assert len(found) == bool(reason)
    assert all(text.startswith(reason) for text in found)
