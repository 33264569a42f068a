"""BLIP2IDC (arXiv 2412.15939) as a model family: its settings and rules. Light to import: torch and transformers
come with the first call.

BLIP-2 as it is: the two images, stacked into one picture, meet in the vision encoder's first layer, and low-rank
adapters of queries, keys and values in all three parts are all that trains.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from m3diff.models.family import Family
from m3diff.models.settings import Fields, Settings

if TYPE_CHECKING:
    import numpy as np

PARTS = {
    "vision": ("vision_model.",),
    "module": ("qformer.", "query_tokens"),
    "projector": ("language_projection.",),
    "llm": ("language_model.",),
}

CROSSING = r"crossattention\.attention"
# As the authors' code names them: queries, keys and values of all parts, but for the queries of the Q-Former's
# self-attention. In the vision encoder the three are one linear.
LORA_TARGETS = {
    "vision": r"vision_model\.encoder\.layers\.\d+\.self_attn\.qkv",
    "module": rf"qformer\.encoder\.layer\.\d+\.((attention\.attention|{CROSSING})\.(key|value)|{CROSSING}\.query)",
    "llm": r"language_model\.model\.(decoder\.)?layers\.\d+\.self_attn\.(q|k|v)_proj",
}


@dataclass(frozen=True)
class Augment(Fields):
    """Changes to a pair while it trains: never of its meaning, so no crop, flip or change of colour (the paper,
    section 5.1). The paper names blur and JPEG compression and gives no strength.

    blur: share of the visits that are blurred. The authors' code blurs each one, at test too; here one in two, since
        what is captioned later is not blurred.
    sigma: least and most standard deviation of the Gaussian of 3 x 3 pixels, the code's.
    jpeg: share of the visits that are compressed; the code has none.
    quality: least and most quality of the JPEG file. Cameras and the web use 75 to 95; under 50 the blocks of 8 pixels
        would hide small changes.
    """

    blur: float = 0.5
    sigma: tuple[float, float] = (0.1, 0.5)
    jpeg: float = 0.5
    quality: tuple[int, int] = (60, 95)

    def rules(self) -> dict[str, bool]:
        (thin, wide), (least, most) = self.sigma, self.quality
        return {
            f"blur must be from 0 to 1, found {self.blur}": 0 <= self.blur <= 1,
            f"jpeg must be from 0 to 1, found {self.jpeg}": 0 <= self.jpeg <= 1,
            f"sigma must be above 0, the least first, found {list(self.sigma)}": 0 < thin <= wide,
            f"quality must be from 1 to 100, the least first, found {list(self.quality)}": 1 <= least <= most <= 100,
        }


@dataclass(frozen=True)
class Blip2IDCSettings(Settings):
    """Settings of BLIP2IDC.

    lora: adapters of queries, keys and values. The paper: rank 8, alpha twice the rank.
    rates: learning rates by part; `module` is BLIP-2's Q-Former. The paper: one rate for the adapters of vision
        encoder, Q-Former and LLM, and a frozen projector.
    module: null; BLIP-2 has no new one.
    augment: how pairs are changed while they train; null: not at all.
    align: null; there is one phase.
    """

    family: Literal["blip2idc"]
    module: None = field(default=None, kw_only=True)
    augment: Augment | None = field(default_factory=Augment)
    align: None = None

    def has_module(self) -> bool:
        return True  # the base's own


def classes() -> tuple[Any, Any]:
    from m3diff.models.blip2idc_model import Blip2IDCForConditionalGeneration, Blip2IDCProcessor

    return Blip2IDCForConditionalGeneration, Blip2IDCProcessor


def faults(settings: Blip2IDCSettings, base: Mapping[str, Any] | None) -> list[str]:
    """Why the base cannot be used; nothing where it is not known."""
    if base is None:
        return []
    kind, text = base.get("model_type", "blip-2"), base.get("text_config", {}).get("model_type", "opt")
    if kind != "blip-2":
        return [f"family blip2idc needs a BLIP-2 in train.base, which is a {kind}; name one there"]
    found = []
    if text == "t5":
        found.append("its base's LLM is a t5, an encoder with a decoder; take one with a decoder alone, as OPT")
    if base.get("image_token_index") is None:
        found.append(
            "its base has no image_token_index: a release from before BLIP-2's processor knew <image>; take a later one"
        )
    return found


def augment(settings: Blip2IDCSettings, pair: "np.ndarray", rng: "np.random.Generator") -> "np.ndarray":
    from m3diff.models.blip2idc_model import augmented

    return pair if settings.augment is None else augmented(settings.augment, pair, rng)


FAMILY = Family(  # its prompt is the token that BLIP-2 begins texts with, and no question
    settings=Blip2IDCSettings,
    parts=PARTS,
    lora_targets=LORA_TARGETS,
    classes=classes,
    faults=faults,
    augment=augment,
    prompt_tokens=1.0,
)
