"""Define the parameter sections `register` and `promote`.

The champion is the version of the model that is in use. A challenger is a newly registered version that may replace it.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from m3diff.settings.section import Section


class Register(Section):
    """Settings for registering a model: the MLflow store, the names in it, and which weights a version stores."""

    tracking_uri: str = "sqlite:///services/mlflow/mlflow.db"
    """URI of the MLflow store: the sqlite file that `make up` serves, or the HTTP address of a server."""

    experiment: str = Field(default="m3diff", min_length=1, max_length=500)
    """Name of the MLflow experiment that groups the runs."""

    model_name: str = Field(default="m3diff", pattern=r"""^[^/:.%"']+$""")
    """Name of the registered model. MLflow does not allow slashes, colons, dots, percent signs or quotation marks."""

    keeps: Literal["merged", "adapters"] = "merged"
    """Weights that a version stores. A version with `merged` stores all weights and can be loaded by itself. A version
    with `adapters` stores only the trained weights. For the paper's model, this takes about a tenth of the space, but
    the base model is required to load the version."""


class Promote(Section):
    """The rule that decides whether a challenger replaces the champion."""

    protocol: str
    """Protocol (the way a benchmark scores a dataset) on which versions are compared: `<dataset>/<protocol>`, as in
    metrics.json."""

    metric: str = "CIDEr"
    """Score that decides whether a version is promoted, such as `CIDEr` or `BLEU-4`. Higher is better. The possible
    scores are listed by `m3diff.scoring.metrics.gate_scores`."""

    min_gain: float = Field(default=0.0, ge=0)
    """Minimum gain of a challenger, in units of `metric`. The lower bound of the gain's confidence interval must exceed
    it. With larger values, fewer versions are promoted."""

    confidence: float = Field(default=0.95, ge=0.5, lt=1)
    """Confidence level of the gain's confidence interval over pairs. At 0.95, a challenger that is equal to the
    champion passes in 2.5 % of cases."""

    guards: Mapping[str, Annotated[float, Field(ge=0, strict=True)]] = Field(default_factory=dict)
    """Scores that must not get worse, and the largest loss allowed for each score. 0 allows no loss."""

    retention: Mapping[str, Annotated[float, Field(ge=0, strict=True)]] = Field(default_factory=dict)
    """Scores on the datasets with the role `retention`, and the largest loss allowed against the base for each score.
    A version that lost more of what its base could do is not promoted. Without an entry, such losses are only
    reported."""
