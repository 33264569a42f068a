"""The whole pipeline as one flow run: a worktree, preflight, every stage, push, register, the gate, and a page."""

import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed, State

from flows import archive, dvc, notices, previous, raw, report, tasks
from flows.coalesce import alone, finish
from flows.report import Done
from flows.schedule import count_crashes
from flows.warm import NothingNewError
from flows.workspace import workspace
from m3diff.provenance.dvc import Lock
from m3diff.provenance.git import git
from m3diff.registry import tracking
from m3diff.registry.versions import CHAMPION, find_alias
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params
from m3diff.stages.register.stage import Registration

FLOW_RUN = "M3DIFF_FLOW_RUN"
"""The environment variable by which a version and the record of decisions know their flow run."""

MOST_REASONS = 8  # in a commit message
NO_REASON = "neither the data nor the parameters changed since the last registration"

Reasons = Callable[[dict[str, Any], Params], list[str]]


def run_pipeline(
    ref: str | None,
    overrides: Sequence[str],
    dirty: bool,
    reason: str,
    worthwhile: Reasons | None = None,
    data: bool = False,
    replay: float | None = None,
) -> State:
    """Every stage in DVC's order, then push, register and promote; the first failure ends the run.

    Args:
        ref, overrides, dirty, data, replay: what to run; see `workspace`.
        reason: why it was asked for; kept with the run.
        worthwhile: more reasons, from DVC's status and the parameters; where it finds none the run ends.
    """
    name = flow_run.get_id() or str(uuid.uuid4())
    count_crashes(Path.cwd())
    try:
        with workspace(name, ref, overrides, dirty, data, replay) as work, known_as(name):
            for text in (f"commit {work.commit[:12]}, worktree {work.root}, branch {work.branch}", *work.data):
                get_run_logger().info(text)
            state = in_workspace(Done(work, [reason] if reason else []), worthwhile)
    except NothingNewError as error:
        return Completed(name="Skipped", message=str(error))
    if state.name == "Skipped":  # it made nothing, so nothing points to its branch
        git("branch", "--quiet", "-D", work.branch)
    return state


def in_workspace(done: Done, worthwhile: Reasons | None) -> State:
    """The run in its worktree, unless another does the same work, or there is no reason for it."""
    with alone(done.work, get_run_logger().info) as other:
        if other:
            return Completed(name="Skipped", message=f"flow run {other} did the same work meanwhile")
        try:
            status = tasks.look_before(done.work.tree)
            if worthwhile:
                found = worthwhile(status, load_params(tasks.PARAMS))
                if not found:
                    return Completed(name="Skipped", message=NO_REASON)
                done.reasons += found
            for text in done.reasons:
                get_run_logger().info(f"because {text}")
            work_through(done, status)
        except BaseException as error:
            done.error = f"{type(error).__name__}: {error}"
            report.publish(done, message_of(done))
            raise
        report.publish(done, message_of(done))
        notices.decided(done, get_run_logger().warning)
        finish(done.work)
    return Completed(name=done.state, message=", ".join(f"{name} {how.lower()}" for name, how in done.outcomes.items()))


@contextmanager
def known_as(name: str) -> Iterator[None]:
    """Within, this process and what it starts know the flow run that they work for."""
    before = os.environ.get(FLOW_RUN)
    os.environ[FLOW_RUN] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[FLOW_RUN]
        else:
            os.environ[FLOW_RUN] = before


def work_through(done: Done, status: dict[str, Any]) -> None:
    """The stages, then what acts outside the repository. A stage is current where neither DVC says otherwise nor one
    that it follows from had to be asked for, which may have made its files and recorded them before its command was
    killed. Of a champion that is current nothing is looked at but its version."""
    known = None if status else current_champion(load_params(tasks.PARAMS))
    if known is None and not status:
        dvc.link_data()
    with raw.in_place(done.work.checkout, status) if known is None else nullcontext():
        asked: set[str] = set()
        for stage, before in dvc.stages().items():
            current = stage not in status and not asked & before
            take(done, stage, tasks.reproduce, stage, current)
            if not current:
                asked.add(stage)
        done.whole = True
        take(done, "push", tasks.push_data)
        archive.commit(message_of(done), done.work.links)
        done.registration = take(done, "register", tasks.register_model, known)
        done.decision = take(done, "promote", tasks.promote_model, done.registration.version)


def current_champion(params: Params) -> Registration | None:
    """The champion, where it is what `dvc.lock` has; None where register and the gate have something to do."""
    lock = Lock()
    with tracking.connected(params.register_.tracking_uri) as client:
        version = find_alias(client, params.register_.model_name, CHAMPION)
    if version is None or version.tags.get("dvc.lock.sha256") != lock.sha256:
        return None
    return Registration(
        outcome="unchanged", model=version.name, version=int(version.version), run_id=version.run_id or ""
    )


def take(done: Done, name: str, task: Callable[..., Any], *arguments: Any) -> Any:
    """Run one task, note how it ended and how long it took, and give its result; raises what failed it."""
    started = time.monotonic()
    try:
        state: State[Any] = task(*arguments, return_state=True)
        result = state.result()
    except BaseException:
        done.outcomes[name] = "Failed"
        raise
    finally:
        done.seconds[name] = time.monotonic() - started
    done.outcomes[name] = state.name or ""
    get_run_logger().info(state.message or state.name)
    return result


def message_of(done: Done) -> str:
    """The commit message of a run: what each task did."""
    how_many = ", ".join(f"{n} {how.lower()}" for how, n in Counter(done.outcomes.values()).items())
    tasks = [f"{name} {how.lower()}" for name, how in done.outcomes.items()]
    return "\n".join([f"Run {done.work.flow_run[:8]}: {how_many}", "", *tasks, "", *trailers(done)])


def trailers(done: Done) -> Iterator[str]:
    """What later runs and people look for in the commits of a run."""
    work = done.work
    yield f"Flow-Run: {work.flow_run}"
    yield f"From: {work.commit}"
    if done.whole:
        yield f"{previous.TREE}: {work.tree}"
    yield from (f"{previous.OVERRIDES}: {text}" for text in work.overrides)
    yield from (f"Reason: {text}" for text in done.reasons[:MOST_REASONS])
