"""The flows `full` and `retrain`: `prefect deployment run m3diff/full`, `m3diff/retrain` or its schedule.

A run is a worktree, preflight, every stage, push, register, the gate, and a page. There is a task for each stage of
DVC, and for what acts outside the repository. The name of a task's final state says what happened: Ran, Restored (from
DVC's run cache), Skipped, Rejected.
"""

import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.runtime import flow_run
from prefect.states import Completed, State

from flows import dvc, report
from flows.report import Done
from flows.workspace import FLOWS, NothingNewError, lock, workspace
from m3diff.commands.preflight import preflight
from m3diff.commands.rescore import rescore
from m3diff.provenance.dvc import LOCK, Lock, require_own_code
from m3diff.provenance.git import git
from m3diff.registry import tracking
from m3diff.registry.promote import Promotion, promote
from m3diff.registry.versions import CHALLENGER, find_alias
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params
from m3diff.stages.register.stage import Registration, register

# The environment variable by which a version and the record of decisions know their flow run
FLOW_RUN = "M3DIFF_FLOW_RUN"

PARAMS = Path("params.yaml")
MOST_REASONS = 8  # in a commit message
NO_REASON = "neither the data nor the parameters changed since the last registration"

TRANSIENT = (75, -9, 137)  # try again later; ended by the kernel (out of memory) or by a person

TOLD: dict[str, Any] = {"on_failure": [report.failed], "on_crashed": [report.failed]}


@flow(name="m3diff", persist_result=False, **TOLD)
def full(
    ref: str | None = None,
    overrides: list[str] | None = None,
    reason: str = "asked for",
    warm_start: bool = False,
    replay: float = 0.25,
) -> State:
    """Every stage through DVC, then register and promote.

    Args:
        ref: the commit, branch or tag to run; without one HEAD, which must then be all that decides a run.
        overrides: parameters of this run alone, such as `train.epochs=6`.
        reason: why; kept with the run.
        warm_start: begin with the champion instead of the base, where data changed since it was trained.
        replay: with `warm_start`, the share of the pairs of unchanged datasets that trains again.
    """
    require_own_code()
    return run_pipeline(ref, overrides or [], reason, replay=replay if warm_start else None)


@flow(name="m3diff", persist_result=False, **TOLD)
def retrain(
    ref: str = "HEAD",
    overrides: list[str] | None = None,
    reason: str = "",
    warm_start: bool = False,
    replay: float = 0.25,
) -> State:
    """Look for changes of data and parameters. Without any the run ends, else it is the whole pipeline.

    Args:
        ref: what to run; what is not committed is left out. With HEAD go the data that `m3diff/watch` found since.
        reason: why it was asked for; by itself no reason to train.
        overrides, warm_start, replay: see `full`.
    """
    require_own_code()
    replayed = replay if warm_start else None
    return run_pipeline(ref, overrides or [], reason, if_changed=True, data=ref == "HEAD", replay=replayed)


def run_pipeline(
    ref: str | None,
    overrides: Sequence[str],
    reason: str,
    if_changed: bool = False,
    data: bool = False,
    replay: float | None = None,
) -> State:
    """Every stage in DVC's order, then push, register and promote; the first failure ends the run.

    Args:
        ref, overrides, data, replay: what to run; see `workspace`.
        reason: why it was asked for; kept with the run.
        if_changed: end where neither data nor parameters changed since the last registration.
    """
    name = flow_run.get_id() or str(uuid.uuid4())
    os.environ[FLOW_RUN] = name  # for what this process starts
    try:
        with workspace(name, ref, overrides, data, replay) as work:
            for text in (f"commit {work.commit[:12]}, worktree {work.root}, branch {work.branch}", *work.data):
                get_run_logger().info(text)
            state = in_workspace(Done(work, [reason] if reason else []), if_changed)
    except NothingNewError as error:
        return Completed(name="Skipped", message=str(error))
    finally:
        del os.environ[FLOW_RUN]
    if state.name == "Skipped":  # it made nothing, so nothing points to its branch
        git("branch", "--quiet", "-D", work.branch)
    return state


def in_workspace(done: Done, if_changed: bool) -> State:
    """The run in its worktree, unless there is no reason for it. Of runs of the same content on this machine one works;
    one that had to wait finds everything current where the other ended well, and does the work itself where it failed
    or died."""
    work, log = done.work, get_run_logger().info
    waits = partial(log, "another flow run does the same work; this one waits for it")
    with lock(work.checkout / FLOWS / f"tree-{work.tree}.lock", tell=waits):
        try:
            status = look_before()
            if if_changed:
                found = look_for_changes(status, load_params(PARAMS))
                if not found:
                    return Completed(name="Skipped", message=NO_REASON)
                done.reasons += found
            for text in done.reasons:
                log(f"because {text}")
            work_through(done, status)
        except BaseException as error:
            done.error = f"{type(error).__name__}: {error}"
            report.publish(done, message_of(done))
            raise
        report.publish(done, message_of(done))
        report.decided(done, get_run_logger().warning)
    return Completed(name=done.state, message=", ".join(f"{name} {how.lower()}" for name, how in done.outcomes.items()))


def work_through(done: Done, status: dict[str, Any]) -> None:
    """The stages, then what acts outside the repository. A stage is current where neither DVC says otherwise nor one
    that it follows from had to be asked for, which may have made its files and recorded them before its command was
    killed."""
    asked: set[str] = set()
    for stage, before in dvc.stages().items():
        current = stage not in status and not asked & before
        take(done, stage, reproduce, stage, current)
        if not current:
            asked.add(stage)
    take(done, "push", push_data)
    dvc.commit(message_of(done), done.work.links)
    if not done.work.overrides:  # nor did it begin with the champion
        git("update-ref", f"refs/heads/{dvc.LATEST}", "HEAD")
    done.registration = take(done, "register", register_model)
    done.decision = take(done, "promote", promote_model, done.registration.version)


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


# When `retrain` trains


def look_for_changes(status: dict[str, Any], params: Params) -> list[str]:
    """Why to train again: changed data and parameters, and what was never registered. Changed code alone is no reason,
    nor is section `compute`.

    Args:
        status: DVC's, by stage.
    """
    found = [
        f"{stage}: {kind}: {path} {', '.join(how) if isinstance(how, dict) else how}"
        for stage, kind, path, how in dvc.news(status)
        if stage != "code"
    ]
    return [*found, *unregistered(params)]


def unregistered(params: Params) -> Iterator[str]:
    """Why the newest registered version is not what `dvc.lock` holds."""
    name = params.register_.model_name
    checkpoint = Lock().hashes(params.paths.model / "checkpoint").get("train outs") if LOCK.is_file() else None
    if checkpoint is None:
        yield "nothing was trained yet"
        return
    with tracking.connected(params.register_.tracking_uri) as client:
        version = find_alias(client, name, CHALLENGER)
    if version is None:
        yield f"no version of {name} is registered yet"
    elif version.tags.get("dvc.checkpoint") != checkpoint:
        yield f"{name} version {version.version} is another checkpoint than the one in {LOCK}"


# The tasks


def worth_retrying(task: Any, run: TaskRun, state: State) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, ConnectionError) or getattr(error, "code", None) in TRANSIENT


FOR_STAGES: dict[str, Any] = {"retries": 1, "retry_delay_seconds": 10, "retry_condition_fn": worth_retrying}
FOR_SERVERS: dict[str, Any] = {"retries": 3, "retry_delay_seconds": [5, 20, 60], "retry_condition_fn": worth_retrying}


@task(name="preflight", task_run_name="preflight", cache_policy=NO_CACHE)
def look_before() -> dict[str, Any]:
    """See that the run can end well on this machine, link the data in, and return what is out of date."""
    preflight(load_params(PARAMS))
    dvc.check_remote()
    return dvc.take_up()


@task(name="stage", task_run_name="{stage}", cache_policy=NO_CACHE, **FOR_STAGES)
def reproduce(stage: str, current: bool = False) -> State:
    """Bring one stage up to date through DVC, which is not asked where the stage is known to be current."""
    outcome = "Skipped" if current else dvc.repro(stage, get_run_logger().info)
    return Completed(name=outcome, message=f"{stage}: {outcome.lower()}", data=outcome)


@task(name="push", task_run_name="push", cache_policy=NO_CACHE, **FOR_SERVERS | {"retry_condition_fn": None})
def push_data() -> State:
    """Send what the run made to the DVC remote, and see that it is there. Nothing points to what is not."""
    outcome, message = dvc.push()
    return Completed(name=outcome, message=message, data=outcome)


@task(name="register", task_run_name="register", cache_policy=NO_CACHE, **FOR_SERVERS)
def register_model() -> State[Registration]:
    """Log the training to MLflow and register its checkpoint."""
    done = register(load_params(PARAMS))
    return Completed(name="Skipped" if done.outcome == "unchanged" else "Ran", message=str(done), data=done)


@task(name="promote", task_run_name="promote", cache_policy=NO_CACHE, **FOR_SERVERS)
def promote_model(version: int) -> State[Promotion]:
    """Let the gate decide on the version that this flow registered. To be rejected is no failure."""
    done = promote(load_params(PARAMS), rescore, version)
    outcome = {"unchanged": "Skipped", "refused": "Rejected"}.get(done.outcome, "Ran")
    return Completed(name=outcome, message=str(done), data=done)
