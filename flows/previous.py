"""What earlier flow runs left on their branches, taken up by a later one: the entries of `dvc.lock` for the stages that
its own commit does not know to be current, and the metrics that stages write into git.

Flow runs never commit to main, so main's `dvc.lock` stays behind them. An entry says what a stage read and wrote, by
hash; DVC compares it with what is there, so that a wrong one makes a stage run and never keeps it from running.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from flows import dvc
from flows.archive import LOCK
from m3diff.provenance.git import git

TREE, OVERRIDES = "Tree", "Overrides"
"""Trailers of the commits of a run: the content of which it made everything, and its own parameters."""


def take_over(tree: str) -> bool:
    """Take the `dvc.lock` of an earlier run whole, with its metrics, where nothing is left to do then; whether so."""
    run = best(tree)
    if run is None:
        return False
    before = LOCK.read_bytes() if LOCK.is_file() else None
    git("checkout", run, "--", str(LOCK))
    there = metrics(run, dvc.locked())
    git("checkout", run, "--", *there)
    if dvc.is_current():
        return True
    git("reset", "--hard", "--quiet")
    assert before == (LOCK.read_bytes() if LOCK.is_file() else None), "the worktree had changes"
    return False


def take_up(tree: str, changed: Collection[str]) -> bool:
    """Replace the entries of the stages `changed` by those of an earlier run; whether there was any."""
    run = best(tree)
    if run is None:
        return False
    ours = dvc.locked()
    theirs = dvc.entries(dvc.lock_of(run))
    found = {stage: theirs[stage] for stage in changed if stage in theirs and theirs[stage] != ours.get(stage)}
    if not found:
        return False
    if ours | found == theirs:
        git("checkout", run, "--", str(LOCK))  # DVC's own text, to the byte
    else:
        stages = {"schema": "2.0", "stages": ours | found}
        LOCK.write_text(yaml.safe_dump(stages, sort_keys=False), encoding="utf-8")
    for file in metrics(run, found):
        git("checkout", run, "--", file)
    dvc.link_data()
    return True


def best(tree: str) -> str | None:
    """The commit of the newest run of the same content; else of the newest that had no parameters of its own. One
    whose `dvc.lock` a kill cut short is passed over."""
    runs = list_runs()
    same = [run for run in runs if run[TREE] == tree]
    plain = [run for run in runs if not run[OVERRIDES]]
    found = (run["commit"] for run in [*same, *plain])
    return next((commit for commit in found if dvc.is_lock(dvc.lock_of(commit))), None)


def list_runs() -> list[dict[str, str]]:
    """The newest commit of every branch `runs/*` that a flow run wrote to, newest first."""
    keys = (TREE, OVERRIDES)
    form = "%x00".join(["%H", *(f"%(trailers:key={key},valueonly,unfold,separator=%x2C)" for key in keys)])
    runs = ("--exclude=refs/heads/runs/history", "--glob=refs/heads/runs/*")
    lines = git("log", "--no-walk=sorted", f"--format={form}", *runs).splitlines()
    found = [dict(zip(("commit", *keys), line.split("\0"), strict=True)) for line in lines]
    return [run for run in found if run[TREE]]


def metrics(run: str, stages: dict[str, Any]) -> list[str]:
    """Outputs of these stages that lie in git and not in DVC's cache."""
    written = {out["path"] for entry in stages.values() for out in entry.get("outs", [])}
    in_git = git("ls-tree", "-r", "--name-only", run).splitlines()
    files = {path for path in written if path in in_git and not Path(path).is_dir()}
    return sorted(files | {path for path in written if any(file.startswith(f"{path}/") for file in in_git)})
