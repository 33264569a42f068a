"""An attempt that a later one has superseded: it ends, and writes nothing more."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from m3diff.stages.train.attempts import GENERATION, LOOK_S, SupersededError, begin, require_newest
from m3diff.stages.train.job import Job, Runtime
from m3diff.stages.train.loop import Training
from m3diff.stages.train.state import Writer
from tests.stages.train.toy import recipe

WAITS = """
import sys, time
from pathlib import Path
from m3diff.stages.train.attempts import ended_when_superseded
with ended_when_superseded(Path(sys.argv[1]), 1):
    print("waits", flush=True)
    time.sleep(600)
"""


@pytest.mark.fault("T15")
@pytest.mark.parametrize("supersede", [begin, lambda folder: (folder / GENERATION).unlink()], ids=["later", "ended"])
def test_a_worker_that_waits_for_others_ends_when_a_later_attempt_begins_or_the_run_is_over(supersede, tmp_path):
    assert begin(tmp_path) == 1
    worker = subprocess.Popen([sys.executable, "-c", WAITS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "waits\n"
    time.sleep(LOOK_S + 1)
    assert worker.poll() is None, "it is the newest"
    supersede(tmp_path)
    assert worker.wait(10 * LOOK_S) == 1
    assert "attempt 1 ends here and writes nothing more" in worker.stdout.read()


FAILS = """
import sys
from pathlib import Path
from m3diff.stages.train.attempts import begin, ended_when_superseded
run_dir, superseded = Path(sys.argv[1]), sys.argv[2] == "superseded"
begin(run_dir)
try:
    with ended_when_superseded(run_dir, 1):
        if superseded:
            begin(run_dir)
        raise RuntimeError("the other worker is gone")
except RuntimeError:
    print("lives on")
"""


@pytest.mark.fault("T15")
@pytest.mark.parametrize(
    ("how", "code", "said"), [("superseded", 1, "attempt 2 goes on\n"), ("newest", 0, "lives on\n")]
)
def test_a_worker_that_fails_since_another_ended_first_ends_too_where_the_attempt_is_superseded(
    how, code, said, tmp_path
):
    done = subprocess.run([sys.executable, "-c", FAILS, str(tmp_path), how], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout.endswith(said)) == (code, True)


@pytest.mark.usefixtures("alone")
def test_the_loop_of_an_older_attempt_writes_neither_a_state_nor_the_output(base: Path, mixture: Path, tmp_path: Path):
    made, folder = recipe(base), tmp_path / "run"
    first = Job(made.cfg, made.model, made.compute, mixture, tmp_path / "out", folder, "", generation=begin(folder))
    older = Training(first, Runtime())
    older.step(0, next(older.loader.stream(older.schedule, 0, 0)))
    older.save(1)
    older.writer.finish()
    begin(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with suppress(SupersededError):  # at once, or as soon as the writer's thread has met it
        older.save(2)
    with pytest.raises(SupersededError, match="attempt 2 goes on"):
        older.writer.finish()
    older.writer = Writer()
    with pytest.raises(SupersededError):
        older.export()
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "out").exists()
    require_newest(folder, 2)
