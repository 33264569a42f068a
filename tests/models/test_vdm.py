"""The Visual Delta Module against a plain transcription of its equations in float64, written from the words of the
paper (arXiv 2407.05645, section 4.1) and of the module's docstring alone."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertConfig, BertModel

from m3diff.models.llava import NewModuleInit
from m3diff.models.onediff_model import VisualDeltaModule
from m3diff.models.onediff_settings import VDMConfig

B, N, D, V, W, T = 3, 4, 10, 12, 14, 5
FIELDS = {"vision_feature_layers": (1, 2), "tokens": T, "layers": 4, "width": V, "heads": 3, "mlp_ratio": 2}


def linear(x: Tensor, layer: torch.nn.Linear) -> Tensor:
    return x @ layer.weight.T + layer.bias


def unit(x: Tensor) -> Tensor:
    return x / (x**2).mean(-1, keepdim=True).sqrt()


def norm(x: Tensor, module: torch.nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * module.weight + module.bias


def attend(q: Tensor, kv: Tensor, module: torch.nn.Module, sized: bool) -> Tensor:
    """One sample: [T, V] and [keys, width] to [T, V], head by head."""
    queries, keys, values = linear(q, module.q_proj), linear(kv, module.k_proj), linear(kv, module.v_proj)
    if sized:
        queries, keys = unit(queries), unit(keys)
    heads, width = [], V // 3
    for cut in (slice(h * width, (h + 1) * width) for h in range(3)):
        weights = torch.exp(queries[:, cut] @ keys[:, cut].T / math.sqrt(width))
        heads.append(weights / weights.sum(1, keepdim=True) @ values[:, cut])
    return linear(torch.cat(heads, 1), module.out_proj)


def mlp(x: Tensor, module: torch.nn.Sequential) -> Tensor:
    hidden = linear(x, module[0])
    return linear(hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2))), module[2])


def transcription(vdm: VisualDeltaModule, before: list[Tensor], after: list[Tensor]) -> Tensor:
    """Q(D_layers) of one sample, [T, width]; `before` and `after` are [N, D] at each feature layer."""
    cfg, d = vdm.cfg, vdm.delta
    reads = list(range(cfg.layers)) if cfg.cross_attention == "every" else list(range(0, cfg.layers, 2))
    for k, layer in enumerate(vdm.layers):

        def block(d: Tensor, number: int, function, layer=layer) -> Tensor:
            if cfg.norm == "post":
                return norm(d + function(d), layer.norms[number])
            return d + function(norm(d, layer.norms[number]) if cfg.norm == "pre" else d)

        sized = cfg.norm == "size"
        d = block(d, 0, lambda x, m=layer.self_attention, s=sized: attend(x, x, m, s))
        if k in reads:
            # the reading layers share out the feature layers evenly and in order
            tap = reads.index(k) * len(cfg.vision_feature_layers) // len(reads)
            h1, h2 = (norm(side[tap], vdm.feature_norms[tap]) for side in (before, after))
            reading = layer.reading
            if cfg.images == "joined":
                keys = torch.cat([h1 + reading.image_embeddings[0], h2 + reading.image_embeddings[1]])
                d = block(d, 1, lambda x, m=reading.attention, kv=keys, s=sized: attend(x, kv, m, s))
            else:

                def apart(x: Tensor, m=reading, h1=h1, h2=h2, s=sized) -> Tensor:
                    r1, r2 = attend(x, h1, m.attention, s), attend(x, h2, m.attention, s)
                    return linear(torch.cat([r1, r2, r1 - r2], -1), m.join)

                d = block(d, 1, apart)
        d = block(d, 2, lambda x, m=layer.mlp: mlp(x, m))
    return linear(d, vdm.projection)


def random_module(**changes: object) -> VisualDeltaModule:
    torch.manual_seed(1)
    vdm = VisualDeltaModule(VDMConfig(**FIELDS | changes), D, W).double()
    with torch.no_grad():
        for parameter in vdm.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return vdm


def features(seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(seed)
    return tuple([torch.randn(B, N, D, dtype=torch.float64) for _ in range(2)] for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("norm", ["post", "pre", "size"])
@pytest.mark.parametrize("images", ["joined", "separate"])
@pytest.mark.parametrize("cross_attention", ["second", "every"])
def test_module_equals_the_equations(norm: str, images: str, cross_attention: str) -> None:
    vdm = random_module(norm=norm, images=images, cross_attention=cross_attention)
    before, after = features()
    got = vdm(before, after)
    assert got.shape == (B, T, W)
    for b in range(B):
        want = transcription(vdm, [f[b] for f in before], [f[b] for f in after])
        # float64 rounds at about 1e-15 here; a wrong operand, order or layer moves the result by more than 1e-3
        torch.testing.assert_close(got[b], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", ["post", "pre", "size"])
@pytest.mark.parametrize("images", ["joined", "separate"])
@pytest.mark.parametrize("cross_attention", ["second", "every"])
def test_every_parameter_has_a_gradient(norm: str, images: str, cross_attention: str) -> None:
    vdm = random_module(norm=norm, images=images, cross_attention=cross_attention)
    vdm(*features()).square().sum().backward()
    assert not [name for name, parameter in vdm.named_parameters() if parameter.grad is None]


def test_three_feature_layers_are_read_by_every_second_of_six_layers_and_twice_by_all() -> None:
    assert [VDMConfig().feature_layer(k) for k in range(6)] == [0, None, 1, None, 2, None]
    every = VDMConfig(cross_attention="every")
    assert [every.feature_layer(k) for k in range(6)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("images", ["joined", "separate"])
def test_swapped_images_and_another_pair_give_other_tokens(images: str) -> None:
    vdm = random_module(images=images)
    before, after = features(4)
    forward, backward = vdm(before, after), vdm(after, before)
    assert (forward - backward).abs().max() > 1e-3
    assert (forward[0] - forward[1]).abs().max() > 1e-3


def test_a_module_that_starts_as_a_detector_says_more_of_a_larger_difference() -> None:
    torch.manual_seed(0)
    fields = {"images": "separate", "norm": "size", "init_gain": 1.0, "tokens": 4, "pos_embed_scale": 3.0, "layers": 2}
    vdm = VisualDeltaModule(VDMConfig(**FIELDS | fields | {"vision_feature_layers": (1,)}), D, W)
    h = torch.randn(B, N, D)
    tokens = [vdm([h], [h + step * torch.randn(B, N, D)]) for step in (0.0, 0.5, 2.0)]
    moved = [(each - tokens[0]).norm(dim=-1).mean() for each in tokens[1:]]
    assert moved[0] > 0.1
    assert moved[1] > 1.5 * moved[0]


def test_tokens_are_bound_to_places_by_the_positions() -> None:
    """What changed at one place moves the token of that place most."""
    torch.manual_seed(0)
    fields = {"images": "separate", "norm": "size", "init_gain": 1.0, "tokens": 9, "pos_embed_scale": 3.0, "layers": 1}
    vdm = VisualDeltaModule(VDMConfig(**FIELDS | fields | {"vision_feature_layers": (1,), "heads": 1}), D, W)
    h = torch.randn(1, 9, D)
    still = vdm([h], [h])
    for place in range(9):
        changed = h.clone()
        changed[:, place] += 3 * torch.randn(D)
        assert int((vdm([h], [changed]) - still).norm(dim=-1).argmax()) == place


def brought(q: Tensor, kv: Tensor, module: torch.nn.Module, sized: bool) -> list[Tensor]:
    """Of one sample, what each key's value adds to each query's reading, [T, keys, V], head by head."""
    queries, keys, values = linear(q, module.q_proj), linear(kv, module.k_proj), linear(kv, module.v_proj)
    if sized:
        queries, keys = unit(queries), unit(keys)
    width, parts = queries.shape[1] // module.heads, []
    for cut in (slice(h * width, (h + 1) * width) for h in range(module.heads)):
        weights = torch.exp(queries[:, cut] @ keys[:, cut].T / math.sqrt(width))
        weights = weights / weights.sum(1, keepdim=True)
        parts.append(weights[:, :, None] * (values[:, cut] @ module.out_proj.weight[:, cut].T)[None])
    return parts


def map_by_hand(reading: torch.nn.Module, tokens: Tensor, h1: Tensor, h2: Tensor) -> Tensor:
    """Of one sample, [N]: the share of each place in what all tokens read, by the sizes of what it brings."""
    sized = reading.attention.normed
    if reading.separate:
        first, second = (sum(brought(tokens, h, reading.attention, sized)) for h in (h1, h2))
        sizes = (first - second).pow(2).sum(-1).sqrt().sum(0)
    else:
        keys = torch.cat([h1 + reading.image_embeddings[0], h2 + reading.image_embeddings[1]])
        both = sum(part.pow(2).sum(-1).sqrt() for part in brought(tokens, keys, reading.attention, sized)).sum(0)
        sizes = both[: len(h1)] + both[len(h1) :]
    return sizes / sizes.sum()


def maps_by_hand(vdm: VisualDeltaModule, before: list[Tensor], after: list[Tensor]) -> list[Tensor]:
    """The map of each layer that reads the images, [B, N], from what the layer was given."""
    given: list[tuple[torch.nn.Module, tuple[Tensor, ...]]] = []
    readings = [layer.reading for layer in vdm.layers if layer.reading is not None]
    hooks = [reading.register_forward_pre_hook(lambda one, inputs: given.append((one, inputs))) for reading in readings]
    vdm(before, after)
    for hook in hooks:
        hook.remove()
    return [torch.stack([map_by_hand(one, *each) for each in zip(*inputs[:3], strict=True)]) for one, inputs in given]


@pytest.mark.parametrize("norm", ["post", "size"])
@pytest.mark.parametrize("images", ["joined", "separate"])
def test_the_saliency_map_is_of_the_places_that_bring_the_difference(images: str, norm: str) -> None:
    vdm = random_module(images=images, cross_attention="every", layers=2, norm=norm)
    before, after = features()
    with vdm.recorded_maps() as maps:
        vdm(before, after)
    assert [one.shape for one in maps] == [(B, N)] * 2
    for one, want in zip(maps, maps_by_hand(vdm, before, after), strict=True):
        torch.testing.assert_close(one, want, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(one.sum(1), torch.ones(B, dtype=torch.float64))
        assert (one - 1 / N).abs().max() > 1e-3, "a map that is everywhere alike would show nothing"
    vdm(before, after)
    assert len(maps) == 2, "nothing is recorded any more"


def test_apart_only_a_changed_place_is_seen_and_equal_images_show_none() -> None:
    vdm = random_module(images="separate", layers=1, vision_feature_layers=(1,), norm="size")
    h = features()[0][:1]
    reading = vdm.layers[0].reading
    tokens = vdm.delta.expand(B, -1, -1)
    seen = reading.saliency_map(tokens, h[0], h[0])
    torch.testing.assert_close(seen, torch.full((B, N), 1 / N, dtype=torch.float64))
    with torch.no_grad():  # every place gets the same weight, so that one place alone differs
        reading.attention.q_proj.weight.zero_()
        reading.attention.q_proj.bias.zero_()
    changed = h[0].clone()
    changed[:, 2] += 1
    assert (reading.saliency_map(tokens, h[0], changed)[:, 2] > 0.999).all()


def bert(folder: Path, layers: int = 5) -> BertModel:
    torch.manual_seed(4)
    shape = {"hidden_size": V, "num_attention_heads": 3, "intermediate_size": 2 * V, "num_hidden_layers": layers}
    model = BertModel(BertConfig(vocab_size=7, max_position_embeddings=8, hidden_dropout_prob=0, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()


def test_a_module_that_starts_as_bert_computes_what_bert_computes(tmp_path: Path) -> None:
    """With cross-attention silenced, the layers of both give the same of the same tokens."""
    theirs = bert(tmp_path / "bert")
    vdm = VisualDeltaModule(VDMConfig(**FIELDS | {"start": "bert"}), D, V)
    vdm.start_as_bert(tmp_path / "bert")
    x = want = torch.randn(2, T, V)
    for layer, source in zip(vdm.layers, theirs.encoder.layer, strict=False):
        attended = layer._block(0, x, lambda y, m=layer.self_attention: m(y, y))
        x = layer._block(2, attended, layer.mlp)
        want = source(want)
        want = want[0] if isinstance(want, tuple) else want
        torch.testing.assert_close(x, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"layers": 6}, "5 layers of .*12, 3, 2.0., but the module has 6"), ({"mlp_ratio": 3}, r"\(12, 3, 2.0\)")],
)
def test_another_bert_is_refused(changes: dict, words: str, tmp_path: Path) -> None:
    bert(tmp_path / "bert")
    with pytest.raises(ValueError, match=words):
        VisualDeltaModule(VDMConfig(**FIELDS | changes), D, W).start_as_bert(tmp_path / "bert")


def test_a_bert_without_some_of_its_weights_is_refused_by_their_names(tmp_path: Path) -> None:
    bert(tmp_path / "bert")
    weights = load_file(tmp_path / "bert" / "model.safetensors")
    lost = "encoder.layer.1.output.dense.weight"
    save_file({name: value for name, value in weights.items() if name != lost}, tmp_path / "bert" / "model.safetensors")
    with pytest.raises(ValueError, match=rf"1 weights of the BERT .* are missing, \['{lost}'\]; take config.json"):
        VisualDeltaModule(VDMConfig(**FIELDS), D, W).start_as_bert(tmp_path / "bert")


def test_no_bert_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no BERT there for module.start: bert; take config.json"):
        random_module().start_as_bert(tmp_path / "bert")


def test_the_delta_tokens_start_as_the_paper_says_whichever_model_holds_them() -> None:
    class Holder(NewModuleInit, torch.nn.Module):
        pass

    torch.manual_seed(0)
    vdm = VisualDeltaModule(VDMConfig(tokens=64, width=96, heads=4), D, W)
    for module in vdm.modules():
        if hasattr(module, "reset_parameters") and not isinstance(module, torch.nn.LayerNorm):
            Holder()._init_weights(module)
    assert vdm.delta.std().item() == pytest.approx(0.02, rel=0.05)
    embeddings = vdm.layers[0].reading.image_embeddings
    assert embeddings.abs().max() > 0
    assert not torch.equal(embeddings[0], embeddings[1])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layers": 3}, "3 of them, but only 2 of the layers read the images"),
        ({"heads": 5}, "heads: 5 does not divide width 768"),
        ({"init_gain": 1.0}, "init_gain above 0 needs images separate and norm size"),
        ({"start": "bert", "norm": "pre"}, "start: bert needs norm post"),
        ({"tokens": 0}, "tokens must be 1 or more, found 0"),
        ({"images": "both"}, "images must be joined or separate, found 'both'"),
        ({"place": "end"}, "place must be after or between or before, found 'end'"),
        ({"vision_feature_layers": (8, 8)}, "vision_feature_layers must be distinct, rising"),
    ],
)
def test_impossible_fields_are_refused(fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VDMConfig(**fields)
