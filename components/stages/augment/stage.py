"""augment: a raw dataset made from another, in the layout that the reader `pairs` reads; what follows knows no other.

    pairs.jsonl    {"id": "000123.png-0", "split": "train", "scene": "000123", "before": "images/1c0f....png", "after":
                    "images/77ab....png", "captions": ["..."], "change_types": ["color"], "made": {"seed": 7, ...}}
    images/        originals, copied, and edits; by their content

Edits and writers' answers are kept in `compute.scratch` by what decides them, for the run that goes on after a kill and
for every later one. Equal settings, sources and models give equal bytes; of an endpoint's model that is what its kept
answers are.
"""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from m3diff.datasets import DATASETS
from m3diff.datasets.spec import check_licence
from m3diff.datasets.tables import SUFFIXES
from m3diff.models.device import Device
from m3diff.records.errors import DataError
from m3diff.records.files import StageReport, sha256, write_atomic
from m3diff.records.progress import progress
from m3diff.records.schemas import SPLITS
from m3diff.settings.compute import Compute
from m3diff.stages.augment.coupled_samples import make_coupled_samples
from m3diff.stages.augment.edits import make_edits
from m3diff.stages.augment.load import load_editor, load_features, load_writer
from m3diff.stages.augment.neighbours import make_neighbours
from m3diff.stages.augment.pair import Made, Pair
from m3diff.stages.augment.params import MANIFEST, CoupledSamples, Edits, Neighbours
from m3diff.stages.augment.scratch import kept_edits, own_folder
from m3diff.stages.augment.source import Captioned, Original, Rejected, known_pairs, read_captioned, read_originals

IMAGES = "images"
OURS = re.compile(r"[0-9a-f]{32}(\..*)?").fullmatch  # an image's name, of earlier versions too: by its content
PLAIN = re.compile(r"\.\w+").fullmatch  # a suffix that stays


class AugmentReport(StageReport):
    """What was made of one source. `rows_in` are the pairs that were tried: those made and those rejected."""

    dataset: str
    kind: str
    pairs: dict[str, int]  # by split
    references: dict[str, int]
    rejected: dict[str, int]  # pairs, by reason
    dropped_texts: dict[str, int]  # of a writer's answers, by reason
    models: dict[str, str]  # digests of the editor's, writer's and encoder's weights; of an endpoint, the model's name
    examples: dict[str, str] = Field(default_factory=dict, exclude=True)  # by reason; for people, and in no file

    def reasons(self) -> Iterator[str]:
        """How many pairs were rejected, why, and, where that lies in the source, the first row and what it has."""
        for reason, count in self.rejected.items():
            first = f"; the first: {self.examples[reason]}" if reason in self.examples else ""
            yield f"{count:,}: {reason}{first}"


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
    _see_ours(cfg.root)
    with own_folder(compute.scratch) as images:
        made, digests = _make(cfg, compute, images)
        report = _report(name, cfg.kind, made)
        if not made.pairs:
            told = "".join(f"\n  rejected: {reason}" for reason in report.reasons())
            raise DataError(f"augment.{name}: no pair could be made of {cfg.source.root}{told}")
        _write(cfg.root, made.pairs, digests)
    return report.write(Path(f"{cfg.root}.json"))


def _make(cfg: Edits | Neighbours | CoupledSamples, compute: Compute, images: Path) -> tuple[Made, Mapping[Path, str]]:
    """The pairs, and the digests of the images that they are made of; `images`: the folder for those that the source
    has in a Parquet file."""
    device = Device(gpu=compute.gpu, precision="bf16" if compute.gpu else "fp32")
    answers, cache = compute.scratch / "answers.jsonl", compute.image_cache
    rejected = Rejected()
    match cfg:
        case Edits():
            originals = read_originals(cfg.source, images, cache, rejected)
            editor = load_editor(cfg.editor, cfg.source, device)
            writer = load_writer(cfg.writer, cfg.seed, answers)
            kept = kept_edits(cfg.editor, editor, compute.scratch)
            return make_edits(cfg, originals, rejected, editor, writer, kept), _digests(originals)
        case Neighbours():
            captioned = read_captioned(cfg.source, images, cache, rejected)
            writer = load_writer(cfg.writer, cfg.seed, answers)
            features, known = load_features(cfg.features, device), known_pairs(cfg.source, images)
            return make_neighbours(cfg, captioned, known, rejected, features, writer), _digests(captioned)
        case CoupledSamples():
            captioned = read_captioned(cfg.source, images, cache, rejected)
            return make_coupled_samples(cfg, captioned, rejected), _digests(captioned)


def _digests(images: Sequence[Original | Captioned]) -> dict[Path, str]:
    return {each.image: each.digest for each in images}


def _see_ours(root: Path) -> None:
    """Raises DataError where the folder, which is written anew, may be another's: a collection may have our names; or
    where none can be written."""
    if root.is_symlink():
        raise DataError(f"{root}: is a link, whose place a folder would take; name the folder that it leads to")
    if taken := next((place for place in (root, *root.parents) if place.exists() and not place.is_dir()), None):
        raise DataError(f"{taken}: is no folder; name another root")
    if strange := sorted(path.name for path in root.glob("[!.]*") if path.name not in (MANIFEST, IMAGES)):
        raise DataError(f"{root}: holds {strange[0]!r}, which augment does not write; name another root")
    if not root.is_dir():
        return
    if theirs := next((path.name for path in sorted((root / IMAGES).glob("[!.]*")) if not OURS(path.name)), None):
        raise DataError(f"{root / IMAGES}: holds {theirs!r}, which augment does not write; name another root")
    if (root / MANIFEST).exists() and not _is_made(root / MANIFEST):
        raise DataError(f"{root / MANIFEST}: its rows say nothing of how they were made; name another root")


def _is_made(manifest: Path) -> bool:
    """Whether the first row is one that augment writes."""
    with manifest.open(encoding="utf-8", errors="replace") as file:
        line = file.readline()
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return False
    return isinstance(row, dict) and "made" in row


def _write(root: Path, pairs: list[Pair], digests: Mapping[Path, str]) -> None:
    """The folder anew, beside the old one until it is whole: each image once, the manifest last."""
    new = root.with_name(f".{root.name}.new")
    if new.exists():
        shutil.rmtree(new)  # of a run that was killed
    try:
        _fill(new, pairs, digests)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)  # the error is told, and a full disk may be its reason
        raise
    _swap(new, root)


def _fill(folder: Path, pairs: list[Pair], digests: Mapping[Path, str]) -> None:
    (folder / IMAGES).mkdir(parents=True)
    names: dict[Path, str] = {}
    lines = []
    for pair in progress(pairs, "augment: write", len(pairs), "pair"):
        for path in (pair.before, pair.after):
            if path not in names:
                names[path] = f"{IMAGES}/{(digests.get(path) or sha256(path))[:32]}{_suffix(path)}"
                shutil.copyfile(path, folder / names[path])
        row: dict[str, Any] = pair._asdict() | {"before": names[pair.before], "after": names[pair.after]}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_atomic(folder / MANIFEST, "".join(lines).encode("utf-8", "replace"))  # a writer's half characters too


def _suffix(image: Path) -> str:
    """The suffix of its name where that is a plain one, else by its first bytes."""
    suffix = image.suffix.lower()
    if PLAIN(suffix):
        return suffix
    with image.open("rb") as file:
        data = file.read(4)
    return next((known for start, known in SUFFIXES.items() if data.startswith(start)), "")


def _swap(new: Path, root: Path) -> None:
    """The new folder in the place of the old one, which goes last: also one that a kill between the renames left."""
    old = root.with_name(f".{root.name}.old")
    if root.exists():
        if old.exists():
            shutil.rmtree(old)
        root.rename(old)
    new.rename(root)
    if old.exists():
        shutil.rmtree(old)


def _report(name: str, kind: str, made: Made) -> AugmentReport:
    references: Counter[str] = Counter()
    for pair in made.pairs:
        references[pair.split] += len(pair.captions)
    counted = Counter(pair.split for pair in made.pairs)
    rejected = {reason: count for reason, count in sorted(made.rejected.items()) if count}
    return AugmentReport(
        stage="augment",
        rows_in=len(made.pairs) + sum(rejected.values()),
        rows_out=len(made.pairs),
        dataset=name,
        kind=kind,
        pairs={split: counted[split] for split in SPLITS if counted[split]},
        references={split: references[split] for split in SPLITS if counted[split]},
        rejected=rejected,
        dropped_texts=dict(sorted(made.dropped_texts.items())),
        models={part: digest for part, digest in made.models.items() if digest},
        examples={reason: first for reason, first in made.rejected.examples.items() if reason in rejected},
    )
