"""A small CLEVR-Change for the tests of validate."""

from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

from tests.layouts import (
    judge_by_polars_alone,
    run_ingest,
    run_validate,
    write_clevr,
)

KEY = "CLEVR_default_000005.png"


@pytest.fixture
def raw(tmp_path) -> Path:
    return write_clevr(tmp_path / "raw")


@pytest.fixture
def quick(monkeypatch) -> None:
    judge_by_polars_alone(monkeypatch)


def quarantine(folder: Path) -> dict[str, str]:
    """Return the reasons by id, after checking that no row was lost."""
    frame = pl.read_parquet(folder / "clean/quarantine")
    clean = pl.read_parquet(folder / "clean/records")
    assert clean.height + frame.height == pq.read_table(folder / "records/mini/records").num_rows
    return dict(frame.select("id", "reason").iter_rows())


def ingest_and_validate(raw: Path, **changes) -> dict[str, str]:
    run_ingest(raw)
    run_validate(raw.parent, **changes)
    return quarantine(raw.parent)
