"""Outputs of a run are in the remote before anything refers to them, and a later run finds them by its branch."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml
from dvc.exceptions import DvcException
from dvc_data.hashfile.transfer import TransferResult

from flows import dvc, report
from flows.workspace import workspace
from m3diff.provenance.dvc import object_file
from m3diff.provenance.git import git
from m3diff.records.errors import DataError, Fault
from m3diff.settings.section import ParamsError
from tests import toy
from tests.errors import raises
from tests.servers import until


@pytest.fixture
def remote(project: Path, tmp_path: Path) -> Path:
    """Return the folder of the project's default DVC remote. One dataset has been generated."""
    folder = tmp_path / "remote"
    toy.run(project, "dvc", "remote", "add", "-d", "store", str(folder))
    toy.run(project, "dvc", "repro", "-q", "synthesize@minichange")
    return folder


def count_objects(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


@pytest.mark.fault("21", "T5")
@pytest.mark.slow(20)
def test_push_sends_again_what_the_remote_lost_and_nothing_without_a_remote(project, remote):
    assert dvc.push() == ("Ran", "sent to store")
    sent_count = count_objects(remote)
    assert sent_count >= 8
    assert dvc.push()[0] == "Skipped"
    (project / "mine.csv").write_text("before,after\n")
    toy.run(project, "dvc", "add", "-q", "mine.csv")
    git("add", "mine.csv.dvc")
    assert dvc.push()[0] == "Ran"
    assert count_objects(remote) == sent_count + 1
    remote_files = sorted(path for path in remote.rglob("*") if path.is_file())
    contents = {path: path.read_bytes() for path in remote_files}
    for removed_files in (remote_files[:1], [path for path in remote_files if path.suffix == ".dir"], remote_files):
        for path in removed_files:
            path.chmod(0o644)
            path.unlink()
        assert dvc.push()[0] == "Ran"
        assert {path: path.read_bytes() for path in remote.rglob("*") if path.is_file()} == contents
    toy.run(project, "dvc", "remote", "remove", "store")
    assert dvc.push() == ("Skipped", dvc.NO_REMOTE_NOTE)
    dvc.check_remotes()


@pytest.mark.fault("21")
def test_what_the_remote_does_not_have_after_the_push_is_an_error(project, remote, monkeypatch):
    send_objects = dvc.send_objects

    def send_and_lose(hashes: object, name: str) -> None:
        send_objects(hashes, name)
        next(path for path in remote.rglob("*") if path.is_file() and path.suffix != ".dir").unlink()

    with monkeypatch.context() as patch:
        patch.setattr(dvc, "send_objects", send_and_lose)
        with raises(dvc.RemoteError, "flows.missing_in_remote", remote="store", count=1) as error:
            dvc.push()
    (name,) = error.value.fields["names"]
    assert name.startswith("data/01_raw/minichange/")
    assert [dvc.push() for _ in range(2)] == [("Ran", "sent to store"), ("Skipped", "already in store")]


@pytest.mark.slow(30)
@pytest.mark.fault("21")
def test_a_failed_push_is_repeated_and_check_remotes_finds_a_silent_remote(project, remote):
    remote.mkdir()
    sealed = remote / "files"
    sealed.write_text("no folder")
    with raises(dvc.RemoteError, "flows.push_failed", remote="store") as refused:
        dvc.push()
    assert refused.value.fields["fault"].code == "flows.command_failed"
    sealed.unlink()
    assert dvc.push()[0] == "Ran"
    toy.run(project, "dvc", "repro", "-q", "validate")
    dvc.check_remotes()
    toy.run(project, "dvc", "remote", "modify", "store", "url", "ssh://nobody@127.0.0.1:1/nowhere")
    with raises(ParamsError, "flows.remote_not_answering", remote="store"):
        dvc.check_remotes()


@pytest.mark.parametrize("output", [{"data/a.json": "1" * 32}, {"data/raw": "2" * 32 + ".dir"}])
def test_a_remote_that_does_not_answer_is_found_by_its_outputs(monkeypatch, output):
    searches = []

    def search(files: dict[str, str], remote: str) -> None:
        searches.append((files, remote))
        if remote == "silent":
            raise dvc.DvcError.of_command("dvc status", 255, ["no route to host"])

    monkeypatch.setattr(dvc, "outputs_by_remote", lambda: {"store": output, "silent": output})
    monkeypatch.setattr(dvc, "find_missing_files", search)
    with raises(ParamsError, "flows.remote_not_answering", remote="silent"):
        dvc.check_remotes()
    assert searches == [(output, "store"), (output, "silent")]


def test_the_commit_holds_the_lock_and_the_metrics_and_no_folder_of_the_checkout(project, tmp_path):
    (project / ".gitignore").write_text((project / ".gitignore").read_text().replace("/runs\n", "/runs/\n"))
    (project / "runs").symlink_to(tmp_path)
    toy.run(project, "dvc", "repro", "-q", "ingest@minichange")
    dvc.commit("what ran", ("runs",))
    lines = git("show", "--name-only", "--format=%s").split("\n")
    assert lines[0] == "what ran"
    assert {"dvc.lock", "data/02_records/minichange.json"} <= set(lines)
    assert "runs" not in lines
    dvc.commit("nothing new and nothing shared", ())
    assert git("log", "-1", "--format=%s") == "nothing new and nothing shared"


@pytest.mark.fault("T5")
def test_the_branch_goes_to_the_git_remote_whose_path_is_meant_from_the_checkout(project, tmp_path):
    log_lines: list[str] = []
    git("init", "--quiet", "--bare", str(tmp_path / "origin"))
    git("remote", "add", "origin", "../origin")
    with workspace("one", "HEAD", []) as work:
        report.publish_branch(work, log_lines.append)
        assert git("ls-remote", str(tmp_path / "origin")) == "", "no remote is named"
        git("config", "m3diff.runs", "origin")
        report.publish_branch(work, log_lines.append)
    assert git("ls-remote", str(tmp_path / "origin")).split()[1] == "refs/heads/runs/one"
    assert log_lines == []
    shutil.rmtree(tmp_path / "origin")
    report.publish_branch(work, log_lines.append)
    assert "runs/one" in log_lines[0]


@pytest.mark.slow(10)
def test_each_output_goes_to_its_own_remote_and_outputs_without_push_to_none(project, remote, tmp_path):
    other_remote = tmp_path / "second"
    toy.run(project, "dvc", "remote", "add", "other", str(other_remote))
    for name, options in (("mine", {"remote": "other"}), ("secret", {"push": False})):
        (project / f"{name}.csv").write_text(f"{name}\n")
        toy.run(project, "dvc", "add", "-q", f"{name}.csv")
        file = project / f"{name}.csv.dvc"
        entry = yaml.safe_load(file.read_text())
        entry["outs"][0] |= options
        file.write_text(yaml.safe_dump(entry))
    assert dvc.push() == ("Ran", "sent to other, store")
    assert count_objects(other_remote) == 1
    assert "secret\n" not in {path.read_text(errors="replace") for path in remote.rglob("*") if path.is_file()}
    assert dvc.push()[0] == "Skipped"


def test_outputs_belong_to_their_own_remote_or_the_default_and_some_to_none(small_repository, tmp_path):
    remotes = {name: tmp_path / name for name in ("store", "other")}
    small_repository.configure(remotes, default="store")
    plain_md5 = small_repository.track("plain.csv", "plain")
    own_md5 = small_repository.track("own.csv", "own", remote="other")
    small_repository.track("secret.csv", "secret", push=False)
    small_repository.track("in_git.csv", "in git", cache=False)
    small_repository.track("lost.csv", "lost", is_cached=False)
    Path("new.csv.dvc").write_text("outs:\n- path: new.csv\n")
    assert dvc.outputs_by_remote() == {"store": {"plain.csv": plain_md5}, "other": {"own.csv": own_md5}}
    small_repository.configure(remotes)
    assert dvc.outputs_by_remote() == {"other": {"own.csv": own_md5}}


def test_a_push_tells_the_remotes_that_got_files_and_a_default_that_is_missing(small_repository, tmp_path):
    assert dvc.push() == ("Skipped", dvc.NO_REMOTE_NOTE)
    small_repository.configure({"store": tmp_path / "store"}, default="store")
    assert dvc.push() == ("Skipped", "no outputs to send")
    small_repository.track("a.csv", "a")
    assert dvc.push() == ("Ran", "sent to store")
    assert count_objects(tmp_path / "store") == 1
    small_repository.configure({name: tmp_path / name for name in ("store", "other")})
    assert dvc.push() == ("Skipped", dvc.NO_DEFAULT_REMOTE_NOTE.format(remotes="other, store"))
    assert not (tmp_path / "other").exists()
    dvc.check_remotes()


def test_a_damaged_file_in_the_cache_is_not_sent_and_is_named(small_repository, tmp_path):
    small_repository.configure({"store": tmp_path / "store"}, default="store")
    md5 = small_repository.track("a.csv", "a")
    file = object_file(dvc.cache_folder(), md5)
    file.write_text("other")
    fault = Fault("dvc.damaged_object", object=file, value=hashlib.md5(b"other").hexdigest()).at(path="a.csv")
    with raises(DataError, "flows.damaged_outputs", faults=[fault]):
        dvc.push()
    assert count_objects(tmp_path / "store") == 0


def test_only_the_inputs_of_a_stage_are_searched_for_damage(small_repository):
    objects = {}
    for name in ("read", "other"):
        md5 = small_repository.track(f"{name}.csv", name)
        objects[name] = object_file(small_repository.root / ".dvc/cache", md5)
        objects[name].write_text("damaged")
    stages = {name: {"cmd": "cat", "deps": [f"{name}.csv"]} for name in objects}
    Path("dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    (fault,) = dvc.find_damaged_inputs("read")
    assert fault.code == "dvc.damaged_object"
    assert fault.fields["object"] == objects["read"]


def test_a_push_to_an_unknown_remote_is_an_error_that_may_pass(small_repository):
    small_repository.configure({}, default="third")
    small_repository.track("a.csv", "a")
    with raises(dvc.RemoteError, "flows.push_failed", remote="third") as failed:
        dvc.push()
    assert failed.value.fields["fault"].fields["command"] == "dvc status --cloud --remote third"


def test_files_that_a_remote_rejects_are_counted(small_repository, tmp_path, monkeypatch):
    small_repository.configure({"store": tmp_path / "store"}, default="store")
    md5 = small_repository.track("a.csv", "a")
    monkeypatch.setattr(dvc, "transfer", lambda source, remote, objects: TransferResult(set(), objects))
    with raises(dvc.DvcError, "flows.command_failed", command="dvc push --remote store") as failed:
        dvc.send_objects([md5], "store")
    assert failed.value.fields["output"].endswith(" 1 file")


def test_an_error_of_dvc_has_the_command_and_another_error_stays_as_it_is(small_repository):
    with raises(dvc.DvcError, "flows.command_failed", command="dvc"), dvc.repository():
        raise DvcException("no such stage")
    with pytest.raises(KeyError, match="a"), dvc.repository():
        raise KeyError("a")
    with raises(dvc.DvcError, "flows.command_failed", command="dvc push"), dvc.repository("dvc push"):
        raise KeyError("a")


def test_dvc_in_this_process_waits_for_the_lock_of_another_process(small_repository, monkeypatch):
    monkeypatch.setattr("dvc.lock.DEFAULT_TIMEOUT", 0.01)  # time in which DVC gives up if it does not wait
    events: list[str] = []

    def use_repository() -> None:
        with dvc.repository() as repo, repo.lock:
            events.append("used")

    with dvc.repository() as repo, repo.lock:
        thread = threading.Thread(target=use_repository)
        thread.start()
        thread.join(0.2)
        events.append("released")
    thread.join()
    assert events == ["released", "used"]


# What stays in dvc.lock

LOCK = b"stages:\n  a:\n    cmd: a\n  b:\n    cmd: b\n"
BROKEN_LOCKS = {
    "missing": None,
    "empty": b"",
    "truncated": LOCK[:17],
    "without a stage": b"stages:\n  a:\n    cmd: a\n",
}


@pytest.mark.parametrize("text", BROKEN_LOCKS.values(), ids=BROKEN_LOCKS)
def test_a_commit_restores_a_broken_lock_of_a_killed_run(text, small_repository):
    Path("dvc.lock").write_bytes(LOCK)
    small_repository.commit()
    Path("dvc.lock").unlink()
    if text is not None:
        Path("dvc.lock").write_bytes(text)
    dvc.commit("what ran", ())
    assert Path("dvc.lock").read_bytes() == LOCK
    assert git("status", "--porcelain") == ""


def test_a_commit_keeps_a_lock_with_new_stages_and_needs_no_earlier_lock(small_repository):
    small_repository.commit()
    Path("dvc.lock").write_text("half")
    dvc.commit("a broken lock", ())
    assert not Path("dvc.lock").exists()
    for text in (LOCK, LOCK.replace(b"cmd: b", b"cmd: c") + b"  c:\n    cmd: c\n"):
        Path("dvc.lock").write_bytes(text)
        dvc.commit("what ran", ())
        assert Path("dvc.lock").read_bytes() == text
        assert git("show", "HEAD:dvc.lock") == text.decode().rstrip()


@pytest.fixture
def fake_dvc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that replaces DVC's command by a shell script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dvc, "find_damaged_inputs", lambda stage: [])
    return lambda script: monkeypatch.setattr(dvc, "DVC_COMMAND", ["sh", "-c", script])


@pytest.mark.parametrize("lock", [LOCK, None], ids=["a lock", "no lock"])
def test_a_failed_stage_leaves_the_lock_as_it_was_and_one_that_ran_renews_it(lock, fake_dvc):
    if lock is not None:
        Path("dvc.lock").write_bytes(lock)
    fake_dvc("echo half > dvc.lock; echo 'no image'; exit 3")
    with raises(dvc.DvcError, "flows.command_failed", command="stage a", exit_code=3):
        dvc.repro("a", print)
    assert (Path("dvc.lock").read_bytes() if Path("dvc.lock").exists() else None) == lock
    fake_dvc("echo \"Running stage 'a':\"; echo renewed > dvc.lock")
    assert dvc.repro("a", print) == "Ran"
    assert Path("dvc.lock").read_text() == "renewed\n"


def test_the_exit_code_of_a_failed_stage_is_the_last_that_dvc_prints(fake_dvc):
    fake_dvc("echo 'a child exited with 3'; echo 'failed to run: x, exited with -9'; exit 255")
    with raises(dvc.DvcError, "flows.command_failed", command="stage a", exit_code=-9) as failed:
        dvc.repro("a", print)
    assert failed.value.fields["output"] == "a child exited with 3\nfailed to run: x, exited with -9"


def test_an_interrupt_of_the_flow_s_terminal_does_not_reach_a_stage(fake_dvc):
    """A terminal interrupts its foreground process group. The flow then gives the stage time to end."""
    log_lines: list[str] = []
    fake_dvc("echo \"Running stage 'a':\"; ps -o pgid= -p $$")
    dvc.repro("a", log_lines.append)
    assert int(log_lines[-1]) != os.getpgrp()


def test_a_stage_has_time_to_end_and_is_killed_after_it(fake_dvc, monkeypatch):
    log_lines: list[str] = []

    def interrupt(line: str) -> None:
        log_lines.append(line)
        raise KeyboardInterrupt

    fake_dvc("trap 'echo ended > ended; exit' TERM; echo begun; while :; do sleep 0.01; done")
    with pytest.raises(KeyboardInterrupt):
        dvc.repro("a", interrupt)
    assert Path("ended").exists()
    monkeypatch.setattr(dvc, "GRACE_S", 0.1)
    fake_dvc("trap '' TERM; echo deaf; while :; do sleep 0.01; done")
    with pytest.raises(KeyboardInterrupt):
        dvc.repro("a", interrupt)
    assert log_lines == ["begun", "deaf"]


# Outputs that a later run reuses


@pytest.mark.parametrize(
    ("own_status", "has_latest_run", "latest_stages"),
    [
        ({}, True, {"a": {}}),
        ({"a": []}, False, {"a": {}}),
        ({"a": []}, True, None),
        ({"a": []}, True, {"a": {"cmd": "a"}, "b": {"cmd": "b"}}),
    ],
    ids=["all is current", "no latest run", "a broken lock of the latest run", "the same lock"],
)
def test_nothing_is_restored_that_cannot_leave_less_to_do(
    own_status, has_latest_run, latest_stages, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("dvc.lock").write_bytes(LOCK)
    own_stages = dvc.locked_stages()
    checkouts: list[bool] = []
    monkeypatch.setattr(dvc, "link_data", lambda: checkouts.append(True))
    monkeypatch.setattr(dvc, "status", lambda: own_status)
    monkeypatch.setattr(dvc, "has_branch", lambda branch: has_latest_run)
    monkeypatch.setattr(dvc, "locked_stages", lambda commit="": latest_stages if commit else own_stages)
    monkeypatch.setattr(dvc, "git", lambda *arguments: pytest.fail("files were restored"))
    assert dvc.reuse_latest_run() == own_status
    assert checkouts == [True]


def commit_latest_run() -> None:
    """Commit all files to the branch of the latest run, like a flow."""
    toy.commit(Path(), "a run")
    git("update-ref", f"refs/heads/{dvc.LATEST}", "HEAD")
    git("reset", "--quiet", "--hard", "HEAD^")


@pytest.fixture
def lock_of_run(trained_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return the `dvc.lock` of a complete run, which is the latest. The current directory has an older one."""
    shutil.copytree(trained_once, tmp_path / "toy", symlinks=True)
    monkeypatch.chdir(tmp_path / "toy")
    lock = Path("dvc.lock").read_bytes()
    commit_latest_run()
    shutil.rmtree("data")
    git("checkout", "--", "data")
    return lock


def test_the_latest_lock_data_and_metrics_are_reused_if_fewer_stages_remain(lock_of_run):
    assert {"validate", "train"} <= set(dvc.status())
    assert dvc.reuse_latest_run() == {}
    assert Path("dvc.lock").read_bytes() == lock_of_run
    for file in ("metrics.json", "report.html"):
        assert (Path("data/07_report") / file).is_file()
    git("reset", "--quiet", "--hard")
    toy.change(Path(), "evaluate", gallery=7)
    Path("code/of_a_stage_that_is_gone.json").write_text("{}")
    Path("data/00_base/config.json").write_text("another base")
    toy.commit(Path(), "another parameter and base, and a digest that the latest run removed")
    assert list(dvc.reuse_latest_run()) == ["train", "predict", "evaluate"]
    assert Path("dvc.lock").read_bytes() == lock_of_run


@pytest.mark.slow
def test_the_own_lock_stays_where_that_of_the_latest_run_leaves_as_much_to_do(lock_of_run):
    git("checkout", dvc.LATEST, "--", ".")
    dvc.link_data()
    toy.change(Path(), "evaluate", gallery=7)
    dvc.repro("evaluate", print)
    toy.change(Path(), "validate", max_caption_chars=99)
    toy.commit(Path(), "a later run by hand, and another parameter")
    own_lock = Path("dvc.lock").read_bytes()
    assert list(dvc.reuse_latest_run()) == ["validate"]
    assert Path("dvc.lock").read_bytes() == own_lock
    assert git("status", "--porcelain") == ""


@pytest.mark.slow(8)
def test_without_a_latest_run_with_a_whole_lock_nothing_is_taken_up(project):
    lock = Path("dvc.lock").read_bytes()
    status = dvc.status()
    for text in (None, lock, b"", lock[: len(lock) // 2 + 3]):
        if text is not None:
            Path("dvc.lock").write_bytes(text)
            commit_latest_run()
        assert dvc.reuse_latest_run() == status != {}
        assert Path("dvc.lock").read_bytes() == lock


SLEEPS = "def synthesize(params, paths, name):\n    import time\n    time.sleep(120)\n"


def project_processes(root: Path) -> list[psutil.Process]:
    """Return the processes of DVC and stages in this project."""
    processes = [process for process in psutil.process_iter(["cmdline", "cwd"]) if process.info["cwd"] == str(root)]
    return [process for process in processes if {"toy.py", "repro"} & {*(process.info["cmdline"] or [])}]


def test_repro_reports_failure_with_output_or_ran_skipped_and_restored(project):
    log_lines: list[str] = []
    text = (project / "toy.py").read_text()
    (project / "toy.py").write_text("import sys\nprint('row 7: reference is empty', flush=True)\nsys.exit(3)\n")
    command = "stage synthesize@minichange"
    with raises(dvc.DvcError, "flows.command_failed", command=command, exit_code=3) as failed:
        dvc.repro("synthesize@minichange", log_lines.append)
    assert "row 7: reference is empty" in failed.value.fields["output"]
    with raises(dvc.DvcError, "flows.command_failed", command="stage sinthesize"):
        dvc.repro("sinthesize", log_lines.append)
    (project / "toy.py").write_text(text)
    for outcome in ("Ran", "Skipped"):
        assert dvc.repro("synthesize@minichange", log_lines.append) == outcome
    assert "toy synthesize" in log_lines
    (project / "dvc.lock").unlink()
    assert dvc.repro("synthesize@minichange", log_lines.append) == "Restored"


@pytest.mark.fault("03")
def test_an_interrupt_ends_the_stage_and_dvc(project):
    toy.replace_stage(project, "synthesize", SLEEPS)

    def interrupt(line: str) -> None:
        if "Running stage" in line:
            until(lambda: len(project_processes(project)) == 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dvc.repro("synthesize@minichange", interrupt)
    assert project_processes(project) == []


@pytest.mark.fault("02", "04")
def test_killing_the_flow_leaves_no_stage_running(project):
    toy.replace_stage(project, "synthesize", SLEEPS)
    code = "from flows import dvc; dvc.repro('synthesize@minichange', print)"
    flow = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    until(lambda: any({"toy.py", "synthesize"} <= {*process.cmdline()} for process in project_processes(project)))
    time.sleep(1)  # the stage asks to be ended with its parent after it has started
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    until(lambda: project_processes(project) == [], 60)


def test_log_lines_have_no_colours_or_blanks_and_few_states_of_a_progress_bar(monkeypatch):
    clock = iter((0.0, 0.0, 4.9, 5.0, 5.0))
    monkeypatch.setattr(dvc.time, "monotonic", lambda: next(clock))
    lines = ["\x1b[32mloss 1.0\x1b[0m\n", "\n", "1%|#", "2%|#", "3%|#", "end"]
    assert list(dvc.readable_lines(lines)) == ["loss 1.0", "1%|#", "3%|#", "end"]


def test_dvc_finds_this_environments_tools_and_a_shell_that_passes_signals_on(monkeypatch):
    monkeypatch.setenv("PATH", "/elsewhere")
    environment = dvc.environment()
    assert environment["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/elsewhere"]
    assert environment["SHELL"] == "/bin/bash"


def test_the_stages_come_after_all_that_they_read_and_frozen_ones_are_left_out(project):
    stages = dvc.stages()
    graph = yaml.safe_load((project / "dvc.yaml").read_text())["stages"]
    order = list(stages)
    expected_stages = [stage for stage in graph if stage not in ("pretrain", "augment")]
    assert list(dict.fromkeys(name.partition("@")[0] for name in order)) == expected_stages
    assert all(
        order.index(predecessor) < order.index(name)
        for name, predecessors in stages.items()
        for predecessor in predecessors
    )
    assert stages["ingest@minichange"] == {"code", "synthesize@minichange"}
    assert stages["evaluate"] == {name for name in order if name != "evaluate"}
    (project / "data/00_base/config.json").write_text("another base")
    assert list(dvc.status()) == [name for name in order if name != "code"]
