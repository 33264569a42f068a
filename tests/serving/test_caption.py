"""Test `m3diff caption` with a user's images: two paths, folders, tables, overlays and refusals."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from m3diff.__main__ import DATA_REFUSED, USAGE, main
from m3diff.datasets.files import Embedded
from m3diff.images.open import load_image
from m3diff.models import FAMILIES
from m3diff.models.checkpoint import read_sample_limits, read_trained_on
from m3diff.models.contract import Prepared, Takes
from m3diff.models.generation import QUESTION, load_captioner
from m3diff.models.sample_limits import TrainedOn, describe_image_counts
from m3diff.records.errors import DataError, Fault, ValueFault
from m3diff.records.sample import Turn
from m3diff.registry import model_source, tracking, versions
from m3diff.serving.caption import (
    BATCH_INPUTS,
    CaptionInput,
    CaptionOutput,
    answer_inputs,
    ask_question,
    check_inputs,
    find_inputs,
)
from m3diff.serving.questions import NOTE
from m3diff.settings.section import ParamsError
from tests.errors import Message, raises
from tests.prepared_sets import SET_BYTES, PreparedSets
from tests.serving.toy import png
from tests.tiny import noise_image, tiny_base, tiny_checkpoint
from tests.toy import REPOSITORY

EMBEDDED = str(REPOSITORY / "profiles/embedded.yaml")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    return tiny_checkpoint(tiny_base(root / "base"), root / "checkpoint")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(BATCH_INPUTS + 5):
        noise_image(number, (40, 40)).save(tmp_path / f"{number}.png")
    return tmp_path


def pairs(images: Path, count: int, question: str | None = None) -> list[CaptionInput]:
    files = [images / f"{number}.png" for number in range(count + 1)]
    return [CaptionInput(f"p{number}", (files[number], files[number + 1]), question) for number in range(count)]


def opened_pairs(images: Path, count: int) -> list[tuple[Image.Image, ...]]:
    return [tuple(load_image(image) for image in pair.images) for pair in pairs(images, count)]


def caption(checkpoint: Path, *arguments: object) -> int:
    return main(["--params", EMBEDDED, "caption", *map(str, arguments), "--model", str(checkpoint)])


def test_every_pair_has_its_own_answer_in_order_over_the_batches(checkpoint, images, capsys):
    captioner = load_captioner(checkpoint)
    image_pairs = pairs(images, BATCH_INPUTS + 3)
    answers = list(answer_inputs(captioner, image_pairs, None))
    assert [answer.input for answer in answers] == image_pairs
    single_captions = [next(answer_inputs(captioner, [pair], None)).caption for pair in image_pairs]
    assert [answer.caption for answer in answers] == single_captions
    assert len(set(single_captions)) > 1, "equal captions would not show their order"
    capsys.readouterr()
    assert caption(checkpoint.parent, images / "0.png", images / "1.png") == 0, "the parent folder is accepted, too"
    assert capsys.readouterr().out == f"{' '.join(single_captions[0].split())}\n"


def test_an_unreadable_pair_is_reported_and_the_others_are_captioned(checkpoint, images, capsys):
    (images / "bad.png").write_bytes(b"no image")
    Image.new("1", (1, 30_000)).save(images / "thin.png")
    (images / "t.csv").write_text("before,after\n0.png,1.png\n2.png,bad.png\nthin.png,1.png\n4.png,5.png\n")
    assert caption(checkpoint, images / "t.csv") == DATA_REFUSED
    as_text = capsys.readouterr()
    assert [line.split("\t")[0] for line in as_text.out.splitlines()] == ["0", "4"]
    assert Message("images.text", path=images / "bad.png", kind="text").in_text(as_text.err)
    size = {"width": 1, "height": 30_000, "value": 900_000_000, "limit": 100_000_000}
    assert Message("images.too_large", path=images / "thin.png", **size).in_text(as_text.err)
    assert caption(checkpoint, images / "t.csv", "--json") == DATA_REFUSED
    as_json = capsys.readouterr()
    summary = Message("command.pairs_without_caption", count=2, pairs=4)
    assert summary.in_text(as_json.err.splitlines()[-1])
    rows = [json.loads(line) for line in as_json.out.splitlines()]
    assert [row["name"] for row in rows] == ["0", "2", "thin", "4"]
    assert rows[0]["before"] == str(images / "0.png")
    assert rows[1].keys() == {"name", "before", "after", "error", "model", "version"}
    captions = [" ".join(row["caption"].split()) for row in (rows[0], rows[3])]
    assert captions == [line.split("\t")[1] for line in as_text.out.splitlines()]


def test_a_question_with_an_image_placeholder_is_refused(checkpoint, images, capsys):
    question = (images / "0.png", images / "1.png", "--question")
    assert caption(checkpoint, *question, "What is new in <image>?") == USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert Message("serving.unusable_question", value="What is new in <image>?").in_text(printed.err)
    assert caption(checkpoint, *question, "What is new?") == 0


def test_a_question_to_a_model_that_reads_no_questions_is_refused(images):
    takes = FAMILIES["blip2idc"].takes
    with raises(ParamsError, "serving.question_not_read", value="Is a cup gone?"):
        ask_question(pairs(images, 1), "Is a cup gone?", takes)
    assert ask_question(pairs(images, 1), None, takes) == pairs(images, 1)


SIDE = 13 * 40  # pixels of an image of 40 that is drawn large enough to be seen


class Model:
    """A captioner that returns these maps, and records the dialogues and the last images."""

    trained_on = TrainedOn("What has changed?")
    question = "What has changed?"

    def __init__(self, maps: np.ndarray | None) -> None:
        self.maps = maps
        self.family = SimpleNamespace(takes=Takes(), maps=maps)
        self.dialogues = list[Any]()
        self.batches = list[int]()
        self.images = list[Any]()
        self.processor = SimpleNamespace(prepare=prepare_images)

    def ask(self, question: str | None) -> Turn:
        return Turn(question or self.question)

    def encode_prompt(self, turns: Any, marks: Any) -> tuple[int, ...]:
        return tuple(range(len(str(turns))))

    def answer(self, prepared: list[Prepared], dialogues: list[Any], saliency: bool) -> Any:
        self.dialogues += dialogues
        self.batches.append(len(prepared))
        self.images = [images.tensors["images"] for images in prepared]
        return ["same"] * len(prepared), self.maps


def prepare_images(images: Any) -> Prepared:
    pixels: Any = np.stack([np.asarray(image) for image in images]) if images else np.zeros(0)
    return Prepared({"images": pixels}, ("",) * len(pixels))


def test_each_pair_s_overlay_has_its_own_map_and_both_images_side_by_side(checkpoint, images, tmp_path):
    file = tmp_path / "made" / "out.png"
    noise_image(5, (60, 30)).save(images / "wide.png")
    assert caption(checkpoint, images / "0.png", images / "wide.png", "--overlay", file) == 0
    assert Image.open(file).size == (13 * 40 + 12 + 18 * 60, 18 * 30)
    grids = np.full((3, 4, 4), 1 / 16, np.float16)
    grids[1, 0, 0] *= 8
    model: Any = Model(grids)
    list(answer_inputs(model, pairs(images, 3), tmp_path / "made"))
    for number in range(3):
        sheet = np.asarray(Image.open(tmp_path / "made" / f"p{number}.png"))
        assert sheet.shape[1] == 2 * SIDE + 12
        before, after = (np.asarray(noise_image(number + n, (40, 40))).repeat(13, 0).repeat(13, 1) for n in (0, 1))
        for side, image in ((sheet[:, :SIDE], before), (sheet[:, SIDE + 12 :], after)):
            assert np.array_equal(side, image) == (number != 1)
            assert np.array_equal(side[SIDE // 2 :, SIDE // 2 :], image[SIDE // 2 :, SIDE // 2 :])


@pytest.mark.parametrize("question", [None, "Is a cup gone?"], ids=["none", "a question"])
def test_a_model_is_asked_the_question_or_its_own(question, images):
    model: Any = Model(None)
    list(answer_inputs(model, pairs(images, 1, question), None))
    assert model.dialogues == [(Turn(question or "What has changed?"),)]


def test_a_checkpoint_is_asked_the_question_of_its_training_by_default(checkpoint, images, tmp_path):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    question = "Is there a new object in the second image?"
    captions = {}
    for name, trained_on in (("trained", {"question": question}), ("earlier", None), ("empty", {"question": ""})):
        shutil.copytree(checkpoint, tmp_path / name)
        fields = {**manifest, "base": str(checkpoint / manifest["base"]), "trained_on": trained_on}
        (tmp_path / name / "manifest.json").write_text(json.dumps(fields))
        captioner = load_captioner(tmp_path / name, 5)
        captions[name] = [answer.caption for answer in answer_inputs(captioner, pairs(images, 3), None)]
        assert captions[name] == captioner.caption(opened_pairs(images, 3), captioner.question)
        assert captioner.question == (question if name == "trained" else QUESTION)
    assert captions["earlier"] == captions["empty"] != captions["trained"]


def test_a_model_gets_the_image_before_first(images):
    model: Any = Model(None)
    list(answer_inputs(model, pairs(images, 1), None))
    ((before, after),) = model.images
    assert np.array_equal(before, noise_image(0, (40, 40)))
    assert np.array_equal(after, noise_image(1, (40, 40)))


def test_overlays_of_a_model_without_maps_are_refused(images):
    model: Any = Model(None)
    with raises(DataError, "serving.no_saliency_maps"):
        list(answer_inputs(model, pairs(images, 1), images / "o.png"))


STORE = ("sqlite:///:memory:", "m3diff")


def test_a_version_has_a_checkpoint_and_its_own_limit_of_tokens(checkpoint, monkeypatch):
    version = SimpleNamespace(version="3", tags={"predict.max_new_tokens": "5"})
    registered = {"3": version}
    monkeypatch.setattr(versions, "find_version", lambda client, name, model: registered[model])
    monkeypatch.setattr(versions, "download_checkpoint", lambda requested: checkpoint if requested is version else None)
    monkeypatch.setattr(tracking, "connect", lambda uri: nullcontext())
    source = model_source.find(*STORE, "3", Path("base"), 64)
    assert source.name == "m3diff/3"
    assert source.max_new_tokens == 5
    assert model_source.load(source).max_new_tokens == 5


def test_a_folder_has_the_limit_of_tokens_of_the_parameters(checkpoint):
    source = model_source.find(*STORE, str(checkpoint), Path("base"), 64)
    assert source.name.startswith("m3diff/sha256-")
    assert source.max_new_tokens == 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folders = ("one/a.png", "one/b.JPG", "one/notes.txt", "other/b.webp", "other/a.png", "empty/notes.txt")
    for name in (*folders, "x.png", "y.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_two_folders_are_pairs_by_name_in_any_format(folder):
    a = CaptionInput("a", (folder / "one/a.png", folder / "other/a.png"))
    b = CaptionInput("b", (folder / "one/b.JPG", folder / "other/b.webp"))
    assert find_inputs(folder / "one", folder / "other") == [a, b]


def test_hidden_files_and_folders_are_no_images(folder):
    for side in ("one", "other"):
        (folder / side / "._a.png").write_bytes(b"\0\5\26\7")
        (folder / side / ".hidden").mkdir()
    assert [pair.name for pair in find_inputs(folder / "one", folder / "other")] == ["a", "b"]


def test_one_name_in_two_formats_is_two_images(folder):
    for file in ("one/c.png", "one/c.jpg", "other/c.png", "other/c.jpg"):
        (folder / file).touch()
    names = [pair.name for pair in find_inputs(folder / "one", folder / "other")]
    assert names == ["a", "b", "c.jpg", "c.png"]


def test_two_images_are_one_pair(folder):
    assert find_inputs(folder / "x.png", folder / "y.png") == [CaptionInput("x", (folder / "x.png", folder / "y.png"))]


def test_a_table_names_paths_from_its_own_folder(folder):
    text = f"\ufeffid,after,before\n7,y.png,x.png\n8,{folder}/x.png,one/a.png\n"
    (folder / "pairs.csv").write_text(text, encoding="utf-8")
    assert find_inputs(folder / "pairs.csv", None) == [
        CaptionInput("x", (folder / "x.png", folder / "y.png")),
        CaptionInput("a", (folder / "one/a.png", folder / "x.png")),
    ]


NO_PAIR = [
    ("nowhere", "one", "", "serving.missing_input", {"path": "{folder}/nowhere"}),
    ("one", None, "", "serving.folder_without_second", {"path": "{folder}/one"}),
    ("one", "x.png", "", "serving.folder_and_image", {"before": "{folder}/one", "after": "{folder}/x.png"}),
    ("empty", "empty", "", "serving.no_image", {"path": "{folder}/empty"}),
    (
        "t.csv",
        None,
        "first;after\n1;2\n",
        "serving.no_image_columns_at_delimiter",
        {"path": "{folder}/t.csv", "columns": "['first', 'after']", "delimiter": ";"},
    ),
    ("t.csv", None, "before,after\n", "serving.no_row", {"path": "{folder}/t.csv"}),
    (
        "t.jsonl",
        None,
        '{"first": 1, "second": 2}\n',
        "serving.no_image_columns",
        {"path": "{folder}/t.jsonl", "columns": "['first', 'second']"},
    ),
    (
        "t.csv",
        None,
        "before,after\nx.png,http://[::1]/y.png\n",
        "serving.unusable_path",
        {"path": "{folder}/t.csv, line 2", "key": "after"},
    ),
]


@pytest.mark.parametrize(("before", "after", "table", "code", "fields"), NO_PAIR)
def test_paths_that_are_no_pair_are_refused(folder, before, after, table, code, fields):
    for name in ("t.csv", "t.jsonl"):
        (folder / name).write_text(table)
    with raises(DataError, code) as refused:
        find_inputs(folder / before, after and folder / after)
    values = {name: str(refused.value.fields[name]) for name in fields}
    assert values == {name: value.format(folder=folder) for name, value in fields.items()}


def test_a_table_without_rows_is_refused_if_its_columns_are_named(folder):
    (folder / "t.csv").write_text("before,after\n")
    with raises(DataError, "serving.no_row", path=folder / "t.csv"):
        find_inputs(folder / "t.csv", None, columns={"before": "before", "after": "after"})


def test_the_images_in_a_table_itself_are_pairs(tmp_path):
    contents = [png(noise_image(number)) for number in range(2)]
    row = {side: {"bytes": data, "path": None} for side, data in zip(("before", "after"), contents, strict=True)}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "t.parquet")
    (pair,) = find_inputs(tmp_path / "t.parquet", None)
    for image, data in zip(pair.images, contents, strict=True):
        assert isinstance(image, Embedded)
        assert image.read() == data


def test_only_the_first_of_many_unmatched_names_are_listed(folder):
    (folder / "many").mkdir()
    for number in range(9):
        (folder / "many" / f"n{number}.png").touch()
    fault = Fault("serving.unmatched_names", value=11, names=["a", "b", "n0", "n1", "n2", "..."])
    with raises(DataError, "serving.names_do_not_match", faults=[fault]):
        find_inputs(folder / "one", folder / "many")


def test_a_row_with_another_number_of_fields_than_the_header_is_refused(folder):
    (folder / "t.csv").write_text("before,after\nx.png,y.png\nx.png\n")
    with pytest.raises(DataError, match="t.csv, line 3"):
        find_inputs(folder / "t.csv", None)


@pytest.mark.parametrize("path_in_table", ["../x.png", "{folder}/x.png", "one/../../x.png", "link.png", "..\\x.png"])
def test_paths_in_a_table_stay_in_its_folder_or_in_the_image_root(folder, path_in_table):
    table = folder / "table" / "pairs.csv"
    (table.parent / "one").mkdir(parents=True)
    (table.parent / "link.png").symlink_to(folder / "x.png")
    (table.parent / "in.png").touch()
    table.write_text(f"before,after\nin.png,{path_in_table.format(folder=folder)}\n")
    location = f"{table}, line 2"
    code = "serving.link_out_of_folder" if path_in_table == "link.png" else "serving.unusable_path"
    with raises(DataError, code, path=location, key="after"):
        find_inputs(table, None)
    if "\\" not in path_in_table:
        (pair,) = find_inputs(table, None, folder)
        assert pair.images[0] == table.parent / "in.png"
        assert pair.images[1].resolve() == folder / "x.png"
    with raises(DataError, code, path=location, key="after"):
        find_inputs(table, None, folder / "other")


def test_the_folders_of_the_readme_are_pairs(tmp_path):
    for folder, kind in (("images", "default"), ("sc_images", "semantic")):
        (tmp_path / folder).mkdir()
        for number in (3, 1, 2):
            (tmp_path / folder / f"CLEVR_{kind}_{number:06}.png").touch()
    pairs = find_inputs(tmp_path / "images", tmp_path / "sc_images")
    assert [pair.name for pair in pairs] == [f"CLEVR_default_{number:06}" for number in (1, 2, 3)]
    assert [pair.images[1].name for pair in pairs] == [f"CLEVR_semantic_{number:06}.png" for number in (1, 2, 3)]


def test_folders_whose_names_do_not_match_are_refused_with_the_names_and_a_remedy(tmp_path):
    for folder, numbers in (("a", (1, 2)), ("b", (2, 3))):
        (tmp_path / folder).mkdir()
        for number in numbers:
            (tmp_path / folder / f"IMG_{number}.png").touch()
    fault = Fault("serving.unmatched_names", value=2, names=["IMG_1", "IMG_3"])
    folders = {"before": tmp_path / "a", "after": tmp_path / "b"}
    with raises(DataError, "serving.names_do_not_match", **folders, faults=[fault]):
        find_inputs(tmp_path / "a", tmp_path / "b")


def test_two_names_of_a_folder_that_mean_one_image_are_named(tmp_path):
    for folder, names in (("a", ("1", "01")), ("b", ("001", "0001"))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / f"{name}.png").touch()
    fault = Fault("serving.ambiguous_names", names=["0001", "001", "01", "1"])
    with raises(DataError, "serving.names_do_not_match") as refused:
        find_inputs(tmp_path / "a", tmp_path / "b")
    assert fault in refused.value.fields["faults"]


def test_a_single_folder_is_refused_and_its_table_is_suggested(folder):
    (folder / "pairs.csv").write_text("before,after\nx.png,y.png\n")
    command = f"m3diff caption {folder / 'pairs.csv'}"
    with raises(DataError, "serving.table_in_folder", path=folder, table="pairs.csv", command=command):
        find_inputs(folder, None)


def test_columns_in_unclear_order_are_refused_until_they_are_named(folder):
    table = folder / "t.csv"
    table.write_text("links;rechts\nx.png;y.png\n")
    options = ["--before links --after rechts", "--before rechts --after links"]
    with raises(DataError, "serving.ambiguous_image_columns", path=table, options=options):
        find_inputs(table, None)
    (pair,) = find_inputs(table, None, columns={"before": "rechts", "after": "links"})
    assert pair.images[0] == folder / "y.png"
    assert pair.images[1] == folder / "x.png"


def test_named_columns_take_precedence_over_detected_ones(folder):
    (folder / "t.csv").write_text("before,after,retouched\nx.png,y.png,one/a.png\n")
    (pair,) = find_inputs(folder / "t.csv", None, columns={"before": "after", "after": "retouched"})
    assert pair.images[0] == folder / "y.png"
    assert pair.images[1] == folder / "one/a.png"


def test_a_missing_column_is_refused(folder):
    (folder / "t.csv").write_text("before,after\nx.png,y.png\n")
    with pytest.raises(DataError, match="Vorher"):
        find_inputs(folder / "t.csv", None, columns={"before": "Vorher", "after": "after"})


@pytest.mark.parametrize(("before", "after"), [("x.png", "y.png"), ("one", "other")], ids=["two images", "two folders"])
def test_columns_need_a_table(before, after, folder):
    with raises(ParamsError, "serving.columns_without_table"):
        find_inputs(folder / before, folder / after, columns={"before": "a", "after": "b"})


@pytest.mark.parametrize(("side", "other_side"), [("before", "after"), ("after", "before")])
def test_columns_of_both_images_are_needed(side, other_side, folder):
    (folder / "t.csv").write_text("a,b\nx.png,y.png\n")
    with raises(ParamsError, "serving.one_column", names=[f"--{side}"], expected=f"--{other_side} COLUMN"):
        find_inputs(folder / "t.csv", None, columns={side: "a"})


NAMES_OF_PAIRS = {
    "the files' names": (["v/IMG_20.jpg", "v/IMG_21.jpg"], ["IMG_20", "IMG_21"]),
    "folders that tell them apart": (["1/before.png", "2/before.png"], ["1/before", "2/before"]),
    "only where it is needed": (["1/a.png", "2/a.png", "b.png"], ["1/a", "2/a", "b"]),
    "letters alone that differ in case": (["x/a.png", "y/A.png"], ["x/a", "y/A"]),
    "one pair twice": (["a.png", "a.png"], ["a-after-row-00001", "a-after-row-00002"]),
    "a dot in the name": (["IMG.1.png", "IMG.2.png"], ["IMG.1", "IMG.2"]),
}


@pytest.mark.parametrize(("before", "names"), NAMES_OF_PAIRS.values(), ids=NAMES_OF_PAIRS)
def test_pairs_of_a_table_get_distinct_names_from_their_files(before, names, tmp_path):
    rows = "".join(f"{path},after.png\n" for path in before)
    (tmp_path / "t.csv").write_text(f"before,after\n{rows}")
    assert [pair.name for pair in find_inputs(tmp_path / "t.csv", None)] == names


def test_pairs_with_the_same_image_before_are_named_after_both_images(tmp_path):
    (tmp_path / "t.csv").write_text("before,after\na.png,b.png\na.png,c.png\n")
    assert [pair.name for pair in find_inputs(tmp_path / "t.csv", None)] == ["a-b", "a-c"]


def test_a_file_url_into_the_tables_folder_is_a_path(folder):
    (folder / "t.csv").write_text(f"before,after\nfile://{folder}/x.png,{folder}/y.png\n")
    (pair,) = find_inputs(folder / "t.csv", None)
    assert pair.images[0] == folder / "x.png"
    assert pair.images[1] == folder / "y.png"


def test_json_names_the_model_and_its_version(checkpoint, images, capsys):
    assert caption(checkpoint, images / "0.png", images / "1.png", "--json") == 0
    row = json.loads(capsys.readouterr().out)
    assert row["model"] == f"m3diff/{row['version']}"
    assert re.fullmatch(r"sha256-[0-9a-f]{12}", row["version"])


@pytest.mark.parametrize(
    ("question", "is_noted"),
    [("Is a cup gone?", True), ("What is the colour of the cup?", True), ("What has changed?", False), (None, False)],
)
def test_the_answer_to_any_other_question_has_a_note(question, is_noted, images):
    model: Any = Model(None)
    (answer,) = answer_inputs(model, pairs(images, 1, question), None)
    assert (answer.note is not None) == is_noted
    assert ("note" in answer.as_dict("m3diff/1")) == is_noted


def test_the_note_about_a_question_is_printed_once(checkpoint, images, capsys):
    (images / "t.csv").write_text("before,after\n0.png,1.png\n2.png,3.png\n")
    assert caption(checkpoint, images / "t.csv", "--question", "Is a cup gone?") == 0
    printed = capsys.readouterr()
    assert printed.err.count(NOTE) == 1
    assert len(printed.out.splitlines()) == 2


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "JSON"])
def test_the_note_about_the_training_is_one_line_on_stderr(form, checkpoint, images, capsys, monkeypatch):
    monkeypatch.setattr("m3diff.serving.model_card.note_on_training", lambda params, source: "drawn scenes alone")
    assert caption(checkpoint, images / "0.png", images / "1.png", *form) == 0
    printed = capsys.readouterr()
    assert printed.err.count("m3diff caption: note: drawn scenes alone\n") == 1
    assert "drawn" not in printed.out


def test_an_unreadable_embedded_image_is_named_after_the_table(images):
    model: Any = Model(None)
    embedded: Any = SimpleNamespace(manifest="pairs.parquet", name="0", read=lambda: b"no image")
    (answer,) = answer_inputs(model, [CaptionInput("p", (embedded, images / "0.png"))], None)
    assert answer.fault is not None
    assert answer.fault.code == "images.text"
    assert answer.fault.fields["path"] == "pairs.parquet#bytes=0"
    assert answer.as_dict("m3diff/1")["error"] == str(answer.fault)


def test_a_missing_image_is_named_and_the_other_pairs_are_captioned(images):
    model: Any = Model(None)
    image_pairs = [*pairs(images, 1), CaptionInput("gone", (images / "0.png", images / "gone.png"))]
    answers = list(answer_inputs(model, image_pairs, None))
    assert [answer.caption for answer in answers] == ["same", None]
    assert answers[1].fault == Fault("serving.missing_image", path=images / "gone.png")


# One image, questions of a table and dialogues


PAIRS_ONLY = TrainedOn(QUESTION)
EVERYTHING = TrainedOn(QUESTION, images=(0, 1, 2), turns=3)


def trained_copy(checkpoint: Path, folder: Path, **trained_on: Any) -> Path:
    """Copy a checkpoint and change what its manifest says about its training."""
    shutil.copytree(checkpoint, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest |= {"base": str(checkpoint / manifest["base"]), "trained_on": {"question": QUESTION} | trained_on}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_one_image_is_an_input(folder):
    assert find_inputs(folder / "x.png", None) == [CaptionInput("x", (folder / "x.png",))]


def test_one_image_for_a_model_of_pairs_lacks_the_second(checkpoint, images, capsys):
    assert caption(checkpoint, images / "0.png") == DATA_REFUSED
    command = f"m3diff caption {images / '0.png'} AFTER"
    printed = capsys.readouterr().err
    assert Message("serving.image_without_second", path=images / "0.png", command=command).in_text(printed)


def test_one_image_is_answered_by_a_model_that_was_trained_on_one(checkpoint, images, tmp_path, capsys):
    model = trained_copy(checkpoint, tmp_path / "one", images=[1, 2])
    assert caption(model, images / "0.png", "--json", "--question", "How many?") == 0
    row = json.loads(capsys.readouterr().out)
    assert row["image"] == str(images / "0.png")
    assert "before" not in row
    captioner = load_captioner(model)
    prepared = captioner.processor.prepare([load_image(images / "0.png")])
    (expected,), _ = captioner.answer([prepared], [(Turn("How many?"),)])
    assert row["caption"] == expected


def test_the_questions_and_the_history_of_a_table_are_asked(checkpoint, images, tmp_path, capsys):
    model = trained_copy(checkpoint, tmp_path / "turns", images=[1, 2], turns=2)
    rows = [
        {"images": ["0.png", "1.png"], "question": "Is it red?"},
        {"images": ["0.png", "1.png"], "question": "Why?", "history": [{"question": "Is it red?", "answer": "Yes."}]},
        {"images": ["2.png"], "question": "How many?", "history": "[]"},
        {"images": ["2.png", "3.png"], "question": "", "history": None},
    ]
    (images / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert caption(model, images / "t.jsonl", "--json") == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    captioner = load_captioner(model)
    dialogues = [
        (Turn("Is it red?"),),
        (Turn("Is it red?", "Yes."), Turn("Why?")),
        (Turn("How many?"),),
        (Turn(QUESTION),),
    ]
    for row, turns, answer in zip(rows, dialogues, answers, strict=True):
        prepared = captioner.processor.prepare([load_image(images / name) for name in row["images"]])
        (expected,), _ = captioner.answer([prepared], [turns])
        assert answer["caption"] == expected
    assert [answer.get("question") for answer in answers] == ["Is it red?", "Why?", "How many?", None]


def test_the_question_of_the_option_replaces_those_of_the_table(images):
    (images / "t.csv").write_text("before,after,question\n0.png,1.png,Is it red?\n1.png,2.png,\n")
    inputs = find_inputs(images / "t.csv", None)
    assert [item.question for item in inputs] == ["Is it red?", None]
    assert [item.question for item in ask_question(inputs, "Why?", Takes())] == ["Why?", "Why?"]
    assert ask_question(inputs, None, Takes()) == inputs


def test_a_table_with_a_column_image_has_single_images(images):
    (images / "t.csv").write_text("image,question\n0.png,Is it red?\n1.png,Why?\n")
    assert find_inputs(images / "t.csv", None) == [
        CaptionInput("0", (images / "0.png",), "Is it red?"),
        CaptionInput("1", (images / "1.png",), "Why?"),
    ]


def test_a_list_of_images_may_be_a_json_text_in_a_csv(images):
    table = images / "t.csv"
    table.write_text('images,question\n"[""0.png"", ""1.png""]",a\n"[""1.png""]",b\n[],c\n')
    assert [item.images for item in find_inputs(table, None)] == [
        (images / "0.png", images / "1.png"),
        (images / "1.png",),
        (),
    ]
    table.write_text('images\n"[""0.png"", ""1.png""]"\n"[\'0.png\', \'1.png\']"\n')
    with raises(DataError, "datasets.invalid_json_in_cell", path=f"{table}, line 3", key="images", position=2):
        find_inputs(table, None)


def test_rows_without_images_have_names_of_their_own(images):
    rows = [{"images": [], "question": "Why?"}, {"images": ["0.png"]}, {"images": [], "question": "How?"}]
    (images / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    inputs = find_inputs(images / "t.jsonl", None)
    assert [item.name for item in inputs] == ["question-00001", "0", "question-00003"]
    assert [len(item.images) for item in inputs] == [0, 1, 0]


TURNS = {
    "objects in JSON": '[{"question": "a", "answer": "b"}]',
    "lists in JSON": '[["a", "b"]]',
    "objects": [{"question": "a", "answer": "b"}],
    "lists": [["a", "b"]],
}


@pytest.mark.parametrize("value", TURNS.values(), ids=TURNS)
def test_the_turns_of_a_history_are_objects_or_lists(value, images):
    row = {"before": "0.png", "after": "1.png", "question": "c", "history": value}
    (images / "t.jsonl").write_text(json.dumps(row))
    (item,) = find_inputs(images / "t.jsonl", None)
    assert item.history == (Turn("a", "b"),)


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "history that is no JSON": ({"history": "Is it red?"}, "serving.unusable_history"),
    "a turn without an answer": ({"history": [["a"]]}, "serving.unusable_history"),
    "a turn with an empty answer": ({"history": [{"question": "a", "answer": " "}]}, "serving.unusable_history"),
    "a turn that is a text": ({"history": ["ab"]}, "serving.unusable_history"),
    "history that is an object": ({"history": {"question": "a", "answer": "b"}}, "serving.unusable_history"),
    "history that is a number": ({"history": 3}, "serving.unusable_history"),
    "a question that is a number": ({"question": 3}, "serving.no_text"),
    "three images": ({"images": ["0.png", "1.png", "2.png"]}, "serving.not_a_list_of_images"),
    "images that are a text": ({"images": "0.png"}, "serving.not_a_list_of_images"),
    "an image that is null": ({"images": ["0.png", None]}, "serving.no_path"),
}


@pytest.mark.parametrize(("change", "code"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_refused_with_its_line(change, code, images):
    good_row = {"images": ["0.png", "1.png"], "question": "a"}
    (images / "t.jsonl").write_text(f"{json.dumps(good_row)}\n{json.dumps(good_row | change)}\n")
    with raises(DataError, code, path=f"{images / 't.jsonl'}, line 2"):
        find_inputs(images / "t.jsonl", None)


def test_a_row_without_its_image_is_refused(images):
    (images / "t.csv").write_text("image,question\n0.png,a\n,b\n")
    with raises(DataError, "serving.no_path", path=f"{images / 't.csv'}, line 3", key="image"):
        find_inputs(images / "t.csv", None)


PICTURE = Path("a.png")
ONE_IMAGE = CaptionInput("a", (PICTURE,))
PAIR = CaptionInput("b", (PICTURE, PICTURE))
FOLLOW_UP = CaptionInput("c", (PICTURE, PICTURE), "Why?", (Turn("a", "b"),))
UNANSWERABLE = [
    ([ONE_IMAGE], PAIRS_ONLY, Takes(), "serving.image_without_second"),
    ([ONE_IMAGE], TrainedOn(images=(0, 2)), Takes(), "models.images_not_trained"),
    ([ONE_IMAGE], PAIRS_ONLY, FAMILIES["blip2idc"].takes, "serving.image_without_second"),
    ([CaptionInput("d", ())], PAIRS_ONLY, FAMILIES["blip2idc"].takes, "models.images_not_taken"),
    ([FOLLOW_UP], PAIRS_ONLY, Takes(), "models.history_not_trained"),
    ([FOLLOW_UP], EVERYTHING, Takes(turns=False), "models.history_not_read"),
    ([FOLLOW_UP], EVERYTHING, Takes(questions=False), "models.question_not_read"),
    ([ONE_IMAGE, FOLLOW_UP], PAIRS_ONLY, Takes(), "serving.no_answerable_input"),
]


@pytest.mark.parametrize(("inputs", "trained_on", "takes", "code"), UNANSWERABLE)
def test_inputs_that_the_model_cannot_answer_are_refused_before_it_is_loaded(inputs, trained_on, takes, code):
    with raises(DataError, code):
        check_inputs(inputs, takes, trained_on)
    check_inputs([*inputs, PAIR], takes, trained_on)


def test_a_model_is_not_loaded_for_inputs_that_it_cannot_answer(checkpoint, images, monkeypatch, capsys):
    monkeypatch.setattr(model_source, "load", lambda source: pytest.fail("the model was loaded"))
    (images / "t.csv").write_text("image\n0.png\n1.png\n")
    assert caption(checkpoint, images / "t.csv") == DATA_REFUSED
    cause = Fault("models.images_not_trained", value=1, expected="2 images")
    assert Message("serving.no_answerable_input", inputs=2, cause=cause).in_text(capsys.readouterr().err)


def test_a_row_that_the_model_cannot_answer_is_reported_and_the_others_are_answered(checkpoint, images, capsys):
    rows = [{"images": ["0.png"]}, {"images": ["0.png", "1.png"]}]
    (images / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert caption(checkpoint, images / "t.jsonl", "--json") == DATA_REFUSED
    refused, answered = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert refused["error"] == str(Fault("models.images_not_trained", value=1, expected="2 images"))
    assert answered["caption"] is not None


def test_a_question_of_a_table_that_cannot_be_encoded_is_a_fault_of_its_row(images):
    model: Any = Model(None)

    def encode_prompt(turns: Any, marks: Any) -> tuple[int, ...]:
        if "<image>" in turns[-1].question:
            raise ValueFault("models.question_with_image_mark", value="<image>")
        return (1,)

    model.encode_prompt = encode_prompt
    inputs = [*pairs(images, 1, "a <image>"), *pairs(images, 1)]
    refused, answered = answer_inputs(model, inputs, None)
    assert refused == CaptionOutput(inputs[0], None, Fault("models.question_with_image_mark", value="<image>"))
    assert answered.caption == "same"


def test_inputs_are_batched_by_the_number_of_images_and_the_length_of_the_prompt(images):
    model: Any = Model(None)
    model.trained_on = EVERYTHING
    single = CaptionInput("single", (images / "0.png",), "Why?")
    inputs = [*pairs(images, 2, "Why?"), single, *pairs(images, 1, "How many?"), single]
    assert [output.input for output in answer_inputs(model, inputs, None)] == inputs
    assert sorted(model.batches) == [1, 2, 2]


def test_a_batch_ends_when_its_prepared_images_reach_the_limit(images, monkeypatch):
    monkeypatch.setattr("m3diff.serving.caption.MAX_PREPARED_BYTES", 2 * 2 * 40 * 40 * 3)
    model: Any = Model(None)
    inputs = pairs(images, 5)
    assert [output.input for output in answer_inputs(model, inputs, None)] == inputs
    assert model.batches == [2, 2, 1]


@pytest.mark.parametrize("has_overlay", [False, True])
@pytest.mark.parametrize("most_sets", [1, 3])
def test_the_images_of_a_table_take_no_more_memory_than_the_limit(images, monkeypatch, most_sets, has_overlay):
    monkeypatch.setattr("m3diff.serving.caption.MAX_PREPARED_BYTES", most_sets * SET_BYTES)
    table = images / "t.csv"
    table.write_text("before,after\n" + "0.png,1.png\n1.png,2.png\n" * BATCH_INPUTS)
    sets = PreparedSets()
    maps = np.zeros((BATCH_INPUTS, 4, 4), np.float16) if has_overlay else None
    model: Any = Model(maps)
    model.processor = sets
    model.answer = lambda prepared, dialogues, saliency: (["same"] * len(prepared), maps)
    answers = answer_inputs(model, find_inputs(table, None), images / "made" if has_overlay else None)
    assert len(list(answers)) == 2 * BATCH_INPUTS
    assert sets.prepared == 2 * BATCH_INPUTS
    assert sets.peak_bytes == most_sets * SET_BYTES
    assert sets.held_bytes == 0


def test_the_images_of_an_overlay_count_as_memory(images, tmp_path, monkeypatch):
    prepared_bytes = overlay_bytes = 2 * 40 * 40 * 3
    monkeypatch.setattr("m3diff.serving.caption.MAX_PREPARED_BYTES", 2 * (prepared_bytes + overlay_bytes))
    model: Any = Model(np.zeros((5, 4, 4), np.float16))
    assert len(list(answer_inputs(model, pairs(images, 5), tmp_path / "made"))) == 5
    assert model.batches == [2, 2, 1]


def test_an_overlay_of_a_single_image_is_refused(images):
    model: Any = Model(np.zeros((1, 4, 4), np.float16))
    model.trained_on = EVERYTHING
    with raises(DataError, "serving.overlay_without_pair", name="a", value=1):
        list(answer_inputs(model, [*pairs(images, 1), CaptionInput("a", (images / "0.png",))], images / "made"))


@pytest.mark.parametrize(
    ("fields", "trained_on"),
    [
        (None, TrainedOn()),
        ({}, TrainedOn()),
        ({"question": "a"}, TrainedOn("a")),
        ({"question": "a", "images": [2, 1], "turns": 3}, TrainedOn("a", (1, 2), 3)),
        ({"question": 1, "images": [], "turns": 0}, TrainedOn()),
        ({"images": "2", "turns": True}, TrainedOn()),
        ({"images": [1, "2"], "turns": 2.5}, TrainedOn()),
        (["a"], TrainedOn()),
    ],
)
def test_a_manifest_says_what_the_model_was_trained_on(fields, trained_on):
    manifest = {} if fields is None else {"trained_on": fields}
    assert read_trained_on(manifest) == trained_on


def test_the_limits_of_a_checkpoint_are_those_of_its_family_and_its_training(checkpoint, tmp_path):
    model = trained_copy(checkpoint, tmp_path / "turns", images=[1], turns=2)
    assert read_sample_limits(model) == (FAMILIES["m3diff"].takes, TrainedOn(QUESTION, (1,), 2))


@pytest.mark.parametrize(
    ("counts", "words"),
    [((), "no number of images"), ((1,), "1 image"), ((2,), "2 images"), ((1, 2), "1 or 2 images")]
    + [((0, 1, 2), "0, 1 or 2 images"), ((0, 1), "0 or 1 image")],
)
def test_numbers_of_images_are_named_in_words(counts, words):
    assert describe_image_counts(counts) == words
