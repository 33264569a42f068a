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
from m3diff.records.errors import DataError, Fault, ParamsError, format_count
from m3diff.runtime import prepare
from m3diff.settings.load import load_params
from m3diff.settings.rules import missing_inputs
from m3diff.settings.tree import Params

LOG_FOLDER = Path("runs/logs")
DVC_COMMAND = [sys.executable, "-m", "dvc", "repro"]
# Matches the output lines of DVC and the stages that are printed: names of stages, warnings and progress
PRINTED_LINE = re.compile(r"^(Running stage|Stage) '.*(:|skipping)|\bwarning: |^[a-z][\w@]*: .*(\d%\||\bETA )")
LINES_AFTER_FAILURE = 20

NEXT_STEPS = """
next
  compare runs and versions in a browser:     make up
  try the model on a page, over HTTP:         make serve
  caption two images:                         m3diff caption BEFORE AFTER
  try another setting beside this one:        dvc exp run -S train.epochs=6
  use your own pairs, with a real base:       docs/your-data.md

The commands are installed in .venv. bin/m3diff works directly; for all commands of docs/commands.md, first run
`. .venv/bin/activate`"""


def run_dvc(command: Sequence[str], log: Path, out: TextIO) -> int:
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


def format_headline_scores(report: Path) -> Iterator[str]:
    """Yield the lines of the summary that list the headline scores with their confidence intervals.

    Each dataset is shown with its first protocol. A protocol is a set of test pairs with the rules for scoring them.
    """
    protocols = json.loads((report / "metrics.json").read_text())["protocols"]
    for name, scores in json.loads((report / "headline.json").read_text()).items():
        protocol = protocols[name]
        pairs = protocol["pairs"]
        published_pairs = protocol.get("published_pairs")
        published_count = ""
        if published_pairs not in (None, pairs):
            published_count = f" of the {published_pairs} in papers"
        counts = format_count(pairs, "pair") + published_count
        yield f"scores on {name}, {counts}; times 100, with 95 % intervals over pairs"
        for score in scores:
            interval = protocol["intervals"].get(score)
            bounds = ""
            if interval:
                bounds = f"   {100 * interval['low']:.1f} to {100 * interval['high']:.1f}"
            yield f"  {score:<22} {100 * protocol[score]:6.1f}{bounds}"
        yield ""


def format_retention(report: Path) -> Iterator[str]:
    """Yield a line for each retention dataset: the first score of the model and of its base before the training."""
    for protocol, values in json.loads((report / "metrics.json").read_text()).get("retention", {}).items():
        scores = {name: score for name, score in values.items() if isinstance(score, dict) and "base" in score}
        for name, score in list(scores.items())[:1]:
            yield (
                f"what it kept of its base: {name} {100 * score['model']:.1f} on {protocol}, "
                f"{format_count(values['records'], 'question')}; the base had {100 * score['base']:.1f}"
            )
            yield ""


def format_summary(params: Params, registration: object, decision: object) -> str:
    """Return the summary of a run: scores, output paths, the promotion decision, training warnings and next steps."""
    paths = params.paths
    training_report = json.loads((paths.model / "report.json").read_text())
    lines = [
        "",
        *format_headline_scores(paths.report),
        *format_retention(paths.report),
        f"{'report':<12} {(paths.report / 'report.html').resolve()}",
        f"{'predictions':<12} {(paths.predictions / 'predictions.json').resolve()}",
        f"{'model':<12} {registration} in {params.register_.tracking_uri}",
        f"{'gate':<12} {decision}",
    ]
    lines += [f"{'warning':<12} training: {warning}" for warning in training_report.get("warnings", [])]
    return "\n".join([*lines, NEXT_STEPS])


def register_and_promote(params: Params) -> str:
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
    return format_summary(params, registration, decision)


def print_missing_inputs(params: Params) -> None:
    """Print a hint for each missing file of the base model, because DVC only prints `[Errno 2]` and the path.

    This is checked after a failure and not before the run, because DVC may check out the files during the run.
    """
    for fault in missing_inputs(params, "train"):
        print(f"make run: the training cannot start: {fault}")


def main() -> int:
    """Run the pipeline and return the exit code."""
    prepare()
    log = LOG_FOLDER / f"run-{time.strftime('%Y%m%d-%H%M%S')}.log"
    print(f"running the pipeline stage by stage; full output: {log}\n", flush=True)
    try:
        code = run_dvc(DVC_COMMAND, log, sys.stdout)
        if code:
            print_missing_inputs(load_params(Path("params.yaml")))
            return code
        print(register_and_promote(load_params(Path("params.yaml"))))
    except KeyboardInterrupt:
        print("make run: stopped; run it again to continue from the last checkpoint", file=sys.stderr)
        return 130
    except (ParamsError, DataError, ConnectionError) as error:
        print(f"make run: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
