"""M3Diff's settings: its entry of the section `models` in `params.yaml`. Imports nothing heavy."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from components.models.family import Lora, rate_faults


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
        layers = self.vision_feature_layers
        rising = bool(layers) and list(layers) == sorted(set(layers)) and layers[0] >= 0
        rules = {
            f"vision_feature_layers must be distinct, rising and not negative, found {list(layers)}": rising,
            f"layers must be at least 1, found {self.layers}": self.layers >= 1,
            f"heads must be at least 1, found {self.heads}": self.heads >= 1,
            f"score must be scalar or channel, found {self.score!r}": self.score in ("scalar", "channel"),
            f"mlp_ratio must be at least 1, found {self.mlp_ratio}": self.mlp_ratio >= 1,
            f"init_gain must be 0 or more, found {self.init_gain}": self.init_gain >= 0,
            f"pos_embed_scale must be 0 or more, found {self.pos_embed_scale}": self.pos_embed_scale >= 0,
        }
        return [rule for rule, kept in rules.items() if not kept]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MDPConfig":
        """Raises ValueError naming every unknown or impossible field."""
        known = {field.name for field in fields(cls)}
        faults = [f"unknown field {name!r}" for name in values if name not in known]
        try:
            made = cls(**{name: value for name, value in values.items() if name in known})
        except ValueError as error:
            faults.append(str(error))
        if faults:
            raise ValueError("mdp: " + "; ".join(faults))
        return made


@dataclass(frozen=True, eq=False)
class Rates(Mapping[str, float | None]):
    """Learning rate of each part; None is frozen. A mapping of its fields."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    vision: float | None
    projector: float | None
    module: float | None
    llm: float | None

    def __getitem__(self, part: str) -> float | None:
        if part not in self.__dataclass_fields__:
            raise KeyError(part)
        return getattr(self, part)

    def __iter__(self) -> Iterator[str]:
        return iter(field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


@dataclass(frozen=True)
class M3DiffSettings:
    """What trains of M3Diff and how.

    family: "m3diff".
    module: the new MDP module, or None for the base without one (the control).
    lora: adapters of the LLM's linears.
    rates: learning rates by part.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    family: Literal["m3diff"]
    module: MDPConfig | None
    lora: Lora
    rates: Rates

    def __post_init__(self) -> None:
        if faults := rate_faults(self.rates, self.module):
            raise ValueError("; ".join(f"rates: {fault}" for fault in faults))
