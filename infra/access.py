"""Choose the environment variables that each service can see.

Secrets are passed in the environment. A service gets only the variables of Prefect, MLflow and this project that are
listed for it, so new secrets are not passed to any service by default. SECURITY.md has the same list as a table.
"""

from collections.abc import Mapping

from m3diff.records.errors import SECRET_VARIABLE
from m3diff.runtime import PRIVACY

# Prefixes of variables that belong to a tool. All other variables belong to the machine or contain a user's keys
TOOL_PREFIXES = ("PREFECT_", "MLFLOW_", "M3DIFF_")

# Prefixes of the tools' variables that each service gets
NEEDED_PREFIXES = {
    "prefect": ("PREFECT_",),
    "mlflow": ("MLFLOW_",),
    "worker": (
        # Prefect's client, the worker and flows. The prefixes PREFECT_API_DATABASE_ and PREFECT_SERVER_ are left out,
        # since they include the database URL and the server's token
        "PREFECT_API_AUTH_STRING",
        "PREFECT_API_ENABLE_HTTP2",
        "PREFECT_API_REQUEST_TIMEOUT",
        "PREFECT_API_SSL_CERT_FILE",
        "PREFECT_API_TLS_INSECURE_SKIP_VERIFY",
        "PREFECT_CLIENT_",
        "PREFECT_DEBUG_MODE",
        "PREFECT_FLOWS_",
        "PREFECT_LOGGING_",
        "PREFECT_RESULTS_",
        "PREFECT_RUNNER_",
        "PREFECT_TASKS_",
        "PREFECT_UI_URL",
        "PREFECT_WORKER_",
        # MLflow's client
        "MLFLOW_ARTIFACT_",
        "MLFLOW_DISABLE_",
        "MLFLOW_ENABLE_",
        "MLFLOW_HTTP_",
        "MLFLOW_LOGGING_LEVEL",
        "MLFLOW_MULTIPART_",
        "MLFLOW_S3_",
        "MLFLOW_SYSTEM_METRICS_",
        "MLFLOW_TRACKING_",
        # Variables that the flows read
        "M3DIFF_DROP",
        "M3DIFF_NOTIFY",
    ),
}

# Prefixes of variables that a service does not get although they match NEEDED_PREFIXES. They contain a client's login,
# which a server does not need
WITHHELD_PREFIXES = {"prefect": ("PREFECT_API_KEY",), "mlflow": ("MLFLOW_TRACKING_",), "worker": ()}

# Prefixes of the keys that a server needs to access its database and artifacts. The worker gets every key that does not
# belong to a tool, since a stage may need the key (for a DVC remote, an endpoint or Ray)
STORAGE_KEYS = {"prefect": ("PG",), "mlflow": ("PG", "AWS_", "AZURE_", "GOOGLE_")}


def select_visible_variables(service: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a service may see.

    Args:
        service: `prefect`, `mlflow`, `worker` or `keeper`. The keeper sees all variables and passes them on.
        variables: all variables of the keeper, from its shell and from services/environment.
    """
    return {name: value for name, value in variables.items() if is_visible(service, name)}


def is_visible(service: str, name: str) -> bool:
    """Return whether a service may see a variable."""
    if name in PRIVACY or service == "keeper":
        return True
    if name.startswith(TOOL_PREFIXES):
        return name.startswith(NEEDED_PREFIXES[service]) and not name.startswith(WITHHELD_PREFIXES[service])
    if service == "worker":
        return True
    return SECRET_VARIABLE.search(name) is None or name.startswith(STORAGE_KEYS[service])
