"""Splits that are drawn at random: they depend on scenes and the seed, but not on the order of the rows."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from m3diff.datasets import omnidiff, pairs
from m3diff.datasets.drawn_split import SplitShares, describe_shares, draw_splits, propose_shares
from m3diff.datasets.spec import Row
from m3diff.records.errors import DataError, Fault
from m3diff.settings.rules import faults_of_options
from tests.errors import raises
from tests.layouts import run_ingest, save_picture

SHARES = {"test": 0.15, "val": 0.1}


def pair(number: int, **fields: Any) -> dict[str, Any]:
    return {"before": f"a/{number}.png", "after": f"b/{number}.png", "captions": f"it fell {number}"} | fields


def write(root: Path, rows: list[dict[str, Any]]) -> Path:
    root.mkdir(exist_ok=True)
    (root / "pairs.json").write_text(json.dumps(rows))
    return root


def read(root: Path, rows: list[dict[str, Any]], split: Any = SHARES, **options: Any) -> dict[str, str]:
    """Read a table and return the split of each pair by its image before."""
    read_rows = pairs.read(write(root, rows), manifest="pairs.json", split=split, **options)
    return {row.images[0]: row.split for row in read_rows}


def test_shares_hold_on_average_and_every_pair_has_a_split(tmp_path):
    counts = Counter(read(tmp_path, [pair(number) for number in range(4_000)]).values())
    assert counts["test"] == pytest.approx(600, abs=80)
    assert counts["val"] == pytest.approx(400, abs=70)
    assert counts.total() == 4_000


def test_the_order_of_rows_changes_no_split(tmp_path):
    rows = [pair(number, scene=f"s{number // 3}") for number in range(60)]
    shuffled = random.Random(0).sample(rows, len(rows))
    assert read(tmp_path, rows) == read(tmp_path, shuffled)


def test_pairs_of_other_scenes_change_no_split(tmp_path):
    rows = [pair(number) for number in range(60)]
    before = read(tmp_path, rows)
    other_pairs = [pair(number) for number in range(60, 200)]
    after = read(tmp_path, [*rows, *other_pairs])
    assert {name: after[name] for name in before} == before


def test_more_pairs_of_one_image_before_or_one_scene_change_no_split(tmp_path):
    rows = [pair(number) for number in range(60)]
    before = read(tmp_path, rows)
    edits = [pair(number, after=f"c/{number}.png", captions="it broke") for number in range(60)]
    assert read(tmp_path, [*rows, *edits]) == before
    scenes = [pair(number, scene=f"s{number}") for number in range(60)]
    before = read(tmp_path, scenes)
    other_pairs = [pair(number + 100, scene=f"s{number}") for number in range(60)]
    after = read(tmp_path, [*scenes, *other_pairs])
    assert {name: after[name] for name in before} == before


def test_a_larger_share_keeps_the_test_pairs(tmp_path):
    rows = [pair(number) for number in range(200)]
    small = {name for name, split in read(tmp_path, rows, {"test": 0.1}).items() if split == "test"}
    large = {name for name, split in read(tmp_path, rows, {"test": 0.3}).items() if split == "test"}
    assert small < large


def test_another_seed_draws_other_pairs(tmp_path):
    rows = [pair(number) for number in range(60)]
    assert read(tmp_path, rows) != read(tmp_path, rows, SHARES | {"seed": 1})


def test_the_splits_of_these_names_are_the_same_for_ever(tmp_path):
    splits = read(tmp_path, [pair(number) for number in range(40)])
    assert [name for name, split in splits.items() if split == "test"] == FROZEN_TEST
    assert [name for name, split in splits.items() if split == "val"] == FROZEN_VAL


FROZEN_TEST = ["a/11.png", "a/15.png", "a/39.png"]
FROZEN_VAL = ["a/22.png", "a/30.png"]

TOGETHER = {
    "one image before": lambda number: {"before": f"a/{number // 4}.png"},
    "one image after": lambda number: {"after": f"b/{number // 4}.png"},
    "a chain of images": lambda number: {
        "before": f"a/{number // 4}-{number % 4}.png",
        "after": f"a/{number // 4}-{number % 4 + 1}.png",
    },
    "a path in another spelling": lambda number: {"before": f"a/{'./' * (number % 4)}{number // 4}.png"},
    "one scene": lambda number: {"scene": f"s{number // 4}"},
}


@pytest.mark.parametrize("shared", TOGETHER.values(), ids=TOGETHER)
def test_pairs_that_share_an_image_or_a_scene_share_a_split(tmp_path, shared):
    rows = [pair(number, id=str(number), **shared(number)) for number in range(400)]
    drawn = pairs.read(write(tmp_path, rows), manifest="pairs.json", split=SHARES)
    groups: dict[int, set[str]] = {}
    for row in drawn:
        groups.setdefault(int(row.name) // 4, set()).add(row.split)
    assert [group for group, splits in groups.items() if len(splits) > 1] == []
    assert {split for splits in groups.values() for split in splits} == {"train", "val", "test"}


def test_a_scene_and_an_image_join_two_groups(tmp_path):
    rows = [pair(n, id=str(n), scene=f"s{n // 2}", before=f"a/{(n + 1) // 2}.png") for n in range(40)]
    with raises(DataError, "datasets.too_few_scenes_to_draw", path=tmp_path, groups=1):
        list(pairs.read(write(tmp_path, rows), manifest="pairs.json", split=SHARES))


def test_a_row_that_cannot_be_read_is_in_no_count_and_has_no_split(tmp_path):
    rows = [*(pair(number) for number in range(60)), {"captions": "it fell"}]
    drawn = list(pairs.read(write(tmp_path, rows), manifest="pairs.json", split=SHARES))
    (broken,) = [row for row in drawn if row.fault]
    assert broken.split is None
    assert broken.fault == Fault("datasets.missing_value", key="before, after")


def test_ingest_draws_the_splits_and_says_how_many(tmp_path, capsys):
    root = write(tmp_path / "raw", [pair(number) for number in range(20)])
    for number in range(20):
        save_picture(root / f"a/{number}.png", number)
        save_picture(root / f"b/{number}.png", number, 90)
    report = run_ingest(root, "pairs", "own", manifest="pairs.json", split={"test": 0.3, "val": 0.2})
    assert {*report.pairs} == {"train", "val", "test"}
    assert sum(report.pairs.values()) == 20
    assert f"{report.pairs['train']} train, {report.pairs['val']} val, {report.pairs['test']} test" in (
        capsys.readouterr().out
    )


def test_a_table_of_omnidiffs_form_draws_them_too(tmp_path):
    root = write(tmp_path, [pair(number) for number in range(100)])
    splits = {row.split for row in omnidiff.read(root, manifest="pairs.json", split=SHARES)}
    assert splits == {"train", "val", "test"}


CONFLICTS = {
    "a column is named": ({"columns": {"split": "part"}}, pair(0, part="train"), "columns", ""),
    "splits are named": ({"splits": {"dev": "val"}}, pair(0), "splits", ""),
    "the table has the documented column": ({}, pair(0, split="test"), "column_split", "pairs.json, record 0"),
}


@pytest.mark.parametrize(("options", "row", "code", "file"), CONFLICTS.values(), ids=CONFLICTS)
def test_splits_are_not_drawn_where_the_table_names_them(tmp_path, options, row, code, file):
    with raises(DataError, f"datasets.draw_beside_{code}", path=tmp_path / file):
        read(tmp_path, [row], **options)


def test_splits_are_not_drawn_where_each_has_a_file(tmp_path):
    with raises(DataError, "datasets.draw_beside_manifest", path=tmp_path):
        pairs.read(tmp_path, manifest={"train": "a.json"}, split=SHARES)


def test_a_column_split_that_is_none_is_passed_over(tmp_path):
    rows = [pair(number, split=f"hair {number}") for number in range(60)]
    assert {*read(tmp_path, rows, columns={"split": None}).values()} == {"train", "val", "test"}


@pytest.mark.parametrize(
    "shares",
    [{"test": 1.0}, {"test": 0.0}, {"test": 0.9, "val": 0.1}, {"val": 0.1}, {"test": -1}, {"tset": 0.1}],
    ids=str,
)
def test_shares_that_leave_a_split_empty_are_refused_by_parameters_and_reader(tmp_path, shares):
    faults = list(faults_of_options("ingest.datasets.own", "pairs", {"split": shares}))
    assert faults
    assert all(fault.fields["key"].startswith("ingest.datasets.own.options.split") for fault in faults)
    with raises(DataError, "datasets.invalid_shares"):
        read(tmp_path, [pair(0)], shares)


def test_shares_that_leave_nothing_to_train_are_named():
    with pytest.raises(ValidationError) as refused:
        SplitShares(test=0.75, val=0.25)
    (fault,) = refused.value.errors()
    assert fault["ctx"]["error"].fault == Fault("datasets.no_share_left_to_train", value=1.0)


def test_a_fault_of_shares_is_listed_with_its_key(tmp_path):
    with raises(DataError, "datasets.invalid_shares") as refused:
        read(tmp_path, [pair(0)], {"test": 0.2, "tset": 0.1})
    (cause,) = refused.value.fields["causes"]
    assert cause.startswith("tset: ")


def test_a_split_by_name_and_by_shares_are_both_parameters():
    for split in ("train", SHARES, SHARES | {"seed": 3}):
        assert list(faults_of_options("ingest.datasets.own", "pairs", {"split": split})) == []


def as_rows(count: int, before: str = "a/{}.png") -> list[Row]:
    sides = [(before.format(number), f"b/{number}.png") for number in range(count)]
    return [
        Row(name=f"{a}|{b}", split=None, scene=f"{a}|{b}", images=(a, b), references=["it fell"], source="")
        for a, b in sides
    ]


def test_shares_that_draw_no_test_pair_are_refused_with_a_seed_that_draws_some():
    rows = as_rows(8)
    shares = SplitShares(test=0.15)
    empty = next(seed for seed in range(100) if "test" not in drawn(rows, shares.model_copy(update={"seed": seed})))
    with raises(DataError, "datasets.draw_leaves_split_empty", path=Path("own")) as refused:
        list(draw_splits(Path("own"), rows, shares.model_copy(update={"seed": empty}), []))
    proposal = propose_shares(rows, shares)
    assert refused.value.fields["pairs"]["test"] == 0
    assert refused.value.fields["proposed_shares"] == describe_shares(proposal.shares)
    assert refused.value.fields["proposed_counts"] == str(proposal.counts)
    assert proposal.counts.pairs["test"] > 0


def drawn(rows: list[Row], shares: SplitShares) -> set[str | None]:
    try:
        return {row.split for row in draw_splits(Path("own"), rows, shares, [])}
    except DataError:
        return set()


def test_nothing_is_proposed_for_pairs_that_all_share_an_image():
    assert propose_shares(as_rows(40, before="a/0.png"), SplitShares(test=0.15, val=0.1)) is None


def test_a_proposal_draws_about_as_many_test_pairs_as_asked_for():
    proposal = propose_shares(as_rows(60), SplitShares(test=0.15, val=0.1))
    assert 4 <= proposal.counts.pairs["test"] <= 14
    assert proposal.counts.pairs["val"] > 0
