"""Check before the first step that the model's family can process every sample, and that none is too long.

Nothing is cut to a length or left out during training.
"""

from collections.abc import Iterator

import polars as pl

from m3diff.images.open import load_image
from m3diff.models.contract import Processor, Takes
from m3diff.models.dialogue import encode_dialogue
from m3diff.records.errors import Fault
from m3diff.records.sample import IMAGE_MARK, Turn
from m3diff.settings.section import ParamsError
from m3diff.stages.train.batches import Samples


def check_samples(
    samples: Samples, split: str, family: str, takes: Takes, processor: Processor, max_tokens: int | None = None
) -> None:
    """Check that a family can process every sample.

    Args:
        samples: the samples of a split.
        split: name of the split's folder in the mixture, for messages.
        family: name of the family, for messages.
        takes: the samples that the family can process.
        processor: processor of the model.
        max_tokens: maximum length of a sample in tokens; None for no limit.

    Raises:
        ParamsError: a sample has a number of images, a question of its own, earlier turns or the mark of an image in a
            text that the family cannot process, or is longer than `max_tokens`.
    """
    for fault in faults_of_samples(samples, split, family, takes, processor):
        raise ParamsError(fault)
    if max_tokens is not None:
        _check_lengths(samples, takes, processor, max_tokens)


def faults_of_samples(samples: Samples, split: str, family: str, takes: Takes, processor: Processor) -> Iterator[Fault]:
    """Yield a fault for each property of samples that the family cannot process, with the number of these samples.

    The arguments are those of `check_samples`.
    """
    origin = {"split": split, "family": family}
    turn = pl.element().struct
    history = pl.col("history").list.eval(pl.concat_str(turn.field("question"), turn.field("answer"))).list.join("")
    texts = pl.concat_str("question", "answer", history)
    table = samples.table.select(
        "dataset",
        "record",
        images=pl.col("images").list.len(),
        turns=pl.col("history").list.len() + 1,
        has_own_question=pl.col("record") != pl.col("image_set"),
        has_mark=texts.str.contains(IMAGE_MARK, literal=True),
    )
    for images in sorted(set(table["images"]) - {*takes.images}):
        chosen = table.filter(images=images)
        yield _fault("train.images_not_taken", chosen, **origin, images=images, expected=list(takes.images))
    if not takes.questions and table["has_own_question"].any():
        yield _fault("train.questions_not_taken", table.filter("has_own_question"), **origin)
    if not takes.turns and (table["turns"] > 1).any():
        yield _fault("train.turns_not_taken", table.filter(pl.col("turns") > 1), **origin)
    if not processor.places_images and table["has_mark"].any():
        yield _fault("train.marks_not_taken", table.filter("has_mark"), **origin, mark=IMAGE_MARK)


def _fault(code: str, chosen: pl.DataFrame, **fields: object) -> Fault:
    """Return a fault about the chosen samples, which names their datasets and the first record."""
    datasets = chosen["dataset"].unique(maintain_order=True).to_list()
    return Fault(code, value=len(chosen), names=datasets, name=chosen["record"][0], **fields)


def _check_lengths(samples: Samples, takes: Takes, processor: Processor, max_tokens: int) -> None:
    """Check that no sample is longer than `max_tokens`.

    Most samples are not encoded: a text has at most one token per byte, so a sample with few bytes cannot be too long.
    Images are prepared only if a sample could be too long and its number of visual tokens depends on its images.

    Raises:
        ParamsError: a sample is too long. The longest one is named.
    """
    turn = pl.element().struct
    bytes_of_turn = turn.field("question").str.len_bytes() + turn.field("answer").str.len_bytes()
    table = samples.table.select(
        images=pl.col("images").list.len(),
        turns=pl.col("history").list.len() + 1,
        text_bytes=pl.col("question").str.len_bytes()
        + pl.col("answer").str.len_bytes()
        + pl.col("history").list.eval(bytes_of_turn).list.sum(),
    )
    longest_row: int | None = None
    longest_tokens = max_tokens
    tokens_without_text: dict[tuple[int, int], int] = {}  # by number of images and turns
    for row, (images, turns, text_bytes) in enumerate(table.iter_rows()):
        if (images, turns) not in tokens_without_text:
            marks = processor.marks(images)
            tokens_without_text[images, turns] = _count_tokens(processor, (Turn(""),) * turns, marks)
        if tokens_without_text[images, turns] + text_bytes <= longest_tokens:
            continue
        tokens = _count_tokens(processor, samples.turns(row), processor.marks(images))
        if tokens > longest_tokens and not takes.fixed_marks:
            prepared = processor.prepare(load_image(*image) for image in samples.images(row))
            tokens = _count_tokens(processor, samples.turns(row), prepared.marks)
        if tokens > longest_tokens:
            longest_row = row
            longest_tokens = tokens
    if longest_row is not None:
        raise ParamsError(
            "train.sample_too_long",
            key="train.max_tokens",
            value=longest_tokens,
            limit=max_tokens,
            dataset=samples.value("dataset", longest_row),
            name=samples.value("record", longest_row),
        )


def _count_tokens(processor: Processor, turns: tuple[Turn, ...], marks: tuple[str, ...]) -> int:
    """Return the length of the longest branch of a dialogue, in tokens."""
    branches = encode_dialogue(processor.encode_prompt, processor.encode_answer, turns, marks)
    return max(len(branch.ids) for branch in branches)
