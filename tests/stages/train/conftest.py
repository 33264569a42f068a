"""Fixtures for training: the mixture, the base, and a process group with a single worker."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from m3diff.stages.train.job import choose_accelerator, single_worker_group
from tests.stages.train.toy import Workspace, write_mixture
from tests.tiny import tiny_base

choose_accelerator(False)  # the tests of this folder, and the processes they start, compute on the CPU


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("toy") / "mixture")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("toy") / "base")


@pytest.fixture
def alone() -> Iterator[None]:
    """Set up a process group with this process as the only worker."""
    # What is there before would cost the collection below seconds. It stays frozen, because thawing brings back all
    # modules that tests/conftest.py froze, and each later collection visits them
    gc.freeze()
    with single_worker_group(False):
        yield
        gc.collect()  # the group that an engine holds: a process that a later test forks would hang in its end


@pytest.fixture
def workspace(mixture: Path, base: Path, tmp_path: Path) -> Workspace:
    return Workspace(mixture, base, tmp_path)
