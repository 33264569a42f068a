from pathlib import Path

import pytest

from m3diff.records.errors import DataError
from m3diff.scoring.metrics.java import JavaMissing, require_java


def put_java(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "java").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "java").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_the_installed_java_is_found():
    assert require_java() >= 8


@pytest.mark.fault("18")
def test_no_java_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing, match="not found on PATH.*apt-get install openjdk-17"):
        require_java()
    assert issubclass(JavaMissing, DataError)


def test_a_java_that_does_not_start_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put_java(tmp_path, "echo Unrecognized option: -Dx >&2; exit 1", monkeypatch)
    with pytest.raises(JavaMissing, match="does not start.*Unrecognized option: -Dx.*install a Java runtime"):
        require_java()


@pytest.mark.parametrize(("line", "version"), [("1.8.0_292", 8), ("11.0.2", 11), ("17.0.15", 17), ("21", 21)])
def test_versions_old_and_new_are_read(line: str, version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put_java(tmp_path, f"echo 'openjdk version \"{line}\"' >&2", monkeypatch)
    assert require_java() == version


@pytest.mark.fault("18")
def test_java_7_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put_java(tmp_path, "echo 'java version \"1.7.0\"' >&2", monkeypatch)
    with pytest.raises(JavaMissing, match="too old"):
        require_java()
