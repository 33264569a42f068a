import json
import math
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from pycocoevalcap.spice import spice

from components.evaluate import coco
from components.evaluate.coco import ALL, SPICE_JARS, find_spice, sanitise, score, score_in_python, tokenise
from tests.evaluate.bench import fake_java

REAL = Path(__file__).parents[3] / "shared" / "real" / "coco_caption"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the published COCO files are not beside the project")

REFERENCES = {"a": ["a red cube", "the cube is red"], "b": ["a cube"]}
CAPTIONS = {"a": "a red cube", "b": "a cube cube"}


def quick_score(captions: dict[str, str], limit_s: int = 20, spice_dir: Path | None = None) -> coco.CocoScores:
    references = {i: [caption, "another reference"] for i, caption in captions.items()}
    return score(references, captions, None, {}, spice_dir, limit_s)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def published() -> tuple[dict[str, list[str]], dict[str, str]]:
    """References and predictions of coco-caption's own example."""
    captions = {row["image_id"]: row["caption"] for row in load("fakecap_results.json")}
    references = defaultdict(list)
    for row in load("en_captions_val2014.json")["annotations"]:
        references[str(row["image_id"])].append(row["caption"])
    return {str(i): references[str(i)] for i in captions}, {str(i): caption for i, caption in captions.items()}


def load(name: str):
    return json.loads(next(REAL.glob(f"*{name}")).read_text(encoding="utf-8"))


def test_bleu_is_the_value_worked_out_by_hand():
    found = score_in_python(REFERENCES, CAPTIONS, {ALL: ["a", "b"]}).groups[ALL]
    assert found["BLEU-1"] == pytest.approx(5 / 6, abs=1e-6)  # 3 of 3 and 2 of 3 words, longer than the references
    assert found["BLEU-2"] == pytest.approx(math.sqrt(5 / 6 * 3 / 4), abs=1e-6)


def test_a_caption_shorter_than_its_reference_pays_the_brevity_penalty():
    found = score_in_python({"a": ["the cat sat down"]}, {"a": "the cat sat"}, {ALL: ["a"]}).groups[ALL]
    assert found["BLEU-1"] == pytest.approx(math.exp(1 - 4 / 3), abs=1e-6)


def test_rouge_is_the_value_worked_out_by_hand():
    found = score_in_python(REFERENCES, CAPTIONS, {ALL: ["a", "b"]})
    of_b = (1 + 1.2**2) * (2 / 3) / (1 + 1.2**2 * 2 / 3)  # a common subsequence of 2; precision 2/3, recall 1
    assert found.pairs["b"]["ROUGE-L"] == pytest.approx(of_b)
    assert found.groups[ALL]["ROUGE-L"] == pytest.approx((1 + of_b) / 2)


def test_cider_is_the_value_worked_out_by_hand():
    references, captions = {"a": ["red cube"], "b": ["blue ball"]}, {"a": "red cube", "b": "blue cube"}
    found = score_in_python(references, captions, {ALL: ["a", "b"]})
    assert found.pairs["a"]["CIDEr"] == pytest.approx(10 * (1 + 1 + 0 + 0) / 4)  # cosines of 1- to 4-grams
    assert found.pairs["b"]["CIDEr"] == pytest.approx(10 * (0.5 + 0 + 0 + 0) / 4)
    assert found.groups[ALL]["CIDEr"] == pytest.approx(3.125)


def test_cider_of_one_pair_is_absent_not_nought():
    assert score_in_python({"a": ["red cube"]}, {"a": "red cube"}, {ALL: ["a"]}).groups[ALL]["CIDEr"] is None


def test_a_group_has_the_scores_that_it_would_have_alone():
    references = {str(i): [f"the {word} cube turned red", "it is red"] for i, word in enumerate("abcdef")}
    captions = {i: texts[0] if int(i) % 2 else "the cube is gone" for i, texts in references.items()}
    some = ["1", "2", "4"]
    within = score_in_python(references, captions, {ALL: list(references), "some": some}).groups["some"]
    alone = score_in_python({i: references[i] for i in some}, {i: captions[i] for i in some}, {ALL: some}).groups[ALL]
    assert within == pytest.approx(alone, nan_ok=True)


def test_an_empty_group_has_no_scores():
    assert set(score_in_python(REFERENCES, CAPTIONS, {ALL: ["a", "b"], "none": []}).groups["none"].values()) == {None}


@pytest.mark.parametrize("space", ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029", "\0", "\t"])
def test_white_space_that_could_end_a_line_becomes_one_space(space: str):
    assert sanitise(f" a{space}cube ") == "a cube"


def test_the_separator_of_meteor_is_taken_out_of_captions():
    assert sanitise("a ||| b || c") == "a b || c"


def test_composed_and_decomposed_letters_are_one():
    assert sanitise("cafe\u0301") == sanitise("caf\u00e9")


def test_line_ends_inside_captions_move_no_other_caption():
    captions = ["a cube\u2028turned red", "", "The ball, is\r\ngone.", "nothing\vchanged", "  ", "last \f one"]
    found = tokenise(captions, 60)
    assert [found[caption] for caption in captions] == [
        "a cube turned red",
        "",
        "the ball is gone",
        "nothing changed",
        "",
        "last one",
    ]


def test_java_programs_work_outside_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = tmp_path / "seen"
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "PTBTokenizer", f"pwd > {seen}"))
    tokenise(["a cube"], 60)
    assert "site-packages" not in seen.read_text()


def test_a_tokenizer_that_fails_is_said_and_not_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "PTBTokenizer", "exit 1"))
    with pytest.raises(coco.ScorerFailed, match="1 lines for 2 captions"):
        tokenise(["a cube"], 60)


def test_a_meteor_that_dies_costs_only_its_own_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "meteor", "echo no memory left >&2; exit 1"))
    found = quick_score({"a": "a red cube", "b": "a blue ball"})
    assert found.groups[ALL]["METEOR"] is None
    assert "no memory left" in found.absent["METEOR"]
    assert found.groups[ALL]["BLEU-4"] is not None


def test_a_meteor_that_hangs_is_killed_with_all_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "meteor", f"echo $$ >> {tmp_path}/pid; sleep 1000"))
    start = time.monotonic()
    found = quick_score({"a": "a red cube", "b": "a blue ball"}, limit_s=2)
    assert time.monotonic() - start < 20
    assert found.absent["METEOR"] == "no answer within 2 s (evaluate.scorer_timeout_s)"
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_worker_whose_parent_is_gone_ends_itself_and_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "meteor", f"echo $$ >> {tmp_path}/pid; sleep 1000"))
    worker = coco.Scorer("METEOR", limit_s=-4)  # its own limit is 5 s longer
    worker.send({"references": {"a": ["x"]}, "captions": {"a": "x"}, "groups": {ALL: ["a"]}})
    assert worker.process.wait(timeout=10) == -signal.SIGKILL
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_spice_without_its_files_is_absent_and_says_how_to_get_them(tmp_path: Path):
    assert "evaluate.spice_dir" in find_spice(None)[1]["SPICE"]
    (tmp_path / SPICE_JARS[0]).touch()
    jars, absent = find_spice(tmp_path)
    assert not jars
    assert f"lacks {SPICE_JARS[1]}" in absent["SPICE"]


def test_a_spice_that_dies_is_absent_downloads_nothing_and_leaves_the_package_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "meteor", "exit 1"))
    for name in SPICE_JARS:
        (tmp_path / name).touch()  # no jars at all, so the real SPICE starts and ends
    package = Path(spice.__file__).parent
    before = sorted(os.listdir(package)), sorted(os.listdir(package / "lib"))
    found = quick_score({"a": "a red cube", "b": "a blue ball"}, spice_dir=tmp_path)
    assert found.groups[ALL]["SPICE"] is None
    assert "CalledProcessError" in found.absent["SPICE"]
    assert found.groups[ALL]["CIDEr"] is not None
    assert (sorted(os.listdir(package)), sorted(os.listdir(package / "lib"))) == before


@needs_real
def test_tokens_are_those_of_the_published_files():
    references, captions = published()
    tokens = tokenise([*captions.values(), *sum(references.values(), [])], 120)
    expected = load("results_after_tokenization.json")
    assert {i: [tokens[caption]] for i, caption in captions.items()} == expected
    expected = load("references_after_tokenization.json")
    assert {i: [tokens[caption] for caption in texts] for i, texts in references.items()} == expected


@needs_real
@pytest.mark.slow
def test_the_published_scores_of_coco_caption_come_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Duser.language=de")  # a German comma once broke METEOR
    references, captions = published()
    found = score(references, captions, captions, {"half": list(references)[:500], "none": []}, None, 300)
    assert len(references) == 1000
    assert {name: value for name, value in found.groups[ALL].items() if name != "SPICE"} == pytest.approx(
        {
            "BLEU-1": 0.5794,
            "BLEU-2": 0.4044,
            "BLEU-3": 0.2785,
            "BLEU-4": 0.1908,
            "METEOR": 0.1953,
            "ROUGE-L": 0.3963,
            "CIDEr": 0.5998,
        },
        abs=5e-5,
    )
    assert found.shuffled_cider == found.groups[ALL]["CIDEr"]
    assert found.groups["none"]["METEOR"] is None
    assert found.groups["half"]["METEOR"] != found.groups[ALL]["METEOR"]
