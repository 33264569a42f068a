"""M3Diff as a family of functions: what it loads, plans and counts."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from m3diff.models import FAMILIES
from m3diff.models.m3diff import LARGE_BASE
from m3diff.models.m3diff_model import M3DiffConfig
from m3diff.models.processing import M3DiffImageProcessor
from m3diff.models.settings import Rates
from m3diff.models.tuning import parameter_counts, prepare
from tests.tiny import BASE, MDP, noise_image, tiny_base, tiny_config, tiny_settings

FAMILY = FAMILIES["m3diff"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("family") / "base")


@pytest.mark.parametrize("mdp", [MDP, None], ids=["module", "no module"])
def test_the_base_is_loaded_with_the_module_of_the_settings(mdp: dict | None, base: Path) -> None:
    settings = tiny_settings(mdp)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(FAMILY.load_base(base, settings, torch.bfloat16, "eager"))
    assert models[0].dtype == torch.bfloat16
    assert models[0].config._attn_implementation == "eager"
    assert (models[0].model.mdp is None) == (mdp is None)
    if mdp:
        assert models[0].model.mdp.cfg == settings.module
        assert models[0].config.mdp == asdict(settings.module)
    states = [model.state_dict() for model in models]
    assert all(torch.equal(weight, states[1][name]) for name, weight in states[0].items()), "from the seed alone"


def test_the_published_shapes_give_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = FAMILY.build(M3DiffConfig.published(LARGE_BASE, None))
        counts = parameter_counts(prepare(model, FAMILY, tiny_settings(None, rank=128)), FAMILY)
    assert counts["llm"] == 128 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
    # llava-hf/llava-onevision-qwen2-7b-ov-hf: 8.03 B parameters
    assert counts["trainable"] + counts["frozen"] - counts["llm"] == pytest.approx(8.03e9, rel=0.005)


@pytest.mark.parametrize(("config", "tokens"), [(tiny_config(), 20), (M3DiffConfig.published(LARGE_BASE, {}), 1460)])
def test_a_pairs_image_tokens_are_patches_and_newlines(config: object, tokens: int) -> None:
    assert config.image_tokens == tokens


def test_a_terms_total_is_forward_and_backward() -> None:
    terms = {term.name: term for term in FAMILY.flops(tiny_config(MDP), 30, 5, tiny_settings(rank=0))}
    assert "LoRA" not in terms
    assert "MDP" not in {term.name for term in FAMILY.flops(tiny_config(), 30, 5, tiny_settings(None))}
    factors = {name: term.backward_factor for name, term in terms.items()}
    want = {"LLM linears": 2, "LLM attention": 2, "vision encoder": 2, "projector": 2, "MDP": 2}
    assert factors == want | {"head, supervised tokens": 1}
    assert all(term.total == (1 + factors[name]) * term.forward for name, term in terms.items())


def test_a_frozen_encoder_has_no_backward_and_nothing_to_recompute() -> None:
    made = tiny_settings(MDP)
    frozen = replace(made, rates=Rates(**dict(made.rates) | {"vision": None}))
    every, less = ({t.name: t for t in FAMILY.flops(tiny_config(MDP), 30, 5, each)} for each in (made, frozen))
    assert (every["vision encoder"].backward_factor, every["vision encoder"].recomputed) == (2, True)
    assert (less["vision encoder"].backward_factor, less["vision encoder"].recomputed) == (0, False)
    assert less["LLM linears"].recomputed


def test_a_wide_image_is_padded_to_a_square_with_the_mean_colour() -> None:
    processor = FAMILY.load_processor(BASE)
    side = processor.image_processor.side
    wide = noise_image(1, (side, side // 2))
    prepared = processor.prepare_image(wide)
    assert np.array_equal(prepared[side // 4 : side // 4 + side // 2], np.asarray(wide))
    assert (prepared[: side // 4] == 127).all()
    assert (prepared[side // 4 + side // 2 :] == 127).all()
    tall = processor.prepare_image(noise_image(1, (side // 2, side)))
    assert (tall[:, : side // 4] == 127).all()
    assert (tall[:, side // 4 + side // 2 :] == 127).all()


def test_an_image_processor_reads_either_form_of_its_size() -> None:
    assert M3DiffImageProcessor(size={"shortest_edge": 30}).size == {"height": 30, "width": 30}
    assert M3DiffImageProcessor(size={"height": 28, "width": 28}).side == 28
    assert M3DiffImageProcessor().to_dict() == {
        "image_processor_type": "M3DiffImageProcessor",
        "size": {"height": 384, "width": 384},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def test_the_contribution_has_a_name_for_each_level_and_none_without_a_module() -> None:
    contribution = FAMILY.contribution
    assert contribution is not None
    settings = tiny_settings({**MDP, "vision_feature_layers": [0, 2]})
    names = ("module_update_ratio/0", "module_update_ratio/2", "module_score/0", "module_score/2")
    assert contribution.names(settings) == names
    assert contribution.names(tiny_settings(None)) == ()
    sums = torch.tensor([[4.0, 2.0], [16.0, 6.0], [64.0, 8.0]])
    assert contribution.figures(sums) == [0.25, 0.5, 0.25, 0.75]
