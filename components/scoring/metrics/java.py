"""Java and its programs, each in a process group of its own with a time limit; the PTB tokenizer first.

A program that dies or hangs costs its own score only.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unicodedata
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from m3diff.records.errors import DataError
from m3diff.scoring.metrics import worker

OLDEST_JAVA = 8
REMEDY = (
    "install a Java runtime, 8 or newer (17 is tested), and put it on PATH: "
    "`apt-get install openjdk-17-jre-headless` on Debian and Ubuntu, `brew install openjdk@17` on macOS"
)


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
        stderr = getattr(error, "stderr", None) or ""
        said = " / ".join(stderr.strip().splitlines()[-3:]) or error
        raise JavaMissing(f"{java}: does not start ({said}); {REMEDY}") from error
    found = re.search(r'version "(?:1\.)?(\d+)', answer)
    if not found or int(found[1]) < OLDEST_JAVA:
        raise JavaMissing(f"{java}: version not understood or too old ({answer.splitlines()[:1]}); {REMEDY}")
    return int(found[1])


class Scorer:
    """A worker process for one Java program. Leaving the context kills its whole process group."""

    def __init__(self, name: str, limit_s: float) -> None:
        self.limit_s = limit_s
        self.folder = tempfile.TemporaryDirectory(prefix=f"m3diff-{name.lower()}-")
        home = Path(self.folder.name)
        self.result_path, self.log = home / "result.json", home / "stderr"
        command = [sys.executable, "-P", worker.__file__, name, str(int(limit_s) + 5), str(home)]
        options = "-Duser.language=en -Dfile.encoding=UTF-8"
        environment = {**os.environ, "LC_ALL": "C.UTF-8", "JAVA_TOOL_OPTIONS": options}
        if name != "SPICE":  # which takes minutes and gigabytes, and adds to the user's options
            environment |= {"JAVA_TOOL_OPTIONS": " ".join((options, *worker.QUICK)), "JDK_JAVA_OPTIONS": ""}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, process_group=0
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.folder.cleanup()

    def ask(self, job: dict[str, Any]) -> Any:
        """The answer to the job, within the time limit, which begins now.

        Raises:
            ScorerFailed: the worker died, ran over its time, or reported an error.
        """
        assert self.process.stdin is not None
        deadline = time.monotonic() + self.limit_s
        with suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(json.dumps(job).encode())
        try:
            status = self.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise ScorerFailed(f"no answer within {self.limit_s:.0f} s (compute.scorer_timeout_s)") from None
        words = worker.last_words(self.log)
        if not self.result_path.is_file():
            raise ScorerFailed(f"its process ended with status {status}; its last words: {words}")
        answer = json.loads(self.result_path.read_text(encoding="utf-8"))
        if "error" in answer:
            raise ScorerFailed(answer["error"] + (f"; its last words: {words}" if words != "none" else ""))
        return answer["value"]


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

    Raises:
        ScorerFailed: without tokens there is no score at all.
    """
    texts = {caption: sanitise(caption) for caption in captions}
    distinct = sorted(set(texts.values()))
    with Scorer("PTB", limit_s) as scorer:
        try:
            tokens = dict(zip(distinct, scorer.ask({"captions": distinct}), strict=True))
        except ScorerFailed as failure:
            raise ScorerFailed(f"the PTB tokenizer, without which there is no score: {failure}") from None
    return {caption: tokens[text] for caption, text in texts.items()}
