"""Models of random weights in a folder each, small: what transformers and diffusers load, they load."""

import json
import string
from pathlib import Path

import torch

SIDES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = SIDES | {"image_size": 32, "patch_size": 8}
TEXT = SIDES | {"vocab_size": 64, "max_position_embeddings": 77}


def clip(folder: Path) -> Path:
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=12)).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def siglip(folder: Path) -> Path:
    from transformers import SiglipConfig, SiglipImageProcessor, SiglipModel

    torch.manual_seed(0)
    SiglipModel(SiglipConfig(text_config=TEXT, vision_config=VISION)).save_pretrained(folder)
    SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def instruct_pix2pix(folder: Path) -> Path:
    """The true pipeline's parts from their configurations, 160 kB in all, without a safety checker."""
    from diffusers import AutoencoderKL, EulerAncestralDiscreteScheduler, UNet2DConditionModel
    from diffusers import StableDiffusionInstructPix2PixPipeline as Pipeline
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    blocks = {"block_out_channels": (4, 8), "layers_per_block": 1, "norm_num_groups": 2}
    ups, downs = ("CrossAttnUpBlock2D", "UpBlock2D"), ("DownBlock2D", "CrossAttnDownBlock2D")
    sizes = {"sample_size": 8, "in_channels": 8, "out_channels": 4, "cross_attention_dim": 8, "attention_head_dim": 2}
    unet = UNet2DConditionModel(down_block_types=downs, up_block_types=ups, **sizes, **blocks)
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    text = TEXT | {"hidden_size": 8, "intermediate_size": 8, "eos_token_id": 1, "bos_token_id": 0}
    Pipeline(
        vae=AutoencoderKL(**kinds, latent_channels=4, **blocks),
        text_encoder=CLIPTextModel(CLIPTextConfig(**text)),
        tokenizer=tokenizer(folder.parent / "tokenizer"),
        unet=unet,
        scheduler=EulerAncestralDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


def tokenizer(folder: Path) -> object:
    """CLIP's, of single letters."""
    from transformers import CLIPTokenizer

    folder.mkdir()
    ends = ("<|startoftext|>", "<|endoftext|>")
    pieces = [*ends, *string.ascii_lowercase, *(f"{letter}</w>" for letter in string.ascii_lowercase)]
    (folder / "vocab.json").write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    known = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "bos_token": ends[0]}
    known |= dict.fromkeys(("eos_token", "unk_token", "pad_token"), ends[1])
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    return CLIPTokenizer.from_pretrained(str(folder))
