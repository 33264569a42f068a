"""`params.yaml`, typed and frozen: the same sections in the same order, one per stage.

Unknown keys are refused, and every fault is named at once. Fields carry the unit in their name or in the comment of
`params.yaml`. A profile (`infra/profiles/*.yaml`) is a complete file of the same shape, checked by the same loader.
"""

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from components.records import ChangeType


class ParamsError(ValueError):
    """`params.yaml` cannot be used; the text lists every fault with its remedy."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Paths(Section):
    """Where each stage writes. Numbered, so that a listing reads left to right."""

    minichange: Path  # the embedded benchmark, as `synthesize` draws it
    raw: Path  # what `ingest` reads; the folder that DVC watches for new data
    records: Path
    clean: Path
    mixture: Path
    model: Path
    captions: Path
    report: Path
    scratch: Path  # checkpoints in flight and logs; never an output of DVC


class Synthesize(Section):
    seed: int
    scenes: dict[Literal["train", "val", "test"], int]  # each scene gives two pairs: a change and a distractor
    image_px: int = Field(ge=32)
    references: int = Field(ge=1)  # captions per change pair
    multi_change_share: float = Field(ge=0, le=1)  # scenes with two or three changes
    train_twice: list[ChangeType]  # twice as often as the others in training scenes; val and test stay even


class Dataset(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")  # the namespace of its ids
    reader: Literal["clevr_change", "clevr_dc", "spot_the_diff", "iedit", "birds_to_words", "omnidiff", "pairs"]
    root: Path
    options: dict[str, Any] = {}  # the reader's own, see its docstring
    train_on: list[Literal["train", "val"]] = ["train"]  # its own splits that train
    follow_links: bool = False  # images may be symbolic links that leave the root (a shared DVC cache)


class Ingest(Section):
    datasets: list[Dataset] = Field(min_length=1)

    @model_validator(mode="after")
    def names_differ(self) -> "Ingest":
        names = [dataset.name for dataset in self.datasets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"dataset name(s) used twice: {', '.join(twice)}")
        return self


class Validate(Section):
    max_quarantined_share: float = Field(ge=0, le=1)
    max_caption_chars: int = Field(ge=1)
    max_image_pixels: int = Field(ge=1)  # a larger image is taken for a decompression bomb
    keep_leaks: bool  # let train what is in a test set; the report counts it all the same
    near_duplicate_levels: int | None = Field(ge=0, le=255)  # by which look-alikes may differ; null: contents
    expected_pairs: dict[str, dict[Literal["train", "val", "test"], int]]  # published counts, by dataset
    image_memory: Path  # what was learned about images by content; never an output


class Source(Section):
    """How one dataset enters the training mixture; validation and test splits always enter whole."""

    task: str = "difference"  # which questions of the template file
    weight: float = Field(default=1.0, ge=0)  # how often each pair is used: 0.5 half of the pairs, 2 each pair twice
    max_pairs: int | None = Field(default=None, ge=0)
    samples: Literal["each", "one", "joined"] = "each"  # of a pair: each caption, one drawn, or all joined as sentences


class Convert(Section):
    seed: int
    templates: Path
    captions_per_pair: int = Field(ge=1)  # at most so many training samples of one pair
    no_change_share: float = Field(ge=0, le=1)  # share of no-change pairs that train
    sources: dict[str, Source]  # by dataset; one that is not named enters with the defaults


class Train(Section):
    seed: int
    base: Path
    perception: dict[str, Any] | None  # fields of components.model.PerceptionConfig; null: no MDP module
    lora_rank: int = Field(ge=0)
    lora_alpha: int = Field(ge=1)
    packing: Literal["unpacked", "k", "full"]
    pack_k: int = Field(ge=1)  # captions per sequence where packing is k
    global_batch: int = Field(ge=1)  # sequences: a pair with its packed captions, or one caption where unpacked
    micro_batch: int = Field(ge=1)  # sequences on one worker at a time
    epochs: float = Field(gt=0)
    lr_tower: float = Field(gt=0)
    lr: float = Field(gt=0)  # of everything else that trains
    lr_perception: float | None = Field(gt=0)  # of the MDP module; null: `lr`, as in the paper
    warmup_share: float = Field(ge=0, le=1)
    weight_decay: float = Field(ge=0)
    max_grad_norm: float = Field(gt=0)
    zero_stage: Literal[0, 1, 2, 3]
    precision: Literal["fp32", "bf16"]
    checkpointing: Literal["none", "cheap", "full"]
    workers: int = Field(ge=0)  # Ray Train workers; 0 runs the loop in a plain process
    cpus_per_worker: int = Field(ge=1)
    gpu: bool
    gpu_memory_gb: float = Field(ge=0)  # of one GPU; a run that needs more is refused before it starts
    checkpoint_every_steps: int = Field(ge=1)
    max_failures: int = Field(ge=0)
    val_pairs: int = Field(ge=0)  # pairs of the validation split behind the val_loss curve

    @model_validator(mode="after")
    def batch_divides(self) -> "Train":
        ranks = max(self.workers, 1)
        if self.global_batch % (self.micro_batch * ranks):
            raise ValueError(
                f"global_batch {self.global_batch} must be a multiple of "
                f"micro_batch {self.micro_batch} x workers {ranks}"
            )
        return self


class Predict(Section):
    batch_pairs: int = Field(ge=1)
    max_new_tokens: int = Field(ge=1)
    limit: int = Field(ge=0)  # pairs of the test split; 0 is all


class Evaluate(Section):
    grammar: Path | None  # how captions of this benchmark name type, object and place; null: no such scores
    spice_dir: Path | None  # folder with the CoreNLP 3.6.0 jars
    gallery: int = Field(ge=0)  # pairs drawn in the report
    scorer_timeout_s: int = Field(ge=1)


class Register(Section):
    tracking_uri: str
    experiment: str
    model_name: str
    gate_metric: str
    min_gain: float = Field(ge=0)  # challenger must exceed champion by so much


class Params(Section):
    paths: Paths
    synthesize: Synthesize
    ingest: Ingest
    validate_: Validate = Field(alias="validate")
    convert: Convert
    train: Train
    predict: Predict
    evaluate: Evaluate
    register_: Register = Field(alias="register")


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
