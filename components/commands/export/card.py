"""The card of a shared model, README.md: what it is, what it was trained on, how well it does and what it may not.

`card_FAMILY.md.j2` has the words on a family and its paper, `card.md.j2` all else.
"""

import json
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from m3diff.commands.export.families import SharedFamily
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Use, check_licence
from m3diff.provenance.dvc import Lock
from m3diff.records.errors import DataError, readable
from m3diff.records.files import sha256
from m3diff.records.schemas import NO_CHANGE
from m3diff.registry.lineage import read_lineage
from m3diff.scoring.bootstrap import CONFIDENCE, RESAMPLES
from m3diff.settings.rules import licensed
from m3diff.settings.tree import Params, Paths
from m3diff.stages.ingest.params import DatasetEntry

SCORES = {
    "CIDEr": "CIDEr",
    "METEOR": "METEOR",
    "ROUGE-L": "ROUGE-L",
    "BLEU-4": "BLEU-4",
    "SPICE": "SPICE",
    "change_type_accuracy": "type of a single change named correctly, %",
    "change_exact_accuracy": "single change: type, object, place, what became what, %",
    "multi_change_exact_f1": "several changes, all of each correct: F1 times 100",
    "no_change_recall": '"nothing changed" of pairs without a change, %',
    "false_no_change": '"nothing changed" of pairs with a change, %',
    "reversal": "the images swapped: the inverse change named, %",
}
"""What the card shows of metrics.json, in this order; all times 100."""

ANSWERS = {"yes": "yes", "conditions": "on conditions", "no": "no", "unstated": "not stated"}


class Dataset(NamedTuple):
    """A dataset of the mixture: its pairs and samples by split."""

    name: str
    spec: DatasetSpec
    pairs: Mapping[str, int]
    samples: Mapping[str, int]


def write_card(
    name: str,
    params: Params,
    family: SharedFamily,
    manifest: Mapping[str, Any],
    config: Mapping[str, Any],
    datasets: list[Dataset],
    example: Mapping[str, Any] | None,
    question: str,
) -> str:
    """The text of README.md.

    Args:
        name: of the folder.
        manifest: of the checkpoint.
        config: the model's config.json.
        example: see `find_example`.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    scores = read_json(params.paths.report / "metrics.json").get("protocols", {})
    first = {protocol.partition("/")[0]: protocol for protocol in reversed(scores)}
    headlines = {protocol: scores[protocol] for protocol in scores if protocol in first.values()}
    trained = [each for each in datasets if each.samples["train"]]
    lineage, recipe, untraced = trace(params)
    return environment.get_template(f"card_{family.name}.md.j2").render(
        name=name,
        base=params.train.base.name,
        max_new_tokens=params.predict.max_new_tokens,
        family=family,
        manifest=manifest,
        datasets=datasets,
        lineage=lineage,
        untraced=untraced,
        example=example,
        question=question,
        report=read_json(params.paths.model / "report.json"),
        module=config[family.module] if family.has_module(config) else None,
        side=config["vision_config"]["image_size"],
        patch=config["vision_config"]["patch_size"],
        front=front_matter(params.train.base.name, family, trained),
        headlines=headlines,
        table=score_table(headlines),
        absent={score: why for each in headlines.values() for score, why in each.get("absent", {}).items()},
        known_scores=SCORES,
        answers=ANSWERS,
        recipe=recipe,
        trained=sorted({each.spec.title for each in trained}),
        drawn=all(each.spec.generate is not None for each in trained),
        versions={name: version(name) for name in ("torch", "transformers")},
        confidence=f"{CONFIDENCE:.0%}".replace("%", " %"),
        resamples=f"{RESAMPLES:,}",
    )


def trace(params: Params) -> tuple[dict[str, str], str, str]:
    """The lineage of the checkpoint and its recipe, the parameters of its training as YAML; where the files are not
    those that `dvc.lock` names, neither, but why."""
    try:
        lock = Lock()
        lineage, ran = read_lineage(params, lock), lock.params(params.ingest.datasets)
    except DataError as error:
        return {}, "", str(error)
    sections = [section for section in ("train", f"models.{ran['train']['model']}", "convert") if section in ran]
    return lineage, yaml.safe_dump({section: ran[section] for section in sections}, sort_keys=False).strip(), ""


def front_matter(base: str, family: SharedFamily, trained: list[Dataset]) -> str:
    """The card's head, which model hubs read; YAML."""
    free = all(
        use.answer == "yes" and each.spec.licence.name.lower() == "apache-2.0"
        for each in trained
        for use in (each.spec.licence.train, each.spec.licence.redistribute)
    )
    head = {"license": "apache-2.0"} if free else {"license": "other", "license_name": "see-data-and-licences"}
    head |= {"base_model": family.bases[base]} if base in family.bases else {}
    head |= {"language": "en", "library_name": "transformers"}
    head |= {"pipeline_tag": "image-text-to-text"} if family.reads_question else {}  # a pipeline sends a text
    tags = ["image-difference-captioning", "change-captioning", *family.tags]
    return yaml.safe_dump({**head, "tags": tags}, sort_keys=False).strip()


def score_table(protocols: Mapping[str, Any]) -> dict[str, list[str]]:
    """By title, each score that any protocol has: a cell for each protocol, times 100 with its interval."""
    rows: dict[str, list[str]] = {}
    for score, title in SCORES.items():
        cells = []
        for protocol in protocols.values():
            value, interval = protocol.get(score), protocol["intervals"].get(score)
            bounds = f" ({100 * interval['low']:.1f} to {100 * interval['high']:.1f})" if interval else ""
            cells.append("–" if value is None else f"{100 * value:.1f}{bounds}")
        rows |= {title: cells} if {*cells} - {"–"} else {}
    return rows


def read_json(file: Path) -> dict[str, Any]:
    """A report of a stage, as evaluate's and train's; nothing where there is none."""
    with readable(file):
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


# Its data


def read_datasets(params: Params) -> list[Dataset]:
    """The datasets of the mixture, by convert's report. Raises DataError without it, or for one that is unknown."""
    file = params.paths.mixture / "report.json"
    if not file.is_file():
        raise DataError(f"{file}: no such file, so what trained the model is unknown; run `m3diff convert` first")
    with readable(file):
        found = json.loads(file.read_text(encoding="utf-8"))["datasets"]
    entries = licensed(params)
    return [Dataset(name, spec_of(name, entries), each["pairs"], each["samples"]) for name, each in found.items()]


def spec_of(name: str, entries: Mapping[str, DatasetEntry]) -> DatasetSpec:
    """The facts of a dataset of the mixture. Raises DataError for one that the parameters do not name."""
    if name not in entries:
        raise DataError(f"{name}: in the mixture, but not in ingest.datasets; run `m3diff convert` again")
    return DATASETS[entries[name].reader]


def licence_notices(specs: Mapping[str, DatasetSpec], uses: Iterable[Use], allow_unlicensed: bool) -> list[str]:
    """Conditions that the licences of datasets set for these uses.

    Raises:
        DataError: a licence refuses, and `allow_unlicensed` is not set.
    """
    told = [(name, check_licence(spec, use, allow_unlicensed)) for name, spec in specs.items() for use in uses]
    return [f"{name}: {notice}" for name, notice in told if notice]


def find_example(paths: Paths, datasets: list[Dataset]) -> dict[str, Any] | None:
    """The record of a test pair, with the model's `caption`: the first captioned one with a change, of the first
    dataset whose images may be passed on without a condition; not chosen by how well the model does on it. None where
    there is no such pair.

    Raises:
        DataError: its images are not those that were captioned.
    """
    predictions, records = paths.predictions / "predictions.json", paths.clean / "records.parquet"
    if not (predictions.is_file() and records.is_file()):
        return None
    with readable(predictions):
        captions = {row["image_id"]: row["caption"] for row in json.loads(predictions.read_text(encoding="utf-8"))}
    with readable(records):
        table = pl.read_parquet(records).filter(pl.col("split") == "test", pl.col("id").is_in([*captions]))
    free = [each.name for each in datasets if each.spec.licence.redistribute.answer == "yes"]
    rows = [row for row in table.to_dicts() if row["dataset"] in free and row["change_types"] != [NO_CHANGE]]
    if not rows:
        return None
    row = min(rows, key=lambda row: free.index(row["dataset"]))
    for side in ("before", "after"):
        path = Path(row[side])
        if not path.is_file() or sha256(path) != row[f"{side}_sha256"].hex():
            raise DataError(f"{path}: missing or changed since ingest, so no example; run `dvc repro` first")
    return row | {"caption": captions[row["id"]], "before": Path(row["before"]), "after": Path(row["after"])}
