"""What a family brings to a shared folder: its code, its processor, and what the card says of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from m3diff.models import FAMILIES


@dataclass(frozen=True)
class SharedFamily:
    """A family that others load without this project.

    Its classes: the configuration of `m3diff.models.<name>.configuration`, and from the folder `<name>` beside this
    file the model of `modeling` and `ImagePairProcessor` of `processing`.
    """

    name: str
    title: str
    summary: str  # of the card: what it is and whose, Markdown
    control: Callable[[Mapping[str, Any]], str]  # the sentence on a config.json with another module, or none; or ""
    images: str  # the sentence on what happens to images of a vision encoder of {side} px; of two sides also {half}
    citation: str  # BibTeX
    bases: Mapping[str, str]  # published models that it is trained from, by the name of their folder
    tags: tuple[str, ...]
    image_processor: str  # its class
    processor: Callable[[Any, str, Mapping[str, Any]], Any]  # of the trained one, the question and config.json
    omitted: Mapping[str, tuple[str, ...]]  # by module the methods that stay behind, `Class.method`
    module: str | None = None  # the field of config.json with the new module; None: the model is transformers' own
    config_class: str = ""
    model_class: str = ""
    refused_by: str = ""  # whose own classes refuse a folder with that module
    files: Mapping[str, str] = field(default_factory=dict)  # names of files that would be another's, by module
    inner_generation: bool = False  # whether `generate` decodes by what config.json says of the language model

    @property
    def reads_question(self) -> bool:
        return FAMILIES[self.name].reads_question

    def has_module(self, config: Mapping[str, Any]) -> bool:
        """Whether the model of a config.json is more than its base, which transformers' own classes load."""
        return self.module is not None and config.get(self.module) is not None

    def roots(self, config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        """The classes that `auto_map` names, by module: of a model without a module the processors alone."""
        configuration, modeling, processing = self._modules()
        own = {configuration: (self.config_class,), modeling: (self.model_class,)} if self.has_module(config) else {}
        return own | {processing: ("ImagePairProcessor", self.image_processor)}

    def file_names(self) -> dict[str, str]:
        """Files of other names than their module's."""
        kinds = ("configuration", "modeling", "processing")
        own = {module: f"{kind}_{self.name}" for module, kind in zip(self._modules(), kinds, strict=True)}
        return own | {"m3diff.images.open": "images"} | dict(self.files)

    def auto_map(self, config: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """The entry `auto_map` of config.json; none where transformers' own classes are the model's."""
        if not self.has_module(config):
            return {}
        classes = {
            "AutoConfig": f"configuration_{self.name}.{self.config_class}",
            "AutoModelForImageTextToText": f"modeling_{self.name}.{self.model_class}",
        }
        return {"auto_map": classes}

    def _modules(self) -> tuple[str, str, str]:
        hub = f"m3diff.commands.export.hub.{self.name}"
        return f"m3diff.models.{self.name}.configuration", f"{hub}.modeling", f"{hub}.processing"


LLAVA_CODE = {
    "m3diff.models.llava": ("LlavaOfPairsForGeneration.forward",),
    "m3diff.models.m3diff.processing": ("M3DiffProcessor.from_pretrained", "M3DiffProcessor.decode"),
}
"""Of families on LLaVA's parts: what only the project's training asks of the model, and what transformers' own method
does where `auto_map` leads to the classes."""

PADDED = "Each image is padded to a square and resized to {side} x {side} pixels"
