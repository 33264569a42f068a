"""SPICE (Anderson et al., ECCV 2016), pycocoevalcap's Java program and jars that come from elsewhere.

The program parses captions for minutes and scores them in seconds. What it parsed, LMDB's file, is kept in the user's
cache folder. A run works on a copy and puts that in the file's place, so no lock is needed, a kill leaves the file
whole, and LMDB never works on a network's disk.

Scores come from a run that parses nothing, so they do not depend on what was known before: SPICE merges words in the
order of Java's identity hashes, which threads that parse draw in another order each time.
"""

import json
import os
import platform
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from m3diff.records.copies import link_or_copy
from m3diff.records.files import write_atomic
from m3diff.scoring.metrics import Item, Metric, MetricScores, Tools, mean_of, of_each_group
from m3diff.scoring.metrics.java import OPTIONS, JavaMissing, ScorerFailed, last_words, require_java, run
from m3diff.scoring.pairs import ALL, EvalPair, Groups

JARS = dict.fromkeys(
    ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar"), "edu/stanford/nlp/stanford-corenlp/3.6.0"
)
# The JavaScript with which SPICE writes its answer, and what it needs; Java had its own until 14
NASHORN = {"nashorn-core-15.4.jar": "org/openjdk/nashorn/nashorn-core/15.4"} | {
    f"{name}-7.3.1.jar": f"org/ow2/asm/{name}/7.3.1"
    for name in ("asm", "asm-analysis", "asm-commons", "asm-tree", "asm-util")
}
MAVEN = "https://repo1.maven.org/maven2"  # the address that the folders of `JARS` and `NASHORN` are below
FIRST_WITHOUT_JAVASCRIPT = 15
# Packages of java.base that SPICE's serialiser looks into, which Java 16 and later forbid
PACKAGES = ("lang", "math", "util", "util.concurrent", "net", "text")
# The time limit's seconds for each caption of up to 20 words, beside its fixed part; of a longer one the cube of its
# length, up to LONGEST_S. Two idle cores parse 50 of 10 words a second, two that other work shares 4.
SECONDS_A_CAPTION, LONGEST_S = 1, 900
TRIAL: Item = ("the red cube turned blue", ("the red cube became blue",))
TRIAL_S = 600
LMDB = "data.mdb"
COUNTED_HASHES = "-XX:+UnlockExperimentalVMOptions -XX:hashCode=3"


def program(items: list[Item], spice_dir: Path | None, limit_s: int) -> dict[Item, float | None]:
    """F of each item; None where neither side has a tuple.

    Raises:
        ScorerFailed: the jars are missing, or the program gave no result.
    """
    return dict(zip(items, score(items, find_jars(spice_dir), kept_file(), limit_s), strict=True))


def compute(pairs: list[EvalPair], groups: Groups, tools: Tools) -> MetricScores:
    """A group's score is the mean F of those of its pairs that have one."""
    answers, tokens = tools.answers, tools.tokens
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
    (value,) = score([TRIAL], find_jars(spice_dir), None, limit_s)
    if value is None:
        raise ScorerFailed(f"its program found nothing to compare in {TRIAL[0]!r}")
    return value


def kept_file() -> Path | None:
    """The file of the captions that were parsed before; None on machines for which the program brings no LMDB."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "m3diff" / f"spice-{version('pycocoevalcap')}.mdb"


def score(items: Sequence[Item], jars: Sequence[Path], kept: Path | None, limit_s: int) -> list[float | None]:
    """F of each item, by what the file `kept` holds of captions parsed before; it gets those that are parsed now.

    Raises:
        ScorerFailed: the program gave no result. What it kept may be the reason, and is dropped.
    """
    with TemporaryDirectory(prefix="m3diff-spice-") as name:
        folder, cache = Path(name), Path(name, "cache")
        options = lay_out(folder, jars)
        if kept is None:
            return ask(folder, options, items, limit_s)
        cache.mkdir()
        known = b""
        with suppress(OSError):
            known = kept.read_bytes()
            (cache / LMDB).write_bytes(known)
        try:
            found = ask(folder, options, items, limit_s, cache)
            parsed = (cache / LMDB).read_bytes()
            if parsed == known:
                return found
            with suppress(OSError):
                write_atomic(kept, parsed)
            return ask(folder, options, items, limit_s, cache)
        except ScorerFailed:
            with suppress(OSError):
                kept.unlink()
            raise


def lay_out(folder: Path, jars: Sequence[Path]) -> dict[str, str]:
    """Put the program and its jars into the folder; returns Java's options.

    Nashorn's jars are modules, each by its name: a folder that holds CoreNLP too would be two modules of one name.
    Identity hashes are counted, so that they come in the same order each time where nothing is parsed in threads.
    """
    from pycocoevalcap import spice as package

    jar = Path(package.__file__).with_name("spice-1.0.jar")
    shutil.copyfile(jar, folder / jar.name)  # Java looks for its libraries beside the file that a link points to
    (folder / "lib").mkdir()
    (folder / "modules").mkdir()
    for path in jar.with_name("lib").iterdir():
        link_or_copy(path, folder / "lib" / path.name)
    for path in jars:
        link_or_copy(path, folder / ("lib" if path.name in JARS else "modules") / path.name)
    options = [os.environ.get("JDK_JAVA_OPTIONS", "")]
    options += [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in PACKAGES]
    modules = [str(Path("modules", path.name)) for path in jars if path.name in NASHORN]
    if modules:
        options += ["--module-path", os.pathsep.join(modules), "--add-modules", "org.openjdk.nashorn"]
    return {"JAVA_TOOL_OPTIONS": f"{OPTIONS} {COUNTED_HASHES}", "JDK_JAVA_OPTIONS": " ".join(options)}


def ask(
    folder: Path, options: dict[str, str], items: Sequence[Item], limit_s: float, cache: Path | None = None
) -> list[float | None]:
    """The program's answer to items; captions that the cache does not hold are parsed and put into it.

    Raises:
        ScorerFailed: it gave none.
    """
    captions = set(chain.from_iterable((prediction, *references) for prediction, references in items))
    lengths = (len(caption.split()) / 20 for caption in captions)
    limit_s += sum(SECONDS_A_CAPTION * min(max(1, length**3), LONGEST_S) for length in lengths)
    rows = [{"image_id": f"{i:09}", "test": test, "refs": refs} for i, (test, refs) in enumerate(items)]
    (folder / "items.json").write_text(json.dumps(rows), encoding="utf-8")
    command = ["-jar", "-XX:MaxRAMPercentage=75", "spice-1.0.jar", str(folder / "items.json")]
    command += ["-cache", str(cache)] if cache else []
    command += ["-out", str(folder / "scores.json"), "-subset", "-silent"]
    said = run(command, folder, limit_s, options=options)
    try:
        scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
        values = {one["image_id"]: one["scores"]["All"]["f"] for one in scores}
        found = [values[row["image_id"]] for row in rows]
    except (OSError, ValueError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ScorerFailed(f"it wrote no scores ({reason}); its last words: {last_words(said)}") from error
    return [None if f is None or f != f else float(f) for f in found]


def find_jars(spice_dir: Path | None) -> list[Path]:
    """The jars that the Java on PATH needs, absolute.

    Raises:
        ScorerFailed: no folder is named, or a jar is missing in it; the text says how to get them.
    """
    if spice_dir is None:
        raise ScorerFailed(
            f"needs {' and '.join(JARS)}, which nothing here downloads: take them from "
            "http://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip (384 MB) and name their folder in "
            "compute.spice_dir"
        )
    names = JARS | NASHORN if require_java() >= FIRST_WITHOUT_JAVASCRIPT else JARS
    jars = [spice_dir.absolute() / name for name in names]
    if missing := [jar.name for jar in jars if not jar.is_file()]:
        raise ScorerFailed(
            f"{spice_dir}: has no {' and no '.join(missing)}; `m3diff score --check-spice --spice-dir "
            f"{shlex.quote(str(spice_dir))}` prints the commands that fetch them"
        )
    return jars


def check_spice(spice_dir: Path | None) -> tuple[list[str], bool]:
    """Lines that say what SPICE lacks, with the commands that fetch its jars; and whether one pair could be scored."""
    folder = spice_dir or Path("spice")
    try:
        return [f"works   one pair scored {try_spice(folder, TRIAL_S):.3f}"], True
    except (JavaMissing, ScorerFailed) as error:
        places = {folder / name: f"{MAVEN}/{place}/{name}" for name, place in (JARS | NASHORN).items()}
        missing = {jar: place for jar, place in places.items() if not jar.is_file()}
        fetch = [f"curl -fL --create-dirs -o {shlex.quote(str(jar))} {place}" for jar, place in missing.items()]
        name = "name the folder by --spice-dir, and for `m3diff evaluate` as compute.spice_dir"
        return [f"FAILED  {error}", *fetch, name], False


METRIC = Metric(
    compute,
    headline="SPICE",
    scores=("SPICE",),
    columns={"SPICE": "double"},
    resampled={"SPICE": mean_of("SPICE")},
    program=program,
    optional=True,
    reads="English",
)
