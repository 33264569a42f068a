"""The loop's arithmetic: accumulation, workers, ZeRO stages, packing and resumption leave the weights as they are."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from m3diff.models.checkpoint import CheckpointError, verify_manifest
from m3diff.stages.train import loop
from m3diff.stages.train.attempts import DivergedError
from m3diff.stages.train.job import Job, Runtime
from m3diff.stages.train.loop import Training, run_loop
from m3diff.stages.train.state import checkpoints, latest_valid_checkpoint
from tests.stages.train.ranks import start
from tests.stages.train.toy import Recipe, Trained, recipe, run
from tests.tiny import tiny_settings


@pytest.fixture(scope="module")
def whole(mixture: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An undisturbed run of nine steps, the checkpoints' pairs captioned."""
    made = recipe(base, epochs=3, zero_stage=1, caption_val_pairs=1, caption_every_checkpoints=2)
    return run(made, mixture, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def six_steps(mixture: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(recipe(base), mixture, tmp_path_factory.mktemp("six"))


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], atol: float) -> None:
    """Every tensor that differs is named, with how many of its numbers do and by how much at most."""
    assert got.keys() == want.keys()
    odd = {}
    for name, weight in want.items():
        if atol and name.endswith("k_proj.bias"):
            continue  # shifts all scores of a query alike: its gradient is rounding alone, which Adam makes large
        difference = (got[name] - weight).abs()
        if not bool((difference <= atol).all()):
            odd[name] = f"{int((difference > atol).sum())} of {weight.numel()}, by {float(difference.max()):.3g}"
    assert not odd, f"{len(odd)} of {len(want)} tensors differ by more than {atol}: {odd}"


def assert_same_run(got: Trained, want: Trained) -> None:
    """Equal to the bit; else which rows of the curves differ first, and what each run computed on, is said too."""
    try:
        assert_same(got.weights, want.weights, atol=0)
    except AssertionError as error:
        rows = [(one, other) for one, other in zip(got.curve, want.curve, strict=False) if one != other][:2]
        raise AssertionError(f"{got.machine} and {want.machine}; first rows that differ: {rows}\n{error}") from None


def test_without_the_module_the_same_loop_trains_the_base(mixture: Path, base: Path, tmp_path: Path) -> None:
    done = run(recipe(base, model=tiny_settings(None), epochs=1), mixture, tmp_path)
    assert done.weights.keys() == load_file(base / "model.safetensors").keys(), "no tensor of a module"
    assert len(done.curve) == 3
    assert done.report.parameters["module"] == 0
    assert [row["lr_module"] for row in done.curve] == ["", "", ""]
    assert (done.report.module, done.report.warnings) == ({}, [])
    assert not [name for name in done.curve[0] if name.startswith("module_")]


def test_the_same_seed_gives_the_same_weights_and_validation_touches_none(
    mixture: Path, base: Path, tmp_path: Path, six_steps: Trained
) -> None:
    other = run(recipe(base, val_pairs=0, caption_val_pairs=1, checkpoint_every_steps=3), mixture, tmp_path)
    assert_same_run(other, six_steps)
    assert other.column("loss") == six_steps.column("loss")
    assert other.report.val_loss is None
    assert other.report.val_loss_by_dataset == {}


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_accumulation_changes_nothing(
    micro_batch: int, mixture: Path, base: Path, tmp_path: Path, six_steps: Trained
) -> None:
    got = run(recipe(base, micro_batch=micro_batch), mixture, tmp_path)
    # a mean of means, the usual fault, differs by more than 1e-3 here because references differ in length
    assert_same(got.weights, six_steps.weights, atol=2e-5)
    assert got.report.rows_out == six_steps.report.rows_out


@pytest.mark.parametrize("stage", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_zero_stages_train_alike(stage: int, mixture: Path, base: Path, tmp_path: Path, six_steps: Trained) -> None:
    linear = torch.nn.functional.linear
    got = run(recipe(base, zero_stage=stage), mixture, tmp_path)
    assert torch.nn.functional.linear is linear, "DeepSpeed's would round what trains next in this process otherwise"
    assert_same(got.weights, six_steps.weights, atol=2e-5)
    for name in ("loss", "val_loss", "grad_norm"):
        for a, b in zip(got.column(name), six_steps.column(name), strict=True):
            assert a == (b if b is None else pytest.approx(b, rel=2e-4 if name == "grad_norm" else 1e-5))
    assert got.report.parameters == six_steps.report.parameters


def test_the_curves_say_what_each_step_has_and_the_report_what_the_run_had(whole: Trained) -> None:
    assert whole.followed == whole.curve, "whoever follows the training finds its curves with the last validation"
    assert [int(row["step"]) for row in whole.curve] == list(range(1, 10))
    assert whole.column("epoch") == pytest.approx([step / 3 for step in range(1, 10)], abs=1e-4)
    validated = [int(row["step"]) for row in whole.curve if row["val_loss"]]
    assert validated == [2, 4, 6, 8, 9]
    assert [int(row["step"]) for row in whole.curve if row["val_loss_second"] and row["val_loss_toy"]] == validated
    assert [int(row["step"]) for row in whole.curve if row["val_cider"]] == [4, 8, 9]
    assert [int(row["step"]) for row in whole.curve if row["module_update_ratio/1"] and row["module_score/2"]] == [1, 9]
    assert all(norm and norm > 0.001 for norm in whole.column("grad_norm"))
    rates = ["lr_vision", "lr_module", "lr_projector", "lr_llm"]
    losses = ["val_loss", "val_loss_second", "val_loss_toy"]
    module = [f"{figure}/{level}" for figure in ("module_update_ratio", "module_score") for level in (1, 2)]
    assert list(whole.curve[0]) == ["step", "epoch", "loss", *rates, "grad_norm", *module, *losses, "val_cider"]
    report = whole.report
    assert (report.rows_in, report.rows_out, report.steps, report.exported_step) == (23, 69, 9, 9)
    assert report.loss == pytest.approx(whole.column("loss")[-1], abs=1e-5)
    assert report.val_loss == pytest.approx(whole.column("val_loss")[-1], abs=1e-5)
    assert report.val_loss_by_dataset.keys() == {"toy", "second"}
    assert report.module == {name: whole.column(name)[-1] for name in module}
    assert sum(report.parameters.values()) == report.parameters_trainable


class Interrupted(BaseException):
    """As from the keyboard: no failure, so nothing is tried again."""


def interrupt_after(saved: int, patch: pytest.MonkeyPatch) -> None:
    """Stop after so many checkpoints, the last of them saved and not yet validated."""
    original, seen = Training.validate, []

    def validate(run: Any, folder: Path) -> None:
        seen.append(folder)
        if len(seen) == saved:
            raise Interrupted
        original(run, folder)

    patch.setattr(Training, "validate", validate)


def interrupted(made: Recipe, mixture: Path, folder: Path, saved: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(saved, patch)
        with pytest.raises(Interrupted):
            run(made, mixture, folder)


@pytest.mark.fault("S3")
@pytest.mark.parametrize(
    "stage", [1, 0, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_run_that_resumes_ends_with_the_same_weights_curve_and_report(
    stage: int, mixture: Path, base: Path, tmp_path: Path, whole: Trained
) -> None:
    made = recipe(base, epochs=3, zero_stage=stage, caption_val_pairs=1, caption_every_checkpoints=2)
    want = whole if stage == 1 else run(made, mixture, tmp_path / "whole")
    interrupted(made, mixture, tmp_path / "broken", saved=2)
    got = run(made, mixture, tmp_path / "broken")
    assert_same_run(got, want)
    assert got.curve == want.curve
    assert got.report == want.report


@pytest.mark.fault("S3")
def test_what_a_run_took_is_counted_over_all_its_attempts(
    mixture: Path, base: Path, tmp_path: Path, six_steps: Trained
) -> None:
    made = recipe(base)
    interrupted(made, mixture, tmp_path, saved=2)
    (hours,) = (tmp_path / "runs" / "train").glob("*/hours.json")
    first = json.loads(hours.read_text())
    assert first["device_seconds"] == first["seconds"] > first["waited"] > 0
    hours.write_text(json.dumps(first | {"seconds": 3600, "device_seconds": 2 * 3600}))
    got = run(made, mixture, tmp_path)
    assert got.report == six_steps.report
    speed = json.loads((tmp_path / "runs" / "train_speed.json").read_text())
    assert 3600 < speed["seconds"] < 3700
    assert speed["captions_per_s"] == pytest.approx(got.report.rows_out / speed["seconds"], abs=1e-4)
    assert 2 <= speed["device_hours"] < 2.1
    assert (speed["device"], speed["devices"]) == ("cpu", 1)


@pytest.mark.parametrize(
    ("changes", "atol"), [({"checkpoint_every_steps": 3}, 0), ({"micro_batch": 2}, 2e-5), ({"zero_stage": 0}, 2e-5)]
)
def test_a_run_goes_on_after_how_it_is_computed_was_changed(
    changes: dict, atol: float, mixture: Path, base: Path, tmp_path: Path, whole: Trained, capfd: pytest.CaptureFixture
) -> None:
    made = recipe(base, epochs=3, zero_stage=1)
    interrupted(made, mixture, tmp_path, saved=2)
    got = run(made.changed(**changes), mixture, tmp_path)
    assert "resumed after step 4 of 9" in capfd.readouterr().out
    assert_same(got.weights, whole.weights, atol=atol)
    assert got.report.rows_out == whole.report.rows_out
    assert len(got.curve) == 9


@pytest.mark.fault("05")
@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    mixture: Path, base: Path, tmp_path: Path, whole: Trained, caplog: pytest.LogCaptureFixture
) -> None:
    made = recipe(base, epochs=3, zero_stage=1)
    interrupted(made, mixture, tmp_path, saved=3)
    (run_dir,) = (path for path in (tmp_path / "runs" / "train").iterdir() if path.is_dir())
    before, newest = checkpoints(run_dir)
    weights = newest / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    got = run(made, mixture, tmp_path)
    assert f"{newest.name} is damaged" in caplog.text
    assert f"going on from {before.name}" in caplog.text
    assert_same_run(got, whole)


@pytest.mark.fault("13", "m4")
@pytest.mark.parametrize("step", [3, 4])
def test_a_run_that_diverges_is_tried_once_and_keeps_its_last_good_checkpoint(
    step: int, mixture: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, losses = loop.take_step, []

    def take_step(*given: Any) -> tuple[float, float]:
        loss, norm = original(*given)
        losses.append(loss)
        return loss, float("nan") if len(losses) == step else norm

    monkeypatch.setattr(loop, "take_step", take_step)
    with pytest.raises(DivergedError, match=f"step {step}: "):
        run(recipe(base), mixture, tmp_path)
    assert len(losses) == step
    (run_dir,) = (path for path in (tmp_path / "runs" / "train").iterdir() if path.is_dir())
    newest = latest_valid_checkpoint(run_dir)
    assert newest is not None
    assert newest.name == "step-00000002"
    assert all(torch.isfinite(moment).all() for moment in load_file(newest / "exp_avg.safetensors").values())


@pytest.mark.parametrize(("scores", "best"), [([0.2, 0.9, 0.5], 4), ([0.9, 0.2, 0.9], 2), ([0.1, 0.2, 0.3], 6)])
def test_best_exports_the_checkpoint_with_the_highest_cider(
    scores: list[float], best: int, mixture: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, kept = iter(scores), {}
    monkeypatch.setattr(loop.Validation, "cider", lambda self, engine: {"val_cider": next(given)})
    original = loop.save_state

    def keep(engine: Any, trained: Any, run_dir: Path, step: int, *rest: Any) -> Path:
        folder = original(engine, trained, run_dir, step, *rest)
        rest[-1].finish()
        kept[step] = load_file(folder / "weights.safetensors")
        return folder

    monkeypatch.setattr(loop, "save_state", keep)
    made = recipe(base, export="best", caption_val_pairs=1, caption_every_checkpoints=1)
    done = run(made, mixture, tmp_path)
    assert done.report.exported_step == best
    newline = next(name for name in kept[best] if name.endswith("image_newline"))
    assert torch.equal(done.weights["image_newline"], kept[best][newline])
    assert not torch.equal(kept[2][newline], kept[6][newline])
    assert len(done.curve) == 6, "the curves are those of the whole run"


def test_the_checkpoint_names_its_family_and_base_and_a_changed_file_is_refused(
    mixture: Path, base: Path, tmp_path: Path
) -> None:
    from m3diff.records.files import sha256_of_folder

    run(recipe(base, epochs=0.3), mixture, tmp_path)
    checkpoint = tmp_path / "out" / "checkpoint"
    manifest = verify_manifest(checkpoint)
    assert manifest["family"] == "m3diff"
    assert manifest["base_sha256"] == sha256_of_folder(base)
    assert (checkpoint / manifest["base"]).resolve() == base.resolve()
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match=r"model.safetensors: sha256 .* fetch the folder again"):
        verify_manifest(checkpoint)


def work(rank: int, made: Recipe, mixture: Path, folder: Path, saved: int) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as patch:
        if saved:
            interrupt_after(saved, patch)
        try:
            run_loop(Job(made.cfg, made.model, made.compute, mixture, folder, folder, ""), Runtime(rank, 2))
        except Interrupted:
            dist.barrier()
    dist.destroy_process_group()


def two_workers(made: Recipe, mixture: Path, folder: Path, saved: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    for worker in start(work, made, mixture, folder, saved):
        worker.join(240)
        assert worker.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_two_workers_train_validate_and_caption_as_one(
    stage: int, mixture: Path, base: Path, tmp_path: Path, whole: Trained
) -> None:
    from tests.stages.train.toy import read_curve

    made = recipe(base, epochs=3, micro_batch=2, zero_stage=stage, caption_val_pairs=1)
    two_workers(made, mixture, tmp_path)
    assert_same(load_file(tmp_path / "checkpoint" / "model.safetensors"), whole.weights, atol=2e-5)
    for got, want in zip(read_curve(tmp_path), whole.curve, strict=True):
        assert [got[name] == "" for name in got] == [want[name] == "" for name in want]
        for name in ("loss", "val_loss", "val_loss_second", "val_loss_toy", "val_cider"):
            assert not want[name] or float(got[name]) == pytest.approx(float(want[name]), rel=1e-5), name
        for name in ("module_update_ratio/1", "module_update_ratio/2", "module_score/1"):
            assert not want[name] or float(got[name]) == pytest.approx(float(want[name]), rel=1e-3), name


@pytest.mark.fault("26")
@pytest.mark.slow
@pytest.mark.parametrize(("first", "stage"), [(2, 1), (1, 3)])
def test_a_run_goes_on_with_another_number_of_workers(
    first: int, stage: int, mixture: Path, base: Path, tmp_path: Path, whole: Trained
) -> None:
    made = recipe(base, epochs=3, micro_batch=2, zero_stage=stage)
    folder = tmp_path / "runs"
    if first == 2:
        two_workers(made, mixture, folder, saved=2)
        assert [path.name for path in checkpoints(folder)] == ["step-00000002", "step-00000004"]
        one_worker(made, mixture, folder)
    else:
        one_worker(made, mixture, folder, saved=2)
        two_workers(made, mixture, folder)
    assert_same(load_file(folder / "checkpoint" / "model.safetensors"), whole.weights, atol=2e-5)


def one_worker(made: Recipe, mixture: Path, folder: Path, saved: int = 0) -> None:
    from m3diff.stages.train.runtimes import run_local

    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if saved:
            interrupt_after(saved, patch)
        try:
            run_local(Job(made.cfg, made.model, made.compute, mixture, folder, folder, ""))
        except Interrupted:
            assert saved
