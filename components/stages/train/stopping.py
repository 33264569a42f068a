"""A run that is asked to end, by SIGTERM, ends with a checkpoint: a flow that is cancelled, a machine that shuts down.

The signal reaches the process that began the run. Its workers may be others, on other machines too: they see a file in
the run's folder. Light to import, as `retry.py` is.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STOP = "stop"
GRACE_S = 18.0
"""Seconds for the step that is taken and its checkpoint; who cancels a flow kills what is left after 20."""

TERMINATED = 128 + signal.SIGTERM
"""The exit code of what SIGTERM ended."""


class StoppedError(Exception):
    """The run was asked to end and has written its checkpoint."""


@contextmanager
def stop_on_sigterm(run_dir: Path, grace_s: float = GRACE_S) -> Iterator[None]:
    """Within, SIGTERM asks the run to end, and ends this process where it has not within the grace time.

    In another thread than the main one signals are as they were.
    """
    file = run_dir / STOP
    file.unlink(missing_ok=True)
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(*_: Any) -> None:
        if not file.exists():  # a second signal gives no more time
            file.touch()
            signal.setitimer(signal.ITIMER_REAL, grace_s)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, ask), signal.SIGALRM: signal.signal(signal.SIGALRM, _end)}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        file.unlink(missing_ok=True)


def _end(*_: Any) -> None:
    raise SystemExit(TERMINATED)


def is_asked_to_stop(run_dir: Path) -> bool:
    """Whether the run was asked to end."""
    return (run_dir / STOP).exists()
