"""The toy benchmark of six pairs: its folder, the content of its page and the page."""

from pathlib import Path

import pytest

from m3diff.report.page import PageContent
from tests.scoring import bench
from tests.scoring.bench import draw, page_content


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    bench.write(root)
    return root


@pytest.fixture(scope="module")
def toy(root: Path) -> PageContent:
    return page_content(root, bench.pairs(root))


@pytest.fixture(scope="module")
def page(toy: PageContent, tmp_path_factory: pytest.TempPathFactory) -> str:
    return draw(toy, tmp_path_factory.mktemp("page"))
