"""The profile paper-letter: what stands between vision encoder and projector is equations (1)-(8) of M3Diff and nothing
else, written here from the paper alone, in a second hand than the module's."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor

from m3diff.models import FAMILIES
from m3diff.models.m3diff_model import M3DiffForConditionalGeneration, Projection
from m3diff.models.m3diff_settings import MDPConfig
from m3diff.settings.load import load_params
from tests.tiny import SIDE, tiny_config
from tests.toy import REPOSITORY

LEVELS = (1, 2)


def letter() -> MDPConfig:
    """The profile's module on the two layers and the width of the tiny vision encoder."""
    settings = load_params(REPOSITORY / "profiles/paper-letter.yaml").models["m3diff"]
    return replace(settings.module, vision_feature_layers=LEVELS, heads=2)


@pytest.fixture
def model() -> M3DiffForConditionalGeneration:
    """A new one, as training starts it, in float64."""
    torch.manual_seed(5)
    return FAMILIES["m3diff"].build(tiny_config(asdict(letter()))).double().eval()


def linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return torch.einsum("...i,oi->...o", x, weights[f"{name}.weight"]) + weights[f"{name}.bias"]


def mlp(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    hidden = linear(weights, f"{name}.0", x)
    return linear(weights, f"{name}.2", torch.nn.functional.gelu(hidden, approximate="tanh"))


def attend(weights: dict[str, Tensor], name: str, query: Tensor, keys: Tensor, heads: int) -> Tensor:
    """CA(query, keys) of one image or pair, [places, D]."""
    q, k, v = (
        linear(weights, f"{name}.{part}_proj", x).reshape(len(x), heads, -1)
        for part, x in (("q", query), ("k", keys), ("v", keys))
    )
    weight = (torch.einsum("mhc,nhc->hmn", q, k) / math.sqrt(q.shape[-1])).softmax(-1)
    return linear(weights, f"{name}.out_proj", torch.einsum("hmn,nhc->mhc", weight, v).flatten(1))


def equations(weights: dict[str, Tensor], f1: Tensor, f2: Tensor, cfg: MDPConfig) -> tuple[Tensor, Tensor]:
    """What one level of one pair, [places, D] each, adds to F'_1 and F'_2."""
    l1 = torch.sigmoid(linear(weights, "gate", torch.cat([f1, f2], 1)))  # (1)
    l2 = torch.sigmoid(linear(weights, "gate", torch.cat([f2, f1], 1)))
    fh1, fh2 = f1 * l1, f2 * l2  # (2)
    df = linear(weights, "difference", torch.cat([fh1, fh2, fh1 - fh2], 1))  # (3)
    ft1, ft2, x = f1, f2, df
    for number in range(cfg.layers):
        name = f"layers.{number}"
        sa = attend(weights, f"{name}.self_attention", x, x, cfg.heads)  # (4)
        both = torch.cat([ft1, ft2, sa])
        x = mlp(weights, f"{name}.mlp", attend(weights, f"{name}.cross_attention", sa, both, cfg.heads))  # (5)
        ft1, ft2 = (
            attend(weights, f"{name}.feature_attention", f, torch.cat([f, x]), cfg.heads) for f in (ft1, ft2)
        )  # (6)
    score = torch.sigmoid(mlp(weights, "score", torch.cat([ft1, ft2, df], 1).mean(0)))  # (7)
    return score * ft1, score * ft2


def test_the_letters_module_has_no_norm_no_positions_and_one_set_of_weights_for_all_levels() -> None:
    cfg = letter()
    assert (cfg.residual, cfg.pos_embed_scale, cfg.share_levels, cfg.score) == (False, 0, True, "scalar")
    mdp = FAMILIES["m3diff"].build(tiny_config(asdict(cfg))).model.mdp
    assert {type(module) for module in mdp.modules() if not list(module.children())} == {
        Projection,
        torch.nn.GELU,
        torch.nn.Identity,
    }
    assert len(mdp.levels) == 1


def test_what_the_projector_gets_is_equations_1_to_8_of_the_encoders_features(
    model: M3DiffForConditionalGeneration,
) -> None:
    torch.manual_seed(6)
    pixels = torch.randn(4, 3, SIDE, SIDE, dtype=torch.float64)
    with torch.no_grad():
        states, got = model.model.vision_hidden_states(pixels), model.model.perceive(pixels)
        weights = dict(model.model.mdp.levels[0].named_parameters())
        for pair in range(2):
            want: list[Tensor | float] = [0.0, 0.0]
            for level in LEVELS:
                added = equations(weights, states[level][2 * pair], states[level][2 * pair + 1], letter())
                want = [total + part for total, part in zip(want, added, strict=True)]  # (8)
            for image, features in enumerate(want):
                # float64 rounding is about 1e-15; a residual, a norm or a swapped image moves it by more than 1e-2
                torch.testing.assert_close(got[2 * pair + image], features, rtol=1e-9, atol=1e-12)
    assert (got[0] - states[-1][0]).abs().max() > 1e-2


def test_every_linear_of_the_letters_module_starts_as_a_plain_new_layer() -> None:
    torch.manual_seed(0)
    config = tiny_config(asdict(replace(letter(), heads=4)))
    config.vision_config.hidden_size = 128
    config.vision_config.num_attention_heads = 4
    for name, module in FAMILIES["m3diff"].build(config).model.mdp.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert not module.bias.any(), name
            if module.out_features > 1:
                assert module.weight.std().item() == pytest.approx(module.in_features**-0.5, rel=0.05), name
                assert module.weight.mean().abs().item() < 0.05 * module.in_features**-0.5, name
            else:
                assert module.weight.std().item() == pytest.approx(module.in_features**-0.5, rel=0.6), name
