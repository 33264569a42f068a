"""The loop's arithmetic: accumulation, workers, ZeRO stages, packing and resumption leave the weights as they are."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from components.models.m3diff.tuning import CheckpointError, verify_manifest
from safetensors.torch import load_file

from components.train.params import Train
from components.train.stage import Here, latest_valid_checkpoint, train
from tests.train.toy import parameters, write_mixture


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("toy") / "mixture")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "base"
    parameters(folder)
    return folder


def run(cfg: Train, mixture: Path, folder: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Train in this process; the final weights and the curve's lines."""
    train(cfg, mixture, folder / "out", folder / "runs")
    weights = load_file(folder / "out" / "checkpoint" / "model.safetensors")
    return weights, (folder / "out" / "curves.csv").read_text().splitlines()


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], atol: float) -> None:
    assert got.keys() == want.keys()
    for name, weight in want.items():
        if atol and name.endswith("k_proj.bias"):
            continue  # shifts all scores of a query alike: its gradient is rounding alone, which Adam makes large
        torch.testing.assert_close(got[name], weight, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


def test_training_lowers_the_loss_and_moves_every_group(mixture: Path, base: Path, tmp_path: Path) -> None:
    weights, curve = run(parameters(base, epochs=30, lr=0.03, lr_vision=0.01), mixture, tmp_path)
    losses = [float(line.split(",")[2]) for line in curve[1:]]
    assert losses[-1] < losses[0] - 0.15, "the head is small, random and frozen: no logit can gain more than 0.3"
    start = load_file(base / "model.safetensors")
    for part in ("vision_tower.encoder", "multi_modal_projector", "image_newline", "q_proj", "down_proj"):
        moved = [name for name in start if part in name and not torch.equal(start[name], weights[name])]
        assert moved, f"{part} did not move"
    assert torch.equal(
        start["language_model.model.embed_tokens.weight"], weights["language_model.model.embed_tokens.weight"]
    )


def test_without_perception_the_same_loop_trains_a_llava_onevision(mixture: Path, base: Path, tmp_path: Path) -> None:
    weights, curve = run(parameters(base, mdp=None, epochs=1), mixture, tmp_path)
    assert weights.keys() == load_file(base / "model.safetensors").keys(), "no tensor of an MDP module"
    assert len(curve) > 1


def test_the_same_seed_gives_the_same_weights(mixture: Path, base: Path, tmp_path: Path) -> None:
    first, _ = run(parameters(base), mixture, tmp_path / "a")
    second, _ = run(parameters(base), mixture, tmp_path / "b")
    assert_same(second, first, atol=0)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_accumulation_changes_nothing(micro_batch: int, mixture: Path, base: Path, tmp_path: Path) -> None:
    want, _ = run(parameters(base, global_batch=8, micro_batch=8), mixture, tmp_path / "one")
    got, _ = run(parameters(base, global_batch=8, micro_batch=micro_batch), mixture, tmp_path / "many")
    # a mean of means, the usual fault, differs by more than 1e-3 here because captions differ in length
    assert_same(got, want, atol=2e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages_train_alike(stage: int, mixture: Path, base: Path, tmp_path: Path) -> None:
    want, want_curve = run(parameters(base), mixture, tmp_path / "zero0")
    got, got_curve = run(parameters(base, zero_stage=stage), mixture, tmp_path / "zero")
    assert_same(got, want, atol=2e-5)
    for got_line, want_line in zip(got_curve[1:], want_curve[1:], strict=True):
        assert float(got_line.split(",")[2]) == pytest.approx(float(want_line.split(",")[2]), rel=1e-5)


class Rank(Here):
    ranks = 2

    def __init__(self, rank: int, run_dir: Path) -> None:
        super().__init__(run_dir, None)
        self.rank = rank

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        folder = self.run_dir / "shared"
        folder.mkdir(exist_ok=True)
        yield folder

    def keep(self, folder: Path, metrics: dict[str, float]) -> None:
        pass


def work(rank: int, cfg: Train, mixture: Path, folder: Path) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    from components.train.loop import run_loop

    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    run_loop(cfg, mixture, folder, Rank(rank, folder))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_two_workers_train_as_one(stage: int, mixture: Path, base: Path, tmp_path: Path) -> None:
    want, _ = run(parameters(base), mixture, tmp_path / "one")
    cfg = parameters(base, workers=2, micro_batch=2, zero_stage=stage)
    (tmp_path / "two").mkdir()
    spawned = multiprocessing.get_context("spawn")
    workers = [spawned.Process(target=work, args=(rank, cfg, mixture, tmp_path / "two")) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(240)
        assert worker.exitcode == 0
    assert_same(load_file(tmp_path / "two" / "checkpoint" / "model.safetensors"), want, atol=2e-5)


class Interrupted(Exception):
    pass


def interrupt_after(keeps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = Here.keep, []

    def keep(self: Here, folder: Path, metrics: dict[str, Any]) -> None:
        original(self, folder, metrics)
        seen.append(metrics)
        if len(seen) == keeps:
            raise Interrupted

    monkeypatch.setattr(Here, "keep", keep)


def test_a_run_that_resumes_ends_with_the_same_weights_and_curve(
    mixture: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = parameters(base, epochs=3, zero_stage=1)
    want, want_curve = run(cfg, mixture, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        with pytest.raises(Interrupted):
            run(cfg, mixture, tmp_path / "broken")
    got, got_curve = run(cfg, mixture, tmp_path / "broken")
    assert_same(got, want, atol=0)
    assert got_curve == want_curve


def test_a_checkpoint_half_written_is_passed_over_for_the_one_before(
    mixture: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = parameters(base, epochs=3)
    want, _ = run(cfg, mixture, tmp_path / "whole")
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        with pytest.raises(Interrupted):
            run(cfg, mixture, tmp_path / "broken")
    checkpoints = sorted((tmp_path / "broken" / "runs").rglob("step-*"))
    assert len(checkpoints) == 2, "the newest two are kept"
    largest = max((path for path in (checkpoints[-1] / "state").iterdir()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:100])
    got, _ = run(cfg, mixture, tmp_path / "broken")
    assert "is not whole and is passed over" in caplog.text
    assert checkpoints[-1].name in caplog.text
    assert_same(got, want, atol=0)


def test_a_final_checkpoint_with_a_changed_file_is_refused(mixture: Path, base: Path, tmp_path: Path) -> None:
    run(parameters(base), mixture, tmp_path)
    checkpoint = tmp_path / "out" / "checkpoint"
    verify_manifest(checkpoint)
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=r"model.safetensors: sha256 .* restore it"):
        verify_manifest(checkpoint)


def test_no_checkpoint_is_no_checkpoint(tmp_path: Path) -> None:
    assert latest_valid_checkpoint(tmp_path) is None


def test_a_second_trainer_of_the_same_run_is_turned_away(mixture: Path, base: Path, tmp_path: Path) -> None:
    from components.train.stage import RunLockedError, _only_trainer

    run_dir = tmp_path / "run"
    with (
        _only_trainer(run_dir.parent.joinpath("run")),
        pytest.raises(RunLockedError, match="another training of this run is alive"),
        _only_trainer(run_dir),
    ):
        pass


@pytest.mark.parametrize("packing", ["unpacked", "k"])
def test_packing_changes_the_sampling_but_not_what_is_seen(
    packing: str, mixture: Path, base: Path, tmp_path: Path
) -> None:
    report = train(parameters(base, packing=packing), mixture, tmp_path / "out", tmp_path / "runs")
    full = train(parameters(base), mixture, tmp_path / "out2", tmp_path / "runs")
    assert report.rows_out == full.rows_out == 2 * report.rows_in
