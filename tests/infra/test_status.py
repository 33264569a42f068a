"""The output of `make status` and `make up` about the services and the last training."""

import shutil
from typing import Any

import httpx
import pytest

from infra import services, status
from infra.errors import ServiceError
from infra.processes import Service
from m3diff.records.errors import Fault
from tests.errors import Message, raises
from tests.infra.toy import CAUSE, pretend
from tests.toy import REPOSITORY


@pytest.mark.fault("W4")
@pytest.mark.parametrize(
    ("kind", "not_up", "code"),
    [
        ("CRASHED", "", "infra.last_training_failed"),
        ("FAILED", "", "infra.last_training_failed"),
        ("FAILED", "worker", "infra.services_and_training"),
        ("COMPLETED", "worker", "infra.services_down"),
        ("COMPLETED", "prefect", "infra.services_down"),
        ("FAILED", "prefect", "infra.services_down"),
    ],
)
def test_status_fails_for_what_is_not_up_and_a_training_that_ended_badly(kind, not_up, code, monkeypatch, capsys):
    pretend(monkeypatch, kind, not_up)
    with raises(ServiceError, code) as failed:
        status.print_status()
    service_fault = failed.value.fields.get("services", failed.value.fault)
    training_fault = failed.value.fields.get("training", failed.value.fault)
    if not_up:
        assert service_fault.fields["names"] == [not_up]
        assert service_fault.fields["faults"] == [Fault("infra.service_not_up", service=not_up)]
    if code != "infra.services_down":
        assert training_fault.fields["run"].startswith("owl, ")
        assert training_fault.fields["cause"] == CAUSE
        assert training_fault.fields["page"] == "http://127.0.0.1:4200/runs/flow-run/7f3a"
    assert services.main("status") == 1
    printed = capsys.readouterr()
    assert str(failed.value) in printed.err
    assert (" owl, " in printed.out) == (not_up != "prefect")


def test_status_succeeds_if_all_is_up_and_the_last_training_ended_well(monkeypatch, capsys):
    pretend(monkeypatch, "COMPLETED")
    assert services.main("status") == 0
    assert capsys.readouterr().err == ""


def test_a_service_that_runs_and_does_not_answer_is_a_fault(monkeypatch):
    pretend(monkeypatch, "COMPLETED")
    monkeypatch.setattr(Service, "answers", lambda service: service.name != "mlflow")
    fault = Fault("infra.service_not_answering", service="mlflow")
    with raises(ServiceError, "infra.services_down", names=["mlflow"], faults=[fault]):
        status.require_all_up()


@pytest.mark.parametrize("kind", ["CRASHED", "FAILED", "COMPLETED"])
def test_up_exits_well_where_all_services_are_up_however_the_last_training_ended(kind, monkeypatch, capsys):
    pretend(monkeypatch, kind)
    assert services.main("up") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert Message("infra.last_training_failed", cause=CAUSE).in_text(printed.out) == (kind != "COMPLETED")


@pytest.mark.parametrize(("command", "code"), [("up", 0), ("status", 1)])
def test_a_busy_server_is_said_in_a_line_and_is_up_all_the_same(command, code, monkeypatch, capsys):
    pretend(monkeypatch, "COMPLETED")

    def refuse(path: str, body: Any) -> Any:
        raise httpx.ReadTimeout("database is locked")

    monkeypatch.setattr(status, "ask_prefect", refuse)
    assert services.main(command) == code
    printed = capsys.readouterr()
    assert "database is locked" in printed.out + printed.err


@pytest.mark.parametrize("name", ["prefect", "mlflow", "worker"])
def test_up_fails_where_a_service_is_not_up_however_well_the_last_training_ended(name, monkeypatch):
    pretend(monkeypatch, "COMPLETED", not_up=name)
    with raises(ServiceError, "infra.services_down", names=[name]):
        services.up()


@pytest.mark.parametrize("has_runs", [True, False], ids=["runs are there", "nothing ran yet"])
def test_up_prints_the_pages_of_runs_model_and_last_flow_run(has_runs, folder, monkeypatch):
    shutil.copy(REPOSITORY / "params.yaml", folder.parent)
    answers = {
        "experiments/get-by-name": {"experiment": {"experiment_id": "12"}},
        "registered-models/get": {"registered_model": {}},
    }
    monkeypatch.setattr(status, "ask_mlflow", lambda path, **question: answers[path] if has_runs else None)
    monkeypatch.setattr(status, "ask_prefect", lambda path, body: [{"id": "7f3a"}] if has_runs else [])
    lines = status.addresses()
    pages = [line.split()[-1] for line in lines]
    expected_pages = [
        "http://127.0.0.1:5000",
        "http://127.0.0.1:5000/#/experiments/12/runs",
        "http://127.0.0.1:5000/#/models/m3diff",
        "http://127.0.0.1:4200",
        "http://127.0.0.1:4200/runs/flow-run/7f3a",
    ]
    if has_runs:
        assert pages == expected_pages
    else:
        assert [line for line in lines if "none yet" in line] == [lines[1], lines[2], lines[4]]
