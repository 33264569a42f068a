"""The rules for questions, dialogues and image sets of zero, one or two images."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from m3diff.records.errors import DataError
from tests.errors import raises
from tests.layouts import make_entry, run_ingest, run_validate, save_picture

COLUMNS = {"images": "images", "captions": "messages"}


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def about(images: list[str], *texts: str, split: str = "train") -> dict[str, Any]:
    return {"images": images, "messages": talk(*texts), "split": split}


def validate(tmp_path: Path, rows: list[dict[str, Any]], columns: Any = COLUMNS, **changes: Any) -> tuple[Any, dict]:
    """Ingest and validate rows. Return the report, and the rules that each quarantined record breaks."""
    root = tmp_path / "raw"
    root.mkdir(exist_ok=True)
    for number in range(6):
        save_picture(root / f"{number}.png", number)
    (root / "m.json").write_text(json.dumps(rows))
    options = {"manifest": "m.json", "columns": columns}
    run_ingest(root, "pairs", "own", **options)
    limits = {"max_quarantined_share": 1.0, "allow_lost_test_pairs": True, "near_duplicate_max_diff": None}
    entries = {"own": make_entry("pairs", root, **options, expected_pairs=changes.pop("expected_pairs", None))}
    report = run_validate(tmp_path, entries, **limits | changes)
    quarantine = pl.read_parquet(tmp_path / "clean/quarantine")
    return report, dict(quarantine.select("id", "rules").iter_rows())


PAIR = ["0.png", "1.png"]


def test_a_question_breaks_rules_alone_and_not_with_its_neighbours(tmp_path):
    rows = [
        about(PAIR, "How many?", "2"),
        about(PAIR, "<image><image>", "2"),
        about(PAIR, "Which?", "", "Why?", "x"),
        about(PAIR, "", "x", "Why?", "x"),
        about(PAIR, "See <b>this</b>?", "x"),
        about(PAIR, "And?", "see <image>"),
        about(PAIR, "Which?", "<|im_end|>", "Why?", "x"),
        about(PAIR, "What is in <image> and <image>?", "x"),
        about(PAIR, "Nothing?", ""),
    ]
    report, broken = validate(tmp_path, rows)
    assert broken == {
        "own/0.png|1.png?1": ["question_given"],
        "own/0.png|1.png?2": ["history_given"],
        "own/0.png|1.png?3": ["history_given"],
        "own/0.png|1.png?4": ["no_markup"],
        "own/0.png|1.png?5": ["no_markup"],
        "own/0.png|1.png?6": ["no_markup"],
    }
    counts = report.datasets["own"]
    assert counts.pairs == {"train": 1}
    assert counts.questions == {"train": 3}


def test_every_named_image_must_be_sound_and_no_other_is_expected(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/bad.png").write_bytes(b"no image")
    rows = [
        about([], "A?", "x"),
        about(["0.png"], "A?", "x"),
        about(["gone.png"], "A?", "x"),
        about(["bad.png"], "A?", "x"),
        about(["0.png", "bad.png"], "A?", "x"),
        about(["gone.png", "0.png"], "A?", "x"),
    ]
    _, broken = validate(tmp_path, rows)
    assert broken == {
        "own/gone.png?0": ["images_present"],
        "own/bad.png?0": ["image_1_decodes"],
        "own/0.png|bad.png?0": ["image_2_decodes"],
        "own/gone.png|0.png?0": ["images_present"],
    }
    reasons = pl.read_parquet(tmp_path / "clean/quarantine")["reason"].to_list()
    names = [reason.partition(":")[0] for reason in reasons]
    assert names == ["image", "image", "after", "before"]


def test_an_answer_does_not_say_that_the_images_differ(tmp_path):
    report, broken = validate(tmp_path, [about(["0.png", "0.png"], "Is there a car?", "yes")])
    assert broken == {}
    assert report.findings == []


def test_questions_leak_if_all_of_their_images_are_in_a_test_set(tmp_path):
    rows = [
        about(PAIR, "A?", "x", split="test"),
        about(["2.png"], "A?", "x", split="test"),
        about(PAIR[::-1], "B?", "x"),
        about(["2.png"], "B?", "x"),
        about(PAIR[:1], "B?", "x"),
        about(["2.png", "3.png"], "B?", "x"),
        about(["4.png"], "B?", "x"),
        about([], "A?", "x"),
    ]
    report, broken = validate(tmp_path, rows, max_leaked_share=1.0)
    assert {name for name, rules in broken.items() if "not_in_test" in rules} == {"own/1.png|0.png?0", "own/2.png?1"}
    assert report.overlaps["train in test"] == 2


def test_a_copy_of_a_single_image_that_looks_the_same_leaks(tmp_path):
    root = tmp_path / "raw"
    root.mkdir()
    save_picture(root / "copy.bmp", 2)
    rows = [about(["2.png"], "A?", "x", split="test"), about(["copy.bmp"], "B?", "x"), about(["4.png"], "B?", "x")]
    _, broken = validate(tmp_path, rows, near_duplicate_max_diff=2, max_leaked_share=1.0)
    assert broken == {"own/copy.bmp?0": ["not_in_test"]}


def test_expected_pairs_are_image_sets(tmp_path):
    rows = [about(PAIR, "A?", "x"), about(PAIR, "B?", "x"), about(["2.png"], "A?", "x")]
    validate(tmp_path, rows, expected_pairs={"train": 2})
    with raises(DataError, "validate.data_refused"):
        validate(tmp_path, rows, expected_pairs={"train": 3})


@pytest.mark.parametrize("number", [1, 2])
def test_a_file_that_changed_since_ingest_is_named(tmp_path, number):
    validate(tmp_path, [about(["0.png", "1.png"][:number], "A?", "x")])
    save_picture(tmp_path / "raw" / f"{number - 1}.png", 5)
    with raises(DataError, "validate.image_changed", side="image" if number == 1 else "after"):
        run_validate(tmp_path, {"own": make_entry("pairs", tmp_path / "raw")})
