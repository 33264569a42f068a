"""Captions that say that nothing changed: a pair with such captions alone may show the same picture twice."""

import re
from collections.abc import Sequence

from m3diff.records.schemas import NO_CHANGE

# The sentences of LEVIR-CC, CLEVR-Change, Spot-the-Diff, OmniDiff and MiniChange are among them
NOTHING_CHANGED = re.compile(
    r"""
    \b(?:no|zero|without(?:\ any)?|not\ (?:see|notice|find|spot|detect)\ any|n't\ (?:see|notice|find|spot|detect)\ any)
        \ (?:[\w-]+\ ){0,3}(?:changes?|differences?|differs?|alterations?|modifications?|edits?|movements?)\b
    | \b(?:nothing|none\ of\ (?:it|them))\ (?:[\w']+\ ){0,3}
        (?:changed|different|differs|altered|moved|happened|edited|new)\b
    | \b(?:not|n't|hardly|never)\ (?:[\w]+\ ){0,2}(?:changed?|differ|differs|differed|altered|any\ different)\b
    | \b(?:unchanged|identical|no\ change|no\ difference)\b
    | \bthe\ same\ (?:scene|image|picture|photo|view|place)\b
    | ^same\ (?:scene|image|picture|photo|view)
    | \b(?:is|are|be|looks?|seems?|remains?|remained|stays?|stayed|appears?|kept|left)\ (?:[\w]+\ ){0,3}
        (?:the\ same|alike|as\ (?:it\ was|they\ were|before))(?=$|[.,;!)]|\ (?:as|in|with|on)\b)
    | ^(?:same|none|n/?a)$
    """,
    re.VERBOSE,
)

# What tells of a change beside: "nothing else changed", "identical but for the lamp"
EXCEPT = re.compile(
    r"\b(?:else|other|others|otherwise|except|besides?|but|however|apart|only|rest|while|although|though|whereas)\b"
)


def says_nothing_changed(caption: str) -> bool:
    """True if an English sentence says of the whole pair that nothing changed.

    Other languages are not known: the option `no_change` of an entry, or the change type `none`, says it there.
    """
    plain = " ".join(caption.casefold().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").split())
    plain = re.sub(r"n't\b", " n't", plain)
    return bool(NOTHING_CHANGED.search(plain.strip(" .!\"'"))) and not EXCEPT.search(plain)


def tell_a_change(references: Sequence[str] | None, change_types: Sequence[str] | None) -> bool:
    """True if the captions of a pair say that something changed: one of them does, though others may deny it.

    Empty captions say nothing, and a pair whose only change type is `none` has no change whatever its captions say.
    """
    if list(change_types or ()) == [NO_CHANGE]:
        return False
    return any(text.strip() and not says_nothing_changed(text) for text in references or ())
