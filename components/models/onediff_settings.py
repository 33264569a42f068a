"""OneDiff's settings: its entry of the section `models` in `params.yaml`, and its module's fields in config.json."""

from dataclasses import dataclass
from typing import Literal

from m3diff.models.settings import Fields, Settings, layer_rule


@dataclass(frozen=True)
class VDMConfig(Fields):
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

    @property
    def reading_layers(self) -> int:
        """Layers that read the images."""
        return self.layers if self.cross_attention == "every" else -(-self.layers // 2)

    def feature_layer(self, layer: int) -> int | None:
        """The place in `vision_feature_layers` of the layer that a layer of the module reads, or None."""
        if self.cross_attention == "second":
            layer, rest = divmod(layer, 2)
            if rest:
                return None
        return layer * len(self.vision_feature_layers) // self.reading_layers

    def rules(self) -> dict[str, bool]:
        layers, reading = len(self.vision_feature_layers), self.reading_layers
        return {
            **layer_rule(self.vision_feature_layers),
            **self.at_least(tokens=1, layers=1, width=1, heads=1, mlp_ratio=1, init_gain=0, pos_embed_scale=0),
            f"heads: {self.heads} does not divide width {self.width}": self.heads < 1 or self.width % self.heads == 0,
            f"vision_feature_layers: {layers} of them, but only {reading} of the layers read the images; raise layers, "
            "or set cross_attention to every": layers <= reading,
            "start: bert needs norm post, which BERT's weights were trained with": self.start == "random"
            or self.norm == "post",
            "init_gain above 0 needs images separate and norm size": not self.init_gain > 0
            or (self.images, self.norm) == ("separate", "size"),
        }


@dataclass(frozen=True)
class OneDiffSettings(Settings):
    """Settings of OneDiff.

    module: the new VDM, or None for the base without one.
    lora: adapters of the LLM's linears; the paper has none (rank 0): it trains the LLM in full.
    rates: the paper says twice that the vision encoder is frozen (section 4.2) and once that everything trains (5.1);
        the profile has it frozen.
    align: stage I, Coupled Sample Training; None goes straight to stage II.
    """

    family: Literal["onediff"]
    module: VDMConfig | None
