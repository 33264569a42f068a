"""The versions of the registered model: found by number or alias, listed with their scores, pruned.

`m3diff prune` deletes old versions, with their weights, branches, and any data that no kept version needs. Kept are the
newest versions, all that an alias names (champion, previous, challenger), and what the training of a kept one began
with. A run's parameters, curves, scores and report stay in MLflow.
"""

import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from mlflow import MlflowClient, artifacts
from mlflow.entities import LoggedModel
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repo import ArtifactRepository
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
from mlflow.store.entities import PagedList

from m3diff.provenance.dvc import LOCK, Lock, call, read_lock
from m3diff.provenance.git import RUNS, commit_at, git, require_own_repository
from m3diff.records.errors import DataError
from m3diff.records.progress import aligned
from m3diff.registry.tracking import FLOW_RUN, GONE, VERSION, connected, find_run, registered
from m3diff.stages.register.params import Register

CHAMPION, PREVIOUS, CHALLENGER = "champion", "previous", "challenger"
SCORES = "scores.parquet"
STORED = "models:/m-"  # the source of a version whose files register stored
NONE = "–"
KEEP = 5
T = TypeVar("T")


def every_page(search: Callable[..., PagedList[T]], *asked: Any) -> Iterator[T]:
    """Yields what a search of MLflow's client finds, page by page."""
    page = search(*asked)
    yield from page
    while page.token:
        page = search(*asked, page_token=page.token)
        yield from page


def versions_of(client: MlflowClient, name: str, where: str = "") -> list[ModelVersion]:
    """Newest first."""
    found = every_page(client.search_model_versions, f"name = '{name}'{where}")
    return sorted(found, key=lambda version: -int(version.version))


def find_version(client: MlflowClient, name: str, version: str) -> ModelVersion:
    """The version of a number or alias.

    Raises:
        DataError: there is none; lists those that are there.
    """
    try:
        if version.isdecimal():
            return client.get_model_version(name, version)
        return client.get_model_version_by_alias(name, version)
    except MlflowException as error:
        there = [int(v.version) for v in versions_of(client, name)]
        raise DataError(f"model {name!r} has no version {version!r}; there are {there or 'none'}") from error


def exists(client: MlflowClient, name: str, version: int) -> bool:
    return any(int(found.version) == version for found in versions_of(client, name))


def alias_of(client: MlflowClient, name: str, alias: str) -> int | None:
    model = registered(client, name)
    return int(model.aliases[alias]) if model and alias in model.aliases else None


def find_alias(client: MlflowClient, name: str, alias: str) -> ModelVersion | None:
    version = alias_of(client, name, alias)
    return client.get_model_version(name, str(version)) if version is not None else None


def put_alias(client: MlflowClient, name: str, alias: str, version: int | None) -> None:
    """Let an alias name a version, or nothing where there is none or none of that number any more."""
    now = alias_of(client, name, alias)
    wanted = version if version is not None and exists(client, name, version) else None
    if wanted is None and now is not None:
        client.delete_registered_model_alias(name, alias)
    elif wanted is not None and wanted != now:
        client.set_registered_model_alias(name, alias, str(wanted))


def run_of(version: ModelVersion) -> str:
    assert version.run_id is not None, f"{version.name} version {version.version} has no run: register did not make it"
    return version.run_id


def commit_of(version: ModelVersion) -> str:
    commit = version.tags.get("git.commit")
    if commit is None:
        raise DataError(f"{version.name} version {version.version}: has no git.commit: register did not make it")
    return commit


# Scores, pair by pair


def tested_on(version: ModelVersion) -> str:
    """sha256 of the pairs that the version was scored on when it was registered."""
    return version.tags.get("test_set.sha256", "unknown")


def scored_again(on: str) -> str:
    """The folder of a run's artifacts that holds its model's scores on another test set than its own."""
    return f"scored_again/{on:.12}"


def stored_scores(client: MlflowClient, version: ModelVersion, on: str) -> pa.Table | None:
    """scores.parquet of a version on the test set `on`; None where MLflow has none, a damaged one, or has lost the
    version's run."""
    if not (run := version.run_id):  # made by hand, not by register
        return None
    for place in [*([SCORES] if tested_on(version) == on else []), f"{scored_again(on)}/{SCORES}"]:
        if has_artifact(client, run, place):
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    return pq.read_table(client.download_artifacts(run, place, scratch))
                except pa.ArrowInvalid as error:
                    print(f"MLflow's copy of {place} in run {run} is damaged ({error}); it is not read", flush=True)
    return None


def has_artifact(client: MlflowClient, run_id: str, path: str) -> bool:
    try:
        return any(found.path == path for found in client.list_artifacts(run_id, path.rpartition("/")[0] or None))
    except MlflowException as error:
        if error.error_code != GONE:
            raise
        return False  # the run itself


# The files of a version


def download_checkpoint(version: ModelVersion, into: Path | None = None) -> Path:
    """The checkpoint as MLflow keeps it, in `into`, else in place if that is on this machine.

    Raises:
        MlflowException: MLflow keeps none.
        OSError: its files are gone.
    """
    place = f"models:/{version.name}/{version.version}/artifacts/checkpoint"
    return Path(artifacts.download_artifacts(artifact_uri=place, dst_path=str(into) if into else None))


def model_of(client: MlflowClient, version: ModelVersion) -> LoggedModel:
    return client.get_logged_model((version.source or "").removeprefix("models:/"))


def delete_model(client: MlflowClient, model: LoggedModel) -> None:
    """Its files, then its entry, so that a kill in between leaves an entry to be found again."""
    get_artifact_repository(model.artifact_location).delete_artifacts()
    client.delete_logged_model(model.model_id)


def stored_bytes(client: MlflowClient, version: ModelVersion) -> int:
    def size_of(files: ArtifactRepository, folder: str | None = None) -> int:
        return sum(size_of(files, at.path) if at.is_dir else at.file_size or 0 for at in files.list_artifacts(folder))

    if not (version.source or "").startswith(STORED):
        return 0
    try:
        return size_of(get_artifact_repository(model_of(client, version).artifact_location))
    except MlflowException:
        return 0  # its files are gone already


# `m3diff models`


def models(cfg: Register, protocol: str, scores: Sequence[str]) -> list[dict[str, Any]]:
    """Every version, newest first: number, aliases, time (UTC), scores as the scorers give them but for those that its
    run has not, bytes of weights as MLflow keeps them, and its origin.

    Args:
        protocol: "<dataset>/<protocol>" that the scores are of.

    Raises:
        TrackingUnavailableError: MLflow does not answer.
    """
    found = []
    with connected(cfg.tracking_uri) as client:
        aliases = aliases_of(client, cfg.model_name)
        for version in versions_of(client, cfg.model_name):
            number, tags = int(version.version), version.tags
            run = find_run(client, version.run_id)
            logged = run.data.metrics if run else {}
            facts = {
                "version": number,
                "aliases": aliases.get(number, []),
                "registered": time.strftime("%Y-%m-%d %H:%M", time.gmtime(version.creation_timestamp / 1000)),
                "scores": {name: logged[key] for name in scores if (key := f"{protocol}/{name}") in logged},
                "weights_bytes": stored_bytes(client, version),
                "commit": tags.get("git.commit"),
                "dirty": tags.get("git.dirty") == "true",  # parameters or code differed from the commit
                "run": run.info.run_name if run else None,
                "flow_run": tags.get(FLOW_RUN),
                "checkpoint": tags.get(VERSION),
            }
            found.append(facts)
    return found


def aliases_of(client: MlflowClient, name: str) -> dict[int, list[str]]:
    model = registered(client, name)
    found: dict[int, list[str]] = {}
    for alias, version in sorted(model.aliases.items()) if model else ():
        found.setdefault(int(version), []).append(alias)
    return found


def table(found: Sequence[Mapping[str, Any]], protocol: str, scores: Sequence[str]) -> str:
    """A line for each version; scores of the protocol, times 100."""
    if not found:
        return "no version is registered; `m3diff register` does, after `dvc repro`"
    rows = [("version", "aliases", "registered", *scores, "weights", "commit", "run")]
    for one in found:
        shown = [f"{100 * one['scores'][name]:.1f}" if name in one["scores"] else NONE for name in scores]
        commit = f"{one['commit'][:8]}{'+' if one['dirty'] else ''}" if one["commit"] else NONE
        head = (str(one["version"]), ", ".join(one["aliases"]) or NONE, one["registered"])
        rows.append((*head, *shown, f"{one['weights_bytes'] / 1e9:.3g} GB", commit, one["run"] or NONE))
    footer = f"\nscores on {protocol}, times 100; the chain behind a version: m3diff lineage VERSION"
    return "\n".join([*aligned(rows), footer])


# `m3diff prune`


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
    with connected(cfg.tracking_uri) as client:
        known = versions_of(client, cfg.model_name)
        why = reasons(known, aliases_of(client, cfg.model_name), keep)
        kept = [version for version in known if int(version.version) in why]
        removed = [version for version in known if version not in kept]
        numbers = [int(version.version) for version in removed]
        branches = branches_of(removed, kept)
        hindrances = list(hindering(kept, branches))
        gc = gc_command() if removed and not hindrances else []
        shared = {version.source for version in kept}
        stored = {version.source: version for version in removed if version.source not in shared}
        freed = sum(stored_bytes(client, version) for version in stored.values())
        lines = [
            *(f"keep    version {number}: {reason}" for number, reason in why.items()),
            *(f"remove  version {number}" for number in numbers),
            *(f"remove  branch {name.removeprefix('refs/')}" for name in branches),
            f"frees   {freed / 1e9:.3g} GB of weights in MLflow",
            *(f"data    stay, since {hindrance}" for hindrance in hindrances),
            *([f"data    dvc {' '.join(gc)}"] if gc else []),
        ]
        if yes:
            for branch in branches:
                delete_branch(branch)
            if gc:
                call(Path(), *gc, "--force")
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


def branches_of(removed: Iterable[ModelVersion], kept: Iterable[ModelVersion]) -> list[str]:
    """The removed versions' branches runs/<flow run>, here and as known of remotes, which alone hold no kept one's
    commit."""
    names = {f"{RUNS}{version.tags[FLOW_RUN]}" for version in removed if FLOW_RUN in version.tags}
    known = git("for-each-ref", "--format=%(refname)", "refs/heads", "refs/remotes").split()
    wanted = {ref for ref in known if branch_name(ref) in names} - {*worktrees("branch")}
    for commit in filter(None, {commit_at(version.tags.get("git.commit", "")) for version in kept}):
        if (holding := holding_refs(commit)) <= wanted:
            wanted -= holding
    return sorted(wanted)


def holding_refs(commit: str) -> set[str]:
    return set(git("for-each-ref", "--format=%(refname)", "--contains", commit).split())


def branch_name(reference: str) -> str:
    """`runs/x` of `refs/heads/runs/x` and of `refs/remotes/origin/runs/x`."""
    return re.sub("refs/(heads|remotes/[^/]+)/", "", reference)


def delete_branch(reference: str) -> None:
    name = branch_name(reference)
    if reference.startswith("refs/heads/"):
        git("branch", "--quiet", "-D", name)
    else:
        git("push", "--quiet", reference.split("/")[2], f":refs/heads/{name}")  # git warns where it is gone already
        git("update-ref", "-d", reference)


# Data


def hindering(kept: Iterable[ModelVersion], branches: Collection[str]) -> Iterator[str]:
    """Why `dvc gc` would take the data of a kept version, or of a working tree: it keeps what commits of branches and
    tags say, and what each `dvc.lock` says."""
    for version in kept:
        named, commit = f"version {version.version}", version.tags.get("git.commit", "")
        if not commit_at(commit):
            yield f"the commit of {named} is not in this clone: git fetch the branch that holds it"
        elif not holding_refs(commit) - set(branches):
            yield f"the commit of {named} is on no branch: git branch kept-{version.version} {commit:.12}"
        elif lock_sha256(commit) != version.tags.get("dvc.lock.sha256"):
            yield f"{named} was registered before its dvc.lock was committed, so no commit says which data are its own"
    for tree in working_trees():
        try:
            Lock(tree / LOCK)
        except DataError:
            if (tree / LOCK).is_file():
                yield f"the dvc.lock of {tree} is empty or cut short: git -C {tree} checkout HEAD -- dvc.lock"


def lock_sha256(commit: str) -> str | None:
    with suppress(DataError):
        return read_lock(commit).sha256
    return None


def gc_command() -> list[str]:
    """DVC's command that removes data which no commit and no working tree names. It passes over a commit whose
    `dvc.lock` a kill cut short, and which names none."""
    commits = git("log", "--all", "--format=%H", "--diff-filter=AM", "--", str(LOCK)).splitlines()
    past = ["--skip-failed"] if any(lock_sha256(commit) is None for commit in commits) else []
    others = [str(tree) for tree in working_trees() if tree.resolve() != Path.cwd()]
    return ["gc", "--workspace", "--all-commits", *past, *(["--projects", *others] if others else [])]


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
            if error.error_code != GONE:
                raise
    if version.run_id:
        client.set_tag(version.run_id, "pruned", "true")
    client.delete_model_version(version.name, version.version)
