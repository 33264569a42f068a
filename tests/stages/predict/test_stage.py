"""predict on a tiny checkpoint: what it writes, in which order, who is paired with whom, and what it refuses."""

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from m3diff.images.open import load_image
from m3diff.models.generation import Captioner, load_captioner
from m3diff.records.errors import DataError
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.settings.compute import Compute
from m3diff.stages.evaluate.report.gallery import read_saliency
from m3diff.stages.predict import stage
from m3diff.stages.predict.pairs import PairSample, control_pairs, read_test_pairs, reversed_pairs, shuffle_after
from m3diff.stages.predict.params import Predict
from m3diff.stages.predict.stage import PredictReport, predict
from tests.stages.train.toy import COMPUTE
from tests.tiny import colour_image, tiny_base, tiny_checkpoint

QUESTIONS = ("What changed?", "Describe every difference in detail.")
ORDER = [4, 0, 3, 1, 2]
"""Pairs in the mixture's order, which is not the order of their names; every second one has another question."""
IDS = [f"toy/{number}" for number in ORDER]


def write_test_split(folder: Path, numbers: list[int] = ORDER) -> Path:
    """A mixture of five test pairs with one to three samples each, in two files."""
    (folder / "test").mkdir(parents=True)
    rows = []
    for number in numbers:
        row = {"pair": f"toy/{number}", "dataset": "toy", "split": "test", "question": QUESTIONS[number % 2]}
        for k, side in enumerate(("before", "after")):
            file = folder / f"{number}_{side}.png"
            colour_image(10 * number + k).save(file)
            row |= {side: str(file), f"{side}_sha256": hashlib.sha256(file.read_bytes()).digest()}
        rows += [row | {"id": f"toy/{number}#{k}", "reference": f"reference {k}"} for k in range(1 + number % 3)]
    for part, chosen in enumerate((rows[:3], rows[3:])):
        pq.write_table(pa.Table.from_pylist(chosen, SAMPLE_SCHEMA), folder / "test" / f"{part:05d}.parquet")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    tiny_checkpoint(tiny_base(folder / "base"), folder / "model" / "checkpoint")
    return folder / "model"


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_test_split(tmp_path_factory.mktemp("predict") / "mixture")


@pytest.fixture(scope="module")
def captioner(model: Path) -> Captioner:
    return load_captioner(model / "checkpoint", max_new_tokens=5)


def settings(**changes: int) -> Predict:
    return Predict(**{"batch_pairs": 2, "max_new_tokens": 5, "limit": 0} | changes)


def compute(out: Path, **changes: Any) -> Compute:
    """How it is computed, with the scratch beside the outputs."""
    return Compute(**{**COMPUTE, "scratch": out.parent / f"{out.name}_runs", **changes})


def run(cfg: Predict, mixture: Path, model: Path, out: Path) -> PredictReport:
    return predict(cfg, compute(out), mixture, model, out)


@pytest.fixture(scope="module")
def written(mixture: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PredictReport]:
    out = tmp_path_factory.mktemp("predict") / "out"
    return out, run(settings(), mixture, model, out)


def answer_with(monkeypatch: pytest.MonkeyPatch, caption: Callable[[list, str], list[str]]) -> None:
    """Let the model say what `caption` makes of the images and the question, and look everywhere alike."""

    def answer(_: Captioner, images: list, question: str, saliency: bool) -> tuple[list[str], np.ndarray | None]:
        captions = caption(images, question)
        return captions, np.full((len(captions), 3, 3), 1 / 9, np.float16) if saliency else None

    monkeypatch.setattr(Captioner, "answer", answer)


def map_of(captioner: Captioner, mixture: Path, number: int) -> np.ndarray:
    images = [load_image(mixture / f"{number}_{side}.png") for side in ("before", "after")]
    _, maps = captioner.answer([captioner.processor.prepare_image(image) for image in images], saliency=True)
    assert maps is not None
    return maps[0]


def one_by_one(captioner: Captioner, mixture: Path, befores: list[int], afters: list[int]) -> list[dict[str, str]]:
    """What the pairs' captions must be, each from a batch of its own."""
    rows = []
    for before, after in zip(befores, afters, strict=True):
        images = load_image(mixture / f"{before}_before.png"), load_image(mixture / f"{after}_after.png")
        caption = captioner.caption([images], QUESTIONS[before % 2])[0]
        rows.append({"image_id": f"toy/{before}", "caption": caption})
    return rows


def test_predictions_are_the_captions_in_the_mixtures_order(
    written: tuple[Path, PredictReport], captioner: Captioner, mixture: Path
) -> None:
    rows = json.loads((written[0] / "predictions.json").read_text())
    assert rows == one_by_one(captioner, mixture, ORDER, ORDER)
    assert len({row["caption"] for row in rows}) > 1, "captions that are all alike would hide a wrong order"


def test_each_pair_is_shown_with_its_own_images_and_question(
    mixture: Path, model: Path, captioner: Captioner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a caption says what was seen: no two pairs can be taken for each other."""

    def caption(images: list, question: str) -> list[str]:
        sums = [str(image.astype(int).sum()) for image in images]
        return [f"{before} {after} {question}" for before, after in zip(sums[::2], sums[1::2], strict=True)]

    answer_with(monkeypatch, caption)
    run(settings(), mixture, model, tmp_path)
    prepare = captioner.processor.prepare_image
    sums = {file.stem: prepare(load_image(file)).astype(int).sum() for file in mixture.glob("*.png")}
    assert len(set(sums.values())) == 10
    shown = {
        "predictions": [(f"{n}_before", f"{n}_after") for n in ORDER],
        "predictions_shuffled": [
            (f"{n}_before", f"{a}_after") for n, a in zip(ORDER, ORDER[2:] + ORDER[:2], strict=True)
        ],
        "predictions_reversed": [(f"{n}_after", f"{n}_before") for n in ORDER],
    }
    for name, images in shown.items():
        assert json.loads((tmp_path / f"{name}.json").read_text()) == [
            {"image_id": f"toy/{n}", "caption": f"{sums[first]} {sums[second]} {QUESTIONS[n % 2]}"}
            for n, (first, second) in zip(ORDER, images, strict=True)
        ]


def test_saliency_has_one_map_for_each_pair_in_the_same_order(
    written: tuple[Path, PredictReport], captioner: Captioner, mixture: Path
) -> None:
    with zipfile.ZipFile(written[0] / "saliency.npz") as archive:
        assert [(of.filename, of.extract_version, of.extra) for of in archive.infolist()] == [
            ("ids.npy", 20, b""),
            ("maps.npy", 20, b""),
        ], "no sizes of 64 bits, of which each Python has its own"
    with np.load(written[0] / "saliency.npz") as file:
        ids, maps = file["ids"].tolist(), file["maps"]
    assert ids == IDS
    assert (maps.shape, maps.dtype) == ((5, 3, 3), np.float16)
    np.testing.assert_allclose(maps.astype(float).sum((1, 2)), 1, atol=2e-3)
    for number, found in zip(ORDER, maps, strict=True):
        np.testing.assert_allclose(found, map_of(captioner, mixture, number), atol=1e-3)
    assert np.abs(maps[0] - maps[1]).max() > 2e-3, "maps that are all alike would hide a wrong order"


def test_the_report_counts_pairs_and_words(written: tuple[Path, PredictReport]) -> None:
    out, report = written
    captions = [row["caption"] for row in json.loads((out / "predictions.json").read_text())]
    words = round(sum(len(caption.split()) for caption in captions) / 5, 2)
    assert report == PredictReport(stage="predict", rows_in=5, rows_out=5, words=words, control=5, reversed=5)
    assert json.loads((out / "report.json").read_text()) == report.model_dump()
    controls = {"predictions_shuffled.json", "predictions_reversed.json"}
    assert {path.name for path in out.iterdir()} == {"predictions.json", *controls, "saliency.npz", "report.json"}


@pytest.mark.parametrize("batch_pairs", [1, 48])
def test_the_batch_size_changes_nothing(
    batch_pairs: int, written: tuple[Path, PredictReport], mixture: Path, model: Path, tmp_path: Path
) -> None:
    run(settings(batch_pairs=batch_pairs), mixture, model, tmp_path)
    for name in ("predictions.json", "predictions_shuffled.json"):
        assert (tmp_path / name).read_text() == (written[0] / name).read_text()
    with np.load(tmp_path / "saliency.npz") as got, np.load(written[0] / "saliency.npz") as want:
        assert got["ids"].tolist() == want["ids"].tolist()
        np.testing.assert_allclose(got["maps"], want["maps"], atol=1e-3)


def test_maps_are_made_of_the_pairs_alone_in_the_batches_of_their_captions(
    mixture: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []
    original = Captioner.answer

    def answer(self: Captioner, images: list, question: str, saliency: bool) -> tuple[list[str], np.ndarray | None]:
        seen.append((len(images) // 2, saliency))
        return original(self, images, question, saliency)

    monkeypatch.setattr(Captioner, "answer", answer)
    run(settings(), mixture, model, tmp_path)
    maps = [(size, saliency) for saliency in (True, False, False) for size in (2, 1, 2)]
    assert seen == maps, "nothing of the controls, whose maps nobody reads"


def test_a_family_without_maps_leaves_an_empty_file_of_them(
    mixture: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Captioner, "answer", lambda self, images, question, saliency: (["größer"] * (len(images) // 2), None)
    )
    run(settings(), mixture, model, tmp_path)
    text = (tmp_path / "predictions.json").read_text(encoding="utf-8")
    assert text.startswith('[\n {\n  "image_id": "toy/4",\n  "caption": "größer"\n },\n')
    assert read_saliency(tmp_path / "saliency.npz") == {}


@pytest.mark.parametrize(("limit", "count"), [(3, 3), (9, 5)])
def test_a_limit_takes_the_first_pairs(
    limit: int, count: int, written: tuple[Path, PredictReport], mixture: Path, model: Path, tmp_path: Path
) -> None:
    report = run(settings(limit=limit), mixture, model, tmp_path)
    rows = json.loads((tmp_path / "predictions.json").read_text())
    assert rows == json.loads((written[0] / "predictions.json").read_text())[:count]
    assert report.rows_in == report.rows_out == len(np.load(tmp_path / "saliency.npz")["ids"]) == count


def test_max_new_tokens_is_the_length_limit(mixture: Path, model: Path, tmp_path: Path) -> None:
    said = {}
    for tokens in (1, 5):
        run(settings(max_new_tokens=tokens, limit=2), mixture, model, tmp_path)
        rows = json.loads((tmp_path / "predictions.json").read_text())
        numbers = [int(row["image_id"].rpartition("/")[2]) for row in rows]
        limited = load_captioner(model / "checkpoint", max_new_tokens=tokens)
        assert rows == one_by_one(limited, mixture, numbers, numbers)
        said[tokens] = [row["caption"] for row in rows]
    assert said[1] != said[5]


def test_pairs_are_read_once_each_in_the_mixtures_order(mixture: Path) -> None:
    pairs = read_test_pairs(mixture)
    assert [pair.id for pair in pairs] == IDS
    number = ORDER[1]
    digests = [hashlib.sha256((mixture / f"{number}_{side}.png").read_bytes()).digest() for side in ("before", "after")]
    assert pairs[1] == PairSample(
        IDS[1], str(mixture / f"{number}_before.png"), str(mixture / f"{number}_after.png"), *digests, QUESTIONS[0]
    )


def test_pairs_that_share_an_image_are_two_pairs(tmp_path: Path) -> None:
    """A change and its distractor have the same image before."""
    row = {"before": "same.png", "before_sha256": b"1" * 32, "after_sha256": b"2" * 32, "question": QUESTIONS[0]}
    rows = [row | {"pair": f"toy/{after}", "after": f"{after}.png"} for after in ("change", "distractor")]
    (tmp_path / "test").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, SAMPLE_SCHEMA), tmp_path / "test" / "00000.parquet")
    assert [pair.id for pair in read_test_pairs(tmp_path)] == ["toy/change", "toy/distractor"]


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_in_the_control_no_pair_keeps_its_after_and_every_after_is_used_once(count: int) -> None:
    pairs = [PairSample(str(n), f"b{n}", f"a{n}", b"b%d" % n, b"a%d" % n, f"q{n}") for n in range(count)]
    shuffled = shuffle_after(pairs)
    shift = count // 2
    for number, (pair, mixed) in enumerate(zip(pairs, shuffled, strict=True)):
        other = pairs[(number + shift) % count]
        assert mixed == pair._replace(after=other.after, after_sha256=other.after_sha256)
        assert mixed.after != pair.after


@pytest.mark.parametrize("empty", [False, True], ids=["no folder", "no rows"])
def test_a_mixture_without_test_pairs_is_refused(empty: bool, model: Path, tmp_path: Path) -> None:
    if empty:
        (tmp_path / "test").mkdir()
        pq.write_table(pa.Table.from_pylist([], SAMPLE_SCHEMA), tmp_path / "test" / "00000.parquet")
    with pytest.raises(DataError, match=r"test: no sample of the test split; run `m3diff convert`"):
        run(settings(), tmp_path, model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("side", "damage", "text"),
    [
        ("before", Path.unlink, "cannot be read as an image"),
        ("before", lambda file: file.write_bytes(b"no image"), "changed since ingest; run `dvc repro`"),
        ("after", lambda file: colour_image(99).save(file), "changed since ingest; run `dvc repro`"),
    ],
    ids=["gone", "no image", "another"],
)
def test_an_image_that_is_gone_or_changed_is_refused(
    side: str, damage: Callable[[Path], Any], text: str, model: Path, tmp_path: Path
) -> None:
    mixture = write_test_split(tmp_path / "mixture", [0, 1])
    damage(mixture / f"1_{side}.png")
    with pytest.raises(DataError, match=f"1_{side}.png: .*{text}"):
        run(settings(max_new_tokens=1), mixture, model, tmp_path / "out")
    assert not (tmp_path / "out" / "predictions.json").exists()


@pytest.mark.fault("09")
def test_a_damaged_checkpoint_is_refused_as_data(mixture: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"checkpoint: no manifest.json"):
        run(settings(), mixture, tmp_path / "model", tmp_path / "out")


def test_progress_counts_the_batches_and_the_captions(
    mixture: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    monkeypatch.setattr(stage, "progress", lambda items, label, total, unit: seen.append((label, total, unit)) or items)
    run(settings(), mixture, model, tmp_path)
    assert seen == [("predict", 9, "batch")]
    assert "predict: 15 captions in " in capsys.readouterr().out


@pytest.mark.parametrize("count", [0, 1, 4, 7, 9])
def test_the_control_is_a_sample_of_all_pairs_with_partners_from_all(count: int) -> None:
    pairs = [PairSample(str(n), f"b{n}", f"a{n}", b"b%d" % n, b"a%d" % n, f"q{n}") for n in range(7)]
    whole, chosen = shuffle_after(pairs), control_pairs(pairs, count)
    assert len(chosen) == min(count, 7)
    assert chosen == [pair for pair in whole if pair in chosen], "in the order of the pairs, each at most once"
    assert {pair.id for pair in chosen} <= {pair.id for pair in control_pairs(pairs, count + 1)}


def test_the_second_control_swaps_the_images_of_the_pairs_that_the_first_one_samples() -> None:
    pairs = [PairSample(str(n), f"b{n}", f"a{n}", bytes([n]), bytes([n + 100]), "?") for n in range(9)]
    found = reversed_pairs(pairs, 4)
    assert [pair.id for pair in found] == [pair.id for pair in control_pairs(pairs, 4)]
    for pair in found:
        n = int(pair.id)
        assert pair == (str(n), f"a{n}", f"b{n}", bytes([n + 100]), bytes([n]), "?")


def test_the_control_is_not_of_the_first_pairs_and_the_same_each_time() -> None:
    pairs = [PairSample(str(n), f"b{n}", f"a{n}", b"", b"", "q") for n in range(1000)]
    chosen = [int(pair.id) for pair in control_pairs(pairs, 100)]
    assert chosen == [int(pair.id) for pair in control_pairs(pairs, 100)]
    assert 300 < np.mean(chosen) < 700
    assert max(chosen) > 900


@pytest.mark.parametrize(("field", "least"), [("batch_pairs", 1), ("max_new_tokens", 1), ("limit", 0)])
def test_the_section_has_limits(field: str, least: int) -> None:
    assert getattr(settings(**{field: least}), field) == least
    with pytest.raises(ValidationError, match=field):
        settings(**{field: least - 1})
