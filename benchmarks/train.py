"""Training speed against the stock way, side by side: `make bench-train` -> benchmarks/results/train.json.

Runs with torch, transformers and peft alone: the 7B shapes with random weights on a GPU, the embedded base's shapes on
a CPU. The baseline is transformers' LLaVA-OneVision (the MDP module in its place) with peft's adapters, SDPA, full
checkpointing, a sequence per caption and logits on every position. Every variant trains the same model on the same
captions and must give the same loss. Repetitions go round all variants in turn, so that a busy machine is busy for all;
medians count. The optimizer's time is spread over the pairs of a training step (42 at 7B). bf16 has fp32 masters.

No GPU was at hand when this was written: its CPU figures are measured, its GPU figures are not yet. The same lines run
in both places (`--shapes tiny --device cpu --precision bf16` takes all of them but FlexAttention and compiled layers).
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.ablation import ABLATION, GPU_ONLY, Size, Variant, noise, seven_b, tiny  # noqa: E402
from benchmarks.sides import Sizes, compare, embedded_sides, print_comparison  # noqa: E402
from components.models.fused import attention_kernels, fused_attention, make_fused  # noqa: E402
from components.models.m3diff.family import M3DIFF  # noqa: E402
from components.models.m3diff.modeling import M3DiffForConditionalGeneration  # noqa: E402
from components.models.m3diff.settings import M3DiffSettings  # noqa: E402
from components.models.tuning import prepare, trainable_groups  # noqa: E402
from components.train.packing import Packed  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "train.json"
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}  # dense bf16
SAME_LOSS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # relative


class MasterAdamW:
    """AdamW on fp32 copies of what trains, written back after each step; on fp32 weights themselves."""

    def __init__(self, model: torch.nn.Module, settings: M3DiffSettings) -> None:
        groups = trainable_groups(model, M3DIFF, settings)
        self.weights = [p for group in groups for p in group.parameters]
        own = {id(p): p if p.dtype == torch.float32 else p.detach().float() for p in self.weights}
        self.masters = [own[id(p)] for p in self.weights]
        slots = [{"params": [own[id(p)] for p in group.parameters], "lr": group.lr} for group in groups]
        self.optimizer = torch.optim.AdamW(slots, weight_decay=0.0, fused=True)

    def step(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            if master is not weight:
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                if master is not weight:
                    weight.copy_(master)


@dataclass
class Bench:
    """The one model that every variant trains, and what it trains on."""

    size: Size
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        with self.device:
            self.model = M3DiffForConditionalGeneration._from_config(
                self.size.config, dtype=self.dtype, attn_implementation="sdpa"
            )
            self.adapted = prepare(self.model, M3DIFF, self.size.settings).train()
            self.optimizer = MasterAdamW(self.adapted, self.size.settings)
        self.mdp = self.model.model.mdp
        self.pixels = noise(self.size, self.device, self.dtype)
        self.tokens = sum(len(reference) for group in self.size.groups for _, reference in group)

    def take(self, variant: Variant) -> None:
        """Make the model compute as the variant does."""
        self.model.model.mdp = self.mdp if variant.mdp else None
        self.model.set_attn_implementation(kernels := attention_kernels(variant.flex))
        assert self.model.model.language_model.config._attn_implementation == kernels["text_config"]
        make_fused(self.model, variant.activation_checkpointing, variant.fused, variant.lora)
        for layer in self.model.model.language_model.layers:
            layer._compiled_call_impl = None
            if variant.compiled:
                layer.compile()

    def run(self, variant: Variant) -> float:
        """Forward and backward over every caption; the mean loss per supervised token."""
        total = torch.zeros((), device=self.device)
        for packed, owners in self.size.micro_batches(variant):
            with fused_attention():
                loss = (
                    self._stock_loss(packed, owners)
                    if variant.stock
                    else self._fused_loss(packed, owners, variant.flex)
                )
            (loss / self.tokens).backward()
            total += loss.detach()
        return float(total) / self.tokens

    def _inputs(self, packed: Packed, owners: list[int]) -> dict[str, Any]:
        side = self.pixels.shape[-1]
        return {
            "input_ids": packed.input_ids.to(self.device),
            "pixel_values": self.pixels[owners].flatten(0, 1),
            "image_sizes": torch.full((2 * len(owners), 2), side),
            "batch_num_images": [2] * len(owners),
            "use_cache": False,
        }

    def _stock_loss(self, packed: Packed, owners: list[int]) -> Tensor:
        """As a collator of transformers' would: all of the reference in the input, labels that the model shifts."""
        labels = torch.full_like(packed.input_ids, -100)
        labels[packed.supervised] = packed.labels
        labels = F.pad(labels, (1, 0), value=-100)
        ids = torch.where(labels >= 0, labels, F.pad(packed.input_ids, (0, 1)))
        present = F.pad(packed.segments, (0, 1), value=-1).ge(0) | (labels >= 0)
        inputs = self._inputs(packed, owners) | {"input_ids": ids.to(self.device)}
        mean = self.adapted(**inputs, attention_mask=present.to(self.device), labels=labels.to(self.device)).loss
        return mean * len(packed.labels)

    def _fused_loss(self, packed: Packed, owners: list[int], flex: bool) -> Tensor:
        logits = self.adapted(
            **self._inputs(packed, owners),
            attention_mask=packed.mask(self.device, flex=flex),
            position_ids=packed.position_ids.to(self.device),
            logits_to_keep=packed.supervised.to(self.device),
        ).logits
        return F.cross_entropy(logits.float(), packed.labels.to(self.device), reduction="sum")


@dataclass
class Measured:
    """Seconds of each repetition of a variant, and its peak memory on a GPU."""

    variant: Variant
    loss: float
    run_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    peak_gb: float | None = None

    def figures(self, size: Size, peak_tflops: float | None) -> dict[str, Any]:
        optimizer = statistics.median(self.optimizer_s) * len(size.groups) / size.step_pairs
        seconds = statistics.median(self.run_s) + optimizer
        batches = [packed for packed, _ in size.micro_batches(self.variant)]
        sequences = sum(len(packed.input_ids) for packed in batches)
        rate = {"captions_per_s": size.captions / seconds, "sequences_per_s": sequences / seconds}
        spread = (max(self.run_s) - min(self.run_s)) / statistics.median(self.run_s)
        figures = {"name": self.variant.name, **rate, "loss": self.loss, "spread": spread, "peak_gb": self.peak_gb}
        if peak_tflops:
            lengths = [length for packed in batches for length in packed.segments.ge(0).sum(dim=1).tolist()]
            supervised = sum(len(packed.labels) for packed in batches) / sequences
            terms = [
                term for length in lengths for term in M3DIFF.flops(size.config, length, supervised, size.lora_rank)
            ]
            figures["mfu"] = sum(term.total for term in terms) / seconds / (peak_tflops * 1e12)
        return figures | {"micro_batch": max(len(packed.input_ids) for packed in batches)}


def warmed_up(bench: Bench, variant: Variant) -> Measured | str:
    """Run the variant once, with micro-batches halved until they fit; or why it cannot run here."""
    key = "packed" if variant.packed else variant.activation_checkpointing
    while True:
        try:
            bench.take(variant)
            loss = bench.run(variant)
            return Measured(variant, loss)
        except torch.OutOfMemoryError:
            if bench.size.micro[key] == 1:
                return "does not fit"
            bench.size.micro[key] //= 2
        except Exception as error:  # a compiler's failure must not cost the variants that need none
            if not (variant.flex or variant.compiled):
                raise
            return f"{type(error).__name__}: {str(error)[:200]}"
        finally:
            bench.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()


def measure(bench: Bench, variants: tuple[Variant, ...], repeats: int) -> tuple[list[Measured], dict[str, str]]:
    """Every variant in turn, `repeats` times round; the variants that could not run, with the reason."""
    started = {variant.name: warmed_up(bench, variant) for variant in variants}
    failed = {name: got for name, got in started.items() if isinstance(got, str)}
    measured = [got for got in started.values() if isinstance(got, Measured)]
    for one in measured:
        off = abs(one.loss / measured[0].loss - 1)
        assert off < SAME_LOSS[bench.dtype], (
            f"{one.variant.name}: loss {one.loss}, the baseline's is {measured[0].loss}"
        )
    for repetition in range(-1, repeats):  # the first round makes the optimizer's state and is not counted
        for one in measured if repetition >= 0 else measured[:1]:
            bench.take(one.variant)
            times = timed_step(bench, one)
            if repetition >= 0:
                one.run_s.append(times[0])
                one.optimizer_s.append(times[1])
    return measured, failed


def timed_step(bench: Bench, one: Measured) -> tuple[float, float]:
    gpu = bench.device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    stamps = [_now(gpu)]
    bench.run(one.variant)
    stamps.append(_now(gpu))
    bench.optimizer.step()
    stamps.append(_now(gpu))
    one.peak_gb = torch.cuda.max_memory_allocated() / 1e9 if gpu else None
    return stamps[1] - stamps[0], stamps[2] - stamps[1]


def _now(gpu: bool) -> float:
    if gpu:
        torch.cuda.synchronize()
    return time.perf_counter()


def machine(device: torch.device) -> dict[str, Any]:
    import peft
    import transformers

    chip = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    load = {"load_before": round(os.getloadavg()[0], 2)}
    return {"device": chip, "cores": os.cpu_count(), "python": platform.python_version(), **versions, **load}


def print_table(ablation: list[dict[str, Any]], failed: dict[str, str]) -> None:
    first = ablation[0]["captions_per_s"]
    head = (
        f"{'':<34} {'captions/s':>10} {'x':>6} {'sequences/s':>12} {'spread':>7} {'MFU':>6} {'peak GB':>8} {'loss':>9}"
    )
    print(head)
    for row in ablation:
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else "-"
        peak = f"{row['peak_gb']:.1f}" if row["peak_gb"] else "-"
        print(
            f"{row['name']:<34} {row['captions_per_s']:>10.2f} {row['captions_per_s'] / first:>6.2f} "
            f"{row['sequences_per_s']:>12.2f} {row['spread']:>7.0%} {mfu:>6} {peak:>8} {row['loss']:>9.4f}"
        )
    for name, reason in failed.items():
        print(f"{name:<34} not run: {reason}")


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """The project's step beside transformers' Trainer, on the embedded shapes; printed."""
    quick = {"rounds": 3, "round_s": 1.5} if args.quick else {}
    sizes = Sizes(**{"rounds": args.repeats or 5} | quick)
    with tempfile.TemporaryDirectory() as folder:
        sides = embedded_sides(Path(folder), sizes, args.threads, prepared=not args.quick)
        figures = compare(sides, sizes, args.profile)
    print_comparison(figures)
    return figures


def ablation(args: argparse.Namespace, facts: dict[str, Any]) -> dict[str, Any]:
    """What each lever brings; printed."""
    device = torch.device(args.device)
    size = seven_b() if args.shapes == "7b" else tiny()
    bench = Bench(size, device, torch.bfloat16 if args.precision == "bf16" else torch.float32)
    variants = ABLATION + (GPU_ONLY if device.type == "cuda" else ())
    measured, failed = measure(bench, variants, args.repeats or (2 if device.type == "cuda" else 9))
    peak = next((tflops for name, tflops in PEAK_TFLOPS.items() if name in facts["device"]), None)
    rows = [one.figures(size, peak) for one in measured]
    print_table(rows, failed)
    return {"ablation": rows, "not_run": failed, "pairs": len(size.groups), "captions": size.captions}


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", choices=["7b", "tiny"], default="7b" if gpu else "tiny")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16" if gpu else "fp32")
    parser.add_argument("--repeats", type=int, help="rounds; 5 beside the peer, 9 of the ablation on a CPU, 2 on a GPU")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="three short rounds beside the peer alone; writes nothing")
    parser.add_argument("--profile", action="store_true", help="where a step's time goes, by operator")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    facts = machine(torch.device(args.device))
    print(f"{facts['device']}, {args.shapes} shapes, {args.precision}; load {facts['load_before']}", flush=True)
    sides = compared(args) if args.device == "cpu" and args.precision == "fp32" else {}
    if args.quick:
        return
    command = f"python benchmarks/train.py {' '.join(sys.argv[1:])}".strip()
    ratios = {name: row["captions_per_s"] / sides["peer"]["captions_per_s"] for name, row in sides.items()}
    told = {"shapes": args.shapes, "precision": args.precision, **facts, "command": command}
    result = sides | {"ratios": ratios} | ablation(args, facts) | told
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"-> {args.out}")


if __name__ == "__main__":
    main()
