"""A server and `m3diff caption` answer with a model of the family `auto`, whose images keep their sizes."""

import asyncio
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from m3diff.models.generation import Captioner, load_captioner
from m3diff.records.errors import DataError
from m3diff.records.sample import Turn
from m3diff.registry import model_source
from m3diff.serving.batcher import PreparedRequest, answer_requests
from m3diff.serving.caption import CaptionInput, answer_inputs
from tests.errors import raises
from tests.serving.toy import Service, dialogue, form, image_form, png, source
from tests.tiers import slow_except
from tests.tiny import noise_image
from tests.tiny_auto import QUESTION, auto_checkpoint, loadable_bases
from tests.tiny_vlm import minichange_pairs

MAX_NEW_TOKENS = 6
EVERY_BASE = slow_except(loadable_bases(), "qwen3_vl")
WITHOUT_GRID = (2, 640)  # Qwen's processor accepts no side that is 200 times as long as the other


class Sample(NamedTuple):
    images: tuple[Image.Image, ...]
    turns: tuple[Turn, ...]


def samples() -> list[Sample]:
    """Return samples with no image, one and two images of several sizes, and a dialogue."""
    pairs = [pair.images for pair in minichange_pairs(4)]
    large_pair = tuple(image.resize((160, 120)) for image in pairs[0])
    mixed_pair = (pairs[0][0], pairs[1][1])
    question = (Turn(QUESTION),)
    return [
        *(Sample(pair, question) for pair in pairs),
        Sample(large_pair, question),
        Sample(mixed_pair, question),
        Sample(pairs[2][:1], (Turn("Which colour is it?"),)),
        Sample((), (Turn("Is two even?"),)),
        Sample(pairs[3], (Turn("Is it red?", "no"), Turn("Which colour is it?"))),
    ]


@pytest.fixture(scope="module")
def captioner(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Captioner]:
    @cache
    def captioner(name: str) -> Captioner:
        return load_captioner(auto_checkpoint(name, tmp_path_factory.mktemp(name)), MAX_NEW_TOKENS)

    return captioner


def answers_one_by_one(captioner: Captioner) -> list[str]:
    texts = []
    for sample in samples():
        (text,), _ = captioner.answer([captioner.processor.prepare(sample.images)], [sample.turns])
        texts.append(text)
    return texts


@pytest.mark.parametrize("name", EVERY_BASE)
def test_a_batch_of_requests_of_several_sizes_is_answered_as_one_by_one(
    captioner: Callable[[str], Captioner], name: str
) -> None:
    model = captioner(name)
    requests = []
    for sample in samples():
        requests.append(PreparedRequest(sample.turns, model.processor.prepare(sample.images), None))
    assert [answer.text for answer in answer_requests(model, requests)] == answers_one_by_one(model)


@pytest.mark.parametrize("name", EVERY_BASE)
def test_only_prompts_of_one_length_are_answered_together(
    captioner: Callable[[str], Captioner], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A padded prompt would depend on the other samples of its batch, if only by rounding."""
    model = captioner(name)
    image_sets = [pair.images for pair in minichange_pairs(4)]
    image_sets += [tuple(image.resize((160, 120)) for image in images) for images in image_sets[:2]]
    dialogues = [(Turn(QUESTION),)] * len(image_sets)
    prepared = [model.processor.prepare(images) for images in image_sets]
    apart = [model.answer([images], dialogues[:1])[0][0] for images in prepared]
    masks = []
    generate = model.model.generate

    def record_mask(**inputs: Any) -> Any:
        masks.append(inputs["attention_mask"])
        return generate(**inputs)

    monkeypatch.setattr(model.model, "generate", record_mask)
    together, _ = model.answer(prepared, dialogues)
    assert together == apart
    assert all(mask.all() for mask in masks)
    assert len(masks) < len(image_sets)


def test_the_answers_of_the_tiny_model_differ(captioner: Callable[[str], Captioner]) -> None:
    assert len({*answers_one_by_one(captioner("qwen3_vl"))}) > 4, "equal answers would not show their order"


def inputs_of(folder: Path) -> list[CaptionInput]:
    inputs = []
    for number, sample in enumerate(samples()):
        paths = tuple(folder / f"{number}-{side}.png" for side in range(len(sample.images)))
        for image, path in zip(sample.images, paths, strict=True):
            image.save(path)
        *history, last_turn = sample.turns
        inputs.append(CaptionInput(str(number), paths, last_turn.question, tuple(history)))
    return inputs


def test_caption_answers_about_any_number_of_images(captioner: Callable[[str], Captioner], tmp_path: Path) -> None:
    model = captioner("qwen3_vl")
    outputs = list(answer_inputs(model, inputs_of(tmp_path), None))
    assert [output.fault for output in outputs] == [None] * len(outputs)
    assert [output.caption for output in outputs] == answers_one_by_one(model)


def test_caption_refuses_an_overlay_because_there_are_no_maps(
    captioner: Callable[[str], Captioner], tmp_path: Path
) -> None:
    with raises(DataError, "serving.no_saliency_maps"):
        list(answer_inputs(captioner("qwen3_vl"), inputs_of(tmp_path)[:1], tmp_path / "overlay.png"))


def test_caption_names_the_input_whose_image_fits_no_grid(
    captioner: Callable[[str], Captioner], tmp_path: Path
) -> None:
    noise_image(1, WITHOUT_GRID).save(tmp_path / "long.png")
    inputs = [*inputs_of(tmp_path)[:1], CaptionInput("long", (tmp_path / "long.png",) * 2)]
    good, long = answer_inputs(captioner("qwen3_vl"), inputs, None)
    assert good.fault is None
    assert long.fault is not None
    assert long.fault.code == "models.image_without_grid"


@pytest.fixture
def service(
    captioner: Callable[[str], Captioner], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Service]:
    """Serve the tiny model in this process."""
    model = captioner("qwen3_vl")
    service = Service()
    monkeypatch.setattr("tests.serving.toy.load_toy", lambda source: model)
    service.run(service.models.switch(source(tmp_path)))
    yield service
    assert service.replicas[0].prepared_bytes.used_bytes == 0, "prepared images were not released"
    service.runner.close()


def split(responses: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the bodies of the answers to two forms, and of those to the chats after them."""
    for response in responses:
        assert response.status_code == 200, response.text
    bodies = [response.json() for response in responses]
    return bodies[:2], bodies[2:]


def test_the_server_answers_forms_and_chats_at_once(service: Service, captioner: Callable[[str], Captioner]) -> None:
    pair, other_pair, *_, single, text, talk = samples()
    expected = answers_one_by_one(captioner("qwen3_vl"))

    async def ask_all() -> list[Any]:
        chats = []
        for sample in (single, text, talk):
            texts = []
            for turn in sample.turns:
                texts += [turn.question, turn.answer] if turn.answer else [turn.question]
            chats.append(dialogue([png(image) for image in sample.images], *texts))
        forms = [form(*map(png, sample.images), overlay="true") for sample in (pair, other_pair)]
        posts = [service.ask("POST", "/caption", **request) for request in forms]
        posts += [service.ask("POST", "/v1/chat/completions", json=request) for request in chats]
        return await asyncio.gather(*posts)

    captions, chats = split(service.run(ask_all()))
    assert [answer["caption"] for answer in captions] == expected[:2]
    assert ["overlay" in answer for answer in captions] == [False, False]
    assert [answer["choices"][0]["message"]["content"] for answer in chats] == expected[-3:]


def test_the_server_says_that_the_model_draws_no_outlines(service: Service) -> None:
    card = service.get("/model").json()
    assert card["outlines"] is False
    assert card["images"] == [0, 1, 2]


def test_the_server_refuses_an_image_that_fits_no_grid(service: Service) -> None:
    answer = service.post("/caption", **image_form(png(noise_image(1, WITHOUT_GRID))))
    assert answer.status_code == 422
    assert answer.json()["error"] == "unusable_image"


def test_a_checkpoint_is_found_and_loaded_by_its_folder(captioner: Callable[[str], Captioner], tmp_path: Path) -> None:
    checkpoint = auto_checkpoint("qwen3_vl", tmp_path)
    source = model_source.find("sqlite:///:memory:", "m3diff", str(tmp_path / "model"), tmp_path / "base", 6)
    assert source.folder == checkpoint
    model = model_source.load(source._replace(folder=checkpoint / "adapters", base=tmp_path / "base"))
    pairs = [pair.images for pair in minichange_pairs(2)]
    assert model.caption(pairs) == captioner("qwen3_vl").caption(pairs)
