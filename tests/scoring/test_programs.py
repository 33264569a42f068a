"""Java and its programs: the tokenizer, METEOR beside the stock one, SPICE by a stand-in; some die or hang."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pycocoevalcap.tokenizer import ptbtokenizer

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.datasets.spec import Protocol
from m3diff.records.errors import DataError
from m3diff.scoring import run
from m3diff.scoring.metrics import METRICS, Item, MetricScores, choose_metrics, meteor, spice
from m3diff.scoring.metrics.java import JavaMissing, ScorerFailed, require_java, sanitise, tokenise
from m3diff.scoring.pairs import ALL, ProtocolPairs
from tests.scoring import bench
from tests.scoring.bench import REAL, fake_java, needs_real, small_table

QUICK = {i: [said, "another reference"] for i, said in {"a": "a red cube", "b": "a blue ball"}.items()}


def score(metrics: list[str], limit_s: int = 60, spice_dir: Path | None = None) -> MetricScores:
    pairs = [bench.pair(texts[0], texts, [], i) for i, texts in QUICK.items()]
    one = ProtocolPairs("toy", Protocol("test", n=None, tokenizer="whitespace"), pairs)
    return run.compute_metrics(choose_metrics(metrics), [one], {}, spice_dir, limit_s)["toy/test"]


def is_gone(pid: int) -> bool:
    """Ended within a minute: a signal takes its time on a busy machine."""
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def load(name: str) -> Any:
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

    for line, major in {"1.8.0_292": 8, "17.0.15": 17, "21": 21}.items():
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


ODD = {"The ball, is\r\ngone.": "the ball is gone", "last \f one": "last one", "endofcaptions": "endofcaptions"}
ODD |= dict.fromkeys(("a\rcube", "a\u2028cube", "a \ud800 cube", "a \U0001f600 cube"), "a cube")
ODD |= {"cube " * 20_000: " ".join(["cube"] * 20_000), "": "", " \n ": ""}


@pytest.mark.fault("17")
def test_line_ends_inside_captions_move_no_other_caption_and_a_tokenizer_that_slips_is_found(tmp_path, monkeypatch):
    seen = tmp_path / "seen"
    fake_java(tmp_path / "bin", monkeypatch, "PTBTokenizer", f"pwd > {seen}")
    assert tokenise(ODD, 60) == ODD
    assert "site-packages" not in seen.read_text(), "it works outside the installed package"
    for then, reason in (("echo; exec cat captions", r"gave \d+ lines for 9"), ("exit 1", "which there is no score: ")):
        fake_java(tmp_path / then[:4], monkeypatch, "PTBTokenizer", then)
        with pytest.raises(ScorerFailed, match=f"the PTB tokenizer.* {reason}"):
            tokenise(ODD, 60)


@needs_real
def test_tokens_are_those_of_the_published_files():
    captions = {row["image_id"]: row["caption"] for row in load("fakecap_results.json")}
    references = defaultdict(list)
    for row in load("en_captions_val2014.json")["annotations"]:
        references[row["image_id"]].append(row["caption"])
    of = {i: references[i] for i in captions}
    tokens = tokenise([*captions.values(), *sum(of.values(), [])], 120)
    assert {str(i): [tokens[text]] for i, text in captions.items()} == load("results_after_tokenization.json")
    expected = load("references_after_tokenization.json")
    assert {str(i): [tokens[text] for text in texts] for i, texts in of.items()} == expected


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
    assert score(["METEOR"]).groups[ALL]["METEOR"] == 1.0
    assert {path: path.stat().st_mtime_ns for path in folders} == before  # nothing was made or taken away


@pytest.mark.fault("18")
@pytest.mark.parametrize(
    ("then", "reason"),
    [
        ("read line; kill -9 $$", "status -9 (killed, as for lack of memory); its last words: none"),
        ("echo '  at a.B(C)' >&2; echo no memory left >&2; exit 1", "status 1; its last words: no memory left"),
        ("echo 1.0 2.0; exit 0", "METEOR gave 1 answers to 2 captions"),
        ("echo Hello; exit 0", "METEOR gave no statistics"),
        ("echo $$ > PID; exec sleep 1000", "no answer within 2 s (compute.scorer_timeout_s)"),
    ],
    ids=["killed", "dies", "too few", "no numbers", "hangs"],
)
def test_a_meteor_that_is_killed_dies_or_hangs_costs_only_its_own_score(then, reason, tmp_path: Path, monkeypatch):
    small_table(tmp_path, monkeypatch)
    fake_java(tmp_path / "bin", monkeypatch, "meteor", then.replace("PID", f"{tmp_path}/pid"))
    found = score(["METEOR", "BLEU", "SPICE"], limit_s=2 if "sleep" in then else 60)
    assert found.groups[ALL]["METEOR"] is None
    assert reason in found.absent["METEOR"]
    assert "which nothing here downloads" in found.absent["SPICE"]
    assert found.groups[ALL]["BLEU-4"] is not None
    if "sleep" in then:
        assert is_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the program runs to its end")
def test_no_program_outlives_a_killed_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pid = tmp_path / "pid"
    fake_java(tmp_path / "bin", monkeypatch, "sleepy", f"echo $$ > {pid}; exec sleep 1000")
    code = "from pathlib import Path; from m3diff.scoring.metrics.java import run; run(['sleepy'], Path(), 99)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        while not (pid.exists() and pid.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert is_gone(int(pid.read_text()))


def test_meteor_of_a_group_is_that_of_its_summed_statistics_and_spice_the_mean_of_the_pairs_that_have_a_score():
    texts = {"b": "one two three", "a": "one two", "c": "empty", "d": "one two"}
    groups = {ALL: list(texts), "some": ["b", "a"], "one": ["c"], "nobody": []}

    def computed(metric: str, answers: dict[str, Any]) -> MetricScores:
        of_items = {(text, ("x",)): answer for text, answer in answers.items()}
        return METRICS[metric].compute([], groups, bench.tools(dict.fromkeys(texts, ["x"]), texts, answers=of_items))

    rows = np.random.default_rng(0).integers(1, 9, (3, 23)).astype(float)
    answers = dict(zip(dict.fromkeys(texts.values()), rows.tolist(), strict=True))
    found = computed("METEOR", answers)
    for name, ids in list(groups.items())[:3]:
        sums = np.sum([answers[texts[i]] for i in ids], axis=0)
        assert found.groups[name] == {"METEOR": pytest.approx(float(meteor.meteor(sums)))}
    assert found.pairs["a"] == {"METEOR": pytest.approx(float(meteor.meteor(rows[1]))), "METEOR_statistics": [*rows[1]]}
    assert METRICS["METEOR"].resampled["METEOR"] == ("METEOR_statistics", meteor.meteor)

    found = computed("SPICE", {"one two three": 0.31, "one two": 0.22, "empty": None})
    whole, some = pytest.approx((0.31 + 0.22 + 0.22) / 3), pytest.approx((0.31 + 0.22) / 2)
    assert found.groups == {ALL: {"SPICE": whole}, "some": {"SPICE": some}, "one": {"SPICE": None}}
    assert [of_pair["SPICE"] for of_pair in found.pairs.values()] == [0.31, 0.22, None, 0.22]


TABLE = [("red cube", "crimson block"), ("crimson block", "red cube"), ("moved", "shifted"), ("don t", "do not")]
TABLE += [("cube moved", "red shifted"), ("mov\u00e9d", "x"), ("of it", "wh??"), ("Eight", "gone")]


def matching(*items: Item) -> list[tuple[str, str]]:
    table = "".join(f"0.5\n{one}\n{other}\n" for one, other in TABLE).encode()
    lines = [line.decode().rstrip("\n") for line in meteor.matching_paraphrases(table, list(items))]
    assert set(lines[::3]) <= {"0.5"}
    return list(zip(lines[1::3], lines[2::3], strict=True))


def test_of_the_table_of_paraphrases_is_kept_what_reference_and_prediction_can_match_either_way(monkeypatch):
    both, shifted, negated, odd = TABLE[:2], [TABLE[2]], [TABLE[3]], TABLE[5:7]
    for items, kept in (
        ([("a crimson block", ("the red cube", "y"))], both),
        ([("the red cube", ("a crimson block",))], both),
        ([("it shifted", ("it moved",))], shifted),
        ([("it moved", ("it moved",)), ("shifted", ("y",))], shifted),  # too much does no harm
        ([("red", ("crimson block",))], []),
        ([("we do not", ("we don't",))], negated),  # across punctuation, case and entities
        ([("Red, Cube", ("crimson &quot; block",))], both),
        ([("red&apos;cube", ("crimson-block",))], both),
    ):
        assert matching(*items) == [*kept, *odd], items  # phrases of other characters may match anything
    for size in range(1, 60):  # the table is read whole whatever the size of its parts
        monkeypatch.setattr(meteor, "CHUNK", size)
        assert matching(("a crimson block shifted", ("the red cube moved",))) == [*TABLE[:3], *odd]


CAPTIONS: list[Item] = [
    ("a red cube moved", ("a crimson block has shifted", "the cube moves", "a red cube moved")),
    ("a red cube there", ("a crimson block here",)),
    ("the women are standing", ("a woman stands", "two women standing there")),
    ("", ("nothing changed",)),
    ("nothing changed", ("",)),
    ("the ball 's gone", ("the ball is gone", "there is no ball", "the ball is gone")),
    ("it 's the small caf\u00e9 & the big t-shirt", ("it is the little cafe", "the big shirt")),
    ("a a a b", ("b a a", "a b")),
]


def ask_java(package: Path, lines: list[str]) -> list[str]:
    """The program as pycocoevalcap starts it, with this package's table."""
    command = ["java", "-jar", "-Xmx2G", "meteor-1.5.jar", "-", "-", "-stdio", "-l", "en", "-norm"]
    command += ["-a", "data/paraphrase-en.gz"]
    text = "".join(f"{line}\n" for line in lines)
    done = subprocess.run(command, cwd=package, input=text, capture_output=True, encoding="utf-8", check=True)
    return done.stdout.splitlines()


def test_statistics_and_scores_of_groups_are_those_of_the_stock_program(tmp_path, monkeypatch):
    package = small_table(tmp_path, monkeypatch, ("crimson block", "red cube"), ("ball", "gone"))
    answers = meteor.program(CAPTIONS, None, 60)
    found = [answers[item] for item in CAPTIONS]
    asked = [" ||| ".join(("SCORE", *texts, prediction)) for prediction, texts in CAPTIONS]
    stock = [[float(number) for number in line.split()] for line in ask_java(package, asked)]
    assert [one[:20] + one[21:] for one in found] == [one[:20] + one[21:] for one in stock]
    assert [one[20] for one in found] == [0.0, *(one[20] for one in stock[1:])]  # all words of both sides in one chunk
    assert stock[0][20:] == [1.0, 4.0, 4.0]
    assert found[1][16:18] == [2.0, 2.0]  # words of a paraphrase, in prediction and reference

    rng = random.Random(0)
    groups = [[i] for i in range(len(found))] + [rng.choices(range(len(found)), k=rng.randint(2, 9)) for _ in range(60)]
    lines = [" ||| ".join(["EVAL", *(" ".join(map(str, stock[i])) for i in group)]) for group in groups]
    told = iter(ask_java(package, lines))
    wanted = [[float(next(told)) for _ in range(len(group) + 1)][-1] for group in groups]  # after those of its pairs
    scores = meteor.meteor(np.array([np.array(found)[group].sum(axis=0) for group in groups]))
    assert scores.tolist() == pytest.approx(wanted, rel=1e-15, abs=0)
    assert next(told, None) is None


# SPICE, with a program in Java's place that keeps parsed captions as the real one does

JARS = [*spice.JARS, *spice.NASHORN]
STAND_IN = """
import json, os, pathlib, signal, sys, time
arguments, environment = sys.argv[1:], os.environ
def option(name):
    return arguments[arguments.index(name) + 1] if name in arguments else None
cache = option("-cache") and pathlib.Path(option("-cache"), "data.mdb")
known = set(json.loads(cache.read_text())) if cache and cache.exists() else set()
items = json.loads(pathlib.Path(arguments[3]).read_text())
captions = {text for item in items for text in (item["test"], *item["refs"])}
run = {"new": len(captions - known), "cache": cache is not None, "command": arguments[:3], "lib": os.listdir("lib")}
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
        self.folder, self.monkeypatch, self.jars = folder, monkeypatch, folder / "the jars"
        self.jars.mkdir()
        for name in JARS:
            (self.jars / name).touch()
        self.fails("")
        log, fault = str(folder / "log"), str(folder / "fault.py")
        (folder / "program.py").write_text(f"LOG, FAULT = {log!r}, {fault!r}\n{STAND_IN}")
        then = f'exec {shlex.quote(sys.executable)} {folder / "program.py"} "$@"'
        self.script = fake_java(folder / "bin", monkeypatch, "spice", then)
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


def test_captions_are_parsed_once_and_scored_in_a_run_that_parses_none_with_java_s_modules(toy: Bench):
    toy.monkeypatch.setenv("JDK_JAVA_OPTIONS", "-Dmine=1")
    first, second = toy.score(), toy.score()
    assert first == second
    assert first.groups[ALL]["SPICE"] == pytest.approx((10 + 11) / 200)
    assert toy.parsed == [3, 0, 0]
    options = toy.runs[0]["JDK_JAVA_OPTIONS"].split()
    assert options[0] == "-Dmine=1"
    modules = options[options.index("--module-path") + 1].split(os.pathsep)
    assert [Path(module).name for module in modules] == list(spice.NASHORN)
    assert set(JARS) & set(toy.runs[0]["lib"]) == set(spice.JARS)
    assert options[options.index("--add-modules") + 1] == "org.openjdk.nashorn"
    assert "--add-opens=java.base/java.lang=ALL-UNNAMED" in options
    assert all("-XX:hashCode=3" in run["JAVA_TOOL_OPTIONS"] for run in toy.runs)
    assert toy.runs[0]["command"][1] == "-XX:MaxRAMPercentage=75"
    toy.monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert toy.score() == first
    assert (toy.parsed[3:], toy.runs[-1]["cache"]) == ([3], False), "the program has no LMDB there"


@pytest.mark.parametrize(("java", "names"), [(8, []), (14, []), (15, spice.NASHORN)])
def test_nashorn_is_asked_for_from_java_15_on_before_anything_is_parsed(toy: Bench, capsys, java, names):
    lines = toy.script.read_text().splitlines()
    answer = f'case "$*" in -version) echo \'openjdk version "{java}.0.1"\' >&2; exit 0;; esac'
    toy.script.write_text("\n".join([lines[0], answer, *lines[1:]]))
    for name in spice.NASHORN:
        (toy.jars / name).unlink()
    assert main(["score", "no such file", "--benchmark", "none", "--spice-dir", str(toy.jars)]) == DATA_REFUSED
    said = capsys.readouterr().err
    assert [name for name in JARS if name in said] == list(names)
    assert ("--check-spice" in said) == bool(names)
    assert not (toy.folder / "log").exists()


FAULTS = {
    "an exception": ("sys.exit('Exception: scriptEngine is null\\n\\tat edu.anu.Main(M.java:1)')", "scriptEngine"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "lack of memory"),
    "no answer": ("print('the disk is full'); sys.exit()", "the disk is full"),
    "half an answer": ("pathlib.Path(option('-out')).write_text('[{'); sys.exit()", "JSONDecodeError"),
    "no tuple": ("value = lambda item: None", "no caption names an object"),
}


@pytest.mark.fault("18")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_spice_that_fails_costs_its_own_score_and_drops_what_it_kept(toy: Bench, fault):
    assert toy.score().groups[ALL]["SPICE"]
    (kept,) = (toy.folder / "cache/m3diff").iterdir()
    code, words = FAULTS[fault]
    toy.fails(code)
    found = toy.score()
    assert found.groups[ALL]["SPICE"] is None
    assert found.groups[ALL]["CIDEr"] is not None
    assert words in found.absent["SPICE"]
    assert "Main(M.java" not in found.absent["SPICE"]
    assert kept.exists() is (fault == "no tuple")
    toy.fails("")
    assert toy.score().groups[ALL]["SPICE"]


def test_a_spice_that_was_asked_for_and_fails_is_refused_and_a_cache_that_cannot_be_written_breaks_nothing(toy, capsys):
    (toy.folder / "cache").write_text("no folder")
    assert toy.score().groups[ALL]["SPICE"]
    toy.fails("sys.exit('scriptEngine')")
    bench.write_json(toy.folder / "p.json", {"0": "x", "1": "y"})
    rows = [{"image_id": i, "caption": f"the cube {i}"} for i in range(2)]
    bench.write_json(toy.folder / "r.json", {"images": [{"id": 0}, {"id": 1}], "annotations": rows})
    toy.monkeypatch.setattr("m3diff.commands.score.metrics_of", lambda *_: choose_metrics(["SPICE"]))
    files = [str(toy.folder / "p.json"), "--references", str(toy.folder / "r.json")]
    assert main(["score", *files, "--spice-dir", str(toy.jars)]) == DATA_REFUSED
    assert "SPICE gave no score: it ended with status 1; its last words: scriptEngine" in capsys.readouterr().err


def test_the_time_limit_of_spice_counts_captions_and_the_cube_of_long_ones(toy: Bench, monkeypatch):
    monkeypatch.setitem(QUICK, "c", ["red " * 59 + "cube", "a cube"])
    monkeypatch.setattr(spice, "SECONDS_A_CAPTION", 0.05)
    toy.fails("time.sleep(9) if run['new'] else None")
    assert toy.score(limit_s=0).absent["SPICE"].startswith("no answer within 2 s")  # 0.05 * (4 + 3 ** 3)


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
    assert main(["score", "--check-spice", "--spice-dir", str(REAL / "spice")]) == 0
    assert "works " in capsys.readouterr().out
    assert reports[0]["scores"]["SPICE"] == pytest.approx(0.1329, abs=5e-5)
    assert seconds < 15 * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
