"""The file services/environment, and the variables that are checked before anything starts."""

import os
from pathlib import Path

import pytest

from infra import services, variables
from infra.errors import ServiceError
from infra.mlflow_login import WORKER_USER
from infra.variables import PACKAGES
from m3diff.records.errors import Fault
from tests.errors import Message, raises
from tests.infra.toy import TOKENS


def write_settings(folder: Path, text: str, mode: int = 0o600) -> None:
    file = folder / "environment"
    file.write_text(text)
    file.chmod(mode)


@pytest.mark.parametrize("mode", [0o640, 0o604], ids=["the group", "everybody"])
def test_a_file_of_settings_that_others_can_read_is_refused(mode, folder):
    write_settings(folder, "M3DIFF_MLFLOW_PORT=5100\n", mode)
    with raises(ServiceError, "infra.settings_readable_by_others", path=folder / "environment"):
        variables.read_settings()


def test_settings_are_read_from_the_file_unless_the_shell_has_set_them(folder, monkeypatch):
    monkeypatch.setenv("M3DIFF_PREFECT_PORT", "4300")
    text = "# ports\n\nM3DIFF_PREFECT_PORT=1\nM3DIFF_MLFLOW_PORT=5100\nM3DIFF_MLFLOW_STORE='postgresql://a b'"
    write_settings(folder, text)
    variables.read_settings()
    assert [service.port for service in services.services()] == [4300, 5100, None]
    assert os.environ["M3DIFF_MLFLOW_STORE"] == "postgresql://a b"


def test_a_setting_without_a_value_is_refused(folder):
    write_settings(folder, "B=1\nA\n")
    with raises(ServiceError, "infra.setting_without_value", path=folder / "environment", key="A"):
        variables.read_settings()


@pytest.mark.parametrize("address", [None, "127.0.0.1", "127.0.0.2", "localhost"])
def test_servers_on_loopback_need_no_token(address, monkeypatch):
    if address:
        monkeypatch.setenv("M3DIFF_BIND", address)
    variables.check_settings()
    for service in services.services()[:2]:
        assert service.command[service.command.index("--host") + 1] == (address or "127.0.0.1")


@pytest.mark.parametrize("action", [services.up, services.keep], ids=["up", "keep"])
@pytest.mark.parametrize("address", ["0.0.0.0", "192.168.1.2", "server.example"])
@pytest.mark.parametrize("missing", [[*TOKENS], [*TOKENS][1:]], ids=["both", "one"])
def test_a_server_that_others_reach_needs_both_tokens(action, address, missing, folder, monkeypatch):
    monkeypatch.setenv("M3DIFF_BIND", address)
    for name in TOKENS.keys() - set(missing):
        monkeypatch.setenv(name, TOKENS[name])
    faults = [
        Fault("infra.open_without_token", value=address, variable=name, file=folder / "environment") for name in missing
    ]
    with raises(ServiceError, "infra.wrong_settings", count=len(missing), faults=faults):
        action()


@pytest.mark.parametrize("address", ["0.0.0.0", "192.168.1.2", "server.example"])
def test_a_server_that_others_reach_starts_with_both_tokens(address, monkeypatch):
    monkeypatch.setenv("M3DIFF_BIND", address)
    for name, token in TOKENS.items():
        monkeypatch.setenv(name, token)
    variables.check_settings()


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("PREFECT_SERVER_API_AUTH_STRING", "m3diff:short", "infra.token_too_short"),
        ("PREFECT_SERVER_API_AUTH_STRING", "c" * 20, "infra.token_without_user"),
        ("MLFLOW_AUTH_ADMIN_PASSWORD", "short", "infra.token_too_short"),
        ("MLFLOW_AUTH_ADMIN_USERNAME", WORKER_USER, "infra.admin_is_worker"),
        ("M3DIFF_BIND", "::1", "infra.address_with_colon"),
    ],
)
@pytest.mark.parametrize("command", ["up", "keep"])
def test_a_wrong_setting_is_refused_before_anything_starts(command, name, value, code, folder, monkeypatch):
    monkeypatch.setenv(name, value)
    with raises(ServiceError, "infra.wrong_settings", count=1) as refused:
        services.COMMANDS[command]()
    (fault,) = refused.value.fields["faults"]
    assert fault.code == code
    assert fault.fields["key"] == name
    assert fault.fields.get("value", value) == value
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [("M3DIFF_PREFECT_PORT", "http", 65535), ("M3DIFF_FLOWS", "0", 1000), ("M3DIFF_FLOWS", "", 1000)],
)
@pytest.mark.parametrize("command", ["up", "keep"])
def test_a_number_out_of_range_is_refused_before_anything_starts(command, name, value, limit, folder, monkeypatch):
    monkeypatch.setenv(name, value)
    with raises(ServiceError, "infra.number_out_of_range", key=name, value=value, limit=limit):
        services.COMMANDS[command]()
    assert list(folder.iterdir()) == []


def test_the_secret_in_a_token_that_is_too_short_is_in_no_message(monkeypatch):
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "m3diff:sesame")
    with raises(ServiceError, "infra.wrong_settings", count=1) as refused:
        variables.check_settings()
    assert "sesame" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MLFLOW_AUTH_ADMIN_PASSWORD", "b" * 16),
        ("M3DIFF_MLFLOW_STORE", "postgresql://u:p@h/mlflow"),
        ("M3DIFF_MLFLOW_ARTIFACTS", "s3://bucket/runs"),
        ("PREFECT_API_DATABASE_CONNECTION_URL", "postgresql+asyncpg://u:p@h/prefect"),
        ("PREFECT_SERVER_DATABASE_CONNECTION_URL", "postgresql+asyncpg://u:p@h/prefect"),
    ],
)
def test_a_setting_whose_package_is_not_installed_is_refused_in_one_line(name, value, folder, monkeypatch, capsys):
    monkeypatch.setattr(variables, "PACKAGES", PACKAGES)
    monkeypatch.setattr(variables.importlib.util, "find_spec", lambda package: None)
    monkeypatch.setenv(name, value)
    assert services.main("up") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert Message("infra.package_not_installed", key=name).in_text(lines[1])
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("M3DIFF_MLFLOW_STORE", "sqlite:////tmp/mlflow.db"), ("M3DIFF_MLFLOW_ARTIFACTS", "file:///data/runs")],
)
def test_a_setting_that_needs_no_package_of_a_team_is_taken_without_it(name, value, monkeypatch):
    monkeypatch.setattr(variables, "PACKAGES", PACKAGES)
    monkeypatch.setattr(variables.importlib.util, "find_spec", lambda package: None)
    monkeypatch.setenv(name, value)
    variables.check_settings()
