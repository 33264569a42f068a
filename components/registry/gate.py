"""The gate: is the challenger better than the champion by more than the choice of test pairs explains?

It is, where the lower bound of the gain's interval on the same pairs exceeds `min_gain`. A guarded score is judged by
what was measured, not by a bound: of a small group of pairs the bound alone would refuse equal models. Give a tolerance
of about twice the score's standard error.
"""

from collections.abc import Iterator
from typing import Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from m3diff.scoring.bootstrap import DECIMALS, compare, resampled_scores, rows_of, score_of
from m3diff.scoring.metrics import BY_CHARACTERS, METRICS, Resampled, with_characters
from m3diff.stages.register.params import Promote

# Guarded scores by name: the `challenger`'s, the `champion`'s, and the `tolerance`, by which it may be worse
Guards = dict[str, dict[str, float | None]]


class Verdict(BaseModel):
    """The gate's verdict in words, and its numbers; None where nothing was compared."""

    model_config = ConfigDict(frozen=True)

    outcome: Literal["promoted", "first", "refused", "unchanged"]
    reason: str
    pairs: int | None = None
    challenger_score: float | None = None
    champion_score: float | None = None
    gain: float | None = None
    low: float | None = None  # bounds of the gain
    high: float | None = None
    guards: Guards = {}


def judge_first(cfg: Promote, challenger: pa.Table) -> Verdict:
    """There is no champion: any score is enough, but no guarded one that is there may be no number."""
    cfg = in_tokens_of(cfg, challenger)
    held = [name for name in cfg.guards if known_scores()[name].column in challenger.column_names]
    if missing := [name for name in (cfg.metric, *held) if score(cfg, challenger, name) is None]:
        return no_score(cfg, missing)
    pairs, value = rows_of(challenger, cfg.protocol).num_rows, score(cfg, challenger, cfg.metric)
    reason = f"there was no champion; {cfg.metric} {value:.4f} over {pairs} pairs of {cfg.protocol}"
    return Verdict(outcome="first", reason=reason, pairs=pairs, challenger_score=value)


def judge(cfg: Promote, challenger: pa.Table, champion: pa.Table) -> Verdict:
    """Compare two files scores.parquet of the same test set, pair by pair.

    Raises:
        ValueError: they do not hold the same pairs of the protocol.
    """
    cfg = in_tokens_of(cfg, challenger)
    if missing := [name for name in (cfg.metric, *cfg.guards) if score(cfg, challenger, name) is None]:
        return no_score(cfg, missing)
    if odd := [*unlike(cfg, challenger, champion)]:
        return refused("; ".join([*odd, "evaluate and register again"]))
    found = compare(challenger, champion, cfg.protocol, known_scores()[cfg.metric], cfg.confidence)
    if found is None:
        return refused(f"the champion has no {cfg.metric} on {cfg.protocol}")
    ours, theirs, interval = found
    pairs, gain = rows_of(challenger, cfg.protocol).num_rows, ours - theirs
    measured = f"{cfg.metric} on {cfg.protocol} {ours:.4f}, the champion's {theirs:.4f}: gain {gain:+.4f}"
    guards, faults, held = guarded(cfg, challenger, champion)
    if interval is None:
        faults.insert(0, "too few pairs for an interval")
    else:
        measured += f", {100 * cfg.confidence:g} % interval {interval.low:+.4f} to {interval.high:+.4f}"
        if interval.low <= cfg.min_gain:
            faults.insert(0, f"its lower bound does not exceed {cfg.min_gain:g}")
    reasons = faults or [f"the lower bound exceeds {cfg.min_gain:g}", *held]
    return Verdict(
        outcome="refused" if faults else "promoted",
        reason="; ".join([f"{measured} over {pairs} pairs", *reasons]),
        pairs=pairs,
        challenger_score=ours,
        champion_score=theirs,
        gain=gain,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        guards=guards,
    )


def refused(reason: str) -> Verdict:
    return Verdict(outcome="refused", reason=reason)


def no_score(cfg: Promote, names: list[str]) -> Verdict:
    remedy = "see `absent` in its metrics.json, or name others in the section promote"
    return refused(f"it has no {' and no '.join(names)} on {cfg.protocol}: {remedy}")


def score(cfg: Promote, table: pa.Table, name: str) -> float | None:
    return score_of(table, cfg.protocol, known_scores()[name])


def known_scores() -> dict[str, Resampled]:
    """Every score that follows from sums over pairs, of words and of characters."""
    return resampled_scores(with_characters(METRICS))


def in_tokens_of(cfg: Promote, challenger: pa.Table) -> Promote:
    """The section with the score of characters in place of each score of words that the challenger does not have,
    because its references have no spaces between words."""

    def name_in_file(name: str) -> str:
        of_characters = f"{name}{BY_CHARACTERS}"
        if of_characters not in known_scores() or score(cfg, challenger, name) is not None:
            return name
        return name if score(cfg, challenger, of_characters) is None else of_characters

    guards = {name_in_file(name): tolerance for name, tolerance in cfg.guards.items()}
    return cfg.model_copy(update={"metric": name_in_file(cfg.metric), "guards": guards})


def unlike(cfg: Promote, challenger: pa.Table, champion: pa.Table) -> Iterator[str]:
    """A line for each reason why means over the two files are no means over the same pairs: pairs that have a value in
    one of them alone."""
    for name in (cfg.metric, *cfg.guards):
        ours, theirs = (without_value(cfg, name, table) for table in (challenger, champion))
        for whose, lacks in (("it", ours - theirs), ("the champion", theirs - ours)):
            if lacks:
                yield f"{whose} has no {name} of {len(lacks)} pairs that the other model has, such as {min(lacks)}"


def without_value(cfg: Promote, name: str, table: pa.Table) -> set[str]:
    """The pairs whose value of a score is null; none of a file that does not have the score."""
    rows, column = rows_of(table, cfg.protocol), known_scores()[name].column
    return set(rows.filter(rows[column].is_null())["id"].to_pylist()) if column in rows.column_names else set()


def can_be_judged(cfg: Promote, challenger: pa.Table, champion: pa.Table) -> bool:
    """True where the champion's file holds the challenger's pairs, and for them every score that the gate asks for."""
    cfg = in_tokens_of(cfg, challenger)
    ours, theirs = (sorted(rows_of(table, cfg.protocol)["id"].to_pylist()) for table in (challenger, champion))
    return ours == theirs and all(
        score(cfg, champion, name) is not None
        and without_value(cfg, name, champion) <= without_value(cfg, name, challenger)
        for name in (cfg.metric, *cfg.guards)
    )


def guarded(cfg: Promote, challenger: pa.Table, champion: pa.Table) -> tuple[Guards, list[str], list[str]]:
    """The guarded scores of both models; a line for each that is worse than it may be, or that the champion does not
    have; and one for those that hold."""
    guards, faults, held = Guards(), [], []
    for name, tolerance in cfg.guards.items():
        ours, theirs = (score(cfg, table, name) for table in (challenger, champion))
        guards[name] = {"challenger": ours, "champion": theirs, "tolerance": tolerance}
        sign = -1 if any(name in metric.lower_is_better for metric in with_characters(METRICS).values()) else 1
        if ours is None or theirs is None:
            faults.append(f"the champion has no {name}, which is guarded")
        elif round(sign * (theirs - ours), DECIMALS) > tolerance:
            faults.append(f"{name} {ours:.4f} is more than {tolerance:g} worse than {theirs:.4f}")
        else:
            held.append(f"{name} {ours:.4f}, had {theirs:.4f}")
    return guards, faults, [f"guarded: {', '.join(held)}"] if held else []
