"""Captioning speed against the stock way, side by side: `python benchmarks/generate.py` -> results/generate.json.

The baseline takes one pair at a time: transformers' own image processor, then `generate`. Ours takes a batch: M3Diff's
own image path, fused norms and SwiGLU. Same model (random weights), same images, same number of new tokens, and where
the weights are fp32 the same tokens. No GPU was at hand when this was written: its GPU figures are not measured.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.ablation import Size, seven_b, tiny  # noqa: E402
from benchmarks.machine import machine, write  # noqa: E402
from m3diff.models.fused import make_fused  # noqa: E402
from m3diff.models.m3diff_model import M3DiffForConditionalGeneration  # noqa: E402
from m3diff.models.processing import M3DiffImageProcessor  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "generate.json"


def stock_pixels(side: int) -> Callable[[list[Any]], Tensor]:
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

    processor = LlavaOnevisionImageProcessorPil(
        size={"height": side, "width": side}, image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=3
    )
    return lambda images: torch.as_tensor(processor([images], return_tensors="np")["pixel_values"]).view(
        len(images), 3, side, side
    )


def own_pixels(side: int) -> Callable[[list[Any]], Tensor]:
    processor = M3DiffImageProcessor(size={"height": side, "width": side})
    return lambda images: processor.preprocess(images)["pixel_values"]


def sample_images(pairs: int, side: int) -> list[Any]:
    """Before, after, before, ...: noise of the benchmark's own size, not yet square."""
    rng = np.random.default_rng(0)
    shape = (round(1.25 * side), round(1.5 * side), 3)
    return [Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)) for _ in range(2 * pairs)]


@dataclass
class Bench:
    """A model, the images of `pairs` pairs and one prompt."""

    size: Size
    device: torch.device
    dtype: torch.dtype
    pairs: int
    new_tokens: int
    cache: str | None = None  # of the keys and values, as `generate` calls it; None: it grows

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        with self.device:
            self.model = M3DiffForConditionalGeneration._from_config(
                self.size.config, dtype=self.dtype, attn_implementation="sdpa"
            ).eval()
        self.side = self.size.config.vision_config.image_size
        self.prompt = torch.tensor(self.size.groups[0][0][0])
        self.images = sample_images(self.pairs, self.side)
        self.stock, self.own = stock_pixels(self.side), own_pixels(self.side)

    @torch.inference_mode()
    def caption(self, batch: int, fused: bool) -> Tensor:
        """Answer tokens of every pair, [pairs, new tokens]."""
        make_fused(self.model, fused=fused)
        generated = []
        for at in range(0, self.pairs, batch):
            images = self.images[2 * at : 2 * (at + batch)]
            ids = self.prompt.expand(len(images) // 2, -1).to(self.device)
            tokens = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                pixel_values=(self.own if fused else self.stock)(images).to(self.device, self.dtype),
                image_sizes=torch.full((len(images), 2), self.side),
                batch_num_images=torch.full((len(ids),), 2),
                max_new_tokens=self.new_tokens,
                min_new_tokens=self.new_tokens,
                do_sample=False,
                pad_token_id=0,
                cache_implementation=self.cache if fused else None,
            )
            generated.append(tokens[:, ids.shape[1] :].cpu())  # waits for the GPU
        return torch.cat(generated)


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", choices=["7b", "tiny"], default="7b" if gpu else "tiny")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cache", choices=["static"], help="keys and values in room for all that comes; else it grows")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    facts = machine(args.device)
    print(f"{facts['device']}, {args.shapes} shapes; load {facts['load_before']}", flush=True)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    size = seven_b(pairs=args.batch) if args.shapes == "7b" else tiny(pairs=args.batch)
    bench = Bench(size, torch.device(args.device), dtype, pairs=args.batch, new_tokens=15, cache=args.cache)
    ways = {"baseline": (1, False), "one by one, fused": (1, True), "batched": (args.batch, True)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    tokens = {name: bench.caption(*way) for name, way in ways.items()}  # also the warm-up
    for _ in range(args.repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            bench.caption(*way)
            seconds[name].append(time.perf_counter() - start)
    same = {name: float((found == tokens["baseline"]).float().mean()) for name, found in tokens.items()}
    rates = {name: args.batch / statistics.median(spent) for name, spent in seconds.items()}
    for name, rate in rates.items():
        print(f"{name:<20} {rate:>9.2f} pairs/s {rate / rates['baseline']:>6.2f} x   {same[name]:.0%} of tokens alike")
    figures = {name: {"pairs_per_s": rate, "same_tokens": same[name]} for name, rate in rates.items()}
    write({**figures, "pairs": args.batch, "new_tokens": 15, "shapes": args.shapes, **facts}, args.out)


if __name__ == "__main__":
    main()
