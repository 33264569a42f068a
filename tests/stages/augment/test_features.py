"""Features: of length 1, in the order of the images, and such that OneDiff's band holds what has changed."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from m3diff.datasets.minichange.generate import image_paths
from m3diff.images.open import ImageError
from m3diff.models.device import Device
from m3diff.settings.section import ParamsError
from m3diff.stages.augment import features as module
from m3diff.stages.augment.features import load_features
from m3diff.stages.augment.params import Clip, Encoder
from tests.stages.augment.small import draw
from tests.stages.augment.tiny import BASE, clip, siglip

CPU = Device(gpu=False, precision="fp32")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[list[Path]]:
    root = draw(tmp_path_factory.mktemp("features") / "raw", image_px=128)
    return [[root / path for path in image_paths(number)] for number in range(40)]


def test_the_bases_features_put_the_same_scene_above_another_one(images: list[list[Path]]):
    found = load_features(Encoder(kind="encoder", model=BASE), CPU).features([path for each in images for path in each])
    assert found.shape == (120, 25 * 128)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    cosines = (found @ found.T).reshape(40, 3, 40, 3)
    distractors = np.array([cosines[at, 0, at, 2] for at in range(40)])
    others = np.array([np.delete(cosines[at, 0, :, 0], at).max() for at in range(40)])
    assert np.median(distractors) > 0.98
    assert np.median(others) < 0.75
    assert (distractors > others).all()


@pytest.mark.parametrize("make", [clip, siglip])
def test_clip_and_siglip_give_their_image_embedding(make, images: list[list[Path]], tmp_path: Path, monkeypatch):
    from transformers import AutoImageProcessor, AutoModel

    folder = make(tmp_path / "model")
    paths = [path for each in images[:3] for path in each]
    found = load_features(Clip(kind="clip", model=folder), CPU).features(paths)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert found.shape[0] == 9
    model, processor = AutoModel.from_pretrained(folder), AutoImageProcessor.from_pretrained(folder)
    pixels = processor(images=[module.load_image(paths[4])], return_tensors="pt")["pixel_values"]
    expected = model.get_image_features(pixel_values=pixels).pooler_output[0].detach().numpy()
    np.testing.assert_allclose(found[4], expected / np.linalg.norm(expected), atol=1e-5)
    monkeypatch.setattr(module, "BATCH", 2)
    np.testing.assert_allclose(load_features(Clip(kind="clip", model=folder), CPU).features(paths), found, atol=1e-5)


def test_a_model_of_another_content_and_an_unreadable_image_are_refused(tmp_path: Path):
    with pytest.raises(ParamsError, match="has the sha256"):
        load_features(Encoder(kind="encoder", model=BASE, sha256="1" * 64), CPU)
    (tmp_path / "no.png").write_text("no image")
    with pytest.raises(ImageError):
        load_features(Encoder(kind="encoder", model=BASE), CPU).features([tmp_path / "no.png"])


def test_features_that_the_memory_would_not_hold_are_refused_after_the_first_batch(
    images: list[list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    read: list[Path] = []
    real = module.load_image
    monkeypatch.setattr(module, "load_image", lambda path: read.append(path) or real(path))
    monkeypatch.setattr(module, "BATCH", 2)
    paths = [path for each in images for path in each]
    folder = clip(tmp_path / "model")
    features = load_features(Clip(kind="clip", model=folder), CPU)
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=120 * 12 * 4 - 1))
    with pytest.raises(ParamsError, match=r"120 images of a split, 12 numbers each, .* GiB of memory are free; .*clip"):
        features.features(paths)
    assert len(read) == 2
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=120 * 12 * 4))
    assert features.features(paths).shape == (120, 12)


def test_a_folder_of_another_model_or_without_safetensors_is_no_clip(images: list[list[Path]], tmp_path: Path):
    pickled = clip(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    for folder in (BASE, pickled):
        with pytest.raises(ParamsError, match=rf"^{folder}: is no CLIP or SigLIP .*`kind: encoder`"):
            load_features(Clip(kind="clip", model=folder), CPU).features(images[0])
