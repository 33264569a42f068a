"""A stage through DVC: its outcome, what a failure carries, and that no process stays behind."""

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
from tests import toy
from tests.servers import until

SLEEPS = "def synthesize(params, paths, name):\n    import time\n    time.sleep(120)\n"


def family(root: Path) -> list[psutil.Process]:
    """DVC and stage processes that work in this project."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        words = " ".join(process.info["cmdline"] or [])
        if process.info["cwd"] == str(root) and ("toy.py" in words or "repro" in words):
            found.append(process)
    return found


def test_a_stage_ran_then_is_skipped_then_is_restored_from_the_run_cache(project):
    said: list[str] = []
    assert dvc.repro("synthesize@minichange", said.append) == "Ran"
    assert "toy synthesize" in said
    assert dvc.repro("synthesize@minichange", said.append) == "Skipped"
    (project / "dvc.lock").unlink()
    assert dvc.repro("synthesize@minichange", said.append) == "Restored"


def test_a_failed_stage_carries_its_own_exit_code_and_its_last_words_and_a_misspelt_one_is_dvcs_error(project):
    (project / "toy.py").write_text("import sys\nprint('row 7: reference is empty', flush=True)\nsys.exit(3)\n")
    with pytest.raises(dvc.DvcError, match="row 7: reference is empty") as failed:
        dvc.repro("synthesize@minichange", lambda line: None)
    assert failed.value.code == 3
    with pytest.raises(dvc.DvcError, match="sinthesize"):
        dvc.repro("sinthesize", lambda line: None)


@pytest.mark.fault("03")
def test_an_interrupt_ends_the_stage_and_dvc(project):
    toy.replace_stage(project, "synthesize", SLEEPS)

    def interrupt(line: str) -> None:
        if "Running stage" in line:
            until(lambda: len(family(project)) == 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dvc.repro("synthesize@minichange", interrupt)
    assert family(project) == []


@pytest.mark.fault("02", "04")
def test_killing_the_flow_leaves_no_stage_running(project):
    toy.replace_stage(project, "synthesize", SLEEPS)
    code = "from flows import dvc; dvc.repro('synthesize@minichange', print)"
    flow = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    until(lambda: any({"toy.py", "synthesize"} <= {*process.cmdline()} for process in family(project)))
    time.sleep(1)  # the stage asks to be ended with its parent after it has started
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    until(lambda: family(project) == [], 60)


def test_log_lines_lose_colours_and_blanks_and_of_a_progress_bar_one_is_told_every_few_seconds(monkeypatch):
    clock = iter((0.0, 0.0, 4.9, 5.0, 5.0))
    monkeypatch.setattr(dvc.time, "monotonic", lambda: next(clock))
    lines = ["\x1b[32mloss 1.0\x1b[0m\n", "\n", "1%|#", "2%|#", "3%|#", "end"]
    assert list(dvc.readable(lines)) == ["loss 1.0", "1%|#", "3%|#", "end"]


def test_dvc_finds_this_environments_tools_and_a_shell_that_passes_signals_on(monkeypatch):
    monkeypatch.setenv("PATH", "/elsewhere")
    found = dvc.environment()
    assert found["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/elsewhere"]
    assert found["SHELL"] == "/bin/bash"


def test_the_stages_come_after_all_that_they_read_and_frozen_ones_are_left_out(project):
    stages = dvc.stages()
    order = list(stages)
    written = list(yaml.safe_load((project / "dvc.yaml").read_text())["stages"])
    run = [stage for stage in written if stage not in ("pretrain", "augment")]
    assert list(dict.fromkeys(name.partition("@")[0] for name in order)) == run
    assert all(order.index(before) < order.index(name) for name, found in stages.items() for before in found)
    assert stages["ingest@minichange"] == {"code", "synthesize@minichange"}
    assert stages["evaluate"] == {name for name in order if name != "evaluate"}


def test_the_status_names_the_stages_of_the_flow_alone(project):
    (project / "data/00_base/config.json").write_text("another base")
    assert list(dvc.status()) == [name for name in dvc.stages() if name != "code"]
