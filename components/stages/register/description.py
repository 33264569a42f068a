"""Write the description of a registered version on MLflow's page: its scores, the training, and the commit.

A description that somebody wrote or edited by hand is not overwritten. The last line of a generated description
contains a digest of the lines above it. A description is replaced only if it still matches its digest.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking import MlflowClient

from m3diff.records.errors import data_error_if_unreadable, format_count
from m3diff.scoring.metrics import headline_scores_by_metric

DIGEST_LINE = "Written by m3diff register, "  # start of the last line, followed by a digest of the text above it
MODEL_DESCRIPTION = (
    "Describes in a sentence what changed between two images. The alias champion points to the version in use, and the "
    "alias challenger to the newest version. The description of each version lists its scores."
)


def write_description(client: MlflowClient, version: ModelVersion, report: Path, model: Path) -> None:
    """Write the description of a version. If the registered model has no description yet, write that too.

    Args:
        report: the output folder of evaluate, with headline.json.
        model: the output folder of train, with report.json.

    Raises:
        DataError: one of these files cannot be read.
    """
    current_text = version.description or ""
    text = build_description(version.tags, read_json(report / "headline.json"), read_json(model / "report.json"))
    if text != current_text and (not current_text or is_generated(current_text)):
        client.update_model_version(version.name, version.version, text)
    if not client.get_registered_model(version.name).description:
        client.update_registered_model(version.name, MODEL_DESCRIPTION)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty dict if the file does not exist."""
    if not path.is_file():
        return {}
    with data_error_if_unreadable(path):
        return json.loads(path.read_text(encoding="utf-8"))


def build_description(
    tags: Mapping[str, str], headline: Mapping[str, Mapping[str, float]], training: Mapping[str, Any]
) -> str:
    """Return the description of a version in Markdown: main scores, a table of all scores, the training, the commit.

    Args:
        tags: the tags of the version.
        headline: the content of evaluate's headline.json: scores by protocol.
        training: the content of train's report.json.
    """
    lines = [format_headline_scores(headline), ""]
    lines += format_score_table(headline)
    lines += format_training(training)
    commit = tags.get("git.commit")
    if commit:
        note = ", with changes that were not committed" if tags.get("git.dirty") == "true" else ""
        lines += ["", f"Commit `{commit[:12]}`{note}."]
    text = "\n".join(lines)
    return f"{text}\n\n{DIGEST_LINE}{hash_text(text)}"


def registry_titles() -> dict[str, str]:
    """Return the scores that a description shows, with their titles. headline.json contains them times 100."""
    titles = {}
    for score, headline_score in headline_scores_by_metric().items():
        if headline_score.registry_title is not None:
            titles[score] = headline_score.registry_title
    return titles


def format_headline_scores(headline: Mapping[str, Mapping[str, float]]) -> str:
    """Return a sentence with the main score of each protocol, such as `CIDEr 441.1 on minichange/total.`"""
    titles = registry_titles()
    parts = []
    for protocol, scores in headline.items():
        main_score = next((score for score in titles if score in scores), None)
        if main_score is not None:
            parts.append(f"{titles[main_score]} {scores[main_score]:.1f} on {protocol}")
    return f"{'; '.join(parts)}." if parts else "No test set was scored."


def format_score_table(headline: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines of a Markdown table with one row per score and one column per protocol, or an empty list."""
    if not headline:
        return []
    rows = ["| Score, times 100 | " + " | ".join(headline) + " |", "|---" * (1 + len(headline)) + "|"]
    for score, title in registry_titles().items():
        values = [scores.get(score) for scores in headline.values()]
        if any(value is not None for value in values):
            cells = " | ".join("–" if value is None else f"{value:.1f}" for value in values)
            rows.append(f"| {title} | {cells} |")
    return [*rows, ""]


def format_training(training: Mapping[str, Any]) -> list[str]:
    """Return a line with the model, base, steps and seed, or an empty list if the training report is missing."""
    settings = training.get("settings")
    if not settings:
        return []
    model = f"Model {settings['model']} (family {settings['family']}) on `{settings['base']}`"
    steps = format_count(training["steps"], "step")
    epochs = format_count(settings["epochs"], "epoch")
    return [f"{model}: {steps}, {epochs}, seed {settings['seed']}."]


def hash_text(text: str) -> str:
    """Return the digest that the last line of a description contains for the text above it."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_generated(description: str) -> bool:
    """Return whether a description is unchanged since `write_description` wrote it."""
    text, separator, signature = description.rpartition("\n\n")
    return bool(separator) and signature == f"{DIGEST_LINE}{hash_text(text)}"
