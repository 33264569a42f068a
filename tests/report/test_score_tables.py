"""The tables of a run: protocols, groups, published rows."""

import re

import pytest

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.report.page import PageContent
from m3diff.report.score_tables import (
    MARK_NOTES,
    answer_table,
    describe_pairs,
    describe_rules,
    group_table,
    headline_table,
    overview_table,
    published_table,
    type_table,
)
from m3diff.report.tables import PARTIAL_MARK, Table, format_latex
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.metrics import BY_CHARACTERS, HEADLINE_SCORES, METRICS, headline_scores_by_metric
from m3diff.scoring.published import published_rows
from m3diff.scoring.results import ProtocolScores, headline_scores


def scores(
    pairs: int = 4, published_pairs: int | None = None, groups: dict | None = None, **values: float | None
) -> ProtocolScores:
    interval = {"CIDEr": Interval(low=0.25, high=0.75)}
    named_scores = {name.replace("_", "-"): value for name, value in values.items()}
    return ProtocolScores(
        pairs=pairs,
        published_pairs=published_pairs,
        scores=named_scores,
        intervals=interval,
        groups=groups or {},
        absent={},
    )


def texts(table: Table) -> list[list[str]]:
    return [[row.name, *row.labels, *(cell.text for cell in row.cells), "".join(row.marks)] for row in table.rows]


def test_a_partial_protocol_is_marked_and_a_full_one_is_not():
    protocols = {"a/x": scores(1270, 7970, CIDEr=0.5), "b/y": scores(4, 4, CIDEr=0.25), "c/z": scores()}
    table = overview_table(protocols, ["CIDEr", "SPICE"], {"a/x": "all pairs"})
    assert table.columns == ("Protocol", "Pairs", "n", "CIDEr", "SPICE")
    rows = [["a/x", "all pairs", "1,270 of 7,970", "50.0", "–", "*"], ["b/y", "", "4 of 4", "25.0", "–", ""]]
    rows.append(["c/z", "", "4", "–", "–", ""])
    assert texts(table) == rows
    assert table.notes == [MARK_NOTES[PARTIAL_MARK]]
    assert table.rows[0].cells[0].interval == Interval(low=25, high=75)
    assert overview_table({"b/y": scores(4, 4)}, [], {}).notes == []


def test_groups_that_have_pairs_have_a_row_and_types_a_table_of_their_own():
    groups = {
        name: {"pairs": n, "CIDEr": 0.1 * n} for name, n in (("distractors", 2), ("change", 3), ("multi_change", 0))
    }
    groups["by_type/color"] = {"pairs": 3, "CIDEr": 0.3, "type_accuracy": 0.5, "exact_accuracy": 0.25}
    protocol_scores = scores(5, CIDEr=0.5, groups=groups)
    rows = [["all", "5", "50.0", ""], ["with a change", "3", "30.0", ""], ["without a change", "2", "20.0", ""]]
    assert texts(group_table("toy/all", protocol_scores, ["CIDEr"])) == rows
    table = type_table("toy/all", protocol_scores, ["color"], ["CIDEr"])
    assert table.columns == ("Type", "n", "type right", "all right", "CIDEr")
    assert texts(table) == [["color", "3", "50.0", "25.0", "30.0", ""]]


def published(name: str, run: ProtocolScores) -> Table:
    table = published_table(f"{name}/test", run, published_rows(name), "CIDEr")
    assert table is not None
    return table


def test_this_run_stands_among_the_published_rows_by_its_cider():
    rows = published("iedit", scores(495, 495, CIDEr=0.6, BLEU_4=0.99)).rows
    rank = [row.is_this_run for row in rows].index(True)
    ciders = [row.cells[3].value or 0 for row in rows]
    assert ciders == sorted(ciders, reverse=True)
    assert rows[rank].name == "this run"
    assert ciders[rank] == 60
    assert rows[rank].labels == ("", "495")
    assert rows[0].labels[1] == "495"


def test_the_best_of_published_rows_and_this_run_is_marked_by_column():
    rows = published("iedit", scores(495, 495, CIDEr=0.6, BLEU_4=0.99)).rows
    rank = [row.is_this_run for row in rows].index(True)
    assert rows[rank].cells[0].is_best
    assert [row.cells[3].is_best for row in rows].index(True) == 0


def test_a_benchmark_without_published_rows_has_no_table_of_them():
    assert published_table("unknown/test", scores(), published_rows("unknown"), "CIDEr") is None


def test_a_run_of_fewer_pairs_is_never_the_best():
    table = published("iedit", scores(300, 495, CIDEr=9.0))
    assert table.rows[0].name == "this run"
    assert table.rows[0].marks == ("*",)
    assert not table.rows[0].cells[3].is_best
    assert table.rows[1].cells[3].is_best
    assert table.notes[0] == MARK_NOTES[PARTIAL_MARK]


def test_rows_whose_epoch_was_chosen_on_the_test_split_are_marked():
    table = published("spot_the_diff", scores(CIDEr=0.3))
    assert [row.name for row in table.rows if row.marks == ("†",)] == ["CLIP4IDC"]
    assert table.notes[0].startswith("† ")
    assert "CLIP4IDC: " in table.notes[0]


def test_without_marked_rows_there_is_no_note_on_chosen_epochs():
    table = published("iedit", scores(495, 495, CIDEr=0.6))
    assert not any("chosen" in note for note in table.notes)


def test_pairs_without_a_change_are_marked_where_their_cider_is_0_and_nowhere_else():
    calm = {"distractors": {"pairs": 4, "CIDEr": 0.0}}
    mixed = {"distractors": {"pairs": 2, "CIDEr": 0.0}}
    protocols = {
        "a/calm": scores(4, CIDEr=0.0, groups=calm),
        "b/mixed": scores(4, CIDEr=0.5, groups=mixed),
        "c/bad": scores(4, CIDEr=0.0),
    }
    table = overview_table(protocols, ["CIDEr"], {})
    assert [row.marks for row in table.rows] == [("‡",), (), ()]
    assert [note[0] for note in table.notes] == ["‡"]
    assert [row.marks for row in group_table("b/mixed", protocols["b/mixed"], ["CIDEr"]).rows] == [(), ("‡",)]
    assert r"a/calm$^\ddagger$" in format_latex(table)


@pytest.mark.parametrize(
    ("protocol", "words"),
    [
        (Protocol("total", published_pairs=None), "all pairs"),
        (
            Protocol("semantic", published_pairs=None, ids=r"\d+\.png", pairs="pairs with a change"),
            "pairs with a change",
        ),
        (
            Protocol("add", published_pairs=None, ids=r"\d+\.png", change_types=("add",)),
            "pairs whose only change is add",
        ),
        (Protocol("asked", published_pairs=None, kinds=("count", "colour")), "only count and colour"),
        (Protocol("own", published_pairs=None, ids="x.*"), "some pairs, chosen by their names"),
    ],
    ids=["all", "by words", "by type", "by kind", "by a pattern without words"],
)
def test_the_pairs_of_a_protocol_are_named_in_words(protocol, words):
    assert describe_pairs(protocol) == words
    assert "\\d" not in describe_rules(protocol, False)


RULES: dict[str, tuple[Protocol, bool, list[str]]] = {
    "plain": (
        Protocol("p", published_pairs=None),
        False,
        ["All pairs", "compared with all references", "PTB tokenizer"],
    ),
    "joined": (Protocol("p", published_pairs=None, references="joined"), False, ["joined into one text"]),
    "cut": (Protocol("p", published_pairs=None, max_words=20), False, ["truncated after 20 words"]),
    "characters": (Protocol("p", published_pairs=None), True, ["each character counts as a word"]),
    "white space": (Protocol("p", published_pairs=None, tokenizer="whitespace"), False, ["only at white space"]),
}


@pytest.mark.parametrize("case", RULES)
def test_the_rules_of_a_protocol_are_told_where_they_apply_and_nowhere_else(case):
    protocol, counts_characters, own_words = RULES[case]
    text = describe_rules(protocol, counts_characters)
    assert [words for words in own_words if words not in text] == []
    special_words = [words for name in RULES if name != "plain" for words in RULES[name][2]]
    assert [words for words in special_words if words in text and words not in own_words] == []


def make_question_scores(questions: int, **values: float | None) -> dict[str, float | None]:
    return {"questions": questions, "pairs": questions, **values}


def test_the_answers_have_a_row_for_each_kind_that_was_asked_with_its_interval():
    kinds = {
        "by_kind/place": make_question_scores(3, exact_match=0.5, number_accuracy=None),
        "by_kind/count": make_question_scores(1200, exact_match=0.25, number_accuracy=0.75),
        "by_kind/none": make_question_scores(0, exact_match=None),
    }
    values = make_question_scores(
        1203, exact_match=0.4, number_accuracy=0.75, yes_no_accuracy=None, choice_accuracy=None
    )
    interval = Interval(low=0.2, high=0.3)
    protocol_scores = scores(groups=kinds).model_copy(
        update={
            "scores": values,
            "intervals": {"exact_match": Interval(low=0.3, high=0.5)},
            "kind_intervals": {"count": {"exact_match": interval}},
        }
    )
    table = answer_table("toy/all", protocol_scores)
    assert table is not None
    assert table.name == "toy-all-answers"
    assert table.columns == ("Question", "n", "exact match", "number")
    assert texts(table) == [
        ["all questions", "1,203", "40.0", "75.0", ""],
        ["count", "1,200", "25.0", "75.0", ""],
        ["place", "3", "50.0", "–", ""],
    ]
    assert [row.cells[0].bounds for row in table.rows] == ["30.0–50.0", "20.0–30.0", ""]


def test_every_form_of_a_question_has_a_column_of_answers():
    names = ("exact_match", "yes_no_accuracy", "number_accuracy", "choice_accuracy")
    values = make_question_scores(4, **{name: 0.1 * number for number, name in enumerate(names, start=1)})
    table = answer_table("toy/all", scores().model_copy(update={"scores": values}))
    assert table is not None
    assert table.columns[2:] == ("exact match", "yes or no", "number", "choice")
    assert texts(table) == [["all questions", "4", "10.0", "20.0", "30.0", "40.0", ""]]


def test_a_protocol_without_questions_has_no_table_of_answers():
    assert answer_table("toy/all", scores(CIDEr=0.5)) is None


def test_every_protocol_of_a_dataset_that_chooses_pairs_by_name_says_which_in_words():
    silent = [
        (name, protocol.name)
        for name, spec in DATASETS.items()
        for protocol in spec.protocols
        if protocol.ids != ".*" and not (protocol.pairs or protocol.change_types)
    ]
    assert silent == []


def test_every_score_of_the_terminal_has_a_row_in_words(toy: PageContent):
    """`make run` prints those of headline.json."""
    table = headline_table(toy.report, ["toy/test"])
    printed = headline_scores(toy.report)["toy/test"]
    assert [row.cells[0].text for row in table.rows] == [f"{round(value, 1):.1f}" for value in printed.values()]
    assert [row.name for row in table.rows if re.search(r"[a-z]_[a-z]", row.name)] == []


def test_every_headline_score_belongs_to_its_metric():
    scores_of_metrics = {name: METRICS[name].scores + METRICS[name].overall for name in METRICS}
    for score, headline in HEADLINE_SCORES.items():
        assert score.removesuffix(BY_CHARACTERS) in scores_of_metrics[headline.metric], score


def test_the_model_card_and_mlflow_list_scores_in_the_order_of_the_metrics():
    metrics = [headline.metric for headline in headline_scores_by_metric().values()]
    assert list(dict.fromkeys(metrics)) == [name for name in METRICS if name in metrics]
    scores_of_captions = [
        score
        for score, headline in headline_scores_by_metric().items()
        if METRICS[headline.metric].records != "questions"
    ]
    assert scores_of_captions[:3] == ["CIDEr", "CIDEr_shuffled", "CIDEr-char"]
