"""What made data have in the scratch folder, which several runs and worktrees may share.

edits/drawn-9e1c40d2a7b35f68/77ab....png    by what decides an edit: the editor; original, instruction and seed
augment/0/, augment/0.lock                  a run's own, while it goes on
"""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import getfile
from itertools import count
from pathlib import Path

from m3diff.provenance.code import digests
from m3diff.stages.augment.params import Drawn, InstructPix2Pix
from m3diff.stages.augment.parts import Editor

NO_CODE = (
    "components/models/",
    *(
        f"components/{name}.py"
        for name in ("stages/augment/params", "stages/augment/weights", "records/files", "settings/section")
    ),
)
"""What an editor imports and no edit depends on: devices, and what reads settings and names weights, which are in the
key themselves."""


def kept_edits(cfg: Drawn | InstructPix2Pix, editor: Editor, scratch: Path) -> Path:
    """The folder of this editor's edits, whoever asked for them: by its settings, the identity of its weights wherever
    they lie, and its code."""
    code = {
        name: meaning for name, meaning in digests(Path(getfile(type(editor)))).items() if not name.startswith(NO_CODE)
    }
    settings = cfg.model_dump(mode="json", exclude={"model", "sha256"})
    facts = json.dumps({"settings": settings, "model": editor.identity, "code": code}, sort_keys=True)
    return scratch / "edits" / f"{cfg.kind}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


@contextmanager
def own_folder(scratch: Path) -> Iterator[Path]:
    """Within, a folder that no other run uses: the first of `augment/` whose lock is free. It is not there yet; what a
    killed run left there is removed, and so is the folder in the end."""
    parent = scratch / "augment"
    parent.mkdir(parents=True, exist_ok=True)
    for number in count():
        with (parent / f"{number}.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            folder = parent / str(number)
            shutil.rmtree(folder, ignore_errors=True)
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            return
