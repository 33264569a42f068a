"""Compiled layers: the numbers of plain ones, no graph after the warm-up, an error at the limit of graphs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from components.models import FAMILIES
from components.models.fused import make_fused
from components.models.tuning import prepare
from components.train.compiled import (
    Recompilations,
    TooManyGraphsError,
    compile_layers,
    graph_limit_explained,
    graphs,
    limit_graphs,
)
from components.train.packing import pack
from components.train.retry import FINAL
from tests.tiny import MDP, SIDE, scale_features, tiny_model, tiny_settings
from tests.train.test_packing import gradients, group, summed_loss
from tests.train.toy import recipe, run

M3DIFF = FAMILIES["m3diff"]
SMALL_MDP = {"vision_feature_layers": [1], "layers": 1, "heads": 2}
"""For what is not of the module: its graph has no loop, so that it takes half the time to trace."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    """Graphs of other tests would count against the limit."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    limit_graphs()
    yield
    torch.compiler.reset()
    torch._dynamo.config.fail_on_recompile_limit_hit = False


def model(mdp: dict, checkpointing: str, adapters: str) -> nn.Module:
    made = tiny_model(mdp)
    scale_features(made)
    adapted = prepare(made, M3DIFF, tiny_settings(mdp))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:  # adapters of zeros would have no gradient
                parameter.add_(0.05 * torch.randn_like(parameter))
    make_fused(made, checkpointing, adapters=adapters)
    return adapted.train()


def given_up() -> list[str]:
    """Why dynamo left layers, but for attention's choice of kernels, which is called outside the graphs on purpose."""
    return [why for why in torch._dynamo.utils.counters["graph_break"] if "torch.compiler.disable()" not in why]


def pixels(pairs: int) -> torch.Tensor:
    return torch.randn(2 * pairs, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(pairs))


@pytest.mark.parametrize(
    ("kernel", "adapters", "checkpointing"),
    [
        pytest.param("sdpa", "folded", "none", marks=pytest.mark.slow(90)),
        pytest.param("flex", "added", "none", marks=pytest.mark.slow(90)),
        pytest.param("flex", "added", "full", marks=pytest.mark.slow(50)),
        pytest.param("sdpa", "added", "selective", marks=pytest.mark.slow(50)),
    ],
)
def test_loss_and_gradients_are_those_of_plain_layers_and_fifty_lengths_make_no_graph(
    kernel: str, adapters: str, checkpointing: str
) -> None:
    mdp = MDP if kernel == "sdpa" else SMALL_MDP
    plain, compiled = model(mdp, checkpointing, adapters), model(mdp, checkpointing, adapters)
    compile_layers(compiled, M3DIFF, gpu=False)
    counted, lengths = Recompilations(), set()
    steps = 52 if (kernel, checkpointing) == ("flex", "none") else 16  # the others: the same lengths, fewer of them
    for step in range(steps):
        groups = [group(1 + (step + k) % 5, 100 * step + k) for k in range(2 + step % 7)]
        packed = pack(groups)
        lengths.add(packed.tokens)
        with counted.step():
            loss = summed_loss(compiled, packed, pixels(len(groups)), kernel)
            found = gradients(compiled, loss)
        if step % 10:
            continue
        want_loss = summed_loss(plain, packed, pixels(len(groups)), kernel)
        want = gradients(plain, want_loss)
        assert float(loss) == pytest.approx(float(want_loss), rel=1e-5)
        assert found.keys() == want.keys()
        for name, gradient in want.items():
            if not name.endswith("k_proj.bias"):  # zero but for rounding
                assert float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name
    assert graphs() >= 4, "encoder, module, layers that keep all tokens and the last one"
    assert not given_up()
    assert len(lengths) > (40 if steps == 52 else 10)
    assert counted.count == 0


@pytest.mark.slow(70)
def test_layers_whose_activations_are_recomputed_are_compiled_too() -> None:
    compiled = model(SMALL_MDP, "full", "added")
    compile_layers(compiled, M3DIFF, gpu=False)
    packed = pack([group(2, 1), group(3, 2)])
    gradients(compiled, summed_loss(compiled, packed, pixels(2), "sdpa"))
    assert graphs() >= 4
    assert not given_up()
    layers = [module for module in compiled.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert not any(layer.gradient_checkpointing for layer in layers if layer._compiled_call_impl), "once, outside"


def test_a_name_that_no_module_has_is_refused() -> None:
    with pytest.raises(ValueError, match="'nothing' is the name of no module"):
        compile_layers(nn.Linear(1, 1), type("F", (), {"compiled": "nothing"}), gpu=False)  # type: ignore[arg-type]


class Repeating(nn.Module):
    """Takes a value of Python, each of which is a graph, as a shape is that does not recur."""

    def forward(self, x: torch.Tensor, text: str) -> torch.Tensor:
        return x * len(text)


def repeating() -> nn.Module:
    made = nn.Sequential(Repeating())
    compile_layers(made, type("F", (), {"compiled": "0"}), gpu=False)  # type: ignore[arg-type]
    return made[0]


def test_only_a_forward_with_gradients_is_compiled() -> None:
    layer, x = repeating(), torch.ones(3)
    before = graphs()
    with torch.no_grad():
        layer(x, "a")
    layer.eval()(x, "a")
    assert graphs() == before
    assert torch.equal(layer.train()(x, "aa"), 2 * x)
    assert graphs() == before + 1


def test_graphs_of_steps_after_the_warm_up_are_counted_and_no_others() -> None:
    layer, counted, seen = repeating(), Recompilations(), []
    for text in ("a", "aa", "aa", "aaa", "aaaa", "aaaa"):
        with counted.step():
            layer(torch.ones(3), text)
        seen.append(counted.count)
    layer(torch.ones(3), "between the steps")
    with counted.step():
        layer(torch.ones(3), "a")
    assert [*seen, counted.count] == [0, 0, 0, 1, 2, 2, 2]


def test_more_graphs_than_the_limit_are_an_error_that_ends_the_run() -> None:
    layer = repeating()

    def steps() -> None:
        with graph_limit_explained():
            for number in range(12):
                layer(torch.ones(3), "a" * (number + 1))

    with pytest.raises(TooManyGraphsError, match=r"made 8 graphs .*set compute.compile to false"):
        steps()
    assert issubclass(TooManyGraphsError, FINAL)


@pytest.mark.slow(95)
def test_a_compiled_run_trains_alike_and_says_its_recompilations(mixture: Path, base: Path, tmp_path: Path) -> None:
    import json

    changes = {"attention": "flex", "caption_val_pairs": 1, "epochs": 1, "model": tiny_settings(SMALL_MDP)}
    want = run(recipe(base, **changes), mixture, tmp_path / "plain")
    before = graphs()
    got = run(recipe(base, **changes, compile=True), mixture, tmp_path / "compiled")
    assert graphs() > before
    assert got.column("loss") == pytest.approx(want.column("loss"), rel=1e-5)
    assert got.report.val_loss == pytest.approx(want.report.val_loss, rel=1e-4)
    assert got.report.module == pytest.approx(want.report.module, rel=1e-3)
    assert want.report.module["module_update_ratio/1"] > 0
    assert json.loads((tmp_path / "compiled/runs/train_speed.json").read_text())["recompilations"] == 0
