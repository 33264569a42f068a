"""What one value of `params.yaml` says of another, and of what there is to name: datasets, families, metrics, tasks.

Each rule yields a line for each fault. A rule reads what it needs from the parameters; where some of that is wrong
itself, the rule is left out and the others still speak.
"""

import difflib
import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from m3diff.datasets import DATASETS
from m3diff.models import FAMILIES
from m3diff.models.m3diff.family import LARGE_BASE, SMALL_BASE
from m3diff.models.onediff.family import LLAVA_BASE
from m3diff.scoring.metrics import METRICS, gate_metrics
from m3diff.scoring.protocols import protocols_of
from m3diff.settings.gpus import GPUS
from m3diff.settings.section import FrozenDict, ParamsError
from m3diff.settings.tree import Params
from m3diff.stages.augment.params import MANIFEST, Drawn, Edits
from m3diff.stages.ingest.params import DatasetEntry

LLAVA_BASES = (SMALL_BASE, LARGE_BASE, LLAVA_BASE)
"""Folders' names of the bases that llava-hf publishes."""


def shown(value: Any) -> str:
    """A value as `params.yaml` has it."""
    return yaml.safe_dump(value).split("\n")[0] if value is None or isinstance(value, bool) else repr(value)


def closest(found: Any, known: Iterable[str], of: str = "expected one of") -> str:
    """What may stand here instead of `found`: the nearest name where one is near, else all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(str(found), names, n=1, cutoff=0.6)
    listed = ", ".join(names) or "none"
    words = f"known {of}: {listed}" if of == "keys" else f"{of} {listed} (found {shown(found)})"
    return f"did you mean {near[0]!r}? {words}" if near else words


def inconsistencies(params: Params, complete: bool) -> Iterator[str]:
    """Every fault of every rule.

    Args:
        complete: all fields are right, so that a field that a rule does not find is an error of the rule.
    """
    checks: list[Callable[[], Iterator[str]]] = [lambda rule=rule: rule(params) for rule in RULES]  # type: ignore[misc]
    datasets = getattr(getattr(params, "ingest", None), "datasets", {})
    for name, entry in datasets.items():
        checks += [lambda rule=rule, name=name, entry=entry: rule(params, name, entry) for rule in DATASET_RULES]  # type: ignore[misc]
    for check in checks:
        try:
            yield from check()
        except AttributeError:
            if complete:
                raise


def dataset_name(params: Params, name: str, entry: DatasetEntry) -> Iterator[str]:
    if not name or not all(letter.isascii() and (letter.isalnum() or letter in "_-") for letter in name):
        yield f"ingest.datasets.{name}: a dataset's name has only letters, digits, _ and - (it stands in ids and files)"


def dataset_reader(params: Params, name: str, entry: DatasetEntry) -> Iterator[str]:
    if entry.reader not in DATASETS:
        yield f"ingest.datasets.{name}.reader: {closest(entry.reader, DATASETS)}"


def dataset_options(params: Params, name: str, entry: DatasetEntry) -> Iterator[str]:
    """Options are arguments of the reader's function beside `root`."""
    if entry.reader in DATASETS:
        yield from wrong_options(f"ingest.datasets.{name}", entry.reader, entry.options)


def wrong_options(where: str, reader: str, options: Mapping[str, Any]) -> Iterator[str]:
    arguments = list(inspect.signature(DATASETS[reader].read).parameters.values())[1:]
    known = [argument.name for argument in arguments]
    for option in options:
        if option not in known:
            yield f"{where}.options.{option}: unknown option; {closest(option, known, of='keys')}"
    for argument in arguments:
        if argument.default is inspect.Parameter.empty and argument.name not in options:
            yield f"{where}.options.{argument.name}: missing; the reader {reader!r} needs it"


def dataset_counts(params: Params, name: str, entry: DatasetEntry) -> Iterator[str]:
    if entry.expected_pairs == "published" and entry.reader in DATASETS and DATASETS[entry.reader].part(name) is None:
        parts = ", ".join(part.part for part in DATASETS[entry.reader].published)
        remedy = f"call the dataset one of {parts}" if parts else "write the counts, or null"
        yield f"ingest.datasets.{name}.expected_pairs: no counts of {name!r} are published; {remedy}"


def dataset_splits(params: Params, name: str, entry: DatasetEntry) -> Iterator[str]:
    reader = origin(params, name)
    if reader in DATASETS:
        for split in DATASETS[reader].never_train:
            if split in entry.train_on:
                title = DATASETS[reader].title
                yield f"ingest.datasets.{name}.train_on: {title}'s authors ask that {split} never trains; write [train]"


def origin(params: Params, name: str) -> str:
    """The reader whose licence, and whose authors' wishes, hold for a dataset: its own, or of a made dataset that of
    what it was made of in the end."""
    entry = params.ingest.datasets[name]
    made = {Path(os.path.abspath(each.root)): each.source for _, each in sound(params.augment)}
    source: Any = entry
    for _ in range(len(made) + 1):  # entries that are made of each other in a ring end here
        found = made.get(Path(os.path.abspath(source.root)))
        if source.reader != "pairs" or found is None:
            break
        source = found
    return source.reader


def licensed(params: Params) -> FrozenDict[str, DatasetEntry]:
    """The datasets of the run for those who pass on what is made of them: each under the reader of `origin`."""
    entries = params.ingest.datasets
    return FrozenDict(
        {name: each.model_copy(update={"reader": origin(params, name)}) for name, each in entries.items()}
    )


def dataset_task(params: Params, name: str, entry: DatasetEntry) -> Iterator[str]:
    """The questions of a pair: its source's task, or the dataset's own."""
    tasks = known_tasks(params.convert.questions)
    if tasks is None or entry.reader not in DATASETS:
        return
    source = params.convert.sources.get(name)
    own = DATASETS[entry.reader]
    task, where = own.task, f"the task of dataset {name!r}"
    if source is not None and source.task is not None:
        task, where = source.task, f"convert.sources.{name}.task"
    if task not in tasks:
        yield f"{where}: {closest(task, tasks)}; tasks stand in {params.convert.questions}"


def known_tasks(questions: Path) -> list[str] | None:
    """The tasks of the file of questions; None where it is not there or not readable, which convert reports."""
    try:
        found = yaml.safe_load(questions.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    return list(found) if isinstance(found, Mapping) else None


def source_names(params: Params) -> Iterator[str]:
    for name in params.convert.sources:
        if name not in params.ingest.datasets:
            yield f"convert.sources.{name}: no such dataset; {closest(name, params.ingest.datasets)}"


def sound(entries: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Entries without those that are wrong themselves, which are None."""
    return [(name, settings) for name, settings in entries.items() if settings is not None]


def generator_roots(params: Params) -> Iterator[str]:
    for name, settings in sound(params.synthesize):
        root = params.ingest.datasets[name].root
        if Path(settings.root) != root:
            yield (
                f"synthesize.{name}.root: must be the root of the dataset that ingest reads, {root} "
                f"(found {settings.root}); write one of the two in both places"
            )


def made_datasets(params: Params) -> Iterator[str]:
    """A made dataset is read by ingest, as what it is; its source has a known reader, which knows its options."""
    for name, entry in sound(params.augment):
        where = f"augment.{name}"
        ingested = params.ingest.datasets.get(name)
        if ingested is None:
            yield f"{where}: no dataset of `ingest.datasets` has this name; remove the entry or ingest the dataset"
        elif (ingested.reader, ingested.options.get("manifest"), ingested.root) != ("pairs", MANIFEST, entry.root):
            wanted = f"{{reader: pairs, root: {entry.root}, options: {{manifest: {MANIFEST}}}}}"
            yield f"{where}: ingest reads another dataset under this name; write ingest.datasets.{name}: {wanted}"
        reader = entry.source.reader
        if reader not in DATASETS:
            yield f"{where}.source.reader: {closest(reader, DATASETS)}"
        else:
            yield from wrong_options(f"{where}.source", reader, entry.source.options)
        if isinstance(entry, Edits) and isinstance(entry.editor, Drawn) and reader != "minichange":
            yield f"{where}.editor.kind: drawn edits what the reader minichange reads alone; write instruct_pix2pix"


def made_roots(params: Params) -> Iterator[str]:
    """A made dataset's root is written anew, and DVC removes it before the stage could refuse: nothing that an entry
    reads lies in it or around it, but a made dataset that another is made of."""
    entries = sound(params.augment)
    for name, entry in entries:
        root = Path(os.path.realpath(entry.root))
        for other, reading in entries:
            of = "its" if other == name else f"augment.{other}'s"
            for what, folder in read_by(reading):
                there = Path(os.path.realpath(folder))
                made = other != name and there == root and reading.source.options.get("manifest") == MANIFEST
                if (there.is_relative_to(root) or root.is_relative_to(there)) and not (made and what == "source"):
                    lies = f"{of} {what} lies in {folder}; name another folder"
                    yield f"augment.{name}.root: {entry.root} is written anew, and {lies}"


def read_by(entry: Any) -> Iterator[tuple[str, Path]]:
    """The folders that an entry of `augment` reads: its source, and the models of its parts."""
    yield "source", entry.source.root
    for part in ("editor", "writer", "features"):
        if (model := getattr(getattr(entry, part, None), "model", None)) and isinstance(model, Path):
            yield "model", model


def separate_folders(params: Params) -> Iterator[str]:
    """Dataset roots and the folders that stages write: none is another or lies inside it."""
    roots = {f"ingest.datasets.{name}.root": entry for name, entry in params.ingest.datasets.items()}
    folders = {name: entry.root for name, entry in roots.items() if hasattr(entry, "root")}
    outputs = [name for name in type(params.paths).model_fields if hasattr(params.paths, name)]
    folders |= {f"paths.{name}": getattr(params.paths, name) for name in outputs}
    folders["compute.scratch"] = params.compute.scratch
    places = [(name, folder, Path(os.path.abspath(folder))) for name, folder in folders.items()]
    for number, (name, folder, at) in enumerate(places):
        for other, second, there in places[:number]:
            if at == there:
                yield f"{name}: {folder} is {other}, too; give each a folder of its own"
            elif at.is_relative_to(there):
                yield f"{name}: {folder} lies inside {other} ({second}); give each a folder of its own"
            elif there.is_relative_to(at):
                yield f"{other}: {second} lies inside {name} ({folder}); give each a folder of its own"


def trained_model(params: Params) -> Iterator[str]:
    """`train.model` names an entry; one whose own settings are wrong is reported there."""
    if params.train.model not in params.models:
        yield f"train.model: {closest(params.train.model, params.models)}; models stand in the section `models`"


def model_rates(params: Params) -> Iterator[str]:
    """Each part of the family has a rate, or null; nothing else has one, or a delay."""
    for name, settings in sound(params.models):
        parts = FAMILIES[settings.family].parts
        for key, given in (("rates", settings.rates), ("delays", settings.delays)):
            for part in given:
                if part not in parts:
                    yield f"models.{name}.{key}.{part}: no such part; {closest(part, parts, of='keys')}"
        for part in parts:
            if part not in settings.rates:
                yield f"models.{name}.rates.{part}: missing; write the learning rate of this part, or null to freeze it"


def model_on_base(params: Params) -> Iterator[str]:
    """What the family says of its settings, on the base's configuration where the base is there."""
    settings = params.models.get(params.train.model)
    if settings is not None:
        for fault in FAMILIES[settings.family].faults(settings, base_config(params.train.base)):
            yield f"models.{params.train.model}: {fault}"


def recomputed_layers(params: Params) -> Iterator[str]:
    """`compute.activation_checkpointing` is one that the family has for the base's LLM."""
    settings = dict(sound(params.models)).get(params.train.model)
    told = None if settings is None else FAMILIES[settings.family].checkpointing_faults
    if told is not None:
        for fault in told(params.compute.activation_checkpointing, base_config(params.train.base)):
            yield f"compute.activation_checkpointing: {fault}"


def other_models(params: Params) -> Iterator[str]:
    """A model that is not trained need not fit the base."""
    for name, settings in sound(params.models):
        if name != params.train.model:
            for fault in FAMILIES[settings.family].faults(settings, None):
                yield f"models.{name}: {fault}"


def base_config(base: Path) -> dict[str, Any] | None:
    """The base's `config.json`; None where the base is not there, or not readable, which train reports."""
    try:
        found = json.loads((base / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def batches_divide(params: Params) -> Iterator[str]:
    yield from odd_batch(params, "train", params.train.global_batch)


def odd_batch(params: Params, where: str, global_batch: int) -> Iterator[str]:
    """Why a step's sequences cannot be dealt to the workers in micro-batches."""
    micro, workers = params.compute.micro_batch, max(params.compute.workers, 1)
    if global_batch % (micro * workers):
        yield (
            f"{where}.global_batch: must be a multiple of compute.micro_batch {micro} x {workers} worker(s) = "
            f"{micro * workers} (found {global_batch})"
        )


def alignment(params: Params) -> Iterator[str]:
    """The phase before the fine-tuning has datasets of its own that train, and leaves some; its steps divide."""
    settings = dict(sound(params.models)).get(params.train.model)
    if settings is None or settings.align is None:
        return
    align, where = settings.align, f"models.{params.train.model}.align"
    training = [name for name, entry in params.ingest.datasets.items() if entry.train_on]
    for name in align.datasets:
        if name not in training:
            yield f"{where}.datasets: {closest(name, training)}; ingest.datasets has those that train"
    if training and set(training) <= set(align.datasets):
        yield f"{where}.datasets: all that train are in it, and none is left to fine-tune on; take one out"
    yield from odd_batch(params, where, align.global_batch)


def best_needs_captions(params: Params) -> Iterator[str]:
    if params.train.export == "best" and params.compute.caption_val_pairs == 0:
        yield (
            "train.export: best is the checkpoint with the highest CIDEr, but compute.caption_val_pairs is 0, so none "
            "is captioned; raise it or write last"
        )
    if params.train.export == "best" and all("val" in entry.train_on for entry in params.ingest.datasets.values()):
        yield (
            "train.export: best is the checkpoint with the highest CIDEr on validation pairs, but every dataset's "
            "train_on has val, so none is left; take it out of one of ingest.datasets or write last"
        )


def gpu_kind(params: Params) -> Iterator[str]:
    kind = params.compute.gpu_kind
    if kind is not None and kind not in GPUS:
        yield f"compute.gpu_kind: {closest(kind, GPUS)}, or null where it is not known"


def metric_names(params: Params) -> Iterator[str]:
    seen: set[str] = set()
    for name in params.evaluate.metrics:
        if name not in METRICS:
            yield f"evaluate.metrics: {closest(name, METRICS)}"
        if name in seen:
            yield f"evaluate.metrics: {name} is listed twice; remove one"
        seen.add(name)


def gate_protocol(params: Params) -> Iterator[str]:
    """Left to the rules of datasets where one of them has no known reader."""
    known = gate_protocols(params)
    readers_known = all(entry.reader in DATASETS for entry in params.ingest.datasets.values())
    if known and readers_known and params.promote.protocol not in known:
        words = closest(params.promote.protocol, known)
        yield f"promote.protocol: {words}; each dataset of ingest.datasets has its own"


def gate_protocols(params: Params) -> dict[str, str]:
    """Every protocol by which a run with these datasets is scored, and its dataset's reader."""
    return {
        f"{name}/{protocol.name}": entry.reader
        for name, entry in params.ingest.datasets.items()
        if entry.reader in DATASETS
        for protocol in protocols_of(name, DATASETS[entry.reader])
    }


def gate_metric(params: Params) -> Iterator[str]:
    reader = gate_protocols(params).get(params.promote.protocol)
    chosen = [name for name in params.evaluate.metrics if name in METRICS]
    readable = reader is None or DATASETS[reader].grammar is not None  # ingest writes rules that read captions
    computed = [name for name in chosen if readable or not METRICS[name].needs_grammar]
    why = "evaluate.metrics decides what is computed"
    if computed != chosen:
        why += f", and what reads captions needs a grammar, which {params.promote.protocol} has not"
    better = gate_metrics(computed)
    if params.promote.metric not in better:
        yield f"promote.metric: {closest(params.promote.metric, better)}; {why}"
    known = [score for name in computed for score in METRICS[name].resampled]
    for name in params.promote.guards:
        if name not in known:
            yield f"promote.guards.{name}: {closest(name, known)}; {why}. Write promote.guards with those, or {{}}"


RULES: tuple[Callable[[Params], Iterator[str]], ...] = (
    separate_folders,
    generator_roots,
    made_datasets,
    made_roots,
    source_names,
    trained_model,
    model_rates,
    model_on_base,
    recomputed_layers,
    other_models,
    batches_divide,
    alignment,
    best_needs_captions,
    gpu_kind,
    metric_names,
    gate_protocol,
    gate_metric,
)
DATASET_RULES: tuple[Callable[[Params, str, DatasetEntry], Iterator[str]], ...] = (
    dataset_name,
    dataset_reader,
    dataset_options,
    dataset_counts,
    dataset_splits,
    dataset_task,
)


def read_paths(params: Params, stage: str) -> list[tuple[str, Path, str]]:
    """(key, path, remedy) for each path of `params.yaml` that a stage reads and no stage makes."""
    if stage.startswith("ingest@"):
        name = stage.removeprefix("ingest@")
        remedy = f"`m3diff synthesize {name}`" if name in params.synthesize else "fetch the dataset or correct the path"
        remedy = f"`m3diff augment {name}`" if name in params.augment else remedy
        return [(f"ingest.datasets.{name}.root", params.ingest.datasets[name].root, remedy)]
    if stage.startswith("augment@"):
        name = stage.removeprefix("augment@")
        return [(f"augment.{name}.source.root", params.augment[name].source.root, "fetch the source, or make it first")]
    if stage == "convert":
        return [("convert.questions", params.convert.questions, "see profiles/questions.yaml")]
    if stage == "train":
        base = params.train.base
        command = f" (`hf download llava-hf/{base.name} --local-dir {base}`)" if base.name in LLAVA_BASES else ""
        fetch = f"fetch the base model{command} or correct the path"
        own = ("train.base", base / "config.json", "`make base`" if base == params.paths.base else fetch)
        return [own, *(("train.base", base / file, remedy) for file, remedy in base_files(params).items())]
    if stage == "evaluate" and params.compute.spice_dir is not None:
        return [
            (
                "compute.spice_dir",
                params.compute.spice_dir,
                "fetch the CoreNLP 3.6.0 jars, or write null; `m3diff score --check-spice` names all",
            )
        ]
    return []


def base_files(params: Params) -> Mapping[str, str]:
    """What the model that trains needs in the base's folder beside the base's own files, each with where it is from."""
    settings = params.models[params.train.model]
    needed = FAMILIES[settings.family].base_files
    return {} if needed is None else needed(settings, base_config(params.train.base))


def absent_paths(params: Params, *stages: str) -> list[tuple[str, Path, str]]:
    """What of `read_paths` of these stages is not there."""
    return [each for stage in stages for each in read_paths(params, stage) if not each[1].exists()]


def check_paths(params: Params, *stages: str) -> None:
    """See that what these stages read is there, before any of them starts. A dataset's ingest is `ingest@NAME`.

    Raises:
        ParamsError: names every path that is not there, with the key and the remedy.
    """
    absent = [f"  {key}: {path} is not there; {remedy}" for key, path, remedy in absent_paths(params, *stages)]
    if absent:
        raise ParamsError(f"{len(absent)} path(s) of the parameters are missing\n" + "\n".join(absent))
