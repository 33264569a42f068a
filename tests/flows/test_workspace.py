"""A flow run's worktree: at one commit, out of everybody's reach, with the data linked in, and gone after a success."""

import json
import os
import shutil
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flows import dvc, watch
from flows import workspace as place
from flows.watch import STATE, content, drop_folders, imports
from flows.workspace import BASE, DATA, FLOWS, NothingNewError, changed_datasets, from_champion, lock, sweep, workspace
from m3diff.provenance.git import git, has_branch
from m3diff.records.errors import DataError
from m3diff.records.files import sha256_of_folder
from m3diff.registry import tracking
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from tests import toy
from tests.conftest import MadeOnce

SEED = Path("params.yaml")


def opened(flow_run="one", ref=None, overrides=(), **more):
    return workspace(flow_run, ref, overrides, **more)


def worktrees() -> list[str]:
    return [line.split()[0] for line in git("worktree", "list").splitlines()[1:]]


def trained_by() -> dict:
    return yaml.safe_load(SEED.read_text())["train"]


@pytest.mark.fault("B1", "S4")
def test_the_run_is_at_the_commit_in_a_place_of_its_own_where_no_edit_reaches_it_and_which_is_gone_afterwards(project):
    with opened() as work:
        assert Path.cwd() == work.root == project / FLOWS / "one"
        assert git("rev-parse", "HEAD") == work.commit == git("rev-parse", "HEAD", cwd=project)
        assert git("branch", "--show-current") == work.branch == "runs/one"
        assert work.tree == git("rev-parse", "HEAD^{tree}", cwd=project)
        assert git("status", "--porcelain") == ""
        for name in ("params.yaml", "components/records/files.py"):
            (project / name).write_text("half typ")
            assert "half typ" not in Path(name).read_text()
        Path("dvc.lock").write_text("the run's")
    assert (Path.cwd(), worktrees(), has_branch("runs/one")) == (project, [], True)
    assert not [*(project / FLOWS).glob("one*")]
    assert (project / "params.yaml").read_text() == "half typ"
    assert "the run's" not in (project / "dvc.lock").read_text()


@pytest.mark.fault("B1")
def test_what_decides_a_run_and_is_not_committed_is_named_and_refused_and_the_rest_may_be(project):
    (project / "notes.txt").write_text("mine")
    (project / "dvc.lock").write_text((project / "dvc.lock").read_text() + "\n# mine\n")
    with opened("before") as work:
        assert "mine" not in Path("dvc.lock").read_text()
        assert not Path("notes.txt").exists()
    assert work.commit == git("rev-parse", "HEAD")
    for file in ("params.yaml", "components/records/files.py", "profiles/new.yaml", "data/raw/mine.dvc"):
        (project / file).parent.mkdir(parents=True, exist_ok=True)
        with (project / file).open("a") as opened_file:
            opened_file.write("\n# new\n")
        with pytest.raises(ParamsError, match=f"not committed: .*{file}.*ref=BRANCH.*ref=HEAD"), opened():
            pytest.fail("it began")
        git("add", file)
        git("stash", "--quiet")
        assert (worktrees(), has_branch("runs/one")) == ([], False)


def test_a_named_commit_runs_without_what_is_not_committed(project):
    first = git("rev-parse", "HEAD")
    toy.change(project, "train", seed=2)
    toy.commit(project, "second")
    head = git("rev-parse", "HEAD")
    toy.change(project, "train", seed=3)
    for name, ref, seed, commit in (("a", "HEAD", 2, head), ("b", first[:9], 7407, first)):
        with opened(name, ref) as work:
            assert (trained_by()["seed"], work.commit) == (seed, commit)
    with pytest.raises(ParamsError, match="ref: 'nowhere' is no commit, branch or tag"), opened("c", "nowhere"):
        pytest.fail("it began")


def test_overrides_are_committed_and_keep_the_comments_and_a_wrong_one_is_refused_and_leaves_nothing(project):
    for override, words in OVERRIDES.items():
        with pytest.raises(ParamsError, match=words), opened(overrides=[override]):
            pytest.fail("it began")
    assert (worktrees(), has_branch("runs/one")) == ([], False)
    with opened(overrides=["train.epochs=6", "promote.guards={CIDEr: 0.5}"]) as work:
        values = yaml.safe_load(SEED.read_text())
        assert values["train"]["epochs"] == 6
        assert values["promote"]["guards"] == {"CIDEr": 0.5}
        assert "a section per stage" in SEED.read_text(), "the comments are gone"
        assert git("log", "-1", "--format=%s").endswith("train.epochs=6, promote.guards={CIDEr: 0.5}")
        assert work.tree == git("rev-parse", "HEAD^{tree}") != git("rev-parse", f"{work.commit}^{{tree}}")


OVERRIDES = {
    "train.epochs": "expected section.parameter=value",
    "trian.epochs=6": "trian.*did you mean 'train'",
    "train.epochs.more=6": r"train.epochs.more=6",
    "train.epochs=[6": r"train.epochs=\[6",
    "train.epochs=six": "train.epochs",
    "train.epohcs=6": "epohcs",
}


def test_data_come_by_link_from_the_checkouts_cache_and_scratch_is_shared(project):
    toy.run(project, "dvc", "repro", "-q", "synthesize@minichange")
    toy.commit(project, "drawn")
    with opened() as work:
        assert not Path("data/01_raw/minichange").exists(), "nothing needs it yet"
        dvc.link_data()
        (image,) = Path("data/01_raw/minichange/images").glob("0.png")
        assert image.read_bytes() == (project / image).read_bytes()
        inodes = {file.stat().st_ino for file in (project / ".dvc/cache").rglob("*") if file.is_file()}
        assert image.stat().st_ino in inodes
        Path("runs/kept").write_text("a checkpoint")
        assert set(work.links) == {"runs", "services/mlflow"}
        assert git("status", "--porcelain") == ""
    assert (project / "runs/kept").read_text() == "a checkpoint"


REMOTES = {
    "folder": "url = ../../store",
    "here": "url = 'store, with a comma'",
    "absolute": "url = /mnt/Ümläut 'x'",
    "aws": "url = s3://bucket/dvc\n credentialpath = ../keys/aws\n ssl_verify = certs/ca.pem",
    "login": "url = ssh://user@host:22/dvc\n keyfile = ../keys/id\n port = 22",
    "dav": "url = webdavs://host/dvc\n cert_path = ../certs/me.pem\n key_path = ../me.key\n ssl_verify = false",
    "part": "url = remote://folder/sub",
}


@pytest.mark.fault("T5")
@pytest.mark.parametrize("files", [("config",), ("config.local",), ("config", "config.local")])
def test_every_setting_of_a_remote_means_in_a_run_what_it_means_in_the_checkout(project, files):
    (project / "certs").mkdir()
    (project / "certs" / "ca.pem").write_text("uncommitted")
    text = "".join(f"['remote \"{name}\"']\n {options}\n" for name, options in REMOTES.items())
    for name in files:
        with (project / ".dvc" / name).open("a", encoding="utf-8") as opened_file:
            opened_file.write(f"\n{text}")
    with (project / ".dvc" / "config.local").open("a", encoding="utf-8") as opened_file:
        opened_file.write("[cache]\n    dir = '../Ümläut, 空白'\n    slow_link_warning = false\n")
    toy.commit(project, "remotes")
    with dvc.repository() as repo:
        meant, cache = repo.config["remote"], repo.cache.local_cache_dir
    with opened(ref="HEAD"), dvc.repository() as repo:
        found = repo.config["remote"]
        assert found["aws"].pop("ssl_verify") == str(project / "certs" / "ca.pem")
        assert meant["aws"].pop("ssl_verify") == "certs/ca.pem"
        assert found == meant
        assert repo.cache.local_cache_dir == cache
        assert repo.config["cache"]["slow_link_warning"] is False
        assert Path(repo.config["core"]["site_cache_dir"]).is_relative_to(Path.cwd())


@pytest.mark.fault("T5")
@pytest.mark.parametrize("uri", ["sqlite:///mlflow.db", "sqlite:///data/store.db", "sqlite:///../beside/mlflow.db"])
def test_a_relative_store_or_scratch_folder_is_the_checkouts_wherever_it_lies(project, uri):
    toy.change(project, "register", tracking_uri=uri)
    toy.change(project, "compute", scratch="../scratch")
    toy.commit(project, "places")
    meant = tracking.resolve(uri)
    for name in ("one", "two"):  # the second finds the links of the first outside its worktree
        with opened(name):
            assert tracking.resolve(uri) == meant
            (Path("../scratch") / name).write_text("a checkpoint")
            assert (project.parent / "scratch" / name).is_file()


@pytest.mark.fault("T5")
def test_the_worktree_of_a_failed_run_stays_for_a_week_and_a_sweep_takes_nothing_else(project):
    with pytest.raises(RuntimeError, match="failed"), opened() as work:
        raise RuntimeError("it failed")
    flows = project / FLOWS
    theirs, mine, link = flows / "dvc-store" / "files", flows / "mine", flows / "link"
    theirs.mkdir(parents=True)
    git("worktree", "add", "--quiet", "--detach", str(mine), "HEAD")
    link.symlink_to(project / "components")
    for name in ("link", "dvc-store"):
        (flows / f"{name}.lock").touch()
    for path in (theirs.parent, mine, project / "components"):
        os.utime(path, (0, 0))
    sweep(flows)
    assert work.root.is_dir()
    old = time.time() - 8 * 86400
    os.utime(work.root, (old, old))
    with lock(flows / "one.lock"):
        sweep(flows)
        assert work.root.is_dir(), "its process still lives"
    sweep(flows)
    assert (worktrees(), work.root.exists()) == ([str(mine)], False)
    assert all((theirs.is_dir(), (mine / ".git").is_file(), link.is_symlink()))


@pytest.mark.fault("04")
def test_a_run_that_is_tried_again_goes_on_from_its_branch_and_without_one_begins_anew(project):
    root = project / FLOWS / "one"
    root.parent.mkdir(parents=True)
    git("worktree", "add", "--quiet", "--detach", str(root), "HEAD")
    (root / "params.yaml").write_text("half written")
    with opened(overrides=["train.epochs=6"]):
        assert trained_by()["epochs"] == 6
        Path("done.txt").write_text("first stages")
        git("add", "done.txt")
        git("commit", "-q", "-m", "what was done")
    toy.change(project, "train", seed=3)
    toy.commit(project, "meanwhile")
    with opened(overrides=["train.epochs=6"]):
        assert (trained_by()["seed"], trained_by()["epochs"]) == (7407, 6)
        assert Path("done.txt").read_text() == "first stages"


def written(project: Path, **files: str) -> None:
    """Write `.dvc` files and commit them to main: a word stands for their content."""
    for name, word in files.items():
        (project / f"{name}.dvc").write_text(f"outs:\n- path: {name}\n  desc: {word}\n")
    toy.commit(project, f"data {files}")


def found_by_watch(project: Path, **files: str) -> None:
    """Commit on top of main's, on a branch of its own, as watch does."""
    head = git("rev-parse", "HEAD")
    written(project, **files)
    git("update-ref", f"refs/heads/{DATA}", "HEAD")
    git("reset", "--quiet", "--hard", head)


def word_of(name: str) -> str:
    return yaml.safe_load(Path(f"{name}.dvc").read_text())["outs"][0]["desc"]


def test_data_that_watch_found_are_taken_up_where_asked_and_what_a_person_changed_meanwhile_wins(project):
    written(project, a="old", b="old", c="old", e="old")
    found_by_watch(project, a="new", b="new", c="new", e="new")
    written(project, b="by hand", c="new", d="another")
    git("rm", "-q", "e.dvc")
    toy.commit(project, "without e")
    with opened("plain", "HEAD") as plain:
        assert (word_of("a"), plain.data) == ("old", ())
    with opened("with", "HEAD", data=True) as work:
        assert [word_of(name) for name in "abcd"] == ["new", "by hand", "new", "another"]
        assert not Path("e.dvc").exists(), "main gave it up"
        older = f"as committed by hand; what {DATA} has of it is older and left out"
        taken = f"as on {DATA}, {git('rev-parse', '--short', DATA)}"
        assert work.data == (f"a.dvc: {taken}", f"b.dvc: {older}", f"e.dvc: {older}")
        assert git("log", "-1", "--format=%s") == f"Data of {DATA}: a.dvc"
        assert git("status", "--porcelain") == ""
        assert work.tree == git("rev-parse", "HEAD^{tree}") != plain.tree
    assert work.commit == git("rev-parse", "HEAD")
    assert word_of("a") == "old", "the checkout's"
    found_by_watch(project, a="newer")
    with opened("with", "HEAD", data=True):
        assert word_of("a") == "new", "one that is tried again keeps the data that it began with"
    written(project, a="newer")
    with opened("after", "HEAD", data=True) as work:
        assert (work.data, git("rev-parse", "HEAD")) == ((), work.commit), "main has them already"


@pytest.mark.fault("22")
def test_of_two_that_want_a_lock_one_waits_for_the_other_however_that_ends(tmp_path):
    logged: list[str] = []

    def work(name: str) -> None:
        with lock(tmp_path / name, tell=lambda: logged.append("waits")):
            logged.append("works")

    def beside(name: str) -> threading.Thread:
        thread = threading.Thread(target=work, args=(name,))
        thread.start()
        thread.join(0.3)
        return thread

    with suppress(BlockingIOError), lock(tmp_path / "same", tell=lambda: pytest.fail("it waits")):
        beside("another")
        assert logged.pop() == "works"
        second = beside("same")
        assert logged == ["waits"]
        with pytest.raises(BlockingIOError), lock(tmp_path / "same", wait=False):
            pytest.fail("two hold it")
        raise BlockingIOError("another training of this run is alive")
    second.join()
    assert logged == ["waits", "works"]


# A run that goes on from the champion

MINE = Path("data/01_raw/mine")
CHECKPOINT = Path("data/05_model/checkpoint")


@pytest.fixture(scope="session")
def trained_on_mine(trained_once: Path, made_once: MadeOnce) -> Path:
    """The toy with a dataset of its own, trained."""

    def make(root: Path) -> None:
        shutil.copytree(trained_once, root, symlinks=True)
        toy.write_dataset(root / MINE, toy.SPLITS)
        datasets = yaml.safe_load((root / "params.yaml").read_text())["ingest"]["datasets"]
        toy.change(root, "ingest", datasets=datasets | {"mine": {"reader": "pairs", "root": str(MINE)}})
        toy.change(root, "convert", sources={"minichange": {"weight": 0.5, "samples": "one"}})
        toy.run(root, "dvc", "config", "cache.type", "hardlink")
        toy.run(root, "dvc", "add", "-q", str(MINE))
        toy.commit(root, "mine")
        toy.run(root, "dvc", "repro", "-q", "train")
        toy.commit(root, "trained")

    return made_once("trained-on-mine", make)


@pytest.fixture
def trained(trained_on_mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, current directory; its checkpoint is champion."""
    root = tmp_path / "toy"
    toy.run(tmp_path, "cp", "-a", str(trained_on_mine), str(root))  # hard links stay such
    monkeypatch.chdir(root)
    md5 = {out["path"]: out["md5"] for out in (dvc.locked() or {})["train"]["outs"]}[str(CHECKPOINT)]
    tags = {"git.commit": git("rev-parse", "HEAD"), "dvc.checkpoint": md5}
    champion = SimpleNamespace(name="m3diff", version="3", tags=tags)
    monkeypatch.setattr(place, "find_alias", lambda *asked: champion)
    return root


def change_mine(root: Path) -> None:
    toy.write_dataset(root / MINE, toy.SPLITS, seed=1)
    toy.run(root, "dvc", "add", "-q", str(MINE))
    toy.commit(root, "mine grew")


def others() -> list[str]:
    return [name for name in load_params(Path("params.yaml")).ingest.datasets if name != "mine"]


@pytest.mark.slow(45)
def test_a_run_begins_with_the_champion_trains_what_changed_whole_and_a_share_of_the_rest(trained, monkeypatch):
    champion = sha256_of_folder(CHECKPOINT)
    change_mine(trained)
    toy.run(trained, "dvc", "gc", "-q", "-f", "--workspace", "--all-commits")
    with workspace("one", "HEAD", ["train.epochs=6"], replay=0.25) as work:
        began, params = git("rev-parse", "HEAD"), load_params(Path("params.yaml"))
        assert (params.train.base, params.train.epochs) == (BASE, 6)
        weights = {name: params.convert.sources[name].weight for name in others()}
        assert weights == dict.fromkeys(others(), 0.25) | {"minichange": 0.125}
        assert params.convert.sources["minichange"].samples == "one", "what else is set stays"
        assert "mine" not in params.convert.sources
        assert sha256_of_folder(BASE) == champion
        assert git("status", "--porcelain") == ""
        assert git("show", "--name-only", "--format=", "HEAD").split() == [f"{BASE}.dvc", "params.yaml"]
        assert work.overrides == ("train.epochs=6", "begin with the champion, replay 0.25")
        (said,) = work.data
        assert said.startswith("begins with m3diff version 3; mine changed since and trains whole; of minichange")
        assert said.endswith("a share of 0.25 trains again")
        dvc.link_data()
        for stage in ("synthesize@minichange", "convert", "train"):
            dvc.repro(stage, print)
        assert yaml.safe_load((CHECKPOINT / "manifest.json").read_text())["base_sha256"] == champion
    monkeypatch.setattr(place, "find_alias", lambda *asked: pytest.fail("a run that is tried again asks for nobody"))
    with workspace("one", "HEAD", ["train.epochs=6"], replay=0.25) as work:
        assert (git("rev-parse", "HEAD"), sha256_of_folder(BASE)) == (began, champion)
        assert work.overrides[1:], "unlike those of plain runs"


def test_where_no_data_changed_there_is_nothing_to_go_on_with_and_without_a_champion_the_base(trained, monkeypatch):
    toy.change(trained, "train", epochs=9)
    toy.commit(trained, "other parameters")
    with pytest.raises(NothingNewError, match="since m3diff version 3, the champion"), opened(ref="HEAD", replay=0.25):
        pytest.fail("it began")
    assert (has_branch("runs/one"), Path(f"{BASE}.dvc").exists()) == (False, False)
    monkeypatch.setattr(place, "find_alias", lambda *asked: None)
    with workspace("one", "HEAD", [], replay=0.25) as work:
        assert load_params(Path("params.yaml")).train.base == Path("data/00_base")
        assert "no champion" in work.data[0]


def test_other_raw_data_or_parameters_of_data_are_a_change_and_code_and_other_sections_are_none(trained):
    commit, names, lock = git("rev-parse", "HEAD"), ["mine", *others()], Path("dvc.lock").read_bytes()
    stage = trained / "components/stages/ingest/stage.py"
    stage.write_text(stage.read_text() + "\n# a comment\n")
    toy.change(trained, "train", epochs=9)
    shutil.rmtree("data/01_raw")
    toy.run(trained, "git", "checkout", "-q", "data/01_raw")
    assert changed_datasets(commit, names) == set()
    assert changed_datasets(commit, [*names, "new"]) == {"new"}
    synthesized = yaml.safe_load(Path("params.yaml").read_text())["synthesize"]
    toy.change(trained, "synthesize", minichange=synthesized["minichange"] | {"seed": 5})
    assert changed_datasets(commit, names) == {"minichange"}
    toy.write_dataset(trained / MINE, toy.SPLITS, seed=1)
    toy.run(trained, "dvc", "add", "-q", str(MINE))
    shutil.rmtree(MINE)
    assert changed_datasets(commit, names) == {"minichange", "mine"}
    assert Path("dvc.lock").read_bytes() == lock


@pytest.mark.slow
def test_a_share_that_is_none_and_a_champion_that_cannot_be_found_again_are_told(trained):
    change_mine(trained)
    champion = place.find_alias()
    for replay, commit, told in (
        (1.5, None, "replay: expected a share from 0 to 1, found 1.5"),
        (-0.1, None, "replay: expected a share from 0 to 1, found -0.1"),
        (0.25, {"git.commit": "0" * 40}, "commit 000.*not in this clone"),
        (0.25, {}, "commit unknown: not in this clone"),
    ):
        champion.tags = champion.tags if commit is None else commit
        with pytest.raises((ParamsError, DataError), match=told):
            from_champion(replay)
        assert not Path(f"{BASE}.dvc").exists()


@pytest.mark.slow(20)
def test_a_checkpoint_that_the_cache_lost_comes_from_the_remote_else_the_run_is_refused(trained):
    content, md5 = sha256_of_folder(CHECKPOINT), place.find_alias().tags["dvc.checkpoint"]
    change_mine(trained)
    list_of_files = trained / ".dvc/cache/files/md5" / md5[:2] / md5[2:]
    kept = list_of_files.read_bytes()
    list_of_files.unlink()
    with pytest.raises(dvc.DvcError, match=f"dvc pull {BASE}.dvc"), opened(ref="HEAD", replay=0.25):
        pytest.fail("it began")
    assert not has_branch("runs/one")
    list_of_files.write_bytes(kept)
    toy.run(trained, "dvc", "remote", "add", "-q", "--default", "shelf", str(trained.parent / "shelf"))
    toy.commit(trained, "a remote")
    toy.run(trained, "dvc", "push", "-q", "--all-commits")
    list_of_files.unlink()
    with workspace("one", "HEAD", [], replay=0.25):
        assert sha256_of_folder(BASE) == content


class Looks:
    """Looks of the watcher, at a time of our own; what was started, and what it logged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self.logged, self.fails, self.later, now = [], [], False, 61.0, time.time
        logger = SimpleNamespace(info=self.logged.append, warning=self.logged.append)
        monkeypatch.setattr(watch, "get_run_logger", lambda: logger)
        monkeypatch.setattr(watch, "start", self.start)
        monkeypatch.setattr(watch, "require_own_code", lambda: None)  # the toy project has code of its own
        monkeypatch.setattr(watch.time, "time", lambda: now() + self.later)

    def start(self, reason: str, commit: str) -> None:
        assert commit == git("rev-parse", DATA)
        if self.fails:
            raise RuntimeError("killed")
        self.started.append(reason)

    def __call__(self) -> Any:
        return watch.watch.fn()


@pytest.fixture
def imported(project: Path, tmp_path: Path) -> Path:
    """A folder elsewhere that the project imports as data/theirs."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a.csv").write_text("1")
    toy.run(project, "dvc", "import-url", "-q", str(tmp_path / "source"), "data/theirs")
    toy.commit(project, "theirs")
    return tmp_path / "source"


@pytest.fixture
def look(project: Path, monkeypatch: pytest.MonkeyPatch) -> Looks:
    monkeypatch.setenv("M3DIFF_DROP", "")
    return Looks(monkeypatch)


@pytest.fixture
def drop(look: Looks, project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A drop folder with one file, which DVC tracks, and main says so."""
    monkeypatch.setenv("M3DIFF_DROP", "data/mine")
    (project / "data/mine").mkdir()
    (project / "data/mine/a.csv").write_text("1")
    toy.run(project, "dvc", "add", "-q", "data/mine")
    toy.commit(project, "mine")
    return project / "data/mine"


def nothing_left(project: Path) -> bool:
    trees = git("worktree", "list").splitlines()
    branches = git("for-each-ref", "--format=%(refname:short)", "refs/heads/runs/").split()
    return len(trees) == 1 and set(branches) <= {DATA}


@pytest.mark.slow(20)
@pytest.mark.fault("S6")
def test_a_new_file_in_a_drop_folder_starts_retrain_once_with_a_reason_and_touches_nothing(project, look, drop):
    assert look().name == "Skipped"
    (drop / "b.csv").write_text("2")

    def theirs() -> list[object]:  # all that a write, a link or a new file would change
        found = [(path, path.stat()) for path in [*drop.rglob("*"), project / "data/mine.dvc"]]
        files = [(path, one.st_ino, one.st_nlink, one.st_size, one.st_mtime_ns) for path, one in found]
        return [files, git("status", "--porcelain"), git("rev-parse", "HEAD")]

    before = theirs()
    state = look()
    assert state.is_completed()
    assert look.started == ["data/mine changed"]
    assert state.message == "retrain, because data/mine changed"
    assert git("rev-parse", f"{DATA}^") == git("rev-parse", "HEAD")
    assert git("diff", "--name-only", f"{DATA}^", DATA) == "data/mine.dvc"
    assert theirs() == before
    assert nothing_left(project)
    assert look().name == "Skipped"
    assert len(look.started) == 1
    with workspace("a-run", "HEAD", [], data=True):
        dvc.link_data()
        assert sorted(path.name for path in Path("data/mine").iterdir()) == ["a.csv", "b.csv"]
        with dvc.repository() as repo:
            assert repo.status(["data/mine.dvc"]) == {}


def test_where_nothing_changed_or_is_whole_a_look_costs_no_worktree(project, look, drop, monkeypatch):
    def looks(*said: str, worktree: bool = False) -> None:
        with monkeypatch.context() as there:
            if not worktree:
                there.setattr(watch, "workspace", lambda *words, **named: pytest.fail("a worktree for nothing"))
            state = look()
        assert (state.name, state.message) == ("Skipped", "no source changed")
        assert look.logged == [*said]
        look.logged.clear()

    (drop / "b.csv").write_text("half")
    look.later = 1
    looks("data/mine is not there, or is being written to; the next look takes it up")
    drop.rename(project / "away")
    looks("data/mine is not there, or is being written to; the next look takes it up")
    (project / "away").rename(drop)
    (drop / "b.csv").unlink()
    look.later = 61
    looks(worktree=True)
    looks()
    assert not has_branch(DATA)
    assert look.started == []


@pytest.mark.slow(40)
def test_each_content_starts_retrain_once_whatever_happens_between(project, look, drop):
    (drop / "b.csv").write_text("2")
    look.fails = True
    with pytest.raises(RuntimeError):
        look()
    look.fails = False
    for count, change in enumerate((lambda: None, lambda: (drop / "a.csv").write_text("x"), (drop / "b.csv").unlink)):
        change()
        look()
        look()
        assert look.started == ["data/mine changed"] * (count + 1)
    assert git("rev-list", "--count", f"HEAD..{DATA}") == "1"
    git("branch", "-D", DATA)
    time.sleep(1)  # a commit of the same second would be the same
    look()
    assert len(look.started) == 4, "a branch that a person removed is made anew"
    git("branch", "-D", DATA)
    toy.run(project, "dvc", "add", "-q", "data/mine")
    toy.commit(project, "by hand")
    assert look().name == "Skipped"
    assert not has_branch(DATA)


@pytest.mark.slow(20)
def test_a_file_that_comes_while_others_are_copied_waits_with_them(project, look, drop, monkeypatch):
    copied = shutil.copytree

    def busy(source: Path, *to: str) -> None:
        copied(source, *to)
        (drop / "c.csv").write_text("3")

    (drop / "b.csv").write_text("2")
    with monkeypatch.context() as there:
        there.setattr(shutil, "copytree", busy)
        assert look().name == "Skipped"
    assert not has_branch(DATA)
    look()
    assert look.started == ["data/mine changed"]


@pytest.mark.slow(30)
def test_an_imported_source_starts_retrain_and_one_that_is_gone_fails_the_look(project, look, drop, imported):
    assert look().name == "Skipped"
    assert not has_branch(DATA)
    (imported / "b.csv").write_text("2")
    look()
    assert look.started == ["data/theirs changed"]
    assert git("diff", "--name-only", "HEAD", DATA) == "data/theirs.dvc"
    assert look().name == "Skipped"
    imported.rename(imported.with_name("elsewhere"))
    (drop / "b.csv").write_text("2")
    with pytest.raises(DataError, match=r"(?s)data/theirs.dvc: dvc update.*does not exist"):
        look()
    assert look.started[1:] == ["data/mine changed"]
    assert git("status", "--porcelain") == ""
    assert nothing_left(project)
    assert json.loads(STATE.read_text())["started"] == git("rev-parse", DATA)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine" / "images").mkdir(parents=True)
    for name in ("a.csv", "images/0.png"):
        (tmp_path / "mine" / name).write_text(name)
    return tmp_path / "mine"


def test_the_content_is_settled_once_nothing_changed_for_a_minute_whatever_times_files_have(folder, monkeypatch):
    for times in (None, (1, 1), (4e9, 4e9)):  # now, a copy with its old time, to come
        os.utime(folder / "a.csv", times)
        now = time.time()
        for later, settled in ((0, False), (59, False), (61, True), (-3600, True)):
            with monkeypatch.context() as there:
                there.setattr(watch.time, "time", lambda: now + later)  # noqa: B023
                assert bool(content(folder)) == settled
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: [folder / "gone"])
    assert not content(folder), "a file went away while it was read"


def test_any_change_of_its_files_changes_the_fingerprint(folder, monkeypatch):
    monkeypatch.setattr(watch, "SETTLED_S", -1)

    def replace() -> None:  # by one of equal size and time
        found = (folder / "b.csv").stat()
        (folder / "c").write_text("A.csv")
        os.utime(folder / "c", ns=(found.st_atime_ns, found.st_mtime_ns))
        (folder / "c").rename(folder / "b.csv")

    seen = [content(folder)]
    rename, remove = partial((folder / "a.csv").rename, folder / "b.csv"), (folder / "images/0.png").unlink
    for change in (rename, replace, partial((folder / "b.csv").write_text, "other"), remove, (folder / "new").touch):
        assert content(folder) == seen[-1]
        change()
        seen.append(content(folder))
    assert len(set(seen)) == len(seen)


def test_drop_folders_are_named_and_tracked_and_imports_have_a_source(project, drop, imported, monkeypatch):
    assert imports() == ["data/theirs.dvc"]
    for text, found in (("", set()), (f" data/mine/ ,{os.pathsep}./data/mine", {"data/mine"})):
        monkeypatch.setenv("M3DIFF_DROP", text)
        assert set(drop_folders()) == found
    monkeypatch.setenv("M3DIFF_DROP", "data/mine,data/other")
    with pytest.raises(ParamsError, match=r"M3DIFF_DROP: data/other is tracked by no .dvc file.*`dvc add data/other`"):
        drop_folders()
