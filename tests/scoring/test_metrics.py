"""The values of each metric, worked out by hand on a few words; and what the only list says of them."""

import ast
import io
import json
import math
import random
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge

from m3diff.datasets.minichange.language import grammar
from m3diff.scoring.grammar import Grammar, parse_predictions
from m3diff.scoring.metrics import (
    ALL,
    METRICS,
    Groups,
    MetricScores,
    bleu,
    change_accuracy,
    choose_metrics,
    cider,
    gate_metrics,
    rouge_l,
)
from tests.scoring import bench

REAL = Path(__file__).parents[3] / "shared" / "real" / "coco_caption"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the published COCO files are not beside the project")

REFERENCES = {"a": ["a red cube", "the cube is red"], "b": ["a cube"]}
PREDICTIONS = {"a": "a red cube", "b": "a cube cube"}
BOTH = {ALL: ["a", "b"]}

SIX = {str(i): [f"the {word} cube turned red", "it is red"] for i, word in enumerate("abcdef")}
SIX_PREDICTIONS = {i: texts[0] if int(i) % 2 else "the cube is gone" for i, texts in SIX.items()}


def compute(
    metric, references=REFERENCES, predictions=PREDICTIONS, groups: Groups = BOTH, shuffled=None
) -> MetricScores:
    return metric.compute([], groups, bench.tools(references, predictions, shuffled))


def test_bleu_is_the_value_worked_out_by_hand():
    found = compute(bleu).groups[ALL]
    assert found["BLEU-1"] == pytest.approx(5 / 6, abs=1e-6)  # 3 of 3 and 2 of 3 words, longer than the references
    assert found["BLEU-2"] == pytest.approx(math.sqrt(5 / 6 * 3 / 4), abs=1e-6)
    assert found["BLEU-3"] == pytest.approx((5 / 6 * 3 / 4 * 1 / 2) ** (1 / 3), abs=1e-6)
    assert list(found) == ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4"]


def test_bleu_of_a_pair_is_bleu_4_under_its_own_id():
    references = {"a": ["it is a red cube", "x"], "b": ["the lamp went out again"]}
    found = compute(bleu, references, {"a": "it is a red cube", "b": "the lamp went out now"}).pairs
    assert found["a"]["BLEU-4"] == pytest.approx(1.0, abs=1e-6)
    assert found["b"]["BLEU-4"] == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** (1 / 4), abs=1e-6)
    assert found["b"]["BLEU_statistics"] == [4, 3, 2, 1, 5, 4, 3, 2, 5, 5]


def test_a_prediction_shorter_than_its_reference_pays_the_brevity_penalty():
    found = compute(bleu, {"a": ["the cat sat down"]}, {"a": "the cat sat"}, {ALL: ["a"]}).groups[ALL]
    assert found["BLEU-1"] == pytest.approx(math.exp(1 - 4 / 3), abs=1e-6)


def test_rouge_is_the_value_worked_out_by_hand():
    found = compute(rouge_l)
    of_b = (1 + 1.2**2) * (2 / 3) / (1 + 1.2**2 * 2 / 3)  # a common subsequence of 2; precision 2/3, recall 1
    assert found.pairs == {"a": {"ROUGE-L": 1.0}, "b": {"ROUGE-L": pytest.approx(of_b)}}
    assert found.groups[ALL]["ROUGE-L"] == pytest.approx((1 + of_b) / 2)


def test_cider_is_the_value_worked_out_by_hand():
    references, predictions = {"a": ["red cube"], "b": ["blue ball"]}, {"a": "red cube", "b": "blue cube"}
    found = compute(cider, references, predictions)
    assert found.pairs["a"]["CIDEr"] == pytest.approx(10 * (1 + 1 + 0 + 0) / 4)  # cosines of 1- to 4-grams
    assert found.pairs["b"]["CIDEr"] == pytest.approx(10 * (0.5 + 0 + 0 + 0) / 4)
    assert found.groups[ALL]["CIDEr"] == pytest.approx(3.125)


def test_cider_of_one_pair_is_absent_not_nought():
    found = compute(cider, {"a": ["red cube"]}, {"a": "red cube"}, {ALL: ["a"]})
    assert found.groups[ALL]["CIDEr"] is None
    assert found.pairs == {"a": {"CIDEr": 0.0}}


def test_the_control_is_cider_of_the_shuffled_predictions_of_all_pairs():
    references = {"a": ["red cube"], "b": ["blue ball"]}
    groups = BOTH | {"change": ["a", "b"]}
    found = compute(
        cider, references, references and {"a": "red cube", "b": "blue ball"}, groups, {"a": "x", "b": "blue y"}
    )
    assert found.groups[ALL]["CIDEr_shuffled"] == pytest.approx(10 * 0.5 / 4 / 2)
    assert "CIDEr_shuffled" not in found.groups["change"]
    assert found.absent == {}


def test_a_control_on_a_sample_is_scored_against_its_own_pairs_with_the_word_weights_of_all():
    words = ["red cube left", "red cube gone", "red ball left", "blue ball gone", "blue star left", "blue star moved"]
    references = {str(number): [text] for number, text in enumerate(words)}
    whole = {i: references[str((int(i) + 1) % 6)][0] for i in references}
    sample, groups = ["0", "2", "4"], {ALL: list(references)}
    as_predictions = compute(cider, references, whole, groups)  # so that each pair's score shows
    want = np.mean([as_predictions.pairs[i]["CIDEr"] for i in sample])
    found = compute(cider, references, whole, groups, {i: whole[i] for i in sample}).groups[ALL]
    assert found["CIDEr_shuffled"] == pytest.approx(want)
    assert found["CIDEr"] == as_predictions.groups[ALL]["CIDEr"] != pytest.approx(want)


def test_without_shuffled_predictions_the_control_is_absent_with_a_reason():
    found = compute(cider)
    assert found.groups[ALL]["CIDEr_shuffled"] is None
    assert "predictions_shuffled.json" in found.absent["CIDEr_shuffled"]


@pytest.mark.parametrize("metric", [bleu, rouge_l, cider])
def test_a_group_has_the_scores_that_it_would_have_alone(metric):
    some = ["1", "2", "4"]
    within = compute(metric, SIX, SIX_PREDICTIONS, {ALL: list(SIX), "some": some}).groups["some"]
    alone = compute(metric, {i: SIX[i] for i in some}, {i: SIX_PREDICTIONS[i] for i in some}, {ALL: some}).groups[ALL]
    assert within == pytest.approx({name: alone[name] for name in within}, nan_ok=True)


@pytest.mark.parametrize("metric", [bleu, rouge_l, cider])
def test_an_empty_group_has_no_scores(metric):
    assert compute(metric, groups={**BOTH, "none": []}).groups.get("none") is None


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
    """Each score by pycocoevalcap: of the corpus and of each pair."""
    results = {i: [text] for i, text in predictions.items()}
    with redirect_stdout(io.StringIO()) as printed:
        bleu_corpus, bleu_pairs = Bleu(4).compute_score(references, results, verbose=1)
    counts = ast.literal_eval(printed.getvalue().splitlines()[0])
    found = {f"BLEU-{n + 1}": (bleu_corpus[n], bleu_pairs[n]) for n in range(4)}
    found["counts"] = (*counts["correct"], *counts["guess"], counts["testlen"], counts["reflen"])
    assert len(references) > 1
    in_python = {"ROUGE-L": Rouge(), "CIDEr": Cider()}
    return found | {name: scorer.compute_score(references, results) for name, scorer in in_python.items()}


def assert_equal_to_stock(references: dict[str, list[str]], predictions: dict[str, str]) -> None:
    pairs = list(predictions)
    wanted = stock(references, predictions)
    for metric in (bleu, rouge_l):
        found = compute(metric, references, predictions, {ALL: pairs})
        for name, value in found.groups[ALL].items():
            assert value == wanted[name][0], name
        assert [found.pairs[i][metric.METRIC.headline] for i in pairs] == list(wanted[metric.METRIC.headline][1])
    counts = [
        of_pair["BLEU_statistics"] for of_pair in compute(bleu, references, predictions, {ALL: pairs}).pairs.values()
    ]
    assert tuple(np.sum(counts, axis=0)) == wanted["counts"]
    found = compute(cider, references, predictions, {ALL: pairs})
    assert found.groups[ALL]["CIDEr"] == pytest.approx(wanted["CIDEr"][0], rel=1e-9, abs=1e-12)
    assert [found.pairs[i]["CIDEr"] for i in pairs] == pytest.approx(list(wanted["CIDEr"][1]), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(30))
def test_scores_of_random_captions_are_those_of_pycocoevalcap(seed: int):
    assert_equal_to_stock(*random_captions(seed))


def test_scores_of_one_pair_and_of_captions_without_words_are_those_of_pycocoevalcap():
    assert_equal_to_stock({"a": ["a b", ""], "b": ["", ""]}, {"a": "", "b": ""})
    assert_equal_to_stock({"a": ["a b", "c"], "b": ["", "c"]}, {"a": "a", "b": "c d"})
    assert_equal_to_stock({"a": ["word " * 300], "b": ["other"]}, {"a": "word " * 200, "b": "word"})


@needs_real
def test_scores_of_cocos_captions_are_those_of_pycocoevalcap():
    """The 1,000 predictions published with coco-caption, as tokens."""
    references = json.loads(next(REAL.glob("*references_after_tokenization.json")).read_text(encoding="utf-8"))
    results = json.loads(next(REAL.glob("*results_after_tokenization.json")).read_text(encoding="utf-8"))
    predictions = {i: texts[0] for i, texts in results.items()}
    assert len(predictions) == 1000
    assert_equal_to_stock({i: references[i] for i in predictions}, predictions)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("metric", [bleu, rouge_l, cider])
def test_a_score_follows_from_its_column_summed_over_the_pairs(metric, seed: int):
    references, predictions = random_captions(seed)
    found = compute(metric, references, predictions, {ALL: list(references)})
    for name, (column, score) in metric.METRIC.resampled.items():
        rows = np.array([found.pairs[i][column] for i in references], float)
        rows = rows if rows.ndim == 2 else np.stack([rows, np.ones(len(rows))], axis=1)
        assert score(rows.sum(axis=0)) == pytest.approx(found.groups[ALL][name], rel=1e-12)
        assert np.isnan(score(0 * rows.sum(axis=0)))
    assert metric.METRIC.resampled.keys() == set(metric.METRIC.scores)


PAIRS = bench.pairs()
PARSED = bench.parse(PAIRS)
GROUPS = {
    ALL: [pair.id for pair in PAIRS],
    "change": ["toy/0", "toy/1", "toy/2", "toy/3"],
    "multi_change": ["toy/3"],
    "distractors": ["toy/4", "toy/5"],
    "by_type/color": ["toy/0"],
    "by_type/removal": ["toy/1"],
    "by_type/illumination": ["toy/2"],
    "by_dataset/toy": [pair.id for pair in PAIRS],
}


def accuracy(parsed=PARSED) -> MetricScores:
    return change_accuracy.compute(PAIRS, GROUPS, bench.tools(parsed=parsed))


def test_accuracies_over_all_pairs_are_those_counted_by_hand():
    assert accuracy().groups[ALL] == {
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


def test_accuracies_of_a_type_are_of_its_pairs_alone():
    found = accuracy().groups
    right = {"type_accuracy": 1.0, "place_accuracy": 1.0, "exact_accuracy": 1.0}
    assert found["by_type/color"] == right | {"false_changes": 0.0, "false_changes_per_pair": 0.0}
    wrong = {"place_accuracy": 0.0, "exact_accuracy": 0.0}
    assert found["by_type/removal"] == right | wrong | {"false_changes": 1.0, "false_changes_per_pair": 1.0}
    missed = wrong | {"type_accuracy": 0.0, "false_changes": None, "false_changes_per_pair": 0.0}
    assert found["by_type/illumination"] == missed


def test_a_wrong_colour_is_right_by_place_and_wrong_exactly():
    green = replace(PAIRS[0], prediction="the red cube at the left turned green")
    pairs = [green, *PAIRS[1:]]
    found = change_accuracy.compute(pairs, GROUPS, bench.tools(parsed=bench.parse(pairs)))
    assert (found.groups[ALL]["change_place_accuracy"], found.groups[ALL]["change_exact_accuracy"]) == (1 / 3, 0.0)
    of_type = found.groups["by_type/color"]
    assert (of_type["place_accuracy"], of_type["exact_accuracy"]) == (1.0, 0.0)
    assert (found.pairs["toy/0"]["place_right"], found.pairs["toy/0"]["exact_right"]) == (True, False)
    assert found.groups[ALL]["false_changes"] == 3 / 5  # it did happen


def test_clause_scores_of_several_changes_are_those_counted_by_hand():
    found = accuracy().groups["multi_change"]
    half = {f"{of}_{what}": 1 / 2 for of in ("type", "place", "exact") for what in ("precision", "recall", "f1")}
    whole = {"all_types_right": 0.0, "all_places_right": 0.0, "all_exact_right": 0.0}
    assert found == {"changes": 2} | half | whole | {"false_changes": 1 / 2, "false_changes_per_pair": 1.0}


def test_precision_is_of_the_clauses_predicted_and_recall_of_the_changes_there_are():
    red, blue = "the red cube at the left turned blue", "the blue ball at the top was removed"
    pairs = [
        bench.pair(red, [f"{red}, and {blue}, and the lamp went out"], ["color", "removal", "illumination"], "0"),
        bench.pair(
            f"{blue}, and the red ball at the left turned blue", [f"{red}, and {blue}"], ["color", "removal"], "1"
        ),
        bench.pair(
            f"{blue}, and the red cube at the left turned green", [f"{red}, and {blue}"], ["color", "removal"], "2"
        ),
    ]
    parsed = bench.parse(pairs)
    found = change_accuracy.group_scores("multi_change", list(parsed.values()))
    assert {name: value for name, value in found.items() if "false" not in name} == {
        "changes": 7,
        "type_precision": 1.0,
        "type_recall": 5 / 7,
        "type_f1": 10 / 12,
        "place_precision": 4 / 5,
        "place_recall": 4 / 7,
        "place_f1": 8 / 12,
        "exact_precision": 3 / 5,
        "exact_recall": 3 / 7,
        "exact_f1": 6 / 12,
        "all_types_right": 2 / 3,
        "all_places_right": 1 / 3,
        "all_exact_right": 0.0,
    }
    overall = change_accuracy.compute(pairs, {ALL: list(parsed)}, bench.tools(parsed=parsed)).groups[ALL]
    assert (overall["multi_change_place_f1"], overall["multi_change_exact_f1"]) == (8 / 12, 6 / 12)


def test_where_nothing_is_told_of_several_changes_f1_is_nought_and_without_such_pairs_absent():
    red = "the red cube at the left turned blue"
    several = bench.pair("nothing changed", [f"{red}, and the lamp went out"], ["color", "illumination"], "0")
    single = bench.pair(red, [red], ["color"], "1")
    found = {}
    for pair in (several, single):
        parsed = bench.parse([pair])
        found[pair.id] = change_accuracy.compute([pair], {ALL: [pair.id]}, bench.tools(parsed=parsed)).groups[ALL]
    assert found["toy/0"]["multi_change_exact_f1"] == 0.0
    assert found["toy/1"]["multi_change_exact_f1"] is None


def test_a_change_told_twice_happened_once():
    red = "the red cube at the left turned blue"
    parsed = bench.parse([bench.pair(f"{red}, and {red}, and x", [red], ["color"])])
    told = change_accuracy.group_scores("change", list(parsed.values()))
    assert told == {"false_changes": 1 / 2, "false_changes_per_pair": 1.0}


def test_groups_of_unchanged_pairs_have_no_accuracy_but_their_false_changes():
    found = accuracy().groups
    assert found["distractors"] == {"false_changes": 1.0, "false_changes_per_pair": 1 / 2}
    assert found["change"] == {"false_changes": 1 / 2, "false_changes_per_pair": 1 / 2}


def swapped(captions: dict[int, str]) -> MetricScores:
    """Pairs of one change in MiniChange's words, some with a caption of their swapped images."""
    text = "at the top the small red box turned blue"
    pairs = [
        replace(bench.pair(text, [text], ["color"], str(n)), reversed_prediction=captions.get(n)) for n in range(4)
    ]
    rules = grammar()
    parsed = parse_predictions({"toy": Grammar(rules)}, pairs)
    return change_accuracy.compute(pairs, {ALL: list(parsed)}, bench.tools(parsed=parsed))


def test_reversal_is_the_share_of_swapped_pairs_whose_inverse_change_is_named():
    right, wrong = "at the top the small blue box turned red", "at the top the small red box turned blue"
    found = swapped({0: right, 1: wrong, 3: wrong})
    assert (found.groups[ALL]["reversal"], found.absent) == (1 / 3, {})


def test_without_captions_of_swapped_images_reversal_is_absent_with_the_reason():
    found = swapped({})
    assert found.groups[ALL]["reversal"] is None
    assert "predictions_reversed.json" in found.absent["reversal"]


@pytest.mark.parametrize(("foreign", "judged"), [(3, True), (4, False)])
def test_where_most_captions_are_in_other_words_only_that_is_said(foreign: int, judged: bool):
    pairs = [
        replace(pair, prediction="somebody moved things") if int(pair.id[-1]) < foreign else pair for pair in PAIRS
    ]
    found = change_accuracy.compute(pairs, GROUPS, bench.tools(parsed=bench.parse(pairs)))
    assert found.groups[ALL]["unreadable"] == foreign / 6
    scores = {name: value for name, value in found.groups[ALL].items() if name not in ("unreadable", "reversal")}
    verdicts = [of_pair["exact_right"] for of_pair in found.pairs.values()]
    assert found.pairs["toy/0"]["predicted_type"] == "unreadable"
    if judged:
        assert scores["change_exact_accuracy"] == 0.0
        assert verdicts == [False, False, False, False, True, False]
    else:
        assert set(scores.values()) == {None}
        assert set(found.groups["by_type/color"].values()) == {None}
        assert set(verdicts) == {None}
        assert "does not know the words of 67 % of the captions" in found.absent["change_exact_accuracy"]
        assert found.absent.keys() == set(METRICS["change_accuracy"].overall) - {"unreadable"}


@pytest.mark.parametrize("foreign", [0, 2, 5])
def test_every_score_of_all_pairs_follows_from_the_sums_of_the_column(foreign: int):
    pairs = [replace(pair, prediction="x") if int(pair.id[-1]) < foreign else pair for pair in PAIRS]
    found = change_accuracy.compute(pairs, GROUPS, bench.tools(parsed=bench.parse(pairs)))
    metric = METRICS["change_accuracy"]
    rows = np.array([found.pairs[pair.id]["change_statistics"] for pair in pairs])
    assert set(metric.resampled) == set(metric.overall)
    for name, (column, score) in metric.resampled.items():
        assert column == "change_statistics"
        (value,) = score(rows.sum(axis=0)[None])
        assert (None if np.isnan(value) else value) == found.groups[ALL][name], name


def test_each_pair_has_its_predicted_type_and_verdicts():
    found = accuracy().pairs
    assert {i: of_pair["predicted_type"] for i, of_pair in found.items()} == {
        "toy/0": "color",
        "toy/1": "removal",
        "toy/2": "none",
        "toy/3": "several",
        "toy/4": "none",
        "toy/5": "color",
    }
    assert [of_pair["type_right"] for of_pair in found.values()] == [True, True, False, False, True, False]
    assert [of_pair["place_right"] for of_pair in found.values()] == [True, False, False, False, True, False]
    assert [of_pair["exact_right"] for of_pair in found.values()] == [True, False, False, False, True, False]


def test_without_a_grammar_every_accuracy_is_null_and_the_reason_given():
    found = accuracy({})
    assert {value for values in found.groups.values() for value in values.values()} == {None, 0}
    assert found.groups["multi_change"]["changes"] == 0
    assert set(found.groups["by_type/color"].values()) == {None}
    assert found.pairs == {}
    assert found.absent.keys() == {"change_type_accuracy"}
    assert "records/<dataset>/grammar.json" in found.absent["change_type_accuracy"]
    assert accuracy().absent.keys() == {"reversal"}


def test_a_metric_gives_no_score_and_no_column_that_it_does_not_declare():
    tools = bench.tools(SIX, SIX_PREDICTIONS, SIX_PREDICTIONS, PARSED)
    for metric in (METRICS[name] for name in ("CIDEr", "ROUGE-L", "BLEU", "change_accuracy")):
        groups = GROUPS if not metric.java else {ALL: list(SIX), "change": ["0", "1"]}
        found = metric.compute(PAIRS, groups, tools)
        assert tuple(found.groups[ALL]) == metric.scores + metric.overall
        assert {name for of_pair in found.pairs.values() for name in of_pair} == metric.columns.keys()


def test_the_gate_takes_scores_of_all_pairs_of_which_more_is_better():
    assert set(gate_metrics()) == {
        "CIDEr",
        "METEOR",
        "ROUGE-L",
        "BLEU-1",
        "BLEU-2",
        "BLEU-3",
        "BLEU-4",
        "SPICE",
        "change_type_accuracy",
        "change_place_accuracy",
        "change_exact_accuracy",
        "no_change_recall",
        "multi_change_place_f1",
        "multi_change_exact_f1",
        "reversal",
        "judge",
    }
    assert gate_metrics(["METEOR", "CIDEr"]) == ["CIDEr", "METEOR"]


def test_metrics_are_chosen_by_name_in_the_order_of_the_list():
    assert list(choose_metrics(["BLEU", "CIDEr"])) == ["CIDEr", "BLEU"]
    with pytest.raises(AssertionError, match=r"unknown metrics \['BLUE'\]; known: CIDEr, METEOR"):
        choose_metrics(["BLUE"])


def test_the_list_is_light_to_import():
    heavy = ("pycocoevalcap", "torch", "pandas", "polars", "transformers", "PIL", "jinja2", "pyarrow.parquet")
    code = f"import sys; import m3diff.scoring.metrics; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_only_what_has_a_program_of_its_own_waits_beside_the_others_and_some_are_optional():
    assert [name for name, metric in METRICS.items() if metric.program] == ["METEOR", "SPICE"]
    assert [name for name, metric in METRICS.items() if metric.optional] == ["SPICE", "judge", "pixel_threshold"]
    assert [name for name, metric in METRICS.items() if not metric.java] == [
        "change_accuracy",
        "judge",
        "pixel_threshold",
    ]
