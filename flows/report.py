"""Write the page that describes a flow run.

The page is stored as a Prefect artifact (`run-report`) and committed to the run's branch.
"""

import base64
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from flows import dvc
from flows.workspace import Workspace, read_json
from m3diff.provenance.git import GitError, git, main_tree
from m3diff.records.errors import redact
from m3diff.records.files import write_atomic
from m3diff.registry.promote import GateDecision
from m3diff.report.curves import draw_picture
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params
from m3diff.stages.register.stage import Registration


@dataclass
class RunRecord:
    """A record of what a flow run has done so far, from which its page is written.

    Attributes:
        work: the workspace of the run.
        reasons: why the run was started.
        notes: notes of the checks before the run, such as other questions than those of the champion.
        started: the start time, in seconds since 1970.
        outcomes: the name of each task's final state, by task name.
        seconds: the duration of each task in seconds, by task name.
        registration: the result of register, or None if it has not run yet.
        decision: the decision of the gate, or None if it has not been made yet.
        error: the message of the error that ended the run, or None if it has not failed.
    """

    work: Workspace
    reasons: list[str]
    notes: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    registration: Registration | None = None
    decision: GateDecision | None = None
    error: str | None = None

    @property
    def state(self) -> str:
        """The name of the run's final state."""
        if self.error:
            return "Failed"
        if self.outcomes.get("promote") == "Rejected":
            return "Rejected"
        return "Skipped" if set(self.outcomes.values()) <= {"Skipped"} else "Completed"


# The page


def publish(record: RunRecord, message: str) -> None:
    """Write the page, store it as an artifact, and commit and push it. Errors are logged, and the run continues.

    Args:
        message: the commit message of the run. The commit of the page has the same message after the prefix `Report: `.
    """
    log = get_run_logger()
    try:
        params = load_params(Path("params.yaml"))
        text = redact("\n".join(page_lines(record, params)))
        if record.outcomes.get("train", "Failed") != "Failed":  # otherwise the file belongs to an earlier training run
            text = add_curves(text, params.paths.model / "curves.csv")
        description = f"flow run {record.work.flow_run}: {record.state}"
        create_markdown_artifact(markdown=text, key="run-report", description=description)
        if record.state != "Skipped":
            stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(record.started))
            write_atomic(Path("reports") / f"{stamp}-{record.work.flow_run[:8]}.md", text + "\n")
            dvc.commit(f"Report: {message}", record.work.links)
            publish_branch(record.work, log.info)
    except Exception as error:
        log.warning(f"the page of this run could not be stored: {type(error).__name__}: {error}")


def publish_branch(work: Workspace, log: Callable[[str], None]) -> None:
    """Push the run's branch to the git remote set in `git config m3diff.runs`, if any."""
    remote = git("config", "--default", "", "--get", "m3diff.runs")
    if not remote:
        return
    try:
        # Run in the main worktree, because the path of a remote may be relative to it
        git("push", "--quiet", remote, f"refs/heads/{work.branch}:refs/heads/{work.branch}", cwd=main_tree(Path()))
    except GitError as error:
        log(f"warning: {work.branch} was not pushed to {remote}: {error}; to push it: git push {remote} {work.branch}")


def page_lines(record: RunRecord, params: Params) -> Iterator[str]:
    """Yield the Markdown lines of the page."""
    work = record.work
    start_time = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.started))
    yield from (f"# {record.state}: run `{work.flow_run[:8]}` of commit `{work.commit[:12]}`", "")
    yield from (f"- because {reason}" for reason in record.reasons)
    for text in work.overrides:  # parameters, or a note that training starts from the champion
        yield f"- parameter of this run: `{text}`" if "=" in text else f"- {text}"
    yield from (f"- note: {note}" for note in record.notes)
    yield f"- started {start_time}, took {format_duration(sum(record.seconds.values()))}; branch `{work.branch}`"
    if record.error:
        yield from ("", "## What failed", "", "```", record.error, "```", "", f"Its worktree is kept: `{work.root}`")
    if record.decision:
        yield from ("", "## The gate", "", str(record.decision))
    headline = read_json(params.paths.report / "headline.json")
    if headline:
        score_rows: list[tuple[str, str, str]] = []
        for protocol, scores in headline.items():
            score_rows += [(protocol, name, f"{value:.1f}") for name, value in scores.items()]
        yield from ("", "## Scores", "", *format_table(("protocol", "score", "times 100"), score_rows))
    task_rows = [(name, outcome, format_duration(record.seconds[name])) for name, outcome in record.outcomes.items()]
    yield from ("", "## What ran", "", *format_table(("task", "outcome", "duration"), task_rows))
    yield from ("", "## Where to look", "")
    if record.registration:
        yield from registration_lines(record.registration, params.register_.tracking_uri)
    yield f"- `git show {work.branch}:dvc.lock` lists the hashes of everything that this run read and wrote"
    yield f"- `git worktree add FOLDER {work.branch}`, then `dvc checkout` in that folder, restores all of it"


def registration_lines(registration: Registration, tracking_uri: str) -> Iterator[str]:
    """Yield lines that identify the registered version, with a link if MLflow is a server."""
    yield f"- {registration.model} version {registration.version}, MLflow run `{registration.run_id}`"
    if tracking_uri.startswith("http"):
        address = f"{tracking_uri}/#/models/{registration.model}/versions/{registration.version}"
        yield f"- [the version]({address}) in MLflow; the report is an artifact of its run"


def add_curves(text: str, curves: Path) -> str:
    """Add the training curves to the page as an embedded image, if there are any."""
    drawing = draw_picture(curves) if curves.is_file() else None
    if drawing is None or not drawing.svg:
        return text
    data = base64.b64encode(drawing.svg.encode()).decode()
    alternative_text = re.sub(r"[\[\]\n]", " ", drawing.words)
    return f"{text}\n\n## Training curves\n\n![{alternative_text}](data:image/svg+xml;base64,{data})"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds as `1:02:05`."""
    return str(timedelta(seconds=round(seconds)))


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"
