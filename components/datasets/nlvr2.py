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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m3diff.datasets.files import describe, read_lines
from m3diff.datasets.spec import DatasetSpec, Licence, Permission, Protocol, Row, as_rows, broken, merged

PARTS = {"train": "train", "val": "dev", "test": "test1"}
FIELDS = {"sentence": str, "label": str, "identifier": str}


def read(root: Path, images: str = "images") -> Iterator[Row]:
    """Yield a row per pair with a true sentence, at the place of its first; broken lines stand alone."""

    def row(split: str, where: str, line: dict[str, Any]) -> Row:
        part, name = PARTS[split], line["identifier"]
        if line["label"] not in ("True", "False"):
            return broken(split, where, f"label: expected 'True' or 'False', found {describe(line['label'])}")
        if not re.fullmatch(rf"{part}-\d+-\d+-\d+", name):
            return broken(split, where, f"identifier: expected {part}-<set>-<pair>-<sentence>, found {describe(name)}")
        pair = name.rpartition("-")[0]
        folder = f"{images}/{part}/{line['directory']}" if part == "train" else f"{images}/{part}"
        sides = f"{folder}/{pair}-img0.png", f"{folder}/{pair}-img1.png"
        true = [line["sentence"]] if line["label"] == "True" else []
        return Row(pair, split, pair.rpartition("-")[0], *sides, true, [], where)

    for split, part in PARTS.items():
        fields = FIELDS | ({"directory": int} if part == "train" else {})
        rows = as_rows(split, read_lines(root / f"data/{part}.json"), fields, row)
        yield from merged(each for each in rows if each.fault or each.references)


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
