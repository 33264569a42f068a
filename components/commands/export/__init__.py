"""The trained model, and the mixture, as a folder for others.

`m3diff export FOLDER` copies the checkpoint for use with this project;
`m3diff export --hub FOLDER` writes what others load without it:

    model.safetensors, config.json, generation_config.json     the weights, and how they are used
    FAMILY_model.py, processing_FAMILY.py, ...                 the code, the project's own files; `auto_map` names it
    processor_config.json, chat_template.jinja, tokenizer*     images and words as the model takes them
    example_before.png, example_after.png                      a test pair, where its licence lets it be passed on
    README.md                                                  the card: what the model is, what it was trained on, how
                                                               well it does and what it may not
    manifest.json                                              the hash of every file

Needed to use it: torch, transformers, safetensors, pillow. `card_FAMILY.md.j2` has the card's words on a family and its
paper, `card.md.j2` all else.

`m3diff export-llava FOLDER` writes the mixture as LLaVA records, for training elsewhere:

    {"id": "...", "image": [before, after], "images": [before, after],
     "conversations": [{"from": "human", "value": "<image><image>\\nWhat changed?"}, {"from": "gpt", "value": "..."}],
     "metadata": {"dataset": "...", "split": "train"}}

LLaVA-NeXT reads `image` (as many as there are `<image>`), ms-swift reads `images`, LLaMA-Factory reads `images` as the
`dataset_info.json` beside the files tells it. Image paths stay relative to the project: name it as the image folder, or
ask for absolute ones.

Found by running them: ms-swift reads the file as it is, but crops each image at any resolution (3,672 visual tokens a
pair for 1,460): another recipe. LLaMA-Factory 0.9.5 takes the data and has no LLaVA-OneVision.
The files are made to be passed on, so a dataset whose licence does not allow that is refused.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Use, check_licence
from m3diff.models import FAMILIES
from m3diff.models.m3diff import LARGE_BASE, SMALL_BASE
from m3diff.models.onediff import LLAVA_BASE
from m3diff.provenance.dvc import Lock
from m3diff.records.errors import DataError, command_to_read_again, readable
from m3diff.records.files import sha256
from m3diff.records.progress import progress
from m3diff.records.schemas import NO_CHANGE, SPLITS
from m3diff.scoring.bootstrap import CONFIDENCE, RESAMPLES
from m3diff.settings.rules import licensed
from m3diff.settings.tree import Params, Paths
from m3diff.stages.ingest.params import DatasetEntry

WEIGHTS = ("[!.]*.safetensors", "[!.]*.safetensors.index.json")
# Of every folder: what its processor is made of; modules with the names of their files in it
CALLED = {
    "m3diff.images.open": "images",
    "m3diff.images.colour": "colour",
    "m3diff.images.jpeg": "jpeg",
    "m3diff.records.contents": "contents",
    "m3diff.records.errors": "errors",
    "m3diff.commands.export.called": "called",
}

PACKAGE = Path(__file__).parents[2]
ONEVISION = {name: f"llava-hf/{name}" for name in (SMALL_BASE, LARGE_BASE)}


@dataclass(frozen=True)
class SharedFamily:
    """A family that others load. A new module's classes are `<title>Config` and `<title>ForConditionalGeneration`."""

    name: str
    title: str
    bases: Mapping[str, str]  # published models that it is trained from, by the name of their folder
    tags: tuple[str, ...]
    processing: str  # module of its ImagePairProcessor
    code: tuple[str, ...] = ()  # modules of `m3diff.models` that this needs beside `processing`
    model_code: tuple[str, ...] = ()  # those of a model with a new module
    module: str = ""  # the field of config.json with the new module; without one the model is transformers' own

    @property
    def reads_question(self) -> bool:
        return FAMILIES[self.name].reads_question

    def has_module(self, config: Mapping[str, Any]) -> bool:
        """True where the model of a config.json is more than its base, which transformers' own classes load."""
        return config.get(self.module) is not None

    def auto_map(self, config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """The entry `auto_map` of config.json; none where transformers' own classes are the model's."""
        if not self.has_module(config):
            return {}
        classes = {"AutoConfig": "Config", "AutoModelForImageTextToText": "ForConditionalGeneration"}
        return {"auto_map": {auto: f"{self.name}_model.{self.title}{name}" for auto, name in classes.items()}}

    def sources(self, config: Mapping[str, Any]) -> dict[str, str]:
        """The text of each file of code, by its name: of a model without a module the processor's alone."""
        stems = ("processing", *self.code, *(self.model_code if self.has_module(config) else ()))
        names = CALLED | {self.processing: f"processing_{self.name}"} | {f"m3diff.models.{s}": s for s in stems}
        texts = {}
        for module, name in names.items():
            file = f"{module.replace('.', '/')}.py"
            text = (PACKAGE.parent / file.replace("m3diff", PACKAGE.name, 1)).read_text(encoding="utf-8")
            text = re.sub(r"\bfrom (m3diff[\w.]*) import", lambda found: f"from .{names[found[1]]} import", text)
            origin = f"# From {file} of m3diff, by `m3diff export --hub`. Licence: Apache-2.0"
            texts[f"{name}.py"] = f"{origin}\n{text}"
        return texts


MODULES = ("settings", "layers", "llava")
PROCESSING = "m3diff.commands.export.processing_"
SHARED = {
    "m3diff": SharedFamily(
        name="m3diff",
        title="M3Diff",
        bases=ONEVISION,
        tags=("llava-onevision", "m3diff"),
        processing=f"{PROCESSING}llava",
        model_code=(*MODULES, "m3diff_model"),
        module="mdp",
    ),
    "onediff": SharedFamily(
        name="onediff",
        title="OneDiff",
        bases={**ONEVISION, LLAVA_BASE: f"llava-hf/{LLAVA_BASE}"},
        tags=("llava", "onediff"),
        processing=f"{PROCESSING}llava",
        model_code=(*MODULES, "onediff_model"),
        module="vdm",
    ),
    "blip2idc": SharedFamily(
        name="blip2idc",
        title="BLIP2IDC",
        bases={"blip2-opt-2.7b": "Salesforce/blip2-opt-2.7b"},
        tags=("blip-2", "blip2idc"),
        processing=f"{PROCESSING}blip2idc",
        code=("layers", "blip2idc_model"),
    ),
}

SCORES = {  # what the card shows of metrics.json, in this order; all times 100
    "CIDEr": "CIDEr",
    "CIDEr-char": "CIDEr of characters",
    "METEOR": "METEOR",
    "ROUGE-L": "ROUGE-L",
    "ROUGE-L-char": "ROUGE-L of characters",
    "BLEU-4": "BLEU-4",
    "BLEU-4-char": "BLEU-4 of characters",
    "SPICE": "SPICE",
    "change_type_accuracy": "type of a single change named correctly, %",
    "change_exact_accuracy": "single change: type, object, place, what became what, %",
    "multi_change_exact_f1": "several changes, all of each correct: F1 times 100",
    "no_change_recall": '"nothing changed" of pairs without a change, %',
    "false_no_change": '"nothing changed" of pairs with a change, %',
    "reversal": "the images swapped: the inverse change named, %",
}

ANSWERS = {"yes": "yes", "conditions": "on conditions", "no": "no", "unstated": "not stated"}


class Dataset(NamedTuple):
    """A dataset of the mixture: its pairs and samples by split."""

    name: str
    spec: DatasetSpec
    pairs: Mapping[str, int]
    samples: Mapping[str, int]


def export_hub(params: Params, out: Path, allow_unlicensed: bool = False) -> list[str]:
    """Write the trained model to `out`, whole or not at all; returns what the licences ask for.

    Raises:
        DataError: there is no whole checkpoint, `out` exists, or a dataset's licence does not let it be passed on.
    """
    from m3diff.models.checkpoint import verify_manifest, write_manifest
    from m3diff.models.generation import QUESTION

    if out.exists():
        raise DataError(f"{out}: exists; name a folder that does not")
    datasets = read_datasets(params)
    # to train, and to redistribute, for a model may reproduce its training data
    trained = {each.name: each.spec for each in datasets if each.samples["train"]}
    notices = licence_notices(trained, ("train", "redistribute"), allow_unlicensed)
    checkpoint = params.paths.model / "checkpoint"
    manifest = verify_manifest(checkpoint)
    if (family := SHARED.get(manifest["family"])) is None:
        raise DataError(
            f"{checkpoint}: of the family {manifest['family']!r}; a folder to share is written of {', '.join(SHARED)}; "
            "`m3diff export FOLDER` copies the checkpoint of any"
        )
    example = find_example(params.paths, datasets)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        folder = Path(scratch) / out.name
        folder.mkdir()
        write_model(checkpoint, folder, family, params.predict.max_new_tokens, QUESTION)
        config = json.loads((folder / "config.json").read_text())
        for file, text in family.sources(config).items():
            (folder / file).write_text(text, encoding="utf-8")
        for side in ("before", "after"):
            if example is not None:
                shutil.copyfile(example[side], folder / f"example_{side}{example[side].suffix}")
        card = write_card(out.name, params, family, manifest, config, datasets, example, QUESTION)
        (folder / "README.md").write_text(card, encoding="utf-8")
        write_manifest(folder, family=manifest["family"], base_sha256=manifest["base_sha256"])
        folder.rename(out)
    return notices


def write_model(checkpoint: Path, folder: Path, family: SharedFamily, max_new_tokens: int, question: str) -> None:
    from transformers import GenerationConfig

    for file in (file for pattern in WEIGHTS for file in checkpoint.glob(pattern)):
        shutil.copyfile(file, folder / file.name)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    known: Any = FAMILIES[family.name].load_processor(checkpoint)
    ends = {"eos_token_id": known.end_id, "pad_token_id": known.pad_id}
    # BLIP-2's `generate` decodes by what config.json says of its language model
    inner = {"text_config": config["text_config"] | ends} if config["model_type"] == "blip-2" else {}
    (folder / "config.json").write_text(json.dumps(config | inner | family.auto_map(config), indent=2) + "\n")
    processing = import_module(family.processing)
    processing.shared_processor(family.name, known, question, config).save_pretrained(folder)
    GenerationConfig(do_sample=False, max_new_tokens=max_new_tokens, **ends).save_pretrained(folder)


def write_card(
    name: str,
    params: Params,
    family: SharedFamily,
    manifest: Mapping[str, Any],
    config: Mapping[str, Any],
    datasets: list[Dataset],
    example: Mapping[str, Any] | None,
    question: str,
) -> str:
    """The text of README.md.

    Args:
        name: of the folder.
        manifest: of the checkpoint.
        config: the model's config.json.
        example: see `find_example`.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    scores = read_json(params.paths.report / "metrics.json").get("protocols", {})
    first = {protocol.partition("/")[0]: protocol for protocol in reversed(scores)}
    headlines = {protocol: scores[protocol] for protocol in scores if protocol in first.values()}
    trained = [each for each in datasets if each.samples["train"]]
    lineage, recipe, untraced = trace(params)
    return environment.get_template(f"card_{family.name}.md.j2").render(
        name=name,
        base=params.train.base.name,
        max_new_tokens=params.predict.max_new_tokens,
        family=family,
        manifest=manifest,
        datasets=datasets,
        lineage=lineage,
        untraced=untraced,
        example=example,
        question=question,
        report=read_json(params.paths.model / "report.json"),
        module=config[family.module] if family.has_module(config) else None,
        side=config["vision_config"]["image_size"],
        patch=config["vision_config"]["patch_size"],
        front=front_matter(params.train.base.name, family, trained),
        headlines=headlines,
        table=score_table(headlines),
        absent={score: why for each in headlines.values() for score, why in each.get("absent", {}).items()},
        known_scores=SCORES,
        answers=ANSWERS,
        recipe=recipe,
        trained=sorted({each.spec.title for each in trained}),
        drawn=all(each.spec.generate is not None for each in trained),
        versions={name: version(name) for name in ("torch", "transformers")},
        confidence=f"{CONFIDENCE:.0%}".replace("%", " %"),
        resamples=f"{RESAMPLES:,}",
    )


def trace(params: Params) -> tuple[dict[str, str], str, str]:
    """The lineage of the checkpoint and its recipe, the parameters of its training as YAML; where the files are not
    those that `dvc.lock` names, neither, but why."""
    from m3diff.registry.lineage import read_lineage  # with MLflow, which export-llava does without

    try:
        lock = Lock()
        lineage, ran = read_lineage(params, lock), lock.params(params.ingest.datasets)
    except DataError as error:
        return {}, "", str(error)
    sections = [section for section in ("train", f"models.{ran['train']['model']}", "convert") if section in ran]
    return lineage, yaml.safe_dump({section: ran[section] for section in sections}, sort_keys=False).strip(), ""


def front_matter(base: str, family: SharedFamily, trained: list[Dataset]) -> str:
    """The card's head, which model hubs read; YAML."""
    free = all(
        use.answer == "yes" and each.spec.licence.name.lower() == "apache-2.0"
        for each in trained
        for use in (each.spec.licence.train, each.spec.licence.redistribute)
    )
    head = {"license": "apache-2.0"} if free else {"license": "other", "license_name": "see-data-and-licences"}
    head |= {"base_model": family.bases[base]} if base in family.bases else {}
    head |= {"language": "en", "library_name": "transformers"}
    head |= {"pipeline_tag": "image-text-to-text"} if family.reads_question else {}  # a pipeline sends a text
    tags = ["image-difference-captioning", "change-captioning", *family.tags]
    return yaml.safe_dump({**head, "tags": tags}, sort_keys=False).strip()


def score_table(protocols: Mapping[str, Any]) -> dict[str, list[str]]:
    """By title, each score that any protocol has: a cell for each protocol, times 100 with its interval."""
    rows: dict[str, list[str]] = {}
    for score, title in SCORES.items():
        cells = []
        for protocol in protocols.values():
            value, interval = protocol.get(score), protocol["intervals"].get(score)
            bounds = f" ({100 * interval['low']:.1f} to {100 * interval['high']:.1f})" if interval else ""
            cells.append("–" if value is None else f"{100 * value:.1f}{bounds}")
        rows |= {title: cells} if {*cells} - {"–"} else {}
    return rows


def read_json(file: Path) -> dict[str, Any]:
    """A report of a stage, as evaluate's and train's; nothing where there is none."""
    with readable(file):
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def read_datasets(params: Params) -> list[Dataset]:
    """The datasets of the mixture, by convert's report. Raises DataError without it, or for one that is unknown."""
    file = params.paths.mixture / "report.json"
    found = read_json(file).get("datasets")
    if found is None:
        raise DataError(f"{file}: names no datasets, so what trained the model is unknown; run `m3diff convert` first")
    entries = licensed(params)
    return [Dataset(name, spec_of(name, entries), each["pairs"], each["samples"]) for name, each in found.items()]


def spec_of(name: str, entries: Mapping[str, DatasetEntry]) -> DatasetSpec:
    """The facts of a dataset of the mixture. Raises DataError for one that the parameters do not name."""
    if name not in entries:
        raise DataError(f"{name}: in the mixture, but not in ingest.datasets; run `m3diff convert` again")
    return DATASETS[entries[name].reader]


def licence_notices(specs: Mapping[str, DatasetSpec], uses: Iterable[Use], allow_unlicensed: bool) -> list[str]:
    """Conditions that the licences of datasets set for these uses.

    Raises:
        DataError: a licence refuses, and `allow_unlicensed` is not set.
    """
    told = [(name, check_licence(spec, use, allow_unlicensed)) for name, spec in specs.items() for use in uses]
    return [f"{name}: {notice}" for name, notice in told if notice]


def find_example(paths: Paths, datasets: list[Dataset]) -> dict[str, Any] | None:
    """The record of a test pair, with the model's `caption`: the first captioned one with a change, of the first
    dataset whose images may be passed on without a condition; not chosen by how well the model does on it. None where
    there is no such pair.

    Raises:
        DataError: its images are not those that were captioned.
    """
    predictions, records = paths.predictions / "predictions.json", paths.clean / "records.parquet"
    if not (predictions.is_file() and records.is_file()):
        return None
    with readable(predictions):
        captions = {row["image_id"]: row["caption"] for row in json.loads(predictions.read_text(encoding="utf-8"))}
    with readable(records):
        table = pl.read_parquet(records).filter(pl.col("split") == "test", pl.col("id").is_in([*captions]))
    free = [each.name for each in datasets if each.spec.licence.redistribute.answer == "yes"]
    rows = [row for row in table.to_dicts() if row["dataset"] in free and row["change_types"] != [NO_CHANGE]]
    if not rows:
        return None
    row = min(rows, key=lambda row: free.index(row["dataset"]))
    for side in ("before", "after"):
        path = Path(row[side])
        if not path.is_file() or sha256(path) != row[f"{side}_sha256"].hex():
            raise DataError(
                f"{path}: missing or changed since ingest, so no example; run {command_to_read_again(path)} first"
            )
    return row | {"caption": captions[row["id"]], "before": Path(row["before"]), "after": Path(row["after"])}


def export_llava(
    entries: Mapping[str, DatasetEntry],
    mixture: Path,
    out: Path,
    allow_unlicensed: bool = False,
    absolute: bool = False,
) -> dict[str, int]:
    """Write `out/<split>.json` and `out/dataset_info.json`; returns the records by split.

    Samples with an empty reference are left out: they count in evaluation only, and ms-swift refuses them.

    Args:
        entries: the datasets of the run, whose readers tell the licences.
        mixture: the output of convert: `<split>/*.parquet`.
        allow_unlicensed: also what no licence allows to pass on; conditions are printed in any case.
        absolute: image paths from the root of this machine; else as the samples have them.

    Raises:
        DataError: there are no samples, or a licence does not allow to pass a dataset on.
    """
    shards = {split: sorted((mixture / split).glob("*.parquet")) for split in SPLITS}
    if not any(shards.values()):
        raise DataError(f"{mixture}: holds no samples; run `m3diff convert` first")
    names: set[str] = set()
    for shard in (shard for found in shards.values() for shard in found):
        with readable(shard):
            names |= set(pl.read_parquet(shard, columns=["dataset"])["dataset"])
    specs = {name: spec_of(name, entries) for name in sorted(names)}
    print("".join(f"{notice}\n" for notice in licence_notices(specs, ["redistribute"], allow_unlicensed)), end="")
    out.mkdir(parents=True, exist_ok=True)
    root = Path.cwd() if absolute else None
    written = {split: _write(found, out / f"{split}.json", root) for split, found in shards.items() if found}
    form = {"formatting": "sharegpt", "columns": {"messages": "conversations", "images": "images"}}
    info = {f"m3diff_{split}": {"file_name": f"{split}.json", **form} for split in written}
    (out / "dataset_info.json").write_text(json.dumps(info, indent=2) + "\n", "utf-8")
    return written


def _write(shards: list[Path], path: Path, root: Path | None) -> int:
    count = 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for shard in progress(shards, f"export {path.name}", total=len(shards), unit="shard"):
            samples = pl.read_parquet(shard).filter(pl.col("reference") != "")
            for record in samples.select(_record(root)).write_ndjson().split("\n")[:-1]:
                file.write((",\n" if count else "[\n") + record)
                count += 1
        file.write("\n]\n" if count else "[]\n")
    return count


def _record(root: Path | None) -> list[pl.Expr]:
    """A sample as a record; relative image paths below `root`, where there is one."""
    human = pl.struct(pl.lit("human").alias("from"), pl.format("<image><image>\n{}", "question").alias("value"))
    model = pl.struct(pl.lit("gpt").alias("from"), pl.col("reference").alias("value"))
    images = pl.concat_list("before", "after")
    if root is not None:
        images = images.list.eval(pl.element().map_elements(lambda name: str(root / name), return_dtype=pl.String))
    return [
        pl.col("id"),
        images.alias("image"),
        images.alias("images"),
        pl.concat_list(human, model).alias("conversations"),
        pl.struct("dataset", "split").alias("metadata"),
    ]
