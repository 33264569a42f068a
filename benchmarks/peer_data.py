"""Convert ingested records to training samples with `datasets.map`. benchmarks/data.py uses this as its peer.

    python benchmarks/peer_data.py '{"mode": "rows", "records": [...], "out": ..., "questions": ..., ...}'

The peer is the stock implementation with which this project is compared. The mode `rows` applies functions to single
rows, and the mode `batches` applies them to 1,000 rows at once. Both modes follow the documentation of `datasets`. They
check each record by the rules of `validate`, skip invalid records, create a sample from each reference with a question
chosen by the seed, and write Parquet. The samples equal the output of `m3diff convert`. Some parts do not have a stock
counterpart and are left out, which favours the peer: visual near-duplicates, great-expectations as a second engine, the
page, shuffling and sharding.

benchmarks/data.py starts this script in a fresh process. The script does not import m3diff.
"""

import hashlib
import json
import os
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_caching, disable_progress_bars

SPLITS = ("train", "val", "test")
MARKUP = re.compile(r"<[/!|]?[A-Za-z][^<>]*>|&(?:[a-z]{2,8}|#\d+|#x[0-9a-fA-F]+);")
COPIED_FIELDS = ("image_set", "dataset", "split", "images", "history")
UNIT_OF_MAXRSS = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss in bytes: macOS reports bytes, Linux KiB
MASK = 2**64 - 1

Row = dict[str, Any]
Batch = dict[str, list[Any]]


@dataclass(frozen=True)
class Order:
    """The arguments that the benchmark passes to this script.

    Attributes:
        mode: `rows` or `batches`.
        records: paths of the Parquet files written by `ingest`.
        out: folder for the samples and the temporary files of `datasets`.
        questions: questions for each dataset.
        warm_runs: number of runs after the first.
        started: time when the benchmark started this process, in seconds since the epoch.
    """

    mode: str
    records: Sequence[str]
    out: str
    questions: dict[str, list[str]]
    seed: int
    max_caption_chars: int
    warm_runs: int
    started: float


class RecordCheck:
    """Checks records by the rules of `validate`.

    Each record must be checked exactly once, in order. If several records have the same id, only the first is valid.
    """

    def __init__(self, records: Dataset, max_caption_chars: int) -> None:
        self.max_caption_chars = max_caption_chars
        self.ids: set[str] = set()
        self.splits_of_scene: dict[str, set[str]] = {}
        columns = records.select_columns(["scene", "split", "images"])[:]
        for scene, split in zip(columns["scene"], columns["split"], strict=True):
            if scene is not None:
                self.splits_of_scene.setdefault(scene, set()).add(split)
        images_by_row = zip(columns["split"], columns["images"], strict=True)
        self.test_pairs = {frozenset(digests_of(images)) for split, images in images_by_row if split == "test"}

    def is_sound(self, record: Row) -> bool:
        """Return whether `validate` accepts the record."""
        is_repeated = record["id"] in self.ids
        self.ids.add(record["id"])
        if record["fault"] is not None or record["id"] is None or is_repeated or record["split"] not in SPLITS:
            return False
        if record["scene"] is not None and len(self.splits_of_scene[record["scene"]]) > 1:
            return False
        return self.has_sound_references(record["references"]) and self.has_sound_images(record)

    def has_sound_references(self, references: Sequence[str]) -> bool:
        """Return whether there is at least one reference, and no reference is too long or contains markup."""
        is_too_long = any(len(text) > self.max_caption_chars for text in references)
        has_markup = any(MARKUP.search(text) for text in references)
        return bool(references) and not is_too_long and not has_markup

    def has_sound_images(self, record: Row) -> bool:
        """Return whether both images exist and, outside the test split, are not the images of a test pair."""
        images = record["images"]
        if len(images) != 2 or None in digests_of(images) or not all(os.path.exists(image["uri"]) for image in images):
            return False
        return record["split"] == "test" or frozenset(digests_of(images)) not in self.test_pairs


def digests_of(images: Sequence[Mapping[str, Any]]) -> list[bytes | None]:
    """Return the digests of a record's images, in order."""
    return [image["sha256"] for image in images]


class Conversion:
    """Converts valid records to samples in the same way as `m3diff convert`."""

    def __init__(self, questions: dict[str, list[str]], seed: int) -> None:
        self.questions = questions
        self.key = str(seed).encode()

    def samples(self, record: Row) -> list[Row]:
        """Return a sample for each reference. In the training split, empty and repeated references are dropped."""
        question = self.question(record)
        texts = [" ".join(text.split()) for text in record["references"]]
        if record["split"] == "train":
            index_of_text: dict[str, int] = {}
            for index, text in enumerate(texts):
                if text:
                    index_of_text.setdefault(text, index)
            numbered_texts = [(index, text) for text, index in index_of_text.items()]
        else:
            numbered_texts = list(enumerate(texts))
        fields = {name: record[name] for name in COPIED_FIELDS}
        return [
            {"id": f"{record['id']}#{index}", "record": record["id"], **fields, "question": question, "answer": text}
            for index, text in numbered_texts
        ]

    def question(self, record: Row) -> str:
        """Return the pair's question: in training, one chosen by the id and the seed; otherwise, the first question."""
        questions = self.questions[record["dataset"]]
        if record["split"] != "train":
            return questions[0]
        digest = hashlib.blake2b(record["id"].encode(), digest_size=8, key=self.key).digest()
        bits = int.from_bytes(digest, "little")
        # The output function of SplitMix64
        bits = (bits + 0x9E3779B97F4A7C15) & MASK
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK
        return questions[(bits ^ (bits >> 31)) % len(questions)]


def rows_of(batch: Batch) -> list[Row]:
    """Convert a batch of columns to rows."""
    names = list(batch)
    return [dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True)]


def columns_of(rows: Sequence[Row]) -> Batch:
    """Convert rows to a batch of columns."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def convert_by_rows(records: Dataset, check: RecordCheck, conversion: Conversion) -> Dataset:
    """Convert records to samples with functions that take a single record.

    Only the last step takes a batch, because it returns more rows than it takes.
    """

    def check_record(record: Row) -> Row:
        return {"is_sound": check.is_sound(record)}

    def convert_record(record: Row) -> Row:
        return {"samples": conversion.samples(record)}

    def flatten_batch(batch: Batch) -> Batch:
        return columns_of(list(chain.from_iterable(batch["samples"])))

    checked_records = records.map(check_record)
    sound_records = checked_records.filter(lambda record: record["is_sound"])
    sample_lists = sound_records.map(convert_record, remove_columns=sound_records.column_names)
    return sample_lists.map(flatten_batch, batched=True, remove_columns=["samples"])


def convert_by_batches(records: Dataset, check: RecordCheck, conversion: Conversion) -> Dataset:
    """Convert records to samples with functions that take a batch of 1,000 records."""

    def check_batch(batch: Batch) -> list[bool]:
        return [check.is_sound(record) for record in rows_of(batch)]

    def convert_batch(batch: Batch) -> Batch:
        samples: list[Row] = []
        for record in rows_of(batch):
            samples += conversion.samples(record)
        return columns_of(samples)

    sound_records = records.filter(check_batch, batched=True)
    return sound_records.map(convert_batch, batched=True, remove_columns=sound_records.column_names)


MODES: dict[str, Callable[[Dataset, RecordCheck, Conversion], Dataset]] = {
    "rows": convert_by_rows,
    "batches": convert_by_batches,
}


def run_peer(order: Order) -> dict[str, Any]:
    """Run the conversion once cold and then `warm_runs` times warm.

    Returns:
        A dictionary with the keys `cold_s` (seconds from the start of the process), `warm_s` (seconds of each warm
        run), `rows` (number of samples) and `own_peak_mb` (peak memory of this process).
    """
    disable_caching()  # otherwise later runs would only look up the result of the first one
    disable_progress_bars()
    out = Path(order.out)

    def convert() -> int:
        shutil.rmtree(out / "samples", ignore_errors=True)
        records = Dataset.from_parquet(list(order.records), cache_dir=str(out / "cache"))
        check = RecordCheck(records, order.max_caption_chars)
        samples = MODES[order.mode](records, check, Conversion(order.questions, order.seed))
        (out / "samples").mkdir(parents=True)
        samples.to_parquet(str(out / "samples" / "00000.parquet"))
        return samples.num_rows

    rows = convert()
    cold_s = time.time() - order.started
    warm_s = []
    for _ in range(order.warm_runs):
        start = time.time()
        convert()
        warm_s.append(time.time() - start)
    own_peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT_OF_MAXRSS / 1e6
    return {"cold_s": cold_s, "warm_s": warm_s, "rows": rows, "own_peak_mb": own_peak_mb}


if __name__ == "__main__":
    print(json.dumps(run_peer(Order(**json.loads(sys.argv[1])))))
