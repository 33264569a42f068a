import json
import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from components.datasets import DATASETS
from components.datasets.spec import Licence, Permission
from components.evaluate.metrics import METRICS
from components.evaluate.metrics.metric import ALL, MetricScores
from components.evaluate.metrics.run import compute_metrics, merge
from components.evaluate.pairs import EvalPair
from components.evaluate.protocols import group_pairs, protocol_of
from components.evaluate.report import report
from components.evaluate.report.figures import SaliencyMaps, data_uri, load_image, overlay
from components.evaluate.report.report import Evidence, render
from components.evaluate.summary import summarise
from tests.evaluate import bench


def evidence(root: Path, pairs: list[EvalPair], with_grammar: bool = True, **scores: float | None) -> Evidence:
    """Every caption score 0.5 or as given, CIDEr of a pair its number, the accuracies as they are."""
    specs = {dataset: DATASETS["pairs"] for dataset in {pair.dataset: None for pair in pairs}}
    groups = group_pairs(pairs, {dataset: protocol_of(dataset, spec) for dataset, spec in specs.items()})
    everything = {ALL: [pair.id for pair in pairs], **groups}
    parsed = bench.parse(pairs) if with_grammar else {}
    fixed = {}
    for name, metric in METRICS.items():
        values = dict.fromkeys(metric.scores, 0.5) | {
            score: scores[score] for score in metric.scores if score in scores
        }
        fixed[name] = MetricScores(dict.fromkeys(everything, values), {})
    fixed["SPICE"] = MetricScores({}, {}, {"SPICE": "its jars are not there"})
    fixed["CIDEr"] = MetricScores(
        {**fixed["CIDEr"].groups, ALL: {**fixed["CIDEr"].groups[ALL], "CIDEr_shuffled": 0.05}},
        {pair.id: {"CIDEr": float(number)} for number, pair in enumerate(pairs)},
    )
    accuracy = {"change_accuracy": METRICS["change_accuracy"]}
    fixed["change_accuracy"] = compute_metrics(accuracy, pairs, groups, parsed, None, 1)
    merged = merge(METRICS, everything, fixed)
    return Evidence(
        metrics=METRICS,
        report=summarise(len(pairs), groups, merged),
        pairs=pairs,
        pair_scores=merged.pairs,
        parsed=parsed,
        specs=specs,
        saliency=root / "predictions" / "saliency.npz",
        curves=root / "model" / "curves.csv",
    )


def with_scores(known: Evidence, **scores: float) -> Evidence:
    return replace(known, report=known.report.model_copy(update={"scores": known.report.scores | scores}))


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    root = tmp_path_factory.mktemp("report")
    bench.write(root)
    return evidence(root, bench.pairs(root))


PROTOCOLS = {"toy": protocol_of("toy", DATASETS["pairs"])}


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


def test_every_pair_of_the_gallery_has_three_images_and_its_prediction(toy: Evidence):
    page = render(toy, 6)
    assert page.count("<img") == 3 * 6
    for prediction in ("the green ball at the left was removed", "the red ball at the top turned green"):
        assert prediction in page


def test_the_numbers_of_the_metrics_are_on_the_page(toy: Evidence):
    text = text_of(render(toy, 6))
    assert "named in 66.7% of pairs" in text
    assert "type, the object and the place all right in 33.3% of pairs" in text
    assert "CIDEr goes from 50.0 to 5.0, so the predictions come from both images" in text
    assert "SPICE Absent. Its jars are not there." in text


def test_a_control_on_a_sample_says_of_how_many_pairs(toy: Evidence):
    some = [replace(pair, shuffled_prediction="x" if number < 2 else None) for number, pair in enumerate(toy.pairs)]
    assert "(of which a sample of 2 was captioned)" in text_of(render(replace(toy, pairs=some), 0))
    whole = [replace(pair, shuffled_prediction="x") for pair in toy.pairs]
    assert "a sample of" not in text_of(render(replace(toy, pairs=whole), 0))


def test_predictions_that_do_not_come_from_the_images_are_called_so(toy: Evidence):
    weak = with_scores(toy, CIDEr_shuffled=0.4)
    assert "not the collapse" in text_of(render(weak, 0))


def test_the_confusion_table_counts_true_types_against_predicted_types(toy: Evidence):
    table = report.confusion_table(toy.parsed.values())
    assert table["columns"] == ["illumination", "removal", "color", "none"]
    assert table["rows"] == [
        ("illumination", [(0, 0.0, True), (0, 0.0, False), (0, 0.0, False), (1, 1.0, False)]),
        ("removal", [(0, 0.0, False), (1, 1.0, True), (0, 0.0, False), (0, 0.0, False)]),
        ("color", [(0, 0.0, False), (0, 0.0, False), (1, 1.0, True), (0, 0.0, False)]),
        ("none", [(0, 0.0, False), (0, 0.0, False), (1, 0.5, False), (1, 0.5, True)]),
    ]


def test_the_confusion_table_is_drawn_as_it_is_counted(toy: Evidence):
    page = render(toy, 0)
    body = page[page.index('<table class="confusion">') :]
    body = body[: body.index("</table>")]
    columns = re.findall(r'<th scope="col"><span>([^<]+)</span>', body)
    assert columns == ["illumination", "removal", "color", "none"]
    rows = [re.findall(r'<th scope="row">([^<]+)<|<td[^>]*>([^<]+)</td>', row) for row in body.split("<tr>")[2:]]
    assert [[first or second for first, second in row] for row in rows] == [
        ["illumination", "·", "·", "·", "1"],
        ["removal", "·", "1", "·", "·"],
        ["color", "·", "·", "1", "·"],
        ["none", "·", "·", "1", "1"],
    ]
    assert body.count("var(--good)") == 3


def test_alarms_and_misses_are_counted_by_kind_of_pair(toy: Evidence):
    assert report.alarms(toy.parsed.values()) == [
        ("distractors", 1, 1),
        ("pairs with one change", 1, 2),
        ("pairs with several changes", 0, 1),
    ]


def test_without_a_grammar_the_page_does_without_its_scores(tmp_path: Path):
    bench.write(tmp_path)
    text = text_of(render(evidence(tmp_path, bench.pairs(tmp_path), with_grammar=False), 6))
    assert "6 pairs, captioned and scored" in text
    assert "type right" not in text
    assert "True type and predicted type" not in text


def test_without_saliency_maps_or_curves_the_page_says_so(toy: Evidence):
    page = render(replace(toy, saliency=None, curves=None), 6)
    assert page.count("<img") == 2 * 6
    assert "there are no maps in saliency.npz" in page
    assert "there is no curves.csv" in page


def test_a_metric_that_is_absent_is_a_dash(tmp_path: Path):
    bench.write(tmp_path)
    page = render(evidence(tmp_path, bench.pairs(tmp_path), METEOR=None), 0)
    assert re.search(r"METEOR</dt><dd><span class=\"figure\">–", page)


def test_words_of_the_data_cannot_become_markup(toy: Evidence):
    evil = [replace(pair, prediction="<script>alert(1)</script>", references=["</q><img src=x>"]) for pair in toy.pairs]
    tags = Tags(render(replace(toy, pairs=evil), 6))
    assert "script" not in tags.names
    assert "x" not in tags.fetched


def test_a_limited_run_is_called_no_benchmark(toy: Evidence):
    limited = replace(toy, report=toy.report.model_copy(update={"rows_in": 480}))
    assert "Only these of the 480 test pairs were captioned" in text_of(render(limited, 0))
    assert "Only these" not in text_of(render(toy, 0))


def test_published_scores_stand_beside_those_of_a_known_benchmark(tmp_path: Path):
    bench.write(tmp_path)
    pairs = [replace(pair, dataset="iedit") for pair in bench.pairs(tmp_path)]
    (table,) = report.published_tables(evidence(tmp_path, pairs, CIDEr=0.6).report.folder("by_dataset"))
    methods = [row["method"] for row in table["rows"]]
    assert methods[0] == "M3Diff"
    assert table["rows"][0]["scores"]["CIDEr"] == 136.6
    ours = methods.index("this run")
    assert table["rows"][ours - 1]["scores"]["CIDEr"] >= 60.0 >= table["rows"][ours + 1]["scores"]["CIDEr"]
    page = render(evidence(tmp_path, pairs, CIDEr=0.6), 0)
    assert "Beside published results" in page
    assert re.findall(r'<tr class="ours"><th scope="row">([^<]+)</th><td>(.*?)</td><td>(.*?)</td>', page) == [
        ("this run", "", "50.0")
    ]
    assert '<tr class=""><th scope="row">M3Diff</th>' in page


def test_an_unknown_dataset_shows_no_published_scores(toy: Evidence):
    assert report.published_tables(toy.report.folder("by_dataset")) == []
    assert "Beside published results" not in render(toy, 0)


def test_metrics_read_back_as_plain_json(toy: Evidence, tmp_path: Path):
    toy.report.write(tmp_path / "metrics.json")
    assert json.loads((tmp_path / "metrics.json").read_text())["BLEU-4"] == 0.5


def images(page: str) -> list[tuple[str, str]]:
    """(caption, data URI) of every image, in the page's order."""
    return [(caption, uri) for uri, caption in re.findall(r'<img src="([^"]+)"[^>]*><figcaption>([^<]+)<', page)]


def cards(page: str) -> dict[str, str]:
    """Each card of the gallery by its pair's id."""
    found = re.findall(r'<article class="card">.*?</article>', page, flags=re.DOTALL)
    return {re.findall(r'<p class="id">([^<]+)<', card)[0]: card for card in found}


def test_each_card_shows_before_after_and_saliency_map_of_its_own_pair(toy: Evidence):
    maps = SaliencyMaps(toy.saliency)
    shown = cards(render(toy, 6))
    assert shown.keys() == {pair.id for pair in toy.pairs}
    for pair in toy.pairs:
        before = load_image(pair.before, pair.before_sha256)
        after = load_image(pair.after, pair.after_sha256)
        heat = overlay(after, maps.heat(pair.id, after.size))
        assert images(shown[pair.id]) == [
            ("before", data_uri(before)),
            ("after", data_uri(after)),
            ("saliency map", data_uri(heat)),
        ]


def test_a_card_holds_type_score_prediction_marks_and_references(toy: Evidence):
    text = text_of(cards(render(toy, 6))["toy/1"])
    assert text.strip() == (
        "removal CIDEr 100.0 before after saliency map prediction the green ball at the left was removed "
        "removal object place closest of 2 references the green ball at the top was removed "
        "1 more the green ball at the top is gone toy/1"
    )
    card = cards(render(toy, 6))["toy/1"]
    assert re.findall(r'<li class="(right|wrong)">(\w+)<', card) == [
        ("right", "removal"),
        ("right", "object"),
        ("wrong", "place"),
    ]


def test_a_card_says_how_many_changes_are_not_named(toy: Evidence):
    shown = cards(render(toy, 6))
    assert "1 change not named" in text_of(shown["toy/3"])
    assert [i for i, card in shown.items() if "not named" in card] == ["toy/2", "toy/3"]
    assert "no change CIDEr 400.0" in text_of(shown["toy/4"])
    assert "color CIDEr 0.0" in text_of(shown["toy/0"])


def licence(answer: Any) -> Licence:
    permission = Permission(answer, "as its page says")
    return Licence("CC of a kind", None, permission, permission, permission)


@pytest.mark.parametrize(
    ("answer", "shown", "note"),
    [
        ("yes", True, None),
        ("conditions", True, "Shown. own pairs (licence: CC of a kind): show: as its page says."),
        ("unstated", True, "Shown. own pairs (licence: CC of a kind): show: as its page says."),
        ("no", False, "Not shown. CC of a kind: as its page says."),
    ],
)
def test_images_stand_on_the_page_as_the_licence_allows(answer: str, shown: bool, note: str | None, toy: Evidence):
    spec = replace(DATASETS["pairs"], licence=licence(answer))
    page = render(replace(toy, specs={"toy": spec}), 6)
    assert page.count("<img") == (18 if shown else 0)
    assert page.count("Images not shown: the licence of toy does not allow it.") == (0 if shown else 6)
    found = re.findall(r"<dt>Images of toy</dt><dd>(.*?)</dd>", page)
    assert found == ([note] if note else [])
    assert "the green ball at the left was removed" in page


def tiles(page: str) -> dict[str, str]:
    found = re.findall(r'<dt>([^<]+)</dt><dd><span class="figure">(.*?)</span></dd>', page)
    return {name: re.sub("<[^>]+>", "", value) for name, value in found}


def test_the_tiles_show_one_score_to_a_metric_and_the_accuracies(tmp_path: Path):
    bench.write(tmp_path)
    page = render(evidence(tmp_path, bench.pairs(tmp_path), **{"METEOR": 0.31, "BLEU-4": 0.22, "BLEU-1": 0.9}), 0)
    assert tiles(page) == {
        "CIDEr": "50.0",
        "METEOR": "31.0",
        "ROUGE-L": "50.0",
        "BLEU-4": "22.0",
        "Type of change right": "66.7%",
        "Type, object and place right": "33.3%",
        "“Nothing changed”, rightly": "50.0%",
        "“Nothing changed”, wrongly": "25.0%",
    }


def table(page: str, section: str) -> list[list[str]]:
    """The cells of a section's first table, as text."""
    body = page[page.index(f'<section id="{section}">') :]
    rows = body[: body.index("</table>")].split("<tr")[1:]
    return [[re.sub("<[^>]+>", "", cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


def test_the_table_of_groups_has_a_row_to_a_group_and_a_column_to_a_score(tmp_path: Path):
    bench.write(tmp_path)
    page = render(evidence(tmp_path, bench.pairs(tmp_path), **{"BLEU-2": 0.11}), 0)
    values = ["50.0", "50.0", "50.0", "50.0", "11.0", "50.0", "50.0"]
    assert table(page, "scores") == [
        ["Pairs", "number", "CIDEr", "METEOR", "ROUGE-L", "BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4"],
        ["all", "6", *values],
        ["with a change", "4", *values],
        ["with several changes", "1", *values],
        ["distractors", "2", *values],
    ]


def test_of_two_datasets_each_has_a_row(tmp_path: Path):
    bench.write(tmp_path)
    pairs = bench.pairs(tmp_path)
    pairs[1] = replace(pairs[1], id="more/1", dataset="more")
    rows = table(render(evidence(tmp_path, pairs), 0), "scores")
    assert [row[:2] for row in rows[-2:]] == [["more", "1"], ["toy", "5"]]


def test_the_table_of_types_has_accuracies_and_one_score_to_a_metric(toy: Evidence):
    assert table(render(toy, 0), "types") == [
        ["Type", "pairs", "type right", "all right", "CIDEr", "METEOR", "ROUGE-L", "BLEU-4"],
        ["illumination", "1", "0.0%", "0.0%", "50.0", "50.0", "50.0", "50.0"],
        ["removal", "1", "100.0%", "0.0%", "50.0", "50.0", "50.0", "50.0"],
        ["color", "1", "100.0%", "100.0%", "50.0", "50.0", "50.0", "50.0"],
    ]


def test_an_optional_metric_has_a_column_where_it_has_a_score(toy: Evidence):
    columns = report.table_columns(METRICS, toy.report.scores | {"SPICE": 0.2})
    assert columns["columns"] == ["CIDEr", "METEOR", "ROUGE-L", "BLEU-4", "SPICE"]
    assert "SPICE" not in report.table_columns(METRICS, toy.report.scores)["all_columns"]


def test_right_and_wrong_alarms_have_their_colours(toy: Evidence):
    page = render(toy, 0)
    rows = re.findall(r'<th scope="row">([^<]+)</th><td class="(\w+)">(\d+)</td><td class="(\w+)">(\d+)</td>', page)
    assert rows == [
        ("distractors", "good", "1", "bad", "1"),
        ("pairs with one change", "bad", "1", "good", "2"),
        ("pairs with several changes", "bad", "0", "good", "1"),
    ]


def test_kinds_of_pairs_that_do_not_occur_have_no_row(toy: Evidence):
    assert report.alarms([toy.parsed["toy/4"]]) == [("distractors", 1, 0)]
    assert report.alarms([]) == []


def test_the_gallery_ranks_by_the_first_metric_that_scores_pairs(toy: Evidence):
    assert report.ranking_score(METRICS) == "CIDEr"
    assert report.ranking_score({name: METRICS[name] for name in ("change_accuracy", "SPICE")}) == "SPICE"
    assert report.ranking_score({"change_accuracy": METRICS["change_accuracy"]}) is None
    page = render(toy, 6)
    assert "the pair with the median CIDEr." in page
    assert [i for i in cards(page)][:3] == ["toy/2", "toy/1", "toy/0"]


CURVES = {
    "step": ["1", "2", "3"],
    "loss": ["3.0", "2.0", "1.0"],
    "lr_vision": ["1e-4", "2e-4", "3e-4"],
    "lr_llm": ["1e-3", "2e-3", "3e-3"],
    "val_loss": ["", "2.5", ""],
    "val_loss_a": ["", "2.4", ""],
    "val_loss_b": ["", "2.6", ""],
    "val_cider": ["", "0.5", "0.7"],
}


def drawn(path: Path, columns: Mapping[str, list[str]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Chart -> line -> its points."""
    rows = [",".join(columns), *(",".join(row) for row in zip(*columns.values(), strict=True))]
    path.write_text("\n".join(rows) + "\n")
    return {
        figure["title"]: {line.name: list(line.points) for line in figure["lines"]} for figure in report.charts(path)
    }


def test_every_learning_rate_every_validation_loss_and_cider_are_drawn(tmp_path: Path):
    found = drawn(tmp_path / "curves.csv", CURVES)
    assert found["Loss"] == {
        "each step": [(1, 3.0), (2, 2.0), (3, 1.0)],
        "training, running mean": [(1, 3.0), (2, 2.0), (3, 1.0)],
        "validation": [(2, 2.5)],
        "validation, a": [(2, 2.4)],
        "validation, b": [(2, 2.6)],
    }
    assert found["Learning rate"] == {
        "lr_vision": [(1, 1e-4), (2, 2e-4), (3, 3e-4)],
        "lr_llm": [(1, 1e-3), (2, 2e-3), (3, 3e-3)],
    }
    assert found["CIDEr of validation pairs"] == {"CIDEr": [(2, 50.0), (3, 70.0)]}


def test_the_validation_loss_of_the_only_dataset_is_not_drawn_twice(tmp_path: Path):
    one = {name: values for name, values in CURVES.items() if name not in ("val_loss_b", "val_cider")}
    found = drawn(tmp_path / "curves.csv", one)
    assert list(found["Loss"]) == ["each step", "training, running mean", "validation"]
    assert "CIDEr of validation pairs" not in found


def test_what_is_measured_at_checkpoints_alone_is_drawn_with_dots(tmp_path: Path):
    drawn(tmp_path / "curves.csv", CURVES)
    lines = [line for figure in report.charts(tmp_path / "curves.csv") for line in figure["lines"]]
    assert {line.name for line in lines if line.dots} == {"validation", "validation, a", "validation, b", "CIDEr"}


def test_curves_without_a_step_draw_nothing(tmp_path: Path):
    assert drawn(tmp_path / "curves.csv", dict.fromkeys(CURVES, [])) == {}


def test_lines_of_a_chart_have_styles_of_their_own_and_the_loss_is_on_a_log_scale(toy: Evidence):
    loss, rate, cider = report.charts(toy.curves)
    assert [line.style for line in rate["lines"]] == ["main", "second", "third", "fourth"]
    assert [(line.style, line.dots) for line in loss["lines"]] == [("faint", False), ("main", False), ("second", True)]
    assert ">0.2</text>" in loss["svg"]
    assert ">0</text>" in cider["svg"]
    assert '<li class="third">lr_module</li>' in render(toy, 0)


def test_the_several_changes_are_told_in_words(toy: Evidence):
    assert (
        "The 1 pairs with several changes hold 2: 50.0% of them are named by type, 50.0% with object and place as "
        "well. Of the clauses predicted there, 50.0% name a change that happened. 0.0% of these pairs have all their "
        "types named and none too many; in 0.0% everything is right."
    ) in text_of(render(toy, 0))


def test_the_page_is_whole_without_any_caption_score(toy: Evidence):
    """With the accuracies alone there is nothing to rank by."""
    metrics = {"change_accuracy": METRICS["change_accuracy"]}
    scores = compute_metrics(metrics, toy.pairs, group_pairs(toy.pairs, PROTOCOLS), toy.parsed, None, 1)
    bare = summarise(6, group_pairs(toy.pairs, PROTOCOLS), scores)
    page = render(replace(toy, metrics=metrics, report=bare, pair_scores=scores.pairs), 6)
    assert Tags(page).open == []
    assert list(tiles(page)) == list(tiles(render(toy, 0)))[4:]
    assert "CIDEr" not in "".join(cards(page).values())


def test_a_published_result_that_two_papers_print_is_shown_once():
    tables = report.published_tables({"spot_the_diff": {"CIDEr": 0.3}})
    methods = [(row["method"], row["scores"]["CIDEr"]) for row in tables[0]["rows"]]
    assert len(methods) == len(set(methods))
    assert [score for _, score in methods] == sorted((score for _, score in methods), reverse=True)
    assert tables[0]["dataset"] == "spot_the_diff"
    assert tables[0]["sources"] == sorted(set(tables[0]["sources"]))


def test_scores_in_papers_units_are_times_100_and_absent_ones_stay_so():
    assert report.in_papers_units({"BLEU-4": 0.1, "METEOR": None, "CIDEr": 1.5}) == {
        "BLEU-4": pytest.approx(10),
        "METEOR": None,
        "ROUGE-L": None,
        "CIDEr": 150.0,
        "SPICE": None,
    }


def test_scores_are_printed_with_one_digit():
    assert (report.times100(0.12345), report.times100(None)) == ("12.3", "–")
    assert (report.percent(0.12345), report.percent(None)) == ("12.3%", "–")


def test_published_rows_have_their_venue_and_scores_in_the_columns_of_papers():
    known = {"venue": "CVPR", "bleu_4": "1.5", "meteor": "2", "rouge_l": "", "cider": "4", "spice": "5"}
    assert report.published_row(known | {"method": "a"}) == {
        "method": "a",
        "venue": "CVPR",
        "ours": False,
        "scores": {"BLEU-4": 1.5, "METEOR": 2.0, "ROUGE-L": None, "CIDEr": 4.0, "SPICE": 5.0},
    }


def test_a_run_without_cider_stands_last_among_published_results():
    (table,) = report.published_tables({"iedit": {"METEOR": 0.1}})
    assert [row["ours"] for row in table["rows"]] == [False] * (len(table["rows"]) - 1) + [True]


def test_the_notes_say_what_is_not_there(toy: Evidence):
    text = text_of(render(toy, 0))
    assert "Saliency map The after-image in grey" in text
    assert "Right and wrong Prediction and references are read" in text
    assert "No curves" not in text
