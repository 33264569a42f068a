"""One stage through DVC: what it says happened, what a failure carries, and that no process stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows import dvc

SLOW = "def synthesize(cfg, paths):\n    import time\n    time.sleep(120)\n\n\ndef old("


def slow_down(root: Path) -> None:
    """Make the toy's first stage last two minutes."""
    text = (root / "toy.py").read_text()
    (root / "toy.py").write_text(text.replace("def synthesize(", SLOW, 1))


def family(root: Path) -> list[psutil.Process]:
    """DVC and stage processes that work in this project."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = " ".join(process.info["cmdline"] or [])
        if process.info["cwd"] == str(root) and ("toy.py" in words or "repro" in words):
            found.append(process)
    return found


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_a_stage_ran_then_is_skipped_then_is_restored_from_the_run_cache(project):
    said: list[str] = []
    assert dvc.repro("synthesize", said.append) == "Ran"
    assert "toy synthesize" in said
    assert dvc.repro("synthesize", said.append) == "Skipped"
    (project / "dvc.lock").unlink()
    assert dvc.repro("synthesize", said.append) == "Restored"


def test_a_failed_stage_carries_its_own_exit_code_and_its_last_words(project):
    (project / "toy.py").write_text("import sys\nprint('row 7: caption is empty', flush=True)\nsys.exit(3)\n")
    with pytest.raises(dvc.DvcError, match="row 7: caption is empty") as failed:
        dvc.repro("synthesize", lambda line: None)
    assert failed.value.code == 3


def test_a_misspelt_stage_is_dvcs_error(project):
    with pytest.raises(dvc.DvcError, match="sinthesize"):
        dvc.repro("sinthesize", lambda line: None)


def test_an_interrupt_ends_the_stage_and_dvc(project):
    slow_down(project)

    def interrupt(line: str) -> None:
        if "Running stage" in line:
            wait_until(lambda: len(family(project)) == 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dvc.repro("synthesize", interrupt)
    assert family(project) == []


def test_killing_the_flow_leaves_no_stage_running(project):
    slow_down(project)
    code = "from flows import dvc; dvc.repro('synthesize', print)"
    flow = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    wait_until(
        lambda: any(
            "synthesize" in process.cmdline() and "repro" not in process.cmdline() for process in family(project)
        )
    )
    time.sleep(1)  # the stage asks to be ended with its parent after it has started
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    wait_until(lambda: family(project) == [], seconds=10)


def test_a_lock_that_another_dvc_command_holds_is_waited_for(project):
    held = (
        "import time; from dvc.repo import Repo; r = Repo('.')\nwith r.lock: print('held', flush=True); time.sleep(8)"
    )
    other = subprocess.Popen([sys.executable, "-c", held], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    assert dvc.repro("synthesize", lambda line: None) == "Ran"
    other.wait()


def test_log_lines_lose_colours_and_blanks_and_a_progress_bar_is_told_now_and_then():
    bar = [f"train: {percent}%|###   | {percent}/100 [00:01<00:09, 9.9it/s]\n" for percent in range(100)]
    lines = ["\x1b[32mloss 1.0\x1b[0m\n", "\n", *bar, "done\n"]
    assert list(dvc.readable(lines)) == ["loss 1.0", bar[0].rstrip(), "done"]


def test_the_stages_come_after_all_that_they_read(project):
    import yaml

    order = dvc.stages()
    graph = subprocess.run([*dvc.DVC, "dag", "--dot"], capture_output=True, text=True, check=True).stdout
    edges = [tuple(part.strip(' ";') for part in line.split("->")) for line in graph.splitlines() if "->" in line]
    assert edges
    assert order == list(yaml.safe_load((project / "dvc.yaml").read_text())["stages"])
    assert all(order.index(before) < order.index(after) for before, after in edges)
