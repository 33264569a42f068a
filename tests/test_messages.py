"""Test the messages of errors: each raised code has a message, and the message uses the fields of the error."""

import ast
import pickle
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from m3diff.records.errors import (
    LOCATION,
    MAX_VALUE_CHARS,
    MESSAGES,
    DataError,
    Fault,
    ParamsError,
    cause_of,
    data_error_if_unreadable,
    fields_of,
    format_count,
    wording,
)
from tests.errors import Message, raises
from tests.reword import reword_catalogue
from tests.toy import REPOSITORY

SNAPSHOT = Path(__file__).with_name("messages.txt")
# A number in front of a noun in the plural. "2,048 is the number of pairs" is none
NUMBER_AND_NOUN = re.compile(r"\{\w+:,\} (?:[a-z]+ )?(?!is\b|has\b|was\b)[a-z]+s\b")
SAMPLE_NUMBER = 1234  # value in the snapshot of fields that are numbers


@dataclass
class CodeFacts:
    """What these tests read in the code. The syntax trees are not kept, because each garbage collection visits them.

    Attributes:
        bases: the names of the base classes of each class.
        calls: the location, the last part of the function's name and the call, of each call with arguments.
        constants: all string constants.
    """

    bases: dict[str, set[str]] = field(default_factory=dict)
    calls: list[tuple[str, str, ast.Call]] = field(default_factory=list)
    constants: set[str] = field(default_factory=set)

    def error_classes(self) -> set[str]:
        """Return the names of all classes of errors with codes, and `Fault`."""
        classes = {"CodedError"}
        while subclasses := {name for name, parents in self.bases.items() if classes & parents} - classes:
            classes |= subclasses
        return classes | {"Fault"}


def last_name(node: ast.expr) -> str:
    """Return `c` for `a.b.c` and `c`, and an empty string for what is neither a name nor an attribute."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


@cache
def code_facts() -> CodeFacts:
    facts = CodeFacts()
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                facts.bases[node.name] = {last_name(base) for base in node.bases}
            elif isinstance(node, ast.Call) and node.args:
                facts.calls.append((f"{path}:{node.lineno}", last_name(node.func), node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                facts.constants.add(node.value)
    classes = facts.error_classes()
    facts.calls = [call for call in facts.calls if call[1] in classes]
    return facts


def modules() -> Iterator[tuple[str, ast.Module]]:
    for folder in ("components", "flows", "infra", "benchmarks"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            yield str(path.relative_to(REPOSITORY)), ast.parse(path.read_text(encoding="utf-8"))


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield the location and the call of every place where the code creates an error or a fault."""
    for location, _, call in code_facts().calls:
        yield location, call


def codes_of(argument: ast.expr) -> list[str]:
    """Return the codes that an argument may be: a constant, or both sides of a conditional expression."""
    if isinstance(argument, ast.IfExp):
        return codes_of(argument.body) + codes_of(argument.orelse)
    return [argument.value] if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else []


def template_fields(code: str) -> set[str]:
    return set().union(*(fields_of(template) for template in wording()[code].values()))


def test_an_error_is_raised_with_a_code_and_no_sentence() -> None:
    sentences = [location for location, call in calls() if isinstance(call.args[0], ast.JoinedStr | ast.BinOp)]
    assert sentences == []


def test_every_code_that_is_raised_has_a_message() -> None:
    unknown = {}
    for location, call in calls():
        for code in codes_of(call.args[0]):
            if code not in wording():
                unknown[location] = code
    assert unknown == {}


def test_an_error_has_the_fields_of_its_message() -> None:
    missing = {}
    for location, call in calls():
        call_fields = {keyword.arg for keyword in call.keywords}
        for code in codes_of(call.args[0]):
            absent = template_fields(code) - call_fields if code in wording() else set()
            if absent - set(LOCATION) and None not in call_fields:
                missing[location] = f"{code}: {', '.join(sorted(absent))}"
    assert missing == {}


def test_every_message_is_raised_somewhere() -> None:
    assert sorted(wording().keys() - code_facts().constants) == []


def test_a_message_has_a_problem_and_at_most_a_remedy() -> None:
    assert [
        code for code, message in wording().items() if not {"problem"} <= set(message) <= {"problem", "remedy"}
    ] == []


def test_a_number_with_a_noun_also_reads_right_if_it_is_one() -> None:
    """Write `{rows:row|rows}` in place of `{rows:,} rows`."""
    templates = {code: " ".join(message.values()) for code, message in wording().items()}
    assert {code: match[0] for code, text in templates.items() if (match := NUMBER_AND_NOUN.search(text))} == {}


@pytest.mark.parametrize(
    ("count", "text"),
    [(1, "1 step"), (0, "0 steps"), (2, "2 steps"), (2000, "2,000 steps"), (1.0, "1 step"), (2.5, "2.5 steps")],
)
def test_a_count_has_the_noun_in_the_right_number(count: float, text: str) -> None:
    assert format_count(count, "step") == text


def test_a_count_may_have_a_verb_and_an_irregular_plural() -> None:
    assert format_count(1, "batch is", "batches are") == "1 batch is"
    assert format_count(3, "batch is", "batches are") == "3 batches are"


def snapshot() -> str:
    """Return every message, rendered with sample values."""
    lines = []
    for code in sorted(wording()):
        values = {}
        for name in template_fields(code) | {"path"}:
            values[name] = SAMPLE_NUMBER if takes_number(code, name) else f"<{name}>"
        values["path"] = "data/pairs.csv"
        lines.append(f"{code}\n    " + str(Fault(code, **values)).replace("\n", "\n    "))
    return "\n".join(lines) + "\n"


def takes_number(code: str, name: str) -> bool:
    templates = " ".join(wording()[code].values())
    return re.search(rf"{{{name}:(,|\.|d|[^}}]*\|)", templates) is not None


def test_the_wording_is_that_of_the_snapshot() -> None:
    """`python -m tests.test_messages > tests/messages.txt` renews the snapshot. Read the changes."""
    assert snapshot() == SNAPSHOT.read_text(encoding="utf-8")


def test_rewording_changes_no_codes_fields_and_commands() -> None:
    """`python -m tests.reword` shows which tests read sentences."""
    text = MESSAGES.read_text(encoding="utf-8")
    reworded = tomllib.loads(reword_catalogue(text))
    for code, message in wording().items():
        area, name = code.split(".")
        assert message.keys() == reworded[area][name].keys()
        for part, template in message.items():
            new_template = reworded[area][name][part]
            assert fields_of(new_template) == fields_of(template)
            assert re.findall("`[^`]*`", new_template) == re.findall("`[^`]*`", template)
            assert new_template.count("\n") == template.count("\n")
    assert reworded["images"]["video"] != wording()["images.video"]
    assert tomllib.loads(reword_catalogue(reword_catalogue(text))) == tomllib.loads(text)


# How a message is rendered


def test_a_message_begins_with_the_location_of_the_fault(tmp_path: Path) -> None:
    fault = Fault("images.video", path=tmp_path / "a.png", row=1200)
    assert fault.location == f"{tmp_path / 'a.png'}, row 1,200"
    assert str(fault).startswith(f"{fault.location}: {fault.problem}; ")


def test_a_location_is_added_to_a_fault_and_does_not_replace_its_own() -> None:
    fault = Fault("images.video", path="inner.png").at(path="outer.png", row=3)
    assert fault == Fault("images.video", path="inner.png", row=3)


def test_the_representation_of_a_fault_creates_it_again() -> None:
    fault = Fault("images.video", path="a.png", row=3)
    assert repr(fault) == "Fault('images.video', {'path': 'a.png', 'row': 3})"


def test_an_absent_field_or_an_unknown_code_hides_no_fault() -> None:
    assert "<kind>" in str(Fault("images.archive"))
    assert str(Fault("images.no_such_code", path="a.png", size=3)) == "a.png: images.no_such_code size=3"


def test_a_field_of_another_type_than_its_format_is_shown_as_text() -> None:
    assert "many" in str(Fault("images.tiles_too_large", value="many", limit=2))


@pytest.mark.parametrize("character", ["\n", "\r\n", "\t", "\x1b", "\x85", "\u2028"], ids=repr)
def test_control_characters_of_a_value_are_escaped(character: str) -> None:
    escaped = repr(character)[1:-1]
    text = str(Fault("images.archive", path=Path(f"one{character}two.png"), kind=f"three{character}four"))
    assert f"one{escaped}two.png" in text
    assert f"three{escaped}four" in text
    assert text.splitlines() == [text]


def test_control_characters_of_items_are_escaped() -> None:
    listed = str(Fault("serving.ambiguous_names", names=["one\ntwo", "three"]))
    assert r"one\ntwo, three" in listed
    rows = str(Fault("validate.lost_test_pairs", dataset="mine", value=1, rows=["one\ntwo"]))
    assert rows.splitlines()[-1] == r"  one\ntwo"


def test_a_value_of_an_unknown_code_stays_on_one_line() -> None:
    assert str(Fault("images.no_such_code", value="one\ntwo")) == r"images.no_such_code value=one\ntwo"


def test_a_fault_in_a_field_keeps_its_lines() -> None:
    inner = Fault("validate.lost_test_pairs", dataset="mine", value=1, rows=["one"])
    assert str(inner) in str(Fault("settings.wrong_value", cause=inner, found="1"))
    assert "\n" in str(inner)


def test_a_cause_with_several_lines_becomes_one_line() -> None:
    assert cause_of(ValueError("expected a key\n  in line 3\n")) == "expected a key in line 3"


def test_a_long_value_is_shortened_and_a_command_is_not() -> None:
    text = str(Fault("images.archive", path="a.png", kind="x" * 5000))
    assert "x" * MAX_VALUE_CHARS in text
    assert "x" * (MAX_VALUE_CHARS + 1) not in text
    assert "(5,000 characters)" in text
    command = "touch " + "x" * 5000
    assert command in str(Fault("images.pointer", path="a.png", kind="DVC", command=command))


def test_an_error_keeps_class_code_and_fields_when_it_is_pickled() -> None:
    error = pickle.loads(pickle.dumps(ParamsError("images.archive", kind="a tar archive", path=Path("a.png"))))
    assert type(error) is ParamsError
    assert error.fault == Fault("images.archive", kind="a tar archive", path=Path("a.png"))


@pytest.mark.parametrize("text", ["no JSON\nsecond line", "\n no JSON\nsecond line"])
def test_a_file_that_cannot_be_read_is_an_error_with_its_cause(text: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with (
        raises(DataError, "files.unreadable_stage_output", path=file, cause="no JSON", writer="train"),
        data_error_if_unreadable(file, "files.unreadable_stage_output", writer="train"),
    ):
        raise ValueError(text)


@pytest.mark.parametrize("text", ["a.png: is an archive", "a.png: is a tar archive, not an image"])
def test_the_matcher_of_messages_refuses_other_texts(text: str) -> None:
    assert Message("images.archive", path="a.png", kind="a zip archive") != text


def test_the_matcher_of_messages_accepts_any_value_of_an_omitted_field() -> None:
    shown = str(Fault("images.archive", path="a.png", kind="a tar archive"))
    assert Message("images.archive", path="a.png") == shown
    assert Message("images.archive").in_text(f"m3diff ingest: {shown}")


if __name__ == "__main__":
    sys.stdout.write(snapshot())
