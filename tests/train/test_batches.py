"""Which caption trains when: once per epoch, by the seed, in whatever share of workers and micro-batches."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from components.records import DataError
from components.train.batches import Samples, Schedule, plan_epoch, read_samples
from tests.train.toy import write_mixture


def samples(pairs: int = 7) -> Samples:
    rows = [(f"p{pair}", k) for pair in range(pairs) for k in range(1 + pair % 4)]
    column = [str(k) for _, k in rows]
    return Samples([pair for pair, _ in rows], column, column, column, column)


@pytest.mark.parametrize("packing", ["unpacked", "k", "full"])
def test_each_caption_comes_once_per_epoch(packing: str) -> None:
    held = samples()
    for epoch in range(3):
        rows = np.concatenate(plan_epoch(held, packing, 2, seed=1, epoch=epoch))
        assert sorted(rows) == list(range(len(held)))


def test_sequences_hold_one_pair_and_as_many_captions_as_the_mode_allows() -> None:
    held = samples()
    longest = {"unpacked": 1, "k": 2, "full": 4}
    for packing, most in longest.items():
        sequences = plan_epoch(held, packing, 2, seed=1, epoch=0)
        assert all(len({held.pair[row] for row in rows}) == 1 for rows in sequences)
        assert max(len(rows) for rows in sequences) == most


def test_epochs_differ_and_the_seed_repeats_them() -> None:
    def plan(seed: int, epoch: int) -> list[list[int]]:
        return [rows.tolist() for rows in plan_epoch(samples(), "full", 2, seed=seed, epoch=epoch)]

    assert plan(1, 0) == plan(1, 0)
    assert plan(1, 0) != plan(1, 1)
    assert plan(1, 0) != plan(2, 0)


def schedule(**changes: int) -> Schedule:
    fields = {"packing": "full", "k": 2, "seed": 1, "global_batch": 4, "micro_batch": 4, "epochs": 2, "ranks": 1}
    return Schedule(samples(), **{**fields, **changes})


def rows_of(plan: Schedule, step: int) -> Counter:
    counted: Counter = Counter()
    for rank in range(plan.ranks):
        for micro_batch in plan.share(step, rank).micro_batches:
            for rows, weight in micro_batch:
                counted.update({int(row): weight for row in rows})
    return +counted


@pytest.mark.parametrize("changes", [{"micro_batch": 1}, {"micro_batch": 2}, {"ranks": 2, "micro_batch": 2}])
def test_workers_and_micro_batches_share_the_same_global_batches(changes: dict) -> None:
    one, other = schedule(), schedule(**changes)
    assert one.steps == other.steps == 4
    for step in range(one.steps):
        assert rows_of(one, step) == rows_of(other, step)


def test_every_worker_takes_as_many_micro_batches() -> None:
    plan = schedule(ranks=2, micro_batch=1)
    for step in range(plan.steps):
        assert len({len(plan.share(step, rank).micro_batches) for rank in range(2)}) == 1


def test_a_mixture_without_a_training_split_is_refused_and_one_without_validation_is_not(tmp_path: Path) -> None:
    mixture = write_mixture(tmp_path / "mixture")
    for shard in (mixture / "samples").iterdir():
        shard.unlink()
    with pytest.raises(DataError, match="no sample of split 'train'"):
        read_samples(mixture, "train")
    assert read_samples(mixture, "val").pairs() == []
