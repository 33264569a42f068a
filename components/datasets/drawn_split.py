"""Draw splits at random for a table that does not name them: `split: {test: 0.15, val: 0.1, seed: 0}`.

Pairs that share an image or a scene form a group and get the same split, so no image of a test pair is used for
training. Images are compared by path; validate finds equal images with different names. To find the split of a group,
the seed and the group's scene are hashed to a number from 0 to 1. If no column names scenes, one of the group's images
before is used instead of the scene:

    hash < test -> test        hash < test + val -> val        else -> train

The order of the rows and pairs of other scenes do not affect the split of a pair, so a test pair stays in the test
split when the table grows. The shares are only exact on average; with few groups, the numbers depend on the seed.
"""

import hashlib
import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from m3diff.datasets.files import Embedded
from m3diff.datasets.spec import Row
from m3diff.records.errors import DataError, ValueFault, format_count
from m3diff.records.schemas import SPLITS, Split
from m3diff.settings.section import Section

SEEDS_TO_TRY = 100  # number of seeds that are tried to find a proposal
TOLERANCE = 0.5  # maximum deviation of a proposal's number of test pairs, relative to the expected number


class SplitShares(Section):
    """The shares of groups in the test and validation splits. All other groups are used for training."""

    test: float = Field(gt=0, lt=1)
    """Share of the groups in the test split."""

    val: float = Field(default=0.0, ge=0, lt=1)
    """Share of the groups in the validation split."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the draw. A different seed draws different splits."""

    @model_validator(mode="after")
    def leave_pairs_to_train(self) -> "SplitShares":
        """Refuse shares of test and val that leave no pairs for training.

        Raises:
            ValueFault: the two shares add up to 1 or more.
        """
        if self.test + self.val >= 1:
            raise ValueFault("datasets.no_share_left_to_train", value=self.test + self.val)
        return self


def as_shares(option: Any) -> SplitShares | None:
    """Return the shares in an option `split`. Return None if the option is missing or names one split for all pairs.

    Raises:
        DataError: the option has unknown keys or invalid shares.
    """
    if not isinstance(option, Mapping):
        return None
    try:
        return SplitShares.model_validate(option)
    except ValidationError as error:
        causes = [": ".join([*map(str, fault["loc"]), fault["msg"]]) for fault in error.errors()]
        raise DataError("datasets.invalid_shares", causes=causes) from error


@dataclass
class PairGroups:
    """Groups of pairs that share images or scenes.

    rows: the row numbers of each group. The key is the text whose hash decides the group's split.
    """

    rows: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: Sequence[Row]) -> "PairGroups":
        """Group the pairs that share an image or a scene. Rows that have neither are not in any group."""
        # Union-find over images and scenes, with path halving
        parents: dict[str, str] = {}

        def root_of(node: str) -> str:
            while parents.setdefault(node, node) != node:
                parents[node] = parents[parents[node]]
                node = parents[node]
            return node

        nodes_of_rows = [_nodes_of(row) for row in rows]
        for nodes in nodes_of_rows:
            for node in nodes[1:]:
                parents[root_of(node)] = root_of(nodes[0])
        numbers_of_root: dict[str, list[int]] = {}
        for number, nodes in enumerate(nodes_of_rows):
            if nodes:
                numbers_of_root.setdefault(root_of(nodes[0]), []).append(number)
        numbers_of_group = {}
        for numbers in numbers_of_root.values():
            name = _group_name([rows[number] for number in numbers])
            numbers_of_group[name] = numbers
        return cls(numbers_of_group)

    def draw(self, shares: SplitShares) -> dict[int, Split]:
        """Return the split of each row that is in a group."""
        split_of_row: dict[int, Split] = {}
        for name, numbers in self.rows.items():
            split_of_row |= dict.fromkeys(numbers, _draw_split(name, shares))
        return split_of_row


@dataclass(frozen=True)
class DrawnCounts:
    """The number of usable pairs that are drawn per split, and the number of groups, which messages call scenes."""

    pairs: dict[Split, int]
    groups: int

    @property
    def is_usable(self) -> bool:
        """Whether both train and test have a usable pair."""
        return self.pairs["train"] > 0 and self.pairs["test"] > 0

    def is_near(self, shares: SplitShares) -> bool:
        """Return True if the number of test pairs is close to the requested share and no requested split is empty."""
        expected_test_pairs = shares.test * sum(self.pairs.values())
        is_near = abs(self.pairs["test"] - expected_test_pairs) <= max(1, TOLERANCE * expected_test_pairs)
        return self.is_usable and is_near and (self.pairs["val"] > 0 or not shares.val)

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {split}" for split, count in self.pairs.items())
        pairs = "pair" if sum(self.pairs.values()) == 1 else "pairs"
        return f"{counts} {pairs} of {format_count(self.groups, 'scene')}"


def draw_splits(root: Path, rows: Sequence[Row], shares: SplitShares, notes: list[str]) -> Iterator[Row]:
    """Yield the rows with their drawn splits, and add a note with the number of pairs per split.

    Args:
        rows: all rows of the table, including those that cannot be read.
        notes: the list to which the note is added.

    Raises:
        DataError: the test or training split gets no usable pair.
    """
    groups = PairGroups.from_rows(rows)
    splits = groups.draw(shares)
    counts = _count_drawn_pairs(rows, splits, groups)
    if sum(counts.pairs.values()) and not counts.is_usable:
        draw_fields = {
            "shares": describe_shares(shares),
            "pairs": counts.pairs,
            "groups": counts.groups,
            "counts": str(counts),
        }
        proposal = propose_shares(rows, shares)
        if proposal is None:
            raise DataError("datasets.too_few_scenes_to_draw", path=root, **draw_fields)
        raise DataError(
            "datasets.draw_leaves_split_empty",
            path=root,
            **draw_fields,
            proposed_shares=describe_shares(proposal.shares),
            proposed_counts=str(proposal.counts),
        )
    notes.append(f"split: {{{describe_shares(shares)}}} draws {counts}")
    for number, row in enumerate(rows):
        yield replace(row, split=splits.get(number))


@dataclass(frozen=True)
class SplitProposal:
    """Shares and a seed that suit a table, and the numbers of pairs that they draw."""

    shares: SplitShares
    counts: DrawnCounts


def propose_shares(rows: Sequence[Row], shares: SplitShares) -> SplitProposal | None:
    """Return the shares with the first seed that draws about the requested number of test pairs.

    Return None if none of the first `SEEDS_TO_TRY` seeds does.
    """
    groups = PairGroups.from_rows(rows)
    for seed in range(SEEDS_TO_TRY):
        proposed_shares = shares.model_copy(update={"seed": seed})
        counts = _count_drawn_pairs(rows, groups.draw(proposed_shares), groups)
        if counts.is_near(proposed_shares):
            return SplitProposal(proposed_shares, counts)
    return None


def describe_shares(shares: SplitShares) -> str:
    """Return the shares in the notation of an entry, without braces."""
    parts = [f"test: {shares.test:g}"]
    if shares.val:
        parts.append(f"val: {shares.val:g}")
    if shares.seed:
        parts.append(f"seed: {shares.seed}")
    return ", ".join(parts)


def _count_drawn_pairs(rows: Sequence[Row], splits: Mapping[int, Split], groups: PairGroups) -> DrawnCounts:
    """Return the number of usable pairs in each drawn split. Rows with a fault or without a caption do not count."""
    usable_numbers = [number for number, row in enumerate(rows) if not row.fault and not row.without_caption]
    counts = Counter(splits[number] for number in usable_numbers if number in splits)
    pairs: dict[Split, int] = {"train": counts["train"], "val": counts["val"], "test": counts["test"]}
    assert list(pairs) == list(SPLITS)
    return DrawnCounts(pairs=pairs, groups=len(groups.rows))


def _nodes_of(row: Row) -> list[str]:
    """Return a text for the scene and for each image of a row. Rows with a common text are in the same group."""
    nodes = [f"scene {row.scene}"] if isinstance(row.scene, str) else []
    for image in map(_image_key, row.images):
        if image:
            nodes.append(f"image {image}")
    return nodes


def _image_key(image: Any) -> str | None:
    """Return the digest of an embedded image or the normalised path of a file, or None if there is no image."""
    if isinstance(image, Embedded):
        return image.name
    return posixpath.normpath(image) if isinstance(image, str) and image else None


def _group_name(rows: Sequence[Row]) -> str:
    """Return the text whose hash decides the split of a group.

    This is one of the group's scenes. For groups without scenes, it is one of the images before, or else any image.
    Among several, the scene or image with the smallest hash is chosen, because additional pairs seldom change it.
    """
    # If no column names scenes, the scene of a row is its own name or that of its images
    scenes = [
        f"scene {row.scene}"
        for row in rows
        if isinstance(row.scene, str) and row.scene not in (row.name, row.image_set)
    ]
    keys_of_images_before = [_image_key(row.images[0]) for row in rows if row.images]
    images_before = [f"image {key}" for key in keys_of_images_before if key]
    names = scenes or images_before or list(chain.from_iterable(map(_nodes_of, rows)))
    return min(names, key=lambda name: (_digest(name), name))


def _draw_split(name: str, shares: SplitShares) -> Split:
    """Return the split of a group. The hash of its name is a number from 0 to 1, which is compared with the shares."""
    number = int.from_bytes(_digest(name, str(shares.seed).encode()), "big") / 2**64
    if number < shares.test:
        return "test"
    return "val" if number < shares.test + shares.val else "train"


def _digest(text: str, key: bytes = b"") -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=key).digest()
