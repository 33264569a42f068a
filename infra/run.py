"""`make run`: the pipeline, its stages on the screen and all output in a log; then register, promote, a summary."""

import io
import json
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import TextIO

from flows.dvc import environment, readable
from m3diff.records.errors import DataError
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params

LOGS = Path("runs/logs")
DVC = [sys.executable, "-m", "dvc", "repro"]
SHOWN = re.compile(r"^(Running stage|Stage) '.*(:|skipping)|\bwarning: |^[a-z][\w@]*: .*(\d%\||\bETA )")
LAST = 20  # lines of the log after a failure

NEXT = """
next
  compare runs and versions in a browser:     make up
  try the model on a page, over HTTP:         make serve
  caption two images:                         m3diff caption BEFORE AFTER
  try another setting beside this one:        dvc exp run -S train.epochs=6
  your own pairs, which need a real base:     docs/your-data.md

Commands are in .venv: bin/m3diff works as it is; after `. .venv/bin/activate` so do all of docs/commands.md"""


def run(command: Sequence[str], log: Path, out: TextIO) -> int:
    """Run DVC, keep all that is said in `log`, and print of it stages, warnings and how far one is; DVC's exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    last, given = deque[str](maxlen=LAST), environment()
    process = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace")
    assert process.stdout is not None
    try:
        with log.open("w", encoding="utf-8") as file:
            for text in readable(process.stdout):
                line = f"{time.strftime('%H:%M:%S')} {text}"
                print(line, file=file, flush=True)
                last.append(line)
                if SHOWN.search(text):
                    print(line, file=out, flush=True)
    finally:  # a key that interrupts this asks DVC and the stage, too
        code = process.wait()
    if code:
        print("", *last, "", f"make run: failed; all that was said: {log}", sep="\n", file=out)
    return code


def headlines(report: Path) -> Iterator[str]:
    """The scores that runs are compared by, with their intervals, of each dataset's first protocol."""
    protocols = json.loads((report / "metrics.json").read_text())["protocols"]
    for name, scores in json.loads((report / "headline.json").read_text()).items():
        found = protocols[name]
        published = found.get("published_pairs")
        of = "" if published in (None, found["pairs"]) else f" of {published} that papers score"
        yield f"scores on {name}, {found['pairs']} pairs{of}; times 100, with 95 % intervals over pairs"
        for score in scores:
            interval = found["intervals"].get(score)
            bounds = f"   {100 * interval['low']:.1f} to {100 * interval['high']:.1f}" if interval else ""
            yield f"  {score:<22} {100 * found[score]:6.1f}{bounds}"
        yield ""


def summary(params: Params, registration: object, decision: object) -> str:
    """Scores, places, the gate's decision, training's warnings, and what to do next."""
    paths = params.paths
    trained = json.loads((paths.model / "report.json").read_text())
    rows = [
        ("report", (paths.report / "report.html").resolve()),
        ("predictions", (paths.predictions / "predictions.json").resolve()),
        ("model", f"{registration} in {params.register_.tracking_uri}"),
        ("gate", decision),
        *(("warning", f"training: {text}") for text in trained.get("warnings", [])),
    ]
    return "\n".join(["", *headlines(paths.report), *(f"{name:<12} {value}" for name, value in rows), NEXT])


def finish(params: Params) -> str:
    """Register and promote the trained model; the summary. What tools print to stderr is shown only where they fail."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            from m3diff.commands.rescore import rescore
            from m3diff.registry.promote import promote
            from m3diff.stages.register.stage import register

            registration = register(params)
            decision = promote(params, rescore, registration.version)
    except BaseException:
        print(said.getvalue(), end="", file=sys.stderr)
        raise
    return summary(params, registration, decision)


def main() -> int:
    log = LOGS / f"run-{time.strftime('%Y%m%d-%H%M%S')}.log"
    print(f"the pipeline, stage by stage; all that its tools say: {log}\n", flush=True)
    try:
        if code := run(DVC, log, sys.stdout):
            return code
        print(finish(load_params(Path("params.yaml"))))
    except KeyboardInterrupt:
        print("make run: stopped; run it again to go on from the last checkpoint", file=sys.stderr)
        return 130
    except (ParamsError, DataError, ConnectionError) as error:
        print(f"make run: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
