"""Run two workers in processes forked from a process with all imports, because imports take longer than a run."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver, reduction
from multiprocessing.process import BaseProcess
from typing import Any

from m3diff.stages.train.job import choose_accelerator

choose_accelerator(False)
from m3diff.stages.train import loop  # noqa: E402, F401  # for the processes that are forked


class Printed:
    """The output files of this process, for a worker that is forked from another process."""

    def __init__(self, *files: Any) -> None:
        self.files = files

    def __reduce__(self) -> tuple[Any, ...]:
        return Printed, tuple(reduction.DupFd(file) for file in (1, 2))

    def take(self) -> None:
        for number, file in enumerate(self.files, 1):
            os.dup2(file.detach(), number)


def begin(printed: Printed, work: Callable[..., None], *arguments: Any) -> None:
    printed.take()
    work(*arguments)


def start(work: Callable[..., None], *arguments: Any) -> list[BaseProcess]:
    """Start `work(rank, *arguments)` for the ranks 0 and 1, each in a separate process."""
    forking: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if forking._preload_modules != [__name__]:
        forking._stop()  # another test's, which has imported none of it
        forkserver.set_forkserver_preload([__name__])
    context = multiprocessing.get_context("forkserver")
    workers = [context.Process(target=begin, args=(Printed(), work, rank, *arguments)) for rank in range(2)]
    for worker in workers:
        worker.start()
    return list(workers)
