"""Which reference trains when: once per epoch, by the seed, dealt to workers and micro-batches; with which image."""

import threading
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pytest
import torch

from m3diff.models import FAMILIES
from m3diff.models.attention import RECURRING
from m3diff.models.device import Device
from m3diff.records.errors import DataError
from m3diff.stages.train.batches import Loader, MicroBatch, Schedule, open_image, plan_epoch
from m3diff.stages.train.engine import token_loss
from m3diff.stages.train.loop import prepare_model
from m3diff.stages.train.samples import SCHEMA, Samples, read_samples
from tests.stages.train.toy import recipe, write_mixture


def samples(pairs: int = 7) -> Samples:
    rows = [(f"p{pair}", k) for pair in range(pairs) for k in range(1 + pair % 4)]
    other = [str(k) for _, k in rows]
    columns = {name: [pair for pair, _ in rows] if name == "pair" else other for name in SCHEMA.names}
    return Samples(pa.table(columns))


def test_the_order_of_the_first_epoch_stays_as_it_was() -> None:
    """Another order of random draws gives other weights from the same parameters."""
    plan = [rows.tolist() for rows in plan_epoch(samples(4), 2, seed=7, epoch=1)]
    assert plan == [[9, 6], [8, 7], [5, 3], [0], [1, 2], [4]]


def plan_in_words(names: list[str], max_captions: int | None, seed: int, epoch: int) -> list[list[int]]:
    """The rule: mix each pair's references, cut them into sequences, mix the sequences."""
    rng = np.random.default_rng([seed, epoch])
    sequences: list[list[int]] = []
    for name in dict.fromkeys(names):
        mixed = [int(row) for row in rng.permutation([row for row, other in enumerate(names) if other == name])]
        size = max_captions or len(mixed)
        while mixed:
            sequences, mixed = [*sequences, mixed[:size]], mixed[size:]
    return [sequences[number] for number in rng.permutation(len(sequences))]


@pytest.mark.parametrize("most", [None, 1, 2, 3])
@pytest.mark.parametrize("seed", [0, 7407])
def test_an_epoch_is_what_the_rule_in_plain_python_gives(most: int | None, seed: int) -> None:
    held = samples(23)
    for epoch in range(3):
        got = [rows.tolist() for rows in plan_epoch(held, most, seed, epoch)]
        assert got == plan_in_words(list(held.pair), most, seed, epoch)


def schedule(**changes: int | float | None) -> Schedule:
    fields = {"max_captions": None, "seed": 1, "global_batch": 4, "micro_batch": 4, "epochs": 2, "ranks": 1}
    return Schedule(samples(), **{**fields, **changes})  # type: ignore[arg-type]


def rows_of(plan: Schedule, step: int) -> Counter:
    counted: Counter = Counter()
    for rank in range(plan.ranks):
        for micro_batch in plan.micro_batches(step, rank):
            for rows, weight in micro_batch:
                counted.update({int(row): weight for row in rows})
    return +counted


@pytest.mark.parametrize("changes", [{"micro_batch": 1}, {"micro_batch": 2}, {"ranks": 2, "micro_batch": 2}])
def test_workers_and_micro_batches_get_the_same_global_batches(changes: dict) -> None:
    one, other = schedule(), schedule(**changes)
    assert one.steps == other.steps == 4
    for step in range(one.steps):
        assert rows_of(one, step) == rows_of(other, step)


def test_workers_take_the_sequences_of_a_step_by_turns_in_micro_batches() -> None:
    plan = schedule(ranks=2, micro_batch=1)
    chosen = plan.global_sequences(0)
    for rank in range(2):
        mine = [[int(row) for row in rows] for batch in plan.micro_batches(0, rank) for rows, _ in batch]
        assert mine == [rows.tolist() for rows in chosen[rank::2]]
        assert [len(batch) for batch in plan.micro_batches(0, rank)] == [1, 1]


def test_the_last_step_of_an_epoch_is_filled_up_with_sequences_of_weight_zero() -> None:
    plan = schedule(ranks=2, micro_batch=1)
    weights = [weight for rank in range(2) for batch in plan.micro_batches(1, rank) for _, weight in batch]
    assert sorted(weights) == [0, 1, 1, 1]
    assert len({len(plan.micro_batches(1, rank)) for rank in range(2)}) == 1


def test_part_of_an_epoch_takes_that_share_of_its_steps() -> None:
    assert schedule(global_batch=2, micro_batch=2, epochs=1).steps == 4
    assert schedule(global_batch=2, micro_batch=2, epochs=0.5).steps == 2
    assert schedule(global_batch=2, micro_batch=2, epochs=1.1).steps == 5


def test_captions_of_steps_are_counted_without_what_only_fills_up() -> None:
    plan = schedule(ranks=2, micro_batch=1)
    assert plan.captions(0, 2) == len(plan.samples)
    assert plan.captions(0, 4) == 2 * len(plan.samples)
    assert plan.captions(1, 2) == sum(rows_of(plan, 1).values())
    each = [sum(rows_of(plan, step).values()) for step in range(4)]
    assert len(set(each)) > 2, "steps alike would hide a wrong one"
    for first in range(4):
        for end in range(first, 5):
            assert plan.captions(first, end) == sum(each[first:end])


@pytest.fixture
def loader(mixture: Path, base: Path, tmp_path: Path) -> Loader:
    samples, processor = read_samples(mixture / "train", tmp_path), FAMILIES["m3diff"].load_processor(base)
    return Loader(samples, processor, threads=1, device=Device(False, "fp32"))


def test_a_micro_batch_has_the_images_before_and_after_by_turns(loader: Loader) -> None:
    held = loader.samples
    pairs = held.pairs()
    batch = loader.build([(pairs[1], 1), (pairs[2], 1)])
    files = [path for rows in pairs[1:3] for path in (held.before[rows[0]], held.after[rows[0]])]
    assert len(batch.images) == 4
    for image, path in zip(batch.images, files, strict=True):
        digest = dict(held.images(row)[side] for row in range(len(held)) for side in (0, 1))[path]
        np.testing.assert_array_equal(image, loader.processor.prepare_image(open_image(path, digest)))


def test_supervised_tokens_are_those_of_the_references_of_sequences_that_count(loader: Loader) -> None:
    pairs = loader.samples.pairs()
    lengths = [
        sum(len(loader.processor.encode_reference(loader.samples.reference[row])) for row in pairs[n]) for n in (2, 3)
    ]
    batch = loader.build([(pairs[2], 1), (pairs[3], 0)])
    assert batch.supervised_tokens == lengths[0]
    assert torch.equal(batch.weights, torch.tensor([1.0] * lengths[0] + [0.0] * lengths[1]))
    assert len(batch.packed.labels) == sum(lengths)


def test_the_stream_gives_each_step_from_the_first_asked_to_the_last(loader: Loader) -> None:
    plan = Schedule(loader.samples, None, seed=1, global_batch=4, micro_batch=2, epochs=2)
    got = list(loader.stream(plan, rank=0, first_step=2))
    assert len(got) == plan.steps - 2
    for step, batches in enumerate(got, start=2):
        want = [loader.build(batch) for batch in plan.micro_batches(step, 0)]
        assert [b.packed.input_ids.tolist() for b in batches] == [b.packed.input_ids.tolist() for b in want]


def shifted(pair: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The pair with one number added, so that a picture tells what was drawn for it."""
    return pair + rng.integers(1, 200, dtype=np.uint8)


def test_what_trains_is_augmented_by_seed_epoch_and_row_and_what_is_built_alone_is_not(loader: Loader) -> None:
    fed = Loader(loader.samples, loader.processor, 2, loader.device, shifted)
    chosen = [(rows, 1) for rows in loader.samples.pairs()]
    plain = loader.build(chosen).images
    assert torch.equal(fed.build(chosen).images, plain), "for validation and the check of packing"
    assert torch.equal(loader.build(chosen, (1, 0)).images, plain), "a family without augmentation"

    def added(visit: tuple[int, int]) -> list[int]:
        by_image = (fed.build(chosen, visit).images - plain).flatten(1)
        assert bool((by_image == by_image[:, :1]).all())
        assert torch.equal(by_image[::2, 0], by_image[1::2, 0]), "both images of a pair together"
        return by_image[::2, 0].tolist()

    drawn = [added(visit) for visit in ((1, 0), (1, 0), (1, 1), (2, 0))]
    assert drawn[0] == drawn[1]
    assert len({tuple(numbers) for numbers in drawn}) == 3
    assert len(set(drawn[0])) > len(chosen) / 2, "another number for each row"
    want = [np.random.default_rng([1, 0, int(rows[0]), 1]).integers(1, 200, dtype=np.uint8) for rows, _ in chosen]
    assert drawn[0] == want


def test_each_step_of_the_stream_is_augmented_as_its_epoch_says(loader: Loader) -> None:
    fed = Loader(loader.samples, loader.processor, 2, loader.device, shifted)
    plan = Schedule(loader.samples, None, seed=5, global_batch=4, micro_batch=2, epochs=2)
    for step, batches in enumerate(fed.stream(plan, rank=0, first_step=1), start=1):
        visit = (5, 0 if step < plan.steps_per_epoch else 1)
        for batch, rows in zip(batches, plan.micro_batches(step, 0), strict=True):
            assert torch.equal(batch.images, fed.build(rows, visit).images)


def tensors_of(batch: MicroBatch) -> list[torch.Tensor]:
    found = [getattr(batch.packed, field.name) for field in fields(batch.packed)]
    if batch.layout:
        found += [batch.layout.rows, batch.layout.places, *(mask for mask in batch.layout.masks if mask is not None)]
    return [*found, batch.images, batch.weights]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.Tensor]]:
    """(thread, tensor) of every tensor that is pinned from now on; a GPU's copies are on the CPU."""
    done: list[tuple[str, torch.Tensor]] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        done.append((threading.current_thread().name, copy))
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(Device, "torch", torch.device("cpu"))
    return done


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_a_micro_batch_for_a_gpu_leaves_the_threads_pinned_and_is_only_copied_by_the_step(
    attention: Literal["sdpa", "flex"], loader: Loader, base: Path, pinned: list[tuple[str, torch.Tensor]]
) -> None:
    made = recipe(base)
    model, processor = prepare_model(made.cfg, made.model, made.compute, FAMILIES["m3diff"])
    device, cpu = Device(True, "fp32", attention), Device(False, "fp32", attention)
    plan = Schedule(loader.samples, None, seed=1, global_batch=4, micro_batch=2, epochs=1)
    fed = Loader(loader.samples, processor, threads=2, device=device)
    steps = list(fed.stream(plan, rank=0, first_step=0))
    assert len(pinned) > 0
    made_ready = {id(tensor) for _, tensor in pinned}
    assert {name.split("_")[0] for name, _ in pinned} == {"load"}
    for step, batches in enumerate(steps):
        for batch, rows in zip(batches, plan.micro_batches(step, 0), strict=True):
            assert {id(tensor) for tensor in tensors_of(batch)} <= made_ready
            assert (batch.layout is None) == (attention == "flex")
            assert (batch.packed.tokens % RECURRING == 0) == (attention == "flex")
            plain = Loader(loader.samples, processor, threads=1, device=cpu).build(rows)
            with torch.no_grad():
                assert token_loss(model, batch, processor, device).equal(token_loss(model, plain, processor, cpu))
    assert len(pinned) == len(made_ready), "the step pins nothing"


def test_what_was_read_is_made_complete_in_the_threads_in_its_order(
    loader: Loader, pinned: list[tuple[str, torch.Tensor]]
) -> None:
    fed = Loader(loader.samples, loader.processor, threads=2, device=Device(True, "fp32"))
    read = [fed.read([(rows, 1)]) for rows in loader.samples.pairs()]
    assert not pinned
    complete = list(fed.completed(read))
    assert len(complete) == len(read) > 5, "more than are made ahead"
    for before, after in zip(read, complete, strict=True):
        assert before.layout is None
        assert after.layout is not None
        assert after.packed.input_ids.equal(before.packed.input_ids)
        assert after.images.equal(before.images)
    assert {name.split("_")[0] for name, _ in pinned} == {"load"}


def test_on_a_cpu_nothing_is_pinned_or_copied(loader: Loader, pinned: list[tuple[str, torch.Tensor]]) -> None:
    read = loader.read([(rows, 1) for rows in loader.samples.pairs()])
    complete = loader.complete(read)
    assert not pinned
    assert all(after is before for before, after in zip(tensors_of(read)[:6], tensors_of(complete)[:6], strict=True))
    assert complete.images is read.images


def test_an_image_that_changed_or_is_gone_is_refused_with_its_name_and_the_remedy(tmp_path: Path) -> None:
    mixture = write_mixture(tmp_path / "mixture")
    held = read_samples(mixture / "train", tmp_path)
    (path, digest), (other, _) = held.images(0)
    Path(path).write_bytes(Path(other).read_bytes())
    with pytest.raises(DataError, match=rf"{Path(path).name}.*changed since ingest.*dvc repro"):
        open_image(path, digest)
    Path(path).unlink()
    with pytest.raises(DataError, match=rf"{Path(path).name}.*cannot be read"):
        open_image(path, digest)
