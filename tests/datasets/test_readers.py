import json
from collections import Counter
from pathlib import Path

import polars as pl
import pytest

from m3diff.datasets import DATASETS, birds_to_words, clevr_dc, iedit, omnidiff, pairs, spot_the_diff
from m3diff.datasets.files import describe, parse_json, read_json, read_splits, read_text
from m3diff.datasets.spec import Published, fault_in, fault_of_scene
from m3diff.datasets.tables import read_table, texts
from m3diff.records.errors import DataError
from tests.layouts import (
    edit_json,
    run_ingest,
    run_validate,
    save_picture,
    write_birds,
    write_clevr_dc,
    write_iedit,
    write_json,
    write_spot,
)

REAL = Path("../shared/real")
real = pytest.mark.skipif(not REAL.is_dir(), reason="the real annotations are not beside the project")


def link_real(folder: Path, root: Path, **names: str) -> Path:
    """The real files of a dataset under other names, e.g. train="annotations/train.json"."""
    for name, target in names.items():
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        (root / target).write_bytes((folder / f"{name}.json").read_bytes())
    return root


def assert_published(rows: list, published: Published) -> None:
    """Pairs, references and empty references of the splits that are beside the project are the published ones."""
    assert not any(row.fault for row in rows)
    for split in ("train", "val"):
        own, count = [row for row in rows if row.split == split], getattr(published, split)
        texts_of = [text for row in own for text in row.references]
        assert (len(own), len(texts_of), texts_of.count("")) == (count.pairs, count.references, count.empty)
        distinct = sum(len(set(_respaced(row.references)) - {""}) for row in own)
        assert len(texts_of) - count.empty - distinct == count.repeated


def _respaced(texts: list[str]) -> list[str]:
    """As validate leaves them."""
    return [" ".join(text.split()) for text in texts]


def test_clevr_dc_names_are_not_padded_but_ids_are(tmp_path):
    rows = list(clevr_dc.read(write_clevr_dc(tmp_path)))
    assert [(row.name, row.before, row.references, row.split) for row in rows] == [
        ("000009.png", "bef/9.png", ["a"], "train"),
        ("000010.png", "bef/10.png", ["b", "b2"], "train"),
        ("047999.png", "bef/47999.png", ["c"], "test"),
    ]


@real
def test_clevr_dc_counts_to_the_unit(tmp_path):
    link_real(REAL / "clevr_dc", tmp_path, split="split.json")
    scenes = [scene for split in json.loads((tmp_path / "split.json").read_text()).values() for scene in split]
    write_json(tmp_path / "captions.json", {str(scene): ["words"] for scene in scenes})
    rows = list(clevr_dc.read(tmp_path))
    assert Counter(row.split for row in rows) == clevr_dc.PUBLISHED.pairs()
    assert not any(row.fault for row in rows)


def test_spot_merges_the_sentences_of_all_records_of_an_id(tmp_path):
    rows = {row.name: row for row in spot_the_diff.read(write_spot(tmp_path))}
    assert rows["235.png"].references == ["the suv is gone", "a man left", "", "it is dark"]
    assert rows["235.png"].source == "annotations/train.json, record 0 and 2 and 3"
    assert rows["235.png"].raw_rows == 3
    assert rows["235.png"].after == "resized_images/235_2.png"
    assert rows["9.png"].references == [""]


@real
def test_spot_counts_to_the_unit(tmp_path):
    files = {split: f"annotations/{split}.json" for split in ("train", "val")}
    link_real(REAL / "spot_the_diff", tmp_path, **files)
    write_json(tmp_path / "annotations/test.json", [])
    rows = list(spot_the_diff.read(tmp_path))
    assert_published(rows, spot_the_diff.PUBLISHED)
    assert sum(row.raw_rows for row in rows) == 9_524 + 1_634
    only_empty = Counter(row.split for row in rows if set(row.references) == {""})
    assert only_empty == {"train": 37, "val": 4}


def test_iedit_is_keyed_by_uid_and_its_middle_file_is_called_valid(tmp_path):
    rows = list(iedit.read(write_iedit(tmp_path)))
    assert [row.name for row in rows if row.before == "images/a.jpg"] == ["Zhopped_1", "Zhopped_2", "Reddit_7"]
    assert [row.split for row in rows] == ["train"] * 3 + ["val"] * 2 + ["test"] * 2


def test_iedit_pairs_that_are_in_test_do_not_train(tmp_path):
    run_ingest(write_iedit(tmp_path / "raw"), "iedit", "iedit")
    report = run_validate(tmp_path, max_quarantined_share=0)
    leaked = pl.read_parquet(tmp_path / "clean/quarantine.parquet").select("id", "rules", "reason").rows()
    reason = "leak: test pair iedit/Reddit_6 has the same images, so this one may not train"
    assert leaked == [("iedit/Reddit_3", ["not_in_test"], reason)]
    assert report.leaks == 1
    assert report.datasets["iedit"].pairs == {"train": 2, "val": 2, "test": 2}


def test_a_validation_split_that_trains_is_held_against_the_test_set_too(tmp_path):
    run_ingest(write_iedit(tmp_path / "raw"), "iedit", "iedit", train_on=["train", "val"])
    report = run_validate(tmp_path)
    assert report.leaks == 2
    assert report.datasets["iedit"].pairs == {"train": 3, "test": 2}


@real
def test_iedit_counts_to_the_unit(tmp_path):
    link_real(REAL / "iedit", tmp_path, train="train.json", valid="valid.json")
    write_json(tmp_path / "test.json", [])
    rows = list(iedit.read(tmp_path))
    assert_published(rows, iedit.PUBLISHED)
    pairs = {split: Counter((r.before, r.after) for r in rows if r.split == split) for split in ("train", "val")}
    assert (len(pairs["train"]), len(pairs["val"])) == (2_507, 357)
    assert sum(1 for count in pairs["train"].values() if count > 1) == 460
    assert len(pairs["train"].keys() & pairs["val"].keys()) == 2


def test_birds_are_keyed_by_photo_and_rows_of_a_pair_are_merged(tmp_path):
    rows = [
        ("11", "22", "train", 'Animal 1 is "bigger"'),
        ("22", "11", "train", "other way"),
        ("11", "22", "train", "b"),
    ]
    write_birds(tmp_path / "birds-to-words-v1.0.tsv", rows)
    first, second = birds_to_words.read(tmp_path)
    assert (first.name, first.references) == ("11_22", ['Animal 1 is "bigger"', "b"])
    assert (first.before, first.after, first.raw_rows) == ("images/11.jpg", "images/22.jpg", 2)
    assert (second.name, second.references) == ("22_11", ["other way"])


def test_a_description_may_hold_tabs_and_line_ends_in_quotes(tmp_path):
    write_birds(tmp_path / "birds-to-words-v1.0.tsv", [("1", "2", "val", "a\tb\nc"), ("3", "4", "val", "d")])
    assert [row.references for row in birds_to_words.read(tmp_path)] == [["a\tb\nc"], ["d"]]


def test_a_bird_without_a_photo_number_stays_with_a_fault(tmp_path):
    write_birds(tmp_path / "birds-to-words-v1.0.tsv", [("1", "gone", "val", "a"), ("3", "4", "val", "d")])
    faults = [(row.source, row.fault) for row in birds_to_words.read(tmp_path) if row.fault]
    wanted = "image URL: expected https://www.inaturalist.org/photos/<number>"
    assert faults == [("birds-to-words-v1.0.tsv, line 2", wanted)]


@real
def test_birds_count_to_the_unit(tmp_path):
    rows = []
    for split in ("train", "val"):
        for line in (REAL / f"birds_to_words/cwj1412_{split}.json").read_text().split("\n"):
            if line:
                row = json.loads(line)
                found = [row["description"]] if split == "train" else row["description"]
                rows += [(row["img1"], row["img2"], split, " ".join(tokens)) for tokens in found]
    write_birds(tmp_path / "birds-to-words-v1.0.tsv", rows)
    found = list(birds_to_words.read(tmp_path))
    assert_published(found, birds_to_words.PUBLISHED)
    assert sum(row.raw_rows for row in found) == 12_890 + 1_556
    per_pair = {split: Counter(len(r.references) for r in found if r.split == split) for split in ("train", "val")}
    assert per_pair["train"] == {3: 2, 4: 682, 5: 1_969, 8: 2, 9: 5, 10: 25}
    assert per_pair["val"] == {4: 84, 5: 238, 10: 3}


PAIRS = [
    {"before": "a/1.png", "after": "b/1.png", "captions": ["it fell", "down"], "split": "train"},
    {"before": "a/2.png", "after": "b/2.png", "captions": ["gone"], "split": "test"},
]


def write_pairs(root: Path, manifest: str) -> Path:
    frame = pl.DataFrame(PAIRS)
    if manifest.endswith(".parquet"):
        frame.write_parquet(root / manifest)
    elif manifest.endswith(".jsonl"):
        frame.write_ndjson(root / manifest)
    elif manifest.endswith(".json"):
        write_json(root / manifest, PAIRS)
    else:
        flat = frame.with_columns(captions=pl.Series([json.dumps(row["captions"]) for row in PAIRS]))
        flat.write_csv(root / manifest, separator="\t" if manifest.endswith(".tsv") else ",")
    return root


@pytest.mark.parametrize("manifest", ["p.csv", "p.tsv", "p.json", "p.jsonl", "p.parquet"])
def test_a_collection_of_ones_own_reads_the_same_in_every_format(tmp_path, manifest):
    rows = list(pairs.read(write_pairs(tmp_path, manifest), manifest))
    assert [(row.name, row.split, row.references, row.fault) for row in rows] == [
        ("a/1.png|b/1.png", "train", ["it fell", "down"], None),
        ("a/2.png|b/2.png", "test", ["gone"], None),
    ]


def test_rows_of_one_pair_are_merged_and_contradictions_kept_apart(tmp_path):
    lines = [
        "id,img_a,img_b,text,split",
        "7,x.png,y.png,one,train",
        "7,x.png,y.png,two,train",
        "7,x.png,z.png,three,train",
    ]
    (tmp_path / "m.csv").write_text("\n".join(lines))
    columns = {"before": "img_a", "after": "img_b", "captions": "text"}
    bad, good = pairs.read(tmp_path, "m.csv", columns)
    assert (good.name, good.references, good.raw_rows) == ("7", ["one", "two"], 2)
    assert bad.fault == "id: m.csv, line 2 has the same id, but other images, split or scene"


def test_omnidiff_takes_its_columns_from_params_and_its_types_from_the_paper(tmp_path):
    rows = [
        {
            "image1": "s/a.jpg",
            "image2": "s/b.jpg",
            "caption": "The mug left.",
            "types": ["OCR", "Colour"],
            "split": "val",
        },
        {"image1": "s/c.jpg", "image2": "s/d.jpg", "caption": "The cup left.", "types": ["magic"], "split": "val"},
    ]
    write_json(tmp_path / "real.json", rows)
    columns = {"before": "image1", "after": "image2", "captions": "caption", "change_types": "types"}
    good, bad = omnidiff.read(tmp_path, "real.json", columns)
    assert (good.references, good.change_types, good.fault) == (["The mug left."], ["ocr", "color"], None)
    assert bad.fault.startswith("change_types: magic is none of viewpoint, ")


def test_a_dataset_is_an_entry_in_params_not_a_change_of_code(tmp_path):
    root = write_pairs(tmp_path / "own", "p.csv") if (tmp_path / "own").mkdir() is None else None
    assert len(list(DATASETS["pairs"].read(root, manifest="p.csv"))) == 2


def test_images_are_read_in_every_format_that_the_datasets_use(tmp_path):
    root = write_iedit(tmp_path / "raw")
    save_picture(root / "images/f.png", 3, mode="RGBA")
    run_ingest(root, "iedit")
    assert run_validate(tmp_path).bad_images == 0


def test_an_annotation_file_that_is_missing_or_a_folder_is_named(tmp_path):
    root = write_spot(tmp_path)
    (root / "annotations/val.json").unlink()
    with pytest.raises(DataError, match=r"annotations/val\.json: no such file"):
        list(spot_the_diff.read(root))
    (root / "annotations/val.json").mkdir()
    with pytest.raises(DataError, match=r"annotations/val\.json: cannot be read: Is a directory"):
        list(spot_the_diff.read(root))


def test_rows_that_are_no_records_stay_with_what_is_wrong(tmp_path):
    root = write_iedit(tmp_path)
    edit_json(root / "train.json", lambda rows: rows.extend([7, {"img0": "a.jpg"}]))
    edit_json(root / "train.json", lambda rows: rows[0].update(uid=""))
    bad = [(row.name, row.split, row.source, row.fault) for row in iedit.read(root) if row.fault]
    assert bad == [
        (None, "train", "train.json, record 0", "uid: is empty"),
        (None, "train", "train.json, record 3", "record: expected an object, found a whole number 7"),
        (None, "train", "train.json, record 4", "img1: is missing"),
    ]
    spot = write_spot(tmp_path / "spot")
    edit_json(spot / "annotations/val.json", lambda rows: rows[0].update(sentences="gone"))
    (broken,) = [row for row in spot_the_diff.read(spot) if row.fault]
    assert (broken.split, broken.fault) == ("val", "sentences: expected a list, found text 'gone'")
    assert broken.source == "annotations/val.json, record 0"


def test_iedit_images_are_in_the_folder_that_the_option_names(tmp_path):
    (first, *_) = iedit.read(write_iedit(tmp_path), images="photos")
    assert (first.before, first.after, first.scene) == ("photos/a.jpg", "photos/b.gif", "Zhopped_1")
    assert first.source == "train.json, record 0"


def test_clevr_dc_keeps_scenes_that_are_no_number_uncaptioned_or_in_no_split(tmp_path):
    root = write_clevr_dc(tmp_path)
    edit_json(root / "split.json", lambda splits: splits["val"].extend([True, 11]))
    edit_json(root / "captions.json", lambda captions: captions.update({"12": ["x"]}))
    bad = [(row.name, row.split, row.source, row.fault) for row in clevr_dc.read(root) if row.fault]
    assert bad == [
        (None, "val", "split.json, val[0]", "scene: expected a number from 0, found true"),
        ("000011.png", "val", "captions.json, 11", "captions: captions.json has no key '11'"),
        ("12", None, "captions.json, 12", "split: the scene is in no list of split.json"),
    ]


def test_a_scene_is_a_whole_number_from_0():
    assert [fault_of_scene(value) is None for value in (0, 7, -1, True, "3", 2.0, None)] == [True, True] + 5 * [False]


def test_fields_are_checked_in_order_for_presence_type_and_content():
    fields = {"uid": str, "sents": list}
    assert fault_in({"uid": "a", "sents": []}, fields) is None
    assert fault_in(["a"], fields) == "record: expected an object, found a list ['a']"
    assert fault_in({"sents": 3}, fields) == "uid: is missing"
    assert fault_in({"uid": "a", "sents": "b"}, fields) == "sents: expected a list, found text 'b'"
    assert fault_in({"uid": "", "sents": []}, fields) == "uid: is empty"


def test_omnidiff_names_types_in_the_paper_s_words_whatever_the_case(tmp_path):
    types = [[" Color", "TEXT"], ["count", "no change"], ["Add", "remove", "disappear"], ["distractor"], []]
    rows = [
        {"before": f"{n}.jpg", "after": "b.jpg", "captions": "x", "split": "val", "change_types": each}
        for n, each in enumerate(types)
    ]
    write_json(tmp_path / "annotations.json", rows)
    found = list(omnidiff.read(tmp_path))
    assert not any(row.fault for row in found)
    assert [row.change_types for row in found] == [
        ["color", "ocr"],
        ["counting", "none"],
        ["addition", "removal", "disappearance"],
        ["none"],
        [],
    ]


def test_a_manifest_without_splits_takes_the_option_and_its_own_ids_and_scenes_where_it_has_them(tmp_path):
    rows = [
        {"before": "a.png", "after": "b.png", "captions": "x", "id": 7, "scene": "s1", "change_types": "color"},
        {"before": "c.png", "after": "d.png", "captions": '["y", "z"]', "id": "", "scene": ""},
        {"before": "e.png", "after": "f.png", "captions": "[open", "change_types": [3]},
    ]
    write_json(tmp_path / "m.json", rows)
    one, two, three = sorted(pairs.read(tmp_path, "m.json", split="test"), key=lambda row: row.before)
    assert (one.name, one.scene, one.split, one.references, one.change_types) == ("7", "s1", "test", ["x"], ["color"])
    assert (two.name, two.scene, two.references) == ("c.png|d.png", "c.png|d.png", ["y", "z"])
    assert (two.source, two.raw_rows) == ("m.json, record 1", 1)
    assert (three.references, three.change_types) == (["[open"], [])
    assert three.fault == "change_types: expected a list of names"


def test_rows_that_lost_a_column_are_faults_at_their_place_and_the_rest_is_read(tmp_path):
    (tmp_path / "m.jsonl").write_text(
        '{"before": "a.png", "after": "b.png", "captions": ["x"]}\n'
        "not json\n\n"
        '{"before": "a.png", "after": "b.png", "captions": ["x\u2028y"], "split": "val"}\n'
    )
    found = {row.source: row for row in pairs.read(tmp_path, "m.jsonl")}
    assert found["m.jsonl, line 1"].fault == "split: is missing"
    assert "not valid JSON" in found["m.jsonl, line 2"].fault
    assert (found["m.jsonl, line 4"].fault, found["m.jsonl, line 4"].references) == (None, ["x\u2028y"])
    assert len(found) == 3


def test_a_table_s_row_with_too_many_fields_is_a_fault_and_blank_lines_are_none(tmp_path):
    (tmp_path / "m.csv").write_text("before,after\na,b\n\na,b,c\nd,e\n")
    found = list(read_table(tmp_path / "m.csv", ("before", "after")))
    assert [(where, row["before"], fault) for where, row, fault in found] == [
        ("m.csv, line 2", "a", None),
        ("m.csv, line 4", None, "row: has 3 fields, the header 2; quote fields that hold ','"),
        ("m.csv, line 5", "d", None),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.csv", "before\na\n", r"m\.csv: no column after; found before"),
        ("m.csv", "before,after,after\n", r"m\.csv: column after occurs twice; rename one"),
        ("m.csv", 'before,after\n"a,b\n', r"m\.csv: line \d+: not valid CSV: .*; correct the quotes there"),
        ("m.txt", "x", r"m\.txt: unknown kind of manifest; use \.csv"),
        ("m.parquet", "x", r"m\.parquet: cannot be read as Parquet: .*; write it again"),
        ("m.json", '{"a": 1}', r"m\.json: expected a list at the top, found an object"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_named_with_its_remedy(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        list(read_table(tmp_path / name, ("before", "after")))


def test_a_parquet_manifest_that_is_missing_or_has_not_the_columns_is_named(tmp_path):
    with pytest.raises(DataError, match=r"m\.parquet: no such file; correct `manifest` or the root"):
        list(read_table(tmp_path / "m.parquet", ("before",)))
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "m.parquet")
    with pytest.raises(DataError, match=r"m\.parquet: no column before; found a"):
        list(read_table(tmp_path / "m.parquet", ("before",)))
    assert list(read_table(tmp_path / "m.parquet", ("a",))) == [("m.parquet, row 0", {"a": 1}, None)]


def test_texts_are_lists_json_lists_or_one_caption():
    assert [texts(value) for value in (["a"], "a", ' ["a", "b"]', "[a", '{"a": 1}', None)] == [
        ["a"],
        ["a"],
        ["a", "b"],
        ["[a"],
        ['{"a": 1}'],
        None,
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"the file is empty; fetch it again"),
        (b" \n", r"the file is empty; fetch it again"),
        (b'{"a": "\xff"}', r"byte 7 is not UTF-8, .*; convert it: `iconv"),
        (b'{"a": 1', r"line 1 column 8: not valid JSON: .*; it ends too early, fetch it again"),
        (b'{"a": "b', r"line 1 column 7: not valid JSON: .*; it ends too early, fetch it again"),
        (b'{"a": ]}', r"line 1 column 7: not valid JSON: .*; correct it there"),
        (b'{"a": 1, "b": 2, "a": 3}', r"not usable JSON: key 'a' occurs twice; keep one"),
        (b'{"a": NaN}', r"not usable JSON: NaN is no JSON value; use null or remove it"),
        (b"[1]", r"expected an object at the top, found a list \[1\]"),
        (b"null", r"expected an object at the top, found null"),
    ],
)
def test_json_that_cannot_be_trusted_is_refused_with_place_and_remedy(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.json: " + message):
        read_json(tmp_path / "a.json", dict)


def test_text_loses_its_byte_order_mark_and_nothing_else(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf a\r\n")
    assert read_text(tmp_path / "a.txt") == " a\r\n"
    assert parse_json("[1, null]", "here") == [1, None]


def test_splits_are_all_three_in_order_and_one_may_be_empty(tmp_path):
    write_json(tmp_path / "s.json", {"test": [3], "val": [], "train": [1], "dev": [9]})
    assert list(read_splits(tmp_path / "s.json").items()) == [("train", [1]), ("val", []), ("test", [3])]
    write_json(tmp_path / "s.json", {"test": [3], "val": 4})
    with pytest.raises(DataError, match=r"s\.json: no list train or val; expected train, val and test"):
        read_splits(tmp_path / "s.json")


def test_values_are_described_with_their_kind_and_cut():
    assert [describe(value) for value in (None, True, 3, 2.5, "a", [1], {})] == [
        "null",
        "true",
        "a whole number 3",
        "a number 2.5",
        "text 'a'",
        "a list [1]",
        "an object {}",
    ]
    assert describe("x" * 58) == f"text '{'x' * 58}'"
    assert describe("x" * 59) == f"text '{'x' * 56}..."


def test_a_bird_s_source_names_all_its_rows_and_options_name_the_images(tmp_path):
    rows = [("11", "22", "train", "a"), ("33/", "44", "val", "b"), ("11", "22", "train", "c")]
    write_birds(tmp_path / "birds.tsv", rows)
    first, second = birds_to_words.read(tmp_path, "birds.tsv", images="photos", suffix=".png")
    assert (first.source, first.scene, first.split) == ("birds.tsv, line 2 and birds.tsv, line 4", "11_22", "train")
    assert (second.before, second.after, second.source) == ("photos/33.png", "photos/44.png", "birds.tsv, line 3")


def test_a_pair_of_birds_in_two_splits_is_two_rows(tmp_path):
    write_birds(tmp_path / "birds-to-words-v1.0.tsv", [("1", "2", "train", "a"), ("1", "2", "test", "b")])
    assert [(row.split, row.references) for row in birds_to_words.read(tmp_path)] == [("train", ["a"]), ("test", ["b"])]


def test_spot_images_are_where_the_options_say_and_merged_within_a_split_alone(tmp_path):
    root = write_spot(tmp_path)
    edit_json(root / "annotations/val.json", lambda rows: rows.append({"img_id": "235", "sentences": ["x"]}))
    found = [row for row in spot_the_diff.read(root, images="original", suffix=".jpg") if row.name == "235.png"]
    assert [(row.split, len(row.references), row.raw_rows) for row in found] == [("train", 4, 3), ("val", 1, 1)]
    assert (found[0].before, found[0].after, found[0].scene) == ("original/235.jpg", "original/235_2.jpg", "235.png")


def test_omnidiff_passes_the_split_on_and_keeps_a_fault_of_the_table(tmp_path):
    rows = [
        {"before": "a.jpg", "after": "b.jpg", "captions": "x"},
        {"before": "c.jpg", "captions": "y", "change_types": ["size"]},
    ]
    write_json(tmp_path / "annotations.json", rows)
    found = {row.before: row for row in omnidiff.read(tmp_path, split="test")}
    assert (found["a.jpg"].split, found["a.jpg"].fault) == ("test", None)
    assert (found["c.jpg"].fault, found["c.jpg"].change_types) == ("after: is missing", ["size"])


@pytest.mark.parametrize("field", ["split", "scene", "before", "after"])
def test_rows_of_one_id_must_agree_in_split_scene_and_images(tmp_path, field):
    row = {"id": "7", "scene": "s", "before": "a.png", "after": "b.png", "captions": ["x"], "split": "train"}
    write_json(tmp_path / "m.json", [row, row | {field: "other"}, row | {"captions": ["y"]}])
    bad, good = pairs.read(tmp_path, "m.json")
    assert bad.fault == "id: m.json, record 0 has the same id, but other images, split or scene"
    assert (bad.source, good.source, good.raw_rows) == ("m.json, record 1", "m.json, record 0 and m.json, record 2", 2)
    assert (good.references, good.fault) == (["x", "y"], None)


def test_a_pair_without_two_image_names_or_with_captions_that_are_no_text_stands_alone(tmp_path):
    rows = [
        {"before": 1, "after": "b.png", "captions": ["x"], "split": "train"},
        {"before": "a.png", "after": "b.png", "captions": {"x": 1}, "split": "train"},
    ]
    write_json(tmp_path / "m.json", rows)
    one, two = pairs.read(tmp_path, "m.json")
    assert (one.name, one.before, two.name, two.references) == (None, 1, "a.png|b.png", {"x": 1})
