"""The code of a stage by its meaning: the syntax trees of every file that it can run, found without running any.

Stage `code` writes `code/<stage>.json` (file -> sha256), on which DVC's stages depend, and the same digests name a run
that is to be resumed. Comments, docstrings and formatting change no digest, nor does code of a family, dataset or
metric that the parameters do not name.
"""

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from m3diff.records.errors import readable

PACKAGE = "m3diff"
# The folder of the package: `components` in a checkout, where `m3diff` is a link to it, and `m3diff` in a wheel
HOUSE = Path(__file__).resolve().parents[1]

ROOT, FOLDER = HOUSE.parent, Path("code")


def key_of(facts: Mapping[str, Any], module: Path, named: Iterable[str] = ()) -> str:
    """Name of a run: the hash of the facts and the code that decide its result, and of no path."""
    decides = json.dumps({**facts, "code": digests(module, named)}, sort_keys=True)
    return hashlib.sha256(decides.encode()).hexdigest()[:16]


def edited(stage: str) -> list[str]:
    """Files of a stage whose meaning is another than `code/<stage>.json` has; all is well where this is empty."""
    now = current(stage)
    return [name for name, meaning in _recorded(stage).items() if now[name] != meaning]


def current(stage: str) -> dict[str, str]:
    """The digests, now, of the files of this folder that `code/<stage>.json` names; of one that is gone or broken, a
    word."""
    found = {}
    for name in _recorded(stage):
        try:
            found[name] = digest(Path(name))
        except FileNotFoundError:
            found[name] = "absent"
        except SyntaxError:
            found[name] = "broken"
    return found


def _recorded(stage: str) -> dict[str, str]:
    file = FOLDER / f"{stage}.json"
    with readable(file, "run `dvc repro code`"):
        recorded: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return recorded


def digests(module: Path, named: Iterable[str] = ()) -> dict[str, str]:
    """sha256 of the meaning of each file that is run: `module`, the modules `named`, and every Python file under ROOT
    that these import, directly or not, in functions too; by its path below ROOT, sorted. Packages count: importing
    `m3diff.models.tuning` runs `components/models/__init__.py`."""
    found: dict[Path, str] = {}
    waiting = [module.resolve(), *(path for name in named for path in _files(name))]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file], imported = _read(file.read_bytes())
            waiting += [path for name in imported for path in _files(name)]
    return {path.relative_to(ROOT).as_posix(): meaning for path, meaning in sorted(found.items())}


def digest(file: Path) -> str:
    """sha256 of a file's syntax tree without docstrings, comments and positions; equal on every Python that reads it.

    Raises:
        SyntaxError: the file is no Python.
    """
    return _read(file.read_bytes())[0]


@cache
def _read(source: bytes) -> tuple[str, list[str]]:
    """A file's digest and every module that it imports, wherever in the file; `from a import b` gives `a.b`."""
    tree = ast.parse(source)
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return hashlib.sha256(repr(canonical(tree)).encode()).hexdigest(), names


def canonical(node: Any) -> Any:
    """A syntax tree as nested tuples, without what has no meaning: docstrings, positions, empty fields."""
    if isinstance(node, list):
        return [canonical(each) for each in node if not is_docstring(each)]
    if not isinstance(node, ast.AST):
        return node
    fields = ((name, canonical(value)) for name, value in ast.iter_fields(node) if name not in ("kind", "type_comment"))
    return (type(node).__name__, *((name, value) for name, value in fields if value not in (None, [])))


def is_docstring(node: Any) -> bool:
    """A string that stands alone as a statement: of a module, class or function, or below a constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _files(name: str) -> Iterator[Path]:
    """The files that importing a dotted name runs; none for what is not under ROOT."""
    parts = name.split(".")
    parts[0] = HOUSE.name if parts[0] == PACKAGE else parts[0]
    for end in range(1, len(parts) + 1):
        place = ROOT.joinpath(*parts[:end])
        yield from filter(Path.is_file, (place / "__init__.py", place.with_suffix(".py")))
