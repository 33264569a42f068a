"""A model's code for use without the project: the project's own files, cut down to what the model needs.

What is needed follows from the names that each definition uses, beginning with the classes that `auto_map` names. A
definition keeps its text, an import of the project becomes one of a neighbouring file. Nothing is written twice: what
is shared is what the project runs.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

PROJECT = "m3diff"
WIDTH = 120

REGISTERED = re.compile(r"Auto\w+")
"""transformers' classes with which the project registers its own; elsewhere `auto_map` does that."""

STANDS_APART = (ast.FunctionDef, ast.ClassDef)
"""Statements with two blank lines around them."""


class SourceError(ValueError):
    """A file of the project is written so that its code cannot be shared; names file and line."""


@dataclass
class Source:
    """One file: what it defines and imports at its top, and what of that is needed."""

    module: str
    file: str  # its name in the shared folder, without .py
    path: Path
    lines: list[str]
    body: list[ast.stmt]
    definitions: dict[str, ast.stmt] = field(default_factory=dict)
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)  # name here -> (module, name there)
    typing_only: set[str] = field(default_factory=set)
    needed: set[str] = field(default_factory=set)


def standalone(
    roots: Mapping[str, Iterable[str]], omitted: Mapping[str, Iterable[str]], files: Mapping[str, str]
) -> dict[str, str]:
    """The text of each file, by its name: what `roots` need of the project.

    Args:
        roots: names by module.
        omitted: methods by module that stay behind, `Class.method`.
        files: names of files, by module; of others the last part of the module's name.

    Raises:
        SourceError: an omitted method is not there, an import of the project stands where it is not followed, or two
            modules would have one file.
    """
    sources: dict[str, Source] = {}
    wanted = [(module, name) for module, names in roots.items() for name in names]
    while wanted:
        module, name = wanted.pop()
        source = sources.setdefault(module, sources.get(module) or read_source(module, files))
        if name in source.needed:
            continue
        source.needed.add(name)
        wanted += _uses(source, name, _cut(source, omitted))
        if len(source.needed) == 1:
            wanted += [(module, used) for each in _effects(source) for used in _known(source, _names(each))]
    _check_files(sources.values())
    return {f"{source.file}.py": _text(source, sources, _cut(source, omitted)) for source in sources.values()}


def _check_files(sources: Iterable[Source]) -> None:
    by_file: dict[str, str] = {}
    for source in sources:
        if (other := by_file.setdefault(source.file, source.module)) != source.module:
            raise SourceError(f"{source.module} and {other} would both be {source.file}.py; name one otherwise")


def read_source(module: str, files: Mapping[str, str]) -> Source:
    """A module of the project, parsed, nothing of it needed yet."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin)
    text = path.read_text(encoding="utf-8")
    file = files.get(module, module.rpartition(".")[2])
    source = Source(module, file, path, text.splitlines(), ast.parse(text).body)
    for statement in source.body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            for inner in statement.body:
                source.typing_only |= set(_imported(inner))
                source.imports |= _imported(inner)
        source.imports |= _imported(statement)
        source.definitions |= dict.fromkeys(_defined(statement), statement)
    return source


def _imported(statement: ast.stmt) -> dict[str, tuple[str, str | None]]:
    if isinstance(statement, ast.Import):
        return {alias.asname or alias.name: (alias.name, None) for alias in statement.names}
    if isinstance(statement, ast.ImportFrom) and statement.module and statement.module != "__future__":
        return {alias.asname or alias.name: (statement.module, alias.name) for alias in statement.names}
    return {}


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    targets += [statement.target] if isinstance(statement, ast.AnnAssign) else []
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _effects(source: Source) -> list[ast.stmt]:
    """Calls at a file's top, but for registrations with transformers' own lists."""
    calls = [each for each in source.body if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)]
    return [each for each in calls if not REGISTERED.match(ast.unparse(each))]


def _cut(source: Source, omitted: Mapping[str, Iterable[str]]) -> list[ast.stmt]:
    """The omitted methods of a file."""
    found: list[ast.stmt] = []
    for name in omitted.get(source.module, ()):
        cls, _, method = name.partition(".")
        statement = source.definitions.get(cls)
        inner = statement.body if isinstance(statement, ast.ClassDef) else []
        methods = [each for each in inner if isinstance(each, ast.FunctionDef) and each.name == method]
        if not methods:
            raise SourceError(f"{source.path}: has no {name}, which is named as left out")
        found += methods
    return found


def _uses(source: Source, name: str, cut: list[ast.stmt]) -> list[tuple[str, str]]:
    """What a name of a file needs: names of the same file, or one of another file of the project."""
    if name in source.definitions:
        return [(source.module, used) for used in _known(source, _names(source.definitions[name], cut))]
    if name not in source.imports:
        raise SourceError(f"{source.path}: neither defines nor imports {name}")
    module, there = source.imports[name]
    if not _is_ours(module):
        return []
    if there is None:
        raise SourceError(f"{source.path}: `import {module}`: only `from {module} import ...` can be shared")
    return [(module, there)]


def _known(source: Source, names: Iterable[str]) -> list[str]:
    return [name for name in names if name in source.definitions or name in source.imports]


def _names(statement: ast.stmt, cut: Iterable[ast.AST] = ()) -> set[str]:
    """Every name in a statement, but for those in the statements that are cut; of `a.b.c` also `a.b`, an import's."""
    found: set[str] = set()
    left_out = set(cut)
    left: list[ast.AST] = [statement]
    while left:
        node = left.pop()
        if isinstance(node, ast.ImportFrom) and _is_ours(node.module or ""):
            raise SourceError(f"line {node.lineno}: an import of {node.module} inside a function cannot be shared")
        if isinstance(node, ast.Name | ast.Attribute):
            found.add(ast.unparse(node))
        left += [child for child in ast.iter_child_nodes(node) if child not in left_out]
    return found


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == PROJECT


def _text(source: Source, sources: Mapping[str, Source], cut: list[ast.stmt]) -> str:
    """The file with what is needed of it, in its own order."""
    kept = [each for each in source.body if source.needed & set(_defined(each)) or each in _effects(source)]
    whole = all(set(_defined(each)) <= source.needed for each in source.body) and not cut
    place = f"{source.module.replace('.', '/')}.py"
    future = [
        ast.unparse(each) for each in source.body if isinstance(each, ast.ImportFrom) and each.module == "__future__"
    ]
    origin = f"# {'From' if whole else 'Part of'} {place} of m3diff, by `m3diff export --hub`. Licence: Apache-2.0"
    head = [origin, *_docstring(source), "", *future, ""]
    text = re.sub(r"\n{3,}", "\n\n", "\n".join([*head, *_imports(source, sources)]).rstrip())
    for before, statement in zip([None, *kept], kept, strict=False):
        apart = isinstance(statement, STANDS_APART) or isinstance(before, STANDS_APART)
        text += "\n" * (3 if apart else 2) + "\n".join(_lines(source, statement, cut))
    return text + "\n"


def _docstring(source: Source) -> list[str]:
    first = source.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return source.lines[first.lineno - 1 : first.end_lineno] if is_text else []


def _lines(source: Source, statement: ast.stmt, cut: list[ast.stmt]) -> list[str]:
    """A statement's text with the comment above and the docstring below it, without the methods that are cut."""
    start, end = _span(statement)
    while start > 1 and source.lines[start - 2].startswith("#"):
        start -= 1
    after = source.body[source.body.index(statement) + 1 :]
    if isinstance(statement, ast.Assign | ast.AnnAssign) and after and _is_docstring(after[0]):
        end = _span(after[0])[1]
    left_out = {line for each in cut for line in range(_span(each)[0] - 1, _span(each)[1] + 1)}  # and the blank above
    return [source.lines[line - 1] for line in range(start, end + 1) if line not in left_out]


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _span(statement: ast.stmt) -> tuple[int, int]:
    """First and last line, decorators included."""
    decorators = getattr(statement, "decorator_list", [])
    assert statement.end_lineno is not None
    return min([statement.lineno, *(each.lineno for each in decorators)]), statement.end_lineno


def _imports(source: Source, sources: Mapping[str, Source]) -> Iterator[str]:
    """Import statements of the names that are needed, the project's as neighbours, in isort's order."""
    later = source.needed & source.typing_only
    ahead = {name: source.imports[name] for name in source.needed & source.imports.keys() - later}
    if later:
        ahead["TYPE_CHECKING"] = ("typing", "TYPE_CHECKING")
    yield from _import_lines(ahead, sources)
    if later:
        yield from ["", "if TYPE_CHECKING:"]
        yield from (f"    {line}" for line in _import_lines({name: source.imports[name] for name in later}, sources))


def _import_lines(names: Mapping[str, tuple[str, str | None]], sources: Mapping[str, Source]) -> Iterator[str]:
    """The standard library's, then other packages', then neighbours'."""
    sections: list[list[str]] = [[], [], []]
    together: dict[str, list[str]] = {}
    for name, (module, there) in sorted(names.items(), key=lambda entry: (not entry[0].isupper(), entry[0])):
        if there is None:
            _section(sections, module).append(f"import {module}" + (f" as {name}" if name != module else ""))
        elif there != name:
            _section(sections, module).append(f"from {_place(module, sources)} import {there} as {name}")
        else:
            together.setdefault(module, []).append(name)
    for module, found in together.items():
        place, line = _place(module, sources), ", ".join(found)
        whole = f"from {place} import {line}"
        split = "\n".join([f"from {place} import (", *(f"    {name}," for name in found), ")"])
        _section(sections, module).append(whole if len(whole) <= WIDTH else split)
    lines = ["\n".join(sorted(section, key=lambda line: (line.startswith("from"), line))) for section in sections]
    yield from "\n\n".join(filter(None, lines)).splitlines()


def _section(sections: list[list[str]], module: str) -> list[str]:
    return sections[2 if _is_ours(module) else 0 if module.partition(".")[0] in sys.stdlib_module_names else 1]


def _place(module: str, sources: Mapping[str, Source]) -> str:
    return f".{sources[module].file}" if _is_ours(module) else module
