"""Files of captions of every usual shape, ids as authors write them, and faults and habits that are told by name."""

import json
from dataclasses import replace

import pytest

from m3diff.commands.score.faults import faults_of_predictions, match, notes_of_captions
from m3diff.commands.score.files import Counts, Prediction, Reference, benchmarks, published_counts, read_predictions
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.records.errors import DataError

TEST = Protocol("test", n=3)
NONE = Counts(None)
ROWS = [Prediction("000256.png", "a man, in red, left"), Prediction("9", 'the sign says "open"')]
COCO = [{"image_id": row.id, "caption": row.caption} for row in ROWS]
CSV = '000256.png,"a man, in red, left"\n9,"the sign says ""open"""\n'
TSV = '000256.png\ta man, in red, left\n9\t"the sign says ""open"""\n'
FILES = {
    "coco.json": json.dumps(COCO),
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


@pytest.mark.parametrize("name", FILES)
def test_every_usual_shape_is_read(name, tmp_path):
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8")
    found = read_predictions(path)
    assert found.rows == ROWS
    assert found.notes == (["2 captions are lists of one text; the text was taken"] if name == "lists.json" else [])


def test_a_key_that_is_written_twice_is_kept_twice_and_half_a_surrogate_pair_becomes_a_question_mark(tmp_path):
    (tmp_path / "a.json").write_text('{"1": "x", "2": "a \\ud800 b", "1": "z"}')
    assert read_predictions(tmp_path / "a.json").rows == [("1", "x"), ("2", "a ? b"), ("1", "z")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[]", r"a.json: holds no caption; expected \[\{image_id, caption\}\]"),
        ("a.json", "7", r"found a whole number 7"),
        ("a.json", '[{"image_id": 1, "caption": "x"', r"a.json: not valid JSON"),
        ("a.json", '[{"image_id": 1}]', r"a.json, row 0: no field caption or prediction .* found image_id"),
        ("a.json", '["x"]', r"row 0: expected an object with an id and a caption, found text 'x'"),
        ("a.json", '{"1": null}', r"a.json, '1': caption: expected text, found null"),
        ("a.json", '[{"image_id": true, "caption": "x"}]', r"row 0: id: expected text or a whole number, found true"),
        ("a.json", '[{"image_id": " ", "caption": "x"}]', r"row 0: id: "),
        ("a.jsonl", '{"id": 1, "caption": "x"}\n{"id": 2}', r"a.jsonl, line 2: no field caption"),
        ("a.csv", "image_id,caption\n1,a,b\n", r"a.csv, line 2: has 3 fields, the first line 2; quote captions"),
        ("a.csv", 'id,caption\n1,"x\n', r"a.csv: line 2: not valid CSV"),
        ("a.csv", "\n", r"a.csv: the file is empty"),
    ],
)
def test_a_row_that_is_no_caption_is_named_with_its_place(name, content, message, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_predictions(tmp_path / name)


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("235.png", "235.png"),
        ("235", "235.png"),
        ("000235.png", "235.png"),
        ("spot_the_diff/235.png", "235.png"),
        ("resized_images/235.PNG", "235.png"),
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
    found = match([Prediction(given, "x")], ids, "spot_the_diff", NONE)
    assert found.captions == {known: "x"}
    assert found.renamed == (None if given == known else (given, known))
    both = [Prediction(given, "x"), Prediction(known, "y")]
    with pytest.raises(DataError, match=rf"2 captions for 1 ids: '{known}' has 2; a dictionary would have kept the la"):
        match(both, ids, "spot_the_diff", NONE)


def test_what_two_ids_could_mean_is_unknown_unless_written_in_full():
    rows = [Prediction("a/1.png", "x"), Prediction("1", "y")]
    assert match(rows, ["a/1.png", "b/1.png"], "own", NONE).unknown == ["1"]


def faults(given: str, **counts: int) -> list[str]:
    """Of captions of these ids, a letter or digit each, for the pairs 0 to 4."""
    rows, pairs = [Prediction(name, "x") for name in given], {str(n): Reference(["a"], []) for n in range(5)}
    known = Counts(len(pairs), **counts)
    return faults_of_predictions(len(rows), match(rows, pairs, "iedit", known), pairs, pairs, known)


def test_ids_of_another_level_are_named_by_their_number():
    (fault,) = faults("0123", image_pairs=4)
    assert fault == (
        "no caption for 1 of 5 pairs: '4'. There are 4 distinct pairs of images: keyed by its images, a pair "
        "overwrote others that have the same; key by the id"
    )
    assert faults("012", image_pairs=4) == ["no caption for 2 of 5 pairs: '3', '4'"]
    assert faults("01234", records=6, image_pairs=4) == []
    with pytest.raises(DataError, match=r"4 of 4 ids are unknown: 'a', .*; valid ones are '0', .* pairs of images"):
        faults("abcd", image_pairs=4)
    with pytest.raises(DataError, match=r"6 of 6 ids are unknown: .* has 6 records: this is the record level"):
        faults("abcdef", records=6)


def test_published_counts_of_the_benchmarks():
    known = benchmarks()
    for name, protocol, counts in (
        ("spot_the_diff", None, Counts(1_270, 2_107, 7, 1_404, None)),
        ("spot_the_diff", "multi-change", Counts(1_270, 1_270, 7, 1_404, None)),
        ("iedit", None, Counts(495, 1_485, 0, None, 446)),
        ("clevr_change", "color", Counts(797)),
        ("minichange", None, Counts(None)),
    ):
        assert published_counts(known[name], known[name].protocol(protocol)) == counts
    assert [one.name for one in known["omnidiff_render"].protocols] == ["render"]


SINGLE = DATASETS["spot_the_diff"].protocols[0]
CUT, BARE = replace(TEST, references="joined", max_words=3), replace(TEST, tokenizer="whitespace")
TOKENS = "captions look tokenised already; they are tokenised again (PTB), as the references are"
NO_TOKENS = "captions are not tokenised, the references are: 'head.' is no 'head'; write 'head .'"
SENTENCES = "captions hold several sentences: joined text? References of 'single-change' are one each"


@pytest.mark.parametrize(
    ("protocol", "captions", "references", "notes"),
    [
        (TEST, ["a man left", "", "  "], ["a man left"], ["2 captions are empty"]),
        (TEST, ["a man left"], ["a man left"], []),
        (CUT, ["one two three four", "a b c"], ["x"], ["1 captions were cut after 3 words, as the references are"]),
        (SINGLE, ["a man left. a car came", "a dog ran"], ["a man left"], [SENTENCES]),
        (SINGLE, ["a man left. a car came"], ["a man left. a car came"], []),
        (TEST, ["a man 's coat .", "the car , red"], ["A man's coat."], [TOKENS]),
        (BARE, ["animal1 has a head."], ["animal1 has a head ."], [NO_TOKENS]),
        (BARE, ["animal1 has a head ."], ["animal1 has a head ."], []),
    ],
)
def test_a_way_of_writing_that_moves_scores_is_told(protocol, captions, references, notes):
    assert notes_of_captions(captions, references, protocol) == notes
