"""MagicBrush: turns of sessions from Parquet and from the zip of the test split; what must not train does not."""

import re
from pathlib import Path

import pytest
import yaml

from m3diff.datasets.magicbrush import read
from m3diff.records.errors import DataError
from m3diff.settings.load import load_params
from m3diff.settings.profiles import resolve
from m3diff.settings.section import ParamsError
from tests.layouts import brush_row, edit_json, run_ingest, run_validate, save_picture, write_magicbrush, write_shards
from tests.toy import REPOSITORY


def test_a_pair_is_a_turn_and_the_turns_of_a_photo_are_one_scene(tmp_path):
    rows = {row.name: row for row in read(write_magicbrush(tmp_path))}
    assert [(row.name, row.split, row.scene, row.references) for row in rows.values()] == [
        ("242679-1", "train", "242679", ["add a cat"]),
        ("242679-2", "train", "242679", ["make it black"]),
        ("17-1", "val", "17", ["remove the cup"]),
        ("139306-1", "test", "139306", ["add a dog"]),
        ("139306-2", "test", "139306", ["put a hat on it"]),
    ]
    second = rows["242679-2"]
    assert second.before == rows["242679-1"].after, "the second turn begins where the first ended"
    assert second.source == "train-00001-of-00002-2f1a.parquet, row 0"


def test_a_turn_of_test_begins_with_what_the_turn_before_it_made(tmp_path):
    rows = [row for row in read(write_magicbrush(tmp_path)) if row.split == "test"]
    folder = "test/images/139306/139306"
    assert [(row.before, row.after) for row in rows] == [
        (f"{folder}-input.png", f"{folder}-output1.png"),
        (f"{folder}-output1.png", f"{folder}-output2.png"),
    ]
    assert [row.source for row in rows] == [f"test/edit_sessions.json, 139306, turn {n}" for n in (1, 2)]


def test_the_images_of_a_turn_are_its_own_whatever_the_order_of_the_rows(tmp_path):
    root = write_magicbrush(tmp_path)
    turns = [brush_row("242679", turn, "x", turn) for turn in (1, 2)]
    write_shards(root, "train", turns[::-1], 2)
    rows = {row.name: row for row in read(root)}
    for turn in turns:
        row = rows[f"242679-{turn['turn_index']}"]
        assert (row.before.read(), row.after.read()) == (turn["source_img"]["bytes"], turn["target_img"]["bytes"])


def test_without_the_zip_of_test_an_option_leaves_it_out(tmp_path):
    root = write_magicbrush(tmp_path)
    (root / "test/edit_sessions.json").unlink()
    with pytest.raises(DataError, match=r"test/edit_sessions\.json: no such file"):
        list(read(root))
    assert [row.split for row in read(root, test=None)] == ["train", "train", "val"]


def test_a_session_that_is_none_or_does_not_go_on_from_its_last_turn_stays_with_its_place(tmp_path):
    root = write_magicbrush(tmp_path)
    edit_json(root / "test/edit_sessions.json", lambda sessions: sessions["139306"][1].update(input="139306-input.png"))
    edit_json(
        root / "test/edit_sessions.json", lambda sessions: sessions.update({"7": 3, "8": [{"input": "8-input.png"}]})
    )
    bad = [(row.name, row.split, row.scene, row.source, row.fault) for row in read(root) if row.fault]
    skipped = "input: expected '139306-output1.png', what the turn before it made, found '139306-input.png'"
    assert bad == [
        (None, "test", "139306", "test/edit_sessions.json, 139306, turn 2", skipped),
        (None, "test", "7", "test/edit_sessions.json, 7", "turns: expected a list, found a whole number 3"),
        (None, "test", "8", "test/edit_sessions.json, 8, turn 1", "instruction: is missing"),
    ]


def test_a_row_without_a_turn_stays_with_what_is_wrong(tmp_path):
    root = write_magicbrush(tmp_path)
    write_shards(root, "dev", [brush_row("17", 1, "x", 1) | {"turn_index": None}])
    bad = [(row.split, row.source, row.fault) for row in read(root) if row.fault]
    assert bad == [("val", "dev-00000-of-00001-2f1a.parquet, row 0", "turn_index: is missing")]


def test_dev_may_not_train_as_its_authors_ask(tmp_path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    values, _ = resolve(Path("profiles/levir-cc.yaml"))
    entry = {"reader": "magicbrush", "root": "data/01_raw/magicbrush"}
    write_to = tmp_path / "params.yaml"

    def with_splits(splits: list[str]) -> Path:
        values["ingest"]["datasets"]["mine"] = entry | {"train_on": splits}
        write_to.write_text(yaml.safe_dump(values))
        return write_to

    load_params(with_splits(["train"]))
    wanted = "ingest.datasets.mine.train_on: MagicBrush's authors ask that val never trains; write [train]"
    with pytest.raises(ParamsError, match=re.escape(wanted)):
        load_params(with_splits(["train", "val"]))


def test_it_is_ingested_and_validated_whole_and_photos_of_a_session_share_a_split(tmp_path):
    root = write_magicbrush(tmp_path / "raw")
    run_ingest(root, "magicbrush", "magicbrush")
    report = run_validate(tmp_path, max_quarantined_share=0)
    assert report.datasets["magicbrush"].pairs == {"train": 2, "val": 1, "test": 2}


def test_turns_of_a_photo_that_is_also_tested_do_not_train(tmp_path):
    root = write_magicbrush(tmp_path / "raw")
    edit_json(root / "test/edit_sessions.json", lambda sessions: sessions.update({"17": sessions.pop("139306")}))
    edit_json(root / "test/edit_sessions.json", lambda sessions: sessions["17"].pop())
    edit_json(root / "test/edit_sessions.json", lambda sessions: sessions["17"][0].update(input="17-input.png"))
    write_shards(root, "dev", [brush_row("17", 4, "remove the cup", 10)])
    for end in ("input", "output1"):
        save_picture(root / f"test/images/17/17-{end}.png", 3, 90 * (end == "input"))
    run_ingest(root, "magicbrush", "magicbrush")
    assert run_validate(tmp_path).datasets["magicbrush"].pairs == {"train": 2, "test": 1}
