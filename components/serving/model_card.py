"""Build the card of a served model: name, family, date, training data, and example pairs.

The facts come from the `dvc.lock` that recorded the model's training. For a registered version, that file is in the
version's commit. For a checkpoint folder, it is in the project that contains the folder. The project may have trained
another model since then, so a `dvc.lock` is used only if its hashes match the model's. An image is shown only if its
file has not changed since the training. The card leaves out anything that cannot be verified.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import check_licence
from m3diff.datasets.tables import SIDES
from m3diff.provenance import git
from m3diff.provenance.dvc import DVC_LOCK, Lock, dvc_hash, md5, object_file, read_file_list, read_lock, run_dvc
from m3diff.records.errors import DataError, data_error_if_unreadable, format_count
from m3diff.records.files import sha256
from m3diff.records.tables import part_paths
from m3diff.registry.local_store import read_stored_tags
from m3diff.registry.model_source import Source
from m3diff.settings.tree import Params

MAX_EXAMPLES = 6
MAX_CANDIDATES = 60  # maximum number of test pairs that are checked to find MAX_EXAMPLES with unchanged images
MAX_HASHED_BYTES = 1_000_000_000  # checkpoints up to this size are hashed completely when the server starts
NO_PHOTOGRAPHS = (
    "All of them are drawn scenes. The model has never seen a photograph, and what it says of one means nothing."
)
NO_RECORD = "What it was trained on is not recorded on this machine."


@dataclass(frozen=True)
class TrainingData:
    """A dataset that a model was trained on.

    Attributes:
        is_drawn: whether its images were drawn by this project.
        pairs: number of training pairs, or None if it is not recorded on this machine.
    """

    dataset: str
    is_drawn: bool
    pairs: int | None = None


@dataclass(frozen=True)
class Example:
    """A pair from the model's test set, shown on the page.

    Attributes:
        key: identifier of the pair in URLs.
        before, after: paths of the images.
    """

    key: str
    id: str
    reference: str
    before: Path
    after: Path


@dataclass(frozen=True)
class ModelCard:
    """Facts about a model for its users.

    Attributes:
        date: date (YYYY-MM-DD) when the version was registered or, for a folder, when its manifest was written.
        notes: reasons why information is missing from the card, for the person who runs the server.
    """

    name: str
    family: str | None = None
    date: str | None = None
    trained_on: tuple[TrainingData, ...] = ()
    examples: tuple[Example, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    @property
    def knows_photographs(self) -> bool | None:
        """Whether the model was trained on images other than drawn scenes, or None if this is not recorded."""
        if not self.trained_on:
            return None
        return not all(data.is_drawn for data in self.trained_on)

    def sentences(self) -> list[str]:
        """Return sentences that describe the model's training data and its limits."""
        if not self.trained_on:
            return [NO_RECORD]
        counts = [data.pairs for data in self.trained_on if data.pairs is not None]
        if len(counts) == len(self.trained_on):
            datasets = ", ".join(f"{data.dataset} ({data.pairs:,})" for data in self.trained_on)
            sentences = [f"Trained on {format_count(sum(counts), 'pair')}: {datasets}."]
        else:
            sentences = [f"Trained on pairs of {', '.join(data.dataset for data in self.trained_on)}."]
        if self.knows_photographs is False:
            sentences.append(NO_PHOTOGRAPHS)
        return sentences

    def as_dict(self) -> dict[str, Any]:
        """Return the card as a JSON object, without the example pairs."""
        return {
            "name": self.name,
            "version": self.name.rpartition("/")[2],
            "family": self.family,
            "date": self.date,
            "trained_on": [{"dataset": data.dataset, "pairs": data.pairs} for data in self.trained_on],
            "knows_photographs": self.knows_photographs,
            "sentences": self.sentences(),
        }


@dataclass(frozen=True)
class TrainingRecord:
    """DVC's record of how a checkpoint was trained.

    Attributes:
        root: the project folder, to which paths are relative.
        read_file: a function that returns the content of a file at the time of the record, or None if the file does
            not exist.
    """

    lock: Lock
    root: Path
    read_file: Callable[[Path], bytes | None]

    def readers(self) -> dict[str, str]:
        """Return the reader of each dataset (the name of its format in DATASETS), by dataset name.

        For a synthetic dataset, this is the reader of the dataset that it was made from.
        """
        sources: dict[str, Mapping[str, Any]] = {}  # maps a synthetic dataset's folder to the dataset it was made from
        for stage in self.lock.stages:
            stage_name, _, dataset = stage.partition("@")
            if stage_name != "augment":
                continue
            settings = self.lock.stage_params(stage).get(f"augment.{dataset}")
            if settings:
                sources[os.path.normpath(settings["root"])] = settings["source"]
        readers = {}
        entries = self.lock.stage_params("convert").get("ingest.datasets") or {}
        for name, entry in entries.items():
            source = entry
            for _ in range(len(sources)):  # a `while` loop would not end if two sources named each other
                source = sources.get(os.path.normpath(source["root"]), source)
            if source["reader"] in list(DATASETS):
                readers[name] = source["reader"]
        return readers

    def trained_on(self) -> tuple[TrainingData, ...]:
        """Return the training datasets from the report of `convert`.

        The result is empty if the report does not belong to this record.
        """
        path = self.lock.output("convert", "train").parent / "report.json"
        content = self.read_file(path)
        recorded_hash = self.lock.hashes(path).get("convert outs")
        if content is None or hashlib.md5(content).hexdigest() != recorded_hash:
            return ()
        readers = self.readers()
        datasets = []
        for name, counts in json.loads(content)["datasets"].items():
            pairs = counts["pairs"].get("train", 0)
            if pairs:
                datasets.append(TrainingData(dataset=name, is_drawn=is_drawn(readers.get(name)), pairs=pairs))
        return tuple(datasets)

    def examples(self, model: str) -> tuple[Example, ...]:
        """Return up to MAX_EXAMPLES test pairs, taken from the datasets in turn.

        The datasets' licences must allow showing their images, and the images must not have changed since the training.

        Raises:
            DataError: the record does not include the table of test pairs, or the table is neither on disk nor in
                DVC's cache.
        """
        datasets = [name for name, reader in self.readers().items() if may_be_shown(reader)]
        # a version of an earlier release has a single file
        table = self.lock.output("validate", "records", "records.parquet")
        examples: list[Example] = []
        for row in rows_of_test_split(self._recorded_parts(table, "validate outs"), datasets):
            before, after = (self.root / image["uri"] for image in row["images"])
            if all(_is_unchanged(self.root / image["uri"], image["sha256"]) for image in row["images"]):
                key = hashlib.sha256(f"{model}\0{row['id']}".encode()).hexdigest()[:12]
                examples.append(Example(key=key, id=row["id"], reference=row["reference"], before=before, after=after))
            if len(examples) == MAX_EXAMPLES:
                break
        return tuple(examples)

    def _recorded_parts(self, path: Path, entry: str) -> list[Path]:
        """Return the parts of a table with the recorded content, either on disk or in DVC's cache."""
        recorded_hash = self.lock.recorded_hash(path, entry)
        table = self.root / path
        if table.exists() and dvc_hash(table) == recorded_hash:
            return part_paths(table)
        cache = self._cache_folder()
        md5_by_name = read_file_list(cache, recorded_hash) or {path.name: recorded_hash}
        cached_parts = [object_file(cache, md5_by_name[name]) for name in sorted(md5_by_name)]
        if not all(part.is_file() for part in cached_parts):
            raise DataError("serving.content_not_fetched", path=path, value=recorded_hash)
        return cached_parts

    def _cache_folder(self) -> Path:
        return (self.root / run_dvc(self.root, "cache", "dir").strip()).resolve()


def is_drawn(reader: str | None) -> bool:
    """Return whether this project draws the images of the reader's dataset, as it does for MiniChange."""
    return reader is not None and DATASETS[reader].generate is not None


def may_be_shown(reader: str) -> bool:
    """Return whether the licence of the reader's dataset allows showing its images."""
    try:
        check_licence(DATASETS[reader], "show")
    except DataError:
        return False
    return True


def rows_of_test_split(parts: list[Path], datasets: list[str]) -> Iterator[dict[str, Any]]:
    """Yield up to MAX_CANDIDATES test pairs, taken from the datasets in turn.

    Each row contains the id, the paths and SHA-256 digests of both images, and the first reference.

    Raises:
        DataError: the table cannot be read.
    """
    import polars as pl  # imported here because `m3diff caption` uses the card without this table

    rows = pl.scan_parquet(parts).filter(pl.col("split") == "test", pl.col("dataset").is_in(datasets)).sort("id")
    with data_error_if_unreadable(parts[0]):
        has_images = "images" in rows.collect_schema()
    if not has_images:  # a version from before records had a list of images
        images = [pl.struct(uri=pl.col(side), sha256=pl.col(f"{side}_sha256")) for side in SIDES]
        rows = rows.with_columns(images=pl.concat_list(images))
    rows = rows.filter(pl.col("images").list.len() == len(SIDES))
    position_in_dataset = pl.int_range(pl.len()).over("dataset")
    candidates = rows.sort(position_in_dataset, "dataset").head(MAX_CANDIDATES)
    reference = pl.col("references").list.first().fill_null("").alias("reference")
    with data_error_if_unreadable(parts[0]):
        pairs = candidates.select("id", "images", reference).collect().to_dicts()
    yield from pairs


def _is_unchanged(image: Path, digest: bytes) -> bool:
    return image.is_file() and sha256(image) == digest.hex()


# The record of a model


def build_model_card(params: Params, source: Source) -> ModelCard:
    """Return the card of a model. It lacks facts that are not recorded, since a model can answer without a card."""
    card = ModelCard(source.name, family=_family_of(source.folder))
    version = source.name.rpartition("/")[2]
    try:
        if version.isdecimal():
            return _card_of_version(params, card, version)
        return _card_of_folder(card, source.folder)
    except Exception as error:  # git, DVC or MLflow failed, or a record is damaged
        return replace(card, notes=(f"{source.name}: what it was trained on cannot be looked up: {error}",))


def note_on_training(params: Params, source: Source) -> str | None:
    """Return sentences about the training data if the model was trained only on drawn scenes, otherwise None.

    The result is also None if the training is not recorded. A version's tags are read directly from the store on this
    machine, because importing MLflow would double the time of `m3diff caption`.
    """
    version = source.name.rpartition("/")[2]
    checkpoint = source.folder.resolve()
    try:
        if version.isdecimal():
            cfg = params.register_
            record = _record_with_tags(read_stored_tags(cfg.tracking_uri, cfg.model_name, int(version)))
        else:
            record = _project_record(checkpoint)
        card = ModelCard(source.name, trained_on=record.trained_on() if record else ())
        if record is None or card.knows_photographs is not False:
            return None
        # This check comes last because hashing a large checkpoint takes seconds
        if not version.isdecimal() and not _has_recorded_content(record, checkpoint):
            return None
    except Exception:  # git, DVC or sqlite failed, or a record is damaged; captioning works without them
        return None
    return " ".join(card.sentences())


def _record_with_tags(tags: Mapping[str, str]) -> TrainingRecord | None:
    """Return the training record that matches a version's tags, or None if it is not on this machine."""
    for record in _candidate_records(tags.get("git.commit")):
        if _matches_tags(record, tags):
            return record
    return None


def _family_of(checkpoint: Path) -> str | None:
    """Return the name of a checkpoint's model family, or None if the manifest does not name it."""
    family = json.loads((checkpoint / "manifest.json").read_bytes()).get("family")
    return family if isinstance(family, str) else None


def _card_of_folder(card: ModelCard, checkpoint: Path) -> ModelCard:
    date = _date_of((checkpoint / "manifest.json").stat().st_mtime)
    record = _record_of_folder(checkpoint.resolve())
    return _with_record(replace(card, date=date), record)


def _record_of_folder(checkpoint: Path) -> TrainingRecord | None:
    """Return the training record of a checkpoint folder.

    The result is None if the folder's project does not have a record, or if the record describes another checkpoint.
    """
    record = _project_record(checkpoint)
    return record if record is not None and _has_recorded_content(record, checkpoint) else None


def _project_record(checkpoint: Path) -> TrainingRecord | None:
    """Return the record of the project whose training writes to this folder, or None if there is no such project."""
    root = next((folder for folder in checkpoint.parents if (folder / DVC_LOCK).is_file()), None)
    if root is None:
        return None
    lock = Lock(root / DVC_LOCK)
    if (root / lock.output("train", "checkpoint")).resolve() != checkpoint:
        return None
    return TrainingRecord(lock, root, partial(_read_file, root))


def _has_recorded_content(record: TrainingRecord, checkpoint: Path) -> bool:
    """Return whether a checkpoint folder has the content that the stage `train` wrote.

    For large checkpoints, only the manifest is compared, since it contains the hashes of all other files.
    """
    recorded_hash = record.lock.hashes(record.lock.output("train", "checkpoint")).get("train outs")
    if recorded_hash is None:
        return False
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    if size <= MAX_HASHED_BYTES:
        return dvc_hash(checkpoint) == recorded_hash
    recorded_manifest = read_file_list(record.root / ".dvc" / "cache", recorded_hash).get("manifest.json")
    return recorded_manifest == md5(checkpoint / "manifest.json")


def _card_of_version(params: Params, card: ModelCard, version: str) -> ModelCard:
    from m3diff.registry.tracking import connect, find_run
    from m3diff.registry.versions import find_version

    cfg = params.register_
    with connect(cfg.tracking_uri) as client:
        registered = find_version(client, cfg.model_name, version)
        run = find_run(client, registered.run_id)
    card = replace(card, date=_date_of(registered.creation_timestamp / 1000))
    tags = registered.tags
    record = _record_with_tags(tags)
    if record is None:
        logged_params = run.data.params if run else {}
        card = replace(card, trained_on=_datasets_in_tags(tags, logged_params))
    return _with_record(card, record)


def _candidate_records(commit: str | None) -> Iterator[TrainingRecord]:
    """Yield the records that may describe a version: the record in the version's commit, then the checkout's record."""
    full_commit = git.commit_at(commit) if commit else None
    if full_commit:
        yield TrainingRecord(read_lock(full_commit), Path(), partial(git.read_from_commit, full_commit))
    if DVC_LOCK.is_file():
        yield TrainingRecord(Lock(), Path(), partial(_read_file, Path()))


def _matches_tags(record: TrainingRecord, tags: Mapping[str, str]) -> bool:
    """Return whether the data and checkpoint hashes in a record match a version's tags."""
    data_hash = record.lock.hashes(record.lock.output("convert", "train")).get("convert outs")
    checkpoint_hash = record.lock.hashes(record.lock.output("train", "checkpoint")).get("train outs")
    is_same_data = data_hash is not None and data_hash == tags.get("dvc.data")
    return is_same_data and checkpoint_hash == tags.get("dvc.checkpoint")


def _datasets_in_tags(tags: Mapping[str, str], logged_params: Mapping[str, str]) -> tuple[TrainingData, ...]:
    """Return the training datasets that MLflow names for a version whose record is not on this machine.

    Their numbers of pairs are not known.
    """
    names = [tag.removeprefix("dvc.raw.") for tag in tags if tag.startswith("dvc.raw.")]
    datasets = []
    for name in sorted(names):
        reader = logged_params.get(f"ingest.datasets.{name}.reader")
        # The run may lack the reader, or this code may not know it
        known_reader = reader if reader in list(DATASETS) else None
        datasets.append(TrainingData(name, is_drawn(known_reader)))
    return tuple(datasets)


def _with_record(card: ModelCard, record: TrainingRecord | None) -> ModelCard:
    """Return the card with the training data and the example pairs of a record."""
    if record is None:
        return card
    card = replace(card, trained_on=record.trained_on())
    try:
        return replace(card, examples=record.examples(card.name))
    except DataError as error:
        return replace(card, notes=(f"{card.name}: no pairs to try on the page: {error}",))


def _read_file(root: Path, path: Path) -> bytes | None:
    file = root / path
    return file.read_bytes() if file.is_file() else None


def _date_of(seconds: float) -> str:
    """Return the UTC date (YYYY-MM-DD) of a time in seconds since 1970."""
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
