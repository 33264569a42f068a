"""A checkout and an installed wheel: version, remedies, parameters and profiles."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from m3diff.__main__ import COMMANDS, main
from m3diff.command_line.distribution import describe_version, find_profiles_folder, load_parameters
from m3diff.provenance import git as git_module
from m3diff.records import installation
from m3diff.records.errors import Fault
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from tests.errors import Message, raises
from tests.toy import REPOSITORY

# The version


def project_version() -> str:
    line = re.search(r'^version = "(.*)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert line is not None
    return line[1]


@pytest.mark.parametrize(
    ("status", "suffix"),
    [pytest.param(" M README.md", " with uncommitted changes", id="changed"), pytest.param("", "", id="unchanged")],
)
def test_in_a_checkout_the_version_has_the_commit_and_says_if_files_differ(status, suffix, monkeypatch):
    answers = {"rev-parse": "0123456789ab", "status": status}
    monkeypatch.setattr(git_module, "git", lambda *words, cwd: answers[words[0]])
    assert describe_version() == f"m3diff {project_version()}, commit 0123456789ab{suffix}"


def test_the_option_version_prints_it_and_ends(monkeypatch, capsys):
    monkeypatch.setattr(git_module, "git", lambda *words, cwd: "0123456789ab")
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"{describe_version()}\n"


def test_without_a_repository_the_version_is_the_number_alone(monkeypatch):
    def refuse(*words: str, cwd: Path) -> str:
        raise git_module.GitError(Fault("files.unreadable", path=cwd, cause="no git repository"))

    monkeypatch.setattr(git_module, "git", refuse)
    assert re.fullmatch(r"m3diff \d+\.\d+\.\d+", describe_version())


# An installed wheel


class WheelDistribution(SimpleNamespace):
    """A package as importlib.metadata knows it."""

    version = "4.5.6"

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.direct_url


@pytest.fixture
def install_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str | None], None]:
    """Makes this process one of an installed wheel, with pip's record of the address that it came from."""

    def install(address: str | None) -> None:
        from importlib import metadata

        direct_url = None if address is None else json.dumps({"url": address, "archive_info": {}})
        monkeypatch.setattr(metadata, "distribution", lambda name: WheelDistribution(direct_url=direct_url))
        monkeypatch.setattr(metadata, "version", lambda name: WheelDistribution.version)
        (tmp_path / "_profiles").mkdir()
        monkeypatch.setattr(installation, "PROFILES", tmp_path / "_profiles")

    return install


def test_a_wheel_s_version_has_no_commit(install_wheel):
    install_wheel(None)
    assert describe_version() == "m3diff 4.5.6"


# The remedy if a package is missing


@pytest.mark.parametrize("exists", [True, False], ids=["the file exists", "the file is gone"])
def test_a_remedy_in_a_wheel_names_the_wheel_file(exists, install_wheel, tmp_path):
    file = tmp_path / "of 2026" / "m3diff-4.5.6-py3-none-any.whl"
    if exists:
        file.parent.mkdir()
        file.touch()
    install_wheel(file.as_uri())
    name = file if exists else file.name
    assert installation.install_command("serve") == f"pip install '{name}[serve]'"


@pytest.mark.parametrize("address", [None, "https://a.example/m3diff-4.5.6-py3-none-any.whl"], ids=["none", "a server"])
def test_a_wheel_that_came_from_no_file_is_named_as_its_file_is_called(address, install_wheel):
    install_wheel(address)
    assert installation.install_command("score") == "pip install 'm3diff-4.5.6-py3-none-any.whl[score]'"


def test_a_remedy_in_a_checkout_installs_the_checkout():
    assert installation.install_command("train") == "pip install -c constraints.txt -e '.[train]'"


# Parameters


def test_a_command_of_a_run_needs_the_parameter_file(outside, capsys):
    assert main(["train"]) == 2
    assert Message("settings.no_file", path="params.yaml").in_text(capsys.readouterr().err)


OPTIONAL = ["data", "caption", "serve"]


@pytest.mark.parametrize("command", OPTIONAL)
def test_a_command_for_one_s_own_images_falls_back_on_the_embedded_profile(command, outside):
    assert load_parameters(Path("params.yaml"), COMMANDS[command].load()).train.epochs == 2.7


@pytest.mark.parametrize("command", OPTIONAL)
def test_a_command_for_one_s_own_images_takes_a_parameter_file_that_exists(command, outside):
    text = (REPOSITORY / "params.yaml").read_text()
    Path("params.yaml").write_text(text.replace("epochs: 2.7", "epochs: 3"))
    assert load_parameters(Path("params.yaml"), COMMANDS[command].load()).train.epochs == 3


def test_a_parameter_file_that_is_named_must_exist(outside):
    with raises(ParamsError, "settings.no_file", path=Path("other.yaml")):
        load_parameters(Path("other.yaml"), COMMANDS["caption"].load())


# Profiles


def test_in_a_wheel_the_profiles_are_its_own(outside, wheel_profiles):
    assert find_profiles_folder() == wheel_profiles
    assert main(["profile", "embedded"]) == 0
    assert load_params(Path("params.yaml")) == load_params(wheel_profiles / "embedded.yaml")


def test_a_folder_of_profiles_in_the_working_directory_comes_before_the_wheel_s(outside, wheel_profiles):
    Path("profiles").mkdir()
    assert find_profiles_folder() == Path("profiles")
