"""A Java scorer in a process of its own: `worker.py NAME SECONDS FOLDER`, the job as JSON on standard input.

Writes FOLDER/result.json: {"value": ...} or {"error": reason}. Programs run in FOLDER, with links to the jars, so that
a read-only installation serves as well. Run by `java.Scorer`; imports nothing of the project.
"""

import ctypes
import gzip
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, compress
from pathlib import Path
from typing import Any

SENTINEL = "endofcaptions"
QUICK = ("-Xmx1G", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
"""Options of Java for programs that live for seconds, side by side, and would take each other's cores by compiling."""
METEOR = ["java", "-jar", "meteor-1.5.jar", "-", "-", "-stdio", "-l", "en", "-a", "paraphrases.gz"]
STATISTICS = 23
ITEMS_A_SHARD = 500
"""Fewer do not pay for the start of one more Java program."""
LONGEST_PHRASE = 7  # words; of the table
CHUNK = 1 << 13  # bytes of the table, read at once
USUAL = b"abcdefghijklmnopqrstuvwxyz0123456789 .-E\n"  # in the table
MARKED = bytes(byte if byte in USUAL else 0 for byte in range(256))
NORMAL = re.compile("[a-z0-9 ]*")
WORD = re.compile(rb"[a-z0-9]+")
ENTITY = re.compile("&(quot|apos|lt|gt|amp);")
NOT_WORDS = re.compile(r"at \S+\(|\.\.\. \d+ more|(NOTE: )?Picked up |$")
"""Starts of the lines of Java's output that say nothing of a failure: frames of a stack, options."""
PACKAGES = ("lang", "math", "util", "util.concurrent", "net", "text")
"""Packages of java.base that SPICE's serialiser looks into, which Java 16 and later forbid."""
GIB = 1 << 30
Job = dict[str, Any]
Item = tuple[str, list[str]]


def ptb(folder: Path, read_job: Callable[[], Job]) -> list[str]:
    """Job {"captions": [str]} -> their tokens, joined by spaces. A sentinel at the end proves that no line slipped.

    The command and what is left out of its answer are those of pycocoevalcap's PTBTokenizer.
    """
    from pycocoevalcap.tokenizer import ptbtokenizer as module

    jar = Path(module.__file__).with_name(module.STANFORD_CORENLP_3_4_1_JAR)
    command = ["java", "-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase"]

    captions = [*read_job()["captions"], SENTINEL]
    (folder / "captions").write_bytes("\n".join(captions).encode())
    answer = subprocess.run([*command, "captions"], cwd=folder, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    lines = answer.stdout.decode().split("\n")[: len(captions)]
    tokens = [" ".join(w for w in line.rstrip().split(" ") if w not in module.PUNCTUATIONS) for line in lines]
    if len(tokens) != len(captions) or tokens[-1] != SENTINEL:
        raise RuntimeError(f"the tokenizer gave {len(tokens)} lines for {len(captions)} captions")
    return tokens[:-1]


def meteor(folder: Path, read_job: Callable[[], Job]) -> list[list[float]]:
    """Job {"items": [[prediction, [reference]]], "shards"} -> the 23 statistics of each.

    A Java program keeps its whole paraphrase table in memory, 5 million entries that take it 15 s to read, so each
    gets a table of the entries that can match here. It is opened at once, before the job is known.
    """
    from pycocoevalcap.meteor import meteor as module

    home = Path(str(module.__file__)).parent
    (folder / module.METEOR_JAR).symlink_to(home / module.METEOR_JAR)
    with gzip.open(home / "data" / "paraphrase-en.gz") as file:
        table = file.read()

    job = read_job()
    items = job["items"]
    shards = max(1, min(job["shards"], len(items) // ITEMS_A_SHARD))
    with gzip.open(folder / "paraphrases.gz", "wb", compresslevel=1) as file:
        file.writelines(matching_paraphrases(table, items))
    table = b""
    order = sorted(range(len(items)), key=lambda i: needs_normalising(items[i]))
    parts = [order[part * len(order) // shards : (part + 1) * len(order) // shards] for part in range(shards)]
    with ThreadPoolExecutor(shards) as pool:
        found = pool.map(lambda part: ask_meteor(folder, part, [items[i] for i in parts[part]]), range(shards))
        answers = dict(zip(order, chain.from_iterable(found), strict=True))
    return [answers[i] for i in range(len(items))]


def matching_paraphrases(table: bytes, items: list[Item]) -> Iterator[bytes]:
    """The lines of METEOR's table whose phrases may stand in a reference and in a prediction, in the table's order.

    The table has three lines an entry: probability and two phrases, which METEOR matches either way round. Phrases are
    compared by their runs of ASCII letters and digits alone, which METEOR's own tokenizer never splits: a phrase
    without one may stand anywhere, and too many entries change nothing.
    """
    of_references = phrases(reference for _, references in items for reference in references)
    of_predictions = phrases(prediction for prediction, _ in items)

    def matches(one: bytes, other: bytes) -> bool:
        return (one in of_references and other in of_predictions) or (one in of_predictions and other in of_references)

    def plain(phrase: bytes) -> bytes:
        return b" ".join(WORD.findall(phrase)) + b"\n"

    is_known = (of_references | of_predictions).__contains__
    file = io.BytesIO(table)
    while lines := file.readlines(CHUNK):
        lines += [file.readline() for _ in range(-len(lines) % 3)]
        ones, others = lines[1::3], lines[2::3]
        kept = {at for at in compress(range(len(ones)), map(is_known, ones)) if matches(ones[at], others[at])}
        marked = b"".join(lines).translate(MARKED).split(b"\n")
        odd = {place // 3 for place, line in enumerate(marked) if b"\0" in line}
        kept.update(at for at in odd if matches(plain(ones[at]), plain(others[at])))
        for at in sorted(kept):
            yield from lines[3 * at : 3 * at + 3]


def phrases(texts: Iterable[str]) -> set[bytes]:
    """All runs of none to LONGEST_PHRASE words of ASCII letters and digits, a line each."""
    lowered = {text.lower() for text in texts}
    captions = {tuple(WORD.findall(text.encode())) for text in lowered | {ENTITY.sub(" ", text) for text in lowered}}
    longest = {words[start : start + LONGEST_PHRASE] for words in captions for start in range(len(words))}
    return {b"\n"} | {b" ".join(run[:size]) + b"\n" for run in longest for size in range(1, len(run) + 1)}


def needs_normalising(item: Item) -> bool:
    """True where METEOR's normaliser, which takes a third of its time, could change a text with punctuation."""
    return not all(map(NORMAL.fullmatch, (item[0], *item[1])))


def ask_meteor(folder: Path, number: int, items: list[Item]) -> list[list[float]]:
    """The program's answer to each item."""
    # of the best references it takes the first, so one that comes again changes nothing
    lines = [" ||| ".join(("SCORE", *dict.fromkeys(references), prediction)) for prediction, references in items]
    command = [*METEOR, "-norm"] if any(map(needs_normalising, items)) else METEOR
    log = folder / f"stderr{number}"
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as java,
    ):
        answer, _ = java.communicate("".join(f"{line}\n" for line in lines).encode())
    try:
        found = [[float(number) for number in line.split()] for line in answer.decode().splitlines()]
        if len(found) != len(lines) or any(len(numbers) != STATISTICS for numbers in found):
            raise ValueError(f"{len(found)} answers to {len(lines)} captions")
    except ValueError as error:
        raise RuntimeError(f"METEOR gave up ({error}); its last words: {last_words(log)}") from error
    return found


def last_words(log: Path) -> str:
    """The last three lines of a program's output that tell of its failure."""
    lines = (line.strip() for line in log.read_text(errors="replace").splitlines())
    return " / ".join([line for line in lines if not NOT_WORDS.match(line)][-3:])[-600:] or "none"


def spice(folder: Path, read_job: Callable[[], Job]) -> list[float | None]:
    """Job {"items": [[prediction, [reference]]], "jars": the CoreNLP files, "modules": of Nashorn, "cache": a folder
    for parsed captions or null, "parses": whether a caption is not in it} -> F of each.

    A pair without a single tuple on either side has no F: None. The command is the package's own.
    """
    from pycocoevalcap import spice as package

    program = Path(package.__file__).with_name("spice-1.0.jar")

    job = read_job()
    shutil.copy(program, folder)  # Java looks for its libraries beside the file that a link points to
    shutil.copytree(program.with_name("lib"), folder / "lib", copy_function=os.symlink)
    for jar in job["jars"]:
        (folder / "lib" / Path(jar).name).symlink_to(jar)
    items = [{"image_id": f"{i:09}", "test": test, "refs": refs} for i, (test, refs) in enumerate(job["items"])]
    (folder / "items.json").write_text(json.dumps(items), encoding="utf-8")
    cache = ["-cache", job["cache"]] if job["cache"] else []
    files = [str(folder / "items.json"), *cache, "-out", str(folder / "scores.json")]
    command = ["java", "-jar", f"-Xmx{heap()}G", program.name, *files, "-subset", "-silent"]
    environment = spice_environment(folder, job)
    done = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    (folder / program.name).unlink()
    if done.returncode != 0:
        killed = " (killed, as for lack of memory)" if done.returncode == -signal.SIGKILL else ""
        raise RuntimeError(f"SPICE ended with status {done.returncode}{killed}")
    scores = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    values = {one["image_id"]: one["scores"]["All"]["f"] for one in scores}
    return [None if (f := values[item["image_id"]]) is None or f != f else float(f) for item in items]


def spice_environment(folder: Path, job: Job) -> dict[str, str]:
    """With Nashorn as modules, each by its name: a folder that holds CoreNLP too would be two modules of one name.

    Identity hashes are counted, so that they come in the same order each time where nothing is parsed in threads.
    """
    own = os.environ.get("JDK_JAVA_OPTIONS", "")
    options = [own, *(f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in PACKAGES)]
    if job["modules"]:
        (folder / "modules").mkdir()
        links = [Path("modules") / Path(jar).name for jar in job["modules"]]
        for jar, link in zip(job["modules"], links, strict=True):
            (folder / link).symlink_to(jar)
        options += ["--module-path", os.pathsep.join(map(str, links)), "--add-modules", "org.openjdk.nashorn"]
    virtual_machine = [os.environ["JAVA_TOOL_OPTIONS"], "-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=3"]
    if not job["parses"]:
        collector = "-XX:+UseSerialGC"
        virtual_machine += [option for option in QUICK if option != collector or "GC" not in own]
    return {**os.environ, "JAVA_TOOL_OPTIONS": " ".join(virtual_machine), "JDK_JAVA_OPTIONS": " ".join(options)}


def heap() -> int:
    """GiB that SPICE may take: 8, or three quarters of a smaller memory, of a container's where this is one."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        size = min(size, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return max(1, min(8, size * 3 // 4 // GIB))


def main() -> None:
    name, seconds, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])

    def end(*_: object) -> None:
        """For a parent that was itself killed: otherwise it ends the group, and earlier."""
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    def read_job() -> Job:
        job: Job = json.load(sys.stdin)
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, end)
        signal.alarm(seconds)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: at once
        return job

    try:
        answer = {"value": {"PTB": ptb, "METEOR": meteor, "SPICE": spice}[name](folder, read_job)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    (folder / "result.part").write_text(json.dumps(answer), encoding="utf-8")
    (folder / "result.part").rename(folder / "result.json")
    os._exit(0)  # no destructors: Meteor.__del__ waits for a lock that a failed call never gave back


if __name__ == "__main__":
    main()
