"""Promote a version or roll back: decide which version the alias `champion` points to.

The champion is the version in use. Another version becomes champion if it is significantly better than the current
champion on the same test set. Every decision is recorded (`components/registry/decisions.py`), because MLflow does not
keep a history of aliases. If the champion changes while a version is being judged, the version is judged again, this
time against the new champion.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from mlflow.entities.model_registry import ModelVersion
from mlflow.tracking import MlflowClient

from m3diff.provenance.git import process_lock
from m3diff.records.errors import CodedError, DataError, Fault
from m3diff.registry import tracking, versions
from m3diff.registry.decisions import (
    Decision,
    Entry,
    OvertakenError,
    append_decision,
    fetch_record,
    find_rollback,
    follow_champions,
    numbering_faults,
    print_warning,
    push_record,
    read_decisions,
    require_complete_record,
    update_tag,
)
from m3diff.registry.gate import (
    Verdict,
    compare_with_champion,
    faults_of_scores,
    has_comparable_scores,
    join_faults,
    judge_without_champion,
    refuse,
)
from m3diff.registry.moves import (
    add_identities,
    find_lost_champion,
    find_newest_existing,
    make_move,
    read_identity,
    reconcile,
    select_current_decisions,
)
from m3diff.registry.versions import CHALLENGER, CHAMPION, PREVIOUS, SCORES, find_version, resolve_alias
from m3diff.settings.tree import Params

ATTEMPTS = 5  # maximum number of attempts to judge a version if the champion keeps changing


class CannotScoreAgain(CodedError):
    """A version cannot be captioned and scored on the test set of this working tree."""


class GateDecision(Verdict):
    """The gate's decision about a version. A refusal is not an error.

    Attributes:
        outcome: the outcome of the gate, which is `first` if the version was accepted because there was no champion.
        challenger: the number of the version that was judged.
        champion: the number of the champion before the decision, or None if there was no champion.
        scored_again: whether the champion was scored on the challenger's test set for this decision.
    """

    model: str
    challenger: int
    champion: int | None
    protocol: str
    metric: str
    min_gain: float
    confidence: float
    scored_again: bool = False

    def __str__(self) -> str:
        return f"{self.model} version {self.challenger} {self.outcome}: {self.reason}"

    @classmethod
    def from_decision(cls, decision: Decision) -> "GateDecision":
        """Return the gate's decision that an entry of the record describes."""
        return cls.model_validate(
            {
                **decision.gate,
                "outcome": decision.outcome,
                "reason": decision.reason,
                "model": decision.model,
                "challenger": decision.target,
                "champion": decision.champion_before,
            }
        )

    def to_entry(self, previous: int | None) -> Entry:
        """Convert this decision to an entry for the record of decisions.

        Args:
            previous: the version that the alias `previous` points to after the decision.
        """
        assert self.outcome != "unchanged", "there is nothing to record"
        return Entry(
            action="promote",
            model=self.model,
            champion_before=self.champion,
            target=self.challenger,
            outcome=self.outcome,
            reason=self.reason,
            previous=previous,
            gate=self.gate_fields(),
        )

    def gate_fields(self) -> dict[str, Any]:
        """Return the scores and parameters of the comparison, which are the fields without a counterpart in `Entry`."""
        # Convert to JSON and back to turn NaN into null, because the record does not accept NaN
        text = self.model_dump_json(exclude={"outcome", "reason", "model", "challenger", "champion"})
        fields: dict[str, Any] = json.loads(text)
        return fields


# Function that captions and scores a version on the test set with the given sha256. The only implementation is in
# `components/commands/rescore.py`
Rescore = Callable[[MlflowClient, Params, ModelVersion, str], pa.Table]


def promote(
    params: Params, rescore: Rescore, version: int | None = None, again: bool = False, repository: Path = Path(".")
) -> GateDecision:
    """Judge a version with the gate, record the decision, and make the version champion if it passes.

    Args:
        rescore: the function that scores the champion if MLflow lacks its scores on the challenger's test set.
        version: the number of the version to judge, by default that of the alias `challenger`. A caller that has just
            registered a version should pass its number, because another registration may have moved the alias since.
        again: whether to judge the version even if it was champion and was rolled back.
        repository: the git repository with the record of decisions.

    Raises:
        DataError: nothing is registered, there is no such version, `repository` is not a git repository, or its record
            lacks decisions.
        TrackingUnavailableError: MLflow does not respond.
        OvertakenError: the champion changed during every attempt.
    """
    model = params.register_.model_name
    with process_lock("promote", repository), tracking.connect(params.register_.tracking_uri) as client:
        fetch_record(repository)
        for fault in numbering_faults(repository):
            print_warning(f"{fault}; see `m3diff history`")
        gate_decision = None
        for _ in range(ATTEMPTS):
            gate_decision = attempt_promotion(client, params, rescore, version, again, repository)
            if gate_decision is not None:
                break
        update_tag(client, repository, model)
    push_record(repository)
    if gate_decision is None:
        raise OvertakenError("registry.champion_moved_often", attempts=ATTEMPTS)
    return gate_decision


def rollback(params: Params, to: int | None = None, why: str = "", repository: Path = Path(".")) -> Decision:
    """Make an earlier champion the champion again, without the gate. `promote` then refuses the rolled-back version.

    Args:
        to: the version to return to, by default the previous champion. An explicit version becomes champion even if
            there is no champion now.
        why: the reason to record.
        repository: the git repository with the record of decisions.

    Raises:
        DataError: there is no champion, no earlier version or no such version, `repository` is not a git repository, or
            its record lacks decisions.
        TrackingUnavailableError: MLflow does not respond.
        OvertakenError: another process changed the champion in the meantime; try again.
    """
    model = params.register_.model_name
    with process_lock("record", repository), tracking.connect(params.register_.tracking_uri) as client:
        fetch_record(repository)
        require_complete_record(client, repository, model)
        reconcile(client, repository, model)
        decision = make_move(client, repository, plan_rollback(client, repository, model, to, why))
        update_tag(client, repository, model)
    push_record(repository)
    if decision is None:
        raise OvertakenError("registry.champion_moved", model=model)
    return decision


# Promotion


@dataclass(frozen=True)
class ModelState:
    """The champion and decisions that a verdict is based on. If they change in the meantime, the verdict is discarded.

    Attributes:
        champion: the number of the version that the alias `champion` points to, or None if there is no such alias.
        decisions: all decisions of the record.
    """

    champion: int | None
    decisions: list[Decision]


def read_state(client: MlflowClient, repository: Path, model: str) -> ModelState:
    """Read the champion from MLflow and the record from git."""
    return ModelState(champion=resolve_alias(client, model, CHAMPION), decisions=read_decisions(repository))


def attempt_promotion(
    client: MlflowClient, params: Params, rescore: Rescore, version: int | None, again: bool, repository: Path
) -> GateDecision | None:
    """Judge the challenger once and record the decision.

    Returns:
        the decision, or None if the champion changed or another decision was recorded in the meantime. If a killed
            process had already decided to promote the challenger, that promotion is finished and returned.
    """
    model = params.register_.model_name
    with process_lock("record", repository):
        require_complete_record(client, repository, model)
        finished_move = reconcile(client, repository, model)
        challenger = find_challenger(client, model, version)
        if finished_move is not None and is_promotion_of(finished_move, challenger):
            return GateDecision.from_decision(finished_move)
        state = read_state(client, repository, model)

    # Do not hold the record's lock here: judging may take hours, and a rollback must not wait for it
    verdict, scored_again = judge_challenger(client, params, rescore, challenger, state, again)
    gate_decision = GateDecision(
        **dict(verdict),
        model=model,
        challenger=int(challenger.version),
        champion=state.champion,
        scored_again=scored_again,
        protocol=params.promote.protocol,
        metric=params.promote.metric,
        min_gain=params.promote.min_gain,
        confidence=params.promote.confidence,
    )
    with process_lock("record", repository):
        if read_state(client, repository, model) != state:
            return None
        return gate_decision if record_gate_decision(client, repository, gate_decision, state) else None


def find_challenger(client: MlflowClient, model: str, version: int | None) -> ModelVersion:
    """Find the version to judge, by its number or, if `version` is None, by the alias `challenger`.

    Raises:
        DataError: there is no such version, or no version has the alias.
    """
    if version is not None:
        return find_version(client, model, str(version))
    if resolve_alias(client, model, CHALLENGER) is None:
        raise DataError("registry.no_challenger", model=model)
    return find_version(client, model, CHALLENGER)


def is_promotion_of(decision: Decision, version: ModelVersion) -> bool:
    """Return whether a decision is the gate's promotion of this version."""
    return decision.action == "promote" and decision.target == int(version.version)


def judge_challenger(
    client: MlflowClient, params: Params, rescore: Rescore, challenger: ModelVersion, state: ModelState, again: bool
) -> tuple[Verdict, bool]:
    """Return the verdict on a challenger, and whether the champion was scored again to reach it.

    The challenger is refused without comparing scores if it was rolled back earlier and `again` is false, or if the
    alias `champion` was lost.
    """
    model = params.register_.model_name
    rollback_decision = find_rollback_decision(client, model, challenger, state.decisions)
    if rollback_decision is not None and not again:
        return refuse_rolled_back(rollback_decision), False
    lost_champion = find_lost_champion(client, state.decisions, model)
    if lost_champion is not None:
        remedy = f"Or make this version champion without a comparison: {command_to_accept(challenger)}"
        return refuse(f"there is no champion to compare with: {lost_champion}. {remedy}"), False
    champion = None if state.champion is None else client.get_model_version(model, str(state.champion))
    return judge_scores(client, params, rescore, challenger, champion)


def find_rollback_decision(
    client: MlflowClient, model: str, version: ModelVersion, decisions: list[Decision]
) -> Decision | None:
    """Return the decision that rolled a version back, or None if the version was not rolled back.

    The version may have had another number at that time.
    """
    history = follow_champions(select_current_decisions(client, decisions, model), model)
    rollback_of_number = history.rolled_back.get(int(version.version))
    return rollback_of_number or find_rollback(decisions, model, read_identity(version))


def refuse_rolled_back(decision: Decision) -> Verdict:
    """Return a verdict that refuses a version because this decision rolled it back."""
    reason = f" ({decision.reason})" if decision.reason else ""
    action = "it was rolled back without m3diff, which was noticed"
    if decision.action == "rollback":
        action = f"{decision.author} rolled it back"
    return refuse(
        f"{action} at {decision.decided_at}{reason}. To have the gate judge it anyway: m3diff promote --again"
    )


def judge_scores(
    client: MlflowClient, params: Params, rescore: Rescore, challenger: ModelVersion, champion: ModelVersion | None
) -> tuple[Verdict, bool]:
    """Return the gate's verdict on the two models' scores, and whether the champion was scored again to reach it."""
    cfg = params.promote
    if champion is not None and champion.version == challenger.version:
        return Verdict(outcome="unchanged", reason="it is already the champion"), False
    test_set = versions.read_test_set(challenger)
    if test_set == versions.UNKNOWN_TEST_SET:
        fault = f"it has no tag {versions.TEST_SET_TAG!r}, which identifies the pairs on which it was scored"
        return refuse(f"{fault}. Run `m3diff register` again"), False
    challenger_scores = versions.read_stored_scores(client, challenger, test_set)
    if challenger_scores is None:
        return refuse(f"its {SCORES} is missing from MLflow. Run `m3diff register` again"), False
    faults = faults_of_scores(cfg, challenger_scores)
    if faults:
        fault = f"its {SCORES} in MLflow (run {challenger.run_id}) is invalid: {join_faults(faults)}"
        return refuse(f"{fault}. Run `dvc repro -f evaluate` and `m3diff register` again"), False
    if champion is None:
        return judge_without_champion(cfg, challenger_scores), False

    champion_scores = read_champion_scores(client, params, champion, test_set)
    try:
        if champion_scores is not None and has_comparable_scores(cfg, challenger_scores, champion_scores):
            return compare_with_champion(cfg, challenger_scores, champion_scores), False
        return compare_with_champion(cfg, challenger_scores, rescore(client, params, champion, test_set)), True
    except (CannotScoreAgain, ValueError) as error:
        fault = (
            f"champion {champion.version} has no scores on the challenger's test set ({test_set:.12}) and cannot be "
            f"scored on it: {error}"
        )
        remedy = f"To accept the challenger without a comparison: {command_to_accept(challenger)}"
        return refuse(f"{fault}. {remedy}"), False


def read_champion_scores(
    client: MlflowClient, params: Params, champion: ModelVersion, test_set: str
) -> pa.Table | None:
    """Read the champion's stored scores on a test set. Return None if MLflow has no scores that the gate can read."""
    scores = versions.read_stored_scores(client, champion, test_set)
    if scores is None:
        return None
    faults = faults_of_scores(params.promote, scores)
    if faults:
        file = f"{SCORES} of version {champion.version} in MLflow (run {champion.run_id})"
        print(f"promote: {file} is invalid and is ignored ({join_faults(faults)})", flush=True)
        return None
    return scores


def command_to_accept(version: ModelVersion) -> str:
    """Return the shell command that makes a version champion without the gate."""
    return f"m3diff rollback --to {version.version} --why 'accepted without a comparison'"


def record_gate_decision(
    client: MlflowClient, repository: Path, gate_decision: GateDecision, state: ModelState
) -> bool:
    """Record a decision of the gate and, if it is a promotion, move the aliases.

    A refusal that only repeats the last decision is not recorded again.

    Returns:
        False if the champion changed in the meantime, otherwise True.
    """
    if gate_decision.outcome == "unchanged":
        return True
    previous = gate_decision.champion
    if previous is None:
        previous = resolve_alias(client, gate_decision.model, PREVIOUS)
    entry = gate_decision.to_entry(previous)
    if gate_decision.outcome != "refused":
        return make_move(client, repository, entry) is not None
    earlier_decisions = select_current_decisions(client, state.decisions, gate_decision.model)
    if not (earlier_decisions and is_repetition(entry, earlier_decisions[-1])):
        append_decision(repository, add_identities(client, entry))
    return True


def is_repetition(entry: Entry, decision: Decision) -> bool:
    """Return whether an entry repeats the last decision."""
    return (
        entry.champion_before == decision.champion_before
        and entry.target == decision.target
        and entry.reason == decision.reason
    )


# Rollback


def plan_rollback(client: MlflowClient, repository: Path, model: str, to: int | None, why: str) -> Entry:
    """Return the entry for a rollback from the champion to version `to`, or to the previous champion if `to` is None.

    Raises:
        DataError: there is no champion, there is no version to return to, or that version is already champion.
    """
    champion = resolve_alias(client, model, CHAMPION)
    decisions = read_decisions(repository)
    if to is not None:
        target: int | None = int(find_version(client, model, str(to)).version)
    elif champion is None:
        lost_champion = find_lost_champion(client, decisions, model) or Fault("registry.no_champion", model=model)
        raise DataError("registry.nothing_to_roll_back", fault=lost_champion)
    else:
        target = find_previous_champion(client, decisions, model, champion)
    if target is None:
        raise DataError("registry.no_earlier_champion", model=model)
    if target == champion:
        raise DataError("registry.is_champion_already", version=target, model=model)

    champions = follow_champions(select_current_decisions(client, decisions, model), model).champions
    if target in champions:
        earlier_champions = champions[: champions.index(target)]
    else:
        earlier_champions = [version for version in champions if version != champion]
    return Entry(
        action="rollback",
        model=model,
        champion_before=champion,
        target=target,
        outcome="rolled back",
        reason=why.encode(errors="replace").decode(),  # replace bytes from the command line that are not UTF-8
        previous=find_newest_existing(client, model, earlier_champions),
    )


def find_previous_champion(client: MlflowClient, decisions: list[Decision], model: str, champion: int) -> int | None:
    """Return the version that a rollback from `champion` returns to, or None if no earlier champion is known.

    This is the version with the alias `previous`. If the alias was deleted or points to the champion itself, return the
    newest earlier champion on record that still exists in MLflow.
    """
    previous = resolve_alias(client, model, PREVIOUS)
    if previous is not None and previous != champion:
        return previous
    champions = follow_champions(select_current_decisions(client, decisions, model), model).champions
    earlier_champions = champions[: champions.index(champion)] if champion in champions else champions
    version = find_newest_existing(client, model, earlier_champions)
    if version is not None:
        state = "is missing" if previous is None else "points to the champion itself"
        print_warning(f"the alias {PREVIOUS!r} {state}. Version {version} is the newest earlier champion on record")
    return version
