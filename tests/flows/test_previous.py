"""What a later run takes up of an earlier one, and of which."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from flows import dvc, previous
from m3diff.provenance.git import git
from tests import toy


def run_branch(name: str, tree: str, overrides: str = "") -> str:
    """Commit what lies here to the branch of a flow run, as a flow does; the commit."""
    trailers = [f"Tree: {tree}", *([f"Overrides: {overrides}"] if overrides else [])]
    git("switch", "--quiet", "--create", f"runs/{name}")
    git("add", "--all")
    git("commit", "--quiet", "--allow-empty", "--message", "\n".join([f"Run {name}", "", *trailers]))
    commit = git("rev-parse", "HEAD")
    git("switch", "--quiet", "-")
    return commit


@pytest.fixture
def ran(project: Path, kept: Callable[[Path, Callable[[], None]], None]) -> str:
    """The commit of a run that made data and clean records; the checkout has none of it in its `dvc.lock`."""
    kept(project, lambda: run_to_validate(project))
    return git("rev-parse", "runs/first")


def run_to_validate(project: Path) -> None:
    made = list(dvc.stages())[:8]
    assert made[-1] == "validate"
    toy.run(project, "dvc", "repro", "-q", *made)
    run_branch("first", git("rev-parse", "HEAD^{tree}"))


@pytest.mark.slow(25)
def test_the_entries_of_an_earlier_run_make_its_stages_current_to_the_byte(project, ran):
    before = dvc.status()
    assert "validate" in before
    assert previous.take_up("the same", before)
    assert set(dvc.status()) == {"convert", "train", "predict", "evaluate"}
    assert Path("dvc.lock").read_text() == git("show", f"{ran}:dvc.lock") + "\n"
    assert Path("data/03_clean/report.json").is_file()


@pytest.mark.slow(30)
def test_the_lock_of_an_earlier_run_is_taken_whole_where_nothing_is_left_to_do_then(project):
    toy.run(project, "dvc", "repro", "-q")
    ran = run_branch("first", "the tree")
    shutil.rmtree(project / "data")
    git("checkout", "--", "data")
    assert not dvc.is_current()
    assert previous.take_over("the tree")
    assert Path("dvc.lock").read_text() == git("show", f"{ran}:dvc.lock") + "\n"
    assert Path("data/07_report/metrics.json").is_file()
    assert not Path("data/07_report/report.html").exists(), "data are not needed for it"
    assert dvc.is_current()
    shutil.rmtree("code")
    git("commit", "--quiet", "--all", "--message", "a run whose stage was killed")
    assert not dvc.is_current(), "DVC alone passes over a folder that is missing"


def test_where_something_is_left_to_do_nothing_is_taken_over(project, ran):
    lock = Path("dvc.lock").read_bytes()
    assert not previous.take_over(git("rev-parse", "HEAD^{tree}"))
    assert Path("dvc.lock").read_bytes() == lock
    assert git("status", "--porcelain") == ""


def test_of_stages_that_are_current_the_own_entry_stays(project, ran):
    toy.run(project, "dvc", "repro", "-q", "synthesize@minichange")
    lock = yaml.safe_load(Path("dvc.lock").read_text())
    lock["stages"]["synthesize@minichange"]["cmd"] = "told apart"
    Path("dvc.lock").write_text(yaml.safe_dump(lock))
    assert previous.take_up("the same", {"validate": []})
    stages = yaml.safe_load(Path("dvc.lock").read_text())["stages"]
    assert stages["synthesize@minichange"]["cmd"] == "told apart"
    assert "validate" in stages
    assert "ingest@minichange" not in stages


def test_a_stage_that_reads_something_else_now_is_not_made_current(project, ran):
    values = yaml.safe_load(Path("params.yaml").read_text())
    values["validate"]["max_caption_chars"] = 99
    Path("params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    assert previous.take_up("another", dvc.status())
    assert "validate" in dvc.status()
    assert "ingest@minichange" not in dvc.status()


def test_without_an_earlier_run_or_news_in_it_nothing_is_taken_up(project):
    lock = Path("dvc.lock").read_bytes()
    assert not previous.take_up("any", ["validate"])
    run_branch("first", "any")
    assert not previous.take_up("any", ["validate"])
    assert Path("dvc.lock").read_bytes() == lock


def test_the_newest_run_of_the_same_content_comes_first_then_the_newest_without_parameters_of_its_own(
    project, monkeypatch
):
    commits = {}
    runs = [("a", "t1", ""), ("b", "t1", ""), ("c", "t2", ""), ("d", "t3", "train.epochs=6")]
    for second, (name, tree, overrides) in enumerate(runs):
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2026-01-01T00:00:{second:02}Z")
        commits[name] = run_branch(name, tree, overrides)
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-01-01T00:01:00Z")
    run_branch("history", "t1")
    git("branch", "runs/empty")
    assert previous.best("t1") == commits["b"]
    assert previous.best("t3") == commits["d"]
    assert previous.best("unseen") == commits["c"]
    assert [run["commit"] for run in previous.list_runs()] == [commits[name] for name in "dcba"]
