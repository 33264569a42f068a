"""The command line: commands as data, the parser and the help that are made of them, the lines that a stage's command
prints of its report, and what an installation without a checkout or a package has in their place."""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from m3diff.endpoint import endpoint_url
from m3diff.records.files import StageReport
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params

# The profiles inside an installed wheel; in a checkout a link to its own
SHIPPED = Path(__file__).parents[1] / "_profiles"


class Command(NamedTuple):
    """A command of `m3diff`.

    Attributes:
        run: takes the parameters, where the command loads any, and the parsed arguments; returns the exit code, None
            for 0.
        arguments: rows of `arg`; a list of rows excludes one another.
        examples: as typed in the project's root, where the usage does not say it all.
        extra: of the package, that has what the command imports.
        load: reads the parameters that --params names; None where the command needs none.
    """

    run: Callable[..., int | None]
    help: str
    arguments: tuple[Any, ...] = ()
    examples: tuple[str, ...] = ()
    extra: str = "train"
    load: Callable[[Path], Params] | None = load_params


def arg(*names: str, **options: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    return names, options


def flag(name: str, text: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    return arg(name, action="store_true", help=text)


def make_parser(commands: Mapping[str, Command], description: str) -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter  # examples keep their lines
    parser = argparse.ArgumentParser(prog="m3diff", description=description)
    parser.add_argument(
        "--params", type=Path, default=Path("params.yaml"), help="parameter file or profile (default: params.yaml)"
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in commands.items():
        epilog = "".join(f"\n  {line}" for line in command.examples)
        words: dict[str, Any] = {"help": command.help, "description": command.help}
        words["epilog"] = f"examples:{epilog}" if epilog else None
        _add(subparsers.add_parser(name, formatter_class=form, **words), command.arguments)
    return parser


def _add(parser: Any, arguments: Iterable[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, list):
            _add(parser.add_mutually_exclusive_group(), argument)
        else:
            names, options = argument
            parser.add_argument(*names, **options)


def url(text: str) -> str:
    try:
        return endpoint_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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
    install = f"-c constraints.txt -e '.[{extra}]'" if SHIPPED.is_symlink() else f"'m3diff[{extra}]'"
    package = module.partition(".")[0]
    return f"the package {package!r} is not installed here; pip install {install} ({sys.executable})"


def profiles_folder() -> Path:
    """The folder of profiles: in the working directory of a checkout, else in the wheel."""
    here = Path("profiles")
    return here if here.is_dir() or SHIPPED.is_symlink() else SHIPPED


def load_anywhere(asked: Path) -> Params:
    """The parameters of a command that runs outside a checkout too: those of `asked`, or, in place of a `params.yaml`
    that is not there, the profile of the embedded run inside the wheel."""
    absent = asked == Path("params.yaml") and not asked.is_file() and not SHIPPED.is_symlink()
    return load_params(SHIPPED / "embedded.yaml" if absent else asked)


def told(report: StageReport) -> str:
    """The numbers of a report in a line, and in a line for each of its datasets."""
    fields = report.model_dump()
    place = f"{report.stage}: {fields['dataset']}" if "dataset" in fields else report.stage
    lines = {place: fields} | {f"{report.stage}: {name}": of for name, of in fields.get("datasets", {}).items()}
    return "\n".join(f"{place}: {numbers(of)}" for place, of in lines.items())


def numbers(fields: Mapping[str, Any]) -> str:
    """`pairs 7,500 (train 7,000, test 500), faults 2`: each field that is a number, or numbers by name; no zeros."""
    found = []
    for name, value in fields.items():
        parts = {key: n for key, n in value.items() if isinstance(n, int) and n} if isinstance(value, dict) else {}
        number = sum(parts.values()) if parts else value
        if isinstance(number, int) and number:
            listed = ", ".join(f"{key} {count:,}" for key, count in parts.items())
            found.append(f"{name.replace('_', ' ')} {number:,}" + (f" ({listed})" if parts else ""))
    return ", ".join(found)
