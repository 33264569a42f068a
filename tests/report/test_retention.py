"""The part of a page about what a model keeps of its base: the table, the counts and examples of lost answers."""

from dataclasses import replace
from pathlib import Path

import pytest

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.report.images import ImageRights
from m3diff.report.retention import MAX_EXAMPLES, choose_examples, describe_retention, retention_table
from m3diff.report.tables import format_lines
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.pairs import EvalPair
from m3diff.scoring.results import ModelAndBaseScore, RetentionScores
from tests.scoring import bench

SCORES = RetentionScores(
    records=1200,
    scores={
        "exact_match": ModelAndBaseScore(model=0.5, base=0.75, interval=Interval(low=-0.3, high=-0.2)),
        "a_score_that_no_run_is_compared_by": ModelAndBaseScore(model=1.0, base=1.0),
        "yes_no_accuracy": ModelAndBaseScore(model=0.25, base=0.25),
    },
    records_by_kind={"count": 30},
    by_kind={
        "count": {
            "exact_match": ModelAndBaseScore(model=0.6, base=0.5),
            "yes_no_accuracy": ModelAndBaseScore(model=1.0, base=1.0),
        }
    },
)


def test_the_table_has_base_model_and_change_of_each_score_and_a_row_per_kind():
    table = retention_table("skills/test", SCORES)
    assert table.name == "skills-test-retention"
    assert table.columns == ("Records", "n", "score", "base", "this model", "change")
    rows = [[row.name, *row.labels, *(cell.text for cell in row.cells)] for row in table.rows]
    assert rows == [
        ["all records", "1,200", "exact match", "75.0", "50.0", "-25.0"],
        ["all records", "1,200", "yes no accuracy", "25.0", "25.0", "0.0"],
        ["count", "30", "exact match", "50.0", "60.0", "+10.0"],
    ]
    assert table.rows[0].cells[2].bounds == "-30.0 to -20.0"
    assert "-25.0  -30.0 to -20.0" in format_lines(table)[1]


def make_answers(root: Path, *predictions: str) -> list[EvalPair]:
    """Return a question about one image for each prediction. The right answer is the number of the question."""
    pairs = []
    for number, prediction in enumerate(predictions):
        bench.paint(root / f"{number}_before.png", (10 * number, 0, 0))
        pair = bench.pair(prediction, [str(number)], [], str(number), root)
        pairs.append(replace(pair, images=pair.images[:1], question=f"Which number is {number}?"))
    return pairs


@pytest.mark.parametrize("may_show", [True, False])
def test_answers_that_only_the_base_gave_are_counted_and_shown_as_licensed(tmp_path, may_show):
    base_answers = make_answers(tmp_path, "0", "1", "2", "x")
    answers = make_answers(tmp_path, "0", "y", "2", "3")
    specs = {"toy": replace(DATASETS["pairs"], protocols=(Protocol("test", published_pairs=None),))}
    rights = {"toy": ImageRights(may_show, None)}
    (part,) = describe_retention({"toy/test": SCORES}, answers, base_answers, specs, rights)
    assert part["name"] == "toy/test"
    assert part["kept"] == 2
    assert part["lost"] == 1
    assert part["table"] == retention_table("toy/test", SCORES)
    (example,) = part["examples"]
    images = example.pop("images")
    assert example == {"question": "Which number is 1?", "reference": "1", "base": "1", "model": "y"}
    assert [image.partition(",")[0] for image in images] == ["data:image/webp;base64"] * may_show


@pytest.mark.parametrize(("count", "chosen"), [(0, []), (3, [0, 1, 2]), (4, [0, 1, 2, 3]), (9, [0, 3, 6])])
def test_the_examples_are_few_and_spread_over_the_dataset(count, chosen):
    pair = bench.pair("x", ["y"], [])
    lost_answers = [(replace(pair, id=str(number)), pair) for number in range(count)]
    examples = choose_examples(lost_answers)
    assert [int(example.id) for example, _ in examples] == chosen
    assert len(examples) <= MAX_EXAMPLES
