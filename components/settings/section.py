"""A section of `params.yaml`: typed and frozen, with lines for its faults. Each stage folder holds its own in
`params.py`."""

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

NUMBERS = (int, float, int | None, float | None)


class ParamsError(ValueError):
    """Parameters cannot be used; the text lists every fault with its remedy."""


class Section(BaseModel):
    """Base for parameter sections: forbids unknown keys, NaN and infinity, is frozen, and rejects booleans where a
    number is expected."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def true_is_no_number(cls, values: Any) -> Any:
        fields = {name: field.annotation for name, field in cls.model_fields.items() if isinstance(values, Mapping)}
        wrong = [name for name, kind in fields.items() if kind in NUMBERS and isinstance(values.get(name), bool)]
        if wrong:
            error = PydanticCustomError("number", "expected a number")
            faults = [InitErrorDetails(type=error, loc=(name,), input=values[name]) for name in wrong]
            raise ValidationError.from_exception_data(cls.__name__, faults)
        return values


def one_of(known: Collection[str]) -> AfterValidator:
    """Accepts a name of `known`; of any other, the fault names the nearest."""

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(closest(name, known))
        return name

    return AfterValidator(check)


def closest(found: Any, known: Iterable[str], of: str = "expected one of") -> str:
    """The nearest name that is allowed in place of `found`, where one is near, and all that are."""
    names = sorted(known)
    near = difflib.get_close_matches(str(found), names, n=1, cutoff=0.6)
    listed = ", ".join(names) or "none"
    words = f"known {of}: {listed}" if of == "keys" else f"{of} {listed} (found {shown(found)})"
    return f"did you mean {near[0]!r}? {words}" if near else words


def shown(value: Any) -> str:
    """A value as `params.yaml` has it."""
    return yaml.safe_dump(value).split("\n")[0] if value is None or isinstance(value, bool) else repr(value)


# Lines for pydantic's faults


def explain(error: ValidationError, raw: Any, top: Any, place: str = "") -> list[str]:
    """A line for each of pydantic's faults: the place as in the file, the rule that is broken, the value found; of an
    unknown key, the nearest.

    Args:
        raw: the values that were validated as a `top`.
        place: of these values in the parameters.
    """
    lines = []
    for fault in error.errors():
        parts, known = _follow(fault["loc"], raw, top)
        words = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "missing":
            words = "missing; add it as in profiles/embedded.yaml"
        elif fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            words = f"unknown key; {closest(parts[-1], known, of='keys')}"
        elif "found " not in words:
            words += f" (found {shown(fault['input'])})"
        lines.append(f"{'.'.join([place] * bool(place) + parts)}: {words}")
    return lines


def _follow(loc: tuple[Any, ...], raw: Any, top: Any) -> tuple[list[str], set[str]]:
    """The place of a fault as one writes it, `ingest.datasets.mine.root`, and the keys of the section around it.

    Pydantic's steps into a member of a union are no keys of the file: a tag, or a word in brackets.
    """
    place: list[str] = []
    types, known = [top], set[str]()
    for part in loc:
        tag = len(types) > 1 and isinstance(raw, Mapping) and part == raw.get("kind")
        types = _of_kind(types, raw)
        if tag or str(part).startswith("["):
            continue
        place.append(str(part))
        known = {name for one in types for name in _fields(one)}
        types = [inner for one in types for inner in _types_in(_fields(one).get(part))] or types
        found = isinstance(raw, Mapping) and part in raw or isinstance(raw, list) and isinstance(part, int)
        raw = raw[part] if found else None
    return place, known


def _of_kind(types: list[Any], raw: Any) -> list[Any]:
    """Those of the types that the value has by its `kind`, or, as an entry of `models`, by its family."""
    with suppress(ValidationError):
        types = [one.type_of(raw) if hasattr(one, "type_of") else one for one in types]
    kind = raw.get("kind") if isinstance(raw, Mapping) else None
    return [one for one in types if kind in get_args(_fields(one).get("kind"))] or types


def _types_in(annotation: Any) -> list[Any]:
    """Sections and dataclasses in an annotation such as `dict[str, Source]` or `MDPConfig | None`."""
    if _fields(annotation) or hasattr(annotation, "type_of"):
        return [annotation]
    parts = (*getattr(annotation, "__args__", ()), *getattr(annotation, "__metadata__", ()))
    return [inner for part in parts for inner in _types_in(part)]


def _fields(one: Any) -> dict[str, Any]:
    if not isinstance(one, type):
        return {}
    if issubclass(one, BaseModel):
        return {field.alias or name: field.annotation for name, field in one.model_fields.items()}
    return {field.name: field.type for field in dataclasses.fields(one)} if dataclasses.is_dataclass(one) else {}
