"""FLOPs of one training sequence of M3Diff: LLaVA's terms (components/models/llava_flops.py) and the module's."""

from m3diff.models.family import Settings, Term
from m3diff.models.llava_flops import backward_factor, llava_terms, patches
from m3diff.models.m3diff.configuration import M3DiffConfig
from m3diff.models.m3diff.settings import DifferenceConfig

PATCHES_NEWLINE = 1


def image_tokens(config: M3DiffConfig) -> int:
    """Visual tokens of a pair, each image with its newline."""
    return 2 * (patches(config) + PATCHES_NEWLINE)


def flops(config: M3DiffConfig, tokens: float, supervised: float, settings: Settings) -> list[Term]:
    """The terms of one sequence of `tokens`, of which `supervised` meet the head."""
    factor = backward_factor(settings.rates["vision"] is not None, settings.rates["module"] is not None)
    module = Term("MDP", _mdp_flops(config), factor)
    return [term for term in llava_terms(config, tokens, supervised, settings, module) if term.forward]


def _mdp_flops(config: M3DiffConfig) -> float:
    """Equations (1)-(6) for a pair: 7 d^2 a token for gates and difference, 24 + 2 r d^2 a layer, r the MLP ratio. The
    bare difference: d^2 a token."""
    cfg, n, d = config.mdp_config(), patches(config), config.vision_config.hidden_size
    if cfg is None:
        return 0.0
    if isinstance(cfg, DifferenceConfig):
        return len(cfg.vision_feature_layers) * 2 * d * d * n
    linears = (7 + cfg.layers * (24 + 2 * cfg.mlp_ratio)) * d * d * n
    attention = cfg.layers * 32 * n * n * d
    return len(cfg.vision_feature_layers) * (2 * linears + attention)
