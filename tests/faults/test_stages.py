"""Faults in the midst of the real stages, on a small run: exit code, what is said, what is left, and the next try."""

import ast
import errno
import json
import os
import pickle
import shutil
import site
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from m3diff.__main__ import main as m3diff
from m3diff.records.files import sha256, sha256_of_folder
from m3diff.stages.train import engine
from tests import toy
from tests.conftest import MadeOnce
from tests.errors import Message
from tests.faults.small import STAGE_COMMANDS, write_params
from tests.toy import REPOSITORY, change


@pytest.fixture(scope="session")
def small_once(made_once: MadeOnce) -> Path:
    """Every stage ran."""

    def make(folder: Path) -> None:
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            write_params(folder)
            for command in STAGE_COMMANDS:
                assert m3diff(command) == 0

    return made_once("small-run", make)


@pytest.fixture
def small(small_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, current directory."""
    folder = tmp_path / "run"
    shutil.copytree(small_once, folder, symlinks=True)
    monkeypatch.chdir(folder)
    return folder


CHECKPOINT = Path("data/05_model/checkpoint")
MIXTURE = Path("data/04_mixture")


@pytest.mark.slow(20)
@pytest.mark.fault("09")
def test_a_bit_that_flipped_in_the_weights_ends_predict_with_file_and_both_hashes(small, rng, capsys):
    weights = CHECKPOINT / "model.safetensors"
    expected_hash = sha256(weights)
    data = bytearray(weights.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    weights.write_bytes(data)
    before = sha256_of_folder(Path("data/06_predictions"))
    assert m3diff(["predict"]) == 3
    message = capsys.readouterr().err
    for text in ("model.safetensors", expected_hash[:12], sha256(weights)[:12]):
        assert text in message
    assert sha256_of_folder(Path("data/06_predictions")) == before


@pytest.mark.fault("10")
def test_convert_on_a_full_disk_asks_to_try_again_and_then_writes_the_same(small, rng, monkeypatch, capsys):
    expected = sha256_of_folder(MIXTURE)
    tables_left = rng.randrange(3)
    write_table = pq.write_table

    def full(*arguments: Any, **keywords: Any) -> None:
        nonlocal tables_left
        if not tables_left:
            raise OSError(errno.ENOSPC, "No space left on device", str(arguments[1]))
        tables_left -= 1
        write_table(*arguments, **keywords)

    with monkeypatch.context() as disk:
        disk.setattr(pq, "write_table", full)
        assert m3diff(["convert"]) == 75
    message = capsys.readouterr().err
    assert Message("command.disk_full").in_text(message)
    assert os.strerror(errno.ENOSPC) in message
    assert str(MIXTURE) in message
    assert m3diff(["convert"]) == 0
    assert sha256_of_folder(MIXTURE) == expected


@pytest.mark.fault("29")
def test_a_clock_that_jumps_changes_neither_weights_nor_durations(small, rng, monkeypatch):
    weights = load_file(CHECKPOINT / "model.safetensors")
    report = (CHECKPOINT.parent / "report.json").read_bytes()
    shutil.rmtree(CHECKPOINT.parent)
    shutil.rmtree("runs")
    clock = time.time
    with monkeypatch.context() as jumping:
        jumping.setattr(time, "time", lambda: clock() + rng.uniform(-86400, 86400))
        assert m3diff(["train"]) == 0
    again = load_file(CHECKPOINT / "model.safetensors")
    assert all(again[name].equal(value) for name, value in weights.items())
    assert (CHECKPOINT.parent / "report.json").read_bytes() == report
    assert 0 < json.loads(Path("runs/train_speed.json").read_text())["seconds"] < 900


class Payload:
    """A malicious pickle: it writes a file as it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def replace_listed(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint, and its hash in the manifest too."""
    manifest = folder / "manifest.json"
    was = sha256(folder / name)
    (folder / name).write_bytes(content)
    text = manifest.read_text()
    assert was in text
    manifest.write_text(text.replace(was, sha256(folder / name)))


@pytest.mark.fault("31")
def test_a_pickle_in_the_place_of_weights_is_not_loaded_by_predict(small, capsys):
    mark = small / "executed"
    replace_listed(CHECKPOINT, "model.safetensors", pickle.dumps(Payload(mark)))
    assert m3diff(["predict"]) == 3
    assert "Error while deserializing header" in capsys.readouterr().err
    assert not mark.exists()
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists(), "the payload does what it is feared for"


@pytest.mark.fault("31", "m9")
def test_a_pickle_in_a_checkpoint_that_is_resumed_is_not_loaded(small, monkeypatch):
    take_step = engine.take_step
    steps = []

    def interrupt(*arguments: Any, **options: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return take_step(*arguments, **options)

    change(small, "train", epochs=3)
    with monkeypatch.context() as cut:
        cut.setattr(engine, "take_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            m3diff(["train"])
    newest = sorted(Path("runs/train").glob("*/step-*"))[-1]
    mark = small / "executed"
    for file in sorted(newest.glob("*.safetensors")):
        replace_listed(newest, file.name, pickle.dumps(Payload(mark)))
    with pytest.raises(Exception, match=r"(?i)safetensors|header"):
        m3diff(["train"])
    assert not mark.exists()


@pytest.mark.fault("31")
def test_tags_in_yaml_are_refused_and_not_executed(small, capsys):
    tag = '!!python/object/apply:os.system ["touch executed"]'
    params = Path("params.yaml").read_text()
    Path("params.yaml").write_text(f"{params}\npromote: {tag}\n")
    assert m3diff(["convert"]) == 2
    Path("params.yaml").write_text(params)
    Path("questions.yaml").write_text(f"describe: {tag}\n")
    change(small, "convert", questions="questions.yaml")
    assert m3diff(["convert"]) == 2
    assert capsys.readouterr().err.count("could not determine a constructor for the tag") == 2
    assert not Path("executed").exists()


@pytest.mark.fault("31", "m9")
def test_nothing_unpickles_what_a_stage_reads():
    for folder in ("components", "flows"):
        for file in sorted((REPOSITORY / folder).rglob("*.py")):
            for call in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)):
                name = ast.unparse(call.func)
                arguments = {word.arg: ast.unparse(word.value) for word in call.keywords}
                location = f"{file.relative_to(REPOSITORY)}:{call.lineno}"
                assert arguments.get("allow_pickle", "False") == "False", location
                assert name not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), location
                assert name not in ("pickle.load", "pickle.loads"), location
                if name == "torch.load":
                    assert arguments.get("weights_only") == "True", location


@pytest.mark.fault("19")
def test_training_and_captions_do_not_need_mlflow(small):
    weights = sha256(CHECKPOINT / "model.safetensors")
    with Path("params.yaml").open("a") as params:
        params.write("register: {tracking_uri: 'http://127.0.0.1:9'}\n")
    for stage in ("train", "predict"):
        assert m3diff([stage]) == 0
    assert sha256(CHECKPOINT / "model.safetensors") == weights


# An odd machine: packages that cannot be written, no HOME, a user without a name, a path with spaces and Unicode

BOXED = """
set -e
mount --bind "$PACKAGES" "$PACKAGES"
mount -o remount,ro,bind "$PACKAGES"
exec unshare --user --map-user=54321 -- "$@"
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
from flows.runtime import prepare
prepare()
from flows import dvc
from m3diff.provenance.git import git
from flows.workspace import workspace
with workspace("one", "HEAD", ["evaluate.gallery=7"]):
    dvc.link_data()
    assert dvc.repro("evaluate", print) == "Ran"
    dvc.commit("what ran", ())
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
    box = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", BOXED, "sh"]
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
    run_boxed(STAGES.format(commands=STAGE_COMMANDS), odd)
    assert (odd / "data/07_report/report.html").is_file()


@pytest.mark.fault("30")
@pytest.mark.slow(60)
def test_a_flows_worktree_dvc_git_register_and_promote_work_there(project, odd):
    root = odd / "toy"
    shutil.copytree(project, root, symlinks=True)
    toy.run(root, "git", "status", "--short")
    output = run_boxed(FLOW, root)
    assert "models:/m3diff/1 registered" in output
    assert "first" in output
