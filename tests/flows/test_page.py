"""The page of a flow run."""

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import dvc, report
from flows.report import RunRecord
from flows.workspace import Workspace
from m3diff.settings.load import load_params
from tests.flows.conftest import REGISTRATION, decision
from tests.toy import REPOSITORY

PARAMS = load_params(REPOSITORY / "params.yaml")


@pytest.fixture
def done(tmp_path, monkeypatch) -> RunRecord:
    """A run that was evaluated; the current directory holds its files."""
    monkeypatch.chdir(tmp_path)
    work = Workspace("0123456789ab", tmp_path, tmp_path / "checkout", "c" * 40, "tree", (), ("runs",))
    scores = PARAMS.paths.report / "headline.json"
    scores.parent.mkdir(parents=True)
    scores.write_text(json.dumps({"d/p": {"CIDEr": 125.04}}))
    ran = {"outcomes": {"train": "Ran", "promote": "Rejected"}, "seconds": {"train": 3725.0, "promote": 1.25}}
    return RunRecord(work, ["new data"], started=0.0, registration=REGISTRATION, decision=decision("refused"), **ran)


@pytest.mark.fault("see")
def test_the_page_says_what_came_out_why_it_ran_how_long_it_took_and_where_to_look(done):
    served = PARAMS.register_.model_copy(update={"tracking_uri": "http://127.0.0.1:5000"})
    found = "\n".join(report.page_lines(done, PARAMS.model_copy(update={"register_": served})))
    assert found.startswith(f"# Rejected: run `01234567` of commit `{'c' * 12}`")
    for words in (
        "- because new data",
        "began 1970-01-01 00:00:00 UTC, took 1:02:06; branch `runs/0123456789ab`",
        "m version 7 refused: why",
        "| train | Ran | 1:02:05 |\n| promote | Rejected | 0:00:01 |",
        "| d/p | CIDEr | 125.0 |",
        "m version 7, MLflow run `r`",
        "[the version](http://127.0.0.1:5000/#/models/m/versions/7)",
    ):
        assert words in found
    (PARAMS.paths.report / "headline.json").unlink()
    done.error = "DvcError: stage train exited with 3"
    done.decision = None
    done.registration = None
    found = "\n".join(report.page_lines(done, PARAMS))
    assert found.startswith("# Failed")
    assert "## Scores" not in found
    assert "DvcError: stage train exited with 3" in found
    assert f"Its worktree is kept: `{done.work.root}`" in found


def test_the_page_names_the_overrides_and_how_the_training_began(done):
    done.work = done.work._replace(overrides=("train.epochs=6", "start from the champion, replay 0.25"))
    lines = list(report.page_lines(done, PARAMS))
    assert "- parameter of this run: `train.epochs=6`" in lines
    assert "- start from the champion, replay 0.25" in lines


CURVES = "step,loss,lr_llm,val_cider\n1,4.0,0.1,\n2,1.0,0.2,0.5\n"


@pytest.fixture
def published(done, monkeypatch) -> Callable[[], str]:
    """Publish the page of the run and give it back."""
    pages: list[str] = []
    monkeypatch.setattr(report, "load_params", lambda path: PARAMS)
    monkeypatch.setattr(report, "create_markdown_artifact", lambda markdown, **_: pages.append(markdown))
    monkeypatch.setattr(dvc, "commit", lambda *given: None)
    monkeypatch.setattr(report, "publish_branch", lambda work, log: None)
    monkeypatch.setattr(report, "get_run_logger", lambda: SimpleNamespace(info=pytest.fail, warning=pytest.fail))

    def publish() -> str:
        report.publish(done, "Run 01234567")
        return pages[-1]

    return publish


def test_the_page_holds_the_training_curves_as_a_picture_with_words(done, published):
    PARAMS.paths.model.mkdir(parents=True)
    (PARAMS.paths.model / "curves.csv").write_text(CURVES)
    page = published()
    ((words, data),) = re.findall(r"!\[(.*?)\]\(data:image/svg\+xml;base64,(.*?)\)", page)
    svg = base64.b64decode(data).decode()
    assert svg.startswith("<svg xmlns=")
    assert svg.count('role="img"') == 3
    assert "training: 4 at step 1, 1 at step 2" in words


@pytest.mark.parametrize("outcome", ["Failed", None])
def test_curves_of_an_earlier_training_are_not_those_of_a_run_that_did_not_train(done, published, outcome):
    PARAMS.paths.model.mkdir(parents=True)
    (PARAMS.paths.model / "curves.csv").write_text(CURVES)
    done.outcomes = {"validate": "Ran"} | ({} if outcome is None else {"train": outcome})
    done.seconds = dict.fromkeys(done.outcomes, 1.0)
    assert "## Training curves" not in published()


def test_the_page_is_an_artifact_and_where_the_run_made_something_a_commit(done, monkeypatch):
    kept: list[Any] = []

    def refuse(**artifact: str) -> None:
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(report, "load_params", lambda path: PARAMS)
    monkeypatch.setattr(report, "create_markdown_artifact", lambda **artifact: kept.append(artifact))
    monkeypatch.setattr(dvc, "commit", lambda *given: kept.append(given))
    monkeypatch.setattr(report, "publish_branch", lambda work, log: kept.append(work.branch))
    monkeypatch.setattr(report, "get_run_logger", lambda: SimpleNamespace(info=pytest.fail, warning=kept.append))
    report.publish(done, "Run 01234567")
    artifact, *others = kept
    assert others == [("Report: Run 01234567", ("runs",)), "runs/0123456789ab"]
    assert artifact["key"] == "run-report"
    assert Path("reports/19700101-000000-01234567.md").read_text() == artifact["markdown"] + "\n"
    done.outcomes = dict.fromkeys(done.outcomes, "Skipped")
    report.publish(done, "Run 89abcdef")
    assert len(kept) == 4, "no commit"
    monkeypatch.setattr(report, "create_markdown_artifact", refuse)
    report.publish(done, "Run 01234567")
    assert kept[4:] == ["the page of this run could not be stored: ConnectionError: the server is gone"]
