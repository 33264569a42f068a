"""Count the files and lines that a person must read to follow a run from raw files to a registered model.

    python benchmarks/reading.py

This script clones the current commit, draws a few scenes, and runs every stage from ingest to register in the clone
with DVC and the command line. Training runs in Ray's workers. A hook in each Python process (`sitecustomize` on
PYTHONPATH, so it also runs in the workers) records the first call of each function in the project. A file counts

- as run, if one of its functions is called. The body of a module or class does not count as a function.
- as read, if a called function uses a name that the file defines. Annotations and decorators count as uses.

The imports of a file and of the function show which file defines a name. Functions called during the import of their
module count as run, and so do page templates, which Jinja compiles. All lines of a file are counted. Files are listed
in the order of their first call. A file that is only read is listed after the first file that uses it."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "runs" / "reading"
CLONE = WORK / "clone"
HOOK = WORK / "hook"
CALLS = WORK / "calls"
FOLDERS = ("components", "flows")

TRACER = """
import os, sys, threading, time

FOLDERS, CALLS = os.environ["READING_FOLDERS"].split(os.pathsep), os.environ["READING_CALLS"]
INSIDE = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
seen = {}


def trace(frame, event, argument):
    code = frame.f_code
    if id(code) not in seen:
        seen[id(code)] = code  # kept, so that no other code gets its id
        path = os.path.realpath(code.co_filename)
        function = code.co_flags & 1 and code.co_name not in INSIDE  # 1: no body of a module or a class
        if function and path.startswith(tuple(FOLDERS)):
            with open(f"{CALLS}/{os.getpid()}", "a") as file:
                file.write(f"{time.time()}\\t{path}\\t{code.co_firstlineno}\\n")


threading.settrace(trace)
sys.settrace(trace)
"""


class CountedFile(NamedTuple):
    """A file to read, its number of lines, and whether one of its functions was called (otherwise it is only read)."""

    path: Path
    lines: int
    is_run: bool


def main() -> None:
    """Run the stages in a clone, then print the files to read with their line counts and the totals."""
    prepare()
    for stage in (("dvc", "repro", "-q"), ("m3diff", "register")):
        run("-m", *stage, is_traced=True)
    files = reading_order(read_calls())
    for file in files:
        print(f"{file.lines:5}  {'run ' if file.is_run else 'read'}  {file.path.relative_to(CLONE)}")
    print(describe_total(files, "run or read"))
    stage_files = [file for file in files if "stages" in file.path.parts]
    print(describe_total(stage_files, "in the folder of the stages"))


def describe_total(files: list[CountedFile], title: str) -> str:
    """Return a line of text with the total number of lines and files."""
    run_count = sum(file.is_run for file in files)
    lines = sum(file.lines for file in files)
    return f"{lines:5}  lines of {len(files)} files, {title}: {run_count} run, {len(files) - run_count} only read"


def prepare() -> None:
    """Clone the repository, set small parameters, and draw the raw data."""
    shutil.rmtree(WORK, ignore_errors=True)
    for folder in (HOOK, CALLS):
        folder.mkdir(parents=True)
    (HOOK / "sitecustomize.py").write_text(TRACER)
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(CLONE)], check=True)
    params = yaml.safe_load((CLONE / "params.yaml").read_text())
    name = "minichange"
    params["synthesize"] = {name: params["synthesize"][name] | {"scenes": {"train": 24, "val": 4, "test": 8}}}
    params["ingest"]["datasets"] = {name: params["ingest"]["datasets"][name]}
    params["train"]["epochs"] = 1
    (CLONE / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))
    run("-m", "dvc", "repro", "-q", f"synthesize@{name}")


def run(*arguments: str, is_traced: bool = False) -> None:
    """Run Python in the clone with the clone's code. If `is_traced` is true, record the functions that are called."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(CLONE)
    if is_traced:
        environment["PYTHONPATH"] += f"{os.pathsep}{HOOK}"
        folders = (f"{(CLONE / folder).resolve()}{os.sep}" for folder in FOLDERS)
        environment |= {"READING_CALLS": str(CALLS), "READING_FOLDERS": os.pathsep.join(folders)}
    subprocess.run([sys.executable, *arguments], cwd=CLONE, env=environment, check=True)


def read_calls() -> list[tuple[Path, int]]:
    """Return the file and first line of each function that was called, in the order of the first calls."""
    rows = []
    for file in CALLS.iterdir():
        rows += [line.split("\t") for line in file.read_text().splitlines()]
    rows.sort(key=lambda row: float(row[0]))
    functions = [(Path(path), int(line)) for _, path, line in rows]
    return list(dict.fromkeys(functions))  # without repetitions, in order


def reading_order(functions: list[tuple[Path, int]]) -> list[CountedFile]:
    """Return the files to read, in the order in which they are first called or used."""
    run_files = {path for path, _ in functions}
    order: dict[Path, None] = {}
    for path, line in functions:
        order[path] = None
        order |= dict.fromkeys(files_named_by(path, line))
    return [CountedFile(path, len(path.read_text(encoding="utf-8").splitlines()), path in run_files) for path in order]


def files_named_by(path: Path, line: int) -> Iterator[Path]:
    """Yield the other files that define names used by the function at this line."""
    for function in ast.walk(tree(path)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = [function.lineno, *(decorator.lineno for decorator in function.decorator_list)]
        if min(lines) != line:
            continue
        names = imports(path) | dict(find_imports(path, function))
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id in names:
                file = find_definition(*names[node.id])
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
                file = find_definition(*names[node.value.id], node.attr)
            else:
                continue
            if file not in (None, path):
                yield file


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file, or an empty tree for other files, such as Jinja templates."""
    return ast.parse(path.read_text(encoding="utf-8") if path.suffix == ".py" else "")


@cache
def imports(path: Path) -> dict[str, tuple[str, ...]]:
    """Return a dictionary from each name that a file imports to the parts of the name's dotted path."""
    return dict(find_imports(path, tree(path)))


def find_imports(path: Path, node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each name that is imported inside a syntax node, with the parts of the name's dotted path."""
    package = path.relative_to(CLONE).parent.parts
    for statement in ast.walk(node):
        if isinstance(statement, ast.ImportFrom):
            parents = package[: len(package) - statement.level + 1] if statement.level else ()
            module = parents + (tuple(statement.module.split(".")) if statement.module else ())
            for alias in statement.names:
                yield alias.asname or alias.name, (*module, alias.name)
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                if alias.asname:
                    yield alias.asname, tuple(alias.name.split("."))


def find_definition(*dotted: str) -> Path | None:
    """Return the file that defines the object at a dotted path, or None if the path is not part of the project."""
    folder = CLONE
    for index, part in enumerate(dotted):
        if (folder / part).is_dir():
            folder = (folder / part).resolve()
        elif (folder / f"{part}.py").is_file():
            name = dotted[index + 1] if index + 1 < len(dotted) else ""
            return origin(folder / f"{part}.py", name)
        else:
            return origin(folder / "__init__.py", part)
    return origin(folder / "__init__.py", "")


def origin(file: Path, name: str) -> Path | None:
    """Return the file that defines a name that is available in `file`, or None if `file` does not exist.

    This is another file of the project if `file` imports the name from there, otherwise `file`.
    """
    if not file.is_file():
        return None
    dotted = imports(file).get(name)
    return (find_definition(*dotted) if dotted else None) or file


if __name__ == "__main__":
    main()
