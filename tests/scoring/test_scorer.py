import json
import os
import signal
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from pycocoevalcap.spice import spice
from pycocoevalcap.tokenizer import ptbtokenizer

from m3diff.scoring.metrics import METRICS, choose_metrics
from m3diff.scoring.metrics.metric import ALL, Metric, MetricScores, Tokens
from m3diff.scoring.metrics.scorer import Scorer, ScorerFailed, sanitise, tokenise
from m3diff.scoring.metrics.spice import JARS, NASHORN, find_jars
from m3diff.scoring.pairs import EvalPair
from m3diff.scoring.run import compute_metrics, tokenise_protocols
from tests.scoring import bench
from tests.scoring.bench import fake_java

REAL = Path(__file__).parents[3] / "shared" / "real" / "coco_caption"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the published COCO files are not beside the project")

COCO = ("CIDEr", "METEOR", "ROUGE-L", "BLEU", "SPICE")


def score(
    references: dict[str, list[str]],
    predictions: dict[str, str],
    shuffled: dict[str, str] | None = None,
    groups: dict[str, list[str]] | None = None,
    spice_dir: Path | None = None,
    limit_s: int = 20,
    metrics: dict[str, Metric] | None = None,
) -> MetricScores:
    shuffled = shuffled or {}
    pairs = [
        replace(bench.pair(predictions[i], texts, [], i), id=i, shuffled_prediction=shuffled.get(i))
        for i, texts in references.items()
    ]
    scored = [bench.grouped(pairs, groups or {})]
    return compute_metrics(metrics or choose_metrics(COCO), scored, {}, spice_dir, limit_s)["toy/test"]


def quick_score(predictions: dict[str, str], limit_s: int = 20, spice_dir: Path | None = None) -> MetricScores:
    references = {i: [prediction, "another reference"] for i, prediction in predictions.items()}
    return score(references, predictions, spice_dir=spice_dir, limit_s=limit_s)


def is_gone(pid: int) -> bool:
    """Ended within a minute: a signal takes its time on a busy machine."""
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def published() -> tuple[dict[str, list[str]], dict[str, str]]:
    """References and predictions of coco-caption's own example."""
    captions = {row["image_id"]: row["caption"] for row in load("fakecap_results.json")}
    references = defaultdict(list)
    for row in load("en_captions_val2014.json")["annotations"]:
        references[str(row["image_id"])].append(row["caption"])
    return {str(i): references[str(i)] for i in captions}, {str(i): caption for i, caption in captions.items()}


def load(name: str):
    return json.loads(next(REAL.glob(f"*{name}")).read_text(encoding="utf-8"))


@pytest.mark.parametrize("space", ["\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029", "\0", "\t"])
def test_white_space_that_could_end_a_line_becomes_one_space(space: str):
    assert sanitise(f" a{space}cube ") == "a cube"


def test_the_separator_of_meteor_is_taken_out_of_captions():
    assert sanitise("a ||| b || c") == "a b || c"


def test_composed_and_decomposed_letters_are_one():
    assert sanitise("cafe\u0301") == sanitise("caf\u00e9")


@pytest.mark.fault("17")
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


ODD = {
    "a\rcube": "a cube",
    "a\vcube": "a cube",
    "a\fcube": "a cube",
    "a\u2028cube": "a cube",
    "a\0cube": "a cube",
    "a \ud800 cube": "a cube",
    "a \U0001f600 cube": "a cube",
    "cube " * 20_000: " ".join(["cube"] * 20_000),
    "": "",
    " \n ": "",
}


@pytest.mark.slow(15)
@pytest.mark.fault("17")
def test_an_odd_caption_moves_no_other_one_to_the_wrong_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every score of every other pair stays when the odd captions are replaced."""
    monkeypatch.setenv("PYTHONPATH", bench.small_table(tmp_path))
    captions = [text for number, odd in enumerate(ODD) for text in (odd, f"the {'bcdefghijk'[number]} cube moved")]
    predictions = {f"{number:02}": caption for number, caption in enumerate(captions)}
    references = {i: [f"the {'bcdefghijk'[int(i) // 2]} cube has moved", "a cube"] for i in predictions}
    replaced = {i: "x" if caption in ODD else caption for i, caption in predictions.items()}
    metrics = choose_metrics(["CIDEr", "METEOR", "ROUGE-L", "BLEU"])
    found, other = (score(references, texts, limit_s=120, metrics=metrics) for texts in (predictions, replaced))
    assert found.absent.keys() == other.absent.keys() == {"CIDEr_shuffled"}
    plain = [i for i, caption in predictions.items() if caption not in ODD]
    assert {i: found.pairs[i] for i in plain} == {i: other.pairs[i] for i in plain}
    assert len({found.pairs[i]["ROUGE-L"] for i in plain}) == 1
    assert found.pairs["00"]["METEOR"] > 0.5 > other.pairs["00"]["METEOR"]
    assert tokenise(predictions.values(), 60).items() >= ODD.items()


def test_java_programs_work_outside_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = tmp_path / "seen"
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "PTBTokenizer", f"pwd > {seen}"))
    tokenise(["a cube"], 60)
    assert "site-packages" not in seen.read_text()


def test_a_tokenizer_that_fails_is_said_and_not_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "PTBTokenizer", "exit 1"))
    with pytest.raises(ScorerFailed, match="1 lines for 2 captions"):
        tokenise(["a cube"], 60)


@pytest.mark.fault("18", "30")
def test_a_package_that_cannot_be_written_serves_as_well_in_a_german_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", bench.small_table(tmp_path))
    package = tmp_path / "pycocoevalcap"
    (package / "tokenizer").mkdir()
    for path in Path(ptbtokenizer.__file__).parent.iterdir():
        if path.is_file():
            (package / "tokenizer" / path.name).symlink_to(path)
    folders = [package, *(path for path in package.rglob("*") if path.is_dir())]
    before = {path: path.stat().st_mtime_ns for path in folders}
    for path in folders:
        path.chmod(0o555)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Duser.language=de -Duser.country=DE")
    found = score({"a": ["the red cube"], "b": ["a ball"]}, {"a": "the cube", "b": "a ball"}, limit_s=60)
    assert found.pairs["b"]["METEOR"] == 1.0
    assert 0.3 < found.groups[ALL]["METEOR"] < 1
    assert {path: path.stat().st_mtime_ns for path in folders} == before  # nothing was made or taken away


@pytest.mark.fault("18")
def test_a_meteor_that_is_killed_is_absent_and_the_reason_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", bench.small_table(tmp_path))
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "meteor", "read line; kill -9 $$"))
    found = quick_score({"a": "a red cube", "b": "a blue ball"})
    assert found.groups[ALL]["METEOR"] is None
    assert found.absent["METEOR"] == "RuntimeError: METEOR gave up (0 answers to 2 captions); its last words: none"
    assert found.groups[ALL]["BLEU-4"] is not None


def test_a_meteor_that_dies_costs_only_its_own_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", bench.small_table(tmp_path))
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "meteor", "echo no memory left >&2; exit 1"))
    found = quick_score({"a": "a red cube", "b": "a blue ball"})
    assert found.groups[ALL]["METEOR"] is None
    assert "no memory left" in found.absent["METEOR"]
    assert found.groups[ALL]["BLEU-4"] is not None


@pytest.mark.fault("18")
def test_a_meteor_that_hangs_is_killed_with_all_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", bench.small_table(tmp_path))
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "meteor", f"echo $$ >> {tmp_path}/pid; sleep 1000"))
    start = time.monotonic()
    found = quick_score({"a": "a red cube", "b": "a blue ball"}, limit_s=5)
    assert time.monotonic() - start < 25
    assert found.absent["METEOR"] == "no answer within 5 s (compute.scorer_timeout_s)"
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_worker_whose_parent_is_gone_ends_itself_and_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", bench.small_table(tmp_path))
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "meteor", f"echo $$ >> {tmp_path}/pid; sleep 1000"))
    worker = Scorer("METEOR", limit_s=-3)  # its own limit is 5 s longer
    worker.send({"items": [["x", ["x"]]], "shards": 1})
    assert worker.process.wait(timeout=10) == -signal.SIGKILL
    assert is_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.fault("18")
def test_spice_without_its_files_is_absent_and_says_how_to_get_them(tmp_path: Path):
    with pytest.raises(ScorerFailed, match="^needs stanford-corenlp-3.6.0.jar and .*compute.spice_dir$"):
        find_jars(None)
    for name in (JARS[0], *NASHORN):
        (tmp_path / name).touch()
    with pytest.raises(ScorerFailed, match=f"{tmp_path}: has no {JARS[1]}; SPICE needs"):
        find_jars(tmp_path)
    (tmp_path / JARS[1]).touch()
    assert find_jars(tmp_path) == [tmp_path / name for name in JARS + NASHORN]


@pytest.mark.fault("18")
def test_a_spice_that_dies_is_absent_downloads_nothing_and_leaves_the_package_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "meteor", "exit 1"))
    for name in JARS + NASHORN:
        (tmp_path / name).touch()  # no jars at all, so the real SPICE starts and ends
    package = Path(spice.__file__).parent
    before = sorted(os.listdir(package)), sorted(os.listdir(package / "lib"))
    found = quick_score({"a": "a red cube", "b": "a blue ball"}, spice_dir=tmp_path)
    assert found.groups[ALL]["SPICE"] is None
    assert "status 1; its last words: " in found.absent["SPICE"]
    assert found.groups[ALL]["CIDEr"] is not None
    assert (sorted(os.listdir(package)), sorted(os.listdir(package / "lib"))) == before


def metric(compute, headline: str = "words", **fields) -> Metric:
    return Metric(compute, headline, **({"scores": (headline,), "java": False} | fields))


def constant(value: float):
    """A metric that gives every group the same score."""
    return lambda pairs, groups, tools: MetricScores({name: {"words": value} for name in groups}, {})


def test_without_a_metric_that_needs_java_none_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = score({"a": ["x"]}, {"a": "x"}, groups={"change": ["a"]}, metrics={"words": metric(constant(2.0))})
    assert found.groups == {ALL: {"words": 2.0}, "change": {"words": 2.0}}


def test_a_metric_that_fails_costs_only_its_own_score_and_gives_the_reason():
    def fail(*_):
        raise ScorerFailed("out of words")

    metrics = {"a": metric(fail, "a_headline", scores=("a_1", "a_headline")), "words": metric(constant(2.0))}
    found = score({"a": ["x"]}, {"a": "x"}, groups={"change": []}, metrics=metrics)
    assert found.groups == {name: {"a_1": None, "a_headline": None, "words": 2.0} for name in (ALL, "change")}
    assert found.absent == {"a_headline": "out of words"}


def test_scores_of_all_pairs_only_are_null_there_and_nowhere_else():
    metrics = {"a": metric(lambda *_: MetricScores({}, {"a": {"column": 1.0}}), overall=("control",))}
    found = score({"a": ["x"]}, {"a": "x"}, groups={"change": ["a"]}, metrics=metrics)
    assert found.groups == {ALL: {"words": None, "control": None}, "change": {"words": None}}
    assert found.pairs == {"a": {"column": 1.0}}


def test_a_program_works_beside_the_scorers_in_python():
    begun, others_done = threading.Event(), threading.Event()

    def program(of):
        begun.set()
        assert others_done.wait(10)
        return {"answer": 1.0}

    def in_python(pairs, groups, tools):
        assert begun.wait(10)
        others_done.set()
        return MetricScores({}, {})

    def from_program(pairs, groups, tools):
        return MetricScores({ALL: {"slow": tools.answers()["answer"]}}, {})

    metrics = {"slow": metric(from_program, "slow", program=program), "quick": metric(in_python, "quick")}
    assert score({"a": ["x"]}, {"a": "x"}, metrics=metrics).groups[ALL] == {"slow": 1.0, "quick": None}


def test_a_fault_in_one_metric_is_raised_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", bench.small_table(tmp_path))
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "meteor", f"echo $$ >> {tmp_path}/pid; sleep 1000"))

    def wrong(pairs, groups, tools):
        while not (tmp_path / "pid").is_file():
            time.sleep(0.05)
        raise ZeroDivisionError

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        score({"a": ["x"]}, {"a": "x"}, limit_s=60, metrics={"METEOR": METRICS["METEOR"], "wrong": metric(wrong)})
    assert time.monotonic() - start < 30
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_tokenizer_that_fails_ends_what_waits_for_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "PTBTokenizer", "exit 1"))
    with pytest.raises(ScorerFailed, match="1 lines for 3 captions"):
        score({"a": ["x"]}, {"a": "y"}, metrics={"METEOR": METRICS["METEOR"]})


def tokenise_pairs(pairs: list[EvalPair]) -> Tokens:
    return tokenise_protocols([bench.grouped(pairs, {})], 60)["toy/test"]


def test_shuffled_predictions_are_of_the_pairs_that_have_one():
    pairs = [replace(pair, shuffled_prediction="a cube") for pair in bench.pairs()]
    tokens = tokenise_pairs(pairs)
    assert tokens.shuffled == {pair.id: "a cube" for pair in pairs}
    assert tokens.predictions["toy/3"] == "the red ball at the top turned green and the lamp went out"
    assert tokens.references["toy/4"] == ["nothing changed", "no change was made"]
    some = tokenise_pairs([*pairs[:-1], replace(pairs[-1], shuffled_prediction=None)])
    assert some.shuffled == {pair.id: "a cube" for pair in pairs[:-1]}
    assert tokenise_pairs([replace(pair, shuffled_prediction=None) for pair in pairs]).shuffled is None


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
    found = score(references, captions, captions, {"half": list(references)[:500], "none": []}, limit_s=300)
    assert len(references) == 1000
    assert {
        name: value for name, value in found.groups[ALL].items() if name not in ("SPICE", "CIDEr_shuffled")
    } == pytest.approx(bench.PUBLISHED, abs=5e-5)
    assert found.groups[ALL]["CIDEr_shuffled"] == found.groups[ALL]["CIDEr"]
    assert "METEOR" not in found.absent
    assert found.groups["none"]["METEOR"] is None
    assert found.groups["half"]["METEOR"] != found.groups[ALL]["METEOR"]
