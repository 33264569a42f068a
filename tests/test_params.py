"""Parameters: what is right loads typed and frozen; of what is wrong every fault is said at once, nothing is run."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from m3diff.settings.load import RENAMED, load_params
from m3diff.settings.rules import absent_paths, check_paths, licensed
from m3diff.settings.section import FrozenDict, ParamsError
from m3diff.settings.tree import Params
from m3diff.stages.ingest.params import DatasetEntry
from tests.toy import REPOSITORY

EMBEDDED = yaml.safe_load((REPOSITORY / "profiles" / "embedded.yaml").read_text())
QUESTIONS = REPOSITORY / "profiles" / "questions.yaml"
REMOVED = object()
NAN, INFINITE = float("nan"), float("inf")

INGESTED = {"reader": "pairs", "root": "data/01_raw/made", "options": {"manifest": "pairs.jsonl"}}
MADE = {"manifest": "pairs.jsonl"}
EDITS = {
    "kind": "edits",
    "source": {"reader": "minichange", "root": "data/01_raw/minichange"},
    "root": "data/01_raw/made",
    "seed": 1,
    "editor": {"kind": "drawn"},
    "writer": {"kind": "grammar"},
    "edits": 2,
    "paraphrases": {"test": 4},
}
PAINTED = EDITS | {"editor": {"kind": "instruct_pix2pix", "model": "models/ip2p"}}
OMNIDIFF = {"reader": "omnidiff", "root": "data/01_raw/omnidiff"}
EXTRA = "ingest.datasets.extra"

WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a misspelt key": ({"train.epoch": 5}, ["train.epoch: unknown key; did you mean 'epochs'? known keys: base, ep"]),
    "an unknown section": ({"tuning": {}}, ["tuning: unknown key; known keys: augment, compute, convert"]),
    "a key misspelt where the other is missing": (
        {"predict.limits": 0, "predict.limit": REMOVED},
        [
            "predict.limit: missing; add it as in profiles/embedded.yaml",
            "predict.limits: unknown key; did you mean 'lim",
        ],
    ),
    "a section that is missing": ({"evaluate": REMOVED}, ["evaluate: missing; add it as in profiles/embedded.yaml"]),
    "a section that is a number": ({"predict": 3}, ["predict: expected a mapping (found 3)"]),
    "words for numbers": (
        {"train.epochs": "five", "compute.workers": "two", "compute.gpu": "perhaps", "train.base": 7},
        [
            "train.epochs: expected a number (found 'five')",
            "compute.workers: expected a whole number (found 'two')",
            "compute.gpu: expected true or false (found 'perhaps')",
            "train.base: expected a path (found 7)",
        ],
    ),
    "true for a number": (
        {"compute.workers": True, "train.epochs": False, "validate.near_duplicate_max_diff": True},
        [
            "compute.workers: expected a number (found true)",
            "train.epochs: expected a number (found false)",
            "validate.near_duplicate_max_diff: expected a number (found true)",
        ],
    ),
    "half a worker": ({"compute.workers": 1.5}, ["compute.workers: expected a whole number (found 1.5)"]),
    "limits": (
        {
            "train.epochs": 0,
            "train.warmup_share": 1.5,
            "validate.near_duplicate_max_diff": 256,
            "promote.min_gain": -0.1,
            "promote.confidence": 1.0,
            "promote.guards": {"no_change_recall": -0.1},
            "train.seed": -1,
        },
        [
            "train.epochs: must be more than 0 (found 0)",
            "train.warmup_share: must be 1 or less (found 1.5)",
            "validate.near_duplicate_max_diff: must be 255 or less (found 256)",
            "train.seed: must be 0 or more (found -1)",
            "promote.min_gain: must be 0 or more (found -0.1)",
            "promote.confidence: must be less than 1 (found 1.0)",
            "promote.guards.no_change_recall: must be 0 or more (found -0.1)",
        ],
    ),
    "numbers that are none": (
        {
            "train.epochs": INFINITE,
            "pretrain.lr": NAN,
            "synthesize.minichange.oversample_types": [INFINITE],
        },
        [
            "train.epochs: expected a finite number (found inf)",
            "pretrain.lr: expected a finite number (found nan)",
            "synthesize.minichange.oversample_types: expected a finite number (found inf)",
        ],
    ),
    "words that are none of the choices": (
        {"train.precision": "fp16", "compute.zero_stage": 4, "compute.activation_checkpointing": "cheap"},
        [
            "train.precision: expected 'fp32' or 'bf16' (found 'fp16')",
            "compute.zero_stage: expected 0, 1, 2 or 3 (found 4)",
            "compute.activation_checkpointing: expected 'none', 'selective' or 'full' (found 'cheap')",
        ],
    ),
    "an unknown model": (
        {"train.model": "m3dif"},
        [
            "train.model: did you mean 'm3diff'? expected one of blip2idc, blip2idc_stacked, difference, m3diff, "
            "no_module, onediff, onediff_paper (found 'm3dif'); mode"
        ],
    ),
    "an unknown family, no family, no mapping": (
        {"models.other": {"family": "m3dif"}, "models.empty": {}, "models.number": 3},
        [
            "models.other.family: did you mean 'm3diff'? expected one of blip2idc, m3diff, onediff (found 'm3dif')",
            "models.empty.family: missing; add it",
            "models.number: expected a mapping (found 3)",
        ],
    ),
    "a family's own settings": (
        {
            "models.m3diff.module.vision_feature_layer": [4],
            "models.m3diff.lora.rank": "high",
            "models.m3diff.delays": {"modul": 0.2},
            "models.no_module.rates.encoder": 0.1,
            "models.no_module.rates.llm": REMOVED,
        },
        [
            "models.m3diff.module.vision_feature_layer: unknown key; did you mean 'vision_feature_layers'?",
            "models.m3diff.lora.rank: expected a whole number (found 'high')",
            "models.m3diff.delays.modul: unknown key; did you mean 'module'?",
            "models.no_module.rates.encoder: unknown key; known keys: llm, module, projector, vision",
            "models.no_module.rates.llm: missing",
        ],
    ),
    "settings of the other kind of module": (
        {
            "models.m3diff.module.kind": "mdp",
            "models.other": EMBEDDED["models"]["m3diff"] | {"module": {"kind": "difference", "init_gains": 1}},
            "models.third": EMBEDDED["models"]["m3diff"] | {"module": {"kind": "difference", "heads": 4}},
        },
        [
            "models.m3diff.module: kind must be difference, or not be there for the MDP module",
            "models.other.module.init_gains: unknown key; did you mean 'init_gain'?",
            "models.third.module.heads: unknown key; known keys: init_gain, kind, share_levels, vision_feature_layers",
        ],
    ),
    "adapters of negative rank": (
        {"models.m3diff.lora.rank": -1},
        ["models.m3diff.lora: rank must be 0 or more, found -1"],
    ),
    "a rate without its module": ({"models.no_module.rates.module": 0.1}, ["models.no_module: rates: module"]),
    "layers beyond the base's vision encoder": (
        {"models.m3diff.module.vision_feature_layers": [5]},
        ["models.m3diff: module.vision_feature_layers: 5 lies beyond the 4 layers of the vision encoder"],
    ),
    "a reader that is not known": (
        {f"{EXTRA}": {"reader": "omnidif", "root": "data/x"}},
        [f"{EXTRA}.reader: did you mean 'omnidiff'? expected one of birds_to_words, clevr_change"],
    ),
    "options that the reader has not": (
        {f"{EXTRA}": OMNIDIFF | {"options": {"manifst": "a.csv", "column": {}}}},
        [
            f"{EXTRA}.options.manifst: unknown option; did you mean 'manifest'? known keys: columns, manifest, split",
            f"{EXTRA}.options.column: unknown option; did you mean 'columns'?",
        ],
    ),
    "a test split that trains": (
        {"ingest.datasets.minichange.train_on": ["train", "test"]},
        ["ingest.datasets.minichange.train_on: a test split must not train; choose from train, val (found ['train',"],
    ),
    "a validation split that trains alone": (
        {"ingest.datasets.minichange.train_on": ["val"]},
        ["ingest.datasets.minichange.train_on: val trains beside train alone; write [train, val], or [] where nothing"],
    ),
    "expected pairs that are no counts": (
        {
            "ingest.datasets.minichange.expected_pairs": {"tran": 5, "val": -1},
            f"{EXTRA}": OMNIDIFF | {"expected_pairs": "publishd"},
        },
        [
            "ingest.datasets.minichange.expected_pairs.tran: expected 'train', 'val' or 'test' (found 'tran')",
            "ingest.datasets.minichange.expected_pairs.val: must be 0 or more (found -1)",
            f"{EXTRA}.expected_pairs: expected 'published' (found 'publishd')",
        ],
    ),
    "counts that nobody published": (
        {
            f"{EXTRA}": OMNIDIFF | {"expected_pairs": "published"},
            "ingest.datasets.minichange.expected_pairs": "published",
        },
        [
            f"{EXTRA}.expected_pairs: no counts of 'extra' are published; call the dataset one of omnidiff_real, omn",
            "ingest.datasets.minichange.expected_pairs: no counts of 'minichange' are published; write the counts, o",
        ],
    ),
    "a dataset's name that cannot stand in ids": (
        {"ingest.datasets.my/pairs": {"reader": "pairs", "root": "data/x"}},
        ["ingest.datasets.my/pairs: a dataset's name has only letters, digits, _ and -"],
    ),
    "roots that are one or lie inside another": (
        {
            f"{EXTRA}": {"reader": "pairs", "root": "data/01_raw/minichange/extra"},
            "ingest.datasets.same": {"reader": "pairs", "root": "data/x/../01_raw/minichange"},
        },
        [
            f"{EXTRA}.root: data/01_raw/minichange/extra is inside ingest.datasets.minichange.root",
            "ingest.datasets.same.root: data/x/../01_raw/minichange is ingest.datasets.minichange.root, too",
            f"{EXTRA}.root: data/01_raw/minichange/extra is inside ingest.datasets.same.root",
        ],
    ),
    "outputs that lie in a root or in each other": (
        {"paths.clean": "data/01_raw/minichange/clean", "paths.mixture": "data/02_records", "compute.scratch": "data"},
        [
            "paths.clean: data/01_raw/minichange/clean is inside ingest.datasets.minichange.root",
            "paths.mixture: data/02_records is paths.records, too; give each a folder of its own",
            "ingest.datasets.minichange.root: data/01_raw/minichange is inside compute.scratch (data)",
            "ingest.datasets.minichange_free.root: data/01_raw/minichange_free is inside",
            "ingest.datasets.minichange_shifted.root: data/01_raw/minichange_shifted is inside",
            "paths.base: data/00_base is inside compute.scratch (data)",
            "paths.records: data/02_records is inside compute.scratch (data)",
            "paths.clean: data/01_raw/minichange/clean is inside compute.scratch (data)",
            "paths.mixture: data/02_records is inside compute.scratch (data)",
            "paths.model: data/05_model is inside compute.scratch (data)",
            "paths.predictions: data/06_predictions is inside compute.scratch (data)",
            "paths.report: data/07_report is inside compute.scratch (data)",
        ],
    ),
    "a generator for what is not ingested": (
        {"synthesize.minichang": EMBEDDED["synthesize"]["minichange"]},
        ["synthesize.minichang: no dataset of `ingest.datasets` has this name; remove the entry or ingest it"],
    ),
    "a generator for what cannot make itself": (
        {EXTRA: OMNIDIFF, "synthesize.extra": EMBEDDED["synthesize"]["minichange"]},
        ["synthesize.extra: the reader 'omnidiff' cannot make its dataset: only minichange can; correct ingest.datase"],
    ),
    "a generator whose dataset has no known reader": (
        {"ingest.datasets.minichange.reader": "nothing"},
        [
            "ingest.datasets.minichange.reader: expected one of birds_to_words",
            "synthesize.minichange: the reader 'nothing' cannot make its dataset: only minichange can; correct inges",
        ],
    ),
    "a generator that writes elsewhere": (
        {"synthesize.minichange.root": "data/01_raw/other"},
        ["synthesize.minichange.root: must be the root of the dataset that ingest reads, data/01_raw/minichange (f"],
    ),
    "a generator's own settings": (
        {
            "synthesize.minichange.references": 6,
            "synthesize.minichange.scene": 3,
            "synthesize.minichange.oversample_types": ["colour"],
        },
        [
            "synthesize.minichange.references: must be 5 or less (found 6)",
            "synthesize.minichange.scene: unknown key; did you mean 'scenes'?",
            "synthesize.minichange.oversample_types.0: expected 'viewpoint'",
        ],
    ),
    "a made dataset that is not ingested, or as another": (
        {
            "augment.other": EDITS,
            "augment.minichange": EDITS,
            "augment.made": EDITS,
            EXTRA: {"reader": "pairs", "root": "x"},
        }
        | {"ingest.datasets.made": {"reader": "pairs", "root": "data/01_raw/made"}},
        [
            "augment.other: no dataset of `ingest.datasets` has this name; remove the entry or ingest it",
            "augment.minichange: ingest reads another dataset under this name; write ingest.datasets.minichange: "
            "{reader: pairs, root: data/01_raw/made, options: {manifest: pairs.jsonl}}",
            "augment.made: ingest reads another dataset under this name; write",
        ],
    ),
    **{
        f"a made dataset {where} its source": (
            {"augment.made": EDITS | {"source": {"reader": "minichange", "root": source}}}
            | {EXTRA: {"reader": "pairs", "root": "x"}}
            | {"ingest.datasets.made": {"reader": "pairs", "root": EDITS["root"], "options": MADE}},
            [f"augment.made.root: data/01_raw/made is written anew, and its source is in {source}; name another"],
        )
        for where, source in (("over", "data/01_raw/made"), ("in", "data/01_raw"), ("around", "data/01_raw/made/a"))
    },
    "a made dataset over what another entry reads": (
        {
            "ingest.datasets.made": INGESTED,
            "augment.made": EDITS,
            "ingest.datasets.second": INGESTED | {"root": "data/01_raw/second"},
            "augment.second": EDITS
            | {"root": "data/01_raw/second", "source": {"reader": "magicbrush", "root": "data/01_raw/made"}}
            | {"editor": {"kind": "instruct_pix2pix", "model": "data/01_raw/made/ip2p"}},
            "ingest.datasets.third": INGESTED | {"root": "data/01_raw/third"},
            "augment.third": EDITS
            | {"root": "data/01_raw/third", "source": {"reader": "pairs", "root": "data/01_raw/made", "options": MADE}}
            | {"editor": {"kind": "instruct_pix2pix", "model": "models/ip2p"}},
        },
        [
            "augment.made.root: data/01_raw/made is written anew, and augment.second's source is in data/01_raw/made",
            "augment.made.root: data/01_raw/made is written anew, and augment.second's model is in data/01_raw/made",
        ],
    ),
    "a made dataset's own settings": (
        {
            "ingest.datasets.made": INGESTED,
            "augment.made": EDITS | {"kind": "edit"},
        },
        ["augment.made: kind: did you mean 'edits'? expected one of coupled_samples, edits, neighbours (found 'edit')"],
    ),
    "parts of made datasets": (
        {
            "ingest.datasets.made": INGESTED,
            "augment.made": EDITS
            | {
                "edits": 0,
                "edit": 3,
                "editor": {"kind": "drawn", "steps": 3},
                "writer": {"kind": "endpoint", "url": "ftp://x", "model": "m"},
                "paraphrases": {"tset": 2},
            },
            "augment.second": {
                "kind": "neighbours",
                "root": "data/01_raw/second",
                "seed": 1,
                "features": {"kind": "cilp"},
                "band": [0.9, 0.7],
                "candidates": 3,
                "max_text_similarity": 0.7,
                "references": 1,
            },
            "augment.third": 3,
        },
        [
            "augment.made.edits: must be 1 or more (found 0)",
            "augment.made.edit: unknown key; did you mean 'edits'?",
            "augment.made.editor.steps: unknown key; known keys: kind",
            "augment.made.writer.url: expected http://... or https://..., up to and with /v1, found 'ftp://x'",
            "augment.made.paraphrases.tset: expected 'train', 'val' or 'test' (found 'tset')",
            "augment.second.features: kind: did you mean 'clip'? expected one of clip, encoder (found 'cilp')",
            "augment.second.band: expected two numbers of -1 to 1, the lower first, found [0.9, 0.7]",
            "augment.second.source: missing; add it as in profiles/embedded.yaml",
            "augment.second.writer: missing",
            "augment.third: expected a mapping (found 3)",
        ],
    ),
    "a source that cannot be read so": (
        {
            "ingest.datasets.made": INGESTED,
            "augment.made": EDITS | {"source": {"reader": "magicbrus", "root": "x"}},
            "ingest.datasets.second": INGESTED | {"root": "data/01_raw/second"},
            "augment.second": EDITS
            | {"root": "data/01_raw/second", "source": {"reader": "magicbrush", "root": "x", "options": {"tst": None}}}
            | {"editor": {"kind": "instruct_pix2pix", "model": "models/ip2p"}},
        },
        [
            "augment.made.source.reader: did you mean 'magicbrush'?",
            "augment.made.editor.kind: drawn edits what the reader minichange reads alone; write instruct_pix2pix",
            "augment.second.source.options.tst: unknown option; did you mean 'test'? known keys: test",
        ],
    ),
    "made in the end of a split that its authors keep out of training": (
        {
            "ingest.datasets.first": INGESTED | {"root": "data/01_raw/first"},
            "augment.first": PAINTED | {"root": "data/01_raw/first", "source": {"reader": "magicbrush", "root": "x"}},
            "ingest.datasets.made": INGESTED | {"train_on": ["train", "val"]},
            "augment.made": PAINTED | {"source": {"reader": "pairs", "root": "data/01_raw/first", "options": MADE}},
        },
        ["ingest.datasets.made.train_on: MagicBrush's authors ask that val never trains; write [train]"],
    ),
    "sources and tasks": (
        {
            "convert.sources.minichange": {"weight": -1, "samples": "all"},
        },
        [
            "convert.sources.minichange.weight: must be 0 or more (found -1)",
            "convert.sources.minichange.samples: expected 'each', 'one' or 'joined' (found 'all')",
        ],
    ),
    "a source and a task that are not there": (
        {"convert.sources.minichang": {}, "convert.sources.minichange": {"task": "diference"}},
        [
            "convert.sources.minichang: no such dataset; did you mean 'minichange'? expected one of minichange",
            "convert.sources.minichange.task: did you mean 'difference'? expected one of birds, ccexpert, describe, de",
        ],
    ),
    "metrics": (
        {"evaluate.metrics": ["CIDer", "METEOR", "METEOR"], "promote.guards": {}},
        [
            "evaluate.metrics: did you mean 'CIDEr'? expected one of BLEU, CIDEr",
            "evaluate.metrics: METEOR is listed twice; remove one",
            "promote.metric: expected one of METEOR (found 'CIDEr'); evaluate.metrics decides what is computed",
        ],
    ),
    "the gate": (
        {
            "promote.protocol": "minichange/totl",
            "promote.metric": "change_exact_acuracy",
            "promote.guards": {"no_change": 0.1},
        },
        [
            "promote.protocol: did you mean 'minichange/total'? expected one of minichange/distractor, minichange/",
            "promote.metric: did you mean 'change_exact_accuracy'? expected one of BLEU-1, BLEU-2",
            "promote.guards.no_change: did you mean 'false_no_change'? expected one of",
        ],
    ),
    "a gate on what is better where it is smaller": (
        {"promote.metric": "false_no_change", "promote.guards": {"false_no_change": 0.1}},
        ["promote.metric: expected one of BLEU-1"],
    ),
    "a gate by what reads captions, on a dataset without a grammar": (
        {
            "ingest.datasets": {"birds": {"reader": "birds_to_words", "root": "data/01_raw/birds"}},
            "synthesize": {},
            "promote.protocol": "birds/test",
            "promote.metric": "change_exact_accuracy",
            "promote.guards": {"no_change_recall": 0.1, "CIDEr": 0.1},
        },
        [
            "promote.metric: expected one of BLEU-1",
            "promote.guards.no_change_recall: expected one of BLEU-1",
        ],
    ),
    "a gate on a protocol of a dataset that is not ingested": (
        {"promote.protocol": "clevr_change/total"},
        ["promote.protocol: did you mean 'minichange/total'?"],
    ),
    "no metrics": (
        {"evaluate.metrics": []},
        ["evaluate.metrics: must not be empty (found [])"],
    ),
    "a metric that is no list": ({"evaluate.metrics": "CIDEr"}, ["evaluate.metrics: expected a list (found 'CIDEr')"]),
    "names that MLflow refuses": (
        {"register.model_name": "team/m3diff:1.5", "register.experiment": " m3diff"},
        [
            "register.model_name: MLflow refuses / : . in the name of a model; write - or _ instead (found 'team/m3d",
            "register.experiment: a name must not start or end with a space (found ' m3diff')",
        ],
    ),
    "empty names": (
        {"register.model_name": "", "register.experiment": "x" * 501},
        ["register.model_name: must not be empty (found '')", "register.experiment: must have 500 characters or fewer"],
    ),
    "a batch that does not divide": (
        {"train.global_batch": 24, "compute.micro_batch": 5},
        ["train.global_batch: must be a multiple of compute.micro_batch 5 x 2 worker(s) = 10 (found 24)"],
    ),
    "a batch that does not divide in one process": (
        {"compute.micro_batch": 3, "compute.workers": 0},
        ["train.global_batch: must be a multiple of compute.micro_batch 3 x 1 worker(s) = 3 (found 16)"],
    ),
    "the best checkpoint of none captioned": (
        {"train.export": "best", "compute.caption_val_pairs": 0},
        ["train.export: best is the checkpoint with the highest CIDEr, but compute.caption_val_pairs is 0, so none"],
    ),
    "the best checkpoint without validation pairs": (
        {
            "train.export": "best",
            "ingest.datasets.minichange.train_on": ["train", "val"],
            "ingest.datasets.minichange_free.train_on": ["train", "val"],
            "ingest.datasets.minichange_shifted.train_on": ["train", "val"],
        },
        ["train.export: best is the checkpoint with the highest CIDEr on validation pairs, but every dataset's"],
    ),
    "a GPU that nobody knows": (
        {"compute.gpu_kind": "H100-90GB"},
        ["compute.gpu_kind: did you mean 'H100-80GB'? expected one of A10-24GB, A100-40GB"],
    ),
    "no dataset": (
        {"ingest.datasets": {}, "synthesize": {}},
        ["ingest.datasets: must not be empty (found {})"],
    ),
    "faults of several sections": (
        {"train.epochs": -1, "predict.limit": REMOVED, "paths.clean": 3},
        [
            "train.epochs: must be more than 0 (found -1)",
            "predict.limit: missing",
            "paths.clean: expected a path (found 3)",
        ],
    ),
    "faults between several sections": (
        {"train.model": "other", "compute.micro_batch": 7},
        [
            "train.model: expected one of blip2idc, blip2idc_stacked, difference, m3diff, no_module, onediff, "
            "onediff_paper (found 'other')",
            "train.global_batch: must be a multiple of compute.micro_batch 7 x 2 worker(s) = 14 (found 16)",
        ],
    ),
    "a renamed key": (
        {"train.lr_tower": 0.1, "validate.keep_leaks": True, "validate.allow_test_leakage": REMOVED, "train.lr": 1},
        [
            "validate.allow_test_leakage: missing; add it as in profiles/embedded.yaml",
            "validate.keep_leaks: unknown key; it is validate.allow_test_leakage now",
            "train.lr_tower: unknown key; it is models.m3diff.rates.vision now",
            "train.lr: unknown key; it is models.m3diff.rates.projector and models.m3diff.rates.llm now",
        ],
    ),
    "a key that nothing reads any more, and datasets in a list": (
        {"validate.image_memory": "x", "ingest.datasets": [], "synthesize": {}},
        [
            "validate.image_memory: unknown key; nothing reads it any more, remove it",
            "ingest.datasets: expected a mapping (found [])",
        ],
    ),
}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The embedded parameters with other values at some places."""
    values = copy.deepcopy(EMBEDDED)
    for place, value in changes.items():
        at = values
        *above, last = place.split(".")
        for key in above:
            at = at[key]
        if value is REMOVED:
            del at[last]
        else:
            at[last] = value
    return values


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


@pytest.fixture
def write(tmp_path: Path):
    def write(changes: dict[str, Any]) -> Path:
        path = tmp_path / "params.yaml"
        path.write_text(yaml.safe_dump(changed(changes), sort_keys=False))
        return path

    return write


def faults_of(path: Path) -> list[str]:
    with pytest.raises(ParamsError) as caught:
        load_params(path)
    first, *lines = str(caught.value).split("\n")
    lines = [line for line in lines if "earlier version" not in line]
    assert first == f"{path}: {len(lines)} fault(s)"
    assert all(line.startswith("  ") for line in lines)
    return [line.strip() for line in lines]


@pytest.mark.fault("m5")
@pytest.mark.parametrize("name", WRONG)
def test_every_fault_of_a_wrong_file_is_said_at_once(name, write):
    changes, expected = WRONG[name]
    path = write(changes)
    start = time.process_time()
    found = faults_of(path)
    assert time.process_time() - start < 1
    for line in expected:
        assert any(fault.startswith(line) for fault in found), f"{line!r} is not said in {found}"
    assert len(found) == len(expected), found


def test_there_are_at_least_thirty_wrong_files():
    assert len(WRONG) >= 30


def test_a_wrong_file_is_refused_in_under_a_second_and_loads_no_heavy_library(write):
    path = write({"train.epochs": -1, "models.m3diff.lora.rank": -1})
    code = (
        "import json, sys, time; start = time.process_time(); from m3diff.__main__ import main;"
        f"code = main(['--params', {str(path)!r}, 'train']);"
        "print(json.dumps([code, time.process_time() - start, sorted({name.split('.')[0] for name in sys.modules})]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    code, seconds, loaded = json.loads(done.stdout)
    assert code == 2
    assert "2 fault(s)" in done.stderr
    assert seconds < 1
    heavy = {"torch", "transformers", "polars", "pandas", "mlflow", "pycocoevalcap", "ray", "ruamel"}
    assert heavy.isdisjoint(loaded)


def test_a_file_that_is_missing_or_no_mapping_says_so(tmp_path):
    path = tmp_path / "params.yaml"
    with pytest.raises(ParamsError, match="no such file; run from the project's root, pass --params"):
        load_params(path)
    for text, words in {
        "a: [1": "not valid YAML",
        "- 1": "expected sections, found list",
        "": "expected sections, found nothing",
    }.items():
        path.write_text(text)
        with pytest.raises(ParamsError, match=words):
            load_params(path)


def test_a_made_dataset_is_passed_on_under_the_licence_of_what_it_is_made_of(write):
    params = load_params(
        write(
            {
                "ingest.datasets.first": INGESTED | {"root": "data/01_raw/first"},
                "augment.first": PAINTED | {"root": "data/01_raw/first", "source": {"reader": "emu_edit", "root": "x"}},
                "ingest.datasets.made": INGESTED,
                "augment.made": PAINTED | {"source": {"reader": "pairs", "root": "data/01_raw/first", "options": MADE}},
                "ingest.datasets.own": INGESTED | {"root": "data/01_raw/own"},
            }
        )
    )
    entries = licensed(params)
    assert {name: entry.reader for name, entry in entries.items()} == {
        name: "minichange" for name in EMBEDDED["ingest"]["datasets"]
    } | {"first": "emu_edit", "made": "emu_edit", "own": "pairs"}
    assert entries["made"].root == Path("data/01_raw/made"), "all else is the dataset's own"


def test_a_key_that_is_written_twice_is_refused_with_both_lines_beside_the_other_faults(tmp_path):
    path = tmp_path / "params.yaml"
    text = (REPOSITORY / "profiles" / "embedded.yaml").read_text()
    path.write_text(text.replace("  epochs: 2.7\n", "  epochs: 2.7\n  epochs: 0\n"))
    line = text.split("\n").index("  epochs: 2.7") + 1
    assert faults_of(path) == [
        f"epochs: written twice, in lines {line} and {line + 1}; remove one of the two",
        "train.epochs: must be more than 0 (found 0)",
    ]


def test_a_file_of_an_earlier_version_is_refused_with_the_remedy(write):
    path = write({"train.lr_tower": 0.1})
    with pytest.raises(ParamsError) as caught:
        load_params(path)
    assert str(caught.value).endswith(
        "\n  a file of an earlier version; `m3diff profile NAME` writes a current one and keeps a copy of yours"
    )


def test_each_renamed_key_is_unknown_now_and_its_new_name_is_known():
    for old, new in RENAMED.items():
        section, key = old.split(".")
        assert key not in EMBEDDED[section], old
        for place in new.replace("<name>", "minichange").split(" and ") if new else ():
            found: Any = EMBEDDED
            *above, last = place.split(".")
            for step in above:
                found = found[step]
            optional = {"ingest": DatasetEntry.model_fields}.get(above[0], found)
            assert last in optional, place


def test_the_committed_parameters_load_with_each_value_in_its_type():
    params = load_params(Path("params.yaml"))
    assert params.models["m3diff"].module.vision_feature_layers == (4,)
    assert params.models["m3diff"].rates["vision"] == 0.0004
    assert params.models["no_module"].module is None
    assert params.synthesize["minichange"].scenes == {"train": 2200, "val": 60, "test": 240}
    assert params.ingest.datasets["minichange"].root == Path("data/01_raw/minichange")
    assert params.ingest.datasets["minichange"].train_on == ("train",)
    assert params.train.max_captions_per_sequence is None
    assert params.compute.image_cache == Path("runs/image_cache.parquet")
    assert params.validate_.near_duplicate_max_diff == 2
    assert params.register_.model_name == "m3diff"


def inside(value: Any, where: str = "params") -> Iterator[tuple[str, Any]]:
    """Every value at every depth."""
    yield where, value
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from inside(getattr(value, name), f"{where}.{name}")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from inside(getattr(value, field.name), f"{where}.{field.name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from inside(item, f"{where}[{key!r}]")
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from inside(item, f"{where}[{number}]")


@pytest.mark.parametrize("file", ["params.yaml", "profiles/paper.yaml"])
def test_parameters_are_frozen_to_the_bottom(file):
    for where, value in inside(load_params(Path(file))):
        assert not isinstance(value, list | set), where
        assert not isinstance(value, dict) or type(value) is FrozenDict, where
        if isinstance(value, BaseModel):
            assert value.model_config["frozen"], where
            assert value.model_config["extra"] == "forbid", where
        if dataclasses.is_dataclass(value):
            assert value.__dataclass_params__.frozen, where


def test_a_frozen_mapping_refuses_every_change_and_can_be_sent_to_another_process():
    mapping = load_params(Path("profiles/paper.yaml")).ingest.datasets["omnidiff_real"].options
    for change in (
        lambda: mapping.update(x=1),
        lambda: mapping.setdefault("x", 1),
        lambda: mapping.pop("manifest"),
        lambda: mapping.popitem(),
        lambda: mapping.clear(),
        lambda: mapping.__setitem__("x", 1),
        lambda: mapping.__delitem__("manifest"),
        lambda: mapping.__ior__({"x": 1}),
    ):
        with pytest.raises(TypeError, match="frozen: change params.yaml and load it again"):
            change()
    again = pickle.loads(pickle.dumps(mapping))
    assert again == mapping == {"manifest": "annotations.json"}
    assert type(again) is FrozenDict
    assert copy.deepcopy(mapping) is copy.copy(mapping) is mapping


def test_parameters_survive_the_way_to_another_process():
    params = load_params(Path("params.yaml"))
    assert pickle.loads(pickle.dumps(params)) == params


def test_without_the_base_the_questions_and_the_data_parameters_load_so_that_plan_can_count(write):
    params = load_params(
        write({"train.base": "models/none", "convert.questions": "none.yaml", "ingest.datasets.x": OMNIDIFF})
    )
    assert isinstance(params, Params)


def test_a_model_that_is_not_trained_need_not_fit_the_base(write):
    module = EMBEDDED["models"]["m3diff"]["module"] | {"vision_feature_layers": [9]}
    load_params(write({"models.deep": EMBEDDED["models"]["m3diff"] | {"module": module}}))


def test_what_a_family_says_without_a_base_is_said_of_every_model_that_is_not_trained(write, monkeypatch):
    from m3diff.models import FAMILIES

    family = dataclasses.replace(FAMILIES["m3diff"], faults=lambda settings, base: [] if base else ["never fits"])
    monkeypatch.setitem(FAMILIES, "m3diff", family)
    said = r": 2 fault\(s\)\n  models.no_module: never fits\n  models.difference: never fits$"
    with pytest.raises(ParamsError, match=said):
        load_params(write({}))


def test_a_base_that_cannot_be_read_is_left_to_train(write, tmp_path):
    (tmp_path / "config.json").write_text("{")
    load_params(write({"train.base": str(tmp_path)}))
    (tmp_path / "config.json").write_text("[]")
    load_params(write({"train.base": str(tmp_path)}))


@pytest.mark.parametrize("text", ["a: [", "- a list"])
def test_questions_that_cannot_be_read_are_left_to_convert(text, write, tmp_path):
    (tmp_path / "questions.yaml").write_text(text)
    load_params(write({"convert.questions": str(tmp_path / "questions.yaml")}))


def test_the_task_of_a_dataset_itself_must_have_questions(write, tmp_path):
    (tmp_path / "questions.yaml").write_text("edit:\n- What was done?\n")
    found = faults_of(write({"convert.questions": str(tmp_path / "questions.yaml")}))
    words = "expected one of edit (found 'difference'); tasks are in"
    assert found == [
        f"the task of dataset {name!r}: {words} {tmp_path}/questions.yaml"
        for name in ("minichange", "minichange_free", "minichange_shifted")
    ]


READS = {
    "train": ("train.base", {"train.base": "none"}, "fetch the base model or correct the path"),
    "convert": ("convert.questions", {"convert.questions": "none.yaml"}, "see profiles/questions.yaml"),
    "evaluate": ("compute.spice_dir", {"compute.spice_dir": "none"}, "fetch the CoreNLP 3.6.0 jars, or write null"),
    "ingest@extra": (
        f"{EXTRA}.root",
        {EXTRA: {"reader": "pairs", "root": "none"}},
        "fetch the dataset or correct the pa",
    ),
}


@pytest.mark.parametrize("stage", READS)
def test_a_stage_is_refused_where_what_it_reads_is_not_there(stage, write):
    key, changes, remedy = READS[stage]
    with pytest.raises(ParamsError) as caught:
        check_paths(load_params(write(changes)), stage)
    first, line = str(caught.value).split("\n")
    assert first == "1 path(s) of the parameters are missing"
    assert line.startswith(f"  {key}: none")
    assert remedy in line
    for other in READS.keys() - {stage, "ingest@extra"}:
        check_paths(load_params(write(changes)), other)


def test_every_path_that_is_missing_is_named_at_once(write, tmp_path):
    changes = {EXTRA: {"reader": "pairs", "root": "none"}, "ingest.datasets.minichange.root": str(tmp_path / "gone")}
    params = load_params(write(changes | {"synthesize.minichange.root": str(tmp_path / "gone")}))
    with pytest.raises(ParamsError) as caught:
        check_paths(params, "ingest@minichange", "ingest@extra")
    assert str(caught.value).split("\n") == [
        "2 path(s) of the parameters are missing",
        f"  ingest.datasets.minichange.root: {tmp_path}/gone is not there; `m3diff synthesize minichange`",
        f"  {EXTRA}.root: none is not there; fetch the dataset or correct the path",
    ]


def test_the_embedded_base_is_made_where_it_is_missing(write):
    params = load_params(write({"train.base": "data/none", "paths.base": "data/none"}))
    with pytest.raises(ParamsError, match="train.base: data/none/config.json is not there; `make base`"):
        check_paths(params, "train")
    check_paths(load_params(Path("params.yaml")), "train", "convert", "evaluate")


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("models/llava-1.5-7b-hf", "(`hf download llava-hf/llava-1.5-7b-hf --local-dir models/llava-1.5-7b-hf`)"),
        ("models/blip2-opt-2.7b", "fetch the base model or correct the path"),
    ],
)
def test_a_base_that_is_not_here_is_named_with_the_command_that_fetches_it_where_that_is_known(write, base, words):
    ((place, path, remedy),) = absent_paths(load_params(write({"train.base": base})), "train")
    assert (place, path) == ("train.base", Path(base) / "config.json")
    assert words in remedy


@pytest.mark.parametrize(("module", "missing"), [({}, 2), ({"vdm": {}}, 0)], ids=["new", "trained"])
def test_the_bert_that_a_new_module_starts_as_is_asked_for_before_anything_runs(module, missing, write, tmp_path):
    base = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}} | module
    changes = {"train.model": "onediff_paper", "models.onediff_paper.module.start": "bert"}
    params = load_params(write(changes | {"train.base": str(tmp_path)}))
    (tmp_path / "config.json").write_text(json.dumps(base))
    found = absent_paths(params, "train")
    assert [str(path.relative_to(tmp_path)) for _, path, _ in found] == [
        "bert/config.json",
        "bert/model.safetensors",
    ][:missing]
    assert all(remedy == "copy it from bert-base-uncased, or set module.start to random" for *_, remedy in found)


@pytest.mark.parametrize(("llm", "refused"), [({}, "opt"), ({"model_type": "qwen2"}, None)], ids=["opt", "qwen2"])
def test_recomputation_that_the_bases_llm_has_not_is_refused_before_anything_runs(llm, refused, write, tmp_path):
    base = {"model_type": "blip-2", "image_token_index": 7, "text_config": llm}
    (tmp_path / "config.json").write_text(json.dumps(base))
    changes = {"train.model": "blip2idc", "train.base": str(tmp_path), "compute.activation_checkpointing": "selective"}
    if refused is None:
        load_params(write(changes))
        return
    (fault,) = faults_of(write(changes))
    assert fault.startswith("compute.activation_checkpointing: selective recomputes the norms and products of a Qwen2")
    assert f"this one is {refused}" in fault


def test_the_batches_of_an_alignment_divide_as_those_of_the_fine_tuning_do(write):
    align = {"datasets": ["minichange_free"], "epochs": 1, "global_batch": 20}
    align["rates"] = {"vision": None, "projector": 0.001, "module": 0.001, "llm": None}
    with pytest.raises(ParamsError, match="models.onediff.align.global_batch: must be a multiple .* = 16 .found 20."):
        load_params(write({"train.model": "onediff", "models.onediff.align": align}))
