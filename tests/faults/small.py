"""A folder for the real stages on a dozen drawn scenes, with a model of a few thousand weights."""

from pathlib import Path
from typing import Any

import yaml

from tests.tiny import tiny_base
from tests.toy import REPOSITORY

STAGE_COMMANDS = (
    ["synthesize", "minichange"],
    ["ingest"],
    ["validate"],
    ["convert"],
    ["train"],
    ["predict"],
    ["evaluate"],
)
"""The arguments of the command line for each stage, in order."""


def write_params(folder: Path, tests: int = 4, **changes: Any) -> None:
    """Write the parameters of the small run and its base. Every path is relative."""
    tiny_base(folder / "base")
    scenes = {"train": 8, "val": 2, "test": tests}
    drawn = {"root": "data/01_raw/minichange", "seed": 1, "scenes": scenes, "image_px": 64, "references": 2}
    profile = {
        "extends": str(REPOSITORY / "profiles" / "embedded"),
        "models": {"m3diff": {"module": {"vision_feature_layers": [1, 2], "layers": 1, "heads": 2}}},
        "synthesize": {"minichange": drawn | {"multi_change_share": 0.2, "oversample_types": []}},
        "ingest": {"datasets": {"minichange": {"reader": "minichange", "root": "data/01_raw/minichange"}}},
        "validate": {"near_duplicate_max_diff": None, "max_quarantined_share": 0.5},
        "convert": {"questions": str(REPOSITORY / "profiles" / "questions.yaml")},
        "train": {"base": "base", "epochs": 1, "global_batch": 8},
        "predict": {"max_new_tokens": 4},
        "evaluate": {"metrics": ["CIDEr", "change_accuracy"]},
        "compute": {
            "workers": 0,
            "micro_batch": 4,
            "val_pairs": 2,
            "caption_val_pairs": 0,
            "checkpoint_every_steps": 1,
        },
    }
    (folder / "params.yaml").write_text(yaml.safe_dump(profile | changes))
