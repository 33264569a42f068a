"""Where people work: paths with any letter, environments that lead elsewhere, checkouts that were copied or moved."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from m3diff import LONGEST
from tests.toy import REPOSITORY

NAMES = ("my projects", "o'neill", 'a & b;$x (1) [x] "said" müller 5% #1? `w` *')


def ran(command: list[Any], **options: Any) -> tuple[int, str, str]:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    return done.returncode, done.stdout.strip(), done.stderr


def run(code: str, folder: Path, environment: Mapping[str, str], python: str | Path = sys.executable) -> list[str]:
    """The lines that code prints in a process of its own, whose `m3diff` is this repository's."""
    paths = os.pathsep.join([str(REPOSITORY), *(path for path in sys.path if "site-packages" in path)])
    clean = {name: os.environ[name] for name in ("PATH", "HOME", "LC_ALL") if name in os.environ}
    status, out, err = ran([python, "-c", code], cwd=folder, env={"PYTHONPATH": paths} | clean | environment)
    assert status == 0, err
    return out.splitlines()


@pytest.mark.fault("P1")
def test_no_variable_leads_git_or_mlflow_elsewhere(tmp_path):
    """Those by which CI gives git settings, such as safe.directory, stay."""
    listed = subprocess.run(["git", "rev-parse", "--local-env-vars"], capture_output=True, text=True).stdout.split()
    given = dict.fromkeys([*listed, "MLFLOW_REGISTRY_URI"], "0")
    print_left = f"import os, m3diff; print(*[name for name in {list(given)} if name in os.environ])"
    assert set(run(print_left, tmp_path, given)[0].split()) == {"GIT_CONFIG_PARAMETERS", "GIT_CONFIG_COUNT"}


@pytest.mark.fault("P2")
@pytest.mark.parametrize(
    ("given", "no_proxy"),
    [
        ({"http_proxy": "http://p:1"}, "127.0.0.1,localhost,::1"),
        ({"https_proxy": "http://p:1", "no_proxy": "a.org"}, "a.org,127.0.0.1,localhost,::1"),
        ({"HTTP_PROXY": "http://p:1", "NO_PROXY": "localhost, .b.org"}, "localhost,.b.org,127.0.0.1,::1"),
        ({"ALL_PROXY": "socks5://p:1", "no_proxy": "a", "NO_PROXY": "b.org"}, "a,b.org,127.0.0.1,localhost,::1"),
        ({}, None),
        ({"no_proxy": "a.org"}, "a.org"),
        ({"http_proxy": "http://p:1", "no_proxy": "*"}, "*"),
    ],
    ids=str,
)
def test_loopback_is_asked_without_a_proxy_and_other_machines_with_it(given, no_proxy, tmp_path):
    """Without a proxy, or with none for anybody, nothing is set."""
    code = (
        "import m3diff, os, urllib.request as u\n"
        "print(*[bool(u.proxy_bypass(h)) for h in ('127.0.0.1', 'localhost', '::1', 'example.org', '10.0.0.7')])\n"
        "print(os.environ.get('no_proxy'), 'NO_PROXY' in os.environ)"
    )
    bypassed, said = run(code, tmp_path, given)
    assert said.split()[0] == str(no_proxy)
    if given and no_proxy not in ("a.org", "*"):
        assert bypassed == "True True True False False"
    else:
        assert said == f"{no_proxy} False"


BIND = """
import m3diff, os, socket, tempfile
deep = tempfile.gettempdir() + "/ray/session_2026-11-25_07-06-17_512035_4194304/sockets"
os.makedirs(deep)
socket.socket(socket.AF_UNIX).bind(deep + "/plasma_store")
print(os.environ["RAY_TMPDIR"])
"""


@pytest.mark.fault("P3")
@pytest.mark.parametrize("name", ["d" * LONGEST, "d/" * 60, NAMES[2]])
def test_a_folder_for_temporary_files_takes_sockets_whatever_its_path(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (other,) = run(BIND, tmp_path, dict.fromkeys(("TMPDIR", "RAY_TMPDIR"), str(folder)))
    (made,) = folder.rglob("plasma_store")
    assert stat.S_ISSOCK(made.stat().st_mode)
    assert Path(other).samefile(folder)
    assert Path(other).parent.stat().st_mode & 0o077 == 0


@pytest.mark.fault("P4")
def test_a_home_that_cannot_be_made_or_written_is_replaced_as_far_as_it_must_be(tmp_path):
    code = "import m3diff, os; print(os.environ['HOME'], os.environ.get('XDG_CACHE_HOME'))"
    home, caches = run(code, tmp_path, {"HOME": "/proc/nonexistent"})[0].split()
    assert os.access(home, os.W_OK)
    assert caches == "None"
    read_only = f"import os; os.access = lambda *_: False\n{code}"
    home, caches = run(read_only, tmp_path, {"HOME": str(tmp_path)})[0].split()
    assert home == str(tmp_path), "keys and settings are read there"
    assert not Path(caches).is_relative_to(tmp_path)


def environment_at(folder: Path, code: Path = REPOSITORY) -> Path:
    """The Python of a virtual environment below `folder` that has this one's packages, and the package of `code`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (packages,) = (folder / ".venv").glob("lib/python3*/site-packages")
    shared = [path for path in sys.path if "site-packages" in path]
    (packages / "ours.pth").write_text("\n".join([str(code), *shared]), encoding="utf-8")
    return folder / ".venv" / "bin" / "python"


@pytest.mark.fault("P5")
@pytest.mark.parametrize("name", NAMES)
def test_a_shell_starts_this_python_by_its_path_without_quotes_as_ray_does(name, tmp_path):
    python = environment_at(tmp_path / name)
    code = (
        "import m3diff, os, sys\n"
        "ask = 'import yaml, sys; print(sys.prefix)'\n"
        "os.execlp('bash', 'bash', '-c', f'exec {sys.executable} -c \"{ask}\"')"
    )
    (prefix,) = run(code, tmp_path, {"PYTHONPATH": ""}, python)
    assert Path(prefix).samefile(tmp_path / name / ".venv")


def asked(folder: Path, script: Path, python: Path | str = sys.executable) -> tuple[int, str]:
    script.write_text("import sys; from m3diff.__main__ import main; sys.argv = ['m3diff', 'score']; sys.exit(main())")
    paths = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])} if python == sys.executable else {}
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | paths
    code, _, said = ran([python, script], cwd=folder, env=given)
    return code, said


def project(folder: Path, *files: str) -> Path:
    """A folder with these files, empty, and the link by which a checkout's code is imported."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("")
    (folder / "m3diff").symlink_to("components")
    return folder


CODE = ("components/__init__.py", "components/__main__.py")


@pytest.mark.fault("P6")
@pytest.mark.parametrize(
    ("files", "at", "refused"),
    [
        ((*CODE, "params.yaml"), ".", True),
        ((*CODE, "dvc.yaml", "data/a"), "data", True),
        (CODE, ".", True),
        (("params.yaml", "dvc.yaml", "data/a"), "data", False),
        (("a",), ".", False),
        (("components/button.js", "params.yaml"), ".", False),
        ((*CODE, "params.yaml", "mine/params.yaml"), "mine", False),
    ],
)
def test_the_code_that_runs_is_the_project_s_own_where_it_has_any(files, at, refused, tmp_path):
    place = project(tmp_path / "copy", *files)
    code, said = asked(place / at, tmp_path / "m3diff")
    assert (code == 3) is refused, said
    if refused:
        (line,) = said.splitlines()
        assert all(text in line for text in (str(REPOSITORY), str(place), f"`make install` in {place}"))
    if at == "." and refused and "params.yaml" in files:  # a virtual environment runs the checkout's that it lies in
        code, said = asked(tmp_path, tmp_path / "m3diff", environment_at(place))
        assert (code, f"`make install` in {place}" in said) == (3, True), said


@pytest.mark.fault("P7")
@pytest.mark.parametrize("safe", ["", "1"])
def test_a_worktree_s_stage_runs_the_worktree_s_code_under_pythonsafepath_too(safe, tmp_path):
    tree = project(tmp_path / "tree", *CODE, "params.yaml")
    (tree / CODE[1]).write_text("import sys; print('code of the tree', *sys.argv[1:])")
    given = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path]), "PYTHONSAFEPATH": safe}
    found = ran([sys.executable, "-m", "m3diff", "ingest", "a b"], cwd=tree, env=given)
    assert found[:2] == (0, "code of the tree ingest a b"), found[2]


@pytest.mark.fault("P6")
@pytest.mark.parametrize(("how", "name"), [("copied", "there"), ("moved", "o'neill & sons")])
def test_a_checkout_that_was_copied_or_moved_is_adopted_by_make_install_and_refused_before(how, name, tmp_path):
    first, there = project(tmp_path / "first", "stand-in"), tmp_path / name
    python, path = environment_at(first), tmp_path / "bin"
    path.mkdir()
    for tool, text in (("java", "echo 'openjdk version \"17.0.15\"' >&2"), ("git", ""), ("g++", "")):
        write_script(path / tool, f"#!/bin/sh\n{text}\n")  # what check_system asks for, and nothing else
    (first / "bin").mkdir()
    shutil.copy(REPOSITORY / "bin" / "m3diff", first / "bin")
    script = f"#!{python}\nimport sys\nprint('by', sys.prefix, *sys.argv[1:])\n"
    long = f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n" + script.partition("\n")[2]
    for tool, text in (("m3diff", script), ("dvc", long), ("other", "#!/bin/sh\necho mine\n")):
        write_script(first / ".venv/bin" / tool, text)
    (first / ".venv/.ready").touch()
    assert ran([first / "bin/m3diff", "models"]) == (0, f"by {first / '.venv'} models", "")
    (shutil.copytree(first, there, symlinks=True) if how == "copied" else first.rename(there))
    code, _, said = ran([there / "bin/m3diff", "models"])
    assert (code, said.count("\n"), f"`make install` in {there}" in said) == (3, 1, True), said
    check = [sys.executable, str(REPOSITORY / "infra" / "check_system.py")]
    code, said, _ = ran(check, cwd=there, env={"PATH": str(path)})
    assert (code, str(first) in said) == (0, True), said
    assert not (there / ".venv/.ready").exists(), "so that make installs the project again"
    for tool in ("m3diff", "dvc"):
        assert ran([there / ".venv/bin" / tool, "a b"]) == (0, f"by {there / '.venv'} a b", "")
    assert (there / ".venv/bin/other").read_text() == "#!/bin/sh\necho mine\n"
    if how == "copied":
        assert (first / ".venv/bin/m3diff").read_text() == script
        assert (first / ".venv/.ready").exists()


def write_script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


PIP = """#!/bin/sh
case "$*" in
  "-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python;;
  *--no-index*) echo "$*" >> asked; exit ${OFFLINE:-0};;
  *pip*) echo "$*" >> asked; exit ${ONLINE:-0};;
esac
"""


@pytest.mark.fault("P8")
@pytest.mark.parametrize(("offline", "asks"), [("0", 1), ("1", 3)])
def test_make_install_asks_no_index_where_what_is_installed_is_enough(offline, asks, tmp_path):
    checkout = project(tmp_path / "checkout", "infra/check_system.py")
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / file, checkout)
    write_script(tmp_path / "python", PIP)
    given = os.environ | {"OFFLINE": offline, "ONLINE": "0"}
    for _ in range(2):
        code, _, said = ran(["make", "install", f"PYTHON={tmp_path / 'python'}"], cwd=checkout, env=given)
        assert code == 0, said
    asked = (checkout / "asked").read_text().splitlines()
    assert len(asked) == asks, "the second time nothing is installed"
    assert ["--no-index" in line for line in asked] == [True, *[False] * (asks - 1)]
    assert (checkout / ".venv/.ready").exists()


@pytest.mark.fault("P9")
def test_a_checkout_has_the_bytes_of_the_commit_whatever_autocrlf_says(tmp_path, monkeypatch):
    (tmp_path / "settings").write_text("[core]\n\tautocrlf = true\n[user]\n\tname = a\n\temail = a@localhost\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "settings"))
    files = {"m3diff": b"#!/bin/sh\necho ran\n", "windows.csv": b"a,b\r\n"}
    subprocess.run(["git", "init", "-q", tmp_path / "origin"], check=True)
    shutil.copy(REPOSITORY / ".gitattributes", tmp_path / "origin")
    for name, content in files.items():
        (tmp_path / "origin" / name).write_bytes(content)
    subprocess.run("git add -A && git commit -qm one", shell=True, cwd=tmp_path / "origin", check=True)
    subprocess.run(["git", "clone", "-q", tmp_path / "origin", tmp_path / "clone"], check=True)
    assert {name: (tmp_path / "clone" / name).read_bytes() for name in files} == files
