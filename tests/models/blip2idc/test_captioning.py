"""A trained BLIP2IDC in the hands of predict, register, serve and the command `caption`, which name no family."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from m3diff.__main__ import main
from m3diff.models.generation import load_captioner
from m3diff.serving.batcher import Prepared, captions, draw
from m3diff.stages.predict.pairs import read_test_pairs
from m3diff.stages.predict.stage import predict
from tests.stages.predict.conftest import compute, settings, write_test_split
from tests.tiny import noise_image, tiny_checkpoint
from tests.tiny_blip2 import PATCH, SIDE, blip2_settings
from tests.toy import REPOSITORY

EMBEDDED = str(REPOSITORY / "profiles/embedded.yaml")
GRID = (SIDE // PATCH // 2, SIDE // PATCH)


@pytest.fixture(scope="module")
def checkpoint(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(base, tmp_path_factory.mktemp("captioning") / "checkpoint", blip2_settings())


def pair(number: int) -> tuple[Image.Image, Image.Image]:
    return noise_image(number, (40, 30)), noise_image(number + 50, (30, 44))


def test_predict_writes_captions_and_maps_of_every_pair(checkpoint: Path, tmp_path: Path) -> None:
    mixture = write_test_split(tmp_path / "mixture")
    report = predict(settings(), compute(tmp_path / "out"), mixture, checkpoint.parent, tmp_path / "out")
    assert report.rows_out == 5
    captioner = load_captioner(checkpoint, 5)
    rows = json.loads((tmp_path / "out" / "predictions.json").read_text())
    images = {
        one.id: (Image.open(one.before).convert("RGB"), Image.open(one.after).convert("RGB"))
        for one in read_test_pairs(mixture)
    }
    assert [row["caption"] for row in rows] == [captioner.caption([images[row["image_id"]]])[0] for row in rows]
    with np.load(tmp_path / "out" / "saliency.npz") as maps:
        assert maps["maps"].shape == (5, *GRID)
        np.testing.assert_allclose(maps["maps"].astype(float).sum((1, 2)), 1, atol=5e-3)


def test_a_server_answers_with_captions_and_overlays(checkpoint: Path) -> None:
    captioner = load_captioner(checkpoint, 5)
    asked = []
    for number in range(3):
        inputs = [captioner.processor.prepare_image(image) for image in pair(number)]
        asked.append(Prepared("What changed?", (inputs[0], inputs[1]), pair(number) if number else None))
    found = captions(captioner, asked)
    assert [text for text, _ in found] == captioner.caption([pair(number) for number in range(3)])
    assert found[0][1] is None
    grid = found[1][1]
    assert grid is not None
    assert grid.shape == GRID
    assert all(png.startswith(b"\x89PNG") for png in draw(pair(1), grid))


def test_the_command_caption_says_it_and_draws_the_overlay(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for file, image in zip(files, pair(0), strict=True):
        image.save(file)
    command = ["--params", EMBEDDED, "caption", *map(str, files), "--model", str(checkpoint)]
    assert main([*command, "--overlay", str(tmp_path / "drawn.png")]) == 0
    want = load_captioner(checkpoint).caption([pair(0)])[0]
    assert " ".join(want.split()) in capsys.readouterr().out
    assert (tmp_path / "drawn.png").is_file()
