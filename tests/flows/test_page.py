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
def run_record(tmp_path, monkeypatch) -> RunRecord:
    """Return the record of a run after its evaluation. The current directory has the files of the run."""
    monkeypatch.chdir(tmp_path)
    work = Workspace("0123456789ab", tmp_path, tmp_path / "checkout", "c" * 40, "tree", (), ("runs",))
    scores = PARAMS.paths.report / "headline.json"
    scores.parent.mkdir(parents=True)
    scores.write_text(json.dumps({"d/p": {"CIDEr": 125.04}}))
    ran = {"outcomes": {"train": "Ran", "promote": "Rejected"}, "seconds": {"train": 3725.0, "promote": 1.25}}
    return RunRecord(work, ["new data"], started=0.0, registration=REGISTRATION, decision=decision("refused"), **ran)


@pytest.mark.fault("see")
def test_the_page_has_the_result_reason_duration_and_links_of_the_run(run_record):
    register = PARAMS.register_.model_copy(update={"tracking_uri": "http://127.0.0.1:5000"})
    page = "\n".join(report.page_lines(run_record, PARAMS.model_copy(update={"register_": register})))
    assert page.startswith(f"# Rejected: run `01234567` of commit `{'c' * 12}`")
    for words in (
        "- because new data",
        "started 1970-01-01 00:00:00 UTC, took 1:02:06; branch `runs/0123456789ab`",
        "m version 7 refused: why",
        "| train | Ran | 1:02:05 |\n| promote | Rejected | 0:00:01 |",
        "| d/p | CIDEr | 125.0 |",
        "m version 7, MLflow run `r`",
        "[the version](http://127.0.0.1:5000/#/models/m/versions/7)",
    ):
        assert words in page
    (PARAMS.paths.report / "headline.json").unlink()
    run_record.error = "DvcError: stage train exited with 3"
    run_record.decision = None
    run_record.registration = None
    page = "\n".join(report.page_lines(run_record, PARAMS))
    assert page.startswith("# Failed")
    assert "## Scores" not in page
    assert "DvcError: stage train exited with 3" in page
    assert f"Its worktree is kept: `{run_record.work.root}`" in page


def test_the_page_has_no_link_to_a_version_in_a_store_that_is_no_server(run_record):
    assert PARAMS.register_.tracking_uri.startswith("sqlite:")
    page = "\n".join(report.page_lines(run_record, PARAMS))
    assert "- m version 7, MLflow run `r`" in page
    assert "](" not in page


def test_the_page_names_the_overrides_and_how_the_training_began(run_record):
    run_record.work = run_record.work._replace(overrides=("train.epochs=6", "start from the champion, replay 0.25"))
    lines = list(report.page_lines(run_record, PARAMS))
    assert "- parameter of this run: `train.epochs=6`" in lines
    assert "- start from the champion, replay 0.25" in lines


def test_the_page_has_the_notes_of_the_checks_before_the_run(run_record):
    run_record.notes = ["the data ask other questions"]
    assert "- note: the data ask other questions" in list(report.page_lines(run_record, PARAMS))


CURVES = "step,loss,lr_llm,val_cider\n1,4.0,0.1,\n2,1.0,0.2,0.5\n"


@pytest.fixture
def publish_page(run_record, monkeypatch) -> Callable[[], str]:
    """Return a function that publishes the page of the run and returns its text."""
    pages: list[str] = []
    monkeypatch.setattr(report, "load_params", lambda path: PARAMS)
    monkeypatch.setattr(report, "create_markdown_artifact", lambda markdown, **_: pages.append(markdown))
    monkeypatch.setattr(dvc, "commit", lambda *arguments: None)
    monkeypatch.setattr(report, "publish_branch", lambda work, log: None)
    monkeypatch.setattr(report, "get_run_logger", lambda: SimpleNamespace(info=pytest.fail, warning=pytest.fail))

    def publish() -> str:
        report.publish(run_record, "Run 01234567")
        return pages[-1]

    return publish


def test_the_page_holds_the_training_curves_as_a_picture_with_words(run_record, publish_page):
    PARAMS.paths.model.mkdir(parents=True)
    (PARAMS.paths.model / "curves.csv").write_text(CURVES)
    page = publish_page()
    ((words, data),) = re.findall(r"!\[(.*?)\]\(data:image/svg\+xml;base64,(.*?)\)", page)
    svg = base64.b64decode(data).decode()
    assert svg.startswith("<svg xmlns=")
    assert svg.count('role="img"') == 3
    assert "training: 4 at step 1, 1 at step 2" in words


@pytest.mark.parametrize("outcome", ["Failed", None])
def test_curves_of_an_earlier_training_are_not_those_of_a_run_that_did_not_train(run_record, publish_page, outcome):
    PARAMS.paths.model.mkdir(parents=True)
    (PARAMS.paths.model / "curves.csv").write_text(CURVES)
    run_record.outcomes = {"validate": "Ran"} | ({} if outcome is None else {"train": outcome})
    run_record.seconds = dict.fromkeys(run_record.outcomes, 1.0)
    assert "## Training curves" not in publish_page()


def test_the_page_is_an_artifact_and_committed_unless_all_was_skipped(run_record, monkeypatch):
    actions: list[Any] = []

    def refuse(**artifact: str) -> None:
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(report, "load_params", lambda path: PARAMS)
    monkeypatch.setattr(report, "create_markdown_artifact", lambda **artifact: actions.append(artifact))
    monkeypatch.setattr(dvc, "commit", lambda *arguments: actions.append(arguments))
    monkeypatch.setattr(report, "publish_branch", lambda work, log: actions.append(work.branch))
    monkeypatch.setattr(report, "get_run_logger", lambda: SimpleNamespace(info=pytest.fail, warning=actions.append))
    report.publish(run_record, "Run 01234567")
    artifact, *other_actions = actions
    assert other_actions == [("Report: Run 01234567", ("runs",)), "runs/0123456789ab"]
    assert artifact["key"] == "run-report"
    assert Path("reports/19700101-000000-01234567.md").read_text() == artifact["markdown"] + "\n"
    run_record.outcomes = dict.fromkeys(run_record.outcomes, "Skipped")
    report.publish(run_record, "Run 89abcdef")
    assert len(actions) == 4, "no commit"
    monkeypatch.setattr(report, "create_markdown_artifact", refuse)
    report.publish(run_record, "Run 01234567")
    assert actions[4:] == ["the page of this run could not be stored: ConnectionError: the server is gone"]
