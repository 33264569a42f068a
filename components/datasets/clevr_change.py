"""CLEVR-Change: synthetic scenes with one change, or with only a distractor (a small movement of camera or light).

Page: https://github.com/Seth-Park/RobustChangeCaptioning (Park et al., ICCV 2019). The repository states no licence.

    images/CLEVR_default_000123.png           before
    sc_images/CLEVR_semantic_000123.png       after: a change and a small camera movement
    nsc_images/CLEVR_nonsemantic_000123.png   after: only a small movement of camera or light
    change_captions.json      {"CLEVR_default_000123.png": ["the tiny cylinder changed to brown", ...], ...}
    no_change_captions.json   with the same keys: ["nothing has changed", ...]
    splits.json               {"train": [123, ...], "val": [...], "test": [...]}
    type_mapping.json         {"color": ["000123.png", ...], ...}; a pair with several changes is listed under each

Each number is one scene with two pairs: "000123.png" has a change, and "000123.png_n" only a distractor. The authors'
evaluation uses these names. The numbering has gaps (39,803 of 40,000 numbers exist), so image names are built from the
numbers in `splits.json`, and folders are never listed.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from m3diff.datasets import spec
from m3diff.datasets.files import read_json
from m3diff.records.errors import DataError, Fault
from m3diff.records.schemas import NO_CHANGE

FILES = ("change_captions.json", "no_change_captions.json", "splits.json", "type_mapping.json")
# For each of a scene's two pairs: the caption file, the beginning of the after image's path, the end of the pair's name
PAIRS_OF_SCENE = (
    ("change_captions.json", "sc_images/CLEVR_semantic", ""),
    ("no_change_captions.json", "nsc_images/CLEVR_nonsemantic", "_n"),
)


def read(root: Path) -> Iterator[spec.Row]:
    """Yield two rows per scene in the order of `splits.json`, then the captioned scenes that are not in any split."""
    captions_of_file = {file: read_json(root / file, dict) for file, _, _ in PAIRS_OF_SCENE}
    types_of_image = _read_types(root / "type_mapping.json")
    keys_in_splits: set[str] = set()

    def make_rows(split: str, scene: int) -> Iterator[spec.Row]:
        number = f"{scene:06d}"
        key = f"CLEVR_default_{scene:06d}.png"
        keys_in_splits.add(key)
        for file, after_prefix, suffix in PAIRS_OF_SCENE:
            fault = None
            if key not in captions_of_file[file]:
                fault = Fault("datasets.no_captions_of_scene", key="captions", file=file, value=key)
            yield spec.Row(
                name=f"{number}.png{suffix}",
                split=split,
                scene=number,
                images=(f"images/{key}", f"{after_prefix}_{number}.png"),
                references=captions_of_file[file].get(key, []),
                change_types=[NO_CHANGE] if suffix else types_of_image[f"{number}.png"],
                source=f"{file}, {key}",
                fault=fault,
            )

    yield from spec.rows_by_scene(root / "splits.json", make_rows)
    for file, _, suffix in PAIRS_OF_SCENE:
        for key in sorted(captions_of_file[file].keys() - keys_in_splits):
            fault = Fault("datasets.scene_without_split", key="split", file="splits.json")
            yield spec.broken_row(None, f"{file}, {key}", fault, key, key + suffix)


def recognise(root: Path) -> bool:
    """Return whether the folder has a file besides splits.json, which much other data has."""
    return spec.has_other_file(root, FILES, "splits.json")


def _read_types(path: Path) -> dict[str, list[str]]:
    """Return the change types by image name. Images that are not listed have an empty list."""
    types_of_image: dict[str, list[str]] = defaultdict(list)
    for change_type, names in read_json(path, dict).items():
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise DataError(spec.unexpected(change_type, "a list of image names", names).at(path=path))
        for name in names:
            types_of_image[name].append(change_type)
    return types_of_image


PUBLISHED = spec.Published(
    "clevr_change", "CLEVR-Change", spec.SplitCount(67_660), spec.SplitCount(3_976), spec.SplitCount(7_970)
)
SOURCE_OF_PROTOCOLS = "Seth-Park/RobustChangeCaptioning: evaluate.py"
IDS_WITH_CHANGE = r"\d+\.png"
CHANGE_TYPES = ("color", "material", "add", "drop", "move")
SPEC = spec.DatasetSpec(
    title="CLEVR-Change",
    page="https://github.com/Seth-Park/RobustChangeCaptioning",
    paper="Robust Change Captioning (Park et al., ICCV 2019)",
    licence=spec.UNSTATED_LICENCE,
    read=read,
    files=FILES,
    recognise=recognise,
    published=(PUBLISHED,),
    references=493_735,
    protocols=(
        spec.Protocol("total", published_pairs=PUBLISHED.test.pairs, source=SOURCE_OF_PROTOCOLS),
        spec.Protocol(
            "semantic",
            published_pairs=PUBLISHED.test.pairs // 2,
            ids=IDS_WITH_CHANGE,
            pairs="pairs with a change",
            source=SOURCE_OF_PROTOCOLS,
        ),
        spec.Protocol(
            "distractor",
            published_pairs=PUBLISHED.test.pairs // 2,
            ids=r"\d+\.png_n",
            pairs="pairs without a change",
            source=SOURCE_OF_PROTOCOLS,
        ),
        *(
            spec.Protocol(
                name, published_pairs=797, ids=IDS_WITH_CHANGE, change_types=(name,), source=SOURCE_OF_PROTOCOLS
            )
            for name in CHANGE_TYPES
        ),
    ),
)
