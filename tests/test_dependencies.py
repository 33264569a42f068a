"""Test what DVC compares (code by its meaning, paths by interpolation) and which stages rerun after a change."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from m3diff.provenance.code import digest_code
from m3diff.settings.load import load_params
from m3diff.stages.code import code as write_digests
from m3diff.stages.code import modules_by_stage
from tests import toy
from tests.toy import REPOSITORY

LOOPED = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text())["stages"]
GRAPH = {name: entry.get("do", entry) for name, entry in LOOPED.items()}


# No stage depends on the wording of errors, so that a better sentence makes no stage stale
MESSAGES = REPOSITORY / "components" / "records" / "messages.toml"


def dependencies(stage: str) -> set[str]:
    return {path for path in GRAPH[stage]["deps"] if path.startswith("components/")}


def resources(code: Iterable[Path]) -> set[str]:
    """Return the templates and tables whose names occur in strings of the code, or of a template that it uses."""
    files = [path for path in (REPOSITORY / "components").rglob("*") if path.is_file()]
    candidates = [path for path in files if path.suffix not in (".py", ".pyc") and path != MESSAGES]
    used_files: set[Path] = set()
    unread_files = list(code)
    while unread_files:
        text = "\n".join(file.read_text() for file in unread_files)
        named_files = {path for path in candidates if re.search(rf"[\"'/]{re.escape(path.name)}[\"']", text)}
        unread_files = [path for path in named_files - used_files if path.suffix == ".j2"]
        used_files |= named_files
    return {str(path.relative_to(REPOSITORY)) for path in used_files}


@pytest.mark.parametrize("stage", [stage for stage in GRAPH if stage != "code"])
def test_a_stage_depends_on_its_code_and_on_the_templates_and_tables_it_reads(stage, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    modules = modules_by_stage(load_params(Path("params.yaml")))
    names = [name for name in modules if name.partition("@")[0] == stage]
    assert names or stage == "augment", "stage `code` writes no digests for it"
    for name in names:
        code = digest_code(REPOSITORY / "components" / "stages" / stage / "stage.py", modules[name])
        assert resources(REPOSITORY / file for file in code) == dependencies(stage)
        file = REPOSITORY / "code" / f"{name}.json"
        assert json.loads(file.read_text()) == code, "run `dvc repro code`"


@pytest.mark.parametrize("has_digests", [True, False], ids=["a stage that is gone", "no folder yet"])
def test_there_are_digests_of_every_stage_and_of_no_other(has_digests, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if has_digests:
        Path("code").mkdir()
        Path("code/ingest@gone.json").write_text("{}")
    params = load_params(REPOSITORY / "params.yaml")
    write_digests(params)
    assert {path.stem for path in Path("code").iterdir()} == modules_by_stage(params).keys()
    for file in Path("code").iterdir():
        assert file.read_bytes() == (REPOSITORY / file).read_bytes(), "run `dvc repro code`; DVC compares the bytes"


def test_dvc_lock_is_of_the_committed_code_and_parameters():
    """`dvc repro` renews dvc.lock. The frozen base is recorded by hand, since training it again takes two hours."""
    stages = yaml.safe_load((REPOSITORY / "dvc.lock").read_text())["stages"]
    params = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    stale = []
    for name in stages.keys() - {"pretrain", "code"}:
        recorded = {dep["path"]: dep["md5"] for dep in stages[name]["deps"]}
        for path, md5 in recorded.items():
            is_of_project = path.startswith(("code/", "components/", "profiles/"))
            if is_of_project and hashlib.md5((REPOSITORY / path).read_bytes()).hexdigest() != md5:
                stale.append(f"{name}: {path}")
        recorded_params = stages[name]["params"]["params.yaml"]
        stale += [f"{name}: {key}" for key in recorded_params if params_at(params, key) != recorded_params[key]]
    assert not stale, "run `dvc repro`"
    assert {name.partition("@")[0] for name in stages} == GRAPH.keys() - {"augment"}


def leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every leaf of nested mappings and lists."""
    if isinstance(tree, dict):
        items = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))
    else:
        yield name, tree
        return
    for key, value in items:
        yield from leaves(value, f"{name}.{key}" if name else str(key))


# Where a run computes, where its results are shown, and a name that is no path. No stage reads or writes data there
NO_DATA = ("compute.", "register.tracking_uri", "promote.protocol")


def test_every_path_in_params_yaml_is_a_dependency_or_an_output_by_interpolation():
    params = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    paths = set()
    for name, value in leaves(params):
        if isinstance(value, str) and "/" in value and not name.startswith(NO_DATA):
            paths.add(name)
    interpolated = set()
    for stage in LOOPED.values():
        text = yaml.safe_dump({key: stage.get("do", stage).get(key) for key in ("deps", "outs", "metrics", "plots")})
        interpolated |= set(re.findall(r"\$\{([\w.]+)\}", text))
        section = stage.get("foreach", "").strip("${}")
        fields = {name.removeprefix("item.") for name in interpolated if name.startswith("item.")}
        keys = params_at(params, section) if section else {}
        for key in keys:
            interpolated |= {f"{section}.{key}.{field}" for field in fields}
    unused = sorted(paths - interpolated)
    assert unused == [], "dvc.yaml has no dependency and no output with these parameters"
    assert paths >= {"train.base", "convert.questions", "ingest.datasets.minichange.root", "paths.records"}


def params_at(params: dict[str, Any], section: str) -> dict[str, Any]:
    for key in section.split("."):
        params = params[key]
    return params


@pytest.fixture(scope="module")
def current_once(trained_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the toy project with an external dataset in addition to MiniChange. Every stage is up to date."""
    root = Path(shutil.copytree(trained_once, tmp_path_factory.mktemp("current") / "toy", symlinks=True))
    toy.write_dataset(root / "data/01_raw/real", ("train", "train", "val", "test"))
    rewrite(root / "data/01_raw/real/grammar.json", json.dumps({"clause_separator": ", and "}))
    add_dataset(root, "real")
    toy.run(root, "dvc", "repro", "-q")
    return root


@pytest.fixture
def current(current_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(current_once, tmp_path / "toy", symlinks=True))


def set_params(root: Path, dotted_key: str, value: Any) -> None:
    params = yaml.safe_load((root / "params.yaml").read_text())
    section, _, key = dotted_key.rpartition(".")
    params_at(params, section)[key] = value
    rewrite(root / "params.yaml", yaml.safe_dump(params, sort_keys=False))


def rewrite(path: Path, text: str) -> None:
    """Replace a file, which may be a link into DVC's cache."""
    path.unlink(missing_ok=True)
    path.write_text(text)


def add_dataset(root: Path, name: str) -> None:
    set_params(root, f"ingest.datasets.{name}", {"reader": "pairs", "root": f"data/01_raw/{name}"})


def append_to(*paths: str, text: str = "# a comment") -> Callable[[Path], None]:
    def change(root: Path) -> None:
        for path in paths:
            rewrite(root / path, f"{(root / path).read_text()}\n{text}\n")

    return change


def set_to(dotted_key: str, value: Any) -> Callable[[Path], None]:
    return lambda root: set_params(root, dotted_key, value)


def redraw_image(number: int) -> Callable[[Path], None]:
    image = Image.new("RGB", (8, 8), (7, 7, 7))
    return lambda root: image.save(root / "data/01_raw/real/sc_images" / f"{number}.png")


def add_test_only_dataset(root: Path) -> None:
    toy.write_dataset(root / "data/01_raw/birds", ("test", "test"))
    add_dataset(root, "birds")


def templates(folder: str) -> list[str]:
    paths = [str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "components" / folder).rglob("*.j2")]
    assert paths, folder
    return paths


ADDED = "ADDED = 1"
CONVERT = ["convert", "train", "predict", "evaluate"]
TRAIN = ["train", "predict", "evaluate"]
INGEST = ["ingest@real", "validate"]
UNUSED_PARAMS = ("compute.workers", "models.no_module.rates.llm", "promote.min_gain", "pretrain.seed")
CHANGES_OF_NO_STAGE = tuple(set_to(key, 7) for key in UNUSED_PARAMS)
# A comment; the planner, another family, another dataset's reader, the template of another page
CHANGES_OF_CODE_ONLY = (
    append_to("components/stages/train/loop.py"),
    append_to("components/commands/plan/__init__.py", "components/models/onediff.py", text=ADDED),
    append_to("components/datasets/omnidiff.py", text=ADDED),
    append_to(*templates("commands/inspect")),
)

CHANGES: dict[str, tuple[tuple[Callable[[Path], None], ...], list[str], list[str]]] = {
    # what changed: how, the stages that `dvc status` names, the stages that `dvc repro` runs
    "what no stage reads": (CHANGES_OF_NO_STAGE, [], []),
    "code that no stage runs": (CHANGES_OF_CODE_ONLY, ["code"], ["code"]),
    "base": ((append_to("data/00_base/config.json"),), ["pretrain", "train", "predict"], TRAIN),
    "questions": ((append_to("profiles/questions.yaml"),), ["convert"], CONVERT),
    "grammar": ((append_to("data/01_raw/real/grammar.json"),), INGEST[:1], [*INGEST, "evaluate"]),
    "image that trains": ((redraw_image(0),), INGEST[:1], [*INGEST, *CONVERT]),
    "image that only tests": ((redraw_image(3),), INGEST[:1], [*INGEST, "convert", "predict", "evaluate"]),
    "test-only dataset": (
        (add_test_only_dataset,),
        ["code", "ingest@birds", "validate", "convert"],
        ["code", "ingest@birds", "validate", "convert", "predict", "evaluate"],
    ),
    "the trained family": (  # its captions are the same
        (append_to("components/models/m3diff_model.py", text=ADDED),),
        ["code"],
        ["code", "train", "predict"],
    ),
    "report's template": ((append_to(*templates("report")),), ["code", "evaluate"], ["code", "evaluate"]),
    "model to train": ((set_to("train.model", "no_module"),), ["code", "train"], ["code", *TRAIN]),
}


@pytest.mark.slow(15)
@pytest.mark.fault("25", "27")
@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_dvc_reruns_only_what_depends_on_it(current, change):
    functions, changed_stages, reruns = CHANGES[change]
    for function in functions:
        function(current)
    assert list(toy.status(current)) == changed_stages
    if changed_stages:
        assert re.findall(r"Running stage '(.+)'", toy.run(current, "dvc", "repro")) == reruns
    else:
        assert reruns == [], "a stage that `dvc status` does not list does not run"


@pytest.mark.slow
def test_repro_records_a_frozen_base_of_a_fresh_clone_without_running_it(trained_once, tmp_path):
    current = Path(shutil.copytree(trained_once, tmp_path / "toy", symlinks=True))
    toy.commit(current, "trained")
    clone = tmp_path / "clone"
    toy.run(current, "git", "clone", "-q", ".", str(clone))
    assert (clone / "data/00_base/config.json").is_file()
    assert "pretrain" not in toy.status(clone)
    assert "Stage 'pretrain' didn't change, skipping" in toy.run(clone, "dvc", "repro", "pretrain")
    append_to("data/00_base/config.json")(current)
    printed = toy.run(current, "dvc", "repro", "--single-item", "pretrain")
    assert "Verifying outputs in frozen stage: 'pretrain'" in printed
    assert list(toy.status(current)) == ["train", "predict"]
