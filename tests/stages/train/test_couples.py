"""Couples of single images (OneDiff's Coupled Sample Training): which are drawn, what they ask, and how runs resume."""

from collections import Counter
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from m3diff.images.open import load_image
from m3diff.models import FAMILIES
from m3diff.models.checkpoint import read_manifest
from m3diff.models.contract import Prepared, Takes
from m3diff.models.device import Device
from m3diff.records.errors import ParamsError
from m3diff.records.sample import Turn
from m3diff.records.schemas import COUPLE_QUESTION, COUPLED_SAMPLE_SCHEMA
from m3diff.stages.train.batches import (
    SCHEMA,
    Couple,
    Loader,
    Samples,
    Schedule,
    count_samples,
    join_captions,
    read_samples,
    read_training_samples,
)
from m3diff.stages.train.job import DatasetFilter
from m3diff.stages.train.loop import Training
from m3diff.stages.train.sample_checks import check_samples
from tests.errors import raises
from tests.stages.train.test_mixed_mixture import COMPUTE
from tests.stages.train.toy import Trained, assert_same_run, interrupted, pair_rows, recipe, run, write_mixture

QUESTION = "What does each of the two images show?"
SINGLES = 7  # an odd number
PAIRS = 3


def single_rows(folder: Path, number: int, dataset: str = "singles") -> list[dict[str, Any]]:
    """Return the sample of a single image, which is coupled."""
    row = pair_rows(folder, "train", dataset, number)[0]
    fields = {"record": f"{dataset}/{number}", "question": "What is it?", "answer": f"a thing {number}"}
    return [row | fields | {"images": row["images"][:1], COUPLE_QUESTION: QUESTION}]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a mixture of single images that are coupled, and pairs."""
    folder = tmp_path_factory.mktemp("couples") / "mixture"
    write_mixture(folder, {"val": {"toy": 1}, "test": {"toy": 1}})
    rows = [row for number in range(SINGLES) for row in single_rows(folder, number)]
    for number in range(PAIRS):
        rows += [row | {COUPLE_QUESTION: None} for row in pair_rows(folder, "train", "toy", number)]
    (folder / "train").mkdir()
    pq.write_table(pa.Table.from_pylist(rows, COUPLED_SAMPLE_SCHEMA), folder / "train" / "00000.parquet")
    return folder


def samples_of(singles: dict[str, int], pairs: int = 0, captions: int = 1) -> Samples:
    """Return samples of single images, each with some captions, and then of pairs, which are not coupled.

    Args:
        singles: number of single images by dataset.
        pairs: number of pairs.
        captions: number of captions of each single image.
    """
    rows: list[dict[str, Any]] = []
    for dataset, count in singles.items():
        for number in range(count):
            fields = {"dataset": dataset, "image_set": f"{dataset}/{number}.png", COUPLE_QUESTION: QUESTION}
            rows += [fields | {"record": f"{dataset}/{number}?{k}", "answer": f"{number} {k}"} for k in range(captions)]
    for number in range(pairs):
        fields = {"dataset": "pairs", "image_set": f"pairs/{number}", COUPLE_QUESTION: None}
        rows.append(fields | {"record": f"pairs/{number}", "answer": "moved"})
    for row in rows:
        images = 2 if row[COUPLE_QUESTION] is None else 1
        row["images"] = [{"uri": f"{row['image_set']}_{number}", "sha256": b""} for number in range(images)]
        row |= {"question": "What is it?", "history": []}
    return Samples(pl.DataFrame(rows, SCHEMA | {COUPLE_QUESTION: pl.String}))


def schedule(samples: Samples, **changes: Any) -> Schedule:
    fields = {"max_captions": None, "seed": 1, "global_batch": 4, "micro_batch": 2, "epochs": 2, "ranks": 1} | changes
    return Schedule(samples, **fields)


def couples_in(sequences: Any) -> list[Couple]:
    return [sequence for sequence in sequences if isinstance(sequence, Couple)]


# Arithmetic


@pytest.mark.parametrize("count", [0, 1, 2, 9, 10])
def test_an_epoch_has_each_single_alone_and_half_as_many_couples(count):
    samples = samples_of({"singles": count}, pairs=3)
    plan = schedule(samples)
    sequences = plan.epoch(0)
    alone = [int(row) for sequence in sequences if not isinstance(sequence, Couple) for row in sequence]
    assert sorted(alone) == list(range(count + 3))
    assert len(couples_in(sequences)) == samples.couples_per_epoch == count // 2
    assert plan.steps_per_epoch == -(-(count + 3 + count // 2) // 4)
    assert plan.captions(plan.steps_per_epoch) == count + 3 + count // 2


def test_the_published_singles_give_the_published_number_of_samples():
    """OneDiff, 5.1: 558k single images and 279k couples, 256 to a step."""
    rows = 558_128
    names = pl.Series(range(rows)).cast(pl.String)
    table = pl.DataFrame({"image_set": names, COUPLE_QUESTION: QUESTION}).with_columns(dataset=pl.lit("llava"))
    plan = schedule(Samples(table), global_batch=256)
    assert plan.samples.couples_per_epoch == 279_064
    assert plan.steps_per_epoch == 3_271
    assert plan.captions(plan.steps_per_epoch) == 837_192


def test_each_single_is_in_one_couple_and_the_odd_one_is_another_each_epoch():
    plan = schedule(samples_of({"singles": 9}))
    left_over = []
    for epoch in range(9):
        members = [row for couple in couples_in(plan.epoch(epoch)) for row in couple]
        assert len(members) == len(set(members)) == 8
        left_over += set(range(9)) - set(members)
    assert sorted(left_over) == list(range(9))


def test_partners_are_drawn_anew_in_each_epoch_and_for_each_seed():
    samples = samples_of({"singles": 100})
    partners = [
        {frozenset(couple) for couple in schedule(samples, seed=seed).couples(epoch)}
        for seed, epoch in ((1, 0), (1, 1), (2, 0))
    ]
    for couples, other_couples in combinations(partners, 2):
        assert len(couples & other_couples) < 10
    assert schedule(samples).couples(1) == schedule(samples, ranks=2, micro_batch=1).couples(1)


def test_couples_are_made_within_a_dataset_and_do_not_depend_on_others():
    samples = samples_of({"first": 9, "second": 5})
    plan = schedule(samples)
    datasets = [{samples.value("dataset", row) for row in couple} for couple in plan.couples(0)]
    assert Counter(map(str, datasets)) == {"{'first'}": 4, "{'second'}": 2}
    alone = schedule(samples_of({"first": 9}))
    assert plan.couples(0)[:4] == alone.couples(0)


def test_an_image_with_several_captions_is_in_one_couple_by_one_of_them():
    samples = samples_of({"singles": 40}, captions=3)
    couples = schedule(samples).couples(0)
    image_sets = [samples.value("image_set", row) for couple in couples for row in couple]
    assert len(image_sets) == len(set(image_sets)) == 40
    captions = Counter(samples.value("answer", row).split()[1] for couple in couples for row in couple)
    assert captions.keys() == {"0", "1", "2"}


def test_workers_and_micro_batches_get_the_same_couples():
    samples = samples_of({"singles": 9}, pairs=2)

    def steps(**changes: Any) -> list[Counter]:
        plan = schedule(samples, **changes)
        counts = []
        for step in range(plan.steps):
            sequences: Counter = Counter()
            for rank in range(plan.ranks):
                for batch in plan.micro_batches(step, rank):
                    for sequence, weight in batch:
                        sequences[tuple(map(int, sequence))] += weight
            counts.append(+sequences)
        return counts

    assert steps() == steps(ranks=2, micro_batch=1) == steps(micro_batch=4)


def test_the_samples_of_so_many_steps_are_counted():
    plan = schedule(samples_of({"singles": 9}, captions=2))
    by_step = [sum(map(count_samples, plan.global_sequences(step))) for step in range(plan.steps)]
    numbers = range(plan.steps + 1)
    assert [plan.captions(steps) for steps in numbers] == [sum(by_step[:steps]) for steps in numbers]


def test_samples_without_couples_keep_their_order_of_random_draws():
    samples = samples_of({"singles": 9})
    plain = Samples(samples.table.drop(COUPLE_QUESTION))
    assert plain.couples_per_epoch == 0
    order = [int(sequence[0]) for sequence in schedule(plain).epoch(1)]
    assert order == np.random.default_rng([1, 1]).permutation(9).tolist()


# What a couple is


@pytest.mark.parametrize(
    ("captions", "answer"),
    [
        (("a cat", "a dog"), "a cat. a dog."),
        (("A cat.", "A dog."), "A cat. A dog."),
        (("a  cat\n", " a dog"), "a cat. a dog."),
        (("Is it a cat?", "stop!"), "Is it a cat? stop!"),
        (("一只猫。", "一只狗"), "一只猫。 一只狗."),
    ],
    ids=["no full stops", "full stops", "white space", "other ends", "full stops of Chinese"],
)
def test_captions_are_joined_as_sentences(captions, answer):
    assert join_captions(*captions) == answer


def test_a_couple_has_its_images_captions_and_question_in_its_order():
    samples = samples_of({"singles": 4})
    for couple in (Couple(2, 1), Couple(1, 2)):
        assert [image.uri for image in samples.images_of(couple)] == [f"singles/{row}.png_0" for row in couple]
        answer = f"{couple.first_row} 0. {couple.second_row} 0."
        assert samples.dialogues_of(couple) == [(Turn(QUESTION, answer),)]


@pytest.fixture(scope="module")
def loader(mixture: Path, base: Path) -> Loader:
    family = FAMILIES["m3diff"]
    samples = read_training_samples(mixture)
    return Loader(samples, family.load_processor(base), family.packing(), threads=1, device=Device(False, "fp32"))


def test_a_couple_is_loaded_as_a_pair_with_one_answer(loader):
    couple = Couple(4, 2)
    batch = loader.build([(couple, 1)])
    files = [file for row in couple for file in loader.samples.images(row)]
    for image, file in zip(batch.images["pixels"], files, strict=True):
        np.testing.assert_array_equal(image, loader.processor.image_processor.prepare_image(load_image(*file)))
    assert batch.labels.tolist() == loader.processor.encode_answer("a thing 4. a thing 2.")
    prompt = loader.processor.encode_prompt((Turn(QUESTION),), loader.processor.marks(2))
    assert batch.packed.input_ids[0, : len(prompt)].tolist() == list(prompt)


def test_couples_are_augmented_by_both_of_their_rows(loader):
    def add_draw(prepared: Prepared, rng: np.random.Generator) -> Prepared:
        shift = int(rng.integers(1, 200, dtype=np.uint8))
        return prepared._replace(tensors={"pixels": prepared.tensors["pixels"] + shift})

    fed = Loader(loader.samples, loader.processor, loader.packing, 1, loader.device, add_draw)
    shifts = []
    visits = [(Couple(0, 1), (1, 0)), (Couple(0, 2), (1, 0)), (np.array([0]), (1, 0)), (Couple(0, 1), (1, 1))]
    for sequence, visit in visits:
        plain = loader.prepare_images(sequence, None).tensors["pixels"]
        shifts.append(int((fed.prepare_images(sequence, visit).tensors["pixels"] - plain).flatten()[0]))
    assert len(set(shifts)) == 4
    assert shifts[0] == np.random.default_rng([1, 0, 0, 1, 1]).integers(1, 200, dtype=np.uint8)


def test_lengths_are_measured_by_the_number_of_images(loader):
    training: Any = SimpleNamespace(schedule=schedule(loader.samples), processor=loader.processor, loader=loader)
    training.family = FAMILIES["m3diff"]
    training.packing = training.family.packing()
    training._marks_of_sequence = partial(Training._marks_of_sequence, training)
    singles, pairs = Training.measure_lengths(training)
    assert (singles.images, pairs.images) == (1, 2)
    assert singles.share == SINGLES / (SINGLES + SINGLES // 2 + PAIRS)
    assert singles.share + pairs.share == 1
    prompt = loader.processor.encode_prompt((Turn("What is it?"),), loader.processor.marks(1))
    answers = [len(loader.processor.encode_answer(f"a thing {number}")) for number in range(SINGLES)]
    assert singles.tokens == pytest.approx(len(prompt) - 1 + np.mean(answers))
    assert singles.supervised_tokens == pytest.approx(np.mean(answers))


def test_phases_take_the_couples_of_their_datasets(mixture):
    assert read_training_samples(mixture, DatasetFilter(("singles",), excludes=False)).couples_per_epoch == SINGLES // 2
    assert read_training_samples(mixture, DatasetFilter(("singles",))).couples_per_epoch == 0
    assert read_samples(mixture / "val").couples_per_epoch == 0


# Checks before the first step


def processor_of_words() -> Any:
    """Return a processor that makes a token of each word, and ten of each image."""
    return SimpleNamespace(
        places_images=False,
        marks=lambda images: ("image",) * images,
        encode_prompt=lambda turns, marks: (0,) * (10 * len(marks) + sum(len(turn.question.split()) for turn in turns)),
        encode_answer=lambda text: [0] * len(text.split()),
    )


@pytest.mark.parametrize(
    ("takes", "code"),
    [
        (Takes(images=(0, 1)), "train.pairs_of_couples_not_taken"),
        (Takes(questions=False), "train.questions_of_couples_not_taken"),
    ],
    ids=["no pairs", "no questions"],
)
def test_a_family_that_cannot_take_couples_is_refused(takes, code):
    samples = samples_of({"singles": 5})
    processor = processor_of_words()
    if not takes.questions:  # only the couples have a question of their own
        table = samples.table.with_columns(image_set="record")
        samples = Samples(table)
    check_samples(samples, "train", "toy", Takes(), processor)
    with raises(ParamsError, code, value=2, family="toy", names=["singles"]):
        check_samples(samples, "train", "toy", takes, processor)


def test_the_longest_possible_couple_must_be_within_max_tokens():
    samples = samples_of({"singles": 5})
    answers = ["a b c", "a", "a b c d", "abcdefghijklmnopq", "a b"]
    samples = Samples(samples.table.with_columns(answer=pl.Series(answers)))
    processor = processor_of_words()
    longest = 2 * 10 + len(QUESTION.split()) + 3 + 4
    check_samples(samples, "train", "toy", Takes(), processor, longest)
    names = ["singles/2?0", "singles/0?0"]
    fields = {"key": "train.max_tokens", "value": longest, "limit": longest - 1, "dataset": "singles", "names": names}
    with raises(ParamsError, "train.couple_too_long", **fields):
        check_samples(samples, "train", "toy", Takes(), processor, longest - 1)


def test_two_long_captions_of_one_image_are_no_couple():
    samples = samples_of({"singles": 2}, captions=2)
    samples = Samples(samples.table.with_columns(answer=pl.Series(["a b c d", "a b c", "a", "b"])))
    longest = 2 * 10 + len(QUESTION.split()) + 4 + 1
    check_samples(samples, "train", "toy", Takes(), processor_of_words(), longest)
    with raises(ParamsError, "train.couple_too_long", value=longest):
        check_samples(samples, "train", "toy", Takes(), processor_of_words(), longest - 1)


def test_a_single_image_alone_makes_no_couple_that_could_be_too_long():
    samples = samples_of({"singles": 1})
    length_alone = 10 + 3 + 2  # the image, the words of the question, and those of the answer
    check_samples(samples, "train", "toy", Takes(), processor_of_words(), length_alone)


# Runs

RUN = COMPUTE | {"checkpoint_every_steps": 3, "epochs": 1.5, "micro_batch": 4}


@pytest.fixture(scope="module")
def undisturbed(mixture: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run(recipe(base, **RUN), mixture, tmp_path_factory.mktemp("whole"))


def test_a_run_trains_on_couples_and_its_manifest_says_so(undisturbed, mixture, base):
    samples = read_training_samples(mixture)
    assert undisturbed.report.rows_in == len(samples)
    plan = Schedule(samples, None, recipe(base, **RUN).cfg.seed, 4, 4, 1.5)
    assert undisturbed.report.rows_out == plan.captions(plan.steps) > len(samples) + SINGLES // 2
    trained_on = read_manifest(undisturbed.folder / "out" / "checkpoint")["trained_on"]
    assert trained_on["images"] == [1, 2]


def test_single_images_alone_have_pairs_in_the_manifest_if_they_are_coupled():
    def images_trained_on(samples: Samples) -> list[int]:
        training = SimpleNamespace(schedule=schedule(samples), question=QUESTION)
        return Training.trained_on(training)["images"]  # type: ignore[arg-type]

    samples = samples_of({"singles": 2})
    assert images_trained_on(samples) == [1, 2]
    assert images_trained_on(samples_of({"singles": 1})) == [1]
    assert images_trained_on(Samples(samples.table.drop(COUPLE_QUESTION))) == [1]


def test_a_run_that_was_killed_inside_an_epoch_ends_the_same(undisturbed, mixture, base, tmp_path, capfd):
    run_recipe = recipe(base, **RUN)
    plan = Schedule(read_training_samples(mixture), None, run_recipe.cfg.seed, 4, 1, 2)
    assert plan.steps_per_epoch % 3, "the checkpoint is inside an epoch"
    interrupted(run_recipe, mixture, tmp_path, saved=1)
    capfd.readouterr()
    assert_same_run(run(run_recipe, mixture, tmp_path), undisturbed)
    assert "resumed after step 3 of" in capfd.readouterr().out


def test_the_loss_of_a_couple_is_that_of_the_same_pair(mixture, base, loader):
    """A pair with the joined caption as its answer is the same training sample."""
    couple = Couple(0, 3)
    (turns,) = loader.samples.dialogues_of(couple)
    row = {
        "record": "x/1?0",
        "image_set": "x/1",
        "dataset": "x",
        "question": turns[0].question,
        "answer": turns[0].answer,
        "images": [image._asdict() for image in loader.samples.images_of(couple)],
        "history": [],
    }
    table = pl.DataFrame([row], schema=loader.samples.table.drop(COUPLE_QUESTION).schema)
    pair_loader = Loader(Samples(table), loader.processor, loader.packing, threads=1, device=loader.device)
    batch = loader.build([(couple, 1)])
    pair_batch = pair_loader.build([(np.array([0]), 1)])
    assert torch.equal(batch.packed.input_ids, pair_batch.packed.input_ids)
    assert torch.equal(batch.images["pixels"], pair_batch.images["pixels"])
    assert torch.equal(batch.labels, pair_batch.labels)
