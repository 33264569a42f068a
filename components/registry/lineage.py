"""The lineage of a model version: its tags; the chain behind it, checked (`m3diff lineage`); data, parameters and
checkpoint brought back (`m3diff restore`).

The chain: raw data, records, mixture, base, checkpoint, predictions, scores, version; each hash beside the one that it
must equal. Content is looked for in DVC's cache, in git and in the remote; that of the cache is hashed again, but for
raw data, of which there may be hundreds of gigabytes. `restore` hashes all.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from m3diff.provenance import dvc
from m3diff.provenance.code import FOLDER, edited
from m3diff.provenance.dvc import LOCK, Lock, dvc_hash, listing, lookup, tracked
from m3diff.provenance.git import find_commit, git, read
from m3diff.records.errors import DataError, readable
from m3diff.registry.tracking import FLOW_RUN, TOKENS, VERSION, WEIGHTS, connected, weights_sha256
from m3diff.registry.versions import commit_of, download_checkpoint, find_version
from m3diff.settings.tree import Params, Paths
from m3diff.stages.register.params import Register

MODEL_CODE, PREDICT_CODE = Path("components/models"), FOLDER / "predict.json"
RAW, CODE = "dvc.raw.", "dvc.code"
IDENTITY = (VERSION, CODE, TOKENS)  # tags that make two registrations the same version; the record hashes them

# Tags, with those of raw data, that a new evaluation of the same version changes
RESULTS = ("dvc.data", "dvc.val_data", "dvc.metrics", "dvc.lock.sha256", "test_set.sha256")

ADAPTERS = "adapters"  # the folder in a checkpoint that holds what trained alone

Outcome = Literal["ok", "missing", "differs"]
REVISION = re.compile(r".*/.*|[0-9a-f]{40}")
# Links of the chain that stages write: the part, the stage, the last name of its output, the version's tag if any
OUTPUTS = (
    ("records", "validate", "records.parquet", None),
    ("mixture", "convert", "train", "dvc.data"),
    ("mixture", "convert", "val", "dvc.val_data"),
    ("mixture", "convert", "test", None),
    ("checkpoint", "train", "checkpoint", VERSION),
    ("predictions", "predict", "predictions.json", None),
    ("metrics", "evaluate", "metrics.json", "dvc.metrics"),
)


# The tags of a version


def code_path(tags: Mapping[str, str]) -> Path:
    """The path whose hash a version's tag `dvc.code` is: the folder of the models, in versions of before the stage
    `code`."""
    return MODEL_CODE if tags.get(CODE, "").endswith(".dir") else PREDICT_CODE


def read_lineage(params: Params, lock: Lock) -> dict[str, str]:
    """The lineage of the checkpoint in the working tree: the tags of its version. A hash is DVC's (md5, `.dir` for a
    folder) where its tag does not name another.

    Raises:
        DataError: the working tree is not what `dvc.lock` says, or is no git repository.
    """
    if changed := edited("predict"):
        raise DataError(f"{changed[0]}: has changed since `dvc repro` ran; run it again")
    paths, base = params.paths, params.train.base
    checkpoint, manifest = paths.model / "checkpoint", paths.model / "checkpoint" / "manifest.json"
    adapters = kept_alone(params.register_, checkpoint)
    results = (paths.report / "report.html", paths.report / "scores.parquet")
    for seen in (paths.predictions, paths.model / "curves.csv", *results):
        lock.current(seen)
    code = git("status", "--porcelain", "--", ".", ":!dvc.lock", f":!{FOLDER}", ":!data")  # what DVC writes may differ
    data = git("status", "--porcelain", "--untracked-files=all", "--", "*.dvc")
    found = {
        VERSION: lock.current(checkpoint),
        CODE: lock.current(PREDICT_CODE),
        TOKENS: str(lock.params(())["predict"]["max_new_tokens"]),
        "dvc.data": lock.current(paths.mixture / "train"),  # the samples that trained
        "dvc.val_data": lock.current(paths.mixture / "val"),
        "dvc.base": lock.current(base),  # the pre-trained model that the training began with
        "base.sha256": json.loads(manifest.read_text())["base_sha256"],  # the one that the training loaded
        "dvc.metrics": lock.current(paths.report / "metrics.json"),
        "dvc.lock.sha256": lock.sha256,
        "test_set.sha256": hash_test_set(paths),
        "git.commit": git("rev-parse", "HEAD"),
        "git.dirty": str(bool(code or data)).lower(),  # parameters, code or a `.dvc` file differ from the commit
        WEIGHTS: weights_sha256(manifest),
        "dvc.adapters": dvc_hash(adapters) if adapters else None,
        FLOW_RUN: os.environ.get("M3DIFF_FLOW_RUN"),
    }
    for name, entry in params.ingest.datasets.items():
        found[f"{RAW}{name}"] = lock.recorded(entry.root, f"ingest@{name} deps")  # as ingest read it
    return {tag: value for tag, value in found.items() if value is not None}


def kept_alone(cfg: Register, checkpoint: Path) -> Path | None:
    """The adapters, where a version keeps no more; None where it keeps the whole checkpoint, or there are none."""
    folder = checkpoint / ADAPTERS
    return folder if cfg.keeps == "adapters" and folder.is_dir() else None


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


# The chain


class Check(NamedTuple):
    """A line of a lineage: a hash, and whether all places that bear it agree."""

    what: str  # a part of the chain, as `raw data` or `checkpoint`
    where: Path | str
    hash: str
    outcome: Outcome
    note: str = ""  # where it is kept, or what is wrong and the remedy

    def __str__(self) -> str:
        return f"{self.outcome:8} {self.what:12} {self.where!s:38} {self.hash:<12.12}  {self.note}".rstrip()


def sound(checks: Iterable[Check]) -> bool:
    return all(check.outcome == "ok" for check in checks)


def compared(what: str, where: Path | str, named: str | None, found: str | None, note: str = "") -> Check:
    """A hash that one place names and another has; None where it has none."""
    if named is None:
        return Check(what, where, found or "", "missing", "the version does not name it")
    if found is None:
        return Check(what, where, named, "missing", note or "not there")
    if named != found:
        return Check(what, where, named, "differs", f"{note or 'there'} is {found:.12}")
    return Check(what, where, named, "ok", note)


def lineage(cfg: Register, version: str) -> list[Check]:
    """Every link of the version's chain, in order.

    Args:
        version: number or alias.

    Raises:
        DataError: there is no such version.
        TrackingUnavailableError: MLflow does not answer.
    """
    with connected(cfg.tracking_uri) as client:
        found = find_version(client, cfg.model_name, version)
        try:
            commit = find_commit(commit_of(found))
            objects = Objects(commit, dvc.read_lock(commit))
        except DataError as error:
            return [Check("commit", "git", commit_of(found), "missing", str(error))]
        return list(chain(found, objects))


def chain(version: ModelVersion, objects: "Objects") -> Iterator[Check]:
    tags, commit = version.tags, objects.commit
    for what, path, where, tag in links(tags, objects.lock):
        recorded = objects.lock.hashes(path).get(where)
        named = tags.get(tag) if tag else recorded
        if recorded is None or recorded != named:
            yield compared(what, path, named, recorded, LOCK.name)
        else:
            yield objects.check(what, path, recorded, read=what != "raw data")
        if what == "checkpoint":
            yield from of_stored(version, objects.cache)
    text = read(commit, LOCK)
    in_commit = None if text is None else hashlib.sha256(text).hexdigest()
    yield compared("dvc.lock", commit[:12], tags.get("dvc.lock.sha256"), in_commit, "the commit's")
    if tags.get("git.dirty") == "false":
        yield Check("commit", "git", commit, "ok")
    else:
        note = "parameters, code or a .dvc file were not committed when it was registered"
        yield Check("commit", "git", commit, "differs", note)


def links(tags: Mapping[str, str], lock: Lock) -> Iterator[tuple[str, Path, str, str | None]]:
    """Each part of the chain, its path, its place in dvc.lock (`train outs`), and the version's tag if it has one."""
    for raw in sorted(tag for tag in tags if tag.startswith(RAW)):
        name = raw.removeprefix(RAW)
        root = lock.ran_with(f"ingest@{name}").get(f"ingest.datasets.{name}", {}).get("root", name)
        yield "raw data", Path(root), f"ingest@{name} deps", raw
        yield "records", lock.output(f"ingest@{name}", name), f"ingest@{name} outs", None
    for what, stage, name, tag in OUTPUTS:
        if stage == "train":
            yield "base", Path(lock.ran_with("train")["train"]["base"]), "train deps", "dvc.base"
            code = code_path(tags)
            yield "model code", code, next(iter(lock.hashes(code)), "predict deps"), CODE
        yield what, lock.output(stage, name), f"{stage} outs", tag


def of_stored(version: ModelVersion, cache: Path) -> Iterator[Check]:
    """The checkpoint that MLflow keeps, or its adapters alone, against DVC's, and its manifest against the version's
    tags."""
    tags = version.tags
    with tempfile.TemporaryDirectory() as scratch:
        try:
            stored = dvc_hash(download_checkpoint(version, Path(scratch)))
        except (MlflowException, OSError):
            stored = None
    named, note = tags.get(VERSION), "MLflow's copy"
    if "dvc.adapters" in tags:
        named, note = tags["dvc.adapters"], "MLflow's copy, adapters alone"
    yield compared("stored model", f"models:/{version.name}/{version.version}", named, stored, note)
    manifest = dvc.object_file(cache, listing(cache, tags.get(VERSION, "")).get("manifest.json", "none"))
    if manifest.is_file():
        base = json.loads(manifest.read_text()).get("base_sha256")
        yield compared("weights", "the checkpoint's manifest", tags.get(WEIGHTS), weights_sha256(manifest))
        yield compared("base", "the checkpoint's manifest", tags.get("base.sha256"), base)


class Objects:
    """The content of one commit's data, by path and hash; the remote is asked for what the cache does not have."""

    def __init__(self, commit: str, lock: Lock) -> None:
        self.commit, self.lock, self.cache = commit, lock, dvc.cache_folder()
        self.tracked = tracked(commit, lock)

    def check(self, what: str, path: Path, hash_: str, read: bool = True) -> Check:
        """Look for this content. `read`: hash what the cache holds again, not only look for it."""
        outcome, note = in_cache(self.cache, hash_, read)
        below = [other for other in self.tracked if other.is_relative_to(path) and other != path]
        if outcome == "missing" and below:  # a folder whose parts are tracked one by one
            found = [self.check(what, part, self.tracked[part], read) for part in below]
            bad = [part for part in found if part.outcome != "ok"]
            outcome = bad[0].outcome if bad else "ok"
            note = "; ".join(f"{part.where}: {part.note}" for part in bad) or f"its {len(found)} parts are kept"
        elif outcome == "missing" and dvc.hash_in_git(self.commit, path) == hash_:
            outcome, note = "ok", "in git"
        elif outcome == "missing" and path in self.tracked:
            states = {state for place, state in self.absent.items() if place.is_relative_to(path)}
            if states == {"deleted"}:
                outcome, note = "ok", "in the remote"
        return Check(what, path, hash_, outcome, note)

    @cached_property
    def absent(self) -> dict[Path, str]:
        """Data of the commit that the cache or the remote lacks: `deleted` (from the cache), `new` or `missing`. DVC
        takes a folder for pushed when its list is there, which it writes after the folder's files."""
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place) / "tree"
            dvc.add_worktree(self.commit, folder)
            try:
                states = json.loads(dvc.call(folder, "status", "--cloud", "--json"))
            except DataError:
                states = {}  # no remote, or none that answers
            finally:
                git("worktree", "remove", "--force", str(folder))
        return {Path(path): state for path, state in states.items()}


def in_cache(cache: Path, hash_: str, read: bool) -> tuple[Outcome, str]:
    """The state in the cache of a file, or of a folder's list and all its files; with `read` damage is seen too."""
    file = dvc.object_file(cache, hash_)
    if not file.is_file():
        return "missing", "neither in the cache nor in the remote"
    if (read or hash_.endswith(".dir")) and (note := dvc.whole(file, hash_)):
        return "differs", note
    for name, md5 in listing(cache, hash_).items():
        outcome, note = in_cache(cache, md5, read)
        if outcome != "ok":
            return outcome, f"{name}: {note}"
    return "ok", "in the cache"


# Bringing it back


def restore(cfg: Register, version: str, into: Path | None) -> tuple[Path, list[Check]]:
    """Make a working tree of the version's commit and bring back what DVC tracks there.

    Args:
        version: number or alias; or, MLflow not being asked, a branch (`runs/...`) or a commit's full hash.
        into: the new folder; by default beside the project.

    Returns: the folder, and a line for everything that was brought back.

    Raises:
        DataError: there is no such version or commit, the folder exists, or DVC cannot bring anything back.
        TrackingUnavailableError: MLflow does not answer.
    """
    tags = dict[str, str]()
    if not REVISION.fullmatch(version):
        with connected(cfg.tracking_uri) as client:
            found = find_version(client, cfg.model_name, version)
            tags = found.tags | {"git.commit": commit_of(found)}
    commit = find_commit(tags.get("git.commit", version))
    folder = (into or Path.cwd().parent / f"{Path.cwd().name}-{version.replace('/', '-')}").resolve()
    if folder.exists():
        raise DataError(f"{folder}: exists; name another with --into, or remove it: git worktree remove {folder}")
    lock = dvc.read_lock(commit)
    dvc.add_worktree(commit, folder)
    faults = []
    for command in (("fetch", "--quiet"), ("checkout", "--quiet", "--allow-missing")):
        try:
            dvc.call(folder, *command)
        except DataError as error:  # each file is checked below
            faults.append(str(error))
    checks = verify(folder, commit, lock, tags)
    why = faults[0] if faults else "not there"
    return folder, [check._replace(note=why) if check.outcome == "missing" else check for check in checks]


def verify(folder: Path, commit: str, lock: Lock, tags: dict[str, str]) -> Iterator[Check]:
    """Every tracked file and folder by its content, the parameters of every stage, and what the version names."""
    data, code = tracked(commit, lock), code_path(tags)
    there = {path: dvc_hash(folder / path) if (folder / path).exists() else None for path in (*data, code)}
    yield from (compared("data", path, named, there[path]) for path, named in data.items())
    values = yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8"))
    for stage in dvc.current_stages(commit, lock):
        other = [name for name, value in lock.ran_with(stage).items() if lookup(values, name) != value]
        note = f"ran with other {', '.join(other)}" if other else ""
        yield Check("parameters", stage, "", "differs" if other else "ok", note)
    if tags:
        yield compared("dvc.lock", LOCK, tags.get("dvc.lock.sha256"), Lock(folder / LOCK).sha256)
        yield compared("model code", code, tags.get(CODE), there[code])
        for what, stage, name, tag in OUTPUTS:
            if tag:
                path = lock.output(stage, name)
                yield compared(what, path, tags.get(tag), there.get(path), tag)
