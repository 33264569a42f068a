"""M3Diff in a shared folder."""

from collections.abc import Mapping
from typing import Any

from m3diff.commands.export.hub.family import LLAVA_CODE, PADDED, SharedFamily
from m3diff.models.m3diff.family import LARGE_BASE, SMALL_BASE

CITATION = """\
@inproceedings{liu2025omnidiff,
  title = {OmniDiff: A Comprehensive Benchmark for Fine-grained Image Difference Captioning},
  author = {Liu, Yuan and Hou, Saihui and Hou, Saijie and Du, Jiabao and Meng, Shibei and Huang, Yongzhen},
  booktitle = {ICCV},
  year = {2025},
  note = {arXiv:2503.11093}
}"""


def control(config: Mapping[str, Any]) -> str:
    if config.get("mdp") is None:
        return "This one is a control without that module: LLaVA-OneVision itself."
    if config["mdp"].get("kind") == "difference":
        return "This one is a control with the features' bare difference in that module's place."
    return ""


def processor(known: Any, question: str, config: Mapping[str, Any]) -> Any:
    from m3diff.commands.export.hub.m3diff.processing import shared_processor

    return shared_processor(known, question)


M3DIFF = SharedFamily(
    name="m3diff",
    title="M3Diff",
    summary=(
        "It is LLaVA-OneVision with a Multi-scale Differential Perception (MDP) module between vision encoder and\n"
        "projector ([arXiv 2503.11093](https://arxiv.org/abs/2503.11093))."
    ),
    control=control,
    images=PADDED,
    citation=CITATION,
    bases={name: f"llava-hf/{name}" for name in (SMALL_BASE, LARGE_BASE)},
    tags=("llava-onevision", "m3diff"),
    image_processor="M3DiffImageProcessor",
    processor=processor,
    omitted=LLAVA_CODE,
    module="mdp",
    config_class="M3DiffConfig",
    model_class="M3DiffForConditionalGeneration",
    refused_by="LLaVA-OneVision's own classes refuse this folder: they would leave the MDP module out.",
)
