"""The page of validate."""

import html
import re

from m3diff.records.errors import DataError
from m3diff.stages.validate import stage
from m3diff.stages.validate.rule_texts import describe_result
from m3diff.stages.validate.suite import ExpectationResult
from tests.errors import raises
from tests.layouts import (
    edit_json,
    run_ingest,
    run_validate,
    save_picture,
)
from tests.stages.validate.conftest import KEY, ingest_and_validate


def test_the_page_of_refused_data_has_the_reasons_of_the_terminal(raw, quick):
    edit_json(raw / "change_captions.json", lambda references: references.update({KEY: ["<b>", "x"]}))
    run_ingest(raw)
    with raises(DataError, "validate.data_refused") as refused:
        run_validate(raw.parent, max_quarantined_share=0.0)
    page = html.unescape((raw.parent / "clean/docs/index.html").read_text("utf-8"))
    (fault,) = refused.value.fields["faults"]
    assert fault.code == "validate.too_many_bad_rows"
    assert "<h1>The data is refused</h1>" in page
    assert str(fault) in page
    assert "1 of 12 rows left out. The other 11 rows are clean." in page


def test_the_page_loads_nothing_and_shows_rows_by_the_rule_that_they_break(raw, monkeypatch):
    monkeypatch.setattr(stage, "PAGE_ROWS", 1)
    save_picture(raw / "sc_images/CLEVR_semantic_000008.png", 5).write_bytes(b"no image")
    texts = {name: ["see <b>this</b>"] for name in (KEY, "CLEVR_default_000003.png")}
    edit_json(raw / "change_captions.json", lambda references: references.update(texts))
    run_ingest(raw)
    run_validate(raw.parent)
    (page,) = (raw.parent / "clean/docs").iterdir()
    text = page.read_text("utf-8")
    assert not re.search("//|<script|<img|src=|<link", text)
    assert "<h1>3 of 12 rows left out</h1>" in text
    assert re.findall(r">(\w+): pairs \(references\)</th>", text) == ["train", "val", "test"]
    headings = re.findall(r'<h3 id="(\w+)">(.*?)</h3>', text)
    assert headings == [
        ("image_2_decodes", "The second image cannot be opened: 1 row"),
        ("no_markup", "HTML or a special token in a text: 2 rows, the first 1"),
    ]
    links = re.findall(r'<a href="#(\w+)">(.*?)</a>', text)
    assert links == [
        ("image_2_decodes", "the second image cannot be opened"),
        ("no_markup", "HTML or a special token in a text"),
    ]
    assert text.count("<p>references: 1 ") == 1


def test_the_page_has_checks_in_words_folded_below_the_rows(raw):
    (raw / "sc_images/CLEVR_semantic_000008.png").unlink()
    ingest_and_validate(raw)
    text = (raw.parent / "clean/docs/index.html").read_text("utf-8")
    assert "expect_column" not in text
    assert text.index("Rows that are left out") < text.index("<details")
    assert "Checks run on every record (Great Expectations):" in text[text.index("<details") :]
    assert '<td>All image files are there</td><td class="broken">broken by 1 row</td>' in text
    assert '<td>The second image can be opened</td><td class="met">met</td>' in text


def test_the_page_says_that_an_expected_split_has_no_row():
    result = ExpectationResult(dataset="mini", rule="pairs of test", expectation="", is_met=False, row_count=0)
    assert "0 rows" in describe_result(result).outcome
