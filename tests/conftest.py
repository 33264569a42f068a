"""The order of the tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files with the longest tests first: a long test that begins last keeps all cores waiting.

    A mark `slow(200)` says how many seconds a test takes, `slow` alone that it is over ten; the rest keeps its order.
    """
    longest: dict[object, float] = {}
    for item in items:
        if mark := item.get_closest_marker("slow"):
            seconds = mark.args[0] if mark.args else 10
            longest[item.path] = max(seconds, longest.get(item.path, 0))
    items.sort(key=lambda item: -longest.get(item.path, 0))
