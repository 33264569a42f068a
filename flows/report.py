"""The page of a flow run: what ran, why, how long, what came out, and where to look further.

It is a Prefect artifact (`run-report`), a file in `runs/reports/` of the checkout, and a commit on the run's branch.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from flows import archive
from flows.workspace import Workspace
from m3diff.records.errors import redacted
from m3diff.records.files import write_atomic
from m3diff.registry.promote import Promotion
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params
from m3diff.stages.register.stage import Registration

KEY = "run-report"
REPORTS = Path("runs/reports")
SCORES = ("CIDEr", "METEOR", "BLEU-4", "ROUGE-L", "change_type_accuracy", "change_exact_accuracy", "no_change_recall")


@dataclass
class Done:
    """The record of a flow run that its page shows."""

    work: Workspace
    reasons: list[str]
    started: float = field(default_factory=time.time)
    outcomes: dict[str, str] = field(default_factory=dict)  # of a task, by name
    seconds: dict[str, float] = field(default_factory=dict)
    registration: Registration | None = None
    decision: Promotion | None = None
    error: str | None = None

    @property
    def state(self) -> str:
        """The result of the flow run in one word."""
        if self.error:
            return "Failed"
        if self.outcomes.get("promote") == "Rejected":
            return "Rejected"
        return "Skipped" if set(self.outcomes.values()) <= {"Skipped"} else "Completed"


def publish(done: Done, message: str) -> None:
    """Write the page and keep it. What goes wrong with it is logged, and fails no run.

    Args:
        message: of the commit that adds it to the run's branch.
    """
    log = get_run_logger()
    try:
        text = redacted("\n".join(page(done, load_params(Path("params.yaml")))))
        create_markdown_artifact(markdown=text, key=KEY, description=f"flow run {done.work.flow_run}: {done.state}")
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(done.started))
        name = f"{stamp}-{done.work.flow_run[:8]}.md"
        write_atomic(done.work.checkout / REPORTS / name, text + "\n")
        if done.state != "Skipped":
            write_atomic(Path("reports") / name, text + "\n")
            archive.commit(f"Report: {message}", done.work.links)
            archive.publish(done.work.branch, log.info)
    except Exception as error:
        log.warning(f"the page of this run could not be kept: {type(error).__name__}: {error}")


def page(done: Done, params: Params) -> Iterator[str]:
    """The lines of the page, in Markdown."""
    work, uri = done.work, params.register_.tracking_uri
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(done.started))
    yield from (f"# {done.state}: run `{work.flow_run[:8]}` of commit `{work.commit[:12]}`", "")
    yield from (f"- because {text}" for text in done.reasons)
    yield f"- began {began}, took {duration(sum(done.seconds.values()))}; branch `{work.branch}`"
    if done.error:
        yield from ("", "## What failed", "", "```", done.error, "```", "", f"Its worktree is kept: `{work.root}`")
    if done.decision:
        yield from ("", "## The gate", "", str(done.decision))
    if found := scores(params):
        yield from ("", "## Scores", "", *table(("protocol", "score", "times 100"), found))
    ran = [(name, how, duration(done.seconds[name])) for name, how in done.outcomes.items()]
    yield from ("", "## What ran", "", *table(("task", "how", "took"), ran))
    yield from ("", "## Where to look", "")
    if made := done.registration:
        yield f"- {made.model} version {made.version}, MLflow run `{made.run_id}`"
        if uri.startswith("http"):
            address = f"{uri}/#/models/{made.model}/versions/{made.version}"
            yield f"- [the version]({address}), the report among the artifacts of its run"
    yield f"- `git show {work.branch}:dvc.lock` has the hash of everything that this run read and wrote"
    yield f"- `git worktree add FOLDER {work.branch}`, then `dvc checkout` there, gives all of it back"


def duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    first, *rest = (f"| {' | '.join(line)} |" for line in (head, *lines))
    yield from (first, "|---" * len(head) + "|", *rest)


def scores(params: Params) -> list[tuple[str, ...]]:
    """The headline scores of each dataset; none where this run was not evaluated."""
    file = params.paths.report / "metrics.json"
    found = json.loads(file.read_text())["protocols"] if file.is_file() else {}
    return [
        (protocol, name, f"{100 * own[name]:.1f}")
        for protocol, own in found.items()
        for name in SCORES
        if isinstance(own.get(name), int | float)
    ]
