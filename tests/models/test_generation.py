"""Captions of a checkpoint: led by question and limit, to the end token, each image encoded once."""

from pathlib import Path

import pytest

from m3diff.models.generation import QUESTION, Captioner, load_captioner
from tests.models.test_contract import by_hand
from tests.tiny import colour_image, tiny_base, tiny_checkpoint

PAIRS = [(colour_image(10 * k), colour_image(10 * k + 1)) for k in range(5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("generation")
    return tiny_checkpoint(tiny_base(root / "base", seed=2), root / "checkpoint")  # of this seed it says no token twice


@pytest.fixture(scope="module")
def captioner(checkpoint: Path) -> Captioner:
    return load_captioner(checkpoint, max_new_tokens=6)


def test_the_question_is_asked_and_has_a_default(captioner: Captioner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, prompts = [], captioner.processor.prompt_inputs
    monkeypatch.setattr(
        captioner.processor, "prompt_inputs", lambda questions: asked.append(questions) or prompts(questions)
    )
    captioner.caption(PAIRS[:2], "Describe the birds.")
    captioner.caption(PAIRS[:1])
    assert asked == [["Describe the birds."] * 2, [QUESTION]]
    assert QUESTION == "What has changed from the first image to the second?"


def test_a_caption_ends_at_the_limit_or_where_the_model_ends_it(
    checkpoint: Path, captioner: Captioner, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, seen = load_captioner(checkpoint, max_new_tokens=2), []
    decode = short.processor.decode
    monkeypatch.setattr(short.processor, "decode", lambda tokens: seen.append(tokens.tolist()) or decode(tokens))
    said = short.caption(PAIRS)
    assert said == [by_hand(short, pair, QUESTION) for pair in PAIRS]
    assert load_captioner(checkpoint).max_new_tokens == 64
    number = next(n for n, ids in enumerate(seen[0]) if len(set(ids)) == 2)
    monkeypatch.setattr(captioner.processor, "end_id", seen[0][number][1])
    assert captioner.caption([PAIRS[number]])[0] == said[number]


@pytest.mark.parametrize("saliency", [False, True])
def test_encoder_and_module_run_once_a_batch(saliency: bool, captioner: Captioner) -> None:
    tower, mdp = captioner.model.model.vision_tower, captioner.model.model.mdp
    counted = {"embeddings": tower.embeddings, "last layer": tower.encoder.layers[-1], "module": mdp}
    counted["level"] = mdp.level(0)
    runs = dict.fromkeys(counted, 0)

    def count(name: str) -> None:
        runs[name] += 1

    hooks = [part.register_forward_hook(lambda *_, name=name: count(name)) for name, part in counted.items()]
    for at in (0, 2):
        images = [captioner.processor.prepare_image(image) for pair in PAIRS[at : at + 2] for image in pair]
        captioner.answer(images, saliency=saliency)
    for hook in hooks:
        hook.remove()
    assert runs == {name: 2 * (len(mdp.cfg.vision_feature_layers) if name == "level" else 1) for name in counted}


def test_a_captioner_puts_its_model_into_evaluation_mode(captioner: Captioner) -> None:
    Captioner(captioner.model.train(), captioner.processor, captioner.family, 1)
    assert not captioner.model.training
