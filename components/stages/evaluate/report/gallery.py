"""The page's gallery: captions of each pair with marks for right and wrong, references, scores, images.

A page shows one run, or two of which the second is compared with the first. Its images are inside it while they are
few, else files of the folder `images` beside it.
"""

import base64
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from m3diff.datasets.spec import DatasetSpec, check_licence
from m3diff.images.open import ImageError, load_image
from m3diff.images.saliency import outlined
from m3diff.records.errors import DataError
from m3diff.records.progress import progress
from m3diff.scoring.grammar import UNREADABLE, Clause, ParsedCaption, type_order
from m3diff.scoring.metrics import Metric, PairValue
from m3diff.scoring.pairs import EvalPair

PLAIN = ("double", "float", "int64", "int32", "bool")
"""Arrow types of a column that is one number to a pair."""
MAX_PX = 384
BASE64 = 4 / 3
"""Bytes in the page to a byte of an image."""

Mark = tuple[str, bool]
"""A part of a clause, and its verdict."""


class ImageRights(NamedTuple):
    """Permission of a dataset's licence to show its images, and its words; None: no condition."""

    show: bool
    note: str | None


def rights_of(spec: DatasetSpec) -> ImageRights:
    try:
        return ImageRights(True, check_licence(spec, "show"))
    except DataError:
        return ImageRights(False, f"{spec.licence.name}: {spec.licence.show.reason}")


class ImageStore:
    """Images by the digest of their content. Those of an earlier page are taken from the folder at once.

    Args:
        folder: `images` beside the page.
        limit: bytes of images that the page may hold; of more, all are files of the folder.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.held: dict[str, bytes] = {}
        self.size = 0.0
        self.is_inside = True
        for old in folder.glob("*.webp"):
            old.unlink()

    def add(self, content: bytes) -> str:
        """Keep a WebP image; returns its name for `url`."""
        name = hashlib.sha256(content).hexdigest()[:24]
        if name not in self.held:
            self.held[name] = content
            self.size += BASE64 * len(content)
        if not self.is_inside or self.size > self.limit:
            self.is_inside = False
            self.folder.mkdir(parents=True, exist_ok=True)
            for held, image in self.held.items():
                (self.folder / f"{held}.webp").write_bytes(image)
            self.held.clear()
        return name

    def url(self, name: str) -> str:
        """The page's link to an image, once all are added."""
        if self.is_inside:
            return "data:image/webp;base64," + base64.b64encode(self.held[name]).decode()
        return f"{self.folder.name}/{name}.webp"


def load_small(path: Path, sha256: bytes) -> Image.Image:
    """The image upright, in RGB, its longer side at most `MAX_PX`.

    Raises:
        DataError: the file is missing, is no image, or is not the one of this digest.
    """
    try:
        image = load_image(path, sha256)
    except ImageError as error:
        raise DataError(f"the report cannot show an image: {error}") from error
    image.thumbnail((MAX_PX, MAX_PX), Image.Resampling.LANCZOS)
    return image


def as_webp(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=88, method=4)
    return buffer.getvalue()


def read_saliency(path: Path) -> dict[str, np.ndarray]:
    """Maps of where the model looks for the difference, by pair id, [rows, columns], each of sum 1."""
    with np.load(path) as arrays:
        return {str(i): grid for i, grid in zip(arrays["ids"], arrays["maps"].astype(np.float32), strict=True)}


def draw_images(
    pairs: Iterable[EvalPair], rights: Mapping[str, ImageRights], saliency: Mapping[str, np.ndarray]
) -> Iterator[list[bytes | None] | None]:
    """WebP files of each pair in order, several drawn at once: before, after, and the after-image with the outlines of
    its saliency map, None where it has none; None where the licence does not let them be shown.

    Raises:
        DataError: an image is missing or changed since ingest.
    """

    def draw(pair: EvalPair) -> list[bytes | None] | None:
        if not rights[pair.dataset].show:
            return None
        after = load_small(pair.after, pair.after_sha256)
        before = load_small(pair.before, pair.before_sha256)
        grid = saliency.get(pair.id)
        return [as_webp(before), as_webp(after), None if grid is None else as_webp(outlined(after, grid))]

    with ThreadPoolExecutor() as pool:
        yield from pool.map(draw, pairs)


class RunPairs(NamedTuple):
    """The captions and scores of one run."""

    name: str
    pairs: Mapping[str, Mapping[str, EvalPair]]  # protocol -> pair id -> pair as the protocol scored it
    scores: Mapping[str, Mapping[str, Mapping[str, PairValue]]]  # protocol -> pair id -> column -> score
    parsed: Mapping[str, ParsedCaption]  # by pair id


def gallery(
    runs: Sequence[RunPairs],
    metrics: Mapping[str, Metric],
    rights: Mapping[str, ImageRights],
    saliency: Mapping[str, np.ndarray],
    store: ImageStore,
) -> dict[str, Any]:
    """All pairs of the first run, as the page's script reads them; every run has the same pairs.

    Raises:
        DataError: an image is missing or changed since ingest.
    """
    plain = [name for metric in metrics.values() for name, arrow in metric.columns.items() if arrow in PLAIN]
    headlines = {metric.headline for metric in metrics.values()}
    columns = sorted(plain, key=lambda name: name not in headlines)
    protocols = list(runs[0].pairs)
    pairs = {pair.id: pair for of in reversed(protocols) for pair in runs[0].pairs[of].values()}
    ordered = [pairs[i] for i in dict.fromkeys(i for of in protocols for i in runs[0].pairs[of])]
    drawn = progress(zip(ordered, draw_images(ordered, rights, saliency), strict=True), "evaluate: images", unit="pair")
    names = {
        pair.id: None if images is None else [None if content is None else store.add(content) for content in images]
        for pair, images in drawn
    }
    read = sum(not caption.unreadable for caption in runs[-1].parsed.values())
    return {
        "runs": [run.name for run in runs],
        "columns": columns,
        "protocols": protocols,
        "datasets": list(dict.fromkeys(pair.dataset for pair in ordered)),
        "types": sorted({kind for pair in ordered for kind in pair.change_types}, key=type_order),
        "graded": 2 * read > len(ordered),  # right and wrong can be told of most
        "saliency": bool(saliency),
        "pairs": [
            entry(pair, runs, columns, protocols)
            | {"images": (of := names[pair.id]) and [name and store.url(name) for name in of]}
            for pair in ordered
        ],
    }


def entry(pair: EvalPair, runs: Sequence[RunPairs], columns: list[str], protocols: list[str]) -> dict[str, Any]:
    of_runs = [next(run.pairs[of][pair.id] for of in protocols if pair.id in run.pairs[of]) for run in runs]

    def number(value: PairValue) -> float | None:
        return round(float(value), 5) if isinstance(value, int | float) else None

    return {
        "id": pair.id,
        "dataset": pair.dataset,
        "types": pair.change_types,
        "captions": [caption_of(mine, run.parsed.get(pair.id)) for mine, run in zip(of_runs, runs, strict=True)],
        "references": most_similar_first(of_runs[-1].prediction, pair.references),
        "scores": {
            str(place): [[number(run.scores[of][pair.id].get(column)) for column in columns] for run in runs]
            for place, of in enumerate(protocols)
            if pair.id in runs[0].pairs[of]
        },
    }


def caption_of(pair: EvalPair, parsed: ParsedCaption | None) -> dict[str, Any]:
    """The prediction clause by clause, each with its marks, no marks where no grammar reads it; how many changes it
    does not name; and its grade: 2 all right, 1 the types, 0."""
    if parsed is None:
        return {"clauses": [(pair.prediction, [])], "missed": 0, "grade": None}
    if parsed.says_no_change:
        clauses = [(pair.prediction, [("nothing changed", pair.is_distractor)])]
    else:
        read = zip(parsed.parts, parsed.predicted_clauses, strict=True)
        clauses = [(text, marks(parsed, clause)) for text, clause in read]
    missed = 0 if pair.is_distractor else parsed.true_types.total() - parsed.changes_found.type
    grade = 2 if parsed.right.exact else 1 if parsed.right.type else 0
    return {"clauses": clauses, "missed": missed, "grade": grade}


def marks(parsed: ParsedCaption, clause: Clause) -> list[Mark]:
    if clause.type == UNREADABLE:
        return [("not understood", False)]
    known, named, placed = parsed.agrees(clause)
    parts = (
        ("object", clause.object, named),
        ("place", clause.place, placed),
        ("change", clause.before or clause.after, parsed.says_change(clause)),
    )
    return [(clause.type, known), *((part, right) for part, said, right in parts if known and said)]


def most_similar_first(prediction: str, references: Iterable[str]) -> list[str]:
    """References, the one that shares most words with the prediction first."""
    words = set(prediction.casefold().split())

    def similarity(reference: str) -> float:
        theirs = set(reference.casefold().split())
        return len(words & theirs) / (len(words | theirs) or 1)

    return sorted(references, key=similarity, reverse=True)


def as_script(data: Any) -> str:
    """JSON that may stand inside a script element: no text of the data can end it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
