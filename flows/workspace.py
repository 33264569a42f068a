"""A flow run's own place: a git worktree at one commit, on the branch `runs/<flow run>`.

Nobody's edit reaches it, and it touches nobody's files. Where data are needed they come by link, from the cache of the
checkout that the flow was started in. Scratch and the local MLflow store are the checkout's, so that a training goes on
from the checkpoints of a killed run. `runs/flows/` holds the worktrees, each with a lock file that its flow's process
holds.
"""

import fcntl
import io
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import yaml
from ruamel.yaml import YAML

from flows import archive, dvc, warm
from m3diff.provenance.dvc import write_settings
from m3diff.provenance.git import AS_COMMITTED, GitError, git, has_branch, require_own_repository
from m3diff.registry.tracking import SQLITE
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError, closest
from m3diff.settings.tree import Params

FLOWS = Path("runs/flows")
WATCHED = ("params.yaml", "dvc.yaml", "profiles", "components", "flows", ":(glob)**/*.dvc")
"""What decides a run. `dvc.lock` does not: it says what ran."""

LINKS = "reflink,hardlink,symlink"
KEPT_DAYS = 7  # the worktree of a run that failed
DATA = "runs/data"
"""The branch of the `.dvc` files that `m3diff/watch` changed: one commit, on top of the one that it began with."""


class UncommittedError(ParamsError):
    """What decides the run is not committed, so that no commit could say what ran."""


class Workspace(NamedTuple):
    """Where a flow run works. `commit` is what it starts from, `tree` names its content: equal trees are equal work."""

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
    flow_run: str,
    ref: str | None,
    overrides: Sequence[str],
    dirty: bool,
    data: bool = False,
    replay: float | None = None,
) -> Iterator[Workspace]:
    """Within, the current directory is a worktree of the flow run's own. It is removed after a success and kept for a
    week after a failure.

    Args:
        ref: commit, branch or tag; None for HEAD, which must then be all that decides a run.
        overrides: parameters as `train.epochs=6`, committed to the run's branch.
        dirty: commit what is not committed to the run's branch first.
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
    checkout = Path.cwd()
    FLOWS.mkdir(parents=True, exist_ok=True)
    sweep(checkout / FLOWS)
    with lock(FLOWS / f"{flow_run}.lock"):
        work = make(checkout, flow_run, ref, overrides, dirty, data, replay)
        with chdir(work.root):
            yield work
        remove(work.root)
    (FLOWS / f"{flow_run}.lock").unlink(missing_ok=True)


def make(
    checkout: Path,
    flow_run: str,
    ref: str | None,
    overrides: Sequence[str],
    dirty: bool,
    data: bool,
    replay: float | None,
) -> Workspace:
    """The worktree, without its data. A flow run that is tried again goes on from its branch, which is made when it is
    whole."""
    root, branch = checkout / FLOWS / flow_run, f"runs/{flow_run}"
    again = has_branch(branch)
    commit = git("rev-parse", branch) if again else starting_commit(ref, dirty)
    if root.exists():
        remove(root)
    git("worktree", "prune")
    git(*AS_COMMITTED, "worktree", "add", "--quiet", "--detach", str(root), commit)
    try:
        with chdir(root):
            if again:
                git("switch", "--quiet", branch)
                if mended := archive.mend_lock():
                    archive.commit(f"dvc.lock is that of {mended:.12}: this branch's is empty or cut short", ())
            taken = take_up_data() if data and not again else ()
            if overrides and not again:
                commit_parameters(overrides)
            links = share(checkout, load_params(Path("params.yaml")))
            if replay is not None:
                start = warm.again() if again else warm.from_champion(replay)
                if not again and start.overrides:
                    commit_parameters(start.overrides)
                    load_params(Path("params.yaml"))
                overrides, taken = (*overrides, *start.overrides), (*taken, start.said)
                warm.bring_base()
            if not again:
                git("switch", "--quiet", "--create", branch)
            tree = git("rev-parse", "HEAD^{tree}")
    except BaseException:
        remove(root)
        raise
    return Workspace(flow_run, root, checkout, commit, tree, tuple(overrides), links, taken)


def commit_parameters(overrides: Sequence[str]) -> None:
    override(Path("params.yaml"), overrides)
    git("commit", "--quiet", "--all", "--message", f"Parameters of this run: {', '.join(overrides)}")


def starting_commit(ref: str | None, dirty: bool) -> str:
    """The commit that a run starts from, resolved once."""
    if ref is not None:
        try:
            return git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
        except GitError as error:
            raise ParamsError(f"ref: {ref!r} is no commit, branch or tag of {Path.cwd()}") from error
    changed = uncommitted()
    if not changed:
        return git("rev-parse", "HEAD")
    if dirty:
        return committed(changed)
    raise UncommittedError(
        f"not committed: {', '.join(changed[:5])}{' and more' if changed[5:] else ''}; what runs must be a commit. "
        "Commit it, run another one (ref=HEAD: the last commit without it), or ask for dirty=true, which commits it to "
        "the run's own branch"
    )


def uncommitted() -> list[str]:
    """Changed and new files of what decides a run, as git names them."""
    entries = git("status", "--porcelain", "-z", "--untracked-files=all", "--no-renames", "--", *WATCHED).split("\0")
    return [entry[3:] for entry in entries if entry]


def committed(changed: Sequence[str]) -> str:
    """A commit on top of HEAD that holds these files as they are; no branch, index or file is touched."""
    with tempfile.TemporaryDirectory() as scratch:
        index = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
        git("read-tree", "HEAD", env=index)
        git("add", "--all", "--", *changed, env=index)
        tree = git("write-tree", env=index)
    return git("commit-tree", tree, "-p", "HEAD", "-m", f"Not committed when the run began: {', '.join(changed)}")


def take_up_data() -> tuple[str, ...]:
    """Commit the `.dvc` files of the branch runs/data here, each where it is as it was when `watch` changed it; what
    was done with each, in words."""
    if not has_branch(DATA):
        return ()
    paths = git("diff", "--name-only", "-z", f"{DATA}^", DATA, "--", "*.dvc").split("\0")
    changed = [path for path in paths if path and blob("HEAD", path) != blob(DATA, path)]
    taken = [path for path in changed if blob("HEAD", path) == blob(f"{DATA}^", path)]
    if taken:
        git(*AS_COMMITTED, "checkout", "--quiet", DATA, "--", *taken)
        git("commit", "--quiet", "--message", f"Data of {DATA}: {', '.join(taken)}")
    left = [path for path in changed if path not in taken]
    return (
        *(f"{path}: as on {DATA}, {git('rev-parse', '--short', DATA)}" for path in taken),
        *(f"{path}: as committed by hand; what {DATA} has of it is older and left out" for path in left),
    )


def blob(commit: str, path: str) -> str | None:
    """The hash by which git knows a file of a commit; None where there is none."""
    try:
        return git("rev-parse", "--verify", "--quiet", f"{commit}:{path}")
    except GitError:
        return None


def override(file: Path, overrides: Sequence[str]) -> None:
    """Write parameters, given as `train.epochs=6`, into a parameter file whose comments stay.

    Raises:
        ParamsError: no `=`, a value that is not YAML, or a section that is not there.
    """
    tool = YAML()
    tool.preserve_quotes, tool.width = True, 4096
    values = tool.load(file.read_text(encoding="utf-8"))
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals:
            raise ParamsError(f"override {text!r}: expected section.parameter=value")
        *sections, last = path.split(".")
        place: Any = values
        for name in sections:
            if not isinstance(place, dict) or name not in place:
                known = place if isinstance(place, dict) else {}
                raise ParamsError(f"override {text!r}: no section {name!r}; {closest(name, known)}")
            place = place[name]
        try:
            place[last] = yaml.safe_load(value)
        except (yaml.YAMLError, TypeError) as error:
            raise ParamsError(f"override {text!r}: {error}") from error
    written = io.StringIO()
    tool.dump(values, written)
    file.write_text(written.getvalue(), encoding="utf-8")


def share(checkout: Path, params: Params) -> tuple[str, ...]:
    """Let this worktree use the checkout's DVC cache, by links, its scratch folder and its local MLflow store; the
    folders that now lead there."""
    cache = {"dir": str(dvc.cache_folder(checkout)), "type": LINKS}
    memory = Path(".dvc/tmp/memory").absolute()  # what DVC remembers of files, which would stay on the machine for ever
    write_settings(Path(), checkout, cache=cache, core={"site_cache_dir": str(memory)})
    folders, files = [params.compute.scratch], []
    if params.register_.tracking_uri.startswith(SQLITE):
        database = Path(params.register_.tracking_uri.removeprefix(SQLITE))
        if database.parent.exists() and not database.parent.is_symlink():  # a folder of the commit, as `.` is
            files.append(database)
        else:
            folders.append(database.parent)
    shared = [path for path in (*folders, *files) if not path.is_absolute()]
    for path in shared:
        target = checkout / path
        (target.parent if path in files else target).mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() and path.readlink() == target:  # outside the worktree: an earlier run's
            continue
        try:
            path.symlink_to(target)
        except FileExistsError as error:
            raise ParamsError(
                f"{path}: the commit has it, but runs share the checkout's; name another place"
            ) from error
    return tuple(map(str, shared))


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
def lock(file: Path, wait: bool = True) -> Iterator[IO[str]]:
    """Hold a lock file; the kernel gives it back when the process ends, however it ends.

    Raises:
        BlockingIOError: another process holds it, and `wait` is false.
    """
    with file.open("a+") as held:
        fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield held
