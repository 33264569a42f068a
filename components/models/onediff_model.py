"""OneDiff, built on transformers' LLaVA, with additional visual tokens from the Visual Delta Module (VDM).

arXiv 2407.05645, section 4.1, describes the VDM in words. This project implements it as these equations:

    A_k = D_{k-1} + SA_k(D_{k-1})                          k = 1, ..., layers                              (1)
    B_k = A_k + CA_k(A_k, H1_l(k), H2_l(k))                in the layers that read the images              (2)
    D_k = B_k + MLP_k(B_k)                                                                                 (3)
    delta tokens of the LLM = Q(D_layers)                                                                  (4)

SA is self-attention, and CA is cross-attention. D_0 are learnt tokens. H1_l and H2_l are the hidden states of the two
images at layer l of the vision encoder, after a layer norm like the one between BLIP-2's encoder and Q-Former. CA in
(2) reads the two images in one of two ways:

    joined     CA(A, [H1 + e1 || H2 + e2])                 e1, e2 are learnt
    separate   J [R1; R2; R1 - R2],  Ri = CA(A, Hi)        J is a linear layer

`VDMConfig.norm` determines where the blocks have norms. Details that the paper leaves open are fields of `VDMConfig`,
which explains each choice.

Shapes: B pairs, N patches per image, D width of the vision encoder, W width of the LLM, T delta tokens, V width of the
module. In `OneDiffModel`: I images, P pairs among them.
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
    Projection,
    SelfInitialisedLayer,
    grid_positions,
    record_tensors,
)
from m3diff.models.llava import (
    MAX_EXAMPLES,
    LlavaOfPairs,
    LlavaOfPairsConfig,
    LlavaOfPairsForGeneration,
)
from m3diff.models.settings import VDMConfig
from m3diff.records.errors import DataError

# Standard deviation of the delta tokens' initial values (section 5.1)
DELTA_STD = 0.02

# Indices of a layer's three blocks in its list of norms
SELF_ATTENTION = 0
READING = 1
MLP = 2


class OneDiffConfig(LlavaOfPairsConfig):
    """Configuration of OneDiff.

    Attributes:
        vdm: fields of `VDMConfig`, or None for the base without a module.
        newline: whether each image ends with LLaVA-OneVision's newline token. LLaVA-1.5 does not have it.
    """

    model_type = "onediff"
    MODULE = "vdm"
    BASES = ("llava-1.5-7b-hf", *LlavaOfPairsConfig.BASES)

    vdm: dict | None = None
    newline: bool = True  # type: ignore[misc]  # a constant of the class in LlavaOfPairsConfig

    @classmethod
    def from_fields(cls, fields: dict[str, Any], module: dict | None) -> "OneDiffConfig":
        """Create the configuration from the fields of config.json, which may also be LLaVA-1.5's.

        See `LlavaOfPairsConfig.from_fields`.
        """
        if fields.get("model_type") == LlavaConfig.model_type:
            fields = LlavaConfig.from_dict(fields).to_dict() | {"newline": False}
        return super().from_fields(fields, module)

    read_module = VDMConfig

    def visual_token_counts(self) -> tuple[int, int]:
        """Return the number of visual tokens for the image before and for the image after.

        Delta tokens are counted for the image after if they are placed after it, and otherwise for the image before.
        """
        before, after = super().visual_token_counts()
        cfg = self.module_config()
        if cfg is None:
            return before, after
        if cfg.place == "after":
            return before, after + cfg.tokens
        return before + cfg.tokens, after


class ImageReading(SelfInitialisedLayer):
    """The cross-attention CA in equation (2), which lets the delta tokens read the two images."""

    def __init__(self, cfg: VDMConfig, vision_width: int) -> None:
        super().__init__()
        self.reads_separately = cfg.images == "separate"
        self.attention = MultiHeadAttention(cfg.width, cfg.heads, qk_norm=cfg.norm == "size", kv_width=vision_width)
        if self.reads_separately:
            projection_class = DifferenceProjection if cfg.init_gain else Projection
            self.join = projection_class(3 * cfg.width, cfg.width)
        else:
            self.image_embeddings = nn.Parameter(torch.zeros(2, vision_width))

    def reset_parameters(self) -> None:
        """Initialise the image embeddings if the images are read jointly."""
        if not self.reads_separately:
            init.normal_(self.image_embeddings, std=DELTA_STD)

    def forward(self, a_BTV: Tensor, h1_BND: Tensor, h2_BND: Tensor, positions_NV: Tensor | None = None) -> Tensor:
        """Return what each delta token reads from the images, [B, T, V]."""
        if not self.reads_separately:
            return self.attention(a_BTV, self._joined_images(h1_BND, h2_BND), positions_NV)
        r1 = self.attention(a_BTV, h1_BND, positions_NV)
        r2 = self.attention(a_BTV, h2_BND, positions_NV)
        return self.join(torch.cat([r1, r2, r1 - r2], dim=-1))

    def _joined_images(self, h1_BND: Tensor, h2_BND: Tensor) -> Tensor:
        """Return the hidden states of both images, concatenated and with image embeddings, [B, 2 N, D]."""
        e1, e2 = self.image_embeddings
        return torch.cat([h1_BND + e1, h2_BND + e2], dim=1)

    def saliency_map(self, a_BTV: Tensor, h1_BND: Tensor, h2_BND: Tensor, positions_NV: Tensor | None = None) -> Tensor:
        """Return how much each patch contributes to what the delta tokens read, [B, N], with sum 1.

        If the images are read separately, this is the patch's share of the difference between the two results.
        Otherwise, it is the share of the joint result that comes from the two patches at this position, one per image.
        """
        if self.reads_separately:
            contributions_1 = self._patch_contributions(a_BTV, h1_BND, positions_NV)
            contributions_2 = self._patch_contributions(a_BTV, h2_BND, positions_NV)
            sizes = (contributions_1 - contributions_2).norm(dim=-1).sum(dim=1)
        else:
            images = self._joined_images(h1_BND, h2_BND)
            attention = self.attention.norm_weighted_attention(a_BTV, images, positions_NV)  # [B, T, 2 N]
            sizes = attention.sum(dim=1).unflatten(1, (2, -1)).sum(dim=1)
        # for equal images all sizes are zero, and 0 / 0 would be NaN
        sizes = sizes + torch.finfo(sizes.dtype).tiny
        return sizes / sizes.sum(dim=1, keepdim=True)

    def _patch_contributions(self, a_BTV: Tensor, h_BND: Tensor, positions_NV: Tensor | None) -> Tensor:
        """Return the vector that each patch of one image contributes to each delta token, [B, T, N, V]."""
        weights = self.attention.attention_weights(a_BTV, h_BND, positions_NV)
        return torch.einsum("bhtn,bhno->btno", weights, self.attention.projected_values(h_BND))


class DeltaLayer(nn.Module):
    """One layer of the VDM: equations (1) to (3).

    Args:
        cfg: settings of the VDM.
        vision_width: width of the hidden states (D).
        number: number of the layer, counted from 0.
    """

    def __init__(self, cfg: VDMConfig, vision_width: int, number: int) -> None:
        super().__init__()
        width = cfg.width
        is_detector = cfg.init_gain > 0
        # in a change detector, self-attention and MLP add nothing initially
        out_gain = 0.0 if is_detector else 1.0
        self.norm = cfg.norm
        self.self_attention = MultiHeadAttention(width, cfg.heads, out_gain, qk_norm=cfg.norm == "size")
        self.reading = None if cfg.feature_layer(number) is None else ImageReading(cfg, vision_width)
        hidden_width = cfg.mlp_ratio * width
        if is_detector and number == 0:
            mlp_out: Projection = Detector(hidden_width, width)
        else:
            mlp_out = Projection(hidden_width, width, out_gain)
        self.mlp = Mlp(width, mlp_out, approximate="none")
        # norms of the blocks SELF_ATTENTION, READING and MLP
        norms: list[nn.Module] = []
        if cfg.norm != "size":
            reading_norm = nn.Identity() if self.reading is None else nn.LayerNorm(width)
            norms = [nn.LayerNorm(width), reading_norm, nn.LayerNorm(width)]
        self.norms = nn.ModuleList(norms)

    def forward(
        self, d_BTV: Tensor, h1_BND: Tensor | None, h2_BND: Tensor | None, positions_NV: Tensor | None = None
    ) -> Tensor:
        """Return the delta tokens after this layer, D_k, [B, T, V].

        Args:
            d_BTV: the delta tokens before this layer, D_{k-1}.
            h1_BND: hidden states of the images before at the feature layer that this layer reads, or None if this layer
                does not read the images.
            h2_BND: hidden states of the images after at the same feature layer, or None.
            positions_NV: position embeddings of the patches, or None for no positions.
        """
        d = self._block(SELF_ATTENTION, d_BTV, lambda x: self.self_attention(x, x, positions_NV))  # (1)
        reading = self.reading
        if reading is not None:
            d = self._block(READING, d, lambda x: reading(x, h1_BND, h2_BND, positions_NV))  # (2)
        return self._block(MLP, d, self.mlp)  # (3)

    def _block(self, number: int, d_BTV: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a residual block to the tokens, with the norm placed according to `VDMConfig.norm`."""
        if self.norm == "size":
            return d_BTV + function(d_BTV)
        norm = self.norms[number]
        if self.norm == "post":
            return norm(d_BTV + function(d_BTV))
        return d_BTV + function(norm(d_BTV))


class VisualDeltaModule(SelfInitialisedLayer):
    """The whole VDM: equations (1) to (4).

    Args:
        cfg: settings of the VDM.
        vision_width: width of the hidden states (D).
        llm_width: width of the projected delta tokens (W). If `projection` is "shared", their width is D instead.
    """

    def __init__(self, cfg: VDMConfig, vision_width: int, llm_width: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.delta = nn.Parameter(torch.zeros(cfg.tokens, cfg.width))
        self.feature_norms = nn.ModuleList(nn.LayerNorm(vision_width) for _ in cfg.vision_feature_layers)
        self.layers = nn.ModuleList(DeltaLayer(cfg, vision_width, number) for number in range(cfg.layers))
        self.feature_layers = [cfg.feature_layer(number) for number in range(cfg.layers)]
        out_width = vision_width if cfg.projection == "shared" else llm_width
        self.projection = Projection(cfg.width, out_width, cfg.init_gain or 1.0)

    def reset_parameters(self) -> None:
        """Initialise the delta tokens. The other parts initialise themselves."""
        init.normal_(self.delta, std=DELTA_STD)

    def forward(self, features_1: Sequence[Tensor], features_2: Sequence[Tensor]) -> Tensor:
        """Return the projected delta tokens, [B, T, W], or [B, T, D] if `projection` is "shared".

        Args:
            features_1: hidden states of the images before at each feature layer, each [B, N, D].
            features_2: hidden states of the images after at each feature layer, each [B, N, D].
        """
        cfg = self.cfg
        positions = grid_positions(features_1[0], cfg.width, cfg.heads, cfg.pos_embed_scale)

        # 1. normalise the hidden states of each feature layer: [B, N, D]
        h1_by_layer = [norm(features) for norm, features in zip(self.feature_norms, features_1, strict=True)]
        h2_by_layer = [norm(features) for norm, features in zip(self.feature_norms, features_2, strict=True)]

        # 2. transform the delta tokens: [B, T, V]
        d = self.delta.expand(len(features_1[0]), -1, -1)
        for layer, feature_layer in zip(self.layers, self.feature_layers, strict=True):
            if feature_layer is None:
                d = layer(d, None, None, positions)
            else:
                d = layer(d, h1_by_layer[feature_layer], h2_by_layer[feature_layer], positions)

        # 3. project the delta tokens to the LLM's width: [B, T, W]
        return self.projection(d)  # (4)

    def record_maps(self) -> AbstractContextManager[list[Tensor]]:
        """Record where each layer that reads the images looks for the difference.

        Each forward pass of such a layer adds a map [B, N] with sum 1.
        """

        def saliency_map(reading: Any, *arguments: Any, result: Any) -> Tensor:
            return reading.saliency_map(*arguments)

        readings = [module for module in self.modules() if isinstance(module, ImageReading)]
        return record_tensors(readings, saliency_map)

    @torch.no_grad()
    def copy_bert_weights(self, folder: Path) -> None:
        """Copy the self-attention, MLP and norms of each layer from a BERT.

        Args:
            folder: folder with config.json and model.safetensors of a BERT.

        Raises:
            DataError: the BERT has a different width, number of heads or MLP size, too few layers, or missing weights.
        """
        bert_and_info: Any = BertModel.from_pretrained(
            folder,
            use_safetensors=True,
            add_pooling_layer=False,
            output_loading_info=True,
            trust_remote_code=False,
        )
        bert, loading_info = bert_and_info
        config = bert.config
        missing_names = sorted(name for name in loading_info["missing_keys"] if name.startswith("encoder."))
        bert_shape = (config.hidden_size, config.num_attention_heads, config.intermediate_size / config.hidden_size)
        shape = (self.cfg.width, self.cfg.heads, self.cfg.mlp_ratio)
        if missing_names:
            raise DataError(
                "models.bert_lacks_weights",
                path=folder,
                value=len(missing_names),
                names=missing_names[:MAX_EXAMPLES],
            )
        if bert_shape != shape or len(bert.encoder.layer) < len(self.layers):
            raise DataError(
                "models.other_bert",
                path=folder,
                layers=len(bert.encoder.layer),
                value=bert_shape,
                expected_layers=len(self.layers),
                expected=shape,
            )
        for layer, bert_layer in zip(self.layers, bert.encoder.layer, strict=False):
            copy_bert_layer(bert_layer, layer)


def copy_bert_layer(source: Any, layer: Any) -> None:
    """Copy the self-attention, MLP and norms of a BERT layer to a `DeltaLayer` with "post" norms."""
    attention = source.attention
    layer.self_attention.q_proj.load_state_dict(attention.self.query.state_dict())
    layer.self_attention.k_proj.load_state_dict(attention.self.key.state_dict())
    layer.self_attention.v_proj.load_state_dict(attention.self.value.state_dict())
    layer.self_attention.out_proj.load_state_dict(attention.output.dense.state_dict())
    layer.norms[SELF_ATTENTION].load_state_dict(attention.output.LayerNorm.state_dict())
    layer.mlp[0].load_state_dict(source.intermediate.dense.state_dict())
    layer.mlp[2].load_state_dict(source.output.dense.state_dict())
    layer.norms[MLP].load_state_dict(source.output.LayerNorm.state_dict())


class OneDiffModel(LlavaOfPairs):
    """LLaVA without its head, with the VDM's delta tokens in addition to the visual tokens of each image pair."""

    config: OneDiffConfig

    def __init__(self, config: OneDiffConfig) -> None:
        super().__init__(config)
        if not config.newline:
            del self.image_newline
        cfg = config.module_config()
        vision_width = config.vision_config.hidden_size
        llm_width = config.text_config.hidden_size
        self.vdm = None if cfg is None else VisualDeltaModule(cfg, vision_width, llm_width)

    def visual_tokens(self, pixel_values: Tensor, pairs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the projected features and each image's visual tokens, including the delta tokens.

        See `LlavaOfPairs.visual_tokens`. The delta tokens of a pair are added to one of its images.
        """
        # 1. encode the images and project their patches: [I, N, D] to [I, N, W]
        states = self.vision_hidden_states(pixel_values)
        projected_features = self.multi_modal_projector(states[self.config.vision_feature_layer])
        images = self.append_newline(projected_features)
        tokens = list(images.unbind(0))
        if self.vdm is None or not len(pairs):
            return projected_features, tokens

        # 2. compute the delta tokens of each pair: [P, T, W]
        cfg = self.vdm.cfg
        before, after = pairs.to(pixel_values.device, non_blocking=True).unbind(1)
        features = [states[layer] for layer in cfg.vision_feature_layers]
        features_1 = [f.index_select(0, before) for f in features]
        features_2 = [f.index_select(0, after) for f in features]
        delta = self.vdm(features_1, features_2)
        if cfg.projection == "shared":
            delta = self.multi_modal_projector(delta)
        delta = delta.to(images.dtype)

        # 3. put the delta tokens before, between or after the two images: [P, N + 1, W] to [P, N + 1 + T, W]
        if cfg.place == "before":
            longer_images = torch.cat([delta, images.index_select(0, before)], dim=1)
        elif cfg.place == "between":
            longer_images = torch.cat([images.index_select(0, before), delta], dim=1)
        else:
            longer_images = torch.cat([images.index_select(0, after), delta], dim=1)
        side = 1 if cfg.place == "after" else 0
        for pair, image_tokens in zip(pairs.tolist(), longer_images, strict=True):
            tokens[pair[side]] = image_tokens
        return projected_features, tokens


class OneDiffForConditionalGeneration(LlavaOfPairsForGeneration):
    """OneDiff with a language-model head. It answers questions about images."""

    config: OneDiffConfig
    MODEL = OneDiffModel
    BASES = "LLaVA-OneVision or LLaVA-1.5"

    def start_new_module(self, folder: Path) -> None:
        """Initialise a new module from the BERT in `folder`/bert if its `start` is "bert"."""
        if self.model.vdm.cfg.start == "bert":
            self.model.vdm.copy_bert_weights(folder / "bert")
