"""The tasks of a flow: one for each stage of DVC, and those that act outside the repository.

The name of a task's final state says what happened: Ran, Restored (from DVC's run cache), Skipped, Refused.
"""

from pathlib import Path
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.states import Completed, State

from components.params import load_params
from components.promote.promote import promote
from components.register.stage import register
from flows import dvc

TRANSIENT = (75, -9, 137)  # try again later; ended by the kernel (out of memory) or by a person
PARAMS = Path("params.yaml")


def worth_retrying(task: Any, run: TaskRun, state: State) -> bool:
    error = state.result(raise_on_failure=False)
    return isinstance(error, ConnectionError) or getattr(error, "code", None) in TRANSIENT


@task(
    name="stage",
    task_run_name="{stage}",
    cache_policy=NO_CACHE,
    retries=1,
    retry_delay_seconds=10,
    retry_condition_fn=worth_retrying,
)
def reproduce(stage: str) -> State:
    """Bring one stage up to date through DVC; its log lines are the task's."""
    outcome = dvc.repro(stage, get_run_logger().info)
    return Completed(name=outcome, message=f"{stage}: {outcome.lower()}", data=outcome)


@task(
    name="register",
    task_run_name="register",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=[5, 20, 60],
    retry_condition_fn=worth_retrying,
)
def register_model() -> State:
    """Log the training to MLflow and register its checkpoint."""
    done = register(load_params(PARAMS))
    outcome = "Skipped" if done.outcome == "unchanged" else "Ran"
    return Completed(name=outcome, message=str(done), data=outcome)


@task(
    name="promote",
    task_run_name="promote",
    cache_policy=NO_CACHE,
    retries=3,
    retry_delay_seconds=[5, 20, 60],
    retry_condition_fn=worth_retrying,
)
def promote_model() -> State:
    """Let the gate decide. To be refused is no failure."""
    done = promote(load_params(PARAMS))
    outcome = {"unchanged": "Skipped", "refused": "Refused"}.get(done.outcome, "Ran")
    return Completed(name=outcome, message=str(done), data=outcome)


def run_pipeline() -> State:
    """Every stage in DVC's order, then register and promote; the first failure ends the run."""
    outcomes: dict[str, str] = {}
    for stage in dvc.stages():
        outcomes[stage] = finish(reproduce(stage, return_state=True))
    outcomes["register"] = finish(register_model(return_state=True))
    outcomes["promote"] = finish(promote_model(return_state=True))
    return Completed(message=", ".join(f"{name} {outcome.lower()}" for name, outcome in outcomes.items()))


def finish(state: State) -> str:
    """The name of a task's final state, in the log too; raises what failed the task."""
    state.result()
    get_run_logger().info(state.message or state.name)
    return state.name or ""
