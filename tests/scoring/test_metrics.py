"""The values of each metric, worked out by hand on a few words; what the only list says of them; and intervals."""

import ast
import io
import json
import random
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge

from m3diff.datasets.minichange.language import grammar
from m3diff.records.errors import DataError
from m3diff.records.sample import ImageRef
from m3diff.scoring import bootstrap
from m3diff.scoring.bootstrap import compare, intervals, score_of, statistics
from m3diff.scoring.grammar import Grammar, parse_predictions
from m3diff.scoring.metrics import (
    HEADLINE_SCORES,
    METRICS,
    Metric,
    MetricScores,
    Resampled,
    bleu,
    change_accuracy,
    choose_metrics,
    cider,
    divide_sums,
    gate_scores,
    headline_scores_by_metric,
    mean_of,
    pixel_threshold,
    rouge_l,
)
from m3diff.scoring.metrics.ngrams import distinct
from m3diff.scoring.metrics.pixel_threshold import ONE_KIND, measure_differences, roc_auc
from m3diff.scoring.pairs import ALL_PAIRS, Groups
from m3diff.scoring.run import merge_scores
from tests.errors import Message, raises
from tests.scoring import bench
from tests.scoring.bench import REAL, needs_real

SIX = {str(i): [f"the {word} cube turned red", "it is red"] for i, word in enumerate("abcdef")}
SIX_PREDICTIONS = {i: texts[0] if int(i) % 2 else "the cube is gone" for i, texts in SIX.items()}


def compute(metric, references, predictions, groups: Groups | None = None, shuffled=None) -> MetricScores:
    return metric.compute(
        [], groups or {ALL_PAIRS: list(predictions)}, bench.metric_inputs(references, predictions, shuffled)
    )


def test_the_cider_of_one_pair_is_absent():
    scores = compute(cider, {"a": ["red cube"]}, {"a": "red cube"})
    assert scores.groups[ALL_PAIRS] == {"CIDEr": None, "CIDEr_shuffled": None}
    assert scores.pairs == {"a": {"CIDEr": 0.0}}
    assert scores.absent.keys() == {"CIDEr_shuffled"}


def test_the_control_of_cider_is_that_of_the_shuffled_predictions():
    references = {"a": ["red cube"], "b": ["blue ball"]}
    predictions = {"a": "red cube", "b": "blue ball"}
    groups = {ALL_PAIRS: ["a", "b"], "change": ["a", "b"]}
    scores = compute(cider, references, predictions, groups, shuffled={"a": "x", "b": "blue y"})
    assert scores.groups[ALL_PAIRS]["CIDEr_shuffled"] == pytest.approx(
        10 * 0.5 / 4 / 2
    )  # cosines of 1- to 4-grams, 2 pairs
    assert "CIDEr_shuffled" not in scores.groups["change"]
    assert scores.absent == {}


def test_the_control_of_some_pairs_has_the_word_weights_of_all_pairs():
    captions = [
        "red cube left",
        "red cube gone",
        "red ball left",
        "blue ball gone",
        "blue star left",
        "blue star moved",
    ]
    references = {str(number): [caption] for number, caption in enumerate(captions)}
    shifted = {pair_id: captions[(int(pair_id) + 1) % 6] for pair_id in references}
    sample = ["0", "2", "4"]
    as_predictions = compute(cider, references, shifted)  # so that each pair's score shows
    scores = compute(cider, references, shifted, None, {pair_id: shifted[pair_id] for pair_id in sample})
    mean_of_sample = np.mean([as_predictions.pairs[pair_id]["CIDEr"] for pair_id in sample])
    assert scores.groups[ALL_PAIRS]["CIDEr_shuffled"] == pytest.approx(mean_of_sample)
    assert scores.groups[ALL_PAIRS]["CIDEr_shuffled"] != as_predictions.groups[ALL_PAIRS]["CIDEr"]


@pytest.mark.parametrize("metric", [bleu, rouge_l, cider])
def test_a_group_has_the_scores_that_it_would_have_alone_and_an_empty_one_has_none(metric):
    ids = ["1", "2", "4"]
    within = compute(metric, SIX, SIX_PREDICTIONS, {ALL_PAIRS: list(SIX), "some": ids, "none": []}).groups
    alone = compute(metric, {i: SIX[i] for i in ids}, {i: SIX_PREDICTIONS[i] for i in ids}).groups[ALL_PAIRS]
    assert within["some"] == pytest.approx({name: alone[name] for name in within["some"]}, nan_ok=True)
    assert "none" not in within


WORDS = ["a", "the", "cube", "red", "moved", "Ball", "left", "n't", "\u00e9t\u00e9", "\U0001f600"]


def random_captions(seed: int) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Captions of few words, so that words repeat; some empty, of one word, without a common n-gram, or double."""
    rng = random.Random(seed)

    def caption() -> str:
        return " ".join(rng.choices(WORDS, k=rng.choice([0, 1, 2, 3, 5, 8, 12, 40])))

    references = {f"pair {i}": [caption() for _ in range(rng.randint(1, 6))] for i in range(rng.randint(2, 40))}
    predictions = {i: rng.choice([caption(), texts[-1], "x y z"]) for i, texts in references.items()}
    for i in rng.sample(list(references), len(references) // 4):
        references[i] = references[i][:1] * 3
    return references, predictions


def stock(references: dict[str, list[str]], predictions: dict[str, str]) -> dict[str, tuple]:
    results = {i: [text] for i, text in predictions.items()}
    with redirect_stdout(io.StringIO()) as printed:
        bleu_corpus, bleu_pairs = Bleu(4).compute_score(references, results, verbose=1)
    counts = ast.literal_eval(printed.getvalue().splitlines()[0])
    scores = {f"BLEU-{n + 1}": (bleu_corpus[n], bleu_pairs[n]) for n in range(4)}
    scores["counts"] = (*counts["correct"], *counts["guess"], counts["testlen"], counts["reflen"])
    assert len(references) > 1
    in_python = {"ROUGE-L": Rouge(), "CIDEr": Cider()}
    return scores | {name: scorer.compute_score(references, results) for name, scorer in in_python.items()}


def assert_equal_to_stock(references: dict[str, list[str]], predictions: dict[str, str]) -> dict[str, MetricScores]:
    pairs = list(predictions)
    stock_scores = stock(references, predictions)
    scores_by_name = {
        metric.METRIC.main_score: compute(metric, references, predictions) for metric in (bleu, rouge_l, cider)
    }
    for main_score, scores in scores_by_name.items():
        rough = {"rel": 1e-9, "abs": 1e-12} if main_score == "CIDEr" else {"rel": 0, "abs": 0}
        for name, value in scores.groups[ALL_PAIRS].items():
            assert name == "CIDEr_shuffled" or value == pytest.approx(stock_scores[name][0], **rough), name
        assert [scores.pairs[i][main_score] for i in pairs] == pytest.approx(list(stock_scores[main_score][1]), **rough)
    statistics = [of_pair["BLEU_statistics"] for of_pair in scores_by_name["BLEU-4"].pairs.values()]
    assert tuple(np.sum(statistics, axis=0)) == stock_scores["counts"]
    return scores_by_name


@pytest.mark.parametrize("seed", range(12))
def test_scores_of_random_captions_equal_pycocoevalcap_and_follow_from_their_columns(seed: int):
    references, predictions = random_captions(seed)
    for main_score, scores in assert_equal_to_stock(references, predictions).items():
        metric = next(metric for metric in METRICS.values() if metric.main_score == main_score)
        for name, (column, score) in metric.resampled.items():
            rows = np.array([scores.pairs[i][column] for i in references], float)
            rows = rows if rows.ndim == 2 else np.stack([rows, np.ones(len(rows))], axis=1)
            assert score(rows.sum(axis=0)) == pytest.approx(scores.groups[ALL_PAIRS][name], rel=1e-12)
            assert np.isnan(score(0 * rows.sum(axis=0)))
        assert metric.resampled.keys() == set(metric.scores)


def test_scores_of_one_pair_and_of_captions_without_words_are_those_of_pycocoevalcap():
    assert_equal_to_stock({"a": ["a b", ""], "b": ["", ""]}, {"a": "", "b": ""})
    assert_equal_to_stock({"a": ["a b", "c"], "b": ["", "c"]}, {"a": "a", "b": "c d"})
    assert_equal_to_stock({"a": ["word " * 300], "b": ["other"]}, {"a": "word " * 200, "b": "word"})


@needs_real
def test_scores_of_cocos_captions_are_those_of_pycocoevalcap():
    """The 1,000 predictions published with coco-caption, as tokens."""
    references, results = (
        json.loads(next((REAL / "coco_caption").glob(f"*{name}_after_tokenization.json")).read_text(encoding="utf-8"))
        for name in ("references", "results")
    )
    predictions = {i: texts[0] for i, texts in results.items()}
    assert len(predictions) == 1000
    assert_equal_to_stock({i: references[i] for i in predictions}, predictions)


PAIRS = bench.pairs()
PARSED = bench.parse(PAIRS)
GROUPS = {
    ALL_PAIRS: [pair.id for pair in PAIRS],
    "change": ["toy/0", "toy/1", "toy/2", "toy/3"],
    "multi_change": ["toy/3"],
    "distractors": ["toy/4", "toy/5"],
    "by_type/color": ["toy/0"],
    "by_type/removal": ["toy/1"],
    "by_type/illumination": ["toy/2"],
}
FRACTIONS = ("precision", "recall", "f1")
RED = "the red cube at the left turned blue"
GONE = "the blue ball at the top was removed"


def accuracy(pairs=PAIRS, groups: Groups | None = None) -> MetricScores:
    groups = groups or (GROUPS if len(pairs) == 6 else {ALL_PAIRS: [pair.id for pair in pairs]})
    return change_accuracy.compute(pairs, groups, bench.metric_inputs(parsed=bench.parse(pairs)))


def test_accuracies_are_those_counted_by_hand():
    scores = accuracy()
    assert scores.groups[ALL_PAIRS] == {
        "change_type_accuracy": 2 / 3,  # the third says that nothing changed
        "change_place_accuracy": 1 / 3,  # the second names another place
        "change_exact_accuracy": 1 / 3,
        "no_change_recall": 1 / 2,
        "false_no_change": 1 / 4,
        "multi_change_place_f1": 1 / 2,  # one of two changes, in two clauses
        "multi_change_exact_f1": 1 / 2,
        "false_changes": 3 / 5,  # another place, the lamp, and one where nothing changed
        "unreadable": 0.0,
        "reversal": None,
    }
    right = {"type_accuracy": 1.0, "place_accuracy": 1.0, "exact_accuracy": 1.0}
    wrong = {"place_accuracy": 0.0, "exact_accuracy": 0.0}
    half = {f"{level}_{fraction}": 1 / 2 for level in ("type", "place", "exact") for fraction in FRACTIONS}
    shares = {"all_types_right": 0.0, "all_places_right": 0.0, "all_exact_right": 0.0}
    assert {name: values for name, values in scores.groups.items() if name != ALL_PAIRS} == {
        "change": {"false_changes": 1 / 2, "false_changes_per_pair": 1 / 2},
        "multi_change": {"changes": 2} | half | shares | {"false_changes": 1 / 2, "false_changes_per_pair": 1.0},
        "distractors": {"false_changes": 1.0, "false_changes_per_pair": 1 / 2},
        "by_type/color": right | {"false_changes": 0.0, "false_changes_per_pair": 0.0},
        "by_type/removal": right | wrong | {"false_changes": 1.0, "false_changes_per_pair": 1.0},
        "by_type/illumination": wrong | {"type_accuracy": 0.0, "false_changes": None, "false_changes_per_pair": 0.0},
    }
    predicted = ["color", "removal", "none", "several", "none", "color"]
    assert [of_pair["predicted_type"] for of_pair in scores.pairs.values()] == predicted
    assert [of_pair["type_right"] for of_pair in scores.pairs.values()] == [True, True, False, False, True, False]
    for name in ("place_right", "exact_right"):
        assert [of_pair[name] for of_pair in scores.pairs.values()] == [True, False, False, False, True, False]


def test_precision_is_of_the_clauses_predicted_and_recall_of_the_changes_there_are():
    lamp = "and the lamp went out"
    types = ["color", "removal"]
    pairs = [
        bench.pair(RED, [f"{RED}, and {GONE}, {lamp}"], [*types, "illumination"], "0"),
        bench.pair(f"{GONE}, and the red ball at the left turned blue", [f"{RED}, and {GONE}"], types, "1"),
        bench.pair(f"{GONE}, and the red cube at the left turned green", [f"{RED}, and {GONE}"], types, "2"),
    ]
    groups = accuracy(pairs, {name: ["toy/0", "toy/1", "toy/2"] for name in (ALL_PAIRS, "multi_change")}).groups
    fractions = {"type": (1.0, 5 / 7, 10 / 12), "place": (4 / 5, 4 / 7, 8 / 12), "exact": (3 / 5, 3 / 7, 6 / 12)}
    expected = {f"{level}_{name}": values[n] for level, values in fractions.items() for n, name in enumerate(FRACTIONS)}
    expected |= {"changes": 7, "all_types_right": 2 / 3, "all_places_right": 1 / 3, "all_exact_right": 0.0}
    assert {name: value for name, value in groups["multi_change"].items() if "false" not in name} == expected
    assert groups[ALL_PAIRS]["multi_change_place_f1"] == 8 / 12
    assert groups[ALL_PAIRS]["multi_change_exact_f1"] == 6 / 12
    silent = bench.pair("nothing changed", [f"{RED}, {lamp}"], ["color", "illumination"], "0")
    assert accuracy([silent]).groups[ALL_PAIRS]["multi_change_exact_f1"] == 0.0
    assert accuracy([bench.pair(RED, [RED], ["color"])]).groups[ALL_PAIRS]["multi_change_exact_f1"] is None
    twice = bench.pair(f"{RED}, and {RED}, and x", [RED], ["color"])
    assert accuracy([twice, *PAIRS[1:]]).groups["by_type/color"]["false_changes"] == 1 / 2, "told twice, it came once"


def test_reversal_is_the_share_of_swapped_pairs_whose_inverse_change_is_named():
    right = "at the top the small red box turned blue"
    wrong = "at the top the small blue box turned red"
    for captions, share in (({0: wrong, 1: right, 3: right}, 1 / 3), ({}, None)):
        pair = bench.pair(right, [right], ["color"])  # in MiniChange's words
        pairs = [replace(pair, id=f"toy/{n}", reversed_prediction=captions.get(n)) for n in range(4)]
        parsed = parse_predictions({"toy": Grammar(grammar())}, pairs)
        scores = change_accuracy.compute(pairs, {ALL_PAIRS: list(parsed)}, bench.metric_inputs(parsed=parsed))
        assert scores.groups[ALL_PAIRS]["reversal"] == share
        assert ("predictions_reversed.json" in scores.absent.get("reversal", "")) is (share is None)


@pytest.mark.parametrize(("foreign", "judged"), [(3, True), (4, False)])
def test_where_most_captions_are_in_other_words_only_that_is_said(foreign: int, judged: bool):
    accuracies = accuracy([replace(pair, prediction="x") if int(pair.id[-1]) < foreign else pair for pair in PAIRS])
    assert accuracies.groups[ALL_PAIRS]["unreadable"] == foreign / 6
    scores = {
        name: value for name, value in accuracies.groups[ALL_PAIRS].items() if name not in ("unreadable", "reversal")
    }
    verdicts = [of_pair["exact_right"] for of_pair in accuracies.pairs.values()]
    assert accuracies.pairs["toy/0"]["predicted_type"] == "unreadable"
    if judged:
        assert scores["change_exact_accuracy"] == 0.0
        assert verdicts == [False, False, False, False, True, False]
    else:
        assert set(scores.values()) | set(accuracies.groups["by_type/color"].values()) | set(verdicts) == {None}
        assert "67 %" in accuracies.absent["change_exact_accuracy"]
        assert accuracies.absent.keys() == set(METRICS["change_accuracy"].overall) - {"unreadable"}


@pytest.mark.parametrize("foreign", [0, 2, 5])
def test_every_score_of_all_pairs_follows_from_the_sums_of_the_column(foreign: int):
    pairs = [replace(pair, prediction="x") if int(pair.id[-1]) < foreign else pair for pair in PAIRS]
    accuracies = accuracy(pairs)
    metric = METRICS["change_accuracy"]
    rows = np.array([accuracies.pairs[pair.id]["change_statistics"] for pair in pairs])
    assert set(metric.resampled) == set(metric.overall)
    scores = {name: float(score(rows.sum(axis=0)[None])[0]) for name, (_, score) in metric.resampled.items()}
    assert {name: None if np.isnan(value) else value for name, value in scores.items()} == accuracies.groups[ALL_PAIRS]


# A threshold on pixels


def grey(pixels: np.ndarray) -> np.ndarray:
    return np.repeat(pixels[..., None], 3, axis=-1).astype(np.uint8)


@pytest.mark.parametrize(
    ("corner", "worst"),
    [((60, 60), 48.0), ((2, 10), 48.0), ((1, 8), 36.0)],
    ids=["a window", "windows overlap by half", "between windows"],
)
def test_the_window_is_the_worst_one_of_a_sixteenth_of_the_frame(corner: tuple[int, int], worst: float):
    before = np.zeros((64, 64))
    after = before.copy()
    after[corner[0] : corner[0] + 4, corner[1] : corner[1] + 4] = 48
    differences = {"mean": 48 * 16 / 64**2, "window": worst}
    assert (
        measure_differences(grey(before), grey(after)) == measure_differences(grey(after), grey(before)) == differences
    )
    small = np.zeros((3, 8))
    narrow = np.zeros((3, 8))
    narrow[2, 7] = 30
    assert measure_differences(grey(small), grey(narrow))["window"] == 30.0
    red = np.tile(np.array([130, 100, 100], np.uint8), (4, 4, 1))
    assert measure_differences(grey(np.full((4, 4), 100)), red)["mean"] == 10.0


def test_a_frame_has_16_windows_a_side():
    after = np.zeros((240, 240, 3), np.uint8)
    after[:14, :14] = 45
    assert measure_differences(np.zeros_like(after), after)["window"] == pytest.approx(45 * 14**2 / 15**2)


def test_the_score_is_the_area_over_known_pairs_or_absent_with_the_reason(tmp_path: Path):
    def pair(name: str, types: list[str], brighter: int) -> Any:
        files = [tmp_path / f"{name}_{side}.png" for side in ("before", "after")]
        for value, file in zip((100, 100 + brighter), files, strict=True):
            Image.new("RGB", (8, 8), (value,) * 3).save(file)
        return replace(bench.pair("", [""], types), id=name, images=tuple(ImageRef(str(file)) for file in files))

    names = ("pixel_mean_auc", "pixel_window_auc")
    compute = pixel_threshold.compute
    assert roc_auc([2.0, 3.0], [0.0, 1.0]) == 1.0
    assert roc_auc([0.0], [0.0]) == 0.5
    pairs = [pair("a", ["color"], 5), pair("b", ["none"], 3), pair("c", ["size", "ocr"], 4), pair("d", ["color"], 1)]
    one_image = pair("single", ["color"], 200)
    one_image = replace(one_image, images=one_image.images[:1])
    scores = compute([*pairs, pair("unknown", [], 200), one_image], {}, None)
    assert scores.groups == {ALL_PAIRS: dict.fromkeys(names, pytest.approx(2 / 3))}
    assert scores.pairs["c"] == {"pixel_mean_difference": 4.0, "pixel_window_difference": 4.0}
    assert scores.pairs.keys() == {"a", "b", "c", "d"}
    assert scores.absent == {}
    assert compute(pairs[:1], {}, None).absent == dict.fromkeys(names, ONE_KIND)
    Image.new("RGB", (9, 8)).save(pairs[1].images[1].uri)
    reason = compute(pairs, {}, None).absent[names[1]]
    assert reason.startswith("b: ")
    assert Message("scoring.image_sizes_differ", before="8x8", after="9x8").in_text(reason)


def test_a_metric_gives_no_score_and_no_column_that_it_does_not_declare():
    inputs = bench.metric_inputs(SIX, SIX_PREDICTIONS, SIX_PREDICTIONS, PARSED)
    for metric in (METRICS[name] for name in ("CIDEr", "ROUGE-L", "BLEU", "change_accuracy")):
        groups = GROUPS if not metric.java else {ALL_PAIRS: list(SIX), "change": ["0", "1"]}
        scores = metric.compute(PAIRS, groups, inputs)
        assert tuple(scores.groups[ALL_PAIRS]) == metric.scores + metric.overall
        assert {name for of_pair in scores.pairs.values() for name in of_pair} == metric.columns.keys()


def test_a_score_that_was_not_computed_is_null_and_overall_ones_only_of_all_pairs():
    groups = {ALL_PAIRS: ["0", "1"], "change": ["0"]}
    scores = merge_scores({"CIDEr": METRICS["CIDEr"]}, groups, {})
    assert scores.groups == {ALL_PAIRS: {"CIDEr": None, "CIDEr_shuffled": None}, "change": {"CIDEr": None}}
    assert scores.pairs == {"0": {}, "1": {}}


def test_the_gate_takes_scores_of_all_pairs_of_which_more_is_better():
    captions = ["CIDEr", "CIDEr-char", "METEOR", "ROUGE-L", "ROUGE-L-char", "BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4"]
    captions += ["BLEU-1-char", "BLEU-2-char", "BLEU-3-char", "BLEU-4-char", "SPICE"]
    changes = ["change_type_accuracy", "change_place_accuracy", "change_exact_accuracy", "no_change_recall"]
    changes += ["multi_change_place_f1", "multi_change_exact_f1", "reversal"]
    answers = ["exact_match", "yes_no_accuracy", "number_accuracy", "choice_accuracy"]
    answers += ["first_answer_accuracy", "first_choice_accuracy", "first_yes_no_accuracy"]
    answers += ["binary_accuracy", "binary_precision", "binary_recall", "binary_f1"]
    cell_scores = ("precision", "recall", "f1", "jaccard", "exact")
    answers += [f"{name}_{score}" for name in ("roads", "buildings") for score in cell_scores]
    assert gate_scores() == [*answers, *captions, *changes, "judge"]


def test_the_gate_takes_only_scores_of_the_chosen_metrics():
    answers = ["exact_match", "yes_no_accuracy", "number_accuracy", "choice_accuracy"]
    assert gate_scores(["METEOR", "CIDEr"]) == [*answers, "CIDEr", "CIDEr-char", "METEOR"]


def test_metrics_are_chosen_in_the_order_of_the_list_beside_that_of_answers():
    assert list(choose_metrics(["BLEU", "CIDEr"])) == ["answers", "CIDEr", "BLEU"]


def test_an_unknown_metric_is_refused():
    with pytest.raises(AssertionError, match=r"unknown metrics \['BLUE'\]; known: answers, first_answer"):
        choose_metrics(["BLUE"])


def test_some_metrics_have_a_program_need_another_input_or_need_no_java():
    assert [name for name, metric in METRICS.items() if metric.program] == ["METEOR", "SPICE"]
    extra_inputs = {name: metric.extra_input for name, metric in METRICS.items() if metric.extra_input}
    assert extra_inputs == {"SPICE": "spice_dir", "judge": "judge", "pixel_threshold": "images"}
    of_protocols = ["first_answer", "binary_change", "object_counts", "grid_cells", "consistency"]
    without_java = ["answers", *of_protocols, "change_accuracy", "judge", "pixel_threshold"]
    assert [name for name, metric in METRICS.items() if not metric.java] == without_java
    assert [name for name, metric in METRICS.items() if metric.protocol_only] == of_protocols


# Intervals against what statistics says they are: coverage, width, pairing, and scores that some resamples lack

P = "toy/test"
MEAN = mean_of("score")


def table(protocol: str = P, **columns: list) -> pa.Table:
    size = len(next(iter(columns.values())))
    return pa.table({"protocol": [protocol] * size, "id": [f"toy/{n:05d}" for n in range(size)], **columns})


def metric(**resampled: Resampled) -> Metric:
    return Metric(lambda pairs, groups, inputs: MetricScores({}, {}), "score", ("score",), resampled=resampled)


def test_a_plain_column_counts_as_value_and_one_and_null_as_nothing():
    rows = table(score=[2.0, None, 0.0], right=[True, False, None])
    assert statistics(rows, "score").tolist() == [[2, 1], [0, 0], [0, 1]]
    assert statistics(rows, "right").tolist() == [[1, 1], [0, 1], [0, 0]]


def test_a_column_of_lists_counts_as_it_is_in_every_slice():
    rows = table(counts=[[1.0, 2.0, 3.0], None, [4.0, 5.0, 6.0]])
    assert statistics(rows, "counts").tolist() == [[1, 2, 3], [0, 0, 0], [4, 5, 6]]
    assert statistics(pa.concat_tables([rows, rows.slice(2)]), "counts").tolist()[2:] == [[4, 5, 6]] * 2
    assert statistics(rows.slice(1), "counts").tolist() == [[0, 0, 0], [4, 5, 6]]


def test_a_column_that_is_missing_or_holds_only_nulls_has_no_statistics():
    nulls = table(counts=pa.array([None, None], pa.list_(pa.float64())))
    assert statistics(table(score=[1.0]), "counts") is None
    assert statistics(nulls, "counts") is None


@pytest.mark.parametrize("confidence", [0.95, 0.5])
def test_the_interval_of_a_mean_is_that_of_the_normal_distribution(confidence: float):
    values = np.random.default_rng(0).normal(3.0, 2.0, 1500)
    (interval,) = intervals(table(score=values.tolist()), {"m": metric(score=MEAN)}, P, confidence).values()
    half = NormalDist().inv_cdf((1 + confidence) / 2) * values.std() / np.sqrt(1500)
    assert interval.low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.05 * half)


def test_each_score_has_its_own_columns_and_each_protocol_its_own_rows():
    low_scores = np.random.default_rng(2).normal(0, 1, (2, 400))
    high_scores = np.random.default_rng(3).normal(9, 3, (2, 400))
    counts = np.stack([high_scores[0], np.ones(400), low_scores[0]], axis=1)
    rows = table(score=low_scores[0].tolist(), counts=counts.tolist())
    other_rows = table("toy/other", score=low_scores[1].tolist(), counts=(counts + 5).tolist())
    metrics = {"a": metric(one=MEAN), "b": metric(two=Resampled("counts", divide_sums(0, 1)))}
    score_intervals = intervals(pa.concat_tables([other_rows, rows]), metrics, P)
    assert list(score_intervals) == ["one", "two"]
    assert (
        score_intervals["one"].low
        < low_scores[0].mean()
        < score_intervals["one"].high
        < 1
        < 8
        < score_intervals["two"].low
        < high_scores[0].mean()
    )
    assert score_intervals == intervals(rows, metrics, P), "the same draws for the same pairs"
    assert intervals(rows, {"b": metrics["b"]}, P)["two"] == score_intervals["two"]


def test_few_pairs_and_no_pair_have_no_interval():
    values = np.arange(40.0).tolist()
    metrics = {"m": metric(score=MEAN)}
    assert intervals(table(score=values[: bootstrap.MIN_PAIRS - 1]), metrics, P) == {}
    assert intervals(table(score=values), metrics, "toy/none") == {}


@pytest.mark.parametrize("pairs", [20, 333])
def test_pairs_drawn_ahead_give_the_same_intervals(pairs: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bootstrap, "CELLS", 70_000)  # several chunks, of which the last is smaller
    rows = table(score=np.random.default_rng(3).normal(size=pairs).tolist())
    metrics = {"m": metric(score=MEAN)}
    counts = bootstrap.draw_ahead(pairs)
    assert counts is not None
    assert len(counts) > 1
    assert sum(len(chunk) for chunk in counts) == bootstrap.RESAMPLES
    assert all((chunk.sum(axis=1) == pairs).all() for chunk in counts)
    assert intervals(rows, metrics, P, counts=counts) == intervals(rows, metrics, P)


def test_more_pairs_than_memory_allows_are_not_drawn_ahead(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bootstrap, "MAX_AHEAD", 20 * bootstrap.RESAMPLES)
    assert bootstrap.draw_ahead(20) is not None
    assert bootstrap.draw_ahead(21) is None


@pytest.mark.parametrize("values", [[], [7], [3, 3, 1, 2, 1]], ids=["none", "one", "repeated"])
def test_distinct_values_are_those_of_numpy(values: list[int]):
    array = np.array(values, np.int64)
    assert distinct(array).tolist() == np.unique(array).tolist()


def test_a_score_that_many_resamples_lack_has_no_interval():
    metrics = {"m": metric(score=MEAN)}
    assert intervals(table(score=[1.0, None] * 20), metrics, P)["score"].low == 1.0
    assert intervals(table(score=[1.0] + [None] * 39), metrics, P) == {}, "a third of them lack it"


def test_a_few_resamples_without_the_score_do_not_count():
    scores = [1.0, 2.0, 1.0, 2.0] + [None] * 36  # one resample in a hundred lacks it
    interval = intervals(table(score=scores), {"m": metric(score=MEAN)}, P)["score"]
    assert interval.low == 1.0
    assert interval.high == 2.0


def test_the_gain_of_two_models_is_that_of_the_same_pairs_in_any_order():
    rng = np.random.default_rng(4)
    hard = rng.normal(0, 5, 500)
    better = table(score=(hard + 1).tolist())
    worse = table(score=hard.tolist()).take(rng.permutation(500))
    comparison = compare(better, worse, P, MEAN)
    assert comparison.first_score == pytest.approx(hard.mean() + 1)
    assert comparison.second_score == pytest.approx(hard.mean())
    assert comparison.interval.low == 1.0
    assert comparison.interval.high == 1.0
    comparison = compare(worse, better, P, MEAN)
    assert comparison.first_score - comparison.second_score == pytest.approx(-1)
    assert comparison.interval.low == -1.0
    wholes = rng.integers(1, 9, 300)  # a score that is no mean is compared by its sums
    parts = [rng.binomial(wholes, share) for share in (0.7, 0.5)]
    first_table, second_table = (
        table(counts=np.stack([part, wholes], axis=1).astype(float).tolist()) for part in parts
    )
    first_score, second_score, interval = compare(first_table, second_table, P, Resampled("counts", divide_sums(0, 1)))
    assert first_score == pytest.approx(parts[0].sum() / wholes.sum())
    assert first_score - second_score == pytest.approx(0.2, abs=0.06)
    assert 0.1 < interval.low < first_score - second_score < interval.high < 0.3


def test_other_pairs_are_refused_and_a_model_without_the_score_is_not_compared():
    first_table = table(score=[1.0] * 30)
    second_table = table(score=[1.0] * 31)
    with raises(DataError, "scoring.pairs_differ", protocol=P, first=30, second=31):
        compare(first_table, second_table, P, MEAN)
    assert compare(first_table, table(other=[1.0] * 30), P, MEAN) is None
    assert score_of(first_table, "toy/none", MEAN) is None
    assert compare(table(score=[1.0] * 5), table(score=[0.0] * 5), P, MEAN) == (1.0, 0.0, None)


def test_the_scores_that_runs_are_compared_by_stand_in_the_order_of_the_metrics():
    scores = headline_scores_by_metric()
    assert scores == HEADLINE_SCORES
    metrics = [score.metric for score in scores.values()]
    assert metrics == sorted(metrics, key=list(METRICS).index)
    names = list(scores)
    assert names.index("CIDEr") < names.index("CIDEr-char"), "a score on characters follows the score on words"
