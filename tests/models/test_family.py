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
from m3diff.models.onediff_settings import VDMConfig
from m3diff.models.processing import M3DiffImageProcessor
from m3diff.models.tuning import parameter_counts, prepare
from tests.tiny import BASE, MDP, noise_image, onediff_settings, tiny_settings
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
