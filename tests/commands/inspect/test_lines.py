"""Lists of examples and problems, which name a few rows and count the others."""

from m3diff.commands.inspect.lines import MAX_EXAMPLES, list_examples, list_problems


def test_a_list_counts_the_rows_that_it_does_not_show():
    lines = list_examples("rows", ["row 1", "row 2"], 1236)
    assert [line.strip() for line in lines[:-1]] == ["rows", "row 1", "row 2"]
    assert "1,234" in lines[-1]


def test_a_list_of_all_rows_counts_no_others():
    assert [line.strip() for line in list_examples("rows", ["row 1"], 1)] == ["rows", "row 1"]


def test_of_many_problems_the_first_few_are_shown():
    problems = [f"problem {number}" for number in range(MAX_EXAMPLES + 7)]
    lines = list_problems("faults", problems)
    assert [line.strip() for line in lines[1:-1]] == problems[:MAX_EXAMPLES]
    assert "12" in lines[0]
    assert "7" in lines[-1]


def test_without_problems_there_are_no_lines():
    assert list_problems("faults", []) == []
