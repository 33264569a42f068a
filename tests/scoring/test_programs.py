"""Java and its programs: the tokenizer, METEOR beside the stock one, SPICE by a stand-in; some die or hang."""

import io
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pycocoevalcap.tokenizer import ptbtokenizer

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.datasets.spec import Protocol
from m3diff.records.errors import DataError, Fault
from m3diff.scoring import run
from m3diff.scoring.metrics import (
    METRICS,
    Item,
    MetricScores,
    Program,
    choose_metrics,
    java,
    meteor,
    paraphrases,
    parses,
    spice,
)
from m3diff.scoring.metrics.java import JavaMissing, ScorerFailed, require_java, sanitise, tokenise
from m3diff.scoring.pairs import ALL_PAIRS
from m3diff.scoring.protocols import ProtocolPairs
from tests.errors import Message, raises
from tests.scoring import bench
from tests.scoring.bench import REAL, fake_java, needs_real, small_table

QUICK = {i: [caption, "another reference"] for i, caption in {"a": "a red cube", "b": "a blue ball"}.items()}


def quick_protocol() -> ProtocolPairs:
    pairs = [bench.pair(texts[0], texts, [], i) for i, texts in QUICK.items()]
    return ProtocolPairs("toy", Protocol("test", published_pairs=None, tokenizer="whitespace"), pairs)


def score(metrics: list[str], limit_s: int = 60, spice_dir: Path | None = None) -> MetricScores:
    return run.compute_metrics(choose_metrics(metrics), [quick_protocol()], {}, spice_dir, limit_s)["toy/test"]


def is_gone(pid: int) -> bool:
    """Ended within a minute: a signal takes its time on a busy machine."""
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def read_pid(file: Path) -> int:
    """Return the process id that a program writes when it starts. Fail if none does, so that no test waits forever."""
    deadline = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline, "the program was not started, or did not get its input"
        time.sleep(0.02)
    return int(file.read_text())


def load(name: str) -> Any:
    return json.loads(next((REAL / "coco_caption").glob(f"*{name}")).read_text(encoding="utf-8"))


@pytest.mark.fault("18")
def test_java_is_found_by_its_version_and_what_is_none_names_the_remedy(tmp_path: Path, monkeypatch):
    assert require_java() >= 8
    assert issubclass(JavaMissing, DataError)
    monkeypatch.setenv("PATH", str(tmp_path))
    with raises(JavaMissing, "scoring.java_missing", limit=8):
        require_java()

    def put_java(script: str) -> None:
        (tmp_path / "java").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "java").chmod(0o755)

    for line, major in {"1.8.0_292": 8, "17.0.15": 17, "21": 21}.items():
        put_java(f"echo 'openjdk version \"{line}\"' >&2")
        assert require_java() == major
    put_java("echo Unrecognized option: -Dx >&2; exit 1")
    java = str(tmp_path / "java")
    with raises(JavaMissing, "scoring.java_does_not_start", path=java, cause="Unrecognized option: -Dx"):
        require_java()
    put_java("echo 'java version \"1.7.0\"' >&2")
    with raises(JavaMissing, "scoring.java_version_unusable", path=java, value='java version "1.7.0"'):
        require_java()


def test_what_could_end_a_line_or_a_field_becomes_one_space():
    for space in ("\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029", "\0", "\t"):
        assert sanitise(f" a{space}cube ") == "a cube"
    assert sanitise("a ||| b || c") == "a b || c"


def test_composed_and_decomposed_letters_are_one():
    assert sanitise("cafe\u0301") == sanitise("caf\u00e9")


ODD = {"The ball, is\r\ngone.": "the ball is gone", "last \f one": "last one", "endofcaptions": "endofcaptions"}
ODD |= dict.fromkeys(("a\rcube", "a\u2028cube", "a \ud800 cube", "a \U0001f600 cube"), "a cube")
ODD |= {"cube " * 20_000: " ".join(["cube"] * 20_000), "": "", " \n ": ""}


@pytest.mark.fault("17")
def test_line_ends_inside_captions_move_no_other_caption(tmp_path, monkeypatch):
    folder_file = tmp_path / "seen"
    fake_java(tmp_path / "bin", monkeypatch, "PTBTokenizer", f"pwd > {folder_file}")
    assert tokenise(ODD, 60) == ODD
    assert "site-packages" not in folder_file.read_text(), "it works outside the installed package"


@pytest.mark.fault("17")
def test_a_tokenizer_that_slips_by_a_line_or_dies_is_found(tmp_path, monkeypatch):
    fake_java(tmp_path / "slips", monkeypatch, "PTBTokenizer", "echo; exec cat captions")
    with raises(ScorerFailed, "scoring.tokenizer_line_count", expected=9):
        tokenise(ODD, 60)
    fake_java(tmp_path / "dies", monkeypatch, "PTBTokenizer", "exit 1")
    cause = Fault("scoring.program_failed", status=1, last_words="none")
    with raises(ScorerFailed, "scoring.tokenizer_failed", cause=cause):
        tokenise(ODD, 60)


@needs_real
def test_tokens_are_those_of_the_published_files():
    captions = {row["image_id"]: row["caption"] for row in load("fakecap_results.json")}
    references = defaultdict(list)
    for row in load("en_captions_val2014.json")["annotations"]:
        references[row["image_id"]].append(row["caption"])
    references_of_captions = {i: references[i] for i in captions}
    tokens = tokenise([*captions.values(), *sum(references_of_captions.values(), [])], 120)
    assert {str(i): [tokens[text]] for i, text in captions.items()} == load("results_after_tokenization.json")
    expected = load("references_after_tokenization.json")
    assert {str(i): [tokens[text] for text in texts] for i, texts in references_of_captions.items()} == expected


# METEOR


@pytest.mark.fault("18", "30")
def test_a_package_that_cannot_be_written_serves_as_well_in_a_german_locale(tmp_path, monkeypatch):
    package = small_table(tmp_path, monkeypatch)
    folders = [package, package / "data", Path(ptbtokenizer.__file__).parent]
    before = {path: path.stat().st_mtime_ns for path in folders}
    for path in folders[:2]:
        path.chmod(0o555)
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Duser.language=de -Duser.country=DE")
    tokens = tokenise(["The cube.", "a ball"], 60)
    assert list(tokens.values()) == ["the cube", "a ball"]
    assert score(["METEOR"]).groups[ALL_PAIRS]["METEOR"] == 1.0
    assert {path: path.stat().st_mtime_ns for path in folders} == before  # nothing was made or taken away


@pytest.mark.fault("18")
@pytest.mark.parametrize(
    ("shell_line", "reason"),
    [
        ("read line; kill -9 $$", Message("scoring.program_killed", status=-9, last_words="none")),
        (
            "echo '  at a.B(C)' >&2; echo no memory left >&2; exit 1",
            Message("scoring.program_failed", status=1, last_words="no memory left"),
        ),
        ("echo 1.0 2.0; exit 0", Message("scoring.meteor_answer_count", value=1, expected=2)),
        ("echo 1.0; echo 1.0; exit 0", Message("scoring.meteor_number_count", value=1, expected=23)),
        ("echo Hello; exit 0", Message("scoring.meteor_no_numbers")),
        ("echo $$ > PID; exec sleep 1000", Message("scoring.program_timeout", limit=2)),
    ],
    ids=["killed", "dies", "too few", "too few numbers", "no numbers", "hangs"],
)
def test_a_meteor_that_is_killed_dies_or_hangs_costs_only_its_own_score(
    shell_line, reason, tmp_path: Path, monkeypatch
):
    small_table(tmp_path, monkeypatch)
    fake_java(tmp_path / "bin", monkeypatch, "meteor", shell_line.replace("PID", f"{tmp_path}/pid"))
    scores = score(["METEOR", "BLEU", "SPICE"], limit_s=2 if "sleep" in shell_line else 60)
    assert scores.groups[ALL_PAIRS]["METEOR"] is None
    assert reason == scores.absent["METEOR"]
    assert scores.absent["SPICE"] == spice.NO_SPICE_DIR
    assert scores.groups[ALL_PAIRS]["BLEU-4"] is not None
    if "sleep" in shell_line:
        assert is_gone(int((tmp_path / "pid").read_text()))


class UnstartedProgram(Program):
    """A program that cannot be started, and counts how often it is closed."""

    closed = 0

    def start(self, items: Any) -> None:
        raise ScorerFailed("scoring.program_timeout", limit=7)

    def answers(self) -> dict[Item, Any]:
        raise AssertionError("it was not started")

    def close(self) -> None:
        self.closed += 1


def test_a_program_that_cannot_be_started_costs_only_its_own_score():
    program = UnstartedProgram()
    metrics = choose_metrics(["CIDEr", "ROUGE-L"])
    metrics["CIDEr"] = replace(metrics["CIDEr"], program=lambda spice_dir, limit_s: program)
    scores = run.compute_metrics(metrics, [quick_protocol()], {}, None, 60)["toy/test"]
    assert Message("scoring.program_timeout", limit=7) == scores.absent["CIDEr"]
    assert scores.groups[ALL_PAIRS]["ROUGE-L"] is not None
    assert program.closed == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the program runs to its end")
def test_no_program_outlives_a_killed_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pid = tmp_path / "pid"
    fake_java(tmp_path / "bin", monkeypatch, "sleepy", f"echo $$ > {pid}; exec sleep 1000")
    code = (
        "from pathlib import Path; from m3diff.scoring.metrics.java import run_java; run_java(['sleepy'], Path(), 99)"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        number = read_pid(pid)
        process.send_signal(signal.SIGKILL)
    assert is_gone(number)


GROUP_TEXTS = {"b": "one two three", "a": "one two", "c": "empty", "d": "one two"}
TEXT_GROUPS = {ALL_PAIRS: list(GROUP_TEXTS), "some": ["b", "a"], "one": ["c"], "nobody": []}


def computed(metric: str, answers: dict[str, Any]) -> MetricScores:
    """The scores of GROUP_TEXTS from a program's answers by text."""
    of_items = {(text, ("x",)): answer for text, answer in answers.items()}
    inputs = bench.metric_inputs(dict.fromkeys(GROUP_TEXTS, ["x"]), GROUP_TEXTS, answers=of_items)
    return METRICS[metric].compute([], TEXT_GROUPS, inputs)


def test_meteor_of_a_group_is_that_of_its_summed_statistics():
    rows = np.random.default_rng(0).integers(1, 9, (3, 23)).astype(float)
    answers = dict(zip(dict.fromkeys(GROUP_TEXTS.values()), rows.tolist(), strict=True))
    scores = computed("METEOR", answers)
    for name, ids in list(TEXT_GROUPS.items())[:3]:
        sums = np.sum([answers[GROUP_TEXTS[i]] for i in ids], axis=0)
        assert scores.groups[name] == {"METEOR": pytest.approx(float(meteor.meteor(sums)))}
    assert scores.pairs["a"] == {
        "METEOR": pytest.approx(float(meteor.meteor(rows[1]))),
        "METEOR_statistics": [*rows[1]],
    }
    assert METRICS["METEOR"].resampled["METEOR"] == ("METEOR_statistics", meteor.meteor)


def test_spice_of_a_group_is_the_mean_of_its_pairs_that_have_a_score():
    scores = computed("SPICE", {"one two three": 0.31, "one two": 0.22, "empty": None})
    mean_of_all = pytest.approx((0.31 + 0.22 + 0.22) / 3)
    mean_of_two = pytest.approx((0.31 + 0.22) / 2)
    assert scores.groups == {ALL_PAIRS: {"SPICE": mean_of_all}, "some": {"SPICE": mean_of_two}, "one": {"SPICE": None}}
    assert [of_pair["SPICE"] for of_pair in scores.pairs.values()] == [0.31, 0.22, None, 0.22]


TABLE = [("red cube", "crimson block"), ("crimson block", "red cube"), ("moved", "shifted"), ("don t", "do not")]
TABLE += [("cube moved", "red shifted"), ("mov\u00e9d", "x"), ("of it", "wh??"), ("Eight", "gone")]


def matching(*items: Item) -> list[tuple[str, str]]:
    text = "".join(f"0.5\n{first_phrase}\n{second_phrase}\n" for first_phrase, second_phrase in TABLE).encode()
    table = paraphrases.index_table(text)
    lines = paraphrases.matching_paraphrases(table, list(items)).decode().splitlines()
    assert set(lines[::3]) <= {"0.5"}
    return list(zip(lines[1::3], lines[2::3], strict=True))


ODD_ENTRIES = TABLE[5:7]  # phrases of other characters may match anything
MATCHES: dict[str, tuple[list[Item], list[tuple[str, str]]]] = {
    "predicted the one": ([("a crimson block", ("the red cube", "y"))], TABLE[:2]),
    "predicted the other": ([("the red cube", ("a crimson block",))], TABLE[:2]),
    "a word": ([("it shifted", ("it moved",))], [TABLE[2]]),
    "in two items, too many": ([("it moved", ("it moved",)), ("shifted", ("y",))], [TABLE[2]]),
    "a part of a phrase": ([("red", ("crimson block",))], []),
    "both on one side": ([("y", ("moved", "shifted"))], []),
    "across an apostrophe": ([("we do not", ("we don't",))], [TABLE[3]]),
    "across case and an entity": ([("Red, Cube", ("crimson &quot; block",))], TABLE[:2]),
    "across a hyphen": ([("red&apos;cube", ("crimson-block",))], TABLE[:2]),
    "across the end of a caption": ([("crimson", ("red cube",)), ("block", ("y",))], []),
}


@pytest.mark.parametrize(("items", "entries"), MATCHES.values(), ids=MATCHES.keys())
def test_an_entry_is_kept_if_a_reference_and_a_prediction_may_hold_its_phrases(items, entries):
    assert matching(*items) == [*entries, *ODD_ENTRIES]


def test_the_table_is_read_whole_whatever_the_size_of_its_chunks(monkeypatch):
    for size in range(1, 60):
        monkeypatch.setattr(paraphrases, "CHUNK", size)
        assert matching(("a crimson block shifted", ("the red cube moved",))) == [*TABLE[:3], *ODD_ENTRIES], size


def test_a_damaged_table_of_paraphrases_costs_meteor_alone(tmp_path, monkeypatch):
    package = small_table(tmp_path, monkeypatch)
    table = package / "data/paraphrase-en.gz"
    table.write_bytes(table.read_bytes()[:-5])
    scores = score(["METEOR", "BLEU"])
    assert scores.groups[ALL_PAIRS]["METEOR"] is None
    assert scores.groups[ALL_PAIRS]["BLEU-4"] is not None
    assert Message("scoring.paraphrases_unreadable", path=table) == scores.absent["METEOR"]


CAPTIONS: list[Item] = [
    ("a red cube moved", ("a crimson block has shifted", "the cube moves", "a red cube moved")),
    ("a red cube there", ("a crimson block here",)),
    ("the women are standing", ("a woman stands", "two women standing there")),
    ("", ("nothing changed",)),
    ("nothing changed", ("",)),
    ("the ball 's gone", ("the ball is gone", "there is no ball", "the ball is gone")),
    ("it 's the small caf\u00e9 & the big t-shirt", ("it is the little cafe", "the big shirt")),
    ("a a a b", ("b a a", "a b")),
    ("the ball is gone", ("the ball 's gone", "the ball is gone")),
    ("!", ("the ball", "!")),
    ("The Ball", ("the cube", "The Ball")),
]


def statistics(items: list[Item]) -> list[list[float]]:
    """METEOR's answers to the items, in their order."""
    with closing(meteor.MeteorProgram(None, 60)) as program:
        program.start(items)
        answers = program.answers()
    return [answers[item] for item in items]


def ask_java(package: Path, lines: list[str]) -> list[str]:
    """The program as pycocoevalcap starts it, with this package's table."""
    command = ["java", "-jar", "-Xmx2G", "meteor-1.5.jar", "-", "-", "-stdio", "-l", "en", "-norm"]
    command += ["-a", "data/paraphrase-en.gz"]
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(command, cwd=package, input=text, capture_output=True, encoding="utf-8", check=True)
    return done.stdout.splitlines()


def without_chunks(rows: list[list[float]]) -> list[list[float]]:
    return [[*row[:20], *row[21:]] for row in rows]


def test_statistics_are_those_of_the_stock_program(tmp_path, monkeypatch):
    package = small_table(tmp_path, monkeypatch, ("crimson block", "red cube"), ("ball", "gone"))
    rows = statistics(CAPTIONS)
    lines = [" ||| ".join(("SCORE", *texts, prediction)) for prediction, texts in CAPTIONS]
    stock = [[float(number) for number in line.split()] for line in ask_java(package, lines)]
    assert without_chunks(rows) == without_chunks(stock)
    is_complete = [meteor.is_complete(row) for row in stock]
    assert [row[20] for row in rows] == [
        0.0 if is_whole else row[20] for row, is_whole in zip(stock, is_complete, strict=True)
    ]
    assert is_complete[0]
    assert rows[1][16:18] == [2.0, 2.0]  # words of a paraphrase, in prediction and reference


def test_scores_of_groups_are_those_of_the_stock_program(tmp_path, monkeypatch):
    package = small_table(tmp_path, monkeypatch, ("crimson block", "red cube"), ("ball", "gone"))
    rows = statistics(CAPTIONS)
    lines_to_score = [" ||| ".join(("SCORE", *texts, prediction)) for prediction, texts in CAPTIONS]
    stock = ask_java(package, lines_to_score)
    rng = random.Random(0)
    groups = [[i] for i in range(len(rows))] + [rng.choices(range(len(rows)), k=rng.randint(2, 9)) for _ in range(60)]
    lines = [" ||| ".join(["EVAL", *(stock[i] for i in group)]) for group in groups]
    answers = iter(ask_java(package, lines))
    stock_scores = [
        [float(next(answers)) for _ in range(len(group) + 1)][-1] for group in groups
    ]  # after those of its pairs
    scores = meteor.meteor(np.array([np.array(rows)[group].sum(axis=0) for group in groups]))
    assert scores.tolist() == pytest.approx(stock_scores, rel=1e-15, abs=0)
    assert next(answers, None) is None


@pytest.fixture
def four_processes(tmp_path, monkeypatch) -> list[Any]:
    """METEOR shares few items out, too; the list fills with the programs it starts."""
    small_table(tmp_path, monkeypatch, ("crimson block", "red cube"), ("ball", "gone"))
    monkeypatch.setattr(meteor, "ITEMS_A_PROCESS", 2)
    monkeypatch.setattr(meteor, "programs_at_once", lambda limit: limit)
    started: list[Any] = []

    class Counted(meteor.JavaProgram):
        def __init__(self, arguments: Any, *options: Any) -> None:
            super().__init__(arguments, *options)
            started.append((arguments, self))

    monkeypatch.setattr(meteor, "JavaProgram", Counted)
    return started


def test_several_processes_give_the_statistics_of_one(four_processes, monkeypatch):
    shared = statistics(CAPTIONS)
    assert len(four_processes) == meteor.MAX_PROCESSES
    assert 1 <= sum("-norm" in arguments for arguments, _ in four_processes) < meteor.MAX_PROCESSES
    monkeypatch.setattr(meteor, "ITEMS_A_PROCESS", 500)
    assert statistics(CAPTIONS) == shared
    assert len(four_processes) == meteor.MAX_PROCESSES + 1


def test_an_identical_reference_that_does_not_match_in_whole_is_no_answer(tmp_path, monkeypatch):
    small_table(tmp_path, monkeypatch)
    expected = statistics(CAPTIONS)
    monkeypatch.setattr(meteor, "is_exact", lambda row: False)
    assert statistics(CAPTIONS) == expected


def test_items_are_shared_out_by_length_and_each_once():
    items: list[Item] = [(f"{'word ' * (number % 7)}{number}", ("x",)) for number in range(100)]
    items += [(f"it 's {number}", ("x",)) for number in range(10)]
    parts = meteor.divide_by_time(items, 4)
    assert sorted(item for part in parts for item in part) == sorted(items)
    costs = [sum(len(item[0]) * (3 if meteor.needs_normalising(item) else 1) for item in part) for part in parts]
    assert max(costs) < 1.3 * min(costs)
    assert [any(map(meteor.needs_normalising, part)) for part in parts] == [False, False, False, True]
    assert meteor.divide_by_time([], 1) == []


ENDS = {"dies": "echo no room >&2; exit 1", "is killed": "kill -9 $$", "says too little": "exit 0"}


@pytest.mark.fault("18")
@pytest.mark.parametrize("shell_line", ENDS.values(), ids=ENDS.keys())
def test_if_one_of_several_processes_fails_the_others_are_ended(shell_line, four_processes, tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    hang = f'read line; case "$line" in *last*) echo $$ > {pid}; exec sleep 1000;; esac'
    fake_java(tmp_path / "bin", monkeypatch, "meteor", f"{hang}; {shell_line}")
    items: list[Item] = [("first first", ("x",)), ("second", ("y",)), ("it 's last", ("x",)), ("it 's last 2", ("y",))]
    with closing(meteor.MeteorProgram(None, 60)) as program:
        program.start(items)
        number = read_pid(pid)
        with pytest.raises(ScorerFailed):
            program.answers()
    assert len(four_processes) == 2
    assert is_gone(number)


def test_meteor_works_beside_the_other_metrics_and_an_interrupt_ends_it(tmp_path, monkeypatch):
    small_table(tmp_path, monkeypatch)
    pid = tmp_path / "pid"
    fake_java(tmp_path / "bin", monkeypatch, "meteor", f"echo $$ > {pid}; exec sleep 1000")

    def interrupted(*_: object) -> MetricScores:
        read_pid(pid)
        raise KeyboardInterrupt

    metrics = choose_metrics(["METEOR", "BLEU"])
    metrics["BLEU"] = replace(metrics["BLEU"], compute=interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.compute_metrics(metrics, [quick_protocol()], {}, None, 60)
    assert is_gone(int(pid.read_text()))


def test_no_process_outlives_a_program_that_is_closed_while_it_starts(four_processes, monkeypatch):
    table = meteor.read_paraphrases

    def slow_table(path: Path) -> Any:
        time.sleep(0.3)
        return table(path)

    monkeypatch.setattr(meteor, "read_paraphrases", slow_table)
    program = meteor.MeteorProgram(None, 60)
    program.start([("the ball is gone", ("the ball left",))])
    program.close()
    assert [java.process.poll() is None for _, java in four_processes] == [False] * len(four_processes)
    assert not program.folder.exists()


COUNTS = " ".join(["1.0"] * meteor.STATISTICS)
ITEMS: list[Item] = [("a cube", ("a ball", "a cone")), ("it 's gone", ("it left",))]
# An answer, and the code of its error. The program ends at once unless it sleeps
BAD_ANSWERS = {
    "nothing": (":", "meteor_answer_count"),
    "one line too few": (f"echo {COUNTS}", "meteor_answer_count"),
    "one line too many": (f"echo {COUNTS}; echo {COUNTS}; echo {COUNTS}", "meteor_answer_count"),
    "an empty line": (f"echo {COUNTS}; echo", "meteor_number_count"),
    "a line that is cut off": (f"echo {COUNTS}; printf '1.0 1.'", "meteor_number_count"),
    "a number too many": (f"echo {COUNTS}; echo {COUNTS} 1.0", "meteor_number_count"),
    "a word": (f"echo {COUNTS}; echo Error", "meteor_no_numbers"),
    "bytes": (f"echo {COUNTS}; printf '\\377\\000\\n'", "meteor_no_numbers"),
    "nan": (f"echo {COUNTS}; echo {COUNTS[:-3]}nan", "meteor_no_count"),
    "infinity": (f"echo {COUNTS}; echo {COUNTS[:-3]}inf", "meteor_no_count"),
    "a negative number": (f"echo {COUNTS}; echo {COUNTS[:-3]}-1.0", "meteor_no_count"),
    "an answer and no end": (f"echo {COUNTS}; echo {COUNTS}; exec sleep 1000", "program_timeout"),
    "half an answer and no end": (f"echo {COUNTS}; exec sleep 1000", "program_timeout"),
    "an answer without an end": (f"while :; do echo {COUNTS}; sleep 0.01; done", "program_timeout"),
    "a closed output": ("exec >&-; exec sleep 1000", "program_timeout"),
}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[meteor.MeteorProgram]:
    """METEOR with a time limit of half a second and a small table. A test replaces Java."""
    small_table(tmp_path, monkeypatch)
    monkeypatch.setattr(meteor, "CLOSING_S", 0.2)
    with closing(meteor.MeteorProgram(None, 1)) as program:
        program.limit_s = 0.5
        yield program


@pytest.mark.parametrize(("shell_line", "code"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_a_bad_answer_of_meteor_is_an_error_within_the_time_limit(shell_line, code, program, tmp_path, monkeypatch):
    program.limit_s = 0.5 if code == "program_timeout" else 30
    fake_java(tmp_path / "bin", monkeypatch, "meteor", f"{shell_line}; exit 0")
    program.start(ITEMS)
    start = time.monotonic()
    with pytest.raises(ScorerFailed) as failed:
        program.answers()
    assert failed.value.code == f"scoring.{code}"
    assert time.monotonic() - start < 30


def test_meteor_gets_a_line_per_caption_and_ends_with_its_input(program, tmp_path, monkeypatch):
    """A program that got no lines would give no answer, and one whose input stayed open would not end."""
    log = tmp_path / "lines"
    program.limit_s = 30
    read = f'while read -r line; do echo "$line" >> {log}; echo {COUNTS}; done; exit 0'
    fake_java(tmp_path / "bin", monkeypatch, "meteor", read)
    program.start(ITEMS)
    assert list(program.answers()) == ITEMS
    assert log.read_text().splitlines() == [
        "SCORE ||| a ball ||| a cone ||| a cube",
        "SCORE ||| it left ||| it 's gone",
    ]


@pytest.fixture
def stuck_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Reading the paraphrase table takes until this event is set."""
    is_free = threading.Event()
    read = meteor.read_paraphrases

    def wait_and_read(path: Path) -> Any:
        is_free.wait(60)
        return read(path)

    monkeypatch.setattr(meteor, "read_paraphrases", wait_and_read)
    yield is_free
    is_free.set()


def test_a_meteor_that_does_not_start_is_an_error_within_the_time_limit(stuck_table, program, monkeypatch):
    started = []
    monkeypatch.setattr(meteor, "JavaProgram", lambda *arguments: started.append(arguments))
    program.start(ITEMS)
    start = time.monotonic()
    with raises(ScorerFailed, "scoring.program_timeout", limit=0.5):
        program.answers()
    program.close()
    assert time.monotonic() - start < 30
    stuck_table.set()
    with pytest.raises(CancelledError):
        program.started.result(30)
    assert started == [], "nothing would stop a process that starts after the end"


def test_a_thread_of_meteor_does_not_keep_the_process_from_ending(stuck_table, tmp_path, monkeypatch):
    small_table(tmp_path, monkeypatch)
    monkeypatch.setattr(meteor, "CLOSING_S", 0.2)
    earlier_threads = {*threading.enumerate()}
    with closing(meteor.MeteorProgram(None, 1)) as program:
        program.start(ITEMS)
        threads = {*threading.enumerate()} - earlier_threads
    assert [thread.daemon for thread in threads] == [True, True]


GIB = 1 << 30


@pytest.mark.parametrize(
    ("cpus", "free", "processes"),
    [(8, 64 * GIB, 4), (2, 64 * GIB, 2), (8, 5 * GIB // 2, 2), (8, 0, 1), (1, 64 * GIB, 1)],
    ids=["most", "CPUs", "memory", "no memory", "one CPU"],
)
def test_so_many_programs_run_at_once_as_cpus_and_free_memory_allow(cpus, free, processes, monkeypatch):
    monkeypatch.setattr(java, "HEAP_MB", 1024)
    monkeypatch.setattr(java, "usable_cpus", lambda: cpus)
    monkeypatch.setattr(java, "free_memory", lambda available: free)
    assert java.programs_at_once(4) == processes


# SPICE, with a program in Java's place that keeps parsed captions as the real one does

JARS = [*spice.JARS, *spice.NASHORN]
STAND_IN = """
import json, os, pathlib, signal, sys, time
arguments, environment = sys.argv[1:], os.environ
def option(name):
    return arguments[arguments.index(name) + 1] if name in arguments else None
cache = option("-cache") and pathlib.Path(option("-cache"), "data.mdb")
known = set(json.loads(cache.read_text())) if cache and cache.exists() else set()
items = json.loads(pathlib.Path(arguments[arguments.index("-jar") + 2]).read_text())
captions = {text for item in items for text in (item["test"], *item["refs"])}
run = {"new": len(captions - known), "cache": cache is not None, "command": arguments, "lib": os.listdir("lib")}
run["items"] = len(items)
run["libraries"] = os.listdir("native")
run |= {name: environment.get(name) for name in ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS")}
with open(LOG, "a") as file:
    print(json.dumps(run), file=file)
value = lambda item: len(item["test"]) / 100
exec(open(FAULT).read())
if cache:
    cache.write_text(json.dumps(sorted(known | captions)))
scores = [{"image_id": item["image_id"], "scores": {"All": {"f": value(item)}}} for item in items]
pathlib.Path(option("-out")).write_text(json.dumps(scores))
"""


class Bench:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.jars = folder / "the jars"
        self.jars.mkdir()
        for name in JARS:
            (self.jars / name).touch()
        self.fails("")
        log = str(folder / "log")
        fault = str(folder / "fault.py")
        (folder / "program.py").write_text(f"LOG, FAULT = {log!r}, {fault!r}\n{STAND_IN}")
        shell_line = f'exec {shlex.quote(sys.executable)} {folder / "program.py"} "$@"'
        self.script = fake_java(folder / "bin", monkeypatch, "spice", shell_line)
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        monkeypatch.setattr("platform.machine", lambda: "x86_64")

    def fails(self, code: str) -> None:
        (self.folder / "fault.py").write_text(code)

    def score(self, limit_s: int = 60) -> MetricScores:
        return score(["CIDEr", "SPICE"], limit_s, self.jars)

    @property
    def runs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]

    @property
    def parsed(self) -> list[int]:
        return [run["new"] for run in self.runs]


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_captions_are_parsed_once_and_scored_in_a_run_that_parses_none(toy: Bench):
    first_scores = toy.score()
    second_scores = toy.score()
    assert first_scores == second_scores
    assert first_scores.groups[ALL_PAIRS]["SPICE"] == pytest.approx((10 + 11) / 200)
    assert toy.parsed == [3, 0, 0]
    assert all("-XX:hashCode=5" in run["JAVA_TOOL_OPTIONS"] for run in toy.runs)
    command = toy.runs[0]["command"]
    assert "-XX:MaxRAMPercentage=75" in command[: command.index("-jar")]


def test_the_program_finds_its_native_libraries_extracted(toy: Bench):
    toy.score()
    for spice_run in toy.runs:
        command = spice_run["command"]
        options = command[: command.index("-jar")]
        items_file = Path(command[command.index("-jar") + 2])
        assert f"-Dlibrary.lmdbjni.path={items_file.parent / 'native'}" in options
        assert sorted(spice_run["libraries"]) == ["liblmdbjni.jnilib", "liblmdbjni.so", "lmdbjni.dll"]


def test_a_run_that_parses_nothing_has_one_compiler_and_collector(toy: Bench):
    toy.score()
    options = [run["JAVA_TOOL_OPTIONS"].split() for run in toy.runs]
    quick = [{"-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"} & set(of_run) for of_run in options]
    assert [len(of_run) for of_run in quick] == [0, 2]
    toy.monkeypatch.setenv("JDK_JAVA_OPTIONS", "-XX:+UseG1GC")  # Java refuses two collectors
    toy.score()
    assert "-XX:+UseSerialGC" not in toy.runs[-1]["JAVA_TOOL_OPTIONS"]


def test_only_items_with_new_captions_are_parsed(toy: Bench):
    toy.score()
    toy.monkeypatch.setitem(QUICK, "c", ["a green ball", "another reference"])
    toy.score()
    assert toy.parsed == [3, 0, 1, 0]
    assert [run["items"] for run in toy.runs] == [2, 2, 1, 3]


def test_java_gets_its_modules_and_the_users_options(toy: Bench):
    toy.monkeypatch.setenv("JDK_JAVA_OPTIONS", "-Dmine=1")
    toy.score()
    options = toy.runs[0]["JDK_JAVA_OPTIONS"].split()
    assert options[0] == "-Dmine=1"
    modules = options[options.index("--module-path") + 1].split(os.pathsep)
    assert [Path(module).name for module in modules] == list(spice.NASHORN)
    assert set(JARS) & set(toy.runs[0]["lib"]) == set(spice.JARS)
    assert options[options.index("--add-modules") + 1] == "org.openjdk.nashorn"
    assert "--add-opens=java.base/java.lang=ALL-UNNAMED" in options


@pytest.mark.parametrize(
    "content", [b"classes" + b"\0" * 9 + b"directorz", b"classes" + b"\0" * 10 + b"directory"], ids=["end", "size"]
)
def test_parses_of_another_parser_are_in_another_file(content, tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    jar = tmp_path / "parser.jar"
    jar.write_bytes(b"classes" + b"\0" * 9 + b"directory")
    cache_file = parses.find_cache_file([jar], 17)
    assert cache_file is not None
    assert parses.find_cache_file([jar], 17) == cache_file
    assert parses.find_cache_file([jar], 21) != cache_file
    jar.write_bytes(content)
    assert parses.find_cache_file([jar], 17) != cache_file


def test_a_machine_without_lmdb_parses_every_time(toy: Bench):
    first_scores = toy.score()
    toy.monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert toy.score() == first_scores
    assert toy.parsed[2:] == [3]
    assert not toy.runs[-1]["cache"]


def other_corenlp(toy: Bench) -> None:
    (toy.jars / next(iter(spice.JARS))).write_bytes(b"another version")


def other_program(toy: Bench) -> None:
    toy.monkeypatch.setattr("m3diff.scoring.metrics.parses.version", lambda package: "1.3")


def other_system(toy: Bench) -> None:
    toy.monkeypatch.setattr("platform.system", lambda: "Darwin")


def other_java(toy: Bench) -> None:
    toy.monkeypatch.setattr(spice, "require_java", lambda: 25)


@pytest.mark.parametrize(
    "change", [other_corenlp, other_program, other_system, other_java], ids=lambda change: change.__name__
)
def test_what_another_parser_or_java_kept_is_not_used(toy: Bench, change):
    toy.score()
    change(toy)
    toy.score()
    assert toy.parsed == [3, 0, 3, 0]


def damage_in_lmdb(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        entry = file.getinfo(parses.LMDB)
    position = entry.header_offset + 30 + len(parses.LMDB) + entry.compress_size // 2
    return content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :]


DAMAGES = {
    "a flipped bit": damage_in_lmdb,
    "cut short": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "another file": lambda content: b"GIF89a" * 100,
}


@pytest.mark.fault("18")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_of_parses_is_named_and_made_anew(toy: Bench, damage, capsys):
    first_scores = toy.score()
    (cache_file,) = (toy.folder / "cache/m3diff").iterdir()
    cache_file.write_bytes(damage(cache_file.read_bytes()))
    assert toy.score() == first_scores
    assert str(cache_file) in capsys.readouterr().err
    assert toy.score() == first_scores
    assert str(cache_file) not in capsys.readouterr().err
    assert toy.parsed == [3, 0, 3, 0, 0]


def test_a_file_of_too_many_captions_is_made_anew(toy: Bench, capsys):
    toy.score()
    toy.monkeypatch.setattr(parses, "MAX_CAPTIONS", 2)
    toy.score()
    assert toy.parsed == [3, 0, 3, 0]
    assert "more than 2 captions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("caption", "is_kept"),
    [("x" * 500, True), ("x" * 501, False), ("\u4e2d" * 167, False), ("\u4e2d" * 166, True)],
    ids=["500 bytes", "501 bytes", "501 bytes of Chinese", "498 bytes of Chinese"],
)
def test_a_caption_too_long_for_lmdb_is_parsed_in_each_run(caption, is_kept):
    assert parses.captions_to_parse([caption], parses.ParsedCaptions()) == ({caption} if is_kept else set())


@pytest.mark.parametrize(("java", "names"), [(8, []), (14, []), (15, spice.NASHORN)])
def test_nashorn_is_asked_for_from_java_15_on_before_anything_is_parsed(toy: Bench, capsys, java, names):
    lines = toy.script.read_text().splitlines()
    answer = f'case "$*" in -version) echo \'openjdk version "{java}.0.1"\' >&2; exit 0;; esac'
    toy.script.write_text("\n".join([lines[0], answer, *lines[1:]]))
    for name in spice.NASHORN:
        (toy.jars / name).unlink()
    assert main(["score", "no such file", "--benchmark", "none", "--spice-dir", str(toy.jars)]) == DATA_REFUSED
    message = capsys.readouterr().err
    assert [name for name in JARS if name in message] == list(names)
    assert ("--check-spice" in message) == bool(names)
    assert not (toy.folder / "log").exists()


FAULTS = {
    "an exception": ("sys.exit('Exception: scriptEngine is null\\n\\tat edu.anu.Main(M.java:1)')", "scriptEngine"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "-9"),
    "no answer": ("print('the disk is full'); sys.exit()", "the disk is full"),
    "half an answer": ("pathlib.Path(option('-out')).write_text('[{'); sys.exit()", "JSONDecodeError"),
    "no tuple": ("value = lambda item: None", "no caption names an object"),
}


@pytest.mark.fault("18")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_spice_that_fails_costs_its_own_score_and_drops_what_it_kept(toy: Bench, fault):
    assert toy.score().groups[ALL_PAIRS]["SPICE"]
    (cache_file,) = (toy.folder / "cache/m3diff").iterdir()
    code, words = FAULTS[fault]
    toy.fails(code)
    scores = toy.score()
    assert scores.groups[ALL_PAIRS]["SPICE"] is None
    assert scores.groups[ALL_PAIRS]["CIDEr"] is not None
    assert words in scores.absent["SPICE"]
    assert "Main(M.java" not in scores.absent["SPICE"]
    assert cache_file.exists() is (fault == "no tuple")
    toy.fails("")
    assert toy.score().groups[ALL_PAIRS]["SPICE"]


def check_with_answer(value: float | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> spice.SpiceCheck:
    """Check SPICE with the jars of a folder, a new version of Java, and a program that gives this score."""

    def answer(run_folder: Path, options: Any, items: list[Item], limit_s: float, cache: Path | None = None) -> list:
        assert cache is None, "every part of the program runs"
        return [value] * len(items)

    monkeypatch.setattr(spice, "require_java", lambda: 17)
    monkeypatch.setattr(spice, "run_program", answer)
    return spice.check_spice(folder)


@pytest.fixture
def jars(tmp_path: Path) -> Path:
    folder = tmp_path / "the jars"
    folder.mkdir()
    for name in JARS:
        (folder / name).touch()
    return folder


def test_the_check_of_spice_says_that_it_works_and_what_it_scored(jars, monkeypatch):
    check = check_with_answer(0.25, jars, monkeypatch)
    assert check.works
    assert [line.split() for line in check.lines] == [["works", "one", "pair", "scored", "0.250"]]


def test_the_check_of_spice_fails_if_the_program_finds_nothing(jars, monkeypatch):
    check = check_with_answer(None, jars, monkeypatch)
    assert not check.works
    assert Message("scoring.spice_found_nothing", value=spice.TRIAL[0]).in_text(check.lines[0])


def test_the_check_of_spice_has_a_command_for_each_jar_that_is_missing(jars, monkeypatch):
    missing = next(iter(spice.JARS))
    (jars / missing).unlink()
    check = check_with_answer(0.25, jars, monkeypatch)
    assert not check.works
    assert Message("scoring.spice_jars_missing", path=jars, names=[missing]).in_text(check.lines[0])
    (command,) = [shlex.split(line) for line in check.lines if line.startswith("curl ")]
    assert command[command.index("-o") + 1] == str(jars / missing)
    assert command[-1] == f"{spice.MAVEN}/{spice.JARS[missing]}/{missing}"


def test_a_cache_that_cannot_be_written_costs_no_score(toy):
    (toy.folder / "cache").write_text("no folder")
    assert toy.score().groups[ALL_PAIRS]["SPICE"]


def test_a_spice_that_was_asked_for_and_fails_is_refused(toy, capsys):
    toy.fails("sys.exit('scriptEngine')")
    bench.write_json(toy.folder / "p.json", {"0": "x", "1": "y"})
    rows = [{"image_id": i, "caption": f"the cube {i}"} for i in range(2)]
    bench.write_json(toy.folder / "r.json", {"images": [{"id": 0}, {"id": 1}], "annotations": rows})
    toy.monkeypatch.setattr("m3diff.commands.score.find_computable_metrics", lambda *_: choose_metrics(["SPICE"]))
    files = [str(toy.folder / "p.json"), "--references", str(toy.folder / "r.json")]
    assert main(["score", *files, "--spice-dir", str(toy.jars)]) == DATA_REFUSED
    cause = Fault("scoring.program_failed", status=1, last_words="scriptEngine")
    assert Message("score.spice_failed", path=toy.jars, cause=cause).in_text(capsys.readouterr().err)


def test_the_time_limit_of_spice_counts_captions_and_the_cube_of_long_ones(toy: Bench, monkeypatch):
    monkeypatch.setitem(QUICK, "c", ["red " * 59 + "cube", "a cube"])
    monkeypatch.setattr(spice, "SECONDS_A_CAPTION", 0.05)
    toy.fails("time.sleep(9) if run['new'] else None")
    reason = toy.score(limit_s=0).absent["SPICE"]
    assert Message("scoring.program_timeout", limit=0.05 * (4 + 3**3)) == reason


@pytest.mark.skipif(not (REAL / "spice").is_dir(), reason="the jars are not here")
@pytest.mark.slow(120)
def test_the_real_spice_gives_the_published_score_and_the_second_time_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    coco = REAL / "coco_caption"
    files = [str(coco / "en_captions_val2014_fakecap_results.json"), "--references"]
    files += [str(coco / "en_captions_val2014.json"), "--spice-dir", str(REAL / "spice")]
    reports = []
    for _ in range(2):
        start = time.monotonic()
        assert main(["score", *files, "--json"]) == 0
        seconds = time.monotonic() - start
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0] == reports[1]
    log = tmp_path / "classes"
    monkeypatch.setenv("JDK_JAVA_OPTIONS", f"-Xlog:class+load:file={log}")
    assert main(["score", *files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == reports[0]
    classes = log.read_text()
    assert "edu.anu.spice.SpiceScorer" in classes
    assert "java.lang.ProcessImpl" not in classes, "another thread hashes objects of the one that scores"
    monkeypatch.delenv("JDK_JAVA_OPTIONS")
    assert main(["score", "--check-spice", "--spice-dir", str(REAL / "spice")]) == 0
    assert "works " in capsys.readouterr().out
    assert reports[0]["scores"]["SPICE"] == pytest.approx(0.1329, abs=5e-5)
    assert seconds < 15 * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
