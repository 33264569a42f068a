"""The order of the tests, and which of the long ones a run of all tests takes."""

import fcntl
import gc
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

FAULTS = Path(__file__).parent / "faults"
LONG_S, SAMPLE_S = 45, 300
"""Of the tests of LONG_S seconds and more, and of the slow ones of faults, `make test-all` takes SAMPLE_S seconds,
`make test-long` each."""


def pytest_addoption(parser: pytest.Parser) -> None:
    today = int(time.time() // 86400)
    parser.addoption("--all", action="store_true", help="a sample of the longest tests, and every other")
    parser.addoption("--long", action="store_true", help="the tests alone of which --all takes a sample")
    parser.addoption(
        "--faults-seed", type=int, default=today, help="seed of the faults and of their sample; else the day"
    )


gc.disable()  # while everything is imported, which then stays: a quarter of the collection, and cheaper passes later


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how to run the same faults again."""
    terminalreporter.write_line(f"faults were sampled with --faults-seed {config.option.faults_seed}")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of this test alone; the same again with the same `--faults-seed`."""
    seed = request.config.option.faults_seed
    print(f"--faults-seed {seed}")
    return random.Random(f"{seed} {request.node.name}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The files with the longest tests first: a long test that begins last keeps all cores waiting.

    A mark `slow(200)` says how many seconds a test takes, `slow` alone that it is over ten; the rest keeps its order.
    """
    if config.option.long:
        items[:] = [item for item in items if is_sampled(item)]
    elif config.option.all:
        left_out = beyond_sample(items, config.option.faults_seed)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]
    longest: dict[object, float] = {}
    for item in items:
        if seconds := seconds_of(item):
            longest[item.path] = max(seconds, longest.get(item.path, 0))
    items.sort(key=lambda item: -longest.get(item.path, 0))


def beyond_sample(items: list[pytest.Item], seed: int) -> set[str]:
    """The tests that are left out this time."""
    seconds = {item.nodeid: seconds_of(item) for item in items if is_sampled(item)}
    spent, left_out = 0.0, set()
    for test in sorted(seconds, key=lambda test: random.Random(f"{seed} {test}").random()):  # a new one moves no other
        if spent + seconds[test] > SAMPLE_S:
            left_out.add(test)
        else:
            spent += seconds[test]
    return left_out


def is_sampled(item: pytest.Item) -> bool:
    """Return True if even `--all` takes this one on some days only."""
    of_faults = item.get_closest_marker("fault") is not None or item.path.is_relative_to(FAULTS)
    return seconds_of(item) >= LONG_S or (of_faults and seconds_of(item) > 0)


MadeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """`made_once(name, make)`: the folder that `make` fills, once for all workers; who writes to it takes a copy."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder, made = shared / name, shared / f"{name}.made"
        with (shared / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                shutil.rmtree(folder, ignore_errors=True)
                make(folder)
                made.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def built_once(made_once: MadeOnce) -> Path:
    """The toy project with nothing run yet."""
    from tests import toy

    return made_once("built-toy", toy.build)


@pytest.fixture(scope="session")
def trained_once(made_once: MadeOnce) -> Path:
    """The toy project whose stages ran."""
    from tests import toy

    return made_once("trained-toy", lambda root: toy.run(toy.build(root), "dvc", "repro", "-q"))


@pytest.fixture(scope="session")
def empty_store(made_once: MadeOnce) -> Path:
    """A database of MLflow that has its tables, which take seconds to make, and nothing in them."""

    def make(folder: Path) -> None:
        from mlflow.tracking import MlflowClient

        folder.mkdir()
        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()

    return made_once("empty-store", make) / "mlflow.db"


def seconds_of(item: pytest.Item) -> float:
    """Seconds of a test by its mark `slow`; 0 without one."""
    mark = item.get_closest_marker("slow")
    return (mark.args[0] if mark.args else 10) if mark else 0
