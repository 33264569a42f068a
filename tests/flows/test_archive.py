"""A run's outputs are in the remote before anything points to them, and on its branch, where a later run finds them."""

import shutil
from pathlib import Path

import pytest
import yaml

from flows import archive, dvc
from flows.workspace import workspace
from m3diff.provenance.git import git
from m3diff.settings.section import ParamsError
from tests import toy


@pytest.fixture
def remote(project: Path, tmp_path: Path) -> Path:
    """A folder that is the default DVC remote of the project, in which one dataset was drawn."""
    folder = tmp_path / "remote"
    folder.mkdir()
    toy.run(project, "dvc", "remote", "add", "-d", "store", str(folder))
    toy.run(project, "dvc", "repro", "-q", "synthesize@minichange")
    return folder


def objects(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


@pytest.mark.slow(20)
def test_what_was_sent_is_not_sent_again_until_something_new_is_there_and_without_a_remote_nothing_is(project, remote):
    assert archive.push() == ("Ran", "remote 'store' has all of it, 1 new")
    sent = objects(remote)
    assert sent >= 8
    assert archive.push()[0] == "Skipped"
    (project / "mine.csv").write_text("before,after\n")
    toy.run(project, "dvc", "add", "-q", "mine.csv")
    git("add", "mine.csv.dvc")
    assert archive.push()[0] == "Ran"
    assert objects(remote) == sent + 1
    toy.run(project, "dvc", "remote", "default", "--unset")
    assert archive.push() == ("Skipped", archive.NO_REMOTE)
    archive.check_remote()


@pytest.mark.fault("21")
def test_what_the_remote_does_not_have_after_the_push_is_an_error(project, remote, monkeypatch):
    push = dvc.push

    def loses(hashes: object, name: str) -> None:
        push(hashes, name)
        next(path for path in remote.rglob("*") if path.is_file() and path.suffix != ".dir").unlink()

    monkeypatch.setattr(dvc, "push", loses)
    with pytest.raises(archive.NotPushedError, match="remote 'store' is missing 1 file.*data/01_raw/minichange/"):
        archive.push()


@pytest.mark.slow(30)
@pytest.mark.fault("21")
def test_a_push_that_broke_off_is_tried_again_and_a_remote_out_of_reach_is_seen_before_anything_runs(project, remote):
    sealed = remote / "files"
    sealed.write_text("no folder")
    with pytest.raises(archive.NotPushedError, match="remote 'store': dvc .*exited"):
        archive.push()
    assert issubclass(archive.NotPushedError, ConnectionError)
    sealed.unlink()
    assert archive.push()[0] == "Ran"
    toy.run(project, "dvc", "repro", "-q", "validate")
    archive.check_remote()
    toy.run(project, "dvc", "remote", "modify", "store", "url", "ssh://nobody@127.0.0.1:1/nowhere")
    with pytest.raises(ParamsError, match="remote 'store' does not answer"):
        archive.check_remote()


def test_the_commit_holds_the_lock_and_the_metrics_and_no_folder_of_the_checkout(project, tmp_path):
    (project / ".gitignore").write_text((project / ".gitignore").read_text().replace("/runs\n", "/runs/\n"))
    (project / "runs").symlink_to(tmp_path)
    toy.run(project, "dvc", "repro", "-q", "ingest@minichange")
    commit = archive.commit("what ran", ("runs",))
    assert commit == git("rev-parse", "HEAD")
    named = git("show", "--name-only", "--format=%s").split("\n")
    assert named[0] == "what ran"
    assert {"dvc.lock", "data/02_records/minichange.json"} <= set(named)
    assert "runs" not in named
    assert git("rev-parse", "HEAD^") != archive.commit("nothing new", ("runs",))
    archive.commit("nothing shared", ())
    assert git("log", "-1", "--format=%s") == "nothing shared"


@pytest.mark.fault("T5")
def test_the_branch_goes_to_the_git_remote_that_is_named_for_it_by_a_path_that_is_meant_from_the_checkout(
    project, tmp_path
):
    said: list[str] = []
    git("init", "--quiet", "--bare", str(tmp_path / "origin"))
    git("remote", "add", "origin", "../origin")
    with workspace("one", "HEAD", [], False):
        archive.publish("runs/one", said.append)
        assert git("ls-remote", str(tmp_path / "origin")) == "", "no remote is named"
        git("config", "m3diff.runs", "origin")
        archive.publish("runs/one", said.append)
    assert git("ls-remote", str(tmp_path / "origin")).split()[1] == "refs/heads/runs/one"
    assert said == []
    shutil.rmtree(tmp_path / "origin")
    archive.publish("runs/one", said.append)
    assert "runs/one was not pushed to origin" in said[0]


@pytest.mark.slow(10)
def test_each_output_is_in_the_remote_that_it_names_and_one_that_is_not_to_be_pushed_in_none(project, remote, tmp_path):
    other = tmp_path / "second"
    toy.run(project, "dvc", "remote", "add", "other", str(other))
    for name, more in (("mine", {"remote": "other"}), ("secret", {"push": False})):
        (project / f"{name}.csv").write_text(f"{name}\n")
        toy.run(project, "dvc", "add", "-q", f"{name}.csv")
        file = project / f"{name}.csv.dvc"
        entry = yaml.safe_load(file.read_text())
        entry["outs"][0] |= more
        file.write_text(yaml.safe_dump(entry))
    assert archive.push() == ("Ran", "remote 'other' has all of it, 1 new, remote 'store' has all of it, 1 new")
    assert objects(other) == 1
    assert "secret\n" not in {path.read_text(errors="replace") for path in remote.rglob("*") if path.is_file()}
    assert archive.push()[0] == "Skipped"


@pytest.mark.fault("21", "T5")
@pytest.mark.slow(10)
def test_what_the_remote_lost_since_it_was_pushed_is_sent_again(project, remote):
    archive.push()
    lost = sorted(path for path in remote.rglob("*") if path.is_file())
    kept = {path: path.read_bytes() for path in lost}
    for gone in (lost[:1], [path for path in lost if path.suffix == ".dir"], lost):
        for path in gone:
            path.chmod(0o644)
            path.unlink()
        assert archive.push()[0] == "Ran"
        assert {path: path.read_bytes() for path in remote.rglob("*") if path.is_file()} == kept
    assert archive.push()[0] == "Skipped"


# What a later run takes up


def latest() -> str:
    """Commit what is here to the branch of the latest run, as a flow does; the commit."""
    git("switch", "--quiet", "--create", "runs/first")
    git("add", "--all")
    git("commit", "--quiet", "--allow-empty", "--message", "Run first")
    git("update-ref", f"refs/heads/{archive.LATEST}", "HEAD")
    git("switch", "--quiet", "-")
    git("branch", "--quiet", "-D", "runs/first")
    return git("rev-parse", archive.LATEST)


@pytest.fixture
def ran(trained_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The commit of a whole run; the `dvc.lock` of the current directory has none of it."""
    shutil.copytree(trained_once, tmp_path / "toy", symlinks=True)
    monkeypatch.chdir(tmp_path / "toy")
    return latest()


def test_the_entries_of_the_latest_run_make_its_stages_current_to_the_byte_and_its_lock_is_taken_whole(ran):
    before, lock = dvc.status(), git("show", f"{ran}:dvc.lock") + "\n"
    assert {"validate", "train"} <= set(before)
    assert archive.take_up(before)
    assert dvc.status() == {}
    assert Path("dvc.lock").read_text() == lock
    git("reset", "--quiet", "--hard")
    shutil.rmtree("data")
    git("checkout", "--", "data")
    assert not dvc.is_current()
    assert archive.take_over()
    assert Path("dvc.lock").read_text() == lock
    assert Path("data/07_report/metrics.json").is_file()
    assert not Path("data/07_report/report.html").exists(), "data are not needed for it"
    assert dvc.is_current()
    shutil.rmtree("code")
    git("commit", "--quiet", "--all", "--message", "a run whose stage was killed")
    assert not dvc.is_current(), "DVC alone passes over a folder that is missing"


def test_nothing_is_taken_over_where_work_is_left_and_a_stage_that_reads_something_else_is_not_made_current(ran):
    toy.change(Path(), "validate", max_caption_chars=99)
    toy.commit(Path(), "another parameter")
    lock = Path("dvc.lock").read_bytes()
    assert not archive.take_over()
    assert Path("dvc.lock").read_bytes() == lock
    assert git("status", "--porcelain") == ""
    assert archive.take_up(dvc.status())
    assert "validate" in dvc.status()
    assert "ingest@minichange" not in dvc.status()


def test_of_stages_that_are_current_the_own_entry_stays(ran):
    entry = yaml.safe_load(git("show", f"{ran}:dvc.lock"))["stages"]["synthesize@minichange"] | {"cmd": "told apart"}
    Path("dvc.lock").write_text(yaml.safe_dump({"schema": "2.0", "stages": {"synthesize@minichange": entry}}))
    assert archive.take_up({"validate": []})
    stages = yaml.safe_load(Path("dvc.lock").read_text())["stages"]
    assert stages["synthesize@minichange"]["cmd"] == "told apart"
    assert "validate" in stages
    assert "ingest@minichange" not in stages


def test_without_a_latest_run_with_a_whole_lock_and_news_in_it_nothing_is_taken_up(project):
    lock = Path("dvc.lock").read_bytes()
    for text in (None, lock, b"", lock[: len(lock) // 2 + 3]):
        if text is not None:
            Path("dvc.lock").write_bytes(text)
            latest()
            Path("dvc.lock").write_bytes(lock)
        assert not archive.take_up(["validate"])
        assert not archive.take_over()
        assert Path("dvc.lock").read_bytes() == lock
