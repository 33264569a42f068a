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
LEVEL = r"references: 7 pairs, the benchmark has 5\. .* has 7 records: this is the record level"
LAST = r"references: 7 of 10: .* several records the last one overwrote the others"
EMPTY = r"references: 4 pairs, the benchmark has 5: the 1 pairs of which every reference is empty were dropped"
JOINED = r"references: 5 of 10: joined text, one reference a pair; under 'single-change'"
UNCUT = r"references: untruncated, 1 have more than 60 words and the longest 103; 'multi-change' cuts"
TRAPS = {
    "record level": (traps.record_level, "single-change", (2.778428, 0.506550), LEVEL),
    "last record wins": (traps.last_record_wins, "single-change", (1.628600, 0.357535), LAST),
    "empties dropped": (traps.empties_dropped, "single-change", (3.395036, 0.709857), EMPTY),
    "joined text": (traps.joined_text, "single-change", (1.562938, 0.047324), JOINED),
    "untruncated multi-change": (traps.joined_text, "multi-change", (1.562938, 0.047324), UNCUT),
}


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    monkeypatch.setitem(DATASETS, "spot_the_diff", traps.small_spec())
    return traps.write_data(tmp_path / "spot")


@pytest.fixture
def run(data, tmp_path) -> Callable[..., ScoreReport]:
    """Score these captions, against the data or a file of references."""

    def run(captions, references=None, **options) -> ScoreReport:
        rows = traps.results(captions) if isinstance(captions, dict) else captions
        predictions = traps.write(tmp_path / "predictions.json", rows)
        if references is not None:
            options["references"] = traps.write(tmp_path / "references.json", traps.coco(references))
        return score(predictions, "spot_the_diff", **options)

    return run


def numbers(report: ScoreReport) -> tuple[float | None, float | None]:
    return report.scores["CIDEr"], report.scores["BLEU-4"]


def test_the_right_protocol_gives_the_right_number_from_the_data_and_from_a_coco_file(run, data):
    for report in (run(traps.CAPTIONS, data=data), run(traps.CAPTIONS, references=traps.merged())):
        assert numbers(report) == pytest.approx((CIDER, BLEU_4), abs=1e-6)
        assert (report.pairs, report.published_pairs, report.references, report.faults) == (5, 5, 10, [])
    report = run(traps.CAPTIONS, data=data, protocol="multi-change")  # joins the sentences, and cuts after 60 words
    assert numbers(report) == pytest.approx((1.544967, 0.107847), abs=1e-6)
    assert report.references == 5


@pytest.mark.parametrize("trap", TRAPS)
def test_a_wrong_protocol_is_named_and_gives_its_own_number(run, data, trap):
    make, protocol, wanted, named = TRAPS[trap]
    references, captions = make()
    with pytest.raises(DataError, match=named) as refused:
        run(captions, references=references, protocol=protocol)
    assert "--allow-faults" in str(refused.value)
    report = run(captions, references=references, protocol=protocol, allow_faults=True)
    assert numbers(report) == pytest.approx(wanted, abs=1e-6)
    assert abs(wanted[0] - CIDER) > 0.01
    assert any(fault in str(refused.value) for fault in report.faults)
    if protocol == "single-change":  # the data itself tells the same
        with pytest.raises(DataError, match=named):
            run(captions, references=references, protocol=protocol, data=data)


def test_captions_of_the_record_level_or_without_the_empty_pairs_are_named_against_the_right_references(run, data):
    rows = [{"image_id": name, "caption": traps.CAPTIONS[name]} for name, _ in traps.RECORDS]
    for captions, named in (
        (traps.record_level()[1], r"p.*json: 7 of 7 ids are unknown: '0', .*; valid .* record level"),
        (rows, r"7 captions for 5 ids: '11.png' has 2\. .* this is the record level"),
        (rows[:6], r"6 captions for 5 ids: '11.png' has 2; keep one"),
        (traps.empties_dropped()[1], r"no caption for '13.png', the 1 pairs of which every reference is empty"),
    ):
        with pytest.raises(DataError, match=named):
            run(captions, data=data)
    report = run(traps.empties_dropped()[1], data=data, allow_faults=True)
    assert (report.pairs, report.published_pairs, len(report.faults)) == (4, 5, 2)
    assert report.scores["CIDEr"] == pytest.approx(3.395036, abs=1e-6)


def test_references_that_are_not_joined_and_fewer_pairs_than_papers_score_are_refused(run, data, monkeypatch):
    with pytest.raises(DataError, match=r"3 pairs have several; under 'multi-change' all sentences of a pair are one"):
        run(traps.CAPTIONS, references=traps.merged(), protocol="multi-change")
    monkeypatch.undo()  # the real benchmark has 1,270
    with pytest.raises(DataError, match=r"5 pairs are scored, papers score 1,270"):
        run(traps.CAPTIONS, data=data)
