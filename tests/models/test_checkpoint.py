"""Checkpoints: merged models and adapters give the same logits, and damage is detected."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from m3diff.models import FAMILIES
from m3diff.models.checkpoint import (
    ADAPTERS,
    CheckpointError,
    convert_loading_errors,
    export_checkpoint,
    folder_sha256,
    load_model,
    load_processor,
    read_manifest,
    save_checkpoint,
    verify_manifest,
    write_manifest,
)
from m3diff.records.errors import Fault, ParamsError
from tests.errors import raises
from tests.models.test_llava import pair_inputs
from tests.tiny import DIFFERENCE, MDP, tiny_base, tiny_checkpoint, tiny_settings, tiny_trained

FAMILY = FAMILIES["m3diff"]


def logits(model: torch.nn.Module, base: Path) -> torch.Tensor:
    inputs = pair_inputs()
    inputs["input_ids"][inputs["input_ids"] == 3] = json.loads((base / "config.json").read_text())["image_token_index"]
    with torch.no_grad():
        return model.eval()(**inputs).logits.clone()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("checkpoint") / "base")


@pytest.fixture(scope="module")
def trained_checkpoint(base: Path) -> Path:
    return tiny_checkpoint(base, base.parent / "checkpoint")


@pytest.fixture
def checkpoint(trained_checkpoint: Path, base: Path, tmp_path: Path) -> Path:
    """Return a copy of a checkpoint that a test may damage, next to a copy of its base."""
    shutil.copytree(base, tmp_path / "base")
    return Path(shutil.copytree(trained_checkpoint, tmp_path / "checkpoint"))


def test_the_manifest_names_family_base_its_hash_and_every_file(trained_checkpoint, base):
    for folder, base_path in ((trained_checkpoint, "../base"), (trained_checkpoint / ADAPTERS, "../../base")):
        manifest = verify_manifest(folder)
        assert manifest == read_manifest(folder)
        assert manifest["family"] == "m3diff"
        assert manifest["base"] == base_path
        assert manifest["base_sha256"] == folder_sha256(base)
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert manifest["files"].keys() == files - {"manifest.json"}
        assert load_model(folder)[0].dtype == torch.float32
        assert load_model(folder, torch.bfloat16)[0].dtype == torch.bfloat16
    assert read_manifest(trained_checkpoint / ADAPTERS)["tuned"] == ["module", "projector", "vision"]
    assert "adapters/tuned.safetensors" in verify_manifest(trained_checkpoint)["files"]


@pytest.mark.parametrize(
    ("settings", "tuned", "lora"),
    [
        (tiny_settings(vision=None), ["module", "projector"], True),
        (tiny_settings(llm=None), ["module", "projector", "vision"], False),
        (tiny_settings(mdp=None), ["projector", "vision"], True),
        (tiny_settings(rank=0, llm=None, vision=None, projector=None), ["module"], False),
        (tiny_settings(MDP | {"init_gain": 2.0}, module=None, vision=None), ["module", "projector"], True),
        (tiny_settings(DIFFERENCE, module=None), ["module", "projector", "vision"], True),
    ],
    ids=["frozen vision encoder", "frozen LLM", "no module", "module alone", "MDP never trained", "difference, too"],
)
def test_adapters_hold_what_trained_and_nothing_else(settings, tuned, lora, base, tmp_path):
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", settings)
    folder = checkpoint / ADAPTERS
    assert read_manifest(folder)["tuned"] == tuned
    assert (folder / "lora").is_dir() == lora
    if lora:
        names = load_file(folder / "lora/adapter_model.safetensors")
        assert all("lora_" in name for name in names), "no other weight, such as the tokens' embeddings"
    expected = logits(tiny_trained(base, settings), base)
    torch.manual_seed(5)  # a module that was not stored would be another
    for source in (checkpoint, folder):
        torch.testing.assert_close(logits(load_model(source)[0], base), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_adapters_are_loaded_without_a_warning_of_the_libraries_to_each_other(checkpoint):
    load_model(checkpoint / "adapters")


def test_adapters_are_not_laid_over_another_base(checkpoint):
    other_base = tiny_base(checkpoint.parent / "other", seed=5)
    hashes = [folder_sha256(folder)[:12] for folder in (checkpoint.parent / "base", other_base)]
    with raises(CheckpointError, "models.other_base_digest", base=other_base, value=hashes[1], expected=hashes[0]):
        load_model(checkpoint / ADAPTERS, base=other_base)
    load_model(checkpoint)  # the merged model needs no base


@pytest.mark.fault("28")
def test_a_missing_tuned_weight_is_an_error_though_the_manifest_agrees(checkpoint):
    folder = checkpoint / ADAPTERS
    facts = {name: value for name, value in read_manifest(folder).items() if name != "files"}
    tuned = load_file(folder / "tuned.safetensors")
    tuned.pop("model.image_newline")
    save_file(tuned, folder / "tuned.safetensors")
    with raises(CheckpointError, "models.other_digest", path=folder / "tuned.safetensors"):
        load_model(folder)
    write_manifest(folder, **facts)
    with raises(CheckpointError, "models.other_tuned_weights", value=1, names=["model.image_newline"]):
        load_model(folder)


@pytest.mark.fault("28")
def test_the_first_of_many_missing_tuned_weights_are_named_in_order(checkpoint):
    folder = checkpoint / ADAPTERS
    facts = {name: value for name, value in read_manifest(folder).items() if name != "files"}
    tuned = load_file(folder / "tuned.safetensors")
    missing_names = sorted(tuned)[:9]
    save_file({name: tuned[name] for name in tuned if name not in missing_names}, folder / "tuned.safetensors")
    write_manifest(folder, **facts)
    with raises(CheckpointError, "models.other_tuned_weights", value=9, names=missing_names[:3]):
        load_model(folder)


def test_adapters_are_not_laid_over_a_base_that_was_quantized(checkpoint):
    config = checkpoint.parent / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    with raises(CheckpointError, "models.quantized", path=config, value="awq"):
        load_model(checkpoint / ADAPTERS)


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
# What happens to the folder, the code of the error, and the file that it names
DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "models.no_manifest", ""),
    "manifest cut off": (rewritten(MANIFEST, lambda d: d[: len(d) // 2]), "models.not_json", MANIFEST),
    "manifest empty": (rewritten(MANIFEST, lambda _: b"[]"), "models.manifest_without_files", MANIFEST),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "models.missing_file", WEIGHTS),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "models.missing_file", "tokenizer.json"),
    "tokenizer cut off": (rewritten("tokenizer.json", lambda d: d[:-9]), "models.not_json", "tokenizer.json"),
    "a bit": (rewritten(WEIGHTS, lambda d: d[:-1] + bytes([d[-1] ^ 1])), "models.other_digest", WEIGHTS),
    "family": (
        rewritten(MANIFEST, lambda d: d.replace(b'"m3diff"', b'"m4diff"')),
        "models.unknown_family",
        MANIFEST,
    ),
}


@pytest.mark.fault("09")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_file_named(name, checkpoint):
    damage, code, file = DAMAGES[name]
    damage(checkpoint)
    with raises(CheckpointError, code, path=checkpoint / file):
        load_model(checkpoint)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda folder: (folder / "config.json").unlink(), "models.missing_file"),
        (rewritten("config.json", lambda d: d[:-9]), "models.not_json"),
    ],
    ids=["missing", "cut off"],
)
def test_a_processor_is_refused_if_the_configuration_beside_it_is_damaged(damage, code, checkpoint):
    damage(checkpoint)
    with raises(CheckpointError, code, path=checkpoint / "config.json"):
        load_processor(checkpoint)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("\n  size mismatch\nfor weight a"), "size mismatch"),
        (KeyError(), "KeyError"),
        (
            ParamsError("files.unreadable", path=Path("a"), cause="b"),
            Fault("files.unreadable", path=Path("a"), cause="b"),
        ),
    ],
    ids=["lines", "no text", "coded"],
)
def test_an_error_of_loading_has_the_folder_and_its_cause_in_one_line(error, cause):
    folder = Path("folder")
    with raises(CheckpointError, "models.not_loaded", path=folder, cause=cause), convert_loading_errors(folder):
        raise error


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError(), CheckpointError("models.quantized")], ids=repr
)
def test_an_error_that_says_what_is_wrong_with_the_machine_or_folder_stays(error):
    with pytest.raises(type(error)) as raised, convert_loading_errors(Path("folder")):
        raise error
    assert raised.value is error


@pytest.mark.fault("09")
def test_a_damaged_checkpoint_is_not_exported(checkpoint):
    damage, code, file = DAMAGES["a bit"]
    damage(checkpoint)
    with raises(CheckpointError, code, path=checkpoint / file):
        export_checkpoint(checkpoint, checkpoint.parent / "out", adapters=True)
    assert not (checkpoint.parent / "out").exists()


def test_a_family_of_a_later_version_is_named(checkpoint):
    damage, code, _ = DAMAGES["family"]
    damage(checkpoint)
    with raises(CheckpointError, code, field="family", value="m4diff", names=list(FAMILIES)):
        load_model(checkpoint)


def add_a_blank(file: Path) -> None:
    file.write_text(f"{file.read_text()}\n ")


EDITED = ("config.json", "tokenizer_config.json", "tokenizer.json", "processor_config.json", "chat_template.jinja")


@pytest.mark.parametrize("name", EDITED)
@pytest.mark.parametrize("inner", ["", ADAPTERS], ids=["whole", "adapters"])
def test_a_warning_names_what_was_edited_after_training(inner, name, checkpoint, caplog):
    folder = checkpoint / inner
    load_model(folder)
    assert caplog.text == ""
    add_a_blank(folder / name)
    load_model(folder)
    (warning,) = [record.message for record in caplog.records if record.name.endswith("checkpoint")]
    assert str(folder) in warning
    assert f" {name}. " in warning


def test_a_warning_names_a_file_that_was_added_after_training(checkpoint, caplog):
    (checkpoint / "special_tokens_map.json").write_text("{}")
    (checkpoint / "notes.txt").write_text("mine")
    load_model(checkpoint)
    assert " special_tokens_map.json. " in caplog.text
    assert "notes.txt" not in caplog.text


def test_line_ends_of_another_system_and_what_is_not_read_give_no_warning(checkpoint, caplog):
    for name in EDITED:
        text = (checkpoint / name).read_text()
        (checkpoint / name).write_text(text, newline="\r\n")
    add_a_blank(checkpoint / ADAPTERS / "config.json")
    load_model(checkpoint)
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.safetensors.index.json"])
def test_weights_that_the_manifest_does_not_list_are_refused(name, checkpoint):
    (checkpoint / name).write_bytes((checkpoint / "model.safetensors").read_bytes())
    with raises(CheckpointError, "models.unlisted_weights", path=checkpoint / name):
        load_model(checkpoint)


def test_an_index_of_weights_is_held_to_its_hash_as_weights_are(checkpoint):
    index = checkpoint / "model.safetensors.index.json"
    index.write_text('{"weight_map": {}}')
    facts = {name: value for name, value in read_manifest(checkpoint).items() if name != "files"}
    write_manifest(checkpoint, **facts)
    load_model(checkpoint)
    add_a_blank(index)
    with raises(CheckpointError, "models.other_digest", path=index):
        load_model(checkpoint)


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "adapters"])
def test_what_was_edited_is_not_exported_under_a_manifest_of_its_own(adapters, checkpoint):
    file = checkpoint / (ADAPTERS if adapters else "") / "tokenizer_config.json"
    add_a_blank(file)
    with raises(CheckpointError, "models.other_digest", path=file):
        export_checkpoint(checkpoint, checkpoint.parent / "out", adapters)
    assert not (checkpoint.parent / "out").exists()


def test_a_manifest_without_digests_is_refused(checkpoint):
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    (checkpoint / MANIFEST).write_text(json.dumps(manifest | {"files": {"config.json": None}}))
    with raises(CheckpointError, "models.manifest_without_files", path=checkpoint / MANIFEST):
        load_model(checkpoint)


def test_an_export_overwrites_nothing_and_needs_adapters_to_export_them(base, tmp_path):
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", tiny_settings(rank=0))
    assert not (checkpoint / ADAPTERS).exists()
    with raises(CheckpointError, "models.no_adapters", path=checkpoint):
        export_checkpoint(checkpoint, tmp_path / "out", adapters=True)
    (tmp_path / "out").mkdir()
    with raises(CheckpointError, "models.output_exists", path=tmp_path / "out"):
        export_checkpoint(checkpoint, tmp_path / "out", adapters=False)


def drop(file: Path, part: str) -> None:
    """Remove the first weight with `part` in its name from a file."""
    weights = load_file(file)
    weights.pop(next(name for name in weights if part in name))
    save_file(weights, file, {"format": "pt"})


@pytest.mark.fault("28")
@pytest.mark.parametrize(
    ("rank", "writer", "file", "part", "code"),
    [
        (2, PeftModel, "adapter_model.safetensors", "lora_B", "models.trained_weights_not_written"),
        (2, PreTrainedModel, "model.safetensors", "vision_tower", "models.weight_not_written"),
        (2, PreTrainedModel, "model.safetensors", "k_proj", "models.weight_not_written"),
        (0, PreTrainedModel, "model.safetensors", "k_proj", "models.weight_not_written"),
    ],
)
def test_a_checkpoint_without_a_trained_weight_is_refused(rank, writer, file, part, code, base, tmp_path, monkeypatch):
    original = writer.save_pretrained

    def save_pretrained(self: Any, folder: Path, **options: Any) -> None:
        original(self, folder, **options)
        drop(Path(folder) / file, part)

    monkeypatch.setattr(writer, "save_pretrained", save_pretrained)
    checkpoint = tmp_path / "checkpoint"
    with raises(CheckpointError, code, path=checkpoint / ADAPTERS if writer is PeftModel else checkpoint):
        tiny_checkpoint(base, checkpoint, tiny_settings(rank=rank))
    with raises(CheckpointError, "models.no_manifest", path=checkpoint):
        verify_manifest(checkpoint)


def test_adapters_that_could_not_be_loaded_again_are_refused_when_they_are_written(base, tmp_path):
    settings = tiny_settings()
    model = tiny_trained(base, settings)
    model.peft_config["default"].use_rslora = True  # type: ignore[index,union-attr]
    checkpoint = tmp_path / "checkpoint"
    with raises(CheckpointError, "models.other_recipe_of_adapters", field="use_rslora", value=True):
        save_checkpoint(
            model,
            FAMILY.load_processor(base),
            checkpoint,
            family="m3diff",
            base=base,
            base_sha256=folder_sha256(base),
            trained_on={},
        )
    assert not (checkpoint / "model.safetensors").exists()


def test_the_name_is_on_disk_alone_and_the_model_computes_with_the_base_s_strategy(trained_checkpoint, base):
    for folder in (trained_checkpoint, trained_checkpoint / ADAPTERS):
        assert json.loads((folder / "config.json").read_text())["vision_feature_select_strategy"] == "mdp"
        for config in (AutoConfig.from_pretrained(folder), load_model(folder)[0].config):
            assert config.model_type == "m3diff"
            assert config.vision_feature_select_strategy == "full"
            assert config.mdp["vision_feature_layers"] == [1, 2]


@pytest.mark.parametrize(
    ("mdp", "field"), [(MDP, {"vision_feature_select_strategy": "full"}), (None, {"model_type": "m3diff"})]
)
def test_a_checkpoint_of_an_earlier_release_still_loads(mdp, field, base, tmp_path):
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", tiny_settings(mdp=mdp))
    expected = logits(load_model(checkpoint)[0], base)
    for folder in (checkpoint / ADAPTERS, checkpoint):
        facts = {name: value for name, value in read_manifest(folder).items() if name != "files"}
        config = json.loads((folder / "config.json").read_text()) | field
        (folder / "config.json").write_text(json.dumps(config))
        write_manifest(folder, **facts)
        torch.testing.assert_close(logits(load_model(folder)[0], base), expected, rtol=1e-4, atol=1e-5)
