r"""Marks of a model, its tokenizer or its prompt inside captions: "<|im_end|>", "ASSISTANT:", JSON, "I'm sorry, ...".

Scorers read marks as words, so scores drop for a reason that no score shows. Captions are counted, never changed.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

MOST, SOME = 0.5, 0.05
"""Shares of captions above which a mark that an ordinary caption may hold is reported."""
SAME, OPENER = 0.8, 3
"""Share of captions that are the same, or begin with the same words; and how many words these are."""
CUT = 0.15
"""Share of captions ending in an article, a preposition or a comma above which they were truncated."""
READ = 1_000
"""Characters at each end of a caption that are searched."""
FEW = 5
"""Captions that a file needs before its habits are judged."""
COPIES, PHRASE_COPIES, LONGEST_PHRASE = 5, 4, 40
"""Consecutive copies that make a loop: of one word, and of a phrase of up to 40 words."""

MARKS = {
    "reasoning": r"""
    </?(?:think|thinking|thought|reasoning|analysis|reflection|scratchpad)> | ◁/?think▷ | \[/?THINK\]
  | assistantfinal | ^\s*(?:thoughts?|thinking|reasoning|step\ 1)\s*: | <\|channel\|>
""",
    "special tokens or tags": r"""
    <\|?[^<>\s|]{1,40}\|> | <[|/]?\w{1,20}\|?\s*\Z | <｜[^<>]{1,40}｜> | ◁/?[^◁▷]{1,20}▷ | <{2}/?SYS>{2}
  | </?(?!/?(?:think|thought|reason|analysis|scratch))[a-z_][\w.:/-]{0,30}(?:[ =][^<>]{0,100})?/?> | <0x[0-9a-f]{2}>
  | (?-i:\[/?[A-Z][A-Z_]{2,}\d*\]) | \[/?(?:start|end|pad|cls|sep|unk|eos|bos|sos|mask|inst|image|img)\]
  | \b(?:startseq|endseq|im_start|im_end|endoftext)\b | (?-i:\b(?:EOS|BOS|SOS|PAD|SEP|CLS|UNK)\b) | \b[be]os\ *\Z
  | <\ /?\ ?(?:s|start|end|pad|unk|eos|bos|sep|cls|mask|image)\ > | \bunk\ unk\b | \bpad\ pad\b
""",
    "marks of subwords": r"""
    (?:^|\s)\#\#\w | [▁⁇\ufffd] | (?-i:[ĠĊ]) | \w@@(?=\s|$) | (?:^|\s)@@\w
""",
    "a role or a prompt": r"""
    (?-i:\b(?:USER|ASSISTANT|HUMAN|SYSTEM|User|Assistant|Human|System))\s?:
  | ^\W*(?:user|assistant|human|system|ai|bot|gpt|model|chatbot|vicuna|question|instruction|prompt)\s?:
  | \A\s*(?:assistant|user|model|system)\s*\n | \#{2,}\s?\w[\w ]{0,20}: | \bquestion\s?:.*\banswer\s?:
  | \b(?:short|final|my|correct)\ answer\s?: | (?:^|\s)Q\s?:.*(?:\s)A\s?:
  | ^\W*(?:what|which|how|where|can\ you|could\ you|do\ you|does)\b[^?]{0,100}
    \b(?:images?|pictures?|photos?|different|differences?|changes?|changed)\b[^?]{0,100}\?(?=\s*\S)
  | ^\W*(?:please\ )?(?:describe|compare|identify|explain|summari[sz]e)\ (?:the|what|all|any|how|these|both|in)\b
    [^.]{0,120}\b(?:images?|pictures?|photos?|differences?|changes?|changed)\b
  | \b(?:answer|respond)\ (?:the\ question|with\ one|in\ one|using|briefly|concisely) | \bhelpful\ assistant\b
""",
    "JSON or another literal": r"""
    ^\s*[\[{(]\s*["'{\[] | ^\s*b?(["'])?\{.{0,40}: | ^\s*\{\s*\w+\s*: | ["']\w+["']\s*:\s*["'\[{]
  | ^\s*[bru]{1,2}(?:'.*'|".*")\s*$ | ^\s*(?:array|tensor|list|tuple|dict|set|np\.\w+)\(
  | ^\s*[A-Z]\w+\(\w+= | \b(?:caption|prediction|answer|text)=["']
  | \A\s*(?:\[.*\]|\{.*\}|\(.*\))\s*\Z | [(\[](?:confidence|score|log_?prob\w*)\s?[:=]
""",
    "Markdown, LaTeX or HTML": r"""
    ``` | \*\*[^*\s] | ^\s*\#{1,6}\s+\w | ^\s*[*•●▪‣]\s | ^\s*-\s+\w | ^\s*1[.)]\s+\w | \\[a-zA-Z]+\{ | \\[()\[\]]
  | (?<![\w_])__[^_\s] | \]\(https?: | ^\s*\|.*\|\s*$ | ^\s*>\s+\w | ^\s*(?:-{3,}|={3,}|_{3,}|\*{3,})\s*$
  | \A_.*_\Z | (?<![\w*])\*[^*\s][^*]*\*(?![\w*]) | !\[
  | &(?:amp|lt|gt|quot|nbsp|apos|\#\d{1,6}|\#x[0-9a-f]{1,5}); | \$\\ | (?<!`)`[^`'\s][^`']*`(?!`)
""",
    "control characters or escape sequences": r"""
    [\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff\ufff9-\ufffc\xad]
  | \[\d{1,3}(?:;\d{1,3})*m | \\[nrt"'/\\] | \\u[0-9a-fA-F]{4} | \\x[0-9a-fA-F]{2} | \#\#\#\s*$ | â€ | Ã[\x80-\xbf]
""",
    "a label": r"""
    ^[^\w{(\[]*(?:(?:final|short|generated|predicted|image|change|difference|new|output|my|one-sentence)\s)*
    (?:caption|answer|output|response|result|prediction|description|summary|conclusion|differences?|changes?|a|note
    |explanation|rationale)
    (?:\s(?:caption|detected|description))?\W{0,3}:(?!\d)
  | \b(?:the\ )?(?:caption|answer|final\ caption|final\ answer)\ (?:is|would\ be|could\ be)\s?[:"'“]
  | ^\W*(?:therefore|thus|so|overall),\s?(?:the\ (?:final\ )?(?:caption|answer|change)\ (?:is|would)|i\b)
  | ^\W*(?:in\ conclusion|in\ summary|to\ summari[sz]e)\b
""",
    "words of a chat model to its user": r"""
    ^\W*(?:sure|certainly|of\ course|absolutely|okay|ok|alright|great|got\ it|yes|no\ problem)\s?[!,.:]\s*\S
  | ^\W*(?:sure|certainly|of\ course)\b | ^\W*here(?:'s|’s|\ 's|\ is|\ are)\ (?:a|an|the|one|your|my|what)\b.{0,80}:
  | ^\W*here(?:'s|’s|\ 's|\ is|\ are)\ (?:a|an|the|one|your|my)\b.{0,30}
    \b(?:caption|sentence|description|differences?|changes?|summary|answer|comparison)\b
  | ^\W*(?:let\ me|let's|let’s|let\ 's|i'll|i\ will|i’ll|to\ (?:determine|identify|find|compare|answer|describe))\b
  | ^\W*(?:based\ on|upon|after|looking\ at|by|when|in)\s?(?:closely\ |carefully\ )?
    (?:comparing|comparison|examining|analy[sz]ing|observing|inspecting|reviewing|looking|inspection|analysis)?\s?
    (?:of\ |at\ |between\ )?(?:the\ |these\ |both\ )?(?:two\ )?(?:provided|given|uploaded|supplied)\b
  | ^\W*(?:based\ on|upon|after|by)\ (?:closely\ |carefully\ )?(?:comparing|examining|analy[sz]ing|observing|reviewing)
  | \b(?:let\ me\ know|hope\ this\ helps|feel\ free\ to|would\ you\ like|is\ there\ anything\ else|you're\ welcome)\b
  | ^\W*(?:okay|ok|alright|hmm|wait|so)\s?[,.]\s*(?:i|let|so|the\ user|first|we)\b | \bthe\ user\ (?:wants|asks|is\ a)
""",
    "a refusal": r"""
    ^\W*(?:(?:i'm|i’m|i\ am|we\ are|i\ 'm)\ )?(?:very\ |really\ |so\ )?sorry\b | \bi\ apologi[sz]e\b | \bmy\ apologies
  | \bi(?:'m|’m|\ 'm|\ am)\ (?:unable|not\ able)\ to
  | \bi\ (?:can't|cannot|can’t|ca\ n't|can\ not|won't)\ (?:actually\ |directly\ )?
    (?:(?:view|access|assist|help|provide|process|analy[sz]e|compare|describe|answer|open|identify)\b
    |(?:see|determine)\b.{0,30}\b(?:images|pictures|photos|uploaded|attached)\b)
  | \bas\ an\ (?:ai|artificial)\b | \blanguage\ model\b | ^\W*unable\ to\b | \bunfortunately,\s?i\b
  | \bplease\ (?:provide|upload|share|attach|send)\b
  | \bno\ (?:images?|pictures?|photos?)\ (?:was|were|is|are|has\ been|have\ been)\ (?:provided|uploaded|attached|given)
  | \bi\ (?:don't|do\ not|don’t|do\ n't)\ (?:have|see)\ (?:access|any\ images?|the\ images?|enough)
""",
    "a character over and over": r"([^\s\d])\1{9,}",
    "an error message": r"""
    ^\W*(?:\w*(?:Error|Exception)\b|ERROR\b|Traceback\b|error\s?:) | \bout\ of\ memory\b | \berror\ code\b
  | \brate\ limit\b | \bHTTP(?:S|/\d\S*)?\ ?[45]\d\d\b | ^\W*(?:request\ )?time(?:d\ |-)?out\W*$
""",
    "a placeholder": r"""
    \A\W*(?:(?-i:nan|NaN|None|NONE|null|NULL|N/A|NA)|nil|n\s?/\s?a|undefined|tbd|todo
    |<\ ?none\ ?>|no\ (?:caption|answer|output|response|prediction|text)(?:\ \w+)?)\W*\Z | \A(?=.*\S)[\W_]+\Z
""",
    "emoji": r"[\u2705\u274c\u2714\u2728\u27a1\U0001f300-\U0001faff]",
    "letters of another script": r"[\u0400-\u04ff\u0590-\u06ff\u0900-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]",
}
"""Kind -> what no ordinary caption holds: one such caption is reported."""

USUAL = {
    "quotation marks around them": (MOST, r"""\A\s*(?:["'“‘«`]|'')(?!s\b).*(?:["'”’»`]|'')\s*[.]?\s*\Z"""),
    "a role at their start": (MOST, r"\A\s*(?:assistant|user|model|system|answer|caption|output|response)\s"),
    "a placeholder": (
        SOME,
        r"\A\W*+(?:(?:none|na|error|failed|failure|true|false|string|empty|missing)\W*+|[\d\W]++)\Z",
    ),
}
"""Kind -> a share of captions, and what an ordinary caption may hold: reported above that share."""


def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.VERBOSE | re.MULTILINE | re.IGNORECASE)


PATTERNS = {kind: compiled(pattern) for kind, pattern in MARKS.items()}
USUAL_PATTERNS = {kind: (share, compiled(pattern)) for kind, (share, pattern) in USUAL.items()}
UNFINISHED = compiled(r"(?:\b(?:the|an?|and|or|of|with|its|their|is|was|has\ been)|,)\s*\Z")


def notes_of_marks(
    captions: Sequence[str], references: Sequence[Sequence[str]] = (), what: str = "captions"
) -> list[str]:
    """A note for each kind of mark: how many captions hold it, and one of them.

    Args:
        references: those of each caption's pair, where they are known.
        what: how the notes name the captions.
    """
    times = Counter(map(ends, captions))
    places: dict[str, dict[str, int]] = {}  # kind -> caption -> where its mark is
    for caption in times:
        for kind, pattern in PATTERNS.items():
            if mark := pattern.search(caption):
                places.setdefault(kind, {})[caption] = mark.start()
        if (place := loop(caption.split())) is not None:
            places.setdefault("a phrase over and over", {})[caption] = place
    for kind, (share, pattern) in USUAL_PATTERNS.items():
        counted = places.get(kind, {})
        usual = {caption: 0 for caption in times if caption not in counted and pattern.search(caption)}
        if sum(times[caption] for caption in usual) > share * len(captions):
            places[kind] = counted | usual
    numbers = {kind: sum(times[caption] for caption in found) for kind, found in places.items()}
    notes = [
        f"{numbers[kind]:,} of {len(captions):,} {what} hold {kind}, such as {excerpt(*next(iter(found.items())))}; "
        "scored unchanged"
        for kind, found in places.items()
    ]
    if any(number > SAME * len(captions) for number in numbers.values()):
        return notes
    return [*notes, *notes_of_habits(captions, references, what)]


def ends(caption: str) -> str:
    """Begin and end of a caption, runs of white space as one, so that no pattern takes long."""
    text = caption if len(caption) <= 2 * READ else caption[:READ] + caption[-READ:]
    return re.sub(r"\s+", lambda space: "\n" if "\n" in space[0] else " ", text)


def excerpt(caption: str, place: int, width: int = 70) -> str:
    """The caption around its mark."""
    first = max(0, min(place - width // 3, len(caption) - width))
    shown = caption[first : first + width]
    return f"{'...' * (first > 0)}{shown!r}{'...' * (first + width < len(caption))}"


def loop(words: Sequence[str]) -> int | None:
    """Place in the caption of a phrase that is repeated over and over; None without one."""
    for length in range(1, min(LONGEST_PHRASE, len(words) // PHRASE_COPIES) + 1):
        needed = length * ((COPIES if length == 1 else PHRASE_COPIES) - 1)
        run = 0
        for place in range(length, len(words)):
            run = run + 1 if words[place] == words[place - length] else 0
            if run == needed:
                return len(" ".join(words[: place + 1 - needed - length]))
    return None


def notes_of_habits(captions: Sequence[str], references: Sequence[Sequence[str]], what: str) -> Iterator[str]:
    """Habits that most captions of a file share and their references do not: one caption, one opener, no end."""
    if len(captions) < FEW or not references:
        return
    caption, times = Counter(captions).most_common(1)[0]
    known = sum(caption.strip().lower() in (text.strip().lower() for text in texts) for texts in references)
    if caption.strip() and times > SAME * len(captions) and known < times / 2:
        yield f"{times:,} of {len(captions):,} {what} are the same: {excerpt(caption, 0)}"
        return
    texts = [text for of_pair in references for text in of_pair]
    begin, times = Counter(map(opener, captions)).most_common(1)[0]
    if begin and times > SAME * len(captions) and sum(opener(text) == begin for text in texts) < len(texts) / 5:
        yield f"{times:,} of {len(captions):,} {what} begin with {begin!r}, which few references do: a prompt?"
    cut = [caption for caption in captions if UNFINISHED.search(caption)]
    if len(cut) > CUT * len(captions) and sum(bool(UNFINISHED.search(text)) for text in texts) < len(texts) * CUT / 5:
        shown = excerpt(cut[0], len(cut[0]))
        yield f"{len(cut):,} of {len(captions):,} {what} end within a sentence, such as {shown}: cut at a token limit?"


def opener(caption: str) -> str:
    words = caption.lower().split()
    return " ".join(words[:OPENER]) if len(words) > OPENER else ""
