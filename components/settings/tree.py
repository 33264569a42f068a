"""The parameters as one type: a section per stage, in order. `load.py` reads them from `params.yaml`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter
from pydantic_core import core_schema

from m3diff.datasets.minichange.scene import MiniChange
from m3diff.models import FAMILIES
from m3diff.serving.params import Serve
from m3diff.settings.compute import Compute
from m3diff.settings.section import Section, one_of
from m3diff.stages.augment.params import MadeDataset
from m3diff.stages.convert.params import Convert
from m3diff.stages.evaluate.params import Evaluate
from m3diff.stages.ingest.params import Ingest
from m3diff.stages.predict.params import Predict
from m3diff.stages.pretrain.params import Pretrain
from m3diff.stages.register.params import Promote, Register
from m3diff.stages.train.params import Train
from m3diff.stages.validate.params import Validate


class Paths(Section):
    """Folders that the stages write. Numbered, so that a listing reads left to right."""

    base: Path  # the tiny base, as `pretrain` makes it
    records: Path
    clean: Path
    mixture: Path
    model: Path
    predictions: Path
    report: Path


class _Family(BaseModel):
    """The key of an entry of `models` that says which type the entry has."""

    family: Annotated[str, one_of(FAMILIES)]


class TypedByFamily:
    """Validates an entry of `models` in the type that its family names."""

    @staticmethod
    def type_of(entry: Any) -> type[Any]:
        return FAMILIES[_Family.model_validate(entry).family].settings

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return core_schema.no_info_plain_validator_function(
            lambda entry: TypeAdapter(self.type_of(entry)).validate_python(entry)
        )


class Params(Section):
    paths: Paths
    models: Mapping[str, Annotated[Any, TypedByFamily()]]  # by name: the settings of a model family
    pretrain: Pretrain
    synthesize: Mapping[str, MiniChange]  # by dataset name: the settings of the generator that its reader names
    augment: Mapping[str, MadeDataset]  # by dataset name: what is made of which raw dataset, and how
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
