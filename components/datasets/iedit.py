"""IEdit (Image Editing Request): a photo, its edit, and the request that leads from one to the other.

Page: https://github.com/airsplay/VisualRelationships (Tan et al., ACL 2019). The repository states no licence.

    {train,valid,test}.json    a list of records; the middle file is called valid
    images/                    all images, flat

    {"img0": "Reddit.com_5fdtr1_5fdtr1.jpg", "img1": "Reddit.com_5fdtr1_dajgq1u.jpg", "uid": "Reddit_1012",
     "sents": ["make color brighter", "Increase the brightness of the image", "add the effect"]}

The key is `uid`, not the pair: 495 test records are 446 pairs. 55 valid pairs are also in test, one train pair too,
which validate finds by their files. Images are jpg, png and a few gif (the first frame counts), and `img0` and `img1`
differ in size.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m3diff.datasets import spec
from m3diff.datasets.files import numbered, read_json

FILES = {"train": "train.json", "val": "valid.json", "test": "test.json"}
FIELDS = {"img0": str, "img1": str, "sents": list, "uid": str}


def read(root: Path, images: str = "images") -> Iterator[spec.Row]:

    def row(split: str, where: str, record: dict[str, Any]) -> spec.Row:
        uid, pair = record["uid"], (f"{images}/{record['img0']}", f"{images}/{record['img1']}")
        return spec.Row(uid, split, uid, *pair, record["sents"], [], where)

    for split, file in FILES.items():
        yield from spec.as_rows(split, numbered(file, read_json(root / file, list)), FIELDS, row)


PUBLISHED = spec.Published(
    "iedit",
    "IEdit",
    spec.SplitCount(3_061, 3_061, image_pairs=2_507),
    spec.SplitCount(383, 1_149, repeated=4, image_pairs=357),
    spec.SplitCount(495, 1_485, image_pairs=446),
)
LANGEVAL = "airsplay/VisualRelationships: langeval; keyed by uid"
SPEC = spec.DatasetSpec(
    title="IEdit",
    page="https://github.com/airsplay/VisualRelationships",
    paper="Expressing Visual Relationships via Language (Tan et al., ACL 2019)",
    licence=spec.UNSTATED,
    read=read,
    files=tuple(FILES.values()),
    task="edit",
    published=(PUBLISHED,),
    protocols=(spec.Protocol("test", n=PUBLISHED.test.pairs, metrics=spec.WITH_SPICE, source=LANGEVAL),),
)
