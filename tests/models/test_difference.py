"""The bare difference against its equation by hand, and all that a module goes through."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from m3diff.models import FAMILIES
from m3diff.models.checkpoint import ADAPTERS, load_model, read_manifest
from m3diff.models.m3diff_model import BareDifference, DifferentialPerception, new_module
from m3diff.models.m3diff_settings import DifferenceConfig, MDPConfig
from m3diff.models.tuning import parameter_counts, prepare, trainable_groups
from tests.models.test_modeling import pair_inputs
from tests.tiny import (
    DIFFERENCE,
    MDP,
    WIDTH,
    saliency_map,
    tiny_base,
    tiny_checkpoint,
    tiny_model,
    tiny_settings,
    tiny_trained,
)

FAMILY = FAMILIES["m3diff"]
D, N, B = 12, 5, 3


def features(count: int) -> list[Tensor]:
    return [torch.randn(B, N, D, dtype=torch.float64) for _ in range(count)]


def random_module(**fields: object) -> BareDifference:
    torch.manual_seed(1)
    module = BareDifference(DifferenceConfig(**{"vision_feature_layers": (1, 2, 4)} | fields), D).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return module


@pytest.mark.parametrize("share_levels", [True, False])
def test_it_adds_the_projected_difference_of_each_level_to_the_last_features_of_both_images(share_levels: bool) -> None:
    module = random_module(share_levels=share_levels)
    assert len(module.levels) == (1 if share_levels else 3)
    before, after, last = features(3), features(3), features(2)
    want = [x.clone() for x in last]
    for number, (f1, f2) in enumerate(zip(before, after, strict=True)):
        linear = module.levels[0 if share_levels else number]
        for image in want:
            image += (f2 - f1) @ linear.weight.T + linear.bias
    for got, expected in zip(module(before, after, *last), want, strict=True):
        torch.testing.assert_close(got, expected)
    with pytest.raises(AssertionError, match="one feature map per level"):
        module(before[:2], after[:2], *last)


@pytest.mark.parametrize("share_levels", [True, False])
def test_its_map_is_the_size_of_what_each_places_difference_adds(share_levels: bool) -> None:
    module = random_module(share_levels=share_levels)
    before, after = features(3), features(3)
    with module.recorded_maps() as maps:
        module(before, after, *features(2))
    module(before, after, *features(2))
    assert len(maps) == 3, "one for each level, none after"
    for number, found in enumerate(maps):
        weight = module.level(number).weight
        sizes = ((after[number] - before[number]) @ weight.T).norm(dim=-1)
        torch.testing.assert_close(found, sizes / sizes.sum(1, keepdim=True))


def test_images_that_are_equal_look_the_same_everywhere_and_stay_as_they_are() -> None:
    module = BareDifference(DifferenceConfig(vision_feature_layers=(1,), init_gain=2.0), D).double()
    same, last = features(1), features(2)
    with module.recorded_maps() as maps:
        out = module(same, same, *last)
    assert torch.equal(out[0], last[0])
    torch.testing.assert_close(maps[0], torch.full((B, N), 1 / N, dtype=torch.float64))


def test_a_new_one_adds_its_gain_times_the_size_of_the_difference() -> None:
    torch.manual_seed(0)
    for gain in (0.0, 2.0):
        module = BareDifference(DifferenceConfig(vision_feature_layers=(1,), init_gain=gain), 256)
        assert module.levels[0].weight.std().item() == pytest.approx(gain / 16, rel=0.02)
        assert not module.levels[0].bias.any()


def test_the_settings_say_which_module_a_model_has() -> None:
    assert type(new_module(MDPConfig(vision_feature_layers=(1,), heads=3), D)) is DifferentialPerception
    assert type(new_module(DifferenceConfig(vision_feature_layers=(1,)), D)) is BareDifference
    assert new_module(None, D) is None


def test_it_trains_in_full_and_each_of_its_weights_gets_a_gradient() -> None:
    settings = tiny_settings({**DIFFERENCE, "share_levels": False}, module=5e-3)
    model = prepare(tiny_model(asdict(settings.module)), FAMILY, settings)
    assert parameter_counts(model, FAMILY)["module"] == 2 * (WIDTH**2 + WIDTH)
    assert {group.lr: group.parts for group in trainable_groups(model, FAMILY, settings)}[5e-3] == ("module",)
    model(**pair_inputs()).logits.square().mean().backward()
    assert all(parameter.grad.any() for parameter in model.get_base_model().model.mdp.parameters())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("difference") / "base")


def images_of(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
    """The features and maps of some pairs."""
    pixels = pair_inputs()["pixel_values"]
    with torch.no_grad():
        return model.eval().model.perceive(pixels), saliency_map(model, pixels)


STARTS = {"bare difference": DIFFERENCE, "MDP": {**MDP, "init_gain": 2.0}}


@pytest.mark.parametrize("rate", [3e-3, None], ids=["trained", "never trained"])
@pytest.mark.parametrize("module", STARTS)
def test_merged_and_as_adapters_it_is_the_module_that_was_trained_or_that_started(
    module: str, rate: float | None, base: Path, tmp_path: Path
) -> None:
    settings = tiny_settings(STARTS[module], module=rate)
    trained = tiny_trained(base, settings)
    torch.manual_seed(1)
    new = FAMILY.load_base(base, settings, torch.float32, "sdpa").model.mdp.state_dict()
    moved = [
        name for name, weight in trained.get_base_model().model.mdp.state_dict().items() if (weight != new[name]).any()
    ]
    assert bool(moved) == (rate is not None)
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", settings)
    adapters = checkpoint / ADAPTERS
    assert read_manifest(adapters)["tuned"] == ["module", "projector", "vision"]
    tuned = load_file(adapters / "tuned.safetensors")
    assert {name.removeprefix("model.mdp.") for name in tuned if name.startswith("model.mdp.")} == new.keys()
    want = images_of(trained.get_base_model())
    for folder in (checkpoint, adapters):
        torch.manual_seed(5)  # a module that was not stored would be another
        loaded, _ = load_model(folder)
        assert loaded.model.mdp.cfg == settings.module
        for got, expected in zip(images_of(loaded), want, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_a_part_of_the_base_that_is_frozen_is_not_stored_beside_a_module_that_is(base: Path, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", tiny_settings(module=None, vision=None))
    assert read_manifest(checkpoint / ADAPTERS)["tuned"] == ["module", "projector"]
