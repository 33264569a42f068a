"""Storage ends somewhere: old versions go with their weights, their branches and the data that nothing else needs.

Kept are the newest versions, all that an alias names (champion, previous, challenger), and what the training of a kept
one began with. A run's parameters, curves, scores and report stay in MLflow.
"""

import subprocess
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.tracking import MlflowClient
from pydantic import BaseModel, ConfigDict

from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.commit import RUNS, cache_folder, dvc, read_lock, require_own_repository, resolved, tracked
from m3diff.registry.leftovers import delete_model, model_of
from m3diff.registry.lineage import FLOW_RUN, LOCK, Lock, git
from m3diff.registry.objects import listing, object_file
from m3diff.stages.register.params import Register

STORED = "models:/m-"  # the source of a version whose files register stored
KEEP = 5


class Plan(BaseModel):
    """What goes and what stays, and why."""

    model_config = ConfigDict(frozen=True)

    keep: dict[int, str]  # version -> why it stays
    remove: list[int]
    weights_bytes: int  # in MLflow
    branches: list[str]  # full names of references
    data_bytes: int  # in DVC's cache, of the removed versions alone
    gc: list[str]  # DVC's command; empty where it must not be run
    kept_data: list[str]  # why it must not

    def lines(self) -> Iterator[str]:
        yield from (f"keep    version {number}: {why}" for number, why in self.keep.items())
        yield from (f"remove  version {number}" for number in self.remove)
        yield from (f"remove  branch {name.removeprefix('refs/')}" for name in self.branches)
        yield f"frees   {in_words(self.weights_bytes)} of weights in MLflow, {in_words(self.data_bytes)} in DVC's cache"
        yield from (f"data    stay, since {why}" for why in self.kept_data)
        if self.gc:
            yield f"data    dvc {' '.join(self.gc)}"


def prune(cfg: Register, keep: int = KEEP, yes: bool = False) -> Plan:
    """Plan and, with `yes`, do it. A version goes last, so that what was interrupted is planned again.

    Args:
        keep: how many of the newest versions stay.

    Raises:
        DataError: git or DVC refused; what is left is removed by the next call.
        TrackingUnavailableError: MLflow does not answer.
    """
    require_own_repository()
    with tracking.connected(cfg.tracking_uri) as client:
        versions = all_versions(client, cfg.model_name)
        plan = make_plan(client, versions, keep)
        if yes and plan.remove:
            for branch in plan.branches:
                delete_branch(branch)
            if plan.gc:
                dvc(Path(), *plan.gc, "--force")
            kept = [version for version in versions if int(version.version) in plan.keep]
            for version in versions:
                if int(version.version) in plan.remove:
                    delete_version(client, version, kept)
    return plan


def all_versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    """Newest first."""
    found: list[ModelVersion] = []
    token: str | None = None
    while True:
        page = client.search_model_versions(f"name = '{name}'", page_token=token)
        found += page
        if not (token := page.token):
            return sorted(found, key=lambda version: -int(version.version))


def make_plan(client: MlflowClient, versions: list[ModelVersion], keep: int) -> Plan:
    why = reasons(versions, aliases(client, versions), keep)
    kept = [version for version in versions if int(version.version) in why]
    removed = [version for version in versions if version not in kept]
    branches = branches_of(removed, commits(kept))
    hindrances = list(hindering(kept, branches))
    shared = {version.source for version in kept}
    own = {version.source: version for version in removed if version.source not in shared}
    return Plan(
        keep=why,
        remove=[int(version.version) for version in removed],
        weights_bytes=sum(stored_bytes(client, version) for version in own.values()),
        branches=branches,
        data_bytes=0 if hindrances else data_bytes(commits(removed), {*commits(kept), "HEAD"}),
        gc=[] if hindrances or not removed else ["gc", "--workspace", "--all-commits", *past_torn(), *other_projects()],
        kept_data=hindrances,
    )


def aliases(client: MlflowClient, versions: list[ModelVersion]) -> dict[int, list[str]]:
    """The aliases of each version that has any."""
    if not versions:
        return {}
    found: dict[int, list[str]] = {}
    for alias, version in client.get_registered_model(versions[0].name).aliases.items():
        found.setdefault(int(version), []).append(alias)
    return found


def reasons(versions: list[ModelVersion], named: dict[int, list[str]], keep: int) -> dict[int, str]:
    """The versions that stay, and why; with those whose checkpoint a kept one's training began with."""
    why = {int(version.version): "one of the newest" for version in versions[:keep]}
    why |= {number: ", ".join(sorted(names)) for number, names in named.items()}
    by_number = {int(version.version): version for version in versions}
    todo = list(why)
    while todo:
        number = todo.pop()
        base = by_number[number].tags.get("dvc.base")
        for other, version in by_number.items():
            if other not in why and base is not None and version.tags.get("dvc.checkpoint") == base:
                why[other] = f"version {number} was trained from it"
                todo.append(other)
    return dict(sorted(why.items(), reverse=True))


def commits(versions: Iterable[ModelVersion]) -> set[str]:
    """The commits of versions, those that this clone has."""
    named = {version.tags.get("git.commit") for version in versions}
    return {commit for commit in named if commit and resolved(commit)}


def branches_of(removed: Iterable[ModelVersion], kept: Collection[str]) -> list[str]:
    """The removed versions' branches runs/<flow run>, here and as known of remotes, which alone hold no kept commit."""
    names = {f"{RUNS}{version.tags[FLOW_RUN]}" for version in removed if FLOW_RUN in version.tags}
    wanted = {ref for ref in references() if branch_name(ref) in names}
    in_use = {line.removeprefix("branch ") for line in git("worktree", "list", "--porcelain").splitlines()}
    wanted -= in_use
    for commit in kept:
        holding = set(git("for-each-ref", "--format=%(refname)", "--contains", commit).split())
        if holding <= wanted:
            wanted -= holding
    return sorted(wanted)


def references() -> list[str]:
    return git("for-each-ref", "--format=%(refname)", "refs/heads", "refs/remotes").split()


def branch_name(reference: str) -> str:
    """`runs/x` of `refs/heads/runs/x` and of `refs/remotes/origin/runs/x`."""
    place, _, name = reference.removeprefix("refs/").partition("/")
    return name if place == "heads" else name.partition("/")[2]


def hindering(kept: Iterable[ModelVersion], branches: Collection[str]) -> Iterator[str]:
    """Why `dvc gc` would take the data of a kept version: it keeps what commits of branches and tags say."""
    for version in kept:
        named, commit = f"version {version.version}", version.tags.get("git.commit", "")
        if not resolved(commit):
            yield f"the commit of {named} is not in this clone: git fetch the branch that holds it"
        elif not set(git("for-each-ref", "--format=%(refname)", "--contains", commit).split()) - set(branches):
            yield f"the commit of {named} is on no branch: git branch kept-{version.version} {commit:.12}"
        elif lock_sha256(commit) != version.tags.get("dvc.lock.sha256"):
            yield f"{named} was registered before its dvc.lock was committed, so no commit says which data are its own"
    for tree in torn_trees():
        if not tree.with_name(f"{tree.name}.lock").is_file():  # a flow run's, of which all that counts is committed
            yield f"the dvc.lock of {tree} is empty or cut short: git -C {tree} checkout HEAD -- dvc.lock"


def lock_sha256(commit: str) -> str | None:
    try:
        return read_lock(commit).sha256
    except DataError:
        return None


def past_torn() -> list[str]:
    """What lets `dvc gc` pass over a commit or flow run whose `dvc.lock` a kill cut short, and which names no data."""
    commits = git("log", "--all", "--format=%H", "--diff-filter=AM", "--", str(LOCK)).splitlines()
    torn = any(lock_sha256(commit) is None for commit in commits) or torn_trees()
    return ["--skip-failed"] if torn else []


def torn_trees() -> list[Path]:
    """The working trees of this repository whose `dvc.lock` is none."""
    return [tree for tree in working_trees() if (tree / LOCK).is_file() and not is_lock(tree / LOCK)]


def is_lock(file: Path) -> bool:
    try:
        Lock(file)
    except DataError:
        return False
    return True


def working_trees() -> list[Path]:
    lines = git("worktree", "list", "--porcelain").splitlines()
    trees = [Path(line.removeprefix("worktree ")) for line in lines if line.startswith("worktree ")]
    return [tree for tree in trees if (tree / ".dvc").is_dir()]


def other_projects() -> list[str]:
    """The other working trees of this repository, whose data stay too."""
    others = [str(tree) for tree in working_trees() if tree.resolve() != Path.cwd()]
    return ["--projects", *others] if others else []


def data_bytes(removed: Collection[str], kept: Collection[str]) -> int:
    """What the cache holds of the removed commits' data and not of the kept ones', in bytes."""
    cache = cache_folder()
    gone = hashes_of(cache, removed) - hashes_of(cache, kept)
    files = [object_file(cache, hash_) for hash_ in gone]
    return sum(file.stat().st_size for file in files if file.is_file())


def hashes_of(cache: Path, commits: Collection[str]) -> set[str]:
    found: set[str] = set()
    for commit in commits:
        try:
            roots = set(tracked(commit, read_lock(commit)).values())
        except DataError:
            continue  # a commit without dvc.lock or params.yaml tracks nothing
        found |= roots | {part for root in roots for part in listing(cache, root).values()}
    return found


def stored_bytes(client: MlflowClient, version: ModelVersion) -> int:
    if not (version.source or "").startswith(STORED):
        return 0
    try:
        return size_of(get_artifact_repository(model_of(client, version).artifact_location))
    except MlflowException:
        return 0  # its files are gone already


def size_of(files: ArtifactRepository, folder: str | None = None) -> int:
    return sum(
        size_of(files, entry.path) if entry.is_dir else entry.file_size or 0 for entry in files.list_artifacts(folder)
    )


def delete_branch(reference: str) -> None:
    """Raises DataError where the remote does not answer or refuses."""
    place, _, name = reference.removeprefix("refs/").partition("/")
    if place == "heads":
        git("branch", "--quiet", "-D", name)
        return
    remote, _, branch = name.partition("/")
    command = ["git", "push", "--quiet", remote, "--delete", branch]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "remote ref does not exist" not in done.stderr:
        raise DataError(f"{' '.join(command)}: {done.stderr.strip()}; run `m3diff prune` again when {remote} answers")
    git("update-ref", "-d", reference)


def delete_version(client: MlflowClient, version: ModelVersion, kept: Iterable[ModelVersion]) -> None:
    """Weights first, the version last; its run stays, and says that the weights are gone."""
    stored = (version.source or "").startswith(STORED) and version.source not in {other.source for other in kept}
    if stored:
        try:
            delete_model(client, model_of(client, version))
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
    if version.run_id:
        client.set_tag(version.run_id, "pruned", "true")
    client.delete_model_version(version.name, version.version)


def in_words(count: float) -> str:
    """Bytes as people write them."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
