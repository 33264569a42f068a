"""Families that others load without this project: their code, and what the card says of them.

The code is a copy of the project's own files, whose imports of each other become those of neighbours.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from m3diff.models import FAMILIES
from m3diff.models.m3diff import LARGE_BASE, SMALL_BASE
from m3diff.models.onediff import LLAVA_BASE

CALLED = {"m3diff.images.open": "images", "m3diff.commands.export.called": "called"}
"""Of every folder: what its processor is made of; modules with the names of their files in it."""

ONEVISION = {name: f"llava-hf/{name}" for name in (SMALL_BASE, LARGE_BASE)}
PADDED = "Each image is padded to a square and resized to {side} x {side} pixels"


@dataclass(frozen=True)
class SharedFamily:
    """A family that others load. A new module's classes are `<title>Config` and `<title>ForConditionalGeneration`."""

    name: str
    title: str
    summary: str  # of the card: what it is and whose, Markdown
    images: str  # the sentence on what happens to images of a vision encoder of {side} px; of two sides also {half}
    citation: str  # BibTeX
    bases: Mapping[str, str]  # published models that it is trained from, by the name of their folder
    tags: tuple[str, ...]
    processing: str  # module of its ImagePairProcessor
    code: tuple[str, ...]  # modules of `m3diff.models` that this needs
    model_code: tuple[str, ...] = ()  # those of a model with a new module
    module: str | None = None  # the field of config.json with the new module; None: the model is transformers' own
    refused_by: str = ""  # whose own classes refuse a folder with that module
    controls: Mapping[str, str] = field(default_factory=dict)  # the sentence on a module of another kind, or none
    inner_generation: bool = False  # whether `generate` decodes by what config.json says of the language model

    @property
    def reads_question(self) -> bool:
        return FAMILIES[self.name].reads_question

    def has_module(self, config: Mapping[str, Any]) -> bool:
        """True where the model of a config.json is more than its base, which transformers' own classes load."""
        return self.module is not None and config.get(self.module) is not None

    def control(self, config: Mapping[str, Any]) -> str:
        """The sentence on a model that is a control, or nothing."""
        kind = config[self.module].get("kind", "") if self.module and self.has_module(config) else "none"
        return self.controls.get(kind, "")

    def auto_map(self, config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """The entry `auto_map` of config.json; none where transformers' own classes are the model's."""
        if not self.has_module(config):
            return {}
        classes = {"AutoConfig": "Config", "AutoModelForImageTextToText": "ForConditionalGeneration"}
        return {"auto_map": {auto: f"{self.name}_model.{self.title}{name}" for auto, name in classes.items()}}

    def sources(self, config: Mapping[str, Any]) -> dict[str, str]:
        """The text of each file of code, by its name: of a model without a module the processor's alone."""
        stems = (*self.code, *(self.model_code if self.has_module(config) else ()))
        names = (
            CALLED | {self.processing: f"processing_{self.name}"} | {f"m3diff.models.{stem}": stem for stem in stems}
        )

        def neighbour(found: re.Match[str]) -> str:
            return f"from .{names[found[1]]} import"

        texts = {}
        for module, name in names.items():
            spec = find_spec(module)
            assert spec is not None
            assert spec.origin is not None
            text = re.sub(r"\bfrom (m3diff[\w.]*) import", neighbour, Path(spec.origin).read_text(encoding="utf-8"))
            origin = f"# From {module.replace('.', '/')}.py of m3diff, by `m3diff export --hub`. Licence: Apache-2.0"
            texts[f"{name}.py"] = f"{origin}\n{text}"
        return texts


LLAVA: dict[str, Any] = {
    "images": PADDED,
    "processing": "m3diff.commands.export.processing_llava",
    "code": ("processing",),
}

M3DIFF = SharedFamily(
    **LLAVA,
    name="m3diff",
    title="M3Diff",
    summary=(
        "It is LLaVA-OneVision with a Multi-scale Differential Perception (MDP) module between vision encoder and\n"
        "projector ([arXiv 2503.11093](https://arxiv.org/abs/2503.11093))."
    ),
    citation="""\
@inproceedings{liu2025omnidiff,
  title = {OmniDiff: A Comprehensive Benchmark for Fine-grained Image Difference Captioning},
  author = {Liu, Yuan and Hou, Saihui and Hou, Saijie and Du, Jiabao and Meng, Shibei and Huang, Yongzhen},
  booktitle = {ICCV},
  year = {2025},
  note = {arXiv:2503.11093}
}""",
    bases=ONEVISION,
    tags=("llava-onevision", "m3diff"),
    model_code=("settings", "m3diff_settings", "layers", "llava", "m3diff_model"),
    module="mdp",
    refused_by="LLaVA-OneVision's own classes refuse this folder: they would leave the MDP module out.",
    controls={
        "none": "This one is a control without that module: LLaVA-OneVision itself.",
        "difference": "This one is a control with the features' bare difference in that module's place.",
    },
)

ONEDIFF = SharedFamily(
    **LLAVA,
    name="onediff",
    title="OneDiff",
    summary=(
        "It is LLaVA with a Visual Delta Module (VDM), whose delta tokens the LLM reads beside those of both images\n"
        "([arXiv 2407.05645](https://arxiv.org/abs/2407.05645), built from the paper's text; no code was published)."
    ),
    citation="""\
@inproceedings{hu2024onediff,
  title = {OneDiff: A Generalist Model for Image Difference Captioning},
  author = {Hu, Erdong and Guo, Longteng and Yue, Tongtian and Zhao, Zijia and Xue, Shuning and Liu, Jing},
  booktitle = {ACCV},
  year = {2024},
  note = {arXiv:2407.05645}
}""",
    bases={**ONEVISION, LLAVA_BASE: f"llava-hf/{LLAVA_BASE}"},
    tags=("llava", "onediff"),
    model_code=("settings", "onediff_settings", "layers", "llava", "onediff_model"),
    module="vdm",
    refused_by="LLaVA's own classes refuse this folder: they would leave the VDM out.",
    controls={"none": "This one is a control without that module: LLaVA itself."},
)

BLIP2IDC = SharedFamily(
    name="blip2idc",
    title="BLIP2IDC",
    summary=(
        "It is BLIP-2 on both images stacked into one picture, the one before on top, fine-tuned by low-rank\n"
        "adapters, which are merged here ([arXiv 2412.15939](https://arxiv.org/abs/2412.15939))."
    ),
    images="Each image is stretched to {side} x {half} pixels, half of the picture that the model reads",
    citation="""\
@inproceedings{evennou2025reframing,
  title = {Reframing Image Difference Captioning with BLIP2IDC and Synthetic Augmentation},
  author = {Evennou, Gautier and Chaffin, Antoine and Chappelier, Vivien and Kijak, Ewa},
  booktitle = {WACV},
  year = {2025},
  note = {arXiv:2412.15939}
}""",
    bases={"blip2-opt-2.7b": "Salesforce/blip2-opt-2.7b"},
    tags=("blip-2", "blip2idc"),
    processing="m3diff.commands.export.processing_blip2idc",
    code=("processing", "layers", "blip2idc_model"),
    inner_generation=True,
)

SHARED = {family.name: family for family in (M3DIFF, ONEDIFF, BLIP2IDC)}
