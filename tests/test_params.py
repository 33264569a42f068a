"""Parameters: valid files load as typed, frozen sections. For invalid files, all faults are reported before a run."""

import copy
import gc
import json
import math
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticUndefined

from m3diff.records.errors import Fault
from m3diff.settings import load
from m3diff.settings.load import load_params
from m3diff.settings.rules import check_paths, entries_by_original_reader, faults_of_inputs, missing_inputs
from m3diff.settings.section import ParamsError, Section
from m3diff.settings.tree import Params
from m3diff.stages.convert.params import COUPLES_TASK
from m3diff.stages.ingest.params import HOW_TO_TEST
from m3diff.stages.train.params import Train
from tests.errors import Message, raises
from tests.toy import REPOSITORY

EMBEDDED = yaml.safe_load((REPOSITORY / "params.yaml").read_text())  # the complete embedded profile
REMOVED = object()

MADE_OPTIONS = {"manifest": "pairs.jsonl"}
INGESTED = {"reader": "pairs", "root": "data/01_raw/made", "options": MADE_OPTIONS}
EDITS = {"kind": "edits", "root": "data/01_raw/made", "seed": 1, "edits": 2, "paraphrases": {"test": 4}}
EDITS |= {"source": {"reader": "minichange", "root": "data/01_raw/minichange"}}
EDITS |= {"editor": {"kind": "drawn"}, "writer": {"kind": "grammar"}}
NEIGHBOURS = {"kind": "neighbours", "root": "data/01_raw/second", "seed": 1, "features": {"kind": "cilp"}}
NEIGHBOURS |= {"band": [0.9, 0.7], "candidates": 3, "max_text_similarity": 0.7, "references": 1}
OMNIDIFF = {"reader": "omnidiff", "root": "data/01_raw/omnidiff"}
M3DIFF = EMBEDDED["models"]["m3diff"]
MINICHANGE = EMBEDDED["synthesize"]["minichange"]
FAMILY_NAMES = ["auto", "blip2idc", "m3diff", "onediff"]
FAMILY_PARTS = ["vision", "module", "projector", "llm"]
ALIGN_OF_A_DECODER = {"datasets": ["minichange"], "epochs": 1, "global_batch": 16, "rates": {"decoder": 0.1}}
EXTRA = "ingest.datasets.extra"
MINE = "ingest.datasets.minichange"
OF_IMAGES = "ingest.datasets.minichange_images"
PARTS = ["omnidiff_real", "omnidiff_render"]


def wrong(rule: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """Return the fault of a value that breaks one of pydantic's rules."""
    return "wrong_value", {"rule": rule} | fields


def unknown(code: str, nearest: str | None) -> tuple[str, dict[str, Any]]:
    """Return a fault with this code that suggests this name."""
    return f"unknown_{code}", {"nearest": nearest}


VALUES: list[tuple[str, Any, tuple[str, dict[str, Any]]]] = [
    ("train.epoch", 5, unknown("key", "epochs")),
    ("train.base", REMOVED, ("missing_key", {})),
    ("compute.workers", True, wrong("number", value=True, found="true")),
    ("train.epochs", 0, wrong("greater_than", value=0)),
    ("train.epochs", math.inf, wrong("finite_number", value=math.inf)),
    ("train.warmup_share", 1.5, wrong("less_than_equal", value=1.5)),
    ("serve.batch_pairs", 0, wrong("greater_than_equal", value=0)),
    ("promote.confidence", 1.0, wrong("less_than", value=1.0)),
    ("promote.guards.no_change_recall", -0.1, wrong("greater_than_equal", value=-0.1)),
    ("train.precision", "fp16", wrong("literal_error", value="fp16", found="'fp16'")),
    ("evaluate.metrics", [], wrong("too_short", value=[])),
    ("register.model_name", "team/m3diff:1.5", wrong("string_pattern_mismatch")),
    ("models.m3diff.family", "m3dif", ("unknown_name", {"nearest": "m3diff", "names": FAMILY_NAMES})),
    ("models.m3diff.module.vision_feature_layer", [4], unknown("key", "vision_feature_layers")),
    ("models.m3diff.delays", {"modul": 0.2}, ("unknown_part", {"nearest": "module", "family": "m3diff"})),
    ("models.m3diff.rates", {"visoin": 0.1}, ("unknown_part", {"nearest": "vision", "names": sorted(FAMILY_PARTS)})),
    ("models.onediff.align", ALIGN_OF_A_DECODER, ("unknown_part", {"nearest": None, "value": "decoder"})),
    ("models.difference.module.heads", 4, unknown("key", None)),
    (f"{MINE}.train_on", ["train", "test"], ("test_trains", {"value": ["train", "test"]})),
    (f"{MINE}.train_on", ["val"], ("val_trains_alone", {"value": ["val"]})),
    ("ingest.datasets", {}, wrong("too_short", value={})),
    ("augment.made", EDITS | {"kind": "edit"}, ("broken_rule", {"rule": "union_tag_invalid"})),
    # one value against others
    ("train.model", "m3dif", unknown("model", "m3diff")),
    (EXTRA, OMNIDIFF | {"reader": "omnidif"}, unknown("name", "omnidiff")),
    ("augment.made", EDITS | {"source": {"reader": "minichang", "root": "x"}}, unknown("name", "minichange")),
    (EXTRA, OMNIDIFF | {"options": {"manifst": "a"}}, unknown("key", "manifest")),
    (EXTRA, OMNIDIFF | {"options": {"manifest": 3}}, wrong("string_type", value=3)),
    (EXTRA, OMNIDIFF | {"expected_pairs": "published"}, ("counts_of_other_names", {"names": PARTS})),
    (
        EXTRA,
        {"reader": "magicbrush", "root": "x", "train_on": ["train", "val"]},
        ("split_never_trains", {"names": ["val"]}),
    ),
    (f"{MINE}.expected_pairs", "published", ("no_published_counts", {"value": "minichange"})),
    ("ingest.datasets.my/pairs", OMNIDIFF, wrong("string_pattern_mismatch", value="my/pairs")),
    ("synthesize.minichang", MINICHANGE, ("entry_not_ingested", {})),
    ("synthesize.minichange.root", "x", ("generated_elsewhere", {"expected": Path("data/01_raw/minichange")})),
    ("augment.other", EDITS, ("entry_not_ingested", {})),
    ("augment.minichange", EDITS, ("other_dataset_ingested", {"dataset": "minichange", "manifest": "pairs.jsonl"})),
    ("convert.sources.minichang", {}, unknown("dataset", "minichange")),
    ("convert.sources.minichange", {"task": "diference"}, ("task_without_questions", {"nearest": "difference"})),
    ("evaluate.metrics", ["CIDEr", "METEOR", "CIDer"], unknown("name", "CIDEr")),
    ("promote.protocol", "minichange/totl", unknown("protocol", "minichange/total")),
    ("promote.metric", "false_no_change", ("uncomputed_metric", {"nearest": None})),
    ("train.global_batch", 24, ("indivisible_batch", {"value": 24, "micro_batch": 8, "workers": 2, "divisor": 16})),
    ("compute.gpu_kind", "H100-90GB", unknown("name", "H100-80GB")),
]
"""Key of a wrong value, the value, and the fault, at this key or below it. Of a gate some have a second fault."""


def made_dataset(name: str, where: str = "", **changes: Any) -> dict[str, Any]:
    root = {"root": where or f"data/01_raw/{name}"}
    return {f"ingest.datasets.{name}": INGESTED | root, f"augment.{name}": EDITS | root | changes}


def source(reader: str, root: str = "x", **settings: Any) -> dict[str, Any]:
    return {"reader": reader, "root": root} | settings


RATES = {"vision": None, "projector": 0.001, "module": 0.001, "llm": None}
ALIGN = {"datasets": ["minichange_free", "minichang"], "epochs": 1, "global_batch": 20, "rates": RATES}
ENDPOINT = {"kind": "endpoint", "url": "ftp://x", "model": "m"}
DATASETS = EMBEDDED["ingest"]["datasets"]
TRAINED = [name for name, entry in DATASETS.items() if entry.get("train_on") != []]
NO_GRAMMAR = Fault("settings.metrics_and_grammar_decide", protocol="birds/test")
PAINTER = {"kind": "instruct_pix2pix", "model": "models/ip2p"}
AUTO = {"family": "auto", "module": None, "rates": {"llm": 0.001}, "lora": {"rank": 2, "alpha": 4}}
Expected = tuple[str, str, dict[str, Any]]


def overlap(key: str, other_key: str) -> Expected:
    return key, "overlapping_folders", {"other_key": other_key}


def made_over(reading: str, kind: str, folder: str) -> Expected:
    fields = {"value": Path("data/01_raw/made"), "reading": reading, "kind": kind, "input": Path(folder)}
    return "augment.made.root", "made_over_an_input", fields


# By topic: changes of the embedded profile; and of each fault the key, the code, and fields
SEVERAL: dict[str, tuple[dict[str, Any], list[Expected]]] = {
    "faults of several sections": (
        {"train.epochs": -1, "predict.limits": 0, "train.base": REMOVED, "paths.clean": 3, "models.difference": {}},
        [
            ("train.epochs", "wrong_value", {"rule": "greater_than", "value": -1}),
            ("train.base", "missing_key", {}),
            ("predict.limits", "unknown_key", {"nearest": "limit"}),
            ("paths.clean", "wrong_value", {"rule": "path_type", "value": 3}),
            ("models.difference.family", "missing_key", {}),
        ],
    ),
    "a limit of losses without a retention dataset": (
        {"promote.retention": {"exact_match": 0.1}, f"{OF_IMAGES}.role": "task"},
        [("promote.retention", "no_retention_set", {})],
    ),
    "a limit of losses of a score that is not computed": (
        {"promote.retention": {"exact_match": 0.1, "exact_mach": 0.1, "change_type_accuracy": 0.1}},
        [
            ("promote.retention.exact_mach", "uncomputed_retention_score", {"nearest": "exact_match"}),
            ("promote.retention.change_type_accuracy", "uncomputed_retention_score", {}),
        ],
    ),
    "a gate on a retention dataset": (
        {"ingest.datasets.minichange.role": "retention"},
        [("promote.protocol", "gate_on_retention", {"value": "minichange/total"})],
    ),
    "two datasets of one folder and one reader": (
        {f"{OF_IMAGES}.reader": "minichange"},
        [overlap(f"{OF_IMAGES}.root", f"{MINE}.root")],
    ),
    "folders that are one or inside another": (
        {EXTRA: INGESTED | {"root": "data/01_raw/minichange/extra"}, "paths.mixture": "data/02_records"}
        | {"ingest.datasets.same": INGESTED | {"root": "data/x/../01_raw/minichange"}, "paths.report": "data"},
        [
            overlap(f"{EXTRA}.root", f"{MINE}.root"),
            overlap("ingest.datasets.same.root", f"{EXTRA}.root"),
            overlap(f"{EXTRA}.root", f"{OF_IMAGES}.root"),
            *(overlap("paths.report", f"ingest.datasets.{name}.root") for name in DATASETS),
            *(overlap("paths.report", f"ingest.datasets.{name}.root") for name in ("extra", "same")),
            *(overlap("paths.report", f"paths.{name}") for name in EMBEDDED["paths"] if name != "report"),
            overlap("paths.mixture", "paths.records"),
        ],
    ),
    "scratch in a folder that a stage writes": (
        {"compute.scratch": "data/02_records/runs"},
        [overlap("compute.scratch", "paths.records")],
    ),
    "recomputing activations of a family that cannot": (
        {"train.model": "other", "compute.activation_checkpointing": "full", "models.other": AUTO},
        [("compute.activation_checkpointing", "cannot_recompute_activations", {"family": "auto", "value": "full"})],
    ),
    **{
        f"a made dataset {where} its source": (
            made_dataset("made", source=source("minichange", root)) | {EXTRA: INGESTED | {"root": "x"}},
            [made_over("augment.made", "source", root)],
        )
        for where, root in (("over", "data/01_raw/made"), ("in", "data/01_raw"), ("around", "data/01_raw/made/a"))
    },
    "a made dataset over what another entry reads": (
        made_dataset("made")
        | made_dataset(
            "second", source=source("magicbrush", "data/01_raw/made"), editor=PAINTER | {"model": "data/01_raw/made/a"}
        )
        | made_dataset("third", source=INGESTED, editor=PAINTER),
        [
            made_over("augment.second", "source", "data/01_raw/made"),
            made_over("augment.second", "model", "data/01_raw/made/a"),
        ],
    ),
    "a key of an earlier release": (
        {"convert.references_per_pair": 2},
        [("convert.references_per_pair", "renamed_key", {"name": "references_per_question"})],
    ),
    "an option of an earlier release": (
        {"ingest.datasets.mine": {"reader": "pairs", "root": "x", "options": {"all_ask_what_changed": True}}},
        [("ingest.datasets.mine.options.all_ask_what_changed", "questions_are_read", {})],
    ),
    "parts of made datasets": (
        made_dataset("made", edits=0, editor={"kind": "drawn", "steps": 3}) | {"augment.second": NEIGHBOURS},
        [
            ("augment.made.edits", "wrong_value", {"rule": "greater_than_equal", "value": 0}),
            ("augment.made.editor.steps", "unknown_key", {"nearest": None, "names": ["kind"]}),
            ("augment.second.features.model", "missing_key", {}),
            ("augment.second.features.kind", "wrong_value", {"rule": "literal_error", "value": "cilp"}),
            ("augment.second.band", "cosines_do_not_rise", {"value": [0.9, 0.7]}),
            ("augment.second.source", "missing_key", {}),
            ("augment.second.writer", "missing_key", {}),
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
        [
            ("promote.metric", "uncomputed_metric", {"reason": NO_GRAMMAR}),
            ("promote.guards.no_change_recall", "uncomputed_guard", {"reason": NO_GRAMMAR}),
        ],
    ),
    "a gate by scores that only another protocol of the dataset has": (
        {
            "ingest.datasets": {"chats": {"reader": "changechat", "root": "data/01_raw/chats"}},
            "synthesize": {},
            "evaluate.metrics": ["CIDEr", "grid_cells"],
            "promote.protocol": "chats/binary",
            "promote.metric": "buildings_f1",
            "promote.guards": {"binary_recall": 0.1, "buildings_mae": 0.1},
        },
        [
            ("promote.metric", "uncomputed_metric", {"value": "buildings_f1"}),
            ("promote.guards.buildings_mae", "uncomputed_guard", {"value": "buildings_mae"}),
        ],
    ),
    "the batches of an alignment": (
        {"train.model": "onediff", "models.onediff.align": ALIGN},
        [
            ("models.onediff.align.datasets", "untrained_dataset_in_alignment", {"nearest": "minichange"}),
            ("models.onediff.align.global_batch", "indivisible_batch", {"value": 20, "divisor": 16}),
        ],
    ),
    "an alignment on all datasets that train": (
        {"train.model": "onediff", "models.onediff.align": ALIGN | {"datasets": TRAINED, "global_batch": 16}},
        [("models.onediff.align.datasets", "nothing_left_to_fine_tune", {"names": TRAINED})],
    ),
    "a generator whose reader generates nothing": (
        {f"{MINE}.reader": "omnidiff", "promote.protocol": "minichange_free/total"},
        [("synthesize.minichange", "reader_cannot_generate", {"value": "omnidiff", "names": ["minichange"]})],
    ),
    **{
        f"a made dataset that is ingested from another {part}": (
            made_dataset("made") | {f"ingest.datasets.made.{key}": value},
            [("augment.made", "other_dataset_ingested", {"dataset": "made", "root": Path("data/01_raw/made")})],
        )
        for part, key, value in (
            ("folder", "root", "data/01_raw/other"),
            ("file", "options", {"manifest": "other.jsonl"}),
        )
    },
    "the drawn editor on photographs": (
        made_dataset("made", source=source("omnidiff")),
        [("augment.made.editor.kind", "drawn_editor_of_pictures", {"reader": "omnidiff"})],
    ),
    "a batch that does not divide in one process": (
        {"compute.micro_batch": 3, "compute.workers": 0},
        [("train.global_batch", "indivisible_batch", {"value": 16, "micro_batch": 3, "workers": 1, "divisor": 3})],
    ),
    "the best checkpoint of none captioned, without validation pairs": (
        {"train.export": "best", "compute.caption_val_pairs": 0}
        | {f"ingest.datasets.{name}.train_on": ["train", "val"] for name in TRAINED},  # the other one is for retention
        [
            ("train.export", "best_without_captions", {}),
            ("train.export", "best_without_validation_pairs", {}),
        ],
    ),
}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    values = copy.deepcopy(EMBEDDED)
    for key, value in changes.items():
        section = values
        *outer_keys, inner_key = key.split(".")
        for outer_key in outer_keys:
            section = section[outer_key]
        if value is REMOVED:
            del section[inner_key]
        else:
            section[inner_key] = value
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


def sections(base: type[Section] = Section) -> list[type[Section]]:
    """Return every settings class that a module defines. Classes from `create_model` are left out."""
    defined = []
    for section in base.__subclasses__():
        if getattr(sys.modules[section.__module__], section.__name__, None) is section:
            defined += [section, *sections(section)]
    return defined


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_every_field_of_a_section_has_a_description(section: type[Section]):
    assert [name for name in section.model_fields if name not in section.field_descriptions()] == []


@pytest.mark.parametrize("section", sections(), ids=lambda section: section.__name__)
def test_the_default_of_every_field_keeps_the_rules_of_the_field(section: type[Section]):
    for name, field in section.model_fields.items():
        if field.default is not PydanticUndefined and field.metadata:
            rules: TypeAdapter[Any] = TypeAdapter(Annotated[field.annotation, *field.metadata])
            assert rules.validate_python(field.default) == field.default, name


def test_the_json_schema_of_a_section_has_the_descriptions():
    properties = Train.model_json_schema()["properties"]
    assert properties["epochs"]["description"].endswith("passes over the training mixture. Fractions are allowed.")
    assert [name for name, field in properties.items() if not field.get("description")] == []


def faults_of(path: Path) -> list[Fault]:
    with raises(ParamsError, "settings.faults", path=path) as caught:
        load_params(path)
    assert caught.value.fields["count"] == len(caught.value.fields["faults"])
    return caught.value.fields["faults"]


def is_fault(fault: Fault, key: str, code: str, fields: dict[str, Any]) -> bool:
    return fault.code == f"settings.{code}" and {"key": key, **fields}.items() <= fault.fields.items()


def is_at_or_below(key: str, fault: Fault) -> bool:
    return f"{fault.fields['key']}.".startswith(f"{key}.")


@pytest.mark.parametrize(
    ("key", "value", "expected"), VALUES, ids=lambda value: "removed" if value is REMOVED else str(value)[:24]
)
def test_a_wrong_value_is_reported_with_its_key_the_rule_and_the_value(key, value, expected, write):
    changes = {key: value} | ({"synthesize": {}} if key == "ingest.datasets" else {})
    ingested = {"ingest.datasets.made": INGESTED} if key == "augment.made" else {}
    faults = faults_of(write(changes | ingested))
    (fault,) = [fault for fault in faults if is_at_or_below(key, fault)]
    code, fields = expected
    assert fault.code == f"settings.{code}"
    assert {name: fault.fields.get(name) for name in fields} == fields
    assert all(each_fault is fault or each_fault.fields["key"].startswith("promote.") for each_fault in faults), faults


@pytest.mark.fault("m5")
@pytest.mark.parametrize("topic", SEVERAL)
def test_all_faults_of_a_file_are_reported_together(topic, write):
    changes, expected = SEVERAL[topic]
    path = write(changes)
    faults_of(path)  # imports of the first call are not what is timed
    gc.disable()  # a collection of the objects that other tests left takes seconds
    try:
        start = time.process_time()
        faults = faults_of(path)
        seconds = time.process_time() - start
    finally:
        gc.enable()
    assert seconds < 1
    for fault_of_topic in expected:
        matching = [fault for fault in faults if is_fault(fault, *fault_of_topic)]
        assert len(matching) == 1, f"{fault_of_topic} is not one of {faults}"
    assert len(faults) == len(expected), faults


# Faults of other packages, whose codes are theirs, and the keys that the faults are at
FAULTS_OF_OTHERS = {
    "a family's own rules": (
        {
            "models.m3diff.module": {"kind": "mdp"},
            "models.onediff.lora.rank": -1,
            "models.no_module.rates.module": 0.1,
            "models.other": M3DIFF | {"module": {"kind": "difference", "init_gains": 1}},
        },
        ["models.m3diff.module.kind", "models.no_module", "models.onediff.lora", "models.other.module.init_gains"],
    ),
    "a layer beyond the base's vision encoder": (
        {"models.m3diff.module.vision_feature_layers": [5]},
        ["models.m3diff"],
    ),
    "the address of an endpoint": (made_dataset("made", writer=ENDPOINT), ["augment.made.writer.url"]),
}


def test_two_datasets_may_read_one_folder_with_different_options(write):
    entry = {"reader": "nlvr2", "root": "data/01_raw/nlvr2"}
    questions = entry | {"options": {"questions": True}}
    params = load_params(write({"ingest.datasets.captions": entry, "ingest.datasets.questions": questions}))
    assert params.ingest.datasets["captions"].root == params.ingest.datasets["questions"].root


@pytest.mark.parametrize("topic", FAULTS_OF_OTHERS)
def test_a_fault_of_another_package_gets_its_key(topic, write):
    changes, expected_keys = FAULTS_OF_OTHERS[topic]
    keys = sorted(fault.fields["key"] for fault in faults_of(write(changes)))
    assert len(keys) == len(expected_keys)
    for key, expected_key in zip(keys, expected_keys, strict=True):
        assert f"{key}.".startswith(f"{expected_key}.")


def test_an_error_of_parameters_survives_pickle(write):
    with pytest.raises(ParamsError) as caught:
        load_params(write(SEVERAL["faults of several sections"][0]))
    assert pickle.loads(pickle.dumps(caught.value)).fault == caught.value.fault


def test_the_same_fault_is_reported_once(write, monkeypatch):
    monkeypatch.setattr(load, "PARAMS_RULES", (one_fault, one_fault))
    assert faults_of(write({})) == [Fault("settings.entry_not_ingested", key="train.model")]


def one_fault(params: Params) -> Iterator[Fault]:
    yield Fault("settings.entry_not_ingested", key="train.model")


# A program that prints its exit code, its seconds of processor time and the packages that it loaded
TIMED = """
import json, sys, time
start = time.process_time()
{statements}
print(json.dumps([code, time.process_time() - start, sorted({{name.split('.')[0] for name in sys.modules}})]))
"""
# Third-party packages that every command needs
LIGHT_IMPORTS = "import numpy, pyarrow, pydantic, yaml; code = 0"


def test_a_wrong_file_is_refused_at_once_without_heavy_imports(write):
    path = write({"train.epochs": -1, "models.m3diff.lora.rank": -1})
    refusal = f"from m3diff.__main__ import main; code = main(['--params', {str(path)!r}, 'train'])"
    refusal_seconds = []
    import_seconds = []
    for _ in range(3):  # beside other tests, a process may get a core that is shared with another one
        exit_code, seconds, loaded, errors = run_timed(refusal)
        refusal_seconds.append(seconds)
        import_seconds.append(run_timed(LIGHT_IMPORTS)[1])
    assert exit_code == 2
    assert Message("settings.faults", path=path, count=2).in_text(errors)
    heavy = {"torch", "transformers", "polars", "pandas", "mlflow", "pycocoevalcap", "ray", "ruamel"}
    assert heavy.isdisjoint(loaded)
    # 0.50 s and 0.22 s on an idle core; the ratio holds on slower and on busy machines
    assert min(refusal_seconds) < 5 * min(import_seconds)


def run_timed(statements: str) -> tuple[int, float, list[str], str]:
    """Run `statements`, which set `code`, in a new process.

    Return the code, the seconds of processor time, the packages loaded and the text on standard error.
    """
    program = [sys.executable, "-c", TIMED.format(statements=statements)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    return *json.loads(done.stdout), done.stderr


def test_a_missing_file_is_refused(tmp_path):
    path = tmp_path / "params.yaml"
    with raises(ParamsError, "settings.no_file", path=path):
        load_params(path)


@pytest.mark.parametrize(
    ("text", "code", "fields"),
    [
        ("a: [1", "not_yaml", {}),
        ("{[1]: 2}", "not_yaml", {}),
        ("a: b: c\t# a tab that indents nothing", "not_yaml", {}),
        ("- 1", "no_sections", {"kind": "list"}),
        ("", "empty_file", {}),
    ],
)
def test_a_file_without_sections_is_refused(text, code, fields, tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with raises(ParamsError, f"settings.{code}", path=path, **fields):
        load_params(path)


def test_a_file_that_is_not_utf_8_is_refused(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_bytes(b"a: \xff\n")
    with raises(ParamsError, "settings.not_yaml", path=path):
        load_params(path)


def test_a_key_that_is_written_twice_is_refused_with_its_line(tmp_path):
    path = tmp_path / "params.yaml"
    text = (REPOSITORY / "params.yaml").read_text()
    path.write_text(text.replace("  epochs: 2.7\n", "  epochs: 2.7\n  epochs: 0\n"))
    line = text.split("\n").index("  epochs: 2.7") + 2
    with raises(ParamsError, "settings.key_written_twice", path=path, line=line, key="epochs"):
        load_params(path)


@pytest.mark.parametrize(
    ("naming", "code"),
    [
        ({"columns": {"split": "Teil"}}, "datasets.draw_beside_columns"),
        ({"splits": {"Training": "train"}}, "datasets.draw_beside_splits"),
        ({"manifest": {"train": "a.csv", "test": "b.csv"}}, "datasets.draw_beside_manifest"),
    ],
    ids=["a column", "names of splits", "files"],
)
def test_splits_that_are_named_and_drawn_are_refused_before_anything_runs(naming, code, write):
    dataset = {"reader": "pairs", "root": "data/01_raw/own", "options": {"split": {"test": 0.15}, **naming}}
    (fault,) = faults_of(write({"ingest.datasets.own": dataset}))
    assert is_at_or_below("ingest.datasets.own.options", fault)
    assert fault.code == code


def test_splits_that_are_drawn_in_place_of_a_column_are_accepted(write):
    options = {"columns": {"split": None, "before": "Vorher", "after": "Nachher"}, "split": {"test": 0.15}}
    dataset = {"reader": "pairs", "root": "data/01_raw/own", "options": options}
    assert "own" in load_params(write({"ingest.datasets.own": dataset})).ingest.datasets


@pytest.mark.parametrize(
    "text", ["train:\n  epochs: 1\n\tworkers: 2\n", "train:\n\tepochs: 1\n"], ids=["later line", "first line"]
)
def test_a_tab_that_indents_a_line_is_named_with_its_line(text, tmp_path):
    path = tmp_path / "params.yaml"
    path.write_text(text)
    line = text[: text.index("\t")].count("\n") + 1
    with raises(ParamsError, "settings.tab_indents", path=path, line=line):
        load_params(path)


def test_synthetic_data_has_the_licence_of_its_original_source(write):
    first_dataset = made_dataset("first", source=source("emu_edit"), editor=PAINTER)
    second_dataset = made_dataset("made", source=INGESTED | {"root": "data/01_raw/first"}, editor=PAINTER)
    own_dataset = {"ingest.datasets.own": INGESTED | {"root": "data/01_raw/own"}}
    entries = entries_by_original_reader(load_params(write(first_dataset | second_dataset | own_dataset)))
    embedded = {name: entry["reader"] for name, entry in DATASETS.items()}
    expected = embedded | {"first": "emu_edit", "made": "emu_edit", "own": "pairs"}
    assert {name: entry.reader for name, entry in entries.items()} == expected
    assert entries["made"].root == Path("data/01_raw/made"), "all else is the dataset's own"


def test_a_section_refuses_every_change():
    params = load_params(Path("profiles/paper.yaml"))
    with pytest.raises(ValidationError, match="frozen"):
        params.train.epochs = 3


def test_parameters_can_be_sent_to_another_process():
    params = load_params(Path("profiles/paper.yaml"))
    assert pickle.loads(pickle.dumps(params)) == params


ACCEPTED = {
    "files that are missing": {
        "train.base": "models/none",
        "convert.questions": "none.yaml",
        "ingest.datasets.x": OMNIDIFF,
    },
    "limits of 0": dict.fromkeys(
        ("compute.val_pairs", "compute.caption_val_pairs", "predict.limit", "compute.max_failures"), 0
    ),
    "the best checkpoint by captions of validation pairs": {"train.export": "best", "compute.caption_val_pairs": 1},
    "a family that cannot recompute activations, without recomputing": {
        "train.model": "other",
        "compute.activation_checkpointing": "none",
        "models.other": AUTO,
    },
    "a layer beyond the base of a model that does not train": {
        "models.deep": M3DIFF | {"module": M3DIFF["module"] | {"vision_feature_layers": [9]}}
    },
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_what_no_stage_is_held_up_by_is_no_fault(changes, write):
    assert isinstance(load_params(write(changes)), Params)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_base_with_a_broken_configuration_is_left_to_the_training(text, write, tmp_path):
    (tmp_path / "config.json").write_text(text)
    load_params(write({"train.base": str(tmp_path)}))


@pytest.mark.parametrize("text", ["a: [", "- a list"])
def test_a_broken_file_of_questions_is_left_to_convert(text, write, tmp_path):
    (tmp_path / "questions.yaml").write_text(text)
    load_params(write({"convert.questions": str(tmp_path / "questions.yaml")}))


def test_the_task_of_a_dataset_itself_must_have_questions(write, tmp_path):
    (tmp_path / "questions.yaml").write_text("edit:\n- What was done?\n")
    faults = faults_of(write({"convert.questions": str(tmp_path / "questions.yaml")}))
    names = ["minichange", "minichange_free", "minichange_shifted", "minichange_images"]
    for name, fault in zip(names, faults, strict=True):
        fields = {"value": "difference", "names": ["edit"], "path": tmp_path / "questions.yaml", "dataset": name}
        assert is_fault(fault, f"ingest.datasets.{name}.reader", "reader_without_questions", fields)


def test_a_dataset_of_couples_must_have_questions_about_couples(write, tmp_path):
    (tmp_path / "questions.yaml").write_text("difference:\n- What was changed?\n")
    sources = {"convert.sources.minichange": {"couple": "also"}}
    (fault,) = faults_of(write(sources | {"convert.questions": str(tmp_path / "questions.yaml")}))
    key = "convert.sources.minichange.couple"
    assert is_fault(fault, key, "task_without_questions", {"value": COUPLES_TASK, "names": ["difference"]})


def test_every_path_that_is_missing_is_named_at_once_with_its_remedy(write):
    gone = {"ingest.datasets.minichange.root": "gone", "synthesize.minichange.root": "gone"}
    gone |= {EXTRA: {"reader": "pairs", "root": "none"}, "train.base": "models/llava-1.5-7b-hf"}
    with raises(ParamsError, "settings.missing_paths", count=3) as caught:
        check_paths(load_params(write(gone)), "ingest@minichange", "ingest@extra", "train")
    generated, fetched, base = caught.value.fields["faults"]
    assert is_fault(generated, f"{MINE}.root", "dataset_not_made", {"command": "m3diff synthesize minichange"})
    assert is_fault(fetched, f"{EXTRA}.root", "no_dataset", {"path": Path("none")})
    folder = Path("models/llava-1.5-7b-hf")
    command = f"hf download OWNER/llava-1.5-7b-hf --local-dir {folder}"
    assert is_fault(base, "train.base", "no_base", {"path": folder / "config.json", "command": command})


def test_each_stage_that_reads_a_file_of_the_user_names_it_with_its_key(write):
    changes = made_dataset("made") | {"compute.spice_dir": "jars", "convert.questions": "mine.yaml"}
    params = load_params(write(changes))
    expected = {
        "augment@made": ("augment.made.source.root", "no_source", {"path": Path("data/01_raw/minichange")}),
        "ingest@made": (
            "ingest.datasets.made.root",
            "dataset_not_made",
            {"path": Path("data/01_raw/made"), "command": "m3diff augment made"},
        ),
        "convert": ("convert.questions", "no_questions", {"path": Path("mine.yaml")}),
        "evaluate": ("compute.spice_dir", "no_spice", {"path": Path("jars")}),
    }
    for stage, fault_of_stage in expected.items():
        (fault,) = faults_of_inputs(params, stage)
        assert is_fault(fault, *fault_of_stage), stage
    assert faults_of_inputs(params, "predict") == []
    assert faults_of_inputs(load_params(write({"compute.spice_dir": None})), "evaluate") == []


def test_the_key_of_a_wrong_name_is_the_name_itself(write):
    (fault,) = faults_of(write({"ingest.datasets.my/pairs": OMNIDIFF}))
    assert fault.fields["key"] == "ingest.datasets.my/pairs"


@pytest.mark.parametrize(("module", "missing"), [({}, 2), ({"vdm": {}}, 0)], ids=["new", "trained"])
def test_a_missing_bert_for_a_new_module_is_reported_before_anything_runs(module, missing, write, tmp_path):
    base = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}} | module
    changes = {"train.model": "onediff_paper", "models.onediff_paper.module.start": "bert"}
    params = load_params(write(changes | {"train.base": str(tmp_path)}))
    (tmp_path / "config.json").write_text(json.dumps(base))
    inputs = missing_inputs(params, "train")
    names = ["bert/config.json", "bert/model.safetensors"]
    assert [str(fault.fields["path"].relative_to(tmp_path)) for fault in inputs] == names[:missing]
    for fault in inputs:
        assert fault.code == "settings.incomplete_base"
        assert str(fault.fields["hint"])


OWN_DATASET = {"reader": "pairs", "root": "data/01_raw/fotos"}
NEVER_TESTED = {
    "every pair trains": ({"split": "train"}, "split", "no_split_of_test_pairs"),
    "every pair is val": ({"split": "val"}, "split", "no_split_of_test_pairs"),
    "no file of test pairs": ({"manifest": {"train": "a.csv"}}, "manifest", "no_file_of_test_pairs"),
}
GATE = {"promote.protocol": "fotos/test", "promote.guards": {}}


@pytest.mark.parametrize(("options", "option", "code"), NEVER_TESTED.values(), ids=NEVER_TESTED)
def test_a_gate_on_a_dataset_without_test_pairs_is_refused(options, option, code, write):
    (fault,) = faults_of(write({"ingest.datasets.fotos": OWN_DATASET | {"options": options}} | GATE))
    assert is_fault(fault, f"ingest.datasets.fotos.options.{option}", code, {"protocol": "fotos/test"})
    assert str(HOW_TO_TEST) in str(fault)


def test_a_gate_by_a_generated_dataset_without_test_scenes_is_refused(write):
    scenes = {"train": 10, "val": 1, "test": 0}
    (fault,) = faults_of(write({"synthesize.minichange.scenes": scenes}))
    assert is_fault(fault, "synthesize.minichange.scenes.test", "no_test_scenes", {"protocol": "minichange/total"})


@pytest.mark.parametrize(
    "options", [{"split": "test"}, {"split": {"test": 0.2}}, {"manifest": {"test": "a.csv"}}, {}], ids=str
)
def test_a_dataset_that_may_have_test_pairs_may_be_the_gates(options, write):
    assert load_params(write({"ingest.datasets.fotos": OWN_DATASET | {"options": options}} | GATE))


def test_a_dataset_that_only_trains_needs_no_test_pairs(write):
    assert load_params(write({"ingest.datasets.fotos": OWN_DATASET | {"options": {"split": "train"}}}))


@pytest.mark.parametrize("key", ["paths.base", "convert.questions", "synthesize"])
def test_a_key_that_dvc_needs_must_be_in_the_file_beside_dvc_yaml(key, write):
    """Elsewhere, the default is used."""
    path = write({key: REMOVED})
    assert load_params(path)
    (path.parent / "dvc.yaml").write_text((REPOSITORY / "dvc.yaml").read_text())
    assert faults_of(path) == [Fault("settings.no_key_for_dvc", key=key)]


@pytest.mark.parametrize("section", ["convert", "train", "pretrain"])
def test_zero_is_a_seed(section):
    settings = getattr(load_params(REPOSITORY / "params.yaml"), section)
    values = settings.model_dump() | {"seed": 0}
    assert type(settings).model_validate(values).seed == 0
