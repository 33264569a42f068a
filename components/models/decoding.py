"""Greedy decoding: a base's generation_config.json decides no word of a caption.

Published bases ship settings for chats, such as Qwen2's repetition penalty of 1.05 to 1.1. The papers of all families
decode greedily, and an exported model must give the captions that were scored. So these settings are dropped when a
model is loaded, and neither a checkpoint nor an exported folder has them. Token ids stay.
"""

import json
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
RECORDS = ("transformers_version", "_from_model_config")
# `Captioner` sets the length itself, so these two changed no caption and are dropped without a note
LENGTHS = ("max_new_tokens", "max_length")


def decode_greedily(model: Any, source: Path) -> Any:
    """Drop the decoding settings of a model and of the language model within it, and name them in one line.

    Args:
        model: as it was loaded from the folder `source`.
    Returns: the model.
    """
    dropped: dict[str, Any] = {}
    for module in model.modules():
        settings = getattr(module, "generation_config", None)
        if settings is not None:
            dropped |= decoding_settings(settings.to_dict())
            module.generation_config = greedy(settings)
    report_dropped(dropped, source / FILE)
    return model


def drop_from_folder(folder: Path) -> None:
    """Drop the decoding settings from a folder's generation_config.json; without any its bytes stay."""
    from transformers import GenerationConfig

    file = folder / FILE
    if not file.is_file():
        return
    settings = GenerationConfig.from_dict(json.loads(file.read_text(encoding="utf-8")))
    dropped = decoding_settings(settings.to_dict())
    if dropped:
        greedy(settings).save_pretrained(folder)
        report_dropped(dropped, file)


def greedy(settings: Any) -> Any:
    """A GenerationConfig without decoding settings; the same object if it has none."""
    values = settings.to_dict()
    dropped = decoding_settings(values)
    kept = {name: value for name, value in values.items() if name not in dropped}
    return type(settings)(**kept) if dropped else settings


def decoding_settings(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a GenerationConfig that differ from transformers' defaults, without token ids and records."""
    from transformers import GenerationConfig

    defaults = GenerationConfig._get_default_generation_params()
    return {name: value for name, value in values.items() if changes_decoding(name, value, defaults)}


def changes_decoding(name: str, value: Any, defaults: dict[str, Any]) -> bool:
    """True if a field of a GenerationConfig is neither unset nor transformers' default, a token id or a record."""
    if name in (*TOKENS, *RECORDS) or value is None:
        return False
    if defaults.get(name) is not None:
        return bool(value != defaults[name])
    # a field without a default is off when it is false or empty
    return value not in (False, [], {}, "")


def report_dropped(dropped: dict[str, Any], file: Path) -> None:
    """Log one line that names the dropped settings with their values."""
    named = [f"{name} {value}" for name, value in dropped.items() if name not in LENGTHS]
    if named:
        logger.warning("%s: not used, since captions are decoded greedily: %s", file, ", ".join(named))
