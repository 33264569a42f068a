"""The command line as people type it, with remedies for unknown words."""

import re
import sys
from pathlib import Path

import pytest

from m3diff.__main__ import COMMANDS, main
from m3diff.command_line.parser import parse
from m3diff.records.errors import Fault
from tests.errors import Message


def exit_code(words: list[str]) -> int:
    """Return the exit code of a command line that ends while it is parsed."""
    with pytest.raises(SystemExit) as end:
        main(words)
    assert isinstance(end.value.code, int)
    return end.value.code


# Without a command


def test_without_a_word_the_help_is_printed(capsys):
    assert exit_code([]) == 0
    printed = capsys.readouterr()
    assert exit_code(["--help"]) == 0
    assert printed.out == capsys.readouterr().out
    assert printed.err == ""


def test_without_words_for_main_those_of_the_process_are_read(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["m3diff"])
    with pytest.raises(SystemExit) as end:
        parse(None, COMMANDS, "")
    assert end.value.code == 0
    assert "usage: m3diff" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["m3diff", "synthesize", "minichange"])
    assert parse(None, COMMANDS, "").command == "synthesize"


# Unknown words


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [("trian", "train"), ("evalute", "evaluate"), ("zeroshot", "zero-shot"), ("Promote", "promote")],
)
def test_a_mistyped_command_gets_the_nearest_one(typed, nearest, capsys):
    assert exit_code([typed]) == 2
    assert Message("command.misspelt_command", value=typed, nearest=nearest).in_text(capsys.readouterr().err)


def test_the_options_of_a_mistyped_command_are_not_judged(capsys):
    assert exit_code(["trian", "--params", "x.yaml", "--nonsense"]) == 2
    message = capsys.readouterr().err.partition("error:")[2]
    assert Message("command.misspelt_command", value="trian", nearest="train").in_text(message)
    assert "--nonsense" not in message


def test_a_command_that_is_like_none_is_refused_with_the_way_to_the_list(capsys):
    assert exit_code(["xyzzy"]) == 2
    assert Message("command.unknown_command", value="xyzzy").in_text(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        pytest.param("plan --utilization 0.4", "--utilisation", id="spelling"),
        pytest.param("--parms x.yaml train --epochs 3", "--params", id="before the command"),
        pytest.param("zero-shot --ulr http://127.0.0.1:1/v1 --model m", "--url", id="a required one"),
        pytest.param("caption a.png b.png --overly=o.png", "--overlay", id="with a value"),
        pytest.param(
            "zero-shot --url http://127.0.0.1:1/v1 --model m --no-reuse-answer2",
            "--no-reuse-answers",
            id="a negated one",
        ),
    ],
)
def test_a_mistyped_option_gets_the_nearest_one(typed, nearest, capsys):
    assert exit_code(typed.split()) == 2
    message = capsys.readouterr().err
    assert Message("command.misspelt_option", nearest=nearest).in_text(message)
    assert len(re.findall(Message("command.misspelt_option").pattern, message)) == 1


def test_the_options_of_a_command_are_not_judged_before_it_is_known(capsys):
    assert exit_code(["--parms", "x.yaml", "train", "--epochs", "3"]) == 2
    assert not Message("command.option_is_a_parameter", value="--epochs").in_text(capsys.readouterr().err)


def test_an_option_that_is_a_parameter_leads_to_its_section(capsys):
    assert exit_code(["train", "--epochs", "3"]) == 2
    sections = COMMANDS["train"].load().sections
    message = Message("command.option_is_a_parameter", value="--epochs", program="m3diff train", sections=sections)
    assert message.in_text(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("typed", "value", "nearest"),
    [
        ("plan --gpu H100-80", "H100-80", "H100-80GB"),
        ("data chek folder", "chek", "check"),
        ("data check folder --reader pair", "pair", "pairs"),
    ],
)
def test_a_mistyped_choice_gets_the_nearest_one_and_all(typed, value, nearest, capsys):
    assert exit_code(typed.split()) == 2
    assert Message("command.misspelt_choice", value=value, nearest=nearest).in_text(capsys.readouterr().err)


def test_a_choice_that_is_like_none_gets_all(capsys):
    assert exit_code(["data", "xyzzy"]) == 2
    message = Message("command.unknown_choice", value="xyzzy", names=["check", "statistics"])
    assert message.in_text(capsys.readouterr().err)


def test_an_option_that_is_like_none_of_a_command_without_parameters_is_unknown(capsys):
    assert exit_code(["history", "--xyzzy=1"]) == 2
    message = Message("command.unknown_option", value="--xyzzy", program="m3diff history")
    assert message.in_text(capsys.readouterr().err)


def test_words_after_two_dashes_are_not_judged_as_options(capsys):
    assert exit_code(["history", "--", "--jsn"]) == 2
    assert not Message("command.misspelt_option", value="--jsn").in_text(capsys.readouterr().err)


# Missing and wrong words


def test_a_missing_word_of_a_few_is_named_with_all_of_them(capsys):
    assert exit_code(["data"]) == 2
    fault = Fault("command.argument_without_word", argument="ACTION", names=["check", "statistics"])
    assert f"required: ACTION; {fault}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--params x", "COMMAND"),
        ("unknown", "'unknown'"),
        ("synthesize", "name"),
        ("data", "ACTION"),
        ("export", "out"),
        ("profile", "name"),
        ("plan --gpu H100", "argument --gpu: "),
        ("export --hub --adapters out", "not allowed with"),
        ("serve --port 70000", f"argument --port: {Fault('command.not_a_port', value='70000')}"),
        ("prune --keep x", f"argument --keep: {Fault('command.not_a_count', value='x')}"),
        ("zero-shot --url ftp://x --model m", "ftp://x"),
        ("zero-shot", "--url, --model"),
        ("zero-shot --url https://me:key@x.org/v1 --model m", "argument --url: "),
    ],
)
def test_usage_errors_exit_with_two_and_name_the_argument(typed, message, capsys):
    assert exit_code(typed.split()) == 2
    assert message in capsys.readouterr().err


# Words that are read


def test_a_word_that_begins_with_a_dash_is_an_argument_after_two_dashes():
    arguments = parse(["caption", "--", "-before.png", "-after.png"], COMMANDS, "")
    assert arguments.image == Path("-before.png")
    assert arguments.after == Path("-after.png")


@pytest.mark.parametrize(
    "typed", ["--params x.yaml plan", "plan --params x.yaml", "--params y.yaml plan --params x.yaml"]
)
def test_the_parameter_file_is_named_before_or_after_the_command(typed):
    assert parse(typed.split(), COMMANDS, "").params == Path("x.yaml")
