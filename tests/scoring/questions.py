"""A test set of captions and of questions about two images, one image and none, with the answers of a model."""

from pathlib import Path
from typing import Any, NamedTuple

from tests.layouts import list_images, write_record_table
from tests.scoring import bench
from tests.scoring.bench import Folders, paint


class AnsweredRecord(NamedTuple):
    """A record with the model's answer."""

    images: int
    references: list[str]
    prediction: str
    question: str | None = None
    kind: str | None = None
    history: tuple[tuple[str, str], ...] = ()


CAPTION = "the red cube at the left turned blue"
RECORDS = {
    "0": AnsweredRecord(2, [CAPTION], "the red cube at the left became blue"),
    "0?0": AnsweredRecord(2, ["2"], "There are two.", "How many cubes are there?", "count"),
    "0?1": AnsweredRecord(2, ["yes"], "Yes.", "Did the cube change?", "yes/no"),
    "0?2": AnsweredRecord(2, [CAPTION], CAPTION, "And what changed?", "describe", (("Did anything change?", "yes"),)),
    "1": AnsweredRecord(2, ["the green ball at the top was removed"], "nothing changed"),
    "one": AnsweredRecord(1, ["B"], "B. blue", "Which colour is it? A. red B. blue", "colour"),
    "one?1": AnsweredRecord(1, ["3"], "4", "How many balls are there?", "count"),
    "none": AnsweredRecord(0, ["no"], "yes", "Is snow black?"),
}


def write(root: Path) -> Folders:
    """Write the records, the predictions, and controls of the records of two images."""
    folders = bench.folders_in(root)
    for folder in folders:
        folder.mkdir(parents=True)
    write_record_table(folders.clean / "records", [make_row(root, name, item) for name, item in RECORDS.items()])
    bench.write_json(folders.records / "toy.json", {"reader": "pairs"})
    predictions = {f"toy/{name}": item.prediction for name, item in RECORDS.items()}
    bench.write_json(folders.predictions / "predictions.json", bench.as_file(predictions))
    controls = {f"toy/{name}": "nothing changed" for name, item in RECORDS.items() if item.images == 2}
    controls["toy/0?1"] = "yes"
    for control in ("shuffled", "reversed"):
        bench.write_json(folders.predictions / f"predictions_{control}.json", bench.as_file(controls))
    return folders


def make_row(root: Path, name: str, item: AnsweredRecord) -> dict[str, Any]:
    image_set = name.partition("?")[0]
    images = [paint(root / f"{image_set}_{number}.png", (200, 90, 100 * number)) for number in range(item.images)]
    return {
        "id": f"toy/{name}",
        "image_set": f"toy/{image_set}",
        "dataset": "toy",
        "split": "test",
        "scene": f"toy/{image_set}",
        "images": list_images(*images),
        "history": [{"question": question, "answer": answer} for question, answer in item.history],
        "question": item.question,
        "references": item.references,
        "change_types": [],
        "kind": item.kind,
        "source": "questions.py",
    }
