"""The table of faults is whole: every row has a test that shows it, and every marker names a row."""

import ast
from pathlib import Path

from tests.faults.table import KEYS

TESTS = Path(__file__).parents[1]


def marked() -> set[str]:
    """The keys that some test is marked with."""
    return {
        ast.literal_eval(key)
        for file in TESTS.rglob("test_*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        for mark in node.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault"
        for key in mark.args
    }


def test_every_row_has_a_test_and_a_marker_names_a_row_of_the_table_which_has_each_fault_once():
    assert marked() == {*KEYS}
    numbers = [f"{number:02}" for number in range(1, 33)]
    found_here = ["B1", "B2", *(f"S{number}" for number in range(1, 8)), *(f"P{number}" for number in range(1, 15))]
    found_here += [*(f"m{number}" for number in range(1, 10)), *(f"W{number}" for number in range(1, 6))]
    found_here += [f"T{number}" for number in (5, 9, 10, 12, 13, 14, 15, 17)]
    assert sorted([*numbers, *found_here, "see"]) == sorted(KEYS)
