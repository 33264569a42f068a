"""What git's commands return, how they fail, and in which repositories no run can begin."""

import threading
from pathlib import Path

import pytest

from m3diff.provenance.git import (
    GitError,
    commit_at,
    common_dir,
    find_commit,
    git,
    has_branch,
    main_tree,
    process_lock,
    read_from_commit,
    require_own_repository,
    run_git,
    user_and_host,
)
from m3diff.records.errors import DataError
from m3diff.records.files import lock_exclusively
from tests.errors import raises
from tests.provenance.conftest import commit_files


def test_a_failed_command_is_named_with_the_message_of_git(repository):
    with raises(GitError, "git.command_failed", command="git rev-parse --verify none") as failed:
        git("rev-parse", "--verify", "none")
    assert "fatal" in failed.value.fields["cause"]
    assert "\n" not in failed.value.fields["cause"]


def test_a_folder_outside_of_any_repository_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with raises(GitError, "git.no_repository", path=tmp_path):
        git("status", cwd=tmp_path)


def test_a_command_that_takes_too_long_ends_with_a_code_of_its_own(repository):
    result = run_git("status", seconds=0)
    assert result.returncode == 124
    assert result.stderr


def test_git_speaks_english_and_asks_for_no_password_whatever_the_user_set(repository, monkeypatch):
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("GIT_TERMINAL_PROMPT", "1")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Ann")
    variables = git("-c", "alias.variables=!env", "variables").splitlines()
    assert {"LC_ALL=C", "GIT_TERMINAL_PROMPT=0", "GIT_AUTHOR_NAME=m3diff"} <= set(variables)


def test_a_commit_runs_no_hook(repository):
    hook = repository / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    assert commit_files({"params.yaml": "later\n"}) == commit_at("main")


def test_files_of_a_commit_are_read_from_the_current_folder(repository, monkeypatch):
    commit_files({"params.yaml": "later\n"})
    assert read_from_commit("HEAD", Path("params.yaml")) == b"later\n"
    assert read_from_commit("HEAD^", Path("params.yaml")) == b"a\n"
    assert read_from_commit("HEAD", Path("missing.yaml")) is None
    assert read_from_commit("none", Path("params.yaml")) is None
    monkeypatch.chdir("part")
    assert read_from_commit("HEAD", Path("params.yaml")) == b"b\n"


def test_only_branches_of_a_name_count_as_branches(repository):
    git("branch", "runs/one")
    git("tag", "two")
    assert has_branch("runs/one")
    assert not has_branch("runs")
    assert not has_branch("two")
    assert commit_at("two") == commit_at("runs/one") == git("rev-parse", "HEAD")
    assert commit_at("three") is None


def test_all_working_trees_have_one_folder_of_git_and_one_main_tree(repository, tmp_path, monkeypatch):
    git("worktree", "add", "--quiet", "--detach", str(tmp_path / "tree"))
    git("clone", "--quiet", "--bare", str(repository), str(tmp_path / "bare.git"))
    assert common_dir(tmp_path / "tree") == repository / ".git"
    assert main_tree(tmp_path / "tree") == repository
    assert main_tree(tmp_path / "bare.git") == tmp_path / "bare.git"
    monkeypatch.chdir(tmp_path / "tree")
    assert main_tree() == repository


# Commits of this clone and of its remotes


@pytest.fixture
def commit_of_run(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a commit that only the remote `team` of a clone has, in the branch `runs/one`.

    The current directory is the clone. The path of its remote is relative.
    """
    git("clone", "--quiet", "--origin", "team", str(repository), str(tmp_path / "clone"))
    git("switch", "--quiet", "--create", "runs/one")
    commit = commit_files({"dvc.lock": "of the run\n"})
    monkeypatch.chdir(tmp_path / "clone")
    git("remote", "set-url", "team", "../repository")
    return commit


def test_a_commit_of_this_clone_is_found_without_its_remotes(commit_of_run):
    git("remote", "set-url", "team", "../gone")
    for name in ("main", "HEAD", git("rev-parse", "HEAD")):
        assert find_commit(name) == git("rev-parse", "HEAD")


@pytest.mark.parametrize("is_named_by_branch", [True, False])
def test_a_commit_of_a_run_is_fetched_from_the_remote(is_named_by_branch, commit_of_run, tmp_path, monkeypatch):
    """It is fetched in a working tree elsewhere, from which the relative path of the remote leads nowhere."""
    git("worktree", "add", "--quiet", "--detach", str(tmp_path / "other/folder/tree"))
    monkeypatch.chdir(tmp_path / "other/folder/tree")
    assert commit_at(commit_of_run) is None
    assert find_commit("runs/one" if is_named_by_branch else commit_of_run) == commit_of_run
    assert read_from_commit("team/runs/one", Path("dvc.lock")) == b"of the run\n"


def test_a_commit_that_no_remote_has_is_refused_with_the_remotes(commit_of_run):
    with raises(DataError, "git.commit_not_in_remotes", value="0" * 40, remotes=["team"]):
        find_commit("0" * 40)
    git("remote", "set-url", "team", "../gone")
    with raises(DataError, "git.commit_not_in_remotes", value="runs/two") as refused:
        find_commit("runs/two")
    (failure,) = refused.value.fields["remotes"]
    assert failure.startswith("team: ")
    assert "gone" in failure


def test_a_commit_that_a_clone_without_remotes_does_not_have_is_refused(repository):
    with raises(DataError, "git.commit_not_in_clone", value="runs/one"):
        find_commit("runs/one")


# The repository of a project


@pytest.mark.fault("P13")
@pytest.mark.parametrize(
    ("branch", "options", "code"),
    [("main", ("--object-format=sha256",), "git.sha256_repository"), ("runs", (), "git.branch_in_the_way")],
    ids=["sha256", "branch runs"],
)
def test_a_repository_in_which_no_run_can_begin_is_refused(branch, options, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    git("init", "--quiet", f"--initial-branch={branch}", *options)
    commit_files({})
    with raises(DataError, code, path=tmp_path):
        require_own_repository()


def test_a_repository_of_its_own_with_runs_is_accepted(repository):
    git("branch", "runs/one")
    require_own_repository()


def test_a_folder_of_a_larger_repository_is_refused_by_its_name(repository, monkeypatch):
    monkeypatch.chdir("part")
    with raises(DataError, "git.larger_repository", path=repository / "part", folder="part") as refused:
        require_own_repository()
    assert "--prefix=part " in refused.value.fields["command"]


def test_a_submodule_of_a_larger_repository_is_refused(repository, tmp_path, monkeypatch):
    (tmp_path / "larger").mkdir()
    monkeypatch.chdir(tmp_path / "larger")
    git("init", "--quiet")
    git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(repository), "part")
    monkeypatch.chdir("part")
    with raises(DataError, "git.submodule", path=tmp_path / "larger" / "part"):
        require_own_repository()


# The lock of a process


def test_a_lock_is_held_until_the_end_of_its_block(repository):
    with process_lock("record"), (repository / ".git/m3diff/record.lock").open("a") as file:
        with pytest.raises(BlockingIOError):
            lock_exclusively(file, wait=False)
        with process_lock("promote"):
            pass  # another lock
    with (repository / ".git/m3diff/record.lock").open("a") as file:
        lock_exclusively(file, wait=False)


def test_who_asks_for_a_lock_that_is_held_waits_for_its_end(repository, capfd):
    is_held_again = threading.Event()

    def hold_lock() -> None:
        with process_lock("record"):
            is_held_again.set()

    waiting_thread = threading.Thread(target=hold_lock, daemon=True)
    with process_lock("record"):
        waiting_thread.start()
        assert not is_held_again.wait(0.1)
    assert is_held_again.wait(10)
    waiting_thread.join(10)
    assert capfd.readouterr().out.startswith("record: ")


@pytest.mark.parametrize(
    ("seconds", "is_inherited"), [(None, True), (9, False)], ids=["a local command", "one that may wait for a remote"]
)
def test_a_lock_is_held_by_a_local_command_that_outlives_its_process(seconds, is_inherited, repository):
    with process_lock("record"):
        result = run_git("-c", "alias.files=!ls -l /proc/self/fd", "files", seconds=seconds)
    assert (b"record.lock" in result.stdout) == is_inherited


def test_a_process_is_named_by_its_user_and_machine(monkeypatch):
    monkeypatch.setenv("LOGNAME", "ann")
    monkeypatch.setattr("socket.gethostname", lambda: "lab-3")
    assert user_and_host() == "ann@lab-3"
