"""Registrations as processes of their own, forked from one that has imported what they need, and killed where asked.

Run as a script inside the toy project it reads a request a line and answers with the forks' exit codes. Durable writes
are commits to the database that change it, and files of artifacts; the first file of a folder is a write of its own.
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
    """The parent's side."""

    def __init__(self, project: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(project)}
        pipe = subprocess.PIPE
        command = [sys.executable, "-u", __file__]
        self.process: Any = subprocess.Popen(command, cwd=project, env=environment, stdin=pipe, stdout=pipe, text=True)

    def register(self, root: Path, at_once: int = 1, kill_at: int | None = None, lock: bool = True) -> list[int]:
        """Exit codes of registrations in `root`; 137: killed."""
        request = {"root": str(root), "at_once": at_once, "kill_at": kill_at, "lock": lock}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


class Writes:
    """Counts the durable writes of this process and kills it before the one asked for."""

    def __init__(self, kill_at: int | None, names: Path) -> None:
        self.kill_at = kill_at
        self.names = names
        self.made = 0

    def before(self, what: str) -> None:
        if self.made == self.kill_at:
            os._exit(KILLED)
        self.made += 1
        with self.names.open("a") as file:
            file.write(what + "\n")

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
                self.before(", ".join(dict.fromkeys(changes)))

        @event.listens_for(sqlalchemy.Engine, "rollback")
        def rollback(connection: Any) -> None:
            connection.info.pop("changes", None)

        of_file = Artifacts.log_artifact
        of_folder = Artifacts.log_artifacts

        def log_artifact(self_: Any, file: str, place: str | None = None) -> None:
            self.before(f"file {Path(file).name}")
            of_file(self_, file, place)

        def log_artifacts(self_: Any, folder: str, place: str | None = None) -> None:
            self.before(f"folder {Path(place or '.').name}")
            of_file(self_, str(min(path for path in Path(folder).iterdir() if path.is_file())), place)
            self.before(f"the rest of folder {Path(place or '.').name}")
            of_folder(self_, folder, place)

        Artifacts.log_artifact = log_artifact
        Artifacts.log_artifacts = log_artifacts


def serve() -> None:
    from m3diff.settings.load import load_params
    from m3diff.stages.register import stage

    def work(root: str, kill_at: int | None, lock: bool, start: float) -> None:
        os.chdir(root)
        Writes(kill_at, Path("services/writes.txt")).watch()
        if not lock:
            stage.alone = lambda _: contextlib.nullcontext()
            meet_before_the_version(stage, Path("services/here"))
        time.sleep(max(0.0, start - time.time()))
        stage.register(load_params())

    for line in sys.stdin:
        asked = json.loads(line)
        job = functools.partial(work, asked["root"], asked["kill_at"], asked["lock"], time.time() + 0.2)
        jobs = [fork(job) for _ in range(asked["at_once"])]
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in jobs]))


def meet_before_the_version(stage: Any, place: Path) -> None:
    """Let three registrations that share no lock see no version all of them, as those of several machines may."""
    find = stage.find_registered_version

    def meeting(*arguments: Any) -> Any:
        found = find(*arguments)
        stage.find_registered_version = find
        place.mkdir(exist_ok=True)
        (place / str(os.getpid())).touch()
        deadline = time.monotonic() + 60
        while len(list(place.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    stage.find_registered_version = meeting


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    gc.disable()  # what tests of training left here waits for threads that a fork does not have
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
