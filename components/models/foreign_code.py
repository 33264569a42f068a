"""Reject model folders that refer to code, pickle files, or files outside the folder.

transformers, peft and diffusers run Python code from a folder if a JSON file refers to the code and either the caller
passes `trust_remote_code=True` or a user answers `y` to a prompt on standard input. All loaders in this project pass
`trust_remote_code=False`, but this is not enough. In some cases transformers drops the argument, for example for a
tokenizer whose `tokenizer_class` is an Auto class. Folders are therefore checked here before any library reads them,
and the error names the file and the field.

This module does not import torch or transformers.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from m3diff.models import FAMILIES
from m3diff.records.errors import DataError

ADAPTER_CONFIG = "adapter_config.json"
INDEX = ".safetensors.index.json"
SAFETENSORS = ".safetensors"

# Configuration files that transformers, peft and diffusers interpret, in a folder and its subfolders. Vocabularies are
# not included, because their keys are words.
CONFIGURATIONS = re.compile(r"config\.json|.+_config\.json|special_tokens_map\.json|model_index\.json")
# Suffixes of the text files that are read together with a model's weights. If such a file were a link to a private
# file, an export would publish the private file.
TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model")
PICKLED_WEIGHTS = re.compile(r"(pytorch_model|diffusion_pytorch_model|adapter_model|model)\b.*\.(bin|pt|pth|ckpt|pkl)")
# Link targets that are named after the hash of their content: objects in DVC's cache and blobs in Hugging Face's cache
CONTENT_ADDRESSED_PATH = re.compile(r".*/([0-9a-f]{2}/[0-9a-f]{30}|blobs/[0-9a-f]{40,64})")

# Classes that `m3diff export --hub` writes to config.json for users of transformers. This project ignores them and
# loads its own classes.
OWN_AUTO_CLASSES = {"AutoConfig", "AutoModelForImageTextToText", "AutoProcessor", "AutoImageProcessor"}
# Python modules in an exported folder. Earlier releases named them configuration_NAME and modeling_NAME.
OWN_CODE = re.compile("|".join(rf"({name}_model|(configuration|modeling|processing)_{name})\.\w+" for name in FAMILIES))
TOKENIZER_CLASS = re.compile(r"(?!Auto)\w*(Tokenizer|TokenizerFast|TokenizersBackend|PythonBackend|CommonBackend)")
OWN_MODULE = re.compile(r"(m3diff|components|transformers)(\.\w+)*")
PIPELINE_LIBRARIES = (None, "diffusers", "transformers", "stable_diffusion")

# Error codes
NAMES_CODE = "models.field_names_code"
NAMES_FILES = "models.field_names_files"

EXCERPT_CHARS = 200  # maximum length of a field's value in an error message

# Suffixes of files that Python can run or import
CODE_SUFFIXES = (".py", ".pyc", ".pyd", ".so")


class CheckpointError(DataError):
    """A checkpoint's folder is incomplete or damaged, or is not a checkpoint."""


class ForeignCodeError(CheckpointError):
    """A model's folder refers to code, a pickle file, or files outside the folder.

    The error has the field `path`. If a single field of a JSON file is rejected, the error also has the fields `field`,
    such as `image_processor.auto_map`, and `value`.
    """


@dataclass(frozen=True)
class FieldRule:
    """A rule for configuration fields that can refer to code or to other files.

    Attributes:
        names: names of the fields that the rule applies to.
        refuses: function that returns whether to reject a value.
        code: error code for rejected values.
    """

    names: tuple[str, ...]
    refuses: Callable[[Any], bool]
    code: str


def field_error(code: str, path: Path, field: str, value: Any) -> ForeignCodeError:
    """Return the error for a rejected field of a JSON file."""
    return ForeignCodeError(code, path=path, field=field, value=value, excerpt=json.dumps(value)[:EXCERPT_CHARS])


def refuse_foreign_code(folder: Path) -> None:
    """Check the folder of a trained model or a base before any library reads it.

    Raises:
        ForeignCodeError: the folder refers to code, a pickle file, or files outside the folder.
        CheckpointError: a configuration file is not valid JSON.
    """
    files = [path for path in sorted(folder.rglob("*")) if not _is_hidden(path, folder)]
    _refuse_links(files, folder)
    _refuse_pickles(files, folder)
    if (folder / ADAPTER_CONFIG).is_file():
        raise ForeignCodeError("models.adapters_of_transformers", path=folder / ADAPTER_CONFIG)
    for path in files:
        if path.name.endswith(INDEX):
            _check_index(path)
        elif CONFIGURATIONS.fullmatch(path.name):
            _check_configuration(path, folder)


def refuse_code_files(folder: Path) -> None:
    """Raise ForeignCodeError if there is a Python code file anywhere in the folder.

    Training does not write such files. A model with a code file can be loaded, because m3diff never runs the file, but
    it cannot be exported.
    """
    for path in sorted(folder.rglob("*")):
        if path.name.endswith(CODE_SUFFIXES) and not _is_hidden(path, folder):
            raise ForeignCodeError("models.code_file", path=path)


def _check_configuration(path: Path, folder: Path) -> None:
    """Check all fields of a JSON file, at any depth.

    Raises:
        ForeignCodeError: a field refers to code or to other files.
        CheckpointError: the file is not valid JSON.
    """
    content = read_json(path)
    rules = list(FIELD_RULES)
    if path.name == ADAPTER_CONFIG:
        rules += ADAPTER_RULES
    for field, name, value in fields_of(content):
        # An exported folder is allowed to refer to its copies of m3diff's code in `auto_map`. In a subfolder, a
        # tokenizer with several parts would read the field without `trust_remote_code=False`, and transformers would
        # prompt the user.
        if name == "auto_map" and value and not (path.parent == folder and _is_own_code(value)):
            raise field_error(NAMES_CODE, path, field, value)
        for rule in rules:
            if name in rule.names and rule.refuses(value):
                raise field_error(rule.code, path, field, value)
    if path.name == "model_index.json":
        _check_pipeline(path, content)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises CheckpointError if it cannot be read or is not valid JSON."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError("files.unreadable", path=path, cause=error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError("models.not_json", path=path, cause=str(error)) from error


def fields_of(content: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield the path, name and value of every field in a JSON value, at any depth."""
    stack = [("", content)]
    while stack:
        prefix, value = stack.pop()
        if isinstance(value, dict):
            for name, inner_value in value.items():
                yield f"{prefix}{name}", name, inner_value
                stack.append((f"{prefix}{name}.", inner_value))
        elif isinstance(value, list):
            for number, inner_value in enumerate(value):
                stack.append((f"{prefix}{number}.", inner_value))


def _is_own_code(auto_map: Any) -> bool:
    """Return whether an `auto_map` contains only the classes that `m3diff export --hub` writes."""
    if not isinstance(auto_map, dict) or not auto_map.keys() <= OWN_AUTO_CLASSES:
        return False
    return all(isinstance(code, str) and OWN_CODE.fullmatch(code) for code in auto_map.values())


def _refers_to_kernel(implementation: Any) -> bool:
    """Return whether a field's value refers to a kernel on a hub (`OWNER/NAME`), which is compiled code.

    Args:
        implementation: name of an implementation, or a dictionary with a name for each part of the model.
    """
    values = implementation.values() if isinstance(implementation, dict) else [implementation]
    return any(isinstance(value, str) and "/" in value for value in values)


def _differs_from(pattern: re.Pattern[str], value: Any) -> bool:
    """Return whether a field has a value that is not a text of this pattern."""
    if value is None:
        return False
    return not (isinstance(value, str) and pattern.fullmatch(value))


FIELD_RULES = (
    FieldRule(
        names=("custom_pipeline", "custom_pipelines", "custom_generate"),
        refuses=bool,
        code=NAMES_CODE,
    ),
    FieldRule(
        names=("tokenizer_class",),
        refuses=partial(_differs_from, TOKENIZER_CLASS),
        code="models.field_names_no_tokenizer",
    ),
    FieldRule(
        names=("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
        refuses=_refers_to_kernel,
        code="models.field_names_compiled_code",
    ),
    FieldRule(
        names=("transformers_weights", "configuration_files", "fast_tokenizer_files"),
        refuses=bool,
        code=NAMES_FILES,
    ),
)
ADAPTER_RULES = (
    FieldRule(
        names=("peft_type",),
        refuses=lambda kind: kind != "LORA",
        code="models.other_kind_of_adapter",
    ),
    FieldRule(
        names=("megatron_config",),
        refuses=bool,
        code="models.field_imports_megatron",
    ),
    FieldRule(
        names=("megatron_core",),
        refuses=lambda module: module not in (None, "megatron.core"),
        code=NAMES_CODE,
    ),
    FieldRule(
        names=("parent_library",),
        refuses=partial(_differs_from, OWN_MODULE),
        code=NAMES_CODE,
    ),
)


def _check_pipeline(path: Path, content: Any) -> None:
    """Raise ForeignCodeError if a component of a diffusers pipeline is from an unknown library.

    diffusers would import the library.
    """
    if not isinstance(content, dict):
        return
    for name, component in content.items():
        if isinstance(component, list) and component and component[0] not in PIPELINE_LIBRARIES:
            raise field_error(NAMES_CODE, path, name, component)


def _check_index(path: Path) -> None:
    """Raise ForeignCodeError if a weight index refers to a file in another folder or a file that is not safetensors."""
    content = read_json(path)
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict):
        return
    for weight, shard in shards.items():
        is_file_in_folder = isinstance(shard, str) and Path(shard).name == shard
        if not is_file_in_folder or not shard.endswith(SAFETENSORS):
            raise field_error(NAMES_FILES, path, f"weight_map.{weight}", shard)


def _refuse_pickles(files: list[Path], folder: Path) -> None:
    """Raise ForeignCodeError if a model or its adapters have weights in pickle files and none in safetensors files.

    transformers and peft would load these pickle files. They ignore pickle files if the folder also has safetensors
    files.
    """
    safetensors_folders = {path.parent for path in files if path.name.endswith(SAFETENSORS)}
    for path in files:
        if path.parent not in (folder, folder / "lora") or path.parent in safetensors_folders:
            continue
        if PICKLED_WEIGHTS.fullmatch(path.name):
            raise ForeignCodeError("models.pickle", path=path)


def _refuse_links(files: list[Path], folder: Path) -> None:
    """Raise ForeignCodeError if a subfolder or a text file is a link to a target outside the folder.

    Links to weights are allowed, because weights are only read as safetensors. Links into a cache that names files by
    the hash of their content are also allowed.
    """
    root = os.path.realpath(folder)
    for path in files:
        if not path.is_symlink() or not (path.is_dir() or path.name.endswith(TEXT_SUFFIXES)):
            continue
        target = os.path.realpath(path)
        if not Path(target).is_relative_to(root) and not CONTENT_ADDRESSED_PATH.fullmatch(target):
            raise ForeignCodeError("models.link_out_of_folder", path=path, target=target)


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)
