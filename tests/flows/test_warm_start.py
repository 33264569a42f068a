"""A run whose training begins with the champion."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from flows import dvc
from flows import workspace as place
from flows.workspace import (
    CHAMPION_FOLDER,
    NothingNewError,
    changed_datasets,
    start_from_champion,
    workspace,
)
from m3diff.provenance.git import git, has_branch
from m3diff.records.errors import DataError
from m3diff.records.files import sha256_of_folder
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from tests import toy
from tests.conftest import MadeOnce
from tests.errors import raises

MINE = Path("data/01_raw/mine")


CHECKPOINT = Path("data/05_model/checkpoint")


@pytest.fixture(scope="session")
def trained_on_mine(trained_once: Path, made_once: MadeOnce) -> Path:
    """The toy with a dataset of its own, trained."""

    def make(root: Path) -> None:
        shutil.copytree(trained_once, root, symlinks=True)
        toy.write_dataset(root / MINE, toy.SPLITS)
        datasets = yaml.safe_load((root / "params.yaml").read_text())["ingest"]["datasets"]
        toy.change(root, "ingest", datasets=datasets | {"mine": {"reader": "pairs", "root": str(MINE)}})
        toy.change(root, "convert", sources={"minichange": {"weight": 0.5, "samples": "one"}})
        toy.run(root, "dvc", "config", "cache.type", "hardlink")
        toy.run(root, "dvc", "add", "-q", str(MINE))
        toy.commit(root, "mine")
        toy.run(root, "dvc", "repro", "-q", "train")
        toy.commit(root, "trained")

    return made_once("trained-on-mine", make)


@pytest.fixture
def trained(trained_on_mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, current directory; its checkpoint is champion."""
    root = tmp_path / "toy"
    toy.run(tmp_path, "cp", "-a", str(trained_on_mine), str(root))  # hard links stay such
    monkeypatch.chdir(root)
    md5 = {out["path"]: out["md5"] for out in (dvc.locked_stages() or {})["train"]["outs"]}[str(CHECKPOINT)]
    tags = {"git.commit": git("rev-parse", "HEAD"), "dvc.checkpoint": md5}
    champion = SimpleNamespace(name="m3diff", version="3", tags=tags)
    monkeypatch.setattr(place, "find_aliased_version", lambda *asked: champion)
    return root


def change_mine(root: Path) -> None:
    toy.write_dataset(root / MINE, toy.SPLITS, seed=1)
    toy.run(root, "dvc", "add", "-q", str(MINE))
    toy.commit(root, "mine grew")


def others() -> list[str]:
    return [name for name in load_params(Path("params.yaml")).ingest.datasets if name != "mine"]


@pytest.mark.slow(45)
def test_a_warm_start_trains_changed_datasets_whole_and_a_share_of_the_rest(trained, monkeypatch):
    champion = sha256_of_folder(CHECKPOINT)
    change_mine(trained)
    toy.run(trained, "dvc", "gc", "-q", "-f", "--workspace", "--all-commits")
    with workspace("one", "HEAD", ["train.epochs=6"], replay=0.25) as work:
        began = git("rev-parse", "HEAD")
        params = load_params(Path("params.yaml"))
        assert params.train.base == CHAMPION_FOLDER
        assert params.train.epochs == 6
        weights = {name: params.convert.sources[name].weight for name in others()}
        assert weights == dict.fromkeys(others(), 0.25) | {"minichange": 0.125}
        assert params.convert.sources["minichange"].samples == "one", "what else is set stays"
        assert "mine" not in params.convert.sources
        assert sha256_of_folder(CHAMPION_FOLDER) == champion
        assert git("status", "--porcelain") == ""
        assert git("show", "--name-only", "--format=", "HEAD").split() == [f"{CHAMPION_FOLDER}.dvc", "params.yaml"]
        assert work.overrides == ("train.epochs=6", "start from the champion, replay 0.25")
        (note,) = work.data_notes
        assert note.startswith("training starts from m3diff version 3. Changed since and used in full: mine. Unchanged")
        assert "a share of 0.25 is used again: minichange" in note
        dvc.link_data()
        for stage in ("synthesize@minichange", "convert", "train"):
            dvc.repro(stage, print)
        assert yaml.safe_load((CHECKPOINT / "manifest.json").read_text())["base_sha256"] == champion
    monkeypatch.setattr(
        place, "find_aliased_version", lambda *asked: pytest.fail("a run that is tried again asks for nobody")
    )
    with workspace("one", "HEAD", ["train.epochs=6"], replay=0.25) as work:
        assert git("rev-parse", "HEAD") == began
        assert sha256_of_folder(CHAMPION_FOLDER) == champion
        assert work.overrides[1:], "unlike those of plain runs"


def test_a_warm_start_needs_changed_data_and_without_a_champion_has_the_base(trained, monkeypatch):
    toy.change(trained, "train", epochs=9)
    toy.commit(trained, "other parameters")
    with pytest.raises(NothingNewError, match="m3diff version 3"), workspace("one", "HEAD", [], replay=0.25):
        pytest.fail("it began")
    assert not has_branch("runs/one")
    assert not Path(f"{CHAMPION_FOLDER}.dvc").exists()
    monkeypatch.setattr(place, "find_aliased_version", lambda *asked: None)
    with workspace("one", "HEAD", [], replay=0.25) as work:
        assert load_params(Path("params.yaml")).train.base == Path("data/00_base")
        assert "no champion" in work.data_notes[0]


def test_other_raw_data_or_data_parameters_are_changes_and_code_is_none(trained):
    commit = git("rev-parse", "HEAD")
    names = ["mine", *others()]
    lock = Path("dvc.lock").read_bytes()
    stage = trained / "components/stages/ingest/stage.py"
    stage.write_text(stage.read_text() + "\n# a comment\n")
    toy.change(trained, "train", epochs=9)
    shutil.rmtree("data/01_raw")
    toy.run(trained, "git", "checkout", "-q", "data/01_raw")
    assert changed_datasets(commit, names) == set()
    assert changed_datasets(commit, [*names, "new"]) == {"new"}
    synthesized = yaml.safe_load(Path("params.yaml").read_text())["synthesize"]
    toy.change(trained, "synthesize", minichange=synthesized["minichange"] | {"seed": 5})
    assert changed_datasets(commit, names) == {"minichange"}
    toy.write_dataset(trained / MINE, toy.SPLITS, seed=1)
    toy.run(trained, "dvc", "add", "-q", str(MINE))
    shutil.rmtree(MINE)
    assert changed_datasets(commit, names) == {"minichange", "mine"}
    assert Path("dvc.lock").read_bytes() == lock


@pytest.mark.slow
def test_a_wrong_replay_share_and_an_unknown_commit_of_the_champion_are_refused(trained):
    change_mine(trained)
    champion = place.find_aliased_version()
    for replay in (1.5, -0.1):
        with raises(ParamsError, "flows.replay_out_of_range", key="replay", value=replay):
            start_from_champion(replay)
    for tags, commit in (({"git.commit": "0" * 40}, "0" * 40), ({}, "unknown")):
        champion.tags = tags
        with raises(DataError, "git.commit_not_in_clone", value=commit):
            start_from_champion(0.25)
        assert not Path(f"{CHAMPION_FOLDER}.dvc").exists()


@pytest.mark.slow(20)
def test_a_checkpoint_lost_by_the_cache_is_pulled_or_the_run_is_refused(trained):
    content = sha256_of_folder(CHECKPOINT)
    md5 = place.find_aliased_version().tags["dvc.checkpoint"]
    change_mine(trained)
    list_of_files = trained / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
    kept = list_of_files.read_bytes()
    list_of_files.unlink()
    with (
        raises(dvc.DvcError, "flows.command_failed", command=f"dvc pull {CHAMPION_FOLDER}.dvc"),
        workspace("one", "HEAD", [], replay=0.25),
    ):
        pytest.fail("it began")
    assert not has_branch("runs/one")
    list_of_files.write_bytes(kept)
    toy.run(trained, "dvc", "remote", "add", "-q", "--default", "shelf", str(trained.parent / "shelf"))
    toy.commit(trained, "a remote")
    toy.run(trained, "dvc", "push", "-q", "--all-commits")
    list_of_files.unlink()
    with workspace("one", "HEAD", [], replay=0.25):
        assert sha256_of_folder(CHAMPION_FOLDER) == content
