"""What was trained, on disk: merged or laid over its base, the same logits, and told apart when damaged."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.models.m3diff.modeling import M3DiffForConditionalGeneration
from components.models.m3diff.processing import M3DiffProcessor
from components.models.m3diff.tuning import (
    ADAPTERS,
    CheckpointError,
    add_lora,
    export_checkpoint,
    merge,
    save_adapters,
    write_manifest,
)
from tests.model.test_modeling import pair_inputs
from tests.tiny import MDP, tiny_base


def trained(folder: Path, rank: int = 2) -> tuple[Path, torch.Tensor, set[str]]:
    """A checkpoint as training writes it, beside its base; its logits and the names of what trained."""
    base = tiny_base(folder / "base")
    model = M3DiffForConditionalGeneration.from_pretrained(base, mdp=MDP)
    adapted = add_lora(model, rank, alpha=4).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        logits = adapted(**inputs(base)).logits.clone()
    checkpoint = folder / "checkpoint"
    if rank:
        (checkpoint / ADAPTERS).mkdir(parents=True)
        save_adapters(adapted, checkpoint / ADAPTERS, base)
        M3DiffProcessor.from_pretrained(base).save_pretrained(checkpoint / ADAPTERS)
    merge(adapted).save_pretrained(checkpoint)
    M3DiffProcessor.from_pretrained(base).save_pretrained(checkpoint)
    write_manifest(checkpoint, base="../base")
    return checkpoint, logits, names


def inputs(folder: Path) -> dict:
    held = pair_inputs()
    held["input_ids"][held["input_ids"] == 3] = json.loads((folder / "config.json").read_text())["image_token_index"]
    return held


@pytest.mark.parametrize("adapters", [False, True], ids=["merged", "adapters"])
def test_both_exports_load_without_parameters_and_give_the_trained_logits(tmp_path: Path, adapters: bool) -> None:
    checkpoint, want, _ = trained(tmp_path)
    export_checkpoint(checkpoint, tmp_path / "elsewhere" / "out", adapters)
    shutil.rmtree(checkpoint)
    loaded = M3DiffForConditionalGeneration.from_pretrained(tmp_path / "elsewhere" / "out").eval()
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    with torch.no_grad():
        # the untouched base is off by 1e-1
        torch.testing.assert_close(loaded(**inputs(tmp_path / "base")).logits, want, rtol=1e-4, atol=1e-5)
    assert len(M3DiffProcessor.from_pretrained(tmp_path / "elsewhere" / "out").encode_prompt("What changed?")) > 20


def test_what_trained_is_what_is_saved(tmp_path: Path) -> None:
    checkpoint, _, names = trained(tmp_path)
    folder = checkpoint / ADAPTERS
    lora = {
        name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        for name in load_file(folder / "lora" / "adapter_model.safetensors")
    }
    tuned = set(load_file(folder / "tuned.safetensors"))
    assert lora | tuned == names
    assert not lora & tuned
    assert str(tmp_path) not in "".join(file.read_text() for file in folder.rglob("*.json")), "no absolute path"


def test_a_base_that_moved_must_be_named(tmp_path: Path) -> None:
    checkpoint, want, _ = trained(tmp_path)
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="its base is not at .*base; pass base="):
        M3DiffForConditionalGeneration.from_pretrained(checkpoint / ADAPTERS)
    loaded = M3DiffForConditionalGeneration.from_pretrained(checkpoint / ADAPTERS, base=tmp_path / "moved").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs(tmp_path / "moved")).logits, want, rtol=1e-4, atol=1e-5)


def test_a_missing_tuned_weight_is_an_error_though_the_manifest_agrees(tmp_path: Path) -> None:
    checkpoint, _, _ = trained(tmp_path)
    folder = checkpoint / ADAPTERS
    tuned = load_file(folder / "tuned.safetensors")
    tuned.pop("model.image_newline")
    save_file(tuned, folder / "tuned.safetensors")
    with pytest.raises(CheckpointError, match="sha256"):
        M3DiffForConditionalGeneration.from_pretrained(folder)
    write_manifest(folder, base="../../base")
    with pytest.raises(CheckpointError, match="1 weights missing .*image_newline"):
        M3DiffForConditionalGeneration.from_pretrained(folder)


def test_an_export_overwrites_nothing_and_needs_adapters_to_export_them(tmp_path: Path) -> None:
    checkpoint, _, _ = trained(tmp_path, rank=0)
    with pytest.raises(CheckpointError, match="holds no adapters"):
        export_checkpoint(checkpoint, tmp_path / "out", adapters=True)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        export_checkpoint(checkpoint, tmp_path / "out", adapters=False)
