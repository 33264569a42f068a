"""Faults of DVC's own files and processes: the next run needs no hand, or a sentence says what to do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from flows import archive, dvc, notices, watch
from flows.workspace import FLOWS, workspace
from m3diff.provenance.git import git
from m3diff.registry import versions
from tests import toy
from tests.servers import until

STAGE = "evaluate"
HOLD = """def evaluate(params, paths):
    import subprocess
    held = "import time; from dvc.repo import Repo\\n"
    held += "with Repo('.').lock: print('held', flush=True); time.sleep(8)"
    other = subprocess.Popen([sys.executable, "-c", held], stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "held\\n"
    old(params, paths)
"""
SLEEP = """def evaluate(params, paths):
    from m3diff.__main__ import die_with_parent
    die_with_parent()
    time.sleep(120)
"""


def set_gallery(root: Path, pairs: int = 7) -> None:
    """A parameter that puts the last stage out of date."""
    toy.change(root, "evaluate", gallery=pairs)


def of_stage(root: Path) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline", "cwd"])
        if process.info["cwd"] == str(root) and "toy.py" in (process.info["cmdline"] or [])
    ]


@pytest.mark.fault("02")
@pytest.mark.slow(30)
def test_a_killed_dvc_takes_its_stage_with_it_and_the_next_run_needs_no_hand(project, rng):
    text = toy.replace_stage(project, STAGE, f"import time\n\n\n{SLEEP}")
    set_gallery(project)
    process = subprocess.Popen([*dvc.DVC, "repro", "-s", STAGE], env=dvc.environment(), start_new_session=True)
    until(lambda: of_stage(project), 120)
    time.sleep(2 + 2 * rng.random())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: not of_stage(project), 5)
    Path("toy.py").write_text(text)
    assert dvc.repro(STAGE, print) == "Ran"
    assert toy.status(project) == {}


@pytest.mark.fault("06")
@pytest.mark.slow(30)
def test_a_lock_that_is_held_as_a_stage_ends_is_waited_for_and_the_stage_recorded(project):
    set_gallery(project)
    toy.replace_stage(project, STAGE, HOLD)
    said: list[str] = []
    assert dvc.repro(STAGE, said.append) == "Ran", said
    recorded = yaml.safe_load(Path("dvc.lock").read_text())["stages"][STAGE]
    assert recorded["params"]["params.yaml"]["evaluate"]["gallery"] == 7


@pytest.mark.fault("07", "S4")
@pytest.mark.slow(30)
@pytest.mark.parametrize("text", ["", '{"write": {"data/07'])
def test_what_a_killed_dvc_left_of_its_rwlock_hinders_no_flow_and_that_of_a_persons_checkout_stays(project, text):
    theirs = project / ".dvc" / "tmp" / "rwlock"
    theirs.write_text(text)
    with workspace("one", "HEAD", ["evaluate.gallery=7"]):
        dvc.link_data()
        Path(".dvc/tmp").mkdir(exist_ok=True)
        Path(".dvc/tmp/rwlock").write_text(text)
        assert dvc.repro(STAGE, print) == "Ran"
    assert theirs.read_text() == text


CONFLICT = "<<<<<<< HEAD\nschema: '2.0'\nstages: {}\n=======\nschema: '2.0'\n>>>>>>> theirs\n"


@pytest.mark.fault("08")
def test_a_dvc_lock_that_is_none_is_told_with_gits_command(project):
    for text in ("", "schema: '2", CONFLICT):
        (project / "dvc.lock").write_text(text)
        with pytest.raises(dvc.DvcError, match=r"restore it: `git log.*`git checkout COMMIT -- dvc\.lock`"):
            dvc.repro(STAGE, print)
    toy.commit(project, "broken")
    words = r"dvc\.lock is not DVC's lock file.*`git checkout COMMIT -- dvc\.lock`"
    with pytest.raises(dvc.DvcError, match=words), workspace("one", None, []):
        dvc.status()
    done = subprocess.run([sys.executable, "-m", "m3diff", "register"], capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)
    assert "git checkout -- dvc.lock" in done.stderr


# What a kill leaves of dvc.lock itself, which DVC writes in place


def cut_lock(how: str) -> None:
    """Leave of `dvc.lock` what a kill may: nothing, half of it, or whole lines without those of the last stage."""
    text = Path("dvc.lock").read_text()
    last = text.rindex("\n  ", 0, text.rindex("\n    cmd:")) + 1
    Path("dvc.lock").write_text({"empty": "", "half": text[: len(text) // 2 + 3], "short": text[:last]}[how])


@pytest.mark.fault("T12")
@pytest.mark.parametrize("how", ["empty", "half", "short"])
def test_a_dvc_that_is_killed_as_it_writes_its_lock_leaves_the_one_before(project, monkeypatch, how):
    before = Path("dvc.lock").read_bytes()
    cut_lock(how)
    cut = Path("dvc.lock").read_bytes()
    Path("dvc.lock").write_bytes(before)
    killed = f"import os; open('dvc.lock', 'wb').write({cut!r}); os.kill(os.getpid(), 9)"
    monkeypatch.setattr(dvc, "DVC", [sys.executable, "-c", killed])
    for left in (before, None):
        with pytest.raises(dvc.DvcError, match="stage evaluate"):
            dvc.repro(STAGE, print)
        assert (Path("dvc.lock").read_bytes() if Path("dvc.lock").exists() else None) == left
        Path("dvc.lock").unlink(missing_ok=True)


@pytest.mark.fault("T12")
def test_a_lock_that_is_cut_short_is_not_committed(project):
    before = Path("dvc.lock").read_bytes()
    for how in ("empty", "half", "short"):
        cut_lock(how)
        Path("beside.json").write_text(how)
        archive.commit("what a killed run left", ())
        assert git("show", "--name-only", "--format=").split() == ["beside.json"]
        assert Path("dvc.lock").read_bytes() == before
    git("rm", "--quiet", "dvc.lock")
    git("commit", "--quiet", "--amend", "--no-edit")
    Path("dvc.lock").write_text("")
    archive.commit("before anything was recorded", ())
    assert "dvc.lock" not in git("ls-tree", "--name-only", "HEAD").split()


@pytest.mark.fault("T12")
@pytest.mark.parametrize("text", ["", "{", '{"told": {'], ids=["empty", "half", "cut"])
def test_what_flows_keep_beside_their_runs_may_be_damaged(project, text, monkeypatch):
    """A loss of power leaves an empty file on some disks; then it is as if there were none."""
    flows = project / FLOWS
    flows.mkdir(parents=True)
    for name in ("watch.json", "notices.json"):
        (flows / name).write_text(text)
    assert watch.read_json(watch.STATE) is None
    monkeypatch.setenv("M3DIFF_NOTIFY", "")
    notices.tell(pytest.fail, checkout=project)
    notices.tell(pytest.fail, "key", "title", "text", project)


@pytest.mark.fault("T12")
@pytest.mark.slow(20)
def test_a_lock_that_is_cut_short_hinders_no_prune_unless_a_person_works_there(project, tmp_path):
    toy.run(project, "dvc", "gc", "--workspace", "--all-commits", "-f")
    assert ([*versions.hindering((), ())], "--skip-failed" in versions.gc_command()) == ([], False)
    flow, person = project / FLOWS / "one", tmp_path / "person"
    flow.parent.mkdir(parents=True)
    flow.with_name("one.lock").touch()
    for tree in (flow, person):
        git("worktree", "add", "--quiet", "--detach", str(tree))
        (tree / "dvc.lock").write_text("")
    (hindrance,) = versions.hindering((), ())
    assert f"the dvc.lock of {person} is empty or cut short: git -C {person} checkout HEAD -- dvc.lock" == hindrance
    subprocess.run(hindrance.partition("cut short: ")[2].split(), check=True)
    assert [*versions.hindering((), ())] == []
    before = Path("dvc.lock").read_bytes()
    for text in (b"", before):
        Path("dvc.lock").write_bytes(text)
        toy.commit(project, "a lock of no bytes, as an earlier version of m3diff committed it, and the next")
    objects = sorted(path for path in Path(".dvc/cache/files").rglob("*") if path.is_file())
    toy.run(project, "dvc", *versions.gc_command(), "-f")
    assert sorted(path for path in Path(".dvc/cache/files").rglob("*") if path.is_file()) == objects != []
