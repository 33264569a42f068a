"""Reads `params.yaml` into the type of `tree.py`, frozen at every depth.

Unknown keys are refused, and every fault is named at once, before anything runs. Fields carry the unit in their name or
in a comment. Each stage folder has its section in `params.py`. `rules.py` checks one section against another, and
`profiles.py` resolves a profile.
"""

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from m3diff.datasets import DATASETS
from m3diff.models import FAMILIES
from m3diff.settings.profiles import resolve, unusable_numbers
from m3diff.settings.rules import closest, inconsistencies, shown
from m3diff.settings.section import ParamsError, freeze
from m3diff.settings.tree import Params

Where = tuple[Any, ...]
Faults = dict[str, None]
"""Lines of a message, in order, each once."""

EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "dataclass": "a mapping",
    "mapping": "a mapping",
}
RENAMED = {
    "paths.minichange": "synthesize.minichange.root",
    "paths.raw": "ingest.datasets.<name>.root",
    "paths.captions": "paths.predictions",
    "paths.scratch": "compute.scratch",
    "validate.keep_leaks": "validate.allow_test_leakage",
    "validate.near_duplicate_levels": "validate.near_duplicate_max_diff",
    "validate.expected_pairs": "ingest.datasets.<name>.expected_pairs",
    "validate.image_memory": "",
    "convert.templates": "convert.questions",
    "convert.captions_per_pair": "convert.references_per_pair",
    "train.perception": "models.m3diff.module",
    "train.lora_rank": "models.m3diff.lora.rank",
    "train.lora_alpha": "models.m3diff.lora.alpha",
    "train.packing": "train.max_captions_per_sequence",
    "train.pack_k": "train.max_captions_per_sequence",
    "train.lr_tower": "models.m3diff.rates.vision",
    "train.lr": "models.m3diff.rates.projector and models.m3diff.rates.llm",
    "train.lr_perception": "models.m3diff.rates.module",
    "train.checkpointing": "compute.activation_checkpointing",
    "train.gpu_memory_gb": "compute.gpu_kind",
    "compute.gpu_memory_gb": "compute.gpu_kind",
    "train.micro_batch": "compute.micro_batch",
    "train.zero_stage": "compute.zero_stage",
    "train.workers": "compute.workers",
    "train.cpus_per_worker": "compute.cpus_per_worker",
    "train.gpu": "compute.gpu",
    "train.checkpoint_every_steps": "compute.checkpoint_every_steps",
    "train.max_failures": "compute.max_failures",
    "train.val_pairs": "compute.val_pairs",
    "evaluate.grammar": "",
    "evaluate.spice_dir": "compute.spice_dir",
    "evaluate.scorer_timeout_s": "compute.scorer_timeout_s",
    "register.gate_metric": "promote.metric",
    "register.min_gain": "promote.min_gain",
    "predict.control_pairs": "",
    "serve.batch_wait_s": "",
    "serve.poll_s": "",
    "serve.max_question_chars": "",
    "serve.upload_s": "",
    "serve.examples": "",
}
"""Keys of earlier versions and their present names; "" where nothing reads the value any more."""
OF_AN_EARLIER_VERSION = (
    "a file of an earlier version; `m3diff profile NAME` writes a current one and keeps a copy of yours"
)
LIMITS = {"ge": "{} or more", "gt": "more than {}", "le": "{} or less", "lt": "less than {}"}


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check a parameter file, or a profile with what it extends. Nothing is run and nothing heavy imported.

    Files and folders that a stage reads need not be there: `check_paths` looks for them when the stage starts.

    Raises:
        ParamsError: the file is missing, is no YAML mapping, or breaks a rule; every fault is listed.
    """
    faults: Faults = {}
    raw, duplicates = resolve(path)
    faults.update(dict.fromkeys(duplicates))
    faults.update(dict.fromkeys(unusable_numbers(raw)))
    raw = _typed_entries(raw, faults)
    params = _validate(raw, faults)
    faults.update(dict.fromkeys(inconsistencies(params, complete=not faults)))
    faults.update(dict.fromkeys(_untyped_options(params)))
    if faults:
        old = any(line.partition(":")[0] in RENAMED for line in faults)
        told = "\n".join(f"  {line}" for line in faults) + ("\n  " + OF_AN_EARLIER_VERSION) * old
        raise ParamsError(f"{path}: {len(faults)} fault(s)\n{told}")
    return params


def _validate(raw: Mapping[str, Any], faults: Faults) -> Params:
    """The parameters; after a fault, what of them is right."""
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        for fault in error.errors():
            infinite = isinstance(fault["input"], float) and not math.isfinite(fault["input"])
            if not infinite:  # `unusable_numbers` reports those
                faults[explain(fault)] = None
        return sound_part(Params, raw)


def sound_part(section: type[Any], raw: Any) -> Any:
    """The fields of a section, and of what lies below it, that are right. To read another raises AttributeError."""
    values: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        key = field.alias or name
        if isinstance(raw, Mapping) and key in raw:
            annotation: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            try:
                values[name] = TypeAdapter(annotation).validate_python(raw[key])
            except ValidationError:
                values.update(_sound_below(name, field.annotation, raw[key]))
    return section.model_construct(**values)


def _sound_below(name: str, annotation: Any, raw: Any) -> dict[str, Any]:
    if _is_section(annotation):
        return {name: sound_part(annotation, raw)}
    entry: Any = getattr(annotation, "__args__", (None,))[-1]
    if _is_section(entry) and isinstance(raw, Mapping):
        return {name: freeze({key: sound_part(entry, value) for key, value in raw.items()})}
    return {}


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _typed_entries(raw: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
    """`models` and `synthesize` with each entry as the type that its family or dataset names; None after a fault."""
    typed = dict(raw)
    for section, type_of in (("models", _settings_of_family), ("synthesize", _settings_of_generator)):
        entries = raw.get(section)
        if isinstance(entries, Mapping):
            typed[section] = {
                name: _typed(f"{section}.{name}", entry, type_of, raw, faults) for name, entry in entries.items()
            }
    return typed


def _typed(where: str, entry: Any, type_of: Any, raw: Mapping[str, Any], faults: Faults) -> Any:
    """One entry in its type; None after a fault."""
    if not isinstance(entry, Mapping):
        faults[f"{where}: expected a mapping (found {shown(entry)})"] = None
        return None
    settings = type_of(where, entry, raw)
    if isinstance(settings, str):
        faults[settings] = None
        return None
    try:
        return freeze(TypeAdapter(settings).validate_python(entry))
    except ValidationError as error:
        faults.update(dict.fromkeys(explain(fault, where, settings) for fault in error.errors()))
        return None


def _untyped_options(params: Params) -> Iterator[str]:
    """Options of readers that have not the type of their argument."""
    datasets = getattr(getattr(params, "ingest", None), "datasets", {})
    for name, entry in datasets.items():
        spec = DATASETS.get(getattr(entry, "reader", ""))
        arguments = inspect.signature(spec.read).parameters if spec else {}
        for option, value in getattr(entry, "options", {}).items():
            where = f"ingest.datasets.{name}.options.{option}"
            try:
                TypeAdapter(arguments[option].annotation if option in arguments else Any).validate_python(value)
            except ValidationError as error:
                yield from (explain(fault, where) for fault in error.errors())


def _settings_of_family(where: str, entry: Mapping[str, Any], raw: Mapping[str, Any]) -> type[Any] | str:
    """The type of a model's settings, or what is wrong."""
    if "family" not in entry:
        return f"{where}.family: missing; add one of {', '.join(FAMILIES)}"
    name = entry["family"]
    family = FAMILIES.get(name) if isinstance(name, str) else None
    return family.settings if family else f"{where}.family: {closest(name, FAMILIES)}"


def _settings_of_generator(where: str, entry: Mapping[str, Any], raw: Mapping[str, Any]) -> type[Any] | str:
    """The type of a generator's settings, or what is wrong."""
    name = where.removeprefix("synthesize.")
    dataset = _below(_below(raw.get("ingest"), "datasets"), name)
    if dataset is None:
        return f"{where}: no dataset of `ingest.datasets` has this name; remove the entry or ingest the dataset"
    reader = _below(dataset, "reader")
    spec = DATASETS.get(reader) if isinstance(reader, str) else None
    if spec is None:
        return f"{where}: its dataset has no known reader, so nothing makes it; correct ingest.datasets.{name}.reader"
    if spec.generate is None:
        able = ", ".join(known for known, other in DATASETS.items() if other.generate)
        return f"{where}: the reader {reader!r} cannot make its dataset (only {able}); remove the entry"
    return spec.generate.settings


def _below(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None


def place(loc: Where) -> str:
    """Where a fault is, as one writes it: `ingest.datasets.mine.root`. Pydantic's steps in brackets are left out."""
    return ".".join(str(part) for part in loc if "[" not in str(part))


def explain(fault: Any, below: str = "", top: Any = Params) -> str:
    """One line for one of pydantic's faults: where, what is expected, the value found."""
    loc = place(fault["loc"])
    where = ".".join(part for part in (below, loc) if part)
    kind = fault["type"]
    if kind == "missing":
        return f"{where}: missing; add it as in profiles/embedded.yaml"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        if where in RENAMED:
            new = RENAMED[where]
            return f"{where}: unknown key; " + (f"it is {new} now" if new else "nothing reads it any more, remove it")
        known = known_keys(top, fault["loc"][:-1])
        return f"{where}: unknown key; {closest(fault['loc'][-1], known, of='keys')}"
    expected = _expectation(fault)
    return f"{where}: {expected}" + ("" if ", found " in expected else f" (found {shown(fault['input'])})")


def _expectation(fault: Any) -> str:
    """What a value of this place must be, in plain words."""
    kind, context = fault["type"], fault.get("ctx", {})
    for limit, words in LIMITS.items():
        if limit in context:
            return f"must be {words.format(format(context[limit], 'g'))}"
    if kind in ("too_short", "string_too_short"):
        return "must not be empty"
    if kind == "string_too_long":
        return f"must have {context['max_length']} characters or fewer"
    if kind == "literal_error":
        return f"expected {context['expected']}"
    if kind == "value_error":
        return str(context["error"])
    expected = EXPECTED.get(kind.split("_")[0])
    return f"expected {expected}" if expected else fault["msg"]


def known_keys(top: Any, loc: Where) -> list[str]:
    """The keys that may stand at a place of a section or dataclass."""
    for part in loc:
        top = _fields(_entry_type(top)).get(part) or _of_union(top, part)
    return list(_fields(_entry_type(top)))


def _fields(top: Any) -> dict[str, Any]:
    if _is_section(top):
        return {field.alias or name: field.annotation for name, field in top.model_fields.items()}
    return {field.name: field.type for field in dataclasses.fields(top)} if dataclasses.is_dataclass(top) else {}


def _of_union(annotation: Any, step: Any) -> Any:
    """The type of a union that one of pydantic's steps in brackets names; else the annotation."""
    if f"[{getattr(annotation, '__name__', None)}]" == step:
        return annotation
    inside = [_of_union(part, step) for part in getattr(annotation, "__args__", ())]
    return next((part for part in inside if f"[{getattr(part, '__name__', None)}]" == step), annotation)


def _entry_type(annotation: Any) -> Any:
    """The section or dataclass in an annotation such as `dict[str, Source]` or `MDPConfig | None`."""
    inside = [part for part in getattr(annotation, "__args__", ()) if part not in (str, type(None))]
    return _entry_type(inside[-1]) if inside else annotation
