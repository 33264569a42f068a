"""Caption the test split, compute saliency maps, and caption two controls that show whether the model uses both images.

Captions are decoded greedily in batches. The controls use a sample of the test pairs. The shuffled control combines
each before-image with the after-image of another pair: the scores of a model that looks at both images must drop. The
reversed control swaps the images of each pair: the model must describe the inverse change. Every caption is immediately
written to a journal, so that the next run continues where a killed run stopped. Run: `m3diff predict`.

Records of datasets with the role `retention` are answered by the trained model and by its base without the new module,
to measure what the model keeps of what the base could do. If there are no such datasets, the base is not loaded.

The model runs in this process or in Ray workers with one GPU each (`compute.gpu`, `compute.workers`). Each worker loads
the checkpoint and captions its part of the batches. If a worker dies, new workers caption the remaining batches.
Threads read, check and resize the images of the next batches while the model computes.

For a 7B model, reading a pair takes 21.9 TFLOP, including the vision encoder and the MDP module. The saliency map,
computed in the same pass, takes another 0.13 TFLOP. The paper's 16.2k test pairs and two controls of 600 pairs each
take 383 PFLOP.
"""

import base64
import io
import json
import textwrap
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Self

import numpy as np
import pyarrow.parquet as pq

from m3diff.cluster import NoRoomError, start_ray, wait_for_room, worker_resources
from m3diff.images.open import load_image
from m3diff.models import FAMILIES
from m3diff.models.checkpoint import read_manifest
from m3diff.models.contract import Takes
from m3diff.models.device import Device, process_environment
from m3diff.models.sample_batches import MAX_PREPARED_BYTES, split_by_bytes, split_by_shape
from m3diff.models.sample_limits import fault_of_family
from m3diff.models.threads import use_threads
from m3diff.provenance.code import compute_key
from m3diff.records.errors import (
    CodedError,
    DataError,
    ParamsError,
    ValueFault,
    cause_of,
    data_error_if_unreadable,
    format_count,
)
from m3diff.records.files import StageReport, flush_to_disk, lock_exclusively, sha256, write_atomic
from m3diff.records.progress import progress
from m3diff.records.sample import PAIR, ImageRef, Turn
from m3diff.records.schemas import RETENTION
from m3diff.records.tables import part_paths
from m3diff.runtime import prepare
from m3diff.settings.compute import Compute
from m3diff.stages.predict.image_queue import ImageQueue
from m3diff.stages.predict.params import Predict

if TYPE_CHECKING:
    from m3diff.models.contract import Prepared, Processor
    from m3diff.models.generation import Captioner

PREDICTIONS = "predictions"
SHUFFLED = "predictions_shuffled"
REVERSED = "predictions_reversed"
RETENTION_PREDICTIONS = "predictions_retention"  # answers of the trained model to the records of retention datasets
BASE_PREDICTIONS = "predictions_base"  # answers of the base to the same records
CONTROL_SEED = 0
CONTROL_PAIRS = 600  # maximum number of pairs per control, sampled from all pairs

PREPARED_BATCHES = 2  # maximum number of batches whose images are prepared while the model computes
NODES_TIMEOUT_S = 60  # seconds to wait until Ray has enough nodes for all workers

PredictionKey = tuple[str, str]  # name of the set (such as predictions or a control) and id of the record


class PredictionItem(NamedTuple):
    """A record of the test split: its images, and a dialogue whose last question is to be answered.

    Of two images, the first is the image before.
    """

    id: str
    images: tuple[ImageRef, ...]
    turns: tuple[Turn, ...]


COLUMNS = ["record", "images", "history", "question"]


class Batch(NamedTuple):
    """Items with the same number of images whose prompts have the same length.

    Attributes:
        number: index among all batches of the run.
        saliency: whether saliency maps are needed as well.
    """

    number: int
    items: list[PredictionItem]
    saliency: bool


class Prediction(NamedTuple):
    """The model's answer to an item, and its saliency map ([rows, columns] float16) if one was requested."""

    caption: str
    saliency: np.ndarray | None


BatchPredictions = tuple[int, list[Prediction]]  # number of the batch, and predictions in the order of its items


@dataclass(frozen=True)
class CaptionJob:
    """The model, the maximum caption length in tokens, and the hardware settings of a captioning run.

    Attributes:
        checkpoint: folder of the trained model.
        uses_base: whether the base of the trained model answers, without the new module.
    """

    checkpoint: Path
    max_new_tokens: int
    compute: Compute
    uses_base: bool = False


class PredictReport(StageReport):
    """Report of the stage. `rows_in` counts the records of the test split, and `rows_out` counts their answers.

    Attributes:
        words: mean number of words per answer.
        control: number of captions of the control with shuffled images.
        reversed: number of captions of the control with reversed images.
        retention: number of records of retention datasets that the model and its base answered.
    """

    words: float
    control: int
    reversed: int
    retention: int


class JournalInUseError(CodedError, BlockingIOError):
    """Another process is captioning the same pairs."""


class WorkersDiedError(CodedError, ConnectionError):
    """More Ray workers died than `compute.max_failures` allows."""


class Journal:
    """A file with one line of JSON per prediction. As a context manager, it locks the file against other processes.

    Attributes:
        predictions: all predictions in the file.

    Raises:
        JournalInUseError: another process has locked the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.predictions: dict[PredictionKey, Prediction] = {}

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file: BinaryIO = self.path.open("a+b")
        try:
            lock_exclusively(self.file, wait=False)
        except BlockingIOError as error:
            self.file.close()
            raise JournalInUseError("predict.journal_in_use", path=self.path) from error
        self.file.seek(0)
        self.file.truncate(self._read(self.file.read()))
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def _read(self, data: bytes) -> int:
        """Read all complete lines and return their total length in bytes.

        A killed run may leave a partial last line.
        """
        complete_bytes = 0
        for line in data.splitlines(keepends=True):
            try:
                if not line.endswith(b"\n"):
                    break
                row = json.loads(line)
                saliency = None
                if "saliency" in row:
                    saliency = np.frombuffer(base64.b64decode(row["saliency"]), np.float16).reshape(row["shape"])
                self.predictions[row["set"], row["pair"]] = Prediction(row["caption"], saliency)
            except ValueError:
                break
            complete_bytes += len(line)
        return complete_bytes

    def add(self, predictions: Iterable[tuple[PredictionKey, Prediction]]) -> None:
        """Write the predictions that are not yet in the file, and flush them to the disk."""
        for key, prediction in predictions:
            if key not in self.predictions:
                self.predictions[key] = prediction
                set_name, pair_id = key
                row: dict[str, Any] = {"set": set_name, "pair": pair_id, "caption": prediction.caption}
                if prediction.saliency is not None:
                    row["shape"] = prediction.saliency.shape
                    row["saliency"] = base64.b64encode(prediction.saliency.tobytes()).decode()
                self.file.write(json.dumps(row).encode() + b"\n")
        self.file.flush()
        flush_to_disk(self.file.fileno())


def predict(cfg: Predict, compute: Compute, mixture: Path, model: Path, out: Path) -> PredictReport:
    """Write the predictions of the test pairs and the two controls, saliency.npz and report.json to `out`.

    The answers of the model and of its base to the records of retention datasets are written, too. These files contain
    an empty list if there are no such datasets.

    Raises:
        DataError: the test split is empty, an image is unreadable or has changed since ingest, the checkpoint is
            incomplete, or the base is needed but missing or changed.
        ParamsError: there are fewer GPUs than `compute` requires.
        JournalInUseError: another process is captioning the same pairs.
        WorkersDiedError: more Ray workers died than `compute.max_failures` allows. The next run continues this one.
    """
    mixture = mixture.resolve()
    model = model.resolve()
    out = out.resolve()
    scratch = compute.scratch.resolve()
    items = read_test_items(mixture)[: cfg.limit or None]
    retention_items = read_items(mixture / RETENTION)[: cfg.limit or None]
    pairs = [item for item in items if len(item.images) == PAIR]
    shuffled_pairs, reversed_pairs = sample_control_pairs(pairs)
    items_of_model = {
        PREDICTIONS: items,
        SHUFFLED: shuffled_pairs,
        REVERSED: reversed_pairs,
        RETENTION_PREDICTIONS: retention_items,
    }
    items_of_base = {BASE_PREDICTIONS: retention_items}
    job = CaptionJob(checkpoint=model / "checkpoint", max_new_tokens=cfg.max_new_tokens, compute=compute)
    check_items([*items, *retention_items], FAMILIES[read_manifest(job.checkpoint)["family"]].takes)
    journal = Journal(scratch / "predict" / f"{run_key(cfg, mixture, job.checkpoint)}.jsonl")
    with journal:
        if journal.predictions:
            kept_captions = format_count(
                len(journal.predictions), "caption of an earlier run is", "captions of an earlier run are"
            )
            print(f"predict: resumed; {kept_captions} kept", flush=True)
        answer_missing_items(job, items_of_model, cfg.batch_pairs, journal)
        answer_missing_items(replace(job, uses_base=True), items_of_base, cfg.batch_pairs, journal)
        for set_name, set_items in (items_of_model | items_of_base).items():
            rows = []
            for item in set_items:
                rows.append({"image_id": item.id, "caption": journal.predictions[set_name, item.id].caption})
            write_atomic(out / f"{set_name}.json", json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
        predictions = [journal.predictions[PREDICTIONS, item.id] for item in items]
        pair_predictions = [journal.predictions[PREDICTIONS, pair.id] for pair in pairs]
        _write_saliency(out / "saliency.npz", pairs, pair_predictions)
        mean_words = np.mean([len(prediction.caption.split()) for prediction in predictions])
        report = PredictReport(
            stage="predict",
            rows_in=len(items),
            rows_out=len(items),
            words=round(float(mean_words), 2),
            control=len(shuffled_pairs),
            reversed=len(reversed_pairs),
            retention=len(retention_items),
        ).write(out / "report.json")
        journal.path.unlink()
    return report


def run_key(cfg: Predict, mixture: Path, checkpoint: Path) -> str:
    """Return the name of a run: a hash of the parameters, samples, checkpoint and code that determine its captions.

    Paths do not affect the hash.

    Raises:
        DataError: the checkpoint is incomplete.
    """
    manifest = read_manifest(checkpoint)
    inputs = {
        "predict": cfg.model_dump(mode="json"),
        "checkpoint": manifest["files"],
        "samples": [f"{file.name} {sha256(file)}" for file in part_paths(mixture / "test")],
        RETENTION: [f"{file.name} {sha256(file)}" for file in part_paths(mixture / RETENTION)],
    }
    family_modules = [module for name, module in FAMILIES.modules.items() if name == manifest.get("family")]
    return compute_key(inputs, Path(__file__), family_modules)


def answer_missing_items(
    job: CaptionJob, items_by_set: dict[str, list[PredictionItem]], batch_size: int, journal: Journal
) -> None:
    """Answer the items that are not yet in the journal.

    A resumed run uses the same batches as an uninterrupted one, so that it computes the same answers. If no answer is
    missing, the model is not loaded, and if there are no items, neither is its processor.

    Args:
        job: the model and the hardware settings.
        items_by_set: the items that the model answers, by the name of the set.
        batch_size: maximum number of items per batch.
        journal: the journal, to which the new answers are added.
    """
    from m3diff.models.checkpoint import load_processor

    if not any(items_by_set.values()):
        return
    family = FAMILIES[read_manifest(job.checkpoint)["family"]]
    # The prompts of the base, whose tokenizer is that of the checkpoint, have the same lengths
    processor = load_processor(job.checkpoint)
    all_batches: list[tuple[str, list[PredictionItem]]] = []  # each with the name of its set
    for set_name, items in items_by_set.items():
        all_batches += [(set_name, batch) for batch in split_into_batches(items, batch_size, processor)]
    missing_batches = []
    for number, (set_name, batch) in enumerate(all_batches):
        if any((set_name, item.id) not in journal.predictions for item in batch):
            shows_pairs = len(batch[0].images) == PAIR
            needs_maps = family.maps is not None and set_name == PREDICTIONS and shows_pairs
            missing_batches.append(Batch(number, batch, saliency=needs_maps))
    earlier_captions = len(journal.predictions)
    if not missing_batches:
        return
    title = "predict: base" if job.uses_base else "predict"
    start = time.monotonic()
    stream = caption_batches(job, missing_batches)
    for number, predictions in progress(stream, title, total=len(missing_batches), unit="batch"):
        set_name, batch = all_batches[number]
        keys = [(set_name, item.id) for item in batch]
        journal.add(zip(keys, predictions, strict=True))
    seconds = time.monotonic() - start
    captions = len(journal.predictions) - earlier_captions
    print(f"{title}: {captions} captions in {seconds:.0f} s, {captions / seconds:.1f} captions/s", flush=True)


def read_test_items(mixture: Path) -> list[PredictionItem]:
    """Return the records of the test split, in the order of the mixture.

    Raises:
        DataError: the test split is empty, or a file cannot be read.
    """
    items = read_items(mixture / "test")
    if not items:
        raise DataError("predict.no_test_sample", path=mixture / "test")
    return items


def read_items(samples: Path) -> list[PredictionItem]:
    """Return the records of a table of samples, in the order of the table.

    Raises:
        DataError: a file cannot be read.
    """
    items: dict[str, PredictionItem] = {}
    for file in part_paths(samples):
        with data_error_if_unreadable(file):
            table = pq.read_table(file, columns=COLUMNS).to_pydict()
        for record, images, history, question in zip(*(table[column] for column in COLUMNS), strict=True):
            image_references = tuple(ImageRef(**image) for image in images)
            turns = [Turn(**turn) for turn in history]
            items.setdefault(record, PredictionItem(record, image_references, (*turns, Turn(question))))
    return list(items.values())


def check_items(items: Sequence[PredictionItem], takes: Takes) -> None:
    """Check that a family can answer every item.

    Args:
        items: records of the test split.
        takes: the samples that the family can process.

    Raises:
        DataError: an item has a number of images or earlier turns that the family cannot process.
    """
    for item in items:
        # A family that reads no questions answers each of them as it was trained to
        fault = fault_of_family(takes, len(item.images), None, earlier_turns=len(item.turns) - 1)
        if fault is not None:
            raise DataError("predict.record_not_taken", name=item.id, cause=fault.problem)


def sample_control_pairs(
    pairs: list[PredictionItem], count: int = CONTROL_PAIRS
) -> tuple[list[PredictionItem], list[PredictionItem]]:
    """Return the pairs of the shuffled control and of the reversed control. Both are empty if there are no pairs.

    Both controls use the same random sample of `pairs`, in their original order. A smaller sample is a subset of a
    larger sample.

    Args:
        count: maximum number of pairs in each control.
    """
    # Take the after-image from the pair half a list away, so that no pair keeps its own after-image. A list of one pair
    # has no other after-image. Its shuffled control is the pair itself, and `evaluate` does not score the control
    shift = max(1, len(pairs) // 2)
    sampled_numbers = np.random.default_rng(CONTROL_SEED).permutation(len(pairs))[:count]
    shuffled_pairs = []
    reversed_pairs = []
    for number in sorted(sampled_numbers):
        pair = pairs[number]
        partner = pairs[(number + shift) % len(pairs)]
        before, after = pair.images
        shuffled_pairs.append(pair._replace(images=(before, partner.images[1])))
        reversed_pairs.append(pair._replace(images=(after, before)))
    return shuffled_pairs, reversed_pairs


def split_into_batches(
    items: Sequence[PredictionItem], size: int, processor: "Processor"
) -> list[list[PredictionItem]]:
    """Split the items into batches of at most `size` items with prompts of the same length.

    Prompts of equal length need no padding, so the items do not affect each other's answers. `Captioner.answer` splits
    a batch in which they differ because the number of visual tokens depends on the images.

    Raises:
        DataError: a question cannot be encoded.
    """
    shapes: list[tuple[int, int]] = []  # number of images and length of the prompt
    length_of_prompt: dict[tuple[int, tuple[Turn, ...]], int] = {}
    for item in items:
        images = len(item.images)
        if (images, item.turns) not in length_of_prompt:
            try:
                prompt = processor.encode_prompt(item.turns, processor.marks(images))
            except ValueFault as error:
                raise DataError("predict.unusable_question", name=item.id, cause=error.fault) from error
            length_of_prompt[images, item.turns] = len(prompt)
        shapes.append((images, length_of_prompt[images, item.turns]))
    return [[items[position] for position in positions] for positions in split_by_shape(shapes, size)]


def caption_batches(job: CaptionJob, batches: Sequence[Batch]) -> Iterator[BatchPredictions]:
    """Return the predictions of all batches, in order or, if Ray workers caption them, as they are finished.

    Raises:
        DataError: the checkpoint is incomplete, or an image is unreadable or has changed since ingest.
        DeviceError: `compute.gpu` is set, but no GPU is available.
        ParamsError: Ray's nodes do not have enough resources for the workers.
        WorkersDiedError: more Ray workers died than `compute.max_failures` allows.
    """
    if job.compute.gpu and job.compute.workers:
        return caption_on_ray(job, batches)
    return caption_in_order(load_model(job), batches, job.compute.cpus_per_worker)


def caption_in_order(captioner: "Captioner", batches: Sequence[Batch], threads: int) -> Iterator[BatchPredictions]:
    """Yield the predictions of each batch, in the order of the batches.

    Args:
        threads: number of threads that prepare images.
    """
    predictions: list[Prediction] = []  # of the batch whose images are being answered
    for batch, prepared in prepare_images(batches, captioner.processor, threads):
        items = batch.items[len(predictions) : len(predictions) + len(prepared)]
        captions, maps = captioner.answer(prepared, [item.turns for item in items], batch.saliency)
        saliency_maps = [None] * len(captions) if maps is None else maps
        for caption, saliency_map in zip(captions, saliency_maps, strict=True):
            predictions.append(Prediction(caption, saliency_map))
        if len(predictions) == len(batch.items):
            yield batch.number, predictions
            predictions = []


def load_model(job: CaptionJob) -> "Captioner":
    """Load the model or its base with fused kernels, in the precision that the model was trained in."""
    from m3diff.models.generation import load_base_captioner, load_captioner

    config_file = job.checkpoint / "config.json"
    dtype = json.loads(config_file.read_text(encoding="utf-8")).get("dtype") if config_file.is_file() else None
    device = Device(job.compute.gpu, "bf16" if dtype == "bfloat16" else "fp32")
    load = load_base_captioner if job.uses_base else load_captioner
    captioner = load(job.checkpoint, job.max_new_tokens, device)
    captioner.family.fuse(captioner.model, "none")
    return captioner


def prepare_images(
    batches: Sequence[Batch], processor: "Processor", threads: int
) -> Iterator[tuple[Batch, list["Prepared"]]]:
    """Yield each batch with the prepared image sets of its items, in order.

    If these take half of MAX_PREPARED_BYTES or more, the batch is yielded several times, each time with some of the
    image sets. The list is emptied when the next one is requested.

    Meanwhile, threads prepare the image sets of the next PREPARED_BATCHES batches, unless all prepared images together
    take MAX_PREPARED_BYTES.

    Raises:
        DataError: an image is unreadable or has changed since ingest, or the model cannot process it.
    """

    def load_and_prepare(item: PredictionItem) -> "Prepared":
        try:
            return processor.prepare(load_image(*image) for image in item.images)
        except ValueFault as error:
            raise DataError("predict.unusable_images", name=item.id, cause=error.fault) from error

    largest_batch = max(len(batch.items) for batch in batches)
    queue = ImageQueue(
        load_and_prepare,
        items=chain.from_iterable(batch.items for batch in batches),
        threads=threads,
        max_ahead=PREPARED_BATCHES * largest_batch,
        max_bytes=MAX_PREPARED_BYTES,
    )
    try:
        for batch in batches:
            image_sets = (queue.take() for _ in batch.items)
            # half of the memory, so that threads can prepare the next images while the model computes
            for part in split_by_bytes(image_sets, MAX_PREPARED_BYTES // 2):
                part_bytes = sum(prepared.nbytes for prepared in part)
                yield batch, part
                part.clear()
                queue.release(part_bytes)
    finally:
        queue.close()


class CaptionWorker:
    """A Ray actor that loads the model and captions batches."""

    def __init__(self, job: CaptionJob) -> None:
        prepare()
        self.job = job

    def caption(self, batches: list[Batch]) -> Iterator[BatchPredictions]:
        """Load the model, then yield the predictions of each batch in order."""
        threads = self.job.compute.cpus_per_worker
        use_threads(threads)
        yield from caption_in_order(load_model(self.job), batches, threads)


def caption_on_ray(job: CaptionJob, batches: Sequence[Batch]) -> Iterator[BatchPredictions]:
    """Yield predictions as `compute.workers` workers finish them. If a worker dies, new workers take over."""
    import ray

    missing_batches = {batch.number: batch for batch in batches}
    failures = 0
    max_failures = job.compute.max_failures
    start_ray(job.compute)
    try:
        while missing_batches:
            try:
                for number, predictions in _caption_with_new_workers(job, list(missing_batches.values())):
                    del missing_batches[number]
                    yield number, predictions
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayActorError as error:
                if failures == max_failures:
                    raise WorkersDiedError("predict.workers_died", cause=cause_of(error), limit=max_failures) from error
                failures += 1
                batches_left = format_count(len(missing_batches), "batch", "batches")
                print(
                    f"predict: a worker died ({textwrap.shorten(str(error), 160)}); new workers caption the remaining "
                    f"{batches_left} (failure {failures} of {max_failures} that compute.max_failures allows)",
                    flush=True,
                )
    finally:
        ray.shutdown()


def _caption_with_new_workers(job: CaptionJob, batches: Sequence[Batch]) -> Iterator[BatchPredictions]:
    """Start workers, distribute the batches among them, and yield predictions as they finish.

    Raises:
        ParamsError: Ray's nodes do not have enough resources for the workers.
    """
    import ray

    count = min(job.compute.workers, len(batches))
    resources = worker_resources(job.compute)
    try:
        wait_for_room(job.compute.model_copy(update={"workers": count}), NODES_TIMEOUT_S)
    except NoRoomError as error:
        raise ParamsError("predict.no_room_for_workers", cause=cause_of(error)) from error
    remote_class = ray.remote(
        num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0),
        runtime_env={"env_vars": process_environment(job.compute.gpu)},
    )(CaptionWorker)
    workers: list[Any] = [remote_class.remote(job) for _ in range(count)]
    streams = [worker.caption.remote(batches[rank::count]) for rank, worker in enumerate(workers)]
    try:
        while streams:
            ready_streams, _ = ray.wait(streams, num_returns=1)
            stream: Any = ready_streams[0]
            try:
                predictions = ray.get(next(stream))
            except StopIteration:
                streams.remove(stream)
            else:
                yield predictions
    finally:
        for worker in workers:
            # An unreachable worker may still be running. Kill it so that it does not caption batches that new workers
            # take over
            ray.kill(worker)


def _write_saliency(path: Path, pairs: Sequence[PredictionItem], predictions: Sequence[Prediction]) -> None:
    """Write a compressed NumPy archive with `ids` and `maps` ([pairs, rows, columns] float16), in the pairs' order.

    Both are empty if the model's family does not compute saliency maps.
    """
    maps = [prediction.saliency for prediction in predictions if prediction.saliency is not None]
    assert len(maps) in (0, len(pairs)), f"saliency maps: {len(maps)}, pairs: {len(pairs)}"
    arrays = {
        "ids": np.array([pair.id for pair in pairs[: len(maps)]], dtype=str),
        "maps": np.stack(maps) if maps else np.empty((0, 0, 0), np.float16),
    }
    archive = io.BytesIO()
    # np.savez_compressed is not used because its headers, and thus the file's hash, differ between Python 3.11.2 and
    # 3.11.7
    with zipfile.ZipFile(archive, "w") as file:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array, allow_pickle=False)
            file.writestr(zipfile.ZipInfo(f"{name}.npy"), content.getvalue(), zipfile.ZIP_DEFLATED)
    write_atomic(path, archive.getvalue())
