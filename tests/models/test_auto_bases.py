"""Tiny bases of the family `auto` learn the changes of pairs in both orders, and see small changes."""

from pathlib import Path

import pytest
import torch
from PIL import Image, ImageDraw
from transformers.models.smolvlm import processing_smolvlm
from transformers.utils import is_num2words_available

from benchmarks.vlm import train_on_pairs
from m3diff.models import FAMILIES
from m3diff.records.sample import Turn
from tests.auto_cases import adapted_model, auto_settings
from tests.tiny_vlm import BASES, tiny_vlm

RIGHT = 14  # captions of 16 that a base with tied embeddings has to learn in 70 steps
SIDE = 512
CHANGED = 6  # pixels


@pytest.mark.slow(20)
@pytest.mark.parametrize("base", BASES)
def test_a_base_learns_pairs_in_both_orders_and_a_batch_equals_single_pairs(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_num2words_available():  # names the frames of videos
        monkeypatch.setattr(processing_smolvlm, "num2words", str)
    learned = train_on_pairs(base, tiny_vlm(base, tmp_path))
    assert learned["batch_equals_single"]
    assert learned["last_loss"] < learned["first_loss"] / 4
    if learned["tied"]:
        assert learned["right"] >= RIGHT


def test_a_change_of_a_few_pixels_in_a_large_image_reaches_the_model(tmp_path: Path) -> None:
    folder = tiny_vlm("qwen3_vl", tmp_path)
    settings = auto_settings("qwen3_vl", processor={"size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}})
    processor = FAMILIES["auto"].load_processor(folder, None, settings)
    model = adapted_model("qwen3_vl", folder).eval()
    before = Image.new("RGB", (SIDE, SIDE), (90, 120, 60))
    after = before.copy()
    ImageDraw.Draw(after).rectangle((400, 300, 400 + CHANGED - 1, 300 + CHANGED - 1), fill=(200, 30, 30))
    logits = []
    for images in ([before, before], [before, after]):
        prepared = processor.prepare(images)
        input_ids = torch.tensor([processor.encode_prompt((Turn("What changed?"),), prepared.marks)])
        arguments = processor.token_types(input_ids) | prepared.tensors
        with torch.no_grad():
            logits.append(model(input_ids=input_ids, use_cache=False, logits_to_keep=1, **arguments).logits)
    assert input_ids.shape[1] > 2 * (SIDE // 32) ** 2, "the image keeps its resolution"
    assert (logits[0] - logits[1]).abs().max() > 1e-4
