r"""Marks of a model, its tokenizer or its prompt inside captions: "<|im_end|>", "ASSISTANT:", JSON, "I'm sorry, ...".

Scorers read marks as words, so scores drop for a reason that no score shows. Captions are counted, never changed.
"""

import re
from collections import Counter
from collections.abc import Iterable

READ = 1_000
"""Characters at each end of a caption that are searched."""
WIDTH = 70
"""Characters of a caption that are shown around its mark."""

MARKS = {
    "reasoning": r"</?(?:think|thinking|thought|reasoning)> | ^\s*(?:thoughts?|thinking|reasoning)\s*:",
    "special tokens or tags": r"""
    <\|?[^<>\s|]{1,40}\|> | <[|/]?\w{1,20}\|?\s*\Z | <｜[^<>]{1,40}｜> | <0x[0-9a-f]{2}> | <\ /?\ ?(?:s|pad|unk|eos)\ >
  | </?(?!/?(?:think|thought|reason))[a-z_][\w.:/-]{0,30}(?:[ =][^<>]{0,100})?/?> | (?-i:\[/?[A-Z][A-Z_]{2,}\d*\])
  | \[/?(?:start|end|pad|cls|sep|unk|eos|bos|mask|inst|image|img)\] | \bunk\ unk\b | \bpad\ pad\b
  | \b(?:startseq|endseq|im_start|im_end|endoftext)\b | (?-i:\b(?:EOS|BOS|SOS|PAD|SEP|CLS|UNK)\b)
""",
    "marks of subwords": r"(?:^|\s)\#\#\w | [▁⁇\ufffd] | (?-i:[ĠĊ]) | \w@@(?=\s|$)",
    "a role or a prompt": r"""
    (?-i:\b(?:USER|ASSISTANT|HUMAN|SYSTEM|User|Assistant|Human|System))\s?: | \A\s*(?:assistant\s|(?:user|model)\s*\n)
  | ^\W*(?:user|assistant|human|system|question|instruction|prompt)\s?: | \#{2,}\s?\w[\w ]{0,20}:
  | ^\W*(?:what|which|how|where)\b[^?]{0,100}\b(?:images?|differences?|changes?|changed)\b[^?]{0,100}\?(?=\s*\S)
  | ^\W*(?:please\ )?(?:describe|compare|identify|explain)\ (?:the|what|all|any|how|these|both|in)\b
    [^.]{0,120}\b(?:images?|pictures?|photos?|differences?|changes?|changed)\b | \bhelpful\ assistant\b
""",
    "JSON or another literal": r"""
    ^\s*[\[{(]\s*["'{\[] | ["']\w+["']\s*:\s*["'\[{] | ^\s*[bru]{1,2}(?:'.*'|".*")\s*$
  | ^\s*(?:array|tensor|list|tuple|dict)\( | \b(?:caption|prediction|answer|text)=["'] | \A\s*(?:\[.*\]|\{.*\})\s*\Z
""",
    "Markdown, LaTeX or HTML": r"""
    ``` | \*\*[^*\s] | ^\s*\#{1,6}\s+\w | ^\s*[*•●]\s | ^\s*-\s+\w | ^\s*1[.)]\s+\w | \\[a-zA-Z]+\{
  | &(?:amp|lt|gt|quot|nbsp|apos|\#\d{1,6}); | (?<!`)`[^`'\s][^`']*`(?!`)
""",
    "control characters or escape sequences": r"""
    [\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u200b-\u200f\u2060-\u2064\ufeff\xad] | \[\d{1,3}(?:;\d{1,3})*m
  | \\[nrt"'/\\] | \\u[0-9a-fA-F]{4}
""",
    "a label": r"""
    ^[^\w{(\[]*(?:(?:final|short|generated|predicted|image)\s)*
    (?:caption|answer|output|response|prediction|description|differences?|changes?)\W{0,3}:(?!\d)
  | \b(?:caption|answer)\ (?:is|would\ be|could\ be)\s?[:"'“]
""",
    "words of a chat model to its user": r"""
    ^\W*(?:sure|certainly|of\ course|absolutely|okay|ok)\s?[!,.:]\s*\S | ^\W*(?:let\ me|let's|let’s|i'll|i\ will)\b
  | ^\W*here(?:'s|’s|\ is|\ are)\ (?:a|an|the|one|your)\b.{0,80}: | \b(?:let\ me\ know|hope\ this\ helps)\b
  | ^\W*based\ on\ (?:the\ |these\ |both\ )?(?:two\ )?(?:provided|given|uploaded)\b
""",
    "a refusal": r"""
    ^\W*(?:(?:i'm|i’m|i\ am)\ )?(?:very\ |really\ |so\ )?sorry\b | \bi\ apologi[sz]e\b | \blanguage\ model\b
  | \bi(?:'m|’m|\ am)\ (?:unable|not\ able)\ to | \bplease\ (?:provide|upload|share|attach)\b
  | \bi\ (?:can't|cannot|can’t|can\ not|won't)\ (?:view|access|assist|help|provide|process|compare|describe)\b
  | \bno\ (?:images?|pictures?|photos?)\ (?:was|were|is|are)\ (?:provided|uploaded|attached|given)
""",
    "a character over and over": r"([^\s\d])\1{9,}",
    "a phrase over and over": r"(?:^|\s)(\S+(?:\s\S+){0,9})(?:\s\1){4,}(?=\s|$)",
    "an error message": r"^\W*(?:\w*(?:Error|Exception)\b|Traceback\b|error\s?:) | \bout\ of\ memory\b",
    "a placeholder": r"\A\W*(?-i:nan|NaN|None|NONE|null|NULL|N/A|NA|undefined)\W*\Z | \A(?=.*\S)[\W_]+\Z",
    "letters of another script": r"[\u0400-\u04ff\u0590-\u06ff\u0900-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]",
}
"""Kind -> what no ordinary caption holds: one such caption is reported."""
FLAGS = re.VERBOSE | re.MULTILINE | re.IGNORECASE
PATTERNS = {kind: re.compile(pattern, FLAGS) for kind, pattern in MARKS.items()}


def notes_of_marks(captions: Iterable[str], what: str = "captions") -> list[str]:
    """A note for each kind of mark: how many captions hold it, and one of them; `what` is how notes name captions."""
    times = Counter(map(ends, captions))
    notes = []
    for kind, pattern in PATTERNS.items():
        marked = {caption: mark.start() for caption in times if (mark := pattern.search(caption))}
        if marked:
            count = sum(times[caption] for caption in marked)
            shown = excerpt(*next(iter(marked.items())))
            notes.append(f"{count:,} of {times.total():,} {what} hold {kind}, such as {shown}; scored unchanged")
    return notes


def ends(caption: str) -> str:
    """Begin and end of a caption, runs of white space as one, so that no pattern takes long."""
    text = caption if len(caption) <= 2 * READ else caption[:READ] + caption[-READ:]
    return re.sub(r"\s+", lambda space: "\n" if "\n" in space[0] else " ", text)


def excerpt(caption: str, place: int) -> str:
    """The caption around its mark."""
    first = max(0, min(place - WIDTH // 3, len(caption) - WIDTH))
    shown = caption[first : first + WIDTH]
    return f"{'...' * (first > 0)}{shown!r}{'...' * (first + WIDTH < len(caption))}"
