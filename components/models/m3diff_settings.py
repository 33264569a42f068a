"""M3Diff's settings: its entry of the section `models` in `params.yaml`, and its module's fields in config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from m3diff.models.settings import Fields, Settings, layer_rule


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
KINDS = "kind must be difference, or not be there for the MDP module"


def module_type(values: Any) -> type[ModuleConfig] | None:
    """The class of fields, by their `kind`, which the MDP module's have not. None where there is no such kind."""
    kind = values.get("kind") if isinstance(values, Mapping) else getattr(values, "kind", None)
    if kind is None:
        return MDPConfig
    return DifferenceConfig if kind == "difference" else None


def module_config(values: Mapping[str, Any]) -> ModuleConfig:
    """The fields of a model's configuration. Raises ValueError naming every unknown or impossible one."""
    if (cls := module_type(values)) is None:
        raise ValueError(f"{KINDS}, found {values['kind']!r}")
    return cls.of_config(values)


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
class M3DiffSettings(Settings):
    """Settings of M3Diff.

    module: the new MDP module; or a control: the bare difference, or None for the base without a module.
    lora: adapters of the LLM's linears.
    """

    family: Literal["m3diff"]
    module: Annotated[ModuleConfig | None, ByKind()]
