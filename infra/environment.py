"""Build the environment of each service, with telemetry disabled and all files kept in services/.

Secrets are passed in the environment and never on the command line, which every user of the machine can read.
"""

import os
import secrets
from collections.abc import Mapping

from flows import GUARD
from infra.access import select_visible_variables
from infra.variables import (
    HOST,
    MLFLOW_PASSWORD,
    bin_folder,
    prefect_client_variables,
    prefect_login,
    prefect_port,
    services_folder,
    worker_login,
)
from m3diff.runtime import PRIVACY


def environment(service: str, token: str) -> dict[str, str]:
    """Return the environment of a service. Flows inherit the worker's environment.

    Args:
        service: `prefect`, `mlflow`, `worker` or `keeper`.
        token: name of the environment variable that contains the server's token, or an empty string if the service has
            no token.

    Raises:
        ServiceError: MLflow requires a login, but the worker does not have one yet.
    """
    all_variables = os.environ | PRIVACY
    variables = select_visible_variables(service, all_variables)
    if service == "prefect":
        variables = prefect_settings() | prefect_login() | variables
    elif service == "mlflow":
        variables |= mlflow_settings(all_variables)
    elif service == "worker":
        variables = prefect_login() | variables
        if MLFLOW_PASSWORD in all_variables:
            variables.pop("MLFLOW_TRACKING_TOKEN", None)  # MLflow would use it instead of the login
            variables |= worker_login()
    prefect_client = prefect_client_variables()
    return variables | {
        "PREFECT_HOME": prefect_client["PREFECT_HOME"],
        "PREFECT_API_URL": prefect_client["PREFECT_API_URL"],
        "PATH": f"{bin_folder()}{os.pathsep}{all_variables.get('PATH', os.defpath)}",
        # Otherwise MLflow starts eight processes for jobs that this project does not use
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "UVICORN_HTTP": "auto" if token in all_variables else GUARD,
        "LC_ALL": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
    }


def prefect_settings() -> dict[str, str]:
    """Return the variable that allows only Prefect's own pages to read the server's responses (CORS)."""
    port = prefect_port()
    return {"PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{HOST}:{port},http://localhost:{port}"}


def mlflow_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that configure the MLflow server: its storage and, if a password is set, its logins."""
    folder = services_folder() / "mlflow"
    settings = {
        "MLFLOW_BACKEND_STORE_URI": variables.get("M3DIFF_MLFLOW_STORE", f"sqlite:///{folder}/mlflow.db"),
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": variables.get("M3DIFF_MLFLOW_ARTIFACTS", (folder / "artifacts").as_uri()),
    }
    if MLFLOW_PASSWORD in variables:
        settings["MLFLOW_AUTH_CONFIG_PATH"] = str(folder / "auth.ini")
        # Signs the forms on MLflow's pages. A new key at each start only invalidates pages that are open
        settings["MLFLOW_FLASK_SERVER_SECRET_KEY"] = secrets.token_hex(32)
    return settings
