"""Parameters: what is right loads typed and frozen; of what is wrong every fault is said at once, nothing is run."""

import copy
import json
import math
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from m3diff.settings.load import load_params
from m3diff.settings.rules import absent_paths, check_paths, licensed
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params
from tests.toy import REPOSITORY

EMBEDDED = yaml.safe_load((REPOSITORY / "profiles" / "embedded.yaml").read_text())
REMOVED = object()

MADE = {"manifest": "pairs.jsonl"}
INGESTED = {"reader": "pairs", "root": "data/01_raw/made", "options": MADE}
EDITS = {"kind": "edits", "root": "data/01_raw/made", "seed": 1, "edits": 2, "paraphrases": {"test": 4}}
EDITS |= {"source": {"reader": "minichange", "root": "data/01_raw/minichange"}}
EDITS |= {"editor": {"kind": "drawn"}, "writer": {"kind": "grammar"}}
NEIGHBOURS = {"kind": "neighbours", "root": "data/01_raw/second", "seed": 1, "features": {"kind": "cilp"}}
NEIGHBOURS |= {"band": [0.9, 0.7], "candidates": 3, "max_text_similarity": 0.7, "references": 1}
OMNIDIFF = {"reader": "omnidiff", "root": "data/01_raw/omnidiff"}
M3DIFF, MINICHANGE = EMBEDDED["models"]["m3diff"], EMBEDDED["synthesize"]["minichange"]
EXTRA, MINE = "ingest.datasets.extra", "ingest.datasets.minichange"
PUBLISHED = "no counts of {} are published; "

VALUES: list[tuple[str, Any, str]] = [
    ("train.epoch", 5, "unknown key; did you mean 'epochs'? known keys: base, ep"),
    ("predict.limit", REMOVED, "missing; add it as in profiles/embedded.yaml"),
    ("compute.workers", True, "expected a number (found true)"),
    ("train.epochs", 0, "Input should be greater than 0 (found 0)"),
    ("train.epochs", math.inf, "Input should be a finite number (found inf)"),
    ("train.warmup_share", 1.5, "Input should be less than or equal to 1 (found 1.5)"),
    ("promote.confidence", 1.0, "Input should be less than 1 (found 1.0)"),
    ("promote.guards.no_change_recall", -0.1, "Input should be greater than or equal to 0 (found -0.1)"),
    ("train.precision", "fp16", "Input should be 'fp32' or 'bf16' (found 'fp16')"),
    ("evaluate.metrics", [], "Tuple should have at least 1 item"),
    ("register.model_name", "team/m3diff:1.5", "String should match pattern"),
    ("models.m3diff.family", "m3dif", "did you mean 'm3diff'? expected one of blip2idc, m3diff, onediff (found"),
    ("models.m3diff.module.vision_feature_layer", [4], "unknown key; did you mean 'vision_feature_layers'?"),
    ("models.m3diff.delays", {"modul": 0.2}, "unknown key; did you mean 'module'?"),
    ("models.difference.module.heads", 4, "unknown key; known keys: init_gain, kind, share_levels, vision_feature_la"),
    (f"{MINE}.train_on", ["train", "test"], "a test split must not train; choose from train, val (found ['train',"),
    (f"{MINE}.train_on", ["val"], "val trains beside train alone; write [train, val], or [] where nothing"),
    ("ingest.datasets", {}, "Dictionary should have at least 1 item"),
    ("augment.made", EDITS | {"kind": "edit"}, "Input tag 'edit' found using 'kind' does not match"),
    # one value against others
    ("train.model", "m3dif", "did you mean 'm3diff'? expected one of blip2idc, blip2idc_stacked, difference"),
    (EXTRA, OMNIDIFF | {"reader": "omnidif"}, "did you mean 'omnidiff'? expected one of birds_to_words, clevr_change"),
    ("augment.made", EDITS | {"source": {"reader": "minichang", "root": "x"}}, "did you mean 'minichange'?"),
    (EXTRA, OMNIDIFF | {"options": {"manifst": "a"}}, "unknown key; did you mean 'manifest'? known keys: columns"),
    (EXTRA, OMNIDIFF | {"options": {"manifest": 3}}, "Input should be a valid string (found 3)"),
    (EXTRA, OMNIDIFF | {"expected_pairs": "published"}, PUBLISHED.format("'extra'") + "call the dataset one of omni"),
    (f"{MINE}.expected_pairs", "published", PUBLISHED.format("'minichange'") + "write the counts, or null"),
    ("ingest.datasets.my/pairs", OMNIDIFF, "String should match pattern '^[A-Za-z0-9_-]+$' (found 'my/pairs')"),
    ("synthesize.minichang", MINICHANGE, "no dataset of `ingest.datasets` has this name; remove the entry or ingest"),
    ("synthesize.minichange.root", "x", "must be the root of the dataset that ingest reads, data/01_raw/minichange (f"),
    ("augment.other", EDITS, "no dataset of `ingest.datasets` has this name; remove the entry or ingest it"),
    ("augment.minichange", EDITS, "ingest reads another dataset under this name; write ingest.datasets.minichange"),
    ("convert.sources.minichang", {}, "no such dataset; did you mean 'minichange'? expected one of minichange"),
    ("convert.sources.minichange", {"task": "diference"}, "did you mean 'difference'? expected one of birds, ccexpert"),
    ("evaluate.metrics", ["CIDEr", "METEOR", "CIDer"], "did you mean 'CIDEr'? expected one of BLEU, CIDEr"),
    ("promote.protocol", "minichange/totl", "did you mean 'minichange/total'? expected one of minichange/distractor"),
    ("promote.metric", "false_no_change", "expected one of BLEU-1"),
    ("train.global_batch", 24, "must be a multiple of compute.micro_batch 8 x 2 worker(s) = 16 (found 24)"),
    ("compute.gpu_kind", "H100-90GB", "did you mean 'H100-80GB'? expected one of A10-24GB, A100-40GB"),
]
"""Place of a wrong value, the value, and the fault, at this place or below it. Of a gate some have a second fault."""


def made(name: str, where: str = "", **changes: Any) -> dict[str, Any]:
    root = {"root": where or f"data/01_raw/{name}"}
    return {f"ingest.datasets.{name}": INGESTED | root, f"augment.{name}": EDITS | root | changes}


def source(reader: str, root: str = "x", **more: Any) -> dict[str, Any]:
    return {"reader": reader, "root": root} | more


RATES = {"vision": None, "projector": 0.001, "module": 0.001, "llm": None}
ALIGN = {"datasets": ["minichange_free", "minichang"], "epochs": 1, "global_batch": 20, "rates": RATES}
ENDPOINT = {"kind": "endpoint", "url": "ftp://x", "model": "m"}
PAINTER = {"kind": "instruct_pix2pix", "model": "models/ip2p"}
WRITTEN = "augment.made.root: data/01_raw/made is written anew, and"
SEVERAL: dict[str, tuple[dict[str, Any], list[str]]] = {
    "faults of several sections": (
        {"train.epochs": -1, "predict.limits": 0, "predict.limit": REMOVED, "paths.clean": 3, "models.difference": {}},
        [
            "train.epochs: Input should be greater than 0 (found -1)",
            "predict.limit: missing",
            "predict.limits: unknown key; did you mean 'lim",
            "paths.clean: Input is not a valid path",
            "models.difference.family: missing",
        ],
    ),
    "a family's own rules": (
        {
            "models.m3diff.module": {"kind": "mdp"},
            "models.onediff.lora.rank": -1,
            "models.no_module.rates.module": 0.1,
            "models.other": M3DIFF | {"module": {"kind": "difference", "init_gains": 1}},
        },
        [
            "models.m3diff.module.kind: Input should be 'difference' (found 'mdp')",
            "models.onediff.lora: rank must be 0 or more, found -1",
            "models.no_module: rates: module",
            "models.other.module.init_gains: unknown key; did you mean 'init_gain'?",
        ],
    ),
    "layers beyond the base's vision encoder": (
        {"models.m3diff.module.vision_feature_layers": [5]},
        ["models.m3diff: module.vision_feature_layers: 5 lies beyond the 4 layers of the vision encoder"],
    ),
    "folders that are one or inside another": (
        {EXTRA: INGESTED | {"root": "data/01_raw/minichange/extra"}, "paths.mixture": "data/02_records"}
        | {"ingest.datasets.same": INGESTED | {"root": "data/x/../01_raw/minichange"}, "paths.report": "data"},
        [
            f"{EXTRA}.root: data/01_raw/minichange/extra overlaps {MINE}.root (data/01_raw/minichange); give each",
            f"ingest.datasets.same.root: data/x/../01_raw/minichange overlaps {MINE}.root",
            f"ingest.datasets.same.root: data/x/../01_raw/minichange overlaps {EXTRA}.root",
            *(f"paths.report: data overlaps ingest.datasets.{name}.root" for name in EMBEDDED["ingest"]["datasets"]),
            *(f"paths.report: data overlaps ingest.datasets.{name}.root" for name in ("extra", "same")),
            *(f"paths.report: data overlaps paths.{name} (data/0" for name in EMBEDDED["paths"] if name != "report"),
            "paths.mixture: data/02_records overlaps paths.records",
        ],
    ),
    **{
        f"a made dataset {where} its source": (
            made("made", source=source("minichange", root)) | {EXTRA: INGESTED | {"root": "x"}},
            [f"{WRITTEN} its source is in {root}; name another"],
        )
        for where, root in (("over", "data/01_raw/made"), ("in", "data/01_raw"), ("around", "data/01_raw/made/a"))
    },
    "a made dataset over what another entry reads": (
        made("made")
        | made(
            "second", source=source("magicbrush", "data/01_raw/made"), editor=PAINTER | {"model": "data/01_raw/made/a"}
        )
        | made("third", source=INGESTED, editor=PAINTER),
        [f"{WRITTEN} augment.second's source is in data/01_raw/made"]
        + [f"{WRITTEN} augment.second's model is in data/01_raw/made"],
    ),
    "parts of made datasets": (
        made("made", edits=0, editor={"kind": "drawn", "steps": 3}, writer=ENDPOINT) | {"augment.second": NEIGHBOURS},
        [
            "augment.made.edits: Input should be greater than or equal to 1 (found 0)",
            "augment.made.editor.steps: unknown key; known keys: kind",
            "augment.made.writer.url: expected http://... or https://..., up to and with /v1, found 'ftp://x'",
            "augment.second.features.model: missing",
            "augment.second.features.kind: Input should be 'encoder' or 'clip' (found 'cilp')",
            "augment.second.band: expected two numbers of -1 to 1, the lower first, found [0.9, 0.7]",
            "augment.second.source: missing; add it as in profiles/embedded.yaml",
            "augment.second.writer: missing",
        ],
    ),
    "a gate by what reads captions, on a dataset without a grammar": (
        {
            "ingest.datasets": {"birds": {"reader": "birds_to_words", "root": "data/01_raw/birds"}},
            "synthesize": {},
            "promote.protocol": "birds/test",
            "promote.metric": "change_exact_accuracy",
            "promote.guards": {"no_change_recall": 0.1, "CIDEr": 0.1},
        },
        ["promote.metric: expected one of BLEU-1", "promote.guards.no_change_recall: expected one of BLEU-1"],
    ),
    "the batches of an alignment": (
        {"train.model": "onediff", "models.onediff.align": ALIGN},
        [
            "models.onediff.align.datasets: did you mean 'minichange'?",
            "models.onediff.align.global_batch: must be a multiple of compute.micro_batch 8 x 2 worker(s) = 16",
        ],
    ),
    "a batch that does not divide in one process": (
        {"compute.micro_batch": 3, "compute.workers": 0},
        ["train.global_batch: must be a multiple of compute.micro_batch 3 x 1 worker(s) = 3 (found 16)"],
    ),
    "the best checkpoint of none captioned, without validation pairs": (
        {"train.export": "best", "compute.caption_val_pairs": 0}
        | {f"ingest.datasets.{name}.train_on": ["train", "val"] for name in EMBEDDED["ingest"]["datasets"]},
        [
            "train.export: best is the checkpoint with the highest CIDEr, but compute.caption_val_pairs is 0, so none",
            "train.export: best is the checkpoint with the highest CIDEr on validation pairs, but every dataset's",
        ],
    ),
}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
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
    assert first == f"{path}: {len(lines)} fault(s)"
    assert all(line.startswith("  ") for line in lines)
    return [line.strip() for line in lines]


@pytest.mark.parametrize(
    ("place", "value", "fault"), VALUES, ids=lambda value: "removed" if value is REMOVED else str(value)[:24]
)
def test_a_wrong_value_is_named_with_its_place_its_rule_and_the_value(place, value, fault, write):
    changes = {place: value} | ({"synthesize": {}} if place == "ingest.datasets" else {})
    made = {"ingest.datasets.made": INGESTED} if place == "augment.made" else {}
    found = faults_of(write(changes | made))
    named = [line for line in found if line.startswith(place) and f": {fault}" in line]
    assert len(named) == 1, found
    assert all(line in named or line.startswith(("promote.", place)) for line in found), found


@pytest.mark.fault("m5")
@pytest.mark.parametrize("name", SEVERAL)
def test_every_fault_of_a_wrong_file_is_said_at_once(name, write):
    changes, expected = SEVERAL[name]
    path = write(changes)
    start = time.process_time()
    found = faults_of(path)
    assert time.process_time() - start < 1
    for line in expected:
        assert any(fault.startswith(line) for fault in found), f"{line!r} is not said in {found}"
    assert len(found) == len(expected), found


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


def test_a_file_that_is_missing_no_mapping_or_has_a_key_twice_says_so(tmp_path):
    path = tmp_path / "params.yaml"
    with pytest.raises(ParamsError, match="no such file; run from the project's root, pass --params"):
        load_params(path)
    texts = {"a: [1": "not valid YAML", "- 1": "expected sections, found list", "": "expected sections, found nothing"}
    for text, words in texts.items():
        path.write_text(text)
        with pytest.raises(ParamsError, match=words):
            load_params(path)
    text = (REPOSITORY / "profiles" / "embedded.yaml").read_text()
    path.write_text(text.replace("  epochs: 2.7\n", "  epochs: 2.7\n  epochs: 0\n"))
    line = text.split("\n").index("  epochs: 2.7") + 2
    with pytest.raises(ParamsError, match=rf"(?s)epochs: is written twice; remove one.*line {line}, "):
        load_params(path)


def test_a_made_dataset_is_passed_on_under_the_licence_of_what_it_is_made_of(write):
    first = made("first", source=source("emu_edit"), editor=PAINTER)
    second = made("made", source=INGESTED | {"root": "data/01_raw/first"}, editor=PAINTER)
    own = {"ingest.datasets.own": INGESTED | {"root": "data/01_raw/own"}}
    entries = licensed(load_params(write(first | second | own)))
    embedded = dict.fromkeys(EMBEDDED["ingest"]["datasets"], "minichange")
    wanted = embedded | {"first": "emu_edit", "made": "emu_edit", "own": "pairs"}
    assert {name: entry.reader for name, entry in entries.items()} == wanted
    assert entries["made"].root == Path("data/01_raw/made"), "all else is the dataset's own"


def test_a_section_refuses_every_change_and_can_be_sent_to_another_process():
    params = load_params(Path("profiles/paper.yaml"))
    with pytest.raises(ValidationError, match="frozen"):
        params.train.epochs = 3
    assert pickle.loads(pickle.dumps(params)) == params


def test_what_is_not_there_or_cannot_be_read_is_left_to_the_stage_and_what_does_not_train_need_not_fit(write, tmp_path):
    absent = {"train.base": "models/none", "convert.questions": "none.yaml", "ingest.datasets.x": OMNIDIFF}
    none = dict.fromkeys(("compute.val_pairs", "compute.caption_val_pairs", "predict.limit", "compute.max_failures"), 0)
    deep = M3DIFF | {"module": M3DIFF["module"] | {"vision_feature_layers": [9]}}
    for changes in (absent, none, {"models.deep": deep}):
        assert isinstance(load_params(write(changes)), Params)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        load_params(write({"train.base": str(tmp_path)}))
    for text in ("a: [", "- a list"):
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


def test_every_path_that_is_missing_is_named_at_once_with_its_remedy(write):
    gone = {"ingest.datasets.minichange.root": "gone", "synthesize.minichange.root": "gone"}
    gone |= {EXTRA: {"reader": "pairs", "root": "none"}, "train.base": "models/llava-1.5-7b-hf"}
    with pytest.raises(ParamsError) as caught:
        check_paths(load_params(write(gone)), "ingest@minichange", "ingest@extra", "train")
    assert str(caught.value).split("\n") == [
        "3 path(s) of the parameters are missing",
        f"  {MINE}.root: gone is not there; `m3diff synthesize minichange`",
        f"  {EXTRA}.root: none is not there; fetch the dataset or correct the path",
        "  train.base: models/llava-1.5-7b-hf/config.json is not there; fetch the base model (`hf download "
        "OWNER/llava-1.5-7b-hf --local-dir models/llava-1.5-7b-hf`) or correct the path",
    ]


@pytest.mark.parametrize(("module", "missing"), [({}, 2), ({"vdm": {}}, 0)], ids=["new", "trained"])
def test_the_bert_that_a_new_module_starts_as_is_asked_for_before_anything_runs(module, missing, write, tmp_path):
    base = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}} | module
    changes = {"train.model": "onediff_paper", "models.onediff_paper.module.start": "bert"}
    params = load_params(write(changes | {"train.base": str(tmp_path)}))
    (tmp_path / "config.json").write_text(json.dumps(base))
    found = absent_paths(params, "train")
    names = ["bert/config.json", "bert/model.safetensors"]
    assert [str(path.relative_to(tmp_path)) for _, path, _ in found] == names[:missing]
    assert all(remedy == "copy it from bert-base-uncased, or set module.start to random" for *_, remedy in found)
