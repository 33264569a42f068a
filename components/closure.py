"""The code that a module can run, without running any: what it imports, and what that imports, as files."""

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from components.files import sha256

ROOT = Path(__file__).parents[1]


def key_of(facts: Mapping[str, Any], module: Path) -> str:
    """Names a run: the hash of the facts that decide its result, and of the code that `module` can run; of no path."""
    code = [f"{file.relative_to(ROOT)} {sha256(file)}" for file in import_closure(module, ROOT)]
    return hashlib.sha256(json.dumps({**facts, "code": code}, sort_keys=True).encode()).hexdigest()[:16]


def import_closure(module: Path, root: Path) -> list[Path]:
    """`module` and every Python file under `root` that it imports, directly or not, in functions too; sorted.

    Packages count: importing `components.models.tuning` runs `components/models/__init__.py`.
    """
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += [path for name in imports(file) for path in _files(name, root)]
    return sorted(found)


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file; `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _files(name: str, root: Path) -> Iterator[Path]:
    """The files that importing a dotted name runs; none for what is not under `root`."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:end])
        for path in (place / "__init__.py", place.with_suffix(".py")):
            if path.is_file():
                yield path
