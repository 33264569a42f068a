"""`m3diff score`: files as users bring them, each wrong protocol named beside its own number, the printed report."""

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.__main__ import DATA_REFUSED, TRY_AGAIN, main
from m3diff.commands.score import (
    ScoreReport,
    Task,
    bare_pair,
    faults_of_captions,
    lines,
    match,
    read_predictions,
    score,
)
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import DatasetSpec, Protocol, Published, SplitCount
from m3diff.records.errors import DataError
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.metrics.java import JavaMissing
from m3diff.scoring.metrics.spice import check_spice
from m3diff.scoring.pairs import published_rows
from tests.layouts import run_ingest, write_clevr, write_json
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
    "references.json": [{"caption": "gold", "prediction": caption, "image_id": name} for name, caption in ROWS],
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_usual_shape_is_read(name, tmp_path):
    assert read_predictions(write(tmp_path / name, SHAPES[name])) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[]", r"a.json: holds no caption; expected rows of an image_id and a caption, or \{id: caption\}"),
        ("a.json", "", r"a.json: the file is empty"),
        ("a.json", '[{"image_id": 1, "caption": "x"', r"a.json: line 1 .*: not valid JSON"),
        ("a.json", '{"1": "x", "1": "z"}', r"a.json: .*'1' occurs twice"),
        ("a.json", '[{"image_id": 1}]', r"a.json, record 0: expected text in the field prediction, found an ob"),
        ("a.json", '[{"code": 1, "caption": ""}]', r"record 0: expected text in the field image_id, .* name the f"),
        ("a.json", '["x"]', r"record 0: expected .* found text 'x'"),
        ("a.json", '{"1": null}', r"a.json, 1: expected text .*, found null; .* \"\" where there is no caption"),
        ("a.json", '{"1": ["the", "cube"]}', r"field prediction, found a list .*joined by spaces"),
        ("a.json", '[{"image_id": true, "caption": "x"}]', r"record 0: expected .* field image_id, found true"),
        ("a.json", '[{"image_id": 3.0, "caption": "x"}]', r"record 0: .*found a number 3.0"),
        ("a.jsonl", '{"id": 1, "caption": "x"}\n{"id": 2}', r"a.jsonl, line 2: expected text in the field prediction"),
        ("a.csv", "image_id,caption\n1,a,b\n", r"a.csv, line 2: row: has 3 fields, the header 2; quote fields"),
        ("a.csv", "image_id;caption\n1;a\n", r"a.csv, line 2: .*found an object {'image_id;caption': '1;a'}"),
    ],
)
def test_a_row_that_is_no_caption_is_named_with_its_place(name, content, message, tmp_path):
    with pytest.raises(DataError, match=message) as refused:
        read_predictions(write(tmp_path / name, content))
    assert str(tmp_path / "a.") in str(refused.value)


def task(dataset: str = "own", counts: SplitCount | None = None) -> Task:
    return Task(dataset, Protocol("test", n=None), None, counts)


def test_ids_are_the_same_in_any_unicode_form():
    for form, other in (("NFC", "NFD"), ("NFD", "NFC")):
        given, known = (unicodedata.normalize(name, "Köln_1é.png") for name in (form, other))
        assert match(Path("p"), [(given, "x")], [known], task()) == {known: "x"}
        with pytest.raises(DataError, match="2 captions for 1 ids"):
            match(Path("p"), [(given, "x"), (known, "y")], [known], task())


@pytest.mark.parametrize(
    ("given", "known"),
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
def test_an_id_is_known_as_the_benchmark_s_authors_write_it(given, known):
    ids = ["235.png", "000123.png", "000123.png_n", "Reddit_1052", "13985343_24"]
    assert match(Path("p"), [(given, "x")], ids, task("spot_the_diff")) == {known: "x"}
    both = [(given, "x"), (known, "y")]
    with pytest.raises(DataError, match=rf"2 captions for 1 ids: '{known}' has 2; keep one caption to an id"):
        match(Path("p"), both, ids, task("spot_the_diff"))


def test_what_two_ids_could_mean_is_unknown_unless_written_in_full():
    given = [("own/a/1.png", "x"), ("1", "y")]
    assert match(Path("p"), given, ["a/1.png", "b/1.png"], task()) == {"a/1.png": "x", "1": "y"}


def faults(given: str, **counts: int) -> list[str]:
    """Of captions of these ids, a letter or digit each, for the pairs 0 to 4."""
    found = [(name, "x") for name in given]
    pairs = {str(n): bare_pair(task(), str(n), ["a"], []) for n in range(5)}
    known = SplitCount(len(pairs), **counts)
    return faults_of_captions(match(Path("p"), found, pairs, task(counts=known)), pairs, pairs, known)


def test_ids_of_another_level_are_named_by_their_number():
    (fault,) = faults("0123", image_pairs=4)
    assert fault.startswith("no caption for 1 of 5 pairs: '4'. There are 4 distinct pairs of images: keyed by its")
    assert faults("012", image_pairs=4) == ["no caption for 2 of 5 pairs: '3', '4'"]
    assert faults("01234", records=6, image_pairs=4) == []
    unknown, _ = faults("abcd", image_pairs=4)
    assert re.match(r"4 of 4 ids are unknown: 'a', .*; valid ones are '0', .* pairs of images", unknown)
    unknown, _ = faults("abcdef", records=6)
    assert re.match(r"6 of 6 ids are unknown: .* has 6 records: this is the record level", unknown)


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
SAID = {
    "11": "the red car is gone from the street",
    "12": "the white van moved to the right side",
    "13": "there is no difference",
    "14": "the grey van has been driven away and two people walk past the shop",
    "15": "the door of the house is open",
}
MERGED = {name: [text for other, found in RECORDS if other == name for text in found] for name in SAID}
WORDED = {name: texts for name, texts in MERGED.items() if texts != [""]}
JOINED = {name: [". ".join(texts)] for name, texts in MERGED.items()}
OF_RECORDS = {str(number): SAID[name] for number, (name, _) in enumerate(RECORDS)}
OF_WORDED = {name: SAID[name] for name in WORDED}
CIDER, BLEU_4 = 2.717544, 0.659294
TRAPS = [
    (
        ({str(number): texts for number, (_, texts) in enumerate(RECORDS)}, OF_RECORDS),
        ("single-change", (2.778428, 0.506550)),
        r"references: 7 pairs, the benchmark has 5\. .* has 7 records: this is the record level",
    ),
    ((dict(RECORDS), SAID), ("single-change", (1.628600, 0.357535)), r"references: 7 of 10: .* the last one overwrote"),
    (
        (WORDED, OF_WORDED),
        ("single-change", (3.395036, 0.709857)),
        r"references: 4 pairs, the benchmark has 5: the 1 pairs of which every reference is empty were dropped",
    ),
    ((JOINED, SAID), ("single-change", (1.562938, 0.047324)), r"references: 5 of 10: joined text"),
    ((JOINED, SAID), ("multi-change", (1.562938, 0.047324)), r"references: untruncated, of up to 103 words; 'multi"),
]


@pytest.fixture
def spot(tmp_path, monkeypatch) -> Path:
    """The dataset's own folder, as if papers scored these five pairs, by the metrics that are quick."""
    real = DATASETS["spot_the_diff"]
    counts = SplitCount(5, 10, empty=1, wordless=1, records=7)
    published = Published("spot_the_diff", "Spot-the-Diff", SplitCount(0), SplitCount(0), counts)
    protocols = tuple(replace(one, n=5, metrics=("BLEU", "CIDEr")) for one in real.protocols)
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


def test_the_right_protocol_gives_the_right_number_from_the_data_and_from_a_coco_file(run, spot):
    for report in (run(SAID, data=spot), run(SAID, references=MERGED)):
        assert numbers(report) == pytest.approx((CIDER, BLEU_4), abs=1e-6)
        assert (report.pairs, report.published_pairs, report.references, report.faults) == (5, 5, 10, [])
    report = run(SAID, data=spot, protocol="multi-change")  # joins the sentences, and cuts after 60 words
    assert numbers(report) == pytest.approx((1.544967, 0.107847), abs=1e-6)
    assert report.references == 5
    assert report.published == [row._asdict() for row in published_rows("spot_the_diff/multi-change")]
    assert len(run(SAID, data=spot).published) == len(published_rows("spot_the_diff")) > len(report.published)
    told = run(SAID | {"13": " "}, data=spot).notes
    assert told == ["ids such as '11' were taken for '11.png'", "1 captions are empty"]
    same = dict.fromkeys(("1", "2"), "a car left")
    alike = run(same, references={name: [text] for name, text in same.items()}, allow_faults=True)
    assert (alike.scores["CIDEr"], alike.notes[0][:50]) == (0, "all pairs have the same references, so CIDEr is 0:")


@pytest.mark.parametrize(
    ("files", "score", "named"),
    TRAPS,
    ids=["record level", "last record wins", "empties dropped", "joined text", "untruncated multi-change"],
)
def test_a_wrong_protocol_is_named_and_gives_its_own_number(run, files, score, named):
    (references, captions), (protocol, wanted) = files, score
    with pytest.raises(DataError, match=named) as refused:
        run(captions, references=references, protocol=protocol)
    assert "--allow-faults" in str(refused.value)
    report = run(captions, references=references, protocol=protocol, allow_faults=True)
    assert numbers(report) == pytest.approx(wanted, abs=1e-6)
    assert abs(wanted[0] - CIDER) > 0.01
    assert any(fault in str(refused.value) for fault in report.faults)


def test_captions_of_another_level_and_fewer_pairs_than_papers_score_are_refused(run, spot, monkeypatch):
    rows = [{"image_id": name, "caption": SAID[name]} for name, _ in RECORDS]
    for captions, named in (
        (OF_RECORDS, r"(?s)p.*json: .* 7 of 7 ids are unknown: '0', .*; valid .* record level"),
        (rows, r"7 captions for 5 ids: '11.png' has 2\. .* this is the record level"),
        (rows[:6], r"6 captions for 5 ids: '11.png' has 2; keep one"),
        (OF_WORDED, r"no caption for '13.png', the 1 pairs of which every reference is empty"),
    ):
        with pytest.raises(DataError, match=named):
            run(captions, data=spot)
    report = run(OF_WORDED, data=spot, allow_faults=True)
    assert (report.pairs, report.published_pairs, len(report.faults)) == (4, 5, 2)
    assert report.scores["CIDEr"] == pytest.approx(3.395036, abs=1e-6)
    with pytest.raises(DataError, match=r"10 for 5 pairs; under 'multi-change' all sentences of a pair are one"):
        run(SAID, references=MERGED, protocol="multi-change")
    monkeypatch.undo()  # the real benchmark has 1,270
    with pytest.raises(DataError, match=r"5 pairs are scored, papers score 1,270"):
        run(SAID, data=spot)


CLEVR = {"000001.png": "it became red", "000012.png": "the cube turned red"}
DISTRACTORS = {f"{name}_n": "nothing has changed" for name in CLEVR}


@needs_real
@pytest.mark.slow
def test_the_published_scores_of_coco_captions_are_printed(capsys, monkeypatch):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Duser.language=de")  # a German comma once broke METEOR
    files = [str(next((REAL / "coco_caption").glob(name))) for name in ("*fakecap_results.json", "*val2014.json")]
    assert main(["score", files[0], "--references", files[1], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {name: round(value, 4) for name, value in told["scores"].items()} == PUBLISHED
    assert (told["pairs"], told["published_pairs"], told["faults"]) == (1_000, None, [])


@pytest.fixture
def clevr(monkeypatch, tmp_path) -> Path:
    """The folder of CLEVR-Change; benchmarks of a few pairs, scored by what is quick."""
    for name in ("clevr_change", "clevr_dc", "minichange"):
        spec = DATASETS[name]
        protocols = tuple(replace(one, n=None, metrics=("CIDEr",)) for one in spec.protocols)
        published = tuple(replace(part, part=name) for part in spec.published)
        monkeypatch.setitem(DATASETS.data, name, replace(spec, protocols=protocols, published=published))
    return write_clevr(tmp_path / "raw")


def test_a_protocol_takes_its_pairs_of_captions_of_all_and_ingests_records_serve_as_well(clevr, tmp_path):
    predictions = write(tmp_path / "p.json", CLEVR | DISTRACTORS)
    total, semantic, color = (
        score(predictions, "clevr_change", protocol, data=clevr) for protocol in ("total", "semantic", "color")
    )
    assert (total.pairs, semantic.pairs, color.pairs) == (4, 2, 2)
    assert semantic.notes == ["2 captions of pairs that 'semantic' does not take were left out"]
    assert semantic.scores["CIDEr"] != total.scores["CIDEr"]
    assert (total.by_group["distractors"]["pairs"], total.references) == (2, 8)
    assert "multi_change" not in total.by_group
    run_ingest(clevr)
    write(predictions, {f"mini/{name}": text for name, text in (CLEVR | DISTRACTORS).items()})
    places = tmp_path / "records/mini", tmp_path / "records/mini/records.parquet"
    known = pq.read_table(places[1])
    rows = known.to_pylist()
    pq.write_table(
        pa.Table.from_pylist([*rows, rows[0] | {"id": None, "split": "test"}], schema=known.schema), places[1]
    )  # a fault
    reports = [score(predictions, "clevr_change", data=place) for place in places]
    assert reports[0] == reports[1]
    assert reports[0].scores == total.scores
    assert reports[0].notes == ["ids such as 'mini/000001.png' were taken for '000001.png'"]


def test_a_benchmark_with_a_grammar_tells_whether_the_change_is_right(clevr, tmp_path):
    write_json(clevr / "grammar.json", GRAMMAR)
    keys = [f"CLEVR_default_{scene:06d}.png" for scene in (1, 12, 3, 5, 8, 9)]
    write_json(clevr / "change_captions.json", {key: ["the red cube at the left turned blue"] for key in keys})
    write_json(clevr / "no_change_captions.json", {key: ["nothing changed"] for key in keys})
    captions = dict.fromkeys((*CLEVR, *DISTRACTORS), "nothing changed")
    captions["000001.png"] = "the red cube at the left became green"
    report = score(write(tmp_path / "p.json", captions), "minichange", data=clevr)
    wanted = {"change_type_accuracy": 0.5, "no_change_recall": 1.0, "false_no_change": 0.5}
    assert {name: report.scores[name] for name in wanted} == wanted


IMAGE = {"images": [{"id": 1}, {"id": 2}]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"benchmark": "spot"}, r"--benchmark 'spot': unknown; known: birds_to_words, clevr_change, .*, spot_the_diff"),
        ({"benchmark": "iedit", "protocol": "total"}, r"iedit: no protocol 'total'; it has test"),
        ({"benchmark": "iedit"}, r"iedit: where are its references\? .*page: https?://"),
        ({"benchmark": "minichange"}, r"which `m3diff synthesize minichange` draws"),
        ({"references": Path("none.json"), "protocol": "total"}, r"--benchmark None: unknown; .*; or name --refer"),
        ({"references": Path("none.json")}, r"none.json: no such file"),
        ({"benchmark": "iedit", "data": Path("none")}, r"none: no such folder; name the one that holds train.json"),
        ({"spice_dir": Path(".")}, r"--spice-dir .*: has no stanford-corenlp-3.6.0.jar .*--check-spice"),
        ([], r"r.json: expected an object at the top, found a list"),
        ({"images": []}, r"r.json: expected COCO captions, an object with the lists images and annotations"),
        ({"images": [], "annotations": []}, r"r.json: 0 of 0 images"),
        ({"images": [{"id": None}], "annotations": []}, r"r.json, image 0: expected text in the field id, found null"),
        (IMAGE | {"annotations": [{"image_id": 1, "caption": ""}]}, r"1 of 2 images without a caption, such as"),
        (
            IMAGE | {"annotations": [{"image_id": 1, "caption": 2.5}]},
            r"annotation 0: expected text in the field cap",
        ),
    ],
)
def test_what_is_missing_or_no_reference_is_named_before_captions_are_read(arguments, message, tmp_path):
    if "images" in arguments or arguments == []:
        arguments = {"references": write(tmp_path / "r.json", arguments)}
    with pytest.raises(DataError, match=message):
        score(Path("no predictions.json"), **arguments)


def test_a_fault_of_the_files_and_a_tokenizer_that_dies_are_exit_codes_and_a_sentence(capsys, monkeypatch, tmp_path):
    assert main(["score", str(tmp_path / "p.json"), "--benchmark", "spot"]) == DATA_REFUSED
    assert "m3diff score: --benchmark 'spot': unknown" in capsys.readouterr().err
    assert main(["score"]) == 2
    assert "name a file of captions" in capsys.readouterr().err
    references, predictions = write(tmp_path / "r.json", coco({"1": ["a cube"]})), write(tmp_path / "p.json", {1: "x"})
    fake_java(tmp_path / "bin", monkeypatch, "PTBTokenizer", "echo no room left >&2; exit 1")
    assert main(["score", str(predictions), "--references", str(references)]) == TRY_AGAIN
    said = capsys.readouterr().err
    assert "m3diff score: the PTB tokenizer, without which there is no score: " in said
    assert ("its last words: no room left" in said, "Traceback" in said) == (True, False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing, match="java: not found on PATH"):
        score(Path("no predictions.json"), "no benchmark")
    said, fetch, *_ = check_spice(None)[0]
    assert said.startswith("FAILED  java: not found on PATH")
    assert fetch.startswith("curl -fL --create-dirs -o spice/stanford-corenlp-3.6.0.jar https://repo1.maven.org/")


def a_report(**changes) -> ScoreReport:
    figures = dict.fromkeys(("BLEU-4", "METEOR", "ROUGE-L"), 1.0)
    published = [
        {"method": f"M{place}", "venue": "V", "scores": figures | {"CIDEr": float(cider), "SPICE": None},
         "source": "paper A", "chosen_on_test": "their code" if place == 3 else None}
        for place, cider in enumerate((90, 80, 70, 60, 40, 30, 20, 10))
    ]  # fmt: skip
    known = {
        "dataset": "spot_the_diff", "protocol": "single-change", "source": "here", "tokenizer": "ptb",
        "headline": "CIDEr", "pairs": 1270, "published_pairs": 1270, "references": 2107,
        "scores": {"CIDEr": 0.474, "METEOR": None, "ROUGE-L": 0.35, "BLEU-4": 0.1},
        "intervals": {"CIDEr": Interval(low=0.42, high=0.53)}, "by_group": {}, "absent": {"METEOR": "it died"},
        "faults": [], "notes": ["one"], "published": published,
    }  # fmt: skip
    return ScoreReport.model_validate(known | changes)


def test_the_command_hands_its_arguments_on_and_prints_what_was_found(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr("m3diff.commands.score.score", lambda *arguments: calls.append(arguments) or a_report())
    typed = "score p.json --benchmark iedit --protocol test --references r.json --data d --spice-dir s --allow-faults"
    assert main(typed.split()) == 0
    assert calls == [(Path("p.json"), "iedit", "test", Path("r.json"), Path("d"), Path("s"), True)]
    assert "CIDEr    0.4740  47.4" in capsys.readouterr().out
    assert main([*typed.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"]["CIDEr"] == 0.474


def test_the_page_tells_protocol_pairs_variant_scores_faults_and_the_published_rows():
    told = list(lines(a_report()))
    assert told[0] == "spot_the_diff, protocol 'single-change' (here)"
    assert told[1] == "  pairs 1,270 (papers: 1,270); references a pair 1.66"
    cider = next(line for line in told if line.startswith("  CIDEr"))
    assert cider.split()[:4] == ["CIDEr", "0.4740", "47.4", "42.0–53.0"]
    rows = [line.split()[0] for line in told if line.startswith("    ") and line.split()[0][0] in "Mt"]
    assert rows == ["Method", "M0", "M1", "M2", "M3†", "this", "M4", "M5", "M6", "M7"]
    assert {"  note: one", "  METEOR: it died", "    Published figures as given by paper A."} < set(told)
    assert "    † Epoch chosen on the test split. M3: their code." in told
    told = list(lines(a_report(pairs=1263, faults=["empties"])))
    assert "pairs 1,263 (papers: 1,270)" in told[1]
    assert "  FAULT empties" in told
    assert next(line for line in told if "this run" in line).startswith("    this run*  ")
