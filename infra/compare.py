"""The models beside each other: `make compare` trains every entry of `models:` on the same pairs and compares.

Each model is an experiment of DVC in a folder of its own, with the parameters' data, seed, order of pairs, batches and
epochs, so one that was run before is restored and not trained again. A model that takes longer for a step is trained a
second time on fewer epochs, for as many seconds as the model that the others are compared with. What a step and a
caption take is measured here, on this machine, one process on one thread.

The table has each model's scores and the interval of each difference over pairs, the area under the ROC curve of the
probability that nothing changed, the parameters that train, FLOPs and time of a caption, and the learning curves. It is
printed and written to benchmarks/results/compare.json, with a page in Markdown and its plots beside it.
"""

import argparse
import csv
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from components.consistency import closest
from components.files import write_atomic
from components.params import Params, ParamsError, load_params
from components.section import Section
from infra.ablation import Ablation, Row, experiment_of, in_line, markdown, plot, read_yaml, run_row, table
from infra.experiments import copy, dvc, read

SETTINGS = Path(__file__).with_suffix(".yaml")
RESULTS = Path("benchmarks/results/compare.json")
PARAMS = Path("params.yaml")
METRICS = ("BLEU-4", "METEOR", "ROUGE-L", "CIDEr", "SPICE")


class Comparison(Section):
    """The file of the comparison."""

    protocols: tuple[str, ...]  # the parts of metrics.json to show
    beside: str  # the model that the others are compared with, in scores and seconds
    bases: dict[str, Path] = {}  # of a model that does not start from train.base
    needs: dict[Path, str] = {}  # folders that git does not hold, and the command that makes each
    equal_seconds: float = Field(default=0.1, ge=0)  # longer by this share: trained once more, for as long


class Measured(NamedTuple):
    """What one model takes and says, beside its scores."""

    parameters: int  # that train
    caption_gflop: float
    captions_per_s: float
    step_s: float
    no_change_auc: dict[str, float | None]  # by protocol; None where it has none
    curve: list[dict[str, float | None]]  # of its training: step, loss (smoothed), val_loss


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--settings", type=Path, default=SETTINGS, help="file of the comparison")
    parser.add_argument("--models", nargs="+", help="names of `models:`; by default all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the table as JSON; page and plots stand beside it")
    args = parser.parse_args(argv)
    try:
        params = load_params(PARAMS)
        cfg = read_comparison(args.settings, params)
        names = args.models or list(params.models)
        check_models(names, params, "--models")
        found = compare(cfg, params, names)
    except (ParamsError, OSError) as error:
        print(f"make compare: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"make compare: `{' '.join(error.cmd)}` ended with {error.returncode}", file=sys.stderr)
        return error.returncode
    write(found, cfg, args.out)
    return 0


def read_comparison(path: Path, params: Params) -> Comparison:
    """Raises ParamsError where the file is no YAML, or names a model or has a field that is not there."""
    values = read_yaml(path)
    try:
        cfg = Comparison.model_validate(values)
    except ValueError as error:
        raise ParamsError(f"{path}: {error}") from error
    check_models((cfg.beside, *cfg.bases), params, str(path))
    return cfg


def check_models(names: Iterable[str], params: Params, where: str) -> None:
    """Raises ParamsError where no model of params.yaml has one of these names."""
    for name in names:
        if name not in params.models:
            raise ParamsError(f"{where}: no model is called {name!r}; {closest(name, params.models)}")


def changes_of(name: str, cfg: Comparison) -> dict[str, Any]:
    """What of params.yaml makes this model the one that trains."""
    base = {"train.base": str(cfg.bases[name])} if name in cfg.bases else {}
    return {"train.model": name} | base


def compare(cfg: Comparison, params: Params, names: Sequence[str]) -> dict[str, Any]:
    """Run and measure every model.

    Raises:
        CalledProcessError: an experiment failed.
        ParamsError: it has not the protocols.
    """
    names = [cfg.beside, *(name for name in names if name != cfg.beside)]
    absent = {name: line for name in names if (line := left_out(name, cfg))}
    print("\n".join(absent.values()), end="\n" * bool(absent), flush=True)
    dvc("repro", "convert")  # what the measurements read; each experiment has a folder of its own
    equal_pairs = {name: changes_of(name, cfg) for name in names if name not in absent}
    rows = [run(name, changes, cfg, params) for name, changes in equal_pairs.items()]
    measured = {row.name: measure(row, cfg, params) for row in rows}
    epochs = shorter_epochs({name: one.step_s for name, one in measured.items()}, cfg, params.train.epochs)
    again = [
        run(f"{name}, equal seconds", equal_pairs[name] | {"train.epochs": each}, cfg, params)
        for name, each in epochs.items()
    ]
    tables = {protocol: table([*rows, *again], [cfg.beside], protocol) for protocol in cfg.protocols}
    return {
        "command": "make compare" + (f' MODELS="{" ".join(names)}"' if set(names) != set(params.models) else ""),
        "seed": params.train.seed,
        "beside": cfg.beside,
        "epochs": {"equal pairs": params.train.epochs, "equal seconds": epochs},
        "left_out": absent,
        "measured": {name: one._asdict() for name, one in measured.items()},
        "scores": {row.name: scores_of(row.name, cfg, params) for row in [*rows, *again]},
        "protocols": tables,
    }


def scores_of(name: str, cfg: Comparison, params: Params) -> dict[str, dict[str, dict[str, float | None]]]:
    """By protocol and metric the score and its interval over pairs."""
    metrics = json.loads(read(experiment_of(name, params.train.seed), params.paths.report / "metrics.json"))[
        "protocols"
    ]
    return {protocol: dict(with_intervals(metrics[protocol])) for protocol in cfg.protocols}


def with_intervals(scores: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float | None]]]:
    """Of each of METRICS that was computed: `score`, and `low` and `high` where there are pairs enough for them."""
    for metric in METRICS:
        if scores.get(metric) is not None:
            interval = scores["intervals"].get(metric) or {"low": None, "high": None}
            yield metric, {"score": scores[metric]} | interval


def left_out(name: str, cfg: Comparison) -> str | None:
    """In words, where the model's base is not here and git does not hold it."""
    base = cfg.bases.get(name)
    if base is None or base.is_dir():
        return None
    return f"left out: {name}: {base} is not there; make it with `{cfg.needs.get(base, 'make base')}`"


def run(title: str, changes: Mapping[str, Any], cfg: Comparison, params: Params) -> Row:
    """The model's experiment, run or restored; `ablation-<title>-<seed>` names it."""
    ablation = Ablation(protocols=cfg.protocols, compare_with=(), rows={}, needs=cfg.needs)
    return run_row(title, changes, [params.train.seed], ablation, params.paths)


def shorter_epochs(steps_s: Mapping[str, float], cfg: Comparison, epochs: float) -> dict[str, float]:
    """By model, the epochs that take as long as those of the model that the others are compared with; of those alone
    that take longer."""
    own = steps_s[cfg.beside]
    return {
        name: round(epochs * own / seconds, 3)
        for name, seconds in steps_s.items()
        if seconds > (1 + cfg.equal_seconds) * own
    }


def measure(row: Row, cfg: Comparison, params: Params) -> Measured:
    """What the trained model takes and says, on this machine."""
    experiment = experiment_of(row.name, params.train.seed)
    datasets = {protocol: protocol.partition("/")[0] for protocol in cfg.protocols}
    report = json.loads(read(experiment, params.paths.model / "report.json"))
    rows = list(csv.DictReader(io.StringIO(read(experiment, params.paths.model / "curves.csv").decode())))
    with tempfile.TemporaryDirectory() as folder:
        copy(experiment, params.paths.model / "checkpoint", Path(folder) / "checkpoint")
        told = json.loads(in_a_process(["captions", f"{folder}/checkpoint", *dict.fromkeys(datasets.values())]))
        step_s = float(in_a_process(["step", json.dumps(dict(row.changes)), folder]))
    return Measured(
        parameters=report["parameters_trainable"],
        caption_gflop=caption_flops(row.changes, params) / 1e9,
        captions_per_s=told["captions_per_s"],
        step_s=step_s,
        no_change_auc={protocol: told["no_change_auc"][dataset] for protocol, dataset in datasets.items()},
        curve=learning_curve(rows),
    )


def learning_curve(rows: Sequence[Mapping[str, str]]) -> list[dict[str, float | None]]:
    """Of curves.csv every tenth step, the last and those with a validation: the training loss, as a running mean with a
    weight of 0.03 for each step, and the loss on validation pairs."""
    found: list[dict[str, float | None]] = []
    mean = float(rows[0]["loss"])
    for row in rows:
        mean += 0.03 * (float(row["loss"]) - mean)
        step, val_loss = int(row["step"]), float(row["val_loss"]) if row["val_loss"] else None
        if step % 10 == 0 or row is rows[-1] or val_loss is not None:
            found.append({"step": step, "loss": round(mean, 4), "val_loss": val_loss})
    return found


def in_a_process(arguments: Sequence[str]) -> str:
    """The last line that this file's measurement says in a process of its own, on one thread."""
    command = [sys.executable, "-m", "infra.compare_speed", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    done.check_returncode()
    return done.stdout.strip().splitlines()[-1]


def caption_flops(changes: Mapping[str, Any], params: Params) -> float:
    """Of a pair's images and prompt, as `m3diff plan` counts them."""
    from components.plan.plan import make_plan

    train = params.train.model_copy(update={"base": Path(changes.get("train.base", params.train.base))})
    settings = params.models[changes["train.model"]]
    return make_plan(
        train, settings, params.compute, params.ingest.datasets, params.convert, params.paths.mixture
    ).caption_flops


def write(found: Mapping[str, Any], cfg: Comparison, out: Path) -> None:
    """The figures, the page and the plots, and the page on the screen."""
    text = "\n".join(page(found, cfg, out)) + "\n"
    print(text)
    write_atomic(out, json.dumps(found, indent=1) + "\n")
    write_atomic(out.with_suffix(".md"), text)
    plot(found["protocols"], out.with_suffix(".svg"))
    plot_curves(found["measured"], out.with_name(f"{out.stem}_curves.svg"))
    print(f"written to {out}, {out.with_suffix('.md')} and two plots beside it")


def page(found: Mapping[str, Any], cfg: Comparison, out: Path) -> Iterator[str]:
    """The comparison in Markdown."""
    epochs = found["epochs"]
    yield "# The models beside each other"
    yield ""
    yield (
        f"`{found['command']}`: the same pairs in the same order, {epochs['equal pairs']:g} epochs, seed "
        f"{found['seed']}; a model whose step takes longer once more on fewer epochs, for as many seconds. A short "
        "budget on drawn scenes: it says what these models learn of them in minutes, not what they learn of "
        "photographs in days."
    )
    yield ""
    yield from measured_table(found["measured"], epochs, cfg.protocols)
    yield ""
    yield f"![Scores]({out.stem}.svg)"
    yield ""
    yield f"![Loss on validation pairs while they train]({out.stem}_curves.svg)"
    yield ""
    for protocol in cfg.protocols:
        yield from scores_table(found["scores"], protocol)
        yield ""
    yield from markdown(found["protocols"], [cfg.beside], 1, found["left_out"])


def scores_table(scores: Mapping[str, Mapping[str, Any]], protocol: str) -> Iterator[str]:
    """The metrics of one protocol with their intervals."""
    known = [metric for metric in METRICS if any(metric in one[protocol] for one in scores.values())]
    yield in_line(f"`{protocol}`, times 100 (95 % interval over pairs)", known)
    yield "|---" * (1 + len(known)) + "|"
    for name, one in scores.items():
        yield in_line(name, [score_text(one[protocol].get(metric)) for metric in known])


def score_text(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return ""
    score = f"{100 * cell['score']:.1f}"
    return score if cell["low"] is None else f"{score} ({100 * cell['low']:.1f} to {100 * cell['high']:.1f})"


def measured_table(
    measured: Mapping[str, Mapping[str, Any]], epochs: Mapping[str, Any], protocols: Sequence[str]
) -> Iterator[str]:
    """What each model takes, and how surely it tells that nothing changed."""
    heads = ["parameters that train", "GFLOP a caption", "captions/s", "s a step", "epochs in equal seconds"]
    heads += [f"ROC area of no change, {protocol}" for protocol in protocols]
    yield in_line("model", heads)
    yield "|---" * (1 + len(heads)) + "|"
    for name, one in measured.items():
        cells = [f"{one['parameters']:,}", f"{one['caption_gflop']:.2f}", f"{one['captions_per_s']:.0f}"]
        cells += [f"{one['step_s']:.3f}", f"{epochs['equal seconds'].get(name, epochs['equal pairs']):g}"]
        areas = [one["no_change_auc"][protocol] for protocol in protocols]
        cells += ["" if area is None else f"{100 * area:.1f}" for area in areas]
        yield in_line(name, cells)


def plot_curves(measured: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Training loss, smoothed, by steps and by seconds; the loss on validation pairs as dots."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "compare"
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for panel, unit in zip(panels, ("steps", "seconds"), strict=True):
        for number, (name, one) in enumerate(measured.items()):
            scale = one["step_s"] if unit == "seconds" else 1.0
            draw_curve(panel, name, one["curve"], scale, f"C{number}")
        panel.set_xlabel(unit)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss a token")
    panels[0].set_ylim(0, 1)
    panels[1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_curve(panel: Any, name: str, curve: Sequence[Mapping[str, Any]], scale: float, colour: str) -> None:
    """One model's line and dots."""
    steps, losses = [scale * row["step"] for row in curve], [row["loss"] for row in curve]
    panel.plot(steps, losses, color=colour, label=name, linewidth=1.2)
    dots = [(scale * row["step"], row["val_loss"]) for row in curve if row["val_loss"] is not None]
    panel.plot(*zip(*dots, strict=True), "o", color=colour, markersize=4)


if __name__ == "__main__":
    sys.exit(main())
