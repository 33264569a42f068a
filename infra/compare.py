"""The models beside each other: `make compare` trains every entry of `models:` on the same pairs and compares.

Each model is an experiment of DVC in a folder of its own, with the parameters' data, seed, order of pairs, batches and
epochs, so one that was run before is restored and not trained again. A model that takes longer for a step is trained a
second time on fewer epochs, for as many seconds as the model that the others are compared with. What a step and a
caption take is measured here, on this machine, one process on one thread.

The table has each model's scores and the interval of each difference over pairs, the area under the ROC curve of the
probability that nothing changed, the parameters that train, FLOPs and time of a caption, and the learning curves. It is
printed and written to benchmarks/results/compare.json, with a page in Markdown and its plots beside it.
"""

import argparse
import csv
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import Field

from components.files import write_atomic
from components.params import Params, ParamsError, load_params
from components.section import Section
from infra.ablation import Ablation, Row, in_line, markdown, plot, run_row, table
from infra.experiments import copy, read

SETTINGS = Path(__file__).with_suffix(".yaml")
RESULTS = Path("benchmarks/results/compare.json")
PARAMS = Path("params.yaml")
STEPS, CAPTIONS = 60, 96
"""Of a training and of a captioning that are timed."""


class Comparison(Section):
    """The file of the comparison."""

    protocols: tuple[str, ...]  # the parts of metrics.json to show
    beside: str  # the model that the others are compared with, in scores and seconds
    bases: dict[str, Path] = {}  # of a model that does not start from train.base
    needs: dict[Path, str] = {}  # folders that git does not hold, and the command that makes each
    equal_seconds: float = Field(default=0.1, ge=0)  # longer by this share: trained once more, for as long


class Measured(NamedTuple):
    """What one model takes and says, beside its scores."""

    parameters: int  # that train
    caption_gflop: float
    captions_per_s: float
    step_s: float
    no_change_auc: dict[str, float]  # by protocol
    curve: list[dict[str, str]]  # of its training
