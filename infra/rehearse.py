"""A profile's recipe in small: `make rehearse` -> benchmarks/results/rehearse.json and .svg.

It trains the embedded base on the embedded mixture with the module, its start and the ratio of rates of a profile
(infra/rehearse.yaml), and then without the module for as many steps. The curves say whether the module wakes up (the
size of its update beside that of the features) and whether it learns (types of single changes named right).
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import yaml

from components.evaluate.grammar import Grammar, load_grammars, parse_predictions
from components.evaluate.metrics.change_accuracy import change_scores
from components.evaluate.pairs import pair_of, read_test_records
from components.files import sha256_of_folder, write_atomic
from components.models.family import MODULE_UPDATE_RATIO, Rates
from components.models.m3diff.settings import M3DiffSettings
from components.params import Params, ParamsError, load_params
from components.train.accelerator import choose_accelerator, only_worker
from components.train.job import Job, Runtime

SETTINGS = Path(__file__).with_suffix(".yaml")
RESULTS = Path("benchmarks/results/rehearse.json")
FOLDER = Path("runs/rehearse")
SCORES = ("change_type_accuracy", "change_exact_accuracy", "no_change_recall")
CAPTIONED_AT_ONCE = 48


@dataclass(frozen=True)
class Settings:
    """What a rehearsal takes beside its profile; infra/rehearse.yaml says what each is."""

    profile: Path
    embedded: Path
    heads: int
    llm_rate: float
    lora_alpha: int
    seed: int
    steps: int
    caption_every: int
    pairs: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ParamsError where the file does not hold these fields alone, each of its type and above 0."""
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        kinds = cls.__annotations__
        if not isinstance(raw, dict) or raw.keys() != kinds.keys():
            raise ParamsError(f"{path}: expected the fields {', '.join(kinds)}")
        for name, kind in kinds.items():
            found, wanted = raw[name], str if kind is Path else kind
            if type(found) is not wanted or (not isinstance(found, str) and found <= 0):
                raise ParamsError(f"{path}: {name}: expected {wanted.__name__} above 0 or a path, found {found!r}")
        return cls(**{name: kind(raw[name]) for name, kind in kinds.items()})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--settings", type=Path, default=SETTINGS, help="what is taken beside the profile")
    parser.add_argument("--profile", type=Path, help="in place of the settings'")
    parser.add_argument("--steps", type=int, help="in place of the settings'")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the curves as JSON; the plot stands beside it")
    args = parser.parse_args(argv)
    try:
        given = {name: value for name in ("profile", "steps") if (value := getattr(args, name))}
        settings = replace(Settings.read(args.settings), **given)
        profile, embedded = load_params(settings.profile), load_params(settings.embedded)
        models = recipes(profile, embedded, settings)
        runs = {name: rehearse(name, model, profile, embedded, settings) for name, model in models.items()}
    except (ParamsError, OSError) as error:
        print(f"make rehearse: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines(runs)))
    facts = {"command": "make rehearse", "profile": str(settings.profile), "seed": settings.seed}
    write_atomic(args.out, json.dumps(facts | {"runs": runs}, indent=1) + "\n")
    plot(runs, args.out.with_suffix(".svg"))
    print(f"written to {args.out} and {args.out.with_suffix('.svg')}")
    return 0


# What trains


def recipes(profile: Params, embedded: Params, settings: Settings) -> dict[str, M3DiffSettings]:
    """The profile's model on the embedded base, and the same without the module.

    Raises:
        ParamsError: the profile's model has no module, or more levels than the base's vision encoder has layers.
    """
    full, small = (params.models[params.train.model] for params in (profile, embedded))
    if full.module is None:
        raise ParamsError(f"{settings.profile}: train.model {profile.train.model} has no module to rehearse")
    levels = len(full.module.vision_feature_layers)
    base = json.loads((embedded.train.base / "config.json").read_text())
    deepest = base["vision_config"]["num_hidden_layers"]
    if levels > deepest:
        raise ParamsError(f"{settings.profile}: {levels} levels, but {embedded.train.base} has {deepest} layers")
    last = tuple(range(deepest - levels + 1, deepest + 1))
    module = replace(full.module, vision_feature_layers=last, heads=settings.heads)
    rates = scaled(full.rates, settings.llm_rate)
    lora = replace(small.lora, alpha=settings.lora_alpha)
    with_module = M3DiffSettings("m3diff", module, lora, rates)
    return {"module": with_module, "no module": replace(with_module, module=None, rates=replace(rates, module=None))}


def scaled(rates: Rates, llm: float) -> Rates:
    """Rates in the same ratios, that of the LLM as given; a frozen part stays frozen."""
    if rates.llm is None:
        raise ParamsError("rates.llm: null: the LLM is frozen, and rates are given beside its own")
    factor = llm / rates.llm
    return Rates(**{part: None if rate is None else rate * factor for part, rate in rates.items()})


def job_of(model: M3DiffSettings, profile: Params, embedded: Params, settings: Settings, folder: Path) -> Job:
    """A training in this process, of as many steps as the settings say. `folder` takes its files."""
    same = {name: getattr(profile.train, name) for name in ("warmup_share", "weight_decay", "max_grad_norm")}
    cfg = embedded.train.model_copy(update=same | {"seed": settings.seed})
    alone = {"workers": 0, "zero_stage": 0, "micro_batch": cfg.global_batch, "val_pairs": 0, "caption_val_pairs": 0}
    compute = embedded.compute.model_copy(update=alone)
    mixture, base_sha256 = embedded.paths.mixture.resolve(), sha256_of_folder(cfg.base)
    return Job(cfg, model, compute, mixture, folder, folder.resolve(), base_sha256)


def rehearse(name: str, model: M3DiffSettings, profile: Params, embedded: Params, settings: Settings) -> dict[str, Any]:
    """Train and measure one model: {"rates": by part, "rows": [a measured step]}."""
    choose_accelerator(False)
    from components.train.loop import start

    folder = FOLDER / name.replace(" ", "_")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pairs = CaptionedPairs.read(embedded, settings.pairs)
    print(f"rehearse: {name}, {settings.steps} steps", flush=True)
    with only_worker("gloo"):
        run = start(job_of(model, profile, embedded, settings, folder), Runtime())
        run.schedule = with_steps(run.schedule, settings.steps)
        rows = list(measured_steps(run, pairs, settings))
    return {"rates": dict(model.rates), "rows": rows}


def with_steps(schedule: Any, steps: int) -> Any:
    """The schedule cut, or lengthened, to so many steps."""
    return replace(schedule, epochs=(steps - 0.5) / schedule.steps_per_epoch)


def measured_steps(run: Any, pairs: "CaptionedPairs", settings: Settings) -> Iterator[dict[str, Any]]:
    """Train to the end; a row for each measured step, with the mean loss of the steps since the one before."""
    from components.train.loop import is_measured, train_step

    steps, losses = run.schedule.steps, []
    started, captioning = time.monotonic(), 0.0
    for step, batches in enumerate(run.loader.stream(run.schedule, 0, 0), start=1):
        is_captioned = step == steps or step % settings.caption_every == 0
        train_step(run, step - 1, batches)
        losses.append(run.curve.last("loss"))
        if not (is_captioned or is_measured(step, steps)):
            continue
        row = {"step": step, "loss": sum(losses) / len(losses), "levels": contribution(run)}
        row["seconds"] = round(time.monotonic() - started - captioning, 1)
        before = time.monotonic()
        row |= pairs.scores(run) if is_captioned else {}
        captioning += time.monotonic() - before
        losses = []
        print(f"rehearse: {line(row)}", flush=True)
        yield row


def contribution(run: Any) -> list[dict[str, float]]:
    """Of each level its `update`, the size of what it adds over the features', and its mean `score`, as training
    measured them in the last step; nothing where it did not, or there is no module."""
    names = run.contribution.names
    known = run.curve.latest(names)
    layers = [name.split("/")[1] for name in names if name.startswith(MODULE_UPDATE_RATIO)]
    if known.get("step") != run.curve.last("step"):
        return []
    figures = {"update": MODULE_UPDATE_RATIO, "score": "module_score"}
    return [{name: known[f"{column}/{layer}"] for name, column in figures.items()} for layer in layers]


# What it learns


@dataclass(frozen=True)
class CaptionedPairs:
    """Test pairs that are captioned, with the grammars that read the captions."""

    records: list[dict[str, Any]]
    grammars: Mapping[str, Grammar]

    @classmethod
    def read(cls, embedded: Params, count: int) -> Self:
        """`count` single changes and `count` distractors of the promoted protocol's dataset, the first of each."""
        dataset = embedded.promote.protocol.split("/")[0]
        rows = [r for r in read_test_records(embedded.paths.clean / "records.parquet") if r["dataset"] == dataset]
        single = [row for row in rows if len(row["change_types"]) == 1]
        distractors = [row for row in single if row["change_types"] == ["none"]]
        changes = [row for row in single if row["change_types"] != ["none"]]
        return cls(changes[:count] + distractors[:count], load_grammars(embedded.paths.records, [dataset]))

    def scores(self, run: Any) -> dict[str, float]:
        """What the grammar says of the captions that the run's model gives now."""
        from components.images import load_image
        from components.models.generation import Captioner
        from components.models.tuning import unwrapped

        captioner = Captioner(unwrapped(run.engine.module), run.processor, run.family, max_new_tokens=64)
        captions: list[str] = []
        for at in range(0, len(self.records), CAPTIONED_AT_ONCE):
            rows = self.records[at : at + CAPTIONED_AT_ONCE]
            captions += captioner.caption(
                [(load_image(r["before"], r["before_sha256"]), load_image(r["after"], r["after_sha256"])) for r in rows]
            )
        run.engine.train()
        pairs = [pair_of(row, caption, None) for row, caption in zip(self.records, captions, strict=True)]
        found = change_scores(list(parse_predictions(self.grammars, pairs).values()))
        return {score: float(value) for score in SCORES if (value := found[score]) is not None}


# What is told of it


def line(row: Mapping[str, Any]) -> str:
    """`step 181  loss 0.5140  updates 0.012 0.011  scores 0.46 0.45  change_type_accuracy 0.36`."""
    updates = " ".join(f"{level['update']:.2g}" for level in row["levels"])
    gates = " ".join(f"{level['score']:.2f}" for level in row["levels"])
    named = "".join(f"  {score} {row[score]:.3f}" for score in SCORES if score in row)
    told = f"  updates {updates}  scores {gates}" if updates else ""
    return f"step {row['step']}  loss {row['loss']:.4f}{told}{named}  {row['seconds']:.0f} s"


def lines(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, run in runs.items():
        yield f"{name}: " + ", ".join(f"{part} {rate:.2g}" for part, rate in run["rates"].items() if rate is not None)
        yield from (f"  {line(row)}" for row in run["rows"])


def plot(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Side by side over the steps: each level's update and score, and both models' loss and captions."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rehearse"
    import matplotlib.pyplot as plt

    figure, (updates, gates, loss, accuracy) = plt.subplots(1, 4, figsize=(15, 3.6))
    colours = {name: colour for name, colour in zip(runs, ("#17455c", "#c2703d"), strict=True)}
    for name, run in runs.items():
        rows: Sequence[Mapping[str, Any]] = run["rows"]
        steps = [row["step"] for row in rows]
        measured = [row for row in rows if row["levels"]]
        for panel, figure_of in ((updates, "update"), (gates, "score")):
            for number in range(len(rows[0]["levels"])):
                values = [row["levels"][number][figure_of] for row in measured]
                panel.plot([row["step"] for row in measured], values, "o-", markersize=3, label=f"level {number + 1}")
        loss.plot(steps, [row["loss"] for row in rows], "o-", markersize=3, color=colours[name], label=name)
        for score, style in zip(SCORES, ("-", "--", ":"), strict=True):
            known = [row for row in rows if score in row]
            accuracy.plot([row["step"] for row in known], [row[score] for row in known], style, marker="o",
                          markersize=3, color=colours[name], label=f"{name}: {score}")  # fmt: skip
    updates.set_title("size of the module's update over the features'", fontsize=10)
    gates.set_title("score of each level, equation (7)", fontsize=10)
    loss.set_title("training loss, mean since the point before", fontsize=10)
    accuracy.set_title("test pairs read right", fontsize=10)
    accuracy.set_ylim(0, 1)
    for panel in (updates, gates, loss, accuracy):
        panel.set_xlabel("step")
        panel.legend(fontsize=6)
        panel.spines[["top", "right"]].set_visible(False)
    updates.set_ylim(bottom=0)
    gates.set_ylim(0, 1)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
