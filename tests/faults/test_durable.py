"""Every write that something later trusts: killed before each of its steps, and with what was not flushed dropped."""

import ast
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from m3diff.endpoint import Answer as Reply
from m3diff.endpoint import Answers
from m3diff.models import checkpoint
from m3diff.models.checkpoint import CheckpointError, verify_manifest, write_manifest
from m3diff.provenance.git import git
from m3diff.records import files
from m3diff.records.files import write_atomic
from m3diff.registry.decisions import Entry, append
from m3diff.stages.predict.stage import Answer, Journal
from m3diff.stages.train import progress, state
from m3diff.stages.train.progress import Curve
from m3diff.stages.train.state import MOMENTS, latest_valid_checkpoint, write_state
from tests.faults.power import Disk
from tests.toy import REPOSITORY

# Every write, listed

RENAMED = {
    "components/records/files.py atomic": "here",
    "components/records/files.py new_folder": "a command's output, whole or not there; the next makes it anew",
}
"""With a rename of their own, and where that is tested."""

PLAIN = {
    "components/provenance/git.py alone": "a lock",
    "components/endpoint.py Answers._append": "here: a line appended and flushed; a torn one is read as none",
    "components/scoring/metrics/java.py tokenise": "in a temporary folder",
    "components/scoring/metrics/meteor.py program": "in a temporary folder",
    "components/scoring/metrics/spice.py ask": "in a temporary folder",
    "components/scoring/metrics/spice.py lay_out": "in a temporary folder",
    "components/scoring/metrics/spice.py score": "in a temporary folder",
    "components/records/files.py atomic": "see RENAMED",
    "components/commands/rescore.py score": "in a temporary folder",
    "components/registry/tracking.py connected": "a lock",
    "flows/__init__.py ": "a log",
    "flows/watch.py ask": "in a worktree, of which only the `.dvc` files are kept, committed when all is copied",
    "flows/warm.py changed_datasets": "in a worktree whose branch is not made yet, so it is made anew after a kill",
    "flows/warm.py from_champion": "in a worktree whose branch is not made yet, so it is made anew after a kill",
    "flows/workspace.py lock": "a lock",
}
"""In place, and why no half of it is ever trusted."""

OF_DVC = ("components/stages/", "components/datasets/", "components/models/", "components/commands/export/")
"""What is written there is an output of DVC, which removes it before the stage and records it once that has ended well,
or of a command, which writes it anew."""

WRITERS = {"write_text", "write_bytes", "write_table", "save_file", "save_pretrained", "copytree", "copyfile"}
ALSO = {"shutil.copy", "shutil.move", "path.save"}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call of the project with its file and function."""

    def visit(node: ast.AST, file: str, names: tuple[str, ...]) -> Iterator[tuple[str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            inner = (*names, child.name) if isinstance(child, ast.FunctionDef | ast.ClassDef) else names
            if isinstance(child, ast.Call):
                yield f"{file} {'.'.join(inner)}", child
            yield from visit(child, file, inner)

    for top in ("components", "flows"):
        for file in sorted((REPOSITORY / top).rglob("*.py")):
            yield from visit(ast.parse(file.read_text()), file.relative_to(REPOSITORY).as_posix(), ())


def how(call: ast.Call) -> str | None:
    """The way a call writes, `renamed` or `plain`; None where it does not, or by `atomic`, which is tested below."""
    called = ast.unparse(call.func)
    last = called.rpartition(".")[2]
    texts = [
        word.value
        for word in [*call.args, *(named.value for named in call.keywords)]
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
    ]
    if called in ("atomic", "write_atomic") or any(ast.unparse(word) == "write_atomic" for word in call.args[:1]):
        return None
    one_path = len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.Dict)
    if called in ("os.replace", "os.rename", "os.link") or (last in ("rename", "replace") and one_path):
        of_a_table = bool(call.args) and isinstance(call.args[0], ast.Dict)  # polars' `replace` of values
        return None if of_a_table else "renamed"
    opened = last in ("open", "fdopen") and any(len(text) <= 3 and set(text) & set("wax+") for text in texts)
    saved = last == "save" and any(ast.unparse(word) == "path" for word in call.args)
    return "plain" if opened or saved or last in WRITERS or called in ALSO else None


@pytest.mark.parametrize(("kind", "listed"), [("renamed", set(RENAMED)), ("plain", set(PLAIN))])
def test_every_write_of_the_project_is_listed_here_with_why_a_kill_in_it_harms_nothing(kind, listed):
    found = {where for where, call in calls() if how(call) == kind}
    assert {where for where in found if not where.startswith(OF_DVC)} == listed


# Kills: before each line of what writes


def killed_before_line(number: int | None, modules: tuple[Any, ...], work: Callable[[], object]) -> int | None:
    """Do it in a process of its own that dies by signal 9 before it runs the line `number` (0: the first) of these
    modules; how many lines there are where it is None, and None where it died."""
    ours, done = {module.__file__ for module in modules}, 0
    read, write = os.pipe()

    def lines(frame: FrameType, event: str, _: object) -> Any:
        nonlocal done
        if frame.f_code.co_filename not in ours:
            return None
        if event == "line":
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
        return lines

    child = os.fork()
    if child == 0:
        sys.settrace(lines)
        try:
            work()
            os.write(write, str(done).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        told = answer.read()
    os.waitpid(child, 0)
    return int(told) if told else None


def each_kill(modules: tuple[Any, ...], work: Callable[[], object], before: Callable[[], object]) -> Iterator[int]:
    """Have it killed before each of its lines, every time after `before`; N of N."""
    before()
    lines = killed_before_line(None, modules, work)
    assert lines is not None
    for number in range(lines):
        before()
        assert killed_before_line(number, modules, work) is None
        yield number


OLD, NEW = b"old" * 100_000, b"new!" * 100_000


def test_a_file_that_is_killed_while_it_is_written_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    target, seen = tmp_path / "metrics.json", []
    for _ in each_kill((files,), lambda: write_atomic(target, NEW), lambda: target.write_bytes(OLD)):
        seen.append(target.read_bytes())
        assert not [path for path in tmp_path.glob("*.json") if path != target], "a reader takes a half for a file"
    assert seen == sorted(seen, key=lambda content: content == NEW), "old until it is new"
    assert set(seen) == {OLD, NEW} or set(seen) == {OLD}
    assert len(seen) > 8
    write_atomic(target, NEW)
    assert target.read_bytes() == NEW


def test_one_that_dies_in_the_middle_of_its_bytes_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "metrics.json"
    target.write_bytes(OLD)
    child = os.fork()
    if child == 0:
        real = os.fdopen

        def half(handle: int, mode: str) -> Any:
            real(handle, mode, 0).write(NEW[: len(NEW) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        os.fdopen = half
        write_atomic(target, NEW)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert target.read_bytes() == OLD
    (half_written,) = [path for path in tmp_path.iterdir() if path != target]
    assert (half_written.stat().st_size, half_written.name[0]) == (len(NEW) // 2, ".")


STEPS = (2, 4)


def write_checkpoint(run_dir: Path, step: int) -> None:
    """A state of one tensor, which holds the step."""
    names = ("weights.safetensors", *(f"{moment}.safetensors" for moment in MOMENTS))
    tensors = {file: {"a": torch.full((64,), float(step))} for file in names}
    write_state(run_dir, step, frozenset("a"), tensors, Curve(("step",)))


def taken(run_dir: Path) -> int:
    """The step of the checkpoint that a run goes on from, which is whole."""
    found = latest_valid_checkpoint(run_dir)
    assert found is not None, f"the run starts over: {sorted(path.name for path in run_dir.iterdir())}"
    step = state.step_of(found)
    for moment in ("weights", *MOMENTS):
        assert set(load_file(found / f"{moment}.safetensors")["a"].tolist()) == {float(step)}
    return step


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two checkpoints, and the folder in which a third is to be written."""
    torch.set_num_threads(1)
    folder = tmp_path / "run"
    for step in STEPS:
        write_checkpoint(folder, step)
    return folder


@pytest.mark.slow(35)
def test_a_checkpoint_that_is_killed_while_it_is_written_is_the_one_before_or_the_new_one(run_dir, tmp_path):
    place, seen = tmp_path / "killed", []

    def anew() -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(run_dir, place)

    for _ in each_kill((state, checkpoint, files, progress), lambda: write_checkpoint(place, 6), anew):
        seen.append(taken(place))
        write_checkpoint(place, 8)
        assert sorted(path.name for path in place.iterdir()) == [f"step-{seen[-1]:08d}", "step-00000008"]
    assert seen == sorted(seen)
    assert set(seen) == {4, 6}
    assert len(seen) > 60


# Power: what was not flushed is gone


def after(disk: Disk, folder: Path) -> Iterator[tuple[str, Path]]:
    """Each image, written to a folder."""
    for number, image in enumerate(disk.images):
        yield f"{image.lost} lost, before {image.before}", image.write(folder / f"{number:03d}")


def test_the_disk_forgets_what_was_not_flushed_and_keeps_what_was(tmp_path: Path) -> None:
    """The shim itself: without fsync a renamed file is gone or empty; with it the content stays, and with the folder's
    the name too."""
    root = tmp_path / "disk"
    root.mkdir()
    (root / "a").write_text("old")
    with Disk(root) as disk:
        (root / "b").write_text("new")
        os.replace(root / "b", root / "a")
    assert [image.files for image in disk.images[-2:]] == [{"a": b"old"}, {"a": b""}]
    with Disk(root) as disk:
        with (root / "b").open("w") as file:
            file.write("newer")
            file.flush()
            os.fsync(file.fileno())
        os.replace(root / "b", root / "a")
        handle = os.open(root, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    found = {(image.before, image.lost): image.files for image in disk.images}
    assert found["1: replace", "names"] == {"a": b"new"}
    assert found["2: fsync", "names"] == {"a": b"new"}
    assert found["2: fsync", "contents"] == {"a": b"newer"}
    assert found["the end", "names"] == found["the end", "contents"] == {"a": b"newer"}


def test_a_file_is_the_old_or_the_new_one_whenever_power_goes(tmp_path: Path) -> None:
    """The disk decides which after a rename: a writer flushes what must be there with its folder."""
    root = tmp_path / "disk"
    root.mkdir()
    (root / "metrics.json").write_bytes(OLD)
    with Disk(root) as disk:
        write_atomic(root / "metrics.json", NEW)
    seen = [(place / "metrics.json").read_bytes() for _, place in after(disk, tmp_path / "after")]
    assert set(seen) == {OLD, NEW}
    assert seen[-1] == NEW
    assert len(seen) >= 6


def test_a_checkpoint_is_the_one_before_or_the_new_one_whenever_power_goes(run_dir, tmp_path):
    seen = []
    with Disk(run_dir) as disk:
        write_checkpoint(run_dir, 6)
        written = len(disk.images)
        write_checkpoint(run_dir, 8)
    for said, place in after(disk, tmp_path / "after"):
        try:
            seen.append(taken(place))
        except AssertionError as error:
            raise AssertionError(f"{said}: {error}") from error
    assert set(seen[:written]) == {4, 6}
    assert seen[written : written + 2] == [6, 6], "the training went on from it, and it is gone"
    assert {*seen} == {4, 6, 8}
    assert seen[-2:] == [8, 8]
    assert written > 20


def test_a_manifest_whose_files_were_not_flushed_is_refused_in_words(tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "checkpoint"
    folder.mkdir(parents=True)
    with Disk(tmp_path / "disk") as disk:
        (folder / "model.safetensors").write_bytes(b"weights")
        write_manifest(folder, step=1)
    for said, place in after(disk, tmp_path / "after"):
        if (place / "checkpoint").is_dir():
            with pytest.raises(CheckpointError, match="written to its end|not JSON|missing|sha256"):
                print(said, verify_manifest(place / "checkpoint"))


def journal(file: Path, *numbers: str) -> list[str]:
    """Add captions to a journal; those that are in it."""
    with Journal(file) as opened:
        for number in numbers:
            opened.add([(("predictions", number), Answer(f"caption {number}", None))])
        return [pair for _, pair in opened.answers]


def answers(file: Path, *numbers: str) -> list[str]:
    """Keep answers of an endpoint; those that are known."""
    opened = Answers(file)
    for number in numbers:
        opened.keep(number, {}, Reply("text", f"answer {number}"))
    return list(opened.known)


@pytest.mark.parametrize("kept", [journal, answers])
def test_captions_and_answers_that_were_flushed_are_there_whenever_power_goes(kept, tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    kept(root / "lines.jsonl", "0")
    with Disk(root) as disk:
        kept(root / "lines.jsonl", "1", "2")
    seen = [kept(place / "lines.jsonl") for _, place in after(disk, tmp_path / "after")]
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (["0"], ["0", "1", "2"])


# The record of decisions, which git writes


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "clone"
    root.mkdir()
    git("init", "-q", cwd=root)
    monkeypatch.chdir(root)
    for number in (1, 2):
        append(Path("."), moved(number))
    return root


def moved(to: int) -> Entry:
    return Entry(action="promote", model="m", from_=to - 1 or None, to=to, outcome="promoted", why="better")


def test_git_flushes_every_object_and_every_ref_of_the_record(repository, tmp_path, monkeypatch):
    """git counts its own flushes: of each of its commands that writes there must be one."""
    trace = tmp_path / "trace"
    monkeypatch.setenv("GIT_TRACE2_EVENT", str(trace))
    append(Path("."), moved(3), pending=True)
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    command = {event["sid"]: event["name"] for event in events if event["event"] == "cmd_name"}
    writers = ("commit-tree", "update-ref")  # the empty tree is there already
    wrote = [sid for sid, name in command.items() if name in writers]
    assert len(wrote) == 3
    older_git = {event["sid"]: int(event["value"]) for event in events if event.get("key") == "fsync/hardware-flush"}
    flushed = older_git | {event["sid"]: event["count"] for event in events if event.get("name") == "hardware-flush"}
    assert {command[sid] for sid in wrote if flushed.get(sid, 0) < 1} == set()
