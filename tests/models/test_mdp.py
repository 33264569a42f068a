"""The MDP module against a plain transcription of equations (1)-(8), in float64, written from the paper alone."""

import math

import pytest
import torch
from torch import Tensor

from m3diff.models.layers import grid_positions, sincos_positions
from m3diff.models.m3diff import contribution_figures
from m3diff.models.m3diff_model import DifferentialPerception
from m3diff.models.m3diff_settings import MDPConfig

D, N, B = 12, 5, 3


def linear(x: Tensor, layer: torch.nn.Linear) -> Tensor:
    return x @ layer.weight.T + layer.bias


def attention(q: Tensor, kv: Tensor, module: torch.nn.Module, heads: int) -> Tensor:
    """CA(q, kv) by explicit loops over samples and heads; where the module says so, queries and keys of size one."""
    rows = []
    for b in range(len(q)):
        queries, keys = linear(q[b], module.q_proj), linear(kv[b], module.k_proj)
        if module.normed:
            queries, keys = (x / (x**2).mean(-1, keepdim=True).sqrt() for x in (queries, keys))
        values, width = linear(kv[b], module.v_proj), D // heads
        parts = []
        for h in range(heads):
            cut = slice(h * width, (h + 1) * width)
            weights = torch.exp(queries[:, cut] @ keys[:, cut].T / width**0.5)
            parts.append(weights / weights.sum(1, keepdim=True) @ values[:, cut])
        rows.append(linear(torch.cat(parts, 1), module.out_proj))
    return torch.stack(rows)


def mlp(x: Tensor, module: torch.nn.Sequential) -> Tensor:
    hidden = linear(x, module[0])
    gelu = 0.5 * hidden * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
    return linear(gelu, module[2])


def norm(x: Tensor, module: torch.nn.Module, on: bool) -> Tensor:
    if not on:
        return x
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * module.weight + module.bias


def transcription(
    mdp: DifferentialPerception, features_1: list[Tensor], features_2: list[Tensor], last: list[Tensor]
) -> list[Tensor]:
    cfg = mdp.cfg
    skip = 1.0 if cfg.residual else 0.0
    out = [x.clone() if cfg.residual else torch.zeros_like(x) for x in last]
    for i, (f1, f2) in enumerate(zip(features_1, features_2, strict=True)):
        level = mdp.levels[0 if cfg.share_levels else i]
        g1, g2 = (norm(f, level.norm_input, cfg.residual) for f in (f1, f2))
        l1 = torch.sigmoid(linear(torch.cat([g1, g2], -1), level.gate))  # (1)
        l2 = torch.sigmoid(linear(torch.cat([g2, g1], -1), level.gate))
        fh1, fh2 = g1 * l1, g2 * l2  # (2)
        df = linear(torch.cat([fh1, fh2, fh1 - fh2], -1), level.difference)  # (3)
        x1, x2, x = f1, f2, df
        for layer in level.layers:
            sa = skip * x + attention(x, x, layer.self_attention, cfg.heads)  # (4)
            n1, n2 = (norm(v, layer.norm_feature, cfg.residual) for v in (x1, x2))
            ca = skip * sa + attention(sa, torch.cat([n1, n2, sa], 1), layer.cross_attention, cfg.heads)
            x = skip * ca + mlp(ca, layer.mlp)  # (5)
            x1 = skip * x1 + attention(n1, torch.cat([n1, x], 1), layer.feature_attention, cfg.heads)  # (6)
            x2 = skip * x2 + attention(n2, torch.cat([n2, x], 1), layer.feature_attention, cfg.heads)
        score = torch.sigmoid(mlp(torch.cat([x1, x2, df], -1).mean(1), level.score))[:, None]  # (7)
        out[0] = out[0] + score * (x1 - skip * f1)  # (8)
        out[1] = out[1] + score * (x2 - skip * f2)
    return out


def random_module(**fields: object) -> DifferentialPerception:
    torch.manual_seed(1)
    mdp = DifferentialPerception(MDPConfig(**{"vision_feature_layers": (1, 2, 4), "heads": 3} | fields), D).double()
    with torch.no_grad():
        for parameter in mdp.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return mdp


def features(count: int = 3) -> list[Tensor]:
    return [torch.randn(B, N, D, dtype=torch.float64) for _ in range(count)]


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("share_levels", [True, False])
@pytest.mark.parametrize("score", ["scalar", "channel"])
@pytest.mark.parametrize("layers", [1, 2])
def test_module_equals_the_equations(residual: bool, share_levels: bool, score: str, layers: int) -> None:
    mdp = random_module(residual=residual, share_levels=share_levels, score=score, layers=layers)
    features_1, features_2, last = features(), features(), features(2)
    want = transcription(mdp, features_1, features_2, last)
    got = mdp(features_1, features_2, *last)
    for a, b in zip(got, want, strict=True):
        # float64 rounding is about 1e-15 here; a wrong operand, order or sign moves the result by more than 1e-3
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_swapping_the_images_swaps_gates_but_not_roles() -> None:
    """Equation (3) holds the signed difference, so before and after are not interchangeable."""
    mdp = random_module()
    features_1, features_2, last = features(), features(), features(2)
    forward = mdp(features_1, features_2, *last)
    backward = mdp(features_2, features_1, last[1], last[0])
    assert (forward[0] - backward[1]).abs().max() > 1e-3


def saliency_map(mdp: DifferentialPerception, features_1: list, features_2: list) -> torch.Tensor:
    """The mean over the levels of the maps that a forward pass leaves."""
    with mdp.recorded_maps() as maps:
        mdp(features_1, features_2, features_1[0], features_2[0])
    assert len(maps) == len(features_1)
    return torch.stack(maps).mean(0)


def test_a_module_that_starts_as_a_detector_looks_where_the_images_differ() -> None:
    torch.manual_seed(1)
    mdp = DifferentialPerception(
        MDPConfig(vision_feature_layers=(1,), heads=4, pos_embed_scale=3.0, init_gain=2.0), width=64
    )
    before = torch.randn(9, 9, 64)
    after = before.clone()
    places = torch.arange(9)  # of pair and place alike
    after[places, places] += torch.randn(9, 64)
    assert saliency_map(mdp, [before], [after]).argmax(1).tolist() == places.tolist()


def test_a_module_that_moves_nothing_looks_everywhere_alike() -> None:
    mdp = DifferentialPerception(MDPConfig(vision_feature_layers=(1,), heads=3), D)
    found = saliency_map(mdp, *([x.float()] for x in features(2)))
    torch.testing.assert_close(found, torch.full((B, N), 1 / N))


def test_parameters_at_the_papers_size() -> None:
    """60 M with shared levels, about four times as many without (performance notes, section 1)."""
    with torch.device("meta"):
        shared = DifferentialPerception(MDPConfig(), 1152)
        separate = DifferentialPerception(MDPConfig(share_levels=False), 1152)
    count = lambda module: sum(p.numel() for p in module.parameters()) / 1e6  # noqa: E731
    assert 59 < count(shared) < 62
    assert count(separate) == pytest.approx(4 * count(shared))


def test_positions_are_sines_and_cosines_of_x_and_y_in_each_head() -> None:
    """The transcription has no positions: here they are, one place and one channel at a time."""
    side, width, heads, amplitude = 3, 20, 2, 1.5  # 10 channels a head: 2 frequencies, 8 used, 2 left zero
    got = sincos_positions(side, width, heads, amplitude)
    assert got.shape == (side * side, width)
    for y in range(side):
        for x in range(side):
            head = [f(c * torch.pi * k) for c in (x, y) for f in (math.sin, math.cos) for k in (1.0, 0.5)] + [0.0, 0.0]
            want = amplitude * torch.tensor(2 * head)
            torch.testing.assert_close(got[y * side + x], want, rtol=0, atol=1e-5)


def test_positions_stand_on_queries_and_keys_of_every_grid() -> None:
    """With positions the module equals the equations with positions added by hand after the norm."""
    mdp = random_module(pos_embed_scale=2.0, heads=3, layers=1)
    layer = mdp.levels[0].layers[0].cross_attention
    places = torch.randn(N, D, dtype=torch.float64)
    q, kv = torch.randn(B, N, D, dtype=torch.float64), torch.randn(B, 3 * N, D, dtype=torch.float64)
    queries, keys, values = linear(q, layer.q_proj), linear(kv, layer.k_proj), linear(kv, layer.v_proj)
    queries, keys = (x / (x**2).mean(-1, keepdim=True).sqrt() for x in (queries, keys))
    queries, keys = queries + places, keys + torch.cat([places] * 3)
    parts, reached = [], 0.0
    for h in range(3):
        cut = slice(4 * h, 4 * h + 4)
        weights = (queries[..., cut] @ keys[..., cut].transpose(1, 2) / 2).softmax(-1)
        parts.append(weights @ values[..., cut])
        reached = reached + weights * (values[..., cut] @ layer.out_proj.weight[:, cut].T).norm(dim=-1)[:, None]
    torch.testing.assert_close(layer(q, kv, places), linear(torch.cat(parts, -1), layer.out_proj))
    torch.testing.assert_close(layer.norm_weighted_attention(q, kv, places), reached)


def test_places_are_the_grid_of_the_features() -> None:
    want = sincos_positions(2, D, 3, 2.0)
    assert torch.equal(grid_positions(torch.randn(B, 4, D), D, 3, 2.0), want)
    assert grid_positions(torch.randn(B, 4, D), D, 3, 0.0) is None


def test_places_are_kept_for_models_with_storage_after_one_without() -> None:
    with torch.device("meta"):
        places = sincos_positions(3, 12, 3, 0.5)
    assert places.device.type == sincos_positions(3, 12, 3, 0.5).device.type == "cpu"


def test_the_saliency_map_is_what_the_first_layer_moves_averaged_over_levels() -> None:
    mdp = random_module(share_levels=False, heads=3, layers=2)
    features_1, features_2 = features(), features()
    maps = []
    for level, f1, f2 in zip(mdp.levels, features_1, features_2, strict=True):
        _, steps = level._layers(torch.cat([f1, f2]), None)
        first, moving = level.layers[0], steps[1][1]
        reached = torch.zeros(B, N, dtype=torch.float64)
        for f in (f1, f2):
            query = norm(f, first.norm_feature, on=True)
            keys = torch.cat([query, moving], 1)
            passed = first.feature_attention.norm_weighted_attention(query, keys)
            reached += passed[:, :, N:].sum(1)
        maps.append(reached / reached.sum(1, keepdim=True))
    torch.testing.assert_close(saliency_map(mdp, features_1, features_2), sum(maps) / 3)


@pytest.mark.parametrize("share_levels", [False, True])
def test_maps_are_left_in_the_order_of_the_levels_and_only_while_they_are_asked_for(share_levels: bool) -> None:
    mdp, given = random_module(share_levels=share_levels), (features(), features(), *features(2))
    plain = mdp(*given)
    with mdp.recorded_maps() as maps:
        recorded = mdp(*given)
    mdp(*given)
    assert len(maps) == 3, "one for each level, none after"
    assert torch.equal(torch.stack(plain), torch.stack(recorded)), "asking for maps changes no feature"
    for number, found in enumerate(maps):
        with mdp.recorded_maps() as alone:
            mdp.level(number)(torch.cat([given[0][number], given[1][number]]))
        assert torch.equal(found, alone[0])


def test_a_new_module_is_initialised_as_its_docstrings_say() -> None:
    torch.manual_seed(0)
    width = 256
    level = DifferentialPerception(MDPConfig(vision_feature_layers=(1,), heads=4, init_gain=2.0), width).levels[0]
    first, second = level.layers
    std = {name: p.std().item() for name, p in level.named_parameters() if name.endswith("weight") and p.dim() == 2}
    assert std["gate.weight"] == pytest.approx((2 * width) ** -0.5, rel=0.02)
    assert std["layers.0.self_attention.q_proj.weight"] == pytest.approx(width**-0.5, rel=0.02)
    assert std["layers.0.feature_attention.out_proj.weight"] == pytest.approx(2.0 * width**-0.5, rel=0.02)
    assert std["layers.0.mlp.0.weight"] == pytest.approx(width**-0.5, rel=0.02)
    zero = [name for name, value in std.items() if value == 0]
    outs = ["layers.0.self_attention.out_proj", "layers.0.cross_attention.out_proj", "layers.1.self_attention.out_proj"]
    outs += ["layers.1.cross_attention.out_proj", "layers.1.mlp.2", "score.2"]
    assert sorted(zero) == sorted(f"{name}.weight" for name in outs)
    passed = level.difference.weight[:, 2 * width :]
    assert passed.diagonal().mean().item() == pytest.approx(2.0, abs=0.01)
    assert level.difference.weight[:, : 2 * width].std().item() == pytest.approx(0.5 / (3 * width) ** 0.5, rel=0.02)
    assert (passed - 2 * torch.eye(width)).std().item() == pytest.approx(0.5 / (3 * width) ** 0.5, rel=0.03)
    direction = first.mlp[2].weight.mean(1)  # what the sum of all hidden units adds
    assert direction.std().item() == pytest.approx(24.0 / (4 * width), rel=0.2)
    assert all(not p.any() for name, p in level.named_parameters() if name.endswith("proj.bias"))
    assert second.mlp[0].out_features == 4 * width


def test_by_the_letter_of_the_equations_nothing_is_zero_initialised() -> None:
    torch.manual_seed(0)
    fields = MDPConfig(vision_feature_layers=(1,), heads=4, residual=False, mlp_ratio=2)
    level = DifferentialPerception(fields, 64).levels[0]
    weights = {name: p for name, p in level.named_parameters() if name.endswith("weight") and "score.2" not in name}
    for name, weight in weights.items():
        if not name.startswith("difference"):
            assert weight.std().item() == pytest.approx(weight.shape[1] ** -0.5, rel=0.1), name
    assert not any("norm" in name for name in weights)


def test_a_width_that_heads_do_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match="width 12 is not divisible by heads 5"):
        DifferentialPerception(MDPConfig(vision_feature_layers=(1,), heads=5), D)


def test_there_is_one_set_of_weights_for_all_levels_or_one_for_each() -> None:
    assert len(random_module(share_levels=True).levels) == 1
    assert len(random_module(share_levels=False).levels) == 3
    with pytest.raises(AssertionError, match="one feature map per level"):
        random_module()(features(2), features(2), *features(2))


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("share_levels", [True, False])
@pytest.mark.parametrize("score", ["scalar", "channel"])
@torch.no_grad()
def test_the_contribution_is_the_size_of_each_levels_update_and_its_score(
    residual: bool, share_levels: bool, score: str
) -> None:
    """A level alone gives its update: what it leaves of the last features. Two forwards count as one of all pairs."""
    fields = {"residual": residual, "share_levels": share_levels, "score": score}
    mdp = random_module(**fields)
    first, second = ((features(), features(), features(2)) for _ in range(2))
    with mdp.recorded_contribution() as recorded:
        for features_1, features_2, last in (first, second):
            mdp(features_1, features_2, *last)
    figures = contribution_figures(torch.stack(recorded).sum(dim=0))
    ratios, scores = figures[: len(figures) // 2], figures[len(figures) // 2 :]
    mdp(*first[:2], *first[2])
    assert len(recorded) == 2, "what comes after is not recorded"
    f1, f2 = ([torch.cat(both) for both in zip(first[k], second[k], strict=True)] for k in (0, 1))
    last = [torch.cat(both) for both in zip(first[2], second[2], strict=True)]
    size = torch.cat(last).square().mean().sqrt()
    for i in range(3):
        alone = random_module(**fields | {"vision_feature_layers": (1,)})
        alone.levels[0] = mdp.level(i)
        out = transcription(alone, f1[i : i + 1], f2[i : i + 1], last)
        update = torch.cat(out) - (torch.cat(last) if residual else 0)
        assert ratios[i] == pytest.approx(float(update.square().mean().sqrt() / size), rel=1e-5)
        assert scores[i] == pytest.approx(float(mdp.level(i)(torch.cat([f1[i], f2[i]]))[1].mean()), rel=1e-5)
    assert len({round(value, 3) for value in ratios}) == 3, "no level stands for another"


def test_recording_the_contribution_changes_no_number_and_reads_none() -> None:
    mdp = random_module()
    given = (features(), features(), *features(2))
    want = mdp(*given)
    with mdp.recorded_contribution() as recorded:
        got = mdp(*given)
    assert got[0].requires_grad
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not recorded[0].requires_grad
    with mdp.to("meta").recorded_contribution() as recorded:  # where reading a number is an error, as on a GPU a wait
        mdp(*([x.to("meta") for x in xs] if isinstance(xs, list) else xs.to("meta") for xs in given))
    assert (recorded[0].shape, recorded[0].dtype) == ((4, 2), torch.float64)
