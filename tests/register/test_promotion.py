"""The gate, on versions that hold nothing but scores."""

import json
import re
import time

import pytest
from mlflow.tracking import MlflowClient

from components.params import load_params
from components.records import DataError
from components.register import promotion
from components.register.promotion import promote
from components.register.stage import CHALLENGER
from components.section import ParamsError
from tests.register.conftest import change, store


class Registry:
    """The project's registered model, to which a test adds versions."""

    def __init__(self, client: MlflowClient) -> None:
        self.client = client
        client.create_registered_model("m3diff")

    def add(self, test_set: str = "one", **metrics: float) -> None:
        """A version with these scores becomes the challenger."""
        run = self.client.create_run("0")
        for name, value in metrics.items():
            self.client.log_metric(run.info.run_id, name, value)
        tags = {"test_set.sha256": test_set}
        version = self.client.create_model_version("m3diff", "file:///nowhere", run.info.run_id, tags=tags)
        self.client.set_registered_model_alias("m3diff", CHALLENGER, version.version)

    def aliases(self) -> dict[str, int]:
        return {alias: int(version) for alias, version in self.client.get_registered_model("m3diff").aliases.items()}

    def entries(self) -> list[dict[str, object]]:
        tags = self.client.get_registered_model("m3diff").tags
        assert sorted(tags) == [f"audit.{number:04d}" for number in range(1, len(tags) + 1)]
        return [json.loads(tags[tag]) for tag in sorted(tags)]

    def audit(self) -> list[str]:
        return [str(entry["outcome"]) for entry in self.entries()]


@pytest.fixture
def registry(trained):
    return Registry(store(trained))


def decide():
    return promote(load_params())


def test_the_first_challenger_is_champion_and_the_trail_says_first(registry):
    registry.add(CIDEr=0.1)
    assert decide().outcome == "first"
    assert registry.aliases() == {"challenger": 1, "champion": 1}
    assert registry.audit() == ["first"]


def test_a_better_challenger_takes_over_and_the_old_champion_stays_one_step_away(registry):
    registry.add(CIDEr=1.0)
    decide()
    registry.add(CIDEr=1.5)
    assert decide().outcome == "promoted"
    assert registry.aliases() == {"challenger": 2, "champion": 2, "previous": 1}
    assert registry.audit() == ["first", "promoted"]


@pytest.mark.parametrize(("score", "min_gain"), [(0.9, 0.0), (1.0, 0.0), (1.05, 0.1)])
def test_a_challenger_that_does_not_exceed_the_champion_by_the_gain_is_refused(trained, registry, score, min_gain):
    change(trained, "register", min_gain=min_gain)
    registry.add(CIDEr=1.0)
    decide()
    registry.add(CIDEr=score)
    refused = decide()
    assert refused.outcome == "refused"
    assert f"CIDEr {score:.4f} does not exceed champion 1's 1.0000" in refused.reason
    assert registry.aliases() == {"challenger": 2, "champion": 1}


def test_a_challenger_without_the_score_of_the_gate_is_refused(registry):
    registry.add(METEOR=0.3)
    refused = decide()
    assert (refused.outcome, refused.reason) == ("refused", "it has no CIDEr")
    assert "champion" not in registry.aliases()


def test_scores_of_two_test_sets_are_not_compared(registry):
    registry.add(test_set="aaaa", CIDEr=1.0)
    decide()
    registry.add(test_set="bbbb", CIDEr=2.0)
    refused = decide()
    assert refused.outcome == "refused"
    assert "another test set (aaaa, here bbbb)" in refused.reason
    assert registry.aliases() == {"challenger": 2, "champion": 1}


def test_deciding_twice_on_the_same_moves_nothing_and_adds_nothing_to_the_trail(registry):
    registry.add(CIDEr=1.0)
    decide()
    assert decide().outcome == "unchanged"
    registry.add(CIDEr=0.5)
    assert [decide().outcome, decide().outcome] == ["refused", "refused"]
    assert registry.audit() == ["first", "refused"]


def test_a_promotion_that_was_cut_off_before_the_alias_moved_is_finished_by_the_next(registry, monkeypatch):
    registry.add(CIDEr=1.0)
    decide()
    registry.add(CIDEr=2.0)
    with monkeypatch.context() as cut:
        cut.setattr(promotion, "set_alias", lambda *_: (_ for _ in ()).throw(ConnectionError("gone")))
        with pytest.raises(ConnectionError):
            decide()
    assert decide().outcome == "promoted"
    assert registry.aliases() == {"challenger": 2, "champion": 2, "previous": 1}
    assert registry.audit() == ["first", "promoted"]


def test_the_trail_holds_every_decision_with_versions_scores_reason_and_time(registry):
    registry.add(CIDEr=1.0, METEOR=9.0)
    decide()
    registry.add(CIDEr=1.5)
    decide()
    first, second = registry.entries()
    at = second.pop("at")
    assert second == {
        "outcome": "promoted",
        "model": "m3diff",
        "challenger": 2,
        "champion": 1,
        "metric": "CIDEr",
        "challenger_score": 1.5,
        "champion_score": 1.0,
        "reason": "CIDEr 1.5000, champion 1 had 1.0000",
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", str(at))
    assert at[:10] == time.strftime("%Y-%m-%d", time.gmtime())
    assert (first["champion"], first["champion_score"]) == (None, None)
    assert first["reason"] == "there was no champion; CIDEr 1.0000"


def test_a_decision_that_differs_from_the_last_one_is_appended(registry):
    registry.add(CIDEr=1.0)
    decide()
    registry.add(CIDEr=0.5)
    decide()
    registry.add(CIDEr=0.5)
    decide()
    assert [entry["challenger"] for entry in registry.entries()] == [1, 2, 3]


def test_the_old_champion_becomes_previous_before_the_new_one_is_champion(registry, monkeypatch):
    registry.add(CIDEr=1.0)
    decide()
    registry.add(CIDEr=2.0)
    moved = []
    move = MlflowClient.set_registered_model_alias

    def record(client, name, alias, version):
        moved.append((name, alias, int(version)))
        move(client, name, alias, version)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", record)
    decision = decide()
    assert moved == [("m3diff", "previous", 1), ("m3diff", "champion", 2)]
    assert decision.champion_now == 2


def test_a_refused_challenger_leaves_the_champion_and_a_third_version_moves_previous_on(registry):
    for score, champion in ((1.0, 1), (0.5, 1), (2.0, 3)):
        registry.add(CIDEr=score)
        assert decide().champion_now == champion
    assert registry.aliases() == {"challenger": 3, "champion": 3, "previous": 1}
    assert str(decide()) == "m3diff version 3 unchanged: it is the champion already"


def test_a_gain_below_zero_which_would_promote_a_worse_model_is_refused(trained):
    change(trained, "register", min_gain=-0.01)
    with pytest.raises(ParamsError, match=r"register\.min_gain"):
        load_params()


def test_the_gates_metric_is_a_parameter(trained, registry):
    change(trained, "register", gate_metric="METEOR")
    registry.add(CIDEr=2.0, METEOR=0.2)
    decide()
    registry.add(CIDEr=1.0, METEOR=0.3)
    decision = decide()
    assert (decision.outcome, decision.metric) == ("promoted", "METEOR")
    assert (decision.challenger_score, decision.champion_score) == (0.3, 0.2)


def test_a_challenger_beats_a_champion_that_was_never_scored(trained, registry):
    registry.add(METEOR=0.2)
    registry.client.set_registered_model_alias("m3diff", "champion", "1")
    registry.add(CIDEr=1.0)
    decision = decide()
    assert (decision.outcome, decision.reason) == ("promoted", "CIDEr 1.0000, champion 1 had none")


def test_with_nothing_registered_there_is_nothing_to_promote(trained):
    with pytest.raises(DataError, match="run `m3diff register` first"):
        decide()
