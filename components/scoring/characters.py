"""Captions in scripts that put no spaces between words: which they are, and their tokens.

A tokenizer of words takes a whole sentence of Chinese, Japanese or Thai for one word, so a caption scores 0 unless it
is identical. Here each character of such a script is a token, as in sacrebleu's `zh` tokenizer.
Words and numbers of other scripts stay words: "新增了3栋building" has six tokens. Korean separates words by spaces.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

# Blocks of Unicode
SCRIPTS = {
    "Thai, Lao": "\u0e00-\u0eff",
    "Tibetan, Burmese": "\u0f00-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f",
    "Khmer": "\u1780-\u17ff\u19e0-\u19ff",
    "Tai Le, Tai Lue, Tai Tham, Tai Viet": "\u1950-\u19df\u1a20-\u1aaf\uaa80-\uaadf",
    "Javanese, Balinese": "\ua980-\ua9df\u1b00-\u1b7f",
    "Yi": "\ua000-\ua4cf",
    "Chinese": "\u2e80-\u2fdf\u3005\u3007\u3021-\u3029\u3038-\u303b\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff",
    "Chinese, later additions": "\U00020000-\U000323af",
    "Japanese": "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f\U0001b000-\U0001b16f",
    "Bopomofo": "\u3100-\u312f\u31a0-\u31bf",
}
CHARACTER = re.compile(f"[{''.join(SCRIPTS.values())}]")
WORD = re.compile(r"\w+")
# Variation selectors, and with the category Cf zero-width spaces, change how a text looks and not what it says
INVISIBLE = re.compile("[\u180b-\u180d\ufe00-\ufe0f\U000e0100-\U000e01ef]")
# From this share of references on, all captions of a set are counted by characters. Below it, as for an English set
# that quotes a sign, published scores of words stay comparable.
LEAST_SHARE = 0.1

Tokenizer = Callable[[Iterable[str]], Mapping[str, str]]  # distinct texts -> tokens joined by spaces


class Piece(NamedTuple):
    """A part of a caption: one character with its marks, or text of scripts that separate words."""

    text: str
    is_character: bool


def pieces_of(text: str) -> list[Piece]:
    """The characters of scripts without spaces, and the runs of other text between them, in their order.

    Punctuation of these scripts is left out, as the PTB tokenizer's caller leaves out that of English. Full-width
    letters and digits become ordinary ones.
    """
    normal = INVISIBLE.sub("", unicodedata.normalize("NFKC", text))
    pieces: list[Piece] = []
    for sign in normal:
        category = unicodedata.category(sign)
        if category == "Cf":
            continue
        is_character = CHARACTER.match(sign) is not None
        follows = bool(pieces) and pieces[-1].is_character == is_character
        if is_character and category.startswith("P"):
            pieces.append(Piece(" ", is_character=False))
        elif follows and (not is_character or category.startswith("M")):
            pieces[-1] = Piece(pieces[-1].text + sign, is_character)
        else:
            pieces.append(Piece(sign, is_character))
    return pieces


def is_without_spaces(text: str) -> bool:
    """True if a text has at least as many characters of scripts without spaces as words of other scripts."""
    if CHARACTER.search(text) is None:
        return False
    pieces = pieces_of(text)
    characters = sum(piece.is_character for piece in pieces)
    words = sum(len(WORD.findall(piece.text)) for piece in pieces if not piece.is_character)
    return characters > 0 and characters >= words


def count_without_spaces(references: Iterable[str]) -> tuple[int, int]:
    """How many references are written without spaces, and how many are not empty."""
    texts = [reference for reference in references if reference.strip()]
    return sum(map(is_without_spaces, texts)), len(texts)


def tokenise_characters(texts: Iterable[str], tokenise: Tokenizer) -> dict[str, str]:
    """The tokens of every text joined by spaces: characters by themselves, other text as `tokenise` cuts it, without
    tokens that are punctuation alone."""
    pieces = {text: pieces_of(text) for text in texts}
    others = {piece.text for of_text in pieces.values() for piece in of_text if not piece.is_character}
    words = tokenise(sorted(others))
    tokens = {}
    for text, of_text in pieces.items():
        parts = [piece.text if piece.is_character else words[piece.text] for piece in of_text]
        tokens[text] = " ".join(token for token in " ".join(parts).split() if not is_punctuation(token))
    return tokens


def is_punctuation(token: str) -> bool:
    return all(unicodedata.category(sign).startswith("P") for sign in token)


def spaced(text: str) -> str:
    """The text with a space around each character of a script without spaces; other texts as they are."""
    if CHARACTER.search(text) is None:
        return text
    return " ".join(piece.text for piece in pieces_of(text))
