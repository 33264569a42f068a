import json
from pathlib import Path

from components.evaluate.metrics import choose_metrics
from components.evaluate.metrics.metric import ALL, MetricScores
from components.evaluate.metrics.run import compute_metrics, merge
from components.evaluate.protocols import group_pairs
from components.evaluate.summary import EvaluateReport, summarise
from tests.evaluate import bench
from tests.evaluate.test_protocols import EVERY

PAIRS = bench.pairs()
GROUPS = group_pairs(PAIRS, EVERY)


def report(test_pairs: int = 9) -> EvaluateReport:
    """Every caption score 0.5, the accuracies as they are, no control."""
    metrics = choose_metrics(bench.ALL_METRICS)
    everything = {ALL: [pair.id for pair in PAIRS], **GROUPS}
    fixed = {
        name: MetricScores({group: dict.fromkeys(metric.scores, 0.5) for group in everything}, {})
        for name, metric in metrics.items()
    }
    accuracy = {"change_accuracy": metrics["change_accuracy"]}
    fixed["change_accuracy"] = compute_metrics(accuracy, PAIRS, GROUPS, bench.parse(PAIRS), None, 1)
    fixed["SPICE"] = MetricScores({}, {}, {"SPICE": "why"})
    return summarise(test_pairs, GROUPS, merge(metrics, everything, fixed))


def test_the_file_has_the_names_that_dvc_mlflow_and_the_gate_read(tmp_path: Path):
    report().write(tmp_path / "metrics.json")
    written = json.loads((tmp_path / "metrics.json").read_text())
    captions = ["CIDEr", "METEOR", "ROUGE-L", "BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "SPICE"]
    accuracies = ["change_type_accuracy", "change_exact_accuracy", "no_change_recall", "false_no_change"]
    groups = ["change", "multi_change", "distractors", "by_type", "by_dataset", "absent"]
    assert list(written) == ["stage", "rows_in", "rows_out", "pairs", *captions, "CIDEr_shuffled", *accuracies, *groups]
    assert list(written["change"]) == list(written["by_dataset"]["toy"]) == ["pairs", *captions]
    assert list(written["by_type"]["color"]) == ["pairs", *captions, "type_accuracy", "exact_accuracy"]
    assert list(written["by_type"]) == ["color", "illumination", "removal"]


def test_every_value_stands_in_its_group():
    written = report().model_dump(mode="json")
    assert (written["stage"], written["rows_in"], written["rows_out"], written["pairs"]) == ("evaluate", 9, 6, 6)
    assert {name: written[name]["pairs"] for name in ("change", "multi_change", "distractors")} == {
        "change": 4,
        "multi_change": 1,
        "distractors": 2,
    }
    assert written["by_type"]["removal"]["pairs"] == 1
    assert written["by_type"]["removal"]["exact_accuracy"] == 0.0
    assert written["by_type"]["removal"]["CIDEr"] == 0.5
    assert written["by_dataset"]["toy"]["pairs"] == 6
    assert written["multi_change"]["type_recall"] == 0.5
    assert written["change_type_accuracy"] == 2 / 3
    assert (written["SPICE"], written["change"]["SPICE"], written["absent"]) == (None, None, {"SPICE": "why"})


def test_counts_stay_whole_numbers_in_the_file(tmp_path: Path):
    text = report().write(tmp_path / "metrics.json") and (tmp_path / "metrics.json").read_text()
    assert '"pairs": 6,' in text
    assert '"changes": 2,' in text


def test_without_any_type_the_object_of_types_is_empty():
    pairs = [bench.pair("x", ["y"], [])]
    groups = group_pairs(pairs, EVERY)
    scores = MetricScores({name: {} for name in (ALL, *groups)}, {"toy/0": {}})
    written = summarise(1, groups, scores).model_dump()
    assert written["by_type"] == {}
    assert written["by_dataset"] == {"toy": {"pairs": 1}}
