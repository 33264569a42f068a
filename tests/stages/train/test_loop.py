"""The training loop: weights after resumes and with several workers, printed lines, and curves."""

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

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from m3diff.models import FAMILIES
from m3diff.models.blip2idc import Augment
from m3diff.models.checkpoint import verify_manifest
from m3diff.models.device import Device
from m3diff.models.family import Family
from m3diff.records.files import sha256_of_folder
from m3diff.settings.section import ParamsError
from m3diff.stages.train import engine, loop
from m3diff.stages.train.job import STOP_FILE, StoppedError, WorkerContext
from m3diff.stages.train.loop import NEGLIGIBLE_UPDATE_RATIO, MeanLengths, Training, peak_flops
from m3diff.stages.train.packing_check import Differences, PackingComparison
from m3diff.stages.train.stage import TrainReport, run_local
from m3diff.stages.train.state import Curve, checkpoints, latest_valid_checkpoint
from tests.errors import Message, raises
from tests.stages.train.ranks import start
from tests.stages.train.toy import (
    Interrupted,
    Recipe,
    Trained,
    Workspace,
    assert_same,
    assert_same_run,
    interrupting,
    job,
    read_curve,
    recipe,
    run,
    run_dir_of,
)
from tests.tiny import MDP, pair_prompt, tiny_settings
from tests.tiny_blip2 import blip2_settings, tiny_blip2

COMPUTE_CHANGES = (
    {"micro_batch": 1, "activation_checkpointing": "full"},
    {"zero_stage": 2, "micro_batch": 2},
)
NINE_STEPS = {"epochs": 3, "caption_val_pairs": 1, "caption_every_checkpoints": 2}


@pytest.fixture(scope="module")
def undisturbed(mixture: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return an undisturbed run of nine steps that captions pairs at its checkpoints."""
    return run(recipe(base, zero_stage=1, **NINE_STEPS), mixture, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def six_steps(mixture: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(recipe(base), mixture, tmp_path_factory.mktemp("six"))


def warnings_of_steps(report: TrainReport) -> list[str]:
    """Return the warnings, except that such a short training has learned nothing."""
    return [warning for warning in report.warnings if Message("train.nothing_learned") != warning]


def test_without_the_module_the_same_loop_trains_the_base(workspace):
    trained = workspace.run(model=tiny_settings(None), epochs=1)
    assert trained.weights.keys() == load_file(workspace.base / "model.safetensors").keys(), "no tensor of a module"
    assert [row["lr_module"] for row in trained.curve] == ["", "", ""]
    assert trained.report.parameters["module"] == 0
    assert trained.report.module == {}
    assert warnings_of_steps(trained.report) == []
    assert not [name for name in trained.curve[0] if name.startswith("module_")]


def test_the_same_seed_gives_the_same_weights_and_validation_touches_none(workspace, six_steps):
    validated_otherwise = workspace.run(val_pairs=0, caption_val_pairs=1, checkpoint_every_steps=3)
    assert_same_run(validated_otherwise, six_steps, curve=False)
    assert validated_otherwise.column("loss") == six_steps.column("loss")
    assert validated_otherwise.report.val_loss is None
    assert validated_otherwise.report.val_loss_by_dataset == {}


@pytest.mark.parametrize(
    "compute",
    [*COMPUTE_CHANGES, *(pytest.param({"zero_stage": stage}, marks=pytest.mark.slow) for stage in (1, 3))],
    ids=str,
)
def test_how_a_run_is_computed_changes_nothing(compute, workspace, six_steps):
    """Averaging the means of micro-batches, a common mistake, would differ by more than 1e-3."""
    linear = torch.nn.functional.linear
    actual = workspace.run(**compute)
    assert torch.nn.functional.linear is linear, "DeepSpeed's linear would change how the next run here rounds"
    assert_same(actual.weights, six_steps.weights, atol=2e-5)
    close = {"loss": 1e-5, "val_loss": 1e-5, "grad_norm": 2e-4}
    close |= dict.fromkeys(six_steps.report.module, 2e-4)
    for name, rel in close.items():
        for a, b in zip(actual.column(name), six_steps.column(name), strict=True):
            assert a == (b if b is None else pytest.approx(b, rel=rel)), name
    assert actual.report.parameters == six_steps.report.parameters
    assert actual.report.rows_out == six_steps.report.rows_out


def steps_with_values(trained: Trained, *columns: str) -> list[int]:
    """Return the steps whose rows have a value in each of these columns."""
    return [int(row["step"]) for row in trained.curve if all(row[column] for column in columns)]


MODULE_COLUMNS = ["module_update_ratio/1", "module_update_ratio/2", "module_score/1", "module_score/2"]


def test_the_curves_have_a_row_for_each_step(undisturbed):
    assert steps_with_values(undisturbed) == list(range(1, 10))
    assert undisturbed.column("epoch") == pytest.approx([step / 3 for step in range(1, 10)], abs=1e-4)
    assert all(norm and norm > 0.001 for norm in undisturbed.column("grad_norm"))


def test_the_curves_have_a_column_for_each_part_figure_and_dataset(undisturbed):
    rates = ["lr_vision", "lr_module", "lr_projector", "lr_llm"]
    losses = ["val_loss", "val_loss_second", "val_loss_toy"]
    expected = ["step", "epoch", "loss", *rates, "grad_norm", *MODULE_COLUMNS, *losses, "val_cider"]
    assert list(undisturbed.curve[0]) == expected


def test_the_curves_have_losses_at_each_checkpoint_and_cider_at_every_second(undisturbed):
    assert steps_with_values(undisturbed, "val_loss") == [2, 4, 6, 8, 9]
    assert steps_with_values(undisturbed, "val_loss_second", "val_loss_toy") == [2, 4, 6, 8, 9]
    assert steps_with_values(undisturbed, "val_cider") == [4, 8, 9]


def test_the_curves_have_the_contribution_of_the_first_and_last_step(undisturbed):
    assert steps_with_values(undisturbed, "module_update_ratio/1", "module_score/2") == [1, 9]


def test_who_follows_the_training_finds_its_curves_with_the_last_validation(undisturbed):
    assert undisturbed.followed == undisturbed.curve


def test_the_report_counts_samples_steps_and_parameters(undisturbed):
    report = undisturbed.report
    assert report.rows_in == 23
    assert report.rows_out == 69
    assert report.steps == 9
    assert report.exported_step == 9
    assert sum(report.parameters.values()) == report.parameters_trainable


def test_the_report_has_the_last_values_of_the_curves(undisturbed):
    report = undisturbed.report
    assert report.loss == pytest.approx(undisturbed.column("loss")[-1], abs=1e-5)
    assert report.val_loss == pytest.approx(undisturbed.column("val_loss")[-1], abs=1e-5)
    assert report.val_loss_by_dataset.keys() == {"toy", "second"}
    assert report.module == {name: undisturbed.column(name)[-1] for name in MODULE_COLUMNS}


def test_the_manifest_of_the_output_names_family_base_and_question(undisturbed, base):
    checkpoint = undisturbed.folder / "out" / "checkpoint"
    manifest = verify_manifest(checkpoint)
    assert manifest["family"] == "m3diff"
    assert (
        manifest["trained_on"]
        == verify_manifest(checkpoint / "adapters")["trained_on"]
        == {"question": "What changed?", "own_questions": False, "images": [2], "turns": 1}
    )
    assert manifest["base_sha256"] == sha256_of_folder(base)
    assert (checkpoint / manifest["base"]).resolve() == base.resolve()


@pytest.mark.fault("S3")
@pytest.mark.parametrize("stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("blip2idc", 2, 3))])
def test_a_run_that_resumes_ends_with_the_same_weights_curve_and_report(stage, workspace, undisturbed):
    """For BLIP2IDC, the augmented images must be the same, too."""
    changes = {"zero_stage": stage}
    if stage == "blip2idc":
        workspace = workspace._replace(base=tiny_blip2(workspace.folder / "base"))
        changes = {"model": blip2_settings(augment=Augment(blur=0.7, sigma=(0.4, 0.5), jpeg=0.7, quality=(50, 80)))}
    run_recipe = workspace.recipe(**changes, **NINE_STEPS)
    expected = undisturbed if stage == 1 else workspace.run(run_recipe, "whole")
    workspace.interrupted(run_recipe, 2, "broken")
    assert_same_run(workspace.run(run_recipe, "broken"), expected)


@pytest.mark.fault("S3")
def test_what_a_run_took_is_counted_over_all_its_attempts(workspace, six_steps):
    workspace.interrupted(workspace.recipe(), 2)
    hours = run_dir_of(workspace.folder) / "hours.json"
    usage = json.loads(hours.read_text())
    assert usage["device_seconds"] == usage["seconds"] > usage["waited"] > 0
    hours.write_text(json.dumps(usage | {"seconds": 3600, "device_seconds": 2 * 3600}))
    actual = workspace.run()
    assert_same_run(actual, six_steps)
    speed = json.loads((workspace.folder / "runs" / "train_speed.json").read_text())
    assert 3600 < speed["seconds"] < 3700
    assert speed["captions_per_s"] == pytest.approx(actual.report.rows_out / speed["seconds"], abs=1e-4)
    assert 2 <= speed["device_hours"] < 2.1
    assert speed["device"] == "cpu"
    assert speed["devices"] == 1


def test_a_run_goes_on_after_how_it_is_computed_was_changed(workspace, undisturbed, capfd):
    run_recipe = workspace.recipe(epochs=3, zero_stage=1)
    workspace.interrupted(run_recipe, 2)
    actual = workspace.run(run_recipe.changed(checkpoint_every_steps=3, micro_batch=2, zero_stage=0))
    assert "resumed after step 4 of 9" in capfd.readouterr().out
    assert_same(actual.weights, undisturbed.weights, atol=2e-5)
    assert actual.report.rows_out == undisturbed.report.rows_out
    assert len(actual.curve) == 9


@pytest.mark.fault("13", "m4")
@pytest.mark.parametrize("step", [3, 4])
def test_a_run_that_diverges_is_tried_once_and_keeps_its_last_good_checkpoint(step, workspace, monkeypatch):
    original = engine.take_step
    losses = []

    def take_step(*arguments: Any, **options: Any) -> tuple[float, float]:
        loss, norm = original(*arguments, **options)
        losses.append(loss)
        return loss, float("nan") if len(losses) == step else norm

    monkeypatch.setattr(engine, "take_step", take_step)
    with raises(ParamsError, "train.diverged", step=step):
        workspace.run()
    assert len(losses) == step
    newest = latest_valid_checkpoint(run_dir_of(workspace.folder))
    assert newest is not None
    assert newest.name == "step-00000002"
    assert all(torch.isfinite(moment).all() for moment in load_file(newest / "exp_avg.safetensors").values())


def test_code_that_cannot_save_the_model_is_tried_once(workspace, monkeypatch):
    exports = []

    def save(*_: Any, **__: Any) -> None:
        exports.append(1)
        raise AttributeError("'Glimpse' object has no attribute 'generation_config'")

    monkeypatch.setattr(loop, "save_checkpoint", save)
    with raises(ParamsError, "train.wrong_code", family="m3diff") as refused:
        workspace.run(max_failures=2)
    assert "generation_config" in refused.value.fields["cause"]
    assert refused.value.fields["location"].startswith("test_loop.py:")
    assert len(exports) == 1


def test_a_disk_that_fails_at_the_export_is_tried_again(workspace, monkeypatch):
    exports = []
    save_checkpoint = loop.save_checkpoint

    def save(*arguments: Any, **fields: Any) -> None:
        exports.append(1)
        if len(exports) == 1:
            raise OSError(5, "Input/output error")
        save_checkpoint(*arguments, **fields)

    monkeypatch.setattr(loop, "save_checkpoint", save)
    workspace.run(max_failures=2)
    assert len(exports) == 2


def test_best_exports_the_checkpoint_with_the_highest_cider(workspace, monkeypatch):
    scores = iter([0.2, 0.9, 0.5])
    weights_by_step = {}
    original_save = Training.save
    monkeypatch.setattr(loop.Validation, "score_answers", lambda self, engine: {"val_cider": next(scores)})

    def save_and_keep(training: Training, step: int) -> Path:
        folder = original_save(training, step)
        weights_by_step[step] = load_file(folder / "weights.safetensors")
        return folder

    monkeypatch.setattr(Training, "save", save_and_keep)
    trained = workspace.run(export="best", caption_val_pairs=1, caption_every_checkpoints=1)
    assert trained.report.exported_step == 4
    newline = next(name for name in weights_by_step[4] if name.endswith("image_newline"))
    assert torch.equal(trained.weights["image_newline"], weights_by_step[4][newline])
    assert not torch.equal(weights_by_step[2][newline], weights_by_step[6][newline])
    assert len(trained.curve) == 6, "the curves are those of the whole run"


UNUSED = tiny_settings(MDP | {"init_gain": 0.0}, module=1e-10)
USED = tiny_settings(MDP | {"init_gain": 2.0})


@pytest.mark.parametrize(
    ("model", "warned"),
    [(UNUSED, True), (replace(UNUSED, delays={"module": 0.5}), False), (USED, False)],
    ids=["unused", "delayed", "used"],
)
def test_a_module_that_never_trains_raises_the_alarm(model, warned, workspace, monkeypatch, capfd):
    """The run has six steps, three of them warm-up, and checkpoints after 2, 4 and 6. A delay takes three steps."""
    monkeypatch.setattr(loop, "LOG_EVERY_STEPS", 2)
    trained = workspace.run(warmup_share=0.5, model=model)
    out = capfd.readouterr().out
    warnings = [line.removeprefix("train: warning: ") for line in out.splitlines() if "train: warning: " in line]
    expected = [Message("train.module_changes_nothing", step=step, steps=6) for step in (4, 6)] * warned
    assert [warning for warning in warnings if Message("train.nothing_learned") != warning] == expected
    assert warnings_of_steps(trained.report) == expected[-1:]
    ratio_1 = trained.report.module["module_update_ratio/1"]
    ratio_2 = trained.report.module["module_update_ratio/2"]
    assert (ratio_1 < NEGLIGIBLE_UPDATE_RATIO) == (model.module.init_gain == 0)
    assert f"  module_update_ratio {ratio_1:.2g} {ratio_2:.2g}  lr_vision" in out
    lines = re.findall(r"step (\d)/6 \((\d+)\.\d%\)  loss [\d.]+  grad_norm .* (\d+) captions/s  ETA 0:0\d:\d\d\n", out)
    assert [(step, share) for step, share, _ in lines] == [("2", "33"), ("4", "66"), ("6", "100")]
    assert all(int(speed) > 0 for *_, speed in lines)
    speed_of_run = json.loads((workspace.folder / "runs" / "train_speed.json").read_text())["captions_per_s"]
    assert int(lines[-1][2]) + 1 > speed_of_run, "only the run's speed counts the last validation"
    assert [bool(value) for value in trained.column("module_score/2")] == [True, True, False, True, False, True]


@pytest.fixture
def training(workspace: Workspace, alone: None, capfd: pytest.CaptureFixture[str]) -> Any:
    """Return the loop of a run of 3 steps with 8 sequences each, before its first step, with round parameter counts."""
    training = workspace.started(global_batch=8, micro_batch=2, epochs=1.5)
    training.parameters = {"trainable": 1500, "frozen": 9000, "vision": 1000, "module": 0, "llm": 500}
    capfd.readouterr()
    return training


@pytest.fixture
def flops_arguments(training: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Return the tokens and supervised tokens of each call of `count_flops`, which returns 3 GFLOP per sequence."""
    lengths: list[tuple[float, float]] = []
    terms = [SimpleNamespace(total=1e9), SimpleNamespace(total=2e9)]

    def count_flops(model: Any, family: Family, tokens: float, supervised: float, images: int) -> list[SimpleNamespace]:
        assert images == 2
        lengths.append((tokens, supervised))
        return terms

    monkeypatch.setattr(training, "family", replace(training.family, count_flops=count_flops))
    return lengths


def token_counts(training: Any) -> tuple[int, int]:
    """Return the number of tokens and of supervised tokens in an epoch, using only the tokenizer."""
    processor = training.processor
    supervised = sum(len(processor.encode_answer(text)) for text in training.schedule.samples.table["answer"])
    # the prompt less its last token once a pair; that token and all but the last of each reference once a reference
    prompts = (len(pair_prompt(processor, "What changed?")) - 1) * 10
    return prompts + supervised, supervised


def test_a_run_prints_its_size(training, capfd):
    training.print_size(training.measure_lengths(), 24e9)
    tokens, supervised = token_counts(training)
    assert capfd.readouterr().out.splitlines() == [
        "train: 8 sequences per step = micro-batches of 2 x 4 accumulation steps x 1 worker",
        "train: 10 pairs with 23 references, packed into 10 sequences per epoch",
        f"train: about {tokens:,} tokens per epoch: {tokens / 10:.1f} per sequence, of which {supervised / 10:.1f} "
        "are supervised",
        "train: 1.5 epochs x 2 steps per epoch = 3 steps",
        "train: 1,500 trained parameters (vision 1,000, llm 500), 9,000 frozen parameters",
        "train: 0.024 TFLOP per step",
    ]


def test_the_flops_of_a_step_are_those_of_its_mean_sequences(training, flops_arguments):
    tokens, supervised = token_counts(training)
    assert training.count_flops_per_step(training.measure_lengths()) == 24e9
    assert flops_arguments == [(pytest.approx(tokens / 10), pytest.approx(supervised / 10))]


def test_each_row_of_a_sequence_counts_in_the_size_and_the_flops_of_a_run(training, flops_arguments, capfd):
    """A family whose packing does not share prompts makes several rows of a sequence."""
    lengths = [
        MeanLengths(images=2, share=0.75, tokens=100.0, supervised_tokens=8.0, rows=2.0),
        MeanLengths(images=2, share=0.25, tokens=40.0, supervised_tokens=4.0),
    ]
    assert training.count_flops_per_step(lengths) == 8 * 1.75 * 3e9
    training.print_size(lengths, None)
    assert ": 160.0 per sequence, of which 13.0 are supervised" in capfd.readouterr().out


def test_a_long_epoch_is_measured_on_its_first_sequences(training, monkeypatch):
    lengths = training.measure_lengths()
    monkeypatch.setattr(loop, "COUNTED_SEQUENCES", 1)
    assert training.measure_lengths() != lengths


def test_a_progress_line_has_speed_and_time_left(training, monkeypatch, capfd):
    """The speed is that of 23 captions in 2 steps of 2 s."""
    monkeypatch.setattr(loop, "LOG_EVERY_STEPS", 2)
    training.curve.add({"step": 2, "loss": 1.5, "grad_norm": 2.0})
    training.print_progress(2, 2.0, 24e9)
    line = "train: step 2/3 (66.7%)  loss 1.5000  grad_norm 2.0000  6 captions/s  ETA 0:00:02\n"
    assert capfd.readouterr().out == line


def test_a_progress_line_has_the_share_of_the_peak_of_all_gpus(training, monkeypatch, capfd):
    """The step of 2 s takes 1978 TFLOP, which is half of what two devices of 989 TFLOP/s can do."""
    job = training.job
    compute = job.compute.model_copy(update={"gpu": True})
    training.job = replace(job, compute=compute, cfg=job.cfg.model_copy(update={"precision": "bf16"}))
    training.worker = WorkerContext(0, 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(loop, "LOG_EVERY_STEPS", 2)
    training.curve.add({"step": 2, "loss": 1.5, "grad_norm": 2.0})
    training.print_progress(2, 2.0, 1978e12)
    assert "  MFU 50%  " in capfd.readouterr().out


@pytest.mark.parametrize(
    ("rank", "is_requested", "saved"), [(0, True, [7]), (0, False, []), (1, True, [])], ids=["asked", "not", "second"]
)
def test_a_run_that_is_asked_to_end_saves_its_step_first(rank, is_requested, saved, tmp_path):
    """Only the first worker looks for the request, so that all workers end after the same step."""
    training: Any = Training.__new__(Training)
    training.worker = WorkerContext(rank, 1)
    training.job = SimpleNamespace(run_dir=tmp_path)
    saved_steps: list[int] = []
    training.save = saved_steps.append
    if is_requested:
        (tmp_path / STOP_FILE).touch()
    if saved:
        with raises(StoppedError, "train.stopped", step=7):
            training.stop_if_requested(7)
    else:
        training.stop_if_requested(7)
    assert saved_steps == saved


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_packing_that_differs_is_refused_where_its_limits_were_measured(precision, monkeypatch, capsys):
    """The comparison takes sequences of several samples first."""
    comparison = PackingComparison(Differences(1.0, {"llm": 0.0}), Differences(0.0, {"llm": 0.0}))
    monkeypatch.setattr(loop, "compare_with_separate_passes", lambda *_: comparison)
    training: Any = Training.__new__(Training)
    training.worker = WorkerContext()
    training.device = Device(False, precision)
    training.family = training.packing = training.processor = None
    sequences = [np.array([0]), np.array([1, 2]), np.array([3]), np.array([4, 5])]
    training.schedule = SimpleNamespace(epoch=lambda epoch: sequences)
    compared: list[tuple[list[int], int]] = []
    training.loader = SimpleNamespace(
        read=lambda batch: compared.extend((rows.tolist(), weight) for rows, weight in batch)
    )
    if precision == "fp32":
        with raises(ParamsError, "train.packing_differs", differences=comparison.excesses()):
            training.check_packing(None)
    else:
        training.check_packing(None)
    assert compared == [([1, 2], 1), ([4, 5], 1)]
    output = capsys.readouterr().out
    assert f"train: {comparison}\n" in output
    warning = Message("train.packing_differs", differences=comparison.excesses())
    assert warning.in_text(output) == (precision == "bf16")


@pytest.mark.parametrize(
    ("part", "images", "is_refused"),
    [
        ("vision", 1, True),
        ("vision", 0, False),
        ("module", 2, True),
        ("module", 1, False),
        ("llm", 0, True),
    ],
)
def test_a_part_needs_a_gradient_if_the_step_has_enough_images_for_it(part, images, is_refused, monkeypatch):
    monkeypatch.setattr(engine, "gradient_norms", lambda engine, family: {part: 0.0})
    training: Any = Training.__new__(Training)
    training.engine = None
    training.family = FAMILIES["m3diff"]
    training.worker = WorkerContext()
    training.job = SimpleNamespace(cfg=SimpleNamespace(model="small"))
    samples = SimpleNamespace(images_of=lambda number: (None,) * number)
    training.schedule = SimpleNamespace(samples=samples, global_sequences=lambda step: [0, images])
    if is_refused:
        with raises(ParamsError, "train.part_without_gradient", key=f"models.small.rates.{part}", part=part):
            training.check_gradients()
    else:
        training.check_gradients()


@pytest.mark.parametrize(("rank", "printed"), [(0, "train: a line\n"), (1, "")], ids=["first", "second"])
def test_only_the_first_worker_prints(rank, printed, capsys):
    WorkerContext(rank, 2).print_once("a line")
    assert capsys.readouterr().out == printed


def test_the_only_worker_shares_a_value_without_a_process_group():
    assert WorkerContext().broadcast("a folder") == "a folder"


def test_device_seconds_are_those_of_all_workers(training):
    training.worker = WorkerContext(0, 2)
    assert training.count_time(time.monotonic() - 100) == pytest.approx(time.monotonic(), abs=5)
    assert training.usage.device_seconds == 2 * training.usage.seconds > 199


@pytest.mark.parametrize(
    ("device_name", "precision", "peak"),
    [("NVIDIA H200", "bf16", 989e12), ("NVIDIA H200", "fp32", None), ("", "bf16", None)],
    ids=["known", "other precision", "unknown"],
)
def test_the_peak_is_that_of_a_known_gpu_in_bf16(device_name, precision, peak):
    assert peak_flops(device_name, precision) == peak


def test_a_curve_is_written_with_empty_values_where_a_step_has_none(tmp_path):
    curve = Curve(("step", "loss", "val_loss"))
    curve.add({"step": 1, "loss": 0.123456789})
    curve.add({"step": 2, "loss": 2.0})
    curve.set_values({"val_loss": 0.5})
    curve.write(tmp_path / "curves.csv")
    assert (tmp_path / "curves.csv").read_text() == "step,loss,val_loss\n1,0.123457,\n2,2,0.5\n"


@pytest.fixture
def resumed_curve(tmp_path: Path) -> Curve:
    """Return a curve with other columns that has read two rows of an earlier attempt and has a third row."""
    (tmp_path / "curves.csv").write_text("step,loss,val_loss\n1,0.123457,\n2,2,0.5\n")
    curve = Curve(("step", "loss", "val_cider"))
    curve.read(tmp_path / "curves.csv")
    assert [tuple(row.values()) for row in curve.rows] == [("1", "0.123457", ""), ("2", "2", "")]
    curve.add({"step": 3, "val_cider": 0.5})
    return curve


def test_the_last_value_of_a_column_is_from_the_last_row_that_has_one(resumed_curve):
    assert resumed_curve.last_value("loss") == 2
    assert resumed_curve.last_value("val_cider") == 0.5
    assert math.isnan(Curve(("step", "loss")).last_value("loss"))


def test_the_latest_values_are_from_the_last_row_that_has_them_all(resumed_curve):
    assert resumed_curve.last_values(("loss",)) == {"step": 2, "loss": 2}
    assert resumed_curve.last_values(("loss", "val_cider")) == {}


def work(rank: int, run_recipe: Recipe, mixture: Path, folder: Path, saved: int, killed_at: int) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    step = Training.train_step

    def step_or_die(training: Training, number: int, batches: Any) -> None:
        if number == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        step(training, number, batches)

    Training.train_step = step_or_die  # type: ignore[method-assign]  # of this process, which ends
    with interrupting(saved):
        try:
            Training(job(run_recipe, mixture, folder), WorkerContext(rank, 2)).run()
        except Interrupted:
            dist.barrier()
    dist.destroy_process_group()


def workers(count: int, run_recipe: Recipe, mixture: Path, folder: Path, saved: int = 0, killed_at: int = -1) -> None:
    """Train with one or two workers to the end, to a checkpoint, or until SIGKILL before the step `killed_at`."""
    folder.mkdir(exist_ok=True)
    if count == 1:
        with interrupting(saved):
            try:
                run_local(job(run_recipe, mixture, folder))
            except Interrupted:
                assert saved
        return
    (folder / "store").unlink(missing_ok=True)
    first_worker, second_worker = start(work, run_recipe, mixture, folder, saved, killed_at)
    first_worker.join(240)
    if killed_at >= 0:
        second_worker.kill()
    second_worker.join(240)
    assert first_worker.exitcode == (-signal.SIGKILL if killed_at >= 0 else 0)
    assert killed_at >= 0 or second_worker.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_two_workers_train_validate_and_caption_as_one(stage, workspace, undisturbed):
    run_recipe = workspace.recipe(epochs=3, micro_batch=2, zero_stage=stage, caption_val_pairs=1)
    workers(2, run_recipe, workspace.mixture, workspace.folder)
    assert_same(load_file(workspace.folder / "checkpoint" / "model.safetensors"), undisturbed.weights, atol=2e-5)
    close = dict.fromkeys(("loss", "val_loss", "val_loss_second", "val_loss_toy", "val_cider"), 1e-5)
    close |= dict.fromkeys(("module_update_ratio/1", "module_update_ratio/2", "module_score/1"), 1e-3)
    for actual, expected in zip(read_curve(workspace.folder), undisturbed.curve, strict=True):
        assert [actual[name] == "" for name in actual] == [expected[name] == "" for name in expected]
        for name, rel in close.items():
            assert not expected[name] or float(actual[name]) == pytest.approx(float(expected[name]), rel=rel), name


@pytest.mark.fault("26")
@pytest.mark.slow
@pytest.mark.parametrize(("first_count", "stage"), [(2, 1), (1, 3)])
def test_a_run_goes_on_with_another_number_of_workers(first_count, stage, workspace, undisturbed):
    run_recipe = workspace.recipe(epochs=3, micro_batch=2, zero_stage=stage)
    folder = workspace.folder / "runs"
    workers(first_count, run_recipe, workspace.mixture, folder, saved=2)
    assert [path.name for path in checkpoints(folder)] == ["step-00000002", "step-00000004"]
    workers(3 - first_count, run_recipe, workspace.mixture, folder)
    assert_same(load_file(folder / "checkpoint" / "model.safetensors"), undisturbed.weights, atol=2e-5)


@pytest.mark.slow(75)
def test_two_workers_as_on_gpus_train_alike_at_every_stage_and_resume_after_a_kill(workspace):
    """The runs use bf16, FlexAttention and one sequence per micro-batch. A killed run ends with the same bits."""
    losses = []
    for stage in range(4):
        changes = {"precision": "bf16", "attention": "flex", "micro_batch": 1, "zero_stage": stage}
        run_recipe = workspace.recipe(**changes)
        folder = workspace.folder / f"whole {stage}"
        workers(2, run_recipe, workspace.mixture, folder)
        losses.append([float(row["loss"]) for row in read_curve(folder)])
        assert losses[-1] == pytest.approx(losses[0], rel=1e-4)
        if stage in (1, 3):
            killed = workspace.folder / f"killed {stage}"
            workers(2, run_recipe, workspace.mixture, killed, killed_at=5)
            assert [path.name for path in checkpoints(killed)] == ["step-00000002", "step-00000004"]
            workers(2, run_recipe, workspace.mixture, killed)
            assert read_curve(killed) == read_curve(folder)
            actual, expected = (
                load_file(run_folder / "checkpoint" / "model.safetensors") for run_folder in (killed, folder)
            )
            assert_same(actual, expected, atol=0)
            assert {weight.dtype for weight in actual.values()} == {torch.bfloat16}
