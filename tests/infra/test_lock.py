"""The lock says what the tested set says, with hashes; an audit that could not look is no clean one."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from infra import check_system, lock
from infra.lock import LockError
from tests.toy import REPOSITORY

PACKAGE = re.compile(r"^([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})*)\n", re.MULTILINE)


def locked() -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each package of the lock, by name."""
    text = (REPOSITORY / "infra" / "lock.txt").read_text()
    found = {name: (version, hashes.count("--hash")) for name, version, hashes in PACKAGE.findall(text)}
    assert PACKAGE.sub("", text) == lock.HEAD, "a line that is no package"
    return found


def constrained() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().split()
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def with_extras(asked: str) -> list[Requirement]:
    """What the project, or one of its extras, asks for, without its own name."""
    need = Requirement(asked)
    if need.name != "m3diff":
        return [need]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in sorted(need.extras))]
    return [found for texts in lists for text in texts for found in with_extras(text)]


def test_the_lock_has_the_tested_versions_each_with_hashes():
    tested = constrained()
    for name, (version, hashes) in locked().items():
        assert hashes > 0, name
        assert name.startswith(("nvidia-", "cuda-", "triton")) or tested.get(name) == version, name


def test_the_lock_has_all_that_the_project_and_a_team_ask_for_and_nothing_that_is_only_for_tests():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*with_extras("m3diff[team]"), *with_extras("m3diff[cluster]")]
    found = locked()
    assert [str(need) for need in asked if not need.specifier.contains(found[canonicalize_name(need.name)][0])] == []
    assert {"psycopg2-binary", "asyncpg", "boto3", "dvc-s3", "dvc-ssh", "flask-wtf", "aiohttp-cors"} <= found.keys()
    only_here = {canonicalize_name(Requirement(text).name) for text in extras["dev"]} - {"m3diff"}
    assert found.keys().isdisjoint(only_here | {"moto"})


def test_the_tested_set_is_names_and_versions_without_what_only_cuda_brings():
    resolved = (
        "# a comment\nzope==2\nnvidia-nccl-cu13==1\n    # via torch\ntorch==3\ncuda-toolkit==1\ntriton==1\nattrs==1\n"
    )
    assert lock.pins(resolved) == "attrs==1\ntorch==3\nzope==2\n"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CONSTRAINTS", "LOCK"):
        path = tmp_path / name
        path.write_text("Flask_WTF==1\nattrs==1\n")
        monkeypatch.setattr(lock, name, path)
    return tmp_path


def test_an_upgrade_names_what_changed_and_locks_just_that(files, monkeypatch, capsys):
    asked = []

    def resolve(tools: Path, extras: tuple[str, ...], *options: str, python: str = "3.11") -> str:
        asked.append((extras, options, Path(options[-1]).read_text() if options else ""))
        return "attrs==2\nflask-wtf==1\n" + ("yarl==1\n" if python == "3.13" else "")

    monkeypatch.setattr(lock, "resolve", resolve)
    lock.upgrade(files)
    assert capsys.readouterr().out.startswith("2 version(s) changed: attrs==2 yarl==1\n")
    assert (files / "CONSTRAINTS").read_text() == "attrs==2\nflask-wtf==1\nyarl==1\n"
    assert (files / "LOCK").read_text() == lock.HEAD + "attrs==2\nflask-wtf==1\n"
    tested, *newer, team = asked
    assert tested == (lock.TESTED, (), "")
    assert [constraints for *_, constraints in newer] == ["attrs==2\nflask-wtf==1\n"] * 2
    assert team[0] == lock.TEAM
    assert "--generate-hashes" in team[1]
    assert team[2] == "attrs==2\nflask-wtf==1\nyarl==1\n"


def test_an_upgrade_that_cannot_lock_changes_neither_file(files, monkeypatch):
    def resolve(tools: Path, extras: tuple[str, ...], *options: str, python: str = "3.11") -> str:
        if "--generate-hashes" in options:
            raise LockError("no")
        return "attrs==2\n"

    monkeypatch.setattr(lock, "resolve", resolve)
    with pytest.raises(LockError):
        lock.upgrade(files)
    assert {path.read_text() for path in files.iterdir()} == {"Flask_WTF==1\nattrs==1\n"}


SOUND = {"name": "attrs", "version": "1", "vulns": []}
WEAK = {"name": "yarl", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"]}]}


def test_an_audit_passes_only_where_every_package_was_looked_up_and_none_is_weak():
    assert lock.judge([SOUND, SOUND]) == "no known vulnerability in 2 packages"
    with pytest.raises(LockError, match="1 known vulnerabilities.*\n  yarl 2: PYSEC-1, fixed in 3"):
        lock.judge([SOUND, WEAK])
    for nothing_known in ([SOUND, {"name": "torch", "skip_reason": "not found on PyPI"}], []):
        with pytest.raises(LockError, match="could not be looked up"):
            lock.judge(nothing_known)


def test_an_audit_without_an_answer_fails_in_words(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(lock, "install", lambda tools, requirement: tmp_path)
    answer = subprocess.CompletedProcess([], 1, stdout="", stderr="Connection refused")
    monkeypatch.setattr(lock.subprocess, "run", lambda *command, **options: answer)
    assert lock.main("audit") == 1
    assert "make audit: pip-audit had no answer, so nothing is known" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tools")


@pytest.mark.slow(15)
@pytest.mark.parametrize("platform", lock.PLATFORMS)
@pytest.mark.parametrize("python", lock.PYTHONS)
def test_the_tested_versions_are_there_for_each_python_and_machine(tools, python, platform):
    asked = ("--constraints", str(lock.CONSTRAINTS))
    found = lock.pins(lock.resolve(tools, ("all",), *asked, python=python, platform=platform)).split()
    tested = {lock.canonical(line) for line in lock.CONSTRAINTS.read_text().split()}
    assert [line for line in found if lock.canonical(line) not in tested] == []
    assert len(found) > 200


def test_the_pythons_that_are_resolved_are_those_that_the_project_says_it_takes():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    takes = SpecifierSet(project["requires-python"])
    minor = [f"3.{number}" for number in range(9, 20)]
    assert [version for version in minor if takes.contains(version)] == list(lock.PYTHONS)
    assert f"Python {lock.PYTHONS[0]} to {lock.PYTHONS[-1]}" == check_system.PYTHON
