"""References of another language than English are noticed, since some metrics are for English only."""

from dataclasses import replace

import pytest

from m3diff.scoring.language import is_foreign, note_foreign_references
from m3diff.scoring.metrics import METRICS, choose_metrics

FOREIGN = {
    "German": "Der rote Becher ist weg",
    "French": "la tasse rouge a disparu du bureau",
    "Spanish": "El coche rojo ya no aparece",
    "Dutch": "De rode mok staat niet meer op tafel",
    "Polish": "Czerwony kubek nie stoi na stole",
    "Russian": "Красная кружка исчезла",
    "Korean": "빨간 컵이 사라졌다",
}
ENGLISH = {
    "a sentence": "the red mug is gone",
    "an instruction without function words": "remove man",
    "a name of two words": "Los Angeles is now darker than the mug",
    "a fragment": "one more car on left",
    "no change": "nothing changed",
    "figures": "3 -> 4",
}


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN)
def test_a_caption_of_another_language_is_noticed(text):
    assert is_foreign(text)


@pytest.mark.parametrize("text", ENGLISH.values(), ids=ENGLISH)
def test_an_english_caption_is_not_taken_for_another_language(text):
    assert not is_foreign(text)


def test_the_note_counts_references_and_names_the_metrics_that_are_computed():
    references = ["der Becher ist weg", "the mug is gone", ""]
    (note,) = note_foreign_references("mine", references, choose_metrics(["CIDEr", "METEOR"]))
    assert note.startswith("mine: 1 of 2 references")
    assert "METEOR" in note
    assert "SPICE" not in note


def test_a_sixth_of_the_references_in_another_language_is_noted():
    references = ["the mug is gone"] * 20 + ["der Becher ist weg"] * 4
    (note,) = note_foreign_references("mine", references, choose_metrics(["METEOR"]))
    assert note.startswith("mine: 4 of 24 references")


def test_the_note_names_a_new_metric_that_reads_english_only():
    metrics = choose_metrics(["CIDEr"]) | {"my metric": replace(METRICS["CIDEr"], reads="English")}
    (note,) = note_foreign_references("mine", ["der Becher ist weg"], metrics)
    assert "my metric can only score English" in note


@pytest.mark.parametrize(
    ("references", "metrics"),
    [
        (["der Becher ist weg"], ["CIDEr", "ROUGE-L"]),
        (["the mug is gone"] * 20 + ["der Becher ist weg"], ["METEOR", "SPICE"]),
        (["the mug is gone"], ["METEOR"]),
        ([], ["METEOR"]),
    ],
    ids=["no English metric", "one in twenty", "all English", "no reference"],
)
def test_there_is_no_note_where_english_metrics_read_english(references, metrics):
    assert note_foreign_references("mine", references, choose_metrics(metrics)) == []
