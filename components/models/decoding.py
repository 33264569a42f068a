"""Always decode greedily and ignore the decoding settings in a base's generation_config.json.

Published bases contain settings for chat, such as Qwen2's repetition penalty of 1.05 to 1.1. The papers of all families
use greedy decoding, and an exported model must produce the captions that were scored. Decoding settings are therefore
removed when a model is loaded, and are not written to checkpoints or exported folders. Token ids are kept.
"""

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

GENERATION_CONFIG_FILE = "generation_config.json"

# Fields that are kept: token ids, and records of the file's origin
TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
RECORD_FIELDS = ("transformers_version", "_from_model_config")

# `Captioner` sets the length itself, so these fields never affected a caption and are removed without a warning
LENGTH_FIELDS = ("max_new_tokens", "max_length")


def decode_greedily(model: Any, source: Path) -> Any:
    """Remove the decoding settings of a model and its submodules, log the removed settings, and return the model.

    Args:
        model: the loaded model.
        source: folder that the model was loaded from.
    """
    removed_settings: dict[str, Any] = {}
    for module in model.modules():
        settings = getattr(module, "generation_config", None)
        if settings is not None:
            removed_settings |= decoding_settings(settings.to_dict())
            module.generation_config = without_decoding_settings(settings)
    log_removed_settings(removed_settings, source / GENERATION_CONFIG_FILE)
    return model


def remove_from_folder(folder: Path) -> None:
    """Remove the decoding settings from a folder's generation_config.json. If there are none, leave it unchanged."""
    from transformers import GenerationConfig

    file = folder / GENERATION_CONFIG_FILE
    if not file.is_file():
        return
    settings = GenerationConfig.from_dict(json.loads(file.read_text(encoding="utf-8")))
    removed_settings = decoding_settings(settings.to_dict())
    if removed_settings:
        without_decoding_settings(settings).save_pretrained(folder)
        log_removed_settings(removed_settings, file)


def without_decoding_settings(settings: Any) -> Any:
    """Return a GenerationConfig without decoding settings, or the same object if there are none to remove."""
    values = settings.to_dict()
    removed_settings = decoding_settings(values)
    if not removed_settings:
        return settings
    remaining_settings = {name: value for name, value in values.items() if name not in removed_settings}
    return type(settings)(**remaining_settings)


def decoding_settings(values: dict[str, Any]) -> dict[str, Any]:
    """Return the decoding settings that differ from transformers' defaults.

    Token ids and records of the file's origin are not decoding settings.

    Args:
        values: fields of a GenerationConfig.
    """
    from transformers import GenerationConfig

    defaults = GenerationConfig._get_default_generation_params()
    return {name: value for name, value in values.items() if changes_decoding(name, value, defaults)}


def changes_decoding(name: str, value: Any, defaults: dict[str, Any]) -> bool:
    """Return whether a field of a GenerationConfig is a decoding setting that differs from transformers' default."""
    if name in (*TOKEN_FIELDS, *RECORD_FIELDS) or value is None:
        return False
    if defaults.get(name) is not None:
        return bool(value != defaults[name])
    # a field without a default is disabled if it is false or empty
    return value not in (False, [], {}, "")


def log_removed_settings(removed_settings: dict[str, Any], file: Path) -> None:
    """Log the removed settings and their values in one line."""
    texts = [f"{name} {value}" for name, value in removed_settings.items() if name not in LENGTH_FIELDS]
    if texts:
        logger.warning("%s: these settings are ignored, because decoding is always greedy: %s", file, ", ".join(texts))
