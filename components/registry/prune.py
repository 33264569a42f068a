"""Delete old model versions, with their weights, branches, and any data that no kept version needs.

Kept are the newest versions, all that an alias names (champion, previous, challenger), and what the training of a kept
one began with. A run's parameters, curves, scores and report stay in MLflow.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from m3diff.provenance import dvc
from m3diff.provenance.dvc import LOCK, Lock, read_lock
from m3diff.provenance.git import RUNS, commit_at, git, require_own_repository, run, words
from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.lineage import FLOW_RUN, VERSION
from m3diff.registry.versions import STORED, aliases_of, delete_model, in_words, model_of, stored_bytes, versions_of
from m3diff.stages.register.params import Register

KEEP = 5


def prune(cfg: Register, keep: int = KEEP, yes: bool = False) -> tuple[list[int], list[str]]:
    """Plan and, with `yes`, do it. A version goes last, so that what was interrupted is planned again.

    Args:
        keep: how many of the newest versions stay.

    Returns: the versions that are removed, and the plan's lines.

    Raises:
        DataError: git or DVC refused; what is left is removed by the next call.
        TrackingUnavailableError: MLflow does not answer.
    """
    require_own_repository()
    with tracking.connected(cfg.tracking_uri) as client:
        versions = versions_of(client, cfg.model_name)
        why = reasons(versions, aliases_of(client, cfg.model_name), keep)
        kept = [version for version in versions if int(version.version) in why]
        removed = [version for version in versions if version not in kept]
        numbers = [int(version.version) for version in removed]
        named = {commit_at(version.tags.get("git.commit", "")) for version in kept}
        branches = branches_of(removed, {commit for commit in named if commit})
        hindrances = list(hindering(kept, branches))
        gc = gc_command() if removed and not hindrances else []
        shared = {version.source for version in kept}
        stored = {version.source: version for version in removed if version.source not in shared}
        freed = in_words(sum(stored_bytes(client, version) for version in stored.values()))
        lines = [
            *(f"keep    version {number}: {reason}" for number, reason in why.items()),
            *(f"remove  version {number}" for number in numbers),
            *(f"remove  branch {name.removeprefix('refs/')}" for name in branches),
            f"frees   {freed} of weights in MLflow",
            *(f"data    stay, since {hindrance}" for hindrance in hindrances),
            *([f"data    dvc {' '.join(gc)}"] if gc else []),
        ]
        if yes:
            for branch in branches:
                delete_branch(branch)
            if gc:
                dvc.call(Path(), *gc, "--force")
            for version in removed:
                delete_version(client, version, shared)
    return numbers, lines


def reasons(versions: list[ModelVersion], aliases: dict[int, list[str]], keep: int) -> dict[int, str]:
    """The versions that stay, and why; with those whose checkpoint a kept one's training began with."""
    why = {int(version.version): "one of the newest" for version in versions[:keep]}
    why |= {number: ", ".join(names) for number, names in aliases.items()}
    by_number = {int(version.version): version for version in versions}
    todo = list(why)
    while todo:
        number = todo.pop()
        base = by_number[number].tags.get("dvc.base")
        for other, version in by_number.items():
            if other not in why and base is not None and version.tags.get(VERSION) == base:
                why[other] = f"version {number} was trained from it"
                todo.append(other)
    return dict(sorted(why.items(), reverse=True))


# Branches


def branches_of(removed: Iterable[ModelVersion], kept: Collection[str]) -> list[str]:
    """The removed versions' branches runs/<flow run>, here and as known of remotes, which alone hold no kept commit."""
    names = {f"{RUNS}{version.tags[FLOW_RUN]}" for version in removed if FLOW_RUN in version.tags}
    known = git("for-each-ref", "--format=%(refname)", "refs/heads", "refs/remotes").split()
    wanted = {ref for ref in known if branch_name(ref) in names} - {*worktrees("branch")}
    for commit in kept:
        if (holding := holding_refs(commit)) <= wanted:
            wanted -= holding
    return sorted(wanted)


def holding_refs(commit: str) -> set[str]:
    return set(git("for-each-ref", "--format=%(refname)", "--contains", commit).split())


def branch_name(reference: str) -> str:
    """`runs/x` of `refs/heads/runs/x` and of `refs/remotes/origin/runs/x`."""
    return re.sub("refs/(heads|remotes/[^/]+)/", "", reference)


def delete_branch(reference: str) -> None:
    """
    Raises:
        DataError: the remote does not answer or refuses.
    """
    name = branch_name(reference)
    if reference.startswith("refs/heads/"):
        git("branch", "--quiet", "-D", name)
        return
    remote = reference.split("/")[2]
    done = run("push", "--quiet", remote, "--delete", name)
    if done.returncode and b"remote ref does not exist" not in done.stderr:
        raise DataError(
            f"git push {remote} --delete {name}: {words(done)}; run `m3diff prune` again when {remote} answers"
        )
    git("update-ref", "-d", reference)


# Data


def hindering(kept: Iterable[ModelVersion], branches: Collection[str]) -> Iterator[str]:
    """Why `dvc gc` would take the data of a kept version: it keeps what commits of branches and tags say."""
    for version in kept:
        named, commit = f"version {version.version}", version.tags.get("git.commit", "")
        if not commit_at(commit):
            yield f"the commit of {named} is not in this clone: git fetch the branch that holds it"
        elif not holding_refs(commit) - set(branches):
            yield f"the commit of {named} is on no branch: git branch kept-{version.version} {commit:.12}"
        elif lock_sha256(commit) != version.tags.get("dvc.lock.sha256"):
            yield f"{named} was registered before its dvc.lock was committed, so no commit says which data are its own"
    for tree in torn_trees():
        if not tree.with_name(f"{tree.name}.lock").is_file():  # a flow run's, of which all that counts is committed
            yield f"the dvc.lock of {tree} is empty or cut short: git -C {tree} checkout HEAD -- dvc.lock"


def lock_sha256(commit: str) -> str | None:
    with suppress(DataError):
        return read_lock(commit).sha256
    return None


def gc_command() -> list[str]:
    """DVC's command that removes data which no commit and no working tree names. It passes over a commit or flow run
    whose `dvc.lock` a kill cut short, and which names none."""
    commits = git("log", "--all", "--format=%H", "--diff-filter=AM", "--", str(LOCK)).splitlines()
    torn = any(lock_sha256(commit) is None for commit in commits) or torn_trees()
    others = [str(tree) for tree in working_trees() if tree.resolve() != Path.cwd()]
    past = ["--skip-failed"] if torn else []
    return ["gc", "--workspace", "--all-commits", *past, *(["--projects", *others] if others else [])]


def torn_trees() -> list[Path]:
    """The working trees of this repository whose `dvc.lock` is none."""
    torn = []
    for tree in working_trees():
        try:
            Lock(tree / LOCK)
        except DataError:
            torn += [tree] if (tree / LOCK).is_file() else []
    return torn


def working_trees() -> list[Path]:
    return [Path(tree) for tree in worktrees("worktree") if (Path(tree) / ".dvc").is_dir()]


def worktrees(what: str) -> list[str]:
    """The `worktree` (its folder) or the `branch` of each of git's working trees."""
    lines = (line.partition(" ") for line in git("worktree", "list", "--porcelain").splitlines())
    return [value for name, _, value in lines if name == what]


def delete_version(client: MlflowClient, version: ModelVersion, shared: Collection[str | None]) -> None:
    """Weights first, the version last; its run stays, and says that the weights are gone. `shared`: the stored models
    of kept versions."""
    if (version.source or "").startswith(STORED) and version.source not in shared:
        try:
            delete_model(client, model_of(client, version))
        except MlflowException as error:
            if error.error_code != tracking.GONE:
                raise
    if version.run_id:
        client.set_tag(version.run_id, "pruned", "true")
    client.delete_model_version(version.name, version.version)
