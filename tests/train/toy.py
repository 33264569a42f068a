"""A mixture and training parameters so small that a run takes a second."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from components.train.params import Train
from components.records import SAMPLE_SCHEMA
from tests.tiny import MDP, noise_image, tiny_base

CAPTIONS = ("the red ball moved", "the ball is gone", "a small blue star appeared at the left", "nothing changed")


def write_mixture(folder: Path, pairs: int = 10) -> Path:
    """Train pairs with one to four captions each, and two validation pairs."""
    (folder / "images").mkdir(parents=True)
    (folder / "samples").mkdir()
    for split, count in (("train", pairs), ("val", 2), ("test", 3)):
        rows = []
        for number in range(count):
            images = [folder / "images" / f"{split}_{number}_{side}.png" for side in ("a", "b")]
            for k, image in enumerate(images):
                noise_image(100 * number + k).save(image)
            for k, caption in enumerate(CAPTIONS[: 1 + number % 4]):
                pair = f"toy/{split}{number}"
                row = {"id": f"{pair}#{k}", "pair": pair, "dataset": "toy", "split": split}
                row |= {"before": str(images[0]), "after": str(images[1])}
                rows.append(row | {"question": "What changed?", "answer": caption})
        pq.write_table(pa.Table.from_pylist(rows, SAMPLE_SCHEMA), folder / "samples" / f"{split}-00000.parquet")
    return folder


def parameters(base: Path, **changes: Any) -> Train:
    fields = {
        "seed": 3,
        "base": tiny_base(base) if not base.exists() else base,
        "mdp": MDP,
        "lora_rank": 2,
        "lora_alpha": 4,
        "packing": "full",
        "pack_k": 2,
        "global_batch": 4,
        "micro_batch": 4,
        "epochs": 2,
        "lr_vision": 1e-3,
        "lr_mdp": None,
        "lr": 3e-3,
        "warmup_share": 0.1,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "zero_stage": 0,
        "precision": "fp32",
        "checkpointing": "none",
        "workers": 0,
        "cpus_per_worker": 1,
        "gpu": False,
        "gpu_memory_gb": 0,
        "checkpoint_every_steps": 2,
        "max_failures": 2,
        "val_pairs": 2,
    }
    return Train(**{**fields, **changes})
