import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from m3diff.commands.inspect.statistics import LONG, published_row, write_statistics
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Permission
from m3diff.records.errors import DataError
from m3diff.records.schemas import NO_CHANGE, RECORD_SCHEMA
from tests.layouts import save_picture


def record(name: str, split: str = "train", references: tuple[str, ...] = ("it moved",), types=("color",), dataset="d"):
    return {
        "id": f"{dataset}/{name}",
        "dataset": dataset,
        "split": split,
        "scene": f"{dataset}/{name}",
        "references": list(references),
        "change_types": list(types),
        "source": f"row {name}",
    }


def write_clean(folder: Path, records: list[dict]) -> Path:
    for number, row in enumerate(records):
        row["before"] = str(save_picture(folder / f"{number}.png", number))
        row["after"] = str(save_picture(folder / f"{number}_2.png", number, 90))
    pq.write_table(pa.Table.from_pylist(records, schema=RECORD_SCHEMA), folder / "records.parquet")
    return folder


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory) -> Path:
    long = " ".join(["word"] * (LONG + 1))
    exact = " ".join(["word"] * LONG)
    references = [("The mug, left. It is gone!", "", "gone"), ("the mug is at 3.5 cm",), (long,), (exact,)]
    types = [("color", "size"), ("color",), ("none",), ()]
    splits = ("train", "val", "test", "train")
    rows = [record(str(n), *each) for n, each in enumerate(zip(splits, references, types, strict=True))]
    folder = write_clean(tmp_path_factory.mktemp("clean"), [*rows, record("e", references=("",), dataset="empty")])
    write_statistics(folder)
    return folder


def test_the_figures_of_the_papers_tables_by_hand(by_hand):
    found = json.loads((by_hand / "statistics.json").read_text())
    one, empty = found["d"], found["empty"]
    assert (empty["pairs"], empty["references"], empty["words"], empty["over_20"]) == (1, 0, 0.0, 0.0)
    assert list(found) == ["d", "empty"]
    words = 6 + 1 + 6 + 21 + 20
    assert (one["pairs"], one["pairs_by_split"]) == (4, {"train": 2, "val": 1, "test": 1})
    assert (one["references"], one["references_per_pair"]) == (5, 5 / 4)
    assert (one["words"], one["words_per_pair"]) == pytest.approx((words / 5, words / 4))
    assert (one["sentences"], one["sentences_per_reference"]) == (6, 6 / 5)
    assert one["over_20"] == pytest.approx(1 / 5)
    assert one["vocabulary"] == len({"the", "mug", "left", "it", "is", "gone", "at", "3", "5", "cm", "word"})
    assert one["change_types"] == [["color", 2], ["none", 1], ["size", 1]]
    lengths = {label: number for label, number in one["lengths"] if number}
    assert lengths == {"1": 1, "6": 2, "20": 1, "21": 1}
    assert [label for label, _ in one["lengths"]] == [str(n) for n in range(22)]


def test_many_lengths_are_grouped_and_the_most_frequent_types_are_the_first_of_many(tmp_path):
    rows = [record(f"{n}-{m}", types=(f"type {n:02}",)) for n in range(14) for m in range(n + 1)]
    few = tuple(" ".join(["w"] * n) for n in (1, 2, 3, 4, 50))
    found = write_statistics(write_clean(tmp_path, [*rows, record("a", dataset="few", references=few)]))
    assert found["d"]["change_types"] == [(f"type {n:02}", n + 1) for n in range(13, 1, -1)]
    lengths = found["few"]["lengths"]
    assert lengths[:2] == [("0–2", 2), ("3–5", 2)]
    assert [label for label, number in lengths if number] == ["0–2", "3–5", "48–50"]
    assert len(lengths) == 17


def test_the_two_parts_of_omnidiff_are_also_counted_together(tmp_path):
    records = [record(name, dataset=f"omnidiff_{name}") for name in ("real", "render")] + [record("x", dataset="z")]
    found = write_statistics(write_clean(tmp_path, records))
    assert [(name, one["pairs"]) for name, one in found.items()] == [
        ("omnidiff", 2),
        ("omnidiff_real", 1),
        ("omnidiff_render", 1),
        ("z", 1),
    ]
    page = (tmp_path / "statistics.html").read_text()
    assert [figure for figure in ("15,598", "8,609", "6,989", "38,653") if figure not in page] == []
    assert "OmniDiff (licence: none stated): show:" in page, "a part's licence is its dataset's"
    assert (published_row("omnidiff")["vocabulary"], published_row("omnidiff_render")) == (3_793, {"pairs": 6_989})
    assert published_row("clevr_dc") == published_row("mine") == {}
    with pytest.raises(DataError, match=r"records\.parquet: no such file; run `m3diff validate` first"):
        write_statistics(tmp_path / "none")


def test_the_page_fetches_nothing_and_is_equal_for_equal_records(tmp_path):
    records = [record(str(n), types=(NO_CHANGE,), dataset="clevr_change") for n in range(9)]
    folder = write_clean(tmp_path, records)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    for record_of in records:
        Image.new("RGB", (800, 400)).save(record_of["before"], exif=exif)
    write_statistics(folder)
    page = (tmp_path / "statistics.html").read_text()
    first = re.search(r'base64,([^"]+)" alt="before"', page)[1]
    assert Image.open(io.BytesIO(base64.b64decode(first))).size == (160, 320), "small and upright"
    assert not re.search(r"https?:|<script|<link|url\(", page)
    assert page.count("data:image/webp;base64,") == 8
    assert "79,606" in page
    write_statistics(tmp_path)
    assert (tmp_path / "statistics.html").read_text() == page


def test_the_pairs_of_the_page_are_whole_before_left_after_right_three_references_at_most(tmp_path):
    write_statistics(
        write_clean(tmp_path, [record("a", references=("one", "", "<b>3</b>", "four")), record("e", references=("",))])
    )
    page = (tmp_path / "statistics.html").read_text()
    before, after = re.findall(r'base64,([^"]+)" alt="(?:before|after)"', page)
    colours = [
        Image.open(io.BytesIO(base64.b64decode(each))).convert("RGB").getpixel((14, 14)) for each in (before, after)
    ]
    assert colours[0][0] < 30
    assert 60 < colours[1][0] < 120
    assert page.index('alt="before"') < page.index('alt="after"')
    assert re.findall(r"<p>(.*?)</p>", page)[-3:] == ["one", "(empty)", "&lt;b&gt;3&lt;/b&gt;"]
    assert ("<small>d/a</small>" in page, "<small>d/e</small>" in page) == (True, False)


def test_what_a_licence_says_of_showing_stands_on_the_page_and_a_no_hides_the_pairs(tmp_path, monkeypatch):
    folder = write_clean(tmp_path, [record("a", dataset="clevr_dc"), record("b", dataset="mine")])
    write_statistics(folder)
    page = (folder / "statistics.html").read_text()
    assert "CLEVR-DC (licence: none stated): show: its repository or page states no licence" in page
    assert page.count('alt="before"') == 2
    spec = DATASETS["clevr_dc"]
    closed = replace(spec, licence=replace(spec.licence, show=Permission("no", "not even one")))
    monkeypatch.setitem(DATASETS.data, "clevr_dc", closed)
    write_statistics(folder)
    page = (folder / "statistics.html").read_text()
    assert "show: not even one; refused" in page
    assert page.count('alt="before"') == 1
    assert "<small>mine/b</small>" in page
