"""Stage `code`: write digests of the code that each stage of dvc.yaml runs with the current parameters.

The digests of a stage are in `code/<stage>.json`.
"""

import json
import shutil

from m3diff.datasets import DATASETS
from m3diff.models import FAMILIES
from m3diff.provenance.code import DIGEST_FOLDER, PACKAGE_FOLDER, digest_code
from m3diff.records.files import write_atomic
from m3diff.scoring.metrics import METRICS, choose_metrics
from m3diff.scoring.protocols import list_protocol_metrics, list_protocols
from m3diff.settings.tree import Params


def code(params: Params) -> None:
    """Write one file of digests per stage.

    A stage that runs once per dataset has one file per dataset, such as `ingest@NAME.json`.

    The folder is emptied first, so files of stages that no longer exist are removed.
    """
    shutil.rmtree(DIGEST_FOLDER, ignore_errors=True)
    for stage, modules in modules_by_stage(params).items():
        stage_file = PACKAGE_FOLDER / "stages" / stage.partition("@")[0] / "stage.py"
        file_digests = digest_code(stage_file, modules)
        write_atomic(DIGEST_FOLDER / f"{stage}.json", json.dumps(file_digests, indent=1) + "\n")


def modules_by_stage(params: Params) -> dict[str, list[str]]:
    """For each stage, return the modules of the readers, model families and metrics that the parameters select.

    The keys are stage names such as `train` or `ingest@NAME`.
    """
    readers = {name: DATASETS.modules[entry.reader] for name, entry in params.ingest.datasets.items()}
    all_readers = sorted(set(readers.values()))
    family = FAMILIES.modules[params.models[params.train.model].family]
    protocols = [
        protocol
        for name, entry in params.ingest.datasets.items()
        for protocol in list_protocols(name, DATASETS[entry.reader])
    ]
    metric_names = choose_metrics([*params.evaluate.metrics, *list_protocol_metrics(protocols)])
    metrics = [METRICS.modules[name] for name in metric_names]
    modules: dict[str, list[str]] = {"pretrain": []}
    for name in params.synthesize:
        modules[f"synthesize@{name}"] = [readers[name]]
    for name, synthetic in params.augment.items():
        modules[f"augment@{name}"] = [DATASETS.modules[synthetic.source.reader]]
    for name, reader in readers.items():
        modules[f"ingest@{name}"] = [reader]
    modules["validate"] = all_readers
    modules["convert"] = all_readers
    modules["train"] = [family]
    modules["predict"] = [family]
    modules["evaluate"] = all_readers + metrics
    return modules
