"""Image difference captioning, one command per stage: `m3diff <stage>`.

`COMMANDS` lists all commands. The module of a command is imported only when the command is used, and its libraries are
imported only after the parameters have been checked. This makes `m3diff --help` fast.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import signal
import sys
from pathlib import Path

from m3diff.command_line.command import CommandEntry, Group
from m3diff.command_line.distribution import fault_of_missing_package, load_parameters
from m3diff.command_line.exit_codes import DATA_REFUSED, READER_LEFT, TRY_AGAIN, USAGE
from m3diff.command_line.parser import parse
from m3diff.models.device import DeviceError
from m3diff.records.errors import DataError, Fault, ParamsError
from m3diff.runtime import prepare

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

COMMANDS = {
    "code": CommandEntry(
        group=Group.STAGES,
        summary="write what code each stage runs, by meaning; DVC compares it",
        module="m3diff.command_line.code",
    ),
    "pretrain": CommandEntry(
        group=Group.STAGES,
        summary="pre-train a tiny base model (from scratch: about two hours on one core)",
        module="m3diff.command_line.pretrain",
    ),
    "synthesize": CommandEntry(
        group=Group.STAGES,
        summary="generate a synthetic dataset, such as MiniChange",
        module="m3diff.command_line.synthesize",
    ),
    "augment": CommandEntry(
        group=Group.STAGES,
        summary="make synthetic pairs from a raw dataset: edits, similar images, coupled samples",
        module="m3diff.command_line.augment",
    ),
    "ingest": CommandEntry(
        group=Group.STAGES,
        summary="read raw datasets into records: image pairs with their references",
        module="m3diff.command_line.ingest",
    ),
    "validate": CommandEntry(
        group=Group.STAGES,
        summary="check records and images; what fails goes to quarantine with the reason",
        module="m3diff.command_line.validate",
    ),
    "convert": CommandEntry(
        group=Group.STAGES,
        summary="turn clean records into the training mixture of question-answer samples",
        module="m3diff.command_line.convert",
    ),
    "train": CommandEntry(
        group=Group.STAGES,
        summary="fine-tune the model on the mixture",
        module="m3diff.command_line.train",
    ),
    "predict": CommandEntry(
        group=Group.STAGES,
        summary="caption the pairs of the test split",
        module="m3diff.command_line.predict",
    ),
    "evaluate": CommandEntry(
        group=Group.STAGES,
        summary="score predictions against their references and write the report",
        module="m3diff.command_line.evaluate",
    ),
    "data": CommandEntry(
        group=Group.SCORING,
        summary="check a dataset's folder before it is read; compute statistics of the clean records",
        module="m3diff.command_line.data",
    ),
    "compare": CommandEntry(
        group=Group.SCORING,
        summary="compare two runs on the same test pairs: differences with intervals, and a page of pairs",
        module="m3diff.command_line.compare",
    ),
    "score": CommandEntry(
        group=Group.SCORING,
        summary="score any captions by a benchmark's protocol; needs no images, model or parameter file",
        module="m3diff.command_line.score",
    ),
    "zero-shot": CommandEntry(
        group=Group.SCORING,
        summary="caption and score the test split with a model behind an endpoint, without training",
        module="m3diff.command_line.zero_shot",
    ),
    "caption": CommandEntry(
        group=Group.USE,
        summary="describe what changed between two images, or in many pairs; needs no server",
        module="m3diff.command_line.caption",
    ),
    "serve": CommandEntry(
        group=Group.USE,
        summary="serve captions over HTTP, with a web page",
        module="m3diff.command_line.serve",
    ),
    "export": CommandEntry(
        group=Group.USE,
        summary="copy the trained model: merged, only its adapters, or a folder that others load (--hub)",
        module="m3diff.command_line.export",
    ),
    "export-llava": CommandEntry(
        group=Group.USE,
        summary="write the mixture as LLaVA records, for LLaVA-NeXT, LLaMA-Factory and ms-swift",
        module="m3diff.command_line.export_llava",
    ),
    "register": CommandEntry(
        group=Group.REGISTRY,
        summary="log the run to MLflow and register its checkpoint as a model version",
        module="m3diff.command_line.register",
    ),
    "promote": CommandEntry(
        group=Group.REGISTRY,
        summary="make the challenger champion if it is significantly better on the same test set",
        module="m3diff.command_line.promote",
    ),
    "rollback": CommandEntry(
        group=Group.REGISTRY,
        summary="restore the previous champion; the decision is recorded and the version not promoted again",
        module="m3diff.command_line.rollback",
    ),
    "history": CommandEntry(
        group=Group.REGISTRY,
        summary="list every decision on the champion: when, who, from, to, why; detects removed decisions",
        module="m3diff.command_line.history",
    ),
    "models": CommandEntry(
        group=Group.REGISTRY,
        summary="list the versions: aliases, scores, size of the weights, commits, runs",
        module="m3diff.command_line.models",
    ),
    "lineage": CommandEntry(
        group=Group.REGISTRY,
        summary="show the chain from raw data to a version's scores, with every hash checked",
        module="m3diff.command_line.lineage",
    ),
    "restore": CommandEntry(
        group=Group.REGISTRY,
        summary="restore a version's data, parameters and checkpoint in a separate working tree",
        module="m3diff.command_line.restore",
    ),
    "prune": CommandEntry(
        group=Group.REGISTRY,
        summary="remove old versions, weights, branches and data; keeps whatever a kept version needs",
        module="m3diff.command_line.prune",
    ),
    "profile": CommandEntry(
        group=Group.SET_UP,
        summary="make a profile the parameters of the next run; prints what changes",
        module="m3diff.command_line.profile",
    ),
    "plan": CommandEntry(
        group=Group.SET_UP,
        summary="estimate a training run: parameters, tokens, FLOPs, memory, hours; trains nothing",
        module="m3diff.command_line.plan",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code. Exit quietly if the program that reads the output has closed the pipe.

    Args:
        argv: the arguments after the program's name. None uses the arguments of this process.
    """
    prepare()
    try:
        code = run_command(argv)
    except (SystemExit, BrokenPipeError):  # argparse exits after the help, the version or an invalid argument
        if flush_output():
            raise
        return READER_LEFT
    is_read = flush_output()
    return code if is_read or code else READER_LEFT


def run_command(argv: list[str] | None) -> int:
    """Parse the arguments and run the command. Turn user errors into messages and exit codes."""
    args = parse(argv, COMMANDS, (__doc__ or "").split("\n")[0])
    from m3diff.provenance.dvc import require_own_code, require_unchanged_inputs

    command = COMMANDS[args.command].load()
    die_with_parent()
    escape_unprintable_names()
    try:
        if argv is None:
            require_own_code()
        with require_unchanged_inputs():
            if command.parameters == "none":
                return command.run(args) or 0
            return command.run(load_parameters(args.params, command), args) or 0
    except (ParamsError, DeviceError) as error:
        code = USAGE
        message = f"m3diff: {error}"
    except DataError as error:
        code = DATA_REFUSED
        message = f"m3diff {args.command}: {error}"
    except (ConnectionError, BlockingIOError, ChildProcessError) as error:
        if isinstance(error, BrokenPipeError) and not flush_output():
            return READER_LEFT
        code = TRY_AGAIN
        message = f"m3diff {args.command}: {error}"
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("m3diff", "flows"):
            raise
        code = USAGE
        message = f"m3diff {args.command}: {fault_of_missing_package(error.name, command.extra)}"
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        code = TRY_AGAIN
        message = f"m3diff {args.command}: {Fault('command.disk_full', cause=str(error))}"
    print(message, file=sys.stderr)
    return code


def die_with_parent() -> None:
    """Make Linux end this process when `dvc repro` dies, so that training does not continue (PR_SET_PDEATHSIG)."""
    if sys.platform == "linux" and "DVC_STAGE" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def escape_unprintable_names() -> None:
    """Make stdout escape what it cannot encode, such as the bytes of a file name that is not UTF-8.

    In JSON output, `json.loads` restores the original name from the escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def flush_output() -> bool:
    """Flush stdout and stderr. Return False if a reader, such as `head`, has closed a pipe.

    The remaining output to a closed pipe is discarded.
    """
    is_read = True
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # the caller has closed the stream: `m3diff ... >&-`
            continue
        try:
            stream.flush()
        except BrokenPipeError:
            is_read = False
            # Python flushes again on exit and would print the error
            null_device = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null_device, stream.fileno())
            os.close(null_device)
    return is_read


if __name__ == "__main__":
    if sys.flags.safe_path:
        from m3diff.provenance.dvc import ENTRY

        if ENTRY.is_file() and not Path(__file__).samefile(ENTRY):
            # `python -m m3diff` should run the code in the current directory, which PYTHONSAFEPATH excludes
            os.environ.pop("PYTHONSAFEPATH", None)
            os.execv(sys.executable, [sys.executable, "-m", "m3diff", *sys.argv[1:]])
    sys.exit(main())
