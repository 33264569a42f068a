import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.__main__ import DATA_REFUSED, main
from components.inspect.statistics import LONG, write_statistics
from components.records import NO_CHANGE, RECORD_SCHEMA, DataError
from tests.convert.test_convert import record
from tests.layouts import save_picture


def write_clean(folder: Path, records: list[dict]) -> Path:
    for number, row in enumerate(records):
        row["before"] = str(save_picture(folder / f"{number}.png", number))
        row["after"] = str(save_picture(folder / f"{number}_2.png", number, 90))
    pq.write_table(pa.Table.from_pylist(records, schema=RECORD_SCHEMA), folder / "records.parquet")
    return folder


def test_the_figures_of_the_papers_tables_by_hand(tmp_path):
    long = " ".join(["word"] * (LONG + 1))
    captions = [("The mug, left. It is gone!", ""), ("the mug is at 3.5 cm",), (long,)]
    records = [
        record(str(n), split, some)
        for n, (split, some) in enumerate(zip(("train", "val", "test"), captions, strict=True))
    ]
    one = write_statistics(write_clean(tmp_path, records))["d"]
    assert (one.pairs, one.pairs_by_split, one.captions) == (3, {"train": 1, "val": 1, "test": 1}, 3)
    assert one.words == pytest.approx((6 + 6 + 21) / 3)
    assert one.sentences == 2 + 1 + 1
    assert one.over_20 == pytest.approx(1 / 3)
    assert one.vocabulary == len({"the", "mug", "left", "it", "is", "gone", "at", "3", "5", "cm", "word"})
    assert [tuple(bar) for bar in one.frequent] == [("word", 21), ("gone", 1), ("left", 1)]
    assert [tuple(bar) for bar in one.per_pair] == [("1", 3)]
    assert sum(bar.number for bar in one.lengths) == 3
    assert json.loads((tmp_path / "statistics.json").read_text())["d"]["sentences"] == 4


def test_the_two_parts_of_omnidiff_are_also_counted_together(tmp_path):
    records = [record(name, dataset=f"omnidiff_{name}") for name in ("real", "render")]
    found = write_statistics(write_clean(tmp_path, records))
    assert {name: one.pairs for name, one in found.items()} == {"omnidiff": 2, "omnidiff_real": 1, "omnidiff_render": 1}


def test_the_page_fetches_nothing_and_is_equal_for_equal_records(tmp_path):
    records = [record(str(n), types=(NO_CHANGE,), dataset="clevr_change") for n in range(9)]
    write_statistics(write_clean(tmp_path, records))
    page = (tmp_path / "statistics.html").read_text()
    assert not re.search(r"https?:|<script|<link|url\(", page)
    assert page.count("data:image/webp;base64,") == 8
    assert "79,606" in page
    write_statistics(tmp_path)
    assert (tmp_path / "statistics.html").read_text() == page


def test_markup_in_a_caption_stays_text_and_a_dataset_of_empty_captions_is_shown(tmp_path):
    write_statistics(
        write_clean(tmp_path, [record("a", captions=("<b>bold</b> & co",)), record("b", captions=("",), dataset="e")])
    )
    page = (tmp_path / "statistics.html").read_text()
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; co" in page
    assert "<h2>e</h2>" in page


def test_without_clean_records_the_remedy_is_named(tmp_path, capsys):
    with pytest.raises(DataError, match="run `m3diff validate` first"):
        write_statistics(tmp_path)
    params = tmp_path / "params.yaml"
    params.write_text(Path("params.yaml").read_text().replace("data/03_clean", str(tmp_path / "none")))
    assert main(["--params", str(params), "data", "statistics"]) == DATA_REFUSED
    assert "no such file; run `m3diff validate` first" in capsys.readouterr().err
