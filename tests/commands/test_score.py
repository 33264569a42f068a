"""`m3diff score`: files as users bring them, each wrong protocol named beside its own number, the printed report."""

import json
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.__main__ import DATA_REFUSED, TRY_AGAIN, main
from m3diff.commands.score import find_computable_metrics, score
from m3diff.commands.score.matching import MatchedPairs, find_caption_faults, find_pairs, match_captions
from m3diff.commands.score.predictions import read_predictions
from m3diff.commands.score.references import References, find_reference_columns, find_references, make_bare_pair
from m3diff.commands.score.report import ScoreReport
from m3diff.commands.score.task import ScoringTask, find_counts, find_task
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Protocol, Published, SplitCount
from m3diff.records.errors import DataError, Fault, ParamsError
from m3diff.records.tables import write_table
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.grammar import Grammar
from m3diff.scoring.metrics import METRICS, Metric, MetricScores
from m3diff.scoring.metrics.java import JavaMissing
from m3diff.scoring.metrics.spice import check_spice
from m3diff.scoring.published import published_rows
from tests.errors import Message, raises
from tests.layouts import run_ingest, write_clevr, write_json, write_record_table
from tests.scoring import questions
from tests.scoring.bench import GRAMMAR, PUBLISHED, REAL, fake_java, needs_real


def write(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def coco(references: Mapping[str, list[str]]) -> dict[str, Any]:
    annotations = [{"image_id": name, "caption": text} for name, texts in references.items() for text in texts]
    return {"images": [{"id": name} for name in references], "annotations": annotations}


ROWS = [("000256.png", "a man, in red, left"), ("9", 'the sign says "open"')]
COCO = [{"image_id": name, "caption": caption} for name, caption in ROWS]
CSV = '000256.png,"a man, in red, left"\n9,"the sign says ""open"""\n'
SHAPES = {
    "coco.json": COCO,
    "integers.json": [COCO[0], {"image_id": 9, "caption": ROWS[1][1]}],
    "other_names.json": [{"filename": name, "x": 1, "prediction": caption} for name, caption in ROWS],
    "mapping.json": dict(ROWS),
    "lists.json": {name: [caption] for name, caption in ROWS},
    "lines.jsonl": "\n".join(map(json.dumps, COCO)) + "\n\n",
    "bom.json": "\ufeff" + json.dumps(COCO),
    "header.csv": "image_id,caption\n" + CSV,
    "turned.csv": "score,caption,uid\n" + '1,"a man, in red, left",000256.png\n0,"the sign says ""open""",9\n',
    "header.tsv": 'image_id\tcaption\n000256.png\ta man, in red, left\n9\t"the sign says ""open"""\n',
    "wrapped.json": {"model": "m", "results": COCO},
    "wrapped_mapping.json": {"predictions": dict(ROWS)},
    "pycocoevalcap.json": {name: [{"caption": caption}] for name, caption in ROWS},
    "batch.json": [{"id": "batch_1", "custom_id": name, "prediction": caption} for name, caption in ROWS],
    "with_references.json": [{"id": name, "pred": caption, "gts": ["gold"]} for name, caption in ROWS],
    "references.json": [{"caption": "gold", "prediction": caption, "image_id": name} for name, caption in ROWS],
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_usual_shape_is_read(name, tmp_path):
    assert read_predictions(write(tmp_path / name, SHAPES[name])).captions == ROWS


def test_a_column_of_ids_that_also_names_images_in_two_folders_is_that_of_the_ids(tmp_path):
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.png").touch()
    table = write(tmp_path / "references.csv", "image_id,number,caption\n1,1,it fell\n")
    assert find_reference_columns(table).ids == "image_id"


@pytest.mark.parametrize("caption", [{"caption": "it fell"}, [{"caption": "it fell"}]], ids=["object", "list"])
def test_a_single_caption_is_not_taken_for_an_object_that_wraps_captions(caption, tmp_path):
    assert read_predictions(write(tmp_path / "a.json", {"7": caption})).captions == [("7", "it fell")]


def test_two_lists_of_objects_with_ids_are_refused(tmp_path):
    with raises(DataError, "score.no_text", field="value"):
        read_predictions(write(tmp_path / "a.json", coco({"7": ["it fell"]})))


NO_TEXT = [
    ("a.json", '{"1": null}', "a.json, 1", "value", "null"),
    ("a.json", '{"1": ["the", "cube"]}', "a.json, 1", "value", "a list ['the', 'cube']"),
    ("a.json", '[{"image_id": true, "caption": "x"}]', "a.json, record 0", "image_id", "true"),
    ("a.json", '[{"image_id": 3.0, "caption": "x"}]', "a.json, record 0", "image_id", "a number 3.0"),
]
NO_FIELD = [
    ("a.json", '[{"image_id": 1}]', "a.json, record 0", "prediction", "an object {'image_id': 1}"),
    ("a.json", '[{"code": 1, "caption": ""}]', "a.json, record 0", "image_id", "an object {'code': 1, 'caption': ''}"),
    ("a.json", '["x"]', "a.json, record 0", "image_id", "text 'x'"),
    ("a.jsonl", '{"id": 1, "caption": "x"}\n{"id": 2}', "a.jsonl, line 2", "prediction", "an object {'id': 2}"),
]


@pytest.mark.parametrize(("name", "content", "location", "field", "value"), NO_TEXT)
def test_a_field_that_holds_no_text_is_named_with_its_place(name, content, location, field, value, tmp_path):
    with raises(DataError, "score.no_text", path=str(tmp_path / location), field=field, value=value):
        read_predictions(write(tmp_path / name, content))


@pytest.mark.parametrize(("name", "content", "location", "field", "value"), NO_FIELD)
def test_a_row_without_an_id_or_a_caption_is_named_with_its_place(name, content, location, field, value, tmp_path):
    with raises(DataError, "score.no_field", path=str(tmp_path / location), field=field, value=value):
        read_predictions(write(tmp_path / name, content))


@pytest.mark.parametrize(
    ("name", "content", "code", "location"),
    [
        ("a.json", "", "datasets.empty_file", "a.json"),
        ("a.json", '[{"image_id": 1, "caption": "x"', "datasets.invalid_json", "a.json"),
        ("a.json", '{"1": "x", "1": "z"}', "datasets.repeated_json_key", "a.json"),
        ("a.csv", "image_id,caption\n1,a,b\n", "datasets.wrong_number_of_fields", "a.csv, line 2"),
    ],
    ids=["an empty file", "truncated", "an id twice", "a field too many"],
)
def test_a_file_that_cannot_be_parsed_is_named_with_the_place(name, content, code, location, tmp_path):
    with raises(DataError, code) as refused:
        read_predictions(write(tmp_path / name, content))
    assert str(refused.value.fields["path"]) == str(tmp_path / location)


def test_a_file_without_rows_holds_no_caption(tmp_path):
    file = write(tmp_path / "a.json", "[]")
    with raises(DataError, "score.no_caption", path=file):
        read_predictions(file)


@pytest.mark.parametrize(
    ("content", "kind", "expected", "columns"),
    [
        (
            "Bild;Text\n1;a\n",
            "ids",
            "image_id",
            Fault("score.columns_at_delimiter", names=["Bild", "Text"], delimiter=";"),
        ),
        ("id,Text\n1,a\n", "captions", "prediction", Fault("score.columns", names=["id", "Text"])),
    ],
    ids=["no ids, other delimiter", "no captions"],
)
def test_a_table_without_ids_or_captions_is_refused_with_its_columns(content, kind, expected, columns, tmp_path):
    file = write(tmp_path / "a.csv", content)
    with raises(DataError, "score.no_column", path=file, kind=kind, expected=expected, columns=columns):
        read_predictions(file)


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("Image ID;Caption", "7;it fell"),
        ("image;ID;caption", "7;1;it fell"),
        ("id;Prediction;caption", "7;it fell;gold"),
        ("id;VALUE;Caption", "7;x;it fell"),
    ],
    ids=[
        "other spelling",
        "a numbering beside the image",
        "a prediction beside a reference",
        "a caption beside a value",
    ],
)
def test_columns_of_a_table_are_found_in_any_spelling_and_never_a_reference(header, row, tmp_path):
    table = write(tmp_path / "a.csv", f"{header}\n{row}\n")
    assert read_predictions(table).captions == [("7", "it fell")]


def task(dataset: str = "own", counts: SplitCount | None = None) -> ScoringTask:
    return ScoringTask(dataset, Protocol("test", published_pairs=None), counts=counts)


def test_ids_are_the_same_in_any_unicode_form():
    for id_form, name_form in (("NFC", "NFD"), ("NFD", "NFC")):
        pair_id, pair_name = (unicodedata.normalize(name, "Köln_1é.png") for name in (id_form, name_form))
        assert match_captions(Path("p"), [(pair_id, "x")], [pair_name], task()) == {pair_name: "x"}
        with raises(DataError, "score.ids_repeated", value=2, total=1, name=pair_name):
            match_captions(Path("p"), [(pair_id, "x"), (pair_name, "y")], [pair_name], task())


@pytest.mark.parametrize(
    ("pair_id", "pair_name"),
    [
        ("235.png", "235.png"),
        ("235", "235.png"),
        ("000235.png", "235.png"),
        ("spot_the_diff/235.png", "235.png"),
        ("resized_images/235.PNG", "235.png"),
        ("images\\235.png", "235.png"),
        ("123", "000123.png"),
        ("000123.png_n", "000123.png_n"),
        ("123_n", "000123.png_n"),
        ("CLEVR_semantic_000123.png", "000123.png"),
        ("CLEVR_nonsemantic_000123.png", "000123.png_n"),
        ("Reddit_1052", "Reddit_1052"),
        ("13985343.jpg_24.jpg", "13985343_24"),
    ],
)
def test_an_id_is_known_as_the_benchmark_s_authors_write_it(pair_id, pair_name):
    ids = ["235.png", "000123.png", "000123.png_n", "Reddit_1052", "13985343_24"]
    assert match_captions(Path("p"), [(pair_id, "x")], ids, task("spot_the_diff")) == {pair_name: "x"}
    captions = [(pair_id, "x"), (pair_name, "y")]
    with raises(DataError, "score.ids_repeated", value=2, total=1, name=pair_name, times=2, levels=[]):
        match_captions(Path("p"), captions, ids, task("spot_the_diff"))


def test_what_two_ids_could_mean_is_unknown_unless_written_in_full():
    captions = [("own/a/1.png", "x"), ("1", "y")]
    assert match_captions(Path("p"), captions, ["a/1.png", "b/1.png"], task()) == {"a/1.png": "x", "1": "y"}


def faults(ids: str, **counts: int) -> list[Fault]:
    """Of captions of these ids, a letter or digit each, for the pairs 0 to 4."""
    captions = [(name, "x") for name in ids]
    pairs = {str(n): make_bare_pair(task(), str(n), ["a"], []) for n in range(5)}
    published_counts = SplitCount(len(pairs), **counts)
    return find_caption_faults(
        match_captions(Path("p"), captions, pairs, task(counts=published_counts)), pairs, pairs, published_counts
    )


OF_IMAGES = Fault("score.level_of_images", value=4)


def test_missing_ids_are_listed():
    (missing,) = faults("012", image_pairs=4)
    assert missing.code == "score.ids_missing"
    assert missing.fields["names"] == ["3", "4"]
    assert missing.fields["total"] == 5


def test_all_ids_have_no_fault_whatever_the_other_levels():
    assert faults("01234", records=6, image_pairs=4) == []


def test_captions_of_pairs_outside_the_protocol_have_no_fault_whatever_their_number():
    pairs = {str(number): make_bare_pair(task(), str(number), ["a"], []) for number in range(5)}
    protocol_pairs = {name: pairs[name] for name in "012"}
    captions = dict.fromkeys(pairs, "x")
    assert find_caption_faults(captions, pairs, protocol_pairs, SplitCount(3, records=5)) == []


def test_as_many_ids_as_pairs_of_images_are_named_so():
    missing, level = faults("0123", image_pairs=4)
    assert missing.fields["names"] == ["4"]
    assert level == OF_IMAGES


def test_unknown_ids_are_listed_beside_valid_ones_and_their_level():
    unknown, missing, level = faults("abcd", image_pairs=4)
    assert unknown.code == "score.ids_unknown"
    assert unknown.fields["names"] == ["a", "b", "c", "d"]
    assert unknown.fields["total"] == 4
    assert unknown.fields["valid"].startswith("'0', '1'")
    assert missing.fields["value"] == 5
    assert level == OF_IMAGES


def test_as_many_unknown_ids_as_records_are_named_so():
    unknown, _, level = faults("abcdef", records=6)
    assert unknown.fields["value"] == 6
    assert level == Fault("score.level_of_records", value=6)


# Each wrong protocol gives a number of its own, and is named: a Spot-the-Diff of five pairs in seven records, one pair
# without a word. The numbers are those of stock pycocoevalcap on the tokens of these texts.

LONG = " ".join(["the grey van that stood beside the gate has been driven away from the long wall"] * 2)
RECORDS: list[tuple[str, list[str]]] = [
    ("11", ["the red car is gone from the street", "a man in a dark coat has appeared"]),
    ("12", ["the white van moved to the left side"]),
    ("13", [""]),
    ("14", [LONG, f"{LONG} and {LONG}", "two people walk past the shop"]),
    ("11", ["the small red car left the street"]),
    ("15", ["the door of the shop is open now"]),
    ("12", ["a van was parked near the shop"]),
]
CAPTIONS = {
    "11": "the red car is gone from the street",
    "12": "the white van moved to the right side",
    "13": "there is no difference",
    "14": "the grey van has been driven away and two people walk past the shop",
    "15": "the door of the house is open",
}
MERGED: dict[str, list[str]] = {name: [] for name in CAPTIONS}
for record_name, sentences in RECORDS:
    MERGED[record_name] += sentences
WORDED = {name: texts for name, texts in MERGED.items() if texts != [""]}
JOINED = {name: [". ".join(texts)] for name, texts in MERGED.items()}
OF_RECORDS = {str(number): CAPTIONS[name] for number, (name, _) in enumerate(RECORDS)}
OF_WORDED = {name: CAPTIONS[name] for name in WORDED}
CIDER = 2.717544
BLEU_4 = 0.659294
TRAPS = [
    (
        ({str(number): texts for number, (_, texts) in enumerate(RECORDS)}, OF_RECORDS),
        ("single-change", (2.778428, 0.506550)),
        [
            Fault("score.references_of_other_pairs", key="references", value=7, expected=5),
            Fault("score.level_of_records", key="references", value=7),
        ],
    ),
    (
        (dict(RECORDS), CAPTIONS),
        ("single-change", (1.628600, 0.357535)),
        [Fault("score.references_overwritten", key="references", value=7, expected=10, protocol="single-change")],
    ),
    (
        (WORDED, OF_WORDED),
        ("single-change", (3.395036, 0.709857)),
        [Fault("score.references_without_wordless", key="references", value=4, expected=5, wordless=1)],
    ),
    (
        (JOINED, CAPTIONS),
        ("single-change", (1.562938, 0.047324)),
        [Fault("score.references_joined", key="references", value=5, expected=10, protocol="single-change")],
    ),
    (
        (JOINED, CAPTIONS),
        ("multi-change", (1.562938, 0.047324)),
        [Fault("score.references_not_cut", key="references", value=103, limit=60, protocol="multi-change")],
    ),
]


def leave_meteor_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `score` skip METEOR, whose program is slow to start."""
    # not delitem, which would put METEOR at the end of the list afterwards
    monkeypatch.setattr(METRICS, "data", {name: entry for name, entry in METRICS.data.items() if name != "METEOR"})


@pytest.fixture
def spot(tmp_path, monkeypatch) -> Path:
    """The dataset's own folder, as if papers scored these five pairs, without METEOR."""
    leave_meteor_out(monkeypatch)
    real = DATASETS["spot_the_diff"]
    counts = SplitCount(5, 10, empty=1, wordless=1, records=7)
    published = Published("spot_the_diff", "Spot-the-Diff", SplitCount(0), SplitCount(0), counts)
    protocols = tuple(replace(protocol, published_pairs=5) for protocol in real.protocols)
    spec: DatasetSpec = replace(real, published=(published,), protocols=protocols)
    monkeypatch.setitem(DATASETS.data, "spot_the_diff", spec)
    (tmp_path / "spot/annotations").mkdir(parents=True)
    records = [{"img_id": name, "sentences": sentences} for name, sentences in RECORDS]
    for split, rows in (("train", []), ("val", []), ("test", records)):
        write(tmp_path / f"spot/annotations/{split}.json", rows)
    return tmp_path / "spot"


@pytest.fixture
def run(spot, tmp_path) -> Callable[..., ScoreReport]:
    def run(captions, references=None, **options) -> ScoreReport:
        predictions = write(tmp_path / "predictions.json", captions)
        if references is not None:
            options["references"] = write(tmp_path / "references.json", coco(references))
        return score(predictions, "spot_the_diff", **options)

    return run


def numbers(report: ScoreReport) -> tuple[float | None, float | None]:
    return report.scores["CIDEr"], report.scores["BLEU-4"]


@pytest.mark.parametrize("source", ["data", "references"])
def test_the_right_protocol_gives_the_right_number(source, run, spot):
    report = run(CAPTIONS, data=spot) if source == "data" else run(CAPTIONS, references=MERGED)
    assert numbers(report) == pytest.approx((CIDER, BLEU_4), abs=1e-6)
    assert report.pairs == 5
    assert report.published_pairs == 5
    assert report.references == 10
    assert report.faults == []


def test_another_protocol_joins_the_sentences_and_cuts_them(run, spot):
    report = run(CAPTIONS, data=spot, protocol="multi-change")
    assert numbers(report) == pytest.approx((1.544967, 0.107847), abs=1e-6)
    assert report.references == 5


def test_the_report_has_the_published_rows_of_its_protocol(run, spot):
    multi_change = run(CAPTIONS, data=spot, protocol="multi-change").published
    headline = run(CAPTIONS, data=spot).published
    assert multi_change == [row._asdict() for row in published_rows("spot_the_diff/multi-change")]
    assert len(headline) == len(published_rows("spot_the_diff"))
    assert len(headline) > len(multi_change)


def test_ids_in_another_spelling_and_empty_captions_are_noted(run, spot):
    notes = run(CAPTIONS | {"13": " "}, data=spot).notes
    assert len(notes) == 2
    assert "'11.png'" in notes[0]
    assert "empty" in notes[1]


def test_equal_references_of_all_pairs_are_noted_beside_their_cider_of_0(run):
    captions = dict.fromkeys(("1", "2"), "a car left")
    report = run(captions, references={name: [text] for name, text in captions.items()}, allow_faults=True)
    assert report.scores["CIDEr"] == 0
    assert "CIDEr is 0" in report.notes[0]


@pytest.mark.parametrize(
    ("files", "expected", "first_faults"),
    TRAPS,
    ids=["record level", "last record wins", "empties dropped", "joined text", "untruncated multi-change"],
)
def test_a_wrong_protocol_is_named_and_gives_its_own_number(run, files, expected, first_faults):
    (references, captions) = files
    (protocol, expected_scores) = expected
    with raises(DataError, "score.faults_not_allowed", dataset="spot_the_diff", protocol=protocol) as refused:
        run(captions, references=references, protocol=protocol)
    faults = refused.value.fields["faults"]
    assert faults[: len(first_faults)] == first_faults
    report = run(captions, references=references, protocol=protocol, allow_faults=True)
    assert numbers(report) == pytest.approx(expected_scores, abs=1e-6)
    assert abs(expected_scores[0] - CIDER) > 0.01
    assert report.faults == [str(fault) for fault in faults]


ROWS_OF_RECORDS = [{"image_id": name, "caption": CAPTIONS[name]} for name, _ in RECORDS]


RECORD_LEVEL = Fault("score.level_of_records", value=7)


def test_captions_keyed_by_numbers_of_records_are_refused(run, spot):
    with raises(DataError, "score.faults_not_allowed") as refused:
        run(OF_RECORDS, data=spot)
    unknown, _, level, *_ = refused.value.fields["faults"]
    assert unknown.code == "score.ids_unknown"
    assert unknown.fields["value"] == unknown.fields["total"] == 7
    assert level == RECORD_LEVEL


@pytest.mark.parametrize(
    ("rows", "levels"),
    [(ROWS_OF_RECORDS, [RECORD_LEVEL]), (ROWS_OF_RECORDS[:6], [])],
    ids=["all records", "some records"],
)
def test_several_captions_of_a_pair_are_refused_with_their_level(rows, levels, run, spot):
    with raises(DataError, "score.ids_repeated", value=len(rows), total=5, name="11.png", times=2, levels=levels):
        run(rows, data=spot)


def test_captions_without_the_wordless_pairs_are_refused(run, spot):
    with raises(DataError, "score.faults_not_allowed") as refused:
        run(OF_WORDED, data=spot)
    wordless = refused.value.fields["faults"][0]
    assert wordless.code == "score.wordless_pairs_missing"
    assert wordless.fields["names"] == ["13.png"]
    assert wordless.fields["total"] == 5


def test_captions_without_the_wordless_pairs_can_be_scored_all_the_same(run, spot):
    report = run(OF_WORDED, data=spot, allow_faults=True)
    assert report.pairs == 4
    assert report.published_pairs == 5
    assert len(report.faults) == 2
    assert report.scores["CIDEr"] == pytest.approx(3.395036, abs=1e-6)


def test_references_that_are_not_joined_are_refused(run):
    with raises(DataError, "score.faults_not_allowed") as refused:
        run(CAPTIONS, references=MERGED, protocol="multi-change")
    assert refused.value.fields["faults"] == [
        Fault("score.references_not_joined", key="references", value=10, pairs=5, protocol="multi-change")
    ]


def test_fewer_pairs_than_papers_score_are_refused(run, spot, monkeypatch):
    monkeypatch.undo()  # the real benchmark has 1,270 pairs
    with raises(DataError, "score.faults_not_allowed") as refused:
        run(CAPTIONS, data=spot)
    assert refused.value.fields["faults"] == [Fault("score.other_number_of_pairs", value=5, expected=1270)]


def test_a_test_row_of_a_benchmark_that_cannot_be_read_is_a_fault(spot):
    file = spot / "annotations/test.json"
    rows = json.loads(file.read_text())
    write(file, [*rows, {"img_id": "16", "sentences": "one text"}, {"img_id": 17}])
    write(spot / "annotations/train.json", [{"img_id": 18}])
    references = find_references(find_task("spot_the_diff", None, None), None, spot)
    assert list(references.pairs) == [f"{name}.png" for name in CAPTIONS]
    locations = [fault.fields["path"] for fault in references.faults]
    assert [fault.code for fault in references.faults] == ["score.dataset_row_unusable"] * 2
    assert locations == [f"{spot}: annotations/test.json, record {number}" for number in (7, 8)]


def test_a_benchmark_without_a_pair_of_the_protocol_is_refused(tmp_path):
    predictions = write(tmp_path / "p.json", CAPTIONS)
    with raises(DataError, "score.no_pair_of_protocol", key="own", protocol="test"):
        find_pairs(predictions, task("own"), References({}), allow_faults=True)


def test_captions_of_no_pair_of_the_protocol_are_refused_even_with_faults_allowed(tmp_path):
    predictions = write(tmp_path / "p.json", {"9": "it fell"})
    references = References({"1": make_bare_pair(task("own"), "1", ["it rains"], [])})
    with raises(DataError, "score.no_caption_of_protocol", path=predictions, protocol="test"):
        find_pairs(predictions, task("own"), references, allow_faults=True)


CLEVR = {"000001.png": "it became red", "000012.png": "the cube turned red"}
DISTRACTORS = {f"{name}_n": "nothing has changed" for name in CLEVR}


@needs_real
@pytest.mark.slow
def test_the_published_scores_of_coco_captions_are_printed(capsys, monkeypatch):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Duser.language=de")  # a German comma once broke METEOR
    files = [str(next((REAL / "coco_caption").glob(name))) for name in ("*fakecap_results.json", "*val2014.json")]
    assert main(["score", files[0], "--references", files[1], "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {name: round(value, 4) for name, value in report["scores"].items()} == PUBLISHED
    assert report["pairs"] == 1_000
    assert report["published_pairs"] is None
    assert report["faults"] == []


@pytest.fixture
def clevr(monkeypatch, tmp_path) -> Path:
    """The folder of CLEVR-Change; benchmarks of a few pairs, scored by what is quick."""
    leave_meteor_out(monkeypatch)
    for name in ("clevr_change", "clevr_dc", "minichange"):
        spec = DATASETS[name]
        protocols = tuple(replace(protocol, published_pairs=None) for protocol in spec.protocols)
        published = tuple(replace(part, part=name) for part in spec.published)
        monkeypatch.setitem(DATASETS.data, name, replace(spec, protocols=protocols, published=published))
    return write_clevr(tmp_path / "raw")


@pytest.mark.parametrize(("protocol", "pairs"), [("total", 4), ("semantic", 2), ("color", 2)])
def test_a_protocol_takes_its_pairs_from_captions_of_all(protocol, pairs, clevr, tmp_path):
    predictions = write(tmp_path / "p.json", CLEVR | DISTRACTORS)
    assert score(predictions, "clevr_change", protocol, data=clevr).pairs == pairs


def test_a_protocol_of_some_pairs_notes_the_captions_that_it_leaves_out(clevr, tmp_path):
    predictions = write(tmp_path / "p.json", CLEVR | DISTRACTORS)
    total = score(predictions, "clevr_change", "total", data=clevr)
    semantic = score(predictions, "clevr_change", "semantic", data=clevr)
    (note,) = semantic.notes
    assert note.startswith("2 ")
    assert "'semantic'" in note
    assert semantic.scores["CIDEr"] != total.scores["CIDEr"]


@pytest.mark.parametrize(
    ("fields", "is_computed"),
    [
        ({}, True),
        ({"reads": "English"}, True),
        ({"extra_input": "images"}, False),
        ({"extra_input": "judge"}, False),
        ({"extra_input": "spice_dir"}, False),
        ({"needs_grammar": True}, False),
    ],
)
def test_a_new_metric_is_computed_if_captions_are_all_that_it_needs(fields, is_computed, monkeypatch):
    metric = Metric(lambda pairs, groups, inputs: MetricScores({}, {}), "new", ("new",), **fields)
    monkeypatch.setitem(METRICS.data, "new", metric)
    computed_names = list(find_computable_metrics(References({}), None, Protocol("test", None)))
    assert computed_names == ["answers", "CIDEr", "METEOR", "ROUGE-L", "BLEU", *(["new"] if is_computed else [])]


def test_a_grammar_spice_and_the_protocol_add_the_metrics_that_need_them():
    references = References({}, grammar=Grammar(GRAMMAR))
    protocol = Protocol("test", None, metrics=("grid_cells",))
    computed_names = list(find_computable_metrics(references, Path("spice"), protocol))
    assert computed_names == ["answers", "grid_cells", "CIDEr", "METEOR", "ROUGE-L", "BLEU", "SPICE", "change_accuracy"]


def test_groups_that_have_pairs_have_scores(clevr, tmp_path):
    total = score(write(tmp_path / "p.json", CLEVR | DISTRACTORS), "clevr_change", "total", data=clevr)
    assert total.by_group["distractors"]["pairs"] == 2
    assert total.references == 8
    assert "multi_change" not in total.by_group


def test_ingests_records_give_the_scores_of_the_datasets_own_folder(clevr, tmp_path):
    predictions = write(tmp_path / "p.json", CLEVR | DISTRACTORS)
    total = score(predictions, "clevr_change", "total", data=clevr)
    run_ingest(clevr)
    records = tmp_path / "records/mini/records"
    table = pq.read_table(records)
    rows = table.to_pylist()
    row_with_a_fault = rows[0] | {"id": None, "split": "test"}
    write_table(pa.Table.from_pylist([*rows, row_with_a_fault], schema=table.schema), records)
    write(predictions, {f"mini/{name}": text for name, text in (CLEVR | DISTRACTORS).items()})
    report = score(predictions, "clevr_change", data=records)
    assert report == score(predictions, "clevr_change", data=records.parent)
    assert report.scores == total.scores
    (note,) = report.notes
    assert "'mini/000001.png'" in note


def test_a_damaged_table_of_records_is_named_with_its_part(tmp_path):
    part = tmp_path / "own/records/00000.parquet"
    part.parent.mkdir(parents=True)
    part.write_text("no table")
    with raises(DataError, "files.unreadable_stage_output", path=part, writer="ingest"):
        find_references(task("own"), None, part.parent)


def test_a_benchmark_with_a_grammar_tells_whether_the_change_is_right(clevr, tmp_path):
    write_json(clevr / "grammar.json", GRAMMAR)
    keys = [f"CLEVR_default_{scene:06d}.png" for scene in (1, 12, 3, 5, 8, 9)]
    write_json(clevr / "change_captions.json", {key: ["the red cube at the left turned blue"] for key in keys})
    write_json(clevr / "no_change_captions.json", {key: ["nothing changed"] for key in keys})
    captions = dict.fromkeys((*CLEVR, *DISTRACTORS), "nothing changed")
    captions["000001.png"] = "the red cube at the left became green"
    report = score(write(tmp_path / "p.json", captions), "minichange", data=clevr)
    expected_scores = {"change_type_accuracy": 0.5, "no_change_recall": 1.0, "false_no_change": 0.5}
    assert {name: report.scores[name] for name in expected_scores} == expected_scores


IMAGE = {"images": [{"id": 1}, {"id": 2}]}


def score_nothing(**arguments: Any) -> None:
    """Score a file that does not exist: a fault of references or arguments is found before."""
    score(Path("no predictions.json"), **arguments)


def test_an_unknown_benchmark_is_named_beside_the_known_ones():
    with raises(DataError, "score.benchmark_unknown", value="spot") as refused:
        score_nothing(benchmark="spot")
    assert {"birds_to_words", "clevr_change", "spot_the_diff"} <= set(refused.value.fields["names"])


def test_an_unknown_protocol_is_named_beside_those_of_its_benchmark():
    with raises(DataError, "score.protocol_unknown", key="iedit", value="total", names=["test"]):
        score_nothing(benchmark="iedit", protocol="total")


@pytest.mark.parametrize(
    ("benchmark", "code"),
    [("iedit", "score.no_references_of_benchmark"), ("minichange", "score.no_references_of_drawn")],
)
def test_a_benchmark_without_references_names_its_files_and_its_page(benchmark, code):
    spec = DATASETS[benchmark]
    with raises(DataError, code, dataset=benchmark, names=spec.files, page=spec.page):
        score_nothing(benchmark=benchmark)


def test_a_missing_folder_of_a_benchmark_is_named_with_the_files_that_it_holds():
    with raises(DataError, "score.data_missing", path=Path("none"), names=DATASETS["iedit"].files):
        score_nothing(benchmark="iedit", data=Path("none"))


def test_a_folder_without_the_jars_of_spice_is_found_before_any_file_is_read():
    with raises(DataError, "score.spice_dir_unusable") as refused:
        score_nothing(references=Path("none.json"), spice_dir=Path("."))
    cause = refused.value.fields["cause"]
    assert cause.code == "scoring.spice_jars_missing"
    assert cause.fields["path"] == Path(".")
    assert "stanford-corenlp-3.6.0.jar" in cause.fields["names"]


@pytest.mark.parametrize(
    ("content", "code", "location", "fields"),
    [
        ({"images": []}, "score.no_coco_captions", "r.json", {}),
        ({"images": [], "annotations": []}, "score.no_image", "r.json", {}),
        ({"images": [{"id": None}], "annotations": []}, "score.no_text", "r.json, image 0", {"field": "id"}),
        (
            IMAGE | {"annotations": [{"image_id": 1, "caption": ""}]},
            "score.images_without_caption",
            "r.json",
            {"value": 1, "total": 2, "names": ["2"]},
        ),
        (
            IMAGE | {"annotations": [{"image_id": 1, "caption": 2.5}]},
            "score.no_text",
            "r.json, annotation 0",
            {"field": "caption"},
        ),
    ],
    ids=["no annotations", "no image", "no id", "no caption", "a number"],
)
def test_a_coco_file_without_references_is_refused(content, code, location, fields, tmp_path):
    with raises(DataError, code, **fields) as refused:
        score_nothing(references=write(tmp_path / "r.json", content))
    assert str(refused.value.fields["path"]) == str(tmp_path / location)


def test_references_by_id_are_read_as_coco_captions_are(tmp_path):
    references = {"256": ["a man in red", "a man on the left"], "9": ["the sign says open"]}
    file = tmp_path / "r.json"
    task = find_task(None, None, file)
    as_coco = find_references(task, write(file, coco(references)), None)
    assert find_references(task, write(file, references), None) == as_coco
    assert list(as_coco.pairs) == ["256", "9"]


@pytest.mark.parametrize("captions", [[], [1], "a text", None], ids=["none", "a number", "no list", "null"])
def test_references_by_id_that_are_no_captions_are_refused(captions, tmp_path):
    file = write(tmp_path / "r.json", {"256": ["a man in red"], "9": captions})
    with raises(DataError, "score.no_coco_captions", path=file):
        score_nothing(references=file)


def test_an_empty_list_of_references_is_refused_by_name(tmp_path):
    file = write(tmp_path / "r.json", [])
    with raises(DataError, "datasets.other_json", path=file):
        score_nothing(references=file)


@pytest.mark.parametrize(
    ("options", "option_names"),
    [
        ({}, []),
        ({"data": Path("folder")}, ["--data"]),
        ({"references": Path("r.json"), "protocol": "total"}, ["--protocol"]),
        ({"references": Path("r.json"), "data": Path("folder")}, ["--data"]),
        ({"protocol": "total", "data": Path("folder")}, ["--protocol", "--data"]),
    ],
    ids=["nothing", "data", "protocol", "references and data", "protocol and data"],
)
def test_a_call_that_compares_with_nothing_says_what_it_lacks(options, option_names, tmp_path):
    with raises(ParamsError, "score.call_incomplete") as refused:
        score(write(tmp_path / "p.json", CAPTIONS), **options)
    fault = (
        Fault("score.options_without_benchmark", names=option_names)
        if option_names
        else Fault("score.no_references_named")
    )
    assert refused.value.fields["faults"] == [fault]
    assert {"minichange", "spot_the_diff", "clevr_change"} <= set(refused.value.fields["names"])


def test_a_call_without_references_gets_two_commands_to_copy(capsys):
    assert main(["score", "my preds.csv"]) == 2
    commands = [line.split() for line in capsys.readouterr().err.splitlines() if line.startswith("  m3diff ")]
    assert commands == [
        ["m3diff", "score", "'my", "preds.csv'", "--benchmark", "spot_the_diff", "--data", "FOLDER"],
        ["m3diff", "score", "'my", "preds.csv'", "--references", "pairs.csv"],
    ]


def test_an_unknown_benchmark_ends_the_command_with_the_code_of_refused_data(capsys, tmp_path):
    assert main(["score", str(tmp_path / "p.json"), "--benchmark", "spot"]) == DATA_REFUSED
    assert Message("score.benchmark_unknown", value="spot").in_text(capsys.readouterr().err)


def test_a_command_without_a_file_of_captions_is_a_wrong_call(capsys):
    assert main(["score"]) == 2
    assert Message("command.no_captions").in_text(capsys.readouterr().err)


def test_a_tokenizer_that_dies_ends_the_command_with_its_last_words(capsys, monkeypatch, tmp_path):
    references = write(tmp_path / "r.json", coco({"1": ["a cube"]}))
    predictions = write(tmp_path / "p.json", {1: "x"})
    fake_java(tmp_path / "bin", monkeypatch, "PTBTokenizer", "echo no room left >&2; exit 1")
    assert main(["score", str(predictions), "--references", str(references)]) == TRY_AGAIN
    message = capsys.readouterr().err
    cause = Fault("scoring.program_failed", status=1, last_words="no room left")
    assert Message("scoring.tokenizer_failed", cause=cause).in_text(message)
    assert "Traceback" not in message


def test_missing_java_is_found_before_any_file_is_read(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(JavaMissing, "scoring.java_missing"):
        score(Path("no predictions.json"), "no benchmark")


def test_the_check_of_spice_says_that_java_is_missing_and_how_to_fetch_the_jars(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    check = check_spice(None)
    assert not check.works
    assert check.lines[0].startswith("FAILED")
    assert Message("scoring.java_missing", limit=8).in_text(check.lines[0])
    address = "https://repo1.maven.org/"
    assert check.lines[1].startswith(f"curl -fL --create-dirs -o spice/stanford-corenlp-3.6.0.jar {address}")
    assert "--spice-dir" in check.lines[-1]
    assert "compute.spice_dir" in check.lines[-1]


def a_report(**changes) -> ScoreReport:
    figures = dict.fromkeys(("BLEU-4", "METEOR", "ROUGE-L"), 1.0)
    published = [
        {"method": f"M{rank}", "venue": "V", "scores": figures | {"CIDEr": float(cider), "SPICE": None},
         "source": "paper A", "chosen_on_test": "their code" if rank == 3 else None}
        for rank, cider in enumerate((90, 80, 70, 60, 40, 30, 20, 10))
    ]  # fmt: skip
    fields = {
        "dataset": "spot_the_diff", "protocol": "single-change", "source": "here", "tokenizer": "ptb",
        "headline": "CIDEr", "pairs": 1270, "published_pairs": 1270, "references": 2107,
        "scores": {"CIDEr": 0.474, "METEOR": None, "ROUGE-L": 0.35, "BLEU-4": 0.1},
        "intervals": {"CIDEr": Interval(low=0.42, high=0.53)}, "by_group": {}, "absent": {"METEOR": "it died"},
        "faults": [], "notes": ["one"], "published": published,
    }  # fmt: skip
    return ScoreReport.model_validate(fields | changes)


def test_the_command_hands_its_arguments_on_and_prints_what_was_found(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr("m3diff.commands.score.score", lambda *arguments: calls.append(arguments) or a_report())
    typed = "score p.json --benchmark iedit --protocol test --references r.json --data d --spice-dir s --allow-faults"
    assert main(typed.split()) == 0
    assert calls == [(Path("p.json"), "iedit", "test", Path("r.json"), Path("d"), Path("s"), True)]
    assert "CIDEr    0.4740  47.4" in capsys.readouterr().out
    assert main([*typed.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"]["CIDEr"] == 0.474


def test_the_lines_begin_with_protocol_and_pairs():
    lines = list(a_report().lines())
    assert lines[0] == "spot_the_diff, protocol 'single-change' (here)"
    assert lines[1] == "  1,270 pairs (papers: 1,270), 1.66 references per pair"


def test_each_tokenizer_of_a_benchmark_has_words_of_its_own_in_the_report():
    tokenizers = {protocol.tokenizer for spec in DATASETS.values() for protocol in spec.protocols}
    heads = {tuple(a_report(tokenizer=tokenizer).lines())[:4] for tokenizer in tokenizers}
    assert len(heads) == len(tokenizers)


def test_a_score_has_a_line_with_its_interval():
    cider = next(line for line in a_report().lines() if line.startswith("  CIDEr"))
    assert cider.split()[:4] == ["CIDEr", "0.4740", "47.4", "42.0–53.0"]


def test_published_rows_are_ranked_around_this_run():
    lines = list(a_report().lines())
    methods = [line.split()[0] for line in lines if line.startswith("    ") and line.split()[0][0] in "Mt"]
    assert methods == ["Method", "M0", "M1", "M2", "M3†", "this", "M4", "M5", "M6", "M7"]
    notes = [line.strip() for line in lines if "paper A" in line or line.startswith("    †")]
    assert len(notes) == 2
    assert "M3: their code" in notes[0]


def test_notes_and_absent_scores_have_lines():
    lines = list(a_report().lines())
    assert "  note: one" in lines
    assert "  METEOR: it died" in lines


def test_a_report_of_fewer_pairs_is_marked():
    lines = list(a_report(pairs=1263, faults=["empties"]).lines())
    assert "1,263 pairs (papers: 1,270)" in lines[1]
    assert "  FAULT empties" in lines
    assert any(line.startswith("    this run*  ") for line in lines)


CAPTIONED = {"name": "016", "before": "a/016.jpg", "after": "b/016.jpg", "caption": "it fell", "model": "m3diff/1"}
UNCAPTIONED = {**CAPTIONED, "name": "017", "error": "a/017.jpg: no such file; restore it"}
del UNCAPTIONED["caption"]


def test_a_pair_that_caption_could_not_read_is_named_with_its_reason(tmp_path):
    lines_of = [json.dumps(row) for row in (CAPTIONED, UNCAPTIONED)]
    captions = write(tmp_path / "c.jsonl", "\n".join(lines_of) + "\n")
    references = write(tmp_path / "r.json", coco({"016": ["it fell"], "017": ["it rose"]}))
    with raises(DataError, "score.faults_not_allowed", path=captions) as refused:
        score(captions, references=references)
    fault = refused.value.fields["faults"][0]
    assert fault == Fault(
        "score.pair_not_captioned", path=f"{captions}, line 2", name="017", cause=UNCAPTIONED["error"]
    )
    report = score(captions, references=references, allow_faults=True)
    assert report.pairs == 1
    assert str(fault) in report.faults


def test_a_file_of_nothing_but_uncaptioned_pairs_gives_the_first_reason(tmp_path):
    file = write(tmp_path / "c.jsonl", json.dumps(UNCAPTIONED))
    with raises(DataError, "score.no_pair_captioned", path=file) as refused:
        read_predictions(file)
    assert refused.value.fields["cause"].fields["name"] == "017"
    assert refused.value.fields["cause"].fields["cause"] == UNCAPTIONED["error"]


@pytest.mark.parametrize(
    ("name", "code"),
    [("preds.csv", "score.captions_missing"), ("", "score.captions_folder")],
    ids=["missing", "folder"],
)
def test_a_missing_file_of_captions_is_named(name, code, tmp_path):
    with raises(DataError, code, path=tmp_path / name):
        read_predictions(tmp_path / name)


def test_a_missing_file_of_references_is_named(tmp_path):
    with raises(DataError, "score.references_missing", path=tmp_path / "refs.csv"):
        score(tmp_path / "preds.csv", references=tmp_path / "refs.csv")


def test_a_call_with_neither_file_names_both(tmp_path):
    with raises(ParamsError, "score.call_incomplete") as refused:
        score(tmp_path / "preds.csv")
    assert refused.value.fields["faults"] == [
        Fault("score.captions_missing", path=tmp_path / "preds.csv"),
        Fault("score.no_references_named"),
    ]


# A user's own table as references

OWN_TABLES = {
    "documented columns": "before,after,captions\na/1.png,b/1.png,the lamp is out\na/2.png,b/2.png,it rains\n",
    "a list of captions": 'before,after,captions\na/1.png,b/1.png,"[""the lamp is out""]"\na/2.png,b/2.png,it rains\n',
    "German semicolons": "Vorher;Nachher;Beschreibung;Teil\na/1.png;b/1.png;the lamp is out;test\n"
    "a/2.png;b/2.png;it rains;test\n",
    "an id beside images": "id,before,after,caption\nx1,a/1.png,b/1.png,the lamp is out\nx2,a/2.png,b/2.png,it rains\n",
    "an id alone": "id,reference\n1,the lamp is out\n2,it rains\n",
    "a row per caption": "before,after,captions\na/1.png,b/1.png,the lamp is out\na/1.png,b/1.png,the lamp is off\n"
    "a/2.png,b/2.png,it rains\n",
    "numbered columns": "id,caption_1,caption_2\n1,the lamp is out,dark\n2,it rains,\n",
}


def find_own(tmp_path: Path, table: str, names: list[str]) -> dict[str, list[str]]:
    """The references by prediction of a table, matched as `m3diff score` does."""
    references = find_references(task("own"), write(tmp_path / "paare.csv", table), None)
    predictions = write(tmp_path / "c.json", {name: f"caption of {name}" for name in names})
    matched = find_pairs(predictions, task("own"), references, allow_faults=False)
    assert matched.faults == []
    return {pair.prediction: pair.references for pair in matched.pairs}


@pytest.mark.parametrize("table", OWN_TABLES.values(), ids=OWN_TABLES)
def test_a_table_of_ones_own_pairs_holds_the_references_of_captions_by_name(table, tmp_path):
    references = find_own(tmp_path, table, ["1", "2"])
    assert references["caption of 2"] == ["it rains"]
    assert references["caption of 1"][0] == "the lamp is out"
    assert sum(map(len, references.values())) == (3 if "dark" in table or "off" in table else 2)


def test_a_table_with_ids_takes_predictions_by_id_too(tmp_path):
    references = find_own(tmp_path, OWN_TABLES["an id beside images"], ["x2", "x1"])
    assert references == {"caption of x1": ["the lamp is out"], "caption of x2": ["it rains"]}


@pytest.mark.parametrize(
    ("table", "code", "fields"),
    [
        (
            "before,after\na.png,b.png\n",
            "score.no_caption_column",
            {"columns": Fault("score.columns", names=["before", "after"])},
        ),
        (
            "Datum,captions\nMai,it rains\n",
            "score.no_id_column",
            {"columns": Fault("score.columns", names=["Datum", "captions"])},
        ),
        (
            "id,captions\n1,\n2,it rains\n",
            "score.pairs_without_caption",
            {"value": 1, "total": 2, "names": ["1"]},
        ),
        (
            "id,before,after,captions\n1,a.png,b.png,it rains\n1,c.png,d.png,it fell\n",
            "score.id_of_other_images",
            {"field": "id", "name": "1"},
        ),
    ],
    ids=["no captions", "no ids", "an empty caption", "one id for two pairs"],
)
def test_a_table_that_holds_no_references_says_what_is_missing(table, code, fields, tmp_path):
    with raises(DataError, code, **fields) as refused:
        find_references(task("own"), write(tmp_path / "paare.csv", table), None)
    assert "paare.csv" in str(refused.value.fields["path"])


def test_a_row_of_references_with_a_field_too_many_is_named(tmp_path):
    path = str(tmp_path / "paare.csv, line 2")
    with raises(DataError, "datasets.wrong_number_of_fields", path=path):
        find_references(task("own"), write(tmp_path / "paare.csv", "id,captions\n1,a,b\n"), None)


def test_the_column_that_was_taken_for_captions_is_noted(tmp_path):
    references = find_references(task("own"), write(tmp_path / "p.csv", OWN_TABLES["German semicolons"]), None)
    (note,) = references.notes
    assert note.startswith("p.csv: ")
    assert "Beschreibung" in note


# A table with several splits

TABLES_WITH_SPLITS = {
    "ids": "id,caption,split\n1,the lamp is out,train\n2,it rains,test\n3,it fell,val\n4,it rose,test\n",
    "images": "before,after,caption,Teil\na/1.png,b/1.png,the lamp is out,Training\na/2.png,b/2.png,it rains,Test\n"
    "a/3.png,b/3.png,it fell,Validierung\na/4.png,b/4.png,it rose,Test\n",
}


def match_table(tmp_path: Path, table: str, names: list[str]) -> MatchedPairs:
    """Match a caption for each of these names to the pairs of a table, as `m3diff score` does."""
    references = find_references(task("own"), write(tmp_path / "pairs.csv", table), None)
    predictions = write(tmp_path / "captions.json", {name: f"caption of {name}" for name in names})
    return find_pairs(predictions, task("own"), references, allow_faults=False)


@pytest.mark.parametrize("names", [["2", "4"], ["1", "2", "3", "4"]], ids=["test captioned", "all captioned"])
@pytest.mark.parametrize("table", TABLES_WITH_SPLITS.values(), ids=TABLES_WITH_SPLITS)
def test_only_the_test_split_of_a_table_is_scored(table, names, tmp_path):
    matched = match_table(tmp_path, table, names)
    assert [pair.references for pair in matched.pairs] == [["it rains"], ["it rose"]]
    assert matched.faults == []


def test_the_splits_of_a_table_and_the_captions_left_out_are_noted(tmp_path):
    split_note, caption_note = match_table(tmp_path, TABLES_WITH_SPLITS["ids"], ["1", "2", "3", "4"]).notes
    assert "split" in split_note
    assert all(part in split_note for part in ("train (1)", "test (2)", "val (1)"))
    assert caption_note.startswith("2 captions")


def test_a_missing_caption_of_another_split_is_no_fault_and_one_of_the_test_split_is(tmp_path):
    with raises(DataError, "score.faults_not_allowed") as refused:
        match_table(tmp_path, TABLES_WITH_SPLITS["ids"], ["1", "2", "3"])
    (missing,) = refused.value.fields["faults"]
    assert missing.code == "score.ids_missing"
    assert missing.fields["names"] == ["4"]


def test_pairs_of_two_splits_with_the_same_id_are_different_pairs(tmp_path):
    table = "id,before,after,caption,split\n1,a/7.png,b/7.png,it rains,train\n1,c/8.png,d/8.png,it fell,test\n"
    assert [pair.references for pair in match_table(tmp_path, table, ["1"]).pairs] == [["it fell"]]
    assert [pair.prediction for pair in match_table(tmp_path, table, ["7", "8"]).pairs] == ["caption of 8"]


@pytest.mark.parametrize(
    "splits",
    [["test", "test"], ["train", "train"], ["easy", "hard"], ["", ""]],
    ids=["test", "train", "other names", "empty"],
)
def test_every_row_of_a_table_without_several_splits_is_scored(splits, tmp_path):
    table = f"id,caption,split\n1,it rains,{splits[0]}\n2,it fell,{splits[1]}\n"
    matched = match_table(tmp_path, table, ["1", "2"])
    assert [pair.references for pair in matched.pairs] == [["it rains"], ["it fell"]]
    assert matched.notes == []


def test_a_table_with_several_splits_but_no_test_split_is_refused(tmp_path):
    table = "id,caption,split\n1,it rains,train\n2,it fell,val\n"
    file = tmp_path / "pairs.csv"
    names = ["train (1)", "val (1)"]
    with raises(DataError, "score.no_test_split", path=file, field="split", names=names):
        find_references(task("own"), write(file, table), None)


def test_columns_that_may_name_splits_are_noted_and_all_rows_are_used(tmp_path):
    table = "id,caption,set\n1,it rains,0\n2,it fell,1\n"
    matched = match_table(tmp_path, table, ["1", "2"])
    assert len(matched.pairs) == 2
    (note,) = matched.notes
    assert "set" in note


# Answers to questions

QUESTIONS = """before,after,question,answer,question_type
a/1.png,b/1.png,How many lamps are there?,2,count
a/1.png,b/1.png,Is it dark?,yes,state
a/1.png,b/1.png,Is it dark?,true,state
a/2.png,b/2.png,Is it dark?,no,state
"""


def score_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: Any, table: str) -> ScoreReport:
    monkeypatch.setattr("m3diff.commands.score.require_java", lambda: None)
    references = write(tmp_path / "questions.csv", table)
    return score(write(tmp_path / "answers.json", answers), references=references)


@pytest.mark.parametrize(
    "names",
    [("1?0", "1?1", "2"), ("1-1-row-00001", "1-1-row-00002", "2")],
    ids=["as ingest calls them", "as caption calls them"],
)
def test_each_question_of_a_table_is_scored(names, tmp_path, monkeypatch):
    answers = dict(zip(names, ["There are two.", "Yes!", "yes"], strict=True))
    report = score_answers(tmp_path, monkeypatch, answers, QUESTIONS)
    assert report.faults == []
    assert report.pairs == 3
    assert report.references == 4
    assert report.scores["exact_match"] == 1 / 3
    assert report.scores["number_accuracy"] == 1.0
    assert report.scores["yes_no_accuracy"] == 1 / 2
    assert report.by_group["by_kind/state"]["exact_match"] == 1 / 2
    assert report.by_group["by_kind/count"]["pairs"] == 1
    assert report.scores["CIDEr"] is None
    assert "short answers" in report.absent["CIDEr"]
    lines = [line.split() for line in report.lines()]
    assert ["state", "2", "50.0", "50.0", "–"] in lines
    assert ["all", "questions", "3", "33.3", "50.0", "100.0"] in lines
    assert not any(line[:1] == ["questions"] for line in lines)


def test_predictions_name_questions_by_their_own_ids(tmp_path, monkeypatch):
    table = "image,question_id,question,answer\na.png,7,Is it?,yes\na.png,8,Is it not?,no\n"
    answers = [{"question_id": 8, "answer": "no"}, {"question_id": 7, "answer": "no"}]
    report = score_answers(tmp_path, monkeypatch, answers, table)
    assert report.scores["exact_match"] == 1 / 2
    assert report.by_group == {}, "no kind is known"


def test_a_missing_answer_to_one_of_two_questions_is_a_fault(tmp_path, monkeypatch):
    with raises(DataError, "score.faults_not_allowed") as refused:
        score_answers(tmp_path, monkeypatch, {"1?0": "2", "2": "no"}, QUESTIONS)
    (fault,) = refused.value.fields["faults"]
    assert fault.code == "score.ids_missing"
    assert fault.fields["names"] == ["1?1"]


def test_a_table_without_questions_has_no_score_of_answers(tmp_path):
    references = find_references(task("own"), write(tmp_path / "pairs.csv", OWN_TABLES["documented columns"]), None)
    assert {pair.question for pair in references.pairs.values()} == {None}


@pytest.mark.parametrize("folder", ["02_records/toy", "02_records/toy/records"])
def test_the_records_of_ingest_give_the_scores_of_answers_without_a_benchmark(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("m3diff.commands.score.require_java", lambda: None)
    records = {name: item for name, item in questions.RECORDS.items() if item.kind == "count"}
    rows = [questions.make_row(tmp_path, name, item) for name, item in records.items()]
    write_record_table(tmp_path / "02_records/toy/records", rows)
    answers = write(tmp_path / "p.json", {f"toy/{name}": item.prediction for name, item in records.items()})
    report = score(answers, data=tmp_path / folder)
    assert report.dataset == "toy"
    assert report.scores["number_accuracy"] == 1 / 2
    assert report.by_group["by_kind/count"]["number_accuracy"] == 1 / 2


@pytest.mark.parametrize(
    ("published_pairs", "counts"),
    [
        (30, SplitCount(30, 30, questions=30, image_pairs=4)),
        (4, SplitCount(4)),
        (7, SplitCount(7)),
        (None, None),
    ],
    ids=["all questions", "as many as pairs", "some questions", "unknown"],
)
def test_counts_of_a_protocol_of_questions_are_those_of_the_questions(published_pairs, counts):
    test_counts = SplitCount(4, 30, questions=30)
    assert find_counts(Protocol("test", published_pairs), test_counts) == counts
