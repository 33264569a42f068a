"""The parameters as one type: a section per stage, in order. `load.py` reads them from `params.yaml`."""

from pathlib import Path
from typing import Any

from pydantic import Field

from m3diff.registry.params import Promote
from m3diff.serving.params import Serve
from m3diff.settings.compute import Compute
from m3diff.settings.section import FrozenMap, Section
from m3diff.stages.augment.params import MadeDataset
from m3diff.stages.convert.params import Convert
from m3diff.stages.evaluate.params import Evaluate
from m3diff.stages.ingest.params import Ingest
from m3diff.stages.predict.params import Predict
from m3diff.stages.pretrain.params import Pretrain
from m3diff.stages.register.params import Register
from m3diff.stages.train.params import Train
from m3diff.stages.validate.params import Validate


class Paths(Section):
    """Where each stage writes. Numbered, so that a listing reads left to right."""

    base: Path  # the tiny base, as `pretrain` makes it
    records: Path
    clean: Path
    mixture: Path
    model: Path
    predictions: Path
    report: Path


class Params(Section):
    paths: Paths
    models: FrozenMap[str, Any]  # by name: the settings of a model family, as its `settings` says
    pretrain: Pretrain
    synthesize: FrozenMap[str, Any]  # by dataset name: the settings of its generator, as the dataset's file says
    augment: FrozenMap[str, MadeDataset]  # by dataset name: what is made of which raw dataset, and how
    ingest: Ingest
    validate_: Validate = Field(alias="validate")
    convert: Convert
    train: Train
    predict: Predict
    evaluate: Evaluate
    register_: Register = Field(alias="register")
    promote: Promote
    serve: Serve
    compute: Compute
