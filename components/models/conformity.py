"""Check that the classes of a family have all members that the rest of the project uses.

A missing member would otherwise end a run only when it is used, for example `generation_config` at the export.
"""

import inspect
from typing import Any

from m3diff.models.contract import FORWARD_ARGUMENTS, Model, ModelConfig, Processor
from m3diff.records.errors import ParamsError


def check_family(family: str, model: Any, processor: Any) -> None:
    """Check a model, its configuration and its processor. This is cheap enough to do before each training.

    Args:
        family: name of the family.
        model: the model, without peft's wrapper.
        processor: processor of the model.

    Raises:
        ParamsError: a member is missing, or the model's `forward` does not take an argument.
    """
    check_processor(family, processor)
    require_members(family, model, Model)
    require_members(family, model.config, ModelConfig)
    arguments = missing_arguments(model.forward)
    if arguments:
        raise ParamsError("models.argument_missing", family=family, value=type(model).__name__, names=arguments)


def check_processor(family: str, processor: Any) -> None:
    """Check a processor. See `check_family`."""
    require_members(family, processor, Processor)


def require_members(family: str, instance: Any, protocol: type) -> None:
    """Raise ParamsError if an object lacks a member of a protocol."""
    names = missing_members_of(instance, protocol)
    if names:
        raise ParamsError("models.member_missing", family=family, value=type(instance).__name__, names=names)


def missing_members_of(instance: Any, protocol: type) -> list[str]:
    """Return the names of the members of a protocol that an object does not have."""
    names = [*protocol.__annotations__, *vars(protocol)]
    return [name for name in names if not name.startswith("_") and not hasattr(instance, name)]


def missing_arguments(forward: Any) -> list[str]:
    """Return the FORWARD_ARGUMENTS that a function cannot be called with."""
    parameters = inspect.signature(forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [name for name in FORWARD_ARGUMENTS if name not in parameters]
