"""Samples of a split, the schedule of sequences, their distribution to workers, and image augmentation."""

import math
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from m3diff.images.open import load_image
from m3diff.models import FAMILIES
from m3diff.models.contract import Prepared
from m3diff.models.device import Device
from m3diff.models.fused import FLEX_BLOCK
from m3diff.records.errors import DataError
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.stages.train.batches import (
    SCHEMA,
    Loader,
    Samples,
    Schedule,
    find_usual_question,
    read_samples,
    read_training_samples,
)
from tests.errors import raises


def test_a_split_is_all_files_of_its_folder_in_their_order_of_any_writer(mixture, tmp_path):
    (tmp_path / "train").mkdir()
    train_table = pq.read_table(mixture / "train")
    val_table = pq.read_table(mixture / "val")
    large_types = pl.DataFrame(val_table).to_arrow()  # polars writes large strings and lists
    pq.write_table(large_types, tmp_path / "train" / "00001.parquet")
    pq.write_table(train_table, tmp_path / "train" / "00000.parquet", row_group_size=3)
    split_samples = read_samples(tmp_path / "train")
    expected = {name: train_table[name].to_pylist() + val_table[name].to_pylist() for name in SCHEMA}
    assert split_samples.table.to_dict(as_series=False) == expected
    before, after = expected["images"][1]
    assert split_samples.images(1) == ((before["uri"], before["sha256"]), (after["uri"], after["sha256"]))
    rows_by_pair: dict[str, list[int]] = {}
    for row, pair in enumerate(expected["image_set"]):
        rows_by_pair.setdefault(pair, []).append(row)
    pairs = [rows.tolist() for rows in split_samples.image_sets()]
    assert pairs == list(rows_by_pair.values()), "a pair may lie across two row groups"


def test_samples_of_one_pair_that_are_no_neighbours_are_one_pair():
    table = pl.DataFrame({name: ["a", "b", "b", "a"] for name in SCHEMA})
    assert [rows.tolist() for rows in Samples(table).image_sets()] == [[0], [1, 2], [3]]


def test_a_mixture_without_a_training_split_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    with raises(DataError, "train.no_sample", path=tmp_path / "train"):
        read_training_samples(tmp_path)


def test_a_mixture_without_a_validation_split_has_no_pair_of_it(tmp_path):
    (tmp_path / "val").mkdir()
    pq.write_table(pa.Table.from_pylist([], SAMPLE_SCHEMA), tmp_path / "val" / "00000.parquet")
    assert read_samples(tmp_path / "val").image_sets() == []


def samples(pairs: int = 7) -> Samples:
    rows = [(f"p{pair}", k) for pair in range(pairs) for k in range(1 + pair % 4)]
    values = [str(k) for _, k in rows]
    names = [pair for pair, _ in rows]
    return Samples(pl.DataFrame({name: names if name in ("record", "image_set") else values for name in SCHEMA}))


def samples_of_questions(*questions: str, images: int = 2, earlier_turns: int = 0) -> Samples:
    """Return samples with these questions, each with a number of images and of earlier turns."""
    rows = []
    for question in questions:
        row: dict[str, Any] = dict.fromkeys(("record", "image_set", "dataset", "answer"), "")
        row |= {"question": question, "images": [{"uri": "", "sha256": b""}] * images}
        rows.append(row | {"history": [{"question": "before", "answer": ""}] * earlier_turns})
    return Samples(pl.DataFrame(rows, schema=SCHEMA))


def joined(*parts: Samples) -> Samples:
    """Return one split with the samples of all parts, in their order."""
    return Samples(pl.concat(part.table for part in parts))


FOLLOW_UPS = samples_of_questions("c", "c", "c", earlier_turns=1)
SINGLE_IMAGES = samples_of_questions("s", "s", "s", images=1)


@pytest.mark.parametrize(
    ("splits", "expected"),
    [
        ([samples_of_questions("b", "a", "b"), samples_of_questions("a", "a", "a")], "b"),
        ([samples_of_questions("b", "a"), samples_of_questions("a")], "b"),
        ([samples_of_questions(), samples_of_questions("c")], "c"),
        ([samples_of_questions(), samples_of_questions()], None),
        ([joined(FOLLOW_UPS, samples_of_questions("a"))], "a"),
        ([FOLLOW_UPS, samples_of_questions("a")], "a"),
        ([FOLLOW_UPS, FOLLOW_UPS], None),
        ([joined(SINGLE_IMAGES, samples_of_questions("a"))], "a"),
        ([SINGLE_IMAGES, samples_of_questions("a")], "a"),
        ([joined(samples_of_questions("t", images=0), SINGLE_IMAGES)], "s"),
        ([samples_of_questions("t", images=0), SINGLE_IMAGES], "s"),
    ],
    ids=[
        "most frequent",
        "first of equals",
        "no validation",
        "no samples",
        "no follow-up",
        "validation of follow-ups",
        "follow-ups alone",
        "pairs before images",
        "pairs in training alone",
        "images before texts",
        "images in training alone",
    ],
)
def test_the_usual_question_is_that_of_validation(splits, expected):
    assert find_usual_question(*splits) == expected


def schedule(split_samples: Samples | None = None, **changes: int | float | None) -> Schedule:
    fields = {"max_captions": None, "seed": 1, "global_batch": 4, "micro_batch": 4, "epochs": 2, "ranks": 1} | changes
    return Schedule(split_samples or samples(), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_captions", [None, 1, 3])
def test_an_epoch_has_each_reference_once_in_sequences_of_one_pair(max_captions):
    """A different order of random draws would change the weights of a run."""
    plan = schedule(samples(23), max_captions=max_captions)
    names = plan.samples.table["image_set"].to_list()
    epoch_0, epoch_1 = ([rows.tolist() for rows in plan.epoch(epoch)] for epoch in (0, 1))
    assert epoch_0 != epoch_1
    for sequences in (epoch_0, epoch_1):
        assert sorted(row for rows in sequences for row in rows) == list(range(len(names)))
        assert all(len({names[row] for row in rows}) == 1 for rows in sequences)
        assert max(len(rows) for rows in sequences) == (max_captions or 4)
        assert plan.steps_per_epoch == math.ceil(len(sequences) / 4)
    epoch_of_four_pairs = schedule(samples(4), max_captions=2, seed=7).epoch(1)
    assert [rows.tolist() for rows in epoch_of_four_pairs] == [[9, 6], [8, 7], [5, 3], [0], [1, 2], [4]]


def rows_of(plan: Schedule, step: int) -> Counter:
    weights: Counter = Counter()
    for rank in range(plan.ranks):
        for micro_batch in plan.micro_batches(step, rank):
            for rows, weight in micro_batch:
                weights.update({int(row): weight for row in rows})
    return +weights


@pytest.mark.parametrize("changes", [{"micro_batch": 1}, {"micro_batch": 2}, {"ranks": 2, "micro_batch": 2}])
def test_workers_and_micro_batches_get_the_same_global_batches(changes):
    plan = schedule()
    changed_plan = schedule(**changes)
    assert plan.steps == changed_plan.steps == 4
    assert [schedule(global_batch=2, micro_batch=2, epochs=epochs).steps for epochs in (1, 0.5, 1.1)] == [4, 2, 5]
    assert [rows_of(plan, step) for step in range(4)] == [rows_of(changed_plan, step) for step in range(4)]


def test_workers_take_the_sequences_of_a_step_by_turns():
    plan = schedule(ranks=2, micro_batch=1)
    chosen = plan.global_sequences(0)
    for rank in range(2):
        mine = [[int(row) for row in rows] for batch in plan.micro_batches(0, rank) for rows, _ in batch]
        assert mine == [rows.tolist() for rows in chosen[rank::2]]
        assert [len(batch) for batch in plan.micro_batches(0, rank)] == [1, 1]


def test_the_last_step_of_an_epoch_is_filled_up_with_sequences_of_weight_zero():
    plan = schedule(ranks=2, micro_batch=1)
    last_step = [plan.micro_batches(1, rank) for rank in range(2)]
    assert sorted(weight for batches in last_step for batch in batches for _, weight in batch) == [0, 1, 1, 1]
    assert len(last_step[0]) == len(last_step[1])


def test_the_captions_of_so_many_steps_are_counted():
    plan = schedule(ranks=2, micro_batch=1)
    captions_by_step = [sum(rows_of(plan, step).values()) for step in range(4)]
    assert len(set(captions_by_step)) > 2, "steps alike would hide a wrong one"
    assert [plan.captions(steps) for steps in range(5)] == [sum(captions_by_step[:steps]) for steps in range(5)]


@pytest.fixture
def loader(mixture: Path, base: Path) -> Loader:
    training_samples = read_samples(mixture / "train")
    family = FAMILIES["m3diff"]
    processor = family.load_processor(base)
    return Loader(training_samples, processor, family.packing(), threads=1, device=Device(False, "fp32"))


def test_a_micro_batch_has_its_images_by_turns_and_supervises_what_counts(loader):
    training_samples = loader.samples
    encode = loader.processor.encode_answer
    second = training_samples.image_sets()[2]
    third = training_samples.image_sets()[3]
    batch = loader.build([(second, 1), (third, 0)])
    files = [file for rows in (second, third) for file in training_samples.images(rows[0])]
    for image, file in zip(batch.images["pixels"], files, strict=True):
        np.testing.assert_array_equal(image, loader.processor.image_processor.prepare_image(load_image(*file)))
    lengths = [sum(len(encode(training_samples.value("answer", row))) for row in rows) for rows in (second, third)]
    assert batch.weights.sum() == lengths[0]
    assert torch.equal(batch.weights, torch.tensor([1.0] * lengths[0] + [0.0] * lengths[1]))
    assert len(batch.labels) == sum(lengths)


def shifted(prepared: Prepared, rng: np.random.Generator) -> Prepared:
    """Return the pair with a random number added, so that each image shows what was drawn for it."""
    shift = int(rng.integers(1, 200, dtype=np.uint8))
    return prepared._replace(tensors={"pixels": prepared.tensors["pixels"] + shift})


def test_what_trains_is_augmented_by_seed_epoch_and_row(loader):
    fed = Loader(loader.samples, loader.processor, loader.packing, 2, loader.device, shifted)
    chosen = [(rows, 1) for rows in loader.samples.image_sets()]
    plain = loader.build(chosen).images["pixels"]
    assert torch.equal(fed.build(chosen).images["pixels"], plain), "for validation and the check of packing"
    assert torch.equal(loader.build(chosen, (1, 0)).images["pixels"], plain), "a family without augmentation"

    def added(visit: tuple[int, int]) -> list[int]:
        by_image = (fed.build(chosen, visit).images["pixels"] - plain).flatten(1)
        assert bool((by_image == by_image[:, :1]).all())
        assert torch.equal(by_image[::2, 0], by_image[1::2, 0]), "both images of a pair together"
        return by_image[::2, 0].tolist()

    drawn = [added(visit) for visit in ((1, 0), (1, 0), (1, 1), (2, 0))]
    assert drawn[0] == drawn[1]
    assert len({tuple(numbers) for numbers in drawn}) == 3
    assert len(set(drawn[0])) > len(chosen) / 2, "another number for each row"
    want = [np.random.default_rng([1, 0, int(rows[0]), 1]).integers(1, 200, dtype=np.uint8) for rows, _ in chosen]
    assert drawn[0] == want


def test_the_stream_gives_each_step_augmented_as_its_epoch_says(loader):
    fed = Loader(loader.samples, loader.processor, loader.packing, 2, loader.device, shifted)
    plan = schedule(loader.samples, seed=5, micro_batch=2)
    got = list(fed.stream(plan, rank=0, first_step=1))
    assert len(got) == plan.steps - 1
    for step, batches in enumerate(got, start=1):
        visit = (5, 0 if step < plan.steps_per_epoch else 1)
        for batch, rows in zip(batches, plan.micro_batches(step, 0), strict=True):
            want = fed.build(rows, visit)
            assert torch.equal(batch.images["pixels"], want.images["pixels"])
            assert torch.equal(batch.packed.input_ids, want.packed.input_ids)


def test_loading_threads_compute_alone_and_leave_the_threads_of_the_training_step(loader):
    torch.set_num_threads(2)
    try:
        assert loader.pool.submit(torch.get_num_threads).result() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)  # as in every test


def test_a_micro_batch_leaves_the_threads_as_kernel_and_gpu_take_it(loader, monkeypatch):
    loading_threads: set[str] = set()

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        loading_threads.add(threading.current_thread().name.split("_")[0])
        return tensor

    plan = schedule(loader.samples, micro_batch=2, epochs=1)
    plain = next(loader.stream(plan, rank=0, first_step=0))[0]
    assert plain.layout is not None
    assert not loading_threads
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    fed = Loader(loader.samples, loader.processor, loader.packing, threads=2, device=Device(True, "fp32", "flex"))
    flex = next(fed.stream(plan, rank=0, first_step=0))[0]
    assert flex.layout is None
    assert flex.packed.tokens % FLEX_BLOCK == 0
    assert loading_threads == {"prepare"}
    assert flex.packed.input_ids[:, : plain.packed.tokens].equal(plain.packed.input_ids)
