"""Reads `params.yaml` into the type of `tree.py`, frozen at every depth; `explain.py` has the words for its faults.

Unknown keys are refused, and faults are named together, before anything runs. Fields carry the unit in their name or
in a comment. `rules.py` checks one section against another, and `profiles.py` resolves a profile.
"""

from pathlib import Path

from pydantic import ValidationError

from m3diff.settings.explain import explain
from m3diff.settings.profiles import resolve
from m3diff.settings.rules import RULES
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and check a parameter file, or a profile with what it extends. Nothing is run and nothing heavy imported.

    Files and folders that a stage reads need not be there: `check_paths` looks for them when the stage starts.

    Raises:
        ParamsError: the file is missing, is no YAML mapping, or breaks a rule. Every fault of single values is listed;
            where there is none, every fault between values.
    """
    raw = resolve(path)
    try:
        params = Params.model_validate(raw)
        faults = [fault for rule in RULES for fault in rule(params)]
    except ValidationError as error:
        faults = explain(error, raw, Params)
    if not faults:
        return params
    lines = dict.fromkeys(faults)
    raise ParamsError(f"{path}: {len(lines)} fault(s)\n" + "\n".join(f"  {line}" for line in lines))
