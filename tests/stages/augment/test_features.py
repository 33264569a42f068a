"""Features of length 1, in the order of the images, such that OneDiff's band holds what has changed; and neighbours."""

import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from m3diff.datasets.minichange.generate import image_paths
from m3diff.images.open import ImageError
from m3diff.models.device import Device
from m3diff.settings.section import ParamsError
from m3diff.stages.augment import features as module
from m3diff.stages.augment.features import load_features, nearest
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


# Neighbours


def points(count: int, width: int = 16, groups: int = 40) -> np.ndarray:
    rng = np.random.default_rng(0)
    middles = rng.normal(size=(groups, width))
    found = middles[rng.integers(groups, size=count)] + 0.3 * rng.normal(size=(count, width))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_the_exact_search_finds_the_nearest_others_in_order(block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BLOCK", block)
    features = points(200)
    cosines, numbers = nearest(features, 5, "exact")
    whole = (features @ features.T).astype(np.float64)
    np.fill_diagonal(whole, -2)
    best = np.argsort(-whole, axis=1, kind="stable")[:, :5]
    assert (numbers == best).mean() > 0.999
    np.testing.assert_allclose(cosines, np.take_along_axis(whole, best, axis=1), atol=1e-6)


def test_the_exact_search_holds_so_many_similarities_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch):
    """numpy tells tracemalloc what it takes: a block's similarities and, of 8 bytes each, their order."""
    features = points(4000)
    whole = nearest(features, 8, "exact")
    monkeypatch.setattr(module, "CELLS", 100_000)
    tracemalloc.start()
    try:
        cosines, numbers = nearest(features, 8, "exact")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000 * 14 + 3 * (cosines.nbytes + numbers.nbytes)
    assert (numbers == whole[1]).all()
    np.testing.assert_allclose(cosines, whole[0], atol=1e-6)


def test_equal_ones_come_by_their_number_and_no_image_is_its_own_neighbour():
    features = np.tile(points(1), (6, 1))
    _, numbers = nearest(features, 5, "exact")
    assert numbers.tolist() == [[other for other in range(6) if other != row] for row in range(6)]


@pytest.mark.parametrize(("count", "found"), [(1, 0), (2, 1), (4, 3)])
def test_there_are_no_more_neighbours_than_others(count: int, found: int):
    cosines, numbers = nearest(points(count), 10, "exact")
    assert cosines.shape == numbers.shape == (count, found)


def test_faiss_finds_what_the_exact_search_finds():
    features = points(4000)
    exact_cosines, exact = nearest(features, 8, "exact")
    cosines, numbers = nearest(features, 8, "faiss")
    assert numbers.shape == exact.shape
    assert not (numbers == np.arange(len(features))[:, None]).any()
    recall = np.mean([len(set(a) & set(b)) / 8 for a, b in zip(numbers, exact, strict=True)])
    assert recall > 0.9
    assert (np.diff(cosines, axis=1) <= 1e-6).all(), "the most similar first"
    same = numbers == exact
    np.testing.assert_allclose(cosines[same], exact_cosines[same], atol=1e-5)
    assert (nearest(features, 8, "faiss")[1] == numbers).all()


def test_faiss_drops_the_image_itself_also_among_equal_ones():
    features = np.repeat(points(20), 5, axis=0)
    cosines, numbers = nearest(features, 3, "faiss")
    assert not (numbers == np.arange(100)[:, None]).any()
    assert (cosines > 0.999).mean() > 0.9
