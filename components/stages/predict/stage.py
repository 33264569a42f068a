"""Caption the test split: batched greedy decoding, saliency maps, and two controls on a sample of the pairs.

The one pairs the image before with the image after of another pair: a model that looks at both images must lose its
score there. The other swaps the two images: the inverse change must be named. Captions are kept as they come, so that a
killed run goes on with what is missing. Run: `m3diff predict`.

At 7B shapes a pair takes 21.9 TFLOP to read, vision encoder and MDP module included. Its saliency map, from the same
pass, takes 0.13 more: 401 PFLOP for the paper's 16.2k test pairs and two controls of 1,000.
"""

import base64
import fcntl
import io
import json
import os
import time
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from m3diff.models import FAMILIES
from m3diff.models.checkpoint import read_manifest
from m3diff.provenance.code import key_of
from m3diff.records.files import StageReport, sha256, write_atomic
from m3diff.records.progress import progress
from m3diff.settings.compute import Compute
from m3diff.stages.predict.pairs import PairSample, batches, control_pairs, read_test_pairs
from m3diff.stages.predict.params import Predict
from m3diff.stages.predict.workers import Answer, Batch, Job, caption

PREDICTIONS, SHUFFLED, REVERSED = "predictions", "predictions_shuffled", "predictions_reversed"

Key = tuple[str, str]
"""Name of the set of pairs (predictions, control), id of the pair."""


class PredictReport(StageReport):
    """Pairs of the test split in, captions out; `words` is the mean length of a caption; `control` counts the captions
    of pairs with another pair's image after, `reversed` those of pairs with their images swapped."""

    words: float
    control: int
    reversed: int


class Journal:
    """A file with a line of JSON for each answer. Within `with`, no other process has it.

    Attributes:
        answers: all that the file holds.

    Raises:
        BlockingIOError: another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers: dict[Key, Answer] = {}

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file: BinaryIO = self.path.open("a+b")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.file.close()
            raise BlockingIOError(f"{self.path}: another process captions the same pairs; wait for its end") from error
        self.file.seek(0)
        self.file.truncate(self._read(self.file.read()))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()

    def _read(self, data: bytes) -> int:
        """Take the answers of whole lines; return the length of these. What follows a torn line was never finished."""
        whole = 0
        for line in data.splitlines(keepends=True):
            try:
                if not line.endswith(b"\n"):
                    break
                row = json.loads(line)
                saliency = None
                if "saliency" in row:
                    saliency = np.frombuffer(base64.b64decode(row["saliency"]), np.float16).reshape(row["shape"])
                self.answers[row["set"], row["pair"]] = Answer(row["caption"], saliency)
            except ValueError:
                break
            whole += len(line)
        return whole

    def add(self, answers: Iterable[tuple[Key, Answer]]) -> None:
        """Write the answers that are not there yet, down to the disk."""
        for key, answer in answers:
            if key not in self.answers:
                self.answers[key] = answer
                row: dict[str, Any] = {"set": key[0], "pair": key[1], "caption": answer.caption}
                if answer.saliency is not None:
                    row["shape"] = answer.saliency.shape
                    row["saliency"] = base64.b64encode(answer.saliency.tobytes()).decode()
                self.file.write(json.dumps(row).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())


def predict(cfg: Predict, compute: Compute, mixture: Path, model: Path, out: Path) -> PredictReport:
    """Write predictions.json and those of both controls, saliency.npz and report.json to `out`.

    Raises:
        DataError: no test pair; an image that is unreadable or not the one that ingest saw; or a checkpoint that is
            incomplete.
        ParamsError: GPUs are asked for that are not there.
        BlockingIOError: another process captions the same pairs.
        ConnectionError: Ray workers died more often than `compute.max_failures`; the next run goes on from there.
    """
    mixture, model, out, scratch = mixture.resolve(), model.resolve(), out.resolve(), compute.scratch.resolve()
    pairs = read_test_pairs(mixture)[: cfg.limit or None]
    sets = dict(zip((PREDICTIONS, SHUFFLED, REVERSED), (pairs, *control_pairs(pairs)), strict=True))
    journal = Journal(scratch / "predict" / f"{run_key(cfg, mixture, model / 'checkpoint')}.jsonl")
    with journal:
        caption_missing(Job(model / "checkpoint", cfg.max_new_tokens, compute), sets, cfg.batch_pairs, journal)
        answers = {name: [journal.answers[name, pair.id] for pair in chosen] for name, chosen in sets.items()}
        for name, chosen in sets.items():
            found = zip(chosen, answers[name], strict=True)
            rows = [{"image_id": pair.id, "caption": answer.caption} for pair, answer in found]
            write_atomic(out / f"{name}.json", json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        _write_saliency(out / "saliency.npz", pairs, answers[PREDICTIONS])
        words = round(float(np.mean([len(answer.caption.split()) for answer in answers[PREDICTIONS]])), 2)
        report = PredictReport(
            stage="predict",
            rows_in=len(pairs),
            rows_out=len(pairs),
            words=words,
            control=len(sets[SHUFFLED]),
            reversed=len(sets[REVERSED]),
        ).write(out / "report.json")
        journal.path.unlink()
    return report


def run_key(cfg: Predict, mixture: Path, checkpoint: Path) -> str:
    """Names a run: the hash of the parameters, samples, checkpoint and code that decide its captions; of no path.

    Raises:
        DataError: the checkpoint was not written to its end.
    """
    manifest = read_manifest(checkpoint)
    facts = {
        "predict": cfg.model_dump(mode="json"),
        "checkpoint": manifest["files"],
        "samples": [f"{file.name} {sha256(file)}" for file in sorted((mixture / "test").glob("*.parquet"))],
    }
    family = [module for name, module in FAMILIES.modules.items() if name == manifest.get("family")]
    return key_of(facts, Path(__file__), family)


def caption_missing(job: Job, sets: dict[str, list[PairSample]], batch_pairs: int, journal: Journal) -> None:
    """Caption what the journal does not hold, in the batches that an undisturbed run has."""
    named = [(name, batch) for name, pairs in sets.items() for batch in batches(pairs, batch_pairs)]
    todo = [
        Batch(number, batch, saliency=name == PREDICTIONS)
        for number, (name, batch) in enumerate(named)
        if any((name, pair.id) not in journal.answers for pair in batch)
    ]
    if journal.answers:
        print(f"predict: resumed; {len(journal.answers)} captions of an earlier run are kept", flush=True)
    if not todo:
        return
    started, before = time.monotonic(), len(journal.answers)
    for number, answers in progress(caption(job, todo), "predict", total=len(todo), unit="batch"):
        name, batch = named[number]
        journal.add(((name, pair.id), answer) for pair, answer in zip(batch, answers, strict=True))
    seconds, made = time.monotonic() - started, len(journal.answers) - before
    print(f"predict: {made} captions in {seconds:.0f} s, {made / seconds:.1f} a second", flush=True)


def _write_saliency(path: Path, pairs: Sequence[PairSample], answers: Sequence[Answer]) -> None:
    """`ids` and `maps` [pairs, rows, columns] float16, in the order of the pairs; both empty where the model's family
    has no maps. NumPy's compressed archive; what NumPy writes itself has other headers, and so another hash, under
    Python 3.11.2 than under 3.11.7."""
    maps = [answer.saliency for answer in answers if answer.saliency is not None]
    assert len(maps) in (0, len(pairs)), f"{len(maps)} saliency maps of {len(pairs)} pairs"
    ids = np.array([pair.id for pair in pairs[: len(maps)]], dtype=str)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, array in (("ids", ids), ("maps", np.stack(maps) if maps else np.empty((0, 0, 0), np.float16))):
            content = io.BytesIO()
            np.save(content, array, allow_pickle=False)
            file.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue(), zipfile.ZIP_DEFLATED)
    write_atomic(path, archive.getvalue())
