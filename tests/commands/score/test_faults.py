from dataclasses import replace

import pytest

from m3diff.commands.score.faults import faults_of_predictions, match, notes_of_captions, plain
from m3diff.commands.score.files import Counts, Prediction, Reference, benchmarks, published_counts
from m3diff.datasets import DATASETS
from m3diff.datasets.spec import Protocol
from m3diff.records.errors import DataError

TEST = Protocol("test", n=3)
NONE = Counts(None)


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ("235.png", "235.png"),
        ("235", "235.png"),
        ("000235.png", "235.png"),
        ("spot_the_diff/235.png", "235.png"),
        ("resized_images/235.PNG", "235.png"),
        ("123", "000123.png"),
        ("000123.png_n", "000123.png_n"),
        ("123_n", "000123.png_n"),
        ("CLEVR_semantic_000123.png", "000123.png"),
        ("CLEVR_nonsemantic_000123.png", "000123.png_n"),
        ("Reddit_1052", "Reddit_1052"),
        ("13985343.jpg_24.jpg", "13985343_24"),
    ],
)
def test_an_id_is_known_as_the_benchmark_s_authors_write_it(given, known):
    ids = ["235.png", "000123.png", "000123.png_n", "Reddit_1052", "13985343_24"]
    found = match([Prediction(given, "x")], ids, "spot_the_diff", NONE)
    assert found.captions == {known: "x"}
    assert found.renamed == (None if given == known else (given, known))


def test_what_two_ids_could_mean_is_unknown_unless_written_in_full():
    ids = ["a/1.png", "b/1.png"]
    assert match([Prediction("a/1.png", "x"), Prediction("1", "y")], ids, "own", NONE).unknown == ["1"]
    assert plain("a/1.png") == plain("b/1.png") == "1"


def test_two_spellings_of_one_id_are_two_captions_of_it():
    with pytest.raises(DataError, match=r"2 captions for 1 ids: '1.png' has 2; a dictionary would have kept the last"):
        match([Prediction("1", "x"), Prediction("1.png", "y")], ["1.png"], "own", NONE)


def test_unknown_ids_stand_beside_valid_ones():
    with pytest.raises(
        DataError, match=r"2 of 2 ids are unknown: 'x', 'y'; valid ones are '1.png', '2.png', '3.png', "
    ):
        match([Prediction("x", ""), Prediction("y", "")], ["1.png", "2.png", "3.png", "4.png"], "own", NONE)


def faults(given: list[str], pairs: dict[str, Reference], **counts: int) -> list[str]:
    rows, known = [Prediction(name, "x") for name in given], Counts(len(pairs), **counts)
    return faults_of_predictions(len(rows), match(rows, pairs, "iedit", known), pairs, pairs, known)


def test_captions_keyed_by_their_images_are_named_by_their_number():
    pairs = {f"Reddit_{n}": Reference(["a"], []) for n in range(5)}
    (fault,) = faults(["Reddit_0", "Reddit_1", "Reddit_2", "Reddit_3"], pairs, image_pairs=4)
    assert fault == (
        "no caption for 1 of 5 pairs: 'Reddit_4'. There are 4 distinct pairs of images: keyed by its images, a pair "
        "overwrote others that have the same; key by the id"
    )
    (plain_fault,) = faults(["Reddit_0", "Reddit_1", "Reddit_2"], pairs, image_pairs=4)
    assert plain_fault == "no caption for 2 of 5 pairs: 'Reddit_3', 'Reddit_4'"


def test_ids_of_another_level_that_are_all_unknown_are_named_by_their_number():
    pairs = {f"Reddit_{n}": Reference(["a"], []) for n in range(5)}
    with pytest.raises(DataError, match=r"4 of 4 ids are unknown: 'a', .* distinct pairs of images: keyed by its im"):
        faults(["a", "b", "c", "d"], pairs, image_pairs=4)
    with pytest.raises(DataError, match=r"6 of 6 ids are unknown: .* has 6 records: this is the record level"):
        faults(["a", "b", "c", "d", "e", "f"], pairs, records=6)


def test_whole_captions_have_no_fault():
    pairs = {"1": Reference(["a"], []), "2": Reference([""], [])}
    assert faults(["1", "2"], pairs, records=3, image_pairs=1) == []


def test_published_counts_of_the_benchmarks():
    known = benchmarks()
    spot, edit, change = (known[name] for name in ("spot_the_diff", "iedit", "clevr_change"))
    assert published_counts(spot, spot.protocol(None)) == Counts(1_270, 2_107, 7, 1_404, None)
    assert published_counts(spot, spot.protocol("multi-change")) == Counts(1_270, 1_270, 7, 1_404, None)
    assert published_counts(edit, edit.protocol(None)) == Counts(495, 1_485, 0, None, 446)
    assert published_counts(change, change.protocol("color")) == Counts(797)
    assert published_counts(known["minichange"], known["minichange"].protocol(None)) == Counts(None)
    assert [one.name for one in known["omnidiff_render"].protocols] == ["render"]


SINGLE = DATASETS["spot_the_diff"].protocols[0]


@pytest.mark.parametrize(
    ("protocol", "captions", "references", "notes"),
    [
        (TEST, ["a man left", "", "  "], ["a man left"], ["2 captions are empty"]),
        (TEST, ["a man left"], ["a man left"], []),
        (
            replace(TEST, references="joined", max_words=3),
            ["one two three four", "one two three"],
            ["x"],
            ["1 captions were cut after 3 words, as the references are"],
        ),
        (
            SINGLE,
            ["a man left. a car came", "a dog ran"],
            ["a man left"],
            ["captions hold several sentences: joined text? References of 'single-change' are one each"],
        ),
        (SINGLE, ["a man left. a car came"], ["a man left. a car came"], []),
        (
            TEST,
            ["a man 's coat .", "the car , red"],
            ["A man's coat."],
            ["captions look tokenised already; they are tokenised again (PTB), as the references are"],
        ),
        (
            replace(TEST, tokenizer="whitespace"),
            ["animal1 has a head."],
            ["animal1 has a head ."],
            ["captions are not tokenised, the references are: 'head.' is no 'head'; write 'head .'"],
        ),
        (replace(TEST, tokenizer="whitespace"), ["animal1 has a head ."], ["animal1 has a head ."], []),
    ],
)
def test_a_way_of_writing_that_moves_scores_is_told(protocol, captions, references, notes):
    assert notes_of_captions(captions, references, protocol) == notes
