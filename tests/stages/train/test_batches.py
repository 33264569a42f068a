"""Samples on disk; which reference trains when: once per epoch, by the seed, dealt to workers; with which images."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from m3diff.models import FAMILIES
from m3diff.models.attention import RECURRING
from m3diff.models.device import Device
from m3diff.records.errors import DataError
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.stages.train import batches as batches_of
from m3diff.stages.train.batches import (
    SCHEMA,
    Loader,
    MicroBatch,
    RowGroups,
    Samples,
    Schedule,
    open_image,
    read_samples,
    read_training_samples,
)
from m3diff.stages.train.engine import token_loss
from m3diff.stages.train.loop import prepare_model
from tests.stages.train.toy import recipe, write_mixture


def columns_of(held: Samples) -> list[list[Any]]:
    return [list(getattr(held, name)) for name in SCHEMA.names]


def test_every_value_is_that_of_the_parquet_files_in_the_mapped_file_and_not_in_memory(
    mixture: Path, tmp_path: Path
) -> None:
    before = pa.total_allocated_bytes()
    held = read_samples(mixture / "train", tmp_path)
    assert pa.total_allocated_bytes() - before < 4096, held
    table = pq.read_table(mixture / "train")
    assert columns_of(held) == [table[name].to_pylist() for name in SCHEMA.names]
    assert len(held) == len(table) > 20
    plan = schedule(held, max_captions=1).epoch(0)
    assert plan.rows.nbytes + plan.offsets.nbytes <= 8 * len(held) + 4, "a million captions take 8 MB"
    rows = table.to_pylist()
    for row in (0, len(rows) - 1):
        assert held.images(row) == tuple((rows[row][side], rows[row][f"{side}_sha256"]) for side in ("before", "after"))


def test_a_split_is_all_files_of_its_folder_in_their_order_also_with_another_writer_s_types(
    mixture: Path, tmp_path: Path
) -> None:
    (tmp_path / "train").mkdir()
    val = pq.read_table(mixture / "val")
    large = [pa.large_string() if pa.types.is_string(kind) else pa.large_binary() for kind in val.schema.types]
    schema = pa.schema(list(zip(val.column_names, large, strict=True)))
    pq.write_table(val.cast(schema), tmp_path / "train" / "00001.parquet")
    (tmp_path / "train" / "00000.parquet").write_bytes((mixture / "train" / "00000.parquet").read_bytes())
    first, then = (columns_of(read_samples(mixture / split, tmp_path)) for split in ("train", "val"))
    assert columns_of(read_samples(tmp_path / "train", tmp_path)) == [a + b for a, b in zip(first, then, strict=True)]


@pytest.mark.parametrize("batch_rows", [1, 2, 5, 1000])
def test_a_pair_may_lie_across_two_batches_of_the_file(
    batch_rows: int, mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_of, "BATCH_ROWS", batch_rows)
    names = pq.read_table(mixture / "train")["pair"].to_pylist()
    want = [[row for row, other in enumerate(names) if other == name] for name in dict.fromkeys(names)]
    found = read_samples(mixture / "train", tmp_path).pairs()
    assert [rows.tolist() for rows in found] == want
    assert len(found) == 10


def test_the_file_is_written_once_for_one_content_by_workers_at_once_and_anew_for_another(
    mixture: Path, tmp_path: Path
) -> None:
    together, batches = threading.Barrier(3, timeout=300), batches_of._batches
    scratch, split = tmp_path / "scratch", tmp_path / "train" / "00000.parquet"
    split.parent.mkdir()
    split.write_bytes((mixture / "train" / "00000.parquet").read_bytes())
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(batches_of, "_batches", lambda *given: (together.wait(), batches(*given))[1])
        held = list(pool.map(lambda _: read_samples(split.parent, scratch), range(3)))
    assert [list(one.reference) for one in held] == [pq.read_table(split)["reference"].to_pylist()] * 3
    (file,) = scratch.iterdir()
    made = file.stat().st_mtime_ns
    read_samples(split.parent, scratch)
    assert [path.stat().st_mtime_ns for path in scratch.iterdir()] == [made]
    split.write_bytes((mixture / "val" / "00000.parquet").read_bytes())
    assert len(read_samples(split.parent, scratch)) == len(pq.read_table(split))


def test_a_file_that_cannot_be_written_to_its_end_is_not_left_behind(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        yield from ()
        raise OSError("the disk is full")

    monkeypatch.setattr(batches_of, "_batches", fail)
    with pytest.raises(OSError, match="the disk is full"):
        read_samples(mixture / "train", tmp_path / "scratch")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_mixture_without_a_training_split_is_refused_and_one_without_validation_is_not(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
    pq.write_table(pa.Table.from_pylist([], SAMPLE_SCHEMA), tmp_path / "val" / "00000.parquet")
    with pytest.raises(DataError, match="no sample of split 'train'; run `m3diff convert`"):
        read_training_samples(tmp_path, tmp_path)
    assert list(read_samples(tmp_path / "val", tmp_path).pairs()) == []


def test_groups_are_taken_by_number_and_in_parts_and_pairs_of_one_name_that_are_no_neighbours_are_two() -> None:
    groups = RowGroups(np.array([4, 5, 6, 7]), np.array([0, 1, 1, 4]))
    assert [rows.tolist() for rows in groups] == [[4], [], [5, 6, 7]]
    assert (groups[2].tolist(), len(groups)) == ([5, 6, 7], 3)
    assert [rows.tolist() for rows in groups.part(1, 9)] == [[], [5, 6, 7]]
    table = pa.table({name: ["a", "b", "b", "a"] for name in SCHEMA.names})
    assert [rows.tolist() for rows in Samples(table).pairs()] == [[0], [1, 2], [3]]


def samples(pairs: int = 7) -> Samples:
    rows = [(f"p{pair}", k) for pair in range(pairs) for k in range(1 + pair % 4)]
    other = [str(k) for _, k in rows]
    return Samples(pa.table({name: [pair for pair, _ in rows] if name == "pair" else other for name in SCHEMA.names}))


def schedule(held: Samples | None = None, **changes: int | float | None) -> Schedule:
    given = {"max_captions": None, "seed": 1, "global_batch": 4, "micro_batch": 4, "epochs": 2, "ranks": 1} | changes
    return Schedule(held or samples(), **given)  # type: ignore[arg-type]


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
def test_an_epoch_is_what_the_rule_in_plain_python_gives_and_stays_as_it_was(most: int | None, seed: int) -> None:
    """Another order of random draws gives other weights from the same parameters."""
    plan = schedule(samples(23), max_captions=most, seed=seed)
    for epoch in range(3):
        got = [rows.tolist() for rows in plan.epoch(epoch)]
        assert got == plan_in_words(list(plan.samples.pair), most, seed, epoch)
    first = schedule(samples(4), max_captions=2, seed=7).epoch(1)
    assert [rows.tolist() for rows in first] == [[9, 6], [8, 7], [5, 3], [0], [1, 2], [4]]


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
    assert [rows_of(one, step) for step in range(4)] == [rows_of(other, step) for step in range(4)]


def test_workers_take_sequences_by_turns_and_an_epoch_s_last_step_is_filled_up_with_weight_zero() -> None:
    plan = schedule(ranks=2, micro_batch=1)
    chosen = plan.global_sequences(0)
    for rank in range(2):
        mine = [[int(row) for row in rows] for batch in plan.micro_batches(0, rank) for rows, _ in batch]
        assert mine == [rows.tolist() for rows in chosen[rank::2]]
        assert [len(batch) for batch in plan.micro_batches(0, rank)] == [1, 1]
    last = [plan.micro_batches(1, rank) for rank in range(2)]
    assert sorted(weight for batches in last for batch in batches for _, weight in batch) == [0, 1, 1, 1]
    assert len(last[0]) == len(last[1])


def test_part_of_an_epoch_takes_that_share_of_its_steps_and_captions_are_those_that_count() -> None:
    shares = {1: 4, 0.5: 2, 1.1: 5}
    assert {share: schedule(global_batch=2, micro_batch=2, epochs=share).steps for share in shares} == shares
    plan = schedule(ranks=2, micro_batch=1)
    each = [sum(rows_of(plan, step).values()) for step in range(4)]
    assert len(set(each)) > 2, "steps alike would hide a wrong one"
    assert [plan.captions(steps) for steps in range(5)] == [sum(each[:steps]) for steps in range(5)]


@pytest.fixture
def loader(mixture: Path, base: Path, tmp_path: Path) -> Loader:
    held, processor = read_samples(mixture / "train", tmp_path), FAMILIES["m3diff"].load_processor(base)
    return Loader(held, processor, threads=1, device=Device(False, "fp32"))


def test_a_micro_batch_has_the_images_by_turns_and_supervises_the_references_of_sequences_that_count(
    loader: Loader,
) -> None:
    held, encode = loader.samples, loader.processor.encode_reference
    second, third = held.pairs()[2], held.pairs()[3]
    batch = loader.build([(second, 1), (third, 0)])
    files = [file for rows in (second, third) for file in held.images(rows[0])]
    for image, file in zip(batch.images, files, strict=True):
        np.testing.assert_array_equal(image, loader.processor.prepare_image(open_image(*file)))
    lengths = [sum(len(encode(held.reference[row])) for row in rows) for rows in (second, third)]
    assert batch.supervised_tokens == lengths[0]
    assert torch.equal(batch.weights, torch.tensor([1.0] * lengths[0] + [0.0] * lengths[1]))
    assert len(batch.packed.labels) == sum(lengths)


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


def test_the_stream_gives_each_step_from_the_first_asked_to_the_last_augmented_as_its_epoch_says(
    loader: Loader,
) -> None:
    fed = Loader(loader.samples, loader.processor, 2, loader.device, shifted)
    plan = schedule(loader.samples, seed=5, micro_batch=2)
    got = list(fed.stream(plan, rank=0, first_step=1))
    assert len(got) == plan.steps - 1
    for step, batches in enumerate(got, start=1):
        visit = (5, 0 if step < plan.steps_per_epoch else 1)
        for batch, rows in zip(batches, plan.micro_batches(step, 0), strict=True):
            want = fed.build(rows, visit)
            assert torch.equal(batch.images, want.images)
            assert torch.equal(batch.packed.input_ids, want.packed.input_ids)


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
    plan = schedule(loader.samples, micro_batch=2, epochs=1)
    steps = list(Loader(loader.samples, processor, threads=2, device=device).stream(plan, rank=0, first_step=0))
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


def test_what_was_read_is_made_complete_in_the_threads_in_its_order_and_on_a_cpu_not_copied(
    loader: Loader, pinned: list[tuple[str, torch.Tensor]]
) -> None:
    fed = Loader(loader.samples, loader.processor, threads=2, device=Device(True, "fp32"))
    read = [fed.read([(rows, 1)]) for rows in loader.samples.pairs()]
    here = loader.complete(read[0])
    assert all(now is before for now, before in zip(tensors_of(read[0])[:6], tensors_of(here)[:6], strict=True))
    assert here.images is read[0].images
    assert not pinned
    complete = list(fed.completed(read))
    assert len(complete) == len(read) > 5, "more than are made ahead"
    for before, after in zip(read, complete, strict=True):
        assert before.layout is None
        assert after.layout is not None
        assert after.packed.input_ids.equal(before.packed.input_ids)
        assert after.images.equal(before.images)
    assert {name.split("_")[0] for name, _ in pinned} == {"load"}


@pytest.mark.fault("09")
def test_an_image_that_changed_or_is_gone_is_refused_with_its_name_and_the_remedy(tmp_path: Path) -> None:
    mixture = write_mixture(tmp_path / "mixture", {"train": {"toy": 1}})
    (path, digest), (other, _) = read_samples(mixture / "train", tmp_path).images(0)
    Path(path).write_bytes(Path(other).read_bytes())
    with pytest.raises(DataError, match=rf"{Path(path).name}.*changed since ingest.*dvc repro"):
        open_image(path, digest)
    Path(path).unlink()
    with pytest.raises(DataError, match=rf"{Path(path).name}.*cannot be read"):
        open_image(path, digest)
