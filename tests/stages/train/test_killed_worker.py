"""Runs on Ray Train workers: none listens to the network, and one whose worker is killed with signal 9, or that SIGTERM
asks to end, goes on from its newest checkpoint to the same weights."""

import ipaddress
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.stages.train.toy import Recipe, recipe

CODE = """
import pickle, sys
from pathlib import Path
from typing import Any
from m3diff.stages.train.stage import train
made, mixture, folder = map(Path, sys.argv[1:])
made = pickle.loads(made.read_bytes()).changed(scratch=folder / "runs")
train(made.cfg, made.model, made.compute, mixture, folder / "out")
"""


def start(made: Recipe, mixture: Path, folder: Path, **how: Any) -> subprocess.Popen:
    """Train in a process of its own, which is started as `how` says."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe").write_bytes(pickle.dumps(made))
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-c", CODE, str(folder / "recipe"), str(mixture), str(folder)]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **how)


def finish(process: subprocess.Popen, folder: Path) -> dict[str, torch.Tensor]:
    assert process.wait(timeout=900) == 0, (folder / "log").read_text()[-4000:]
    return load_file(folder / "out" / "checkpoint" / "model.safetensors")


def written(folder: Path) -> list[int]:
    """The steps of the checkpoints that are there."""
    return sorted(int(manifest.parent.name[-8:]) for manifest in folder.glob("runs/train/*/step-*/manifest.json"))


def wait_for_a_checkpoint(process: subprocess.Popen, folder: Path) -> None:
    for _ in range(12000):
        assert process.poll() is None, (folder / "log").read_text()[-4000:]
        if max(written(folder), default=0) >= 12:
            break  # Ray passes on what a worker prints a second late: a log line would come after the run's end
        time.sleep(0.05)


def kill_worker_after_a_checkpoint(process: subprocess.Popen, folder: Path) -> None:
    wait_for_a_checkpoint(process, folder)
    family = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in family if "TrainWorker" in " ".join([child.name(), *child.cmdline()])]
    assert workers, [child.cmdline() for child in family]
    workers[0].kill()


def listening(family: list[psutil.Process]) -> Iterator[tuple[str, str]]:
    """The name of a process and the address that it listens at, for each of its sockets."""
    for process in family:
        try:
            name = " ".join([process.name(), *process.cmdline()[:1]])
            found = process.net_connections("inet")
        except psutil.Error:  # it has ended
            continue
        yield from ((name, socket.laddr.ip) for socket in found if socket.status == psutil.CONN_LISTEN)


def is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


@pytest.fixture(scope="module")
def made(base: Path) -> Recipe:
    return recipe(base, epochs=24, workers=2, micro_batch=2, zero_stage=1, checkpoint_every_steps=6)


Watched = tuple[dict[str, torch.Tensor], set[tuple[str, str]]]


@pytest.fixture(scope="module")
def whole(made: Recipe, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """The weights of an undisturbed run, and where its processes listened meanwhile."""
    folder, seen = tmp_path_factory.mktemp("killed") / "whole", set()
    process = start(made, mixture, folder)
    while process.poll() is None:
        seen |= set(listening(psutil.Process(process.pid).children(recursive=True)))
        time.sleep(0.2)
    return finish(process, folder), seen


@pytest.mark.fault("S7")
@pytest.mark.slow(70)
def test_a_run_on_one_machine_listens_on_its_loopback_interface_alone(whole: Watched) -> None:
    _, seen = whole
    for name in ("gcs_server", "raylet", "TrainWorker"):
        assert any(name in listens for listens, _ in seen), f"{name} was not seen to listen: {seen}"
    assert not sorted((name, address) for name, address in seen if not is_loopback(address))


@pytest.mark.fault("01")
@pytest.mark.slow(100)
def test_a_run_whose_worker_is_killed_ends_with_the_same_weights(
    made: Recipe, mixture: Path, whole: Watched, tmp_path: Path
) -> None:
    want, _ = whole
    broken = start(made, mixture, tmp_path / "broken")
    kill_worker_after_a_checkpoint(broken, tmp_path / "broken")
    got = finish(broken, tmp_path / "broken")
    resumed = re.search(r"resumed after step (\d+) of", (tmp_path / "broken" / "log").read_text())
    assert resumed, "the run did not go on from a checkpoint"
    assert int(resumed[1]) >= 12
    assert got.keys() == want.keys()
    for name, weight in want.items():
        assert torch.equal(got[name], weight), name


@pytest.mark.fault("03")
@pytest.mark.slow(120)
def test_a_run_whose_group_is_asked_to_end_writes_a_checkpoint_and_goes_on_from_it(
    made: Recipe, mixture: Path, whole: Watched, tmp_path: Path
) -> None:
    want, _ = whole
    folder, leader = tmp_path / "stopped", subprocess.Popen(["sleep", "600"], process_group=0)
    process = start(made, mixture, folder, process_group=leader.pid)
    wait_for_a_checkpoint(process, folder)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(leader.pid, signal.SIGTERM)
    leader.wait()
    assert process.wait(timeout=60) == 143, (folder / "log").read_text()[-4000:]
    told = re.search(r"asked to end \(SIGTERM\) at step (\d+)", (folder / "log").read_text())
    assert told, "it did not end by its own"
    assert written(folder)[-1] == int(told[1])
    assert not psutil.wait_procs(family, timeout=20)[1], "what it had started is left"
    got = finish(start(made, mixture, folder), folder)
    assert f"resumed after step {told[1]} of" in (folder / "log").read_text()
    for name, weight in want.items():
        assert torch.equal(got[name], weight), name
