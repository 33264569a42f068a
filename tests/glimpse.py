"""Glimpse, a toy family that is unlike the three real ones: GPT-2 over raw patches.

The tests add it from outside, with this file and one line in `FAMILIES`, as docs/extending.md promises:

- An image keeps its aspect ratio, so it has between `side / patch` and `(side / patch)**2` visual tokens.
- The LLM has transposed weights (Conv1D) and neither fused kernels nor the attention of `m3diff.models.fused`.
- There is no chat template, no module and no saliency map.

Shapes: I images, N patches of all images, D width, B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from m3diff.models.contract import Takes
from m3diff.models.family import Family, separate_rows
from m3diff.models.prepared import Prepared
from m3diff.models.settings import Settings
from m3diff.records.errors import DataError, Fault, ValueFault
from m3diff.records.sample import Turn

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor

MARK = "<patch>"
MODEL_TYPE = "glimpse"


@dataclass(frozen=True)
class GlimpseSettings(Settings):
    """Settings of Glimpse.

    module: always null, because Glimpse does not add a module.
    lora: adapters of the attention layers of GPT-2.
    align: always null, because Glimpse is trained in a single phase.
    """

    family: Literal["glimpse"]
    module: None = field(default=None, kw_only=True)
    align: None = None


class GlimpseProcessor:
    """Converts images of any shape into patches, and dialogues into tokens."""

    places_images = False

    def __init__(self, tokenizer: Any, patch: int, side: int) -> None:
        self.tokenizer = tokenizer
        self.patch = patch
        self.side = side
        self.end_id = tokenizer.eos_token_id
        self.pad_id = tokenizer.pad_token_id

    @classmethod
    def of_folder(cls, folder: str, config: Any) -> GlimpseProcessor:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return cls(tokenizer, config.patch, config.side)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the tokenizer. The sizes of images are in config.json."""
        self.tokenizer.save_pretrained(folder)

    def prepare(self, images: Iterable[Image.Image]) -> Prepared:
        """Return `patches`, [N, 3 patch**2] uint8, and `grids`, rows and columns of each image, [I, 2]."""
        import numpy as np
        import torch

        patches = []
        grids = []
        for image in images:
            longer_side = max(image.size)
            columns, rows = (max(1, round(self.side * side / longer_side / self.patch)) for side in image.size)
            pixels = np.asarray(image.convert("RGB").resize((columns * self.patch, rows * self.patch)))
            cells = pixels.reshape(rows, self.patch, columns, self.patch, 3).swapaxes(1, 2)
            patches.append(cells.reshape(rows * columns, -1))
            grids.append((rows, columns))
        if not grids:
            return Prepared({}, ())
        tensors = {"patches": torch.from_numpy(np.concatenate(patches)), "grids": torch.tensor(grids)}
        return Prepared(tensors, tuple(MARK * (rows * columns) for rows, columns in grids))

    def blank_pair(self) -> Prepared:
        """Return a prepared pair of black squares."""
        from PIL import Image

        return self.prepare([Image.new("RGB", (self.side, self.side))] * 2)

    def marks(self, images: int) -> tuple[str, ...]:
        """Return the marks of square images, which have the most tokens."""
        return (MARK * (self.side // self.patch) ** 2,) * images

    def encode_prompt(self, turns: Sequence[Turn], marks: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of "[1:<patch>...][2:<patch>...]Q:question A:", after the earlier turns."""
        ids: list[int] = []
        for number, mark in enumerate(marks, start=1):
            ids += self.encode_text(f"[{number}:{mark}]")
        for number, turn in enumerate(turns, start=1):
            if MARK in turn.question + turn.answer:
                raise ValueFault("models.question_with_image_mark", value=MARK)
            ids += self.encode_text(f"Q:{turn.question} A:")
            if number < len(turns):
                ids += self.encode_answer(turn.answer)
        return tuple(ids)

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode_answer(self, text: str) -> list[int]:
        """Return the token ids of an answer, including the end token."""
        return [*self.encode_text(text), self.end_id]

    def collate(self, prepared: Sequence[Prepared]) -> dict[str, Tensor]:
        """Concatenate the patches and the grids of several image sets. Empty if there are no images."""
        import torch

        tensors = [images.tensors for images in prepared if images.marks]
        names = tensors[0] if tensors else ()
        return {name: torch.cat([images[name] for images in tensors]) for name in names}

    def image_inputs(self, images: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return `patches` in [-1, 1] on the device, and `grids` on the CPU."""
        if not images:
            return {}
        patches = images["patches"].to(device, non_blocking=True).float() / 127.5 - 1
        return {"patches": patches, "grids": images["grids"]}

    def token_types(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return no argument."""
        return {}

    def decode(self, tokens: Tensor) -> list[str]:
        """Decode generated token ids into texts."""
        return [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]


@cache
def classes() -> tuple[Any, Any]:  # noqa: C901  # two classes
    """Return the model class and the processor class. They are defined here, so that the family is one light file."""
    import torch
    from torch import nn
    from transformers import AutoConfig, GenerationMixin, GPT2Config, GPT2LMHeadModel, PreTrainedConfig, PreTrainedModel

    class GlimpseConfig(PreTrainedConfig):
        model_type = MODEL_TYPE
        sub_configs = {"text_config": GPT2Config}

        def __init__(
            self, text_config: Any = None, patch: int = 8, side: int = 32, image_token_index: int = 0, **kwargs: Any
        ) -> None:
            self.text_config = GPT2Config(**text_config) if isinstance(text_config, dict) else text_config
            self.patch = patch
            self.side = side
            self.image_token_index = image_token_index
            super().__init__(**kwargs)

        @classmethod
        def from_folder(cls, folder: str, module: None) -> Any:
            return cls.from_pretrained(folder, trust_remote_code=False)

        @classmethod
        def for_published_base(cls, name: str, module: None) -> Any:
            return cls({})

        def image_tokens_of(self, images: int) -> int:
            return images * (self.side // self.patch) ** 2

    class Glimpse(PreTrainedModel, GenerationMixin):
        config_class = GlimpseConfig
        _supports_sdpa = True
        _supports_attention_backend = True
        supports_gradient_checkpointing = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            width = config.text_config.n_embd
            cells = config.side // config.patch
            self.eye = nn.Linear(3 * config.patch**2, width)
            self.rows = nn.Embedding(cells, width)
            self.columns = nn.Embedding(cells, width)
            self.bridge = nn.Linear(width, width)
            self.llm = GPT2LMHeadModel(config.text_config)
            self.post_init()

        @classmethod
        def from_pretrained(cls, folder: Any, *, config: Any = None, module: None = None, **kwargs: Any) -> Any:
            config = config or cls.config_class.from_folder(str(folder), None)
            kwargs |= {"output_loading_info": True, "use_safetensors": True}
            kwargs.pop("trust_remote_code", None)
            model, info = super().from_pretrained(str(folder), config=config, trust_remote_code=False, **kwargs)
            names = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
            if names:
                raise DataError(
                    "models.weights_missing", path=Path(folder), value=len(names), expected="Glimpse", names=names[:5]
                )
            return model

        def get_input_embeddings(self) -> Any:
            return self.llm.get_input_embeddings()

        def get_output_embeddings(self) -> Any:
            return self.llm.get_output_embeddings()

        @staticmethod
        def blank_images(config: Any, device: Any, images: int = 2) -> dict[str, Any]:
            if not images:
                return {}
            cells = config.side // config.patch
            patches = torch.zeros(images * cells**2, 3 * config.patch**2, device=device)
            return {"patches": patches, "grids": torch.tensor([[cells, cells]] * images, device="cpu")}

        def visual_tokens(self, patches: Any, grids: Any) -> Any:
            """Return the visual tokens, [N, D]."""
            positions = []
            for rows, columns in grids.tolist():
                positions.append(torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).view(-1, 2))
            row_numbers, column_numbers = torch.cat(positions).to(patches.device).unbind(1)
            features = self.eye(patches.to(self.eye.weight.dtype))
            features = features + self.rows(row_numbers) + self.columns(column_numbers)
            return self.bridge(nn.functional.gelu(features))

        def embed(self, input_ids: Any, patches: Any, grids: Any) -> Any:
            """Return the inputs of the LLM, [B, T, D]."""
            embeddings = self.get_input_embeddings()(input_ids)
            if patches is None:
                return embeddings
            visual = self.visual_tokens(patches, grids)
            is_image = (input_ids == self.config.image_token_index)[..., None]
            # the visual tokens of a blank pair have no place in the texts, but get a gradient of zero
            return embeddings.masked_scatter(is_image, visual.to(embeddings.dtype)) + 0 * visual.sum()

        def forward(
            self, input_ids: Any = None, patches: Any = None, grids: Any = None, tokens: Any = None, **kwargs: Any
        ) -> Any:
            return self.llm(inputs_embeds=self.embed(input_ids, patches, grids), **kwargs)

        @torch.no_grad()
        def generate(self, *, input_ids: Any, patches: Any = None, grids: Any = None, **decoding: Any) -> Any:
            embeddings = self.embed(input_ids, patches, grids)
            return self.llm.generate(input_ids=input_ids, inputs_embeds=embeddings, **decoding)

    AutoConfig.register(MODEL_TYPE, GlimpseConfig, exist_ok=True)
    return Glimpse, GlimpseProcessor


def faults(settings: GlimpseSettings, base: Mapping[str, Any] | None) -> list[Fault]:
    """Return the reasons why the settings do not fit the base."""
    if base is None or base.get("model_type") == MODEL_TYPE:
        return []
    return [Fault("models.other_base", family=settings.family, value=base.get("model_type"), names=["Glimpse"])]


FAMILY = Family(
    settings=GlimpseSettings,
    parts={"vision": ("eye.", "rows.", "columns."), "projector": ("bridge.",), "llm": ("llm.",)},
    lora_targets={"llm": r"llm\.transformer\.h\.\d+\.attn\.(c_attn|c_proj)"},
    classes=classes,
    faults=faults,
    takes=Takes(fixed_marks=False),
    packing=separate_rows,
    model_types=(MODEL_TYPE,),
)
