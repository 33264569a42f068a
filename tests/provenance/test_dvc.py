"""DVC's files and hashes: the content of `dvc.lock`, objects of the cache, outputs of a commit, settings of a tree."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from m3diff.provenance import cache, dvc
from m3diff.provenance.dvc import Lock
from m3diff.provenance.git import git
from m3diff.records.errors import DataError, Fault
from tests.errors import raises
from tests.provenance.conftest import commit_files

# What the stages of a project read and wrote, as (path, hash) of their entries
DEPENDENCIES = {
    "ingest@birds": {"data/raw/birds": "10.dir"},
    "ingest@gone": {"data/raw/gone": "11.dir"},
    "train": {"data/records": "21.dir", "data/base": "30.dir"},
}
OUTPUTS = {
    "ingest@birds": {"data/records/birds": "20", "data/records/birds.json": "22"},
    "ingest@gone": {"data/records/gone": "23"},
    "train": {"data/model/old_checkpoint": "40.dir", "data/model/log.json": "41"},
    "removed": {"data/removed": "50"},
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "ingest@birds": {"ingest.datasets.birds": {"reader": "pairs"}},
    "ingest@gone": {"ingest.datasets.gone": {"reader": "llava"}},
    "train": {"train": {"epochs": 2}},
}


def entries(hashes: dict[str, str]) -> list[dict[str, str]]:
    return [{"path": path, "hash": "md5", "md5": md5} for path, md5 in hashes.items()]


def text_of_lock() -> str:
    stages = {
        stage: {
            "cmd": "m3diff",
            "deps": entries(DEPENDENCIES.get(stage, {})),
            "params": {"params.yaml": PARAMETERS.get(stage, {})},
            "outs": entries(outputs),
        }
        for stage, outputs in OUTPUTS.items()
    }
    return yaml.safe_dump({"schema": "2.0", "stages": stages}, sort_keys=False)


@pytest.fixture
def lock() -> Lock:
    return Lock(text=text_of_lock().encode())


# The content of dvc.lock


def test_a_lock_is_read_from_its_file_or_a_text(tmp_path):
    (tmp_path / "dvc.lock").write_text(text_of_lock())
    lock_of_file = Lock(tmp_path / "dvc.lock")
    lock_of_text = Lock(text=text_of_lock().encode())
    assert list(lock_of_file.stages) == list(OUTPUTS)
    assert lock_of_file.stages == lock_of_text.stages
    assert lock_of_file.sha256 == lock_of_text.sha256


def test_a_missing_lock_is_refused(tmp_path):
    with raises(DataError, "dvc.no_lock", path=tmp_path / "dvc.lock"):
        Lock(tmp_path / "dvc.lock")


@pytest.mark.parametrize(
    "text", [b"", b"stages: [", b"\xff\xfe\xff", b"schema: '2.0'"], ids=["empty", "cut", "bytes", "no stages"]
)
def test_a_broken_lock_is_refused(text, tmp_path):
    (tmp_path / "dvc.lock").write_bytes(text)
    with raises(DataError, "dvc.broken_lock", path=tmp_path / "dvc.lock"):
        Lock(tmp_path / "dvc.lock")


def test_a_path_has_the_hash_that_each_stage_recorded(lock):
    assert lock.hashes(Path("data/records")) == {"train deps": "21.dir"}
    assert lock.hashes(Path("data/records/birds")) == {"ingest@birds outs": "20"}
    assert lock.hashes(Path("data")) == {}
    assert lock.recorded_hash(Path("data/raw/birds"), "ingest@birds deps") == "10.dir"
    with raises(DataError, "dvc.not_recorded", path=Path("data/raw/birds"), entry="ingest@birds outs"):
        lock.recorded_hash(Path("data/raw/birds"), "ingest@birds outs")


def test_the_parameters_of_a_run_are_those_of_the_datasets_that_it_has(lock):
    birds = {"ingest.datasets.birds": {"reader": "pairs"}}
    assert lock.params(["birds"]) == {**birds, "train": {"epochs": 2}}
    assert lock.params([]) == {"train": {"epochs": 2}}
    assert lock.stage_params("ingest@birds") == birds
    assert lock.stage_params("predict") == {}


def test_an_output_is_found_by_the_end_of_its_path(lock):
    assert lock.output("train", "log.json") == Path("data/model/log.json")
    assert lock.output("train", "checkpoint", "old_checkpoint") == Path("data/model/old_checkpoint")
    assert lock.output("train", "checkpoint") == Path("checkpoint")
    assert lock.output("predict", "checkpoint") == Path("checkpoint")


@pytest.fixture
def verified_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lock:
    """Return a lock that equals the folder `data` with a file and a folder, in the current directory."""
    monkeypatch.chdir(tmp_path)
    Path("data/part").mkdir(parents=True)
    Path("data/part/a.txt").write_text("a")
    Path("data/b.txt").write_text("b")
    hashes = {path: dvc.dvc_hash(Path(path)) for path in ("data", "data/part")}
    stages = {"one": {"outs": entries({"data/part": hashes["data/part"]})}, "two": {"deps": entries(hashes)}}
    return Lock(text=yaml.safe_dump({"stages": stages}).encode())


def test_a_path_that_equals_the_lock_has_its_hash(verified_lock):
    assert verified_lock.verified_hash(Path("data")) == dvc.dvc_hash(Path("data"))
    assert verified_lock.verified_hash(Path("data/part")).endswith(".dir")


def test_a_path_that_differs_from_the_lock_is_refused_with_both_hashes(verified_lock):
    recorded_hash = dvc.dvc_hash(Path("data/part"))
    Path("data/part/a.txt").write_text("edited")
    hashes = {"value": dvc.dvc_hash(Path("data/part")), "expected": recorded_hash}
    for path in ("data", "data/part"):
        with raises(DataError, "dvc.differs_from_lock", path=Path("data/part"), entry="one outs", **hashes):
            verified_lock.verified_hash(Path(path))


def test_a_path_that_is_not_on_disk_or_not_in_the_lock_is_refused(verified_lock):
    Path("other").mkdir()
    with raises(DataError, "dvc.not_in_lock", path=Path("other")):
        verified_lock.verified_hash(Path("other"))
    Path("data/part/a.txt").unlink()
    Path("data/part").rmdir()
    with raises(DataError, "dvc.not_on_disk", path=Path("data/part")):
        verified_lock.verified_hash(Path("data/part"))


# Hashes and objects of the cache


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder for which DVC 3.67 computes the hash HASH_OF_DATA."""
    (tmp_path / "data/a").mkdir(parents=True)
    (tmp_path / "data/a/b.txt").write_text("1\n")
    (tmp_path / "data/a.txt").write_text("2\n")
    (tmp_path / "data/c").write_text("3\n")
    return tmp_path / "data"


HASH_OF_DATA = "9e3406c825dfe7d5bc31b2f1ed8754e7.dir"


def test_a_folder_and_a_file_have_the_hashes_of_dvc(data):
    assert dvc.dvc_hash(data) == HASH_OF_DATA
    assert dvc.dvc_hash(data / "a.txt") == "26ab0db90d72e28ad0ba1e22ee510510"
    (data / "a" / "module.pyc").write_bytes(b"compiled")
    assert dvc.dvc_hash(data) == HASH_OF_DATA


def test_what_git_tracks_has_the_hash_of_the_same_files_on_disk(data, repository):
    data.rename("data")
    commit_files({"größe/maß.txt": "2\n"})
    Path("data/c").write_text("edited after the commit")
    assert dvc.hash_in_git("HEAD", Path("data")) == HASH_OF_DATA
    assert dvc.hash_in_git("HEAD", Path("data/a.txt")) == "26ab0db90d72e28ad0ba1e22ee510510"
    assert dvc.hash_in_git("HEAD", Path("größe")) == dvc.dvc_hash(Path("größe"))
    assert dvc.hash_in_git("HEAD", Path("missing")) is None


def test_the_list_of_a_folder_is_read_from_the_cache(tmp_path):
    object_of_list = tmp_path / "files/md5/9e/3406c825dfe7d5bc31b2f1ed8754e7.dir"
    object_of_list.parent.mkdir(parents=True)
    object_of_list.write_text('[{"md5": "01", "relpath": "a/b.txt"}, {"md5": "02", "relpath": "c"}]')
    assert dvc.object_file(tmp_path, HASH_OF_DATA) == object_of_list
    assert dvc.read_file_list(tmp_path, HASH_OF_DATA) == {"a/b.txt": "01", "c": "02"}
    assert dvc.read_file_list(tmp_path, "0" * 32 + ".dir") == {}


def test_an_object_of_a_file_is_no_list(tmp_path):
    object_of_file = tmp_path / "files/md5/9e/3406c825dfe7d5bc31b2f1ed8754e7"
    object_of_file.parent.mkdir(parents=True)
    object_of_file.write_text("2\n")
    assert dvc.read_file_list(tmp_path, HASH_OF_DATA.removesuffix(".dir")) == {}


@pytest.mark.parametrize("suffix", ["", ".dir"], ids=["a file", "a list"])
def test_only_an_object_with_another_content_is_damaged(suffix, tmp_path):
    (tmp_path / "object").write_text("2\n")
    assert dvc.fault_of_object(tmp_path / "object", f"26ab0db90d72e28ad0ba1e22ee510510{suffix}") is None
    (tmp_path / "object").write_text("3\n")
    damage = Fault("dvc.damaged_object", object=tmp_path / "object", value="6d7fce9fee471194aa8b5b6e47267f03")
    assert dvc.fault_of_object(tmp_path / "object", f"26ab0db90d72e28ad0ba1e22ee510510{suffix}") == damage


@pytest.mark.parametrize(
    ("name", "is_object"),
    [
        ("cache/files/md5/9e/3406c825dfe7d5bc31b2f1ed8754e7", True),
        ("cache/9e/3406c825dfe7d5bc31b2f1ed8754e7", True),
        ("elsewhere/files/md5/9e/3406c825dfe7d5bc31b2f1ed8754e7", False),
        ("cache/a.png", False),
    ],
    ids=["an object", "an object of DVC 2", "an object of another cache", "a file"],
)
def test_a_link_leads_to_an_object_of_this_cache_or_not(name, is_object, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_cache_of_repository", lambda folder: str(tmp_path / "cache"))
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("2\n")
    (tmp_path / "link.png").symlink_to(tmp_path / name)
    assert cache.is_cached_object(str(tmp_path / "link.png")) == is_object
    assert cache.is_cached_object(str(tmp_path / name)) == is_object


@pytest.mark.parametrize(
    ("exit_code", "output", "folder"),
    [(0, ".dvc/cache\n", "project/.dvc/cache"), (0, "../shared\n", "shared"), (1, "", None)],
    ids=["its own", "a shared one", "no repository of DVC"],
)
def test_the_cache_of_a_repository_is_the_folder_that_dvc_names(exit_code, output, folder, tmp_path, monkeypatch):
    cache._cache_of_repository.cache_clear()
    result = SimpleNamespace(returncode=exit_code, stdout=output)
    monkeypatch.setattr(cache.subprocess, "run", lambda *_, **__: result)
    cache_of_project = cache._cache_of_repository(str(tmp_path / "project"))
    assert cache_of_project == (str(tmp_path / folder) if folder else None)


# Stages and outputs of a commit

GRAPH = {
    "ingest": {"foreach": "${ingest.datasets}", "do": {"cmd": "m3diff ingest ${key}"}},
    "augment": {"foreach": "${augment}", "do": {"cmd": "m3diff augment ${key}"}},
    "train": {"cmd": "m3diff train"},
}


@pytest.fixture
def commit(repository: Path) -> str:
    """Return a commit with a lock that also has stages that were removed."""
    params = {"ingest": {"datasets": {"birds": {"reader": "pairs"}}}, "augment": None}
    files = {"dvc.yaml": yaml.safe_dump({"stages": GRAPH}), "params.yaml": yaml.safe_dump(params)}
    files |= {"dvc.lock": text_of_lock(), "data/base.dvc": "outs: [{path: base, md5: 30.dir}]\n"}
    return commit_files(files)


def test_only_stages_that_the_commit_defines_are_current(commit):
    stages = {"augment@birds": {}, **dict.fromkeys(OUTPUTS, {})}
    lock_with_augment = Lock(text=yaml.safe_dump({"stages": stages}, sort_keys=False).encode())
    assert dvc.current_stages(commit, lock_with_augment) == ["ingest@birds", "train"]


def test_outputs_of_a_commit_are_sorted_by_their_path(commit):
    lock_of_commit = dvc.read_lock(commit)
    assert list(dvc.tracked_outputs(commit, lock_of_commit).items()) == [
        (Path("data/base"), "30.dir"),
        (Path("data/model/log.json"), "41"),
        (Path("data/model/old_checkpoint"), "40.dir"),
        (Path("data/records/birds"), "20"),
        (Path("data/records/birds.json"), "22"),
    ]


def test_a_lock_of_a_commit_is_that_of_the_commit(commit):
    Path("dvc.lock").unlink()
    assert dvc.read_lock(commit).sha256 == Lock(text=text_of_lock().encode()).sha256
    with raises(DataError, "dvc.commit_without_lock", commit=f"{commit}^"):
        dvc.read_lock(f"{commit}^")


def test_a_commit_without_a_pipeline_is_refused(commit, lock):
    with raises(DataError, "dvc.commit_without_file", commit=f"{commit}^", file="dvc.yaml"):
        dvc.current_stages(f"{commit}^", lock)


def test_a_value_is_looked_up_by_its_dotted_path():
    values = {"train": {"base": "data/base", "epochs": 0}}
    assert dvc.lookup(values, "train.base") == "data/base"
    assert dvc.lookup(values, "train.epochs") == 0
    assert dvc.lookup(values, "train.base.name") is None
    assert dvc.lookup(values, "convert.questions") is None


def test_a_failed_command_of_dvc_without_output_is_explained_by_its_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(dvc, "DVC", [sys.executable, "-S", "-c", "raise SystemExit(3)"])
    with raises(DataError, "dvc.command_failed", command="dvc pull", folder=tmp_path, cause="exit code 3"):
        dvc.run_dvc(tmp_path, "pull")


# Working trees

SHARED_SETTINGS = """\
[core]
    remote = near
['remote "near"']
    url = ../../store
    ssl_verify = false
['remote "cloud"']
    url = s3://bucket/store
    credentialpath = ~/credentials
    region = here
    endpointurl = %(host)s
"""
LOCAL_SETTINGS = """\
[cache]
    dir = /old/cache
    type = symlink
['remote "cloud"']
    keyfile = key.pem
    ssl_verify = certificate.pem
    password = 50%(half)s
"""


def test_settings_of_a_tree_refer_to_the_files_of_the_checkout(tmp_path):
    from configobj import ConfigObj

    checkout = tmp_path / "checkout"
    tree = tmp_path / "runs" / "tree"
    for folder, name, text in ((tree, "config", SHARED_SETTINGS), (checkout, "config.local", LOCAL_SETTINGS)):
        (folder / ".dvc").mkdir(parents=True)
        (folder / ".dvc" / name).write_text(text)
    for name in ("certificate.pem", "here"):
        (checkout / name).write_text("")
    dvc.write_settings(tree, checkout, cache={"dir": str(checkout / ".dvc/cache")})
    written_settings = ConfigObj(str(tree / ".dvc" / "config.local"), interpolation=False)
    assert written_settings.dict() == {
        "cache": {"dir": str(checkout / ".dvc/cache"), "type": "symlink"},
        'remote "near"': {"url": str(tmp_path / "store")},
        'remote "cloud"': {
            "keyfile": str(checkout / ".dvc/key.pem"),
            "ssl_verify": str(checkout / "certificate.pem"),
            "password": "50%(half)s",
        },
    }


def test_no_tree_is_added_to_a_repository_in_which_no_run_can_begin(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(dvc, "cache_folder", lambda: tmp_path / "cache")
    git("branch", "runs")
    with raises(DataError, "git.branch_in_the_way", path=repository):
        dvc.add_worktree("HEAD", tmp_path / "tree")
    assert not (tmp_path / "tree").exists()


@pytest.mark.fault("P9")
def test_a_worktree_has_the_bytes_of_the_commit_whatever_autocrlf_says(repository, tmp_path, monkeypatch):
    (tmp_path / "settings").write_text("[core]\n\tautocrlf = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "settings"))
    commit = commit_files({".dvc/config": "[core]\n    analytics = false\n"})
    worktree = tmp_path / "mü ller"
    dvc.add_worktree(commit, worktree)
    assert (worktree / "params.yaml").read_bytes() == b"a\n"
    assert f"dir = {repository}/.dvc/cache" in (worktree / ".dvc/config.local").read_text(encoding="utf-8")
