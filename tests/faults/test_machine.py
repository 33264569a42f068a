"""An odd machine: packages that cannot be written, no HOME, a user without a name, a path with spaces and Unicode."""

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests import toy
from tests.faults.small import MADE, write_params
from tests.toy import REPOSITORY

NOBODY = 54321
BOXED = """
set -e
mount --bind "$PACKAGES" "$PACKAGES"
mount -o remount,ro,bind "$PACKAGES"
exec unshare --user --map-user={user} -- "$@"
"""

STAGES = """
import os, pwd, sys
try:
    pwd.getpwuid(os.getuid())
    sys.exit("this user has a name")
except KeyError:
    pass
assert "HOME" not in os.environ
assert not os.access(os.environ["PACKAGES"], os.W_OK)
from m3diff.__main__ import main
for command in {commands}:
    code = main(command)
    assert code == 0, (command, code)
"""

FLOW = """
from flows import archive, dvc
from m3diff.provenance.git import git
from flows.workspace import workspace
with workspace("one", "HEAD", ["evaluate.gallery=7"]):
    dvc.link_data()
    assert dvc.repro("evaluate", print) == "Ran"
    archive.commit("what ran", ())
    assert git("log", "-1", "--format=%s") == "what ran"
from m3diff.__main__ import main
assert main(["register"]) == 0
assert main(["promote"]) == 0
assert main(["history"]) == 0
"""


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    folder = tmp_path / "ein Pfad mit Ümläuten, 空白 & 'Zeichen'"
    folder.mkdir()
    return folder


def run_boxed(code: str, folder: Path) -> str:
    """Run Python code in `folder` as a user without name or home, under packages that are mounted read-only."""
    packages = site.getsitepackages()[0]
    box = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", BOXED.format(user=NOBODY), "sh"]
    if subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this kernel or container lets nobody make a user namespace, so no such machine can be made here")
    environment = {name: os.environ[name] for name in ("PATH", "LC_ALL", "OMP_NUM_THREADS") if name in os.environ}
    environment |= {"PACKAGES": packages, "PYTHONPATH": str(REPOSITORY)}
    command = [*box, sys.executable, "-c", code]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.fault("30")
@pytest.mark.slow(60)
def test_every_real_stage_runs_there(odd):
    write_params(odd)
    run_boxed(STAGES.format(commands=MADE), odd)
    assert (odd / "data/07_report/report.html").is_file()


@pytest.mark.fault("30")
@pytest.mark.slow(60)
def test_a_flows_worktree_dvc_git_register_and_promote_work_there(project, odd):
    root = odd / "toy"
    shutil.copytree(project, root, symlinks=True)
    toy.run(root, "git", "status", "--short")
    said = run_boxed(FLOW, root)
    assert "models:/m3diff/1 registered" in said
    assert "first" in said
