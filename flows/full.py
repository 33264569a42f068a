"""The whole pipeline: `prefect deployment run m3diff/full`."""

from prefect import flow
from prefect.states import State

from flows import notices
from flows.pipeline import run_pipeline


@flow(name="m3diff", persist_result=False, on_failure=[notices.failed], on_crashed=[notices.failed])
def full(
    ref: str | None = None, overrides: list[str] | None = None, dirty: bool = False, reason: str = "asked for"
) -> State:
    """Every stage through DVC, then register and promote.

    Args:
        ref: the commit, branch or tag to run; without one HEAD, which must then be all that decides a run.
        overrides: parameters of this run alone, such as `train.epochs=6`.
        dirty: run what is not committed, too; it is committed to the branch of the run.
        reason: why; kept with the run.
    """
    return run_pipeline(ref, overrides or [], dirty, reason)
