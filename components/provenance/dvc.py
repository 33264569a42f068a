"""DVC's files as m3diff reads them: `dvc.lock`, hashes, the cache, the data of a commit. DVC itself runs outside.

DVC hashes what a stage depends on when the command is over. What was edited meanwhile would be recorded as what ran,
and be restored for ever from the run cache. So a stage's parameters and code are read before its work and compared
after it; a stage that fails is recorded nowhere. Nor is the code of one project run for another.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from m3diff.provenance.code import FOLDER, current, edited
from m3diff.provenance.git import AS_COMMITTED, git, read, require_own_repository
from m3diff.records.errors import DataError, redacted
from m3diff.records.files import sha256
from m3diff.settings.section import ParamsError

PARAMS, GRAPH, LOCK = Path("params.yaml"), Path("dvc.yaml"), Path("dvc.lock")
ENTRY = Path("components/__main__.py")
# Folders of code and of files beside the parameters; data may be large, and is hashed by DVC alone
OURS = ("components", "profiles")

REFERENCE = re.compile(r"\$\{([^}]+)\}")
DVC = [sys.executable, "-m", "dvc"]
PATHS = (  # settings of a remote in which DVC reads a relative path from the folder of the file that has it
    *("url", "credentialpath", "configpath", "keyfile", "cert_path", "key_path"),
    *("gdrive_user_credentials_file", "gdrive_service_account_json_file_path"),
)


class Lock:
    """`dvc.lock`, read: what each stage saw and wrote when it last ran."""

    def __init__(self, path: Path = LOCK, text: bytes | None = None) -> None:
        """Read the file, or its content where it is another commit's."""
        if text is None and not path.is_file():
            raise DataError(f"{path}: no such file, so nothing was trained yet; run `dvc repro` first")
        text = path.read_bytes() if text is None else text
        try:
            self.stages: dict[str, Any] = yaml.safe_load(text)["stages"]
        except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError) as error:
            raise DataError(f"{path}: not DVC's lock file ({error!r}); restore it: git checkout -- {path}") from error
        self.sha256 = hashlib.sha256(text).hexdigest()

    def hashes(self, path: Path) -> dict[str, str]:
        """Each stage's record of this path: `{"train outs": md5, "predict deps": md5}`."""
        return {where: md5 for where, found, md5 in self._entries() if found == path}

    def recorded(self, path: Path, where: str) -> str:
        """A stage's record of this path (`ingest@minichange deps`), whatever is there now.

        Raises:
            DataError: it recorded nothing of it.
        """
        if (md5 := self.hashes(path).get(where)) is None:
            raise DataError(f"{path}: not in {LOCK} ({where}); run `dvc repro` first")
        return md5

    def current(self, path: Path) -> str:
        """DVC's hash of a path whose every recorded part, itself included, is on disk as the stages recorded it.

        Raises:
            DataError: no stage recorded any of it, or a stage recorded something else than what is there.
        """
        recorded = [entry for entry in self._entries() if entry[1].is_relative_to(path)]
        if not recorded or not path.exists():
            raise DataError(f"{path}: not {'on disk' if recorded else f'in {LOCK}'}; run `dvc repro` first")
        on_disk = {part: dvc_hash(part) for part in {path, *(part for _, part, _ in recorded)}}
        for where, part, md5 in recorded:
            if md5 != on_disk[part]:
                raise DataError(
                    f"{part}: {LOCK} has {md5} ({where}), on disk is {on_disk[part]}; run `dvc repro` first; "
                    f"where that calls it up to date, bytes of {part} were damaged: remove it and its copy in DVC's "
                    "cache, then `dvc pull` or `dvc repro`"
                )
        return on_disk[path]

    def params(self, datasets: Collection[str]) -> dict[str, Any]:
        """The parameters that the stages ran with, by section; of stages for one dataset, those of these datasets.

        DVC keeps the entry of a dataset that was taken out of `params.yaml`; only its name identifies it.
        """
        found: dict[str, Any] = {}
        for stage in self.stages:
            if "@" not in stage or stage.partition("@")[2] in datasets:
                found |= self.ran_with(stage)
        return found

    def ran_with(self, stage: str) -> dict[str, Any]:
        """The parameters that a stage ran with, by section; empty where it has none or never ran."""
        return self.stages.get(stage, {}).get("params", {}).get("params.yaml", {})

    def output(self, stage: str, name: str) -> Path:
        """The path of a stage's output, by its last name; that name where the stage wrote no such output."""
        outs = (Path(out["path"]) for out in self.stages.get(stage, {}).get("outs", []))
        return next((path for path in outs if path.name == name), Path(name))

    def _entries(self) -> Iterator[tuple[str, Path, str]]:
        for stage, entries in self.stages.items():
            for kind in ("deps", "outs"):
                for entry in entries.get(kind, []):
                    yield f"{stage} {kind}", Path(entry["path"]), entry["md5"]


def md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def dvc_hash(path: Path) -> str:
    """DVC's hash of a file, or of a folder: the md5 of its sorted list of files and their md5, as JSON."""
    if path.is_file():
        return md5(path)
    files = [file for file in path.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    return _hash_of_list({file.relative_to(path).as_posix(): md5(file) for file in files})


def _hash_of_list(files: Mapping[str, str]) -> str:
    listed = [{"md5": files[name], "relpath": name} for name in sorted(files)]
    return hashlib.md5(json.dumps(listed, sort_keys=True).encode()).hexdigest() + ".dir"


def object_file(cache: Path, hash_: str) -> Path:
    return cache / "files" / "md5" / hash_[:2] / hash_[2:]


def listing(cache: Path, hash_: str) -> dict[str, str]:
    """The files of a folder with their md5, as the cache lists them; empty where it has no list, or for a file."""
    file = object_file(cache, hash_)
    if not hash_.endswith(".dir") or not file.is_file():
        return {}
    return {entry["relpath"]: entry["md5"] for entry in json.loads(file.read_bytes())}


def whole(file: Path, hash_: str) -> str:
    """The fault of an object in the cache; empty where its content is that of its hash."""
    found = md5(file)
    if found == hash_.removesuffix(".dir"):
        return ""
    return f"damaged in the cache: {file} has md5 {found}; remove it and run `dvc pull` or `dvc repro`"


def read_lock(commit: str) -> Lock:
    text = read(commit, LOCK)
    if text is None:
        raise DataError(f"commit {commit:.12}: has no {LOCK}, so nothing says what was trained")
    return Lock(LOCK, text)


def hash_in_git(commit: str, path: Path) -> str | None:
    """DVC's hash of a file or folder that the commit itself holds; None where it holds none."""
    names = map(Path, git("ls-tree", "-r", "--name-only", commit, "--", path.as_posix()).splitlines())
    found = {name: hashlib.md5(read(commit, name) or b"").hexdigest() for name in names}
    if path in found or not found:
        return found.get(path)
    return _hash_of_list({name.relative_to(path).as_posix(): md5 for name, md5 in found.items()})


def tracked(commit: str, lock: Lock) -> dict[Path, str]:
    """DVC's hash of everything that the commit's stages and `.dvc` files write, by path."""
    stages = current_stages(commit, lock)
    found = {Path(out["path"]): out["md5"] for stage in stages for out in lock.stages[stage].get("outs", [])}
    for name in git("ls-tree", "-r", "--name-only", commit).splitlines():
        if name.endswith(".dvc"):
            found |= {Path(name).parent / out["path"]: out["md5"] for out in _read_yaml(commit, name)["outs"]}
    return dict(sorted(found.items()))


def current_stages(commit: str, lock: Lock) -> list[str]:
    """The stages of the commit's dvc.yaml that ran; dvc.lock keeps those of datasets that were taken out."""
    graph, values = _read_yaml(commit, "dvc.yaml")["stages"], _read_yaml(commit, "params.yaml")
    parts = {stage: stage.partition("@") for stage in lock.stages}
    loops = {name: (graph.get(name, {}).get("foreach") or "").strip("${}") for name, _, _ in parts.values()}
    return [
        stage
        for stage, (name, at, key) in parts.items()
        if name in graph and (not at or key in (lookup(values, loops[name]) or {}))
    ]


def _read_yaml(commit: str, path: str) -> Any:
    text = read(commit, Path(path))
    if text is None:
        raise DataError(f"commit {commit:.12}: has no {path}")
    return yaml.safe_load(text)


def lookup(values: Any, path: str) -> Any:
    """The value at a path of dots (`train.base`); None where there is none."""
    for part in path.split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values


def call(folder: Path, *arguments: str) -> str:
    """Output of a DVC command, run in a folder.

    Raises:
        DataError: it failed; with its last lines.
    """
    done = subprocess.run([*DVC, *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split("\n")[-4:]).strip()
        raise DataError(redacted(f"dvc {' '.join(arguments)} in {folder}: {said or f'exit code {done.returncode}'}"))
    return done.stdout


def cache_folder() -> Path:
    return Path(call(Path(), "cache", "dir").strip()).resolve()


def add_worktree(commit: str, folder: Path) -> None:
    """Make a working tree of the commit, with this clone's cache and remotes. No hook runs: DVC's would check out."""
    require_own_repository()
    cache = cache_folder()
    git(*AS_COMMITTED, "worktree", "add", "--quiet", "--force", "--detach", str(folder), commit)
    write_settings(folder, Path.cwd(), cache={"dir": str(cache)})


def write_settings(tree: Path, checkout: Path, **sections: Mapping[str, str]) -> None:
    """Write `.dvc/config.local` of a working tree: the checkout's own, then `sections`.

    A relative path, there or in the tree's `.dvc/config`, means what DVC takes it for in the checkout.
    """
    from configobj import ConfigObj  # DVC's; one in the extra `flow` alone

    settings = ConfigObj(encoding="utf-8", interpolation=False)  # DVC itself writes ASCII alone
    committed = ConfigObj(str(tree / ".dvc" / "config"), encoding="utf-8", interpolation=False)
    local = ConfigObj(str(checkout / ".dvc" / "config.local"), encoding="utf-8", interpolation=False)
    found = [*_absolute(committed, checkout), *local.items(), *_absolute(local, checkout), *sections.items()]
    for section, values in found:
        settings.setdefault(section, {}).update(values)
    settings.filename = str(tree / ".dvc" / "config.local")
    settings.write()


def _absolute(settings: Mapping[str, Mapping[str, str]], checkout: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """(section, settings) of the remotes' relative paths, as absolute ones: DVC reads them from `.dvc`, and libraries
    read a certificate's from the current directory."""
    for section in [name for name in settings if name.strip("'").startswith("remote ")]:
        found = {}
        for name, value in settings[section].items():
            base = checkout if name == "ssl_verify" else checkout / ".dvc"
            path = os.path.abspath(base / value) if isinstance(value, str) else ""
            if name in PATHS and not re.match(r"\w+://|~", value) or name == "ssl_verify" and os.path.isfile(path):
                found[name] = path
        yield section, found


# A stage records what ran


def require_own_code() -> None:
    """See that the code which runs is that of the current directory's project, where that has code of its own, else
    that of the checkout which the virtual environment lies in. An installed wheel is the code of any other folder.

    Raises:
        DataError: it is another's, as in a checkout that was copied with its .venv.
    """
    code, here = Path(__file__).resolve().parents[2], Path.cwd()
    project = next((at for at in (here, *here.parents) if (at / PARAMS).is_file() or (at / GRAPH).is_file()), here)
    for folder in (project, Path(sys.prefix).resolve().parent):
        if (folder / ENTRY).is_file():
            if not code.samefile(folder):
                raise DataError(
                    f"the code of {code} would run for {folder}, which has its own; run `make install` in {folder}, "
                    "then bin/m3diff there"
                )
            return


@contextmanager
def unchanged() -> Iterator[None]:
    """Within the work of a stage that DVC started, and of no other command.

    Raises:
        ParamsError: what the stage watches is another after it than before.
    """
    stage = os.environ.get("DVC_STAGE")
    if stage is None:
        yield
        return
    if stale := [] if stage == "code" else edited(stage):
        raise ParamsError(f"{stage}: {FOLDER}/{stage}.json is of other code ({stale[0]}); run `dvc repro code` first")
    before = watched(stage)
    yield
    after = watched(stage)
    names = [name for name in before | after if before.get(name) != after.get(name)]
    if names:
        changed = [f"{name} {before.get(name, 'absent')} -> {after.get(name, 'absent')}" for name in names]
        raise ParamsError(
            f"{stage}: edited while it ran: {'; '.join(changed)}. What ran is not what DVC would record, so nothing is "
            "recorded. Put the edit back and run `dvc repro` again: a training goes on from its last checkpoint. Or "
            "let it stand: the stage then runs with it"
        )


def watched(stage: str) -> dict[str, str]:
    """The parameters (as JSON) and the code (hashes) of the stage `train` or `ingest@minichange`, as dvc.yaml names
    them, by path."""
    name, _, key = stage.partition("@")
    graph = yaml.safe_load(GRAPH.read_text(encoding="utf-8"))["stages"]
    values = yaml.safe_load(PARAMS.read_text(encoding="utf-8"))
    entry = graph[name].get("do", graph[name])

    def filled(kind: str) -> list[str]:
        texts = [text for text in entry[kind] if "item." not in text]
        return [REFERENCE.sub(lambda match: str(lookup(values | {"key": key}, match[1])), text) for text in texts]

    found = {
        leaf: json.dumps(value, default=str)
        for path in filled("params")
        for leaf, value in leaves(path, lookup(values, path))
    }
    ours = [Path(path) for path in filled("deps") if Path(path).parts[0] in OURS]
    below = [file for path in ours for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    found |= {str(file): sha256(file)[:12] for file in below if file.is_file() and "__pycache__" not in file.parts}
    return found | ({} if stage == "code" else {file: meaning[:12] for file, meaning in current(stage).items()})


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(f"{path}.{key}", inner)
    else:
        yield path, value
