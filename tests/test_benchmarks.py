"""The benchmarks run on a bare machine: an interpreter that has torch, transformers and peft, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.test_lean import bare_machine

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_training_benchmark_runs_on_a_bare_machine_and_every_rung_gives_the_same_loss(
    precision: str, tmp_path: Path
) -> None:
    result = run(
        tmp_path, "train.py", "--repeats", "1", "--precision", precision, "--shapes", "tiny", "--device", "cpu"
    )
    assert {"baseline", "unpacked", "packed"} <= result.keys()
    assert result["packed"]["captions_per_s"] > result["baseline"]["captions_per_s"]
    losses = [row["loss"] for row in result["ablation"]]
    assert len(losses) == 10
    assert losses == pytest.approx([losses[0]] * 10, rel=1e-5 if precision == "fp32" else 1e-2)
    assert not result["not_run"]


@pytest.mark.slow
def test_the_generation_benchmark_runs_on_a_bare_machine_and_batches_change_no_token(tmp_path: Path) -> None:
    result = run(tmp_path, "generate.py", "--repeats", "1", "--batch", "4", "--shapes", "tiny", "--device", "cpu")
    assert result["pillow"] is False
    assert result["batched"]["same_tokens"] == 1.0


def run(folder: Path, script: str, *arguments: str) -> dict:
    (folder / "packages").mkdir()
    environment = {"PYTHONPATH": str(bare_machine(folder / "packages")), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-S", str(REPOSITORY / "benchmarks" / script), *arguments, "--out", str(folder / "out")]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out").read_text())
