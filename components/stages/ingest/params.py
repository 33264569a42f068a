"""The section `ingest`: which datasets enter, by name, and how each lies on disk."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from m3diff.datasets import DATASETS
from m3diff.records.schemas import SPLITS, Split
from m3diff.settings.section import Section, one_of

ExpectedPairs = Annotated[  # pairs by split, or the word `published` for the counts that the dataset's file has
    Annotated[Literal["published"], Tag("[word]")]
    | Annotated[Mapping[Split, Annotated[int, Field(ge=0)]], Tag("[counts]")],
    Discriminator(lambda value: "[counts]" if isinstance(value, Mapping) else "[word]"),
]


class RawDataset(Section):
    """A dataset's place on disk and the way to read it; DVC watches its root."""

    reader: Annotated[str, one_of(DATASETS)]
    root: Path  # folder of its annotation files and images
    options: Mapping[str, Any] = Field(default_factory=dict, validate_default=True)  # the reader's own
    follow_links: bool = False  # images may be symbolic links that leave the root (a shared DVC cache)


class DatasetEntry(RawDataset):
    """A dataset of a run; its name is the namespace of its ids."""

    train_on: tuple[Split, ...] = ("train",)  # its own splits that train; [] of a dataset that is tested only
    image_root: Path | None = None  # a folder outside the root that images may be in; DVC does not watch it
    expected_pairs: ExpectedPairs | None = None  # of its own splits, what validate requires once bad rows are out

    @field_validator("train_on")
    @classmethod
    def possible(cls, splits: tuple[Split, ...]) -> tuple[Split, ...]:
        if "test" in splits:
            raise ValueError(f"a test split must not train; choose from {', '.join(SPLITS[:2])}")
        if splits and "train" not in splits:
            raise ValueError("val trains beside train alone; write [train, val], or [] where nothing trains")
        return splits


class Ingest(Section):
    # by name, which is a part of ids and files
    datasets: Mapping[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], DatasetEntry] = Field(min_length=1)
