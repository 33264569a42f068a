"""`m3diff caption` on images of one's own: pairs of paths, folders and tables, many pairs, overlays, refusals."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from m3diff.__main__ import DATA_REFUSED, USAGE, main
from m3diff.models import FAMILIES
from m3diff.models.generation import QUESTION, load_captioner
from m3diff.records.errors import DataError
from m3diff.registry import model_source, tracking, versions
from m3diff.serving.caption import BATCH, AskedPair, caption_pairs, find_pairs
from m3diff.settings.section import ParamsError
from tests.tiny import noise_image, tiny_base, tiny_checkpoint
from tests.toy import REPOSITORY

EMBEDDED = str(REPOSITORY / "profiles/embedded.yaml")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    return tiny_checkpoint(tiny_base(root / "base"), root / "checkpoint")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(BATCH + 5):
        noise_image(number, (40, 40)).save(tmp_path / f"{number}.png")
    return tmp_path


def pairs(images: Path, count: int) -> list[AskedPair]:
    return [AskedPair(f"p{n}", images / f"{n}.png", images / f"{n + 1}.png") for n in range(count)]


def caption(checkpoint: Path, *arguments: object) -> int:
    return main(["--params", EMBEDDED, "caption", *map(str, arguments), "--model", str(checkpoint)])


def test_every_pair_has_its_own_answer_in_order_over_the_batches(checkpoint, images, capsys):
    captioner, asked = load_captioner(checkpoint), pairs(images, BATCH + 3)
    found = list(caption_pairs(captioner, asked, None, None))
    assert [answer.pair for answer in found] == asked
    alone = [next(caption_pairs(captioner, [pair], None, None)).caption for pair in asked]
    assert [answer.caption for answer in found] == alone
    assert len(set(alone)) > 1, "a model that says one thing shows no order"
    capsys.readouterr()
    assert caption(checkpoint.parent, images / "0.png", images / "1.png") == 0, "a folder that holds it will do"
    assert capsys.readouterr().out == f"{' '.join(alone[0].split())}\n"


def test_a_pair_that_cannot_be_read_is_said_and_the_others_are_captioned(checkpoint, images, capsys):
    (images / "bad.png").write_bytes(b"no image")
    Image.new("1", (1, 30_000)).save(images / "thin.png")
    (images / "t.csv").write_text("before,after\n0.png,1.png\n2.png,bad.png\nthin.png,1.png\n4.png,5.png\n")
    assert caption(checkpoint, images / "t.csv") == DATA_REFUSED
    said = capsys.readouterr()
    assert [line.split("\t")[0] for line in said.out.splitlines()] == ["00001", "00004"]
    assert "bad.png: is text, not an image" in said.err
    assert "thin.png: has 1x30000 pixels, 900,000,000 padded to a square, more than 100,000,000" in said.err
    assert caption(checkpoint, images / "t.csv", "--json") == DATA_REFUSED
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["name"] for row in rows] == ["00001", "00002", "00003", "00004"]
    assert rows[0]["before"] == str(images / "0.png")
    assert rows[1].keys() == {"name", "before", "after", "error"}
    captions = [" ".join(row["caption"].split()) for row in (rows[0], rows[3])]
    assert captions == [line.split("\t")[1] for line in said.out.splitlines()]


def test_a_question_with_the_mark_of_an_image_or_to_a_model_that_reads_none_is_refused(checkpoint, images, capsys):
    question = (images / "0.png", images / "1.png", "--question")
    assert caption(checkpoint, *question, "What is new in <image>?") == USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert "--question 'What is new in <image>?': the question has <image>, the mark of an image's place" in said.err
    assert caption(checkpoint, *question, "What is new?") == 0
    model: Any = SimpleNamespace(family=FAMILIES["blip2idc"])
    with pytest.raises(ParamsError, match="--question 'Is a cup gone\\?': this model reads no question .* leave it"):
        next(caption_pairs(model, pairs(images, 1), "Is a cup gone?", None))


class Model:
    """A captioner whose maps are given; it remembers questions and the last images."""

    processor = SimpleNamespace(prepare_image=np.asarray, encode_prompt=lambda question: ())
    family = SimpleNamespace(reads_question=True)

    def __init__(self, maps: np.ndarray | None) -> None:
        self.maps, self.asked = maps, list[str]()

    def answer(self, prepared: list[np.ndarray], question: str, saliency: bool) -> Any:
        self.asked.append(question)
        self.images = prepared
        return ["same"] * (len(prepared) // 2), self.maps


def test_each_pair_s_overlay_has_its_own_map_and_both_images_side_by_side(checkpoint, images, tmp_path):
    file = tmp_path / "made" / "out.png"
    noise_image(5, (60, 30)).save(images / "wide.png")
    assert caption(checkpoint, images / "0.png", images / "wide.png", "--overlay", file) == 0
    assert Image.open(file).size == (40 + 12 + 60, 40)
    grids = np.full((3, 4, 4), 1 / 16, np.float16)
    grids[1, 0, 0] *= 8
    model: Any = Model(grids)
    list(caption_pairs(model, pairs(images, 3), None, tmp_path / "made"))
    for number in range(3):
        sheet = np.asarray(Image.open(tmp_path / "made" / f"p{number}.png"))
        before, after = (np.asarray(noise_image(number + n, (40, 40))) for n in (0, 1))
        for side, image in ((sheet[:, :40], before), (sheet[:, 40 + 12 :], after)):
            assert np.array_equal(side, image) == (number != 1)
            assert np.array_equal(side[20:, 20:], image[20:, 20:])


def test_the_image_before_comes_first_the_question_is_what_changed_and_a_model_without_maps_says_so(images):
    model: Any = Model(None)
    for question in (None, "Is a cup gone?"):
        list(caption_pairs(model, pairs(images, 1), question, None))
    assert model.asked == [QUESTION, "Is a cup gone?"]
    assert [np.array_equal(image, noise_image(n, (40, 40))) for n, image in enumerate(model.images)] == [True, True]
    with pytest.raises(ValueError, match="overlay: this model has no saliency maps"):
        list(caption_pairs(model, pairs(images, 1), None, images / "o.png"))


def test_a_version_brings_its_checkpoint_and_its_own_limit_of_tokens(checkpoint, monkeypatch):
    version = SimpleNamespace(version="3", tags={"predict.max_new_tokens": "5"})
    there = {"3": version}
    monkeypatch.setattr(versions, "find_version", lambda client, name, model: there[model])
    monkeypatch.setattr(versions, "download_checkpoint", lambda found: checkpoint if found is version else None)
    monkeypatch.setattr(tracking, "connected", lambda uri: nullcontext())
    store = ("sqlite:///:memory:", "m3diff")
    found = model_source.find(*store, "3", Path("base"), 64)
    assert (found.name, found.max_new_tokens) == ("m3diff/3", 5)
    assert model_source.load(found).max_new_tokens == 5
    found = model_source.find(*store, str(checkpoint), Path("base"), 64)
    assert (found.name.startswith("m3diff/sha256-"), found.max_new_tokens) == (True, 64)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folders = ("one/a.png", "one/b.JPG", "one/notes.txt", "other/b.webp", "other/a.png", "empty/notes.txt")
    for name in (*folders, "x.png", "y.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_two_folders_are_pairs_by_name_whatever_the_format_and_hidden_files_are_no_images(here):
    for side in ("one", "other"):
        (here / side / "._a.png").write_bytes(b"\0\5\26\7")
        (here / side / ".hidden").mkdir()
    a, b = AskedPair("a", here / "one/a.png", here / "other/a.png"), ("b", here / "one/b.JPG", here / "other/b.webp")
    assert find_pairs(here / "one", here / "other") == [a, b]
    for file in ("one/c.png", "one/c.jpg", "other/c.png", "other/c.jpg"):
        (here / file).touch()
    names = [pair.name for pair in find_pairs(here / "one", here / "other")]
    assert names == ["a", "b", "c.jpg", "c.png"], "one name in two formats is two images"


def test_two_images_are_one_pair_and_a_table_names_paths_from_its_own_folder(here):
    assert find_pairs(here / "x.png", here / "y.png") == [AskedPair("x", here / "x.png", here / "y.png")]
    text = f"\ufeffid,after,before\n7,y.png,x.png\n8,{here}/x.png,one/a.png\n"
    (here / "pairs.csv").write_text(text, encoding="utf-8")
    first, second = AskedPair("00001", here / "x.png", here / "y.png"), here / "one/a.png"
    assert find_pairs(here / "pairs.csv", None) == [first, AskedPair("00002", second, here / "x.png")]


NO_PAIR = [
    ("nowhere", "one", "", "nowhere: no such file or folder; give two images"),
    ("one", None, "", "one: no pair; give two images, two folders"),
    ("one", "x.png", "", "one, .*x.png: no pair; give two images"),
    ("one", "many", "", "11 image.s. in one folder alone: a, b, n0, n1, n2, ...; name both sides alike"),
    ("empty", "empty", "", "empty: no image"),
    ("t.csv", None, "first,after\n1,2\n", "t.csv: no column before; found first, after"),
    ("t.csv", None, "before,after\nx.png,y.png\nx.png\n", "t.csv, line 3: row: has 1 fields, the header 2"),
    ("t.csv", None, "before,after\n", "t.csv: no row"),
    ("t.csv", None, "before,after\nx.png,http://[::1]/y.png\n", "t.csv, line 2: after: .*is an address, and nothing"),
    ("x.png", None, "", "x.png: unknown kind of manifest"),
]


@pytest.mark.parametrize(("before", "after", "table", "said"), NO_PAIR)
def test_what_is_no_pair_is_said_with_what_to_give(here, before, after, table, said):
    (here / "t.csv").write_text(table)
    (here / "many").mkdir()
    for number in range(9):
        (here / "many" / f"n{number}.png").touch()
    with pytest.raises(DataError, match=said):
        find_pairs(here / before, after and here / after)


@pytest.mark.parametrize("named", ["../x.png", "{here}/x.png", "one/../../x.png", "link.png", "..\\x.png"])
def test_paths_in_a_table_stay_in_its_folder_unless_another_is_opened(here, named):
    folder = here / "table"
    (folder / "one").mkdir(parents=True)
    (folder / "link.png").symlink_to(here / "x.png")
    (folder / "in.png").touch()
    (folder / "pairs.csv").write_text(f"before,after\nin.png,{named.format(here=here)}\n")
    with pytest.raises(DataError, match=r"pairs\.csv, line 2: after: text .* out of the .*--image-root"):
        find_pairs(folder / "pairs.csv", None)
    if "\\" not in named:
        (found,) = find_pairs(folder / "pairs.csv", None, here)
        assert (found.before, found.after.resolve()) == (folder / "in.png", here / "x.png")
    with pytest.raises(DataError, match=re.escape("--image-root")):
        find_pairs(folder / "pairs.csv", None, here / "other")
