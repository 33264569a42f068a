"""Where a model version comes from: the very hashes in `dvc.lock`, the commit beside it, the test set of its scores."""

import hashlib
import json
import subprocess
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from pydantic import BaseModel, ConfigDict

from components.params import Paths
from components.records import DataError

LOCK = Path("dvc.lock")
MODEL_CODE = Path("components/model")


class Lineage(BaseModel):
    """All hashes are DVC's (md5, `.dir` for a folder) where not said otherwise."""

    model_config = ConfigDict(frozen=True)

    data: str  # the mixture that the training saw
    checkpoint: str
    code: str  # components/model: with the checkpoint and the length limit, what decides a caption
    max_new_tokens: int
    metrics: str
    dvc_lock_sha256: str
    test_set_sha256: str
    git_commit: str
    git_dirty: bool

    def identity(self) -> dict[str, str]:
        """The tags that make two registrations the same version."""
        return {
            "dvc.checkpoint": self.checkpoint,
            "dvc.code": self.code,
            "predict.max_new_tokens": str(self.max_new_tokens),
        }

    def results(self) -> dict[str, str]:
        """The tags that a new evaluation of the same version changes."""
        return {
            "dvc.data": self.data,
            "dvc.metrics": self.metrics,
            "dvc.lock.sha256": self.dvc_lock_sha256,
            "test_set.sha256": self.test_set_sha256,
        }

    def tags(self) -> dict[str, str]:
        commit = {"git.commit": self.git_commit, "git.dirty": str(self.git_dirty).lower()}
        return self.identity() | self.results() | commit


class Lock:
    """`dvc.lock`, read: what each stage saw and wrote when it last ran."""

    def __init__(self, path: Path = LOCK) -> None:
        if not path.is_file():
            raise DataError(f"{path}: no such file, so nothing was trained yet; run `dvc repro` first")
        text = path.read_bytes()
        try:
            self.stages: dict[str, Any] = yaml.safe_load(text)["stages"]
        except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError) as error:
            raise DataError(f"{path}: not DVC's lock file ({error!r}); restore it: git checkout -- {path}") from error
        self.sha256 = hashlib.sha256(text).hexdigest()

    def hashes(self, path: Path) -> dict[str, str]:
        """What each stage recorded of this path: `{"train outs": md5, "predict deps": md5}`."""
        return {
            f"{stage} {kind}": entry["md5"]
            for stage, entries in self.stages.items()
            for kind in ("deps", "outs")
            for entry in entries.get(kind, [])
            if entry["path"] == str(path)
        }

    def current(self, path: Path) -> str:
        """The hash of a path that every stage recorded alike and that is on disk.

        Raises:
            DataError: no stage recorded it, or a stage recorded something else than what lies there.
        """
        recorded = self.hashes(path)
        if not recorded or not path.exists():
            raise DataError(f"{path}: not {'on disk' if recorded else f'in {LOCK}'}; run `dvc repro` first")
        found = dvc_hash(path)
        for where, md5 in recorded.items():
            if md5 != found:
                raise DataError(f"{path}: {LOCK} has {md5} ({where}), on disk is {found}; run `dvc repro` first")
        return found

    def params(self) -> dict[str, Any]:
        """The parameters that the stages ran with, by section."""
        return {
            key: value
            for entries in self.stages.values()
            for sections in entries.get("params", {}).values()
            for key, value in sections.items()
        }


def read_lineage(paths: Paths, lock: Lock) -> Lineage:
    """Collect the lineage of the checkpoint in the working tree.

    Raises:
        DataError: the working tree is not what `dvc.lock` says, or is no git repository.
    """
    for seen in (paths.predictions / "predictions.json", paths.model / "curves.csv", paths.report / "report.html"):
        lock.current(seen)
    return Lineage(
        data=lock.current(paths.mixture / "samples"),
        checkpoint=lock.current(paths.model / "checkpoint"),
        code=lock.current(MODEL_CODE),
        max_new_tokens=lock.params()["predict"]["max_new_tokens"],
        metrics=lock.current(paths.report / "metrics.json"),
        dvc_lock_sha256=lock.sha256,
        test_set_sha256=hash_test_set(paths),
        git_commit=git("rev-parse", "HEAD"),
        git_dirty=bool(git("status", "--porcelain", "--", ".", ":!dvc.lock", ":!data")),
    )


def dvc_hash(path: Path) -> str:
    """DVC's hash of a file, or of a folder: the md5 of its sorted list of files and their md5, as JSON."""
    if path.is_file():
        return md5(path)
    files = [file for file in path.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    listing = sorted(
        ({"md5": md5(file), "relpath": file.relative_to(path).as_posix()} for file in files), key=itemgetter("relpath")
    )
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode()).hexdigest() + ".dir"


def md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def hash_test_set(paths: Paths) -> str:
    """sha256 over the pairs that were captioned: id, references and both images. Equal: two scores can be compared."""
    total = hashlib.sha256()
    for record in captioned_records(paths):
        images = [md5(Path(record[side])) for side in ("before", "after")]
        total.update(json.dumps([record["id"], record["captions"], *images]).encode())
    return total.hexdigest()


def captioned_records(paths: Paths) -> Iterator[dict[str, Any]]:
    """The clean records that `predict` captioned, by id."""
    captions = json.loads((paths.predictions / "predictions.json").read_text())
    columns = ["id", "before", "after", "captions"]
    table = pq.read_table(paths.clean / "records.parquet", columns=columns).sort_by("id")
    chosen = pc.is_in(table["id"], pc.cast([row["image_id"] for row in captions], "string"))
    yield from table.filter(chosen).to_pylist()


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise DataError(f"git {' '.join(arguments)}: {done.stderr.strip()}; a version's lineage names its commit")
    return done.stdout.strip()
