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
    missing_members = {
        type(processor): missing_members_of(processor, Processor),
        type(model): missing_members_of(model, Model),
        type(model.config): missing_members_of(model.config, ModelConfig),
    }
    for class_, names in missing_members.items():
        if names:
            raise ParamsError("models.member_missing", family=family, value=class_.__name__, names=names)
    arguments = missing_arguments(model.forward)
    if arguments:
        raise ParamsError("models.argument_missing", family=family, value=type(model).__name__, names=arguments)


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
