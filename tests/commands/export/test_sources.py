"""The code of a shared folder is the project's own, and needs nothing of the project."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from m3diff.commands.export.hub import sources
from m3diff.commands.export.hub.family import SharedFamily
from m3diff.commands.export.hub.folder import SHARED
from m3diff.commands.export.hub.m3diff.family import M3DIFF
from m3diff.commands.export.hub.sources import Source, SourceError, read_source, standalone

ALLOWED = {"torch", "transformers", "numpy", "PIL", "pillow_heif"}
"""pillow_heif only where an image is HEIC; it is not there, and the message says so."""


@pytest.fixture(scope="module", params=list(SHARED))
def family(request: pytest.FixtureRequest) -> SharedFamily:
    return SHARED[request.param]


@pytest.fixture(scope="module")
def files(family: SharedFamily) -> dict[str, str]:
    return standalone(family.roots({family.module: {}}), family.omitted, family.file_names())  # with its module


def test_the_files_import_what_is_always_there_and_each_other(files: dict[str, str]) -> None:
    for name, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.ImportFrom):
                assert f"{node.module}.py" in files, f"{name}: .{node.module}"
                continue
            else:
                continue
            assert found <= ALLOWED | set(sys.stdlib_module_names), name


def test_no_name_is_undefined_unused_or_out_of_order(files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    rules = ["--isolated", "--select", "F,E,I", "--line-length", "120"]
    checked = subprocess.run([sys.executable, "-m", "ruff", "check", *rules, tmp_path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    form = [sys.executable, "-m", "ruff", "format", "--isolated", "--check", "--line-length", "120", tmp_path]
    assert subprocess.run(form, capture_output=True).returncode == 0


def test_every_definition_is_the_projects_own(family: SharedFamily, files: dict[str, str]) -> None:
    """But for the methods that are named as left out."""
    for name, text in files.items():
        source = origin(family, text)
        assert name == f"{source.file}.py"
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own = source.definitions[node.name]
                omitted = family.omitted.get(source.module, ())
                assert without(node, omitted) == without(own, omitted), f"{name}: {node.name}"


def origin(family: SharedFamily, text: str) -> Source:
    """The file of the project that the first line names."""
    place = text.partition(" of m3diff, by")[0].split()[-1]
    return read_source(place.removesuffix(".py").replace("/", "."), family.file_names())


def without(node: ast.AST, omitted: tuple[str, ...]) -> str:
    """A definition as text, without the methods of its class that are left out."""
    left_out = [name.partition(".")[2] for name in omitted if name.startswith(f"{node.name}.")]  # type: ignore[attr-defined]
    return "\n".join(
        ast.dump(each)
        for each in [*getattr(node, "decorator_list", []), *node.body]  # type: ignore[attr-defined]
        if getattr(each, "name", None) not in left_out
    )


FILES = {
    "m3diff": {
        *("called", "configuration_m3diff", "difference", "family", "fused", "images", "layers", "llava", "mdp"),
        *("modeling", "modeling_m3diff", "processing", "processing_m3diff", "settings", "whole"),
    },
    "onediff": {
        *("called", "configuration_onediff", "family", "fused", "images", "layers", "llava", "modeling"),
        *("modeling_onediff", "processing", "processing_llava", "processing_onediff", "settings", "vdm", "whole"),
    },
    "blip2idc": {"called", "images", "processing", "processing_blip2idc"},
}


def test_the_files_are_those_that_the_classes_need(family: SharedFamily, files: dict[str, str]) -> None:
    assert {name.removesuffix(".py") for name in files} == FILES[family.name]


def test_methods_that_are_left_out_are_in_no_file(family: SharedFamily, files: dict[str, str]) -> None:
    for module, names in family.omitted.items():
        text = files[f"{read_source(module, family.file_names()).file}.py"]
        for name in names:
            cls, _, method = name.partition(".")
            (node,) = (each for each in ast.parse(text).body if getattr(each, "name", None) == cls)
            assert method not in [getattr(each, "name", None) for each in node.body]  # type: ignore[attr-defined]


def test_nothing_registers_itself_where_auto_map_does(files: dict[str, str]) -> None:
    assert "Auto" not in "".join(text.replace("AUTO_MAP", "") for text in files.values()).replace('"Auto', "")


def test_a_method_that_is_no_longer_there_is_named() -> None:
    with pytest.raises(SourceError, match=r"modeling\.py: has no M3DiffModel\.gone, which is named as left out"):
        standalone(M3DIFF.roots({"mdp": {}}), {"m3diff.models.m3diff.modeling": ("M3DiffModel.gone",)}, {})


def test_two_modules_of_one_name_are_not_one_file() -> None:
    family = SHARED["onediff"]
    names = {module: file for module, file in family.file_names().items() if file != "processing_llava"}
    with pytest.raises(SourceError, match=r"would both be processing\.py; name one otherwise"):
        standalone(family.roots({}), family.omitted, names)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import m3diff.records.files\n\ndef f():\n    return m3diff.records.files\n", "can be shared"),
        ("def f():\n    from m3diff.records.files import sha256\n    return sha256\n", "inside a function"),
        ("def g():\n    return 1\n", "neither defines nor imports f"),
    ],
)
def test_code_that_cannot_be_followed_is_named(
    text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "components_of_a_test.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SourceError, match=told):
        standalone({"components_of_a_test": ("f",)}, {}, {})


def test_a_part_of_a_file_brings_what_it_uses_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PROJECT", "a_project")
    package = tmp_path / "a_project"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text(
        '"""First."""\n\nimport json\nimport os\nfrom a_project.two import helper as help_, other\n\nLIMIT = 3\n'
        '"""Of what."""\n\n\ndef f(x: int) -> str:\n    return json.dumps(help_(x)) * LIMIT\n\n\ndef g():\n'
        "    return os.sep, other()\n"
    )
    (package / "two.py").write_text("def helper(x):\n    return x\n\n\ndef other():\n    return 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    made = standalone({"a_project.one": ("f",)}, {}, {})
    assert made == {
        "one.py": "# Part of a_project/one.py of m3diff, by `m3diff export --hub`. Licence: Apache-2.0\n"
        '"""First."""\n\nimport json\n\nfrom .two import helper as help_\n\nLIMIT = 3\n"""Of what."""\n\n\n'
        "def f(x: int) -> str:\n    return json.dumps(help_(x)) * LIMIT\n",
        "two.py": "# Part of a_project/two.py of m3diff, by `m3diff export --hub`. Licence: Apache-2.0\n\n\n"
        "def helper(x):\n    return x\n",
    }
