"""Remove old versions of the registered model (`m3diff prune`), with their weights, branches and data.

The newest versions are kept, as well as versions that an alias points to (champion, previous, challenger) and versions
that a kept version was trained from. Data that a kept version needs are also kept. The MLflow runs of removed versions
are kept with their parameters, curves, scores and reports.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from m3diff.provenance.dvc import DVC_LOCK, Lock, read_lock, run_dvc
from m3diff.provenance.git import RUNS, commit_at, git, require_own_repository
from m3diff.records.errors import DataError
from m3diff.registry.tracking import CHECKPOINT_TAG, FLOW_RUN_TAG, NOT_FOUND_CODE, connect
from m3diff.registry.versions import (
    STORED_MODEL_PREFIX,
    aliases_by_version,
    count_stored_bytes,
    delete_model,
    find_stored_model,
    list_versions,
)
from m3diff.stages.register.params import Register

DEFAULT_KEPT_VERSIONS = 5


def prune(cfg: Register, keep: int = DEFAULT_KEPT_VERSIONS, yes: bool = False) -> tuple[list[int], list[str]]:
    """Plan which versions to remove, and remove them if `yes` is set.

    Branches and data are removed before the versions, so that the next call can finish an interrupted removal.

    Args:
        keep: the number of newest versions to keep.

    Returns:
        the numbers of the versions to remove, and the plan as lines of text.

    Raises:
        DataError: a git or DVC command failed. The next call removes the rest.
        TrackingUnavailableError: MLflow does not respond.
    """
    require_own_repository()
    with connect(cfg.tracking_uri) as client:
        all_versions = list_versions(client, cfg.model_name)
        reasons = reasons_to_keep(all_versions, aliases_by_version(client, cfg.model_name), keep)
        kept_versions = [version for version in all_versions if int(version.version) in reasons]
        old_versions = [version for version in all_versions if int(version.version) not in reasons]
        branches = branches_to_remove(old_versions, kept_versions)
        obstacles = list(find_obstacles_to_gc(kept_versions, branches))
        gc_arguments = build_gc_arguments() if old_versions and not obstacles else []
        kept_sources = {version.source for version in kept_versions}
        # Several versions may share one stored model
        removed_models = {version.source: version for version in old_versions if version.source not in kept_sources}
        freed_bytes = sum(count_stored_bytes(client, version) for version in removed_models.values())

        lines = [f"keep    version {number}: {reason}" for number, reason in reasons.items()]
        lines += [f"remove  version {version.version}" for version in old_versions]
        lines += [f"remove  branch {name.removeprefix('refs/')}" for name in branches]
        lines.append(f"frees   {freed_bytes / 1e9:.3g} GB of weights in MLflow")
        lines += [f"data    kept, because {obstacle}" for obstacle in obstacles]
        if gc_arguments:
            lines.append(f"data    dvc {' '.join(gc_arguments)}")
        if yes:
            for branch in branches:
                delete_branch(branch)
            if gc_arguments:
                run_dvc(Path(), *gc_arguments, "--force")
            for version in old_versions:
                delete_version(client, version, kept_sources)
    return [int(version.version) for version in old_versions], lines


def reasons_to_keep(versions: list[ModelVersion], aliases: dict[int, list[str]], keep: int) -> dict[int, str]:
    """Select the versions to keep. Return the reason for each of them by version number, newest first.

    Args:
        versions: all versions, newest first.
        aliases: the aliases of each version by version number. Versions without an alias are left out.
        keep: the number of newest versions to keep.
    """
    reasons = {int(version.version): "one of the newest" for version in versions[:keep]}
    reasons |= {number: ", ".join(names) for number, names in aliases.items()}
    version_by_number = {int(version.version): version for version in versions}
    unvisited = list(reasons)
    while unvisited:
        number = unvisited.pop()
        base = version_by_number[number].tags.get("dvc.base")
        for base_number, version in version_by_number.items():
            if base_number not in reasons and base is not None and version.tags.get(CHECKPOINT_TAG) == base:
                reasons[base_number] = f"version {number} was trained from it"
                unvisited.append(base_number)
    return dict(sorted(reasons.items(), reverse=True))


# Branches


def branches_to_remove(old_versions: Iterable[ModelVersion], kept_versions: Iterable[ModelVersion]) -> list[str]:
    """Return the local and remote-tracking branches `runs/<flow run>` of old versions that can be removed.

    A branch that is checked out is left out. If no other branch or tag contains the commit of a kept version, the
    branches that contain it are left out too.
    """
    names = {f"{RUNS}{version.tags[FLOW_RUN_TAG]}" for version in old_versions if FLOW_RUN_TAG in version.tags}
    references = git("for-each-ref", "--format=%(refname)", "refs/heads", "refs/remotes").split()
    candidates = {reference for reference in references if branch_name(reference) in names}
    candidates -= set(worktree_values("branch"))
    kept_commits = {commit_at(version.tags.get("git.commit", "")) for version in kept_versions}
    for commit in kept_commits:
        if commit is None:
            continue
        containing_references = references_containing(commit)
        if containing_references <= candidates:
            candidates -= containing_references
    return sorted(candidates)


def references_containing(commit: str) -> set[str]:
    """Return the full names of all branches and tags whose history contains a commit."""
    return set(git("for-each-ref", "--format=%(refname)", "--contains", commit).split())


def branch_name(reference: str) -> str:
    """Return the short branch name, such as `runs/x` for `refs/heads/runs/x` and `refs/remotes/origin/runs/x`."""
    return re.sub("refs/(heads|remotes/[^/]+)/", "", reference)


def delete_branch(reference: str) -> None:
    """Delete a local or remote-tracking branch. For a remote-tracking branch, also delete the branch on the remote."""
    name = branch_name(reference)
    if reference.startswith("refs/heads/"):
        git("branch", "--quiet", "-D", name)
    else:
        remote = reference.split("/")[2]
        git("push", "--quiet", remote, f":refs/heads/{name}")  # git only warns if the branch no longer exists
        git("update-ref", "-d", reference)


# Data


def find_obstacles_to_gc(kept_versions: Iterable[ModelVersion], removed_branches: Collection[str]) -> Iterator[str]:
    """Check whether `dvc gc` would remove data that a kept version or a working tree needs. Yield the reasons.

    `dvc gc` keeps only data that are listed in a commit on a branch or tag, or in the `dvc.lock` of a working tree.
    """
    for version in kept_versions:
        name = f"version {version.version}"
        commit = version.tags.get("git.commit", "")
        if not commit_at(commit):
            yield f"the commit of {name} is not in this clone: git fetch the branch that contains it"
        elif not references_containing(commit) - set(removed_branches):
            yield f"the commit of {name} is on no branch: git branch kept-{version.version} {commit:.12}"
        elif lock_sha256(commit) != version.tags.get("dvc.lock.sha256"):
            yield f"{name} was registered before its dvc.lock was committed, so no commit lists its data"
    for tree in dvc_worktrees():
        try:
            Lock(tree / DVC_LOCK)
        except DataError:
            if (tree / DVC_LOCK).is_file():
                yield f"the dvc.lock of {tree} is empty or truncated: git -C {tree} checkout HEAD -- dvc.lock"


def lock_sha256(commit: str) -> str | None:
    """Return the sha256 of the `dvc.lock` in a commit, or None if the file is missing or cannot be read."""
    with suppress(DataError):
        return read_lock(commit).sha256
    return None


def build_gc_arguments() -> list[str]:
    """Return the DVC arguments that remove all data except those listed in a commit or working tree."""
    commits = git("log", "--all", "--format=%H", "--diff-filter=AM", "--", str(DVC_LOCK)).splitlines()
    command = ["gc", "--workspace", "--all-commits"]
    # DVC would stop at a commit whose dvc.lock is truncated. Such a commit refers to no data
    if any(lock_sha256(commit) is None for commit in commits):
        command.append("--skip-failed")
    other_trees = [str(tree) for tree in dvc_worktrees() if tree.resolve() != Path.cwd()]
    if other_trees:
        command += ["--projects", *other_trees]
    return command


def dvc_worktrees() -> list[Path]:
    """Return the folders of all git working trees that are DVC projects."""
    return [Path(tree) for tree in worktree_values("worktree") if (Path(tree) / ".dvc").is_dir()]


def worktree_values(attribute: str) -> list[str]:
    """Return the values of an attribute of all git working trees: `worktree` for the folders, or `branch`.

    Working trees without the attribute are left out.
    """
    values = []
    for line in git("worktree", "list", "--porcelain").splitlines():
        name, _, value = line.partition(" ")
        if name == attribute:
            values.append(value)
    return values


def delete_version(client: MlflowClient, version: ModelVersion, kept_sources: Collection[str | None]) -> None:
    """Delete the weights of a version, then the version. Keep its run and add the tag `pruned` to the run.

    Args:
        kept_sources: the sources of the kept versions. Weights that a kept version shares are not deleted.
    """
    if (version.source or "").startswith(STORED_MODEL_PREFIX) and version.source not in kept_sources:
        try:
            delete_model(client, find_stored_model(client, version))
        except MlflowException as error:
            if error.error_code != NOT_FOUND_CODE:
                raise
    if version.run_id:
        client.set_tag(version.run_id, "pruned", "true")
    client.delete_model_version(version.name, version.version)
