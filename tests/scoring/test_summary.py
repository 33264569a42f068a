import json
from dataclasses import replace
from pathlib import Path

from m3diff.datasets.spec import Protocol
from m3diff.scoring.metrics import choose_metrics
from m3diff.scoring.metrics.metric import MetricScores
from m3diff.scoring.protocols import ProtocolPairs
from m3diff.scoring.run import compute_metrics, merge
from m3diff.scoring.summary import HEADLINE, EvaluateReport, Interval, headline, summarise
from tests.scoring import bench

TOY = ProtocolPairs("toy", Protocol("total", n=8), bench.pairs())


def report(toy: ProtocolPairs = TOY) -> EvaluateReport:
    """Every caption score 0.5, the accuracies as they are, no control, one interval."""
    metrics = choose_metrics(bench.ALL_METRICS)
    fixed = {
        name: MetricScores({group: dict.fromkeys(metric.scores, 0.5) for group in toy.groups}, {})
        for name, metric in metrics.items()
    }
    accuracy = {"change_accuracy": metrics["change_accuracy"]}
    fixed["change_accuracy"] = compute_metrics(accuracy, [toy], bench.parse(toy.pairs), None, 1)[toy.name]
    fixed["SPICE"] = MetricScores({}, {}, {"SPICE": "why"})
    scores = {toy.name: merge(metrics, toy.groups, fixed)}
    return summarise(9, 6, [toy], scores, {toy.name: {"CIDEr": Interval(low=0.4, high=0.75)}})


def test_the_file_has_the_names_that_dvc_mlflow_and_the_gate_read(tmp_path: Path):
    report().write(tmp_path / "metrics.json")
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert list(written) == ["stage", "rows_in", "rows_out", "protocols"]
    assert list(written["protocols"]) == ["toy/total"]
    total = written["protocols"]["toy/total"]
    captions = ["CIDEr", "METEOR", "ROUGE-L", "BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "SPICE"]
    accuracies = [
        "change_type_accuracy",
        "change_place_accuracy",
        "change_exact_accuracy",
        "no_change_recall",
        "false_no_change",
        "multi_change_place_f1",
        "multi_change_exact_f1",
        "false_changes",
        "unreadable",
        "reversal",
        "pixel_mean_auc",
        "pixel_window_auc",
    ]
    groups = ["intervals", "change", "multi_change", "distractors", "by_type", "by_changes", "by_length", "absent"]
    assert list(total) == ["pairs", "published_pairs", *captions, "CIDEr_shuffled", *accuracies, *groups]
    false_changes = ["false_changes", "false_changes_per_pair"]
    assert list(total["change"]) == ["pairs", *captions, *false_changes]
    of_type = ["type_accuracy", "place_accuracy", "exact_accuracy", *false_changes]
    assert list(total["by_type"]["color"]) == ["pairs", *captions, *of_type]
    assert list(total["by_type"]) == ["color", "illumination", "removal"]
    assert list(total["by_changes"]) == ["1", "2"]
    assert list(total["by_length"]) == ["1-9", "10-19"]
    assert list(total["by_length"]["1-9"]) == list(total["by_changes"]["2"]) == ["pairs", *captions, *of_type]


def test_every_value_stands_in_its_group():
    written = report().model_dump(mode="json")
    assert (written["stage"], written["rows_in"], written["rows_out"]) == ("evaluate", 9, 6)
    total = written["protocols"]["toy/total"]
    assert (total["pairs"], total["published_pairs"]) == (6, 8)
    assert total["intervals"] == {"CIDEr": {"low": 0.4, "high": 0.75}}
    assert {name: total[name]["pairs"] for name in ("change", "multi_change", "distractors")} == {
        "change": 4,
        "multi_change": 1,
        "distractors": 2,
    }
    assert total["by_type"]["removal"]["pairs"] == 1
    assert total["by_type"]["removal"]["exact_accuracy"] == 0.0
    assert total["by_type"]["removal"]["CIDEr"] == 0.5
    assert total["multi_change"]["type_recall"] == 0.5
    assert total["change_type_accuracy"] == 2 / 3
    assert total["by_changes"]["1"]["type_accuracy"] == 2 / 3
    assert (total["SPICE"], total["change"]["SPICE"], total["absent"]["SPICE"]) == (None, None, "why")
    assert total["absent"].keys() == {"SPICE", "reversal"}


def test_counts_stay_whole_numbers_in_the_file(tmp_path: Path):
    text = report().write(tmp_path / "metrics.json") and (tmp_path / "metrics.json").read_text()
    assert '"pairs": 6,' in text
    assert '"changes": 2,' in text


def test_fewer_pairs_than_papers_score_are_partial_and_as_many_or_unknown_are_not():
    counts = {8: True, 6: False, None: False}
    toys = {n: ProtocolPairs("toy", Protocol("total", n=n), bench.pairs()) for n in counts}
    assert {n: report(toy).protocols["toy/total"].is_partial for n, toy in toys.items()} == counts


def test_without_any_type_the_object_of_types_is_empty():
    toy = ProtocolPairs("toy", Protocol("test", n=None), [bench.pair("x", ["y"], [])])
    scores = MetricScores({name: {} for name in toy.groups}, {"toy/0": {}})
    written = summarise(1, 1, [toy], {"toy/test": scores}, {}).model_dump()["protocols"]["toy/test"]
    assert (written["pairs"], written["by_type"], written["intervals"]) == (1, {}, {})
    assert (written["by_changes"], written["by_length"]) == ({}, {})


def test_the_scores_to_compare_runs_by_are_those_of_each_dataset_s_first_protocol_times_100():
    first, second = report().protocols["toy/total"], report(replace(TOY, protocol=Protocol("other", n=8)))
    both = EvaluateReport(
        stage="evaluate", rows_in=9, rows_out=6, protocols={"toy/total": first, **second.protocols, "more/all": first}
    )
    found = headline(both)
    assert list(found) == ["toy/total", "more/all"]
    assert found["toy/total"]["CIDEr"] == 50.0
    assert found["toy/total"]["change_type_accuracy"] == round(100 * first.scores["change_type_accuracy"], 2)
    assert "SPICE" not in found["toy/total"]
    assert "reversal" not in found["toy/total"], "a score that is absent"
    assert set(found["toy/total"]) <= set(HEADLINE)
