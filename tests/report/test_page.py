"""The page of evaluate: its head, its sections, and what it says of what is absent."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Licence, Permission, Protocol
from m3diff.report.origin import Origin
from m3diff.report.page import (
    PageContent,
    absent_scores,
    choose_columns,
    confusion_table,
    count_captions,
    count_questions,
    write_report,
)
from m3diff.scoring import bootstrap
from m3diff.scoring.metrics import METRICS
from m3diff.scoring.protocols import ProtocolPairs, select_main_protocols
from m3diff.scoring.results import ProtocolScores
from m3diff.scoring.run import ABSENT_RECORDS
from tests.scoring import bench
from tests.scoring.bench import draw, gallery_of, page_content, table, text_of


def test_the_page_is_whole_and_fetches_nothing_and_holds_the_numbers_of_the_metrics(page: str):
    links = re.findall(r'\b(?:src|srcset|href)="([^"]*)"', page)
    assert all(link.startswith(("data:", "#")) for link in links)
    assert not re.search("<(iframe|object|embed)", page)
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|https?://", page.replace("http://www.w3.org", ""))
    text = text_of(page)
    patterns = (
        "66.7% of single changes",
        "33.3% of the pairs with one change",
        "CIDEr changes from 50.0 to 5.0. The captions therefore depend on both images",
        "SPICE Absent. Its jars are not there.",
        "The one pair with more than one change contains 2 changes",
        "50.0% of the pairs without a change",
        "Saliency map Outlines",
        "Right and wrong Predictions",
    )
    assert [pattern for pattern in patterns if pattern not in text] == []
    assert not re.search("Only these|published results", text)


def test_a_score_is_called_absent_for_the_main_protocols_alone_that_lack_it():
    protocols = [ProtocolPairs(dataset, Protocol("test", published_pairs=None), []) for dataset in ("a", "b")]
    part = ProtocolPairs("a", Protocol("part", published_pairs=None), [])
    absent = {
        "a/test": {"SPICE": "no jars", "reversal": "none"},
        "b/test": {"SPICE": "no jars"},
        "a/part": {"SPICE": "no jars", "pixel_window_auc": "all of one kind"},
    }
    scores = ProtocolScores(pairs=4, published_pairs=None, scores={}, intervals={}, groups={}, absent={})
    scores_by_protocol = {name: scores.model_copy(update={"absent": reasons}) for name, reasons in absent.items()}
    main_protocols = select_main_protocols([protocols[0], part, protocols[1]])
    assert [protocol.name for protocol in main_protocols] == ["a/test", "b/test"]
    absences = [(absence.score, absence.protocols) for absence in absent_scores(main_protocols, scores_by_protocol)]
    assert absences == [("SPICE", []), ("reversal", ["a/test"])]


def main_scores_of_tables(absent: dict[str, str] | None = None, **values: float | None) -> list[str]:
    """Return the main scores in the tables of a protocol with these scores. The other scores must belong to them."""
    scores = ProtocolScores(pairs=4, published_pairs=None, scores=values, intervals={}, groups={}, absent=absent or {})
    metrics = {name: METRICS[name] for name in ("answers", "CIDEr", "SPICE")}
    columns = choose_columns(metrics, {"toy/test": scores})
    shown_scores: list[str] = []
    for metric in metrics.values():
        shown_scores += metric.scores if metric.main_score in columns.main_scores else ()
    assert columns.scores == shown_scores
    return columns.main_scores


def test_tables_leave_out_a_metric_without_records_or_without_its_extra_input():
    every_score = {"exact_match": 0.5, "CIDEr": 1.0, "SPICE": 0.2}
    assert main_scores_of_tables(**every_score) == ["exact_match", "CIDEr", "SPICE"]
    no_questions = {"exact_match": ABSENT_RECORDS["questions"]}
    assert main_scores_of_tables(no_questions, CIDEr=1.0) == ["CIDEr"]
    assert main_scores_of_tables({"CIDEr": "no Java"}, exact_match=0.5, CIDEr=None) == ["exact_match", "CIDEr"]


def test_tables_have_no_word_scores_of_texts_that_are_counted_by_characters():
    assert main_scores_of_tables(**{"exact_match": 0.5, "CIDEr-char": 1.0}) == ["exact_match"]
    assert main_scores_of_tables(**{"exact_match": 0.5, "CIDEr-char": 1.0, "CIDEr": 0.5}) == ["exact_match", "CIDEr"]


def test_questions_and_pairs_that_several_protocols_score_are_counted_once():
    pairs = bench.pairs()
    pairs[0] = replace(pairs[0], question="What is red?")
    protocols = [
        ProtocolPairs("toy", Protocol("total", published_pairs=None), pairs),
        ProtocolPairs("toy", Protocol("some", published_pairs=None), pairs[:3]),
    ]
    assert count_questions(protocols) == 1
    assert count_captions(protocols) == 5


def test_the_page_has_one_table_of_protocols_and_the_rest_folded(root: Path, tmp_path: Path):
    protocols = (
        Protocol("total", published_pairs=None),
        Protocol("some", published_pairs=None, ids="[45]", pairs="pairs without a change"),
    )
    specs = {"toy": replace(DATASETS["pairs"], protocols=protocols)}
    page = draw(page_content(root, bench.pairs(root), specs), tmp_path)
    assert [row[:2] for row in table(page, "scores")[1:]] == [
        ["toy/total", "all pairs"],
        ["toy/some", "pairs without a change"],
    ]
    parts = page[page.index('<section id="protocols">') :]
    assert re.findall(r'<details class="fold part" id="([^"]+)">', parts) == ["toy-total", "toy-some"]
    assert "[45]" not in text_of(page)
    assert page.index('id="gallery"') < page.index('id="scores"')


def with_curves(toy: PageContent, folder: Path, text: str, **facts: str) -> PageContent:
    folder.mkdir(exist_ok=True)
    (folder / "curves.csv").write_text(text)
    return replace(toy, origin=Origin(facts=facts, curves=folder / "curves.csv"))


def test_the_page_shows_the_training_curves_and_the_facts_of_its_head(toy: PageContent, tmp_path: Path):
    rows = "step,loss,val_loss,val_cider\n0,5,,\n1,4,,\n2,1,2,0.5\n3,nan,,\n"
    page = draw(with_curves(toy, tmp_path / "model", rows, Model="small", Base="<b>"), tmp_path)
    assert "<dt>Model</dt><dd>small</dd></div>" in page
    assert "<dt>Base</dt><dd>&lt;b&gt;</dd></div>" in page
    training = page[page.index('<section id="training">') :]
    assert re.findall("<h3>(.*?)</h3>", training[: training.index("</section>")]) == [
        "Alignment, 1 step",
        "Fine-tuning, 3 steps",
    ]
    assert page.count('<svg class="chart"') == 3
    assert "1 value in curves.csv is NaN or infinite" in text_of(page)
    assert ["2", "1.0000", "2.0000", "50.0"] in table(page, "training")


def test_a_page_without_a_training_has_no_section_of_it(page: str):
    assert '<section id="training">' not in page
    assert 'href="#training"' not in page


def test_a_model_that_has_learned_nothing_is_told_so_at_the_head(root: Path, toy: PageContent, tmp_path: Path):
    mumbled = [replace(pair, prediction=f"x {number}") for number, pair in enumerate(bench.pairs(root))]
    page = draw(page_content(root, mumbled, CIDEr=0.0), tmp_path)
    assert page.index('<aside class="verdict">') < page.index('<dl class="tiles">')
    assert '<aside class="verdict">' not in draw(toy, tmp_path)


def test_what_the_training_warned_of_stands_at_the_head(toy: PageContent, tmp_path: Path):
    warned = replace(toy, origin=Origin(warnings=["the run takes 90 <steps>"]))
    page = draw(warned, tmp_path)
    assert "<li>the run takes 90 &lt;steps&gt;</li>" in page
    assert page.index('id="warnings"') < page.index('<dl class="tiles">')
    assert 'id="warnings"' not in draw(toy, tmp_path)


@pytest.mark.parametrize(("least", "is_noted"), [(7, True), (6, False)], ids=["too few pairs", "enough pairs"])
def test_a_page_of_few_pairs_says_why_it_has_no_intervals(
    least, is_noted, toy: PageContent, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(bootstrap, "MIN_PAIRS", least)
    words = text_of(draw(toy, tmp_path))
    assert ("Scores of fewer than 7 pairs have no interval" in words) is is_noted
    assert ("no interval for toy/test" in words) is is_noted


def test_equal_evidence_gives_equal_bytes_inside_the_page_or_in_the_folder_beside_it(toy: PageContent, tmp_path: Path):
    for name in ("first", "second"):
        write_report(toy, tmp_path / name, 0)
    files = {file.name: file.read_bytes() for file in (tmp_path / "first").rglob("*.*")}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "second").rglob("*.*")}
    page = files["report.html"].decode()
    linked_images: set[str] = set()
    for pair in gallery_of(page)["pairs"]:
        linked_images |= {*pair["images"], pair["outlined"]}
    assert linked_images == {f"images/{name}" for name in files if name not in ("report.html", "made.js")}
    write_report(toy, tmp_path / "first", 1)
    inside = gallery_of((tmp_path / "first" / "report.html").read_text())["pairs"]
    images = [image for pair in inside for image in (*pair["images"], pair["outlined"])]
    assert len(images) == 18
    assert all(image.startswith("data:image/webp;base64,") for image in images)
    assert list((tmp_path / "first" / "images").iterdir()) == []


def test_confusions_are_counted_and_drawn(toy: PageContent, page: str):
    assert confusion_table(toy.parsed.values())["rows"]["none"] == {"color": 1, "none": 1}
    body = page[page.index('<table class="confusion">') :]
    body = body[: body.index("</table>")]
    types = ["illumination", "removal", "color", "none"]
    assert re.findall(r'<th scope="col"><span>([^<]+)</span>', body) == types
    rows = [re.findall(r"<t[hd][^>]*>([^<]+)<", row) for row in body.split("<tr>")[2:]]
    drawn = [" ".join(row) for row in rows]
    assert drawn == ["illumination · · · 1", "removal · 1 · ·", "color · · 1 ·", "none · · 1 1"]
    assert body.count("var(--good)") == 3
    assert body.count("--v:0.500") == 2


def test_without_a_grammar_or_saliency_maps_or_all_pairs_the_page_says_so(root: Path, toy: PageContent, tmp_path: Path):
    bare = replace(page_content(root, bench.pairs(root), with_grammar=False), saliency=Path("none"))
    page = draw(replace(bare, report=bare.report.model_copy(update={"rows_in": 480})), tmp_path)
    text = text_of(page)
    assert "6 pairs, captioned and scored" in text
    assert not re.search("type right|True type and predicted type", text)
    assert {pair["outlined"] for pair in gallery_of(page)["pairs"]} == {None}
    assert "there is no saliency.npz" in text
    assert "Only these of the 480 test pairs were captioned" in text
    alone = draw(replace(toy, metrics={"change_accuracy": METRICS["change_accuracy"]}), tmp_path)
    assert list(tiles(alone))[0] == "Type of change right"
    assert gallery_of(alone)["columns"] == ["type_right", "place_right", "exact_right"]


def test_words_of_the_data_cannot_become_markup(root: Path, tmp_path: Path):
    words = "</script><script>alert(1)</script><img src=x>\u2028"
    pairs = [replace(pair, prediction=words, references=[words]) for pair in bench.pairs(root)]
    page = draw(page_content(root, pairs), tmp_path)
    assert page.count("<script") == 2
    assert "<img src=x" not in page
    assert gallery_of(page)["pairs"][0]["references"] == [words]


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        ("yes", None),
        ("conditions", "Shown. own pairs (licence: CC of a kind): show: as its page says."),
        ("no", "Not shown. CC of a kind: as its page says."),
    ],
)
def test_images_stand_on_the_page_as_the_licence_allows(
    answer: Any, note: str | None, toy: PageContent, tmp_path: Path
):
    permission = Permission(answer, "as its page says")
    licence = Licence("CC of a kind", None, permission, permission, permission)
    page = draw(replace(toy, specs={"toy": replace(DATASETS["pairs"], licence=licence)}), tmp_path, embedded_mb=0)
    assert [bool(pair["images"]) for pair in gallery_of(page)["pairs"]] == [answer != "no"] * 6
    assert any((tmp_path / "images").iterdir()) is (answer != "no")
    assert re.findall(r"<dt>Images of toy</dt><dd>(.*?)</dd>", page) == ([note] if note else [])
    assert "the green ball at the left was removed" in page


def tiles(page: str) -> dict[str, str]:
    figures = re.findall(r'<dt>([^<]+)</dt><dd><span class="figure">(.*?)</dd>', page)
    return {name: " ".join(re.sub("<[^>]+>", " ", value).split()) for name, value in figures}


def test_a_tile_is_named_by_its_score_and_in_percent_if_the_score_is_a_share(page: str):
    figures = tiles(page)
    assert "%" not in figures["CIDEr"]
    assert figures["Type of change right"].endswith("%")
    assert "None" not in figures
