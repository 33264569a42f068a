"""Questions of a dataset, from a manifest in ms-swift's form to scores by kind and answers of the served model."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from PIL import Image

from m3diff.models import FAMILIES
from m3diff.models.checkpoint import read_manifest
from m3diff.registry.model_source import Source
from m3diff.serving.batcher import AnswerRequest, Replica
from m3diff.serving.questions import note_about_sample
from m3diff.settings.compute import Compute
from m3diff.settings.load import load_params
from m3diff.stages.convert.params import Convert
from m3diff.stages.convert.stage import convert
from m3diff.stages.evaluate.params import Evaluate
from m3diff.stages.evaluate.stage import evaluate
from m3diff.stages.predict.params import Predict
from m3diff.stages.predict.stage import predict
from m3diff.stages.train.batches import Loader, read_samples
from tests.layouts import make_entry, run_ingest, run_validate
from tests.stages.train.toy import COMPUTE, recipe, run
from tests.tiny import BASE, colour_image, tiny_base
from tests.toy import REPOSITORY

PAIRS = 6
SPLITS = ["train"] * 4 + ["val", "test"]
# kind -> question, and the answer about each pair, in words that the base knows
QUESTIONS = {
    "colour": (
        "Which box is new?",
        ["the red box", "the green box", "the blue box", "the yellow box", "the white box", "no"],
    ),
    "place": ("Where is the change?", ["the left", "the right", "the top", "the bottom", "the centre", "no"]),
    "open": (
        "What changed?",
        ["the red ball moved", "a star appeared", "the box was removed", "nothing changed", "a lamp appeared", "no"],
    ),
}
COLUMNS = {"images": "images", "captions": "messages", "kind": "kind", "split": "split"}


def write_manifest(root: Path) -> None:
    """Write rows as ms-swift's converters do: a row for each question, with its images and messages."""
    root.mkdir()
    rows = []
    for number in range(PAIRS):
        images = [f"{number}_{side}.png" for side in ("a", "b")]
        for seed, name in enumerate(images):
            colour_image(2 * number + seed).save(root / name)
        for kind, (question, answers) in QUESTIONS.items():
            messages = [
                {"role": "user", "content": f"<image><image>{question}"},
                {"role": "assistant", "content": answers[number]},
            ]
            rows.append({"messages": messages, "images": images, "kind": kind, "split": SPLITS[number]})
    (root / "swift.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the stages' outputs up to the mixture."""
    folder = tmp_path_factory.mktemp("questions")
    write_manifest(folder / "raw")
    options = {"manifest": "swift.jsonl", "columns": COLUMNS}
    run_ingest(folder / "raw", "pairs", **options)
    report = run_validate(folder, near_duplicate_max_diff=None)
    assert report.rows_out == 3 * PAIRS
    convert(Convert(), {"mini": make_entry("pairs", folder / "raw", **options)}, folder / "clean", folder / "mixture")
    return folder


def test_each_question_of_a_pair_is_a_sample_with_its_own_tokens(folder):
    samples = read_samples(folder / "mixture" / "train")
    assert len(samples) == 12
    assert len(samples.image_sets()) == 4
    base = tiny_base(folder / "base")
    family = FAMILIES["m3diff"]
    processor: Any = family.load_processor(base)
    loader = Loader(samples, processor, family.packing(), 1, None)  # type: ignore[arg-type]  # only encodes
    for rows in samples.image_sets():
        texts = []
        for branch in loader.encode(rows, processor.marks(2)):
            texts.append(processor.tokenizer.decode(branch.ids))
        for question, _ in QUESTIONS.values():
            assert sum(question in text for text in texts) == 1


@pytest.mark.slow(20)
def test_a_model_of_questions_is_scored_by_kind_and_answers_what_it_learnt(folder, tmp_path):
    settings = load_params(REPOSITORY / "profiles" / "embedded.yaml").models["m3diff"]
    changes = {"model": settings, "epochs": 100, "val_pairs": 1, "caption_val_pairs": 1}
    changes |= {"checkpoint_every_steps": 100, "warmup_share": 0.1}
    trained = run(recipe(BASE, **changes), folder / "mixture", tmp_path)
    assert trained.report.val_match is not None
    assert trained.report.val_cider is None
    checkpoint = tmp_path / "out" / "checkpoint"
    trained_on = read_manifest(checkpoint)["trained_on"]
    assert trained_on["own_questions"]

    compute = Compute(scratch=tmp_path / "runs", **COMPUTE)
    predict(Predict(), compute, folder / "mixture", tmp_path / "out", tmp_path / "predictions")
    predictions = json.loads((tmp_path / "predictions" / "predictions.json").read_text())
    test_records = pl.read_parquet(folder / "clean" / "records").filter(split="test")
    assert sorted(row["image_id"] for row in predictions) == sorted(test_records["id"])
    assert len(predictions) == 3
    cfg = Evaluate(metrics=("CIDEr",))
    evaluate(cfg, compute, folder / "records", folder / "clean", tmp_path / "predictions", tmp_path / "report")
    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())
    scores_by_kind = metrics["protocols"]["mini/test"]["by_kind"]
    assert scores_by_kind.keys() == QUESTIONS.keys()
    assert all("exact_match" in scores for scores in scores_by_kind.values())

    learnt = asyncio.run(ask_about_training_pairs(checkpoint, folder / "raw"))
    expected = [[answers[number] for _, answers in QUESTIONS.values()] for number in range(4)]
    assert learnt == expected


async def ask_about_training_pairs(checkpoint: Path, root: Path) -> list[list[str]]:
    """Return the answers of a server's replica to the three questions about each training pair."""
    replica = Replica(Source("m3diff/1", checkpoint, 16, None), 8, 0.05, 1)
    answers = []
    for number in range(4):
        images = tuple(png(root / f"{number}_{side}.png") for side in ("a", "b"))
        requests = [AnswerRequest(images, question, ()) for question, _ in QUESTIONS.values()]
        answers.append([answer.text for answer in await asyncio.gather(*map(replica.ask, requests))])
    facts: Any = await replica.facts()
    for question, _ in QUESTIONS.values():
        assert note_about_sample(facts.takes, facts.trained_on, question, turns=1) is None
    await replica.remove()
    return answers


def png(path: Path) -> bytes:
    file = io.BytesIO()
    Image.open(path).save(file, "PNG")
    return file.getvalue()
