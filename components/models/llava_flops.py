"""FLOPs of one training sequence of a LLaVA on pairs of images, part by part.

Counting rules: one multiply-add is 2 FLOP. Backward takes one more forward's worth for the gradient of the input, where
something before it trains, and one for that of the weights, where they train; attention, which has no weights, two or
none. Causal attention counts half its square. Full recomputation is of transformers' layers, in the LLM and the vision
encoder.
"""

from typing import Any

from m3diff.models.family import ADAPTERS, Settings, Term


def llm_linears(config: Any) -> list[tuple[int, int]]:
    """(in, out) of the seven linears of one LLM layer."""
    text = config.text_config
    width, hidden = text.hidden_size, text.intermediate_size
    head = getattr(text, "head_dim", None) or width // text.num_attention_heads
    queries, keys = head * text.num_attention_heads, head * text.num_key_value_heads
    attention = [(width, queries), (width, keys), (width, keys), (queries, width)]
    return [*attention, (width, hidden), (width, hidden), (hidden, width)]


def lora_parameters(config: Any, rank: int) -> int:
    return config.text_config.num_hidden_layers * sum(rank * (a + b) for a, b in llm_linears(config))


def linear_parameters(config: Any) -> int:
    return config.text_config.num_hidden_layers * sum(a * b for a, b in llm_linears(config))


def patches(config: Any) -> int:
    """Patches of one image."""
    encoder = config.vision_config
    return (encoder.image_size // encoder.patch_size) ** 2


def backward_factor(before: bool, weights: bool) -> int:
    """Forwards' worth of a backward: `before`: something that it comes after trains; `weights`: its own train."""
    return int(before) + int(weights)


def llava_terms(
    config: Any, tokens: float, supervised: float, settings: Settings, module: Term, head_trains: bool = False
) -> list[Term]:
    """The terms of one sequence of `tokens`, of which `supervised` meet the head.

    Args:
        module: of the family's own module, which stands before the projector or beside it.
        head_trains: whether the head's weights do.
    """
    text, encoder = config.text_config, config.vision_config
    width, layers, rank = text.hidden_size, text.num_hidden_layers, settings.lora.rank
    n, d = patches(config), encoder.hidden_size
    layer = 4 * d * d + 2 * d * encoder.intermediate_size
    encoder_linears = encoder.num_hidden_layers * layer + 3 * encoder.patch_size**2 * d
    encoder_attention = 4 * n * n * d * encoder.num_hidden_layers
    trains = {part: settings.rates[part] is not None for part in ("vision", "module", "projector", "llm")}
    seeing = trains["vision"]  # a frozen encoder keeps no activations, so none are recomputed
    seen = seeing or trains["module"]
    linears = backward_factor(seen or trains["projector"] or trains["llm"], trains["llm"] and rank == 0)
    adapters = lora_parameters(config, rank) if trains["llm"] else 0
    return [
        Term("LLM linears", 2 * linear_parameters(config) * tokens, linears, recomputed=True),
        Term("LLM attention", 4 * tokens**2 * width * layers / 2, 2, recomputed=True),
        Term(ADAPTERS, 2 * adapters * tokens, 2, recomputed=True),
        Term("vision encoder", 2 * (2 * encoder_linears * n + encoder_attention), 2 * seeing, recomputed=seeing),
        Term("projector", 2 * (d * width + width * width) * 2 * n, backward_factor(seen, trains["projector"])),
        module,
        Term("head, supervised tokens", 2 * width * text.vocab_size * supervised, backward_factor(True, head_trains)),
    ]
