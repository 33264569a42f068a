"""Caption the test split: batched greedy decoding, saliency maps, and two controls on a sample of the pairs.

The one pairs the image before with the image after of another pair: a model that looks at both images must lose its
score there. The other swaps the two images: the inverse change must be named. Captions are kept as they come, so that a
killed run goes on with what is missing. Run: `m3diff predict`.

They are made in this process, or in Ray workers with a GPU each (`compute.gpu`, `compute.workers`). Each worker loads
the checkpoint and takes its part of the batches. When one dies, the batches without an answer are dealt to new workers.
Threads read, check and resize the images of the next batches while the model computes.

At 7B shapes a pair takes 21.9 TFLOP to read, vision encoder and MDP module included. Its saliency map, from the same
pass, takes 0.13 more: 401 PFLOP for the paper's 16.2k test pairs and two controls of 1,000.
"""

import base64
import io
import json
import textwrap
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self

import numpy as np
import pyarrow.parquet as pq

from m3diff.cluster import NoRoomError, per_worker, start_ray, wait_for_room
from m3diff.images.open import load_image
from m3diff.models import FAMILIES
from m3diff.models.checkpoint import read_manifest
from m3diff.models.device import Device, environment
from m3diff.provenance.code import key_of
from m3diff.records.errors import DataError, readable
from m3diff.records.files import StageReport, flush_to_disk, lock_exclusively, sha256, write_atomic
from m3diff.records.progress import ahead, progress
from m3diff.settings.compute import Compute
from m3diff.settings.section import ParamsError
from m3diff.stages.predict.params import Predict

if TYPE_CHECKING:
    from m3diff.models.generation import Captioner
    from m3diff.models.processing import PairProcessor

PREDICTIONS, SHUFFLED, REVERSED = "predictions", "predictions_shuffled", "predictions_reversed"
CONTROL_SEED = 0
CONTROL_PAIRS = 600  # pairs of each control at most, sampled from all

AHEAD = 2  # batches whose images are prepared beforehand
ROOM_S = 60  # within which Ray must have nodes for every worker

Key = tuple[str, str]  # name of the set of pairs (predictions, control), id of the pair


class PairSample(NamedTuple):
    """A pair of the test split; digests as in the samples, 32 bytes."""

    id: str
    before: str
    after: str
    before_sha256: bytes | None
    after_sha256: bytes | None
    question: str


COLUMNS = ["pair", *PairSample._fields[1:]]


class Batch(NamedTuple):
    """Pairs of one question, numbered among the batches of the run; `saliency` asks for the maps, too."""

    number: int
    pairs: list[PairSample]
    saliency: bool


class Answer(NamedTuple):
    """The model's caption of a pair, and where it looks: [rows, columns] float16, where asked for."""

    caption: str
    saliency: np.ndarray | None


Answered = tuple[int, list[Answer]]  # the number of a batch, and its answers in the order of its pairs


@dataclass(frozen=True)
class Job:
    """The work that a worker is sent."""

    checkpoint: Path
    max_new_tokens: int
    compute: Compute


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
            lock_exclusively(self.file, wait=False)
        except BlockingIOError as error:
            self.file.close()
            raise BlockingIOError(f"{self.path}: another process captions the same pairs; wait for its end") from error
        self.file.seek(0)
        self.file.truncate(self._read(self.file.read()))
        return self

    def __exit__(self, *raised: object) -> None:
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
        flush_to_disk(self.file.fileno())


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


def read_test_pairs(mixture: Path) -> list[PairSample]:
    """The test split's pairs, each once, in the mixture's order.

    Raises:
        DataError: there is none.
    """
    pairs: dict[str, PairSample] = {}
    for file in sorted((mixture / "test").glob("*.parquet")):
        with readable(file):
            table = pq.read_table(file, columns=COLUMNS).to_pydict()
        for row in zip(*(table[column] for column in COLUMNS), strict=True):
            pairs.setdefault(row[0], PairSample(*row))
    if not pairs:
        raise DataError(f"{mixture / 'test'}: no sample of the test split; run `m3diff convert` and read its report")
    return list(pairs.values())


def control_pairs(pairs: list[PairSample], count: int = CONTROL_PAIRS) -> tuple[list[PairSample], list[PairSample]]:
    """Return two controls of `count` pairs (all where there are fewer), sampled by a seed, in order.

    In the first, each has the image after of another pair, half the list on: of any two or more pairs none keeps its
    own, and the partners come from the whole list. In the second, each has its own two images swapped. A smaller count
    gives a part of a larger one.
    """
    shift = max(1, len(pairs) // 2)
    shuffled, swapped = [], []
    for number in sorted(np.random.default_rng(CONTROL_SEED).permutation(len(pairs))[:count]):
        one, other = pairs[number], pairs[(number + shift) % len(pairs)]
        shuffled.append(one._replace(after=other.after, after_sha256=other.after_sha256))
        swapped.append(PairSample(one.id, one.after, one.before, one.after_sha256, one.before_sha256, one.question))
    return shuffled, swapped


def batches(pairs: Sequence[PairSample], size: int) -> list[list[PairSample]]:
    """Up to `size` pairs of one question each: without padding, no pair changes another's caption."""
    by_question: dict[str, list[PairSample]] = {}
    for pair in pairs:
        by_question.setdefault(pair.question, []).append(pair)
    return [same[at : at + size] for same in by_question.values() for at in range(0, len(same), size)]


def caption(job: Job, batches: Sequence[Batch]) -> Iterator[Answered]:
    """Return the answers of all batches: in their order, or as they come from Ray's workers.

    Raises:
        DataError: the checkpoint is incomplete; an image is unreadable or not the one that ingest saw.
        DeviceError: a GPU is asked for and there is none.
        ParamsError: Ray cannot place as many workers.
        ConnectionError: Ray workers died more often than `compute.max_failures`.
    """
    if job.compute.gpu and job.compute.workers:
        return caption_on_ray(job, batches)
    return answers_of(load(job), batches, job.compute.cpus_per_worker)


def answers_of(captioner: "Captioner", batches: Sequence[Batch], threads: int) -> Iterator[Answered]:
    """Yield the answers of the batches, in their order."""
    for batch, images in zip(batches, images_ahead(batches, captioner.processor, threads), strict=True):
        captions, maps = captioner.answer(images, batch.pairs[0].question, batch.saliency)
        shown = [None] * len(captions) if maps is None else maps
        yield batch.number, [Answer(*answer) for answer in zip(captions, shown, strict=True)]


def load(job: Job) -> "Captioner":
    """Return the model with fused kernels, in the precision that it was trained in."""
    from m3diff.models.generation import load_captioner

    config = job.checkpoint / "config.json"
    dtype = json.loads(config.read_text(encoding="utf-8")).get("dtype") if config.is_file() else None
    device = Device(job.compute.gpu, "bf16" if dtype == "bfloat16" else "fp32")
    captioner = load_captioner(job.checkpoint, job.max_new_tokens, device)
    captioner.family.fuse(captioner.model, "none")
    return captioner


def images_ahead(batches: Sequence[Batch], processor: "PairProcessor", threads: int) -> Iterator[list[np.ndarray]]:
    """Yield each batch's images as the processor prepares them, before, after, before, after, ...; those of the next
    AHEAD batches are on the way."""

    def prepared(path: str, sha256: bytes | None) -> np.ndarray:
        return processor.prepare_image(load_image(path, sha256))

    def submit(batch: Batch) -> list[Future[np.ndarray]]:
        files = [((pair.before, pair.before_sha256), (pair.after, pair.after_sha256)) for pair in batch.pairs]
        return [pool.submit(prepared, *file) for both in files for file in both]

    with ThreadPoolExecutor(max_workers=threads) as pool:
        yield from ahead(submit, batches, AHEAD)


class Worker:
    """A Ray actor: a model, and the batches that it is dealt."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def caption(self, batches: list[Batch]) -> Iterator[Answered]:
        import torch

        threads = self.job.compute.cpus_per_worker
        torch.set_num_threads(threads)
        yield from answers_of(load(self.job), batches, threads)


def caption_on_ray(job: Job, batches: Sequence[Batch]) -> Iterator[Answered]:
    """Yield the answers as they come from `compute.workers` workers, to which the batches are dealt by turns."""
    import ray

    left, failures, most = {batch.number: batch for batch in batches}, 0, job.compute.max_failures
    start_ray(job.compute)
    try:
        while left:
            try:
                for number, answers in _as_they_come(job, list(left.values())):
                    del left[number]
                    yield number, answers
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayActorError as error:
                if failures == most:
                    raise ConnectionError(
                        f"a worker died ({error}) and compute.max_failures: {most} allows no more; "
                        "run `m3diff predict` again: what is captioned so far is kept"
                    ) from error
                failures += 1
                print(
                    f"predict: a worker died ({textwrap.shorten(str(error), 160)}); {len(left)} unanswered batches go "
                    f"to new workers (failure {failures} of {most} that compute.max_failures allows)",
                    flush=True,
                )
    finally:
        ray.shutdown()


def _as_they_come(job: Job, batches: Sequence[Batch]) -> Iterator[Answered]:
    """Yield the answers of new workers, each with CPUs and a GPU of its own, whichever is first.

    Raises:
        ParamsError: the nodes of Ray are too small for them.
    """
    import ray

    count, needs = min(job.compute.workers, len(batches)), per_worker(job.compute)
    try:
        wait_for_room(job.compute.model_copy(update={"workers": count}), ROOM_S)
    except NoRoomError as error:
        raise ParamsError(f"compute.workers: {error}") from error
    place = {"env_vars": environment(job.compute.gpu)}
    remote = ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0), runtime_env=place)(Worker)
    workers: list[Any] = [remote.remote(job) for _ in range(count)]
    streams = [worker.caption.remote(batches[rank::count]) for rank, worker in enumerate(workers)]
    try:
        while streams:
            first: Any = ray.wait(streams, num_returns=1)[0][0]
            try:
                answered = ray.get(next(first))
            except StopIteration:
                streams.remove(first)
            else:
                yield answered
    finally:
        for worker in workers:
            ray.kill(worker)  # one that is only out of reach answers nothing twice


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
