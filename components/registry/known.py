"""What MLflow knows of the record of decisions: their number and the last one's commit, as a tag of the model.

The record is a branch, which a person may delete, reset or not have fetched. The tag is written after each decision: a
record that does not hold the tag's commit lacks decisions, and a version that was rolled back would be promoted again.
"""

from pathlib import Path

from mlflow.entities.model_registry import RegisteredModel
from mlflow.tracking import MlflowClient

from m3diff.records.errors import DataError
from m3diff.registry.decisions import BRANCH, NAME, catch_up, decisions, git, holds, tip_of
from m3diff.registry.tracking import registered

TAG = "decisions"  # `12 3f2a...`: twelve, and the commit of the twelfth


def agree(client: MlflowClient, repository: Path, model: str) -> None:
    """See that the record has every decision that MLflow knows of, asking git's remotes where it has not; let MLflow
    know those that it does not, as after a kill between the two.

    Raises:
        DataError: decisions are missing; both ends are named.
    """
    known = tip_known(registered(client, model))
    if known is not None and not holds(repository, BRANCH, known[1]):
        for remote in git(repository, "remote").split():
            catch_up(repository, remote)
        if not holds(repository, BRANCH, known[1]):
            raise DataError(missing(repository, model, *known))
    let_know(client, repository, model)


def let_know(client: MlflowClient, repository: Path, model: str) -> None:
    """Write the tag."""
    tip, there = tip_of(repository, BRANCH), registered(client, model)
    if tip is None or there is None:
        return
    number = len(decisions(repository))
    if tip_known(there) != (number, tip):
        client.set_registered_model_tag(model, TAG, f"{number} {tip}")


def tip_known(model: RegisteredModel | None) -> tuple[int, str] | None:
    """What the tag says; None where there is no model, no tag, or one that a person wrote."""
    number, _, commit = (model.tags.get(TAG, "") if model else "").partition(" ")
    return (int(number), commit) if number.isdecimal() and len(commit) == 40 else None


def missing(repository: Path, model: str, number: int, commit: str) -> str:
    """What is missing, and how it comes back."""
    ours = tip_of(repository, BRANCH)
    here = f"ends at {ours} with {len(decisions(repository))}" if ours else "is not there"
    if tip_of(repository, commit):
        remedy = f"that commit is in this clone: git update-ref {BRANCH} {commit}"
    else:
        remedy = (
            f"fetch it from the clone that decided: git fetch CLONE +{BRANCH}:{BRANCH}. If none has it any more, "
            f"delete the tag {TAG!r} of the model on MLflow's page: what was rolled back is then judged anew"
        )
    return (
        f"decisions are missing: MLflow knows {number} of model {model!r}, the last one in commit {commit}, but the "
        f"branch {NAME} of {repository.resolve()} {here}, and git's remotes do not have it. Nothing is "
        f"decided; {remedy}"
    )
