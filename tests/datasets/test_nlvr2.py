"""NLVR2: its lines in their schema, the true sentences of dev counted, and what is easily read wrong."""

import json

from m3diff.datasets.nlvr2 import read
from tests.layouts import nlvr_line, run_ingest, run_validate, write_nlvr


def test_a_pair_s_references_are_its_true_sentences_and_a_pair_without_one_is_left_out(tmp_path):
    rows = list(read(write_nlvr(tmp_path)))
    assert [(row.name, row.split, row.references) for row in rows] == [
        ("train-1-0", "train", ["two dogs"]),
        ("dev-850-0", "val", ["a bus"]),
        ("test1-0-1", "test", ["a cup", "a mug"]),
        ("test1-7-0", "test", ["x"]),
    ]
    assert not any(row.fault for row in rows)
    merged = rows[2]
    assert (merged.scene, merged.source, merged.raw_rows) == ("test1-0", "test1.json, line 1 and test1.json, line 3", 2)


def test_left_is_before_and_train_images_are_in_numbered_folders(tmp_path):
    train, dev, test, _ = read(write_nlvr(tmp_path))
    assert (train.before, train.after) == (
        "images/train/38/train-1-0-img0.png",
        "images/train/38/train-1-0-img1.png",
    )
    assert (dev.before, dev.after) == ("images/dev/dev-850-0-img0.png", "images/dev/dev-850-0-img1.png")
    assert test.before == "images/test1/test1-0-1-img0.png"
    assert next(read(tmp_path, images="photos")).before == "photos/train/38/train-1-0-img0.png"


def test_the_true_sentences_of_dev_are_counted(tmp_path):
    """6,982 lines, 3,551 of them true; labels are text, of which no one is false by itself."""
    root = write_nlvr(tmp_path)
    labels = ["True"] * 3_551 + ["False"] * 3_431
    lines = [nlvr_line(f"dev-{n // 4}-{n % 4}-0", f"sentence {n}", label) for n, label in enumerate(labels)]
    assert len(lines) == 6_982
    (root / "data/dev.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dev = [row for row in read(root) if row.split == "val"]
    assert not any(row.fault for row in dev)
    assert sum(len(row.references) for row in dev) == 3_551
    assert {text for row in dev for text in row.references} == {f"sentence {n}" for n in range(3_551)}


def test_labels_and_identifiers_of_another_kind_stay_with_their_place(tmp_path):
    root = write_nlvr(tmp_path)
    lines = [
        nlvr_line("dev-1-0-0", "x", True),
        nlvr_line("dev-1-0", "x", "True"),
        nlvr_line("train-1-0-0", "x", "False"),
    ]
    told = [json.dumps(line) for line in lines]
    (root / "data/dev.json").write_text("\n".join([*told, "{", ""]))
    lost = {key: value for key, value in nlvr_line("train-5-0-0", "x", "True").items() if key != "directory"}
    (root / "data/train.json").write_text(json.dumps(lost))
    bad = [(row.name, row.split, row.source, row.fault) for row in read(root) if row.fault]
    identifier = "identifier: expected dev-<set>-<pair>-<sentence>, found text"
    assert bad[:4] == [
        (None, "train", "train.json, line 1", "directory: is missing"),
        (None, "val", "dev.json, line 1", "label: expected text, found true"),
        (None, "val", "dev.json, line 2", f"{identifier} 'dev-1-0'"),
        (None, "val", "dev.json, line 3", f"{identifier} 'train-1-0-0'"),
    ]
    assert (len(bad), bad[4][2]) == (5, "dev.json, line 4")
    assert "not valid JSON" in bad[4][3]
    (root / "data/dev.json").write_text(json.dumps(nlvr_line("dev-1-0-0", "x", "true")))
    assert [row.fault for row in read(root) if row.split == "val"] == [
        "label: expected 'True' or 'False', found text 'true'"
    ]


def test_a_png_that_is_none_inside_is_read_as_what_it_is(tmp_path):
    run_ingest(write_nlvr(tmp_path / "raw"), "nlvr2", "nlvr2")
    report = run_validate(tmp_path, max_quarantined_share=0)
    assert report.datasets["nlvr2"].pairs == {"train": 1, "val": 1, "test": 2}
    assert report.bad_images == 0
