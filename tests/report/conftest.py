"""The toy benchmark of six pairs: its folder, its evidence and its page."""

from pathlib import Path

import pytest

from m3diff.report.page import Evidence
from tests.scoring import bench
from tests.scoring.bench import draw, evidence


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    bench.write(root)
    return root


@pytest.fixture(scope="module")
def toy(root: Path) -> Evidence:
    return evidence(root, bench.pairs(root))


@pytest.fixture(scope="module")
def page(toy: Evidence, tmp_path_factory: pytest.TempPathFactory) -> str:
    return draw(toy, tmp_path_factory.mktemp("page"))
