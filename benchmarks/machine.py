"""Describe the machine that runs a benchmark, and write the results."""

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from m3diff.records.machine import usable_cpus


def describe_machine(device: str = "cpu") -> dict[str, Any]:
    """Return facts about the machine and the versions of the main libraries.

    Args:
        device: `cpu` or `cuda`.
    """
    import torch

    chip = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = {name: version(name) for name in ("torch", "transformers", "peft")}
    return {
        "device": chip,
        "cores": usable_cpus(),
        "python": platform.python_version(),
        **versions,
        "load_before": round(os.getloadavg()[0], 2),
    }


def write_results(result: dict[str, Any], out: Path) -> None:
    """Write the results as JSON and print the path."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")
    print(f"-> {out}")
