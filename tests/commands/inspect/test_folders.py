"""What `m3diff data check` says of folders as people have them: read, asked about, refused or mended."""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from m3diff.commands.inspect import check
from m3diff.commands.inspect.reading import EMPTY_IMAGES, MISSING_IMAGES, SAME_IMAGE_TWICE
from m3diff.datasets.doubts import as_yaml
from m3diff.records.errors import DataError, Fault
from tests.commands.inspect.folders import (
    FolderCase,
    check_folder,
    count_lines,
    draw_image_in_other_folder,
    draw_images_in_folders,
    draw_images_of_two_cameras,
    draw_no_images,
    draw_numbered_images,
    printed_entries,
)
from tests.errors import Message, raises
from tests.layouts import run_ingest, save_picture, write_json

# A folder's name in which a shell and a pattern would each take some signs for something else
AWKWARD_NAME = "it's #1 & 100% Köln [x] $HOME"
HEADER = "before,after,captions,split"
ROW = "0.png,0_2.png,it fell,train"

numbered = partial(FolderCase, draw=draw_numbered_images)

READ = [
    # how a table is written
    numbered("semicolons", ("';'", "delimiter: ;}")),
    numbered("byte_order_mark", ("train         1           1",)),
    numbered("rows_below_a_key", ("'data'", "rows: data")),
    numbered("sep_line_of_excel", ("train         1           1",)),
    # names of columns
    numbered("german_names", ("captions: Änderung",)),
    FolderCase("masks_beside", ("{captions: caption}",)),
    FolderCase("images_in_objects", ("before: input.url, after: output.url, captions: text, split: subset",)),
    # splits
    numbered("without_split", ("split: train}",)),
    FolderCase("one_file_of_a_split", ("split: val}",)),
    numbered("splits_of_other_names", ("splits: {Train: train, dev: val, testing: test, validation: val}",)),
    # which table
    FolderCase("file_for_each_split", ("manifest: {train: train.csv, val: val.csv, test: test.csv}",)),
    FolderCase("documented_table", ("archive.json",)),
    # which captions
    FolderCase("numbered_columns", ("[caption1, caption2]", "     3")),
    FolderCase("instruction_that_is_the_caption", ("captions: instruction",)),
    # captions that are lists, or none
    FolderCase("words_in_half_of_the_rows"),
    numbered("json_list_in_quotes", ("1           2",)),
    FolderCase("brackets_in_a_sentence"),
    numbered("semicolon_in_one_of_six", ("train         1           6",)),
    FolderCase(
        "placeholder_in_training", (Message("datasets.captions_say_nothing", tested=0), "no_caption: ['?', TODO, nan]")
    ),
    FolderCase("empty_caption_in_training", ("empty captions: 2",)),
    FolderCase("words_that_say_something", ("{captions: caption}",)),
    # conversations
    FolderCase("question_of_the_task", ("captions: conversations",)),
    numbered("llava", ("like pairs", "conversations, id: null}", "split: train")),
    FolderCase("several_questions", ("captions: conversations", "questions of their own: 4 of 4 rows")),
    FolderCase("question_in_a_column", ("question: question", "questions of their own: 4 of 4 rows")),
    # conversations and histories as JSON texts
    FolderCase(
        "conversations_in_csv",
        (
            "columns: {images: images, captions: conversations, id: null}",
            "images a row: 2 (2), 1 (1, the first is data.csv, line 3), 0 (1, the first is data.csv, line 4)",
            "turns a row: 1 (3), 2 (1, the first is data.csv, line 3)",
        ),
    ),
    FolderCase(
        "conversations_about_one_image",
        ("columns: {images: image, captions: messages}", "images a row: 1 (2), 0 (1, the first is data.csv, line 3)"),
    ),
    FolderCase("conversations_without_images", ("columns: {images: null, captions: messages}", "images a row: 0 (2)")),
    FolderCase("history_in_csv", ("history: history", "turns a row: 2 (1), 1 (1, the first is data.csv, line 3)")),
]

FOLDERS_WITH_QUESTIONS = [
    FolderCase(
        "folders_that_tell_nothing",
        ("before: 'cam_l/{name}.png'", "before: 'cam_r/{name}.png'"),
        draw=draw_images_of_two_cameras,
    ),
    FolderCase(
        "two_caption_columns",
        ("captions: caption}", "captions: description}", "captions: [caption, description]"),
    ),
    FolderCase("tasks_in_a_column", ("where: {task: edit}",)),
    FolderCase(
        "bar_between_captions",
        (Message("datasets.possible_separator", value="|", captions=1), "separator: '|'", "separator: ''"),
    ),
    FolderCase("semicolons_between_captions", ("separator: ;",)),
    FolderCase("placeholder_in_test", (Message("datasets.captions_say_nothing", value="None", tested=1),)),
    FolderCase("empty_caption_in_test", ("no_caption: ['']",)),
]

IN_DOUBT = [
    FolderCase("printed_list", (Message("datasets.captions_are_printed_lists", path="data.csv, line 2", rows=1),)),
    FolderCase("printed_array", (Message("datasets.captions_are_printed_lists", path="data.csv, line 2"),)),
    FolderCase(
        "captions_cut_into_words",
        (Message("datasets.captions_are_single_words", words=["the", "lamp", "is", "gone"], rows=3),),
    ),
]

OTHER_FOLDER = partial(FolderCase, draw=draw_image_in_other_folder)


def found_at(value: str, file: str) -> Message:
    """The advice that a missing image is at another path."""
    return Message("check.image_at_other_path", value=value, file=file)


def found_below(folder: str, value: str) -> Message:
    """The advice that the paths begin with a folder of another computer."""
    return Message("check.image_below_foreign_folder", value=value, file="a b/0.png", folder=folder)


NAMED_ON_OTHER_COMPUTER = [
    (OTHER_FOLDER("path_of_another_computer"), "/mnt/x.y/"),
    (OTHER_FOLDER("path_out_of_the_root"), "../"),
]

REFUSED = [
    # tables that cannot be read
    numbered(
        "commas_not_quoted",
        ("line 2", Message("datasets.wrong_number_of_fields", key="row", value=5, expected=4, delimiter=",")),
    ),
    numbered("header_alone", ("NO PAIR",)),
    numbered("columns_that_tell_nothing", (Message("datasets.no_columns_of_images", columns=["x", "y"]),)),
    numbered("without_captions", (Message("datasets.no_column_of_captions", columns=["before", "after"]),)),
    numbered("captions_that_are_a_number", ("a whole number 7",)),
    FolderCase(
        "marks_without_a_column_of_images",
        (Message("datasets.no_columns_of_images", columns=["name", "messages"]),),
    ),
    FolderCase(
        "conversations_printed_by_python",
        ("data.csv, line 3", Message("datasets.invalid_json_in_cell", key="conversations", position=3)),
    ),
    numbered("folder_of_card", (Message("check.folder_of_card"),)),
    # folders without a table
    FolderCase(
        "empty_folder",
        (Message("check.unknown_layout", names=["nothing"]), Message("check.no_pairs", header=HEADER)),
        draw=draw_no_images,
    ),
    FolderCase("excel_file_called_csv", (Message("files.archive_or_spreadsheet"),), draw=draw_no_images),
    FolderCase("archive", (Message("check.archive", path="pairs.tar.gz"),), draw=draw_no_images),
    FolderCase(
        "table_in_gzip",
        (Message("files.gzip", path="my pairs.jsonl.gz", command="gunzip 'my pairs.jsonl.gz'"),),
        draw=lambda root: (root / "my pairs.jsonl.gz").touch(),
    ),
    FolderCase(
        "one_folder_of_images",
        (Message("check.images_without_table", header=HEADER),),
        draw=lambda root: draw_numbered_images(root / "images"),
    ),
    FolderCase(
        "two_folders_of_images",
        (
            Message("check.matching_images_without_table", header=HEADER, before="before", after="after", pairs=4),
            f"\n    {HEADER}\n    before/0.png,after/0.png,WHAT CHANGED,train\n",
            "m3diff caption ",
        ),
        draw=lambda root: draw_images_in_folders(root, "before", "after"),
    ),
    FolderCase(
        "two_folders_in_no_order",
        (Message("check.matching_images_in_no_order", before="left", after="right", pairs=4),),
        draw=lambda root: draw_images_in_folders(root, "left", "right"),
    ),
    # images that are not where the rows say
    numbered(
        "missing_image",
        (
            f"{MISSING_IMAGES}: 1",
            Message("check.image_of_row_is_missing", value="9.png", source="pairs.json, record 0"),
        ),
    ),
    OTHER_FOLDER("path_of_another_computer", (found_below("/mnt/x.y/", "/mnt/x.y/a b/0.png"),)),
    OTHER_FOLDER("path_of_windows", (found_at(r"C:\data\a b\0.png", "a b/0.png"),)),
    OTHER_FOLDER("file_address", (found_at("file:///mnt/x/a%20b/0.png", "a b/0.png"),)),
    OTHER_FOLDER("path_out_of_the_root", (found_below("../", "../a b/0.png"),)),
    OTHER_FOLDER("backslashes", (found_at(r"a b\0.png", "a b/0.png"),)),
    numbered("absolute_path_out_of_the_root", (Message("check.image_outside_root", value="/mnt/9.png"),)),
    numbered("capitals_in_a_name", (found_at("0.PNG", "0.png"),)),
    numbered("one_image_on_both_sides", (f"{SAME_IMAGE_TWICE}: 1", "0.png")),
    numbered("image_without_a_byte", (f"{EMPTY_IMAGES}: 1",)),
]

MENDED_BY_COMMAND = [
    (numbered("latin_1"), "datasets.not_utf8"),
    (numbered("gzip_called_csv"), "files.gzip"),
]

NAMED_OTHERWISE = "check.columns_differ_by_file"
CAPTION_COLUMNS = {"captions": ["instruction", "prompt"]}
MENDED_BY_OPTION = [
    (numbered("unknown_split", ("'part 3'",)), "check.unknown_splits", {"splits": {"part 3": "train"}}),
    (numbered("rows_that_are_no_pairs"), "check.rows_without_pair", {"pairs_only": True}),
    (FolderCase("captions_named_by_file"), NAMED_OTHERWISE, {"columns": CAPTION_COLUMNS}),
    (FolderCase("captions_named_by_header"), NAMED_OTHERWISE, {"columns": CAPTION_COLUMNS}),
    (
        FolderCase("images_named_by_file"),
        NAMED_OTHERWISE,
        {"columns": {"before": ["input", "source"], "after": ["output", "target"]}},
    ),
    (numbered("id_twice"), "check.ids_of_several_pairs", {"columns": {"id": None}}),
]


def says(output: str, line: str | Message) -> bool:
    return line.in_text(output) if isinstance(line, Message) else line in output


def assert_says(output: str, case: FolderCase) -> None:
    missing = [line for line in case.lines if not says(output, line)]
    assert missing == [], output


def faults_of_unknown_layout(root: Path) -> list[Fault]:
    """What is wrong with a folder that has none of the layouts."""
    with raises(DataError, "check.unknown_layout", path=root) as refused:
        check(root, {})
    return refused.value.fields["faults"]


def assert_ingested(root: Path, options: dict[str, Any]) -> None:
    report = run_ingest(root, "pairs", "own", **options)
    assert report.faults == 0
    assert report.pairs


@pytest.mark.parametrize("case", READ, ids=str)
def test_a_folder_is_read_without_a_question(tmp_path, case):
    is_sound, output = check_folder(case.write(tmp_path / "raw"))
    assert_says(output, case)
    assert "  ASK " not in output
    assert is_sound, output


@pytest.mark.parametrize("case", READ, ids=str)
def test_the_printed_entry_reads_the_folder_as_it_was_checked(tmp_path, case):
    root = case.write(tmp_path / "raw")
    _, output = check_folder(root)
    (entry,) = printed_entries(output)
    is_sound, output_with_entry = check_folder(root, entry)
    assert is_sound, output_with_entry
    # A caption that stands for no caption is counted before the entry says so
    if "no_caption" not in output:
        assert count_lines(output_with_entry) == count_lines(output)
    assert_ingested(root, entry["options"])


@pytest.mark.parametrize("case", FOLDERS_WITH_QUESTIONS, ids=str)
def test_a_folder_that_is_not_clear_is_asked_about(tmp_path, case):
    root = case.write(tmp_path / "raw")
    is_sound, output = check_folder(root)
    assert_says(output, case)
    assert "  ASK " in output
    assert not is_sound


@pytest.mark.parametrize("case", FOLDERS_WITH_QUESTIONS, ids=str)
def test_each_printed_answer_reads_the_folder_or_leads_to_a_further_question(tmp_path, case):
    root = case.write(tmp_path / "raw")
    _, output = check_folder(root)
    for entry in printed_entries(output):
        is_sound, output_with_entry = check_folder(root, entry)
        if is_sound:
            assert_ingested(root, entry["options"])
        else:
            assert "  ASK " in output_with_entry, output_with_entry


@pytest.mark.parametrize("case", IN_DOUBT, ids=str)
def test_captions_that_are_a_printed_list_are_refused_by_check_and_by_ingest(tmp_path, case):
    root = case.write(tmp_path / "raw")
    is_sound, output = check_folder(root)
    assert_says(output, case)
    assert "  ASK " not in output
    assert not is_sound
    with pytest.raises(DataError) as refused:
        run_ingest(root, "pairs", "own", **printed_entries(output)[0]["options"])
    assert_says(str(refused.value), case)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_a_folder_that_cannot_be_used_is_refused_with_a_remedy(tmp_path, case):
    is_sound, output = check_folder(case.write(tmp_path / "raw"))
    assert_says(output, case)
    assert "  ASK " not in output
    assert not is_sound


@pytest.mark.parametrize(("case", "code"), MENDED_BY_COMMAND, ids=str)
def test_the_command_for_a_file_mends_it(tmp_path, case, code):
    root = case.write(tmp_path / AWKWARD_NAME)
    (fault,) = faults_of_unknown_layout(root)
    assert fault.code == code
    assert f"`{fault.fields['command']}`" in str(fault)
    subprocess.run(fault.fields["command"], shell=True, check=True)
    table = next(root.rglob("*.csv*"))
    _, output = check_folder(table.parent)
    (entry,) = printed_entries(output)
    is_sound, output = check_folder(table.parent, entry)
    assert is_sound, output


@pytest.mark.parametrize(("case", "code", "options"), MENDED_BY_OPTION, ids=str)
def test_the_printed_option_mends_the_entry(tmp_path, case, code, options):
    root = case.write(tmp_path / AWKWARD_NAME)
    is_sound, output = check_folder(root)
    assert_says(output, case)
    assert Message(code, options=as_yaml(options)).in_text(output)
    assert "  ASK " not in output
    assert not is_sound
    (entry,) = printed_entries(output)
    entry["options"] = entry.get("options", {}) | options
    is_sound, output = check_folder(root, entry)
    assert is_sound, output


@pytest.mark.parametrize(("case", "folder"), NAMED_ON_OTHER_COMPUTER, ids=str)
def test_deleting_the_folder_of_another_computer_mends_the_table(tmp_path, case, folder):
    root = case.write(tmp_path / "raw")
    table = root / "pairs.csv"
    is_sound, output = check_folder(root)
    assert not is_sound
    assert Message("check.image_below_foreign_folder", folder=folder, tables=[table.name]).in_text(output)
    table.write_text(table.read_text().replace(folder, ""))
    is_sound, output = check_folder(root)
    assert is_sound, output


def save_to_disk(folder: Path, splits: Sequence[str]) -> None:
    """Write pairs with the library `datasets`: a DatasetDict with a pair per split, or a Dataset if there are none."""
    import datasets  # takes seconds, which the quick tests of this file need not

    draw_images_in_folders(folder.parent)
    parts = {}
    for number, split in enumerate(splits or ["train"]):
        paths = {"before": [str(folder.parent / f"p/{number}.png")], "after": [str(folder.parent / f"q/{number}.png")]}
        part = datasets.Dataset.from_dict(paths | {"caption": [f"lamp {number} is gone"]})
        for column in paths:
            part = part.cast_column(column, datasets.Image())
        parts[split] = part
    saved = datasets.DatasetDict(parts) if splits else parts["train"]
    saved.save_to_disk(str(folder))


SAVED = {"Dataset": [], "DatasetDict": ["train", "validation", "test"]}


@pytest.mark.slow
@pytest.mark.parametrize("splits", SAVED.values(), ids=SAVED)
def test_the_command_for_a_saved_dataset_exports_its_pairs(tmp_path, splits):
    folder = tmp_path / AWKWARD_NAME / "saved"
    save_to_disk(folder, splits)
    (fault,) = [fault for fault in faults_of_unknown_layout(folder) if fault.code == "check.saved_by_datasets"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", fault.fields["command"]], check=True, env=environment)
    out = folder.with_name("saved-parquet")
    (entry,) = printed_entries(check_folder(out)[1])
    is_sound, output = check_folder(out, entry)
    assert is_sound, output
    pairs_by_split = dict(line.split()[:2] for line in count_lines(output))
    assert [pairs_by_split[split] for split in ("train", "val", "test")] == (["1"] * 3 if splits else ["1", "0", "0"])


@pytest.mark.parametrize("names", [["state.json", "dataset_info.json"], ["dataset_dict.json"]], ids=SAVED)
def test_a_saved_dataset_is_no_table_and_is_found_from_the_folder_above(tmp_path, names):
    folder = tmp_path / "above" / "saved"
    folder.mkdir(parents=True)
    for name in names:
        write_json(folder / name, {"features": {"caption": {"dtype": "string"}}})
    (folder / "data-00000-of-00001.arrow").touch()
    for checked_folder in (folder, folder.parent):
        faults = faults_of_unknown_layout(checked_folder)
        assert [fault.fields["path"] for fault in faults if fault.code == "check.saved_by_datasets"] == [folder]
        assert {fault.code for fault in faults} <= {"check.saved_by_datasets", "check.no_pairs"}


def test_a_saved_dataset_is_exported_beside_the_folder_that_is_checked_from_inside(tmp_path, monkeypatch):
    (tmp_path / "saved").mkdir()
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "saved" / name).write_text("{}")
    monkeypatch.chdir(tmp_path / "saved")
    (fault,) = faults_of_unknown_layout(Path())
    assert str(tmp_path / "saved-parquet") in fault.fields["command"]


def test_a_folder_above_the_table_is_refused_with_the_command_for_it(tmp_path):
    root = numbered("folder_too_high", draw=lambda root: draw_numbered_images(root / "my")).write(
        tmp_path / AWKWARD_NAME
    )
    *_, fault = faults_of_unknown_layout(root)
    assert fault.code == "check.table_nearby"
    command = fault.fields["command"]
    words = subprocess.run(f"printf '%s\\n' {command}", shell=True, capture_output=True, text=True, check=True)
    folder = Path(words.stdout.splitlines()[-1])
    assert folder == root / "my"
    (entry,) = printed_entries(check_folder(folder)[1])
    is_sound, output = check_folder(folder, entry)
    assert is_sound, output


def test_a_folder_below_the_table_is_refused_with_the_command_for_it(tmp_path):
    (tmp_path / "pairs.csv").write_text(f"{HEADER}\n{ROW}\n")
    draw_numbered_images(tmp_path / "raw")
    *_, fault = faults_of_unknown_layout(tmp_path / "raw")
    assert fault.code == "check.table_nearby"
    assert fault.fields["file"] == tmp_path / "pairs.csv"


def test_a_pointer_of_dvc_is_refused(tmp_path):
    # DVC would read a pointer in tests/data as its own
    (tmp_path / "images.dvc").write_text("outs:")
    fault, *_ = faults_of_unknown_layout(tmp_path)
    assert fault.code == "check.pointer_of_dvc"
    assert fault.fields["path"] == "images.dvc"


def test_a_link_out_of_the_root_is_refused_unless_the_entry_follows_links(tmp_path):
    root = tmp_path / AWKWARD_NAME
    root.mkdir()
    draw_numbered_images(root)
    (root / "pairs.csv").write_text(f"{HEADER}\n{ROW}\n")
    (root / "0.png").rename(tmp_path / "0.png")
    (root / "0.png").symlink_to(tmp_path / "0.png")
    is_sound, output = check_folder(root)
    assert not is_sound
    assert "  ASK " not in output
    assert "follow_links" in output
    (entry,) = printed_entries(output)
    is_sound, output = check_folder(root, entry | {"follow_links": True})
    assert is_sound, output


@pytest.mark.parametrize("form", ["{root}/a b/0.png", "{address}/a b/0.png"], ids=["path", "file address"])
def test_an_absolute_path_into_the_root_is_read(tmp_path, form):
    root = tmp_path / "raw"
    root.mkdir()
    draw_numbered_images(root)
    save_picture(root / "a b/0.png", 7)
    path = form.format(root=root, address=root.as_uri())
    (root / "pairs.csv").write_text(f"{HEADER}\n{path},0_2.png,it fell,train\n")
    is_sound, output = check_folder(root)
    assert is_sound, output
    assert "  ASK " not in output
    assert "2 images, 0 of them missing" in output
    (entry,) = printed_entries(output)
    is_sound, output_with_entry = check_folder(root, entry)
    assert is_sound, output_with_entry
    assert count_lines(output_with_entry) == count_lines(output)
    assert_ingested(root, entry.get("options", {}))
