"""Where the content of what a commit tracks is kept: in DVC's cache, in git, or in the remote."""

import json
import tempfile
from pathlib import Path

from m3diff.records.errors import DataError
from m3diff.registry.check import Check, Outcome
from m3diff.registry.commit import add_worktree, cache_folder, dvc, hash_in_git, tracked
from m3diff.registry.lineage import Lock, dvc_hash, git, md5


class Objects:
    """The content of one commit's data, by path and hash; the remote is asked for what the cache does not have."""

    def __init__(self, commit: str, lock: Lock) -> None:
        self.commit, self.cache = commit, cache_folder()
        self.tracked = tracked(commit, lock)
        self.absent: dict[Path, str] | None = None  # what the cache or the remote lacks, in DVC's words

    def check(self, what: str, path: Path, hash_: str, read: bool = True) -> Check:
        """Whether this content can be had. `read`: hash what the cache holds again, not only look for it."""
        outcome, note = in_cache(self.cache, hash_, read)
        if outcome == "missing" and self.below(path):
            return self.parts(what, path, hash_, read)
        if outcome == "missing" and hash_in_git(self.commit, path) == hash_:
            outcome, note = "ok", "in git"
        elif outcome == "missing" and path in self.tracked and self.in_remote(path):
            outcome, note = "ok", "in the remote"
        elif outcome == "missing" and path.exists() and path not in self.tracked and dvc_hash(path) == hash_:
            note = "on this disk alone; `dvc add` it, and commit its .dvc file, so that it can be brought back"
        return Check(what=what, where=str(path), hash=hash_, outcome=outcome, note=note)

    def below(self, path: Path) -> list[Path]:
        """What is tracked inside a folder that as a whole is not."""
        return [other for other in self.tracked if other.is_relative_to(path) and other != path]

    def parts(self, what: str, path: Path, hash_: str, read: bool) -> Check:
        """A folder whose parts are tracked one by one."""
        found = [self.check(what, part, self.tracked[part], read) for part in self.below(path)]
        bad = [part for part in found if part.outcome != "ok"]
        note = "; ".join(f"{part.where}: {part.note}" for part in bad) or f"its {len(found)} parts are kept"
        return Check(what=what, where=str(path), hash=hash_, outcome=bad[0].outcome if bad else "ok", note=note)

    def in_remote(self, path: Path) -> bool:
        if self.absent is None:
            self.absent = ask_remote(self.commit)
        states = [state for place, state in self.absent.items() if place.is_relative_to(path)]
        return bool(states) and all(state == "deleted" for state in states)  # from the cache, but not from the remote


def in_cache(cache: Path, hash_: str, read: bool) -> tuple[Outcome, str]:
    """Whether the cache has a file, or a folder's list and all its files; with `read` also whether they are intact."""
    file = object_file(cache, hash_)
    if not file.is_file():
        return "missing", "neither in the cache nor in the remote"
    if (read or hash_.endswith(".dir")) and (note := whole(file, hash_)):
        return "differs", note
    if hash_.endswith(".dir"):
        for entry in json.loads(file.read_bytes()):
            outcome, note = in_cache(cache, entry["md5"], read)
            if outcome != "ok":
                return outcome, f"{entry['relpath']}: {note}"
    return "ok", "in the cache"


def whole(file: Path, hash_: str) -> str:
    """What is wrong with an object of the cache; empty where its content is that of its hash."""
    found = md5(file)
    if found == hash_.removesuffix(".dir"):
        return ""
    return f"damaged in the cache: {file} has md5 {found}; remove it and run `dvc pull` or `dvc repro`"


def object_file(cache: Path, hash_: str) -> Path:
    return cache / "files" / "md5" / hash_[:2] / hash_[2:]


def listing(cache: Path, hash_: str) -> dict[str, str]:
    """The files of a folder with their md5, as the cache lists them; empty where it has no list, or for a file."""
    file = object_file(cache, hash_)
    if not hash_.endswith(".dir") or not file.is_file():
        return {}
    return {entry["relpath"]: entry["md5"] for entry in json.loads(file.read_bytes())}


def ask_remote(commit: str) -> dict[Path, str]:
    """What cache or remote lacks of the commit's data, by path: `deleted` (from the cache), `new` or `missing`.

    DVC takes a folder for pushed when its list is there, which it writes after the folder's files.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "tree"
        add_worktree(commit, folder)
        try:
            return {Path(path): state for path, state in json.loads(dvc(folder, "status", "--cloud", "--json")).items()}
        except DataError:
            return {}  # no remote, or none that answers
        finally:
            git("worktree", "remove", "--force", str(folder))
