"""Fixtures: five test pairs, a tiny checkpoint, and an undisturbed run with one thread."""

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.models.generation import Captioner
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.settings.compute import Compute
from m3diff.stages.predict.params import Predict
from m3diff.stages.predict.stage import PredictReport, predict
from tests.stages.train.toy import COMPUTE
from tests.tiny import colour_image, one_thread, tiny_base, tiny_checkpoint  # noqa: F401  # pytest finds one_thread

QUESTIONS = ("What changed?", "Describe every difference in detail.")
ORDER = [4, 0, 3, 1, 2]  # the mixture's, which is not that of their names


def write_test_split(folder: Path, numbers: list[int] = ORDER) -> Path:
    """Write a mixture of five test pairs with one to three samples each, in two files."""
    (folder / "test").mkdir(parents=True)
    rows = []
    for number in numbers:
        row: dict[str, Any] = {
            "record": f"toy/{number}",
            "image_set": f"toy/{number}",
            "history": [],
            "dataset": "toy",
            "split": "test",
            "question": QUESTIONS[number % 2],
        }
        row["images"] = []
        for k, side in enumerate(("before", "after")):
            file = folder / f"{number}_{side}.png"
            colour_image(10 * number + k).save(file)
            row["images"].append({"uri": str(file), "sha256": hashlib.sha256(file.read_bytes()).digest()})
        rows += [row | {"id": f"toy/{number}#{k}", "answer": f"reference {k}"} for k in range(1 + number % 3)]
    for part, chosen in enumerate((rows[:3], rows[3:])):
        pq.write_table(pa.Table.from_pylist(chosen, SAMPLE_SCHEMA), folder / "test" / f"{part:05d}.parquet")
    return folder


def settings(**changes: int) -> Predict:
    return Predict(**{"batch_pairs": 2, "max_new_tokens": 5, "limit": 0} | changes)


def compute(out: Path, **changes: Any) -> Compute:
    """Return the section compute, with the scratch folder next to the outputs."""
    return Compute(**{**COMPUTE, "scratch": out.parent / f"{out.name}_runs", **changes})


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    tiny_checkpoint(tiny_base(folder / "base"), folder / "model" / "checkpoint")
    return folder / "model"


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_test_split(tmp_path_factory.mktemp("predict") / "mixture")


@pytest.fixture(scope="session")
def written(mixture: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PredictReport]:
    out = tmp_path_factory.mktemp("predict") / "out"
    return out, predict(settings(), compute(out), mixture, model, out)


class Killed(BaseException):
    pass


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record the number of pairs and the use of saliency in each call of the model, and kill it after `end` calls."""
    calls_and_end: dict[str, Any] = {"calls": [], "end": None}
    original = Captioner.answer

    def answer(self: Captioner, prepared: list, dialogues: list, saliency: bool) -> Any:
        if len(calls_and_end["calls"]) == calls_and_end["end"]:
            raise Killed
        calls_and_end["calls"].append((len(prepared), saliency))
        return original(self, prepared, dialogues, saliency)

    monkeypatch.setattr(Captioner, "answer", answer)
    return calls_and_end
