"""The one list: every dataset's file owns its layout, licence, counts and protocols; a licence is obeyed."""

import re
import sys
from collections import Counter
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
import yaml

from m3diff.datasets import DATASETS, clevr_change, omnidiff
from m3diff.datasets.spec import UNSTATED, Permission, check_licence
from m3diff.records.errors import DataError
from m3diff.stages.convert.mixture import PAIRS, SAMPLES, SOURCES, training_counts
from tests.layouts import write_clevr

REAL = Path("../shared/real")

USES = ("train", "redistribute", "show")
FACTS = {  # answers to train, redistribute and show; part of a row or entry as it is in the annotation files
    "birds_to_words": ("conditions", "https://www.inaturalist.org/photos/13985343 <tab>"),
    "clevr_change": ("unstated", '"CLEVR_default_000123.png": ["the tiny cylinder changed to brown"'),
    "clevr_dc": ("unstated", '"123": ["the small cyan cube has been added"'),
    "emu_edit": ("conditions", '{"instruction": "Add a goat outside the fence", "image": ..., "task": "add"'),
    "iedit": ("unstated", '"uid": "Reddit_1012"'),
    "levir_cc": (
        "unstated",
        '{"filepath": "val", "filename": "val_000001.png", "imgid": 6815, "split": "val", "changef',
    ),
    "magicbrush": (
        "conditions",
        '{"img_id": "242679", "turn_index": 1, "source_img": ..., "mask_img": ..., "instructi',
    ),
    "minichange": ("yes", '"CLEVR_default_000123.png": ["at the top the small red box turned blue"'),
    "nlvr2": ("conditions", '"label": "True", "identifier":'),
    "omnidiff": ("unstated", '{"image1": "s1/a.jpg", "image2": "s1/b.jpg", "caption": "The mug ..."'),
    "pairs": ("yes", "a/1.png,b/1.png,the lamp is out,train"),
    "spot_the_diff": ("unstated", '{"img_id": "235", "sentences": ['),
    "syned": ("conditions", "183 <INSTRUCT> Add a duck on the box of food."),
}


def test_the_list_is_complete_and_each_entry_is_its_file_s_and_frozen():
    folder = Path("components/datasets")
    files = [path for path in folder.rglob("*.py") if "\nSPEC = " in path.read_text()]
    assert set(DATASETS) == {path.parent.name if path.stem == "__init__" else path.stem for path in files}
    for name, spec in DATASETS.items():
        assert spec is sys.modules[f"m3diff.datasets.{name}"].SPEC
        for value in (spec, spec.licence, spec.licence.train, *spec.published, *spec.protocols):
            with pytest.raises(FrozenInstanceError):
                setattr(value, fields(value)[0].name, "other")
    assert all(count == 1 for count in Counter(spec.files for spec in DATASETS.values()).values())
    assert [name for name, spec in DATASETS.items() if spec.grammar] == ["minichange"]
    assert [name for name, spec in DATASETS.items() if spec.generate] == ["minichange"]
    assert {name: spec.never_train for name, spec in DATASETS.items() if spec.never_train} == {"magicbrush": ("val",)}


@pytest.mark.parametrize("name", DATASETS)
def test_every_docstring_gives_page_licence_layout_and_an_example_row(name):
    spec, (answer, example) = DATASETS[name], FACTS[name]
    told = sys.modules[f"m3diff.datasets.{name}"].__doc__ or ""
    assert example in told
    for file in spec.files:
        if name != "omnidiff":  # its layout is not known; an option names the file
            part = re.escape(file).replace("train", r"(train|\{train,val(id)?,test\})").replace("valid", r"\S*valid\S*")
            assert re.search(part, told) or "{train,val" in told, file
    if name not in ("pairs", "minichange"):
        assert f"Page: {spec.page}" in told
        wanted = "states no" if spec.licence is UNSTATED else spec.licence.name
        assert wanted in told or "Licence unknown" in told
    assert (spec.licence.url is None) == (answer == "unstated" or name == "pairs")
    for use in USES:
        permission = getattr(spec.licence, use)
        assert (permission.answer, len(permission.reason) > 10) == (answer, True)


@pytest.mark.parametrize("override", [False, True])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("answer", ["yes", "conditions", "unstated", "no"])
def test_what_a_licence_allows_is_allowed_and_what_it_excludes_refused_unless_asked_for(answer, use, override):
    spec = DATASETS["minichange"]
    spec = replace(spec, licence=replace(spec.licence, name="L1", **{use: Permission(answer, "because")}))
    notice = f"MiniChange (licence: L1): {use}: because"
    refused = not override and (answer == "no" or (answer == "unstated" and use == "redistribute"))
    if refused:
        with pytest.raises(DataError) as error:
            check_licence(spec, use, override)
        assert str(error.value).startswith(notice + "; refused: ")
        assert "--allow-unlicensed" in str(error.value)
    else:
        assert check_licence(spec, use, override) == (None if answer == "yes" else notice)


def test_every_task_is_one_of_the_questions_file():
    tasks = {name: spec.task for name, spec in DATASETS.items()}
    assert set(tasks.values()) <= set(yaml.safe_load(Path("profiles/questions.yaml").read_text()))
    assert {name: task for name, task in tasks.items() if task != "difference"} == {
        "birds_to_words": "birds",
        "emu_edit": "edit",
        "iedit": "edit",
        "magicbrush": "edit",
        "nlvr2": "statement",
        "omnidiff": "detail",
        "syned": "edit",
    }


def test_published_pairs_and_references_of_every_part():
    parts = {part.part: (part.train, part.val, part.test) for spec in DATASETS.values() for part in spec.published}
    found = {name: tuple((count.pairs, count.references) for count in counts) for name, counts in parts.items()}
    assert found == {
        "birds_to_words": ((2_685, 12_890), (325, 1_556), (337, 1_604)),
        "clevr_change": ((67_660, None), (3_976, None), (7_970, None)),
        "clevr_dc": ((40_800, None), (2_400, None), (4_800, None)),
        "emu_edit": ((0, 0), (3_589, 3_589), (2_022, 2_022)),
        "iedit": ((3_061, 3_061), (383, 1_149), (495, 1_485)),
        "levir_cc": ((6_815, 34_075), (1_333, 6_665), (1_929, 9_645)),
        "omnidiff_real": ((7_007, 7_007), (799, 799), (803, 803)),
        "omnidiff_render": ((5_445, 5_445), (777, 777), (767, 767)),
        "spot_the_diff": ((8_566, 17_676), (1_493, 3_310), (1_270, 2_107)),
        "syned": ((3_050, 3_050), (539, 539), (2_022, 10_053)),
    }


def test_the_row_of_each_dataset_is_that_of_the_paper_s_table():
    """OmniDiff, Table 1: pairs, words a caption, share of captions over 20 words, written by people, distractors."""
    rows = {name: spec.table for name, spec in DATASETS.items() if spec.table}
    assert {name: (t.pairs, t.words, t.over_20, t.human, t.distractors) for name, t in rows.items()} == {
        "clevr_change": (79_606, 8, 0.0, False, True),
        "spot_the_diff": (13_192, 19, 0.19, True, False),
        "iedit": (3_939, 8, 0.02, True, False),
        "levir_cc": (10_077, 8, 0.01, True, True),
        "birds_to_words": (3_347, 32, 0.25, True, False),
        "omnidiff": (15_598, 60, 0.37, True, True),
    }


def test_a_part_is_found_by_the_dataset_s_name_and_the_only_one_by_any():
    assert omnidiff.SPEC.part("omnidiff_render") is omnidiff.RENDER
    assert omnidiff.SPEC.part("mine") is None
    assert clevr_change.SPEC.part("mine") is clevr_change.PUBLISHED
    assert DATASETS["pairs"].part("pairs") is None


def test_the_paper_s_mixture_is_the_official_training_splits():
    assert training_counts() == {
        "omnidiff_real": {"train": (7_007, 7_007), "train_val": (7_806, 7_806)},
        "omnidiff_render": {"train": (5_445, 5_445), "train_val": (6_222, 6_222)},
        "spot_the_diff": {"train": (8_566, 17_623), "train_val": (10_059, 20_927)},
        "iedit": {"train": (3_061, 3_061), "train_val": (3_444, 4_210)},
        "birds_to_words": {"train": (2_685, 12_890), "train_val": (3_010, 14_446)},
        "clevr_change": {"train": (67_660, 419_640), "train_val": (71_636, 444_300)},
        "clevr_dc": {"train": (40_800, None), "train_val": (43_200, None)},
    }
    assert list(training_counts()) == list(SOURCES)
    assert round(sum(count["train_val"][0] for count in training_counts().values()), -3) == PAIRS == 145_000
    assert SAMPLES == 896_000


def test_protocols_name_pairs_that_papers_score(tmp_path):
    for name, spec in DATASETS.items():
        assert len({protocol.name for protocol in spec.protocols}) == len(spec.protocols) >= 1
        for protocol in spec.protocols:
            published = spec.part(protocol.part or name)
            assert protocol.headline in protocol.metrics
            assert protocol.split == "test"
            if protocol.ids == ".*" and not protocol.change_types:
                assert protocol.n == (published.test.pairs if published and protocol.source else None)
            assert (protocol.source is None) == (protocol.n is None)
    own = {name for name, spec in DATASETS.items() if not any(protocol.source for protocol in spec.protocols)}
    assert own == {"emu_edit", "magicbrush", "minichange", "nlvr2", "pairs"}
    names = [row.name for row in clevr_change.read(write_clevr(tmp_path)) if row.split == "test"]
    by_name = {protocol.name: protocol for protocol in clevr_change.SPEC.protocols}
    for name, ids in (("total", names), ("semantic", names[::2]), ("distractor", names[1::2])):
        assert [each for each in names if re.fullmatch(by_name[name].ids, each)] == ids
    assert names[:2] == ["000001.png", "000001.png_n"]
    counts = {name: protocol.n for name, protocol in by_name.items()}
    halves = {"total": 7_970, "semantic": 3_985, "distractor": 3_985}
    assert counts == halves | dict.fromkeys(("color", "material", "add", "drop", "move"), 797)
    parts = [(protocol.part, protocol.n) for protocol in omnidiff.SPEC.protocols]
    assert parts == [("omnidiff_real", 803), ("omnidiff_render", 767)]


def test_the_settings_of_each_protocol_that_is_not_the_plain_one():
    """References as they are, PTB, no cut; SPICE where papers print it."""
    protocols = {(name, one.name): one for name, spec in DATASETS.items() for one in spec.protocols}
    joined = {key for key, one in protocols.items() if (one.references, one.max_words) == ("joined", 60)}
    assert joined == {("spot_the_diff", "multi-change")}
    assert {key for key, one in protocols.items() if one.tokenizer == "whitespace"} == {
        ("birds_to_words", "whitespace"),
        *(("levir_cc", name) for name in ("total", "change", "no_change")),
    }
    with_spice = {name for (name, _), one in protocols.items() if "SPICE" in one.metrics}
    assert with_spice == {"spot_the_diff", "iedit", "clevr_change", "clevr_dc"}
    assert {name: one.n for (reader, name), one in protocols.items() if reader == "levir_cc"} == {
        "total": 1_929,
        "change": 964,
        "no_change": 965,
    }
    types = {one.change_types for one in protocols.values() if one.change_types}
    assert types == {(name,) for name in ("color", "material", "add", "drop", "move", "change", "none")}
    headlines = {name: spec.protocols[0].name for name, spec in DATASETS.items()}
    assert {name: one for name, one in headlines.items() if one != "test"} == {
        "clevr_change": "total",
        "levir_cc": "total",
        "minichange": "total",
        "omnidiff": "real",
        "spot_the_diff": "single-change",
    }


def test_the_list_is_light_to_import():
    import subprocess

    heavy = "{'torch', 'transformers', 'polars', 'pandas', 'PIL', 'scipy'}"
    told = subprocess.run(
        [sys.executable, "-c", f"import sys, m3diff.datasets; print(sorted({heavy} & set(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == "[]"
