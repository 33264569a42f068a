"""A flow run's own place: a git worktree at one commit, on the branch `runs/<flow run>`.

Nobody's edit reaches it, and it touches nobody's files. Where data are needed they come by link, from the cache of the
checkout that the flow was started in. Scratch and the local MLflow store are the checkout's, so that a training goes on
from the checkpoints of a killed run. `runs/flows/` holds the worktrees, each with a lock file that its flow's process
holds.
"""

import fcntl
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from dvc.utils.serialize import modify_yaml

from flows import dvc, warm
from m3diff.provenance.dvc import write_settings
from m3diff.provenance.git import AS_COMMITTED, GitError, git, has_branch, require_own_repository
from m3diff.registry.tracking import SQLITE
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params

FLOWS = Path("runs/flows")
WATCHED = ("params.yaml", "dvc.yaml", "profiles", "components", "flows", ":(glob)**/*.dvc")
"""What decides a run. `dvc.lock` does not: it says what ran."""

LINKS = "reflink,hardlink,symlink"
KEPT_DAYS = 7  # the worktree of a run that failed
DATA = "runs/data"
"""The branch of the `.dvc` files that `m3diff/watch` changed: one commit, on top of the one that it began with."""


class UncommittedError(ParamsError):
    """Files that decide the run are not committed, so that no commit could say what ran."""


class Workspace(NamedTuple):
    """The place of a flow run. It starts from `commit`; `tree` names its content: equal trees are equal work."""

    flow_run: str
    root: Path
    checkout: Path
    commit: str
    tree: str
    overrides: tuple[str, ...]
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
        UncommittedError: see `ref`.
        NothingNewError: see `flows.warm.from_champion`.
        ParamsError: an override or the parameters under it are wrong; every fault at once.
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
        work = Workspace(flow_run, root, checkout, commit, "", tuple(overrides), ())
        try:
            with chdir(root):
                work = prepare(work, again, data, replay)
        except BaseException:
            remove(root)
            raise
        with chdir(root):
            yield work
        remove(root)
    file.unlink(missing_ok=True)


def prepare(work: Workspace, again: bool, data: bool, replay: float | None) -> Workspace:
    """Commit what this run changes and make its branch, last: a worktree without one is made anew. A flow run that is
    tried `again` goes on from its branch."""
    said: tuple[str, ...] = ()
    if again:
        git("switch", "--quiet", work.branch)
    else:
        said = take_up_data() if data else ()
        commit_parameters(work.overrides)
    links = share(work.checkout, load_params(Path("params.yaml")))
    if replay is not None:
        start = warm.again() if again else warm.from_champion(replay)
        if not again:
            commit_parameters(start.overrides)
            load_params(Path("params.yaml"))
        work, said = work._replace(overrides=(*work.overrides, *start.overrides)), (*said, start.said)
        warm.bring_base()
    if not again:
        git("switch", "--quiet", "--create", work.branch)
    return work._replace(tree=git("rev-parse", "HEAD^{tree}"), links=links, data=said)


def commit_parameters(overrides: Sequence[str]) -> None:
    if overrides:
        override(Path("params.yaml"), overrides)
        git("commit", "--quiet", "--all", "--message", f"Parameters of this run: {', '.join(overrides)}")


def starting_commit(ref: str | None) -> str:
    """The commit that a run starts from, resolved once."""
    if ref is not None:
        try:
            return git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
        except GitError as error:
            raise ParamsError(f"ref: {ref!r} is no commit, branch or tag of {Path.cwd()}") from error
    entries = git("status", "--porcelain", "-z", "--untracked-files=all", "--no-renames", "--", *WATCHED).split("\0")
    changed = [entry[3:] for entry in entries if entry]
    if changed:
        raise UncommittedError(
            f"not committed: {', '.join(changed[:5])}{' and more' if changed[5:] else ''}; what runs must be a commit. "
            "Commit it, on a branch of its own (ref=BRANCH) if need be, or run the last commit without it (ref=HEAD)"
        )
    return git("rev-parse", "HEAD")


def take_up_data() -> tuple[str, ...]:
    """Commit the `.dvc` files of the branch runs/data here, each where it is as it was when `watch` changed it; what
    was done with each, in words."""
    if not has_branch(DATA):
        return ()
    pairs = ((f"{DATA}^", DATA), ("HEAD", DATA), (f"{DATA}^", "HEAD"))
    found, new, by_hand = (
        git("diff", "--no-renames", "--name-only", "-z", *pair, "--", "*.dvc").split("\0") for pair in pairs
    )
    changed = [path for path in found if path and path in new]
    taken = [path for path in changed if path not in by_hand]
    if taken:
        git(*AS_COMMITTED, "checkout", "--quiet", DATA, "--", *taken)
        git("commit", "--quiet", "--message", f"Data of {DATA}: {', '.join(taken)}")
    left = [path for path in changed if path in by_hand]
    return (
        *(f"{path}: as on {DATA}, {git('rev-parse', '--short', DATA)}" for path in taken),
        *(f"{path}: as committed by hand; what {DATA} has of it is older and left out" for path in left),
    )


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
    cache = {"dir": str(dvc.cache_folder(checkout)), "type": LINKS}
    memory = Path(".dvc/tmp/memory").absolute()  # what DVC remembers of files, which would stay on the machine for ever
    write_settings(Path(), checkout, cache=cache, core={"site_cache_dir": str(memory)})
    shared = {params.compute.scratch: checkout / params.compute.scratch}  # and the folder that has to be there
    if params.register_.tracking_uri.startswith(SQLITE):
        database = Path(params.register_.tracking_uri.removeprefix(SQLITE))
        of_commit = database.parent.exists() and not database.parent.is_symlink()  # as `.` is
        shared[database if of_commit else database.parent] = checkout / database.parent
    for path in [path for path in shared if not path.is_absolute()]:
        target = checkout / path
        shared[path].mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() and path.readlink() == target:  # outside the worktree: an earlier run's
            continue
        try:
            path.symlink_to(target)
        except FileExistsError as error:
            raise ParamsError(
                f"{path}: the commit has it, but runs share the checkout's; name another place"
            ) from error
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
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            tell()
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
