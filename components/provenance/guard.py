"""See that DVC records what ran: a stage's parameters and code are read before its work and compared after it.

DVC hashes what a stage depends on when the command is over. What was edited meanwhile would be recorded as what ran,
and be restored for ever from the run cache. A stage that fails is recorded nowhere. Nor is the code of one project run
for another.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from m3diff.provenance.code import FOLDER, current, edited
from m3diff.provenance.dvc import lookup
from m3diff.records.errors import DataError
from m3diff.records.files import sha256
from m3diff.settings.section import ParamsError

PARAMS, GRAPH = Path("params.yaml"), Path("dvc.yaml")
ENTRY = Path("components/__main__.py")
OURS = ("components", "profiles")
"""Folders of code and of files beside the parameters; data may be large, and is hashed by DVC alone."""

REFERENCE = re.compile(r"\$\{([^}]+)\}")


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
    known = values | {"key": key}

    def filled(kind: str) -> list[str]:
        texts = [text for text in entry[kind] if "item." not in text]
        return [REFERENCE.sub(lambda match: str(lookup(known, match[1])), text) for text in texts]

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
    """The values of a parameter, down to the last key."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(f"{path}.{key}", inner)
    else:
        yield path, value
