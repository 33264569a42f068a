"""Datasets in a real DVC repository: links into its cache, and images that are edited in place."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from m3diff.datasets.spec import Row
from m3diff.provenance import cache
from m3diff.provenance.cache import is_cached_object
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import to_records
from tests.errors import Message
from tests.layouts import digests_of, save_picture, uris_of
from tests.toy import REPOSITORY, run

STAGE = """
import sys
from pathlib import Path
from m3diff.records.errors import DataError
from m3diff.stages.ingest.params import DatasetEntry
from m3diff.stages.ingest.stage import ingest
from m3diff.stages.validate.params import Validate
from m3diff.stages.validate.stage import validate
if __name__ == "__main__":
    entries = {"mine": DatasetEntry(reader="pairs", root=Path("raw"))}
    try:
        if sys.argv[1] == "ingest":
            ingest("mine", entries["mine"], Path("cache.parquet"), Path("records"))
        else:
            cfg = Validate(**{**LIMITS, "max_image_pixels": 10_000_000})
            validate(cfg, entries, Path("cache.parquet"), Path("records"), Path("clean"))
    except DataError as error:
        sys.exit(str(error))
"""


def write_repository(root: Path, *settings: str) -> Path:
    """Return a DVC project with four pairs below `raw`, tracked by `dvc add`, and a stage that ingests them."""
    for number in range(8):
        save_picture(root / f"raw/{number}.bmp", number)
    rows = [f"{number}.bmp,{number + 4}.bmp,the lamp is gone,train\n" for number in range(4)]
    (root / "raw/pairs.csv").write_text("before,after,captions,split\n" + "".join(rows))
    limits = yaml.safe_load((REPOSITORY / "params.yaml").read_text())["validate"]
    (root / "stage.py").write_text(STAGE.replace("LIMITS", repr(limits)))
    python = f"{shlex.quote(sys.executable)} stage.py"
    stages = {
        "ingest": {"cmd": f"{python} ingest", "deps": ["raw"], "outs": ["records"]},
        "validate": {"cmd": f"{python} validate", "deps": ["records"], "outs": ["clean"]},
    }
    (root / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    run(root, "git", "init", "-q")
    run(root, "dvc", "init", "-q")
    for setting in settings:
        run(root, "dvc", "config", *setting.split(" "))
    return root


def write_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"BM")
    return path


def records_of(root: Path) -> list[dict]:
    return pq.read_table(root / "records/mine/records").to_pylist()


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    cache._cache_of_repository.cache_clear()


CACHES = {
    "in the repository": ["cache.type symlink"],
    "shared, by a relative path": ["cache.type symlink", "cache.dir ../../shared"],
    "shared, in the local settings": ["cache.type symlink", "--local cache.dir {root}/external"],
}


@pytest.mark.parametrize(
    "settings",
    [pytest.param(settings, id=name, marks=pytest.mark.slow(12)) for name, settings in CACHES.items()],
)
def test_links_into_the_repositorys_cache_of_repository_are_the_datasets_files(settings, tmp_path):
    root = tmp_path / "project"
    root.mkdir()
    write_repository(root, *(setting.format(root=tmp_path) for setting in settings))
    run(root, "dvc", "add", "-q", "raw")
    assert (root / "raw/0.bmp").is_symlink()
    run(root, "dvc", "repro", "-q")
    assert [record["fault"] for record in records_of(root)] == [None] * 4
    assert all(None not in digests_of(record) for record in records_of(root))


@pytest.fixture(scope="module")
def linked_once(tmp_path_factory):
    root = write_repository(tmp_path_factory.mktemp("linked"), "cache.type symlink")
    run(root, "dvc", "add", "-q", "raw")
    return root


def test_other_links_out_of_the_root_stay_refused(linked_once, tmp_path, monkeypatch):
    monkeypatch.chdir(linked_once)
    digest = "ab/" + "0" * 30
    targets = {
        "another repository's cache": write_file(tmp_path / f".dvc/cache/files/md5/{digest}"),
        "a file of the cache that is no object": write_file(linked_once / ".dvc/cache/notes.bmp"),
        "a file beside the cache": write_file(linked_once / f".dvc/other/files/md5/{digest}"),
        "a file outside": write_file(tmp_path / "outside.bmp"),
        "a folder of the cache": linked_once / ".dvc/cache/files/md5",
        "a secret": Path("/etc/hostname"),
    }
    rows = []
    for number, (name, target) in enumerate(targets.items()):
        link = linked_once / f"raw/other-{number}.bmp"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        images = (link.name, "0.bmp")
        rows.append(Row(name=name, split="train", scene=name, images=images, references=["it fell"], source=name))
        assert not is_cached_object(str(link)), name
    records, _ = to_records("mine", DatasetEntry(reader="pairs", root=Path("raw")), rows)
    for record in records:
        assert uris_of(record) == [None, "raw/0.bmp"], record["source"]
        assert Message("ingest.link_out_of_root", key="before").in_text(record["fault"]), record["source"]


def test_a_link_to_an_object_that_is_gone_is_a_missing_image(linked_once, monkeypatch):
    monkeypatch.chdir(linked_once)
    link = linked_once / "raw/gone.bmp"
    link.symlink_to(linked_once / f".dvc/cache/files/md5/cd/{'1' * 30}")
    assert is_cached_object(str(link))


def test_no_dvc_repository_owns_no_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "link").symlink_to(write_file(tmp_path / f"cache/files/md5/ab/{'0' * 30}"))
    assert not is_cached_object(str(tmp_path / "link"))


def edit_in_place(path: Path) -> None:
    """Change pixels of an image, but not its size, modification time and inode."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size - 60)
        file.write(bytes(range(60)))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert path.stat().st_ino == status.st_ino


def repro(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "dvc", "repro", *arguments], cwd=root, capture_output=True, text=True)


@pytest.mark.slow(15)
@pytest.mark.parametrize("numbers", [[5], [1, 5, 6]], ids=["one image", "three images"])
def test_an_image_that_is_edited_in_place_is_refused_with_the_command_that_helps(numbers, tmp_path):
    root = write_repository(tmp_path)
    assert repro(root).returncode == 0
    digests = [digests_of(record) for record in records_of(root)]
    for number in numbers:
        edit_in_place(root / f"raw/{number}.bmp")
    assert "validate" not in run(root, "dvc", "status", "-q"), "DVC sees the edit by itself"
    refused = repro(root, "--single-item", "--force", "validate")
    assert refused.returncode != 0
    words = refused.stdout + refused.stderr
    assert f"raw/{min(numbers)}.bmp" in words or f"raw/{max(numbers)}.bmp" in words
    command = next(part for part in words.split("`") if part.endswith("&& dvc repro"))
    assert digests_of(records_of(root)[1])[1] == digests[1][1]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", command], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    after = [digests_of(record) for record in records_of(root)]
    changed = sum(
        old != new for before, now in zip(digests, after, strict=True) for old, new in zip(before, now, strict=True)
    )
    assert changed == len(numbers)
