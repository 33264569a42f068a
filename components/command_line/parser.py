"""Parse the command line and format its help. Only the typed command is imported and gets a parser."""

import argparse
import difflib
import itertools
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from m3diff.command_line.command import Argument, Command, CommandEntry, Group, argument
from m3diff.command_line.distribution import PARAMS_FILE, describe_version
from m3diff.records.errors import Fault

MAX_WIDTH = 120  # maximum width of a help text in columns, even if the terminal is wider
NAME_COLUMN = 14  # width of the column of command names in the command list
MISSING_ARGUMENTS = "the following arguments are required: "  # beginning of argparse's message


@dataclass
class TypedWords:
    """The words that a parser has to parse, and the words that it accepts. Remedies compare the two.

    Attributes:
        words: the typed words.
        options: the options that the parser accepts.
        commands: names of commands. Words after a command are parsed by the command's parser.
        choices: the allowed words of each positional argument that does not accept all words.
        sections: the sections of the parameters that control the command.
    """

    words: Sequence[str] = ()
    options: list[str] = field(default_factory=lambda: ["--help"])
    commands: Collection[str] = ()
    choices: dict[str, list[str]] = field(default_factory=dict)
    sections: str = ""


class CommandParser(argparse.ArgumentParser):
    """A parser that suggests the most similar option if an option is misspelt."""

    def __init__(self, **settings: Any) -> None:
        # argparse's default formatter would join the lines of descriptions and examples
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        self.typed = TypedWords()

    def add(self, argument: Argument | list[Argument], group: Any = None) -> None:
        """Add an argument, or a list of mutually exclusive arguments."""
        if isinstance(argument, list):
            exclusive_group = self.add_mutually_exclusive_group()
            for member in argument:
                self.add(member, exclusive_group)
            return
        options = dict(argument.options)
        if argument.choices is not None:
            allowed_words = list(argument.choices())
            options["type"] = make_word_type(allowed_words)
            options["help"] = options["help"].replace("{choices}", ", ".join(allowed_words))
            if not argument.names[0].startswith("-"):
                self.typed.choices[options.get("metavar", argument.names[0])] = allowed_words
        action = (self if group is None else group).add_argument(*argument.names, **options)
        self.typed.options += action.option_strings

    def parse(self, words: Sequence[str], namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        """Parse words, and return `namespace` with their arguments added. If a word is invalid, exit with code 2."""
        # the words after a command belong to the command's parser
        self.typed.words = list(itertools.takewhile(lambda word: word not in self.typed.commands, words))
        arguments, unknown_words = self.parse_known_args(words, namespace)
        if unknown_words:
            self.error(str(Fault("command.unknown_words", words=" ".join(unknown_words))))
        return arguments

    def error(self, message: str) -> NoReturn:
        """Print an error message of argparse with its remedies, and exit with code 2."""
        parts = [message]
        if message.startswith(MISSING_ARGUMENTS):
            for name in message.removeprefix(MISSING_ARGUMENTS).split(", "):
                if name in self.typed.choices:
                    fault = Fault("command.argument_without_word", argument=name, names=self.typed.choices[name])
                    parts.append(str(fault))
        parts += [str(fault) for fault in self._unknown_options()]
        super().error("; ".join(parts))

    def _unknown_options(self) -> Iterator[Fault]:
        """Yield a fault for each typed option that this parser does not accept."""
        for word in self.typed.words:
            option = word.partition("=")[0]
            if option == "--":
                return
            # argparse accepts abbreviated options
            is_known = any(known_option.startswith(option) for known_option in self.typed.options)
            if not option.startswith("--") or is_known:
                continue
            suggestion = find_nearest(option, self.typed.options)
            if suggestion:
                yield Fault("command.misspelt_option", value=option, program=self.prog, nearest=suggestion)
            elif self.typed.sections:
                yield Fault(
                    "command.option_is_a_parameter",
                    value=option,
                    program=self.prog,
                    sections=self.typed.sections,
                    file=PARAMS_FILE,
                )
            else:
                yield Fault("command.unknown_option", value=option, program=self.prog)


class _ShowVersion(argparse.Action):
    """An argument action that prints the version and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(describe_version())
        parser.exit()


def parse(argv: Sequence[str] | None, commands: Mapping[str, CommandEntry], description: str) -> argparse.Namespace:
    """Parse the command line, and return the arguments of the command.

    The result also contains the command's name as `command`, and the parameter file as `params`. If there are no words,
    the help is printed. Exit with code 0 after printing the help or the version, and with code 2 if a word is invalid.

    Args:
        argv: the words after the program's name. If it is None, the words are taken from `sys.argv`.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = make_top_parser(commands, description)
    if not words:
        parser.print_help()
        parser.exit()
    top_arguments = parser.parse(words)
    name, *command_words = top_arguments.command
    if name not in commands:
        parser.typed.words = ()  # options of an unknown command get no remedies
        suggestion = find_nearest(name, commands)
        if suggestion:
            parser.error(str(Fault("command.misspelt_command", value=name, nearest=suggestion)))
        parser.error(str(Fault("command.unknown_command", value=name)))
    command_parser = make_parser(name, commands[name].summary, commands[name].load())
    return command_parser.parse(command_words, argparse.Namespace(command=name, params=top_arguments.params))


def make_top_parser(commands: Mapping[str, CommandEntry], description: str) -> CommandParser:
    """Return the parser for the options of `m3diff` itself. It does not parse the words after the command's name."""
    epilog = f"{list_commands(commands)}\n\n`m3diff COMMAND --help` explains a command and ends with examples"
    parser = CommandParser(prog="m3diff", description=description, epilog=epilog)
    parser.typed.commands = commands
    version_help = "print the version, in a checkout with the commit"
    parser.add(argument("--version", action=_ShowVersion, nargs=0, help=version_help))
    parser.add(make_params_argument(PARAMS_FILE))
    parser.add(argument("command", nargs=argparse.PARSER, metavar="COMMAND", help="one of the list below"))
    return parser


def make_parser(name: str, summary: str, command: Command) -> CommandParser:
    """Return the parser for the arguments of a command."""
    examples = "\n".join(f"  {line}" for line in command.examples)
    parser = CommandParser(
        prog=f"m3diff {name}", description=describe_command(summary, command), epilog=f"examples:\n{examples}"
    )
    parser.typed.sections = command.sections
    if command.parameters != "none":
        parser.add(make_params_argument(argparse.SUPPRESS))
    for command_argument in command.arguments:
        parser.add(command_argument)
    return parser


def make_params_argument(default: Any) -> Argument:
    """Return the option --params, which names the parameter file."""
    help_text = f"parameter file or profile (default: {PARAMS_FILE})"
    return argument("--params", type=Path, metavar="FILE", default=default, help=help_text)


def describe_command(summary: str, command: Command) -> str:
    """Return the part of a command's help between the usage and the arguments."""
    facts = {"reads": command.reads, "writes": command.writes, "needs": command.needs}
    if command.sections:
        facts["parameters"] = f"{command.sections} in {PARAMS_FILE}, which says what each value is"
    fact_lines = [wrap_text(text, f"  {heading:<12}", " " * NAME_COLUMN) for heading, text in facts.items() if text]
    lines = [wrap_text(summary)]
    if fact_lines:
        lines += ["", *fact_lines]
    return "\n".join(lines)


def list_commands(commands: Mapping[str, CommandEntry]) -> str:
    """Return the list of commands with their summaries, by group, wrapped to the width of the terminal."""
    sections = []
    for group in Group:
        lines = [f"{group.value}:"]
        for name, entry in commands.items():
            if entry.group == group:
                lines.append(wrap_text(entry.summary, f"  {name:<{NAME_COLUMN}}", " " * (NAME_COLUMN + 2)))
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def wrap_text(text: str, first_indent: str = "", next_indent: str = "") -> str:
    """Wrap a text to the width of the terminal."""
    width = min(max(shutil.get_terminal_size().columns - 2, 40), MAX_WIDTH)
    return textwrap.fill(
        text,
        width,
        initial_indent=first_indent,
        subsequent_indent=next_indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def make_word_type(allowed_words: Collection[str]) -> Callable[[str], str]:
    """Return a function for argparse's `type` that accepts only these words and suggests the most similar one."""

    def check(word: str) -> str:
        if word in allowed_words:
            return word
        suggestion = find_nearest(word, allowed_words)
        choices = list(allowed_words)
        if suggestion:
            fault = Fault("command.misspelt_choice", value=word, nearest=suggestion, names=choices)
        else:
            fault = Fault("command.unknown_choice", value=word, names=choices)
        raise argparse.ArgumentTypeError(str(fault))

    return check


def find_nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that is most similar to the word, or None if none is similar."""
    return next(iter(difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)), None)
