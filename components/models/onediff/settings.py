"""OneDiff's settings: its entry of the section `models` in `params.yaml`. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from m3diff.models.family import Align, Delays, Lora, Rates, layer_faults, settings_faults


@dataclass(frozen=True)
class VDMConfig:
    """Fields of the Visual Delta Module (VDM; arXiv 2407.05645, sections 4.1 and 5.1). The defaults are the paper's;
    where it is silent or contradicts itself, the field says what was chosen and why.

    vision_feature_layers: layers of the vision encoder that are read, indices into its hidden states (0 is the
        embedding); "equal intervals": 8, 16, 24 of 24.
    tokens: learnable delta tokens; the ablation's 32.
    layers: transformer layers; "alternating self-attention and cross-attention blocks".
    cross_attention: which layers read the images. "second": every second one, from the first, as in BLIP-2's Q-Former,
        which fits the paper's six layers and three feature layers; "every": all of them, two to a feature layer.
    images: how a layer reads two images, which the paper words as "separately and simultaneously". "joined": one
        attention over the keys of both, each with a learnt embedding of its image, without which nothing would tell
        them apart; "separate": an attention for each image with the same weights, whose two results and their
        difference one linear joins, so that a token can ask both images for the same thing.
    width, heads, mlp_ratio: BERT-base's, whose weights the paper begins with.
    norm: "post": after each block, as BERT's weights want it; "pre": before it; "size": none on the tokens, whose size
        then says whether anything changed, but queries and keys have size one.
    place: of the delta tokens among the visual tokens: "after" both images, "between" or "before" them. Not given.
    projection: from the module to the LLM: "own", one linear; "shared": one linear to the vision encoder's width, then
        the projector of the images. The paper has one projector "before the LLM".
    start: "random", or "bert": self-attention, MLPs and norms from the BERT that lies in the base's folder as `bert/`
        (model.safetensors and config.json of bert-base-uncased), as the paper has it; cross-attention is new either
        way.
    init_gain: above 0 a new module starts as a detector of change (as MDPConfig.init_gain of M3Diff, and for its
        reason: a short run on a small base): the difference of both readings is passed on, the first MLP adds its size
        in one direction, and this is the gain of the projection to the LLM. Needs images "separate" and norm "size".
        At 0, the paper's, all linears are random.
    pos_embed_scale: amplitude of fixed sine-cosine positions on queries and keys, which bind each token to the place of
        one patch; the tokens are then as many as the patches. The paper has none (0).
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    vision_feature_layers: tuple[int, ...] = (8, 16, 24)
    tokens: int = 32
    layers: int = 6
    cross_attention: Literal["second", "every"] = "second"
    images: Literal["joined", "separate"] = "joined"
    width: int = 768
    heads: int = 12
    mlp_ratio: int = 4
    norm: Literal["post", "pre", "size"] = "post"
    place: Literal["after", "between", "before"] = "after"
    projection: Literal["own", "shared"] = "own"
    start: Literal["random", "bert"] = "random"
    init_gain: float = 0.0
    pos_embed_scale: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "vision_feature_layers", tuple(self.vision_feature_layers))
        if faults := layer_faults(self.vision_feature_layers) + self._numbers() + self._together():
            raise ValueError("; ".join(faults))

    @property
    def reading_layers(self) -> int:
        """Layers that read the images."""
        return self.layers if self.cross_attention == "every" else -(-self.layers // 2)

    def feature_layer(self, layer: int) -> int | None:
        """Which of `vision_feature_layers` a layer of the module reads, by its number in the list; None where it reads
        none."""
        if self.cross_attention == "second":
            layer, rest = divmod(layer, 2)
            if rest:
                return None
        return layer * len(self.vision_feature_layers) // self.reading_layers

    def _numbers(self) -> list[str]:
        least = {"tokens": 1, "layers": 1, "width": 1, "heads": 1, "mlp_ratio": 1, "init_gain": 0, "pos_embed_scale": 0}
        found = {name: getattr(self, name) for name in least}
        faults = [
            f"{name} must be {least[name]} or more, found {found[name]}" for name in least if found[name] < least[name]
        ]
        choices = {each.name: each.type.__args__ for each in fields(self) if hasattr(each.type, "__args__")}
        choices.pop("vision_feature_layers")
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                faults.append(f"{name} must be {' or '.join(allowed)}, found {getattr(self, name)!r}")
        return faults

    def _together(self) -> list[str]:
        layers = len(self.vision_feature_layers)
        rules = {
            f"heads: {self.heads} does not divide width {self.width}": self.heads < 1 or self.width % self.heads == 0,
            f"vision_feature_layers: {layers} of them, but only {self.reading_layers} of the layers read the images; "
            "raise layers, or set cross_attention to every": layers <= self.reading_layers,
            "start: bert needs norm post, which BERT's weights were trained with": self.start == "random"
            or self.norm == "post",
            "init_gain above 0 needs images separate and norm size": not self.init_gain > 0
            or (self.images, self.norm) == ("separate", "size"),
        }
        return [rule for rule, kept in rules.items() if not kept]


def vdm_config(values: Mapping[str, Any]) -> VDMConfig:
    """The fields of a model's configuration. Raises ValueError naming every unknown or impossible one."""
    known = {each.name for each in fields(VDMConfig)}
    faults = [f"unknown field {name!r}" for name in values if name not in known]
    try:
        made = VDMConfig(**{name: value for name, value in values.items() if name in known})
    except ValueError as error:
        faults.append(str(error))
    if faults:
        raise ValueError("vdm: " + "; ".join(faults))
    return made


@dataclass(frozen=True)
class OneDiffSettings:
    """What trains of OneDiff and how.

    family: "onediff".
    module: the new VDM, or None for the base without one.
    lora: adapters of the LLM's linears; the paper has none (rank 0): it trains the LLM in full.
    rates: learning rates by part. The paper says twice that the vision encoder is frozen (section 4.2) and once that
        everything trains (5.1); the profile has it frozen.
    delays: when each part begins to train; at the first step unless it is named.
    align: stage I, Coupled Sample Training; None goes straight to stage II.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    family: Literal["onediff"]
    module: VDMConfig | None
    lora: Lora
    rates: Rates
    delays: Delays = field(default_factory=Delays)
    align: Align | None = None

    def __post_init__(self) -> None:
        if faults := settings_faults(self):
            raise ValueError("; ".join(faults))
