"""What a command line imports, in a process of its own."""

import json
import subprocess
import sys

import pytest

from tests.tiny import noise_image, tiny_base, tiny_checkpoint

IMPORTED_PACKAGES = """
import contextlib, io, json, sys
before = set(sys.modules)
from m3diff.__main__ import COMMANDS, main
lines = {lines!r}
if lines is None:
    lines = [[], ["--help"], *([name, "--help"] for name in COMMANDS if name != "plan")]
for line in lines:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(line)
names = {{name.partition(".")[0] for name in set(sys.modules) - before}} - sys.stdlib_module_names
print(json.dumps(sorted(names - {{"m3diff", "__main__"}})))
"""


def imported_packages(lines: list[list[str]] | None) -> list[str]:
    """Return the third-party packages that these command lines import; None runs all helps but that of plan."""
    code = IMPORTED_PACKAGES.format(lines=lines)
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(process.stdout)


def test_no_help_but_plan_s_imports_a_package():
    assert imported_packages(None) == []


def test_the_help_of_plan_imports_no_library_that_computes():
    assert {"numpy", "pyarrow", "polars", "torch", "transformers"}.isdisjoint(imported_packages([["plan", "--help"]]))


@pytest.mark.slow(15)
def test_caption_imports_the_model_s_libraries_and_none_of_the_registry_s(tmp_path):
    checkpoint = tiny_checkpoint(tiny_base(tmp_path / "base"), tmp_path / "checkpoint")
    images = [tmp_path / f"{name}.png" for name in "ab"]
    for number, image in enumerate(images):
        noise_image(number, (40, 40)).save(image)
    imported = imported_packages([["caption", *map(str, images), "--model", str(checkpoint)]])
    assert {"torch", "transformers", "PIL"} <= set(imported)
    # transformers itself imports scipy
    heavy = {"mlflow", "sqlalchemy", "ray", "peft", "polars", "pandas", "sklearn", "great_expectations", "dvc"}
    assert heavy.isdisjoint(imported)
