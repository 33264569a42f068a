"""The numbers printed before a run, on each line and as a warning; the curves and what is carried over a checkpoint."""

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m3diff.models import FAMILIES
from m3diff.models.device import Device
from m3diff.stages.train import progress
from m3diff.stages.train.batches import Loader, Schedule, read_samples
from m3diff.stages.train.job import Runtime
from m3diff.stages.train.loop import Training
from m3diff.stages.train.progress import NOTHING, Curve, columns, peak_flops
from tests.stages.train.toy import recipe


def test_a_run_is_counted_on_its_own_samples_and_described(
    mixture: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, processor = read_samples(mixture / "train"), FAMILIES["m3diff"].load_processor(base)
    loader = Loader(held, processor, threads=1, device=Device(False, "fp32"))
    plan = Schedule(held, None, seed=1, global_batch=8, micro_batch=2, epochs=1.5, ranks=2)
    ends = sum(len(processor.encode_reference(text)) for text in held.reference)
    # the prompt less its last token once a pair, that token and all but the last of each reference once a reference
    tokens = (len(processor.encode_prompt("What changed?")) - 1) * 10 + ends
    mean = progress.mean_tokens(plan, loader)
    assert mean == (pytest.approx(tokens / 10), pytest.approx(ends / 10))
    counts = {"trainable": 1500, "frozen": 9000, "vision": 1000, "module": 0, "llm": 500}
    assert progress.describe(plan, *mean, 2, 24e9, counts) == [
        "8 sequences a step = 2 micro-batch x 2 accumulated x 2 worker(s)",
        "10 pairs, 23 references in 10 sequences an epoch",
        f"{tokens:,} tokens an epoch ({tokens / 10:.1f} a sequence, {ends / 10:.1f} of them supervised)",
        "1.5 epoch(s) x 2 steps = 3 steps",
        "1,500 parameters train (vision 1,000, llm 500), 9,000 are frozen",
        "0.024 TFLOP a step",
    ]
    monkeypatch.setattr(progress, "COUNTED", 9)
    assert progress.describe(plan, *mean, 2, 24e9, counts)[2].startswith("about ")


UPDATES = ("module_update_ratio/1", "module_update_ratio/2")


def training(base: Path, values: Mapping[str, float], steps: int, module: tuple[str, ...] = UPDATES) -> Any:
    """What the lines of a run are made of, with one row of its curves."""
    curve = Curve(("step", "loss", "grad_norm", *module))
    curve.add(values)
    took, group = {"captions": 846, "seconds": 10.0}, SimpleNamespace(delay=0.0)
    made = SimpleNamespace(curve=curve, schedule=SimpleNamespace(steps=steps), module=module, took=took)
    made.rates, made.runtime, made.is_logged = {"lr_vision": 4e-5}, Runtime(0, 2), lambda step: step % 20 == 0
    made.family, made.groups = FAMILIES["m3diff"], [group]
    made.job = SimpleNamespace(cfg=recipe(base, warmup_share=0.3).cfg)
    return made


def test_a_line_says_where_the_run_is(base: Path, capsys: pytest.CaptureFixture) -> None:
    values = {"step": 20, "loss": 1.23456, "grad_norm": 2.0}
    plain = training(base, values, 200, module=())
    Training.log(plain, 20, 0.5, 2e12, 4.854e12)
    Training.log(plain, 21, 0.5, 2e12, 4.854e12)
    Training.log(training(base, values | dict(zip(UPDATES, (1.26e-4, 0.2146), strict=True)), 200), 20, 0.5, 0, None)
    line = (
        "train: step 20/200 (10.0%)  loss 1.2346  grad_norm 2.0000{}  lr_vision 4.00e-05  85 captions/s{}  ETA 0:01:30"
    )
    updates = "  module_update_ratio 0.00013 0.21"
    assert capsys.readouterr().out.splitlines() == [line.format("", "  MFU 41%"), line.format(updates, "")]


def test_a_module_that_changes_nothing_after_the_warm_up_is_an_alarm(base: Path) -> None:
    """After a warm-up of three of ten steps."""

    def warning(step: int, *ratios: float) -> str | None:
        return Training.warning(training(base, {"step": step, **dict(zip(UPDATES, ratios, strict=True))}, 10))

    small, large = NOTHING * 0.99, NOTHING * 1.01
    told = warning(4, small, 1e-6)
    assert told is not None
    assert "at step 4 of 10, after the warm-up, each of its updates is under 0.0039" in told
    assert "(module_update_ratio/1 0.0039, module_update_ratio/2 1e-06)" in told
    assert told.endswith("Raise the module's rate (rates.module), or start it above zero (module.init_gain).")
    assert warning(4, small, large) is warning(4, large, small) is None, "one level is enough"
    assert warning(3, 0.0, 0.0) is None, "the warm-up is not over"
    assert Training.warning(training(base, {"step": 9}, 10, module=())) is None


def test_the_peak_is_known_by_the_device_s_name_in_bf16() -> None:
    peaks = {("NVIDIA H200", "bf16"): 989e12, ("NVIDIA A100-SXM4-80GB", "bf16"): 312e12}
    peaks |= {("NVIDIA H200", "fp32"): None, ("", "bf16"): None}
    assert {asked: peak_flops(*asked) for asked in peaks} == peaks


def test_rows_keep_what_they_were_given_and_are_written_and_read(tmp_path: Path) -> None:
    rates, losses = ("lr_vision", "lr_llm"), ("val_loss", "val_loss_a", "val_loss_b")
    want = ("step", "epoch", "loss", *rates, "grad_norm", "module_score/2", *losses, "val_cider")
    assert columns(["vision", "llm"], ["module_score/2"], ["a", "b"]) == want
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


def test_the_last_value_of_a_column_and_the_last_row_that_has_some() -> None:
    curve = Curve(("step", "loss", "a", "b"))
    for row in ({"a": 1, "b": 2}, {"a": 3, "b": 4}, {"a": 5}, {"loss": 6}):
        curve.add({"step": len(curve.rows) + 1, **row})
    assert (curve.last("b"), curve.last("a")) == (4, 5)
    assert curve.latest(("b", "a")) == {"step": 2, "b": 4, "a": 3}
    assert curve.latest(("loss", "a")) == {}
