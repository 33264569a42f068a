"""InstructPix2Pix: diffusers' own pipeline on weights of 160 kB."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from m3diff.images.open import ImageError
from m3diff.models.device import Device
from m3diff.settings.section import ParamsError
from m3diff.stages.augment.editors import Pix2PixEditor, fitted, load_editor
from m3diff.stages.augment.params import Drawn, InstructPix2Pix, Source
from tests.stages.augment.small import draw
from tests.stages.augment.tiny import instruct_pix2pix

CPU = Device(gpu=False, precision="fp32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return instruct_pix2pix(tmp_path_factory.mktemp("ip2p") / "model")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (30, 50, 3), dtype=np.uint8)).save(tmp_path / "image.png")
    return tmp_path / "image.png"


def editor(model: Path, **changes: Any) -> Pix2PixEditor:
    values = {"kind": "instruct_pix2pix", "model": model, "steps": 2, "image_px": 32} | changes
    found = load_editor(InstructPix2Pix(**values), Source(reader="pairs", root=Path("nowhere")), CPU)
    assert isinstance(found, Pix2PixEditor)
    return found


def test_the_same_seed_gives_the_same_edit_whatever_was_edited_before(model: Path, image: Path):
    one = editor(model)
    first = one.edit(image, "make it red", 1)
    other = one.edit(image, "make it red", 2)
    again = one.edit(image, "make it red", 1)
    alone = editor(model).edit(image, "make it red", 1)
    assert first is not None
    assert other is not None
    assert first.size == (50, 30)
    assert first.mode == "RGB"
    assert again is not None
    assert alone is not None
    assert first.tobytes() == again.tobytes() == alone.tobytes()
    assert first.tobytes() != other.tobytes()


@pytest.mark.parametrize(
    "change",
    [
        {"text": "add a cat"},
        {"color": "blue"},
        {"steps": 3},
        {"guidance": 2.0},
        {"image_guidance": 3.0},
        {"image_px": 64},
    ],
)
def test_original_instruction_steps_and_both_guidances_reach_the_pipeline(
    change: dict[str, Any], model: Path, image: Path
):
    def edit(text: str = "make it red", color: str | None = None, **changes: Any) -> bytes:
        if color:
            Image.new("RGB", (50, 30), color).save(image)
        made = editor(model, **changes).edit(image, text, 1)
        assert made is not None
        return made.tobytes()

    assert edit() != edit(**change)


def test_weights_are_loaded_for_the_first_edit_and_known_before(model: Path, image: Path):
    one = editor(model)
    assert one.pipeline is None
    assert len(one.identity) == 64
    one.edit(image, "make it red", 1)
    assert one.pipeline.safety_checker is None


def test_a_model_that_is_not_there_or_another_one_and_a_bad_image_are_refused(model: Path, tmp_path: Path):
    with pytest.raises(ParamsError, match=r"holds no config\.json or model_index\.json"):
        editor(tmp_path)
    with pytest.raises(ParamsError, match="has the sha256"):
        editor(model, sha256="0" * 64)
    (tmp_path / "no.png").write_text("no image")
    with pytest.raises(ImageError):
        editor(model).edit(tmp_path / "no.png", "make it red", 1)


@pytest.mark.parametrize(
    ("size", "longer", "found"),
    [((50, 30), 32, (32, 16)), ((1000, 500), 512, (512, 256)), ((300, 400), 512, (384, 512)), ((900, 9), 64, (64, 8))],
)
def test_the_sides_are_multiples_of_eight_in_nearly_the_same_shape(
    size: tuple[int, int], longer: int, found: tuple[int, int]
):
    assert fitted(size, longer) == found


def test_the_editor_without_weights_is_of_its_source(tmp_path: Path):
    root = draw(tmp_path / "raw", scenes={"train": 1, "val": 0, "test": 1})
    drawn = load_editor(Drawn(kind="drawn"), Source(reader="minichange", root=root), CPU)
    assert drawn.edit(root / "images/CLEVR_default_000000.png", "the camera moved up", 1) is not None
