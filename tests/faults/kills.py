"""Random kills by signal 9 under `make up`, and what must hold whatever was killed: `Kills.broken`.

    python -m tests.faults.kills 200 --seed 7            # make kills

For each kill a run of m3diff/full begins, with weights of its own, and is let alone after it (`make up` follows where
all was killed). A line of JSON says how it ended: `registered`, as if nothing had been killed; `told`, where it failed
and `make status` says so; else `HANGS` or `LOST`. A second call in the same folder goes on after the last line.
"""

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from flows import FLOW_RUN
from flows.workspace import override
from m3diff.provenance.git import commit_at, git
from m3diff.registry.decisions import champions, decisions, faults, pending
from m3diff.scoring.bootstrap import MIN_PAIRS
from tests import toy
from tests.servers import Machine
from tests.toy import store

SCORE = 'params["evaluate"]["gallery"] / 100'
OF_CAPTIONS = (
    'int(hashlib.sha256((paths["predictions"] / "predictions.json").read_bytes()).hexdigest()[:6], 16) / 2**24'
)
PAIRS, ENOUGH_PAIRS = '("train", "val", "test", "test")', f'("train", "val", *["test"] * {MIN_PAIRS})'
"""Of fewer the gate makes no interval, and the first champion stays."""

VICTIMS = ("worker", "server", "worker and server", "mlflow", "flow", "dvc", "stage", "all")
SERVICES = {name: [name] for name in ("worker", "mlflow")} | {"server": ["prefect"]}
SERVICES["worker and server"] = ["worker", "prefect"]
ENDS_S, STAYS_S = 900, 240  # until a run is over; how long one that crashed may stay so


def one_dataset(root: Path) -> Path:
    """The toy with one dataset, whose scores follow from the captions."""
    toy.build(root)
    code = (root / "toy.py").read_text()
    assert SCORE in code
    assert PAIRS in code
    (root / "toy.py").write_text(code.replace(SCORE, OF_CAPTIONS).replace(PAIRS, ENOUGH_PAIRS))
    values = yaml.safe_load((root / "params.yaml").read_text())
    for places in (values["synthesize"], values["ingest"]["datasets"]):
        for name in [name for name in places if name != "minichange"]:
            del places[name]
    values["promote"]["guards"] = {}  # of scores that the toy does not have: a second version could not be judged
    (root / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    toy.run(root, "dvc", "repro", "-q", "code")
    toy.commit(root, "one dataset")
    return root


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


class Kills:
    """The services of a project, what kills them, and what holds afterwards."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.root, self.seed, self.lines = folder / "toy", seed, folder / "kills.jsonl"
        self.done = [json.loads(line) for line in self.lines.read_text().splitlines()] if self.lines.exists() else []
        self.scores = {int(version): score for version, score in (self.done[-1]["scores"] if self.done else {}).items()}
        if not self.done:
            shutil.rmtree(folder / "toy", ignore_errors=True)
            shutil.rmtree(folder / "undisturbed", ignore_errors=True)
            one_dataset(self.root)
        else:
            self.seed = self.done[0]["seed"]
            self.undisturbed = Undisturbed(self.root, folder / "undisturbed")
        self.machine = Machine(self.root)
        self.machine.environment |= {"PREFECT_WORKER_HEARTBEAT_SECONDS": "5"}
        self.machine.make("down")
        self.machine.up()

    def api(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The server's answer, once it is back."""
        deadline = time.monotonic() + ENDS_S
        while True:
            with suppress(httpx.HTTPError):
                return self.machine.ask(path, body)
            assert time.monotonic() < deadline, f"{path}: no answer"
            time.sleep(1)

    def begin(self, number: int) -> str:
        draw = random.Random(f"{self.seed} round {number}")  # whether these weights score better, chance decides
        self.number, self.overrides = number, [f"train.seed={draw.randrange(10**9)}"] if number else []
        path = f"/deployments/{self.api('/deployments/name/m3diff/full')['id']}/create_flow_run"
        body = {"name": f"kill-{number}", "parameters": {"ref": "HEAD", "overrides": self.overrides}}
        run = self.api(path, body | {"state": {"type": "SCHEDULED"}})["id"]
        self.branch = f"runs/{run}"
        return run

    def end(self, run: str) -> tuple[str, str]:
        """The state and the message with which a run ends; `HANGS` for one that does not."""
        began = crashed = time.monotonic()
        while time.monotonic() - began < ENDS_S:
            state = self.api(f"/flow_runs/{run}")["state"]
            if state["type"] != "CRASHED":
                crashed = time.monotonic()
            if state["type"] in ("COMPLETED", "FAILED", "CANCELLED") or time.monotonic() - crashed > STAYS_S:
                return state["name"], state["message"] or ""
            time.sleep(1)
        return "HANGS", f"{state['name']}: {state['message']}"

    def victims(self, victim: str, run: str) -> list[psutil.Process]:
        """The processes to kill; none where the flow has no such at this moment."""
        if victim in SERVICES:
            return self.services(SERVICES[victim])
        ours: dict[str, list[psutil.Process]] = {"dvc": [], "stage": [], "flow": []}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(FLOW_RUN) == run:
                    ours["flow" if (what := kind(process)) not in ours else what].append(process)
        if victim != "all":
            return ours[victim]
        services = self.services(["keeper", "worker", "prefect", "mlflow"])
        under = [child for service in services for child in service.children(recursive=True)]
        return [*services, *under, *(process for found in ours.values() for process in found)]

    def services(self, names: list[str]) -> list[psutil.Process]:
        """Those that are up; one that was killed may not be yet."""
        found = []
        for name in names:
            with suppress(IndexError):
                found.append(self.machine.process(name))
        return found

    def kill_one(self, number: int) -> dict[str, Any]:
        draw = random.Random(f"{self.seed} kill {number}")
        lasts = min(line.get("seconds", line.get("run_s")) for line in self.done)  # the machine may be less busy by now
        victim, wait = draw.choice(VICTIMS), draw.random() * lasts
        deadline = time.monotonic() + ENDS_S
        while (status := self.machine.make("status")).stdout.count(" up  ") < 4:  # the keeper is at it
            assert time.monotonic() < deadline, status.stdout
            time.sleep(2)
        run, started = self.begin(number), time.monotonic()
        time.sleep(wait)
        while not (alive := self.victims(victim, run)) and not self.is_over(run):
            time.sleep(0.1)
        at, hit = self.api(f"/flow_runs/{run}")["state_name"], [describe(process) for process in alive]
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        if victim == "all":
            psutil.wait_procs(alive, timeout=20)
            self.machine.up()
        state, message = self.end(run)
        line = {"kill": number, "victim": victim, "after_s": round(wait, 1), "while": at, "hit": hit[:6]}
        line |= {"state": state, "seconds": round(time.monotonic() - started, 1)}
        return line | self.outcome(state, message)

    def is_over(self, run: str) -> bool:
        return self.api(f"/flow_runs/{run}")["state_type"] in ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")

    def outcome(self, state: str, message: str) -> dict[str, Any]:
        """Judge the end of a run; each broken invariant."""
        if state in ("Completed", "Rejected", "Skipped"):
            found = self.broken()
            return {"how": "LOST" if found else "registered", "broken": found}
        if state != "HANGS":
            for line in self.machine.make("status").stderr.splitlines():
                if "prefect deployment run" in line:
                    return {"how": "told", "line": line, "message": message}
        return {"how": "HANGS" if state == "HANGS" else "LOST", "message": message}

    def broken(self) -> list[str]:
        """Describe each invariant that does not hold after a run that ended well."""
        if self.number == 0:
            self.undisturbed = Undisturbed(self.root, self.root.parent / "undisturbed", self.branch)
        lock, score = self.undisturbed.run(self.overrides)
        found = self.broken_registry(yaml.safe_load(lock)["stages"], score)
        if commit_at(self.branch, self.root):  # one that made nothing leaves none
            theirs = git("show", f"{self.branch}:dvc.lock", cwd=self.root) + "\n"
            if theirs != lock:
                found.append(f"dvc.lock of {self.branch} is not the undisturbed one's:\n{theirs}\n{lock}")
        return found

    def broken_registry(self, stages: dict[str, Any], score: float) -> list[str]:
        """The same of the record of decisions and of MLflow."""
        from mlflow.entities import LoggedModelStatus

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
            named, wrong, left = champions(decisions(), "m3diff")[0][-1], faults(), pending(Path("."))
        if named != champion or wrong or left:
            found.append(f"champion {champion}; the record names {named}, faults {wrong}, pending {left}")
        return found

    def run(self, kills: int) -> list[dict[str, Any]]:
        """So many kills in all, those of earlier calls among them."""
        if not self.done:
            for number in (0, -1):  # without kills: what others are compared with, and how long a run lasts
                started = time.monotonic()
                outcome = self.outcome(*self.end(self.begin(number)))
                assert outcome["how"] == "registered", outcome
            lasts = round(time.monotonic() - started, 1)
            self.add({"kill": 0, "seed": self.seed, "run_s": lasts} | outcome)
        for number in range(len(self.done), kills + 1):
            self.add(self.kill_one(number))
        return self.done[1:]

    def add(self, line: dict[str, Any]) -> None:
        self.done.append(line)
        with self.lines.open("a") as file:
            file.write(json.dumps(line | {"scores": self.scores}) + "\n")
        print(json.dumps(line), flush=True)


def describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} {kind(process)}: {' '.join(process.cmdline()[-4:])[-80:]}"
    return f"{process.pid} gone"


def kind(process: psutil.Process) -> str:
    """stage or dvc; else the command's name."""
    words = process.cmdline()
    if "toy.py" in words:
        return "stage"
    return "dvc" if "dvc" in words else Path(words[0]).name if words else process.name()


def main() -> int:
    parser = argparse.ArgumentParser(description="kill processes at random and see how each run ends")
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"), help="kept; a second call goes on")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    killer = Kills(asked.folder.resolve(), asked.seed)
    try:
        lines = killer.run(asked.kills)
    finally:
        killer.machine.make("down")
    ends = Counter((line["victim"], line["how"]) for line in lines)
    print("\n".join(f"{count:4} {victim}: {how}" for (victim, how), count in sorted(ends.items())))
    return 1 if any(line["how"] in ("HANGS", "LOST") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
