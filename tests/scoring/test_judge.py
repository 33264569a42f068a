"""The judge against a server on 127.0.0.1 that speaks the protocol: verdicts, refusals, 429, cut JSON, no server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from m3diff.scoring.metrics.java import ScorerFailed
from m3diff.scoring.metrics.judge import Judge, JudgeSettings, sample
from m3diff.stages.evaluate.stage import evaluate
from tests.chat import Server, chat_server
from tests.scoring import bench

RIGHT, WRONG = '{"right": true, "reason": "the same"}', 'Sure! {"right": false, "reason": "other object"} Bye.'


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
    assert (rows["toy/0"]["judge_answer"], rows["toy/1"]["judge_answer"]) == (RIGHT, "{}")
    assert server.keys == {"Bearer secret"}
    asked = set(server.texts)
    assert all("toy" not in text and ".png" not in text for text in asked)  # the words alone, no names, no image
    (first,) = [text for text in asked if "by a model:\n- the red cube at the left became blue\n" in text]
    assert "- the red cube at the left turned blue\n- the red cube at the left became blue\n" in first
    stored = [json.loads(line) for line in (tmp_path / "scratch" / "judge.jsonl").read_text().splitlines()]
    assert {entry["question"] for entry in stored} == asked
    assert "secret" not in (tmp_path / "scratch" / "judge.jsonl").read_text()


def test_a_question_is_asked_once_also_by_a_later_run(server: Server, tmp_path: Path):
    first = judge(server, tmp_path).ask(["a?", "b?", "a?"])
    assert len(first) == 3
    assert sorted(server.texts) == ["a?", "b?"]
    assert judge(server, tmp_path).ask(["b?", "c?"]) == [first[1], first[0]]
    judge(server, tmp_path, model="other").ask(["a?"])  # another judge has its own opinion
    assert server.texts[2:] == ["c?", "a?"]


def test_a_server_that_puts_off_and_cut_json_are_asked_again_and_anything_but_the_json_is_no_verdict(server, tmp_path):
    cut, refusal = '{"right": tr', {"role": "assistant", "content": None, "refusal": "I cannot"}
    server.replies = {"a?": [429, 503, WRONG], "b?": [cut, RIGHT], "c?": [cut], "d?": [refusal], "e?": [None]}
    server.replies |= {"f?": ['{"right": "yes"}'], "g?": ["[true]"]}
    found = judge(server, tmp_path).ask([f"{name}?" for name in "abcdefg"])
    without = [cut, "refused: I cannot", "no answer", '{"right": "yes"}', "[true]"]
    assert found == [(False, WRONG), (True, RIGHT), *((None, answer) for answer in without)]


def test_a_wrong_key_or_model_costs_the_judge_alone_and_names_the_parameter(server: Server, tmp_path: Path):
    server.replies = {"a?": [401]}
    with pytest.raises(ScorerFailed, match=r"model 'm': .*see evaluate\.judge and .*JUDGE_KEY"):
        judge(server, tmp_path).ask(["a?"])


def test_without_a_judge_the_score_is_absent_and_nothing_is_asked_where_the_metric_is_not_chosen(
    server: Server, tmp_path: Path
):
    folders, cfg = bench.write(tmp_path), settings(server).model_dump()
    without = bench.run(folders, tmp_path / "out", metrics=["judge", "change_accuracy"]).protocols["toy/test"]
    assert (without.scores["judge"], "evaluate.judge" in without.absent["judge"]) == (None, True)
    assert without.scores["change_type_accuracy"] == pytest.approx(2 / 3)
    bench.run(folders, tmp_path / "out", metrics=["change_accuracy"], judge=cfg)
    assert server.asked == []


def test_a_sample_is_the_same_whatever_stands_beside_it_and_keeps_its_order():
    pairs = bench.pairs()
    some = sample(pairs, 3)
    assert len(some) == 3
    assert sample(pairs[::-1], 3) == some[::-1]
    assert [pair for pair in pairs if pair in some] == some
    assert {pair.id for pair in sample(pairs, 2)} < {pair.id for pair in some}
    assert sample(pairs, 10) == pairs
