"""M3Diff on transformers' LLaVA-OneVision: the Multi-scale Differential Perception (MDP) module, equations (1)-(8) of
arXiv 2503.11093, section 4, between vision encoder and projector.

Shapes: B pairs, N patches per image, D the vision encoder's width. `f_2BND` holds the features of the B images before,
then of the B images after: what treats both alike treats them at once. What the paper leaves open is a field of
`MDPConfig`, with the reason for the choice.
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
    recorded,
)
from m3diff.models.llava import LlavaOfPairs, LlavaOfPairsConfig, LlavaOfPairsForGeneration, keep_names
from m3diff.models.settings import DifferenceConfig, MDPConfig, module_config


class M3DiffConfig(LlavaOfPairsConfig):
    """Configuration of M3Diff.

    Attributes:
        mdp: fields of `MDPConfig` or `DifferenceConfig`, or None where there is no module and the model is the base.
    """

    model_type = "m3diff"
    MODULE = "mdp"

    mdp: dict | None = None

    read_module = staticmethod(module_config)


keep_names(M3DiffConfig)


class DifferentialLayer(nn.Module):
    """Equations (4)-(6): the difference looks at itself and at both images; both images look at the difference."""

    def __init__(self, cfg: MDPConfig, width: int, first: bool) -> None:
        super().__init__()
        self.residual = cfg.residual
        zero = 0.0 if cfg.residual else 1.0
        self.self_attention = MultiHeadAttention(width, cfg.heads, zero, cfg.residual)
        self.cross_attention = MultiHeadAttention(width, cfg.heads, zero, cfg.residual)
        hidden = cfg.mlp_ratio * width
        self.mlp = Mlp(width, Detector(hidden, width) if cfg.residual and first else Projection(hidden, width, zero))
        gain = cfg.init_gain if cfg.residual else 1.0
        self.feature_attention = MultiHeadAttention(width, cfg.heads, gain, cfg.residual)
        self.norm_feature = nn.LayerNorm(width) if cfg.residual else nn.Identity()

    def forward(self, f_2BND: Tensor, df_BND: Tensor, places_ND: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns Ft of both images, [2 B, N, D], and dF_ca, [B, N, D]."""
        skip = 1.0 if self.residual else 0.0
        df_sa = skip * df_BND + self.self_attention(df_BND, df_BND, places_ND)  # (4)
        f = self.norm_feature(f_2BND)
        joined = torch.cat([*f.chunk(2), df_sa], dim=1)
        attention_output = skip * df_sa + self.cross_attention(df_sa, joined, places_ND)
        df_ca = skip * attention_output + self.mlp(attention_output)  # (5)
        both = torch.cat([f, df_ca.repeat(2, 1, 1)], dim=1)
        return skip * f_2BND + self.feature_attention(f, both, places_ND), df_ca  # (6)

    def saliency_map(self, f_2BND: Tensor, df_ca_BND: Tensor, places_ND: Tensor | None = None) -> Tensor:
        """The amount by which each place of the difference, as it leaves this layer, moves both images' features in
        (6): [B, N], sums to 1."""
        reached = torch.full_like(df_ca_BND[:, :, 0], torch.finfo(df_ca_BND.dtype).tiny)  # untrained: moves nothing
        for query in self.norm_feature(f_2BND).chunk(2):
            keys = torch.cat([query, df_ca_BND], dim=1)
            passed = self.feature_attention.norm_weighted_attention(query, keys, places_ND)
            reached = reached + passed[:, :, query.shape[1] :].sum(dim=1)
        return reached / reached.sum(dim=1, keepdim=True)


class DifferentialLevel(nn.Module):
    """Equations (1)-(7) for the features of one level, a layer of the vision encoder."""

    def __init__(self, cfg: MDPConfig, width: int) -> None:
        super().__init__()
        self.norm_input = nn.LayerNorm(width) if cfg.residual else nn.Identity()
        self.gate = Projection(2 * width, width)  # Wm
        self.difference = (DifferenceProjection if cfg.residual else Projection)(3 * width, width)  # Wp
        self.layers = nn.ModuleList(DifferentialLayer(cfg, width, first=k == 0) for k in range(cfg.layers))
        # with residuals zero-initialised: at first all levels count alike
        gain = 0.0 if cfg.residual else 1.0
        self.score = Mlp(3 * width, Projection(width // 4, 1 if cfg.score == "scalar" else width, gain))

    def forward(self, f_2BND: Tensor, places_ND: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns Ft of both images, [2 B, N, D], and the score, [B, 1, 1] or [B, 1, D]."""
        n = self.norm_input(f_2BND)
        n1, n2 = n.chunk(2)
        gates = self.gate(torch.cat([n, torch.cat([n2, n1])], dim=-1)).sigmoid()  # (1)
        fh1, fh2 = (n * gates).chunk(2)  # (2)
        df = self.difference(torch.cat([fh1, fh2, fh1 - fh2], dim=-1))  # (3)
        ft, df_ca = f_2BND, df
        for layer in self.layers:
            ft, df_ca = layer(ft, df_ca, places_ND)
        pooled = torch.cat([*ft.chunk(2), df], dim=-1).mean(dim=1, keepdim=True)
        return ft, self.score(pooled).sigmoid()  # (7)


@torch.no_grad()
def sums_of(x: Tensor, score: Tensor) -> Tensor:
    """The sum of the squares of a feature map and the sum of the scores, [2], in fp64, where the order in which threads
    add changes no digit that is reported; on the device where they are."""
    return torch.stack([x.double().square().sum(), score.double().sum()])


class OverLevels(nn.Module):
    """A module of one set of weights for all levels, or of one for each."""

    def __init__(self, cfg: Any, new: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.cfg = cfg
        count = 1 if cfg.share_levels else len(cfg.vision_feature_layers)
        self.levels = nn.ModuleList(new() for _ in range(count))

    def level(self, number: int) -> Any:
        return self.levels[0 if self.cfg.share_levels else number]

    def both(self, features_1: list[Tensor], features_2: list[Tensor]) -> list[tuple[Any, Tensor, Tensor]]:
        """The module of each level, and the features before and after that it works on."""
        levels = [self.level(number) for number in range(len(self.cfg.vision_feature_layers))]
        return list(zip(levels, features_1, features_2, strict=True))


class DifferentialPerception(OverLevels):
    """The MDP module over all levels, equation (8)."""

    _sums: list[Tensor] | None = None  # of each forward, while they are recorded

    def __init__(self, cfg: MDPConfig, width: int) -> None:
        super().__init__(cfg, lambda: DifferentialLevel(cfg, width))
        self.width = width

    def forward(
        self, features_1: list[Tensor], features_2: list[Tensor], last_1: Tensor, last_2: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fuse the levels.

        Args:
            features_1, features_2: features of images before and after at each level, each [B, N, D].
            last_1, last_2: the features that the base would hand to the projector, [B, N, D].
        Returns: F'_1, F'_2, each [B, N, D].
        """
        last = torch.cat([last_1, last_2])
        out = last if self.cfg.residual else torch.zeros_like(last)
        places = grid_positions(last_1, self.width, self.cfg.heads, self.cfg.pos_embed_scale)
        sums: list[Tensor] = []
        for level, f1, f2 in self.both(features_1, features_2):
            f = torch.cat([f1, f2])
            ft, score = level(f, places)
            update = score.repeat(2, 1, 1) * (ft - f if self.cfg.residual else ft)
            out = out + update  # (8)
            if self._sums is not None:
                sums.append(sums_of(update, score))
        if self._sums is not None:
            self._sums.append(torch.stack([*sums, sums_of(last, torch.ones_like(score))]))
        out_1, out_2 = out.chunk(2)
        return out_1, out_2

    @contextmanager
    def recorded_contribution(self) -> Iterator[list[Tensor]]:
        """Within it, each forward adds a tensor [levels + 1, 2], fp64, without waiting for the device: of each level
        the sum of the squares of its update in (8) and the sum of its scores; last, the sum of the squares of the
        encoder's last features and the number of scores. They add up over forwards."""
        self._sums = []
        try:
            yield self._sums
        finally:
            self._sums = None

    def recorded_maps(self) -> AbstractContextManager[list[Tensor]]:
        """Within it, each level that `forward` works on adds where it looks for the difference: [B, N], sums to 1. Of
        its first layer, which hands on the difference itself; after it every place holds something of all."""

        def looked(layer: Any, f_2BND: Tensor, _: Tensor, places_ND: Tensor | None, result: Any) -> Tensor:
            return layer.saliency_map(f_2BND, result[1], places_ND)

        return recorded([level.layers[0] for level in self.levels], looked)  # type: ignore[misc, index]  # of layers


class BareDifference(OverLevels):
    """The control in the MDP module's place: F' = F + W (F_2 - F_1) for both images, summed over the levels; W is one
    projection, or one for each level.

    Nothing else: no gates, attention, norms or positions, no score of a level. It differs from the MDP module in these
    alone: it reads the same levels and writes to the same features, where unchanged places stay as they are.
    """

    def __init__(self, cfg: DifferenceConfig, width: int) -> None:
        super().__init__(cfg, lambda: Projection(width, width, cfg.init_gain))

    def forward(
        self, features_1: list[Tensor], features_2: list[Tensor], last_1: Tensor, last_2: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Arguments and result as of `DifferentialPerception`: levels [B, N, D] before and after, the last features."""
        update = torch.zeros_like(last_1)
        for level, f1, f2 in self.both(features_1, features_2):
            update = update + level(f2 - f1)
        return last_1 + update, last_2 + update

    def recorded_maps(self) -> AbstractContextManager[list[Tensor]]:
        """Within it, each level that `forward` works on adds the size of what each place's difference adds to the
        features: [B, N], sums to 1."""

        def sizes(projection: Any, _: Tensor, result: Tensor) -> Tensor:
            found = (result - projection.bias).norm(dim=-1) + torch.finfo(result.dtype).tiny  # equal images: nothing
            return found / found.sum(dim=1, keepdim=True)

        return recorded(list(self.levels), sizes)


class M3DiffModel(LlavaOfPairs):
    """LLaVA-OneVision without its head; for pairs of images the MDP module works on the vision encoder's features."""

    config: M3DiffConfig

    def __init__(self, config: M3DiffConfig) -> None:
        super().__init__(config)
        cfg = config.module_config()
        kind: Any = BareDifference if isinstance(cfg, DifferenceConfig) else DifferentialPerception
        self.mdp = None if cfg is None else kind(cfg, config.vision_config.hidden_size)

    def visual_tokens(self, pixel_values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """See `LlavaOfPairs`: in each image's places its patches and the newline, [N + 1, W]."""
        projected = self.multi_modal_projector(self.perceive(pixel_values))
        return projected, list(self.with_newline(projected).unbind(0))

    def perceive(self, pixel_values: Tensor) -> Tensor:
        """The vision encoder's features after equation (8), [images, N, D], images interleaved as they came; without
        an MDP module, the encoder's own."""
        states = self.vision_hidden_states(pixel_values)
        last = states[self.config.vision_feature_layer]
        if self.mdp is None:
            return last
        levels = [states[layer] for layer in self.mdp.cfg.vision_feature_layers]
        fused = self.mdp([f[0::2] for f in levels], [f[1::2] for f in levels], last[0::2], last[1::2])
        return torch.stack(fused, dim=1).flatten(0, 1)


class M3DiffForConditionalGeneration(LlavaOfPairsForGeneration):
    """M3Diff with its language-model head: two images and a question in, what changed out."""

    config: M3DiffConfig
    MODEL = M3DiffModel
