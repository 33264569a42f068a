"""Facts of the machine that a benchmark ran on."""

import os
import platform
from typing import Any

import torch


def machine(device: torch.device) -> dict[str, Any]:
    import peft
    import transformers

    chip = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    load = {"load_before": round(os.getloadavg()[0], 2)}
    return {"device": chip, "cores": os.cpu_count(), "python": platform.python_version(), **versions, **load}
