"""Storage ends somewhere: what goes with an old version, and what stays whatever is asked."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m3diff.__main__ import main
from m3diff.provenance.dvc import listing, object_file
from m3diff.registry.prune import branch_name, in_words, reasons
from m3diff.registry.restore import lineage
from m3diff.settings.load import load_params
from tests import toy
from tests.registry.conftest import Team


def of_version(team: Team, number: int) -> tuple[Path, set[Path], str]:
    """The files of a version in MLflow and in DVC's cache, and its run."""
    version = team.client.get_model_version("m3diff", str(number))
    model = team.client.get_logged_model(version.source.removeprefix("models:/"))
    cache = team.project / ".dvc/cache"
    cached = {object_file(cache, hash_) for hash_ in listing(cache, version.tags["dvc.checkpoint"]).values()}
    return Path(model.artifact_location.removeprefix("file://")), cached, version.run_id


@pytest.mark.slow(100)
def test_old_versions_go_with_all_that_is_theirs_alone_and_what_an_alias_names_stays(
    trained_once, empty_store, tmp_path, monkeypatch, capsys
):
    """Three versions of three branches: the first is the champion, the last the challenger."""
    three = Team(tmp_path, trained_once, empty_store)
    for name, seed in (("first", None), ("second", 1), ("third", 2)):
        three.run(name, seed)
    client = three.client
    client.set_registered_model_alias("m3diff", "champion", "1")
    monkeypatch.chdir(three.project)

    def left() -> tuple[list[int], set[str]]:
        versions = sorted(int(version.version) for version in client.search_model_versions("name = 'm3diff'"))
        branches = toy.run(three.project, "git", "for-each-ref", "--format=%(refname)").split()
        return versions, {name for name in branches if "runs/" in name}

    before = client.get_model_version("m3diff", "1").tags["dvc.lock.sha256"]
    client.set_model_version_tag("m3diff", "1", "dvc.lock.sha256", "0" * 64)
    toy.run(three.project, "git", "branch", "--quiet", "aside", "runs/third")
    main(["prune", "--keep", "0", "--dry-run"])
    said = capsys.readouterr().out
    assert "data    stay, since version 1 was registered before its dvc.lock was committed" in said
    assert "dvc gc" not in said
    client.set_model_version_tag("m3diff", "1", "dvc.lock.sha256", before)

    (stored, cached, _), (stored_too, cached_too, run) = of_version(three, 1), of_version(three, 2)
    everywhere = {
        f"refs/{at}/runs/{name}" for at in ("heads", "remotes/origin") for name in ("first", "second", "third")
    }
    for arguments, code in ((["--dry-run"], 0), ([], 2), (["--dry-run", "--yes"], 0)):
        assert main(["prune", "--keep", "1", *arguments]) == code
        said = capsys.readouterr().out
        for line in ("keep    version 3: challenger", "keep    version 1: champion", "remove  version 2\n"):
            assert line in said
        assert "remove  branch heads/runs/second" in said
        assert "data    dvc gc --workspace --all-commits" in said
        assert "frees   0 bytes" not in said
        assert "0 bytes in DVC's cache" not in said
        assert (left(), stored_too.is_dir()) == (([1, 2, 3], everywhere), True)

    assert main(["prune", "--keep", "1", "--yes"]) == 0
    assert left() == ([1, 3], {name for name in everywhere if "second" not in name})
    assert "second" not in toy.run(three.project, "git", "ls-remote", "origin")
    assert (stored.is_dir(), stored_too.is_dir()) == (True, False)
    assert [all(file.is_file() for file in cached), any(file.is_file() for file in cached_too - cached)] == [
        True,
        False,
    ]
    data = client.get_run(run).data
    assert (data.tags["pruned"], bool(data.metrics)) == ("true", True)
    for number in ("1", "3"):
        assert [str(check) for check in lineage(load_params().register_, number) if check.outcome != "ok"] == []
    assert main(["prune", "--keep", "1"]) == 0, "nothing is left to remove"


def version(number: int, **tags: str) -> Any:
    return SimpleNamespace(version=str(number), tags={f"dvc.{name}": value for name, value in tags.items()})


def test_what_a_kept_versions_training_began_with_stays_and_so_does_what_that_began_with():
    began = {5: ("e", "x"), 4: ("d", "c"), 3: ("c", "a"), 2: ("b", "x"), 1: ("a", "x")}
    there = [version(number, checkpoint=checkpoint, base=base) for number, (checkpoint, base) in began.items()]
    assert reasons(there, {4: ["champion", "previous"]}, 1) == {
        5: "one of the newest",
        4: "champion, previous",
        3: "version 4 was trained from it",
        1: "version 3 was trained from it",
    }
    assert list(reasons(there, {}, 0)) == []


def test_branches_bytes_and_the_number_to_keep_are_read_as_people_write_them(capsys):
    references = ("refs/heads/runs/x", "refs/remotes/origin/runs/x", "refs/remotes/runs/x")
    assert [branch_name(reference) for reference in references] == ["runs/x", "runs/x", "x"]
    counts = {0: "0 bytes", 999: "999 bytes", 1000: "1 kB", 5_400_000: "5.4 MB", 17e9: "17 GB", 2e12: "2 TB"}
    assert {count: in_words(count) for count in counts} == counts
    for count in ("-1", "x", "1.5"):
        with pytest.raises(SystemExit):
            main(["prune", "--keep", count])
        assert "--keep" in capsys.readouterr().err
