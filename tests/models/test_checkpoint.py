"""What was trained, on disk: merged or laid over its base, the same logits, and told apart when damaged."""

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
    export_checkpoint,
    folder_sha256,
    load_model,
    read_manifest,
    verify_manifest,
    write_manifest,
)
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
def kept(base: Path) -> Path:
    return tiny_checkpoint(base, base.parent / "checkpoint")


@pytest.fixture
def checkpoint(kept: Path, base: Path, tmp_path: Path) -> Path:
    """A copy of a checkpoint that a test may break, beside a copy of its base."""
    shutil.copytree(base, tmp_path / "base")
    return Path(shutil.copytree(kept, tmp_path / "checkpoint"))


def test_the_manifest_names_family_base_its_hash_and_every_file(kept, base):
    for folder, way in ((kept, "../base"), (kept / ADAPTERS, "../../base")):
        manifest = verify_manifest(folder)
        assert manifest == read_manifest(folder)
        assert (manifest["family"], manifest["base"], manifest["base_sha256"]) == ("m3diff", way, folder_sha256(base))
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        assert manifest["files"].keys() == files - {"manifest.json"}
        assert load_model(folder)[0].dtype == torch.float32
        assert load_model(folder, torch.bfloat16)[0].dtype == torch.bfloat16
    assert read_manifest(kept / ADAPTERS)["tuned"] == ["module", "projector", "vision"]
    assert "adapters/tuned.safetensors" in verify_manifest(kept)["files"]


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
    want = logits(tiny_trained(base, settings), base)
    torch.manual_seed(5)  # a module that was not stored would be another
    for source in (checkpoint, folder):
        torch.testing.assert_close(logits(load_model(source)[0], base), want, rtol=1e-4, atol=1e-5)


def test_adapters_are_not_laid_over_another_base(checkpoint):
    other = tiny_base(checkpoint.parent / "other", seed=5)
    hashes = [folder_sha256(folder)[:12] for folder in (checkpoint.parent / "base", other)]
    with pytest.raises(
        CheckpointError, match=rf"base of sha256 {hashes[0]}, but .*other has {hashes[1]}; .*`--base FOLDER`"
    ):
        load_model(checkpoint / ADAPTERS, base=other)
    load_model(checkpoint)  # the merged model needs no base


@pytest.mark.fault("28")
def test_a_missing_tuned_weight_is_an_error_though_the_manifest_agrees(checkpoint):
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


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


WEIGHTS, MANIFEST = "model.safetensors", "manifest.json"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "no manifest.json, .*not written to its end; name a"),
    "manifest cut off": (rewritten(MANIFEST, lambda d: d[: len(d) // 2]), "manifest.json: not JSON .*fetch it again"),
    "manifest empty": (rewritten(MANIFEST, lambda _: b"[]"), "manifest.json: has no list of files; restore"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS}: missing, though the manifest names it; r"),
    "a bit": (rewritten(WEIGHTS, lambda d: d[:-1] + bytes([d[-1] ^ 1])), f"{WEIGHTS}: sha256 .*the manifest says .*; "),
    "family": (rewritten(MANIFEST, lambda d: d.replace(b'"m3diff"', b'"m4diff"')), "family 'm4diff' is none of m3diff"),
}


@pytest.mark.fault("09")
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_file_named(name, checkpoint):
    damage, text = DAMAGES[name]
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=text):
        load_model(checkpoint)
    if name == "a bit":
        with pytest.raises(CheckpointError, match=WEIGHTS):
            export_checkpoint(checkpoint, checkpoint.parent / "out", adapters=True)
        assert not (checkpoint.parent / "out").exists()


def test_an_export_overwrites_nothing_and_needs_adapters_to_export_them(base, tmp_path):
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", tiny_settings(rank=0))
    assert not (checkpoint / ADAPTERS).exists()
    with pytest.raises(CheckpointError, match="holds no adapters"):
        export_checkpoint(checkpoint, tmp_path / "out", adapters=True)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        export_checkpoint(checkpoint, tmp_path / "out", adapters=False)


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
def test_a_checkpoint_without_a_trained_weight_is_refused(rank, writer, file, part, base, tmp_path, monkeypatch):
    original = writer.save_pretrained

    def save_pretrained(self: Any, folder: Path, **given: Any) -> None:
        original(self, folder, **given)
        drop(Path(folder) / file, part)

    monkeypatch.setattr(writer, "save_pretrained", save_pretrained)
    with pytest.raises(CheckpointError, match=r"weights that trained are missing: |a weight is missing"):
        tiny_checkpoint(base, tmp_path / "checkpoint", tiny_settings(rank=rank))
    with pytest.raises(CheckpointError, match="not written to its end"):
        verify_manifest(tmp_path / "checkpoint")


def test_the_name_is_on_disk_alone_and_the_model_computes_with_the_base_s_strategy(kept, base):
    for folder in (kept, kept / ADAPTERS):
        assert json.loads((folder / "config.json").read_text())["vision_feature_select_strategy"] == "mdp"
        for config in (AutoConfig.from_pretrained(folder), load_model(folder)[0].config):
            assert (config.model_type, config.vision_feature_select_strategy) == ("m3diff", "full")
            assert config.mdp["vision_feature_layers"] == [1, 2]


@pytest.mark.parametrize(
    ("mdp", "field"), [(MDP, {"vision_feature_select_strategy": "full"}), (None, {"model_type": "m3diff"})]
)
def test_a_checkpoint_of_an_earlier_release_still_loads(mdp, field, base, tmp_path):
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", tiny_settings(mdp=mdp))
    want = logits(load_model(checkpoint)[0], base)
    for folder in (checkpoint / ADAPTERS, checkpoint):
        facts = {name: value for name, value in read_manifest(folder).items() if name != "files"}
        config = json.loads((folder / "config.json").read_text()) | field
        (folder / "config.json").write_text(json.dumps(config))
        write_manifest(folder, **facts)
        torch.testing.assert_close(logits(load_model(folder)[0], base), want, rtol=1e-4, atol=1e-5)
