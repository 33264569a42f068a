"""The pairs and references of an epoch: counted in a mixture, or as published."""

from pathlib import Path
from typing import Any

import pytest

from m3diff.commands.plan.find_workload import find_workload
from m3diff.commands.plan.mixture import count_test_pairs, counted_workload
from m3diff.commands.plan.published import published_workload
from m3diff.commands.plan.workload import ESTIMATED_LENGTHS, DatasetShare, SampleGroup, TokenCounter, Workload
from m3diff.settings.section import ParamsError
from tests.commands.plan.conftest import (
    WordProcessor,
    convert_section,
    entries,
    image_tokens_of,
    write_mixture,
    write_samples,
)
from tests.errors import raises

TRAIN_AND_VAL = ("train", "val")


def counted(folder: Path, processor: Any = None, **mixture: Any) -> Workload:
    return counted_workload(write_mixture(folder, **mixture) / "train", TokenCounter(processor, image_tokens_of))


def published(*readers: str, convert: Any = None, **changes: Any) -> Workload:
    return published_workload(entries(*readers, **changes), convert or convert_section())


def find(run_entries: Any, mixture: Path, *excluded_datasets: str) -> Workload:
    return find_workload(mixture, run_entries, convert_section(), ESTIMATED_LENGTHS, excluded_datasets)


# A mixture


def test_a_mixture_is_counted_by_dataset_and_each_use_of_a_pair_counts(tmp_path):
    workload = counted(tmp_path)
    assert workload.shares == [DatasetShare("a", pairs=2, references=4), DatasetShare("b", pairs=2, references=3)]
    assert workload.pairs == 4
    assert workload.references == 7
    assert workload.groups[0].pairs_by_references == {1: 2, 2: 1, 3: 1}
    assert workload.origin == f"{tmp_path / 'train'}, lengths estimated"


def test_lengths_are_estimated_without_a_tokenizer(tmp_path):
    workload = counted(tmp_path)
    assert workload.prompt_tokens == 29
    assert workload.reference_tokens == 15


def test_the_tokenizer_measures_prompts_by_pair_and_every_reference(tmp_path):
    workload = counted(tmp_path, WordProcessor())
    assert workload.prompt_tokens == (3 + 5 + 3 + 3) / 4  # words and one more, without the images
    assert workload.reference_tokens == (4 + 3 + 2 + 2 + 4 + 6 + 2) / 7
    assert workload.origin == f"{tmp_path / 'train'}, lengths by its tokenizer"


def test_a_pair_whose_samples_lie_in_two_files_is_one_pair(tmp_path):
    rows = [("a/1", "a", "what", "one"), ("a/1", "a", "what", "two")]
    assert counted(tmp_path, rows=rows).groups[0].pairs_by_references == {2: 1}


@pytest.mark.parametrize(("max_captions", "sequences"), [(1, 7), (2, 5), (3, 4), (9, 4), (None, 4)])
def test_sequences_of_a_mixture_are_counted_pair_by_pair(max_captions, sequences, tmp_path):
    assert counted(tmp_path).sequences(max_captions) == sequences


# Published counts


@pytest.mark.parametrize(("max_captions", "sequences"), [(1, 70), (2, 10 + 30), (4, 10 + 15), (9, 20), (None, 20)])
def test_sequences_of_published_sums_are_full_dataset_by_dataset(max_captions, sequences):
    shares = [DatasetShare("one", 10, 10), DatasetShare("six", 4, 34), DatasetShare("six", 6, 26)]
    assert SampleGroup(shares, 29, 15, {}).sequences(max_captions) == sequences


def test_only_the_splits_that_train_are_counted():
    assert published("iedit").counts_by_dataset == {"iedit": (3_061, 3_061)}
    assert published("iedit", train_on=TRAIN_AND_VAL).counts_by_dataset == {"iedit": (3_444, 4_206)}


def test_references_that_no_paper_counts_are_what_the_other_sources_leave():
    references_per_pair = (896_000 - (7_806 + 6_222 + 20_927 + 4_210 + 14_446 + 444_300)) / 43_200
    counts = published("clevr_dc").counts_by_dataset["clevr_dc"]
    assert counts == (40_800, round(40_800 * references_per_pair))


@pytest.mark.parametrize(
    ("source", "references_per_pair", "pairs", "references"),
    [
        pytest.param({}, None, 2_685, 12_867, id="all references"),
        pytest.param({}, 2, 2_685, 5_370, id="two references a pair"),
        pytest.param({"samples": "one"}, 12, 2_685, 2_685, id="one sample a pair"),
        pytest.param({"samples": "joined"}, 2, 2_685, 2_685, id="joined references"),
        pytest.param({"weight": 0.5}, 12, 1_342, 6_434, id="half of the pairs"),
        pytest.param({"weight": 2}, 12, 5_370, 25_734, id="each pair twice"),
        pytest.param({"max_pairs": 1_000, "weight": 0.5}, 12, 1_000, 4_792, id="a cap below half"),
        pytest.param({"max_pairs": 1_000, "weight": 3}, 1, 3_000, 3_000, id="a cap, each pair three times"),
        pytest.param({"max_pairs": 9_000}, 12, 2_685, 12_867, id="a cap above all pairs"),
    ],
)
def test_weights_and_caps_of_convert_apply(source, references_per_pair, pairs, references):
    convert = convert_section(sources={"birds_to_words": source}, references_per_question=references_per_pair)
    assert published("birds_to_words", convert=convert).counts_by_dataset == {"birds_to_words": (pairs, references)}


def test_a_joined_reference_is_as_long_as_all_references_of_its_pair():
    convert = convert_section(sources={"birds_to_words": {"samples": "joined"}})
    workload = published("birds_to_words", "iedit", convert=convert)
    joined_tokens = 2_685 * 15 * 12_867 / 2_685
    single_tokens = 3_061 * 15
    assert workload.reference_tokens == pytest.approx((joined_tokens + single_tokens) / (2_685 + 3_061))


def test_a_cap_is_shared_out_over_the_splits_to_the_unit():
    convert = convert_section(references_per_question=None, sources={"birds_to_words": {"max_pairs": 999}})
    workload = published("birds_to_words", convert=convert, train_on=TRAIN_AND_VAL)
    assert [share.pairs for share in workload.shares] == [891, 108]  # of 2,685 and 325
    assert workload.references == round(999 * 14_417 / 3_010)


def test_published_counts_name_their_origin():
    assert published("iedit").origin == "published counts of the datasets, lengths estimated"


def test_datasets_without_published_counts_are_omitted_and_named():
    workload = published("mine=pairs", "iedit", "minichange")
    assert workload.origin.endswith("; without mine, minichange, whose counts are not published")
    assert workload.counts_by_dataset.keys() == {"iedit"}


def test_a_run_without_any_published_dataset_is_refused_with_the_remedy():
    with raises(ParamsError, "plan.no_counts", names=["mine", "minichange"]):
        published("mine=pairs", "minichange")


def test_datasets_that_do_not_train_are_not_counted():
    run_entries = entries("iedit") | entries("mine=pairs", "birds_to_words", train_on=())
    assert published_workload(run_entries, convert_section()).counts_by_dataset.keys() == {"iedit"}


def test_a_run_of_which_no_dataset_trains_is_refused():
    run_entries = entries("iedit") | entries("mine=pairs", "birds_to_words", train_on=())
    convert = convert_section(sources={"iedit": {"weight": 0}})
    with raises(ParamsError, "plan.no_dataset_trains", names=["iedit", "mine", "birds_to_words"]):
        published_workload(run_entries, convert)


# Which of them counts


@pytest.mark.parametrize("has_folder", [False, True], ids=["no folder", "an empty folder"])
def test_published_counts_stand_in_for_a_mixture_that_does_not_exist(has_folder, tmp_path):
    if has_folder:
        (tmp_path / "train").mkdir()
    assert find(entries("iedit"), tmp_path).counts_by_dataset.keys() == {"iedit"}


def test_the_mixture_of_the_run_is_counted(tmp_path):
    mixture = write_mixture(tmp_path / "mixture")
    assert find(entries("a=pairs", "b=pairs", "c=pairs"), mixture).references == 7


def test_a_dataset_of_another_phase_is_not_counted_in_the_mixture(tmp_path):
    mixture = write_mixture(tmp_path / "mixture")
    complete = find(entries("a=pairs", "b=pairs", "c=pairs"), mixture)
    workload = find(entries("a=pairs", "b=pairs"), mixture, "b")
    assert workload.counts_by_dataset == {"a": complete.counts_by_dataset["a"]}
    assert workload.origin == complete.origin


def test_a_dataset_of_another_phase_is_not_counted_as_published(tmp_path):
    workload = find(entries("iedit", "b=pairs"), tmp_path / "none", "b")
    assert workload.counts_by_dataset.keys() == {"iedit"}


def test_the_mixture_of_another_run_is_not_counted_but_named(tmp_path):
    mixture = write_mixture(tmp_path / "mixture")
    workload = find(entries("iedit"), mixture)
    assert workload.counts_by_dataset == {"iedit": (3_061, 3_061)}
    assert workload.origin.endswith(f"lengths estimated; {mixture} belongs to another run, with a, b")


def test_a_mixture_with_a_dataset_that_no_longer_trains_is_of_another_run(tmp_path):
    mixture = write_mixture(tmp_path / "mixture")
    workload = find(entries("iedit", "a=pairs") | entries("b=pairs", train_on=()), mixture)
    assert workload.counts_by_dataset.keys() == {"iedit"}
    assert "; without a, whose counts are not published; " in workload.origin


def test_a_run_that_can_be_counted_by_nothing_is_refused(tmp_path):
    mixture = write_mixture(tmp_path / "mixture")
    with raises(ParamsError, "plan.no_counts_but_unread_files", names=["a"]):
        find(entries("a=pairs"), mixture)


# Questions of a dataset


@pytest.mark.parametrize(
    ("convert", "references"),
    [({}, 87_016), ({"references_per_question": 2}, 87_016), ({"sources": {"rsrcc": {"samples": "one"}}}, 87_016)],
    ids=["no limit", "a limit", "one sample"],
)
def test_a_limit_of_references_counts_for_each_question_of_a_pair(convert, references):
    workload = published("rsrcc", train_on=("train",), convert=convert_section(**convert))
    assert workload.pairs == 6_417
    assert workload.references == references


def test_the_test_pairs_to_caption_are_the_published_questions(tmp_path):
    assert count_test_pairs(tmp_path, entries("rsrcc", "levir_cc")) == 21_999 + 1_929


@pytest.fixture
def mixture_with_test_pairs(tmp_path):
    """A mixture with three test samples of two records."""
    rows = [{"image_set": f"a/{number}", "dataset": "a", "question": "q", "answer": "it fell"} for number in (1, 1, 2)]
    folder = write_samples(tmp_path / "mixture", rows)
    (folder / "train").rename(folder / "test")
    return folder


def test_the_test_pairs_to_caption_are_the_records_of_the_mixture(mixture_with_test_pairs):
    assert count_test_pairs(mixture_with_test_pairs, entries("a=pairs", "b=pairs")) == 2


def test_the_test_pairs_of_another_run_s_mixture_are_not_counted(mixture_with_test_pairs):
    assert count_test_pairs(mixture_with_test_pairs, entries("b=pairs")) is None
    assert count_test_pairs(mixture_with_test_pairs, entries("levir_cc")) == 1_929
