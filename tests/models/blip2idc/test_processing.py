"""What BLIP2IDC makes of images and words, against the authors' order of resizing and BLIP-2's own processor."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, Blip2Processor
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from m3diff.models import FAMILIES
from m3diff.models.blip2idc_model import Blip2IDCProcessor, first_of
from tests.tiny import noise_image
from tests.tiny_blip2 import CLIP_MEAN, CLIP_STD, QUERIES, SIDE

HALF = SIDE // 2


@pytest.fixture(scope="module")
def processor(base: Path) -> Blip2IDCProcessor:
    return FAMILIES["blip2idc"].load_processor(base)  # type: ignore[return-value]


def smooth(seed: int, size: tuple[int, int]) -> Image.Image:
    """An image of few details, as a photograph is: what the bicubic filter does at its edges shows, noise does not."""
    return noise_image(seed, (5, 4)).resize(size, Image.Resampling.BICUBIC)


def the_authors(before: Image.Image, after: Image.Image) -> np.ndarray:
    """Their picture before it is normalised: the one before in the size of the one after, stacked, stretched."""
    stacked = Image.new("RGB", (after.width, 2 * after.height))
    stacked.paste(before.resize(after.size, Image.Resampling.BICUBIC), (0, 0))
    stacked.paste(after, (0, after.height))
    return np.asarray(stacked.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).astype(int)


def ours(processor: Blip2IDCProcessor, before: Image.Image, after: Image.Image) -> np.ndarray:
    return np.concatenate([processor.prepare_image(image) for image in (before, after)]).astype(int)


@pytest.mark.parametrize("size", [(64, 48), (40, 90), (200, 200), (SIDE, HALF), (8, 8)])
def test_of_images_of_one_size_it_is_the_authors_picture_but_for_the_rows_beside_the_seam(
    size: tuple[int, int], processor: Blip2IDCProcessor
) -> None:
    """Two rows, or as many as two pixels become where the images are made larger."""
    before, after = smooth(1, size), smooth(2, size)
    difference = np.abs(ours(processor, before, after) - the_authors(before, after))
    reach = max(2, SIDE // size[1])
    assert difference[: HALF - reach].max() <= 1
    assert difference[HALF + reach :].max() <= 1
    if size[1] == HALF:
        assert difference.max() == 0, "nothing is resized in height"
    else:
        assert difference[HALF - reach : HALF + reach].max() > 3, "there the authors' filter mixes the two images"


def test_of_images_of_two_sizes_the_one_after_is_the_authors_and_the_one_before_near_it(
    processor: Blip2IDCProcessor,
) -> None:
    before, after = smooth(1, (60, 90)), smooth(2, (64, 48))
    difference = np.abs(ours(processor, before, after) - the_authors(before, after))
    assert difference[HALF + 2 :].max() <= 1
    assert difference[2 : HALF - 2].mean() < 1
    assert difference[2 : HALF - 2].max() > 0, "resized twice there"


def test_the_pixels_are_those_of_blip2s_own_processor(processor: Blip2IDCProcessor) -> None:
    before, after = smooth(3, (80, 64)), smooth(4, (80, 64))
    stacked = Image.new("RGB", (80, 128))
    stacked.paste(before, (0, 0))
    stacked.paste(after, (0, 64))
    stock = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE}, image_mean=CLIP_MEAN, image_std=CLIP_STD)
    want = torch.as_tensor(np.asarray(stock(stacked, return_tensors="np")["pixel_values"]))
    prepared = torch.from_numpy(np.stack([processor.prepare_image(image) for image in (before, after)]))
    assert (prepared.shape, prepared.dtype) == ((2, HALF, SIDE, 3), torch.uint8)
    got = processor.image_inputs(prepared)["pixel_values"]
    assert (got.shape, got.dtype) == ((1, 3, SIDE, SIDE), torch.float32)
    away = torch.cat([torch.arange(HALF - 2), torch.arange(HALF + 2, SIDE)])
    grey = 1 / 255 / min(CLIP_STD)
    torch.testing.assert_close(got[:, :, away], want[:, :, away].float(), rtol=0, atol=1.01 * grey)
    assert (got - want).abs()[:, :, away].mean() < 0.05 * grey


def test_a_text_ends_with_the_line_break_that_opt_stops_at(processor: Blip2IDCProcessor) -> None:
    reference = processor.encode_reference("the red ball moved")
    assert reference[-1] == processor.end_id == processor.tokenizer.convert_tokens_to_ids("Ċ")
    assert processor.start_id not in reference
    assert processor.tokenizer.decode(reference) == "the red ball moved\n"
    padded = torch.tensor([[*reference, processor.pad_id], [*reference[:-2], processor.end_id, processor.pad_id, 1]])
    assert processor.decode(padded) == ["the red ball moved", "the red ball"]
    image = processor.tokenizer.convert_tokens_to_ids("<image>")
    assert processor.encode_prompt("What changed?") == (image,) * QUERIES + (2,)
    assert processor.decode(torch.tensor([processor.encode_reference("Ünknown ✓ words")])) == ["Ünknown ✓ words"]


def test_the_first_token_of_the_configuration_counts_and_else_the_tokenizers(bases: dict[str, Path]) -> None:
    other: Any = FAMILIES["blip2idc"].load_processor(bases["qwen2"])
    assert (other.end_id, other.encode_prompt("")[-1], other.pad_id) == (2, 2, 1)
    assert [first_of(*tokens) for tokens in (([7, 8], 2), (None, 2), (0, 2))] == [7, 2, 0]
    with pytest.raises(ValueError, match="names a start and an end token"):
        first_of(None, None)


SQUARE = r"preprocessor_config.json: size must be a square .* take the file of a BLIP-2"


@pytest.mark.parametrize(
    ("file", "name", "value", "told"),
    [
        ("preprocessor_config.json", "size", None, SQUARE),
        ("preprocessor_config.json", "size", {"shortest_edge": 32}, SQUARE),
        ("preprocessor_config.json", "size", {"height": 32}, SQUARE),
        ("preprocessor_config.json", "size", {"height": 31, "width": 31}, "square of an even side, found .*31"),
        ("preprocessor_config.json", "size", {"height": 32, "width": 64}, "square of an even side, found .*64"),
        ("preprocessor_config.json", "image_mean", None, SQUARE),
        ("preprocessor_config.json", "image_std", None, SQUARE),
        ("config.json", "image_token_index", None, "no image_token_index: a release from before <image>"),
    ],
)
def test_a_file_that_gives_no_stacked_picture_is_refused_in_words(
    file: str, name: str, value: object, told: str, base: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(base, tmp_path / "base")
    known = json.loads((base / file).read_text()) | {name: value}
    (folder / file).write_text(json.dumps({key: kept for key, kept in known.items() if kept is not None}))
    with pytest.raises(ValueError, match=told):
        FAMILIES["blip2idc"].load_processor(folder)


def test_what_is_saved_is_blip2s_own_and_gives_the_same(
    processor: Blip2IDCProcessor, base: Path, tmp_path: Path
) -> None:
    processor.save_pretrained(tmp_path)
    told = json.loads((tmp_path / "processor_config.json").read_text())
    assert (told["processor_class"], told["num_query_tokens"]) == ("Blip2Processor", QUERIES)
    (tmp_path / "config.json").write_text((base / "config.json").read_text())
    again = FAMILIES["blip2idc"].load_processor(tmp_path)
    assert again.encode_reference("the ball") == processor.encode_reference("the ball")
    assert again.encode_prompt("") == processor.encode_prompt("")
    image = smooth(1, (30, 20))
    assert np.array_equal(again.prepare_image(image), processor.prepare_image(image))
    stock = AutoProcessor.from_pretrained(tmp_path)
    assert isinstance(stock, Blip2Processor)
    picture = Image.fromarray(np.concatenate([processor.prepare_image(image)] * 2))
    pixels = stock(images=picture, return_tensors="pt")["pixel_values"]
    prepared = torch.from_numpy(np.stack([processor.prepare_image(image)] * 2))
    torch.testing.assert_close(pixels, processor.image_inputs(prepared)["pixel_values"], rtol=0, atol=1e-5)
