"""Test that a damaged file ends a command with one line that names the file and a remedy, and without a traceback."""

import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.records.schemas import SAMPLE_SCHEMA
from tests.errors import Message
from tests.tiny import BASE
from tests.toy import REPOSITORY

TRAIN = Path("data/04_mixture/train/0.parquet")
TEST = Path("data/04_mixture/test/0.parquet")
SCORES = Path("data/07_report/scores.parquet")
BASE_COPY = Path("data/00_base")
WEIGHTS = BASE_COPY / "model.safetensors"
CONFIG = BASE_COPY / "config.json"
TOKENIZER = BASE_COPY / "tokenizer.json"
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "a page": lambda data: b"<!DOCTYPE html><html>404: not found</html>",
    "a pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "another JSON": lambda data: b"{}",
}

CASES = [
    (command, file, damage, code)
    for command, file, damages, code in (
        ("plan", TRAIN, ("cut off", "emptied", "a page"), "files.unreadable_output"),
        ("export-llava out", TRAIN, ("cut off", "a page"), "files.unreadable_output"),
        ("predict", TEST, ("cut off", "emptied"), "files.unreadable_output"),
        ("compare data/07_report data/07_report", SCORES, ("cut off", "a page"), "compare.unreadable_scores"),
        ("plan", WEIGHTS, ("cut off", "emptied", "a page", "a pointer"), "models.not_safetensors"),
        ("train", WEIGHTS, ("cut off", "a page"), "models.not_safetensors"),
        ("train", CONFIG, ("cut off", "emptied", "a page"), "models.not_json"),
        ("train", TOKENIZER, ("cut off", "a pointer"), "models.not_json"),
        ("train", TOKENIZER, ("another JSON",), "files.unreadable"),
    )
    for damage in damages
]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(BASE, BASE_COPY)
    sample = {"id": "minichange/0#0", "record": "minichange/0", "dataset": "minichange", "split": "train"}
    sample |= {"image_set": "minichange/0", "question": "What has changed?", "answer": "a cup is gone"}
    sample |= {"history": [{"question": "Is it a room?", "answer": "yes"}]}
    rows = pl.DataFrame([sample | {"images": [{"uri": name, "sha256": bytes(32)} for name in ("a.png", "b.png")]}])
    for file, schema in ((TRAIN, SAMPLE_SCHEMA), (TEST, SAMPLE_SCHEMA), (SCORES, SAMPLE_SCHEMA)):
        file.parent.mkdir(parents=True)
        rows.select(schema.names).write_parquet(file)
    (tmp_path / "data/04_mixture/val").mkdir()
    shutil.copytree(REPOSITORY / "profiles", "profiles")
    return tmp_path


@pytest.mark.parametrize(("command", "file", "damage", "code"), CASES)
def test_a_damaged_file_is_reported_in_one_line(project, capsys, command, file, damage, code):
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    if command == "predict":
        checkpoint = project / "data/05_model/checkpoint"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text('{"files": {}}')
    assert main(["--params", "profiles/embedded.yaml", *command.split()]) == DATA_REFUSED
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert str(file) in last_line
    assert Message(code).in_text(last_line)
