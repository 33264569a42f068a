"""Is SPICE there? Its program comes with pycocoevalcap; Java and the jars that `spice.needed` names do not."""

from pathlib import Path
from typing import NamedTuple

from m3diff.scoring.metrics.java import JavaMissing, require_java
from m3diff.scoring.metrics.scorer import ScorerFailed
from m3diff.scoring.metrics.spice import FIRST_WITHOUT_JAVASCRIPT, how_to_fetch, look, try_spice

LIMIT_S = 600


class Found(NamedTuple):
    """`lines` to show, and whether SPICE can be computed."""

    lines: list[str]
    works: bool


def check_spice(spice_dir: Path | None) -> Found:
    """Look for what SPICE needs and, where all of it is there, score one pair."""
    java = FIRST_WITHOUT_JAVASCRIPT
    try:
        java = require_java()
        lines = [f"found   Java {java}"]
    except JavaMissing as error:
        lines = [f"MISSING {error}"]
    jars = look(spice_dir, java)
    lines += [
        f"MISSING {(spice_dir or Path()) / name}" if jar is None else f"found   {jar}" for name, jar in jars.items()
    ]
    if missing := [name for name, jar in jars.items() if jar is None]:
        lines += how_to_fetch(missing, spice_dir or Path("spice"))
        lines.append("name the folder by --spice-dir, and for `m3diff evaluate` as compute.spice_dir in params.yaml")
    if missing or lines[0].startswith("MISSING"):
        return Found(lines, works=False)
    try:
        return Found([*lines, f"works   one pair scored {try_spice(spice_dir, LIMIT_S):.3f}"], works=True)
    except ScorerFailed as failure:
        return Found([*lines, f"FAILED  {failure}"], works=False)
