"""augment: a raw dataset made from another, in the layout that the reader `pairs` reads; what follows knows no other.

    pairs.jsonl    {"id": "000123.png-0", "split": "train", "scene": "000123", "before": "images/1c0f....png", "after":
                    "images/77ab....png", "captions": ["..."], "change_types": ["color"], "made": {"seed": 7, ...}}
    images/        originals, copied, and edits; by their content

*Edits* (Syned, Evennou et al., WACV 2025, section 4.3): each original edited several times by its own instruction,
which is the caption; a writer's paraphrases are further references. Edits of one original differ by their seed alone.
They share its scene, its split and its types of change. An edit that shows the original, or what an earlier one shows,
pixel by pixel, is none; a pair whose paraphrases are fewer than asked for is left out, since scores move with the
number of references.

*Neighbours* (DiffCap's retrieved pairs, OneDiff, arXiv 2407.05645, section 3.2): images that are alike but not the
same, whose captions differ, with a caption of the difference that is written from the two. Each image is a query and
the others of its split are searched, so that no pair crosses splits. The caption is written from texts alone: what no
caption tells (on MiniChange camera and lamp) is not in it.

*Coupled samples* (OneDiff, section 4.2): two unrelated images with their captions become one pair, whose caption is
both captions, so that a new module learns to read both images before it learns to compare them. Within a split, in a
random order by the seed; each image is used once.

A made pair stays in the split of what it is made from. Where a source has a scene in two splits, the higher one (test,
val, train) keeps it, as validate decides. Rows that are not usable are counted by reason.

Edits and writers' answers are kept in `compute.scratch`, which several runs and worktrees may share, by what decides
them, for the run that goes on after a kill and for every later one:

    edits/drawn-9e1c40d2a7b35f68/77ab....png    by what decides an edit: the editor; original, instruction and seed
    augment-k3x9/                               a run's own, while it goes on

Equal settings, sources and models give equal bytes; of an endpoint's model that is what its kept answers are.
"""

import hashlib
import io
import json
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import getfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import polars as pl
from pydantic import Field

from m3diff.datasets import DATASETS
from m3diff.datasets.files import describe, fault_of_path, is_inside
from m3diff.datasets.spec import Row, check_licence, unpacked
from m3diff.images.check import OK, check_images
from m3diff.images.open import load_image
from m3diff.models.device import Device
from m3diff.provenance.cache import is_cached_object
from m3diff.provenance.code import key_of
from m3diff.records.errors import DataError
from m3diff.records.files import StageReport, new_folder, sha256, write_atomic
from m3diff.records.progress import progress
from m3diff.records.schemas import NO_CHANGE, SPLITS, Split
from m3diff.settings.compute import Compute
from m3diff.stages.augment.minichange import DrawnEditor
from m3diff.stages.augment.params import MANIFEST, CoupledSamples, Edits, MadeDataset, Neighbours, Source
from m3diff.stages.augment.weights import Features, Pix2PixEditor, nearest
from m3diff.stages.augment.writers import GrammarWriter, LanguageModel, Writer

IMAGES = "images"
# The files that augment writes, of earlier versions too: images by their content; and hidden ones
OURS = re.compile(rf"{re.escape(MANIFEST)}|{IMAGES}(/[0-9a-f]{{32}}(\..*)?)?|(.*/)?\.[^/]*").fullmatch

PLAIN = re.compile(r"\.\w+").fullmatch  # a suffix that stays
MAX_PIXELS = 100_000_000  # a larger image is not used


# `identity`: the digest of what decides its edits in addition to the parameters. `edit` returns the edited image, RGB,
# of the original's size; None where it cannot carry the instruction out
Editor = DrawnEditor | Pix2PixEditor


class Pair(NamedTuple):
    """A pair of images with its captions. `made` says how it came about, for people: the reader passes over it."""

    id: str
    split: str
    scene: str
    before: Path
    after: Path
    captions: list[str]
    change_types: Sequence[str]
    made: Mapping[str, Any]


@dataclass
class Made:
    """Pairs in order, and what was not made.

    Attributes:
        each: pairs that a row of the source would have given.
        rejected: counts of pairs that were not made, by reason.
        examples: for each reason in the source, the first row or image, and its fault.
        dropped_texts: counts of texts that a writer gave in vain, by reason.
        models: digests of what made the pairs, by its part.
    """

    each: int = 1
    pairs: list[Pair] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    dropped_texts: Counter[str] = field(default_factory=Counter)
    models: dict[str, str] = field(default_factory=dict)

    def reject(self, reason: str, example: str) -> None:
        """Count a row of the source from which nothing is made."""
        self.rejected[reason] += self.each
        self.examples.setdefault(reason, example)


class Original(NamedTuple):
    """An image of the source with its text: the instruction to edit it by, or a caption of its own."""

    name: str
    split: Split
    scene: str
    image: Path
    digest: str  # of the image file
    text: str
    change_types: Sequence[str] = ()
    caption: str | None = None  # of the image, where the text is an instruction and the source has one


def read_originals(
    source: Source, unpack_to: Path, image_cache: Path, made: Made, use: Literal["instruction", "caption"]
) -> list[Original]:
    """The usable images of the source's splits with their first texts; of each other row a reason is counted in `made`.

    An instruction is a reference of a pair, whose image before it edits. Captions are those of single images that the
    source's dataset describes, else of its pairs of an image with itself (the reader `pairs` with one column for both
    images).

    Args:
        unpack_to: the folder for images that are in a Parquet file.
        image_cache: what is known of images by content; it changes nothing of what is found.

    Raises:
        DataError: the source is not there, its annotation files cannot be used, or captions are wanted and it has none
            of single images.
    """
    singles = DATASETS[source.reader].singles
    rows = list(singles(source.root)) if singles else []
    captions = {place_of(source, row.before): _first(row.references) for row in rows}
    if use == "instruction" or not rows:
        rows = list(_rows(source, unpack_to))
    if use == "caption" and not any(row.fault or row.before == row.after for row in rows):
        raise DataError(
            f"{source.root}: has no captions of single images; read a list of images with captions by the reader pairs "
            "with options {columns: {before: image, after: image, captions: caption}}"
        )
    found = [(row, place_of(source, row.before)) for row in _usable(rows, source, made, use)]
    paths = pl.Series([str(image) for _, image in found if image], dtype=pl.String)
    checked = check_images(paths, MAX_PIXELS, image_cache, "augment").select("path", "verdict", "digest")
    known = {Path(path): (verdict, digest) for path, verdict, digest in checked.iter_rows()}
    originals = []
    for row, image in found:
        fault = f"{describe(row.before)} is no path inside {source.root}; correct the path; a link needs follow_links"
        if image is not None:
            verdict, digest = known[image]
            if verdict == OK:
                text = _first(row.references)
                originals.append(Original(*row[:3], image, digest.hex(), text, row.change_types, captions.get(image)))
                continue
            fault = f"{image}: {verdict}; {'restore it or save it anew' if image.exists() else 'fetch it'}"
        made.reject("image cannot be read", f"{row.source}: {fault}")
    return originals


def _usable(rows: Sequence[Row], source: Source, made: Made, use: str) -> Iterator[Row]:
    highest: dict[str, int] = {}
    for row in rows:
        if row.split in SPLITS and isinstance(row.scene, str):
            highest[row.scene] = max(SPLITS.index(row.split), highest.get(row.scene, 0))
    for row in rows:
        if row.split in SPLITS and row.split not in source.splits:
            continue
        if fault := row.fault or _ill_typed(row):
            made.reject("row cannot be read", f"{row.source}: {fault}")
        elif SPLITS.index(row.split) < highest[row.scene]:
            made.reject("scene is in a higher split", f"{row.source}: {row.scene} is in {SPLITS[highest[row.scene]]}")
        elif use == "caption" and row.before != row.after:
            made.reject("is a pair of two images", row.source)
        elif use == "instruction" and row.change_types == [NO_CHANGE]:
            made.reject("nothing is to change", row.source)
        elif not _first(row.references):
            made.reject(f"no {use}", row.source)
        else:
            yield row


def _ill_typed(row: Row) -> str | None:
    if row.split not in SPLITS:
        return f"split: expected one of {', '.join(SPLITS)}, found {describe(row.split)}"
    wrong = [name for name in ("name", "scene") if not isinstance(getattr(row, name), str)]
    return f"{wrong[0]}: expected a text, found {describe(getattr(row, wrong[0]))}" if wrong else None


def known_pairs(source: Source, unpack_to: Path) -> set[frozenset[Path | None]]:
    """The two images of each pair that the source has already."""
    return {frozenset((place_of(source, row.before), place_of(source, row.after))) for row in _rows(source, unpack_to)}


def _rows(source: Source, unpack_to: Path) -> Iterator[Row]:
    if not source.root.is_dir():
        raise DataError(f"{source.root}: is no folder; fetch the source or correct its root")
    rows = DATASETS[source.reader].read(source.root, **source.options)
    return unpacked((Row._make(map(_whole, row)) for row in rows if not row.without_caption), unpack_to)


def _whole(value: Any) -> Any:
    """The value with ? for half a character, as a cut JSON escape leaves it ("\\ud83d"): no file can hold that."""
    if isinstance(value, list):
        return [*map(_whole, value)]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def place_of(source: Source, image: Any) -> Path | None:
    """The path of an image; None where it would be outside the root, or no file can be called so."""
    if isinstance(image, Path):
        return image
    if not isinstance(image, str) or not image or fault_of_path(image, source.root):
        return None
    path = source.root / image
    is_own = source.follow_links or is_inside(path, source.root) or is_cached_object(str(path))
    return path if is_own else None


def _first(texts: Any) -> str:
    found = texts if isinstance(texts, list) else []
    return next((" ".join(text.split()) for text in found if isinstance(text, str) and text.strip()), "")


def seed_of(*facts: object) -> int:
    """A seed of 32 bits that follows from the facts."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, facts)).encode()).digest()[:4])


def make_edits(cfg: Edits, originals: list[Original], made: Made, editor: Editor, writer: Writer, into: Path) -> None:
    """Make the pairs of all originals.

    Args:
        into: the folder of this editor's edits. What another run has left there is not edited again.
    """
    made.models = {"editor": editor.identity, "writer": writer.identity}
    texts = {at: [original.text] for at, original in enumerate(originals)}
    for split, count in cfg.paraphrases.items():
        places = [at for at, original in enumerate(originals) if original.split == split] if count else []
        asked = [originals[at] for at in places]
        facts = [{"text": one.text} | ({"first": one.caption} if one.caption else {}) for one in asked]
        for at, written in zip(places, writer.write("paraphrase", facts, count), strict=True):
            texts[at] += written.texts
            made.dropped_texts += written.dropped
    for at, original in progress(enumerate(originals), "augment: edits", len(originals), "original"):
        if len(texts[at]) <= cfg.paraphrases.get(original.split, 0):
            made.rejected["too few paraphrases"] += cfg.edits
        else:
            _edit(cfg, original, texts[at], made, editor, into)


def _edit(cfg: Edits, original: Original, texts: list[str], made: Made, editor: Editor, into: Path) -> None:
    """Make the pairs of one original. A file of an edit is named by the content that is edited, how and by which
    seed."""
    name, split, scene, image, digest, instruction, kinds, _ = original
    shown = {_pixels(image)}
    for number in range(cfg.edits):
        seed = seed_of(cfg.seed, name, number)
        facts = f"{digest}\0{instruction}\0{seed}"
        file = into / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.png"
        if not file.exists():
            edited = editor.edit(image, instruction, seed)
            if edited is None:
                made.rejected["cannot be carried out"] += 1
                continue
            png = io.BytesIO()
            edited.save(png, "PNG", compress_level=4)
            write_atomic(file, png.getvalue())
        if (pixels := _pixels(file)) in shown:
            made.rejected["shows what another shows"] += 1
            continue
        shown.add(pixels)
        made.pairs.append(Pair(f"{name}-{number}", split, scene, image, file, texts, kinds, {"of": name, "seed": seed}))


def _pixels(image: Path) -> bytes:
    return hashlib.sha256(load_image(image).tobytes()).digest()


def make_neighbours(
    cfg: Neighbours,
    captioned: list[Original],
    known: set[frozenset],
    made: Made,
    features: Features,
    writer: Writer,
) -> None:
    """Make the pairs of all splits, with `cfg.references` captions each.

    Args:
        known: pairs of image paths that the source has already.
    """
    made.models = {"features": features.identity, "writer": writer.identity}
    chosen: dict[tuple[str, frozenset], tuple[Original, Original, float]] = {}
    for split in SPLITS:
        images = [each for each in captioned if each.split == split]
        if len(images) < 2:
            made.rejected.update({"alone in its split": 1} if images else {})
            continue
        cosines, numbers = nearest(features.features([each.image for each in images]), cfg.candidates)
        for query, alike, others in zip(images, cosines.tolist(), numbers.tolist(), strict=True):
            for cosine, number in zip(alike, others, strict=True):
                found = images[number]
                both = frozenset((query.image, found.image))
                if reason := _no_pair(cfg, query, found, cosine):
                    made.rejected[reason] += 1
                elif both in known or (split, both) in chosen:
                    made.rejected["is a pair of the source" if both in known else "was found the other way round"] += 1
                else:
                    chosen[split, both] = (query, found, cosine)
    facts = [{"first": query.text, "second": found.text} for query, found, _ in chosen.values()]
    texts = writer.write("difference", facts, cfg.references)
    for (query, found, cosine), written in zip(chosen.values(), texts, strict=True):
        made.dropped_texts += written.dropped
        if len(written.texts) < cfg.references:
            made.rejected["too few captions"] += 1
            continue
        # of two scenes, which are in one split, the pair has a scene of its own
        scene = query.scene if query.scene == found.scene else f"{query.scene}+{found.scene}"
        name, how = f"{query.name}+{found.name}", {"cosine": round(cosine, 4)}
        made.pairs.append(Pair(name, query.split, scene, query.image, found.image, list(written.texts), [], how))


def _no_pair(cfg: Neighbours, query: Original, found: Original, cosine: float) -> str | None:
    low, high = cfg.band
    if not low <= cosine <= high:
        return "too alike" if cosine > high else "too unlike"
    if query.digest == found.digest:
        return "same image"
    # the share of the words of both that both have, each as often as it occurs (Jaccard of multisets)
    one, other = (Counter(re.findall(r"\w+", each.text.lower())) for each in (query, found))
    if (one & other).total() / max(1, (one | other).total()) > cfg.max_text_similarity or query.text == found.text:
        return "captions are alike"
    return None


def make_coupled_samples(cfg: CoupledSamples, captioned: list[Original], made: Made) -> None:
    """Make the pairs of all splits. What is not usable counts as a pair that is not made, as does a last odd image."""
    for split in SPLITS:
        images = [each for each in captioned if each.split == split]
        random.Random(seed_of(cfg.seed, split)).shuffle(images)
        made.rejected.update({"no partner is left": 1} if len(images) % 2 else {})
        for one, two in zip(images[::2], images[1::2], strict=False):
            if one.scene == two.scene:
                made.rejected["both are of one scene"] += 1
                continue
            caption, scene = f"{one.text}{cfg.separator}{two.text}", f"{one.scene}+{two.scene}"
            made.pairs.append(Pair(f"{one.name}+{two.name}", split, scene, one.image, two.image, [caption], [], {}))


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


def augment(name: str, cfg: MadeDataset, compute: Compute) -> AugmentReport:
    """Write the dataset `name` of `params.yaml` to `cfg.root`, and the report to `<root>.json`.

    Raises:
        DataError: the source cannot be used, its licence excludes training, no pair could be made, or the root holds
            files of someone else.
        ParamsError: a model is not there or not the one that was named, or an endpoint refuses key or model.
        OtherServerError: stored answers are of another server, and the writer does not say what to do with them.
        ConnectionError: an endpoint cannot be reached or gives no answer in time; the next run goes on from there.
    """
    if notice := check_licence(DATASETS[cfg.source.reader], "train"):
        print(f"augment: {name}: made from {notice}", flush=True)
    _require_ours(cfg.root)
    compute.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=compute.scratch, prefix="augment-") as images:
        made = Made(each=cfg.edits if isinstance(cfg, Edits) else 1)
        originals = _make(cfg, compute, Path(images), made)
        report = _report(name, cfg.kind, made)
        if not made.pairs:
            rejected = "".join(f"\n  rejected: {reason}" for reason in report.reasons())
            raise DataError(f"augment.{name}: no pair could be made of {cfg.source.root}{rejected}")
        with new_folder(cfg.root) as folder:
            _fill(folder, made.pairs, {each.image: each.digest for each in originals})
    return report.write(Path(f"{cfg.root}.json"))


def _make(cfg: MadeDataset, compute: Compute, images: Path, made: Made) -> Sequence[Original]:
    """Make the pairs, and return what they are made of; `images`: the folder for those that the source has in a Parquet
    file."""
    use: Literal["instruction", "caption"] = "instruction" if isinstance(cfg, Edits) else "caption"
    originals = read_originals(cfg.source, images, compute.image_cache, made, use)
    if isinstance(cfg, CoupledSamples):
        make_coupled_samples(cfg, originals, made)
        return originals
    answers = compute.scratch / "answers.jsonl"
    writer: Writer
    writer = GrammarWriter() if cfg.writer.kind == "grammar" else LanguageModel(cfg.writer, cfg.seed, answers)
    device = Device(gpu=compute.gpu, precision="bf16" if compute.gpu else "fp32")
    if isinstance(cfg, Edits):
        editor: Editor
        editor = DrawnEditor(cfg.source.root) if cfg.editor.kind == "drawn" else Pix2PixEditor(cfg.editor, device)
        make_edits(cfg, originals, made, editor, writer, kept_edits(cfg, editor, compute.scratch))
    else:
        make_neighbours(cfg, originals, known_pairs(cfg.source, images), made, Features(cfg.features, device), writer)
    return originals


def kept_edits(cfg: Edits, editor: Editor, scratch: Path) -> Path:
    """The folder of this editor's edits, whoever asked for them: by its settings, the identity of its weights wherever
    they are, and its code."""
    settings = cfg.editor.model_dump(mode="json", exclude={"model", "sha256"})
    key = key_of({"settings": settings, "model": editor.identity}, Path(getfile(type(editor))))
    return scratch / "edits" / f"{cfg.editor.kind}-{key}"


def _require_ours(root: Path) -> None:
    """Raises DataError where the folder, which is written anew, may be another's: a collection may have our names."""
    if root.is_symlink() or (root.exists() and not root.is_dir()):
        raise DataError(f"{root}: is a link or a file; name another root, or the folder that the link leads to")
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))
    if strange := [name for name in names if not OURS(name)]:
        raise DataError(f"{root}: holds {strange[0]!r}, which augment does not write; name another root")
    manifest = root / MANIFEST
    if manifest.exists():
        with manifest.open(encoding="utf-8", errors="replace") as file:
            if '"made": ' not in file.readline():
                raise DataError(f"{manifest}: its rows say nothing of how they were made; name another root")


def _fill(folder: Path, pairs: list[Pair], known: Mapping[Path, str]) -> None:
    """Write images, each once, and the manifest last. An image keeps a plain suffix of its name."""
    (folder / IMAGES).mkdir(parents=True)
    names: dict[Path, str] = {}
    lines = []
    for pair in progress(pairs, "augment: write", len(pairs), "pair"):
        for path in (pair.before, pair.after):
            if path in names:
                continue
            suffix = path.suffix.lower() if PLAIN(path.suffix) else ""
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
        examples=made.examples,
    )
