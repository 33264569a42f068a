"""OneDiff in a shared folder."""

from collections.abc import Mapping
from typing import Any

from m3diff.commands.export.hub.family import LLAVA_CODE, PADDED, SharedFamily
from m3diff.commands.export.hub.m3diff.family import M3DIFF
from m3diff.models.onediff.family import LLAVA_BASE

CITATION = """\
@inproceedings{hu2024onediff,
  title = {OneDiff: A Generalist Model for Image Difference Captioning},
  author = {Hu, Erdong and Guo, Longteng and Yue, Tongtian and Zhao, Zijia and Xue, Shuning and Liu, Jing},
  booktitle = {ACCV},
  year = {2024},
  note = {arXiv:2407.05645}
}"""


def control(config: Mapping[str, Any]) -> str:
    return "" if config.get("vdm") is not None else "This one is a control without that module: LLaVA itself."


def processor(known: Any, question: str, config: Mapping[str, Any]) -> Any:
    from m3diff.commands.export.hub.onediff.processing import shared_processor

    return shared_processor(known, question, tells_pairs=config["model_type"] != "llava")


ONEDIFF = SharedFamily(
    name="onediff",
    title="OneDiff",
    summary=(
        "It is LLaVA with a Visual Delta Module (VDM), whose delta tokens the LLM reads beside those of both images\n"
        "([arXiv 2407.05645](https://arxiv.org/abs/2407.05645), built from the paper's text; no code was published)."
    ),
    control=control,
    images=PADDED,
    citation=CITATION,
    bases={**M3DIFF.bases, LLAVA_BASE: f"llava-hf/{LLAVA_BASE}"},
    tags=("llava", "onediff"),
    image_processor="M3DiffImageProcessor",
    processor=processor,
    omitted=LLAVA_CODE | {"m3diff.models.onediff.processing": ("OneDiffProcessor.from_pretrained",)},
    module="vdm",
    config_class="OneDiffConfig",
    model_class="OneDiffForConditionalGeneration",
    refused_by="LLaVA's own classes refuse this folder: they would leave the VDM out.",
    files={"m3diff.models.m3diff.processing": "processing_llava"},
)
