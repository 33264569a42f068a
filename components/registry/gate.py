"""Decide whether a new version (the challenger) is significantly better than the version in use (the champion).

This check is called the gate. Both versions are scored on the same test pairs. The challenger passes if the lower bound
of its gain's confidence interval exceeds `min_gain`, and if no guarded score gets worse by more than its tolerance.
With `retention`, the challenger must also keep what its base could do: on the datasets with this role, its scores are
compared with those of its base, which are in its scores.parquet.

A guarded score is judged by the measured difference and not by a confidence bound, because a bound would reject even
equal models on a small group of pairs. Choose a tolerance of about twice the standard error of the score.

`promote.py` calls the gate, and first makes the checks that do not compare scores, in this order:

1. `attempt_promotion`: the record has all decisions, and no move of the champion is unfinished.
2. `judge_challenger`: the challenger was not rolled back earlier, and the alias `champion` was not lost.
3. `judge_scores`: the challenger is not the champion already, its test set is known, its scores.parquet is stored and
   can be read (`faults_of_scores`), and the champion has comparable scores (`has_comparable_scores`). If it has none,
   the champion is scored again.

A new setting of the gate needs:

1. a field of `Promote` in `stages/register/params.py`, with a default or a value in `profiles/embedded.yaml`;
2. the code that uses it: `compare_with_champion` here, and `judge_without_champion` if it also applies to the first
   version. A setting that names a score also has a place in `compared_scores` and `use_characters_if_needed`;
3. a check in `check_gate_scores` of `settings/rules.py`, if it names scores or protocols;
4. a field of `GateDecision` in `promote.py`, which `attempt_promotion` fills in, if the record of decisions should
   contain it. The field needs a default, because decisions that are already recorded do not contain it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from m3diff.records.errors import Fault, format_count
from m3diff.scoring.bootstrap import DECIMALS, compare, resampled_scores, rows_of, score_of
from m3diff.scoring.metrics import BY_CHARACTERS, METRICS, Resampled, add_character_variants
from m3diff.scoring.retention import compared_protocols, rows_with_base_answers
from m3diff.stages.register.params import Promote


class GuardedScore(BaseModel):
    """The values of a score that must not get worse: the challenger may be worse by at most `tolerance`."""

    model_config = ConfigDict(frozen=True)

    challenger: float | None
    champion: float | None
    tolerance: float


class Verdict(BaseModel):
    """The gate's verdict on a version. Numbers that were not computed are None.

    Attributes:
        pairs: the number of test pairs.
        gain: the challenger's score minus the champion's.
        low, high: the bounds of the confidence interval of the gain.
        guards: the guarded scores by name.
    """

    model_config = ConfigDict(frozen=True)

    outcome: Literal["promoted", "first", "refused", "unchanged"]
    reason: str
    pairs: int | None = None
    challenger_score: float | None = None
    champion_score: float | None = None
    gain: float | None = None
    low: float | None = None
    high: float | None = None
    guards: dict[str, GuardedScore] = {}


def compared_scores(cfg: Promote) -> list[str]:
    """Return the names of the scores that the gate compares: its metric and its guarded scores."""
    return [cfg.metric, *cfg.guards]


def judge_without_champion(cfg: Promote, challenger: pa.Table) -> Verdict:
    """Judge a version when there is no champion. Accept it if its metric and guarded scores are finite numbers.

    A guarded score is not required if the version's scores.parquet has no column for it.
    """
    cfg = use_characters_if_needed(cfg, challenger)
    present_guards = [name for name in cfg.guards if known_scores()[name].column in challenger.column_names]
    missing_scores = [name for name in (cfg.metric, *present_guards) if score(cfg, challenger, name) is None]
    if missing_scores:
        return refuse_missing_scores(cfg, missing_scores)
    losses = list(describe_lost_knowledge(cfg, challenger))
    if losses:
        return refuse("; ".join(losses))
    pairs = rows_of(challenger, cfg.protocol).num_rows
    challenger_score = score(cfg, challenger, cfg.metric)
    scored_pairs = format_count(pairs, "pair")
    reason = f"there was no champion. {cfg.metric} {challenger_score:.4f} over {scored_pairs} of {cfg.protocol}"
    return Verdict(outcome="first", reason=reason, pairs=pairs, challenger_score=challenger_score)


def compare_with_champion(cfg: Promote, challenger: pa.Table, champion: pa.Table) -> Verdict:
    """Judge a challenger by comparing its scores.parquet with the champion's, pair by pair on the same test set.

    Raises:
        ValueError: the two files do not contain the same pairs of the protocol.
    """
    cfg = use_characters_if_needed(cfg, challenger)
    missing_scores = [name for name in compared_scores(cfg) if score(cfg, challenger, name) is None]
    if missing_scores:
        return refuse_missing_scores(cfg, missing_scores)
    differences = list(describe_different_pairs(cfg, challenger, champion))
    if differences:
        differences.append("run `dvc repro -f evaluate` and `m3diff register` again")
        return refuse("; ".join(differences))
    comparison = compare(challenger, champion, cfg.protocol, known_scores()[cfg.metric], cfg.confidence)
    if comparison is None:
        return refuse(f"the champion has no {cfg.metric} on {cfg.protocol}")
    challenger_score, champion_score, interval = comparison
    gain = challenger_score - champion_score
    pairs = rows_of(challenger, cfg.protocol).num_rows
    guards = compare_guards(cfg, challenger, champion)

    comparison_text = (
        f"{cfg.metric} on {cfg.protocol} {challenger_score:.4f}, the champion's {champion_score:.4f}: gain {gain:+.4f}"
    )
    faults: list[str] = []
    if interval is None:
        faults.append("there are too few pairs for an interval")
    else:
        comparison_text += f", {100 * cfg.confidence:g} % interval {interval.low:+.4f} to {interval.high:+.4f}"
        if interval.low <= cfg.min_gain:
            faults.append(f"the lower bound does not exceed {cfg.min_gain:g}")
    faults += guards.faults
    faults += describe_lost_knowledge(cfg, challenger)
    reasons = faults
    if not faults:
        reasons = [f"the lower bound exceeds {cfg.min_gain:g}"]
        if guards.passed_scores:
            reasons.append(f"guarded scores within their tolerance: {', '.join(guards.passed_scores)}")
    return Verdict(
        outcome="refused" if faults else "promoted",
        reason="; ".join([f"{comparison_text} over {format_count(pairs, 'pair')}", *reasons]),
        pairs=pairs,
        challenger_score=challenger_score,
        champion_score=champion_score,
        gain=gain,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        guards=guards.scores,
    )


def refuse(reason: str) -> Verdict:
    """Return a verdict that refuses a version for this reason, without numbers."""
    return Verdict(outcome="refused", reason=reason)


def refuse_missing_scores(cfg: Promote, names: list[str]) -> Verdict:
    """Return a verdict that refuses a challenger because scores that the gate compares are missing."""
    remedy = "See `absent` in its metrics.json, or choose other scores in the section `promote`"
    return refuse(f"it has no {' and no '.join(names)} on {cfg.protocol}. {remedy}")


def score(cfg: Promote, table: pa.Table, name: str) -> float | None:
    """Return a score over all pairs of the gate's protocol, or None if it is missing or not a finite number."""
    return score_of(table, cfg.protocol, known_scores()[name])


def known_scores() -> dict[str, Resampled]:
    """Return all scores that can be computed from per-pair sums, by name, including character-level variants."""
    return resampled_scores(add_character_variants(METRICS))


def use_characters_if_needed(cfg: Promote, challenger: pa.Table) -> Promote:
    """Return the settings with character-level variants in place of word-level scores that the challenger lacks.

    Word-level scores are missing if the references have no spaces between words. A score is kept if its character-level
    variant is missing too.
    """

    def choose_variant(name: str) -> str:
        name_by_characters = f"{name}{BY_CHARACTERS}"
        if name_by_characters not in known_scores() or score(cfg, challenger, name) is not None:
            return name
        return name if score(cfg, challenger, name_by_characters) is None else name_by_characters

    guards = {choose_variant(name): tolerance for name, tolerance in cfg.guards.items()}
    return cfg.model_copy(update={"metric": choose_variant(cfg.metric), "guards": guards})


def faults_of_scores(cfg: Promote, table: pa.Table) -> list[Fault]:
    """Check whether the gate can read a scores.parquet, and return the faults that it found.

    A score that is missing, null or not finite is not a fault of the file. Instead, the gate refuses the version.
    """
    faults = [*text_faults(table, "protocol"), *text_faults(table, "id")]
    if faults:
        return faults
    if not table.num_rows:
        return [Fault("registry.scores_empty")]
    id_counts = Counter(rows_of(table, cfg.protocol)["id"].to_pylist())
    repeated_ids = [pair_id for pair_id, count in id_counts.items() if count > 1]
    if repeated_ids:
        count = len(repeated_ids)
        example = repeated_ids[0]
        faults.append(Fault("registry.scores_ids_repeated", count=count, protocol=cfg.protocol, example=example))
    for metric in compared_scores(cfg):
        for name in (metric, f"{metric}{BY_CHARACTERS}"):
            if name in known_scores():
                faults += score_faults(cfg, table, name)
    return list(dict.fromkeys(faults))


def join_faults(faults: Iterable[Fault]) -> str:
    """Return the faults as one line of text for the reason of a verdict."""
    return "; ".join(str(fault) for fault in faults)


def text_faults(table: pa.Table, name: str) -> Iterator[Fault]:
    """Check that a column occurs exactly once and contains text in every row. If not, yield a fault."""
    count = table.column_names.count(name)
    if count == 0:
        yield Fault("registry.scores_column_missing", name=name)
        return
    if count > 1:
        yield Fault("registry.scores_column_repeated", name=name, count=count)
        return
    column = table[name]
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        yield Fault("registry.scores_of_other_type", name=name, value=str(column.type), expected="text")
    elif column.null_count:
        yield Fault("registry.scores_null", name=name, count=column.null_count, rows=len(column))


def score_faults(cfg: Promote, table: pa.Table, name: str) -> Iterator[Fault]:
    """Check that the column of a score contains numbers, or lists of numbers of one length. If not, yield a fault.

    The column may be missing.
    """
    column = known_scores()[name].column
    count = table.column_names.count(column)
    if count > 1:
        yield Fault("registry.scores_column_repeated", name=column, count=count)
    if count != 1:
        return
    values = rows_of(table, cfg.protocol)[column]
    is_list = pa.types.is_list(values.type)
    number_type = values.type.value_type if is_list else values.type
    is_number = (
        pa.types.is_integer(number_type) or pa.types.is_floating(number_type) or pa.types.is_boolean(number_type)
    )
    if not is_number and not pa.types.is_null(number_type):
        yield Fault("registry.scores_of_other_type", name=column, value=str(values.type), expected="numbers")
        return
    lengths: list[int] = []
    if is_list:
        lengths = pc.unique(pc.list_value_length(values)).drop_null().to_pylist()
    if len(lengths) > 1:
        shortest = min(lengths)
        longest = max(lengths)
        yield Fault("registry.scores_lists_of_several_lengths", name=column, shortest=shortest, longest=longest)
        return
    try:
        score(cfg, table, name)
    except (ArithmeticError, LookupError, TypeError, ValueError, pa.ArrowException) as error:
        yield Fault("registry.scores_no_statistics", name=column, score=name, cause=str(error))


def describe_different_pairs(cfg: Promote, challenger: pa.Table, champion: pa.Table) -> Iterator[str]:
    """Check that both models have values for the same pairs, and yield a description of each difference.

    If there is a difference, the mean scores of the two models are computed over different pairs.
    """
    for name in compared_scores(cfg):
        challenger_nulls = ids_without_value(cfg, name, challenger)
        champion_nulls = ids_without_value(cfg, name, champion)
        missing_ids = {
            "the challenger": challenger_nulls - champion_nulls,
            "the champion": champion_nulls - challenger_nulls,
        }
        for model, ids in missing_ids.items():
            if ids:
                pairs = format_count(len(ids), "pair")
                yield f"{model} has no {name} for {pairs} that the other model has, such as {min(ids)}"


def ids_without_value(cfg: Promote, name: str, table: pa.Table) -> set[str]:
    """Return the ids of the pairs for which a score is null, or an empty set if the score's column is missing."""
    rows = rows_of(table, cfg.protocol)
    column = known_scores()[name].column
    if column not in rows.column_names:
        return set()
    return set(rows.filter(rows[column].is_null())["id"].to_pylist())


def has_comparable_scores(cfg: Promote, challenger: pa.Table, champion: pa.Table) -> bool:
    """Return whether the champion's scores are for the same pairs as the challenger's and include all required scores.

    For each score, the champion needs a value for every pair for which the challenger has a value.
    """
    cfg = use_characters_if_needed(cfg, challenger)
    challenger_ids = sorted(rows_of(challenger, cfg.protocol)["id"].to_pylist())
    champion_ids = sorted(rows_of(champion, cfg.protocol)["id"].to_pylist())
    if challenger_ids != champion_ids:
        return False
    return all(
        score(cfg, champion, name) is not None
        and ids_without_value(cfg, name, champion) <= ids_without_value(cfg, name, challenger)
        for name in compared_scores(cfg)
    )


@dataclass
class GuardComparison:
    """The result of comparing the guarded scores of the challenger and the champion.

    Attributes:
        scores: the guarded scores by name.
        faults: one line per score that is worse by more than its tolerance, or that is missing for the champion.
        passed_scores: one line per score that is within its tolerance.
    """

    scores: dict[str, GuardedScore] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    passed_scores: list[str] = field(default_factory=list)


def compare_guards(cfg: Promote, challenger: pa.Table, champion: pa.Table) -> GuardComparison:
    """Compare each guarded score of the two models and check that it is not worse by more than its tolerance."""
    comparison = GuardComparison()
    for name, tolerance in cfg.guards.items():
        challenger_score = score(cfg, challenger, name)
        champion_score = score(cfg, champion, name)
        comparison.scores[name] = GuardedScore(
            challenger=challenger_score, champion=champion_score, tolerance=tolerance
        )
        if challenger_score is None or champion_score is None:
            comparison.faults.append(f"the champion has no {name}, which `promote.guards` contains")
            continue
        loss = champion_score - challenger_score
        if is_lower_better(name):
            loss = -loss
        # Round, because 0.90 - 0.87 exceeds 0.03 in floating point
        if round(loss, DECIMALS) > tolerance:
            comparison.faults.append(
                f"{name} {challenger_score:.4f} is more than {tolerance:g} worse than {champion_score:.4f}"
            )
        else:
            comparison.passed_scores.append(f"{name} {challenger_score:.4f} (champion {champion_score:.4f})")
    return comparison


def describe_lost_knowledge(cfg: Promote, challenger: pa.Table) -> Iterator[str]:
    """Compare each score in `retention` with the base's, and yield a description of each loss above its tolerance.

    A score that cannot be compared is described, too. Both models answered the same records.
    """
    if not cfg.retention:
        return
    protocols = compared_protocols(pc.unique(challenger["protocol"]).to_pylist())
    if not protocols:
        yield "its scores contain no answers of its base, which `promote.retention` needs"
    for protocol in protocols:
        rows_of_base = rows_with_base_answers(challenger, protocol)
        for name, tolerance in cfg.retention.items():
            kept_score = score_of(challenger, protocol, known_scores()[name])
            base_score = score_of(rows_of_base, protocol, known_scores()[name])
            if kept_score is None or base_score is None:
                yield f"there is no {name} on {protocol}, which `promote.retention` contains"
                continue
            loss = base_score - kept_score
            if is_lower_better(name):
                loss = -loss
            if round(loss, DECIMALS) > tolerance:
                yield (
                    f"on {protocol}, which its base could answer, {name} {kept_score:.4f} is more than {tolerance:g} "
                    f"worse than the base's {base_score:.4f}"
                )


def is_lower_better(name: str) -> bool:
    """Return whether a lower value of a score is better."""
    return any(name in metric.lower_is_better for metric in add_character_variants(METRICS).values())
