"""Decide which of two columns or folders has the images before and which has the images after, based on their names.

Names are compared by whole words ("t1", "img_after" and "imageAfter" have two words each), never by parts of words.
For example, `newspaper` does not contain the word `new`. Words that both names share are ignored.

The order is certain in three cases:

1. The names contain two words with opposite meanings (`CONTRASTS`).
2. One name is the other name plus a word that means after: photo, photo_edited.
3. The names differ only in 0 and 1, 1 and 2, a and b, or two years.

In all other cases the user has to decide. This includes names in which a listed word is opposed to a word that is not
listed (damaged, repaired).
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain, combinations

_GENERAL_BEFORE = (
    "before bef pre prior original orig source src start starting begin beginning first initial init old older "
    "oldest previous prev earlier early past input unedited unchanged unmodified unaltered untouched vorher avant "
    "ancien antes до 前 之前 变化前 変更前"
)
_GENERAL_AFTER = (
    "after aft post edited edit target tgt dest dst destination end ending final finish second new newer newest later "
    "late subsequent next following future recent latest output out result modified changed updated altered "
    "manipulated retouched nachher neu apres nouveau despues depois после 后 後 之后 变化后 変更後"
)
_PRESENT = "current now present today"


@dataclass(frozen=True)
class Contrast:
    """Words for the image before, and words with the opposite meaning for the image after.

    If `needs_bare_names` is true, the contrast only applies if both names consist of order words and `NOUNS`.
    """

    before: frozenset[str]
    after: frozenset[str]
    needs_bare_names: bool = False


def _make_contrast(before: str, after: str, needs_bare_names: bool = False) -> Contrast:
    return Contrast(frozenset(before.split()), frozenset(after.split()), needs_bare_names)


CONTRASTS = (
    _make_contrast(_GENERAL_BEFORE, _GENERAL_AFTER),
    # The words below only have a meaning next to a word of the same contrast. `current` is later than `previous` and
    # earlier than `next`; `last` may mean the previous image. Repairs begin with `damaged`, inspections end with it. A
    # `reference` is before a target, but next to an output it is neither before nor after
    _make_contrast(
        "before first initial init original orig old older oldest previous prev prior earlier past", _PRESENT
    ),
    _make_contrast("then", "now present today"),
    _make_contrast(_PRESENT, "next following future subsequent later"),
    _make_contrast("first initial", "last"),
    _make_contrast("undamaged intact unharmed", "damaged"),
    _make_contrast("reference", "target"),
    _make_contrast("alt", "neu"),  # German; in English, photo_alt is an alternative version of photo
    # zoom_in and zoom_out, or walk_from and walk_to, have no order
    _make_contrast("in", "out output", needs_bare_names=True),
    _make_contrast("from", "to", needs_bare_names=True),
)
_GENERAL = CONTRASTS[0]
ORDER_WORDS = frozenset().union(*(contrast.before | contrast.after for contrast in CONTRASTS))

NUMBERS = {"zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5"}
FIRST_AND_SECOND = {"first", "second"}
LATER_ORDINALS = {"third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"}
# Words that do not affect the order: `beforeimg` is read as `before`
NOUNS = ("images", "image", "imgs", "img", "photo", "picture", "pic", "frame", "path", "filename", "file", "name")
# after_1 and after_2, or edit_1 and edit_2, belong to different pairs; input_1 and input_2 are two images of one pair
_SIDES_OF_A_PAIR = (_GENERAL.before | _GENERAL.after) - {"input", "source", "src"}
# Images that describe another image, and are neither before nor after
AUXILIARY_WORDS = {
    "mask",
    "depth",
    "thumb",
    "thumbnail",
    "overlay",
    "heatmap",
    "diff",
    "seg",
    "segmentation",
    "crop",
    "flow",
}

SMALL_STEPS = ((0, 1), (1, 2))
YEARS = range(1900, 2101)


@dataclass(frozen=True)
class Order:
    """Two names in temporal order. `has_time_words` is true if both names contain a word about time."""

    before: str
    after: str
    has_time_words: bool

    @property
    def names(self) -> tuple[str, str]:
        """The name before and the name after, as a tuple."""
        return (self.before, self.after)


def words_in(name: str) -> list[str]:
    """Return the lowercase words and numbers of a name, without accents, split at punctuation, digits and capitals."""
    decomposed_name = unicodedata.normalize("NFKD", name)
    plain_name = "".join(letter for letter in decomposed_name if not unicodedata.combining(letter))
    words = []
    for word in re.findall(r"\d+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_a-zA-Z]+", plain_name):
        bare_word = _without_noun(word.lower())
        words.append(NUMBERS.get(bare_word, bare_word))
    return words


def _without_noun(word: str) -> str:
    """Remove the noun from a word such as `beforeimg` or `imgbefore`. Return any other word unchanged."""
    for noun in NOUNS:
        for remainder in (word.removeprefix(noun), word.removesuffix(noun)):
            if remainder != word and (remainder in ORDER_WORDS or remainder in ("a", "b")):
                return remainder
    return word


def choose_sides(names: Sequence[str]) -> list[tuple[str, str]]:
    """Choose the name before and the name after.

    Return one pair if the order is certain, and otherwise all pairs from which the user has to choose. The order of
    `names` affects only the order of these pairs, never which name of a pair is before.
    """
    main_names = [name for name in names if AUXILIARY_WORDS.isdisjoint(words_in(name))]
    candidates = main_names if len(main_names) > 1 else list(names)
    possible_orders = [order_names(*pair) for pair in combinations(candidates, 2)]
    sure_orders = [order for order in possible_orders if order is not None]
    best_orders = [order for order in sure_orders if order.has_time_words] or sure_orders
    if not best_orders:
        return _possible_pairs(candidates)
    pairs: list[tuple[str, str]] = []
    for order in best_orders:
        pairs += _possible_pairs(_find_series(candidates, order) or order.names)
    return list(dict.fromkeys(pairs))


def _possible_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return every pair of names. If the order of a pair is uncertain, return the pair in both orders."""
    pairs: list[tuple[str, str]] = []
    for pair in combinations(names, 2):
        order = order_names(*pair)
        pairs += [pair, pair[::-1]] if order is None else [order.names]
    return pairs


def order_names(first_name: str, second_name: str) -> Order | None:
    """Return the order of two names, or None if their words do not determine it or contradict each other."""
    first_words = words_in(first_name)
    second_words = words_in(second_name)
    common_words = Counter(first_words) & Counter(second_words)
    first_only_words = Counter(first_words) - common_words
    second_only_words = Counter(second_words) - common_words
    other_words = {*first_words, *second_words} - ORDER_WORDS - {*NOUNS}
    is_first_before = _is_before_by_contrast(first_only_words, second_only_words, are_bare=not other_words)
    if is_first_before is not None:
        is_ordinal = {*first_only_words, *second_only_words} == FIRST_AND_SECOND
        if is_ordinal and {*common_words} & _SIDES_OF_A_PAIR:
            return None  # for example, the names are after_first and after_second
        return _order_of(first_name, second_name, is_first_before, has_time_words=True)
    if {*first_only_words, *second_only_words} & ORDER_WORDS:
        if _is_stem_of(first_words, second_words):
            return Order(first_name, second_name, has_time_words=False)
        if _is_stem_of(second_words, first_words):
            return Order(second_name, first_name, has_time_words=False)
        return None
    if {*common_words} & _SIDES_OF_A_PAIR:
        return None
    is_first_before = _is_before_by_mark(first_words, second_words)
    if is_first_before is None:
        return None
    return _order_of(first_name, second_name, is_first_before, has_time_words=False)


def _order_of(first_name: str, second_name: str, is_first_before: bool, has_time_words: bool) -> Order:
    """Return the order of two names, of which the first is before the second or after it."""
    if is_first_before:
        return Order(first_name, second_name, has_time_words)
    return Order(second_name, first_name, has_time_words)


def _is_before_by_contrast(
    first_only_words: Counter[str], second_only_words: Counter[str], are_bare: bool
) -> bool | None:
    """Compare two names by `CONTRASTS`. Return True if the first name is before the second, and False if it is after.

    Return None if no contrast contains words of both names, or if the words contradict each other.

    Args:
        first_only_words, second_only_words: the words that only the first name or only the second name contains.
        are_bare: whether both names consist of order words and nouns.
    """
    directions = set()
    for contrast in CONTRASTS:
        first_before = not contrast.before.isdisjoint(first_only_words)
        first_after = not contrast.after.isdisjoint(first_only_words)
        second_before = not contrast.before.isdisjoint(second_only_words)
        second_after = not contrast.after.isdisjoint(second_only_words)
        if (first_before and first_after) or (second_before and second_after):
            return None
        is_opposite = (first_before and second_after) or (first_after and second_before)
        if is_opposite and (are_bare or not contrast.needs_bare_names):
            directions.add(first_before)
    return directions.pop() if len(directions) == 1 else None


def _is_stem_of(stem: list[str], words: list[str]) -> bool:
    """Return True if the words of a name are those of `stem` plus words that mean after.

    All nouns are treated as equal: image_file is the stem of edited_file.

    Args:
        words: the words of the name.
    """
    counts = Counter(word for word in words if word not in NOUNS)
    counts.subtract(word for word in stem if word not in NOUNS)
    added_words = {word for word, count in counts.items() if count > 0}
    are_nouns_kept = any(word in NOUNS for word in words) or not any(word in NOUNS for word in stem)
    is_contained = are_nouns_kept and min(counts.values(), default=0) >= 0
    # before and before_edited are a pair, but edited and edited_final are two images after the change
    is_stem_after = not _GENERAL.after.isdisjoint(stem)
    return bool(stem and added_words) and is_contained and added_words <= _GENERAL.after and not is_stem_after


def _is_before_by_mark(first_words: list[str], second_words: list[str]) -> bool | None:
    """Compare two names by their marks: the numbers or letters in which they differ, such as 1 and 2 in t1 and t2.

    Return True if the first name is earlier, and False if it is later. Return None if the names also differ in other
    words, or if the order is uncertain.
    """
    differing_pairs = [pair for pair in zip(first_words, second_words, strict=False) if pair[0] != pair[1]]
    if len(first_words) != len(second_words) or not differing_pairs:
        return None
    if len(differing_pairs) == 1 and {*differing_pairs[0]} == {"a", "b"}:
        return differing_pairs[0] == ("a", "b")
    if not all(word.isdecimal() for word in chain.from_iterable(differing_pairs)):
        return None
    has_later_date = _has_later_date(first_words, second_words)
    if has_later_date is not None:
        return not has_later_date
    if not all(_is_sure_step(*pair) for pair in differing_pairs):
        return None
    directions = {int(first_number) < int(second_number) for first_number, second_number in differing_pairs}
    return directions.pop() if len(directions) == 1 else None


def _is_sure_step(first_number: str, second_number: str) -> bool:
    """Return True for two numbers that show an order: 0 and 1, 1 and 2, or two different years. Either may be first."""
    numbers = sorted((int(first_number), int(second_number)))
    are_years = len(first_number) == len(second_number) == 4 and all(number in YEARS for number in numbers)
    return tuple(numbers) in SMALL_STEPS or (are_years and numbers[0] < numbers[1])


def _has_later_date(first_words: list[str], second_words: list[str]) -> bool | None:
    """Return True if the first of two names has the later date (2019_05, 20190512), False if it has the earlier one.

    Return None unless each name has exactly one date and all other words are equal.
    """
    first_dates = _dates_in(first_words)
    second_dates = _dates_in(second_words)
    if len(first_dates) != 1 or len(second_dates) != 1:
        return None
    (first_date,) = first_dates
    (second_date,) = second_dates
    has_same_form = first_date.context == second_date.context and len(first_date.parts) == len(second_date.parts)
    if not has_same_form or first_date.parts == second_date.parts:
        return None
    return first_date.parts > second_date.parts


@dataclass(frozen=True)
class _DateInName:
    """A date in a name.

    parts: year, month and day, as far as the name contains them.
    context: the words of the name, with an empty word in place of the date.
    """

    parts: tuple[int, ...]
    context: tuple[str, ...]


def _dates_in(words: list[str]) -> list[_DateInName]:
    """Return the valid dates in a name: 2019, 2019_05, 2019_05_12 or 20190512."""
    dates = []
    for start, word in enumerate(words):
        end = start + 1
        if re.fullmatch(r"(19|20)\d{6}", word):
            parts: tuple[int, ...] = (int(word[:4]), int(word[4:6]), int(word[6:]))
        elif len(word) == 4 and word.isdecimal() and int(word) in YEARS:
            while end < len(words) and end < start + 3 and re.fullmatch(r"\d\d", words[end]):
                end += 1
            parts = tuple(map(int, words[start:end]))
        else:
            continue
        year, month, day = (*parts, 1, 1)[:3]
        try:
            date(year, month, day)
        except ValueError:
            continue
        dates.append(_DateInName(parts, (*words[:start], "", *words[end:])))
    return dates


def _find_series(names: Sequence[str], order: Order) -> list[str]:
    """Return the names of the series that contains an ordered pair (t1, t2, t3), or [] if there are only two names."""
    ordinals = FIRST_AND_SECOND & {*words_in(order.before), *words_in(order.after)}
    if order.has_time_words and ordinals != FIRST_AND_SECOND:
        return []
    words = _words_without_marks(order.before)
    series = []
    for name in names:
        belongs_to_series = _has_mark(name, order) or name in order.names
        if belongs_to_series and _words_without_marks(name) == words:
            series.append(name)
    contains_pair = {*order.names} <= {*series}
    return series if len(series) > 2 and contains_pair else []


def _has_mark(name: str, order: Order) -> bool:
    """Return True if a name contains a mark, which shows its position in a series.

    Numbers are marks. Single letters and order words are only marks if the order is not based on words.
    """
    words = words_in(name)
    if any(map(_is_numeral, words)):
        return True
    has_letter = any(re.fullmatch("[a-z]", word) for word in words)
    return not order.has_time_words and (has_letter or not ORDER_WORDS.isdisjoint(words))


def _is_numeral(word: str) -> bool:
    return word.isdecimal() or word in LATER_ORDINALS or word in FIRST_AND_SECOND


def _words_without_marks(name: str) -> list[str]:
    """Return the sorted words of a name, without numerals, single letters, order words and nouns."""
    return sorted(
        word
        for word in words_in(name)
        if not _is_numeral(word) and word not in ORDER_WORDS and word not in NOUNS and not re.fullmatch("[a-z]", word)
    )
