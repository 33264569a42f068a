"""Check combinations of values in `params.yaml`, and names of datasets, model families, metrics and tasks.

Each rule is a function that yields faults, with the keys where they occur. All individual values must already be valid.
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
from m3diff.datasets.pairs import fault_of_drawn_split
from m3diff.models import FAMILIES
from m3diff.records.errors import Fault, shell_word
from m3diff.records.schemas import RETENTION
from m3diff.scoring.metrics import METRICS, add_character_variants, choose_metrics, gate_scores
from m3diff.scoring.protocols import list_protocols
from m3diff.settings.section import ParamsError, Section, faults_of_validation_error, fields_of_name, prefix_key
from m3diff.settings.tree import Params
from m3diff.stages.ingest.params import HOW_TO_TEST, DatasetEntry


def check_datasets(params: Params) -> Iterator[Fault]:
    """Check each dataset: reader options, splits used for training, published counts, and questions for its task."""
    questions = read_mapping(params.convert.questions, yaml.safe_load)  # questions by task
    for name, entry in params.ingest.datasets.items():
        key = f"ingest.datasets.{name}"
        spec = DATASETS[entry.reader]
        yield from faults_of_options(key, entry.reader, entry.options)
        yield from faults_of_drawn_split(key, entry.options)
        original = DATASETS[original_reader(params, name)]
        forbidden_splits = [split for split in entry.train_on if split in original.never_train]
        if forbidden_splits:
            yield Fault(
                "settings.split_never_trains",
                key=f"{key}.train_on",
                dataset=original.title,
                names=forbidden_splits,
            )
        if entry.expected_pairs == "published" and spec.part(name) is None:
            part_names = [part.part for part in spec.published]
            counts_key = f"{key}.expected_pairs"
            if part_names:
                yield Fault("settings.counts_of_other_names", key=counts_key, value=name, names=part_names)
            else:
                yield Fault("settings.no_published_counts", key=counts_key, value=name)
        if questions is not None:
            yield from _faults_of_task(params, name, questions)
    for name in params.convert.sources:
        if name not in params.ingest.datasets:
            hint = fields_of_name(name, params.ingest.datasets)
            yield Fault("settings.unknown_dataset", key=f"convert.sources.{name}", **hint)


def _faults_of_task(params: Params, name: str, questions: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault if there are no questions for the task of a dataset."""
    source = params.convert.sources.get(name)
    file = params.convert.questions
    reader_task = DATASETS[params.ingest.datasets[name].reader].task
    if source is not None and (source.task is not None or source.couple):
        task = source.task_for(reader_task)
        if task not in questions:
            key = f"convert.sources.{name}.{'couple' if source.task is None else 'task'}"
            yield Fault("settings.task_without_questions", key=key, path=file, **fields_of_name(task, questions))
    elif reader_task not in questions:
        yield Fault(
            "settings.reader_without_questions",
            key=f"ingest.datasets.{name}.reader",
            path=file,
            dataset=name,
            **fields_of_name(reader_task, questions),
        )


def read_mapping(file: Path, parse: Callable[[str], Any]) -> dict[str, Any] | None:
    """Return the mapping in a file, or None if the file is missing or invalid.

    Missing and invalid files are not reported here, but by the stage that reads them.
    """
    try:
        content = parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return content if isinstance(content, dict) else None


def faults_of_drawn_split(key: str, options: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault if the options both name the splits and draw them at random, which the reader rejects.

    Args:
        key: key of the dataset in the parameters.
        options: options of the dataset.
    """
    if not isinstance(options.get("split"), Mapping):
        return
    columns = options.get("columns")
    if not isinstance(columns, Mapping):
        columns = {}
    fault = fault_of_drawn_split(options.get("manifest"), columns, options.get("splits"))
    if fault is not None:
        yield prefix_key(f"{key}.options", fault)


def faults_of_options(key: str, reader: str, options: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield the faults in the options of a reader, which are the arguments of its function after `root`.

    Args:
        key: key of the dataset in the parameters.
        reader: name of the reader.
        options: options of the dataset.
    """
    arguments = list(inspect.signature(DATASETS[reader].read).parameters.values())[1:]
    fields: dict[str, Any] = {argument.name: (argument.annotation, argument.default) for argument in arguments}
    options_class = create_model("Options", __base__=Section, **fields)
    try:
        options_class.model_validate(options)
    except ValidationError as error:
        yield from faults_of_validation_error(error, options, options_class, f"{key}.options")


def original_reader(params: Params, name: str) -> str:
    """Return the reader whose licence and authors' requests apply to a dataset.

    For synthetic data, this is the reader of the original dataset that the data was made from, directly or indirectly.
    """
    source_by_root = {Path(os.path.abspath(entry.root)): entry.source for entry in params.augment.values()}
    dataset: Any = params.ingest.datasets[name]
    # the number of steps is limited, because entries may be made from each other in a circle
    for _ in range(len(source_by_root) + 1):
        source = source_by_root.get(Path(os.path.abspath(dataset.root)))
        if dataset.reader != "pairs" or source is None:
            break
        dataset = source
    return dataset.reader


def entries_by_original_reader(params: Params) -> dict[str, DatasetEntry]:
    """Return the datasets of the run, with each reader replaced by the `original_reader`.

    Licence checks use these entries before data is shared.
    """
    entries = {}
    for name, entry in params.ingest.datasets.items():
        entries[name] = entry.model_copy(update={"reader": original_reader(params, name)})
    return entries


def check_generators(params: Params) -> Iterator[Fault]:
    """Check that generated datasets are ingested from the folders that they are written to.

    Their readers must be able to generate datasets.
    """
    for name, settings in params.synthesize.items():
        entry = params.ingest.datasets.get(name)
        if entry is None:
            yield Fault("settings.entry_not_ingested", key=f"synthesize.{name}")
        elif DATASETS[entry.reader].generate is None:
            yield Fault(
                "settings.reader_cannot_generate",
                key=f"synthesize.{name}",
                value=entry.reader,
                names=[reader for reader, spec in DATASETS.items() if spec.generate],
                dataset=name,
            )
        elif settings.root != entry.root:
            root_key = f"synthesize.{name}.root"
            yield Fault("settings.generated_elsewhere", key=root_key, value=settings.root, expected=entry.root)


def check_synthetic_datasets(params: Params) -> Iterator[Fault]:
    """Check that synthetic datasets are ingested as they are written, and that their sources are valid."""
    for name, entry in params.augment.items():
        key = f"augment.{name}"
        ingested_entry = params.ingest.datasets.get(name)
        if ingested_entry is None:
            yield Fault("settings.entry_not_ingested", key=key)
        else:
            reads_manifest = ingested_entry.options.get("manifest") == entry.manifest
            is_same_folder = ingested_entry.root == entry.root
            if ingested_entry.reader != "pairs" or not reads_manifest or not is_same_folder:
                yield Fault(
                    "settings.other_dataset_ingested",
                    key=key,
                    dataset=name,
                    root=entry.root,
                    manifest=entry.manifest,
                )
        yield from faults_of_options(f"{key}.source", entry.source.reader, entry.source.options)
        if entry.kind == "edits" and entry.editor.kind == "drawn" and entry.source.reader != "minichange":
            yield Fault("settings.drawn_editor_of_pictures", key=f"{key}.editor.kind", reader=entry.source.reader)
        yield from _overlaps_with_inputs(params, name)


def _overlaps_with_inputs(params: Params, name: str) -> Iterator[Fault]:
    """Yield a fault for each input of an `augment` entry that overlaps with the output folder of the entry `name`.

    The output folder, `root`, is overwritten, and DVC removes it before the stage can check it. An overlap is only
    allowed if another entry reads the synthetic data in this folder as its source.
    """
    entry = params.augment[name]
    root = Path(os.path.realpath(entry.root))
    for other_name, other_entry in params.augment.items():
        inputs = {"source": other_entry.source.root}
        for part in ("editor", "features"):
            model = getattr(getattr(other_entry, part, None), "model", None)
            if model is not None:
                inputs["model"] = model
        for kind, path in inputs.items():
            folder = Path(os.path.realpath(path))
            if not (folder.is_relative_to(root) or root.is_relative_to(folder)):
                continue
            reads_manifest = other_entry.source.options.get("manifest") == entry.manifest
            is_made_from_it = other_name != name and folder == root and reads_manifest
            if kind == "source" and is_made_from_it:
                continue
            yield Fault(
                "settings.made_over_an_input",
                key=f"augment.{name}.root",
                value=entry.root,
                kind=kind,
                reading=f"augment.{other_name}",
                input=path,
            )


def check_folders(params: Params) -> Iterator[Fault]:
    """Check that the roots of datasets and the folders that stages write do not overlap.

    Two datasets may have the same root if their readers or the options of the reader differ, because a folder may
    contain several annotations of the same images.
    """
    entries = {f"ingest.datasets.{name}.root": entry for name, entry in params.ingest.datasets.items()}
    folders = {key: entry.root for key, entry in entries.items()}
    folders |= {f"paths.{name}": folder for name, folder in params.paths}
    folders["compute.scratch"] = params.compute.scratch
    for (first_key, first_folder), (second_key, second_folder) in combinations(folders.items(), 2):
        first_path = Path(os.path.abspath(first_folder))
        second_path = Path(os.path.abspath(second_folder))
        are_datasets = first_key in entries and second_key in entries
        if first_path == second_path and are_datasets and not _reads_the_same(entries[first_key], entries[second_key]):
            continue
        if first_path.is_relative_to(second_path) or second_path.is_relative_to(first_path):
            yield Fault(
                "settings.overlapping_folders",
                key=second_key,
                value=second_folder,
                other_key=first_key,
                other_folder=first_folder,
            )


def _reads_the_same(entry: DatasetEntry, other_entry: DatasetEntry) -> bool:
    """Return whether two datasets with the same root contain the same rows."""
    return entry.reader == other_entry.reader and entry.options == other_entry.options


def check_models(params: Params) -> Iterator[Fault]:
    """Check that all entries in `models` are valid.

    The entry that `train.model` names must exist. If the base model exists, the entry must fit the base model.
    Activation checkpointing must be possible for its family.
    """
    trained_model = params.train.model
    if trained_model not in params.models:
        yield Fault("settings.unknown_model", key="train.model", **fields_of_name(trained_model, params.models))
    trained_base = read_mapping(params.train.base / "config.json", json.loads)
    for name, settings in params.models.items():
        base_config = trained_base if name == trained_model else None
        for fault in FAMILIES[settings.family].faults(settings, base_config):
            yield prefix_key(f"models.{name}", fault)
    checkpointing = params.compute.activation_checkpointing
    family = params.models[trained_model].family if trained_model in params.models else None
    if family is not None and checkpointing != "none" and not FAMILIES[family].recomputes_activations:
        yield Fault(
            "settings.cannot_recompute_activations",
            key="compute.activation_checkpointing",
            value=checkpointing,
            family=family,
        )


def check_training(params: Params) -> Iterator[Fault]:
    """Check batch sizes, the datasets of the alignment and the choice of the best checkpoint.

    Batches must be divisible among workers. The alignment, the training phase before fine-tuning, must not use all
    datasets. The best checkpoint can only be determined if validation pairs are captioned.
    """
    settings = params.models.get(params.train.model)
    align = None if settings is None else settings.align
    batches = {"train": params.train.global_batch}
    if align is not None:
        align_key = f"models.{params.train.model}.align"
        batches[align_key] = align.global_batch
        yield from _faults_of_alignment(params, align_key, align.datasets)
    micro_batch = params.compute.micro_batch
    workers = max(params.compute.workers, 1)
    for key, batch in batches.items():
        if batch % (micro_batch * workers):
            yield Fault(
                "settings.indivisible_batch",
                key=f"{key}.global_batch",
                value=batch,
                micro_batch=micro_batch,
                workers=workers,
                divisor=micro_batch * workers,
            )
    if params.train.export == "best":
        yield from _faults_of_best_checkpoint(params)


def _faults_of_alignment(params: Params, key: str, datasets_of_alignment: tuple[str, ...]) -> Iterator[Fault]:
    training_datasets = [name for name, entry in params.ingest.datasets.items() if entry.train_on]
    for name in datasets_of_alignment:
        if name not in training_datasets:
            hint = fields_of_name(name, training_datasets)
            yield Fault("settings.untrained_dataset_in_alignment", key=f"{key}.datasets", **hint)
    if training_datasets and set(training_datasets) <= set(datasets_of_alignment):
        yield Fault("settings.nothing_left_to_fine_tune", key=f"{key}.datasets", names=training_datasets)


def _faults_of_best_checkpoint(params: Params) -> Iterator[Fault]:
    if params.compute.caption_val_pairs == 0:
        yield Fault("settings.best_without_captions", key="train.export")
    # the val split of a retention dataset is not used
    task_datasets = [entry for entry in params.ingest.datasets.values() if entry.role == "task"]
    if all("val" in entry.train_on for entry in task_datasets):
        yield Fault("settings.best_without_validation_pairs", key="train.export")


def check_gate_scores(params: Params) -> Iterator[Fault]:
    """Check that the gate uses a protocol of the run, and that the run computes the scores that the gate compares."""
    gate = params.promote
    spec_by_protocol = {}
    own_metrics = {}
    task_datasets = {name: entry for name, entry in params.ingest.datasets.items() if entry.role == "task"}
    for name, entry in task_datasets.items():
        for protocol in list_protocols(name, DATASETS[entry.reader]):
            spec_by_protocol[f"{name}/{protocol.name}"] = DATASETS[entry.reader]
            own_metrics[f"{name}/{protocol.name}"] = protocol.metrics
    gate_dataset = params.ingest.datasets.get(gate.protocol.partition("/")[0])
    if gate_dataset is not None and gate_dataset.role == RETENTION:
        yield Fault("settings.gate_on_retention", key="promote.protocol", value=gate.protocol)
        return
    if gate.protocol not in spec_by_protocol:
        hint = fields_of_name(gate.protocol, spec_by_protocol)
        yield Fault("settings.unknown_protocol", key="promote.protocol", **hint)
        return
    shared_metrics = [name for name in params.evaluate.metrics if not METRICS[name].protocol_only]
    metrics = (*shared_metrics, *own_metrics[gate.protocol])
    reason = Fault("settings.metrics_decide")
    if spec_by_protocol[gate.protocol].grammar is None:
        metrics = tuple(name for name in metrics if not METRICS[name].needs_grammar)
        reason = Fault("settings.metrics_and_grammar_decide", protocol=gate.protocol)
    accepted_scores = gate_scores(metrics)
    if gate.metric not in accepted_scores:
        hint = fields_of_name(gate.metric, accepted_scores)
        yield Fault("settings.uncomputed_metric", key="promote.metric", reason=reason, **hint)
    guard_scores: list[str] = []
    for metric in add_character_variants(choose_metrics(metrics)).values():
        guard_scores += metric.resampled
    for name in gate.guards:
        if name not in guard_scores:
            hint = fields_of_name(name, guard_scores)
            yield Fault("settings.uncomputed_guard", key=f"promote.guards.{name}", reason=reason, **hint)
    yield from _faults_of_retention(params, task_datasets)


def _faults_of_retention(params: Params, task_datasets: Mapping[str, DatasetEntry]) -> Iterator[Fault]:
    """Yield a fault for each score in `promote.retention` that the run does not compute, or cannot compare at all."""
    gate = params.promote
    if not gate.retention:
        return
    if len(task_datasets) == len(params.ingest.datasets):
        yield Fault("settings.no_retention_set", key="promote.retention")
    scores: list[str] = []
    for metric in add_character_variants(choose_metrics(params.evaluate.metrics)).values():
        if not metric.needs_grammar:
            scores += metric.resampled
    for name in gate.retention:
        if name not in scores:
            hint = fields_of_name(name, scores)
            yield Fault("settings.uncomputed_retention_score", key=f"promote.retention.{name}", **hint)


def check_evaluation_pairs(params: Params) -> Iterator[Fault]:
    """Check that the gate's dataset can have test pairs, as far as the parameters can tell. The files are not read."""
    gate = params.promote.protocol
    name = gate.partition("/")[0]
    entry = params.ingest.datasets.get(name)
    if entry is None:
        return  # `check_gate_scores` reports this fault
    options = entry.options
    manifest = options.get("manifest")
    generator = params.synthesize.get(name)
    if options.get("split") in ("train", "val"):
        key = f"ingest.datasets.{name}.options.split"
        split = options["split"]
        yield Fault("settings.no_split_of_test_pairs", key=key, value=split, protocol=gate, hint=HOW_TO_TEST)
    elif isinstance(manifest, Mapping) and "test" not in manifest:
        key = f"ingest.datasets.{name}.options.manifest"
        yield Fault("settings.no_file_of_test_pairs", key=key, protocol=gate, hint=HOW_TO_TEST)
    elif generator is not None and generator.scenes.get("test") == 0:
        yield Fault("settings.no_test_scenes", key=f"synthesize.{name}.scenes.test", protocol=gate)


PARAMS_RULES = (
    check_folders,
    check_generators,
    check_synthetic_datasets,
    check_datasets,
    check_models,
    check_training,
    check_gate_scores,
    check_evaluation_pairs,
)


def faults_of_inputs(params: Params, stage: str) -> list[Fault]:
    """Return the fault to report for each input path of a stage, if this path does not exist before the run.

    This function does not check the paths. Each fault has the path in its field `path` and the key in the parameters in
    its field `key`, and most faults have a remedy. For a base model, the paths are files in its folder.

    Args:
        params: all parameters.
        stage: name of the stage, such as `train`, or `ingest@NAME` for a stage that runs once per dataset.
    """
    kind, _, name = stage.partition("@")
    if kind == "ingest":
        return [_fault_of_dataset(params, name)]
    if kind == "augment":
        return [Fault("settings.no_source", key=f"augment.{name}.source.root", path=params.augment[name].source.root)]
    if kind == "convert":
        return [Fault("settings.no_questions", key="convert.questions", path=params.convert.questions)]
    if kind == "train":
        return _faults_of_base(params)
    if kind == "evaluate" and params.compute.spice_dir is not None:
        return [Fault("settings.no_spice", key="compute.spice_dir", path=params.compute.spice_dir)]
    return []


def _fault_of_dataset(params: Params, name: str) -> Fault:
    key = f"ingest.datasets.{name}.root"
    root = params.ingest.datasets[name].root
    if name in params.augment:
        return Fault("settings.dataset_not_made", key=key, path=root, command=f"m3diff augment {name}")
    if name in params.synthesize:
        return Fault("settings.dataset_not_made", key=key, path=root, command=f"m3diff synthesize {name}")
    return Fault("settings.no_dataset", key=key, path=root)


def _faults_of_base(params: Params) -> list[Fault]:
    base = params.train.base
    settings = params.models[params.train.model]
    config = base / "config.json"
    if base == params.paths.base:
        faults = [Fault("settings.base_not_made", key="train.base", path=config)]
    else:
        command = f"hf download OWNER/{shell_word(base.name)} --local-dir {shell_word(base)}"
        faults = [Fault("settings.no_base", key="train.base", path=config, command=command)]
    other_files = FAMILIES[settings.family].base_files
    if other_files is not None:
        for file, hint in other_files(settings, read_mapping(config, json.loads)).items():
            faults.append(Fault("settings.incomplete_base", key="train.base", path=base / file, hint=hint))
    return faults


def missing_inputs(params: Params, *stages: str) -> list[Fault]:
    """Return the faults for all input paths of these stages that do not exist. See `faults_of_inputs`."""
    faults: list[Fault] = []
    for stage in stages:
        faults += faults_of_inputs(params, stage)
    return [fault for fault in faults if not fault.fields["path"].exists()]


def check_paths(params: Params, *stages: str) -> None:
    """Check that all input paths of these stages exist, before any stage starts.

    Args:
        params: all parameters.
        stages: names of the stages, such as `train`, or `ingest@NAME` for a stage that runs once per dataset.

    Raises:
        ParamsError: a path does not exist. The field `faults` has one fault per missing path, with its key and remedy.
    """
    faults = missing_inputs(params, *stages)
    if faults:
        raise ParamsError("settings.missing_paths", count=len(faults), faults=faults)
