"""Caption the test split: batched greedy decoding, the map of where the model looks, and a control run.

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
from components.models.generation import Captioner, load_captioner
from components.models.m3diff.processing import load_image
from components.models.m3diff.tuning import CheckpointError
from components.predict.params import Predict
from components.progress import progress
from components.records import DataError
from components.reports import StageReport


class PredictReport(StageReport):
    """Pairs of the test split in, captions out; `words` is the mean length of a caption."""

    words: float


class TestPair(NamedTuple):
    id: str
    before: str
    after: str
    question: str


def predict(cfg: Predict, mixture: Path, model: Path, out: Path) -> PredictReport:
    """Write predictions.json, predictions_shuffled.json, saliency.npz and report.json to `out`.

    Raises:
        DataError: no test pair, an unreadable image, or a checkpoint that is incomplete.
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
    maps = [captioner.attended(_images(batch)) for batch in _batches(pairs, cfg.batch_pairs)]
    buffer = io.BytesIO()
    np.savez_compressed(buffer, ids=np.array([pair.id for pair in pairs]), maps=np.concatenate(maps))
    write_atomic(out / "saliency.npz", buffer.getvalue())
    words = round(float(np.mean([len(caption.split()) for caption in captions])), 2)
    return PredictReport(stage="predict", rows_in=len(pairs), rows_out=len(captions), words=words).write(
        out / "report.json"
    )


def read_test_pairs(mixture: Path) -> list[TestPair]:
    """The test split's pairs, each once, in the mixture's order."""
    files = sorted((mixture / "samples").glob("test-*.parquet"))
    pairs: dict[str, TestPair] = {}
    for file in files:
        table = pq.read_table(file, columns=["pair", "before", "after", "question"]).to_pydict()
        for row in zip(table["pair"], table["before"], table["after"], table["question"], strict=True):
            pairs.setdefault(row[0], TestPair(*row))
    if not pairs:
        raise DataError(f"{mixture / 'samples'}: no sample of split 'test'; run `m3diff convert` and read its report")
    return list(pairs.values())


def caption_all(captioner: Captioner, pairs: list[TestPair], batch_pairs: int, label: str) -> list[str]:
    """The pairs' captions in their order. A batch holds one question: no padding, so its company changes no caption."""
    captions: dict[str, str] = {}
    by_question: dict[str, list[TestPair]] = {}
    for pair in pairs:
        by_question.setdefault(pair.question, []).append(pair)
    batches = [batch for same in by_question.values() for batch in _batches(same, batch_pairs)]
    for batch in progress(batches, label, unit="batch"):
        answers = captioner.caption(_images(batch), batch[0].question)
        captions |= {pair.id: answer for pair, answer in zip(batch, answers, strict=True)}
    return [captions[pair.id] for pair in pairs]


def shuffle_after(pairs: list[TestPair]) -> list[TestPair]:
    """Hand the after-images on by half the list: every pair gets another's, for any two or more."""
    shift = max(1, len(pairs) // 2)
    return [a._replace(after=b.after) for a, b in zip(pairs, pairs[shift:] + pairs[:shift], strict=True)]


def _batches(pairs: list[TestPair], size: int) -> list[list[TestPair]]:
    return [pairs[start : start + size] for start in range(0, len(pairs), size)]


def _images(batch: list[TestPair]) -> list[tuple[Image.Image, Image.Image]]:
    return [(_open(pair.before), _open(pair.after)) for pair in batch]


def _open(path: str) -> Image.Image:
    try:
        return load_image(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read as an image ({error}); run `m3diff validate` again") from error


def _write_captions(path: Path, pairs: list[TestPair], captions: list[str]) -> None:
    rows = [{"image_id": pair.id, "caption": caption} for pair, caption in zip(pairs, captions, strict=True)]
    write_atomic(path, json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
