"""The numbers printed before a run and on each line."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from m3diff.models import FAMILIES
from m3diff.models.device import Device
from m3diff.models.family import Term
from m3diff.stages.train.batches import Loader, Schedule
from m3diff.stages.train.progress import COUNTED, Work, describe, eta, flop, measure, peak_flops, progress_line
from m3diff.stages.train.samples import read_samples

WORK = Work(accumulation=2, pairs=10, references=23, sequences=10, tokens=50.5, supervised=15.0, flops=3e9)


@pytest.fixture
def loader(mixture: Path, base: Path, tmp_path: Path) -> Loader:
    samples, processor = read_samples(mixture / "train", tmp_path), FAMILIES["m3diff"].load_processor(base)
    return Loader(samples, processor, threads=1, device=Device(False, "fp32"))


def test_a_run_is_measured_on_its_own_samples(loader: Loader) -> None:
    asked: list[tuple] = []

    def flops(config: object, tokens: float, supervised: float, settings: str) -> list[Term]:
        asked.append((config, tokens, supervised, settings))
        return [Term("a", 2.0, 1), Term("b", 3.0, 2)]

    plan = Schedule(loader.samples, None, seed=1, global_batch=4, micro_batch=2, epochs=2)
    work = measure(plan, loader, 2, SimpleNamespace(flops=flops), "config", "settings")  # type: ignore[arg-type]
    processor, held = loader.processor, loader.samples
    ends = [len(processor.encode_reference(text)) for text in held.reference]
    prompt = len(processor.encode_prompt("What changed?"))
    # the prompt less its last token once a pair, that token and all but the last of each reference once a reference
    assert work.tokens == pytest.approx(((prompt - 1) * 10 + sum(ends)) / 10)
    assert work.supervised == pytest.approx(sum(ends) / 10)
    assert asked == [("config", work.tokens, work.supervised, "settings")]
    assert (work.pairs, work.references, work.sequences, work.accumulation, work.flops) == (10, 23, 10, 2, 13.0)


def test_the_arithmetic_of_a_run_is_told(loader: Loader) -> None:
    plan = Schedule(loader.samples, None, seed=1, global_batch=8, micro_batch=2, epochs=1.5, ranks=2)
    counts = {"trainable": 1500, "frozen": 9000, "vision": 1000, "module": 0, "llm": 500}
    assert describe(WORK, plan, counts) == [
        "8 sequences a step = 2 micro-batch x 2 accumulated x 2 worker(s)",
        "10 pairs, 23 references in 10 sequences an epoch",
        "505 tokens an epoch (50.5 a sequence, 15.0 of them supervised)",
        "1.5 epoch(s) x 2 steps = 3 steps",
        "1,500 parameters train (vision 1,000, llm 500), 9,000 are frozen",
        "24 GFLOP a step",
    ]
    long = Work(**{**vars(WORK), "sequences": COUNTED + 1})
    assert describe(long, plan, counts)[2].startswith("about ")


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
