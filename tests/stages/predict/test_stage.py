"""predict on a tiny checkpoint: outputs, their order, controls, and resuming a killed run."""

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from m3diff.images.open import load_image
from m3diff.models import FAMILIES, generation
from m3diff.models.device import Device
from m3diff.models.foreign_code import CheckpointError
from m3diff.models.generation import Captioner, load_base_captioner, load_captioner
from m3diff.provenance import code
from m3diff.records.errors import DataError
from m3diff.records.sample import ImageRef, Turn
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.report.images import read_saliency
from m3diff.stages.predict import stage
from m3diff.stages.predict.params import Predict
from m3diff.stages.predict.stage import (
    Journal,
    JournalInUseError,
    Prediction,
    PredictionItem,
    PredictReport,
    predict,
    read_test_items,
    run_key,
    sample_control_pairs,
)
from tests.errors import raises
from tests.stages.predict.conftest import ORDER, QUESTIONS, Killed, compute, settings, write_test_split
from tests.tiny import colour_image

IDS = [f"toy/{number}" for number in ORDER]
SETS = ("predictions", "predictions_shuffled", "predictions_reversed")
RETENTION_SETS = ("predictions_retention", "predictions_base")


@pytest.fixture(scope="module")
def captioner(model: Path) -> Captioner:
    return load_captioner(model / "checkpoint", max_new_tokens=5)


def run(cfg: Predict, mixture: Path, model: Path, out: Path) -> PredictReport:
    return predict(cfg, compute(out), mixture, model, out)


def rows_of(out: Path, name: str = "predictions") -> list[dict[str, str]]:
    return json.loads((out / f"{name}.json").read_text())


def caption_alone(captioner: Captioner, mixture: Path, numbers: list[int]) -> list[dict[str, str]]:
    """Return the captions of the pairs, each captioned alone."""
    rows = []
    for number in numbers:
        images = [load_image(mixture / f"{number}_{side}.png") for side in ("before", "after")]
        caption = captioner.caption([tuple(images)], QUESTIONS[number % 2])[0]
        rows.append({"image_id": f"toy/{number}", "caption": caption})
    return rows


def test_predictions_are_the_captions_in_the_mixture_s_order(written, captioner, mixture):
    rows = rows_of(written[0])
    assert rows == caption_alone(captioner, mixture, ORDER)
    assert len({row["caption"] for row in rows}) > 1, "captions that are all alike would hide a wrong order"


def test_the_report_counts_pairs_words_and_controls(written):
    out, report = written
    words = round(sum(len(row["caption"].split()) for row in rows_of(out)) / 5, 2)
    assert report == PredictReport(
        stage="predict", rows_in=5, rows_out=5, words=words, control=5, reversed=5, retention=0
    )
    assert json.loads((out / "report.json").read_text()) == report.model_dump()


def test_the_outputs_are_sets_of_captions_maps_and_a_report(written):
    files = {path.name for path in written[0].iterdir()}
    assert files == {*(f"{name}.json" for name in SETS + RETENTION_SETS), "saliency.npz", "report.json"}


@pytest.fixture
def caption_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make captions name the images and the question, so that each pair has a distinct caption."""

    def answer(_: Captioner, prepared: list, dialogues: list, saliency: bool) -> tuple[list[str], None]:
        captions = []
        for images, (turn,) in zip(prepared, dialogues, strict=True):
            before, after = images.tensors["pixels"].sum((1, 2, 3)).tolist()
            captions.append(f"größer {before} {after} {turn.question}")
        return captions, None

    monkeypatch.setattr(Captioner, "answer", answer)


PARTNERS = ORDER[2:] + ORDER[:2]  # the pairs whose after-images the shuffled control shows
SHOWN_IMAGES = {
    "predictions": [(f"{n}_before", f"{n}_after") for n in ORDER],
    "predictions_shuffled": [(f"{n}_before", f"{p}_after") for n, p in zip(ORDER, PARTNERS, strict=True)],
    "predictions_reversed": [(f"{n}_after", f"{n}_before") for n in ORDER],
}


@pytest.mark.parametrize("name", SETS)
def test_each_set_shows_its_images_with_the_pair_s_question(name, mixture, model, captioner, tmp_path, caption_images):
    run(settings(), mixture, model, tmp_path)
    prepare = captioner.processor.image_processor.prepare_image
    sums = {file.stem: prepare(load_image(file)).astype(int).sum() for file in mixture.glob("*.png")}
    assert len(set(sums.values())) == 10
    assert rows_of(tmp_path, name) == [
        {"image_id": f"toy/{n}", "caption": f"größer {sums[before]} {sums[after]} {QUESTIONS[n % 2]}"}
        for n, (before, after) in zip(ORDER, SHOWN_IMAGES[name], strict=True)
    ]


def test_files_are_read_in_the_order_of_their_names_on_every_file_system(mixture, monkeypatch):
    files = sorted((mixture / "test").iterdir())
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: reversed(files))
    assert [item.id for item in read_test_items(mixture)] == IDS


def test_captions_are_written_in_utf_8_one_field_a_line(mixture, model, tmp_path, caption_images):
    run(settings(), mixture, model, tmp_path)
    text = (tmp_path / "predictions.json").read_text(encoding="utf-8")
    assert text.startswith('[\n {\n  "image_id": "toy/4",\n  "caption": "größer ')


def test_a_family_without_maps_leaves_an_empty_file_of_them(mixture, model, tmp_path, caption_images):
    run(settings(), mixture, model, tmp_path)
    assert read_saliency(tmp_path / "saliency.npz") == {}


def test_the_archive_of_maps_is_the_same_under_every_python(written):
    with zipfile.ZipFile(written[0] / "saliency.npz") as archive:
        members = [(member.filename, member.extract_version, member.extra) for member in archive.infolist()]
    assert members == [("ids.npy", 20, b""), ("maps.npy", 20, b"")], "no sizes of 64 bits, which differ by Python"


def test_saliency_has_one_map_for_each_pair_in_the_same_order(written, captioner, mixture):
    with np.load(written[0] / "saliency.npz") as file:
        ids = file["ids"].tolist()
        maps = file["maps"]
    assert ids == IDS
    assert maps.shape == (5, 3, 3)
    assert maps.dtype == np.float16
    np.testing.assert_allclose(maps.astype(float).sum((1, 2)), 1, atol=2e-3)
    for number, saliency in zip(ORDER, maps, strict=True):
        files = [mixture / f"{number}_{side}.png" for side in ("before", "after")]
        prepared = captioner.processor.prepare(load_image(file) for file in files)
        _, expected = captioner.answer([prepared], [(captioner.ask(None),)], saliency=True)
        np.testing.assert_allclose(saliency, expected[0], atol=1e-3)
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
    assert rows_of(tmp_path) == caption_alone(limited, mixture, ORDER[:2]) != rows_of(written[0])[:2]
    assert report.rows_in == report.rows_out == len(np.load(tmp_path / "saliency.npz")["ids"]) == 2


@pytest.mark.fault("09")
def test_a_mixture_without_test_pairs_is_refused(model, tmp_path):
    (tmp_path / "test").mkdir()
    pq.write_table(pa.Table.from_pylist([], SAMPLE_SCHEMA), tmp_path / "test" / "00000.parquet")
    with raises(DataError, "predict.no_test_sample", path=tmp_path / "test"):
        run(settings(), tmp_path, model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.fault("09")
def test_a_checkpoint_without_a_manifest_is_refused(mixture, tmp_path):
    with raises(CheckpointError, "models.no_manifest", path=tmp_path / "model" / "checkpoint"):
        run(settings(), mixture, tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("side", "damage", "code"),
    [
        ("before", Path.unlink, "images.unreadable"),
        ("after", lambda file: colour_image(99).save(file), "images.changed_since_ingest"),
    ],
    ids=["gone", "another"],
)
def test_an_image_that_is_gone_or_changed_is_refused(side, damage, code, model, tmp_path):
    mixture = write_test_split(tmp_path / "mixture", [0, 1])
    damage(mixture / f"1_{side}.png")
    with raises(DataError, code, path=str(mixture / f"1_{side}.png")):
        run(settings(max_new_tokens=1), mixture, model, tmp_path / "out")
    assert not (tmp_path / "out" / "predictions.json").exists()


def image(side: str, number: int) -> ImageRef:
    name = f"{side}{number}"
    return ImageRef(name, name.encode())


def make_pairs(count: int) -> list[PredictionItem]:
    return [PredictionItem(str(n), (image("b", n), image("a", n)), (Turn(f"q{n}"),)) for n in range(count)]


SAMPLES = pytest.mark.parametrize(("count", "total"), [(2, 2), (3, 3), (4, 4), (7, 7), (0, 7), (1, 7), (4, 7), (9, 7)])


@SAMPLES
def test_a_control_is_a_sample_of_the_pairs_in_their_order(count, total):
    shuffled, _ = sample_control_pairs(make_pairs(total), count)
    numbers = [int(pair.id) for pair in shuffled]
    assert len(numbers) == min(count, total)
    assert numbers == sorted(set(numbers))


@SAMPLES
def test_the_shuffled_control_has_the_after_image_of_another_pair(count, total):
    pairs = make_pairs(total)
    shuffled, _ = sample_control_pairs(pairs, count)
    expected = []
    for pair in shuffled:
        number = int(pair.id)
        partner_number = (number + total // 2) % total  # none keeps its own, each is used once
        expected.append(pairs[number]._replace(images=(image("b", number), image("a", partner_number))))
    assert shuffled == expected


@SAMPLES
def test_the_reversed_control_has_the_same_pairs_swapped(count, total):
    shuffled, swapped = sample_control_pairs(make_pairs(total), count)
    numbers = [int(pair.id) for pair in shuffled]
    assert swapped == [(str(n), (image("a", n), image("b", n)), (Turn(f"q{n}"),)) for n in numbers]


@SAMPLES
def test_a_smaller_control_is_a_part_of_a_larger_one(count, total):
    pairs = make_pairs(total)
    smaller, _ = sample_control_pairs(pairs, count)
    larger, _ = sample_control_pairs(pairs, count + 1)
    assert {pair.id for pair in smaller} <= {pair.id for pair in larger}


def test_the_controls_are_sampled_from_all_pairs():
    numbers = [int(pair.id) for pair in sample_control_pairs(make_pairs(1000), 100)[0]]
    assert 300 < np.mean(numbers) < 700
    assert max(numbers) > 900


def test_the_controls_are_the_same_each_time():
    assert sample_control_pairs(make_pairs(1000), 100) == sample_control_pairs(make_pairs(1000), 100)


def test_the_controls_are_those_of_earlier_releases():
    # The gate compares the scores of a new version's controls with those of the champion's
    shuffled_pairs, _ = sample_control_pairs(make_pairs(1000))
    assert len(shuffled_pairs) == 600
    assert [pair.id for pair in shuffled_pairs[:6]] == ["2", "5", "8", "12", "13", "15"]


@pytest.mark.fault("04")
@pytest.mark.parametrize(("done", "torn"), [(0, 0), (8, 0), (3, 5)])
def test_a_killed_run_captions_each_batch_once(done, torn, mixture, model, written, counted, tmp_path, capsys):
    """The second run has other workers. If the last line is torn, its batch of two pairs is captioned again."""
    out = tmp_path / "out"
    counted["end"] = done
    with pytest.raises(Killed):
        predict(settings(), compute(out), mixture, model, out)
    assert not (out / "predictions.json").exists()
    (journal,) = (tmp_path / "out_runs" / "predict").iterdir()
    journal.write_bytes(journal.read_bytes()[: -torn or None])
    counted["end"] = None
    predict(settings(), compute(out, workers=2, cpus_per_worker=2), mixture, model, out)
    assert [size for size, _ in counted["calls"]] == ([2, 1, 2, 2, 1, 2, 2, 1, 2] if not torn else
                                                      [2, 1, 2, 2, 2, 1, 2, 2, 1, 2])  # fmt: skip
    captions_so_far = {0: 0, 3: 4, 8: 13}[done]
    is_resumed = f"resumed; {captions_so_far} captions of an earlier run are kept" in capsys.readouterr().out
    assert is_resumed == (captions_so_far > 0)
    for name in (*(f"{name}.json" for name in SETS), "saliency.npz", "report.json"):
        assert (out / name).read_bytes() == (written[0] / name).read_bytes(), name
    assert list(journal.parent.iterdir()) == [], "nothing is kept of a run that ended"


@pytest.fixture
def copied(mixture: Path, model: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Return copies of a mixture and a checkpoint that a test may change."""
    shutil.copytree(mixture, tmp_path / "mixture")
    shutil.copytree(model, tmp_path / "model")
    return tmp_path / "mixture", tmp_path / "model" / "checkpoint"


@pytest.fixture
def key(mixture: Path, model: Path) -> str:
    return run_key(settings(), mixture, model / "checkpoint")


def test_the_same_files_elsewhere_are_the_same_run(copied, key):
    assert run_key(settings(), *copied) == key


def test_every_parameter_makes_another_run(copied, key):
    keys = {run_key(settings(**{name: 3}), *copied) for name in Predict.model_fields}
    assert len(keys | {key}) == len(Predict.model_fields) + 1


def test_other_samples_are_another_run(copied, key):
    mixture, checkpoint = copied
    (mixture / "test" / "00001.parquet").unlink()
    assert run_key(settings(), mixture, checkpoint) != key


def test_other_weights_are_another_run(copied, key):
    mixture, checkpoint = copied
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["model.safetensors"] = "another"
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert run_key(settings(), mixture, checkpoint) != key


def test_the_code_of_the_checkpoint_s_family_and_of_no_other_makes_a_run(copied, monkeypatch):
    modules_of_keys = []
    monkeypatch.setattr(stage, "compute_key", lambda inputs, file, modules: modules_of_keys.append(modules))
    run_key(settings(), *copied)
    assert modules_of_keys == [[FAMILIES.modules["m3diff"]]]


def test_other_code_is_another_run(copied, key, monkeypatch):
    monkeypatch.setattr(code, "digest_code", lambda module, names: {module.name: "another meaning"})
    assert run_key(settings(), *copied) != key


MAP = np.array([[0.25, 0.5], [0.125, 0.0], [0.0625, 0.0625]], np.float16)
JOURNALED = {
    ("predictions", "toy/0"): Prediction("a größer\ncube\u2028 \ud800", MAP),
    ("predictions", "toy/1"): Prediction("", MAP + 1),
    ("control", "toy/0"): Prediction("nothing", None),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "runs" / "journal.jsonl"
    with Journal(path) as journal:
        journal.add(JOURNALED.items())
    return path


def comparable(predictions: dict) -> dict:
    """Return predictions with their maps as lists, so that `==` can compare them."""
    return {
        key: (caption, None if saliency is None else saliency.tolist())
        for key, (caption, saliency) in predictions.items()
    }


def read_journal(path: Path) -> dict:
    with Journal(path) as journal:
        return comparable(journal.predictions)


def test_predictions_are_read_back_as_they_were_added(file):
    assert read_journal(file) == comparable(JOURNALED)
    assert file.read_bytes().count(b"\n") == 3, "a line each, whatever the text"
    with Journal(file) as journal:
        saliency = journal.predictions["predictions", "toy/0"].saliency
    assert saliency.dtype == np.float16
    assert saliency.shape == (3, 2)


def test_a_prediction_that_is_there_is_not_replaced(file):
    content = file.read_bytes()
    with Journal(file) as journal:
        journal.add([(("predictions", "toy/1"), Prediction("another", MAP))])
        assert journal.predictions["predictions", "toy/1"].caption == ""
    assert file.read_bytes() == content


def test_each_prediction_is_on_the_disk_before_the_next(file, monkeypatch):
    synced_lines = []
    monkeypatch.setattr("os.fsync", lambda number: synced_lines.append(file.read_bytes().count(b"\n")))
    with Journal(file) as journal:
        for number in "45":
            journal.add([(("control", number), Prediction("more", None))])
    assert synced_lines == [4, 5]


@pytest.mark.parametrize("position", ["before the line end", "in the line", "before the line"])
def test_a_torn_last_line_is_dropped_and_does_not_spoil_the_next(position, file):
    content = file.read_bytes()
    last_key = ("control", "toy/0")
    last_line = len(content) - len(content.splitlines(keepends=True)[-1])
    cut = {"before the line end": len(content) - 1, "in the line": last_line + 1, "before the line": last_line}[
        position
    ]
    file.write_bytes(content[:cut])
    assert read_journal(file).keys() == JOURNALED.keys() - {last_key}
    with Journal(file) as journal:
        journal.add([(last_key, JOURNALED[last_key])])
    assert file.read_bytes() == content


def test_what_follows_a_damaged_line_is_dropped(file):
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b"\0" * 40 + b"\n" + lines[2])
    assert list(read_journal(file)) == [("predictions", "toy/0")]
    assert file.read_bytes() == lines[0]


def test_a_second_process_is_refused_until_the_first_has_ended(file):
    with Journal(file), raises(JournalInUseError, "predict.journal_in_use", path=file):
        Journal(file).__enter__()
    assert read_journal(file) == comparable(JOURNALED)


# Datasets with the role `retention`, which the base answers, too


@pytest.fixture(scope="module")
def retention_mixture(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Add two questions about one image, of a retention dataset, to the five test pairs."""
    folder = tmp_path_factory.mktemp("retention") / "mixture"
    shutil.copytree(mixture, folder)
    rows = []
    for record, number, question in (("skills/4?0", 4, "Is there a cube?"), ("skills/0?0", 0, "What is it?")):
        image = folder / f"{number}_before.png"
        digest = hashlib.sha256(image.read_bytes()).digest()
        row = dict.fromkeys(SAMPLE_SCHEMA.names, "") | {"id": f"{record}#0", "record": record, "question": question}
        rows.append(row | {"images": [{"uri": str(image), "sha256": digest}], "history": []})
    (folder / "retention").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, SAMPLE_SCHEMA), folder / "retention" / "00000.parquet")
    return folder


def answer_alone(captioner: Captioner, mixture: Path) -> list[dict[str, str]]:
    """Return the answers to the questions of the retention dataset, each asked alone."""
    rows = []
    for record, number, question in (("skills/4?0", 4, "Is there a cube?"), ("skills/0?0", 0, "What is it?")):
        image = load_image(mixture / f"{number}_before.png")
        rows.append({"image_id": record, "caption": captioner.caption([(image,)], question)[0]})
    return rows


def test_the_model_and_its_base_answer_the_records_of_retention_datasets(
    retention_mixture, model, written, captioner, tmp_path
):
    report = run(settings(), retention_mixture, model, tmp_path)
    assert report.retention == 2
    assert rows_of(tmp_path, "predictions_retention") == answer_alone(captioner, retention_mixture)
    base = load_base_captioner(model / "checkpoint", 5, Device(gpu=False, precision="fp32"))
    assert rows_of(tmp_path, "predictions_base") == answer_alone(base, retention_mixture)
    for name in SETS:
        assert rows_of(tmp_path, name) == rows_of(written[0], name)


def test_each_of_the_two_models_answers_its_own_set(retention_mixture, model, tmp_path, monkeypatch):
    def answer(captioner: Captioner, prepared: list, dialogues: list, saliency: bool) -> tuple[list[str], None]:
        has_module = any(".mdp." in name for name, _ in captioner.model.named_parameters())
        return [f"with module: {has_module}"] * len(prepared), None

    monkeypatch.setattr(Captioner, "answer", answer)
    run(settings(), retention_mixture, model, tmp_path)
    for name in SETS + RETENTION_SETS:
        captions = {row["caption"] for row in rows_of(tmp_path, name)}
        assert captions == {f"with module: {name != 'predictions_base'}"}


def test_the_base_has_the_weights_of_its_folder(model):
    def digests(weights: dict[str, torch.Tensor]) -> set[bytes]:
        return {hashlib.sha256(weight.contiguous().numpy().tobytes()).digest() for weight in weights.values()}

    base = load_base_captioner(model / "checkpoint", 5, Device(gpu=False, precision="fp32")).model
    trained = load_captioner(model / "checkpoint", 5).model
    digests_of_folder = digests(load_file(next((model.parent / "base").glob("*.safetensors"))))
    assert digests_of_folder <= digests(base.state_dict())
    assert not digests_of_folder <= digests(trained.state_dict())


def test_without_a_retention_dataset_the_base_is_not_loaded(mixture, model, tmp_path, monkeypatch):
    monkeypatch.setattr(generation, "load_base_captioner", None)
    run(settings(), mixture, model, tmp_path)
    assert rows_of(tmp_path, "predictions_retention") == []
    assert rows_of(tmp_path, "predictions_base") == []


def test_a_run_killed_while_the_base_answers_goes_on_with_the_base(retention_mixture, model, tmp_path, counted, capsys):
    counted["end"] = 10
    with pytest.raises(Killed):
        run(settings(batch_pairs=1), retention_mixture, model, tmp_path)
    return_calls = len(counted["calls"])
    counted["end"] = None
    report = run(settings(batch_pairs=1), retention_mixture, model, tmp_path)
    assert report.retention == 2
    assert len(counted["calls"]) - return_calls == 5 + 5 + 5 + 2 + 2 - 10
    assert "resumed; 10 captions" in capsys.readouterr().out


def test_a_base_that_is_gone_or_changed_is_named(retention_mixture, model, tmp_path):
    shutil.copytree(model.parent, tmp_path / "copy")
    copy = tmp_path / "copy/model"
    config = tmp_path / "copy/base/config.json"
    config.write_text(config.read_text() + " ")
    with raises(CheckpointError, "models.other_base_digest", base=config.parent):
        run(settings(), retention_mixture, copy, tmp_path / "out")
    shutil.rmtree(config.parent)
    with raises(CheckpointError, "models.no_base_of_checkpoint", base=config.parent):
        run(settings(), retention_mixture, copy, tmp_path / "out")


def test_other_retention_records_are_another_run(retention_mixture, mixture, model):
    checkpoint = model / "checkpoint"
    assert run_key(settings(), mixture, checkpoint) != run_key(settings(), retention_mixture, checkpoint)
