"""Test `m3diff caption` with a user's images: two paths, folders, tables, overlays and refusals."""

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from m3diff.__main__ import DATA_REFUSED, USAGE, main
from m3diff.images.enlarge import enlarge
from m3diff.images.open import load_image
from m3diff.models import FAMILIES
from m3diff.models.contract import Prepared
from m3diff.models.generation import QUESTION, Captioner, load_captioner
from m3diff.models.processing import TextProcessor
from m3diff.records.errors import DataError, Fault
from m3diff.records.sample import Turn
from m3diff.registry import model_source, tracking, versions
from m3diff.serving.caption import BATCH_PAIRS, PairToCaption, caption_pairs, find_pairs
from m3diff.serving.questions import NOTE
from m3diff.settings.section import ParamsError
from tests.errors import Message, raises
from tests.tiny import noise_image, tiny_base, tiny_checkpoint
from tests.toy import REPOSITORY

EMBEDDED = str(REPOSITORY / "profiles/embedded.yaml")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    return tiny_checkpoint(tiny_base(root / "base"), root / "checkpoint")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(BATCH_PAIRS + 5):
        noise_image(number, (40, 40)).save(tmp_path / f"{number}.png")
    return tmp_path


def pairs(images: Path, count: int) -> list[PairToCaption]:
    return [PairToCaption(f"p{n}", images / f"{n}.png", images / f"{n + 1}.png") for n in range(count)]


def opened_pairs(images: Path, count: int) -> list[tuple[Image.Image, Image.Image]]:
    return [(load_image(pair.before), load_image(pair.after)) for pair in pairs(images, count)]


def caption(checkpoint: Path, *arguments: object) -> int:
    return main(["--params", EMBEDDED, "caption", *map(str, arguments), "--model", str(checkpoint)])


def test_every_pair_has_its_own_answer_in_order_over_the_batches(checkpoint, images, capsys):
    captioner = load_captioner(checkpoint)
    image_pairs = pairs(images, BATCH_PAIRS + 3)
    answers = list(caption_pairs(captioner, image_pairs, None, None))
    assert [answer.pair for answer in answers] == image_pairs
    single_captions = [next(caption_pairs(captioner, [pair], None, None)).caption for pair in image_pairs]
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
    model: Any = SimpleNamespace(family=FAMILIES["blip2idc"])
    with raises(ParamsError, "serving.question_not_read", value="Is a cup gone?"):
        next(caption_pairs(model, pairs(images, 1), "Is a cup gone?", None))


SIDE = 13 * 40  # pixels of an image of 40 that is drawn large enough to be seen


class PixelProcessor(TextProcessor):
    """A processor that leaves images as they are. A prompt has no tokens."""

    image_processor = SimpleNamespace(prepare_image=np.array)

    def marks(self, images: int) -> tuple[str, ...]:
        return ("",) * images

    def encode_prompt(self, turns: Sequence[Turn], marks: Sequence[str]) -> tuple[int, ...]:
        return ()


class Model(Captioner):
    """A captioner that returns these maps, and records the questions and the last images."""

    def __init__(self, maps: np.ndarray | None) -> None:
        super().__init__(torch.nn.Identity(), PixelProcessor(), FAMILIES["m3diff"], 64, "What has changed?")
        self.maps = maps
        self.questions = list[str]()

    def answer(self, prepared: Sequence[Prepared], dialogues: Sequence[Sequence[Turn]], saliency: bool = False) -> Any:
        self.questions += [turn.question for (turn,) in dialogues]
        self.images = [image for pair in prepared for image in pair.tensors["pixels"].numpy()]
        return ["same"] * len(prepared), self.maps


def test_each_pair_s_overlay_has_its_own_map_and_both_images_side_by_side(checkpoint, images, tmp_path):
    file = tmp_path / "made" / "out.png"
    noise_image(5, (60, 30)).save(images / "wide.png")
    assert caption(checkpoint, images / "0.png", images / "wide.png", "--overlay", file) == 0
    assert Image.open(file).size == (13 * 40 + 12 + 18 * 60, 18 * 30)
    grids = np.full((3, 4, 4), 1 / 16, np.float16)
    grids[1, 0, 0] *= 8
    model = Model(grids)
    list(caption_pairs(model, pairs(images, 3), None, tmp_path / "made"))
    for number in range(3):
        sheet = np.asarray(Image.open(tmp_path / "made" / f"p{number}.png"))
        assert sheet.shape[1] == 2 * SIDE + 12
        before, after = (np.asarray(noise_image(number + n, (40, 40))).repeat(13, 0).repeat(13, 1) for n in (0, 1))
        for side, image in ((sheet[:, :SIDE], before), (sheet[:, SIDE + 12 :], after)):
            assert np.array_equal(side, image) == (number != 1)
            assert np.array_equal(side[SIDE // 2 :, SIDE // 2 :], image[SIDE // 2 :, SIDE // 2 :])


@pytest.mark.parametrize("question", [None, "Is a cup gone?"], ids=["none", "a question"])
def test_a_model_is_asked_the_question_or_its_own(question, images):
    model = Model(None)
    list(caption_pairs(model, pairs(images, 1), question, None))
    assert model.questions == [question or "What has changed?"]


def test_a_checkpoint_is_asked_the_question_of_its_training_by_default(checkpoint, images, tmp_path):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    question = "Is there a new object in the second image?"
    captions = {}
    for name, trained_on in (("trained", {"question": question}), ("earlier", None), ("empty", {"question": ""})):
        shutil.copytree(checkpoint, tmp_path / name)
        fields = {**manifest, "base": str(checkpoint / manifest["base"]), "trained_on": trained_on}
        (tmp_path / name / "manifest.json").write_text(json.dumps(fields))
        captioner = load_captioner(tmp_path / name, 5)
        captions[name] = [answer.caption for answer in caption_pairs(captioner, pairs(images, 3), None, None)]
        assert captions[name] == captioner.caption(opened_pairs(images, 3), captioner.question)
        assert captioner.question == (question if name == "trained" else QUESTION)
    assert captions["earlier"] == captions["empty"] != captions["trained"]


def test_a_model_gets_the_image_before_first(images):
    model = Model(None)
    list(caption_pairs(model, pairs(images, 1), None, None))
    before, after = model.images
    assert np.array_equal(before, noise_image(0, (40, 40)))
    assert np.array_equal(after, noise_image(1, (40, 40)))


def test_overlays_of_a_model_without_maps_are_refused(images):
    model = Model(None)
    with raises(DataError, "serving.no_saliency_maps"):
        list(caption_pairs(model, pairs(images, 1), None, images / "o.png"))


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
    a = PairToCaption("a", folder / "one/a.png", folder / "other/a.png")
    b = PairToCaption("b", folder / "one/b.JPG", folder / "other/b.webp")
    assert find_pairs(folder / "one", folder / "other") == [a, b]


def test_hidden_files_and_folders_are_no_images(folder):
    for side in ("one", "other"):
        (folder / side / "._a.png").write_bytes(b"\0\5\26\7")
        (folder / side / ".hidden").mkdir()
    assert [pair.name for pair in find_pairs(folder / "one", folder / "other")] == ["a", "b"]


def test_one_name_in_two_formats_is_two_images(folder):
    for file in ("one/c.png", "one/c.jpg", "other/c.png", "other/c.jpg"):
        (folder / file).touch()
    names = [pair.name for pair in find_pairs(folder / "one", folder / "other")]
    assert names == ["a", "b", "c.jpg", "c.png"]


def test_two_images_are_one_pair(folder):
    assert find_pairs(folder / "x.png", folder / "y.png") == [PairToCaption("x", folder / "x.png", folder / "y.png")]


def test_a_table_names_paths_from_its_own_folder(folder):
    text = f"\ufeffid,after,before\n7,y.png,x.png\n8,{folder}/x.png,one/a.png\n"
    (folder / "pairs.csv").write_text(text, encoding="utf-8")
    assert find_pairs(folder / "pairs.csv", None) == [
        PairToCaption("x", folder / "x.png", folder / "y.png"),
        PairToCaption("a", folder / "one/a.png", folder / "x.png"),
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
        "t.csv",
        None,
        "before,after\nx.png,http://[::1]/y.png\n",
        "serving.unusable_path",
        {"path": "{folder}/t.csv, line 2", "key": "after"},
    ),
    (
        "x.png",
        None,
        "",
        "serving.image_without_second",
        {"path": "{folder}/x.png", "command": "m3diff caption {folder}/x.png AFTER"},
    ),
]


@pytest.mark.parametrize(("before", "after", "table", "code", "fields"), NO_PAIR)
def test_paths_that_are_no_pair_are_refused(folder, before, after, table, code, fields):
    (folder / "t.csv").write_text(table)
    with raises(DataError, code) as refused:
        find_pairs(folder / before, after and folder / after)
    values = {name: str(refused.value.fields[name]) for name in fields}
    assert values == {name: value.format(folder=folder) for name, value in fields.items()}


def test_only_the_first_of_many_unmatched_names_are_listed(folder):
    (folder / "many").mkdir()
    for number in range(9):
        (folder / "many" / f"n{number}.png").touch()
    fault = Fault("serving.unmatched_names", value=11, names=["a", "b", "n0", "n1", "n2", "..."])
    with raises(DataError, "serving.names_do_not_match", faults=[fault]):
        find_pairs(folder / "one", folder / "many")


def test_a_row_with_another_number_of_fields_than_the_header_is_refused(folder):
    (folder / "t.csv").write_text("before,after\nx.png,y.png\nx.png\n")
    with pytest.raises(DataError, match="t.csv, line 3"):
        find_pairs(folder / "t.csv", None)


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
        find_pairs(table, None)
    if "\\" not in path_in_table:
        (pair,) = find_pairs(table, None, folder)
        assert pair.before == table.parent / "in.png"
        assert pair.after.resolve() == folder / "x.png"
    with raises(DataError, code, path=location, key="after"):
        find_pairs(table, None, folder / "other")


def test_the_folders_of_the_readme_are_pairs(tmp_path):
    for folder, kind in (("images", "default"), ("sc_images", "semantic")):
        (tmp_path / folder).mkdir()
        for number in (3, 1, 2):
            (tmp_path / folder / f"CLEVR_{kind}_{number:06}.png").touch()
    pairs = find_pairs(tmp_path / "images", tmp_path / "sc_images")
    assert [pair.name for pair in pairs] == [f"CLEVR_default_{number:06}" for number in (1, 2, 3)]
    assert [pair.after.name for pair in pairs] == [f"CLEVR_semantic_{number:06}.png" for number in (1, 2, 3)]


def test_folders_whose_names_do_not_match_are_refused_with_the_names_and_a_remedy(tmp_path):
    for folder, numbers in (("a", (1, 2)), ("b", (2, 3))):
        (tmp_path / folder).mkdir()
        for number in numbers:
            (tmp_path / folder / f"IMG_{number}.png").touch()
    fault = Fault("serving.unmatched_names", value=2, names=["IMG_1", "IMG_3"])
    folders = {"before": tmp_path / "a", "after": tmp_path / "b"}
    with raises(DataError, "serving.names_do_not_match", **folders, faults=[fault]):
        find_pairs(tmp_path / "a", tmp_path / "b")


def test_two_names_of_a_folder_that_mean_one_image_are_named(tmp_path):
    for folder, names in (("a", ("1", "01")), ("b", ("001", "0001"))):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / f"{name}.png").touch()
    fault = Fault("serving.ambiguous_names", names=["0001", "001", "01", "1"])
    with raises(DataError, "serving.names_do_not_match") as refused:
        find_pairs(tmp_path / "a", tmp_path / "b")
    assert fault in refused.value.fields["faults"]


def test_a_single_folder_is_refused_and_its_table_is_suggested(folder):
    (folder / "pairs.csv").write_text("before,after\nx.png,y.png\n")
    command = f"m3diff caption {folder / 'pairs.csv'}"
    with raises(DataError, "serving.table_in_folder", path=folder, table="pairs.csv", command=command):
        find_pairs(folder, None)


def test_columns_in_unclear_order_are_refused_until_they_are_named(folder):
    table = folder / "t.csv"
    table.write_text("links;rechts\nx.png;y.png\n")
    options = ["--before links --after rechts", "--before rechts --after links"]
    with raises(DataError, "serving.ambiguous_image_columns", path=table, options=options):
        find_pairs(table, None)
    (pair,) = find_pairs(table, None, columns={"before": "rechts", "after": "links"})
    assert pair.before == folder / "y.png"
    assert pair.after == folder / "x.png"


def test_named_columns_take_precedence_over_detected_ones(folder):
    (folder / "t.csv").write_text("before,after,retouched\nx.png,y.png,one/a.png\n")
    (pair,) = find_pairs(folder / "t.csv", None, columns={"before": "after", "after": "retouched"})
    assert pair.before == folder / "y.png"
    assert pair.after == folder / "one/a.png"


def test_a_missing_column_is_refused(folder):
    (folder / "t.csv").write_text("before,after\nx.png,y.png\n")
    with pytest.raises(DataError, match="Vorher"):
        find_pairs(folder / "t.csv", None, columns={"before": "Vorher", "after": "after"})


@pytest.mark.parametrize(("before", "after"), [("x.png", "y.png"), ("one", "other")], ids=["two images", "two folders"])
def test_columns_need_a_table(before, after, folder):
    with raises(ParamsError, "serving.columns_without_table"):
        find_pairs(folder / before, folder / after, columns={"before": "a", "after": "b"})


@pytest.mark.parametrize(("side", "other_side"), [("before", "after"), ("after", "before")])
def test_columns_of_both_images_are_needed(side, other_side, folder):
    (folder / "t.csv").write_text("a,b\nx.png,y.png\n")
    with raises(ParamsError, "serving.one_column", names=[f"--{side}"], expected=f"--{other_side} COLUMN"):
        find_pairs(folder / "t.csv", None, columns={side: "a"})


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
    assert [pair.name for pair in find_pairs(tmp_path / "t.csv", None)] == names


def test_pairs_with_the_same_image_before_are_named_after_both_images(tmp_path):
    (tmp_path / "t.csv").write_text("before,after\na.png,b.png\na.png,c.png\n")
    assert [pair.name for pair in find_pairs(tmp_path / "t.csv", None)] == ["a-b", "a-c"]


def test_a_file_url_into_the_tables_folder_is_a_path(folder):
    (folder / "t.csv").write_text(f"before,after\nfile://{folder}/x.png,{folder}/y.png\n")
    (pair,) = find_pairs(folder / "t.csv", None)
    assert pair.before == folder / "x.png"
    assert pair.after == folder / "y.png"


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
    model = Model(None)
    (answer,) = caption_pairs(model, pairs(images, 1), question, None)
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


@pytest.mark.parametrize(
    ("size", "enlarged_size"),
    [((128, 128), (512, 512)), ((40, 60), (520, 780)), ((100, 4000), (100, 4000)), ((16, 100), (320, 2000))],
    ids=["128 px", "a portrait", "a long strip", "a strip"],
)
def test_a_small_image_is_enlarged_by_whole_pixels(size, enlarged_size):
    image = noise_image(1, size)
    large = enlarge(image)
    assert large.size == enlarged_size
    factor = enlarged_size[0] // size[0]
    assert np.array_equal(np.asarray(large)[::factor, ::factor], np.asarray(image))


def test_a_large_image_is_not_enlarged():
    image = noise_image(1, (600, 512))
    assert enlarge(image) is image


def test_an_unreadable_embedded_image_is_named_after_the_table(images):
    model = Model(None)
    embedded: Any = SimpleNamespace(manifest="pairs.parquet", name="0", read=lambda: b"no image")
    (answer,) = caption_pairs(model, [PairToCaption("p", embedded, images / "0.png")], None, None)
    assert answer.fault is not None
    assert answer.fault.code == "images.text"
    assert answer.fault.fields["path"] == "pairs.parquet#bytes=0"
    assert answer.as_dict("m3diff/1")["error"] == str(answer.fault)


def test_a_missing_image_is_named_and_the_other_pairs_are_captioned(images):
    model = Model(None)
    image_pairs = [*pairs(images, 1), PairToCaption("gone", images / "0.png", images / "gone.png")]
    answers = list(caption_pairs(model, image_pairs, None, None))
    assert [answer.caption for answer in answers] == ["same", None]
    assert answers[1].fault == Fault("serving.missing_image", path=images / "gone.png")
