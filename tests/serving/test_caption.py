"""`m3diff caption` on images of one's own: folders and versions, many pairs, overlays, what cannot be read."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from m3diff.__main__ import DATA_REFUSED, USAGE, main
from m3diff.models import FAMILIES
from m3diff.models.generation import load_captioner
from m3diff.registry import model_source, tracking
from m3diff.serving.caption import BATCH, GAP_PX, AskedPair, caption_pairs
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
    for number in range(2 * BATCH + 2):
        noise_image(number, (40, 40)).save(tmp_path / f"{number}.png")
    return tmp_path


def pairs(images: Path, count: int) -> list[AskedPair]:
    return [AskedPair(f"p{n}", images / f"{n}.png", images / f"{n + 1}.png") for n in range(count)]


def caption(checkpoint: Path, *arguments: object) -> int:
    return main(["--params", EMBEDDED, "caption", *map(str, arguments), "--model", str(checkpoint)])


def test_two_images_give_the_caption_and_nothing_else(checkpoint, images, capsys):
    want = load_captioner(checkpoint).caption([(noise_image(0, (40, 40)), noise_image(1, (40, 40)))])
    assert caption(checkpoint, images / "0.png", images / "1.png") == 0
    assert capsys.readouterr().out == f"{' '.join(want[0].split())}\n"


def test_an_image_whose_square_is_too_large_is_told_and_the_other_pairs_are_captioned(checkpoint, images, capsys):
    Image.new("1", (1, 30_000)).save(images / "thin.png")
    (images / "pairs.csv").write_text("before,after\n0.png,1.png\nthin.png,1.png\n")
    assert caption(checkpoint, images / "pairs.csv") == DATA_REFUSED
    printed = capsys.readouterr()
    assert printed.out.startswith("00001\t")
    assert "thin.png: has 1x30000 pixels, 900,000,000 padded to a square, more than 100,000,000" in printed.err


def test_every_pair_has_its_own_answer_in_order_over_the_batches(checkpoint, images):
    captioner = load_captioner(checkpoint)
    asked = pairs(images, BATCH + 3)
    found = list(caption_pairs(captioner, asked, None, None))
    assert [answer.pair for answer in found] == asked
    alone = [next(caption_pairs(captioner, [pair], None, None)).caption for pair in asked]
    assert [answer.caption for answer in found] == alone
    assert len(set(alone)) > 1, "a model that says one thing shows no order"


def test_a_pair_that_cannot_be_read_is_said_and_the_others_are_captioned(checkpoint, images, capsys):
    (images / "3.png").write_bytes(b"no image")
    (images / "t.csv").write_text("before,after\n0.png,1.png\n2.png,3.png\n4.png,5.png\n")
    assert caption(checkpoint, images / "t.csv") == DATA_REFUSED
    said = capsys.readouterr()
    assert [line.split("\t")[0] for line in said.out.splitlines()] == ["00001", "00003"]
    assert "3.png: cannot be read as an image" in said.err
    assert caption(checkpoint, images / "t.csv", "--json") == DATA_REFUSED
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["name"], first["before"]) == ("00001", str(images / "0.png"))
    assert " ".join(first["caption"].split()) == said.out.splitlines()[0].split("\t")[1]
    assert "caption" not in second
    assert "3.png" in second["error"]
    assert " ".join(third["caption"].split()) == said.out.splitlines()[1].split("\t")[1]


def test_a_question_with_the_mark_of_an_image_is_refused_before_any_caption(checkpoint, images, capsys):
    asked = (images / "0.png", images / "1.png", "--question")
    assert caption(checkpoint, *asked, "What is new in <image>?") == USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert "--question 'What is new in <image>?': the question has <image>, the mark of an image's place" in said.err
    assert caption(checkpoint, *asked, "What is new?") == 0


def test_a_question_is_refused_by_a_model_that_reads_none(images):
    model = SimpleNamespace(family=FAMILIES["blip2idc"])
    with pytest.raises(
        ParamsError, match="--question 'Is a cup gone\\?': this model reads no question .* leave it out"
    ):
        next(caption_pairs(model, pairs(images, 1), "Is a cup gone?", None))  # type: ignore[arg-type]


def test_the_overlay_shows_both_images_side_by_side(checkpoint, images, tmp_path):
    file = tmp_path / "made" / "out.png"
    noise_image(5, (60, 30)).save(images / "wide.png")
    assert caption(checkpoint, images / "0.png", images / "wide.png", "--overlay", file) == 0
    assert Image.open(file).size == (40 + GAP_PX + 60, 40)


def test_each_pair_s_overlay_has_its_own_map_and_images(images, tmp_path):
    grids = np.full((3, 4, 4), 1 / 16, np.float16)
    grids[1, 0, 0] *= 8

    class Model:
        processor = SimpleNamespace(prepare_image=np.asarray)

        def answer(self, prepared, question, saliency):
            return ["same"] * 3, grids

    list(caption_pairs(Model(), pairs(images, 3), None, tmp_path / "made"))  # type: ignore[arg-type]
    for number in range(3):
        sheet = np.asarray(Image.open(tmp_path / "made" / f"p{number}.png"))
        before, after = (np.asarray(noise_image(number + n, (40, 40))) for n in (0, 1))
        for side, image in ((sheet[:, :40], before), (sheet[:, 40 + GAP_PX :], after)):
            assert np.array_equal(side, image) == (number != 1)
            assert np.array_equal(side[20:, 20:], image[20:, 20:])


def test_a_model_without_maps_says_so(images):
    model = SimpleNamespace(
        processor=SimpleNamespace(prepare_image=np.asarray), answer=lambda prepared, question, saliency: (["a"], None)
    )
    with pytest.raises(ValueError, match="overlay: this model has no saliency maps"):
        list(caption_pairs(model, pairs(images, 1), None, images / "o.png"))  # type: ignore[arg-type]


def test_a_question_is_asked_and_without_one_what_changed(images):
    asked = []
    model = SimpleNamespace(
        processor=SimpleNamespace(prepare_image=np.asarray, encode_prompt=lambda question: ()),
        family=SimpleNamespace(reads_question=True),
        answer=lambda prepared, question, saliency: asked.append(question) or (["a"], None),
    )
    for question in (None, "Is a cup gone?"):
        list(caption_pairs(model, pairs(images, 1), question, None))  # type: ignore[arg-type]
    assert asked == ["What has changed from the first image to the second?", "Is a cup gone?"]


def test_a_folder_that_holds_a_checkpoint_will_do_and_what_is_neither_folder_nor_version_is_said(
    checkpoint, images, tmp_path, capsys, monkeypatch
):
    assert caption(checkpoint.parent, images / "0.png", images / "1.png") == 0
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for wrong in ("champion", "7", "nowhere"):
        assert caption(Path(wrong), images / "0.png", images / "1.png") == DATA_REFUSED
        said = capsys.readouterr().err
        assert f"has no version '{wrong}'" in said
        assert "--model data/05_model/checkpoint" in said


def test_a_version_brings_its_checkpoint_and_its_own_limit_of_tokens(checkpoint, monkeypatch):
    version = SimpleNamespace(version="3", tags={"predict.max_new_tokens": "5"})
    there = {"3": version}
    monkeypatch.setattr(tracking, "find_version", lambda client, name, model: there[model])
    monkeypatch.setattr(tracking, "download_checkpoint", lambda found: checkpoint if found is version else None)
    monkeypatch.setattr(tracking, "make_client", lambda uri: None)
    store = ("sqlite:///:memory:", "m3diff")
    found = model_source.find(*store, "3", Path("base"), 64)
    assert (found.name, found.max_new_tokens) == ("m3diff/3", 5)
    assert model_source.load(found).max_new_tokens == 5
    assert model_source.find(*store, str(checkpoint), Path("base"), 64).max_new_tokens == 64
