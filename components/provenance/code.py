"""Compute digests of a stage's code, from the syntax trees of all files that the stage can import.

The imports are found without running the files. The stage `code` writes the digests to `code/<stage>.json`
(file -> sha256), and the other stages have these files as dependencies. The digests are also part of a run's key
(`compute_key`), so that an interrupted run is resumed only with the same code. A digest does not depend on comments,
docstrings or formatting. Code of model families, datasets and metrics that the parameters do not select is left out,
and so are the lists of their names.
"""

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from m3diff.records.errors import data_error_if_unreadable

PACKAGE = "m3diff"
# In a checkout, this is the folder `components`, and `m3diff` is a link to it. In a wheel, it is the folder `m3diff`
PACKAGE_FOLDER = Path(__file__).resolve().parents[1]

ROOT = PACKAGE_FOLDER.parent
DIGEST_FOLDER = Path("code")


def compute_key(facts: Mapping[str, Any], module: Path, extra_modules: Iterable[str] = ()) -> str:
    """Return the key of a run: a hash of everything that determines its result, including the code.

    Args:
        facts: everything that determines the result except the code, such as settings and digests of data. Paths are
            not included.
        module: the file of the module that runs.
        extra_modules: dotted names of modules that `module` loads at run time without an import statement.
    """
    inputs = {**facts, "code": digest_code(module, extra_modules)}
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


def edited_files(stage: str) -> list[str]:
    """Return the files of a stage whose digests differ from those in `code/<stage>.json`."""
    digests = current_digests(stage)
    return [name for name, digest in _recorded_digests(stage).items() if digests[name] != digest]


def current_digests(stage: str) -> dict[str, str]:
    """Return the current digest of each file in `code/<stage>.json`.

    The digest is "absent" if the file does not exist, and "broken" if it is not valid Python.
    """
    digests = {}
    for name in _recorded_digests(stage):
        try:
            digests[name] = digest_file(Path(name))
        except FileNotFoundError:
            digests[name] = "absent"
        except SyntaxError:
            digests[name] = "broken"
    return digests


def _recorded_digests(stage: str) -> dict[str, str]:
    file = DIGEST_FOLDER / f"{stage}.json"
    with data_error_if_unreadable(file, "provenance.unreadable_digests"):
        digests: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    return digests


def digest_code(module: Path, extra_modules: Iterable[str] = ()) -> dict[str, str]:
    """Return the digest of each file that a module can run, by its path relative to ROOT, sorted by path.

    These files are the module, the extra modules and all Python files under ROOT that they import. Indirect imports and
    imports inside functions count too, and so do packages, because importing `m3diff.models.tuning` also runs
    `components/models/__init__.py`.

    Args:
        module: the file of the module.
        extra_modules: dotted names of modules that `module` loads at run time without an import statement.
    """
    digest_by_file: dict[Path, str] = {}
    queue = [module.resolve()]
    for name in extra_modules:
        queue += _files_of_import(name)
    while queue:
        file = queue.pop()
        if file in digest_by_file:
            continue
        digest_by_file[file], imported_names = _digest_and_imports(file.read_bytes())
        for name in imported_names:
            queue += _files_of_import(name)
    return {path.relative_to(ROOT).as_posix(): digest for path, digest in sorted(digest_by_file.items())}


def digest_file(file: Path) -> str:
    """Return the sha256 of a file's syntax tree without docstrings, comments and positions.

    The digest is the same on every version of Python that can parse the file.

    Raises:
        SyntaxError: the file is not valid Python.
    """
    digest, _ = _digest_and_imports(file.read_bytes())
    return digest


@cache
def _digest_and_imports(source: bytes) -> tuple[str, list[str]]:
    """Return the digest of a file and the dotted names that it imports, such as `a.b` for `from a import b`."""
    tree = ast.parse(source)
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return hashlib.sha256(repr(canonical_tree(tree)).encode()).hexdigest(), names


def canonical_tree(node: Any) -> Any:
    """Return a syntax tree as nested tuples, without docstrings, positions, empty fields and lists of modules.

    Two files have the same tuples if they differ only in comments, docstrings and formatting, or in the modules that a
    `LazyMapping` lists.
    """
    if isinstance(node, list):
        return [canonical_tree(item) for item in node if not is_docstring(item)]
    if not isinstance(node, ast.AST):
        return node
    if is_lazy_mapping(node):
        node = ast.Call(func=node.func, args=node.args[:1], keywords=[])
    fields = []
    for name, value in ast.iter_fields(node):
        canonical_value = canonical_tree(value)
        if name not in ("kind", "type_comment") and canonical_value not in (None, []):
            fields.append((name, canonical_value))
    return (type(node).__name__, *fields)


def is_docstring(node: Any) -> bool:
    """Return whether a statement is only a string: the docstring of a module, class, function or variable."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def is_lazy_mapping(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether an expression creates a `LazyMapping`, such as the list of model families.

    Its modules are left out of the digest of the file. The digests of a stage contain the files of the modules that the
    parameters select, so a new model family, dataset or metric does not change the code of the others.
    """
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "LazyMapping"


def _files_of_import(name: str) -> Iterator[Path]:
    """Yield the files under ROOT that are run when a dotted name is imported."""
    parts = name.split(".")
    if parts[0] == PACKAGE:
        parts[0] = PACKAGE_FOLDER.name
    for end in range(1, len(parts) + 1):
        path = ROOT.joinpath(*parts[:end])
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.is_file():
                yield file
