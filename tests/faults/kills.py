"""Random kills by signal 9 of any process of a flow, and what must hold whatever was killed.

`run` runs flows of the toy project, one after the other, and kills a process of them (the flow, DVC, a stage, git, or
all at once, as when the host dies) at a moment drawn from the seed; what it hits is on a line of its own. A flow that
lives on is killed again; one that died is started again with the same parameters, as the next firing of a schedule
would.
When a run has ended, and after every few kills one may end, what must hold is compared (`broken`); the next runs have
other parameters. The same seed waits as long and picks in the same way.
"""

import json
import random
import re
import shutil
import time
from collections import Counter
from contextlib import ExitStack, chdir, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

from flows import archive
from flows.dvc import entries
from flows.workspace import override
from m3diff.provenance.git import git
from m3diff.registry.decisions import champions, decisions, faults, pending
from m3diff.scoring.bootstrap import MIN_PAIRS
from tests import toy
from tests.faults.machine import Flow, Starter, describe, kind, starter
from tests.servers import prefect_server

ALL_AT_ONCE = 0.25  # share of the kills
SCORE = 'params["evaluate"]["gallery"] / 100'
SCORE_OF_CAPTIONS = (
    'int(hashlib.sha256((paths["predictions"] / "predictions.json").read_bytes()).hexdigest()[:6], 16) / 2**24'
)

PAIRS, ENOUGH_PAIRS = '("train", "val", "test", "test")', f'("train", "val", *["test"] * {MIN_PAIRS})'
"""Of fewer the gate makes no interval, and the first champion stays."""

TO_THE_END = 5  # after so many kills a run is let end
HANGS_S = 600


class Round(NamedTuple):
    """Runs of equal work: parameters that no other round has."""

    number: int
    overrides: list[str]

    @classmethod
    def drawn(cls, seed: int, number: int) -> "Round":
        """Other weights; whether they score better, chance decides."""
        return cls(number, [f"train.seed={random.Random(f'{seed} round {number}').randrange(10**9)}"])


@dataclass
class Told:
    """What happened."""

    seed: int
    kills: list[str] = field(default_factory=list)
    hit: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    starts: int = 0
    failed: int = 0  # runs that ended with an error after one of their processes was killed
    run_s: float = 0.0
    wall_s: float = 0.0
    broken: list[str] = field(default_factory=list)

    def fault(self, text: str) -> None:
        self.broken.append(f"after kill {len(self.kills)}: {text}")
        print(f"BROKEN {self.broken[-1]}", flush=True)


def one_dataset(root: Path) -> Path:
    """The toy with one dataset, whose scores follow from the captions."""
    toy.build(root)
    code = (root / "toy.py").read_text()
    assert SCORE in code
    assert PAIRS in code
    (root / "toy.py").write_text(code.replace(SCORE, SCORE_OF_CAPTIONS).replace(PAIRS, ENOUGH_PAIRS))
    values = yaml.safe_load((root / "params.yaml").read_text())
    for places in (values["synthesize"], values["ingest"]["datasets"]):
        for name in [name for name in places if name != "minichange"]:
            del places[name]
    values["promote"]["guards"] = {}  # of scores that the toy does not have: a second version could not be judged
    (root / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    toy.commit(root, "one dataset")
    return root


def begin_to_edit(root: Path) -> None:
    """A person's own work in the checkout: staged, new, and half typed."""
    (root / "staged.txt").write_text("a person's")
    toy.run(root, "git", "add", "staged.txt")
    (root / "new.txt").write_text("a person's")
    with (root / "params.yaml").open("a") as file:
        file.write("\ntrain: half typed\n")


def of_person(root: Path) -> dict[str, Any]:
    """What of the checkout is a person's."""
    data = sorted(str(path) for path in (root / "data").rglob("*"))
    asked = (("status", "--porcelain"), ("diff", "HEAD"), ("rev-parse", "HEAD"), ("symbolic-ref", "HEAD"))
    return {"data": data} | {" ".join(words): git(*words, cwd=root) for words in asked}


class Undisturbed:
    """A copy of the project in which nothing is killed, and `dvc repro` alone works."""

    def __init__(self, root: Path, place: Path, branch: str = "") -> None:
        self.root = place
        if place.exists():
            return
        shutil.copytree(root, place, symlinks=True, ignore=shutil.ignore_patterns("flows-*", "services"))
        toy.run(place, "git", "worktree", "prune")
        toy.run(place, "git", "checkout", "-q", "-f", "--detach", branch)
        toy.run(place, "dvc", "checkout", "-q", "--force")

    def run(self, overrides: list[str]) -> tuple[str, float]:
        """The `dvc.lock` and the score of a run with these parameters."""
        toy.run(self.root, "git", "checkout", "-q", "-f", "HEAD")
        override(self.root / "params.yaml", overrides)
        toy.run(self.root, "dvc", "repro", "-q")
        scores = json.loads((self.root / "data/07_report/metrics.json").read_text())
        return (self.root / "dvc.lock").read_text(), scores["protocols"][toy.TOTAL]["CIDEr"]


class Killer:
    """Runs flows, kills, compares."""

    def __init__(self, root: Path, flows: Starter, seed: int) -> None:
        self.root, self.flows, self.told = root, flows, Told(seed)
        self.round = Round(0, [])
        self.scores: dict[int, float] = {}  # of each version
        self.flow: Flow | None = None
        self.killed = False  # anything of the flow that runs
        self.first_run()
        begin_to_edit(root)
        self.person = of_person(root)

    def first_run(self) -> None:
        """Two without kills: what others are compared with, and how long a run lasts."""
        for number in range(2):
            if number:
                self.next_round()
            started = time.monotonic()
            self.to_the_end()
            assert not self.told.broken, self.told.broken
        self.told.run_s = time.monotonic() - started

    def next_round(self) -> None:
        self.told.rounds += 1
        self.round = Round.drawn(self.told.seed, self.round.number + 1)

    def start(self) -> Flow:
        self.told.starts += 1
        self.killed = False
        self.flow = self.flows.start(ref="HEAD", overrides=self.round.overrides, reason="a test")
        return self.flow

    def over(self, flow: Flow) -> bool:
        """Take note of a run that ended by itself: whether the round is over."""
        self.flow = None
        if left := flow.quiet():
            self.told.fault(f"still alive after the flow's end: {left}")
        if flow.code:
            self.told.failed += 1
            if not self.killed:
                self.told.fault(f"a run that nothing was killed of ended with {flow.code}: {tail(flow.log)}")
            return False
        for text in self.broken():
            self.told.fault(text)
        return True

    def to_the_end(self) -> None:
        """Let runs end until the round is over. One that nothing is killed of ends well."""
        while True:
            flow = self.flow or self.start()
            if not flow.ended(HANGS_S):
                self.told.fault(f"not over after {HANGS_S} s: {tail(flow.log)}")
                flow.quiet(0)
            if self.over(flow) or self.told.broken:
                return

    def kill(self, number: int) -> None:
        """One kill. Runs that end before it comes are compared, and others follow."""
        draw = random.Random(f"{self.told.seed} kill {number}")
        while True:
            share = draw.random()
            flow = self.flow or self.start()
            if not flow.ended(share * self.told.run_s) and (hit := self.strike(flow, draw)):
                break
            if flow.ended(0) and self.over(flow):
                self.next_round()
        self.killed = True
        self.told.kills.append(f"{share:.2f} of a run: {hit}")
        print(f"kill {number}, round {self.round.number}, {self.told.kills[-1]}", flush=True)
        if flow.ended(1 if flow.process.status() == psutil.STATUS_ZOMBIE else 0.3):
            self.flow = None
            if left := flow.quiet():
                self.told.fault(f"still alive 30 s after their flow was killed: {left}")

    def strike(self, flow: Flow, draw: random.Random) -> str:
        """Kill one process, of a kind that is drawn first, or all at once; what it was, or nothing where none lived."""
        alive: dict[str, list[psutil.Process]] = {}
        everything = draw.random() < ALL_AT_ONCE
        for process in flow.processes():
            with suppress(psutil.Error):
                alive.setdefault(kind(process), []).append(process)
        if not alive:
            return ""
        chosen = draw.choice(sorted(alive))
        victims = [process for found in alive.values() for process in found]
        if not everything:
            victims = [draw.choice(alive[chosen])]
        said = ", ".join(describe(process) for process in victims)
        for signal in (psutil.Process.suspend, psutil.Process.kill):  # nobody sees another one die
            for process in victims:
                with suppress(psutil.Error):
                    signal(process)
        self.told.hit["all" if everything else chosen] += 1
        return f"all of {said}" if everything else said

    def broken(self) -> list[str]:
        """What does not hold after a run that ended well, in words."""
        found = []
        if self.round.number == 0:
            self.undisturbed = Undisturbed(self.root, self.root.parent / "undisturbed", branches(self.root)[0])
        lock, score = self.undisturbed.run(self.round.overrides)
        for branch in branches(self.root, self.round.overrides):
            if (theirs := git("show", f"{branch}:dvc.lock", cwd=self.root) + "\n") != lock:
                place = self.root.parent / f"locks-{self.round.number}"
                place.mkdir(exist_ok=True)
                (place / "undisturbed.lock").write_text(lock)
                (place / "run.lock").write_text(theirs)
                same = entries(theirs) == entries(lock)
                found.append(f"dvc.lock of {branch} is not the undisturbed one's ({same=} as data); both in {place}")
        found += self.broken_registry(entries(lock), score)
        if hasattr(self, "person") and self.person != (now := of_person(self.root)):
            changed = [name for name in now if now[name] != self.person[name]]
            found.append(f"the checkout is not as its person left it: {changed}: {now['status --porcelain']!r}")
        common = self.root / ".git"
        locks = [path for path in common.rglob("*.lock") if "worktrees" not in path.parts and path.stat().st_size == 0]
        names = [str(path.relative_to(common)) for path in locks if "m3diff" not in str(path.relative_to(common))]
        return [*found, *(f"git's lock {name} was left behind" for name in names)]

    def broken_registry(self, stages: dict[str, Any], score: float) -> list[str]:
        """Of the record of decisions and of MLflow."""
        from mlflow.entities import LoggedModelStatus

        from tests.toy import store

        client, found = store(self.root), []
        (checkpoint,) = [out["md5"] for out in stages["train"]["outs"] if out["path"].endswith("checkpoint")]
        versions = client.search_model_versions("name = 'm3diff'")
        ours = [int(version.version) for version in versions if version.tags.get("dvc.checkpoint") == checkpoint]
        if len(ours) != 1:
            return [f"the weights of this round are versions {ours}, of {len(versions)}"]
        self.scores[ours[0]] = score
        best = max(self.scores, key=lambda version: (self.scores[version], -version))
        experiment = client.get_experiment_by_name("m3diff").experiment_id
        for model in client.search_logged_models([experiment]):
            if model.status != LoggedModelStatus.READY:
                found.append(f"logged model {model.model_id} is {model.status}")
        for run in client.search_runs([experiment]):
            if run.info.status == "RUNNING":
                found.append(f"MLflow run {run.info.run_id} is still RUNNING")
        champion = int(client.get_registered_model("m3diff").aliases["champion"])
        if champion != best:
            found.append(f"champion is {champion}, but of the scores {self.scores} that of {best} is best")
        with chdir(self.root):
            named, wrong, left = champions(decisions(), "m3diff").line[-1], faults(), pending(Path("."))
        if named != champion or wrong or left:
            found.append(f"champion {champion}; the record names {named}, faults {wrong}, pending {left}")
        return found


def branches(root: Path, overrides: list[str] | None = None) -> list[str]:
    """Of the runs that committed what they made, with these parameters of their own (all where None), newest first."""
    form = "%(trailers:key=Overrides,valueonly,separator=%x2C)"
    names = git("for-each-ref", "--sort=-committerdate", "--format=%(refname:short)", "refs/heads/runs/", cwd=root)
    found = []
    for name in [name for name in names.split() if name != archive.LATEST]:
        if re.search("^push (ran|skipped)", git("log", "-1", "--format=%B", name, cwd=root), re.MULTILINE):
            theirs = git("log", "-1", f"--format={form}", name, cwd=root).strip()
            if overrides is None or theirs == ",".join(overrides):
                found.append(name)
    return found


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def run(folder: Path, kills: int, seed: int) -> Told:
    """Kill so many times in a new project in `folder`; stops at the first thing that does not hold."""
    root = one_dataset(folder / "toy")
    with ExitStack() as stack:
        environment = stack.enter_context(prefect_server(folder / "prefect"))
        killer = Killer(root, stack.enter_context(starter(root, environment)), seed)
        told, started = killer.told, time.monotonic()
        print(f"seed {seed}: a run lasts {told.run_s:.1f} s", flush=True)
        for number in range(1, kills + 1):
            killer.kill(number)
            if number % TO_THE_END == 0 or number == kills:
                killer.to_the_end()
                killer.next_round()
            if told.broken:
                break
        if killer.flow:
            killer.flow.quiet(0)
        told.wall_s = time.monotonic() - started
    return told
