"""Models of the family `auto` in bf16, as on a GPU, take the images in fp32 that their processors return."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.utils import is_num2words_available

from m3diff.models import FAMILIES
from m3diff.models.cached_prompts import CachedPrompts
from m3diff.models.device import Device
from m3diff.models.tuning import prepare_for_training
from m3diff.records.sample import Turn
from tests.auto_cases import auto_settings, load_processor, training_sequence
from tests.tiers import slow_except
from tests.tiny_auto import generated_tokens
from tests.tiny_vlm import BASES, minichange_pairs, tiny_vlm

QUESTION = Turn("What changed?")
LOADABLE = [name for name in BASES if name != "smolvlm" or is_num2words_available()]
EVERY_BASE = slow_except(LOADABLE, "qwen3_vl", "lfm2_vl")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda name: tiny_vlm(name, tmp_path_factory.mktemp(name)))


def logits_and_tokens(name: str, folder: Path, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits after the prompts about two pairs, and the tokens of the answers."""
    model = FAMILIES["auto"].load(folder, dtype).eval()
    pairs = [minichange_pairs()[number].images for number in (0, 2)]
    inputs, tokens = generated_tokens(
        model, load_processor(name, folder), pairs, [(QUESTION,)] * 2, max_new_tokens=3, min_new_tokens=3
    )
    pixels = [value.dtype for key, value in inputs.items() if key.startswith("pixel_values")]
    assert pixels == [torch.float32]
    with torch.inference_mode():
        return model(**inputs).logits[:, -1].float(), tokens


@pytest.mark.parametrize("name", EVERY_BASE)
def test_a_model_in_bf16_answers_nearly_as_in_fp32(base: Callable[[str], Path], name: str) -> None:
    logits, _ = logits_and_tokens(name, base(name), torch.float32)
    rounded_logits, tokens = logits_and_tokens(name, base(name), torch.bfloat16)
    assert (rounded_logits - logits).norm() / logits.norm() < 0.2  # 0.007 to 0.08 were measured
    assert tokens.shape == (2, 3)


@pytest.mark.parametrize("name", EVERY_BASE)
def test_a_model_in_bf16_is_trained_with_shared_prompts(base: Callable[[str], Path], name: str) -> None:
    settings = auto_settings(name)
    losses: dict[str, float] = {}
    gradients: dict[str, Any] = {}
    for precision in ("fp32", "bf16"):
        device = Device(gpu=False, precision=precision)
        torch.manual_seed(0)
        model = FAMILIES["auto"].load_base(base(name), settings, device.dtype, None)
        adapted = prepare_for_training(model, FAMILIES["auto"], settings).train()
        processor = load_processor(name, base(name))
        pair = minichange_pairs()[0]
        dialogues = [(QUESTION._replace(answer=caption),) for caption in pair.captions]
        sequence = training_sequence(processor, pair.images, dialogues)
        packing = CachedPrompts()
        batch = packing.batch([sequence], processor, device)
        logits = packing.logits(adapted, batch, processor, device)
        loss = nn.functional.cross_entropy(logits.float(), batch.labels)
        loss.backward()
        losses[precision] = loss.item()
        gradients[precision] = {key: weight.grad for key, weight in adapted.named_parameters() if weight.requires_grad}
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.05)
    for key, gradient in gradients["bf16"].items():
        assert (gradient is None) == (gradients["fp32"][key] is None), key
        assert gradient is None or gradient.isfinite().all(), key
