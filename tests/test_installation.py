"""The version of the installed package, and the wheel file that it was installed from."""

import json
import tomllib
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace

import pytest

from m3diff.records import installation
from m3diff.records.installation import version_number, wheel_file
from tests.toy import REPOSITORY


def test_the_version_of_a_checkout_is_not_that_of_outdated_metadata(monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    assert version_number() == project["version"]


def test_the_version_of_a_wheel_is_that_of_its_metadata(monkeypatch, tmp_path):
    monkeypatch.setattr(installation, "PROFILES", tmp_path)
    monkeypatch.setattr(metadata, "version", {"m3diff": "4.5.6"}.__getitem__)
    assert version_number() == "4.5.6"


WHEEL = "m3diff-4.5.6-py3-none-any.whl"


@pytest.fixture
def install_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Return a function that makes pip's record of the installation name an address, or no address."""

    def record(address: str | None) -> None:
        origin = None if address is None else json.dumps({"url": address, "archive_info": {}})
        distribution = SimpleNamespace(version="4.5.6", read_text={"direct_url.json": origin}.get)
        monkeypatch.setattr(metadata, "distribution", lambda name: distribution)

    return record


def test_the_wheel_file_is_the_one_that_pip_recorded(install_from, tmp_path):
    file = tmp_path / "in a folder" / WHEEL
    file.parent.mkdir()
    file.touch()
    install_from(file.as_uri())
    assert wheel_file() == str(file)


@pytest.mark.parametrize(
    "address", [None, f"https://a.example/{WHEEL}", f"file:///gone/{WHEEL}"], ids=["no record", "a server", "gone"]
)
def test_a_wheel_file_that_cannot_be_found_is_named_as_it_is_called(address, install_from):
    install_from(address)
    assert wheel_file() == WHEEL
