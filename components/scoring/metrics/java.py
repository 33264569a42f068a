"""Run Java programs with a time limit, including the PTB tokenizer.

If a program crashes or hangs, only its score is lost. Programs run in parallel without threads: each one reads and
writes files, and the caller does other work until it needs the result.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Self

from m3diff.records.errors import CodedError, DataError
from m3diff.records.machine import available_memory, free_memory, usable_cpus, usable_memory

OLDEST_JAVA = 8
OPTIONS = "-Duser.language=en -Dfile.encoding=UTF-8"
HEAP_MB = min(1024, usable_memory() // 2**21)  # at most half of the memory that a container or `ulimit -v` allows
OUTSIDE_HEAP_MB = 150  # classes, compiled code and stacks of one program
# Options for programs that run for seconds: a small heap, and only the compiler and collector that start fast
QUICK_OPTIONS = {
    "JAVA_TOOL_OPTIONS": f"{OPTIONS} -Xmx{HEAP_MB}M -XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "JDK_JAVA_OPTIONS": "",
}
LAUNCH = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed parent takes the program with it
os.execvp("java", ["java", *sys.argv[1:]])
"""
# Matches lines of Java's output that do not explain a failure: stack frames, the options in use, and empty lines
NOISE = re.compile(r"at \S+\(|\.\.\. \d+ more|(NOTE: )?Picked up |$")
KILLING_S = 10  # seconds to wait until a killed program has ended
SENTINEL = "endofcaptions"  # last caption that is sent to the tokenizer


class JavaMissing(DataError):
    """Java is missing or cannot be used."""


class ScorerFailed(CodedError, ChildProcessError):
    """A metric or the tokenizer failed to give a result."""


def require_java() -> int:
    """Return the major version of the Java on PATH.

    Raises:
        JavaMissing: Java is missing, does not start, or is older than Java 8.
    """
    java = shutil.which("java")
    if java is None:
        raise JavaMissing("scoring.java_missing", limit=OLDEST_JAVA)
    file = os.stat(java)
    return _major_version(java, (file.st_ino, file.st_size, file.st_mtime_ns))


@cache  # starting Java takes up to half a second, and `m3diff score` asks for the version three times
def _major_version(java: str, file_identity: tuple[int, int, int]) -> int:
    """Return the major version of the Java at this path. The version is cached until `file_identity` changes."""
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True).stderr
    except (OSError, subprocess.SubprocessError) as error:
        reason = last_words(getattr(error, "stderr", None) or str(error))
        raise JavaMissing("scoring.java_does_not_start", path=java, cause=reason, limit=OLDEST_JAVA) from error
    version = re.search(r'version "(?:1\.)?(\d+)', answer)
    if not version or int(version[1]) < OLDEST_JAVA:
        first_line = answer.partition("\n")[0]
        raise JavaMissing("scoring.java_version_unusable", path=java, value=first_line, limit=OLDEST_JAVA)
    return int(version[1])


class JavaProgram:
    """A running `java` process. It is stopped when its context exits or the caller is killed.

    Its input and output are temporary files, so it never has to wait for the caller.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        limit_s: float,
        standard_input: str = "",
        options: Mapping[str, str] = QUICK_OPTIONS,
    ) -> None:
        """Start the program in `folder`.

        Args:
            limit_s: time limit in seconds. A program that exceeds it counts as failed.
            options: environment variables that hold Java's options.
        """
        self.limit_s = limit_s
        self.deadline = time.monotonic() + limit_s
        with ExitStack() as files:
            input_file = files.enter_context(TemporaryFile())
            input_file.write(standard_input.encode())
            input_file.seek(0)
            self.output: IO[bytes] = files.enter_context(TemporaryFile())
            self.errors: IO[bytes] = files.enter_context(TemporaryFile())
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", LAUNCH, *arguments],
                cwd=folder,
                env={**os.environ, "LC_ALL": "C.UTF-8", **options},
                stdin=input_file,
                stdout=self.output,
                stderr=self.errors,
                process_group=0,
            )
            self.files = files.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            # a process that waits for a broken disk does not end even now
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(KILLING_S)
        self.files.close()

    def result(self) -> str:
        """Wait for the program to finish and return its standard output.

        Raises:
            ScorerFailed: the program exceeded its time limit or failed. The error contains its last lines of output.
        """
        try:
            status = self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ScorerFailed("scoring.program_timeout", limit=self.limit_s) from None
        if status:
            raise ScorerFailed(
                "scoring.program_killed" if status == -signal.SIGKILL else "scoring.program_failed",
                status=status,
                last_words=last_words(_read_text(self.errors)),
            )
        return _read_text(self.output)


def _read_text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def run_java(
    arguments: Sequence[str],
    folder: Path,
    limit_s: float,
    standard_input: str = "",
    options: Mapping[str, str] = QUICK_OPTIONS,
) -> str:
    """Run `java` until it finishes and return its standard output.

    Raises:
        ScorerFailed: the program exceeded its time limit or failed. The error contains its last lines of output.
    """
    with JavaProgram(arguments, folder, limit_s, standard_input, options) as program:
        return program.result()


def programs_at_once(limit: int) -> int:
    """Return how many programs with `QUICK_OPTIONS` can run at once on these CPUs and in this memory: 1 to `limit`."""
    bytes_of_program = (HEAP_MB + OUTSIDE_HEAP_MB) << 20
    return max(1, min(limit, usable_cpus(), free_memory(available_memory()) // bytes_of_program))


def last_words(output: str) -> str:
    """Return the last three lines of output that help to explain why a program failed."""
    lines = [line.strip() for line in output.splitlines()]
    useful_lines = [line for line in lines if not NOISE.match(line)]
    return " / ".join(useful_lines[-3:])[-600:] or "none"


def sanitise(caption: str) -> str:
    """Return a caption as one line of text that the Java programs can read.

    The text is in NFC, all whitespace becomes single spaces, and METEOR's separator is removed. The tokenizer
    treats seven different characters as line ends. Any of them inside a caption would shift all later captions to the
    wrong pairs. A lone surrogate cannot be written to a file, so it becomes "?".
    """
    text = caption.encode("utf-8", "replace").decode()
    text = unicodedata.normalize("NFC", text).replace("\0", " ")
    return " ".join(re.sub(r"\|{3,}", " ", text).split())


def tokenise(captions: Iterable[str], limit_s: int) -> dict[str, str]:
    """Return the PTB tokens of each distinct caption, joined by spaces.

    The command and the removed punctuation are the same as in pycocoevalcap's PTBTokenizer. A sentinel as the last
    caption verifies that the lines of the output match the captions.

    Raises:
        ScorerFailed: the tokenizer failed, so no metric can be computed from tokens.
    """
    from pycocoevalcap.tokenizer import ptbtokenizer as module

    texts = {caption: sanitise(caption) for caption in captions}
    lines = [*sorted(set(texts.values())), SENTINEL]
    jar = Path(module.__file__).with_name(module.STANFORD_CORENLP_3_4_1_JAR)
    command = ["-cp", str(jar), "edu.stanford.nlp.process.PTBTokenizer", "-preserveLines", "-lowerCase", "captions"]
    with TemporaryDirectory(prefix="m3diff-ptb-") as folder:
        Path(folder, "captions").write_text("\n".join(lines), encoding="utf-8")
        try:
            answer = run_java(command, Path(folder), limit_s).split("\n")
        except ScorerFailed as failure:
            raise ScorerFailed("scoring.tokenizer_failed", cause=failure.fault) from None
    tokens = {}
    for line, answer_line in zip(lines, answer, strict=False):
        words = answer_line.rstrip().split(" ")
        tokens[line] = " ".join(word for word in words if word not in module.PUNCTUATIONS)
    if tokens.get(SENTINEL) != SENTINEL:
        raise ScorerFailed("scoring.tokenizer_line_count", value=len(answer), expected=len(lines))
    return {caption: tokens[text] for caption, text in texts.items()}
