"""The numbers printed before a run and on each line."""

from pathlib import Path

import pytest

from m3diff.models import FAMILIES
from m3diff.models.device import Device
from m3diff.models.family import Term
from m3diff.stages.train import progress
from m3diff.stages.train.batches import Loader, Schedule
from m3diff.stages.train.progress import eta, flop, peak_flops, progress_line
from m3diff.stages.train.samples import read_samples


@pytest.fixture
def loader(mixture: Path, base: Path, tmp_path: Path) -> Loader:
    samples, processor = read_samples(mixture / "train", tmp_path), FAMILIES["m3diff"].load_processor(base)
    return Loader(samples, processor, threads=1, device=Device(False, "fp32"))


def test_a_run_is_counted_on_its_own_samples_and_described(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, float]] = []

    def flops(tokens: float, supervised: float) -> list[Term]:
        asked.append((tokens, supervised))
        return [Term("a", 1e9, 1), Term("b", 1e9 / 3, 2)]

    plan = Schedule(loader.samples, None, seed=1, global_batch=8, micro_batch=2, epochs=1.5, ranks=2)
    counts = {"trainable": 1500, "frozen": 9000, "vision": 1000, "module": 0, "llm": 500}
    per_step, lines = progress.describe(plan, loader, 2, flops, counts)
    processor = loader.processor
    ends = sum(len(processor.encode_reference(text)) for text in loader.samples.reference)
    # the prompt less its last token once a pair, that token and all but the last of each reference once a reference
    tokens = (len(processor.encode_prompt("What changed?")) - 1) * 10 + ends
    assert asked == [(pytest.approx(tokens / 10), pytest.approx(ends / 10))]
    assert per_step == pytest.approx(24e9)
    assert lines == [
        "8 sequences a step = 2 micro-batch x 2 accumulated x 2 worker(s)",
        "10 pairs, 23 references in 10 sequences an epoch",
        f"{tokens:,} tokens an epoch ({tokens / 10:.1f} a sequence, {ends / 10:.1f} of them supervised)",
        "1.5 epoch(s) x 2 steps = 3 steps",
        "1,500 parameters train (vision 1,000, llm 500), 9,000 are frozen",
        "24 GFLOP a step",
    ]
    monkeypatch.setattr(progress, "COUNTED", 9)
    assert progress.describe(plan, loader, 2, flops, counts)[1][2].startswith("about ")


def test_a_line_says_where_the_run_is() -> None:
    line = progress_line(20, 200, {"loss": 1.23456, "grad_norm": 2.0}, [], {"lr_vision": 4e-5}, 84.6, 0.5, 0.412)
    assert line == (
        "step 20/200 (10.0%)  loss 1.2346  grad_norm 2.0000  lr_vision 4.00e-05  85 captions/s  MFU 41%  ETA 2 min"
    )
    assert "MFU" not in progress_line(20, 200, {}, [], {}, 84.6, 0.5, None)
    assert "(10.0%)  module_update_ratio 0.00013 0.21  85" in progress_line(
        20, 200, {}, [1.26e-4, 0.2146], {}, 84.6, 0.5, None
    )


def test_numbers_have_the_fitting_unit_and_the_peak_is_known_by_the_device_s_name_in_bf16() -> None:
    assert [eta(seconds) for seconds in (45, 90.1, 12_000)] == ["45 s", "2 min", "3 h 20 min"]
    flops = {7.15e9: "7.15 GFLOP", 3.2e15: "3.2 PFLOP", 1e12: "1 TFLOP", 5e6: "5 MFLOP", 12: "12 FLOP"}
    assert {count: flop(count) for count in flops} == flops
    peaks = {("NVIDIA H200", "bf16"): 989e12, ("NVIDIA A100-SXM4-80GB", "bf16"): 312e12}
    assert {asked: peak_flops(*asked) for asked in peaks} == peaks
    assert [peak_flops(*asked) for asked in (("NVIDIA H200", "fp32"), ("", "bf16"))] == [None, None]
