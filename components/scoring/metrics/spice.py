"""SPICE (Anderson et al., ECCV 2016), pycocoevalcap's Java program and jars that come from elsewhere.

The program parses captions for minutes and scores them in seconds. What it parsed is kept between evaluations
(`parses.py`). Scores come from a run that parses nothing, so they do not depend on what was known before: SPICE merges
words in the order of Java's identity hashes, which threads that parse draw in another order each time.
"""

import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from m3diff.records.progress import progress
from m3diff.scoring.metrics.java import require_java
from m3diff.scoring.metrics.metric import (
    ALL,
    Groups,
    Item,
    Metric,
    MetricScores,
    Program,
    Tools,
    mean_of,
    of_each_group,
)
from m3diff.scoring.metrics.parses import Parses, kept_file
from m3diff.scoring.metrics.scorer import Scorer, ScorerFailed
from m3diff.scoring.pairs import EvalPair

JARS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
ASM = tuple(f"asm{part}-7.3.1.jar" for part in ("", "-analysis", "-commons", "-tree", "-util"))
NASHORN = ("nashorn-core-15.4.jar", *ASM)
"""The JavaScript with which SPICE writes its answer, and what it needs; Java had its own until 14."""
ARTIFACTS = (
    "edu.stanford.nlp:stanford-corenlp:3.6.0",
    "edu.stanford.nlp:stanford-corenlp:3.6.0:jar:models",
    "org.openjdk.nashorn:nashorn-core:15.4",
    *(f"org.ow2.asm:{name.removesuffix('-7.3.1.jar')}:7.3.1" for name in ASM),
)
"""Of `JARS` and `NASHORN`, as Maven calls them."""
MAVEN_CENTRAL = "https://repo1.maven.org/maven2"
FIRST_WITHOUT_JAVASCRIPT = 15
REMEDY = (
    f"needs {JARS[0]} and {JARS[1]}, which nothing here downloads: take them from "
    "http://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip (384 MB) and name their folder in "
    "compute.spice_dir"
)
"""Where no folder is named at all."""
SECONDS_A_CAPTION = 1
"""What the time limit allows for each caption of up to 20 words beside its fixed part; of a longer one the cube of its
length, up to LONGEST_S. Two idle cores parse 50 of 10 words a second, two that other work shares 4."""
LONGEST_S = 900
LONGEST_KEPT = 500  # bytes; LMDB takes no longer key
PART = 2500
"""Captions that one process parses: it takes 6 s to load its models, and shows nothing until it ends."""
TRIAL: Item = ("the red cube turned blue", ("the red cube became blue",))
Start = Callable[[str, float], Scorer]


def program(of: Program) -> dict[Item, float | None]:
    """F of each item; None where neither side has a tuple.

    Raises:
        ScorerFailed: the jars are missing, or the program gave no result.
    """
    jars = find_jars(of.spice_dir)
    items = of.items()
    return dict(zip(items, score(of.start, jars, items, kept_file(jars)), strict=True))


def try_spice(spice_dir: Path | None, limit_s: int) -> float:
    """F of one pair, parsed anew, so that every part of the program is needed.

    Raises:
        ScorerFailed: SPICE cannot be computed here; the text says why.
    """
    jars = find_jars(spice_dir)
    with ExitStack() as workers:
        (value,) = score(lambda name, more: workers.enter_context(Scorer(name, limit_s + more)), jars, [TRIAL], None)
    if value is None:
        raise ScorerFailed(f"its program found nothing to compare in {TRIAL[0]!r}")
    return value


def score(start: Start, jars: Sequence[Path], items: Sequence[Item], kept: Path | None) -> list[float | None]:
    """F of each item, by what the file `kept` holds of captions parsed before; it gets those that are parsed now.

    Raises:
        ScorerFailed: the program gave no result.
    """
    captions = list(dict.fromkeys(chain.from_iterable((prediction, *references) for prediction, references in items)))
    with tempfile.TemporaryDirectory(prefix="m3diff-spice-parses-") as folder:
        parses = Parses(Path(folder), kept)
        try:
            return score_with(parses, start, jars, items, captions)
        except CacheFailed as failure:
            parses.drop()
            print(f"SPICE: parses {len(captions):,} captions without a cache: {failure}", file=sys.stderr, flush=True)
    return ask(start, jars, items, captions)


def score_with(
    parses: Parses, start: Start, jars: Sequence[Path], items: Sequence[Item], captions: Sequence[str]
) -> list[float | None]:
    """Parse what is not known, in parts of which each is kept, and then score."""
    long = [caption for caption in captions if is_long(caption)]
    new = [caption for caption in captions if caption not in parses.known and not is_long(caption)]
    count = -(-len(new) // PART)
    parts = [new[place::count] for place in range(count)]
    for part in progress(parts, f"evaluate: SPICE parses {len(new):,} captions", unit="part") if parts else ():
        whole = part is parts[-1] and not long
        found = ask(start, jars, items if whole else as_items(part), part, parses.folder)
        parses.keep(part)
    return found if parts and whole and not parses.known else ask(start, jars, items, long, parses.folder)


def is_long(caption: str) -> bool:
    """Whether a caption is too long a key for LMDB, which gets a byte of each letter of Latin-1, else three or six."""
    return sum(1 if letter < "\xff" else 3 if letter <= "\uffff" else 6 for letter in caption) > LONGEST_KEPT


class CacheFailed(ScorerFailed):
    """The program failed in the code that keeps what it parsed."""


def ask(
    start: Start, jars: Sequence[Path], items: Sequence[Item], new: Sequence[str], cache: Path | None = None
) -> list[float | None]:
    """The program's answer to items of which these captions are not parsed yet."""
    lengths = (len(caption.split()) / 20 for caption in new)
    worker = start("SPICE", sum(SECONDS_A_CAPTION * min(max(1, length**3), LONGEST_S) for length in lengths))
    worker.send(
        {
            "items": items,
            "jars": [str(jar) for jar in jars if jar.name in JARS],
            "modules": [str(jar) for jar in jars if jar.name not in JARS],
            "cache": cache and str(cache),
            "parses": bool(new),
        }
    )
    try:
        found: list[float | None] = worker.result()
    except ScorerFailed as failure:
        if cache and re.search("lmdb|nustaq", worker.log.read_text(errors="replace")):
            raise CacheFailed(str(failure)) from None
        raise
    return found


def as_items(captions: Sequence[str]) -> list[Item]:
    """Pairs that hold each caption. The graph of all captions in one pair would take long to build."""
    return [(caption, (other,)) for caption, other in zip(captions[::2], [*captions[1::2], captions[-1]], strict=False)]


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """A group's score is the mean F of those of its pairs that have one."""
    answers: Mapping[Item, float | None] = tools.answers()
    tokens = tools.tokens()
    values = {pair: answers[tokens.item(pair)] for pair in tokens.predictions}
    found = of_each_group(groups, lambda ids: {"SPICE": mean([values[pair] for pair in ids])})
    return MetricScores(
        found,
        {pair: {"SPICE": value} for pair, value in values.items()},
        {} if found[ALL]["SPICE"] is not None else {"SPICE": "no caption names an object, attribute or relation"},
    )


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that there are; None of none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def needed(java: int) -> tuple[str, ...]:
    """Names of the jars that SPICE needs with this Java."""
    return JARS + NASHORN if java >= FIRST_WITHOUT_JAVASCRIPT else JARS


def look(folder: Path | None, java: int) -> dict[str, Path | None]:
    """The file of each jar that is needed, None where it is missing; of Nashorn and ASM any version serves."""
    files = [] if folder is None or not folder.is_dir() else sorted(folder.iterdir())
    found = {}
    for name in needed(java):
        pattern = re.sub(r"-[\d.]+\.jar", r"-[\\d.]+[.]jar", name) if name in NASHORN else re.escape(name)
        found[name] = max((file for file in files if re.fullmatch(pattern, file.name)), default=None)
    return found


def find_jars(spice_dir: Path | None) -> list[Path]:
    """The jars that the Java on PATH needs, absolute.

    Raises:
        ScorerFailed: no folder is named, or a jar is missing in it; the text says how to get them.
    """
    if spice_dir is None:
        raise ScorerFailed(REMEDY)
    java = require_java()
    found = look(spice_dir, java)
    if missing := [name for name, jar in found.items() if jar is None]:
        why = f"with Java {java}, which has no JavaScript engine, " if missing[-1] in NASHORN else ""
        raise ScorerFailed(
            f"{spice_dir}: has no {' and no '.join(missing)}; SPICE needs them {why}and `m3diff score --check-spice "
            f"--spice-dir {shlex.quote(str(spice_dir))}` prints the commands that fetch them"
        )
    return [jar.absolute() for jar in found.values() if jar]


def how_to_fetch(missing: Iterable[str], folder: Path) -> Iterator[str]:
    """Commands for a shell that put the missing jars into the folder, and their addresses."""
    artifacts = [ARTIFACTS[(JARS + NASHORN).index(name)] for name in missing]
    place = shlex.quote(str(folder))
    yield "nothing here downloads them; with Maven:"
    yield f"    for a in {' '.join(artifacts)}; do mvn -q dependency:copy -Dartifact=$a -DoutputDirectory={place}; done"
    yield f"or by hand, into {folder}:"
    for name, artifact in zip(missing, artifacts, strict=True):
        group, artifact_id, version = artifact.split(":")[:3]
        yield f"    {MAVEN_CENTRAL}/{group.replace('.', '/')}/{artifact_id}/{version}/{name}"


METRIC = Metric(
    compute,
    headline="SPICE",
    scores=("SPICE",),
    columns={"SPICE": "double"},
    resampled={"SPICE": mean_of("SPICE")},
    program=program,
    optional=True,
)
