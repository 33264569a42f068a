"""SPICE from the command line: with a program in Java's place that keeps parsed captions as the real one does, and with
the real one where its jars are."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from m3diff.__main__ import DATA_REFUSED, main
from m3diff.datasets.spec import Protocol
from m3diff.scoring.metrics import ALL, METRICS, MetricScores, spice
from m3diff.scoring.protocols import ProtocolPairs
from m3diff.scoring.run import compute_metrics
from tests.scoring import bench

JARS = spice.JARS + spice.NASHORN

STAND_IN = """
import json, os, pathlib, signal, sys, time
arguments, environment = sys.argv[1:], os.environ
def option(name):
    return arguments[arguments.index(name) + 1] if name in arguments else None
cache = option("-cache") and pathlib.Path(option("-cache"), "data.mdb")
known = set(json.loads(cache.read_text())) if cache and cache.exists() else set()
items = json.loads(pathlib.Path(arguments[3]).read_text())
captions = {text for item in items for text in (item["test"], *item["refs"])}
run = {"new": len(captions - known), "cache": cache is not None, "command": arguments[:3]}
run |= {name: environment.get(name) for name in ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS")}
with open(LOG, "a") as file:
    print(json.dumps(run), file=file)
value = lambda item: len(item["test"]) / 100
exec(open(FAULT).read())
if cache:
    cache.write_text(json.dumps([text for text in sorted(known | captions) if len(text) <= 508]))
scores = [{"image_id": item["image_id"], "scores": {"All": {"f": value(item)}}} for item in items]
pathlib.Path(option("-out")).write_text(json.dumps(scores))
"""


class Bench:
    """A folder of jars, files to score, and what the program in Java's place was asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch
        self.jars, self.cache = folder / "the jars", folder / "cache"
        self.jars.mkdir()
        for name in JARS:
            (self.jars / name).touch()
        self.fails("")
        log, fault = str(folder / "log"), str(folder / "fault.py")
        (folder / "program.py").write_text(f"LOG, FAULT = {log!r}, {fault!r}\n{STAND_IN}")
        then = f'exec {shlex.quote(sys.executable)} {folder / "program.py"} "$@"'
        monkeypatch.setenv("PATH", bench.fake_java(folder / "bin", "spice", then))
        monkeypatch.setenv("PYTHONPATH", bench.small_table(folder))
        monkeypatch.setenv("XDG_CACHE_HOME", str(self.cache))
        captions = [{"image_id": i, "caption": f"a {'very ' * i}red cube"} for i in range(3)]
        references = [caption | {"id": i, "caption": f"the cube {i}"} for i, caption in enumerate(captions)]
        (folder / "p.json").write_text(json.dumps(captions))
        (folder / "r.json").write_text(json.dumps({"images": [{"id": i} for i in range(3)], "annotations": references}))

    def fails(self, code: str) -> None:
        """What the program runs before it scores."""
        (self.folder / "fault.py").write_text(code)

    def java(self, major: int) -> None:
        """Say that Java is of this version."""
        script = self.folder / "bin" / "java"
        lines = script.read_text().splitlines()
        answer = f'case "$*" in -version) echo \'openjdk version "{major}.0.1"\' >&2; exit 0;; esac'
        script.write_text("\n".join([lines[0], answer, *lines[1:]]))

    def score(self) -> int:
        files = [str(self.folder / "p.json"), "--references", str(self.folder / "r.json")]
        return main(["score", *files, "--spice-dir", str(self.jars), "--json"])

    def alone(self, limit_s: int = 60, words: str = "a red cube") -> MetricScores:
        """SPICE and CIDEr of six captions, as evaluate computes them."""
        chosen = {name: METRICS[name] for name in ("CIDEr", "SPICE")}
        pairs = [bench.pair(f"{words if i == 0 else 'a ball'} {i}", [f"the cube {i}"], [], i) for i in range(3)]
        one = ProtocolPairs("toy", Protocol("test", n=None, tokenizer="whitespace"), pairs)
        return compute_metrics(chosen, [one], {}, self.jars, limit_s)["toy/test"]

    def spice(self, limit_s: int = 60) -> float:
        """The score, which must be there."""
        found = self.alone(limit_s)
        assert found.absent.get("SPICE") is None
        return float(found.groups[ALL]["SPICE"] or 0)

    @property
    def runs(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]

    @property
    def parsed(self) -> list[int]:
        """New captions of each run of the program."""
        return [run["new"] for run in self.runs]

    @property
    def kept(self) -> Path:
        (file,) = (self.cache / "m3diff").iterdir()
        return file


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_the_score_stands_beside_the_others_with_its_interval_and_java_has_its_modules(toy: Bench, capsys):
    toy.monkeypatch.setenv("JDK_JAVA_OPTIONS", "-Dmine=1")
    assert toy.score() == 0
    assert json.loads(capsys.readouterr().out)["scores"]["SPICE"] == pytest.approx((10 + 15 + 20) / 300)
    options = toy.runs[0]["JDK_JAVA_OPTIONS"].split()
    assert options[0] == "-Dmine=1"
    modules = options[options.index("--module-path") + 1].split(os.pathsep)
    assert [Path(module).name for module in modules] == list(spice.NASHORN)
    assert options[options.index("--add-modules") + 1] == "org.openjdk.nashorn"
    assert "--add-opens=java.base/java.lang=ALL-UNNAMED" in options
    assert all("-XX:hashCode=3" in run["JAVA_TOOL_OPTIONS"] for run in toy.runs)
    assert toy.runs[0]["command"][1].startswith("-Xmx")


@pytest.mark.parametrize(("java", "names"), [(8, []), (14, []), (15, spice.NASHORN), (25, spice.NASHORN)])
def test_nashorn_is_asked_for_from_java_15_on_before_anything_is_parsed(toy: Bench, capsys, java, names):
    toy.java(java)
    for name in spice.NASHORN:
        (toy.jars / name).unlink()
    assert main(["score", "no such file", "--benchmark", "none", "--spice-dir", str(toy.jars)]) == DATA_REFUSED
    said = capsys.readouterr().err
    assert [name for name in JARS if name in said] == list(names)
    assert ("--check-spice" in said) == bool(names)
    assert not (toy.folder / "log").exists()


def test_what_is_missing_is_named_with_the_line_for_maven_and_by_hand_and_other_versions_of_nashorn_serve(
    toy: Bench, capsys
):
    def check() -> tuple[int, str]:
        return main(["score", "--check-spice", "--spice-dir", str(toy.jars)]), capsys.readouterr().out

    for name in JARS[1:4]:
        (toy.jars / name).rename(toy.jars / f"{name[:-4]}-sources.jar")  # which serve nobody
    code, said = check()
    assert code == DATA_REFUSED
    assert [line.split("/")[-1] for line in said.splitlines() if line.startswith("MISSING")] == list(JARS[1:4])
    assert f"found   {toy.jars / JARS[0]}\n" in said
    (maven,) = (line for line in said.splitlines() if "mvn" in line)
    assert f"-DoutputDirectory={shlex.quote(str(toy.jars))};" in maven
    for place in (
        "edu/stanford/nlp/stanford-corenlp/3.6.0/stanford-corenlp-3.6.0-models.jar",
        "org/openjdk/nashorn/nashorn-core/15.4/nashorn-core-15.4.jar",
        "org/ow2/asm/asm/7.3.1/asm-7.3.1.jar",
    ):
        group, artifact, version = place.rsplit("/", 3)[:3]
        assert f"https://repo1.maven.org/maven2/{place}" in said
        assert f"{group.replace('/', '.')}:{artifact}:{version}" in maven
    assert "asm-tree" not in maven
    for name in (JARS[1], "asm-9.7.jar", "nashorn-core-15.6.jar"):
        (toy.jars / name).touch()
    assert check()[0] == 0
    assert "nashorn-core-15.6.jar" in toy.runs[-1]["JDK_JAVA_OPTIONS"]
    assert not toy.cache.exists()  # the trial parses anew each time
    toy.fails("sys.exit(1)")
    code, said = check()
    assert (code, said.splitlines()[-1][:7]) == (DATA_REFUSED, "FAILED ")
    assert main(["score", "--check-spice"]) == DATA_REFUSED
    assert "MISSING stanford-corenlp-3.6.0.jar\n" in capsys.readouterr().out


FAULTS = {
    "an exception": (
        "sys.exit('Exception: scriptEngine is null\\n\\tat edu.anu.spice.Main(M.java:1)')",
        "scriptEngine",
    ),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "lack of memory"),
    "no answer": ("print('the disk is full'); sys.exit()", "the disk is full"),
    "half an answer": ("pathlib.Path(option('-out')).write_text('[{'); sys.exit()", "JSONDecodeError"),
}


@pytest.mark.fault("18")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_spice_that_was_asked_for_and_fails_is_refused_with_its_last_words(toy: Bench, capsys, fault):
    code, words = FAULTS[fault]
    toy.fails(code)
    found = toy.alone()  # in evaluate it stays null with its last words and costs no other score
    assert found.groups[ALL]["SPICE"] is None
    assert words in found.absent["SPICE"]
    assert found.groups[ALL]["CIDEr"] is not None
    if fault == "an exception":
        assert toy.score() == DATA_REFUSED
        told = capsys.readouterr()
        assert (words in told.err, "Main(M.java" in told.err, told.out) == (True, False, "")


def test_many_captions_are_parsed_in_parts_that_are_kept_and_shown(toy: Bench, capsys):
    toy.monkeypatch.setattr(spice, "PART", 2)
    toy.fails("sys.exit('no more') if len(open(LOG).readlines()) == 3 else None")
    assert "no more" in toy.alone().absent["SPICE"]
    assert toy.parsed == [2, 2, 2]
    assert "SPICE parses 6 captions" in capsys.readouterr().err
    toy.fails("")
    assert toy.spice()
    assert toy.parsed[3:] == [2, 0]  # of the run that failed the first parts were kept


def test_a_caption_that_is_too_long_for_the_cache_is_parsed_in_the_run_that_scores(toy: Bench):
    long = "red " * 150
    for _ in range(2):
        assert toy.alone(words=long).groups[ALL]["SPICE"] is not None
    assert toy.parsed == [5, 1, 1]


def test_captions_are_parsed_once_and_scored_in_a_run_that_parses_none_and_other_jars_parse_for_themselves(toy: Bench):
    assert toy.spice() == toy.spice()
    assert toy.parsed == [6, 0, 0]
    (toy.jars / JARS[0]).write_text("another CoreNLP")
    assert toy.spice()
    assert toy.parsed[3:] == [6, 0]


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-30])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[60] ^= 1
    file.write_bytes(data)


def without_captions(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as other:
        other.writestr("data.mdb", "[]")


@pytest.mark.parametrize("damage", [cut, flip, without_captions])
def test_a_damaged_cache_is_dropped_and_made_anew(toy: Bench, capsys, damage: Callable[[Path], None]):
    score = toy.spice()
    damage(toy.kept)
    assert toy.spice() == toy.spice() == score
    assert toy.parsed == [6, 0, 6, 0, 0]
    assert f"{toy.kept} is not used" in capsys.readouterr().err


def test_a_cache_that_lmdb_does_not_understand_is_dropped_and_without_lmdb_spice_goes_without_and_says_so(
    toy: Bench, capsys
):
    assert toy.spice()
    for when in ("known", "cache"):
        toy.fails(f"if {when}: sys.exit('LMDBException: INVALID\\n\\tat org.fusesource.lmdbjni.JNI(J.java:1)')")
        assert toy.spice()
    toy.fails("")
    assert toy.spice()
    assert toy.parsed == [6, 0, 0, 6, 6, 6, 6, 0]  # made, misunderstood, without one, none can be made, made anew
    assert [run["cache"] for run in toy.runs][2:6] == [True, False, True, False]
    assert "without a cache" in capsys.readouterr().err


def test_of_two_at_once_the_one_that_parsed_more_is_kept(toy: Bench):
    assert toy.spice()
    mine = toy.kept.read_bytes()
    others = toy.folder / "others.zip"
    with zipfile.ZipFile(others, "w") as file:
        file.writestr("data.mdb", json.dumps([str(i) for i in range(20)]))
        file.writestr("captions", "\n".join(str(i) for i in range(20)))
    toy.kept.unlink()
    name = spice.kept_file([toy.jars / name for name in JARS]).name
    place = toy.cache / "m3diff" / name
    toy.fails(f"if run['new']: pathlib.Path({str(place)!r}).write_bytes(pathlib.Path({str(others)!r}).read_bytes())")
    assert toy.spice()
    assert toy.kept.read_bytes() == others.read_bytes() != mine


def test_a_cache_that_has_grown_too_large_or_cannot_be_written_breaks_nothing(toy: Bench, capsys):
    toy.monkeypatch.setattr(spice, "MOST", 5)
    for _ in range(2):
        assert toy.spice()
    assert toy.parsed == [6, 0, 6, 0]
    shutil.rmtree(toy.cache)
    toy.cache.write_text("no folder")
    assert toy.spice()
    assert "not kept" in capsys.readouterr().err
    assert toy.parsed[4:] == [6, 0]


def test_the_time_limit_of_spice_counts_captions_and_the_cube_of_long_ones(toy: Bench):
    toy.fails("time.sleep(3) if run['new'] else None")
    toy.monkeypatch.setattr(spice, "SECONDS_A_CAPTION", 0.05)
    found = toy.alone(limit_s=0, words=" ".join(["red"] * 59))  # and a number
    assert found.absent["SPICE"].startswith("no answer within 2 s")  # 0.05 * (5 + 3 ** 3)
    toy.monkeypatch.setattr(spice, "SECONDS_A_CAPTION", 5)
    assert toy.spice(limit_s=2) > 0


def test_captions_without_a_tuple_have_no_score_and_say_so(toy: Bench):
    toy.fails("value = lambda item: None")
    assert toy.alone().absent["SPICE"].startswith("no caption names an object")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the worker ends by its limit")
def test_no_program_outlives_a_killed_parent(toy: Bench):
    toy.fails(f"open({str(toy.folder / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(300)")
    files = [str(toy.folder / name) for name in ("p.json", "r.json")]
    (toy.folder / "temporary").mkdir()
    toy.monkeypatch.setenv("TMPDIR", str(toy.folder / "temporary"))
    command = [sys.executable, "-m", "m3diff", "score", files[0], "--references", files[1]]
    with subprocess.Popen([*command, "--spice-dir", str(toy.jars)], stderr=subprocess.DEVNULL) as process:
        pid = toy.folder / "pid"
        while not (pid.exists() and pid.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(int(pid.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not list((toy.folder / "temporary").glob("m3diff-spice-*/spice-1.0.jar"))


real = pytest.mark.skipif(not (bench.REAL / "spice").is_dir(), reason="the jars are not here")


@real
@pytest.mark.slow(120)
def test_the_real_program_gives_the_published_score_and_the_second_time_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    coco = bench.REAL / "coco_caption"
    files = [str(coco / "en_captions_val2014_fakecap_results.json"), "--references"]
    files += [str(coco / "en_captions_val2014.json"), "--spice-dir", str(bench.REAL / "spice")]
    reports = []
    for _ in range(2):
        start = time.monotonic()
        assert main(["score", *files, "--json"]) == 0
        seconds = time.monotonic() - start
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0] == reports[1]
    assert main(["score", "--check-spice", "--spice-dir", str(bench.REAL / "spice")]) == 0
    assert "works " in capsys.readouterr().out
    assert reports[0]["scores"]["SPICE"] == pytest.approx(0.1329, abs=5e-5)
    assert seconds < 15 * max(1, os.getloadavg()[0] / (os.cpu_count() or 1))
