"""The benchmarks run on a bare machine: an interpreter that has torch, transformers and peft, and nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def bench():
    import torch

    from benchmarks.ablation import tiny
    from benchmarks.train import Bench

    return Bench(tiny(pairs=2), torch.device("cpu"), torch.float32)


def test_every_variant_trains_the_same_references_to_the_same_loss(bench):
    from benchmarks.ablation import ABLATION

    losses = {}
    for variant in ABLATION:
        bench.take(variant)
        losses[variant.name] = bench.run(variant)
    without = losses.pop("baseline without MDP")
    assert list(losses.values()) == pytest.approx([losses["baseline"]] * 9, rel=1e-5)
    assert without == pytest.approx(losses["baseline"], rel=0.05)  # a new module is zero-initialised, or nearly
    assert bench.size.captions == 10


def test_the_measured_step_trains_what_the_papers_recipe_trains(bench):
    from components.models.m3diff.family import M3DIFF
    from components.models.tuning import trainable_groups

    groups = trainable_groups(bench.adapted, M3DIFF, bench.size.settings)
    assert [(group.parts, group.lr) for group in groups] == [
        (("vision",), 2e-6),
        (("module", "projector", "llm"), 1e-5),
    ]
    before = [weight.detach().clone() for weight in bench.optimizer.weights]
    for weight in bench.optimizer.weights:
        weight.grad = weight.detach().sign() + 0.5
    bench.optimizer.step()
    assert all(not was.equal(weight) for was, weight in zip(before, bench.optimizer.weights, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_training_benchmark_runs_on_a_bare_machine_and_every_variant_gives_the_same_loss(
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
    from tests.models.test_fused import bare_machine

    (folder / "packages").mkdir()
    environment = {"PYTHONPATH": str(bare_machine(folder / "packages")), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-S", str(REPOSITORY / "benchmarks" / script), *arguments, "--out", str(folder / "out")]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out").read_text())
