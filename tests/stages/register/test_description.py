"""The description of a registered version: scores, training and commit. Text by hand is not overwritten."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from m3diff.stages.register.description import MODEL_DESCRIPTION, build_description, is_generated, write_description

HEADLINE = {
    "minichange/total": {"BLEU-4": 85.55, "CIDEr": 441.06, "change_type_accuracy": 88.06, "pixel_window_auc": 93.1},
    "own/test": {"CIDEr-char": 12.0},
}
TRAINED = {
    "steps": 1097,
    "settings": {"model": "small", "family": "m3diff", "base": "data/00_base", "seed": 5, "epochs": 2.7},
}
TAGS = {"git.commit": "a" * 40, "git.dirty": "false"}


def test_the_first_line_has_the_main_score_of_each_test_set():
    first_line = build_description(TAGS, HEADLINE, TRAINED).splitlines()[0]
    assert first_line == "CIDEr 441.1 on minichange/total; CIDEr of characters 12.0 on own/test."


def test_the_table_has_a_column_for_each_test_set_and_a_dash_for_what_it_lacks():
    lines = build_description(TAGS, HEADLINE, TRAINED).splitlines()
    assert "| Score, times 100 | minichange/total | own/test |" in lines
    assert "| BLEU-4 | 85.5 | – |" in lines or "| BLEU-4 | 85.6 | – |" in lines
    assert "| type of a single change correct, % | 88.1 | – |" in lines
    assert not [line for line in lines if "pixel" in line]
    assert "|---|---|---|" in lines, "Markdown needs this line below the header"


def test_training_and_commit_are_named():
    text = build_description(TAGS, HEADLINE, TRAINED)
    assert "Model small (family m3diff) on `data/00_base`: 1,097 steps, 2.7 epochs, seed 5." in text
    assert f"Commit `{'a' * 12}`." in text
    edited = build_description(TAGS | {"git.dirty": "true"}, HEADLINE, TRAINED)
    assert "with changes that were not committed" in edited


def test_without_scores_or_a_report_of_the_training_there_is_still_a_text():
    text = build_description({}, {}, {})
    assert text.startswith("No test set was scored.")
    assert is_generated(text)


@pytest.mark.parametrize(
    "change", [lambda text: text + " Mine.", lambda text: f"Mine.\n{text}", lambda text: "Mine.", lambda text: ""]
)
def test_a_text_that_somebody_changed_is_not_a_generated_one(change):
    assert not is_generated(change(build_description(TAGS, HEADLINE, TRAINED)))


class Client:
    """Replaces the calls of MLflow in `write_description`."""

    def __init__(self, of_model: str = "") -> None:
        self.of_model = of_model
        self.written: list[str] = []

    def update_model_version(self, name: str, version: str, description: str) -> None:
        self.written.append(description)

    def get_registered_model(self, name: str) -> Any:
        return SimpleNamespace(description=self.of_model)

    def update_registered_model(self, name: str, description: str) -> None:
        self.of_model = description


def described(client: Client, folder: Path, description: str) -> list[str]:
    version: Any = SimpleNamespace(name="m", version="1", description=description, tags=TAGS)
    (folder / "headline.json").write_text(json.dumps(HEADLINE))
    (folder / "report.json").write_text(json.dumps(TRAINED))
    write_description(client, version, folder, folder)  # type: ignore[arg-type]
    return client.written


def test_a_new_version_and_a_model_without_a_description_get_one(tmp_path):
    client = Client()
    (written,) = described(client, tmp_path, "")
    assert written == build_description(TAGS, HEADLINE, TRAINED)
    assert client.of_model == MODEL_DESCRIPTION


def test_without_the_reports_of_the_stages_a_description_is_written_all_the_same(tmp_path):
    version: Any = SimpleNamespace(name="m", version="1", description=None, tags=TAGS)
    client = Client()
    write_description(client, version, tmp_path, tmp_path)  # type: ignore[arg-type]
    assert client.written == [build_description(TAGS, {}, {})]


def test_new_scores_replace_an_untouched_text_and_equal_ones_write_nothing(tmp_path):
    assert len(described(Client(), tmp_path, build_description(TAGS, {"x": {"CIDEr": 1.0}}, TRAINED))) == 1
    assert described(Client(), tmp_path, build_description(TAGS, HEADLINE, TRAINED)) == []


def test_a_persons_text_stays(tmp_path):
    client = Client(of_model="Our model.")
    assert described(client, tmp_path, "Do not use.") == []
    assert client.of_model == "Our model."
