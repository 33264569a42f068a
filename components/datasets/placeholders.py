"""Texts that stand for a missing caption: "nan", "todo", "no description available", or only numbers or punctuation."""

import re

# In lowercase and without surrounding quotes, brackets and punctuation, as `is_placeholder` compares them
TEXTS_FOR_NO_CAPTION = {
    "nan", "none", "null", "nil", "n/a", "n.a", "na", "nat", "undefined", "missing", "empty", "blank", "unknown",
    "unlabeled", "tbd", "todo", "fixme", "test", "caption", "true", "false", "no caption", "no captions",
    "no description", "not available", "not applicable", "no answer", "not annotated", "string", "placeholder",
    "dummy", "asdf", "qwerty", "%s",
}  # fmt: skip
BEGINNINGS_OF_PLACEHOLDERS = ("lorem ipsum", "todo", "fixme", "tbd", "xxx")
ENDINGS_OF_PLACEHOLDERS = (
    "placeholder", "caption", "captions", "text", "texts", "description", "descriptions", "string", "only", "here",
    "available", "unavailable", "provided", "given", "found",
    "added", "annotated", "written", "done", "determined", "filled", "filled in", "pending", "missing", "soon",
)  # fmt: skip
# A placeholder, in lowercase, for a caption that has not been written yet
PLACEHOLDER_TEXT = re.compile(
    r"""(?:this\ is\ )?(?:just\ )?(?:an?\ |the\ )?(?:
        placeholder(?:\ (?:captions?|texts?|descriptions?|only)|\ for\ (?:an?\ |the\ |your\ )?(?:[\w-]+\ ){0,3}
            (?:captions?|texts?|descriptions?))?
        | (?:example|sample|dummy|default|test)\ (?:caption|description|text|string)
        | caption\ placeholder )
    | lorem\ ipsum\b.*
    | (?:insert|enter|put|type|add|write)\ (?:an?\ |your\ |the\ )?(?:\w+\ ){0,2}(?:captions?|descriptions?)(?:\ here)?
    | your\ (?:\w+\ )?(?:caption|text|description)(?:\ (?:goes\ )?here)?
    | (?:the\ )?(?:caption|text|description)s?\ (?:
        goes\ here | here | to\ be\ (?:added|written|filled(?:\ in)?) | pending | missing | coming\ soon )
    | (?:todo|fixme|tbd|xxx)\b\s?[:-].{0,80} | to\ be\ (?:added|annotated|done|determined|filled(?:\ in)?)
    | coming\ soon | (?:insert|enter|your)\ text(?:\ here)? | x{2,12}
    | (?:no|missing)\ (?:captions?|descriptions?|texts?|annotations?)
        (?:\ (?:is\ |are\ )?(?:available|provided|given|found))?
    | (?:captions?|descriptions?|texts?)\ (?:is\ |are\ )?
        (?:unavailable|not\ (?:yet\ )?(?:available|provided|given|found))""",
    re.VERBOSE | re.DOTALL,
)


def is_placeholder(text: str) -> bool:
    """Return True if a text is not a caption: it has no letters, is a placeholder, or means that a value is missing."""
    plain_text = text.strip("\"'`()[]{}<>.!*#$ \t\r\n").casefold()
    has_letter = re.search(r"[^\W\d_]", plain_text) is not None
    return not has_letter or plain_text in TEXTS_FOR_NO_CAPTION or _matches_placeholder_pattern(plain_text)


def _matches_placeholder_pattern(plain_text: str) -> bool:
    # Checking the beginning and end rules out most captions faster than the pattern does
    is_candidate = plain_text.endswith(ENDINGS_OF_PLACEHOLDERS) or plain_text.startswith(BEGINNINGS_OF_PLACEHOLDERS)
    return is_candidate and PLACEHOLDER_TEXT.fullmatch(plain_text) is not None
