"""A version's data, parameters and checkpoint, brought back into a working tree of their own and checked by hash."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.check import Check, compared
from m3diff.registry.commit import add_worktree, current_stages, dvc, find_commit, read_lock, tracked
from m3diff.registry.lineage import LOCK, Lock, code_path, dvc_hash
from m3diff.registry.trace import NAMED, output
from m3diff.registry.versions import commit_of
from m3diff.stages.register.params import Register

REVISION = re.compile(r".*/.*|[0-9a-f]{40}")


def restore(cfg: Register, version: str, into: Path | None) -> tuple[Path, list[Check]]:
    """Make a working tree of the version's commit and bring back what DVC tracks there.

    Args:
        version: number or alias; or, MLflow not being asked, a branch (`runs/...`) or a commit's full hash.
        into: the new folder; by default beside the project.

    Returns: the folder, and a line for everything that was brought back.

    Raises:
        DataError: there is no such version or commit, the folder exists, or DVC cannot bring anything back.
        TrackingUnavailableError: MLflow does not answer.
    """
    tags = {} if REVISION.fullmatch(version) else tags_of(cfg, version)
    commit = find_commit(tags.get("git.commit", version))
    folder = (into or Path.cwd().parent / f"{Path.cwd().name}-{version.replace('/', '-')}").resolve()
    if folder.exists():
        raise DataError(f"{folder}: exists; name another with --into, or remove it: git worktree remove {folder}")
    lock = read_lock(commit)
    add_worktree(commit, folder)
    failed = pull(folder)
    checks = list(verify(folder, commit, lock, tags))
    return folder, [
        check.model_copy(update={"note": failed}) if check.outcome == "missing" else check for check in checks
    ]


def tags_of(cfg: Register, version: str) -> dict[str, str]:
    with tracking.connected(cfg.tracking_uri) as client:
        found = tracking.find_version(client, cfg.model_name, version)
        return found.tags | {"git.commit": commit_of(found)}


def pull(folder: Path) -> str:
    """Bring back from remote and cache what can be. Gives what DVC could not, in words: each file is checked later."""
    remote = dvc(folder, "remote", "list").strip()
    said = "" if remote else "there is no DVC remote, and the cache here does not have it"
    if remote:
        try:
            dvc(folder, "fetch", "--quiet")
        except DataError as error:
            said = str(error)
    try:
        dvc(folder, "checkout", "--quiet", "--allow-missing")
    except DataError as error:
        said = said or str(error)
    return said


def verify(folder: Path, commit: str, lock: Lock, tags: dict[str, str]) -> Iterator[Check]:
    """Every tracked file and folder by its content, the parameters of every stage, and what the version names."""
    code = code_path(tags)
    paths = {path: folder / path for path in (*tracked(commit, lock), code)}
    there = {path: dvc_hash(file) if file.exists() else None for path, file in paths.items()}
    for path, named in tracked(commit, lock).items():
        yield compared("data", path, named, there[path])
    yield from of_parameters(folder, commit, lock)
    if tags:
        yield compared("dvc.lock", LOCK, tags.get("dvc.lock.sha256"), Lock(folder / LOCK).sha256)
        yield compared("model code", code, tags.get("dvc.code"), there[code])
        for what, stage, name, tag in NAMED:
            written = output(lock, stage, name)
            yield compared(what, written or name, tags.get(tag), there.get(written) if written else None, tag)


def of_parameters(folder: Path, commit: str, lock: Lock) -> Iterator[Check]:
    """Whether params.yaml has for every stage the values that it ran with."""
    values = yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8"))
    for stage in current_stages(commit, lock):
        ran = lock.stages[stage].get("params", {}).get("params.yaml", {})
        other = [name for name, value in ran.items() if lookup(values, name) != value]
        note = f"ran with other {', '.join(other)}" if other else ""
        yield Check(what="parameters", where=stage, hash="", outcome="differs" if other else "ok", note=note)


def lookup(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values
