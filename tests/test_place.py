"""Test paths with unusual characters, variables that mislead tools, and checkouts that were copied or moved."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from m3diff.runtime import MAX_TEMPORARY_FOLDER_BYTES
from tests.errors import Message
from tests.toy import REPOSITORY

PREPARE = "from m3diff.runtime import prepare\nprepare()\n"

NAMES = ("my projects", "o'neill", 'a & b;$x (1) [x] "said" müller 5% #1? `w` *')


class Outcome(NamedTuple):
    """The exit code and output of a process. `out` has no spaces at its ends."""

    code: int
    out: str
    err: str


def run(command: list[Any], **options: Any) -> Outcome:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **options)
    return Outcome(done.returncode, done.stdout.strip(), done.stderr)


def run_code(code: str, folder: Path, environment: Mapping[str, str], python: str | Path = sys.executable) -> list[str]:
    """Run code in a fresh process with this repository's `m3diff`, and return the printed lines."""
    paths = os.pathsep.join([str(REPOSITORY), *(path for path in sys.path if "site-packages" in path)])
    inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LC_ALL") if name in os.environ}
    done = run([python, "-c", code], cwd=folder, env={"PYTHONPATH": paths} | inherited | environment)
    assert done.code == 0, done.err
    return done.out.splitlines()


@pytest.mark.fault("P1")
def test_no_variable_misleads_git_or_mlflow(tmp_path):
    """The variables with git settings of a CI service, such as safe.directory, stay."""
    local_variables = subprocess.run(["git", "rev-parse", "--local-env-vars"], capture_output=True, text=True)
    environment = dict.fromkeys([*local_variables.stdout.split(), "MLFLOW_REGISTRY_URI"], "0")
    code = f"import os\n{PREPARE}print(*[name for name in {list(environment)} if name in os.environ])"
    (names,) = run_code(code, tmp_path, environment)
    assert set(names.split()) == {"GIT_CONFIG_PARAMETERS", "GIT_CONFIG_COUNT"}


PRINT_PROXIES = (
    f"import os, urllib.request as u\n{PREPARE}"
    "print(*[bool(u.proxy_bypass(h)) for h in ('127.0.0.1', 'localhost', '::1', 'example.org', '10.0.0.7')])\n"
    "print(os.environ.get('no_proxy'), 'NO_PROXY' in os.environ)"
)


@pytest.mark.fault("P2")
@pytest.mark.parametrize(
    ("environment", "no_proxy"),
    [
        ({"http_proxy": "http://p:1"}, "127.0.0.1,localhost,::1"),
        ({"https_proxy": "http://p:1", "no_proxy": "a.org"}, "a.org,127.0.0.1,localhost,::1"),
        ({"HTTP_PROXY": "http://p:1", "NO_PROXY": "localhost, .b.org"}, "localhost,.b.org,127.0.0.1,::1"),
        ({"ALL_PROXY": "socks5://p:1", "no_proxy": "a", "NO_PROXY": "b.org"}, "a,b.org,127.0.0.1,localhost,::1"),
    ],
    ids=str,
)
def test_only_loopback_is_reached_without_the_proxy(environment, no_proxy, tmp_path):
    bypassed, variables = run_code(PRINT_PROXIES, tmp_path, environment)
    assert variables.split()[0] == no_proxy
    assert bypassed == "True True True False False"


@pytest.mark.fault("P2")
@pytest.mark.parametrize(
    ("environment", "no_proxy"),
    [({}, None), ({"no_proxy": "a.org"}, "a.org"), ({"http_proxy": "http://p:1", "no_proxy": "*"}, "*")],
    ids=["no proxy", "an exception to no proxy", "a proxy for no host"],
)
def test_without_a_proxy_to_avoid_no_variable_changes(environment, no_proxy, tmp_path):
    _, variables = run_code(PRINT_PROXIES, tmp_path, environment)
    assert variables == f"{no_proxy} False"


BIND = """
import os, socket, tempfile
from m3diff.runtime import prepare
prepare()
deep = tempfile.gettempdir() + "/ray/session_2026-11-25_07-06-17_512035_4194304/sockets"
os.makedirs(deep)
socket.socket(socket.AF_UNIX).bind(deep + "/plasma_store")
print(os.environ["RAY_TMPDIR"])
"""


@pytest.mark.fault("P3")
@pytest.mark.parametrize("name", ["d" * MAX_TEMPORARY_FOLDER_BYTES, "d/" * 60, NAMES[2]])
def test_a_folder_for_temporary_files_takes_sockets_whatever_its_path(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (link,) = run_code(BIND, tmp_path, dict.fromkeys(("TMPDIR", "RAY_TMPDIR"), str(folder)))
    (bound,) = folder.rglob("plasma_store")
    assert stat.S_ISSOCK(bound.stat().st_mode)
    assert Path(link).samefile(folder)
    assert Path(link).parent.stat().st_mode & 0o077 == 0


PRINT_HOME = f"import os\n{PREPARE}print(os.environ['HOME'], os.environ.get('XDG_CACHE_HOME'))"


@pytest.mark.fault("P4")
def test_a_home_that_cannot_be_made_is_replaced(tmp_path):
    home, caches = run_code(PRINT_HOME, tmp_path, {"HOME": "/proc/nonexistent"})[0].split()
    assert os.access(home, os.W_OK)
    assert caches == "None"


@pytest.mark.fault("P4")
def test_caches_are_kept_elsewhere_if_the_home_cannot_be_written(tmp_path):
    read_only = f"import os; os.access = lambda *_: False\n{PRINT_HOME}"
    home, caches = run_code(read_only, tmp_path, {"HOME": str(tmp_path)})[0].split()
    assert home == str(tmp_path), "keys and settings are read there"
    assert not Path(caches).is_relative_to(tmp_path)


def environment_at(folder: Path, code: Path = REPOSITORY) -> Path:
    """Create a virtual environment with this one's packages and the `m3diff` of `code`. Return its Python."""
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
        f"import os, sys\n{PREPARE}"
        "ask = 'import yaml, sys; print(sys.prefix)'\n"
        "os.execlp('bash', 'bash', '-c', f'exec {sys.executable} -c \"{ask}\"')"
    )
    (prefix,) = run_code(code, tmp_path, {"PYTHONPATH": ""}, python)
    assert Path(prefix).samefile(tmp_path / name / ".venv")


def run_score(folder: Path, script: Path, python: Path | str = sys.executable) -> Outcome:
    """Run `m3diff score` in a folder with a script like those that pip writes."""
    script.write_text("import sys; from m3diff.__main__ import main; sys.argv = ['m3diff', 'score']; sys.exit(main())")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if python == sys.executable:
        environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *sys.path])
    return run([python, script], cwd=folder, env=environment)


def project(folder: Path, *files: str) -> Path:
    """Write a folder with these empty files and the link through which the code of a checkout is imported."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("")
    (folder / "m3diff").symlink_to("components")
    return folder


CODE = ("components/__init__.py", "components/__main__.py")


@pytest.mark.fault("P6")
@pytest.mark.parametrize(
    ("files", "folder"),
    [
        ((*CODE, "params.yaml"), "."),
        ((*CODE, "dvc.yaml", "data/a"), "data"),
        (CODE, "."),
    ],
    ids=["a checkout", "a folder of a checkout", "no parameters"],
)
def test_the_code_of_another_checkout_is_refused_in_a_checkout(files, folder, tmp_path):
    checkout = project(tmp_path / "copy", *files)
    refused = run_score(checkout / folder, tmp_path / "m3diff")
    assert refused.code == 3, refused.err
    (line,) = refused.err.splitlines()
    assert str(REPOSITORY) in line
    assert Message("dvc.code_of_other_checkout", folder=checkout).in_text(line)


@pytest.mark.fault("P6")
@pytest.mark.parametrize(
    ("files", "folder"),
    [
        (("params.yaml", "dvc.yaml", "data/a"), "data"),
        (("a",), "."),
        (("components/button.js", "params.yaml"), "."),
        ((*CODE, "params.yaml", "mine/params.yaml"), "mine"),
    ],
    ids=["a project without code", "any folder", "another project's components", "a project inside a checkout"],
)
def test_the_installed_code_runs_in_a_project_without_code_of_its_own(files, folder, tmp_path):
    checkout = project(tmp_path / "copy", *files)
    done = run_score(checkout / folder, tmp_path / "m3diff")
    assert done.code != 3, done.err


@pytest.mark.fault("P6")
def test_a_virtual_environment_runs_the_code_of_the_checkout_around_it(tmp_path):
    checkout = project(tmp_path / "copy", *CODE, "params.yaml")
    refused = run_score(tmp_path, tmp_path / "m3diff", environment_at(checkout))
    assert refused.code == 3, refused.err
    assert Message("dvc.code_of_other_checkout", folder=checkout).in_text(refused.err)


@pytest.mark.fault("P7")
@pytest.mark.parametrize("safe", ["", "1"])
def test_a_stage_in_a_worktree_runs_the_code_of_the_worktree(safe, tmp_path):
    tree = project(tmp_path / "tree", *CODE, "params.yaml")
    (tree / CODE[1]).write_text("import sys; print('code of the tree', *sys.argv[1:])")
    paths = os.pathsep.join([str(REPOSITORY), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONSAFEPATH": safe}
    done = run([sys.executable, "-m", "m3diff", "ingest", "a b"], cwd=tree, env=environment)
    assert done.code == 0, done.err
    assert done.out == "code of the tree ingest a b"


# As pip writes a script, and as it writes one if the path of Python has a space
SCRIPT = "import sys\nprint('by', sys.prefix, *sys.argv[1:])\n"
SCRIPT_HEADS = {"m3diff": "#!{python}\n", "dvc": "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n"}
OTHER_SCRIPT = "#!/bin/sh\necho mine\n"


class Moved(NamedTuple):
    """A checkout and the folder to which it was copied or moved.

    Attributes:
        tools: a folder for PATH with the programs that `make install` needs.
    """

    origin: Path
    folder: Path
    tools: Path
    is_copy: bool

    def install(self) -> Outcome:
        """Run the first command of `make install`."""
        check = [sys.executable, str(REPOSITORY / "infra" / "check_system.py")]
        return run(check, cwd=self.folder, env={"PATH": str(self.tools)})


@pytest.fixture(params=[("copied", "there"), ("moved", "o'neill & sons")], ids=["copied", "moved"])
def moved(request, tmp_path: Path) -> Moved:
    method, name = request.param
    origin = project(tmp_path / "first", "stand-in")
    python = environment_at(origin)
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool, text in (("java", "echo 'openjdk version \"17.0.15\"' >&2"), ("git", ""), ("g++", "")):
        write_script(tools / tool, f"#!/bin/sh\n{text}\n")
    (origin / "bin").mkdir()
    shutil.copy(REPOSITORY / "bin" / "m3diff", origin / "bin")
    for tool, head in SCRIPT_HEADS.items():
        write_script(origin / ".venv/bin" / tool, head.format(python=python) + SCRIPT)
    write_script(origin / ".venv/bin/other", OTHER_SCRIPT)
    (origin / ".venv/.ready").touch()
    done = run([origin / "bin/m3diff", "models"])
    assert done == Outcome(0, f"by {origin / '.venv'} models", "")
    folder = tmp_path / name
    if method == "copied":
        shutil.copytree(origin, folder, symlinks=True)
    else:
        origin.rename(folder)
    return Moved(origin, folder, tools, is_copy=method == "copied")


@pytest.mark.fault("P6")
def test_a_checkout_that_was_copied_or_moved_is_refused_before_make_install(moved):
    refused = run([moved.folder / "bin/m3diff", "models"])
    assert refused.code == 3, refused.err
    assert refused.err.count("\n") == 1, refused.err
    assert f"`make install` in {moved.folder}" in refused.err


@pytest.mark.fault("P6")
def test_make_install_adopts_a_checkout_that_was_copied_or_moved(moved):
    installed = moved.install()
    assert installed.code == 0, installed.err
    assert str(moved.origin) in installed.out
    assert not (moved.folder / ".venv/.ready").exists(), "so that make installs the project again"
    for tool in SCRIPT_HEADS:
        done = run([moved.folder / ".venv/bin" / tool, "a b"])
        assert done == Outcome(0, f"by {moved.folder / '.venv'} a b", "")


@pytest.mark.fault("P6")
def test_make_install_leaves_other_scripts_and_the_original_of_a_copy_alone(moved):
    moved.install()
    assert (moved.folder / ".venv/bin/other").read_text() == OTHER_SCRIPT
    if moved.is_copy:
        python = moved.origin / ".venv/bin/python"
        script = SCRIPT_HEADS["m3diff"].format(python=python) + SCRIPT
        assert (moved.origin / ".venv/bin/m3diff").read_text() == script
        assert (moved.origin / ".venv/.ready").exists()


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
@pytest.mark.parametrize(
    ("offline_code", "calls_of_pip"), [("0", 1), ("1", 3)], ids=["what is installed is enough", "a package is missing"]
)
def test_make_install_asks_an_index_only_if_a_package_is_missing(offline_code, calls_of_pip, tmp_path):
    checkout = project(tmp_path / "checkout", "infra/check_system.py")
    for file in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / file, checkout)
    write_script(tmp_path / "python", PIP)
    environment = os.environ | {"OFFLINE": offline_code, "ONLINE": "0"}
    for _ in range(2):
        done = run(["make", "install", f"PYTHON={tmp_path / 'python'}"], cwd=checkout, env=environment)
        assert done.code == 0, done.err
    calls = (checkout / "asked").read_text().splitlines()
    assert len(calls) == calls_of_pip, "the second time nothing is installed"
    assert ["--no-index" in call for call in calls] == [True, *[False] * (calls_of_pip - 1)]
    assert (checkout / ".venv/.ready").exists()


@pytest.mark.fault("P9")
def test_a_checkout_has_the_bytes_of_the_commit_whatever_autocrlf_is(tmp_path, monkeypatch):
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
