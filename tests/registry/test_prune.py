"""Prune removes old versions with everything that only they need."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m3diff.__main__ import main
from m3diff.provenance.dvc import object_file, read_file_list
from m3diff.registry.prune import reasons_to_keep
from m3diff.registry.verification import verify_lineage
from m3diff.settings.load import load_params
from tests import toy
from tests.registry.conftest import Team

RUNS = ("first", "second", "third")
BRANCHES = {f"refs/{folder}/runs/{name}" for folder in ("heads", "remotes/origin") for name in RUNS}


@dataclass
class VersionFiles:
    """The folder of a version in MLflow, its files in DVC's cache, and its run."""

    stored_model: Path
    cached_files: set[Path]
    run_id: str

    @classmethod
    def read(cls, team: Team, number: int) -> "VersionFiles":
        version = team.client.get_model_version("m3diff", str(number))
        model = team.client.get_logged_model(version.source.removeprefix("models:/"))
        cache = team.project / ".dvc/cache"
        hashes = read_file_list(cache, version.tags["dvc.checkpoint"]).values()
        return cls(
            stored_model=Path(model.artifact_location.removeprefix("file://")),
            cached_files={object_file(cache, hash_) for hash_ in hashes},
            run_id=version.run_id,
        )


def existing_versions(team: Team) -> list[int]:
    return sorted(int(version.version) for version in team.client.search_model_versions("name = 'm3diff'"))


def existing_branches(team: Team) -> set[str]:
    references = toy.run(team.project, "git", "for-each-ref", "--format=%(refname)").split()
    return {reference for reference in references if "runs/" in reference}


@pytest.mark.slow(100)
def test_old_versions_are_removed_with_all_that_only_they_need(
    trained_once, empty_store, tmp_path, monkeypatch, capsys
):
    """There are three versions on three branches. The first is the champion and the last is the challenger."""
    team = Team(tmp_path, trained_once, empty_store)
    for name, seed in zip(RUNS, (None, 1, 2), strict=True):
        team.run(name, seed)
    team.client.set_registered_model_alias("m3diff", "champion", "1")
    monkeypatch.chdir(team.project)
    champion = VersionFiles.read(team, 1)
    old_version = VersionFiles.read(team, 2)

    for arguments, code in ((["--dry-run"], 0), ([], 2), (["--dry-run", "--yes"], 0)):
        assert main(["prune", "--keep", "1", *arguments]) == code
        plan = capsys.readouterr().out
        for line in ("keep    version 3: challenger", "keep    version 1: champion", "remove  version 2\n"):
            assert line in plan
        assert "remove  branch heads/runs/second" in plan
        assert "data    dvc gc --workspace --all-commits" in plan
        assert "frees   0 GB" not in plan
        assert existing_versions(team) == [1, 2, 3]
        assert existing_branches(team) == BRANCHES
        assert old_version.stored_model.is_dir()

    assert main(["prune", "--keep", "1", "--yes"]) == 0
    assert existing_versions(team) == [1, 3]
    assert existing_branches(team) == {branch for branch in BRANCHES if "second" not in branch}
    assert "second" not in toy.run(team.project, "git", "ls-remote", "origin")
    assert champion.stored_model.is_dir()
    assert not old_version.stored_model.is_dir()
    assert all(file.is_file() for file in champion.cached_files)
    assert not any(file.is_file() for file in old_version.cached_files - champion.cached_files)
    run = team.client.get_run(old_version.run_id)
    assert run.data.tags["pruned"] == "true"
    assert run.data.metrics
    for number in ("1", "3"):
        checks = verify_lineage(load_params().register_, number)
        assert [str(check) for check in checks if check.outcome != "ok"] == []
    assert main(["prune", "--keep", "1"]) == 0, "nothing is left to remove"


@pytest.fixture
def warm_started() -> Any:
    """Return versions 5 to 1 with their checkpoints and bases: 5 was trained from 4, 4 from 3, and 3 from 1."""
    checkpoints_and_bases = {5: ("e", "d"), 4: ("d", "c"), 3: ("c", "a"), 2: ("b", "x"), 1: ("a", "x")}
    return [
        SimpleNamespace(version=str(number), tags={"dvc.checkpoint": checkpoint, "dvc.base": base})
        for number, (checkpoint, base) in checkpoints_and_bases.items()
    ]


def test_the_bases_of_kept_versions_and_the_bases_of_these_stay(warm_started):
    assert reasons_to_keep(warm_started, {4: ["champion", "previous"]}, 1) == {
        5: "one of the newest",
        4: "champion, previous",
        3: "version 4 was trained from it",
        1: "version 3 was trained from it",
    }


def test_without_aliases_and_newest_versions_none_stays(warm_started):
    assert reasons_to_keep(warm_started, {}, 0) == {}
