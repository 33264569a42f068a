"""Count the samples of a mixture, to determine the workload of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from m3diff.commands.plan.workload import DatasetShare, DialogueTokens, SampleGroup, TokenCounter, Workload
from m3diff.datasets import DATASETS
from m3diff.records.sample import PAIR, Turn
from m3diff.records.schemas import COUPLE_QUESTION
from m3diff.records.tables import iterate_parts, part_paths, read_table
from m3diff.settings.section import ParamsError
from m3diff.stages.ingest.params import DatasetEntry

# Columns of samples that determine the workload. `images` is the number of images
SAMPLE_COLUMNS = ["record", "image_set", "dataset", "question", "answer", "images", "history"]


def has_mixture(mixture: Path) -> bool:
    """Return whether the mixture contains a part with training samples."""
    return bool(part_paths(mixture / "train"))


def counted_workload(folder: Path, tokens: TokenCounter, excluded_datasets: Sequence[str] = ()) -> Workload:
    """Return the workload of a split of the mixture, by counting its samples.

    Args:
        folder: folder of the split.
        tokens: counts or estimates the lengths of the texts.

    Raises:
        DataError: a file cannot be read.
        ParamsError: the split has no samples, or none from datasets that are not excluded.
    """
    parts = []
    for part in iterate_parts(folder):
        couple_columns = [name for name in part.column_names if name == COUPLE_QUESTION]
        samples_of_part = pl.DataFrame(part.select([*SAMPLE_COLUMNS, *couple_columns]))
        parts.append(samples_of_part.with_columns(pl.col("images").list.len()))
    # The samples of an image set are adjacent. If the same image set appears again later, it is used a second time
    use = pl.col("image_set").rle_id().alias("use")
    samples = pl.concat(parts, how="diagonal").with_columns(use)
    samples = samples.filter(~pl.col("dataset").is_in(list(excluded_datasets)))
    if samples.is_empty():
        if excluded_datasets:
            raise ParamsError("plan.no_sample_of_other_datasets", path=folder, names=list(excluded_datasets))
        raise ParamsError("plan.no_sample", path=folder)
    return workload_of_samples(samples, tokens, str(folder))


def workload_of_samples(samples: pl.DataFrame, tokens: TokenCounter, origin: str) -> Workload:
    """Return the workload of training samples.

    Args:
        samples: table with SAMPLE_COLUMNS, `use`, a number for each use of an image set, and COUPLE_QUESTION if any
            samples are coupled.
        origin: text that names the source of the samples.
    """
    groups = []
    for images in sorted(set(samples["images"]), reverse=True):
        groups.append(_group_of_samples(samples.filter(images=images), images, tokens))
    if COUPLE_QUESTION in samples.columns:
        groups += _group_of_couples(samples.filter(pl.col(COUPLE_QUESTION).is_not_null()), tokens)
    return Workload(origin=f"{origin}, {tokens}", groups=groups)


def _group_of_samples(samples: pl.DataFrame, images: int, tokens: TokenCounter) -> SampleGroup:
    """Return the group of image sets that have this number of images."""
    uses = samples.group_by("use").agg(pl.len().alias("references"), pl.col("dataset").first())
    shares = uses.group_by("dataset").agg(pl.len().alias("pairs"), pl.col("references").sum()).sort("dataset")
    is_dialogue = pl.col("history").list.len() > 0
    questions = samples.filter(~is_dialogue)
    prompts = questions.group_by("use", "record").agg(pl.col("question").first())
    dialogues = [_turns_of(row) for row in samples.filter(is_dialogue).iter_rows(named=True)]
    dialogue_tokens = tokens.dialogue_tokens(dialogues, images) if dialogues else DialogueTokens(0.0, 0.0)
    prompt_tokens = len(dialogues) * dialogue_tokens.prompt
    reference_tokens = len(dialogues) * dialogue_tokens.supervised
    if len(questions):
        prompt_tokens += len(prompts) * tokens.prompt_tokens(prompts["question"], images)
        reference_tokens += len(questions) * tokens.reference_tokens(questions["answer"])
    prompt_count = len(prompts) + len(dialogues)
    return SampleGroup(
        shares=[DatasetShare(**row, images=images) for row in shares.iter_rows(named=True)],
        prompt_tokens=prompt_tokens / prompt_count,
        reference_tokens=reference_tokens / len(samples),
        pairs_by_references=dict(uses["references"].value_counts().sort("references").iter_rows()),
        prompts=prompt_count,
    )


def _turns_of(sample: Mapping[str, Any]) -> list[Turn]:
    """Return the turns of a dialogue."""
    history = [Turn(**turn) for turn in sample["history"]]
    return [*history, Turn(sample["question"], sample["answer"])]


def _group_of_couples(samples: pl.DataFrame, tokens: TokenCounter) -> list[SampleGroup]:
    """Return the group of couples that training makes of these samples, or an empty list if there are none."""
    singles = samples.group_by("dataset").agg(pl.col("use").n_unique()).sort("dataset")
    shares = []
    for dataset, count in singles.iter_rows():
        couples = count // 2
        if couples:
            share = DatasetShare(dataset, pairs=couples, references=couples, images=PAIR, are_couples=True)
            shares.append(share)
    if not shares:
        return []
    group = SampleGroup(
        shares=shares,
        prompt_tokens=tokens.prompt_tokens(samples[COUPLE_QUESTION], PAIR),
        reference_tokens=2 * tokens.reference_tokens(samples["answer"]),
        pairs_by_references={1: sum(share.pairs for share in shares)},
    )
    return [group]


def count_test_pairs(mixture: Path, entries: Mapping[str, DatasetEntry]) -> int | None:
    """Return the number of test pairs to caption, or None if it is unknown.

    The test split of the mixture is counted if it exists and contains only datasets of this run. Otherwise, the
    published counts are added up.
    """
    if part_paths(mixture / "test"):
        samples = read_samples(mixture / "test", ["record", "dataset"])
        if set(samples["dataset"].unique()) <= entries.keys():
            return samples["record"].n_unique()
    test_pairs = 0
    for name, entry in entries.items():
        published = DATASETS[entry.reader].part(name)
        if published is None:
            return None
        test_pairs += published.test.questions or published.test.pairs
    return test_pairs


def read_samples(folder: Path, columns: Sequence[str]) -> pl.DataFrame:
    """Read columns of the samples of a split. Raise DataError if a part cannot be read."""
    return pl.DataFrame(read_table(folder, columns))
