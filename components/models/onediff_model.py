"""OneDiff on transformers' LLaVA: the Visual Delta Module (VDM; arXiv 2407.05645, section 4.1) stands beside the vision
encoder, and its tokens beside those of the images. Its equations are of this project's, from the paper's words:

    A_k = D_{k-1} + SA_k(D_{k-1})                          k = 1, ..., layers                              (1)
    B_k = A_k + CA_k(A_k, H1_l(k), H2_l(k))                in the layers that read the images              (2)
    D_k = B_k + MLP_k(B_k)                                                                                 (3)
    delta tokens of the LLM = Q(D_layers)                                                                  (4)

D_0 are learnt tokens, H1_l and H2_l the hidden states of the two images at layer l of the vision encoder, after a layer
norm, as BLIP-2 has one between encoder and Q-Former. What reads two images in (2) is one of two:

    joined     CA(A, [H1 + e1 || H2 + e2])                 e1, e2 learnt
    separate   J [R1; R2; R1 - R2],  Ri = CA(A, Hi)        J a linear

Norms stand as `VDMConfig.norm` says. What the paper leaves open is a field there, with the reason for the choice.
Shapes: B pairs, N patches per image, D the vision encoder's width, W the LLM's, T delta tokens, V the module's width;
images come as before, after, before, after, ...
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertModel, LlavaConfig
from transformers import initialization as init

from m3diff.models.layers import (
    Detector,
    DifferenceProjection,
    Mlp,
    MultiHeadAttention,
    OwnStart,
    Projection,
    grid_positions,
    recorded,
)
from m3diff.models.llava import LlavaOfPairs, LlavaOfPairsConfig, LlavaOfPairsForGeneration, keep_names
from m3diff.models.settings import VDMConfig

DELTA_STD = 0.02  # of the delta tokens' first values (section 5.1)


class OneDiffConfig(LlavaOfPairsConfig):
    """Configuration of OneDiff.

    Attributes:
        vdm: fields of `VDMConfig`, or None where there is no module and the model is the base.
        newline: whether each image ends with LLaVA-OneVision's newline; LLaVA-1.5 has none.
    """

    model_type = "onediff"
    MODULE = "vdm"
    BASES = ("llava-1.5-7b-hf", *LlavaOfPairsConfig.BASES)

    vdm: dict | None = None
    newline: bool = True  # type: ignore[misc]  # a field here

    @classmethod
    def on_fields(cls, found: dict[str, Any], module: dict | None) -> "OneDiffConfig":
        if found.get("model_type") == LlavaConfig.model_type:
            found = LlavaConfig.from_dict(found).to_dict() | {"newline": False}
        return super().on_fields(found, module)

    read_module = VDMConfig

    def places(self) -> tuple[int, int]:
        cfg = self.module_config()
        before, after = super().places()
        if cfg is None:
            return before, after
        return (before, after + cfg.tokens) if cfg.place == "after" else (before + cfg.tokens, after)


keep_names(OneDiffConfig)


class ImageReading(OwnStart):
    """CA of equation (2)."""

    def __init__(self, cfg: VDMConfig, vision_width: int) -> None:
        super().__init__()
        self.separate = cfg.images == "separate"
        self.attention = MultiHeadAttention(cfg.width, cfg.heads, normed=cfg.norm == "size", kv_width=vision_width)
        if self.separate:
            self.join = (DifferenceProjection if cfg.init_gain else Projection)(3 * cfg.width, cfg.width)
        else:
            self.image_embeddings = nn.Parameter(torch.zeros(2, vision_width))

    def reset_parameters(self) -> None:
        if not self.separate:
            init.normal_(self.image_embeddings, std=DELTA_STD)

    def forward(self, a_BTV: Tensor, h1_BND: Tensor, h2_BND: Tensor, places_ND: Tensor | None = None) -> Tensor:
        """[B, T, V]"""
        if not self.separate:
            return self.attention(a_BTV, self._both(h1_BND, h2_BND), places_ND)
        r1, r2 = self.attention(a_BTV, h1_BND, places_ND), self.attention(a_BTV, h2_BND, places_ND)
        return self.join(torch.cat([r1, r2, r1 - r2], dim=-1))

    def _both(self, h1_BND: Tensor, h2_BND: Tensor) -> Tensor:
        e1, e2 = self.image_embeddings
        return torch.cat([h1_BND + e1, h2_BND + e2], dim=1)

    def saliency_map(self, a_BTV: Tensor, h1_BND: Tensor, h2_BND: Tensor, places_ND: Tensor | None = None) -> Tensor:
        """The amount that each place brings to what all tokens read, [B, N], sums to 1. Separate: to the difference of
        both readings; joined: of both images together."""
        if self.separate:
            # the vector that each place brings to each token's reading, [B, T, N, V]
            of_1, of_2 = (
                torch.einsum("bhtn,bhno->btno", self.attention.weights(a_BTV, h, places_ND), self.attention.values(h))
                for h in (h1_BND, h2_BND)
            )
            sizes = (of_1 - of_2).norm(dim=-1).sum(dim=1)
        else:
            both = self.attention.norm_weighted_attention(a_BTV, self._both(h1_BND, h2_BND), places_ND)
            sizes = both.sum(dim=1).unflatten(1, (2, -1)).sum(dim=1)
        sizes = sizes + torch.finfo(sizes.dtype).tiny  # equal images: nothing
        return sizes / sizes.sum(dim=1, keepdim=True)


class DeltaLayer(nn.Module):
    """Equations (1) to (3)."""

    def __init__(self, cfg: VDMConfig, vision_width: int, number: int) -> None:
        super().__init__()
        width, detects = cfg.width, cfg.init_gain > 0
        zero = 0.0 if detects else 1.0
        self.norm = cfg.norm
        self.self_attention = MultiHeadAttention(width, cfg.heads, zero, cfg.norm == "size")
        self.reading = None if cfg.feature_layer(number) is None else ImageReading(cfg, vision_width)
        hidden = cfg.mlp_ratio * width
        last = Detector(hidden, width) if detects and number == 0 else Projection(hidden, width, zero)
        self.mlp = Mlp(width, last, approximate="none")
        run = (True, self.reading is not None, True) if cfg.norm != "size" else ()
        self.norms = nn.ModuleList(nn.LayerNorm(width) if used else nn.Identity() for used in run)

    def forward(
        self, d_BTV: Tensor, h1_BND: Tensor | None, h2_BND: Tensor | None, places_ND: Tensor | None = None
    ) -> Tensor:
        """D_k, [B, T, V]. `h1_BND` and `h2_BND` are those of its feature layer, None where it reads none."""
        d = self._block(0, d_BTV, lambda x: self.self_attention(x, x, places_ND))  # (1)
        if (reading := self.reading) is not None:
            d = self._block(1, d, lambda x: reading(x, h1_BND, h2_BND, places_ND))  # (2)
        return self._block(2, d, self.mlp)  # (3)

    def _block(self, number: int, d_BTV: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm == "size":
            return d_BTV + function(d_BTV)
        norm = self.norms[number]
        return norm(d_BTV + function(d_BTV)) if self.norm == "post" else d_BTV + function(norm(d_BTV))


class VisualDeltaModule(OwnStart):
    """Equations (1) to (4).

    Args:
        vision_width: D.
        llm_width: what the delta tokens are projected to: the LLM's width, or with `projection` "shared" the vision
            encoder's.
    """

    def __init__(self, cfg: VDMConfig, vision_width: int, llm_width: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.delta = nn.Parameter(torch.zeros(cfg.tokens, cfg.width))
        self.feature_norms = nn.ModuleList(nn.LayerNorm(vision_width) for _ in cfg.vision_feature_layers)
        self.layers = nn.ModuleList(DeltaLayer(cfg, vision_width, number) for number in range(cfg.layers))
        self.reads = [cfg.feature_layer(number) for number in range(cfg.layers)]
        out_width = vision_width if cfg.projection == "shared" else llm_width
        self.projection = Projection(cfg.width, out_width, cfg.init_gain or 1.0)

    def reset_parameters(self) -> None:
        """The delta tokens; the rest starts by itself."""
        init.normal_(self.delta, std=DELTA_STD)

    def forward(self, features_1: Sequence[Tensor], features_2: Sequence[Tensor]) -> Tensor:
        """The delta tokens as `projection` gives them, [B, T, width].

        Args:
            features_1, features_2: hidden states of images before and after at each feature layer, each [B, N, D].
        """
        cfg = self.cfg
        places = grid_positions(features_1[0], cfg.width, cfg.heads, cfg.pos_embed_scale)
        normed = [(norm(h1), norm(h2)) for norm, h1, h2 in zip(self.feature_norms, features_1, features_2, strict=True)]
        d = self.delta.expand(len(features_1[0]), -1, -1)
        for layer, read in zip(self.layers, self.reads, strict=True):
            h1, h2 = (None, None) if read is None else normed[read]
            d = layer(d, h1, h2, places)
        return self.projection(d)

    def recorded_maps(self) -> AbstractContextManager[list[Tensor]]:
        """Within it, each layer that reads images adds where it looks for the difference: [B, N], sums to 1."""
        readings = [module for module in self.modules() if isinstance(module, ImageReading)]
        return recorded(readings, lambda reading, *given, result: reading.saliency_map(*given))

    @torch.no_grad()
    def start_as_bert(self, folder: Path) -> None:
        """Take self-attention, MLP and norms of each layer from those of a BERT.

        Args:
            folder: a BERT as transformers reads it, model.safetensors.

        Raises:
            ValueError: the BERT is of another width, number of heads or MLP, or has fewer layers, or weights of these
                are missing.
        """
        loaded: Any = BertModel.from_pretrained(
            folder, use_safetensors=True, add_pooling_layer=False, output_loading_info=True
        )
        bert, info = loaded
        config, lost = bert.config, sorted(name for name in info["missing_keys"] if name.startswith("encoder."))
        theirs = (config.hidden_size, config.num_attention_heads, config.intermediate_size / config.hidden_size)
        ours = (self.cfg.width, self.cfg.heads, self.cfg.mlp_ratio)
        if lost or theirs != ours or len(bert.encoder.layer) < len(self.layers):
            raise ValueError(
                f"{folder}: {len(bert.encoder.layer)} layers of (width, heads, mlp_ratio) {theirs}, but the module has "
                f"{len(self.layers)} of {ours}; missing are the weights {lost[:3]}; take config.json and "
                "model.safetensors of bert-base-uncased, or set module.start to random"
            )
        layers: Any = zip(self.layers, bert.encoder.layer, strict=False)
        for layer, source in layers:
            own, its = layer.self_attention, source.attention
            for mine, given in (
                (own.q_proj, its.self.query),
                (own.k_proj, its.self.key),
                (own.v_proj, its.self.value),
                (own.out_proj, its.output.dense),
                (layer.norms[0], its.output.LayerNorm),
                (layer.mlp[0], source.intermediate.dense),
                (layer.mlp[2], source.output.dense),
                (layer.norms[2], source.output.LayerNorm),
            ):
                mine.load_state_dict(given.state_dict())


class OneDiffModel(LlavaOfPairs):
    """LLaVA without its head; for pairs of images with the delta tokens of the VDM."""

    config: OneDiffConfig

    def __init__(self, config: OneDiffConfig) -> None:
        super().__init__(config)
        if not config.newline:
            del self.image_newline
        cfg, widths = config.module_config(), (config.vision_config.hidden_size, config.text_config.hidden_size)
        self.vdm = None if cfg is None else VisualDeltaModule(cfg, *widths)

    def visual_tokens(self, pixel_values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """See `LlavaOfPairs`: in the images' places their patches, LLaVA-OneVision's newline, and beside one of them
        the delta tokens."""
        states = self.vision_hidden_states(pixel_values)
        projected = self.multi_modal_projector(states[self.config.vision_feature_layer])
        images = self.with_newline(projected)
        if self.vdm is None:
            return projected, list(images.unbind(0))
        cfg = self.vdm.cfg
        read = [states[layer] for layer in cfg.vision_feature_layers]
        delta = self.vdm([f[0::2] for f in read], [f[1::2] for f in read])  # (4)
        delta = (self.multi_modal_projector(delta) if cfg.projection == "shared" else delta).to(images.dtype)
        before, after, place = images[0::2], images[1::2], cfg.place
        first = {"before": [delta, before], "between": [before, delta], "after": [before]}[place]
        second = [after, delta] if place == "after" else [after]
        both = zip(torch.cat(first, dim=1), torch.cat(second, dim=1), strict=True)
        return projected, [tokens for pair in both for tokens in pair]


class OneDiffForConditionalGeneration(LlavaOfPairsForGeneration):
    """OneDiff with its language-model head: two images and a question in, what changed out."""

    config: OneDiffConfig
    MODEL = OneDiffModel
    BASES = "LLaVA-OneVision or LLaVA-1.5"

    def begin(self, folder: Path) -> None:
        if self.model.vdm.cfg.start == "bert":
            self.model.vdm.start_as_bert(folder / "bert")
