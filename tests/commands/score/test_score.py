"""The command from files to the printed report: references of every kind, what is missing, SPICE, exit codes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from m3diff.__main__ import DATA_REFUSED, TRY_AGAIN, main
from m3diff.commands.score import ScoreReport, lines, score
from m3diff.datasets import DATASETS
from m3diff.records.errors import DataError
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.metrics.java import JavaMissing
from m3diff.scoring.metrics.spice import check_spice
from tests.commands.score import traps
from tests.layouts import edit_json, run_ingest, write_clevr, write_json
from tests.scoring.bench import GRAMMAR, PUBLISHED, REAL, fake_java, needs_real

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
def data(monkeypatch, tmp_path) -> Path:
    """The folder of CLEVR-Change; benchmarks of a few pairs, scored by what is quick."""
    for name in ("clevr_change", "clevr_dc", "minichange"):
        spec = DATASETS[name]
        protocols = tuple(replace(one, n=None, metrics=("CIDEr",)) for one in spec.protocols)
        published = tuple(replace(part, part=name) for part in spec.published)
        monkeypatch.setitem(DATASETS, name, replace(spec, protocols=protocols, published=published))
    return write_clevr(tmp_path / "raw")


def test_a_protocol_takes_its_pairs_of_captions_of_all_and_ingests_records_serve_as_well(data, tmp_path):
    predictions = traps.write(tmp_path / "p.json", CLEVR | DISTRACTORS)
    total, semantic, color = (
        score(predictions, "clevr_change", protocol, data=data) for protocol in ("total", "semantic", "color")
    )
    assert (total.pairs, semantic.pairs, color.pairs) == (4, 2, 2)
    assert semantic.notes == ["2 captions of pairs that 'semantic' does not take were left out"]
    assert semantic.scores["CIDEr"] != total.scores["CIDEr"]
    assert total.by_group["distractors"]["pairs"] == 2
    assert total.references == 8
    run_ingest(data)
    traps.write(predictions, {f"mini/{name}": text for name, text in (CLEVR | DISTRACTORS).items()})
    places = tmp_path / "records/mini", tmp_path / "records/mini/records.parquet"
    reports = [score(predictions, "clevr_change", data=place) for place in places]
    assert reports[0] == reports[1]
    assert reports[0].scores == total.scores


def test_a_benchmark_with_a_grammar_tells_whether_the_change_is_right(data, tmp_path):
    write_json(data / "grammar.json", GRAMMAR)
    keys = [f"CLEVR_default_{scene:06d}.png" for scene in (1, 12, 3, 5, 8, 9)]
    write_json(data / "change_captions.json", {key: ["the red cube at the left turned blue"] for key in keys})
    write_json(data / "no_change_captions.json", {key: ["nothing changed"] for key in keys})
    captions = dict.fromkeys((*CLEVR, *DISTRACTORS), "nothing changed")
    captions["000001.png"] = "the red cube at the left became green"
    report = score(traps.write(tmp_path / "p.json", captions), "minichange", data=data)
    wanted = {"change_type_accuracy": 0.5, "no_change_recall": 1.0, "false_no_change": 0.5}
    assert {name: report.scores[name] for name in wanted} == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"benchmark": "spot"}, r"--benchmark 'spot': unknown; known: birds_to_words, clevr_change, .*, spot_the_diff"),
        ({"benchmark": "iedit", "protocol": "total"}, r"iedit: no protocol 'total'; it has test"),
        ({"benchmark": "iedit"}, r"iedit: where are its references\? Give --data .* train.json, valid.json, test.json"),
        ({"benchmark": "minichange"}, r"minichange: .*grammar.json, which `m3diff synthesize minichange` draws"),
        ({}, r"name a --benchmark, or the --references alone; known benchmarks: birds_to_words"),
        ({"references": Path("none.json"), "protocol": "total"}, r"name a --benchmark"),
        ({"references": Path("none.json")}, r"none.json: no such file"),
        ({"benchmark": "iedit", "data": Path("none")}, r"none: no such folder; name the one that holds train.json"),
        ({"spice_dir": Path(".")}, r"--spice-dir .*: has no stanford-corenlp-3.6.0.jar .*--check-spice"),
    ],
)
def test_what_is_missing_is_named_before_captions_are_read(arguments, message):
    with pytest.raises(DataError, match=message):
        score(Path("no predictions.json"), **arguments)


IMAGE = {"images": [{"id": 1}, {"id": 2}]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], r"r.json: expected an object at the top, found a list"),
        ({"images": []}, r"r.json: expected COCO captions, an object with the lists images and annotations"),
        ({"images": [], "annotations": []}, r"r.json: holds no image"),
        ({"images": [{"id": None}], "annotations": []}, r"r.json, image 0: id: expected text or a whole number"),
        (IMAGE | {"annotations": [{"image_id": 1, "caption": ""}]}, r"1 images without a caption"),
        (IMAGE | {"annotations": [{"image_id": 1, "caption": 2}]}, r"annotation 0: caption: expected plain text"),
    ],
)
def test_a_file_of_references_that_is_none_is_named(value, message, tmp_path):
    with pytest.raises(DataError, match=message):
        score(Path("p.json"), references=traps.write(tmp_path / "r.json", value))


def test_a_test_pair_that_cannot_be_read_is_named(tmp_path):
    data = write_clevr(tmp_path / "raw")
    edits = {"change": lambda value: value.pop("CLEVR_default_000012.png")}
    edits["no_change"] = lambda value: value.update(dict.fromkeys(value, "no list"))
    messages = "raw: change_captions.json, .*12.png: captions: .* no k", "raw: no_change.*: .*a list of text"
    for (file, edit), message in zip(edits.items(), messages, strict=True):
        edit_json(data / f"{file}_captions.json", edit)
        with pytest.raises(DataError, match=message):
            score(Path("no predictions.json"), "clevr_change", data=data)


def test_a_fault_of_the_files_and_a_tokenizer_that_dies_are_exit_codes_and_a_sentence(capsys, monkeypatch, tmp_path):
    assert main(["score", str(tmp_path / "p.json"), "--benchmark", "spot"]) == DATA_REFUSED
    assert "m3diff score: --benchmark 'spot': unknown" in capsys.readouterr().err
    assert main(["score"]) == 2
    assert "name a file of captions" in capsys.readouterr().err
    caption = {"image_id": 1, "caption": "a cube"}
    references = traps.write(tmp_path / "r.json", {"images": [{"id": 1}], "annotations": [caption | {"id": 1}]})
    predictions = traps.write(tmp_path / "p.json", [caption])
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "PTBTokenizer", "echo no room left >&2; exit 1"))
    assert main(["score", str(predictions), "--references", str(references)]) == TRY_AGAIN
    said = capsys.readouterr().err
    assert "m3diff score: the PTB tokenizer, without which there is no score: " in said
    assert "its last words: no room left" in said
    assert "Traceback" not in said
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing, match="java: not found on PATH"):
        score(Path("no predictions.json"), "no benchmark")
    assert check_spice(None)[0][0].startswith("MISSING java: not found on PATH")


def test_the_command_hands_its_arguments_on_and_prints_what_was_found(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr("m3diff.commands.score.score", lambda *arguments: calls.append(arguments) or a_report())
    typed = "score p.json --benchmark iedit --protocol test --references r.json --data d --spice-dir s --allow-faults"
    assert main(typed.split()) == 0
    assert calls == [(Path("p.json"), "iedit", "test", Path("r.json"), Path("d"), Path("s"), True)]
    assert "CIDEr-D" in capsys.readouterr().out
    assert main([*typed.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"]["CIDEr"] == 0.474


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


def test_the_page_tells_protocol_pairs_variant_scores_faults_and_the_published_rows_around():
    told = list(lines(a_report()))
    assert told[0] == "spot_the_diff, protocol 'single-change' (here)"
    assert told[1] == "  pairs 1,270 (papers: 1,270); references a pair 1.66"
    cider = next(line for line in told if line.startswith("  CIDEr"))
    assert cider.split()[:6] == ["CIDEr", "0.4740", "47.4", "42.0", "to", "53.0"]
    assert "CIDEr-D" in cider
    rows = [line.split()[0] for line in told if line.startswith("    ") and line.split()[0][0] in "Mt"]
    assert rows == ["M1", "M2", "M3", "these", "M4", "M5", "M6"]
    assert [line.split()[0] for line in told if line.endswith("+ chosen on test")] == ["M3"]
    assert {"  note: one", "  METEOR: it died", "    + M3: their code", "    source: paper A"} < set(told)
    told = list(lines(a_report(pairs=1263, faults=["empties"])))
    assert "pairs 1,263 (papers: 1,270)" in told[1]
    assert "  FAULT empties" in told
    assert next(line for line in told if "these captions" in line).endswith("* other pairs")
