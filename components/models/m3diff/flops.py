"""FLOPs of one training sequence of M3Diff, part by part.

Counting rules: one multiply-add is 2 FLOP. Frozen linears take one more forward's worth in backward (the gradient of
their input; visual tokens need it because the vision encoder trains), trained ones and attention two more. Causal
attention counts half its square. Full recomputation is of transformers' layers, in the LLM and the vision encoder.
"""

from components.models.family import Term
from components.models.m3diff.configuration import M3DiffConfig
from components.models.m3diff.settings import DifferenceConfig

PATCHES_NEWLINE = 1


def _linears(config: M3DiffConfig) -> list[tuple[int, int]]:
    """(in, out) of the seven linears of one LLM layer."""
    text = config.text_config
    width, hidden = text.hidden_size, text.intermediate_size
    head = getattr(text, "head_dim", None) or width // text.num_attention_heads
    queries, keys = head * text.num_attention_heads, head * text.num_key_value_heads
    attention = [(width, queries), (width, keys), (width, keys), (queries, width)]
    return [*attention, (width, hidden), (width, hidden), (hidden, width)]


def lora_parameters(config: M3DiffConfig, rank: int) -> int:
    return config.text_config.num_hidden_layers * sum(rank * (a + b) for a, b in _linears(config))


def linear_parameters(config: M3DiffConfig) -> int:
    return config.text_config.num_hidden_layers * sum(a * b for a, b in _linears(config))


def image_tokens(config: M3DiffConfig) -> int:
    """Visual tokens of a pair, each image with its newline."""
    encoder = config.vision_config
    return 2 * ((encoder.image_size // encoder.patch_size) ** 2 + PATCHES_NEWLINE)


def flops(config: M3DiffConfig, tokens: float, supervised: float, lora_rank: int) -> list[Term]:
    """The terms of one sequence of `tokens`, of which `supervised` meet the head."""
    text, encoder = config.text_config, config.vision_config
    width, layers = text.hidden_size, text.num_hidden_layers
    n, d = (encoder.image_size // encoder.patch_size) ** 2, encoder.hidden_size
    layer = 4 * d * d + 2 * d * encoder.intermediate_size
    encoder_linears = encoder.num_hidden_layers * layer + 3 * encoder.patch_size**2 * d
    encoder_attention = 4 * n * n * d * encoder.num_hidden_layers
    terms = [
        Term("LLM linears", 2 * linear_parameters(config) * tokens, 1, recomputed=True),
        Term("LLM attention", 4 * tokens**2 * width * layers / 2, 2, recomputed=True),
        Term("LoRA", 2 * lora_parameters(config, lora_rank) * tokens, 2, recomputed=True),
        Term("vision encoder", 2 * (2 * encoder_linears * n + encoder_attention), 2, recomputed=True),
        Term("projector", 2 * (d * width + width * width) * 2 * n, 2),
        Term("MDP", _mdp_flops(config, n, d), 2),
        Term("head, supervised tokens", 2 * width * text.vocab_size * supervised, 1),
    ]
    return [term for term in terms if term.forward]


def _mdp_flops(config: M3DiffConfig, n: int, d: int) -> float:
    """Equations (1)-(6) for a pair: 7 d^2 a token for gates and difference, 24 + 2 r d^2 a layer, r the MLP ratio. The
    bare difference: d^2 a token."""
    cfg = config.mdp_config()
    if cfg is None:
        return 0.0
    if isinstance(cfg, DifferenceConfig):
        return len(cfg.vision_feature_layers) * 2 * d * d * n
    linears = (7 + cfg.layers * (24 + 2 * cfg.mlp_ratio)) * d * d * n
    attention = cfg.layers * 32 * n * n * d
    return len(cfg.vision_feature_layers) * (2 * linears + attention)
