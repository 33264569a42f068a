"""NLVR2: two photos side by side, and sentences that are true or false of them. The true ones are statements.

Page: https://github.com/lil-lab/nlvr, folder nlvr2 (Suhr et al., ACL 2019). Annotations CC BY 4.0; the photos belong to
their owners. `root` is that folder, with the images unpacked into it:

    data/train.json, data/dev.json, data/test1.json    one JSON object a line, a line for each sentence
    images/train/38/train-1-0-img0.png                 left; train in the folder that `directory` names
    images/dev/dev-850-0-img1.png                      right; dev and test1 without one

    {"sentence": "One image shows two dogs.", "left_url": ..., "right_url": ..., "label": "True", "identifier":
     "dev-850-0-0", "validation": ..., "writer": ..., "synset": ..., "query": ..., "extra_validations": ...}

An identifier is split-set-pair-sentence. A pair of photos has one sentence or two; its references are the true ones.
A pair without one is left out, as by OneDiff and by the speaker of airsplay/VisualRelationships. `label` is text, and
"False" is no true one. Pairs of one set share a scene. Not every .png is a PNG inside, and about 5 % of the addresses
are dead: ask the authors for the images, or raise `validate.max_quarantined_share`. dev holds 6,982 sentences, 3,551 of
them true; of train only "about 86,373" is known, and nothing of test1, so no count is held against the files.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from m3diff.datasets.files import describe
from m3diff.datasets.spec import DatasetSpec, Licence, Permission, Protocol, Row, broken, fault_in
from m3diff.datasets.tables import read_json_lines

PARTS = {"train": "train", "val": "dev", "test": "test1"}
FIELDS = {"sentence": str, "label": str, "identifier": str}


def read(root: Path, images: str = "images") -> Iterator[Row]:
    """Yield a row per pair with a true sentence, at the place of its first; broken lines stand alone."""
    for split, part in PARTS.items():
        merged: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        for where, record, fault in read_json_lines(root / f"data/{part}.json"):
            if fault := fault or _fault(record, part):
                yield broken(split, where, fault)
            elif record["label"] == "True":
                merged.setdefault(record["identifier"].rpartition("-")[0], []).append((where, record))
        for pair, found in merged.items():
            first = found[0][1]
            folder = f"{images}/{part}/{first['directory']}" if part == "train" else f"{images}/{part}"
            sides = f"{folder}/{pair}-img0.png", f"{folder}/{pair}-img1.png"
            texts = [record["sentence"] for _, record in found]
            source = " and ".join(where for where, _ in found)
            yield Row(pair, split, pair.rpartition("-")[0], *sides, texts, [], source, raw_rows=len(found))


def _fault(record: Mapping[str, Any], part: str) -> str | None:
    """The fault of a line of a split's file."""
    if fault := fault_in(record, FIELDS | ({"directory": int} if part == "train" else {})):
        return fault
    if record["label"] not in ("True", "False"):
        return f"label: expected 'True' or 'False', found {describe(record['label'])}"
    if not re.fullmatch(rf"{part}-\d+-\d+-\d+", record["identifier"]):
        return f"identifier: expected {part}-<set>-<pair>-<sentence>, found {describe(record['identifier'])}"
    return None


CITED = Permission("conditions", "sentences: credit the authors; photos: their owners', research alone")
SPEC = DatasetSpec(
    title="NLVR2",
    page="https://github.com/lil-lab/nlvr",
    paper="A Corpus for Reasoning About Natural Language Grounded in Photographs (Suhr et al., ACL 2019)",
    licence=Licence(
        name="CC BY 4.0",
        url="https://creativecommons.org/licenses/by/4.0/",
        train=CITED,
        redistribute=Permission("conditions", "sentences: credit the authors; the photos are not in it"),
        show=CITED,
    ),
    read=read,
    files=tuple(f"data/{part}.json" for part in PARTS.values()),
    task="statement",
    protocols=(Protocol("test", n=None),),
)
