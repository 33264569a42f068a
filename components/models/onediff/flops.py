"""FLOPs of one training sequence of OneDiff: LLaVA's terms (components/models/llava_flops.py) and the module's."""

from m3diff.models.family import Settings, Term
from m3diff.models.llava_flops import backward_factor, llava_terms, patches
from m3diff.models.onediff.configuration import OneDiffConfig


def image_tokens(config: OneDiffConfig) -> int:
    """Visual tokens of a pair, delta tokens and newlines among them."""
    return sum(config.places())


def flops(config: OneDiffConfig, tokens: float, supervised: float, settings: Settings) -> list[Term]:
    """The terms of one sequence of `tokens`, of which `supervised` meet the head."""
    factor = backward_factor(settings.rates["vision"] is not None, settings.rates["module"] is not None)
    module = Term("VDM", _vdm_flops(config), factor)
    whole = settings.lora.rank == 0 and settings.rates["llm"] is not None
    return [term for term in llava_terms(config, tokens, supervised, settings, module, whole) if term.forward]


def _vdm_flops(config: OneDiffConfig) -> float:
    """Equations (1)-(4) for a pair, T delta tokens of width V: self-attention 4 V^2 and MLP 2 r V^2 a token and layer;
    a reading layer 2 V^2 a token (4 + 3 V^2 where it reads the images apart) and 2 D V a patch and image."""
    cfg = config.vdm_config()
    if cfg is None:
        return 0.0
    n, d, width, t = 2 * patches(config), config.vision_config.hidden_size, cfg.width, cfg.tokens
    own = cfg.layers * ((4 + 2 * cfg.mlp_ratio) * width * width * t + 2 * t * t * width)
    apart = 4 + 3 if cfg.images == "separate" else 2
    read = cfg.reading_layers * (apart * width * width * t + 2 * d * width * n + 2 * t * n * width)
    shared = cfg.projection == "shared"
    llm = config.text_config.hidden_size
    out = (width * d + d * llm + llm * llm if shared else width * llm) * t
    return 2 * (own + read + out)
