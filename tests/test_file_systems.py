"""Test file systems that refuse chmod, links, locks or fsync, and the modes of written files under a umask."""

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from m3diff.models.checkpoint import write_manifest
from m3diff.records import copies, files
from m3diff.records.copies import copy_folder, link_or_copy
from m3diff.records.files import lock_exclusively, new_folder, open_atomically, write_atomic
from m3diff.stages.train import state
from tests.layouts import save_picture
from tests.toy import REPOSITORY


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o077, 0o022, 0o002, 0o027, 0o000], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_whole_file_has_the_mode_of_a_plain_one(tmp_path, umask):
    (tmp_path / "plain").write_text("x")
    write_atomic(tmp_path / "whole", "x")
    assert mode_of(tmp_path / "whole") == mode_of(tmp_path / "plain") == 0o666 & ~umask


def test_a_whole_file_in_place_of_an_older_one_has_the_mode_of_a_plain_one(tmp_path, umask):
    (tmp_path / "whole").write_text("old")
    (tmp_path / "whole").chmod(0o444)
    write_atomic(tmp_path / "whole", "new")
    assert mode_of(tmp_path / "whole") == 0o666 & ~umask


def test_folders_have_the_mode_of_plain_ones(tmp_path, umask):
    with new_folder(tmp_path / "below/made") as folder_to_fill:
        folder_to_fill.mkdir()
        (folder_to_fill / "file").write_text("x")
    write_atomic(tmp_path / "other/file", "x")
    for folder in ("below", "below/made", "other"):
        assert mode_of(tmp_path / folder) == 0o777 & ~umask
    assert mode_of(tmp_path / "below/made/file") == 0o666 & ~umask


def test_a_copied_folder_has_the_modes_of_new_files(tmp_path, umask):
    (tmp_path / "from/inner").mkdir(parents=True)
    for name in ("read_only", "inner/private", "left.out"):
        (tmp_path / "from" / name).write_text(name)
        (tmp_path / "from" / name).chmod(0o400)
    (tmp_path / "from/link").symlink_to("read_only")
    target = copy_folder(tmp_path / "from", tmp_path / "to", lambda _folder, names: {n for n in names if "." in n})
    listed = sorted(path.relative_to(target).as_posix() for path in target.rglob("*"))
    assert listed == ["inner", "inner/private", "link", "read_only"]
    assert (target / "link").read_text() == "read_only"
    assert not (target / "link").is_symlink()
    assert mode_of(target / "inner") == 0o777 & ~umask
    for name in ("read_only", "inner/private", "link"):
        assert mode_of(target / name) == 0o666 & ~umask


def test_a_folder_is_not_copied_over_another(tmp_path):
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    with pytest.raises(FileExistsError):
        copy_folder(tmp_path / "from", tmp_path / "to")


def test_weights_have_the_mode_of_a_plain_file(tmp_path, umask):
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    write_manifest(tmp_path, step=1)
    for name in ("model.safetensors", "manifest.json"):
        assert mode_of(tmp_path / name) == 0o666 & ~umask


def refuse(code: int):
    def call(*_arguments: object, **_options: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


REFUSALS = [errno.EPERM, errno.ENOTSUP, errno.EACCES]


@pytest.mark.parametrize("code", REFUSALS, ids=errno.errorcode.get)
def test_files_are_written_if_chmod_is_refused(code, tmp_path, monkeypatch):
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    for name in ("chmod", "lchmod", "fchmod", "chown", "link", "setxattr"):
        monkeypatch.setattr(os, name, refuse(code), raising=False)
    write_atomic(tmp_path / "file", "x")
    write_manifest(tmp_path, step=1)
    copied = copy_folder(tmp_path, tmp_path.with_name(f"{tmp_path.name}-copied"))
    assert (tmp_path / "file").read_text() == "x"
    assert sorted(path.name for path in copied.iterdir()) == ["file", "manifest.json", "model.safetensors"]


@pytest.mark.parametrize("code", [*REFUSALS, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_copy_replaces_a_link_that_is_refused(code, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(os, "symlink", refuse(code))
    link_or_copy(tmp_path / "file", tmp_path / "link")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_text() == "x"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP], ids=errno.errorcode.get)
def test_files_and_checkpoints_are_written_if_fsync_is_not_supported(code, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refuse(code))
    write_atomic(tmp_path / "file", "x")
    state._flush(tmp_path)
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_a_disk_error_is_raised_and_leaves_no_file(code, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refuse(code))
    with pytest.raises(OSError) as raised:
        write_atomic(tmp_path / "file", "x")
    assert raised.value.errno == code
    assert list(tmp_path.iterdir()) == []


def test_a_failed_writer_leaves_only_the_older_file(tmp_path):
    write_atomic(tmp_path / "file", "old")

    def write_half() -> None:
        with open_atomically(tmp_path / "file") as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL], ids=errno.errorcode.get)
def test_a_file_system_without_locks_is_named_and_work_goes_on(code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fcntl.flock", refuse(code))
    with (tmp_path / "a.lock").open("a") as file:
        lock_exclusively(file, wait=False)
    assert "a.lock" in capsys.readouterr().err


def test_a_lock_of_another_process_is_refused(tmp_path):
    with (tmp_path / "a.lock").open("a") as first_file, (tmp_path / "a.lock").open("a") as second_file:
        lock_exclusively(first_file)
        with pytest.raises(BlockingIOError):
            lock_exclusively(second_file, wait=False)


def test_only_the_tested_functions_make_calls_that_file_systems_refuse():
    calls = ("os.chmod(", "shutil.copy(", "shutil.copy2(", "shutil.copytree(", "fcntl.flock(", "os.fsync(", "os.link(")
    users = set()
    for path in (REPOSITORY / "components").rglob("*.py"):
        text = path.read_text("utf-8")
        users |= {f"{path.name} {call}" for call in calls if call in text}
    assert users == {"files.py fcntl.flock(", "files.py os.fsync("}
    assert Path(files.__file__).parent == Path(copies.__file__).parent


CODE = """
import os, sys
def refuse(*arguments, **named):
    raise PermissionError(1, "Operation not permitted")
for name in ("chmod", "fchmod", "lchmod", "chown", "link", "symlink"):
    setattr(os, name, refuse)
"""


def test_ingest_follows_the_umask_if_chmod_and_links_are_refused(tmp_path):
    save_picture(tmp_path / "raw/a.png", 1)
    save_picture(tmp_path / "raw/b.png", 2)
    (tmp_path / "raw/pairs.csv").write_text("before,after,captions,split\na.png,b.png,the lamp is gone,train\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(CODE)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os; os.umask(0o077)\n"
            "from pathlib import Path; from m3diff.stages.ingest.params import DatasetEntry;"
            "from m3diff.stages.ingest.stage import ingest;"
            "ingest('mine', DatasetEntry(reader='pairs', root=Path('raw')), Path('cache.parquet'), Path('records'))",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'site'}:{REPOSITORY}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for name in ("records/mine.json", "records/mine/records/00000.parquet", "cache.parquet"):
        assert mode_of(tmp_path / name) == 0o600
