"""Promotion and the way back: which alias moves when, what is kept of a decision, a champion of another test set."""

import re
import shutil
import subprocess
import time
from pathlib import Path

import mlflow
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mlflow.exceptions import MlflowException

from m3diff.__main__ import main
from m3diff.commands import rescore as module
from m3diff.commands.rescore import score_model
from m3diff.images.open import load_image
from m3diff.models.checkpoint import CheckpointError, is_adapters
from m3diff.models.generation import load_captioner
from m3diff.provenance.dvc import dvc_hash
from m3diff.provenance.git import who
from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.decisions import decisions
from m3diff.registry.lineage import PREDICT_CODE, hash_test_set
from m3diff.registry.model_source import Source
from m3diff.settings.load import load_params
from m3diff.stages.register import stage
from tests.faults import small
from tests.registry.conftest import PAIRS, PROTOCOL, Registry, scores
from tests.toy import REPOSITORY


@pytest.mark.fault("23")
def test_who_is_better_takes_over_and_who_is_not_is_refused_once_and_the_old_champion_stays_one_step_away(registry):
    with pytest.raises(DataError, match="run `m3diff register` first"):
        registry.decide()
    for score, outcome, again, aliases in (
        (1.0, "first", "unchanged", {"challenger": 1, "champion": 1}),
        (0.5, "refused", "refused", {"challenger": 2, "champion": 1}),
        (2.0, "promoted", "unchanged", {"challenger": 3, "champion": 3, "previous": 1}),
    ):
        registry.add(score)
        assert [registry.decide().outcome for _ in range(2)] == [outcome, again]
        assert registry.aliases() == aliases
    decided = [(entry.to, entry.outcome) for entry in registry.entries()]
    assert decided == [(1, "first"), (2, "refused"), (3, "promoted")]
    assert str(registry.decide()) == "m3diff version 3 unchanged: it is the champion already"
    for score, min_gain in ((2.0, 0.0), (2.005, 0.0), (2.05, 0.1), (float("nan"), 0.0)):
        registry.gate(min_gain=min_gain)
        registry.add(score, seed=1)
        assert registry.decide().outcome == "refused"
    assert registry.aliases()["champion"] == 3


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


@pytest.mark.fault("23", "S2")
def test_a_champion_of_another_test_set_is_captioned_and_scored_again_and_its_scores_kept(registry, rescoring, capsys):
    decision = registry.decide()
    assert (decision.outcome, decision.scored_again, decision.champion_score) == ("promoted", True, pytest.approx(1.0))
    batch = registry.params.predict.batch_pairs
    assert rescoring.calls == [("models:/m3diff/1/artifacts/checkpoint", 17, batch)]
    said = capsys.readouterr().out
    assert "champion 1 has no scores on this test set (new); it is captioned and scored by the code of today" in said
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


def test_where_it_cannot_be_scored_again_the_challenger_is_refused_with_reason_and_remedy(registry, rescoring):
    for passing in (ConnectionError, BlockingIOError):
        rescoring.error = passing("may pass by itself")
        with pytest.raises(passing):
            registry.decide()
    assert registry.record() == ["first"]
    for kind in (MlflowException, CheckpointError, FileNotFoundError, DataError):
        rescoring.error = error = kind("gone")
        refused = registry.decide()
        assert refused.outcome == "refused"
        assert f"champion 1 has no scores on its test set (new) and cannot be scored there: {error}" in refused.reason
        assert "m3diff rollback --to 2 --why" in refused.reason
    rescoring.here, rescoring.error = "third", None
    refused = registry.decide()
    assert refused.outcome == "refused"
    assert "hold third; restore it with `git checkout` and `dvc checkout`" in refused.reason
    assert (rescoring.calls, registry.aliases()) == ([], {"challenger": 2, "champion": 1})


def play(registry: Registry, story: str) -> None:
    """Act a story, a step a line: `add CIDEr`, `promote [VERSION] [again]`, `rollback [VERSION]`, `set ALIAS VERSION`,
    `drop ALIAS`, `delete VERSION`. After `->` stand the outcome or the new champion and words of its reason; `aliases`
    and `record` (from the fourth entry on) compare these."""
    for line in story.strip().splitlines():
        act, _, told = (part.strip() for part in line.partition("->"))
        name, *words = act.split()
        number = next((int(word) for word in words if word.isdecimal()), None)
        outcome, _, reason = told.partition(": ")
        if name == "add":
            registry.add(float(words[0]))
        elif name == "set":
            registry.point(words[0], int(words[1]))
        elif name == "drop":
            registry.client.delete_registered_model_alias("m3diff", words[0])
        elif name == "delete":
            registry.client.delete_model_version("m3diff", words[0])
        elif name == "promote":
            done = registry.decide(number, "again" in words)
            assert (done.outcome, reason in done.reason) == (outcome, True), (line, done)
        elif name == "aliases":
            held = {alias: version for alias, version in registry.aliases().items() if alias != "challenger"}
            assert ", ".join(f"{alias} {version}" for alias, version in sorted(held.items())) == told
        elif name == "record":
            assert ", ".join(registry.record()[3:]) == told
        elif outcome == "refused":
            with pytest.raises(DataError) as refused:
                registry.rollback(number)
            assert reason in str(refused.value), (line, refused.value)
        else:
            assert registry.rollback(number, "it says no").to == int(outcome), line


STORIES = {
    "there and back": """
        rollback    -> 2
        aliases     -> champion 2, previous 1
        promote     -> refused: rolled it back at
        promote 3   -> refused: (it says no); to let the gate judge it all the same: m3diff promote --again
        record      -> rolled back, refused
        promote again -> promoted
        aliases     -> champion 3, previous 2
        promote     -> unchanged
        rollback    -> 2
        rollback    -> 1
        aliases     -> champion 1
        rollback    -> refused: no earlier champion is known. Name a version (`m3diff history` lists them)
        record      -> rolled back, refused, promoted, rolled back, rolled back
    """,
    "again asks the gate, and other versions are judged as ever": """
        add 2.5
        set champion 4
        promote 4   -> unchanged
        rollback 3  -> 3
        promote 4   -> refused: rolled it back
        promote 4 again -> refused: its lower bound does not exceed 0
        rollback    -> 2
        add 2.6
        promote     -> promoted
        aliases     -> champion 5, previous 2
        rollback    -> 2
        aliases     -> champion 2, previous 1
    """,
    "a named version is taken, and what is skipped over counts as taken back": """
        rollback 9  -> refused: model 'm3diff' has no version '9'; there are [3, 2, 1]
        rollback 3  -> refused: is the champion already
        record      ->
        rollback 1  -> 1
        aliases     -> champion 1
        promote 2   -> refused: rolled it back
        promote 3   -> refused: rolled it back
    """,
    "previous skips a version that was deleted": """
        add 4.0
        promote     -> promoted
        delete 2
        rollback    -> 3
        aliases     -> champion 3, previous 1
    """,
    "a rollback by hand is noticed and holds": """
        set champion 2
        promote     -> refused: it was found rolled back at
        aliases     -> champion 2, previous 2
        record      -> moved elsewhere, refused
    """,
    "without its alias no worse model becomes champion": """
        drop champion
        add 0.1
        promote     -> refused: m3diff rollback --to 3 --why 'the alias was gone'
        promote     -> refused: m3diff rollback --to 4 --why 'accepted without a comparison'
        aliases     -> previous 2
        record      -> moved elsewhere, refused
        rollback    -> refused: m3diff rollback --to 3
        rollback 3  -> 3
        promote     -> refused
        add 4.0
        promote     -> promoted
        rollback    -> 3
    """,
    "one that is accepted can be rolled back, and without any champion the way on is said": """
        drop champion
        add 0.1
        rollback 4  -> 4
        aliases     -> champion 4, previous 3
        rollback    -> 3
        delete 1
        delete 2
        delete 3
        add 2.0
        promote     -> refused: m3diff rollback --to 5 --why 'accepted without a comparison'
        rollback 5  -> 5
        promote     -> unchanged
    """,
}


@pytest.mark.fault("S2", "T10")
@pytest.mark.parametrize("story", STORIES)
def test_the_way_back(three, story):
    play(three, STORIES[story])


def test_a_rollback_is_recorded_shared_and_outlives_the_model(three, tmp_path):
    subprocess.run(["git", "init", "-q", "--bare", "remote.git"], check=True)
    subprocess.run(["git", "config", "m3diff.runs", str(tmp_path / "remote.git")], check=True)
    done = three.rollback(why="it says no to every pair")
    assert (done.action, done.from_, done.to, done.previous, done.who) == ("rollback", 3, 2, 1, who())
    assert str(done) == "m3diff: champion 3 -> 2, rolled back: it says no to every pair"
    three.point("champion", 1)
    three.decide()
    noticed = three.entries()[4]
    assert (noticed.action, noticed.from_, noticed.to, noticed.outcome) == ("noticed", 2, 1, "moved elsewhere")
    assert "the alias 'champion' names version 1, and no decision of this record moved it there" in noticed.why
    three.client.delete_registered_model("m3diff")
    assert three.entries()[3] == done
    assert decisions(tmp_path / "remote.git") == three.entries()


def test_a_champion_from_before_the_record_is_rolled_back_too_and_none_is_where_there_is_none(registry):
    for score in (1.0, 2.0):
        registry.add(score)
    play(registry, "rollback -> refused: there is nothing to roll back\nset champion 2\nset previous 1\nrollback -> 1")
    play(registry, "aliases -> champion 1\npromote -> refused: rolled it back")


def test_a_version_captions_the_test_set_with_its_own_limit_and_its_scores_are_kept(registry, rescoring):
    params, run = registry.params, registry.version(1).run_id
    place, scores = score_model(params, "champion", Path("base"))
    assert place == params.compute.scratch / "evaluated" / "m3diff-1"
    assert scores == {"toy/total": {"CIDEr": 150.0}}
    assert rescoring.calls == [("models:/m3diff/1/artifacts/checkpoint", 17, params.predict.batch_pairs)]
    assert (place / "predictions/captions.txt").is_file()
    kept = {found.path for found in registry.client.list_artifacts(run, "scored_again/new")}
    assert kept == {f"scored_again/new/{name}" for name in ("scores.parquet", "metrics.json")}
    (place / "older").touch()
    rescoring.here = "old"
    score_model(params, "champion", Path("base"))
    assert registry.client.list_artifacts(run, "scored_again/old") == [], "its run has them"
    assert not (place / "older").exists(), "made anew"
    assert [file.name for file in place.parent.iterdir()] == ["m3diff-1"], "nothing half made is left"


def test_of_a_folder_nothing_is_kept_and_adapters_are_led_to_their_base(registry, rescoring, monkeypatch, capsys):
    folder, placed = Path(rescoring.download("of a folder")), []
    monkeypatch.setattr(module, "find", lambda *given: Source("m3diff/sha256-1", folder, 64, Path("base")))
    monkeypatch.setattr("m3diff.models.checkpoint.place_on_base", lambda *given: placed.append(given))
    monkeypatch.setattr("m3diff.models.checkpoint.verify_loaded", lambda folder: {})
    place, _ = score_model(registry.params, str(folder), Path("base"), Path("mine"))
    assert (place, rescoring.calls[0][:2]) == (Path("mine"), ("of a folder", 64))
    ((copied, _, base),) = placed
    assert (copied.name, base) == ("checkpoint", Path("base"))
    with pytest.raises(DataError, match="mine: exists; name a folder that does not"):
        score_model(registry.params, str(folder), Path("base"), Path("mine"))
    assert main(["--params", str(REPOSITORY / "profiles/embedded.yaml"), "evaluate", "--out", "mine"]) == 2
    assert "--out and --base need --model" in capsys.readouterr().err


@pytest.mark.fault("23")
@pytest.mark.slow
@pytest.mark.parametrize("keeps", ["merged", "adapters"])
def test_a_champions_checkpoint_is_fetched_captions_this_test_set_and_is_compared(keeps, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    Path("components").symlink_to(REPOSITORY / "components")
    Path("m3diff").symlink_to("components")
    store = {"tracking_uri": "sqlite:///mlflow.db", "keeps": keeps}
    small.write_params(tmp_path, tests=12, register=store, promote={"guards": {"unreadable": 0.0}})
    for command in small.MADE:
        assert main(command) == 0
    params = load_params()
    paths = params.paths
    table = pq.read_table(paths.report / "scores.parquet")
    better = pa.array([value + 1 for value in table["CIDEr"].to_pylist()])
    challenger = table.set_column(table.schema.get_field_index("CIDEr"), "CIDEr", better)

    with tracking.connected(params.register_.tracking_uri) as client:
        experiment = tracking.experiment_id(client, "m3diff")
        runs = [client.create_run(experiment).info.run_id for _ in range(2)]
        model = stage.log_model(client, runs[0], params.register_, paths, 4, params.train.base)
        kept = Path(mlflow.artifacts.download_artifacts(model)) / "artifacts/checkpoint"
        assert is_adapters(kept) == (keeps == "adapters")
        assert (kept / "model.safetensors").is_file() == (keeps == "merged")
        pair = {side: str(next(Path("data/01_raw").rglob("*.png"))) for side in ("before", "after")}
        images = (load_image(pair["before"]), load_image(pair["after"]))
        whole = load_captioner(paths.model / "checkpoint", 4).caption([images])
        assert mlflow.pyfunc.load_model(model).predict(pd.DataFrame([pair])) == whole
        mlflow.register_model(model, "m3diff", tags={"test_set.sha256": "old", "predict.max_new_tokens": "4"})
        pq.write_table(challenger, "scores.parquet")
        client.log_artifact(runs[1], "scores.parquet")
        on = hash_test_set(paths)
        client.create_model_version("m3diff", "file:///nowhere", runs[1], tags={"test_set.sha256": on})
        for alias, version in (("champion", "1"), ("challenger", "2")):
            client.set_registered_model_alias("m3diff", alias, version)

        shutil.rmtree(paths.model)
        capsys.readouterr()
        assert main(["promote"]) == 0
        said = capsys.readouterr().out
        assert "promote: champion 1 has no scores on this test set" in said
        assert "gain +1.0000, 95 % interval +1.0000 to +1.0000 over 24 pairs; the lower bound exceeds 0" in said
        place = f"scored_again/{on:.12}/scores.parquet"
        assert pq.read_table(client.download_artifacts(runs[0], place)).equals(table)
        assert main(["evaluate", "--model", "previous", "--out", "old"]) == 0
        said = capsys.readouterr().out
        assert "minichange/total, times 100: CIDEr " in said
        assert said.endswith("report: old/report/report.html\n")
        assert pq.read_table("old/report/scores.parquet").equals(table)
        assert (paths.report / "report.html").is_file()
        assert not paths.model.exists(), "what the run left is as it was"
        aliases = client.get_registered_model("m3diff").aliases
        found = {alias: int(version) for alias, version in aliases.items()}
        assert found == {"challenger": 2, "champion": 2, "previous": 1}
