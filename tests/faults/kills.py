"""Kill processes at random with signal 9 under `make up`, and check the invariants of `Kills.broken` afterwards.

    python -m tests.faults.kills 200 --seed 7            # make kills

For each kill a run of m3diff/full with new weights begins, and nothing else touches it after the kill, except that
`make up` runs if everything was killed. A line of JSON says how the run ended: `registered`, as if nothing had been
killed; `told`, if it failed and `make status` says so; otherwise `HANGS` or `LOST`. A second call in the same folder
continues after the last line.
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

from flows import PREFECT_FLOW_RUN_VARIABLE
from flows.workspace import write_overrides
from m3diff.provenance.git import commit_at, git
from m3diff.registry.decisions import find_pending_move, follow_champions, numbering_faults, read_decisions
from m3diff.scoring.bootstrap import MIN_PAIRS
from tests import toy
from tests.errors import Message
from tests.servers import Machine
from tests.toy import store

SCORE = 'params["evaluate"]["gallery"] / 100'
OF_CAPTIONS = (
    'int(hashlib.sha256((paths["predictions"] / "predictions.json").read_bytes()).hexdigest()[:6], 16) / 2**24'
)
PAIRS = '("train", "val", "test", "test")'
ENOUGH_PAIRS = f'("train", "val", *["test"] * {MIN_PAIRS})'
"""With fewer pairs the gate makes no interval, and the first champion stays."""

VICTIMS = ("worker", "server", "worker and server", "mlflow", "flow", "dvc", "stage", "all")
SERVICES = {name: [name] for name in ("worker", "mlflow")} | {"server": ["prefect"]}
SERVICES["worker and server"] = ["worker", "prefect"]
ENDS_S = 900  # the time limit of a run
STAYS_S = 240  # how long a run may stay crashed


def one_dataset(root: Path) -> Path:
    """Build the toy project with one dataset and with scores that follow from the captions."""
    toy.build(root)
    code = (root / "toy.py").read_text()
    assert SCORE in code
    assert PAIRS in code
    (root / "toy.py").write_text(code.replace(SCORE, OF_CAPTIONS).replace(PAIRS, ENOUGH_PAIRS))
    values = yaml.safe_load((root / "params.yaml").read_text())
    for datasets in (values["synthesize"], values["ingest"]["datasets"]):
        for name in [name for name in datasets if name != "minichange"]:
            del datasets[name]
    values["promote"]["guards"] = {}  # of scores that the toy does not have: a second version could not be judged
    (root / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    toy.run(root, "dvc", "repro", "-q", "code")
    toy.commit(root, "one dataset")
    return root


class Undisturbed:
    """A copy of the project in which only `dvc repro` runs and nothing is killed."""

    def __init__(self, root: Path, copy: Path, branch: str = "") -> None:
        self.root = copy
        if copy.exists():
            return
        shutil.copytree(root, copy, symlinks=True, ignore=shutil.ignore_patterns("flows-*", "services"))
        toy.run(copy, "git", "worktree", "prune")
        toy.run(copy, "git", "checkout", "-q", "-f", "--detach", branch)
        toy.run(copy, "dvc", "checkout", "-q", "--force")

    def run(self, overrides: list[str]) -> tuple[str, float]:
        """Run `dvc repro` with these parameters; return the `dvc.lock` and the score."""
        toy.run(self.root, "git", "checkout", "-q", "-f", "HEAD")
        write_overrides(self.root / "params.yaml", overrides)
        toy.run(self.root, "dvc", "repro", "-q")
        scores = json.loads((self.root / "data/07_report/metrics.json").read_text())
        return (self.root / "dvc.lock").read_text(), scores["protocols"][toy.TOTAL]["CIDEr"]


class Kills:
    """Kills the services and flows of a project and checks the invariants afterwards."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.root = folder / "toy"
        self.seed = seed
        self.lines = folder / "kills.jsonl"
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
        """Return the server's answer, as soon as it is back."""
        deadline = time.monotonic() + ENDS_S
        while True:
            with suppress(httpx.HTTPError):
                return self.machine.ask(path, body)
            assert time.monotonic() < deadline, f"{path}: no answer"
            time.sleep(1)

    def begin(self, number: int) -> str:
        """Start a run with random weights; return its id."""
        draw = random.Random(f"{self.seed} round {number}")  # chance decides whether these weights score better
        self.number = number
        self.overrides = [f"train.seed={draw.randrange(10**9)}"] if number else []
        path = f"/deployments/{self.api('/deployments/name/m3diff/full')['id']}/create_flow_run"
        body = {"name": f"kill-{number}", "parameters": {"ref": "HEAD", "overrides": self.overrides}}
        run = self.api(path, body | {"state": {"type": "SCHEDULED"}})["id"]
        self.branch = f"runs/{run}"
        return run

    def end(self, run: str) -> tuple[str, str]:
        """Return the state and the message with which a run ends; `HANGS` if it does not end."""
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
        """Return the processes to kill; none if the flow has no such process at this moment."""
        if victim in SERVICES:
            return self.services(SERVICES[victim])
        flow_processes: dict[str, list[psutil.Process]] = {"dvc": [], "stage": [], "flow": []}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(PREFECT_FLOW_RUN_VARIABLE) == run:
                    process_kind = kind(process)
                    flow_processes[process_kind if process_kind in flow_processes else "flow"].append(process)
        if victim != "all":
            return flow_processes[victim]
        services = self.services(["keeper", "worker", "prefect", "mlflow"])
        processes = list(services)
        for service in services:
            processes += service.children(recursive=True)
        for processes_of_kind in flow_processes.values():
            processes += processes_of_kind
        return processes

    def services(self, names: list[str]) -> list[psutil.Process]:
        """Return the services that are up. One that was killed may not be up yet."""
        processes = []
        for name in names:
            with suppress(IndexError):
                processes.append(self.machine.process(name))
        return processes

    def kill_one(self, number: int) -> dict[str, Any]:
        """Start a run, kill a random victim at a random moment, and return the line about it."""
        draw = random.Random(f"{self.seed} kill {number}")
        lasts = min(line.get("seconds", line.get("run_s")) for line in self.done)  # by now the machine may be less busy
        victim = draw.choice(VICTIMS)
        wait = draw.random() * lasts
        deadline = time.monotonic() + ENDS_S
        while (status := self.machine.make("status")).stdout.count(" up  ") < 4:  # the keeper still starts some
            assert time.monotonic() < deadline, status.stdout
            time.sleep(2)
        run = self.begin(number)
        started = time.monotonic()
        time.sleep(wait)
        while not (alive := self.victims(victim, run)) and not self.is_over(run):
            time.sleep(0.1)
        at = self.api(f"/flow_runs/{run}")["state_name"]
        hit = [describe(process) for process in alive]
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
        """Return how a run ended, with each broken invariant."""
        if state in ("Completed", "Rejected", "Skipped"):
            broken = self.broken()
            return {"how": "LOST" if broken else "registered", "broken": broken}
        if state != "HANGS":
            stderr = self.machine.make("status").stderr
            if Message("infra.last_training_failed").in_text(stderr):
                return {"how": "told", "line": stderr.strip(), "message": message}
        return {"how": "HANGS" if state == "HANGS" else "LOST", "message": message}

    def broken(self) -> list[str]:
        """Describe each invariant that does not hold after a run that ended well."""
        if self.number == 0:
            self.undisturbed = Undisturbed(self.root, self.root.parent / "undisturbed", self.branch)
        lock, score = self.undisturbed.run(self.overrides)
        broken = self.broken_registry(yaml.safe_load(lock)["stages"], score)
        if commit_at(self.branch, self.root):  # a run that made nothing leaves no branch
            branch_lock = git("show", f"{self.branch}:dvc.lock", cwd=self.root) + "\n"
            if branch_lock != lock:
                broken.append(f"dvc.lock of {self.branch} is not the undisturbed one's:\n{branch_lock}\n{lock}")
        return broken

    def broken_registry(self, stages: dict[str, Any], score: float) -> list[str]:
        """Describe each broken invariant of the record of decisions and of MLflow."""
        from mlflow.entities import LoggedModelStatus

        client = store(self.root)
        broken = []
        (checkpoint,) = [out["md5"] for out in stages["train"]["outs"] if out["path"].endswith("checkpoint")]
        versions = client.search_model_versions("name = 'm3diff'")
        own_versions = [
            int(version.version) for version in versions if version.tags.get("dvc.checkpoint") == checkpoint
        ]
        if len(own_versions) != 1:
            return [f"the weights of this round are versions {own_versions}, of {len(versions)}"]
        self.scores[own_versions[0]] = score
        best = max(self.scores, key=lambda version: (self.scores[version], -version))
        experiment = client.get_experiment_by_name("m3diff").experiment_id
        for model in client.search_logged_models([experiment]):
            if model.status != LoggedModelStatus.READY:
                broken.append(f"logged model {model.model_id} is {model.status}")
        for run in client.search_runs([experiment]):
            if run.info.status == "RUNNING":
                broken.append(f"MLflow run {run.info.run_id} is still RUNNING")
        champion = int(client.get_registered_model("m3diff").aliases["champion"])
        if champion != best:
            broken.append(f"champion is {champion}, but of the scores {self.scores} that of {best} is best")
        with chdir(self.root):
            recorded_champion = follow_champions(read_decisions(), "m3diff").champions[-1]
            record_faults = numbering_faults()
            pending_entries = find_pending_move(Path("."))
        if recorded_champion != champion or record_faults or pending_entries:
            record = f"{recorded_champion}, faults {record_faults}, pending {pending_entries}"
            broken.append(f"champion {champion}; the record names {record}")
        return broken

    def run(self, kills: int) -> list[dict[str, Any]]:
        """Kill until there are `kills` lines, including those of earlier calls; return the lines."""
        if not self.done:
            for number in (0, -1):  # without kills: for comparison, and to learn how long a run takes
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
    """Return `stage` or `dvc`, or else the name of the command."""
    words = process.cmdline()
    if "toy.py" in words:
        return "stage"
    return "dvc" if "dvc" in words else Path(words[0]).name if words else process.name()


def main() -> int:
    parser = argparse.ArgumentParser(description="kill processes at random and see how each run ends")
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"), help="kept; a second call goes on")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    killer = Kills(arguments.folder.resolve(), arguments.seed)
    try:
        lines = killer.run(arguments.kills)
    finally:
        killer.machine.make("down")
    ends = Counter((line["victim"], line["how"]) for line in lines)
    print("\n".join(f"{count:4} {victim}: {end}" for (victim, end), count in sorted(ends.items())))
    return 1 if any(line["how"] in ("HANGS", "LOST") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
