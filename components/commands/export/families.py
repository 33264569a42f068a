"""Define which model families can be shared, and copy the code that an exported folder needs."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3diff.models import FAMILIES
from m3diff.models.m3diff import LARGE_BASE, SMALL_BASE
from m3diff.models.onediff import LLAVA_BASE
from m3diff.records.errors import wording

# Modules that every processor needs, with the names of their files in an exported folder
PROCESSOR_MODULES = {
    "m3diff.images.open": "images",
    "m3diff.images.colour": "colour",
    "m3diff.images.jpeg": "jpeg",
    "m3diff.records.contents": "contents",
    "m3diff.records.errors": "errors",
    "m3diff.records.sample": "sample",
    "m3diff.models.prepared": "prepared",
    "m3diff.commands.export.callable_processor": "called",
}

ERRORS_MODULE = "m3diff.records.errors"
# The line of the errors module that `with_wording` replaces with the wording of the errors
WORDING_LINE = "WORDING_OF_COPY: Mapping[str, Mapping[str, str]] | None = None\n"

PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True)
class SharedFamily:
    """A family whose models can be shared.

    Attributes:
        name: name of the family.
        title: name in the card, and in the class names `<title>Config` and `<title>ForConditionalGeneration`. Empty if
            the classes are those of the base.
        bases: folder name -> published base model. Empty if any model may be the base.
        tags: tags in the card for model hubs.
        processing: Python module that defines the family's `ImagePairProcessor`. None if model and processor are of
            classes of transformers, so that the folder contains no code.
        code: Python modules in `m3diff.models` that every folder needs in addition to `processing`.
        model_code: Python modules in `m3diff.models` that are needed only if the model has a new module.
        module: field of config.json that describes the new module. Models without it are loaded with transformers'
            classes.
    """

    name: str
    title: str
    bases: Mapping[str, str]
    tags: tuple[str, ...]
    processing: str | None
    code: tuple[str, ...] = ()
    model_code: tuple[str, ...] = ()
    module: str = ""

    @property
    def reads_question(self) -> bool:
        """Whether the model's answer depends on the question."""
        return FAMILIES[self.name].reads_question

    @property
    def is_stock(self) -> bool:
        """Whether transformers alone can load the folder, which then contains no code of this project."""
        return self.processing is None

    def has_module(self, config: Mapping[str, Any]) -> bool:
        """Return whether config.json describes a model with a new module, which transformers cannot load by itself."""
        return config.get(self.module) is not None

    def auto_map(self, config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """Return {"auto_map": ...} for config.json, or an empty dict if transformers' classes can load the model."""
        if not self.has_module(config):
            return {}
        module = f"{self.name}_model"
        return {
            "auto_map": {
                "AutoConfig": f"{module}.{self.title}Config",
                "AutoModelForImageTextToText": f"{module}.{self.title}ForConditionalGeneration",
            }
        }

    def source_files(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Return the Python files for the folder: file name -> source."""
        if self.processing is None:
            return {}
        model_modules = ["processing", *self.code]
        if self.has_module(config):
            model_modules += self.model_code
        file_stems = PROCESSOR_MODULES | {self.processing: f"processing_{self.name}"}
        file_stems |= {f"m3diff.models.{module}": module for module in model_modules}
        sources = {module: copy_source(module, file_stems) for module in file_stems}
        sources[ERRORS_MODULE] = with_wording(sources[ERRORS_MODULE], sources.values())
        return {f"{file_stems[module]}.py": source for module, source in sources.items()}


def copy_source(module: str, file_stems: Mapping[str, str]) -> str:
    """Return the source of a module with imports from the project replaced by imports from the same folder.

    Args:
        module: full name of the module.
        file_stems: full name of each module -> name of its file in the folder, without `.py`.
    """
    path = f"{module.replace('.', '/')}.py"
    # The folder of the package is `components` in a checkout and `m3diff` in a wheel
    source_file = PACKAGE.parent / path.replace("m3diff", PACKAGE.name, 1)
    source = re.sub(
        r"\bfrom (m3diff[\w.]*) import",
        lambda match: f"from .{file_stems[match[1]]} import",
        source_file.read_text(encoding="utf-8"),
    )
    return f"# From {path} of m3diff, by `m3diff export --hub`. Licence: Apache-2.0\n{source}"


def with_wording(errors_source: str, sources: Iterable[str]) -> str:
    """Insert the wording of all errors that the folder's sources can raise into the source of the errors module.

    The project reads the wording from messages.toml, but transformers copies only Python files when it loads code from
    a folder.

    Args:
        errors_source: source of the errors module.
        sources: sources of all modules in the folder.
    """
    codes = sorted({text for source in sources for text in constants_of(source) if text in wording()})
    messages = "".join(f"    {code!r}: {dict(wording()[code])!r},\n" for code in codes)
    assert errors_source.count(WORDING_LINE) == 1
    return errors_source.replace(WORDING_LINE, WORDING_LINE.replace("None\n", f"{{\n{messages}}}\n"))


def constants_of(source: str) -> Iterator[str]:
    """Yield every string constant in Python source code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


ONEVISION_BASES = {name: f"llava-hf/{name}" for name in (SMALL_BASE, LARGE_BASE)}
LLAVA_MODULES = ("settings", "layers", "llava")
LLAVA_PROCESSING = "m3diff.commands.export.processing_llava"

SHARED = {
    "m3diff": SharedFamily(
        name="m3diff",
        title="M3Diff",
        bases=ONEVISION_BASES,
        tags=("llava-onevision", "m3diff"),
        processing=LLAVA_PROCESSING,
        model_code=(*LLAVA_MODULES, "m3diff_model"),
        module="mdp",
    ),
    "onediff": SharedFamily(
        name="onediff",
        title="OneDiff",
        bases={**ONEVISION_BASES, LLAVA_BASE: f"llava-hf/{LLAVA_BASE}"},
        tags=("llava", "onediff"),
        processing=LLAVA_PROCESSING,
        model_code=(*LLAVA_MODULES, "onediff_model"),
        module="vdm",
    ),
    "blip2idc": SharedFamily(
        name="blip2idc",
        title="BLIP2IDC",
        bases={"blip2-opt-2.7b": "Salesforce/blip2-opt-2.7b"},
        tags=("blip-2", "blip2idc"),
        processing="m3diff.commands.export.processing_blip2idc",
        code=("layers", "blip2idc_model"),
    ),
    "auto": SharedFamily(name="auto", title="", bases={}, tags=(), processing=None),
}
