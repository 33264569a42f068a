"""M3Diff on LLaVA-OneVision: the base where mdp is off, pairs where it is on, and its way to disk and back."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaOnevisionForConditionalGeneration

from components.models.m3diff.modeling import M3DiffForConditionalGeneration
from components.models.m3diff.processing import M3DiffProcessor
from components.models.m3diff.tuning import add_lora, merge, trainable_groups
from tests.tiny import MDP, SIDE, noise_image, tiny_base, tiny_config, tiny_model

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


def test_with_perception_off_the_logits_are_the_bases_bit_for_bit(tmp_path: Path) -> None:
    tiny_base(tmp_path)
    base = LlavaOnevisionForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    config = type(tiny_config()).from_dict({k: v for k, v in base.config.to_dict().items() if k != "model_type"})
    off = M3DiffForConditionalGeneration.from_pretrained(tmp_path, config=config, attn_implementation="sdpa").eval()
    inputs = pair_inputs()
    inputs["input_ids"][inputs["input_ids"] == 3] = base.config.image_token_id
    with torch.no_grad():
        assert torch.equal(off(**inputs).logits, base(**inputs).logits)


def test_a_new_module_starts_as_the_base(tmp_path: Path) -> None:
    tiny_base(tmp_path)
    base = LlavaOnevisionForConditionalGeneration.from_pretrained(tmp_path).eval()
    model = M3DiffForConditionalGeneration.from_pretrained(tmp_path, mdp=MDP).eval()
    inputs = pair_inputs()
    inputs["input_ids"][inputs["input_ids"] == 3] = base.config.image_token_id
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, base(**inputs).logits, rtol=0, atol=1e-6)


def test_the_tower_is_read_as_transformers_reads_it() -> None:
    model = tiny_model(MDP)
    pixels = torch.randn(2, 3, SIDE, SIDE)
    with torch.no_grad():
        want = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
        got = model.model.vision_hidden_states(pixels)
    assert len(want) == len(got)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


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


def test_save_and_load_keep_every_logit(tmp_path: Path) -> None:
    model, inputs = tiny_model(MDP), pair_inputs()
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin")), "safetensors only"
    loaded = M3DiffForConditionalGeneration.from_pretrained(tmp_path).eval()
    auto = AutoModelForImageTextToText.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        want = model(**inputs).logits
        assert torch.equal(loaded(**inputs).logits, want)
        assert torch.equal(auto(**inputs).logits, want)


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tiny_base(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop(next(name for name in weights if "multi_modal_projector" in name))
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="weights missing"):
        M3DiffForConditionalGeneration.from_pretrained(tmp_path, mdp=MDP)


def test_a_tap_beyond_the_tower_is_an_error() -> None:
    with pytest.raises(ValueError, match="tap 9 lies beyond the tower's 2 layers"):
        tiny_model({"taps": [1, 9], "heads": 2})


def test_the_trainable_set_is_lora_tower_projector_and_perception() -> None:
    model = tiny_model(MDP)
    add_lora(model, rank=2, alpha=4)
    groups = {group.name: group for group in trainable_groups(model, 2, lr=1e-5, lr_vision=2e-6)}
    names = {id(p): name for name, p in model.named_parameters()}
    tower = [names[id(p)] for p in groups["tower"].parameters]
    rest = [names[id(p)] for p in groups["rest"].parameters]
    assert all(name.startswith("model.vision_tower.") for name in tower)
    assert not any("post_layernorm" in name for name in tower)
    assert sum(".lora_" in name for name in rest) == 2 * 7 * 2
    assert sum(name.startswith("model.mdp.") for name in rest) == len(list(model.model.mdp.parameters()))
    assert not any("embed_tokens" in name or "lm_head" in name or "base_layer" in name for name in tower + rest)


def test_perception_has_a_rate_of_its_own_where_one_is_given() -> None:
    model = tiny_model(MDP)
    add_lora(model, rank=2, alpha=4)
    groups = trainable_groups(model, 2, lr=1e-3, lr_vision=1e-4, lr_mdp=1e-5)
    assert [(group.name, group.lr) for group in groups] == [("tower", 1e-4), ("mdp", 1e-5), ("rest", 1e-3)]
    inside = {id(p) for p in model.model.mdp.parameters()}
    assert {id(p) for p in groups[1].parameters} == inside
    assert not inside & {id(p) for group in (groups[0], groups[2]) for p in group.parameters}


def test_every_trainable_tensor_gets_a_gradient() -> None:
    model, inputs = tiny_model(MDP), pair_inputs()
    add_lora(model, rank=2, alpha=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model(**inputs).logits.square().mean().backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    # key biases shift all scores of a query alike, so softmax cancels them
    assert [name for name in without if "k_proj" not in name] == []


def test_a_lora_target_that_matches_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.models.m3diff.tuning.LORA_TARGETS", r"model\.language_model\.none")
    with pytest.raises(ValueError, match="LoRA targets match 0 linears"):
        add_lora(tiny_model(MDP), rank=2, alpha=4)


def test_merged_equals_unmerged_logits() -> None:
    model, inputs = tiny_model(MDP), pair_inputs()
    adapted = add_lora(model, rank=2, alpha=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
        want = adapted(**inputs).logits.clone()
        merged = merge(adapted)
        assert not any("lora" in name for name, _ in merged.named_parameters())
        # a merge without alpha / r would be off by the whole adapter, about 1e-1 here
        torch.testing.assert_close(merged(**inputs).logits, want, rtol=1e-4, atol=1e-5)


def test_the_image_path_is_llava_onevisions_multi_image_path(tmp_path: Path) -> None:
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    ours = M3DiffProcessor.from_pretrained(tiny_base(tmp_path)).image_processor
    stock = LlavaOnevisionImageProcessorPil(
        size=ours.size, image_mean=ours.image_mean, image_std=ours.image_std, resample=3
    )
    images = [noise_image(1, (60, 37)), noise_image(2, (31, 50))]
    want = torch.as_tensor(stock([images], return_tensors="np")["pixel_values"]).reshape(2, 3, SIDE, SIDE)
    got = ours.preprocess(images)["pixel_values"]
    # one grey level is 0.0078 here; the stock path rounds once more on its way
    torch.testing.assert_close(got, want.float(), rtol=0, atol=0.016)


def test_the_processor_loads_by_its_auto_class(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base")
    model = M3DiffForConditionalGeneration.from_pretrained(base, mdp=MDP)
    model.save_pretrained(tmp_path / "model")
    M3DiffProcessor.from_pretrained(base).save_pretrained(tmp_path / "model")
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    assert isinstance(processor, M3DiffProcessor)
    prompt = processor.encode_prompt("What changed?")
    image_id = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert sum(token == image_id for token in prompt) == 2 * (PATCHES + 1)
    assert processor.tokenizer.decode(prompt).endswith("What changed?<|im_end|><|im_start|>assistant\n")
    assert processor.tokenizer.decode(processor.encode_answer("Ünknown ✓ words")) == "Ünknown ✓ words<|im_end|>"
