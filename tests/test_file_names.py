"""Test names of files and folders that are not UTF-8, as old cameras, archives and Windows shares create them."""

import os
from pathlib import Path

import pytest

from m3diff.commands.inspect import check
from m3diff.records.errors import DataError, command_to_read_again, is_utf8, shell_word
from m3diff.serving.caption import find_inputs
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import ingest
from tests.errors import Message, raises
from tests.layouts import save_picture

ENCODINGS = ["latin-1", "cp1252", "cp437", "utf-16-le"]


def write_dataset(root: Path, encoding: str) -> None:
    for number, name in enumerate(("café.png", "thé.png")):
        picture = save_picture(root / f"{number}.png", number)
        code = name.encode(encoding).replace(b"\0", b"")
        os.rename(picture, os.path.join(os.fsencode(root), code))
    (root / "pairs.csv").write_text("before,after,captions,split\ncafé.png,thé.png,it fell,train\n", "utf-8")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_data_check_names_files_whose_names_are_not_utf8_with_the_remedy(encoding, tmp_path):
    write_dataset(tmp_path / "raw", encoding)
    lines, is_sound = check(tmp_path / "raw", {})
    assert not is_sound
    remedies = [line for line in lines if "convmv" in line]
    assert len(remedies) == 1
    assert "\\x" in remedies[0]
    remedies[0].encode()  # can be printed anywhere


def test_a_single_file_whose_name_is_not_utf8_is_the_example_in_the_remedy(tmp_path):
    write_dataset(tmp_path / "raw", "latin-1")
    os.remove(os.path.join(os.fsencode(tmp_path / "raw"), "thé.png".encode("latin-1")))
    lines, _ = check(tmp_path / "raw", {})
    example = "café.png".encode("latin-1")
    assert Message("check.file_names_not_utf8", files=1, example=example).in_text("\n".join(lines))


def test_ingest_counts_images_whose_names_are_not_utf8_as_missing(tmp_path):
    write_dataset(tmp_path / "raw", "latin-1")
    entry = DatasetEntry(reader="pairs", root=tmp_path / "raw")
    report = ingest("mine", entry, tmp_path / "cache.parquet", tmp_path / "records")
    assert report.unread_images == 2


@pytest.mark.parametrize("command", ["check", "ingest"])
def test_a_root_whose_name_is_not_utf8_is_refused_by_name(command, tmp_path):
    root = tmp_path / os.fsdecode(b"r\xe9al")
    root.mkdir()
    (root / "pairs.csv").write_text("before,after,captions,split\na.png,b.png,it fell,train\n")
    entry = DatasetEntry(reader="pairs", root=root)
    commands = {
        "check": lambda: check(root, {}),
        "ingest": lambda: ingest("mine", entry, tmp_path / "cache", tmp_path / "records"),
    }
    with raises(DataError, "datasets.folder_name_not_utf8", value=os.fsencode(root)) as refused:
        commands[command]()
    str(refused.value).encode()  # can be printed anywhere


def test_two_folders_of_names_that_are_not_utf8_are_paired(tmp_path):
    name = os.fsdecode(b"caf\xe9.png")
    for number, folder in enumerate("ab"):
        save_picture(tmp_path / folder / "x.png", number).rename(tmp_path / folder / name)
    assert [pair.images[0].name for pair in find_inputs(tmp_path / "a", tmp_path / "b")] == [name]


WORDS = {
    "plain": ("a/b.png", "a/b.png"),
    "a space": ("a b.png", "'a b.png'"),
    "a quote": ("it's", "'it'\"'\"'s'"),
    "UTF-8": ("café", "café"),
    "Latin-1": (os.fsdecode(b"caf\xe9 1'.png"), "$'caf\\xe9\\x201\\x27.png'"),
    "a newline": ("one\ntwo.png", "$'one\\x0atwo.png'"),
    "an option": ("-rf", "./-rf"),
}


@pytest.mark.parametrize("case", WORDS.values(), ids=WORDS.keys())
def test_a_path_is_one_word_of_a_shell(case):
    path, word = case
    if path != "café":
        assert shell_word(path) == word
    else:
        assert is_utf8(path)


def test_dvc_reads_a_file_again_by_its_name_and_a_folder_by_all_of_its_files(tmp_path):
    assert command_to_read_again(tmp_path / "a.png") == f"`touch -c {tmp_path}/a.png && dvc repro`"
    assert command_to_read_again(tmp_path) == f"`find -L {tmp_path} -type f -exec touch -c {{}} + && dvc repro`"
