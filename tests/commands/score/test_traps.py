"""Each wrong protocol gives a number of its own, and is named: without that nobody would see it.

The numbers are those of stock pycocoevalcap on the tokens of these texts.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from m3diff.commands.score import ScoreReport, score
from m3diff.datasets import DATASETS
from m3diff.records.errors import DataError
from tests.commands.score import traps

CIDER, BLEU_4 = 2.717544, 0.659294

TRAPS = [
    (
        "record level",
        traps.record_level,
        "single-change",
        (2.778428, 0.506550),
        r"references: 7 pairs, the benchmark has 5\. .* has 7 records: this is the record level",
    ),
    (
        "last record wins",
        traps.last_record_wins,
        "single-change",
        (1.628600, 0.357535),
        r"references: 7 of 10: .* several records the last one overwrote the others",
    ),
    (
        "empties dropped",
        traps.empties_dropped,
        "single-change",
        (3.395036, 0.709857),
        r"references: 4 pairs, the benchmark has 5: the 1 pairs of which every reference is empty were dropped",
    ),
    (
        "joined text",
        traps.joined_text,
        "single-change",
        (1.562938, 0.047324),
        r"references: 5 of 10: joined text, one reference a pair; under 'single-change'",
    ),
    (
        "untruncated multi-change",
        traps.joined_text,
        "multi-change",
        (1.562938, 0.047324),
        r"references: untruncated, 1 have more than 60 words and the longest 103; 'multi-change' cuts",
    ),
]


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    monkeypatch.setitem(DATASETS, "spot_the_diff", traps.small_spec())
    return traps.write_data(tmp_path / "spot")


@pytest.fixture
def run(data, tmp_path) -> Callable[..., ScoreReport]:
    """Score these captions, against the data or a file of references."""

    def run(captions, references=None, **options) -> ScoreReport:
        predictions = traps.write(tmp_path / "predictions.json", traps.results(captions))
        if references is not None:
            options["references"] = traps.write(tmp_path / "references.json", traps.coco(references))
        return score(predictions, "spot_the_diff", **options)

    return run


def test_the_right_protocol_gives_the_right_number_from_the_data_and_from_a_coco_file(run, data):
    for report in (run(traps.CAPTIONS, data=data), run(traps.CAPTIONS, references=traps.merged())):
        assert report.scores["CIDEr"] == pytest.approx(CIDER, abs=1e-6)
        assert report.scores["BLEU-4"] == pytest.approx(BLEU_4, abs=1e-6)
        assert (report.pairs, report.published_pairs, report.references) == (5, 5, 10)
        assert report.faults == []


def test_multi_change_joins_the_sentences_of_a_pair_and_cuts_them_after_60_words(run, data):
    report = run(traps.CAPTIONS, data=data, protocol="multi-change")
    assert report.scores["CIDEr"] == pytest.approx(1.544967, abs=1e-6)
    assert report.scores["BLEU-4"] == pytest.approx(0.107847, abs=1e-6)
    assert report.references == 5


@pytest.mark.parametrize(("trap", "make", "protocol", "numbers", "named"), TRAPS, ids=[trap[0] for trap in TRAPS])
def test_a_wrong_protocol_is_named_and_gives_its_own_number(run, trap, make, protocol, numbers, named):
    references, captions = make()
    with pytest.raises(DataError, match=named) as refused:
        run(captions, references=references, protocol=protocol)
    assert "--allow-faults" in str(refused.value)
    report = run(captions, references=references, protocol=protocol, allow_faults=True)
    assert (report.scores["CIDEr"], report.scores["BLEU-4"]) == pytest.approx(numbers, abs=1e-6)
    assert abs(numbers[0] - CIDER) > 0.01
    assert any(fault in str(refused.value) for fault in report.faults)


@pytest.mark.parametrize("trap", TRAPS[:4], ids=[trap[0] for trap in TRAPS[:4]])
def test_the_data_itself_tells_the_same_of_a_file_of_references(run, data, trap):
    references, captions = trap[1]()
    with pytest.raises(DataError, match=trap[4]):
        run(captions, references=references, protocol=trap[2], data=data)


def test_captions_at_record_level_are_named_against_the_right_references(run, data):
    with pytest.raises(DataError, match=r"p.*json: 7 of 7 ids are unknown: '0', .*; valid .* record level"):
        run(traps.record_level()[1], data=data)


def test_a_caption_for_every_record_of_a_pair_is_the_record_level(data, tmp_path):
    rows = [{"image_id": name, "caption": traps.CAPTIONS[name]} for name, _ in traps.RECORDS]
    predictions = traps.write(tmp_path / "p.json", rows)
    with pytest.raises(DataError, match=r"7 captions for 5 ids: '11.png' has 2\. .* this is the record level"):
        score(predictions, "spot_the_diff", data=data)
    with pytest.raises(DataError, match=r"6 captions for 5 ids: '11.png' has 2; a dictionary would have kept the last"):
        score(traps.write(predictions, rows[:6]), "spot_the_diff", data=data)


def test_dropped_empties_are_named_where_the_captions_lack_them(run, data):
    captions = traps.empties_dropped()[1]
    with pytest.raises(DataError, match=r"no caption for '13.png', the 1 pairs of which every reference is empty"):
        run(captions, data=data)
    report = run(captions, data=data, allow_faults=True)
    assert (report.pairs, report.published_pairs, len(report.faults)) == (4, 5, 2)
    assert report.scores["CIDEr"] == pytest.approx(3.395036, abs=1e-6)


def test_references_that_are_not_joined_are_no_multi_change_setting(run):
    with pytest.raises(DataError, match=r"3 pairs have several; under 'multi-change' all sentences of a pair are one"):
        run(traps.CAPTIONS, references=traps.merged(), protocol="multi-change")


def test_fewer_pairs_than_papers_score_are_refused(data, tmp_path, monkeypatch):
    monkeypatch.undo()  # the real benchmark has 1,270
    predictions = traps.write(tmp_path / "p.json", traps.results(traps.CAPTIONS))
    with pytest.raises(DataError, match=r"5 pairs are scored, papers score 1,270"):
        score(predictions, "spot_the_diff", data=data)
