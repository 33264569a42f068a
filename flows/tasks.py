"""The tasks of a flow: one for each stage of DVC, and those that act outside the repository.

The name of a task's final state says what happened: Ran, Restored (from DVC's run cache), Skipped, Rejected.
"""

from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.states import Completed, State

from flows import archive, dvc, previous
from flows.progress import StageProgress
from m3diff.commands.preflight import preflight
from m3diff.commands.rescore import rescore
from m3diff.registry.promote import Promotion, promote
from m3diff.settings.load import load_params
from m3diff.stages.register.stage import Registration, register

TRANSIENT = (75, -9, 137)  # try again later; ended by the kernel (out of memory) or by a person
PARAMS = Path("params.yaml")
PAUSES_S: list[float] = [5, 20, 60]


def worth_retrying(task: Any, run: TaskRun, state: State) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, ConnectionError) or getattr(error, "code", None) in TRANSIENT


@task(name="preflight", task_run_name="preflight", cache_policy=NO_CACHE)
def look_before(tree: str) -> dict[str, Any]:
    """See that the run can end well on this machine, and what is out of date: DVC's status, by stage. Where something
    is, the data are linked in.

    Args:
        tree: the content that is to run; what an earlier run of it recorded is current.
    """
    preflight(load_params(PARAMS))
    archive.check_remote()
    if (dvc.is_current() or previous.take_over(tree)) and archive.can_be_sent():
        return {}
    dvc.link_data()
    status = dvc.status()
    return dvc.status() if status and previous.take_up(tree, status) else status


@task(
    name="stage",
    task_run_name="{stage}",
    cache_policy=NO_CACHE,
    retries=1,
    retry_delay_seconds=10,
    retry_condition_fn=worth_retrying,
)
def reproduce(stage: str, current: bool = False) -> State:
    """Bring one stage up to date through DVC, which is not asked where the stage is known to be current."""
    outcome = "Skipped" if current else dvc.repro(stage, StageProgress(stage, get_run_logger().info).line)
    return Completed(name=outcome, message=f"{stage}: {outcome.lower()}", data=outcome)


@task(name="push", task_run_name="push", cache_policy=NO_CACHE, retries=3, retry_delay_seconds=PAUSES_S)
def push_data() -> State:
    """Send what the run made to the DVC remote, and see that it is there. Nothing points to what is not."""
    outcome, message = archive.push(get_run_logger().info)
    return Completed(name=outcome, message=message, data=outcome)


@task(
    name="register",
    task_run_name="register",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=PAUSES_S,
    retry_condition_fn=worth_retrying,
)
def register_model(known: Registration | None) -> State[Registration]:
    """Log the training to MLflow and register its checkpoint, where it is not `known` already."""
    done = known or register(load_params(PARAMS))
    return Completed(name="Skipped" if done.outcome == "unchanged" else "Ran", message=str(done), data=done)


@task(
    name="promote",
    task_run_name="promote",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=PAUSES_S,
    retry_condition_fn=worth_retrying,
)
def promote_model(version: int) -> State[Promotion]:
    """Let the gate decide on the version that this flow registered. To be rejected is no failure."""
    done = promote(load_params(PARAMS), rescore, version)
    outcome = {"unchanged": "Skipped", "refused": "Rejected"}.get(done.outcome, "Ran")
    return Completed(name=outcome, message=str(done), data=done)
