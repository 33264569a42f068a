"""Captions that say that nothing changed: a pair with such captions alone may show the same picture twice."""

import re
from collections.abc import Sequence

from m3diff.records.schemas import NO_CHANGE

CHANGE = r"(?:changes?|differences?|differs?|alterations?|modifications?|edits?|movements?)"
CHANGED = r"(?:changed|different|differs?|altered|modified|moved|happened|occurred|edited|new|added|removed|missing)"
IMAGES = r"(?:scenes?|images?|pictures?|photos?|photographs?|views?|places?)"

# A change that is denied. The sentences of LEVIR-CC, CLEVR-Change, Spot-the-Diff, OmniDiff and MiniChange are among
# these and those of SAME
DENIED = re.compile(
    rf"""
    \b(?:no|zero|without(?:\ any)?|(?:barely|hardly|scarcely|n't|not)\ (?:(?:see|notice|find|spot|detect)\ )?any)
        \ (?:[\w-]+\ ){{0,3}}{CHANGE}\b
    | \b(?:nothing|none\ of\ (?:it|them))\ (?:[\w']+\ ){{0,3}}{CHANGED}\b
    | \bno\ (?:[\w-]+\ ){{1,4}}(?:has|have|was|were)\ (?:been\ )?{CHANGED}\b
    | \bnot\ a\ single\ (?:[\w-]+\ ){{1,3}}{CHANGED}\b
    | \bno\ new\ \w+
    | \bneither\ (?:[\w-]+\ ){{0,3}}(?:changed|differs?)\b
    | \b(?:not|n't|hardly|never)\ (?:[\w]+\ ){{0,2}}(?:changed?|differ|differs|differed|altered|any\ different)\b
    | \b{CHANGE}\ (?:is|are)\ (?:negligible|imperceptible)\b
    """,
    re.VERBOSE,
)
SAME = re.compile(
    rf"""
    \b(?:unchanged|identical|indistinguishable)\b
    | \bthe\ same\ (?:scene|image|picture|photo|view|place)\b
    | ^same\ (?:scene|image|picture|photo|view)
    | \b(?:is|are|be|looks?|seems?|remains?|remained|stays?|stayed|appears?|kept|left)\ (?:[\w]+\ ){{0,3}}
        (?:the\ same|alike|as\ (?:it\ was|they\ were|before))(?=$|[.,;:!)]|\ (?:as|in|with|on)\b)
    | \b(?:{IMAGES}|both)\ (?:all\ )?(?:match|are\ (?:exactly\ )?(?:same|equal))\b
    | ^(?:same|none|n/?a)$
    """,
    re.VERBOSE,
)

# Sameness that is denied, or that is new: "not identical", "no longer the same", "now identical"
NOT_SAME = re.compile(
    r"\b(?:not|n't|never|nothing|none|longer|no [\w-]+(?: [\w-]+)? (?:is|are)) (?:[\w-]+ ){0,4}"
    r"(?:(?:the )?same|identical|alike|unchanged|as (?:it|they))\b"
    r"|\bnow (?:the )?(?:same|identical|alike)\b(?! as before)"
)

# What tells of a change beside: "nothing else changed", "identical but for the lamp"
EXCEPT = re.compile(
    r"\b(?:else|other|others|otherwise|except|besides?|but|however|apart|only|rest|while|although|though|whereas)\b"
)

# Words of a change
EVENT = re.compile(
    r"\b(?:now(?! looks?| seems?| no\b)|new|more|another|additional|extra|gone|missing"
    r"|(?:dis)?appear(?:s|ed)?\b(?! to be| the same)|vanished"
    r"|added|removed|(?:re)?built|constructed|demolished|destroyed|replaced|moved|shifted|turned|rotated|planted|widened"
    r"|extended|expanded|converted|became|becomes?|mirrored|flipped|darker|brighter)\b"
)
NEGATED = re.compile(r"\b(?:no|not|n't|never|nothing|none|neither|nor|without|zero)\b")

# The start of a clause within a caption: after a punctuation mark, or a new subject after "and"
SUBJECT = (
    r"(?:a|an|the|some|both|one|two|three|four|five|several|many|new|more|another|there|in|on|at|now|its|his|her|their"
    r"|he|she|it|\d+)"
)
CLAUSES = re.compile(rf"[.,;:!?]+ |\band (?={SUBJECT}\b)")
OWN_SUBJECT = re.compile(rf"(?:and |then )*{SUBJECT}\b")
INSTRUCTION = re.compile(
    r"(?:please )?(?:make|add|remove|delete|insert|change|replace|turn|put|move|swap)\b(?! (?:no|nothing)\b)"
)


def says_nothing_changed(caption: str) -> bool:
    """True if an English sentence says of the whole pair that nothing changed.

    Other languages are not known: the option `no_change` of an entry, or the change type `none`, says it there.
    """
    plain = " ".join(caption.casefold().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").split())
    plain = re.sub(r"n't\b", " n't", plain).replace("cannot", "can not").strip(" .!\"'")
    plain = re.sub(r'"[^"]*"', "", plain)  # what a sign or a banner says
    if EXCEPT.search(plain) or NOT_SAME.search(plain):
        return False
    clauses = [clause.strip() for clause in CLAUSES.split(plain)]
    return bool(DENIED.search(plain) or SAME.search(plain)) and not any(map(_tells_an_event, clauses))


def _tells_an_event(clause: str) -> bool:
    if INSTRUCTION.match(clause):
        return True
    return bool(EVENT.search(clause)) and bool(OWN_SUBJECT.match(clause)) and not NEGATED.search(clause)


def tell_a_change(references: Sequence[str] | None, change_types: Sequence[str] | None) -> bool:
    """True if the captions of a pair say that something changed: one of them does, though others may deny it.

    Empty captions say nothing, and a pair whose only change type is `none` has no change whatever its captions say.
    """
    if list(change_types or ()) == [NO_CHANGE]:
        return False
    return any(text.strip() and not says_nothing_changed(text) for text in references or ())
