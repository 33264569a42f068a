"""Count the samples of a mixture, to determine the workload of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from m3diff.commands.plan.workload import DatasetShare, TokenCounter, Workload
from m3diff.datasets import DATASETS
from m3diff.records.tables import part_paths, read_table
from m3diff.settings.section import ParamsError
from m3diff.stages.ingest.params import DatasetEntry

SAMPLE_COLUMNS = ["image_set", "dataset", "question", "answer"]


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
    # The samples of an image set are adjacent. If the same image set appears again later, it is used a second time
    use = pl.col("image_set").rle_id().alias("use")
    samples = read_samples(folder, SAMPLE_COLUMNS).with_columns(use)
    samples = samples.filter(~pl.col("dataset").is_in(list(excluded_datasets)))
    if samples.is_empty():
        if excluded_datasets:
            raise ParamsError("plan.no_sample_of_other_datasets", path=folder, names=list(excluded_datasets))
        raise ParamsError("plan.no_sample", path=folder)
    return workload_of_samples(samples, tokens, str(folder))


def workload_of_samples(samples: pl.DataFrame, tokens: TokenCounter, origin: str) -> Workload:
    """Return the workload of training samples.

    Args:
        samples: table with SAMPLE_COLUMNS and `use`, a number for each use of a pair.
        origin: text that names the source of the samples.
    """
    pairs = samples.group_by("use").agg(
        pl.len().alias("references"), pl.col("dataset").first(), pl.col("question").first()
    )
    shares = pairs.group_by("dataset").agg(pl.len().alias("pairs"), pl.col("references").sum())
    return Workload(
        origin=f"{origin}, {tokens}",
        shares=[DatasetShare(**row) for row in shares.sort("dataset").iter_rows(named=True)],
        prompt_tokens=tokens.prompt_tokens(pairs["question"]),
        reference_tokens=tokens.reference_tokens(samples["answer"]),
        pairs_by_references=dict(pairs["references"].value_counts().sort("references").iter_rows()),
    )


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
