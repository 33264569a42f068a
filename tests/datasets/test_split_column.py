"""`data check` finds the split's column by its values, in any language."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from m3diff.datasets import pairs
from m3diff.datasets.filters import SHORT_SPLIT_ALIASES, SPLIT_ALIASES, plain_name
from m3diff.datasets.guess import TableGuess, guess_table
from m3diff.records.schemas import SPLITS

PLAIN = ["train", "train", "val", "test"]


def write(root: Path, columns: Mapping[str, Sequence[str]], name: str = "paare.csv") -> TableGuess:
    """Write a table of pairs like a German spreadsheet, with these columns, and return the guess of how to read it."""
    count = len(next(iter(columns.values())))
    with (root / name).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, delimiter=";")
        table.writerow(["Vorher", "Nachher", "Beschreibung", *columns])
        for number in range(count):
            sides = [f"vorher/{number}.jpg", f"nachher/{number}.jpg", f"the lamp {number} is out"]
            table.writerow([*sides, *(column[number] for column in columns.values())])
    return guess_table(root)


def splits_of(root: Path, options: Mapping) -> list[str]:
    rows = list(pairs.read(root, **options))
    assert [row.fault for row in rows if row.fault] == []
    return [row.split for row in rows]


RECOGNISED = {
    "German header": ("Teil", PLAIN),
    "German values": ("Menge", ["Training", "Training", "Validierung", "Test"]),
    "Spanish": ("conjunto", ["entrenamiento", "entrenamiento", "validación", "prueba"]),
    "French": ("jeu", ["entraînement", "entrainement", "validation", "test"]),
    "Italian": ("x7", ["addestramento", "addestramento", "validazione", "test"]),
    "Portuguese": ("x7", ["treino", "treino", "validação", "teste"]),
    "Chinese": ("划分", ["训练", "训练", "验证", "测试"]),
    "Japanese": ("分割", ["学習", "訓練", "検証", "テスト"]),
    "Korean": ("x7", ["훈련", "훈련", "검증", "테스트"]),
    "a header that tells nothing": ("x7", ["training", "Train", "valid", "testing"]),
    "three letters": ("Satz", ["trn", "trn", "dev", "tst"]),
    "two letters below a header of splits": ("Teilmenge", ["tr", "tr", "va", "te"]),
    "COCO's years": ("source", ["train2014", "train2017", "val2014", "test2015"]),
    "with a noun": ("Part", ["train set", "training data", "val-split", "test_set"]),
    "eval beside val": ("Teil", ["train", "train", "val", "eval"]),
    "eval beside test": ("Teil", ["train", "train", "eval", "test"]),
}


@pytest.mark.parametrize(("header", "values"), RECOGNISED.values(), ids=RECOGNISED)
def test_a_column_whose_values_are_all_names_of_splits_is_the_split(tmp_path, header, values):
    guessed = write(tmp_path, {header: values})
    assert guessed.doubts == []
    assert splits_of(tmp_path, guessed.options) == PLAIN


def test_a_table_that_is_sorted_by_split_is_read_to_its_end(tmp_path):
    values = [*["train"] * 300, *["val"] * 20, *["test"] * 20]
    guessed = write(tmp_path, {"x7": values})
    assert guessed.doubts == []
    assert splits_of(tmp_path, guessed.options) == values


def test_one_split_in_all_rows_below_a_header_of_splits_is_the_split(tmp_path):
    guessed = write(tmp_path, {"Teil": ["test"] * 4})
    assert guessed.doubts == []
    assert splits_of(tmp_path, guessed.options) == ["test"] * 4


def test_the_note_on_the_split_has_the_column_and_the_count_of_each_value(tmp_path):
    notes = "\n".join(write(tmp_path, {"Teil": PLAIN}).notes)
    assert "split is Teil" in notes
    assert "'train' (2), 'val' (1), 'test' (1)" in notes


UNCERTAIN_COLUMNS = {
    "another value beside": {"Teil": ["train", "val", "test", "unklar"]},
    "another value beside, in a language": {"划分": ["训练", "验证", "测试", "其他"]},
    "a blank cell": {"Teil": ["train", "val", "test", ""]},
    "three numbers": {"Teil": ["0", "0", "1", "2"]},
    "two numbers": {"Aufteilung": ["1", "1", "1", "2"]},
    "numbers below the documented header": {"split": ["0", "0", "1", "2"]},
    "floats below the documented header": {"split": ["0.0", "0.0", "1.0", "2.0"]},
    "two letters, which may be languages": {"lang": ["tr", "tr", "te", "te"]},
    "all rows test below another header": {"x7": ["test"] * 4},
    "eval beside train alone": {"Teil": ["train", "train", "train", "eval"]},
    "two columns that differ": {"Teil": PLAIN, "Menge": PLAIN[::-1]},
    "the documented header says something else": {"split": ["a", "b", "a", "b"], "Teil": PLAIN},
}


@pytest.mark.parametrize("columns", UNCERTAIN_COLUMNS.values(), ids=UNCERTAIN_COLUMNS)
def test_what_may_be_a_split_is_one_question_and_each_answer_can_be_read(tmp_path, columns):
    guessed = write(tmp_path, columns)
    assert len(guessed.doubts) == 1
    entries = guessed.entries()
    assert len(entries) > 1
    for options in entries:
        splits = splits_of(tmp_path, options)
        assert splits
        if "split" in options.get("columns", {}) or "splits" in options:
            assert {*splits} <= {*SPLITS}


def test_most_rows_train_in_the_first_answer_on_numbers(tmp_path):
    val_is_0, val_is_1, not_the_split = write(tmp_path, {"Teil": ["2", "2", "0", "1"]}).entries()
    assert val_is_0["splits"] == {"2": "train", "0": "val", "1": "test"}
    assert val_is_1["splits"] == {"2": "train", "0": "test", "1": "val"}
    assert not_the_split["split"] == "train"


def test_rows_of_other_values_can_be_left_out_or_trained_or_be_no_split(tmp_path):
    entries = write(tmp_path, {"Teil": ["train", "val", "test", "unklar"]}).entries()
    assert [splits_of(tmp_path, options) for options in entries] == [
        ["train", "val", "test"],
        ["train", "val", "test", "train"],
        ["train"] * 4,
    ]


NO_SPLIT = {
    "classes of objects": {"label": ["train", "bus", "car", "bus"]},
    "numbers below another header": {"label": ["0", "1", "2", "0"]},
    "train in every row below another header": {"kind": ["train"] * 4},
    "a fold": {"fold": ["1", "2", "3", "4"]},
}


@pytest.mark.parametrize("columns", NO_SPLIT.values(), ids=NO_SPLIT)
def test_a_column_of_something_else_is_neither_the_split_nor_asked_about(tmp_path, columns):
    guessed = write(tmp_path, columns)
    assert guessed.doubts == []
    assert guessed.options["split"] == "train"
    assert "split" not in guessed.options["columns"]


def test_two_columns_that_agree_are_no_question(tmp_path):
    guessed = write(tmp_path, {"Teil": PLAIN, "split": PLAIN})
    assert guessed.doubts == []
    assert splits_of(tmp_path, guessed.options) == PLAIN


def test_a_column_that_is_not_read_is_named(tmp_path):
    guessed = write(tmp_path, {"Teil": PLAIN, "Kamera": ["k1", "k2", "k1", "k2"], "Notiz": ["a b", "c d", "", ""]})
    notes = "\n".join(guessed.notes)
    assert "columns that are not read: Kamera" in notes
    assert "Notiz" in notes
    assert "not read: Teil" not in notes


@pytest.mark.parametrize(
    ("folder", "file", "answers"),
    [
        ("test", "pairs.csv", [{"split": "test"}, {"split": "train"}]),
        ("Validation", "pairs.csv", [{"split": "val"}, {"split": "train"}]),
        ("test", "train.csv", []),
        ("train", "pairs.csv", []),
        ("test_photos", "pairs.csv", []),
    ],
)
def test_a_folder_that_is_called_like_a_split_is_asked_about(folder, file, answers, tmp_path):
    (tmp_path / folder).mkdir()
    guessed = write(tmp_path / folder, {"id": ["1"]}, file)
    assert guessed.options["split"] == (answers[0]["split"] if answers else "train")
    assert [doubt.answers for doubt in guessed.doubts] == [answers] * bool(answers)


def test_a_single_file_of_one_split_is_read_as_a_whole(tmp_path):
    guessed = write(tmp_path, {"id": ["1"]}, "train.csv")
    assert guessed.options["manifest"] == "train.csv"
    assert guessed.doubts == []


def test_files_of_train_and_eval_are_asked_which_split_eval_is(tmp_path):
    write(tmp_path, {"id": ["1"]}, "train.csv")
    guessed = write(tmp_path, {"id": ["2"]}, "eval.csv")
    assert [options["manifest"] for options in guessed.entries()] == [
        {"train": "train.csv", "val": "eval.csv"},
        {"train": "train.csv", "test": "eval.csv"},
    ]


def test_a_file_eval_beside_train_and_val_is_the_test_split(tmp_path):
    for number, name in enumerate(("train.csv", "val.csv", "eval.csv")):
        guessed = write(tmp_path, {"id": [str(number)]}, name)
    assert guessed.doubts == []
    assert guessed.options["manifest"] == {"train": "train.csv", "val": "val.csv", "test": "eval.csv"}


def test_aliases_of_splits_are_plain_and_each_is_of_one_split():
    aliases = [*SPLIT_ALIASES.values(), *SHORT_SPLIT_ALIASES.values()]
    names = [name for listed in aliases for name in listed]
    assert [name for name in names if plain_name(name) != name] == []
    assert len(names) == len({*names})
