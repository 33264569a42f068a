"""The families as functions: published sizes, what each term of a step costs, prepared images."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from m3diff.models import FAMILIES
from m3diff.models.m3diff import LARGE_BASE
from m3diff.models.m3diff_model import M3DiffConfig
from m3diff.models.onediff_model import OneDiffConfig
from m3diff.models.onediff_settings import VDMConfig
from m3diff.models.processing import M3DiffImageProcessor
from m3diff.models.tuning import parameter_counts, prepare
from tests import tiny_blip2
from tests.tiny import BASE, MDP, noise_image, onediff_settings, tiny_config, tiny_settings
from tests.tiny_blip2 import blip2_settings

FAMILY = FAMILIES["m3diff"]
PAPER = onediff_settings(asdict(VDMConfig()), rank=0, vision=None)


@pytest.mark.parametrize(
    ("settings", "folder", "name", "image_tokens", "wanted"),
    [
        (
            tiny_settings(None, rank=128),
            LARGE_BASE,
            f"llava-hf/{LARGE_BASE}",
            1460,
            {"llm": 128 * 28 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)), "whole": (8.03e9, 0.005)},
        ),
        (
            PAPER,
            "llava-1.5-7b-hf",
            "llava-hf/llava-1.5-7b-hf",
            2 * 576 + 32,
            # the VDM: 6 layers of BERT 42.5 M, three cross-attentions, the linear to the LLM
            {"module": (54e6, 0.02), "whole": (7.06e9, 0.002), "llm": (6.74e9, 0.002), "vision": 0},
        ),
        (
            blip2_settings(rank=8),
            "blip2-opt-2.7b",
            "Salesforce/blip2-opt-2.7b",
            32,
            {
                "vision": 39 * 8 * 4 * 1408,
                "module": 8 * ((2 * 12 + 6) * 2 * 768 + 2 * 6 * (1408 + 768)),
                "projector": 0,
                "llm": 32 * 8 * 3 * 2 * 2560,
                "frozen": 3_744_761_856,  # Salesforce/blip2-opt-2.7b: 3.74 B
                "trainable": (6.3e6, 0.01),  # "0.1 % of parameters"
            },
        ),
    ],
    ids=["m3diff", "onediff", "blip2idc"],
)
def test_the_published_shapes_give_the_published_number_of_parameters(
    settings: Any, folder: str, name: str, image_tokens: int, wanted: dict[str, Any], tmp_path: Path
) -> None:
    family = FAMILIES[settings.family]
    config = family.planned_config(tmp_path / folder, settings)
    assert (config.name_or_path, config.image_tokens) == (name, image_tokens)
    with torch.device("meta"):
        counts = parameter_counts(prepare(family.build(config), family, settings), family)
    new = counts["llm"] if settings.family == "m3diff" else counts["module"]
    counts["whole"] = counts["trainable"] + counts["frozen"] - new
    for part, count in wanted.items():
        assert counts[part] == (pytest.approx(count[0], rel=count[1]) if isinstance(count, tuple) else count), part


def terms(settings: Any, config: Any = None, tokens: int = 30) -> dict[str, Any]:
    family = FAMILIES[settings.family]
    return {term.name: term for term in family.flops(config or tiny_config(MDP), tokens, 5, settings)}


def test_a_terms_total_is_forward_and_backward_and_a_part_that_does_not_train_has_no_backward() -> None:
    every = terms(tiny_settings(rank=0))
    want = dict.fromkeys(("LLM linears", "LLM attention", "vision encoder", "projector", "MDP"), 2)
    assert {name: term.backward_factor for name, term in every.items()} == want | {"head, supervised tokens": 1}
    assert all(term.total == (1 + term.backward_factor) * term.forward for term in every.values())
    assert "MDP" not in terms(tiny_settings(None), tiny_config())
    frozen = terms(tiny_settings(vision=None))
    recomputed = [
        (found["vision encoder"].backward_factor, found["vision encoder"].recomputed) for found in (every, frozen)
    ]
    assert recomputed == [(2, True), (0, False)]
    assert frozen["LLM linears"].recomputed
    paper = OneDiffConfig.published("", asdict(VDMConfig()))
    common = {"LLM attention": 2, "vision encoder": 0, "projector": 2, "VDM": 1}
    for settings, factor in ((PAPER, 2), (onediff_settings(asdict(VDMConfig()), 0, vision=None, llm=None), 1)):
        factors = {name: term.backward_factor for name, term in terms(settings, paper, 1200).items()}
        assert factors == common | {"LLM linears": factor, "head, supervised tokens": factor}


def test_blip2idcs_frozen_linears_cost_two_of_three_and_its_pictures_do_not_grow_with_the_text() -> None:
    def of(tokens: int = 20, **rates: float | None) -> dict[str, Any]:
        return terms(blip2_settings(2, **rates), tiny_blip2.tiny_config(), tokens)

    short, long, frozen, alone = of(), of(40), of(vision=None), of(vision=None, module=None)
    twice = {"LLM attention", "LoRA", "vision encoder attention", "Q-Former attention"}
    assert {name: term.backward_factor for name, term in short.items()} == {n: 2 if n in twice else 1 for n in short}
    same = {name for name in short if short[name].forward == long[name].forward}
    assert same == {name for name in short if name.startswith(("vision", "Q-Former", "projector", "head"))}
    assert {name for name, term in short.items() if not term.recomputed} == {"projector", "head, supervised tokens"}
    encoder = {"vision encoder", "vision encoder attention"}
    assert {name for name in short if short[name].total != frozen[name].total} == {"LoRA", *encoder}
    assert not any(frozen[name].backward_factor or frozen[name].recomputed for name in encoder)
    names = ("Q-Former", "Q-Former attention", "projector", "LLM linears", "LoRA")
    assert [alone[name].backward_factor for name in names] == [0, 0, 0, 1, 2]
    assert alone["LoRA"].forward == 2 * (2 * 3 * 2 * 2 * tiny_blip2.WIDTH) * 20


def test_an_image_is_padded_to_a_square_with_the_mean_colour() -> None:
    processor = FAMILY.load_processor(BASE)
    side = processor.image_processor.side
    quarter, wide = side // 4, noise_image(1, (side, side // 2))
    prepared = processor.prepare_image(wide)
    assert np.array_equal(prepared[quarter : quarter + side // 2], np.asarray(wide))
    tall = processor.prepare_image(noise_image(1, (side // 2, side))).swapaxes(0, 1)
    for found in (prepared, tall):
        assert (found[:quarter] == 127).all()
        assert (found[quarter + side // 2 :] == 127).all()


def test_an_image_processor_reads_either_form_of_its_size() -> None:
    assert M3DiffImageProcessor(size={"shortest_edge": 30}).size == {"height": 30, "width": 30}
    assert M3DiffImageProcessor(size={"height": 28, "width": 28}).side == 28
    fields = {"image_processor_type": "M3DiffImageProcessor", "size": {"height": 384, "width": 384}}
    assert M3DiffImageProcessor().to_dict() == fields | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    assert M3DiffConfig.published(LARGE_BASE, {}).image_tokens == 1460


def test_the_contribution_has_a_name_for_each_level_and_none_without_a_module() -> None:
    contribution = FAMILY.contribution
    assert contribution is not None
    settings = tiny_settings({**MDP, "vision_feature_layers": [0, 2]})
    names = ("module_update_ratio/0", "module_update_ratio/2", "module_score/0", "module_score/2")
    assert contribution.names(settings) == names
    assert contribution.names(tiny_settings(None)) == ()
    sums = torch.tensor([[4.0, 2.0], [16.0, 6.0], [64.0, 8.0]])
    assert contribution.figures(sums) == [0.25, 0.5, 0.25, 0.75]
