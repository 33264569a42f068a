"""augment: a raw dataset made from another, in the layout that the reader `pairs` reads; what follows knows no other.

    pairs.jsonl    {"id": "000123.png-0", "split": "train", "scene": "000123", "before": "images/1c0f....png", "after":
                    "images/77ab....png", "captions": ["..."], "change_types": ["color"], "made": {"seed": 7, ...}}
    images/        originals, copied, and edits; by their content

Edits and writers' answers are kept in `compute.scratch`, which several runs and worktrees may share, by what decides
them, for the run that goes on after a kill and for every later one:

    edits/drawn-9e1c40d2a7b35f68/77ab....png    by what decides an edit: the editor; original, instruction and seed
    augment/0/, augment/0.lock                  a run's own, while it goes on

Equal settings, sources and models give equal bytes; of an endpoint's model that is what its kept answers are.
"""

import fcntl
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import getfile
from itertools import count
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import check_licence
from m3diff.datasets.tables import SUFFIXES
from m3diff.models.device import Device
from m3diff.provenance.code import digests
from m3diff.records.errors import DataError
from m3diff.records.files import StageReport, sha256, write_atomic
from m3diff.records.progress import progress
from m3diff.records.schemas import SPLITS
from m3diff.settings.compute import Compute
from m3diff.stages.augment.editors import Editor, load_editor
from m3diff.stages.augment.features import Features
from m3diff.stages.augment.kinds import Made, Pair, make_coupled_samples, make_edits, make_neighbours
from m3diff.stages.augment.params import MANIFEST, CoupledSamples, Drawn, Edits, InstructPix2Pix, Neighbours
from m3diff.stages.augment.source import Rejected, known_pairs, read_originals
from m3diff.stages.augment.writers import load_writer

IMAGES = "images"
OURS = re.compile(r"[0-9a-f]{32}(\..*)?").fullmatch  # an image's name, of earlier versions too: by its content
PLAIN = re.compile(r"\.\w+").fullmatch  # a suffix that stays
NO_CODE = (
    "components/models/",
    *(f"components/{name}.py" for name in ("stages/augment/params", "records/files", "settings/section")),
)
"""Code that an editor imports and no edit depends on: devices, and what reads settings and names weights, which are in
the key themselves."""


class AugmentReport(StageReport):
    """Counts of one source's synthetic data. `rows_in` are the pairs that were tried: those made and those rejected."""

    dataset: str
    kind: str
    pairs: dict[str, int]  # by split
    references: dict[str, int]
    rejected: dict[str, int]  # pairs, by reason
    dropped_texts: dict[str, int]  # of a writer's answers, by reason
    models: dict[str, str]  # digests of the editor's, writer's and encoder's weights; of an endpoint, the model's name
    examples: dict[str, str] = Field(default_factory=dict, exclude=True)  # by reason; for people, and in no file

    def reasons(self) -> Iterator[str]:
        """Counts of rejected pairs with the reason and, where that is in the source, the first row and its fault."""
        for reason, pairs in self.rejected.items():
            first = f"; the first: {self.examples[reason]}" if reason in self.examples else ""
            yield f"{pairs:,}: {reason}{first}"


def augment(name: str, cfg: Edits | Neighbours | CoupledSamples, compute: Compute) -> AugmentReport:
    """Write the dataset `name` of `params.yaml` to `cfg.root`, and the report to `<root>.json`.

    Raises:
        DataError: the source cannot be used, its licence excludes training, no pair could be made, or the root holds
            files of someone else.
        ParamsError: a model is not there or not the one that was named, or an endpoint refuses key or model.
        ConnectionError: an endpoint cannot be reached; the next run goes on from there.
    """
    if notice := check_licence(DATASETS[cfg.source.reader], "train"):
        print(f"augment: {name}: made from {notice}", flush=True)
    _require_ours(cfg.root)
    with own_folder(compute.scratch) as images:
        made, known = _make(cfg, compute, images)
        report = _report(name, cfg.kind, made)
        if not made.pairs:
            rejected = "".join(f"\n  rejected: {reason}" for reason in report.reasons())
            raise DataError(f"augment.{name}: no pair could be made of {cfg.source.root}{rejected}")
        _write(cfg.root, made.pairs, known)
    return report.write(Path(f"{cfg.root}.json"))


def _make(cfg: Edits | Neighbours | CoupledSamples, compute: Compute, images: Path) -> tuple[Made, Mapping[Path, str]]:
    """The pairs, and the digests of the images that they are made of; `images`: the folder for those that the source
    has in a Parquet file."""
    device = Device(gpu=compute.gpu, precision="bf16" if compute.gpu else "fp32")
    rejected = Rejected(cfg.edits if isinstance(cfg, Edits) else 1)
    use: Literal["instruction", "caption"] = "instruction" if isinstance(cfg, Edits) else "caption"
    originals = read_originals(cfg.source, images, compute.image_cache, rejected, use)
    if isinstance(cfg, CoupledSamples):
        made = make_coupled_samples(cfg, originals, rejected)
    else:
        writer = load_writer(cfg.writer, cfg.seed, compute.scratch / "answers.jsonl")
        if isinstance(cfg, Edits):
            editor = load_editor(cfg.editor, cfg.source, device)
            kept = kept_edits(cfg.editor, editor, compute.scratch)
            made = make_edits(cfg, originals, rejected, editor, writer, kept)
        else:
            known = known_pairs(cfg.source, images)
            made = make_neighbours(cfg, originals, known, rejected, Features(cfg.features, device), writer)
    return made, {each.image: each.digest for each in originals}


def kept_edits(cfg: Drawn | InstructPix2Pix, editor: Editor, scratch: Path) -> Path:
    """The folder of this editor's edits, whoever asked for them: by its settings, the identity of its weights wherever
    they are, and its code."""
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


def _require_ours(root: Path) -> None:
    """Raises DataError where the folder, which is written anew, may be another's: a collection may have our names; or
    where none can be written."""
    manifest, images = root / MANIFEST, root / IMAGES
    if root.is_symlink():
        raise DataError(f"{root}: is a link, whose place a folder would take; name the folder that it leads to")
    if taken := next((place for place in (root, *root.parents) if place.exists() and not place.is_dir()), None):
        raise DataError(f"{taken}: is no folder; name another root")
    strange = [path for path in sorted(root.glob("[!.]*")) if path not in (manifest, images)]
    strange += [path for path in sorted(images.glob("[!.]*")) if not OURS(path.name)]
    if strange:
        raise DataError(
            f"{strange[0].parent}: holds {strange[0].name!r}, which augment does not write; name another root"
        )
    if manifest.exists():
        with manifest.open(encoding="utf-8", errors="replace") as file, suppress(json.JSONDecodeError):
            first = json.loads(file.readline())
            if isinstance(first, dict) and "made" in first:
                return
        raise DataError(f"{manifest}: its rows say nothing of how they were made; name another root")


def _write(root: Path, pairs: list[Pair], known: Mapping[Path, str]) -> None:
    """The folder anew, next to the old one until it is whole: each image once, the manifest last.

    The old one goes last, also one that a kill between the renames left.
    """
    new, old = root.with_name(f".{root.name}.new"), root.with_name(f".{root.name}.old")
    shutil.rmtree(new, ignore_errors=True)  # of a run that was killed
    try:
        _fill(new, pairs, known)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)  # the error is reported, and a full disk may be its reason
        raise
    if root.exists():
        shutil.rmtree(old, ignore_errors=True)
        root.rename(old)
    new.rename(root)
    shutil.rmtree(old, ignore_errors=True)


def _fill(folder: Path, pairs: list[Pair], known: Mapping[Path, str]) -> None:
    """Write images and manifest. An image keeps a plain suffix of its name; else it gets one by its first bytes."""
    (folder / IMAGES).mkdir(parents=True)
    names: dict[Path, str] = {}
    lines = []
    for pair in progress(pairs, "augment: write", len(pairs), "pair"):
        for path in (pair.before, pair.after):
            if path in names:
                continue
            suffix = path.suffix.lower()
            if not PLAIN(suffix):
                with path.open("rb") as file:
                    data = file.read(4)
                suffix = next((each for start, each in SUFFIXES.items() if data.startswith(start)), "")
            names[path] = f"{IMAGES}/{(known.get(path) or sha256(path))[:32]}{suffix}"
            shutil.copyfile(path, folder / names[path])
        row: dict[str, Any] = pair._asdict() | {"before": names[pair.before], "after": names[pair.after]}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_atomic(folder / MANIFEST, "".join(lines))


def _report(name: str, kind: str, made: Made) -> AugmentReport:
    counts = {split: [len(pair.captions) for pair in made.pairs if pair.split == split] for split in SPLITS}
    rejected = {reason: times for reason, times in sorted(made.rejected.items()) if times}
    return AugmentReport(
        stage="augment",
        rows_in=len(made.pairs) + sum(rejected.values()),
        rows_out=len(made.pairs),
        dataset=name,
        kind=kind,
        pairs={split: len(captions) for split, captions in counts.items() if captions},
        references={split: sum(captions) for split, captions in counts.items() if captions},
        rejected=rejected,
        dropped_texts=dict(sorted(made.dropped_texts.items())),
        models={part: digest for part, digest in made.models.items() if digest},
        examples=made.rejected.examples,
    )
