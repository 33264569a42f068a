"""The registered model's own code: rows to captions, whatever the form of the images and the mixture of questions."""

import base64
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from PIL import Image

from m3diff.models import generation
from m3diff.stages.register.pyfunc import BATCH_PAIRS, PyfuncCaptioner, read


class Recorder:
    """A captioner that says the colours it sees and keeps what it was asked."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, dict[str, str]]] = []

    def caption(self, pairs, **asked: str) -> list[str]:
        self.batches.append((len(pairs), asked))
        return [f"{before.getpixel((0, 0))[0]}>{after.getpixel((0, 0))[0]}" for before, after in pairs]


@pytest.fixture
def model() -> PyfuncCaptioner:
    model = PyfuncCaptioner()
    model.captioner = Recorder()
    return model


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("images")
    for red in range(40):
        Image.new("RGB", (2, 2), (red, 0, 0)).save(folder / f"{red}.png")
    return [str(folder / f"{red}.png") for red in range(40)]


def test_a_row_is_a_pair_before_first(model, images):
    rows = pd.DataFrame([{"before": images[3], "after": images[5]}], index=[7])
    assert model.predict(None, rows) == ["3>5"]
    assert model.captioner.batches == [(1, {})]


def test_an_image_may_come_in_base64(model, images):
    encoded = base64.b64encode(Path(images[9]).read_bytes()).decode()
    assert model.predict(None, pd.DataFrame([{"before": images[3], "after": encoded}])) == ["3>9"]


def test_rows_of_one_question_share_batches_and_the_captions_keep_the_rows_order(model, images):
    questions = ["", "Which colour?"]
    rows = [{"before": images[n], "after": images[n], "question": questions[n % 2]} for n in range(40)]
    assert model.predict(None, pd.DataFrame(rows)) == [f"{n}>{n}" for n in range(40)]
    asked = {"question": "Which colour?"}
    assert model.captioner.batches == [(BATCH_PAIRS, {}), (4, {}), (BATCH_PAIRS, asked), (4, asked)]


def test_a_question_that_is_missing_in_a_row_is_the_models_own(model, images):
    rows = pd.DataFrame([{"before": images[0], "after": images[1], "question": None}])
    model.predict(None, rows)
    assert model.captioner.batches == [(1, {})]


def test_the_checkpoint_is_loaded_with_the_limit_that_predict_had(monkeypatch):
    monkeypatch.setattr(generation, "load_captioner", lambda *arguments: arguments)
    model = PyfuncCaptioner()
    model.load_context(SimpleNamespace(artifacts={"checkpoint": "some/where"}, model_config={"max_new_tokens": 7}))
    assert model.captioner == (Path("some/where"), 7)


def test_adapters_are_laid_over_the_base_that_the_configuration_names(monkeypatch):
    monkeypatch.setattr(generation, "load_captioner", lambda *arguments, **more: (arguments, more))
    model, cfg = PyfuncCaptioner(), {"max_new_tokens": 7, "base": "over/here"}
    model.load_context(SimpleNamespace(artifacts={"checkpoint": "some/where"}, model_config=cfg))
    assert model.captioner == ((Path("some/where"), 7), {"base": Path("over/here")})


@pytest.mark.parametrize("value", ["no/such.png", "####", base64.b64encode(b"no image").decode(), "A" * 5000])
def test_what_is_neither_a_path_nor_an_image_in_base64_is_named(value):
    with pytest.raises(ValueError, match="neither the path of an image nor an image in base64") as refused:
        read(value)
    assert str(refused.value).startswith(repr(value[:60]))
