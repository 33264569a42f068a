"""SPICE (Anderson et al., ECCV 2016), pycocoevalcap's Java program and jars that come from elsewhere.

The program parses captions for minutes and scores them in seconds. What it parsed is kept between evaluations, in one
file of the user's cache folder for each version of the parser: LMDB's own file and the captions in it. A run works on a
copy and puts that in the file's place, so no lock is needed, a kill leaves the file whole, and LMDB never works on a
network's disk. Of two runs at once, what the one with more captions parsed is kept.

Scores come from a run that parses nothing, so they do not depend on what was known before: SPICE merges words in the
order of Java's identity hashes, which threads that parse draw in another order each time.
"""

import hashlib
import io
import os
import platform
import re
import shlex
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from m3diff.records.files import write_atomic
from m3diff.records.progress import progress
from m3diff.scoring.metrics import ALL, Groups, Item, Metric, MetricScores, Program, Tools, mean_of, of_each_group
from m3diff.scoring.metrics.java import JavaMissing, Scorer, ScorerFailed, require_java
from m3diff.scoring.pairs import EvalPair

ASM = tuple(f"asm{part}-7.3.1.jar" for part in ("", "-analysis", "-commons", "-tree", "-util"))
JARS = ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar")
NASHORN = ("nashorn-core-15.4.jar", *ASM)
"""The JavaScript with which SPICE writes its answer, and what it needs; Java had its own until 14."""
ARTIFACTS = (
    "edu.stanford.nlp:stanford-corenlp:3.6.0",
    "edu.stanford.nlp:stanford-corenlp:3.6.0:jar:models",
    "org.openjdk.nashorn:nashorn-core:15.4",
    *(f"org.ow2.asm:{name.removesuffix('-7.3.1.jar')}:7.3.1" for name in ASM),
)
"""Maven's names of `JARS` and `NASHORN`."""
FIRST_WITHOUT_JAVASCRIPT = 15
REMEDY = (
    f"needs {JARS[0]} and {JARS[1]}, which nothing here downloads: take them from "
    "http://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip (384 MB) and name their folder in "
    "compute.spice_dir"
)
"""The remedy where no folder is named at all."""
SECONDS_A_CAPTION = 1
"""The time limit's seconds for each caption of up to 20 words, beside its fixed part; of a longer one the cube of its
length, up to LONGEST_S. Two idle cores parse 50 of 10 words a second, two that other work shares 4."""
LONGEST_S = 900
LONGEST_KEPT = 500  # bytes; LMDB takes no longer key
PART = 2500
"""Captions that one process parses: it takes 6 s to load its models, and shows nothing until it ends."""
TRIAL: Item = ("the red cube turned blue", ("the red cube became blue",))
TRIAL_S = 600
LMDB, CAPTIONS = "data.mdb", "captions"
MOST = 500_000
"""Captions, 250 bytes each. A file with more is made anew."""
TAIL = 1 << 16  # bytes of a jar that hold its table of contents, with a checksum of each file
Start = Callable[[str, float], Scorer]


class CacheFailed(ScorerFailed):
    """The program failed in the code that keeps what it parsed."""


def program(of: Program) -> dict[Item, float | None]:
    """F of each item; None where neither side has a tuple.

    Raises:
        ScorerFailed: the jars are missing, or the program gave no result.
    """
    jars = find_jars(of.spice_dir)
    items = of.items()
    return dict(zip(items, score(of.start, jars, items, kept_file(jars)), strict=True))


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """A group's score is the mean F of those of its pairs that have one."""
    answers, tokens = tools.answers(), tools.tokens()
    values = {pair: answers[tokens.item(pair)] for pair in tokens.predictions}

    def mean(ids: list[str]) -> dict[str, float | None]:
        known = [values[i] for i in ids if values[i] is not None]
        return {"SPICE": sum(known) / len(known) if known else None}

    found = of_each_group(groups, mean)
    absent = {} if found[ALL]["SPICE"] is not None else {"SPICE": "no caption names an object, attribute or relation"}
    return MetricScores(found, {pair: {"SPICE": value} for pair, value in values.items()}, absent)


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
        try:
            return score_with(Path(folder), kept, start, jars, items, captions)
        except CacheFailed as failure:
            if kept:
                drop(kept)
            tell(f"parses {len(captions):,} captions without a cache: {failure}")
    return ask(start, jars, items, captions)


def score_with(
    folder: Path, kept: Path | None, start: Start, jars: Sequence[Path], items: Sequence[Item], captions: Sequence[str]
) -> list[float | None]:
    """Parse what is not known, in parts of which each is kept, and then score."""
    known = captions_of(kept, folder) if kept else set()
    # LMDB gets a byte of each letter of Latin-1, else three or six
    sizes = {
        text: sum(1 if letter < "\xff" else 3 if letter <= "\uffff" else 6 for letter in text) for text in captions
    }
    long = [text for text, size in sizes.items() if size > LONGEST_KEPT]
    new = [text for text, size in sizes.items() if size <= LONGEST_KEPT and text not in known]
    count = -(-len(new) // PART)
    parts = [new[place::count] for place in range(count)]
    for part in progress(parts, f"evaluate: SPICE parses {len(new):,} captions", unit="part") if parts else ():
        # pairs that hold each caption: the graph of all captions in one pair would take long to build
        pairs = [(one, (other,)) for one, other in zip(part[::2], [*part[1::2], part[-1]], strict=False)]
        whole = part is parts[-1] and not long
        found = ask(start, jars, items if whole else pairs, part, folder)
        if (folder / LMDB).is_file():  # else the program has no cache
            known.update(part)
            kept = kept and keep(folder, kept, known)
    return found if parts and whole and not known else ask(start, jars, items, long, folder)


def ask(
    start: Start, jars: Sequence[Path], items: Sequence[Item], new: Sequence[str], cache: Path | None = None
) -> list[float | None]:
    """The program's answer to items of which these captions are not parsed yet."""
    lengths = (len(caption.split()) / 20 for caption in new)
    worker = start("SPICE", sum(SECONDS_A_CAPTION * min(max(1, length**3), LONGEST_S) for length in lengths))
    job = {
        "items": items,
        "jars": [str(jar) for jar in jars if jar.name in JARS],
        "modules": [str(jar) for jar in jars if jar.name not in JARS],
        "cache": cache and str(cache),
        "parses": bool(new),
    }
    try:
        found: list[float | None] = worker.ask(job)
    except ScorerFailed as failure:
        if cache and re.search("lmdb|nustaq", worker.log.read_text(errors="replace")):
            raise CacheFailed(str(failure)) from None
        raise
    return found


def tell(note: str) -> None:
    print(f"SPICE: {note}", file=sys.stderr, flush=True)


def kept_file(jars: Sequence[Path]) -> Path:
    """The file of the captions that these jars parsed. Machines of other kinds, whose LMDB differs, have another."""
    key = hashlib.sha256(f"{version('pycocoevalcap')} {platform.system()} {platform.machine()}".encode())
    for jar in jars:
        with jar.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL))
            key.update(f"{jar.name} {size} ".encode() + file.read())
    given = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (given if given.is_absolute() else Path.home() / ".cache") / "m3diff" / f"spice-{key.hexdigest():.16}.zip"


def captions_of(kept: Path, folder: Path | None = None) -> set[str]:
    """The captions of the file, with LMDB's file in `folder`, where the program adds to it.

    None where there is no file, or it is damaged or has grown too large, which is said.
    """
    try:
        with zipfile.ZipFile(kept) as file:
            known = set(file.read(CAPTIONS).decode().split("\n"))
            if len(known) > MOST:
                raise ValueError(f"it holds {len(known):,} captions")
            if folder:
                (folder / LMDB).write_bytes(file.read(LMDB))
        return known
    except FileNotFoundError:
        return set()
    except (OSError, zipfile.BadZipFile, zlib.error, KeyError, EOFError, ValueError, NotImplementedError) as error:
        tell(f"{kept} is not used: {error}; captions are parsed anew")
    drop(kept)
    return set()


def drop(kept: Path) -> None:
    with suppress(OSError):
        kept.unlink(missing_ok=True)


def keep(folder: Path, kept: Path, known: set[str]) -> Path | None:
    """Put what the program has parsed by now in the file's place; returns None where it cannot be written, no fault."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.write(folder / LMDB, LMDB)
        file.writestr(CAPTIONS, "\n".join(sorted(known)))
    try:
        if len(captions_of(kept)) <= len(known):
            write_atomic(kept, packed.getvalue())
    except OSError as error:
        tell(f"parsed captions are not kept: {error}")
        return None
    return kept


def look(folder: Path | None, java: int) -> dict[str, Path | None]:
    """The file of each jar that this Java needs, None where it is missing; of Nashorn and ASM any version serves."""
    files = [] if folder is None or not folder.is_dir() else sorted(folder.iterdir())
    found = {}
    for name in JARS + NASHORN if java >= FIRST_WITHOUT_JAVASCRIPT else JARS:
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


def check_spice(spice_dir: Path | None) -> tuple[list[str], bool]:
    """Lines that say what SPICE needs and what of it is there, and whether one pair could be scored."""
    try:
        java = require_java()
        lines = [f"found   Java {java}"]
    except JavaMissing as error:
        java, lines = FIRST_WITHOUT_JAVASCRIPT, [f"MISSING {error}"]
    jars = look(spice_dir, java)
    lines += [f"found   {jar}" if jar else f"MISSING {(spice_dir or Path()) / name}" for name, jar in jars.items()]
    if missing := [name for name, jar in jars.items() if jar is None]:
        lines += how_to_fetch(missing, spice_dir or Path("spice"))
    if any(line.startswith("MISSING") for line in lines):
        return lines, False
    try:
        return [*lines, f"works   one pair scored {try_spice(spice_dir, TRIAL_S):.3f}"], True
    except ScorerFailed as failure:
        return [*lines, f"FAILED  {failure}"], False


def how_to_fetch(missing: Iterable[str], folder: Path) -> Iterator[str]:
    """Commands for a shell that put the missing jars into the folder, and their addresses."""
    artifacts = {name: ARTIFACTS[(JARS + NASHORN).index(name)] for name in missing}
    copy = f"mvn -q dependency:copy -Dartifact=$a -DoutputDirectory={shlex.quote(str(folder))}"
    yield "nothing here downloads them; with Maven:"
    yield f"    for a in {' '.join(artifacts.values())}; do {copy}; done"
    yield f"or by hand, into {folder}:"
    for name, artifact in artifacts.items():
        group, artifact_id, number = artifact.split(":")[:3]
        yield f"    https://repo1.maven.org/maven2/{group.replace('.', '/')}/{artifact_id}/{number}/{name}"
    yield "name the folder by --spice-dir, and for `m3diff evaluate` as compute.spice_dir in params.yaml"


METRIC = Metric(
    compute,
    headline="SPICE",
    scores=("SPICE",),
    columns={"SPICE": "double"},
    resampled={"SPICE": mean_of("SPICE")},
    program=program,
    optional=True,
)
