"""Promotion: which alias moves when, what is kept of a decision, and a champion of another test set."""

import re
import time
from pathlib import Path

import mlflow
import pyarrow.parquet as pq
import pytest
from mlflow.entities.model_registry import ModelVersion, ModelVersionTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from m3diff.commands import rescore
from m3diff.models.checkpoint import CheckpointError
from m3diff.provenance.dvc import dvc_hash
from m3diff.records.errors import DataError
from m3diff.registry import promote
from m3diff.registry.lineage import PREDICT_CODE
from m3diff.registry.versions import SCORES
from tests.registry.conftest import PAIRS, PROTOCOL, scores


@pytest.mark.fault("23")
def test_who_is_better_takes_over_who_is_not_is_refused_and_the_old_champion_stays_one_step_away(registry):
    aliases = []
    for score, outcome in ((1.0, "first"), (0.5, "refused"), (2.0, "promoted")):
        registry.add(scores(score))
        assert registry.decide().outcome == outcome
        aliases.append(registry.aliases())
    assert aliases == [
        {"challenger": 1, "champion": 1},
        {"challenger": 2, "champion": 1},
        {"challenger": 3, "champion": 3, "previous": 1},
    ]
    assert registry.record() == ["first", "refused", "promoted"]
    assert str(registry.decide()) == "m3diff version 3 unchanged: it is the champion already"


@pytest.mark.parametrize(
    ("score", "min_gain"), [(0.9, 0.0), (1.0, 0.0), (1.005, 0.0), (1.05, 0.1), (float("nan"), 0.0)]
)
def test_a_challenger_that_does_not_surely_exceed_the_champion_by_the_gain_is_refused(registry, score, min_gain):
    registry.gate(min_gain=min_gain)
    registry.add(scores(1.0))
    registry.decide()
    registry.add(scores(score, seed=1))
    assert registry.decide().outcome == "refused"
    assert registry.aliases() == {"challenger": 2, "champion": 1}


def test_protocol_metric_and_guards_are_parameters(registry):
    registry.gate(protocol="minichange/semantic", metric="SPICE", guards={"CIDEr": 0.5})
    registry.add(scores(2.0, protocol="minichange/semantic", SPICE=0.2))
    registry.decide()
    registry.add(scores(1.6, protocol="minichange/semantic", SPICE=0.3))
    decision = registry.decide()
    assert (decision.outcome, decision.metric, decision.protocol) == ("promoted", "SPICE", "minichange/semantic")
    assert (decision.challenger_score, decision.champion_score) == (pytest.approx(0.3), pytest.approx(0.2))
    registry.add(scores(1.0, protocol="minichange/semantic", SPICE=0.4))
    assert "CIDEr 1.0000 is more than 0.5 worse than 1.6000" in registry.decide().reason


def test_deciding_twice_on_the_same_moves_nothing_and_adds_nothing_to_the_record(registry):
    outcomes = []
    for score in (1.0, 0.5, 0.5):
        registry.add(scores(score))
        outcomes += [registry.decide().outcome for _ in range(2)]
    assert outcomes == ["first", "unchanged", "refused", "refused", "refused", "refused"]
    assert [(entry.to, entry.outcome) for entry in registry.entries()] == [(1, "first"), (2, "refused"), (3, "refused")]


def test_a_promotion_that_was_cut_off_before_the_alias_moved_is_finished_by_the_next(registry, monkeypatch):
    registry.add(scores(1.0))
    registry.decide()
    registry.add(scores(2.0))
    with monkeypatch.context() as cut:
        cut.setattr(promote.versions, "put_alias", lambda *_: (_ for _ in ()).throw(ConnectionError("gone")))
        with pytest.raises(ConnectionError):
            registry.decide()
    assert registry.decide().outcome == "promoted"
    assert registry.aliases() == {"challenger": 2, "champion": 2, "previous": 1}
    assert registry.record() == ["first", "promoted"]


def test_the_record_holds_every_decision_with_scores_gain_interval_pairs_guards_reason_and_time(registry):
    registry.gate(guards={"SPICE": 0.1})
    registry.add(scores(1.0, SPICE=0.5))
    registry.decide()
    registry.add(scores(1.5, seed=1, SPICE=0.45))
    decision = registry.decide()
    first, second = registry.entries()
    assert promote.promotion_of(second) == decision
    assert (second.number, second.action, second.from_, second.to, second.previous) == (2, "promote", 1, 2, 1)
    assert (second.model, second.outcome, second.why) == ("m3diff", "promoted", decision.reason)
    numbers = dict(second.gate)
    found = {key: numbers.pop(key) for key in ("challenger_score", "champion_score", "gain", "low", "high")}
    assert found == {
        key: pytest.approx(value, abs=0.05) for key, value in zip(found, (1.5, 1.0, 0.5, 0.5, 0.5), strict=True)
    }
    assert found["low"] < found["gain"] < found["high"]
    assert numbers == {
        "protocol": PROTOCOL,
        "metric": "CIDEr",
        "min_gain": 0.0,
        "confidence": 0.95,
        "pairs": PAIRS,
        "guards": {"SPICE": {"challenger": pytest.approx(0.45), "champion": pytest.approx(0.5), "tolerance": 0.1}},
        "scored_again": False,
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", second.at)
    assert second.at[:10] == time.strftime("%Y-%m-%d", time.gmtime())
    assert (first.from_, first.previous, first.gate["champion_score"]) == (None, None, None)
    assert first.why == f"there was no champion; CIDEr 1.0000 over {PAIRS} pairs of {PROTOCOL}"


def test_the_old_champion_becomes_previous_before_the_new_one_is_champion(registry, monkeypatch):
    registry.add(scores(1.0))
    registry.decide()
    registry.add(scores(2.0))
    moved = []
    move = MlflowClient.set_registered_model_alias

    def record(client, name, alias, version):
        moved.append((name, alias, int(version)))
        move(client, name, alias, version)

    monkeypatch.setattr(MlflowClient, "set_registered_model_alias", record)
    decision = registry.decide()
    assert moved == [("m3diff", "previous", 1), ("m3diff", "champion", 2)]
    assert decision.champion_now == 2


@pytest.mark.fault("23")
def test_nothing_and_a_challenger_without_scores_or_without_those_of_the_gate_are_refused(registry):
    with pytest.raises(DataError, match="run `m3diff register` first"):
        registry.decide()
    registry.add()
    assert registry.decide().reason == "MLflow has no scores.parquet of it; run `m3diff register` again"
    registry.add(scores(1.0).rename_columns(["protocol", "id", "other"]))
    assert registry.decide().reason.startswith(f"it has no CIDEr on {PROTOCOL}: see `absent`")
    assert "champion" not in registry.aliases()


# A champion of another test set


class Rescoring:
    """What stands in for the stages: the champion's checkpoint is one of a name, its captions have a known score."""

    def __init__(self, registry, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry, self.calls, self.cider = registry, [], 1.0
        self.here, self.error, self.really = "new", None, mlflow.artifacts.download_artifacts
        monkeypatch.setattr(rescore, "hash_test_set", lambda paths: self.here)
        monkeypatch.setattr(mlflow.artifacts, "download_artifacts", self.download)
        monkeypatch.setattr("m3diff.stages.predict.stage.predict", self.predict)
        monkeypatch.setattr("m3diff.stages.evaluate.stage.evaluate", self.evaluate)

    def download(self, artifact_uri: str | None = None, *, dst_path: str, **of_run: str) -> str:
        if artifact_uri is None:
            return self.really(dst_path=dst_path, **of_run)
        if self.error:
            raise self.error
        found = Path(dst_path) / "artifacts" / "checkpoint"
        found.mkdir(parents=True)
        (found / "of.txt").write_text(artifact_uri)
        return str(found)

    def predict(self, cfg, compute, mixture, model, out) -> None:
        paths = self.registry.params.paths
        assert (compute, mixture) == (self.registry.params.compute, paths.mixture)
        assert out.is_relative_to(compute.scratch)
        out.mkdir()
        (out / "captions.txt").write_text("captions")
        self.calls.append(((model / "checkpoint" / "of.txt").read_text(), cfg.max_new_tokens, cfg.batch_pairs))

    def evaluate(self, cfg, compute, records, clean, predictions, model, out) -> None:
        params = self.registry.params
        assert (cfg, records, clean) == (params.evaluate, params.paths.records, params.paths.clean)
        assert (predictions / "captions.txt").read_text() == "captions"
        out.mkdir()
        pq.write_table(scores(self.cider), out / SCORES)
        (out / "metrics.json").write_text("{}")


@pytest.fixture
def rescoring(registry, monkeypatch) -> Rescoring:
    """Version 1 is champion, scored 9.0 on the test set "old"; version 2 is scored 1.5 on the test set "new"."""
    registry.add(scores(9.0), test_set="old", predict__max_new_tokens="17")
    registry.decide()
    registry.add(scores(1.5, seed=1), test_set="new")
    return Rescoring(registry, monkeypatch)


@pytest.mark.fault("23", "S2")
def test_a_champion_of_another_test_set_is_captioned_and_scored_again_and_its_scores_kept(registry, rescoring, capsys):
    decision = registry.decide()
    assert (decision.outcome, decision.scored_again) == ("promoted", True)
    assert decision.champion_score == pytest.approx(1.0)
    batch = registry.params.predict.batch_pairs
    assert rescoring.calls == [("models:/m3diff/1/artifacts/checkpoint", 17, batch)]
    said = capsys.readouterr().out
    assert "champion 1 has no scores on this test set (new); it is captioned and scored" in said
    assert f"{PREDICT_CODE} has changed since it was registered" in said
    run = registry.client.get_model_version("m3diff", "1").run_id
    kept = {artifact.path for artifact in registry.client.list_artifacts(run, "scored_again/new")}
    assert kept == {"scored_again/new/scores.parquet", "scored_again/new/metrics.json"}
    assert list(registry.params.compute.scratch.glob("promote/*")) == [], "the scratch folder is gone"

    registry.add(scores(1.1, seed=2), test_set="new")
    registry.client.set_registered_model_alias("m3diff", "champion", "1")
    again = registry.decide()
    assert (again.champion_score, again.scored_again) == (pytest.approx(1.0), False)
    assert len(rescoring.calls) == 1, "its scores on this test set are kept"


def test_a_champion_without_the_gates_scores_is_scored_again(registry, monkeypatch):
    registry.add(test_set="new", dvc__code=dvc_hash(PREDICT_CODE))
    registry.client.set_registered_model_alias("m3diff", "champion", "1")
    registry.add(scores(1.5, seed=1), test_set="new")
    rescoring = Rescoring(registry, monkeypatch)
    decision = registry.decide()
    assert (decision.outcome, decision.scored_again, len(rescoring.calls)) == ("promoted", True, 1)
    assert rescoring.calls[0][1] == registry.params.predict.max_new_tokens


@pytest.mark.parametrize(
    ("tag", "changed", "other"),
    [(dvc_hash(PREDICT_CODE), [], False), (dvc_hash(PREDICT_CODE), ["a.py"], True), ("0" * 32, [], True)],
)
def test_code_is_another_where_it_was_registered_so_or_edited_since(tag, changed, other, monkeypatch):
    monkeypatch.setattr(rescore, "edited", lambda stage: changed)
    version = ModelVersion("m3diff", "1", 0, tags=[ModelVersionTag("dvc.code", tag)])
    assert bool(rescore.other_code(version)) == other


def test_the_champions_old_score_counts_for_nothing(registry, rescoring):
    rescoring.cider = 2.0
    decision = registry.decide()
    assert (decision.outcome, decision.champion_score) == ("refused", pytest.approx(2.0))
    assert registry.aliases()["champion"] == 1
    registry.decide()
    assert registry.record() == ["first", "refused"], "the same decision from the scores that are kept"


@pytest.mark.parametrize(
    "error",
    [
        MlflowException("no such artifact"),
        CheckpointError("it is damaged"),
        FileNotFoundError("no file"),
        DataError("no"),
    ],
)
def test_where_it_cannot_be_scored_again_the_challenger_is_refused_with_reason_and_remedy(registry, rescoring, error):
    rescoring.error = error
    refused = registry.decide()
    assert refused.outcome == "refused"
    assert f"champion 1 has no scores on its test set (new) and cannot be scored there: {error}" in refused.reason
    assert "m3diff rollback --to 2 --why" in refused.reason
    assert registry.aliases() == {"challenger": 2, "champion": 1}


def test_it_is_not_scored_on_a_test_set_that_is_not_the_challengers(registry, rescoring):
    rescoring.here = "third"
    refused = registry.decide()
    assert refused.outcome == "refused"
    assert "hold third; restore it with `git checkout` and `dvc checkout`" in refused.reason
    assert rescoring.calls == []


@pytest.mark.parametrize("error", [ConnectionError("worker died"), BlockingIOError("another process")])
def test_what_may_pass_by_itself_is_no_refusal(registry, rescoring, error):
    rescoring.error = error
    with pytest.raises(type(error)):
        registry.decide()
    assert registry.record() == ["first"]
