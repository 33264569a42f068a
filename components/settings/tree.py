"""The type of all parameters, with one section per stage. `load.py` reads them from `params.yaml`."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import InitErrorDetails, core_schema

from m3diff.datasets import DATASETS
from m3diff.datasets.minichange.scene import MiniChange
from m3diff.models import FAMILIES
from m3diff.records.errors import Fault, ValueFault
from m3diff.scoring.protocols import list_protocols
from m3diff.serving.params import Serve
from m3diff.settings.compute import Compute
from m3diff.settings.section import Section, fields_of_name, name_validator
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

    base: Path = Path("data/00_base")
    """Tiny base model, written by `pretrain`."""

    records: Path = Path("data/02_records")
    """Records of each dataset, written by `ingest`."""

    clean: Path = Path("data/03_clean")
    """Clean records, quarantine and web page, written by `validate`."""

    mixture: Path = Path("data/04_mixture")
    """Question-answer samples by split, written by `convert`."""

    model: Path = Path("data/05_model")
    """Checkpoint, exported by `train`."""

    predictions: Path = Path("data/06_predictions")
    """Captions of the test pairs, written by `predict`."""

    report: Path = Path("data/07_report")
    """Scores and report, written by `evaluate`."""


class _Family(BaseModel):
    """An entry in `models`, of which only the key `family` is read. It determines the type of the entry."""

    family: Annotated[str, name_validator(FAMILIES)]


@cache
def _type_adapter(settings_class: type[Any]) -> TypeAdapter[Any]:
    """Return the validator of a class of settings. It takes milliseconds to build, and a file has many entries."""
    return TypeAdapter(settings_class)


class TypedByFamily:
    """A marker that makes pydantic validate an entry in `models` as the settings of its family."""

    @staticmethod
    def settings_class(entry: Any) -> type[Any]:
        """Return the settings class of the entry's family. An entry is a mapping, or already has this class."""
        return FAMILIES[_Family.model_validate(entry, from_attributes=True).family].settings

    @classmethod
    def validate_entry(cls, entry: Any) -> Any:
        """Return the settings of an entry, with a learning rate and a delay for every part of the family.

        Raises:
            ValidationError: a value is invalid, or a key of the rates or delays is not a part of the family.
        """
        adapter = _type_adapter(cls.settings_class(entry))  # type: ignore[arg-type]  # mypy takes classes as unhashable
        settings = adapter.validate_python(entry)
        faults = list(faults_of_parts(settings))
        if faults:
            raise ValidationError.from_exception_data(type(settings).__name__, faults)
        return FAMILIES[settings.family].complete_settings(settings)

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return core_schema.no_info_plain_validator_function(self.validate_entry)


def faults_of_parts(settings: Any) -> Iterator[InitErrorDetails]:
    """Yield pydantic's details of a fault for each key of the rates or delays that is not a part of the family."""
    values_by_part: dict[tuple[str, ...], Mapping[str, Any]] = {
        ("rates",): settings.rates,
        ("delays",): settings.delays,
    }
    if settings.align is not None:
        values_by_part["align", "rates"] = settings.align.rates
    parts = FAMILIES[settings.family].parts
    for keys, values in values_by_part.items():
        for part in values:
            if part not in parts:
                fault = Fault("settings.unknown_part", family=settings.family, **fields_of_name(part, parts))
                yield InitErrorDetails(
                    type="value_error", loc=(*keys, part), input=values[part], ctx={"error": ValueFault(fault)}
                )


def gate_by_first_protocol(values: Mapping[str, Any]) -> Promote:
    """Return the section `promote` of parameters without this section.

    Args:
        values: the valid sections before this section, by name. They include `ingest`.
    """
    dataset, entry = next(iter(values["ingest"].datasets.items()))
    main_protocol = list_protocols(dataset, DATASETS[entry.reader])[0]
    return Promote(protocol=f"{dataset}/{main_protocol.name}")


class Params(Section):
    """All parameters of a run.

    `Params(ingest=..., models=..., train=...)` is enough, because all other sections have defaults.
    """

    paths: Paths = Paths()
    """Folders that the stages write."""

    models: Mapping[str, Annotated[Any, TypedByFamily()]]
    """Settings of models, by name. `train.model` names the entry to train."""

    pretrain: Pretrain = Pretrain()
    """Tiny base model from which the embedded run starts."""

    synthesize: Mapping[str, MiniChange] = Field(default_factory=dict)
    """Generated datasets, by name."""

    augment: Mapping[str, AnySyntheticDataset] = Field(default_factory=dict)
    """Synthetic datasets, which are made from other raw datasets, by name. docs/made-data.md describes them."""

    ingest: Ingest
    """Datasets of the run."""

    validate_: Validate = Field(default=Validate(), alias="validate")
    """Limits above which rows, images or all of the data are rejected."""

    convert: Convert = Field(default_factory=Convert)
    """Selection of samples for the training mixture."""

    train: Train
    """Training settings that affect the weights. Training settings that do not are in `compute`."""

    predict: Predict = Predict()
    """How the test pairs are captioned."""

    evaluate: Evaluate = Evaluate()
    """Metrics and the report."""

    register_: Register = Field(default=Register(), alias="register")
    """Where model versions are stored."""

    promote: Promote = Field(default_factory=gate_by_first_protocol)
    """When a challenger replaces the champion. If this section is left out, versions are compared on the first protocol
    of the first dataset in `ingest.datasets`."""

    serve: Serve = Serve()
    """Batching and limits of the HTTP server."""

    compute: Compute = Compute()
    """How a run is computed. DVC does not watch this section. It does not affect the trained weights, but if
    `train.export` is `best`, its intervals and number of captioned pairs determine which checkpoint is exported."""
