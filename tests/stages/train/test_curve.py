"""The curves: columns, rows, what is carried over a checkpoint."""

import math
from pathlib import Path

from m3diff.stages.train.progress import Curve, columns


def test_columns_follow_parts_and_datasets() -> None:
    rates, losses = ("lr_vision", "lr_llm"), ("val_loss", "val_loss_a", "val_loss_b")
    want = ("step", "epoch", "loss", *rates, "grad_norm", "module_score/2", *losses, "val_cider")
    assert columns(["vision", "llm"], ["module_score/2"], ["a", "b"]) == want


def test_rows_keep_what_they_were_given_and_are_written_and_read(tmp_path: Path) -> None:
    curve = Curve(("step", "loss", "val_loss"))
    curve.add({"step": 1, "loss": 0.123456789})
    curve.add({"step": 2, "loss": 2.0})
    kept = curve.copy()
    curve.fill({"val_loss": 0.5})
    assert kept.rows[-1] == {"step": "2", "loss": "2", "val_loss": ""}, "a copy stays as it is"
    curve.write(tmp_path / "curves.csv")
    assert (tmp_path / "curves.csv").read_text() == "step,loss,val_loss\n1,0.123457,\n2,2,0.5\n"
    other = Curve(("step", "loss", "val_cider"))
    other.read(tmp_path / "curves.csv")
    assert other.rows == [
        {"step": "1", "loss": "0.123457", "val_cider": ""},
        {"step": "2", "loss": "2", "val_cider": ""},
    ]


def test_the_last_value_of_a_column_and_the_last_row_that_has_some() -> None:
    curve = Curve(("step", "loss", "a", "b"))
    assert math.isnan(curve.last("loss"))
    for row in ({"a": 1, "b": 2}, {"a": 3, "b": 4}, {"a": 5}, {"loss": 6}):
        curve.add({"step": len(curve.rows) + 1, **row})
    assert (curve.last("b"), curve.last("a")) == (4, 5)
    assert curve.latest(("b", "a")) == {"step": 2, "b": 4, "a": 3}
    assert curve.latest(("loss", "a")) == {}
