"""Lines for pydantic's faults: the place as in the file, the rule and the value; of an unknown key, the nearest."""

import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from m3diff.settings.section import closest, shown


def explain(error: ValidationError, raw: Any, top: Any, place: str = "") -> list[str]:
    """A line for each of pydantic's faults: the place, the rule that is broken, the value found.

    Args:
        raw: the values that were validated as a `top`.
        place: of these values in the parameters.
    """
    lines = []
    for fault in error.errors():
        parts, types = _follow(fault["loc"], raw, top)
        words = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "missing":
            words = "missing; add it as in profiles/embedded.yaml"
        elif fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            words = (
                f"unknown key; {closest(fault['loc'][-1], {name for one in types for name in _fields(one)}, of='keys')}"
            )
        elif "found " not in words:
            words += f" (found {shown(fault['input'])})"
        lines.append(f"{'.'.join([place] * bool(place) + parts)}: {words}")
    return lines


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
