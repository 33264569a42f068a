"""The gate, on versions that hold nothing but scores."""

import json

import pytest
from mlflow.tracking import MlflowClient

from components.params import load_params
from components.records import DataError
from components.register.promotion import promote
from components.register.stage import CHALLENGER
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

    def audit(self) -> list[str]:
        tags = self.client.get_registered_model("m3diff").tags
        return [json.loads(tags[tag])["outcome"] for tag in sorted(tags)]


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
        cut.setattr("components.register.promotion.point", lambda *_: (_ for _ in ()).throw(ConnectionError("gone")))
        with pytest.raises(ConnectionError):
            decide()
    assert decide().outcome == "promoted"
    assert registry.aliases() == {"challenger": 2, "champion": 2, "previous": 1}
    assert registry.audit() == ["first", "promoted"]


def test_with_nothing_registered_there_is_nothing_to_promote(trained):
    with pytest.raises(DataError, match="run `m3diff register` first"):
        decide()
