"""The curves: columns, rows, what is carried over a checkpoint."""

import math
from pathlib import Path

import pytest

from m3diff.stages.train.progress import Curve, columns


def test_columns_follow_parts_and_datasets() -> None:
    rates, losses = ("lr_vision", "lr_llm"), ("val_loss", "val_loss_a", "val_loss_b")
    want = ("step", "epoch", "loss", *rates, "grad_norm", "module_score/2", *losses, "val_cider")
    assert columns(["vision", "llm"], ["module_score/2"], ["a", "b"]) == want


def test_rows_keep_what_they_were_given_and_are_written_and_read(tmp_path: Path) -> None:
    curve = Curve(("step", "loss", "val_loss"))
    curve.add({"step": 1, "loss": 0.123456789})
    curve.add({"step": 2, "loss": 2.0})
    curve.fill({"val_loss": 0.5})
    curve.write(tmp_path / "curves.csv")
    assert (tmp_path / "curves.csv").read_text() == "step,loss,val_loss\n1,0.123457,\n2,2,0.5\n"
    other = Curve(("step", "loss", "val_cider"))
    other.read(tmp_path / "curves.csv")
    assert other.rows == [
        {"step": "1", "loss": "0.123457", "val_cider": ""},
        {"step": "2", "loss": "2", "val_cider": ""},
    ]


def test_a_copy_stays_as_it_is() -> None:
    curve = Curve(("step", "loss"))
    curve.add({"step": 1})
    kept = curve.copy()
    curve.fill({"loss": 0.5})
    curve.add({"step": 2})
    assert kept.rows == [{"step": "1", "loss": ""}]


def test_the_last_value_of_a_column_is_the_last_that_is_there() -> None:
    curve = Curve(("step", "val_loss"))
    assert math.isnan(curve.last("val_loss"))
    for step, loss in ((1, 0.5), (2, 0.25), (3, None)):
        curve.add({"step": step, "val_loss": loss})
    assert curve.last("val_loss") == 0.25


def test_the_latest_row_is_the_last_that_has_all_of_some_columns() -> None:
    curve = Curve(("step", "loss", "a", "b"))
    for row in ({"a": 1, "b": 2}, {"a": 3, "b": 4}, {"a": 5}, {"loss": 6}):
        curve.add({"step": len(curve.rows) + 1, **row})
    assert curve.latest(("b", "a")) == {"step": 2, "b": 4, "a": 3}
    assert curve.latest(("loss", "a")) == {}


def test_a_column_that_is_not_there_is_a_programmer_s_fault() -> None:
    curve = Curve(("step",))
    with pytest.raises(AssertionError, match="no such columns: \\['loss'\\]"):
        curve.add({"loss": 1.0})
