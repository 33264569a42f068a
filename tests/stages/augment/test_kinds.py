"""What each kind of made dataset takes and leaves, with toy parts: every pair that is not made is counted."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from m3diff.stages.augment.kinds import Made, make_coupled_samples, make_edits, make_neighbours, text_similarity
from m3diff.stages.augment.source import Captioned, Rejected
from tests.stages.augment.small import edits, entry
from tests.stages.augment.toys import ToyEditor, ToyFeatures, ToyWriter, captioned, original

# Edits


def made_edits(tmp_path: Path, editor: ToyEditor, writer: ToyWriter, **changes: Any) -> Made:
    originals = [
        original(tmp_path, "one", "make it red"),
        original(tmp_path, "two", "add a cat", "test", "a sofa"),
        original(tmp_path, "three", "add a dog", "val"),
    ]
    cfg = edits(tmp_path, tmp_path / "out", **({"edits": 3} | changes))
    return make_edits(cfg, originals, Rejected({"no instruction": 2}), editor, writer, tmp_path / "into")


def test_each_original_is_edited_by_its_own_instruction_and_keeps_scene_split_and_types(tmp_path: Path):
    editor = ToyEditor()
    made = made_edits(tmp_path, editor, ToyWriter())
    assert [pair.id for pair in made.pairs] == [f"{name}-{at}" for name in ("one", "two", "three") for at in range(3)]
    for pair, (image, instruction, seed) in zip(made.pairs, editor.asked, strict=True):
        name = pair.id.partition("-")[0]
        assert (pair.scene, pair.before.stem, image) == (f"scene {name}", name, f"{name}.png")
        assert pair.captions[0] == instruction
        assert pair.change_types == ["color"]
        assert pair.made == {"of": name, "seed": seed}
        assert Image.open(pair.after).getpixel((0, 0)) == (seed & 255, seed >> 8 & 255, seed >> 16 & 255)
    assert {pair.split for pair in made.pairs if pair.id.startswith("two")} == {"test"}
    assert len({seed for *_, seed in editor.asked}) == 9


def test_a_row_that_is_not_usable_counts_for_all_its_edits(tmp_path: Path):
    assert made_edits(tmp_path, ToyEditor(), ToyWriter()).rejected == {"no instruction": 6}


def test_paraphrases_are_written_where_the_split_asks_for_them_behind_the_instruction(tmp_path: Path):
    writer = ToyWriter()
    made = made_edits(tmp_path, ToyEditor(), writer, paraphrases={"test": 2, "val": 0})
    assert writer.asked == [("paraphrase", {"text": "add a cat", "first": "a sofa"}, 2)]
    texts = {pair.id: pair.captions for pair in made.pairs}
    assert texts["two-1"] == ["add a cat", "paraphrase 0: add a cat / a sofa", "paraphrase 1: add a cat / a sofa"]
    assert texts["one-0"] == ["make it red"]


def test_no_pair_has_fewer_references_than_asked_for(tmp_path: Path):
    editor = ToyEditor()
    made = made_edits(tmp_path, editor, ToyWriter(short="dog"), paraphrases={"test": 2, "val": 2})
    assert {pair.id[:3] for pair in made.pairs} == {"one", "two"}
    assert made.rejected == {"no instruction": 6, "too few paraphrases": 3}
    assert made.dropped_texts == {"refused": 1}
    assert all("dog" not in instruction for _, instruction, _ in editor.asked), "nothing is edited in vain"


def test_what_the_editor_cannot_do_and_what_shows_no_change_is_counted(tmp_path: Path):
    made = made_edits(tmp_path, ToyEditor(refuses="cat", same="dog"), ToyWriter())
    assert {pair.id[:3] for pair in made.pairs} == {"one"}
    assert made.rejected == {"no instruction": 6, "cannot be carried out": 3, "shows what another shows": 3}


def test_an_edit_that_shows_what_an_earlier_one_shows_is_none(tmp_path: Path):
    class Blunt(ToyEditor):
        def edit(self, image: Path, instruction: str, seed: int) -> Image.Image | None:
            return super().edit(image, instruction, 7)

    made = made_edits(tmp_path, Blunt(), ToyWriter())
    assert [pair.id for pair in made.pairs] == ["one-0", "two-0", "three-0"]
    assert made.rejected["shows what another shows"] == 6


def test_what_an_earlier_run_has_edited_is_not_edited_again(tmp_path: Path):
    first, again = ToyEditor(), ToyEditor()
    pairs = made_edits(tmp_path, first, ToyWriter()).pairs
    pairs[4].after.unlink()
    assert made_edits(tmp_path, again, ToyWriter()).pairs == pairs
    assert again.asked == [first.asked[4]]
    changed = ToyEditor()
    made_edits(tmp_path, changed, ToyWriter(), seed=4)
    assert len(changed.asked) == 9


@pytest.mark.parametrize("change", [{"instruction": "make it blue"}, {"digest": "of another image"}])
def test_another_instruction_or_image_is_edited_anew(change: dict[str, str], tmp_path: Path):
    one = original(tmp_path, "one", "make it red")
    cfg = edits(tmp_path, tmp_path / "out", edits=2, paraphrases={})
    for each, edited in ((one, 2), (one, 0), (one._replace(**change), 2)):
        editor = ToyEditor()
        make_edits(cfg, [each], Rejected(), editor, ToyWriter(), tmp_path / "into")
        assert len(editor.asked) == edited


# Neighbours


def made_neighbours(images: list[Captioned], known: set[frozenset] = frozenset(), **changes: Any) -> Made:  # type: ignore[assignment]
    values = {
        "features": {"kind": "clip", "model": "nowhere"},
        "writer": {"kind": "grammar"},
        "candidates": 2,
        "band": (0.75, 0.94),
        "max_text_similarity": 0.7,
        "references": 1,
    }
    cfg = entry("neighbours", Path("source"), Path("out"), **(values | changes))
    return make_neighbours(cfg, images, set(known), Rejected({"no caption": 1}), ToyFeatures(), ToyWriter(short="dog"))


def names(made: Made) -> list[str]:
    return [pair.id for pair in made.pairs]


def test_images_within_the_band_make_one_pair_with_the_difference_of_their_captions():
    """Cosines: 30 degrees 0.87, 10 degrees 0.98, 60 degrees 0.5."""
    made = made_neighbours([captioned(0, "a red cup"), captioned(30, "two men"), captioned(90, "the sea")])
    (pair,) = made.pairs
    assert (pair.id, pair.before, pair.after) == ("n0+n30", Path("0.png"), Path("30.png"))
    assert pair.captions == ["difference 0: a red cup / two men"]
    assert pair.made == {"cosine": 0.866}
    assert (pair.split, pair.scene, pair.change_types) == ("train", "s0+s30", [])
    assert made.rejected == {"no caption": 1, "too unlike": 4, "was found the other way round": 1}


@pytest.mark.parametrize(
    ("band", "reason"), [((0.75, 0.86), "too alike"), ((0.87, 0.94), "too unlike"), ((0.86, 0.87), None)]
)
def test_the_band_has_both_its_ends(band: tuple[float, float], reason: str | None):
    made = made_neighbours([captioned(0, "a cup"), captioned(30, "two men")], band=band)
    assert len(made.pairs) == (reason is None)
    assert reason is None or made.rejected[reason] == 2


def test_no_pair_crosses_splits():
    images = [
        captioned(0, "a cup"),
        captioned(25, "two men", "test"),
        captioned(30, "the sea"),
        captioned(50, "x", "test"),
    ]
    made = made_neighbours(images)
    assert names(made) == ["n0+n30", "n25+n50"]
    assert [pair.split for pair in made.pairs] == ["train", "test"]
    alone = made_neighbours([captioned(0, "a cup"), captioned(25, "two men", "test")])
    assert alone.rejected == {"no caption": 1, "alone in its split": 2}


def test_alike_captions_known_pairs_equal_images_and_short_answers_are_counted():
    cup = captioned(0, "a red cup on a table")
    alike = made_neighbours([cup, captioned(30, "a red cup on the table")], max_text_similarity=0.6)
    assert alike.rejected["captions are alike"] == 2
    assert len(made_neighbours([cup, captioned(30, "a red cup on the table")], max_text_similarity=0.75).pairs) == 1
    assert made_neighbours([cup, captioned(30, cup.caption)], max_text_similarity=1).rejected["captions are alike"] == 2
    known = {frozenset((Path("0.png"), Path("30.png")))}
    assert made_neighbours([cup, captioned(30, "two men")], known).rejected["is a pair of the source"] == 2
    short = made_neighbours([cup, captioned(30, "a dog")])
    assert short.rejected["too few captions"] == 1
    assert short.dropped_texts == {"refused": 1}
    same = made_neighbours([cup, captioned(30, "two men")._replace(digest=cup.digest)])
    assert same.rejected["same image"] == 2


def test_of_one_scene_a_pair_keeps_the_scene():
    (pair,) = made_neighbours([captioned(0, "a", scene="s"), captioned(30, "b", scene="s")]).pairs
    assert pair.scene == "s"


def test_every_candidate_is_made_or_counted():
    images = [captioned(angle, f"text {angle}") for angle in range(0, 180, 7)]
    made = made_neighbours(images, candidates=5)
    assert len(made.pairs) + sum(made.rejected.values()) == 5 * len(images) + 1


@pytest.mark.parametrize(
    ("first", "second", "share"),
    [("a b c", "C b a.", 1), ("a b", "c d", 0), ("a a b", "a b b", 0.5), ("a b c", "a b d", 0.5), ("", "", 0)],
)
def test_the_similarity_of_texts_is_the_share_of_their_words(first: str, second: str, share: float):
    assert text_similarity(first, second) == share


# Coupled samples


def made_coupled(images: list[Captioned], **changes: Any) -> Made:
    cfg = entry("coupled_samples", Path("source"), Path("out"), **changes)
    return make_coupled_samples(cfg, images, Rejected({"no caption": 1}))


def test_each_image_is_in_one_couple_of_its_split_and_the_caption_is_both_captions():
    images = [captioned(number, f"text {number}", "test" if number % 3 else "train") for number in range(21)]
    made = made_coupled(images, separator=" | ")
    used = Counter(path for pair in made.pairs for path in (pair.before, pair.after))
    assert set(used.values()) == {1}
    of = {each.image: each for each in images}
    for pair in made.pairs:
        first, second = of[pair.before], of[pair.after]
        assert pair.captions == [f"{first.caption} | {second.caption}"]
        assert pair.split == first.split == second.split
        assert pair.scene == f"{first.scene}+{second.scene}"
    assert len(made.pairs) == 7 + 3
    assert made.rejected == {"no caption": 1, "no partner is left": 1}


def test_the_seed_decides_who_is_coupled():
    images = [captioned(number, "text") for number in range(20)]
    first, again, other = (names(made_coupled(images, seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert set(first) != set(other)
    assert first[0] != "n0+n1" or first[1] != "n2+n3", "not in the order of the source"


def test_two_images_of_one_scene_are_not_unrelated():
    made = made_coupled([captioned(0, "a", scene="s"), captioned(1, "b", scene="s")])
    assert (made.pairs, made.rejected) == ([], {"no caption": 1, "both are of one scene": 1})
