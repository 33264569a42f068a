"""Promotion: the moves of the aliases and the recorded decisions."""

import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from m3diff.records.errors import DataError
from m3diff.registry.decisions import Decision, Entry, Identity
from m3diff.registry.gate import GuardedScore, refuse
from m3diff.registry.moves import read_identity
from m3diff.registry.promote import GateDecision, is_repetition, refuse_rolled_back
from tests.errors import raises
from tests.registry.conftest import PAIRS, PROTOCOL, make_scores


@pytest.mark.fault("23")
def test_a_better_version_becomes_champion_and_a_worse_one_is_refused_once(registry):
    with raises(DataError, "registry.no_challenger", model="m3diff"):
        registry.decide()
    for score, outcome, again, aliases in (
        (1.0, "first", "unchanged", {"challenger": 1, "champion": 1}),
        (0.5, "refused", "refused", {"challenger": 2, "champion": 1}),
        (2.0, "promoted", "unchanged", {"challenger": 3, "champion": 3, "previous": 1}),
    ):
        registry.add(score)
        assert [registry.decide().outcome for _ in range(2)] == [outcome, again]
        assert registry.aliases() == aliases
    decided = [(entry.target, entry.outcome) for entry in registry.entries()]
    assert decided == [(1, "first"), (2, "refused"), (3, "promoted")]
    assert str(registry.decide()).startswith("m3diff version 3 unchanged: ")
    for score, min_gain in ((2.0, 0.0), (2.005, 0.0), (2.05, 0.1), (float("nan"), 0.0)):
        registry.gate(min_gain=min_gain)
        registry.add(score, seed=1)
        assert registry.decide().outcome == "refused"
    assert registry.aliases()["champion"] == 3


def test_without_a_registered_model_there_is_no_challenger(registry):
    registry.client.delete_registered_model("m3diff")
    with raises(DataError, "registry.no_challenger", model="m3diff"):
        registry.decide()


def test_the_record_has_each_decision_with_parameters_numbers_reason_and_time(registry):
    protocol = "minichange/semantic"
    registry.gate(protocol=protocol, metric="SPICE", guards={"CIDEr": 0.5})
    entries = []
    for cider, spice in ((2.0, 0.2), (1.6, 0.3), (1.0, 0.4)):
        registry.add(make_scores(cider, protocol=protocol, SPICE=spice))
        entries.append(registry.decide())
    assert "CIDEr 1.0000" in entries[2].reason
    first_entry, second, _ = registry.entries()
    assert second.number == 2
    assert second.action == "promote"
    assert second.champion_before == 1
    assert second.target == 2
    assert second.previous == 1
    assert second.model == "m3diff"
    assert second.outcome == "promoted"
    assert second.reason == entries[1].reason
    assert second.gate == {
        **{"protocol": protocol, "metric": "SPICE", "min_gain": 0.0, "confidence": 0.95, "pairs": PAIRS},
        **{name: pytest.approx(0.1) for name in ("low", "gain", "high")},
        **{"challenger_score": pytest.approx(0.3), "champion_score": pytest.approx(0.2), "scored_again": False},
        "guards": {"CIDEr": {"challenger": pytest.approx(1.6), "champion": pytest.approx(2.0), "tolerance": 0.5}},
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", second.decided_at)
    assert second.decided_at[:10] == time.strftime("%Y-%m-%d", time.gmtime())
    assert first_entry.champion_before is None
    assert first_entry.previous is None
    assert first_entry.gate["champion_score"] is None
    assert f"SPICE 0.2000 over {PAIRS} pairs of {protocol}" in first_entry.reason


@pytest.mark.fault("23")
def test_a_challenger_without_scores_or_without_those_of_the_gate_is_refused(registry):
    registry.add()
    assert "scores.parquet" in registry.decide().reason
    registry.add(make_scores(1.0).rename_columns(["protocol", "id", "other"]))
    assert f"CIDEr on {PROTOCOL}" in registry.decide().reason
    registry.client.create_model_version("m3diff", "file:///nowhere")
    assert registry.decide(version=3).outcome == "refused", "made by hand"
    assert "champion" not in registry.aliases()


def test_a_decision_of_the_gate_is_read_back_from_its_entry():
    gate = {"protocol": PROTOCOL, "metric": "CIDEr", "min_gain": 0.01, "confidence": 0.95, "reason": "higher"}
    decision = GateDecision(outcome="promoted", model="m3diff", challenger=7, champion=1, **gate)
    recorded = {"number": 3, "decided_at": "2026-01-02T03:04:05Z", "author": "a@b", "flow_run": None, "commit": None}
    entry = Decision(**dict(decision.to_entry(previous=1)), **recorded)
    assert GateDecision.from_decision(entry) == decision


TAGS = {"dvc.checkpoint": "a", "dvc.code": "b", "predict.max_new_tokens": "64"}


def identity_of(run: str = "run", **changed_tags: str) -> Identity:
    tags = TAGS | {name.replace("__", "."): value for name, value in changed_tags.items()}
    version: Any = SimpleNamespace(run_id=run, tags=tags)
    return read_identity(version)


def test_a_version_is_identified_by_its_run_and_by_checkpoint_code_and_length_limit():
    identity = identity_of()
    assert identity.run == "run"
    assert identity_of("another run", git__commit="c").content == identity.content
    for tag in ("dvc__checkpoint", "dvc__code", "predict__max_new_tokens"):
        assert identity_of(**{tag: "changed"}).content != identity.content, tag


def test_versions_that_were_made_by_hand_have_no_content_in_common():
    assert identity_of("", dvc__checkpoint="") == Identity(run=None, content=None)


REFUSAL = {
    "action": "promote",
    "model": "m",
    "champion_before": 1,
    "target": 2,
    "outcome": "refused",
    "reason": "worse",
}
RECORDED = {"number": 3, "decided_at": "2026-01-02T03:04:05Z", "author": "a@b", "flow_run": None, "commit": None}


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (Entry(**REFUSAL), "outcome"),
        (Decision(**REFUSAL, **RECORDED), "reason"),
        (Identity(run="a", content="b"), "run"),
        (refuse("worse"), "outcome"),
        (GuardedScore(challenger=1.0, champion=2.0, tolerance=0.5), "tolerance"),
    ],
    ids=["an entry", "a decision", "an identity", "a verdict", "a guarded score"],
)
def test_a_decision_and_its_parts_refuse_every_change(part, field):
    with pytest.raises(ValidationError, match="frozen"):
        setattr(part, field, getattr(part, field))


@pytest.mark.parametrize("change", [{}, {"champion_before": 4}, {"target": 4}, {"reason": "too few pairs"}], ids=str)
def test_a_refusal_repeats_the_last_one_if_champion_challenger_and_reason_are_equal(change):
    last_decision = Decision(**Entry(**REFUSAL).model_dump(), **RECORDED)
    assert is_repetition(Entry(**REFUSAL | change), last_decision) == (not change)


def test_a_refusal_after_a_rollback_says_who_rolled_back_and_why():
    rollback = Decision(**REFUSAL | {"action": "rollback", "outcome": "rolled back"}, **RECORDED)
    reason = refuse_rolled_back(rollback).reason
    assert reason.startswith("a@b ")
    assert "(worse)" in reason
    by_hand = refuse_rolled_back(rollback.model_copy(update={"action": "noticed", "reason": ""})).reason
    assert "a@b" not in by_hand
    assert "()" not in by_hand
