"""predict on a tiny checkpoint: what it writes, in which order, who is paired with whom, and what it refuses."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.images.open import load_image
from m3diff.models.generation import Captioner, load_captioner
from m3diff.records.errors import DataError
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.stages.evaluate.report.gallery import read_saliency
from m3diff.stages.predict.pairs import PairSample, control_pairs
from m3diff.stages.predict.params import Predict
from m3diff.stages.predict.stage import PredictReport, predict
from tests.stages.predict.conftest import ORDER, QUESTIONS, compute, settings, write_test_split
from tests.tiny import colour_image

IDS = [f"toy/{number}" for number in ORDER]
SETS = ("predictions", "predictions_shuffled", "predictions_reversed")


@pytest.fixture(scope="module")
def captioner(model: Path) -> Captioner:
    return load_captioner(model / "checkpoint", max_new_tokens=5)


def run(cfg: Predict, mixture: Path, model: Path, out: Path) -> PredictReport:
    return predict(cfg, compute(out), mixture, model, out)


def rows_of(out: Path, name: str = "predictions") -> list[dict[str, str]]:
    return json.loads((out / f"{name}.json").read_text())


def one_by_one(captioner: Captioner, mixture: Path, numbers: list[int]) -> list[dict[str, str]]:
    """The captions of the pairs, each from a batch of its own."""
    rows = []
    for number in numbers:
        images = [load_image(mixture / f"{number}_{side}.png") for side in ("before", "after")]
        caption = captioner.caption([tuple(images)], QUESTIONS[number % 2])[0]
        rows.append({"image_id": f"toy/{number}", "caption": caption})
    return rows


def test_predictions_are_the_captions_in_the_mixtures_order_and_counted(written, captioner, mixture):
    out, report = written
    rows = rows_of(out)
    assert rows == one_by_one(captioner, mixture, ORDER)
    assert len({row["caption"] for row in rows}) > 1, "captions that are all alike would hide a wrong order"
    words = round(sum(len(row["caption"].split()) for row in rows) / 5, 2)
    assert report == PredictReport(stage="predict", rows_in=5, rows_out=5, words=words, control=5, reversed=5)
    assert json.loads((out / "report.json").read_text()) == report.model_dump()
    assert {path.name for path in out.iterdir()} == {*(f"{name}.json" for name in SETS), "saliency.npz", "report.json"}


def test_each_pair_is_shown_with_its_own_images_and_question(mixture, model, captioner, tmp_path, monkeypatch):
    """Here a caption says what was seen: no two pairs can be taken for each other."""

    def answer(_: Captioner, images: list, question: str, saliency: bool) -> tuple[list[str], None]:
        sums = [str(image.astype(int).sum()) for image in images]
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return [f"größer {before} {after} {question}" for before, after in pairs], None

    monkeypatch.setattr(Captioner, "answer", answer)
    run(settings(), mixture, model, tmp_path)
    prepare = captioner.processor.prepare_image
    sums = {file.stem: prepare(load_image(file)).astype(int).sum() for file in mixture.glob("*.png")}
    assert len(set(sums.values())) == 10
    others = zip(ORDER, ORDER[2:] + ORDER[:2], strict=True)
    shown = [[(f"{n}_before", f"{n}_after") for n in ORDER], [(f"{n}_before", f"{a}_after") for n, a in others]]
    for name, images in zip(SETS, [*shown, [(after, before) for before, after in shown[0]]], strict=True):
        assert rows_of(tmp_path, name) == [
            {"image_id": f"toy/{n}", "caption": f"größer {sums[first]} {sums[second]} {QUESTIONS[n % 2]}"}
            for n, (first, second) in zip(ORDER, images, strict=True)
        ]
    text = (tmp_path / "predictions.json").read_text(encoding="utf-8")
    assert text.startswith('[\n {\n  "image_id": "toy/4",\n  "caption": "größer ')
    assert read_saliency(tmp_path / "saliency.npz") == {}, "a family without maps leaves an empty file of them"


def test_saliency_has_one_map_for_each_pair_in_the_same_order(written, captioner, mixture):
    with zipfile.ZipFile(written[0] / "saliency.npz") as archive:
        facts = [(of.filename, of.extract_version, of.extra) for of in archive.infolist()]
    assert facts == [("ids.npy", 20, b""), ("maps.npy", 20, b"")], "no sizes of 64 bits, which differ by Python"
    with np.load(written[0] / "saliency.npz") as file:
        ids, maps = file["ids"].tolist(), file["maps"]
    assert (ids, maps.shape, maps.dtype) == (IDS, (5, 3, 3), np.float16)
    np.testing.assert_allclose(maps.astype(float).sum((1, 2)), 1, atol=2e-3)
    for number, found in zip(ORDER, maps, strict=True):
        files = [mixture / f"{number}_{side}.png" for side in ("before", "after")]
        images = [captioner.processor.prepare_image(load_image(file)) for file in files]
        np.testing.assert_allclose(found, captioner.answer(images, saliency=True)[1][0], atol=1e-3)
    assert np.abs(maps[0] - maps[1]).max() > 2e-3, "maps that are all alike would hide a wrong order"


def test_the_batch_size_changes_nothing(written, mixture, model, tmp_path, counted):
    run(settings(batch_pairs=48), mixture, model, tmp_path)
    assert counted["calls"] == [(size, saliency) for saliency in (True, False, False) for size in (3, 2)]
    assert all(rows_of(tmp_path, name) == rows_of(written[0], name) for name in SETS)
    with np.load(tmp_path / "saliency.npz") as got, np.load(written[0] / "saliency.npz") as want:
        assert got["ids"].tolist() == want["ids"].tolist()
        np.testing.assert_allclose(got["maps"], want["maps"], atol=1e-3)


def test_a_limit_takes_the_first_pairs_and_max_new_tokens_their_first_tokens(written, mixture, model, tmp_path):
    report = run(settings(limit=2, max_new_tokens=1), mixture, model, tmp_path)
    limited = load_captioner(model / "checkpoint", max_new_tokens=1)
    assert rows_of(tmp_path) == one_by_one(limited, mixture, ORDER[:2]) != rows_of(written[0])[:2]
    assert report.rows_in == report.rows_out == len(np.load(tmp_path / "saliency.npz")["ids"]) == 2


@pytest.mark.fault("09")
def test_a_mixture_without_test_pairs_and_a_damaged_checkpoint_are_refused(mixture, model, tmp_path):
    (tmp_path / "test").mkdir()
    pq.write_table(pa.Table.from_pylist([], SAMPLE_SCHEMA), tmp_path / "test" / "00000.parquet")
    with pytest.raises(DataError, match=r"test: no sample of the test split; run `m3diff convert`"):
        run(settings(), tmp_path, model, tmp_path / "out")
    with pytest.raises(DataError, match=r"checkpoint: no manifest.json"):
        run(settings(), mixture, tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("side", "damage", "text"),
    [("before", Path.unlink, "cannot be read"), ("after", lambda file: colour_image(99).save(file), "run `dvc repro`")],
    ids=["gone", "another"],
)
def test_an_image_that_is_gone_or_changed_is_refused(side, damage, text, model, tmp_path):
    mixture = write_test_split(tmp_path / "mixture", [0, 1])
    damage(mixture / f"1_{side}.png")
    with pytest.raises(DataError, match=f"1_{side}.png: .*{text}"):
        run(settings(max_new_tokens=1), mixture, model, tmp_path / "out")
    assert not (tmp_path / "out" / "predictions.json").exists()


def numbered(count: int) -> list[PairSample]:
    return [PairSample(str(n), f"b{n}", f"a{n}", b"b%d" % n, b"a%d" % n, f"q{n}") for n in range(count)]


@pytest.mark.parametrize(("count", "of"), [(2, 2), (3, 3), (4, 4), (7, 7), (0, 7), (1, 7), (4, 7), (9, 7)])
def test_the_controls_are_a_sample_with_the_after_of_another_pair_and_the_same_pairs_swapped(count, of):
    pairs = numbered(of)
    shuffled, swapped = control_pairs(pairs, count)
    numbers = [int(pair.id) for pair in shuffled]
    assert len(numbers) == min(count, of)
    assert numbers == sorted(set(numbers)), "in the order of the pairs, each at most once"
    others = [pairs[(n + of // 2) % of] for n in numbers]  # from all pairs; none keeps its own, each is used once
    assert shuffled == [
        pairs[n]._replace(after=other.after, after_sha256=other.after_sha256)
        for n, other in zip(numbers, others, strict=True)
    ]
    assert swapped == [(str(n), f"a{n}", f"b{n}", b"a%d" % n, b"b%d" % n, f"q{n}") for n in numbers]
    assert {pair.id for pair in shuffled} <= {pair.id for pair in control_pairs(pairs, count + 1)[0]}


def test_the_control_is_not_of_the_first_pairs_and_the_same_each_time():
    chosen, again = ([int(pair.id) for pair in control_pairs(numbered(1000), 100)[0]] for _ in range(2))
    assert chosen == again
    assert 300 < np.mean(chosen) < 700
    assert max(chosen) > 900
