"""Load the processor of any vision-language model of transformers, and save it again, without torchvision if possible.

A processor of transformers consists of an image processor, a tokenizer and often a video processor. Video processors
need torchvision, and most image processors exist for torchvision and for Pillow. This module builds the base's own
class of processor with the image processor for Pillow, even if torchvision is installed, so that training and serving
resize images alike on every machine. A stand-in that refuses videos replaces the video processor. The saved folder has
the configuration of the base's video processor, so that transformers and vLLM load the base's own classes from it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
from transformers.utils import is_torchvision_available
from transformers.video_processing_utils import VideoProcessorMixin

from m3diff.models.foreign_code import read_json
from m3diff.records.errors import DataError, ParamsError, ValueFault, cause_of

MODEL_CONFIG = "config.json"
PROCESSOR_CONFIG = "processor_config.json"
IMAGE_CONFIG = "preprocessor_config.json"
VIDEO_CONFIG = "video_preprocessor_config.json"
AUDIO_TOKENIZER_CONFIG = "audio_tokenizer_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

PIL = "pil"  # name that transformers gives to image processors for Pillow

# Arguments of an image processor's call that are no settings of the processor
CALL_ARGUMENTS = frozenset({"return_tensors", "device", "data_format", "input_data_format", "disable_grouping"})


class NoVideos(VideoProcessorMixin):
    """Replaces the base's video processor, which needs torchvision. It keeps the configuration and refuses videos.

    Args:
        configuration: the base's configuration of its video processor. None if the base's folder has none.
    """

    model_input_names: list[str] = []
    # SmolVLM's `apply_chat_template` reads both, even for texts and images. A configuration may set them
    num_frames: int | None = None
    fps: float | None = None

    def __init__(self, configuration: dict[str, Any] | None) -> None:
        super().__init__(**(configuration or {}))  # the attributes may be read by the processor
        self.configuration = configuration

    def __call__(self, videos: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # takes no images
        """Refuse the videos."""
        raise ValueFault("models.videos_not_taken")

    def to_dict(self) -> dict[str, Any] | None:  # type: ignore[override]  # None for "no configuration"
        """Return the base's configuration, field for field."""
        return copy.deepcopy(self.configuration)


class StockProcessor:
    """A processor of transformers with the files of its base that transformers itself would not write.

    Attributes:
        processor: the processor, an instance of the base's own class.
        backend: which image processor was loaded: PIL, or "torchvision" if transformers has none for Pillow.
        video_file: content of the base's VIDEO_CONFIG, or None.
        has_image_file: whether the base has IMAGE_CONFIG, from which releases of transformers before 5 read the image
            processor.
    """

    def __init__(self, processor: Any, backend: str, video_file: bytes | None, has_image_file: bool) -> None:
        self.processor = processor
        self.backend = backend
        self.video_file = video_file
        self.has_image_file = has_image_file

    @classmethod
    def of_folder(cls, folder: Path, settings: Mapping[str, Any] | None = None, backend: str = PIL) -> StockProcessor:
        """Load the processor from the folder of a base or a trained model.

        Args:
            folder: the folder.
            settings: settings of the image processor in the base's own words, such as `max_pixels`. They replace those
                of the folder and are saved with the processor.
            backend: which image processor is preferred.

        Raises:
            DataError: the processor cannot be loaded, for example because it needs torchvision.
            ParamsError: a setting is unknown or cannot be used.
        """
        configuration = read_configuration(folder / PROCESSOR_CONFIG) or {}
        processor_class = class_of_processor(folder, configuration)
        if "audio_tokenizer" in configuration or (folder / AUDIO_TOKENIZER_CONFIG).is_file():
            # transformers would load this model from the location that the file gives
            raise DataError("models.processor_part_not_supported", path=folder, value="audio_tokenizer")
        image_processor = load_image_processor(folder, settings or {}, backend, processor_class)
        parts: list[Any] = []
        for part in processor_class.get_attributes():
            if part == "image_processor":
                parts.append(image_processor)
            elif part == "video_processor":
                parts.append(NoVideos(video_configuration(folder, configuration)))
            else:
                parts.append(load_other_part(folder, part))
        processor = construct(processor_class, folder, parts)
        video_file = folder / VIDEO_CONFIG
        return cls(
            processor=processor,
            backend=getattr(image_processor, "backend", PIL),
            video_file=video_file.read_bytes() if video_file.is_file() else None,
            has_image_file=(folder / IMAGE_CONFIG).is_file(),
        )

    def save_pretrained(self, folder: Path) -> None:
        """Write the processor as transformers does, and the files that transformers leaves out.

        Nothing in the folder refers to this project.
        """
        self.processor.save_pretrained(folder)
        path = folder / PROCESSOR_CONFIG
        configuration = read_json(path)
        if configuration.get("video_processor", {}) is None:
            del configuration["video_processor"]
            path.write_text(json.dumps(configuration, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if self.video_file is not None:
            (folder / VIDEO_CONFIG).write_bytes(self.video_file)
        if self.has_image_file:
            image_configuration = self.processor.image_processor.to_dict()
            image_configuration["processor_class"] = type(self.processor).__name__
            text = json.dumps(image_configuration, indent=2, sort_keys=True)
            (folder / IMAGE_CONFIG).write_text(text + "\n", encoding="utf-8")


def read_configuration(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file, or None if there is no such file.

    Raises:
        DataError: the file is not valid JSON, or is no object.
    """
    if not path.is_file():
        return None
    content = read_json(path)
    if not isinstance(content, dict):
        raise DataError("models.not_json", path=path, cause="not an object")
    return content


def class_of_processor(folder: Path, configuration: Mapping[str, Any]) -> Any:
    """Return the class of a base's processor, from the same files and in the same order as transformers' AutoProcessor.

    Args:
        folder: folder of the base.
        configuration: content of its PROCESSOR_CONFIG.

    Raises:
        DataError: no file says which class it is, or transformers does not have it.
    """
    name = configuration.get("processor_class")
    for file in (IMAGE_CONFIG, VIDEO_CONFIG, TOKENIZER_CONFIG, MODEL_CONFIG):
        if name is None:
            name = (read_configuration(folder / file) or {}).get("processor_class")
    if name is None:
        model_config = read_configuration(folder / MODEL_CONFIG) or {}
        name = PROCESSOR_MAPPING_NAMES.get(str(model_config.get("model_type")))
    processor_class: Any = processor_class_from_name(name) if isinstance(name, str) else None
    if getattr(processor_class, "is_dummy", False):  # stands for a class that is defined only with torchvision
        raise DataError("models.processor_needs_torchvision", path=folder, version=torch.__version__)
    if not hasattr(processor_class, "get_attributes") or "image_processor" not in processor_class.get_attributes():
        raise DataError("models.no_processor_of_images", path=folder, value=name, version=transformers.__version__)
    return processor_class


def load_image_processor(folder: Path, settings: Mapping[str, Any], backend: str, processor_class: Any) -> Any:
    """Load the image processor, with the settings in place of those of the folder.

    Raises:
        DataError: it cannot be loaded.
        ParamsError: a setting is unknown, is always replaced by the processor, or has a value that cannot be used.
    """
    try:
        image_processor = AutoImageProcessor.from_pretrained(folder, backend=backend, trust_remote_code=False)
    except (ValueError, OSError, ImportError, TypeError) as error:
        if "torchvision" in str(error).lower() and not is_torchvision_available():
            raise DataError("models.processor_needs_torchvision", path=folder, version=torch.__version__) from error
        raise DataError("models.processor_not_loaded", path=folder, cause=cause_of(error)) from error
    if not settings:
        return image_processor
    check_settings(settings, image_processor, processor_class)
    try:
        return AutoImageProcessor.from_pretrained(folder, backend=backend, trust_remote_code=False, **settings)
    except (ValueError, TypeError, KeyError) as error:
        raise ParamsError(
            "models.processor_setting_refused", field="processor", value=dict(settings), cause=cause_of(error)
        ) from error


def known_settings(image_processor: Any) -> list[str]:
    """Return the names of the settings of a base's image processor."""
    return sorted(image_processor.valid_kwargs.__annotations__.keys() - CALL_ARGUMENTS)


def check_settings(settings: Mapping[str, Any], image_processor: Any, processor_class: Any) -> None:
    """Check that the image processor knows and uses each setting.

    Raises:
        ParamsError: a setting is unknown, or the class of the processor always replaces it by its own value.
    """
    names = known_settings(image_processor)
    # values that the class passes in every call, so that transformers would ignore the saved setting
    fixed_values = getattr(processor_class, "images_kwargs", {})
    for name, value in settings.items():
        if name not in names:
            raise ParamsError("models.unknown_processor_setting", field=f"processor.{name}", names=names)
        if name in fixed_values and value != fixed_values[name]:
            raise ParamsError(
                "models.processor_setting_fixed", field=f"processor.{name}", value=value, expected=fixed_values[name]
            )


def video_configuration(folder: Path, configuration: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the configuration of the base's video processor, from the same file as transformers. None without one."""
    nested_configuration = configuration.get("video_processor")
    if isinstance(nested_configuration, dict):
        return nested_configuration
    return read_configuration(folder / VIDEO_CONFIG) or read_configuration(folder / IMAGE_CONFIG)


def load_other_part(folder: Path, part: str) -> Any:
    """Load the tokenizer or the feature extractor for sound, which some bases have in addition.

    Raises:
        DataError: it cannot be loaded, or this project does not support it.
    """
    try:
        if part == "tokenizer":
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if part == "feature_extractor":
            return AutoFeatureExtractor.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, ImportError, TypeError) as error:
        raise DataError("models.processor_not_loaded", path=folder, cause=cause_of(error)) from error
    raise DataError("models.processor_part_not_supported", path=folder, value=part)


def construct(processor_class: Any, folder: Path, parts: list[Any]) -> Any:
    """Return a processor of this class, with the chat template and the settings of the folder.

    Raises:
        DataError: the processor cannot be constructed, for example because it needs another package.
    """

    # transformers 5.23 looks up the class that each part must have. For a video processor, the look-up itself fails
    # without torchvision. Only this subclass skips the check, and only while the processor is constructed
    class Unchecked(processor_class):  # type: ignore[misc,valid-type]  # a class that is known only at run time
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor":
                return VideoProcessorMixin
            return super().check_argument_for_proper_class(argument_name, argument)

    try:
        settings, _ = processor_class.get_processor_dict(folder)
        processor = Unchecked.from_args_and_dict(parts, settings)
    except ImportError as error:
        raise DataError("models.processor_needs_package", path=folder, cause=cause_of(error)) from error
    except (ValueError, OSError, TypeError, AttributeError) as error:
        raise DataError("models.processor_not_loaded", path=folder, cause=cause_of(error)) from error
    processor.__class__ = processor_class
    return processor
