"""The modules compared with their equations in float64. A wrong operand, order or sign changes results by 1e-3."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from m3diff.models.layers import grid_positions, record_tensors, sincos_positions
from m3diff.models.llava import NewModuleInit
from m3diff.models.m3diff import contribution_figures
from m3diff.models.m3diff_model import BareDifference, DifferentialPerception
from m3diff.models.onediff_model import VisualDeltaModule
from m3diff.models.settings import DifferenceConfig, MDPConfig, VDMConfig
from m3diff.records.errors import DataError
from tests.errors import raises
from tests.models import equations

FP32_ON_CPU: Any = (torch.float32, "cpu")
B = 3
N = 5
D = 12
W = 14
T = 5
V = 12
VDM = {"vision_feature_layers": (1, 2), "tokens": T, "layers": 4, "width": V, "heads": 3, "mlp_ratio": 2}


def random_weights(module: nn.Module) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return module


def mdp(**fields: object) -> DifferentialPerception:
    return random_weights(
        DifferentialPerception(MDPConfig(**{"vision_feature_layers": (1, 2, 4), "heads": 3} | fields), D)
    )


def bare(**fields: object) -> BareDifference:
    return random_weights(BareDifference(DifferenceConfig(**{"vision_feature_layers": (1, 2, 4)} | fields), D))


def vdm(**fields: object) -> VisualDeltaModule:
    return random_weights(VisualDeltaModule(VDMConfig(**VDM | fields), D, W))


def features(count: int = 3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(B, N, D, dtype=torch.float64, generator=generator) for _ in range(count)]


def of_each_pair(function: Callable[..., Any], module: nn.Module, *arguments: list[Tensor]) -> list[Any]:
    return [function(module, *([x[b] for x in side] for side in arguments)) for b in range(B)]


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("share_levels", [True, False])
@pytest.mark.parametrize("score", ["scalar", "channel"])
@pytest.mark.parametrize("layers", [1, 2])
def test_the_mdp_module_equals_its_equations(residual, share_levels, score, layers):
    module = mdp(residual=residual, share_levels=share_levels, score=score, layers=layers)
    before = features()
    after = features(seed=1)
    base_features = features(2, seed=2)
    actual = module(before, after, *base_features)
    for b, expected in enumerate(of_each_pair(equations.mdp, module, before, after, base_features)):
        torch.testing.assert_close([image[b] for image in actual], expected, rtol=1e-10, atol=1e-12)
    swapped = module(after, before, base_features[1], base_features[0])
    assert (actual[0] - swapped[1]).abs().max() > 1e-3, "equation (3) holds the signed difference"
    assert len(module.levels) == (1 if share_levels else 3)


@pytest.mark.parametrize("share_levels", [True, False])
def test_the_bare_difference_equals_its_equation(share_levels):
    module = bare(share_levels=share_levels)
    arguments = (features(), features(seed=1), features(2, seed=2))
    assert len(module.levels) == (1 if share_levels else 3)
    actual = module(arguments[0], arguments[1], *arguments[2])
    torch.testing.assert_close(list(actual), equations.difference(module, *arguments))


@pytest.mark.parametrize("norm", ["post", "pre", "size"])
@pytest.mark.parametrize("images", ["joined", "separate"])
@pytest.mark.parametrize("cross_attention", ["second", "every"])
def test_the_vdm_equals_its_equations_and_every_parameter_has_a_gradient(norm, images, cross_attention):
    module = vdm(norm=norm, images=images, cross_attention=cross_attention)
    before = features(2)
    after = features(2, seed=1)
    actual = module(before, after)
    for b, expected in enumerate(of_each_pair(equations.vdm, module, before, after)):
        torch.testing.assert_close(actual[b], expected, rtol=1e-10, atol=1e-12)
    assert (actual - module(after, before)).abs().max() > 1e-3
    actual.square().sum().backward()
    assert not [name for name, parameter in module.named_parameters() if parameter.grad is None]


def test_positions_are_sines_and_cosines_of_x_and_y_in_each_head():
    # 10 channels a head: 2 frequencies, 8 used, 2 left zero
    side = 3
    width = 20
    heads = 2
    amplitude = 1.5
    with torch.device("meta"):  # kept for a model with storage after one without
        actual = sincos_positions(side, width, heads, amplitude, *FP32_ON_CPU)
    assert actual.shape == (side * side, width)
    assert actual.device.type == "cpu"
    for y in range(side):
        for x in range(side):
            head = [f(c * torch.pi * k) for c in (x, y) for f in (math.sin, math.cos) for k in (1.0, 0.5)] + [0.0, 0.0]
            torch.testing.assert_close(actual[y * side + x], amplitude * torch.tensor(2 * head), rtol=0, atol=1e-5)


def test_the_grid_of_positions_is_as_large_as_that_of_the_patches():
    assert torch.equal(grid_positions(torch.randn(B, 4, D), D, 3, 2.0), sincos_positions(2, D, 3, 2.0, *FP32_ON_CPU))
    assert grid_positions(torch.randn(B, 4, D), D, 3, 0.0) is None


def test_positions_are_added_to_queries_and_keys_of_every_grid_after_the_norm():
    layer = mdp(pos_embed_scale=2.0).levels[0].layers[0].cross_attention
    q = features(1)[0]
    kv = torch.cat(features(3, seed=1), 1)
    positions = features(1, seed=2)[0][0]
    expected = [equations.attend(q[b], kv[b], layer, positions) for b in range(B)]
    torch.testing.assert_close(layer(q, kv, positions), torch.stack(expected))
    reached = [sum(part.norm(dim=-1) for part in equations.brought(q[b], kv[b], layer, positions)) for b in range(B)]
    torch.testing.assert_close(layer.norm_weighted_attention(q, kv, positions), torch.stack(reached))


def maps_of(module: nn.Module, *arguments: Any) -> list[Tensor]:
    """Return the maps of one pass. Assert that recording them does not change the output."""
    unrecorded_output = module(*arguments)
    with module.record_maps() as maps:
        recorded_output = module(*arguments)
    module(*arguments)
    torch.testing.assert_close(recorded_output, unrecorded_output, rtol=0, atol=0)
    for saliency in maps:
        torch.testing.assert_close(saliency.sum(1), torch.ones(len(saliency), dtype=saliency.dtype))
    return maps


@pytest.mark.parametrize("share_levels", [False, True])
def test_the_mdp_modules_maps_are_what_the_first_layer_moves_in_each_level(share_levels):
    module = mdp(share_levels=share_levels)
    before = features()
    after = features(seed=1)
    maps = maps_of(module, before, after, *features(2, seed=2))
    for number, (f1, f2) in enumerate(zip(before, after, strict=True)):
        level = module.level(number)
        layer = level.layers[0]
        contributions = torch.zeros(B, N, dtype=torch.float64)
        with record_tensors([layer], lambda *_, result: result[1]) as differences:
            level(torch.cat([f1, f2]))
        (moving,) = differences
        for b in range(B):
            for f in (f1, f2):
                query = equations.norm(f[b], layer.norm_feature)
                parts = equations.brought(query, torch.cat([query, moving[b]]), layer.feature_attention)
                contributions[b] += sum(part.norm(dim=-1) for part in parts)[:, N:].sum(0)
        torch.testing.assert_close(maps[number], contributions / contributions.sum(1, keepdim=True))
    assert len(maps) == 3


@pytest.mark.parametrize("share_levels", [True, False])
def test_the_bare_differences_maps_are_the_sizes_of_what_each_places_difference_adds(share_levels):
    module = bare(share_levels=share_levels)
    before = features()
    after = features(seed=1)
    maps = maps_of(module, before, after, *features(2, seed=2))
    for number, difference_map in enumerate(maps):
        sizes = ((after[number] - before[number]) @ module.level(number).weight.T).norm(dim=-1)
        torch.testing.assert_close(difference_map, sizes / sizes.sum(1, keepdim=True))
    assert len(maps) == 3
    same = bare(vision_feature_layers=(1,))
    torch.testing.assert_close(maps_of(same, before[:1], before[:1], *after[:2])[0], torch.full_like(maps[0], 1 / N))


@pytest.mark.parametrize("norm", ["post", "size"])
@pytest.mark.parametrize("images", ["joined", "separate"])
def test_the_vdms_maps_are_of_the_places_that_bring_the_difference(images, norm):
    module = vdm(images=images, cross_attention="every", layers=2, norm=norm)
    arguments = (features(2), features(2, 1))
    maps = maps_of(module, *arguments)
    torch.testing.assert_close(maps, equations.vdm_maps(module, *arguments), rtol=1e-10, atol=1e-12)
    assert [saliency.shape for saliency in maps] == [(B, N)] * 2
    assert all((saliency - 1 / N).abs().max() > 1e-3 for saliency in maps), "maps that are all alike would show nothing"


WIDTH = 256


@pytest.fixture
def new_level() -> Any:
    """Return the only level of a new module that starts as a change detector."""
    torch.manual_seed(0)
    cfg = MDPConfig(vision_feature_layers=(1,), heads=4, init_gain=2.0)
    return DifferentialPerception(cfg, WIDTH).levels[0]


def test_the_linears_of_a_new_level_are_random_by_their_gain_or_zero(new_level):
    level = new_level
    width = WIDTH
    std = {name: p.std().item() for name, p in level.named_parameters() if name.endswith("weight") and p.dim() == 2}
    expected_std = {
        "gate": (2 * width) ** -0.5,
        "layers.0.self_attention.q_proj": width**-0.5,
        "layers.0.mlp.0": width**-0.5,
    }
    expected_std["layers.0.feature_attention.out_proj"] = 2.0 * width**-0.5
    assert {name: std[f"{name}.weight"] for name in expected_std} == pytest.approx(expected_std, rel=0.02)
    outs = ["layers.0.self_attention.out_proj", "layers.0.cross_attention.out_proj", "layers.1.self_attention.out_proj"]
    outs += ["layers.1.cross_attention.out_proj", "layers.1.mlp.2", "score.2"]
    assert sorted(name for name, value in std.items() if value == 0) == sorted(f"{name}.weight" for name in outs)
    assert all(not p.any() for name, p in level.named_parameters() if name.endswith("proj.bias"))
    assert level.layers[1].mlp[0].out_features == 4 * width


def test_a_new_level_passes_the_difference_through(new_level):
    level = new_level
    width = WIDTH
    passed = level.difference.weight[:, 2 * width :]
    spread = 0.5 / (3 * width) ** 0.5
    assert passed.diagonal().mean().item() == pytest.approx(2.0, abs=0.01)
    assert level.difference.weight[:, : 2 * width].std().item() == pytest.approx(spread, rel=0.02)
    assert (passed - 2 * torch.eye(width)).std().item() == pytest.approx(spread, rel=0.03)


def test_the_first_mlp_of_a_new_level_adds_the_size_of_the_difference(new_level):
    direction = new_level.layers[0].mlp[2].weight.mean(1)  # what the sum of all hidden units adds
    assert direction.std().item() == pytest.approx(24.0 / (4 * WIDTH), rel=0.2)


def test_by_the_letter_of_the_equations_every_linear_starts_as_a_plain_new_layer():
    torch.manual_seed(0)
    fields = MDPConfig(vision_feature_layers=(1,), heads=4, residual=False, mlp_ratio=2)
    level = DifferentialPerception(fields, 128).levels[0]
    for name, module in level.named_modules():
        assert not isinstance(module, nn.LayerNorm), name
        if isinstance(module, nn.Linear) and name != "difference":
            near = 0.05 if module.out_features > 1 else 0.6
            assert module.weight.std().item() == pytest.approx(module.in_features**-0.5, rel=near), name
            assert not module.bias.any(), name


@pytest.mark.parametrize("gain", [0.0, 2.0])
def test_a_new_bare_difference_adds_its_gain_times_the_size_of_the_difference(gain):
    torch.manual_seed(0)
    module = BareDifference(DifferenceConfig(vision_feature_layers=(1,), init_gain=gain), 256)
    assert module.levels[0].weight.std().item() == pytest.approx(gain / 16, rel=0.02)
    assert not module.levels[0].bias.any()


def test_the_delta_tokens_start_as_the_paper_says_whichever_model_holds_them():
    class Holder(NewModuleInit, nn.Module):
        pass

    torch.manual_seed(0)
    module = VisualDeltaModule(VDMConfig(tokens=64, width=96, heads=4), D, W)
    for part in module.modules():
        if hasattr(part, "reset_parameters") and not isinstance(part, nn.LayerNorm):
            Holder()._init_weights(part)
    assert module.delta.std().item() == pytest.approx(0.02, rel=0.05)
    embeddings = module.layers[0].reading.image_embeddings
    assert embeddings.abs().max() > 0
    assert not torch.equal(embeddings[0], embeddings[1])


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("share_levels", [True, False])
@torch.no_grad()
def test_the_contribution_is_the_size_of_each_levels_update_and_its_score(residual, share_levels):
    """The reference is a module with a single level. Two forward passes count like one pass over all pairs."""
    fields = {"residual": residual, "share_levels": share_levels, "score": "scalar" if residual else "channel"}
    module = mdp(**fields)
    forwards = [(features(seed=s), features(seed=s + 1), features(2, seed=s + 2)) for s in (0, 10)]
    with module.record_contribution() as recorded_sums:
        for before, after, base_features in forwards:
            module(before, after, *base_features)
    module(*forwards[0][:2], *forwards[0][2])
    assert len(recorded_sums) == 2, "what comes after is not recorded"
    figures = contribution_figures(torch.stack(recorded_sums).sum(dim=0))
    size = torch.cat([x for *_, base_features in forwards for x in base_features]).square().mean().sqrt()
    for i in range(3):
        alone = mdp(**fields | {"vision_feature_layers": (1,)})
        alone.levels[0] = module.level(i)
        updates = []
        scores = []
        for before, after, base_features in forwards:
            outputs = of_each_pair(equations.mdp, alone, before[i : i + 1], after[i : i + 1], base_features)
            for b, pair in enumerate(outputs):
                for k, image in enumerate(pair):
                    updates.append(image - base_features[k][b] if residual else image)
            scores.append(module.level(i)(torch.cat([before[i], after[i]]))[1].mean())
        ratio = float(torch.stack(updates).square().mean().sqrt() / size)
        assert [figures[i], figures[3 + i]] == pytest.approx([ratio, float(sum(scores) / 2)], rel=1e-5)
    assert len({round(value, 3) for value in figures[:3]}) == 3, "no level stands for another"


def bert(folder: Path, layers: int = 5) -> BertModel:
    torch.manual_seed(4)
    shape = {"hidden_size": V, "num_attention_heads": 3, "intermediate_size": 2 * V, "num_hidden_layers": layers}
    model = BertModel(BertConfig(vocab_size=7, max_position_embeddings=8, hidden_dropout_prob=0, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model.eval()


def test_a_vdm_that_starts_as_bert_computes_what_bert_computes(tmp_path):
    """Without cross-attention, the layers of both give the same outputs for the same tokens."""
    bert_model = bert(tmp_path / "bert").double()
    module = VisualDeltaModule(VDMConfig(**VDM | {"start": "bert"}), D, V)
    module.copy_bert_weights(tmp_path / "bert")
    for part in module.double().modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = 1e-12  # BERT's
    x = expected = torch.randn(2, T, V, dtype=torch.float64)
    for layer, source in zip(module.layers, bert_model.encoder.layer, strict=False):
        attended = layer._block(0, x, lambda y, m=layer.self_attention: m(y, y))
        x = layer._block(2, attended, layer.mlp)
        expected = source(expected)
        expected = expected[0] if isinstance(expected, tuple) else expected
        torch.testing.assert_close(x, expected, rtol=1e-9, atol=1e-12)


LOST = "encoder.layer.1.output.dense.weight"


@pytest.mark.parametrize(
    ("changes", "lost", "code", "fields"),
    [
        ({"mlp_ratio": 3}, "", "models.other_bert", {"value": (12, 3, 2.0), "expected": (12, 3, 3)}),
        ({}, LOST, "models.bert_lacks_weights", {"value": 1, "names": [LOST]}),
    ],
    ids=["another shape", "a weight"],
)
def test_a_bert_that_does_not_fit_is_refused_with_the_remedy(changes, lost, code, fields, tmp_path):
    bert(tmp_path / "bert")
    weights = load_file(tmp_path / "bert" / "model.safetensors")
    weights.pop(lost, None)
    save_file(weights, tmp_path / "bert" / "model.safetensors")
    with raises(DataError, code, path=tmp_path / "bert", **fields):
        VisualDeltaModule(VDMConfig(**VDM | changes), D, W).copy_bert_weights(tmp_path / "bert")


def test_a_bert_with_fewer_layers_than_the_module_is_refused(tmp_path):
    bert(tmp_path / "bert", layers=3)
    with raises(DataError, "models.other_bert", path=tmp_path / "bert", layers=3, expected_layers=4):
        VisualDeltaModule(VDMConfig(**VDM | {"layers": 4}), D, W).copy_bert_weights(tmp_path / "bert")
