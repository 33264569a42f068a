"""What M3Diff trains and how it is kept: LoRA on the LLM; tower, projector and MDP in full (paper section 5.2).

A checkpoint is one merged model; its folder `adapters/` holds the same as what was trained alone, to be laid over the
base it names: LoRA in peft's layout and the fully tuned weights. Both are safetensors with a manifest of hashes, and
`M3DiffForConditionalGeneration.from_pretrained` loads either without `params.yaml`.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from components.models.m3diff.configuration import M3DiffConfig
from components.models.m3diff.modeling import M3DiffForConditionalGeneration

LORA_TARGETS = r"model\.language_model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)"
"""The seven linears of every LLM layer; the paper does not name its targets. A full path, because SigLIP's projections
bear the same short names."""

LINEARS_PER_LAYER = 7
FULLY_TUNED = ("model.vision_tower.", "model.multi_modal_projector.", "model.image_newline", "model.mdp.")
UNUSED = ("model.vision_tower.post_layernorm.", "model.vision_tower.head.")
"""Parts of the tower that LLaVA-OneVision never runs: it takes a hidden state, not the tower's output."""


ADAPTERS, LORA, TUNED = "adapters", "lora", "tuned.safetensors"


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
    adapted: PeftModel | M3DiffForConditionalGeneration = model
    if rank:
        lora = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=LORA_TARGETS, bias="none")
        adapted = get_peft_model(model, lora, autocast_adapter_dtype=False)  # in the weights' own precision
    for name, parameter in model.named_parameters():
        parameter.requires_grad = _should_train(name, rank)
    return adapted


def _tuned(name: str) -> bool:
    return name.startswith(FULLY_TUNED) and not name.startswith(UNUSED)


def _should_train(name: str, rank: int) -> bool:
    if name.startswith(FULLY_TUNED):
        return _tuned(name)
    if rank:
        return ".lora_A." in name or ".lora_B." in name
    return re.fullmatch(LORA_TARGETS + r"\.(weight|bias)", name) is not None


def trainable_groups(
    model: M3DiffForConditionalGeneration, rank: int, lr: float, lr_vision: float, lr_mdp: float | None = None
) -> list[TrainableGroup]:
    """The tower at its own learning rate, everything else that trains at `lr` (paper section 5.2). With `lr_mdp`
    the MDP module has one of its own: one that starts as a detector is undone by a high rate."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    wrong = [name for name, p in model.named_parameters() if p.requires_grad != _should_train(name, rank)]
    assert not wrong, f"the trainable set is not the intended one: {wrong[:5]}"
    own = {"tower": ("model.vision_tower.", lr_vision)}
    if lr_mdp is not None:
        own["mdp"] = ("model.mdp.", lr_mdp)
    groups = [
        TrainableGroup(group, rate, [p for name, p in named if name.startswith(prefix)])
        for group, (prefix, rate) in own.items()
    ]
    prefixes = tuple(prefix for prefix, _ in own.values())
    groups.append(TrainableGroup("rest", lr, [p for name, p in named if not name.startswith(prefixes)]))
    return [group for group in groups if group.parameters]


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


def tuned_weights(model: M3DiffForConditionalGeneration) -> dict[str, torch.Tensor]:
    """What trains in full, by name: tower, projector, newline and MDP."""
    return {name: p.detach() for name, p in model.named_parameters() if _tuned(name)}


def save_adapters(model: PeftModel, folder: Path, base: Path) -> None:
    """Write what trained: `lora/` as peft does, `tuned.safetensors`, the configuration and, in the manifest, the way
    from here to the base."""
    inner = unwrapped(model)
    way = os.path.relpath(base, folder)
    for lora in model.peft_config.values():
        lora.base_model_name_or_path = way
    model.save_pretrained(str(folder / LORA))
    (folder / LORA / "README.md").unlink(missing_ok=True)
    save_file({name: p.contiguous() for name, p in tuned_weights(inner).items()}, folder / TUNED, {"format": "pt"})
    inner.config.save_pretrained(folder)
    write_manifest(folder, base=way)


def is_adapters(folder: str | Path) -> bool:
    return (Path(folder) / LORA / "adapter_config.json").is_file()


def load_adapters(folder: Path, base: Path | None = None, **kwargs: Any) -> M3DiffForConditionalGeneration:
    """The base with the adapters of `folder` folded in and its tuned weights laid over.

    Raises:
        CheckpointError: the folder is incomplete or damaged, or the base is not where its manifest says.
    """
    base = base or (folder / verify_manifest(folder)["base"]).resolve()
    if not (base / "config.json").is_file():
        raise CheckpointError(f"{folder}: its base is not at {base}; pass base= to say where it is")
    config = M3DiffConfig.from_pretrained(folder)
    model = M3DiffForConditionalGeneration.from_pretrained(base, config=config, **kwargs)
    tuned, wanted = load_file(folder / TUNED), tuned_weights(model)
    if tuned.keys() != wanted.keys():
        odd = sorted(tuned.keys() ^ wanted.keys())
        raise CheckpointError(f"{folder / TUNED}: {len(odd)} weights missing or not the configuration's: {odd[:3]}")
    model.load_state_dict(tuned, strict=False)
    return merge(PeftModel.from_pretrained(model, folder / LORA, autocast_adapter_dtype=False))


def export_checkpoint(checkpoint: Path, out: Path, adapters: bool) -> None:
    """Copy a checkpoint out of the project: the merged model, or its adapters with the way to their base.

    Raises:
        CheckpointError: the checkpoint is damaged, holds no adapters (trained without), or `out` exists.
    """
    base = checkpoint / verify_manifest(checkpoint)["base"]
    source = checkpoint / ADAPTERS if adapters else checkpoint
    if adapters:
        if not is_adapters(source):
            raise CheckpointError(f"{checkpoint}: holds no adapters (train.lora_rank was 0); export it merged")
        base = source / verify_manifest(source)["base"]
    if out.exists():
        raise CheckpointError(f"{out}: exists; name a folder that does not")
    shutil.copytree(source, out, ignore=shutil.ignore_patterns(ADAPTERS, "manifest.json"))
    write_manifest(out, base=os.path.relpath(base, out))
