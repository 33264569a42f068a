"""Runs whose training starts from the champion."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flows import dvc
from flows import workspace as workspace_module
from flows.workspace import (
    CHAMPION_FOLDER,
    NothingNewError,
    changed_datasets,
    fetch_base,
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
from tests.flows.conftest import SmallRepository
from tests.toy import REPOSITORY

MINE_FOLDER = Path("data/01_raw/mine")


CHECKPOINT = Path("data/05_model/checkpoint")


@pytest.fixture(scope="session")
def trained_on_mine(trained_once: Path, made_once: MadeOnce) -> Path:
    """Return the toy project with an additional dataset, after its training."""

    def make(root: Path) -> None:
        shutil.copytree(trained_once, root, symlinks=True)
        toy.write_dataset(root / MINE_FOLDER, toy.SPLITS)
        datasets = yaml.safe_load((root / "params.yaml").read_text())["ingest"]["datasets"]
        toy.change(root, "ingest", datasets=datasets | {"mine": {"reader": "pairs", "root": str(MINE_FOLDER)}})
        toy.change(root, "convert", sources={"minichange": {"weight": 0.5, "samples": "one"}})
        toy.run(root, "dvc", "config", "cache.type", "hardlink")
        toy.run(root, "dvc", "add", "-q", str(MINE_FOLDER))
        toy.commit(root, "mine")
        toy.run(root, "dvc", "repro", "-q", "train")
        toy.commit(root, "trained")

    return made_once("trained-on-mine", make)


@pytest.fixture
def champion_project(trained_on_mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of that project, which is the current directory. Its checkpoint is the champion."""
    root = tmp_path / "toy"
    toy.run(tmp_path, "cp", "-a", str(trained_on_mine), str(root))  # cp -a keeps hard links
    monkeypatch.chdir(root)
    md5 = {out["path"]: out["md5"] for out in (dvc.locked_stages() or {})["train"]["outs"]}[str(CHECKPOINT)]
    tags = {"git.commit": git("rev-parse", "HEAD"), "dvc.checkpoint": md5}
    champion = SimpleNamespace(name="m3diff", version="3", tags=tags)
    monkeypatch.setattr(workspace_module, "find_aliased_version", lambda *arguments: champion)
    return root


def change_mine(root: Path) -> None:
    toy.write_dataset(root / MINE_FOLDER, toy.SPLITS, seed=1)
    toy.run(root, "dvc", "add", "-q", str(MINE_FOLDER))
    toy.commit(root, "mine grew")


def other_datasets() -> list[str]:
    return [name for name in load_params(Path("params.yaml")).ingest.datasets if name != "mine"]


@pytest.mark.slow(20)
def test_a_warm_start_trains_changed_datasets_whole_and_a_share_of_the_rest(champion_project, monkeypatch):
    champion = sha256_of_folder(CHECKPOINT)
    change_mine(champion_project)
    toy.run(champion_project, "dvc", "gc", "-q", "-f", "--workspace", "--all-commits")
    with workspace("one", "HEAD", ["train.epochs=6"], replay=0.25) as work:
        commit = git("rev-parse", "HEAD")
        params = load_params(Path("params.yaml"))
        assert params.train.base == CHAMPION_FOLDER
        assert params.train.epochs == 6
        weights = {name: params.convert.sources[name].weight for name in other_datasets()}
        assert weights == dict.fromkeys(other_datasets(), 0.25) | {"minichange": 0.125}
        assert params.convert.sources["minichange"].samples == "one", "other settings are kept"
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
        workspace_module,
        "find_aliased_version",
        lambda *arguments: pytest.fail("a retry does not look for the champion"),
    )
    with workspace("one", "HEAD", ["train.epochs=6"], replay=0.25) as work:
        assert git("rev-parse", "HEAD") == commit
        assert sha256_of_folder(CHAMPION_FOLDER) == champion
        assert work.overrides[1:], "a run without overrides has none"


def test_a_warm_start_needs_changed_data_and_without_a_champion_has_the_base(champion_project, monkeypatch):
    toy.change(champion_project, "train", epochs=9)
    toy.commit(champion_project, "other parameters")
    with pytest.raises(NothingNewError, match="m3diff version 3"), workspace("one", "HEAD", [], replay=0.25):
        pytest.fail("the run started")
    assert not has_branch("runs/one")
    assert not Path(f"{CHAMPION_FOLDER}.dvc").exists()
    monkeypatch.setattr(workspace_module, "find_aliased_version", lambda *arguments: None)
    with workspace("one", "HEAD", [], replay=0.25) as work:
        assert load_params(Path("params.yaml")).train.base == Path("data/00_base")
        assert "no champion" in work.data_notes[0]


def test_other_raw_data_or_data_parameters_are_changes_and_code_is_none(champion_project):
    commit = git("rev-parse", "HEAD")
    names = ["mine", *other_datasets()]
    lock = Path("dvc.lock").read_bytes()
    stage = champion_project / "components/stages/ingest/stage.py"
    stage.write_text(stage.read_text() + "\n# a comment\n")
    toy.change(champion_project, "train", epochs=9)
    shutil.rmtree("data/01_raw")
    toy.run(champion_project, "git", "checkout", "-q", "data/01_raw")
    assert changed_datasets(commit, names) == set()
    assert changed_datasets(commit, [*names, "new"]) == {"new"}
    synthesized = yaml.safe_load(Path("params.yaml").read_text())["synthesize"]
    toy.change(champion_project, "synthesize", minichange=synthesized["minichange"] | {"seed": 5})
    assert changed_datasets(commit, names) == {"minichange"}
    toy.write_dataset(champion_project / MINE_FOLDER, toy.SPLITS, seed=1)
    toy.run(champion_project, "dvc", "add", "-q", str(MINE_FOLDER))
    shutil.rmtree(MINE_FOLDER)
    assert changed_datasets(commit, names) == {"minichange", "mine"}
    assert Path("dvc.lock").read_bytes() == lock


@pytest.mark.slow
def test_an_unknown_commit_of_the_champion_is_refused(champion_project):
    change_mine(champion_project)
    champion = workspace_module.find_aliased_version()
    for tags, commit in (({"git.commit": "0" * 40}, "0" * 40), ({}, "unknown")):
        champion.tags = tags
        with raises(DataError, "git.commit_not_in_clone", value=commit):
            start_from_champion(0.25)
        assert not Path(f"{CHAMPION_FOLDER}.dvc").exists()


@pytest.mark.parametrize("replay", [1.5, -0.1])
def test_a_replay_share_that_is_no_share_is_refused(replay):
    with raises(ParamsError, "flows.replay_out_of_range", key="replay", value=replay):
        start_from_champion(replay)


@pytest.fixture
def registry(small_repository: SmallRepository, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Write the parameters, and make version 3 the champion. Return the requests for the champion and its commit."""
    values = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    values["convert"]["sources"] = {"minichange": {"weight": 0.5, "samples": "one"}, "minichange_free": {"weight": 2.0}}
    Path("params.yaml").write_text(yaml.safe_dump(values))
    Path("data").mkdir()
    requests: list[Any] = []
    champion = SimpleNamespace(name="m3diff", version="3", tags={"git.commit": "c0ffee", "dvc.checkpoint": "1" * 32})
    monkeypatch.setattr(workspace_module.tracking, "connect", lambda uri: nullcontext(uri))
    monkeypatch.setattr(
        workspace_module, "find_aliased_version", lambda *arguments: requests.append(arguments) or champion
    )
    monkeypatch.setattr(workspace_module, "find_commit", lambda name: requests.append(name) or f"commit {name}")
    return requests


@pytest.mark.parametrize("replay", [0, 0.25, 1])
def test_the_overrides_of_a_warm_start_name_the_checkpoint_and_scale_unchanged_data(registry, monkeypatch, replay):
    def changed_since(commit: str, names: Mapping[str, Any]) -> set[str]:
        assert commit == "commit c0ffee"
        return set(names) - {"minichange", "minichange_shifted"}

    monkeypatch.setattr(workspace_module, "changed_datasets", changed_since)
    (base_override, sources_override), note = start_from_champion(replay)
    params = load_params(Path("params.yaml"))
    assert registry == [(params.register_.tracking_uri, "m3diff", "champion"), "c0ffee"]
    assert base_override == f"train.base={CHAMPION_FOLDER}"
    key, _, value = sources_override.partition("=")
    assert key == "convert.sources"
    assert "\n" not in value
    assert yaml.safe_load(value) == {
        "minichange": {"weight": 0.5 * replay, "samples": "one"},
        "minichange_free": {"weight": 2.0},
        "minichange_shifted": {"weight": replay},
    }
    (entry,) = yaml.safe_load(Path(f"{CHAMPION_FOLDER}.dvc").read_text())["outs"]
    assert entry == {"md5": "1" * 32, "hash": "md5", "path": CHAMPION_FOLDER.name}
    assert git("diff", "--cached", "--name-only") == f"{CHAMPION_FOLDER}.dvc"
    for words in ("m3diff version 3", "used in full: minichange_free, minichange_images", f"a share of {replay}"):
        assert words in note
    assert note.endswith("minichange, minichange_shifted")


def test_a_warm_start_on_changed_data_alone_scales_no_dataset(registry, monkeypatch):
    monkeypatch.setattr(workspace_module, "changed_datasets", lambda commit, names: set(names))
    (_, sources_override), note = start_from_champion(0.25)
    sources = yaml.safe_load(sources_override.partition("=")[2])
    assert sources == {"minichange": {"weight": 0.5, "samples": "one"}, "minichange_free": {"weight": 2.0}}
    assert "Unchanged" not in note


@pytest.mark.parametrize(
    ("has_champion", "is_cached", "expected_actions"),
    [
        (False, False, []),
        (True, True, ["checkout"]),
        (True, False, ["checkout", f"dvc pull {CHAMPION_FOLDER}.dvc", [f"{CHAMPION_FOLDER}.dvc"]]),
    ],
    ids=["training starts from the base", "in the cache", "not in the cache"],
)
def test_the_champions_checkpoint_is_pulled_only_if_the_cache_has_lost_it(
    has_champion, is_cached, expected_actions, tmp_path, monkeypatch
):
    actions: list[Any] = []

    def check_out() -> None:
        actions.append("checkout")
        if is_cached:
            CHAMPION_FOLDER.mkdir()

    @contextmanager
    def repository(command: str) -> Iterator[SimpleNamespace]:
        actions.append(command)
        yield SimpleNamespace(pull=actions.append)

    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    if has_champion:
        Path(f"{CHAMPION_FOLDER}.dvc").touch()
    monkeypatch.setattr(dvc, "link_data", check_out)
    monkeypatch.setattr(dvc, "repository", repository)
    fetch_base()
    assert actions == expected_actions


@pytest.mark.slow(20)
def test_a_checkpoint_lost_by_the_cache_is_pulled_or_the_run_is_refused(champion_project):
    content = sha256_of_folder(CHECKPOINT)
    md5 = workspace_module.find_aliased_version().tags["dvc.checkpoint"]
    change_mine(champion_project)
    file_list = champion_project / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
    file_list_bytes = file_list.read_bytes()
    file_list.unlink()
    with (
        raises(dvc.DvcError, "flows.command_failed", command=f"dvc pull {CHAMPION_FOLDER}.dvc"),
        workspace("one", "HEAD", [], replay=0.25),
    ):
        pytest.fail("the run started")
    assert not has_branch("runs/one")
    file_list.write_bytes(file_list_bytes)
    toy.run(
        champion_project, "dvc", "remote", "add", "-q", "--default", "shelf", str(champion_project.parent / "shelf")
    )
    toy.commit(champion_project, "a remote")
    toy.run(champion_project, "dvc", "push", "-q", "--all-commits")
    file_list.unlink()
    with workspace("one", "HEAD", [], replay=0.25):
        assert sha256_of_folder(CHAMPION_FOLDER) == content
