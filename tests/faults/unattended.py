"""Random kills by signal 9 under `make up`, where nobody looks: of the worker, Prefect's server, both, MLflow, a flow's
process, DVC, a stage, or all at once.

    python -m tests.faults.unattended 200 --seed 7

For each kill a run of m3diff/full begins, with weights of its own, and is let alone after the kill (where the whole
machine was killed, `make up` follows, as at its start). A line of JSON says how it ended: `registered`, and all as if
nothing had been killed (`tests/faults/kills.py` compares); `told`, where the run failed and `make status` has a line
about it; else `HANGS` or `LOST`. Project and lines are kept in the folder: a second call goes on after the last line.
"""

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from flows import FLOW_RUN
from tests.faults.kills import Killer, Round, Told, Undisturbed, begin_to_edit, of_person, one_dataset
from tests.faults.machine import describe, kind
from tests.servers import Machine

VICTIMS = ("worker", "server", "worker and server", "mlflow", "flow", "dvc", "stage", "all")
SERVICES = {name: [name] for name in ("worker", "mlflow")} | {"server": ["prefect"]}
SERVICES["worker and server"] = ["worker", "prefect"]
ENDS_S, STAYS_S = 900, 240  # until a run is over; how long one that crashed may stay so


class Unattended(Killer):
    """The services of a project, and what kills them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.root, self.told, self.lines = folder / "toy", Told(seed), folder / "kills.jsonl"
        self.done = [json.loads(line) for line in self.lines.read_text().splitlines()] if self.lines.exists() else []
        self.scores = {int(version): score for version, score in (self.done[-1]["scores"] if self.done else {}).items()}
        if not self.done:
            shutil.rmtree(folder / "toy", ignore_errors=True)
            shutil.rmtree(folder / "undisturbed", ignore_errors=True)
            one_dataset(self.root)
        else:
            self.told.seed = self.done[0]["seed"]
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
        self.round = Round.drawn(self.told.seed, number) if number else Round(0, [])
        deployment = self.api("/deployments/name/m3diff/full")["id"]
        name = f"kill-{number}"
        body = {"name": name, "parameters": {"ref": "HEAD", "overrides": self.round.overrides}}
        return self.api(f"/deployments/{deployment}/create_flow_run", body | {"state": {"type": "SCHEDULED"}})["id"]

    def end(self, run: str) -> tuple[str, str]:
        """How a run ends: its state, and its message; `HANGS` for one that does not."""
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
            with suppress(psutil.Error):
                found.append(self.machine.process(name))
        return found

    def kill_one(self, number: int) -> dict[str, Any]:
        draw = random.Random(f"{self.told.seed} kill {number}")
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
        """What the end of a run came to, and what is not as it shall be."""
        if state in ("Completed", "Rejected", "Skipped"):
            found = self.broken()
            return {"how": "LOST" if found else "registered", "broken": found}
        if state != "HANGS":
            for line in self.machine.make("status").stderr.splitlines():
                if "prefect deployment run" in line:
                    return {"how": "told", "line": line, "message": message}
        return {"how": "HANGS" if state == "HANGS" else "LOST", "message": message}

    def run(self, kills: int) -> list[dict[str, Any]]:
        """So many kills in all, those of earlier calls among them."""
        if not self.done:
            for number in (0, -1):  # without kills: what others are compared with, and how long a run lasts
                started = time.monotonic()
                outcome = self.outcome(*self.end(self.begin(number)))
                assert outcome["how"] == "registered", outcome
            begin_to_edit(self.root)
            lasts = round(time.monotonic() - started, 1)
            self.add({"kill": 0, "seed": self.told.seed, "run_s": lasts} | outcome)
        self.person = of_person(self.root)
        for number in range(len(self.done), kills + 1):
            self.add(self.kill_one(number))
        return self.done[1:]

    def add(self, line: dict[str, Any]) -> None:
        self.done.append(line)
        with self.lines.open("a") as file:
            file.write(json.dumps(line | {"scores": self.scores}) + "\n")
        print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="kill processes at random under `make up` and see how each run ends")
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"), help="kept; a second call goes on")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    killer = Unattended(asked.folder.resolve(), asked.seed)
    try:
        lines = killer.run(asked.kills)
    finally:
        killer.machine.make("down")
    ends = Counter((line["victim"], line["how"]) for line in lines)
    print("\n".join(f"{count:4} {victim}: {how}" for (victim, how), count in sorted(ends.items())))
    return 1 if any(line["how"] in ("HANGS", "LOST") for line in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
