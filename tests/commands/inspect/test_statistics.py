"""`m3diff data statistics`: figures by hand, and the page."""

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from m3diff.commands.inspect.statistics import LONG, write_statistics
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Permission
from m3diff.records.errors import DataError
from m3diff.records.schemas import NO_CHANGE
from tests.errors import Message, raises
from tests.layouts import list_images, save_picture, uris_of, write_record_table


def record(name: str, split: str = "train", references: tuple[str, ...] = ("it moved",), types=("color",), dataset="d"):
    pair_id = f"{dataset}/{name}"
    return {
        "id": pair_id,
        "dataset": dataset,
        "split": split,
        "scene": pair_id,
        "source": f"row {name}",
        "references": list(references),
        "change_types": list(types),
    }


def write_clean(folder: Path, records: list[dict]) -> Path:
    for number, row in enumerate(records):
        before = save_picture(folder / f"{number}.png", number)
        row["images"] = list_images(before, save_picture(folder / f"{number}_2.png", number, 90))
    write_record_table(folder / "records", records)
    return folder


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory) -> Path:
    long = " ".join(["word"] * (LONG + 1))
    exact = " ".join(["word"] * LONG)
    references = [("The mug, left. It is gone!", "", "gone"), ("the mug is at 3.5 cm",), (long,), (exact,)]
    types = [("color", "size"), ("color",), ("none",), ()]
    splits = ("train", "val", "test", "train")
    rows = [record(str(n), *fields) for n, fields in enumerate(zip(splits, references, types, strict=True))]
    folder = write_clean(tmp_path_factory.mktemp("clean"), [*rows, record("e", references=("",), dataset="empty")])
    write_statistics(folder)
    return folder


@pytest.fixture(scope="module")
def figures(by_hand) -> dict:
    return json.loads((by_hand / "statistics.json").read_text())


def test_pairs_are_counted_by_dataset_and_split(figures):
    assert list(figures) == ["d", "empty"]
    assert figures["d"]["pairs"] == 4
    assert figures["d"]["pairs_by_split"] == {"train": 2, "val": 1, "test": 1}


def test_empty_references_are_not_counted(figures):
    empty = figures["empty"]
    assert empty["pairs"] == 1
    assert empty["references"] == 0
    assert empty["words"] == 0.0
    assert empty["over_20"] == 0.0


def test_references_words_and_sentences_are_counted_as_in_the_papers(figures):
    counts = figures["d"]
    words = 6 + 1 + 6 + 21 + 20
    assert counts["references"] == 5
    assert counts["references_per_pair"] == 5 / 4
    assert counts["words"] == pytest.approx(words / 5)
    assert counts["words_per_pair"] == pytest.approx(words / 4)
    assert counts["sentences"] == 6
    assert counts["sentences_per_reference"] == 6 / 5
    assert counts["over_20"] == pytest.approx(1 / 5)


def test_the_vocabulary_is_of_lower_case_words_without_punctuation(figures):
    assert figures["d"]["vocabulary"] == len({"the", "mug", "left", "it", "is", "gone", "at", "3", "5", "cm", "word"})


def test_change_types_are_counted_commonest_first(figures):
    assert figures["d"]["change_types"] == [["color", 2], ["none", 1], ["size", 1]]


def test_lengths_of_references_are_counted_for_the_plot(figures):
    lengths = {label: number for label, number in figures["d"]["lengths"] if number}
    assert lengths == {"1": 1, "6": 2, "20": 1, "21": 1}
    assert [label for label, _ in figures["d"]["lengths"]] == [str(n) for n in range(22)]


def test_a_part_of_a_dataset_has_its_licence(tmp_path):
    records = [record(name, dataset=f"omnidiff_{name}") for name in ("real", "render")] + [record("x", dataset="z")]
    figures = write_statistics(write_clean(tmp_path, records))
    pairs = {name: counts["pairs"] for name, counts in figures.items()}
    assert pairs == {"omnidiff_real": 1, "omnidiff_render": 1, "z": 1}
    assert (tmp_path / "statistics.html").read_text().count("OmniDiff (licence: none stated): show:") == 2


def test_statistics_need_clean_records(tmp_path):
    with raises(DataError, "check.no_clean_records", path=tmp_path / "none/records"):
        write_statistics(tmp_path / "none")


def test_the_page_fetches_nothing_and_is_equal_for_equal_records_in_any_order(tmp_path):
    records = [record(str(n), types=(NO_CHANGE,), dataset="clevr_change") for n in range(9)]
    folder = write_clean(tmp_path, records)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    for record_of in records:
        Image.new("RGB", (800, 400)).save(uris_of(record_of)[0], exif=exif)
    write_statistics(folder)
    page = (tmp_path / "statistics.html").read_text()
    first_image = re.search(r'base64,([^"]+)" alt="before"', page)[1]
    assert Image.open(io.BytesIO(base64.b64decode(first_image))).size == (160, 320), "small and upright"
    assert not re.search(r"https?:|<script|<link|url\(", page)
    assert page.count("data:image/webp;base64,") == 8
    write_record_table(folder / "records", records[::-1])
    write_statistics(tmp_path)
    assert (tmp_path / "statistics.html").read_text() == page


def test_a_licence_that_states_nothing_gives_a_notice_on_the_page(tmp_path):
    folder = write_clean(tmp_path, [record("a", dataset="clevr_dc"), record("b", dataset="mine")])
    write_statistics(folder)
    page = (folder / "statistics.html").read_text()
    assert "CLEVR-DC (licence: none stated): show: its repository or page states no licence" in page
    assert page.count('alt="before"') == 2


def test_a_licence_that_forbids_showing_hides_the_pairs_of_its_dataset(tmp_path, monkeypatch):
    folder = write_clean(tmp_path, [record("a", dataset="clevr_dc"), record("b", dataset="mine")])
    spec = DATASETS["clevr_dc"]
    closed = replace(spec, licence=replace(spec.licence, show=Permission("no", "not even one")))
    monkeypatch.setitem(DATASETS.data, "clevr_dc", closed)
    write_statistics(folder)
    page = (folder / "statistics.html").read_text()
    refusal = {"dataset": "CLEVR-DC", "use": "show", "reason": "not even one"}
    assert Message("datasets.licence_refuses_use", **refusal).in_text(page)
    assert page.count('alt="before"') == 1
    assert "<small>mine/b</small>" in page
