"""Read DVC's files (`dvc.lock` and the cache), compute DVC's hashes, and check that DVC records what a stage ran.

DVC hashes the dependencies of a stage after its command has ended. If a file were edited during the run, DVC would
therefore record the edited version, and its run cache would keep restoring the wrong result. To prevent this, the
parameters and code of a stage are compared before and after the stage runs. If they differ, the stage fails, and DVC
does not record it. For the same reason, a project with code of its own never runs the code of another project.
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
from typing import Any, NamedTuple

import yaml

from m3diff.provenance.code import DIGEST_FOLDER, current_digests, edited_files
from m3diff.provenance.git import AS_COMMITTED, git, read_from_commit, require_own_repository
from m3diff.records.errors import DataError, Fault, redact
from m3diff.records.files import sha256
from m3diff.settings.section import ParamsError

PARAMS = Path("params.yaml")
DVC_YAML = Path("dvc.yaml")
DVC_LOCK = Path("dvc.lock")
ENTRY = Path("components/__main__.py")
# Folders whose files are compared before and after a stage. Data are not compared, because they may be large
WATCHED_FOLDERS = ("components", "profiles")

REFERENCE = re.compile(r"\$\{([^}]+)\}")  # a reference to a parameter in dvc.yaml, written as ${key}
DVC = [sys.executable, "-m", "dvc"]
# Settings of a DVC remote that contain a path. DVC resolves relative paths from the folder of the configuration file
REMOTE_PATHS = (
    "url",
    "credentialpath",
    "configpath",
    "keyfile",
    "cert_path",
    "key_path",
    "gdrive_user_credentials_file",
    "gdrive_service_account_json_file_path",
)


class LockEntry(NamedTuple):
    """A dependency or an output in `dvc.lock`.

    Attributes:
        stage_and_kind: the stage and the kind of entry, such as `train outs` or `ingest@minichange deps`.
        path: the path of the file or folder.
        md5: DVC's hash of the file or folder.
    """

    stage_and_kind: str
    path: Path
    md5: str


class Lock:
    """The content of `dvc.lock`: what each stage read and wrote when it last ran."""

    def __init__(self, path: Path = DVC_LOCK, text: bytes | None = None) -> None:
        """Parse the file.

        Args:
            path: the path of the file.
            text: the content of the file, for example from another commit. By default, it is read from `path`.

        Raises:
            DataError: the file does not exist, or is not a valid DVC lock file.
        """
        if text is None and not path.is_file():
            raise DataError("dvc.no_lock", path=path)
        text = path.read_bytes() if text is None else text
        try:
            self.stages: dict[str, Any] = yaml.safe_load(text)["stages"]
        except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError) as error:
            raise DataError("dvc.broken_lock", path=path, cause=repr(error)) from error
        self.sha256 = hashlib.sha256(text).hexdigest()

    def hashes(self, path: Path) -> dict[str, str]:
        """Return the recorded hashes of a path by stage and kind: `{"train outs": md5, "predict deps": md5}`."""
        return {entry.stage_and_kind: entry.md5 for entry in self._entries() if entry.path == path}

    def recorded_hash(self, path: Path, stage_and_kind: str) -> str:
        """Return the hash that a stage recorded for a path, whatever is on disk now.

        Args:
            path: the path of a dependency or output.
            stage_and_kind: the stage and the kind of entry, such as `ingest@minichange deps`.

        Raises:
            DataError: the stage has no record of the path.
        """
        recorded_md5 = self.hashes(path).get(stage_and_kind)
        if recorded_md5 is None:
            raise DataError("dvc.not_recorded", path=path, entry=stage_and_kind)
        return recorded_md5

    def verified_hash(self, path: Path) -> str:
        """Return DVC's hash of a path, and check that the files on disk match `dvc.lock`.

        If the path is a folder, every recorded path in that folder is checked too.

        Raises:
            DataError: `dvc.lock` lists neither the path nor a path in it, the path does not exist, or the files on disk
                differ from `dvc.lock`.
        """
        entries = [entry for entry in self._entries() if entry.path.is_relative_to(path)]
        if not entries or not path.exists():
            raise DataError("dvc.not_on_disk" if entries else "dvc.not_in_lock", path=path)
        paths = {path, *(entry.path for entry in entries)}
        hashes_on_disk = {part: dvc_hash(part) for part in paths}
        for entry in entries:
            if entry.md5 != hashes_on_disk[entry.path]:
                raise DataError(
                    "dvc.differs_from_lock",
                    path=entry.path,
                    value=hashes_on_disk[entry.path],
                    expected=entry.md5,
                    entry=entry.stage_and_kind,
                )
        return hashes_on_disk[path]

    def params(self, datasets: Collection[str]) -> dict[str, Any]:
        """Return the parameters that the stages ran with, by section.

        Args:
            datasets: the names of the datasets whose stages are included. `dvc.lock` may also contain stages of
                datasets that were removed from `params.yaml`.
        """
        params: dict[str, Any] = {}
        for stage in self.stages:
            if "@" not in stage or stage.partition("@")[2] in datasets:
                params |= self.stage_params(stage)
        return params

    def stage_params(self, stage: str) -> dict[str, Any]:
        """Return the parameters that a stage ran with, by section. Empty if it has no parameters or never ran."""
        return self.stages.get(stage, {}).get("params", {}).get("params.yaml", {})

    def output(self, stage: str, name: str, *older_names: str) -> Path:
        """Return the path of the stage's output that ends in `name`, or `name` itself if there is no such output.

        Args:
            stage: name of the stage.
            name: last component of the path.
            older_names: names of the same output in the `dvc.lock` of an earlier release.
        """
        outputs = (Path(entry["path"]) for entry in self.stages.get(stage, {}).get("outs", []))
        return next((path for path in outputs if path.name in (name, *older_names)), Path(name))

    def _entries(self) -> Iterator[LockEntry]:
        for stage, record in self.stages.items():
            for kind in ("deps", "outs"):
                for entry in record.get(kind, []):
                    yield LockEntry(stage_and_kind=f"{stage} {kind}", path=Path(entry["path"]), md5=entry["md5"])


def md5(path: Path) -> str:
    """Return the MD5 of a file as a hexadecimal string."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def dvc_hash(path: Path) -> str:
    """Return DVC's hash of a file or folder.

    The hash of a folder is the MD5 of a JSON list with the path and MD5 of each file, sorted by path.
    """
    if path.is_file():
        return md5(path)
    files = [file for file in path.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    return _hash_of_list({file.relative_to(path).as_posix(): md5(file) for file in files})


def _hash_of_list(md5_by_name: Mapping[str, str]) -> str:
    entries = [{"md5": md5_by_name[name], "relpath": name} for name in sorted(md5_by_name)]
    return hashlib.md5(json.dumps(entries, sort_keys=True).encode()).hexdigest() + ".dir"


def object_file(cache: Path, hash_: str) -> Path:
    """Return the path at which DVC's cache stores the file or folder list with this hash."""
    return cache / "files" / "md5" / hash_[:2] / hash_[2:]


def read_file_list(cache: Path, hash_: str) -> dict[str, str]:
    """Read a folder's file list from DVC's cache and return the MD5 of each file by relative path.

    Return an empty dict if the list is not in the cache, or if the hash belongs to a file.
    """
    file = object_file(cache, hash_)
    if not hash_.endswith(".dir") or not file.is_file():
        return {}
    return {entry["relpath"]: entry["md5"] for entry in json.loads(file.read_bytes())}


def fault_of_object(file: Path, hash_: str) -> Fault | None:
    """Check an object in DVC's cache. Return a fault if it is damaged, or None if it has the expected hash."""
    actual_md5 = md5(file)
    if actual_md5 == hash_.removesuffix(".dir"):
        return None
    return Fault("dvc.damaged_object", object=file, value=actual_md5)


def read_lock(commit: str) -> Lock:
    """Return the `dvc.lock` of a commit.

    Raises:
        DataError: the commit does not contain `dvc.lock`, or the file is not valid.
    """
    text = read_from_commit(commit, DVC_LOCK)
    if text is None:
        raise DataError("dvc.commit_without_lock", commit=commit)
    return Lock(DVC_LOCK, text)


def hash_in_git(commit: str, path: Path) -> str | None:
    """Return DVC's hash of a file or folder that git tracks in a commit, or None if the commit does not have it."""
    md5_by_file = {}
    for name in git("ls-tree", "-r", "--name-only", commit, "--", path.as_posix()).splitlines():
        file = Path(name)
        content = read_from_commit(commit, file) or b""
        md5_by_file[file] = hashlib.md5(content).hexdigest()
    if path in md5_by_file or not md5_by_file:
        return md5_by_file.get(path)
    return _hash_of_list({file.relative_to(path).as_posix(): file_md5 for file, file_md5 in md5_by_file.items()})


def tracked_outputs(commit: str, lock: Lock) -> dict[Path, str]:
    """Return DVC's hash of each path that DVC tracks in a commit: outputs of stages and data of `.dvc` files."""
    hashes = {}
    for stage in current_stages(commit, lock):
        for output in lock.stages[stage].get("outs", []):
            hashes[Path(output["path"])] = output["md5"]
    for name in git("ls-tree", "-r", "--name-only", commit).splitlines():
        if name.endswith(".dvc"):
            for output in _read_yaml(commit, name)["outs"]:
                hashes[Path(name).parent / output["path"]] = output["md5"]
    return dict(sorted(hashes.items()))


def current_stages(commit: str, lock: Lock) -> list[str]:
    """Return the stages in `dvc.lock` that the commit's dvc.yaml and params.yaml still define.

    `dvc.lock` may also contain stages that were removed, for example together with their dataset.
    """
    graph = _read_yaml(commit, "dvc.yaml")["stages"]
    params = _read_yaml(commit, "params.yaml")
    stages = []
    for stage in lock.stages:
        name, separator, dataset = stage.partition("@")
        if name not in graph:
            continue
        if separator:
            section = (graph[name].get("foreach") or "").strip("${}")
            if dataset not in (lookup(params, section) or {}):
                continue
        stages.append(stage)
    return stages


def _read_yaml(commit: str, path: str) -> Any:
    text = read_from_commit(commit, Path(path))
    if text is None:
        raise DataError("dvc.commit_without_file", commit=commit, file=path)
    return yaml.safe_load(text)


def lookup(values: Any, path: str) -> Any:
    """Return the value at a dotted path such as `train.base`, or None if the path does not exist."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def run_dvc(folder: Path, *arguments: str) -> str:
    """Run a DVC command in a folder and return its output.

    Raises:
        DataError: the command failed. The field `cause` contains the last lines of stderr.
    """
    result = subprocess.run([*DVC, *arguments], cwd=folder, capture_output=True, text=True)
    if result.returncode:
        last_lines = " ".join(result.stderr.split("\n")[-4:]).strip()
        cause = last_lines or f"exit code {result.returncode}"
        command = redact(f"dvc {' '.join(arguments)}")
        raise DataError("dvc.command_failed", command=command, folder=folder, cause=redact(cause))
    return result.stdout


def cache_folder() -> Path:
    """Return the DVC cache folder of the current directory's repository."""
    return Path(run_dvc(Path(), "cache", "dir").strip()).resolve()


def add_worktree(commit: str, folder: Path) -> None:
    """Check out a commit into a new git working tree. The tree uses the DVC cache and remotes of this clone.

    No git hooks are run, because DVC's hook would check out the data.
    """
    require_own_repository()
    cache = cache_folder()
    git(*AS_COMMITTED, "worktree", "add", "--quiet", "--force", "--detach", str(folder), commit)
    write_settings(folder, Path.cwd(), cache={"dir": str(cache)})


def write_settings(tree: Path, checkout: Path, **sections: Mapping[str, str]) -> None:
    """Write the file `.dvc/config.local` of a working tree.

    It contains the settings from the checkout's `.dvc/config.local`, and `sections`. Relative paths of remotes, there
    and in the tree's `.dvc/config`, are made absolute, so that they refer to the same files as in the checkout.

    Args:
        tree: the working tree.
        checkout: the checkout whose settings are used.
        sections: settings by section that are added, or that replace the checkout's settings.
    """
    from configobj import ConfigObj  # installed with DVC, which is part of the extra `flow`

    settings = ConfigObj(encoding="utf-8", interpolation=False)  # DVC itself writes only ASCII
    shared_settings = ConfigObj(str(tree / ".dvc" / "config"), encoding="utf-8", interpolation=False)
    local_settings = ConfigObj(str(checkout / ".dvc" / "config.local"), encoding="utf-8", interpolation=False)
    layers = [
        dict(_absolute_paths(shared_settings, checkout)),
        dict(local_settings.items()),
        dict(_absolute_paths(local_settings, checkout)),
        sections,
    ]
    for layer in layers:
        for section, values in layer.items():
            settings.setdefault(section, {}).update(values)
    settings.filename = str(tree / ".dvc" / "config.local")
    settings.write()


def _absolute_paths(settings: Mapping[str, Mapping[str, str]], checkout: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the section name of each remote with its settings that contain a path. The paths are made absolute.

    DVC resolves relative paths from `.dvc`. The path of a certificate (`ssl_verify`) is an exception, because libraries
    resolve it from the current directory.
    """
    for section in settings:
        if not section.strip("'").startswith("remote "):
            continue
        absolute_paths = {}
        for name, value in settings[section].items():
            if not isinstance(value, str):
                continue
            if name in REMOTE_PATHS and not re.match(r"\w+://|~", value):
                absolute_paths[name] = os.path.abspath(checkout / ".dvc" / value)
            elif name == "ssl_verify" and os.path.isfile(checkout / value):
                absolute_paths[name] = os.path.abspath(checkout / value)
        yield section, absolute_paths


# Checks before and after a stage, so that DVC records the code and parameters that ran


def require_own_code() -> None:
    """Check that the running code belongs to the project of the current directory.

    If the project contains no code, the code must belong to the checkout that contains the virtual environment. If
    there is no such checkout either, the code is an installed wheel, which may run for any folder.

    Raises:
        DataError: the code belongs to another checkout, for example after a checkout was copied with its .venv.
    """
    code = Path(__file__).resolve().parents[2]
    for folder in (_project_folder(), Path(sys.prefix).resolve().parent):
        if not (folder / ENTRY).is_file():
            continue
        if not code.samefile(folder):
            raise DataError("dvc.code_of_other_checkout", code=code, folder=folder)
        return


def _project_folder() -> Path:
    """Return the current folder, or its nearest parent folder, that contains params.yaml or dvc.yaml.

    If no folder contains these files, return the current folder.
    """
    current_folder = Path.cwd()
    for folder in (current_folder, *current_folder.parents):
        if (folder / PARAMS).is_file() or (folder / DVC_YAML).is_file():
            return folder
    return current_folder


@contextmanager
def require_unchanged_inputs() -> Iterator[None]:
    """Check that the parameters and code of a stage do not change while it runs.

    The check is skipped if the process was not started by DVC.

    Raises:
        ParamsError: the recorded code digests are out of date, or parameters or code changed while the stage ran.
    """
    stage = os.environ.get("DVC_STAGE")
    if stage is None:
        yield
        return
    stale_files = [] if stage == "code" else edited_files(stage)
    if stale_files:
        raise ParamsError("dvc.stale_digests", path=DIGEST_FOLDER / f"{stage}.json", file=stale_files[0])
    inputs_before = watched_inputs(stage)
    yield
    inputs_after = watched_inputs(stage)
    changes = []
    for name in inputs_before | inputs_after:
        old = inputs_before.get(name, "absent")
        new = inputs_after.get(name, "absent")
        if old != new:
            changes.append(f"{name} {old} -> {new}")
    if changes:
        raise ParamsError("dvc.edited_while_stage_ran", stage=stage, changes=changes)


def watched_inputs(stage: str) -> dict[str, str]:
    """Return the current values of a stage's parameters and the current hashes of its code.

    Args:
        stage: the name of the stage, such as `train` or `ingest@minichange`.

    Returns:
        the value of each parameter in JSON by dotted path, and the first 12 digits of each code file's hash by path.
    """
    name, _, dataset = stage.partition("@")
    graph = yaml.safe_load(DVC_YAML.read_text(encoding="utf-8"))["stages"]
    params = yaml.safe_load(PARAMS.read_text(encoding="utf-8"))
    definition = graph[name].get("do", graph[name])

    def resolve_references(kind: str) -> list[str]:
        """Return the stage's `params` or `deps` in dvc.yaml, with references to parameters replaced by their values.

        Entries that refer to `item` are left out.
        """
        values = params | {"key": dataset}
        texts = []
        for text in definition[kind]:
            if "item." not in text:
                texts.append(REFERENCE.sub(lambda match: str(lookup(values, match[1])), text))
        return texts

    inputs = {}
    for key in resolve_references("params"):
        for leaf_key, value in flatten_mapping(key, lookup(params, key)):
            inputs[leaf_key] = json.dumps(value, default=str)
    for path in map(Path, resolve_references("deps")):
        if path.parts[0] in WATCHED_FOLDERS:
            inputs |= _hashes_of_files(path)
    if stage != "code":
        inputs |= {file: file_digest[:12] for file, file_digest in current_digests(stage).items()}
    return inputs


def _hashes_of_files(path: Path) -> dict[str, str]:
    """Return the first 12 digits of the sha256 of each file by path. Python's caches are left out.

    Args:
        path: a file, or a folder with files.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return {str(file): sha256(file)[:12] for file in files if file.is_file() and "__pycache__" not in file.parts}


def flatten_mapping(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and value of each leaf in nested mappings.

    Args:
        path: the dotted path of the value.
        value: a mapping or a leaf.
    """
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten_mapping(f"{path}.{key}", inner)
    else:
        yield path, value
