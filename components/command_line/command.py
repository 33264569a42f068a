"""Define the classes that describe a command: its arguments, its help, and the function that it runs."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, Literal


class Group(Enum):
    """Groups of commands, in the order of the command list. The value is the heading."""

    STAGES = "stages, in order"
    SCORING = "data and scoring"
    USE = "use and share"
    REGISTRY = "model registry"
    SET_UP = "set-up"


@dataclass(frozen=True)
class Argument:
    """An argument of a command.

    Attributes:
        names: names in the form that argparse expects: `("--out",)`, or `("out",)` for a positional argument.
        options: keyword arguments for argparse's `add_argument`.
        choices: function that returns the allowed words; None allows any word. It is only called if the command is
            used, so other commands do not import the list. The words replace `{choices}` in the help.
    """

    names: tuple[str, ...]
    options: Mapping[str, Any]
    choices: Callable[[], Iterable[str]] | None = None


def argument(*names: str, choices: Callable[[], Iterable[str]] | None = None, **options: Any) -> Argument:
    """Create an argument with the given names. `options` are keyword arguments for argparse's `add_argument`."""
    return Argument(names=names, options=options, choices=choices)


def flag(name: str, help_text: str) -> Argument:
    """Create an option without a value. It is True if it is typed, and False otherwise."""
    return argument(name, action="store_true", help=help_text)


@dataclass(frozen=True)
class Command:
    """A command of `m3diff`. Its name and summary are in `COMMANDS` in `m3diff.__main__`.

    Attributes:
        run: function that takes the parameters, if the command loads any, and the parsed arguments. It returns the exit
            code, or None for 0.
        examples: command lines to run in the project's root, shown at the end of the help.
        arguments: the arguments. An inner list contains mutually exclusive arguments.
        reads: what a stage reads. Each path is followed by its parameter: `data/00_base (train.base)`.
        writes: what a stage writes, in the same form.
        needs: what must be done or installed before a stage runs.
        sections: the sections of the parameters that control a stage.
        extra: the extra of this package that installs what the command imports.
        parameters: whether the command loads parameters. "required" loads the file that --params names. "optional" does
            the same, but if no file is named and `params.yaml` does not exist, it loads the profile `embedded`. "none"
            does not load parameters.
    """

    run: Callable[..., int | None]
    examples: tuple[str, ...]
    arguments: tuple[Argument | list[Argument], ...] = ()
    reads: str = ""
    writes: str = ""
    needs: str = ""
    sections: str = ""
    extra: str = "train"
    parameters: Literal["required", "optional", "none"] = "required"


@dataclass(frozen=True)
class CommandEntry:
    """An entry in the list of commands. The command is only imported when `load` is called.

    Attributes:
        summary: what the command does, in one line.
        module: dotted name of the module that defines the command as `COMMAND`.
    """

    group: Group
    summary: str
    module: str

    def load(self) -> Command:
        """Import and return the command."""
        command: Command = import_module(self.module).COMMAND
        return command
