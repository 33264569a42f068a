"""A folder of the family `auto` is the base's own class, and answers alike in a process without this project."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers.utils import is_torchvision_available

from m3diff.commands.export.hub import export_hub
from m3diff.images.open import load_image
from m3diff.models.auto_processor import CHOICES
from m3diff.models.checkpoint import (
    ADAPTERS,
    LORA,
    TUNED,
    export_checkpoint,
    load_model,
    verify_files_to_load,
    verify_manifest,
)
from m3diff.models.foreign_code import ForeignCodeError
from m3diff.models.generation import load_captioner
from m3diff.records.sample import Turn
from m3diff.settings.load import load_params
from m3diff.settings.tree import Params
from tests.commands.export.test_hub import changed, record, write_json, write_records
from tests.errors import raises
from tests.layouts import list_images, make_entry, uris_of
from tests.tiers import slow_except
from tests.tiny_auto import QUESTION, auto_checkpoint, generated_tokens, loadable_bases
from tests.tiny_vlm import minichange_pairs
from tests.toy import REPOSITORY

PAIRS = 3
MAX_NEW_TOKENS = 6
# The classes of these processors load video processors, which need torchvision
NEED_TORCHVISION = {"qwen3_vl", "qwen3_5", "gemma4", "internvl", "smolvlm", "llava_onevision", "lfm2_vl"}
EVERY_BASE = slow_except(loadable_bases(), "idefics3")
# A random model might end its answer with its first token
DECODING = {"max_new_tokens": MAX_NEW_TOKENS, "min_new_tokens": MAX_NEW_TOKENS}


class ExportedRun(NamedTuple):
    """A run with a model on a tiny base, its exported folder, and pairs of two sizes."""

    name: str
    params: Params
    folder: Path
    pairs: list[tuple[str, str]]

    @property
    def checkpoint(self) -> Path:
        return self.params.paths.model / "checkpoint"

    @property
    def base(self) -> Path:
        return self.params.train.base


def run_on(name: str, root: Path) -> tuple[Params, list[tuple[str, str]]]:
    """Write what the stages leave, and return the parameters of the run and its test pairs."""
    auto_checkpoint(name, root, {"question": QUESTION, "images": [2], "turns": 1, "own_questions": False})
    rows = []
    for number, pair in enumerate(minichange_pairs(PAIRS)):
        row = record(root / "images", number)
        for path, image in zip(uris_of(row), pair.images, strict=True):
            image.save(path)
        rows.append(row | {"images": list_images(*map(Path, uris_of(row)))})
    write_records(root / "clean", rows)
    predictions = [{"image_id": row["id"], "caption": "a caption"} for row in rows]
    write_json(root / "predictions" / "predictions.json", predictions)
    counts = {"pairs": {"train": 7, "val": 1, "test": PAIRS}, "samples": {"train": 9, "val": 1, "test": PAIRS}}
    write_json(root / "mixture" / "report.json", {"datasets": {"toy": counts}})
    params = load_params(REPOSITORY / "profiles/embedded.yaml")
    params = changed(params, "ingest", datasets={"toy": make_entry("pairs", root)})
    params = changed(changed(params, "train", base=root / "base"), "predict", max_new_tokens=MAX_NEW_TOKENS)
    paths = {path: root / path for path in ("mixture", "clean", "model", "predictions", "report")}
    return changed(params, "paths", **paths), [tuple(uris_of(row)) for row in rows]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ExportedRun]:
    @cache
    def exported(name: str) -> ExportedRun:
        root = tmp_path_factory.mktemp(name)
        params, pairs = run_on(name, root)
        with pytest.MonkeyPatch.context() as elsewhere:
            elsewhere.chdir(root)
            export_hub(params, root / "out" / "tiny-model")
        return ExportedRun(name, params, root / "out" / "tiny-model", pairs)

    return exported


def answers_without_project(folder: Path, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers of `use_stock.py`, in a process that finds neither this project nor its tests."""
    write_json(folder / "requests.json", requests)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    environment |= {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("use_stock.py")
    command = [sys.executable, "-I", script, folder / "requests.json", folder / "answers.pt"]
    done = subprocess.run([*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = torch.load(folder / "answers.pt")
    return answers


def uses_stock_processor(name: str) -> bool:
    """Return whether transformers can load the processor of a base with the installed packages."""
    return name not in NEED_TORCHVISION or is_torchvision_available()


class OwnAnswer(NamedTuple):
    """Inputs, logits after the prompt and generated tokens of a pair, as this project computes them."""

    inputs: dict[str, torch.Tensor]
    logits: torch.Tensor
    tokens: list[int]


def own_answers(run: ExportedRun) -> list[OwnAnswer]:
    """Return what this project computes from the checkpoint for each pair."""
    model, family = load_model(run.checkpoint)
    processor = family.load_processor(run.checkpoint)
    answers = []
    for pair in run.pairs:
        images = [load_image(path) for path in pair]
        inputs, tokens = generated_tokens(model.eval(), processor, [images], [(Turn(QUESTION),)], **DECODING)
        with torch.inference_mode():
            logits = model(**inputs).logits[0, -1]
        answers.append(OwnAnswer(inputs, logits, tokens[0].tolist()))
    return answers


@pytest.fixture(scope="module")
def ask(exported: Callable[[str], ExportedRun], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return the answers of a run's merged folder, its adapters and, if it can be run, the code of its card."""

    @cache
    def ask(name: str) -> dict[str, Any]:
        run = exported(name)
        folder = tmp_path_factory.mktemp("bare")
        own_runs = own_answers(run)
        source: dict[str, Any] = {"processor": str(run.folder), "images": run.pairs, "question": QUESTION}
        if not uses_stock_processor(name):
            torch.save([answer.inputs for answer in own_runs], folder / "inputs.pt")
            source = {"inputs": str(folder / "inputs.pt")}
        adapters = run.checkpoint / ADAPTERS
        parts = {"base": str(run.base), "lora": str(adapters / LORA), "tuned": str(adapters / TUNED)}
        requests = {
            "merged": {"model": str(run.folder), "decoding": {"min_new_tokens": MAX_NEW_TOKENS}, **source},
            "adapters": {**parts, "decoding": DECODING | {"do_sample": False}, **source},
        }
        if uses_stock_processor(name):
            (code,) = re.findall(r"```python\n(.*?)```", (run.folder / "README.md").read_text(), re.DOTALL)
            (folder / "card.py").write_text(code)
            requests["card"] = {"script": str(folder / "card.py"), "beside": str(run.folder.parent)}
        answers = answers_without_project(folder, [*requests.values()])
        return {"own": own_runs, **dict(zip(requests, answers, strict=True))}

    return ask


@pytest.mark.slow(20)
@pytest.mark.parametrize("name", loadable_bases())
def test_a_process_without_the_project_generates_equal_tokens(
    exported: Callable[[str], ExportedRun], ask: Callable[[str], Any], name: str
) -> None:
    answers = ask(name)
    first_logits = answers["own"][0].logits
    assert (answers["own"][1].logits - first_logits).abs().max() > 1e-3, "the images do not matter"
    config = json.loads((exported(name).folder / "config.json").read_text())
    assert answers["merged"]["class"] == config["architectures"][0]
    for kind in ("merged", "adapters"):
        assert answers[kind]["tokens"] == [answer.tokens for answer in answers["own"]]
        for logits, answer in zip(answers[kind]["logits"], answers["own"], strict=True):
            torch.testing.assert_close(logits, answer.logits, rtol=5e-4, atol=5e-4)  # adapters round otherwise


@pytest.mark.slow(20)
@pytest.mark.parametrize("name", filter(uses_stock_processor, loadable_bases()))
def test_the_stock_processor_makes_the_inputs_of_the_training(ask: Callable[[str], Any], name: str) -> None:
    answers = ask(name)
    for inputs, answer in zip(answers["merged"]["inputs"], answers["own"], strict=True):
        assert inputs.keys() == answer.inputs.keys()
        for key, value in answer.inputs.items():
            assert torch.equal(inputs[key], value), key


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", EVERY_BASE)
def test_an_exported_folder_has_nothing_of_this_project(exported: Callable[[str], ExportedRun], name: str) -> None:
    run = exported(name)
    base_config = json.loads((run.base / "config.json").read_text())
    config = json.loads((run.folder / "config.json").read_text())
    assert config["architectures"] == base_config["architectures"]
    assert config["model_type"] == base_config["model_type"]
    names_of_run = {path for path in files_of(run.checkpoint) if not path.startswith(f"{ADAPTERS}/")}
    added_names = {"README.md", "example_before.png", "example_after.png"}
    assert files_of(run.folder) == names_of_run - {CHOICES} | added_names
    for path in run.folder.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "manifest.json":
            text = path.read_text()
            assert "m3diff" not in text, path.name
            assert "auto_map" not in text, path.name
    assert verify_manifest(run.folder)["family"] == "auto"


def test_generation_is_greedy_and_ends_with_the_token_of_the_training(exported: Callable[[str], ExportedRun]) -> None:
    run = exported("idefics3")
    settings = json.loads((run.folder / "generation_config.json").read_text())
    model, family = load_model(run.checkpoint)
    processor = family.load_processor(run.checkpoint)
    assert settings["do_sample"] is False
    assert settings["max_new_tokens"] == MAX_NEW_TOKENS
    assert settings["eos_token_id"] == processor.end_id
    assert settings["pad_token_id"] == processor.pad_id


def test_this_project_answers_alike_with_the_exported_folder(exported: Callable[[str], ExportedRun]) -> None:
    run = exported("idefics3")
    image_sets = [[load_image(path) for path in pair] for pair in run.pairs]
    captioners = [load_captioner(folder, MAX_NEW_TOKENS) for folder in (run.checkpoint, run.folder)]
    captions, captions_of_folder = [captioner.caption(image_sets) for captioner in captioners]
    assert captions_of_folder == captions
    assert any(captions)


@pytest.mark.slow(20)
def test_the_code_of_the_card_runs_without_the_project(
    exported: Callable[[str], ExportedRun], ask: Callable[[str], Any]
) -> None:
    run = exported("idefics3")
    pair = [load_image(path) for path in run.pairs[1]]
    captions = load_captioner(run.checkpoint, MAX_NEW_TOKENS).caption([pair, pair[::-1]])
    assert ask("idefics3")["card"]["lines"] == captions


def test_a_card_names_the_class_the_question_and_the_server(exported: Callable[[str], ExportedRun]) -> None:
    run = exported("idefics3")
    card = (run.folder / "README.md").read_text()
    assert "`Idefics3ForConditionalGeneration`" in card
    assert f'"{QUESTION}"' in card
    assert f"vllm serve ./{run.folder.name} --limit-mm-per-prompt '{{\"image\": 2}}'" in card
    assert "trust_remote_code" not in card
    assert "torchvision` for" not in card


def test_the_licence_of_an_unknown_base_is_not_claimed(exported: Callable[[str], ExportedRun]) -> None:
    card = (exported("idefics3").folder / "README.md").read_text()
    assert "license: other" in card
    assert "Apache" not in card.partition("## Scores")[0].partition("---\n\n")[2].partition("| dataset |")[0]


def test_a_checkpoint_with_code_is_not_exported(exported: Callable[[str], ExportedRun], tmp_path: Path) -> None:
    run = exported("idefics3")
    code = run.checkpoint / "modeling.py"
    code.write_text("print('hello')")
    try:
        with raises(ForeignCodeError, "models.code_file", path=code):
            export_hub(run.params, tmp_path / "out")
    finally:
        code.unlink()
    assert not (tmp_path / "out").exists()


def test_exported_adapters_answer_alike_on_their_base(exported: Callable[[str], ExportedRun], tmp_path: Path) -> None:
    run = exported("idefics3")
    export_checkpoint(run.checkpoint, tmp_path / "adapters", adapters=True)
    export_checkpoint(run.checkpoint, tmp_path / "merged", adapters=False)
    image_sets = [[load_image(path) for path in pair] for pair in run.pairs]
    captions = load_captioner(run.checkpoint, MAX_NEW_TOKENS).caption(image_sets)
    assert load_captioner(tmp_path / "merged", MAX_NEW_TOKENS).caption(image_sets) == captions
    assert load_captioner(tmp_path / "adapters", MAX_NEW_TOKENS, base=run.base).caption(image_sets) == captions


@pytest.mark.parametrize("name", [CHOICES, "video_preprocessor_config.json"])
def test_a_file_that_was_added_to_the_processor_is_named_in_a_warning(
    exported: Callable[[str], ExportedRun], tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(exported("idefics3").folder, folder)
    (folder / name).write_text("{}")
    verify_files_to_load(folder)
    assert name in caplog.text
