"""Which attempt of a run may write: a number in the run's folder, one higher with each attempt.

An attempt whose host is cut off from the others lives on there, while the next one trains elsewhere; where both reach
the same disk, the older must end and write nothing more. Light to import, as `retry.py` is.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from m3diff.records.files import write_atomic

GENERATION = "generation"
LOOK_S = 2.0
"""Seconds between two looks of a worker; a network file system may show the new number some seconds later."""


class SupersededError(BlockingIOError):
    """A later attempt trains this run, or the run has ended; this one writes nothing more."""


def newest(run_dir: Path) -> int:
    """The number of the newest attempt; 0 where none has begun, or the run has ended and its folder is gone."""
    try:
        return int((run_dir / GENERATION).read_text())
    except FileNotFoundError:
        return 0


def begin(run_dir: Path) -> int:
    """Number a new attempt; from here on older ones end."""
    number = newest(run_dir) + 1
    write_atomic(run_dir / GENERATION, f"{number}\n")
    return number


def require_newest(run_dir: Path, number: int) -> None:
    """Raises SupersededError where attempt `number` is not the newest."""
    if (found := newest(run_dir)) != number:
        then = f"attempt {found} goes on" if found else "the run has ended"
        raise SupersededError(f"{run_dir.name}: attempt {number} ends here and writes nothing more: {then}")


@contextmanager
def ended_when_superseded(run_dir: Path, number: int) -> Iterator[None]:
    """Within, this process ends when attempt `number` is not the newest any more, whatever it waits for: a collective
    operation with workers that are gone would hold it for half an hour. It ends, too, where another worker ended first
    and an operation with that one fails: Ray cannot end it on a host that is cut off."""
    over = threading.Event()

    def look() -> None:
        try:
            require_newest(run_dir, number)
        except SupersededError as error:
            print(f"train: {error}", flush=True)
            os._exit(1)
        except OSError:
            return  # the disk is away, for what this attempt would write, too

    def watch() -> None:
        while not over.wait(LOOK_S):
            look()

    threading.Thread(target=watch, name="generation", daemon=True).start()
    try:
        yield
    except BaseException:
        look()
        raise
    finally:
        over.set()
