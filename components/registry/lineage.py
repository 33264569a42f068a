"""Where a model version comes from: the hashes in `dvc.lock`, its base, the commit, the test set of its scores."""

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from pydantic import BaseModel, ConfigDict

from m3diff.provenance.code import FOLDER, edited
from m3diff.records.errors import DataError, readable
from m3diff.records.files import sha256_of_folder
from m3diff.registry.runs import FLOW_RUN, TOKENS, VERSION, WEIGHTS, weights_sha256
from m3diff.settings.tree import Params, Paths
from m3diff.stages.register.params import Register

LOCK = Path("dvc.lock")
MODEL_CODE = Path("components/models")
PREDICT_CODE = FOLDER / "predict.json"
RAW = "dvc.raw."
CODE = "dvc.code"
ADAPTERS = "adapters"
"""The folder in a checkpoint that holds what trained alone."""
FORBIDDEN = re.compile(r"[^\w.\- ]")  # in what a tag names after `hours.`


class Lineage(BaseModel):
    """All hashes are DVC's (md5, `.dir` for a folder) where not said otherwise."""

    model_config = ConfigDict(frozen=True)

    data: str  # the samples that trained
    val_data: str  # the samples that were only scored while training
    checkpoint: str
    code: str  # of predict: with the checkpoint and the length limit, what decides a caption
    max_new_tokens: int
    base: str  # the pre-trained model that the training began with
    base_sha256: str  # its content, as the checkpoint names it
    metrics: str
    dvc_lock_sha256: str
    test_set_sha256: str
    git_commit: str
    git_dirty: bool
    raw: dict[str, str] = {}  # each dataset's root as ingest read it, by name
    weights_sha256: str | None = None  # of the checkpoint; None where its manifest lists no weights
    adapters: str | None = None  # of the checkpoint, where MLflow keeps them alone
    flow_run: str | None = None  # Prefect's id; None where a person registered
    hours: dict[str, float] = {}  # of training, by device; empty where no measurement of it is there

    def identity(self) -> dict[str, str]:
        """The tags that make two registrations the same version."""
        return {
            VERSION: self.checkpoint,
            CODE: self.code,
            TOKENS: str(self.max_new_tokens),
        }

    def results(self) -> dict[str, str]:
        """The tags that a new evaluation of the same version changes."""
        return {
            "dvc.data": self.data,
            "dvc.val_data": self.val_data,
            "dvc.metrics": self.metrics,
            "dvc.lock.sha256": self.dvc_lock_sha256,
            "test_set.sha256": self.test_set_sha256,
        } | {f"{RAW}{name}": md5 for name, md5 in self.raw.items()}

    def tags(self) -> dict[str, str]:
        base = {"dvc.base": self.base, "base.sha256": self.base_sha256}
        commit = {"git.commit": self.git_commit, "git.dirty": str(self.git_dirty).lower()}
        known = {WEIGHTS: self.weights_sha256, "dvc.adapters": self.adapters, FLOW_RUN: self.flow_run}
        known |= {f"hours.{FORBIDDEN.sub('_', kind)}": f"{hours:.4g}" for kind, hours in self.hours.items()}
        found = {tag: value for tag, value in known.items() if value is not None}
        return self.identity() | self.results() | base | commit | found

    def outdated(self, tags: Collection[str]) -> list[str]:
        """Of a version's tags those that an earlier evaluation left and this one does not know."""
        return [tag for tag in tags if (tag.startswith(RAW) or tag == FLOW_RUN) and tag not in self.tags()]


def code_path(tags: Mapping[str, str]) -> Path:
    """What the tag `dvc.code` of a version is the hash of: the folder of the models, in versions of before the stage
    `code`."""
    return MODEL_CODE if tags.get(CODE, "").endswith(".dir") else PREDICT_CODE


def content_of(tags: Mapping[str, str]) -> str | None:
    """What a version is, from its tags, in one word: the same for the same checkpoint, code and length limit in any
    registry. None where register did not make it."""
    parts = [tags.get(tag) for tag in (VERSION, CODE, TOKENS)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest() if parts[0] else None


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
        """What each stage recorded of this path: `{"train outs": md5, "predict deps": md5}`."""
        return {where: md5 for where, found, md5 in self._entries() if found == path}

    def recorded(self, path: Path, where: str) -> str:
        """What one stage recorded of this path (`ingest@minichange deps`), whatever lies there now.

        Raises:
            DataError: it recorded nothing of it.
        """
        if (md5 := self.hashes(path).get(where)) is None:
            raise DataError(f"{path}: not in {LOCK} ({where}); run `dvc repro` first")
        return md5

    def current(self, path: Path) -> str:
        """DVC's hash of a path whose every recorded part, itself included, lies on disk as the stages recorded it.

        Raises:
            DataError: no stage recorded any of it, or a stage recorded something else than what lies there.
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

        DVC keeps the entry of a dataset that was taken out of `params.yaml`, so that nothing but its name tells it.
        """
        return {
            key: value
            for stage, entries in self.stages.items()
            if "@" not in stage or stage.partition("@")[2] in datasets
            for sections in entries.get("params", {}).values()
            for key, value in sections.items()
        }

    def _entries(self) -> Iterator[tuple[str, Path, str]]:
        """(stage and kind, path, md5) of every dependency and output."""
        for stage, entries in self.stages.items():
            for kind in ("deps", "outs"):
                for entry in entries.get(kind, []):
                    yield f"{stage} {kind}", Path(entry["path"]), entry["md5"]


def read_lineage(params: Params, lock: Lock) -> Lineage:
    """Collect the lineage of the checkpoint in the working tree.

    Raises:
        DataError: the working tree is not what `dvc.lock` says, or is no git repository.
    """
    if changed := edited("predict"):
        raise DataError(f"{changed[0]}: has changed since `dvc repro` ran; run it again")
    paths = params.paths
    adapters = kept_alone(params.register_, paths.model / "checkpoint")
    results = ("report.html", "scores.parquet")
    for seen in (
        paths.predictions,
        paths.model / "curves.csv",
        *(paths.report / name for name in results),
    ):
        lock.current(seen)
    return Lineage(
        data=lock.current(paths.mixture / "train"),
        val_data=lock.current(paths.mixture / "val"),
        checkpoint=lock.current(paths.model / "checkpoint"),
        code=lock.current(PREDICT_CODE),
        max_new_tokens=lock.params(())["predict"]["max_new_tokens"],
        base=lock.current(params.train.base),
        base_sha256=read_base_sha256(paths.model / "checkpoint", params.train.base),
        metrics=lock.current(paths.report / "metrics.json"),
        dvc_lock_sha256=lock.sha256,
        test_set_sha256=hash_test_set(paths),
        git_commit=git("rev-parse", "HEAD"),
        git_dirty=is_dirty(),
        raw={name: lock.recorded(entry.root, f"ingest@{name} deps") for name, entry in params.ingest.datasets.items()},
        weights_sha256=weights_sha256(paths.model / "checkpoint"),
        adapters=dvc_hash(adapters) if adapters else None,
        flow_run=os.environ.get("M3DIFF_FLOW_RUN"),
        hours=training_hours(params.compute.scratch / "train_speed.json"),
    )


def kept_alone(cfg: Register, checkpoint: Path) -> Path | None:
    """The adapters, where a version keeps no more; None where it keeps the whole checkpoint, or there are none."""
    folder = checkpoint / ADAPTERS
    return folder if cfg.keeps == "adapters" and folder.is_dir() else None


def is_dirty() -> bool:
    """Whether parameters, code or the `.dvc` file of a dataset differ from the commit; what DVC writes may."""
    code = git("status", "--porcelain", "--", ".", ":!dvc.lock", f":!{FOLDER}", ":!data")
    return bool(code or git("status", "--porcelain", "--untracked-files=all", "--", "*.dvc"))


def training_hours(measured: Path) -> dict[str, float]:
    """Hours of training by kind of device, of all devices together; empty where the stage left no whole measurement."""
    try:
        found = json.loads(measured.read_text())
        return {str(found["device"]): float(found["device_hours"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def read_base_sha256(checkpoint: Path, base: Path) -> str:
    """The base's content hash in the checkpoint's manifest, which says what the training loaded.

    Raises:
        DataError: the manifest is missing, or the base on disk has other content.
    """
    manifest = checkpoint / "manifest.json"
    if not manifest.is_file():
        raise DataError(f"{manifest}: no such file, so the checkpoint is incomplete; run `dvc repro --force train`")
    with readable(manifest, "run `dvc repro --force train`"):
        trained_from = json.loads(manifest.read_text())["base_sha256"]
    on_disk = sha256_of_folder(base)
    if trained_from != on_disk:
        raise DataError(
            f"{base}: its sha256 is {on_disk:.12}, but {manifest} was trained from {trained_from:.12}; "
            "run `dvc repro --force train`"
        )
    return on_disk


def dvc_hash(path: Path) -> str:
    """DVC's hash of a file, or of a folder: the md5 of its sorted list of files and their md5, as JSON."""
    if path.is_file():
        return md5(path)
    files = [file for file in path.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    return hash_of_list({file.relative_to(path).as_posix(): md5(file) for file in files})


def hash_of_list(files: Mapping[str, str]) -> str:
    """DVC's hash of a folder of these files, md5 by name."""
    listing = [{"md5": files[name], "relpath": name} for name in sorted(files)]
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode()).hexdigest() + ".dir"


def md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def hash_test_set(paths: Paths) -> str:
    """sha256 over the pairs that were captioned: id, references and both images. Equal: two scores can be compared."""
    total = hashlib.sha256()
    for record in captioned_records(paths):
        images = [record[f"{side}_sha256"].hex() for side in ("before", "after")]
        total.update(json.dumps([record["id"], record["references"], *images]).encode())
    return total.hexdigest()


def captioned_records(paths: Paths) -> Iterator[dict[str, Any]]:
    """The clean records that `predict` captioned, by id."""
    with readable(paths.predictions / "predictions.json"):
        predictions = json.loads((paths.predictions / "predictions.json").read_text())
    columns = ["id", "before", "after", "before_sha256", "after_sha256", "references"]
    with readable(paths.clean / "records.parquet"):
        table = pq.read_table(paths.clean / "records.parquet", columns=columns).sort_by("id")
    captioned = pc.is_in(table["id"], pc.cast([row["image_id"] for row in predictions], "string"))
    yield from table.filter(captioned).to_pylist()


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-c", "core.quotePath=off", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise DataError(f"git {' '.join(arguments)}: {done.stderr.strip()}; a version's lineage names its commit")
    return done.stdout.strip()
