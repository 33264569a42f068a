"""Run registrations in forks of a process that has imported everything, and kill them before a given write.

As a script in the toy project, this module reads one request per line and prints the exit codes of the forks. Durable
writes are commits that change the database, and artifact files. The first file of a folder counts as a separate write.
"""

import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

KILLED = 137


class Forks:
    """Sends requests to the process that forks the registrations."""

    def __init__(self, project: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(project)}
        pipe = subprocess.PIPE
        command = [sys.executable, "-u", __file__]
        self.process: Any = subprocess.Popen(command, cwd=project, env=environment, stdin=pipe, stdout=pipe, text=True)

    def register(self, root: Path, at_once: int = 1, kill_at: int | None = None, lock: bool = True) -> list[int]:
        """Run registrations in `root` and return their exit codes. 137 means that the registration was killed."""
        request = {"root": str(root), "at_once": at_once, "kill_at": kill_at, "lock": lock}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


class Writes:
    """Counts the durable writes of this process and kills it before the write with the number `kill_at`."""

    def __init__(self, kill_at: int | None, names: Path) -> None:
        self.kill_at = kill_at
        self.names = names
        self.write_count = 0

    def record_write(self, name: str) -> None:
        if self.write_count == self.kill_at:
            os._exit(KILLED)
        self.write_count += 1
        with self.names.open("a") as file:
            file.write(name + "\n")

    def watch(self) -> None:
        import sqlalchemy
        from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository as Artifacts
        from sqlalchemy import event

        @event.listens_for(sqlalchemy.Engine, "before_cursor_execute")
        def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
            if statement.split()[0].upper() in ("INSERT", "UPDATE", "DELETE"):
                connection.info.setdefault("changes", []).append(" ".join(statement.split()[:3]))

        @event.listens_for(sqlalchemy.Engine, "commit")
        def commit(connection: Any) -> None:
            if changes := connection.info.pop("changes", None):
                self.record_write(", ".join(dict.fromkeys(changes)))

        @event.listens_for(sqlalchemy.Engine, "rollback")
        def rollback(connection: Any) -> None:
            connection.info.pop("changes", None)

        log_one_artifact = Artifacts.log_artifact
        log_all_artifacts = Artifacts.log_artifacts

        def log_artifact(self_: Any, file: str, target: str | None = None) -> None:
            self.record_write(f"file {Path(file).name}")
            log_one_artifact(self_, file, target)

        def log_artifacts(self_: Any, folder: str, target: str | None = None) -> None:
            self.record_write(f"folder {Path(target or '.').name}")
            files = [path for path in Path(folder).iterdir() if path.is_file()]
            log_one_artifact(self_, str(min(files)), target)
            self.record_write(f"the rest of folder {Path(target or '.').name}")
            log_all_artifacts(self_, folder, target)

        Artifacts.log_artifact = log_artifact
        Artifacts.log_artifacts = log_artifacts


def serve() -> None:
    from m3diff.settings.load import load_params
    from m3diff.stages.register import stage

    def work(root: str, kill_at: int | None, lock: bool, start: float) -> None:
        os.chdir(root)
        Writes(kill_at, Path("services/writes.txt")).watch()
        if not lock:
            stage.process_lock = lambda _: contextlib.nullcontext()
            meet_before_the_version(stage, Path("services/here"))
        time.sleep(max(0.0, start - time.time()))
        stage.register(load_params())

    for line in sys.stdin:
        request = json.loads(line)
        job = functools.partial(work, request["root"], request["kill_at"], request["lock"], time.time() + 0.2)
        jobs = [fork(job) for _ in range(request["at_once"])]
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in jobs]))


def meet_before_the_version(stage: Any, meeting_folder: Path) -> None:
    """Make three registrations without a lock wait for each other, so that none of them finds a version."""
    find_version = stage.find_registered_version

    def find_version_with_others(*arguments: Any) -> Any:
        version = find_version(*arguments)
        stage.find_registered_version = find_version
        meeting_folder.mkdir(exist_ok=True)
        (meeting_folder / str(os.getpid())).touch()
        deadline = time.monotonic() + 60
        while len(list(meeting_folder.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        return version

    stage.find_registered_version = find_version_with_others


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    gc.disable()  # objects of other tests may wait for threads that do not exist in a fork
    sys.stdout = sys.stderr
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))
    serve()
