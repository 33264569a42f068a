"""Detect captions in scripts without spaces between words, and split them into characters.

A word tokenizer treats a whole sentence in Chinese, Japanese or Thai as one word, so a caption scores 0 unless it is
identical to a reference. Here each character of such a script is a token, as in sacrebleu's `zh` tokenizer. Words and
numbers in other scripts stay whole: "新增了3栋building" has six tokens. Korean is not affected because it uses spaces.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

# Unicode blocks
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
# Variation selectors. Like characters of the category Cf, they change how a text looks but not what it says
INVISIBLE = re.compile("[\u180b-\u180d\ufe00-\ufe0f\U000e0100-\U000e01ef]")
# If at least this share of a protocol's references is in scripts without spaces, all its captions are scored by
# characters. If the share is smaller, for example because an English caption quotes a sign, scores are computed on
# words and stay comparable with published scores
MIN_SHARE_WITHOUT_SPACES = 0.1

Tokenizer = Callable[[Iterable[str]], Mapping[str, str]]  # distinct texts -> tokens joined by spaces


class Piece(NamedTuple):
    """A part of a caption: one character with its combining marks, or text in scripts that separate words."""

    text: str
    is_character: bool


class ScriptCounts(NamedTuple):
    """The number of texts in scripts without spaces between words, and the number of all texts that are not empty."""

    without_spaces: int
    texts: int


def split_into_pieces(text: str) -> list[Piece]:
    """Split a text into single characters of scripts without spaces and the other text between them, in order.

    Punctuation of these scripts becomes a space, because scores also ignore English punctuation. Full-width letters and
    digits become ordinary ones.
    """
    normal_text = INVISIBLE.sub("", unicodedata.normalize("NFKC", text))
    pieces: list[Piece] = []
    for sign in normal_text:
        category = unicodedata.category(sign)
        if category == "Cf":
            continue
        is_character = CHARACTER.match(sign) is not None
        follows_its_kind = bool(pieces) and pieces[-1].is_character == is_character
        is_mark = category.startswith("M")  # belongs to the character before it
        if is_character and category.startswith("P"):
            pieces.append(Piece(" ", is_character=False))
        elif follows_its_kind and (is_mark or not is_character):
            pieces[-1] = Piece(pieces[-1].text + sign, is_character)
        else:
            pieces.append(Piece(sign, is_character))
    return pieces


def is_without_spaces(text: str) -> bool:
    """Return True if a text has at least as many characters of scripts without spaces as words in other scripts."""
    if CHARACTER.search(text) is None:
        return False
    pieces = split_into_pieces(text)
    characters = sum(piece.is_character for piece in pieces)
    words = sum(len(WORD.findall(piece.text)) for piece in pieces if not piece.is_character)
    return characters > 0 and characters >= words


def count_scripts(references: Iterable[str]) -> ScriptCounts:
    """Count the references that are in scripts without spaces, and all references. Empty references do not count."""
    texts = [reference for reference in references if reference.strip()]
    return ScriptCounts(without_spaces=sum(map(is_without_spaces, texts)), texts=len(texts))


def tokenise_characters(texts: Iterable[str], tokenise: Tokenizer) -> dict[str, str]:
    """Return the tokens of each text joined by spaces, without punctuation tokens.

    Args:
        tokenise: function that splits the text between characters into words.
    """
    pieces_by_text = {text: split_into_pieces(text) for text in texts}
    texts_of_words: set[str] = set()
    for pieces in pieces_by_text.values():
        texts_of_words |= {piece.text for piece in pieces if not piece.is_character}
    words = tokenise(sorted(texts_of_words))
    tokens_by_text = {}
    for text, pieces in pieces_by_text.items():
        parts = [piece.text if piece.is_character else words[piece.text] for piece in pieces]
        tokens = " ".join(parts).split()
        tokens_by_text[text] = " ".join(token for token in tokens if not is_punctuation(token))
    return tokens_by_text


def is_punctuation(token: str) -> bool:
    """Return True if a token consists only of punctuation."""
    return all(unicodedata.category(sign).startswith("P") for sign in token)


def space_out_characters(text: str) -> str:
    """Return a text with spaces around each character of scripts without spaces. Other texts are not changed."""
    if CHARACTER.search(text) is None:
        return text
    return " ".join(piece.text for piece in split_into_pieces(text))
