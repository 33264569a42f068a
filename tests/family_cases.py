"""Tiny bases of all families with settings, for tests of what every family must do."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.models.llava15 import write_llava15
from tests.tiny import DIFFERENCE, MDP, SEPARATE, VDM, onediff_settings, tiny_base, tiny_settings
from tests.tiny_blip2 import blip2_settings, tiny_blip2
from tests.tiny_glimpse import glimpse_settings, tiny_glimpse


@dataclass(frozen=True)
class FamilyCase:
    """A tiny base, the settings of training on it, and what is particular about both.

    Attributes:
        write_base: (folder) -> the folder of a base with random weights.
        settings: () -> the settings.
        base_weights: part of the names of weights that every base has.
        trained_weights: part of the names of weights that every trained model has.
        encoder: name of the vision encoder in the model; empty if the family has no saliency maps.
        has_stock_class: whether transformers has a class for the base.
        has_linear_adapters: whether the adapted layers are `nn.Linear`, for which there is a fused kernel.
        has_module: whether the family adds a module that a base lacks.
        has_idle_encoder_layer: whether the output of the encoder's last layer is not used.
    """

    write_base: Callable[[Path], Path]
    settings: Callable[[], Any]
    base_weights: str = "proj"
    trained_weights: str = ""
    encoder: str = "model.vision_tower"
    has_stock_class: bool = True
    has_linear_adapters: bool = True
    has_module: bool = True
    has_idle_encoder_layer: bool = False


BLIP2 = FamilyCase(tiny_blip2, blip2_settings, trained_weights="qformer", encoder="vision_model", has_module=False)
CASES = {
    # of this seed, no answer has a token twice
    "m3diff": FamilyCase(partial(tiny_base, seed=2), partial(tiny_settings, MDP), trained_weights=".mdp."),
    "m3diff without a module": FamilyCase(
        partial(tiny_base, seed=2, first_release=True), partial(tiny_settings, None), has_module=False
    ),
    "m3diff difference": FamilyCase(
        partial(tiny_base, seed=2), partial(tiny_settings, DIFFERENCE), trained_weights=".mdp."
    ),
    "onediff": FamilyCase(partial(tiny_base, seed=2), partial(onediff_settings, VDM), trained_weights=".vdm."),
    "onediff on LLaVA-1.5": FamilyCase(
        write_llava15,
        partial(onediff_settings, VDM | SEPARATE | {"projection": "shared"}),
        trained_weights=".vdm.",
        has_idle_encoder_layer=True,
    ),
    "blip2idc": BLIP2,
    "blip2idc on Qwen2": FamilyCase(
        partial(tiny_blip2, llm="qwen2"),
        blip2_settings,
        trained_weights="qformer",
        encoder="vision_model",
        has_module=False,
    ),
    "glimpse": FamilyCase(
        tiny_glimpse,
        glimpse_settings,
        base_weights="bridge",
        trained_weights="eye",
        encoder="",
        has_stock_class=False,
        has_linear_adapters=False,
        has_module=False,
    ),
}
PUBLISHED_CASES = [name for name in CASES if name != "glimpse"]


def tiny(name: str, folder: Path) -> tuple[Path, Any]:
    """Write the base of one of CASES to `folder`. Return the base and settings for training on it."""
    case = CASES[name]
    return case.write_base(folder), case.settings()
