"""The lists of variables that services see. tests/infra/test_environments.py tests the environments themselves."""

import re

import pytest
from mlflow import environment_variables
from prefect.settings import Settings
from prefect.settings.legacy import _get_settings_fields

from infra.access import TOOL_PREFIXES, is_visible
from m3diff.runtime import PRIVACY
from tests.toy import REPOSITORY

# A flow is a client of Prefect, which has one token for all clients
NEEDED_SECRETS = {"PREFECT_API_AUTH_STRING"}


def test_the_worker_sees_no_secret_of_prefect_but_the_login_of_a_client():
    fields = {name: setting for name, setting in _get_settings_fields(Settings).items() if name.startswith("PREFECT_")}
    secrets = {name for name, setting in fields.items() if setting.is_secret}
    assert {"PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_KEY"} <= secrets, "the settings have other names now"
    assert {name for name in secrets if is_visible("worker", name)} == NEEDED_SECRETS


def test_the_worker_sees_no_secret_of_mlflow_but_the_login_of_a_client():
    names = {name for name in vars(environment_variables) if name.startswith("MLFLOW_")}
    secret = re.compile("PASSWORD|SECRET|TOKEN|PASSPHRASE|_KEY$|STORE_URI|CONFIG_PATH")
    secrets = {name for name in names if secret.search(name)}
    assert "MLFLOW_AUTH_ADMIN_PASSWORD" in secrets, "the variables have other names now"
    visible_secrets = {name for name in secrets if is_visible("worker", name)}
    assert {name for name in visible_secrets if not name.startswith("MLFLOW_TRACKING_")} == set()


@pytest.mark.parametrize("service", ["prefect", "mlflow", "worker"])
@pytest.mark.parametrize("name", ["M3DIFF_SERVE_TOKEN", "M3DIFF_MLFLOW_STORE", "M3DIFF_A_SECRET_OF_TOMORROW"])
def test_no_service_sees_what_is_listed_for_none(service, name):
    assert not is_visible(service, name)


@pytest.mark.parametrize("service", ["prefect", "mlflow"])
@pytest.mark.parametrize("name", ["OPENAI_API_KEY", "RAY_AUTH_TOKEN", "HF_TOKEN", "MY_PASSWORD"])
def test_a_server_sees_no_key_that_only_a_stage_uses(service, name):
    assert is_visible("worker", name)
    assert not is_visible(service, name)


@pytest.mark.parametrize("service", ["prefect", "mlflow", "worker"])
@pytest.mark.parametrize("name", ["PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "https_proxy", *PRIVACY])
def test_every_service_sees_what_every_program_needs(service, name):
    assert is_visible(service, name)


@pytest.mark.parametrize(
    ("service", "name"),
    [
        ("prefect", "PGPASSWORD"),
        ("mlflow", "PGPASSWORD"),
        ("mlflow", "AWS_SECRET_ACCESS_KEY"),
        ("mlflow", "MLFLOW_S3_ENDPOINT_URL"),
        ("worker", "AWS_SECRET_ACCESS_KEY"),
        ("worker", "MLFLOW_S3_ENDPOINT_URL"),
        ("worker", "M3DIFF_DROP"),
        ("worker", "M3DIFF_NOTIFY"),
        ("worker", "PREFECT_WORKER_QUERY_SECONDS"),
    ],
)
def test_a_service_sees_what_it_reaches_others_with(service, name):
    assert is_visible(service, name)


def test_the_table_of_security_names_every_variable_with_a_secret():
    """The secrets are the variables that infra/README.md and SECURITY.md tell users to set."""
    security = (REPOSITORY / "SECURITY.md").read_text()
    table = security.partition("### Who sees which secret")[2].partition("\n## ")[0]
    documents = (REPOSITORY / "infra/README.md").read_text() + security
    names = set(re.findall(rf"`((?:{'|'.join(TOOL_PREFIXES)}|AWS_|RAY_)[A-Z_]*)", documents))
    secret = re.compile("PASSWORD|SECRET|TOKEN|AUTH_STRING|CONNECTION_URL|_STORE$|_NOTIFY$")
    missing = {name for name in names if secret.search(name) and name not in table}
    assert missing == set()
