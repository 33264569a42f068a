"""One stage through DVC: what it says happened, what a failure carries, and that no process stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from flows import dvc

SLOW = "def synthesize(params, paths, name):\n    import time\n    time.sleep(120)\n\n\ndef old("


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


def wait_until(condition, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_a_stage_ran_then_is_skipped_then_is_restored_from_the_run_cache(project):
    said: list[str] = []
    assert dvc.repro("synthesize@minichange", said.append) == "Ran"
    assert "toy synthesize" in said
    assert dvc.repro("synthesize@minichange", said.append) == "Skipped"
    (project / "dvc.lock").unlink()
    assert dvc.repro("synthesize@minichange", said.append) == "Restored"


def test_a_failed_stage_carries_its_own_exit_code_and_its_last_words(project):
    (project / "toy.py").write_text("import sys\nprint('row 7: reference is empty', flush=True)\nsys.exit(3)\n")
    with pytest.raises(dvc.DvcError, match="row 7: reference is empty") as failed:
        dvc.repro("synthesize@minichange", lambda line: None)
    assert failed.value.code == 3


def test_a_misspelt_stage_is_dvcs_error(project):
    with pytest.raises(dvc.DvcError, match="sinthesize"):
        dvc.repro("sinthesize", lambda line: None)


@pytest.mark.fault("03")
def test_an_interrupt_ends_the_stage_and_dvc(project):
    slow_down(project)

    def interrupt(line: str) -> None:
        if "Running stage" in line:
            wait_until(lambda: len(family(project)) == 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dvc.repro("synthesize@minichange", interrupt)
    assert family(project) == []


@pytest.mark.fault("02", "04")
def test_killing_the_flow_leaves_no_stage_running(project):
    slow_down(project)
    code = "from flows import dvc; dvc.repro('synthesize@minichange', print)"
    flow = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    wait_until(
        lambda: any(
            "synthesize" in process.cmdline() and "repro" not in process.cmdline() for process in family(project)
        )
    )
    time.sleep(1)  # the stage asks to be ended with its parent after it has started
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    wait_until(lambda: family(project) == [], seconds=60)


@pytest.mark.slow(15)
@pytest.mark.fault("06")
def test_a_lock_that_another_dvc_command_holds_is_waited_for(project):
    held = (
        "import time; from dvc.repo import Repo; r = Repo('.')\nwith r.lock: print('held', flush=True); time.sleep(8)"
    )
    other = subprocess.Popen([sys.executable, "-c", held], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    assert dvc.repro("synthesize@minichange", lambda line: None) == "Ran"
    other.wait()


def test_log_lines_lose_colours_and_blanks_and_a_progress_bar_is_told_now_and_then():
    bar = [f"train: {percent}%|###   | {percent}/100 [00:01<00:09, 9.9it/s]\n" for percent in range(100)]
    lines = ["\x1b[32mloss 1.0\x1b[0m\n", "\n", *bar, "done\n"]
    assert list(dvc.readable(lines)) == ["loss 1.0", bar[0].rstrip(), "done"]


def test_a_progress_bar_is_told_again_after_a_few_seconds(monkeypatch):
    clock = iter((0.0, 0.0, 4.9, 5.0, 5.0))
    monkeypatch.setattr(dvc.time, "monotonic", lambda: next(clock))
    assert list(dvc.readable(["1%|#", "2%|#", "3%|#", "end"])) == ["1%|#", "3%|#", "end"]


def test_dvc_finds_this_environments_tools_and_a_shell_that_passes_signals_on(monkeypatch):
    monkeypatch.setenv("PATH", "/elsewhere")
    found = dvc.environment()
    assert found["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/elsewhere"]
    assert found["SHELL"] == "/bin/bash"


def test_the_stages_come_after_all_that_they_read_and_frozen_ones_are_left_out(project):
    stages = dvc.stages()
    order = list(stages)
    graph = subprocess.run([*dvc.DVC, "dag", "--dot"], capture_output=True, text=True, check=True).stdout
    edges = [tuple(part.strip(' ";') for part in line.split("->")) for line in graph.splitlines() if "->" in line]
    edges = [(before, after) for before, after in edges if "pretrain" not in (before, after)]
    assert len(edges) >= 6
    written = list(yaml.safe_load((project / "dvc.yaml").read_text())["stages"])
    assert written[:2] == ["code", "pretrain"]
    run = [stage for stage in written if stage not in ("pretrain", "augment")]
    assert list(dict.fromkeys(name.partition("@")[0] for name in order)) == run
    assert {"synthesize@minichange", "ingest@minichange", "ingest@minichange_shifted"} < set(order)
    assert all(order.index(before) < order.index(after) for before, after in edges)
    assert all(before in stages[after] for before, after in edges)
    assert stages["ingest@minichange"] == {"code", "synthesize@minichange"}
    assert stages["evaluate"] == {name for name in order if name != "evaluate"}


def test_the_status_names_the_stages_of_the_flow_alone(project):
    (project / "data/00_base/config.json").write_text("another base")
    assert list(dvc.status()) == [name for name in dvc.stages() if name != "code"]
