"""METEOR and SPICE through their workers, with programs in Java's place that speak their protocols and count words."""

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from components.evaluate.metrics import METRICS
from components.evaluate.metrics.metric import ALL, MetricScores
from components.evaluate.metrics.run import compute_metrics
from components.evaluate.metrics.spice import JARS
from tests.evaluate import bench

FAKE_METEOR = """
import sys
for line in sys.stdin:
    kind, *references, prediction = line.rstrip("\\n").split(" ||| ")
    assert kind == "SCORE"
    print(line, end="", file=open(LOG, "a"))
    words, wanted = len(prediction.split()), len(references)
    matches = [words, wanted, 0, 0, *[0] * 12]
    print(words, 10 * wanted, 0, 0, *matches, words, words, wanted)
"""
FAKE_SPICE = """
import json, sys
jobs = json.load(open(sys.argv[4]))
print(json.dumps([job["test"] for job in jobs]), file=open(LOG, "a"))
values = [None if job["test"] == "empty" else len(job["test"].split()) / 10 + len(job["refs"]) / 100 for job in jobs]
scores = [{"image_id": job["image_id"], "scores": {"All": {"f": f}}} for job, f in zip(jobs, values)]
json.dump(scores, open(sys.argv[sys.argv.index("-out") + 1], "w"))
"""

PAIRS = {
    "b": ("one two three", ["x"]),
    "a": ("one two", ["x", "y"]),
    "c": ("empty", ["x"]),
    "d": ("one two", ["x", "y"]),
}
GROUPS = {"some": ["b", "a"], "one": ["c"], "nobody": []}


def run(name: str, when: str, program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> MetricScores:
    """The metric `name` with `program` where Java's arguments hold `when`."""
    path = folder / "program.py"
    path.write_text(f"LOG = {str(folder / 'log')!r}\n{program}")
    then = f'exec {shlex.quote(sys.executable)} {path} "$@"'
    monkeypatch.setenv("PATH", bench.fake_java(folder / "bin", when, then))
    pairs = [replace(bench.pair(text, references, [], i), id=i) for i, (text, references) in PAIRS.items()]
    return compute_metrics({name: METRICS[name]}, [bench.grouped(pairs, GROUPS)], {}, folder, 60)["toy/test"]


@pytest.fixture(scope="module")
def meteor_found(tmp_path_factory: pytest.TempPathFactory) -> tuple[MetricScores, list[str]]:
    folder = tmp_path_factory.mktemp("meteor")
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = run("METEOR", "meteor", FAKE_METEOR, folder, monkeypatch)
    return found, (folder / "log").read_text().splitlines()


def by_hand(words: int, references: int) -> float:
    """METEOR where every word of the prediction matches, each a chunk of its own, and a tenth of the references'."""
    mean = 1 / (0.15 / 1 + 0.85 / 0.1)
    return mean * (1 - 0.6 * (words / ((words + references) / 2)) ** 0.2)


def test_meteor_of_a_group_is_that_of_its_summed_statistics_and_not_a_mean(
    meteor_found: tuple[MetricScores, list[str]],
):
    found, _ = meteor_found
    assert {name: values["METEOR"] for name, values in found.groups.items()} == {
        ALL: pytest.approx(by_hand(8, 6)),
        "some": pytest.approx(by_hand(5, 3)),
        "one": pytest.approx(by_hand(1, 1)),
        "nobody": None,
    }
    assert found.absent == {}


def test_meteor_of_each_pair_stands_under_its_id_with_its_statistics(meteor_found: tuple[MetricScores, list[str]]):
    pairs = meteor_found[0].pairs
    wanted = {"b": by_hand(3, 1), "a": by_hand(2, 2), "c": by_hand(1, 1), "d": by_hand(2, 2)}
    assert {i: of_pair["METEOR"] for i, of_pair in pairs.items()} == pytest.approx(wanted)
    assert pairs["b"]["METEOR_statistics"] == [3.0, 10.0, 0.0, 0.0, 3.0, 1.0, *[0.0] * 14, 3.0, 3.0, 1.0]


def test_meteor_reads_each_distinct_pair_once_references_first(meteor_found: tuple[MetricScores, list[str]]):
    assert meteor_found[1] == [
        "SCORE ||| x ||| one two three",
        "SCORE ||| x ||| y ||| one two",
        "SCORE ||| x ||| empty",
    ]


def test_intervals_of_meteor_come_from_the_statistics_of_scores_parquet(meteor_found: tuple[MetricScores, list[str]]):
    column, score = METRICS["METEOR"].resampled["METEOR"]
    rows = np.array([meteor_found[0].pairs[i][column] for i in PAIRS])
    sums = np.array([[1, 1, 0, 0], [0, 0, 2, 0]]) @ rows  # two resamples
    assert score(sums).tolist() == pytest.approx([by_hand(5, 3), by_hand(2, 2)])


def test_spice_of_a_group_is_the_mean_of_the_pairs_that_have_a_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in JARS:
        (tmp_path / name).touch()
    found = run("SPICE", "spice", FAKE_SPICE, tmp_path, monkeypatch)
    mean = pytest.approx((0.31 + 0.22) / 2)
    assert {name: values["SPICE"] for name, values in found.groups.items()} == {
        ALL: pytest.approx((0.31 + 0.22 + 0.22) / 3),
        "some": mean,
        "one": None,
        "nobody": None,
    }
    wanted = {"b": {"SPICE": 0.31}, "a": {"SPICE": 0.22}, "c": {"SPICE": None}, "d": {"SPICE": 0.22}}
    assert found.pairs == wanted
    assert json.loads((tmp_path / "log").read_text()) == ["one two three", "one two", "empty"]
