import json

import pytest

from components.evaluate.coco import ALL, METRICS, CocoScores
from components.evaluate.grammar import parse_predictions
from components.evaluate.metrics import change_scores, clause_scores, confuse, group_pairs, summarise
from tests.evaluate import bench

PAIRS = bench.pairs()
READINGS = parse_predictions(bench.grammar(), PAIRS)


def test_pairs_are_grouped_by_change_type_dataset_and_number_of_changes():
    assert group_pairs(PAIRS) == {
        "change": ["toy/0", "toy/1", "toy/2", "toy/3"],
        "distractors": ["toy/4", "toy/5"],
        "multi_change": ["toy/3"],
        "by_type/color": ["toy/0"],
        "by_type/illumination": ["toy/2"],
        "by_type/removal": ["toy/1"],
        "by_dataset/toy": [f"toy/{number}" for number in range(6)],
    }


def test_pairs_of_unknown_type_are_neither_changes_nor_distractors():
    groups = group_pairs([bench.pair("x", ["y"], [])])
    assert groups["change"] == groups["distractors"] == []
    assert groups["by_dataset/toy"] == ["toy/0"]


def test_change_scores_are_those_counted_by_hand():
    assert change_scores(READINGS.values()) == {
        "change_type_accuracy": 2 / 3,  # the third says that nothing changed
        "change_exact_accuracy": 1 / 3,  # the second names another place
        "no_change_recall": 1 / 2,
        "false_no_change": 1 / 4,
    }


def test_without_readings_there_is_no_change_score():
    assert set(change_scores([]).values()) == {None}


def test_clause_scores_of_several_changes_are_those_counted_by_hand():
    found = clause_scores([READINGS["toy/3"]])
    assert found == {
        "changes": 2,
        "type_precision": 1 / 2,
        "type_recall": 1 / 2,
        "exact_precision": 1 / 2,
        "exact_recall": 1 / 2,
        "all_types_right": 0.0,
        "all_exact_right": 0.0,
    }


def test_the_confusion_counts_what_was_said_for_each_type():
    assert confuse(READINGS.values()) == {
        "color": {"color": 1},
        "removal": {"removal": 1},
        "illumination": {"none": 1},
        "none": {"none": 1, "color": 1},
    }


def test_metrics_hold_the_names_that_dvc_and_the_gate_read():
    groups = group_pairs(PAIRS)
    scores = CocoScores({name: dict.fromkeys(METRICS, 0.5) for name in (ALL, *groups)}, {}, 0.1, {"SPICE": "why"})
    written = json.loads(json.dumps(summarise(PAIRS, 9, groups, scores, READINGS).model_dump(mode="json")))
    assert {
        "BLEU-1",
        "BLEU-2",
        "BLEU-3",
        "BLEU-4",
        "METEOR",
        "ROUGE-L",
        "CIDEr",
        "CIDEr_shuffled",
        "change_type_accuracy",
        "change_exact_accuracy",
        "no_change_recall",
        "false_no_change",
        "by_type",
        "distractors",
        "change",
    } <= written.keys()
    assert (written["rows_in"], written["rows_out"], written["CIDEr_shuffled"]) == (9, 6, 0.1)
    assert written["by_type"]["color"]["type_accuracy"] == 1.0
    assert written["by_type"]["color"]["CIDEr"] == pytest.approx(0.5)
    assert written["multi_change"]["pairs"] == 1
