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
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from m3diff.models import FAMILIES
from m3diff.models.decoding import drop_from_folder
from m3diff.models.family import Family
from m3diff.models.processing import PairProcessor
from m3diff.models.tuning import is_adapted, is_adapter, merge, trainable_names, unwrapped
from m3diff.records.copies import copy_folder
from m3diff.records.errors import DataError

MANIFEST = "manifest.json"
ADAPTERS, LORA, TUNED = "adapters", "lora", "tuned.safetensors"
WEIGHTS = ".safetensors"
# What is read of a model beside its weights; its card, code and pictures are not
READ = (".json", ".jinja", ".txt", ".model")
REMEDY = "restore it (`dvc checkout`, `git lfs pull`), or fetch it again from where it came"


class CheckpointError(DataError):
    """A checkpoint folder is incomplete, damaged, or not what it was taken for."""


def write_manifest(folder: Path, **facts: Any) -> None:
    """Write `manifest.json`, the hash of every other file in the folder; written last, it marks the folder complete."""
    files = {path.relative_to(folder).as_posix(): _sha256(path) for path in _files(folder)}
    files.pop(MANIFEST, None)
    temporary = folder / f".{MANIFEST}"
    temporary.write_text(json.dumps({**facts, "files": files}, indent=2) + "\n")
    # safetensors makes its files 0600 whatever the umask says, so nobody else of a team could read the weights
    mode = temporary.stat().st_mode
    for name in files:
        if name.endswith(WEIGHTS) and (folder / name).stat().st_mode != mode:
            with suppress(OSError):  # exFAT and SMB refuse chmod, and give every file the mode of the mount
                (folder / name).chmod(stat.S_IMODE(mode))
    temporary.rename(folder / MANIFEST)


def verify_manifest(folder: Path) -> dict[str, Any]:
    """Check every file of a checkpoint folder against its manifest and return it.

    Raises:
        CheckpointError: no manifest (half written), or a file is missing or differs; names the file.
    """
    manifest = read_manifest(folder)
    for name, want in manifest["files"].items():
        _check_file(folder / name, want)
    return manifest


def verify_loaded(folder: Path) -> dict[str, Any]:
    """Check the files that a model is loaded from against its manifest and return it.

    The weights must be the manifest's. Configuration and tokenizer may have been edited. The card, the code and the
    adapters beside a whole model may be edited or absent.

    Raises:
        CheckpointError: weights are missing or differ, another file is missing or no JSON; names the file.
    """
    manifest = read_manifest(folder)
    for name, want in manifest["files"].items():
        if name.endswith((WEIGHTS, *READ)) and not name.startswith(f"{ADAPTERS}/"):
            _check_file(folder / name, want if name.endswith(WEIGHTS) else None)
    return manifest


def _check_file(path: Path, want: str | None = None) -> None:
    """Check that a file is there and of the digest `want`; without one, that it can be read if it is JSON.

    Raises:
        CheckpointError: names the file and the remedy.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: missing, though the manifest names it; {REMEDY}")
    if want is not None and (got := _sha256(path)) != want:
        raise CheckpointError(f"{path}: sha256 {got[:12]} but the manifest says {want[:12]}; {REMEDY}")
    if want is None and path.suffix == ".json":
        try:
            json.loads(path.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{path}: not JSON ({error}); {REMEDY}") from error


def see_whole_files(folder: Path) -> None:
    """See that weights and JSON below the folder of a base, which has no manifest, can be read.

    Raises:
        CheckpointError: one is cut off, or no JSON; names the file.
    """
    for path in _files(folder):
        if not is_hidden(path, folder):
            _check_file(path)
            _shapes(path)


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Raises CheckpointError for any error of reading a model within it but one of memory."""
    try:
        yield
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"{folder}: cannot be loaded ({said}); {REMEDY}") from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, its files not looked at.

    Raises:
        CheckpointError: it is missing or is none.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise CheckpointError(
            f"{folder}: no {MANIFEST}, so it is no checkpoint or was not written to its end; name a folder that "
            "training, `m3diff export` or `m3diff export --hub` wrote; adapters in peft's own layout are loaded by peft"
        )
    _check_file(file)
    manifest = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{file}: has no list of files; {REMEDY}")
    return manifest


def folder_sha256(folder: Path, hidden: bool = True) -> str:
    """Hex digest over the names and contents of all files below a folder, hidden ones if asked: names a base by its
    content."""
    digest = hashlib.sha256()
    for path in _files(folder):
        if hidden or not is_hidden(path, folder):
            digest.update(f"{path.relative_to(folder).as_posix()}\0{_sha256(path)}\n".encode())
    return digest.hexdigest()


def is_hidden(path: Path, folder: Path) -> bool:
    """True for what other programs leave in a folder: .DS_Store, ._model.safetensors, .git, .cache."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


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
    known = FAMILIES[family]
    if all(is_adapter(name) or known.part_of(name) not in known.lora_targets for name in trainable_names(model)):
        adapters = folder / ADAPTERS
        adapters.mkdir(exist_ok=True)
        parts = _save_adapters(model, known, adapters, base)
        processor.save_pretrained(adapters)
        write_manifest(adapters, base=os.path.relpath(base, adapters), tuned=parts, **facts)
    merged = merge(model)
    # a base may end at several tokens; a caption ends where its reference did in training
    merged.generation_config.eos_token_id = processor.end_id
    merged.generation_config.pad_token_id = processor.pad_id
    merged.save_pretrained(folder)
    # as many numbers as the model has, whose weights may bear other names there
    distinct = {id(tensor): tensor.numel() for tensor in merged.state_dict(keep_vars=True).values()}  # once where tied
    want, found = sum(distinct.values()), sum(math.prod(shape) for shape in _shapes(folder).values())
    if found != want:
        raise CheckpointError(f"{folder}: holds {found:,} numbers, but the model has {want:,}: a weight is missing")
    processor.save_pretrained(folder)
    write_manifest(folder, base=os.path.relpath(base, folder), **facts)


def _save_adapters(model: Any, family: Family, folder: Path, base: Path) -> list[str]:
    """Write `lora/` as peft does, `tuned.safetensors` (what trains in full, and parts that are new) and the
    configuration; returns the parts with tuned weights.

    Raises:
        CheckpointError: a weight that trained is not in the files that were written.
    """
    if is_adapted(model):
        for lora in model.peft_config.values():
            lora.base_model_name_or_path = os.path.relpath(base, folder)
        model.save_pretrained(str(folder / LORA), save_embedding_layers=False)
        (folder / LORA / "README.md").unlink(missing_ok=True)
        config = folder / LORA / "adapter_config.json"
        # peft names the module of the model's class, which is no part of the weights
        config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_mapping": None}, indent=2, sort_keys=True))
    names = trainable_names(model)
    tuned = {
        name: weight.detach().contiguous()
        for name, weight in unwrapped(model).named_parameters()
        if not is_adapter(name) and (name in names or family.part_of(name) in family.new)
    }
    save_file(tuned, folder / TUNED, {"format": "pt"})
    unwrapped(model).config.save_pretrained(folder)
    wanted = {f"base_model.model.{name.replace('.default.', '.')}" if is_adapter(name) else name for name in names}
    if missing := sorted(wanted - _shapes(folder).keys() - _shapes(folder / LORA).keys()):
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} weights that trained are missing: {missing[:3]}"
        )
    return sorted({family.part_of(name) for name in tuned})


def _shapes(place: Path) -> dict[str, list[int]]:
    """Shapes of the tensors in a file, or in a folder's own files. Raises CheckpointError for one that is cut off."""
    shapes: dict[str, list[int]] = {}
    for path in place.glob(f"[!.]*{WEIGHTS}") if place.is_dir() else [place] if place.suffix == WEIGHTS else []:
        try:
            with safe_open(path, framework="pt") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  # no mapping
        except SafetensorError as error:
            raise CheckpointError(f"{path}: not a whole safetensors file ({error}); {REMEDY}") from error
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
    manifest = verify_loaded(folder)
    if (name := manifest.get("family")) not in list(FAMILIES):
        raise CheckpointError(f"{folder / MANIFEST}: family {name!r} is none of {', '.join(FAMILIES)}; update m3diff")
    family = FAMILIES[name]
    with loading(folder):
        if is_adapters(folder):
            return _load_adapters(folder, manifest, family, dtype, base), family
        return family.load(folder, dtype), family


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
    named = "name it with `--base FOLDER` (in Python base=)"
    if not (base / "config.json").is_file():
        raise CheckpointError(f"{folder}: holds adapters, whose base is not at {base}; {named}")
    _shapes(base)
    want, got = manifest["base_sha256"], folder_sha256(base)
    if want not in (got, folder_sha256(base, hidden=False)):
        raise CheckpointError(
            f"{folder}: was trained on a base of sha256 {want[:12]}, but {base} has {got[:12]}; fetch that base as it "
            f"was published, every file unchanged, and {named}"
        )
    return base


def place_on_base(folder: Path, manifest: Mapping[str, Any], base: Path) -> None:
    """Write the manifest of a folder that was copied, with its own files and the way to the base from there."""
    facts = {name: value for name, value in manifest.items() if name not in ("files", "base")}
    write_manifest(folder, **facts, base=os.path.relpath(base, folder))


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
    copy_folder(source, out, ignore=shutil.ignore_patterns(ADAPTERS, MANIFEST, ".*"))
    drop_from_folder(out)  # a checkpoint of an older version has its base's settings
    place_on_base(out, manifest, source / manifest["base"])
