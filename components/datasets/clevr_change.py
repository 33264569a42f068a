"""CLEVR-Change: synthetic scenes, one change or only a distractor.

Page: https://github.com/Seth-Park/RobustChangeCaptioning (Park et al., ICCV 2019). The repository states no licence.

    images/CLEVR_default_000123.png           before
    sc_images/CLEVR_semantic_000123.png       after: a change, and a small move of the camera
    nsc_images/CLEVR_nonsemantic_000123.png   after: the small move of camera or light only
    change_captions.json      {"CLEVR_default_000123.png": ["the tiny cylinder changed to brown", ...], ...}
    no_change_captions.json   the same keys: ["nothing has changed", ...]
    splits.json               {"train": [123, ...], "val": [...], "test": [...]}
    type_mapping.json         {"color": ["000123.png", ...], ...}; a pair with several changes stands under each

One number is one scene and two pairs, "000123.png" and "000123.png_n", as the authors' evaluation names them. Numbers
have gaps (39,803 of 40,000), so names are built from the number and no folder is ever listed.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m3diff.datasets import spec
from m3diff.datasets.files import read_json
from m3diff.records.errors import DataError
from m3diff.records.schemas import NO_CHANGE

PAIRS = (  # the two pairs of a scene: file of captions, beginning of the image after, and end of the name
    ("change_captions.json", "sc_images/CLEVR_semantic", ""),
    ("no_change_captions.json", "nsc_images/CLEVR_nonsemantic", "_n"),
)


def read(root: Path) -> Iterator[spec.Row]:
    """Two rows per scene of `splits.json` in its order, then the captioned scenes that are in no split."""
    captions = {file: read_json(root / file, dict) for file, _, _ in PAIRS}
    types = _types(root / "type_mapping.json")
    seen: set[str] = set()

    def both(split: str, scene: int) -> Iterator[spec.Row]:
        number, key = f"{scene:06d}", f"CLEVR_default_{scene:06d}.png"
        seen.add(key)
        for file, after, end in PAIRS:
            sides, found = (f"images/{key}", f"{after}_{number}.png"), captions[file].get(key, [])
            kinds = [NO_CHANGE] if end else types[f"{number}.png"]
            fault = None if key in captions[file] else f"captions: {file} has no key {key!r}"
            yield spec.Row(f"{number}.png{end}", split, number, *sides, found, kinds, f"{file}, {key}", fault)

    yield from spec.by_scene(root / "splits.json", both)
    for file, _, end in PAIRS:
        for key in sorted(captions[file].keys() - seen):
            fault = "split: the scene is in no list of splits.json"
            yield spec.broken(None, f"{file}, {key}", fault, key, key + end)


def _types(path: Path) -> dict[str, list[str]]:
    types: dict[str, list[str]] = defaultdict(list)
    for change_type, names in read_json(path, dict).items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError(f"{path}: {change_type!r}: expected a list of image names")
        for name in names:
            types[name].append(change_type)
    return types


PUBLISHED = spec.Published(
    "clevr_change", "CLEVR-Change", spec.SplitCount(67_660), spec.SplitCount(3_976), spec.SplitCount(7_970)
)
SCORED: dict[str, Any] = {"metrics": spec.WITH_SPICE, "source": "Seth-Park/RobustChangeCaptioning: evaluate.py"}
SEMANTIC, KINDS = r"\d+\.png", ("color", "material", "add", "drop", "move")
SPEC = spec.DatasetSpec(
    title="CLEVR-Change",
    page="https://github.com/Seth-Park/RobustChangeCaptioning",
    paper="Robust Change Captioning (Park et al., ICCV 2019)",
    licence=spec.UNSTATED,
    read=read,
    files=("change_captions.json", "no_change_captions.json", "splits.json", "type_mapping.json"),
    published=(PUBLISHED,),
    references=493_735,
    protocols=(
        spec.Protocol("total", n=PUBLISHED.test.pairs, **SCORED),
        spec.Protocol("semantic", n=PUBLISHED.test.pairs // 2, ids=SEMANTIC, **SCORED),
        spec.Protocol("distractor", n=PUBLISHED.test.pairs // 2, ids=r"\d+\.png_n", **SCORED),
        *(spec.Protocol(kind, n=797, ids=SEMANTIC, change_types=(kind,), **SCORED) for kind in KINDS),
    ),
)
