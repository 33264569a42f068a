"""BLIP2IDC's settings: its entry of the section `models` in `params.yaml`. Imports nothing heavy."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from m3diff.models.family import Delays, Lora, Rates, delay_faults, rate_faults


@dataclass(frozen=True)
class Augment:
    """How a pair is changed while it trains: never its meaning, so no crop, flip or change of colour (the paper,
    section 5.1). The paper names blur and JPEG compression and gives no strength.

    blur: share of the visits that are blurred. The authors' code blurs each one, at test too; here one in two, since
        what is captioned later is not blurred.
    sigma: least and most standard deviation of the Gaussian of 3 x 3 pixels, the code's.
    jpeg: share of the visits that are compressed; the code has none.
    quality: least and most quality of the JPEG file. Cameras and the web use 75 to 95; under 50 the blocks of 8 pixels
        would hide small changes.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    blur: float = 0.5
    sigma: tuple[float, float] = (0.1, 0.5)
    jpeg: float = 0.5
    quality: tuple[int, int] = (60, 95)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sigma", tuple(self.sigma))
        object.__setattr__(self, "quality", tuple(self.quality))
        if faults := self._faults():
            raise ValueError("; ".join(faults))

    def _faults(self) -> list[str]:
        shares = {"blur": self.blur, "jpeg": self.jpeg}
        found = [f"{name} must be from 0 to 1, found {share}" for name, share in shares.items() if not 0 <= share <= 1]
        if not 0 < self.sigma[0] <= self.sigma[1]:
            found.append(f"sigma must be above 0, the least first, found {list(self.sigma)}")
        if not 1 <= self.quality[0] <= self.quality[1] <= 100:
            found.append(f"quality must be from 1 to 100, the least first, found {list(self.quality)}")
        return found


@dataclass(frozen=True)
class Blip2IDCSettings:
    """What trains of BLIP2IDC and how.

    family: "blip2idc".
    lora: adapters of queries, keys and values. The paper: rank 8, alpha twice the rank.
    rates: learning rates by part; `module` is BLIP-2's Q-Former. The paper: one rate for the adapters of vision
        encoder, Q-Former and LLM, and a frozen projector.
    module: null; BLIP-2 has no new one.
    delays: when each part begins to train; at the first step unless it is named.
    augment: how pairs are changed while they train; null: not at all.
    align: null; there is one phase.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    family: Literal["blip2idc"]
    lora: Lora
    rates: Rates
    module: None = None
    delays: Delays = field(default_factory=Delays)
    augment: Augment | None = field(default_factory=Augment)
    align: None = None

    def __post_init__(self) -> None:
        faults = [f"rates: {fault}" for fault in rate_faults(self.rates, module="the base's own")]
        faults += [f"delays: {fault}" for fault in delay_faults(self.delays)]
        if faults:
            raise ValueError("; ".join(faults))
