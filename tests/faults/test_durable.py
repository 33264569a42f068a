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

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

from m3diff.endpoint.answers import AnswerStore, EndpointAnswer
from m3diff.models import checkpoint
from m3diff.models.checkpoint import CheckpointError, verify_manifest, write_manifest
from m3diff.provenance.git import git
from m3diff.records import files, tables
from m3diff.records.files import write_atomic
from m3diff.registry.decisions import Entry, append_decision
from m3diff.stages.predict.stage import Journal, Prediction
from m3diff.stages.train import state
from m3diff.stages.train.state import MOMENTS, Curve, latest_valid_checkpoint, write_state
from tests.faults.power import Disk
from tests.faults.table import KEYS
from tests.toy import REPOSITORY

# Every write, listed

RENAMED = {
    "components/records/files.py open_atomically": "here",
    "components/records/files.py new_folder": "here: a table; a command's output, whole or not there",
    "components/records/files.py remove_folder": "here: into a temporary folder, to be deleted",
}
"""With a rename of their own, and where that is tested."""

IN_TEMPORARY = (
    "java.py tokenise",
    "meteor.py MeteorProgram.start_processes",
    "spice.py score_items",
    "spice.py copy_program",
    "spice.py extract_native_libraries",
    "spice.py run_program",
)
PLAIN = {
    **{f"components/scoring/metrics/{where}": "in a temporary folder" for where in IN_TEMPORARY},
    "components/provenance/git.py process_lock": "a lock",
    "components/endpoint/answers.py AnswerStore._append": "here: a line appended, flushed; a torn one is read as none",
    "components/records/files.py open_atomically": "see RENAMED",
    "components/records/copies.py copy_folder": "into a new folder, which its caller marks complete",
    "components/records/copies.py link_or_copy": "in a temporary folder",
    "components/records/tables.py _write_part": "in a new folder, see RENAMED",
    "components/registry/tracking.py connect": "a lock",
    "flows/runtime.py write_to_worker_log": "a log",
    "flows/watch.py update_sources": "in a worktree, whose `.dvc` files are committed when all is copied",
    "flows/workspace.py changed_datasets": "in a worktree whose branch is not made yet, so made anew after a kill",
    "flows/workspace.py start_from_champion": "in a worktree whose branch is not made yet, so made anew after a kill",
    "flows/workspace.py hold_lock": "a lock",
}
"""In place, and why no half of it is ever trusted."""

OF_DVC = (
    "components/stages/",
    "components/report/",
    "components/datasets/",
    "components/models/",
    "components/commands/export/",
)
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


def way_of_writing(call: ast.Call) -> str | None:
    """The way a call writes, `renamed` or `plain`; None for a call that writes nothing or by `open_atomically`."""
    called = ast.unparse(call.func)
    method = called.rpartition(".")[2]
    words = [
        word for word in [*call.args, *(keyword.value for keyword in call.keywords)] if isinstance(word, ast.Constant)
    ]
    texts = [word.value for word in words if isinstance(word.value, str)]
    if called in ("open_atomically", "write_atomic") or any(
        ast.unparse(word) == "write_atomic" for word in call.args[:1]
    ):
        return None
    one_path = len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.Dict)
    if called in ("os.replace", "os.rename", "os.link") or (method in ("rename", "replace") and one_path):
        of_a_table = bool(call.args) and isinstance(call.args[0], ast.Dict)  # polars' `replace` of values
        return None if of_a_table else "renamed"
    opened = method in ("open", "fdopen") and any(len(text) <= 3 and set(text) & set("wax+") for text in texts)
    saved = method == "save" and any(ast.unparse(word) == "path" for word in call.args)
    return "plain" if opened or saved or method in WRITERS or called in ALSO else None


def test_every_write_of_the_project_is_listed_with_why_a_kill_in_it_harms_nothing():
    writes = [(way_of_writing(call), where) for where, call in calls() if not where.startswith(OF_DVC)]
    assert {where for kind, where in writes if kind == "renamed"} == set(RENAMED)
    assert {where for kind, where in writes if kind == "plain"} == set(PLAIN)


# Kills: before each line of what writes


def killed_before_line(number: int | None, modules: tuple[Any, ...], work: Callable[[], object]) -> int | None:
    """Do it in a process of its own that dies by signal 9 before it runs the line `number` (0: the first) of these
    modules; how many lines there are where it is None, and None where it died."""
    files_to_stop_in = {module.__file__ for module in modules}
    done = 0
    read, write = os.pipe()

    def lines(frame: FrameType, event: str, _: object) -> Any:
        nonlocal done
        if frame.f_code.co_filename not in files_to_stop_in:
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
        line_count = answer.read()
    os.waitpid(child, 0)
    return int(line_count) if line_count else None


def each_kill(modules: tuple[Any, ...], work: Callable[[], object], before: Callable[[], object]) -> Iterator[int]:
    """Have it killed before each of its lines, every time after `before`; N of N."""
    before()
    lines = killed_before_line(None, modules, work)
    assert lines is not None
    for number in range(lines):
        before()
        assert killed_before_line(number, modules, work) is None
        yield number


OLD = b"old" * 100_000
NEW = b"new!" * 100_000


def test_a_file_that_is_killed_while_it_is_written_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    target = tmp_path / "metrics.json"
    contents = []
    for _ in each_kill((files,), lambda: write_atomic(target, NEW), lambda: target.write_bytes(OLD)):
        contents.append(target.read_bytes())
        assert not [path for path in tmp_path.glob("*.json") if path != target], "a reader takes a half for a file"
    assert contents == sorted(contents, key=lambda content: content == NEW), "old until it is new"
    assert set(contents) == {OLD, NEW} or set(contents) == {OLD}
    assert len(contents) > 8
    write_atomic(target, NEW)
    assert target.read_bytes() == NEW
    assert target.stat().st_mode & 0o777 == 0o644, "others read it, too"


def write_numbers(table: Path, numbers: list[int]) -> None:
    """Write a table of three parts."""
    rows = pa.table({"image_set": [f"{number}" for number in numbers], "number": numbers})
    tables.write_parts((rows.slice(start, 2) for start in (0, 2, 4)), table)


def test_a_writer_of_a_table_that_is_killed_leaves_no_table_with_missing_parts(tmp_path: Path) -> None:
    table = tmp_path / "records"
    contents = []
    modules = (files, tables, shutil)  # shutil, because an old table goes file by file
    old = list(range(6, 12))
    new = list(range(6))
    write_numbers(table, old)
    lines = killed_before_line(None, modules, lambda: write_numbers(table, new))
    assert lines is not None
    for number in range(0, lines, 7):
        write_numbers(table, old)
        assert killed_before_line(number, modules, lambda: write_numbers(table, new)) is None
        contents.append(tables.read_table(table)["number"].to_pylist() if table.exists() else [])
    assert {tuple(content) for content in contents} == {tuple(old), (), tuple(new)}


STEPS = (2, 4)


def write_checkpoint(run_dir: Path, step: int) -> None:
    """A state of one tensor, which holds the step."""
    names = ("weights.safetensors", *(f"{moment}.safetensors" for moment in MOMENTS))
    tensors = {file: {"a": torch.full((64,), float(step))} for file in names}
    write_state(run_dir, step, tensors, Curve(("step",)))


def resumed_step(run_dir: Path) -> int:
    """The step of the checkpoint that a run goes on from, which is whole."""
    newest = latest_valid_checkpoint(run_dir)
    assert newest is not None, f"the run starts over: {sorted(path.name for path in run_dir.iterdir())}"
    step = state.step_of(newest)
    for moment in ("weights", *MOMENTS):
        assert set(load_file(newest / f"{moment}.safetensors")["a"].tolist()) == {float(step)}
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
def test_a_checkpoint_whose_writing_is_killed_is_the_one_before_or_the_new_one(run_dir, tmp_path):
    copy = tmp_path / "killed"
    steps = []

    def anew() -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run_dir, copy)

    for _ in each_kill((state, checkpoint, files), lambda: write_checkpoint(copy, 6), anew):
        steps.append(resumed_step(copy))
        write_checkpoint(copy, 8)
        assert sorted(path.name for path in copy.iterdir()) == [f"step-{steps[-1]:08d}", "step-00000008"]
    assert steps == sorted(steps)
    assert set(steps) == {4, 6}
    assert len(steps) > 60


# Power: what was not flushed is gone


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder that is on the disk."""
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def after(disk: Disk, folder: Path) -> Iterator[tuple[str, Path]]:
    """Each image, written to a folder."""
    for number, image in enumerate(disk.images):
        yield f"{image.lost} lost, before {image.before}", image.write(folder / f"{number:03d}")


def test_the_disk_forgets_what_was_not_flushed_and_keeps_what_was(root: Path) -> None:
    """The shim itself: without fsync a renamed file is gone or empty; with it the content stays."""
    (root / "a").write_text("old")
    with Disk(root) as disk:
        (root / "b").write_text("new")
        os.replace(root / "b", root / "a")
    assert [image.files for image in disk.images[-2:]] == [{"a": b"old"}, {"a": b""}]
    with Disk(root) as disk, (root / "b").open("w") as file:
        file.write("newer")
        file.flush()
        os.fsync(file.fileno())
        os.replace(root / "b", root / "a")
    assert [image.files for image in disk.images[-2:]] == [{"a": b"new"}, {"a": b"newer"}]


def test_a_file_is_the_old_or_the_new_one_whenever_power_goes(root: Path, tmp_path: Path) -> None:
    """The disk decides which after a rename: a writer flushes what must be there with its folder."""
    (root / "metrics.json").write_bytes(OLD)
    with Disk(root) as disk:
        write_atomic(root / "metrics.json", NEW)
    contents = [(folder / "metrics.json").read_bytes() for _, folder in after(disk, tmp_path / "after")]
    assert set(contents) == {OLD, NEW}
    assert contents[-1] == NEW
    assert len(contents) >= 6


def test_a_checkpoint_is_the_one_before_or_the_new_one_whenever_power_goes(run_dir, tmp_path):
    steps = []
    with Disk(run_dir) as disk:
        write_checkpoint(run_dir, 6)
        written = len(disk.images)
        write_checkpoint(run_dir, 8)
    for moment, folder in after(disk, tmp_path / "after"):
        try:
            steps.append(resumed_step(folder))
        except AssertionError as error:
            raise AssertionError(f"{moment}: {error}") from error
    assert set(steps[:written]) == {4, 6}
    assert steps[written : written + 2] == [6, 6], "the training went on from it, and it is gone"
    assert {*steps} == {4, 6, 8}
    assert steps[-2:] == [8, 8]
    assert written > 20


# The codes of a checkpoint whose manifest, or a file that it names, is not whole
DAMAGES = {"models.no_manifest", "models.not_json", "models.missing_file", "models.other_digest"}


def test_a_manifest_whose_files_were_not_flushed_is_refused(root: Path, tmp_path: Path) -> None:
    folder = root / "checkpoint"
    folder.mkdir()
    with Disk(root) as disk:
        (folder / "model.safetensors").write_bytes(b"weights")
        write_manifest(folder, step=1)
    for moment, image_folder in after(disk, tmp_path / "after"):
        if (image_folder / "checkpoint").is_dir():
            with pytest.raises(CheckpointError) as refused:
                print(moment, verify_manifest(image_folder / "checkpoint"))
            assert refused.value.code in DAMAGES


def journal(file: Path, *numbers: str) -> list[str]:
    """Add captions to a journal; those that are in it."""
    with Journal(file) as opened:
        for number in numbers:
            opened.add([(("predictions", number), Prediction(f"caption {number}", None))])
        return [pair for _, pair in opened.predictions]


def answers(file: Path, *numbers: str) -> list[str]:
    """Keep answers of an endpoint; those that are known."""
    opened = AnswerStore(file)
    for number in numbers:
        opened.store_answer(number, {}, EndpointAnswer("text", f"answer {number}"))
    return list(opened.last_answers)


@pytest.mark.parametrize("write_lines", [journal, answers])
def test_captions_and_answers_that_were_flushed_are_there_whenever_power_goes(
    write_lines, root: Path, tmp_path: Path
) -> None:
    write_lines(root / "lines.jsonl", "0")
    with Disk(root) as disk:
        write_lines(root / "lines.jsonl", "1", "2")
    contents = [write_lines(folder / "lines.jsonl") for _, folder in after(disk, tmp_path / "after")]
    assert contents == sorted(contents)
    assert contents[0] == ["0"]
    assert contents[-1] == ["0", "1", "2"]


def test_git_flushes_every_object_and_every_ref_of_the_record(root, tmp_path, monkeypatch):
    """git counts its own flushes: of each of its commands that writes there must be one."""
    trace = tmp_path / "trace"
    entry = Entry(action="promote", model="m", champion_before=None, target=1, outcome="first", reason="")
    git("init", "-q", cwd=root)
    append_decision(root, entry)
    monkeypatch.setenv("GIT_TRACE2_EVENT", str(trace))
    append_decision(root, entry, is_pending=True)
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    command = {event["sid"]: event["name"] for event in events if event["event"] == "cmd_name"}
    writers = ("commit-tree", "update-ref")  # the empty tree is there already
    wrote = [sid for sid, name in command.items() if name in writers]
    assert len(wrote) == 3
    older_git = {event["sid"]: int(event["value"]) for event in events if event.get("key") == "fsync/hardware-flush"}
    flushed = older_git | {event["sid"]: event["count"] for event in events if event.get("name") == "hardware-flush"}
    assert {command[sid] for sid in wrote if flushed.get(sid, 0) < 1} == set()


TESTS = Path(__file__).parents[1]


def marked() -> set[str]:
    """The keys that some test is marked with."""
    return {
        ast.literal_eval(key)
        for file in TESTS.rglob("test_*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        for mark in node.decorator_list
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault"
        for key in mark.args
    }


def test_every_row_has_a_test_and_every_marker_names_a_row():
    assert marked() == {*KEYS}


def test_the_table_has_each_fault_once():
    numbers = [f"{number:02}" for number in range(1, 33)]
    project_keys = ["B1", "B2", *(f"S{number}" for number in range(1, 8)), *(f"P{number}" for number in range(1, 15))]
    project_keys += [*(f"m{number}" for number in range(1, 10)), *(f"W{number}" for number in range(1, 6))]
    project_keys += [f"T{number}" for number in (5, 9, 10, 12, 13, 14, 15, 17)]
    assert sorted([*numbers, *project_keys, "see"]) == sorted(KEYS)
