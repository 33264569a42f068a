"""What an earlier release registered, exported and decided goes on working.

`project.tar.xz` was made once, at the commit that it holds, and stays: a git repository with DVC's cache, an MLflow
store with two versions of a tiny model, the record of decisions, exports, and what `m3diff caption` said of each.
"""

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

ARCHIVE = Path(__file__).parent / "project.tar.xz"
MODELS = {"1": "1", "champion": "champion", "merged": "exports/merged", "adapters": "exports/adapters"}
MODELS |= {"hub": "exports/hub", "challenger": "challenger"}
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


def test_versions_decisions_and_lineage_are_read_as_then(frozen, monkeypatch, capsys):
    monkeypatch.chdir(frozen)
    made = then("captions")
    assert all(made[name] == made["champion"] for name in ("1", "merged", "adapters", "hub"))
    assert made["challenger"] != made["champion"]
    facts = {"models": ("version", "aliases", "scores", "weights_bytes", "commit", "dirty", "checkpoint")}
    facts["history"] = ("number", "at", "who", "action", "model", "from", "to", "outcome", "why")
    for command, names in facts.items():
        now = json.loads(said(capsys, command, "--json"))
        assert of(names, now) == of(names, then(command))
        assert len(now) == 2
    for version in ("champion", "challenger"):
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
