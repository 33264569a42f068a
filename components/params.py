"""`params.yaml`, typed and frozen to the bottom: a section per stage, in order.

Unknown keys are refused, and every fault is named at once, before anything runs. Fields carry the unit in their name or
in a comment. Each stage folder holds its section in `params.py`; this file puts them together and checks what one
section says of another.
"""

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError

from components.compute import Compute
from components.convert.params import Convert
from components.evaluate.params import Evaluate
from components.ingest.params import Ingest
from components.predict.params import Predict
from components.pretrain.params import Pretrain
from components.register.params import Register
from components.section import FrozenMap, ParamsError, Section
from components.train.params import Train
from components.validate.params import Validate


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
    models: FrozenMap[str, Any]  # by name: the settings of a model family
    pretrain: Pretrain
    synthesize: FrozenMap[str, Any]  # by dataset name: the settings of its generator
    ingest: Ingest
    validate_: Validate = Field(alias="validate")
    convert: Convert
    train: Train
    predict: Predict
    evaluate: Evaluate
    register_: Register = Field(alias="register")
    compute: Compute


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check a parameter file.

    Raises:
        ParamsError: the file is missing, is no YAML mapping, or breaks the schema; every fault is listed.
    """
    if not path.is_file():
        raise ParamsError(f"{path}: no such file; run from the project's root or pass --params")
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParamsError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ParamsError(f"{path}: expected sections, found {type(raw).__name__}")
    try:
        return Params.model_validate(raw)
    except ValidationError as error:
        faults = "\n".join(f"  {_explain(fault)}" for fault in error.errors())
        raise ParamsError(f"{path}: {error.error_count()} fault(s)\n{faults}") from error


def _explain(fault: Any) -> str:
    """One line for one fault: where, what, the value found, and the nearest known key for a misspelt one."""
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] != "extra_forbidden":
        return (
            f"{where}: {fault['msg']} (found {fault['input']!r})" if fault["type"] != "missing" else f"{where}: missing"
        )
    near = difflib.get_close_matches(str(fault["loc"][-1]), _known_keys(fault["loc"][:-1]), n=1, cutoff=0.6)
    return f"{where}: unknown key" + (f"; did you mean {near[0]!r}?" if near else "")


def _known_keys(loc: tuple[Any, ...]) -> list[str]:
    model: Any = Params
    for part in loc:
        if isinstance(part, int):
            continue
        field = next((f for name, f in model.model_fields.items() if part in (name, f.alias)), None)
        if field is None:
            return []
        model = field.annotation
        model = getattr(model, "__args__", [model])[0]
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return []
    return [field.alias or name for name, field in model.model_fields.items()]
