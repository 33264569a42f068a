"""NLVR2: two photos side by side, with true and false sentences about them. The true sentences are the captions.

Page: https://github.com/lil-lab/nlvr, folder nlvr2 (Suhr et al., ACL 2019). The annotations are CC BY 4.0; the photos
belong to their owners. `root` is that folder, with the images unpacked into it:

    data/train.json, data/dev.json, data/test1.json    one JSON object per line and sentence
    images/train/38/train-1-0-img0.png                 left image in train; `directory` is the subfolder
    images/dev/dev-850-0-img1.png                      right image in dev; dev and test1 have no subfolders

    {"sentence": "One image shows two dogs.", "left_url": ..., "right_url": ..., "label": "True", "identifier":
     "dev-850-0-0", "validation": ..., "writer": ..., "synset": ..., "query": ..., "extra_validations": ...}

An identifier has the form split-set-pair-sentence. Each pair of photos has one or two sentences. The true sentences
are the references of the pair. Pairs without a true sentence are left out, as in OneDiff and the speaker of
airsplay/VisualRelationships. `label` is a text, "True" or "False". The pairs of a set count as one scene. Not every
.png file contains PNG data, and about 5 % of the URLs are dead: ask the authors for the images, or increase
`validate.max_quarantined_share`. dev contains 6,982 sentences, 3,551 of them true. For train only "about 86,373" is
published, and for test1 nothing, so the files are not compared with published counts.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m3diff.datasets.files import read_lines
from m3diff.datasets.spec import (
    DatasetSpec,
    Licence,
    Permission,
    Protocol,
    Row,
    broken_row,
    has_record,
    make_rows,
    merge_rows,
    unexpected,
)

PARTS = {"train": "train", "val": "dev", "test": "test1"}
FILES = tuple(f"data/{part}.json" for part in PARTS.values())
FIELDS = {"sentence": str, "label": str, "identifier": str}


def read(root: Path, images: str = "images") -> Iterator[Row]:
    """Yield one row per pair that has a true sentence. Lines of a pair are merged, except broken ones."""

    def make_row(split: str, source: str, line: dict[str, Any]) -> Row:
        part = PARTS[split]
        identifier = line["identifier"]
        if line["label"] not in ("True", "False"):
            return broken_row(split, source, unexpected("label", "'True' or 'False'", line["label"]))
        if not re.fullmatch(rf"{part}-\d+-\d+-\d+", identifier):
            return broken_row(split, source, unexpected("identifier", f"{part}-<set>-<pair>-<sentence>", identifier))
        pair_name = identifier.rpartition("-")[0]
        set_name = pair_name.rpartition("-")[0]
        folder = f"{images}/{part}/{line['directory']}" if part == "train" else f"{images}/{part}"
        return Row(
            name=pair_name,
            split=split,
            scene=set_name,
            images=(f"{folder}/{pair_name}-img0.png", f"{folder}/{pair_name}-img1.png"),
            references=[line["sentence"]] if line["label"] == "True" else [],
            source=source,
        )

    for split, part in PARTS.items():
        fields = FIELDS | ({"directory": int} if part == "train" else {})
        rows = make_rows(split, read_lines(root / f"data/{part}.json"), fields, make_row)
        yield from merge_rows(row for row in rows if row.fault or row.references)


def recognise(root: Path) -> bool:
    """Return whether the files have NLVR2's sentences. Much other data has a data/train.json."""
    return has_record(root, FILES, FIELDS)


WITH_CREDIT = Permission(
    "conditions", "sentences: credit the authors; the photos belong to their owners and are only for research"
)
SPEC = DatasetSpec(
    title="NLVR2",
    page="https://github.com/lil-lab/nlvr",
    paper="A Corpus for Reasoning About Natural Language Grounded in Photographs (Suhr et al., ACL 2019)",
    licence=Licence(
        name="CC BY 4.0",
        url="https://creativecommons.org/licenses/by/4.0/",
        train=WITH_CREDIT,
        redistribute=Permission("conditions", "sentences: credit the authors; the licence does not cover the photos"),
        show=WITH_CREDIT,
    ),
    read=read,
    files=FILES,
    recognise=recognise,
    task="statement",
    protocols=(Protocol("test", published_pairs=None, metrics=("consistency",)),),
)
