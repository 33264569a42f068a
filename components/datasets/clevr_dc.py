"""CLEVR-DC: synthetic scenes whose two images have very different viewpoints, with at most one change per pair.

Page: https://github.com/hsgkim/clevr-dc (Kim et al., ICCV 2021). The repository does not state a licence.

    bef/123.png, aft/123.png    before and after; numbers are not zero-padded, so names must not be sorted as text
    captions.json               {"123": ["the small cyan cube has been added", ...], ...}
    split.json                  {"train": [0, 1, ...], "val": [...], "test": [...]}

Each of the 48,000 scenes is one pair, and a sixth of the pairs has no change. No file lists the change types or the
pairs without a change. Each block of 8,000 numbers contains one kind of change, but it is not documented which, so the
change types are left empty. Ids are zero-padded ("000123.png"), as in the evaluation of DIRL (tuyunbin/DIRL).
"""

from collections.abc import Iterator
from pathlib import Path

from m3diff.datasets import spec
from m3diff.datasets.files import read_json
from m3diff.records.errors import DataError, Fault


def read(root: Path) -> Iterator[spec.Row]:
    """Yield one row per scene in the order of `split.json`, then the captioned scenes that are not in any split."""
    captions = read_json(root / "captions.json", dict)
    keys_in_splits: set[str] = set()

    def make_rows(split: str, scene: int) -> Iterator[spec.Row]:
        key = str(scene)
        name = f"{scene:06d}.png"
        keys_in_splits.add(key)
        fault = None
        if key not in captions:
            fault = Fault("datasets.no_captions_of_scene", key="captions", file="captions.json", value=key)
        yield spec.Row(
            name=name,
            split=split,
            scene=name,
            images=(f"bef/{scene}.png", f"aft/{scene}.png"),
            references=captions.get(key, []),
            source=f"captions.json, {key}",
            fault=fault,
        )

    yield from spec.rows_by_scene(root / "split.json", make_rows)
    for key in sorted(captions.keys() - keys_in_splits):
        fault = Fault("datasets.scene_without_split", key="split", file="split.json")
        yield spec.broken_row(None, f"captions.json, {key}", fault, key, key)


def recognise(root: Path) -> bool:
    """Return whether the captions describe numbered scenes. Much other data has a captions.json.

    Without readable captions, the folders of the images decide.
    """
    try:
        captions = read_json(root / "captions.json", dict)
    except DataError:
        return (root / "bef").is_dir() and (root / "aft").is_dir()
    return bool(captions) and all(key.isdecimal() for key in captions)


PUBLISHED = spec.Published(
    "clevr_dc", "CLEVR-DC", spec.SplitCount(40_800), spec.SplitCount(2_400), spec.SplitCount(4_800)
)
DIRL = "tuyunbin/DIRL: utils/eval_utils_dc.py; pairs without a change among them"
SPEC = spec.DatasetSpec(
    title="CLEVR-DC",
    page="https://github.com/hsgkim/clevr-dc",
    paper="Agnostic Change Captioning with Cycle Consistency (Kim et al., ICCV 2021)",
    licence=spec.UNSTATED_LICENCE,
    read=read,
    files=("captions.json", "split.json"),
    recognise=recognise,
    published=(PUBLISHED,),
    protocols=(spec.Protocol("test", published_pairs=PUBLISHED.test.pairs, source=DIRL),),
)
