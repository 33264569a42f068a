"""An image file is opened upright, and only where its bytes are the ones that were meant."""

import hashlib
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from components.models.images import ImageError, load_image
from tests.tiny import noise_image


@pytest.fixture
def file(tmp_path: Path) -> Path:
    noise_image(1, (6, 4)).save(tmp_path / "a.png")
    return tmp_path / "a.png"


def test_an_image_is_opened_by_path_or_from_a_stream_with_the_right_digest_or_none(file: Path) -> None:
    digest = hashlib.sha256(file.read_bytes()).digest()
    for source in (file, str(file)):
        for want in (digest, None):
            assert np.array_equal(np.asarray(load_image(source, want)), np.asarray(noise_image(1, (6, 4))))
    assert load_image(io.BytesIO(file.read_bytes()), digest).size == (6, 4)


def test_a_changed_image_is_refused_with_both_digests_and_the_remedy(file: Path) -> None:
    was = hashlib.sha256(file.read_bytes())
    noise_image(2, (6, 4)).save(file)
    now = hashlib.sha256(file.read_bytes())
    with pytest.raises(ValueError) as refused:
        load_image(file, was.digest())
    text = str(refused.value)
    assert text.startswith(f"{file}: sha256 {now.hexdigest()[:12]} but the samples say {was.hexdigest()[:12]};")
    assert "changed since ingest; run `dvc repro`" in text


@pytest.mark.fault("15")
def test_a_photograph_is_turned_as_its_exif_says(tmp_path: Path) -> None:
    image, exif = noise_image(1, (6, 4)), Image.Exif()
    exif[274] = 6  # turn by 270 degrees
    image.save(tmp_path / "turned.png", exif=exif)
    turned = load_image(tmp_path / "turned.png")
    assert turned.size == (4, 6)
    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(image), -1))


@pytest.mark.fault("15")
def test_the_first_frame_is_taken_as_rgb(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (3, 3), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    assert load_image(tmp_path / "moving.gif").mode == "RGB"
    assert load_image(tmp_path / "moving.gif").getpixel((1, 1)) == (255, 0, 0)


@pytest.mark.parametrize("fault", ["missing", "empty", "text", "truncated", "a folder"])
def test_an_unreadable_file_is_named(fault: str, file: Path) -> None:
    data = file.read_bytes()
    file.unlink()
    if fault == "a folder":
        file.mkdir()
    elif fault != "missing":
        file.write_bytes({"empty": b"", "text": b"no image", "truncated": data[: len(data) // 2]}[fault])
    with pytest.raises(ImageError, match=r"a\.png: cannot be read as an image \(.*m3diff validate"):
        load_image(file)


@pytest.mark.fault("15")
def test_a_decompression_bomb_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ImageError, match="decompression bomb"):
        load_image(file)
