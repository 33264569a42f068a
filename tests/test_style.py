"""The language of the code: one value in an assignment, names that say what they hold, and counts with their noun."""

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pytest

from tests.toy import REPOSITORY

FOLDERS = ("components", "flows", "infra", "benchmarks", "tests")
# Pronouns, prepositions, participles and number words. A name made of these alone does not say what it holds.
# fmt: off
VAGUE_WORDS = frozenset({
    "all", "any", "asked", "both", "by", "each", "every", "first", "found", "given", "held", "here", "how", "it",
    "kept", "known", "last", "left", "less", "made", "many", "more", "most", "much", "named", "of", "one", "other",
    "others", "our", "ours", "own", "place", "places", "rest", "said", "seen", "some", "taken", "that", "the",
    "their", "theirs", "then", "there", "these", "this", "those", "told", "wanted", "way", "what", "whole",
})
# fmt: on
PLURAL_NOUN = re.compile(r" (?:more |different )?(?!as\b|has\b|is\b|was\b)[a-z-]+s\b")
# Names that are allowed in a file or below a folder, with the reason
ALLOWED_NAMES = {
    ("components/scoring/grammar.py", "place"): "a field of a change, beside type and object; reports have the word",
    ("components/stages/augment/stage.py", "made"): "a key of the manifest of made pairs",
    ("components/models/settings.py", "place"): "a key of params.yaml: where the delta tokens are put",
    ("components/stages/validate/pairs.py", "first"): "a key of validate's report: the first rows of a finding",
    ("benchmarks/pictures.py", "left"): "the left edge of a crop, beside its top",
}


def parsed_files() -> Iterator[tuple[str, ast.Module]]:
    """Yield the path and the syntax tree of every Python file in `FOLDERS`, without links."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *FOLDERS]
    listed = subprocess.check_output(command, cwd=REPOSITORY, text=True).splitlines()
    paths = [REPOSITORY / name for name in listed if name.endswith(".py")]
    for path in sorted(paths):
        if path.is_file() and not path.is_symlink():
            yield str(path.relative_to(REPOSITORY)), ast.parse(path.read_text("utf-8"))


@cache
def is_vague(name: str) -> bool:
    """Tell whether every word of a name is vague: `found`, `_found`, `FOUND` and `all_of` are, `found_rows` is not.

    Names that Python itself reads, such as `__all__`, are not vague.
    """
    if name.startswith("__") and name.endswith("__"):
        return False
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    words = re.findall(r"[a-z]+", spaced.lower())
    return bool(words) and VAGUE_WORDS.issuperset(words)


def bound_name(node: ast.AST) -> str | None:
    """Return the name that a node binds, if any: of a variable, attribute, argument, function, class or alias."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.alias(asname=name) | ast.ExceptHandler(name=name) | ast.MatchAs(name=name) | ast.MatchStar(name=name):
            return name
        case ast.MatchMapping(rest=name):
            return name
    return None


def is_allowed(path: str, name: str) -> bool:
    """Tell whether `ALLOWED_NAMES` has the name for the file or for a folder around it."""
    return any(f"{path}/".startswith(f"{start}/") and name == allowed for start, allowed in ALLOWED_NAMES)


def vague_names(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield `line: name` for each vague name that a file binds."""
    for node in ast.walk(tree):
        name = bound_name(node)
        if name is not None and is_vague(name) and not is_allowed(path, name):
            yield f"{getattr(node, 'lineno', '?')}: {name}"


def tuple_assignments(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield `line: statement` for each assignment of several written values to several names, but for a swap."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List):
            for target in node.targets:
                if isinstance(target, ast.Tuple | ast.List) and not is_swap(target, node.value):
                    yield f"{node.lineno}: {ast.unparse(node)}"


def is_swap(target: ast.Tuple | ast.List, value: ast.Tuple | ast.List) -> bool:
    """Tell whether the values are the targets in another order."""
    return sorted(map(ast.unparse, target.elts)) == sorted(map(ast.unparse, value.elts))


def counts_in_plural(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield `line: text` for each number in an f-string before a noun in the plural: use `format_count` instead.

    A constant is large, and a column of aligned numbers has one heading for all of them. Benchmarks and tests are not
    for users.
    """
    if path.startswith(("benchmarks/", "tests/")):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            for value, text in pairwise(node.values):
                if is_number(value) and isinstance(text, ast.Constant) and PLURAL_NOUN.match(str(text.value)):
                    yield f"{node.lineno}: {ast.unparse(value)}{text.value}"


def is_number(node: ast.AST) -> bool:
    """Tell whether a value in an f-string is formatted as a whole number with separators, or is a length."""
    if not isinstance(node, ast.FormattedValue):
        return False
    if node.format_spec is None:
        return isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "len"
    return not ast.unparse(node.value).isupper() and ast.unparse(node.format_spec).strip("f'\"") in (",", ",.0")


RULES: dict[str, Callable[[str, ast.Module], Iterator[str]]] = {
    "vague names": vague_names,
    "tuple assignments": tuple_assignments,
    "counts in the plural": counts_in_plural,
}


class Findings(NamedTuple):
    """What a pass over all files finds. The syntax trees are not kept, because each garbage collection visits them.

    Attributes:
        violations: the violations of each rule, by file; files without any are left out.
        used_allowances: the keys of `ALLOWED_NAMES` whose name the code binds.
    """

    violations: dict[str, dict[str, list[str]]]
    used_allowances: set[tuple[str, str]]


@cache
def findings() -> Findings:
    """Parse each file once for all rules, because parsing takes longer than the rules."""
    violations: dict[str, dict[str, list[str]]] = {rule: {} for rule in RULES}
    used = set()
    for path, tree in parsed_files():
        for rule, find in RULES.items():
            if lines := list(find(path, tree)):
                violations[rule][path] = lines
        allowances = [(start, name) for start, name in ALLOWED_NAMES if f"{path}/".startswith(f"{start}/")]
        if allowances:
            names = {bound_name(node) for node in ast.walk(tree)}
            used |= {(start, name) for start, name in allowances if name in names}
    return Findings(violations, used)


@pytest.mark.parametrize("rule", RULES)
def test_no_file_breaks_a_rule(rule: str) -> None:
    assert findings().violations[rule] == {}


def test_every_allowed_name_is_used() -> None:
    assert ALLOWED_NAMES.keys() - findings().used_allowances == set()


@pytest.mark.parametrize(
    "statement",
    [
        "found = 1",
        "_found = 1",
        "FOUND = 1",
        "found: int = 1",
        "found += 1",
        "row.found = 1",
        "all_of = 1",
        "def found(): pass",
        "async def found(): pass",
        "def find(found): pass",
        "def find(*, found): pass",
        "def find(*found): pass",
        "lambda found: 1",
        "class Found: pass",
        "class AllOf: pass",
        "for found in rows: pass",
        "rows = [0 for found in rows]",
        "(found := 1)",
        "with file as found: pass",
        "import numpy as found",
        "try: pass\nexcept OSError as found: pass",
        "match row:\n  case [*found]: pass",
        "match row:\n  case {'a': 1, **found}: pass",
    ],
)
def test_a_vague_name_is_seen_in_every_kind_of_binding(statement: str) -> None:
    assert len(list(vague_names("components/x.py", ast.parse(statement)))) == 1


@pytest.mark.parametrize(
    "statement", ["found_rows = 1", "is_known = True", "x = found", "read(found=1)", "__all__ = []"]
)
def test_a_name_with_a_noun_a_use_and_a_keyword_are_no_vague_names(statement: str) -> None:
    assert list(vague_names("components/x.py", ast.parse(statement))) == []


@pytest.mark.parametrize(
    "statement", ["a, b = 1, 2", "a, b = [x, y]", "a, (b, c) = 1, d", "self.a, b = 1, 2", "a, b = b, 1"]
)
def test_several_written_values_in_one_assignment_are_seen(statement: str) -> None:
    assert len(list(tuple_assignments("components/x.py", ast.parse(statement)))) == 1


@pytest.mark.parametrize(
    "statement", ["a, b = b, a", "a, b = pair", "a, b = read()", "a = 1, 2", "for a, b in c: pass"]
)
def test_a_swap_an_unpacking_and_a_tuple_are_no_tuple_assignments(statement: str) -> None:
    assert list(tuple_assignments("components/x.py", ast.parse(statement))) == []


@pytest.mark.parametrize(
    "text",
    ["f'{count:,} pairs'", "f'of {count:,} more rows'", "f'{len(rows)} rows'", "f'{mean:,.0f} captions a second'"],
)
def test_a_number_before_a_noun_in_the_plural_is_seen(text: str) -> None:
    assert len(list(counts_in_plural("components/x.py", ast.parse(text)))) == 1


@pytest.mark.parametrize(
    "text", ["f'{name} pairs'", "f'{count:>9,} pairs'", "f'{count:,} is too many'", "f'{count:,}'", "f'{MAX:,} rows'"]
)
def test_a_name_a_column_a_constant_and_a_number_alone_are_no_counts_in_the_plural(text: str) -> None:
    assert list(counts_in_plural("components/x.py", ast.parse(text))) == []
