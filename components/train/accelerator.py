"""Which accelerator DeepSpeed takes: the parameters say, before it is imported."""

import os

from components.models.device import environment


def choose_accelerator(gpu: bool) -> None:
    """Tell DeepSpeed in this process where it computes; it must not have chosen another before."""
    os.environ["DS_ACCELERATOR"] = environment(gpu)["DS_ACCELERATOR"]
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator().device_name()
    assert chosen == os.environ["DS_ACCELERATOR"], f"DeepSpeed took {chosen} before compute.gpu was read"
