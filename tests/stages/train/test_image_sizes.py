"""Samples whose tokens depend on the sizes of their images: the longest is found from headers, without decoding."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from PIL import Image

from m3diff.images.open import ImageSize, load_image, read_image_size
from m3diff.models import FAMILIES
from m3diff.models.auto_processor import ChatTemplateProcessor
from m3diff.models.contract import Takes
from m3diff.models.device import Device
from m3diff.models.dialogue import count_longest_branch
from m3diff.records.errors import DataError
from m3diff.records.schemas import COUPLE_QUESTION
from m3diff.settings.section import ParamsError
from m3diff.stages.train import image_figures, image_sizes
from m3diff.stages.train.batches import SCHEMA, Couple, Loader, Samples
from m3diff.stages.train.image_figures import measure_images
from m3diff.stages.train.image_sizes import (
    LongestSample,
    fault_of_long_sample,
    find_longest_sample,
    read_sizes,
    rows_by_sizes,
)
from m3diff.stages.train.job import WorkerContext
from m3diff.stages.train.loop import COUNTED_SEQUENCES_WITH_IMAGES, Training
from m3diff.stages.train.sample_checks import check_samples
from tests.errors import raises
from tests.tiny_vlm import BASES, write_processor

TAKES = Takes(fixed_marks=False)


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplateProcessor:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    base = BASES["qwen3_vl"]()
    base.config.save_pretrained(folder)
    write_processor(base, folder)
    return FAMILIES["auto"].load_processor(folder)  # type: ignore[return-value]


def samples_of(folder: Path, *rows: tuple[tuple[tuple[int, int], ...], str]) -> Samples:
    """Return samples of images of these sizes, each with an answer."""
    records = []
    for number, (sizes, answer) in enumerate(rows):
        images = []
        for position, size in enumerate(sizes):
            path = folder / f"{number}-{position}.png"
            Image.new("RGB", size, (number, 9, 9)).save(path)
            images.append({"uri": str(path), "sha256": None})
        record = {"record": f"own/{number}", "image_set": f"own/{number}", "dataset": "own", "question": "What?"}
        records.append(record | {"answer": answer, "images": images, "history": []})
    return Samples(pl.DataFrame(records, SCHEMA))


SMALL = (64, 64)
WIDE = (160, 96)
LARGE = (160, 160)


def length_of(samples: Samples, row: int, processor: ChatTemplateProcessor) -> int:
    prepared = processor.prepare(load_image(*image) for image in samples.images(row))
    return count_longest_branch(processor, samples.turns(row), prepared.marks)


@pytest.mark.parametrize("longest_row", [0, 1, 2], ids=["largest images", "long text", "one image and a longer text"])
def test_the_longest_sample_has_exactly_the_tokens_of_its_own_images(tmp_path, processor, longest_row):
    rows = [((WIDE, LARGE), "a"), ((SMALL, SMALL), "x" * 40), ((WIDE,), "x" * 30)]
    sizes, answer = rows[longest_row]
    rows[longest_row] = (sizes, answer + "y" * 60)
    samples = samples_of(tmp_path, *rows)
    lengths = [length_of(samples, row, processor) for row in range(len(rows))]
    longest = max(lengths)
    assert lengths.index(longest) == longest_row
    check_samples(samples, "train", "auto", TAKES, processor, longest)
    with raises(ParamsError, "train.images_too_long", value=longest, limit=longest - 1, name=f"own/{longest_row}"):
        check_samples(samples, "train", "auto", TAKES, processor, longest - 1, "vlm")


@pytest.mark.parametrize(
    ("settings", "code", "names"),
    [
        (
            {"size": None, "max_pixels": 4096},
            "train.images_too_long",
            ["models.vlm.processor.size", "models.vlm.processor.max_pixels (now 4096)"],
        ),
        ({}, "train.images_too_long_for_any_setting", []),
    ],
    ids=["two settings", "none"],
)
def test_a_sample_that_is_too_long_names_the_settings_of_its_images(
    settings, code, names, tmp_path, processor, monkeypatch
):
    monkeypatch.setattr(processor, "settings_that_bound_tokens", lambda images: settings)
    longest = LongestSample(row=0, tokens=60, sizes=(ImageSize(*WIDE), ImageSize(*SMALL)))
    samples = samples_of(tmp_path, ((WIDE, SMALL), "a"))
    fault = fault_of_long_sample(samples, longest, processor, max_tokens=50, model="vlm")
    assert fault.code == code
    assert fault.fields["names"] == names
    assert fault.fields["sizes"] == ["160 x 96", "64 x 64"]
    assert fault.fields["name"] == "own/0"


def test_the_size_of_an_image_that_cannot_be_read_is_left_out(tmp_path):
    samples = samples_of(tmp_path, ((SMALL, WIDE), "a"))
    (tmp_path / "0-0.png").write_text("no image")
    assert read_sizes(samples) == {str(tmp_path / "0-1.png"): ImageSize(*WIDE)}


def test_samples_without_images_are_measured_too(tmp_path, processor):
    samples = samples_of(tmp_path, ((), "a longer answer"), ((SMALL,), "b"))
    length = count_longest_branch(processor, samples.turns(0), ())
    with raises(ParamsError, "train.sample_too_long", value=length):
        check_samples(samples, "train", "auto", TAKES, processor, length - 1)


def test_only_headers_are_read_and_equal_sizes_are_prepared_once(tmp_path, processor, monkeypatch):
    samples = samples_of(tmp_path, *[((LARGE, LARGE), "a")] * 3, ((SMALL, SMALL), "b"))
    for path in tmp_path.glob("*.png"):
        path.write_bytes(path.read_bytes()[:60])  # the header without pixels
    prepared_sizes = []
    prepare_marks = image_sizes.prepare_marks

    def record(processor, sizes):
        prepared_sizes.append(sizes)
        return prepare_marks(processor, sizes)

    monkeypatch.setattr(image_sizes, "prepare_marks", record)
    rows = rows_by_sizes(samples, read_sizes(samples))
    limit = count_longest_branch(processor, samples.turns(3), processor.marks(2)) - 1
    assert find_longest_sample(samples, rows, processor, limit)
    assert prepared_sizes == [(ImageSize(*LARGE),) * 2, (ImageSize(*SMALL),) * 2]


def test_the_marks_of_a_size_beyond_those_that_were_tried_are_not_missed(tmp_path, processor, monkeypatch):
    samples = samples_of(tmp_path, ((LARGE, LARGE), "a"))
    length = length_of(samples, 0, processor)
    fewer_marks = processor.prepare([Image.new("RGB", (160, 128))] * 2).marks
    monkeypatch.setattr(processor, "marks", lambda images: fewer_marks)
    with raises(ParamsError, "train.images_too_long", value=length):
        check_samples(samples, "train", "auto", TAKES, processor, length - 1)


def test_the_longest_couple_is_measured_with_its_own_images(tmp_path, processor):
    rows = [((LARGE,), "a"), ((SMALL,), "x" * 40), ((WIDE,), "b"), ((SMALL,), "c")]
    table = samples_of(tmp_path, *rows).table.with_columns(pl.lit("What is there?").alias(COUPLE_QUESTION))
    samples = Samples(table)
    lengths = {}
    for first_row, second_row in itertools.permutations(range(len(rows)), 2):
        images = [samples.images(row)[0] for row in (first_row, second_row)]
        marks = processor.prepare(load_image(*image) for image in images).marks
        (turns,) = samples.dialogues_of(Couple(first_row, second_row))
        lengths[count_longest_branch(processor, turns, marks)] = [f"own/{first_row}", f"own/{second_row}"]
    longest = max(lengths)
    check_samples(samples, "train", "auto", TAKES, processor, longest)
    with raises(ParamsError, "train.couple_too_long", value=longest) as refusal:
        check_samples(samples, "train", "auto", TAKES, processor, longest - 1)
    assert sorted(refusal.value.fields["names"]) == sorted(lengths[longest]) == ["own/0", "own/1"]


def test_an_image_without_a_grid_is_named_with_its_path(tmp_path, processor):
    samples = samples_of(tmp_path, ((SMALL, SMALL), "a"), ((SMALL, (3, 1000)), "b"))
    path = str(tmp_path / "1-1.png")
    with raises(DataError, "models.image_without_grid", path=path, value=["64 x 64", "3 x 1000"]):
        check_samples(samples, "test", "auto", TAKES, processor)


def test_the_size_of_a_turned_photo_is_that_of_the_upright_image(tmp_path):
    path = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[274] = 6
    Image.new("RGB", (40, 20)).save(path, exif=exif)
    assert read_image_size(path) == load_image(path).size == (20, 40)


# Figures in the log


def test_image_tokens_and_scaled_down_images_are_measured(tmp_path, processor):
    samples = samples_of(tmp_path, ((SMALL, SMALL), "a"), ((LARGE, (320, 320)), "b"), ((), "c"))
    figures = measure_images(samples, samples.image_sets(), processor)
    assert figures is not None
    assert figures.samples == 2
    assert figures.tokens == (2 * 4 + 2 * 25) / 2
    assert figures.scaled_down_share == 0.5
    assert figures.smallest_scale == 0.5


def test_texts_have_no_image_figures(tmp_path, processor):
    samples = samples_of(tmp_path, ((), "c"))
    assert measure_images(samples, samples.image_sets(), processor) is None


def test_rounding_to_whole_patches_is_not_scaling_down(tmp_path, processor):
    samples = samples_of(tmp_path, (((130, 130),) * 2, "a"))
    figures = measure_images(samples, samples.image_sets(), processor)
    assert figures is not None
    assert figures.scaled_down_share == 0
    assert image_figures.SCALED_DOWN < figures.smallest_scale < 1


def test_the_images_of_few_sequences_are_prepared_to_estimate_the_length_of_an_epoch(tmp_path, processor):
    samples = samples_of(tmp_path, ((SMALL, SMALL), "a"))
    prepared_sequences = []
    training = Training.__new__(Training)
    training.family = FAMILIES["auto"]
    training.processor = processor
    training.packing = training.family.packing()
    training.loader = Loader(samples, processor, training.packing, 1, Device(False, "fp32"))
    sequences = samples.image_sets() * 100
    training.schedule = SimpleNamespace(samples=samples, epoch=lambda epoch: sequences)  # type: ignore[assignment]

    def prepare_images(sequence, visit):
        prepared_sequences.append(sequence)
        return processor.blank_pair()

    training.loader.prepare_images = prepare_images  # type: ignore[method-assign]
    training.measure_lengths()
    assert len(prepared_sequences) == COUNTED_SEQUENCES_WITH_IMAGES


@pytest.mark.parametrize(
    ("sizes", "rank", "is_printed"),
    [((SMALL, SMALL), 0, True), ((), 0, False), ((SMALL, SMALL), 1, False)],
    ids=["images", "no images", "the second worker"],
)
def test_the_first_worker_prints_the_image_figures_if_there_are_images(
    sizes, rank, is_printed, tmp_path, processor, capsys
):
    samples = samples_of(tmp_path, (sizes, "a"))
    training: Any = Training.__new__(Training)
    training.processor = processor
    training.worker = WorkerContext(rank, 2)
    training.schedule = SimpleNamespace(samples=samples, epoch=lambda epoch: samples.image_sets())
    training.print_image_figures()
    figures = measure_images(samples, samples.image_sets(), processor)
    assert capsys.readouterr().out == (f"train: {figures}\n" if is_printed else "")


def test_a_processor_that_tells_no_scale_has_no_image_figures(tmp_path, capsys):
    training: Any = Training.__new__(Training)
    training.processor = SimpleNamespace()
    training.worker = WorkerContext()
    training.schedule = SimpleNamespace(samples=samples_of(tmp_path, ((SMALL,), "a")), epoch=lambda epoch: [[0]])
    training.print_image_figures()
    assert capsys.readouterr().out == ""


def test_an_unknown_scale_is_called_unknown(tmp_path, processor, monkeypatch):
    """The image processor of LFM2-VL resizes images in a function that cannot be watched."""
    own_prepare = processor.prepare_with_scales

    def prepare_without_scales(images: Any) -> Any:
        prepared, scales = own_prepare(images)
        return prepared, (None,) * len(scales)

    monkeypatch.setattr(processor, "prepare_with_scales", prepare_without_scales)
    samples = samples_of(tmp_path, ((SMALL, SMALL), "a"))
    figures = measure_images(samples, samples.image_sets(), processor)
    assert figures is not None
    assert figures.scaled_down_share is None
    assert "unknown" in str(figures)
