"""Stage `code`: what each stage of dvc.yaml runs with these parameters, written to `code/<stage>.json`."""

import json
import shutil

from m3diff.datasets import DATASETS
from m3diff.models import FAMILIES
from m3diff.provenance.code import FOLDER, HOUSE, digests
from m3diff.records.files import write_atomic
from m3diff.scoring.metrics import METRICS
from m3diff.settings.tree import Params


def code(params: Params) -> None:
    """Write the digests of every stage, those of a dataset's stages by its name, and remove all others."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for stage, modules in named(params).items():
        found = digests(HOUSE / "stages" / stage.partition("@")[0] / "stage.py", modules)
        write_atomic(FOLDER / f"{stage}.json", json.dumps(found, indent=1) + "\n")


def named(params: Params) -> dict[str, list[str]]:
    """The modules that the parameters name, by stage: of datasets, the trained family, the metrics."""
    readers = {name: [DATASETS.modules[entry.reader]] for name, entry in params.ingest.datasets.items()}
    read = sorted({module for modules in readers.values() for module in modules})
    family = [FAMILIES.modules[params.models[params.train.model].family]]
    return {
        "pretrain": [],
        **{f"synthesize@{name}": readers[name] for name in params.synthesize},
        **{f"augment@{name}": [DATASETS.modules[made.source.reader]] for name, made in params.augment.items()},
        **{f"ingest@{name}": modules for name, modules in readers.items()},
        "validate": read,
        "convert": read,
        "train": family,
        "predict": family,
        "evaluate": [*read, *(METRICS.modules[name] for name in params.evaluate.metrics)],
    }
