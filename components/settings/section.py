"""The base class for the sections of `params.yaml`, and the faults of invalid values.

The section of a stage is defined in the stage's `params.py`. The docstring below a field is its description.
"""

import ast
import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Any, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError

from m3diff.records.errors import CodedError, Fault, ValueFault
from m3diff.records.errors import ParamsError as ParamsError  # re-exported for code that uses sections

# Keys of earlier releases, with the fault that says what replaces them
OLD_KEYS = {
    "references_per_pair": Fault("settings.renamed_key", name="references_per_question"),
    "all_ask_what_changed": Fault("settings.questions_are_read"),
}
NUMBER_TYPES = (int, float, int | None, float | None)


class Section(BaseModel):
    """Base class for parameter sections. Sections are frozen, and reject unknown keys, NaN and infinity.

    Number fields also reject booleans.

    Fields are described by docstrings instead of `Field(description=...)`. The digests of code ignore docstrings, so
    rewording a description does not rerun any stage. The docstrings are only parsed when descriptions or the JSON
    schema are requested. Pydantic's `use_attribute_docstrings` is not used, because it parses them when a class is
    created, which took 0.3 s at the start of every command.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    @cache  # a file of parameters needs them many times
    def field_descriptions(cls) -> dict[str, str]:
        """Return the descriptions of the fields by name, from the docstrings below them in this class and its bases."""
        descriptions: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            if not issubclass(base, Section):
                continue
            try:
                source = textwrap.dedent(inspect.getsource(base))
            except (OSError, TypeError):  # classes made by `create_model` do not have source code
                continue
            statements = ast.parse(source).body[0].body  # type: ignore[attr-defined]
            for statement, next_statement in pairwise(statements):
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    match next_statement:
                        case ast.Expr(value=ast.Constant(value=str(docstring))):
                            descriptions[statement.target.id] = inspect.cleandoc(docstring)
        return {name: descriptions[name] for name in cls.model_fields if name in descriptions}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return pydantic's JSON schema with the descriptions of the fields added."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, description in cls.field_descriptions().items():
            properties[cls.model_fields[name].alias or name]["description"] = description
        return schema

    @model_validator(mode="before")
    @classmethod
    def refuse_booleans_as_numbers(cls, values: Any) -> Any:
        """Reject booleans in number fields. Pydantic would read `true` as 1.

        Raises:
            ValidationError: a number field has a boolean value.
        """
        if not isinstance(values, Mapping):
            return values
        number_fields = [name for name, field in cls.model_fields.items() if field.annotation in NUMBER_TYPES]
        boolean_fields = [name for name in number_fields if isinstance(values.get(name), bool)]
        if boolean_fields:
            error = PydanticCustomError("number", "expected a number")
            faults = [InitErrorDetails(type=error, loc=(name,), input=values[name]) for name in boolean_fields]
            raise ValidationError.from_exception_data(cls.__name__, faults)
        return values


def name_validator(names: Collection[str]) -> AfterValidator:
    """Return a validator that accepts only the given names. Its error suggests the most similar name."""

    def require_known_name(name: str) -> str:
        if name not in names:
            raise ValueFault(unknown_name(name, names))
        return name

    return AfterValidator(require_known_name)


def unknown_name(name: Any, allowed_names: Iterable[str]) -> Fault:
    """Return the fault for a name that is not in `allowed_names`, with the fields from `fields_of_name`."""
    return Fault("settings.unknown_name", **fields_of_name(name, allowed_names))


def fields_of_name(name: Any, allowed_names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a fault about an unknown name.

    The fields are `value`, `found` (the value as written in the file), `names` (all allowed names), `nearest` (the most
    similar allowed name, or None) and `hint` (a fault that suggests the most similar name and lists all names).

    Args:
        name: the unknown name.
        allowed_names: the allowed names.
    """
    hint = suggest_name(name, allowed_names)
    return {"value": name, "found": as_yaml(name), "hint": hint, "nearest": None, **hint.fields}


def suggest_name(name: Any, allowed_names: Iterable[str]) -> Fault:
    """Return the hint for a message about an unknown name: the most similar name, if there is one, and all names.

    Args:
        name: the unknown name.
        allowed_names: the allowed names.
    """
    names = sorted(allowed_names)
    if not names:
        return Fault("settings.no_known_name", names=names)
    similar_names = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if similar_names:
        return Fault("settings.nearest_name", nearest=similar_names[0], names=names)
    return Fault("settings.known_names", names=names)


def as_yaml(value: Any) -> str:
    """Format a value as it is written in `params.yaml`."""
    if value is None or isinstance(value, bool):
        return yaml.safe_dump(value).split("\n")[0]
    return repr(value)


# Conversion of pydantic's errors to faults


def faults_of_validation_error(error: ValidationError, raw: Any, section: Any, key: str = "") -> list[Fault]:
    """Convert pydantic's error to faults that state the keys in the file, the broken rules and the values.

    The fault for an unknown key suggests the most similar key.

    Args:
        error: pydantic's error.
        raw: the validated values.
        section: the type against which the values were validated.
        key: key of these values in the parameters, or an empty string for all parameters.
    """
    faults = []
    for details in error.errors():
        if details["type"] == "default_factory_not_called":
            continue  # a default that depends on other values, which have faults of their own
        keys, known_keys = _keys_of_fault(details["loc"], raw, section)
        fault = _fault_of_value(details, keys, known_keys)
        all_keys = [key, *keys] if key else keys
        faults.append(prefix_key(".".join(all_keys), fault))
    return faults


def _fault_of_value(details: ErrorDetails, keys: list[str], known_keys: set[str]) -> Fault:
    """Convert an item of pydantic's error to a fault without a key.

    Args:
        details: pydantic's description of the error.
        keys: keys that lead to the value.
        known_keys: all keys of the section that contains the value.
    """
    rule = details["type"]
    if rule == "missing":
        return Fault("settings.missing_key")
    if rule in ("extra_forbidden", "unexpected_keyword_argument"):
        if keys[-1] in OLD_KEYS:
            return OLD_KEYS[keys[-1]]
        return Fault("settings.unknown_key", **fields_of_name(keys[-1], known_keys))
    error = details.get("ctx", {}).get("error")
    if isinstance(error, CodedError):
        return error.fault
    cause = details["msg"].removeprefix("Value error, ")
    if rule == "union_tag_invalid":  # pydantic's message names the value, and the input is the whole section
        return Fault("settings.broken_rule", rule=rule, cause=cause)
    value = details["input"]
    return Fault("settings.wrong_value", rule=rule, cause=cause, value=value, found=as_yaml(value))


def prefix_key(key: str, fault: Fault) -> Fault:
    """Return the fault with a key added in front of its key.

    This turns a key within a part of the parameters into a key within all parameters.

    Args:
        key: key of the part in the parameters, or an empty string for all parameters.
        fault: the fault.
    """
    inner_key = fault.fields.get("key", "")
    joined_key = ".".join(part for part in (key, inner_key) if part)
    fields = {**fault.fields, "key": joined_key} if joined_key else fault.fields
    return Fault(fault.code, **fields)


def _keys_of_fault(loc: tuple[Any, ...], raw: Any, section: Any) -> tuple[list[str], set[str]]:
    """Return the keys that lead to the invalid value, and all known keys of the section that contains it.

    The keys are a list such as [ingest, datasets, mine, root].

    For each choice in a union, pydantic's location also contains the value of `kind` or a word in brackets. These parts
    are skipped, because they are not keys in the file.
    """
    keys: list[str] = []
    candidates = [section]
    known_keys = set[str]()
    for step in loc:
        is_kind = len(candidates) > 1 and isinstance(raw, Mapping) and step == raw.get("kind")
        candidates = narrow_types(candidates, raw)
        if is_kind or str(step).startswith("["):
            continue
        keys.append(str(step))
        known_keys = set()
        types_of_value: list[Any] = []
        for candidate in candidates:
            fields = field_types(candidate)
            known_keys |= fields.keys()
            types_of_value += sections_in(fields.get(step))
        candidates = types_of_value or candidates
        has_value = (isinstance(raw, Mapping) and step in raw) or (isinstance(raw, list) and isinstance(step, int))
        raw = raw[step] if has_value else None
    return keys, known_keys


def narrow_types(candidates: list[Any], raw: Any) -> list[Any]:
    """Return the candidate types that match a value's `kind`, or all candidates if none matches.

    For an entry of `models`, the key `family` determines the type.
    """
    with suppress(ValidationError):
        candidates = [
            candidate.settings_class(raw) if hasattr(candidate, "settings_class") else candidate
            for candidate in candidates
        ]
    kind = raw.get("kind") if isinstance(raw, Mapping) else None
    matching_candidates = []
    for candidate in candidates:
        if kind in get_args(field_types(candidate).get("kind")):
            matching_candidates.append(candidate)
    return matching_candidates or candidates


def sections_in(annotation: Any) -> list[Any]:
    """Return the sections and dataclasses in an annotation such as `dict[str, Source]` or `MDPConfig | None`."""
    if field_types(annotation) or hasattr(annotation, "settings_class"):
        return [annotation]
    sections = []
    for argument in (*getattr(annotation, "__args__", ()), *getattr(annotation, "__metadata__", ())):
        sections += sections_in(argument)
    return sections


def field_types(section: Any) -> dict[str, Any]:
    """Return the annotations of the fields of a section or dataclass by key, or an empty mapping for any other type."""
    if not isinstance(section, type):
        return {}
    if issubclass(section, BaseModel):
        return {field.alias or name: field.annotation for name, field in section.model_fields.items()}
    if dataclasses.is_dataclass(section):
        return {field.name: field.type for field in dataclasses.fields(section)}
    return {}
