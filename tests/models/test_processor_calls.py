"""Processors compared with the stock processor's own call, and with inputs stored by an earlier commit.

The stock processors of LLaVA-OneVision and BLIP-2 need torchvision or do not know pairs, so `frozen_inputs.json`
contains the inputs that this project's processors made of two pairs before they had the contract of
`m3diff.models.contract`.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from m3diff.models import FAMILIES
from m3diff.models.contract import Prepared
from m3diff.records.sample import Turn
from tests.family_cases import PUBLISHED_CASES, tiny
from tests.models.llava15 import write_llava15
from tests.tiny import colour_image, onediff_settings

PAIRS = [[colour_image(1, (40, 30)), colour_image(2, (36, 48))], [colour_image(3), colour_image(4)]]
FROZEN = json.loads(Path(__file__).with_name("frozen_inputs.json").read_text())
CPU = torch.device("cpu")

DIALOGUES = {
    "one turn": (Turn("What changed?"),),
    "two turns": (Turn("Is the ball gone?", "yes, it is"), Turn("And the star?")),
    "three turns": (Turn("a", "b"), Turn("c", "d"), Turn("e")),
}


def processor_of(case: str, folder: Path) -> Any:
    base, settings = tiny(case, folder / "base")
    family = FAMILIES[settings.family]
    return family.load_processor(base, family.planned_config(base, settings))


@pytest.mark.parametrize("case", PUBLISHED_CASES)
def test_pairs_have_the_inputs_of_before(case, tmp_path):
    processor = processor_of(case, tmp_path)
    prepared = [processor.prepare(pair) for pair in PAIRS]
    inputs = processor.image_inputs(processor.collate(prepared), CPU)
    pixels = inputs.pop("pixel_values")
    assert FROZEN[case] == {
        "prompts": {
            question: list(processor.encode_prompt((Turn(question),), prepared[0].marks))
            for question in FROZEN[case]["prompts"]
        },
        "answer": processor.encode_answer("the red ball moved"),
        "pixel_shape": list(pixels.shape),
        "pixel_sha256": hashlib.sha256(pixels.numpy().tobytes()).hexdigest(),
        "other_inputs": {name: tensor.tolist() for name, tensor in inputs.items()},
    }


@pytest.mark.parametrize("case", PUBLISHED_CASES)
def test_a_blank_pair_has_the_shapes_of_a_pair(case, tmp_path):
    processor = processor_of(case, tmp_path)
    blank = processor.blank_pair()
    pair = processor.prepare(PAIRS[0])
    assert blank.marks == pair.marks == processor.marks(2)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in blank.tensors.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in pair.tensors.items()
    }
    assert pair.nbytes == sum(tensor.nbytes for tensor in pair.tensors.values())


@pytest.mark.parametrize("images", [0, 1, 2])
@pytest.mark.parametrize("name", DIALOGUES)
def test_a_dialogue_has_the_inputs_of_the_stock_processor(name, images, tmp_path):
    onediff = FAMILIES["onediff"]
    base = write_llava15(tmp_path)
    processor: Any = onediff.load_processor(base, onediff.planned_config(base, onediff_settings(None)))
    stock = AutoProcessor.from_pretrained(base)
    stock.num_additional_image_tokens = 1  # as in the processor_config.json of llava-1.5-7b-hf
    side = processor.image_processor.side
    # the stock processor crops other images, and this project pads them
    shown = [colour_image(number, (side, side)) for number in range(images)]
    messages: list[dict[str, Any]] = []
    for turn in DIALOGUES[name]:
        marks = [] if messages else [{"type": "image"}] * images
        messages.append({"role": "user", "content": [*marks, {"type": "text", "text": turn.question}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": turn.answer}]})
    text = stock.apply_chat_template(messages[:-1], add_generation_prompt=True)
    expected = stock(text=text, images=shown or None, return_tensors="pt")

    prepared: Prepared = processor.prepare(shown)
    assert list(processor.encode_prompt(DIALOGUES[name], prepared.marks)) == expected["input_ids"][0].tolist()
    inputs = processor.image_inputs(processor.collate([prepared]), CPU)
    assert ("pixel_values" in inputs) == ("pixel_values" in expected) == bool(images)
    if images:
        torch.testing.assert_close(inputs["pixel_values"], expected["pixel_values"], rtol=0, atol=1e-5)
        assert inputs["batch_num_images"].tolist() == [images]


@pytest.mark.parametrize("case", ["m3diff", "onediff"])
def test_image_sets_of_several_sizes_are_collated_in_their_order(case, tmp_path):
    processor = processor_of(case, tmp_path)
    image_sets = [PAIRS[0], [], PAIRS[1][:1], PAIRS[1]]
    collated = processor.collate([processor.prepare(images) for images in image_sets])
    assert collated["batch_num_images"].tolist() == [2, 0, 1, 2]
    images = [image for images in image_sets for image in images]
    for pixels, image in zip(collated["pixels"], images, strict=True):
        assert torch.equal(pixels, processor.prepare([image]).tensors["pixels"][0])
    assert processor.collate([processor.prepare([])]) == {}
