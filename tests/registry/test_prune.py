"""Storage ends somewhere: what goes with an old version, and what stays whatever is asked."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m3diff.__main__ import main
from m3diff.provenance.dvc import listing
from m3diff.registry.prune import branch_name, in_words, reasons
from m3diff.registry.restore import lineage
from m3diff.settings.load import load_params
from tests import toy
from tests.registry.team import Team


@pytest.fixture(scope="module")
def three(trained_once, empty_store, tmp_path_factory) -> Team:
    """Three versions of three branches: the first is the champion, the last the challenger."""
    made = Team(tmp_path_factory.mktemp("three"), trained_once, empty_store)
    for name, seed in (("first", None), ("second", 1), ("third", 2)):
        made.run(name, seed)
    made.client.set_registered_model_alias("m3diff", "champion", "1")
    return made


def versions(team: Team) -> list[int]:
    return sorted(int(version.version) for version in team.client.search_model_versions("name = 'm3diff'"))


def branches(team: Team) -> set[str]:
    listed = toy.run(team.project, "git", "for-each-ref", "--format=%(refname)").split()
    return {name for name in listed if "runs/" in name}


def of_version(team: Team, number: int) -> dict[str, Any]:
    """The files of a version: in MLflow, and in DVC's cache."""
    version = team.client.get_model_version("m3diff", str(number))
    model = team.client.get_logged_model(version.source.removeprefix("models:/"))
    cache = team.project / ".dvc/cache"
    hashes = listing(cache, version.tags["dvc.checkpoint"]).values()
    return {
        "stored": Path(model.artifact_location.removeprefix("file://")),
        "cached": [cache / "files/md5" / hash_[:2] / hash_[2:] for hash_ in hashes],
        "run": version.run_id,
    }


@pytest.mark.slow(100)
def test_old_versions_go_with_all_that_is_theirs_alone_and_what_an_alias_names_stays(three, monkeypatch, capsys):
    monkeypatch.chdir(three.project)
    first, second = of_version(three, 1), of_version(three, 2)
    everywhere = {
        f"refs/{place}/runs/{name}" for place in ("heads", "remotes/origin") for name in ("first", "second", "third")
    }
    assert branches(three) == everywhere
    for arguments, code in ((["--dry-run"], 0), ([], 2), (["--dry-run", "--yes"], 0)):
        assert main(["prune", "--keep", "1", *arguments]) == code
        said = capsys.readouterr().out
        assert "keep    version 3: challenger" in said
        assert "keep    version 1: champion" in said
        assert "remove  version 2\n" in said
        assert "remove  branch heads/runs/second" in said
        assert "frees   0 bytes" not in said
        assert "0 bytes in DVC's cache" not in said
        assert "data    dvc gc --workspace --all-commits" in said
        assert (versions(three), branches(three), second["stored"].is_dir()) == ([1, 2, 3], everywhere, True)

    assert main(["prune", "--keep", "1", "--yes"]) == 0
    capsys.readouterr()
    assert versions(three) == [1, 3]
    assert branches(three) == {name for name in everywhere if "second" not in name}
    assert "second" not in toy.run(three.project, "git", "ls-remote", "origin")
    assert (first["stored"].is_dir(), second["stored"].is_dir()) == (True, False)
    assert all(file.is_file() for file in first["cached"])
    assert not any(file.is_file() for file in set(second["cached"]) - set(first["cached"]))
    run = three.client.get_run(second["run"])
    assert run.data.tags["pruned"] == "true"
    assert run.data.metrics
    for number in ("1", "3"):
        assert [str(check) for check in lineage(load_params().register_, number) if check.outcome != "ok"] == []
    assert main(["prune", "--keep", "1"]) == 0, "nothing is left to remove"


@pytest.mark.slow(100)
def test_data_stay_where_no_branch_says_which_a_kept_version_needs(three, monkeypatch, capsys):
    monkeypatch.chdir(three.project)
    client = three.client
    before = client.get_model_version("m3diff", "1").tags["dvc.lock.sha256"]
    client.set_model_version_tag("m3diff", "1", "dvc.lock.sha256", "0" * 64)
    toy.run(three.project, "git", "branch", "--quiet", "aside", "runs/third")
    try:
        main(["prune", "--keep", "0", "--dry-run"])
        said = capsys.readouterr().out
        assert "data    stay, since version 1 was registered before its dvc.lock was committed" in said
        assert "dvc gc" not in said
    finally:
        client.set_model_version_tag("m3diff", "1", "dvc.lock.sha256", before)


def version(number: int, **tags: str) -> Any:
    return SimpleNamespace(version=str(number), tags={f"dvc.{name}": value for name, value in tags.items()})


def test_what_a_kept_versions_training_began_with_stays_and_so_does_what_that_began_with():
    there = [
        version(5, checkpoint="e", base="x"),
        version(4, checkpoint="d", base="c"),
        version(3, checkpoint="c", base="a"),
        version(2, checkpoint="b", base="x"),
        version(1, checkpoint="a", base="x"),
    ]
    assert reasons(there, {4: ["champion", "previous"]}, 1) == {
        5: "one of the newest",
        4: "champion, previous",
        3: "version 4 was trained from it",
        1: "version 3 was trained from it",
    }
    assert list(reasons(there, {}, 0)) == []


def test_a_branch_is_known_here_and_as_a_remote_has_it():
    assert [branch_name(f"refs/{place}/runs/x") for place in ("heads", "remotes/origin")] == ["runs/x", "runs/x"]
    assert branch_name("refs/remotes/runs/x") == "x"


def test_bytes_are_written_as_people_do():
    assert [in_words(count) for count in (0, 999, 1000, 5_400_000, 17e9, 2e12)] == [
        "0 bytes", "999 bytes", "1 kB", "5.4 MB", "17 GB", "2 TB",
    ]  # fmt: skip


@pytest.mark.parametrize("count", ["-1", "x", "1.5"])
def test_how_many_stay_is_a_number(count, capsys):
    with pytest.raises(SystemExit):
        main(["prune", "--keep", count])
    assert "--keep" in capsys.readouterr().err
