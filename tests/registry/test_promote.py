"""Promotion and the way back: which alias moves when, what is kept of a decision, a champion of another test set."""

import os
import re
import subprocess
import sys
import time

import pytest
import yaml
from mlflow.entities.model_registry import ModelVersion, ModelVersionTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from m3diff.commands import rescore
from m3diff.models.checkpoint import CheckpointError
from m3diff.provenance.dvc import dvc_hash
from m3diff.provenance.git import who
from m3diff.records.errors import DataError
from m3diff.registry import promote, versions
from m3diff.registry.decisions import champions, decisions
from m3diff.registry.lineage import PREDICT_CODE
from tests.registry.conftest import PAIRS, PROTOCOL, scores
from tests.toy import REPOSITORY


@pytest.mark.fault("23")
def test_who_is_better_takes_over_and_who_is_not_is_refused_once_and_the_old_champion_stays_one_step_away(registry):
    with pytest.raises(DataError, match="run `m3diff register` first"):
        registry.decide()
    aliases = []
    for score, outcome, again in (
        (1.0, "first", "unchanged"),
        (0.5, "refused", "refused"),
        (2.0, "promoted", "unchanged"),
    ):
        registry.add(score)
        assert [registry.decide().outcome for _ in range(2)] == [outcome, again]
        aliases.append(registry.aliases())
    assert aliases == [
        {"challenger": 1, "champion": 1},
        {"challenger": 2, "champion": 1},
        {"challenger": 3, "champion": 3, "previous": 1},
    ]
    assert [(entry.to, entry.outcome) for entry in registry.entries()] == [
        (1, "first"),
        (2, "refused"),
        (3, "promoted"),
    ]
    assert str(registry.decide()) == "m3diff version 3 unchanged: it is the champion already"
    for score, min_gain in ((2.0, 0.0), (2.005, 0.0), (2.05, 0.1), (float("nan"), 0.0)):
        registry.gate(min_gain=min_gain)
        registry.add(score, seed=1)
        assert registry.decide().outcome == "refused"
    assert registry.aliases()["champion"] == 3


def test_a_promotion_that_was_cut_off_before_the_alias_moved_is_finished_by_the_next(registry, monkeypatch):
    registry.grow(1.0)
    registry.add(2.0)
    with monkeypatch.context() as cut:
        cut.setattr(promote.versions, "put_alias", lambda *_: (_ for _ in ()).throw(ConnectionError("gone")))
        with pytest.raises(ConnectionError):
            registry.decide()
    moved, move = [], MlflowClient.set_registered_model_alias
    monkeypatch.setattr(
        MlflowClient, "set_registered_model_alias", lambda *given: (moved.append(given[2:]), move(*given))
    )
    decision = registry.decide()
    assert (decision.outcome, decision.gain) == ("promoted", pytest.approx(1.0))
    assert moved == [("previous", "1"), ("champion", "2")], "so that there is always a way back"
    assert registry.record() == ["first", "promoted"]


def test_the_record_holds_every_decision_by_the_gate_s_parameters_with_its_numbers_reason_and_time(registry):
    protocol = "minichange/semantic"
    registry.gate(protocol=protocol, metric="SPICE", guards={"CIDEr": 0.5})
    made = []
    for cider, spice in ((2.0, 0.2), (1.6, 0.3), (1.0, 0.4)):
        registry.add(scores(cider, protocol=protocol, SPICE=spice))
        made.append(registry.decide())
    assert "CIDEr 1.0000 is more than 0.5 worse than 1.6000" in made[2].reason
    first, second, _ = registry.entries()
    assert (second.number, second.action, second.from_, second.to, second.previous) == (2, "promote", 1, 2, 1)
    assert (second.model, second.outcome, second.why) == ("m3diff", "promoted", made[1].reason)
    assert second.gate == {
        **{"protocol": protocol, "metric": "SPICE", "min_gain": 0.0, "confidence": 0.95, "pairs": PAIRS},
        **{name: pytest.approx(0.1) for name in ("low", "gain", "high")},
        **{"challenger_score": pytest.approx(0.3), "champion_score": pytest.approx(0.2), "scored_again": False},
        "guards": {"CIDEr": {"challenger": pytest.approx(1.6), "champion": pytest.approx(2.0), "tolerance": 0.5}},
    }
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", second.at)
    assert second.at[:10] == time.strftime("%Y-%m-%d", time.gmtime())
    assert (first.from_, first.previous, first.gate["champion_score"]) == (None, None, None)
    assert first.why == f"there was no champion; SPICE 0.2000 over {PAIRS} pairs of {protocol}"


@pytest.mark.fault("23")
def test_a_challenger_without_scores_or_without_those_of_the_gate_is_refused(registry):
    registry.add()
    assert registry.decide().reason == "MLflow has no scores.parquet of it; run `m3diff register` again"
    registry.add(scores(1.0).rename_columns(["protocol", "id", "other"]))
    assert registry.decide().reason.startswith(f"it has no CIDEr on {PROTOCOL}: see `absent`")
    registry.client.create_model_version("m3diff", "file:///nowhere")
    assert registry.decide(version=3).outcome == "refused", "made by hand"
    assert "champion" not in registry.aliases()


# A champion of another test set


@pytest.mark.fault("23", "S2")
def test_a_champion_of_another_test_set_is_captioned_and_scored_again_and_its_scores_kept(registry, rescoring, capsys):
    decision = registry.decide()
    assert (decision.outcome, decision.scored_again, decision.champion_score) == ("promoted", True, pytest.approx(1.0))
    batch = registry.params.predict.batch_pairs
    assert rescoring.calls == [("models:/m3diff/1/artifacts/checkpoint", 17, batch)]
    said = capsys.readouterr().out
    assert "champion 1 has no scores on this test set (new); it is captioned and scored" in said
    assert f"{PREDICT_CODE} has changed since it was registered" in said
    kept = {found.path for found in registry.client.list_artifacts(registry.version(1).run_id, "scored_again/new")}
    assert kept == {"scored_again/new/scores.parquet", "scored_again/new/metrics.json"}
    scratch = registry.params.compute.scratch
    assert (rescoring.places[0].is_relative_to(scratch), list(scratch.glob("promote/*"))) == (True, []), "it is gone"
    registry.add(1.1, seed=2, test_set="new")
    registry.point("champion", 1)
    again = registry.decide()
    assert (again.champion_score, again.scored_again) == (pytest.approx(1.0), False)
    assert len(rescoring.calls) == 1, "its scores on this test set are kept"


def test_its_old_score_counts_for_nothing_nor_do_scores_without_those_of_the_gate(registry, rescoring):
    rescoring.cider = 2.0
    decision = registry.decide()
    assert (decision.outcome, decision.champion_score) == ("refused", pytest.approx(2.0))
    registry.decide()
    assert registry.record() == ["first", "refused"], "the same decision from the scores that are kept"
    registry.point("champion", registry.add(test_set="new", dvc__code=dvc_hash(REPOSITORY / PREDICT_CODE)))
    registry.add(2.5, seed=1, test_set="new")
    assert (registry.decide().scored_again, len(rescoring.calls)) == (True, 2)
    assert rescoring.calls[1][1] == registry.params.predict.max_new_tokens


@pytest.mark.parametrize(
    ("tag", "changed", "other"),
    [(dvc_hash(PREDICT_CODE), [], False), (dvc_hash(PREDICT_CODE), ["a.py"], True), ("0" * 32, [], True)],
)
def test_code_is_another_where_it_was_registered_so_or_edited_since(tag, changed, other, monkeypatch):
    monkeypatch.setattr(rescore, "edited", lambda stage: changed)
    version = ModelVersion("m3diff", "1", 0, tags=[ModelVersionTag("dvc.code", tag)])
    assert bool(rescore.other_code(version)) == other


def test_where_it_cannot_be_scored_again_the_challenger_is_refused_with_reason_and_remedy(registry, rescoring):
    for error in (
        MlflowException("no artifact"),
        CheckpointError("damaged"),
        FileNotFoundError("gone"),
        DataError("no"),
    ):
        rescoring.error = error
        refused = registry.decide()
        assert refused.outcome == "refused"
        assert f"champion 1 has no scores on its test set (new) and cannot be scored there: {error}" in refused.reason
        assert "m3diff rollback --to 2 --why" in refused.reason
    rescoring.here, rescoring.error = "third", None
    refused = registry.decide()
    assert refused.outcome == "refused"
    assert "hold third; restore it with `git checkout` and `dvc checkout`" in refused.reason
    assert (rescoring.calls, registry.aliases()) == ([], {"challenger": 2, "champion": 1})


@pytest.mark.parametrize("error", [ConnectionError("worker died"), BlockingIOError("another process")])
def test_what_may_pass_by_itself_is_no_refusal(registry, rescoring, error):
    rescoring.error = error
    with pytest.raises(type(error)):
        registry.decide()
    assert registry.record() == ["first"]


# The way back: which version is champion after it, what is not promoted again, and how far it goes


def test_the_previous_champion_is_champion_again_and_never_one_that_was_rolled_back(three):
    done = three.rollback(why="it says no to every pair")
    assert three.aliases() == {"challenger": 3, "champion": 2, "previous": 1}
    assert three.entries()[-1] == done
    assert (done.action, done.from_, done.to, done.previous, done.who) == ("rollback", 3, 2, 1, who())
    assert str(done) == "m3diff: champion 3 -> 2, rolled back: it says no to every pair"
    three.rollback()
    assert three.aliases() == {"challenger": 3, "champion": 1}
    with pytest.raises(DataError, match="no earlier champion is known.*m3diff rollback --to VERSION"):
        three.rollback()
    three.point("previous", 3)
    with pytest.raises(DataError, match=f"names version 3, which {who()} rolled back at"):
        three.rollback()
    three.client.delete_registered_model("m3diff")
    assert three.record() == ["first", "promoted", "promoted", "rolled back", "rolled back"], "it outlives the model"


@pytest.mark.fault("S2")
def test_a_rolled_back_version_is_not_promoted_again_unless_asked(three):
    done = three.rollback(why="it says no to every pair")
    refused = three.decide()
    assert (refused.outcome, refused.challenger, refused.champion) == ("refused", 3, 2)
    assert refused.reason == (
        f"{done.who} rolled it back at {done.at} (it says no to every pair); to let the gate judge it all the same: "
        "m3diff promote --again"
    )
    three.decide(version=3)
    assert three.record()[3:] == ["rolled back", "refused"], "the same refusal is one entry"
    again = three.decide(again=True)
    assert (again.outcome, again.champion) == ("promoted", 2)
    assert three.aliases() == {"challenger": 3, "champion": 3, "previous": 2}
    assert three.decide().outcome == "unchanged"


def test_again_asks_the_gate_and_other_versions_are_judged_as_ever_after_a_rollback(three):
    three.add(2.5)
    three.point("champion", 4)
    three.decide()
    three.rollback(to=3)
    assert three.decide(version=4).reason.startswith(f"{who()} rolled it back")
    assert "its lower bound does not exceed 0" in three.decide(version=4, again=True).reason
    three.rollback()
    assert three.grow(2.6) == ["promoted"]
    assert three.aliases() == {"challenger": 5, "champion": 5, "previous": 2}
    three.rollback()
    assert three.aliases() == {"challenger": 5, "champion": 2, "previous": 1}


def test_a_named_version_is_taken_and_what_is_skipped_over_counts_as_taken_back(three):
    for to, words in ((9, "model 'm3diff' has no version '9'; there are .3, 2, 1"), (3, "is the champion already")):
        with pytest.raises(DataError, match=words):
            three.rollback(to=to)
    assert len(three.record()) == 3
    three.rollback(to=1)
    assert three.aliases() == {"challenger": 3, "champion": 1}
    assert sorted(champions(decisions(), "m3diff").taken_back) == [2, 3]
    assert three.decide(version=2).reason.startswith(f"{who()} rolled it back")


def test_previous_skips_a_version_that_was_deleted(three):
    three.grow(4.0)
    three.client.delete_model_version("m3diff", "2")
    three.rollback()
    assert three.aliases() == {"challenger": 4, "champion": 3, "previous": 1}
    versions.put_alias(three.client, "m3diff", "previous", 2)  # as a move does that was recorded before the deletion
    assert three.aliases() == {"challenger": 4, "champion": 3}


def test_a_champion_from_before_the_record_is_rolled_back_too_and_none_is_where_there_is_none(registry):
    for score in (1.0, 2.0):
        registry.add(score)
    with pytest.raises(DataError, match="there is nothing to roll back"):
        registry.rollback()
    registry.point("champion", 2)
    registry.point("previous", 1)
    registry.rollback()
    assert registry.aliases() == {"challenger": 2, "champion": 1}
    assert registry.decide().reason.startswith(f"{who()} rolled it back")


@pytest.mark.fault("S2")
def test_a_rollback_by_hand_is_noticed_and_holds_and_decisions_go_to_the_remote_of_git_config(three, tmp_path):
    subprocess.run(["git", "init", "-q", "--bare", "remote.git"], check=True)
    subprocess.run(["git", "config", "m3diff.runs", str(tmp_path / "remote.git")], check=True)
    three.point("champion", 2)
    refused = three.decide()
    assert (refused.outcome, refused.reason.startswith("it was found rolled back at")) == ("refused", True)
    assert three.aliases()["champion"] == 2
    noticed = three.entries()[3]
    assert (noticed.action, noticed.from_, noticed.to, noticed.outcome) == ("noticed", 3, 2, "moved elsewhere")
    assert "the alias 'champion' names version 2, and no decision of this record moved it there" in noticed.why
    assert three.record()[3:] == ["moved elsewhere", "refused"]
    assert decisions(tmp_path / "remote.git") == three.entries()


@pytest.mark.slow(15)
def test_the_command_takes_seconds_and_loads_no_torch(three):
    values = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    values["register"]["tracking_uri"] = three.params.register_.tracking_uri
    (three.root / "params.yaml").write_text(yaml.safe_dump(values))
    program = (
        "import sys; from m3diff.__main__ import main; code = main(['rollback', '--why', 'too slow']); "
        "import m3diff.registry.promote; assert 'torch' not in sys.modules; sys.exit(code)"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    after = os.times()
    assert (done.returncode, done.stdout) == (0, "m3diff: champion 3 -> 2, rolled back: too slow\n"), done.stderr
    assert after.children_user + after.children_system - before.children_user - before.children_system < 10
    assert three.aliases()["champion"] == 2
