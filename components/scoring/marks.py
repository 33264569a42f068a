"""Marks of a model, its tokenizer, its prompt or a wrong encoding inside captions.

"<|im_end|>", "ASSISTANT:", JSON, "I'm sorry, ...": scorers read them as words, so scores drop for a reason that no
score shows, and a model that trains on them learns them. They are counted, never changed. `MARKS` are for predictions.
`DATA_MARKS` are for captions that people have written, who also write lists, names in capitals, other scripts and
quotations of signs.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable

OTHER_SCRIPT = "letters of another script"
MARKS = {  # kind -> what no ordinary prediction holds: one such caption is reported
    "special tokens or tags": r"""
    <[|/]?[^<>\s|]{1,40}(?:[ =][^<>]{0,100})?\|?/?> | <｜[^<>]{1,40}｜> | (?-i:\[/?[A-Z][A-Z_]{2,}\])
  | \b(?:startseq|endseq|endoftext)\b | (?-i:\b(?:EOS|BOS|PAD|UNK)\b)
""",
    "marks of subwords": r"(?:^|\s)\#\#\w | [▁⁇\ufffd] | (?-i:[ĠĊ])",
    "a role or a prompt": r"""
    (?-i:\b(?:USER|ASSISTANT|HUMAN|SYSTEM|User|Assistant|Human|System))\s?: | ^\W*(?:question|instruction|thought)\s?:
  | \A\s*assistant\s | \#{2,}\s?\w[\w ]{0,20}: | ^\W*(?:what|which|how|where)\b[^?]{0,200}\?(?=\s*\S)
  | ^\W*(?:please\ )?describe\ (?:the|what|all|any|how)\b | \bhelpful\ assistant\b
""",
    "JSON or another literal": r"""^\s*[\[{(]\s*["'{\[] | ["']\w+["']\s*:\s*["'\[{] | ^\s*(?:b'|tensor\()""",
    "Markdown, LaTeX or HTML": r"""
    ``` | \*\*[^*\s] | ^\s*\#{1,6}\s+\w | ^\s*[*•-]\s+\w | ^\s*1[.)]\s+\w | \\[a-zA-Z]+\{ | &(?:amp|lt|gt|quot|nbsp);
""",
    "control characters or escape sequences": r"[\x00-\x08\x0e-\x1f\x7f\u200b-\u200f\ufeff] | \\[nrtu]",
    "words of a chat model to its user": r"""
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
    "a phrase over and over": r"([^\s\d])\1{9,} | (?:^|\s)(\S+(?:\s\S+){0,9})(?:\s\2){4,}(?=\s|$)",
    "a placeholder": r"\A\W*(?-i:nan|NaN|None|null|N/A|undefined)\W*\Z | \A(?=.*\S)[\W_]+\Z",
    OTHER_SCRIPT: r"[\u0400-\u04ff\u0590-\u06ff\u0900-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]",
}
PATTERNS = {kind: re.compile(mark, re.VERBOSE | re.MULTILINE | re.IGNORECASE) for kind, mark in MARKS.items()}

# A byte from 80 to BF as Windows-1252 or Latin-1 shows it
HIGH = "[\x80-\xbfŒœŠšŸŽžƒˆ˜–—‘’‚“”„†‡•…‰‹›€™]"
# Of these, signs that may also stand after a letter at the end of a word: «MAÇÃ»
CLOSING = "[»”’›—–]"
# Bytes of UTF-8 that no person writes after a capital letter, as a trade mark, a quotation mark or a Š
AFTER_CAPITAL = "[\x80-\x9f¡¢£¤¥¦§¨¬\xad¯°±´µ¶·¸¹¼½¾¿ƒˆ˜†•‰€]"
# Signs between two letters, where a code page shows an umlaut: Geb‰ude, gr÷er
IN_A_WORD = "[÷‰ˆ¸▀„†‡¤¦¨¬¯¶±¼½¾]"
DATA_MARKS = {  # kind -> what no person writes in a caption
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
    "chat": MARKS["words of a chat model to its user"].replace("|differences?|changes?", "|output")
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
  | (?-i:[ÃÂ](?!{CLOSING}(?:\W|$)){HIGH}) | (?-i:ã[©¨¤¼¶±\xad])
  | (?-i:â(?:€|{HIGH}{HIGH})) | (?-i:ð[Ÿ\x9f]{HIGH}{HIGH}) | (?-i:[ÐÑ]{HIGH}\s?){{3}} | (?-i:[à-ï]{HIGH}{HIGH}){{2}}
  | (?-i:[Ä-ÖØ-Þ]{AFTER_CAPITAL}) | (?-i:[Ä-ÖØ-Þ][™®©‚›‡](?=[a-zà-ÿ])) | (?!(.)\1{{3}})[À-ÖØ-öø-ÿ]{{4}}
  | (?!(.)\2{{5}})[¡-ÿ]{{6}} | [├┬]\S | (?-i:[A-Za-z][ГД][^\x00-\x7f]) | [a-z]{IN_A_WORD}[a-z]
  | √[©®°§¶†∂º±ß¥´] | ‚Ä[ôúùìî] | (?-i:[РС][^\x00-\x7fа-яА-Я]){{3}}
""",
    "escapes": r"""[\x00-\x08\x0e-\x1f\x7f\u200b\ufeff] | \\(?:[nrt"']|u[0-9a-f]{4}|x[0-9a-f]{2})
  | (?-i:=[C-F][0-9A-F]=[89AB][0-9A-F]) | %[c-f][0-9a-f]%[89ab][0-9a-f] | \w%20\w
""",
}
DATA_PATTERNS = {kind: re.compile(mark, re.VERBOSE | re.MULTILINE | re.IGNORECASE) for kind, mark in DATA_MARKS.items()}
# Kinds that white space and apostrophes may show; their patterns take no long time
EXACT_KINDS = {"encoding", "escapes"}
# Literal words and signs, of which each match of `DATA_PATTERNS` holds one, for an engine that takes linear time. The
# patterns themselves would take it minutes for 896k captions: counted repetitions are many states
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
    rf"|[\x{{80}}-\x{{84}}\x{{86}}-\x{{9f}}\x{{fffd}}]|ï¿½|ï»¿|锟斤拷|烫烫烫|[Â-ÖØ-ßãâð]{HIGH}|[à-ï]{HIGH}{HIGH}|â€|√|‚Ä"
    rf"|[¡-ÿ]{{4}}|[├┬]|[a-z][гд]|[a-z]{IN_A_WORD}"
    r"|[РС][^\x00-\x7fа-яА-Я]|[\x00-\x08\x0e-\x1f\x7f\x{200b}\x{feff}]"
)


def in_one_form(caption: str) -> str:
    """The caption with one kind of apostrophe, runs of white space as one sign, so that no pattern takes long."""
    return re.sub(r"\s+", lambda run: "\n" if "\n" in run[0] else " ", caption).replace("\u2019", "'")


def mark_of(caption: str) -> str | None:
    """The first kind of `DATA_MARKS` that a caption of a dataset has."""
    plain = in_one_form(caption)
    return next(
        (kind for kind, pattern in DATA_PATTERNS.items() if pattern.search(caption if kind in EXACT_KINDS else plain)),
        None,
    )


def notes_of_marks(captions: Iterable[str], what: str = "captions", without: Collection[str] = ()) -> list[str]:
    """A note for each kind of mark: how many captions hold it, and one of them.

    Args:
        what: how notes name captions.
        without: kinds that are no marks in these captions.
    """
    times = Counter(map(in_one_form, captions))
    notes = []
    for kind, pattern in PATTERNS.items():
        if kind in without:
            continue
        marked = {caption: mark.start() for caption in times if (mark := pattern.search(caption))}
        if marked:
            count = sum(times[caption] for caption in marked)
            caption, place = next(iter(marked.items()))
            shown = caption[max(0, place - 20) :][:70]
            notes.append(f"{count:,} of {times.total():,} {what} hold {kind}, such as {shown!r}; scored unchanged")
    return notes
