"""A flow run's own place: a git worktree at one commit, on the branch `runs/<flow run>`.

Nobody's edit reaches it, and it touches nobody's files. Where data are needed they come by link, from the cache of the
checkout that the flow was started in. Scratch and the local MLflow store are the checkout's, so that a training goes on
from the checkpoints of a killed run. `runs/flows/` holds the worktrees, each with a lock file that its flow's process
holds.
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
from m3diff.provenance.git import AS_COMMITTED, GitError, find_commit, git, has_branch, require_own_repository
from m3diff.records.files import lock_exclusively
from m3diff.registry import tracking
from m3diff.registry.versions import CHAMPION, find_alias
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params

FLOWS = Path("runs/flows")
# What decides a run. `dvc.lock` does not: it says what ran.
WATCHED = ("params.yaml", "dvc.yaml", "profiles", "components", "flows", ":(glob)**/*.dvc")

LINKS = "reflink,hardlink,symlink"
KEPT_DAYS = 7  # the worktree of a run that failed
# The branch of the `.dvc` files that `m3diff/watch` changed: one commit, on top of the one that it began with
DATA = "runs/data"


# Where the champion's checkpoint lies as a base. `data/00_champion.dvc` tracks it, on the run's branch.
BASE = Path("data/00_champion")


class NothingNewError(Exception):
    """The champion has seen all data as they are."""


class Workspace(NamedTuple):
    """The place of a flow run. It starts from `commit`; `tree` names its content: equal trees are equal work."""

    flow_run: str
    root: Path
    checkout: Path
    commit: str
    tree: str
    overrides: tuple[str, ...]  # and how it begins, where not with the base
    links: tuple[str, ...]  # folders of the checkout
    data: tuple[str, ...] = ()  # what was done with the branch runs/data, in words

    @property
    def branch(self) -> str:
        return f"runs/{self.flow_run}"


@contextmanager
def workspace(
    flow_run: str, ref: str | None, overrides: Sequence[str], data: bool = False, replay: float | None = None
) -> Iterator[Workspace]:
    """Within, the current directory is a worktree of the flow run's own. It is removed after a success and kept for a
    week after a failure.

    Args:
        ref: commit, branch or tag; None for HEAD, which must then be all that decides a run.
        overrides: parameters as `train.epochs=6`, committed to the run's branch.
        data: take up the data that `m3diff/watch` found, where nobody changed them by hand since.
        replay: begin with the champion, and train this share of the pairs of unchanged datasets again; None: begin with
            the base.

    Raises:
        NothingNewError: see `from_champion`.
        ParamsError: files that decide the run are not committed, an override or the parameters under it are wrong.
        GitError: there is no such commit, or git cannot make the worktree.
    """
    require_own_repository()
    checkout, branch = Path.cwd(), f"runs/{flow_run}"
    root, file = checkout / FLOWS / flow_run, FLOWS / f"{flow_run}.lock"
    FLOWS.mkdir(parents=True, exist_ok=True)
    sweep(checkout / FLOWS)
    with lock(file):
        again = has_branch(branch)
        commit = git("rev-parse", branch) if again else starting_commit(ref)
        remove(root)  # what a killed attempt left
        git(*AS_COMMITTED, "worktree", "add", "--quiet", "--detach", str(root), commit)
        own = (*overrides, *([f"begin with the champion, replay {replay}"] if replay is not None else []))
        work = Workspace(flow_run, root, checkout, commit, "", own, ())
        try:
            with chdir(root):
                work = prepare(work, overrides, again, data, replay)
        except BaseException:
            remove(root)
            raise
        with chdir(root):
            yield work
        remove(root)
    file.unlink(missing_ok=True)


def prepare(work: Workspace, overrides: Sequence[str], again: bool, data: bool, replay: float | None) -> Workspace:
    """Commit what this run changes and make its branch, last: a worktree without one is made anew. A flow run that is
    tried `again` goes on from its branch."""
    said: tuple[str, ...] = ()
    if again:
        git("switch", "--quiet", work.branch)
    else:
        said = take_up_data() if data else ()
        commit_parameters(overrides)
    links = share(work.checkout, load_params(Path("params.yaml")))
    if replay is not None and not again:
        overrides, sentence = from_champion(replay)
        commit_parameters(overrides)
        load_params(Path("params.yaml"))
        said = (*said, sentence)
    if replay is not None:
        bring_base()
    if not again:
        git("switch", "--quiet", "--create", work.branch)
    return work._replace(tree=git("rev-parse", "HEAD^{tree}"), links=links, data=said)


def commit_parameters(overrides: Sequence[str]) -> None:
    if overrides:
        override(Path("params.yaml"), overrides)
        git("commit", "--quiet", "--all", "--message", f"Parameters of this run: {', '.join(overrides)}")


def starting_commit(ref: str | None) -> str:
    if ref is not None:
        try:
            return git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
        except GitError as error:
            raise ParamsError(f"ref: {ref!r} is no commit, branch or tag of {Path.cwd()}") from error
    entries = git("status", "--porcelain", "-z", "--untracked-files=all", "--no-renames", "--", *WATCHED).split("\0")
    changed = [entry[3:] for entry in entries if entry]
    if changed:
        raise ParamsError(
            f"not committed: {', '.join(changed[:5])}{' and more' if changed[5:] else ''}; what runs must be a commit. "
            "Commit it, on a branch of its own (ref=BRANCH) if need be, or run the last commit without it (ref=HEAD)"
        )
    return git("rev-parse", "HEAD")


def take_up_data() -> tuple[str, ...]:
    """Commit the `.dvc` files of the branch runs/data here, each where it is as it was when `watch` changed it; what
    was done with each, in words."""
    if not has_branch(DATA):
        return ()
    found, new, by_hand = (
        git("diff", "--no-renames", "--name-only", "-z", *pair, "--", "*.dvc").split("\0")[:-1]
        for pair in ((f"{DATA}^", DATA), ("HEAD", DATA), (f"{DATA}^", "HEAD"))
    )
    said = {path: f"{path}: as on {DATA}, {git('rev-parse', '--short', DATA)}" for path in found if path in new}
    taken = [path for path in said if path not in by_hand]
    if taken:
        git(*AS_COMMITTED, "checkout", "--quiet", DATA, "--", *taken)
        git("commit", "--quiet", "--message", f"Data of {DATA}: {', '.join(taken)}")
    older = f"as committed by hand; what {DATA} has of it is older and left out"
    return tuple(words if path in taken else f"{path}: {older}" for path, words in said.items())


def override(file: Path, overrides: Sequence[str]) -> None:
    """Write parameters, given as `train.epochs=6`, into a parameter file whose comments stay. A section that is not
    there is made, for the check of the parameters to refuse.

    Raises:
        ParamsError: no `=`, a value that is not YAML, or a parameter of what is no section.
    """
    with modify_yaml(file) as values:
        for text in overrides:
            path, equals, value = text.partition("=")
            *sections, last = path.split(".")
            try:
                if not equals:
                    raise TypeError("expected section.parameter=value")
                section = values
                for name in sections:
                    section = section.setdefault(name, {})
                section[last] = yaml.safe_load(value)
            except (yaml.YAMLError, TypeError, AttributeError) as error:
                raise ParamsError(f"override {text!r}: {error}") from error


def share(checkout: Path, params: Params) -> tuple[str, ...]:
    """Let this worktree use the checkout's DVC cache, by links, its scratch folder and its local MLflow store; the
    folders that now lead there."""
    with chdir(checkout):
        cache = {"dir": str(dvc.cache_folder()), "type": LINKS}
    memory = Path(".dvc/tmp/memory").absolute()  # what DVC remembers of files, which would stay on the machine for ever
    write_settings(Path(), checkout, cache=cache, core={"site_cache_dir": str(memory), "autostage": "false"})
    shared = {params.compute.scratch: checkout / params.compute.scratch}  # and the folder that has to be there
    if params.register_.tracking_uri.startswith(tracking.SQLITE):
        database = Path(params.register_.tracking_uri.removeprefix(tracking.SQLITE))
        of_commit = database.parent.exists() and not database.parent.is_symlink()  # as `.` is
        shared[database if of_commit else database.parent] = checkout / database.parent
    for path in [path for path in shared if not path.is_absolute()]:
        target = checkout / path
        shared[path].mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() and path.readlink() == target:  # outside the worktree: an earlier run's
            continue
        path.symlink_to(target)
    return tuple(str(path) for path in shared if not path.is_absolute())


def remove(root: Path) -> None:
    """Take a worktree away; what its links lead to stays."""
    shutil.rmtree(root, ignore_errors=True)
    git("worktree", "prune")


def sweep(folder: Path) -> None:
    """Remove the worktrees of runs that ended more than KEPT_DAYS ago; what else lies here is a person's."""
    for file in [path for path in folder.glob("*.lock") if (path.with_suffix("") / ".git").is_file()]:
        root = file.with_suffix("")
        if root.is_symlink() or time.time() - root.stat().st_mtime < KEPT_DAYS * 86400:
            continue
        with suppress(BlockingIOError), lock(file, wait=False):
            remove(root)
            file.unlink()


# A training that goes on from the champion


def from_champion(replay: float) -> tuple[tuple[str, ...], str]:
    """Write `data/00_champion.dvc` into the worktree that is the current directory. Returns the overrides of a training
    that goes on from the champion, and a sentence on it.

    Datasets that changed since the champion train whole; of the others a share of the pairs trains again, so that what
    was learnt is not lost. Without a champion training begins with the base.

    Args:
        replay: the share of the pairs of unchanged datasets that trains again; 1 all, 0 none.

    Raises:
        NothingNewError: no dataset changed since the champion.
        ParamsError: `replay` is no share.
        DataError: the champion's commit is not known here.
        TrackingUnavailableError: MLflow does not answer.
    """
    if not 0 <= replay <= 1:
        raise ParamsError(f"replay: expected a share from 0 to 1, found {replay}")
    params = load_params(Path("params.yaml"))
    with tracking.connected(params.register_.tracking_uri) as client:
        champion = find_alias(client, params.register_.model_name, CHAMPION)
    if champion is None:
        return (), "there is no champion to begin with yet, so training begins with the base"
    changed = changed_datasets(find_commit(champion.tags.get("git.commit", "unknown")), params.ingest.datasets)
    what = f"{champion.name} version {champion.version}"
    if not changed:
        raise NothingNewError(f"no dataset changed since {what}, the champion, was trained")
    file = Path(f"{BASE}.dvc")
    entry = {"md5": champion.tags["dvc.checkpoint"], "hash": "md5", "path": BASE.name}
    file.write_text(yaml.safe_dump({"outs": [entry]}), encoding="utf-8")
    git("add", "--", str(file))
    others = [name for name in params.ingest.datasets if name not in changed]
    sources = yaml.safe_dump(weighted(params, others, replay), default_flow_style=True, width=4096).strip()
    said = f"begins with {what}; {', '.join(sorted(changed))} changed since and trains whole"
    if others:
        said += f"; of {', '.join(others)} a share of {replay} trains again"
    return (f"train.base={BASE}", f"convert.sources={sources}"), said


def changed_datasets(commit: str, names: Collection[str]) -> set[str]:
    """The datasets whose raw data or parameters are others than at this commit. Nothing need be in place."""
    before = dvc.LOCK.read_bytes() if dvc.LOCK.is_file() else None
    dvc.LOCK.write_text(git("show", f"{commit}:{dvc.LOCK}") + "\n", encoding="utf-8")
    try:
        known, said = dvc.locked() or {}, dvc.status()
    finally:
        dvc.LOCK.unlink()
        if before is not None:
            dvc.LOCK.write_bytes(before)
    changed = {name for name in names if f"ingest@{name}" not in known}
    for stage, kind, _, how in dvc.news(said):
        if kind == "changed deps" and how != "deleted":  # what is not in place is no change
            changed.add(stage.partition("@")[2])
    return changed & {*names}


def weighted(params: Params, names: Collection[str], replay: float) -> Mapping[str, Any]:
    """`convert.sources`, the weights of these datasets times `replay`."""
    sources = {name: source.model_dump(exclude_defaults=True) for name, source in params.convert.sources.items()}
    for name in names:
        source = sources.setdefault(name, {})
        source["weight"] = source.get("weight", 1.0) * replay
    return sources


def bring_base() -> None:
    """Bring the champion's checkpoint into place: from the cache, else from the remote.

    Raises:
        DvcError: neither has it.
    """
    file = f"{BASE}.dvc"
    if not Path(file).is_file():
        return
    dvc.link_data()
    if BASE.is_dir():
        return
    with dvc.repository(outside=f"dvc pull {file}") as repo:
        repo.pull([file])


# Files of the flows


def read_json(file: Path) -> Any:
    """The content of a flow's own file; None without one, and where a loss of power left it empty or cut short."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


@contextmanager
def lock(file: Path, wait: bool = True, tell: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file; the kernel gives it back when the process ends, however it ends.

    Args:
        tell: called where another process holds it and this one waits.

    Raises:
        BlockingIOError: another process holds it, and `wait` is false.
    """
    with file.open("a+") as held:
        try:
            lock_exclusively(held, wait=False)
        except BlockingIOError:
            if not wait:
                raise
            tell()
            lock_exclusively(held)
        yield
