"""The papers' equations and the modules' saliency maps, written out plainly without calling code of the project."""

import math

import torch
from torch import Tensor, nn


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return x @ layer.weight.T + layer.bias


def unit(x: Tensor) -> Tensor:
    return x / (x**2).mean(-1, keepdim=True).sqrt()


def norm(x: Tensor, module: nn.Module) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * module.weight + module.bias


def mlp(x: Tensor, module: nn.Sequential, exact: bool = False) -> Tensor:
    """Return two linear layers with GELU between them, approximated by tanh as in SigLIP or exact as in BERT."""
    hidden = linear(x, module[0])
    cubic = (2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)
    return linear(hidden * 0.5 * (1 + (torch.erf(hidden / math.sqrt(2)) if exact else torch.tanh(cubic))), module[2])


def head_parts(
    q: Tensor, kv: Tensor, module: nn.Module, positions: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Return the weights [M, N] and values [N, width] of each head for queries [M, D] and keys [N, width]."""
    queries = linear(q, module.q_proj)
    keys = linear(kv, module.k_proj)
    values = linear(kv, module.v_proj)
    if module.qk_norm:
        queries = unit(queries)
        keys = unit(keys)
    if positions is not None:
        queries = queries + positions
        keys = keys + torch.cat([positions] * (len(keys) // len(positions)))
    parts_by_head = []
    width = queries.shape[1] // module.heads
    for cut in (slice(h * width, (h + 1) * width) for h in range(module.heads)):
        weights = torch.exp(queries[:, cut] @ keys[:, cut].T / math.sqrt(width))
        parts_by_head.append((weights / weights.sum(1, keepdim=True), values[:, cut]))
    return parts_by_head


def attend(q: Tensor, kv: Tensor, module: nn.Module, positions: Tensor | None = None) -> Tensor:
    """Return CA(q, kv) of one sample."""
    heads = [weights @ values for weights, values in head_parts(q, kv, module, positions)]
    return linear(torch.cat(heads, 1), module.out_proj)


def brought(q: Tensor, kv: Tensor, module: nn.Module, positions: Tensor | None = None) -> list[Tensor]:
    """Return what each key's value adds to each query of one sample, [M, N, D], for each head."""
    outs = module.out_proj.weight.chunk(module.heads, dim=1)
    parts = zip(head_parts(q, kv, module, positions), outs, strict=True)
    return [weights[:, :, None] * (values @ out.T)[None] for (weights, values), out in parts]


def mdp(module: nn.Module, before: list[Tensor], after: list[Tensor], base_features: list[Tensor]) -> list[Tensor]:
    """Return F'_1 and F'_2 of M3Diff for one pair, each [N, D], from the features at each level."""
    cfg = module.cfg
    skip = 1.0 if cfg.residual else 0.0
    out = [x.clone() if cfg.residual else torch.zeros_like(x) for x in base_features]
    for i, (f1, f2) in enumerate(zip(before, after, strict=True)):
        level = module.levels[0 if cfg.share_levels else i]
        g1, g2 = (norm(f, level.norm_input) if cfg.residual else f for f in (f1, f2))
        l1 = torch.sigmoid(linear(torch.cat([g1, g2], -1), level.gate))  # (1)
        l2 = torch.sigmoid(linear(torch.cat([g2, g1], -1), level.gate))
        # (2)
        fh1 = g1 * l1
        fh2 = g2 * l2
        df = linear(torch.cat([fh1, fh2, fh1 - fh2], -1), level.difference)  # (3)
        x1 = f1
        x2 = f2
        x = df
        for layer in level.layers:
            sa = skip * x + attend(x, x, layer.self_attention)  # (4)
            n1, n2 = (norm(v, layer.norm_feature) if cfg.residual else v for v in (x1, x2))
            ca = skip * sa + attend(sa, torch.cat([n1, n2, sa]), layer.cross_attention)
            x = skip * ca + mlp(ca, layer.mlp)  # (5)
            x1 = skip * x1 + attend(n1, torch.cat([n1, x]), layer.feature_attention)  # (6)
            x2 = skip * x2 + attend(n2, torch.cat([n2, x]), layer.feature_attention)
        score = torch.sigmoid(mlp(torch.cat([x1, x2, df], -1).mean(0), level.score))  # (7)
        out[0] = out[0] + score * (x1 - skip * f1)  # (8)
        out[1] = out[1] + score * (x2 - skip * f2)
    return out


def difference(
    module: nn.Module, before: list[Tensor], after: list[Tensor], base_features: list[Tensor]
) -> list[Tensor]:
    """Return the base features of both images plus the projected difference of each level."""
    out = [x.clone() for x in base_features]
    for number, (f1, f2) in enumerate(zip(before, after, strict=True)):
        for image in out:
            image += linear(f2 - f1, module.levels[0 if module.cfg.share_levels else number])
    return out


def vdm(module: nn.Module, before: list[Tensor], after: list[Tensor]) -> Tensor:
    """Return Q(D_layers) of OneDiff for one pair, [T, width]. `before` and `after` are [N, D] at each feature layer."""
    cfg = module.cfg
    d = module.delta
    reads = list(range(cfg.layers)) if cfg.cross_attention == "every" else list(range(0, cfg.layers, 2))
    for k, layer in enumerate(module.layers):

        def block(d: Tensor, number: int, function, layer=layer) -> Tensor:
            if cfg.norm == "post":
                return norm(d + function(d), layer.norms[number])
            return d + function(norm(d, layer.norms[number]) if cfg.norm == "pre" else d)

        d = block(d, 0, lambda x, m=layer.self_attention: attend(x, x, m))
        if k in reads:
            # the reading layers share out the feature layers evenly and in order
            tap = reads.index(k) * len(cfg.vision_feature_layers) // len(reads)
            h1, h2 = (norm(side[tap], module.feature_norms[tap]) for side in (before, after))
            reading = layer.reading
            if cfg.images == "joined":
                keys = torch.cat([h1 + reading.image_embeddings[0], h2 + reading.image_embeddings[1]])
                d = block(d, 1, lambda x, m=reading.attention, kv=keys: attend(x, kv, m))
            else:

                def apart(x: Tensor, m=reading, h1=h1, h2=h2) -> Tensor:
                    r1 = attend(x, h1, m.attention)
                    r2 = attend(x, h2, m.attention)
                    return linear(torch.cat([r1, r2, r1 - r2], -1), m.join)

                d = block(d, 1, apart)
        d = block(d, 2, lambda x, m=layer.mlp: mlp(x, m, exact=True))
    return linear(d, module.projection)


def vdm_map(reading: nn.Module, tokens: Tensor, h1: Tensor, h2: Tensor) -> Tensor:
    """Return the share of each patch in what all tokens of one pair read, [N]."""
    if reading.reads_separately:
        contributions_1, contributions_2 = (sum(brought(tokens, h, reading.attention)) for h in (h1, h2))
        sizes = (contributions_1 - contributions_2).pow(2).sum(-1).sqrt().sum(0)
    else:
        keys = torch.cat([h1 + reading.image_embeddings[0], h2 + reading.image_embeddings[1]])
        sizes_of_both = sum(part.pow(2).sum(-1).sqrt() for part in brought(tokens, keys, reading.attention)).sum(0)
        sizes = sizes_of_both[: len(h1)] + sizes_of_both[len(h1) :]
    return sizes / sizes.sum()


def vdm_maps(module: nn.Module, before: list[Tensor], after: list[Tensor]) -> list[Tensor]:
    """Return the map of each layer that reads the images, [B, N], from the layer's inputs."""
    calls: list[tuple[nn.Module, tuple[Tensor, ...]]] = []

    def record_call(reading: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        calls.append((reading, inputs))

    readings = [layer.reading for layer in module.layers if layer.reading is not None]
    hooks = [reading.register_forward_pre_hook(record_call) for reading in readings]
    module(before, after)
    for hook in hooks:
        hook.remove()
    maps = []
    for reading, inputs in calls:
        maps_of_pairs = [vdm_map(reading, *pair) for pair in zip(*inputs[:3], strict=True)]
        maps.append(torch.stack(maps_of_pairs))
    return maps
