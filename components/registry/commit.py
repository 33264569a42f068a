"""A commit of this repository: its files, the data and checkpoints that it tracks, and a working tree of it."""

import io
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from configobj import ConfigObj

from m3diff.records.errors import DataError, redacted
from m3diff.registry.decisions import main_tree
from m3diff.registry.lineage import LOCK, Lock, dvc_hash, git

PATHS = (
    *("url", "credentialpath", "configpath", "keyfile", "cert_path", "key_path"),
    *("gdrive_user_credentials_file", "gdrive_service_account_json_file_path"),
)
"""Settings of a remote in which DVC reads a relative path from the folder of the file that has it."""

RUNS = "runs/"  # branches of flow runs, each with its dvc.lock
AS_COMMITTED = ("-c", "core.autocrlf=false")
"""git's files byte for byte, whatever the person's settings say of line ends: another byte is another hash."""

DVC = [sys.executable, "-m", "dvc"]


def dvc(folder: Path, *arguments: str) -> str:
    """What a command of DVC printed, run in a folder.

    Raises:
        DataError: it failed; with its last lines.
    """
    done = subprocess.run([*DVC, *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split("\n")[-4:]).strip()
        raise DataError(redacted(f"dvc {' '.join(arguments)} in {folder}: {said or f'exit code {done.returncode}'}"))
    return done.stdout


def require_own_repository() -> None:
    """See that git and DVC can make working trees of this project with branches runs/*.

    Raises:
        DataError: it is a folder or a submodule of a larger repository, or a branch is in the way.
    """
    here, inside = Path.cwd(), git("rev-parse", "--show-prefix").rstrip("/")
    if inside:
        raise DataError(
            f"{here}: is the folder {inside} of a larger repository, and a run needs one of its own; at its top: `git "
            f"subtree split --prefix={shlex.quote(inside)} --branch=alone && git clone --branch=alone . FOLDER`"
        )
    if git("rev-parse", "--show-superproject-working-tree"):
        raise DataError(
            f"{here}: is a submodule, whose working trees DVC cannot read; `git clone {shlex.quote(str(here))} FOLDER` "
            "makes a repository of its own"
        )
    if git("rev-parse", "--show-object-format") != "sha1":
        raise DataError(f"{here}: DVC reads no repository of sha256; make one with `git init --object-format=sha1`")
    if resolved("refs/heads/runs"):
        raise DataError("the branch `runs` is in the way of branches runs/*; `git branch -m runs OTHER` renames it")


def find_commit(name: str) -> str:
    """The full hash of a commit or branch; where it is not here, the remotes are asked for their branches runs/*.

    Raises:
        DataError: neither this clone nor a remote has it.
    """
    remotes = git("remote").split()
    said = []
    for remote in ["", *remotes]:
        if remote:
            fetch = ["git", "fetch", "--quiet", remote, f"+refs/heads/{RUNS}*:refs/remotes/{remote}/{RUNS}*"]
            done = subprocess.run(fetch, cwd=main_tree(Path()), capture_output=True, text=True)
            said += [redacted(f"{remote}: {done.stderr.strip()}")] if done.returncode else []
        for spelled in (name, *(f"{known}/{name}" for known in remotes)):
            if commit := resolved(spelled):
                return commit
    asked = f"nor has {' or '.join(remotes)}" if remotes else "and there is no remote to ask"
    raise DataError(
        f"commit {name}: not in this clone, {asked}; fetch the branch that holds it. {'; '.join(said)}".rstrip()
    )


def resolved(name: str) -> str | None:
    command = ["git", "rev-parse", "--quiet", "--verify", "--end-of-options", f"{name}^{{commit}}"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None


def read(commit: str, path: Path) -> bytes | None:
    """A file of the commit; None where it has none."""
    done = subprocess.run(["git", "cat-file", "blob", f"{commit}:./{path.as_posix()}"], capture_output=True)
    return None if done.returncode else done.stdout


def read_lock(commit: str) -> Lock:
    text = read(commit, LOCK)
    if text is None:
        raise DataError(f"commit {commit:.12}: has no {LOCK}, so nothing says what was trained")
    return Lock(LOCK, text)


def read_yaml(commit: str, path: str) -> Any:
    text = read(commit, Path(path))
    if text is None:
        raise DataError(f"commit {commit:.12}: has no {path}")
    return yaml.safe_load(text)


def hash_in_git(commit: str, path: Path) -> str | None:
    """DVC's hash of a file or folder that the commit itself holds; None where it holds none."""
    done = subprocess.run(["git", *AS_COMMITTED, "archive", commit, "--", path.as_posix()], capture_output=True)
    if done.returncode:
        return None
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            for entry in archive.getmembers():  # Python before 3.11.4 takes no filter
                assert not {"/", ".."} & {*Path(entry.name).parts}, "git writes none"
            archive.extractall(folder)
        return dvc_hash(Path(folder) / path)


def tracked(commit: str, lock: Lock) -> dict[Path, str]:
    """DVC's hash of everything that the commit's stages and `.dvc` files write, by path."""
    stages = set(current_stages(commit, lock))
    found = {Path(out["path"]): out["md5"] for stage in stages for out in lock.stages[stage].get("outs", [])}
    for name in git("ls-tree", "-r", "--name-only", commit).splitlines():
        if name.endswith(".dvc"):
            outs = read_yaml(commit, name)["outs"]
            found |= {Path(name).parent / out["path"]: out["md5"] for out in outs}
    return dict(sorted(found.items()))


def current_stages(commit: str, lock: Lock) -> Iterator[str]:
    """The stages of the commit's dvc.yaml that ran; dvc.lock keeps those of datasets that were taken out."""
    graph, values = read_yaml(commit, "dvc.yaml")["stages"], read_yaml(commit, "params.yaml")
    for stage in lock.stages:
        name, at, key = stage.partition("@")
        loop = graph.get(name, {}).get("foreach")
        if name in graph and (not at or key in entries(values, loop)):
            yield stage


def entries(values: Any, loop: str | None) -> Any:
    """What a loop of dvc.yaml goes over: the mapping at `${ingest.datasets}`."""
    for part in (loop or "").strip("${}").split("."):
        values = values.get(part, {}) if isinstance(values, dict) else {}
    return values


def add_worktree(commit: str, folder: Path) -> None:
    """A working tree of the commit, with this clone's cache and remotes. No hook runs: DVC's own would check out."""
    require_own_repository()
    cache = cache_folder()
    hooks = ("-c", "core.hooksPath=/dev/null")
    git(*AS_COMMITTED, *hooks, "worktree", "add", "--quiet", "--force", "--detach", str(folder), commit)
    write_settings(folder, Path.cwd(), cache={"dir": str(cache)})


def write_settings(tree: Path, checkout: Path, **sections: Mapping[str, str]) -> None:
    """Write `.dvc/config.local` of a working tree: the checkout's own, then `sections`.

    A relative path, there or in the tree's `.dvc/config`, means what DVC takes it for in the checkout.
    """
    settings = ConfigObj(encoding="utf-8", interpolation=False)  # DVC itself writes ASCII alone
    committed = ConfigObj(str(tree / ".dvc" / "config"), encoding="utf-8", interpolation=False)
    local = ConfigObj(str(checkout / ".dvc" / "config.local"), encoding="utf-8", interpolation=False)
    for section, values in [*absolute(committed, checkout), *local.items(), *absolute(local, checkout)]:
        settings.setdefault(section, {}).update(values)
    for section, own in sections.items():
        settings.setdefault(section, {}).update(own)
    settings.filename = str(tree / ".dvc" / "config.local")
    settings.write()


def absolute(settings: ConfigObj, checkout: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(section, settings) of the remotes' relative paths, as absolute ones: DVC reads them from `.dvc`, and libraries
    read a certificate's from the current directory."""
    for section in [name for name in settings.sections if name.strip("'").startswith("remote ")]:
        found = {}
        for name, value in settings[section].items():
            base = checkout if name == "ssl_verify" else checkout / ".dvc"
            path = os.path.abspath(base / value) if isinstance(value, str) else ""
            if name in PATHS and not re.match(r"\w+://|~", value) or name == "ssl_verify" and os.path.isfile(path):
                found[name] = path
        yield section, found


def cache_folder() -> Path:
    return Path(dvc(Path(), "cache", "dir").strip()).resolve()
