"""Files as users bring them, through the command line: which field holds what, ids of another form, and remedies that
work on the file that provoked them."""

import json
import unicodedata
from collections.abc import Mapping
from typing import Any

import pytest

from m3diff.__main__ import DATA_REFUSED
from tests.commands.score import traps
from tests.commands.score.conftest import Run
from tests.commands.score.test_marks import TEXTS

REFERENCES = {f"pair_{number}": [text] for number, text in enumerate(TEXTS)}
CAPTIONS = {name: texts[0] for name, texts in REFERENCES.items()}
RIGHT = "CIDEr                 10.0000"


def rows(**fields: Any) -> list[dict[str, Any]]:
    """A row to each pair; a field is a value, or what makes it of id and caption."""
    return [
        {"image_id": name} | {key: of(name, text) if callable(of) else of for key, of in fields.items()}
        for name, text in CAPTIONS.items()
    ]


def said(_: str, text: str) -> str:
    return text


def gold(_: str, text: str) -> str:
    return f"now {text} again"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"caption": gold, "prediction": said}, "note: 'prediction' was scored in 6 rows, and not 'caption' beside it"),
        ({"prediction": said, "caption": gold, "text": gold}, "and not 'caption' and 'text' beside it"),
        ({"Caption": gold, "Predicted Caption": said}, "'Predicted Caption' was scored"),
        ({"answer": gold, "response": said}, "and not 'answer' beside it"),
        ({"caption": gold, "generated_text": said}, "'generated_text' was scored"),
        ({"caption": gold, "hypothesis": [said("", "x")]}, "6 captions are lists of one text"),
        ({"pred": said, "output": said}, "pairs 6"),
        ({"gt": gold, "references": gold, "caption": said}, "pairs 6"),
    ],
)
def test_the_model_s_field_is_scored_where_its_name_tells(fields: Mapping[str, Any], told: str, command: Run):
    code, printed = command(rows(**fields), REFERENCES)
    assert code == 0
    assert told in printed
    assert (RIGHT in printed) == ("hypothesis" not in fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"pred": said, "output": gold}, "'pred' and 'output'"),
        ({"prediction": gold, "response": said, "caption": said}, "'prediction' and 'response'"),
        ({"caption": said, "text": gold}, "'caption' and 'text'"),
        ({"caption": gold, "answer": said}, "'caption' and 'answer'"),
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_two_fields_that_may_be_the_caption_are_refused(fields, named: str, suffix: str, command: Run):
    table = rows(**fields)
    lines = [",".join(table[0]), *(",".join(row.values()) for row in table)]
    written: Any = {".json": table, ".jsonl": "\n".join(map(json.dumps, table)), ".csv": "\n".join(lines)}[suffix]
    code, told = command(written, REFERENCES, name=f"captions{suffix}")
    assert code == DATA_REFUSED
    assert f"{named} could each be the caption" in told
    wrong = {"caption": "text", "pred": "output", "prediction": "response"}[next(iter(fields))]
    keep = [{key: text for key, text in row.items() if key != wrong} for row in table]  # the remedy
    assert command(keep, REFERENCES)[0] == (DATA_REFUSED if "answer" in fields else 0)


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


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (["the", "cube", "moved"], "join its 3 words by spaces"),
        (["the cube", "it moved"], "one caption to a pair, as text"),
        ([["the", "cube"]], "one caption to a pair, as text"),
        (None, 'write ""'),
        (float("nan"), 'write ""'),
        ([], 'write ""'),
        (3, "one caption to a pair, as text"),
    ],
)
def test_a_caption_that_is_no_text_is_refused_with_a_remedy(value: Any, told: str, command: Run):
    code, printed = command(rows(caption=value), REFERENCES)
    assert code == DATA_REFUSED
    assert "row 0: caption: expected text" in printed
    assert told in printed
    if value != value:
        return  # no JSON of references holds it
    annotations = [{"image_id": name, "caption": value} for name in CAPTIONS]
    code, printed = command(CAPTIONS, {"images": [{"id": name} for name in CAPTIONS], "annotations": annotations})
    assert code == DATA_REFUSED
    assert "references.json, annotation 0: caption: expected text" in printed
    assert told in printed


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
    for captions, references in (
        (given, known),
        ({n: t[0] for n, t in known.items()}, {nfd(n): known[n] for n in known}),
    ):
        code, told = command(captions, references)
        assert (code, RIGHT in told) == (0, True)
        assert "were taken for" not in told
    first = next(iter(known))
    code, told = command(given, known | {nfd(first): ["x y"]})
    assert (code, "two Unicode forms" in told) == (DATA_REFUSED, True)
    assert "K\\xf6ln" in told
    code, told = command(given | {first: "x"}, known)
    assert (code, "7 captions for 6 ids" in told) == (DATA_REFUSED, True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (str.upper, "'PAIR_0' and 'pair_0' differ in upper and lower case alone"),
        (lambda name: name.replace("_", "_ "), "'pair_ 0' and 'pair_0' differ in spaces alone"),
        (lambda name: name.replace("_", "-"), "'pair-0' and 'pair_0' differ in punctuation"),
        (lambda name: f"{name}.0", "'pair_0.0' and 'pair_0' differ by the .0 of a number with a point"),
        (lambda name: name.replace("p", "ｐ"), "in the Unicode form of letters that look the same"),
    ],
)
def test_how_an_unknown_id_differs_from_a_known_one_is_in_the_remedy(change, told: str, command: Run):
    wrong = {change(name): text for name, text in CAPTIONS.items()}
    code, printed = command(wrong, REFERENCES)
    assert code == DATA_REFUSED
    assert told in printed
    assert "write the ids as the references do" in printed
    assert command(CAPTIONS, REFERENCES)[0] == 0
    assert "6 of 6" in printed


def test_ids_with_a_folder_of_windows_are_known(command: Run):
    code, told = command({f"images\\{name}.png": text for name, text in CAPTIONS.items()}, REFERENCES)
    assert (code, RIGHT in told) == (0, True)


PLAIN = [[name, text] for name, text in CAPTIONS.items()]
HEADLESS = "\n".join(",".join([*row, "1"]) for row in PLAIN)
JSON_LINES = "\n".join(json.dumps({"image_id": name, "caption": text}) for name, text in PLAIN)
SEMICOLONS = "\n".join(["image_id;caption", *(";".join(row) for row in PLAIN)])
COMMAS = "\n".join(["image_id,caption", *(",".join(row) for row in PLAIN)])
WIDER = "," + COMMAS.replace("\n", "\nx,")
ROWS = rows(caption=said)

REMEDIES = [
    ("a.csv", HEADLESS, "write e.g. image_id,caption,other0 there", "a.csv", "image_id,caption,other0\n" + HEADLESS),
    ("a.csv", SEMICOLONS, "is separated by ';'; save the file with ','", "a.csv", SEMICOLONS.replace(";", ",")),
    ("a.csv", COMMAS.replace(",", "\t"), "is separated by '\\t'", "a.csv", COMMAS),
    ("a.csv", COMMAS.replace("caption", "words", 1), "line 1 names no columns; write e.g. image_id", "a.csv", COMMAS),
    ("a.csv", COMMAS.replace("caption", "image_id", 1), "names no columns", "a.csv", COMMAS),
    ("a.csv", "caption" + WIDER, "has 'caption' twice; rename", "a.csv", "old" + WIDER),
    ("a.csv", "\n".join(TEXTS), "has one column, and captions need an id; write image_id,caption", "a.csv", COMMAS),
    ("a.csv", f"{COMMAS}, x", "quote captions that hold ','", "a.csv", COMMAS.replace(TEXTS[5], f'"{TEXTS[5]}, x"')),
    ("a.json", JSON_LINES, "Name it .jsonl", "a.jsonl", JSON_LINES),
    ("a.json", {"images": [], "annotations": ROWS}, "'annotations' is a list of rows; write that list", "a.json", ROWS),
    ("a.json", rows(words=said), "found image_id, words; rename the one that holds it to caption", "a.json", ROWS),
    ("a.json", [{"key": 1, "caption": "x"}], "rename the one that holds it to image_id", "a.json", ROWS),
    ("a.json", "", "the file is empty; expected [{image_id, caption}]", "a.json", CAPTIONS),
    ("a.json", [{"image_id": 3.0, "caption": "x"}], "3.0 is a number with a point; write 3", "a.json", CAPTIONS),
    ("a.json", rows(caption=lambda name, text: f"['{text}']"), "is a list printed as text", "a.json", CAPTIONS),
    ("a.json", CAPTIONS | {"pair_9": "x"}, "--allow-faults scores the file all the same", "a.json", CAPTIONS),
    ("a.json", ROWS * 2, "Keep one caption to an id", "a.json", ROWS),
    ("a.json", CAPTIONS | {"pair_0": "word " * 5_001}, "Shorten or empty them", "a.json", CAPTIONS | {"pair_0": ""}),
    ("a.json", CAPTIONS | {"pair_0": "x" * 200_000}, "or 40,000 characters", "a.json", CAPTIONS | {"pair_0": ""}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "told", "mended_name", "mended"), REMEDIES)
def test_a_remedy_works_on_the_file_that_provoked_it(name, content, told, mended_name, mended, command: Run):
    code, printed = command(content, REFERENCES, name=name)
    assert code == DATA_REFUSED
    assert told in printed
    assert "Traceback" not in printed
    code, printed = command(mended, REFERENCES, name=mended_name)
    assert code == 0, printed
    if "--allow-faults" in told:
        assert command(content, REFERENCES, "--allow-faults", name=name)[0] == 0


def test_a_file_of_captions_that_is_not_there_is_no_incomplete_dataset(command: Run):
    code, told = command(None, REFERENCES)
    assert code == DATA_REFUSED
    assert "captions.json: no such file; name the file of captions" in told


def test_a_caption_of_200_000_words_is_a_fault_before_anything_is_started(command: Run, monkeypatch):
    monkeypatch.setattr("m3diff.commands.score.compute_metrics", None)
    code, told = command(CAPTIONS | {"pair_3": "the cube moved " * 70_000}, REFERENCES)
    assert code == DATA_REFUSED
    assert "1 captions have more than 5,000 words or 40,000 characters, such as 'pair_3' with 210,000 words" in told


def test_pairs_that_all_have_the_same_references_have_a_reason_for_their_cider(command: Run):
    same = dict.fromkeys(CAPTIONS, ["no change", "the scene is the same"])
    _, told = command(CAPTIONS, same)
    assert "note: all pairs have the same references, so CIDEr is 0" in told
    assert "CIDEr is 0" not in command(CAPTIONS, same | {"pair_0": ["a car left"]})[1]
    code, told = command({"pair_0": "x"}, {"pair_0": ["x"]})
    assert code == 0
    assert "  CIDEr: there is one pair" in told


def test_traps_of_a_known_benchmark_are_noted_without_its_name(command: Run):
    records = {str(number): [text] for number, text in enumerate(TEXTS * 234)}  # 1,404, as Spot-the-Diff has records
    captions = {name: texts[0] for name, texts in records.items()}
    _, told = command(captions, records)
    assert "note: if these are spot_the_diff's, as under protocol 'single-change': references: 1,404" in told
    assert "this is the record level" in told
    dropped = dict(list(records.items())[:1_263])
    assert "7 pairs of which every reference is empty were dropped" in command(captions_of(dropped), dropped)[1]
    last = dict(list(records.items())[:1_270])
    assert "spot_the_diff's" in command(captions_of(last), last)[1]
    assert "the last one overwrote the others" in command(captions_of(last), last)[1]
    whole = {name: [*texts, "x y"] for name, texts in last.items()}
    assert "spot_the_diff" not in command(captions_of(whole), whole)[1]


def captions_of(references: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: texts[0] for name, texts in references.items()}


def test_joined_references_are_noted_without_a_benchmark(command: Run):
    joined = {name: [". ".join(texts)] for name, texts in traps.merged().items()}
    _, told = command(traps.CAPTIONS, joined)
    assert "note: 2 of 5 pairs have one reference of several sentences: joined text?" in told or "3 of 5" in told
    assert "joined text?" not in command(traps.CAPTIONS, traps.merged())[1]
