"""Settings that every family has, and the fields of new modules, as `params.yaml` and config.json hold them.

Imports the standard library alone: params.yaml is read without torch, and a shared folder holds a copy of this file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin

Value = TypeVar("Value")


class Fields:
    """Base of frozen dataclasses of plain values: refuses unknown keys and broken rules, keeps lists as tuples."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    def __post_init__(self) -> None:
        faults = []
        for each in fields(self):  # type: ignore[arg-type]  # of a dataclass
            value = getattr(self, each.name)
            if isinstance(value, list):
                object.__setattr__(self, each.name, tuple(value))
            if get_origin(each.type) is Literal and value not in get_args(each.type):
                faults.append(f"{each.name} must be {' or '.join(get_args(each.type))}, found {value!r}")
        faults += [rule for rule, kept in self.rules().items() if not kept]
        if faults:
            raise ValueError("; ".join(faults))

    def rules(self) -> dict[str, bool]:
        """Each rule in words, with what was found, and whether it is kept."""
        return {}

    def at_least(self, **least: int) -> dict[str, bool]:
        """Rules of the smallest value of fields."""
        found = {name: getattr(self, name) for name in least}
        return {
            f"{name} must be {least[name]} or more, found {found[name]}": found[name] >= least[name] for name in least
        }


def layer_rule(layers: tuple[int, ...]) -> dict[str, bool]:
    """The rule of the layers of the vision encoder that a module reads."""
    rising = bool(layers) and list(layers) == sorted(set(layers)) and layers[0] >= 0
    return {f"vision_feature_layers must be distinct, rising and not negative, found {list(layers)}": rising}


@dataclass(frozen=True)
class Lora(Fields):
    """Low-rank adapters. Rank 0 adds none: the linears that would have them train in full."""

    rank: int
    alpha: int

    def rules(self) -> dict[str, bool]:
        return self.at_least(rank=0, alpha=1)


@dataclass(frozen=True, eq=False)
class ByPart(Mapping[str, Value], Generic[Value]):
    """A mapping of the fields of its subclass: a value for each part."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    def __getitem__(self, part: str) -> Value:
        return vars(self)[part]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


@dataclass(frozen=True, eq=False)
class Rates(ByPart[float | None]):
    """Learning rate of each part; None is frozen, which for the module means: as it starts, for ever."""

    vision: float | None
    projector: float | None
    module: float | None
    llm: float | None

    def rules(self, has_module: bool) -> dict[str, bool]:
        """Rules of the rates of a family, whose module may be absent."""
        rates = self.items()
        rules = {
            f"{part} must be above 0, or null for a frozen part; found {rate}": rate is None or rate > 0
            for part, rate in rates
        }
        rules[f"module is {self.module} but there is no module; set it to null"] = has_module or self.module is None
        rules["no part trains; give one of them a rate"] = any(rate is not None for _, rate in rates)
        return rules


@dataclass(frozen=True, eq=False)
class Delays(ByPart[float]):
    """Share of the steps before a part begins to train, in [0, 1); its warm-up follows. A randomly initialised module
    gets uninformative gradients until the rest of the model has adapted to its output."""

    vision: float = 0.0
    projector: float = 0.0
    module: float = 0.0
    llm: float = 0.0


@dataclass(frozen=True)
class Align(Fields):
    """A phase of training before the fine-tuning, on datasets of its own, with rates of its own: OneDiff's stage I,
    Coupled Sample Training (arXiv 2407.05645, section 4.2), in which new parts adapt to a frozen LLM. No adapters
    train in it. The fine-tuning goes on from its weights, on the other datasets.

    datasets: names of `ingest.datasets` whose training samples are this phase's, and no other's.
    rates: a part with a rate must have one in the fine-tuning, too: adapters hold what the last phase trained.
    """

    datasets: tuple[str, ...]
    epochs: float
    global_batch: int
    rates: Rates

    def rules(self) -> dict[str, bool]:
        return {
            "datasets must name at least one dataset": bool(self.datasets),
            f"epochs must be above 0, found {self.epochs}": self.epochs > 0,
            **self.at_least(global_batch=1),
        }


@dataclass(frozen=True)
class Settings(Fields):
    """Settings of a family's training; each family adds its own.

    family: name of the family.
    module: fields of the family's own module, or None: the base alone.
    lora: adapters.
    rates: learning rates by part. A module without one is a control: what a run reaches with it comes from how the
        module starts, and what one with a rate reaches beyond that is learnt.
    delays: when each part begins to train; at the first step unless it is named.
    align: a phase before, on other data; None for none.
    """

    family: str
    module: Any
    lora: Lora
    rates: Rates
    delays: Delays = field(default_factory=Delays)
    align: Align | None = None

    def has_module(self) -> bool:
        """True where there are weights for the rate `module`."""
        return self.module is not None

    def rules(self) -> dict[str, bool]:
        rules = {f"rates: {rule}": kept for rule, kept in self.rates.rules(self.has_module()).items()}
        for part, delay in self.delays.items():
            rule = f"delays: {part} must be 0 or more and under 1, a share of the steps; found {delay}"
            rules[rule] = 0 <= delay < 1
        if (align := self.align) is None:
            return rules
        rules |= {f"align: rates: {rule}": kept for rule, kept in align.rates.rules(self.has_module()).items()}
        for part, rate in align.rates.items():
            rule = f"align: rates.{part}: trains, so it must have a rate in the fine-tuning, too"
            rules[rule] = rate is None or self.rates[part] is not None
        rule = "align: rates.llm must be null: the adapters of the fine-tuning are new and need the base's own weights"
        return rules | {rule: align.rates.llm is None or not self.lora.rank}


@dataclass(frozen=True)
class MDPConfig(Fields):
    """Fields of the Multi-scale Differential Perception (MDP) module (arXiv 2503.11093, section 4).

    vision_feature_layers: indices into the vision encoder's hidden states (0 is the embedding); the paper's 17, 20, 23,
        26 are the defaults.
    layers: "two stacked transformer layers": equations (4)-(6) are one layer, each layer's difference and features
        feed the next.
    heads: not given by the paper; 16 as in the vision encoder.
    share_levels: one set of weights for all levels, since Wm and Wp have no level index in the paper.
    score: one number per level and pair ("scalar"), since the paper calls it the importance of a level; or one per
        channel ("channel").
    mlp_ratio: width of the MLP of equation (5) over D; 4 as in transformers' feed-forward layers.
    residual: residual blocks, the encoder's features normed where they enter but never the difference, whose size says
        whether anything changed; queries and keys normed, or a large difference would draw the attention of every
        place; and equation (8) adds the scored updates to the encoder's last features. False is the letter of the
        equations: nothing of this, and every linear starts as a plain new layer (`init_gain` then says nothing).
    init_gain: gain of the last projection of (6) in a new module with residuals. At 0 it leaves the base as it is, and
        the rest of the module gets its first gradient once that projection has grown: right for a long run on a large
        base. Above 0 the module starts as a detector of change that is used from the first step, which a short run on
        a small base needs: (3) passes the difference, the first MLP of (5) adds its size in one direction, (6) hands
        both on, and all else is zero-initialised.
    pos_embed_scale: amplitude of fixed sine-cosine positions on queries and keys; the paper names none (0), and a large
        encoder's features carry their own. With them each place looks at its own place from the start, which a short
        run on a small encoder needs: without, the map from difference to place has to be found first.
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

    def rules(self) -> dict[str, bool]:
        least = self.at_least(layers=1, heads=1, mlp_ratio=1, pos_embed_scale=0, init_gain=0)
        return layer_rule(self.vision_feature_layers) | least


@dataclass(frozen=True)
class DifferenceConfig(Fields):
    """Fields of the bare difference, a control in the module's place: the difference of the two images' features,
    through one linear projection, added to the features of both.

    vision_feature_layers, share_levels: as of `MDPConfig`.
    init_gain: gain of the projection in a new module. Above 0 what a place's difference adds has about that many times
        its size, in directions of its own, so that it is used from the first step, as the MDP module's is; at 0 the
        module leaves the base as it is, and learns from the first step, too, for nothing follows the projection.
    """

    kind: Literal["difference"] = "difference"
    vision_feature_layers: tuple[int, ...] = MDPConfig.vision_feature_layers
    share_levels: bool = True
    init_gain: float = 0.0

    def rules(self) -> dict[str, bool]:
        return layer_rule(self.vision_feature_layers) | self.at_least(init_gain=0)


ModuleConfig = MDPConfig | DifferenceConfig


def module_config(**values: Any) -> ModuleConfig:
    """M3Diff's module by its fields, as a configuration holds them: the MDP module's have no `kind`."""
    return (DifferenceConfig if "kind" in values else MDPConfig)(**values)


class ByKind:
    """Tells pydantic which module's fields to read. It asks for this itself; its core schemas are plain mappings."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        def tag(values: Any) -> str:
            has_kind = "kind" in values if isinstance(values, Mapping) else hasattr(values, "kind")
            return "[DifferenceConfig]" if has_kind else "[MDPConfig]"

        kinds = {f"[{kind.__name__}]": handler.generate_schema(kind) for kind in (MDPConfig, DifferenceConfig)}
        return {"type": "nullable", "schema": {"type": "tagged-union", "choices": kinds, "discriminator": tag}}


@dataclass(frozen=True)
class VDMConfig(Fields):
    """Fields of the Visual Delta Module (VDM; arXiv 2407.05645, sections 4.1 and 5.1). The defaults are the paper's;
    where it is silent or contradicts itself, the field says what was chosen and why.

    vision_feature_layers: layers of the vision encoder that are read, indices into its hidden states (0 is the
        embedding); "equal intervals": 8, 16, 24 of 24.
    tokens: learnable delta tokens; the ablation's 32.
    layers: transformer layers; "alternating self-attention and cross-attention blocks".
    cross_attention: which layers read the images. "second": every second one, from the first, as in BLIP-2's Q-Former,
        which fits the paper's six layers and three feature layers; "every": all of them, two to a feature layer.
    images: how a layer reads two images, which the paper words as "separately and simultaneously". "joined": one
        attention over the keys of both, each with a learnt embedding of its image, without which nothing would tell
        them apart; "separate": an attention for each image with the same weights, whose two results and their
        difference one linear joins, so that a token can ask both images for the same thing.
    width, heads, mlp_ratio: BERT-base's, whose weights the paper begins with.
    norm: "post": after each block, as BERT's weights want it; "pre": before it; "size": none on the tokens, whose size
        then says whether anything changed, but queries and keys have size one.
    place: of the delta tokens among the visual tokens: "after" both images, "between" or "before" them. Not given.
    projection: from the module to the LLM: "own", one linear; "shared": one linear to the vision encoder's width, then
        the projector of the images. The paper has one projector "before the LLM".
    start: "random", or "bert": self-attention, MLPs and norms from the BERT that lies in the base's folder as `bert/`
        (model.safetensors and config.json of bert-base-uncased), as the paper has it; cross-attention is new either
        way.
    init_gain: above 0 a new module starts as a detector of change (as MDPConfig.init_gain of M3Diff, and for its
        reason: a short run on a small base): the difference of both readings is passed on, the first MLP adds its size
        in one direction, and this is the gain of the projection to the LLM. Needs images "separate" and norm "size".
        At 0, the paper's, all linears are random.
    pos_embed_scale: amplitude of fixed sine-cosine positions on queries and keys, which bind each token to the place of
        one patch; the tokens are then as many as the patches. The paper has none (0).
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
        """Layers that read the images."""
        return self.layers if self.cross_attention == "every" else -(-self.layers // 2)

    def feature_layer(self, layer: int) -> int | None:
        """The place in `vision_feature_layers` of the layer that a layer of the module reads, or None."""
        if self.cross_attention == "second":
            layer, rest = divmod(layer, 2)
            if rest:
                return None
        return layer * len(self.vision_feature_layers) // self.reading_layers

    def rules(self) -> dict[str, bool]:
        layers, reading = len(self.vision_feature_layers), self.reading_layers
        return {
            **layer_rule(self.vision_feature_layers),
            **self.at_least(tokens=1, layers=1, width=1, heads=1, mlp_ratio=1, init_gain=0, pos_embed_scale=0),
            f"heads: {self.heads} does not divide width {self.width}": self.heads < 1 or self.width % self.heads == 0,
            f"vision_feature_layers: {layers} of them, but only {reading} of the layers read the images; raise layers, "
            "or set cross_attention to every": layers <= reading,
            "start: bert needs norm post, which BERT's weights were trained with": self.start == "random"
            or self.norm == "post",
            "init_gain above 0 needs images separate and norm size": not self.init_gain > 0
            or (self.images, self.norm) == ("separate", "size"),
        }
