"""Detect artefacts ("marks") that a model, a tokenizer, a prompt or a wrong encoding leaves in captions.

Examples are "<|im_end|>", "ASSISTANT:", JSON and "I'm sorry, ...". Scorers treat them as words, so scores drop without
an obvious reason, and a model that is trained on them learns to write them. Marks are only counted; captions are not
changed. `MARKS` are for predictions. `DATA_MARKS` are for captions written by people. Lists, names in capitals, words
in other scripts and quotations of signs are normal there and do not count as marks.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

OTHER_SCRIPT = "letters of another script"
REPETITION = "a repeated phrase"
# Kind of mark -> pattern that ordinary predictions do not match. A single marked prediction is enough for a note
MARKS = {
    "special tokens or tags": r"""
    <[|/]?[^<>\s|]{1,40}(?:[ =][^<>]{0,100})?\|?/?> | <｜[^<>]{1,40}｜> | (?-i:\[/?[A-Z][A-Z_]{2,}\])
  | \b(?:startseq|endseq|endoftext)\b | (?-i:\b(?:EOS|BOS|PAD|UNK)\b)
""",
    "subword marks of a tokenizer": r"(?:^|\s)\#\#\w | [▁⁇\ufffd] | (?-i:[ĠĊ])",
    "a role name or a prompt": r"""
    (?-i:\b(?:USER|ASSISTANT|HUMAN|SYSTEM|User|Assistant|Human|System))\s?: | ^\W*(?:question|instruction|thought)\s?:
  | \A\s*assistant\s | \#{2,}\s?\w[\w ]{0,20}: | ^\W*(?:what|which|how|where)\b[^?]{0,200}\?(?=\s*\S)
  | ^\W*(?:please\ )?describe\ (?:the|what|all|any|how)\b | \bhelpful\ assistant\b
""",
    "JSON or another literal": r"""^\s*[\[{(]\s*["'{\[] | ["']\w+["']\s*:\s*["'\[{] | ^\s*(?:b'|tensor\()""",
    "Markdown, LaTeX or HTML": r"""
    ``` | \*\*[^*\s] | ^\s*\#{1,6}\s+\w | ^\s*[*•-]\s+\w | ^\s*1[.)]\s+\w | \\[a-zA-Z]+\{ | &(?:amp|lt|gt|quot|nbsp);
""",
    "control characters or escape sequences": r"[\x00-\x08\x0e-\x1f\x7f\u200b-\u200f\ufeff] | \\[nrtu]",
    "a chat model's words to its user": r"""
    ^\W*(?:sure(?:\ thing)?|certainly|absolutely|of\ course)\s?[!,.:]\s*\S
  | ^\W*(?:ok(?:ay)?|great)[!,.]\s(?:here|let|i)\b | \bhope\ (?:this|that)\ helps\b | \bi(?:'d|\ would)\ be\ happy\ to\b
  | ^\W*here(?:'s|\ is|\ are)\ (?:a|an|the|one|your)\b.{0,80}:
  | ^\W*based\ on\ (?:the\ |these\ |both\ )?(?:two\ )?(?:provided|given)\b | \blet\ me\ know\b
  | ^[^\w{(\[]*(?:final\s)?(?:caption|answer|response|description|differences?|changes?)\W{0,3}:(?!\d)
""",
    "a refusal": r"""
    ^\W*i(?:'m|\ am)\ (?:\w+\ )?sorry\b | ^\W*(?:very\ |so\ )?sorry(?:\s?[,.!:;]|\ (?:but|i|for)\b)
  | \b(?:i|we)\ apologi[sz]e\b | ^\W*apologies\b | \blanguage\ model\b | \bas\ an\ ai\b
  | \bi(?:'m|\ am)\ (?:unable|not\ able|an\ ai)\b | \bi\ (?:do\ not|don't)\ have\ (?:access|the\ ability)\b
  | \bi\ (?:can't|cannot|can\ not|could\ not|couldn't|won't)\ (?:directly\ )?
    (?:view|access|assist|help|provide|process|comply|compare|analy[sz]e|fulfil)
  | \bno\ images?\ (?:was|were|has\ been|have\ been)\ (?:provided|attached|uploaded|included|given)\b
  | \bi\ (?:do\ not|don't)\ see\ (?:any|an|the|both)\ images?\ (?:attached|provided|uploaded|in\ your)\b
  | \bplease\ (?:provide|upload)\b
  | ^\W*(?:lo\ siento|je\ suis\ désolé|désolé|es\ tut\ mir\ leid|mi\ dispiace|desculpe|извините)\b
  | ^\W*(?:很?抱歉|对不起|申し訳)
""",
    REPETITION: r"([^\s\d])\1{9,} | (?:^|\s)(\S+(?:\s\S+){0,9})(?:\s\2){4,}(?=\s|$)",
    "a placeholder": r"\A\W*(?-i:nan|NaN|None|null|N/A|undefined)\W*\Z | \A(?=.*\S)[\W_]+\Z",
    OTHER_SCRIPT: r"[\u0400-\u04ff\u0590-\u06ff\u0900-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]",
}
# Parts of Python patterns that polars' engine does not support or that are slow there
LOOKAROUND = re.compile(r"\(\?[=!][^()]*\)")
COUNTED_REPETITION = re.compile(r"\{\d+,\d*\}")
CHARACTER_CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]")
UNESCAPED_SPACE = re.compile(r"(?<!\\) ")
FLAGS = re.VERBOSE | re.MULTILINE | re.IGNORECASE
PATTERNS = {kind: re.compile(pattern, FLAGS) for kind, pattern in MARKS.items()}

# A byte from 80 to BF, decoded as Windows-1252 or Latin-1
HIGH_BYTE = "[\x80-\xbfŒœŠšŸŽžƒˆ˜–—‘’‚“”„†‡•…‰‹›€™]"
# Characters of HIGH_BYTE that people also write after the last letter of a word, as in «MAÇÃ»
CLOSING_SIGN = "[»”’›—–]"
# Characters of HIGH_BYTE that people do not write after a capital letter. Trade marks, quotation marks and Š can follow
# a capital letter, so they are left out
BYTE_AFTER_CAPITAL = "[\x80-\x9f¡¢£¤¥¦§¨¬\xad¯°±´µ¶·¸¹¼½¾¿ƒˆ˜†•‰€]"
# Characters that appear instead of an umlaut if a text was decoded with the wrong code page: Geb‰ude, gr÷er
SIGN_IN_WORD = "[÷‰ˆ¸▀„†‡¤¦¨¬¯¶±¼½¾]"
# Kind of mark -> pattern that captions written by people do not match
DATA_MARKS = {
    "refusals": MARKS["a refusal"]
    + r"""
  | \A\W*my\ apologies\b | ^\W*unfortunately,?\ (?:i|no\ images?)\b
  | \bi\ (?:can't|cannot|can\ not|could\ not|couldn't)\ see\ (?:any|the|both|either|your)\ (?:\w+\ )?images?\b
  | \b(?:haven't|have\ not|didn't|did\ not)\ (?:uploaded?|attach(?:ed)?|provided?|shared?)\ (?:\w+\ ){0,2}images?\b
  | ^\W*(?:unable|failed)\ to\ (?:process|generate|load|caption|describe|analy[sz]e)\b
  | \brate\ limit\ (?:exceeded|reached)\b | ^\W*error(?:\ code)?\s?:\s?(?:\w+\ ){0,2}(?:\d{3}|error|exceeded|failed)\b
  | ^\W*(?:the\ )?request\ timed\ out\b | ^\W*internal\ server\ error\b
  | ^\W*(?:죄송|非常抱歉|我无法|我不能)
""",
    "roles": r"""
    ^\W*(?:user|assistant|human|system|gpt|chatbot|bot|question|instruction|thought)\s?:\s*\S
  | (?-i:\b(?:USER|ASSISTANT|HUMAN|SYSTEM)\s?:) | \A\s*assistant\s*\n | \#{2,}\s?\w[\w ]{0,20}:
  | ^\W*(?:what|which|how|where)\b[^?]{0,200}\b(?:chang|differ|image|picture|photo)[^?]{0,200}\?(?=\s*\S)
  | ^\W*(?:please\ )?describe\ (?:the|what|all|any|how)\b.{0,80}\b(?:image|picture|photo|between|changed)
  | \A\W*what(?:'s|\ (?:has|have|was|is|are))?\ (?:the\ )?(?:changed?|different|differences?|changes?)\b
    [^?]{0,80}\?\W*\Z
  | ^\W*q\s?:.*\ba\s?: | \bhelpful\ assistant\b
""",
    "chat": MARKS["a chat model's words to its user"].replace("|differences?|changes?", "|output")
    + r"""
  | ^\W*(?:sure|certainly|absolutely|of\ course)\s?[—–]\s?here\b | ^\W*the\ (?:caption|answer|description)\ is\s?:
  | ^\W*based\ on\ (?:the\ )?(?:two\ )?images?\ (?:you\ )?(?:provided|given)\b | ^\W*(?:当然|好的)[！!，,。]
""",
    "tokens": r"""
    <[|/]?[A-Za-z][\w.:|-]{0,40}(?:[ =][^<>]{0,100})?\|?/?> | <｜[^<>]{1,40}｜> | <0x[0-9A-F]{2}> | <</?SYS>>
  | (?-i:\[/?(?:INST|PAD|UNK|CLS|SEP|MASK|BOS|EOS|IMG|TOOL_CALLS|IMAGE)\]) | \b(?:startseq|endseq|endoftext)\b
  | (?:^|\s)\#\#[a-z] | [▁⁇] | (?-i:[ĠĊ])
""",
    "literals": r"""^\s*[\[{]\s*["'{\[] | ["']\w+["']\s*:\s*["'\[{] | ^\s*tensor\(""",
    "markup": r"""
    ``` | \*\*[^*\s][^*]*\*\* | ^\s*\#{2,6}\s+\w | \\[a-zA-Z]+\{
  | &(?:[a-z]{2,8}|\#\d{1,6}|\#x[0-9a-f]{1,6}); | &(?:amp|lt|gt|quot|nbsp)\b
""",
    "encoding": rf"""
    \ufffd | [\x80-\x84\x86-\x9f] | ï¿½ | ï»¿ | 锟斤拷 | 烫烫烫
  | (?-i:[ÃÂ](?!{CLOSING_SIGN}(?:\W|$)){HIGH_BYTE}) | (?-i:ã[©¨¤¼¶±\xad])
  | (?-i:â(?:€|{HIGH_BYTE}{HIGH_BYTE})) | (?-i:ð[Ÿ\x9f]{HIGH_BYTE}{HIGH_BYTE})
  | (?-i:[ÐÑ]{HIGH_BYTE}\s?){{3}} | (?-i:[à-ï]{HIGH_BYTE}{HIGH_BYTE}){{2}}
  | (?-i:[Ä-ÖØ-Þ]{BYTE_AFTER_CAPITAL}) | (?-i:[Ä-ÖØ-Þ][™®©‚›‡](?=[a-zà-ÿ])) | (?!(.)\1{{3}})[À-ÖØ-öø-ÿ]{{4}}
  | (?!(.)\2{{5}})[¡-ÿ]{{6}} | [├┬]\S | (?-i:[A-Za-z][ГД][^\x00-\x7f]) | [a-z]{SIGN_IN_WORD}[a-z]
  | √[©®°§¶†∂º±ß¥´] | ‚Ä[ôúùìî] | (?-i:[РС][^\x00-\x7fа-яА-Я]){{3}}
""",
    "escapes": r"""[\x00-\x08\x0e-\x1f\x7f\u200b\ufeff] | \\(?:[nrt"']|u[0-9a-f]{4}|x[0-9a-f]{2})
  | (?-i:=[C-F][0-9A-F]=[89AB][0-9A-F]) | %[c-f][0-9a-f]%[89ab][0-9a-f] | \w%20\w
""",
}
DATA_PATTERNS = {kind: re.compile(pattern, FLAGS) for kind, pattern in DATA_MARKS.items()}
# Kinds that are searched in the original caption, not in the normalised one, because whitespace and apostrophes matter
# to their patterns. These patterns are fast on any caption
EXACT_KINDS = {"encoding", "escapes"}
# A quick pre-filter: every match of `DATA_PATTERNS` contains one of these words or characters. Polars searches for them
# with a linear-time engine. For `DATA_PATTERNS`, this engine would take minutes on 896k captions, because counted
# repetitions need many states
SUSPECT = (
    r"(?i)sorry|apolog|language model|an ai\b|unable|not able|have access|the ability|i can[’']t|i cannot|i can not"
    r"|i couldn[’']t|i could not|i won[’']t|no images? (?:was|were|has|have)|see (?:any|an|the|both) image"
    r"|please (?:provide|upload)|lo siento|désol|es tut mir|mi dispiace|desculpe|извините|抱歉|对不起|申し訳"
    r"|my apologies|unfortunately|see (?:any|the|both|either|your) |upload|attach|provide|share|(?:unable|failed) to"
    r"|rate limit|error|timed out|죄송|我无法|我不能|当然|好的|images? (?:you )?(?:provided|given)|[—–]\s?here|%20"
    r"|=[C-F][0-9A-F]=|%[C-F][0-9A-F]%"
    r"|:|##|\?|describe|helpful assistant|assistant\s*\n|(?:certainly|absolutely|of course|sure|sure thing)\s?[!,.]"
    r"|(?:ok|okay|great)[!,.]|based on|let me know|hope (?:this|that)|happy to|[<\[{&\\▁⁇ĠĊ]|startseq|endseq|endoftext"
    r"|tensor\(|```|\*\*"
).replace(" ", r"\s+") + (
    rf"|[\x{{80}}-\x{{84}}\x{{86}}-\x{{9f}}\x{{fffd}}]|ï¿½|ï»¿|锟斤拷|烫烫烫|[Â-ÖØ-ßãâð]{HIGH_BYTE}|[à-ï]{HIGH_BYTE}{HIGH_BYTE}|â€|√|‚Ä"
    rf"|[¡-ÿ]{{4}}|[├┬]|[a-z][гд]|[a-z]{SIGN_IN_WORD}"
    r"|[РС][^\x00-\x7fа-яА-Я]|[\x00-\x08\x0e-\x1f\x7f\x{200b}\x{feff}]"
)


def normalise_whitespace(caption: str) -> str:
    """Return a caption with straight apostrophes and a single space or line feed for each run of whitespace.

    The patterns of marks are slow on long runs of whitespace.
    """
    if caption.isprintable() and "  " not in caption and "\u2019" not in caption:
        return caption  # most captions end here; the space is the only printable whitespace character
    return re.sub(r"\s+", lambda run: "\n" if "\n" in run[0] else " ", caption).replace("\u2019", "'")


def find_mark(caption: str) -> str | None:
    """Return the first kind of `DATA_MARKS` that occurs in a dataset's caption, or None if no kind occurs."""
    normal_caption = normalise_whitespace(caption)
    for kind, pattern in DATA_PATTERNS.items():
        is_exact = kind in EXACT_KINDS
        match = pattern.search(caption) if is_exact else search_over_lines(pattern, normal_caption)
        if match is not None:
            return kind
    return None


def search_over_lines(pattern: re.Pattern[str], caption: str) -> re.Match[str] | None:
    """Return the first match in a caption, or else in the caption as one line, because a line may end within a phrase.

    The caption is searched with its lines first, because some patterns match only at the start or the end of a line.
    """
    match = pattern.search(caption)
    if match is None and "\n" in caption:
        match = pattern.search(caption.replace("\n", " "))
    return match


def may_repeat(caption: str) -> bool:
    """Return False if a caption cannot contain a phrase five times or a character ten times.

    This avoids the slow pattern for repetitions.
    """
    words = caption.casefold().split()
    return len(words) - len(set(words)) >= 4 or max(map(len, words), default=0) >= 10


def widen_for_polars(pattern: str) -> str:
    """Return a pattern for polars that matches every text that a pattern of `MARKS` matches, and possibly more."""
    without_lookaround = LOOKAROUND.sub("", pattern)
    without_counts = COUNTED_REPETITION.sub("*", without_lookaround)
    # in verbose mode, polars ignores a space in a character class, and Python does not
    with_spaces = CHARACTER_CLASS.sub(lambda match: UNESCAPED_SPACE.sub(r"\ ", match[0]), without_counts)
    return "(?xim)" + with_spaces.replace(r"\Z", r"\z")


def find_candidates(kind: str, captions: Sequence[str]) -> list[str]:
    """Return the captions that may have a mark of this kind.

    This is a quick pre-filter, because `PATTERNS` alone would take 1 s for 20,000 captions.

    The linear-time engine of polars and Python's engine agree only on the character classes of printable ASCII, so
    captions with other characters are always candidates.
    """
    if kind == REPETITION:
        return [caption for caption in captions if may_repeat(caption)]
    import polars as pl

    plain_captions = [caption for caption in captions if caption.isascii() and caption.isprintable()]
    matches = pl.Series(plain_captions, dtype=pl.String).str.contains(widen_for_polars(MARKS[kind]))
    without_mark = {caption for caption, is_match in zip(plain_captions, matches, strict=True) if not is_match}
    return [caption for caption in captions if caption not in without_mark]


def note_marks(captions: Iterable[str], subject: str = "captions", without: Collection[str] = ()) -> list[str]:
    """Return a note for each kind of mark that is found: how many captions have it, and an example.

    Args:
        subject: word for the captions in the notes.
        without: kinds to ignore, because they are normal in these captions.
    """
    caption_counts = Counter(map(normalise_whitespace, captions))
    notes = []
    for kind, pattern in PATTERNS.items():
        if kind in without:
            continue
        first_match = None
        marked_captions = 0
        for caption in find_candidates(kind, list(caption_counts)):
            match = search_over_lines(pattern, caption)
            if match is not None:
                marked_captions += caption_counts[caption]
                first_match = first_match or match
        if first_match is not None:
            start = max(0, first_match.start() - 20)
            excerpt = first_match.string[start:][:70]
            marked_of_all = f"{marked_captions:,} of {caption_counts.total():,} {subject}"
            notes.append(f"{marked_of_all} contain {kind}, such as {excerpt!r}; they are scored as they are")
    return notes
