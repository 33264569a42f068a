"""The digest of a stage's code: what it follows, what changes it, and what does not."""

import json
from pathlib import Path

import pytest

from m3diff.provenance import code
from m3diff.records.lazy import Lazy

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
    def f(self, x: int = 1) -> str:
        """Docstring."""
        return f"{x!r:>{LIMIT}} of" + "it"  # a comment
'''
SAME, OTHER = True, False
CHANGES = {
    "a comment": ("# a comment", "# another", SAME),
    "the docstring of a module": ('"""Docstring."""\nLIMIT', '"""Another."""\nLIMIT', SAME),
    "no docstring": ('        """Docstring."""\n        return', "        return", SAME),
    "a line's form": ('return f"{x!r:>{LIMIT}} of" + "it"', 'return (\n  f"{x!r:>{LIMIT}} of" + "it")', SAME),
    "quotes": ('"it"', "'it'", SAME),
    "the docstring of a constant": ('"""Of a constant."""', '"""Of it."""', SAME),
    "a number": ("LIMIT = 3", "LIMIT = 4", OTHER),
    "a number's type": ("LIMIT = 3", "LIMIT = 3.0", OTHER),
    "a truth": ("x: int = 1", "x: int = True", OTHER),
    "nothing": ("x: int = 1", "x: int = None", OTHER),
    "a string": ('"it"', '"its"', OTHER),
    "a conversion": ("x!r", "x!s", OTHER),
    "an annotation": ("x: int", "x: float", OTHER),
    "a name": ("LIMIT", "LIMITS", OTHER),
    "an order": ('f"{x!r:>{LIMIT}} of" + "it"', '"it" + f"{x!r:>{LIMIT}} of"', OTHER),
    "a decorator": ("    def f(self", "    @staticmethod\n    def f(self", OTHER),
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(code, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_code_is_what_is_imported_anywhere_the_packages_on_the_way_and_the_modules_that_are_named(root: Path) -> None:
    found = set(code.digests(root / "a/first.py"))
    assert found == {name for name in FILES if not name.startswith("a/named") and name != "a/alone.py"}
    named = set(code.digests(root / "a/first.py", ["a.named.one"]))
    assert named == FILES.keys() - {"a/alone.py", "a/named/other.py"}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_meaning_changes_the_digest_and_no_other_does(change: str, tmp_path: Path) -> None:
    before, after, same = CHANGES[change]
    (tmp_path / "before.py").write_text(SOURCE)
    (tmp_path / "after.py").write_text(SOURCE.replace(before, after, 1))
    assert (code.digest(tmp_path / "before.py") == code.digest(tmp_path / "after.py")) == same


def test_a_file_that_was_edited_broken_or_removed_is_named(root: Path) -> None:
    (root / "code").mkdir()
    (root / "code" / "stage.json").write_text(json.dumps(code.digests(root / "a/first.py")))
    assert code.edited("stage") == []
    (root / "a/first.py").write_text(FILES["a/first.py"] + "# a comment")
    assert code.edited("stage") == []
    (root / "a/fourth.py").write_text("name = 1")
    (root / "a/third/deep.py").write_text("import")
    (root / "a/b/second.py").unlink()
    assert code.edited("stage") == ["a/b/second.py", "a/fourth.py", "a/third/deep.py"]


def test_a_list_imports_what_is_asked_for_and_takes_an_object_from_outside() -> None:
    found: Lazy[object] = Lazy("digest", {"one": "m3diff.provenance.code", "none": "m3diff.no_such_module"})
    assert (list(found), len(found), "none" in found, found.get("two")) == (["one", "none"], 2, True, None)
    assert found["one"] is code.digest
    with pytest.raises(ModuleNotFoundError):
        found["none"]
    found["two"] = 2
    assert (found["two"], list(found)) == (2, ["one", "none", "two"])
    del found["two"]
    assert "two" not in found
