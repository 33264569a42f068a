"""Captions and saliency maps of a checkpoint: the same for any company in the batch, and led by question and limit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from m3diff.models.checkpoint import CheckpointError
from m3diff.models.generation import QUESTION, Captioner, load_captioner
from tests.tiny import MDP, colour_image, pair_inputs, tiny_base, tiny_checkpoint, tiny_settings

PAIRS = [(colour_image(10 * k), colour_image(10 * k + 1)) for k in range(5)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("generation") / "base", seed=2)  # which says no token twice


@pytest.fixture(scope="module")
def checkpoint(base: Path) -> Path:
    return tiny_checkpoint(base, base.parent / "checkpoint")


@pytest.fixture(scope="module")
def captioner(checkpoint: Path) -> Captioner:
    return load_captioner(checkpoint, max_new_tokens=6)


def by_hand(captioner: Captioner, pair: tuple[Image.Image, Image.Image], question: str, count: int) -> str:
    """Greedy decoding of one pair without `generate`, as text."""
    made = tokens_by_hand(captioner, pair, question, count)
    return captioner.processor.tokenizer.decode(made, skip_special_tokens=True).strip()


def tokens_by_hand(captioner: Captioner, pair: tuple[Image.Image, Image.Image], question: str, count: int) -> list[int]:
    """The whole sequence again for every token."""
    inputs = pair_inputs(captioner.processor, [pair], [question])
    ids, made = inputs.pop("input_ids"), []
    inputs.pop("attention_mask")
    while len(made) < count:
        with torch.no_grad():
            step = torch.cat([ids, torch.tensor([made], dtype=torch.long)], dim=1)
            made.append(int(captioner.model(input_ids=step, **inputs).logits[0, -1].argmax()))
        if made[-1] == captioner.processor.end_id:
            break
    return made


def test_the_question_is_asked_and_has_a_default(captioner: Captioner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    prompts = captioner.processor.prompt_inputs
    monkeypatch.setattr(
        captioner.processor, "prompt_inputs", lambda questions: asked.append(questions) or prompts(questions)
    )
    captioner.caption(PAIRS[:2], "Describe the birds.")
    captioner.caption(PAIRS[:1])
    assert asked == [["Describe the birds."] * 2, [QUESTION]]
    assert QUESTION == "What has changed from the first image to the second?"


def test_no_more_tokens_than_asked_are_made(checkpoint: Path, captioner: Captioner) -> None:
    short = load_captioner(checkpoint, max_new_tokens=2)
    assert short.caption(PAIRS[:2]) == [by_hand(captioner, pair, QUESTION, 2) for pair in PAIRS[:2]]
    assert load_captioner(checkpoint).max_new_tokens == 64


def test_a_caption_ends_where_the_model_ends_it(captioner: Captioner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second token of a caption is made the end token."""
    tokenizer = captioner.processor.tokenizer
    begun = {n: tokens_by_hand(captioner, pair, QUESTION, 2) for n, pair in enumerate(PAIRS)}
    number, (first, second) = next((n, tokens) for n, tokens in begun.items() if len(set(tokens)) == 2)
    pair = PAIRS[number]
    monkeypatch.setattr(captioner.processor, "end_id", second)
    text = captioner.caption([pair])[0]
    assert text == tokenizer.decode([first, second]).strip()


def prepared(captioner: Captioner, pairs: list) -> list[np.ndarray]:
    return [captioner.processor.prepare_image(image) for pair in pairs for image in pair]


def maps_of(captioner: Captioner, pairs: list) -> np.ndarray:
    _, maps = captioner.answer(prepared(captioner, pairs), saliency=True)
    assert maps is not None
    return maps


@pytest.mark.parametrize("module", [MDP, None], ids=["untrained", "no module"])
def test_a_model_that_compares_nothing_looks_everywhere_alike(module: dict | None, base: Path, tmp_path: Path) -> None:
    rates = {"module": None} if module else {}
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", tiny_settings(module, **rates))
    maps = maps_of(load_captioner(checkpoint, 2), PAIRS[:2])
    assert maps.shape == (2, 3, 3)
    np.testing.assert_allclose(maps, 1 / 9, atol=1e-3)


@pytest.fixture(params=["module", "no module"])
def either(request: pytest.FixtureRequest, base: Path, captioner: Captioner, tmp_path: Path) -> Captioner:
    """A model with an MDP module, and the control without one; fused, as in prediction."""
    checkpoint = base.parent / "checkpoint"
    if request.param == "no module":
        checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", tiny_settings(None, module=None))
    found = load_captioner(checkpoint, 6)
    found.family.fuse(found.model, "none")
    return found


@pytest.mark.parametrize("saliency", [False, True])
def test_encoder_and_module_run_once_a_batch(saliency: bool, either: Captioner) -> None:
    tower, mdp = either.model.model.vision_tower, either.model.model.mdp
    counted = {"embeddings": tower.embeddings, "last layer": tower.encoder.layers[-1]}
    counted |= {} if mdp is None else {"module": mdp, "level": mdp.level(0)}
    runs = dict.fromkeys(counted, 0)

    def count(name: str) -> None:
        runs[name] += 1

    hooks = [part.register_forward_hook(lambda *_, name=name: count(name)) for name, part in counted.items()]
    for at in (0, 2):
        either.answer(prepared(either, PAIRS[at : at + 2]), saliency=saliency)
    for hook in hooks:
        hook.remove()
    levels = 0 if mdp is None else len(mdp.cfg.vision_feature_layers)
    assert runs == {name: 2 * (levels if name == "level" else 1) for name in counted}


def test_a_captioner_puts_its_model_into_evaluation_mode(captioner: Captioner) -> None:
    model = captioner.model.train()
    Captioner(model, captioner.processor, captioner.family, 1)
    assert not model.training


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no manifest.json"):
        load_captioner(tmp_path)
