"""The bare difference, which stands in the MDP module's place to measure its worth; and which of the two a model has.

Shapes: B pairs, N patches per image, D the vision encoder's width.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from m3diff.models.m3diff.mdp import DifferentialPerception, Projection
from m3diff.models.m3diff.settings import DifferenceConfig, ModuleConfig


class BareDifference(nn.Module):
    """F' = F + W (F_2 - F_1) for both images, summed over the levels; W is one projection, or one for each level.

    Nothing else: no gates, attention, norms or positions, no score of a level. It differs from the MDP module in these
    alone: it reads the same levels and writes to the same features, where unchanged places stay as they are.
    """

    def __init__(self, cfg: DifferenceConfig, width: int) -> None:
        super().__init__()
        self.cfg = cfg
        count = 1 if cfg.share_levels else len(cfg.vision_feature_layers)
        self.levels = nn.ModuleList(Projection(width, width, cfg.init_gain) for _ in range(count))

    def level(self, number: int) -> Projection:
        projection = self.levels[0 if self.cfg.share_levels else number]
        assert isinstance(projection, Projection)
        return projection

    def forward(
        self, features_1: list[Tensor], features_2: list[Tensor], last_1: Tensor, last_2: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Arguments and result as of `DifferentialPerception`: levels [B, N, D] before and after, the last features."""
        assert len(features_1) == len(features_2) == len(self.cfg.vision_feature_layers), "one feature map per level"
        update = torch.zeros_like(last_1)
        for number, (f1, f2) in enumerate(zip(features_1, features_2, strict=True)):
            update = update + self.level(number)(f2 - f1)
        return last_1 + update, last_2 + update

    @contextmanager
    def recorded_maps(self) -> Iterator[list[Tensor]]:
        """Within it, each level that `forward` works on adds the size of what each place's difference adds to the
        features: [B, N], sums to 1."""
        maps: list[Tensor] = []

        def add(projection: Any, _: Any, result: Tensor) -> None:
            sizes = (result - projection.bias).norm(dim=-1) + torch.finfo(result.dtype).tiny  # equal images: nothing
            maps.append(sizes / sizes.sum(dim=1, keepdim=True))

        hooks = [projection.register_forward_hook(add) for projection in self.levels]
        try:
            yield maps
        finally:
            for hook in hooks:
                hook.remove()


def new_module(cfg: ModuleConfig | None, width: int) -> DifferentialPerception | BareDifference | None:
    """The module of these settings, with weights from the random state; None where the model has none."""
    if cfg is None:
        return None
    return BareDifference(cfg, width) if isinstance(cfg, DifferenceConfig) else DifferentialPerception(cfg, width)
