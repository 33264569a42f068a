"""Commands as data: a row for each, from which parser and help are made; and what an installation without a checkout or
a package has in their place."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.settings.load import load_params
from m3diff.settings.tree import Params

SHIPPED = Path(__file__).parents[1] / "_profiles"
"""The profiles inside an installed wheel."""


class Command(NamedTuple):
    """A command of `m3diff`.

    Attributes:
        run: takes the parameters, where the command loads any, and the parsed arguments; returns the exit code, None
            for 0.
        examples: as typed in the project's root.
        arguments: rows of `arg`; a list of rows excludes one another; a mapping has sub-commands, each with its help.
        extra: of the package, that has what the command imports.
        load: reads the parameters that --params names; None where the command needs none.
    """

    run: Callable[..., int | None]
    help: str
    examples: tuple[str, ...]
    arguments: tuple[Any, ...] = ()
    extra: str = "train"
    load: Callable[[Path], Params] | None = load_params


def arg(*names: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """An argument of a command, as argparse takes it."""
    return names, options


def flag(name: str, text: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """An argument that is there or not."""
    return arg(name, action="store_true", help=text)


def make_parser(commands: Mapping[str, Command], description: str) -> argparse.ArgumentParser:
    """The parser of all commands, in their order."""
    form = argparse.RawDescriptionHelpFormatter  # examples keep their lines
    parser = argparse.ArgumentParser(prog="m3diff", description=description)
    parser.add_argument(
        "--params", type=Path, default=Path("params.yaml"), help="parameter file or profile (default: params.yaml)"
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in commands.items():
        epilog = "\n".join(["examples:", *(f"  {line}" for line in command.examples)])
        words: dict[str, Any] = {"help": command.help, "description": command.help, "epilog": epilog}
        _add(subparsers.add_parser(name, formatter_class=form, **words), command.arguments)
    return parser


def _add(parser: Any, arguments: Iterable[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, list):
            _add(parser.add_mutually_exclusive_group(), argument)
        elif isinstance(argument, dict):
            actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
            for name, (text, *inner) in argument.items():
                _add(actions.add_parser(name, help=text), inner)
        else:
            names, options = argument
            parser.add_argument(*names, **options)


def port(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"expected a port, 1 to 65535 (found {text!r})")
    return int(text)


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number, 0 or more (found {text!r})")
    return int(text)


def not_installed(module: str, extra: str) -> str:
    """The remedy where a package that a command needs is missing. The project is on no index: pip takes the checkout,
    or the wheel that is installed already.

    Args:
        module: as it is imported, such as `pycocoevalcap.cider.cider`.
        extra: of this package, that brings it.
    """
    install = f"'m3diff[{extra}]'" if SHIPPED.is_dir() else f"-c constraints.txt -e '.[{extra}]'"
    package = module.partition(".")[0]
    return f"the package {package!r} is not installed here; pip install {install} ({sys.executable})"


def profiles_folder() -> Path:
    """The folder of profiles: in the working directory of a checkout, else in the wheel."""
    here = Path("profiles")
    return here if here.is_dir() or not SHIPPED.is_dir() else SHIPPED


def load_anywhere(asked: Path) -> Params:
    """The parameters of a command that runs outside a checkout too: those of `asked`, or, in place of a `params.yaml`
    that is not there, the profile of the embedded run inside the wheel."""
    shipped = SHIPPED / "embedded.yaml"
    absent = asked == Path("params.yaml") and not asked.is_file() and shipped.is_file()
    return load_params(shipped if absent else asked)
