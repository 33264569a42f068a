"""The loop: how a run is computed, killed and resumed leaves its weights as they are; its lines and curves."""

import json
import math
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from m3diff.models.blip2idc import Augment
from m3diff.models.checkpoint import verify_manifest
from m3diff.models.family import Family
from m3diff.models.settings import Delays
from m3diff.records.files import sha256_of_folder
from m3diff.settings.section import ParamsError
from m3diff.stages.train import engine, loop
from m3diff.stages.train.job import Runtime
from m3diff.stages.train.loop import NOTHING, Training, peak_flops
from m3diff.stages.train.stage import run_local
from m3diff.stages.train.state import Curve, checkpoints, latest_valid_checkpoint
from tests.stages.train.ranks import start
from tests.stages.train.toy import (
    Interrupted,
    Recipe,
    Trained,
    assert_same,
    assert_same_run,
    interrupting,
    job,
    read_curve,
    recipe,
    run,
    run_dir_of,
)
from tests.tiny import MDP, tiny_settings
from tests.tiny_blip2 import blip2_settings, tiny_blip2

HOW = ({"micro_batch": 1, "activation_checkpointing": "full"}, {"zero_stage": 1, "micro_batch": 2}, {"zero_stage": 2})
NINE = {"epochs": 3, "caption_val_pairs": 1, "caption_every_checkpoints": 2}


@pytest.fixture(scope="module")
def whole(mixture: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An undisturbed run of nine steps, the checkpoints' pairs captioned."""
    return run(recipe(base, zero_stage=1, **NINE), mixture, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def six_steps(mixture: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(recipe(base), mixture, tmp_path_factory.mktemp("six"))


def test_without_the_module_the_same_loop_trains_the_base(place):
    done = place.run(model=tiny_settings(None), epochs=1)
    assert done.weights.keys() == load_file(place.base / "model.safetensors").keys(), "no tensor of a module"
    assert [row["lr_module"] for row in done.curve] == ["", "", ""]
    assert (done.report.parameters["module"], done.report.module, done.report.warnings) == (0, {}, [])
    assert not [name for name in done.curve[0] if name.startswith("module_")]


def test_the_same_seed_gives_the_same_weights_and_validation_touches_none(place, six_steps):
    other = place.run(val_pairs=0, caption_val_pairs=1, checkpoint_every_steps=3)
    assert_same_run(other, six_steps, curve=False)
    assert other.column("loss") == six_steps.column("loss")
    assert (other.report.val_loss, other.report.val_loss_by_dataset) == (None, {})


@pytest.mark.parametrize("how", [*HOW, pytest.param({"zero_stage": 3}, marks=pytest.mark.slow)], ids=str)
def test_how_a_run_is_computed_changes_nothing(how, place, six_steps):
    """A mean of means, the usual fault, differs by more than 1e-3 here because references differ in length."""
    linear = torch.nn.functional.linear
    got = place.run(**how)
    assert torch.nn.functional.linear is linear, "DeepSpeed's would round what trains next in this process otherwise"
    assert_same(got.weights, six_steps.weights, atol=2e-5)
    close = {"loss": 1e-5, "val_loss": 1e-5, "grad_norm": 2e-4}
    close |= dict.fromkeys(six_steps.report.module, 2e-4)
    for name, rel in close.items():
        for a, b in zip(got.column(name), six_steps.column(name), strict=True):
            assert a == (b if b is None else pytest.approx(b, rel=rel)), name
    assert (got.report.parameters, got.report.rows_out) == (six_steps.report.parameters, six_steps.report.rows_out)


def test_curves_report_and_manifest_have_what_the_run_had(whole, base):
    def steps(*names: str) -> list[int]:
        return [int(row["step"]) for row in whole.curve if all(row[name] for name in names)]

    assert whole.followed == whole.curve, "whoever follows the training finds its curves with the last validation"
    assert steps() == list(range(1, 10))
    assert whole.column("epoch") == pytest.approx([step / 3 for step in range(1, 10)], abs=1e-4)
    assert steps("val_loss") == steps("val_loss_second", "val_loss_toy") == [2, 4, 6, 8, 9]
    assert steps("val_cider") == [4, 8, 9]
    assert steps("module_update_ratio/1", "module_score/2") == [1, 9]
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
    checkpoint = whole.folder / "out" / "checkpoint"
    manifest = verify_manifest(checkpoint)
    assert (manifest["family"], manifest["base_sha256"]) == ("m3diff", sha256_of_folder(base))
    assert (checkpoint / manifest["base"]).resolve() == base.resolve()


@pytest.mark.fault("S3")
@pytest.mark.parametrize("stage", [1, "blip2idc", *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_a_run_that_resumes_ends_with_the_same_weights_curve_and_report(stage, place, whole):
    """BLIP2IDC sees the same augmented images too."""
    how = {"zero_stage": stage}
    if stage == "blip2idc":
        place = place._replace(base=tiny_blip2(place.folder / "base"))
        how = {"model": blip2_settings(augment=Augment(blur=0.7, sigma=(0.4, 0.5), jpeg=0.7, quality=(50, 80)))}
    made = place.recipe(**how, **NINE)
    want = whole if stage == 1 else place.run(made, "whole")
    place.interrupted(made, 2, "broken")
    assert_same_run(place.run(made, "broken"), want)


@pytest.mark.fault("S3")
def test_what_a_run_took_is_counted_over_all_its_attempts(place, six_steps):
    place.interrupted(place.recipe(), 2)
    hours = run_dir_of(place.folder) / "hours.json"
    first = json.loads(hours.read_text())
    assert first["device_seconds"] == first["seconds"] > first["waited"] > 0
    hours.write_text(json.dumps(first | {"seconds": 3600, "device_seconds": 2 * 3600}))
    got = place.run()
    assert_same_run(got, six_steps)
    speed = json.loads((place.folder / "runs" / "train_speed.json").read_text())
    assert 3600 < speed["seconds"] < 3700
    assert speed["captions_per_s"] == pytest.approx(got.report.rows_out / speed["seconds"], abs=1e-4)
    assert 2 <= speed["device_hours"] < 2.1
    assert (speed["device"], speed["devices"]) == ("cpu", 1)


def test_a_run_goes_on_after_how_it_is_computed_was_changed(place, whole, capfd):
    made = place.recipe(epochs=3, zero_stage=1)
    place.interrupted(made, 2)
    got = place.run(made.changed(checkpoint_every_steps=3, micro_batch=2, zero_stage=0))
    assert "resumed after step 4 of 9" in capfd.readouterr().out
    assert_same(got.weights, whole.weights, atol=2e-5)
    assert (got.report.rows_out, len(got.curve)) == (whole.report.rows_out, 9)


@pytest.mark.fault("13", "m4")
@pytest.mark.parametrize("step", [3, 4])
def test_a_run_that_diverges_is_tried_once_and_keeps_its_last_good_checkpoint(step, place, monkeypatch):
    original, losses = engine.take_step, []

    def take_step(*given: Any) -> tuple[float, float]:
        loss, norm = original(*given)
        losses.append(loss)
        return loss, float("nan") if len(losses) == step else norm

    monkeypatch.setattr(engine, "take_step", take_step)
    with pytest.raises(ParamsError, match=f"step {step}: "):
        place.run()
    assert len(losses) == step
    newest = latest_valid_checkpoint(run_dir_of(place.folder))
    assert newest is not None
    assert newest.name == "step-00000002"
    assert all(torch.isfinite(moment).all() for moment in load_file(newest / "exp_avg.safetensors").values())


def test_best_exports_the_checkpoint_with_the_highest_cider(place, monkeypatch):
    given, kept, original = iter([0.2, 0.9, 0.5]), {}, Training.save
    monkeypatch.setattr(loop.Validation, "cider", lambda self, engine: {"val_cider": next(given)})

    def keep(training: Training, step: int) -> Path:
        folder = original(training, step)
        kept[step] = load_file(folder / "weights.safetensors")
        return folder

    monkeypatch.setattr(Training, "save", keep)
    done = place.run(export="best", caption_val_pairs=1, caption_every_checkpoints=1)
    assert done.report.exported_step == 4
    newline = next(name for name in kept[4] if name.endswith("image_newline"))
    assert torch.equal(done.weights["image_newline"], kept[4][newline])
    assert not torch.equal(kept[2][newline], kept[6][newline])
    assert len(done.curve) == 6, "the curves are those of the whole run"


UNUSED = tiny_settings(MDP | {"init_gain": 0.0}, module=1e-10)
USED = tiny_settings(MDP | {"init_gain": 2.0})


@pytest.mark.parametrize(
    ("model", "warned"),
    [(UNUSED, True), (replace(UNUSED, delays=Delays(module=0.5)), False), (USED, False)],
    ids=["unused", "delayed", "used"],
)
def test_a_module_that_never_trains_raises_the_alarm(model, warned, place, monkeypatch, capfd):
    """Six steps, three of them warm-up, with checkpoints after 2, 4 and 6. A delay of three more is the whole run."""
    monkeypatch.setattr(loop, "LOGGED_STEPS", 2)
    done = place.run(warmup_share=0.5, model=model)
    out = capfd.readouterr().out
    told = [line for line in out.splitlines() if "train: warning: the module changes nothing" in line]
    assert [step for step in (2, 4, 6) for line in told if f"step {step} of 6" in line] == [4, 6] * warned
    assert done.report.warnings == [line.removeprefix("train: warning: ") for line in told[-1:]]
    first, second = (done.report.module[f"module_update_ratio/{level}"] for level in (1, 2))
    assert (first < NOTHING) == (model.module.init_gain == 0)
    assert f"  module_update_ratio {first:.2g} {second:.2g}  lr_vision" in out
    lines = re.findall(r"step (\d)/6 \((\d+)\.\d%\)  loss [\d.]+  grad_norm .* (\d+) captions/s  ETA 0:0\d:\d\d\n", out)
    assert [(step, share) for step, share, _ in lines] == [("2", "33"), ("4", "66"), ("6", "100")]
    assert all(int(speed) > 0 for *_, speed in lines)
    assert [bool(value) for value in done.column("module_score/2")] == [True, True, False, True, False, True]


@pytest.mark.usefixtures("alone")
def test_a_run_is_counted_on_its_own_samples_and_described(place, monkeypatch, capfd):
    training = place.started(global_batch=8, micro_batch=2, epochs=1.5)
    training.parameters = {"trainable": 1500, "frozen": 9000, "vision": 1000, "module": 0, "llm": 500}
    processor, asked = training.processor, []
    ends = sum(len(processor.encode_reference(text)) for text in training.schedule.samples.table["reference"])
    # the prompt less its last token once a pair, that token and all but the last of each reference once a reference
    tokens = (len(processor.encode_prompt("What changed?")) - 1) * 10 + ends
    terms = [SimpleNamespace(total=1e9), SimpleNamespace(total=2e9)]
    monkeypatch.setattr(Family, "flops", lambda family, model, *given: asked.append(given) or terms)
    capfd.readouterr()
    assert training.announce() == 24e9
    assert asked == [(pytest.approx(tokens / 10), pytest.approx(ends / 10))]
    assert capfd.readouterr().out.splitlines() == [
        "train: 8 sequences a step = 2 micro-batch x 4 accumulated x 1 worker(s)",
        "train: 10 pairs, 23 references in 10 sequences an epoch",
        f"train: about {tokens:,} tokens an epoch ({tokens / 10:.1f} a sequence, {ends / 10:.1f} of them supervised)",
        "train: 1.5 epoch(s) x 2 steps = 3 steps",
        "train: 1,500 parameters train (vision 1,000, llm 500), 9,000 are frozen",
        "train: 0.024 TFLOP a step",
    ]
    monkeypatch.setattr(loop, "COUNTED", 1)
    training.announce()
    assert asked[1] != asked[0], "of the first sequence alone"
    capfd.readouterr()
    monkeypatch.setattr(loop, "LOGGED_STEPS", 2)
    training.curve.add({"step": 2, "loss": 1.5, "grad_norm": 2.0})
    training.log(2, 2.0, 24e9)
    line = "train: step 2/3 (66.7%)  loss 1.5000  grad_norm 2.0000  6 captions/s  ETA 0:00:02\n"
    assert capfd.readouterr().out == line, "23 captions in 2 steps of 2 s"
    training.runtime = Runtime(0, 2)
    assert training.spend(time.monotonic() - 100) == pytest.approx(time.monotonic(), abs=5)
    assert training.took["device_seconds"] == 2 * training.took["seconds"] > 199
    peaks = {("NVIDIA H200", "bf16"): 989e12, ("NVIDIA H200", "fp32"): None, ("", "bf16"): None}
    assert {asked: peak_flops(*asked) for asked in peaks} == peaks


def test_rows_keep_what_they_were_given_and_are_written_and_read(tmp_path):
    curve = Curve(("step", "loss", "val_loss"))
    assert math.isnan(curve.last("loss"))
    curve.add({"step": 1, "loss": 0.123456789})
    curve.add({"step": 2, "loss": 2.0})
    curve.fill({"val_loss": 0.5})
    curve.write(tmp_path / "curves.csv")
    assert (tmp_path / "curves.csv").read_text() == "step,loss,val_loss\n1,0.123457,\n2,2,0.5\n"
    other = Curve(("step", "loss", "val_cider"))
    other.read(tmp_path / "curves.csv")
    assert [tuple(row.values()) for row in other.rows] == [("1", "0.123457", ""), ("2", "2", "")]
    other.add({"step": 3, "val_cider": 0.5})
    assert (other.last("loss"), other.last("val_cider")) == (2, 0.5)
    assert (other.latest(("loss",)), other.latest(("loss", "val_cider"))) == ({"step": 2, "loss": 2}, {})


def work(rank: int, made: Recipe, mixture: Path, folder: Path, saved: int, killed_at: int) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    step = Training.step

    def step_or_die(training: Training, number: int, batches: Any) -> None:
        if number == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        step(training, number, batches)

    Training.step = step_or_die  # type: ignore[method-assign]  # of this process, which ends
    with interrupting(saved):
        try:
            Training(job(made, mixture, folder), Runtime(rank, 2)).run()
        except Interrupted:
            dist.barrier()
    dist.destroy_process_group()


def workers(count: int, made: Recipe, mixture: Path, folder: Path, saved: int = 0, killed_at: int = -1) -> None:
    """Train with one worker or two, to the end, to a checkpoint, or until signal 9 before a step, counted from 0."""
    folder.mkdir(exist_ok=True)
    if count == 1:
        with interrupting(saved):
            try:
                run_local(job(made, mixture, folder))
            except Interrupted:
                assert saved
        return
    (folder / "store").unlink(missing_ok=True)
    first, second = start(work, made, mixture, folder, saved, killed_at)
    first.join(240)
    if killed_at >= 0:
        second.kill()
    second.join(240)
    assert first.exitcode == (-signal.SIGKILL if killed_at >= 0 else 0)
    assert killed_at >= 0 or second.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_two_workers_train_validate_and_caption_as_one(stage, place, whole):
    made = place.recipe(epochs=3, micro_batch=2, zero_stage=stage, caption_val_pairs=1)
    workers(2, made, place.mixture, place.folder)
    assert_same(load_file(place.folder / "checkpoint" / "model.safetensors"), whole.weights, atol=2e-5)
    close = dict.fromkeys(("loss", "val_loss", "val_loss_second", "val_loss_toy", "val_cider"), 1e-5)
    close |= dict.fromkeys(("module_update_ratio/1", "module_update_ratio/2", "module_score/1"), 1e-3)
    for got, want in zip(read_curve(place.folder), whole.curve, strict=True):
        assert [got[name] == "" for name in got] == [want[name] == "" for name in want]
        for name, rel in close.items():
            assert not want[name] or float(got[name]) == pytest.approx(float(want[name]), rel=rel), name


@pytest.mark.fault("26")
@pytest.mark.slow
@pytest.mark.parametrize(("first", "stage"), [(2, 1), (1, 3)])
def test_a_run_goes_on_with_another_number_of_workers(first, stage, place, whole):
    made, folder = place.recipe(epochs=3, micro_batch=2, zero_stage=stage), place.folder / "runs"
    workers(first, made, place.mixture, folder, saved=2)
    assert [path.name for path in checkpoints(folder)] == ["step-00000002", "step-00000004"]
    workers(3 - first, made, place.mixture, folder)
    assert_same(load_file(folder / "checkpoint" / "model.safetensors"), whole.weights, atol=2e-5)


@pytest.mark.slow(150)
def test_two_workers_by_a_gpu_s_choices_train_alike_at_every_stage_and_resume_after_a_kill(place):
    """In bf16, by FlexAttention's rule, one sequence at a time; a killed run ends with the same bits."""
    losses = []
    for stage in range(4):
        how = {"precision": "bf16", "attention": "flex", "micro_batch": 1, "zero_stage": stage}
        made, folder = place.recipe(**how), place.folder / f"whole {stage}"
        workers(2, made, place.mixture, folder)
        losses.append([float(row["loss"]) for row in read_curve(folder)])
        assert losses[-1] == pytest.approx(losses[0], rel=1e-4)
        if stage in (1, 3):
            killed = place.folder / f"killed {stage}"
            workers(2, made, place.mixture, killed, killed_at=5)
            assert [path.name for path in checkpoints(killed)] == ["step-00000002", "step-00000004"]
            workers(2, made, place.mixture, killed)
            assert read_curve(killed) == read_curve(folder)
            got, want = (load_file(each / "checkpoint" / "model.safetensors") for each in (killed, folder))
            assert_same(got, want, atol=0)
            assert {weight.dtype for weight in got.values()} == {torch.bfloat16}
