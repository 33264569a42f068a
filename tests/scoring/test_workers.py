"""METEOR and SPICE: scores of groups, METEOR's table of paraphrases, and its statistics beside the stock program's."""

import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from m3diff.scoring.metrics import ALL, METRICS, Item, MetricScores, meteor, worker
from m3diff.scoring.metrics.java import Scorer
from tests.scoring import bench

PAIRS = {
    "b": ("one two three", ["x"]),
    "a": ("one two", ["x", "y"]),
    "c": ("empty", ["x"]),
    "d": ("one two", ["x", "y"]),
}
GROUPS = {ALL: list(PAIRS), "some": ["b", "a"], "one": ["c"], "nobody": []}


def computed(metric: str, answers: dict[str, Any]) -> MetricScores:
    """The scores of PAIRS where the metric's program gave these answers to the predictions."""
    texts = {i: text for i, (text, _) in PAIRS.items()}
    of_items = {(text, tuple(references)): answers[text] for text, references in PAIRS.values()}
    tools = bench.tools({i: references for i, (_, references) in PAIRS.items()}, texts, answers=of_items)
    return METRICS[metric].compute([], GROUPS, tools)


def by_hand(words: int, references: int) -> float:
    """METEOR where every word of the prediction matches, each a chunk of its own, and a tenth of the references'."""
    mean = 1 / (0.15 / 1 + 0.85 / 0.1)
    return mean * (1 - 0.6 * (words / ((words + references) / 2)) ** 0.2)


def test_meteor_of_a_group_is_that_of_its_summed_statistics_and_not_a_mean():
    counts = {text: (len(text.split()), len(references)) for text, references in PAIRS.values()}
    found = computed("METEOR", {t: [w, 10 * r, 0, 0, w, r, *[0] * 14, w, w, r] for t, (w, r) in counts.items()})
    wanted = {ALL: by_hand(8, 6), "some": by_hand(5, 3), "one": by_hand(1, 1)}
    assert {name: values["METEOR"] for name, values in found.groups.items()} == pytest.approx(wanted)
    wanted = {"b": by_hand(3, 1), "a": by_hand(2, 2), "c": by_hand(1, 1), "d": by_hand(2, 2)}
    assert {i: of_pair["METEOR"] for i, of_pair in found.pairs.items()} == pytest.approx(wanted)
    column, score = METRICS["METEOR"].resampled["METEOR"]
    sums = np.array([[1, 1, 0, 0], [0, 0, 2, 0]]) @ np.array([found.pairs[i][column] for i in PAIRS])  # two resamples
    assert score(sums).tolist() == pytest.approx([by_hand(5, 3), by_hand(2, 2)])


def test_spice_of_a_group_is_the_mean_of_the_pairs_that_have_a_score():
    found = computed("SPICE", {"one two three": 0.31, "one two": 0.22, "empty": None})
    whole, some = pytest.approx((0.31 + 0.22 + 0.22) / 3), pytest.approx((0.31 + 0.22) / 2)
    assert found.groups == {ALL: {"SPICE": whole}, "some": {"SPICE": some}, "one": {"SPICE": None}}
    assert [of_pair["SPICE"] for of_pair in found.pairs.values()] == [0.31, 0.22, None, 0.22]


TABLE = [
    ("red cube", "crimson block"),
    ("crimson block", "red cube"),
    ("moved", "shifted"),
    ("don t", "do not"),
    ("cube moved", "red shifted"),
    ("mov\u00e9d", "x"),
    ("wh??", "x"),
    ("??", "gone"),
]


def matching(*items: tuple[str, list[str]]) -> list[tuple[str, str]]:
    table = "".join(f"0.5\n{one}\n{other}\n" for one, other in TABLE).encode()
    lines = [line.decode().rstrip("\n") for line in worker.matching_paraphrases(table, list(items))]
    assert set(lines[::3]) <= {"0.5"}
    return list(zip(lines[1::3], lines[2::3], strict=True))


def test_of_the_table_of_paraphrases_is_kept_what_reference_and_prediction_can_match_either_way():
    both, shifted, negated = TABLE[:2], [TABLE[2]], [TABLE[3]]
    for items, kept in (
        ([("a crimson block", ["the red cube", "y"])], both),
        ([("the red cube", ["a crimson block"])], both),
        ([("it shifted", ["it moved"])], shifted),
        ([("it moved", ["it moved"]), ("shifted", ["y"])], shifted),  # too much does no harm
        ([("red", ["crimson block"])], []),
        ([("we do not", ["we don't"])], negated),  # across punctuation, case and entities
        ([("Red, Cube", ["crimson &quot; block"])], both),
        ([("red&apos;cube", ["crimson-block"])], both),
        ([("it mov\u00e9d", ["an x"])], [TABLE[5]]),  # other characters: by the plain words of both sides
        ([("x", ["mov-d"])], [TABLE[5]]),
        ([("what is x", ["wh?? is it"])], [TABLE[6]]),
        ([("what is x", ["what is it"])], []),
        ([("x mov\u00e9d", ["it"])], []),
        ([("the cube", ["it is gone"])], [TABLE[7]]),  # no word to look for
        ([("it is gone", [""])], [TABLE[7]]),
    ):
        assert matching(*items) == kept, items


def test_the_table_is_read_whole_whatever_the_size_of_its_parts(monkeypatch: pytest.MonkeyPatch):
    whole = matching(("a crimson block shifted", ["the red cube moved"]), ("x", ["mov-d is gone"]))
    for size in range(1, 60):
        monkeypatch.setattr(worker, "CHUNK", size)
        assert matching(("a crimson block shifted", ["the red cube moved"]), ("x", ["mov-d is gone"])) == whole
    assert whole == [*TABLE[:3], TABLE[5], TABLE[7]]


CAPTIONS = [
    ("a red cube moved", ["a crimson block has shifted", "the cube moves", "a red cube moved"]),
    ("a red cube there", ["a crimson block here"]),
    ("the women are standing", ["a woman stands", "two women standing there"]),
    ("", ["nothing changed"]),
    ("nothing changed", [""]),
    ("the ball 's gone", ["the ball is gone", "there is no ball"]),
    ("it 's the small caf\u00e9 & the big t-shirt", ["it is the little cafe", "the big shirt"]),
    ("a a a b", ["b a a", "a b"]),
]


@pytest.fixture(scope="module")
def java_statistics(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[float]], Path]:
    """The statistics of CAPTIONS from our workers, two Java programs side by side, and a package of a small table."""
    folder = tmp_path_factory.mktemp("java")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("PYTHONPATH", bench.small_table(folder, ("crimson block", "red cube"), ("ball", "gone")))
        with Scorer("METEOR", 60) as program:
            found = program.ask({"items": CAPTIONS * 150, "shards": 2})
    assert found == found[: len(CAPTIONS)] * 150  # whichever program scored it
    return found[: len(CAPTIONS)], folder / "pycocoevalcap" / "meteor"


def ask_java(package: Path, lines: list[str]) -> list[str]:
    """The program as pycocoevalcap starts it, with this package's table."""
    command = ["java", "-jar", "-Xmx2G", "meteor-1.5.jar", "-", "-", "-stdio", "-l", "en", "-norm"]
    command += ["-a", "data/paraphrase-en.gz"]
    text = "".join(f"{line}\n" for line in lines)
    return subprocess.run(
        command, cwd=package, input=text, capture_output=True, text=True, encoding="utf-8", check=True
    ).stdout.splitlines()


def test_texts_of_small_letters_digits_and_spaces_need_no_normalising(java_statistics: tuple[list[list[float]], Path]):
    for odd in ("don't move", "a t-shirt", "3.5", "A cube", "caf\u00e9", "&amp;", "DOTMULTI", "a, b"):
        assert worker.needs_normalising((odd, ["a red cube"])) is worker.needs_normalising(("a", ["", odd])) is True
    found, package = java_statistics
    (package / "paraphrases.gz").symlink_to(package / "data" / "paraphrase-en.gz")
    plain = [i for i, item in enumerate(CAPTIONS) if not worker.needs_normalising(item)]
    assert 0 < len(plain) < len(CAPTIONS)
    assert worker.ask_meteor(package, 0, [CAPTIONS[i] for i in plain]) == [found[i] for i in plain]


def test_references_that_are_left_out_do_not_change_the_statistics(java_statistics: tuple[list[list[float]], Path]):
    items: list[Item] = [
        ("a red cube moved", ("two women", "a red cube moved", "a crimson block moved")),
        ("the ball 's gone", ("the ball 's gone", "a ball")),
        ("", ("the ball", "")),
        ("--", ("the ball", "--")),
        ("a b", ("b a", "a-b")),
    ]
    asked = [[(said, texts), meteor.without_needless_references((said, texts))] for said, texts in items]
    lines = [[" ||| ".join(("SCORE", *texts, said)) for said, texts in both] for both in asked]
    whole, needed = (ask_java(java_statistics[1], [both[n] for both in lines]) for n in (0, 1))
    assert whole == needed
    assert [both[0] != both[1] for both in lines] == [True, True, False, False, False]


def test_statistics_are_those_of_the_stock_program(java_statistics: tuple[list[list[float]], Path]):
    found, package = java_statistics
    answers = ask_java(package, [" ||| ".join(("SCORE", *texts, prediction)) for prediction, texts in CAPTIONS])
    assert found == [[float(number) for number in line.split()] for line in answers]
    assert found[0][20:] == [1.0, 4.0, 4.0]
    assert found[1][16:18] == [2.0, 2.0]  # words of a paraphrase, in prediction and reference


def test_the_score_of_any_group_is_the_programs_own(java_statistics: tuple[list[list[float]], Path]):
    found, package = java_statistics
    rng = random.Random(0)
    groups = [[i] for i in range(len(found))] + [rng.choices(range(len(found)), k=rng.randint(2, 9)) for _ in range(60)]
    lines = [" ||| ".join(["EVAL", *(" ".join(map(str, found[i])) for i in group)]) for group in groups]
    answers = iter(ask_java(package, lines))
    wanted = [[float(next(answers)) for _ in range(len(group) + 1)][-1] for group in groups]  # after those of its pairs
    rows = np.array([meteor.to_sum(numbers) for numbers in found])
    scores = meteor.meteor(np.array([rows[group].sum(axis=0) for group in groups]))
    assert scores.tolist() == pytest.approx(wanted, rel=1e-15, abs=0)
    assert next(answers, None) is None
