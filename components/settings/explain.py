"""Words for pydantic's faults: a line each, with the place, what is expected there, and the value found."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from m3diff.settings.section import closest, shown

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
LIMITS = {"ge": "{} or more", "gt": "more than {}", "le": "{} or less", "lt": "less than {}"}


def explain(error: ValidationError, raw: Any, top: Any, place: str = "") -> list[str]:
    """A line for each of pydantic's faults: the place, what is expected there, the value found.

    Args:
        raw: the values that were validated as a `top`.
        place: of these values in the parameters.
    """
    lines = []
    for fault in error.errors():
        kind, value = fault["type"], fault["input"]
        parts, types = _follow(fault["loc"], raw, top)
        where = ".".join([place] * bool(place) + parts)
        if isinstance(value, float) and not math.isfinite(value):
            continue  # `load_params` names every such number
        if kind == "missing":
            lines.append(f"{where}: missing; add it as in profiles/embedded.yaml")
        elif kind in ("extra_forbidden", "unexpected_keyword_argument"):
            known = closest(fault["loc"][-1], {name for one in types for name in _fields(one)}, of="keys")
            if where in RENAMED:
                known = f"it is {RENAMED[where]} now" if RENAMED[where] else "nothing reads it any more, remove it"
            lines.append(f"{where}: unknown key; {known}")
        else:
            words = _expected(kind, fault.get("ctx", {}), types) or fault["msg"]
            lines.append(f"{where}: {words}" + ("" if "found " in words else f" (found {shown(value)})"))
    return lines


def _expected(kind: str, context: Mapping[str, Any], types: list[Any]) -> str | None:
    """The rule that a value breaks, in plain words; None where only pydantic has words for it."""
    for limit, words in LIMITS.items():
        if limit in context:
            return f"must be {words.format(format(context[limit], 'g'))}"
    if kind.startswith("union_tag"):
        key = context["discriminator"].strip("'")
        return f"{key}: {closest(context.get('tag'), {tag for one in types for tag in _tags(one)})}"
    of_kind = {
        "too_short": "must not be empty",
        "string_too_short": "must not be empty",
        "string_too_long": f"must have {context.get('max_length')} characters or fewer",
        "literal_error": f"expected {context.get('expected')}",
        "value_error": str(context.get("error")),
    }
    type_ = EXPECTED.get(kind.split("_")[0])
    return of_kind.get(kind) or (f"expected {type_}" if type_ else None)


def _follow(loc: tuple[Any, ...], raw: Any, top: Any) -> tuple[list[str], list[Any]]:
    """The place of a fault as one writes it, `ingest.datasets.mine.root`, and the types that the place, or the section
    around it, may have.

    Pydantic's steps into a member of a union are no keys of the file: a tag, or a word in brackets.
    """
    place, types = [], [top]
    for part in loc:
        types = [_by_family(one, raw) for one in types]
        tag = isinstance(raw, Mapping) and len(types) > 1 and part in (raw.get("kind"), raw.get("family"))
        if tag or str(part).startswith("["):
            types = [one for one in types if part in (*_tags(one), f"[{getattr(one, '__name__', None)}]")] or types
        else:
            place.append(str(part))
            types = [inner for one in types for inner in _types_in(_fields(one).get(part))] or types
            found = isinstance(raw, Mapping) and part in raw or isinstance(raw, list) and isinstance(part, int)
            raw = raw[part] if found else None
    return place, types


def _by_family(one: Any, entry: Any) -> Any:
    """The type that an entry of `models` has by its family (`tree.TypedByFamily`); any other type as it is."""
    try:
        return one.type_of(entry) if hasattr(one, "type_of") else one
    except ValidationError:
        return one


def _fields(one: Any) -> dict[str, Any]:
    """Keys of a section or dataclass, with their annotations."""
    if not isinstance(one, type):
        return {}
    if issubclass(one, BaseModel):
        return {field.alias or name: field.annotation for name, field in one.model_fields.items()}
    return {field.name: field.type for field in dataclasses.fields(one)} if dataclasses.is_dataclass(one) else {}


def _tags(one: Any) -> tuple[Any, ...]:
    """The values by which a member of a union differs from the others."""
    return tuple(tag for key in ("kind", "family") for tag in get_args(_fields(one).get(key)))


def _types_in(annotation: Any) -> list[Any]:
    """Sections and dataclasses in an annotation such as `dict[str, Source]` or `MDPConfig | None`."""
    if _fields(annotation) or hasattr(annotation, "type_of"):
        return [annotation]
    parts = (*getattr(annotation, "__args__", ()), *getattr(annotation, "__metadata__", ()))
    return [inner for part in parts for inner in _types_in(part)]
