"""Counts of word n-grams, n from 1 to 4, of many captions at once, and what predictions share with their references."""

from collections.abc import Iterable, Mapping

import numpy as np

ORDERS = 4


class Ngrams:
    """How often each distinct caption has each of its n-grams: one entry per caption and n-gram, by caption.

    `lengths` [captions] in words; of each entry its caption, n-gram (numbered over all n), order (n - 1) and count;
    `starts` [captions + 1] says where a caption's entries begin.
    """

    def __init__(self, captions: Iterable[str]) -> None:
        self.number = {caption: number for number, caption in enumerate(dict.fromkeys(captions))}
        split = [caption.split() for caption in self.number]
        self.lengths = np.array([len(words) for words in split], np.int64)
        known: dict[str, int] = {}
        words = np.array([known.setdefault(word, len(known)) for caption in split for word in caption], np.int64)
        caption = np.repeat(np.arange(len(split)), self.lengths)
        left = np.repeat(np.cumsum(self.lengths), self.lengths) - np.arange(len(words))  # words to the caption's end
        entries, size, self.size = [], len(known), 0
        ngram = words
        for order in range(ORDERS):
            if order:
                at = np.flatnonzero(left > order)
                _, numbers = np.unique(ngram[at] * size + words[at + order], return_inverse=True)
                ngram = np.zeros(len(words), np.int64)
                ngram[at] = numbers
            else:
                at = np.arange(len(words))
            of_order = int(ngram[at].max(initial=-1)) + 1
            keys, counts = np.unique(caption[at] * max(1, of_order) + ngram[at], return_counts=True)
            found, ngrams = np.divmod(keys, max(1, of_order))
            entries.append((found, ngrams + self.size, np.full(len(keys), order), counts))
            self.size += of_order
        columns = [np.concatenate(column) for column in zip(*entries, strict=True)]
        self.caption, self.ngram, self.order, self.count = (
            column[np.argsort(columns[0], kind="stable")] for column in columns
        )
        self.starts = np.searchsorted(self.caption, np.arange(len(split) + 1))

    def entries(self, captions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The entries of each caption, one caption after another, and whose they are: an index into `captions`."""
        sizes = self.starts[captions + 1] - self.starts[captions]
        owner = np.repeat(np.arange(len(captions)), sizes)
        first = np.cumsum(sizes) - sizes
        return np.arange(len(owner)) - first[owner] + self.starts[captions][owner], owner


class Shared:
    """The n-grams that each pair's prediction shares with each of its references.

    Row r compares pair `pair[r]`'s prediction with one reference: `prediction[r]`, `reference[r]` are captions of
    `ngrams`. Of each shared n-gram: its row, its entries in the prediction and in the reference.
    """

    def __init__(self, ngrams: Ngrams, predictions: Mapping[str, str], references: Mapping[str, list[str]]) -> None:
        number = ngrams.number
        self.ngrams, self.pairs = ngrams, {pair: place for place, pair in enumerate(predictions)}
        self.predictions = np.array([number[text] for text in predictions.values()], np.int64)
        self.reference = np.array([number[text] for pair in predictions for text in references[pair]], np.int64)
        self.references = np.array([len(references[pair]) for pair in predictions], np.int64)
        self.pair = np.repeat(np.arange(len(self.pairs)), self.references)
        self.prediction = self.predictions[self.pair]
        of_prediction, row = ngrams.entries(self.prediction)
        keys = ngrams.caption * ngrams.size + ngrams.ngram  # ascending
        wanted = self.reference[row] * ngrams.size + ngrams.ngram[of_prediction]
        place = np.minimum(np.searchsorted(keys, wanted), max(0, len(keys) - 1))
        shared = keys[place] == wanted if len(keys) else np.zeros(0, bool)
        self.row, self.of_prediction, self.of_reference = row[shared], of_prediction[shared], place[shared]

    def places(self, pairs: Iterable[str]) -> np.ndarray:
        """Where these pairs stand, in their order."""
        return np.array([self.pairs[pair] for pair in pairs], np.int64)


def table(rows: np.ndarray, orders: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Values added up by row and order: [size, ORDERS]."""
    cells = rows * ORDERS + orders
    return np.bincount(cells, values.astype(float), minlength=size * ORDERS).astype(float).reshape(-1, ORDERS)
