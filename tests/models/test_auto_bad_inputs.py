"""Bases, settings and images that the family `auto` cannot train: preflight reports each in one line."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from transformers.models.smolvlm import processing_smolvlm

from m3diff.__main__ import main
from m3diff.commands.preflight import NotReadyError, faults_of_model, preflight_data
from m3diff.models import stock_processor
from m3diff.records.errors import Fault
from m3diff.settings.rules import check_models
from m3diff.settings.tree import Params
from tests.errors import Message, raises
from tests.tiny_vlm import BASES, tiny_vlm, write_processor
from tests.toy import REPOSITORY

EMBEDDED = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
SETTINGS = {"family": "auto", "module": None, "lora": {"rank": 4, "alpha": 8}, "rates": {"llm": 1e-3}}
IMAGE_TOKEN = "<|image_pad|>"


@pytest.fixture(scope="module")
def sound_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture
def base(sound_base: Path, tmp_path: Path) -> Path:
    """Return a copy of the base, which a test breaks."""
    return Path(shutil.copytree(sound_base, tmp_path / "base"))


def values_of(base: Path, train: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """Return the parameters of a run that trains this base on the folder `pairs` beside it, by section."""
    values = copy.deepcopy(EMBEDDED)
    values["models"] = {"vlm": SETTINGS | settings}
    values["train"] |= {"model": "vlm", "base": str(base)} | (train or {})
    values["ingest"]["datasets"] = {"own": {"reader": "pairs", "root": str(base.parent / "pairs")}}
    values["convert"] = {"questions": str(REPOSITORY / values["convert"]["questions"])}
    values["promote"] = {"protocol": "own/test"}
    for section in ("synthesize", "augment"):
        values.pop(section, None)
    return values


def params_of(base: Path, train: dict[str, Any] | None = None, **settings: Any) -> Params:
    return Params.model_validate(values_of(base, train, **settings))


def change_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def replace_text(path: Path, text: str, replacement: str) -> None:
    content = path.read_text()
    assert text in content
    path.write_text(content.replace(text, replacement))


def use_pickles(base: Path) -> None:
    (base / "model.safetensors").rename(base / "pytorch_model.bin")


def rename_image_token(base: Path) -> None:
    for file in ("tokenizer.json", "chat_template.json"):
        replace_text(base / file, IMAGE_TOKEN, "<|other|>")


def think_first(base: Path) -> None:
    replace_text(base / "chat_template.json", "assistant\\n'}}", "assistant\\n<think>\\n'}}")


def use_remote_code(base: Path) -> None:
    change_json(base / "config.json", auto_map={"AutoModelForImageTextToText": "modeling_own.OwnModel"})


def use_text_model(base: Path) -> None:
    change_json(base / "config.json", model_type="qwen3")


def use_unknown_model(base: Path) -> None:
    change_json(base / "config.json", model_type="someones_vlm")


def use_other_image_token(base: Path) -> None:
    config = json.loads((base / "config.json").read_text())
    change_json(base / "config.json", image_token_id=config["video_token_id"])


def use_unknown_processor(base: Path) -> None:
    change_json(base / "preprocessor_config.json", processor_class="OwnProcessor")


def use_processor_without_sizes(base: Path) -> None:
    change_json(base / "preprocessor_config.json", merge_size="two")


def use_damaged_processor(base: Path) -> None:
    (base / "preprocessor_config.json").write_text('{"image')


BROKEN_BASES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "remote code": (use_remote_code, "models.field_names_code", "config.json"),
    "pickled weights": (use_pickles, "models.pickle", "pytorch_model.bin"),
    "no weights": (lambda base: (base / "model.safetensors").unlink(), "models.no_weights_of_base", ""),
    "a text model": (use_text_model, "models.not_a_vlm", "config.json"),
    "an unknown model": (use_unknown_model, "models.not_a_vlm", "config.json"),
    "a processor of another model": (use_other_image_token, "models.processor_of_other_model", ""),
    "a tokenizer without the image token": (rename_image_token, "models.tokenizer_without_image_token", ""),
    "a template that asks to think": (think_first, "models.template_asks_to_think", ""),
    "no template": (lambda base: (base / "chat_template.json").unlink(), "models.no_chat_template", ""),
    "an unknown processor": (use_unknown_processor, "models.no_processor_of_images", ""),
    "a processor that cannot process images": (use_processor_without_sizes, "models.processor_fails", ""),
    "a damaged processor": (use_damaged_processor, "models.not_json", "preprocessor_config.json"),
}


def test_a_sound_base_is_accepted(sound_base):
    assert list(faults_of_model(params_of(sound_base))) == []


@pytest.mark.parametrize("case", BROKEN_BASES)
def test_preflight_reports_a_broken_base_with_its_path_and_a_remedy(base, case):
    break_base, code, file = BROKEN_BASES[case]
    break_base(base)
    with raises(NotReadyError, "preflight.cannot_train") as refusal:
        preflight_data(params_of(base))
    (fault,) = refusal.value.fields["faults"]
    assert fault.code == code
    assert fault.fields["path"] == base / file
    assert fault.remedy
    assert str(fault.fields["path"]) in str(fault)
    assert "\n" not in str(fault)


def test_a_processor_that_needs_torchvision_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(stock_processor, "is_torchvision_available", lambda: False)
    base = BASES["lfm2_vl"]()
    base.config.save_pretrained(tmp_path)
    write_processor(base, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (fault,) = faults_of_model(params_of(tmp_path))
    assert fault.code == "models.processor_needs_torchvision"
    assert fault.fields["path"] == tmp_path


def write_smolvlm(folder: Path) -> Path:
    base = BASES["smolvlm"]()
    base.config.save_pretrained(folder)
    write_processor(base, folder)
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_processor_that_needs_num2words_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    (fault,) = faults_of_model(params_of(write_smolvlm(tmp_path)))
    assert fault.code == "models.processor_needs_package"
    assert "num2words" in str(fault)
    assert fault.fields["path"] == tmp_path


def test_a_template_that_asks_for_the_frames_of_videos_is_rendered(tmp_path, monkeypatch):
    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    assert list(faults_of_model(params_of(write_smolvlm(tmp_path)))) == []


def test_a_model_without_image_features_is_refused(sound_base, monkeypatch):
    from transformers import Qwen3VLForConditionalGeneration

    monkeypatch.delattr(Qwen3VLForConditionalGeneration, "get_image_features")
    (fault,) = faults_of_model(params_of(sound_base))
    assert fault.code == "models.no_image_features"


def test_a_missing_base_is_reported_once(tmp_path):
    with raises(NotReadyError, "preflight.cannot_train") as refusal:
        preflight_data(params_of(tmp_path / "none"))
    (fault,) = refusal.value.fields["faults"]
    assert fault.code == "settings.no_base"


@pytest.mark.parametrize(
    ("settings", "code", "field"),
    [
        ({"processor": {"max_pixel": 1024}}, "models.unknown_processor_setting", "processor.max_pixel"),
        ({"processor": {"max_pixels": "big"}}, "models.processor_setting_refused", "processor"),
        ({"template": {"enable_thinking": False}}, "models.unknown_template_argument", "template.enable_thinking"),
    ],
    ids=["processor", "value", "template"],
)
def test_a_setting_that_the_base_does_not_take_is_reported_with_its_key(sound_base, settings, code, field):
    (fault,) = faults_of_model(params_of(sound_base, **settings))
    assert fault.code == code
    assert fault.fields["key"] == "models.vlm"
    assert fault.fields["field"] == field


def write_pairs(folder: Path, *sizes: tuple[int, int], captions: str = "the box moved") -> Path:
    """Write a pair of images of each size, in the splits train, val and test by turns."""
    folder.mkdir()
    rows = ["before,after,captions,split"]
    for number, size in enumerate(sizes):
        for name in ("a", "b"):
            Image.new("RGB", size).save(folder / f"{number}{name}.png")
        rows.append(f"{number}a.png,{number}b.png,{captions},{('train', 'val', 'test')[number % 3]}")
    (folder / "pairs.csv").write_text("\n".join(rows) + "\n")
    return folder


def test_preflight_names_an_image_that_fits_no_grid(base, tmp_path):
    folder = write_pairs(tmp_path / "pairs", (64, 64), (64, 64), (2500, 4))
    (fault,) = faults_of_model(params_of(base))
    assert fault.code == "models.image_without_grid"
    assert fault.fields["path"] == str(folder / "2a.png")
    assert fault.fields["value"] == ["2500 x 4", "2500 x 4"]
    assert fault.remedy


def test_preflight_names_the_longest_sample_and_the_settings_that_shorten_it(base, tmp_path):
    write_pairs(tmp_path / "pairs", (64, 64), (150, 150), (160, 160))
    (fault,) = faults_of_model(params_of(base, {"max_tokens": 70}))
    assert fault.code == "train.images_too_long"
    assert fault.fields["key"] == "train.max_tokens"
    assert fault.fields["name"] == "own/1a.png|1b.png"  # the test split has no limit
    assert fault.fields["sizes"] == ["150 x 150", "150 x 150"]
    assert fault.fields["image_tokens"] == 50
    size = {"longest_edge": 160 * 160, "shortest_edge": 32 * 32}
    names = ["models.vlm.processor.max_pixels", f"models.vlm.processor.size (now {size})"]
    assert sorted(fault.fields["names"]) == names


def test_preflight_accepts_samples_within_the_limit(base, tmp_path):
    write_pairs(tmp_path / "pairs", (64, 64), (64, 64), (64, 64))
    assert list(faults_of_model(params_of(base, {"max_tokens": 70}))) == []


def test_training_checks_the_base_before_it_starts(base, tmp_path, monkeypatch, capsys):
    (base / "chat_template.json").unlink()
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump(values_of(base)))
    monkeypatch.setattr("m3diff.stages.train.stage.train", None)
    monkeypatch.setattr("m3diff.commands.plan.check_memory", lambda run: None)
    monkeypatch.chdir(tmp_path)
    assert main(["--params", str(file), "train"])
    assert Message("models.no_chat_template", path=base).in_text(capsys.readouterr().err)


# Settings


def faults_of_settings(**changes: Any) -> list[Fault]:
    values = EMBEDDED | {"models": {"vlm": SETTINGS | changes.pop("settings", {})}}
    values = copy.deepcopy(values)
    values["train"] |= {"model": "vlm", "base": "none"}
    values["compute"] |= changes
    return list(check_models(Params.model_validate(values)))


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_activation_checkpointing_is_refused_with_the_reason(checkpointing):
    assert faults_of_settings() == []
    (fault,) = faults_of_settings(activation_checkpointing=checkpointing)
    assert fault.code == "settings.cannot_recompute_activations"
    assert fault.fields["key"] == "compute.activation_checkpointing"
    assert fault.fields["value"] == checkpointing


def test_an_alignment_is_refused_with_the_reason():
    align = {"datasets": ["minichange"], "epochs": 1, "global_batch": 16, "rates": {"projector": 1e-3}}
    rates = {"projector": 1e-3, "llm": 1e-3}
    (fault,) = faults_of_settings(settings={"align": align, "rates": rates})
    assert fault == Fault("models.no_alignment_of_stock_model", key="models.vlm", field="align")


@pytest.mark.parametrize(
    "settings",
    [
        {"module": {"layers": 2}},
        {"rates": {"module": 1e-3}},
        {"rates": {"visoin": 1e-3}},
        {"rates": {"llm": -1.0}},
        {"rates": {"llm": None}},
        {"lora": {"rank": -1, "alpha": 8}},
        {"processor": None},
        {"quantisation": "nf4"},
    ],
    ids=["module", "rate of a module", "unknown part", "negative rate", "no rate", "rank", "processor", "unknown key"],
)
def test_settings_are_checked_as_those_of_other_families(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        faults_of_settings(settings=settings)
