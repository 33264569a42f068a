"""The pairs and references of an epoch: a mixture written by hand, counted; published counts with
convert's weights and caps; and both split by split against a mixture of convert that was counted by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from m3diff.commands.plan.plan import (
    Run,
    Use,
    Workload,
    counted_workload,
    find_workload,
    make_plan,
    print_plan,
    published_workload,
)
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Published, SplitCount
from m3diff.settings.section import ParamsError
from m3diff.stages.convert.stage import ConvertReport, convert
from tests.commands.plan.conftest import (
    IMAGE_TOKENS,
    PAPER,
    ToySettings,
    WordProcessor,
    compute_section,
    convert_section,
    entries,
    train_section,
    write_mixture,
)
from tests.layouts import make_entry, run_ingest, run_validate, save_picture, write_birds, write_json
from tests.toy import REPOSITORY

BOTH = ("train", "val")
PAPERS = [f"{name}={reader}" for name, reader in PAPER.items()]


def counted(folder: Path, processor: Any = None, **mixture: Any) -> Workload:
    return counted_workload(write_mixture(folder, **mixture) / "train", processor, IMAGE_TOKENS)


def published(*readers: str, cfg: Any = None, **changes: Any) -> Workload:
    return published_workload(entries(*readers, **changes), cfg or convert_section())


def test_a_mixture_is_counted_by_source_and_each_use_of_a_pair_counts(tmp_path):
    load = counted(tmp_path / "one")
    assert load.uses == [Use("a", pairs=2, references=4), Use("b", pairs=2, references=3)]
    assert (load.pairs, load.references) == (4, 7)
    assert load.sizes == {1: 2, 2: 1, 3: 1}
    assert (load.prompt_tokens, load.reference_tokens) == (29, 15)
    assert load.counted == f"{tmp_path / 'one/train'}, lengths estimated"
    assert {most: load.sequences(most) for most in (1, 2, 3, 9, None)} == {1: 7, 2: 5, 3: 4, 9: 4, None: 4}
    rows = [("a/1", "a", "what", "one"), ("a/1", "a", "what", "two")]
    assert counted(tmp_path / "two", rows=rows).sizes == {2: 1}, "a pair whose samples lie in two shards is one pair"


def test_lengths_are_those_of_the_tokenizer_prompts_by_pair_and_references_each(tmp_path):
    load = counted(tmp_path, WordProcessor())
    assert load.prompt_tokens == (3 + 5 + 3 + 3) / 4  # words and one more, without the images
    assert load.reference_tokens == (4 + 3 + 2 + 2 + 4 + 6 + 2) / 7
    assert load.counted == f"{tmp_path / 'train'}, lengths by its tokenizer"


@pytest.mark.parametrize(("most", "sequences"), [(1, 70), (2, 10 + 30), (4, 10 + 15), (9, 20), (None, 20)])
def test_sequences_of_published_sums_are_full_source_by_source(most, sequences):
    uses = [Use("one", 10, 10), Use("six", 4, 34), Use("six", 6, 26)]
    assert Workload("", uses, 29, 15, {}).sequences(most) == sequences


def test_only_the_splits_that_train_are_counted_and_what_no_one_counted_is_what_the_papers_other_sources_leave():
    assert published("iedit").sources == {"iedit": (3_061, 3_061)}
    assert published("iedit", train_on=BOTH).sources == {"iedit": (3_444, 4_206)}
    each = (896_000 - (7_806 + 6_222 + 20_927 + 4_210 + 14_446 + 444_300)) / 43_200
    assert published("clevr_dc").sources["clevr_dc"] == (40_800, round(40_800 * each))


@pytest.mark.parametrize(
    ("source", "most", "pairs", "references"),
    [
        ({}, None, 2_685, 12_867),
        ({}, 2, 2_685, 5_370),
        ({"samples": "one"}, 12, 2_685, 2_685),
        ({"samples": "joined"}, 2, 2_685, 2_685),
        ({"weight": 0.5}, 12, 1_342, 6_434),
        ({"weight": 2}, 12, 5_370, 25_734),
        ({"max_pairs": 1_000, "weight": 0.5}, 12, 1_000, 4_792),
        ({"max_pairs": 1_000, "weight": 3}, 1, 3_000, 3_000),
        ({"max_pairs": 9_000}, 12, 2_685, 12_867),
    ],
)
def test_weights_and_caps_of_convert_apply_to_published_counts(source, most, pairs, references):
    cfg = convert_section(sources={"birds_to_words": source}, references_per_pair=most)
    assert published("birds_to_words", cfg=cfg).sources == {"birds_to_words": (pairs, references)}


def test_joined_references_are_as_long_as_all_of_a_pair_and_a_cap_is_shared_out_over_splits_to_the_unit():
    both = published("birds_to_words", "iedit", cfg=convert_section(sources={"birds_to_words": {"samples": "joined"}}))
    joined, single = 2_685 * 15 * 12_867 / 2_685, 3_061 * 15
    assert both.reference_tokens == pytest.approx((joined + single) / (2_685 + 3_061))
    cfg = convert_section(references_per_pair=None, sources={"birds_to_words": {"max_pairs": 999}})
    load = published("birds_to_words", cfg=cfg, train_on=BOTH)
    assert [use.pairs for use in load.uses] == [891, 108]  # of 2,685 and 325
    assert load.references == round(999 * 14_417 / 3_010)


def test_datasets_without_published_counts_are_named_and_with_none_other_the_remedy_too():
    assert published("iedit").counted == "published counts of the datasets, lengths estimated"
    load = published("mine=pairs", "iedit", "minichange")
    assert load.counted.endswith("; without mine, minichange, of which none are published")
    assert load.sources.keys() == {"iedit"}
    with pytest.raises(ParamsError, match="plan: mine, minichange: no published .*run `dvc repro convert` first"):
        published("mine=pairs", "minichange")
    untrained = entries("iedit") | entries("mine=pairs", "birds_to_words", train_on=())
    assert published_workload(untrained, convert_section()).sources.keys() == {"iedit"}
    with pytest.raises(ParamsError, match="none of iedit, mine, birds_to_words trains"):
        published_workload(untrained, convert_section(sources={"iedit": {"weight": 0}}))


def test_the_run_s_own_mixture_is_counted_where_it_is_there_and_the_published_counts_where_not(tmp_path):
    def find(run: Any, folder: Path = tmp_path / "mixture", *left_out: str) -> Workload:
        return find_workload(folder, run, convert_section(), None, IMAGE_TOKENS, left_out)

    (tmp_path / "empty/train").mkdir(parents=True)
    for folder in (tmp_path / "none", tmp_path / "empty"):
        assert find(entries("iedit"), folder).sources.keys() == {"iedit"}
    mixture = write_mixture(tmp_path / "mixture")
    whole = find(entries("a=pairs", "b=pairs", "c=pairs"))
    assert whole.references == 7
    rest = find(entries("a=pairs", "b=pairs"), mixture, "b")
    assert (rest.sources, rest.counted) == ({"a": whole.sources["a"]}, whole.counted), "b is of another phase"
    assert find(entries("iedit", "b=pairs"), tmp_path / "none", "b").sources.keys() == {"iedit"}
    load = find(entries("iedit"))
    assert load.sources == {"iedit": (3_061, 3_061)}
    assert load.counted.endswith(f"lengths estimated; {mixture} is of another run (a, b)")
    load = find(entries("iedit", "a=pairs") | entries("b=pairs", train_on=()))
    assert load.sources.keys() == {"iedit"}
    assert "; without a, of which none are published; " in load.counted
    with pytest.raises(ParamsError, match="plan: a: no published counts"):
        find(entries("a=pairs"))


MANY = [f"car {number} left" for number in range(14)]
SPOT = {
    "train": [("1", ["a man left", "it is dark", "a man left"]), ("2", [""]), ("3", ["the suv is gone", ""])],
    "val": [("4", MANY), ("5", ["", ""]), ("6", ["it is dark"])],
    "test": [("7", ["nothing"])],
}
BIRDS = [("11", "12", "train", text) for text in ("one is red", "one is small", "one is red")]
BIRDS += [("13", "14", "val", "they differ"), ("15", "16", "test", "they are alike")]
ONE, WORDLESS = SplitCount(1, 1), {"empty": 2, "wordless": 1}
SPOTS = SplitCount(3, 6, repeated=1, **WORDLESS), SplitCount(3, 17, **WORDLESS), ONE
COUNTED = {
    "spot_the_diff": Published("spot_the_diff", "", *SPOTS),
    "birds_to_words": Published("birds_to_words", "", SplitCount(1, 3, repeated=1), ONE, ONE),
}


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both datasets on disk, their files' counts in the place of the published ones."""
    for name, counts in COUNTED.items():
        monkeypatch.setitem(DATASETS.data, name, replace(DATASETS[name], published=(counts,)))
    spot, birds = tmp_path / "spot_the_diff", tmp_path / "birds_to_words"
    (spot / "annotations").mkdir(parents=True)
    for split, pairs in SPOT.items():
        write_json(spot / f"annotations/{split}.json", [{"img_id": name, "sentences": texts} for name, texts in pairs])
        for name, _ in pairs:
            save_picture(spot / f"resized_images/{name}.png", int(name), 10)
            save_picture(spot / f"resized_images/{name}_2.png", int(name), 120)
    write_birds(birds / "birds-to-words-v1.0.tsv", BIRDS)
    for name in {name for row in BIRDS for name in row[:2]}:
        save_picture(birds / f"images/{name}.jpg", int(name), 200)
    return tmp_path


def validated(folder: Path, **train_on: Any) -> dict[str, Any]:
    """Both datasets through ingest and validate, every count of the files expected."""
    fields = {name: {"train_on": splits, "expected_pairs": "published"} for name, splits in train_on.items()}
    for name in fields:
        run_ingest(folder / name, name, name, **fields[name])
    run = {name: make_entry(name, folder / name, **fields[name]) for name in fields}
    run_validate(folder, run)
    return run


def converted(folder: Path, run: dict[str, Any], samples: str = "each") -> tuple[ConvertReport, Workload]:
    """The report of convert on them, and the workload that is planned before."""
    asked = {"questions": REPOSITORY / "profiles/questions.yaml", "references_per_pair": None}
    cfg = convert_section(**asked, sources={name: {"samples": samples} for name in run})
    return convert(cfg, run, folder / "clean", folder / "mixture"), published_workload(run, cfg)


@pytest.mark.parametrize(
    ("train_on", "cases"),
    [(["train"], {"each": (2, 3)}), (["train", "val"], {"one": (4, 4), "joined": (4, 4), "each": (4, 18)})],
    ids=["train", "train and val"],
)
def test_the_plan_counts_the_pairs_and_samples_that_convert_writes(sources, train_on, cases):
    run = validated(sources, **dict.fromkeys(COUNTED, train_on))
    for samples, spot in cases.items():
        report, load = converted(sources, run, samples)
        written = {name: (counts.pairs["train"], counts.samples["train"]) for name, counts in report.datasets.items()}
        assert load.sources == written
        assert written["spot_the_diff"] == spot
        mixture = counted_workload(sources / "mixture/train", None, IMAGE_TOKENS)
        assert mixture.sources == load.sources, "the plan after convert is the plan before"
        raw = pl.concat([pl.read_parquet(sources / f"records/{name}/records.parquet") for name in COUNTED])
        found = pl.read_parquet(sources / "mixture/train/*.parquet").join(raw, left_on="pair", right_on="id")
        counts = found.group_by("dataset", "own_split").agg(pl.col("pair").n_unique(), pl.len()).iter_rows()
        assert {(use.dataset, use.split, use.pairs, use.references) for use in load.uses} == set(counts), samples
    assert [use.published for use in load.uses] == [3, 3, 1, 1][:: 3 - len(train_on)]


def test_the_plan_prints_each_split_its_published_pairs_the_sum_and_the_papers(toy_family, tmp_path, capsys):
    compute, cfg = compute_section(), convert_section(references_per_pair=None)
    run = Run(train_section(), ToySettings(), compute, entries(*PAPERS, train_on=BOTH), cfg, tmp_path / "none")
    print_plan(make_plan(run), compute, None, 0.45)
    said = capsys.readouterr().out
    assert "\n  spot_the_diff train              8,529 pairs    17,620 references of 8,566 published pairs\n" in said
    assert "references of 40,800 published pairs; references estimated\n" in said
    assert "\n  sum                            145,336 pairs" in said
    assert "references of 145,377 published pairs\n  the paper                         145k pairs" in said
