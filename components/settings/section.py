"""A section of `params.yaml`: typed and frozen to the bottom. Each stage folder holds its own in `params.py`."""

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, NoReturn, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

K = TypeVar("K")
V = TypeVar("V")
NUMBERS = (int, float, int | None, float | None)


class ParamsError(ValueError):
    """Parameters cannot be used; the text lists every fault with its remedy."""


class Section(BaseModel):
    """Base for parameter sections: forbids unknown keys, is frozen, and rejects booleans where a number is expected."""

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


class FrozenDict(dict[K, V]):
    """A dictionary that cannot be changed, and that can be sent to another process."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("parameters are frozen: change params.yaml and load it again")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[type, tuple[dict[K, V]]]:
        return FrozenDict, (dict(self),)

    def __copy__(self) -> "FrozenDict[K, V]":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenDict[K, V]":
        return self


def freeze(value: Any) -> Any:
    """Mappings and lists, at every depth and in the fields of dataclasses, as frozen dictionaries and tuples."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: freeze(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **fields)
    if isinstance(value, Mapping):
        return FrozenDict({key: freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value


FrozenMap = Annotated[dict[K, V], AfterValidator(freeze)]
"""A mapping field of a section."""


def shown(value: Any) -> str:
    """A value as `params.yaml` has it."""
    return yaml.safe_dump(value).split("\n")[0] if value is None or isinstance(value, bool) else repr(value)


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
