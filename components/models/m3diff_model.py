"""M3Diff, built on transformers' LLaVA-OneVision, with the Multi-scale Differential Perception (MDP) module.

The module computes equations (1) to (8) of arXiv 2503.11093, section 4, between the vision encoder and the projector.
Details that the paper leaves open are fields of `MDPConfig`, which explains each choice.

Shapes: B pairs, N patches per image, D width of the vision encoder. Names such as `f_2BND` end with the dimensions of
the tensor. `f_2BND` contains the features of the B images before, followed by those of the B images after, so that one
operation can process all of them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from m3diff.models.layers import (
    Detector,
    DifferenceProjection,
    Mlp,
    MultiHeadAttention,
    Projection,
    grid_positions,
    record_tensors,
)
from m3diff.models.llava import LlavaOfPairs, LlavaOfPairsConfig, LlavaOfPairsForGeneration
from m3diff.models.settings import DifferenceConfig, MDPConfig, module_config


class M3DiffConfig(LlavaOfPairsConfig):
    """Configuration of M3Diff.

    Attributes:
        mdp: fields of `MDPConfig` or `DifferenceConfig`, or None for the base without a module.
    """

    model_type = "m3diff"
    MODULE = "mdp"

    mdp: dict | None = None

    read_module = staticmethod(module_config)


class DifferentialLayer(nn.Module):
    """One layer of a level: equations (4) to (6).

    The difference attends to itself and to both images, and each image attends to itself and to the difference.

    Args:
        cfg: settings of the MDP module.
        width: width of the features.
        is_first_layer: whether this is the first layer of its level.
    """

    def __init__(self, cfg: MDPConfig, width: int, is_first_layer: bool) -> None:
        super().__init__()
        self.residual = cfg.residual
        # with residuals, the difference's attention layers add nothing initially
        out_gain = 0.0 if cfg.residual else 1.0
        self.self_attention = MultiHeadAttention(width, cfg.heads, out_gain, qk_norm=cfg.residual)
        self.cross_attention = MultiHeadAttention(width, cfg.heads, out_gain, qk_norm=cfg.residual)
        hidden_width = cfg.mlp_ratio * width
        if cfg.residual and is_first_layer:
            mlp_out: Projection = Detector(hidden_width, width)
        else:
            mlp_out = Projection(hidden_width, width, out_gain)
        self.mlp = Mlp(width, mlp_out)
        feature_gain = cfg.init_gain if cfg.residual else 1.0
        self.feature_attention = MultiHeadAttention(width, cfg.heads, feature_gain, qk_norm=cfg.residual)
        self.norm_feature = nn.LayerNorm(width) if cfg.residual else nn.Identity()

    def forward(self, f_2BND: Tensor, df_BND: Tensor, positions_ND: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the updated features Ft of both images, [2 B, N, D], and the updated difference dF_ca, [B, N, D].

        Args:
            f_2BND: features of both images.
            df_BND: the difference of the features.
            positions_ND: position embeddings of the patches, or None for no positions.
        """
        skip = 1.0 if self.residual else 0.0

        # 1. the difference attends to itself: [B, N, D]
        df_sa = skip * df_BND + self.self_attention(df_BND, df_BND, positions_ND)  # (4)

        # 2. the difference attends to both images and itself: keys [B, 3 N, D]
        f = self.norm_feature(f_2BND)
        keys = torch.cat([*f.chunk(2), df_sa], dim=1)
        df_cross = skip * df_sa + self.cross_attention(df_sa, keys, positions_ND)
        df_ca = skip * df_cross + self.mlp(df_cross)  # (5)

        # 3. each image attends to itself and the difference: keys [2 B, 2 N, D]
        keys = torch.cat([f, df_ca.repeat(2, 1, 1)], dim=1)
        ft = skip * f_2BND + self.feature_attention(f, keys, positions_ND)  # (6)
        return ft, df_ca

    def saliency_map(self, f_2BND: Tensor, df_ca_BND: Tensor, positions_ND: Tensor | None = None) -> Tensor:
        """Return how much each patch of the difference changes both images in (6), as a map [B, N] with sum 1."""
        # an untrained layer changes nothing, and 0 / 0 would be NaN
        contributions = torch.full_like(df_ca_BND[:, :, 0], torch.finfo(df_ca_BND.dtype).tiny)
        for image in self.norm_feature(f_2BND).chunk(2):
            keys = torch.cat([image, df_ca_BND], dim=1)
            weights = self.feature_attention.norm_weighted_attention(image, keys, positions_ND)  # [B, N, 2 N]
            contributions = contributions + weights[:, :, image.shape[1] :].sum(dim=1)
        return contributions / contributions.sum(dim=1, keepdim=True)


class DifferentialLevel(nn.Module):
    """One level of the MDP module: equations (1) to (7) for the features from one layer of the vision encoder."""

    def __init__(self, cfg: MDPConfig, width: int) -> None:
        super().__init__()
        self.norm_input = nn.LayerNorm(width) if cfg.residual else nn.Identity()
        self.gate = Projection(2 * width, width)  # Wm
        difference_class = DifferenceProjection if cfg.residual else Projection
        self.difference = difference_class(3 * width, width)  # Wp
        layers = [DifferentialLayer(cfg, width, is_first_layer=number == 0) for number in range(cfg.layers)]
        self.layers = nn.ModuleList(layers)
        # zero with residuals, so that all levels of a new module have the same score
        score_gain = 0.0 if cfg.residual else 1.0
        score_width = 1 if cfg.score == "scalar" else width
        self.score = Mlp(3 * width, Projection(width // 4, score_width, score_gain))

    def forward(self, f_2BND: Tensor, positions_ND: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the updated features Ft of both images, [2 B, N, D], and the level's score, [B, 1, 1] or [B, 1, D]."""
        # 1. gate the features of each image with the features of both images: [2 B, N, D]
        n = self.norm_input(f_2BND)
        n1, n2 = n.chunk(2)
        n_swapped = torch.cat([n2, n1])
        gates = self.gate(torch.cat([n, n_swapped], dim=-1)).sigmoid()  # (1)
        fh1, fh2 = (n * gates).chunk(2)  # (2)

        # 2. take their difference: [B, N, D]
        df = self.difference(torch.cat([fh1, fh2, fh1 - fh2], dim=-1))  # (3)

        # 3. let the difference and the images attend to each other: (4) to (6)
        ft = f_2BND
        df_ca = df
        for layer in self.layers:
            ft, df_ca = layer(ft, df_ca, positions_ND)

        # 4. score the level
        pooled_features = torch.cat([*ft.chunk(2), df], dim=-1).mean(dim=1, keepdim=True)  # [B, 1, 3 D]
        return ft, self.score(pooled_features).sigmoid()  # (7)


@torch.no_grad()
def contribution_sums(update: Tensor, score: Tensor) -> Tensor:
    """Return the sum of squares of a level's update and the sum of its scores, [2], on the device of the inputs.

    The sums are computed in fp64, so that the reported digits do not depend on the order in which threads add numbers.
    """
    return torch.stack([update.double().square().sum(), score.double().sum()])


class LevelModules(nn.Module):
    """A module with separate weights for each level, or with one set of weights shared by all levels.

    Args:
        cfg: settings with the fields `share_levels` and `vision_feature_layers`.
        new_level: function that creates the module of a level.
    """

    def __init__(self, cfg: Any, new_level: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.cfg = cfg
        count = 1 if cfg.share_levels else len(cfg.vision_feature_layers)
        self.levels = nn.ModuleList(new_level() for _ in range(count))

    def level(self, number: int) -> Any:
        """Return the module of a level. Levels are counted from 0."""
        return self.levels[0 if self.cfg.share_levels else number]

    def levels_with_features(
        self, features_1: list[Tensor], features_2: list[Tensor]
    ) -> list[tuple[Any, Tensor, Tensor]]:
        """Return (module, features before, features after) for each level."""
        levels = [self.level(number) for number in range(len(self.cfg.vision_feature_layers))]
        return list(zip(levels, features_1, features_2, strict=True))


class DifferentialPerception(LevelModules):
    """The MDP module, which combines all levels with equation (8)."""

    # Sums of each forward pass within the block of `record_contribution`, otherwise None
    _recorded_sums: list[Tensor] | None = None

    def __init__(self, cfg: MDPConfig, width: int) -> None:
        super().__init__(cfg, lambda: DifferentialLevel(cfg, width))
        self.width = width

    def forward(
        self, features_1: list[Tensor], features_2: list[Tensor], base_features_1: Tensor, base_features_2: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the updated features of the images before and after, F'_1 and F'_2, each [B, N, D].

        Args:
            features_1: features of the images before at each level, each [B, N, D].
            features_2: features of the images after at each level, each [B, N, D].
            base_features_1: features of the images before that the base would pass to the projector, [B, N, D].
            base_features_2: features of the images after that the base would pass to the projector, [B, N, D].
        """
        base_features = torch.cat([base_features_1, base_features_2])  # [2 B, N, D]
        fused = base_features if self.cfg.residual else torch.zeros_like(base_features)
        positions = grid_positions(base_features_1, self.width, self.cfg.heads, self.cfg.pos_embed_scale)
        sums: list[Tensor] = []
        for level, f1, f2 in self.levels_with_features(features_1, features_2):
            f = torch.cat([f1, f2])
            ft, score = level(f, positions)
            update = score.repeat(2, 1, 1) * (ft - f if self.cfg.residual else ft)
            fused = fused + update  # (8)
            if self._recorded_sums is not None:
                sums.append(contribution_sums(update, score))
        if self._recorded_sums is not None:
            sums.append(contribution_sums(base_features, torch.ones_like(score)))
            self._recorded_sums.append(torch.stack(sums))
        fused_1, fused_2 = fused.chunk(2)
        return fused_1, fused_2

    @contextmanager
    def record_contribution(self) -> Iterator[list[Tensor]]:
        """Record a tensor [levels + 1, 2], fp64, for each forward pass within the block, without synchronising.

        Each row except the last contains the sum of squares of a level's update in (8) and the sum of its scores. The
        last row contains the sum of squares of the encoder's last features and the number of scores. The tensors of
        several forward passes may be added up.
        """
        self._recorded_sums = []
        try:
            yield self._recorded_sums
        finally:
            self._recorded_sums = None

    def record_maps(self) -> AbstractContextManager[list[Tensor]]:
        """Record where each level looks for the difference. Each forward pass adds a map [B, N] with sum 1 per level.

        The map is taken from the level's first layer, whose input is the difference itself. After this layer, every
        patch of the difference contains information from all other patches.
        """

        def saliency_map(layer: Any, f_2BND: Tensor, _: Tensor, positions_ND: Tensor | None, result: Any) -> Tensor:
            _, df_ca = result
            return layer.saliency_map(f_2BND, df_ca, positions_ND)

        first_layers: list[nn.Module] = [level.layers[0] for level in self.levels]  # type: ignore[misc, index]
        return record_tensors(first_layers, saliency_map)


class BareDifference(LevelModules):
    """A control that replaces the MDP module: F' = F + W (F_2 - F_1) for both images, summed over the levels.

    W is a linear projection, either shared by all levels or separate for each level. Unlike the MDP module, it has no
    gates, attention, norms, positions or scores. It reads the same levels and changes the same features. Apart from the
    bias of W, the features of unchanged patches stay the same.
    """

    def __init__(self, cfg: DifferenceConfig, width: int) -> None:
        super().__init__(cfg, lambda: Projection(width, width, cfg.init_gain))

    def forward(
        self, features_1: list[Tensor], features_2: list[Tensor], base_features_1: Tensor, base_features_2: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return F'_1 and F'_2, each [B, N, D]. The arguments are those of `DifferentialPerception.forward`."""
        update = torch.zeros_like(base_features_1)
        for projection, f1, f2 in self.levels_with_features(features_1, features_2):
            update = update + projection(f2 - f1)
        return base_features_1 + update, base_features_2 + update

    def record_maps(self) -> AbstractContextManager[list[Tensor]]:
        """Record how much each patch's difference adds to the features, as a map [B, N] with sum 1 per level."""

        def relative_sizes(projection: Any, _: Tensor, result: Tensor) -> Tensor:
            # for equal images all sizes are zero, and 0 / 0 would be NaN
            sizes = (result - projection.bias).norm(dim=-1) + torch.finfo(result.dtype).tiny
            return sizes / sizes.sum(dim=1, keepdim=True)

        return record_tensors(list(self.levels), relative_sizes)


class M3DiffModel(LlavaOfPairs):
    """LLaVA-OneVision without its head, with the MDP module applied to the vision encoder's features."""

    config: M3DiffConfig

    def __init__(self, config: M3DiffConfig) -> None:
        super().__init__(config)
        cfg = config.module_config()
        module_class: Any = BareDifference if isinstance(cfg, DifferenceConfig) else DifferentialPerception
        self.mdp = None if cfg is None else module_class(cfg, config.vision_config.hidden_size)

    def visual_tokens(self, pixel_values: Tensor, pairs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the projected features and each image's patches and newline token; see `LlavaOfPairs`."""
        projected_features = self.multi_modal_projector(self.perceive(pixel_values, pairs))
        return projected_features, list(self.append_newline(projected_features).unbind(0))

    def perceive(self, pixel_values: Tensor, pairs: Tensor) -> Tensor:
        """Return the vision encoder's features after equation (8), [I, N, D], in the order of the images.

        Images that are not in a pair keep the encoder's features, and so do all images without a module. See
        `LlavaOfPairs.visual_tokens`.
        """
        # 1. encode the images
        states = self.vision_hidden_states(pixel_values)
        base_features = states[self.config.vision_feature_layer]
        if self.mdp is None or not len(pairs):
            return base_features

        # 2. select the images before and after: [P, N, D] each
        before, after = pairs.to(pixel_values.device, non_blocking=True).unbind(1)
        levels = [states[layer] for layer in self.mdp.cfg.vision_feature_layers]
        features_1 = [f.index_select(0, before) for f in levels]
        features_2 = [f.index_select(0, after) for f in levels]

        # 3. fuse the levels, and replace the features of the pairs by the fused features: [I, N, D]
        base_features_1 = base_features.index_select(0, before)
        base_features_2 = base_features.index_select(0, after)
        fused = self.mdp(features_1, features_2, base_features_1, base_features_2)
        return base_features.index_copy(0, torch.cat([before, after]), torch.cat(fused).to(base_features))


class M3DiffForConditionalGeneration(LlavaOfPairsForGeneration):
    """M3Diff with a language-model head. It answers questions about images."""

    config: M3DiffConfig
    MODEL = M3DiffModel
