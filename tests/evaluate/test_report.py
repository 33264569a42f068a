import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from components.evaluate import report
from components.evaluate.coco import ALL, METRICS, CocoScores
from components.evaluate.grammar import parse_predictions
from components.evaluate.metrics import group_pairs, summarise
from components.evaluate.pairs import Pair
from components.evaluate.report import Evidence, render
from tests.evaluate import bench


def evidence(root: Path, pairs: list[Pair], with_grammar: bool = True, **scores: float | None) -> Evidence:
    groups = group_pairs(pairs)
    values = {name: dict.fromkeys(METRICS, 0.5) | {"SPICE": None} | scores for name in (ALL, *groups)}
    coco = CocoScores(values, {}, 0.05, {"SPICE": "its jars are not there"})
    parsed = parse_predictions(bench.grammar(), pairs) if with_grammar else {}
    return Evidence(
        metrics=summarise(pairs, len(pairs), groups, coco, parsed),
        pairs=pairs,
        cider={pair.id: float(number) for number, pair in enumerate(pairs)},
        parsed=parsed,
        attention=root / "captions" / "saliency.npz",
        curves=root / "model" / "curves.csv",
    )


@pytest.fixture
def toy(tmp_path: Path) -> Evidence:
    bench.write(tmp_path)
    return evidence(tmp_path, bench.pairs(tmp_path))


class Tags(HTMLParser):
    """Checks that tags nest, and collects what a page would fetch."""

    VOID = {"meta", "link", "img", "line", "circle", "path", "br"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.names: set[str] = set()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another tag"


def text_of(page: str) -> str:
    body = re.sub(r"<style>.*?</style>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def test_the_page_is_whole_and_fetches_nothing(toy: Evidence):
    page = render(toy, 6)
    tags = Tags(page)
    assert tags.open == []
    assert all(link.startswith(("data:", "#")) for link in tags.fetched)
    assert not tags.names & {"script", "iframe", "object", "embed"}
    assert "url(" not in page
    assert "@import" not in page


def test_equal_evidence_gives_equal_bytes(toy: Evidence):
    assert render(toy, 6) == render(toy, 6)


def test_every_pair_of_the_gallery_has_three_images_and_its_caption(toy: Evidence):
    page = render(toy, 6)
    assert page.count("<img") == 3 * 6
    for caption in ("the green ball at the left was removed", "the red ball at the top turned green"):
        assert caption in page


def test_the_numbers_of_the_metrics_are_on_the_page(toy: Evidence):
    text = text_of(render(toy, 6))
    assert "named in 66.7% of pairs" in text
    assert "type, the object and the place all right in 33.3% of pairs" in text
    assert "CIDEr goes from 50.0 to 5.0, so the captions come from looking" in text
    assert "SPICE Absent. Its jars are not there." in text


def test_captions_that_do_not_come_from_the_images_are_called_so(toy: Evidence):
    weak = replace(toy, metrics=toy.metrics.model_copy(update={"cider_shuffled": 0.4}))
    assert "not the collapse" in text_of(render(weak, 0))


def test_the_table_of_mix_ups_counts_truth_against_what_was_said(toy: Evidence):
    table = report.confusion_table(toy.parsed)
    assert table["columns"] == ["illumination", "removal", "color", "none"]
    assert dict(table["rows"])["none"] == [(0, 0.0, False), (0, 0.0, False), (1, 0.5, False), (1, 0.5, True)]


def test_alarms_and_misses_are_counted_by_kind_of_pair(toy: Evidence):
    assert report.alarms(toy.parsed) == [
        ("distractors", 1, 1),
        ("pairs with one change", 1, 2),
        ("pairs with several changes", 0, 1),
    ]


def test_without_a_grammar_the_page_does_without_its_scores(tmp_path: Path):
    bench.write(tmp_path)
    text = text_of(render(evidence(tmp_path, bench.pairs(tmp_path), with_grammar=False), 6))
    assert "6 pairs, captioned and scored" in text
    assert "type right" not in text
    assert "What was taken for what" not in text


def test_without_attention_or_curves_the_page_says_so(toy: Evidence):
    page = render(replace(toy, attention=None, curves=None), 6)
    assert page.count("<img") == 2 * 6
    assert "there are no attention maps" in page
    assert "there is no curves.csv" in page


def test_a_metric_that_is_absent_is_a_dash(tmp_path: Path):
    bench.write(tmp_path)
    page = render(evidence(tmp_path, bench.pairs(tmp_path), METEOR=None), 0)
    assert re.search(r"METEOR</dt><dd><span class=\"figure\">–", page)


def test_words_of_the_data_cannot_become_markup(toy: Evidence):
    evil = [replace(pair, caption="<script>alert(1)</script>", references=["</q><img src=x>"]) for pair in toy.pairs]
    tags = Tags(render(replace(toy, pairs=evil), 6))
    assert "script" not in tags.names
    assert "x" not in tags.fetched


def test_a_limited_run_is_called_no_benchmark(toy: Evidence):
    limited = replace(toy, metrics=toy.metrics.model_copy(update={"rows_in": 480}))
    assert "Only these of the 480 test pairs were captioned" in text_of(render(limited, 0))
    assert "Only these" not in text_of(render(toy, 0))


def test_published_scores_stand_beside_those_of_a_known_benchmark(tmp_path: Path):
    bench.write(tmp_path)
    pairs = [replace(pair, dataset="iedit") for pair in bench.pairs(tmp_path)]
    (table,) = report.published_tables(evidence(tmp_path, pairs, CIDEr=0.6).metrics.by_dataset)
    methods = [row["method"] for row in table["rows"]]
    assert methods[0] == "M3Diff"
    assert table["rows"][0]["scores"]["CIDEr"] == 136.6
    ours = methods.index("this run")
    assert table["rows"][ours - 1]["scores"]["CIDEr"] >= 60.0 >= table["rows"][ours + 1]["scores"]["CIDEr"]
    assert "Beside published results" in render(evidence(tmp_path, pairs), 0)


def test_an_unknown_dataset_shows_no_published_scores(toy: Evidence):
    assert report.published_tables(toy.metrics.by_dataset) == []
    assert "Beside published results" not in render(toy, 0)


def test_metrics_read_back_as_plain_json(toy: Evidence, tmp_path: Path):
    toy.metrics.write(tmp_path / "metrics.json")
    assert json.loads((tmp_path / "metrics.json").read_text())["BLEU-4"] == 0.5
