"""What was trained, on disk: merged or laid over its base, the same logits, and told apart when damaged."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from m3diff.models import FAMILIES
from m3diff.models import checkpoint as checkpoint_module
from m3diff.models.checkpoint import (
    ADAPTERS,
    CheckpointError,
    export_checkpoint,
    folder_sha256,
    load_model,
    read_manifest,
    save_checkpoint,
    verify_manifest,
    write_manifest,
)
from m3diff.models.m3diff_settings import M3DiffSettings
from m3diff.records.files import sha256_of_folder
from tests.models.test_modeling import pair_inputs
from tests.tiny import tiny_base, tiny_checkpoint, tiny_settings, tiny_trained

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
def kept(base: Path) -> Path:
    return tiny_checkpoint(base, base.parent / "checkpoint")


@pytest.fixture
def checkpoint(kept: Path, base: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint that a test may break, beside a copy of its base."""
    shutil.copytree(base, tmp_path / "base")
    return Path(shutil.copytree(kept, tmp_path / "checkpoint"))


def test_the_manifest_names_family_base_its_hash_and_every_file(kept: Path, base: Path) -> None:
    for folder, way in ((kept, "../base"), (kept / ADAPTERS, "../../base")):
        manifest = verify_manifest(folder)
        assert manifest == read_manifest(folder)
        assert (manifest["family"], manifest["base"], manifest["base_sha256"]) == ("m3diff", way, folder_sha256(base))
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert manifest["files"].keys() == files - {"manifest.json"}
    assert read_manifest(kept / ADAPTERS)["tuned"] == ["module", "projector", "vision"]
    assert "adapters/tuned.safetensors" in verify_manifest(kept)["files"]


def test_the_hash_of_a_folder_is_the_one_that_other_stages_take(kept: Path, tmp_path: Path) -> None:
    for name in ("a/b.txt", "a-b.txt", "a.txt", "A/c"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for folder in (kept, tmp_path):
        assert folder_sha256(folder) == sha256_of_folder(folder)


def test_a_model_is_loaded_in_the_precision_asked_for(kept: Path) -> None:
    for folder in (kept, kept / ADAPTERS):
        assert load_model(folder)[0].dtype == torch.float32
        assert load_model(folder, torch.bfloat16)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "tuned", "lora"),
    [
        (tiny_settings(vision=None), ["module", "projector"], True),
        (tiny_settings(llm=None), ["module", "projector", "vision"], False),
        (tiny_settings(mdp=None), ["projector", "vision"], True),
        (tiny_settings(rank=0, llm=None, vision=None, projector=None), ["module"], False),
    ],
    ids=["frozen vision encoder", "frozen LLM", "no module", "module alone"],
)
def test_adapters_hold_what_trained_and_nothing_else(
    settings: M3DiffSettings, tuned: list[str], lora: bool, base: Path, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", settings)
    folder = checkpoint / ADAPTERS
    assert read_manifest(folder)["tuned"] == tuned
    assert (folder / "lora").is_dir() == lora
    want = logits(tiny_trained(base, settings), base)
    for source in (checkpoint, folder):
        torch.testing.assert_close(logits(load_model(source)[0], base), want, rtol=1e-4, atol=1e-5)


def test_a_base_that_moved_must_be_named(checkpoint: Path, base: Path) -> None:
    (checkpoint.parent / "base").rename(checkpoint.parent / "moved")
    with pytest.raises(CheckpointError, match="whose base is not at .*base; name it with `--base FOLDER`"):
        load_model(checkpoint / ADAPTERS)
    loaded, _ = load_model(checkpoint / ADAPTERS, base=checkpoint.parent / "moved")
    torch.testing.assert_close(logits(loaded, base), logits(load_model(checkpoint)[0], base), rtol=1e-4, atol=1e-5)


def test_adapters_are_not_laid_over_another_base(checkpoint: Path) -> None:
    other = tiny_base(checkpoint.parent / "other", seed=5)
    hashes = [folder_sha256(folder)[:12] for folder in (checkpoint.parent / "base", other)]
    with pytest.raises(
        CheckpointError, match=rf"base of sha256 {hashes[0]}, but .*other has {hashes[1]}; .*`--base FOLDER`"
    ):
        load_model(checkpoint / ADAPTERS, base=other)
    load_model(checkpoint)  # the merged model needs no base


@pytest.mark.fault("28")
def test_a_missing_tuned_weight_is_an_error_though_the_manifest_agrees(checkpoint: Path) -> None:
    folder = checkpoint / ADAPTERS
    facts = {name: value for name, value in read_manifest(folder).items() if name != "files"}
    tuned = load_file(folder / "tuned.safetensors")
    tuned.pop("model.image_newline")
    save_file(tuned, folder / "tuned.safetensors")
    with pytest.raises(CheckpointError, match="sha256"):
        load_model(folder)
    write_manifest(folder, **facts)
    with pytest.raises(CheckpointError, match="1 weights missing .*image_newline"):
        load_model(folder)


def remove_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_manifest(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text[: len(text) // 2])


def empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def change_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def change_family(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"family": "m4diff"}))


@pytest.mark.fault("09")
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (remove_manifest, r"checkpoint: no manifest.json, .*not written to its end; name a folder"),
        (cut_manifest, r"manifest.json: not JSON .*fetch the folder again"),
        (empty_manifest, r"manifest.json: has no list of files; fetch"),
        (remove_weights, r"model.safetensors: missing, though the manifest names it; fetch"),
        (change_weights, r"model.safetensors: sha256 [0-9a-f]{12} but the manifest says [0-9a-f]{12}; fetch"),
        (change_family, r"manifest.json: family 'm4diff' is none of m3diff"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_file_named(
    damage: Callable[[Path], None], text: str, checkpoint: Path
) -> None:
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=text):
        load_model(checkpoint)


def test_an_export_of_a_damaged_checkpoint_is_refused(checkpoint: Path) -> None:
    change_weights(checkpoint)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        export_checkpoint(checkpoint, checkpoint.parent / "out", adapters=True)
    assert not (checkpoint.parent / "out").exists()


def test_an_export_overwrites_nothing_and_needs_adapters_to_export_them(base: Path, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", tiny_settings(rank=0))
    assert not (checkpoint / ADAPTERS).exists()
    with pytest.raises(CheckpointError, match="holds no adapters"):
        export_checkpoint(checkpoint, tmp_path / "out", adapters=True)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        export_checkpoint(checkpoint, tmp_path / "out", adapters=False)


def test_a_checkpoint_can_be_written_over_an_older_one(base: Path, tmp_path: Path) -> None:
    folder = tiny_checkpoint(base, tmp_path / "checkpoint", seed=1)
    settings = tiny_settings()
    save_checkpoint(
        tiny_trained(base, settings, seed=2),
        FAMILY.load_processor(base),
        folder,
        family="m3diff",
        base=base,
        base_sha256=folder_sha256(base),
    )
    want = logits(tiny_trained(base, settings, seed=2), base)
    torch.testing.assert_close(logits(load_model(folder)[0], base), want, rtol=1e-4, atol=1e-5)


def drop(file: Path, part: str) -> None:
    """Leave the first weight with `part` in its name out of a file."""
    weights = load_file(file)
    weights.pop(next(name for name in weights if part in name))
    save_file(weights, file, {"format": "pt"})


@pytest.mark.fault("28")
@pytest.mark.parametrize(
    ("rank", "writer", "file", "part"),
    [
        (2, PeftModel, "adapter_model.safetensors", "lora_B"),
        (2, PreTrainedModel, "model.safetensors", "vision_tower"),
        (2, PreTrainedModel, "model.safetensors", "k_proj"),
        (0, PreTrainedModel, "model.safetensors", "k_proj"),
    ],
)
def test_a_checkpoint_without_a_weight_that_trained_is_not_written_to_its_end(
    rank: int, writer: type, file: str, part: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = writer.save_pretrained

    def save_pretrained(self: Any, folder: Path, **given: Any) -> None:
        original(self, folder, **given)
        drop(Path(folder) / file, part)

    monkeypatch.setattr(writer, "save_pretrained", save_pretrained)
    with pytest.raises(CheckpointError, match=r"weights that trained are missing: |a weight is missing"):
        tiny_checkpoint(base, tmp_path / "checkpoint", tiny_settings(rank=rank))
    with pytest.raises(CheckpointError, match="not written to its end"):
        verify_manifest(tmp_path / "checkpoint")


def test_adapters_without_a_weight_that_trained_in_full_are_not_written_to_their_end(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoint_module.tuned_weights

    def without(model: Any, family: Any) -> dict[str, torch.Tensor]:
        return dict(list(original(model, family).items())[1:])

    monkeypatch.setattr(checkpoint_module, "tuned_weights", without)
    with pytest.raises(CheckpointError, match="1 of .* weights that trained are missing: "):
        tiny_checkpoint(base, tmp_path / "checkpoint")


LOADERS = (
    "AutoConfig",
    "AutoModelForImageTextToText",
    "LlavaOnevisionConfig",
    "LlavaOnevisionForConditionalGeneration",
)
STOCK = """
import json, sys
from pathlib import Path
import transformers
from safetensors.torch import load_file, save_file
place, folders, loaders = Path(sys.argv[1]), sys.argv[2].split(), sys.argv[3].split()
told = {folder: {} for folder in folders}
for folder in folders:
    for name in loaders:
        try:
            loaded = getattr(transformers, name).from_pretrained(place / folder)
            if name.endswith("Generation"):
                logits = loaded(**load_file(place / "inputs.safetensors")).logits
                save_file({"logits": logits}, place / f"{folder}.safetensors")
            told[folder][name] = "loaded"
        except Exception as error:
            told[folder][name] = f"{type(error).__name__}: {error}"
assert not any(name.startswith("m3diff") for name in sys.modules)
(place / "told.json").write_text(json.dumps(told))
"""


@pytest.mark.slow(15)
def test_transformers_alone_refuses_a_module_that_it_would_drop_and_computes_alike_where_there_is_none(
    kept: Path, base: Path, tmp_path: Path
) -> None:
    export_checkpoint(kept, tmp_path / "merged", adapters=False)
    export_checkpoint(kept, tmp_path / "adapters", adapters=True)
    bare = tiny_checkpoint(base, tmp_path / "bare", tiny_settings(mdp=None))
    inputs = pair_inputs()
    inputs["input_ids"][inputs["input_ids"] == 3] = json.loads((base / "config.json").read_text())["image_token_index"]
    save_file(dict(inputs), tmp_path / "inputs.safetensors")
    command = [sys.executable, "-c", STOCK, str(tmp_path), "merged adapters bare", " ".join(LOADERS)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd="/")
    assert ended.returncode == 0, ended.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    for folder in ("merged", "adapters"):
        for name in LOADERS[:2]:
            assert "model type `m3diff`" in told[folder][name]
        for name in LOADERS[2:]:
            assert "'vision_feature_select_strategy' expected one of ('default', 'full'), got mdp" in told[folder][name]
    assert told["bare"] == dict.fromkeys(LOADERS, "loaded")
    got = load_file(tmp_path / "bare.safetensors")["logits"]
    torch.testing.assert_close(got, logits(load_model(bare)[0], base), rtol=1e-4, atol=1e-5)


def test_the_name_is_on_disk_alone_and_the_model_computes_with_the_base_s_strategy(kept: Path, base: Path) -> None:
    for folder in (kept, kept / ADAPTERS):
        assert json.loads((folder / "config.json").read_text())["vision_feature_select_strategy"] == "mdp"
        for config in (AutoConfig.from_pretrained(folder), load_model(folder)[0].config):
            assert (config.model_type, config.vision_feature_select_strategy) == ("m3diff", "full")
            assert config.mdp["vision_feature_layers"] == [1, 2]
    patches = pair_inputs()["pixel_values"][:2]
    model = load_model(kept)[0].model
    with torch.no_grad():
        features = model.get_image_features(patches, torch.tensor([[24, 24]]))  # of one image, no pair
    assert len(features.pooler_output) == 1


def test_a_checkpoint_written_before_it_named_itself_still_loads(checkpoint: Path, base: Path) -> None:
    want = logits(load_model(checkpoint)[0], base)
    for folder in (checkpoint / ADAPTERS, checkpoint):
        facts = {name: value for name, value in read_manifest(folder).items() if name != "files"}
        config = json.loads((folder / "config.json").read_text()) | {"vision_feature_select_strategy": "full"}
        (folder / "config.json").write_text(json.dumps(config))
        write_manifest(folder, **facts)
        torch.testing.assert_close(logits(load_model(folder)[0], base), want, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_without_a_module_written_under_the_family_s_name_still_loads(base: Path, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", tiny_settings(mdp=None))
    want = logits(load_model(checkpoint)[0], base)
    facts = {name: value for name, value in read_manifest(checkpoint).items() if name != "files"}
    config = json.loads((checkpoint / "config.json").read_text()) | {"model_type": "m3diff"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    write_manifest(checkpoint, **facts)
    assert torch.equal(logits(load_model(checkpoint)[0], base), want)
