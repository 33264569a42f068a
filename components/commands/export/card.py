"""Write the model card (README.md of an exported folder).

The card describes the model, its training data, its scores and its limits.

`card_FAMILY.md.j2` contains the text about a family and its paper, and `card.md.j2` contains everything else.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from m3diff.commands.export.datasets import MixtureDataset, read_stage_report
from m3diff.commands.export.example import ExamplePair
from m3diff.commands.export.families import SharedFamily
from m3diff.provenance.dvc import Lock
from m3diff.records.errors import DataError
from m3diff.scoring.bootstrap import CONFIDENCE, RESAMPLES
from m3diff.scoring.metrics import headline_scores_by_metric
from m3diff.settings.tree import Params

PERMISSION_WORDS = {"yes": "yes", "conditions": "on conditions", "no": "no", "unstated": "not stated"}

EMPTY_CELL = "–"


@dataclass(frozen=True)
class CardFacts:
    """Facts for the card that cannot be read from the parameters or from the reports of the stages.

    Attributes:
        name: name of the folder.
        family: family of the model.
        manifest: manifest of the checkpoint.
        config: content of config.json.
        datasets: datasets of the mixture.
        example: example pair to show, or None.
        question: default question of the model.
        processor_config: content of processor_config.json.
    """

    name: str
    family: SharedFamily
    manifest: Mapping[str, Any]
    config: Mapping[str, Any]
    datasets: Sequence[MixtureDataset]
    example: ExamplePair | None
    question: str
    processor_config: Mapping[str, Any]

    @property
    def training_datasets(self) -> list[MixtureDataset]:
        """The datasets of the mixture that have training samples."""
        return [dataset for dataset in self.datasets if dataset.has_trained]


@dataclass(frozen=True)
class Trace:
    """The origin of a checkpoint.

    Attributes:
        lineage: commits and hashes, in the form of the tags of a model version in the registry.
        recipe: parameters of the training run, as YAML.
        fault: reason why `dvc.lock` does not link the lineage and the recipe to the checkpoint, or empty if it does. If
            there is a reason, lineage and recipe are empty.
    """

    lineage: Mapping[str, str]
    recipe: str
    fault: str = ""


def write_card(params: Params, facts: CardFacts) -> str:
    """Return the text of README.md."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    family = facts.family
    vision_config = facts.config.get("vision_config", {})  # a family with its own card may name its sizes otherwise
    scores = scores_of_first_protocols(params.paths.report / "metrics.json")
    trace = trace_checkpoint(params)
    return environment.get_template(f"card_{family.name}.md.j2").render(
        name=facts.name,
        base=params.train.base.name,
        max_new_tokens=params.predict.max_new_tokens,
        family=family,
        manifest=facts.manifest,
        datasets=facts.datasets,
        lineage=trace.lineage,
        recipe=trace.recipe,
        untraced=trace.fault,
        example=facts.example,
        question=facts.question,
        question_in_code=json.dumps(facts.question, ensure_ascii=False),
        architecture=facts.config["architectures"][0],
        has_video_processor="video_processor" in facts.processor_config,
        report=read_stage_report(params.paths.model / "report.json"),
        module=facts.config[family.module] if family.has_module(facts.config) else None,
        side=vision_config.get("image_size"),
        patch=vision_config.get("patch_size"),
        front_matter=front_matter(params.train.base.name, family, facts.training_datasets, facts.config["model_type"]),
        scores=scores,
        score_rows=score_rows(scores),
        change_type_rows=change_type_rows(scores),
        absent_scores=absent_scores(scores),
        permission_words=PERMISSION_WORDS,
        training_titles=sorted({dataset.spec.title for dataset in facts.training_datasets}),
        is_drawn=all(dataset.spec.generate is not None for dataset in facts.training_datasets),
        versions={package: version(package) for package in ("torch", "transformers")},
        confidence=f"{CONFIDENCE:.0%}".replace("%", " %"),
        resamples=f"{RESAMPLES:,}",
    )


def trace_checkpoint(params: Params) -> Trace:
    """Return the lineage and recipe of the checkpoint, or the reason why `dvc.lock` does not record them."""
    from m3diff.registry.lineage import read_lineage  # imports MLflow, which export-llava does not need

    try:
        lock = Lock()
        lineage = read_lineage(params, lock)
        recorded_params = lock.params(params.ingest.datasets)
    except DataError as error:
        return Trace(lineage={}, recipe="", fault=str(error))
    names = ("train", f"models.{recorded_params['train']['model']}", "convert")
    recipe = {name: recorded_params[name] for name in names if name in recorded_params}
    return Trace(lineage=lineage, recipe=yaml.safe_dump(recipe, sort_keys=False).strip())


def front_matter(base: str, family: SharedFamily, training_datasets: Sequence[MixtureDataset], model_type: str) -> str:
    """Return the card's metadata for model hubs, as YAML.

    Args:
        base: folder name of the base model.
        family: family of the model.
        training_datasets: datasets that were used for training.
        model_type: the `model_type` of config.json.
    """
    fields: dict[str, Any] = {}
    # the licence of a base that is not one of `bases` is unknown
    if family.bases and all(is_freely_licensed(dataset) for dataset in training_datasets):
        fields["license"] = "apache-2.0"
    else:
        fields["license"] = "other"
        fields["license_name"] = "see-data-and-licences"
    if base in family.bases:
        fields["base_model"] = family.bases[base]
    fields["language"] = "en"
    fields["library_name"] = "transformers"
    if family.reads_question:  # the pipeline always passes a text
        fields["pipeline_tag"] = "image-text-to-text"
    tags = family.tags or (model_type.replace("_", "-"),)
    fields["tags"] = ["image-difference-captioning", "change-captioning", *tags]
    return yaml.safe_dump(fields, sort_keys=False).strip()


def is_freely_licensed(dataset: MixtureDataset) -> bool:
    """Return whether a dataset's licence is Apache-2.0 and permits training and redistribution.

    A model that is trained only on such datasets can be licensed under Apache-2.0.
    """
    licence = dataset.spec.licence
    is_allowed = licence.train.answer == "yes" and licence.redistribute.answer == "yes"
    return is_allowed and licence.name.lower() == "apache-2.0"


def scores_of_first_protocols(metrics_file: Path) -> dict[str, dict[str, Any]]:
    """Return the scores of each dataset's first protocol (a dataset with rules for its evaluation).

    The result is empty if the model has not been evaluated.
    """
    scores = read_stage_report(metrics_file).get("protocols", {})
    first_protocols: dict[str, str] = {}
    for protocol in scores:
        dataset = protocol.partition("/")[0]
        first_protocols.setdefault(dataset, protocol)
    return {protocol: scores[protocol] for protocol in first_protocols.values()}


def card_titles() -> dict[str, str]:
    """Return the scores of metrics.json that the card shows, with their titles, in order. All are shown times 100."""
    titles = {}
    for score, headline_score in headline_scores_by_metric().items():
        if headline_score.card_title is not None:
            titles[score] = headline_score.card_title
    return titles


def score_rows(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the rows of the score table: title -> one cell per protocol.

    Scores that are missing from all protocols are omitted.

    Args:
        scores: protocol -> its scores.
    """
    rows: dict[str, list[str]] = {}
    for score, title in card_titles().items():
        cells = [score_cell(protocol_scores, score) for protocol_scores in scores.values()]
        if any(cell != EMPTY_CELL for cell in cells):
            rows[title] = cells
    return rows


def score_cell(protocol_scores: Mapping[str, Any], score: str) -> str:
    """Format a score times 100 with its confidence interval, if it has one, such as `150.0 (125.0 to 175.0)`."""
    value = protocol_scores.get(score)
    if value is None:
        return EMPTY_CELL
    interval = protocol_scores["intervals"].get(score)
    if not interval:
        return f"{100 * value:.1f}"
    return f"{100 * value:.1f} ({100 * interval['low']:.1f} to {100 * interval['high']:.1f})"


def change_type_rows(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the rows of the change type table: change type -> one cell per protocol.

    A cell contains the share of single changes that were described entirely correctly, in percent. The result is empty
    if the captions cannot be parsed by a grammar.

    Args:
        scores: protocol -> its scores.
    """
    groups_by_protocol = [protocol_scores.get("by_type", {}) for protocol_scores in scores.values()]
    change_types: dict[str, None] = {}
    for groups in groups_by_protocol:
        change_types |= dict.fromkeys(groups)
    rows: dict[str, list[str]] = {}
    for change_type in change_types:
        cells = [exact_share_cell(groups.get(change_type, {})) for groups in groups_by_protocol]
        if any(cell != EMPTY_CELL for cell in cells):
            rows[change_type] = cells
    return rows


def exact_share_cell(group: Mapping[str, Any]) -> str:
    """Format the share of pairs whose change was described entirely correctly, such as `75 % of 8`."""
    share = group.get("exact_accuracy")
    return EMPTY_CELL if share is None else f"{100 * share:.0f} % of {group['pairs']:,}"


def absent_scores(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the scores in the card that could not be computed: score -> reason."""
    titles = card_titles()
    reasons: dict[str, str] = {}
    for protocol_scores in scores.values():
        for score, reason in protocol_scores.get("absent", {}).items():
            if score in titles:
                reasons[score] = reason
    return reasons
