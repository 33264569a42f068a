"""Image difference captioning, one command per stage: `m3diff <stage>`.

Heavy imports happen inside the command, after its parameters are seen to be right. Exit codes: 0 done, 2 usage or
parameters, 3 data refused, 4 gate refused, 75 try again later, other a bug.
"""

import argparse
import ctypes
import errno
import io
import json
import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m3diff.commands.usage import (
    Command,
    arg,
    count,
    flag,
    load_anywhere,
    make_parser,
    not_installed,
    port,
    profiles_folder,
    told,
    url,
)
from m3diff.datasets import DATASETS
from m3diff.models.device import DeviceError
from m3diff.provenance.dvc import ENTRY, require_own_code, unchanged
from m3diff.records.errors import DataError
from m3diff.settings.compute import GPUS
from m3diff.settings.load import load_params
from m3diff.settings.rules import absent_paths, check_paths, licensed
from m3diff.settings.section import ParamsError, closest
from m3diff.settings.tree import Params

if TYPE_CHECKING:
    from m3diff.registry.tracking import Description

USAGE, DATA_REFUSED, GATE_REFUSED, TRY_AGAIN = 2, 3, 4, 75
FULL = (errno.ENOSPC, errno.EDQUOT)


def described(params: Params) -> "Description":
    """The name and parameters of the training's MLflow run."""
    from m3diff.registry.tracking import Description

    sections = params.model_dump(mode="json")
    shown = {name: sections[name] for name in ("convert", "train", "predict", "evaluate")}
    model, cfg = params.train.model, params.register_
    shown["models"] = {model: sections["models"][model]}
    return Description(cfg.tracking_uri, cfg.experiment, model, shown, params.predict.max_new_tokens)


def code(params: Params, args: argparse.Namespace) -> None:
    from m3diff.stages.code import code as run

    run(params)


def pretrain(params: Params, args: argparse.Namespace) -> None:
    from m3diff.stages.pretrain.stage import pretrain as run

    run(params.pretrain, params.paths.base)


def entry(section: str, entries: Mapping[str, Any], name: str) -> Any:
    """The entry of this name. Raises ParamsError, with the nearest name, if the section has none."""
    if name not in entries:
        raise ParamsError(f"{section}: no entry {name!r}; {closest(name, entries)}")
    return entries[name]


def synthesize(params: Params, args: argparse.Namespace) -> None:
    settings = entry("synthesize", params.synthesize, args.name)
    from m3diff.stages.synthesize.stage import synthesize as run

    run(params.ingest.datasets[args.name].reader, settings)


def augment(params: Params, args: argparse.Namespace) -> None:
    made = entry("augment", params.augment, args.name)
    check_paths(params, f"augment@{args.name}")
    from m3diff.stages.augment.stage import augment as run

    report = run(args.name, made, params.compute)
    print("\n".join([told(report), *(f"augment: rejected: {reason}" for reason in report.reasons())]))


def ingest(params: Params, args: argparse.Namespace) -> None:
    datasets = params.ingest.datasets
    chosen = datasets if args.name is None else {args.name: entry("ingest.datasets", datasets, args.name)}
    check_paths(params, *(f"ingest@{name}" for name in chosen))
    from m3diff.stages.ingest.stage import ingest as run

    for name, dataset in chosen.items():
        print(told(run(name, dataset, params.compute.image_cache, params.paths.records)))


def validate(params: Params, args: argparse.Namespace) -> None:
    paths = params.paths
    from m3diff.stages.validate.stage import validate as run

    report = run(params.validate_, params.ingest.datasets, params.compute.image_cache, paths.records, paths.clean)
    print(f"{told(report)}\nvalidate: the page: {paths.clean / 'docs' / 'index.html'}")


def convert(params: Params, args: argparse.Namespace) -> None:
    check_paths(params, "convert")
    from m3diff.stages.convert.stage import convert as run

    print(told(run(params.convert, params.ingest.datasets, params.paths.clean, params.paths.mixture)))


def train(params: Params, args: argparse.Namespace) -> None:
    check_paths(params, "train")
    from m3diff.commands.plan import Run, check_memory
    from m3diff.models.checkpoint import see_whole_files
    from m3diff.registry.tracking import followed
    from m3diff.stages.train.stage import train as run

    see_whole_files(params.train.base)
    planned = Run.of(params)
    check_memory(planned)
    follow = partial(followed, described(params), params.paths.model)
    run(params.train, planned.settings, params.compute, planned.mixture, params.paths.model, follow)


def predict(params: Params, args: argparse.Namespace) -> None:
    from m3diff.stages.predict.stage import predict as run

    run(params.predict, params.compute, params.paths.mixture, params.paths.model, params.paths.predictions)


def evaluate(params: Params, args: argparse.Namespace) -> None:
    check_paths(params, "evaluate")
    if args.model is None and (args.out or args.base):
        raise ParamsError("evaluate: --out and --base need --model VERSION or FOLDER")
    if args.model is not None:
        from m3diff.commands.rescore import score_model

        folder, scores = score_model(params, args.model, args.base or params.train.base, args.out)
        for protocol, found in scores.items():
            print(f"{protocol}, times 100: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()))
        print(f"report: {folder / 'report' / 'report.html'}")
        return
    paths = params.paths
    from m3diff.registry.tracking import completed
    from m3diff.stages.evaluate.stage import evaluate as run

    run(params.evaluate, params.compute, paths.records, paths.clean, paths.predictions, paths.report)
    completed(described(params), paths.model, paths.report / "metrics.json")


def register(params: Params, args: argparse.Namespace) -> None:
    from m3diff.stages.register.stage import register as run

    print(run(params))


def promote(params: Params, args: argparse.Namespace) -> int:
    from m3diff.commands.rescore import rescore
    from m3diff.registry.promote import promote as run

    decision = run(params, rescore, args.version, args.again)
    print(decision)
    return GATE_REFUSED if decision.outcome == "refused" else 0


def rollback(params: Params, args: argparse.Namespace) -> None:
    from m3diff.registry.promote import rollback as run

    print(run(params, args.to, args.why))


def history(args: argparse.Namespace) -> int:
    from m3diff.registry.decisions import decisions, faults, pending, table

    found, wrong, left = decisions(), faults(), pending(Path("."))
    print(json.dumps([entry.model_dump(by_alias=True) for entry in found], indent=2) if args.json else table(found))
    print("".join(f"m3diff history: {fault}\n" for fault in wrong), end="", file=sys.stderr)
    if left is not None:
        print(f"m3diff history: decision {left.number} may still be under way; promote finishes it", file=sys.stderr)
    return DATA_REFUSED if wrong else 0


def models(params: Params, args: argparse.Namespace) -> None:
    gate = params.promote
    from m3diff.registry import versions
    from m3diff.scoring.metrics import BY_CHARACTERS

    scores = list(dict.fromkeys((gate.metric, *gate.guards)))
    of_characters = [f"{score}{BY_CHARACTERS}" for score in scores]
    found = versions.models(params.register_, gate.protocol, [*scores, *of_characters])
    # the gate takes these for captions in scripts without spaces between words
    scores += [score for score in of_characters if any(score in version["scores"] for version in found)]
    print(json.dumps(found, indent=2) if args.json else versions.table(found, gate.protocol, scores))


def lineage(params: Params, args: argparse.Namespace) -> int:
    from m3diff.registry import lineage as chain

    checks = chain.lineage(params.register_, args.version)
    print("\n".join(map(str, checks)))
    return 0 if chain.sound(checks) else DATA_REFUSED


def restore(params: Params, args: argparse.Namespace) -> int:
    from m3diff.registry import lineage as chain

    folder, checks = chain.restore(params.register_, args.version, args.into)
    print("\n".join(str(check) for check in checks))
    print(f"\n{'restored to' if chain.sound(checks) else 'NOT restored, see above:'} {folder}")
    return 0 if chain.sound(checks) else DATA_REFUSED


def prune(params: Params, args: argparse.Namespace) -> int:
    from m3diff.registry.versions import prune as run

    removed, lines = run(params.register_, args.keep, args.yes and not args.dry_run)
    print("\n".join(lines))
    if not removed or args.dry_run or args.yes:
        return 0
    print("m3diff prune: nothing was removed; check the list, then add --yes", file=sys.stderr)
    return USAGE


def plan(params: Params, args: argparse.Namespace) -> None:
    from m3diff.commands import plan as planner
    from m3diff.models.checkpoint import see_whole_files

    see_whole_files(params.train.base)
    kind, run = args.gpu or params.compute.gpu_kind, planner.Run.of(params)
    gpu = GPUS[kind] if kind else None
    before = planner.plan_alignment(run)
    phases = {"the alignment before the fine-tuning": before, "the fine-tuning": planner.make_plan(run)}
    for name, phase in phases.items():
        if phase:
            print(name)
            planner.print_plan(phase, params.compute, gpu, args.utilisation)
    if params.compute.gpu and gpu:
        for phase in filter(None, phases.values()):
            planner.check_fits(params.compute, phase, gpu.memory_gb)


def compare(params: Params, args: argparse.Namespace) -> None:
    paths = params.paths
    from m3diff.commands import compare as comparison

    tables = comparison.compare(args.first, args.second, paths.records, paths.clean, args.out)
    print("\n\n".join(comparison.as_text(protocol, table) for protocol, table in tables.items()))
    print(f"\npair by pair: {args.out}")


def zero_shot(params: Params, args: argparse.Namespace) -> None:
    check_paths(params, "evaluate")
    paths = params.paths
    from m3diff.commands import zero_shot as endpoint

    request = endpoint.Request(
        url=args.url,
        model=args.model,
        prompt=args.prompt or endpoint.PROMPT,
        key_variable=args.key_variable,
        max_tokens=args.max_tokens or None,
        limit=params.predict.limit if args.limit is None else args.limit,
        timeout_s=args.timeout_s or endpoint.Request.timeout_s,
        allow_unlicensed=args.allow_unlicensed,
        reuse_answers=args.reuse_answers,
    )
    found = endpoint.zero_shot(
        request, params.evaluate, params.compute, paths.mixture, paths.records, paths.clean, args.out
    )
    print("\n".join(found.lines))


def caption(params: Params, args: argparse.Namespace) -> int:
    from m3diff.registry.model_source import find, load
    from m3diff.serving.caption import caption_pairs, find_pairs

    pairs = find_pairs(args.before, args.after, args.image_root)
    cfg, base = params.register_, args.base or params.train.base
    captioner = load(find(cfg.tracking_uri, cfg.model_name, args.model, base, params.predict.max_new_tokens))
    sound = True
    for answer in caption_pairs(captioner, pairs, args.question, args.overlay, params.validate_.max_image_pixels):
        sound &= answer.fault is None
        if args.json:
            print(json.dumps(answer.as_dict(), ensure_ascii=False), flush=True)
        elif answer.fault:
            print(f"m3diff caption: {answer.fault}", file=sys.stderr)
        else:
            text = " ".join((answer.caption or "").split())  # a line, whatever an untrained model says
            print(text if len(pairs) == 1 else f"{answer.pair.name}\t{text}", flush=True)
    return 0 if sound else DATA_REFUSED


def serve(params: Params, args: argparse.Namespace) -> None:
    from m3diff.serving.server import serve as run

    run(params, args.model, args.base or params.train.base, args.host, args.port or params.serve.port)


def data(params: Params, args: argparse.Namespace) -> int:
    if args.action == "statistics":
        from m3diff.commands.inspect.statistics import write_statistics

        write_statistics(params.paths.clean)
        print(f"written to {params.paths.clean / 'statistics.html'}")
        return 0
    if args.root is None:
        raise ParamsError("data check: name a dataset's folder: m3diff data check FOLDER")
    from m3diff.commands.inspect import StageLimits, check

    stage_limits = StageLimits(limits=params.validate_, image_cache=params.compute.image_cache)
    lines, sound = check(args.root, params.ingest.datasets, args.reader, stage_limits)
    print("\n".join(lines))
    return 0 if sound else DATA_REFUSED


def score(args: argparse.Namespace) -> int:
    if args.check_spice:
        from m3diff.scoring.metrics.spice import check_spice

        found, works = check_spice(args.spice_dir)
        print("\n".join(found))
        return 0 if works else DATA_REFUSED
    if args.predictions is None:
        raise ParamsError("score: name a file of captions: m3diff score PREDICTIONS --benchmark B")
    from m3diff.commands import score as scorer

    against = args.benchmark, args.protocol, args.references, args.data
    report = scorer.score(args.predictions, *against, args.spice_dir, args.allow_faults)
    print(report.model_dump_json(indent=2) if args.json else "\n".join(scorer.lines(report)))
    return 0


def export(params: Params, args: argparse.Namespace) -> None:
    if args.hub:
        from m3diff.commands.export import export_hub

        print("".join(f"{notice}\n" for notice in export_hub(params, args.out, args.allow_unlicensed)), end="")
        return
    from m3diff.models.checkpoint import export_checkpoint

    export_checkpoint(params.paths.model / "checkpoint", args.out, args.adapters)


def export_llava(params: Params, args: argparse.Namespace) -> None:
    from m3diff.commands.export import export_llava as run

    run(licensed(params), params.paths.mixture, args.out, args.allow_unlicensed, args.absolute)


def profile(args: argparse.Namespace) -> None:
    from m3diff.settings.load import find_profile, use_profile

    folder = profiles_folder()
    params = load_params(find_profile(args.name, folder))
    print("\n".join(use_profile(args.name, args.params, folder)))
    print(f"\n{args.params} has the values of the profile {args.name} now")
    for place, path, remedy in absent_paths(params, "train"):
        print(f"not here yet: {place}: {path}; {remedy}")


FOLDER: Any = {"type": Path, "metavar": "FOLDER"}
MODEL = (
    arg("--model", default="champion", help="a version number or alias, or a checkpoint folder (default: champion)"),
    arg("--base", **FOLDER, help="base model of adapters; default: train.base"),
)
JSON = flag("--json", "print JSON")
UNLICENSED = flag("--allow-unlicensed", "even if a licence does not allow passing the data on")
ROWS: tuple[Command, ...] = (
    Command(code, "write what code each stage runs, by meaning; DVC compares it"),
    Command(pretrain, "pre-train a tiny base model (from scratch: about two hours on one core)"),
    Command(
        synthesize,
        "generate a synthetic dataset, such as MiniChange",
        (arg("name", help="an entry of the section `synthesize`"),),
    ),
    Command(
        augment,
        "make synthetic pairs from a raw dataset: edits, similar images, coupled samples",
        (arg("name", help="an entry of the section `augment`"),),
        extra="augment",
    ),
    Command(
        ingest,
        "read raw datasets into records: image pairs with their references",
        (arg("name", nargs="?", help="an entry of `ingest.datasets`; default: all"),),
    ),
    Command(validate, "check records and images; what fails goes to quarantine with the reason"),
    Command(convert, "turn clean records into the training mixture of question-answer samples"),
    Command(train, "fine-tune the model on the mixture"),
    Command(predict, "caption the pairs of the test split"),
    Command(
        evaluate,
        "score predictions against their references and write the report",
        (
            arg("--model", help="caption and score with this version or checkpoint folder; the run's files stay as is"),
            arg("--base", **FOLDER, help="with --model: base model of adapters; default: train.base"),
            arg("--out", **FOLDER, help="with --model: folder for captions and report"),
        ),
        ("m3diff evaluate --model champion", "m3diff evaluate --model 12 --out runs/12"),
    ),
    Command(
        data,
        "check a dataset's folder before it is read; compute statistics of the clean records",
        (
            arg("action", metavar="ACTION", choices=("check", "statistics"), help="check FOLDER, or statistics"),
            arg("root", **FOLDER, nargs="?", help="folder of one dataset, to check"),
            arg(
                "--reader",
                metavar="NAME",
                choices=DATASETS,
                help=f"its layout, if not recognised: {', '.join(DATASETS)}",
            ),
        ),
        ("m3diff data check data/01_raw/mine", "m3diff data check mine --reader pairs", "m3diff data statistics"),
        load=load_anywhere,
    ),
    Command(
        compare,
        "compare two runs on the same test pairs: differences with intervals, and a page of pairs",
        (
            arg("first", type=Path, help="report folder of a run, with its scores.parquet"),
            arg("second", type=Path, help="that of another"),
            arg("--out", type=Path, default=Path("compare.html"), help="page to write (default: compare.html)"),
        ),
        ("m3diff compare runs/a/report data/07_report --out compare.html",),
    ),
    Command(
        score,
        "score any captions by a benchmark's protocol; needs no images, model or parameter file",
        (
            arg("predictions", type=Path, nargs="?", help="COCO results or {id: caption}: .json, .jsonl, .csv or .tsv"),
            arg("--benchmark", metavar="B", help="such as spot_the_diff; any other word lists all"),
            arg("--protocol", metavar="P", help="one of the benchmark's protocols; any other word lists all"),
            arg("--references", type=Path, metavar="FILE", help="COCO captions to score against, used as they are"),
            arg("--data", **FOLDER, help="the dataset's annotation files (no images needed), or records from ingest"),
            arg("--spice-dir", **FOLDER, help="folder of the jars of SPICE; adds it"),
            flag("--check-spice", "show what SPICE needs, what is missing and where to put it"),
            flag("--allow-faults", "score despite faults, and report them"),
            JSON,
        ),
        (
            "m3diff score captions.json --benchmark spot_the_diff --data spot-the-diff/",
            "m3diff score captions.csv --references references.json --json",
        ),
        extra="score",
        load=None,
    ),
    Command(
        zero_shot,
        "caption and score the test split with a model behind an endpoint, without training",
        (
            arg("--url", type=url, required=True, help="OpenAI-compatible, with /v1; the images are sent there"),
            arg("--model", required=True, metavar="NAME", help="the model's name at the endpoint"),
            arg("--limit", type=count, metavar="N", help="how many test pairs, 0 for all; default: predict.limit"),
            arg("--out", **FOLDER, help="folder for captions and report"),
            arg("--prompt", metavar="TEXT", help="text sent with the images; {question} is the pair's question"),
            arg("--max-tokens", type=count, metavar="N", help="maximum tokens per answer; default: the server's"),
            arg(
                "--key-variable",
                metavar="NAME",
                default="OPENAI_API_KEY",
                help="holds the key; default: OPENAI_API_KEY",
            ),
            arg("--timeout-s", type=count, metavar="S", help="seconds for an answer; default: 120"),
            arg(
                "--reuse-answers",
                action=argparse.BooleanOptionalAction,
                help="use stored answers of another server; --no-reuse-answers: ask anew and keep both; default: stop",
            ),
            UNLICENSED,
        ),
        ("m3diff zero-shot --url http://127.0.0.1:8000/v1 --model Qwen/Qwen2.5-VL-7B-Instruct --limit 20",),
    ),
    Command(
        export_llava,
        "write the mixture as LLaVA records, for LLaVA-NeXT, LLaMA-Factory and ms-swift",
        (
            arg("out", type=Path, help="folder to write"),
            flag("--absolute", "absolute image paths; default: relative to the project"),
            UNLICENSED,
        ),
    ),
    Command(
        caption,
        "describe what changed between two images, or in many pairs; needs no server",
        (
            arg("before", type=Path, help="an image, a folder of images, or a CSV file with columns before, after"),
            arg("after", type=Path, nargs="?", help="an image, or a folder of images with the same names"),
            *MODEL,
            arg("--question", metavar="TEXT", help="the question for each pair; default: what changed"),
            arg("--image-root", **FOLDER, help="a folder outside the CSV file's that its paths may lead into"),
            arg("--overlay", type=Path, metavar="PNG", help="draw what the model looked at; for many pairs, a folder"),
            flag("--json", "print one JSON object per line"),
        ),
        (
            "m3diff caption before.png after.png --model data/05_model/checkpoint --overlay out.png",
            "m3diff caption before/ after/ --json",
            "m3diff caption pairs.csv --model champion",
        ),
        extra="serve",
        load=load_anywhere,
    ),
    Command(
        serve,
        "serve captions over HTTP, with a web page",
        (
            *MODEL,
            arg("--host", default="127.0.0.1", help="default: 127.0.0.1; any other needs M3DIFF_SERVE_TOKEN"),
            arg("--port", type=port, metavar="N", help="default: serve.port"),
        ),
        ("m3diff serve --model data/05_model/checkpoint --port 8001",),
        extra="serve",
        load=load_anywhere,
    ),
    Command(
        export,
        "copy the trained model: merged, only its adapters, or a folder that others load (--hub)",
        (
            arg("out", type=Path, help="folder to write"),
            [
                flag("--adapters", "only the trained weights, not merged into the base"),
                flag("--hub", "a folder that others load without this project, with code and model card"),
            ],
            UNLICENSED,
        ),
        ("m3diff export shared/model", "m3diff export shared/hub --hub", "m3diff export small --adapters"),
    ),
    Command(register, "log the run to MLflow and register its checkpoint as a model version"),
    Command(
        promote,
        "make the challenger champion if it is significantly better on the same test set",
        (
            arg("--version", type=int, metavar="N", help="the version to test; default: the challenger"),
            flag("--again", "even if the version was champion and was rolled back"),
        ),
    ),
    Command(
        rollback,
        "restore the previous champion; the decision is recorded and the version not promoted again",
        (
            arg("--to", type=int, metavar="VERSION", help="the version to restore; default: the previous champion"),
            arg("--why", default="", metavar="TEXT", help="the reason, kept in the record"),
        ),
        ("m3diff rollback --why 'worse on the new camera'", "m3diff rollback --to 9 --why 'requested by the team'"),
    ),
    Command(
        history,
        "list every decision on the champion: when, who, from, to, why; detects removed decisions",
        (JSON,),
        load=None,
    ),
    Command(models, "list the versions: aliases, scores, size of the weights, commits, runs", (JSON,)),
    Command(
        lineage,
        "show the chain from raw data to a version's scores, with every hash checked",
        (arg("version", help="number or alias, such as champion"),),
    ),
    Command(
        restore,
        "restore a version's data, parameters and checkpoint in a separate working tree",
        (
            arg("version", help="number or alias; without MLflow, a branch runs/<flow run> or a commit"),
            arg("--into", **FOLDER, help="new folder; default: next to the project"),
        ),
        ("m3diff restore 12", "m3diff restore champion --into ../twelve"),
    ),
    Command(
        prune,
        "remove old versions, weights, branches and data; keeps whatever a kept version needs",
        (
            arg("--keep", type=count, default=5, metavar="N", help="how many of the newest to keep (default: 5)"),
            flag("--dry-run", "only show what would be removed"),
            flag("--yes", "remove it"),
        ),
        ("m3diff prune --keep 5 --dry-run", "m3diff prune --keep 5 --yes"),
    ),
    Command(
        profile,
        "make a profile the parameters of the next run; prints what changes",
        (arg("name", help="a file in profiles/, without .yaml"),),
        load=None,
    ),
    Command(
        plan,
        "estimate a training run: parameters, tokens, FLOPs, memory, hours; trains nothing",
        (
            arg("--gpu", choices=GPUS, metavar="KIND", help=f"one of {', '.join(GPUS)}; default: compute.gpu_kind"),
            arg("--utilisation", type=float, default=0.45, help="share of the GPU's peak, recomputed FLOPs included"),
        ),
        ("m3diff --params profiles/paper.yaml plan", "m3diff plan --gpu H100-80GB --utilisation 0.4"),
    ),
)
COMMANDS = {row.run.__name__.replace("_", "-"): row for row in ROWS}


def die_with_parent() -> None:
    """Ask Linux to end this process when `dvc repro` dies, so that no trainer is left behind (PR_SET_PDEATHSIG)."""
    if sys.platform == "linux" and "DVC_STAGE" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def show_every_name() -> None:
    """Print what is no character, such as a byte of a name that is not UTF-8, as an escape; JSON reads it as one."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def main(argv: list[str] | None = None) -> int:
    args = make_parser(COMMANDS, (__doc__ or "").split("\n")[0]).parse_args(argv)
    command = COMMANDS[args.command]
    die_with_parent()
    show_every_name()
    try:
        if argv is None:
            require_own_code()
        with unchanged():
            given = (command.load(args.params),) if command.load else ()
            return command.run(*given, args) or 0
    except (ParamsError, DeviceError) as error:
        code, words = USAGE, f"m3diff: {error}"
    except DataError as error:
        code, words = DATA_REFUSED, f"m3diff {args.command}: {error}"
    except (ConnectionError, BlockingIOError, ChildProcessError) as error:
        code, words = TRY_AGAIN, f"m3diff {args.command}: {error}"
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("m3diff", "flows"):
            raise
        code, words = USAGE, f"m3diff {args.command}: {not_installed(error.name, command.extra)}"
    except OSError as error:
        if error.errno not in FULL:
            raise
        code, words = TRY_AGAIN, f"m3diff {args.command}: {error}; make room and run it again"
    print(words, file=sys.stderr)
    return code


if __name__ == "__main__":
    if sys.flags.safe_path and ENTRY.is_file() and not Path(__file__).samefile(ENTRY):
        # `python -m m3diff` is the code of the current directory, which PYTHONSAFEPATH leaves out
        os.environ.pop("PYTHONSAFEPATH", None)
        os.execv(sys.executable, [sys.executable, "-m", "m3diff", *sys.argv[1:]])
    sys.exit(main())
