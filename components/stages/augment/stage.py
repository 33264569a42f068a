"""Stage `augment`: make synthetic pairs from a raw dataset, and write them in the layout of the reader `pairs`.

    pairs.jsonl    {"id": "000123.png-0", "split": "train", "scene": "000123", "before": "images/1c0f....png", "after":
                    "images/77ab....png", "captions": ["..."], "change_types": ["color"], "made": {"seed": 7, ...}}
    images/        copies of the originals and the edits, named by their content

*Edits* (Syned, Evennou et al., WACV 2025, section 4.3): each original image is edited several times according to its
instruction, and the instruction becomes the caption. A writer paraphrases the instruction, and the paraphrases become
additional references. The edits of an original use different seeds, and have the scene, split and change types of the
original. An edit is rejected if its pixels equal those of the original or of an earlier edit. A pair with too few
paraphrases is also rejected, because scores depend on the number of references.

*Neighbours* (DiffCap's retrieved pairs, OneDiff, arXiv 2407.05645, section 3.2): two similar images with different
captions become a pair. A writer describes the difference, given both captions. The two images are always from the same
split. Differences that the captions do not mention (in MiniChange, camera and lamp) are missing from the description.

*Coupled samples* (OneDiff, section 4.2): two unrelated images become a pair, and their captions are joined. With such
pairs, the new parts of a model learn to read two images before they learn to compare them. Images are paired at random
within a split, and each image is used at most once.

A synthetic pair is in the same split as the images that it is made from. If a scene of the source is in several splits,
only its rows in the highest split (test, then val, then train) are used, as in validate. Unusable rows are counted by
reason.

Edits and answers of writers are cached in `compute.scratch`. A new run after a killed run continues from this cache,
and later runs reuse it. Several runs and worktrees may share the folder:

    edits/drawn-9e1c40d2a7b35f68/77ab....png    <editor and its settings>/<original, instruction and seed>
    augment-k3x9/                               temporary files of a run

The same settings, source and models always produce the same bytes. With an endpoint, this requires the same stored
answers.
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
from dataclasses import dataclass, field, replace
from inspect import getfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import polars as pl
from pydantic import Field

from m3diff.datasets import DATASETS
from m3diff.datasets.files import describe, fault_of_path, is_inside
from m3diff.datasets.spec import Row, check_licence, unexpected, unpack_images
from m3diff.endpoint.questions import replace_surrogates
from m3diff.images.check import OK, check_images
from m3diff.images.open import load_image
from m3diff.models.device import Device
from m3diff.provenance.cache import is_cached_object
from m3diff.provenance.code import compute_key
from m3diff.records.errors import DataError, Fault
from m3diff.records.files import StageReport, new_folder, sha256, write_atomic
from m3diff.records.progress import progress
from m3diff.records.schemas import NO_CHANGE, SPLITS, Split
from m3diff.settings.compute import Compute
from m3diff.stages.augment.minichange import DrawnEditor
from m3diff.stages.augment.params import MANIFEST, AnySyntheticDataset, CoupledSamples, Edits, Neighbours, RawSource
from m3diff.stages.augment.weights import Features, Pix2PixEditor, find_nearest
from m3diff.stages.augment.writers import GrammarWriter, LanguageModel, Writer

IMAGES = "images"
# Fields of a row that contain text
TEXT_FIELDS = ("name", "split", "scene", "references", "source", "change_types")
# The stage replaces a folder only if all files in the folder match this pattern: the manifest, images named by their
# content, and hidden files that other programs create (.gitignore, .DS_Store)
WRITTEN_FILE = re.compile(rf"{re.escape(MANIFEST)}|{IMAGES}(/[0-9a-f]{{32}}(\.\w+)?)?|(.*/)?\.[^/]*")

PLAIN_SUFFIX = re.compile(r"\.\w+")
MAX_PIXELS = 100_000_000  # maximum number of pixels after padding to a square; larger images are not used


# `identity` is a digest of everything besides the parameters that determines an edit. `edit` returns the edited image
# in RGB and in the size of the original, or None if the editor cannot carry out the instruction
Editor = DrawnEditor | Pix2PixEditor


class Pair(NamedTuple):
    """A row of the manifest. `made` documents how the pair was made. The reader ignores it."""

    id: str
    split: str
    scene: str
    before: Path
    after: Path
    captions: list[str]
    change_types: Sequence[str]
    made: Mapping[str, Any]


@dataclass
class AugmentResult:
    """The new pairs, and the number of pairs that could not be made.

    Attributes:
        pairs_per_row: number of pairs that are made from a row of the source.
        pairs: the pairs in order.
        rejected: number of pairs that could not be made, by reason.
        examples: for each reason that is a fault of the source, the first row or image with this fault.
        dropped_texts: number of unusable texts of a writer, by reason.
        models: identity of each model that was used, by role.
    """

    pairs_per_row: int = 1
    pairs: list[Pair] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    dropped_texts: Counter[str] = field(default_factory=Counter)
    models: dict[str, str] = field(default_factory=dict)

    def reject(self, reason: str, example: str) -> None:
        """Count a row of the source that cannot be used, and keep the first example for each reason."""
        self.rejected[reason] += self.pairs_per_row
        self.examples.setdefault(reason, example)


class Original(NamedTuple):
    """An image of the source with its text.

    Attributes:
        name: name of the row.
        split: split of the row.
        scene: scene of the row.
        image: path of the image.
        digest: digest of the image file.
        text: an instruction to edit the image, or its caption.
        change_types: change types of the instruction.
        caption: caption of the image, or None if the source does not have captions of single images.
    """

    name: str
    split: Split
    scene: str
    image: Path
    digest: str
    text: str
    change_types: Sequence[str] = ()
    caption: str | None = None


def read_originals(
    source: RawSource, unpack_to: Path, image_cache: Path, result: AugmentResult, use: Literal["instruction", "caption"]
) -> list[Original]:
    """Return the usable images in the source's splits, each with its first text. Other rows are counted as rejected.

    The text is an instruction or a caption. Instructions are the references of pairs, and are used to edit the before
    images. Captions are taken from the source's captions of single images. If the source does not have any, they are
    taken from pairs in which both images are the same (the reader `pairs` with the same column for both images).

    Args:
        source: the source dataset.
        unpack_to: folder to which images inside a Parquet file are extracted.
        image_cache: Parquet file that caches verdicts by content. It does not change the result.
        result: collects the rejected rows.
        use: whether the texts are instructions or captions.

    Raises:
        DataError: the source does not exist, its annotation files cannot be used, or captions are required but single
            images have none.
    """
    read_single_images = DATASETS[source.reader].singles
    single_rows = list(read_single_images(source.root)) if read_single_images else []
    caption_of_image = {image_path(source, row.images[0]): _first_text(row.references) for row in single_rows}
    rows = single_rows
    if use == "instruction" or not single_rows:
        rows = list(_read_rows(source, unpack_to))
    has_captions = any(row.fault or (len(row.images) == 2 and row.images[0] == row.images[1]) for row in rows)
    if use == "caption" and not has_captions:
        raise DataError("augment.no_captions_of_images", path=source.root)
    rows_with_image = [(row, image_path(source, row.images[0])) for row in _usable_rows(rows, source, result, use)]
    paths = pl.Series([str(image) for _, image in rows_with_image if image], dtype=pl.String)
    verdicts = check_images(paths, MAX_PIXELS, image_cache, "augment").select("path", "verdict", "digest")
    check_of_image = {Path(path): (verdict, digest) for path, verdict, digest in verdicts.iter_rows()}
    originals = []
    for row, image in rows_with_image:
        if image is None:
            fault = Fault("augment.image_outside_source", path=source.root, value=describe(row.images[0]))
            result.reject("image cannot be read", f"{row.source}: {fault}")
            continue
        verdict, digest = check_of_image[image]
        if verdict != OK:
            result.reject("image cannot be read", f"{row.source}: {image}: {verdict}")
            continue
        original = Original(
            name=row.name,
            split=row.split,
            scene=row.scene,
            image=image,
            digest=digest.hex(),
            text=_first_text(row.references),
            change_types=row.change_types,
            caption=caption_of_image.get(image),
        )
        originals.append(original)
    return originals


def _usable_rows(rows: Sequence[Row], source: RawSource, result: AugmentResult, use: str) -> Iterator[Row]:
    """Yield the rows from which pairs can be made, and count all other rows in the source's splits as rejected."""
    highest_splits = _highest_split_by_scene(rows)
    for row in rows:
        if row.split in SPLITS and row.split not in source.splits:
            continue
        fault = row.fault or _type_fault(row)
        if fault:
            result.reject("row cannot be read", f"{row.source}: {fault}")
        elif row.split != highest_splits[row.scene]:
            example = f"{row.source}: {row.scene} is in {highest_splits[row.scene]}"
            result.reject("scene is in a higher split", example)
        elif row.question is not None:
            result.reject("has a question of its own", row.source)
        elif use == "caption" and row.images[0] != row.images[1]:
            result.reject("is a pair of two images", row.source)
        elif use == "instruction" and row.change_types == [NO_CHANGE]:
            result.reject("nothing is to change", row.source)
        elif not _first_text(row.references):
            result.reject(f"no {use}", row.source)
        else:
            yield row


def _highest_split_by_scene(rows: Sequence[Row]) -> dict[str, Split]:
    """Return the highest split of each scene: test, then val, then train. Rows with an unknown split do not count."""
    highest_splits: dict[str, Split] = {}
    for row in rows:
        if row.split not in SPLITS or not isinstance(row.scene, str):
            continue
        highest_split = highest_splits.setdefault(row.scene, row.split)
        if SPLITS.index(row.split) > SPLITS.index(highest_split):
            highest_splits[row.scene] = row.split
    return highest_splits


def _type_fault(row: Row) -> Fault | None:
    """Return a fault if the row has an unknown split, or a name or scene that is not text, otherwise None."""
    if row.split not in SPLITS:
        return unexpected("split", f"one of {', '.join(SPLITS)}", row.split)
    for field_name, value in (("name", row.name), ("scene", row.scene)):
        if not isinstance(value, str):
            return unexpected(field_name, "text", value)
    return None


def read_source_pairs(source: RawSource, unpack_to: Path) -> set[frozenset[Path | None]]:
    """Return the existing pairs in the source, each as the set of its two image paths."""
    pairs = set()
    for row in _read_rows(source, unpack_to):
        pairs.add(frozenset(image_path(source, image) for image in row.images))
    return pairs


def _read_rows(source: RawSource, unpack_to: Path) -> Iterator[Row]:
    """Read the captioned rows of the source. Extract images inside a Parquet file to `unpack_to`."""
    if not source.root.is_dir():
        raise DataError("augment.no_source_folder", path=source.root)
    rows = DATASETS[source.reader].read(source.root, **source.options)
    captioned_rows = (_make_writable(row) for row in rows if not row.without_caption)
    return unpack_images(captioned_rows, unpack_to)


def _make_writable(row: Row) -> Row:
    """Replace lone surrogates in the texts of a row by question marks.

    Lone surrogates result from truncated JSON escapes ("\\ud83d") and cannot be written to a file.
    """
    texts = {name: _replace_surrogates_in_texts(getattr(row, name)) for name in TEXT_FIELDS}
    images = tuple(map(_replace_surrogates_in_texts, row.images))
    return replace(row, images=images, **texts)


def _replace_surrogates_in_texts(value: Any) -> Any:
    """Replace lone surrogates in a text, or in all texts of a list. Return other values as they are."""
    if isinstance(value, list):
        return [_replace_surrogates_in_texts(item) for item in value]
    return replace_surrogates(value) if isinstance(value, str) else value


def image_path(source: RawSource, image: Any) -> Path | None:
    """Return the path of an image, or None if it is not a valid path or is outside the source's root."""
    if isinstance(image, Path):
        return image
    if not isinstance(image, str) or not image or fault_of_path(image, source.root):
        return None
    path = source.root / image
    is_allowed = source.follow_links or is_inside(path, source.root) or is_cached_object(str(path))
    return path if is_allowed else None


def _first_text(texts: Any) -> str:
    """Return the first non-blank text with single spaces, or an empty string if there is none."""
    if isinstance(texts, list):
        for text in texts:
            if isinstance(text, str) and text.strip():
                return " ".join(text.split())
    return ""


def seed_of(*facts: object) -> int:
    """Return a 32-bit seed that depends only on the given facts."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, facts)).encode()).digest()[:4])


def make_edits(
    cfg: Edits, originals: list[Original], result: AugmentResult, editor: Editor, writer: Writer, edits_folder: Path
) -> None:
    """Make the edited pairs for all originals and add them to the result.

    Args:
        cfg: settings of the dataset.
        originals: images with instructions.
        result: collects the pairs and counts.
        editor: edits the images.
        writer: paraphrases the instructions.
        edits_folder: folder that caches the edits of this editor. Edits from earlier runs are reused.
    """
    result.models = {"editor": editor.identity, "writer": writer.identity}
    texts_of_originals = _write_paraphrases(cfg, originals, result, writer)
    originals_with_texts = zip(originals, texts_of_originals, strict=True)
    for original, texts in progress(originals_with_texts, "augment: edits", len(originals), "original"):
        paraphrase_count = len(texts) - 1
        if paraphrase_count < cfg.paraphrases.get(original.split, 0):
            result.rejected["too few paraphrases"] += cfg.edits
        else:
            _edit_original(cfg, original, texts, result, editor, edits_folder)


def _write_paraphrases(cfg: Edits, originals: list[Original], result: AugmentResult, writer: Writer) -> list[list[str]]:
    """Return the instruction of each original, followed by its paraphrases. Dropped texts are counted in the result."""
    texts = [[original.text] for original in originals]
    for split, count in cfg.paraphrases.items():
        numbers = []
        if count:
            numbers = [number for number, original in enumerate(originals) if original.split == split]
        facts = [_facts_for_paraphrase(originals[number]) for number in numbers]
        paraphrases = writer.write("paraphrase", facts, count)
        for number, output in zip(numbers, paraphrases, strict=True):
            texts[number] += output.texts
            result.dropped_texts += output.dropped_texts
    return texts


def _facts_for_paraphrase(original: Original) -> dict[str, str]:
    """Return the facts for a writer: the instruction, and the caption of the image if it is known."""
    facts = {"text": original.text}
    if original.caption:
        facts["first"] = original.caption
    return facts


def _edit_original(
    cfg: Edits, original: Original, texts: list[str], result: AugmentResult, editor: Editor, edits_folder: Path
) -> None:
    """Make the edited pairs for one original and add them to the result.

    The name of an edit's file is a hash of the original's content, the instruction and the seed.
    """
    pixel_digests = {_digest_of_pixels(original.image)}
    for number in range(cfg.edits):
        seed = seed_of(cfg.seed, original.name, number)
        edit_facts = f"{original.digest}\0{original.text}\0{seed}"
        file_key = hashlib.sha256(edit_facts.encode()).hexdigest()[:32]
        file = edits_folder / f"{file_key}.png"
        if not file.exists():
            edited_image = editor.edit(original.image, original.text, seed)
            if edited_image is None:
                result.rejected["cannot be carried out"] += 1
                continue
            png = io.BytesIO()
            edited_image.save(png, "PNG", compress_level=4)
            write_atomic(file, png.getvalue())
        pixel_digest = _digest_of_pixels(file)
        if pixel_digest in pixel_digests:
            result.rejected["shows what another shows"] += 1
            continue
        pixel_digests.add(pixel_digest)
        pair = Pair(
            id=f"{original.name}-{number}",
            split=original.split,
            scene=original.scene,
            before=original.image,
            after=file,
            captions=texts,
            change_types=original.change_types,
            made={"of": original.name, "seed": seed},
        )
        result.pairs.append(pair)


def _digest_of_pixels(image: Path) -> bytes:
    """Return the SHA-256 of an image's pixels in RGB. Files with equal pixels may differ in their bytes."""
    return hashlib.sha256(load_image(image).tobytes()).digest()


def make_neighbours(
    cfg: Neighbours,
    originals: list[Original],
    source_pairs: set[frozenset],
    result: AugmentResult,
    features: Features,
    writer: Writer,
) -> None:
    """Make pairs of similar images in all splits and add them to the result. Each pair has `cfg.references` captions.

    Args:
        cfg: settings of the dataset.
        originals: images with captions.
        source_pairs: image paths of the existing pairs in the source.
        result: collects the pairs and counts.
        features: computes the image features that are compared.
        writer: describes the difference between two images from their captions.
    """
    result.models = {"features": features.identity, "writer": writer.identity}
    neighbour_pairs: list[NeighbourPair] = []
    for split in SPLITS:
        images = [original for original in originals if original.split == split]
        if len(images) == 1:
            result.rejected["alone in its split"] += 1
        elif images:
            neighbour_pairs += _find_neighbours(cfg, images, source_pairs, result, features)
    facts = [{"first": pair.query.text, "second": pair.neighbour.text} for pair in neighbour_pairs]
    captions = writer.write("difference", facts, cfg.references)
    for neighbour_pair, output in zip(neighbour_pairs, captions, strict=True):
        result.dropped_texts += output.dropped_texts
        if len(output.texts) < cfg.references:
            result.rejected["too few captions"] += 1
            continue
        query = neighbour_pair.query
        neighbour = neighbour_pair.neighbour
        # A pair of images from two different scenes forms a new scene
        scene = query.scene if query.scene == neighbour.scene else f"{query.scene}+{neighbour.scene}"
        pair = Pair(
            id=f"{query.name}+{neighbour.name}",
            split=query.split,
            scene=scene,
            before=query.image,
            after=neighbour.image,
            captions=list(output.texts),
            change_types=[],
            made={"cosine": round(neighbour_pair.cosine, 4)},
        )
        result.pairs.append(pair)


class NeighbourPair(NamedTuple):
    """Two similar images, and the cosine similarity of their features."""

    query: Original
    neighbour: Original
    cosine: float


def _find_neighbours(
    cfg: Neighbours, images: list[Original], source_pairs: set[frozenset], result: AugmentResult, features: Features
) -> list[NeighbourPair]:
    """Return the distinct pairs of similar images in one split. Unsuitable candidates are counted as rejected."""
    pairs: dict[frozenset, NeighbourPair] = {}
    feature_matrix = features.features([original.image for original in images])
    all_cosines, all_numbers = find_nearest(feature_matrix, cfg.candidates)
    for query, cosines, numbers in zip(images, all_cosines.tolist(), all_numbers.tolist(), strict=True):
        for cosine, number in zip(cosines, numbers, strict=True):
            neighbour = images[number]
            paths = frozenset((query.image, neighbour.image))
            reason = _rejection_reason(cfg, query, neighbour, cosine)
            if reason is not None:
                result.rejected[reason] += 1
            elif paths in source_pairs:
                result.rejected["is a pair of the source"] += 1
            elif paths in pairs:
                result.rejected["was found the other way round"] += 1
            else:
                pairs[paths] = NeighbourPair(query=query, neighbour=neighbour, cosine=cosine)
    return list(pairs.values())


def _rejection_reason(cfg: Neighbours, query: Original, neighbour: Original, cosine: float) -> str | None:
    """Return the reason why two images are not suitable as a pair, or None if they are suitable."""
    min_cosine, max_cosine = cfg.band
    if cosine > max_cosine:
        return "too alike"
    if not cosine >= min_cosine:  # also true if the cosine is NaN
        return "too unlike"
    if query.digest == neighbour.digest:
        return "same image"
    if query.text == neighbour.text or _text_similarity(query.text, neighbour.text) > cfg.max_text_similarity:
        return "captions are alike"
    return None


def _text_similarity(text: str, other_text: str) -> float:
    """Return the share of words that two texts have in common (Jaccard index of multisets of words)."""
    words = Counter(re.findall(r"\w+", text.lower()))
    other_words = Counter(re.findall(r"\w+", other_text.lower()))
    common_words = words & other_words
    distinct_words = words | other_words
    return common_words.total() / max(1, distinct_words.total())


def make_coupled_samples(cfg: CoupledSamples, originals: list[Original], result: AugmentResult) -> None:
    """Make pairs of unrelated images in all splits and add them to the result.

    Two images of the same scene count as rejected. If the number of images is odd, the last image also counts as
    rejected.
    """
    for split in SPLITS:
        images = [original for original in originals if original.split == split]
        random.Random(seed_of(cfg.seed, split)).shuffle(images)
        if len(images) % 2:
            result.rejected["no partner is left"] += 1
        for before, after in zip(images[::2], images[1::2], strict=False):
            if before.scene == after.scene:
                result.rejected["both are of one scene"] += 1
                continue
            pair = Pair(
                id=f"{before.name}+{after.name}",
                split=split,
                scene=f"{before.scene}+{after.scene}",
                before=before.image,
                after=after.image,
                captions=[f"{before.text}{cfg.separator}{after.text}"],
                change_types=[],
                made={},
            )
            result.pairs.append(pair)


class AugmentReport(StageReport):
    """Counts of one synthetic dataset. `rows_in` counts all attempted pairs, including rejected pairs.

    Attributes:
        dataset: name of the dataset.
        kind: kind of the synthetic data.
        pairs: number of pairs per split.
        references: number of captions per split.
        rejected: number of pairs that could not be made, by reason.
        dropped_texts: number of unusable texts of a writer, by reason.
        models: identity of each model that was used, by role. The identity is a digest, or the model's name for an
            endpoint.
        examples: the first row or image for each reason. Examples are printed, but not written to the report file.
    """

    dataset: str
    kind: str
    pairs: dict[str, int]
    references: dict[str, int]
    rejected: dict[str, int]
    dropped_texts: dict[str, int]
    models: dict[str, str]
    examples: dict[str, str] = Field(default_factory=dict, exclude=True)

    def reasons(self) -> Iterator[str]:
        """Yield one line per reason with the number of rejected pairs.

        If the reason is a fault of the source, the line includes the first example.
        """
        for reason, pairs in self.rejected.items():
            example = f"; the first: {self.examples[reason]}" if reason in self.examples else ""
            yield f"{pairs:,}: {reason}{example}"


def augment(name: str, cfg: AnySyntheticDataset, compute: Compute) -> AugmentReport:
    """Write a synthetic dataset to `cfg.root` and its report to `<root>.json`.

    Args:
        name: name of the dataset in the section `augment`.
        cfg: settings of the dataset.
        compute: the section `compute`.

    Raises:
        DataError: the source cannot be used, its licence does not allow training, no pairs could be made, or the root
            contains files that this stage did not write.
        ParamsError: a model is missing or has an unexpected digest, or an endpoint rejects the key or the model.
        OtherServerError: stored answers may come from another server, and the writer's settings do not specify what to
            do with them.
        ConnectionError: an endpoint cannot be reached or does not answer in time. The next run reuses the answers that
            were received.
    """
    notice = check_licence(DATASETS[cfg.source.reader], "train")
    if notice:
        print(f"augment: {name}: made from {notice}", flush=True)
    _refuse_foreign_files(cfg.root)
    compute.scratch.mkdir(parents=True, exist_ok=True)
    pairs_per_row = cfg.edits if isinstance(cfg, Edits) else 1
    with tempfile.TemporaryDirectory(dir=compute.scratch, prefix="augment-") as unpacked_images:
        result = AugmentResult(pairs_per_row)
        originals = _make_pairs(cfg, compute, Path(unpacked_images), result)
        report = _make_report(name, cfg.kind, result)
        if not result.pairs:
            raise DataError("augment.no_pair", dataset=name, path=cfg.source.root, reasons=list(report.reasons()))
        digests = {original.image: original.digest for original in originals}
        with new_folder(cfg.root) as folder:
            _write_dataset(folder, result.pairs, digests)
    return report.write(Path(f"{cfg.root}.json"))


def _make_pairs(
    cfg: AnySyntheticDataset, compute: Compute, unpack_to: Path, result: AugmentResult
) -> Sequence[Original]:
    """Make all pairs, add them to the result, and return the original images.

    Images in a Parquet file are extracted to the folder `unpack_to`.
    """
    use: Literal["instruction", "caption"] = "instruction" if isinstance(cfg, Edits) else "caption"
    originals = read_originals(cfg.source, unpack_to, compute.image_cache, result, use)
    if isinstance(cfg, CoupledSamples):
        make_coupled_samples(cfg, originals, result)
        return originals
    writer: Writer = GrammarWriter()
    if cfg.writer.kind == "endpoint":
        writer = LanguageModel(cfg.writer, cfg.seed, compute.scratch / "answers.jsonl")
    precision: Literal["bf16", "fp32"] = "bf16" if compute.gpu else "fp32"
    device = Device(gpu=compute.gpu, precision=precision)
    if isinstance(cfg, Edits):
        editor: Editor
        editor = DrawnEditor(cfg.source.root) if cfg.editor.kind == "drawn" else Pix2PixEditor(cfg.editor, device)
        edits_folder = cached_edits_folder(cfg, editor, compute.scratch)
        make_edits(cfg, originals, result, editor, writer, edits_folder)
    else:
        source_pairs = read_source_pairs(cfg.source, unpack_to)
        features = Features(cfg.features, device)
        make_neighbours(cfg, originals, source_pairs, result, features, writer)
    return originals


def cached_edits_folder(cfg: Edits, editor: Editor, scratch: Path) -> Path:
    """Return the cache folder for edits. Runs with the same editor settings, weights and code share this folder."""
    settings = cfg.editor.model_dump(mode="json", exclude={"model", "sha256"})
    key = compute_key({"settings": settings, "model": editor.identity}, Path(getfile(type(editor))))
    return scratch / "edits" / f"{cfg.editor.kind}-{key}"


def _refuse_foreign_files(root: Path) -> None:
    """Check that the folder to be replaced contains only files that this stage wrote.

    Raises:
        DataError: the folder is a link or a file, or it contains files of another program. A manifest without the key
            `made` counts as such a file.
    """
    if root.is_symlink() or (root.exists() and not root.is_dir()):
        raise DataError("augment.root_is_no_folder", path=root)
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))
    foreign_names = [name for name in names if not WRITTEN_FILE.fullmatch(name)]
    if foreign_names:
        raise DataError("augment.foreign_file", path=root, value=foreign_names[0])
    manifest = root / MANIFEST
    if manifest.exists():
        with manifest.open(encoding="utf-8", errors="replace") as file:
            if '"made": ' not in file.readline():
                raise DataError("augment.foreign_manifest", path=manifest)


def _write_dataset(folder: Path, pairs: list[Pair], digests: Mapping[Path, str]) -> None:
    """Copy each image once, then write the manifest.

    The copies are named by their content. The suffix of the original name is kept if it consists of letters, digits and
    underscores.
    """
    (folder / IMAGES).mkdir(parents=True)
    name_of_copy: dict[Path, str] = {}
    lines = []
    for pair in progress(pairs, "augment: write", len(pairs), "pair"):
        for path in (pair.before, pair.after):
            if path in name_of_copy:
                continue
            suffix = path.suffix.lower() if PLAIN_SUFFIX.fullmatch(path.suffix) else ""
            digest = digests.get(path) or sha256(path)
            name_of_copy[path] = f"{IMAGES}/{digest[:32]}{suffix}"
            shutil.copyfile(path, folder / name_of_copy[path])
        copies = {"before": name_of_copy[pair.before], "after": name_of_copy[pair.after]}
        row: dict[str, Any] = pair._asdict() | copies
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_atomic(folder / MANIFEST, "".join(lines))


def _make_report(name: str, kind: str, result: AugmentResult) -> AugmentReport:
    """Return the report of a dataset. Splits, reasons and models without an entry are left out."""
    pairs: dict[str, int] = {}
    references: dict[str, int] = {}
    for split in SPLITS:
        pairs_in_split = [pair for pair in result.pairs if pair.split == split]
        if pairs_in_split:
            pairs[split] = len(pairs_in_split)
            references[split] = sum(len(pair.captions) for pair in pairs_in_split)
    rejected = {reason: count for reason, count in sorted(result.rejected.items()) if count}
    return AugmentReport(
        stage="augment",
        rows_in=len(result.pairs) + sum(rejected.values()),
        rows_out=len(result.pairs),
        dataset=name,
        kind=kind,
        pairs=pairs,
        references=references,
        rejected=rejected,
        dropped_texts=dict(sorted(result.dropped_texts.items())),
        models={role: identity for role, identity in result.models.items() if identity},
        examples=result.examples,
    )
