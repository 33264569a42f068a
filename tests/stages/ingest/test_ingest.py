import csv
import hashlib
import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.datasets.files import describe, fault_of_path
from m3diff.datasets.spec import Row
from m3diff.records.errors import Fault
from m3diff.records.schemas import RAW_SCHEMA
from m3diff.stages.ingest import stage
from m3diff.stages.ingest.stage import to_records
from tests.errors import Message
from tests.layouts import (
    digests_of,
    edit_json,
    list_images,
    make_entry,
    run_ingest,
    save_picture,
    uris_of,
    write_clevr,
    write_json,
    write_spot,
)


@pytest.fixture
def raw(tmp_path) -> Path:
    return write_clevr(tmp_path / "raw")


def records_of(folder: Path, name: str = "mini") -> list[dict]:
    table = pq.read_table(folder / "records" / name / "records")
    assert table.schema.equals(RAW_SCHEMA)
    return table.to_pylist()


def outputs(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in (folder / "records").rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def sha256(path: Path | str) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()


def test_a_record_is_the_reader_s_row_under_the_dataset_s_name(raw):
    run_ingest(raw)
    record, record_of_distractor = records_of(raw.parent)[:2]
    assert record == {
        **{"id": "mini/000003.png", "dataset": "mini", "scene": "mini/000003", "split": "train", "own_split": "train"},
        **{"image_set": "mini/000003.png", "history": [], "question": None, "kind": None},
        "images": list_images(raw / "images/CLEVR_default_000003.png", raw / "sc_images/CLEVR_semantic_000003.png"),
        "references": ["the cube of 000003 turned red", "it became red"],
        "change_types": ["color", "size"],
        "source": "change_captions.json, CLEVR_default_000003.png",
        "fault": None,
    }
    assert record_of_distractor["id"] == "mini/000003.png_n"
    assert uris_of(record_of_distractor)[1] == f"{raw}/nsc_images/CLEVR_nonsemantic_000003.png"


def test_splits_that_train_become_train_and_a_scene_without_split_is_a_fault(raw):
    edit_json(raw / "splits.json", lambda splits: splits["train"].remove(5))
    report = run_ingest(raw, train_on=["train", "val"])
    assert list(report.pairs.items()) == [("?", 2), ("test", 4), ("train", 6)]
    assert report.faults == 2
    splits = Counter((record["own_split"], record["split"]) for record in records_of(raw.parent))
    assert splits == {("train", "train"): 4, ("val", "train"): 2, ("test", "test"): 4, (None, None): 2}
    faults = [record["fault"] for record in records_of(raw.parent) if record["fault"]]
    assert len(faults) == 2
    assert all(fault.startswith("split: ") and "splits.json" in fault for fault in faults)


@pytest.mark.fault("15")
def test_an_image_too_large_to_decode_is_hashed_all_the_same(raw, monkeypatch):
    monkeypatch.setattr(stage, "MAX_DECODED_PIXELS", 1)
    assert run_ingest(raw).unread_images == 0
    for record in records_of(raw.parent):
        assert digests_of(record) == [sha256(uri) for uri in uris_of(record)]


def test_the_folder_of_a_dataset_is_emptied_and_those_of_others_are_kept(raw):
    run_ingest(raw, name="other")
    outputs_of_other = outputs(raw.parent)
    old = raw.parent / "records/mini/old.parquet"
    old.parent.mkdir()
    old.write_bytes(b"old")
    run_ingest(raw)
    all_outputs = outputs(raw.parent)
    new_names = all_outputs.keys() - outputs_of_other.keys()
    assert sorted(new_names) == ["records/mini.json", "records/mini/records/00000.parquet"]
    assert {name: all_outputs[name] for name in outputs_of_other} == outputs_of_other


def test_an_image_that_cannot_be_read_has_no_digest_and_a_bad_one_has(raw):
    missing, folder, bad = (raw / f"sc_images/CLEVR_semantic_{number}.png" for number in ("000005", "000008", "000009"))
    missing.unlink()
    folder.unlink()
    folder.mkdir()
    bad.write_bytes(b"no image")
    report = run_ingest(raw)
    digests = {uris_of(record)[1]: digests_of(record)[1] for record in records_of(raw.parent)}
    assert [digests[str(path)] for path in (missing, folder, bad)] == [None, None, sha256(bad)]
    assert report.images == 18
    assert report.unread_images == 2


def test_the_report_counts_what_the_dataset_gave(tmp_path):
    report = run_ingest(write_spot(tmp_path / "spot"), "spot_the_diff", "spot")
    assert report.model_dump() == {
        **{"stage": "ingest", "dataset": "spot", "reader": "spot_the_diff"},
        **{"rows_in": 6, "rows_out": 4},  # records of the annotation files; three are of one pair
        "pairs": {"test": 1, "train": 2, "val": 1},
        "references": {"test": 1, "train": 5, "val": 1},
        **{"empty_references": 3, "faults": 0, "repeated_questions": 0, "images": 8, "unread_images": 0},
    }
    assert json.loads((tmp_path / "records/spot.json").read_text()) == report.model_dump()
    assert list(report.pairs) == ["test", "train", "val"], "the same order whatever the first row is"
    assert list(report.references) == ["test", "train", "val"]


def test_the_image_cache_changes_no_byte(raw):
    run_ingest(raw)
    outputs_without_cache = outputs(raw.parent)
    shutil.copytree(raw, raw.parent / "copy")
    raw.rename(raw.parent / "moved")
    (raw.parent / "copy").rename(raw)  # equal files with other inodes and times
    for _ in range(2):
        run_ingest(raw)
        assert outputs(raw.parent) == outputs_without_cache
        (raw.parent / "image_cache.parquet").unlink()


def test_a_dataset_with_a_grammar_has_it_beside_its_records(raw):
    write_json(raw / "grammar.json", {"clauses": ["é"], "no_change": "x"})
    run_ingest(raw, "minichange")
    assert json.loads((raw.parent / "records/mini/grammar.json").read_text()) == {"clauses": ["é"], "no_change": "x"}
    run_ingest(raw, "clevr_change")
    assert not (raw.parent / "records/mini/grammar.json").exists()


def row(before: str = "x.png", after: str = "y.png", **fields) -> Row:
    usable_fields = {"name": "a", "split": "train", "scene": "s", "references": ["it fell"], "source": "file, row 1"}
    return Row(images=(before, after), **{**usable_fields, **fields})


def unusable(field: str, path: str) -> Message:
    """Return the fault of an image path, with any cause."""
    return Message("ingest.unusable_image_path", key=field, value=describe(path))


def unexpected(field: str, expected: str, value: str) -> Message:
    return Message("datasets.unexpected_value", key=field, expected=expected, value=value)


BROKEN = Fault("datasets.missing_value", key="row")
HALF = describe("\ud83d")
SEVEN = describe(7)


@pytest.mark.parametrize(
    ("fields", "faults"),
    [
        ({"name": None}, [unexpected("id", "text", "null")]),
        ({"name": ""}, [Message("datasets.empty_value", key="id")]),
        ({"scene": 7}, [unexpected("scene", "text", SEVEN)]),
        ({"split": "\ud83d"}, [Message("ingest.half_surrogate_pair", key="split", value=HALF)]),
        ({"before": "/x.png"}, [unusable("before", "/x.png")]),
        ({"after": "a/../../x.png"}, [unusable("after", "a/../../x.png")]),
        (
            {"references": "it fell"},
            [unexpected("references", "a list of text", describe("it fell"))],
        ),
        ({"references": None}, [unexpected("references", "a list of text", "null")]),
        (
            {"references": ["a", 7, "\ud83d", "b"]},
            [
                unexpected("reference 1", "text", SEVEN),
                Message("ingest.half_surrogate_pair", key="reference 2", value=HALF),
            ],
        ),
        (
            {"scene": 7, "fault": BROKEN},
            [Message("datasets.missing_value", key="row"), unexpected("scene", "text", SEVEN)],
        ),
        (
            {"name": None, "split": None, "references": None, "fault": BROKEN},
            [Message("datasets.missing_value", key="row")],
        ),
    ],
)
def test_what_cannot_be_typed_is_named_in_the_fault(tmp_path, fields, faults):
    rows = [row(**fields), row(raw_rows=3, after="a..b/c..png")]
    (bad, good), annotation_rows = to_records("d", make_entry("pairs", tmp_path), rows)
    assert re.fullmatch("; ".join(fault.pattern for fault in faults), bad["fault"])
    assert bad["references"] in ([], ["a", "b"], ["it fell"])
    assert good["fault"] is None
    assert good["id"] == "d/a"
    assert good["scene"] == "d/s"
    assert uris_of(good)[0] == f"{tmp_path}/x.png"
    assert annotation_rows == 4
    assert (bad["id"] is None) == ("name" in fields)
    assert (bad["scene"] is None) == ("scene" in fields)
    assert [uri is None for uri in uris_of(bad)] == [side in fields for side in ("before", "after")]


def test_a_record_of_a_question_has_its_kind_and_the_turns_before_it(tmp_path):
    fields = {"question": "Where?", "kind": "place", "history": (("How many?", "two"),)}
    (record,), _ = to_records("d", make_entry("pairs", tmp_path), [row(**fields)])
    assert record["kind"] == "place"
    assert record["question"] == "Where?"
    assert record["history"] == [{"question": "How many?", "answer": "two"}]


def test_the_source_of_a_record_keeps_its_letters_and_escapes_invalid_utf_8(tmp_path):
    sources = ("Größe 大.csv, row 1", "caf\udce9.csv, row 1")
    records, _ = to_records("d", make_entry("pairs", tmp_path), [row(source=source) for source in sources])
    assert [record["source"] for record in records] == ["Größe 大.csv, row 1", "caf\\udce9.csv, row 1"]


def test_an_image_that_ingest_has_written_itself_may_lie_outside_of_the_root(tmp_path):
    unpacked = tmp_path / "records" / "images" / "0.png"
    (record,), _ = to_records("d", make_entry("pairs", tmp_path / "raw"), [row(before=unpacked)])
    assert uris_of(record) == [str(unpacked), f"{tmp_path}/raw/y.png"]
    assert record["fault"] is None


def test_a_row_without_an_image_has_no_path_and_a_fault(tmp_path):
    (record,), _ = to_records("d", make_entry("pairs", tmp_path), [row(after=None)])
    assert uris_of(record) == [f"{tmp_path}/x.png", None]
    assert unexpected("after", "text", "null") == record["fault"]


@pytest.mark.parametrize("images", [("x.png",), ("x.png", "y.png", "z.png")], ids=["one", "three"])
def test_a_row_without_two_images_is_a_fault(images, tmp_path):
    (record,), _ = to_records("d", make_entry("pairs", tmp_path), [replace(row(), images=images)])
    assert unexpected("images", "two images", describe(list(images))).in_text(record["fault"])


OUTSIDE = ["../images/o.png", "a/../../images/o.png", "/etc/passwd", "{images}/o.png", "file://{images}/o.png"]
OUTSIDE += ["file:///etc/passwd", "..\\images\\o.png", "C:\\images\\o.png", "\\\\server\\o.png", "x.png\0.png"]
ADDRESSES = ["http://127.0.0.1/o.png", "s3://bucket/o.png", "data:image/png;base64,AAAA"]
REFUSED = [*OUTSIDE, *ADDRESSES]


def table(root: Path, *befores: str) -> dict[str, Any]:
    with (root / "pairs.csv").open("w", newline="") as file:
        rows = ([before, "x.png", "it fell", "test"] for before in befores)
        csv.writer(file).writerows([["before", "after", "captions", "split"], *rows])
    return {}


def chat(root: Path, *befores: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": "What changed?"}, {"from": "gpt", "value": "it fell"}]
    write_json(root / "a.json", [{"image": [before, "x.png"], "conversations": turns} for before in befores])
    columns = {"images": "image", "captions": "conversations"}
    return {"manifest": "a.json", "columns": columns, "split": "test"}


def parquet(root: Path, *befores: str) -> dict[str, Any]:
    columns = {
        "before": [{"bytes": None, "path": path} for path in befores],
        "after": [{"bytes": None, "path": "x.png"}] * len(befores),
        "captions": ["it fell"] * len(befores),
        "split": ["test"] * len(befores),
    }
    pq.write_table(pa.table(columns), root / "a.parquet")
    return {"manifest": "a.parquet"}


def template(root: Path, *befores: str) -> dict[str, Any]:
    return table(root, *befores) | {"columns": {"before": "{before}"}}


@pytest.mark.parametrize("manifest", [table, chat, parquet, template])
def test_a_path_out_of_the_root_is_a_fault_of_its_row_in_every_table(manifest, tmp_path):
    root = tmp_path / "root"
    images = tmp_path / "images"
    save_picture(root / "x.png", 1)
    save_picture(images / "o.png", 2)
    options = manifest(root, *(path.format(images=images) for path in REFUSED))
    run_ingest(root, "pairs", "mine", **options)
    for record, path in zip(records_of(tmp_path, "mine"), REFUSED, strict=True):
        path_in_table = path.format(images=images)
        assert uris_of(record)[0] is digests_of(record)[0] is None, path
        assert record["fault"] == unusable("before", path_in_table), path
        assert str(fault_of_path(path_in_table, root)) in record["fault"], path


@pytest.mark.parametrize("path_in_image_root", ["../images/o.png", "../images/a/../o.png", "{images}/o.png"])
def test_the_entry_opens_another_folder_for_images_and_no_third(path_in_image_root, tmp_path):
    root = tmp_path / "root"
    images = tmp_path / "images"
    save_picture(root / "x.png", 1)
    outside = save_picture(tmp_path / "third/t.png", 2)
    save_picture(images / "o.png", 3)
    (images / "link.png").symlink_to(outside)
    (root / "into.png").symlink_to(images / "o.png")
    faults = {path_in_image_root: None, "into.png": None}
    for path in ("../third/t.png", "../images/../third/t.png"):
        faults[path] = unusable("before", path)
    faults["../images/link.png"] = Message("ingest.link_out_of_root", key="before", path=images / "link.png")
    table(root, *(path.format(images=images) for path in faults))
    run_ingest(root, "pairs", "mine", image_root=f"{images}/../images")
    for record, (path, fault) in zip(records_of(tmp_path, "mine"), faults.items(), strict=True):
        assert (record["fault"] is None) == (fault is None), path
        assert fault is None or fault == record["fault"]
        assert (digests_of(record)[0] is None) == (fault is not None)
        assert uris_of(record)[1] == f"{root}/x.png"


@pytest.mark.fault("31")
def test_links_out_of_the_root_are_faults_unless_they_may_be_followed(tmp_path):
    root = tmp_path / "root"
    outside = save_picture(tmp_path / "outside/o.png", 1)
    save_picture(root / "x.png", 1)
    (root / "out.png").symlink_to(outside)
    (root / "in.png").symlink_to(root / "x.png")
    (root / "folder").symlink_to(outside.parent)
    rows = [row(before=name, after="x.png") for name in ("out.png", "in.png", "folder/o.png", "missing/m.png")]
    records, _ = to_records("d", make_entry("pairs", root), rows)
    links = [f"{root}/out.png", f"{root}/folder/o.png"]
    out, folder = (Message("ingest.link_out_of_root", key="before", path=path) for path in links)
    assert [uris_of(record)[0] for record in records] == [None, f"{root}/in.png", None, f"{root}/missing/m.png"]
    assert [record["fault"] for record in records] == [out, None, folder, None]
    assert [uris_of(record)[1] for record in records] == [f"{root}/x.png"] * 4
    followed, _ = to_records("d", make_entry("pairs", root, follow_links=True), rows)
    assert [record["fault"] for record in followed] == [None] * 4


def question_rows(root: Path, split: str) -> list[dict]:
    """Write two pictures and return rows about them: a dialogue of two turns, and a question asked twice."""
    images = [save_picture(root / name, number).name for number, name in enumerate(("a.png", "b.png"))]
    fields = {"images": images, "split": split}
    dialogue = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "two"}]
    dialogue += [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "left"}]
    rows = [fields | {"messages": dialogue}]
    for answer in ("red", "dark red"):
        question = [{"role": "user", "content": "Which colour?"}, {"role": "assistant", "content": answer}]
        rows.append(fields | {"messages": question})
    return rows


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_dialogue_is_one_record_where_it_trains_and_one_a_turn_where_it_is_tested(tmp_path, split):
    root = tmp_path / "raw"
    root.mkdir()
    (root / "m.json").write_text(json.dumps(question_rows(root, split)))
    columns = {"images": "images", "captions": "messages"}
    report = run_ingest(root, "pairs", "own", manifest="m.json", columns=columns)
    assert report.repeated_questions == 1
    assert report.rows_in == 3
    records = records_of(tmp_path, "own")
    *turns, colour = records
    assert {record["image_set"] for record in records} == {"own/a.png|b.png"}
    assert {record["scene"] for record in records} == {"own/a.png|b.png"}
    assert colour["id"] == "own/a.png|b.png?1"
    assert colour["references"] == ["red", "dark red"]
    contents = [(record["id"], record["history"], record["question"], record["references"]) for record in turns]
    first_turn = {"question": "How many?", "answer": "two"}
    if split == "test":
        assert contents == [
            ("own/a.png|b.png?0@0", [], "How many?", ["two"]),
            ("own/a.png|b.png?0@1", [first_turn], "Where?", ["left"]),
        ]
    else:
        assert contents == [("own/a.png|b.png?0", [first_turn], "Where?", ["left"])]


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"question": 3}, [("datasets.unexpected_value", "question")]),
        ({"question": "A?", "kind": 3}, [("datasets.unexpected_value", "kind")]),
        ({"question": "A?", "kind": ""}, [("datasets.empty_value", "kind")]),
        ({"question": "A?", "history": ((None, "x"),)}, [("datasets.unexpected_value", "turn 0: question")]),
        ({"question": "A?", "history": (("B?", 3),)}, [("datasets.unexpected_value", "turn 0: answer")]),
        ({"images": ("a.png",)}, [("datasets.unexpected_value", "images")]),
        ({"question": "A?", "images": ("a.png",) * 3}, [("datasets.too_many_images", "images")]),
        ({"question": "", "history": (("", ""),), "images": ()}, []),
    ],
)
def test_values_of_a_question_that_cannot_be_stored_are_faults(tmp_path, changes, codes):
    (record,), _ = to_records("d", make_entry("pairs", tmp_path), [replace(row(), **changes)])
    messages = [Message(code, key=key) for code, key in codes]
    assert all(message.in_text(record["fault"] or "") for message in messages)
    assert (record["fault"] is None) == (not codes)
