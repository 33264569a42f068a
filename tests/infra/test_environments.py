"""The environment of each service: secrets, logins and disabled telemetry."""

import pytest

from flows import GUARD
from infra import processes, services
from infra.errors import ServiceError
from infra.mlflow_login import WORKER_USER
from m3diff.runtime import PRIVACY
from tests.errors import raises
from tests.infra.toy import TOKENS, environment_of, make_worker_password


@pytest.mark.parametrize("servers", [[], ["prefect"], ["mlflow"], ["prefect", "mlflow"]], ids=str)
def test_a_server_without_a_token_is_guarded_and_nothing_is_sent_out(servers, monkeypatch):
    """tests/flows/test_foreign_sites.py tests the requests that the guard refuses."""
    monkeypatch.setenv("UVICORN_HTTP", "h11")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    tokens = dict(zip(("prefect", "mlflow"), TOKENS.items(), strict=True))
    for name in servers:
        monkeypatch.setenv(*tokens[name])
    make_worker_password()
    for service in services.services():
        service_environment = environment_of(service)
        assert PRIVACY.items() <= service_environment.items()
        assert service_environment["UVICORN_HTTP"] == ("auto" if service.name in servers else GUARD)


def test_only_prefects_own_pages_may_read_its_answers_unless_a_person_says_so(monkeypatch):
    variable = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"
    prefect = services.services()[0]
    assert environment_of(prefect)[variable] == "http://127.0.0.1:4200,http://localhost:4200"
    monkeypatch.setenv(variable, "https://flows.example")
    assert environment_of(prefect)[variable] == "https://flows.example"


def test_secrets_reach_the_servers_by_environment_and_never_by_command(monkeypatch):
    database = "PREFECT_API_DATABASE_CONNECTION_URL"
    values = TOKENS | {"M3DIFF_FLOWS": "7", "M3DIFF_MLFLOW_STORE": "postgresql://u:sesame@h/d"}
    values |= {database: "postgresql+asyncpg://u:sesame@h/d", "M3DIFF_MLFLOW_ARTIFACTS": "s3://bucket/runs"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    prefect, mlflow, worker = services.services()
    commands = " ".join(word for service in services.services() for word in service.command)
    assert not any(secret in commands for secret in ("sesame", "a" * 16, "b" * 16))
    assert "--app-name basic-auth" in " ".join(mlflow.command)
    assert worker.command[-2:] == ["--limit", "7"]
    stores = {
        "MLFLOW_BACKEND_STORE_URI": values["M3DIFF_MLFLOW_STORE"],
        "MLFLOW_DEFAULT_ARTIFACT_ROOT": "s3://bucket/runs",
    }
    assert stores.items() <= environment_of(mlflow).items()
    assert environment_of(prefect)[database] == values[database]


SECRETS_OF = {
    "prefect": {"PREFECT_API_AUTH_STRING", "PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_API_AUTH_STRING"},
    "mlflow": {
        "AWS_SECRET_ACCESS_KEY",
        "MLFLOW_AUTH_ADMIN_PASSWORD",
        "MLFLOW_BACKEND_STORE_URI",
        "MLFLOW_FLASK_SERVER_SECRET_KEY",
    },
    "worker": {
        "AWS_SECRET_ACCESS_KEY",
        "M3DIFF_NOTIFY",
        "MLFLOW_TRACKING_PASSWORD",
        "OPENAI_API_KEY",
        "PREFECT_API_AUTH_STRING",
        "RAY_AUTH_TOKEN",
    },
}
"""The names of the secrets that each service sees, as in the table of SECURITY.md."""


@pytest.mark.parametrize("name", SECRETS_OF)
def test_each_service_sees_the_secrets_of_the_table_and_no_other(name, monkeypatch):
    values = TOKENS | {
        "AWS_SECRET_ACCESS_KEY": "sesame-storage",
        "M3DIFF_MLFLOW_STORE": "postgresql://u:sesame@h/mlflow",
        "M3DIFF_NOTIFY": "json://u:sesame@h",
        "M3DIFF_SERVE_TOKEN": "sesame-serve-token",
        "MLFLOW_TRACKING_PASSWORD": "sesame-of-a-person",
        "MLFLOW_TRACKING_TOKEN": "sesame-of-a-person",
        "MLFLOW_TRACKING_USERNAME": "a-person",
        "OPENAI_API_KEY": "sesame-endpoint",
        "PREFECT_API_DATABASE_CONNECTION_URL": "postgresql+asyncpg://u:sesame@h/prefect",
        "RAY_AUTH_TOKEN": "sesame-ray",
    }
    for variable, value in values.items():
        monkeypatch.setenv(variable, value)
    make_worker_password()
    (service,) = [service for service in services.services() if service.name == name]
    service_environment = environment_of(service)
    own_secrets = {"w" * 16, service_environment.get("MLFLOW_FLASK_SERVER_SECRET_KEY", "-")}
    secret_values = [*TOKENS.values(), *own_secrets]
    secret_names = {
        variable for variable, value in service_environment.items() if "sesame" in value or value in secret_values
    }
    assert secret_names == SECRETS_OF[name]


def test_the_keeper_sees_every_secret_since_it_hands_them_to_the_services(monkeypatch):
    values = TOKENS | {"M3DIFF_MLFLOW_STORE": "postgresql://u:sesame@h/mlflow", "AWS_SECRET_ACCESS_KEY": "sesame"}
    for variable, value in values.items():
        monkeypatch.setenv(variable, value)
    assert values.items() <= environment_of(processes.keeper_service()).items()


def test_the_worker_logs_in_to_mlflow_as_its_own_user_whoever_started_it(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", TOKENS["MLFLOW_AUTH_ADMIN_PASSWORD"])
    monkeypatch.setenv("MLFLOW_AUTH_ADMIN_PASSWORD", TOKENS["MLFLOW_AUTH_ADMIN_PASSWORD"])
    make_worker_password()
    service_environment = environment_of(services.services()[-1])
    assert service_environment["MLFLOW_TRACKING_USERNAME"] == WORKER_USER
    assert service_environment["MLFLOW_TRACKING_PASSWORD"] == "w" * 16


def test_the_worker_keeps_the_login_of_another_mlflow_where_this_one_asks_for_none(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "of-another-server")
    service_environment = environment_of(services.services()[-1])
    assert service_environment["MLFLOW_TRACKING_USERNAME"] == "of-another-server"


def test_a_worker_without_a_login_does_not_start(folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_AUTH_ADMIN_PASSWORD", TOKENS["MLFLOW_AUTH_ADMIN_PASSWORD"])
    with raises(ServiceError, "infra.no_password_of_worker", path=folder / "mlflow/worker.password", user=WORKER_USER):
        environment_of(services.services()[-1])
