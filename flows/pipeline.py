"""Define the flows `full` and `retrain`, which run the whole pipeline.

`prefect deployment run m3diff/full` or `m3diff/retrain` starts a flow. Retrain also runs on its schedule.

A run creates a worktree, checks the machine, runs all stages, pushes the outputs, registers the checkpoint, lets the
gate judge it (decide whether it replaces the current model), and writes a page. Each DVC stage is a task, and so is
each action outside the repository. The final state of a successful task is named Ran, Restored (from DVC's run cache),
Skipped or Rejected.
"""

import os
import textwrap
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State

from flows import alerts, dvc, report
from flows.alerts import REFUSED_PREFIX
from flows.dvc import DvcError
from flows.prepared_flow import flow
from flows.report import RunRecord
from flows.runtime import prepare
from flows.workspace import FLOWS_FOLDER, NothingNewError, hold_lock, workspace
from m3diff.commands.preflight import notes_on_questions, preflight, preflight_data
from m3diff.commands.rescore import rescore
from m3diff.provenance.dvc import DVC_LOCK, Lock, require_own_code
from m3diff.provenance.git import git
from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.promote import GateDecision, promote
from m3diff.registry.versions import CHALLENGER, find_aliased_version
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params
from m3diff.stages.register.stage import Registration, register

# Environment variable with the id of the flow run, for register and the record of decisions
M3DIFF_FLOW_RUN_VARIABLE = "M3DIFF_FLOW_RUN"

PARAMS = Path("params.yaml")
MAX_REASONS = 8  # maximum number of reasons in a commit message
NO_REASON = "neither the data nor the parameters changed since the last registration"

# Exit codes of failures that may be temporary: EX_TEMPFAIL, and SIGKILL, sent by the kernel (out of memory) or a user
TRANSIENT_EXIT_CODES = (75, -9, 137)

HOOKS: dict[str, Any] = {"on_failure": [alerts.alert_failure], "on_crashed": [alerts.alert_failure]}


@flow(name="m3diff", persist_result=False, **HOOKS)
def full(
    ref: str | None = None,
    overrides: list[str] | None = None,
    reason: str = "asked for",
    warm_start: bool = False,
    replay: float = 0.25,
) -> State:
    """Run every stage with DVC, then register the checkpoint and let the gate judge it.

    Args:
        ref: the commit, branch or tag to run. By default, HEAD is run, and all files that determine a run must be
            committed.
        overrides: parameters for this run only, such as `train.epochs=6`.
        reason: the reason for the run, which is stored with it.
        warm_start: whether to start training from the champion (the model in use) instead of the base. The run is
            skipped if no dataset has changed since the champion was trained.
        replay: with `warm_start`, the share of pairs of unchanged datasets to train on again, from 0 to 1.
    """
    return run_pipeline(ref, overrides or [], reason, replay=replay if warm_start else None)


@flow(name="m3diff", persist_result=False, **HOOKS)
def retrain(
    ref: str = "HEAD",
    overrides: list[str] | None = None,
    reason: str = "",
    warm_start: bool = False,
    replay: float = 0.25,
) -> State:
    """Run the whole pipeline if data or parameters have changed since the last registration.

    Args:
        ref: the commit, branch or tag to run. Uncommitted changes are not included. For HEAD, the run also uses data
            that `m3diff/watch` has found since.
        reason: the reason for the call, which is stored with the run. A reason alone does not cause training.
        overrides, warm_start, replay: see `full`.
    """
    return run_pipeline(
        ref,
        overrides or [],
        reason,
        if_changed=True,
        data=ref == "HEAD",
        replay=replay if warm_start else None,
    )


def run_pipeline(
    ref: str | None,
    overrides: Sequence[str],
    reason: str,
    if_changed: bool = False,
    data: bool = False,
    replay: float | None = None,
) -> State:
    """Run every stage in DVC's order, then push, register and promote. The first failure ends the run.

    Args:
        ref, overrides, data, replay: see `workspace`. If they are invalid, the run is refused.
        reason: the reason for the run, which is stored with it. May be empty.
        if_changed: whether to skip the run if neither data nor parameters have changed since the last registration.
    """
    prepare()
    name = flow_run.get_id() or str(uuid.uuid4())
    os.environ[M3DIFF_FLOW_RUN_VARIABLE] = name  # for the processes that this one starts
    with ExitStack() as stack:
        stack.callback(os.environ.pop, M3DIFF_FLOW_RUN_VARIABLE)
        try:
            require_own_code()
            work = stack.enter_context(workspace(name, ref, overrides, data, replay))
        except NothingNewError as error:
            return Completed(name="Skipped", message=str(error))
        except (ParamsError, DataError) as error:
            return refuse_run(error)
        log = get_run_logger().info
        log(f"commit {work.commit[:12]}, worktree {work.root}, branch {work.branch}")
        for note in work.data_notes:
            log(note)
        record = RunRecord(work, reasons=[reason] if reason else [])
        state = run_in_workspace(record, if_changed)
    if state.name == "Skipped":  # the run produced nothing, so nothing refers to its branch
        git("branch", "--quiet", "-D", work.branch)
    return state


def refuse_run(error: ParamsError | DataError) -> State:
    """Return the failed state of a run that could not start, with the text of the error as its message.

    The error is not raised, because Prefect would print a traceback before the message, even to a user who only forgot
    to commit a file.
    """
    get_run_logger().error(str(error))
    # `prefect deployment run --watch` prints the state's name and not its message
    cause = textwrap.shorten(error.fault.summary, width=80, placeholder=" ...")
    return Failed(name=f"{REFUSED_PREFIX}: {cause}", message=str(error), data=error)


def run_in_workspace(record: RunRecord, if_changed: bool) -> State:
    """Run the pipeline in its worktree. With `if_changed`, skip it if there is no reason to run it.

    If several runs on this machine have the same content, one run does the work and the others wait. If that run
    succeeds, the others find everything up to date. If it fails or is killed, the next run does the work.
    """
    work = record.work
    log = get_run_logger().info
    on_wait = partial(log, "another flow run is doing the same work; this run waits for it")
    with hold_lock(work.checkout / FLOWS_FOLDER / f"tree-{work.tree}.lock", on_wait=on_wait):
        try:
            status = prepare_run()
            if if_changed:
                reasons = reasons_to_train(status, load_params(PARAMS))
                if not reasons:
                    return Completed(name="Skipped", message=NO_REASON)
                record.reasons += reasons
            for reason in record.reasons:
                log(f"because {reason}")
            record.notes += notes_on_questions(load_params(PARAMS))
            for note in record.notes:
                log(f"preflight: note: {note}")
            run_tasks(record, status)
        except BaseException as error:
            record.error = f"{type(error).__name__}: {error}"
            report.publish(record, commit_message(record))
            raise
        report.publish(record, commit_message(record))
        alerts.alert_decision(record, get_run_logger().warning)
    message = ", ".join(f"{name} {outcome.lower()}" for name, outcome in record.outcomes.items())
    return Completed(name=record.state, message=message)


def run_tasks(record: RunRecord, status: dict[str, Any]) -> None:
    """Run the stages, then push, register and promote.

    Args:
        record: the record of the run, which is updated.
        status: DVC's status by stage at the start of the run.
    """
    outdated_stages: set[str] = set()
    for stage, predecessors in dvc.stages().items():
        # A stage that depends on an outdated stage is never current, even if DVC skips the outdated stage: a killed
        # attempt may have written that stage's files after the status was read
        is_current = stage not in status and not outdated_stages & predecessors
        run_task(record, stage, reproduce, stage, is_current)
        if not is_current:
            outdated_stages.add(stage)
    run_task(record, "push", push_data)
    dvc.commit(commit_message(record), record.work.links)
    if not record.work.overrides:  # later runs must not reuse outputs of a run with overrides or of a warm start
        git("update-ref", f"refs/heads/{dvc.LATEST}", "HEAD")
    record.registration = run_task(record, "register", register_model)
    record.decision = run_task(record, "promote", promote_model, record.registration.version)


def run_task(record: RunRecord, name: str, task: Callable[..., Any], *arguments: Any) -> Any:
    """Run a task and record its outcome and duration. Return its result, or raise the error that made it fail."""
    started = time.monotonic()
    try:
        state: State[Any] = task(*arguments, return_state=True)
        result = state.result()
    except BaseException:
        record.outcomes[name] = "Failed"
        raise
    finally:
        record.seconds[name] = time.monotonic() - started
    record.outcomes[name] = state.name or ""
    get_run_logger().info(state.message or state.name)
    return result


def commit_message(record: RunRecord) -> str:
    """Return the commit message of a run: the outcome of each task, and trailers by which the commit can be found."""
    work = record.work
    outcome_counts = Counter(record.outcomes.values())
    counts = ", ".join(f"{count} {outcome.lower()}" for outcome, count in outcome_counts.items())
    outcomes = [f"{name} {outcome.lower()}" for name, outcome in record.outcomes.items()]
    trailers = [f"Flow-Run: {work.flow_run}", f"From: {work.commit}"]
    trailers += [f"Overrides: {text}" for text in work.overrides]
    trailers += [f"Reason: {text}" for text in record.reasons[:MAX_REASONS]]
    return "\n".join([f"Run {work.flow_run[:8]}: {counts}", "", *outcomes, "", *trailers])


# Reasons to train again


def reasons_to_train(status: dict[str, Any], params: Params) -> list[str]:
    """Return the reasons to train again: changed data or parameters, or a checkpoint that has not been registered.

    Changes of code or of the section `compute` are not a reason.

    Args:
        status: DVC's status by stage.
        params: the parameters of the run.
    """
    reasons: list[str] = []
    for change in dvc.data_and_parameter_changes(status):
        if change.stage != "code":
            detail = ", ".join(change.detail) if isinstance(change.detail, dict) else change.detail
            reasons.append(f"{change.stage}: {change.kind}: {change.path} {detail}")
    reasons += reasons_of_registry(params)
    return reasons


def reasons_of_registry(params: Params) -> Iterator[str]:
    """Check whether the newest registered version is the checkpoint in `dvc.lock`. If not, yield a reason to train."""
    name = params.register_.model_name
    checkpoint = None
    if DVC_LOCK.is_file():
        checkpoint = Lock().hashes(params.paths.model / "checkpoint").get("train outs")
    if checkpoint is None:
        yield "no model has been trained yet"
        return
    with tracking.connect(params.register_.tracking_uri) as client:
        version = find_aliased_version(client, name, CHALLENGER)
    if version is None:
        yield f"no version of {name} is registered yet"
    elif version.tags.get("dvc.checkpoint") != checkpoint:
        yield f"the checkpoint of {name} version {version.version} is not the one in {DVC_LOCK}"


# The tasks


def is_transient(task: Any, run: TaskRun, state: State) -> bool:
    """Return whether a task failed for a reason that may be temporary, so that Prefect should retry it."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, DvcError):
        return error.fields["exit_code"] in TRANSIENT_EXIT_CODES
    return isinstance(error, ConnectionError)


RETRIES_OF_STAGES: dict[str, Any] = {
    "retries": 1,
    "retry_delay_seconds": 10,
    "retry_condition_fn": is_transient,
}
RETRIES_OF_SERVERS: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": [5, 20, 60],
    "retry_condition_fn": is_transient,
}


@task(name="preflight", task_run_name="preflight", cache_policy=NO_CACHE)
def prepare_run() -> dict[str, Any]:
    """Check that the run can succeed on this machine, check out the data, and return DVC's status by stage."""
    params = load_params(PARAMS)
    preflight(params)
    dvc.check_remotes()
    status = dvc.reuse_latest_run()
    preflight_data(params)  # requires the data
    return status


@task(name="stage", task_run_name="{stage}", cache_policy=NO_CACHE, **RETRIES_OF_STAGES)
def reproduce(stage: str, current: bool = False) -> State:
    """Bring one stage up to date. DVC is not called if the stage is known to be up to date."""
    outcome = "Skipped" if current else dvc.repro(stage, get_run_logger().info)
    return Completed(name=outcome, message=f"{stage}: {outcome.lower()}", data=outcome)


# Retry after any error, because every error of a remote may be temporary
@task(name="push", task_run_name="push", cache_policy=NO_CACHE, **RETRIES_OF_SERVERS | {"retry_condition_fn": None})
def push_data() -> State:
    """Send the outputs of the run to the DVC remotes and check that they arrived, before anything refers to them."""
    outcome, message = dvc.push()
    return Completed(name=outcome, message=message, data=outcome)


@task(name="register", task_run_name="register", cache_policy=NO_CACHE, **RETRIES_OF_SERVERS)
def register_model() -> State[Registration]:
    """Log the training run to MLflow and register its checkpoint."""
    registration = register(load_params(PARAMS))
    outcome = "Skipped" if registration.outcome == "unchanged" else "Ran"
    return Completed(name=outcome, message=str(registration), data=registration)


@task(name="promote", task_run_name="promote", cache_policy=NO_CACHE, **RETRIES_OF_SERVERS)
def promote_model(version: int) -> State[GateDecision]:
    """Let the gate judge the version that this flow registered. A rejection is not a failure."""
    decision = promote(load_params(PARAMS), rescore, version)
    outcome = {"unchanged": "Skipped", "refused": "Rejected"}.get(decision.outcome, "Ran")
    return Completed(name=outcome, message=str(decision), data=decision)
