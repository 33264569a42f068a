"""Print the state of the services, the result of the last training run, and the pages to open."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from infra.apis import WORK_POOL, ask_mlflow, ask_prefect
from infra.errors import ServiceError
from infra.processes import (
    Service,
    format_time,
    keeper_service,
    mlflow_service,
    prefect_service,
    running_processes,
    services,
)
from m3diff.records.errors import Fault, ParamsError

# Prefix that Prefect adds to the error message of a failed flow
PREFECT_ERROR_PREFIX = "Flow run encountered an exception: "

# Filters of Prefect's API
OWN_FLOWS = {"name": {"any_": ["m3diff"]}}
TRAINING_DEPLOYMENTS = {"name": {"any_": ["full", "retrain"]}}


def print_status() -> None:
    """Print the state, location and start time of each service, then the result of the last training run.

    Raises:
        ServiceError: a service is not running or does not respond, or the last training run failed.
    """
    down = print_services()
    training_fault = None if "prefect" in down else print_last_training()
    if down and training_fault:
        raise ServiceError("infra.services_and_training", services=fault_of_services(down), training=training_fault)
    if down:
        raise ServiceError(fault_of_services(down))
    if training_fault:
        raise ServiceError(training_fault)


def require_all_up() -> None:
    """Print the state of each service.

    Raises:
        ServiceError: a service is not running or does not respond.
    """
    down = print_services()
    if down:
        raise ServiceError(fault_of_services(down))


def print_services() -> dict[str, Fault]:
    """Print a line for each service.

    Returns:
        The fault of each service that is not running or does not respond, by name.
    """
    down = dict[str, Fault]()
    running = running_processes()
    for service in [*services(), keeper_service()]:
        process = next(iter(running[service.name]), None)
        state = "not up"
        since = ""
        if process is not None:
            state = "up" if service.answers() else "not answering"
            since = f"since {format_time(process.create_time())}"
        print(f"{service.name:<9} {state:<14} {describe_location(service):<24} {since:<32} {service.log}")
        if state != "up":
            code = "infra.service_not_up" if process is None else "infra.service_not_answering"
            down[service.name] = Fault(code, service=service.name)
    return down


def describe_location(service: Service) -> str:
    """Return the URL of a server, the work pool of the worker, or an empty string for the keeper."""
    if service.port:
        return service.url
    return f"pool {WORK_POOL}" if service.name == "worker" else ""


def fault_of_services(down: Mapping[str, Fault]) -> Fault:
    """Combine the faults of several services into one."""
    return Fault("infra.services_down", names=list(down), faults=list(down.values()))


# The last training


def find_last_training() -> dict[str, Any] | None:
    """Return the most recently finished training run in the format of Prefect's API, or None if there is none."""
    has_ended = {"state": {"type": {"any_": ["COMPLETED", "CRASHED", "FAILED"]}}}
    return find_first_training(has_ended, sort="END_TIME_DESC")


def find_first_training(condition: Mapping[str, Any], sort: str) -> dict[str, Any] | None:
    """Return the first matching training run in the format of Prefect's API, or None if there is none.

    Args:
        condition: a filter for flow runs in the format of Prefect's API.
        sort: the order, such as `END_TIME_DESC`.
    """
    runs = ask_prefect(
        "/flow_runs/filter",
        {
            "flows": OWN_FLOWS,
            "deployments": TRAINING_DEPLOYMENTS,
            "flow_runs": condition,
            "sort": sort,
            "limit": 1,
        },
    )
    return runs[0] if runs else None


def print_last_training() -> Fault | None:
    """Print the most recently finished training run.

    Returns:
        A fault with the cause and the URL of the run's page if the run failed, otherwise None.
    """
    run = find_last_training()
    if run is None:
        return None
    print(f"last training: {describe_run(run)}")
    if run["state_type"] == "COMPLETED":
        return None
    cause = (run["state"]["message"] or "").partition("\n")[0].removeprefix(PREFECT_ERROR_PREFIX)
    return Fault("infra.last_training_failed", run=describe_run(run), cause=cause, page=run_page(run))


def describe_run(run: Mapping[str, Any]) -> str:
    """Return the name, end time and state of a flow run, separated by commas.

    Args:
        run: a finished flow run in the format of Prefect's API.
    """
    return f"{run['name']}, {format_time(run['end_time'])}, {run['state_name']}"


def run_page(run: Mapping[str, Any]) -> str:
    """Return the URL of a flow run's page."""
    return f"{prefect_service().url}/runs/flow-run/{run['id']}"


# Pages to open


def addresses() -> list[str]:
    """Return lines that list the pages to open: both servers, the runs and model in MLflow, the last run in Prefect."""
    lines = [f"MLflow    {mlflow_service().url}"]
    lines += [f"  {name:<14} {address}" for name, address in mlflow_pages().items()]
    lines.append(f"Prefect   {prefect_service().url}")
    lines.append(f"  {'last run':<14} {page_of_last_run()}")
    return lines


def page_of_last_run() -> str:
    """Return the URL of the most recently started training run, or a note that there is none."""
    has_begun = {"start_time": {"is_null_": False}}
    run = find_first_training(has_begun, sort="START_TIME_DESC")
    return run_page(run) if run else "none yet; `make flow` starts one (`make run` runs without Prefect)"


def mlflow_pages() -> dict[str, str]:
    """Return the URLs of two MLflow pages, by name: the list of runs and the registered model.

    MLflow's start page does not show this project's runs and model. If one of these pages does not exist yet, its value
    is a note. The result is empty if MLflow does not respond.
    """
    from m3diff.settings.load import load_params

    try:
        register = load_params(Path("params.yaml")).register_
        experiment = ask_mlflow("experiments/get-by-name", experiment_name=register.experiment)
        model = ask_mlflow("registered-models/get", name=register.model_name)
    except (ParamsError, httpx.HTTPError):  # these pages are optional, so this is not an error
        return {}
    start = f"{mlflow_service().url}/#"
    none_yet = "none yet; `make run` or `make flow` creates the first"
    runs_page = f"{start}/experiments/{experiment['experiment']['experiment_id']}/runs" if experiment else none_yet
    model_page = f"{start}/models/{quote(register.model_name)}" if model else none_yet
    return {"runs": runs_page, f"model {register.model_name}": model_page}
