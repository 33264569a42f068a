"""When the schedule trains again: on changed data or parameters, and on what was never registered."""

from components.params import load_params
from flows import dvc
from flows.retrain import changes, unregistered
from tests import toy


def test_nothing_out_of_date_is_no_reason():
    assert list(changes({})) == []


def test_changed_code_alone_is_no_reason():
    status = {
        "convert": [{"changed deps": {"components/convert": "modified"}}],
        "train": [{"changed deps": {"components/model": "modified"}}],
    }
    assert list(changes(status)) == []
    assert list(changes({"train": ["changed command"]})) == []


def test_a_changed_parameter_and_changed_data_are_named():
    status = {
        "ingest": [{"changed deps": {"data/01_raw": "modified", "components/ingest": "modified"}}],
        "train": [
            {"changed deps": {"params.yaml": {"train.lr": "modified"}}},
            {"changed outs": {"data/05_model/checkpoint": "deleted"}},
        ],
    }
    assert list(changes(status)) == [
        "ingest: changed deps: data/01_raw modified",
        "train: changed deps: params.yaml train.lr",
        "train: changed outs: data/05_model/checkpoint deleted",
    ]


def test_dvcs_own_words_for_a_changed_parameter_are_understood(project):
    toy.run(project, "dvc", "repro", "-q")
    assert list(changes(dvc.status())) == []
    params = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(params.replace("  seed: 7407", "  seed: 7408"))
    (reason,) = changes(dvc.status())
    assert reason.startswith("train: changed deps: params.yaml train")


def test_what_was_trained_and_not_registered_is_a_reason(project):
    assert list(unregistered(load_params())) == ["nothing was trained yet"]
    toy.run(project, "dvc", "repro", "-q")
    assert list(unregistered(load_params())) == ["no version of m3diff is registered yet"]
