"""Java, the tokenizer, programs that die or hang, metrics side by side, and metrics.json."""

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

from m3diff.datasets.spec import Protocol
from m3diff.records.errors import DataError
from m3diff.scoring.bootstrap import Interval
from m3diff.scoring.metrics import ALL, METRICS, Metric, MetricScores, choose_metrics
from m3diff.scoring.metrics.java import JavaMissing, Scorer, ScorerFailed, require_java, sanitise, tokenise
from m3diff.scoring.metrics.spice import JARS, NASHORN
from m3diff.scoring.protocols import ProtocolPairs
from m3diff.scoring.run import HEADLINE, EvaluateReport, compute_metrics, headline, merge, summarise
from tests.scoring import bench
from tests.scoring.bench import REAL, fake_java, needs_real

COCO = ("CIDEr", "METEOR", "ROUGE-L", "BLEU", "SPICE")


def score(
    references: dict[str, list[str]],
    predictions: dict[str, str],
    shuffled: dict[str, str] | None = None,
    groups: dict[str, list[str]] | None = None,
    limit_s: int = 20,
    metrics: dict[str, Metric] | None = None,
    spice_dir: Path | None = None,
) -> MetricScores:
    pairs = [
        replace(bench.pair(predictions[i], texts, [], i), id=i, shuffled_prediction=(shuffled or {}).get(i))
        for i, texts in references.items()
    ]
    scored = [bench.grouped(pairs, groups or {})]
    return compute_metrics(metrics or choose_metrics(COCO), scored, {}, spice_dir, limit_s)["toy/test"]


QUICK = {i: [said, "another reference"] for i, said in {"a": "a red cube", "b": "a blue ball"}.items()}
QUICK_PREDICTIONS = {i: texts[0] for i, texts in QUICK.items()}


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
    return json.loads(next((REAL / "coco_caption").glob(f"*{name}")).read_text(encoding="utf-8"))


@pytest.mark.fault("18")
def test_java_is_found_by_its_version_and_what_is_none_names_the_remedy(tmp_path: Path, monkeypatch):
    assert require_java() >= 8
    assert issubclass(JavaMissing, DataError)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing, match="not found on PATH.*apt-get install openjdk-17"):
        require_java()

    def put_java(script: str) -> None:
        (tmp_path / "java").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "java").chmod(0o755)

    for line, major in {"1.8.0_292": 8, "11.0.2": 11, "17.0.15": 17, "21": 21}.items():
        put_java(f"echo 'openjdk version \"{line}\"' >&2")
        assert require_java() == major
    put_java("echo Unrecognized option: -Dx >&2; exit 1")
    with pytest.raises(JavaMissing, match="does not start.*Unrecognized option: -Dx.*install a Java runtime"):
        require_java()
    put_java("echo 'java version \"1.7.0\"' >&2")
    with pytest.raises(JavaMissing, match="too old"):
        require_java()


def test_what_could_end_a_line_or_a_field_becomes_one_space_and_composed_and_decomposed_letters_are_one():
    for space in ("\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029", "\0", "\t"):
        assert sanitise(f" a{space}cube ") == "a cube"
    assert sanitise("a ||| b || c") == "a b || c"
    assert sanitise("cafe\u0301") == sanitise("caf\u00e9")


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


@pytest.mark.fault("17")
def test_line_ends_inside_captions_move_no_other_caption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = tmp_path / "seen"
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "PTBTokenizer", f"pwd > {seen}"))
    odd = {
        "The ball, is\r\ngone.": "the ball is gone",
        "nothing\vchanged": "nothing changed",
        "last \f one": "last one",
    }
    assert tokenise([*odd, *ODD], 60) == odd | ODD
    assert "site-packages" not in seen.read_text(), "it works outside the installed package"


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
@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ("read line; kill -9 $$", "METEOR gave up (0 answers to 2 captions); its last words: none"),
        ("echo no memory left >&2; exit 1", "its last words: no memory left"),
        ("echo $$ >> PID; sleep 1000", "no answer within 5 s (compute.scorer_timeout_s)"),
    ],
    ids=["killed", "dies", "hangs"],
)
def test_a_meteor_that_is_killed_dies_or_hangs_costs_only_its_own_score(then, reason, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", bench.small_table(tmp_path))
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "meteor", then.replace("PID", f"{tmp_path}/pid")))
    start = time.monotonic()
    found = score(QUICK, QUICK_PREDICTIONS, limit_s=5 if "sleep" in then else 20)
    assert time.monotonic() - start < 25
    assert found.groups[ALL]["METEOR"] is None
    assert reason in found.absent["METEOR"]
    assert found.groups[ALL]["BLEU-4"] is not None
    if "sleep" in then:
        assert is_gone(int((tmp_path / "pid").read_text())), "with all its children"


def test_a_worker_whose_parent_is_gone_ends_itself_and_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", bench.small_table(tmp_path))
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "meteor", f"echo $$ >> {tmp_path}/pid; sleep 1000"))
    worker = Scorer("METEOR", limit_s=-3)  # its own limit is 5 s longer
    with pytest.raises(ScorerFailed, match="no answer within -3 s"):
        worker.ask({"items": [["x", ["x"]]], "shards": 1})
    assert worker.process.wait(timeout=10) == -signal.SIGKILL
    assert is_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.fault("18")
def test_a_spice_that_dies_costs_only_its_own_score_and_leaves_the_package_alone(tmp_path: Path, monkeypatch):
    for name in (*JARS, *NASHORN):
        (tmp_path / name).touch()
    monkeypatch.setenv("PYTHONPATH", bench.small_table(tmp_path / "table"))
    monkeypatch.setenv("PATH", fake_java(tmp_path / "bin", "meteor", "exit 1"))
    package = Path(spice.__file__).parent
    before = sorted(os.listdir(package)), sorted(os.listdir(package / "lib"))
    found = score(QUICK, QUICK_PREDICTIONS, spice_dir=tmp_path)  # no jars at all: the real SPICE starts and ends
    assert found.groups[ALL]["SPICE"] is None
    assert "status 1; its last words: " in found.absent["SPICE"]
    assert found.groups[ALL]["CIDEr"] is not None
    assert (sorted(os.listdir(package)), sorted(os.listdir(package / "lib"))) == before


def metric(compute, headline: str = "words", **fields) -> Metric:
    return Metric(compute, headline, **({"scores": (headline,), "java": False} | fields))


def constant(pairs, groups, tools) -> MetricScores:
    return MetricScores({name: {"words": 2.0} for name in groups}, {"a": {"column": 1.0}})


def test_scores_of_several_metrics_stand_side_by_side_and_one_that_fails_costs_only_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))  # no Java

    def fail(*_):
        raise ScorerFailed("out of words")

    metrics = {
        "a": metric(fail, "a_headline", scores=("a_1", "a_headline")),
        "words": metric(constant, overall=("control",)),
    }
    found = score({"a": ["x"]}, {"a": "x"}, groups={"change": []}, metrics=metrics)
    of_group = {"a_1": None, "a_headline": None, "words": 2.0}
    assert found.groups == {ALL: of_group | {"control": None}, "change": of_group}
    assert (found.absent, found.pairs) == ({"a_headline": "out of words"}, {"a": {"column": 1.0}})


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
        while not ((tmp_path / "pid").is_file() and (tmp_path / "pid").read_text()):
            time.sleep(0.05)
        raise ZeroDivisionError

    start = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        score({"a": ["x"]}, {"a": "x"}, limit_s=60, metrics={"METEOR": METRICS["METEOR"], "wrong": metric(wrong)})
    assert time.monotonic() - start < 30
    assert is_gone(int((tmp_path / "pid").read_text()))
    monkeypatch.setenv("PATH", fake_java(tmp_path / "broken", "PTBTokenizer", "exit 1"))
    with pytest.raises(ScorerFailed, match="1 lines for 3 captions"):  # and ends what waits for its tokens
        score({"a": ["x"]}, {"a": "y"}, metrics={"METEOR": METRICS["METEOR"]})


@needs_real
def test_tokens_are_those_of_the_published_files():
    references, captions = published()
    tokens = tokenise([*captions.values(), *sum(references.values(), [])], 120)
    expected = load("results_after_tokenization.json")
    assert {i: [tokens[caption]] for i, caption in captions.items()} == expected
    expected = load("references_after_tokenization.json")
    assert {i: [tokens[caption] for caption in texts] for i, texts in references.items()} == expected


# metrics.json

TOY = ProtocolPairs("toy", Protocol("total", n=8), bench.pairs())


def report(toy: ProtocolPairs = TOY) -> EvaluateReport:
    """Every caption score 0.5, the accuracies as they are, no control, one interval."""
    metrics = choose_metrics(bench.ALL_METRICS)
    fixed = {
        name: MetricScores({group: dict.fromkeys(metric.scores, 0.5) for group in toy.groups}, {})
        for name, metric in metrics.items()
    }
    accuracy = {"change_accuracy": metrics["change_accuracy"]}
    fixed["change_accuracy"] = compute_metrics(accuracy, [toy], bench.parse(toy.pairs), None, 1)[toy.name]
    fixed["SPICE"] = MetricScores({}, {}, {"SPICE": "why"})
    scores = {toy.name: merge(metrics, toy.groups, fixed)}
    return summarise(9, 6, [toy], scores, {toy.name: {"CIDEr": Interval(low=0.4, high=0.75)}})


def test_the_file_has_the_names_that_dvc_mlflow_and_the_gate_read_with_every_value_in_its_group(tmp_path: Path):
    report().write(tmp_path / "metrics.json")
    text = (tmp_path / "metrics.json").read_text()
    assert '"changes": 2,' in text, "counts stay whole numbers"
    written = json.loads(text)
    assert list(written) == ["stage", "rows_in", "rows_out", "protocols"]
    assert (written["stage"], written["rows_in"], written["rows_out"]) == ("evaluate", 9, 6)
    assert list(written["protocols"]) == ["toy/total"]
    total = written["protocols"]["toy/total"]
    captions = ["CIDEr", "METEOR", "ROUGE-L", "BLEU-1", "BLEU-2", "BLEU-3", "BLEU-4", "SPICE"]
    overall = [*METRICS["change_accuracy"].overall, *METRICS["pixel_threshold"].overall]
    groups = ["intervals", "change", "multi_change", "distractors", "by_type", "by_changes", "by_length", "absent"]
    assert list(total) == ["pairs", "published_pairs", *captions, "CIDEr_shuffled", *overall, *groups]
    false_changes = ["false_changes", "false_changes_per_pair"]
    of_type = ["type_accuracy", "place_accuracy", "exact_accuracy", *false_changes]
    assert list(total["change"]) == ["pairs", *captions, *false_changes]
    named = {"by_type": ["color", "illumination", "removal"], "by_changes": ["1", "2"], "by_length": ["1-9", "10-19"]}
    assert {name: list(total[name]) for name in named} == named
    for name, (first, *_) in named.items():
        assert list(total[name][first]) == ["pairs", *captions, *of_type]
    assert (total["pairs"], total["published_pairs"]) == (6, 8)
    assert total["intervals"] == {"CIDEr": {"low": 0.4, "high": 0.75}}
    assert [total[name]["pairs"] for name in ("change", "multi_change", "distractors")] == [4, 1, 2]
    removal = total["by_type"]["removal"]
    assert (removal["pairs"], removal["exact_accuracy"], removal["CIDEr"]) == (1, 0.0, 0.5)
    assert (total["multi_change"]["type_recall"], total["change_type_accuracy"]) == (0.5, 2 / 3)
    assert (total["SPICE"], total["change"]["SPICE"], total["absent"]["SPICE"]) == (None, None, "why")
    assert total["absent"].keys() == {"SPICE", "reversal"}


def test_the_scores_to_compare_runs_by_are_those_of_each_dataset_s_first_protocol_times_100():
    first, second = report().protocols["toy/total"], report(replace(TOY, protocol=Protocol("other", n=8)))
    both = EvaluateReport(
        stage="evaluate", rows_in=9, rows_out=6, protocols={"toy/total": first, **second.protocols, "more/all": first}
    )
    found = headline(both)
    assert list(found) == ["toy/total", "more/all"]
    assert found["toy/total"]["CIDEr"] == 50.0
    assert found["toy/total"]["change_type_accuracy"] == round(100 * first.scores["change_type_accuracy"], 2)
    assert not {"SPICE", "reversal"} & found["toy/total"].keys(), "scores that are absent"
    assert set(found["toy/total"]) <= set(HEADLINE)
    partial = {8: True, 6: False, None: False}
    toys = {n: ProtocolPairs("toy", Protocol("total", n=n), bench.pairs()) for n in partial}
    assert {n: report(toy).protocols["toy/total"].is_partial for n, toy in toys.items()} == partial
