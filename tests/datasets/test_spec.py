"""The list of datasets: each module defines the layout, licence, counts and protocols of one dataset."""

import re
import sys
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
import yaml

from m3diff.datasets import DATASETS, clevr_change, omnidiff
from m3diff.datasets.spec import UNSTATED_LICENCE, Permission, Protocol, check_licence
from m3diff.records.errors import DataError
from m3diff.scoring.published import PUBLISHED_SCORES
from m3diff.stages.convert.stage import PAPER_DATASETS, PAPER_SAMPLES, published_mixture_counts
from tests.errors import raises
from tests.layouts import write_clevr

USES = ("train", "redistribute", "show")
OWN_READERS = ("pairs", "sidecar")  # of the user's own pairs
ANSWERS = dict.fromkeys(("minichange", "minichange_images", *OWN_READERS), "yes")  # of the licence to each use
ANSWERS |= dict.fromkeys(("birds_to_words", "changechat", "emu_edit", "magicbrush", "nlvr2", "syned"), "conditions")
ANSWERS |= dict.fromkeys(("llava_instruct", "llava_pretrain"), "conditions")
UNSTATED = ("clevr_change", "clevr_dc", "iedit", "levir_cc", "omnidiff", "rsrcc", "spot_the_diff")
ANSWERS |= dict.fromkeys(UNSTATED, "unstated")
ANSWERS_TO_A_USE = {("changechat", "redistribute"): "unstated"}  # the images are LEVIR-CC's


def test_the_list_is_complete_and_each_entry_is_its_file_s_and_frozen():
    files = [path for path in Path("components/datasets").rglob("*.py") if "\nSPEC = " in path.read_text()]
    assert set(DATASETS) == {path.parent.name if path.stem == "__init__" else path.stem for path in files}
    for name, spec in DATASETS.items():
        assert spec is sys.modules[f"m3diff.datasets.{name}"].SPEC
        for value in (spec, spec.licence, spec.licence.train, *spec.published, *spec.protocols):
            with pytest.raises(FrozenInstanceError):
                setattr(value, fields(value)[0].name, "other")
    assert len({spec.files for spec in DATASETS.values()}) == len(DATASETS)
    assert [name for name, spec in DATASETS.items() if spec.grammar and spec.generate] == ["minichange"]
    assert {name: spec.never_train for name, spec in DATASETS.items() if spec.never_train} == {"magicbrush": ("val",)}


@pytest.mark.parametrize("name", DATASETS)
def test_every_docstring_gives_page_and_licence_and_every_permission_its_reason(name):
    spec = DATASETS[name]
    docstring = sys.modules[f"m3diff.datasets.{name}"].__doc__ or ""
    if name not in ("minichange", *OWN_READERS):
        assert f"Page: {spec.page}" in docstring
        assert re.search(
            rf"not\s+state\s+a\s+licence|no\s+licence|[Ll]icence\s+is\s+unknown|{re.escape(spec.licence.name)}",
            docstring,
        )
    assert (spec.licence is UNSTATED_LICENCE) == (ANSWERS[name] == "unstated")
    assert (spec.licence.url is None) == (spec.licence is UNSTATED_LICENCE or name in OWN_READERS)
    for use in USES:
        permission = getattr(spec.licence, use)
        assert permission.answer == ANSWERS_TO_A_USE.get((name, use), ANSWERS[name])
        assert len(permission.reason) > 10


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("answer", ["yes", "conditions", "unstated", "no"])
def test_what_a_licence_excludes_is_refused_unless_it_is_asked_for(answer, use, override):
    spec = DATASETS["minichange"]
    spec = replace(spec, licence=replace(spec.licence, name="L1", **{use: Permission(answer, "because")}))
    notice = f"MiniChange (licence: L1): {use}: because"
    is_refused = not override and (answer == "no" or (answer == "unstated" and use == "redistribute"))
    if is_refused:
        refusal = {"dataset": "MiniChange", "licence": "L1", "use": use, "reason": "because"}
        with raises(DataError, "datasets.licence_refuses_use", **refusal):
            check_licence(spec, use, override)
    else:
        assert check_licence(spec, use, override) == (None if answer == "yes" else notice)


def test_every_task_is_one_of_the_questions_file():
    tasks = {name: spec.task for name, spec in DATASETS.items() if spec.task != "difference"}
    special_tasks = {"birds_to_words": "birds", "changechat": "changechat", "nlvr2": "statement", "omnidiff": "detail"}
    assert tasks == special_tasks | dict.fromkeys(("emu_edit", "iedit", "magicbrush", "syned"), "edit")
    assert {"difference", *tasks.values()} <= yaml.safe_load(Path("profiles/questions.yaml").read_text()).keys()


def test_published_pairs_and_references_of_every_part():
    parts = {part.part: (part.train, part.val, part.test) for spec in DATASETS.values() for part in spec.published}
    pairs_and_references = {}
    for name, counts in parts.items():
        pairs_and_references[name] = tuple((count.pairs, count.references) for count in counts)
    assert pairs_and_references == {
        "birds_to_words": ((2_685, 12_890), (325, 1_556), (337, 1_604)),
        "changechat": ((6_815, 87_935), (0, 0), (1_929, 28_746)),
        "clevr_change": ((67_660, None), (3_976, None), (7_970, None)),
        "clevr_dc": ((40_800, None), (2_400, None), (4_800, None)),
        "emu_edit": ((0, 0), (3_589, 3_589), (2_022, 2_022)),
        "iedit": ((3_061, 3_061), (383, 1_149), (495, 1_485)),
        "levir_cc": ((6_815, 34_075), (1_333, 6_665), (1_929, 9_645)),
        "llava_instruct": ((665_298, 665_298), (0, 0), (0, 0)),
        "llava_pretrain": ((558_128, 558_128), (0, 0), (0, 0)),
        "omnidiff_real": ((7_007, 7_007), (799, 799), (803, 803)),
        "omnidiff_render": ((5_445, 5_445), (777, 777), (767, 767)),
        "rsrcc": ((6_417, 87_016), (1_260, 17_116), (1_826, 21_999)),
        "spot_the_diff": ((8_566, 17_676), (1_493, 3_310), (1_270, 2_107)),
        "syned": ((3_050, 3_050), (539, 539), (2_022, 10_053)),
    }
    assert {name: spec.references for name, spec in DATASETS.items() if spec.references} == {"clevr_change": 493_735}
    assert omnidiff.SPEC.part("omnidiff_render") is omnidiff.RENDER
    assert clevr_change.SPEC.part("mine") is clevr_change.PUBLISHED, "the only one by any name"
    assert omnidiff.SPEC.part("mine") is DATASETS["pairs"].part("pairs") is None


def test_the_paper_s_mixture_is_the_official_training_splits():
    assert published_mixture_counts() == {
        "omnidiff_real": {"train": (7_007, 7_007), "train_val": (7_806, 7_806)},
        "omnidiff_render": {"train": (5_445, 5_445), "train_val": (6_222, 6_222)},
        "spot_the_diff": {"train": (8_566, 17_623), "train_val": (10_059, 20_927)},
        "iedit": {"train": (3_061, 3_061), "train_val": (3_444, 4_210)},
        "birds_to_words": {"train": (2_685, 12_890), "train_val": (3_010, 14_446)},
        "clevr_change": {"train": (67_660, 419_640), "train_val": (71_636, 444_300)},
        "clevr_dc": {"train": (40_800, None), "train_val": (43_200, None)},
    }
    assert list(published_mixture_counts()) == list(PAPER_DATASETS)
    assert round(sum(count["train_val"][0] for count in published_mixture_counts().values()), -3) == 145_000
    assert PAPER_SAMPLES == 896_000


def protocols_by_name() -> dict[tuple[str, str], Protocol]:
    """Return all protocols by the names of their dataset and protocol."""
    protocols = {}
    for name, spec in DATASETS.items():
        for protocol in spec.protocols:
            protocols[name, protocol.name] = protocol
    return protocols


PROTOCOLS = protocols_by_name()
CLEVR_CHANGE_TYPES = ("color", "material", "add", "drop", "move")


def test_every_dataset_names_each_of_its_protocols_once():
    assert len(PROTOCOLS) == sum(len(spec.protocols) for spec in DATASETS.values()) == 41


@pytest.mark.parametrize(("dataset", "name"), PROTOCOLS)
def test_a_protocol_without_a_selection_scores_the_published_test_pairs(dataset, name):
    protocol = PROTOCOLS[dataset, name]
    published = DATASETS[dataset].part(protocol.part or dataset)
    assert protocol.ranking_score in PUBLISHED_SCORES
    assert (protocol.source is None) == (protocol.published_pairs is None)
    if protocol.ids == ".*" and not protocol.change_types and not protocol.kinds:
        test_records = published and (published.test.questions or published.test.pairs)
        assert protocol.published_pairs == (test_records if protocol.source else None)


def test_datasets_without_published_scores_have_protocols_of_this_project():
    datasets_with_source = {dataset for (dataset, _), protocol in PROTOCOLS.items() if protocol.source}
    names = {"emu_edit", "llava_instruct", "llava_pretrain", "magicbrush", "minichange", "minichange_images"}
    assert set(DATASETS) - datasets_with_source == names | {*OWN_READERS}


def test_the_ids_of_clevr_change_select_pairs_with_and_without_a_change(tmp_path):
    names = [row.name for row in clevr_change.read(write_clevr(tmp_path)) if row.split == "test"]
    assert names[:2] == ["000001.png", "000001.png_n"]
    expected_names = {"total": names, "semantic": names[::2], "distractor": names[1::2]}
    for name, expected in expected_names.items():
        pattern = PROTOCOLS["clevr_change", name].ids
        assert [pair_name for pair_name in names if re.fullmatch(pattern, pair_name)] == expected


def test_protocols_of_subsets_have_the_published_numbers_of_pairs():
    subset_sizes = {}
    for (_, name), protocol in PROTOCOLS.items():
        if protocol.published_pairs and (protocol.change_types or protocol.ids != ".*"):
            subset_sizes[name] = protocol.published_pairs
    sizes_by_type = dict.fromkeys(CLEVR_CHANGE_TYPES, 797)
    subset_sizes_of_names = {"semantic": 3_985, "distractor": 3_985, "change": 964, "no_change": 965}
    subset_sizes_of_names |= {"test1_questions": 6_967, "test2_questions": 6_970}
    assert subset_sizes == sizes_by_type | subset_sizes_of_names
    types = {protocol.change_types for protocol in PROTOCOLS.values() if protocol.change_types}
    assert types == {(name,) for name in (*CLEVR_CHANGE_TYPES, "change", "none")}


def test_protocols_of_changechat_have_the_numbers_of_records_of_their_kinds():
    sizes = {}
    for (dataset, name), protocol in PROTOCOLS.items():
        if protocol.kinds and dataset == "changechat":
            sizes[name] = protocol.published_pairs
    pairs = dict.fromkeys(("caption", "binary", "count", "localisation"), 1_929)
    assert sizes == pairs | {"change": 964, "no_change": 965, "open": 7_527}
    rows = dict(sizes) | {"dialogue": 1_929}
    assert sum(count for name, count in rows.items() if "change" not in name) == 17_172, "rows of the test files"


def test_only_multi_change_of_spot_the_diff_joins_and_cuts_references():
    keys = [key for key, protocol in PROTOCOLS.items() if protocol.references != "all" or protocol.max_words]
    assert keys == [("spot_the_diff", "multi-change")]
    protocol = PROTOCOLS["spot_the_diff", "multi-change"]
    assert protocol.references == "joined"
    assert protocol.max_words == 60


def test_protocols_that_split_words_at_spaces():
    keys = {key for key, protocol in PROTOCOLS.items() if protocol.tokenizer == "whitespace"}
    assert keys == {
        ("birds_to_words", "whitespace"),
        *(("levir_cc", name) for name in ("total", "change", "no_change")),
    }


def test_the_main_protocol_of_each_dataset():
    main_protocols = {name: spec.protocols[0].name for name, spec in DATASETS.items()}
    expected = dict.fromkeys(DATASETS, "test")
    expected |= {"changechat": "caption", "omnidiff": "real", "rsrcc": "published", "spot_the_diff": "single-change"}
    expected |= dict.fromkeys(("clevr_change", "levir_cc", "minichange"), "total")
    assert main_protocols == expected
