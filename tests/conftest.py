"""Order the tests, choose the sample of long tests that `--all` runs, and define shared fixtures."""

import fcntl
import gc
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from m3diff.runtime import prepare

prepare()  # as each entry point does, before a test imports a tool

# In an environment that forbids compiled files, each worker spends a quarter of its collection on compiling all tests
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

FAULTS = Path(__file__).parent / "faults"
SERVICES = Path(__file__).parents[1] / "services"  # the stores that the users of this checkout work with
LONG_S = 45
SAMPLE_S = 600
"""`make test-all` runs SAMPLE_S seconds of the tests that take LONG_S seconds or more and of the slow tests of faults.
`make test-long` runs all of them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    # The number changes every six hours, so that every test is soon in a sample. Until then, a run can be repeated
    quarter_of_day = int(time.time() // 21600)
    parser.addoption("--all", action="store_true", help="a sample of the longest tests, and every other")
    parser.addoption("--long", action="store_true", help="the tests alone of which --all takes a sample")
    parser.addoption(
        "--faults-seed",
        type=int,
        default=quarter_of_day,
        help="seed of the faults and of their sample; by default a number that changes every six hours",
    )


# Imported modules stay, so collecting garbage during imports is wasted time, a quarter of that of pytest's collection.
# `gc.freeze` then excludes these objects, which makes later passes cheaper. With Python's own threshold of 700 objects,
# collection takes 8 % of the time of a test that builds models, and two thirds of the time of a test that parses the
# code.
GC_THRESHOLDS = (20_000, 20, 20)
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how to inject the same faults again."""
    terminalreporter.write_line(f"faults were sampled with --faults-seed {config.option.faults_seed}")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Return a random generator for this test. `--faults-seed` reproduces its numbers."""
    seed = request.config.option.faults_seed
    print(f"--faults-seed {seed}")
    return random.Random(f"{seed} {request.node.name}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with the longest tests first, because a long test that starts last keeps the other cores idle.

    The mark `slow(200)` gives the seconds of a test; `slow` alone means more than ten. Other files keep their order.
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
    """Return the names of the tests that this run leaves out."""
    seconds = {item.nodeid: seconds_of(item) for item in items if is_sampled(item)}
    spent = 0.0
    left_out = set()
    # The position of a test depends only on its name, so that a new test does not change the order of others
    for test in sorted(seconds, key=lambda test: random.Random(f"{seed} {test}").random()):
        if spent + seconds[test] > SAMPLE_S:
            left_out.add(test)
        else:
            spent += seconds[test]
    return left_out


def is_sampled(item: pytest.Item) -> bool:
    """Return whether `--all` runs this test only with some seeds."""
    is_fault_test = item.get_closest_marker("fault") is not None or item.path.is_relative_to(FAULTS)
    return seconds_of(item) >= LONG_S or (is_fault_test and seconds_of(item) > 0)


# Databases of this checkout that the running test has opened
opened_stores: list[str] = []


def refuse_own_stores(event: str, arguments: tuple[Any, ...]) -> None:
    """Fail a test that opens a database in the checkout's `services/`, before it is opened. This is an audit hook.

    Otherwise the runs of a test would appear in MLflow among the runs of the checkout's users.
    """
    if event != "sqlite3.connect" or isinstance(arguments[0], bytes):
        return
    database = str(arguments[0]).removeprefix("file:").partition("?")[0]
    if database == ":memory:" or not Path(database).resolve().is_relative_to(SERVICES):
        return
    opened_stores.append(database)
    pytest.fail(f"{database} is the store of this checkout; name another in register.tracking_uri")


sys.addaudithook(refuse_own_stores)


@pytest.fixture(autouse=True)
def own_stores_stay_closed() -> Iterator[None]:
    """Fail a test that opened such a database even if a library or a thread hid the failure."""
    opened_stores.clear()
    yield
    assert opened_stores == [], "the test opened a store of this checkout"


@pytest.fixture(autouse=True)
def logging_stays_unchanged() -> Iterator[None]:
    """Fail a test that changes the levels of logging, because a later test could then miss a warning."""
    levels = logging.root.level, logging.root.manager.disable
    yield
    assert (logging.root.level, logging.root.manager.disable) == levels


MadeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Return a function of a name and `make` that calls `make(folder)` once for all workers and returns the folder.

    A test that writes to the folder must copy it.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder = shared / name
        marker = shared / f"{name}.made"
        with (shared / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not marker.exists():
                shutil.rmtree(folder, ignore_errors=True)
                make(folder)
                marker.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def built_once(made_once: MadeOnce) -> Path:
    """Return the toy project before any stage has run."""
    from tests import toy

    return made_once("built-toy", toy.build)


@pytest.fixture(scope="session")
def trained_once(made_once: MadeOnce) -> Path:
    """Return the toy project after all stages have run."""
    from tests import toy

    return made_once("trained-toy", lambda root: toy.run(toy.build(root), "dvc", "repro", "-q"))


@pytest.fixture(scope="session")
def empty_store(made_once: MadeOnce) -> Path:
    """Return an empty MLflow database that already has its tables, since they take seconds to create."""

    def make(folder: Path) -> None:
        from mlflow.tracking import MlflowClient

        folder.mkdir()
        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()

    return made_once("empty-store", make) / "mlflow.db"


def seconds_of(item: pytest.Item) -> float:
    """Return the seconds in the mark `slow` of a test, or 0 without the mark."""
    mark = item.get_closest_marker("slow")
    return (mark.args[0] if mark.args else 10) if mark else 0
