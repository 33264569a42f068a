import sys
from types import ModuleType

import pytest

from m3diff.commands.export.folder import export_model
from m3diff.records.errors import DataError


class CheckpointError(ValueError):
    """As the models' own."""


@pytest.fixture
def exported(monkeypatch) -> list:
    """The calls of `export_checkpoint`, which is tested with the models."""
    calls: list = []

    def export_checkpoint(*arguments):
        calls.append(arguments)
        if arguments[1].exists():
            raise CheckpointError(f"{arguments[1]}: exists")

    module = ModuleType("m3diff.models.checkpoint")
    module.CheckpointError, module.export_checkpoint = CheckpointError, export_checkpoint
    monkeypatch.setitem(sys.modules, "m3diff.models.checkpoint", module)
    return calls


@pytest.mark.parametrize("adapters", [False, True])
def test_the_trained_checkpoint_is_exported_where_it_is_asked(tmp_path, exported, adapters):
    export_model(tmp_path / "model", tmp_path / "out", adapters)
    assert exported == [(tmp_path / "model/checkpoint", tmp_path / "out", adapters)]


def test_a_checkpoint_that_cannot_be_exported_is_refused_as_data(tmp_path, exported):
    with pytest.raises(DataError, match="exists"):
        export_model(tmp_path / "model", tmp_path)
    assert exported[0][2] is False
