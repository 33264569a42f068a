"""Raw data in a flow's worktree: linked once for all runs, told to DVC by hash, kept while a run uses them."""

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows import dvc, raw
from flows.raw import FOLDERS, in_place, sweep
from flows.workspace import workspace
from tests import toy

MINE = Path("data/01_raw/mine")


@pytest.fixture
def tracked(project: Path) -> Path:
    """The toy with a dataset of its own that DVC tracks: committed, not ingested yet."""
    toy.write_dataset(project / MINE, toy.SPLITS)
    values = yaml.safe_load((project / "params.yaml").read_text())
    values["ingest"]["datasets"]["mine"] = {"reader": "pairs", "root": str(MINE)}
    (project / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    toy.run(project, "dvc", "config", "cache.type", "hardlink")
    toy.run(project, "dvc", "add", "-q", str(MINE))
    toy.commit(project, "mine")
    return project


def in_worktree(name: str = "one") -> Any:
    return workspace(name, "HEAD", [], False)


def objects(root: Path) -> dict[int, Path]:
    return {file.stat().st_ino: file for file in (root / ".dvc/cache/files").rglob("*") if file.is_file()}


@pytest.mark.timeout(60)
def test_the_folder_of_a_dataset_is_a_link_to_links_into_the_cache_that_all_runs_share(tracked):
    with in_worktree() as work, in_place(work.checkout, []):
        assert MINE.is_symlink()
        linked = MINE.resolve()
        assert linked.parent == tracked / FOLDERS
        there = {str(file.relative_to(linked)): file for file in linked.rglob("*") if file.is_file()}
        assert there.keys() == {"pairs.json", *(f"{side}/{n}.png" for side in toy.SIDES.values() for n in range(4))}
        assert all(file.read_bytes() == (tracked / MINE / name).read_bytes() for name, file in there.items())
        assert {file.stat().st_ino for file in there.values()} <= objects(tracked).keys()
        born = linked.stat().st_ino
        with in_worktree("two") as other, in_place(other.checkout, []):
            assert MINE.resolve() == linked
        assert linked.stat().st_ino == born, "linked again"
    assert linked.is_dir(), "the next run needs it"


def test_a_cache_on_another_disk_is_reached_by_symbolic_links(tracked, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(os, "link", refuse)
    with in_worktree() as work, in_place(work.checkout, []):
        image = MINE / "images/2.png"
        assert image.is_symlink()
        assert image.read_bytes() == (tracked / image).read_bytes()


def test_what_a_killed_run_left_half_is_linked_anew(tracked):
    (name,) = [md5.removesuffix(".dir") for md5, _ in dvc.raw_data().values()]
    half = tracked / FOLDERS / f"{name}.half"
    half.mkdir(parents=True)
    (half / "pairs.json").write_text("left")
    with in_worktree() as work, in_place(work.checkout, []):
        assert (MINE / "pairs.json").read_text() == (tracked / MINE / "pairs.json").read_text()
        assert not half.exists()


@pytest.mark.slow(15)
def test_a_stage_with_raw_data_by_link_records_what_one_in_the_checkout_records(tracked):
    with in_worktree() as work:
        with in_place(work.checkout, ["ingest@mine"]):
            assert dvc.repro("code", print) == "Ran"
            assert dvc.repro("ingest@mine", print) == "Ran"
            assert MINE.is_symlink()
        ours = dvc.locked()["ingest@mine"]
    toy.run(tracked, "dvc", "repro", "-q", "code")
    toy.run(tracked, "dvc", "repro", "-q", "-f", "ingest@mine")
    assert dvc.locked()["ingest@mine"] == ours


@pytest.mark.parametrize(("changed", "read"), [(["ingest@mine"], False), (["train"], True)])
def test_dvc_reads_no_file_again_whose_hash_it_is_told(tracked, changed, read):
    with in_worktree() as work, in_place(work.checkout, changed):
        image = (MINE / "images/0.png").resolve()
        before = image.stat()
        image.chmod(0o644)
        image.write_bytes(b"x" * before.st_size)
        image.chmod(before.st_mode)
        os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns))
        with dvc.repository() as repo:
            said = repo.status([f"{MINE}.dvc"])
    assert bool(said) == read


def test_data_that_the_cache_has_not_whole_come_by_dvc_as_far_as_it_has_them(tracked):
    lost = objects(tracked)[(tracked / MINE / "images/1.png").stat().st_ino]
    lost.unlink()
    with in_worktree() as work, in_place(work.checkout, []):
        assert not MINE.is_symlink()
    assert not (tracked / FOLDERS).exists() or not any(path.is_dir() for path in (tracked / FOLDERS).iterdir())


def test_a_folder_that_is_there_stays(tracked):
    with in_worktree() as work:
        MINE.mkdir(parents=True)
        (MINE / "a person's").touch()
        with in_place(work.checkout, ["ingest@mine"]):
            assert [path.name for path in MINE.iterdir()] == ["a person's"]


def test_what_no_run_used_for_a_week_goes_and_what_one_uses_stays(tracked):
    def age(path: Path, days: float = 8) -> None:
        os.utime(path, (time.time() - days * 86400,) * 2)

    with in_worktree() as work, in_place(work.checkout, []):
        folder = MINE.resolve()
        sweep(tracked / FOLDERS)
        age(folder)
        sweep(tracked / FOLDERS)
        assert folder.is_dir(), "in use"
        age(folder, days=6)
    with in_worktree("two") as work, in_place(work.checkout, []):
        pass
    assert time.time() - folder.stat().st_mtime < 3600, "used just now"
    sweep(tracked / FOLDERS)
    assert folder.is_dir()
    age(folder)
    sweep(tracked / FOLDERS)
    assert not folder.exists()


@pytest.mark.slow(15)
def test_the_status_compares_hashes_of_raw_data_that_are_not_there(tracked):
    toy.run(tracked, "dvc", "repro", "-q", "ingest@mine")
    toy.commit(tracked, "ingested")
    with in_worktree():
        dvc.link_data()
        assert not MINE.exists()
        assert "ingest@mine" not in dvc.status()
    toy.write_dataset(tracked / MINE, toy.SPLITS, seed=1)
    toy.run(tracked, "dvc", "add", "-q", str(MINE))
    toy.commit(tracked, "changed")
    with in_worktree("two"):
        dvc.link_data()
        assert dvc.status()["ingest@mine"] == [{"changed deps": {str(MINE): "modified"}}]


def test_data_that_no_stage_ingests_come_by_dvc(tracked):
    (tracked / "data" / "base").mkdir()
    (tracked / "data" / "base" / "weights").write_text("large")
    toy.run(tracked, "dvc", "add", "-q", "data/base")
    toy.commit(tracked, "a base")
    assert {path: readers for path, (_, readers) in dvc.raw_data().items()} == {MINE: {"ingest@mine"}}
    with in_worktree():
        dvc.link_data()
        assert Path("data/base/weights").read_text() == "large"
        assert not Path("data/base").is_symlink()
        assert not MINE.exists()


def test_every_file_must_be_in_the_cache(tracked):
    cache = tracked / ".dvc/cache"
    known = [f"{file.parent.name}{file.name}" for file in objects(tracked).values()]
    assert raw.all_there(cache, known)
    assert not raw.all_there(cache, [*known, known[0][:-1] + "x"])
    assert not raw.all_there(cache, [*known, "zz" + known[0][2:]])
