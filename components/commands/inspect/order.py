"""Which of two images is before and which is after, by the names of their columns or folders.

Names are compared by whole words ("t1", "img_after" and "imageAfter" are two words each), never by parts of words, so
that `prediction`, `folder` and `newspaper` say nothing. A word that both names hold decides nothing.

The order is sure in three cases: the names hold two words of opposite sense (`CONTRASTS`); one name is the other with a
word of the sense after (photo, photo_edited); the names are equal but for 0 and 1, 1 and 2, a and b, or two years.
In all other cases a person decides: a word of time beside a word that is not listed proves nothing (damaged, repaired).
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import combinations

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
    """Words of opposite sense. In a contrast that `needs_bare_names`, names may hold nothing else but nouns."""

    before: frozenset[str]
    after: frozenset[str]
    needs_bare_names: bool = False


def _contrast(before: str, after: str, needs_bare_names: bool = False) -> Contrast:
    return Contrast(frozenset(before.split()), frozenset(after.split()), needs_bare_names)


CONTRASTS = (
    _contrast(_GENERAL_BEFORE, _GENERAL_AFTER),
    # The words below have a sense only beside a word of the same contrast. `current` is later than `previous` and
    # earlier than `next`; `last` may be the one before the current one; who repairs begins with the damaged one, who
    # inspects ends with it; a `reference` of a target is before it, a reference beside an output is neither
    _contrast("before first initial init original orig old older oldest previous prev prior earlier past", _PRESENT),
    _contrast("then", "now present today"),
    _contrast(_PRESENT, "next following future subsequent later"),
    _contrast("first initial", "last"),
    _contrast("undamaged intact unharmed", "damaged"),
    _contrast("reference", "target"),
    _contrast("alt", "neu"),  # German; in English, photo_alt is another version of photo
    # zoom_in and zoom_out, or walk_from and walk_to, are no order
    _contrast("in", "out output", needs_bare_names=True),
    _contrast("from", "to", needs_bare_names=True),
)
_GENERAL = CONTRASTS[0]
ORDER_WORDS = frozenset().union(*(contrast.before | contrast.after for contrast in CONTRASTS))

NUMBERS = {"zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5"}
FIRST_AND_SECOND = {"first", "second"}
LATER_ORDINALS = {"third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth"}
# What else a name says of an image; `beforeimg` is `before`
NOUNS = ("images", "image", "imgs", "img", "photo", "picture", "pic", "frame", "path", "filename", "file", "name")
# after_1 and after_2, or edit_1 and edit_2, belong to different pairs; input_1 and input_2 are two images of one pair
_SIDES_OF_A_PAIR = (_GENERAL.before | _GENERAL.after) - {"input", "source", "src"}
# Pictures that describe an image: neither the one before nor the one after
AUXILIARY = {"mask", "depth", "thumb", "thumbnail", "overlay", "heatmap", "diff", "seg", "segmentation", "crop", "flow"}

SMALL_NUMBERS = ((0, 1), (1, 2))
YEARS = range(1900, 2101)


@dataclass(frozen=True)
class Order:
    """Two names in the order of their images in time; `by_words` if both names hold a word of time."""

    before: str
    after: str
    by_words: bool


def words_in(name: str) -> list[str]:
    """The words and numbers of a name in small letters without accents, split at signs, digits and capitals."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c))
    words = []
    for word in map(str.lower, re.findall(r"\d+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_a-zA-Z]+", plain)):
        rests = (rest for noun in NOUNS for rest in (word.removeprefix(noun), word.removesuffix(noun)) if rest != word)
        rest = next((rest for rest in rests if rest in ORDER_WORDS or rest in ("a", "b")), word)
        words.append(NUMBERS.get(rest, rest))
    return words


def choose(names: Sequence[str]) -> list[tuple[str, str]]:
    """The two of these names that are before and after; several such pairs if that is a question.

    The order of `names` never changes which name of a pair is before, only the order of a question's answers.
    """
    without_auxiliary = [name for name in names if not AUXILIARY & {*words_in(name)}]
    candidates = without_auxiliary if len(without_auxiliary) > 1 else list(names)
    orders = [sure for pair in combinations(candidates, 2) for sure in _sure_orders(*pair)]
    best = [sure for sure in orders if sure.by_words] or orders
    if not best:
        return _possible_pairs(candidates)
    pairs: list[tuple[str, str]] = []
    for sure in best:
        pairs += _possible_pairs(_series(candidates, sure) or _pair(sure))
    return list(dict.fromkeys(pairs))


def _possible_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for pair in combinations(names, 2):
        pairs += [_pair(sure) for sure in _sure_orders(*pair)] or [pair, pair[::-1]]
    return pairs


def order(first: str, second: str) -> Order | None:
    """The order of two names; None if their words do not make it sure, or contradict each other."""
    first_words = words_in(first)
    second_words = words_in(second)
    common = Counter(first_words) & Counter(second_words)
    first_own = Counter(first_words) - common
    second_own = Counter(second_words) - common
    has_nouns_only = not ({*first_words, *second_words} - ORDER_WORDS - {*NOUNS})
    is_first = _opposite_senses(first_own, second_own, has_nouns_only)
    if is_first is not None:
        is_ordinal = {*first_own, *second_own} == FIRST_AND_SECOND
        is_of_two_pairs = is_ordinal and bool({*common} & _SIDES_OF_A_PAIR)
        return None if is_of_two_pairs else _ordered(first, second, is_first, by_words=True)
    if {*first_own, *second_own} & ORDER_WORDS:
        if _is_stem_of(first_words, second_words):
            return Order(first, second, by_words=False)
        return Order(second, first, by_words=False) if _is_stem_of(second_words, first_words) else None
    if {*common} & _SIDES_OF_A_PAIR:
        return None
    is_first = _earlier_mark(first_words, second_words)
    return None if is_first is None else _ordered(first, second, is_first, by_words=False)


def _ordered(first: str, second: str, is_first: bool, by_words: bool) -> Order:
    return Order(first, second, by_words) if is_first else Order(second, first, by_words)


def _sure_orders(first: str, second: str) -> list[Order]:
    sure = order(first, second)
    return [] if sure is None else [sure]


def _opposite_senses(first: Counter[str], second: Counter[str], are_bare: bool) -> bool | None:
    """True if the first name's own words are before the second's in a contrast, False if after; None if no contrast
    holds both, or if a name contradicts itself."""
    directions = set()
    for contrast in CONTRASTS:
        senses = [(bool(contrast.before & {*words}), bool(contrast.after & {*words})) for words in (first, second)]
        if (True, True) in senses:
            return None
        if senses[0] != senses[1] and all(map(any, senses)) and (are_bare or not contrast.needs_bare_names):
            directions.add(senses[0][0])
    return directions.pop() if len(directions) == 1 else None


def _is_stem_of(stem: list[str], words: list[str]) -> bool:
    """True if a name is another's without its words of the sense after. Nouns are alike: image_file, edited_file."""
    rest = Counter(word for word in words if word not in NOUNS)
    rest.subtract(word for word in stem if word not in NOUNS)
    added = {word for word, count in rest.items() if count > 0}
    has_equal_nouns = any(word in NOUNS for word in words) or not any(word in NOUNS for word in stem)
    is_contained = has_equal_nouns and min(rest.values(), default=0) >= 0
    # before, before_edited is a pair; edited, edited_final are two images after
    is_one_after = bool({*stem} & _GENERAL.after)
    return bool(stem and added) and is_contained and added <= _GENERAL.after and not is_one_after


def _earlier_mark(first: list[str], second: list[str]) -> bool | None:
    """True if two names are equal but for numbers or letters, and the first's are those of the earlier image; None if
    that is not sure."""
    differing = [(one, other) for one, other in zip(first, second, strict=False) if one != other]
    if len(first) != len(second) or not differing:
        return None
    if len(differing) == 1 and {*differing[0]} == {"a", "b"}:
        return differing[0][0] == "a"
    if not all(word.isdecimal() for pair in differing for word in pair):
        return None
    is_dated = _is_later_date(first, second)
    if is_dated is not None:
        return not is_dated
    directions = {int(one) < int(other) for one, other in differing if _is_sure_step(one, other)}
    is_sure = all(_is_sure_step(one, other) for one, other in differing)
    return directions.pop() if is_sure and len(directions) == 1 else None


def _is_sure_step(one: str, other: str) -> bool:
    """True for 0 and 1, 1 and 2 and for two years, in any order."""
    numbers = sorted((int(one), int(other)))
    are_years = len(one) == len(other) == 4 and all(number in YEARS for number in numbers)
    return tuple(numbers) in SMALL_NUMBERS or (are_years and numbers[0] < numbers[1])


def _is_later_date(first: list[str], second: list[str]) -> bool | None:
    """True if the first of two names has the later date: 2019_05, 20190512. None unless all that differs is in one."""
    dates = [_dates_in(first), _dates_in(second)]
    if len(dates[0]) != 1 or len(dates[1]) != 1:
        return None
    (first_date,) = dates[0]
    (second_date,) = dates[1]
    is_alike = first_date.without == second_date.without and len(first_date.parts) == len(second_date.parts)
    return first_date.parts > second_date.parts if is_alike and first_date.parts != second_date.parts else None


@dataclass(frozen=True)
class _Date:
    """A date of a name: its year, month and day as far as they are there, and the words beside it."""

    parts: tuple[int, ...]
    without: tuple[str, ...]


def _dates_in(words: list[str]) -> list[_Date]:
    dates = []
    for position, word in enumerate(words):
        end = position + 1
        if re.fullmatch(r"(19|20)\d{6}", word):
            parts: tuple[int, ...] = (int(word[:4]), int(word[4:6]), int(word[6:]))
        elif len(word) == 4 and word.isdecimal() and int(word) in YEARS:
            while end < len(words) and end < position + 3 and re.fullmatch(r"\d\d", words[end]):
                end += 1
            parts = tuple(map(int, words[position:end]))
        else:
            continue
        year, month, day = (*parts, 1, 1)[:3]
        try:
            date(year, month, day)
        except ValueError:
            continue
        dates.append(_Date(parts, (*words[:position], "", *words[end:])))
    return dates


def _series(names: Sequence[str], sure: Order) -> list[str]:
    """All names that number images as the two of an order do (t1, t2, t3), if there are more than these two."""
    ordinals = FIRST_AND_SECOND & {*words_in(sure.before), *words_in(sure.after)}
    if sure.by_words and ordinals != FIRST_AND_SECOND:
        return []
    stem = _without_marks(sure.before)
    siblings = [
        name for name in names if _without_marks(name) == stem and (_has_mark(name, sure) or name in _pair(sure))
    ]
    return siblings if len(siblings) > 2 and {*_pair(sure)} <= {*siblings} else []


def _pair(sure: Order) -> tuple[str, str]:
    return (sure.before, sure.after)


def _is_numeral(word: str) -> bool:
    return word.isdecimal() or word in LATER_ORDINALS or word in FIRST_AND_SECOND


def _has_mark(name: str, sure: Order) -> bool:
    words = words_in(name)
    is_lettered = any(re.fullmatch("[a-z]", word) for word in words)
    is_of_time = bool({*words} & ORDER_WORDS)
    return any(map(_is_numeral, words)) or (not sure.by_words and (is_lettered or is_of_time))


def _without_marks(name: str) -> list[str]:
    return sorted(
        word
        for word in words_in(name)
        if not _is_numeral(word) and word not in ORDER_WORDS and word not in NOUNS and not re.fullmatch("[a-z]", word)
    )
