"""A frozen project stays readable: its versions, exports, samples and decisions.

`make.py` made `project.tar.xz` and stored what the commands said. Each test compares this with what they say today.

The lineage of a version holds entirely, also after the code has changed: it has the hash of `code/predict.json`, which
the archive's commits contain, and not that of today's code.
"""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from m3diff.__main__ import main
from m3diff.models.checkpoint import read_sample_limits
from m3diff.stages.train.batches import read_samples
from tests.frozen.make import (
    ARCHIVE,
    AUTO_EXPORTS,
    CHAMPION_EXPORTS,
    DEFAULT_QUESTION,
    EXPORT_FLAGS,
    MODELS,
    PAIRS,
    TRAINED_QUESTION,
    VERSIONS,
    model_options,
    read_captions,
    read_links,
)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("frozen"))


def unpack(root: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    return root


def output_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    capsys.readouterr()
    assert main([*command]) == 0, command
    return capsys.readouterr().out


def captions(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    return read_captions(output_of(capsys, "caption", *PAIRS, *options))


def frozen_output(name: str) -> Any:
    """What a command printed when the archive was made."""
    return json.loads(Path("exports", f"{name}.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_says_what_it_said_then(name, frozen, monkeypatch, capsys):
    monkeypatch.chdir(frozen)
    assert captions(capsys, *model_options(name)) == frozen_output("captions")[name]


def test_exports_say_what_their_model_says_and_models_differ(frozen, monkeypatch):
    monkeypatch.chdir(frozen)
    frozen_captions = frozen_output("captions")
    for name in ("1", *CHAMPION_EXPORTS):
        assert frozen_captions[name] == frozen_captions["champion"], name
    for name in AUTO_EXPORTS:
        assert frozen_captions[name] == frozen_captions["auto merged"], name
    for name in ("champion", "auto merged"):
        assert len(set(frozen_captions[name])) > 1, "a model that tells no pairs apart"
    assert len({tuple(frozen_captions[name]) for name in ("champion", "challenger", "auto merged")}) == 3


@pytest.mark.parametrize("name", ["champion", "hub", "adapters", "auto hub"])
def test_a_model_asks_the_question_of_its_training(name, frozen, monkeypatch, capsys):
    monkeypatch.chdir(frozen)
    frozen_captions = frozen_output("captions")[name]
    assert captions(capsys, *model_options(name), "--question", TRAINED_QUESTION) == frozen_captions
    assert captions(capsys, *model_options(name), "--question", DEFAULT_QUESTION) != frozen_captions


@pytest.mark.parametrize("folder", [*CHAMPION_EXPORTS.values(), *AUTO_EXPORTS.values(), "data/05_model/checkpoint"])
def test_a_manifest_names_the_question_and_the_samples_of_the_training(folder, frozen):
    takes, trained_on = read_sample_limits(frozen / folder)
    assert 2 in takes.images
    assert trained_on.question == TRAINED_QUESTION
    assert trained_on.images == (2,)
    assert trained_on.turns == 1
    assert not trained_on.own_questions


@pytest.mark.parametrize("name", EXPORT_FLAGS)
def test_the_checkpoint_of_the_last_run_is_exported_today(name, frozen, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(frozen)
    out = str(tmp_path / "exported")
    output_of(capsys, "export", out, *EXPORT_FLAGS[name])
    assert captions(capsys, "--model", out) == frozen_output("captions")["challenger"]


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_the_samples_of_a_split_are_read(split, frozen):
    mixture = frozen / "data" / "04_mixture"
    samples = read_samples(mixture / split)
    counts = json.loads((mixture / "report.json").read_text())["datasets"]["minichange"]["samples"]
    assert len(samples) == counts[split] > 0


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


@pytest.mark.parametrize("version", VERSIONS)
def test_the_lineage_of_a_version_holds_as_then(version, frozen, monkeypatch, capsys):
    monkeypatch.chdir(frozen)
    links = read_links(output_of(capsys, "lineage", version))
    assert links == frozen_output("lineage")[version]
    assert len(links) > 12
    assert "ok model code" in links
    assert [link for link in links if not link.startswith("ok ")] == []


def test_the_later_version_is_promoted_and_taken_back(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(unpack(tmp_path))
    output_of(capsys, "promote")
    assert captions(capsys, "--model", "champion") == frozen_output("captions")["challenger"]
    output_of(capsys, "rollback", "--why", "a test")
    assert captions(capsys, "--model", "champion") == frozen_output("captions")["1"]
    assert main(["promote"]) != 0, "a version that was rolled back"
    decisions = json.loads(output_of(capsys, "history", "--json"))
    outcomes = [decision["outcome"] for decision in decisions]
    assert outcomes == ["first", "refused", "promoted", "rolled back", "refused"]
    assert [(decision["from"], decision["to"]) for decision in decisions[:4]] == [(None, 1), (1, 2), (1, 2), (2, 1)]
    assert "rolled" in decisions[4]["why"]
