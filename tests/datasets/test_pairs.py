"""The options of the reader `pairs`: each layout is read as the same two pairs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from m3diff.datasets import pairs
from m3diff.datasets.tables import columns_in, look_up, pick
from m3diff.records.errors import DataError
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from tests.layouts import judge_by_polars_alone, run_ingest, run_validate, save_picture, write_json

Write = Callable[[Path], Any]


def as_json(value: Any) -> Write:
    return lambda root: write_json(root / "p.json", value)


def as_lines(name: str, rows: list[Any]) -> Write:
    def write(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


def as_text(**files: str) -> Write:
    """Files by name, __ for a dot."""
    return lambda root: [(root / name.replace("__", ".")).write_text(text) for name, text in files.items()]


def both(*writes: Write) -> Write:
    return lambda root: [write(root) for write in writes]


def two(make: Callable[[str, str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    return [make("a/1.png", "b/1.png", "train"), make("a/2.png", "b/2.png", "val")]


PLAIN = two(lambda before, after, split: {"before": before, "after": after, "captions": "it fell", "split": split})
DEV = [row | {"split": {"train": "Train", "val": "validation"}[row["split"]]} for row in PLAIN]
IMAGES = {"images": "images", "split": "split", "id": None}

PARTS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "image"}, {"type": "image"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "it fell"}]},
]
LLAVA = [{"from": "human", "value": "<image><image>\nWhat changed?"}, {"from": "gpt", "value": "it fell"}]
COLUMNS = IMAGES | {"images": "image", "captions": "conversations"}
BY_KEY = {"before": "a/{key}.png", "after": "b/{key}.png", "captions": "value"}
NESTED = {"before": "x.files.0", "after": "x.files.-1", "captions": "t.*.raw", "split": "m.s"}
SPOT = {"dataset": "Spot-the-Diff"}
HEADER = "before,after,captions\n"
LAYOUTS: dict[str, tuple[Write, dict[str, Any]]] = {
    "a pattern": (both(as_lines("p-0.jsonl", PLAIN[:1]), as_lines("p-1.jsonl", PLAIN[1:])), {"manifest": "p-*.jsonl"}),
    "a pattern over folders": (
        both(as_lines("x/p.jsonl", PLAIN[:1]), as_lines("y/p.jsonl", PLAIN[1:])),
        {"manifest": "*/p.jsonl"},
    ),
    "a file for each split": (
        as_text(train__csv=f"{HEADER}a/1.png,b/1.png,it fell\n", dev__csv=f"{HEADER}a/2.png,b/2.png,it fell\n"),
        {"manifest": {"train": "train.csv", "val": "dev.csv"}},
    ),
    "splits of other names": (as_json(DEV), {"splits": {"Train": "train", "validation": "val"}}),
    "templates": (
        as_text(p__csv="number,captions,split\n1,it fell,train\n2,it fell,val\n"),
        {"manifest": "p.csv", "columns": {"before": "a/{number}.png", "after": "b/{number}.png"}},
    ),
    "captions by key": (as_json({"1": ["it fell"], "2": ["it fell"]}), {"columns": BY_KEY, "split": "test"}),
    "records by key": (
        as_json({row["before"]: {k: v for k, v in row.items() if k != "before"} for row in PLAIN}),
        {"columns": {"before": "key"}},
    ),
    "rows below a key, nested": (
        as_json(
            {"data": {"of": two(lambda a, b, s: {"x": {"files": [a, b]}, "m": {"s": s}, "t": [{"raw": "it fell"}]})}}
        ),
        {"rows": "data.of", "columns": NESTED},
    ),
    "a filter": (as_json([PLAIN[0], {"lang": "fr", "split": "train"}, PLAIN[1]]), {"where": {"lang": [None, "en"]}}),
    "semicolons": (
        as_text(p__csv="before;after;captions;split\na/1.png;b/1.png;it fell;train\na/2.png;b/2.png;it fell;val\n"),
        {"manifest": "p.csv", "delimiter": ";"},
    ),
    "LLaVA": (
        as_json(two(lambda a, b, s: {"id": f"{a}#0", "image": [a, b], "conversations": LLAVA})),
        {"columns": {**COLUMNS, "split": "split"}, "split": "train"},
    ),
    "M4-Instruct": (
        as_json(
            two(lambda a, b, s: {"image": [a, b], "conversations": LLAVA, "metadata": SPOT | {"split": s}})
            + [{"image": ["c.png"], "conversations": [], "metadata": {"dataset": "VQA"}}]
        ),
        {"columns": COLUMNS | {"split": "metadata.split"}, "where": {"metadata.dataset": "Spot-the-Diff"}},
    ),
    "messages in parts, as of ms-swift and LLaMA-Factory": (
        as_json(two(lambda a, b, s: {"images": [a, b], "messages": PARTS, "split": s})),
        {"columns": IMAGES | {"captions": "messages"}},
    ),
    "nested Parquet": (
        lambda root: pl.DataFrame(
            two(lambda a, b, s: {"images": [a, b], "meta": {"s": s}, "sentences": [{"raw": "it fell"}]})
        ).write_parquet(root / "p.parquet"),
        {"manifest": "p.parquet", "columns": {"images": "images", "captions": "sentences.*.raw", "split": "meta.s"}},
    ),
}
for _, options in LAYOUTS.values():
    options.setdefault("manifest", "p.json")


def read(root: Path, **options: Any) -> list[Any]:
    return list(pairs.read(root, **options))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read_as_the_same_two_pairs(tmp_path, name):
    write, options = LAYOUTS[name]
    write(tmp_path)
    rows = read(tmp_path, **options)
    assert [(row.before, row.after, row.references, row.fault) for row in rows] == [
        ("a/1.png", "b/1.png", ["it fell"], None),
        ("a/2.png", "b/2.png", ["it fell"], None),
    ]
    assert [row.split for row in rows] == ([options["split"]] * 2 if "split" in options else ["train", "val"])
    assert len({row.name for row in rows}) == 2


def test_params_take_the_options_that_the_reader_takes_and_no_others(tmp_path):
    raw = yaml.safe_load(Path("params.yaml").read_text())
    for number, (_, options) in enumerate(LAYOUTS.values()):
        raw["ingest"]["datasets"][f"own{number}"] = {"reader": "pairs", "root": f"data/own{number}", "options": options}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(raw))
    assert load_params(tmp_path / "p.yaml").ingest.datasets["own0"].options == {"manifest": "p-*.jsonl"}
    columns = {"befor": "x", "after": "{x"}
    options = {"splits": {"dev": "valid"}, "columns": columns, "manifest": {"dev": "a"}, "rows": 3}
    raw["ingest"]["datasets"]["own"] = {"reader": "pairs", "root": "data/own", "options": options}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(raw))
    with pytest.raises(ParamsError) as error:
        load_params(tmp_path / "p.yaml")
    found = [line.removeprefix("  ingest.datasets.own.options.") for line in str(error.value).split("\n")[1:]]
    wanted = {"columns.after": "'{x'", "columns.befor": "'befor'", "manifest.dev": "'dev'", "splits.dev": "'valid'"}
    wanted |= {"rows": "3"}
    assert {line.partition(":")[0]: line.rpartition("found ")[2] for line in found} == {
        place: f"{value})" for place, value in wanted.items()
    }


NO_PAIRS = [
    ({"images": ["a", "b", "c"], "x": "t"}, "images: expected a list of two images, found 3"),
    ({"images": "a", "x": "t"}, "images: expected a list of two images, found 1: text 'a'"),
    ({"x": "t"}, "images: expected a list of two images, found 0: null"),
    ({"images": ["a", "b"]}, "x: is missing"),
    ({"images": ["a", "b"], "x": LLAVA[:1]}, "captions: expected a conversation with one answer, found 0"),
    ({"images": ["a", "b"], "x": LLAVA[1:] * 2}, "captions: expected a conversation with one answer, found 2"),
]


def test_a_row_that_is_no_pair_stands_alone_with_what_is_wrong(tmp_path):
    write_json(tmp_path / "m.json", [row for row, _ in NO_PAIRS])
    found = read(tmp_path, manifest="m.json", columns={"images": "images", "captions": "x"}, split="train")
    assert all(row.fault.startswith(fault) for row, (_, fault) in zip(found, NO_PAIRS, strict=True))


def test_rows_are_marked_joined_and_filtered_as_the_options_say(tmp_path):
    write_json(tmp_path / "m.json", [PLAIN[0] | {"change_types": "none"}, PLAIN[1] | {"changeflag": 0}])
    assert [row.change_types for row in read(tmp_path, manifest="m.json")] == [["none"], []]
    marked = read(tmp_path, manifest="m.json", no_change={"changeflag": 0})
    assert [row.change_types for row in marked] == [["none"]] * 2
    write_json(tmp_path / "m.json", [PLAIN[0] | {"id": "1#0"}, PLAIN[0] | {"id": "1#1", "captions": "it broke"}])
    assert len(read(tmp_path, manifest="m.json")) == 2
    (row,) = read(tmp_path, manifest="m.json", columns={"id": None})
    assert (row.name, row.references, row.raw_rows) == ("a/1.png|b/1.png", ["it fell", "it broke"], 2)
    write_json(tmp_path / "m.json", [PLAIN[0] | {"captions": [" N/A ", "it fell"]}, PLAIN[1] | {"captions": "n/a"}])
    told, none = read(tmp_path, manifest="m.json", no_caption=["n/a"])
    assert (told.references, told.without_caption, none.without_caption) == (["it fell"], False, True)
    (tmp_path / "m.jsonl").write_text(json.dumps(PLAIN[0] | {"lang": "en"}) + '\n{"lang": \n')
    bad, good = read(tmp_path, manifest="m.jsonl", where={"lang": "en"})
    assert (bad.source, good.fault) == ("m.jsonl, line 2", None), "what cannot be parsed is not passed over"


def test_files_of_a_pattern_are_named_with_their_folder_and_one_pair_in_two_splits_is_a_contradiction(tmp_path):
    write, options = LAYOUTS["a pattern over folders"]
    write(tmp_path)
    assert [row.source for row in read(tmp_path, **options)] == ["x/p.jsonl, line 1", "y/p.jsonl, line 1"]
    (tmp_path / "p[1].jsonl").write_text(json.dumps(PLAIN[0]))
    assert len(read(tmp_path, manifest="p[1].jsonl")) == 1
    rows = read(tmp_path, manifest={"train": "p[1].jsonl", "test": "x/p.jsonl"})
    told = "id: p[1].jsonl, line 1 has the same id, but other images, split or scene"
    assert [row.fault for row in rows] == [told, None]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("m.json", '{"data": 3}', {"rows": "data"}, r"m\.json: rows: expected a list or an object at 'data', found"),
        ("m.txt", "x", {}, r"m\.txt: unknown kind of manifest; use \.csv"),
        ("m.csv", "before\na\n", {}, r"m\.csv: no column after, captions, split; found before"),
        ("m.csv", "n,captions,split\n", {"columns": {"before": "{x}", "after": "{n}"}}, r"no column x; found n, "),
        ("m.parquet", None, {}, r"m\.parquet: no such file; correct `manifest` or the root"),
        ("*.tsv", None, {}, r"\*\.tsv: no file is called so; correct `manifest` or the root"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_named_with_its_remedy(tmp_path, name, content, options, message):
    if content:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path, manifest=name, **options)


def test_paths_lead_into_nested_values_and_a_column_of_the_whole_name_comes_first():
    row = {"a.b": 1, "a": {"b": 2, "c": [{"d": 3}, {"d": 4}]}}
    paths = ("a.b", "a.c.0.d", "a.c.-1.d", "a.c.*.d", "a.c.2.d", "a.c.--1", "z.y", "a.b.c")
    assert [pick(row, path) for path in paths] == [1, 3, 4, [3, 4], None, None, None, None]
    assert pick(row, "") == row


def test_templates_are_filled_and_numbers_padded():
    row = {"n": "7", "m": {"s": "val"}, "k": 12}
    assert look_up(row, "{m.s}/{n:06}_{k:03}.png") == "val/000007_012.png"
    assert look_up(row, "{m.s}/{gone}.png") is None
    assert look_up({"{x}": 1}, "{x}") == 1
    assert columns_in("{m.s}/{n:06}.png") == ["m.s", "n"]
    with pytest.raises(DataError, match=r"columns: text 'val' cannot be written as \{:06d\}; correct the template"):
        look_up(row, "{m.s:06d}")


IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def test_images_inside_parquet_are_written_beside_the_records_and_are_the_same_bytes(tmp_path, monkeypatch):
    judge_by_polars_alone(monkeypatch)
    numbers, root = [(1, 2), (3, 4), (5, 1), (1, 2), (6, 7)], tmp_path / "raw"
    data = {n: save_picture(tmp_path / f"{n}.png", n).read_bytes() for n in range(8)}
    values = {"captions": list("abdce")}
    for place, side in enumerate(("before", "after")):
        found = [{"bytes": data[pair[place]], "path": [None, "x.png"][place]} for pair in numbers]
        values[side] = pa.array(found, IMAGE)
    root.mkdir()
    pq.write_table(pa.table(values), root / "p.parquet", row_group_size=2)
    options = {"manifest": "p.parquet", "split": "train"}
    rows = read(root, **options)
    assert [(row.references, row.fault) for row in rows] == [([*texts], None) for texts in ("ac", "b", "d", "e")]
    for _ in range(2):
        run_ingest(root, "pairs", "own", **options)
        records = pl.read_parquet(tmp_path / "records/own/records.parquet")
        assert records["fault"].to_list() == [None] * 4
        found = [[Path(path).read_bytes() for path in pair] for pair in records.select("before", "after").rows()]
        assert found == [[data[n] for n in pair] for pair in ((1, 2), (3, 4), (5, 1), (6, 7))]
        images = list((tmp_path / "records/own/images").iterdir())
        assert (len(images), {path.suffix for path in images}) == (7, {".png"})
    assert run_validate(tmp_path, max_quarantined_share=0).quarantined == 0


def test_a_list_of_embedded_images_is_a_pair_and_an_image_without_bytes_is_its_path(tmp_path):
    data = save_picture(tmp_path / "1.png", 1).read_bytes()
    both = [{"bytes": data, "path": None}, {"bytes": None, "path": "b/2.png"}]
    table = {"images": pa.array([both], pa.list_(IMAGE)), "captions": ["it fell"], "split": ["val"]}
    pq.write_table(pa.table(table), tmp_path / "p.parquet")
    (row,) = read(tmp_path, manifest="p.parquet", columns={"images": "images"})
    assert (row.before.read(), row.after, row.fault) == (data, "b/2.png", None)
