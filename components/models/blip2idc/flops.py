"""FLOPs of one training sequence of BLIP2IDC, part by part.

Counting rules: one multiply-add is 2 FLOP. All weights are frozen under adapters in every part, as in the paper: a
linear takes one more forward's worth in backward (the gradient of its input, which the adapters below need), adapters
and attention two more. Causal attention counts half its square. Full recomputation is of transformers' layers, in all
three parts; a frozen vision encoder keeps no activations to recompute. The vision encoder and the
Q-Former work once a pair, on one picture.
"""

from typing import Any

from m3diff.models.blip2idc.configuration import Blip2IDCConfig
from m3diff.models.family import ADAPTERS, Settings, Term
from m3diff.models.llava_flops import backward_factor


def visual_tokens(config: Blip2IDCConfig) -> int:
    """Of one picture in the vision encoder: its patches and the class token."""
    return (config.vision_config.image_size // config.vision_config.patch_size) ** 2 + 1


def crossing_layers(config: Blip2IDCConfig) -> int:
    """Layers of the Q-Former with cross-attention: the first, and every so many."""
    qformer = config.qformer_config
    return -(-qformer.num_hidden_layers // qformer.cross_attention_frequency)


def llm_widths(text: Any) -> tuple[int, int, int]:
    """The LLM's width, and that of its queries and of its keys."""
    heads = text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // heads
    return text.hidden_size, head * heads, head * (getattr(text, "num_key_value_heads", None) or heads)


def llm_linears(text: Any) -> int:
    """Weights of the linears of the LLM's layers: OPT's MLP has two, the others' are gated and have three."""
    width, queries, keys = llm_widths(text)
    mlp = 2 * width * text.ffn_dim if hasattr(text, "ffn_dim") else 3 * width * text.intermediate_size
    return text.num_hidden_layers * (2 * width * (queries + keys) + mlp)


def qformer_linears(config: Blip2IDCConfig) -> float:
    """Multiply-adds of the Q-Former's linears for one picture."""
    qformer, crossing = config.qformer_config, crossing_layers(config)
    width = qformer.hidden_size
    own = qformer.num_hidden_layers * (4 * width * width + 2 * width * qformer.intermediate_size)
    across = crossing * 2 * config.vision_config.hidden_size * width * visual_tokens(config)
    return (own + crossing * 2 * width * width) * config.num_query_tokens + across


def adapted_linears(config: Blip2IDCConfig, tokens: float) -> list[tuple[str, int, int, float]]:
    """(part, in, out, tokens that pass it) of each linear with an adapter, for a sequence of `tokens`."""
    encoder, qformer, crossing = config.vision_config, config.qformer_config, crossing_layers(config)
    patches, read = visual_tokens(config), config.num_query_tokens
    width, queries, keys = llm_widths(config.text_config)
    own = ("module", qformer.hidden_size, qformer.hidden_size, read)
    across = ("module", encoder.hidden_size, qformer.hidden_size, patches)
    llm = [("llm", width, out, tokens) for out in (queries, keys, keys)]
    return [
        *[("vision", encoder.hidden_size, 3 * encoder.hidden_size, patches)] * encoder.num_hidden_layers,
        *[own] * (2 * qformer.num_hidden_layers + crossing),
        *[across] * (2 * crossing),
        *llm * config.text_config.num_hidden_layers,
    ]


def lora_parameters(config: Blip2IDCConfig, rank: int) -> dict[str, int]:
    """Of each part that has adapters."""
    counts: dict[str, int] = {}
    for part, inputs, outputs, _ in adapted_linears(config, 0):
        counts[part] = counts.get(part, 0) + rank * (inputs + outputs)
    return counts


def flops(config: Blip2IDCConfig, tokens: float, supervised: float, settings: Settings) -> list[Term]:
    """The terms of one sequence of `tokens`, of which `supervised` meet the head."""
    text, encoder, qformer = config.text_config, config.vision_config, config.qformer_config
    n, q, d = visual_tokens(config), config.num_query_tokens, encoder.hidden_size
    layer = 4 * d * d + 2 * d * encoder.intermediate_size
    embedding = 3 * encoder.patch_size**2 * d * (n - 1)
    crossing = crossing_layers(config)
    read = 4 * q * qformer.hidden_size * (qformer.num_hidden_layers * q + crossing * n)
    width, queries, _ = llm_widths(text)
    rank = settings.lora.rank
    trains = {part: settings.rates[part] is not None for part in ("vision", "module", "projector", "llm")}
    adapted = [linear for linear in adapted_linears(config, tokens) if trains[linear[0]]]
    lora = sum(rank * (inputs + outputs) * each for _, inputs, outputs, each in adapted)
    seen = trains["vision"]
    queried = seen or trains["module"]
    embedded = queried or trains["projector"]
    terms = [
        Term("LLM linears", 2 * llm_linears(text) * tokens, int(embedded or trains["llm"]), recomputed=True),
        Term("LLM attention", 4 * tokens**2 * queries * text.num_hidden_layers / 2, 2, recomputed=True),
        Term(ADAPTERS, 2 * lora, 2, recomputed=True),
        Term("vision encoder", 2 * (encoder.num_hidden_layers * layer * n + embedding), int(seen), recomputed=seen),
        Term("vision encoder attention", 4 * n * n * d * encoder.num_hidden_layers, 2 * seen, recomputed=seen),
        Term("Q-Former", 2 * qformer_linears(config), int(queried), recomputed=True),
        Term("Q-Former attention", read, 2 * queried, recomputed=True),
        Term("projector", 2 * qformer.hidden_size * width * q, backward_factor(queried, trains["projector"])),
        Term("head, supervised tokens", 2 * width * text.vocab_size * supervised, 1),
    ]
    return [term for term in terms if term.forward]
