import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from components.evaluate.java import JavaMissing
from components.evaluate.stage import SCORE_SCHEMA, evaluate
from components.records import DataError
from tests.evaluate import bench


@dataclass(frozen=True)
class Run:
    root: Path
    folders: tuple[Path, Path, Path]
    out: Path
    metrics: dict[str, Any]


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The whole stage on six pairs, with every scorer, METEOR too."""
    root = tmp_path_factory.mktemp("evaluate")
    folders = bench.write(root)
    evaluate(bench.config(root), *folders, root / "out")
    return Run(root, folders, root / "out", json.loads((root / "out" / "metrics.json").read_text()))


def without_meteor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """METEOR takes its JVM's 10 to 30 s; tests of other things let it fail at once."""
    monkeypatch.setenv("PATH", bench.fake_java(tmp_path / "bin", "meteor", "exit 1"))


@pytest.mark.slow
def test_every_score_is_computed(real_run: Run):
    names = ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "CIDEr_shuffled"]
    assert all(isinstance(real_run.metrics[name], float) for name in names)
    assert real_run.metrics["change_type_accuracy"] == pytest.approx(2 / 3)
    assert list(real_run.metrics["absent"]) == ["SPICE"]
    assert real_run.metrics["CIDEr_shuffled"] < real_run.metrics["CIDEr"]


@pytest.mark.slow
def test_meteor_of_a_caption_equal_to_a_reference_is_one(real_run: Run):
    scores = {row["id"]: row["METEOR"] for row in pq.read_table(real_run.out / "scores.parquet").to_pylist()}
    assert scores["toy/0"] == pytest.approx(1.0)
    assert 0 < scores["toy/1"] < 1
    assert scores["toy/2"] == 0.0


@pytest.mark.slow
def test_a_row_per_pair_holds_caption_scores_and_verdicts(real_run: Run):
    table = pq.read_table(real_run.out / "scores.parquet")
    assert table.schema.equals(SCORE_SCHEMA)
    rows = table.to_pylist()
    assert [row["id"] for row in rows] == list(bench.CAPTIONS)
    assert [row["said"] for row in rows] == ["color", "removal", "none", "several", "none", "color"]
    assert [row["exact_right"] for row in rows] == [True, False, False, False, True, False]
    assert rows[0]["CIDEr"] > rows[1]["CIDEr"] > rows[2]["CIDEr"] == 0


@pytest.mark.slow
def test_meteor_is_computed_also_where_some_groups_are_empty(tmp_path: Path):
    clean, captions, model = bench.write(tmp_path)
    table = pq.read_table(clean / "records.parquet")
    pq.write_table(table.set_column(7, "change_types", [[[]] * len(table)]), clean / "records.parquet")
    metrics = evaluate(bench.config(tmp_path), clean, captions, model, tmp_path / "out")
    assert metrics.meteor is not None
    assert metrics.change.pairs == 0
    assert metrics.change.meteor is None


@pytest.mark.slow
def test_a_second_run_writes_the_same_bytes(real_run: Run):
    evaluate(bench.config(real_run.root), *real_run.folders, real_run.root / "again")
    for name in ("metrics.json", "scores.parquet", "report.html"):
        assert (real_run.root / "again" / name).read_bytes() == (real_run.out / name).read_bytes()


def test_without_meteor_the_rest_is_scored_and_the_reason_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = bench.write(tmp_path)
    without_meteor(tmp_path, monkeypatch)
    metrics = evaluate(bench.config(tmp_path), *folders, tmp_path / "out")
    assert metrics.meteor is None
    assert metrics.absent["METEOR"]
    assert metrics.cider is not None
    assert "<dt>METEOR</dt><dd>Absent." in (tmp_path / "out" / "report.html").read_text()


def test_without_optional_inputs_their_scores_are_null_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clean, captions, model = bench.write(tmp_path)
    without_meteor(tmp_path, monkeypatch)
    for path in (captions / "predictions_shuffled.json", captions / "saliency.npz", model / "curves.csv"):
        path.unlink()
    evaluate(bench.config(tmp_path, grammar=None), clean, captions, model, tmp_path / "out")
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["change_type_accuracy"] is metrics["no_change_recall"] is metrics["CIDEr_shuffled"] is None
    assert {"change_type_accuracy", "CIDEr_shuffled"} <= metrics["absent"].keys()


def test_without_java_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = bench.write(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing, match="install a Java runtime"):
        evaluate(bench.config(tmp_path), *folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_image_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = bench.write(tmp_path)
    without_meteor(tmp_path, monkeypatch)
    (tmp_path / "3_after.png").unlink()
    with pytest.raises(DataError, match="3_after.png"):
        evaluate(bench.config(tmp_path), *folders, tmp_path / "out")
