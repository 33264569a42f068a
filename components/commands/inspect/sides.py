"""The order of two images, by the names of their columns, folders and files.

Names are compared by whole words ("t1", "img_after" and "imageAfter" are two words each), never by parts of words, so
that `prediction`, `folder` and `newspaper` tell nothing. A word that both names hold decides nothing.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import combinations
from typing import NamedTuple

WORDS = {
    0: "before bef pre prior original orig source src start starting begin beginning first initial init old older "
    "oldest previous prev earlier early past then input in unedited unchanged undamaged from vorher alt avant ancien "
    "antes до 前 之前 变化前 変更前",
    1: "current now present today",
    2: "after aft post edited edit target tgt dest dst destination end ending final finish second new newer newest "
    "later subsequent recent latest output out result modified changed updated altered manipulated retouched damaged "
    "to nachher neu apres nouveau despues depois после 后 後 之后 变化后 変更後",
    3: "next future following",
}
RANK = {word: rank for rank, words in WORDS.items() for word in words.split()}
"""Place in time by word. `last` is the later of two beside `first`, and says nothing elsewhere (last year)."""

NUMBERS = {"zero": "0", "one": "1", "two": "2", "three": "3"}
ORDINALS = {"st", "nd", "rd", "th"}
NOUNS = (
    "images",
    "image",
    "imgs",
    "img",
    "photo",
    "picture",
    "pic",
    "frame",
    "path",
    "filename",
    "file",
    "name",
    "url",
)
"""What else a name says of an image; `beforeimg` is `before`."""

AUXILIARY = {"mask", "depth", "thumb", "thumbnail", "overlay", "heatmap", "diff", "seg", "segmentation", "crop", "flow"}
"""Pictures that belong to an image and are none of the two."""

ROWS_FOR_NUMBERS = 3
"""Rows whose file names must hold the same two numbers before these count as an order."""


class Order(NamedTuple):
    """`first` says whether the first of two names is the image before; `sure` where both names say so by a word."""

    first: bool
    sure: bool


def words_in(name: str) -> list[str]:
    """The words and numbers of a name in small letters without accents, split at signs, digits and capitals."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c))
    found = re.findall(r"\d+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_a-zA-Z]+", plain)
    return [_without_noun(word.lower()) for word in found if word.lower() not in ORDINALS]


def _without_noun(word: str) -> str:
    rests = [word.removeprefix(noun) for noun in NOUNS] + [word.removesuffix(noun) for noun in NOUNS]
    rest = next((rest for rest in rests if rest != word and (rest in RANK or rest in ("a", "b"))), word)
    return NUMBERS.get(rest, rest)


def order(first: Sequence[str], second: Sequence[str], numbers: bool = True) -> Order | None:
    """The order of two images by the words of their names; None where these tell none, or contradict themselves.

    Args:
        numbers: two numbers are an order, too.
    """
    common = Counter(first) & Counter(second)
    left, right = (list((Counter(words) - common).elements()) for words in (first, second))
    ranks = [{RANK[word] for word in own if word in RANK} for own in (left, right)]
    for own, other in ((0, 1), (1, 0)):
        if "last" in (left, right)[own]:
            if 0 not in ranks[other]:
                return None
            ranks[own].add(2)
    if max(map(len, ranks)) > 1:
        return None
    if ranks[0] and ranks[1]:
        (one,), (two,) = ranks
        return None if one == two else Order(one < two, True)
    if ranks[0] or ranks[1]:  # photo, photo_edited
        (rank,) = ranks[0] or ranks[1]
        return None if rank == 1 else Order((rank == 0) == bool(ranks[0]), False)
    return _numbered(first, second, left + right) if numbers or {*left, *right} == {"a", "b"} else None


def _numbered(first: Sequence[str], second: Sequence[str], different: Sequence[str]) -> Order | None:
    """By `a` and `b`, by one number that differs, or by dates that begin with the year."""
    if sorted(different) == ["a", "b"]:
        return Order(first.count("a") > second.count("a"), False)
    if not different or not all(word.isdecimal() for word in different):
        return None
    one, two = ([int(word) for word in words if word.isdecimal()] for words in (first, second))
    differ = sum(a != b for a, b in zip(one, two, strict=False))
    if len(one) != len(two) or (differ > 1 and not all(1900 <= numbers[0] < 2200 for numbers in (one, two))):
        return None
    return Order(one < two, False) if one != two else None


def order_of_columns(first: str, second: str, values: tuple[Iterable[object], Iterable[object]]) -> Order | None:
    """The order of two columns by their names and by what all file names in them have in common; None where neither
    tells, or the two disagree."""
    by_name = order(words_in(first), words_in(second))
    paths = [[value for value in column if isinstance(value, str)] for column in values]
    by_value = None
    if all(paths):
        one, two = map(_constant, paths)
        by_value = order(one, two, numbers=min(map(len, paths)) >= ROWS_FOR_NUMBERS)
    if by_name is None or by_value is None:
        return by_name or by_value
    return by_name if by_name.first == by_value.first or not by_value.sure else None


def _constant(paths: Sequence[str]) -> list[str]:
    """The words that every path holds, in their order."""
    words = [words_in(re.sub(r"\.\w+$", "", path)) for path in paths]
    common = reduce(lambda found, each: found & Counter(each), words, Counter(words[0]))
    return [word for word in words[0] if common[word] > 0]


def choose(names: Sequence[str], values: Sequence[Sequence[object]]) -> list[tuple[str, str]]:
    """The two of these columns that are before and after; several such pairs where that is a question.

    Args:
        values: what the columns hold, a list each.
    """
    held = dict(zip(names, values, strict=True))
    plain = [name for name in names if not AUXILIARY & {*words_in(name)}]
    names = plain if len(plain) > 1 else names
    found: dict[tuple[str, str], bool] = {}
    for pair in combinations(names, 2):
        if told := order_of_columns(*pair, (held[pair[0]], held[pair[1]])):
            found[pair if told.first else pair[::-1]] = told.sure
    sure = [pair for pair, both in found.items() if both]
    like = [pair for pair in sure if _rest(pair[0]) == _rest(pair[1])]
    if best := like or sure or list(found):
        return best
    return [ordered for pair in combinations(names, 2) for ordered in (pair, pair[::-1])]


def _rest(name: str) -> Counter[str]:
    return Counter(word for word in words_in(name) if word not in RANK)


def called_as_sides(names: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of these names, before first, that say so by a word each, or by a number or letter behind a noun."""
    found = {}
    for pair in combinations(names, 2):
        one, two = map(words_in, pair)
        told = order(one, two)
        if told and (told.sure or {*one} & {*two} & {*NOUNS} or {*one, *two} == {"a", "b"}):
            found[pair if told.first else pair[::-1]] = told.sure
    return [pair for pair, sure in found.items() if sure] or list(found)
