"""Files that stages write: digests of folders, reports, and copies."""

import hashlib
import json
from pathlib import Path

import pytest

from m3diff.records.copies import copy_folder
from m3diff.records.files import StageReport, sha256_of_folder, write_atomic


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base" / "inner").mkdir(parents=True)
    (tmp_path / "base" / "z.json").write_text("{}")
    (tmp_path / "base" / "inner" / "a.txt").write_text("a")
    return tmp_path / "base"


def test_the_digest_of_a_folder_is_that_of_its_files_in_the_order_of_their_paths(folder):
    lines = []
    for name, content in (("inner/a.txt", b"a"), ("z.json", b"{}")):
        lines.append(f"{name}\0{hashlib.sha256(content).hexdigest()}\n")
    assert sha256_of_folder(folder) == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_the_digest_of_a_folder_does_not_depend_on_where_it_is(folder, tmp_path):
    digest = sha256_of_folder(folder)
    assert sha256_of_folder(folder.rename(tmp_path / "moved")) == digest


def test_the_whole_content_is_on_disk_before_the_file_gets_its_name(tmp_path, monkeypatch):
    file = tmp_path / "a.json"
    contents: list[bytes] = []

    def record_content(handle: int) -> None:
        assert not file.exists()
        (temporary,) = tmp_path.iterdir()
        contents.append(temporary.read_bytes())

    monkeypatch.setattr("os.fsync", record_content)
    write_atomic(file, "{}")
    assert contents == [b"{}"]
    assert file.read_bytes() == b"{}"


def test_a_report_is_readable_text_and_is_returned_as_it_was_written(tmp_path):
    report = StageReport(stage="Prüfung", rows_in=3, rows_out=2)
    assert report.write(tmp_path / "report.json") == report
    text = (tmp_path / "report.json").read_text("utf-8")
    assert json.loads(text) == {"stage": "Prüfung", "rows_in": 3, "rows_out": 2}
    assert text.splitlines()[1].strip() == '"stage": "Prüfung",', "a line for each field, in the letters of its value"


def test_a_folder_is_copied_below_folders_that_do_not_exist_yet(folder, tmp_path):
    target = copy_folder(folder, tmp_path / "new" / "copy")
    assert sha256_of_folder(target) == sha256_of_folder(folder)
