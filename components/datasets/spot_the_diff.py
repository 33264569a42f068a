"""Spot-the-Diff: two frames of a surveillance camera, with one sentence for each change that an annotator saw.

Page: https://github.com/harsh19/spot-the-diff (Jhamtani and Berg-Kirkpatrick, EMNLP 2018). The repository does not
state a licence. `root` is the repository's folder `data`, with the images unpacked into it:

    annotations/{train,val,test}.json   a list of records
    resized_images/235.png              before, 224x224 (the original sizes are a separate download: option `images`)
    resized_images/235_2.png            after

    {"img_id": "235", "sentences": ["the dark grey suv is gone in the photo on the right", ...]}

An `img_id` may occur in several records of a split (958 additional records in train). The references of a pair are the
sentences of all its records, in order. 66 sentences are empty. They are kept, because 7 test pairs have no other
references and are included in all published scores. The release has 12,562 records of 11,329 pairs, not the 13,192
stated in papers.

Papers score captions in one of two ways. The protocol single-change compares one sentence per pair with each reference.
The protocol multi-change compares a paragraph with all references of the pair, joined and cut off after 60 words.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m3diff.datasets import spec
from m3diff.datasets.files import enumerate_records, read_json
from m3diff.records.schemas import SPLITS

FILES = ("annotations/train.json", "annotations/val.json", "annotations/test.json")
FIELDS = {"img_id": str, "sentences": list}


def read(root: Path, images: str = "resized_images", suffix: str = ".png") -> Iterator[spec.Row]:
    """Yield one row per `img_id` in a split, at the position of its first record. Broken records are not merged."""

    def make_row(split: str, source: str, record: dict[str, Any]) -> spec.Row:
        name = f"{record['img_id']}.png"
        image = f"{images}/{record['img_id']}"
        return spec.Row(
            name=name,
            split=split,
            scene=name,
            images=(f"{image}{suffix}", f"{image}_2{suffix}"),
            references=record["sentences"],
            source=source,
        )

    for split in SPLITS:
        file = f"annotations/{split}.json"
        records = enumerate_records(file, read_json(root / file, list))
        rows = spec.make_rows(split, records, FIELDS, make_row)
        yield from spec.merge_rows(rows, f"{file}, record ")


def recognise(root: Path) -> bool:
    """Return whether the files have Spot-the-Diff's records. Much other data has an annotations/train.json."""
    return spec.has_record(root, FILES, FIELDS)


PUBLISHED = spec.Published(
    "spot_the_diff",
    "Spot-the-Diff",
    spec.SplitCount(8_566, 17_676, empty=53, repeated=3, wordless=37, records=9_524),
    spec.SplitCount(1_493, 3_310, empty=6, wordless=4, records=1_634),
    spec.SplitCount(1_270, 2_107, empty=7, wordless=7, records=1_404),
)
CLIP4IDC = "sushizixin/CLIP4IDC: gt/spot_total_change_captions_reformat.json; OmniDiff (arXiv 2503.11093)"
SPEC = spec.DatasetSpec(
    title="Spot-the-Diff",
    page="https://github.com/harsh19/spot-the-diff",
    paper="Learning to Describe Differences Between Pairs of Similar Images (Jhamtani and others, EMNLP 2018)",
    licence=spec.UNSTATED_LICENCE,
    read=read,
    files=FILES,
    recognise=recognise,
    published=(PUBLISHED,),
    protocols=(
        spec.Protocol("single-change", published_pairs=PUBLISHED.test.pairs, source=CLIP4IDC),
        spec.Protocol(
            "multi-change",
            published_pairs=PUBLISHED.test.pairs,
            references="joined",
            max_words=60,
            source="tuyunbin/CARD: spot-the-diff",
        ),
    ),
)
