"""M3Diff: configuration, the MDP module, the model on LLaVA-OneVision, its processor and adapters.

Knows torch, transformers and peft alone. Importing it registers the classes with transformers' Auto classes.
"""

from components.model.captioning import Captioner, load_captioner
from components.model.configuration import M3DiffConfig
from components.model.modeling import M3DiffForConditionalGeneration, M3DiffModel
from components.model.perception import DifferentialPerception, PerceptionConfig
from components.model.processing import M3DiffImageProcessor, M3DiffProcessor, load_image

__all__ = [
    "Captioner",
    "DifferentialPerception",
    "M3DiffConfig",
    "M3DiffForConditionalGeneration",
    "M3DiffImageProcessor",
    "M3DiffModel",
    "M3DiffProcessor",
    "PerceptionConfig",
    "load_captioner",
    "load_image",
]
