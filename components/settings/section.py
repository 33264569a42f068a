"""A section of `params.yaml`: typed and frozen to the bottom. Each stage folder holds its own in `params.py`."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

K = TypeVar("K")
V = TypeVar("V")
NUMBERS = (int, float, int | None, float | None)


class Section(BaseModel):
    """Fields of one section. Unknown keys are refused, nothing can be assigned, and true is no number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation in NUMBERS:
            raise ValueError("expected a number")
        return value


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


class ParamsError(ValueError):
    """Parameters cannot be used; the text lists every fault with its remedy."""
