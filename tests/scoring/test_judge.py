"""The judge: its questions, the verdicts that are read from its answers, and the scores of groups."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from m3diff.endpoint.answers import EndpointAnswer, OtherServerError
from m3diff.endpoint.questions import EndpointQuestion
from m3diff.endpoint.transport import EndpointError
from m3diff.records.errors import cause_of
from m3diff.scoring.metrics import METRICS, JudgeVerdict, MetricInputs, Tokens
from m3diff.scoring.metrics.java import ScorerFailed
from m3diff.scoring.metrics.judge import NO_VERDICT, Judge, JudgeSettings, read_verdict, sample_pairs
from m3diff.scoring.pairs import ALL_PAIRS, EvalPair, Groups
from tests.errors import raises
from tests.scoring import bench

RIGHT = '{"right": true, "reason": "the same"}'
WRONG = 'Sure! {"right": false, "reason": "other object"} Bye.'


class FakeEndpoint:
    """An endpoint that gives these answers, or raises this error, and keeps the questions."""

    def __init__(self, answers: Sequence[str], error: Exception | None = None) -> None:
        self.answers = answers
        self.error = error
        self.questions: list[str] = []

    def ask(self, questions: Sequence[EndpointQuestion], task: str) -> list[EndpointAnswer]:
        if self.error is not None:
            raise self.error
        self.questions = [question.text for question in questions]
        return [EndpointAnswer("text", answer) for answer in self.answers]


def make_judge(folder: Path, endpoint: FakeEndpoint, **changes: int) -> Judge:
    judge = Judge(JudgeSettings(url="http://127.0.0.1:9/v1", model="m", key_variable="JUDGE_KEY", **changes), folder)
    judge.endpoint = endpoint  # type: ignore[assignment]
    return judge


def test_the_judge_reads_each_caption_with_its_references(tmp_path):
    pairs = bench.pairs()[:2]
    endpoint = FakeEndpoint([RIGHT, WRONG])
    assert make_judge(tmp_path, endpoint)(pairs) == {"toy/0": (True, RIGHT), "toy/1": (False, WRONG)}
    for pair, question in zip(pairs, endpoint.questions, strict=True):
        written_by_people, written_by_a_model = question.split("Written by a model:\n")
        assert written_by_people.endswith("".join(f"- {reference}\n" for reference in pair.references) + "\n")
        assert written_by_a_model.startswith(f"- {pair.prediction}\n")


def test_the_judge_is_asked_about_a_sample_of_the_pairs(tmp_path):
    verdicts = make_judge(tmp_path, FakeEndpoint([RIGHT] * 2), pairs=2)(bench.pairs())
    assert list(verdicts) == [pair.id for pair in sample_pairs(bench.pairs(), 2)]


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (EndpointAnswer("text", RIGHT), (True, RIGHT)),
        (EndpointAnswer("text", WRONG), (False, WRONG)),
        (EndpointAnswer("text", '{"right": "yes"}'), (None, '{"right": "yes"}')),
        (EndpointAnswer("text", "{}"), (None, "{}")),
        (EndpointAnswer("text", "[true]"), (None, "[true]")),
        (EndpointAnswer("text", ""), (None, "no answer")),
        (EndpointAnswer("cut", '{"right": tr'), (None, '{"right": tr')),
        (EndpointAnswer("refused", "I cannot"), (None, "refused: I cannot")),
        (EndpointAnswer("empty", RIGHT), (None, "no answer")),
    ],
    ids=["right", "wrong", "another type", "no field", "a list", "nothing", "cut", "refused", "empty"],
)
def test_only_a_truth_value_in_the_requested_json_is_a_verdict(answer, verdict):
    assert read_verdict(answer) == verdict


def test_an_endpoint_that_fails_costs_the_score_and_the_variable_of_the_key_is_named(tmp_path):
    error = EndpointError("endpoint.error_reply", cause="no room")
    judge = make_judge(tmp_path, FakeEndpoint([], error))
    with raises(ScorerFailed, "scoring.judge_not_asked", cause=cause_of(error), variable="JUDGE_KEY"):
        judge(bench.pairs())


def test_answers_of_another_server_are_an_error_and_not_an_absent_score(tmp_path):
    judge = make_judge(tmp_path, FakeEndpoint([], OtherServerError("endpoint.other_server")))
    with raises(OtherServerError, "endpoint.other_server"):
        judge(bench.pairs())


def test_a_sample_is_the_same_whatever_the_order_of_the_pairs_and_keeps_it():
    pairs = bench.pairs()
    sampled_ids = [pair.id for pair in sample_pairs(pairs, 3)]
    assert len(sampled_ids) == 3
    assert sampled_ids == sorted(sampled_ids)
    assert [pair.id for pair in sample_pairs(pairs[::-1], 3)] == sampled_ids[::-1]
    assert sample_pairs(pairs, 7) == pairs


VERDICTS = {"toy/0": True, "toy/1": None, "toy/2": False, "toy/3": True}


def scores_of(verdicts: dict[str, bool | None], groups: Groups):
    def judge(pairs: list[EvalPair]) -> dict[str, JudgeVerdict]:
        return {pair_id: JudgeVerdict(is_right, f"answer {pair_id}") for pair_id, is_right in verdicts.items()}

    inputs = MetricInputs(Tokens({}, {}, None), {}, {}, judge)
    return METRICS["judge"].compute(bench.pairs(), groups, inputs)


def test_the_score_of_a_group_is_the_share_called_right_of_its_readable_verdicts():
    groups = {ALL_PAIRS: [f"toy/{n}" for n in range(6)], "some": ["toy/1", "toy/2"], "not sampled": ["toy/4", "toy/5"]}
    scores = scores_of(VERDICTS, groups)
    assert scores.groups == {
        ALL_PAIRS: {"judge": 2 / 3, "judge_answered": 3 / 4},
        "some": {"judge": 0.0, "judge_answered": 1 / 2},
        "not sampled": {"judge": None, "judge_answered": None},
    }
    assert scores.pairs["toy/1"] == {"judge": None, "judge_answer": "answer toy/1"}
    assert scores.pairs["toy/3"] == {"judge": True, "judge_answer": "answer toy/3"}
    assert scores.pairs.keys() == VERDICTS.keys()
    assert scores.absent == {}


def test_a_score_without_a_readable_verdict_is_absent_with_its_reason():
    assert scores_of({"toy/0": None}, {ALL_PAIRS: ["toy/0"]}).absent == {"judge": NO_VERDICT}


def test_the_score_is_absent_if_no_judge_is_configured():
    inputs = MetricInputs(Tokens({}, {}, None), {}, {}, None)
    with raises(ScorerFailed, "scoring.no_judge"):
        METRICS["judge"].compute(bench.pairs(), {ALL_PAIRS: ["toy/0"]}, inputs)
