"""The files that somebody reads who follows a run from raw files to a registered model, and their lines.

    python benchmarks/reading.py

Clones the commit that is checked out, draws a few scenes, and runs every stage from ingest to register there by DVC
and the command line, training in Ray's workers. A hook in each Python process (`sitecustomize`, by PYTHONPATH, so in
the workers too) notes when a function of the project is called first. A file counts

- as run, where one of its functions runs; the body of a module or a class is no function;
- as read, where a name that it defines occurs in a function that runs, its annotations and decorators included.

Names are resolved through the imports of the file, functions' own included, to the file that defines them. A function
that is called while its module is imported runs, and so does a page's template, which Jinja compiles. Lines are all
lines of a file. The order is that of the first call; a file that is only read follows the first that names it.
"""

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
CLONE, HOOK, CALLS = WORK / "clone", WORK / "hook", WORK / "calls"
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


class File(NamedTuple):
    """A file on the way, its number of lines, and whether a function of it runs."""

    path: Path
    lines: int
    runs: bool


def main() -> None:
    prepare()
    for stage in (("dvc", "repro", "-q"), ("m3diff", "register")):
        run("-m", *stage, traced=True)
    files = reading_order(calls())
    for file in files:
        print(f"{file.lines:5}  {'run ' if file.runs else 'read'}  {file.path.relative_to(CLONE)}")
    print(total(files, "all that runs or is read"))
    print(total([file for file in files if "stages" in file.path.parts], "the stages' own"))


def total(files: list[File], name: str) -> str:
    ran = sum(file.runs for file in files)
    lines = sum(file.lines for file in files)
    return f"{lines:5}  lines of {len(files)} files, {name}: {ran} run, {len(files) - ran} only read"


def prepare() -> None:
    """A clone with small parameters, its raw data drawn."""
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


def run(*arguments: str, traced: bool = False) -> None:
    """Python in the clone, on the clone's code."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(CLONE)
    if traced:
        environment["PYTHONPATH"] += f"{os.pathsep}{HOOK}"
        folders = (f"{(CLONE / folder).resolve()}{os.sep}" for folder in FOLDERS)
        environment |= {"READING_CALLS": str(CALLS), "READING_FOLDERS": os.pathsep.join(folders)}
    subprocess.run([sys.executable, *arguments], cwd=CLONE, env=environment, check=True)


def calls() -> list[tuple[Path, int]]:
    """File and first line of each function that ran, in the order of their first calls."""
    rows = [row.split("\t") for file in CALLS.iterdir() for row in file.read_text().splitlines()]
    rows.sort(key=lambda row: float(row[0]))
    return list(dict.fromkeys((Path(path), int(line)) for _, path, line in rows))


def reading_order(functions: list[tuple[Path, int]]) -> list[File]:
    ran = {path for path, _ in functions}
    order: dict[Path, None] = {}
    for path, line in functions:
        order[path] = None
        order |= dict.fromkeys(named(path, line))
    return [File(path, len(path.read_text(encoding="utf-8").splitlines()), path in ran) for path in order]


def named(path: Path, line: int) -> Iterator[Path]:
    """The other files that define what the function which begins at this line names."""
    nodes = (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    for node in nodes:
        if min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) != line:
            continue
        own = imports(path) | dict(imported(path, node))
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and each.id in own:
                place = definition(*own[each.id])
            elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id in own:
                place = definition(*own[each.value.id], each.attr)
            else:
                continue
            if place not in (None, path):
                yield place


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8") if path.suffix == ".py" else "")  # Jinja runs templates


@cache
def imports(path: Path) -> dict[str, tuple[str, ...]]:
    return dict(imported(path, tree(path)))


def imported(path: Path, node: ast.AST) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each name that is imported below a node, and the dotted path behind it."""
    package = path.relative_to(CLONE).parent.parts
    for each in ast.walk(node):
        if isinstance(each, ast.ImportFrom):
            above = package[: len(package) - each.level + 1] if each.level else ()
            module = (*above, *(each.module.split(".") if each.module else ()))
            yield from ((alias.asname or alias.name, (*module, alias.name)) for alias in each.names)
        elif isinstance(each, ast.Import):
            yield from ((alias.asname, tuple(alias.name.split("."))) for alias in each.names if alias.asname)


def definition(*dotted: str) -> Path | None:
    """The file that defines what a dotted path names; None where it is not the project's."""
    at = CLONE
    for part, *rest in (dotted[number:] for number in range(len(dotted))):
        if (at / part).is_dir():
            at = (at / part).resolve()
        elif (at / f"{part}.py").is_file():
            return origin(at / f"{part}.py", rest[0] if rest else "")
        else:
            return origin(at / "__init__.py", part)
    return origin(at / "__init__.py", "")


def origin(file: Path, name: str) -> Path | None:
    """The file from which this one has a name, be it itself."""
    if not file.is_file():
        return None
    further = imports(file).get(name)
    return (definition(*further) if further else None) or file


if __name__ == "__main__":
    main()
