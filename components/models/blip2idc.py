"""BLIP2IDC (arXiv 2412.15939) as a model family: its settings, cost and rules. Light to import: torch and transformers
come with the first call.

BLIP-2 as it is: the two images, stacked into one picture, meet in the vision encoder's first layer, and low-rank
adapters of queries, keys and values in all three parts are all that trains.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from m3diff.models.family import ADAPTERS, Family, Term, llm_widths
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
LORA_TARGETS = {
    "vision": r"vision_model\.encoder\.layers\.\d+\.self_attn\.qkv",
    "module": rf"qformer\.encoder\.layer\.\d+\.((attention\.attention|{CROSSING})\.(key|value)|{CROSSING}\.query)",
    "llm": r"language_model\.model\.(decoder\.)?layers\.\d+\.self_attn\.(q|k|v)_proj",
}
"""As the authors' code names them: queries, keys and values of all parts, but for the queries of the Q-Former's
self-attention. In the vision encoder the three are one linear."""

EVA = {"image_size": 224, "patch_size": 14}
"""The vision encoder of the published BLIP-2: what its configuration leaves out where it is the default."""


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


def adapted_linears(config: Any, tokens: float) -> list[tuple[str, int, int, float]]:
    """(part, in, out, tokens that pass it) of each linear with an adapter, for a sequence of `tokens`."""
    encoder, qformer, text = config.vision_config, config.qformer_config, config.text_config
    n, read, layers = config.visual_tokens, config.num_query_tokens, qformer.num_hidden_layers
    crossing = config.crossing_layers
    own = ("module", qformer.hidden_size, qformer.hidden_size, read)
    across = ("module", encoder.hidden_size, qformer.hidden_size, n)
    queries, keys = llm_widths(text)
    return [
        *[("vision", encoder.hidden_size, 3 * encoder.hidden_size, n)] * encoder.num_hidden_layers,
        *[own] * (2 * layers + crossing),
        *[across] * (2 * crossing),
        *[("llm", text.hidden_size, out, tokens) for out in (queries, keys, keys)] * text.num_hidden_layers,
    ]


def flops(config: Any, tokens: float, supervised: float, settings: Settings) -> list[Term]:
    """The terms of one sequence of `tokens`, of which `supervised` meet the head.

    All weights are frozen under adapters in every part, as in the paper: a linear takes one more forward's worth in
    backward, adapters and attention two more. A frozen vision encoder keeps no activations to recompute. The vision
    encoder and the Q-Former work once a pair, on one picture.
    """
    text, encoder, qformer = config.text_config, config.vision_config, config.qformer_config
    n, q = config.visual_tokens, config.num_query_tokens
    d, r, width = encoder.hidden_size, qformer.hidden_size, text.hidden_size
    layers, depth, crossing = text.num_hidden_layers, qformer.num_hidden_layers, config.crossing_layers
    queries, keys = llm_widths(text)
    mlp = 2 * width * text.ffn_dim if hasattr(text, "ffn_dim") else 3 * width * text.intermediate_size
    encoder_layer = 4 * d * d + 2 * d * encoder.intermediate_size
    encoding = encoder.num_hidden_layers * encoder_layer * n + 3 * encoder.patch_size**2 * d * (n - 1)
    own = depth * (4 * r * r + 2 * r * qformer.intermediate_size) + crossing * 2 * r * r
    across = crossing * 2 * d * r * n
    seen, querying, projecting, speaking = (
        int(settings.rates[part] is not None) for part in ("vision", "module", "projector", "llm")
    )
    queried = seen or querying
    embedded = queried or projecting or speaking
    trains = [each for each in adapted_linears(config, tokens) if settings.rates[each[0]] is not None]
    lora = sum(settings.lora.rank * (inputs + outputs) * each for _, inputs, outputs, each in trains)
    terms = [
        Term("LLM linears", 2 * layers * (2 * width * (queries + keys) + mlp) * tokens, embedded, recomputed=True),
        Term("LLM attention", 4 * tokens**2 * queries * layers / 2, 2, recomputed=True),
        Term(ADAPTERS, 2 * lora, 2, recomputed=True),
        Term("vision encoder", 2 * encoding, seen, recomputed=bool(seen)),
        Term("vision encoder attention", 4 * n * n * d * encoder.num_hidden_layers, 2 * seen, recomputed=bool(seen)),
        Term("Q-Former", 2 * (own * q + across), queried, recomputed=True),
        Term("Q-Former attention", 4 * q * r * (depth * q + crossing * n), 2 * queried, recomputed=True),
        Term("projector", 2 * r * width * q, queried + projecting),
        Term("head, supervised tokens", 2 * width * text.vocab_size * supervised, 1),
    ]
    return [term for term in terms if term.forward]


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
    encoder = EVA | base.get("vision_config", {})
    if (rows := encoder["image_size"] // encoder["patch_size"]) % 2:
        found.append(f"its base's vision encoder has {rows} rows of patches, which two images cannot share alike")
    return found


def checkpointing_faults(activation_checkpointing: str, base: Mapping[str, Any] | None) -> list[str]:
    """Why the base's LLM cannot be recomputed so; the published one's where the base is not known."""
    kind = (base or {}).get("text_config", {}).get("model_type", "opt")
    if activation_checkpointing != "selective" or kind == "qwen2":
        return []
    return [f"selective recomputes the norms and products of a Qwen2 LLM, and this one is {kind}; write none or full"]


def augment(settings: Blip2IDCSettings, pair: "np.ndarray", rng: "np.random.Generator") -> "np.ndarray":
    from m3diff.models.blip2idc_model import augmented

    return pair if settings.augment is None else augmented(settings.augment, pair, rng)


FAMILY = Family(
    settings=Blip2IDCSettings,
    parts=PARTS,
    lora_targets=LORA_TARGETS,
    classes=classes,
    flops=flops,
    faults=faults,
    augment=augment,
    checkpointing_faults=checkpointing_faults,
    prompt_tokens=1.0,
)
"""Its prompt is the token that BLIP-2 begins texts with, and no question."""
