"""A Ray Train worker killed with signal 9 mid-run: another goes on from the newest checkpoint to the same weights."""

import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.train.toy import Recipe, recipe

CODE = """
import pickle, sys
from pathlib import Path
from components.train.stage import train
made, mixture, folder = map(Path, sys.argv[1:])
made = pickle.loads(made.read_bytes()).changed(scratch=folder / "runs")
train(made.cfg, made.model, made.compute, mixture, folder / "out")
"""


def start(made: Recipe, mixture: Path, folder: Path) -> subprocess.Popen:
    folder.mkdir()
    (folder / "recipe").write_bytes(pickle.dumps(made))
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-c", CODE, str(folder / "recipe"), str(mixture), str(folder)]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen, folder: Path) -> dict[str, torch.Tensor]:
    assert process.wait(timeout=900) == 0, (folder / "log").read_text()[-4000:]
    return load_file(folder / "out" / "checkpoint" / "model.safetensors")


def kill_worker_after_a_checkpoint(process: subprocess.Popen, folder: Path) -> None:
    for _ in range(12000):
        assert process.poll() is None, (folder / "log").read_text()[-4000:]
        if any(int(manifest.parent.name[-8:]) >= 12 for manifest in folder.glob("runs/train/*/step-*/manifest.json")):
            break  # Ray passes on what a worker prints a second late: a log line would come after the run's end
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    workers = [child for child in family if "TrainWorker" in " ".join([child.name(), *child.cmdline()])]
    assert workers, [child.cmdline() for child in family]
    workers[0].kill()


@pytest.mark.slow(200)
def test_a_run_whose_worker_is_killed_ends_with_the_same_weights(mixture: Path, base: Path, tmp_path: Path) -> None:
    cfg = recipe(base, epochs=24, workers=2, micro_batch=2, zero_stage=1, checkpoint_every_steps=6)
    want = finish(start(cfg, mixture, tmp_path / "whole"), tmp_path / "whole")
    broken = start(cfg, mixture, tmp_path / "broken")
    kill_worker_after_a_checkpoint(broken, tmp_path / "broken")
    got = finish(broken, tmp_path / "broken")
    resumed = re.search(r"resumed after step (\d+) of", (tmp_path / "broken" / "log").read_text())
    assert resumed, "the run did not go on from a checkpoint"
    assert int(resumed[1]) >= 12
    assert got.keys() == want.keys()
    for name, weight in want.items():
        assert torch.equal(got[name], weight), name
