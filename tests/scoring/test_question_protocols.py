"""Metrics that single protocols have: RSRCC's first answers, ChangeChat's kinds of questions, NLVR2's consistency."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m3diff.commands.score import score
from m3diff.commands.score.report import ScoreReport
from m3diff.datasets import DATASETS
from m3diff.records.errors import DataError
from m3diff.scoring import bootstrap, run
from m3diff.scoring.metrics import METRICS, binary_change, consistency, first_answer, grid_cells, object_counts
from m3diff.scoring.metrics.object_counts import read_count
from m3diff.scoring.pairs import ALL_PAIRS, EvalPair
from m3diff.scoring.protocols import list_protocol_metrics
from m3diff.settings.load import load_params
from m3diff.stages.code import modules_by_stage
from m3diff.stages.evaluate.stage import evaluate
from tests import layouts
from tests.errors import raises
from tests.layouts import ROAD_OPTIONS, judge_by_polars_alone, rsrcc_text, run_ingest, run_validate, write_json
from tests.scoring import bench
from tests.scoring.bench import table, text_of
from tests.toy import REPOSITORY


def answer(name: str, reference: str, prediction: str) -> EvalPair:
    return EvalPair(
        id=f"toy/{name}",
        dataset="toy",
        images=(),
        references=[reference],
        change_types=[],
        prediction=prediction,
        question="?",
    )


def compute(metric: Any, pairs: list[EvalPair], **groups: list[str]) -> Any:
    """Return the scores of a metric for all pairs and for groups of names."""
    ids = {ALL_PAIRS: [pair.id for pair in pairs]}
    ids |= {group: [f"toy/{name}" for name in names] for group, names in groups.items()}
    return metric.compute(pairs, ids, bench.metric_inputs())


def test_protocols_name_metrics_that_only_protocols_have():
    metric_names = {name for spec in DATASETS.values() for name in list_protocol_metrics(spec.protocols)}
    assert metric_names == {name for name, metric in METRICS.items() if metric.protocol_only}


def test_the_page_of_scores_names_each_protocol_with_metrics_of_its_own():
    page = (REPOSITORY / "docs/extending.md").read_text()
    for dataset, spec in DATASETS.items():
        for protocol in spec.protocols:
            assert (f"`{dataset}/{protocol.name}`" in page) == bool(protocol.metrics), protocol.name


def test_evaluate_depends_on_the_metrics_of_the_protocols_of_its_datasets():
    params = load_params(REPOSITORY / "params.yaml")
    grid_cells_module = METRICS.modules["grid_cells"]
    assert grid_cells_module not in modules_by_stage(params)["evaluate"]
    entries = params.ingest.datasets | {"chats": layouts.make_entry("changechat", Path("x"))}
    ingest = params.ingest.model_copy(update={"datasets": entries})
    assert grid_cells_module in modules_by_stage(params.model_copy(update={"ingest": ingest}))["evaluate"]


def test_a_protocol_only_metric_has_its_scores_columns_and_no_java():
    for metric in METRICS.values():
        if metric.protocol_only:
            scores = compute(metric, [answer("a-0-0-0", "x", "y")])
            assert tuple(scores.groups[ALL_PAIRS]) == metric.scores
            assert scores.absent.keys() <= {metric.main_score}
            assert metric.records == "questions"
            assert not metric.java


@pytest.mark.parametrize(
    ("metric", "reference", "main_score", "reason"),
    [
        ("first_answer", "a road", "first_answer_accuracy", first_answer.NO_FORM),
        ("binary_change", "unknown", "binary_f1", binary_change.NO_TRUTH),
        ("object_counts", "many", "buildings_mae", object_counts.NO_COUNT),
        ("grid_cells", "somewhere", "buildings_f1", grid_cells.NO_LIST),
        ("consistency", "True", "consistency", consistency.NO_IDENTIFIER),
    ],
)
def test_without_a_question_to_score_the_main_score_has_a_reason(metric, reference, main_score, reason):
    scores = compute(METRICS[metric], [answer("0", reference, reference)])
    assert scores.absent == {main_score: reason}
    assert set(scores.groups[ALL_PAIRS].values()) == {None}


# RSRCC


@pytest.mark.parametrize(
    ("reference", "prediction", "is_right"),
    [
        ("Yes", "Yes", True),
        ("Yes", "yes, there is no doubt", True),
        ("Yes", "There is no doubt: yes", False),
        ("No", "I know it", False),
        ("No", "", False),
        ("B", "B", True),
        ("B", "(b) the road", True),
        ("B", "The answer is B.", True),
        ("B", "It is a house, so B", False),
        ("A", "It is a house", True),
        ("C", "AC", False),
        ("D", "E or D", True),
    ],
)
def test_the_first_yes_no_or_letter_counts_even_if_it_is_an_article(reference, prediction, is_right):
    verdict = first_answer.judge_first_answer(prediction, [reference])
    form = "yes_no" if reference in ("Yes", "No") else "choice"
    assert verdict == {"first_answer_right": is_right, f"first_{form}_right": is_right}


@pytest.mark.parametrize("references", [["E"], ["a road"], ["Yes", "A"], [""], []])
def test_references_of_neither_form_are_not_scored(references):
    assert first_answer.judge_first_answer("Yes", references) == {}


def test_first_answers_are_scored_in_all_and_by_form():
    pairs = [
        answer("0", "Yes", "yes"),
        answer("1", "No", "maybe"),
        answer("2", "B", "It is a B"),
        answer("3", "D", "D"),
    ]
    scores = compute(METRICS["first_answer"], pairs, choice=["2", "3"], none=[])
    assert scores.groups == {
        ALL_PAIRS: {"first_answer_accuracy": 2 / 4, "first_choice_accuracy": 1 / 2, "first_yes_no_accuracy": 1 / 2},
        "choice": {"first_answer_accuracy": 1 / 2, "first_choice_accuracy": 1 / 2, "first_yes_no_accuracy": None},
        "none": dict.fromkeys(first_answer.COLUMN_OF_SCORE),
    }
    assert scores.absent == {}


# ChangeChat: changed or not


def test_changed_pairs_are_the_positives_and_any_other_text_says_unchanged():
    pairs = [
        answer("0", "Yes", "Yes"),
        answer("1", "Yes", "yes, a road"),
        answer("2", "Yes", "No"),
        answer("3", "No", "Yes."),
        answer("4", "No", "No"),
        answer("5", "No", ""),
        answer("6", "unknown", "Yes"),
    ]
    scores = compute(METRICS["binary_change"], pairs, unchanged=["3", "4"])
    assert scores.groups[ALL_PAIRS] == {
        "binary_accuracy": 4 / 6,
        "binary_precision": 2 / 3,
        "binary_recall": 2 / 3,
        "binary_f1": 2 / 3,
    }
    assert scores.groups["unchanged"]["binary_accuracy"] == 1 / 2
    assert scores.groups["unchanged"]["binary_recall"] is None
    assert "toy/6" not in scores.pairs


def test_precision_and_recall_are_not_exchanged():
    pairs = [answer("0", "Yes", "Yes"), answer("1", "Yes", "No"), answer("2", "Yes", "No"), answer("3", "No", "Yes")]
    scores = compute(METRICS["binary_change"], pairs).groups[ALL_PAIRS]
    assert scores["binary_precision"] == 1 / 2
    assert scores["binary_recall"] == 1 / 3
    assert scores["binary_f1"] == pytest.approx(2 / 5)


# ChangeChat: numbers of roads and buildings


@pytest.mark.parametrize(
    ("text", "roads", "buildings"),
    [
        ("There is 1 new road and 10 new houses.", 1, 10),
        ("No roads has changed, and 1 building has changed.", 0, 1),
        ("two new roads, twenty-one villas", 2, 21),
        ("12 new buildings and no new roads", 0, 12),
        ("1,200 new buildings and 2 roads", 2, 1200),
        ("2,3 new buildings", 0, 3),
        ("A road and a house appear.", 1, 1),
        ("3 houses are built along the road on the left.", None, 3),
        ("3 houses are built.", 0, 3),
        ("There are 2 of the 5 new houses near 1 road.", 1, 5),
        ("No changes have occurred.", 0, 0),
        ("Nothing is new.", 0, 0),
        ("There is no change in roads and 4 new buildings.", 0, 4),
        ("Some houses.", None, None),
        ("many", None, None),
        ("7", None, None),
    ],
)
def test_the_number_before_an_object_is_its_count(text, roads, buildings):
    if text.startswith("Some"):
        roads = 0  # roads are not named
    assert read_count(text, "roads") == roads
    assert read_count(text, "buildings") == buildings


def test_count_errors_are_means_in_which_an_unreadable_answer_counts_as_zero():
    pairs = [
        answer("0", "There are 2 new roads and 4 new buildings.", "1 road and 7 houses"),
        answer("1", "There are 2 new roads and 4 new buildings.", "a lot"),
        answer("2", "many", "1 road"),
    ]
    scores = compute(METRICS["object_counts"], pairs, first=["0"])
    assert scores.groups[ALL_PAIRS] == {
        "roads_mae": (1 + 2) / 2,
        "roads_rmse": pytest.approx(((1 + 4) / 2) ** 0.5),
        "buildings_mae": (3 + 4) / 2,
        "buildings_rmse": pytest.approx(((9 + 16) / 2) ** 0.5),
        "unreadable_counts": 1 / 2,
    }
    assert scores.groups["first"]["buildings_rmse"] == 3
    assert scores.pairs.keys() == {"toy/0", "toy/1"}


# ChangeChat: cells of a grid


@pytest.mark.parametrize(
    ("text", "roads", "buildings"),
    [
        (
            "roads ['top-left'] buildings ['center-center', 'bottom-right']",
            {"top-left"},
            {"center-center", "bottom-right"},
        ),
        ("Roads: [Top-Left]. Buildings: []", {"top-left"}, set()),
        ("buildings ['top-left'] roads []", set(), {"top-left"}),
        ("roads [] buildings [everywhere]", set(), None),
        ("No road has changed. buildings ['top-left']", None, {"top-left"}),
        ("roads: the road at ['top-left']; buildings []", {"top-left"}, set()),
        ("roads top-left", None, None),
        ("", None, None),
    ],
)
def test_cells_are_read_from_the_list_behind_an_object(text, roads, buildings):
    assert grid_cells.read_cells(text, "roads") == roads
    assert grid_cells.read_cells(text, "buildings") == buildings


CELL_ANSWERS = [
    ("roads ['top-left', 'top-right'] buildings []", "roads ['top-left', 'center-left'] buildings []"),
    ("roads [] buildings []", "roads [] buildings []"),
    ("roads [] buildings ['top-left']", "I see none"),
    ("somewhere", "roads [] buildings []"),
]


def test_two_empty_lists_of_cells_are_exact_but_have_jaccard_zero():
    pairs = [answer(str(number), *texts) for number, texts in enumerate(CELL_ANSWERS)]
    scores = compute(METRICS["grid_cells"], pairs, empty=["1"])
    assert scores.groups[ALL_PAIRS] == {
        "roads_precision": 1 / 2,
        "roads_recall": 1 / 2,
        "roads_f1": 1 / 2,
        "roads_jaccard": pytest.approx((1 / 3 + 0 + 0) / 3),
        "roads_exact": 2 / 3,
        "roads_unreadable_cells": 1 / 3,
        "buildings_precision": None,
        "buildings_recall": 0.0,
        "buildings_f1": 0.0,
        "buildings_jaccard": 0.0,
        "buildings_exact": 2 / 3,
        "buildings_unreadable_cells": 1 / 3,
    }
    assert scores.groups["empty"]["roads_exact"] == 1.0
    assert scores.groups["empty"]["roads_f1"] is None
    assert scores.pairs.keys() == {"toy/0", "toy/1", "toy/2"}


@pytest.mark.filterwarnings("ignore:Jaccard is ill-defined")
def test_cells_have_the_scores_that_scikit_learn_gives_the_authors():
    metrics = pytest.importorskip("sklearn.metrics")
    cells = ("top-left", "top-right", "center-left")
    pairs = [answer(str(number), *texts) for number, texts in enumerate(CELL_ANSWERS[:3])]
    truth = []
    predicted = []
    for pair in pairs:
        true_cells = grid_cells.read_cells(pair.references[0], "roads") or ()
        predicted_cells = grid_cells.read_cells(pair.prediction, "roads") or ()
        truth.append([int(cell in true_cells) for cell in cells])
        predicted.append([int(cell in predicted_cells) for cell in cells])
    scores = compute(METRICS["grid_cells"], pairs).groups[ALL_PAIRS]
    assert scores["roads_f1"] == pytest.approx(metrics.f1_score(truth, predicted, average="micro"))
    assert scores["roads_jaccard"] == pytest.approx(metrics.jaccard_score(truth, predicted, average="samples"))
    assert scores["roads_exact"] == pytest.approx(metrics.accuracy_score(truth, predicted))


# NLVR2


def test_a_statement_is_consistent_if_all_of_its_pairs_are_judged_rightly():
    labels = {"dev-1-0-0": "True", "dev-1-1-0": "False", "dev-1-0-1": "True", "dev-2-0-0": "False"}
    predictions = {"dev-1-0-0": "true.", "dev-1-1-0": "True", "dev-1-0-1": "True", "dev-2-0-0": "FALSE"}
    pairs = [answer(name, labels[name], predictions[name]) for name in labels]
    scores = compute(METRICS["consistency"], pairs, second=["dev-1-0-1"], none=[])
    assert scores.groups == {
        ALL_PAIRS: {"consistency": 2 / 3},
        "second": {"consistency": 1.0},
        "none": {"consistency": None},
    }


# Texts


def test_lowercase_words_have_no_full_stops():
    texts = ["There is no difference.", "A  U.S. road, built"]
    assert run.split_lowercase_words(texts) == {texts[0]: "there is no difference", texts[1]: "a u s road, built"}
    rules = run.TokenRules("lowercase", by_characters=False)
    assert run.tokenise_texts(texts[:1], rules, limit_s=1) == {texts[0]: "there is no difference"}


# Both datasets from their files to the report, with predictions that a test makes


def evaluate_dataset(
    root: Path, reader: str, predictions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """Ingest, validate and evaluate a dataset, and return its part of metrics.json. The report is in root/report."""
    monkeypatch.setattr(run, "tokenise", lambda texts, limit_s: {text: text.lower().rstrip(".") for text in texts})
    monkeypatch.setattr(bootstrap, "MIN_PAIRS", 2)
    judge_by_polars_alone(monkeypatch)
    run_ingest(layouts.WRITERS[reader](root / "raw"), reader, reader)
    run_validate(root, near_duplicate_max_diff=None)
    (root / "predictions").mkdir()
    rows = bench.as_file({f"{reader}/{name}": text for name, text in predictions.items()})
    write_json(root / "predictions/predictions.json", rows)
    cfg = bench.config(metrics=("CIDEr", "ROUGE-L"), allow_fewer_pairs=True)
    folders = (root / "records", root / "clean", root / "predictions")
    evaluate(cfg, bench.compute(), *folders, root / "report")
    return json.loads((root / "report/metrics.json").read_text())["protocols"]


def test_rsrcc_is_scored_by_the_authors_rule_and_by_stricter_ones(tmp_path, monkeypatch):
    predictions = {"5e_6f?0": "Yes", "5e_6f?1": "There is no doubt: yes", "7a_8b?0": "It is not."}
    protocols = evaluate_dataset(tmp_path, "rsrcc", predictions, monkeypatch)
    scores = protocols["rsrcc/published"]
    assert scores["pairs"] == 3
    assert scores["published_pairs"] == 21_999
    assert scores["first_answer_accuracy"] == 1 / 3
    assert scores["first_choice_accuracy"] is None
    assert scores["by_kind"]["yes/no"]["first_yes_no_accuracy"] == 1 / 3
    assert scores["by_kind"]["yes/no"]["intervals"].keys() >= {"exact_match", "first_answer_accuracy"}
    assert scores["yes_no_accuracy"] == 1 / 3
    assert scores["intervals"]["first_answer_accuracy"] == {"low": 0.0, "high": 1.0}
    page = (tmp_path / "report/report.html").read_text()
    assert table(page, "scores")[0] == ["Protocol", "Pairs", "n", "exact_match", "first_answer_accuracy"]
    assert "questions: first word or letter of the answer right, % 33.3" in text_of(page)
    assert "First answer right 33.3" in text_of(page)
    assert json.loads((tmp_path / "report/headline.json").read_text())["rsrcc/published"] == {
        "exact_match": 33.33,
        "yes_no_accuracy": 33.33,
        "first_answer_accuracy": 33.33,
        "first_yes_no_accuracy": 33.33,
    }


CHATS = {
    "": {"4": "2 villas are built along the road.", "5": "There is no difference."},
    "?binary-0": {"4": "Yes", "5": "Yes"},
    "?count-0": {"4": "There is 1 new road and 10 new buildings.", "5": "No change."},
    "?localisation-0": {"4": "roads [] buildings ['top-left']", "5": "roads [] buildings []"},
    "?open-0": {"4": "Yes, a lane appears on the left.", "5": "no"},
    "?open-1": {"4": "They are at the top."},
    "?dialogue-0@0": {"4": "Yes", "5": "No"},
    "?dialogue-0@1": {"4": "2", "5": "0"},
    "?dialogue-0@2": {"4": "x", "5": "y"},
}
CHAT_PREDICTIONS = {
    f"test_00000{number}.png{end}": text for end, texts in CHATS.items() for number, text in texts.items()
}


def test_each_kind_of_changechat_has_its_protocol_and_its_metric(tmp_path, monkeypatch):
    protocols = evaluate_dataset(tmp_path, "changechat", CHAT_PREDICTIONS, monkeypatch)
    pairs = {name.removeprefix("changechat/"): scores["pairs"] for name, scores in protocols.items()}
    assert pairs == {
        "caption": 2,
        "change": 1,
        "no_change": 1,
        "binary": 2,
        "count": 2,
        "localisation": 2,
        "open": 3,
    }, "turns of dialogues are not scored"
    assert protocols["changechat/caption"]["ROUGE-L"] == 1.0, "case and full stops do not count"
    assert "binary_f1" not in protocols["changechat/caption"]
    assert protocols["changechat/binary"]["binary_precision"] == 1 / 2
    assert protocols["changechat/binary"]["binary_recall"] == 1.0
    assert protocols["changechat/binary"]["distractors"]["binary_accuracy"] == 0.0
    assert protocols["changechat/count"]["roads_mae"] == 1 / 2
    assert protocols["changechat/count"]["buildings_rmse"] == 0.0
    assert protocols["changechat/localisation"]["buildings_recall"] == 1 / 2
    assert protocols["changechat/localisation"]["roads_exact"] == 1 / 2
    assert protocols["changechat/open"]["by_kind"]["open"]["pairs"] == 3
    page = (tmp_path / "report/report.html").read_text()
    groups = {name: table(page, f"changechat-{name}") for name in ("caption", "count")}
    assert groups["caption"][0] == ["Pairs", "n", "CIDEr", "ROUGE-L"]
    assert {"roads_mae", "buildings_rmse"} < set(groups["count"][0])
    assert "binary_f1" not in groups["count"][0]
    header, *rows = table(page, "scores")
    assert {"binary_f1", "buildings_mae", "buildings_f1"} < set(header)
    assert "captions" in [row[1] for row in rows]
    assert "answered 9 questions about images" in text_of(page)
    assert "described what changed in 2 pairs" in text_of(page)


# `m3diff score`


def score_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Path, answers: Any, *task: str) -> ScoreReport:
    monkeypatch.setattr("m3diff.commands.score.require_java", lambda: None)
    write_json(tmp_path / "answers.json", answers)
    return score(tmp_path / "answers.json", *task, data=data, allow_faults=True)


def test_score_takes_predictions_for_the_questions_of_rsrcc(tmp_path, monkeypatch):
    root = layouts.write_rsrcc(tmp_path / "raw")
    answers = {"5e_6f?0": "Yes", "7a_8b?0": "yes", "rsrcc/5e_6f?1": "Yes."}
    report = score_file(tmp_path, monkeypatch, root, answers, "rsrcc")
    assert report.protocol == "published"
    assert report.scores["first_answer_accuracy"] == 2 / 3
    assert report.scores["yes_no_accuracy"] == 2 / 3
    assert report.by_group["by_kind/yes/no"]["pairs"] == 3
    assert len(report.faults) == 1, "there are fewer questions than in papers"
    lines = [line.split() for line in report.lines()]
    assert ["first_answer_accuracy", "0.6667", "66.7"] in lines


def test_score_names_the_rows_of_a_dataset_that_it_cannot_read(tmp_path, monkeypatch):
    rows = [*layouts.RSRCC_ROWS["test"], ("5e_6f", rsrcc_text("What?", "F", *ROAD_OPTIONS))]
    root = layouts.write_rsrcc(tmp_path / "raw", layouts.RSRCC_ROWS | {"test": rows})
    write_json(tmp_path / "answers.json", {"5e_6f?0": "Yes", "7a_8b?0": "yes", "5e_6f?1": "Yes"})
    monkeypatch.setattr("m3diff.commands.score.require_java", lambda: None)
    with raises(DataError, "score.faults_not_allowed") as refused:
        score(tmp_path / "answers.json", "rsrcc", data=root)
    fault = refused.value.fields["faults"][0]
    assert fault.code == "score.dataset_row_unusable"
    assert fault.fields["path"] == f"{root}: test/metadata.csv, line 5"
    assert fault.fields["cause"].code == "datasets.answer_names_no_option"


def test_score_takes_one_kind_of_changechat_and_notes_the_other_predictions(tmp_path, monkeypatch):
    root = layouts.write_changechat(tmp_path / "raw")
    report = score_file(tmp_path, monkeypatch, root, CHAT_PREDICTIONS, "changechat", "binary")
    assert report.pairs == 2
    assert report.scores["binary_accuracy"] == 1 / 2
    assert "roads_mae" not in report.scores
    count = len(CHAT_PREDICTIONS) - 2
    assert any(note.startswith(f"{count} captions of pairs outside the protocol 'binary'") for note in report.notes)


def test_every_metric_says_why_it_scores_no_record():
    protocol: Any = SimpleNamespace(select=lambda records: SimpleNamespace(pairs=[]))
    empty_results = run.explain_absent_records(METRICS, protocol)
    assert empty_results.keys() == METRICS.keys()
    for name, result in empty_results.items():
        assert result.absent[METRICS[name].main_score]


def test_a_metric_that_scores_a_record_has_nothing_to_explain():
    protocol: Any = SimpleNamespace(select=lambda records: SimpleNamespace(pairs=["a pair"]))
    assert run.explain_absent_records(METRICS, protocol) == {}
