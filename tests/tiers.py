"""Choose which cases of a parametrized test are quick tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(names: Iterable[str], *quick_names: str) -> list[Any]:
    """Return the cases for `pytest.mark.parametrize`, all marked slow except the cases in `quick_names`.

    Use this if a quick test of one or two cases finds most faults, and the others together take long.
    """
    cases = list(names)
    unknown = {*quick_names} - {*cases}
    assert not unknown, f"no case is called {unknown}"
    return [pytest.param(name, id=name, marks=() if name in quick_names else pytest.mark.slow(8)) for name in cases]
