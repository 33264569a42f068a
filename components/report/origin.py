"""Describe the origin of a report's captions for the top of the page: model, training and code.

DVC tracks report.html, so the page contains neither the commit nor the time. Equal runs give identical pages, and a
fresh clone reproduces the committed `dvc.lock`. Commit and time are stored in `made.js` next to the page, which loads
this file.
"""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from m3diff.provenance.git import GitError, git
from m3diff.records.errors import data_error_if_unreadable, format_count
from m3diff.records.files import write_atomic

DECISIVE_PATHS = ("components", "params.yaml", "dvc.yaml")  # together with the data, these determine the result
CREATION_NOTE = "made.js"  # file next to report.html
# The key of a page is also in its made.js, so that the page ignores the made.js of another page
PAGE_KEY = re.compile(r'data-key="([0-9a-f]{16})"')


@dataclass(frozen=True)
class Origin:
    """Information for the top of a report.

    facts: title -> fact about the model and its training, in order.
    curves: path of train's curves.csv. None if the training is not known.
    base: folder of the base model that was trained.
    warnings: warnings in the training report.
    """

    facts: Mapping[str, str] = field(default_factory=dict)
    curves: Path | None = None
    base: str = ""
    warnings: Sequence[str] = ()


def read_origin(folder: Path) -> Origin:
    """Return the origin of captions that the model in `folder` wrote. Empty if `folder` does not contain report.json.

    Args:
        folder: output of train, with report.json and curves.csv.

    Raises:
        DataError: report.json cannot be read.
    """
    file = folder / "report.json"
    if not file.is_file():  # the captions were made elsewhere and copied here
        return Origin()
    with data_error_if_unreadable(file, "files.unreadable_stage_output", writer="train"):
        report = json.loads(file.read_text(encoding="utf-8"))
        settings = report["settings"]
        facts = dict(list_model_facts(settings)) | dict(list_training_facts(settings, report))
    curves = folder / "curves.csv"
    return Origin(
        facts=facts,
        curves=curves if curves.is_file() else None,
        base=settings["base"],
        warnings=report["warnings"],
    )


def list_model_facts(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield facts about the model: its name, its base and its learning rates."""
    model = settings["model"]
    family = settings["family"]
    yield "Model", model if model == family else f"{model} (family {family})"
    yield "Base", settings["base"]
    yield "Learning rates", ", ".join(f"{part} {rate:g}" for part, rate in settings["rates"].items())


def list_training_facts(settings: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield facts about the training: length, alignment phase if there was one, parameters, and exported step."""
    steps_in_words = format_count(report["steps"], "step")
    captions_in_words = format_count(report["rows_out"], "caption")
    epochs_in_words = format_count(settings["epochs"], "epoch")
    batch = format_count(settings["global_batch"], "sequence")
    length = f"{steps_in_words} of {batch} ({epochs_in_words}, {captions_in_words})"
    yield "Training", f"{length}, seed {settings['seed']}"
    if alignment := report.get("alignment"):
        alignment_steps = format_count(alignment["steps"], "step")
        alignment_captions = format_count(alignment["captions"], "caption")
        yield "Alignment before it", f"{alignment_steps} ({alignment_captions})"
    lora = settings.get("lora", {})
    adapters = f"; LoRA of rank {lora['rank']}, alpha {lora['alpha']}" if lora.get("rank") else ""
    trained_parameters = format_millions(report["parameters_trainable"])
    frozen_parameters = format_millions(report["parameters_frozen"])
    yield "Parameters", f"{trained_parameters} trained, {frozen_parameters} frozen{adapters}"
    if report["exported_step"] != report["steps"]:
        yield "Checkpoint", f"step {report['exported_step']:,}, which has the highest CIDEr on validation pairs"


def format_millions(count: int) -> str:
    """Return a number in millions, such as "7.62 M"."""
    return f"{count / 1e6:,.2f} M"


def write_creation_note(folder: Path) -> None:
    """Write `folder`/made.js with the code's commit and date, and the time when `folder`/report.html was created."""
    key = PAGE_KEY.search((folder / "report.html").read_text(encoding="utf-8"))
    assert key is not None, f"{folder / 'report.html'}: has no key"
    created = f"page created on {format_day(time.time())}, {time.strftime('%H:%M', time.gmtime())} UTC"
    text = "; ".join([*describe_commit(), created])
    write_atomic(folder / CREATION_NOTE, f"made({json.dumps(key[1])}, {json.dumps(text)})\n")


def describe_commit() -> Iterator[str]:
    """Yield the last commit that changed code or parameters, with its date in UTC, or nothing without a repository."""
    try:
        commit_and_time = git("log", "-1", "--format=%H %ct", "--", *DECISIVE_PATHS)
        changes = git("status", "--porcelain", "--", *DECISIVE_PATHS)
    except GitError:
        return
    if commit_and_time:
        commit, seconds = commit_and_time.split()
        note = ", with changes that were not committed" if changes else ""
        yield f"last changed in commit {commit[:8]} of {format_day(int(seconds))}{note}"


def format_day(seconds: float) -> str:
    """Return the date of a POSIX time in UTC, such as "5 March 2026"."""
    date = time.gmtime(seconds)
    return f"{date.tm_mday} {time.strftime('%B %Y', date)}"
