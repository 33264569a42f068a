import json

import pytest

from m3diff.commands.score.files import Prediction, read_predictions
from m3diff.records.errors import DataError

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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[]", r"a.json: holds no caption; expected \[\{image_id, caption\}\]"),
        ("a.json", "7", r"found a whole number 7"),
        ("a.json", '[{"image_id": 1, "caption": "x"', r"a.json: not valid JSON"),
        ("a.json", '[{"image_id": 1}]', r"a.json, row 0: no field caption or prediction .* found image_id"),
        ("a.json", '[{"key": 1, "caption": "x"}]', r"row 0: no field image_id or id .*; found key, caption"),
        ("a.json", '["x"]', r"row 0: expected an object with an id and a caption, found text 'x'"),
        ("a.json", '{"1": null}', r"a.json, '1': caption: expected text, found null"),
        ("a.json", '{"1": ["x", "y"]}', r"'1': caption: .*; one caption to a pair, as text"),
        ("a.json", '{"1": "[\'a man left\']"}', r"caption: is a list printed as text, .*; write what it holds"),
        ("a.json", '[{"image_id": true, "caption": "x"}]', r"row 0: id: expected text or a whole number, found true"),
        ("a.json", '[{"image_id": " ", "caption": "x"}]', r"row 0: id: "),
        ("a.jsonl", '{"id": 1, "caption": "x"}\n{"id": 2}', r"a.jsonl, line 2: no field caption"),
        ("a.csv", "image_id,caption\n1,a,b\n", r"a.csv, line 2: has 3 fields, the first line 2; quote captions"),
        ("a.csv", "1,2,x\n", r"a.csv: line 1 names no columns; write e.g. image_id,caption"),
        ("a.csv", 'id,caption\n1,"x\n', r"a.csv: line 2: not valid CSV"),
        ("a.csv", "", r"the file is empty"),
    ],
)
def test_a_row_that_is_no_caption_is_named_with_its_place(name, content, message, tmp_path):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_predictions(tmp_path / name)


def test_a_key_that_is_written_twice_is_kept_twice(tmp_path):
    (tmp_path / "a.json").write_text('{"1": "x", "2": "y", "1": "z"}')
    assert read_predictions(tmp_path / "a.json").rows == [("1", "x"), ("2", "y"), ("1", "z")]


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path):
    (tmp_path / "a.json").write_text('{"1": "a \\ud800 b"}')
    assert read_predictions(tmp_path / "a.json").rows == [("1", "a ? b")]
