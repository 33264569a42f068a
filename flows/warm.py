"""Training that goes on from the champion, with replay: the parameters that it is, as overrides of a run.

The champion's checkpoint is the base, tracked by a `.dvc` file on the run's branch. Datasets that changed since the
champion train whole; of the others a share of the pairs trains again, so that what was learnt is not lost.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from mlflow.entities.model_registry import ModelVersion

from flows import dvc
from m3diff.provenance.git import find_commit, git
from m3diff.records.errors import DataError
from m3diff.registry import tracking
from m3diff.registry.versions import CHAMPION, find_alias
from m3diff.settings.load import load_params
from m3diff.settings.section import ParamsError
from m3diff.settings.tree import Params

BASE = Path("data/00_champion")
"""Where the champion's checkpoint lies as a base. `data/00_champion.dvc` tracks it."""

LOCK = Path("dvc.lock")
OF_DATASETS = ("synthesize", "augment", "ingest")
"""Stages that there are once for each dataset, by whose name after the `@` it is known."""


class NothingNewError(Exception):
    """The champion has seen all data as they are."""


class WarmStart(NamedTuple):
    overrides: tuple[str, ...]
    said: str


def from_champion(replay: float) -> WarmStart:
    """Write `data/00_champion.dvc` into the worktree that is the current directory. Where there is no champion yet the
    training begins with the base.

    Args:
        replay: the share of the pairs of unchanged datasets that trains again; 1 all, 0 none.

    Raises:
        NothingNewError: no dataset changed since the champion.
        ParamsError: `replay` is no share, or the champion's commit or checkpoint is not known here.
        TrackingUnavailableError: MLflow does not answer.
    """
    if not 0 <= replay <= 1:
        raise ParamsError(f"replay: expected a share from 0 to 1, found {replay}")
    params = load_params(Path("params.yaml"))
    with tracking.connected(params.register_.tracking_uri) as client:
        champion = find_alias(client, params.register_.model_name, CHAMPION)
    if champion is None:
        return WarmStart((), "there is no champion to begin with yet, so training begins with the base")
    changed = changed_datasets(commit_of(champion), params.ingest.datasets)
    what = f"{champion.name} version {champion.version}"
    if not changed:
        raise NothingNewError(f"no dataset changed since {what}, the champion, was trained")
    file = Path(f"{BASE}.dvc")
    entry = {"md5": champion.tags["dvc.checkpoint"], "hash": "md5", "path": BASE.name}
    file.write_text(yaml.safe_dump({"outs": [entry]}), encoding="utf-8")
    git("add", "--", str(file))
    others = [name for name in params.ingest.datasets if name not in changed]
    sources = yaml.safe_dump(weighted(params, others, replay), default_flow_style=True, width=4096).strip()
    said = f"begins with {what}; {', '.join(sorted(changed))} changed since and trains whole"
    if others:
        said += f"; of {', '.join(others)} a share of {replay} trains again"
    return WarmStart((f"train.base={BASE}", f"convert.sources={sources}"), said)


def again() -> WarmStart:
    """The warm start that a run which is tried again finds on its branch."""
    began = Path(f"{BASE}.dvc").is_file()
    return WarmStart((f"train.base={BASE}",) if began else (), "goes on as it began")


def commit_of(champion: ModelVersion) -> str:
    """The commit that the champion was trained at; its `dvc.lock` knows the data."""
    try:
        return find_commit(champion.tags["git.commit"])
    except (KeyError, DataError) as error:
        what = f"{champion.name} version {champion.version}, the champion"
        raise ParamsError(f"warm_start: {what}, was trained at no commit of this clone: {error}") from error


def changed_datasets(commit: str, names: Collection[str]) -> set[str]:
    """The datasets whose raw data or parameters are others than at this commit. Nothing need be in place."""
    before = LOCK.read_bytes() if LOCK.is_file() else None
    LOCK.write_text(git("show", f"{commit}:{LOCK}") + "\n", encoding="utf-8")
    try:
        known, said = dvc.locked() or {}, dvc.status()
    finally:
        LOCK.unlink()
        if before is not None:
            LOCK.write_bytes(before)
    changed = {name for name in names if f"ingest@{name}" not in known}
    for stage, entries in said.items():
        step, _, name = stage.partition("@")
        for entry in [entry for entry in entries if step in OF_DATASETS and isinstance(entry, dict)]:
            for path, how in entry.get("changed deps", {}).items():
                if Path(path).parts[0] not in dvc.CODE and how != "deleted":  # what is not in place is no change
                    changed.add(name)
    return changed & {*names}


def weighted(params: Params, names: Collection[str], replay: float) -> Mapping[str, Any]:
    """`convert.sources`, the weights of these datasets times `replay`."""
    sources = {name: source.model_dump(exclude_defaults=True) for name, source in params.convert.sources.items()}
    for name in names:
        weight = sources.get(name, {}).get("weight", 1.0)
        sources[name] = sources.get(name, {}) | {"weight": weight * replay}
    return sources


def bring_base() -> None:
    """Bring the champion's checkpoint into place: from the cache, else from the remote.

    Raises:
        ParamsError: neither has it.
    """
    file = f"{BASE}.dvc"
    if not Path(file).is_file():
        return
    dvc.link_data()
    if BASE.is_dir():
        return
    try:
        with dvc.repository(outside=f"dvc pull {file}") as repo:
            repo.pull([file])
    except dvc.DvcError as error:
        raise ParamsError(
            f"warm_start: neither DVC's cache nor its remote has the champion's checkpoint ({file}): {error}"
        ) from error
