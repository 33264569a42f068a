"""The section `ingest`: the datasets of a run, their locations on disk and how to read them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from m3diff.datasets import DATASETS
from m3diff.records.errors import Fault, ValueFault
from m3diff.records.schemas import SPLITS, Role, Split
from m3diff.settings.section import Section, name_validator

# Remedy for a dataset without test pairs. Other errors include it as a field
HOW_TO_TEST = Fault("settings.how_to_test")

# Number of pairs per split, or the word `published` for the counts in the dataset's module
ExpectedPairs = Annotated[
    Annotated[Literal["published"], Tag("[word]")]
    | Annotated[Mapping[Split, Annotated[int, Field(ge=0)]], Tag("[counts]")],
    Discriminator(lambda value: "[counts]" if isinstance(value, Mapping) else "[word]"),
]


class RawDataset(Section):
    """The location of a dataset on disk and how to read it. DVC watches its root."""

    reader: Annotated[str, name_validator(DATASETS)]
    """Name of the reader: a dataset in `components/datasets`, or `pairs` for your own table."""

    root: Path
    """Folder with the annotation files and the images."""

    options: Mapping[str, Any] = Field(default_factory=dict, validate_default=True)
    """Options of the reader: the arguments of its function after `root`."""

    follow_links: bool = False
    """If true, images may be symbolic links to files outside the root, as in a shared DVC cache."""


class DatasetEntry(RawDataset):
    """A dataset of a run. The dataset's name is the prefix of the ids of its pairs."""

    train_on: tuple[Split, ...] = ("train",)
    """Splits that are used for training: [train], [train, val], or [] for a dataset that is only used for testing."""

    role: Role = "task"
    """What the test split measures: `task` measures what the model is trained for. `retention` measures how much the
    model keeps of what its base could do, such as answering questions about one image. The model and its base without
    the new module answer the test split of such a dataset, and their scores are reported side by side, apart from the
    scores of the task. Its val split is not used."""

    image_root: Path | None = None
    """Folder outside the root that may contain images. DVC does not watch it: after a change there, force ingest to
    run."""

    expected_pairs: ExpectedPairs | None = None
    """Number of pairs per split that must remain after bad rows are removed, or `published` for the counts in the
    dataset's paper. validate fails if a count differs. null accepts any number."""

    @field_validator("train_on")
    @classmethod
    def refuse_training_on_test(cls, splits: tuple[Split, ...]) -> tuple[Split, ...]:
        """Check that test is not used for training, and val only together with train.

        Raises:
            ValueFault: the splits contain test, or val without train.
        """
        if "test" in splits:
            raise ValueFault("settings.test_trains", value=list(splits), names=list(SPLITS[:2]))
        if splits and "train" not in splits:
            raise ValueFault("settings.val_trains_alone", value=list(splits))
        return splits


class Ingest(Section):
    """The datasets that a run reads."""

    datasets: Mapping[Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")], DatasetEntry] = Field(min_length=1)
    """Datasets of the run, by name. The name is used in ids and file names."""
