"""Send requests to the APIs of the Prefect and MLflow servers."""

import socket
import time
from datetime import datetime
from typing import Any

import httpx

from infra.variables import PREFECT_LOGIN, mlflow_admin, mlflow_port, prefect_api, prefect_login, server_url

WORK_POOL = "m3diff"
WORKER_NAME = socket.gethostname()
WORKER_SILENCE_S = 90  # a worker sends a heartbeat every 30 s


def ask_prefect(path: str, body: dict[str, Any]) -> Any:
    """Send a POST request to Prefect's API and return the JSON response.

    Raises:
        httpx.HTTPError: the server does not respond or refuses the request.
    """
    login = prefect_login().get(PREFECT_LOGIN, "")
    auth = httpx.BasicAuth(*login.split(":", 1)) if login else None
    return httpx.post(f"{prefect_api()}{path}", json=body, auth=auth, timeout=10).raise_for_status().json()


def ask_mlflow(path: str, **parameters: str) -> Any:
    """Send a GET request to MLflow's API and return the JSON response, or None if the object does not exist.

    Raises:
        httpx.HTTPError: the server does not respond or refuses the request.
    """
    admin = mlflow_admin()
    auth = httpx.BasicAuth(admin.name, admin.password) if admin else None
    url = f"{server_url(mlflow_port())}/api/2.0/mlflow/{path}"
    response = httpx.get(url, params=parameters, auth=auth, timeout=10)
    if response.status_code == httpx.codes.NOT_FOUND:
        return None
    return response.raise_for_status().json()


def is_worker_heard() -> bool:
    """Return whether Prefect's server recently received a heartbeat from this machine's worker."""
    workers = ask_prefect(f"/work_pools/{WORK_POOL}/workers/filter", {})
    heartbeats = [worker["last_heartbeat_time"] for worker in workers if worker["name"] == WORKER_NAME]
    oldest = time.time() - WORKER_SILENCE_S
    return any(datetime.fromisoformat(heartbeat).timestamp() >= oldest for heartbeat in heartbeats if heartbeat)
