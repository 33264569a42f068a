"""The MDP module against a plain transcription of equations (1)-(8), in float64, written from the paper alone."""

import pytest
import torch
from torch import Tensor

from components.models.m3diff.mdp import DifferentialPerception
from components.models.m3diff.settings import MDPConfig

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
    mdp: DifferentialPerception, taps_1: list[Tensor], taps_2: list[Tensor], last: list[Tensor]
) -> list[Tensor]:
    cfg = mdp.cfg
    skip = 1.0 if cfg.residual else 0.0
    out = [x.clone() if cfg.residual else torch.zeros_like(x) for x in last]
    for i, (f1, f2) in enumerate(zip(taps_1, taps_2, strict=True)):
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
    mdp = DifferentialPerception(MDPConfig(**{"taps": (1, 2, 4), "heads": 3} | fields), D).double()
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
    taps_1, taps_2, last = features(), features(), features(2)
    want = transcription(mdp, taps_1, taps_2, last)
    got = mdp(taps_1, taps_2, *last)
    for a, b in zip(got, want, strict=True):
        # float64 rounding is about 1e-15 here; a wrong operand, order or sign moves the result by more than 1e-3
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_new_module_leaves_the_base_as_it_is() -> None:
    mdp = DifferentialPerception(MDPConfig(taps=(1, 2), heads=3), D)
    taps_1, taps_2, last = ([x.float() for x in features(2)] for _ in range(3))
    for got, base in zip(mdp(taps_1, taps_2, *last), last, strict=True):
        assert torch.equal(got, base)


def test_swapping_the_images_swaps_gates_but_not_roles() -> None:
    """Equation (3) holds the signed difference, so before and after are not interchangeable."""
    mdp = random_module()
    taps_1, taps_2, last = features(), features(), features(2)
    forward = mdp(taps_1, taps_2, *last)
    backward = mdp(taps_2, taps_1, last[1], last[0])
    assert (forward[0] - backward[1]).abs().max() > 1e-3


def test_the_attended_map_is_a_distribution_over_places() -> None:
    attended = random_module().attended(features(), features())
    assert attended.shape == (B, N)
    assert (attended >= 0).all()
    torch.testing.assert_close(attended.sum(1), torch.ones(B, dtype=torch.float64))


def test_a_module_that_starts_as_a_detector_looks_where_the_images_differ() -> None:
    torch.manual_seed(1)
    mdp = DifferentialPerception(MDPConfig(taps=(1,), heads=4, positions=3.0, start=2.0), width=64)
    before = torch.randn(9, 9, 64)
    after = before.clone()
    places = torch.arange(9)  # of pair and place alike
    after[places, places] += torch.randn(9, 64)
    assert mdp.attended([before], [after]).argmax(1).tolist() == places.tolist()


def test_a_module_that_moves_nothing_looks_everywhere_alike() -> None:
    mdp = DifferentialPerception(MDPConfig(taps=(1,), heads=3), D)
    attended = mdp.attended(*([x.float()] for x in features(2)))
    torch.testing.assert_close(attended, torch.full((B, N), 1 / N))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"taps": [3, 2]}, "distinct and rising"),
        ({"tap": [1]}, "unknown field 'tap'"),
        ({"layers": 0}, "at least 1"),
        ({"score": "vector"}, "scalar or channel"),
    ],
)
def test_a_wrong_field_is_named(fields: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MDPConfig.from_dict(fields)


def test_parameters_at_the_papers_size() -> None:
    """60 M with shared levels, about four times as many without (performance notes, section 1)."""
    with torch.device("meta"):
        shared = DifferentialPerception(MDPConfig(), 1152)
        separate = DifferentialPerception(MDPConfig(share_levels=False), 1152)
    count = lambda module: sum(p.numel() for p in module.parameters()) / 1e6  # noqa: E731
    assert 59 < count(shared) < 62
    assert count(separate) == pytest.approx(4 * count(shared))
