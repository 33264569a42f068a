"""The BLIP2IDC model family (arXiv 2412.15939): settings, checks and augmentation.

The BLIP-2 architecture is unchanged. The two images are stacked into one picture, so the vision encoder compares them
from its first layer on. Only low-rank adapters are trained. They are added to the layers that compute queries, keys and
values in the vision encoder, the Q-Former and the LLM.

This module does not import torch or transformers until a model is needed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from m3diff.models.contract import Model, Prepared, Processor, Takes
from m3diff.models.family import MAPS_OF_MODEL, Family
from m3diff.models.settings import Fields, Settings
from m3diff.records.errors import Fault

if TYPE_CHECKING:
    import numpy as np

PARTS = {
    "vision": ("vision_model.",),
    "module": ("qformer.", "query_tokens"),
    "projector": ("language_projection.",),
    "llm": ("language_model.",),
}

CROSS_ATTENTION = r"crossattention\.attention"
# The same targets as in the authors' code: the queries, keys and values of all parts, except the queries of the
# Q-Former's self-attention. The vision encoder computes all three with one linear layer.
LORA_TARGETS = {
    "vision": r"vision_model\.encoder\.layers\.\d+\.self_attn\.qkv",
    "module": (
        rf"qformer\.encoder\.layer\.\d+\.((attention\.attention|{CROSS_ATTENTION})\.(key|value)|"
        rf"{CROSS_ATTENTION}\.query)"
    ),
    "llm": r"language_model\.model\.(decoder\.)?layers\.\d+\.self_attn\.(q|k|v)_proj",
}


@dataclass(frozen=True)
class Augment(Fields):
    """Settings of the random augmentation of image pairs during training.

    The augmentation must not change the meaning of a pair, so it does not crop, flip or recolour images (section 5.1
    of the paper). The paper mentions blur and JPEG compression, but not their strength.

    blur: probability of blurring a pair. The authors' code blurs every pair, even in tests. Here, half of the pairs are
        blurred by default, because images are not blurred when they are captioned.
    sigma: smallest and largest standard deviation of the 3 x 3 Gaussian filter, in pixels, as in the authors' code.
    jpeg: probability of compressing a pair. The authors' code does not compress images.
    quality: lowest and highest JPEG quality. Cameras and the web use 75 to 95. Below 50, the artefacts of the 8 x 8
        pixel blocks would hide small changes.
    """

    blur: float = 0.5
    sigma: tuple[float, float] = (0.1, 0.5)
    jpeg: float = 0.5
    quality: tuple[int, int] = (60, 95)

    def faults(self) -> Iterator[Fault]:
        """Yield a fault for each invalid probability and each invalid range of blur or JPEG quality."""
        for field_name in ("blur", "jpeg"):
            probability = getattr(self, field_name)
            if not 0 <= probability <= 1:
                yield Fault("models.not_a_probability", field=field_name, value=probability)
        smallest_sigma, largest_sigma = self.sigma
        if not 0 < smallest_sigma <= largest_sigma:
            yield Fault("models.wrong_range_of_sigma", field="sigma", value=list(self.sigma))
        lowest_quality, highest_quality = self.quality
        if not 1 <= lowest_quality <= highest_quality <= 100:
            yield Fault("models.wrong_range_of_quality", field="quality", value=list(self.quality))


@dataclass(frozen=True)
class Blip2IDCSettings(Settings):
    """Settings of BLIP2IDC.

    lora: adapters of the layers that compute queries, keys and values. The paper uses rank 8 and an alpha of twice the
        rank.
    rates: learning rate of each part, of which `module` is BLIP-2's Q-Former; null, or no rate, freezes a part. The
        paper uses the same rate for the adapters of the vision encoder, the Q-Former and the LLM, and freezes the
        projector.
    module: always null, because BLIP2IDC does not add a module.
    augment: random augmentation of image pairs during training; null disables it.
    align: always null, because BLIP2IDC is trained in a single phase.
    """

    family: Literal["blip2idc"]
    module: None = field(default=None, kw_only=True)
    augment: Augment | None = field(default_factory=Augment)
    align: None = None

    def has_module(self) -> bool:
        """Return True, because the base's Q-Former counts as the part `module`."""
        return True


def classes() -> tuple[type[Model], type[Processor]]:
    """Return the model class and the processor class."""
    from m3diff.models.blip2idc_model import Blip2IDCForConditionalGeneration, Blip2IDCProcessor

    return Blip2IDCForConditionalGeneration, Blip2IDCProcessor


def faults(settings: Blip2IDCSettings, base: Mapping[str, Any] | None) -> list[Fault]:
    """Return the reasons why the base cannot be used, or an empty list if the base is not known yet."""
    if base is None:
        return []
    model_type = base.get("model_type", "blip-2")
    if model_type != "blip-2":
        return [Fault("models.other_base", family=settings.family, value=model_type, names=["BLIP-2"])]
    base_faults = []
    llm_type = base.get("text_config", {}).get("model_type", "opt")
    if llm_type == "t5":
        base_faults.append(Fault("models.llm_with_encoder", field="text_config.model_type", value=llm_type))
    if base.get("image_token_index") is None:
        base_faults.append(Fault("models.base_without_image_token", field="image_token_index"))
    return base_faults


def augment(settings: Blip2IDCSettings, prepared: Prepared, rng: "np.random.Generator") -> Prepared:
    """Return the augmented pair; see `Family.augment`."""
    if settings.augment is None:
        return prepared
    import torch

    from m3diff.models.blip2idc_model import augment_pair

    pair = augment_pair(settings.augment, prepared.tensors["pixels"].numpy(), rng)
    return prepared._replace(tensors={"pixels": torch.tensor(pair)})


# The prompt consists only of BLIP-2's start token, because the model does not read a question
FAMILY = Family(
    settings=Blip2IDCSettings,
    parts=PARTS,
    lora_targets=LORA_TARGETS,
    classes=classes,
    faults=faults,
    takes=Takes(images=(2,), questions=False, turns=False),
    maps=MAPS_OF_MODEL,
    augment=augment,
    prompt_tokens=1.0,
    model_types=("blip-2",),
)
