"""M3Diff on LLaVA-OneVision: the base without a module, pairs with one, and its way to disk and back."""

from pathlib import Path

import pytest
import torch
from transformers import LlavaOnevisionForConditionalGeneration

from m3diff.models import FAMILIES
from m3diff.models.m3diff_model import M3DiffForConditionalGeneration
from tests.tiny import MDP, SIDE, noise_image, saliency_map, tiny_base, tiny_model

PATCHES = (SIDE // 8) ** 2


def pair_inputs(pairs: int = 2, seed: int = 0) -> dict:
    torch.manual_seed(seed)
    image = [3] * (PATCHES + 1)
    ids = torch.tensor([[7, *image, *image, 9, 11 + row, 13] for row in range(pairs)])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(2 * pairs, 3, SIDE, SIDE),
        "image_sizes": torch.full((2 * pairs, 2), SIDE),
        "batch_num_images": torch.full((pairs,), 2),
    }


def test_a_new_module_starts_as_the_base(tmp_path: Path) -> None:
    tiny_base(tmp_path)
    base = LlavaOnevisionForConditionalGeneration.from_pretrained(tmp_path).eval()
    model = M3DiffForConditionalGeneration.from_pretrained(tmp_path, module=MDP).eval()
    inputs = pair_inputs()
    inputs["input_ids"][inputs["input_ids"] == 3] = base.config.image_token_id
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, base(**inputs).logits, rtol=0, atol=1e-6)


def test_both_images_matter() -> None:
    model, inputs = tiny_model(MDP), pair_inputs()
    with torch.no_grad():
        before = model(**inputs).logits
        for image in (0, 1):
            other = inputs | {"pixel_values": inputs["pixel_values"].clone()}
            other["pixel_values"][image] += 1.0
            after = model(**other).logits
            assert (after[0] - before[0]).abs().max() > 1e-4
            torch.testing.assert_close(after[1], before[1], rtol=0, atol=1e-6)


def test_a_layer_beyond_the_vision_encoder_is_an_error() -> None:
    with pytest.raises(ValueError, match="vision feature layer 3 lies beyond the vision encoder's 2 layers"):
        tiny_model({"vision_feature_layers": [1, 3], "heads": 2})


def test_the_image_path_is_llava_onevisions_multi_image_path(tmp_path: Path) -> None:
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    ours = FAMILIES["m3diff"].load_processor(tiny_base(tmp_path)).image_processor
    stock = LlavaOnevisionImageProcessorPil(
        size=ours.size, image_mean=ours.image_mean, image_std=ours.image_std, resample=3
    )
    images = [noise_image(1, (60, 37)), noise_image(2, (31, 50))]
    want = torch.as_tensor(stock([images], return_tensors="np")["pixel_values"]).reshape(2, 3, SIDE, SIDE)
    got = ours.preprocess(images)["pixel_values"]
    # one grey level is 0.0078 here; the stock path rounds once more on its way
    torch.testing.assert_close(got, want.float(), rtol=0, atol=0.016)


def test_the_module_works_on_pairs_and_only_on_pairs() -> None:
    model, inputs = tiny_model(MDP), pair_inputs()
    ids = torch.tensor([[7, *[3] * (4 * (PATCHES + 1)), 13]])
    alone = inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids), "batch_num_images": torch.tensor([4])}
    with torch.no_grad():
        want = {True: model(**inputs).logits, False: model(**alone).logits}
        for parameter in model.model.mdp.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
        assert (model(**inputs).logits - want[True]).abs().max() > 1e-3
        assert torch.equal(model(**alone).logits, want[False])


def test_pairs_may_be_counted_in_a_list_and_images_may_have_one_crop_each() -> None:
    model, inputs = tiny_model(MDP), pair_inputs()
    other = inputs | {"batch_num_images": [2, 2], "pixel_values": inputs["pixel_values"][:, None]}
    with torch.no_grad():
        assert torch.equal(model(**other).logits, model(**inputs).logits)


def test_before_and_after_come_in_turn_and_each_image_keeps_its_place() -> None:
    """Against the module by hand on the hidden states that transformers gives."""
    model, pixels = tiny_model({**MDP, "vision_feature_layers": [0, 2]}), torch.randn(6, 3, SIDE, SIDE)
    with torch.no_grad():
        states = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
        before, after = [0, 2, 4], [1, 3, 5]
        levels = [states[0], states[2]]
        one, two = [f[before] for f in levels], [f[after] for f in levels]
        want_1, want_2 = model.model.mdp(one, two, states[-1][before], states[-1][after])
        got = model.model.perceive(pixels)
        torch.testing.assert_close(got[before], want_1)
        torch.testing.assert_close(got[after], want_2)
        maps = saliency_map(model, pixels)
        assert maps.shape == (3, 3, 3)
        with model.model.mdp.recorded_maps() as levels:
            model.model.mdp(one, two, states[-1][before], states[-1][after])
        torch.testing.assert_close(maps.flatten(1), sum(levels) / 2)
