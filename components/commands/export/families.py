"""Families that others load without this project: their code, and the bases that their card names.

The code is a copy of the project's own files, whose imports of each other become those of neighbours.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m3diff.models import FAMILIES
from m3diff.models.m3diff import LARGE_BASE, SMALL_BASE
from m3diff.models.onediff import LLAVA_BASE

CALLED = {"m3diff.images.open": "images", "m3diff.records.errors": "errors", "m3diff.commands.export.called": "called"}
"""Of every folder: what its processor is made of; modules with the names of their files in it."""

PACKAGE = Path(__file__).parents[2]
ONEVISION = {name: f"llava-hf/{name}" for name in (SMALL_BASE, LARGE_BASE)}


@dataclass(frozen=True)
class SharedFamily:
    """A family that others load. A new module's classes are `<title>Config` and `<title>ForConditionalGeneration`."""

    name: str
    title: str
    bases: Mapping[str, str]  # published models that it is trained from, by the name of their folder
    tags: tuple[str, ...]
    processing: str  # module of its ImagePairProcessor
    code: tuple[str, ...] = ()  # modules of `m3diff.models` that this needs beside `processing`
    model_code: tuple[str, ...] = ()  # those of a model with a new module
    module: str = ""  # the field of config.json with the new module; without one the model is transformers' own

    @property
    def reads_question(self) -> bool:
        return FAMILIES[self.name].reads_question

    def has_module(self, config: Mapping[str, Any]) -> bool:
        """True where the model of a config.json is more than its base, which transformers' own classes load."""
        return config.get(self.module) is not None

    def auto_map(self, config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """The entry `auto_map` of config.json; none where transformers' own classes are the model's."""
        if not self.has_module(config):
            return {}
        classes = {"AutoConfig": "Config", "AutoModelForImageTextToText": "ForConditionalGeneration"}
        return {"auto_map": {auto: f"{self.name}_model.{self.title}{name}" for auto, name in classes.items()}}

    def sources(self, config: Mapping[str, Any]) -> dict[str, str]:
        """The text of each file of code, by its name: of a model without a module the processor's alone."""
        stems = ("processing", *self.code, *(self.model_code if self.has_module(config) else ()))
        names = CALLED | {self.processing: f"processing_{self.name}"} | {f"m3diff.models.{s}": s for s in stems}
        texts = {}
        for module, name in names.items():
            file = f"{module.replace('.', '/')}.py"
            text = (PACKAGE.parent / file.replace("m3diff", PACKAGE.name, 1)).read_text(encoding="utf-8")
            text = re.sub(r"\bfrom (m3diff[\w.]*) import", lambda found: f"from .{names[found[1]]} import", text)
            origin = f"# From {file} of m3diff, by `m3diff export --hub`. Licence: Apache-2.0"
            texts[f"{name}.py"] = f"{origin}\n{text}"
        return texts


MODULES = ("settings", "layers", "llava")
PROCESSING = "m3diff.commands.export.processing_"
SHARED = {
    "m3diff": SharedFamily(
        name="m3diff",
        title="M3Diff",
        bases=ONEVISION,
        tags=("llava-onevision", "m3diff"),
        processing=f"{PROCESSING}llava",
        model_code=(*MODULES, "m3diff_settings", "m3diff_model"),
        module="mdp",
    ),
    "onediff": SharedFamily(
        name="onediff",
        title="OneDiff",
        bases={**ONEVISION, LLAVA_BASE: f"llava-hf/{LLAVA_BASE}"},
        tags=("llava", "onediff"),
        processing=f"{PROCESSING}llava",
        model_code=(*MODULES, "onediff_settings", "onediff_model"),
        module="vdm",
    ),
    "blip2idc": SharedFamily(
        name="blip2idc",
        title="BLIP2IDC",
        bases={"blip2-opt-2.7b": "Salesforce/blip2-opt-2.7b"},
        tags=("blip-2", "blip2idc"),
        processing=f"{PROCESSING}blip2idc",
        code=("layers", "blip2idc_model"),
    ),
}
