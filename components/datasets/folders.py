"""Match the images of two folders by their names.

The first of these rules that fits every image in both folders determines the pairs:

1. The names are equal: 0001.jpg, 0001.png.
2. Their words and numbers are equal: IMG_7.png, img-007.png.
3. The names are equal except for words that all names in a folder share: CLEVR_default_000004 and
   CLEVR_semantic_000004; 0004_before and 0004_after; 1234 and 1234_2; 2019_site7 and 2023_site7.
4. The numbers are equal, and only the names in one folder contain other words: 001_kitchen, IMG_001.

A rule fits only if every image has a partner and no two images in a folder are reduced to the same name. A wrong pair
would get a plausible caption, so nobody would notice the mistake. For this reason images are never paired by their
position in a folder. Numbers that differ between the folders (site 5 and site 7, IMG_1001 and IMG_2001) are not taken
as before and after, unless they are years, dates, or 0 and 1 or 1 and 2 at the end of the name.
"""

import re
import unicodedata
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from m3diff.datasets.order import YEARS, order_names

Words = tuple[str, ...]  # the lowercase words and numbers of a name, in order
TIME_WORDS = ("t", "time")  # a number after one of these words shows the order, wherever it is in a name: t1, t2


@dataclass(frozen=True)
class NameMatch:
    """The result of matching the names in two folders.

    pairs: maps each name in the folder before to its partner in the folder after. Empty if any name has no partner.
    unmatched: names without a partner, first those of the folder before, then those of the folder after.
    ambiguous: names in one folder that are equal under the rule, so that any partner would be a guess.
    """

    pairs: dict[str, str] = field(default_factory=dict)
    unmatched: tuple[list[str], list[str]] = ([], [])
    ambiguous: list[str] = field(default_factory=list)


def match_names(before: Sequence[str], after: Sequence[str]) -> NameMatch:
    """Match the names in two folders. The names have no suffixes and are distinct within each folder.

    Returns:
        All pairs by the first rule that fits. If no rule fits, no pairs, and the names that have no partner under the
        rule that fits best.
    """
    by_name = _match_keys({name: name for name in before}, {name: name for name in after})
    by_words = _match_keys(_comparison_keys_of(before), _comparison_keys_of(after))
    attempts = [by_name, by_words]
    if len(before) > 1 and len(after) > 1:
        attempts += _match_varying_words(before, after)
    elif len(before) == len(after) == 1 and _is_sure_single_pair(before[0], after[0]):
        attempts.append(NameMatch({before[0]: after[0]}))

    match = next((attempt for attempt in attempts if attempt.pairs), None)
    if match is None:
        best_attempt = min(attempts, key=lambda attempt: (bool(attempt.ambiguous), sum(map(len, attempt.unmatched))))
        return replace(best_attempt, ambiguous=by_words.ambiguous)
    # If both folders contain the same name, a later rule must not pair it with a different name
    common_names = {*before} & {*after}
    separated_names = sorted(name for name in common_names if match.pairs[name] != name)
    return NameMatch(ambiguous=separated_names) if separated_names else match


def _match_keys(key_of_before: Mapping[str, object], key_of_after: Mapping[str, object]) -> NameMatch:
    """Match the names in two folders that have equal keys.

    Args:
        key_of_before, key_of_after: the key of each name in the folder.
    """
    before_by_key = _names_by_key(key_of_before)
    after_by_key = _names_by_key(key_of_after)
    ambiguous: list[str] = []
    for names in chain(before_by_key.values(), after_by_key.values()):
        if len(names) > 1:
            ambiguous += names
    if ambiguous:
        return NameMatch(ambiguous=sorted(ambiguous))
    if before_by_key.keys() == after_by_key.keys():
        return NameMatch({names[0]: after_by_key[key][0] for key, names in before_by_key.items()})
    unmatched_before = sorted(before_by_key[key][0] for key in before_by_key.keys() - after_by_key.keys())
    unmatched_after = sorted(after_by_key[key][0] for key in after_by_key.keys() - before_by_key.keys())
    return NameMatch(unmatched=(unmatched_before, unmatched_after))


def _names_by_key(key_of_name: Mapping[str, object]) -> dict[object, list[str]]:
    names_by_key: dict[object, list[str]] = {}
    for name, key in key_of_name.items():
        names_by_key.setdefault(key, []).append(name)
    return names_by_key


def _words_of(name: str) -> Words:
    """Return the words and numbers of a name, or the name itself if it has none."""
    plain_name = unicodedata.normalize("NFKC", name).casefold()
    return tuple(re.findall(r"\d+|[^\W\d_]+", plain_name)) or (name,)


def _comparison_key(words: Sequence[str]) -> Words:
    """Return words in a form in which equal numbers are equal texts, such as 007 and 7."""
    return tuple(str(int(word)) if word.isdecimal() else word for word in words)


def _comparison_keys_of(names: Sequence[str]) -> dict[str, Words]:
    """Return the key of each name."""
    return {name: _comparison_key(_words_of(name)) for name in names}


def _numbers_in(words: Sequence[str]) -> list[str]:
    return [word for word in words if word.isdecimal()]


@dataclass(frozen=True)
class FolderWords:
    """The words in the names of a folder's images, divided into words that all names share and other words.

    prefix, suffix: the words with which all names begin and end.
    varying: the words between prefix and suffix, for each name.
    """

    prefix: Words
    suffix: Words
    varying: dict[str, Words]

    @classmethod
    def from_names(cls, names: Sequence[str]) -> "FolderWords":
        """Divide the words of the names into words that all names share and other words."""
        words_of_name = {name: _words_of(name) for name in names}
        prefix = _shared_beginning(list(words_of_name.values()))
        without_prefix = {name: words[len(prefix) :] for name, words in words_of_name.items()}
        suffix = _shared_beginning([words[::-1] for words in without_prefix.values()])[::-1]
        varying = {name: words[: len(words) - len(suffix)] for name, words in without_prefix.items()}
        return cls(prefix, suffix, varying)


def _shared_beginning(names: Sequence[Words]) -> Words:
    """Return the words with which all names begin."""
    shared_words = names[0]
    for words in names[1:]:
        length = 0
        while length < min(len(shared_words), len(words)) and shared_words[length] == words[length]:
            length += 1
        shared_words = shared_words[:length]
    return shared_words


def _match_varying_words(before_names: Sequence[str], after_names: Sequence[str]) -> list[NameMatch]:
    """Match names without the words that all names in a folder share. Then match them by their numbers alone.

    Returns:
        The result of each rule that applies to the names. Empty if no rule applies.
    """
    before = FolderWords.from_names(before_names)
    after = FolderWords.from_names(after_names)
    may_add_number = _comparison_key(before.prefix) == _comparison_key(after.prefix) and not (
        before.suffix and after.suffix
    )
    if not _may_differ_in_a_pair(before.prefix, after.prefix, at_end=False):
        return []
    if not _may_differ_in_a_pair(before.suffix, after.suffix, at_end=True, may_add_number=may_add_number):
        return []
    if not all([*before.varying.values(), *after.varying.values()]):
        return []

    ignored_positions = _positions_of_folder_words(before, after)
    before_keys = _keys_without(before.varying, ignored_positions)
    after_keys = _keys_without(after.varying, ignored_positions)
    attempts = [_match_keys(before_keys, after_keys)]
    # If the names in one folder consist only of numbers, the words in the other folder do not contradict them
    if _have_words(before_keys) != _have_words(after_keys):
        before_numbers = {name: tuple(_numbers_in(key)) for name, key in before_keys.items()}
        after_numbers = {name: tuple(_numbers_in(key)) for name, key in after_keys.items()}
        attempts.append(_match_keys(before_numbers, after_numbers))
    return attempts


def _keys_without(words_of_name: Mapping[str, Words], positions: Container[int]) -> dict[str, Words]:
    """Return the keys of names without the words at the given positions."""
    keys = {}
    for name, words in words_of_name.items():
        kept_words = [word for position, word in enumerate(words) if position not in positions]
        keys[name] = _comparison_key(kept_words)
    return keys


def _have_words(key_of_name: Mapping[str, Words]) -> bool:
    """Return True if any key contains a word that is not a number."""
    return any(len(_numbers_in(key)) < len(key) for key in key_of_name.values())


def _may_differ_in_a_pair(before: Words, after: Words, at_end: bool, may_add_number: bool = False) -> bool:
    """Return True if the words that all names in a folder share may differ between the names of a pair.

    They may differ if they contain no numbers or equal numbers, or if their numbers can show which image of a pair is
    before: at the end of the names, after a word for time (t1, t2), or as dates.

    Args:
        before, after: the words that all names in the folder before, and in the folder after, share at the beginning or
            at the end.
        at_end: whether the words are at the end of the names.
        may_add_number: whether the names in only one folder may contain a number: 1234, 1234_2.
    """
    before_numbers = _numbers_in(before)
    after_numbers = _numbers_in(after)
    if _comparison_key(before_numbers) == _comparison_key(after_numbers):
        return True
    if not before_numbers or not after_numbers:
        return may_add_number
    if order_names(" ".join(before_numbers), " ".join(after_numbers)) is None:
        return False
    are_dates = _is_date(before_numbers[0]) and _is_date(after_numbers[0])
    return at_end or are_dates or _follow_same_time_word(before, after)


def _follow_same_time_word(before: Words, after: Words) -> bool:
    """Return True if the last words of two folders follow the same word for time, such as 1 and 2 in t1 and t2."""
    if len(before) < 2 or len(after) < 2:
        return False
    return before[-2] == after[-2] and before[-2] in TIME_WORDS


def _is_date(number: str) -> bool:
    return re.fullmatch(r"(19|20)\d{6}", number) is not None or int(number) in YEARS


def _positions_of_folder_words(before: FolderWords, after: FolderWords) -> set[int]:
    """Return the positions of words that are constant within each folder but differ between the folders.

    Positions are counted in the varying words. An example is BEFORE in a_BEFORE_1 and b_BEFORE_2.
    """
    before_names = list(before.varying.values())
    after_names = list(after.varying.values())
    lengths = {len(words) for words in chain(before_names, after_names)}
    if len(lengths) > 1:
        return set()
    positions = set()
    for position in range(lengths.pop()):
        before_words = {words[position] for words in before_names}
        after_words = {words[position] for words in after_names}
        is_constant = len(before_words) == len(after_words) == 1 and before_words != after_words
        if is_constant and not _numbers_in([*before_words, *after_words]):
            positions.add(position)
    return positions


def _is_sure_single_pair(before: str, after: str) -> bool:
    """Return True if the names show that the only images in two folders are a pair.

    Folders with a single image do not show which words all names would share, so the other rules do not apply.
    """
    before_numbers = _comparison_key(_numbers_in(_words_of(before)))
    after_numbers = _comparison_key(_numbers_in(_words_of(after)))
    if before_numbers != after_numbers:
        return False
    return bool(before_numbers) or order_names(before, after) is not None
