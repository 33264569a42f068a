"""METEOR and SPICE through their workers, with programs in Java's place that speak their protocols and count words."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from components.evaluate.metrics import METRICS
from components.evaluate.metrics.metric import ALL, MetricScores
from components.evaluate.metrics.run import compute_metrics
from components.evaluate.metrics.spice import JARS
from components.evaluate.metrics.worker import by_group
from tests.evaluate import bench

FAKE_METEOR = """
import sys
for line in sys.stdin:
    kind, *parts = line.rstrip("\\n").split(" ||| ")
    if kind == "SCORE":
        *references, prediction = parts
        print(line, end="", file=open(LOG, "a"))
        print(len(prediction.split()) / 10 + len(references) / 100, flush=True)
    else:
        values = [float(part) for part in parts]
        print(*values, max(values), sep="\\n", flush=True)
"""
FAKE_SPICE = """
import json, sys
jobs = json.load(open(sys.argv[4]))
print(json.dumps([job["image_id"] for job in jobs]), file=open(LOG, "a"))
values = [None if job["test"] == "empty" else len(job["test"].split()) / 10 + len(job["refs"]) / 100 for job in jobs]
scores = [{"image_id": job["image_id"], "scores": {"All": {"f": f}}} for job, f in zip(jobs, values)]
json.dump(scores, open(sys.argv[sys.argv.index("-out") + 1], "w"))
"""

PAIRS = {
    "b": ("one two three", ["x"]),
    "a": ("one two", ["x", "y"]),
    "c": ("empty", ["x"]),
}
GROUPS = {"some": ["b", "a"], "one": ["c"], "nobody": []}


def run(name: str, when: str, program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> MetricScores:
    """The metric `name` with `program` where Java's arguments hold `when`."""
    path = folder / "program.py"
    path.write_text(f"LOG = {str(folder / 'log')!r}\n{program}")
    then = f'exec {shlex.quote(sys.executable)} {path} "$@"'
    monkeypatch.setenv("PATH", bench.fake_java(folder / "bin", when, then))
    pairs = [replace(bench.pair(text, references, [], i), id=i) for i, (text, references) in PAIRS.items()]
    return compute_metrics({name: METRICS[name]}, pairs, GROUPS, {}, folder, 30)


@pytest.fixture(scope="module")
def meteor(tmp_path_factory: pytest.TempPathFactory) -> tuple[MetricScores, list[str]]:
    folder = tmp_path_factory.mktemp("meteor")
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = run("METEOR", "meteor", FAKE_METEOR, folder, monkeypatch)
    return found, (folder / "log").read_text().splitlines()


def test_meteor_of_a_group_is_the_programs_own_aggregate_and_not_a_mean(meteor: tuple[MetricScores, list[str]]):
    assert {name: values["METEOR"] for name, values in meteor[0].groups.items()} == {
        ALL: 0.31,
        "some": 0.31,
        "one": 0.11,
        "nobody": None,
    }
    assert meteor[0].absent == {}


def test_meteor_of_each_pair_stands_under_its_id(meteor: tuple[MetricScores, list[str]]):
    assert meteor[0].pairs == {"b": {"METEOR": 0.31}, "a": {"METEOR": 0.22}, "c": {"METEOR": 0.11}}


def test_meteor_reads_each_pair_once_references_first(meteor: tuple[MetricScores, list[str]]):
    assert meteor[1] == ["SCORE ||| x ||| one two three", "SCORE ||| x ||| y ||| one two", "SCORE ||| x ||| empty"]


def test_spice_of_a_group_is_the_mean_of_the_pairs_that_have_a_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in JARS:
        (tmp_path / name).touch()
    found = run("SPICE", "spice", FAKE_SPICE, tmp_path, monkeypatch)
    assert {name: values["SPICE"] for name, values in found.groups.items()} == {
        ALL: pytest.approx((0.31 + 0.22) / 2),
        "some": pytest.approx((0.31 + 0.22) / 2),
        "one": None,
        "nobody": None,
    }
    assert found.pairs == {"b": {"SPICE": 0.31}, "a": {"SPICE": 0.22}, "c": {}}
    assert (tmp_path / "log").read_text() == '["a", "b", "c"]\n'


def test_a_worker_scores_groups_by_their_own_pairs_and_leaves_out_empty_ones():
    seen = []

    def compute(references, predictions):
        seen.append((references, predictions))
        return len(references), [float(len(prediction[0])) for prediction in predictions.values()]

    job = {
        "references": {"a": ["x"], "b": ["y"]},
        "predictions": {"a": "1", "b": "22"},
        "groups": {"all": ["b", "a"], "none": [], "one": ["a"]},
    }
    assert by_group(job, compute) == {"groups": {"all": 2, "one": 1}, "pairs": {"b": 2.0, "a": 1.0}}
    assert seen[1] == ({"a": ["x"]}, {"a": ["1"]})
