"""A model family is added by one file and one line: the toy family Glimpse is trained and answers questions."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from m3diff.images.open import load_image
from m3diff.models import FAMILIES
from m3diff.models.checkpoint import ADAPTERS, read_manifest
from m3diff.models.device import Device
from m3diff.models.generation import Captioner, load_captioner
from m3diff.records.errors import DataError, ParamsError
from m3diff.records.sample import Turn
from m3diff.records.schemas import SAMPLE_SCHEMA
from m3diff.serving.caption import CaptionInput, answer_inputs
from m3diff.settings.compute import Compute
from m3diff.settings.tree import Params
from m3diff.stages.predict.params import Predict
from m3diff.stages.predict.stage import predict
from m3diff.stages.train.batches import Loader, read_training_samples
from m3diff.stages.train.loop import Training, prepare_model
from m3diff.stages.train.sample_checks import check_samples
from tests.errors import raises
from tests.stages.train.toy import COMPUTE, Trained, pair_rows, recipe, run
from tests.tiny import colour_image
from tests.tiny_glimpse import added_family, glimpse_settings, tiny_glimpse
from tests.toy import REPOSITORY

# Shapes of images: the number of visual tokens follows from them
SHAPES = [(40, 40), (40, 20), (10, 40), (40, 10)]
COUNTS = {"train": 8, "val": 2, "test": 6}
CHANGES: dict[str, Any] = {"epochs": 3, "max_captions_per_sequence": 2, "caption_val_pairs": 2}


def rows_of_image_set(folder: Path, split: str, number: int) -> list[dict[str, Any]]:
    """Return the samples of an image set with two images, one or none. Every fourth has a turn before its question."""
    rows = pair_rows(folder, split, "toy", number)
    for seed, image in enumerate(rows[0]["images"]):
        colour_image(2 * number + seed, SHAPES[(number + seed) % len(SHAPES)]).save(image["uri"])
        image["sha256"] = None
    for row in rows:
        row["images"] = row["images"][: (2, 2, 1, 0)[number % 4]]
        row["question"] = ("What changed?", "What changed?", "Which colour?", "Is it even?")[number % 4]
        if number % 4 == 1:
            row["history"] = [{"question": "Is it red?", "answer": "no"}]
    return rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """Return a run of Glimpse on samples of all kinds. The family is added until the last test of this file."""
    root = tmp_path_factory.mktemp("added")
    for split, count in COUNTS.items():
        rows = [row for number in range(count) for row in rows_of_image_set(root, split, number)]
        (root / "mixture" / split).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows, SAMPLE_SCHEMA), root / "mixture" / split / "00000.parquet")
    base = tiny_glimpse(root / "base")
    with added_family():
        yield run(recipe(base, model=glimpse_settings(rank=4), **CHANGES), root / "mixture", root)


@pytest.fixture(scope="module")
def captioner(trained: Trained) -> Captioner:
    return load_captioner(trained.folder / "out" / "checkpoint", 6)


def test_its_loss_falls_and_its_manifest_says_what_it_was_trained_on(trained):
    losses = trained.column("loss")
    assert losses[-1] < losses[0] - 0.1
    manifest = read_manifest(trained.folder / "out" / "checkpoint")
    assert manifest["family"] == "glimpse"
    assert manifest["trained_on"]["question"] == "What changed?"
    assert manifest["trained_on"]["images"] == [0, 1, 2]
    assert manifest["trained_on"]["turns"] == 2


def test_its_parameters_are_read_with_those_of_the_other_families(trained):
    entry = {"family": "glimpse", "lora": {"rank": 4, "alpha": 8}, "rates": {"vision": 1e-3, "projector": None}}
    fields = yaml.safe_load((REPOSITORY / "params.yaml").read_text())
    fields["models"]["toy"] = entry
    settings = Params.model_validate(fields).models["toy"]
    assert settings.family == "glimpse"
    assert settings.rates == {"vision": 1e-3, "projector": None, "llm": None}


def test_predict_answers_each_record_as_if_it_were_alone(trained, captioner):
    root = trained.folder
    compute = Compute(scratch=root / "predict", **COMPUTE)
    report = predict(Predict(max_new_tokens=6), compute, root / "mixture", root / "out", root / "predictions")
    assert report.rows_out == COUNTS["test"]
    answers = {
        row["image_id"]: row["caption"] for row in json.loads((root / "predictions/predictions.json").read_text())
    }
    for row in pq.read_table(root / "mixture" / "test").to_pylist():
        images = [image["uri"] for image in row["images"]]
        (output,) = answer_inputs(captioner, [input_of(images, row["question"], row["history"])], None)
        assert output.fault is None
        assert answers[row["record"]] == output.caption
    with np.load(root / "predictions" / "saliency.npz") as maps:
        assert maps["maps"].size == 0


def input_of(images: list[str], question: str | None = None, history: Any = ()) -> CaptionInput:
    turns = tuple(Turn(**turn) for turn in history)
    return CaptionInput("name", tuple(Path(image) for image in images), question, turns)


def test_prompts_of_different_lengths_are_answered_without_padding_in_their_order(captioner, monkeypatch):
    pairs = [[colour_image(number, shape), colour_image(number + 9, shape)] for number, shape in enumerate(SHAPES)]
    pairs.append([colour_image(7, SHAPES[0]), colour_image(8, SHAPES[0])])
    generate = captioner.model.generate
    batches = []

    def record(**inputs: Any) -> Any:
        assert inputs["attention_mask"].all(), "a prompt is padded"
        batches.append(len(inputs["input_ids"]))
        return generate(**inputs)

    monkeypatch.setattr(captioner.model, "generate", record)
    answers = captioner.caption(pairs)
    assert batches == [2, 1, 2], "the second and third shape have 8 and 4 tokens an image, the last one also 4"
    assert answers == [captioner.caption([pair])[0] for pair in pairs]
    assert len(set(answers)) > 1


def test_a_sample_is_measured_with_the_tokens_of_its_own_images(trained, captioner):
    samples = read_training_samples(trained.folder / "mixture")
    processor = captioner.processor
    lengths = []
    for row in range(len(samples)):
        prepared = processor.prepare(load_image(*image) for image in samples.images(row))
        (*_, turn) = samples.turns(row)
        prompt = processor.encode_prompt(samples.turns(row), prepared.marks)
        lengths.append(len(prompt) + len(processor.encode_answer(turn.answer)))
    takes = captioner.family.takes
    longest = max(lengths)
    check_samples(samples, "train", "glimpse", takes, processor, max_tokens=longest)
    with raises(ParamsError, "train.sample_too_long", value=longest, limit=longest - 1):
        check_samples(samples, "train", "glimpse", takes, processor, max_tokens=longest - 1)
    with raises(ParamsError, "train.sample_too_long"):  # with the marks of square images, it would be refused
        check_samples(samples, "train", "glimpse", replace(takes, fixed_marks=True), processor, max_tokens=longest)


def test_training_counts_the_tokens_of_separate_rows_with_their_own_images(trained, captioner):
    """The FLOPs of a step follow from these lengths."""
    samples = read_training_samples(trained.folder / "mixture")
    packing = captioner.family.packing()
    loader = Loader(samples, captioner.processor, packing, 1, Device(False, "fp32"))
    rows = np.array([1, 2])  # two samples of the second pair, whose first image has 8 tokens
    training = Training.__new__(Training)
    training.family = captioner.family
    training.processor = captioner.processor
    training.loader = loader
    training.packing = packing
    training.schedule = SimpleNamespace(samples=samples, epoch=lambda epoch: [rows])  # type: ignore[assignment]
    batch: Any = packing.batch(loader.read([(rows, 1)]), captioner.processor, loader.device)
    (lengths,) = training.measure_lengths()
    assert lengths.rows == 2
    assert lengths.tokens == batch.attention_mask.sum() / 2
    assert lengths.supervised_tokens == len(batch.labels) / 2


def test_its_adapters_give_the_answers_of_the_merged_model(trained, captioner):
    images = [[colour_image(number, shape), colour_image(number + 1)] for number, shape in enumerate(SHAPES)]
    adapters = load_captioner(trained.folder / "out" / "checkpoint" / ADAPTERS, 6)
    for pair in images:
        assert adapters.caption([pair]) == captioner.caption([pair])


def test_overlays_are_refused_before_anything_is_answered(trained, captioner):
    images = [str(image) for image in sorted((trained.folder / "images").iterdir())[:2]]
    with raises(DataError, "serving.no_saliency_maps"):
        next(answer_inputs(captioner, [input_of(images)], trained.folder / "overlay.png"))


def test_a_missing_member_is_reported_before_training(trained, monkeypatch):
    training = recipe(trained.folder / "base", model=glimpse_settings(), **CHANGES)
    model_class, _ = FAMILIES["glimpse"].classes()
    monkeypatch.delattr(model_class, "blank_images")
    with raises(ParamsError, "models.member_missing", family="glimpse", value="Glimpse", names=["blank_images"]):
        prepare_model(training.cfg, training.model, training.compute, FAMILIES["glimpse"])
