"""The plan of single images, texts, dialogues and couples: tokens and FLOPs by the number of images."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m3diff.commands.plan.figures import Plan, Run, make_plan
from m3diff.commands.plan.find_workload import workload_of_datasets
from m3diff.commands.plan.mixture import counted_workload
from m3diff.commands.plan.published import published_workload
from m3diff.commands.plan.speed import time_sequence
from m3diff.commands.plan.text import plan_lines
from m3diff.commands.plan.workload import DatasetShare, TokenCounter, Workload
from m3diff.models import FAMILIES
from m3diff.models.tuning import meta_model
from m3diff.records.errors import ParamsError
from m3diff.records.sample import Turn
from m3diff.records.schemas import COUPLE_QUESTION
from m3diff.settings.load import load_params
from tests.commands.plan.conftest import (
    ROWS,
    WordProcessor,
    convert_section,
    entries,
    image_tokens_of,
    write_mixture,
    write_samples,
)
from tests.commands.plan.test_text import DURATION
from tests.errors import raises
from tests.layouts import LLAVA_PRETRAIN, WRITERS, conversation, write_json
from tests.tiny import tiny_base, tiny_settings
from tests.toy import REPOSITORY

QUESTIONS = REPOSITORY / "profiles" / "questions.yaml"
COUPLE = {COUPLE_QUESTION: "what do both show"}


def sample(
    name: str, images: int, question: str = "what is it", answer: str = "a cup", **fields: Any
) -> dict[str, Any]:
    """Return a sample with a question of its own."""
    row = {"image_set": f"a/{name}", "record": f"a/{name}?0", "dataset": "a", "images": images}
    return row | {"question": question, "answer": answer} | fields


HISTORY = [{"question": "is it red", "answer": "yes"}]
MIXED = [
    sample("1", 2),
    sample("2", 1),
    sample("2", 1, "how many", "two", record="a/2?1"),
    sample("3", 0, answer="a rhyme of four words"),
    sample("4", 1, history=HISTORY),
    sample("5", 1, **COUPLE),
    sample("6", 1, answer="a blue car", **COUPLE),
    sample("7", 1, answer="a", **COUPLE),
]


class TalkProcessor(WordProcessor):
    """A prompt has a token for each image place, each word of its texts, and each answer's end; and one more."""

    splits = False  # whether an earlier answer is written without its end token, so that a new branch begins

    def encode_prompt(self, turns: Sequence[Turn], marks: Sequence[str]) -> tuple[int, ...]:
        tokens = [3] * "".join(marks).count("<image>")
        for turn in turns[:-1]:
            tokens += [*self.question(turn), *self.encode_answer(turn.answer)[: -1 if self.splits else None]]
        return (*tokens, *self.question(turns[-1]))

    @staticmethod
    def question(turn: Turn) -> list[int]:
        return [len(word) for word in turn.question.split()] + [7]


class SplittingProcessor(TalkProcessor):
    splits = True


def counted(folder: Path, rows: Sequence[dict[str, Any]], processor: Any = None) -> Workload:
    return counted_workload(write_samples(folder, rows) / "train", TokenCounter(processor, image_tokens_of))


def test_image_sets_are_counted_by_their_number_of_images(tmp_path):
    workload = counted(tmp_path, MIXED)
    shares = [(share.images, share.are_couples, share.pairs, share.references) for share in workload.shares]
    assert shares == [(2, False, 1, 1), (1, False, 5, 6), (0, False, 1, 1), (2, True, 1, 1)]
    assert workload.pairs == 8
    assert workload.references == 9
    assert workload.sequences(1) == 9
    assert workload.sequences(None) == 8
    assert not workload.has_only_pairs


def test_couples_are_counted_as_training_makes_them(tmp_path):
    rows = [sample(str(number), 1, **COUPLE) for number in range(5)]
    rows += [sample(str(number), 1, **COUPLE) | {"dataset": "b", "image_set": f"b/{number}"} for number in range(3)]
    couples = counted(tmp_path, rows).groups[-1]
    expected = [
        DatasetShare(name, pairs=count, references=count, images=2, are_couples=True)
        for name, count in (("a", 2), ("b", 1))
    ]
    assert couples.shares == expected


def test_one_single_image_makes_no_couple(tmp_path):
    assert [group.images for group in counted(tmp_path, [sample("1", 1, **COUPLE)]).groups] == [1]


def test_a_couple_has_its_own_question_and_both_captions(tmp_path):
    rows = [sample("1", 1, answer="a cup", **COUPLE), sample("2", 1, answer="a blue car", **COUPLE)]
    couples = counted(tmp_path, rows, WordProcessor()).groups[-1]
    assert couples.prompt_tokens == 4 + 1
    assert couples.reference_tokens == 3 + 4


def test_each_question_about_an_image_has_its_own_prompt(tmp_path):
    workload = counted(tmp_path, MIXED[1:3], TalkProcessor())
    (group,) = workload.groups
    assert group.prompt_tokens == ((3 + 1) + (2 + 1)) / 2
    assert group.prompts_per_sequence(None) == 2
    assert group.prompts_per_sequence(1) == 1


@pytest.mark.parametrize(
    ("processor", "branches_of_texts"),
    [(TalkProcessor(), 1), (SplittingProcessor(), 2)],
    ids=["one branch", "a branch for each turn"],
)
def test_a_dialogue_has_the_tokens_of_all_its_branches(tmp_path, processor, branches_of_texts):
    (group,) = counted(tmp_path, [MIXED[4]], processor).groups
    first_question = 3 + 1
    answers = 1 + 1 + 2 + 1  # "yes" and "a cup", each with its end
    assert group.reference_tokens == answers
    # the branches share all images and the first question, up to the last token before the answer
    repeated = 0 if branches_of_texts == 1 else 1 + 1  # the last token of the question, and "yes" without its end
    assert group.prompt_tokens == first_question + 3 + 1 + repeated


def test_without_a_tokenizer_a_dialogue_has_the_estimated_lengths_of_its_turns(tmp_path):
    (group,) = counted(tmp_path, [MIXED[4]]).groups
    assert group.prompt_tokens == 2 * 29
    assert group.reference_tokens == 2 * 15


# Figures


def plan_of_mixed_samples(run: Callable[..., Run], folder: Path, **compute: Any) -> Plan:
    mixture = write_samples(folder / "mixed", MIXED)
    planned = run({"micro_batch": 1} | compute, mixture=mixture, max_captions_per_sequence=1)
    return make_plan(replace(planned, entries=entries("a=pairs")))


@pytest.fixture
def plan(run, tmp_path):
    return plan_of_mixed_samples(run, tmp_path)


def test_each_kind_of_sequence_has_its_image_tokens_and_flops(plan):
    kinds = [(figures.images, figures.sequences, round(figures.tokens)) for figures in plan.sequences_by_images]
    single = 5 + round(29 * 7 / 6 + 15 * 7 / 6)  # one of six samples has two turns
    assert kinds == [(2, 1, 10 + 44), (1, 6, single), (0, 1, 44), (2, 1, 10 + 29 + 30)]
    vision = {
        figures.images: sum(term.name == "vision" for term in figures.terms) for figures in plan.sequences_by_images
    }
    assert vision[1] == 1
    assert plan.sequences == 9


def test_the_run_takes_the_flops_of_every_sequence(plan):
    total = sum(figures.sequences * sum(term.total for term in figures.terms) for figures in plan.sequences_by_images)
    assert plan.model_flops == pytest.approx(total)
    assert plan.tokens_per_sequence == pytest.approx(
        sum(figures.sequences * figures.tokens for figures in plan.sequences_by_images) / 9
    )


def test_full_checkpointing_runs_the_marked_terms_of_every_sequence_again(run, tmp_path):
    plan = plan_of_mixed_samples(run, tmp_path, activation_checkpointing="full")
    recomputed = sum(figures.sequences * (100 * figures.tokens + 20) for figures in plan.sequences_by_images)
    assert plan.run_flops - plan.model_flops == pytest.approx(recomputed)


def test_memory_is_that_of_the_longest_sequence_and_captions_are_of_pairs(plan):
    supervised = 2 * 15  # of a couple
    assert plan.activations_gb["llm"] * 1e9 == pytest.approx(supervised * 2 * 2)
    assert plan.caption_flops == pytest.approx(100 * (10 + 29) + 7)


def test_the_text_names_kinds_of_image_sets(plan):
    text = "\n".join(plan_lines(plan, DURATION, None, []))
    assert "8 image sets with 9 samples" in text
    for figures in plan.sequences_by_images:
        assert f"and {sum(term.total for term in figures.terms) / 1e12:.3g} TFLOP each" in text
    for words in ("1 pairs", "5 images", "1 texts", "1 couples"):
        assert f" {words} " in text
    assert "6 with 1 image, 56 tokens" in text


def test_the_text_of_pairs_alone_says_nothing_of_kinds(run):
    text = "\n".join(plan_lines(make_plan(run()), DURATION, None, []))
    assert "4 pairs with 7 captions" in text
    assert "with 2 images" not in text


def test_the_most_frequent_kind_of_sequence_is_timed(plan):
    assert plan.most_frequent_sequence.images == 1


def test_a_mixture_of_captions_has_one_group(tmp_path):
    workload = counted_workload(write_mixture(tmp_path, ROWS) / "train", TokenCounter(WordProcessor(), image_tokens_of))
    assert len(workload.groups) == 1
    assert workload.groups[0].prompts == workload.pairs


# Before there is a mixture


def test_couples_are_counted_in_annotation_files(tmp_path):
    root = WRITERS["llava_pretrain"](tmp_path)
    convert = convert_section(questions=QUESTIONS, sources={"mine": {"couple": "also"}})
    own_entries = entries("mine=pairs", root=root, options=PAIRS_OPTIONS)
    workload = workload_of_datasets(own_entries, convert)
    shares = [(share.images, share.are_couples, share.pairs) for share in workload.shares]
    assert shares == [(1, False, len(LLAVA_PRETRAIN)), (2, True, 1)]


PAIRS_OPTIONS = {
    "manifest": "blip_laion_cc_sbu_558k.json",
    "columns": {"images": "image", "captions": "conversations", "id": None},
    "split": "train",
}


def test_couples_of_other_records_are_refused_before_there_is_a_mixture(tmp_path):
    rows = [{"image": "a.png", "conversations": conversation("A?", "x", "B?", "y")}]
    write_json(tmp_path / PAIRS_OPTIONS["manifest"], rows)
    convert = convert_section(questions=QUESTIONS, sources={"mine": {"couple": "also"}})
    with raises(ParamsError, "convert.records_cannot_be_coupled", value=1, total=1):
        workload_of_datasets(entries("mine=pairs", root=tmp_path, options=PAIRS_OPTIONS), convert)


@pytest.mark.parametrize(
    ("source", "images", "couples"),
    [
        ({"couple": "also"}, 558_128, [279_064]),
        ({"couple": "also", "max_pairs": 1_001}, 1_001, [500]),
        ({}, 558_128, []),
    ],
    ids=["all", "a cap", "no couples"],
)
def test_published_single_images_are_counted_with_their_couples(source, images, couples):
    workload = published_workload(entries("llava_pretrain"), convert_section(sources={"llava_pretrain": source}))
    assert [share.pairs for share in workload.shares if share.are_couples] == couples
    assert [share.pairs for share in workload.shares if share.images == 1] == [images]
    assert workload.sequences(1) == images + sum(couples)


def test_published_rows_without_an_image_are_texts():
    workload = published_workload(entries("llava_instruct", "iedit"), convert_section())
    assert {group.images: group.references for group in workload.groups} == {2: 3_061, 1: 624_610, 0: 40_688}
    assert workload.references == 3_061 + 665_298


# FLOPs of a real family


def test_images_take_the_flops_of_the_vision_encoder_and_texts_none(tmp_path):
    settings = tiny_settings()
    family = FAMILIES["m3diff"]
    config = family.planned_config(tiny_base(tmp_path / "base"), settings)
    model = meta_model(config, family, settings, "fp32")
    flops = {}
    for images in (2, 1, 0):
        terms = family.count_flops(model, family, config.image_tokens_of(images) + 20, 5, images)
        flops[images] = {term.name: term.forward for term in terms}
    assert flops[1]["vision"] == pytest.approx(flops[2]["vision"] / 2)
    assert "module" in flops[2]
    assert "module" not in flops[1]
    assert {"vision", "projector", "module"}.isdisjoint(flops[0])
    assert flops[0]["llm"] < flops[1]["llm"] < flops[2]["llm"]


@pytest.mark.slow
def test_a_sequence_of_any_number_of_images_can_be_timed(tmp_path):
    params = load_params(REPOSITORY / "profiles" / "embedded.yaml")
    mixture = write_samples(tmp_path / "mixture", [sample("1", 2), sample("2", 1), sample("3", 0)])
    changes = {"mixture": mixture, "settings": tiny_settings(), "entries": entries("a=pairs")}
    train = params.train.model_copy(update={"base": tiny_base(tmp_path / "base")})
    run = replace(Run.from_params(params), train=train, **changes)
    kinds = make_plan(run).sequences_by_images
    assert [kind.images for kind in kinds] == [2, 1, 0]
    for kind in kinds:
        assert time_sequence(run, kind) > 0
