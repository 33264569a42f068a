"""Training that goes on from the champion: what it begins with, what trains whole, and what trains again in part."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from flows import dvc, warm
from flows.warm import BASE, NothingNewError, changed_datasets, from_champion
from flows.workspace import workspace
from m3diff.provenance.git import git, has_branch
from m3diff.records.files import sha256_of_folder
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from tests import toy
from tests.conftest import MadeOnce

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
    md5 = {out["path"]: out["md5"] for out in (dvc.locked() or {})["train"]["outs"]}[str(CHECKPOINT)]
    tags = {"git.commit": git("rev-parse", "HEAD"), "dvc.checkpoint": md5}
    champion = SimpleNamespace(name="m3diff", version="3", tags=tags)
    monkeypatch.setattr(warm, "find_alias", lambda *asked: champion)
    return root


def change_mine(root: Path) -> None:
    toy.write_dataset(root / MINE, toy.SPLITS, seed=1)
    toy.run(root, "dvc", "add", "-q", str(MINE))
    toy.commit(root, "mine grew")


def others() -> list[str]:
    return [name for name in load_params(Path("params.yaml")).ingest.datasets if name != "mine"]


@pytest.mark.slow(45)
def test_a_run_begins_with_the_champion_trains_what_changed_whole_and_a_share_of_the_rest(trained, monkeypatch):
    champion = sha256_of_folder(CHECKPOINT)
    change_mine(trained)
    toy.run(trained, "dvc", "gc", "-q", "-f", "--workspace", "--all-commits")
    with workspace("one", "HEAD", ["train.epochs=6"], replay=0.25) as work:
        began, params = git("rev-parse", "HEAD"), load_params(Path("params.yaml"))
        assert (params.train.base, params.train.epochs) == (BASE, 6)
        weights = {name: params.convert.sources[name].weight for name in others()}
        assert weights == dict.fromkeys(others(), 0.25) | {"minichange": 0.125}
        assert params.convert.sources["minichange"].samples == "one", "what else is set stays"
        assert "mine" not in params.convert.sources
        assert sha256_of_folder(BASE) == champion
        assert git("status", "--porcelain") == ""
        assert git("show", "--name-only", "--format=", "HEAD").split() == [f"{BASE}.dvc", "params.yaml"]
        assert work.overrides[:2] == ("train.epochs=6", f"train.base={BASE}")
        (said,) = work.data
        assert said.startswith("begins with m3diff version 3; mine changed since and trains whole; of minichange")
        assert said.endswith("a share of 0.25 trains again")
        dvc.link_data()
        for stage in ("synthesize@minichange", "convert", "train"):
            dvc.repro(stage, print)
        assert yaml.safe_load((CHECKPOINT / "manifest.json").read_text())["base_sha256"] == champion
    monkeypatch.setattr(warm, "find_alias", lambda *asked: pytest.fail("a run that is tried again asks for nobody"))
    with workspace("one", "HEAD", ["train.epochs=6"], replay=0.25) as work:
        assert (git("rev-parse", "HEAD"), sha256_of_folder(BASE)) == (began, champion)
        wanted = ("train.epochs=6", f"train.base={BASE}")
        assert work.overrides == wanted, "its commits must not look like those of plain runs"


def test_where_no_data_changed_there_is_nothing_to_go_on_with_and_without_a_champion_the_base(trained, monkeypatch):
    toy.change(trained, "train", epochs=9)
    toy.commit(trained, "other parameters")
    with (
        pytest.raises(NothingNewError, match="since m3diff version 3, the champion, was trained"),
        workspace("one", "HEAD", [], replay=0.25),
    ):
        pytest.fail("it began")
    assert not has_branch("runs/one")
    assert not Path(f"{BASE}.dvc").exists()
    monkeypatch.setattr(warm, "find_alias", lambda *asked: None)
    with workspace("one", "HEAD", [], replay=0.25) as work:
        assert load_params(Path("params.yaml")).train.base == Path("data/00_base")
        assert work.overrides == ()
        assert "no champion" in work.data[0]


def test_other_raw_data_or_parameters_of_data_are_a_change_and_code_and_other_sections_are_none(trained):
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


def test_a_share_that_is_none_and_a_champion_that_cannot_be_found_again_are_told(trained):
    change_mine(trained)
    champion = warm.find_alias()
    for replay, commit, told in (
        (1.5, None, "replay: expected a share from 0 to 1, found 1.5"),
        (-0.1, None, "replay: expected a share from 0 to 1, found -0.1"),
        (0.25, {"git.commit": "0" * 40}, "not in this clone"),
        (0.25, {}, "was trained at no commit of this clone"),
    ):
        champion.tags = champion.tags if commit is None else commit
        with pytest.raises(ParamsError, match=told):
            from_champion(replay)
        assert not Path(f"{BASE}.dvc").exists()


@pytest.mark.slow(20)
def test_a_checkpoint_that_the_cache_lost_comes_from_the_remote_else_the_run_is_refused(trained):
    content, md5 = sha256_of_folder(CHECKPOINT), warm.find_alias().tags["dvc.checkpoint"]
    change_mine(trained)
    list_of_files = trained / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
    kept = list_of_files.read_bytes()
    list_of_files.unlink()
    with (
        pytest.raises(ParamsError, match="neither DVC's cache nor its remote has the champion's checkpoint"),
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
        assert sha256_of_folder(BASE) == content
