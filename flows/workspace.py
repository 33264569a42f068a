"""Create the workspace of a flow run: a git worktree at one commit, on the branch `runs/<flow run>`.

Edits in the checkout do not affect the run, and the run does not change files in the checkout. Data are linked from the
DVC cache of the checkout in which the flow was started. The scratch folder and the local MLflow store are shared with
the checkout, so that training can resume from the checkpoints of a killed run. The worktrees are in `runs/flows/`, each
next to a lock file that is held by the process of its flow.
"""

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from dvc.utils.serialize import modify_yaml

from flows import dvc
from m3diff.provenance.dvc import write_settings
from m3diff.provenance.git import (
    AS_COMMITTED,
    GitError,
    find_commit,
    git,
    has_branch,
    require_own_repository,
    run_git,
)
from m3diff.records.errors import cause_of, shell_word
from m3diff.records.files import lock_exclusively
from m3diff.registry import tracking
from m3diff.registry.versions import CHAMPION, find_aliased_version
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params

FLOWS_FOLDER = Path("runs/flows")
# The files that determine a run. `dvc.lock` is not one of them, because it only records what ran
DECISIVE_PATHS = ("params.yaml", "dvc.yaml", "profiles", "components", "flows", ":(glob)**/*.dvc")

CACHE_LINK_TYPES = "reflink,hardlink,symlink"
KEPT_DAYS = 7  # number of days for which the worktree of a failed run is kept
MAX_NAMED_FILES = 5  # maximum number of uncommitted files that a message lists

# Branch with the `.dvc` files that `m3diff/watch` changed: one commit on top of the commit that the watch started from
DATA_BRANCH = "runs/data"

# The champion's checkpoint, if training starts from it. `data/00_champion.dvc` tracks it on the run's branch
CHAMPION_FOLDER = Path("data/00_champion")


class NothingNewError(Exception):
    """No dataset has changed since the champion was trained."""


class Workspace(NamedTuple):
    """The workspace of a flow run.

    Attributes:
        flow_run: the id of the flow run.
        root: the folder of the worktree.
        checkout: the folder in which the flow was started.
        commit: the commit that the run starts from.
        tree: git's hash of the content. Runs with the same tree do the same work.
        overrides: the parameters that were changed for this run, and a note if training starts from the champion.
        links: paths in the worktree that are links into the checkout.
        data_notes: messages about the `.dvc` files on the branch runs/data, and about training from the champion.
    """

    flow_run: str
    root: Path
    checkout: Path
    commit: str
    tree: str
    overrides: tuple[str, ...]
    links: tuple[str, ...]
    data_notes: tuple[str, ...] = ()

    @property
    def branch(self) -> str:
        """The name of the run's branch."""
        return f"runs/{self.flow_run}"


@contextmanager
def workspace(
    flow_run: str, ref: str | None, overrides: Sequence[str], data: bool = False, replay: float | None = None
) -> Iterator[Workspace]:
    """Create a worktree for a flow run and make it the current directory within the context.

    The worktree is removed if the run succeeds and kept for a week if it fails.

    Args:
        flow_run: the id of the flow run.
        ref: the commit, branch or tag to run. If None, HEAD is run, and all files that determine a run must be
            committed.
        overrides: parameters such as `train.epochs=6`, which are committed to the run's branch.
        data: whether to use the `.dvc` files that `m3diff/watch` updated. Files that were changed by hand since are not
            replaced.
        replay: if training starts from the champion, the share of pairs of unchanged datasets that is trained on again.
            None if training starts from the base.

    Raises:
        NothingNewError: training should start from the champion, but no dataset has changed since it was trained.
        ParamsError: files that determine the run are not committed, or the ref, an override or a parameter is invalid.
        GitError: git cannot create the worktree.
    """
    require_own_repository()
    checkout = Path.cwd()
    branch = f"runs/{flow_run}"
    root = checkout / FLOWS_FOLDER / flow_run
    lock_file = FLOWS_FOLDER / f"{flow_run}.lock"
    FLOWS_FOLDER.mkdir(parents=True, exist_ok=True)
    remove_old_worktrees(checkout / FLOWS_FOLDER)
    with hold_lock(lock_file):
        is_retry = has_branch(branch)
        commit = git("rev-parse", branch) if is_retry else starting_commit(ref)
        remove_worktree(root)  # left by a killed attempt
        git(*AS_COMMITTED, "worktree", "add", "--quiet", "--detach", str(root), commit)
        run_overrides = list(overrides)
        if replay is not None:
            run_overrides.append(f"start from the champion, replay {replay}")
        work = Workspace(
            flow_run=flow_run,
            root=root,
            checkout=checkout,
            commit=commit,
            tree="",
            overrides=tuple(run_overrides),
            links=(),
        )
        try:
            with chdir(root):
                work = prepare_worktree(work, overrides, is_retry, data, replay)
        except BaseException:
            remove_worktree(root)
            raise
        with chdir(root):
            yield work
        remove_worktree(root)
    lock_file.unlink(missing_ok=True)


def prepare_worktree(
    work: Workspace, overrides: Sequence[str], is_retry: bool, data: bool, replay: float | None
) -> Workspace:
    """Commit the changes of this run and create its branch. Return the workspace with tree, links and notes.

    The branch is created last. If this attempt is killed earlier, the next attempt starts over. If the branch exists,
    this attempt is a retry and continues from the branch.
    """
    data_notes: list[str] = []
    if is_retry:
        git("switch", "--quiet", work.branch)
    else:
        if data:
            data_notes += commit_watched_data()
        commit_parameters(overrides)
    links = share_with_checkout(work.checkout, load_params(Path("params.yaml")))
    if replay is not None and not is_retry:
        champion_overrides, note = start_from_champion(replay)
        commit_parameters(champion_overrides)
        load_params(Path("params.yaml"))
        data_notes.append(note)
    if replay is not None:
        fetch_base()
    if not is_retry:
        git("switch", "--quiet", "--create", work.branch)
    return work._replace(tree=git("rev-parse", "HEAD^{tree}"), links=links, data_notes=tuple(data_notes))


def commit_parameters(overrides: Sequence[str]) -> None:
    """Write overrides to `params.yaml` and commit them. Do nothing if there are none."""
    if overrides:
        write_overrides(Path("params.yaml"), overrides)
        git("commit", "--quiet", "--all", "--message", f"Parameters of this run: {', '.join(overrides)}")


def starting_commit(ref: str | None) -> str:
    """Return the commit of a ref, or HEAD if `ref` is None.

    Raises:
        ParamsError: there is no such ref, or `ref` is None and files that determine a run are not committed.
    """
    if ref is not None:
        try:
            return git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
        except GitError as error:
            raise ParamsError("flows.no_such_ref", key="ref", value=ref, checkout=Path.cwd()) from error
    entries = git("status", "--porcelain", "-z", "--untracked-files=all", "--no-renames", "--", *DECISIVE_PATHS).split(
        "\0"
    )
    changed_paths = [entry[3:] for entry in entries if entry]
    if changed_paths:
        raise uncommitted_error(changed_paths)
    return git("rev-parse", "HEAD")


def uncommitted_error(paths: Sequence[str]) -> ParamsError:
    """Return the error for uncommitted files, with the command that commits them."""
    named_paths = list(paths[:MAX_NAMED_FILES])
    if len(paths) > MAX_NAMED_FILES:
        command = "git add --all && git commit"
        return ParamsError("flows.not_committed_many", names=named_paths, count=len(paths), command=command)
    words = " ".join(shell_word(path) for path in named_paths)
    return ParamsError("flows.not_committed", names=named_paths, command=f"git add {words} && git commit")


def commit_watched_data() -> list[str]:
    """Commit the `.dvc` files that `watch` changed on the branch runs/data.

    A file that was changed by hand since the watch is not replaced, because that change is newer.

    Returns:
        a message about each file that differs from the branch.
    """
    if not has_branch(DATA_BRANCH):
        return []
    start = f"{DATA_BRANCH}^"  # the commit that the watch started from
    watched_files = changed_dvc_files(start, DATA_BRANCH)
    different_files = changed_dvc_files("HEAD", DATA_BRANCH)
    files_changed_by_hand = changed_dvc_files(start, "HEAD")
    data_commit = git("rev-parse", "--short", DATA_BRANCH)
    notes: list[str] = []
    files_to_commit: list[str] = []
    for file in watched_files:
        if file not in different_files:
            continue
        if file in files_changed_by_hand:
            notes.append(f"{file}: used as committed by hand, because the one on {DATA_BRANCH} is older")
        else:
            notes.append(f"{file}: used as on {DATA_BRANCH}, commit {data_commit}")
            files_to_commit.append(file)
    if files_to_commit:
        git(*AS_COMMITTED, "checkout", "--quiet", DATA_BRANCH, "--", *files_to_commit)
        git("commit", "--quiet", "--message", f"Data of {DATA_BRANCH}: {', '.join(files_to_commit)}")
    return notes


def changed_dvc_files(before: str, after: str) -> list[str]:
    """Return the `.dvc` files that differ between two commits."""
    return git("diff", "--no-renames", "--name-only", "-z", before, after, "--", "*.dvc").split("\0")[:-1]


def write_overrides(file: Path, overrides: Sequence[str]) -> None:
    """Write overrides such as `train.epochs=6` to a parameter file and keep its comments.

    A missing section is created. If its name is misspelled, the later check of the parameters suggests the right name.

    Raises:
        ParamsError: an override has no `=`, its value is not YAML, or its path contains a value that is not a section.
    """
    with modify_yaml(file) as values:
        for text in overrides:
            path, equals_sign, value = text.partition("=")
            *sections, key = path.split(".")
            if not equals_sign:
                raise ParamsError("flows.override_without_value", value=text)
            try:
                section = values
                for name in sections:
                    section = section.setdefault(name, {})
                section[key] = yaml.safe_load(value)
            except (yaml.YAMLError, TypeError, AttributeError) as error:
                raise ParamsError("flows.wrong_override", value=text, cause=cause_of(error)) from error


def share_with_checkout(checkout: Path, params: Params) -> tuple[str, ...]:
    """Configure this worktree to use the checkout's DVC cache, scratch folder and local MLflow store.

    Returns:
        the paths in the worktree that are now links into the checkout.
    """
    with chdir(checkout):
        cache_settings = {"dir": str(dvc.cache_folder()), "type": CACHE_LINK_TYPES}
    # Keep DVC's database of file hashes in the worktree, because it would never be deleted elsewhere
    hash_database = Path(".dvc/tmp/memory").absolute()
    write_settings(
        Path(), checkout, cache=cache_settings, core={"site_cache_dir": str(hash_database), "autostage": "false"}
    )
    # The paths to link, each with the folder in the checkout that must exist for the link
    shared_paths = {params.compute.scratch: checkout / params.compute.scratch}
    if params.register_.tracking_uri.startswith(tracking.SQLITE):
        database = Path(params.register_.tracking_uri.removeprefix(tracking.SQLITE))
        # A folder that is part of the commit, such as `.`, cannot be a link, so the file itself is linked
        is_folder_of_commit = database.parent.exists() and not database.parent.is_symlink()
        shared_path = database if is_folder_of_commit else database.parent
        shared_paths[shared_path] = checkout / database.parent
    relative_paths = [path for path in shared_paths if not path.is_absolute()]
    for path in relative_paths:
        target = checkout / path
        shared_paths[path].mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A path outside the worktree may already be a link that an earlier run created
        if not (path.is_symlink() and path.readlink() == target):
            path.symlink_to(target)
    return tuple(str(path) for path in relative_paths)


def remove_worktree(root: Path) -> None:
    """Remove a worktree, but not the targets of its links."""
    shutil.rmtree(root, ignore_errors=True)
    # Git locks a worktree while it adds it. If git is killed meanwhile, the lock stays, and `prune` keeps the worktree.
    # Usually there is no lock. `unlock` then fails, which does not matter
    run_git("worktree", "unlock", str(root))
    git("worktree", "prune")


def remove_old_worktrees(folder: Path) -> None:
    """Remove the worktrees of runs that ended more than KEPT_DAYS ago. Nothing else in the folder is touched."""
    for lock_file in sorted(folder.glob("*.lock")):
        root = lock_file.with_suffix("")
        is_worktree = (root / ".git").is_file() and not root.is_symlink()
        if not is_worktree or time.time() - root.stat().st_mtime < KEPT_DAYS * 86400:
            continue
        # Skip the run if its lock is held, because the run is then still in progress
        with suppress(BlockingIOError), hold_lock(lock_file, wait=False):
            remove_worktree(root)
            lock_file.unlink()


# Training that starts from the champion


def start_from_champion(replay: float) -> tuple[tuple[str, ...], str]:
    """Prepare training from the champion: write `data/00_champion.dvc` into the current directory, which is a worktree.

    Datasets that have changed since the champion was trained are used in full. Of the other datasets, a share of the
    pairs is trained on again, so that the model does not forget them. If there is no champion, nothing is written, and
    training starts from the base.

    Args:
        replay: the share of the pairs of unchanged datasets to train on again, from 0 to 1.

    Returns:
        the overrides for the run, and a message that describes them.

    Raises:
        NothingNewError: no dataset has changed since the champion was trained.
        ParamsError: `replay` is not between 0 and 1.
        DataError: the commit of the champion is neither in this clone nor in its remotes.
        TrackingUnavailableError: MLflow does not respond.
    """
    if not 0 <= replay <= 1:
        raise ParamsError("flows.replay_out_of_range", key="replay", value=replay)
    params = load_params(Path("params.yaml"))
    with tracking.connect(params.register_.tracking_uri) as client:
        champion = find_aliased_version(client, params.register_.model_name, CHAMPION)
    if champion is None:
        return (), "there is no champion yet, so training starts from the base"
    changed_names = changed_datasets(find_commit(champion.tags.get("git.commit", "unknown")), params.ingest.datasets)
    champion_name = f"{champion.name} version {champion.version}"
    if not changed_names:
        raise NothingNewError(f"no dataset has changed since the champion, {champion_name}, was trained")
    dvc_file = Path(f"{CHAMPION_FOLDER}.dvc")
    entry = {"md5": champion.tags["dvc.checkpoint"], "hash": "md5", "path": CHAMPION_FOLDER.name}
    dvc_file.write_text(yaml.safe_dump({"outs": [entry]}), encoding="utf-8")
    git("add", "--", str(dvc_file))
    unchanged_names = [name for name in params.ingest.datasets if name not in changed_names]
    sources = yaml.safe_dump(
        scale_weights(params, unchanged_names, replay), default_flow_style=True, width=4096
    ).strip()
    note = f"training starts from {champion_name}. Changed since and used in full: {', '.join(sorted(changed_names))}"
    if unchanged_names:
        note += f". Unchanged, so that a share of {replay} is used again: {', '.join(unchanged_names)}"
    return (f"train.base={CHAMPION_FOLDER}", f"convert.sources={sources}"), note


def changed_datasets(commit: str, names: Collection[str]) -> set[str]:
    """Return the datasets whose raw data or parameters differ from those at a commit.

    The data need not be checked out.
    """
    # DVC compares with the dvc.lock on disk, so temporarily replace that file with the commit's dvc.lock
    lock_before = dvc.DVC_LOCK.read_bytes() if dvc.DVC_LOCK.is_file() else None
    dvc.DVC_LOCK.write_text(git("show", f"{commit}:{dvc.DVC_LOCK}") + "\n", encoding="utf-8")
    try:
        locked_stages = dvc.locked_stages() or {}
        status = dvc.status()
    finally:
        dvc.DVC_LOCK.unlink()
        if lock_before is not None:
            dvc.DVC_LOCK.write_bytes(lock_before)
    changed_names = {name for name in names if f"ingest@{name}" not in locked_stages}
    for change in dvc.data_and_parameter_changes(status):
        # Data that are not checked out are reported as deleted, which is not a change
        if change.kind == "changed deps" and change.detail != "deleted":
            changed_names.add(change.stage.partition("@")[2])
    return changed_names & set(names)


def scale_weights(params: Params, names: Collection[str], replay: float) -> Mapping[str, Any]:
    """Return the parameter `convert.sources` with the weights of these datasets multiplied by `replay`."""
    sources = {name: source.model_dump(exclude_defaults=True) for name, source in params.convert.sources.items()}
    for name in names:
        source = sources.setdefault(name, {})
        source["weight"] = source.get("weight", 1.0) * replay
    return sources


def fetch_base() -> None:
    """If training starts from the champion, check out the champion's checkpoint from the cache or the remote.

    Raises:
        DvcError: the checkpoint is neither in the cache nor in the remote.
    """
    dvc_file = f"{CHAMPION_FOLDER}.dvc"
    if not Path(dvc_file).is_file():
        return
    dvc.link_data()
    if CHAMPION_FOLDER.is_dir():
        return
    with dvc.repository(command=f"dvc pull {dvc_file}") as repo:
        repo.pull([dvc_file])


# Files of the flows


def read_json(file: Path) -> Any:
    """Read a JSON file written by a flow. Return None if it does not exist, or if a power loss truncated it."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


@contextmanager
def hold_lock(file: Path, wait: bool = True, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file within the context. The kernel releases the lock when the process ends, even if it is killed.

    Args:
        file: the lock file.
        wait: whether to wait if another process holds the lock.
        on_wait: called before waiting for another process.

    Raises:
        BlockingIOError: another process holds the lock, and `wait` is false.
    """
    with file.open("a+") as lock_file:
        try:
            lock_exclusively(lock_file, wait=False)
        except BlockingIOError:
            if not wait:
                raise
            on_wait()
            lock_exclusively(lock_file)
        yield
