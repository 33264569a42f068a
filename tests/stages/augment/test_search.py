"""Neighbours: the exact ones, whatever the blocks; FAISS finds the same but for a few."""

import tracemalloc

import numpy as np
import pytest

from m3diff.stages.augment import features as search
from m3diff.stages.augment.features import nearest


def points(count: int, width: int = 16, groups: int = 40) -> np.ndarray:
    rng = np.random.default_rng(0)
    middles = rng.normal(size=(groups, width))
    found = middles[rng.integers(groups, size=count)] + 0.3 * rng.normal(size=(count, width))
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_the_exact_search_finds_the_nearest_others_in_order(block: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(search, "BLOCK", block)
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
    monkeypatch.setattr(search, "CELLS", 100_000)
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
