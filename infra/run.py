"""`make run`: the pipeline, with one line for each stage; what the tools say besides stands in a log that is named."""

import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from flows.dvc import environment, readable, repair_rwlock

LOGS = Path("runs/logs")
DVC = [sys.executable, "-m", "dvc", "repro"]
BEGUN = re.compile(r"Running stage '([^']+)':")
SKIPPED = re.compile(r"Stage '([^']+)' (is cached - skipping run|didn't change, skipping)")
PERCENT = re.compile(r"(\d+)%\|")
LEFT = re.compile(r"<([\d:]+)[,\]]")
STEP = re.compile(r"step (\d+)/(\d+).*?\bloss ([\d.]+).*\bETA (.+)$")
WARNING = re.compile(r"\bwarning: ")
EVERY_S = 30.0  # between two lines on how far a stage is, where no line can be written over
SHOWN = 20  # last lines of the log after a failure


class Board:
    """Writes a line for each stage: over itself on a terminal, else anew every so often."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.over = out, out.isatty()
        self.stage, self.began, self.shown = "", 0.0, 0.0

    def begin(self, stage: str) -> None:
        self.end()
        self.stage, self.began, self.shown = stage, time.monotonic(), time.monotonic()
        if self.over:
            self.write(f"{stage:<28} ...", "")

    def progress(self, text: str) -> None:
        if not self.stage:
            return
        if self.over:
            self.write(f"{self.stage:<28} {text}", "")
        elif time.monotonic() - self.shown >= EVERY_S:
            self.shown = time.monotonic()
            self.write(f"{self.stage:<28} {text}")

    def end(self, how: str = "ran") -> None:
        """The stage that runs is over."""
        if self.stage:
            self.write(f"{self.stage:<28} {how} in {lasted(time.monotonic() - self.began)}")
            self.stage = ""

    def note(self, text: str) -> None:
        self.write(text)

    def write(self, text: str, end: str = "\n") -> None:
        self.out.write(f"\r\x1b[K{text[:160]}{end}" if self.over else f"{text}{end}")
        self.out.flush()


def lasted(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


def how_far(line: str) -> str | None:
    """What a line says of the work that is done and left: of a training its step, of a bar its percentage."""
    if found := STEP.search(line):
        step, steps, loss, left = found.groups()
        return f"{int(step) / int(steps):4.0%}  step {step} of {steps}, loss {loss}, {left} left"
    if found := PERCENT.search(line):
        left = LEFT.search(line)
        return f"{found[1]:>3}%" + (f"  {left[1]} left" if left else "")
    return None


def run(command: Sequence[str], log: Path, out: TextIO) -> int:
    """Run DVC, show each stage, and keep all that is said in `log`; DVC's exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    board, last = Board(out), deque[str](maxlen=SHOWN)
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
    )
    assert process.stdout is not None
    with log.open("w", encoding="utf-8") as file:
        try:
            for line in readable(process.stdout):
                file.write(f"{time.strftime('%H:%M:%S')} {line}\n")
                file.flush()
                last.append(line)
                show(board, line)
            code = process.wait()
        except KeyboardInterrupt:  # DVC and the stage were asked by the same key
            board.end("stops")
            process.wait()
            raise
    board.end("failed" if code else "ran")
    if code:
        board.note("\n".join(["", *(f"  {line}" for line in last), "", f"make run: failed; all that was said: {log}"]))
    return code


def show(board: Board, line: str) -> None:
    if found := BEGUN.search(line):
        board.begin(found[1])
    elif found := SKIPPED.search(line):
        board.end()
        board.note(f"{found[1]:<28} {'restored' if 'cached' in found[2] else 'unchanged'}")
    elif WARNING.search(line):
        board.note(f"  {line}")
    elif text := how_far(line):
        board.progress(text)


def main() -> int:
    repair_rwlock(print)
    log = LOGS / f"run-{time.strftime('%Y%m%d-%H%M%S')}.log"
    print(f"the pipeline, stage by stage; all that its tools say: {log}\n", flush=True)
    try:
        return run(DVC, log, sys.stdout)
    except KeyboardInterrupt:
        print("make run: stopped; run it again to go on from the last checkpoint", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
