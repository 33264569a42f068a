"""Settings of the model families and of their modules, as written in `params.yaml` and config.json.

M3Diff and OneDiff add a new module, which compares the two images, to a published base model. A model has four parts:
the vision encoder, the projector, the module and the LLM.

This file is cheap to import, because `params.yaml` is read without torch and exported folders contain a copy of it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args, get_origin

from m3diff.records.errors import Fault, ValueFault


class Fields:
    """Base class of settings, which are frozen dataclasses. It validates the values and converts lists to tuples.

    Raises:
        ValueFault: at least one value is invalid. The error contains all faults.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        faults = []
        for attribute in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, attribute.name)
            if isinstance(value, list):
                object.__setattr__(self, attribute.name, tuple(value))
            choices = get_args(attribute.type)
            if get_origin(attribute.type) is Literal and value not in choices:
                fault = Fault("models.not_a_choice", field=attribute.name, value=value, expected=" or ".join(choices))
                faults.append(fault)
        faults += self.faults()
        if len(faults) == 1:
            raise ValueFault(faults[0])
        if faults:
            raise ValueFault("models.several_faults", faults=faults)

    def faults(self) -> Iterator[Fault]:
        """Yield a fault, which describes an error, for each invalid value."""
        yield from ()

    def check_minimums(self, **minimums: int) -> Iterator[Fault]:
        """Yield a fault for each field whose value is below its minimum."""
        for name, minimum in minimums.items():
            value = getattr(self, name)
            if not value >= minimum:
                yield Fault("models.too_small", field=name, value=value, limit=minimum)


def layer_faults(layers: tuple[int, ...]) -> Iterator[Fault]:
    """Yield a fault if `vision_feature_layers` is empty, not ascending, or has negative or repeated values."""
    is_ascending = bool(layers) and list(layers) == sorted(set(layers)) and layers[0] >= 0
    if not is_ascending:
        yield Fault("models.layers_not_rising", field="vision_feature_layers", value=list(layers))


@dataclass(frozen=True)
class Lora(Fields):
    """Settings of the low-rank adapters.

    rank: rank of the adapters. Rank 0 adds no adapters and trains the linear layers in full instead.
    alpha: scale of the adapters. Their output is multiplied by alpha / rank.
    """

    rank: int
    alpha: int

    def faults(self) -> Iterator[Fault]:
        """Yield a fault if the rank or alpha is too small."""
        yield from self.check_minimums(rank=0, alpha=1)


def rate_faults(rates: Mapping[str, float | None], section: str, has_module: bool) -> Iterator[Fault]:
    """Yield a fault for each invalid learning rate, and a fault if all parts are frozen.

    Args:
        rates: learning rate of each part. A part is frozen if its rate is None or if it is not named.
        section: name of the settings field that contains the rates.
        has_module: whether the model has weights that belong to the part `module`.
    """
    for part, rate in rates.items():
        if rate is not None and not rate > 0:
            yield Fault("models.rate_not_positive", field=f"{section}.{part}", value=rate)
    module_rate = rates.get("module")
    if module_rate is not None and not has_module:
        yield Fault("models.rate_without_module", field=f"{section}.module", value=module_rate)
    if all(rate is None for rate in rates.values()):
        yield Fault("models.no_part_trains", field=section)


@dataclass(frozen=True)
class Align(Fields):
    """The alignment, a phase before fine-tuning in which new parts adapt to a frozen LLM.

    This is OneDiff's stage I, Coupled Sample Training (arXiv 2407.05645, section 4.2). Adapters are not trained in this
    phase. Fine-tuning starts from the aligned weights and trains on the other datasets.

    datasets: names from `ingest.datasets`. Their training samples are used only in this phase.
    epochs: number of epochs.
    global_batch: number of sequences per optimizer step, over all workers.
    rates: learning rate of each part; null, or no rate, freezes a part. A part that is trained here must also be
        trained in fine-tuning, because the saved adapters contain only the weights that fine-tuning trains.
    """

    datasets: tuple[str, ...]
    epochs: float
    global_batch: int
    rates: Mapping[str, float | None]

    def faults(self) -> Iterator[Fault]:
        """Yield a fault for each invalid value of the datasets, epochs and batch size."""
        if not self.datasets:
            yield Fault("models.alignment_without_dataset", field="datasets")
        if not self.epochs > 0:
            yield Fault("models.not_positive", field="epochs", value=self.epochs)
        yield from self.check_minimums(global_batch=1)


@dataclass(frozen=True)
class Settings(Fields):
    """Training settings that all families have in common. Each family adds its own settings.

    family: name of the family.
    module: fields of the family's module, or null to train the base without a module.
    lora: settings of the adapters.
    rates: learning rate of each part; null, or no rate, freezes a part. A frozen new module keeps its initial weights.
        Freezing the module gives a control run, which shows the scores that these weights reach. If a trained module
        scores higher, this is due to what it has learnt.
    delays: delay before each part is trained, as a share of all steps in [0, 1); without a delay, a part is trained
        from the first step. The part's warm-up starts after the delay. A delay is useful because a module with random
        weights gets uninformative gradients until the rest of the model has adapted to its output.
    align: settings of the alignment, a phase on other data before fine-tuning, or null for no alignment.
    """

    family: str
    module: Any
    lora: Lora
    rates: Mapping[str, float | None]
    delays: Mapping[str, float] = field(default_factory=dict)
    align: Align | None = None

    def has_module(self) -> bool:
        """Return whether the model has weights that belong to the part `module`."""
        return self.module is not None

    def faults(self) -> Iterator[Fault]:
        """Yield a fault for each invalid rate, delay or setting of the alignment."""
        yield from rate_faults(self.rates, "rates", self.has_module())
        for part, delay in self.delays.items():
            if not 0 <= delay < 1:
                yield Fault("models.delay_not_a_share", field=f"delays.{part}", value=delay)
        align = self.align
        if align is None:
            return
        yield from rate_faults(align.rates, "align.rates", self.has_module())
        for part, rate in align.rates.items():
            # `Family.complete_settings` adds the parts without a rate, and calls this again
            if rate is not None and self.rates.get(part, 0.0) is None:
                yield Fault("models.part_of_alignment_frozen", field=f"align.rates.{part}", other_field=f"rates.{part}")
        llm_rate = align.rates.get("llm")
        if llm_rate is not None and self.lora.rank:
            yield Fault("models.llm_trains_in_alignment", field="align.rates.llm", value=llm_rate)


@dataclass(frozen=True)
class MDPConfig(Fields):
    """Settings of the Multi-scale Differential Perception (MDP) module (arXiv 2503.11093, section 4).

    vision_feature_layers: indices of the vision encoder's hidden states to read (0 is the embedding), one per level.
        The paper uses 17, 20, 23 and 26.
    layers: number of layers per level. The paper uses "two stacked transformer layers". Each layer computes equations
        (4) to (6) and passes the difference and the features to the next layer.
    heads: number of attention heads. The paper does not specify the number. The vision encoder has 16 heads.
    share_levels: whether all levels share one set of weights. The default is true, because the paper's weights Wm and
        Wp do not have a level index.
    score: whether each level has one score per pair ("scalar") or one score per pair and channel ("channel"). The
        default is "scalar", because the paper calls the score the importance of a level.
    mlp_ratio: hidden width of the MLP in equation (5), divided by D. The default is 4, as in the feed-forward layers of
        transformers.
    residual: whether the module has residual blocks. If true, the encoder's features are normalised at the input of the
        module. The difference is never normalised, because its size shows whether anything changed. Queries and keys
        are normalised, because otherwise a large difference would attract the attention of every patch. Equation (8)
        adds each level's update, multiplied by its score, to the encoder's last features. If false, the module follows
        the paper's equations exactly, all linear layers are initialised with gain 1, and `init_gain` has no effect.
    init_gain: initial gain of the last projection in equation (6) if `residual` is true. If 0, a new module does not
        change the base's output, and its other weights get gradients only after this projection has grown. A gain of 0
        suits a long run on a large base. If above 0, the module starts as a change detector that has an effect from the
        first step. A short run on a small base needs this. Equation (3) then passes the difference through, the first
        MLP of (5) adds the size of the difference along one direction, and (6) passes the difference and its size on.
        Everything else is initialised to zero.
    pos_embed_scale: amplitude of fixed sine-cosine position embeddings that are added to queries and keys. The paper
        does not use position embeddings (0), and the features of a large encoder already contain positions. With
        position embeddings, each patch attends to its own position from the start. A short run on a small encoder needs
        this. Otherwise, the module would first have to learn where a difference is.
    """

    vision_feature_layers: tuple[int, ...] = (17, 20, 23, 26)
    layers: int = 2
    heads: int = 16
    share_levels: bool = True
    score: Literal["scalar", "channel"] = "scalar"
    mlp_ratio: int = 4
    residual: bool = True
    init_gain: float = 0.0
    pos_embed_scale: float = 0.0

    def faults(self) -> Iterator[Fault]:
        """Yield a fault if the list of layers is invalid, and for each number that is too small."""
        yield from layer_faults(self.vision_feature_layers)
        yield from self.check_minimums(layers=1, heads=1, mlp_ratio=1, pos_embed_scale=0, init_gain=0)


@dataclass(frozen=True)
class DifferenceConfig(Fields):
    """Settings of the bare difference, which replaces the MDP module in control runs.

    It projects the difference between the two images' features with a linear layer and adds the result to the features
    of both images.

    kind: marks the settings as those of the bare difference. `MDPConfig` does not have this field.
    vision_feature_layers: see `MDPConfig`.
    share_levels: see `MDPConfig`.
    init_gain: initial gain of the projection. If above 0, the projected difference is about `init_gain` times as large
        as the difference and has a random direction. Like the MDP module, it then has an effect from the first step. If
        0, a new module does not change the base's output, but the projection still learns from the first step, because
        no other layer of the module follows it.
    """

    kind: Literal["difference"] = "difference"
    vision_feature_layers: tuple[int, ...] = MDPConfig.vision_feature_layers
    share_levels: bool = True
    init_gain: float = 0.0

    def faults(self) -> Iterator[Fault]:
        """Yield a fault if the list of layers is invalid or the gain is negative."""
        yield from layer_faults(self.vision_feature_layers)
        yield from self.check_minimums(init_gain=0)


ModuleConfig = MDPConfig | DifferenceConfig


def module_config(**values: Any) -> ModuleConfig:
    """Create the settings of M3Diff's module: `DifferenceConfig` if `kind` is given, otherwise `MDPConfig`."""
    return DifferenceConfig(**values) if "kind" in values else MDPConfig(**values)


class ModuleByKind:
    """Type annotation that tells pydantic which settings class the module's fields belong to.

    The schema is a plain dictionary, as pydantic's core schemas are, so that this file does not need to import
    pydantic.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        def choose_class(values: Any) -> str:
            has_kind = "kind" in values if isinstance(values, Mapping) else hasattr(values, "kind")
            return "[DifferenceConfig]" if has_kind else "[MDPConfig]"

        choices = {
            "[MDPConfig]": handler.generate_schema(MDPConfig),
            "[DifferenceConfig]": handler.generate_schema(DifferenceConfig),
        }
        schema = {"type": "tagged-union", "choices": choices, "discriminator": choose_class}
        return {"type": "nullable", "schema": schema}


@dataclass(frozen=True)
class VDMConfig(Fields):
    """Settings of the Visual Delta Module (VDM; arXiv 2407.05645, sections 4.1 and 5.1).

    The defaults follow the paper. Where the paper gives no value or contradicts itself, the choice is explained below.

    vision_feature_layers: indices of the vision encoder's hidden states to read (0 is the embedding). The paper says
        "equal intervals": layers 8, 16 and 24 of 24.
    tokens: number of learnable delta tokens. The paper's ablation uses 32.
    layers: number of transformer layers. The paper describes "alternating self-attention and cross-attention blocks".
    cross_attention: which layers read the images. "second" means every second layer, starting with the first, as in
        BLIP-2's Q-Former. This fits the paper's six layers and three feature layers. "every" means all layers. By
        default, two layers then read each feature layer.
    images: how a layer reads two images, which the paper describes as "separately and simultaneously". "joined" means
        one attention over the keys of both images. A learnt embedding is added to each image, because otherwise the
        images could not be distinguished. "separate" means one attention per image with the same weights. One linear
        layer combines the two results and their difference, so that a token can query both images for the same
        information.
    width: width of the module. The default is the width of BERT-base, because the paper starts from BERT's weights.
    heads: number of attention heads, as in BERT-base.
    mlp_ratio: hidden width of the MLPs, divided by `width`, as in BERT-base.
    norm: position of the norms. "post" means after each block, as BERT's weights require, and "pre" means before each
        block. "size" means that only queries and keys are normalised. The size of the tokens then shows whether
        anything changed.
    place: position of the delta tokens among the visual tokens: "after", "between" or "before" the two images. The
        paper does not specify it.
    projection: how the delta tokens are projected to the LLM's width. "own" uses one linear layer. "shared" uses one
        linear layer to the vision encoder's width, followed by the projector of the images. The paper has one projector
        "before the LLM".
    start: initial weights: "random", or "bert" to copy the self-attention, MLPs and norms from a BERT, as in the paper.
        The BERT is expected in the base's folder as `bert/` (model.safetensors and config.json of bert-base-uncased).
        Cross-attention is always initialised randomly.
    init_gain: initial gain of the projection to the LLM. If above 0, a new module starts as a change detector, which a
        short run on a small base needs (see `MDPConfig.init_gain`). The module passes on the difference between what a
        token reads from the two images, and the first MLP adds the size of this difference along one direction. This
        requires images "separate" and norm "size". If 0, all linear layers are initialised randomly, as in the paper.
    pos_embed_scale: amplitude of fixed sine-cosine position embeddings that are added to queries and keys. They assign
        each token to the position of one patch, so there must be as many tokens as patches. The paper does not use
        position embeddings (0).
    """

    vision_feature_layers: tuple[int, ...] = (8, 16, 24)
    tokens: int = 32
    layers: int = 6
    cross_attention: Literal["second", "every"] = "second"
    images: Literal["joined", "separate"] = "joined"
    width: int = 768
    heads: int = 12
    mlp_ratio: int = 4
    norm: Literal["post", "pre", "size"] = "post"
    place: Literal["after", "between", "before"] = "after"
    projection: Literal["own", "shared"] = "own"
    start: Literal["random", "bert"] = "random"
    init_gain: float = 0.0
    pos_embed_scale: float = 0.0

    @property
    def reading_layers(self) -> int:
        """Number of layers that read the images."""
        if self.cross_attention == "every":
            return self.layers
        return math.ceil(self.layers / 2)

    def feature_layer(self, layer: int) -> int | None:
        """Return the index in `vision_feature_layers` for a layer of the module, or None if it reads no images."""
        reading_number = layer
        if self.cross_attention == "second":
            if layer % 2:
                return None
            reading_number = layer // 2
        return reading_number * len(self.vision_feature_layers) // self.reading_layers

    def faults(self) -> Iterator[Fault]:
        """Yield a fault for each invalid value and for each combination of values that is not supported."""
        yield from layer_faults(self.vision_feature_layers)
        yield from self.check_minimums(
            tokens=1, layers=1, width=1, heads=1, mlp_ratio=1, init_gain=0, pos_embed_scale=0
        )
        if self.heads >= 1 and self.width % self.heads:
            yield Fault("models.heads_do_not_divide_width", field="heads", value=self.heads, width=self.width)
        feature_layers = len(self.vision_feature_layers)
        if feature_layers > self.reading_layers:
            yield Fault(
                "models.more_levels_than_reading_layers",
                field="vision_feature_layers",
                value=feature_layers,
                limit=self.reading_layers,
            )
        if self.start != "random" and self.norm != "post":
            yield Fault("models.bert_needs_norm_post", field="norm", value=self.norm)
        if self.init_gain > 0 and not (self.images == "separate" and self.norm == "size"):
            yield Fault(
                "models.init_gain_needs_separate_images",
                field="init_gain",
                value=self.init_gain,
                images=self.images,
                norm=self.norm,
            )
