"""Identical work runs once: of several flow runs with equal commits and parameters one works, the others wait for it.

A flow run that had to wait has nothing to do once the other has ended well; where the other failed or died, it does
the work itself. Other work goes on beside it: how much, the worker's limit says.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from flows.workspace import FLOWS, Workspace, lock, read_json
from m3diff.records.files import write_atomic

POLL_S, SAY_EVERY_S = 1.0, 60.0


@contextmanager
def alone(work: Workspace, log: Callable[[str], None]) -> Iterator[str | None]:
    """Within, no other flow run of this machine does the same work. Gives the flow run that did it while this one
    waited; None where this one has to."""
    file = work.checkout / FLOWS / f"tree-{work.tree}.lock"
    with ExitStack() as stack:
        held, waited = acquire(stack, file, log)
        by = finished_by(file) if waited else None
        if by is None:
            file.with_suffix(".json").unlink(missing_ok=True)
            held.truncate(0)
            held.write(json.dumps({"flow_run": work.flow_run}))
            held.flush()
        yield by


def acquire(stack: ExitStack, file: Path, log: Callable[[str], None]) -> tuple[IO[str], bool]:
    """The lock, and whether it was waited for."""
    waited, said = False, -SAY_EVERY_S
    while True:
        try:
            return stack.enter_context(lock(file, wait=False)), waited
        except BlockingIOError:
            waited = True
        if time.monotonic() - said >= SAY_EVERY_S:
            log(f"flow run {worker_of(file)} does the same work; this one waits for it")
            said = time.monotonic()
        time.sleep(POLL_S)


def finish(work: Workspace) -> None:
    """Say that this flow run has done its work."""
    write_atomic(work.checkout / FLOWS / f"tree-{work.tree}.json", json.dumps({"flow_run": work.flow_run}))


def finished_by(file: Path) -> str | None:
    return (read_json(file.with_suffix(".json")) or {}).get("flow_run")


def worker_of(file: Path) -> str:
    return (read_json(file) or {}).get("flow_run", "(starting)")
