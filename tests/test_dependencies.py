"""What DVC watches is what decides: code by import closure, paths by interpolation, and what reruns after a change."""

import ast
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import toy
from tests.toy import REPOSITORY

GRAPH = {
    name: entry.get("do", entry)
    for name, entry in yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"].items()
}


# Code


def imported(file: Path, root: Path) -> Iterator[Path]:
    """The files of `components` that a file imports, wherever in it; a package is its `__init__.py`."""
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.split(".")[0] == "components":
                place = root / name.replace(".", "/")
                yield from (path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file())


def closure(start: Path, root: Path) -> set[Path]:
    """A module and all that it imports, directly or not.

    The `__init__.py` of a package above a module counts only where it is imported by name: it holds a list or nothing.
    """
    seen: set[Path] = set()
    todo = [start]
    while todo:
        file = todo.pop()
        if file not in seen:
            seen.add(file)
            todo += imported(file, root)
    return seen - {root / "components" / "__init__.py"}


def is_code(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


@pytest.mark.parametrize("stage", [name for name, entry in GRAPH.items() if entry.get("frozen")])
def test_the_lock_of_a_frozen_stage_is_of_the_code_as_it_is(stage: str):
    """DVC does not bring it up to date by itself, and register refuses a lock that is of other code."""
    written = yaml.safe_load((REPOSITORY / "dvc.lock").read_text())["stages"][stage]["deps"]
    files = {dep["path"]: dep["md5"] for dep in written if (REPOSITORY / dep["path"]).is_file()}
    assert len(files) > 10
    stale = [path for path, md5 in files.items() if hashlib.md5((REPOSITORY / path).read_bytes()).hexdigest() != md5]
    assert not stale, f"where {stage} makes the same as before: dvc commit -f {stage}"


def resources(code: Iterable[Path], root: Path) -> set[Path]:
    """Files beside the code (templates, tables) whose name stands in one of its strings, or in such a template's."""
    others = [path for path in (root / "components").rglob("*") if is_code(path) and path.suffix != ".py"]
    found: set[Path] = set()
    waiting = list(code)
    while waiting:
        text = "\n".join(file.read_text() for file in waiting)
        named = {path for path in others if re.search(rf"[\"'/]{re.escape(path.name)}[\"']", text)}
        waiting = [path for path in named - found if path.suffix == ".j2"]
        found |= named
    return found


def as_dependencies(files: set[Path], folder: Path) -> set[Path]:
    """The shortest list that covers these files and no other: a folder whose whole code is among them, else files."""
    inside = {path for path in folder.rglob("*") if is_code(path)}
    needed = {path for path in inside if path.name != "__init__.py" or ast.parse(path.read_text()).body[1:]}
    if inside & files and needed <= files:
        return {folder}
    shortest = {path for path in files if path.parent == folder}
    for child in folder.iterdir():
        if child.is_dir() and child.name != "__pycache__":
            shortest |= as_dependencies(files, child)
    return shortest


def code_dependencies(stage: str, root: Path = REPOSITORY) -> set[str]:
    code = closure(root / "components" / stage / "stage.py", root)
    files = code | resources(code, root)
    return {str(path.relative_to(root)) for path in as_dependencies(files, root / "components")}


@pytest.mark.parametrize("stage", GRAPH)
def test_the_code_that_a_stage_watches_is_the_code_that_it_runs(stage):
    watched = {path for path in GRAPH[stage]["deps"] if path.startswith("components")}
    runs = code_dependencies(stage)
    faults = [f"add `- {path}`" for path in sorted(runs - watched)]
    faults += [f"remove `- {path}`" for path in sorted(watched - runs)]
    assert faults == [], f"dvc.yaml, deps of {stage}: {'; '.join(faults)}"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A stage `a` that imports a module beside it, one file of a package, and a package's list."""
    files = {
        "a/stage.py": "from components.a import near\ndef run():\n    import components.lib.used\n",
        "a/near.py": "from components.all import LIST\nPAGE = 'page.html'\nOTHER = 'page.j2'\n",
        "a/page.html": "",
        "a/page.j2": "{% include 'style.css' %}",
        "a/style.css": "",
        "lib/used.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from components.types import T\n",
        "lib/planner.py": "",
        "lib/other.html": "",
        "all/__init__.py": "from components.all.one import LIST\n",
        "all/one.py": "LIST = []\n",
        "types.py": "",
    }
    for name, text in files.items():
        (tmp_path / "components" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "components" / name).write_text(text)
        (tmp_path / "components" / name).with_name("__init__.py").touch()
    return tmp_path


def test_the_closure_follows_imports_in_functions_and_for_types_and_lists_whole_folders_as_one(package):
    found = code_dependencies("a", package)
    assert found == {f"components/{name}" for name in ("a", "all", "lib/used.py", "types.py")}


def test_a_file_in_a_stages_folder_that_nothing_names_splits_the_folder(package):
    (package / "components" / "a" / "notes.html").touch()
    found = code_dependencies("a", package)
    assert {f"components/a/{name}" for name in ("stage.py", "near.py", "page.html")} < found
    assert "components/a/notes.html" not in found


# Paths


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield name, tree
        return
    for key, value in items:
        yield from leaves(value, f"{name}.{key}" if name else str(key))


NO_DATA = ("compute.", "register.tracking_uri", "promote.protocol")
"""Where a run computes, where its results are shown, and a name that is no path: no stage has its data there."""


def test_every_path_in_params_yaml_is_a_dependency_or_an_output_by_interpolation():
    params = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    named = {name for name, value in leaves(params) if isinstance(value, str) and "/" in value}
    named = {name for name in named if not name.startswith(NO_DATA)}
    looped = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"].values()
    used = set()
    for stage in looped:
        text = yaml.safe_dump({key: stage.get("do", stage).get(key) for key in ("deps", "outs", "metrics", "plots")})
        used |= set(re.findall(r"\$\{([\w.]+)\}", text))
        section = stage.get("foreach", "").strip("${}")
        each = {f"{section}.{key}." for key in params_at(params, section)} if section else set()
        used |= {start + name.removeprefix("item.") for name in used if name.startswith("item.") for start in each}
    assert named <= used, f"dvc.yaml has no dependency and no output ${{{', '.join(sorted(named - used))}}}"
    assert named >= {"train.base", "convert.questions", "ingest.datasets.minichange.root", "paths.records"}


def params_at(params: dict[str, Any], section: str) -> dict[str, Any]:
    for key in section.split("."):
        params = params[key]
    return params


# What reruns


@pytest.fixture(scope="module")
def current_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy project with a dataset from outside beside MiniChange, every stage up to date."""
    root = toy.build(tmp_path_factory.mktemp("current") / "toy")
    toy.write_dataset(root / "data/01_raw/real", ("train", "train", "val", "test"))
    rewrite(root / "data/01_raw/real/grammar.json", json.dumps({"clause_separator": ", and "}))
    add_dataset(root, "real")
    toy.run(root, "dvc", "repro", "-q")
    return root


@pytest.fixture
def current(current_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(current_once, tmp_path / "toy", symlinks=True))


def set_params(root: Path, place: str, value: Any) -> None:
    params = yaml.safe_load((root / "params.yaml").read_text())
    section, _, key = place.rpartition(".")
    params_at(params, section)[key] = value
    rewrite(root / "params.yaml", yaml.safe_dump(params, sort_keys=False))


def rewrite(path: Path, text: str) -> None:
    """Write a file anew: it may be a link into DVC's cache."""
    path.unlink(missing_ok=True)
    path.write_text(text)


def add_dataset(root: Path, name: str) -> None:
    set_params(root, f"ingest.datasets.{name}", {"reader": "pairs", "root": f"data/01_raw/{name}"})


def append_to(*paths: str) -> Callable[[Path], None]:
    """Add a comment to files that must be there."""

    def change(root: Path) -> None:
        for path in paths:
            rewrite(root / path, (root / path).read_text() + "\n# a comment\n")

    return change


def set_to(place: str, value: Any) -> Callable[[Path], None]:
    return lambda root: set_params(root, place, value)


def draw_anew(number: int) -> Callable[[Path], None]:
    """Another picture in place of one image of the dataset from outside."""

    def change(root: Path) -> None:
        from PIL import Image

        Image.new("RGB", (8, 8), (7, 7, 7)).save(root / "data/01_raw/real/sc_images" / f"{number}.png")

    return change


def add_test_only_dataset(root: Path) -> None:
    toy.write_dataset(root / "data/01_raw/birds", ("test", "test"))
    add_dataset(root, "birds")


def templates(folder: str) -> list[str]:
    return [str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "components" / folder).rglob("*.j2")]


TRAIN_ON = ["train", "predict", "evaluate"]
INGEST = ["ingest@real", "validate"]
RATES = "models.m3diff.rates.llm"
CHANGES: dict[str, tuple[Callable[[Path], None], list[str], list[str]]] = {
    # what changed: how, the stages that `dvc status` names, the stages that `dvc repro` runs
    "nothing": (lambda root: None, [], []),
    "base": (append_to("data/00_base/config.json"), ["pretrain", "train"], TRAIN_ON),
    "questions": (append_to("profiles/questions.yaml"), ["convert"], ["convert", *TRAIN_ON]),
    "grammar": (append_to("data/01_raw/real/grammar.json"), ["ingest@real"], [*INGEST, "evaluate"]),
    "image that trains": (draw_anew(0), ["ingest@real"], [*INGEST, "convert", *TRAIN_ON]),
    "image that validates": (draw_anew(2), ["ingest@real"], [*INGEST, "convert", *TRAIN_ON]),
    "image that only tests": (draw_anew(3), ["ingest@real"], [*INGEST, "convert", "predict", "evaluate"]),
    "note beside the images": (
        lambda root: rewrite(root / "data/01_raw/real/images/note.txt", "new"),
        ["ingest@real"],
        ["ingest@real"],
    ),
    "test-only dataset": (
        add_test_only_dataset,
        ["ingest@birds", "validate", "convert"],
        ["ingest@birds", "validate", "convert", "predict", "evaluate"],
    ),
    "planner": (append_to("components/plan/plan.py"), [], []),
    "report's template": (append_to(*templates("evaluate")), ["evaluate"], ["evaluate"]),
    "template of another page": (append_to(*templates("inspect")), [], []),
    "workers": (set_to("compute.workers", 7), [], []),
    "checkpoint interval": (set_to("compute.checkpoint_every_steps", 7), [], []),
    "learning rate": (set_to(RATES, 0.5), ["train"], TRAIN_ON),
    "learning rate of a model that is not trained": (set_to("models.no_module.rates.llm", 0.5), [], []),
    "model to train": (set_to("train.model", "no_module"), ["train"], TRAIN_ON),
    "dataset's entry": (
        set_to("ingest.datasets.real.follow_links", True),
        ["ingest@real", "validate", "convert"],
        [*INGEST, "convert"],
    ),
    "pages of predictions in the report": (set_to("evaluate.gallery", 7), ["evaluate"], ["evaluate"]),
    "gate": (set_to("promote.min_gain", 0.5), [], []),
    "recipe of the base": (set_to("pretrain.seed", 7), [], []),
}


@pytest.mark.slow(15)
@pytest.mark.fault("25", "27")
@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_dvc_names_and_reruns_what_depends_on_it_and_nothing_else(current, change):
    make, changed, reruns = CHANGES[change]
    make(current)
    assert list(toy.status(current)) == changed
    if changed:
        assert re.findall(r"Running stage '(.+)'", toy.run(current, "dvc", "repro")) == reruns
    else:
        assert reruns == [], "what `dvc status` does not name does not run"


def test_in_a_fresh_clone_the_base_is_there_and_its_frozen_stage_neither_runs_nor_counts_as_changed(current, tmp_path):
    toy.commit(current, "trained")
    clone = tmp_path / "clone"
    toy.run(current, "git", "clone", "-q", ".", str(clone))
    assert (clone / "data/00_base/config.json").is_file()
    assert "pretrain" not in toy.status(clone)
    printed = toy.run(clone, "dvc", "repro", "pretrain")
    assert "Stage 'pretrain' didn't change, skipping" in printed


def test_a_base_that_was_made_anew_is_recorded_by_repro_which_does_not_run_the_frozen_stage(current):
    append_to("data/00_base/config.json")(current)
    printed = toy.run(current, "dvc", "repro", "--single-item", "pretrain")
    assert "Verifying outputs in frozen stage: 'pretrain'" in printed
    assert list(toy.status(current)) == ["train"]
