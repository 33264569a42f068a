import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Licence, Permission, Protocol
from m3diff.records.errors import DataError
from m3diff.scoring.metrics import choose_metrics
from m3diff.scoring.metrics.java import JavaMissing
from m3diff.stages.evaluate.stage import evaluate, score_table
from tests.scoring import bench


@dataclass(frozen=True)
class Run:
    root: Path
    folders: bench.Folders
    out: Path
    metrics: dict[str, Any]  # of the only protocol


PROTOCOL = "toy/test"


@pytest.fixture(scope="module")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The whole stage on six pairs, with every scorer, METEOR too."""
    root = tmp_path_factory.mktemp("evaluate")
    folders = bench.write(root)
    bench.run(folders, root / "out")
    return Run(root, folders, root / "out", written(root / "out"))


def written(out: Path) -> dict[str, Any]:
    """The scores of the only protocol in metrics.json."""
    return json.loads((out / "metrics.json").read_text())["protocols"][PROTOCOL]


def without_meteor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """METEOR takes its JVM's 10 to 30 s; tests of other things let it fail at once."""
    monkeypatch.setenv("PATH", bench.fake_java(tmp_path / "bin", "meteor", "exit 1"))


@pytest.mark.slow
def test_every_score_is_computed(real_run: Run):
    names = ["BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "CIDEr_shuffled"]
    assert all(isinstance(real_run.metrics[name], float) for name in names)
    assert real_run.metrics["change_type_accuracy"] == pytest.approx(2 / 3)
    assert list(real_run.metrics["absent"]) == ["SPICE", "reversal"]
    assert real_run.metrics["CIDEr_shuffled"] < real_run.metrics["CIDEr"]


@pytest.mark.slow
def test_meteor_of_a_caption_equal_to_a_reference_is_one(real_run: Run):
    scores = {row["id"]: row["METEOR"] for row in pq.read_table(real_run.out / "scores.parquet").to_pylist()}
    assert scores["toy/0"] == pytest.approx(1.0)
    assert 0 < scores["toy/1"] < 1
    assert scores["toy/2"] == 0.0


@pytest.mark.slow
def test_a_row_per_pair_holds_prediction_scores_and_verdicts(real_run: Run):
    table = pq.read_table(real_run.out / "scores.parquet")
    rows = table.to_pylist()
    assert {row["protocol"] for row in rows} == {PROTOCOL}
    assert [row["id"] for row in rows] == list(bench.PREDICTIONS)
    assert [row["prediction"] for row in rows] == list(bench.PREDICTIONS.values())
    assert [row["change_types"] for row in rows] == [types for _, types, _ in bench.RECORDS]
    assert [row["predicted_type"] for row in rows] == ["color", "removal", "none", "several", "none", "color"]
    assert [row["exact_right"] for row in rows] == [True, False, False, False, True, False]
    assert rows[0]["CIDEr"] > rows[1]["CIDEr"] > rows[2]["CIDEr"] == 0


@pytest.mark.slow
def test_meteor_is_computed_also_where_some_groups_are_empty(tmp_path: Path):
    folders = bench.write(tmp_path)
    path = folders.clean / "records.parquet"
    table = pq.read_table(path)
    column = table.schema.get_field_index("change_types")
    unknown = pa.array([[]] * len(table), table.schema.field(column).type)
    pq.write_table(table.set_column(column, "change_types", unknown), path)
    found = bench.run(folders, tmp_path / "out").protocols[PROTOCOL]
    assert found.scores["METEOR"] is not None
    assert found.groups["change"]["pairs"] == 0
    assert found.groups["change"]["METEOR"] is None


@pytest.mark.slow
def test_a_second_run_writes_the_same_bytes(real_run: Run):
    bench.run(real_run.folders, real_run.root / "again")
    for name in ("metrics.json", "scores.parquet", "report.html"):
        assert (real_run.root / "again" / name).read_bytes() == (real_run.out / name).read_bytes()


def test_without_meteor_the_rest_is_scored_and_the_reason_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = bench.write(tmp_path)
    without_meteor(tmp_path, monkeypatch)
    found = bench.run(folders, tmp_path / "out").protocols[PROTOCOL]
    assert found.scores["METEOR"] is None
    assert found.absent["METEOR"]
    assert found.scores["CIDEr"] is not None
    assert "<dt>METEOR</dt><dd>Absent." in (tmp_path / "out" / "report.html").read_text()


def test_without_optional_inputs_their_scores_are_null_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = bench.write(tmp_path)
    without_meteor(tmp_path, monkeypatch)
    (folders.predictions / "predictions_shuffled.json").unlink()
    (folders.predictions / "saliency.npz").unlink()
    (folders.model / "curves.csv").unlink()
    (folders.records / "toy" / "grammar.json").unlink()
    bench.run(folders, tmp_path / "out")
    metrics = written(tmp_path / "out")
    assert metrics["change_type_accuracy"] is metrics["no_change_recall"] is metrics["CIDEr_shuffled"] is None
    assert metrics["absent"].keys() == {"change_type_accuracy", "CIDEr_shuffled", "METEOR", "SPICE"}


def test_only_the_metrics_asked_for_are_computed(tmp_path: Path):
    """And the whole stage in Python but for the tokenizer: which file holds what, and what is on the page."""
    folders = bench.write(tmp_path)
    report = bench.run(folders, tmp_path / "out", metrics=["change_accuracy", "ROUGE-L", "CIDEr"])
    whole = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert whole == report.model_dump(mode="json")
    assert (whole["rows_in"], whole["rows_out"], list(whole["protocols"])) == (6, 6, [PROTOCOL])
    metrics = whole["protocols"][PROTOCOL]
    assert {"METEOR", "BLEU-4", "SPICE"}.isdisjoint(metrics.keys() | metrics["change"].keys())
    assert (metrics["pairs"], metrics["published_pairs"], list(metrics["absent"])) == (6, None, ["reversal"])
    assert metrics["change_type_accuracy"] == pytest.approx(2 / 3)
    assert metrics["CIDEr_shuffled"] < metrics["CIDEr"]
    table = pq.read_table(tmp_path / "out" / "scores.parquet")
    assert table.column_names[:6] == ["protocol", "id", "dataset", "change_types", "prediction", "CIDEr"]
    assert {"ROUGE-L", "predicted_type", "type_right", "exact_right"} <= set(table.column_names[6:])
    assert "METEOR" not in table.column_names
    page = (tmp_path / "out" / "report.html").read_text()
    assert "METEOR</dt>" not in page
    assert page.count('"data:image/webp;base64,') == 3 * 6


@pytest.mark.parametrize(
    ("name", "type_name"),
    [
        ("CIDEr", "double"),
        ("predicted_type", "string"),
        ("type_right", "bool"),
        ("id", "string"),
        ("change_statistics", "list<item: double>"),
    ],
)
def test_columns_of_scores_have_the_types_that_the_metrics_declare(name: str, type_name: str):
    table = score_table(choose_metrics(["CIDEr", "change_accuracy"]), [], {})
    assert str(table.schema.field(name).type) == type_name


def numbered(monkeypatch: pytest.MonkeyPatch, *protocols: Protocol) -> None:
    """The reader `pairs` with these protocols."""
    monkeypatch.setitem(DATASETS, "pairs", replace(DATASETS["pairs"], protocols=protocols))


def test_every_protocol_is_scored_on_its_own_pairs_and_never_on_a_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    numbered(monkeypatch, Protocol("total", n=6), Protocol("even", n=3, ids="[024]"))
    found = bench.run(bench.write(tmp_path), tmp_path / "out", metrics=["change_accuracy", "CIDEr"]).protocols
    assert {name: of.pairs for name, of in found.items()} == {"toy/total": 6, "toy/even": 3}
    assert found["toy/even"].scores["change_type_accuracy"] == 1 / 2  # pair 0 right, pair 2 missed; 4 is a distractor
    assert found["toy/even"].scores["no_change_recall"] == 1.0
    assert found["toy/total"].scores["no_change_recall"] == 1 / 2
    table = pq.read_table(tmp_path / "out" / "scores.parquet").to_pylist()
    assert [row["id"] for row in table if row["protocol"] == "toy/even"] == ["toy/0", "toy/2", "toy/4"]
    of_total = {row["id"]: row["CIDEr"] for row in table if row["protocol"] == "toy/total"}
    assert of_total["toy/0"] != next(row["CIDEr"] for row in table if row["protocol"] == "toy/even")  # own word weights


def test_a_benchmark_of_which_pairs_are_missing_is_refused_unless_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    numbered(monkeypatch, Protocol("total", n=7), Protocol("even", n=3, ids="[024]"))
    folders = bench.write(tmp_path)
    with pytest.raises(DataError, match=r"toy/total: 6 pairs, papers score 7: .*evaluate\.allow_fewer_pairs"):
        bench.run(folders, tmp_path / "out", metrics=["change_accuracy"])
    assert not (tmp_path / "out").exists()
    found = bench.run(folders, tmp_path / "out", metrics=["change_accuracy"], allow_fewer_pairs=True).protocols
    assert {name: of.is_partial for name, of in found.items()} == {"toy/total": True, "toy/even": False}


def test_a_dataset_that_may_not_be_shown_is_scored_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = DATASETS["pairs"]
    no = Permission("no", "the page says so")
    monkeypatch.setitem(DATASETS, "secret", replace(spec, licence=Licence("secret", None, no, no, no)))
    folders = bench.write(tmp_path, reader="secret")
    report = bench.run(folders, tmp_path / "out", metrics=["change_accuracy"])
    assert report.rows_out == 6
    assert "data:image/webp" not in (tmp_path / "out" / "report.html").read_text()
    assert list((tmp_path / "out" / "images").iterdir()) == []


def test_a_limit_of_the_scorers_reaches_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = bench.write(tmp_path)
    monkeypatch.setenv("PATH", bench.fake_java(tmp_path / "bin", "meteor", "sleep 1000"))
    cfg = bench.config(metrics=["METEOR", "SPICE"], gallery=0)
    compute = bench.compute(scorer_timeout_s=5, spice_dir=tmp_path)
    report = evaluate(cfg, compute, *folders, tmp_path / "out")
    absent = report.protocols[PROTOCOL].absent
    assert absent["METEOR"] == "no answer within 5 s (compute.scorer_timeout_s)"
    assert absent["SPICE"].startswith(f"{tmp_path}: has no stanford-corenlp-3.6.0.jar and no ")


def test_without_java_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = bench.write(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing, match="install a Java runtime"):
        bench.run(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    found = bench.run(folders, tmp_path / "out", metrics=["change_accuracy"]).protocols[PROTOCOL]
    assert found.scores["change_type_accuracy"]


def test_a_missing_image_is_named(tmp_path: Path):
    folders = bench.write(tmp_path)
    (tmp_path / "3_after.png").unlink()
    with pytest.raises(DataError, match="3_after.png"):
        bench.run(folders, tmp_path / "out", metrics=["change_accuracy"])


def test_an_image_that_changed_since_ingest_is_named(tmp_path: Path):
    folders = bench.write(tmp_path)
    bench.paint(tmp_path / "4_before.png", (1, 2, 3))
    with pytest.raises(DataError, match="4_before.png: .* changed since ingest"):
        bench.run(folders, tmp_path / "out", metrics=["change_accuracy"])
