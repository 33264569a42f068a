"""What an earlier release registered, exported and decided goes on working: `project.tar.xz`, made by `make.py`."""

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from m3diff.__main__ import main
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from tests.frozen.make import ARCHIVE, MODELS

PAIRS = ("exports/before", "exports/after", "--json")


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("frozen"))


def unpacked(root: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root)
    bring_up_to_date(root / "params.yaml")
    return root


def bring_up_to_date(file: Path) -> None:
    """Remove the parameters that this release calls unknown, as its message asks a person to."""
    values = yaml.safe_load(file.read_text())
    with pytest.raises(ParamsError) as refused:
        load_params(file)
    for place in re.findall(r"^ *([\w.]+): unknown key", str(refused.value), re.MULTILINE):
        *sections, key = place.split(".")
        section = values
        for name in sections:
            section = section[name]
        del section[key]
    file.unlink()
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    load_params(file)


def said(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    capsys.readouterr()
    assert main([*command]) == 0, command
    return capsys.readouterr().out


def captions(capsys: pytest.CaptureFixture[str], model: str) -> list[str]:
    return [json.loads(row)["caption"] for row in said(capsys, "caption", *PAIRS, "--model", model).splitlines()]


def then(file: str) -> Any:
    """What the command line said of it when it was made."""
    return json.loads(Path("exports", f"{file}.json").read_text())


def of(facts: tuple[str, ...], rows: list[dict[str, Any]]) -> list[list[Any]]:
    return [[row[fact] for fact in facts] for row in rows]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_what_it_said_then(name, frozen, monkeypatch, capsys):
    monkeypatch.chdir(frozen)
    assert captions(capsys, MODELS[name]) == then("captions")[name]


def test_the_captions_of_then_tell_the_versions_apart_and_the_exports_are_the_first(frozen, monkeypatch):
    monkeypatch.chdir(frozen)
    made = then("captions")
    assert all(made[name] == made["champion"] for name in ("1", "merged", "adapters", "hub"))
    assert made["challenger"] != made["champion"]
    assert len(set(made["champion"])) > 3, "pairs that look alike to a model tell little of it"


def test_versions_and_their_scores_are_listed_as_then(frozen, monkeypatch, capsys):
    monkeypatch.chdir(frozen)
    facts = ("version", "aliases", "scores", "weights_bytes", "commit", "dirty", "checkpoint")
    now = json.loads(said(capsys, "models", "--json"))
    assert of(facts, now) == of(facts, then("models"))
    assert [one["aliases"] for one in now] == [["challenger"], ["champion"]]


def test_the_record_of_decisions_is_read_as_then(frozen, monkeypatch, capsys):
    monkeypatch.chdir(frozen)
    facts = ("number", "at", "who", "action", "model", "from", "to", "outcome", "why")
    now = json.loads(said(capsys, "history", "--json"))
    assert of(facts, now) == of(facts, then("history"))
    assert [one["outcome"] for one in now] == ["first", "refused"]


@pytest.mark.parametrize("version", ["champion", "challenger"])
def test_the_chain_behind_a_version_holds(version, frozen, monkeypatch, capsys):
    monkeypatch.chdir(frozen)
    links = said(capsys, "lineage", version).splitlines()
    assert len(links) > 12
    assert all(link.startswith("ok") for link in links), links


def test_the_later_version_is_promoted_and_taken_back(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(unpacked(tmp_path))
    said(capsys, "promote")
    assert captions(capsys, "champion") == then("captions")["challenger"]
    said(capsys, "rollback", "--why", "a test")
    assert captions(capsys, "champion") == then("captions")["1"]
    assert main(["promote"]) != 0, "a version that was rolled back"
    decided = json.loads(said(capsys, "history", "--json"))
    assert [one["outcome"] for one in decided][:4] == ["first", "refused", "promoted", "rolled back"]
    assert [(one["from"], one["to"]) for one in decided][:4] == [(None, 1), (1, 2), (1, 2), (2, 1)]
    assert "rolled" in decided[4]["why"]
