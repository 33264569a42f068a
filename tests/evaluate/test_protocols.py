import json
from dataclasses import replace
from pathlib import Path

import pytest

from components.datasets import DATASETS
from components.datasets.spec import Protocol
from components.evaluate.protocols import group_pairs, load_specs, protocol_of
from components.records import DataError
from tests.evaluate import bench

PAIRS = bench.pairs()
EVERY = {"toy": Protocol("test", n=None)}


def test_pairs_are_grouped_by_change_type_dataset_and_number_of_changes():
    assert group_pairs(PAIRS, EVERY) == {
        "change": ["toy/0", "toy/1", "toy/2", "toy/3"],
        "distractors": ["toy/4", "toy/5"],
        "multi_change": ["toy/3"],
        "by_type/color": ["toy/0"],
        "by_type/illumination": ["toy/2"],
        "by_type/removal": ["toy/1"],
        "by_dataset/toy": [f"toy/{number}" for number in range(6)],
    }


def test_groups_stand_in_a_fixed_order_whatever_the_order_of_the_pairs():
    assert list(group_pairs(PAIRS, EVERY)) == list(group_pairs(PAIRS[::-1], EVERY))
    assert list(group_pairs(PAIRS, EVERY))[:3] == ["change", "multi_change", "distractors"]


def test_pairs_of_unknown_type_are_neither_changes_nor_distractors():
    groups = group_pairs([bench.pair("x", ["y"], [])], EVERY)
    assert groups == {"change": [], "multi_change": [], "distractors": [], "by_dataset/toy": ["toy/0"]}


def test_each_dataset_is_a_group_of_its_own():
    pairs = [PAIRS[0], replace(PAIRS[1], id="more/1", dataset="more")]
    groups = group_pairs(pairs, EVERY | {"more": Protocol("test", n=None)})
    assert (groups["by_dataset/toy"], groups["by_dataset/more"]) == (["toy/0"], ["more/1"])
    assert groups["change"] == ["toy/0", "more/1"]


def test_a_protocol_takes_the_ids_that_it_names_for_its_dataset_and_no_others():
    groups = group_pairs(PAIRS, {"toy": Protocol("even", n=3, ids="[024]")})
    assert groups["by_dataset/toy"] == ["toy/0", "toy/2", "toy/4"]
    assert len(groups["change"]) == 4
    pairs = [bench.pair("x", ["y"], [], "20")]
    assert "by_dataset/toy" not in group_pairs(pairs, {"toy": Protocol("even", n=3, ids="[024]")})


def test_the_first_protocol_for_the_datasets_part_counts():
    spec = DATASETS["omnidiff"]
    real, render = spec.protocols[0], spec.protocols[1]
    assert protocol_of(str(real.part), spec) == real
    assert protocol_of(str(render.part), spec) == render
    assert protocol_of("mine", spec) == Protocol("test", n=None)
    change = DATASETS["clevr_change"]
    assert protocol_of("mine", change) == change.protocols[0]
    assert protocol_of("mine", replace(change, protocols=(replace(change.protocols[1], split="val"),))).ids == ".*"


def test_the_reader_that_ingest_reports_says_which_dataset_it_is(tmp_path: Path):
    for name, reader in {"toy": "pairs", "mine": "iedit"}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"reader": reader}))
    assert load_specs(tmp_path, ["toy", "mine"]) == {"toy": DATASETS["pairs"], "mine": DATASETS["iedit"]}


def test_without_ingests_report_the_licence_is_unknown_and_the_run_refused(tmp_path: Path):
    with pytest.raises(
        DataError, match="toy.json: no such file, so the licence of 'toy' is unknown; run `m3diff ingest`"
    ):
        load_specs(tmp_path, ["toy"])


@pytest.mark.parametrize("content", ["{}", '{"reader": "nothing"}'])
def test_an_unknown_reader_is_named_with_those_known(content: str, tmp_path: Path):
    (tmp_path / "toy.json").write_text(content)
    with pytest.raises(
        DataError, match=r"toy.json: reader .* is unknown; known: .*clevr_change.*; run `m3diff ingest`"
    ):
        load_specs(tmp_path, ["toy"])
