"""The whole pipeline: `prefect deployment run m3diff/full`."""

from prefect import flow
from prefect.states import State

from flows.tasks import run_pipeline


@flow(name="m3diff", persist_result=False)
def full() -> State:
    """Every stage through DVC, then register and promote."""
    return run_pipeline()
