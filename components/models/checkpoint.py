"""Save and load trained models of any family. A checkpoint can be loaded without `params.yaml`.

A checkpoint contains a merged model. Its subfolder `adapters/` contains only what differs from the base: LoRA weights
in peft's layout, fully tuned weights, and the weights of a new module. Both folders contain safetensors files and a
manifest, which records the family, the path and content hash of the base, and the hash of every file.
"""

import hashlib
import json
import logging
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
from m3diff.models.contract import Processor, Takes
from m3diff.models.decoding import remove_from_folder
from m3diff.models.family import Family
from m3diff.models.foreign_code import (
    ADAPTER_CONFIG,
    INDEX,
    TEXT_SUFFIXES,
    CheckpointError,
    read_json,
    refuse_code_files,
    refuse_foreign_code,
)
from m3diff.models.sample_limits import TrainedOn
from m3diff.models.tuning import (
    is_adapted,
    is_adapter,
    merge_adapters,
    read_adapter_config,
    suppress_adapter_warnings,
    trainable_names,
    unwrap_model,
)
from m3diff.records.copies import copy_folder
from m3diff.records.errors import CodedError

MANIFEST = "manifest.json"
ADAPTERS = "adapters"
LORA = "lora"
TUNED = "tuned.safetensors"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
WEIGHTS_SUFFIX = ".safetensors"

# Files next to the weights that are read even if the manifest does not list them
CONFIGURATION_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "m3diff_processor.json",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
)
MAX_EXAMPLES = 3  # maximum number of weights that an error message lists
# Remedy in a warning. The remedies of errors are in messages.toml.
REMEDY = "check it out again (`dvc checkout`, `git lfs pull`) or copy it again from its source"

logger = logging.getLogger(__name__)


def write_manifest(folder: Path, **fields: Any) -> None:
    """Write `manifest.json` with the hash of every other file in the folder.

    Call this last, because the manifest marks the folder as complete.

    Args:
        folder: the folder to describe.
        fields: additional fields of the manifest.
    """
    files = {path.relative_to(folder).as_posix(): _sha256(path) for path in _list_files(folder)}
    files.pop(MANIFEST, None)
    temporary = folder / f".{MANIFEST}"
    temporary.write_text(json.dumps({**fields, "files": files}, indent=2) + "\n")
    # safetensors creates files with mode 0600 and ignores the umask, so other users could not read the weights
    mode = temporary.stat().st_mode
    for name in files:
        if name.endswith(WEIGHTS_SUFFIX) and (folder / name).stat().st_mode != mode:
            with suppress(OSError):  # exFAT and SMB do not support chmod; all their files have the mount's mode
                (folder / name).chmod(stat.S_IMODE(mode))
    temporary.rename(folder / MANIFEST)


def verify_manifest(folder: Path) -> dict[str, Any]:
    """Check every file of a folder against the manifest and return the manifest.

    Raises:
        CheckpointError: the manifest is missing because the folder is incomplete, or a file is missing or has changed.
    """
    manifest = read_manifest(folder)
    for name, digest in manifest["files"].items():
        _check_file(folder / name, digest)
    return manifest


def verify_files_to_load(folder: Path) -> dict[str, Any]:
    """Check the files that a model is loaded from against the manifest and return the manifest.

    The weights must match the manifest. Configuration and tokenizer files may have been edited or added after training.
    They are used as they are, and a warning lists them. The model card, code files, and the adapters of a merged model
    are not checked.

    Raises:
        CheckpointError: a weight file is missing, has changed or is not in the manifest, or another file is missing or
            is not valid JSON.
    """
    manifest = read_manifest(folder)
    edited_files: list[str] = []
    for name, digest in manifest["files"].items():
        if not name.endswith((WEIGHTS_SUFFIX, *TEXT_SUFFIXES)) or name.startswith(f"{ADAPTERS}/"):
            continue
        path = folder / name
        if name.endswith((WEIGHTS_SUFFIX, INDEX)):
            _check_file(path, digest)
        elif not _is_unedited(path, digest):
            _check_file(path)
            edited_files.append(name)
    _refuse_added_weights(folder, manifest)
    for name in CONFIGURATION_FILES:
        if name not in manifest["files"] and (folder / name).is_file():
            edited_files.append(name)
    if edited_files:
        logger.warning(
            "%s: these files were edited after training: %s. They are used as they are, so captions may differ from "
            "those that were scored. To restore the trained model, %s",
            folder,
            ", ".join(sorted(edited_files)),
            REMEDY,
        )
    return manifest


def _is_unedited(path: Path, digest: str) -> bool:
    """Return whether a file has this digest, ignoring line endings, which git may have converted (core.autocrlf)."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() == digest:
        return True
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest() == digest


def _refuse_added_weights(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the folder has weights that the manifest does not list.

    transformers might load such weights.
    """
    for weights_folder in (folder, folder / LORA):
        for path in sorted(weights_folder.glob("[!.]*")):
            name = path.relative_to(folder).as_posix()
            if name.endswith((WEIGHTS_SUFFIX, INDEX)) and name not in manifest["files"]:
                raise CheckpointError("models.unlisted_weights", path=path, manifest=MANIFEST)


def _check_file(path: Path, digest: str | None = None) -> None:
    """Check that a file exists and has this digest. Without a digest, check JSON files for valid syntax instead.

    Raises:
        CheckpointError: the file is missing, has a different digest, or is not valid JSON.
    """
    if not path.is_file():
        raise CheckpointError("models.missing_file", path=path)
    if digest is None:
        _check_json(path)
        return
    actual_digest = _sha256(path)
    if actual_digest != digest:
        raise CheckpointError("models.other_digest", path=path, value=actual_digest[:12], expected=digest[:12])


def _check_json(path: Path) -> None:
    """Raise CheckpointError if a JSON file cannot be parsed. Ignore other files."""
    if path.suffix != ".json":
        return
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError("models.not_json", path=path, cause=str(error)) from error


def check_base(folder: Path) -> None:
    """Check that a base model does not refer to code and that its weights and JSON files can be read.

    A base has no manifest to check against.

    Raises:
        ForeignCodeError: see `refuse_foreign_code`.
        CheckpointError: a weight file is truncated, a JSON file is invalid, or the weights are quantized.
    """
    refuse_foreign_code(folder)
    refuse_quantized(folder / "config.json")
    for path in _list_files(folder):
        if not is_hidden(path, folder):
            _check_file(path)
            _read_shapes(path)


def refuse_quantized(config: Path) -> None:
    """Raise CheckpointError if config.json says that the weights are quantized, which is not supported."""
    fields = read_json(config) if config.is_file() else None
    quantization = fields.get("quantization_config") if isinstance(fields, dict) else None
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise CheckpointError(
            "models.quantized", path=config, field="quantization_config", value=method or "method unnamed"
        )


@contextmanager
def convert_loading_errors(folder: Path) -> Iterator[None]:
    """Convert any error in the block, which loads a model, to a CheckpointError, except out-of-memory errors."""
    try:
        yield
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except CodedError as error:
        raise CheckpointError("models.not_loaded", path=folder, cause=error.fault) from error
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError("models.not_loaded", path=folder, cause=reason) from error


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder without checking the files that it lists.

    Raises:
        CheckpointError: the manifest is missing or invalid.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise CheckpointError("models.no_manifest", path=folder, manifest=MANIFEST)
    _check_file(file)
    manifest = json.loads(file.read_text(encoding="utf-8"))
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise CheckpointError("models.manifest_without_files", path=file)
    return manifest


def read_trained_on(manifest: Mapping[str, Any]) -> TrainedOn:
    """Return the samples that a model was trained on.

    A field that the manifest lacks, or that is not of the expected kind, has its default.
    """
    fields = manifest.get("trained_on")
    if not isinstance(fields, dict):
        return TrainedOn()
    question = fields.get("question")
    images = fields.get("images")
    turns = fields.get("turns")
    if not isinstance(images, list) or not images or not all(type(count) is int for count in images):
        images = TrainedOn.images
    return TrainedOn(
        question=question if isinstance(question, str) and question else None,
        images=tuple(sorted(images)),
        turns=turns if type(turns) is int and turns > 0 else TrainedOn.turns,
        own_questions=fields.get("own_questions") is True,
    )


def read_sample_limits(folder: Path) -> tuple[Takes, TrainedOn]:
    """Return the samples that the family of a checkpoint can process, and those that the model was trained on.

    The weights are not read.

    Raises:
        CheckpointError: the folder has no valid manifest, or the family is unknown.
    """
    manifest = read_manifest(folder)
    return _find_family(folder, manifest).takes, read_trained_on(manifest)


def folder_sha256(folder: Path, hidden: bool = True) -> str:
    """Return a SHA-256 hex digest of the names and contents of all files in a folder.

    Manifests record this digest of the base's folder, so that adapters are loaded only on the base that they were
    trained on.

    Args:
        folder: the folder, including its subfolders.
        hidden: whether to include hidden files.
    """
    digest = hashlib.sha256()
    for path in _list_files(folder):
        if hidden or not is_hidden(path, folder):
            digest.update(f"{path.relative_to(folder).as_posix()}\0{_sha256(path)}\n".encode())
    return digest.hexdigest()


def is_hidden(path: Path, folder: Path) -> bool:
    """Return whether any part of a file's path within a folder starts with a dot, as in .DS_Store or .git/config."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


# `m3diff.records.files` has the same function, but it imports pydantic, which this package must not import
def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_checkpoint(
    model: Any,
    processor: Processor,
    folder: Path,
    *,
    family: str,
    base: Path,
    base_sha256: str,
    trained_on: Mapping[str, Any],
) -> None:
    """Save the trained model with merged adapters and, in `adapters/`, only what differs from the base.

    `adapters/` is not written if the adapters' linear layers were trained in full (rank 0). The model is merged in
    place.

    Args:
        trained_on: what the model was trained on, for the manifest. The keys are the fields of `TrainedOn`.

    Raises:
        CheckpointError: a weight is missing from the saved files. The folder then has no manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    origin = {"family": family, "base_sha256": base_sha256, "trained_on": dict(trained_on)}
    model_family = FAMILIES[family]
    if _fits_on_base(model, model_family):
        adapters = folder / ADAPTERS
        adapters.mkdir(exist_ok=True)
        tuned_parts = _save_adapters(model, model_family, adapters, base)
        processor.save_pretrained(adapters)
        write_manifest(adapters, base=os.path.relpath(base, adapters), tuned=tuned_parts, **origin)
    merged_model = merge_adapters(model)
    # a base may have several end tokens, but captions end with the token that ended the references in training
    merged_model.generation_config.eos_token_id = processor.end_id
    merged_model.generation_config.pad_token_id = processor.pad_id
    merged_model.save_pretrained(folder)
    _require_all_weights(merged_model, folder)
    processor.save_pretrained(folder)
    write_manifest(folder, base=os.path.relpath(base, folder), **origin)


def _fits_on_base(model: Any, family: Family) -> bool:
    """Return whether adapters and the base are enough to restore the model.

    They are enough if training changed only the adapters of the parts that can have adapters. The other weights of
    these parts are then equal to the base's weights.
    """
    targets = family.adapter_targets(unwrap_model(model))
    return all(is_adapter(name) or family.part_of(name) not in targets for name in trainable_names(model))


def _require_all_weights(model: Any, folder: Path) -> None:
    """Raise CheckpointError if the saved files and the model have different numbers of weight elements.

    Elements are counted instead of comparing names, because weights may have other names in the files.
    """
    # tied weights share one tensor, which is counted once
    sizes = {id(tensor): tensor.numel() for tensor in model.state_dict(keep_vars=True).values()}
    model_elements = sum(sizes.values())
    saved_elements = sum(math.prod(shape) for shape in _read_shapes(folder).values())
    if saved_elements != model_elements:
        raise CheckpointError("models.weight_not_written", path=folder, value=saved_elements, expected=model_elements)


def _save_adapters(model: Any, family: Family, folder: Path, base: Path) -> list[str]:
    """Save the adapters, the tuned weights and the configuration. Return the parts that have tuned weights.

    `lora/` has peft's layout. `tuned.safetensors` contains the fully trained weights and the new parts.

    Raises:
        CheckpointError: a trained weight is missing from the saved files, or the adapters' configuration could not be
            loaded again.
    """
    if is_adapted(model):
        for lora in model.peft_config.values():
            lora.base_model_name_or_path = os.path.relpath(base, folder)
        model.save_pretrained(str(folder / LORA), save_embedding_layers=False)
        (folder / LORA / "README.md").unlink(missing_ok=True)
        config = folder / LORA / ADAPTER_CONFIG
        # peft records the Python module of the model's class, which is not needed to load the weights
        fields = json.loads(config.read_text()) | {"auto_mapping": None}
        config.write_text(json.dumps(fields, indent=2, sort_keys=True))
        # a configuration that cannot be loaded must end the run that writes it, and not a later command
        read_adapter_config(config)
    trained_names = trainable_names(model)
    tuned_weights = {}
    for name, weight in unwrap_model(model).named_parameters():
        is_tuned = name in trained_names or family.part_of(name) in family.new_parts
        if is_tuned and not is_adapter(name):
            tuned_weights[name] = weight.detach().contiguous()
    save_file(tuned_weights, folder / TUNED, {"format": "pt"})
    unwrap_model(model).config.save_pretrained(folder)
    expected_names = {_saved_name(name) for name in trained_names}
    missing_names = sorted(expected_names - _read_shapes(folder).keys() - _read_shapes(folder / LORA).keys())
    if missing_names:
        raise CheckpointError(
            "models.trained_weights_not_written",
            path=folder,
            value=len(missing_names),
            expected=len(trained_names),
            names=missing_names[:MAX_EXAMPLES],
        )
    return sorted({family.part_of(name) for name in tuned_weights})


def _saved_name(name: str) -> str:
    """Return the name of a trained parameter in the saved files. peft renames the parameters of adapters."""
    return f"base_model.model.{name.replace('.default.', '.')}" if is_adapter(name) else name


def _read_shapes(path: Path) -> dict[str, list[int]]:
    """Return the shapes of the tensors in a safetensors file, or in all safetensors files of a folder.

    Raises:
        CheckpointError: a file is truncated or invalid.
    """
    shapes: dict[str, list[int]] = {}
    files = [*path.glob(f"[!.]*{WEIGHTS_SUFFIX}")] if path.is_dir() else [path]
    for file_path in files:
        if file_path.suffix != WEIGHTS_SUFFIX:
            continue
        try:
            with safe_open(file_path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # the object cannot be iterated
                    shapes[name] = tensors.get_slice(name).get_shape()
        except SafetensorError as error:
            raise CheckpointError("models.not_safetensors", path=file_path, cause=str(error)) from error
    return shapes


def has_only_adapters(folder: Path) -> bool:
    """Return whether a folder contains adapters instead of a whole model."""
    return (folder / TUNED).is_file()


def load_model(folder: Path, dtype: torch.dtype = torch.float32, base: Path | None = None) -> tuple[Any, Family]:
    """Load a checkpoint or a folder of adapters. Return the merged model and its family.

    Args:
        folder: folder of the checkpoint or the adapters.
        dtype: data type of the weights.
        base: folder of the adapters' base model. By default, the path in the manifest is used.

    Raises:
        ForeignCodeError: the folder or the base refers to code, a pickle file or files outside the folder.
        CheckpointError: the folder is incomplete or damaged, the family is unknown, or the base is missing or is not
            the base that the adapters were trained on.
    """
    manifest = verify_files_to_load(folder)
    refuse_foreign_code(folder)
    refuse_quantized(folder / "config.json")
    family = _find_family(folder, manifest)
    with convert_loading_errors(folder):
        if has_only_adapters(folder):
            return _load_adapters(folder, manifest, family, dtype, base), family
        return family.load(folder, dtype), family


def load_base_of_checkpoint(folder: Path, dtype: torch.dtype) -> tuple[Any, Processor, Family]:
    """Load the base that a checkpoint was trained from, as it was before a new module was added.

    Args:
        folder: folder of the checkpoint.
        dtype: data type of the weights.

    Returns:
        The base, its processor and the checkpoint's family.

    Raises:
        ForeignCodeError: the base refers to code, a pickle file or files outside its folder.
        CheckpointError: the manifest is missing, the family is unknown, or the base is missing or is not the base that
            the checkpoint was trained on.
    """
    manifest = read_manifest(folder)
    family = _find_family(folder, manifest)
    path = (folder / manifest["base"]).resolve()
    if not (path / "config.json").is_file():
        raise CheckpointError("models.no_base_of_checkpoint", path=folder, base=path)
    base = _find_base(folder, manifest, path)
    with convert_loading_errors(base):
        model = family.load(base, dtype)
        return model, family.load_processor_of_base(folder, base, model.config), family


def load_processor(folder: Path) -> Processor:
    """Load the processor of a checkpoint or a folder of adapters, without its weights.

    Raises:
        ForeignCodeError: the folder refers to code.
        CheckpointError: the folder is incomplete, or the family is unknown.
    """
    family = _find_family(folder, read_manifest(folder))
    with convert_loading_errors(folder):
        return family.load_processor(folder)


def _find_family(folder: Path, manifest: Mapping[str, Any]) -> Family:
    """Return the family that the manifest names.

    Raises:
        CheckpointError: the family is unknown, or does not support the `model_type` in config.json.
    """
    family_name: Any = manifest.get("family")
    if family_name not in list(FAMILIES):
        raise CheckpointError(
            "models.unknown_family", path=folder / MANIFEST, field="family", value=family_name, names=list(FAMILIES)
        )
    family = FAMILIES[family_name]
    _check_model_type(folder / "config.json", family_name, family)
    return family


def _load_adapters(
    folder: Path, manifest: Mapping[str, Any], family: Family, dtype: torch.dtype, base: Path | None
) -> Any:
    """Load the base, replace its weights with the folder's tuned weights, merge the adapters, and return the model."""
    model = family.load(_find_base(folder, manifest, base), dtype, folder)
    tuned_weights = load_file(folder / TUNED)
    expected_names = set()
    for name, _ in model.named_parameters():
        if not name.startswith(family.unused_parameters) and family.part_of(name) in manifest["tuned"]:
            expected_names.add(name)
    unmatched_names = sorted(tuned_weights.keys() ^ expected_names)
    if unmatched_names:
        raise CheckpointError(
            "models.other_tuned_weights",
            path=folder / TUNED,
            value=len(unmatched_names),
            names=unmatched_names[:MAX_EXAMPLES],
        )
    model.load_state_dict(tuned_weights, strict=False)
    lora = folder / LORA
    if not lora.is_dir():
        return model
    from peft import PeftModel

    # peft would request a missing file from a hub, and instantiate any class that the configuration refers to
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        _check_file(lora / name)
    config = read_adapter_config(lora / ADAPTER_CONFIG)
    with suppress_adapter_warnings():
        adapted_model = PeftModel.from_pretrained(model, str(lora), config=config, autocast_adapter_dtype=False)
    return merge_adapters(adapted_model)


def _check_model_type(path: Path, name: str, family: Family) -> None:
    """Raise CheckpointError if the manifest's family does not support the `model_type` in config.json."""
    _check_file(path)
    config = json.loads(path.read_bytes())
    if not family.model_types:
        return
    model_type = config.get("model_type", family.model_types[0]) if isinstance(config, dict) else None
    if model_type not in family.model_types:
        raise CheckpointError(
            "models.other_model_type",
            path=path,
            field="model_type",
            value=model_type,
            family=name,
            manifest=MANIFEST,
            names=list(family.model_types),
        )


def _find_base(folder: Path, manifest: Mapping[str, Any], base: Path | None) -> Path:
    """Find the adapters' base model, check that the adapters were trained on it, and return its folder."""
    base = base or (folder / manifest["base"]).resolve()
    if not (base / "config.json").is_file():
        raise CheckpointError("models.no_base", path=folder, base=base)
    refuse_foreign_code(base)
    refuse_quantized(base / "config.json")
    _read_shapes(base)
    expected_digest = manifest["base_sha256"]
    digest = folder_sha256(base)
    # other programs may have added hidden files to the folder in the meantime
    if expected_digest not in (digest, folder_sha256(base, hidden=False)):
        raise CheckpointError(
            "models.other_base_digest", path=folder, base=base, value=digest[:12], expected=expected_digest[:12]
        )
    return base


def place_on_base(folder: Path, manifest: Mapping[str, Any], base: Path) -> None:
    """Write the manifest of a folder that was copied from a checkpoint.

    The new manifest lists the files in the folder and the path from the folder to the base. All other fields are the
    same as in `manifest`.

    Args:
        folder: the copy.
        manifest: manifest of the checkpoint that was copied.
        base: folder of the base.
    """
    fields = {name: value for name, value in manifest.items() if name not in ("files", "base")}
    write_manifest(folder, **fields, base=os.path.relpath(base, folder))


def export_checkpoint(checkpoint: Path, out: Path, adapters: bool) -> None:
    """Copy a checkpoint, or only its adapters, to a new folder outside the project.

    Args:
        checkpoint: folder of the checkpoint.
        out: the folder to create.
        adapters: whether to copy the adapters, with the path to their base, instead of the merged model.

    Raises:
        ForeignCodeError: the copied folder refers to code or contains code, or the adapters' base refers to code.
        CheckpointError: the checkpoint is damaged, `adapters` is set but the checkpoint has none, or `out` exists.
    """
    verify_manifest(checkpoint)
    source = checkpoint / ADAPTERS if adapters else checkpoint
    if adapters and not has_only_adapters(source):
        raise CheckpointError("models.no_adapters", path=checkpoint)
    manifest = verify_manifest(source)
    if out.exists():
        raise CheckpointError("models.output_exists", path=out)
    refuse_foreign_code(source)
    refuse_code_files(source)
    base = source / manifest["base"]
    if adapters and base.is_dir():
        refuse_foreign_code(base.resolve())
    copy_folder(source, out, ignore=shutil.ignore_patterns(ADAPTERS, MANIFEST, ".*"))
    remove_from_folder(out)  # checkpoints written by older versions still contain the base's decoding settings
    place_on_base(out, manifest, base)
