"""Check a machine and its data before a long run: disk, memory, GPUs, Java, SPICE, MLflow and test pairs."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import psutil
import pyarrow as pa
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from m3diff.cluster import NoRoomError, require_head
from m3diff.datasets import DATASETS
from m3diff.models import FAMILIES
from m3diff.records.errors import DataError, Fault, cause_of
from m3diff.records.machine import free_memory
from m3diff.records.schemas import RAW_SCHEMA, RETENTION
from m3diff.registry import tracking
from m3diff.registry.decisions import read_decisions
from m3diff.registry.moves import find_lost_champion
from m3diff.registry.versions import CHAMPION, find_aliased_version, read_trained_question, resolve_alias
from m3diff.scoring.metrics import choose_metrics, needs_java
from m3diff.scoring.metrics.java import JavaMissing, ScorerFailed, require_java
from m3diff.scoring.metrics.spice import try_spice
from m3diff.settings.rules import missing_inputs
from m3diff.settings.section import ParamsError, prefix_key
from m3diff.settings.tree import Params
from m3diff.stages.convert.params import MixtureSource
from m3diff.stages.convert.stage import draw_keys, evaluation_samples, load_questions, training_samples
from m3diff.stages.ingest.params import HOW_TO_TEST, DatasetEntry
from m3diff.stages.ingest.stage import to_records
from m3diff.stages.train.params import MOMENTS

if TYPE_CHECKING:  # importing torch takes seconds, and most runs do not need it here
    from m3diff.stages.train.batches import Samples

GIB = 2**30
DISK_RESERVE = 1 * GIB  # disk space for the outputs of the small stages, logs and the report
CHECKPOINTS_IN_FLIGHT = 4  # maximum number of checkpoints at the same time: a new checkpoint and three older ones
# Memory for CPU training, in base sizes: weights, gradients and the optimizer's moments
TRAINING_COPIES = 2 + len(MOMENTS)
NVIDIA_TIMEOUT_S = 60
MAX_QUESTION_CHARS = 120  # longer questions are shortened in notes


class NotReadyError(ParamsError):
    """The machine, the data or a server does not meet the requirements of the run. `faults` lists all problems."""


def preflight(params: Params) -> None:
    """Check that this machine can run the pipeline.

    Raises:
        NotReadyError: at least one check failed.
    """
    faults = [
        *disk_faults(params),
        *memory_faults(params),
        *gpu_faults(params),
        *cluster_faults(params),
        *java_faults(params),
        *mlflow_faults(params),
    ]
    if faults:
        raise NotReadyError("preflight.cannot_start", faults=faults)


def preflight_data(params: Params) -> None:
    """Check that a model can be trained and evaluated with the inputs of the run.

    The files that DVC and git track must be checked out.

    Raises:
        NotReadyError: at least one check failed.
    """
    faults = [
        *base_faults(params),
        *faults_of_model(params),
        *faults_of_test_pairs(params),
        *faults_of_retention_sets(params),
    ]
    if faults:
        raise NotReadyError("preflight.cannot_train", faults=faults)


def disk_faults(params: Params) -> Iterator[Fault]:
    """Yield a fault for each output folder whose disk does not have enough space for the checkpoints of the run."""
    base_bytes = size_of(params.train.base)
    needed_bytes = {
        params.compute.scratch: DISK_RESERVE + CHECKPOINTS_IN_FLIGHT * base_bytes,
        params.paths.model: DISK_RESERVE + base_bytes,
    }
    for folder, needed in needed_bytes.items():
        path = folder.resolve()
        existing_folder = next(candidate for candidate in (path, *path.parents) if candidate.exists())
        free = shutil.disk_usage(existing_folder).free
        if free < needed:
            yield Fault("preflight.disk_too_small", path=folder, free=free / GIB, needed=needed / GIB)


def memory_faults(params: Params) -> Iterator[Fault]:
    """Yield a fault if there is not enough memory to load the base model in each worker.

    Without a GPU, the check includes the memory for training.
    """
    if os.environ.get("RAY_ADDRESS"):
        return  # the workers run on other machines
    copies = 1 if params.compute.gpu else TRAINING_COPIES
    workers = max(params.compute.workers, 1)
    needed = size_of(params.train.base) * copies * workers
    free = free_memory(psutil.virtual_memory().available)
    if free < needed:
        yield Fault("preflight.memory_too_small", free=free / GIB, needed=needed / GIB, workers=workers)


def gpu_faults(params: Params) -> Iterator[Fault]:
    """Yield a fault if there are fewer GPUs than workers."""
    if not params.compute.gpu or os.environ.get("RAY_ADDRESS"):
        return
    needed_gpus = max(params.compute.workers, 1)
    listed_gpus = count_listed_gpus()
    if listed_gpus < needed_gpus:
        yield Fault("preflight.too_few_gpus", key="compute.gpu", value=listed_gpus, needed=needed_gpus)


def count_listed_gpus() -> int:
    """Return the number of GPUs that the driver lists, or 0 if there is no driver or it does not respond."""
    with suppress(OSError, subprocess.TimeoutExpired):
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_TIMEOUT_S)
        if listing.returncode == 0:
            return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return 0


def cluster_faults(params: Params) -> Iterator[Fault]:
    """Yield a fault if the workers would run on a cluster that does not respond."""
    try:
        if params.compute.workers:
            require_head(0)
    except NoRoomError as error:
        yield error.fault


def java_faults(params: Params) -> Iterator[Fault]:
    """Yield a fault if a metric requires Java and Java does not start, or if SPICE does not work with its jars."""
    metrics = choose_metrics(params.evaluate.metrics)
    spice_dir = params.compute.spice_dir
    if not needs_java(metrics):
        return
    try:
        require_java()
        if spice_dir is not None and "SPICE" in metrics:
            try_spice(spice_dir, params.compute.scorer_timeout_s)
    except JavaMissing as error:
        java_metrics = [name for name, metric in metrics.items() if metric.java]
        yield Fault("preflight.no_java", key="evaluate.metrics", names=java_metrics, cause=error.fault)
    except ScorerFailed as error:
        yield Fault("preflight.no_spice", key="compute.spice_dir", folder=spice_dir, cause=error.fault)


def mlflow_faults(params: Params) -> Iterator[Fault]:
    """Yield a fault if MLflow does not respond, or if entries that `register` and the gate require were deleted."""
    cfg = params.register_
    try:
        store = tracking.resolve_uri(cfg.tracking_uri)
        tracking.check_alive(store)
        if store.startswith(tracking.SQLITE) and not Path(store.removeprefix(tracking.SQLITE)).is_file():
            return  # nothing has been registered yet
        with tracking.connect(cfg.tracking_uri) as client:
            try:
                tracking.find_experiment(client, cfg.experiment)
            except DataError as error:
                yield error.fault
            # If the whole registered model was deleted, its alias cannot be restored. The next version can still be
            # registered. The gate then rejects it and names the command that accepts it.
            is_registered = tracking.find_registered_model(client, cfg.model_name) is not None
            if is_registered and resolve_alias(client, cfg.model_name, CHAMPION) is None:
                champion_fault = find_lost_champion(client, read_decisions(), cfg.model_name)
                if champion_fault:
                    yield champion_fault
    except (DataError, MlflowException, OSError) as error:
        yield Fault("preflight.no_mlflow", key="register.tracking_uri", cause=cause_of(error))


def base_faults(params: Params) -> Iterator[Fault]:
    """Yield a fault for each missing file of the base model.

    Without this check, DVC would report a missing file hours later and without a remedy.
    """
    yield from missing_inputs(params, "train")


def faults_of_model(params: Params) -> Iterator[Fault]:
    """Yield a fault if the base cannot be trained, or for each split whose largest sample the model cannot process.

    The samples are checked if their number of tokens depends on their images, with the processor of the base.
    """
    settings = params.models[params.train.model]
    family = FAMILIES[settings.family]
    if missing_inputs(params, "train"):
        return  # `base_faults` reports them
    try:
        processor = family.check_base(params.train.base, settings)
    except (DataError, ParamsError) as error:
        key = "train.base" if isinstance(error, DataError) else f"models.{params.train.model}"
        yield prefix_key(key, error.fault)
        return
    if processor is None or family.takes.fixed_marks:
        return
    from m3diff.stages.train.sample_checks import check_largest_images

    for split, samples in samples_by_split(params).items():
        max_tokens = params.train.max_tokens if split in ("train", "val") else None
        try:
            check_largest_images(samples, processor, max_tokens, params.train.model)
        except (DataError, ParamsError) as error:
            yield error.fault


def samples_by_split(params: Params) -> dict[str, Samples]:
    """Return the samples that ingest and convert would make of the datasets, by split.

    As in `faults_of_test_pairs`, datasets that do not exist yet or cannot be read are skipped, and so are their rows
    with a fault.
    """
    from m3diff.stages.train.batches import Samples

    tables: dict[str, list[pl.DataFrame]] = {}
    for name, entry in params.ingest.datasets.items():
        if not entry.root.is_dir():
            continue
        try:
            samples = samples_of_dataset(params, name, entry)
        except (DataError, ParamsError):
            continue
        for (split,), rows in samples.partition_by("split", as_dict=True).items():
            tables.setdefault(str(split), []).append(rows)
    return {split: Samples(pl.concat(rows, how="diagonal")) for split, rows in sorted(tables.items())}


def samples_of_dataset(params: Params, name: str, entry: DatasetEntry) -> pl.DataFrame:
    """Return the samples of a dataset, with the columns of SCHEMA and `split`.

    Raises:
        DataError: an annotation file cannot be used.
        ParamsError: the file of questions cannot be used.
    """
    from m3diff.stages.train.batches import SCHEMA

    spec = DATASETS[entry.reader]
    rows, _ = to_records(name, entry, spec.read(entry.root, **entry.options))
    records = pl.DataFrame(pa.Table.from_pylist([row for row in rows if row["fault"] is None], RAW_SCHEMA))
    records = records.unique("id", keep="first", maintain_order=True)
    pairs = records.drop("images", "history").with_row_index("row")
    pairs = pairs.hstack(draw_keys(params.convert.seed, records))
    source = params.convert.sources.get(name, MixtureSource())
    questions = load_questions(params.convert.questions)[source.task_for(spec.task)]
    is_trained = pl.col("split") == "train"
    training, _ = training_samples(
        pairs.filter(is_trained), questions, source if entry.train_on else MixtureSource(weight=0), params.convert
    )
    evaluation = evaluation_samples(pairs.filter(~is_trained), questions)
    samples = pl.concat([training, evaluation], how="diagonal")
    samples = samples.hstack(records.select("images", "history")[samples["row"]])
    return samples.select(*SCHEMA.names(), "split")


def faults_of_test_pairs(params: Params) -> Iterator[Fault]:
    """Yield a fault if the gate's dataset has no test pairs, because the trained model could not be evaluated.

    If the dataset does not exist yet or cannot be read, no fault is yielded, because the stages that create and read
    the dataset report the problem.
    """
    protocol = params.promote.protocol
    entry = params.ingest.datasets.get(protocol.partition("/")[0])
    if entry is None or not entry.root.is_dir():
        return
    try:
        rows = DATASETS[entry.reader].read(entry.root, **entry.options)
        has_test_pair = any(row.split == "test" for row in rows)
    except DataError:
        return
    if not has_test_pair:
        yield Fault(
            "preflight.no_test_pair",
            key="promote.protocol",
            protocol=protocol,
            root=entry.root,
            hint=HOW_TO_TEST,
        )


def faults_of_retention_sets(params: Params) -> Iterator[Fault]:
    """Yield a fault for each retention dataset with test records that the family of the trained model cannot process.

    As in `faults_of_test_pairs`, datasets that do not exist yet or cannot be read are skipped.
    """
    name_of_family = params.models[params.train.model].family
    takes = FAMILIES[name_of_family].takes
    for name, entry in params.ingest.datasets.items():
        if entry.role != RETENTION or not entry.root.is_dir():
            continue
        try:
            rows = [row for row in DATASETS[entry.reader].read(entry.root, **entry.options) if not row.fault]
        except DataError:
            continue
        test_rows = [row for row in rows if row.split == "test"]
        fields: dict[str, Any] = {"key": f"ingest.datasets.{name}.role", "dataset": name, "family": name_of_family}
        images_not_taken = {len(row.images) for row in test_rows} - {*takes.images}
        for images in sorted(images_not_taken):
            yield Fault("preflight.retention_images_not_taken", images=images, expected=list(takes.images), **fields)
        if not takes.questions and any(row.question is not None for row in test_rows):
            yield Fault("preflight.retention_questions_not_read", **fields)


def notes_on_questions(params: Params) -> list[str]:
    """Return a note if datasets ask other questions than the one that the champion was trained on, otherwise no note.

    The datasets must be checked out. There is no note if the champion does not name its question, or if MLflow or the
    data cannot be read, because the checks and stages report these problems.
    """
    try:
        champion = find_champion(params)
        trained_question = None if champion is None else read_trained_question(champion)
        if champion is None or trained_question is None:
            return []
        task_questions = load_questions(params.convert.questions)
        phrases: list[str] = []
        for name, entry in params.ingest.datasets.items():
            source = params.convert.sources.get(name, MixtureSource())
            task = source.task_for(DATASETS[entry.reader].task)
            if task not in task_questions or not entry.root.is_dir():
                continue  # convert and ingest report these problems
            questions = list_questions(entry, task_questions[task][0])
            if questions and trained_question not in questions:
                phrases.append(describe_questions(name, questions))
    except (DataError, MlflowException, OSError, ValueError):
        return []
    if not phrases:
        return []
    return [
        f"{champion.name} version {champion.version}, the champion, was trained on the question “{trained_question}”. "
        f"The data ask other questions: {'; '.join(phrases)}. The gate compares the answers of both models to the "
        f"questions of {params.promote.protocol} (promote.protocol)"
    ]


def find_champion(params: Params) -> ModelVersion | None:
    """Return the champion, or None if nothing has been promoted yet."""
    store = tracking.resolve_uri(params.register_.tracking_uri)
    if store.startswith(tracking.SQLITE) and not Path(store.removeprefix(tracking.SQLITE)).is_file():
        return None
    with tracking.connect(params.register_.tracking_uri) as client:
        return find_aliased_version(client, params.register_.model_name, CHAMPION)


def list_questions(entry: DatasetEntry, task_question: str) -> list[str]:
    """Return the distinct questions of a dataset in the order of its rows.

    Args:
        task_question: question that is asked about records without a question of their own.
    """
    rows = DATASETS[entry.reader].read(entry.root, **entry.options)
    return list(dict.fromkeys(row.question or task_question for row in rows if not row.fault))


def describe_questions(dataset: str, questions: Sequence[str]) -> str:
    """Return which questions a dataset asks, in words: the first one, and how many there are."""
    example = textwrap.shorten(questions[0], MAX_QUESTION_CHARS, placeholder=" ...")
    count = "" if len(questions) == 1 else f" and {len(questions) - 1:,} more"
    return f"{dataset} asks “{example}”{count}"


def size_of(folder: Path) -> int:
    """Return the total size of all files below a folder in bytes, or 0 if the folder does not exist."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
