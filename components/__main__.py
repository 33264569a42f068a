"""The command line, one command per stage: `m3diff <stage>`. Heavy imports happen inside the command.

Exit codes: 0 done, 2 usage or parameters, 3 data refused, 4 gate refused, 75 try again later, other a bug.
"""

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from components.params import Params, ParamsError, load_params
from components.records import DataError

USAGE, DATA_REFUSED, GATE_REFUSED, TRY_AGAIN = 2, 3, 4, 75

Command = Callable[[Params, argparse.Namespace], int | None]
COMMANDS: dict[str, tuple[Command, str]] = {}


def command(help_text: str) -> Callable[[Command], Command]:
    def add(function: Command) -> Command:
        COMMANDS[function.__name__.replace("_", "-")] = (function, help_text)
        return function

    return add


@command("draw MiniChange, the embedded benchmark, in CLEVR-Change's layout")
def synthesize(params: Params, args: argparse.Namespace) -> None:
    from components.synthesize.stage import synthesize as run

    run(params.synthesize, params.paths.minichange)


@command("read every dataset's own layout into records")
def ingest(params: Params, args: argparse.Namespace) -> None:
    from components.ingest.stage import ingest as run

    run(params.ingest, params.paths.records)


@command("check records and images; what fails goes to quarantine with its reason")
def validate(params: Params, args: argparse.Namespace) -> None:
    from components.validate.stage import validate as run

    run(params.validate_, params.paths.records, params.paths.clean)


@command("turn clean records into question-answer samples")
def convert(params: Params, args: argparse.Namespace) -> None:
    from components.convert.stage import convert as run

    run(params.convert, params.paths.clean, params.paths.mixture)


@command("write the mixture as LLaVA records, for LLaVA-NeXT, LLaMA-Factory and ms-swift")
def export_llava(params: Params, args: argparse.Namespace) -> None:
    from components.export.llava import export_llava as run

    run(params.paths.mixture / "samples", args.out, args.lines)


@command("fine-tune M3Diff on the mixture")
def train(params: Params, args: argparse.Namespace) -> None:
    from components.train.stage import train as run

    run(params.train, params.paths.mixture, params.paths.model, params.paths.scratch)


@command("caption the test split")
def predict(params: Params, args: argparse.Namespace) -> None:
    from components.predict.stage import predict as run

    run(params.predict, params.paths.mixture, params.paths.model, params.paths.predictions)


@command("score the captions and draw the report")
def evaluate(params: Params, args: argparse.Namespace) -> None:
    from components.evaluate.stage import evaluate as run

    run(params.evaluate, params.paths.clean, params.paths.predictions, params.paths.model, params.paths.report)


@command("log the run to MLflow and register the model version")
def register(params: Params, args: argparse.Namespace) -> None:
    from components.register.stage import register as run

    print(run(params))


@command("make the challenger champion where it beats the champion")
def promote(params: Params, args: argparse.Namespace) -> int:
    from components.register.promotion import promote as run

    decision = run(params)
    print(decision)
    return GATE_REFUSED if decision.outcome == "refused" else 0


@command("look at data: `data check ROOT` before anything is run, `data statistics` after validate")
def data(params: Params, args: argparse.Namespace) -> int:
    if args.action == "statistics":
        from components.inspect.statistics import write_statistics

        write_statistics(params.paths.clean)
        print(f"written to {params.paths.clean / 'statistics.html'}")
        return 0
    from components.inspect.check import check

    found = check(args.root, tuple(params.ingest.datasets))
    print("\n".join(found.lines))
    return 0 if found.sound else DATA_REFUSED


@command("what a training run will cost: parameters, tokens, FLOPs, memory, hours; trains nothing")
def plan(params: Params, args: argparse.Namespace) -> None:
    from components.plan.plan import check_fits, make_plan, print_plan

    train, settings = params.train, params.models[params.train.model]
    made = make_plan(train, settings, params.compute, params.ingest.datasets, params.convert, params.paths.mixture)
    print_plan(train, params.compute, made, args.peak_tflops, args.mfu)
    check_fits(params.compute, made)


@command("copy the trained model out: merged, or its adapters with the way to their base")
def export(params: Params, args: argparse.Namespace) -> None:
    from components.models.m3diff.tuning import CheckpointError, export_checkpoint

    try:
        export_checkpoint(params.paths.model / "checkpoint", args.out, args.adapters)
    except CheckpointError as error:
        raise DataError(str(error)) from error


@command("pre-train the tiny base model from scratch (about 40 minutes on 2 cores)")
def base(params: Params, args: argparse.Namespace) -> None:
    from components.pretrain.stage import pretrain_base

    pretrain_base(params.train.base)


def die_with_parent() -> None:
    """Ask Linux to end this process when `dvc repro` dies, so that no trainer is left behind (PR_SET_PDEATHSIG)."""
    if sys.platform == "linux" and "DVC_STAGE" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="m3diff", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), help="parameter file or profile")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, help_text) in COMMANDS.items():
        subparsers.add_parser(name, help=help_text, description=help_text)
    for name in ("export", "export-llava"):
        subparsers.choices[name].add_argument("out", type=Path, help="folder to write")
    subparsers.choices["export"].add_argument("--adapters", action="store_true", help="what trained, not merged")
    subparsers.choices["export-llava"].add_argument(
        "--lines", action="store_true", help="JSON Lines instead of one JSON array"
    )
    look = subparsers.choices["data"].add_subparsers(dest="action", required=True, metavar="ACTION")
    look.add_parser("statistics", help="the papers' statistics of the clean records, and a page with plots and pairs")
    checking = look.add_parser("check", help="layout, missing files, counts against the published ones, problems")
    checking.add_argument("root", type=Path, help="folder of one dataset")
    planning = subparsers.choices["plan"]
    planning.add_argument("--peak-tflops", type=float, default=989.0, help="dense bf16 peak of one GPU (H100: 989)")
    planning.add_argument("--mfu", type=float, default=0.45, help="share of the peak that the step reaches")
    args = parser.parse_args(argv)
    die_with_parent()
    try:
        return COMMANDS[args.command][0](load_params(args.params), args) or 0
    except ParamsError as error:
        print(f"m3diff: {error}", file=sys.stderr)
        return USAGE
    except DataError as error:
        print(f"m3diff {args.command}: {error}", file=sys.stderr)
        return DATA_REFUSED
    except (ConnectionError, BlockingIOError) as error:
        print(f"m3diff {args.command}: {error}", file=sys.stderr)
        return TRY_AGAIN


if __name__ == "__main__":
    sys.exit(main())
