import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Licence, Permission, Protocol
from m3diff.scoring.metrics import METRICS
from m3diff.scoring.metrics.metric import Metric
from m3diff.scoring.summary import Interval, ProtocolScores
from m3diff.stages.evaluate.report import report
from m3diff.stages.evaluate.report.report import Evidence, write_report
from tests.scoring import bench
from tests.scoring.pages import Tags, draw, evidence, gallery_of, table, text_of


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    bench.write(root)
    return root


@pytest.fixture(scope="module")
def toy(root: Path) -> Evidence:
    return evidence(root, bench.pairs(root))


def changed(known: Evidence, **changes: Any) -> Evidence:
    """The same with these fields of the scores of its only protocol."""
    (name,) = known.report.protocols
    scores = known.report.protocols[name].model_copy(update=changes)
    return replace(known, report=known.report.model_copy(update={"protocols": {name: scores}}))


def with_scores(known: Evidence, **scores: float | None) -> Evidence:
    return changed(known, scores=known.report.protocols["toy/test"].scores | scores)


def test_the_page_is_whole_and_fetches_nothing(toy: Evidence, tmp_path: Path):
    page = draw(toy, tmp_path)
    tags = Tags(page)
    assert tags.open == []
    assert all(link.startswith(("data:", "#")) for link in tags.fetched)
    assert not {"iframe", "object", "embed"} & set(tags.names)
    assert "url(" not in page
    assert "@import" not in page
    assert not re.search(r"fetch\(|XMLHttpRequest|https?://", page.replace("http://www.w3.org", ""))


def test_equal_evidence_gives_equal_bytes(toy: Evidence, tmp_path: Path):
    for name in ("first", "second"):
        write_report(toy, tmp_path / name, 0)
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / name).rglob("*.*")} for name in ("first", "second")
    )
    assert first == second
    assert len(first) > 6


def test_few_images_stand_inside_the_page_and_many_in_the_folder_beside_it(toy: Evidence, tmp_path: Path):
    write_report(toy, tmp_path, 1)
    inside = gallery_of((tmp_path / "report.html").read_text())["pairs"]
    assert all(image.startswith("data:image/webp;base64,") for pair in inside for image in pair["images"])
    assert list((tmp_path / "images").iterdir()) == []
    write_report(toy, tmp_path, 0)
    page = (tmp_path / "report.html").read_text()
    named = {image for pair in gallery_of(page)["pairs"] for image in pair["images"]}
    assert named == {f"images/{file.name}" for file in (tmp_path / "images").iterdir()}
    assert "This page and its folder images" in page
    write_report(toy, tmp_path, 1)
    assert list((tmp_path / "images").iterdir()) == []


def test_the_numbers_of_the_metrics_are_on_the_page(toy: Evidence, tmp_path: Path):
    text = text_of(draw(toy, tmp_path))
    assert "The type of a single change, named right in 66.7% of pairs" in text
    assert "In 33.3% of the pairs with one change it got all of it right: the type, the object" in text
    assert "CIDEr goes from 50.0 to 5.0, so the predictions come from both images" in text
    assert "SPICE Absent. Its jars are not there." in text


def test_a_control_on_a_sample_says_of_how_many_pairs(root: Path, tmp_path: Path):
    pairs = bench.pairs(root)
    some = [replace(pair, shuffled_prediction="x" if number < 2 else None) for number, pair in enumerate(pairs)]
    assert "(of which a sample of 2 was captioned)" in text_of(draw(evidence(root, some), tmp_path))
    whole = [replace(pair, shuffled_prediction="x") for pair in pairs]
    assert "a sample of" not in text_of(draw(evidence(root, whole), tmp_path))


def test_predictions_that_do_not_come_from_the_images_are_called_so(toy: Evidence, tmp_path: Path):
    assert "not the collapse" in text_of(draw(with_scores(toy, CIDEr_shuffled=0.4), tmp_path))


def test_the_confusion_table_counts_true_types_against_predicted_types(toy: Evidence):
    table = report.confusion_table(toy.parsed.values())
    assert table["columns"] == ["illumination", "removal", "color", "none"]
    assert table["rows"] == [
        ("illumination", [(0, 0.0, True), (0, 0.0, False), (0, 0.0, False), (1, 1.0, False)]),
        ("removal", [(0, 0.0, False), (1, 1.0, True), (0, 0.0, False), (0, 0.0, False)]),
        ("color", [(0, 0.0, False), (0, 0.0, False), (1, 1.0, True), (0, 0.0, False)]),
        ("none", [(0, 0.0, False), (0, 0.0, False), (1, 0.5, False), (1, 0.5, True)]),
    ]


def test_the_confusion_table_is_drawn_as_it_is_counted(toy: Evidence, tmp_path: Path):
    page = draw(toy, tmp_path)
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


def test_without_a_grammar_the_page_does_without_its_scores(root: Path, tmp_path: Path):
    page = draw(evidence(root, bench.pairs(root), with_grammar=False), tmp_path)
    text = text_of(page)
    assert "6 pairs, captioned and scored" in text
    assert "type right" not in text
    assert "True type and predicted type" not in text
    assert gallery_of(page)["graded"] is False


def test_without_saliency_maps_or_curves_the_page_says_so(toy: Evidence, tmp_path: Path):
    page = draw(replace(toy, saliency=None, curves=None), tmp_path)
    assert {pair["images"][2] for pair in gallery_of(page)["pairs"]} == {None}
    assert "there are no maps in saliency.npz" in page
    assert "there is no curves.csv" in page


def test_a_metric_that_is_absent_is_a_dash(root: Path, tmp_path: Path):
    page = draw(evidence(root, bench.pairs(root), METEOR=None), tmp_path)
    assert re.search(r"METEOR</dt><dd><span class=\"figure\">–", page)
    assert table(page, "scores")[1][3] == "–"


def test_words_of_the_data_cannot_become_markup(root: Path, tmp_path: Path):
    words = "</script><script>alert(1)</script><img src=x>\u2028"
    pairs = [replace(pair, prediction=words, references=[words]) for pair in bench.pairs(root)]
    page = draw(evidence(root, pairs), tmp_path)
    tags = Tags(page)
    assert tags.names.count("script") == 2
    assert "img" not in [name for name, link in zip(tags.names, tags.fetched, strict=False) if link == "x"]
    assert gallery_of(page)["pairs"][0]["references"] == [words]


def test_a_limited_run_is_called_no_benchmark(toy: Evidence, tmp_path: Path):
    limited = replace(toy, report=toy.report.model_copy(update={"rows_in": 480}))
    assert "Only these of the 480 test pairs were captioned" in text_of(draw(limited, tmp_path))
    assert "Only these" not in text_of(draw(toy, tmp_path))


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
def test_images_stand_on_the_page_as_the_licence_allows(
    answer: str, shown: bool, note: str | None, toy: Evidence, tmp_path: Path
):
    spec = replace(DATASETS["pairs"], licence=licence(answer))
    page = draw(replace(toy, specs={"toy": spec}), tmp_path, limit=0)
    assert [bool(pair["images"]) for pair in gallery_of(page)["pairs"]] == [shown] * 6
    assert (tmp_path / "images").exists() is shown
    assert re.findall(r"<dt>Images of toy</dt><dd>(.*?)</dd>", page) == ([note] if note else [])
    assert "the green ball at the left was removed" in page


def tiles(page: str) -> dict[str, str]:
    found = re.findall(r'<dt>([^<]+)</dt><dd><span class="figure">(.*?)</dd>', page)
    return {name: re.sub("<[^>]+>", " ", value).strip() for name, value in found}


def test_the_tiles_show_one_score_to_a_metric_and_the_accuracies(root: Path, tmp_path: Path):
    bounds = {"METEOR": Interval(low=0.3, high=0.325), "no_change_recall": Interval(low=0.4, high=0.6)}
    drawn = evidence(root, bench.pairs(root), intervals=bounds, **{"METEOR": 0.31, "BLEU-4": 0.22, "BLEU-1": 0.9})
    assert {name: " ".join(value.split()) for name, value in tiles(draw(drawn, tmp_path)).items()} == {
        "CIDEr": "50.0",
        "METEOR": "31.0 30.0–32.5",
        "ROUGE-L": "50.0",
        "BLEU-4": "22.0",
        "Type of change right": "66.7 %",
        "All of the change right": "33.3 %",
        "“Nothing changed”, rightly": "50.0 % 40.0–60.0",
        "“Nothing changed”, wrongly": "25.0 %",
    }


def test_each_dataset_is_scored_by_its_own_protocols_and_none_is_pooled(root: Path, tmp_path: Path):
    pairs = bench.pairs(root)
    pairs[1] = replace(pairs[1], id="more/1", dataset="more")
    half = Protocol("half", n=2, ids="[04]", max_words=9, references="joined", tokenizer="whitespace")
    specs = {
        "toy": replace(DATASETS["pairs"], protocols=(Protocol("whole", n=9), half)),
        "more": replace(DATASETS["pairs"], protocols=(Protocol("color", n=None, change_types=("removal",)),)),
    }
    page = draw(evidence(root, pairs, specs), tmp_path)
    assert [row[:2] for row in table(page, "scores")] == [
        ["Protocol", "n"],
        ["toy/whole*", "5 of 9"],
        ["toy/half", "2 of 2"],
        ["more/color", "1"],
    ]
    text = text_of(page)
    assert "* Fewer pairs than papers score: not comparable with published figures." in text
    rules = (
        "Pairs whose id matches [04], against their references joined to one text, both cut after 9 words; tokens by "
    )
    assert f"{rules}white space alone." in text
    assert "Pairs of removal alone, against all their references; tokens by the PTB tokenizer." in text
    assert "the figures here are those of toy/whole." in text
    assert table(page, "toy-half")[1][:2] == ["all", "2 of 2"]
    links = re.findall(r'<a href="#([^"]+)">', page[page.index("<nav>") : page.index("</nav>")])
    assert links[:3] == ["scores", "toy-whole", "more-color"]
    assert page.count("By type of change") == 2  # of the first protocol of each dataset


def test_the_table_of_types_leads_to_the_pairs_of_a_type(toy: Evidence, tmp_path: Path):
    page = draw(toy, tmp_path)
    assert table(page, "toy-test-types") == [
        ["Type", "n", "type right", "place right", "all right", "CIDEr", "METEOR", "ROUGE-L", "BLEU-4"],
        ["illumination", "1", "0.0%", "0.0%", "0.0%", "50.0", "50.0", "50.0", "50.0"],
        ["removal", "1", "100.0%", "0.0%", "0.0%", "50.0", "50.0", "50.0", "50.0"],
        ["color", "1", "100.0%", "100.0%", "100.0%", "50.0", "50.0", "50.0", "50.0"],
    ]
    assert re.findall(r'data-type="(\w+)">(\w+)<', page) == [
        (name, name) for name in ("illumination", "removal", "color")
    ]


def test_published_scores_stand_beside_those_of_a_known_benchmark(root: Path, tmp_path: Path):
    pairs = [replace(pair, dataset="iedit") for pair in bench.pairs(root)]
    page = draw(evidence(root, pairs, CIDEr=0.6), tmp_path)
    rows = table(page, "iedit-test-published")
    assert rows[0] == ["Method", "venue", "n", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE"]
    assert rows[1][0] == "M3Diff"
    assert '<tr class="ours"><th scope="row">this run</th>' in page
    ours = [row[0] for row in rows].index("this run")
    assert float(rows[ours - 1][6]) >= 60.0 >= float(rows[ours + 1][6])
    assert "Beside published results" not in draw(evidence(root, bench.pairs(root)), tmp_path)


def test_tables_are_saved_and_copied_from_the_page_alone(toy: Evidence, tmp_path: Path):
    page = draw(toy, tmp_path)
    links = re.findall(r'<a download="([^"]+)" href="data:text/plain;charset=utf-8,([^"]+)"', page)
    assert [name for name, _ in links] == [
        f"{name}.{kind}" for name in ("scores", "toy-test-groups", "toy-test-types") for kind in ("tex", "csv")
    ]
    assert links[1][1].startswith("Protocol%2Cn%2CCIDEr")
    assert (
        '<pre tabindex="0">Protocol,n,CIDEr,METEOR,ROUGE-L,BLEU-4\ntoy/test,6,50.00,50.00,50.00,50.00\n</pre>' in page
    )


def test_an_optional_metric_has_a_column_where_it_has_a_score(toy: Evidence):
    metrics: Mapping[str, Metric] = toy.metrics
    absent, there = toy, with_scores(toy, SPICE=0.2)
    assert report.table_columns(metrics, there.report.protocols)[1] == ["CIDEr", "METEOR", "ROUGE-L", "BLEU-4", "SPICE"]
    assert "SPICE" not in report.table_columns(metrics, absent.report.protocols)[0]


def test_what_is_absent_in_some_protocols_says_in_which():
    known = dict(pairs=1, published_pairs=None, scores={}, intervals={}, groups={})
    scores = {
        "a/x": ProtocolScores(**known, absent={"SPICE": "no jars", "METEOR": "it died"}),
        "b/y": ProtocolScores(**known, absent={"SPICE": "no jars"}),
    }
    assert report.absent_scores(scores) == [("SPICE", "no jars"), ("METEOR of a/x", "it died")]


def test_right_and_wrong_alarms_have_their_colours(toy: Evidence, tmp_path: Path):
    page = draw(toy, tmp_path)
    rows = re.findall(r'<th scope="row">([^<]+)</th><td class="(\w+)">(\d+)</td><td class="(\w+)">(\d+)</td>', page)
    assert rows == [
        ("distractors", "good", "1", "bad", "1"),
        ("pairs with one change", "bad", "1", "good", "2"),
        ("pairs with several changes", "bad", "0", "good", "1"),
    ]


def test_kinds_of_pairs_that_do_not_occur_have_no_row(toy: Evidence):
    assert report.alarms([toy.parsed["toy/4"]]) == [("distractors", 1, 0)]
    assert report.alarms([]) == []


CURVES = {
    "step": ["1", "2", "3"],
    "loss": ["3.0", "2.0", "1.0"],
    "lr_vision": ["1e-4", "2e-4", "3e-4"],
    "lr_llm": ["1e-3", "2e-3", "3e-3"],
    "module_update_ratio/2": ["0", "", "0.2"],
    "module_update_ratio/5": ["0", "", "0.1"],
    "module_score/2": ["0.5", "", "0.6"],
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
    assert found["Update of the module"] == {
        "module_update_ratio/2": [(1, 0.0), (3, 0.2)],
        "module_update_ratio/5": [(1, 0.0), (3, 0.1)],
    }
    assert found["Score of the module"] == {"module_score/2": [(1, 0.5), (3, 0.6)]}
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


def test_lines_of_a_chart_have_styles_of_their_own_and_the_loss_is_on_a_log_scale(toy: Evidence, tmp_path: Path):
    loss, rate, cider = report.charts(toy.curves)
    assert [line.style for line in rate["lines"]] == ["main", "second", "third", "fourth"]
    assert [(line.style, line.dots) for line in loss["lines"]] == [("faint", False), ("main", False), ("second", True)]
    assert ">0.2</text>" in loss["svg"]
    assert ">0</text>" in cider["svg"]
    assert '<li class="third">lr_module</li>' in draw(toy, tmp_path)


def test_the_several_changes_are_told_in_words(toy: Evidence, tmp_path: Path):
    assert (
        "The 1 pairs with several changes hold 2: 50.0% of them are named by type, 50.0% with object and place as "
        "well, 50.0% with what changed into what. Of the clauses predicted there, 50.0% name a change that happened. "
        "0.0% of these pairs have all their types named and none too many; in 0.0% everything is right."
    ) in text_of(draw(toy, tmp_path))


def test_the_page_is_whole_without_any_caption_score(toy: Evidence, tmp_path: Path):
    """With the accuracies alone there is no caption score to sort by."""
    bare = replace(toy, metrics={"change_accuracy": METRICS["change_accuracy"]})
    page = draw(bare, tmp_path)
    assert Tags(page).open == []
    assert list(tiles(page)) == list(tiles(draw(toy, tmp_path)))[4:]
    assert gallery_of(page)["columns"] == ["type_right", "place_right", "exact_right"]


def test_metrics_read_back_as_plain_json(toy: Evidence, tmp_path: Path):
    toy.report.write(tmp_path / "metrics.json")
    assert json.loads((tmp_path / "metrics.json").read_text())["protocols"]["toy/test"]["BLEU-4"] == 0.5


def test_scores_are_printed_with_one_digit():
    assert (report.times100(0.12345), report.times100(None)) == ("12.3", "–")
    assert (report.percent(0.12345), report.percent(None)) == ("12.3%", "–")


def test_the_notes_say_what_is_not_there(toy: Evidence, tmp_path: Path):
    text = text_of(draw(toy, tmp_path))
    assert "Saliency map Outlines on the after-image around the cells in which the model looks for the" in text
    assert "Right and wrong Prediction and references are read" in text
    assert "No curves" not in text
