"""Files as users bring them: which field holds what, ids as authors write them, and remedies that work on the file that
provoked them."""

import json
import unicodedata
from dataclasses import replace
from typing import Any

import pytest

from m3diff.__main__ import DATA_REFUSED
from m3diff.commands.score.faults import faults_of_predictions, match, notes_of_captions
from m3diff.commands.score.files import Counts, Prediction, bare_pair, read_predictions
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.records.errors import DataError
from tests.commands.score import traps
from tests.commands.score.conftest import Run
from tests.commands.score.test_marks import TEXTS

REFERENCES = {f"pair_{number}": [text] for number, text in enumerate(TEXTS)}
CAPTIONS = {name: texts[0] for name, texts in REFERENCES.items()}
RIGHT = "CIDEr                 10.0000"
ROWS = [Prediction("000256.png", "a man, in red, left"), Prediction("9", 'the sign says "open"')]
COCO = [{"image_id": row.id, "caption": row.caption} for row in ROWS]
CSV = '000256.png,"a man, in red, left"\n9,"the sign says ""open"""\n'
TSV = '000256.png\ta man, in red, left\n9\t"the sign says ""open"""\n'
SHAPES = {
    "coco.json": json.dumps(COCO),
    "row.json": json.dumps(COCO[0]),
    "integers.json": json.dumps([COCO[0], {"image_id": 9, "caption": ROWS[1].caption}]),
    "other_names.json": json.dumps([{"Filename": row.id, "x": 1, "prediction": row.caption} for row in ROWS]),
    "mapping.json": json.dumps(dict(ROWS)),
    "lists.json": json.dumps({row.id: [row.caption] for row in ROWS}),
    "lines.jsonl": "\n".join(map(json.dumps, COCO)) + "\n\n",
    "bom.json": "\ufeff" + json.dumps(COCO),
    "header.csv": "Image_ID,caption\n" + CSV,
    "turned.csv": "score,caption,uid\n" + '1,"a man, in red, left",000256.png\n0,"the sign says ""open""",9\n',
    "no_header.csv": CSV,
    "header.tsv": "image_id\tcaption\n" + TSV,
    "no_header.tsv": TSV,
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_usual_shape_is_read(name, tmp_path):
    path = tmp_path / name
    path.write_text(SHAPES[name], encoding="utf-8")
    found = read_predictions(path)
    assert found.rows == (ROWS[:1] if name == "row.json" else ROWS)
    assert found.notes == (["2 captions are lists of one text; the text was taken"] if name == "lists.json" else [])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[]", r"a.json: holds no caption; expected \[\{image_id, caption\}\]"),
        ("a.json", "", r"a.json: the file is empty.*expected \[\{image_id, caption\}\]"),
        ("a.json", "7", r"found a whole number 7"),
        ("a.json", '[{"image_id": 1, "caption": "x"', r"a.json: line 1 .*: not valid JSON"),
        ("a.json", '{"1": "x", "1": "z"}', r"a.json: .*'1' occurs twice"),
        ("a.json", '{"1": NaN}', r"a.json: .*NaN is no JSON value"),
        ("a.json", '[{"image_id": 1}]', r"a.json, row 0: no field caption or prediction; found image_id; rename"),
        ("a.json", '[{"key": 1, "caption": ""}]', r"row 0: no field image_id or id; .* rename .* to image_id"),
        ("a.json", '["x"]', r"row 0: expected an object with an id and a caption, found text 'x'"),
        ("a.json", '{"1": null}', r"a.json, '1': caption: expected plain text, found null; write .* \"\""),
        ("a.json", '{"1": 3}', r"caption: expected plain text, found a whole number 3"),
        ("a.json", '{"1": ["the", "cube"]}', r"caption: expected plain text, found a list .*joined by spaces"),
        ("a.json", '{"1": "[\'a cube\']"}', r"caption: expected plain text, found text \"\['a cube'\]\""),
        ("a.json", '[{"image_id": true, "caption": "x"}]', r"row 0: id: expected text or a whole number, found true"),
        ("a.json", '[{"image_id": 3.0, "caption": "x"}]', r"row 0: id: .*found a number 3.0; write the pair's id"),
        ("a.json", '[{"image_id": " ", "caption": "x"}]', r"row 0: id: "),
        ("a.jsonl", '{"id": 1, "caption": "x"}\n{"id": 2}', r"a.jsonl, line 2: no field caption"),
        ("a.jsonl", '{"id": 1, "caption": "x"}\n{"id"', r"a.jsonl, line 2: row: .*not valid JSON"),
        ("a.csv", "image_id,caption\n1,a,b\n", r"a.csv, line 2: row: has 3 fields, the header 2; quote fields"),
        ("a.csv", 'id,caption\n1,"x\n', r"a.csv: line 2: not valid CSV"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_caption_is_named_with_its_place(name, content, message, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message) as refused:
        read_predictions(tmp_path / name)
    assert str(tmp_path / "a.") in str(refused.value)


def rows(**fields: Any) -> list[dict[str, Any]]:
    """A row to each pair; a field is a value, or a text to fill in."""
    return [
        {"image_id": name} | {key: of.format(text) if isinstance(of, str) else of for key, of in fields.items()}
        for name, text in CAPTIONS.items()
    ]


SAID, GOLD = "{}", "now {} again"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"caption": GOLD, "prediction": SAID}, "note: 'prediction' was scored in 6 rows, and not 'caption' beside it"),
        ({"prediction": SAID, "caption": GOLD, "text": GOLD}, "and not 'caption' and 'text' beside it"),
        ({"Caption": GOLD, "Predicted Caption": SAID}, "'Predicted Caption' was scored"),
        ({"answer": GOLD, "response": SAID}, "and not 'answer' beside it"),
        ({"caption": GOLD, "generated_text": SAID}, "'generated_text' was scored"),
        ({"caption": GOLD, "hypothesis": ["x"]}, "6 captions are lists of one text"),
        ({"pred": SAID, "output": SAID}, "pairs 6"),
        ({"gt": GOLD, "references": GOLD, "caption": SAID}, "pairs 6"),
    ],
)
def test_the_model_s_field_is_scored_where_its_name_tells(fields, told: str, command: Run):
    code, printed = command(rows(**fields), REFERENCES)
    assert (code, told in printed) == (0, True)
    assert (RIGHT in printed) == ("hypothesis" not in fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"pred": SAID, "output": GOLD}, "'pred' and 'output'"),
        ({"prediction": GOLD, "response": SAID, "caption": SAID}, "'prediction' and 'response'"),
        ({"caption": SAID, "text": GOLD}, "'caption' and 'text'"),
        ({"caption": GOLD, "answer": SAID}, "'caption' and 'answer'"),
    ],
)
def test_two_fields_that_may_be_the_caption_are_refused(fields, named: str, tmp_path):
    table = rows(**fields)
    lines = [",".join(table[0]), *(",".join(row.values()) for row in table)]
    for name, text in {
        "a.json": json.dumps(table),
        "a.jsonl": "\n".join(map(json.dumps, table)),
        "a.csv": "\n".join(lines),
    }.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=f"{named} could each be the caption"):
            read_predictions(tmp_path / name)


def test_of_several_fields_of_ids_the_references_decide(command: Run):
    number = {name: str(at) for at, name in enumerate(CAPTIONS)}
    for field in ("id", "uid", "file_name"):
        table = [{"name": name, field: number[name], "caption": text} for name, text in CAPTIONS.items()]
        assert RIGHT in command(table, REFERENCES)[1]
    mixed = {name: [texts[0]] for name, texts in REFERENCES.items()} | {number[name]: ["x y"] for name in CAPTIONS}
    table = [{"id": number[name], "name": name, "caption": text} for name, text in CAPTIONS.items()]
    code, told = command(table, mixed)
    assert (code, "'id' and 'name' could both be the id" in told) == (DATA_REFUSED, True)
    coco = [{"image_id": name, "id": number[name], "caption": text} for name, text in CAPTIONS.items()]
    assert "no caption for 6 of 12 pairs" in command(coco, mixed)[1], "image_id is COCO's name of it"


@pytest.mark.parametrize("split", [str.split, list], ids=["words", "characters"])
def test_references_split_into_words_or_characters_are_refused(split, command: Run):
    code, told = command(CAPTIONS, {name: split(texts[0]) for name, texts in REFERENCES.items()})
    assert code == DATA_REFUSED
    assert "references: those of 6 of 6 pairs are single words, such as 'pair_0' with 't" in told
    assert command(CAPTIONS, {name: ["gone", "moved"] for name in REFERENCES})[0] == 0, "short references are some"


def nfd(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def test_ids_are_the_same_in_any_unicode_form(command: Run):
    known = {f"Köln_{number}é.png": texts for number, texts in enumerate(REFERENCES.values())}
    given = {nfd(name): texts[0] for name, texts in known.items()}
    turned = {name: texts[0] for name, texts in known.items()}, {nfd(name): texts for name, texts in known.items()}
    for captions, references in ((given, known), turned):
        code, told = command(captions, references)
        assert (code, RIGHT in told, "were taken for" in told) == (0, True, False)
    first = next(iter(known))
    code, told = command(given, known | {nfd(first): ["x y"]})
    assert (code, "Unicode form" in told, "K\\xf6ln" in told) == (DATA_REFUSED, True, True)
    code, told = command(given | {first: "x"}, known)
    assert (code, "7 captions for 6 ids" in told) == (DATA_REFUSED, True)


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
    found = match([Prediction(given, "x")], ids, "spot_the_diff", Counts(None))
    assert found.captions == {known: "x"}
    assert found.renamed == (None if given == known else (given, known))
    both = [Prediction(given, "x"), Prediction(known, "y")]
    with pytest.raises(DataError, match=rf"2 captions for 1 ids: '{known}' has 2; keep one caption to an id"):
        match(both, ids, "spot_the_diff", Counts(None))


def test_what_two_ids_could_mean_is_unknown_unless_written_in_full():
    given = [Prediction("a/1.png", "x"), Prediction("1", "y")]
    assert match(given, ["a/1.png", "b/1.png"], "own", Counts(None)).unknown == ["1"]


@pytest.mark.parametrize("wrong", ["PAIR_{}", "pair_ {}", "pair-{}", "pair_{}.0", "ｐair_{}"])
def test_an_unknown_id_stands_beside_the_known_one_of_its_letters(wrong: str):
    given = [Prediction(wrong.format(number), "x") for number in range(6)]
    with pytest.raises(DataError, match=r"6 of 6 ids .*'pair_0' differ in .*: write the ids as the references do"):
        match(given, CAPTIONS, "own", Counts(None))


def faults(given: str, **counts: int) -> list[str]:
    """Of captions of these ids, a letter or digit each, for the pairs 0 to 4."""
    found, pairs = (
        [Prediction(name, "x") for name in given],
        {str(n): bare_pair("iedit", str(n), ["a"], []) for n in range(5)},
    )
    known = Counts(len(pairs), **counts)
    return faults_of_predictions(len(found), match(found, pairs, "iedit", known), pairs, pairs, known)


def test_ids_of_another_level_are_named_by_their_number():
    (fault,) = faults("0123", image_pairs=4)
    assert fault.startswith(
        "no caption for 1 of 5 pairs: '4'. There are 4 distinct pairs of images: keyed by its images"
    )
    assert faults("012", image_pairs=4) == ["no caption for 2 of 5 pairs: '3', '4'"]
    assert faults("01234", records=6, image_pairs=4) == []
    with pytest.raises(DataError, match=r"4 of 4 ids are unknown: 'a', .*; valid ones are '0', .* pairs of images"):
        faults("abcd", image_pairs=4)
    with pytest.raises(DataError, match=r"6 of 6 ids are unknown: .* has 6 records: this is the record level"):
        faults("abcdef", records=6)


COMMAS = "\n".join(["image_id,caption", *(f"{name},{text}" for name, text in CAPTIONS.items())])
HEADLESS = "\n".join(f"{name},{text},1" for name, text in CAPTIONS.items())
JSON_LINES = "\n".join(json.dumps({"image_id": name, "caption": text}) for name, text in CAPTIONS.items())
WIDER = "," + COMMAS.replace("\n", "\nx,")

REMEDIES = [
    ("a.csv", HEADLESS, "write e.g. image_id,caption there", "a.csv", "image_id,caption,other0\n" + HEADLESS),
    ("a.csv", COMMAS.replace(",", ";"), "with ',' between them", "a.csv", COMMAS),
    ("a.csv", COMMAS.replace("caption", "words", 1), "line 1 names no columns", "a.csv", COMMAS),
    ("a.csv", "caption" + WIDER, "caption occurs twice; rename", "a.csv", "old" + WIDER),
    ("a.csv", "\n".join(TEXTS), "write e.g. image_id,caption there", "a.csv", COMMAS),
    ("a.csv", f"{COMMAS}, x", "quote fields that hold ','", "a.csv", COMMAS.replace(TEXTS[5], f'"{TEXTS[5]}, x"')),
    ("a.json", JSON_LINES, "an object a line as .jsonl", "a.jsonl", JSON_LINES),
    ("a.json", CAPTIONS | {"pair_9": "x"}, "--allow-faults scores the file all the same", "a.json", CAPTIONS),
    ("a.json", rows(caption=SAID) * 2, "keep one caption to an id", "a.json", rows(caption=SAID)),
    ("a.json", CAPTIONS | {"pair_0": "word " * 5_001}, "Shorten or empty them", "a.json", CAPTIONS | {"pair_0": ""}),
    ("a.json", CAPTIONS | {"pair_0": "x" * 200_000}, "or 40,000 characters", "a.json", CAPTIONS | {"pair_0": ""}),
    ("a.json", None, "a.json: no such file; name the file of captions", "a.json", CAPTIONS),
]


@pytest.mark.parametrize(("name", "content", "told", "mended_name", "mended"), REMEDIES)
def test_a_remedy_works_on_the_file_that_provoked_it(
    name, content, told, mended_name, mended, command: Run, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr("m3diff.commands.score.compute_metrics", None)  # nothing is computed before
        code, printed = command(content, REFERENCES, name=name)
    assert (code, told in printed, "Traceback" in printed) == (DATA_REFUSED, True, False), printed
    code, printed = command(mended, REFERENCES, name=mended_name)
    assert code == 0, printed
    if "--allow-faults" in told:
        assert command(content, REFERENCES, "--allow-faults", name=name)[0] == 0


def test_pairs_that_all_have_the_same_references_have_a_reason_for_their_cider(command: Run):
    same = dict.fromkeys(CAPTIONS, ["no change", "the scene is the same"])
    assert "note: all pairs have the same references, so CIDEr is 0" in command(CAPTIONS, same)[1]
    assert "CIDEr is 0" not in command(CAPTIONS, same | {"pair_0": ["a car left"]})[1]
    code, told = command({"pair_0": "x"}, {"pair_0": ["x"]})
    assert (code, "  CIDEr: there is one pair" in told) == (0, True)


def test_traps_of_a_known_benchmark_are_noted_without_its_name(command: Run):
    records = {str(number): [text] for number, text in enumerate(TEXTS * 234)}  # 1,404, as Spot-the-Diff has records
    last = dict(list(records.items())[:1_270])
    for count, notes in (
        (1_404, ("spot_the_diff's, as under protocol 'single-change': references: 1,404", "this is the record level")),
        (1_263, ("7 pairs of which every reference is empty were dropped",)),
        (1_270, ("spot_the_diff's", "the last one overwrote the others")),
    ):
        references = dict(list(records.items())[:count])
        told = command({name: texts[0] for name, texts in references.items()}, references)[1]
        assert all(note in told for note in notes), count
    whole = {name: [*texts, "x y"] for name, texts in last.items()}
    assert "spot_the_diff" not in command({name: texts[0] for name, texts in last.items()}, whole)[1]
    joined = {name: [". ".join(texts)] for name, texts in traps.merged().items()}
    assert "note: 3 of 5 pairs have one reference of several sentences" in command(traps.CAPTIONS, joined)[1]
    assert "joined text?" not in command(traps.CAPTIONS, traps.merged())[1]


TEST, SINGLE = Protocol("test", n=3), DATASETS["spot_the_diff"].protocols[0]
CUT, BARE = replace(TEST, references="joined", max_words=3), replace(TEST, tokenizer="whitespace")


@pytest.mark.parametrize(
    ("protocol", "captions", "references", "note"),
    [
        (TEST, ["a man left", "", "  "], ["a man left"], "2 captions are empty"),
        (TEST, ["a man left"], ["a man left"], None),
        (CUT, ["one two three four", "a b c"], ["x"], "1 captions were cut after 3 words"),
        (SINGLE, ["a man left. a car came", "a dog ran"], ["a man left"], "captions hold several sentences"),
        (SINGLE, ["a man left. a car came"], ["a man left. a car came"], None),
        (TEST, ["a man 's coat .", "the car , red"], ["A man's coat."], "captions look tokenised already"),
        (BARE, ["animal1 has a head."], ["animal1 has a head ."], "captions are not tokenised, the references are"),
        (BARE, ["animal1 has a head ."], ["animal1 has a head ."], None),
    ],
)
def test_a_way_of_writing_that_moves_scores_is_told(protocol, captions, references, note):
    found = notes_of_captions(captions, references, protocol)
    assert [text[: len(note or "")] for text in found] == ([note] if note else [])
