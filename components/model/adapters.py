"""What M3Diff trains and how it is kept: LoRA on the LLM; tower, projector and MDP in full (paper section 5.2).

A checkpoint is either one merged model, or the adapters and the fully tuned weights beside the name of their base. Both
are safetensors with a manifest of hashes, and load without `params.yaml`.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from components.model.modeling import M3DiffForConditionalGeneration

LORA_TARGETS = r"model\.language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
"""The seven linears of every LLM layer; the paper does not name its targets. A full path, because SigLIP's projections
bear the same short names."""

LINEARS_PER_LAYER = 7
FULLY_TUNED = ("model.vision_tower.", "model.multi_modal_projector.", "model.image_newline", "model.perception.")
UNUSED = ("model.vision_tower.post_layernorm.", "model.vision_tower.head.")
"""Parts of the tower that LLaVA-OneVision never runs: it takes a hidden state, not the tower's output."""


class CheckpointError(ValueError):
    """A checkpoint folder is incomplete or damaged."""


@dataclass(frozen=True)
class TrainableGroup:
    name: str
    lr: float
    parameters: list[nn.Parameter]


def add_lora(
    model: M3DiffForConditionalGeneration, rank: int, alpha: int
) -> PeftModel | M3DiffForConditionalGeneration:
    """Wrap the LLM's linears in LoRA adapters (dropout 0: shared-prefix packing is exact only so) and mark what trains.

    Rank 0 adds none and trains the LLM's linears in full. Raises ValueError where a target matches nothing.
    """
    targets = [name for name, _ in model.named_modules() if re.fullmatch(LORA_TARGETS, name)]
    layers = model.config.text_config.num_hidden_layers
    if len(targets) != LINEARS_PER_LAYER * layers:
        raise ValueError(
            f"LoRA targets match {len(targets)} linears, expected {LINEARS_PER_LAYER} in {layers} layers each"
        )
    adapted = model
    if rank:
        lora = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=LORA_TARGETS, bias="none")
        adapted = get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = _should_train(name, rank)
    return adapted


def _should_train(name: str, rank: int) -> bool:
    if name.startswith(FULLY_TUNED):
        return not name.startswith(UNUSED)
    if rank:
        return ".lora_A." in name or ".lora_B." in name
    return re.fullmatch(LORA_TARGETS + r"\.(weight|bias)", name) is not None


def trainable_groups(
    model: M3DiffForConditionalGeneration, rank: int, lr: float, lr_tower: float
) -> list[TrainableGroup]:
    """The tower at its own learning rate, everything else that trains at `lr` (paper section 5.2)."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    wrong = [name for name, p in model.named_parameters() if p.requires_grad != _should_train(name, rank)]
    assert not wrong, f"the trainable set is not the intended one: {wrong[:5]}"
    tower = [p for name, p in named if name.startswith("model.vision_tower.")]
    rest = [p for name, p in named if not name.startswith("model.vision_tower.")]
    return [TrainableGroup("tower", lr_tower, tower), TrainableGroup("rest", lr, rest)]


def unwrapped(model: nn.Module) -> M3DiffForConditionalGeneration:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, M3DiffForConditionalGeneration), type(base)
    return base


def write_manifest(folder: Path, **facts: str | int) -> None:
    """Write `manifest.json`, the hash of every other file in the folder; written last, it marks the folder complete."""
    files = {str(p.relative_to(folder)): _sha256(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    files.pop("manifest.json", None)
    text = json.dumps({**facts, "files": files}, indent=2) + "\n"
    temporary = folder / ".manifest.json"
    temporary.write_text(text)
    temporary.rename(folder / "manifest.json")


def verify_manifest(folder: Path) -> dict:
    """Check a checkpoint folder against its manifest and return it.

    Raises:
        CheckpointError: no manifest (half written), or a file is missing or differs; names the file.
    """
    file = folder / "manifest.json"
    if not file.is_file():
        raise CheckpointError(
            f"{folder}: no manifest.json, so it was not written to its end; delete it and train again"
        )
    manifest = json.loads(file.read_text())
    for name, want in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, though the manifest names it; restore it with `dvc checkout`")
        if (got := _sha256(path)) != want:
            raise CheckpointError(
                f"{path}: sha256 {got[:12]} but the manifest says {want[:12]}; restore it with `dvc checkout`"
            )
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parameter_counts(model: nn.Module) -> dict[str, int]:
    return {
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "frozen": sum(p.numel() for p in model.parameters() if not p.requires_grad),
    }


@torch.no_grad()
def merge(model: nn.Module) -> M3DiffForConditionalGeneration:
    """Fold the adapters into the LLM's weights; the model then needs no peft."""
    merged = model.merge_and_unload() if isinstance(model, PeftModel) else model
    return unwrapped(merged)
