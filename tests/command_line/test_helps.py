"""The helps: the list of commands, and what each command's help says."""

import json
import re
import shlex
from typing import Any

import pytest
import yaml

from m3diff.__main__ import COMMANDS, main
from m3diff.command_line.command import Command, Group
from m3diff.command_line.distribution import PARAMS_FILE
from m3diff.command_line.parser import describe_command, list_commands, make_parser, parse, wrap_text
from tests.toy import REPOSITORY

DVC_STAGES = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"]
STAGES = [*DVC_STAGES, "register", "promote"]
PARAMS = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
EXAMPLES = [(name, line) for name in COMMANDS for line in COMMANDS[name].load().examples]


def help_of(command: str | None, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(["--help"] if command is None else [command, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


# The list of commands


@pytest.mark.parametrize("group", Group, ids=lambda group: group.name)
def test_the_list_has_every_command_under_its_group(group, capsys):
    text = help_of(None, capsys)
    section = text.partition(f"\n{group.value}:\n")[2].partition("\n\n")[0]
    names = [line.split()[0] for line in section.splitlines() if line[2] != " "]
    assert names == [name for name, entry in COMMANDS.items() if entry.group == group]


def test_the_list_fits_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, help_of(None, capsys).splitlines())) <= 80


def test_a_summary_that_is_wrapped_goes_on_in_its_own_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    summary = COMMANDS["augment"].summary
    _, first_line, next_line = list_commands({"augment": COMMANDS["augment"]}).split("\n\n")[0].split("\n")
    column = first_line.index(summary[:10])
    assert f"{first_line[column:]} {next_line[column:]}" == summary


def test_text_leaves_two_columns_of_the_terminal_free(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    fitting = f"{'a' * 40} {'b' * 17}"
    too_long = f"{'a' * 40} {'b' * 18}"
    assert wrap_text(fitting).splitlines() == [fitting]
    assert wrap_text(too_long).splitlines() == too_long.split()


def test_a_narrow_terminal_gets_lines_of_forty_characters(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    text = f"{'a' * 19} {'b' * 20} {'c' * 20}"
    assert wrap_text(text).splitlines() == [f"{'a' * 19} {'b' * 20}", "c" * 20]


# The help of a command


def test_a_fact_that_is_wrapped_goes_on_in_its_own_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    reads = " ".join(f"folder-{number}" for number in range(20))
    description = describe_command("a summary", Command(run=print, examples=(), reads=reads))
    first_line, *next_lines = description.splitlines()[2:]
    column = first_line.index("folder-0")
    assert next_lines
    assert " ".join(line[column:] for line in (first_line, *next_lines)) == reads


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_s_help_says_what_it_reads_writes_needs_and_follows(stage, capsys):
    headings = re.findall(r"^  (reads|writes|needs|parameters) +\S", help_of(stage, capsys), re.MULTILINE)
    assert headings == ["reads", "writes", "needs", "parameters"]


@pytest.mark.parametrize("stage", STAGES)
def test_every_path_in_a_stage_s_help_is_that_of_the_parameter_beside_it(stage):
    command = COMMANDS[stage].load()
    for path, key in re.findall(r"([\w./-]+) \(([\w.]+)\)", f"{command.reads}; {command.writes}"):
        value: Any = PARAMS
        for part in key.split("."):
            value = value[part]
        if "/" in path:
            assert path == str(value), key


@pytest.mark.parametrize("stage", [stage for stage in DVC_STAGES if stage != "code"])
def test_a_stage_s_help_names_the_paths_and_sections_that_dvc_watches(stage):
    command = COMMANDS[stage].load()
    entry = DVC_STAGES[stage].get("do", DVC_STAGES[stage])
    outputs = [*entry["outs"], *entry.get("metrics", [])]
    for text, paths in ((command.reads, entry["deps"]), (command.writes, outputs)):
        for key in re.findall(r"\$\{(paths\.\w+)\}", json.dumps(paths)):
            assert f"({key})" in text
    sections = {section.partition(".")[0] for section in entry["params"]} - {"ingest"}
    assert {section for section in sections if section not in command.sections} == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_each_help_needs_no_parameters_and_ends_with_the_command_s_examples(name, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    examples = COMMANDS[name].load().examples
    assert examples
    assert help_of(name, capsys).endswith("\n\nexamples:\n" + "".join(f"  {line}\n" for line in examples))


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=[line for _, line in EXAMPLES])
def test_an_example_is_read_as_its_command_with_a_parameter_file_that_exists(name, line):
    program, *words = shlex.split(line)
    arguments = parse(words, COMMANDS, "")
    assert program == "m3diff"
    assert arguments.command == name
    assert arguments.params == PARAMS_FILE or (REPOSITORY / arguments.params).is_file()


@pytest.mark.parametrize(("name", "has_option"), [("history", False), ("train", True)])
def test_a_command_takes_a_parameter_file_if_it_loads_parameters(name, has_option):
    parser = make_parser(name, COMMANDS[name].summary, COMMANDS[name].load())
    assert ("--params" in parser.format_help()) == has_option
