"""A trained BLIP2IDC on disk: merged, as adapters, and read by transformers alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from m3diff.models import FAMILIES
from m3diff.models.checkpoint import ADAPTERS, export_checkpoint, load_model
from m3diff.models.tuning import merge, prepare
from tests.tiny import colour_image, tiny_checkpoint, tiny_trained
from tests.tiny_blip2 import QUERIES, SIDE, blip2_settings

FAMILY = FAMILIES["blip2idc"]
PAIRS = [(colour_image(k, (40, 30)), colour_image(k + 9, (36, 48))) for k in range(4)]


def asked(base: Path) -> dict[str, torch.Tensor]:
    image = json.loads((base / "config.json").read_text())["image_token_index"]
    ids = torch.tensor([[image] * QUERIES + [2, 9, 11 + row] for row in range(2)])
    pixels = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}


def logits(model: torch.nn.Module, base: Path) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**asked(base)).logits.clone()


def test_a_fused_linear_of_queries_keys_and_values_is_merged_with_its_bias_left_alone(base: Path) -> None:
    model = tiny_trained(base, blip2_settings(module=None, llm=None))
    name = "vision_model.encoder.layers.1.self_attn.qkv"
    weights = dict(model.get_base_model().named_parameters())
    a, b = (weights[f"{name}.lora_{letter}.default.weight"] for letter in "AB")
    weight, bias = weights[f"{name}.base_layer.weight"].clone(), weights[f"{name}.base_layer.bias"].clone()
    assert b.shape[0] == len(bias) == 3 * a.shape[1]
    want = logits(model, base)
    merged = merge(model)
    linear = merged.get_submodule(name)
    torch.testing.assert_close(linear.weight, weight + 2 * b @ a)
    assert torch.equal(linear.bias, bias)
    torch.testing.assert_close(logits(merged, base), want, rtol=1e-4, atol=1e-4)


def test_a_projector_that_trains_is_beside_the_adapters(base: Path, tmp_path: Path) -> None:
    settings = blip2_settings(projector=1e-3)
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", settings)
    tuned = load_file(checkpoint / ADAPTERS / "tuned.safetensors")
    assert set(tuned) == {"language_projection.weight", "language_projection.bias"}
    want = logits(tiny_trained(base, settings), base)
    for source in (checkpoint, checkpoint / ADAPTERS):
        torch.testing.assert_close(logits(load_model(source)[0], base), want, rtol=1e-4, atol=1e-4)


def test_without_adapters_the_same_linears_train_in_full(base: Path, tmp_path: Path) -> None:
    settings = blip2_settings(rank=0)
    model = prepare(FAMILY.load_base(base, settings, torch.float32, "sdpa"), FAMILY, settings)
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert "vision_model.encoder.layers.0.self_attn.qkv.bias" in trains
    assert not any(name.startswith("query_tokens") or ".fc1." in name for name in trains)
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", settings)
    want = logits(tiny_trained(base, settings), base)
    torch.testing.assert_close(logits(load_model(checkpoint)[0], base), want, rtol=1e-4, atol=1e-4)


STOCK = """
import sys
from pathlib import Path
import transformers
from safetensors.torch import load_file, save_file
place = Path(sys.argv[1])
model = transformers.AutoModelForImageTextToText.from_pretrained(place / "merged")
processor = transformers.AutoProcessor.from_pretrained(place / "merged")
assert type(model).__name__ == "Blip2ForConditionalGeneration", type(model)
assert type(processor).__name__ == "Blip2Processor", type(processor)
save_file({"logits": model(**load_file(place / "inputs.safetensors")).logits.contiguous()}, place / "out.safetensors")
assert not any(name.startswith("m3diff") for name in sys.modules)
"""


@pytest.mark.slow(15)
def test_transformers_alone_reads_what_was_trained_as_a_blip2(base: Path, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(base, tmp_path / "checkpoint", blip2_settings())
    export_checkpoint(checkpoint, tmp_path / "merged", adapters=False)
    save_file(asked(base), tmp_path / "inputs.safetensors")
    ended = subprocess.run([sys.executable, "-c", STOCK, str(tmp_path)], capture_output=True, text=True, cwd="/")
    assert ended.returncode == 0, ended.stderr
    want = logits(tiny_trained(base, blip2_settings()), base)
    torch.testing.assert_close(load_file(tmp_path / "out.safetensors")["logits"], want, rtol=1e-4, atol=1e-4)
