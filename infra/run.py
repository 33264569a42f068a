"""Implement `make run`: run the pipeline, register and promote the model, and print a summary.

The full output is written to a log.
"""

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

from flows.dvc import environment, readable_lines
from m3diff.records.errors import DataError, Fault, ParamsError
from m3diff.runtime import prepare
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params

LOGS = Path("runs/logs")
DVC = [sys.executable, "-m", "dvc", "repro"]
# Matches the output lines of DVC and the stages that are printed: names of stages, warnings and progress
PRINTED_LINE = re.compile(r"^(Running stage|Stage) '.*(:|skipping)|\bwarning: |^[a-z][\w@]*: .*(\d%\||\bETA )")
LINES_AFTER_FAILURE = 20

NEXT_STEPS = """
next
  compare runs and versions in a browser:     make up
  try the model on a page, over HTTP:         make serve
  caption two images:                         m3diff caption BEFORE AFTER
  try another setting beside this one:        dvc exp run -S train.epochs=6
  your own pairs, which need a real base:     docs/your-data.md

Commands are in .venv: bin/m3diff works as it is; after `. .venv/bin/activate` so do all of docs/commands.md"""


def run(command: Sequence[str], log: Path, out: TextIO) -> int:
    """Run DVC and return its exit code.

    All output is written to `log`. Stages, warnings and progress are also printed to `out`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    last_lines = deque[str](maxlen=LINES_AFTER_FAILURE)
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace"
    )
    assert process.stdout is not None
    try:
        with log.open("w", encoding="utf-8") as file:
            for text in readable_lines(process.stdout):
                line = f"{time.strftime('%H:%M:%S')} {text}"
                print(line, file=file, flush=True)
                last_lines.append(line)
                if PRINTED_LINE.search(text):
                    print(line, file=out, flush=True)
    finally:  # Ctrl-C also reaches DVC and the stage, which stop by themselves
        code = process.wait()
    if code:
        fault = Fault("infra.pipeline_failed", exit_code=code, log=log)
        print("", *last_lines, "", f"make run: {fault}", sep="\n", file=out)
    return code


def headlines(report: Path) -> Iterator[str]:
    """Yield the lines of the summary that list the headline scores with their confidence intervals.

    Each dataset is shown with its first protocol. A protocol is a set of test pairs with the rules for scoring them.
    """
    protocols = json.loads((report / "metrics.json").read_text())["protocols"]
    for name, scores in json.loads((report / "headline.json").read_text()).items():
        protocol = protocols[name]
        pairs = protocol["pairs"]
        published_pairs = protocol.get("published_pairs")
        share = "" if published_pairs in (None, pairs) else f" of {published_pairs} that papers score"
        yield f"scores on {name}, {pairs} pairs{share}; times 100, with 95 % intervals over pairs"
        for score in scores:
            interval = protocol["intervals"].get(score)
            bounds = f"   {100 * interval['low']:.1f} to {100 * interval['high']:.1f}" if interval else ""
            yield f"  {score:<22} {100 * protocol[score]:6.1f}{bounds}"
        yield ""


def summary(params: Params, registration: object, decision: object) -> str:
    """Return the summary of a run: scores, output paths, the promotion decision, training warnings and next steps."""
    paths = params.paths
    training_report = json.loads((paths.model / "report.json").read_text())
    lines = [
        "",
        *headlines(paths.report),
        f"{'report':<12} {(paths.report / 'report.html').resolve()}",
        f"{'predictions':<12} {(paths.predictions / 'predictions.json').resolve()}",
        f"{'model':<12} {registration} in {params.register_.tracking_uri}",
        f"{'gate':<12} {decision}",
    ]
    lines += [f"{'warning':<12} training: {warning}" for warning in training_report.get("warnings", [])]
    return "\n".join([*lines, NEXT_STEPS])


def finish(params: Params) -> str:
    """Register and promote the trained model, and return the summary. Output to stderr is shown only on failure."""
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            from m3diff.commands.rescore import rescore
            from m3diff.registry.promote import promote
            from m3diff.stages.register.stage import register

            registration = register(params)
            decision = promote(params, rescore, registration.version)
    except BaseException:
        print(errors.getvalue(), end="", file=sys.stderr)
        raise
    return summary(params, registration, decision)


def main() -> int:
    """Run the pipeline and return the exit code."""
    prepare()
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
