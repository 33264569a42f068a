"""Runs beside the project's own: `dvc exp run` in a folder of its own, for `make seeds` and `make ablation`.

A stage that was run before with the same data, parameters and code, by whichever of them or by `dvc repro`, is restored
from DVC's cache and not run again.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def run_experiment(
    name: str, changes: Mapping[str, Any], given: Sequence[Path] = (), targets: Sequence[str] = ()
) -> None:
    """Run the pipeline with these changes of params.yaml; an experiment of this name is replaced.

    Args:
        changes: values by their keys, `{"train.seed": 3}`; a plus before a key adds it.
        given: folders of this checkout that git ignores and the experiment reads.
        targets: stages that are run, with what they need; none: all.

    Raises:
        CalledProcessError: it failed.
    """
    settings = [setting(key, value) for key, value in changes.items()]
    print(f"dvc exp run --name {name} {' '.join([*settings, *targets])}", flush=True)
    chosen = [part for each in settings for part in ("-S", each)]
    copied = [part for folder in given for part in ("--copy-paths", str(folder))]
    remove(name)
    dvc("exp", "run", "--temp", "--name", name, *copied, *chosen, *targets)


def remove(name: str) -> None:
    """Forget the experiment where there is one; its stages stay in the run cache."""
    dvc("exp", "remove", "--quiet", name, check=False)


def setting(key: str, value: Any) -> str:
    """A change of params.yaml as `dvc exp run -S` takes it; a text stands as it is."""
    return f"{key}={value if isinstance(value, str) else in_hydra(value)}"


def in_hydra(value: Any) -> str:
    """A value in the grammar of Hydra's overrides: JSON, but the keys of a mapping stand without quotes."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {in_hydra(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_hydra, value))}]"
    return json.dumps(value, ensure_ascii=False)


def dvc(*arguments: str, check: bool = True) -> None:
    out = None if check else subprocess.DEVNULL
    subprocess.run([sys.executable, "-m", "dvc", *arguments], check=check, stdout=out, stderr=out)


def read(experiment: str, path: Path) -> bytes:
    """A file as the experiment left it, whether git or DVC holds it."""
    from dvc.api import DVCFileSystem

    with DVCFileSystem(rev=experiment).open(path.as_posix(), "rb") as file:
        return file.read()


def copy(experiment: str, path: Path, to: Path) -> None:
    """A folder as the experiment left it, in the place of what is at `to`."""
    from dvc.api import DVCFileSystem

    shutil.rmtree(to, ignore_errors=True)
    to.parent.mkdir(parents=True, exist_ok=True)
    DVCFileSystem(rev=experiment).get(path.as_posix(), str(to), recursive=True)
