"""`make flow`. tests/flows/test_services.py starts a flow on real servers."""

from types import SimpleNamespace
from typing import Any

import pytest

from infra import services
from infra.errors import ServiceError
from m3diff.records.errors import ParamsError
from tests.errors import Message, raises
from tests.infra.toy import CAUSE, TOKENS, pretend


def test_a_flow_is_not_started_from_a_checkout_with_changes(monkeypatch):
    pretend(monkeypatch, "COMPLETED")
    refusal = ParamsError("images.video", path="params.yaml")  # an error of any code

    def refuse(ref: str | None) -> str:
        raise refusal

    monkeypatch.setattr("flows.workspace.starting_commit", refuse)
    monkeypatch.setattr(services.subprocess, "run", lambda *words, **options: pytest.fail("it was started"))
    with raises(ServiceError, "infra.flow_not_started", cause=refusal.fault):
        services.run_flow()


@pytest.mark.parametrize(("code", "kind"), [(0, "COMPLETED"), (1, "FAILED")])
def test_a_flow_is_watched_to_its_end_which_is_the_exit_code(code, kind, monkeypatch, capsys):
    pretend(monkeypatch, kind)
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", TOKENS["PREFECT_SERVER_API_AUTH_STRING"])
    started: list[Any] = []
    monkeypatch.setattr("flows.workspace.starting_commit", lambda ref: "a commit")
    monkeypatch.setattr(
        services.subprocess,
        "run",
        lambda command, env: started.append((command[1:], env)) or SimpleNamespace(returncode=code),
    )
    assert services.main("flow", "main") == code
    ((command, environment),) = started
    assert command == ["deployment", "run", "m3diff/full", "--watch", "--param", 'ref="main"']
    assert environment["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert environment["PREFECT_API_AUTH_STRING"] == TOKENS["PREFECT_SERVER_API_AUTH_STRING"]
    assert Message("infra.last_training_failed", cause=CAUSE).in_text(capsys.readouterr().err) == bool(code)


def test_a_flow_that_failed_before_any_training_ended_is_an_error_too(monkeypatch):
    pretend(monkeypatch, "COMPLETED")
    monkeypatch.setattr("flows.workspace.starting_commit", lambda ref: "a commit")
    monkeypatch.setattr(services.subprocess, "run", lambda command, env: SimpleNamespace(returncode=1))
    with raises(ServiceError, "infra.flow_failed"):
        services.run_flow()


def test_a_flow_without_a_server_is_refused(monkeypatch):
    pretend(monkeypatch, "COMPLETED", not_up="prefect")
    with raises(ServiceError, "infra.prefect_not_up"):
        services.run_flow()
