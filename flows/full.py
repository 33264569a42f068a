"""The whole pipeline: `prefect deployment run m3diff/full`."""

from prefect import flow
from prefect.states import State

from flows import notices
from flows.pipeline import run_pipeline
from m3diff.provenance.guard import require_own_code


@flow(name="m3diff", persist_result=False, on_failure=[notices.failed], on_crashed=[notices.failed])
def full(
    ref: str | None = None,
    overrides: list[str] | None = None,
    dirty: bool = False,
    reason: str = "asked for",
    warm_start: bool = False,
    replay: float = 0.25,
) -> State:
    """Every stage through DVC, then register and promote.

    Args:
        ref: the commit, branch or tag to run; without one HEAD, which must then be all that decides a run.
        overrides: parameters of this run alone, such as `train.epochs=6`.
        dirty: run what is not committed, too; it is committed to the branch of the run.
        reason: why; kept with the run.
        warm_start: begin with the champion instead of the base, where data changed since it was trained.
        replay: with `warm_start`, the share of the pairs of unchanged datasets that trains again.
    """
    require_own_code()
    return run_pipeline(ref, overrides or [], dirty, reason, replay=replay if warm_start else None)
