"""A shared folder does without the project what the project does with the checkpoint, for every family."""

import json
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load, load_file, save, save_file

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.commands.export.card import front_matter
from m3diff.commands.export.datasets import MixtureDataset
from m3diff.commands.export.families import SHARED, constants_of
from m3diff.commands.export.hub import export_hub
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Permission
from m3diff.images.open import load_image
from m3diff.models.checkpoint import MANIFEST, export_checkpoint, load_model, read_manifest, verify_manifest
from m3diff.models.processing import pad_prompts
from m3diff.records.errors import DataError, Fault, command_to_read_again, wording
from m3diff.records.files import sha256
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params
from tests.conftest import MadeOnce
from tests.errors import Message, raises
from tests.layouts import list_images, make_entry, uris_of, write_record_table
from tests.models.llava15 import write_llava15
from tests.tiny import (
    BASE,
    MDP,
    SEPARATE,
    colour_image,
    image_inputs,
    onediff_settings,
    pair_prompt,
    tiny_base,
    tiny_checkpoint,
    tiny_settings,
)
from tests.tiny_blip2 import blip2_settings, tiny_blip2
from tests.toy import REPOSITORY

QUESTION = "How many objects are new?"  # asked in training, and not the question of a model that names none
OTHER_QUESTION = "Which object is new?"
PAIRS = 4
EMBEDDED = REPOSITORY / "profiles/embedded.yaml"
MODULE = MDP | {"init_gain": 1.0}  # so that a tiny model says other tokens of images that are swapped
MAX_NEW_TOKENS = 8  # as use_hub.py asks for
CASES: dict[str, tuple[Any, Any]] = {
    "m3diff": (lambda folder: tiny_base(folder, seed=2), tiny_settings(MODULE)),
    "onediff on LLaVA-1.5": (write_llava15, onediff_settings(SEPARATE)),
    "onediff without a module on LLaVA-1.5": (write_llava15, onediff_settings(None)),
    "blip2idc with OPT": (tiny_blip2, blip2_settings()),
}


class Shared(NamedTuple):
    """A run, its model as a folder to share, and the test pairs."""

    name: str
    run: Params
    folder: Path
    pairs: list[tuple[str, str]]

    @property
    def family(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def reads_question(self) -> bool:
        return self.family != "blip2idc"

    @property
    def has_module(self) -> bool:
        return self.reads_question and "without" not in self.name


def changed(params: Params, section: str, **values: Any) -> Params:
    return params.model_copy(update={section: getattr(params, section).model_copy(update=values)})


def run_of(root: Path, base: Path, settings: Any) -> Params:
    """What the stages leave: a checkpoint, a mixture's report, records of test pairs and their predictions."""
    tiny_checkpoint(base, root / "model" / "checkpoint", settings, question=QUESTION)
    rows = [record(root / "images", number) for number in range(PAIRS)]
    write_records(root / "clean", rows)
    counts = {"pairs": {"train": 7, "val": 1, "test": PAIRS}, "samples": {"train": 1_234, "val": 1, "test": PAIRS}}
    write_json(root / "mixture" / "report.json", {"datasets": {"toy": counts}})
    paths = {name: root / name for name in ("mixture", "clean", "model", "predictions", "report")}
    run = changed(load_params(EMBEDDED), "ingest", datasets={"toy": make_entry("pairs", root)})
    run = changed(changed(run, "train", base=base), "predict", max_new_tokens=MAX_NEW_TOKENS)
    run = changed(run, "paths", **paths)
    captions = texts(run, generate_tokens(run, [tuple(uris_of(row)) for row in rows], QUESTION))
    predictions = [{"image_id": row["id"], "caption": text} for row, text in zip(rows, captions, strict=True)]
    write_json(root / "predictions" / "predictions.json", predictions)
    return run


def record(images: Path, number: int) -> dict[str, Any]:
    """A test pair; the first has no change."""
    images.mkdir(exist_ok=True)
    row: dict[str, Any] = {"id": f"toy/{number}", "dataset": "toy", "split": "test"}
    paths = (images / f"{number}a.png", images / f"{number}b.png")
    for number_of_side, path in enumerate(paths):
        colour_image(20 * number + number_of_side, (40, 30 + number)).save(path)
    row["images"] = list_images(*paths)
    return row | {"references": [f"reference {number}"], "change_types": ["color" if number else "none"]}


def write_records(folder: Path, rows: list[dict[str, Any]]) -> None:
    write_record_table(folder / "records", rows)


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


@cache
def trained(checkpoint: Path) -> tuple[Any, Any]:
    model, family = load_model(checkpoint)
    return model, family.load_processor(checkpoint)


def generate_tokens(run: Params, pairs: list[tuple[str, str]], question: str) -> list[list[int]]:
    """The project's own tokens of each pair, one pair at a time."""
    model, processor = trained(run.paths.model / "checkpoint")
    decoding = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "eos_token_id": processor.end_id}
    decoding |= {"pad_token_id": processor.pad_id}
    rows = []
    for before, after in pairs:
        images = [load_image(path) for path in (before, after)]
        inputs = pad_prompts([pair_prompt(processor, question)], processor.pad_id) | image_inputs(processor, [images])
        with torch.inference_mode():
            tokens = model.generate(**inputs, **decoding)[0, inputs["input_ids"].shape[1] :]
        rows.append([token for token in tokens.tolist() if token != processor.pad_id])
    return rows


def texts(run: Params, tokens: list[list[int]]) -> list[str]:
    tokenizer = trained(run.paths.model / "checkpoint")[1].tokenizer
    return [tokenizer.decode(row, skip_special_tokens=True).strip() for row in tokens]


def without_a_weight(folder: Path, part: str) -> Path:
    weights = load_file(folder / "model.safetensors")
    del weights[next(name for name in weights if part in name)]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def ask(tmp: Path, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What folders answer in an environment without the project and its packages (see use_hub.py)."""
    write_json(tmp / "requests.json", requests)
    left_out = ("PYTHONPATH", "PYTEST_CURRENT_TEST")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"HF_HOME": str(tmp / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("use_hub.py")
    command = [sys.executable, "-P", script, tmp / "requests.json", tmp / "answers.json"]
    done = subprocess.run(list(map(str, command)), cwd=tmp, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = read_json(tmp / "answers.json")
    assert {"m3diff", "peft", "ray", "mlflow", "pyarrow"} <= {*result["missing"]}
    return result["answers"]


def make_shared_models(folder: Path) -> None:
    """Write a shared model for each case, in a folder without dvc.lock, and pickle a description of each model."""
    models = {}
    for number, (name, (write_base, settings)) in enumerate(CASES.items()):
        root = folder / str(number)
        root.mkdir(parents=True)
        run = run_of(root, write_base(root / "base"), settings)
        with pytest.MonkeyPatch.context() as elsewhere:
            elsewhere.chdir(root)
            assert export_hub(run, root / "out" / "tiny-model") == []
        pairs = [(str(root / "images" / f"{n}a.png"), str(root / "images" / f"{n}b.png")) for n in range(PAIRS)]
        models[name] = Shared(name, run, root / "out" / "tiny-model", pairs)
    (folder / "models.pickle").write_bytes(pickle.dumps(models))


@pytest.fixture(scope="module")
def shared_models(made_once: MadeOnce) -> dict[str, Shared]:
    folder = made_once("shared-models", make_shared_models)
    return pickle.loads((folder / "models.pickle").read_bytes())


@pytest.fixture
def shared(shared_models: dict[str, Shared], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shared:
    monkeypatch.chdir(tmp_path)
    return shared_models["m3diff"]


@pytest.fixture(params=list(CASES))
def case(request: pytest.FixtureRequest, shared_models: dict[str, Shared]) -> Shared:
    return shared_models[request.param]


def chat(images: Any, question: str) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": question}]}]


def requests_of(case: Shared, tmp: Path) -> dict[str, dict[str, Any]]:
    """What each folder is asked."""
    again = str(tmp / "again")
    film = tmp / "film.png"
    film.write_bytes(b"\x1aE\xdf\xa3" + bytes(100))  # the beginning of a Matroska file
    block = tmp / "card.py"
    block.write_text(re.findall(r"```python\n(.*?)```", (case.folder / "README.md").read_text(), re.DOTALL)[0])
    requests: dict[str, dict[str, Any]] = {
        "all": {"images": case.pairs},
        "all, asked": {"images": case.pairs, "text": OTHER_QUESTION},
        "swapped": {"images": [pair[::-1] for pair in case.pairs], "return_tensors": "pt"},
        "saved": {"save": again},
        "saved, all": {"folder": again, "images": case.pairs},
        "saved, prompt": {"folder": again, "prompt": case.pairs[0]},
        "chats": {"chat": [chat(pair, OTHER_QUESTION) for pair in case.pairs]},
        "card": {"run": str(block)},
        "a film": {"images": [str(film), case.pairs[0][1]]},
    }
    if case.has_module:
        part = {"m3diff": "mdp", "onediff": "vdm"}[case.family]
        broken = without_a_weight(Path(shutil.copytree(case.folder, tmp / "broken")), part)
        requests["without a weight"] = {"folder": str(broken), "images": case.pairs}
    if case.name != "m3diff":
        return requests
    first_pair = case.pairs[0]
    pairs = case.pairs
    return requests | {
        "one": {"images": first_pair},
        "each asked": {"images": pairs, "text": [QUESTION, OTHER_QUESTION, OTHER_QUESTION, QUESTION]},
        "options that change nothing": {"images": first_pair, "videos": None, "padding": True, "truncation": False},
        "tensors": {"images": first_pair, "tensors": True},
        "a chat": {"chat": chat(first_pair, OTHER_QUESTION)},
        "a pipeline": {"pipeline": chat(first_pair, OTHER_QUESTION)},
        **{name: make_request(pairs) for name, (make_request, _) in (REFUSED | REFUSED_BY_TRANSFORMERS).items()},
    }


CHOICE = "'vision_feature_select_strategy' expected one of"
REFUSED: dict[str, tuple[Any, Fault]] = {
    "three": (
        lambda pairs: {"images": [*pairs[0], pairs[1][0]]},
        Fault("export.images_not_pairs", found="a list of 3"),
    ),
    "two questions": (
        lambda pairs: {"images": pairs, "text": [QUESTION] * 2},
        Fault("export.questions_do_not_match_pairs", value=2, expected=PAIRS),
    ),
    "a prompt": (
        lambda pairs: {"images": pairs[0], "text": "<image>What?"},
        Fault("export.mark_in_question", value="<image>What?"),
    ),
    "numpy": (
        lambda pairs: {"images": pairs[0], "return_tensors": "np"},
        Fault("export.other_tensors", value="np"),
    ),
    "a video": (
        lambda pairs: {"images": pairs[0], "videos": ["a.mp4"]},
        Fault("export.other_option", key="videos", value=["a.mp4"]),
    ),
    "a system's message": (
        lambda pairs: {"chat": [{"role": "system", "content": "Be brief."}, *chat(pairs[0], QUESTION)]},
        Fault("export.mark_in_question"),
    ),
    "a chat about one image": (
        lambda pairs: {"chat": chat(pairs[0][:1], QUESTION)},
        Fault("export.images_not_pairs"),
    ),
}
"""What an M3Diff's folder refuses, made of the pairs, and the fault, of which some fields may be left out."""

REFUSED_BY_TRANSFORMERS: dict[str, tuple[Any, str]] = {
    "stock": (lambda pairs: {"load": "LlavaOnevisionForConditionalGeneration"}, f"{CHOICE} ('default', 'full'), got m"),
    "untrusted": (lambda pairs: {"load": "AutoModelForImageTextToText"}, "trust_remote_code=True"),
}
"""What transformers refuses of an M3Diff's folder, made of the pairs, and a part of the error."""


@pytest.fixture(scope="module")
def answers(shared_models: dict[str, Shared], made_once: MadeOnce) -> dict[str, dict[str, Any]]:
    """What each folder answers in a bare environment, by the name of the request."""

    def make(tmp: Path) -> None:
        requests_of_all = []
        for name, case in shared_models.items():
            (tmp / name).mkdir(parents=True)
            requests = requests_of(case, tmp / name)
            requests_of_all += [
                (name, request, {"folder": str(case.folder)} | content) for request, content in requests.items()
            ]
        answers_by_case: dict[str, dict[str, Any]] = {name: {"at": tmp / name} for name in shared_models}
        for (name, request, _), answer in zip(
            requests_of_all, ask(tmp, [content for *_, content in requests_of_all]), strict=True
        ):
            answers_by_case[name][request] = answer
        (tmp / "answers.pickle").write_bytes(pickle.dumps(answers_by_case))

    return pickle.loads((made_once("answers-of-shared-models", make) / "answers.pickle").read_bytes())


def test_without_the_project_the_tokens_are_the_project_s(case, answers):
    tokens = generate_tokens(case.run, case.pairs, QUESTION)
    assert len({tuple(row) for row in tokens}) > 1, "tokens that are all alike would show no order"
    assert answers[case.name]["all"] == {"tokens": tokens}


def test_a_folder_that_transformers_saved_again_answers_the_same(case, answers):
    replies = answers[case.name]
    assert replies["saved"] == {}
    assert replies["saved, all"] == replies["all"]


def test_swapped_images_get_the_tokens_of_swapped_images(case, answers):
    replies = answers[case.name]
    assert replies["swapped"] == {"tokens": generate_tokens(case.run, [pair[::-1] for pair in case.pairs], QUESTION)}
    assert replies["swapped"] != replies["all"], "the order must show"


def test_a_prompt_has_the_inputs_that_the_model_takes(case, answers):
    prompt = answers[case.name]["saved, prompt"]
    processor = trained(case.run.paths.model / "checkpoint")[1]
    pair_inputs = ["batch_num_images", "image_sizes"] if case.has_module else []
    assert prompt["input_ids"] == [list(pair_prompt(processor, QUESTION))]
    assert prompt["inputs"] == sorted(["attention_mask", "input_ids", "pixel_values", *pair_inputs])


def test_a_question_is_read_or_refused_as_the_model_reads_one(case, answers):
    replies = answers[case.name]
    if case.reads_question:
        tokens = {"tokens": generate_tokens(case.run, case.pairs, OTHER_QUESTION)}
        assert replies["all, asked"] == tokens
        assert replies["chats"] == tokens
    else:
        message = Fault("export.no_question_read", value=OTHER_QUESTION)
        assert replies["all, asked"]["error"] == f"ValueFault: {message}"


def test_a_folder_without_a_weight_of_its_module_is_refused(case, answers):
    if case.has_module:
        reply = answers[case.name]["without a weight"]
        assert reply["code"] == "models.weights_missing"
        assert reply["fields"]["value"] == 1


def test_the_code_of_the_card_runs_as_it_is_printed(case, answers):
    predictions = read_json(case.run.paths.predictions / "predictions.json")
    captions = {row["image_id"]: row["caption"] for row in predictions}
    swapped = texts(case.run, generate_tokens(case.run, [case.pairs[1][::-1]], QUESTION))
    assert answers[case.name]["card"] == {"said": [captions["toy/1"], captions["toy/1"], *swapped]}
    card = (case.folder / "README.md").read_text()
    assert f'The model, in the run\'s predictions: "{captions["toy/1"]}"' in card


@pytest.fixture
def question_tokens(shared: Shared) -> dict[str, list[list[int]]]:
    """The project's own tokens by question, which differ."""
    tokens = {question: generate_tokens(shared.run, shared.pairs, question) for question in (QUESTION, OTHER_QUESTION)}
    assert tokens[QUESTION] != tokens[OTHER_QUESTION]
    return tokens


def test_each_pair_may_have_its_own_question(answers, question_tokens):
    default_tokens = question_tokens[QUESTION]
    other_tokens = question_tokens[OTHER_QUESTION]
    assert answers["m3diff"]["each asked"] == {
        "tokens": [default_tokens[0], other_tokens[1], other_tokens[2], default_tokens[3]]
    }


@pytest.mark.parametrize("request_name", ["one", "options that change nothing", "tensors"])
def test_one_pair_is_answered_alike_however_it_is_passed(request_name, answers, question_tokens):
    assert answers["m3diff"][request_name] == {"tokens": question_tokens[QUESTION][:1]}


def test_a_chat_is_answered_as_its_question(answers, question_tokens):
    assert answers["m3diff"]["a chat"] == {"tokens": question_tokens[OTHER_QUESTION][:1]}


def test_a_pipeline_of_transformers_is_answered_as_its_question(shared, answers, question_tokens):
    text = answers["m3diff"]["a pipeline"]["generated_text"].strip()
    assert text == texts(shared.run, question_tokens[OTHER_QUESTION])[0]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_answered_is_refused(name, answers):
    _, fault = REFUSED[name]
    reply = answers["m3diff"][name]
    assert reply["code"] == fault.code
    assert fault.fields.items() <= reply["fields"].items()


@pytest.mark.parametrize("name", [name for name, (_, fault) in REFUSED.items() if fault.fields])
def test_an_error_of_a_folder_has_its_whole_sentence_without_the_project(name, answers):
    _, fault = REFUSED[name]
    assert fault.code in wording()
    assert answers["m3diff"][name]["error"] == f"ValueFault: {fault}"


def test_an_unreadable_image_has_its_whole_sentence_without_the_project(case, answers):
    fault = Fault("images.video", path=str(answers[case.name]["at"] / "film.png"))
    assert answers[case.name]["a film"]["error"] == f"ImageError: {fault}"


def test_a_folder_has_the_wording_of_every_code_that_its_files_can_raise(case):
    constants = {text for path in case.folder.glob("*.py") for text in constants_of(path.read_text())}
    codes = constants & set(wording())
    copied = runpy.run_path(str(case.folder / "errors.py"))["wording"]()
    assert {"images.video", "images.damaged_jpeg", "export.images_not_pairs"} <= codes
    assert copied == {code: wording()[code] for code in codes}


@pytest.mark.parametrize("name", REFUSED_BY_TRANSFORMERS)
def test_what_transformers_cannot_load_it_refuses(name, answers):
    _, error = REFUSED_BY_TRANSFORMERS[name]
    assert error in answers["m3diff"][name]["error"]


def test_the_manifest_lists_every_file(case: Shared) -> None:
    manifest = verify_manifest(case.folder)
    assert manifest["trained_on"] == {"question": QUESTION}
    assert set(manifest["files"]) == {path.name for path in case.folder.iterdir()} - {"manifest.json"}


def test_the_weights_are_the_checkpoint_s(case: Shared) -> None:
    files = verify_manifest(case.folder)["files"]
    checkpoint_files = read_json(case.run.paths.model / "checkpoint" / "manifest.json")["files"]
    weights = [name for name in files if name.endswith(".safetensors")]
    assert weights
    assert {name: files[name] for name in weights} == {name: checkpoint_files[name] for name in weights}


def test_no_file_names_a_path_of_this_machine(case: Shared) -> None:
    files = [path for path in case.folder.iterdir() if str(REPOSITORY) in path.read_bytes().decode("latin-1")]
    assert files == []


def test_the_code_is_the_family_s_and_auto_map_names_its_classes(case: Shared) -> None:
    code = {path.stem for path in case.folder.glob("*.py")}
    expected = {"images", "colour", "jpeg", "contents", "errors", "sample", "prepared", "called", "processing"}
    expected.add(f"processing_{case.family}")
    config = read_json(case.folder / "config.json")
    if case.has_module:
        expected |= {"settings", "layers", "llava", f"{case.family}_model"}
        assert config["auto_map"]["AutoConfig"] == f"{case.family}_model.{SHARED[case.family].title}Config"
    else:
        assert "auto_map" not in config
    if case.family == "blip2idc":
        expected |= {"layers", "blip2idc_model"}
    assert code == expected


def test_the_card_cites_the_family_s_paper_and_says_how_it_is_used(case: Shared) -> None:
    front, text = card_of(case.folder)
    paper = {"m3diff": "2503.11093", "onediff": "2407.05645", "blip2idc": "2412.15939"}[case.family]
    assert re.findall(r"note = {arXiv:(.*)}", text) == [paper]
    assert ("a control without that module" in text) == ("without" in case.name)
    assert ("pipeline_tag" in front) == case.reads_question
    assert ("own classes refuse this folder" in text) == case.has_module


def card_of(folder: Path) -> tuple[dict[str, Any], str]:
    """Front matter and text of a folder's card."""
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


TAGS = "dvc.data dvc.val_data dvc.checkpoint dvc.code dvc.base dvc.metrics dvc.raw.toy git.commit dvc.lock.sha256"
LINEAGE = {tag: f"{number}" * 32 for number, tag in enumerate([*TAGS.split(), "test_set.sha256"])}
RAN = {"train": {"model": "mine", "seed": 7}, "models.mine": {"lora": {"rank": 2}}, "predict": {}}


BY_TYPE = {"color": {"pairs": 8, "exact_accuracy": 0.75}, "a type that no grammar reads": {"pairs": 2, "CIDEr": 1.0}}


def test_a_card_without_an_evaluation_says_so(shared):
    front, text = card_of(shared.folder)
    assert "## Scores\n\nNone: " in text
    assert "7 / 1 / 4 | 1,234 |" in text
    assert "base_model" not in front


KNOWN_BASE = Path("models/llava-onevision-qwen2-7b-ov-hf")


@pytest.fixture
def evaluated_run(shared: Shared, tmp_path: Path) -> Params:
    """The run with scores by three protocols of two datasets, from a published base."""
    total = {
        "pairs": 4,
        "published_pairs": 9,
        "CIDEr": 1.5,
        "SPICE": None,
        "absent": {"SPICE": "needs a jar"},
        "intervals": {"CIDEr": {"low": 1.25, "high": 1.75}},
        "change_exact_accuracy": 0.5,
    }
    protocols = {
        "toy/total": total | {"by_type": BY_TYPE},
        "toy/rest": total | {"CIDEr": 9.9},
        "other/all": {"pairs": 1000, "intervals": {}, "METEOR": 0.25},
    }
    write_json(tmp_path / "report" / "metrics.json", {"protocols": protocols})
    return changed(changed(shared.run, "paths", report=tmp_path / "report"), "train", base=KNOWN_BASE)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dvc.lock that names the checkpoint's lineage and the parameters of its training."""
    lock = SimpleNamespace(params=lambda datasets: RAN)

    def read_lineage(params: Params, read_lock: Any) -> dict[str, str]:
        assert isinstance(params, Params)
        assert read_lock is lock
        return LINEAGE | {"git.dirty": "true"}

    monkeypatch.setattr("m3diff.commands.export.card.Lock", lambda: lock)
    monkeypatch.setattr("m3diff.registry.lineage.read_lineage", read_lineage)


def test_scores_that_dvc_lock_does_not_trace_are_marked(evaluated_run, tmp_path):
    export_hub(evaluated_run, tmp_path / "out")
    _, text = card_of(tmp_path / "out")
    assert "**There is no record that these scores belong to these weights:** dvc.lock" in text


def test_a_card_names_a_published_base(evaluated_run, traced, tmp_path):
    export_hub(evaluated_run, tmp_path / "out")
    front, _ = card_of(tmp_path / "out")
    assert front["base_model"] == f"llava-hf/{KNOWN_BASE.name}"


def test_a_card_shows_the_scores_of_each_dataset_s_first_protocol(evaluated_run, traced, tmp_path):
    export_hub(evaluated_run, tmp_path / "out")
    _, text = card_of(tmp_path / "out")
    assert "| pairs | 4 of 9 that papers score | 1,000 |\n" in text
    assert "| CIDEr | 150.0 (125.0 to 175.0) | – |\n| METEOR | – | 25.0 |\n" in text
    assert "| change type | `toy/total` | `other/all` |\n|---|---|---|\n| color | 75 % of 8 | – |\n\n" in text


def test_a_card_names_the_scores_that_are_absent_with_the_reason(evaluated_run, traced, tmp_path):
    export_hub(evaluated_run, tmp_path / "out")
    _, text = card_of(tmp_path / "out")
    assert re.search(r"\nSPICE .*: needs a jar\n", text)


def test_a_card_shows_the_recipe_and_the_lineage_that_dvc_lock_traces(evaluated_run, traced, tmp_path):
    export_hub(evaluated_run, tmp_path / "out")
    _, text = card_of(tmp_path / "out")
    recipe = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])
    assert recipe == {name: RAN[name] for name in ("train", "models.mine")}
    assert {tag: text.count(f"| `{digest}` |") for tag, digest in LINEAGE.items()} == dict.fromkeys(LINEAGE, 1)
    assert "no record" not in text
    assert "ot recorded: " not in text


def test_a_model_of_data_without_a_licence_is_refused(shared, tmp_path):
    run = changed(shared.run, "ingest", datasets={"toy": make_entry("spot_the_diff", tmp_path)})
    with pytest.raises(DataError, match="Spot-the-Diff"):
        export_hub(run, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_unlicensed_data_is_shared_without_images_if_the_user_allows_it(shared, tmp_path):
    run = changed(shared.run, "ingest", datasets={"toy": make_entry("spot_the_diff", tmp_path)})
    notices = export_hub(run, tmp_path / "out", allow_unlicensed=True)
    assert [notice.partition(":")[0] for notice in notices] == ["toy", "toy"]
    assert card_of(tmp_path / "out")[0]["license"] == "other"
    assert list((tmp_path / "out").glob("example_*")) == []


UNSTATED = Permission("unstated", "the page says nothing")


@pytest.mark.parametrize(
    ("change", "licence"),
    [
        pytest.param({}, "apache-2.0", id="all uses"),
        pytest.param({"train": UNSTATED}, "other", id="no training"),
        pytest.param({"redistribute": UNSTATED}, "other", id="no redistribution"),
        pytest.param({"name": "CC BY 4.0"}, "other", id="another licence"),
    ],
)
def test_a_model_of_data_under_apache_2_alone_has_that_licence(change, licence):
    spec = DATASETS["minichange"]
    spec = replace(spec, licence=replace(spec.licence, **change))
    dataset = MixtureDataset(name="mini", spec=spec, pairs={"train": 1}, samples={"train": 1})
    front = yaml.safe_load(front_matter("base", SHARED["m3diff"], [dataset], "m3diff"))
    assert front["license"] == licence


def test_a_dataset_that_only_tests_needs_no_licence_to_be_passed_on(shared, tmp_path):
    spot_counts = {"pairs": {"train": 0, "val": 0, "test": 4}, "samples": {"train": 0, "val": 0, "test": 4}}
    toy_counts = read_json(shared.run.paths.mixture / "report.json")["datasets"]["toy"]
    report = {"datasets": {"toy": toy_counts, "spot": spot_counts}}
    write_json(tmp_path / "mixture" / "report.json", report)
    entries = {**shared.run.ingest.datasets, "spot": make_entry("spot_the_diff", tmp_path)}
    run = changed(changed(shared.run, "ingest", datasets=entries), "paths", mixture=tmp_path / "mixture")
    export_hub(run, tmp_path / "out")
    _, text = card_of(tmp_path / "out")
    assert re.search(r"\| `spot` \| Spot-the-Diff.*, tested only \|", text)
    assert "Spot" not in re.findall("It was trained on (.*) alone", text)[0]


def test_a_folder_that_exists_is_not_written_over(shared):
    with raises(DataError, "export.folder_exists", path=shared.folder):
        export_hub(shared.run, shared.folder)


@pytest.mark.parametrize(
    ("section", "values", "fault"),
    [
        pytest.param(
            "paths",
            {"mixture": Path("nothing")},
            Fault("export.unnamed_datasets", path=Path("nothing/report.json")),
            id="no mixture",
        ),
        pytest.param("ingest", {"datasets": {}}, Fault("export.dataset_not_in_params", key="toy"), id="no dataset"),
    ],
)
def test_what_is_missing_is_named_before_anything_is_written(section, values, fault, shared, tmp_path):
    with raises(DataError, fault.code, **fault.fields):
        export_hub(changed(shared.run, section, **values), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_names_no_question_is_exported_without_one(shared, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(shared.run.paths.model, model)
    manifest = read_manifest(model / "checkpoint")
    del manifest["trained_on"]
    (model / "checkpoint" / MANIFEST).write_text(json.dumps(manifest))
    export_hub(changed(shared.run, "paths", model=model), tmp_path / "out")
    assert "trained_on" not in verify_manifest(tmp_path / "out")


def test_a_missing_checkpoint_is_refused_before_anything_is_written(shared, tmp_path):
    with pytest.raises(DataError, match="manifest.json"):
        export_hub(changed(shared.run, "paths", model=Path("nothing")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_example_whose_images_changed_since_ingest_is_refused(shared, tmp_path):
    rows = pq.read_table(shared.run.paths.clean / "records").to_pylist()
    for row in rows:
        row["images"][1]["sha256"] = bytes(32)
    write_records(tmp_path / "clean", rows)
    image = Path(shared.pairs[1][1])
    with raises(DataError, "export.example_changed", path=image, command=command_to_read_again(image)):
        export_hub(changed(shared.run, "paths", clean=tmp_path / "clean"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_family_that_others_cannot_load_is_refused(shared, tmp_path):
    checkpoint = Path(shutil.copytree(shared.run.paths.model / "checkpoint", tmp_path / "model" / "checkpoint"))
    (checkpoint / MANIFEST).write_text(json.dumps(read_manifest(checkpoint) | {"family": "mine"}))
    with raises(DataError, "export.other_family", path=checkpoint, value="mine", expected=list(SHARED)):
        export_hub(changed(shared.run, "paths", model=tmp_path / "model"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


WEIGHTS = "model.safetensors"
CONFIG = "config.json"
FOREIGN_FILES = (".DS_Store", f"._{WEIGHTS}", ".git/index", ".cache/huggingface/a.json", "notes.txt")
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def root(shared_models: dict[str, Shared], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the run's folder, to which exported `merged` weights, `adapters` and two images are added."""
    run = shared_models["m3diff"].run
    folder = shared_models["m3diff"].folder.parents[1]  # all workers have this folder
    root = Path(shutil.copytree(folder, tmp_path_factory.mktemp("copy") / "run"))
    for name in ("merged", "adapters"):
        export_checkpoint(run.paths.model / "checkpoint", root / name, adapters=name == "adapters")
    for name, seed in (("a.png", 1), ("b.png", 2)):
        colour_image(seed).save(root / name)
    return root


@pytest.fixture
def caption(root: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def caption(model: Path, *options: object) -> tuple[int, str, str]:
        params = str(REPOSITORY / "profiles/embedded.yaml")
        images = [str(root / name) for name in ("a.png", "b.png")]
        code = main(["--params", params, "caption", *images, "--model", str(model), *map(str, options)])
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return code, output.out, output.err

    return caption


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Edit:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def change_weights(data: bytes) -> bytes:
    return save({name: weight + 1 for name, weight in load(data).items()}, {"format": "pt"})


def removed(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def pointer(name: str) -> Edit:
    text = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 193820\n"
    return rewritten(name, lambda _: text)


def config(**fields: object) -> Edit:
    """config.json with other fields, written in another order and layout."""
    return rewritten(CONFIG, lambda data: json.dumps(json.loads(data) | fields, indent=4, sort_keys=True).encode())


def with_others_files(folder: Path) -> None:
    for name in FOREIGN_FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"\0\5\26\7")


def with_windows_ends(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix in (".json", ".jinja", ".md", ".py"):
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def linked(folder: Path) -> None:
    """As the cache of a model hub: every file is a link to a blob, which is named by its hash."""
    blobs = folder.rename(folder.with_name("blobs"))
    folder.mkdir()
    for path in list(blobs.iterdir()):
        blob = path.rename(blobs / sha256(path))
        (folder / path.name).symlink_to(Path("..") / "blobs" / blob.name)


LOADED: dict[str, list[Edit]] = {
    "what is not loaded edited": [
        *(rewritten(name, lambda data: data + b"\n") for name in ("README.md", "m3diff_model.py")),
        pointer("example_after.png"),
        with_others_files,
    ],
    "what is not loaded removed": [removed("README.md"), removed("layers.py"), removed("example_before.png")],
    "line ends of Windows": [with_windows_ends],
    "links of a cache": [linked],
    "config of a later transformers": [config(transformers_version="99.0.0", use_cache=True)],
    "tokenizer config written anew": [rewritten("tokenizer_config.json", lambda data: data + b"\n")],
}
PULL = "git lfs pull"
UNLOADABLE: dict[str, tuple[list[Edit], str, str | Message]] = {
    **{f"{name} a pointer": ([pointer(name)], name, PULL) for name in (WEIGHTS, CONFIG, MANIFEST)},
    "processor removed": ([removed("processor_config.json")], "processor_config.json", Message("models.missing_file")),
    "other weights": ([rewritten(WEIGHTS, change_weights)], WEIGHTS, Message("models.other_digest")),
    "config cut off": ([rewritten(CONFIG, lambda _: b"{")], CONFIG, Message("models.not_json")),
    "tokenizer of nothing": ([rewritten("tokenizer.json", lambda _: b"{}")], "copied", Message("models.not_loaded")),
    "config of another size": ([config(text_config={"hidden_size": 32})], "copied", Message("models.not_loaded")),
    "no manifest": ([removed(MANIFEST)], MANIFEST, "m3diff export --hub"),
}


def is_shown(expected: str | Message, text: str) -> bool:
    return expected.in_text(text) if isinstance(expected, Message) else expected in text


@pytest.mark.parametrize("name", [*LOADED, *UNLOADABLE])
def test_a_copy_may_be_edited_where_it_is_not_loaded_and_else_is_named_in_a_line(name, root, tmp_path, caption):
    copied = shutil.copytree(root / "out/tiny-model", tmp_path / "copied to é here" / "copied")
    edits, *expected = UNLOADABLE.get(name, (LOADED.get(name), "", ""))
    for edit in edits:
        edit(copied)
    code, out, err = caption(copied)
    if name in LOADED:
        assert code == 0
        assert out == caption(root / "merged")[1]
        return
    assert code == DATA_REFUSED
    message = err.splitlines()[-1]
    assert message.startswith("m3diff caption: ")
    assert [text for text in (str(copied), *expected) if not is_shown(text, message)] == [], message


def test_adapters_are_loaded_with_their_base_or_refused_with_the_remedy(root, tmp_path, caption):
    folder = shutil.copytree(root / "adapters", tmp_path / "a")
    base = shutil.copytree(root / "base", tmp_path / "base")
    with_others_files(folder)
    (base / ".DS_Store").write_bytes(b"of macOS")
    code, out, _ = caption(folder, "--base", base)
    assert code == 0
    assert out == caption(root / "merged")[1]
    third = shutil.copytree(root / "base", tmp_path / "third")
    pointer(WEIGHTS)(third)
    damaged = [shutil.copytree(root / "adapters", tmp_path / name) for name in ("pointer", "cut")]
    pointer("tuned.safetensors")(damaged[0])
    rewritten("lora/adapter_model.safetensors", lambda _: b"cut")(damaged[1])
    for model, base_given, expected in (
        (folder, tmp_path, (str(tmp_path), "--base FOLDER")),
        (folder, BASE, (str(BASE), "--base FOLDER")),
        (folder, third, (str(third), PULL)),
        (folder / "lora", base, (Message("models.no_manifest"),)),
        (damaged[0], base, ("tuned.safetensors", PULL)),
        (damaged[1], base, ("adapter_model.safetensors", Message("models.other_digest"))),
    ):
        code, _, message = caption(model, "--base", base_given)
        assert code == DATA_REFUSED
        assert [text for text in expected if not is_shown(text, message)] == [], message
