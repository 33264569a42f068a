"""Digests of a stage's code, and edits while a stage runs, which fail the stage and are not recorded."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from m3diff.__main__ import COMMANDS, USAGE, main
from m3diff.models import FAMILIES
from m3diff.provenance import code, dvc
from m3diff.provenance.dvc import require_unchanged_inputs, watched_inputs
from m3diff.provenance.git import git
from m3diff.records import LazyMapping
from m3diff.records.errors import DataError
from m3diff.settings.section import ParamsError
from m3diff.stages.train import params as train_params
from tests.errors import Message, raises

FILES = {
    "a/__init__.py": "",
    "a/first.py": "import os\nfrom a.b import second\ndef f():\n    import a.third.deep\n",
    "a/b/__init__.py": "",
    "a/b/second.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.fourth import name\n",
    "a/third/__init__.py": "",
    "a/third/deep.py": "import a.first\n",
    "a/fourth.py": "",
    "a/named/__init__.py": "",
    "a/named/one.py": "import a.named.below\n",
    "a/named/below.py": "",
    "a/named/other.py": "",
    "a/alone.py": "",
}
SOURCE = '''"""Docstring."""
LIMIT = 3
"""Of a constant."""
class C:
    """Docstring."""
    width: int
    """Of a field."""
    def f(self, x: int = 1) -> str:
        """Docstring."""
        return f"{x!r:>{LIMIT}} of" + "it"  # a comment
'''
EQUAL = True
DIFFERENT = False
CHANGES = {
    "a comment": ("# a comment", "# another", EQUAL),
    "the docstring of a module": ('"""Docstring."""\nLIMIT', '"""Another."""\nLIMIT', EQUAL),
    "no docstring": ('        """Docstring."""\n        return', "        return", EQUAL),
    "a line's form": ('return f"{x!r:>{LIMIT}} of" + "it"', 'return (\n  f"{x!r:>{LIMIT}} of" + "it")', EQUAL),
    "quotes": ('"it"', "'it'", EQUAL),
    "a prefix without a meaning": ('"it"', 'u"it"', EQUAL),
    "the docstring of a constant": ('"""Of a constant."""', '"""Of it."""', EQUAL),
    "the description of a field": ('    """Of a field."""', '    """Another."""', EQUAL),
    "no description of a field": ('    """Of a field."""\n', "", EQUAL),
    "a number": ("LIMIT = 3", "LIMIT = 4", DIFFERENT),
    "a number's type": ("LIMIT = 3", "LIMIT = 3.0", DIFFERENT),
    "a truth": ("x: int = 1", "x: int = True", DIFFERENT),
    "nothing": ("x: int = 1", "x: int = None", DIFFERENT),
    "a string": ('"it"', '"its"', DIFFERENT),
    "a conversion": ("x!r", "x!s", DIFFERENT),
    "an annotation": ("x: int", "x: float", DIFFERENT),
    "a name": ("LIMIT", "LIMITS", DIFFERENT),
    "an order": ('f"{x!r:>{LIMIT}} of" + "it"', '"it" + f"{x!r:>{LIMIT}} of"', DIFFERENT),
    "a decorator": ("    def f(self", "    @staticmethod\n    def f(self", DIFFERENT),
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(code, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_code_is_all_imports_their_packages_and_the_named_modules(root: Path) -> None:
    files = list(code.digest_code(root / "a/first.py"))
    assert files == sorted(name for name in FILES if not name.startswith("a/named") and name != "a/alone.py")
    files_with_named = list(code.digest_code(root / "a/first.py", ["a.named.one"]))
    assert files_with_named == sorted(FILES.keys() - {"a/alone.py", "a/named/other.py"})


@pytest.mark.parametrize("change", CHANGES)
def test_only_a_change_of_meaning_changes_the_digest(change: str, tmp_path: Path) -> None:
    before, after, same = CHANGES[change]
    (tmp_path / "before.py").write_text(SOURCE)
    (tmp_path / "after.py").write_text(SOURCE.replace(before, after, 1))
    assert (code.digest_file(tmp_path / "before.py") == code.digest_file(tmp_path / "after.py")) == same


@pytest.mark.parametrize(
    ("original", "changed", "is_equal"),
    [
        ('LazyMapping("FAMILY", {"a": "x.a"})', 'LazyMapping("FAMILY", {"a": "x.a", "new": "x.new"})', True),
        ('LazyMapping("FAMILY", {"a": "x.a"})', 'LazyMapping("OTHER", {"a": "x.a"})', False),
        ('Mapping("FAMILY", {"a": "x.a"})', 'Mapping("FAMILY", {"a": "x.a", "new": "x.new"})', False),
    ],
    ids=["a line", "an attribute", "another mapping"],
)
def test_a_line_in_a_list_of_modules_changes_no_digest(original, changed, is_equal, tmp_path):
    """A new model family does not make the training of the others out of date."""
    digests = []
    for text in (original, changed):
        (tmp_path / "list.py").write_text(text)
        digests.append(code.digest_file(tmp_path / "list.py"))
    assert (digests[0] == digests[1]) == is_equal


def test_the_description_of_a_setting_changes_no_digest(tmp_path: Path) -> None:
    source = Path(train_params.__file__)
    description = train_params.Train.field_descriptions()["epochs"]
    (tmp_path / "after.py").write_text(source.read_text().replace(description, "Another description."))
    assert "Another description." in (tmp_path / "after.py").read_text()
    assert code.digest_file(tmp_path / "after.py") == code.digest_file(source)


def test_an_edited_broken_or_removed_file_is_reported(root: Path) -> None:
    (root / "code").mkdir()
    (root / "code" / "stage.json").write_text(json.dumps(code.digest_code(root / "a/first.py")))
    assert code.edited_files("stage") == []
    (root / "a/first.py").write_text(FILES["a/first.py"] + "# a comment")
    assert code.edited_files("stage") == []
    (root / "a/fourth.py").write_text("name = 1")
    (root / "a/third/deep.py").write_text("import")
    (root / "a/b/second.py").unlink()
    assert code.edited_files("stage") == ["a/b/second.py", "a/fourth.py", "a/third/deep.py"]


@pytest.mark.parametrize("text", [None, "{"], ids=["missing", "cut"])
def test_digests_that_cannot_be_read_are_refused_by_name(text: str | None, root: Path) -> None:
    (root / "code").mkdir()
    if text is not None:
        (root / "code" / "stage.json").write_text(text)
    with raises(DataError, "provenance.unreadable_digests", path=Path("code/stage.json")):
        code.edited_files("stage")


def test_the_order_of_facts_does_not_change_the_key_of_a_run(root: Path) -> None:
    module = root / "a/alone.py"
    key = code.compute_key({"seed": 7, "data": {"first": "1", "second": "2"}}, module)
    assert code.compute_key({"data": {"second": "2", "first": "1"}, "seed": 7}, module) == key
    assert code.compute_key({"data": {"first": "2", "second": "1"}, "seed": 7}, module) != key


def test_the_key_of_a_run_changes_with_the_code_that_it_runs(root: Path) -> None:
    key = code.compute_key({"seed": 7}, root / "a/alone.py", ["a.named.one"])
    (root / "a/named/other.py").write_text("value = 1")
    assert code.compute_key({"seed": 7}, root / "a/alone.py", ["a.named.one"]) == key
    (root / "a/named/below.py").write_text("value = 1")
    assert code.compute_key({"seed": 7}, root / "a/alone.py", ["a.named.one"]) != key


def test_a_failed_command_of_dvc_is_explained_by_the_last_lines_of_its_output(tmp_path, monkeypatch):
    program = "import sys; sys.exit(chr(10).join(['first', 'second', 'third', 'fourth']))"
    monkeypatch.setattr(dvc, "DVC", [sys.executable, "-c", program])
    with raises(DataError, "dvc.command_failed", command="dvc pull", folder=tmp_path, cause="second third fourth"):
        dvc.run_dvc(tmp_path, "pull")


def test_what_a_dvc_file_beside_it_tracks_is_an_output_of_the_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/real.dvc").write_text(f"outs:\n- md5: {'1' * 32}.dir\n  path: real\n")
    Path("dvc.yaml").write_text("stages: {}\n")
    Path("params.yaml").write_text("{}\n")
    for command in (("init", "--quiet"), ("add", "."), ("commit", "--quiet", "--message", "data")):
        git(*command)
    assert dvc.tracked_outputs("HEAD", dvc.Lock(text=b"stages: {}")) == {Path("data/real"): f"{'1' * 32}.dir"}


def test_a_lazy_mapping_imports_on_lookup_and_accepts_other_objects() -> None:
    mapping: LazyMapping[object] = LazyMapping(
        "digest_file", {"one": "m3diff.provenance.code", "none": "m3diff.no_such_module"}
    )
    assert list(mapping) == ["one", "none"]
    assert len(mapping) == 2
    assert "none" in mapping
    assert mapping.get("two") is None
    assert mapping["one"] is code.digest_file
    with pytest.raises(ModuleNotFoundError):
        mapping["none"]
    mapping["two"] = 2
    assert mapping["two"] == 2
    assert list(mapping) == ["one", "none", "two"]
    del mapping["two"]
    assert "two" not in mapping


# An edit while a stage runs

NEW = hashlib.sha256(b"('Module',)").hexdigest()[:12]
EDIT = """
def train(params, paths):
    p = Path('params.yaml')
    p.write_text(p.read_text().replace('seed: 7407', 'seed: 9999'))
    real_train(params, paths)


def real_train("""
LOOP = Path("components/stages/train/loop.py")


@pytest.fixture
def project(built_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = Path(shutil.copytree(built_once, tmp_path / "project", symlinks=True))
    monkeypatch.chdir(root)
    monkeypatch.setenv("DVC_STAGE", "train")
    return root


def repro(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "dvc", "repro", *arguments]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def files_of_family(stage: str, family: str) -> set[str]:
    """Return the files under models/ whose code a stage runs with a family."""
    digests = code.digest_code(code.PACKAGE_FOLDER / "stages" / stage / "stage.py", [FAMILIES.modules[family]])
    return {name.removeprefix("components/models/") for name in digests if name.startswith("components/models/")}


@pytest.mark.parametrize("stage", ["train", "predict"])
def test_the_code_of_a_family_is_not_that_of_runs_of_other_families(stage: str) -> None:
    files_of_auto = files_of_family(stage, "auto")
    own_files = {"auto.py", "auto_processor.py", "stock_processor.py", "cached_prompts.py", "template_defaults.py"}
    assert own_files <= files_of_auto
    for family in ("m3diff", "onediff", "blip2idc"):
        assert not own_files & files_of_family(stage, family)
    assert not {"m3diff.py", "llava.py", "onediff.py", "blip2idc.py"} & files_of_auto


@pytest.mark.fault("B1")
@pytest.mark.slow
def test_a_parameter_edited_during_training_fails_the_stage_and_is_not_recorded(project: Path):
    assert repro("convert")[0] == 0
    lock = Path("dvc.lock").read_bytes()
    original = Path("toy.py").read_text()
    Path("toy.py").write_text(original.replace("\ndef train(", EDIT, 1))  # in its midst, as a person in an editor does
    code, output = repro("-s", "train")
    assert code != 0
    changes = ["train.seed 7407 -> 9999"]
    assert Message("dvc.edited_while_stage_ran", stage="train", changes=changes).in_text(output)
    assert Path("dvc.lock").read_bytes() == lock

    Path("toy.py").write_text(original)
    code, output = repro("-s", "train")  # with the edit let stand
    assert code == 0, "what ran with 7407 is not restored as 9999"
    assert "Running stage 'train'" in output, "what ran with 7407 is not restored as 9999"
    recorded = yaml.safe_load(Path("dvc.lock").read_text())["stages"]["train"]
    assert recorded["params"]["params.yaml"]["train"]["seed"] == 9999
    word = Path("data/05_model/checkpoint/word.txt").read_text()

    Path("params.yaml").write_text(Path("params.yaml").read_text().replace("seed: 9999", "seed: 7407"))
    code, output = repro("-s", "train")
    assert code == 0, "nor was 7407 recorded"
    assert "Running stage 'train'" in output, "nor was 7407 recorded"
    assert Path("data/05_model/checkpoint/word.txt").read_text() != word


@pytest.mark.fault("B1")
def test_edited_code_is_reported_with_both_hashes_and_stale_code_does_not_start(project, monkeypatch):
    before = code.digest_file(LOOP)[:12]
    text = LOOP.read_text()
    for new, after in (("# new", NEW), ("(", "broken"), (None, "absent")):
        with (
            raises(ParamsError, "dvc.edited_while_stage_ran", stage="train") as refused,
            require_unchanged_inputs(),
        ):
            LOOP.unlink() if new is None else LOOP.write_text(new)
        assert f"{LOOP} {before} -> {after}" in refused.value.fields["changes"]
        LOOP.write_text(text)
    LOOP.write_text(f"{text}ADDED = 1\n")
    with (
        raises(ParamsError, "dvc.stale_digests", path=Path("code/train.json"), file=str(LOOP)),
        require_unchanged_inputs(),
    ):
        pytest.fail("it began")
    monkeypatch.setenv("DVC_STAGE", "convert")
    with raises(ParamsError, "dvc.edited_while_stage_ran", stage="convert") as refused, require_unchanged_inputs():
        Path("profiles/questions.yaml").write_text("tasks: {}")
    (change,) = refused.value.fields["changes"]
    assert change.startswith("profiles/questions.yaml ")


def test_an_unrelated_edit_passes_and_an_error_of_the_stage_is_not_hidden(project, monkeypatch):
    edited = Path("params.yaml").read_text().replace("max_new_tokens: 64", "max_new_tokens: 65")
    with require_unchanged_inputs():
        Path("params.yaml").write_text(edited.replace("workers: 2", "workers: 1"))
        Path("components/stages/evaluate/stage.py").write_text("# new")
        Path("components/stages/train/__pycache__").mkdir(exist_ok=True)
        Path("components/stages/train/__pycache__/x.pyc").write_bytes(b"")
    assert "max_new_tokens: 65" in Path("params.yaml").read_text()
    with pytest.raises(ZeroDivisionError), require_unchanged_inputs():
        assert Path("params.yaml").write_text("{}") / 0
    monkeypatch.delenv("DVC_STAGE")
    with require_unchanged_inputs():
        Path("dvc.yaml").unlink()  # a stage by hand is not watched


def test_the_stage_that_writes_the_digests_needs_none_and_watches_its_own_inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_STAGE", "code")
    Path("components").mkdir()
    Path("components/a.py").write_text("")
    Path("dvc.yaml").write_text("stages: {code: {params: [train], deps: [components]}}\n")
    Path("params.yaml").write_text("train: {epochs: 1}\n")
    assert watched_inputs("code").keys() == {"train.epochs", "components/a.py"}
    changes = ["train.epochs 1 -> 2"]
    with raises(ParamsError, "dvc.edited_while_stage_ran", stage="code", changes=changes), require_unchanged_inputs():
        Path("params.yaml").write_text("train: {epochs: 2}\n")


def test_each_stage_watches_all_parameters_and_files_of_dvc_yaml(project: Path):
    train = watched_inputs("train")
    drawn = watched_inputs("synthesize@minichange")
    assert train["train.seed"] == "7407"
    assert train["models.m3diff.family"] == '"m3diff"'
    assert {str(LOOP), "components/provenance/code.py", "train.base", "models.m3diff.rates.llm"} <= train.keys()
    assert not any(name.startswith(("components/stages/evaluate", "compute", "predict")) for name in train)
    assert {"synthesize.minichange.scenes.train", "components/datasets/minichange/render.py"} <= drawn.keys()
    assert drawn["ingest.datasets.minichange.reader"] == '"minichange"'
    assert "profiles/questions.yaml" in watched_inputs("convert")
    assert not any(name.startswith("data") for name in watched_inputs("evaluate"))


def test_edited_added_or_removed_parameters_end_the_command(project, monkeypatch, capsys):
    values = yaml.safe_load(Path("params.yaml").read_text())
    del values["train"]["seed"]
    values["train"] |= {"epochs": 99, "new": "x"}
    text = yaml.safe_dump(values)

    def edit(*_: object) -> None:
        Path("params.yaml").write_text(text)

    monkeypatch.setattr("m3diff.command_line.train.COMMAND", dataclasses.replace(COMMANDS["train"].load(), run=edit))
    assert main(["train"]) == USAGE
    message = capsys.readouterr().err
    assert Message("dvc.edited_while_stage_ran", stage="train").in_text(message)
    for change in ("train.seed 7407 -> absent", " -> 99", 'train.new absent -> "x"'):
        assert change in message
