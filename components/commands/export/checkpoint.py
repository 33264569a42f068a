"""The trained model as a folder of its own, for use elsewhere: `m3diff export FOLDER`."""

from pathlib import Path

from m3diff.records.errors import DataError


def export_model(model: Path, out: Path, adapters: bool = False) -> None:
    """Copy `model/checkpoint` to `out`: merged, or with `adapters` only what was trained and the way to its base.

    Raises:
        DataError: there is no checkpoint, it is damaged, or `out` exists; the text has the remedy.
    """
    from m3diff.models.checkpoint import CheckpointError, export_checkpoint

    try:
        export_checkpoint(model / "checkpoint", out, adapters)
    except CheckpointError as error:
        raise DataError(str(error)) from error
