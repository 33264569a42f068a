"""The help of each command, and what a command says where a package that it needs is not installed."""

import shlex
import sys
from pathlib import Path

import pytest

from m3diff.__main__ import COMMANDS, main
from m3diff.commands import usage
from m3diff.settings.section import ParamsError
from tests.toy import REPOSITORY


def test_every_command_has_examples_that_are_right():
    parser = usage.make_parser(COMMANDS, "")
    for name, command in COMMANDS.items():
        for line in command.examples:
            program, *argv = shlex.split(line)
            args = parser.parse_args(argv)
            assert (program, args.command) == ("m3diff", name)
            assert args.params == Path("params.yaml") or (REPOSITORY / args.params).is_file()


def test_help_lists_every_command_once_in_groups_and_shows_the_examples_of_one(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    groups = dict.fromkeys(command.group for command in COMMANDS.values())
    listed = [shown.partition(f"\n{title}:\n")[2].partition("\n\n")[0] for title in groups]
    names = [line.split()[0] for lines in listed for line in lines.splitlines() if line[2] != " "]
    assert names == list(COMMANDS)
    assert max(map(len, shown.splitlines())) <= 80
    assert all(" ".join(command.help.split()) in " ".join(shown.split()) for command in COMMANDS.values())
    with pytest.raises(SystemExit):
        main(["score", "--help"])
    assert capsys.readouterr().out.endswith("examples:\n" + "".join(f"  {x}\n" for x in COMMANDS["score"].examples))


@pytest.mark.parametrize(
    ("command", "extra"), [("score", "score"), ("caption", "serve"), ("serve", "serve"), ("train", "train")]
)
def test_where_a_package_is_not_installed_the_extra_that_brings_it_is_named(
    command, extra, monkeypatch, tmp_path, capsys
):
    def run(*given):
        raise ModuleNotFoundError("No module named 'pycocoevalcap'", name="pycocoevalcap.cider")

    monkeypatch.setitem(COMMANDS, command, COMMANDS[command]._replace(run=run))
    given = {"score": ["predictions.json"], "caption": ["a.png", "b.png"]}.get(command, [])
    assert main([command, *given]) == 2
    missing = f"m3diff {command}: the package 'pycocoevalcap' is not installed here"
    remedy = f"pip install -c constraints.txt -e '.[{extra}]' ({sys.executable})"
    assert capsys.readouterr().err == f"{missing}; {remedy}\n"
    monkeypatch.setattr(usage, "SHIPPED", tmp_path)
    assert main([command, *given]) == 2
    assert capsys.readouterr().err == f"{missing}; pip install 'm3diff[{extra}]' ({sys.executable})\n", "in a wheel"


@pytest.mark.parametrize("name", ["m3diff.no_such", "flows", None])
def test_a_module_of_the_project_that_is_missing_is_a_fault_of_the_project(name, monkeypatch):
    def run(*given):
        raise ModuleNotFoundError("missing", name=name)

    monkeypatch.setitem(COMMANDS, "train", COMMANDS["train"]._replace(run=run))
    with pytest.raises(ModuleNotFoundError):
        main(["train"])


def test_outside_a_checkout_the_profiles_of_the_wheel_are_taken(tmp_path, monkeypatch, capsys):
    asked, text = Path("params.yaml"), (REPOSITORY / "profiles" / "embedded.yaml").read_text()
    monkeypatch.chdir(tmp_path)
    assert usage.profiles_folder() == Path("profiles"), "a checkout's code has none inside"
    assert main(["train"]) == main(["serve"]) == 2
    assert capsys.readouterr().err.count("`m3diff profile embedded` writes one") == 2
    shipped = tmp_path / "installed"
    shipped.mkdir()
    (shipped / "embedded.yaml").write_text(text)
    monkeypatch.setattr(usage, "SHIPPED", shipped)
    assert usage.load_anywhere(asked).train.epochs == 2.7
    with pytest.raises(ParamsError, match=r"other\.yaml: no such file"):
        usage.load_anywhere(Path("other.yaml"))
    assert main(["profile", "embedded"]) == 0
    assert asked.read_text() == text
    asked.write_text(text.replace("epochs: 2.7", "epochs: 3"))
    assert usage.load_anywhere(asked).train.epochs == 3
    (tmp_path / "profiles").mkdir()
    assert usage.profiles_folder() == Path("profiles")
