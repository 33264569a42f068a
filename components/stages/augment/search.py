"""The nearest neighbours of each image by the cosine of features: exact, in blocks, or by FAISS for many images."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
"""[images, width], rows of length 1."""

BLOCK = 1024  # images whose similarities to all others are held at once, at most
CELLS = 2**25  # similarities that are held at once, of 12 bytes each
PROBED = 0.1  # share of FAISS's cells that are searched


def nearest(features: Matrix, count: int, search: Literal["exact", "faiss"]) -> tuple[Matrix, NDArray[np.int64]]:
    """Of each row the most similar others: cosines and row numbers, both [images, count or one less than there are],
    the most similar first. Equal settings and features give the same."""
    count = min(count, len(features) - 1)
    if count < 1:
        return np.empty((len(features), 0), np.float32), np.empty((len(features), 0), np.int64)
    return _faiss(features, count) if search == "faiss" else _exact(features, count)


def _exact(features: Matrix, count: int) -> tuple[Matrix, NDArray[np.int64]]:
    similarities, numbers = [], []
    size = min(BLOCK, max(1, CELLS // len(features)))
    for start in range(0, len(features), size):
        block = features[start : start + size]
        negative = -block @ features.T  # the nearest have the least, so that no copy of all is made
        rows = np.arange(len(block))
        negative[rows, rows + start] = np.inf
        best = np.argpartition(negative, count - 1, axis=1)[:, :count]
        found = np.take_along_axis(negative, best, axis=1)
        order = np.lexsort((best, found), axis=1)
        similarities.append(-np.take_along_axis(found, order, axis=1))
        numbers.append(np.take_along_axis(best, order, axis=1))
    return np.concatenate(similarities), np.concatenate(numbers)


def _faiss(features: Matrix, count: int) -> tuple[Matrix, NDArray[np.int64]]:
    """By an inverted file: cells of like images, of which the nearest tenth is searched. It may miss neighbours, and
    then gives farther ones."""
    import faiss

    cells = max(1, int(len(features) ** 0.5))
    index: Any = faiss.index_factory(features.shape[1], f"IVF{cells},Flat", faiss.METRIC_INNER_PRODUCT)
    index.train(features)
    index.add(features)
    index.nprobe = max(1, round(cells * PROBED))
    similarities, numbers = index.search(features, count + 1)
    others = numbers != np.arange(len(features))[:, None]
    others[others.all(axis=1), -1] = False  # where a row did not find itself, the farthest goes
    shape = (len(features), count)
    return similarities[others].reshape(shape), numbers[others].reshape(shape)
