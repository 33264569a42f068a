"""The gate on models of which it is known which is better; and the record of decisions, which only grows."""

import calendar
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from m3diff.__main__ import main
from m3diff.provenance.git import alone, find_commit, who
from m3diff.records.errors import DataError
from m3diff.registry import decisions as record
from m3diff.registry.decisions import Entry, append, catch_up, decisions, faults, pending, settled, share
from m3diff.registry.gate import Verdict, can_be_judged, judge, judge_first
from m3diff.scoring.bootstrap import bounds, resample
from m3diff.scoring.metrics.change_accuracy import NAMES
from m3diff.stages.register.params import Promote

PROTOCOL, PAIRS, RUNS = "minichange/total", 1200, 200
EXACT = "change_exact_accuracy"
PHI = 0.5
"""How alike two models' errors are, as the correlation of right and wrong over pairs: two embedded runs of other
recipes, both 90 % exact, have 0.54 on their 480 test pairs, since what is hard for one is hard for the other."""
NO_NUMBERS = [float("nan"), float("inf"), float("-inf"), None]


def gate(**changes) -> Promote:
    plain = {"protocol": PROTOCOL, "metric": EXACT, "min_gain": 0.0, "confidence": 0.95, "guards": {}}
    return Promote(**plain | changes)


def right(rng: np.random.Generator, shares: tuple[float, float], phi: float, pairs: int, runs: int) -> np.ndarray:
    """Which pairs two models have right, bool [2, pairs, runs]: each with its share, alike by `phi`."""
    a, b = shares
    both = a * b + phi * np.sqrt(a * (1 - a) * b * (1 - b))
    drawn = rng.random((pairs, runs))
    return np.stack([drawn < a, (drawn < both) | ((drawn >= a) & (drawn < a + b - both))])


def lows(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Lower bounds of the gains of every run at once: values [pairs, runs] -> [runs]. One drawing serves all runs."""
    ours, theirs = resample(first.astype(float), second.astype(float))
    return np.array([bounds(gain, 0.95).low for gain in ((ours - theirs) / len(first)).T])


def scores(exact: np.ndarray, **columns: list) -> pa.Table:
    """scores.parquet of pairs of one change."""
    counts = np.zeros((len(exact), len(NAMES)))
    for name, values in {"captions": 1, "single": 1, "single_exact": exact, "changed": 1}.items():
        counts[:, NAMES.index(name)] = values
    ids = [f"minichange/{n:06d}" for n in range(len(exact))]
    return pa.table({"protocol": [PROTOCOL] * len(ids), "id": ids, "change_statistics": counts.tolist(), **columns})


@pytest.mark.fault("S2")
@pytest.mark.parametrize(("share", "phi"), [(0.9, PHI), (0.86, 0.0), (0.5, PHI), (0.98, PHI), ("skewed", None)])
def test_of_200_equal_models_at_most_one_in_twenty_is_promoted(share, phi):
    rng = np.random.default_rng(2)
    if share == "skewed":  # as CIDEr's scores are
        hard, noise = rng.exponential(4.0, (PAIRS, RUNS)), rng.exponential(2.0, (2, PAIRS, RUNS))
        ours, theirs = np.where(rng.random(noise.shape) < 0.1, 0, hard + noise)
    else:
        ours, theirs = right(rng, (share, share), phi, PAIRS, RUNS)
    assert 0 < (lows(ours, theirs) > 0).sum() <= RUNS / 20


@pytest.mark.parametrize(("champion", "phi"), [(0.86, PHI), (0.9, PHI), (0.86, 0.3)])
def test_a_true_gain_of_four_points_of_exactness_over_1200_pairs_is_promoted_nine_times_in_ten(champion, phi):
    ours, theirs = right(np.random.default_rng(3), (champion + 0.04, champion), phi, PAIRS, RUNS)
    assert ours.mean() - theirs.mean() == pytest.approx(0.04, abs=0.003)
    assert (lows(ours, theirs) > 0).sum() >= 0.9 * RUNS


def test_the_gate_says_of_one_run_what_the_simulation_says():
    ours, theirs = right(np.random.default_rng(4), (0.89, 0.86), PHI, PAIRS, 12)
    found = [judge(gate(), scores(a), scores(b)) for a, b in zip(ours.T, theirs.T, strict=True)]
    assert [verdict.low for verdict in found] == lows(ours, theirs).tolist()
    promoted = [verdict.outcome == "promoted" for verdict in found]
    assert promoted == (lows(ours, theirs) > 0).tolist()
    assert 0 < sum(promoted) < len(found)


@pytest.fixture(scope="module")
def models() -> np.ndarray:
    """A challenger and a champion, right on 0.9 and 0.8 of 600 pairs; the gain's interval is about 0.07 to 0.13."""
    return right(np.random.default_rng(5), (0.9, 0.8), PHI, 600, 1)[:, :, 0]


def test_a_verdict_carries_gain_interval_and_pairs_and_its_lower_bound_must_exceed_the_least_gain(models):
    ours, theirs = models.mean(axis=1)
    found = judge(gate(), *map(scores, models))
    assert (found.outcome, found.pairs) == ("promoted", 600)
    assert (found.challenger_score, found.champion_score, found.gain) == pytest.approx((ours, theirs, ours - theirs))
    assert found.low < found.gain < found.high
    assert found.reason == (
        f"{EXACT} on {PROTOCOL} {ours:.4f}, the champion's {theirs:.4f}: gain {found.gain:+.4f}, "
        f"95 % interval {found.low:+.4f} to {found.high:+.4f} over 600 pairs; the lower bound exceeds 0"
    )
    assert judge(gate(min_gain=found.low - 1e-6), *map(scores, models)).outcome == "promoted"
    assert judge(gate(min_gain=found.low), *map(scores, models)).outcome == "refused"
    first = judge_first(gate(guards={"SPICE": 0.1}), scores(models[0]))
    reason = f"there was no champion; {EXACT} {ours:.4f} over 600 pairs of {PROTOCOL}"
    assert first == Verdict(outcome="first", reason=reason, pairs=600, challenger_score=found.challenger_score)
    surer = judge(gate(confidence=0.999), *map(scores, models))
    assert (surer.low < found.low, "99.9 % interval" in surer.reason) == (True, True)


@pytest.mark.fault("23", "T13")
@pytest.mark.parametrize("case", ["the other way round", "equal pair by pair", "ten pairs"])
def test_what_is_worse_equal_or_of_few_pairs_is_refused(models, case):
    few = np.stack([np.ones(10), np.zeros(10)])
    pair = {"the other way round": models[::-1], "equal pair by pair": models[[0, 0]], "ten pairs": few}[case]
    found = judge(gate(), *map(scores, pair))
    words = "too few pairs for an interval" if case == "ten pairs" else "its lower bound does not exceed 0"
    assert (found.outcome, found.reason.endswith(f"over {len(pair[0])} pairs; {words}")) == ("refused", True)


# Guards


@pytest.mark.fault("S2", "T13")
@pytest.mark.parametrize(
    ("ours", "theirs", "tolerance", "outcome"),
    [
        (0.5, 0.5, 0.02, "promoted"),
        (0.4801, 0.5, 0.02, "promoted"),
        (0.4799, 0.5, 0.02, "refused"),
        (0.9, 0.5, 0.02, "promoted"),
        (0.87, 0.90, 0.03, "promoted"),  # 0.03 and a little, as floats
        (0.1, 0.3, 0.2, "promoted"),
        (1.07, 1.1, 0.03, "promoted"),
        (0.57, 0.58, 0.01, "promoted"),
        (0.29, 0.29, 0.0, "promoted"),
        (0.869998, 0.90, 0.03, "refused"),
    ],
)
def test_a_guarded_score_may_be_worse_by_exactly_its_tolerance_and_no_more(models, ours, theirs, tolerance, outcome):
    tables = [scores(exact, SPICE=[value] * 600) for exact, value in zip(models, (ours, theirs), strict=True)]
    found = judge(gate(guards={"SPICE": tolerance}), *tables)
    assert (found.outcome, found.low > 0) == (outcome, True)
    guard = found.guards["SPICE"]
    assert guard == pytest.approx({"challenger": ours, "champion": theirs, "tolerance": tolerance})
    worse = f"SPICE {ours:.4f} is more than {tolerance:g} worse than {theirs:.4f}"
    assert (worse if outcome == "refused" else "guarded: SPICE") in found.reason


@pytest.mark.fault("T13")
@pytest.mark.parametrize("pairs", [10, 100, 600])
def test_a_guard_that_is_better_where_it_is_smaller_may_grow_by_exactly_its_tolerance(models, pairs):
    more, less = (scores(exact) for exact in models)
    silent = np.array(more["change_statistics"].to_pylist())
    silent[:pairs, NAMES.index("changed_unchanged")] = 1  # says "no change" of these pairs
    more = more.set_column(2, "change_statistics", pa.array(silent.tolist()))
    exactly = round(pairs / 600, 6)
    assert judge(gate(guards={"false_no_change": exactly}), more, less).outcome == "promoted"
    refused = judge(gate(guards={"false_no_change": exactly - 0.001}), more, less)
    assert f"false_no_change {exactly:.4f} is more than {exactly - 0.001:g} worse than 0.0000" in refused.reason


@pytest.mark.fault("18", "23")
def test_a_model_without_a_score_that_the_gate_asks_for_is_refused_or_cannot_be_compared(models):
    plain, whole = scores(models[1]), scores(models[1], SPICE=[0.5] * 600)
    ours = scores(models[0], SPICE=[0.6] * 600)
    found = judge(gate(metric="SPICE", guards={"METEOR": 0.1, EXACT: 0.1}), plain, whole)
    assert found.outcome == "refused"
    assert found.reason.startswith(f"it has no SPICE and no METEOR on {PROTOCOL}: see `absent` in its metrics.json")
    assert judge_first(gate(metric="SPICE"), plain).outcome == "refused"
    asked = [gate(guards={"SPICE": 0.1}), gate(metric="SPICE"), gate(metric="SPICE", guards={EXACT: 0.1})]
    assert [can_be_judged(cfg, ours, plain) for cfg in asked] == [False, False, False]
    assert [can_be_judged(cfg, ours, whole) for cfg in asked] == [True, True, True]
    assert judge(asked[1], ours, plain).reason == f"the champion has no SPICE on {PROTOCOL}"
    refused = judge(asked[0], ours, plain)
    assert (refused.outcome, "the champion has no SPICE, which is guarded" in refused.reason) == ("refused", True)


# Files that are not over the same pairs, and what is no number


def spice(values: list[float | None]) -> pa.Table:
    names = [f"minichange/{n:06d}" for n in range(len(values))]
    column = pa.array(values, pa.float64())
    return pa.table({"protocol": [PROTOCOL] * len(values), "id": names, "SPICE": column})


SPREAD = [n / 200 for n in range(200)]
WORST_NULL = [None] * 40 + SPREAD[40:]
UNLIKE = {
    "itself with its worst scores null": (spice(WORST_NULL), spice(SPREAD), "it has no SPICE of 40 pairs"),
    "the champion's are null": (spice(SPREAD), spice(WORST_NULL), "the champion has no SPICE of 40 pairs"),
    "as many nulls of other pairs": (spice(WORST_NULL), spice(SPREAD[:160] + [None] * 40), "it has no SPICE of 40"),
    "one null": (spice([None, *SPREAD[1:]]), spice([0.0] * 200), "such as minichange/000000"),
}


@pytest.mark.fault("T13", "S2")
@pytest.mark.parametrize("case", UNLIKE)
def test_scores_that_are_not_over_the_same_pairs_are_refused(case):
    ours, theirs, words = UNLIKE[case]
    found = judge(gate(metric="SPICE"), ours, theirs)
    assert (found.outcome, words in found.reason) == ("refused", True), found.reason
    guarded = [table.append_column("CIDEr", pa.array([v] * len(table))) for table, v in ((ours, 2.0), (theirs, 1.0))]
    assert judge(gate(metric="CIDEr", guards={"SPICE": 1.0}), *guarded).outcome == "refused"
    assert can_be_judged(gate(metric="SPICE"), ours, theirs) == ("the champion has" not in found.reason)


@pytest.mark.fault("T13")
def test_nulls_of_the_same_pairs_and_pairs_in_another_order_are_compared_and_other_pairs_are_not(models):
    better = [value and value + 0.1 for value in WORST_NULL]
    order = np.random.default_rng(7).permutation(200)
    found = judge(gate(metric="SPICE"), spice(better).take(order), spice(WORST_NULL))
    assert (found.outcome, found.gain) == ("promoted", pytest.approx(0.1))
    for ours, theirs in ((WORST_NULL, WORST_NULL), ([], []), ([1.0], [0.0])):
        assert judge(gate(metric="SPICE"), spice(ours), spice(theirs)).outcome == "refused"
    ours, theirs = map(scores, models)
    assert can_be_judged(gate(), ours, theirs.take(np.arange(600)[::-1]))
    assert not can_be_judged(gate(), ours, theirs.slice(1))
    with pytest.raises(ValueError, match="600 and 599 pairs"):
        judge(gate(), ours, theirs.slice(1))


@pytest.mark.fault("S2")
@pytest.mark.parametrize(("value", "pairs"), [*((v, 600) for v in NO_NUMBERS), *((v, 1) for v in NO_NUMBERS[:3])])
@pytest.mark.parametrize("asked", [{"metric": "SPICE"}, {"guards": {"SPICE": 1e9}}], ids=["metric", "guard"])
def test_nan_infinity_and_missing_scores_are_refused_of_either_model_and_of_the_first(models, asked, value, pairs):
    columns = [pa.array([v] * n + [0.5] * (600 - n), pa.float64()) for v, n in ((value, pairs), (0.6, 600), (0.4, 600))]
    ours, better = (scores(models[0], SPICE=column) for column in columns[:2])
    theirs, plain = (scores(models[1], SPICE=column) for column in columns[::2])
    for challenger, champion, whose in ((ours, plain, "it"), (ours, theirs, "it"), (better, theirs, "the champion")):
        found = judge(gate(**asked), challenger, champion)
        assert (found.outcome, f"{whose} has no SPICE" in found.reason) == ("refused", True), found.reason
    assert not can_be_judged(gate(**asked), better, theirs), "first it is scored again"
    assert judge_first(gate(**asked), ours).reason.startswith("it has no SPICE on")


def git(root: Path, *arguments: str, stdin: bytes = b"") -> str:
    config = ("-c", "user.name=a person", "-c", "user.email=person@example.org", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(root), *config, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, check=True).stdout.decode().strip()


@pytest.fixture(scope="module")
def here_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a commit and an edit under way."""
    root = tmp_path_factory.mktemp("clone")
    git(root, "init", "-q", "-b", "main")
    (root / "code.py").write_text("1")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "code")
    (root / "code.py").write_text("2")
    return root


@pytest.fixture
def here(here_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = Path(shutil.copytree(here_once, tmp_path / "clone"))
    monkeypatch.chdir(root)
    return root


def moved(to: int | None, before: int | None = None, **changes: object) -> Entry:
    plain = {"action": "promote", "model": "m", "from_": before, "to": to, "outcome": "promoted", "why": "better"}
    return Entry(**plain | changes)


def back(to: int, before: int | None) -> Entry:
    return moved(to, before, action="rollback", outcome="rolled back", why="")


def of_an_earlier_release(root: Path, *lines: dict[str, object], more: str = "") -> str:
    """A record as earlier releases wrote it, a line a decision in a file; its commit."""
    plain = {"action": "promote", "model": "m", "outcome": "promoted", "why": "better", "previous": None, "of": None}
    plain |= {"gate": {}, "at": "2026-01-02T03:04:05Z", "who": "a@b", "flow_run": None, "commit": None}
    text = "".join(f"{json.dumps(plain | {'before': '0' * 64} | line)}\n" for line in lines) + more
    blob = git(root, "hash-object", "-w", "--stdin", stdin=text.encode())
    tree = git(root, "mktree", stdin=f"100644 blob {blob}\t{record.FILE}".encode())
    commit = git(root, "commit-tree", tree, "-m", "m: champion - -> 1, first")
    git(root, "update-ref", record.BRANCH, commit)
    return commit


def test_an_entry_says_who_when_what_why_from_which_flow_run_and_at_which_commit(here, monkeypatch):
    monkeypatch.setenv("M3DIFF_FLOW_RUN", "f-1")
    written = append(Path("."), moved(2, 1, previous=1, gate={"gain": 0.5}))
    assert decisions() == [written]
    assert git(here, "ls-tree", "-r", record.BRANCH) == "", "no file, so that nothing else of git reads it"
    assert json.loads(git(here, "log", "-1", "--format=%B", record.BRANCH)) == {
        **{"number": 1, "at": written.at, "who": who(), "action": "promote", "model": "m", "from": 1, "to": 2},
        **{"outcome": "promoted", "why": "better", "previous": 1, "of": None, "gate": {"gain": 0.5}},
        **{"registry": None, "versions": {}, "flow_run": "f-1", "commit": git(here, "rev-parse", "HEAD")},
    }
    assert abs(time.time() - calendar.timegm(time.strptime(written.at, "%Y-%m-%dT%H:%M:%SZ"))) < 60
    assert "@" in written.who


def test_writing_touches_neither_files_nor_index_nor_head_runs_no_hook_and_signs_nothing(here, tmp_path):
    hook = here / ".git" / "hooks" / "reference-transaction"
    hook.write_text(f"#!/bin/sh\ntouch {here}/hook-ran\n")
    hook.chmod(0o755)
    git(here, "config", "commit.gpgsign", "true")
    (here / "staged.py").write_text("3")
    git(here, "add", "staged.py")
    git(here, "worktree", "add", "-q", "--detach", str(tmp_path / "tree"))
    (here / "hook-ran").unlink(missing_ok=True)

    def state() -> tuple[str, str, bytes]:
        return git(here, "status", "--porcelain"), git(here, "rev-parse", "HEAD"), (here / ".git/index").read_bytes()

    before = state()
    append(tmp_path / "tree", moved(1), pending=True)
    settled(Path("."))
    assert state() == before
    assert git(here, "log", "--format=%an <%ae> %cn", record.NAME) == "m3diff <m3diff@localhost> m3diff"
    assert [entry.to for entry in decisions(here)] == [1], "a worktree's record is the repository's"


def test_without_a_repository_the_remedy_is_said_and_an_empty_record_is_sound(here, tmp_path, monkeypatch, capsys):
    assert main(["history", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    with pytest.raises(DataError, match=r"remotes \(none\); fetch the branch that holds it"):
        find_commit("0" * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for asked in (lambda: append(Path("."), moved(1)), lambda: alone("x").__enter__()):
        with pytest.raises(DataError, match="no git repository.*or make one: git init"):
            asked()


# A record that somebody edited, that is damaged, or that an earlier release wrote


@pytest.mark.fault("S2")
@pytest.mark.parametrize(
    ("places", "found"),
    [([0, 2], "decision 2: it bears the number 3"), ([0, 1, 2, 2], "decision 4: it bears the number 3")],
    ids=["taken out", "put in"],
)
def test_decisions_taken_out_or_put_in_are_named_and_history_exits_with_three(here, places, found, capsys):
    for version in (1, 2, 3):
        append(Path("."), moved(version, version - 1 or None))
    assert (faults(), main(["history"])) == ([], 0)
    commits = git(here, "rev-list", "--reverse", record.BRANCH).split()
    parent: tuple[str, ...] = ()
    for commit in (commits[place] for place in places):  # as somebody does who edits the branch
        message = git(here, "log", "-1", "--format=%B", commit).encode()
        parent = ("-p", git(here, "commit-tree", record.EMPTY, *parent, stdin=message))
    git(here, "update-ref", record.BRANCH, parent[1])
    (fault,) = faults()
    assert fault.startswith(found)
    assert main(["history"]) == 3
    said = capsys.readouterr()
    assert f"m3diff history: {found}" in said.err
    assert " ".join(said.out.splitlines()[-2].split()).endswith(f"{who()} m 2 -> 3 promoted -")
    assert said.out.splitlines()[-1].strip() == "better"


def test_a_record_of_an_earlier_release_is_read_and_continued(here):
    old = of_an_earlier_release(here, {"number": 1, "from": None, "to": 1}, {"number": 2, "from": 1, "to": 2})
    git(here, "update-ref", record.PENDING, old)
    assert pending(here) == decisions()[1], "its process was killed before this release was installed"
    settled(here)
    append(here, back(1, 2))
    append(here, moved(3, 1))
    assert [(one.number, one.from_, one.to) for one in decisions()] == [(1, None, 1), (2, 1, 2), (3, 2, 1), (4, 1, 3)]
    assert (faults(), decisions()[0].at) == ([], "2026-01-02T03:04:05Z")
    assert git(here, "rev-parse", f"{record.BRANCH}~2") == old


@pytest.mark.parametrize("lost", ["tip", "parent", "file", "a note", "a line"])
def test_a_record_of_which_a_part_is_gone_or_is_no_decision_is_no_empty_record(here, lost):
    """Taken for empty, the next decision would begin it anew, and what was decided would be lost without a word."""
    of_an_earlier_release(here, {"number": 1, "from": None, "to": 1}, more="{}\n" if lost == "a line" else "")
    if lost != "a line":
        append(here, moved(2, 1))
    name = {"tip": record.BRANCH, "parent": f"{record.BRANCH}^", "file": f"{record.BRANCH}^:{record.FILE}"}
    said = {"a note": r"commit \w{12}, .*: no decision", "a line": "decisions.jsonl line 2: no decision"}.get(lost, "")
    if lost in name:
        gone = git(here, "rev-parse", name[lost])
        (here / ".git/objects" / gone[:2] / gone[2:]).unlink()
    elif lost == "a note":
        note = git(here, "commit-tree", record.EMPTY, "-p", record.BRANCH, "-m", "a note")
        git(here, "update-ref", record.BRANCH, note)
    for asked in (decisions, lambda: append(here, moved(3, 2))):
        with pytest.raises(DataError, match=f"runs/history.*{said}.*git update-ref refs/heads/runs/history COMMIT"):
            asked()
    assert main(["history"]) == 3


# What the record says of a model

NOTICED = {"action": "noticed", "outcome": "moved elsewhere"}
REFUSED, OTHER, UNDONE = {"outcome": "refused"}, {"model": "other"}, {"outcome": "not done", "of": 2}
UP = (moved(1), moved(2, 1))
LINES = {
    "one after the other": ((*UP, moved(3, 2), moved(9, 3, **REFUSED), moved(5, 4, **OTHER)), [1, 2, 3], []),
    "rolled back": ((*UP, moved(3, 2), back(2, 3)), [1, 2], [3]),
    "rolled back over another": ((*UP, moved(3, 2), back(2, 3), moved(4, 2), back(1, 4)), [1], [2, 3, 4]),
    "champion again": ((*UP, back(1, 2), moved(3, 1), back(1, 3), moved(2, 1)), [1, 2], [3]),
    "a second time without rollback": ((*UP, moved(1, 2)), [2, 1], []),
    "of before the record": ((back(2, 3),), [2], [3]),
    "moved by hand to an older one": ((*UP, moved(1, 2, **NOTICED)), [1], [2]),
    "moved by hand to a newer one": ((moved(1), moved(7, 1, **NOTICED)), [1, 7], []),
    "the alias gone": ((moved(1), moved(None, 1, **NOTICED), moved(8)), [1, 8], []),
    "the alias gone, and another accepted": ((moved(1), moved(None, 1, **NOTICED), back(7, None)), [1, 7], []),
    "not done": ((*UP, moved(2, 1, **UNDONE)), [1], []),
}


@pytest.mark.parametrize("case", LINES)
def test_champions_follow_each_other_and_a_rollback_takes_back_what_it_leaves(case):
    entries, line, taken_back = LINES[case]
    facts = {"at": "", "who": "", "flow_run": None, "commit": None}
    found = [record.Decision(**dict(entry), number=number, **facts) for number, entry in enumerate(entries, start=1)]
    champions, back = record.champions(found, "m")
    assert (champions, sorted(back)) == (line, taken_back)
    assert [move.to for move in record.moves(found, "m")][-1] == line[-1]


# Many writers, killed writers


def test_writers_at_once_lose_nothing_and_one_that_is_overtaken_is_asked_to_try_again(here, monkeypatch):
    def write(model: str) -> None:
        for version in range(1, 6):
            with alone("record"):
                append(here, moved(version, model=model))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults() == []
    for model in "abc":
        assert [entry.to for entry in decisions() if entry.model == model] == [1, 2, 3, 4, 5]
    tip = git(here, "rev-parse", f"{record.BRANCH}^")
    with monkeypatch.context() as overtaken:
        overtaken.setattr(record, "_tip", lambda repository: tip)
        with pytest.raises(BlockingIOError, match="another process wrote in between; try again"):
            append(here, moved(1))
    assert len(decisions()) == 15


def test_a_move_is_pending_from_before_it_is_recorded_until_it_is_settled(here, monkeypatch, capsys):
    assert pending(here) is None
    written = append(here, moved(1), pending=True)
    assert pending(here) == written
    append(here, moved(2, outcome="refused"))
    assert pending(here) == written, "the entry, not the newest"
    assert main(["history"]) == 0
    assert "m3diff history: decision 1 may still be under way; promote finishes it" in capsys.readouterr().err
    settled(here)
    settled(here)
    assert pending(here) is None
    with monkeypatch.context() as cut:
        real = record.write_ref
        cut.setattr(record, "write_ref", lambda root, ref, *c: real(root, ref, *c) if ref == record.PENDING else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            append(here, moved(3), pending=True)
    assert pending(here) is None, "killed before it was recorded"
    assert append(here, moved(4), pending=True) == pending(here)


HOLD = """
import sys, threading, time
from m3diff.provenance.git import alone, run
with alone("promote"):
    if sys.argv[1:] != ["none"]:
        slow = ("-c", "alias.slow=!sleep 2", "slow")
        limit = {"seconds": 10} if sys.argv[1:] == ["remote"] else {}
        threading.Thread(target=run, args=slow, kwargs=limit, daemon=True).start()
        time.sleep(0.3)
    print("held", flush=True)
    time.sleep(1.5)
"""


@pytest.mark.parametrize(
    ("git_command", "killed", "waits"),
    [("none", False, True), ("none", True, False), ("local", True, True), ("remote", True, False)],
)
def test_one_at_a_time_and_a_killed_one_holds_on_for_its_git_command_alone(here, capsys, git_command, killed, waits):
    first: Any = subprocess.Popen([sys.executable, "-c", HOLD, git_command], stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "held\n"
    if killed:
        first.kill()
        first.wait()
    with alone("record", here):
        assert capsys.readouterr().out == "", "another lock"
    with alone("promote", here):
        assert ("promote: waiting for another one" in capsys.readouterr().out) == waits
        assert killed or not waits or first.poll() is not None or first.wait(5) == 0
    first.wait()


# Other clones


@pytest.fixture
def second(here: Path, tmp_path: Path) -> Path:
    """Another clone; both know the bare remote `remote.git` as `team`."""
    git(here, "init", "-q", "--bare", str(tmp_path / "remote.git"))
    git(tmp_path, "init", "-q", "second")
    for root in (here, tmp_path / "second"):
        git(root, "remote", "add", "team", str(tmp_path / "remote.git"))
        git(root, "config", "m3diff.runs", "team")
    return tmp_path / "second"


def decide(root: Path, entry: Entry) -> None:
    catch_up(root)
    append(root, entry)
    share(root)


def test_clones_that_decide_in_turn_have_one_record_which_is_pushed_where_git_config_says_so(here, second, capsys):
    git(here, "config", "--unset", "m3diff.runs")
    decide(here, moved(1))
    assert git(second, "ls-remote", "team") == ""
    git(here, "config", "m3diff.runs", "team")
    for version, root in ((2, here), (3, second), (4, here)):
        decide(root, moved(version, version - 1))
    assert [entry.to for entry in decisions(here)] == [1, 2, 3, 4]
    assert faults(here) == []
    remote = second.with_name("remote.git")
    remote.rename(remote.with_name("away"))
    assert capsys.readouterr().err == ""
    decide(here, moved(5, 4))
    said = capsys.readouterr().err
    assert ("not fetched from 'team'" in said, "not pushed to 'team'" in said) == (True, True)
    remote.with_name("away").rename(remote)
    decide(here, moved(6, 5))
    assert capsys.readouterr().err == ""
    assert git(remote, "rev-parse", record.BRANCH) == git(here, "rev-parse", record.BRANCH)


def test_clones_that_decided_at_once_keep_both_records_and_say_so_plainly(here, second, capsys):
    decide(here, moved(1))
    catch_up(second)
    append(second, moved(2, 1))
    append(here, moved(3, 1))
    share(second)
    catch_up(here)
    assert capsys.readouterr().err == ""
    share(here)
    said = capsys.readouterr().err
    assert "another clone decided at once, and nothing is overwritten" in said
    assert [entry.to for entry in decisions(here)] == [1, 3]
    for command in ("git fetch team runs/history", f"git update-ref {record.BRANCH} FETCH_HEAD"):
        assert command in said
        git(here, *command.split()[1:])
    assert [entry.to for entry in decisions(here)] == [entry.to for entry in decisions(second)] == [1, 2]


def test_a_remote_that_does_not_answer_keeps_nobody_waiting(here, monkeypatch, capsys):
    git(here, "config", "m3diff.runs", "ext::sleep 30")
    git(here, "config", "protocol.ext.allow", "always")
    append(here, moved(1, why=""))
    monkeypatch.setattr(record, "FETCH_S", 0.5)
    monkeypatch.setattr(record, "PUSH_S", 0.6)
    catch_up(here)
    assert "no answer in 0.5 s" in capsys.readouterr().err
    share(here)
    assert "not pushed to 'ext::sleep 30' (no answer in 0.6 s)" in capsys.readouterr().err
