"""A BLIP-2 directory with OPT and one with Qwen2, made once."""

from pathlib import Path

import pytest

from tests.tiny_blip2 import TEXTS, tiny_blip2


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("blip2")
    return {llm: tiny_blip2(root / llm, llm) for llm in TEXTS}


@pytest.fixture(scope="session")
def base(bases: dict[str, Path]) -> Path:
    """With OPT, as published."""
    return bases["opt"]
