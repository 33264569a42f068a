"""The bar of a stage on Prefect's page, and what it is read from."""

import uuid
from typing import Any

import pytest

from flows import progress
from flows.progress import StageProgress, key

BAR = "ingest:  40%|####      | 400/1000 [00:10<00:15, 40.0pair/s]"
STEP = "train: step 20/80 (25.0%)  loss 1.2345  ETA 11 min"


class Page:
    """Prefect's artifacts, recorded, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: list[tuple[Any, ...]] = []
        self.now, self.artifact = 100.0, uuid.uuid4()
        monkeypatch.setattr(progress, "create_progress_artifact", self.create)
        monkeypatch.setattr(progress, "update_progress_artifact", self.update)
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)

    def create(self, percent: float, key: str, description: str) -> uuid.UUID:
        self.shown.append(("new", percent, key, description))
        return self.artifact

    def update(self, artifact: uuid.UUID, percent: float, description: str) -> None:
        assert artifact == self.artifact
        self.shown.append(("update", percent, description))


@pytest.fixture
def page(monkeypatch) -> Page:
    return Page(monkeypatch)


def test_a_bar_or_a_training_line_is_shown_and_every_line_passed_on(page):
    said: list[str] = []
    stage = StageProgress("ingest@mini_change", said.append)
    for line in ("ingest: 3 files", BAR, "done"):
        stage.line(line)
    page.now += 5
    stage.line(STEP)
    assert page.shown == [("new", 40.0, "progress-ingest-mini-change", BAR), ("update", 25.0, STEP)]
    assert said == ["ingest: 3 files", BAR, "done", STEP]


def test_the_page_is_asked_every_few_seconds_only(page):
    stage = StageProgress("train", lambda line: None)
    for seconds in (0, 4.9, 0.2, 4.9):
        page.now += seconds
        stage.line(STEP)
    assert len(page.shown) == 2


def test_a_page_that_cannot_be_reached_is_said_once_and_stops_nothing(page, monkeypatch):
    def gone(*arguments: Any, **named: Any) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(progress, "create_progress_artifact", gone)
    said: list[str] = []
    stage = StageProgress("train", said.append)
    for _ in range(3):
        stage.line(STEP)
        page.now += 60
    assert said == [STEP, "warning: progress cannot be shown: ConnectionError: gone", STEP, STEP]


def test_a_stages_name_becomes_one_that_prefect_takes():
    assert key("ingest@minichange_free") == "progress-ingest-minichange-free"
