"""A trained model on disk, of any family, loaded without `params.yaml`.

A checkpoint is one merged model; its folder `adapters/` holds what the base does not, to be laid over the base it
names: LoRA in peft's layout, the fully tuned weights and those of a new module. Both are safetensors with a manifest:
the family, the base with the hash of its content, and the hash of every file.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.models import FAMILIES
from components.models.family import Family, PairProcessor
from components.models.tuning import is_adapted, is_adapter, merge, trainable_names, unwrapped

MANIFEST = "manifest.json"
ADAPTERS, LORA, TUNED = "adapters", "lora", "tuned.safetensors"


class CheckpointError(ValueError):
    """A checkpoint folder is incomplete, damaged, or not what it was taken for."""


def write_manifest(folder: Path, **facts: Any) -> None:
    """Write `manifest.json`, the hash of every other file in the folder; written last, it marks the folder complete."""
    files = {path.relative_to(folder).as_posix(): _sha256(path) for path in _files(folder)}
    files.pop(MANIFEST, None)
    temporary = folder / f".{MANIFEST}"
    temporary.write_text(json.dumps({**facts, "files": files}, indent=2) + "\n")
    temporary.rename(folder / MANIFEST)


def verify_manifest(folder: Path) -> dict[str, Any]:
    """Check a checkpoint folder against its manifest and return it.

    Raises:
        CheckpointError: no manifest (half written), or a file is missing or differs; names the file.
    """
    manifest = read_manifest(folder)
    for name, want in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing, though the manifest names it; restore it with `dvc checkout`")
        if (got := _sha256(path)) != want:
            raise CheckpointError(
                f"{path}: sha256 {got[:12]} but the manifest says {want[:12]}; restore it with `dvc checkout`"
            )
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, its files not looked at. Raises CheckpointError where it is missing or is none."""
    file = folder / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{folder}: no {MANIFEST}, so it was not written to its end; delete it and train again")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON ({error}); restore it with `dvc checkout`") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{file}: has no list of files; restore it with `dvc checkout`")
    return manifest


def folder_sha256(folder: Path) -> str:
    """Hex digest over the names and contents of all files below a folder: names a base by what is in it."""
    digest = hashlib.sha256()
    for path in _files(folder):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{_sha256(path)}\n".encode())
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_checkpoint(
    model: Any, processor: PairProcessor, folder: Path, *, family: str, base: Path, base_sha256: str
) -> None:
    """Write the trained model with its adapters folded in and, in `adapters/`, what trained alone.

    No adapters are written where the linears that would have them trained in full (rank 0). The model is merged by it.

    Raises:
        CheckpointError: a weight is not in the files that were written, which have no manifest then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"family": family, "base_sha256": base_sha256}
    if can_save_adapters(model, FAMILIES[family]):
        (folder / ADAPTERS).mkdir(exist_ok=True)
        _save_adapters(model, FAMILIES[family], folder / ADAPTERS, base)
        processor.save_pretrained(folder / ADAPTERS)
        _see_adapters(model, folder / ADAPTERS)
        tuned = sorted({FAMILIES[family].part_of(name) for name in tuned_weights(model, FAMILIES[family])})
        write_manifest(folder / ADAPTERS, base=os.path.relpath(base, folder / ADAPTERS), tuned=tuned, **facts)
    merged = merge(model)
    merged.save_pretrained(folder)
    _see_whole(merged, folder)
    processor.save_pretrained(folder)
    write_manifest(folder, base=os.path.relpath(base, folder), **facts)


def can_save_adapters(model: Any, family: Family) -> bool:
    """Whether what trained is small beside the base: no part that takes adapters trained without them."""
    return all(is_adapter(name) or family.part_of(name) not in family.lora_targets for name in trainable_names(model))


def tuned_weights(model: Any, family: Family) -> dict[str, Tensor]:
    """What the base does not hold beside adapters, by name: what trains in full, and parts that are new."""
    trains = set(trainable_names(model))
    return {
        name: weight.detach().contiguous()
        for name, weight in unwrapped(model).named_parameters()
        if not is_adapter(name) and (name in trains or family.part_of(name) in family.new)
    }


def _save_adapters(model: Any, family: Family, folder: Path, base: Path) -> None:
    """`lora/` as peft writes it, `tuned.safetensors` and the configuration."""
    if is_adapted(model):
        for lora in model.peft_config.values():
            lora.base_model_name_or_path = os.path.relpath(base, folder)
        model.save_pretrained(str(folder / LORA), save_embedding_layers=False)
        (folder / LORA / "README.md").unlink(missing_ok=True)
    save_file(tuned_weights(model, family), folder / TUNED, {"format": "pt"})
    unwrapped(model).config.save_pretrained(folder)


def _see_adapters(model: Any, folder: Path) -> None:
    """See that what trained is in the folder, by name. Raises CheckpointError."""
    names = trainable_names(model)
    lora = {f"base_model.model.{name.replace('.default.', '.')}" for name in names if is_adapter(name)}
    found = _shapes(folder).keys() | (_shapes(folder / LORA).keys() if lora else set())
    if missing := sorted(lora.union(name for name in names if not is_adapter(name)) - found):
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} weights that trained are missing: {missing[:3]}"
        )


def _see_whole(merged: Any, folder: Path) -> None:
    """See that the folder has as many numbers as the model, whose weights may bear other names there. Raises
    CheckpointError."""
    distinct = {id(tensor): tensor.numel() for tensor in merged.state_dict(keep_vars=True).values()}  # once where tied
    want, found = sum(distinct.values()), sum(math.prod(shape) for shape in _shapes(folder).values())
    if found != want:
        raise CheckpointError(
            f"{folder}: {found:,} numbers were written, but the model has {want:,}: a weight is missing"
        )


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Of each tensor in the folder's own files."""
    shapes: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  # no mapping
    return shapes


def is_adapters(folder: Path) -> bool:
    return (folder / TUNED).is_file()


def load_model(folder: Path, dtype: torch.dtype = torch.float32, base: Path | None = None) -> tuple[Any, Family]:
    """The model of a checkpoint or of a folder of adapters, without adapters, and its family.

    Args:
        base: where the base of a folder of adapters is; by default where its manifest says.

    Raises:
        CheckpointError: the folder is incomplete, damaged or of an unknown family, or the base is not where or what
            its manifest says.
    """
    manifest = verify_manifest(folder)
    family = _family(folder, manifest)
    if is_adapters(folder):
        return _load_adapters(folder, manifest, family, dtype, base), family
    return family.load(folder, dtype, None), family


def _family(folder: Path, manifest: Mapping[str, Any]) -> Family:
    name = manifest.get("family")
    if name not in FAMILIES:
        raise CheckpointError(f"{folder / MANIFEST}: family {name!r} is none of {', '.join(FAMILIES)}; train again")
    return FAMILIES[name]


def _load_adapters(
    folder: Path, manifest: Mapping[str, Any], family: Family, dtype: torch.dtype, base: Path | None
) -> Any:
    """The base with the tuned weights of `folder` laid over and its adapters folded in."""
    model = family.load(_base(folder, manifest, base), dtype, folder)
    tuned = load_file(folder / TUNED)
    names = [name for name, _ in model.named_parameters() if not name.startswith(family.frozen)]
    wanted = {name for name in names if family.part_of(name) in manifest["tuned"]}
    if tuned.keys() != wanted:
        odd = sorted(tuned.keys() ^ wanted)
        raise CheckpointError(f"{folder / TUNED}: {len(odd)} weights missing or not the configuration's: {odd[:3]}")
    model.load_state_dict(tuned, strict=False)
    if not (folder / LORA).is_dir():
        return model
    from peft import PeftModel

    return merge(PeftModel.from_pretrained(model, str(folder / LORA), autocast_adapter_dtype=False))


def _base(folder: Path, manifest: Mapping[str, Any], base: Path | None) -> Path:
    base = base or (folder / manifest["base"]).resolve()
    if not (base / "config.json").is_file():
        raise CheckpointError(f"{folder}: its base is not at {base}; pass base= to say where it is")
    if (got := folder_sha256(base)) != manifest["base_sha256"]:
        raise CheckpointError(
            f"{folder}: was trained on a base of sha256 {manifest['base_sha256'][:12]}, but {base} has {got[:12]}; "
            "pass base= to name the right one"
        )
    return base


def place_on_base(adapters: Path, base: Path) -> None:
    """Let the manifest of a folder of adapters, which lies elsewhere now, lead to their base."""
    facts = {name: value for name, value in verify_manifest(adapters).items() if name not in ("files", "base")}
    write_manifest(adapters, **facts, base=os.path.relpath(base, adapters))


def export_checkpoint(checkpoint: Path, out: Path, adapters: bool) -> None:
    """Copy a checkpoint out of the project: the merged model, or its adapters with the way to their base.

    Raises:
        CheckpointError: the checkpoint is damaged, holds no adapters (trained without), or `out` exists.
    """
    verify_manifest(checkpoint)
    source = checkpoint / ADAPTERS if adapters else checkpoint
    if adapters and not is_adapters(source):
        raise CheckpointError(f"{checkpoint}: holds no adapters (lora.rank was 0); export it merged")
    manifest = verify_manifest(source)
    if out.exists():
        raise CheckpointError(f"{out}: exists; name a folder that does not")
    shutil.copytree(source, out, ignore=shutil.ignore_patterns(ADAPTERS, MANIFEST))
    facts = {name: value for name, value in manifest.items() if name not in ("files", "base")}
    write_manifest(out, **facts, base=os.path.relpath(source / manifest["base"], out))
