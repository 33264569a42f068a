"""Caption the test split: batched greedy decoding, saliency maps, and a control run.

The control pairs each image before with the image after of another pair. A model that looks at both images must lose
its score there. Run: `m3diff predict`.
"""

import io
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from components.files import write_atomic
from components.models.checkpoint import CheckpointError
from components.models.generation import Captioner, load_captioner
from components.models.images import load_image
from components.predict.params import Predict
from components.progress import progress
from components.records import DataError
from components.reports import StageReport

ImagePair = tuple[Image.Image, Image.Image]


class PredictReport(StageReport):
    """Pairs of the test split in, captions out; `words` is the mean length of a caption."""

    words: float


class PairSample(NamedTuple):
    """One pair of the test split; digests as in the samples, 32 bytes."""

    id: str
    before: str
    after: str
    before_sha256: bytes | None
    after_sha256: bytes | None
    question: str


COLUMNS = ["pair", "before", "after", "before_sha256", "after_sha256", "question"]
"""Columns of the samples, in the order of `PairSample`."""


def predict(cfg: Predict, mixture: Path, model: Path, out: Path) -> PredictReport:
    """Write predictions.json, predictions_shuffled.json, saliency.npz and report.json to `out`.

    Raises:
        DataError: no test pair; an image that is unreadable or not the one that ingest saw; or a checkpoint that is
            incomplete.
    """
    pairs = read_test_pairs(mixture)[: cfg.limit or None]
    try:
        captioner = load_captioner(model / "checkpoint", cfg.max_new_tokens)
    except CheckpointError as error:
        raise DataError(str(error)) from error
    captions = caption_all(captioner, pairs, cfg.batch_pairs, "predict")
    _write_captions(out / "predictions.json", pairs, captions)
    shuffled = caption_all(captioner, shuffle_after(pairs), cfg.batch_pairs, "predict shuffled")
    _write_captions(out / "predictions_shuffled.json", pairs, shuffled)
    _write_saliency(out / "saliency.npz", captioner, pairs, cfg.batch_pairs)
    words = round(float(np.mean([len(caption.split()) for caption in captions])), 2)
    return PredictReport(stage="predict", rows_in=len(pairs), rows_out=len(captions), words=words).write(
        out / "report.json"
    )


def read_test_pairs(mixture: Path) -> list[PairSample]:
    """The test split's pairs, each once, in the mixture's order."""
    pairs: dict[str, PairSample] = {}
    for file in sorted((mixture / "test").glob("*.parquet")):
        table = pq.read_table(file, columns=COLUMNS).to_pydict()
        for row in zip(*(table[column] for column in COLUMNS), strict=True):
            pairs.setdefault(row[0], PairSample(*row))
    if not pairs:
        raise DataError(f"{mixture / 'test'}: no sample of the test split; run `m3diff convert` and read its report")
    return list(pairs.values())


def caption_all(captioner: Captioner, pairs: list[PairSample], batch_pairs: int, label: str) -> list[str]:
    """The pairs' captions in their order. A batch holds one question, so the other pairs in it change no caption."""
    captions: dict[str, str] = {}
    by_question: dict[str, list[PairSample]] = {}
    for pair in pairs:
        by_question.setdefault(pair.question, []).append(pair)
    batches = [batch for same in by_question.values() for batch in _batches(same, batch_pairs)]
    for batch in progress(batches, label, unit="batch"):
        answers = captioner.caption(_images(batch), batch[0].question)
        captions |= {pair.id: answer for pair, answer in zip(batch, answers, strict=True)}
    return [captions[pair.id] for pair in pairs]


def shuffle_after(pairs: list[PairSample]) -> list[PairSample]:
    """Hand the after-images on by half the list: every pair gets another's, for any two or more."""
    shift = max(1, len(pairs) // 2)
    others = pairs[shift:] + pairs[:shift]
    return [a._replace(after=b.after, after_sha256=b.after_sha256) for a, b in zip(pairs, others, strict=True)]


def _batches(pairs: list[PairSample], size: int) -> list[list[PairSample]]:
    return [pairs[start : start + size] for start in range(0, len(pairs), size)]


def _images(batch: list[PairSample]) -> list[ImagePair]:
    return [(_open(pair.before, pair.before_sha256), _open(pair.after, pair.after_sha256)) for pair in batch]


def _open(path: str, sha256: bytes | None) -> Image.Image:
    try:
        return load_image(path, sha256)
    except ValueError as error:
        raise DataError(str(error)) from error


def _write_captions(path: Path, pairs: list[PairSample], captions: list[str]) -> None:
    rows = [{"image_id": pair.id, "caption": caption} for pair, caption in zip(pairs, captions, strict=True)]
    write_atomic(path, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def _write_saliency(path: Path, captioner: Captioner, pairs: list[PairSample], batch_pairs: int) -> None:
    """`ids` and `maps` [pairs, rows, columns] float16, in the order of the pairs."""
    maps = [captioner.saliency_map(_images(batch)) for batch in _batches(pairs, batch_pairs)]
    buffer = io.BytesIO()
    np.savez_compressed(buffer, ids=np.array([pair.id for pair in pairs]), maps=np.concatenate(maps))
    write_atomic(path, buffer.getvalue())
