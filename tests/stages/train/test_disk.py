"""A disk without room: refused before the first step, named where it runs out in mid-run; what was written stands."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from m3diff.models import checkpoint
from m3diff.stages.train import loop, state
from m3diff.stages.train.attempts import NotWrittenError, full_disk_explained, is_disk_full, require_room
from m3diff.stages.train.state import checkpoints, latest_valid_checkpoint
from tests.stages.train.test_state import write_one
from tests.stages.train.toy import recipe, run

FULL = (
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
)
TRAINABLE = 21657


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size))


def test_only_a_full_disk_is_one() -> None:
    assert all(is_disk_full(error) for error in FULL)
    for error in (OSError(errno.EIO, "I/O error"), SafetensorError("File too large (os error 27)"), ValueError("28")):
        assert not is_disk_full(error)


@pytest.mark.parametrize(("there", "needed"), [(0, 4800), (1, 3600), (3, 1200), (7, 1200)])
def test_room_for_what_is_kept_and_what_is_written_is_asked_for_first(
    there: int, needed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, needed)
    require_room(tmp_path, 100, 3, there)
    free(monkeypatch, needed - 1)
    with pytest.raises(
        NotWrittenError, match=f"{tmp_path}: .*{needed:,} bytes more are needed, {needed - 1:,} are free"
    ):
        require_room(tmp_path, 100, 3, there)


@pytest.mark.parametrize("fault", FULL, ids=lambda fault: type(fault).__name__)
def test_where_the_disk_is_full_the_part_is_removed_and_the_error_says_what_is_needed(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "new"
    free(monkeypatch, 1000)
    with pytest.raises(NotWrittenError, match=f"{folder}: the disk is full: 2,000 bytes are needed, 1,000 are free"):
        half_written(folder, fault)
    assert not folder.exists()
    with pytest.raises(OSError, match="a bad disk"):
        half_written(folder, OSError(errno.EIO, "a bad disk"))
    assert folder.exists()


def half_written(folder: Path, fault: Exception) -> None:
    with full_disk_explained(folder, 2000):
        folder.mkdir()
        (folder / "half").write_text("half")
        raise fault


@pytest.mark.fault("10")
@pytest.mark.parametrize("at", ["save_file", "write_manifest", "_flush"])
def test_a_checkpoint_that_finds_the_disk_full_leaves_the_older_ones(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write_one(tmp_path, step)
    original = getattr(state, at)
    monkeypatch.setattr(state, at, full_after(original, 0))
    with pytest.raises(NotWrittenError, match=r"writing: the disk is full: 12,000 bytes are needed"):
        write_one(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    monkeypatch.setattr(state, at, original)
    write_one(tmp_path, 3)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]


def full_after(original: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """The function, and from then on a full disk after its work."""
    made: list[int] = []

    def full(*given: Any, **named: Any) -> None:
        original(*given, **named)
        made.append(1)
        if len(made) > calls:
            raise OSError(errno.ENOSPC, "No space left on device")

    return full


@pytest.mark.fault("10")
def test_a_run_is_refused_before_its_first_step_where_its_checkpoints_have_no_room(
    mixture: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    needed = 3 * TRAINABLE * 12
    monkeypatch.setattr(loop.Training, "step", lambda *given: pytest.fail("a step was taken"))
    free(monkeypatch, needed - 1)
    with pytest.raises(NotWrittenError, match=f"{needed:,} bytes more are needed, {needed - 1:,} are free"):
        run(recipe(base), mixture, tmp_path)
    free(monkeypatch, 4 * TRAINABLE * 12 - 1)
    with pytest.raises(NotWrittenError, match="keeps 3 checkpoints"):
        run(recipe(base, caption_val_pairs=1), mixture, tmp_path)
    assert "goes on from the newest checkpoint" not in capfd.readouterr().out, "tried again, though the disk is full"


@pytest.mark.fault("10")
@pytest.mark.parametrize("where", ["checkpoint", "scores", "export"])
def test_a_run_that_finds_the_disk_full_ends_at_once_and_goes_on_when_there_is_room(
    where: str, mixture: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if where == "checkpoint":
            patch.setattr(state, "save_file", full_after(state.save_file, 4))
        elif where == "scores":
            patch.setattr(loop, "write_atomic", full_after(loop.write_atomic, 3))  # hours and scores by turns
        else:
            patch.setattr(checkpoint, "merge", full_after(checkpoint.merge, 0))
        with pytest.raises(NotWrittenError, match="disk is full"):
            run(recipe(base), mixture, tmp_path)
    assert capfd.readouterr().out.count("starts at step 1 of 6") == 1, "tried again, though the disk is full"
    (run_dir,) = (path for path in (tmp_path / "runs" / "train").iterdir() if path.is_dir())
    found = latest_valid_checkpoint(run_dir)
    assert found is not None
    assert found.name == {"checkpoint": "step-00000002", "scores": "step-00000004", "export": "step-00000006"}[where]
    assert not (tmp_path / "out" / "checkpoint").exists()
    got = run(recipe(base), mixture, tmp_path)
    assert f"resumed after step {int(found.name[-1])} of 6" in capfd.readouterr().out
    assert len(got.curve) == got.report.steps == 6
