"""The page of a run, read; and that a page which cannot be written fails no run."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows import archive, report
from flows.report import Done
from flows.workspace import Workspace
from m3diff.settings.load import load_params
from m3diff.stages.register.stage import Registration
from tests.flows.test_pipeline import decision
from tests.toy import REPOSITORY

PARAMS = load_params(REPOSITORY / "params.yaml")


@pytest.fixture
def done(tmp_path, monkeypatch) -> Done:
    """A run that was evaluated; the current directory holds its files."""
    monkeypatch.chdir(tmp_path)
    work = Workspace("0123456789ab", tmp_path, tmp_path / "checkout", "c" * 40, "tree", (), ("runs",))
    metrics = PARAMS.paths.report / "metrics.json"
    metrics.parent.mkdir(parents=True)
    metrics.write_text(json.dumps({"protocols": {"d/p": {"CIDEr": 1.25, "METEOR": None}}}))
    return Done(
        work,
        ["new data"],
        started=0.0,
        outcomes={"train": "Ran", "promote": "Rejected"},
        seconds={"train": 3725.0, "promote": 1.25},
        registration=Registration(outcome="registered", model="m", version=7, run_id="r1"),
        decision=decision("refused"),
    )


def text(done: Done, champion: dict[str, float] | None = None, uri: str = PARAMS.register_.tracking_uri) -> str:
    params = PARAMS.model_copy(update={"register_": PARAMS.register_.model_copy(update={"tracking_uri": uri})})
    return "\n".join(report.page(done, params, champion or {}))


@pytest.mark.fault("see")
def test_the_page_says_what_came_out_why_it_ran_how_long_it_took_and_where_to_look(done):
    found = text(done, {"d/p/CIDEr": 1.3}, "http://127.0.0.1:5000")
    assert found.startswith(f"# Rejected: run `01234567` of commit `{'c' * 12}`")
    for words in (
        "- because new data",
        "began 1970-01-01 00:00:00 UTC, took 1 h 02 min; branch `runs/0123456789ab`",
        "m version 7 refused: why",
        "| train | Ran | 1 h 02 min |\n| promote | Rejected | 1.2 s |",
        "| d/p | CIDEr | 125.0 | 130.0 |",
        "m version 7, MLflow run `r1`",
        "[the version](http://127.0.0.1:5000/#/models/m/versions/7)",
    ):
        assert words in found
    assert "METEOR" not in found
    assert "| d/p | CIDEr | 125.0 |  |" in text(done), "without a champion"
    (PARAMS.paths.report / "metrics.json").unlink()
    assert "## Scores" not in text(done)
    done.error, done.decision, done.registration = "DvcError: stage train exited with 3", None, None
    found = text(done)
    assert found.startswith("# Failed")
    assert "DvcError: stage train exited with 3" in found
    assert f"Its worktree is kept: `{done.work.root}`" in found


@pytest.fixture
def kept(monkeypatch) -> dict[str, list]:
    """Where the page went."""
    kept: dict[str, list] = {"artifact": [], "commit": [], "branch": [], "log": []}
    monkeypatch.setattr(report, "load_params", lambda path: PARAMS)
    monkeypatch.setattr(report, "champion_scores", lambda done, params: {})
    monkeypatch.setattr(report, "create_markdown_artifact", lambda **artifact: kept["artifact"].append(artifact))
    monkeypatch.setattr(archive, "commit", lambda message, links: kept["commit"].append((message, links)))
    monkeypatch.setattr(archive, "publish", lambda branch, log: kept["branch"].append(branch))
    logger = SimpleNamespace(info=kept["log"].append, warning=kept["log"].append)
    monkeypatch.setattr(report, "get_run_logger", lambda: logger)
    return kept


def test_the_page_is_an_artifact_a_file_of_the_checkout_and_where_the_run_made_something_a_commit(done, kept):
    report.publish(done, "Run 01234567")
    (artifact,) = kept["artifact"]
    assert artifact["key"] == "run-report"
    (file,) = (done.work.checkout / "runs/reports").iterdir()
    assert file.name == "19700101-000000-01234567.md"
    assert file.read_text() == artifact["markdown"] + "\n" == Path("reports", file.name).read_text()
    done.outcomes = dict.fromkeys(done.outcomes, "Skipped")
    report.publish(done, "Run 89abcdef")
    assert len(kept["artifact"]) == 2
    assert kept["commit"] == [("Report: Run 01234567", ("runs",))]
    assert (kept["branch"], kept["log"]) == (["runs/0123456789ab"], [])


def test_a_page_that_cannot_be_kept_is_a_warning(done, kept, monkeypatch):
    def refuses(**artifact: str) -> None:
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(report, "create_markdown_artifact", refuses)
    report.publish(done, "Run 01234567")
    assert kept["log"] == ["the page of this run could not be kept: ConnectionError: the server is gone"]


def test_a_duration_is_told_as_people_do():
    told = {0.04: "0.0 s", 59.94: "59.9 s", 200: "3 min 20 s", 3599: "59 min 59 s", 7260: "2 h 01 min"}
    assert {seconds: report.duration(seconds) for seconds in told} == told
