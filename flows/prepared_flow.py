"""Define Prefect flows that prepare the calling process before they run."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from prefect import Flow

from flows.runtime import prepare
from m3diff.runtime import PRIVACY, switch_telemetry_off

P = ParamSpec("P")
R = TypeVar("R")


class PreparedFlow(Flow[P, R]):
    """A flow that prepares the calling process first, because Prefect may start a temporary server when a flow runs.

    If a worker runs the flow, Prefect's engine calls the flow's function directly, so that the function must call
    `prepare` itself.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Prepare this process, then run the flow and return what `Flow.__call__` returns."""
        prepare()
        return super().__call__(*args, **options)


def flow(**options: Any) -> Callable[[Callable[P, R]], PreparedFlow[P, R]]:
    """Return a decorator that turns a function into a PreparedFlow.

    The name must be that of Prefect's decorator, because Prefect searches the source of a deployed flow for it.

    Args:
        options: the options of `prefect.flow`.
    """

    def decorate(function: Callable[P, R]) -> PreparedFlow[P, R]:
        with telemetry_off():
            return PreparedFlow(function, **options)

    return decorate


@contextmanager
def telemetry_off() -> Iterator[None]:
    """Disable telemetry within the context.

    Prefect reports the first flow that a new user defines in a terminal. Modules define their flows when they are
    imported, so `prepare` has not been called at that time.
    """
    unset = PRIVACY.keys() - os.environ.keys()
    switch_telemetry_off()
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]
