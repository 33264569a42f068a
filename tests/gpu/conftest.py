"""Fixtures of the tests that need a GPU. `make test-gpu` runs them, and `make test` does not."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from m3diff.models.device import Device, process_environment
from tests.stages.train.toy import write_mixture

if torch.cuda.is_available():
    os.environ.update(process_environment(gpu=True))  # before DeepSpeed is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests with a reason if torch cannot find a GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="torch sees no GPU on this machine"))


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("gpu") / "mixture")


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Compute fp32 products in fp32. TF32 would keep only ten bits."""
    matmul = torch.backends.cuda.matmul.allow_tf32
    convolution = torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = matmul
    torch.backends.cudnn.allow_tf32 = convolution


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Reset the compiler, because its limit of graphs applies to the whole process."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def cpu() -> Device:
    return Device(gpu=False, precision="fp32")
