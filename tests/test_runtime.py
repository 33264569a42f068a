"""Test that an import does not change the process, and that every entry point calls `prepare`, which does."""

import getpass
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m3diff import runtime
from m3diff.runtime import PRIVACY
from tests.errors import Message
from tests.toy import REPOSITORY

LIGHT_MODULES = ["m3diff", "flows", "m3diff.runtime", "flows.runtime", "m3diff.records.errors", "m3diff.__main__"]

EXEMPT = {
    # MLflow's models from code: MLflow runs this file, which hands its model over
    "m3diff.stages.register.pyfunc",
}


def every_module() -> list[str]:
    """Return the names of all modules of both packages."""
    names = []
    for package in ("m3diff", "flows"):
        folders = [str((REPOSITORY / package).resolve())]
        names += [package, *(module.name for module in pkgutil.walk_packages(folders, f"{package}."))]
    return [name for name in names if name not in EXEMPT]


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process in which `prepare` has not been called."""
    inherited = {name: value for name, value in os.environ.items() if name not in PRIVACY and name != "UVICORN_HTTP"}
    return inherited | {"PYTHONPATH": str(REPOSITORY)} | variables


def python(*arguments: str, text: str = "", **variables: str) -> str:
    """Run a fresh Python in the checkout and return its output."""
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment(**variables), input=text, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def effects_of(modules: list[str]) -> dict[str, list[str]]:
    libraries = python("-m", "tests.import_effects", "libraries", *modules)
    return json.loads(python("-m", "tests.import_effects", "effects", *modules, text=libraries))


def test_an_import_of_a_light_module_changes_nothing():
    assert effects_of(LIGHT_MODULES) == {}


@pytest.mark.parametrize(("length", "is_linked"), [(36, False), (37, True)])
def test_a_temporary_folder_is_linked_if_its_path_is_too_long_for_sockets(length, is_linked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = "d" * length
    (tmp_path / folder).mkdir()
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(runtime, "short_link", lambda folder: Path("link"))
    runtime.link_temporary_folders()
    assert os.environ["TMPDIR"] == ("link" if is_linked else folder)


@pytest.mark.slow(20)
def test_an_import_of_any_module_changes_nothing():
    assert effects_of(every_module()) == {}


def effects_of_code(code: str, folder: Path) -> dict[str, list[str]]:
    """Return the changes by the import of a module `faulty` with this code."""
    (folder / "faulty.py").write_text(code)
    paths = os.pathsep.join([str(REPOSITORY), str(folder)])
    libraries = python("-m", "tests.import_effects", "libraries", "faulty", PYTHONPATH=paths)
    return json.loads(python("-m", "tests.import_effects", "effects", "faulty", text=libraries, PYTHONPATH=paths))


PROCESS_FAULTS = {
    "a variable": ("import os\nos.environ['CHANGED'] = '1'\n", "os.environ.CHANGED"),
    "a path": ("import sys\nsys.path.append('changed')\n", "sys.path"),
    "an executable": ("import sys\nsys.executable = 'changed'\n", "sys.executable"),
    "a filter": ("import warnings\nwarnings.filterwarnings('ignore', 'changed')\n", "warnings.filters"),
}


@pytest.mark.parametrize(("code", "change"), PROCESS_FAULTS.values(), ids=PROCESS_FAULTS)
def test_a_module_that_changes_the_process_is_found(code, change, tmp_path):
    assert effects_of_code(code, tmp_path) == {"faulty": [change]}


def test_a_module_that_opens_a_file_is_found(tmp_path):
    effects = effects_of_code("import os\nfile = os.open(os.devnull, os.O_RDONLY)\n", tmp_path)
    (change,) = effects["faulty"]
    assert change.startswith("file descriptor.")


LIBRARY_FAULTS = {
    "an attribute": ("from PIL import Image\nImage.MAX_IMAGE_PIXELS = None\n", "PIL.Image.MAX_IMAGE_PIXELS"),
    "a class": (
        "from starlette.formparsers import MultiPartParser\nMultiPartParser.spool_max_size = 1\n",
        "starlette.formparsers.MultiPartParser.spool_max_size",
    ),
}


@pytest.mark.parametrize(("code", "change"), LIBRARY_FAULTS.values(), ids=LIBRARY_FAULTS)
def test_a_module_that_changes_a_library_is_found(code, change, tmp_path):
    assert effects_of_code(code, tmp_path) == {"libraries": [change]}


TWICE = """
from {module} import prepare
from tests.import_effects import process_changes, process_state
before = process_state()
prepare()
once = process_state()
prepare()
print(len(process_changes(before, once)) > len({privacy}), process_changes(once, process_state()))
"""


@pytest.mark.parametrize("module", ["m3diff.runtime", "flows.runtime"])
def test_a_second_call_of_prepare_changes_nothing(module, tmp_path):
    folder = tmp_path / ("long " * 20)
    folder.mkdir()
    variables = {
        "TMPDIR": str(folder),
        "HOME": "/proc/nonexistent",
        "http_proxy": "http://proxy:1",
        "GIT_DIR": "elsewhere",
    }
    code = TWICE.format(module=module, privacy=list(PRIVACY))
    assert python("-c", code, **variables).split("\n")[0] == "True []"


def test_a_path_of_python_that_needs_quotes_is_replaced_by_a_link(tmp_path, monkeypatch):
    environment = tmp_path / "my projects" / ".venv"
    (environment / "bin").mkdir(parents=True)
    (tmp_path / "links").mkdir()
    monkeypatch.setattr(runtime, "private_folder", lambda: tmp_path / "links")
    monkeypatch.setattr(sys, "prefix", str(environment))
    monkeypatch.setattr(sys, "executable", str(environment / "bin" / "python"))
    monkeypatch.setattr(sys, "path", ["", str(REPOSITORY), str(environment / "lib"), f"{environment}-old/lib"])
    runtime.link_python()
    current_folder, checkout, packages, other_packages = sys.path
    assert Path(sys.executable).parent.samefile(environment / "bin")
    assert Path(packages).parent.samefile(environment)
    assert not runtime.needs_quotes(sys.executable)
    assert not runtime.needs_quotes(packages)
    assert current_folder == ""
    assert checkout == str(REPOSITORY)
    assert other_packages == f"{environment}-old/lib"


@pytest.mark.parametrize("is_link", [True, False], ids=["a link", "a folder"])
def test_a_private_folder_that_another_user_made_is_refused(is_link, tmp_path, monkeypatch):
    user_id = os.getuid() if is_link else os.getuid() + 1
    folder = tmp_path / f"m3diff-{user_id}"
    monkeypatch.setattr(os, "getuid", lambda: user_id)
    monkeypatch.setattr(runtime, "Path", lambda _: tmp_path)
    if is_link:
        folder.symlink_to(tmp_path)
    with pytest.raises(SystemExit) as refused:
        runtime.private_folder()
    assert Message("command.folder_of_another_user", path=folder).in_text(str(refused.value))


def test_tools_keep_their_caches_elsewhere_if_the_home_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "private_folder", lambda: tmp_path / "private")
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PREFECT_HOME", "/mine")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.delenv("XDG_CACHE_HOME")
    runtime.provide_home()
    assert os.environ["HOME"] == str(tmp_path)
    assert os.environ["PREFECT_HOME"] == "/mine"
    assert os.environ["XDG_CACHE_HOME"] == str(tmp_path / "private" / "cache")
    monkeypatch.delenv("PREFECT_HOME")
    runtime.provide_home()
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "private" / "prefect")


def test_a_home_that_is_missing_is_made_with_the_folders_above_it(tmp_path, monkeypatch):
    home = tmp_path / "homes" / "ann"
    monkeypatch.setenv("HOME", str(home))
    runtime.provide_home()
    assert home.is_dir()
    assert os.environ["HOME"] == str(home)


def raising(error: Exception) -> Callable[[], Any]:
    """Return a function that raises this error."""

    def fail() -> None:
        raise error

    return fail


def test_a_user_whose_home_is_unknown_gets_a_private_one(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "private_folder", lambda: tmp_path / "private")
    monkeypatch.setattr(Path, "home", raising(RuntimeError("no home")))
    monkeypatch.setenv("HOME", "")
    runtime.provide_home()
    assert os.environ["HOME"] == str(tmp_path / "private")


@pytest.mark.parametrize("error", [KeyError("no such user"), OSError("no such user")], ids=["KeyError", "OSError"])
def test_a_user_whom_the_system_does_not_know_gets_a_name(error, monkeypatch):
    monkeypatch.setattr(getpass, "getuser", raising(error))
    monkeypatch.setenv("USER", "")
    runtime.prepare()
    assert os.environ["USER"] == f"uid-{os.getuid()}"


RAY_BEYOND_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@pytest.mark.parametrize(
    ("address", "value_of_user", "value"),
    [("", None, "0"), ("", "1", "1"), ("head:6379", None, None)],
    ids=["own Ray", "a value of the user", "cluster"],
)
def test_an_own_ray_is_kept_off_the_network_unless_the_user_wants_it(address, value_of_user, value, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv(RAY_BEYOND_LOOPBACK, value_of_user or "")
    if value_of_user is None:
        monkeypatch.delenv(RAY_BEYOND_LOOPBACK)
    runtime.prepare()
    assert os.environ.get(RAY_BEYOND_LOOPBACK) == value


# Code that starts each entry point. Most entry points then fail, because arguments are missing. Others would do their
# work, so the code replaces the function that does it, and first asserts that this function exists
ENTRY_POINTS = {
    "the command line": "from m3diff.__main__ import main\nmain(['--version'])",
    "make up": "from infra import services\nservices.COMMANDS['wait'] = lambda: None\nservices.main('wait')",
    "a worker for images": "from m3diff.images import check\ncheck.check_batch_on_node([], frozenset(), 1)",
}
SLOW_ENTRY_POINTS = {
    "make run": "from infra import run\nassert run.run_dvc\nrun.run_dvc = lambda *_: 1\nrun.main()",
    "a flow that Prefect's engine runs": "from flows.pipeline import full\nfull.fn(ref=1)",
    "watch that Prefect's engine runs": "from flows.watch import watch\nwatch.fn()",
    "a flow that a person calls": "from flows.pipeline import full\nfull(unknown=1)",
    "the worker of flows": "from flows import worker\nassert worker.app\nworker.app = lambda: None\nworker.main()",
    "a worker of train": "from m3diff.stages.train.on_ray import _run_worker\n_run_worker({})",
    "a worker of predict": "from m3diff.stages.predict.stage import CaptionWorker\nCaptionWorker(None)",
    "a replica": "from m3diff.serving.batcher import Replica\nReplica(None, 1, 0.0, 1)",
    "a registered model": "from m3diff.stages.register import pyfunc\npyfunc.PyfuncCaptioner().load_context(None)",
}

BEGIN = """
import os
try:
{code}
except BaseException as error:
    end = error
print(sorted({names} - os.environ.keys()))
"""


def variables_unset_by(code: str, folder: Path) -> str:
    """Return the variables of PRIVACY that an entry point does not set."""
    indented = "\n".join(f"    {line}" for line in code.split("\n"))
    script = folder / "entry_point.py"
    script.write_text(BEGIN.format(code=indented, names=set(PRIVACY)))
    return python(str(script)).splitlines()[-1]


@pytest.mark.parametrize("code", ENTRY_POINTS.values(), ids=ENTRY_POINTS)
def test_an_entry_point_switches_telemetry_off(code, tmp_path):
    assert variables_unset_by(code, tmp_path) == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("code", SLOW_ENTRY_POINTS.values(), ids=SLOW_ENTRY_POINTS)
def test_a_heavy_entry_point_switches_telemetry_off(code, tmp_path):
    assert variables_unset_by(code, tmp_path) == "[]"
