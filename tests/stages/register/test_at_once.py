"""Registrations at the same moment, and one that is killed before each of its durable writes, N of N."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import LoggedModelStatus

from tests.stages.register.conftest import project
from tests.stages.register.forks import KILLED, Forks
from tests.toy import store

SAMPLE, SEED = 5, 20261122
NEEDED = ("INTO runs", "INTO logged_models", "INTO model_versions", "file report.html", "INTO registered_model")


@pytest.fixture(scope="module")
def warm(trained_once: Path) -> Iterator[Forks]:
    forks = Forks(trained_once)
    yield forks
    forks.process.communicate()


@pytest.fixture(scope="module")
def undisturbed(warm: Forks, trained_once: Path, empty_store: Path, tmp_path_factory) -> tuple[dict, list[str]]:
    """What one registration leaves, and its durable writes."""
    root = project(trained_once, empty_store, tmp_path_factory.mktemp("undisturbed"))
    assert warm.register(root) == [0]
    return left(root), (root / "services/writes.txt").read_text().splitlines()


def left(root: Path) -> dict[str, Any]:
    """What a store holds, without what differs from one registration to the next: ids, times, the process."""
    client = store(root)
    (experiment,) = [found for found in client.search_experiments() if found.name == "m3diff"]
    runs = client.search_runs([experiment.experiment_id])
    models = client.search_logged_models([experiment.experiment_id])
    versions = client.search_model_versions("name = 'm3diff'")
    assert {version.run_id for version in versions} == {run.info.run_id for run in runs}
    assert {version.source for version in versions} == {model.model_uri for model in models}
    folders = root / "services/mlflow/artifacts/m3diff"
    stored = {path.parent.name: path for path in folders.glob("models/*/artifacts")}
    assert set(stored) == {model.model_id for model in models}, "no files of a model that is gone"
    (files,) = [sorted(str(file.relative_to(path)) for file in path.rglob("*")) for path in stored.values()]
    return {
        "runs": [(run.info.status, run.info.run_name, run.data.params, sorted(run.data.metrics)) for run in runs],
        "tags": [{tag: run.data.tags[tag] for tag in versions[0].tags} for run in runs],
        "inputs": [[data.dataset.digest for data in run.inputs.dataset_inputs] for run in runs],
        "artifacts": [sorted(found.path for found in client.list_artifacts(run.info.run_id)) for run in runs],
        "models": [(model.name, model.status == LoggedModelStatus.READY) for model in models],
        "files": files,
        "versions": [version.tags for version in versions],
        "aliases": dict(client.get_registered_model("m3diff").aliases),
    }


@pytest.mark.fault("m1")
@pytest.mark.slow(30)
@pytest.mark.parametrize("lock", [True, False], ids=["one machine", "three machines"])
def test_three_registrations_at_once_make_one_version_of_one_run(
    warm, trained_once, empty_store, tmp_path, undisturbed, lock
):
    root = project(trained_once, empty_store, tmp_path)
    assert warm.register(root, at_once=3, lock=lock) == [0, 0, 0]
    assert left(root) == undisturbed[0]


@pytest.mark.fault("m2")
@pytest.mark.parametrize(
    "sample",
    [pytest.param(True, marks=pytest.mark.slow(45)), pytest.param(False, marks=pytest.mark.slow(240))],
    ids=["some", "all"],
)
def test_killed_before_any_of_its_writes_it_leaves_nothing_pending_and_the_next_one_ends_it(
    warm, undisturbed, trained_once, empty_store, tmp_path, sample
):
    """Killed after a write is killed before the next one: nothing durable is between the two."""
    expected, writes = undisturbed
    print(f"{len(writes)} durable writes")
    assert len(writes) > 20
    assert all(any(needed in name for name in writes) for needed in NEEDED), writes
    kills, wrong = list(range(1, len(writes))), {}
    for at in sorted(random.Random(SEED).sample(kills, SAMPLE)) if sample else kills:
        root = project(trained_once, empty_store, tmp_path / str(at))
        assert warm.register(root, kill_at=at) == [KILLED]
        assert warm.register(root) == [0]
        if (found := left(root)) != expected:
            wrong[f"{at}: before {writes[at]}"] = {key: found[key] for key in found if found[key] != expected[key]}
        shutil.rmtree(root)
    assert wrong == {}, wrong
