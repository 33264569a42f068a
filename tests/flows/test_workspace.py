"""The worktree of a flow run is at one commit, links the data, and is removed after a success."""

import os
import shutil
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from flows import dvc
from flows.workspace import (
    DATA_BRANCH,
    FLOWS_FOLDER,
    hold_lock,
    remove_old_worktrees,
    uncommitted_error,
)
from m3diff.provenance.git import git, has_branch
from m3diff.registry import tracking
from m3diff.settings.section import ParamsError
from tests import toy
from tests.errors import raises
from tests.flows.conftest import opened, worktrees


def trained_by() -> dict:
    return yaml.safe_load(Path("params.yaml").read_text())["train"]


@pytest.mark.fault("B1", "S4")
def test_a_run_has_a_worktree_of_its_commit_without_later_edits_then_none(project):
    with opened() as work:
        assert Path.cwd() == work.root == project / FLOWS_FOLDER / "one"
        assert git("rev-parse", "HEAD") == work.commit == git("rev-parse", "HEAD", cwd=project)
        assert git("branch", "--show-current") == work.branch == "runs/one"
        assert work.tree == git("rev-parse", "HEAD^{tree}", cwd=project)
        assert git("status", "--porcelain") == ""
        for name in ("params.yaml", "components/records/files.py"):
            (project / name).write_text("half typ")
            assert "half typ" not in Path(name).read_text()
        Path("dvc.lock").write_text("the run's")
    assert Path.cwd() == project
    assert worktrees() == []
    assert has_branch("runs/one")
    assert not [*(project / FLOWS_FOLDER).glob("one*")]
    assert (project / "params.yaml").read_text() == "half typ"
    assert "the run's" not in (project / "dvc.lock").read_text()


@pytest.mark.fault("B1")
def test_uncommitted_files_that_decide_a_run_are_refused_and_others_are_not(project):
    (project / "notes.txt").write_text("mine")
    (project / "dvc.lock").write_text((project / "dvc.lock").read_text() + "\n# mine\n")
    with opened("before") as work:
        assert "mine" not in Path("dvc.lock").read_text()
        assert not Path("notes.txt").exists()
    assert work.commit == git("rev-parse", "HEAD")
    for file in ("params.yaml", "components/records/files.py", "profiles/new.yaml", "data/raw/mine.dvc"):
        (project / file).parent.mkdir(parents=True, exist_ok=True)
        with (project / file).open("a") as opened_file:
            opened_file.write("\n# new\n")
        with raises(ParamsError, "flows.not_committed", names=[file]), opened():
            pytest.fail("it began")
        git("add", file)
        git("stash", "--quiet")
        assert worktrees() == []
        assert not has_branch("runs/one")


def test_what_is_not_committed_is_refused_with_the_command_that_commits_it(project):
    (project / "profiles/my profile.yaml").write_text("extends: embedded\n")
    toy.change(project, "train", seed=3)
    with raises(ParamsError, "flows.not_committed") as refused, opened():
        pytest.fail("it began")
    command = refused.value.fields["command"]
    assert command in str(refused.value)
    person = 'git() { command git -c user.name=toy -c user.email=toy@localhost "$@"; }'
    subprocess.run(["bash", "-c", f"{person}; {command} --quiet --message mine"], check=True)
    with opened() as work:
        assert Path("profiles/my profile.yaml").is_file()
        assert trained_by()["seed"] == 3
    assert work.commit == git("rev-parse", "HEAD")


@pytest.mark.parametrize("count", [1, 5, 6, 40])
def test_a_refusal_names_five_files_at_most_and_commits_all(count):
    error = uncommitted_error([f"profiles/{number}.yaml" for number in range(count)])
    assert len(error.fields["names"]) == min(count, 5)
    assert ("git add --all" in error.fields["command"]) == (count > 5)
    assert "\n" not in str(error)


def test_a_named_commit_runs_without_what_is_not_committed(project):
    first_commit = git("rev-parse", "HEAD")
    toy.change(project, "train", seed=2)
    toy.commit(project, "second")
    head = git("rev-parse", "HEAD")
    toy.change(project, "train", seed=3)
    for name, ref, seed, commit in (("a", "HEAD", 2, head), ("b", first_commit[:9], 7407, first_commit)):
        with opened(name, ref) as work:
            assert trained_by()["seed"] == seed
            assert work.commit == commit
    with raises(ParamsError, "flows.no_such_ref", key="ref", value="nowhere"), opened("c", "nowhere"):
        pytest.fail("it began")


def test_data_come_by_link_from_the_checkouts_cache_and_scratch_is_shared(project):
    toy.run(project, "dvc", "repro", "-q", "synthesize@minichange")
    toy.commit(project, "drawn")
    with opened() as work:
        assert not Path("data/01_raw/minichange").exists(), "nothing needs it yet"
        dvc.link_data()
        (image,) = Path("data/01_raw/minichange/images").glob("0.png")
        assert image.read_bytes() == (project / image).read_bytes()
        inodes = {file.stat().st_ino for file in (project / ".dvc/cache").rglob("*") if file.is_file()}
        assert image.stat().st_ino in inodes
        Path("runs/kept").write_text("a checkpoint")
        assert set(work.links) == {"runs", "services/mlflow"}
        assert git("status", "--porcelain") == ""
    assert (project / "runs/kept").read_text() == "a checkpoint"


REMOTES = {
    "folder": "url = ../../store",
    "here": "url = 'store, with a comma'",
    "absolute": "url = /mnt/Ümläut 'x'",
    "aws": "url = s3://bucket/dvc\n credentialpath = ../keys/aws\n ssl_verify = certs/ca.pem",
    "login": "url = ssh://user@host:22/dvc\n keyfile = ../keys/id\n port = 22",
    "dav": "url = webdavs://host/dvc\n cert_path = ../certs/me.pem\n key_path = ../me.key\n ssl_verify = false",
    "part": "url = remote://folder/sub",
}


@pytest.mark.fault("T5")
@pytest.mark.parametrize("files", [("config",), ("config.local",), ("config", "config.local")])
def test_every_setting_of_a_remote_means_in_a_run_what_it_means_in_the_checkout(project, files):
    (project / "certs").mkdir()
    (project / "certs" / "ca.pem").write_text("uncommitted")
    text = "".join(f"['remote \"{name}\"']\n {options}\n" for name, options in REMOTES.items())
    for name in files:
        with (project / ".dvc" / name).open("a", encoding="utf-8") as opened_file:
            opened_file.write(f"\n{text}")
    with (project / ".dvc" / "config.local").open("a", encoding="utf-8") as opened_file:
        opened_file.write("[cache]\n    dir = '../Ümläut, 空白'\n    slow_link_warning = false\n")
    toy.commit(project, "remotes")
    with dvc.repository() as repo:
        meant = repo.config["remote"]
        cache = repo.cache.local_cache_dir
    with opened(ref="HEAD"), dvc.repository() as repo:
        settings = repo.config["remote"]
        assert settings["aws"].pop("ssl_verify") == str(project / "certs" / "ca.pem")
        assert meant["aws"].pop("ssl_verify") == "certs/ca.pem"
        assert settings == meant
        assert repo.cache.local_cache_dir == cache
        assert repo.config["cache"]["slow_link_warning"] is False
        assert Path(repo.config["core"]["site_cache_dir"]).is_relative_to(Path.cwd())


def test_a_retry_works_though_git_was_killed_when_it_added_the_worktree(project):
    root = project / "runs/flows/killed"
    git("worktree", "add", "--quiet", "--lock", "--reason", "initializing", "--detach", str(root), "HEAD")
    shutil.rmtree(root)
    with opened("killed") as work:
        assert work.root == root
    assert worktrees() == []


@pytest.mark.fault("T5")
@pytest.mark.parametrize("uri", ["sqlite:///mlflow.db", "sqlite:///data/store.db", "sqlite:///../beside/mlflow.db"])
def test_a_relative_store_or_scratch_folder_is_the_checkouts_wherever_it_lies(project, uri):
    toy.change(project, "register", tracking_uri=uri)
    toy.change(project, "compute", scratch="../scratch")
    toy.commit(project, "places")
    meant = tracking.resolve_uri(uri)
    for name in ("one", "two"):  # the second finds the links of the first outside its worktree
        with opened(name):
            assert tracking.resolve_uri(uri) == meant
            (Path("../scratch") / name).write_text("a checkpoint")
            assert (project.parent / "scratch" / name).is_file()


@pytest.mark.fault("T5")
def test_a_failed_runs_worktree_stays_for_a_week_and_a_sweep_takes_only_such(project):
    with pytest.raises(RuntimeError, match="failed"), opened() as work:
        raise RuntimeError("it failed")
    flows = project / FLOWS_FOLDER
    other_folder = flows / "dvc-store" / "files"
    own_worktree = flows / "mine"
    link = flows / "link"
    other_folder.mkdir(parents=True)
    git("worktree", "add", "--quiet", "--detach", str(own_worktree), "HEAD")
    link.symlink_to(project / "components")
    for name in ("link", "dvc-store"):
        (flows / f"{name}.lock").touch()
    for path in (other_folder.parent, own_worktree, project / "components"):
        os.utime(path, (0, 0))
    remove_old_worktrees(flows)
    assert work.root.is_dir()
    old = time.time() - 8 * 86400
    os.utime(work.root, (old, old))
    with hold_lock(flows / "one.lock"):
        remove_old_worktrees(flows)
        assert work.root.is_dir(), "its process still lives"
    remove_old_worktrees(flows)
    assert worktrees() == [str(own_worktree)]
    assert not work.root.exists()
    assert all((other_folder.is_dir(), (own_worktree / ".git").is_file(), link.is_symlink()))


@pytest.mark.fault("04")
def test_a_repeated_run_goes_on_from_its_branch_and_without_one_begins_anew(project):
    root = project / FLOWS_FOLDER / "one"
    root.parent.mkdir(parents=True)
    git("worktree", "add", "--quiet", "--detach", str(root), "HEAD")
    (root / "params.yaml").write_text("half written")
    with opened(overrides=["train.epochs=6"]):
        assert trained_by()["epochs"] == 6
        Path("done.txt").write_text("first stages")
        git("add", "done.txt")
        git("commit", "-q", "-m", "what was done")
    toy.change(project, "train", seed=3)
    toy.commit(project, "meanwhile")
    with opened(overrides=["train.epochs=6"]):
        assert trained_by()["seed"] == 7407
        assert trained_by()["epochs"] == 6
        assert Path("done.txt").read_text() == "first stages"


def written(project: Path, **files: str) -> None:
    """Write `.dvc` files, with a word instead of a hash, and commit them to main."""
    for name, word in files.items():
        (project / f"{name}.dvc").write_text(f"outs:\n- path: {name}\n  desc: {word}\n")
    toy.commit(project, f"data {files}")


def found_by_watch(project: Path, **files: str) -> None:
    """Commit `.dvc` files to the branch runs/data on top of main, like watch."""
    head = git("rev-parse", "HEAD")
    written(project, **files)
    git("update-ref", f"refs/heads/{DATA_BRANCH}", "HEAD")
    git("reset", "--quiet", "--hard", head)


def word_of(name: str) -> str:
    return yaml.safe_load(Path(f"{name}.dvc").read_text())["outs"][0]["desc"]


def test_data_found_by_watch_are_used_if_asked_and_later_changes_by_hand_win(project):
    written(project, a="old", b="old", c="old", e="old")
    found_by_watch(project, a="new", b="new", c="new", e="new")
    written(project, b="by hand", c="new", d="another")
    git("rm", "-q", "e.dvc")
    toy.commit(project, "without e")
    with opened("plain", "HEAD") as plain:
        assert word_of("a") == "old"
        assert plain.data_notes == ()
    with opened("with", "HEAD", data=True) as work:
        assert [word_of(name) for name in "abcd"] == ["new", "by hand", "new", "another"]
        assert not Path("e.dvc").exists(), "main gave it up"
        older_note = f"used as committed by hand, because the one on {DATA_BRANCH} is older"
        used_note = f"used as on {DATA_BRANCH}, commit {git('rev-parse', '--short', DATA_BRANCH)}"
        assert work.data_notes == (f"a.dvc: {used_note}", f"b.dvc: {older_note}", f"e.dvc: {older_note}")
        assert git("log", "-1", "--format=%s") == f"Data of {DATA_BRANCH}: a.dvc"
        assert git("status", "--porcelain") == ""
        assert work.tree == git("rev-parse", "HEAD^{tree}") != plain.tree
    assert work.commit == git("rev-parse", "HEAD")
    assert word_of("a") == "old", "the checkout's"
    found_by_watch(project, a="newer")
    with opened("with", "HEAD", data=True):
        assert word_of("a") == "new", "one that is tried again keeps the data that it began with"
    written(project, a="newer")
    with opened("after", "HEAD", data=True) as work:
        assert work.data_notes == (), "main has them already"
        assert git("rev-parse", "HEAD") == work.commit, "main has them already"


@pytest.mark.fault("22")
def test_of_two_that_want_a_lock_one_waits_for_the_other_however_that_ends(tmp_path):
    logged: list[str] = []

    def work(name: str) -> None:
        with hold_lock(tmp_path / name, on_wait=lambda: logged.append("waits")):
            logged.append("works")

    def beside(name: str) -> threading.Thread:
        thread = threading.Thread(target=work, args=(name,))
        thread.start()
        thread.join(0.3)
        return thread

    with suppress(BlockingIOError), hold_lock(tmp_path / "same", on_wait=lambda: pytest.fail("it waits")):
        beside("another")
        assert logged.pop() == "works"
        second = beside("same")
        assert logged == ["waits"]
        with pytest.raises(BlockingIOError), hold_lock(tmp_path / "same", wait=False):
            pytest.fail("two hold it")
        raise BlockingIOError("another training of this run is alive")
    second.join()
    assert logged == ["waits", "works"]
