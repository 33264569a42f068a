"""What an epoch holds: a mixture written by hand, counted; and published counts with convert's weights and caps."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3diff.commands.plan.plan import (
    SourceCount,
    Workload,
    count_test_pairs,
    counted_workload,
    find_workload,
    published_workload,
    unpublished_references,
)
from m3diff.settings.section import ParamsError
from m3diff.stages.ingest.params import DatasetEntry
from tests.commands.plan.conftest import IMAGE_TOKENS, WordProcessor, convert_section

PAPER = {
    "omnidiff_real": "omnidiff",
    "omnidiff_render": "omnidiff",
    "spot_the_diff": "spot_the_diff",
    "iedit": "iedit",
    "birds_to_words": "birds_to_words",
    "clevr_change": "clevr_change",
    "clevr_dc": "clevr_dc",
}
ROWS = [  # (pair, dataset, question, reference); a/1 is used twice, not in a row
    ("a/1", "a", "what changed", "the box moved"),
    ("a/1", "a", "what changed", "it moved"),
    ("a/1", "a", "what changed", "moved"),
    ("b/1", "b", "what is different here", "nothing"),
    ("a/1", "a", "what changed", "the box moved"),
    ("b/2", "b", "what changed", "the red box became blue"),
    ("b/2", "b", "what changed", "nothing"),
]


def write_mixture(folder: Path, rows: list[tuple[str, str, str, str]] = ROWS, shards: int = 2) -> Path:
    (folder / "train").mkdir(parents=True)
    size = -(-len(rows) // shards)
    for shard in range(shards):
        part = rows[shard * size : (shard + 1) * size]
        columns = [list(column) for column in zip(*part, strict=True)]
        table = pa.table(columns, names=["pair", "dataset", "question", "reference"])
        pq.write_table(table, folder / f"train/{shard:05d}.parquet")
    return folder


def entries(readers: dict[str, str] = PAPER, **changes: object) -> dict[str, DatasetEntry]:
    return {
        name: DatasetEntry.model_validate({"reader": reader, "root": "data"} | changes)
        for name, reader in readers.items()
    }


def test_a_mixture_is_counted_by_source_and_each_use_of_a_pair_counts(tmp_path):
    load = counted_workload(write_mixture(tmp_path) / "train", None, IMAGE_TOKENS)
    assert load.sources == {"a": SourceCount(pairs=2, references=4), "b": SourceCount(pairs=2, references=3)}
    assert (load.pairs, load.references, load.references_per_pair) == (4, 7, 1.75)
    assert load.sizes == {1: 2, 2: 1, 3: 1}


def test_a_pair_whose_samples_lie_in_two_shards_is_one_pair(tmp_path):
    rows = [("a/1", "a", "what", "one"), ("a/1", "a", "what", "two")]
    assert counted_workload(write_mixture(tmp_path, rows) / "train", None, IMAGE_TOKENS).sizes == {2: 1}


def test_lengths_are_those_of_the_tokenizer_prompts_by_pair_and_references_each(tmp_path):
    load = counted_workload(write_mixture(tmp_path) / "train", WordProcessor(), IMAGE_TOKENS)
    assert load.prompt_tokens == (3 + 5 + 3 + 3) / 4  # words and one more, without the images
    assert load.reference_tokens == (4 + 3 + 2 + 2 + 4 + 6 + 2) / 7
    assert load.counted == f"{tmp_path / 'train'}, lengths by its tokenizer"


def test_without_a_tokenizer_lengths_are_the_estimates_and_the_plan_says_so(tmp_path):
    load = counted_workload(write_mixture(tmp_path) / "train", None, IMAGE_TOKENS)
    assert (load.prompt_tokens, load.reference_tokens) == (29, 15)
    assert load.counted == f"{tmp_path / 'train'}, lengths estimated"


@pytest.mark.parametrize(("most", "sequences"), [(1, 7), (2, 5), (3, 4), (9, 4), (None, 4)])
def test_sequences_of_a_counted_mixture_are_those_that_training_makes(tmp_path, most, sequences):
    load = counted_workload(write_mixture(tmp_path) / "train", None, IMAGE_TOKENS)
    assert load.sequences(most) == sequences


@pytest.mark.parametrize(("most", "sequences"), [(1, 70), (2, 10 + 30), (4, 10 + 15), (9, 20), (None, 20)])
def test_sequences_of_published_sums_are_full_source_by_source(most, sequences):
    sources = {"one": SourceCount(10, 10), "six": SourceCount(10, 60)}
    assert Workload("", sources, 29, 15, {}).sequences(most) == sequences


def test_the_papers_sources_on_train_and_val_come_to_its_145k_pairs_and_896k_samples():
    load = published_workload(entries(train_on=("train", "val")), convert_section())
    assert load.pairs == 145_377 - 41  # pairs of Spot-the-Diff without a word
    assert load.references == pytest.approx(896_000 - 36, abs=20)  # less the repeats of a pair that were counted
    assert load.sources["spot_the_diff"] == SourceCount(10_018, 20_924)  # 59 of 20,986 are empty, 3 repeated
    assert load.sources["clevr_change"].references == pytest.approx(444_300, abs=10)
    assert load.counted == "published counts of the datasets, lengths estimated"
    assert (load.prompt_tokens, load.reference_tokens) == (29, 15)


def test_only_the_splits_that_train_are_counted():
    load = published_workload(entries({"iedit": "iedit"}), convert_section())
    assert load.sources == {"iedit": SourceCount(3_061, 3_061)}
    both = published_workload(entries({"iedit": "iedit"}, train_on=("train", "val")), convert_section())
    assert both.sources == {"iedit": SourceCount(3_444, 4_206)}


def test_references_that_no_one_counted_are_what_the_papers_other_sources_leave():
    known = 7_806 + 6_222 + 20_927 + 4_210 + 14_446 + 444_300
    assert unpublished_references() == pytest.approx((896_000 - known) / 43_200)
    load = published_workload(entries({"clevr_dc": "clevr_dc"}), convert_section())
    assert load.sources["clevr_dc"] == SourceCount(40_800, round(40_800 * (896_000 - known) / 43_200))


@pytest.mark.parametrize(
    ("source", "most", "pairs", "references"),
    [
        ({}, 12, 2_685, 12_867),
        ({}, None, 2_685, 12_867),
        ({}, 2, 2_685, 5_370),
        ({"samples": "one"}, 12, 2_685, 2_685),
        ({"samples": "joined"}, 2, 2_685, 2_685),
        ({"weight": 0.5}, 12, 1_342, 6_434),
        ({"weight": 2}, 12, 5_370, 25_734),
        ({"max_pairs": 1_000}, 12, 1_000, 4_792),
        ({"max_pairs": 1_000, "weight": 0.5}, 12, 1_000, 4_792),
        ({"max_pairs": 1_000, "weight": 3}, 1, 3_000, 3_000),
        ({"max_pairs": 9_000}, 12, 2_685, 12_867),
    ],
)
def test_weights_and_caps_of_convert_apply_to_published_counts(source, most, pairs, references):
    cfg = convert_section(sources={"birds_to_words": source}, references_per_pair=most)
    load = published_workload(entries({"birds_to_words": "birds_to_words"}), cfg)
    assert load.sources == {"birds_to_words": SourceCount(pairs, references)}


def test_joined_references_are_as_long_as_all_of_a_pair_together():
    cfg = convert_section(sources={"birds_to_words": {"samples": "joined"}})
    both = published_workload(entries({"birds_to_words": "birds_to_words", "iedit": "iedit"}), cfg)
    joined, single = 2_685 * 15 * 12_867 / 2_685, 3_061 * 15
    assert both.reference_tokens == pytest.approx((joined + single) / (2_685 + 3_061))


def test_datasets_without_published_counts_are_named_and_with_none_other_the_remedy_too():
    readers = {"mine": "pairs", "iedit": "iedit", "minichange": "minichange"}
    load = published_workload(entries(readers), convert_section())
    assert load.counted.endswith("; without mine, minichange, of which none are published")
    assert load.sources.keys() == {"iedit"}
    with pytest.raises(ParamsError, match="plan: mine, minichange: no published .*run `dvc repro convert` first"):
        published_workload(entries({"mine": "pairs", "minichange": "minichange"}), convert_section())


def test_a_dataset_that_does_not_train_is_not_counted_and_needs_no_count():
    sources = entries({"iedit": "iedit"}) | entries({"mine": "pairs", "birds_to_words": "birds_to_words"}, train_on=())
    assert published_workload(sources, convert_section()).sources.keys() == {"iedit"}
    weightless = convert_section(sources={"iedit": {"weight": 0}})
    with pytest.raises(ParamsError, match="none of iedit, mine, birds_to_words trains"):
        published_workload(sources, weightless)


def test_the_mixture_is_counted_where_it_is_there_and_the_published_counts_where_not(tmp_path):
    def find(names: dict[str, str], mixture: Path, **changes: object) -> Workload:
        return find_workload(mixture, entries(names, **changes), convert_section(), None, IMAGE_TOKENS)

    assert find({"iedit": "iedit"}, tmp_path).sources.keys() == {"iedit"}
    (tmp_path / "train").mkdir()
    assert find({"iedit": "iedit"}, tmp_path).sources.keys() == {"iedit"}
    mixture = write_mixture(tmp_path / "mixture")
    assert find({"a": "pairs", "b": "pairs", "c": "pairs"}, mixture).references == 7


def test_the_mixture_of_another_run_is_not_counted_and_the_plan_says_so(tmp_path):
    mixture = write_mixture(tmp_path / "mixture")
    load = find_workload(mixture, entries({"iedit": "iedit"}), convert_section(), None, IMAGE_TOKENS)
    assert load.sources == {"iedit": SourceCount(3_061, 3_061)}
    assert load.counted.endswith(f"lengths estimated; {mixture} is of another run (a, b)")
    tested = entries({"iedit": "iedit", "a": "pairs"}) | entries({"b": "pairs"}, train_on=())
    load = find_workload(mixture, tested, convert_section(), None, IMAGE_TOKENS)
    assert load.sources.keys() == {"iedit"}
    assert "; without a, of which none are published; " in load.counted
    with pytest.raises(ParamsError, match="plan: a: no published counts"):
        find_workload(mixture, entries({"a": "pairs"}), convert_section(), None, IMAGE_TOKENS)


def test_datasets_of_another_phase_are_not_counted(tmp_path: Path) -> None:
    mixture, both = write_mixture(tmp_path / "mixture"), entries({"a": "pairs", "b": "pairs"})
    whole = find_workload(mixture, both, convert_section(), None, IMAGE_TOKENS)
    rest = find_workload(mixture, both, convert_section(), None, IMAGE_TOKENS, ("b",))
    assert rest.sources == {"a": whole.sources["a"]}
    assert rest.counted.startswith(str(mixture))
    published = find_workload(tmp_path, entries({"iedit": "iedit", "b": "pairs"}), convert_section(), None, 9, ("b",))
    assert published.sources.keys() == {"iedit"}


def test_test_pairs_are_the_run_s_own_else_the_published(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    rows = {"pair": ["a/1", "a/1", "a/2", "b/1"], "dataset": ["a", "a", "a", "b"]}
    pq.write_table(pa.table(rows), tmp_path / "test" / "part.parquet")
    own = {name: DatasetEntry(reader="pairs", root=tmp_path) for name in ("a", "b")}
    assert count_test_pairs(tmp_path, own) == 3
    assert count_test_pairs(tmp_path, {"a": own["a"]}) is None, "another run's mixture, and no published counts"
    published = {"spot_the_diff": DatasetEntry(reader="spot_the_diff", root=tmp_path)}
    assert count_test_pairs(tmp_path, published) == count_test_pairs(tmp_path / "none", published) == 1_270
