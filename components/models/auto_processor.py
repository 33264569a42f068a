"""The processor of the family `auto`: any processor of transformers and its own chat template.

The image tensors, the text that represents an image, and the prompt are those of the base's own processor. A prompt and
its answer are tokenised apart, so that several answers can follow one prompt.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from transformers import ProcessorMixin

from m3diff.models.foreign_code import read_json
from m3diff.models.image_scales import ImageShape, measured_copy, recorded_resizes, scale_of
from m3diff.models.largest_marks import largest_marks
from m3diff.models.prepared import Prepared
from m3diff.models.stock_processor import PIL, StockProcessor, known_settings
from m3diff.models.template_defaults import IDENTIFIER, with_defaults
from m3diff.records.errors import DataError, ParamsError, ValueFault, cause_of
from m3diff.records.sample import IMAGE_MARK, PAIR, Turn

# Written next to the files of transformers: what this project chose for the processor
CHOICES = "m3diff_processor.json"
BACKENDS = (PIL, "torchvision")

# Inputs with one value for each token. All other inputs that a processor returns belong to the images
TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
# Names under which processors return whether a token belongs to an image
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")

ANSWER = "\u241f"  # placeholder of an answer when the chat template is probed
ASKS_TO_THINK = re.compile(r"<think>\s*$")
# A setting bounds the resolution if a smaller value leaves at most this share of the tokens. Rounding to other patches
# changes less
MAX_SHARE_WITH_BOUND = 2 / 3
BLANK_SIDE = 64  # pixels; a processor enlarges a smaller image


class ChatTemplateProcessor:
    """Converts images and dialogues into the inputs of any vision-language model of transformers.

    Attributes:
        processor: the base's own processor.
        tokenizer: its tokenizer.
        template: arguments that the settings give the chat template, such as `enable_thinking`. They become defaults of
            the template and are saved as a part of it.
        one_grid: whether the second image of a pair gets the size of the first, for a module that compares the images
            position by position. Without a module, a pair of two sizes stays as it is, because transformers and vLLM
            do not change it either.
        image_token: placeholder of an image in a rendered chat template.
        image_token_id: id of the token that the model replaces by visual tokens.
        end_id: id of the token that ends an answer.
        pad_id: id of the padding token.
        places_images: whether an image can be anywhere in a prompt.
        token_type_name: name of the input that says which tokens belong to images, or None if the processor returns
            none.
    """

    def __init__(
        self,
        stock: StockProcessor,
        folder: Path,
        image_token_id: int,
        template: Mapping[str, Any] | None = None,
        one_grid: bool = False,
    ) -> None:
        self.stock = stock
        self.processor = stock.processor
        self.tokenizer = self.processor.tokenizer
        self.folder = folder
        self.template = dict(template or {})
        self.one_grid = one_grid
        self.image_token_id = image_token_id
        self.image_token = self._find_image_token()
        self._measured = measured_copy(self.processor)
        self._set_template_arguments()
        self.reserved_texts = self._find_reserved_texts()
        self._probe_template()
        self.token_type_name = self._probe_images()

    # Loading and saving

    @classmethod
    def of_folder(
        cls,
        folder: str,
        config: Any,
        settings: Mapping[str, Any] | None = None,
        template: Mapping[str, Any] | None = None,
        one_grid: bool | None = None,
    ) -> Self:
        """Load the processor from the folder of a trained model or a base.

        Args:
            folder: the folder.
            config: configuration of the model, with the id of its image token.
            settings: settings of the image processor in the base's own words. By default, those of the folder.
            template: arguments of the chat template. Those that the folder was saved with are a part of its template.
            one_grid: see the class. By default, what the folder was saved with.

        Raises:
            DataError: the processor cannot be loaded, belongs to another model, or its template cannot be used.
            ParamsError: a setting or an argument of the template is unknown.
        """
        path = Path(folder)
        choices = read_choices(path)
        stock = StockProcessor.of_folder(path, settings, choices["image_backend"])
        if settings:
            try:
                stock.processor.image_processor([Image.new("RGB", (BLANK_SIDE, BLANK_SIDE))])
            except Exception as error:  # a processor raises errors of any class for values that it does not expect
                raise ParamsError(
                    "models.processor_setting_refused", field="processor", value=dict(settings), cause=cause_of(error)
                ) from error
        image_token_id = getattr(config, "image_token_id", None)
        if image_token_id is None:
            image_token_id = getattr(config, "image_token_index", None)
        if image_token_id is None:
            raise DataError("models.config_without_image_token", path=path)
        return cls(
            stock=stock,
            folder=path,
            image_token_id=image_token_id,
            template=template,
            one_grid=choices["one_grid"] if one_grid is None else one_grid,
        )

    def save_pretrained(self, folder: str | Path, /) -> None:
        """Write the files of the processor, and the choices of this project in CHOICES."""
        self.save_stock(folder)
        choices = {"image_backend": self.stock.backend, "one_grid": self.one_grid}
        (Path(folder) / CHOICES).write_text(json.dumps(choices, indent=2) + "\n", encoding="utf-8")

    def save_stock(self, folder: str | Path, /) -> None:
        """Write the files of the processor only, with nothing that refers to this project."""
        self.stock.save_pretrained(Path(folder))

    # Images

    def prepare(self, images: Iterable[Image.Image]) -> Prepared:
        """Return the processor's own tensors for the images of one image set, and the text that represents each image.

        Raises:
            ValueFault: an image fits none of the processor's grids, for example because it is too long and narrow.
        """
        prepared, _ = self.prepare_with_scales(images)
        return prepared

    def prepare_with_scales(self, images: Iterable[Image.Image]) -> tuple[Prepared, tuple[float | None, ...]]:
        """Prepare the images of one image set, and return how much the processor enlarged or reduced each of them.

        Returns:
            the prepared images, and for each image the square root of its pixels after the resize divided by its pixels
            before. A value below 1 means that the image was scaled down. None if the size after the resize is unknown.

        Raises:
            ValueFault: see `prepare`.
        """
        rgb_images = [image.convert("RGB") for image in images]
        if not rgb_images:
            return Prepared({}, ()), ()
        original_sizes = [ImageShape(image.height, image.width) for image in rgb_images]
        if self.one_grid and len(rgb_images) == PAIR and rgb_images[0].size != rgb_images[1].size:
            rgb_images[1] = rgb_images[1].resize(rgb_images[0].size, Image.Resampling.BICUBIC)
        sizes = [ImageShape(image.height, image.width) for image in rgb_images]
        try:
            with recorded_resizes() as resizes:
                output = self._call(rgb_images, self.image_token * len(rgb_images))
        except (ValueError, ArithmeticError) as error:
            texts = [f"{size.width} x {size.height}" for size in sizes]
            raise ValueFault("models.image_without_grid", value=texts, cause=cause_of(error)) from error
        tensors = {name: value for name, value in output.items() if is_image_input(name, value)}
        scales = []
        for original_size, size in zip(original_sizes, sizes, strict=True):
            scale = scale_of(size, resizes)
            share = (size.height * size.width) / (original_size.height * original_size.width)
            scales.append(None if scale is None else scale * share**0.5)
        return Prepared(tensors, marks_of(output)), tuple(scales)

    def _call(self, images: list[Image.Image], text: str, **text_arguments: Any) -> Any:
        """Call the processor on images and a text that contains `image_token` for each of them."""
        return self._measured(
            text=[text], images=[images], return_tensors="pt", return_text_replacement_offsets=True, **text_arguments
        )

    def blank_pair(self) -> Prepared:
        """Return a prepared pair of small black images."""
        return self.prepare([Image.new("RGB", (BLANK_SIDE, BLANK_SIDE))] * PAIR)

    @functools.cache  # noqa: B019  # a processor lives as long as its process
    def marks(self, images: int) -> tuple[str, ...]:
        """Return the marks of an image set with this number of images that have the largest number of tokens."""
        if not images:
            return ()
        # transformers offers this function to vLLM, but not for every processor
        own_count: Any = getattr(self.processor, "_get_num_multimodal_tokens", None)

        def count_tokens(sizes: list[ImageShape]) -> list[int]:
            return own_count(image_sizes=[list(size) for size in sizes]).num_image_tokens

        return largest_marks(
            make_marks=lambda size: self.prepare([Image.new("RGB", (size.width, size.height))] * images).marks,
            count_tokens=None if own_count is None else count_tokens,
            image_token=self.tokenizer.convert_ids_to_tokens(self.image_token_id),
        )

    def collate(self, prepared: Sequence[Prepared]) -> dict[str, Tensor]:
        """Concatenate the tensors of several image sets along the first dimension, as the processor's own call does.

        Where image sets differ in other dimensions, such as the number of tiles, the smaller are padded at the end.
        """
        tensors = [images.tensors for images in prepared if images.marks]
        names = tensors[0] if tensors else ()
        return {name: concatenate([images[name] for images in tensors], padding_of(name)) for name in names}

    def image_inputs(self, images: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Return the model's image arguments on the device."""
        return {name: tensor.to(device, non_blocking=True) for name, tensor in images.items()}

    # Texts

    def encode_prompt(self, turns: Sequence[Turn], marks: Sequence[str]) -> tuple[int, ...]:
        """Return the token ids of the prompt for the answer to the last question, exactly as generation gets it.

        The images come first, unless the questions contain IMAGE_MARK where an image belongs.

        Raises:
            ValueFault: a text contains a token that stands for an image, the questions have another number of marks
                than there are images, or the chat template puts all images first.
        """
        text = self.render_prompt(turns, len(marks))
        first_text, *following_texts = text.split(self.image_token) if marks else [text]
        if len(following_texts) != len(marks):
            raise DataError(
                "models.template_without_images", path=self.folder, value=len(following_texts), expected=len(marks)
            )
        prompt = first_text
        for mark, following_text in zip(marks, following_texts, strict=True):
            prompt += mark + following_text
        return tuple(self.tokenizer(prompt, add_special_tokens=self._adds_special_tokens(prompt))["input_ids"])

    def render_prompt(self, turns: Sequence[Turn], images: int) -> str:
        """Return the text of the prompt, in which each image is one `image_token`.

        Raises:
            ValueFault: see `encode_prompt`.
        """
        count = sum(turn.question.count(IMAGE_MARK) for turn in turns)
        if count and not self.places_images:
            raise ValueFault("models.template_puts_images_first", value=count)
        if count and count != images:
            raise ValueFault("models.marks_without_images", value=count, expected=images)
        messages: list[dict[str, Any]] = []
        for turn in turns:
            images_before = images if not count and not messages else 0
            messages.append({"role": "user", "content": self._contents(turn.question, images_before)})
            self._refuse_reserved_texts(turn.answer)
            messages.append({"role": "assistant", "content": [{"type": "text", "text": turn.answer}]})
        return self._render(messages[:-1], add_generation_prompt=True)

    def _contents(self, question: str, images_before: int) -> list[dict[str, str]]:
        """Return a question as texts and images, in order."""
        contents = [{"type": "image"} for _ in range(images_before)]
        texts = question.split(IMAGE_MARK)
        for number, text in enumerate(texts):
            if number:
                contents.append({"type": "image"})
            self._refuse_reserved_texts(text)
            if text or len(texts) == 1:
                contents.append({"type": "text", "text": text})
        return contents

    def _refuse_reserved_texts(self, text: str) -> None:
        for reserved_text in self.reserved_texts:
            if reserved_text in text:
                raise ValueFault("models.text_with_image_token", value=reserved_text)

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        return self.processor.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)

    def _adds_special_tokens(self, prompt: str) -> bool:
        """Return whether the tokenizer adds special tokens to a prompt, as in transformers' `apply_chat_template`."""
        begin = self.tokenizer.bos_token
        if begin is not None and prompt.startswith(begin):
            return False
        return getattr(self.processor, "text_kwargs", {}).get("add_special_tokens", True)

    def encode_answer(self, text: str) -> list[int]:
        """Return the token ids of an answer, including the end token.

        Raises:
            ValueFault: the answer contains a token that stands for an image.
        """
        self._refuse_reserved_texts(text)
        return [*self.tokenizer(self.lead + text, add_special_tokens=False)["input_ids"], self.end_id]

    def token_types(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return which tokens belong to images, [B, tokens], under the processor's own name for this argument.

        Empty if the processor returns no such argument.
        """
        if self.token_type_name is None:
            return {}
        return {self.token_type_name: torch.tensor(self.processor.create_mm_token_type_ids(input_ids.tolist()))}

    def decode(self, tokens: Tensor) -> list[str]:
        """Decode generated token ids, [B, tokens], into texts without special tokens and surrounding whitespace."""
        return [text.strip() for text in self.tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    def count_image_tokens(self, ids: Sequence[int]) -> int:
        """Return the number of tokens of a sequence that the model replaces by visual tokens."""
        return list(ids).count(self.image_token_id)

    def settings_that_bound_tokens(self, images: Sequence[Image.Image]) -> dict[str, Any]:
        """Return the settings of the image processor that bound the resolution of these images, with their values.

        No names of settings are known here, because each base has its own. A setting is a bound if the images have far
        fewer tokens with a quarter or half of its value.
        """
        rgb_images = [image.convert("RGB") for image in images]
        most_tokens = MAX_SHARE_WITH_BOUND * self._count_tokens_with(rgb_images, {})
        pixels = max(image.width * image.height for image in rgb_images)
        bounds = {}
        for name in known_settings(self.processor.image_processor):
            value = plain_setting(getattr(self.processor.image_processor, name, None))
            for smaller_value in smaller_settings(name, value, pixels):
                try:
                    tokens = self._count_tokens_with(rgb_images, {name: smaller_value})
                except Exception:  # a processor raises errors of any class for settings that do not fit together
                    continue
                if tokens <= most_tokens:
                    bounds[name] = value
        return bounds

    def _count_tokens_with(self, images: list[Image.Image], settings: dict[str, Any]) -> int:
        """Return the number of visual tokens of an image set if the image processor has these settings."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of settings with a new name
            output = self.processor(
                text=[self.image_token * len(images)], images=[images], images_kwargs=settings, return_tensors="pt"
            )
        return self.count_image_tokens(output["input_ids"][0].tolist())

    # Probes of the processor and its chat template

    def _find_image_token(self) -> str:
        """Return the placeholder of an image in a rendered chat template.

        Raises:
            DataError: the class of the processor does not say how it represents an image.
        """
        own_class = type(self.processor)
        image_token = getattr(self.processor, "image_token", None)
        if image_token is None or own_class.replace_image_token is ProcessorMixin.replace_image_token:
            raise DataError("models.processor_without_replacements", path=self.folder, value=own_class.__name__)
        return image_token

    def _probe_images(self) -> str | None:
        """Compare the processor's own call for a question about a pair with `encode_prompt`.

        Returns:
            the name under which the processor says which tokens belong to images, or None.

        Raises:
            DataError: the tokenizer has no image token, or the processor fails, uses another image token than the
                model, or changes a prompt in another way than by replacing each image token.
        """
        if self.image_token not in self.tokenizer.get_vocab():
            raise DataError("models.tokenizer_without_image_token", path=self.folder, value=self.image_token)
        turns = (Turn("question"),)
        text = self.render_prompt(turns, PAIR)
        special_tokens = {} if self._adds_special_tokens(text) else {"add_special_tokens": False}
        try:
            output = self._call([Image.new("RGB", (BLANK_SIDE, BLANK_SIDE))] * PAIR, text, **special_tokens)
            marks = marks_of(output)
        except Exception as error:  # a processor raises errors of any class
            raise DataError("models.processor_fails", path=self.folder, cause=cause_of(error)) from error
        ids = output["input_ids"][0].tolist()
        if self.image_token_id not in ids:
            expected_token = self.tokenizer.convert_ids_to_tokens(self.image_token_id)
            raise DataError(
                "models.processor_of_other_model", path=self.folder, value=self.image_token, expected=expected_token
            )
        if self.encode_prompt(turns, marks) != tuple(ids):
            raise DataError("models.processor_changes_prompts", path=self.folder, value=type(self.processor).__name__)
        for name in TOKEN_TYPES:
            # tokenizers may return an input of the same name, in which all values are 0
            if name in output and output[name].any():
                return name
        return None

    def _find_reserved_texts(self) -> tuple[str, ...]:
        """Return the texts that the tokenizer or the processor would replace by an image, a video or a sound."""
        texts = [*self.processor.all_special_multimodal_tokens]
        ids = [self.image_token_id, *self.processor.image_token_ids, *self.processor.video_token_ids]
        ids += self.processor.audio_token_ids
        texts += [self.tokenizer.convert_ids_to_tokens(token_id) for token_id in ids if token_id is not None]
        return tuple(sorted({text for text in texts if text}))

    def _set_template_arguments(self) -> None:
        """Make the arguments of the chat template its defaults, so that every user of a saved folder has them.

        Raises:
            DataError: there is no chat template.
            ParamsError: the template does not use an argument, so it would be ignored.
        """
        templates = self.processor.chat_template
        text = templates.get("default") if isinstance(templates, dict) else templates
        if text is None:
            raise DataError("models.no_chat_template", path=self.folder)
        own_arguments = inspect.signature(self.processor.apply_chat_template).parameters
        for name in self.template:
            is_used = IDENTIFIER.fullmatch(name) and re.search(rf"\b{name}\b", text)
            if name in own_arguments or not is_used:
                raise ParamsError("models.unknown_template_argument", field=f"template.{name}")
        text = with_defaults(text, self.template)
        self.processor.chat_template = {**templates, "default": text} if isinstance(templates, dict) else text

    def _probe_template(self) -> None:
        """Set `places_images`, `lead`, `end_id` and `pad_id` by rendering short dialogues with the chat template.

        Raises:
            DataError: the chat template cannot be used.
        """
        question = {"role": "user", "content": [{"type": "text", "text": "question"}]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]}
        contents = [{"type": "text", "text": "AAA"}, {"type": "image"}, {"type": "text", "text": "BBB"}]
        try:
            prompt = self._render([question], add_generation_prompt=True)
            dialogue = self._render([question, answer], add_generation_prompt=False)
            text_around_image = self._render([{"role": "user", "content": contents}], add_generation_prompt=True)
        except Exception as error:  # a template raises errors of any class
            raise DataError("models.template_not_rendered", path=self.folder, cause=cause_of(error)) from error
        if ASKS_TO_THINK.search(prompt):
            raise DataError("models.template_asks_to_think", path=self.folder)
        if ANSWER not in dialogue:
            raise DataError("models.template_without_answers", path=self.folder)
        before_answer, _, after_answer = dialogue.rpartition(ANSWER)
        # What the template puts before an answer, such as a blank, belongs to the answer. Some templates write another
        # text before an answer than they ask with. The answer then follows what generation sees
        self.lead = before_answer[len(prompt) :] if before_answer.startswith(prompt) else ""
        self.end_id = self._find_end_id(after_answer)
        pad_id = self.tokenizer.pad_token_id
        self.pad_id = self.end_id if pad_id is None else pad_id
        pattern = f"AAA.*{re.escape(self.image_token)}.*BBB"
        self.places_images = re.search(pattern, text_around_image, re.DOTALL) is not None

    def _find_end_id(self, after_answer: str) -> int:
        """Return the id of the token that ends an answer.

        Args:
            after_answer: what the chat template puts after an answer. If it puts nothing there, the end token of the
                tokenizer ends an answer.

        Raises:
            DataError: the text does not begin with a special token.
        """
        ids = self.tokenizer(after_answer, add_special_tokens=False)["input_ids"]
        end_id = ids[0] if after_answer.strip() else self.tokenizer.eos_token_id
        special_ids = {*self.tokenizer.all_special_ids, self.tokenizer.eos_token_id}
        special_ids.update(number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special)
        if end_id is None or end_id not in special_ids:
            raise DataError("models.template_without_end", path=self.folder, value=after_answer)
        return end_id


def read_choices(folder: Path) -> dict[str, Any]:
    """Return what this project chose for the processor, with the defaults for a folder without CHOICES.

    Raises:
        DataError: the file is damaged.
    """
    choices: dict[str, Any] = {"image_backend": PIL, "one_grid": False}
    path = folder / CHOICES
    if path.is_file():
        content = read_json(path)
        if not isinstance(content, dict) or any(type(content.get(name)) is not type(choices[name]) for name in choices):
            raise DataError("models.wrong_choices", path=path)
        choices |= {name: content[name] for name in choices}
    if choices["image_backend"] not in BACKENDS:
        raise DataError("models.wrong_choices", path=path)
    return choices


def is_image_input(name: str, value: Any) -> bool:
    """Return whether an output of a processor belongs to the images."""
    return isinstance(value, Tensor) and name not in TOKEN_INPUTS


def marks_of(output: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts by which a processor replaced the image tokens of one prompt."""
    (replacements,) = output["text_replacement_offsets"]
    return tuple(replacement["replacement"] for replacement in replacements)


def plain_setting(value: Any) -> Any:
    """Return the value of a setting of an image processor as a number, text, list or dictionary without None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # a `SizeDict`
        return {name: number for name, number in dataclasses.asdict(value).items() if number is not None}
    return value


def smaller_settings(name: str, value: Any, pixels: int) -> list[Any]:
    """Return smaller values of a setting of an image processor, which may not be valid.

    Args:
        value: the value, as `plain_setting` returns it.
        pixels: number of pixels of an image, to choose a value for a maximum that is not set.
    """
    if name == "do_resize":
        return []  # without it, an image keeps a size that the model may not take
    if isinstance(value, bool):
        return [False] if value else []
    if isinstance(value, int):
        return [value // divisor for divisor in (4, 2) if value >= divisor]
    if isinstance(value, dict):
        numbers = {key: number for key, number in value.items() if isinstance(number, int)}
        return [{key: number // divisor for key, number in numbers.items()} for divisor in (4, 2) if numbers]
    if isinstance(value, list | tuple):
        return [value[: len(value) // 2]]
    return [pixels // 64] if value is None and name.startswith("max_") else []


def padding_of(name: str) -> int:
    """Return the value that fills an image input, as in the processors of transformers."""
    return -1 if name.endswith("position_ids") else 0


def concatenate(tensors: Sequence[Tensor], padding: int) -> Tensor:
    """Concatenate tensors along the first dimension. They are padded at the end to the largest size of the others."""
    largest_shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded_tensors = []
    for tensor in tensors:
        widths: list[int] = []
        for size, largest_size in zip(reversed(tensor.shape[1:]), reversed(largest_shape), strict=True):
            widths += [0, largest_size - size]
        padded_tensors.append(functional.pad(tensor, widths, value=padding))
    return torch.cat(padded_tensors)
