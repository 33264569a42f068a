"""Samples on disk: the same values as the Parquet files, written once for all workers, and next to no memory."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.records.errors import DataError
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.stages.train import samples
from m3diff.stages.train.samples import SCHEMA, RowGroups, Samples, read_samples, read_training_samples
from tests.stages.train.toy import REFERENCES, write_mixture

CODE = """
import sys
from pathlib import Path
from m3diff.stages.train.batches import Schedule
from m3diff.stages.train.samples import read_samples

def anonymous_mb():
    \"\"\"Memory of this process alone: what is mapped from files does not count.\"\"\"
    line = next(line for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous:"))
    return int(line.split()[1]) / 1024

def hold(folder):
    held = read_samples(Path(folder), Path(sys.argv[3]))
    schedule = Schedule(held, max_captions=1, seed=1, global_batch=256, micro_batch=8, epochs=2)
    for epoch in range(2):
        schedule.epoch(epoch)
    assert held.reference[len(held) - 1] == f"reference {len(held) - 1} of some length, as captions have"
    return schedule

small = hold(sys.argv[1])
before = anonymous_mb()
large = hold(sys.argv[2])
print(anonymous_mb() - before)
"""


def write_split(folder: Path, count: int, captions_per_pair: int = 6) -> Path:
    """A split of `count` samples with names and references of usual length."""
    pairs = [row // captions_per_pair for row in range(count)]
    names = [f"clevr_change/CLEVR_{pair:06d}" for pair in range(pairs[-1] + 1)]
    digests = [f"{pair:032d}".encode() for pair in range(pairs[-1] + 1)]
    columns: dict[str, list] = {
        "pair": [names[pair] for pair in pairs],
        "dataset": ["clevr_change"] * count,
        "before": [f"data/01_raw/images/{names[pair]}_default.png" for pair in pairs],
        "after": [f"data/01_raw/sc_images/{names[pair]}_semantic.png" for pair in pairs],
        "before_sha256": [digests[pair] for pair in pairs],
        "after_sha256": [digests[pair] for pair in pairs],
        "question": ["What has changed from the first image to the second?"] * count,
        "reference": [f"reference {row} of some length, as captions have" for row in range(count)],
    }
    folder.mkdir(parents=True)
    pq.write_table(pa.table(columns), folder / "00000.parquet")
    return folder


@pytest.mark.slow(15)
def test_a_million_captions_take_less_than_a_tenth_of_a_gigabyte(tmp_path: Path) -> None:
    split = write_split(tmp_path / "large", 200_000)
    args = [write_split(tmp_path / "small", 20_000), split, tmp_path / "scratch"]
    done = subprocess.run([sys.executable, "-c", CODE, *map(str, args)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    megabytes = float(done.stdout) * 1_000_000 / 200_000
    assert 5 < megabytes < 100, "below 5 nothing was measured: the row numbers of two epochs take more"


def test_every_value_is_that_of_the_parquet_file(mixture: Path, tmp_path: Path) -> None:
    held = read_samples(mixture / "train", tmp_path)
    table = pq.read_table(mixture / "train")
    assert len(held) == len(table) > 20
    for name in SCHEMA.names:
        assert list(getattr(held, name)) == table[name].to_pylist(), name
    rows = table.to_pylist()
    for row in (0, len(rows) - 1):
        assert held.images(row) == tuple((rows[row][side], rows[row][f"{side}_sha256"]) for side in ("before", "after"))


def test_values_lie_in_the_mapped_file_and_not_in_memory(mixture: Path, tmp_path: Path) -> None:
    before = pa.total_allocated_bytes()
    held = read_samples(mixture / "train", tmp_path)
    assert pa.total_allocated_bytes() - before < 4096, held


def test_a_split_is_read_from_all_files_of_its_folder_in_their_order(mixture: Path, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    whole = (mixture / "train" / "00000.parquet").read_bytes()
    (tmp_path / "train" / "00001.parquet").write_bytes((mixture / "val" / "00000.parquet").read_bytes())
    (tmp_path / "train" / "00000.parquet").write_bytes(whole)
    one, both = read_samples(mixture / "train", tmp_path), read_samples(tmp_path / "train", tmp_path)
    assert list(both.pair)[: len(one)] == list(one.pair)
    assert list(both.pair)[len(one) :] == list(read_samples(mixture / "val", tmp_path).pair)
    assert list(one.reference)[1:3] == list(REFERENCES[:2])


def test_text_types_of_other_writers_are_read_too(mixture: Path, tmp_path: Path) -> None:
    table = pq.read_table(mixture / "val")
    large = [pa.large_string() if pa.types.is_string(kind) else pa.large_binary() for kind in table.schema.types]
    (tmp_path / "val").mkdir()
    pq.write_table(
        table.cast(pa.schema(list(zip(table.column_names, large, strict=True)))), tmp_path / "val" / "0.parquet"
    )
    got, want = read_samples(tmp_path / "val", tmp_path), read_samples(mixture / "val", tmp_path)
    assert [list(getattr(got, name)) for name in SCHEMA.names] == [list(getattr(want, name)) for name in SCHEMA.names]


@pytest.mark.parametrize("batch_rows", [1, 2, 5, 1000])
def test_a_pair_may_lie_across_two_batches_of_the_file(
    batch_rows: int, mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "BATCH_ROWS", batch_rows)
    names = pq.read_table(mixture / "train")["pair"].to_pylist()
    found = read_samples(mixture / "train", tmp_path).pairs()
    want = [[row for row, other in enumerate(names) if other == name] for name in dict.fromkeys(names)]
    assert [rows.tolist() for rows in found] == want
    assert len(found) == 10


def test_the_file_is_written_once_for_one_content_and_anew_for_another(mixture: Path, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    split = tmp_path / "train" / "00000.parquet"
    split.write_bytes((mixture / "train" / "00000.parquet").read_bytes())
    read_samples(tmp_path / "train", tmp_path / "scratch")
    (file,) = (tmp_path / "scratch").iterdir()
    made = file.stat().st_mtime_ns
    read_samples(tmp_path / "train", tmp_path / "scratch")
    assert [file.stat().st_mtime_ns] == [path.stat().st_mtime_ns for path in (tmp_path / "scratch").iterdir()] == [made]
    split.write_bytes((mixture / "val" / "00000.parquet").read_bytes())
    assert len(read_samples(tmp_path / "train", tmp_path / "scratch")) == len(pq.read_table(split))


def test_a_file_that_cannot_be_written_to_its_end_is_not_left_behind(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        yield from ()
        raise OSError("the disk is full")

    monkeypatch.setattr(samples, "_batches", fail)
    with pytest.raises(OSError, match="the disk is full"):
        read_samples(mixture / "train", tmp_path / "scratch")
    assert list((tmp_path / "scratch").iterdir()) == []


def test_workers_that_write_the_file_at_once_read_the_same(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, batches = threading.Barrier(3, timeout=300), samples._batches

    def at_once(*given: Any) -> Any:
        together.wait()
        return batches(*given)

    monkeypatch.setattr(samples, "_batches", at_once)
    with ThreadPoolExecutor(3) as pool:
        held = list(pool.map(lambda _: read_samples(mixture / "train", tmp_path / "scratch"), range(3)))
    assert [list(one.reference) for one in held] == [pq.read_table(mixture / "train")["reference"].to_pylist()] * 3
    assert [path.suffix for path in (tmp_path / "scratch").iterdir()] == [".arrow"]


def test_a_mixture_without_a_training_split_is_refused_and_one_without_validation_is_not(tmp_path: Path) -> None:
    mixture = write_mixture(tmp_path / "mixture")
    for split in ("train", "val"):
        (mixture / split / "00000.parquet").unlink()
    pq.write_table(pa.Table.from_pylist([], SAMPLE_SCHEMA), mixture / "val" / "00000.parquet")
    with pytest.raises(DataError, match="no sample of split 'train'; run `m3diff convert`"):
        read_training_samples(mixture, tmp_path)
    assert list(read_samples(mixture / "val", tmp_path).pairs()) == []


def test_groups_are_taken_by_number_from_both_ends_and_in_slices() -> None:
    groups = RowGroups(np.array([4, 5, 6, 7]), np.array([0, 1, 1, 4]))
    assert [rows.tolist() for rows in groups] == [[4], [], [5, 6, 7]]
    assert (groups[-1].tolist(), len(groups)) == ([5, 6, 7], 3)
    assert [rows.tolist() for rows in groups[1:9]] == [[], [5, 6, 7]]
    with pytest.raises(IndexError):
        groups[3]


def test_pairs_of_one_name_that_are_no_neighbours_are_two() -> None:
    table = pa.table({name: ["a", "b", "b", "a"] for name in SCHEMA.names})
    assert [rows.tolist() for rows in Samples(table).pairs()] == [[0], [1, 2], [3]]
