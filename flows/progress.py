"""How far a stage is, as a bar on Prefect's page, read from the lines that the stage prints."""

import re
import time
from collections.abc import Callable
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact

EVERY_S = 5.0
DONE = re.compile(r"(\d+)%\||\bstep (\d+)/(\d+)\b")
"""A progress bar's percentage, or a training line's steps."""


class StageProgress:
    """Passes lines on, and shows the share of the work that they tell. A page that cannot be reached stops no stage."""

    def __init__(self, stage: str, log: Callable[[str], None]) -> None:
        self.stage, self.log = stage, log
        self.artifact: UUID | None = None
        self.shown = -EVERY_S

    def line(self, text: str) -> None:
        self.log(text)
        found = DONE.search(text)
        now = time.monotonic()
        if found is None or now - self.shown < EVERY_S:
            return
        self.shown = now
        percent = float(found[1]) if found[1] else 100 * int(found[2]) / int(found[3])
        try:
            self.show(percent, text)
        except Exception as error:
            self.log(f"warning: progress cannot be shown: {type(error).__name__}: {error}")
            self.shown = float("inf")

    def show(self, percent: float, text: str) -> None:
        """The bar, with the line that it comes from."""
        if self.artifact is None:
            made = create_progress_artifact(percent, key=key(self.stage), description=text)
            assert isinstance(made, UUID)
            self.artifact = made
        else:
            update_progress_artifact(self.artifact, percent, description=text)


def key(stage: str) -> str:
    """A name that Prefect takes: `progress-ingest-minichange-free` of `ingest@minichange_free`."""
    return f"progress-{re.sub('[^a-z0-9]+', '-', stage.lower())}"
