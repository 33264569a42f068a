"""Create tiny LLaVA-OneVision and M3Diff models with random weights."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import LlavaOnevisionForConditionalGeneration

from m3diff.models import FAMILIES
from m3diff.models.checkpoint import folder_sha256, save_checkpoint
from m3diff.models.contract import Branch
from m3diff.models.fused import register_kernels
from m3diff.models.generation import QUESTION
from m3diff.models.layers import image_pairs
from m3diff.models.m3diff import M3DiffSettings
from m3diff.models.m3diff_model import M3DiffConfig, M3DiffForConditionalGeneration
from m3diff.models.onediff import OneDiffSettings
from m3diff.models.processing import M3DiffImageProcessor, M3DiffProcessor, pad_prompts
from m3diff.models.settings import Lora, VDMConfig, module_config
from m3diff.models.tuning import prepare_for_training
from m3diff.records.sample import Turn

MDP = {"vision_feature_layers": [1, 2], "layers": 2, "heads": 2}
DIFFERENCE = {"kind": "difference", "vision_feature_layers": [1, 2], "init_gain": 1.0}
BASE = Path(__file__).parent.parent / "data" / "00_base"
RATES = {"vision": 1e-3, "projector": 3e-3, "module": 3e-3, "llm": 3e-3}
WIDTH = 16
SIDE = 24
PATCH = 8


def tiny_config(mdp: dict | None = None, vocab_size: int = 640) -> M3DiffConfig:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"model_type": "siglip_vision_model", "image_size": SIDE, "patch_size": PATCH, "vision_use_head": False}
    text = {"model_type": "qwen2", "vocab_size": vocab_size, "num_key_value_heads": 1, "max_position_embeddings": 512}
    text |= {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    tokens = {"image_token_index": 3, "video_token_index": 4, "image_grid_pinpoints": [[SIDE, SIDE]]}
    return M3DiffConfig(vision_config=sizes | vision, text_config=sizes | text, mdp=mdp, **tokens)


def tiny_model(mdp: dict | None = None, seed: int = 0) -> M3DiffForConditionalGeneration:
    """Return an M3Diff with random weights in its zero-initialised projections, so that no gradient must be zero."""
    torch.manual_seed(seed)
    model = M3DiffForConditionalGeneration._from_config(tiny_config(mdp), attn_implementation=register_kernels())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@torch.no_grad()
def scale_features(model: torch.nn.Module) -> None:
    """Scale the features to about one, as in a trained model. Norms of tiny features would magnify rounding errors."""
    for name, parameter in model.named_parameters():
        if "embed" in name and parameter.dim() > 1:
            parameter.mul_(15)


def tiny_base(folder: Path, seed: int = 0, first_release: bool = False) -> Path:
    """Write a LLaVA-OneVision with the project's tokenizer and random weights.

    Args:
        first_release: whether to use the names of weights in the first release of the 0.5B model.
    """
    torch.manual_seed(seed)
    tokenizer = FAMILIES["m3diff"].load_processor(BASE).tokenizer
    config = tiny_config(vocab_size=len(tokenizer)).to_dict()
    token = tokenizer.convert_tokens_to_ids
    config |= {"image_token_index": token("<image>"), "video_token_index": token("<video>")}
    config["model_type"] = "llava_onevision"
    config["text_config"] |= {"eos_token_id": token("<|im_end|>"), "pad_token_id": token("<|endoftext|>")}
    config["text_config"]["tie_word_embeddings"] = first_release
    config.pop("mdp")
    base_config = LlavaOnevisionForConditionalGeneration.config_class.from_dict(config)
    model = LlavaOnevisionForConditionalGeneration(base_config)
    scale_features(model)
    model.save_pretrained(folder)
    images = M3DiffImageProcessor(size={"height": SIDE, "width": SIDE})
    patches = (SIDE // PATCH) ** 2
    template = tokenizer.chat_template
    processor = M3DiffProcessor(images, tokenizer, num_image_tokens=patches, chat_template=template)
    processor.save_pretrained(folder)
    if first_release:
        weights = load_file(folder / "model.safetensors")
        longer = {name.replace("vision_tower.", "vision_tower.vision_model."): weights[name] for name in weights}
        save_file(longer, folder / "model.safetensors", {"format": "pt"})
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
        (folder / "chat_template.jinja").unlink()
    return folder


def tiny_settings(mdp: dict | None = MDP, rank: int = 2, **rates: float | None) -> M3DiffSettings:
    """Return the settings of a tiny M3Diff. `rates` changes the learning rates of its parts."""
    without = {"module": None} if mdp is None else {}
    module = None if mdp is None else module_config(**mdp)
    return M3DiffSettings("m3diff", module, Lora(rank=rank, alpha=4), RATES | without | rates)


VDM = {"vision_feature_layers": (1, 2), "tokens": 3, "layers": 4, "width": 12, "heads": 2, "mlp_ratio": 2}
SEPARATE = VDM | {"images": "separate", "norm": "size", "layers": 3}


def onediff_settings(module: dict | None = VDM, rank: int = 2, **rates: float | None) -> OneDiffSettings:
    """Return the settings of a tiny OneDiff. `rates` changes the learning rates of its parts."""
    without = {"module": None} if module is None else {}
    module_settings = None if module is None else VDMConfig(**module)
    return OneDiffSettings("onediff", module_settings, Lora(rank=rank, alpha=4), RATES | without | rates)


def tiny_trained(base: Path, settings: M3DiffSettings, seed: int = 1) -> torch.nn.Module:
    """Return a model with adapters on `base`. Its trainable parameters differ from their initial values."""
    family = FAMILIES[settings.family]
    torch.manual_seed(seed)
    model = prepare_for_training(family.load_base(base, settings, torch.float32, "sdpa"), family, settings).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tiny_checkpoint(
    base: Path,
    folder: Path,
    settings: M3DiffSettings | None = None,
    seed: int = 1,
    question: str = QUESTION,
) -> Path:
    """Write a checkpoint on `base` as training with this question writes it, and return its folder."""
    settings = settings or tiny_settings()
    processor = FAMILIES[settings.family].load_processor(base)
    model = tiny_trained(base, settings, seed)
    save_checkpoint(
        model,
        processor,
        folder,
        family=settings.family,
        base=base,
        base_sha256=folder_sha256(base),
        trained_on={"question": question},
    )
    return folder


def pair_prompt(processor: Any, question: str) -> tuple[int, ...]:
    """Return the token ids of the prompt with a question about a pair."""
    return processor.encode_prompt((Turn(question),), processor.marks(2))


def pair_branch(prompt: Sequence[int], answer: Sequence[int]) -> Branch:
    """Return the branch of a question with one answer."""
    return Branch([*prompt, *answer], [(len(prompt), len(prompt) + len(answer))])


def image_inputs(processor: Any, pairs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the image arguments of the model for pairs of images, on the CPU."""
    return processor.image_inputs(processor.collate([processor.prepare(pair) for pair in pairs]), torch.device("cpu"))


def pair_inputs(processor: Any, pairs: list, questions: list[str]) -> dict[str, torch.Tensor]:
    """Return the inputs of `generate` for pairs of images, including those for LLaVA-OneVision's own class."""
    prompts = []
    for pair, question in zip(pairs, questions, strict=True):
        prompts.append(processor.encode_prompt((Turn(question),), processor.prepare(pair).marks))
    inputs = pad_prompts(prompts, processor.pad_id) | image_inputs(processor, pairs)
    if "batch_num_images" in inputs:
        inputs["image_sizes"] = torch.full((2 * len(pairs), 2), processor.image_processor.side)
    return inputs


@torch.no_grad()
def saliency_map(model: Any, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return the saliency maps of pairs without captions."""
    is_llava = hasattr(model, "model")
    with model.record_maps() as maps:
        if is_llava:
            model.model.visual_tokens(pixel_values, image_pairs(len(pixel_values), None))
        else:
            model(pixel_values=pixel_values)
    return model.mean_map(maps, len(pixel_values) // (2 if is_llava else 1))


def noise_image(seed: int, size: tuple[int, int] = (40, 40)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def colour_image(seed: int, size: tuple[int, int] = (40, 40)) -> Image.Image:
    """Return dots of one colour on black. A tiny model can distinguish such images, but not images of noise."""
    rng = np.random.default_rng(seed)
    colour = rng.integers(0, 256, 3)
    dots = rng.integers(0, 2, (size[1], size[0], 1))
    return Image.fromarray((colour * dots).astype(np.uint8))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread. A second thread would slow down models with a few thousand parameters."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
