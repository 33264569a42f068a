"""Output of a flow run for people: its page, and a notice of a failure, a crash, a rejection and a promotion.

The page is a Prefect artifact (`run-report`), and a commit on the run's branch. `M3DIFF_NOTIFY` says where notices go:
an address of Apprise (`mailto://...`, `json://...`, `slack://...`); without it nobody is told. Each is sent once. What
could not be sent is kept in `runs/flows/`, and sent at the next occasion; it fails no run. The address may hold a
password, so neither it nor its errors are logged.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from apprise import Apprise
from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import FlowRun
from prefect.flows import Flow
from prefect.logging import get_logger
from prefect.states import State
from prefect.utilities.urls import url_for

from flows import dvc
from flows.workspace import FLOWS, KEPT_DAYS, Workspace, lock, read_json
from m3diff.provenance.git import GitError, git, main_tree
from m3diff.records.errors import redacted
from m3diff.records.files import write_atomic
from m3diff.registry.promote import Promotion
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params
from m3diff.stages.register.stage import Registration

NOTIFY = "M3DIFF_NOTIFY"
REMEMBERED = 1000  # notices, so that each is told once
EXCEPTION = "Flow run encountered an exception: "  # Prefect's words before those of the error
MOST_WORDS = 400  # characters of an error


@dataclass
class Done:
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
        if self.error:
            return "Failed"
        if self.outcomes.get("promote") == "Rejected":
            return "Rejected"
        return "Skipped" if set(self.outcomes.values()) <= {"Skipped"} else "Completed"


# The page


def publish(done: Done, message: str) -> None:
    """Write the page and keep it. What goes wrong with it is logged, and fails no run.

    Args:
        message: of the commit that adds it to the run's branch.
    """
    log = get_run_logger()
    try:
        text = redacted("\n".join(page(done, load_params(Path("params.yaml")))))
        what = f"flow run {done.work.flow_run}: {done.state}"
        create_markdown_artifact(markdown=text, key="run-report", description=what)
        if done.state != "Skipped":
            stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(done.started))
            write_atomic(Path("reports") / f"{stamp}-{done.work.flow_run[:8]}.md", text + "\n")
            dvc.commit(f"Report: {message}", done.work.links)
            publish_branch(done.work, log.info)
    except Exception as error:
        log.warning(f"the page of this run could not be kept: {type(error).__name__}: {error}")


def publish_branch(work: Workspace, log: Callable[[str], None]) -> None:
    """Push the run's branch to the git remote that `git config m3diff.runs` names; without one it stays here."""
    if not (name := git("config", "--default", "", "--get", "m3diff.runs")):
        return
    try:
        git("push", "--quiet", name, f"refs/heads/{work.branch}:refs/heads/{work.branch}", cwd=main_tree(Path()))
    except GitError as error:
        log(f"warning: {work.branch} was not pushed to {name}: {error}; it is sent with the next run")


def page(done: Done, params: Params) -> Iterator[str]:
    work, uri = done.work, params.register_.tracking_uri
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(done.started))
    yield from (f"# {done.state}: run `{work.flow_run[:8]}` of commit `{work.commit[:12]}`", "")
    yield from (f"- because {text}" for text in done.reasons)
    yield f"- began {began}, took {duration(sum(done.seconds.values()))}; branch `{work.branch}`"
    if done.error:
        yield from ("", "## What failed", "", "```", done.error, "```", "", f"Its worktree is kept: `{work.root}`")
    if done.decision:
        yield from ("", "## The gate", "", str(done.decision))
    if found := read_json(params.paths.report / "headline.json"):
        scores = [(protocol, name, f"{value:.1f}") for protocol, own in found.items() for name, value in own.items()]
        yield from ("", "## Scores", "", *table(("protocol", "score", "times 100"), scores))
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


# Notices


def tell(
    log: Callable[[str], None], key: str = "", title: str = "", text: str = "", checkout: Path | None = None
) -> None:
    """Send a notice, unless one of this key was sent before, after those that wait; without a key, these alone.
    Whatever goes wrong is logged, and nothing fails. Without an address nothing waits.

    Args:
        checkout: the folder that the flow was started in; without one the current directory.
    """
    folder = (checkout or Path.cwd()) / FLOWS
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder / "notices.lock"):
            notices = read_json(folder / "notices.json") or {"told": {}, "waiting": {}}
            if key and key not in notices["told"]:
                notices["waiting"][key] = [title, redacted(text)]
            send_waiting(**notices, log=log)
            write_atomic(folder / "notices.json", json.dumps(notices))
    except Exception as error:
        log(f"warning: a notice was not sent: {type(error).__name__}")


def send_waiting(told: dict[str, str], waiting: dict[str, list[str]], log: Callable[[str], None]) -> None:
    """Send the notices that wait (key: title and text), up to one that is not taken, and note when each was told."""
    address = os.environ.get(NOTIFY, "").strip()
    for key, (title, text) in [*waiting.items()]:
        if address and not send(address, title, text):
            log(
                f"warning: {title}: nobody was told, for {NOTIFY} does not work; "
                f"{len(waiting)} notice(s) wait for the next occasion"
            )
            return
        if address:
            told[key] = datetime.now(UTC).isoformat(timespec="seconds")
        del waiting[key]
    for key in [*told][:-REMEMBERED]:
        del told[key]


def send(address: str, title: str, text: str) -> bool:
    logger = logging.getLogger("apprise")
    before, logger.disabled = logger.disabled, True  # it logs addresses
    try:
        to = Apprise()
        return to.add(address) and bool(to.notify(text, title=title))
    finally:
        logger.disabled = before


def failed(flow: Flow[..., Any], flow_run: FlowRun, state: State) -> None:
    """A hook of the flows, for failures and crashes."""
    tell_of_end(flow.fn.__name__, flow_run, state, get_logger("m3diff").warning)


def tell_of_end(what: str, run: FlowRun, state: State, log: Callable[[str], None]) -> None:
    """Tell of a failure or crash in one paragraph: what, which run, why, where to look, what to do. A look that fails
    again and again is told once a day.

    Args:
        what: the deployment: full, retrain or watch.
    """
    how, why = "crashed" if state.is_crashed() else "failed", reason_of(state)
    key = f"watch {why} {datetime.now(UTC).date()}" if what == "watch" and how == "failed" else f"{run.id} {how}"
    then = (
        f"Its page says what failed, its worktree {FLOWS}/{run.id} stays for {KEPT_DAYS} days. Once the cause is "
        f"gone: `prefect deployment run m3diff/{what}`."
    )
    if how == "crashed":
        then = "It is started again by itself and goes on where it was killed, unless it crashed three times in a row."
    tell(log, key, f"m3diff/{what} {how}", f"Run {run.name!r} of m3diff/{what} {why}. {link(run.id)}{then}")


def reason_of(state: State) -> str:
    """The state of a run that ended and the first line of its error; for a stage also its last line of output."""
    first, *lines = (state.message or "").removeprefix(EXCEPTION).splitlines() or [""]
    said = [line.strip() for line in lines if line.strip() and not line.startswith("ERROR: failed to reproduce")]
    return f"{(state.name or '').lower()}: {' '.join([first, *said[-1:]])[:MOST_WORDS]}"


def link(flow_run: object) -> str:
    """The address of a run's page, with a full stop and a blank; nothing without a server."""
    address = url_for("flow-run", obj_id=str(flow_run))
    return f"{address} . " if address else ""


def decided(done: Done, log: Callable[[str], None]) -> None:
    """Tell of a model that the gate rejected or promoted; of a run that changed nothing there is nothing to tell."""
    decision = done.decision
    if decision is None or decision.outcome == "unchanged":
        return
    number = "none" if decision.champion is None else decision.champion
    word, then = "promoted", f"The champion before was {number}; `m3diff rollback --why TEXT` brings it back."
    if decision.outcome == "refused":
        word, then = "rejected", f"The champion stays: {number}."
    because = f"Run because {'; '.join(done.reasons)}. " if done.reasons else ""
    text = f"{decision}. {because}{link(done.work.flow_run)}{then}"
    tell(log, f"{done.work.flow_run} {word}", f"m3diff: a model was {word}", text, done.work.checkout)
