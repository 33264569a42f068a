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


def test_rows_of_one_question_share_batches_and_the_captions_keep_the_rows_order(tmp_path):
    images = [str(tmp_path / f"{red}.png") for red in range(40)]
    for red, image in enumerate(images):
        Image.new("RGB", (2, 2), (red, 0, 0)).save(image)
    images[9] = base64.b64encode(Path(images[9]).read_bytes()).decode()
    model, asked = PyfuncCaptioner(), {"question": "Which colour?"}
    model.captioner = Recorder()
    rows = [
        {"before": images[n], "after": images[-n], "question": [None, "", *asked.values()][n % 3]} for n in range(40)
    ]
    assert model.predict(None, pd.DataFrame(rows, index=range(7, 47))) == [f"{n}>{-n % 40}" for n in range(40)]
    assert model.captioner.batches == [(BATCH_PAIRS, {}), (11, {}), (13, asked)]
    assert model.predict(None, pd.DataFrame([{"before": images[3], "after": images[5]}])) == ["3>5"]


@pytest.mark.parametrize("base", [{}, {"base": "over/here"}])
def test_the_checkpoint_is_loaded_with_the_limit_that_predict_had_and_adapters_over_their_base(base, monkeypatch):
    monkeypatch.setattr(generation, "load_captioner", lambda *arguments, **more: (arguments, more))
    model, cfg = PyfuncCaptioner(), {"max_new_tokens": 7} | base
    model.load_context(SimpleNamespace(artifacts={"checkpoint": "some/where"}, model_config=cfg))
    assert model.captioner == ((Path("some/where"), 7), {name: Path(folder) for name, folder in base.items()})


@pytest.mark.parametrize("value", ["no/such.png", "####", base64.b64encode(b"no image").decode(), "A" * 5000])
def test_what_is_neither_a_path_nor_an_image_in_base64_is_named(value):
    with pytest.raises(ValueError, match="neither the path of an image nor an image in base64") as refused:
        read(value)
    assert str(refused.value).startswith(repr(value[:60]))
