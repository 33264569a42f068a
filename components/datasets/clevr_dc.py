"""CLEVR-DC: synthetic scenes under a large change of viewpoint; one change to a pair, or none.

Page: https://github.com/hsgkim/clevr-dc (Kim et al., ICCV 2021). The repository states no licence.

    bef/123.png, aft/123.png    before and after; the numbers are not padded, so names must not be sorted as text
    captions.json               {"123": ["the small cyan cube has been added", ...], ...}
    split.json                  {"train": [0, 1, ...], "val": [...], "test": [...]}

48,000 scenes are one pair each, a sixth of them without a change. There is no file of types and none of distractors;
which block of 8,000 numbers holds which action is not documented, so change types are left unknown. Ids are padded
("000123.png"), as in the evaluation of DIRL (tuyunbin/DIRL).
"""

from collections.abc import Iterator
from pathlib import Path

from m3diff.datasets import spec
from m3diff.datasets.files import read_json


def read(root: Path) -> Iterator[spec.Row]:
    """Yield a row per scene of `split.json` in its order, then the captioned scenes that are in no split."""
    captions = read_json(root / "captions.json", dict)
    seen: set[str] = set()

    def pair(split: str, scene: int) -> Iterator[spec.Row]:
        key, name = str(scene), f"{scene:06d}.png"
        seen.add(key)
        fault = None if key in captions else f"captions: captions.json has no key {key!r}"
        images = f"bef/{scene}.png", f"aft/{scene}.png"
        yield spec.Row(name, split, name, *images, captions.get(key, []), [], f"captions.json, {key}", fault)

    yield from spec.by_scene(root / "split.json", pair)
    rest, fault = sorted(captions.keys() - seen), "split: the scene is in no list of split.json"
    yield from (spec.broken(None, f"captions.json, {key}", fault, key, key) for key in rest)


PUBLISHED = spec.Published(
    "clevr_dc", "CLEVR-DC", spec.SplitCount(40_800), spec.SplitCount(2_400), spec.SplitCount(4_800)
)
DIRL = "tuyunbin/DIRL: utils/eval_utils_dc.py; pairs without a change among them"
SPEC = spec.DatasetSpec(
    title="CLEVR-DC",
    page="https://github.com/hsgkim/clevr-dc",
    paper="Agnostic Change Captioning with Cycle Consistency (Kim et al., ICCV 2021)",
    licence=spec.UNSTATED,
    read=read,
    files=("captions.json", "split.json"),
    published=(PUBLISHED,),
    protocols=(spec.Protocol("test", n=PUBLISHED.test.pairs, metrics=spec.WITH_SPICE, source=DIRL),),
)
