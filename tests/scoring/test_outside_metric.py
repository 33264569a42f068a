"""A metric is one file and one line: here the file lies in a temporary folder and the line is put in by the test."""

import importlib.util
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from m3diff.scoring.metrics import METRICS, gate_metrics
from tests.scoring import bench
from tests.scoring.pages import gallery_of

WORDS = '''
from m3diff.scoring.metrics.metric import (Metric, MetricScores, mean_of, of_each_group)


def compute(pairs, groups, tools):
    """Words of a prediction, in hundreds."""
    words = {pair.id: len(pair.prediction.split()) / 100 for pair in pairs}
    means = of_each_group(groups, lambda ids: {"words": sum(words[i] for i in ids) / len(ids)})
    return MetricScores(means, {i: {"words": value} for i, value in words.items()})


METRIC = Metric(compute, headline="words", scores=("words",), columns={"words": "double"}, java=False,
                resampled={"words": mean_of("words")})
'''


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "words.py"
    path.write_text(WORDS)
    spec = importlib.util.spec_from_file_location("words", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(METRICS, "words", module.METRIC)


@pytest.mark.usefixtures("words")
def test_a_metric_from_outside_stands_in_every_file_and_on_the_page(tmp_path: Path):
    folders = bench.write(tmp_path)
    bench.run(folders, tmp_path / "out", metrics=["words", "change_accuracy"])
    of_pairs = {i: len(prediction.split()) / 100 for i, prediction in bench.PREDICTIONS.items()}

    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())["protocols"]["toy/test"]
    assert metrics["words"] == pytest.approx(sum(of_pairs.values()) / 6)
    assert metrics["distractors"]["words"] == pytest.approx((of_pairs["toy/4"] + of_pairs["toy/5"]) / 2)
    assert metrics["by_type"]["color"]["words"] == pytest.approx(of_pairs["toy/0"])

    rows = pq.read_table(tmp_path / "out" / "scores.parquet").to_pylist()
    assert {row["id"]: row["words"] for row in rows} == of_pairs

    page = (tmp_path / "out" / "report.html").read_text()
    assert f'<dt>words</dt><dd><span class="figure">{100 * metrics["words"]:.1f}' in page
    assert page.count('<th scope="col">words</th>') == 3  # by protocol, by group and by type
    gallery = gallery_of(page)
    place = gallery["columns"].index("words")
    found = {pair["id"]: pair["scores"]["0"][0][place] for pair in gallery["pairs"]}
    assert found == of_pairs


@pytest.mark.usefixtures("words")
def test_a_metric_from_outside_may_stand_in_the_gate():
    assert "words" in gate_metrics()
