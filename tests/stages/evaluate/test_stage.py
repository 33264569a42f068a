"""Several metrics together, and the stage evaluate on six pairs: its files, refusals and absent scores."""

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


def read_metrics(out: Path) -> dict[str, Any]:
    return json.loads((out / "metrics.json").read_text())["protocols"][PROTOCOL]


def test_without_optional_inputs_or_with_a_hanging_meteor_scores_are_null(tmp_path, monkeypatch):
    folders = bench.write(tmp_path)
    bench.small_table(tmp_path / "table", monkeypatch)
    bench.fake_java(tmp_path / "bin", monkeypatch, "meteor", "exec sleep 1000")
    monkeypatch.setattr(run, "tokenise", lambda texts, limit_s: dict(zip(texts, texts, strict=True)))
    optional = ("predictions/predictions_shuffled.json", "predictions/saliency.npz", "records/toy/grammar.json")
    for path in map(tmp_path.joinpath, optional):
        path.unlink()
    compute = bench.compute(scorer_timeout_s=1, spice_dir=tmp_path)
    evaluate(bench.config(), compute, *folders, tmp_path / "out")
    metrics = read_metrics(tmp_path / "out")
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
    """This also checks the contents of all files and of the page."""
    folders = bench.write(tmp_path)
    monkeypatch.setattr(bootstrap, "MIN_PAIRS", 6)
    report = bench.run(folders, tmp_path / "out", metrics=["change_accuracy", "ROUGE-L", "CIDEr"])
    contents = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert contents == report.model_dump(mode="json")
    assert (tmp_path / "out" / "headline.json").read_text() == json.dumps(headline_scores(report), indent=1) + "\n"
    assert contents["rows_in"] == 6
    assert contents["rows_out"] == 6
    assert list(contents["protocols"]) == [PROTOCOL]
    metrics = contents["protocols"][PROTOCOL]
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
    first_columns = ["protocol", "id", "dataset", "question", "kind", "change_types", "prediction", "CIDEr", "ROUGE-L"]
    assert table.column_names == [*first_columns, *METRICS["change_accuracy"].columns]
    types = {"CIDEr": "double", "id": "string", "type_right": "bool", "change_statistics": "list<element: double>"}
    assert {name: str(table.schema.field(name).type) for name in types} == types
    empty = score_table(choose_metrics(["CIDEr", "change_accuracy"]), [], {}).schema
    assert str(empty.field("predicted_type").type) == "string"
    page = (tmp_path / "out" / "report.html").read_text()
    assert "METEOR</dt>" not in page
    assert page.count('"data:image/webp;base64,') == 3 * 6


def test_protocols_are_scored_on_their_own_pairs_and_an_incomplete_one_is_refused(tmp_path, monkeypatch):
    def set_pair_count(n: int) -> None:
        protocols = (Protocol("total", published_pairs=n), Protocol("even", published_pairs=3, ids="[024]"))
        monkeypatch.setitem(DATASETS.data, "pairs", replace(DATASETS["pairs"], protocols=protocols))

    folders = bench.write(tmp_path)
    set_pair_count(7)
    incomplete = Fault("evaluate.incomplete_protocol", protocol="toy/total", value=6, expected=7)
    with raises(DataError, "evaluate.incomplete_protocols", faults=[incomplete]):
        bench.run(folders, tmp_path / "out", metrics=["change_accuracy"])
    assert not (tmp_path / "out").exists()
    reports = bench.run(folders, tmp_path / "out", metrics=["change_accuracy"], allow_fewer_pairs=True).protocols
    assert {name: report.is_partial for name, report in reports.items()} == {"toy/total": True, "toy/even": False}
    set_pair_count(6)
    reports = bench.run(folders, tmp_path / "out", metrics=["change_accuracy", "CIDEr"]).protocols
    assert {name: report.pairs for name, report in reports.items()} == {"toy/total": 6, "toy/even": 3}
    assert reports["toy/even"].scores["change_type_accuracy"] == 1 / 2  # pair 0 right, pair 2 missed; 4 is a distractor
    assert reports["toy/even"].scores["no_change_recall"] == 1.0
    assert reports["toy/total"].scores["no_change_recall"] == 1 / 2
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


def test_metrics_that_need_no_java_are_computed_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders = bench.write(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    report = bench.run(folders, tmp_path / "out", metrics=["change_accuracy"])
    assert report.protocols[PROTOCOL].scores["change_type_accuracy"] == pytest.approx(2 / 3)


def test_a_page_with_room_for_no_image_has_all_images_in_a_folder(tmp_path: Path):
    folders = bench.write(tmp_path)
    bench.run(folders, tmp_path / "out", metrics=["change_accuracy"], gallery=0)
    assert "data:image/webp" not in (tmp_path / "out" / "report.html").read_text()
    assert len(list((tmp_path / "out" / "images").iterdir())) == 3 * 6


@pytest.mark.parametrize("section", [{"metrics": ()}, {"metrics": ("CIDER",)}, {"gallery": -1}], ids=str)
def test_a_section_without_a_metric_or_with_a_limit_below_zero_is_refused(section):
    (field,) = section
    with pytest.raises(ValueError, match=field):
        bench.config(**section)


def score(metrics: dict[str, Metric]) -> MetricScores:
    pairs = [replace(bench.pair("x", ["x"], []), id="a")]
    return compute_metrics(
        metrics, [ProtocolPairs("toy", Protocol("test", published_pairs=None), pairs)], {}, None, 20
    )["toy/test"]


def metric(compute, headline: str = "words", **fields) -> Metric:
    return Metric(compute, headline, **({"scores": (headline,), "java": False} | fields))


def constant(pairs, groups, inputs) -> MetricScores:
    return MetricScores({name: {"words": 2.0} for name in groups}, {"a": {"column": 1.0}})


def test_scores_of_metrics_stand_side_by_side_and_one_that_fails_costs_only_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no Java

    def fail(*_):
        raise ScorerFailed("out of words")

    metrics = {"a": metric(fail, "a_headline", scores=("a_1", "a_headline"))}
    metrics["words"] = metric(constant, overall=("control",))
    scores = score(metrics)
    group_scores = {"a_1": None, "a_headline": None, "words": 2.0}
    groups = dict.fromkeys(("change", "multi_change", "distractors"), group_scores)
    assert scores.groups == {ALL_PAIRS: group_scores | {"control": None}} | groups
    assert scores.absent == {"a_headline": "out of words"}
    assert scores.pairs == {"a": {"column": 1.0}}


# metrics.json


def report(protocol: str = "total", n: int | None = 8) -> EvaluateReport:
    """Return a report in which every caption score is 0.5, with one interval and the real accuracies."""
    spec = replace(DATASETS["pairs"], protocols=(Protocol(protocol, published_pairs=n),))
    return bench.page_content(
        Path(), bench.pairs(), {"toy": spec}, intervals={"CIDEr": Interval(low=0.4, high=0.75)}
    ).report


def test_the_file_has_the_names_that_dvc_mlflow_and_the_gate_read(tmp_path: Path):
    report().write(tmp_path / "metrics.json")
    text = (tmp_path / "metrics.json").read_text()
    assert '"changes": 2,' in text, "counts stay whole numbers"
    contents = json.loads(text)
    assert list(contents) == ["stage", "rows_in", "rows_out", "protocols", "retention"]
    assert contents["stage"] == "evaluate"
    assert contents["rows_in"] == 6
    assert contents["rows_out"] == 6
    assert list(contents["protocols"]) == ["toy/total"]
    total = contents["protocols"]["toy/total"]
    captions = ["CIDEr", "METEOR", "ROUGE-L", "BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "SPICE"]
    overall = METRICS["change_accuracy"].overall
    groups = ["intervals", "change", "multi_change", "distractors", "by_type", "by_changes", "by_length", "absent"]
    assert list(total) == ["pairs", "published_pairs", *captions, "CIDEr_shuffled", *overall, *groups]
    false_changes = ["false_changes", "false_changes_per_pair"]
    type_scores = ["type_accuracy", "place_accuracy", "exact_accuracy", *false_changes]
    assert list(total["change"]) == ["pairs", *captions, *false_changes]
    group_names = {
        "by_type": ["color", "illumination", "removal"],
        "by_changes": ["1", "2"],
        "by_length": ["1-9", "10-19"],
    }
    assert {name: list(total[name]) for name in group_names} == group_names
    for name, (first_group, *_) in group_names.items():
        assert list(total[name][first_group]) == ["pairs", *captions, *type_scores]
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
    total = report().protocols["toy/total"]
    other_protocols = report("other").protocols
    protocols = {"toy/total": total, **other_protocols, "more/all": total}
    headlines = headline_scores(EvaluateReport(stage="evaluate", rows_in=9, rows_out=6, protocols=protocols))
    assert list(headlines) == ["toy/total", "more/all"]
    assert headlines["toy/total"]["CIDEr"] == 50.0
    assert headlines["toy/total"]["change_type_accuracy"] == round(100 * total.scores["change_type_accuracy"], 2)
    assert not {"SPICE", "reversal"} & headlines["toy/total"].keys(), "absent scores are left out"
    assert set(headlines["toy/total"]) <= set(HEADLINE_SCORES)
    partial = {8: True, 6: False, None: False}
    assert {n: report(n=n).protocols["toy/total"].is_partial for n in partial} == partial


# The judge against a server on 127.0.0.1

RIGHT = '{"right": true, "reason": "the same"}'
WRONG = 'Sure! {"right": false, "reason": "other object"} Bye.'


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with chat_server(RIGHT) as server:
        yield server


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
    protocol_report = report.protocols["toy/test"]
    assert protocol_report.scores["judge"] == 3 / 5  # 0, 3 and 5 right; 2 and 4 ("nothing changed") wrong; none of 1
    assert protocol_report.scores["judge_answered"] == 5 / 6
    assert protocol_report.groups["distractors"]["judge"] == 1 / 2
    rows = {row["id"]: row for row in pq.read_table(out / "scores.parquet").to_pylist()}
    assert [rows[f"toy/{n}"]["judge"] for n in range(6)] == [True, None, False, True, False, True]
    assert rows["toy/0"]["judge_answer"] == RIGHT
    assert rows["toy/1"]["judge_answer"] == "{}"
    assert server.keys == {"Bearer secret"}
    questions = set(server.texts)
    assert all(
        "toy" not in text and ".png" not in text for text in questions
    )  # only the captions, and no names or images
    (first_question,) = [text for text in questions if "by a model:\n- the red cube at the left became blue\n" in text]
    assert "- the red cube at the left turned blue\n- the red cube at the left became blue\n" in first_question
    stored = [json.loads(line) for line in (tmp_path / "scratch" / "judge.jsonl").read_text().splitlines()]
    assert {entry["question"] for entry in stored} == questions
    assert "secret" not in (tmp_path / "scratch" / "judge.jsonl").read_text()


def test_a_server_that_puts_off_is_asked_again_and_other_text_is_no_verdict(server, tmp_path):
    cut = '{"right": tr'
    refusal = {"role": "assistant", "content": None, "refusal": "I cannot"}
    server.replies = {"a?": [429, 503, WRONG], "b?": [RIGHT], "c?": [cut], "d?": [refusal], "e?": [None]}
    server.replies |= {"f?": ['{"right": "yes"}'], "g?": ["[true]"]}
    verdicts = judge(server, tmp_path).ask([f"{name}?" for name in "abcdefg"])
    answers_without_verdict = [cut, "refused: I cannot", "no answer", '{"right": "yes"}', "[true]"]
    assert verdicts == [(False, WRONG), (True, RIGHT), *((None, answer) for answer in answers_without_verdict)]


def test_a_wrong_key_or_model_costs_the_judge_alone_and_names_the_parameter(server: Server, tmp_path: Path):
    server.replies = {"a?": [401]}
    with pytest.raises(ScorerFailed, match="(?s)(?=.*evaluate\\.judge).*JUDGE_KEY"):
        judge(server, tmp_path).ask(["a?"])


def test_verdicts_of_another_judge_end_the_stage_and_the_section_may_use_them(server, tmp_path, capsys):
    """This is an error and not an absent score, because DVC would not run a finished stage again."""
    folders = bench.write(tmp_path)
    compute = bench.compute(scratch=tmp_path / "scratch")

    def run(judge_server: Server, name: str, **changes: Any) -> float | None:
        cfg = bench.config(metrics=["judge", "change_accuracy"], judge=settings(judge_server, **changes).model_dump())
        return evaluate(cfg, compute, *folders, tmp_path / name).protocols["toy/test"].scores["judge"]

    with chat_server(WRONG) as first_server:
        assert run(first_server, "first") == 0
    capsys.readouterr()
    with pytest.raises(OtherServerError):
        run(server, "refused")
    assert server.requests == []
    assert not (tmp_path / "refused/metrics.json").exists()
    assert run(server, "reused", reuse_answers=True) == 0
    assert "evaluate: judge: 6 of 6 answers are from the cache" in capsys.readouterr().out
    for name in ("metrics.json", "scores.parquet"):  # outputs of DVC have no times and no counts of the cache
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
    assert server.requests == []


def test_a_sample_is_the_same_whatever_stands_beside_it_and_keeps_its_order():
    pairs = bench.pairs()
    sampled_pairs = sample_pairs(pairs, 3)
    assert len(sampled_pairs) == 3
    assert sample_pairs(pairs[::-1], 3) == sampled_pairs[::-1]
    assert [pair for pair in pairs if pair in sampled_pairs] == sampled_pairs
    assert {pair.id for pair in sample_pairs(pairs, 2)} < {pair.id for pair in sampled_pairs}
    assert sample_pairs(pairs, 10) == pairs
