"""predict on a tiny checkpoint: what it writes, in which order, who is paired with whom, and how it goes on."""

import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.images.open import load_image
from m3diff.models.generation import Captioner, load_captioner
from m3diff.provenance import code
from m3diff.records.errors import DataError
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.stages.evaluate.report import read_saliency
from m3diff.stages.predict.params import Predict
from m3diff.stages.predict.stage import Answer, Journal, PairSample, PredictReport, control_pairs, predict, run_key
from tests.stages.predict.conftest import ORDER, QUESTIONS, Killed, compute, settings, write_test_split
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
    [
        ("before", Path.unlink, "cannot be read"),
        ("after", lambda file: colour_image(99).save(file), "run `touch -c .* && dvc repro`"),
    ],
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


@pytest.mark.fault("04")
@pytest.mark.parametrize(("done", "torn"), [(0, 0), (8, 0), (3, 5)])
def test_a_killed_run_captions_each_batch_once(done, torn, mixture, model, written, counted, tmp_path, capsys):
    """Also with other workers, and where the last answer is torn: then its batch of two pairs is captioned again."""
    out, counted["end"] = tmp_path / "out", done
    with pytest.raises(Killed):
        predict(settings(), compute(out), mixture, model, out)
    assert not (out / "predictions.json").exists()
    (journal,) = (tmp_path / "out_runs" / "predict").iterdir()
    journal.write_bytes(journal.read_bytes()[: -torn or None])
    counted["end"] = None
    predict(settings(), compute(out, workers=2, cpus_per_worker=2), mixture, model, out)
    assert [size for size, _ in counted["calls"]] == ([2, 1, 2, 2, 1, 2, 2, 1, 2] if not torn else
                                                      [2, 1, 2, 2, 2, 1, 2, 2, 1, 2])  # fmt: skip
    kept = {0: 0, 3: 4, 8: 13}[done]
    assert (f"resumed; {kept} captions of an earlier run are kept" in capsys.readouterr().out) == (kept > 0)
    for name in (*(f"{name}.json" for name in SETS), "saliency.npz", "report.json"):
        assert (out / name).read_bytes() == (written[0] / name).read_bytes(), name
    assert list(journal.parent.iterdir()) == [], "nothing is kept of a run that ended"


def test_what_decides_the_captions_names_a_run_and_places_do_not(mixture, model, tmp_path, monkeypatch):
    shutil.copytree(mixture, tmp_path / "mixture")
    shutil.copytree(model, tmp_path / "model")
    checkpoint = tmp_path / "model" / "checkpoint"
    first = run_key(settings(), mixture, model / "checkpoint")
    assert run_key(settings(), tmp_path / "mixture", checkpoint) == first
    keys = [run_key(settings(**{name: 3}), mixture, checkpoint) for name in Predict.model_fields]
    (tmp_path / "mixture" / "test" / "00001.parquet").unlink()
    keys.append(run_key(settings(), tmp_path / "mixture", checkpoint))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = "another"
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    keys.append(run_key(settings(), mixture, checkpoint))
    monkeypatch.setattr(code, "digests", lambda module, named: {module.name: "another meaning"})
    keys.append(run_key(settings(), mixture, model / "checkpoint"))
    assert len({first, *keys}) == 1 + len(keys) == 1 + len(Predict.model_fields) + 3


MAP = np.array([[0.25, 0.5], [0.125, 0.0], [0.0625, 0.0625]], np.float16)
ANSWERS = {
    ("predictions", "toy/0"): Answer("a größer\ncube\u2028 \ud800", MAP),
    ("predictions", "toy/1"): Answer("", MAP + 1),
    ("control", "toy/0"): Answer("nothing", None),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "journal.jsonl"
    with Journal(path) as journal:
        journal.add(ANSWERS.items())
    return path


def listed(answers: dict) -> dict:
    return {key: (caption, None if found is None else found.tolist()) for key, (caption, found) in answers.items()}


def kept(path: Path) -> dict:
    with Journal(path) as journal:
        return listed(journal.answers)


def test_answers_are_read_back_as_they_were_given_each_once_on_disk_before_the_next(file, monkeypatch):
    assert kept(file) == listed(ANSWERS)
    whole, synced = file.read_bytes(), []
    assert whole.count(b"\n") == 3, "a line each, whatever the text"
    with Journal(file) as journal:
        found = journal.answers["predictions", "toy/0"].saliency
        assert (found.dtype, found.shape) == (np.float16, (3, 2))
        journal.add([(("predictions", "toy/1"), Answer("another", MAP))])
        assert journal.answers["predictions", "toy/1"].caption == ""
    assert file.read_bytes() == whole
    monkeypatch.setattr("os.fsync", lambda number: synced.append(file.read_bytes().count(b"\n")))
    with Journal(file) as journal:
        for number in "45":
            journal.add([(("control", number), Answer("more", None))])
    assert synced == [4, 5]


def test_a_torn_last_line_is_dropped_and_does_not_spoil_the_next(file):
    whole, last = file.read_bytes(), ("control", "toy/0")
    second = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    for cut in (len(whole) - 1, second + 1, second):
        file.write_bytes(whole[:cut])
        assert kept(file).keys() == ANSWERS.keys() - {last}
        with Journal(file) as journal:
            journal.add([(last, ANSWERS[last])])
        assert file.read_bytes() == whole
    lines = whole.splitlines(keepends=True)
    file.write_bytes(lines[0] + b"\0" * 40 + b"\n" + lines[2])
    assert list(kept(file)) == [("predictions", "toy/0")], "what follows a damaged line is dropped"
    assert file.read_bytes() == lines[0]


def test_a_second_process_is_refused_until_the_first_has_ended(file):
    with Journal(file), pytest.raises(BlockingIOError, match=r"journal.jsonl: another process captions the same pairs"):
        Journal(file).__enter__()
    assert kept(file) == listed(ANSWERS)
