"""Settings that every family has, and the base of all that `params.yaml` and config.json say of a family.

Imports the standard library alone: params.yaml is read without torch, and a shared folder holds a copy of this file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, get_args, get_origin

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

    @classmethod
    def of_config(cls, values: Mapping[str, Any]) -> Self:
        """The fields of a model's configuration. Raises ValueError naming every unknown or impossible one."""
        known = {each.name for each in fields(cls)}  # type: ignore[arg-type]
        faults = [f"unknown field {name!r}" for name in values if name not in known]
        try:
            made = cls(**{name: value for name, value in values.items() if name in known})
        except ValueError as error:
            faults.append(str(error))
        if faults:
            raise ValueError("; ".join(faults))
        return made


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
        if part not in self.__dataclass_fields__:
            raise KeyError(part)
        return getattr(self, part)

    def __iter__(self) -> Iterator[str]:
        return iter(each.name for each in fields(self))

    def __len__(self) -> int:
        return len(fields(self))


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
