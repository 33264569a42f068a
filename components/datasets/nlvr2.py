"""NLVR2: two photos side by side, with true and false sentences about them, as captions or as questions.

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
published, so the files are not compared with published counts.

With the option `questions: true`, each sentence is a question of its own, called by its identifier and answered by its
label, in place of the captions:

    Here is a statement describing these 2 images: One image shows two dogs. Is it true or false?

The wording is Mantis' (TIGER-AI-Lab/Mantis: data/nlvr2/prepare_conv_vqa_v5.py), without its options A and B. The answer
is True or False, as NLVR2's own evaluation compares it; The Cauldron asks for yes or no. A second entry with the same
root reads the captions, too. A sentence goes with up to four pairs of a set. `consistency` is the share of sentences
that are judged rightly about all of their pairs. `test2: true` reads data/test2.json, too, which was published later,
into the split test, with images in images/test2.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
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

SPLIT_OF_PART = {"train": "train", "dev": "val", "test1": "test"}
FILES = tuple(f"data/{part}.json" for part in SPLIT_OF_PART)
FIELDS = {"sentence": str, "label": str, "identifier": str}
TRUE_FALSE = "true/false"  # kind of the questions
QUESTION = "Here is a statement describing these 2 images: {sentence} Is it true or false?"


def read(root: Path, images: str = "images", questions: bool = False, test2: bool = False) -> Iterator[Row]:
    """Yield one row per pair that has a true sentence. Lines of a pair are merged, except broken ones.

    Args:
        images: folder of the images.
        questions: whether to yield one row per sentence instead: the question whether it is true.
        test2: whether data/test2.json is read, too, into the split test.
    """
    split_of_part = SPLIT_OF_PART | ({"test2": "test"} if test2 else {})
    make_row = _question_of_line if questions else _caption_of_line
    for part, split in split_of_part.items():
        fields = FIELDS | ({"directory": int} if part == "train" else {})
        lines = read_lines(root / f"data/{part}.json")
        rows = make_rows(split, lines, fields, partial(make_row, part, images))
        yield from rows if questions else merge_rows(row for row in rows if row.fault or row.references)


def _caption_of_line(part: str, images: str, split: str, source: str, line: dict[str, Any]) -> Row:
    """Return the row of a pair. A true sentence is its reference. After a false one, it has no reference."""
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


def _question_of_line(part: str, images: str, split: str, source: str, line: dict[str, Any]) -> Row:
    """Return the row of the question whether a sentence is true of its pair."""
    row = _caption_of_line(part, images, split, source, line)
    if row.fault:
        return row
    return replace(
        row,
        name=line["identifier"],
        image_set=row.name,
        question=QUESTION.format(sentence=line["sentence"]),
        references=[line["label"]],
        kind=TRUE_FALSE,
    )


def recognise(root: Path) -> bool:
    """Return whether the files have NLVR2's sentences. Much other data has a data/train.json."""
    return has_record(root, FILES, FIELDS)


WITH_CREDIT = Permission(
    "conditions", "sentences: credit the authors; the photos belong to their owners and are only for research"
)
CONSISTENCY = ("consistency",)


def _questions_of_part(part: str, count: int) -> Protocol:
    """Return the protocol with the published number of questions of a part of the test data."""
    return Protocol(
        f"{part}_questions",
        published_pairs=count,
        ids=f"{part}-.*",
        pairs=f"questions of {part}",
        kinds=(TRUE_FALSE,),
        metrics=CONSISTENCY,
        source="lil-lab/nlvr: nlvr2/eval/metrics.py",
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
    protocols=(
        Protocol("test", published_pairs=None, metrics=CONSISTENCY),
        _questions_of_part("test1", 6_967),
        _questions_of_part("test2", 6_970),
    ),
)
