"""Count the n-grams of captions, and find those that predictions share with references, as arrays for all metrics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

ORDERS = 4  # n-grams have 1 to 4 words


class Ngrams:
    """N-gram counts of distinct captions: a table, sorted by caption, with one entry per caption and n-gram.

    Attributes:
        number: caption -> number of the caption.
        lengths: [captions] number of words of each caption.
        size: number of distinct n-grams of all orders.
        caption, ngram, order, count: [entries] columns of the table. The order is n - 1.
        starts: [captions + 1] index of the first entry of each caption, and the number of entries.
    """

    def __init__(self, captions: Iterable[str]) -> None:
        self.number = {caption: number for number, caption in enumerate(dict.fromkeys(captions))}
        words_of_captions = [caption.split() for caption in self.number]
        self.lengths = np.array([len(words) for words in words_of_captions], np.int64)
        word_numbers: dict[str, int] = {}
        numbers: list[int] = []
        for words_of_caption in words_of_captions:
            numbers += [word_numbers.setdefault(word, len(word_numbers)) for word in words_of_caption]
        words = np.array(numbers, np.int64)
        caption = np.repeat(np.arange(len(words_of_captions)), self.lengths)
        # for each word, the number of words from this word to the end of its caption
        words_left = np.repeat(np.cumsum(self.lengths), self.lengths) - np.arange(len(words))
        entries = []
        self.size = 0
        ngram = words  # for each word, the number of the n-gram that begins there
        for order in range(ORDERS):
            begins = np.flatnonzero(words_left > order)
            if order:
                # an n-gram is the (n-1)-gram that begins at the same word, plus one more word
                _, ngram_numbers = np.unique(
                    ngram[begins] * len(word_numbers) + words[begins + order], return_inverse=True
                )
                ngram = np.zeros(len(words), np.int64)
                ngram[begins] = ngram_numbers
            distinct = int(ngram[begins].max(initial=-1)) + 1
            keys, counts = np.unique(caption[begins] * max(1, distinct) + ngram[begins], return_counts=True)
            captions_of_keys, ngrams_of_keys = np.divmod(keys, max(1, distinct))
            entries.append((captions_of_keys, ngrams_of_keys + self.size, np.full(len(keys), order), counts))
            self.size += distinct
        columns = [np.concatenate(column) for column in zip(*entries, strict=True)]
        by_caption = np.argsort(columns[0], kind="stable")
        self.caption = columns[0][by_caption]
        self.ngram = columns[1][by_caption]
        self.order = columns[2][by_caption]
        self.count = columns[3][by_caption]
        self.starts = np.searchsorted(self.caption, np.arange(len(words_of_captions) + 1))

    def entries(self, captions: np.ndarray) -> "CaptionEntries":
        """Return the entries of the given captions, caption by caption."""
        sizes = self.starts[captions + 1] - self.starts[captions]
        owners = np.repeat(np.arange(len(captions)), sizes)
        first_entries = np.cumsum(sizes) - sizes
        entries = np.arange(len(owners)) - first_entries[owners] + self.starts[captions][owners]
        return CaptionEntries(entries, owners)


@dataclass(frozen=True)
class CaptionEntries:
    """Entries of `Ngrams`, [n] each.

    entries: numbers of the entries.
    owners: caption of each entry, as an index into the captions passed to `Ngrams.entries`.
    """

    entries: np.ndarray
    owners: np.ndarray


class SharedNgrams:
    """The n-grams that the prediction of each pair shares with each of its references.

    A row compares the prediction of a pair with one of its references. Captions are given by their numbers in `Ngrams`.

    Attributes:
        pairs: pair id -> number of the pair.
        predictions: [pairs] predicted caption of each pair.
        reference_counts: [pairs] number of references of each pair.
        pair, prediction, reference: [rows] number of the pair, its prediction, and the reference.
        row: [shared n-grams] row of each shared n-gram.
        prediction_entry, reference_entry: [shared n-grams] entries of the n-gram in the prediction and the reference.
    """

    def __init__(self, ngrams: Ngrams, predictions: Mapping[str, str], references: Mapping[str, list[str]]) -> None:
        self.ngrams = ngrams
        self.pairs = {pair_id: number for number, pair_id in enumerate(predictions)}
        self.predictions = np.array([ngrams.number[text] for text in predictions.values()], np.int64)
        reference_texts: list[str] = []
        for pair_id in predictions:
            reference_texts += references[pair_id]
        self.reference = np.array([ngrams.number[text] for text in reference_texts], np.int64)
        self.reference_counts = np.array([len(references[pair_id]) for pair_id in predictions], np.int64)
        self.pair = np.repeat(np.arange(len(self.pairs)), self.reference_counts)
        self.prediction = self.predictions[self.pair]
        predicted = ngrams.entries(self.prediction)
        rows = predicted.owners
        keys = ngrams.caption * ngrams.size + ngrams.ngram  # ascending, so a binary search can find each key
        # the key that each predicted n-gram has if the reference of its row also contains it
        reference_keys = self.reference[rows] * ngrams.size + ngrams.ngram[predicted.entries]
        positions = np.minimum(np.searchsorted(keys, reference_keys), max(0, len(keys) - 1))
        is_shared = keys[positions] == reference_keys if len(keys) else np.zeros(0, bool)
        self.row = rows[is_shared]
        self.prediction_entry = predicted.entries[is_shared]
        self.reference_entry = positions[is_shared]

    def pair_numbers(self, pair_ids: Iterable[str]) -> np.ndarray:
        """Return the numbers of the pairs with these ids."""
        return np.array([self.pairs[pair_id] for pair_id in pair_ids], np.int64)


def sum_by_order(rows: np.ndarray, orders: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Sum values by row and n-gram order. The arguments are arrays [n], and the result is [size, ORDERS]."""
    cells = rows * ORDERS + orders
    return np.bincount(cells, values.astype(float), minlength=size * ORDERS).astype(float).reshape(-1, ORDERS)


def distinct(values: np.ndarray) -> np.ndarray:
    """Return the distinct values of an array [n] in ascending order.

    `np.unique` gives the same result, but from numpy 2.3 on it hashes the values, which takes 40 times as long for half
    a million n-grams.
    """
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]
