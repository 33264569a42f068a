import json
from pathlib import Path

import pytest

from m3diff.datasets.clevr_change import PUBLISHED, read
from m3diff.records.errors import DataError
from tests.layouts import edit_json, write_clevr, write_json

REAL = Path("../shared/real/clevr_change")


def test_one_scene_gives_a_change_and_a_distractor(tmp_path):
    rows = {row.name: row for row in read(write_clevr(tmp_path))}
    change, distractor = rows["000003.png"], rows["000003.png_n"]
    assert change.before == distractor.before == "images/CLEVR_default_000003.png"
    assert change.after == "sc_images/CLEVR_semantic_000003.png"
    assert distractor.after == "nsc_images/CLEVR_nonsemantic_000003.png"
    assert change.scene == distractor.scene == "000003"
    assert (change.change_types, distractor.change_types) == (["color", "size"], ["none"])
    assert change.references == ["the cube of 000003 turned red", "it became red"]
    assert distractor.references == ["nothing has changed", "no change was made"]


def test_rows_follow_the_splits_file_a_change_and_its_distractor_side_by_side(tmp_path):
    rows = list(read(write_clevr(tmp_path)))
    assert [(row.name, row.split) for row in rows[:3]] == [
        ("000003.png", "train"),
        ("000003.png_n", "train"),
        ("000005.png", "train"),
    ]
    assert [row.split for row in rows] == ["train"] * 6 + ["val"] * 2 + ["test"] * 4
    assert rows[0].source == "change_captions.json, CLEVR_default_000003.png"
    assert rows[1].source == "no_change_captions.json, CLEVR_default_000003.png"
    assert rows[2].before == "images/CLEVR_default_000005.png"


def test_a_scene_that_is_no_number_keeps_its_row_with_its_place(tmp_path):
    root = write_clevr(tmp_path)
    edit_json(root / "splits.json", lambda splits: splits["val"].append("9"))
    bad = [row for row in read(root) if row.fault]
    assert [(row.name, row.split, row.source, row.fault) for row in bad] == [
        (None, "val", "splits.json, val[1]", "scene: expected a number from 0, found text '9'")
    ]


def test_captions_under_a_strange_key_keep_their_row(tmp_path):
    root = write_clevr(tmp_path)
    edit_json(root / "change_captions.json", lambda captions: captions.update({"photo.png": ["x"]}))
    (stray,) = [row for row in read(root) if row.fault]
    assert (stray.name, stray.scene, stray.split) == ("photo.png", "photo.png", None)
    assert stray.fault == "key: expected 'CLEVR_default_<six digits>.png', found 'photo.png'"
    assert stray.source == "change_captions.json, photo.png"


def test_types_that_are_no_lists_of_names_are_refused(tmp_path):
    root = write_clevr(tmp_path)
    for wrong in ("000003.png", [3]):
        write_json(root / "type_mapping.json", {"color": wrong})
        with pytest.raises(DataError, match=r"type_mapping\.json: 'color': expected a list of image names"):
            list(read(root))


def test_a_byte_order_mark_is_no_fault(tmp_path):
    root = write_clevr(tmp_path)
    path = root / "splits.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert len(list(read(root))) == 12


@pytest.mark.parametrize("keep", [0, 1, 40, -1])
def test_truncated_json_names_file_and_place(tmp_path, keep):
    root = write_clevr(tmp_path / "raw")
    path = root / "change_captions.json"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"change_captions\.json: .*fetch it again"):
        list(read(root))


def test_a_scene_without_captions_and_captions_without_a_split_keep_their_rows(tmp_path):
    root = write_clevr(tmp_path)
    edit_json(root / "change_captions.json", lambda captions: captions.pop("CLEVR_default_000003.png"))
    edit_json(root / "splits.json", lambda splits: splits["train"].remove(5))
    faults = [(row.name, row.fault) for row in read(root) if row.fault]
    assert faults == [
        ("000003.png", "captions: change_captions.json has no key 'CLEVR_default_000003.png'"),
        ("CLEVR_default_000005.png", "split: the scene is in no list of splits.json"),
        ("CLEVR_default_000005.png_n", "split: the scene is in no list of splits.json"),
    ]


@pytest.mark.skipif(not REAL.is_dir(), reason="the real split files are not beside the project")
def test_the_real_splits_count_to_the_unit(tmp_path):
    for name in ("splits.json", "type_mapping.json"):
        (tmp_path / name).write_bytes((REAL / name).read_bytes())
    splits = json.loads((tmp_path / "splits.json").read_text())
    keys = [f"CLEVR_default_{scene:06d}.png" for scenes in splits.values() for scene in scenes]
    for name in ("change_captions.json", "no_change_captions.json"):
        write_json(tmp_path / name, {key: ["words"] for key in keys})
    counts: dict[tuple[str, str], int] = {}
    for row in read(tmp_path):
        assert row.fault is None
        (change_type,) = row.change_types
        counts[row.split, change_type] = counts.get((row.split, change_type), 0) + 1
    kinds = ("color", "material", "add", "drop", "move", "none")
    assert [counts["train", kind] for kind in kinds] == [6764, 6768, 6771, 6766, 6761, 33830]
    assert [counts["val", kind] for kind in kinds] == [397, 398, 398, 398, 397, 1988]
    assert [counts["test", kind] for kind in kinds] == [797, 797, 797, 797, 797, 3985]
    pairs = {
        split: sum(count for (own, _), count in counts.items() if own == split) for split in ("train", "val", "test")
    }
    assert pairs == PUBLISHED.pairs()
