"""The versions, exports and captions of a frozen project stay as they were.

`project.tar.xz` was made once: a git repository with DVC's cache, an MLflow store with two versions of a tiny model,
the record of decisions, exports, and the captions of each model. Parameters and the record have another form today, so
the fixture converts these two.
"""

import json
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from m3diff.__main__ import main
from m3diff.provenance.git import git
from m3diff.registry.decisions import BRANCH, COUNT_TAG
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
    remove_unknown_params(root / "params.yaml")
    convert_record(root)
    return root


def remove_unknown_params(file: Path) -> None:
    """Remove the parameters that do not exist any more, and rename others, as the error message asks a person to do."""
    values = yaml.safe_load(file.read_text())
    with pytest.raises(ParamsError) as refused:
        load_params(file)
    for fault in refused.value.fields["faults"]:
        if fault.code not in ("settings.unknown_key", "settings.renamed_key"):
            continue
        *sections, key = fault.fields["key"].split(".")
        section = values
        for name in sections:
            section = section[name]
        value = section.pop(key)
        if fault.code == "settings.renamed_key":
            section[fault.fields["name"]] = value
    file.unlink()
    file.write_text(yaml.safe_dump(values, sort_keys=False))
    load_params(file)


def convert_record(root: Path) -> None:
    """Write each line of the archive's `decisions.jsonl` as a commit, and the last commit to the tag in MLflow."""
    tree = git("hash-object", "-w", "-t", "tree", "--stdin", cwd=root)
    lines = git("show", f"{BRANCH}:decisions.jsonl", cwd=root).splitlines()
    tip = git("commit-tree", tree, cwd=root, stdin=lines[0].encode())
    for line in lines[1:]:
        tip = git("commit-tree", tree, "-p", tip, cwd=root, stdin=line.encode())
    git("update-ref", BRANCH, tip, cwd=root)
    with closing(sqlite3.connect(root / "services/mlflow/mlflow.db")) as store, store:
        store.execute("UPDATE registered_model_tags SET value = ? WHERE key = ?", (f"{len(lines)} {tip}", COUNT_TAG))


def output_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    capsys.readouterr()
    assert main([*command]) == 0, command
    return capsys.readouterr().out


def captions(capsys: pytest.CaptureFixture[str], model: str) -> list[str]:
    rows = output_of(capsys, "caption", *PAIRS, "--model", model).splitlines()
    return [json.loads(row)["caption"] for row in rows]


def frozen_output(name: str) -> Any:
    """What a command printed when the archive was made."""
    return json.loads(Path("exports", f"{name}.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_what_it_said_then(name, frozen, monkeypatch, capsys):
    monkeypatch.chdir(frozen)
    assert captions(capsys, MODELS[name]) == frozen_output("captions")[name]


def test_exports_say_what_their_version_says_and_versions_differ(frozen, monkeypatch):
    monkeypatch.chdir(frozen)
    frozen_captions = frozen_output("captions")
    for name in ("1", "merged", "adapters", "hub"):
        assert frozen_captions[name] == frozen_captions["champion"], name
    assert frozen_captions["challenger"] != frozen_captions["champion"]


@pytest.mark.parametrize(
    ("command", "facts"),
    [
        ("models", ("version", "aliases", "scores", "weights_bytes", "commit", "dirty", "checkpoint")),
        ("history", ("number", "at", "who", "action", "model", "from", "to", "outcome", "why")),
    ],
    ids=["models", "history"],
)
def test_versions_and_decisions_are_listed_as_then(command, facts, frozen, monkeypatch, capsys):
    monkeypatch.chdir(frozen)
    rows = json.loads(output_of(capsys, command, "--json"))
    frozen_rows = frozen_output(command)
    assert len(rows) == 2
    assert [[row[fact] for fact in facts] for row in rows] == [[row[fact] for fact in facts] for row in frozen_rows]


@pytest.mark.parametrize("version", ["champion", "challenger"])
def test_the_lineage_of_a_version_holds(version, frozen, monkeypatch, capsys):
    """Except its code: its tag is the hash of a folder, and today a version has that of `code/predict.json`."""
    monkeypatch.chdir(frozen)
    assert main(["lineage", version]) == 3
    links = capsys.readouterr().out.splitlines()
    assert len(links) > 12
    faults = [link for link in links if not link.startswith("ok")]
    assert [fault.split()[:3] for fault in faults] == [["missing", "model", "code"]]


def test_the_later_version_is_promoted_and_taken_back(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(unpacked(tmp_path))
    output_of(capsys, "promote")
    assert captions(capsys, "champion") == frozen_output("captions")["challenger"]
    output_of(capsys, "rollback", "--why", "a test")
    assert captions(capsys, "champion") == frozen_output("captions")["1"]
    assert main(["promote"]) != 0, "a version that was rolled back"
    decisions = json.loads(output_of(capsys, "history", "--json"))
    outcomes = [decision["outcome"] for decision in decisions]
    assert outcomes == ["first", "refused", "promoted", "rolled back", "refused"]
    assert [(decision["from"], decision["to"]) for decision in decisions[:4]] == [(None, 1), (1, 2), (1, 2), (2, 1)]
    assert "rolled" in decisions[4]["why"]
