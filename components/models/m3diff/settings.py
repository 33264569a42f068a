"""M3Diff's settings: its entry of the section `models` in `params.yaml`. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from m3diff.models.family import Align, Delays, Lora, Rates, layer_faults, settings_faults


@dataclass(frozen=True)
class MDPConfig:
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

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    vision_feature_layers: tuple[int, ...] = (17, 20, 23, 26)
    layers: int = 2
    heads: int = 16
    share_levels: bool = True
    score: Literal["scalar", "channel"] = "scalar"
    mlp_ratio: int = 4
    residual: bool = True
    init_gain: float = 0.0
    pos_embed_scale: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "vision_feature_layers", tuple(self.vision_feature_layers))
        if faults := self._faults():
            raise ValueError("; ".join(faults))

    def _faults(self) -> list[str]:
        rules = {
            f"layers must be at least 1, found {self.layers}": self.layers >= 1,
            f"heads must be at least 1, found {self.heads}": self.heads >= 1,
            f"score must be scalar or channel, found {self.score!r}": self.score in ("scalar", "channel"),
            f"mlp_ratio must be at least 1, found {self.mlp_ratio}": self.mlp_ratio >= 1,
            f"pos_embed_scale must be 0 or more, found {self.pos_embed_scale}": self.pos_embed_scale >= 0,
        }
        found = [rule for rule, kept in rules.items() if not kept]
        return layer_faults(self.vision_feature_layers) + found + gain_faults(self.init_gain)


@dataclass(frozen=True)
class DifferenceConfig:
    """Fields of the bare difference, a control in the module's place: the difference of the two images' features,
    through one linear projection, added to the features of both.

    vision_feature_layers, share_levels: as of `MDPConfig`.
    init_gain: gain of the projection in a new module. Above 0 what a place's difference adds has about that many times
        its size, in directions of its own, so that it is used from the first step, as the MDP module's is; at 0 the
        module leaves the base as it is, and learns from the first step, too, for nothing stands behind the projection.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    kind: Literal["difference"] = "difference"
    vision_feature_layers: tuple[int, ...] = MDPConfig.vision_feature_layers
    share_levels: bool = True
    init_gain: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "vision_feature_layers", tuple(self.vision_feature_layers))
        if faults := layer_faults(self.vision_feature_layers) + gain_faults(self.init_gain):
            raise ValueError("; ".join(faults))


def gain_faults(gain: float) -> list[str]:
    return [] if gain >= 0 else [f"init_gain must be 0 or more, found {gain}"]


ModuleConfig = MDPConfig | DifferenceConfig


def module_type(values: Any) -> type[ModuleConfig] | None:
    """Whose fields these are, by their `kind`: the MDP module's have none. None where there is no such kind."""
    kind = values.get("kind") if isinstance(values, Mapping) else getattr(values, "kind", None)
    if kind is None:
        return MDPConfig
    return DifferenceConfig if kind == "difference" else None


KINDS = "kind must be difference, or not be there for the MDP module"


def module_config(values: Mapping[str, Any]) -> ModuleConfig:
    """The fields of a model's configuration. Raises ValueError naming every unknown or impossible one."""
    cls = module_type(values)
    if cls is None:
        raise ValueError(f"mdp: {KINDS}, found {values['kind']!r}")
    known = {each.name for each in fields(cls)}
    faults = [f"unknown field {name!r}" for name in values if name not in known]
    try:
        made = cls(**{name: value for name, value in values.items() if name in known})
    except ValueError as error:
        faults.append(str(error))
    if faults:
        raise ValueError("mdp: " + "; ".join(faults))
    return made


class ByKind:
    """Tells pydantic which settings to read. It asks for this itself; its core schemas are plain mappings."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        def tag(values: Any) -> str | None:
            kind = module_type(values)
            return f"[{kind.__name__}]" if kind else None

        union = {
            "type": "tagged-union",
            "choices": {f"[{kind.__name__}]": handler.generate_schema(kind) for kind in (MDPConfig, DifferenceConfig)},
            "discriminator": tag,
            "custom_error_type": "module_kind",
            "custom_error_message": KINDS,
        }
        return {"type": "nullable", "schema": union}


@dataclass(frozen=True)
class M3DiffSettings:
    """What trains of M3Diff and how.

    family: "m3diff".
    module: the new MDP module; or a control: the bare difference, or None for the base without a module.
    lora: adapters of the LLM's linears.
    rates: learning rates by part. A module without one is a control, too: what a run reaches with it comes from how
        the module starts, and what one with a rate reaches beyond that is learnt.
    delays: when each part begins to train; at the first step unless it is named.
    align: a phase before, on other data; None for none.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    family: Literal["m3diff"]
    module: Annotated[ModuleConfig | None, ByKind()]
    lora: Lora
    rates: Rates
    delays: Delays = field(default_factory=Delays)
    align: Align | None = None

    def __post_init__(self) -> None:
        if faults := settings_faults(self):
            raise ValueError("; ".join(faults))
