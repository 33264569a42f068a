import json
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
import yaml

from components.datasets import birds_to_words, clevr_dc, iedit, omnidiff, pairs, spot_the_diff
from components.ingest.stage import READERS
from components.ingest.params import DatasetEntry
from components.section import ParamsError
from components.records import DataError
from tests.layouts import (
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


def test_every_reader_is_known_to_params_and_tells_page_and_layout():
    names = Dataset.model_fields["reader"].annotation.__args__
    assert set(names) == set(READERS)
    for name, reader in READERS.items():
        told = __import__(reader.__module__, fromlist=["read"]).__doc__
        assert name == "pairs" or ("Page: https://" in told and "licence" in told.lower() or "CC BY" in told)


def test_clevr_dc_names_are_not_padded_but_ids_are(tmp_path):
    rows = list(clevr_dc.read(write_clevr_dc(tmp_path)))
    assert [(row.name, row.before, row.captions, row.split) for row in rows] == [
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
    assert Counter(row.split for row in rows) == {"train": 40_800, "val": 2_400, "test": 4_800}
    assert not any(row.fault for row in rows)


def test_spot_merges_the_sentences_of_all_records_of_an_id(tmp_path):
    rows = {row.name: row for row in spot_the_diff.read(write_spot(tmp_path))}
    assert rows["235.png"].captions == ["the suv is gone", "a man left", "", "it is dark"]
    assert rows["235.png"].source == "annotations/train.json, record 0 and 2 and 3"
    assert rows["235.png"].raw_rows == 3
    assert rows["235.png"].after == "resized_images/235_2.png"
    assert rows["9.png"].captions == [""]


@real
def test_spot_counts_to_the_unit(tmp_path):
    files = {split: f"annotations/{split}.json" for split in ("train", "val")}
    link_real(REAL / "spot_the_diff", tmp_path, **files)
    write_json(tmp_path / "annotations/test.json", [])
    report = run_ingest(tmp_path, "spot_the_diff").datasets["mini"]
    assert report.annotation_rows == 9_524 + 1_634
    assert report.pairs == {"train": 8_566, "val": 1_493}
    assert report.captions == {"train": 17_676, "val": 3_310}
    assert report.empty_captions == 53 + 6
    assert report.faults == 0
    rows = list(spot_the_diff.read(tmp_path))
    only_empty = Counter(row.split for row in rows if set(row.captions) == {""})
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
    report = run_ingest(tmp_path, "iedit").datasets["mini"]
    assert report.pairs == {"train": 3_061, "val": 383}
    assert report.captions == {"train": 3_061, "val": 1_149}
    rows = list(iedit.read(tmp_path))
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
    assert (first.name, first.captions) == ("11_22", ['Animal 1 is "bigger"', "b"])
    assert (first.before, first.after, first.raw_rows) == ("images/11.jpg", "images/22.jpg", 2)
    assert (second.name, second.captions) == ("22_11", ["other way"])


def test_a_description_may_hold_tabs_and_line_ends_in_quotes(tmp_path):
    write_birds(tmp_path / "birds-to-words-v1.0.tsv", [("1", "2", "val", "a\tb\nc"), ("3", "4", "val", "d")])
    assert [row.captions for row in birds_to_words.read(tmp_path)] == [["a\tb\nc"], ["d"]]


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
    report = run_ingest(tmp_path, "birds_to_words").datasets["mini"]
    assert report.annotation_rows == 12_890 + 1_556
    assert report.pairs == {"train": 2_685, "val": 325}
    assert report.captions == {"train": 12_890, "val": 1_556}
    assert report.faults == 0
    found = list(birds_to_words.read(tmp_path))
    per_pair = {split: Counter(len(r.captions) for r in found if r.split == split) for split in ("train", "val")}
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
    assert [(row.name, row.split, row.captions, row.fault) for row in rows] == [
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
    assert (good.name, good.captions, good.raw_rows) == ("7", ["one", "two"], 2)
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
    assert (good.captions, good.change_types, good.fault) == (["The mug left."], ["ocr", "color"], None)
    assert bad.fault.startswith("change_types: magic is none of viewpoint, ")


def test_a_dataset_is_an_entry_in_params_not_a_change_of_code(tmp_path):
    root = write_pairs(tmp_path / "own", "p.csv") if (tmp_path / "own").mkdir() is None else None
    entry = yaml.safe_load(f"{{name: own, reader: pairs, root: {root}, options: {{manifest: p.csv}}}}")
    dataset = Dataset.model_validate(entry)
    assert len(list(READERS[dataset.reader](dataset.root, **dataset.options))) == 2
    with pytest.raises(ParamsError, match=r"'mini': options of reader pairs: .*'manifets'"):
        run_ingest(root, "pairs", manifets="p.csv")


def test_ids_of_different_datasets_do_not_collide(tmp_path):
    write_clevr_dc(tmp_path / "dc")
    assert run_ingest(tmp_path / "dc", "clevr_dc", "dc").rows_out == 3
    table = pl.read_parquet(tmp_path / "records/records.parquet")
    assert table["id"].to_list() == ["dc/000009.png", "dc/000010.png", "dc/047999.png"]


def test_images_are_read_in_every_format_that_the_datasets_use(tmp_path):
    root = write_iedit(tmp_path / "raw")
    save_picture(root / "images/f.png", 3, mode="RGBA")
    run_ingest(root, "iedit")
    assert run_validate(tmp_path).bad_images == 0


def test_links_and_names_that_leave_the_root_are_refused(tmp_path):
    outside = save_picture(tmp_path / "outside.png", 1)
    root = tmp_path / "own"
    save_picture(root / "a.png", 2)
    (root / "link.png").symlink_to(outside)
    (root / "inside.png").symlink_to(root / "a.png")
    (root / "folder").symlink_to(tmp_path)
    befores = ["link.png", "../outside.png", str(outside), "folder/outside.png", "inside.png"]
    rows = [{"before": b, "after": "a.png", "captions": ["x"], "split": "train"} for b in befores]
    write_json(root / "pairs.json", rows)
    report = run_ingest(root, "pairs", manifest="pairs.json")
    faults = pl.read_parquet(tmp_path / "records/records.parquet")["fault"].to_list()
    assert report.datasets["mini"].faults == 4
    assert ["symbolic link out" in (f or "") for f in faults] == [True, False, False, True, False]
    assert ["leads out of the dataset's root" in (f or "") for f in faults] == [False, True, True, False, False]
    assert run_ingest(root, "pairs", manifest="pairs.json", follow_links=True).datasets["mini"].faults == 2


def test_an_annotation_file_that_is_missing_or_a_folder_is_named(tmp_path):
    root = write_spot(tmp_path)
    (root / "annotations/val.json").unlink()
    with pytest.raises(DataError, match=r"annotations/val\.json: no such file"):
        list(spot_the_diff.read(root))
    (root / "annotations/val.json").mkdir()
    with pytest.raises(DataError, match=r"annotations/val\.json: cannot be read: Is a directory"):
        list(spot_the_diff.read(root))
