"""Test that tests do not open the stores of this checkout, which contain its users' MLflow runs and Prefect flows."""

import sqlite3
from pathlib import Path

import pytest

from tests.conftest import SERVICES, opened_stores
from tests.toy import REPOSITORY

MLFLOW = SERVICES / "mlflow" / "mlflow.db"


@pytest.mark.parametrize(
    "database",
    [
        pytest.param(MLFLOW, id="a path"),
        pytest.param(str(MLFLOW), id="text"),
        pytest.param(f"file:{MLFLOW}?mode=ro", id="an address"),
        pytest.param("services/mlflow/mlflow.db", id="relative to the checkout"),
    ],
)
def test_a_test_that_opens_a_store_of_this_checkout_fails(database, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(pytest.fail.Exception):
        sqlite3.connect(database, uri=str(database).startswith("file:"))
    assert len(opened_stores) == 1
    opened_stores.clear()


def test_a_store_elsewhere_is_opened(tmp_path: Path):
    sqlite3.connect(tmp_path / "mlflow.db").close()
    sqlite3.connect(":memory:").close()
    assert opened_stores == []
