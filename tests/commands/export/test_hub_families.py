"""A shared OneDiff or BLIP2IDC does without the project what the project does with the checkpoint."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file

from m3diff.commands.export.families import SHARED
from m3diff.commands.export.folder import export_hub, write_model
from m3diff.commands.export.run import Run
from m3diff.models import FAMILIES
from m3diff.models.checkpoint import MANIFEST, read_manifest
from m3diff.models.generation import QUESTION
from m3diff.records.errors import DataError
from tests.commands.export.test_hub import OTHER_QUESTION, PAIRS, ask, bare, chat, read_json, run_of, texts, wanted
from tests.models.llava15 import write_llava15
from tests.models.test_onediff import SEPARATE, settings
from tests.tiny import tiny_base
from tests.tiny_blip2 import blip2_settings, tiny_blip2

CASES: dict[str, tuple[Callable[[Path], Path], Any]] = {
    "onediff on LLaVA-OneVision": (lambda folder: tiny_base(folder, seed=3), settings(SEPARATE | {"place": "after"})),
    "onediff on LLaVA-1.5": (write_llava15, settings(SEPARATE)),
    "onediff without a module on LLaVA-1.5": (write_llava15, settings(None)),
    "blip2idc with OPT": (tiny_blip2, blip2_settings()),
    "blip2idc with Qwen2": (lambda folder: tiny_blip2(folder, "qwen2"), blip2_settings()),
}


@dataclass(frozen=True)
class Case:
    """A run, its model as a folder to share, and the test pairs."""

    name: str
    run: Run
    folder: Path
    pairs: list[tuple[str, str]]

    @property
    def reads_question(self) -> bool:
        return self.name.startswith("onediff")


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("run")
    write_base, chosen = CASES[request.param]
    run = run_of(root, write_base(root / "base"), chosen)
    assert export_hub(run, root / "out" / "shared") == []
    pairs = [(str(root / "images" / f"{n}a.png"), str(root / "images" / f"{n}b.png")) for n in range(PAIRS)]
    return Case(request.param, run, root / "out" / "shared", pairs)


def test_without_the_project_the_tokens_are_the_projects(case: Case, tmp_path: Path) -> None:
    swapped = [pair[::-1] for pair in case.pairs]
    again = str(tmp_path / "again")
    told = ask(
        tmp_path,
        [
            {"folder": str(case.folder), "images": case.pairs},
            {"folder": str(case.folder), "images": swapped},
            {"folder": str(case.folder), "images": case.pairs, "text": OTHER_QUESTION},
            {"folder": str(case.folder), "save": again},
            {"folder": again, "images": case.pairs},
            {"folder": again, "prompt": case.pairs[0]},
            {"folder": str(case.folder), "chat": [chat(pair, OTHER_QUESTION) for pair in case.pairs]},
        ],
    )
    assert told["missing"] == ["m3diff", "peft", "ray", "mlflow", "pyarrow"]
    given, turned, asked, saved, reloaded, prompt, talked = told["answers"]
    want = wanted(case.run, case.pairs, QUESTION)
    assert given == reloaded == {"tokens": want}
    assert turned == {"tokens": wanted(case.run, swapped, QUESTION)}
    assert turned != given, "the order must show"
    assert saved == {}
    family = FAMILIES[case.name.partition(" ")[0]]
    known = family.load_processor(case.run.model / "checkpoint")
    of_pairs = ["batch_num_images", "image_sizes"] if case.reads_question and "without" not in case.name else []
    assert prompt["input_ids"] == known.prompt_inputs([QUESTION])["input_ids"].tolist()
    assert prompt["inputs"] == sorted(["attention_mask", "input_ids", "pixel_values", *of_pairs])
    if case.reads_question:
        assert asked == talked == {"tokens": wanted(case.run, case.pairs, OTHER_QUESTION)}
    else:
        assert "ValueError: text: BLIP2IDC reads no question" in asked["error"]


def test_the_code_is_that_of_the_family_alone(case: Case) -> None:
    family = case.name.partition(" ")[0]
    config = read_json(case.folder / "config.json")
    code = {path.stem for path in case.folder.glob("*.py")} - {"images", "called", "processing", "layers"}
    if family == "onediff" and "without" not in case.name:
        assert code == {"settings", "llava", "onediff_settings", "onediff_model", "processing_onediff"}
        assert config["auto_map"]["AutoConfig"] == "onediff_model.OneDiffConfig"
    else:
        assert code == {f"processing_{family}", *(["blip2idc_model"] if family == "blip2idc" else [])}
        assert "auto_map" not in config
        assert config["model_type"] == ("llava" if family == "onediff" else "blip-2")


def test_a_caption_ends_where_the_trained_one_does_with_what_generate_reads(case: Case, tmp_path: Path) -> None:
    """BLIP-2's `generate` decodes by its language model's configuration, which comes from config.json."""
    from transformers import AutoModelForImageTextToText

    text = (case.folder / "README.md").read_text()
    assert ("give it\n`max_new_tokens`" in text) == (not case.reads_question)
    if not case.reads_question:
        checkpoint = shutil.copytree(case.run.model / "checkpoint", tmp_path / "checkpoint")
        config = read_json(checkpoint / "config.json")
        for name in ("eos_token_id", "pad_token_id"):  # as of an LLM of which only the tokenizer says it
            config["text_config"].pop(name, None)
        (checkpoint / "config.json").write_text(json.dumps(config))
        known = FAMILIES["blip2idc"].load_processor(checkpoint)
        (tmp_path / "shared").mkdir()
        write_model(checkpoint, tmp_path / "shared", SHARED["blip2idc"], 8, QUESTION)
        inner = AutoModelForImageTextToText.from_pretrained(tmp_path / "shared").language_model.generation_config
        assert (inner.eos_token_id, inner.pad_token_id) == (known.end_id, known.pad_id)


def test_the_code_of_the_card_runs_as_it_stands(case: Case, tmp_path: Path) -> None:
    card = (case.folder / "README.md").read_text()
    block = card.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "block.py").write_text(block)
    said = bare(tmp_path, tmp_path / "block.py", cwd=case.folder.parent)
    predicted = {row["image_id"]: row["caption"] for row in read_json(case.run.predictions / "predictions.json")}
    before, after = case.pairs[1]
    swapped = texts(case.run, wanted(case.run, [(after, before)], QUESTION))
    assert said == "".join(f"{text}\n" for text in [predicted["toy/1"], predicted["toy/1"], *swapped])


def test_the_card_names_the_family_its_paper_and_its_images(case: Case) -> None:
    _, front, text = (case.folder / "README.md").read_text().split("---\n", 2)
    title, paper, images = {
        "onediff": ("OneDiff says in words", "2407.05645", "Each image is padded to a square"),
        "blip2idc": ("BLIP2IDC says in words", "2412.15939", "Each image is stretched to 32 x 16 pixels, half"),
    }[case.name.partition(" ")[0]]
    assert title in text
    assert f"note = {{arXiv:{paper}}}" in text
    assert images in " ".join(text.split())
    assert ("a control without that module" in text) == ("without" in case.name)
    assert "m3diff" not in yaml.safe_load(front)["tags"]
    assert ("pipeline_tag" in yaml.safe_load(front)) == case.reads_question
    assert ("Chats and pipelines of transformers are not supported" in text) != case.reads_question
    assert "2503.11093" not in text


def test_a_folder_without_a_weight_of_the_module_is_refused(case: Case, tmp_path: Path) -> None:
    if "without" in case.name or not case.reads_question:
        return  # transformers' own classes
    folder = shutil.copytree(case.folder, tmp_path / "without-a-weight")
    weights = load_file(folder / "model.safetensors")
    del weights[next(name for name in weights if "vdm" in name)]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (answer,) = ask(tmp_path, [{"folder": str(folder), "images": case.pairs}])["answers"]
    assert "1 weights are missing or of another shape, so it is no LLaVA" in answer["error"]


def test_another_family_is_refused_and_the_way_to_copy_it_named(case: Case, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(case.run.model / "checkpoint", tmp_path / "model" / "checkpoint")
    manifest = read_manifest(checkpoint) | {"family": "mine"}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    told = "of the family 'mine'; a folder to share is written of m3diff, onediff, blip2idc"
    with pytest.raises(DataError, match=told):
        export_hub(replace(case.run, model=tmp_path / "model"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
