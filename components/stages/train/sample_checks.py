"""Check before the first step that the model's family can process every sample, and that none is too long.

Nothing is cut to a length or left out during training.
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import polars as pl

from m3diff.images.open import load_image
from m3diff.models.contract import Processor, Takes
from m3diff.models.dialogue import count_longest_branch
from m3diff.records.errors import Fault
from m3diff.records.sample import IMAGE_MARK, PAIR, Turn
from m3diff.records.schemas import COUPLE_QUESTION
from m3diff.settings.section import ParamsError
from m3diff.stages.train.batches import Samples, join_captions
from m3diff.stages.train.image_sizes import (
    check_grids,
    count_tokens_in_couples,
    fault_of_long_sample,
    find_longest_sample,
    measure_texts,
    read_sizes,
    rows_by_sizes,
)


def check_samples(
    samples: Samples,
    split: str,
    family: str,
    takes: Takes,
    processor: Processor,
    max_tokens: int | None = None,
    model: str | None = None,
) -> None:
    """Check that a family can process every sample, and every couple that an epoch may have.

    Args:
        samples: the samples of a split.
        split: name of the split's folder in the mixture, for messages.
        family: name of the family, for messages.
        takes: the samples that the family can process.
        processor: processor of the model.
        max_tokens: maximum length of a sample in tokens; None for no limit.
        model: name of the model in the section `models`, for messages.

    Raises:
        DataError: an image fits none of the processor's grids.
        ParamsError: a sample has a number of images, a question of its own, earlier turns or the mark of an image in a
            text that the family cannot process, or is longer than `max_tokens`.
    """
    for fault in faults_of_samples(samples, split, family, takes, processor):
        raise ParamsError(fault)
    if not takes.fixed_marks:
        check_largest_images(samples, processor, max_tokens, model)
    elif max_tokens is not None:
        _check_lengths(samples, processor, max_tokens)
    if max_tokens is not None:
        for dataset in samples.singles:
            _check_lengths_of_couples(samples, dataset, takes, processor, max_tokens)


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
    yield from _faults_of_couples(samples, family, takes)


def _faults_of_couples(samples: Samples, family: str, takes: Takes) -> Iterator[Fault]:
    """Yield a fault for each property of couples that the family cannot process."""
    couples = samples.couples_per_epoch
    if not couples:
        return
    datasets = list(samples.singles)
    if PAIR not in takes.images:
        yield Fault("train.pairs_of_couples_not_taken", value=couples, family=family, names=datasets)
    if not takes.questions:
        yield Fault("train.questions_of_couples_not_taken", value=couples, family=family, names=datasets)


def _fault(code: str, chosen: pl.DataFrame, **fields: object) -> Fault:
    """Return a fault about the chosen samples, which names their datasets and the first record."""
    datasets = chosen["dataset"].unique(maintain_order=True).to_list()
    return Fault(code, value=len(chosen), names=datasets, name=chosen["record"][0], **fields)


def check_largest_images(samples: Samples, processor: Processor, max_tokens: int | None, model: str | None) -> None:
    """Check samples whose number of tokens depends on the sizes of their images. Only headers of files are read.

    The arguments are those of `check_samples`.

    Raises:
        DataError: an image fits none of the processor's grids.
        ParamsError: a sample is too long. The longest one is named.
    """
    rows = rows_by_sizes(samples, read_sizes(samples))
    check_grids(samples, rows, processor)
    if max_tokens is None:
        return
    longest = find_longest_sample(samples, rows, processor, max_tokens)
    if longest is not None:
        raise ParamsError(fault_of_long_sample(samples, longest, processor, max_tokens, model))


def _check_lengths(samples: Samples, processor: Processor, max_tokens: int) -> None:
    """Check that no sample is longer than `max_tokens`.

    Most samples are not encoded, because a sample with few bytes cannot be too long; see `measure_texts`.

    Raises:
        ParamsError: a sample is too long. The longest one is named.
    """
    longest_row: int | None = None
    longest_tokens = max_tokens
    tokens_without_text: dict[tuple[int, int], int] = {}  # by number of images and turns
    for row, (images, turns, text_bytes) in enumerate(measure_texts(samples).iter_rows()):
        if (images, turns) not in tokens_without_text:
            marks = processor.marks(images)
            tokens_without_text[images, turns] = count_longest_branch(processor, (Turn(""),) * turns, marks)
        if tokens_without_text[images, turns] + text_bytes <= longest_tokens:
            continue
        tokens = count_longest_branch(processor, samples.turns(row), processor.marks(images))
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


def _check_lengths_of_couples(
    samples: Samples, dataset: str, takes: Takes, processor: Processor, max_tokens: int
) -> None:
    """Check that no couple of a dataset is longer than `max_tokens`, whichever samples an epoch joins.

    Raises:
        ParamsError: a couple is too long. The longest one is named.
    """
    captions = samples.table.with_row_index("row").filter(pl.col("dataset") == dataset)
    captions = captions.select("row", "record", "answer", COUPLE_QUESTION, text_bytes=pl.col("answer").str.len_bytes())
    captions = captions.sort("text_bytes", descending=True, maintain_order=True)
    questions = captions[COUPLE_QUESTION].unique()
    marks = processor.marks(PAIR)
    image_tokens: dict[int, int] = {}
    if takes.fixed_marks:
        tokens_without_text = max(count_longest_branch(processor, (Turn(question),), marks) for question in questions)
        # each caption may get a full stop, and a space joins them
        if tokens_without_text + captions["text_bytes"].head(2).sum() + 3 <= max_tokens:
            return
    else:
        image_tokens = count_tokens_in_couples(samples, captions["row"].to_list(), processor)
    longest_captions = _find_longest_captions(samples, captions, dataset, processor, image_tokens)
    if len(longest_captions) < 2:
        return
    if not takes.fixed_marks:
        images = [samples.images(caption["row"])[0] for caption in longest_captions]
        marks = processor.prepare(load_image(*image) for image in images).marks
    answer = join_captions(*(caption["answer"] for caption in longest_captions))
    tokens = max(count_longest_branch(processor, (Turn(question, answer),), marks) for question in questions)
    if tokens > max_tokens:
        raise ParamsError(
            "train.couple_too_long",
            key="train.max_tokens",
            value=tokens,
            limit=max_tokens,
            dataset=dataset,
            names=[caption["record"] for caption in longest_captions],
        )


def _find_longest_captions(
    samples: Samples,
    captions: pl.DataFrame,
    dataset: str,
    processor: Processor,
    image_tokens: Mapping[int, int],
) -> list[dict[str, Any]]:
    """Return the captions of two different image sets that have the most tokens with their images, the longest first.

    Args:
        captions: the captions of the dataset with their `row` and `text_bytes`, the longest in bytes first.
        image_tokens: tokens of the image of each row. Empty if all images have the same number.
    """
    starts = samples.singles[dataset].starts
    most_image_tokens = max(image_tokens.values(), default=0)
    longest: dict[int, tuple[int, dict[str, Any]]] = {}  # tokens and caption of up to two image sets
    for caption in captions.iter_rows(named=True):
        # a text has at most one token per byte, and an end token
        most_tokens = caption["text_bytes"] + 1 + most_image_tokens
        if len(longest) == 2 and most_tokens <= min(tokens for tokens, _ in longest.values()):
            break
        tokens = len(processor.encode_answer(caption["answer"])) + image_tokens.get(caption["row"], 0)
        image_set = int(np.searchsorted(starts, caption["row"], side="right"))
        if image_set not in longest or tokens > longest[image_set][0]:
            longest[image_set] = (tokens, caption)
            longest = dict(heapq.nlargest(2, longest.items(), key=lambda item: item[1][0]))
    return [caption for _, caption in longest.values()]
