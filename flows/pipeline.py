"""The whole pipeline as one flow run: a worktree, preflight, every stage, push, register, the gate, and a page.

There is a task for each stage of DVC, and for what acts outside the repository. The name of a task's final state says
what happened: Ran, Restored (from DVC's run cache), Skipped, Rejected.
"""

import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.runtime import flow_run
from prefect.states import Completed, State

from flows import archive, dvc, notices, report
from flows.report import Done
from flows.warm import NothingNewError
from flows.workspace import alone, workspace
from m3diff.commands.preflight import preflight
from m3diff.commands.rescore import rescore
from m3diff.provenance.dvc import Lock
from m3diff.provenance.git import git
from m3diff.registry import tracking
from m3diff.registry.promote import Promotion, promote
from m3diff.registry.versions import CHAMPION, find_alias
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params
from m3diff.stages.register.stage import Registration, register

FLOW_RUN = "M3DIFF_FLOW_RUN"
"""The environment variable by which a version and the record of decisions know their flow run."""

PARAMS = Path("params.yaml")
MOST_REASONS = 8  # in a commit message
NO_REASON = "neither the data nor the parameters changed since the last registration"

TRANSIENT = (75, -9, 137)  # try again later; ended by the kernel (out of memory) or by a person

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
    os.environ[FLOW_RUN] = name  # for what this process starts
    try:
        with workspace(name, ref, overrides, dirty, data, replay) as work:
            for text in (f"commit {work.commit[:12]}, worktree {work.root}, branch {work.branch}", *work.data):
                get_run_logger().info(text)
            state = in_workspace(Done(work, [reason] if reason else []), worthwhile)
    except NothingNewError as error:
        return Completed(name="Skipped", message=str(error))
    finally:
        del os.environ[FLOW_RUN]
    if state.name == "Skipped":  # it made nothing, so nothing points to its branch
        git("branch", "--quiet", "-D", work.branch)
    return state


def in_workspace(done: Done, worthwhile: Reasons | None) -> State:
    """The run in its worktree, unless there is no reason for it."""
    with alone(done.work, get_run_logger().info):
        try:
            status = look_before()
            if worthwhile:
                found = worthwhile(status, load_params(PARAMS))
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
    return Completed(name=done.state, message=", ".join(f"{name} {how.lower()}" for name, how in done.outcomes.items()))


def work_through(done: Done, status: dict[str, Any]) -> None:
    """The stages, then what acts outside the repository. A stage is current where neither DVC says otherwise nor one
    that it follows from had to be asked for, which may have made its files and recorded them before its command was
    killed. Of a champion that is current nothing is looked at but its version."""
    known = None if status else current_champion(load_params(PARAMS))
    if known is None and not status:
        dvc.link_data()
    asked: set[str] = set()
    for stage, before in dvc.stages().items():
        current = stage not in status and not asked & before
        take(done, stage, reproduce, stage, current)
        if not current:
            asked.add(stage)
    take(done, "push", push_data)
    archive.commit(message_of(done), done.work.links)
    if not done.work.overrides:
        git("update-ref", f"refs/heads/{archive.LATEST}", "HEAD")
    done.registration = take(done, "register", register_model, known)
    done.decision = take(done, "promote", promote_model, done.registration.version)


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
    """The commit message of a run: what each task did, and as trailers what people look for in the commits of a run."""
    work = done.work
    how_many = ", ".join(f"{n} {how.lower()}" for how, n in Counter(done.outcomes.values()).items())
    what = [f"{name} {how.lower()}" for name, how in done.outcomes.items()]
    trailers = [f"Flow-Run: {work.flow_run}", f"From: {work.commit}"]
    trailers += [f"Overrides: {text}" for text in work.overrides]
    trailers += [f"Reason: {text}" for text in done.reasons[:MOST_REASONS]]
    return "\n".join([f"Run {work.flow_run[:8]}: {how_many}", "", *what, "", *trailers])


# The tasks


def worth_retrying(task: Any, run: TaskRun, state: State) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, ConnectionError) or getattr(error, "code", None) in TRANSIENT


FOR_STAGES: dict[str, Any] = {"retries": 1, "retry_delay_seconds": 10, "retry_condition_fn": worth_retrying}
FOR_SERVERS: dict[str, Any] = {"retries": 3, "retry_delay_seconds": [5, 20, 60], "retry_condition_fn": worth_retrying}


@task(name="preflight", task_run_name="preflight", cache_policy=NO_CACHE)
def look_before() -> dict[str, Any]:
    """See that the run can end well on this machine, and what is out of date: DVC's status, by stage. Where something
    is, the data are linked in. What the latest run recorded is current.
    """
    preflight(load_params(PARAMS))
    archive.check_remote()
    if (dvc.is_current() or archive.take_over()) and archive.can_be_sent():
        return {}
    dvc.link_data()
    status = dvc.status()
    return dvc.status() if status and archive.take_up(status) else status


@task(name="stage", task_run_name="{stage}", cache_policy=NO_CACHE, **FOR_STAGES)
def reproduce(stage: str, current: bool = False) -> State:
    """Bring one stage up to date through DVC, which is not asked where the stage is known to be current."""
    outcome = "Skipped" if current else dvc.repro(stage, get_run_logger().info)
    return Completed(name=outcome, message=f"{stage}: {outcome.lower()}", data=outcome)


@task(name="push", task_run_name="push", cache_policy=NO_CACHE, **FOR_SERVERS | {"retry_condition_fn": None})
def push_data() -> State:
    """Send what the run made to the DVC remote, and see that it is there. Nothing points to what is not."""
    outcome, message = archive.push()
    return Completed(name=outcome, message=message, data=outcome)


@task(name="register", task_run_name="register", cache_policy=NO_CACHE, **FOR_SERVERS)
def register_model(known: Registration | None) -> State[Registration]:
    """Log the training to MLflow and register its checkpoint, where it is not `known` already."""
    done = known or register(load_params(PARAMS))
    return Completed(name="Skipped" if done.outcome == "unchanged" else "Ran", message=str(done), data=done)


@task(name="promote", task_run_name="promote", cache_policy=NO_CACHE, **FOR_SERVERS)
def promote_model(version: int) -> State[Promotion]:
    """Let the gate decide on the version that this flow registered. To be rejected is no failure."""
    done = promote(load_params(PARAMS), rescore, version)
    outcome = {"unchanged": "Skipped", "refused": "Rejected"}.get(done.outcome, "Ran")
    return Completed(name=outcome, message=str(done), data=done)
