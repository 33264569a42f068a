"""The type of all parameters, with one section per stage. `load.py` reads them from `params.yaml`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter
from pydantic_core import core_schema

from m3diff.datasets.minichange.scene import MiniChange
from m3diff.models import FAMILIES
from m3diff.serving.params import Serve
from m3diff.settings.compute import Compute
from m3diff.settings.section import Section, name_validator
from m3diff.stages.augment.params import AnySyntheticDataset
from m3diff.stages.convert.params import Convert
from m3diff.stages.evaluate.params import Evaluate
from m3diff.stages.ingest.params import Ingest
from m3diff.stages.predict.params import Predict
from m3diff.stages.pretrain.params import Pretrain
from m3diff.stages.register.params import Promote, Register
from m3diff.stages.train.params import Train
from m3diff.stages.validate.params import Validate


class Paths(Section):
    """Folders that the stages write. Their names are numbered, so that a listing shows them in order."""

    base: Path
    """Tiny base model, written by `pretrain`."""

    records: Path
    """Records of each dataset, written by `ingest`."""

    clean: Path
    """Clean records, quarantine and web page, written by `validate`."""

    mixture: Path
    """Question-answer samples by split, written by `convert`."""

    model: Path
    """Checkpoint, exported by `train`."""

    predictions: Path
    """Captions of the test pairs, written by `predict`."""

    report: Path
    """Scores and report, written by `evaluate`."""


class _Family(BaseModel):
    """An entry in `models`, of which only the key `family` is read. It determines the type of the entry."""

    family: Annotated[str, name_validator(FAMILIES)]


class TypedByFamily:
    """A marker that makes pydantic validate an entry in `models` as the settings of its family."""

    @staticmethod
    def settings_class(entry: Any) -> type[Any]:
        """Return the settings class of the entry's family."""
        return FAMILIES[_Family.model_validate(entry).family].settings

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return core_schema.no_info_plain_validator_function(
            lambda entry: TypeAdapter(self.settings_class(entry)).validate_python(entry)
        )


class Params(Section):
    """All parameters of a run."""

    paths: Paths
    """Folders that the stages write."""

    models: Mapping[str, Annotated[Any, TypedByFamily()]]
    """Settings of models, by name. `train.model` names the entry to train."""

    pretrain: Pretrain
    """Tiny base model from which the embedded run starts."""

    synthesize: Mapping[str, MiniChange]
    """Generated datasets, by name."""

    augment: Mapping[str, AnySyntheticDataset]
    """Synthetic datasets, which are made from other raw datasets, by name."""

    ingest: Ingest
    """Datasets of the run."""

    validate_: Validate = Field(alias="validate")
    """Limits above which rows, images or all of the data are rejected."""

    convert: Convert
    """Selection of samples for the training mixture."""

    train: Train
    """Training settings that affect the weights. Training settings that do not are in `compute`."""

    predict: Predict
    """How the test pairs are captioned."""

    evaluate: Evaluate
    """Metrics and the report."""

    register_: Register = Field(alias="register")
    """Where model versions are stored."""

    promote: Promote
    """When a challenger replaces the champion."""

    serve: Serve
    """Batching and limits of the HTTP server."""

    compute: Compute
    """How a run is computed. DVC does not watch this section. It does not affect the trained weights, but if
    `train.export` is `best`, its intervals and number of captioned pairs determine which checkpoint is exported."""
