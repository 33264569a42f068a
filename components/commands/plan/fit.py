"""Check whether a run fits into the memory of its GPUs."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from m3diff.commands.plan.figures import GIGA, BasicPlan, Plan, Run, plan_alignment
from m3diff.commands.plan.without_flops import plan_run
from m3diff.records.errors import Fault
from m3diff.settings.compute import GPUS, Compute
from m3diff.settings.section import ParamsError

RESERVE = 0.08  # share of a GPU's memory that is reserved for context, workspaces and fragmentation


@dataclass(frozen=True)
class GpuMemory:
    """The memory of one GPU, and the name used for it in messages."""

    name: str
    memory_gb: float

    @property
    def usable_gb(self) -> float:
        """Memory that a run can use, in GB: the GPU's memory without the share RESERVE."""
        return self.memory_gb * (1 - RESERVE)


def check_memory(run: Run) -> None:
    """Check whether a run fits into the memory of its GPUs. This takes seconds and does not load any weights.

    The memory is taken from the smallest GPU in this machine or, if torch finds no GPU, from `compute.gpu_kind`.
    Nothing is checked if the memory is unknown or if `compute.gpu` is off. If the family's activations cannot be
    counted, only the weights, gradients and optimizer are checked.

    Raises:
        ParamsError: the run needs more memory than a GPU has. The error states both sizes and what to lower.
    """
    if not run.compute.gpu:
        return
    gpu_kind = GPUS.get(run.compute.gpu_kind or "")
    memory_gb = smallest_gpu_gb() or (gpu_kind and gpu_kind.memory_gb)
    if memory_gb is None:
        return
    for plan in (plan_alignment(run), plan_run(run)):
        if plan is not None:
            check_fits(run.compute, plan, memory_gb)


def smallest_gpu_gb() -> float | None:
    """Return the memory of the smallest GPU of this machine in GB, or None if torch finds no GPU."""
    sizes = [torch.cuda.get_device_properties(n).total_memory for n in range(torch.cuda.device_count())]
    return min(sizes) / GIGA if sizes else None


def check_fits(compute: Compute, plan: BasicPlan, memory_gb: float) -> None:
    """Check that the memory that a plan knows of is not more than a GPU has.

    Raises:
        ParamsError: it is more. The error states both sizes and what to lower.
    """
    gpu_memory = GpuMemory(name="a GPU", memory_gb=memory_gb)
    if plan.memory_total_gb <= gpu_memory.usable_gb:
        return
    code = "plan.does_not_fit_into_memory" if isinstance(plan, Plan) else "plan.weights_do_not_fit_into_memory"
    raise ParamsError(
        code,
        key="compute",
        needed_gb=plan.memory_total_gb,
        parts=[f"{name} {size:.1f}" for name, size in plan.memory_gb.items()],
        memory_gb=memory_gb,
        usable_gb=gpu_memory.usable_gb,
        remedies=[*_ways_to_need_less(compute, plan), Fault("plan.take_larger_gpus")],
    )


def _ways_to_need_less(compute: Compute, plan: BasicPlan) -> Iterator[Fault]:
    """Yield the changes of settings that would reduce the memory that the plan knows of."""
    has_activations = isinstance(plan, Plan)
    if has_activations and compute.micro_batch > 1:
        yield Fault("plan.lower_micro_batch", value=compute.micro_batch)
    if compute.zero_stage < 3 and plan.devices > 1:
        yield Fault("plan.raise_zero_stage", value=compute.zero_stage)
    stronger_settings = {"none": "selective or full", "selective": "full"}
    if has_activations and compute.activation_checkpointing in stronger_settings:
        stronger = stronger_settings[compute.activation_checkpointing]
        yield Fault("plan.checkpoint_activations", value=compute.activation_checkpointing, expected=stronger)
    if has_activations and plan.references_per_sequence > 1:
        yield Fault("plan.lower_captions_per_sequence")
