"""Recognize captions that say that nothing changed.

If all captions of a pair say so, its two images may be the same picture.
"""

import re
from collections.abc import Sequence

from m3diff.records.schemas import NO_CHANGE

CHANGE = r"(?:changes?|differences?|differs?|alterations?|modifications?|edits?|movements?)"
CHANGED = r"(?:changed|different|differs?|altered|modified|moved|happened|occurred|edited|new|added|removed|missing)"
IMAGES = r"(?:scenes?|images?|pictures?|photos?|photographs?|views?|places?)"

# "There is no difference", "nothing has changed". DENIED_CHANGE and SAMENESS cover the sentences of LEVIR-CC,
# CLEVR-Change, Spot-the-Diff, OmniDiff and MiniChange
DENIED_CHANGE = re.compile(
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
# "The scenes are identical", "everything stayed the same"
SAMENESS = re.compile(
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

# Sentences that deny sameness, or in which becoming the same is the change: "not identical", "no longer the same", "now
# identical"
DENIED_SAMENESS = re.compile(
    r"\b(?:not|n't|never|nothing|none|longer|no [\w-]+(?: [\w-]+)? (?:is|are)) (?:[\w-]+ ){0,4}"
    r"(?:(?:the )?same|identical|alike|unchanged|as (?:it|they))\b"
    r"|\bnow (?:the )?(?:same|identical|alike)\b(?! as before)"
)

# Words that suggest a change elsewhere in the sentence: "nothing else changed", "identical but for the lamp"
EXCEPTION = re.compile(
    r"\b(?:else|other|others|otherwise|except|besides?|but|however|apart|only|rest|while|although|though|whereas)\b"
)

# Words that describe a change: "a new house", "the car moved"
EVENT = re.compile(
    r"\b(?:now(?! looks?| seems?| no\b)|new|more|another|additional|extra|gone|missing"
    r"|(?:dis)?appear(?:s|ed)?\b(?! to be| the same)|vanished"
    r"|added|removed|(?:re)?built|constructed|demolished|destroyed|replaced|moved|shifted|turned|rotated|planted|widened"
    r"|extended|expanded|converted|became|becomes?|mirrored|flipped|darker|brighter)\b"
)
NEGATION = re.compile(r"\b(?:no|not|n't|never|nothing|none|neither|nor|without|zero)\b")

# A clause begins after a punctuation mark, or with a new subject after "and"
SUBJECT = (
    r"(?:a|an|the|some|both|one|two|three|four|five|several|many|new|more|another|there|in|on|at|now|its|his|her|their"
    r"|he|she|it|\d+)"
)
CLAUSE_START = re.compile(rf"[.,;:!?]+ |\band (?={SUBJECT}\b)")
LEADING_SUBJECT = re.compile(rf"(?:and |then )*{SUBJECT}\b")
INSTRUCTION = re.compile(
    r"(?:please )?(?:make|add|remove|delete|insert|change|replace|turn|put|move|swap)\b(?! (?:no|nothing)\b)"
)


def says_nothing_changed(caption: str) -> bool:
    """Return whether an English caption says that nothing changed in the whole pair.

    Other languages are not supported. For them, mark such pairs with the dataset option `no_change` or the change type
    `none`.
    """
    plain = " ".join(caption.casefold().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").split())
    plain = re.sub(r"n't\b", " n't", plain).replace("cannot", "can not").strip(" .!\"'")
    plain = re.sub(r'"[^"]*"', "", plain)  # text on a sign or a banner
    if EXCEPTION.search(plain) or DENIED_SAMENESS.search(plain):
        return False
    if not (DENIED_CHANGE.search(plain) or SAMENESS.search(plain)):
        return False
    clauses = [clause.strip() for clause in CLAUSE_START.split(plain)]
    return not any(_describes_event(clause) for clause in clauses)


def _describes_event(clause: str) -> bool:
    """Return whether a clause describes a change.

    This is an instruction, or a clause with a subject and a word such as "moved", but without a negation.
    """
    if INSTRUCTION.match(clause):
        return True
    has_subject = LEADING_SUBJECT.match(clause) is not None
    return has_subject and EVENT.search(clause) is not None and not NEGATION.search(clause)


def captions_describe_change(references: Sequence[str] | None, change_types: Sequence[str] | None) -> bool:
    """Return whether at least one caption of a pair says that something changed, even if other captions deny it.

    Empty captions are ignored. If the only change type of the pair is `none`, return False, whatever the captions say.
    """
    if list(change_types or ()) == [NO_CHANGE]:
        return False
    captions = [text for text in references or () if text.strip()]
    return not all(says_nothing_changed(caption) for caption in captions)
