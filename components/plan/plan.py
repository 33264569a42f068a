"""What a training run will cost, before it starts: parameters, tokens, FLOPs, memory and hours (`m3diff plan`)."""

from dataclasses import dataclass

from components.models.m3diff.configuration import M3DiffConfig
from components.models.m3diff.configuration import seven_b_config
from components.models.m3diff.flops import Term, flops, image_tokens, lora_parameters
from components.section import ParamsError
from components.train.params import Train

TERA, GIGA = 1e12, 1e9
BYTES_TRAINED = 18  # bf16 weight 2, gradient 4, fp32 master 4, AdamW's two moments 8
ACTIVATION_FACTOR = {"none": 34.0, "cheap": 15.0, "full": 1.0}
"""Activations kept per token, in units of layers x width x 2 bytes: eager 6.8 MB a token at 7B; norms and SwiGLU
products recomputed 3.0 MB; layer inputs alone 0.2 MB. Estimates, to be checked on the GPU at hand."""
RESERVE = 0.08  # of the GPU: context, workspaces, fragmentation


class DoesNotFit(ParamsError):
    """The profile needs more memory than its GPUs have."""


@dataclass(frozen=True)
class Workload:
    """What an epoch holds: the published mixture by default (paper section 5.2; token means are estimates)."""

    pairs: int = 145_000
    samples: int = 896_000
    prompt_tokens: int = 29  # chat template and question, without the images
    answer_tokens: int = 15

    @property
    def captions_per_pair(self) -> float:
        return self.samples / self.pairs


def planned_config(cfg: Train) -> M3DiffConfig:
    """The configuration that would train: the base's where its folder is there, else the published 7B shapes."""
    if not (cfg.base / "config.json").is_file():
        print(f"{cfg.base}: not here, planned with the shapes of llava-onevision-qwen2-7b")
        return seven_b_config(cfg.mdp)
    return M3DiffConfig.on_base(str(cfg.base), cfg.mdp)


def parameter_groups(config: M3DiffConfig, lora_rank: int) -> dict[str, int]:
    """Parameters by group, counted on a model without storage."""
    import torch

    from components.models.m3diff.modeling import M3DiffForConditionalGeneration

    with torch.device("meta"):
        model = M3DiffForConditionalGeneration(config)
    count = {"tower": 0, "projector": 0, "mdp": 0, "llm (frozen)": 0, "embeddings and head (frozen)": 0}
    for name, parameter in model.named_parameters():
        if name.startswith("model.vision_tower."):
            group = "tower"
        elif name.startswith(("model.multi_modal_projector.", "model.image_newline")):
            group = "projector"
        elif name.startswith("model.mdp."):
            group = "mdp"
        else:
            group = "llm (frozen)" if ".layers." in name else "embeddings and head (frozen)"
        count[group] += parameter.numel()
    return count | {"lora": lora_parameters(config, lora_rank)}


def sequence_tokens(config: M3DiffConfig, load: Workload, branches: float) -> float:
    return image_tokens(config) + load.prompt_tokens + branches * load.answer_tokens


@dataclass(frozen=True)
class Plan:
    """The figures of a run; times are for the given share of the GPUs' peak (MFU)."""

    groups: dict[str, int]
    terms: list[Term]
    branches: float
    tokens: float
    sequences: int
    steps: int
    epoch_flops: float
    recompute_flops: float
    memory_gb: dict[str, float]
    gpus: int

    @property
    def memory_total_gb(self) -> float:
        return sum(self.memory_gb.values())

    def gpu_hours(self, peak_tflops: float, mfu: float) -> float:
        return self.epoch_flops / (peak_tflops * TERA * mfu) / 3600


def make_plan(cfg: Train, config: M3DiffConfig, load: Workload) -> Plan:
    per_pair = load.captions_per_pair
    branches = {"unpacked": 1.0, "k": min(cfg.pack_k, per_pair), "full": per_pair}[cfg.packing]
    sequences = round(load.samples / branches)
    tokens = sequence_tokens(config, load, branches)
    terms = flops(config, tokens, branches * load.answer_tokens, cfg.lora_rank)
    groups = parameter_groups(config, cfg.lora_rank)
    per_sequence = sum(term.total for term in terms)
    recomputed = sum(term.forward for term in terms[:-1]) if cfg.checkpointing == "full" else 0.0
    return Plan(
        groups=groups,
        terms=terms,
        branches=branches,
        tokens=tokens,
        sequences=sequences,
        steps=round(cfg.epochs * sequences / cfg.global_batch),
        epoch_flops=cfg.epochs * sequences * (per_sequence + recomputed),
        recompute_flops=recomputed,
        memory_gb=_memory(cfg, config, groups, tokens),
        gpus=max(1, cfg.workers),
    )


def _memory(cfg: Train, config: M3DiffConfig, groups: dict[str, int], tokens: float) -> dict[str, float]:
    """Bytes on one GPU in GB: ZeRO 1 deals out master weights and moments (12 B), 2 gradients too, 3 weights too."""
    ranks = max(1, cfg.workers)
    frozen = sum(count for name, count in groups.items() if "frozen" in name)
    trained = sum(count for name, count in groups.items() if "frozen" not in name)
    wide = 1 if cfg.precision == "bf16" else 2
    optimizer = 12 * trained / (ranks if cfg.zero_stage >= 1 else 1)
    gradients = 4 * trained / (ranks if cfg.zero_stage >= 2 else 1)
    weights = 2 * wide * (frozen + trained) / (ranks if cfg.zero_stage == 3 else 1)
    text = config.text_config
    per_token = ACTIVATION_FACTOR[cfg.checkpointing] * text.num_hidden_layers * text.hidden_size * 2 * wide
    return {
        "weights": weights / GIGA,
        "gradients": gradients / GIGA,
        "optimizer": optimizer / GIGA,
        "activations": cfg.micro_batch * tokens * per_token / GIGA,
    }


def check_fits(cfg: Train, plan: Plan) -> None:
    """Raises DoesNotFit, naming what is needed, what there is and what to lower."""
    room = cfg.gpu_memory_gb * (1 - RESERVE)
    if cfg.gpu and plan.memory_total_gb > room:
        parts = ", ".join(f"{name} {size:.1f}" for name, size in plan.memory_gb.items())
        raise DoesNotFit(
            f"train: needs {plan.memory_total_gb:.1f} GB a GPU ({parts}) but {cfg.gpu_memory_gb:g} GB hold {room:.1f}; "
            f"lower train.micro_batch (now {cfg.micro_batch}), raise train.zero_stage (now {cfg.zero_stage}) "
            f"or set train.checkpointing to cheap or full (now {cfg.checkpointing})"
        )


def print_plan(cfg: Train, plan: Plan, load: Workload, peak_tflops: float, mfu: float) -> None:
    """Print the plan as tables."""
    print(f"parameters           {'':>14}")
    for name, count in plan.groups.items():
        print(f"  {name:<28} {count / 1e6:>12,.2f} M")
    print(f"workload: {load.pairs:,} pairs, {load.samples:,} captions, {load.captions_per_pair:.2f} a pair")
    print(
        f"  packing {cfg.packing}: {plan.sequences:,} sequences of {plan.tokens:,.0f} tokens, "
        f"{plan.branches:.2f} captions each; {plan.steps:,} steps of {cfg.global_batch}"
    )
    print(f"FLOPs of one sequence, TFLOP   {'forward':>9} {'total':>9}")
    for term in plan.terms:
        print(f"  {term.name:<28} {term.forward / TERA:>9.3f} {term.total / TERA:>9.3f}")
    forward, total = sum(t.forward for t in plan.terms), sum(t.total for t in plan.terms)
    print(f"  {'sum without recomputation':<28} {forward / TERA:>9.2f} {total / TERA:>9.2f}")
    print(f"  {'sum, full checkpointing':<28} {'':>9} {(total + forward) / TERA:>9.2f}")
    print(f"  per caption {total / plan.branches / TERA:.2f} TFLOP; the run {plan.epoch_flops / 1e18:.2f} EFLOP")
    print("memory of one GPU, GB")
    for name, size in plan.memory_gb.items():
        print(f"  {name:<28} {size:>9.1f}")
    print(f"  {'sum':<28} {plan.memory_total_gb:>9.1f} of {cfg.gpu_memory_gb:g}")
    hours = plan.gpu_hours(peak_tflops, mfu)
    speed = load.samples * cfg.epochs / hours / 3600
    print(
        f"time at {mfu:.0%} of {peak_tflops:g} TFLOP/s: {hours:.1f} GPU-hours, "
        f"{hours / plan.gpus:.1f} h on {plan.gpus} GPU(s), {speed:.1f} captions/s a GPU"
    )
