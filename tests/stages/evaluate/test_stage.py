"""Metrics side by side, and the stage evaluate on six pairs: its files, what it refuses and what is absent."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.endpoint.answers import OtherServerError
from m3diff.records.errors import DataError, Fault
from m3diff.scoring import bootstrap, run
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.metrics import HEADLINE_SCORES, METRICS, Metric, MetricScores, choose_metrics
from m3diff.scoring.metrics.java import JavaMissing, ScorerFailed
from m3diff.scoring.metrics.judge import Judge, JudgeSettings, sample_pairs
from m3diff.scoring.pairs import ALL_PAIRS
from m3diff.scoring.protocols import ProtocolPairs
from m3diff.scoring.results import EvaluateReport, headline_scores, score_table
from m3diff.scoring.run import compute_metrics
from m3diff.stages.evaluate.stage import evaluate
from tests import errors
from tests.chat import Server, chat_server
from tests.errors import raises
from tests.scoring import bench

PROTOCOL = "toy/test"


def written(out: Path) -> dict[str, Any]:
    return json.loads((out / "metrics.json").read_text())["protocols"][PROTOCOL]


def test_without_optional_inputs_and_with_a_hanging_meteor_scores_are_null_with_a_reason(tmp_path, monkeypatch):
    folders = bench.write(tmp_path)
    bench.small_table(tmp_path / "table", monkeypatch)
    bench.fake_java(tmp_path / "bin", monkeypatch, "meteor", "exec sleep 1000")
    monkeypatch.setattr(run, "tokenise", lambda texts, limit_s: dict(zip(texts, texts, strict=True)))
    optional = ("predictions/predictions_shuffled.json", "predictions/saliency.npz", "records/toy/grammar.json")
    for path in map(tmp_path.joinpath, optional):
        path.unlink()
    compute = bench.compute(scorer_timeout_s=1, spice_dir=tmp_path)
    evaluate(bench.config(), compute, *folders, tmp_path / "out")
    metrics = written(tmp_path / "out")
    absent = metrics["absent"]
    for name in ("change_type_accuracy", "no_change_recall", "CIDEr_shuffled", "METEOR"):
        assert metrics[name] is None
    assert metrics["CIDEr"] is not None
    assert absent.keys() == {"change_type_accuracy", "CIDEr_shuffled", "METEOR", "SPICE"}
    assert errors.Message("scoring.program_timeout", limit=1) == absent["METEOR"]
    assert errors.Message("scoring.spice_jars_missing", path=tmp_path) == absent["SPICE"]
    assert "stanford-corenlp-3.6.0.jar" in absent["SPICE"]
    assert "<dt>METEOR</dt><dd>Absent." in (tmp_path / "out" / "report.html").read_text()


def test_only_the_metrics_asked_for_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And the whole stage in Python but for the tokenizer: which file holds what, and what is on the page."""
    folders = bench.write(tmp_path)
    monkeypatch.setattr(bootstrap, "MIN_PAIRS", 6)
    report = bench.run(folders, tmp_path / "out", metrics=["change_accuracy", "ROUGE-L", "CIDEr"])
    whole = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert whole == report.model_dump(mode="json")
    assert (tmp_path / "out" / "headline.json").read_text() == json.dumps(headline_scores(report), indent=1) + "\n"
    assert whole["rows_in"] == 6
    assert whole["rows_out"] == 6
    assert list(whole["protocols"]) == [PROTOCOL]
    metrics = whole["protocols"][PROTOCOL]
    assert {"METEOR", "BLEU-4", "SPICE"}.isdisjoint(metrics.keys() | metrics["change"].keys())
    assert metrics["pairs"] == 6
    assert metrics["published_pairs"] is None
    assert list(metrics["absent"]) == ["reversal"]
    assert metrics["change_type_accuracy"] == pytest.approx(2 / 3)
    assert 0 < metrics["CIDEr_shuffled"] < metrics["CIDEr"]
    assert metrics["intervals"]["false_no_change"] == {"low": 0.0, "high": pytest.approx(0.75, abs=0.1)}
    table = pq.read_table(tmp_path / "out" / "scores.parquet")
    rows = table.to_pylist()
    assert {row["id"]: row["prediction"] for row in rows} == bench.PREDICTIONS
    assert [row["change_types"] for row in rows] == [types for _, types, _ in bench.RECORDS]
    assert [row["predicted_type"] for row in rows] == ["color", "removal", "none", "several", "none", "color"]
    assert [row["exact_right"] for row in rows] == [True, False, False, False, True, False]
    known = ["protocol", "id", "dataset", "change_types", "prediction", "CIDEr", "ROUGE-L"]
    assert table.column_names == [*known, *METRICS["change_accuracy"].columns]
    types = {"CIDEr": "double", "id": "string", "type_right": "bool", "change_statistics": "list<element: double>"}
    assert {name: str(table.schema.field(name).type) for name in types} == types
    empty = score_table(choose_metrics(["CIDEr", "change_accuracy"]), [], {}).schema
    assert str(empty.field("predicted_type").type) == "string"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "METEOR</dt>" not in page
    assert page.count('"data:image/webp;base64,') == 3 * 6


def test_protocols_are_scored_on_their_own_pairs_and_an_incomplete_one_is_refused(tmp_path, monkeypatch):
    def numbered(n: int) -> None:
        protocols = (Protocol("total", n=n), Protocol("even", n=3, ids="[024]"))
        monkeypatch.setitem(DATASETS.data, "pairs", replace(DATASETS["pairs"], protocols=protocols))

    folders = bench.write(tmp_path)
    numbered(7)
    incomplete = Fault("evaluate.incomplete_protocol", protocol="toy/total", value=6, expected=7)
    with raises(DataError, "evaluate.incomplete_protocols", faults=[incomplete]):
        bench.run(folders, tmp_path / "out", metrics=["change_accuracy"])
    assert not (tmp_path / "out").exists()
    found = bench.run(folders, tmp_path / "out", metrics=["change_accuracy"], allow_fewer_pairs=True).protocols
    assert {name: of.is_partial for name, of in found.items()} == {"toy/total": True, "toy/even": False}
    numbered(6)
    found = bench.run(folders, tmp_path / "out", metrics=["change_accuracy", "CIDEr"]).protocols
    assert {name: of.pairs for name, of in found.items()} == {"toy/total": 6, "toy/even": 3}
    assert found["toy/even"].scores["change_type_accuracy"] == 1 / 2  # pair 0 right, pair 2 missed; 4 is a distractor
    assert found["toy/even"].scores["no_change_recall"] == 1.0
    assert found["toy/total"].scores["no_change_recall"] == 1 / 2
    table = pq.read_table(tmp_path / "out" / "scores.parquet").to_pylist()
    assert [row["id"] for row in table if row["protocol"] == "toy/even"] == ["toy/0", "toy/2", "toy/4"]
    of_total = {row["id"]: row["CIDEr"] for row in table if row["protocol"] == "toy/total"}
    assert of_total["toy/0"] != next(row["CIDEr"] for row in table if row["protocol"] == "toy/even")  # own word weights


def test_without_java_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = bench.write(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing):
        bench.run(folders, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def score(metrics: dict[str, Metric]) -> MetricScores:
    pairs = [replace(bench.pair("x", ["x"], []), id="a")]
    return compute_metrics(metrics, [ProtocolPairs("toy", Protocol("test", n=None), pairs)], {}, None, 20)["toy/test"]


def metric(compute, headline: str = "words", **fields) -> Metric:
    return Metric(compute, headline, **({"scores": (headline,), "java": False} | fields))


def constant(pairs, groups, tools) -> MetricScores:
    return MetricScores({name: {"words": 2.0} for name in groups}, {"a": {"column": 1.0}})


def test_scores_of_metrics_stand_side_by_side_and_one_that_fails_costs_only_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no Java

    def fail(*_):
        raise ScorerFailed("out of words")

    metrics = {"a": metric(fail, "a_headline", scores=("a_1", "a_headline"))}
    metrics["words"] = metric(constant, overall=("control",))
    found = score(metrics)
    of_group = {"a_1": None, "a_headline": None, "words": 2.0}
    groups = dict.fromkeys(("change", "multi_change", "distractors"), of_group)
    assert found.groups == {ALL_PAIRS: of_group | {"control": None}} | groups
    assert found.absent == {"a_headline": "out of words"}
    assert found.pairs == {"a": {"column": 1.0}}


# metrics.json


def report(protocol: str = "total", n: int | None = 8) -> EvaluateReport:
    """Every caption score 0.5, the accuracies as they are, one interval."""
    spec = replace(DATASETS["pairs"], protocols=(Protocol(protocol, n=n),))
    return bench.evidence(
        Path(), bench.pairs(), {"toy": spec}, intervals={"CIDEr": Interval(low=0.4, high=0.75)}
    ).report


def test_the_file_has_the_names_that_dvc_mlflow_and_the_gate_read(tmp_path: Path):
    report().write(tmp_path / "metrics.json")
    text = (tmp_path / "metrics.json").read_text()
    assert '"changes": 2,' in text, "counts stay whole numbers"
    written = json.loads(text)
    assert list(written) == ["stage", "rows_in", "rows_out", "protocols"]
    assert written["stage"] == "evaluate"
    assert written["rows_in"] == 6
    assert written["rows_out"] == 6
    assert list(written["protocols"]) == ["toy/total"]
    total = written["protocols"]["toy/total"]
    captions = ["CIDEr", "METEOR", "ROUGE-L", "BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "SPICE"]
    overall = METRICS["change_accuracy"].overall
    groups = ["intervals", "change", "multi_change", "distractors", "by_type", "by_changes", "by_length", "absent"]
    assert list(total) == ["pairs", "published_pairs", *captions, "CIDEr_shuffled", *overall, *groups]
    false_changes = ["false_changes", "false_changes_per_pair"]
    of_type = ["type_accuracy", "place_accuracy", "exact_accuracy", *false_changes]
    assert list(total["change"]) == ["pairs", *captions, *false_changes]
    named = {"by_type": ["color", "illumination", "removal"], "by_changes": ["1", "2"], "by_length": ["1-9", "10-19"]}
    assert {name: list(total[name]) for name in named} == named
    for name, (first, *_) in named.items():
        assert list(total[name][first]) == ["pairs", *captions, *of_type]
    assert total["pairs"] == 6
    assert total["published_pairs"] == 8
    assert total["intervals"] == {"CIDEr": {"low": 0.4, "high": 0.75}}
    assert [total[name]["pairs"] for name in ("change", "multi_change", "distractors")] == [4, 1, 2]
    removal = total["by_type"]["removal"]
    assert removal["pairs"] == 1
    assert removal["exact_accuracy"] == 0.0
    assert removal["CIDEr"] == 0.5
    assert total["multi_change"]["type_recall"] == 0.5
    assert total["change_type_accuracy"] == 2 / 3
    assert total["SPICE"] is total["change"]["SPICE"] is None
    assert total["absent"]["SPICE"] == "its jars are not there"
    assert total["absent"].keys() == {"SPICE", "reversal"}


def test_the_headline_scores_are_those_of_each_first_protocol_times_100():
    first = report().protocols["toy/total"]
    second = report("other").protocols
    protocols = {"toy/total": first, **second, "more/all": first}
    found = headline_scores(EvaluateReport(stage="evaluate", rows_in=9, rows_out=6, protocols=protocols))
    assert list(found) == ["toy/total", "more/all"]
    assert found["toy/total"]["CIDEr"] == 50.0
    assert found["toy/total"]["change_type_accuracy"] == round(100 * first.scores["change_type_accuracy"], 2)
    assert not {"SPICE", "reversal"} & found["toy/total"].keys(), "scores that are absent"
    assert set(found["toy/total"]) <= set(HEADLINE_SCORES)
    partial = {8: True, 6: False, None: False}
    assert {n: report(n=n).protocols["toy/total"].is_partial for n in partial} == partial


# The judge against a server on 127.0.0.1

RIGHT = '{"right": true, "reason": "the same"}'
WRONG = 'Sure! {"right": false, "reason": "other object"} Bye.'


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with chat_server(RIGHT) as known:
        yield known


def settings(server: Server, **changes: Any) -> JudgeSettings:
    return JudgeSettings(**({"url": server.url, "model": "m", "key_variable": "JUDGE_KEY"} | changes))


def judge(server: Server, tmp_path: Path, **changes: Any) -> Judge:
    return Judge(settings(server, **changes), tmp_path / "scratch")


def test_a_run_has_the_share_of_captions_called_right_with_every_answer(server: Server, tmp_path: Path):
    server.replies = {"by a model:\n- nothing changed": [WRONG], "- the green ball at the left was removed": ["{}"]}
    folders = bench.write(tmp_path)
    cfg = settings(server).model_dump()
    out = tmp_path / "out"
    compute = bench.compute(scratch=tmp_path / "scratch")
    report = evaluate(bench.config(metrics=["judge", "change_accuracy"], judge=cfg), compute, *folders, out)
    found = report.protocols["toy/test"]
    assert found.scores["judge"] == 3 / 5  # 0, 3 and 5 right; 2 and 4 ("nothing changed") wrong; none of 1
    assert found.scores["judge_answered"] == 5 / 6
    assert found.groups["distractors"]["judge"] == 1 / 2
    rows = {row["id"]: row for row in pq.read_table(out / "scores.parquet").to_pylist()}
    assert [rows[f"toy/{n}"]["judge"] for n in range(6)] == [True, None, False, True, False, True]
    assert rows["toy/0"]["judge_answer"] == RIGHT
    assert rows["toy/1"]["judge_answer"] == "{}"
    assert server.keys == {"Bearer secret"}
    asked = set(server.texts)
    assert all("toy" not in text and ".png" not in text for text in asked)  # the words alone, no names, no image
    (first,) = [text for text in asked if "by a model:\n- the red cube at the left became blue\n" in text]
    assert "- the red cube at the left turned blue\n- the red cube at the left became blue\n" in first
    stored = [json.loads(line) for line in (tmp_path / "scratch" / "judge.jsonl").read_text().splitlines()]
    assert {entry["question"] for entry in stored} == asked
    assert "secret" not in (tmp_path / "scratch" / "judge.jsonl").read_text()


def test_a_server_that_puts_off_is_asked_again_and_other_text_is_no_verdict(server, tmp_path):
    cut = '{"right": tr'
    refusal = {"role": "assistant", "content": None, "refusal": "I cannot"}
    server.replies = {"a?": [429, 503, WRONG], "b?": [RIGHT], "c?": [cut], "d?": [refusal], "e?": [None]}
    server.replies |= {"f?": ['{"right": "yes"}'], "g?": ["[true]"]}
    found = judge(server, tmp_path).ask([f"{name}?" for name in "abcdefg"])
    without = [cut, "refused: I cannot", "no answer", '{"right": "yes"}', "[true]"]
    assert found == [(False, WRONG), (True, RIGHT), *((None, answer) for answer in without)]


def test_a_wrong_key_or_model_costs_the_judge_alone_and_names_the_parameter(server: Server, tmp_path: Path):
    server.replies = {"a?": [401]}
    with pytest.raises(ScorerFailed, match="(?s)(?=.*evaluate\\.judge).*JUDGE_KEY"):
        judge(server, tmp_path).ask(["a?"])


def test_verdicts_of_another_judge_end_the_stage_and_the_section_may_use_them(server, tmp_path, capsys):
    """The score is not merely absent: the stage would be done, and DVC would not run it again."""
    folders = bench.write(tmp_path)
    compute = bench.compute(scratch=tmp_path / "scratch")

    def run(other: Server, name: str, **changes: Any) -> float | None:
        cfg = bench.config(metrics=["judge", "change_accuracy"], judge=settings(other, **changes).model_dump())
        return evaluate(cfg, compute, *folders, tmp_path / name).protocols["toy/test"].scores["judge"]

    with chat_server(WRONG) as first:
        assert run(first, "first") == 0
    capsys.readouterr()
    with pytest.raises(OtherServerError):
        run(server, "refused")
    assert server.asked == []
    assert not (tmp_path / "refused/metrics.json").exists()
    assert run(server, "reused", reuse_answers=True) == 0
    assert "evaluate: judge: 6 of 6 answers are from the cache" in capsys.readouterr().out
    for name in ("metrics.json", "scores.parquet"):  # DVC's outputs hold no time and no count of the cache
        assert (tmp_path / "reused" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    assert run(server, "anew", reuse_answers=False) == 1


def test_without_a_judge_the_score_is_absent_and_nothing_is_asked_if_not_chosen(server, tmp_path):
    folders = bench.write(tmp_path)
    cfg = settings(server).model_dump()
    without = bench.run(folders, tmp_path / "out", metrics=["judge", "change_accuracy"]).protocols["toy/test"]
    assert without.scores["judge"] is None
    assert "evaluate.judge" in without.absent["judge"]
    assert without.scores["change_type_accuracy"] == pytest.approx(2 / 3)
    bench.run(folders, tmp_path / "out", metrics=["change_accuracy"], judge=cfg)
    assert server.asked == []


def test_a_sample_is_the_same_whatever_stands_beside_it_and_keeps_its_order():
    pairs = bench.pairs()
    some = sample_pairs(pairs, 3)
    assert len(some) == 3
    assert sample_pairs(pairs[::-1], 3) == some[::-1]
    assert [pair for pair in pairs if pair in some] == some
    assert {pair.id for pair in sample_pairs(pairs, 2)} < {pair.id for pair in some}
    assert sample_pairs(pairs, 10) == pairs
