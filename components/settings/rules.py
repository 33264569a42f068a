"""Rules between values of `params.yaml`, and between a value and what it names: datasets, families, metrics, tasks.

Each rule takes parameters in which every single value is right, and yields a line for each fault.
"""

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, create_model

from m3diff.datasets import DATASETS
from m3diff.models import FAMILIES
from m3diff.scoring.metrics import METRICS, choose_metrics, gate_metrics, with_characters
from m3diff.scoring.pairs import protocols_of
from m3diff.settings.section import ParamsError, Section, closest, explain
from m3diff.settings.tree import Params
from m3diff.stages.ingest.params import DatasetEntry


def datasets(params: Params) -> Iterator[str]:
    """Each dataset has options that its reader knows, counts that are published
    where it says so, splits that may train, and questions for its task."""
    tasks = mapping_in(params.convert.questions, yaml.safe_load)  # its keys
    for name, entry in params.ingest.datasets.items():
        where = f"ingest.datasets.{name}"
        yield from wrong_options(where, entry.reader, entry.options)
        spec, source, known = DATASETS[entry.reader], params.convert.sources.get(name), DATASETS[origin(params, name)]
        if kept := set(known.never_train) & set(entry.train_on):
            yield f"{where}.train_on: {known.title}'s authors ask that {', '.join(kept)} never trains; write [train]"
        if entry.expected_pairs == "published" and spec.part(name) is None:
            parts = ", ".join(part.part for part in spec.published)
            remedy = f"call the dataset one of {parts}" if parts else "write the counts, or null"
            yield f"{where}.expected_pairs: no counts of {name!r} are published; {remedy}"
        task, place = spec.task, f"the task of dataset {name!r}"
        if source is not None and source.task is not None:
            task, place = source.task, f"convert.sources.{name}.task"
        if tasks is not None and task not in tasks:
            yield f"{place}: {closest(task, tasks)}; tasks are in {params.convert.questions}"
    unknown = [name for name in params.convert.sources if name not in params.ingest.datasets]
    yield from (f"convert.sources.{name}: no such dataset; {closest(name, params.ingest.datasets)}" for name in unknown)


def mapping_in(file: Path, parse: Callable[[str], Any]) -> dict[str, Any] | None:
    """The content of a file; None where it is not there, or no mapping, which the stage that needs it reports."""
    try:
        found = parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return found if isinstance(found, dict) else None


def wrong_options(where: str, reader: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Faults of a reader's options, which are the arguments of its function after `root`."""
    arguments = [*inspect.signature(DATASETS[reader].read).parameters.values()][1:]
    fields: dict[str, Any] = {one.name: (one.annotation, one.default) for one in arguments}
    taken = create_model("Options", __base__=Section, **fields)
    try:
        taken.model_validate(options)
    except ValidationError as error:
        yield from explain(error, options, taken, f"{where}.options")


def origin(params: Params, name: str) -> str:
    """The reader whose licence, and whose authors' wishes, hold for a dataset: its own, or for synthetic data that of
    the dataset they were made from in the end."""
    made = {Path(os.path.abspath(each.root)): each.source for each in params.augment.values()}
    source: Any = params.ingest.datasets[name]
    for _ in range(len(made) + 1):  # entries that are made of each other in a ring end here
        found = made.get(Path(os.path.abspath(source.root)))
        if source.reader != "pairs" or found is None:
            break
        source = found
    return source.reader


def licensed(params: Params) -> dict[str, DatasetEntry]:
    """The datasets of the run for those who pass on what is made of them: each under the reader of `origin`."""
    entries = params.ingest.datasets.items()
    return {name: each.model_copy(update={"reader": origin(params, name)}) for name, each in entries}


def generators(params: Params) -> Iterator[str]:
    """A dataset that makes itself is ingested by a reader that can make it, from the folder that it is written to."""
    for name, settings in params.synthesize.items():
        entry = params.ingest.datasets.get(name)
        if entry is None:
            yield f"synthesize.{name}: no dataset of `ingest.datasets` has this name; remove the entry or ingest it"
        elif DATASETS[entry.reader].generate is None:
            able = ", ".join(known for known, spec in DATASETS.items() if spec.generate)
            wanted = f"only {able} can; correct ingest.datasets.{name}.reader or remove the entry"
            yield f"synthesize.{name}: the reader {entry.reader!r} cannot make its dataset: {wanted}"
        elif settings.root != entry.root:
            yield (
                f"synthesize.{name}.root: must be the root of the dataset that ingest reads, {entry.root} "
                f"(found {settings.root}); write one of the two in both places"
            )


def made_datasets(params: Params) -> Iterator[str]:
    """Synthetic data are read by ingest, as what they are, and made from a source that can be read.

    Their root is written anew, and DVC removes it before the stage could refuse: nothing that an entry reads is in it
    or around it, but synthetic data that others are made of.
    """
    for name, entry in params.augment.items():
        where, ingested, manifest = f"augment.{name}", params.ingest.datasets.get(name), entry.manifest
        if ingested is None:
            yield f"{where}: no dataset of `ingest.datasets` has this name; remove the entry or ingest it"
        elif (ingested.reader, ingested.options.get("manifest"), ingested.root) != ("pairs", manifest, entry.root):
            wanted = f"{{reader: pairs, root: {entry.root}, options: {{manifest: {manifest}}}}}"
            yield f"{where}: ingest reads another dataset under this name; write ingest.datasets.{name}: {wanted}"
        yield from wrong_options(f"{where}.source", entry.source.reader, entry.source.options)
        if entry.kind == "edits" and entry.editor.kind == "drawn" and entry.source.reader != "minichange":
            yield f"{where}.editor.kind: drawn edits what the reader minichange reads alone; write instruct_pix2pix"
        root = Path(os.path.realpath(entry.root))
        for other, reading in params.augment.items():
            parts: list[Any] = [getattr(reading, part, None) for part in ("editor", "features")]
            models = [("model", part.model) for part in parts if hasattr(part, "model")]
            for what, folder in [("source", reading.source.root), *models]:
                there = Path(os.path.realpath(folder))
                made = other != name and there == root and reading.source.options.get("manifest") == manifest
                if (there.is_relative_to(root) or root.is_relative_to(there)) and not (made and what == "source"):
                    of = "its" if other == name else f"augment.{other}'s"
                    lies = f"{of} {what} is in {folder}; name another folder"
                    yield f"{where}.root: {entry.root} is written anew, and {lies}"


def separate_folders(params: Params) -> Iterator[str]:
    """Dataset roots and the folders that stages write: none is another or inside another."""
    folders = {f"ingest.datasets.{name}.root": entry.root for name, entry in params.ingest.datasets.items()}
    folders |= {f"paths.{name}": folder for name, folder in params.paths} | {"compute.scratch": params.compute.scratch}
    places = [(name, folder, Path(os.path.abspath(folder))) for name, folder in folders.items()]
    yield from (
        f"{name}: {folder} overlaps {other} ({second}); give each a folder of its own"
        for (other, second, there), (name, folder, at) in combinations(places, 2)
        if at.is_relative_to(there) or there.is_relative_to(at)
    )


def models(params: Params) -> Iterator[str]:
    """`train.model` names an entry. It fits the base, where the base is there; the others are right by themselves."""
    trained, base = params.train.model, mapping_in(params.train.base / "config.json", json.loads)
    if trained not in params.models:
        yield f"train.model: {closest(trained, params.models)}; models are in the section `models`"
    for name, settings in params.models.items():
        found = FAMILIES[settings.family].faults(settings, base if name == trained else None)
        yield from (f"models.{name}: {fault}" for fault in found)


def training(params: Params) -> Iterator[str]:
    """Batches divide among workers; the alignment has datasets of its own and leaves some; the best checkpoint is
    known."""
    trained = [name for name, entry in params.ingest.datasets.items() if entry.train_on]
    settings, compute = params.models.get(params.train.model), params.compute
    batches = {"train": params.train.global_batch}
    if settings is not None and (align := settings.align):
        where = f"models.{params.train.model}.align"
        batches[where] = align.global_batch
        yield from (
            f"{where}.datasets: {closest(name, trained)}; ingest.datasets has those that train"
            for name in align.datasets
            if name not in trained
        )
        if trained and set(trained) <= set(align.datasets):
            yield f"{where}.datasets: all that train are in it, and none is left to fine-tune on; take one out"
    micro, workers = compute.micro_batch, max(compute.workers, 1)
    for where, batch in batches.items():
        if batch % (micro * workers):
            yield (
                f"{where}.global_batch: must be a multiple of compute.micro_batch {micro} x {workers} worker(s) = "
                f"{micro * workers} (found {batch})"
            )
    if params.train.export == "best":
        best = "train.export: best is the checkpoint with the highest CIDEr"
        if compute.caption_val_pairs == 0:
            yield f"{best}, but compute.caption_val_pairs is 0, so none is captioned; raise it or write last"
        if all("val" in entry.train_on for entry in params.ingest.datasets.values()):
            why = "every dataset's train_on has val, so none is left; take it out of one of ingest.datasets"
            yield f"{best} on validation pairs, but {why} or write last"


def scores(params: Params) -> Iterator[str]:
    """The gate has a protocol and scores that the run computes."""
    chosen, gate = params.evaluate.metrics, params.promote
    read_by = {
        f"{name}/{protocol.name}": DATASETS[entry.reader]
        for name, entry in params.ingest.datasets.items()
        for protocol in protocols_of(name, DATASETS[entry.reader])
    }
    if gate.protocol not in read_by:
        yield f"promote.protocol: {closest(gate.protocol, read_by)}; each dataset of ingest.datasets has its own"
        return
    why = "evaluate.metrics decides what is computed"
    if read_by[gate.protocol].grammar is None:
        chosen = tuple(name for name in chosen if not METRICS[name].needs_grammar)
        why += f", and what reads captions needs a grammar, which {gate.protocol} has not"
    if gate.metric not in (better := gate_metrics(chosen)):
        yield f"promote.metric: {closest(gate.metric, better)}; {why}"
    resampled = [score for metric in with_characters(choose_metrics(chosen)).values() for score in metric.resampled]
    yield from (
        f"promote.guards.{name}: {closest(name, resampled)}; {why}. Write promote.guards with those, or {{}}"
        for name in gate.guards
        if name not in resampled
    )


RULES = (separate_folders, generators, made_datasets, datasets, models, training, scores)


def read_paths(params: Params, stage: str) -> list[tuple[str, Path, str]]:
    """(key, path, remedy) for each path of `params.yaml` that a stage reads and no stage makes."""
    kind, _, name = stage.partition("@")
    if kind == "ingest":
        maker = "augment" if name in params.augment else "synthesize" if name in params.synthesize else None
        remedy = f"`m3diff {maker} {name}`" if maker else "fetch the dataset or correct the path"
        return [(f"ingest.datasets.{name}.root", params.ingest.datasets[name].root, remedy)]
    if kind == "augment":
        return [(f"augment.{name}.source.root", params.augment[name].source.root, "fetch the source, or make it first")]
    if kind == "convert":
        return [("convert.questions", params.convert.questions, "see profiles/questions.yaml")]
    if kind == "train":
        base, settings = params.train.base, params.models[params.train.model]
        fetch = f"fetch the base model (`hf download OWNER/{base.name} --local-dir {base}`) or correct the path"
        needed = FAMILIES[settings.family].base_files  # next to the base's own files, each with its remedy
        files = {"config.json": "`make base`" if base == params.paths.base else fetch}
        files |= needed(settings, mapping_in(base / "config.json", json.loads)) if needed else {}
        return [("train.base", base / file, remedy) for file, remedy in files.items()]
    if kind == "evaluate" and params.compute.spice_dir is not None:
        remedy = "fetch the CoreNLP 3.6.0 jars, or write null; `m3diff score --check-spice` names all"
        return [("compute.spice_dir", params.compute.spice_dir, remedy)]
    return []


def absent_paths(params: Params, *stages: str) -> list[tuple[str, Path, str]]:
    """The paths of `read_paths` of these stages that are not there."""
    return [each for stage in stages for each in read_paths(params, stage) if not each[1].exists()]


def check_paths(params: Params, *stages: str) -> None:
    """Check that the paths that these stages read are there, before any of them starts. A dataset's ingest is
    `ingest@NAME`.

    Raises:
        ParamsError: names every path that is not there, with the key and the remedy.
    """
    absent = [f"  {key}: {path} is not there; {remedy}" for key, path, remedy in absent_paths(params, *stages)]
    if absent:
        raise ParamsError(f"{len(absent)} path(s) of the parameters are missing\n" + "\n".join(absent))
