"""The table of faults is whole: every row has a test that shows it, and every marker names a row."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.faults.table import NO_TEST_YET, ROWS

TESTS = Path(__file__).parents[1]
KEYS = [row.key for row in ROWS]


def marked() -> dict[str, set[str]]:
    """The tests that are marked with each key, as pytest names them."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                for key in keys_of(node):
                    found[key].add(f"{file.relative_to(TESTS.parent)}::{node.name}")
    return found


def keys_of(test: ast.FunctionDef) -> Iterator[str]:
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
            yield from (ast.literal_eval(key) for key in mark.args)


def test_every_row_has_a_test_or_a_reason_and_never_both():
    shown = marked()
    assert [key for key in KEYS if not shown[key] and key not in NO_TEST_YET] == []
    assert {key: shown[key] for key in NO_TEST_YET if shown[key]} == {}
    assert all(len(reason) > 20 for reason in NO_TEST_YET.values())


def test_a_marker_names_a_row_of_the_table():
    assert sorted(set(marked()) - set(KEYS)) == []
    assert sorted(set(NO_TEST_YET) - set(KEYS)) == []


def test_the_table_has_the_32_faults_and_what_was_broken_here_each_once():
    numbers = [f"{number:02}" for number in range(1, 33)]
    found_here = ["B1", "B2", *(f"S{number}" for number in range(1, 8)), *(f"P{number}" for number in range(1, 15))]
    found_here += [*(f"m{number}" for number in range(1, 10)), *(f"W{number}" for number in range(1, 6))]
    found_here += [f"T{number}" for number in (5, 9, 10, 12, 13, 14, 15, 17)]
    assert sorted([*numbers, *found_here, "see"]) == sorted(KEYS)
