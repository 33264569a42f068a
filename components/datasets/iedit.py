"""IEdit (Image Editing Request): a photo, an edited version, and the request for the edit.

Page: https://github.com/airsplay/VisualRelationships (Tan et al., ACL 2019). The repository does not state a licence.

    {train,valid,test}.json    a list of records; the validation file is called valid
    images/                    all images, without subfolders

    {"img0": "Reddit.com_5fdtr1_5fdtr1.jpg", "img1": "Reddit.com_5fdtr1_dajgq1u.jpg", "uid": "Reddit_1012",
     "sents": ["make color brighter", "Increase the brightness of the image", "add the effect"]}

Records are identified by `uid`, because several records may show the same two images: the 495 test records have 446
image pairs. 55 image pairs in valid and one in train are also in test; validate finds them by comparing files. Images
are JPEG, PNG and a few GIF files, of which the first frame is used. `img0` and `img1` may differ in size.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m3diff.datasets import spec
from m3diff.datasets.files import enumerate_records, read_json

FILES = {"train": "train.json", "val": "valid.json", "test": "test.json"}
FIELDS = {"img0": str, "img1": str, "sents": list, "uid": str}


def read(root: Path, images: str = "images") -> Iterator[spec.Row]:
    """Yield one row per record of each split, in the order of the files."""

    def make_row(split: str, source: str, record: dict[str, Any]) -> spec.Row:
        uid = record["uid"]
        return spec.Row(
            name=uid,
            split=split,
            scene=uid,
            images=(f"{images}/{record['img0']}", f"{images}/{record['img1']}"),
            references=record["sents"],
            source=source,
        )

    for split, file in FILES.items():
        records = enumerate_records(file, read_json(root / file, list))
        yield from spec.make_rows(split, records, FIELDS, make_row)


def recognise(root: Path) -> bool:
    """Return whether the files have IEdit's records. Much other data has a train.json."""
    return spec.has_record(root, FILES.values(), FIELDS)


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
    licence=spec.UNSTATED_LICENCE,
    read=read,
    files=tuple(FILES.values()),
    recognise=recognise,
    task="edit",
    published=(PUBLISHED,),
    protocols=(spec.Protocol("test", published_pairs=PUBLISHED.test.pairs, source=LANGEVAL),),
)
