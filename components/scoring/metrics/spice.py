"""Compute SPICE (Anderson et al., ECCV 2016) with pycocoevalcap's Java program and jars that the user downloads.

The program takes minutes to parse captions but only seconds to score them, so parses are cached (`parses.py`).

The scores come from a run in which all captions are already parsed, so they do not depend on which captions were cached
before. SPICE merges words in the order of Java's identity hashes. These have the same values in every such run, because
the thread that scores is the only one that takes hashes (`HASHES_PER_THREAD`, `extract_native_libraries`).
"""

import json
import math
import os
import shlex
import shutil
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from m3diff.records.copies import link_or_copy
from m3diff.scoring.metrics import Item, Metric, MetricInputs, MetricScores, Program, mean_of, score_each_group
from m3diff.scoring.metrics.java import OPTIONS, JavaMissing, ScorerFailed, last_words, require_java, run_java
from m3diff.scoring.metrics.parses import (
    LMDB,
    ParsedCaptions,
    captions_to_parse,
    find_cache_file,
    read_parses,
    store_parses,
)
from m3diff.scoring.pairs import ALL_PAIRS, EvalPair, Groups

JARS = dict.fromkeys(
    ("stanford-corenlp-3.6.0.jar", "stanford-corenlp-3.6.0-models.jar"), "edu/stanford/nlp/stanford-corenlp/3.6.0"
)
# SPICE writes its output with a JavaScript engine, which Java included up to version 14. Later versions need these jars
NASHORN = {"nashorn-core-15.4.jar": "org/openjdk/nashorn/nashorn-core/15.4"} | {
    f"{name}-7.3.1.jar": f"org/ow2/asm/{name}/7.3.1"
    for name in ("asm", "asm-analysis", "asm-commons", "asm-tree", "asm-util")
}
# Not in messages.toml, because metrics.json contains this text, and a change of wording must not change an output
NO_SPICE_DIR = (
    f"needs {' and '.join(JARS)}, which nothing here downloads: take them from "
    "http://nlp.stanford.edu/software/stanford-corenlp-full-2015-12-09.zip (384 MB) and name their folder in "
    "compute.spice_dir"
)
MAVEN = "https://repo1.maven.org/maven2"  # base URL of the folders in `JARS` and `NASHORN`
FIRST_WITHOUT_JAVASCRIPT = 15
# Packages of java.base that SPICE's serialiser accesses by reflection, which Java 16 and later forbid by default
REFLECTED_PACKAGES = ("lang", "math", "util", "util.concurrent", "net", "text")
# Seconds that each caption of up to 20 words adds to the time limit. A longer caption adds more, in proportion to the
# cube of its length, up to MAX_SECONDS_A_CAPTION. Two idle cores parse 50 captions of 10 words per second, two busy
# cores parse 4
SECONDS_A_CAPTION = 1
MAX_SECONDS_A_CAPTION = 900
TRIAL: Item = ("the red cube turned blue", ("the red cube became blue",))
TRIAL_S = 600
# Each thread has its own sequence of identity hashes, and the main thread, which scores, always begins with the same
# value. With the counter that all threads share (hashCode=3), the scores of 1,000 images had one of two values, each in
# 6 of 12 runs on busy cores. Constant hashes (hashCode=2) make CoreNLP lose words
HASHES_PER_THREAD = "-XX:+UnlockExperimentalVMOptions -XX:hashCode=5"
# Used if nothing is parsed: Java's second compiler would take longer than it saves
ONE_COMPILER = "-XX:TieredStopAtLevel=1"
SERIAL_COLLECTOR = "-XX:+UseSerialGC"
NATIVE = "native"  # folder of LMDB's native libraries, next to the program
NATIVE_IN_JAR = "META-INF/native/"


class SpiceProgram(Program):
    """SPICE's Java program. It needs most of the memory, so it runs only inside `answers`, when METEOR has finished."""

    def __init__(self, spice_dir: Path | None, limit_s: int) -> None:
        self.spice_dir = spice_dir
        self.limit_s = limit_s
        self.items: Sequence[Item] = ()

    def start(self, items: Sequence[Item]) -> None:
        """Keep the items until `answers` runs the program on them. Nothing is started yet."""
        self.items = items

    def answers(self) -> dict[Item, float | None]:
        """Run the program and return the F-score of each item.

        The score is None if neither the prediction nor the references contain a SPICE tuple.

        Raises:
            ScorerFailed: jars are missing, or the program gave no result.
        """
        jars = find_jars(self.spice_dir)
        cache_file = find_cache_file(parser_jars(jars), require_java())
        values = score_items(self.items, jars, cache_file, self.limit_s)
        return dict(zip(self.items, values, strict=True))

    def close(self) -> None:
        """Do nothing, because the program runs only inside `answers`."""


def compute(pairs: list[EvalPair], groups: Groups, inputs: MetricInputs) -> MetricScores:
    """Score pairs and groups. A group's score is the mean F-score of its pairs that have one."""
    tokens = inputs.tokens
    pair_scores = {pair_id: inputs.answers[tokens.item(pair_id)] for pair_id in tokens.predictions}

    def mean(pair_ids: list[str]) -> dict[str, float | None]:
        scores = [pair_scores[pair_id] for pair_id in pair_ids if pair_scores[pair_id] is not None]
        return {"SPICE": sum(scores) / len(scores) if scores else None}

    means = score_each_group(groups, mean)
    absent = (
        {} if means[ALL_PAIRS]["SPICE"] is not None else {"SPICE": "no caption names an object, attribute or relation"}
    )
    return MetricScores(means, {pair_id: {"SPICE": score} for pair_id, score in pair_scores.items()}, absent)


def try_spice(spice_dir: Path | None, limit_s: int) -> float:
    """Score one pair without cached parses, so that every part of the program runs, and return its F-score.

    Raises:
        ScorerFailed: SPICE does not work on this machine.
    """
    (value,) = score_items([TRIAL], find_jars(spice_dir), None, limit_s)
    if value is None:
        raise ScorerFailed("scoring.spice_found_nothing", value=TRIAL[0])
    return value


def score_items(
    items: Sequence[Item], jars: Sequence[Path], cache_file: Path | None, limit_s: int
) -> list[float | None]:
    """Return the F-score of each item.

    Args:
        cache_file: cache file of parsed captions, which is updated. None to parse all captions without a cache.

    Raises:
        ScorerFailed: the program gave no result. The cache file is removed, because it may be the cause.
    """
    with TemporaryDirectory(prefix="m3diff-spice-") as folder_name:
        folder = Path(folder_name)
        copy_program(folder, jars)
        if cache_file is None:
            return run_program(folder, java_options(jars, is_parsing=True), items, limit_s)
        cache = folder / "cache"
        cache.mkdir()
        parses = read_parses(cache_file)
        if parses.lmdb:
            (cache / LMDB).write_bytes(parses.lmdb)
        try:
            new_captions = captions_to_parse(captions_of(items), parses)
            if new_captions:
                items_to_parse = [item for item in items if not new_captions.isdisjoint(captions_of([item]))]
                run_program(folder, java_options(jars, is_parsing=True), items_to_parse, limit_s, cache)
                all_captions = parses.captions | new_captions
                store_parses(cache_file, ParsedCaptions(all_captions, (cache / LMDB).read_bytes()))
            return run_program(folder, java_options(jars, is_parsing=False), items, limit_s, cache)
        except ScorerFailed:
            with suppress(OSError):
                cache_file.unlink()
            raise


def captions_of(items: Sequence[Item]) -> list[str]:
    """Return the predictions and references of the items."""
    captions = []
    for prediction, references in items:
        captions += [prediction, *references]
    return captions


def copy_program(folder: Path, jars: Sequence[Path]) -> None:
    """Put the program and its jars into the folder.

    Nashorn's jars are modules and need a separate folder. In a shared folder, CoreNLP's two jars would also be loaded
    as modules, and both would have the same name.
    """
    jar = spice_jar()
    # not a link, because Java would look for the program's libraries next to the target of the link
    shutil.copyfile(jar, folder / jar.name)
    (folder / "lib").mkdir()
    (folder / "modules").mkdir()
    for path in jar.with_name("lib").iterdir():
        link_or_copy(path, folder / "lib" / path.name)
    for path in jars:
        link_or_copy(path, folder / ("lib" if path.name in JARS else "modules") / path.name)
    extract_native_libraries(folder)


def extract_native_libraries(folder: Path) -> None:
    """Extract LMDB's native libraries from the program's jars into the folder `NATIVE`.

    A program that extracts its library also starts `chmod`. Java waits for that process in a thread that hashes objects
    of the main thread, sometimes before the main thread does. The main thread's later hashes, and with them the scores
    of some images, would depend on which thread was faster.
    """
    (folder / NATIVE).mkdir()
    for path in (folder / "lib").glob("lmdbjni*.jar"):
        with zipfile.ZipFile(path) as jar:
            for name in jar.namelist():
                if name.startswith(NATIVE_IN_JAR) and not name.endswith("/"):
                    (folder / NATIVE / Path(name).name).write_bytes(jar.read(name))


def spice_jar() -> Path:
    """Return the path of the program's main jar, which is part of pycocoevalcap."""
    from pycocoevalcap import spice as package

    return Path(package.__file__).with_name("spice-1.0.jar")


def parser_jars(jars: Sequence[Path]) -> list[Path]:
    """Return the jars that determine how a caption is parsed: CoreNLP's jars in `jars` and the jars of the program."""
    program_jar = spice_jar()
    corenlp_jars = [jar for jar in jars if jar.name in JARS]
    return [*corenlp_jars, program_jar, *sorted(program_jar.with_name("lib").iterdir())]


def java_options(jars: Sequence[Path], is_parsing: bool) -> dict[str, str]:
    """Return Java's options as environment variables.

    Identity hashes have the same order in every run that does not parse.
    """
    users_options = os.environ.get("JDK_JAVA_OPTIONS", "")
    options = [users_options]
    options += [f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in REFLECTED_PACKAGES]
    modules = [str(Path("modules", path.name)) for path in jars if path.name in NASHORN]
    if modules:
        options += ["--module-path", os.pathsep.join(modules), "--add-modules", "org.openjdk.nashorn"]
    machine_options = [OPTIONS, HASHES_PER_THREAD]
    if not is_parsing:
        machine_options.append(ONE_COMPILER)
        if "GC" not in users_options:  # Java does not accept two collectors
            machine_options.append(SERIAL_COLLECTOR)
    return {"JAVA_TOOL_OPTIONS": " ".join(machine_options), "JDK_JAVA_OPTIONS": " ".join(options)}


def run_program(
    folder: Path, options: dict[str, str], items: Sequence[Item], limit_s: float, cache: Path | None = None
) -> list[float | None]:
    """Run the program and return the F-score of each item. Captions missing from the cache are added.

    Raises:
        ScorerFailed: the program gave no result.
    """
    captions = set(captions_of(items))
    lengths = (len(caption.split()) / 20 for caption in captions)
    limit_s += sum(SECONDS_A_CAPTION * min(max(1, length**3), MAX_SECONDS_A_CAPTION) for length in lengths)
    rows = [
        {"image_id": f"{number:09}", "test": prediction, "refs": references}
        for number, (prediction, references) in enumerate(items)
    ]
    (folder / "items.json").write_text(json.dumps(rows), encoding="utf-8")
    command = [f"-Dlibrary.lmdbjni.path={folder / NATIVE}", "-XX:MaxRAMPercentage=75"]
    command += ["-jar", "spice-1.0.jar", str(folder / "items.json")]
    command += ["-cache", str(cache)] if cache else []
    command += ["-out", str(folder / "scores.json"), "-subset", "-silent"]
    output = run_java(command, folder, limit_s, options=options)
    try:
        results = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
        score_by_id = {result["image_id"]: result["scores"]["All"]["f"] for result in results}
        scores = [score_by_id[row["image_id"]] for row in rows]
    except (OSError, ValueError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ScorerFailed("scoring.spice_no_scores", cause=reason, last_words=last_words(output)) from error
    return [None if score is None or math.isnan(score) else float(score) for score in scores]


def find_jars(spice_dir: Path | None) -> list[Path]:
    """Return the absolute paths of the jars that SPICE needs with the installed version of Java.

    Raises:
        ScorerFailed: `spice_dir` is None, or a jar is missing from this folder.
    """
    if spice_dir is None:
        raise ScorerFailed("scoring.not_configured", cause=NO_SPICE_DIR)
    names = JARS | NASHORN if require_java() >= FIRST_WITHOUT_JAVASCRIPT else JARS
    jars = [spice_dir.absolute() / name for name in names]
    missing_jars = [jar.name for jar in jars if not jar.is_file()]
    if missing_jars:
        raise ScorerFailed("scoring.spice_jars_missing", path=spice_dir, names=missing_jars)
    return jars


class SpiceCheck(NamedTuple):
    """The result of `check_spice`: lines to print, and whether SPICE could score a pair."""

    lines: list[str]
    works: bool


def check_spice(spice_dir: Path | None) -> SpiceCheck:
    """Try to score one pair with SPICE. If that fails, the lines include the commands that download its jars."""
    folder = spice_dir or Path("spice")
    try:
        return SpiceCheck([f"works   one pair scored {try_spice(folder, TRIAL_S):.3f}"], works=True)
    except (JavaMissing, ScorerFailed) as error:
        lines = [f"FAILED  {error}"]
        for name, maven_folder in (JARS | NASHORN).items():
            jar = folder / name
            if not jar.is_file():
                lines.append(f"curl -fL --create-dirs -o {shlex.quote(str(jar))} {MAVEN}/{maven_folder}/{name}")
        lines.append("set the folder with --spice-dir, and for `m3diff evaluate` with compute.spice_dir")
        return SpiceCheck(lines, works=False)


METRIC = Metric(
    compute,
    main_score="SPICE",
    scores=("SPICE",),
    columns={"SPICE": "double"},
    resampled={"SPICE": mean_of("SPICE")},
    program=SpiceProgram,
    extra_input="spice_dir",
    reads="English",
)
