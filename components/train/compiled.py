"""The layers of a model that repeat by torch.compile, in place: the same numbers from fewer kernels.

Only a forward with gradients is compiled: validation, captions and checks call each module as it is, and add no graphs.
On a CPU the backend is `aot_eager`, which traces the same graphs and makes no kernels of them: nothing is gained there,
and tests take the same lines.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from components.models.family import Family
from components.models.tuning import unwrapped
from components.section import ParamsError

WARM_UP = 2
"""Steps of a process in which graphs may be made: one of the first lengths, one that is general."""


class TooManyGraphsError(ParamsError):
    """Shapes or values do not recur, so that torch.compile would compile without end."""


def compile_layers(model: nn.Module, family: Family, gpu: bool) -> None:
    """Compile the modules that the family names, for sequences of any length.

    Raises:
        ValueError: the family names none.
    """
    chosen = [m for name, m in unwrapped(model).named_modules() if re.fullmatch(family.compiled, name)]
    if not chosen:
        raise ValueError(f"compute.compile: {family.compiled!r} is the name of no module; write false")
    for module in chosen:
        module._compiled_call_impl = _while_training(module, "inductor" if gpu else "aot_eager")


def _while_training(module: nn.Module, backend: str) -> Callable[..., Any]:
    """What calls the module: its compiled forward where a backward follows, else the plain one.

    Activation checkpointing stays outside the graph: around attention's choice of kernels inside, dynamo would give up
    the whole layer without a word.
    """
    compiled = torch.compile(module._call_impl, backend=backend, dynamic=True)
    checkpoint: Callable[..., Any] | None = None
    if getattr(module, "gradient_checkpointing", False):
        checkpoint = getattr(module, "_gradient_checkpointing_func")  # noqa: B009  # nn.Module's own types know tensors
        module.gradient_checkpointing = False  # type: ignore[assignment]

    def call(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return module._call_impl(*args, **kwargs)
        return checkpoint(partial(compiled, **kwargs), *args) if checkpoint else compiled(*args, **kwargs)

    return call


def limit_graphs() -> None:
    """More graphs of a function than dynamo's limit are an error from now on; else it would go on without compiling,
    slowly, and with FlexAttention in T x T of memory."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True


@contextmanager
def graph_limit_explained() -> Iterator[None]:
    """Within, reaching that limit raises TooManyGraphsError, which no other attempt would escape."""
    try:
        yield
    except torch._dynamo.exc.FailOnRecompileLimitHit as error:
        raise TooManyGraphsError(
            f"torch.compile made {torch._dynamo.config.recompile_limit} graphs of one function and needs more, so its "
            "shapes or values do not recur; set compute.compile to false, or compute.attention to sdpa where it is "
            "false already, and report it"
        ) from error


def graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Recompilations:
    """Counts the graphs made within steps after the first WARM_UP ones. `count` is 0 where nothing is compiled."""

    def __init__(self) -> None:
        self.steps = self.count = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a training step."""
        before = graphs()
        yield
        self.steps += 1
        if self.steps > WARM_UP:
            self.count += graphs() - before
