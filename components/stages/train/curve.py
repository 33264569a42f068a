"""The run's curves: a row per step, written as `curves.csv`."""

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

from m3diff.records.files import write_atomic


def columns(parts: Iterable[str], module: Iterable[str], datasets: Iterable[str]) -> tuple[str, ...]:
    """step, epoch, loss, a learning rate for each part, grad_norm, the `module`'s numbers, val_loss over all and of
    each dataset, val_cider."""
    rates, losses = [f"lr_{part}" for part in parts], [f"val_loss_{dataset}" for dataset in datasets]
    return ("step", "epoch", "loss", *rates, "grad_norm", *module, "val_loss", *losses, "val_cider")


class Curve:
    """Rows of text by column; what a step does not have stays empty. They travel with each checkpoint, so that a
    resumed run loses none."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.rows: list[dict[str, str]] = []

    def add(self, values: Mapping[str, float | None]) -> None:
        """A step's row."""
        self.rows.append({name: "" for name in self.names})
        self.fill(values)

    def fill(self, values: Mapping[str, float | None]) -> None:
        """More values of the last row."""
        unknown = values.keys() - set(self.names)
        assert not unknown, f"no such columns: {sorted(unknown)}"
        self.rows[-1] |= {name: f"{value:.6g}" for name, value in values.items() if value is not None}

    def copy(self) -> "Curve":
        """The curves as they are: what is added or filled in later is not in them."""
        other = Curve(self.names)
        other.rows = [*self.rows[:-1], *(dict(row) for row in self.rows[-1:])]  # `fill` changes the last row alone
        return other

    def last(self, column: str) -> float:
        """The last value of a column, NaN where it has none."""
        return next((float(row[column]) for row in reversed(self.rows) if row[column]), float("nan"))

    def latest(self, columns: Iterable[str]) -> dict[str, float]:
        """`step` and the columns, of the last row that has a value in all of them; nothing where no row has."""
        wanted = ("step", *columns)
        found = next((row for row in reversed(self.rows) if all(row[name] for name in wanted)), None)
        return {name: float(found[name]) for name in wanted} if found else {}

    def read(self, path: Path) -> None:
        """Take the rows of an earlier part of the run; columns that are not this run's are left out."""
        with path.open(newline="") as file:
            self.rows = [{name: row.get(name, "") for name in self.names} for row in csv.DictReader(file)]

    def write(self, path: Path) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, self.names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomic(path, text.getvalue())
