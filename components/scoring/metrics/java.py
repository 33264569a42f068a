"""Java programs, each with a time limit; the PTB tokenizer first.

A program that dies or hangs costs its own score only.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from m3diff.records.errors import DataError
from m3diff.records.machine import usable_memory

OLDEST_JAVA = 8
REMEDY = (
    "install a Java runtime, 8 or newer (17 is tested), and put it on PATH: "
    "`apt-get install openjdk-17-jre-headless` on Debian and Ubuntu, `brew install openjdk@17` on macOS"
)
OPTIONS = "-Duser.language=en -Dfile.encoding=UTF-8"
HEAP_MB = min(1024, usable_memory() // 2**21)  # at most half of what a container or `ulimit -v` leaves
QUICK = {  # of programs that live for seconds
    "JAVA_TOOL_OPTIONS": f"{OPTIONS} -Xmx{HEAP_MB}M -XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "JDK_JAVA_OPTIONS": "",
}
LAUNCH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed parent takes the program with it
os.execvp("java", ["java", *sys.argv[1:]])
"""
# Starts of the lines of Java's output that say nothing of a failure: frames of a stack, options
NOT_WORDS = re.compile(r"at \S+\(|\.\.\. \d+ more|(NOTE: )?Picked up |$")
SENTINEL = "endofcaptions"


class JavaMissing(DataError):
    """No usable Java; the text names the remedy."""


class ScorerFailed(ChildProcessError):
    """A metric, or the tokenizer, gave no result; the text says why."""


def require_java() -> int:
    """The major version of the Java on PATH.

    Raises:
        JavaMissing: there is none, it does not start, or it is older than Java 8.
    """
    java = shutil.which("java")
    if java is None:
        raise JavaMissing(f"java: not found on PATH; the caption scores and their tokenizer need it: {REMEDY}")
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True).stderr
    except (OSError, subprocess.SubprocessError) as error:
        said = last_words(getattr(error, "stderr", None) or str(error))
        raise JavaMissing(f"{java}: does not start ({said}); {REMEDY}") from error
    found = re.search(r'version "(?:1\.)?(\d+)', answer)
    if not found or int(found[1]) < OLDEST_JAVA:
        raise JavaMissing(f"{java}: version not understood or too old ({answer.splitlines()[:1]}); {REMEDY}")
    return int(found[1])


def run(
    arguments: Sequence[str], folder: Path, limit_s: float, given: str = "", options: Mapping[str, str] = QUICK
) -> str:
    """The standard output of `java` with these arguments and standard input, run in `folder`.

    It outlives neither the call nor a killed caller.

    Raises:
        ScorerFailed: it ran over the time limit or failed; with its last words.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", LAUNCH, *arguments],
            cwd=folder,
            env={**os.environ, "LC_ALL": "C.UTF-8", **options},
            input=given.encode(),
            capture_output=True,
            timeout=limit_s,
            process_group=0,
        )
    except subprocess.TimeoutExpired:
        raise ScorerFailed(f"no answer within {limit_s:.0f} s (compute.scorer_timeout_s)") from None
    if done.returncode:
        killed = " (killed, as for lack of memory)" if done.returncode == -signal.SIGKILL else ""
        words = last_words(done.stderr.decode(errors="replace"))
        raise ScorerFailed(f"it ended with status {done.returncode}{killed}; its last words: {words}")
    return done.stdout.decode(errors="replace")


def last_words(output: str) -> str:
    """The last three lines of a program's output that tell of its failure."""
    lines = (line.strip() for line in output.splitlines())
    return " / ".join([line for line in lines if not NOT_WORDS.match(line)][-3:])[-600:] or "none"


def sanitise(caption: str) -> str:
    """A line of plain text: NFC, runs of any white space (U+2028, \\v, \\r ...) to one space, no METEOR separator, a
    lone surrogate as "?".

    The tokenizer ends a line at seven different characters; one that it met inside a caption would move every later
    caption to the wrong pair.
    """
    text = caption.encode("utf-8", "replace").decode()
    text = unicodedata.normalize("NFC", text).replace("\0", " ")
    return " ".join(re.sub(r"\|{3,}", " ", text).split())


def tokenise(captions: Iterable[str], limit_s: int) -> dict[str, str]:
    """PTB tokens of every distinct caption, keyed by the caption as it came.

    The command and what is left out of its answer are those of pycocoevalcap's PTBTokenizer. A sentinel at the end
    proves that no line slipped.

    Raises:
        ScorerFailed: without tokens there is no score at all.
    """
    from pycocoevalcap.tokenizer import ptbtokenizer as module

    texts = {caption: sanitise(caption) for caption in captions}
    lines = [*sorted(set(texts.values())), SENTINEL]
    jar = Path(module.__file__).with_name(module.STANFORD_CORENLP_3_4_1_JAR)
    command = ["-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase", "captions"]
    with TemporaryDirectory(prefix="m3diff-ptb-") as folder:
        Path(folder, "captions").write_text("\n".join(lines), encoding="utf-8")
        try:
            answer = run(command, Path(folder), limit_s).split("\n")
        except ScorerFailed as failure:
            raise ScorerFailed(f"the PTB tokenizer, without which there is no score: {failure}") from None
    found = [" ".join(w for w in line.rstrip().split(" ") if w not in module.PUNCTUATIONS) for line in answer]
    tokens = dict(zip(lines, found, strict=False))
    if tokens.get(SENTINEL) != SENTINEL:
        raise ScorerFailed(f"the PTB tokenizer gave {len(answer)} lines for {len(lines)} captions")
    return {caption: tokens[text] for caption, text in texts.items()}
