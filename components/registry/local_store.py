"""Read a version of the registered model from MLflow's sqlite file without importing MLflow.

Importing MLflow takes about as long as loading a small model, and `m3diff caption` needs only three values of one
version. The SQL statements are equivalent to those of MLflow (SqlAlchemyStore of the 3.17 series), and the tests
compare the results. Nothing is written. A version is not found in this way if the tables belong to another MLflow
version, the store was moved, or files are missing. The caller then uses MLflow, which repairs the store or explains the
error.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from m3diff.records.errors import DataError

SQLITE = "sqlite:///"
# Folder in the project where DVC runs queued experiments in copies of the project
EXPERIMENTS_FOLDER = "/.dvc/tmp/exps/"
ARTIFACTS_FOLDER = "artifacts"  # folder of the artifacts, next to the database
CHECKPOINT_PATH = "artifacts/checkpoint"  # path of the checkpoint within a version's files
TOKEN_LIMIT_TAG = "predict.max_new_tokens"  # tag with the length limit, in tokens, of the captions that were scored
IN_MEMORY = ":memory:"  # part of the URI of an in-memory store
LATEST_ALIAS = "latest"  # alias of the newest version, which only MLflow resolves
MAX_WAIT_S = 20.0  # maximum time to wait for another process that is writing, in seconds

SELECT_ALIAS = "SELECT version FROM registered_model_aliases WHERE name = ? AND alias = ?"
# MLflow keeps the row of a deleted version but never returns it
FROM_VERSIONS = "FROM model_versions WHERE name = ? AND current_stage != 'Deleted_Internal'"
SELECT_LOCATION = f"SELECT coalesce(nullif(storage_location, ''), source) {FROM_VERSIONS} AND version = ?"
SELECT_TAG = "SELECT value FROM model_version_tags WHERE name = ? AND version = ? AND key = ?"
SELECT_TAGS = "SELECT key, value FROM model_version_tags WHERE name = ? AND version = ?"


@dataclass(frozen=True)
class StoredVersion:
    """A version whose files are on this machine.

    Attributes:
        checkpoint: the folder in which MLflow stores the checkpoint.
        max_new_tokens: the length limit of captions in tokens, or None if the version has no such tag.
    """

    number: int
    checkpoint: Path
    max_new_tokens: int | None


def database_path(tracking_uri: str) -> Path:
    """Return the path of a sqlite store's database file.

    A relative path is resolved from the project folder, even if DVC runs an experiment in a copy of the project.
    """
    project = str(Path.cwd()).partition(EXPERIMENTS_FOLDER)[0]
    return Path(project, tracking_uri.removeprefix(SQLITE)).resolve()


class NoSuchVersionError(DataError):
    """The registry has no such version or alias. The field `numbers` lists the existing versions."""


def no_such_version_error(model_name: str, version: str, numbers: Sequence[int]) -> NoSuchVersionError:
    """Return the error for a version or alias that does not exist. `numbers` lists the existing versions."""
    code = "registry.no_such_version" if numbers else "registry.no_versions"
    return NoSuchVersionError(code, model=model_name, value=version, numbers=list(numbers))


def find_stored_version(tracking_uri: str, model_name: str, version: str) -> StoredVersion | None:
    """Find a version by its number or alias.

    Returns:
        the version, or None if only MLflow can find it.

    Raises:
        NoSuchVersionError: the store has no such version, or its file does not exist.
    """
    if not tracking_uri.startswith(SQLITE) or IN_MEMORY in tracking_uri or version.lower() == LATEST_ALIAS:
        return None
    database = database_path(tracking_uri)
    if not database.is_file():
        raise NoSuchVersionError("registry.no_database", model=model_name, value=version, numbers=[], database=database)
    try:
        # mode=ro: no file is created or changed
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=MAX_WAIT_S)) as store:
            store.execute("BEGIN")  # one transaction, so that alias, version and tag are consistent
            return _read_version(store, database, model_name, version)
    except sqlite3.Error:
        return None


def _read_version(store: sqlite3.Connection, database: Path, model_name: str, version: str) -> StoredVersion | None:
    numbers = [int(version)] if version.isdecimal() else _query_column(store, SELECT_ALIAS, model_name, version)
    locations: list[str] = []
    for number in numbers:
        locations += _query_column(store, SELECT_LOCATION, model_name, number)
    if not locations:
        known_versions = sorted(_query_column(store, f"SELECT version {FROM_VERSIONS}", model_name), reverse=True)
        raise no_such_version_error(model_name, version, known_versions)
    if len(locations) > 1:  # several MLflow workspaces have a model of this name
        return None
    checkpoint = find_checkpoint(database, str(locations[0]))
    if checkpoint is None:
        return None
    limits = _query_column(store, SELECT_TAG, model_name, numbers[0], TOKEN_LIMIT_TAG)
    return StoredVersion(
        number=numbers[0],
        checkpoint=checkpoint,
        max_new_tokens=int(limits[0]) if limits else None,
    )


def read_stored_tags(tracking_uri: str, model_name: str, number: int) -> dict[str, str]:
    """Return the tags of a version by name, or an empty dict if the store is not a file on this machine.

    Raises:
        sqlite3.Error: the file is not an MLflow store, or is locked.
    """
    database = database_path(tracking_uri)
    if not tracking_uri.startswith(SQLITE) or not database.is_file():
        return {}
    with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=MAX_WAIT_S)) as store:
        return dict(store.execute(SELECT_TAGS, (model_name, number)).fetchall())


def find_checkpoint(database: Path, location: str) -> Path | None:
    """Return the checkpoint folder of a version.

    Args:
        location: the URI of the version's files.

    Returns:
        the folder, or None if it does not exist or is not next to the database, for example after the store was moved.
    """
    artifacts_address = f"{(database.parent / ARTIFACTS_FOLDER).as_uri()}/"
    if not location.startswith(artifacts_address):
        return None
    folder = Path(unquote(urlsplit(location).path)) / CHECKPOINT_PATH
    return folder if folder.is_dir() else None


def _query_column(store: sqlite3.Connection, statement: str, *values: str | int) -> list:
    """Execute an SQL statement and return the first column of the result."""
    return [row[0] for row in store.execute(statement, values)]
