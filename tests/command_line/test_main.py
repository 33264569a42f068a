"""How a command ends: exit codes, messages, and output that nobody reads."""

import dataclasses
import errno
import io
import os
import re
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from m3diff import __main__ as command_line
from m3diff.__main__ import COMMANDS, main
from m3diff.command_line.exit_codes import DATA_REFUSED, READER_LEFT, TRY_AGAIN, USAGE
from m3diff.records.errors import DataError, Fault
from m3diff.records.progress import progress
from m3diff.settings.section import ParamsError
from tests.command_line.conftest import Recorder
from tests.toy import REPOSITORY

pytestmark = pytest.mark.usefixtures("project")


def replace_run(monkeypatch: pytest.MonkeyPatch, name: str, run: Any) -> None:
    """Let a command run this function."""
    entry = COMMANDS[name]
    monkeypatch.setattr(f"{entry.module}.COMMAND", dataclasses.replace(entry.load(), run=run))


# Errors

FAULT = Fault("settings.no_file", path="params.yaml")
FULL_DISK = Fault("command.disk_full", cause="[Errno 28] full")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ParamsError(FAULT), 2, f"m3diff: {FAULT}\n"),
        (DataError(FAULT), 3, f"m3diff validate: {FAULT}\n"),
        (ConnectionError("no server"), 75, "m3diff validate: no server\n"),
        (BlockingIOError("locked"), 75, "m3diff validate: locked\n"),
        (OSError(errno.ENOSPC, "full"), 75, f"m3diff validate: {FULL_DISK}\n"),
    ],
    ids=["parameters", "data", "no server", "a lock", "a full disk"],
)
def test_each_kind_of_error_has_its_exit_code_and_message(error, code, message, monkeypatch, capsys):
    Recorder(monkeypatch, "m3diff.stages.validate.stage", validate=error)
    assert main(["validate"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("error", [KeyError("a bug"), OSError(errno.EIO, "a bug")], ids=["KeyError", "OSError"])
def test_a_bug_is_not_hidden(error, monkeypatch, capsys):
    Recorder(monkeypatch, "m3diff.stages.validate.stage", validate=error)
    with pytest.raises(type(error)):
        main(["validate"])
    assert capsys.readouterr().err == ""


def test_a_lost_connection_is_a_reason_to_try_again(monkeypatch, capsys):
    def lose_connection(params: Any) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("m3diff.stages.code.code", lose_connection)
    assert main(["code"]) == TRY_AGAIN
    assert "Broken pipe" in capsys.readouterr().err


# Missing packages


@pytest.mark.parametrize(
    ("typed", "extra"), [("score predictions.json", "score"), ("caption a.png b.png", "serve"), ("train", "train")]
)
def test_a_missing_package_is_named_with_the_extra_that_installs_it(typed, extra, monkeypatch, capsys):
    def run(*arguments: Any) -> None:
        raise ModuleNotFoundError("No module named 'pycocoevalcap'", name="pycocoevalcap.cider")

    command, *words = typed.split()
    replace_run(monkeypatch, command, run)
    assert main([command, *words]) == 2
    install = f"pip install -c constraints.txt -e '.[{extra}]'"
    fault = Fault("command.missing_package", package="pycocoevalcap", command=install, python=sys.executable)
    assert capsys.readouterr().err == f"m3diff {command}: {fault}\n"


@pytest.mark.parametrize("name", ["m3diff.no_such", "flows", None])
def test_a_missing_module_of_the_project_is_a_bug(name, monkeypatch):
    def run(*arguments: Any) -> None:
        raise ModuleNotFoundError("missing", name=name)

    replace_run(monkeypatch, "train", run)
    with pytest.raises(ModuleNotFoundError):
        main(["train"])


# The parent process


@pytest.fixture
def prctl_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The calls of Linux's prctl that a command makes."""
    Recorder(monkeypatch, "m3diff.stages.predict.stage", predict=None)  # imports torch, which needs the real ctypes
    calls: list[tuple[int, ...]] = []
    libc = SimpleNamespace(prctl=lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(command_line.ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(command_line.sys, "platform", "linux")
    return calls


def test_under_dvc_a_command_asks_to_be_ended_with_its_parent(prctl_calls, monkeypatch):
    monkeypatch.setenv("DVC_STAGE", "predict")
    monkeypatch.chdir(REPOSITORY)
    main(["predict"])
    assert prctl_calls == [(1, 15)]


def test_a_command_that_a_person_typed_outlives_its_parent(prctl_calls, monkeypatch):
    monkeypatch.delenv("DVC_STAGE", raising=False)
    main(["predict"])
    assert prctl_calls == []


# Output


@pytest.fixture
def unread_stream() -> Any:
    """An open stream whose reader has left, as after `| head`."""
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    with open(writing_end, "w", encoding="utf-8") as stream:
        yield stream


@pytest.mark.parametrize(
    ("typed", "stream", "codes"),
    [
        pytest.param("profile one-gpu", "stdout", (READER_LEFT,), id="a command"),
        pytest.param("--help", "stdout", (READER_LEFT,), id="a help"),
        pytest.param("data check nowhere", "stdout", (READER_LEFT, DATA_REFUSED, USAGE), id="a refused folder"),
        pytest.param("profile none", "stderr", (READER_LEFT, DATA_REFUSED, USAGE), id="an error"),
    ],
)
def test_output_that_nobody_reads_ends_a_command_quietly(typed, stream, codes, unread_stream, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(sys, stream, unread_stream)
        code = main(typed.split())
    assert code in codes
    assert "Broken pipe" not in capsys.readouterr().err


def test_a_command_that_prints_line_by_line_ends_quietly_at_the_first_unread_line(unread_stream, monkeypatch, capsys):
    monkeypatch.setattr("m3diff.stages.code.code", lambda params: print("a line", flush=True))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", unread_stream)
        code = main(["code"])
    assert code == 128 + signal.SIGPIPE, "as shells report it"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_command_without_an_open_output_ends_as_usual(stream, monkeypatch):
    """A shell closes the output with `>&-`. Python then has no stream."""
    monkeypatch.setattr("m3diff.stages.code.code", lambda params: print("a line"))
    with monkeypatch.context() as patch:
        patch.setattr(sys, stream, None)
        code = main(["code"])
    assert code == 0


def test_a_name_that_output_cannot_encode_is_printed_with_an_escape(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr("m3diff.stages.code.code", lambda params: print("caf\udce9.png"))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        main(["code"])
    assert stream.buffer.getvalue() == b"caf\\udce9.png\n"


def test_progress_is_shown_in_a_log(capsys):
    assert list(progress([1, 2], "count")) == [1, 2]
    last_line = capsys.readouterr().err.rpartition("\r")[2].rstrip()
    assert re.search(r"^count: 100%\|#+\| 2/2 \[.*[0-9?]it/s\]$", last_line)
